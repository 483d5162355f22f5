"""Token streams: documents tokenized one after the other into files, and read from there.

    files ─► documents, one at a time ─► train | held out ─► train.tokens, valid.tokens

Memory holds a few megabytes of text, however long documents and streams are.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import UInt

from meshpar.data.split import DocumentSplit
from meshpar.data.text import Document, File, Reading, digest
from meshpar.data.token_file import TokenFile, pieces
from meshpar.data.tokens import Tokenizer, token_dtype
from meshpar.sharding.host_resources import check_name, open_no_link, read_json
from meshpar.sharding.types import is_int, problem

SIDES = ("train", "valid")
COUNTS = ("documents", "bytes", "tokens")
_BYTES_AT_ONCE = 4_000_000
"""Text handed to a tokenizer's own threads in one go: enough to fill them, little in memory."""
_IN_MEMORY_BYTES = 64_000_000
"""Streams that nobody keeps go to a temporary file when they are longer."""
_SEAM_CHARS = 1000
"""So much text on both sides of a cut has to give the tokens that it gives uncut."""
_SEAMS_TRIED = 64
_PIECE_TOKENS = 1 << 20
"""Number of tokens that are hashed at once."""
_FORMAT = 3
"""Version of the cache's files. Another version is another folder."""
_LOCK_LIMIT_S = 45.0
"""How long a process waits for the lock of another one that shows no sign of life."""
_BEAT_S = 5.0
"""How often the process that builds a cache shows that it is alive."""
_POLL_S = 0.1
_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
    """The tokens of all documents of each side, in order, each document followed by the separator."""

    train: UInt[np.ndarray, " tokens"] | TokenFile
    valid: UInt[np.ndarray, " tokens"] | TokenFile
    fingerprint: str
    """A hash of the tokenizer, the training tokens and the held-out tokens, in order."""
    facts: dict[str, Any]
    """`held_out`, `skipped`, and of each side its `documents`, `bytes` and `tokens`; JSON values only."""


def token_streams(
    reading: Reading,
    tokenizer: Tokenizer,
    *,
    valid_fraction: float,
    cache: str | None = None,
) -> Streams:
    """Splits and tokenizes documents.

    Args:
      reading: the documents.
      tokenizer: how.
      valid_fraction: about which part of the documents is held out.
      cache: a folder that keeps the result. If it already has the result, the files are verified and nothing is
        tokenized. If several processes need the same result, one makes it and the others wait. None: a temporary file.

    Raises:
      ValueError: what `Reading` and `DocumentSplit` raise; no room for the tokens; a damaged file in the cache; a
        process that has locked the cache and makes no progress.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        if cache is not None:
            folder = _kept(_folder(cache), reading, tokenizer, valid_fraction)
            return _open(folder, tokenizer)
        with contextlib.ExitStack() as until_mapped:
            files = [until_mapped.enter_context(spooled()) for _ in SIDES]
            facts = _write(files, reading, tokenizer, valid_fraction)
            train, valid = (mapped(file, facts[side]["tokens"], dtype) for file, side in zip(files, SIDES, strict=True))
            return Streams(train=train, valid=valid, fingerprint=_digests(tokenizer, train, valid)[-1], facts=facts)
    except OSError as error:
        where = tempfile.gettempdir() if cache is None else cache
        fix = "free some room, or name a folder that can be written and has room as `cache`"
        exists = f"that failed ({error.strerror})"
        raise problem("`TextData.cache`", f"write tokens below {where}", exists, fix) from error


def _write(files: Iterable[IO[bytes]], reading: Reading, tokenizer: Tokenizer, valid_fraction: float) -> dict[str, Any]:
    """Writes the streams of the two sides, as bare tokens; what they hold."""
    files, split = list(files), DocumentSplit(valid_fraction)
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([] if tokenizer.separator_id is None else [tokenizer.separator_id], dtype=dtype).tobytes()
    facts: dict[str, Any] = {}
    while not split.settled:
        sides = [dict.fromkeys(COUNTS, 0) for _ in files]
        for file in files:
            file.seek(0)
            file.truncate()
        for group in _groups(_at_seams(split(reading), tokenizer)):
            encoded = tokenizer.encode_many([document.text for document, _ in group])
            for (document, is_held_out), ids in zip(group, encoded, strict=True):
                _check_ids(document, ids, tokenizer)
                file, side = files[is_held_out], sides[is_held_out]
                behind = b"" if document.goes_on else end
                file.write(ids.astype(dtype, copy=False).tobytes())
                file.write(behind)
                side["documents"] += not document.goes_on
                side["bytes"] += document.num_bytes
                side["tokens"] += len(ids) + len(behind) // dtype.itemsize
        facts = {"held_out": split.how, "skipped": len(reading.skipped), **dict(zip(SIDES, sides, strict=True))}
    for file in files:
        file.flush()
    return facts


def _digests(tokenizer: Tokenizer, *streams: UInt[np.ndarray, " tokens"] | TokenFile) -> list[str]:
    """Return the hash of the tokenizer and of all tokens up to the end of each stream."""
    digest = hashlib.blake2b(f"text {tokenizer.name} {tokenizer.separator_id}".encode(), digest_size=16)
    found = []
    for tokens in streams:
        digest.update(f" {len(tokens)} {tokens.dtype} ".encode())
        for piece in pieces(tokens, _PIECE_TOKENS):
            digest.update(np.ascontiguousarray(piece).data)
        found.append(digest.hexdigest())
    return found


def _check_ids(document: Document, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    if len(ids) and (largest := int(ids.max())) >= tokenizer.vocab_size:
        exists = f"the tokenizer returns id {largest}, and its vocabulary has {tokenizer.vocab_size} tokens"
        raise problem(f"document `{document.name}`", "tokenize it", exists, "take the tokenizer.json of the release")


def _at_seams(documents: Iterable[tuple[Document, bool]], tokenizer: Tokenizer) -> Iterator[tuple[Document, bool]]:
    """The documents, with parts of long ones cut anew: where tokens of both sides are those of the whole.

    Where no such place is found the next part is taken, too, and so the whole document in the end.
    """
    kept = ""
    for document, is_held_out in documents:
        if not (kept or document.goes_on):
            yield document, is_held_out
            continue
        text = kept + document.text
        at = _seam(text, tokenizer) if document.goes_on else len(text)
        kept = text[at:]
        if at or not document.goes_on:
            yield document.part(text[:at], goes_on=document.goes_on), is_held_out


def _seam(text: str, tokenizer: Tokenizer) -> int:
    """A place near the end of a text where it can be cut, judged by the tokens around it; 0 where none is found."""
    last = len(text) - _SEAM_CHARS
    near = range(max(last - _SEAM_CHARS, 1), last)
    reaches = (_SEAM_CHARS, _SEAM_CHARS - 1)
    places = sorted(near, key=lambda at: (text[at].isspace() == text[at - 1].isspace(), -at))  # words whole, if any are
    for at in places[:_SEAMS_TRIED]:
        # Of two lengths: what is cut into so many characters each, as long runs of one are, fits into one of them only.
        if all(_is_seam(text[max(at - reach, 0) : at], text[at : at + reach], tokenizer) for reach in reaches):
            return at
    return 0


def _is_seam(left: str, right: str, tokenizer: Tokenizer) -> bool:
    """Whether both have the tokens that they have together. Of what leaves none nothing is known."""
    whole, *parts = tokenizer.encode_many([left + right, left, right])
    return all(map(len, parts)) and np.array_equal(whole, np.concatenate(parts))


def _groups(documents: Iterable[tuple[Document, bool]]) -> Iterator[list[tuple[Document, bool]]]:
    """The documents in runs of about `_BYTES_AT_ONCE`."""
    group: list[tuple[Document, bool]] = []
    num_bytes = 0
    for one in documents:
        group.append(one)
        num_bytes += one[0].num_bytes
        if num_bytes >= _BYTES_AT_ONCE:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def spooled() -> IO[bytes]:
    """A file in memory, which becomes a temporary one on disk when much is written."""
    return tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)


def mapped(file: IO[bytes], num_tokens: int, dtype: np.dtype) -> UInt[np.ndarray, " tokens"]:
    """The tokens of a `spooled` file, which a mapping keeps when its name is gone."""
    if num_tokens * dtype.itemsize > _IN_MEMORY_BYTES:
        return np.memmap(file, dtype=dtype, mode="r", shape=(num_tokens,))
    file.seek(0)
    return np.frombuffer(file.read(), dtype=dtype)


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array to be filled, in a temporary file where it is large."""
    if math.prod(shape) * np.dtype(dtype).itemsize <= _IN_MEMORY_BYTES:
        return np.zeros(shape, dtype)
    with tempfile.TemporaryFile() as file:
        return np.asarray(np.memmap(file, dtype=dtype, mode="w+", shape=shape))


# ---- Kept ------------------------------------------------------------------------------------------------------------


def _folder(cache: str) -> Path:
    """The folder that a user names; the system takes its name."""
    fix = "name a folder, or leave it out"
    if cache == "":
        raise problem("`TextData.cache`", "keep tokens in ''", "that is the current folder", f"{fix}; `.` is this one")
    try:
        folder = Path(cache).expanduser()
    except (TypeError, RuntimeError) as error:  # no text, or the home of nobody
        raise problem("`TextData.cache`", f"keep tokens in {cache!r}", f"that is no folder ({error})", fix) from error
    check_name(folder, "`TextData.cache`", fix)
    return folder


def _kept(folder: Path, reading: Reading, tokenizer: Tokenizer, valid_fraction: float) -> Path:
    """The folder of the cache that holds the streams: it gets its name when it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    before = [_state(file) for file in reading.files]
    whole = folder / _key(reading, tokenizer, valid_fraction)
    if whole.is_dir():
        return whole
    with _locked(folder / f".{whole.name}.lock") as is_alone:
        if whole.is_dir():
            return whole
        for left in folder.glob(f"{whole.name}.*.partial") if is_alone else ():  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{whole.name}.", suffix=".partial", dir=folder))
        try:
            with contextlib.ExitStack() as until_written:
                files = [until_written.enter_context((partial / f"{side}.tokens").open("wb")) for side in SIDES]
                facts = _write(files, reading, tokenizer, valid_fraction)
                for file in files:
                    os.fsync(file.fileno())
            facts["digests"] = _digests(tokenizer, *_token_files(partial, tokenizer, facts))
            (partial / "about.json").write_text(json.dumps(facts))
            _check_same(reading.files, before)
            if is_alone or not whole.is_dir():
                partial.rename(whole)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return whole


def _key(reading: Reading, tokenizer: Tokenizer, valid_fraction: float) -> str:
    """Says what the streams depend on."""
    how = _FORMAT, tokenizer.name, tokenizer.separator_id, reading.text_field, reading.max_bytes, valid_fraction
    found = hashlib.blake2b(repr(how).encode(), digest_size=16)
    with ThreadPoolExecutor() as pool:
        for file, held in zip(reading.files, pool.map(digest, reading.files), strict=True):
            found.update(repr((file.name, file.named, held)).encode())
    return found.hexdigest()


def _state(file: File) -> tuple[int, int] | None:
    try:
        found = file.path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _check_same(files: Sequence[File], before: Sequence[tuple[int, int] | None]) -> None:
    for file, state in zip(files, before, strict=True):
        if _state(file) != state:
            fix = "start again when nobody writes to it"
            raise problem(f"{file.path}", "keep its tokens", "it was changed while it was read", fix)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on a file. Yield False if the file system has no locks.

    The holder writes its host and process id into the file, and a thread updates the file's time every `_BEAT_S`. A
    process that is stopped or cut off does not, and those that wait for it give up after `_LOCK_LIMIT_S`.
    """
    import fcntl

    seen, since = None, time.monotonic()
    while True:
        # Opened anew each time: a network file system then asks the server for the file's time.
        with open(open_no_link(path, os.O_RDWR), "r+b", buffering=0) as file:
            state = os.fstat(file.fileno())
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if state.st_mtime_ns != seen:
                    seen, since = state.st_mtime_ns, time.monotonic()
                elif time.monotonic() - since > _LOCK_LIMIT_S:
                    raise _held(path, file) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                yield False
                return
            else:
                with _beating(file):
                    yield True
                return
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _beating(file: IO[bytes]) -> Iterator[None]:
    """Write the name of this process into the lock file, and update the file's time until the context ends."""
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


def _held(path: Path, file: IO[bytes]) -> ValueError:
    try:
        holder = json.loads(file.read(1000))
        who = f"process {int(holder['pid'])} on {str(holder['host'])[:100]}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    exists = f"{who} holds the lock and has shown no sign of life for {_LOCK_LIMIT_S:.0f} s"
    fix = "continue or end that process, or name another folder as `cache`"
    return problem("`TextData.cache`", f"lock {path}", exists, fix)


def _open(folder: Path, tokenizer: Tokenizer) -> Streams:
    """Open the streams in a folder of the cache, and compare all tokens with their digests."""
    fix = f"delete {folder}; it is made again"
    facts = read_json(folder / "about.json", "`TextData.cache`", fix, requested=f"read {folder / 'about.json'}")
    if not _is_complete(facts):
        exists = "a field is missing or has another type"
        raise problem("`TextData.cache`", f"read {folder / 'about.json'}", exists, fix)
    train, valid = files = _token_files(folder, tokenizer, facts)
    expected, digests = facts.pop("digests"), _digests(tokenizer, *files)
    for file, found, should_be in zip(files, digests, expected, strict=True):
        if found != should_be:
            raise file.damaged("its tokens do not match their digest in about.json")
    return Streams(train=train, valid=valid, fingerprint=digests[-1], facts=facts)


def _token_files(folder: Path, tokenizer: Tokenizer, facts: Mapping[str, Any]) -> list[TokenFile]:
    options: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "fix": f"delete {folder}; it is made again"}
    dtype = token_dtype(tokenizer.vocab_size)
    return [TokenFile(folder / f"{side}.tokens", dtype, num_tokens=facts[side]["tokens"], **options) for side in SIDES]


def _is_complete(facts: object) -> bool:
    """Return whether `about.json` has all fields that are read from it."""
    if not isinstance(facts, dict):
        return False
    counts, digests = [facts.get(side) for side in SIDES], facts.get("digests")
    return (
        all(isinstance(count, dict) and all(is_int(count.get(name), 0) for name in COUNTS) for count in counts)
        and isinstance(digests, list)
        and len(digests) == len(SIDES)
        and isinstance(facts.get("held_out"), str)
        and is_int(facts.get("skipped"), 0)
    )
