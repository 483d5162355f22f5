"""Search for text files, and reading of their documents.

An entry of `files` is the word `stdlib`, a file, a glob (`**` matches folders at any depth) or a folder. In a folder,
.txt, .py, .md, .jsonl and .parquet files are found, except hidden files. A file or glob may have any suffix; it is read
as plain text unless the suffix is .jsonl or .parquet.

`stdlib` is the source of Python's standard library, about 30 MB if its tests are installed: all .py files in
`sysconfig.get_path("stdlib")` except installed packages and the generated `_sysconfigdata`.

The name of a document is the end of its path and does not depend on the location of the data. So the split is the same
on all machines.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import dataclasses
import functools
import glob
import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshpar.sharding.errors import MeshparError, near, problem
from meshpar.sharding.host_resources import check_file, check_name

STDLIB = "stdlib"
"""Entry for the standard library. Write `./stdlib` for a folder of that name."""
FOLDER_SUFFIXES = (".txt", ".py", ".md", ".jsonl", ".parquet")
"""Suffixes of the files that are read from a folder."""

_READ_BYTES = 4_000_000
"""Approximate number of bytes per read of a plain file or a table."""
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages"}
_FIX_READ = "make the file readable, or remove it from `files`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """A text file."""

    path: Path
    """Absolute path."""
    name: str
    """Shortest end of the path that is unique among the files, with slashes."""
    named: bool
    """True if the user entered the path of this file. Other files are skipped if they are not UTF-8."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A text, or a part of a long text."""

    name: str
    text: str
    goes_on: bool = False
    """True if more parts of the document follow."""

    @functools.cached_property
    def num_bytes(self) -> int:
        """Length of the text in UTF-8. Raises UnicodeEncodeError for an unpaired surrogate."""
        return len(self.text) if self.text.isascii() else len(self.text.encode())

    def part(self, text: str, *, goes_on: bool) -> Document:
        """Return a part of the document."""
        return Document(name=self.name, text=text, goes_on=goes_on)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """Iterable over the documents of files. Each iteration reads the files again, a document at a time.

    A plain file is a document, and so is a line of a .jsonl file and a row of a .parquet file. Large plain files are
    read in parts of 4 MB. Empty documents are skipped.

    Iterating raises `MeshparError` for invalid UTF-8 in a file with `named=True`, invalid JSON, a missing field, or if
    there is no text.
    """

    files: Sequence[File]
    text_field: str = "text"
    """Field of a line, or column of a table, with the text."""
    max_bytes: int | None = None
    """Number of UTF-8 bytes to read. The last document is truncated. None reads all."""
    skipped: list[str] = dataclasses.field(default_factory=list, compare=False)
    """Names of the files that the last iteration skipped because they are not UTF-8."""

    def __iter__(self) -> Iterator[Document]:
        self.skipped.clear()
        is_empty = True
        for document in _within(self.max_bytes, _documents(self.files, self.text_field, self.skipped)):
            is_empty = False
            yield document
        if is_empty:
            files = f"all {len(self.skipped)} files that are not UTF-8" if self.skipped else "only empty files"
            limit = (
                "" if self.max_bytes is None else f", or no complete character in the first {self.max_bytes} byte(s)"
            )
            raise problem("`files`", "read text", f"there are {files}{limit}", "add files with UTF-8 text", "not-found")


def find(entries: Sequence[str], suffixes: Sequence[str] = FOLDER_SUFFIXES) -> list[File]:
    """Return the files of the entries without duplicates, in the order of the entries and sorted within each entry.

    Raises:
      MeshparError: an entry does not exist or matches no file.
    """
    by_real_path: dict[str, tuple[Path, int, bool]] = {}
    for entry in entries:
        for path, num_parts, named in _matches(entry, suffixes):
            # A file with two paths must be a single document. Otherwise its text could be in both sets.
            by_real_path.setdefault(os.path.realpath(path), (path, num_parts, named))
    names = _distinct_names([(path, num_parts) for path, num_parts, _ in by_real_path.values()])
    return [File(path=path, name=names[path], named=named) for path, _, named in by_real_path.values()]


def digest(file: File) -> bytes:
    """Return the hash of a file's contents."""
    with _opened(file) as opened:
        return hashlib.file_digest(opened, functools.partial(hashlib.blake2b, digest_size=16)).digest()


def _matches(entry: str, suffixes: Sequence[str]) -> Iterator[tuple[Path, int, bool]]:
    """Yield each path of an entry, the number of path components in its name, and `File.named`."""
    where, path = f"`files` entry `{entry[:100]}`", Path(os.path.abspath(os.path.expanduser(entry)))
    check_name(path, where, "enter a file, a folder or a glob")
    if entry == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in root.rglob("*.py") if _is_stdlib(path.relative_to(root))]
    elif path.is_file():
        yield path, 1, True
        return
    elif path.is_dir():
        root = path
        paths = [p for p in root.rglob("*") if p.suffix in suffixes and not _is_hidden(p.relative_to(root))]
    elif glob.has_magic(entry):
        root, paths = _globbed(os.path.expanduser(entry))
    else:
        reason = f"it is not a file, a folder, a glob or the word `{STDLIB}`"
        hint = near(entry, [STDLIB])
        if path.parent.is_dir():
            hint = f"in {path.parent}: {near(path.name, sorted(p.name for p in path.parent.iterdir()))}"
        raise problem(where, "read it", reason, f"use an existing file ({hint})", "missing-file")
    paths = sorted((path for path in paths if path.is_file()), key=lambda path: path.relative_to(root).as_posix())
    if not paths:
        suffix_list = " ".join(suffixes)
        fix = f"enter a file, a glob (`**` matches folders at any depth), or a folder with {suffix_list} files"
        raise problem(where, "find files", f"no file in {root} matches", fix, "not-found")
    for path in paths:
        yield path, len(path.relative_to(root).parts), False


def _globbed(pattern: str) -> tuple[Path, list[Path]]:
    """Return the folder before the first wildcard of a glob, and the matches in it.

    Hidden files match only if a component of the glob starts with a dot, as in a shell. `**` does not follow links to
    folders, which may form cycles.
    """
    parts = Path(pattern).parts
    root = Path(os.path.abspath(Path(*parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))])))
    parts = Path(os.path.abspath(pattern)).parts[len(root.parts) :]
    parts = tuple(part for i, part in enumerate(parts) if part != "**" or parts[i - 1 : i] != ("**",))
    relative = "/".join([*parts, "*"] if parts[-1] == "**" else parts)
    has_hidden = any(part.startswith(".") for part in parts)
    return root, [path for path in root.glob(relative) if has_hidden or not _is_hidden(path.relative_to(root))]


def _is_stdlib(relative: Path) -> bool:
    return not (_EXCLUDED_FOLDERS & set(relative.parts) or relative.name.startswith("_sysconfigdata"))


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _distinct_names(paths: Sequence[tuple[Path, int]]) -> dict[Path, str]:
    """Return a unique name for each path: its last components, with additional components for duplicates."""
    num_parts = dict(paths)
    while True:
        names = {path: "/".join(path.parts[-n:]) for path, n in num_parts.items()}
        counts = collections.Counter(names.values())
        duplicates = [path for path, name in names.items() if counts[name] > 1]
        if not duplicates:
            return names
        for path in duplicates:
            num_parts[path] += 1


def _documents(files: Iterable[File], text_field: str, skipped: list[str]) -> Iterator[Document]:
    """Yield the documents of the files, and append the names of skipped files."""
    for file in files:
        if file.path.suffix not in (".jsonl", ".parquet"):
            yield from _plain(file, skipped)
            continue
        for record in records([file], text_field):
            text = record.fields[text_field]
            if not isinstance(text, str):
                requested, reason = f"read field `{text_field}`", f"it is a {type(text).__name__}, not a string"
                fix = "set `text_field` to a field with strings, or fix the file"
                raise problem(record.where, requested, reason, fix, "wrong-type")
            document = Document(name=record.name, text=text)
            try:
                is_empty = not document.num_bytes
            except UnicodeError as error:
                raise _not_utf8(record.where, error) from error
            if not is_empty:
                yield document


def _plain(file: File, skipped: list[str]) -> Iterator[Document]:
    try:
        pieces = _decoded(file)
        text, second = next(pieces, ""), next(pieces, "")
        collections.deque(pieces, maxlen=0)  # check the full file before the first document
    except UnicodeDecodeError as error:
        if file.named:
            raise _not_utf8(f"{file.path}", error) from error
        skipped.append(file.name)
        return
    if second:
        text = ""
        for piece in _decoded(file):
            if piece:  # the last piece may be empty
                if text:
                    yield Document(name=file.name, text=text, goes_on=True)
                text = piece
    if text:
        yield Document(name=file.name, text=text)


def _decoded(file: File) -> Iterator[str]:
    """Yield the text of a file in pieces. The file is opened in binary mode, which preserves line ends."""
    decoder, num_bytes = codecs.getincrementaldecoder("utf-8")(), 0
    with _opened(file) as opened:
        while True:
            data = opened.read(_READ_BYTES)
            offset = num_bytes - len(decoder.getstate()[0])
            try:
                yield decoder.decode(data, final=len(data) < _READ_BYTES)
            except UnicodeDecodeError as error:
                error.reason += f", counted from byte {offset:,} of the file" * (offset > 0)
                raise
            num_bytes += len(data)
            if len(data) < _READ_BYTES:
                return


def _json_rows(file: File) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name, where, object) for each non-empty line."""
    with _opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file.path}, line {number}"
                yield f"{file.name}:{number}", where, _json_row(where, line.removesuffix(b"\n"))


def _json_row(where: str, line: bytes) -> dict[str, Any]:
    fix = "write a JSON object per line"
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise problem(where, "read a JSON object", "it is nested too deep", fix, "bad-syntax") from error
    except json.JSONDecodeError as error:
        reason = f"it is not JSON ({error.msg}, column {error.colno})"
        fix += ", or rename the file if it has a different format"
        raise problem(where, "read a JSON object", reason, fix, "bad-syntax") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error
    except ValueError as error:  # a number with thousands of digits
        raise problem(where, "read a JSON object", f"{error}"[:100], "remove the line", "bad-syntax") from error
    if not isinstance(row, dict):
        raise problem(where, "read a JSON object", f"it is a {type(row).__name__}", fix, "wrong-type")
    return row


class DataRecord(NamedTuple):
    """A line of a .jsonl file or a row of a .parquet file."""

    name: str
    where: str
    """File and number of the line or row, for errors."""
    fields: dict[str, Any]
    """Requested fields of the record."""
    other_fields: tuple[str, ...]
    """Names of the other fields; for a table, all other columns."""


def records(files: Iterable[File], field: str, optional: Sequence[str] = ()) -> Iterator[DataRecord]:
    """Yield the lines of .jsonl files and the rows of .parquet files with a required field and optional fields.

    Raises:
      MeshparError: a file is damaged or has the wrong format, a line is not a JSON object, or the field is missing.
    """
    requested = (field, *optional)
    for file in files:
        if file.path.suffix == ".parquet":
            with _table(file) as table:
                names = table.schema_arrow.names
                columns = [name for name in requested if name == field or name in names]
                for column in columns:
                    if (count := names.count(column)) != 1:
                        reason = f"it has {count or 'no'} column{'s' * (count > 1)} of that name"
                        fix = f"use an existing column ({near(column, names)})" + ", or remove the duplicates" * (
                            count > 1
                        )
                        code = "conflict" if count else "unknown-name"
                        raise problem(f"{file.path}", f"read column `{column}`", reason, fix, code)
                other_fields = tuple(name for name in names if name not in columns)
                for number, row in enumerate(_rows(file, table, columns), start=1):
                    yield DataRecord(f"{file.name}:{number}", f"{file.path}, row {number}", row, other_fields)
        elif file.path.suffix == ".jsonl":
            for name, where, row in _json_rows(file):
                if field not in row:
                    reason, fix = "the object does not have it", f"use an existing field ({near(field, row)})"
                    raise problem(where, f"read field `{field}`", reason, fix, "unknown-name")
                fields = {name: row[name] for name in requested if name in row}
                other_fields = tuple(name for name, value in row.items() if name not in fields and value is not None)
                yield DataRecord(name, where, fields, other_fields)
        else:
            reason, fix = "it is not a .jsonl or .parquet file", "convert it to .jsonl or .parquet"
            raise problem(f"{file.path}", "read its rows", reason, fix, "unsupported-feature")


def _table(file: File) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        # With these options, a row group is read in pieces. By default, full columns are read.
        return pyarrow.parquet.ParquetFile(_regular(file), pre_buffer=False, buffer_size=1 << 20)
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason, fix = (
            f"it is not parquet ({error})",
            "use a parquet file, or rename the file if it has a different format",
        )
        raise problem(f"{file.path}", "read it as parquet", reason, fix, "damaged-file") from error


def _rows(file: File, table: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the columns of each row without null fields in structs, which have the fields of all rows."""
    import pyarrow

    try:
        metadata = table.metadata
        num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        num_rows = _READ_BYTES * metadata.num_rows // max(num_bytes, 1)
        for batch in table.iter_batches(batch_size=min(max(num_rows, 1), 1024), columns=columns):
            for row in batch.to_pylist():
                yield {name: _without_nulls(value) for name, value in row.items()}
    except UnicodeError as error:
        raise _not_utf8(f"{file.path}, column{'s' * (len(columns) > 1)} `{', '.join(columns)}`", error) from error
    except (pyarrow.ArrowException, OSError) as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        reason, fix = f"the file is damaged ({first_line})", "restore the file from a backup, or remove it from `files`"
        raise problem(f"{file.path}", "read its rows", reason, fix, "damaged-file") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _opened(file: File) -> Iterator[io.BufferedReader | io.BytesIO]:
    try:
        path = _regular(file)
        # Files of /proc have size 0 and may block, so an empty file is never opened.
        with path.open("rb") if path.stat().st_size else io.BytesIO() as opened:
            yield opened
    except OSError as error:
        reason = f"the system reports: {error.strerror}"
        raise problem(f"{file.path}", "read it", reason, _FIX_READ, "unusable-file") from error


def _regular(file: File) -> Path:
    return check_file(file.path, f"{file.path}", _FIX_READ, max_bytes=None)


def _not_utf8(where: str, error: UnicodeError) -> MeshparError:
    fix = "convert it to UTF-8, or remove it"
    return problem(where, "read UTF-8 text", f"it is not UTF-8 ({error})", fix, "bad-syntax")


def _within(max_bytes: int | None, documents: Iterator[Document]) -> Iterator[Document]:
    """Yield documents up to `max_bytes` (None: all), and truncate the last document."""
    remaining, goes_on = max_bytes, False
    for document in documents:
        if remaining is not None and document.num_bytes > remaining:
            # Drop an incomplete last character.
            text = document.text.encode()[:remaining].decode(errors="ignore")
            if text or goes_on:
                yield document.part(text, goes_on=False)
            return
        yield document
        goes_on = document.goes_on
        remaining = None if remaining is None else remaining - document.num_bytes
