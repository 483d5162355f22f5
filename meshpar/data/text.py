"""Search for text files, and reading of their documents.

An entry of `files` is the word `stdlib`, a file, a glob (`**` matches folders at any depth) or a folder; or the same in
a bucket (`s3://bucket/data/*.jsonl`), which is read from copies in the folder `$MESHPAR_CACHE`. In a folder,
.txt, .py, .md, .jsonl and .parquet files are found, except hidden files. A file or glob may have any suffix; it is read
as plain text unless the suffix is .jsonl or .parquet.

`stdlib` is the source of Python's standard library, about 30 MB if its tests are installed: all .py files in
`sysconfig.get_path("stdlib")` except installed packages and the generated `_sysconfigdata`.

The name of a document is the end of its path and does not depend on the location of the data. So the split is the same
on all machines.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshpar.sharding import remote
from meshpar.sharding.errors import near, problem
from meshpar.sharding.host_resources import is_url

STDLIB = "stdlib"
"""Entry for the standard library. Write `./stdlib` for a folder of that name."""
FOLDER_SUFFIXES = (".txt", ".py", ".md", ".jsonl", ".parquet")
"""Suffixes of the files that are read from a folder."""

_READ_BYTES = 4_000_000
"""Approximate number of characters per read of a plain file, or of bytes per read of a table."""
_FIX_READ = "repair the file, or remove it from `files`"


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
    read in parts. Empty documents are skipped.
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
            limit = f", or no complete character in the first {self.max_bytes} byte(s)" if self.max_bytes else ""
            raise problem("`files`", "read text", f"there are {files}{limit}", "add files with UTF-8 text", "not-found")


def find(entries: Sequence[str], suffixes: Sequence[str] = FOLDER_SUFFIXES) -> list[File]:
    """Return the files of the entries without duplicates, in the order of the entries and sorted within each entry."""
    by_real_path: dict[str, tuple[Path, int, bool]] = {}
    for entry in entries:
        for path, num_parts, named in _matches(entry, suffixes):
            # A file with two paths must be a single document. Otherwise its text could be in both sets.
            by_real_path.setdefault(os.path.realpath(path), (path, num_parts, named))
    names = _distinct_names([(path, num_parts) for path, num_parts, _ in by_real_path.values()])
    return [File(path=path, name=names[path], named=named) for path, _, named in by_real_path.values()]


def digest(file: File) -> bytes:
    """Return the hash of a file's contents."""
    with file.path.open("rb") as opened:
        return hashlib.file_digest(opened, functools.partial(hashlib.blake2b, digest_size=16)).digest()


def _matches(entry: str, suffixes: Sequence[str]) -> Iterator[tuple[Path, int, bool]]:
    """Yield (path, number of path components in its name, `File.named`) for each file of an entry."""
    where, path = f"`files` entry `{entry[:100]}`", Path(os.path.abspath(os.path.expanduser(entry)))
    if is_url(entry):
        yield from _remote_matches(remote.join(entry), suffixes, where)
        return
    if entry == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        excluded = {"site-packages", "dist-packages"}
        paths = _walk(root, lambda folder: folder not in excluded)
        paths = [p for p in paths if p.suffix == ".py" and not p.name.startswith("_sysconfigdata")]
    elif path.is_file():
        yield path, 1, True
        return
    elif path.is_dir():
        root = path
        paths = _walk(root, lambda folder: not folder.startswith("."))
        paths = [p for p in paths if p.suffix in suffixes and not p.name.startswith(".")]
    elif glob.has_magic(entry):
        parts = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
        root, paths = Path(*parts), [Path(match) for match in glob.glob(str(path), recursive=True)]
    else:
        reason = f"it is not a file, a folder, a glob or the word `{STDLIB}`"
        hint = near(entry, [STDLIB])
        if path.parent.is_dir():
            hint = f"in {path.parent}: {near(path.name, sorted(p.name for p in path.parent.iterdir()))}"
        raise problem(where, "read it", reason, f"use an existing file ({hint})", "missing-file")
    paths = sorted((path for path in paths if path.is_file()), key=lambda path: path.relative_to(root).as_posix())
    if not paths:
        raise _no_match(where, str(root), suffixes)
    for path in paths:
        yield path, len(path.relative_to(root).parts), False


def _walk(root: Path, is_entered: Callable[[str], bool]) -> list[Path]:
    """Return all files below a folder, without those in subfolders for whose name `is_entered` is False."""
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = filter(is_entered, subfolders)
        paths += [Path(folder, name) for name in names]
    return paths


def _no_match(where: str, root: str, suffixes: Sequence[str]) -> Exception:
    suffix_list = " ".join(suffixes)
    fix = f"enter a file, a glob (`**` matches folders at any depth), or a folder with {suffix_list} files"
    return problem(where, "find files", f"no file in {root} matches", fix, "not-found")


def _remote_matches(url: str, suffixes: Sequence[str], where: str) -> Iterator[tuple[Path, int, bool]]:
    """Copy the objects of a bucket entry. Yield (path of the copy, number of components in its name, `File.named`)."""
    bucket = remote.filesystem(url, where)
    pattern = url.partition("://")[2]
    with remote.accessing(url, where, "read it"):
        has_magic, root = glob.has_magic(pattern), pattern
        if has_magic:
            root = "/".join(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.split("/")))
        elif bucket.isfile(url):
            yield remote.fetch({url: bucket.info(url)}, where)[0], 1, True
            return
        listing = bucket.glob(pattern, detail=True) if has_magic else bucket.find(pattern, detail=True)
    has_hidden = has_magic and any(part.startswith(".") for part in pattern.split("/"))
    objects: dict[str, Any] = {}
    for name in sorted(listing):
        relative = Path(name.removeprefix(f"{root}/"))
        is_wanted = has_hidden or not _is_hidden(relative)
        if listing[name]["type"] == "file" and is_wanted and (has_magic or relative.suffix in suffixes):
            objects[name] = listing[name]
    if not objects:
        raise _no_match(where, root, suffixes)
    copies = remote.fetch({f"{url.partition(':')[0]}://{name}": info for name, info in objects.items()}, where)
    for name, path in zip(objects, copies, strict=True):
        yield path, len(Path(name.removeprefix(f"{root}/")).parts), False


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
            try:
                collections.deque(_decoded(file), maxlen=0)  # check the full file before the first document
            except UnicodeDecodeError as error:
                if file.named:
                    reason, fix = f"it is not UTF-8 ({error.reason})", "convert it to UTF-8, or remove it"
                    raise problem(f"{file.path}", "read UTF-8 text", reason, fix, "bad-syntax") from error
                skipped.append(file.name)
                continue
            pieces = _decoded(file)
            text = next(pieces, "")
            for piece in pieces:
                yield Document(name=file.name, text=text, goes_on=True)
                text = piece
            if text:
                yield Document(name=file.name, text=text)
            continue
        for record in records([file], text_field):
            document = Document(name=record.name, text=record.fields[text_field])
            requested, fix = f"read field `{text_field}`", "set `text_field` to a field with text, or fix the file"
            if not isinstance(document.text, str):
                reason = f"it is a {type(document.text).__name__}, not a string"
                raise problem(record.where, requested, reason, fix, "wrong-type")
            try:
                is_empty = not document.num_bytes
            except UnicodeError as error:
                raise problem(record.where, requested, f"it is not UTF-8 ({error})", fix, "bad-syntax") from error
            if not is_empty:
                yield document


def _decoded(file: File) -> Iterator[str]:
    """Yield the text of a file in pieces, with its line ends."""
    with file.path.open(encoding="utf-8", newline="") as lines:
        while piece := lines.read(_READ_BYTES):
            yield piece


def _json_row(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
        reason, code = f"it is a {type(row).__name__}", "wrong-type"
    except (ValueError, RecursionError) as error:  # also for invalid UTF-8, and numbers with thousands of digits
        row, reason, code = None, f"it is not JSON ({error})"[:200], "bad-syntax"
    if not isinstance(row, dict):
        fix = "write a JSON object in UTF-8 per line, or rename the file if it has a different format"
        raise problem(where, "read a JSON object", reason, fix, code)
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
    """Yield the lines of .jsonl files and the rows of .parquet files with a required field and optional fields."""
    for file in files:
        if file.path.suffix == ".parquet":
            yield from _rows(file, field, optional)
        elif file.path.suffix == ".jsonl":
            with file.path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        where = f"{file.path}, line {number}"
                        row = _json_row(where, line.removesuffix(b"\n"))
                        if field not in row:
                            fix = f"use an existing field ({near(field, row)})"
                            raise problem(where, f"read field `{field}`", "it does not exist", fix, "unknown-name")
                        fields = {name: row[name] for name in (field, *optional) if name in row}
                        others = tuple(name for name, x in row.items() if name not in fields and x is not None)
                        yield DataRecord(f"{file.name}:{number}", where, fields, others)
        else:
            reason, fix = "it is not a .jsonl or .parquet file", "convert it to .jsonl or .parquet"
            raise problem(f"{file.path}", "read its rows", reason, fix, "unsupported-feature")


def _rows(file: File, field: str, optional: Sequence[str]) -> Iterator[DataRecord]:
    """Yield the rows of a table. Structs have the fields of all rows, so their null fields are removed."""
    import pyarrow
    import pyarrow.parquet

    try:
        # With these options, a row group is read in pieces. By default, full columns are read.
        with pyarrow.parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=1 << 20) as table:
            names, metadata = table.schema_arrow.names, table.metadata
            columns = [field, *(name for name in optional if name in names)]
            for column in columns:
                if names.count(column) != 1:
                    reason = f"it has {names.count(column)} columns of that name"
                    fix, code = f"use an existing column ({near(column, names)})", "unknown-name"
                    if column in names:
                        fix, code = "remove the duplicates", "conflict"
                    raise problem(f"{file.path}", f"read column `{column}`", reason, fix, code)
            others = tuple(name for name in names if name not in columns)
            num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            num_rows = _READ_BYTES * metadata.num_rows // max(num_bytes, 1)
            batches = table.iter_batches(batch_size=min(max(num_rows, 1), 1024), columns=columns)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                fields = {name: _without_nulls(value) for name, value in row.items()}
                yield DataRecord(f"{file.name}:{number}", f"{file.path}, row {number}", fields, others)
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        reason, code = f"it is damaged or not parquet ({str(error)[:200]})", "damaged-file"
        if isinstance(error, UnicodeError):
            reason, code = f"its text is not UTF-8 ({error})", "bad-syntax"
        raise problem(f"{file.path}", "read its rows", reason, _FIX_READ, code) from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


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
