"""Token streams: documents tokenized into files, for the training set and the validation set.

    files ─► documents ─► training | validation documents ─► train.tokens, valid.tokens

Memory usage is a few megabytes, independent of the length of documents and streams.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import UInt

from meshpar.data.split import DocumentSplit
from meshpar.data.text import Document, File, Reading, digest
from meshpar.data.tokens import Tokenizer, token_dtype
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import LockedError, check_name, locked, read_json

SIDES = ("train", "valid")
COUNTS = ("documents", "bytes", "tokens")
_BATCH_BYTES = 4_000_000
"""Bytes of text per call of a tokenizer: enough for its threads."""
_IN_MEMORY_BYTES = 64_000_000
"""Maximum size of a stream in memory. Longer streams are mapped from a file."""
_CONTEXT_CHARS = 1000
"""Number of characters before and after a split whose tokens must not change."""
_MAX_SPLITS = 64
"""Maximum number of split positions to try."""
_BEAT_S = 5.0
"""Seconds between two signs of life of the process that writes to the cache."""
_STALL_S = 60.0
"""Seconds without a sign of life after which waiting processes stop with an error."""
_FORMAT = 3
"""Version of the cache format. Part of the folder name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
    """Tokens of the training set and the validation set. A separator follows each document."""

    train: UInt[np.ndarray, " tokens"]
    valid: UInt[np.ndarray, " tokens"]
    fingerprint: str
    """Hash of the tokenizer, the training tokens and the validation tokens."""
    info: dict[str, Any]
    """`held_out`, `skipped`, and the number of `documents`, `bytes` and `tokens` of each set, for JSON."""


def token_streams(
    reading: Reading, tokenizer: Tokenizer, *, valid_fraction: float, cache: str | None = None
) -> Streams:
    """Split and tokenize documents.

    Args:
      reading: the documents.
      tokenizer: the tokenizer.
      valid_fraction: approximate fraction of the documents in the validation set.
      cache: a folder for the result, or None for a temporary file. An existing result is verified and reused. If
        processes need the same result at the same time, the first process writes it and the other processes wait. If
        it is stopped for a minute, they raise an error.
    """
    with writing("`TextData.cache`", cache), contextlib.ExitStack() as stack:
        if cache is not None:
            return _open(_cached(cache, reading, tokenizer, valid_fraction), tokenizer)
        files = [stack.enter_context(spooled()) for _ in SIDES]
        return _mapped_streams(files, tokenizer, _write(files, reading, tokenizer, valid_fraction))


@contextlib.contextmanager
def writing(where: str, folder: str | None = None) -> Iterator[None]:
    """Raise a `MeshparError` for each OSError while tokens are written to `folder` (None: to temporary files)."""
    try:
        yield
    except OSError as error:
        folder, fix = folder or tempfile.gettempdir(), "free disk space, or set `cache` or TMPDIR to another folder"
        reason = f"the system reports: {error.strerror}"
        raise problem(where, f"write tokens to {folder}", reason, fix, "not-writable") from error


def _write(files: Sequence[IO[bytes]], reading: Reading, tokenizer: Tokenizer, valid_fraction: float) -> dict[str, Any]:
    """Write the tokens of both sets to files without headers, and return `Streams.info`."""
    split, dtype = DocumentSplit(valid_fraction), token_dtype(tokenizer.vocab_size)
    separator = np.array([] if tokenizer.separator_id is None else [tokenizer.separator_id], dtype=dtype).tobytes()
    info: dict[str, Any] = {}
    while not split.settled:
        counts = [dict.fromkeys(COUNTS, 0) for _ in files]
        for file in files:
            file.seek(0)
            file.truncate()
        for batch in _batched(_cut_at_token_boundaries(split(reading), tokenizer)):
            encoded = tokenizer.encode_many([document.text for document, _ in batch])
            for (document, is_held_out), ids in zip(batch, encoded, strict=True):
                assert ids.max(initial=0) < tokenizer.vocab_size
                file, count = files[is_held_out], counts[is_held_out]
                end = b"" if document.goes_on else separator
                file.write(ids.astype(dtype, copy=False).tobytes())
                file.write(end)
                count["documents"] += not document.goes_on
                count["bytes"] += document.num_bytes
                count["tokens"] += len(ids) + len(end) // dtype.itemsize
        info = {"held_out": split.held_out, "skipped": len(reading.skipped), **dict(zip(SIDES, counts, strict=True))}
    for file in files:
        file.flush()
    return info


def _mapped_streams(files: Sequence[IO[bytes]], tokenizer: Tokenizer, info: dict[str, Any]) -> Streams:
    dtype = token_dtype(tokenizer.vocab_size)
    train, valid = (mapped(file, info[side]["tokens"], dtype) for file, side in zip(files, SIDES, strict=True))
    digest = hashlib.blake2b(f"text {tokenizer.name} {tokenizer.separator_id}".encode(), digest_size=16)
    for tokens in (train, valid):
        digest.update(f" {len(tokens)} {tokens.dtype} ".encode())
        digest.update(tokens.data)
    return Streams(train=train, valid=valid, fingerprint=digest.hexdigest(), info=info)


def _cut_at_token_boundaries(
    documents: Iterable[tuple[Document, bool]], tokenizer: Tokenizer
) -> Iterator[tuple[Document, bool]]:
    """Move the cuts between parts of long documents to token boundaries.

    If no boundary is found in a part, the next part is appended to it.
    """
    pending = ""
    for document, is_held_out in documents:
        if not (pending or document.goes_on):
            yield document, is_held_out
            continue
        text = pending + document.text
        end = _token_boundary(text, tokenizer) if document.goes_on else len(text)
        pending = text[end:]
        if end or not document.goes_on:
            yield document.part(text[:end], goes_on=document.goes_on), is_held_out


def _token_boundary(text: str, tokenizer: Tokenizer) -> int:
    """Return a position near the end of a text where a split does not change the tokens, or 0."""
    last = len(text) - _CONTEXT_CHARS
    # Try boundaries of words first.
    positions = sorted(
        range(max(last - _CONTEXT_CHARS, 1), last), key=lambda i: (text[i].isspace() == text[i - 1].isspace(), -i)
    )
    for i in positions[:_MAX_SPLITS]:
        # Repeated characters may be tokenized in groups of fixed size. A split inside such a group changes the tokens
        # for at least one context length.
        contexts = [(text[max(i - n, 0) : i], text[i : i + n]) for n in (_CONTEXT_CHARS, _CONTEXT_CHARS - 1)]
        if all(_is_token_boundary(left, right, tokenizer) for left, right in contexts):
            return i
    return 0


def _is_token_boundary(left: str, right: str, tokenizer: Tokenizer) -> bool:
    """Return whether `left` and `right` have tokens, and `left + right` has the same tokens in this order."""
    together, *separate = tokenizer.encode_many([left + right, left, right])
    return all(map(len, separate)) and np.array_equal(together, np.concatenate(separate))


def _batched(documents: Iterable[tuple[Document, bool]]) -> Iterator[list[tuple[Document, bool]]]:
    batch: list[tuple[Document, bool]] = []
    num_bytes = 0
    for document, is_held_out in documents:
        batch.append((document, is_held_out))
        num_bytes += document.num_bytes
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def spooled() -> IO[bytes]:
    """Return a temporary file that stays in memory until it exceeds `_IN_MEMORY_BYTES`."""
    return tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)


def mapped(file: IO[bytes], num_tokens: int, dtype: np.dtype) -> UInt[np.ndarray, " tokens"]:
    """Return the tokens of a `spooled` file. Large files are memory-mapped, and stay readable after closing."""
    if num_tokens * dtype.itemsize > _IN_MEMORY_BYTES:
        return np.memmap(file, dtype=dtype, mode="r", shape=(num_tokens,))
    file.seek(0)
    return np.frombuffer(file.read(), dtype=dtype)


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of zeros. Large arrays are mapped from a temporary file."""
    if math.prod(shape) * np.dtype(dtype).itemsize <= _IN_MEMORY_BYTES:
        return np.zeros(shape, dtype)
    with tempfile.TemporaryFile() as file:
        return np.asarray(np.memmap(file, dtype=dtype, mode="w+", shape=shape))


# ---- Cache -----------------------------------------------------------------------------------------------------------


def _cached(cache: str, reading: Reading, tokenizer: Tokenizer, valid_fraction: float) -> Path:
    """Return the folder with the streams. It is written under a temporary name and renamed when it is complete."""
    where, fix = "`TextData.cache`", "use the path of a folder, or cache=None"
    if not isinstance(cache, str) or not cache:
        raise problem(where, f"store tokens in {cache!r}", "it is not the path of a folder", fix, "wrong-type")
    root = Path(os.path.expanduser(cache))
    check_name(root, where, fix)
    root.mkdir(parents=True, exist_ok=True)
    before = [_file_state(file) for file in reading.files]
    folder = root / _key(reading, tokenizer, valid_fraction)
    if folder.is_dir():
        return folder
    with _locked(root / f".{folder.name}.lock") as has_lock:
        if folder.is_dir():
            return folder
        for stale in root.glob(f"{folder.name}.*.partial") if has_lock else ():  # of a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=root))
        try:
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context((partial / f"{side}.tokens").open("w+b")) for side in SIDES]
                streams = _mapped_streams(files, tokenizer, _write(files, reading, tokenizer, valid_fraction))
                for file in files:
                    os.fsync(file.fileno())
            (partial / "about.json").write_text(json.dumps({**streams.info, "fingerprint": streams.fingerprint}))
            for text_file, state in zip(reading.files, before, strict=True):
                if _file_state(text_file) != state:
                    reason, fix = "it was modified while it was read", "run again when no process writes to the file"
                    raise problem(f"{text_file.path}", "store its tokens", reason, fix, "conflict")
            if has_lock or not folder.is_dir():
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _key(reading: Reading, tokenizer: Tokenizer, valid_fraction: float) -> str:
    options = _FORMAT, tokenizer.name, tokenizer.separator_id, reading.text_field, reading.max_bytes, valid_fraction
    key = hashlib.blake2b(repr(options).encode(), digest_size=16)
    with ThreadPoolExecutor() as pool:
        for file, content in zip(reading.files, pool.map(digest, reading.files), strict=True):
            key.update(repr((file.name, file.named, content)).encode())
    return key.hexdigest()


def _file_state(file: File) -> tuple[int, int]:
    status = file.path.stat()
    return status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Wait for the lock of a folder of the cache while its holder is alive. Yield False without locks."""
    with contextlib.ExitStack() as stack:
        try:
            has_lock = stack.enter_context(locked(path, wait_s=_STALL_S, beat_s=_BEAT_S))
        except LockedError as error:
            reason = f"{error.holder} is writing the same tokens and has not been active for {_STALL_S:g} s"
            fix = "continue or end that process, or use cache=None"
            raise problem("`TextData.cache`", f"write tokens to {path.parent}", reason, fix, "conflict") from None
        yield has_lock


def _open(folder: Path, tokenizer: Tokenizer) -> Streams:
    """Open the streams in a folder of the cache, and compare all tokens with their fingerprint."""
    where, requested, fix = "`TextData.cache`", f"read {folder}", f"delete {folder}; the next run creates it again"
    info = read_json(folder / "about.json", where, fix, requested=requested)
    try:
        expected = info.pop("fingerprint")
        with (folder / "train.tokens").open("rb") as train, (folder / "valid.tokens").open("rb") as valid:
            streams = _mapped_streams([train, valid], tokenizer, info)
        reason = "" if streams.fingerprint == expected else "its tokens do not match about.json"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise problem(where, requested, f"it is damaged ({reason})", fix, "damaged-file")
    return streams
