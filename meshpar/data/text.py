"""Text found: from the entries a user names to documents, each a name and a text.

An entry is the word `stdlib`, a file, a glob (`**` goes into folders) or a folder. A folder is searched for .txt, .py,
.md, .jsonl and .parquet files, hidden ones left out; a file or what a glob matches is taken whatever its suffix, as
plain text unless it is .jsonl or .parquet.

`stdlib` is the Python standard library's own source with its test suites, about 30 MB where the tests are installed:
every .py file under `sysconfig.get_path("stdlib")` but for installed packages and the generated `_sysconfigdata`.

A document's name is the part of its path that does not depend on where the data lies, so the same files give the same
names, and so the same split, on every machine.
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

from meshpar.sharding.host_resources import check_file, check_name
from meshpar.sharding.types import near, problem

STDLIB = "stdlib"
"""The entry that stands for the standard library; a folder of that name is `./stdlib`."""
FOLDER_SUFFIXES = (".txt", ".py", ".md", ".jsonl", ".parquet")
"""What is taken from a folder."""

_READ_BYTES = 4_000_000
"""About how much of a table is held at once, and of a plain file."""
_STDLIB_LEAVES_OUT = {"site-packages", "dist-packages"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """A file that was found."""

    path: Path
    """Where it is, absolute."""
    name: str
    """The end of its path, as long as it takes to distinguish the found files; separated by slashes."""
    named: bool
    """True when the user named this very file; one that was found by searching may be skipped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One text with its name, or a part of one that is long."""

    name: str
    text: str
    num_bytes: int
    """Length of the text in UTF-8."""
    goes_on: bool = False
    """Whether more of the same document follows."""

    def part(self, text: str, *, goes_on: bool) -> Document:
        """With another text."""
        return dataclasses.replace(self, text=text, num_bytes=_num_bytes(text), goes_on=goes_on)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """The documents of files, in order: every iteration reads them anew, and holds one at a time.

    A plain file is one document, and so is each line of a .jsonl file and each row of a .parquet file. Of a plain file
    that is large parts follow each other, of 4 MB. Empty documents are left out.

    Iterating raises `ValueError` for a file the user named that is not UTF-8; a line that is not JSON; a missing field;
    no text at all.
    """

    files: Sequence[File]
    text_field: str = "text"
    """Which field of a line, or column of a table, holds the text."""
    max_bytes: int | None = None
    """Where reading stops, in bytes of UTF-8, the last document cut to fit; None reads all."""
    skipped: list[str] = dataclasses.field(default_factory=list, compare=False)
    """Of the last iteration: names of the files that were found by searching and are not UTF-8."""

    def __iter__(self) -> Iterator[Document]:
        self.skipped.clear()
        is_empty = True
        for document in _within(self.max_bytes, _documents(self.files, self.text_field, self.skipped)):
            is_empty = False
            yield document
        if is_empty:
            what = f"all {len(self.skipped)} files that are not UTF-8" if self.skipped else "only empty files"
            what += "" if self.max_bytes is None else f", or no whole character in {self.max_bytes} byte(s) of them"
            raise problem("`files`", "read text", f"there were {what}", "name files that hold UTF-8 text")


def find(entries: Sequence[str], suffixes: Sequence[str] = FOLDER_SUFFIXES) -> list[File]:
    """The files that the entries name, each once, in the order of the entries and then of their paths.

    Raises:
      ValueError: an entry that does not exist or matches nothing.
    """
    found: dict[str, tuple[Path, int, bool]] = {}
    for entry in entries:
        for path, num_parts, named in _matches(entry, suffixes):
            # One file reached by two ways must be one document, or its text could be trained on and held out.
            found.setdefault(os.path.realpath(path), (path, num_parts, named))
    names = _distinct_names([(path, num_parts) for path, num_parts, _ in found.values()])
    return [File(path=path, name=names[path], named=named) for path, _, named in found.values()]


def digest(file: File) -> bytes:
    """A hash of what a file holds, read piece by piece."""
    with _opened(file) as opened:
        return hashlib.file_digest(opened, functools.partial(hashlib.blake2b, digest_size=16)).digest()


def _matches(entry: str, suffixes: Sequence[str]) -> Iterator[tuple[Path, int, bool]]:
    """Paths of one entry, each with the number of its last parts that make its name, and whether it was named."""
    path = Path(os.path.abspath(os.path.expanduser(entry)))
    check_name(path, f"`files` entry `{entry[:100]}`", "name a file, a folder or a glob")
    if entry == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        found = [p for p in root.rglob("*.py") if _is_stdlib(p.relative_to(root))]
    elif path.is_file():
        yield path, 1, True
        return
    elif path.is_dir():
        root = path
        found = [p for p in root.rglob("*") if p.suffix in suffixes and not _is_hidden(p.relative_to(root))]
    elif glob.has_magic(entry):
        pattern = os.path.expanduser(entry)
        root = _fixed_part(pattern)
        found = _globbed(root, os.path.abspath(pattern))
    else:
        raise _no_such_path(entry, path)
    found = sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(root).as_posix())
    if not found:
        raise _nothing_found(entry, root, suffixes)
    for file in found:
        yield file, len(file.relative_to(root).parts), False


def _globbed(root: Path, pattern: str) -> list[Path]:
    """What a glob matches below its fixed part; hidden names only where it names them, as in a shell.

    `**` follows no link to a folder: of two that lead back, walking would see no end.
    """
    parts = Path(pattern).parts[len(root.parts) :]
    kept = [part for number, part in enumerate(parts) if part != "**" or parts[number - 1 : number] != ("**",)]
    rest = "/".join([*kept, "*"] if kept[-1] == "**" else kept)
    shows_hidden = any(part.startswith(".") for part in kept)
    return [path for path in root.glob(rest) if shows_hidden or not _is_hidden(path.relative_to(root))]


def _is_stdlib(relative: Path) -> bool:
    return not (_STDLIB_LEAVES_OUT & set(relative.parts) or relative.name.startswith("_sysconfigdata"))


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _fixed_part(pattern: str) -> Path:
    """The folder above the first part of a glob that has a wildcard, absolute."""
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return Path(os.path.abspath(Path(*parts[:fixed])))


def _distinct_names(paths: Sequence[tuple[Path, int]]) -> dict[Path, str]:
    """A name for each path: its last parts, one more of them for as long as two paths have the same."""
    num_parts = dict(paths)
    while True:
        names = {path: "/".join(path.parts[-n:]) for path, n in num_parts.items()}
        times = collections.Counter(names.values())
        clashing = [path for path, name in names.items() if times[name] > 1]
        if not clashing:
            return names
        for path in clashing:
            num_parts[path] += 1


def _no_such_path(entry: str, path: Path) -> ValueError:
    options = [STDLIB]
    with_near = near(entry, options)
    if path.parent.is_dir():
        options = sorted(p.name for p in path.parent.iterdir())
        with_near = f"in {path.parent}: {near(path.name, options)}"
    exists = f"there is no such file or folder, and it is neither a glob nor the word `{STDLIB}`"
    return problem(f"`files` entry `{entry}`", "read it", exists, f"name one that exists ({with_near})")


def _nothing_found(entry: str, root: Path, suffixes: Sequence[str]) -> ValueError:
    fix = f"name a file, a glob that matches (`**` goes into folders), or a folder with any of {' '.join(suffixes)}"
    return problem(f"`files` entry `{entry}`", "find files", f"no file under {root} matches", fix)


def _documents(files: Iterable[File], text_field: str, skipped: list[str]) -> Iterator[Document]:
    """Documents of the files in order; the names of undecodable files that were not asked for go to `skipped`."""
    for file in files:
        if file.path.suffix not in (".jsonl", ".parquet"):
            yield from _plain(file, skipped)
            continue
        for record in records([file], text_field):
            name, where, text = record.name, record.where, record.fields[text_field]
            if not isinstance(text, str):
                fix = "set `text_field` to a field of strings, or correct the file"
                asked, exists = f"take the text from field `{text_field}`", f"the field holds a {type(text).__name__}"
                raise problem(where, asked, exists, fix)
            try:
                yield from _document(name, text)
            except UnicodeError as error:
                raise _not_utf8(where, error) from error


def _document(name: str, text: str, *, goes_on: bool = False) -> Iterator[Document]:
    """The document, or nothing when it is empty. A lone surrogate, which UTF-8 has not, raises UnicodeEncodeError."""
    if text:
        yield Document(name=name, text=text, num_bytes=_num_bytes(text), goes_on=goes_on)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _plain(file: File, skipped: list[str]) -> Iterator[Document]:
    try:
        pieces = _decoded(file)
        text, more = next(pieces, ""), next(pieces, "")
        collections.deque(pieces, maxlen=0)  # all of it is UTF-8 before any of it is taken
    except UnicodeDecodeError as error:
        if file.named:
            raise _not_utf8(f"{file.path}", error) from error
        skipped.append(file.name)
        return
    if not more:
        yield from _document(file.name, text)
        return
    text = ""
    for piece in _decoded(file):
        if piece:  # only of the last none is left, where a file ends with a piece
            yield from _document(file.name, text, goes_on=True)
            text = piece
    yield from _document(file.name, text)


def _decoded(file: File) -> Iterator[str]:
    """The text of a file, in pieces. Decoded from bytes and not read as text, which would change the line ends."""
    decoder, num_bytes = codecs.getincrementaldecoder("utf-8")(), 0
    with _opened(file) as opened:
        while True:
            data = opened.read(_READ_BYTES)
            begins = num_bytes - len(decoder.getstate()[0])
            try:
                yield decoder.decode(data, final=len(data) < _READ_BYTES)
            except UnicodeDecodeError as error:
                error.reason += f", counted from byte {begins:,} of the file" * (begins > 0)
                raise
            num_bytes += len(data)
            if len(data) < _READ_BYTES:
                return


def _json_rows(file: File) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every line that is not empty, one at a time: (name, where, object)."""
    with _opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file.path}, line {number}"
                yield f"{file.name}:{number}", where, _json_row(where, line.removesuffix(b"\n"))


def _json_row(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise problem(
            where, "read a JSON object", "it is nested too deep", "write one flat JSON object a line"
        ) from error
    except json.JSONDecodeError as error:
        fix = "write one JSON object a line, or rename a file of another kind"
        exists = f"it is not JSON ({error.msg}, column {error.colno})"
        raise problem(where, "read a JSON object", exists, fix) from error
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error
    except ValueError as error:  # a number of thousands of digits
        raise problem(where, "read a JSON object", f"{error}"[:100], "leave the line out") from error
    if not isinstance(row, dict):
        raise problem(where, "read a JSON object", f"it holds a {type(row).__name__}", "write one JSON object a line")
    return row


class DataRecord(NamedTuple):
    """A line of a .jsonl file or a row of a .parquet file."""

    name: str
    where: str
    """File and number, for errors."""
    fields: dict[str, Any]
    """The requested fields that it has."""
    others: tuple[str, ...]
    """Names of its other fields; for a table, all other columns."""


def records(files: Iterable[File], field: str, optional: Sequence[str] = ()) -> Iterator[DataRecord]:
    """Read one required and some optional fields from each line of .jsonl files and each row of .parquet files.

    Raises:
      ValueError: a file of another kind, one that is damaged, a line that is no JSON object, a row without that field.
    """
    asked = (field, *optional)
    for file in files:
        if file.path.suffix == ".parquet":
            with _table(file) as table:
                names = table.schema_arrow.names
                columns = [name for name in asked if name == field or name in names]
                for column in columns:
                    if names.count(column) != 1:
                        exists = f"it has {names.count(column) or 'no'} column{'s' * (column in names)} of that name"
                        again = ", or write it again with one" * (column in names)
                        fix = f"name another ({near(column, names)})" + again
                        raise problem(f"{file.path}", f"take column `{column}`", exists, fix)
                others = tuple(name for name in names if name not in columns)
                for number, row in enumerate(_rows(file, table, columns), start=1):
                    yield DataRecord(f"{file.name}:{number}", f"{file.path}, row {number}", row, others)
        elif file.path.suffix == ".jsonl":
            for name, where, row in _json_rows(file):
                if field not in row:
                    fix = f"name another ({near(field, row)})"
                    raise problem(where, f"take field `{field}`", "it has no such field", fix)
                fields = {name: row[name] for name in asked if name in row}
                others = tuple(name for name, value in row.items() if name not in fields and value is not None)
                yield DataRecord(name, where, fields, others)
        else:
            raise problem(f"{file.path}", "read its rows", "it is neither .jsonl nor .parquet", "name one of these")


def _table(file: File) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        # Read in pieces as rows are asked for, not a column of a whole row group at once.
        return pyarrow.parquet.ParquetFile(_regular(file), pre_buffer=False, buffer_size=1 << 20)
    except (pyarrow.ArrowInvalid, OSError) as error:
        fix = "name a parquet file, or rename a file of another kind"
        raise problem(f"{file.path}", "read it as parquet", f"it is not ({error})", fix) from error


def _rows(file: File, table: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the columns of each row. Null fields of structs are left out: a struct has the fields of all rows."""
    import pyarrow

    try:
        about = table.metadata
        num_bytes = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
        rows = _READ_BYTES * about.num_rows // max(num_bytes, 1)
        for batch in table.iter_batches(batch_size=min(max(rows, 1), 1024), columns=columns):
            for row in batch.to_pylist():
                yield {name: _without_nulls(value) for name, value in row.items()}
    except UnicodeError as error:
        raise _not_utf8(f"{file.path}, column{'s' * (len(columns) > 1)} `{', '.join(columns)}`", error) from error
    except (pyarrow.ArrowException, OSError) as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        fix = "bring the file back from a copy, or leave it out"
        raise problem(f"{file.path}", "read its rows", f"the file is damaged ({said})", fix) from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _opened(file: File) -> Iterator[io.BufferedReader]:
    try:
        with _regular(file).open("rb") as opened:
            yield opened
    except OSError as error:
        fix = "make it readable, or leave it out of `files`"
        raise problem(f"{file.path}", "read it", f"that failed ({error.strerror})", fix) from error


def _regular(file: File) -> Path:
    fix = "make it readable, or leave it out of `files`"
    return check_file(file.path, f"{file.path}", fix, max_bytes=None)


def _not_utf8(where: str, error: UnicodeError) -> ValueError:
    return problem(where, "read UTF-8 text", f"it is not UTF-8 ({error})", "convert it to UTF-8, or leave it out")


def _within(max_bytes: int | None, documents: Iterator[Document]) -> Iterator[Document]:
    """The documents that fit into `max_bytes` (None: all), the last one cut."""
    room, goes_on = max_bytes, False
    for document in documents:
        if room is not None and document.num_bytes > room:
            # A character that is cut through is dropped.
            cut = document.part(document.text.encode()[:room].decode(errors="ignore"), goes_on=False)
            if cut.text or goes_on:
                yield cut
            return
        yield document
        goes_on = document.goes_on
        room = None if room is None else room - document.num_bytes
