"""Token streams: documents tokenized into files, for the training set and the validation set.

    files ─► documents ─► training | validation documents ─► train.tokens, valid.tokens

Memory usage is a few megabytes, independent of the length of documents and streams.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import UInt

from meshpar.data.split import DocumentSplit
from meshpar.data.text import Document, File, Reading, digest
from meshpar.data.token_file import TokenFile, pieces
from meshpar.data.tokens import Tokenizer, token_dtype
from meshpar.sharding.errors import MeshparError, is_int, problem
from meshpar.sharding.host_resources import check_name, open_no_link, read_json

SIDES = ("train", "valid")
COUNTS = ("documents", "bytes", "tokens")
_BATCH_BYTES = 4_000_000
"""Bytes of text per call of a tokenizer: enough for its threads."""
_IN_MEMORY_BYTES = 64_000_000
"""Maximum size of a stream in memory. Longer streams without a cache are stored in a temporary file."""
_CONTEXT_CHARS = 1000
"""Number of characters on both sides of a cut that must tokenize as they do without the cut."""
_MAX_CUTS = 64
"""Number of positions to try for a cut."""
_PIECE_TOKENS = 1 << 20
"""Number of tokens per hash update."""
_FORMAT = 3
"""Version of the cache format. Part of the folder name."""
_LOCK_LIMIT_S = 45.0
"""Time without a heartbeat after which waiting for a lock fails."""
_BEAT_S = 5.0
"""Interval of the heartbeat of the process that writes to the cache."""
_POLL_S = 0.1
_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
    """Tokens of the training set and the validation set. A separator follows each document."""

    train: UInt[np.ndarray, " tokens"] | TokenFile
    valid: UInt[np.ndarray, " tokens"] | TokenFile
    fingerprint: str
    """Hash of the tokenizer, the training tokens and the validation tokens."""
    info: dict[str, Any]
    """`held_out`, `skipped`, and the number of `documents`, `bytes` and `tokens` of each set, for JSON."""


def token_streams(
    reading: Reading,
    tokenizer: Tokenizer,
    *,
    valid_fraction: float,
    cache: str | None = None,
) -> Streams:
    """Split and tokenize documents.

    Args:
      reading: the documents.
      tokenizer: the tokenizer.
      valid_fraction: approximate fraction of the documents in the validation set.
      cache: a folder for the result, or None for a temporary file. An existing result is verified and reused. If
        processes need the same result at the same time, the first process writes it and the other processes wait.

    Raises:
      MeshparError: errors of `Reading` and `DocumentSplit`, a full disk, a damaged cache, or a lock without a
        heartbeat.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        if cache is not None:
            return _open(_cached(_cache_folder(cache), reading, tokenizer, valid_fraction), tokenizer)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(spooled()) for _ in SIDES]
            info = _write(files, reading, tokenizer, valid_fraction)
            train, valid = (mapped(file, info[side]["tokens"], dtype) for file, side in zip(files, SIDES, strict=True))
            return Streams(train=train, valid=valid, fingerprint=_digests(tokenizer, train, valid)[-1], info=info)
    except OSError as error:
        folder = tempfile.gettempdir() if cache is None else cache
        fix = "free disk space, or set `cache` to a writable folder with enough space"
        reason = f"the system reports: {error.strerror}"
        raise problem("`TextData.cache`", f"write tokens to {folder}", reason, fix, "not-writable") from error


def _write(files: Iterable[IO[bytes]], reading: Reading, tokenizer: Tokenizer, valid_fraction: float) -> dict[str, Any]:
    """Write the tokens of both sets to files without headers, and return `Streams.info`."""
    files, split = list(files), DocumentSplit(valid_fraction)
    dtype = token_dtype(tokenizer.vocab_size)
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
                if len(ids) and (largest := int(ids.max())) >= tokenizer.vocab_size:
                    reason = f"the tokenizer returns id {largest}, and its vocabulary has {tokenizer.vocab_size} tokens"
                    fix = "use the tokenizer.json of the model's release"
                    raise problem(f"document `{document.name}`", "tokenize it", reason, fix, "damaged-file")
                file, count = files[is_held_out], counts[is_held_out]
                end = b"" if document.goes_on else separator
                file.write(ids.astype(dtype, copy=False).tobytes())
                file.write(end)
                count["documents"] += not document.goes_on
                count["bytes"] += document.num_bytes
                count["tokens"] += len(ids) + len(end) // dtype.itemsize
        info = {"held_out": split.how, "skipped": len(reading.skipped), **dict(zip(SIDES, counts, strict=True))}
    for file in files:
        file.flush()
    return info


def _digests(tokenizer: Tokenizer, *streams: UInt[np.ndarray, " tokens"] | TokenFile) -> list[str]:
    """Return, for each stream, the hash of the tokenizer, the earlier streams and this stream."""
    digest = hashlib.blake2b(f"text {tokenizer.name} {tokenizer.separator_id}".encode(), digest_size=16)
    digests = []
    for tokens in streams:
        digest.update(f" {len(tokens)} {tokens.dtype} ".encode())
        for piece in pieces(tokens, _PIECE_TOKENS):
            digest.update(np.ascontiguousarray(piece).data)
        digests.append(digest.hexdigest())
    return digests


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
    """Return a position near the end of a text where a cut does not change the tokens, or 0."""
    last = len(text) - _CONTEXT_CHARS
    # Boundaries of words first.
    positions = sorted(
        range(max(last - _CONTEXT_CHARS, 1), last), key=lambda i: (text[i].isspace() == text[i - 1].isspace(), -i)
    )
    for i in positions[:_MAX_CUTS]:
        # Repeated characters may be tokenized in groups of fixed size, which do not fit both context lengths.
        contexts = [(text[max(i - n, 0) : i], text[i : i + n]) for n in (_CONTEXT_CHARS, _CONTEXT_CHARS - 1)]
        if all(_is_token_boundary(left, right, tokenizer) for left, right in contexts):
            return i
    return 0


def _is_token_boundary(left: str, right: str, tokenizer: Tokenizer) -> bool:
    """Return whether both texts have tokens, and the same tokens separately and together."""
    together, *separate = tokenizer.encode_many([left + right, left, right])
    return all(map(len, separate)) and np.array_equal(together, np.concatenate(separate))


def _batched(documents: Iterable[tuple[Document, bool]]) -> Iterator[list[tuple[Document, bool]]]:
    """Group the documents into batches of about `_BATCH_BYTES`."""
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
    """Return the tokens of a `spooled` file. Large files are mapped into memory, which keeps them after closing."""
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


def _cache_folder(cache: str) -> Path:
    where, requested, fix = "`TextData.cache`", f"store tokens in {cache!r}", "use the path of a folder, or cache=None"
    if cache == "":
        reason = "an empty path is ambiguous"
        raise problem(where, requested, reason, f'{fix}; "." is the current folder', "out-of-range")
    try:
        folder = Path(cache).expanduser()
    except (TypeError, RuntimeError) as error:  # not a string, or the home of an unknown user
        raise problem(where, requested, f"it is not a path ({error})", fix, "wrong-type") from error
    check_name(folder, where, fix)
    return folder


def _cached(cache: Path, reading: Reading, tokenizer: Tokenizer, valid_fraction: float) -> Path:
    """Return the folder with the streams. It is written under a temporary name and renamed when it is complete."""
    cache.mkdir(parents=True, exist_ok=True)
    before = [_file_state(file) for file in reading.files]
    folder = cache / _key(reading, tokenizer, valid_fraction)
    if folder.is_dir():
        return folder
    with _locked(cache / f".{folder.name}.lock") as has_lock:
        if folder.is_dir():
            return folder
        for stale in cache.glob(f"{folder.name}.*.partial") if has_lock else ():  # of a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=cache))
        try:
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context((partial / f"{side}.tokens").open("wb")) for side in SIDES]
                info = _write(files, reading, tokenizer, valid_fraction)
                for file in files:
                    os.fsync(file.fileno())
            info["digests"] = _digests(tokenizer, *_token_files(partial, tokenizer, info))
            (partial / "about.json").write_text(json.dumps(info))
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
    """Return the hash of all inputs of the streams."""
    options = _FORMAT, tokenizer.name, tokenizer.separator_id, reading.text_field, reading.max_bytes, valid_fraction
    key = hashlib.blake2b(repr(options).encode(), digest_size=16)
    with ThreadPoolExecutor() as pool:
        for file, content in zip(reading.files, pool.map(digest, reading.files), strict=True):
            key.update(repr((file.name, file.named, content)).encode())
    return key.hexdigest()


def _file_state(file: File) -> tuple[int, int] | None:
    try:
        status = file.path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a file exclusively. Yield False if the file system does not support locks.

    The owner of the lock writes its host and process id into the file, and its heartbeat updates the modification time
    with a period of `_BEAT_S` seconds. Waiting processes fail after `_LOCK_LIMIT_S` seconds without a heartbeat.
    """
    import fcntl

    seen, since = None, time.monotonic()
    while True:
        # Opening the file makes a network file system refresh the modification time.
        with open(open_no_link(path, os.O_RDWR), "r+b", buffering=0) as file:
            state = os.fstat(file.fileno())
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if state.st_mtime_ns != seen:
                    seen, since = state.st_mtime_ns, time.monotonic()
                elif time.monotonic() - since > _LOCK_LIMIT_S:
                    raise _lock_error(path, file) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                yield False
                return
            else:
                with _heartbeat(file):
                    yield True
                return
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _heartbeat(file: IO[bytes]) -> Iterator[None]:
    """Write the host and process id into the lock file, and update its modification time in a thread."""
    file.truncate(0)
    file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(file.fileno())

    thread = threading.Thread(target=beat, name="meshpar-cache-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _lock_error(path: Path, file: IO[bytes]) -> MeshparError:
    try:
        owner = json.loads(file.read(1000))
        process = f"process {int(owner['pid'])} on {str(owner['host'])[:100]}"
    except (OSError, ValueError, KeyError, TypeError):
        process = "another process"
    reason = f"{process} has the lock and has not updated it for {_LOCK_LIMIT_S:.0f} s"
    fix = "resume or stop that process, or set `cache` to another folder"
    return problem("`TextData.cache`", f"lock {path}", reason, fix, "conflict")


def _open(folder: Path, tokenizer: Tokenizer) -> Streams:
    """Open the streams in a folder of the cache, and compare all tokens with their digests."""
    requested, fix = f"read {folder / 'about.json'}", f"delete {folder}; the next run creates it again"
    info = read_json(folder / "about.json", "`TextData.cache`", fix, requested=requested)
    if not _is_complete(info):
        reason = "a field is missing or has the wrong type"
        raise problem("`TextData.cache`", requested, reason, fix, "damaged-file")
    train, valid = files = _token_files(folder, tokenizer, info)
    expected, digests = info.pop("digests"), _digests(tokenizer, *files)
    for file, digest_, expected_digest in zip(files, digests, expected, strict=True):
        if digest_ != expected_digest:
            raise file.damaged("its tokens do not match their digest in about.json")
    return Streams(train=train, valid=valid, fingerprint=digests[-1], info=info)


def _token_files(folder: Path, tokenizer: Tokenizer, info: Mapping[str, Any]) -> list[TokenFile]:
    fix, dtype = f"delete {folder}; the next run creates it again", token_dtype(tokenizer.vocab_size)
    return [
        TokenFile(
            folder / f"{side}.tokens", dtype, num_tokens=info[side]["tokens"], vocab_size=tokenizer.vocab_size, fix=fix
        )
        for side in SIDES
    ]


def _is_complete(info: Any) -> bool:
    """Return whether the contents of `about.json` have all required fields."""
    try:
        counts = [info["skipped"], *(info[side][name] for side in SIDES for name in COUNTS)]
        has_digests = isinstance(info["digests"], list) and len(info["digests"]) == len(SIDES)
        return has_digests and isinstance(info["held_out"], str) and all(is_int(count, 0) for count in counts)
    except (KeyError, TypeError):
        return False
