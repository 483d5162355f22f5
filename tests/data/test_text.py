"""Tests of finding files and reading documents."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from meshpar.data.text import Reading, find, records
from tests.errors import raises


def write(root: Path, **files: str) -> Path:
    """Write `a__b_txt="..."` to the file a/b.txt in root."""
    for key, text in files.items():
        path = root / Path(*key.split("__"))
        path = path.with_name(".".join(path.name.rsplit("_", 1)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    return root


def names(*entries: object) -> list[str]:
    return [file.name for file in find([str(entry) for entry in entries])]


def texts(*entries: object, **options: object) -> dict[str, str]:
    reading = Reading(files=find([str(entry) for entry in entries]), **options)
    return {document.name: document.text for document in reading}


def test_find_returns_the_sorted_stdlib_sources():
    files = find(["stdlib"])
    paths = [file.name for file in files]
    assert paths == sorted(paths)
    assert len(set(paths)) == len(paths) > 100
    assert {"abc.py", "json/decoder.py"} <= set(paths)
    assert not [name for name in paths if "site-packages" in name or "_sysconfigdata" in name]
    root = Path(sysconfig.get_path("stdlib"))
    assert all(file.path == root / file.name and file.path.suffix == ".py" for file in files)


def test_find_searches_folders_for_text_files(tmp_path):
    write(tmp_path, b_txt="b", a__c_py="c", a__d_md="d", a__e_log="no")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "g.txt").write_text("g")
    assert names(tmp_path) == ["a/c.py", "a/d.md", "b.txt"]


def test_find_returns_the_matches_of_globs(tmp_path, monkeypatch):
    write(tmp_path, x_log="x", a__y_log="y", a__b__z_log="z", a__w_txt="w")
    for hidden in ("a/.h.log", ".c/v.log"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).touch()
    assert names(tmp_path / "*.log") == ["x.log"]
    assert names(tmp_path / "**" / "*.log") == ["a/b/z.log", "a/y.log", "x.log"]
    monkeypatch.chdir(tmp_path)
    assert names("a/*") == ["w.txt", "y.log"]
    assert names("*/y.log") == ["a/y.log"]
    assert names("a/**") == ["b/z.log", "w.txt", "y.log"]
    assert names("a/.h*") == [".h.log"]
    assert names("[ax].*") == ["x.log"]


def test_data_by_url_equals_local_data(bucket, tmp_path):
    root = write(tmp_path / "data", x_log="x", y_txt="y", a__y_jsonl='{"text": "1"}', a__b__z_log="z", a__e_txt="e")
    (root / ".h.txt").write_text("hidden")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["p", "q"]}), root / "a" / "t.parquet")
    fsspec.filesystem("s3").put(str(root), f"{bucket}/data", recursive=True)
    for entries in (
        ("",), ("/",), ("/x.log",), ("/*.log",), ("/**/*.log",), ("/a/*",), ("/**",), ("/.*",),
        ("/a/b/*.log", "/**/*.log"), ("/a/t.parquet", "/y.txt"),
    ):  # fmt: skip
        local, urls = ([f"{prefix}{entry}" for entry in entries] for prefix in (root, f"{bucket}/data"))
        assert names(*urls) == names(*local), entries
        assert texts(*urls) == texts(*local), entries
    for entry in ("/none.txt", "/*.none"):
        with raises("not-found"):
            find([f"{bucket}/data{entry}"])


def test_find_removes_duplicates_and_links(tmp_path):
    write(tmp_path, a_txt="a", b_txt="b")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    assert names(tmp_path / "b.txt", tmp_path / "*.txt", tmp_path) == ["b.txt", "a.txt"]


def test_names_do_not_depend_on_the_location(tmp_path):
    first = write(tmp_path / "here", a__x_txt="1", a__y_txt="2")
    second = shutil.copytree(first, tmp_path / "far" / "there")
    assert names(first) == names(second)
    assert names(first / "**/*.txt") == names(second / "**/*.txt")
    assert names(first / "a" / "x.txt") == names(second / "a" / "x.txt") == ["x.txt"]


def test_equal_names_get_more_components(tmp_path):
    write(tmp_path, a__sub__x_txt="1", b__sub__x_txt="2", c__y_txt="3")
    files = (tmp_path / "a/sub/x.txt", tmp_path / "b/sub/x.txt", tmp_path / "c/y.txt")
    assert names(*files) == ["a/sub/x.txt", "b/sub/x.txt", "y.txt"]


def test_plain_text_is_not_changed_and_binary_files_are_skipped(tmp_path):
    write(tmp_path, a_txt="one\r\ntwo\n", b_txt="Füße", c_txt="")
    (tmp_path / "d[1].txt").write_bytes(b"\xff\xfe not UTF-8")
    reading = Reading(files=find([str(tmp_path)]))
    assert [(d.name, d.text, d.num_bytes) for d in reading] == [("a.txt", "one\r\ntwo\n", 9), ("b.txt", "Füße", 6)]
    assert reading.skipped == ["d[1].txt"]
    with raises("bad-syntax", str(tmp_path / "d[1].txt")):
        texts(tmp_path / "d[1].txt")


def test_jsonl_lines_are_documents(tmp_path):
    rows = [{"text": "one", "n": 1}, {"text": "two\u2028lines"}, {"text": ""}]
    body = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(body, encoding="utf-8")
    assert texts(tmp_path) == {"a.jsonl:1": "one", "a.jsonl:3": "two\u2028lines"}
    (tmp_path / "a.jsonl").write_text('{"body": "other"}')
    assert texts(tmp_path, text_field="body") == {"a.jsonl:1": "other"}


def test_parquet_rows_are_documents(tmp_path):
    table = pyarrow.table({"id": [1, 2, 3], "body": ["one", "", "three"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path, text_field="body") == {"a.parquet:1": "one", "a.parquet:3": "three"}


@pytest.mark.parametrize(
    ("max_bytes", "expected"),
    [(None, "abcdefüx"), (8, "abcdefü"), (7, "abcdef"), (6, "abcdef"), (4, "abcd"), (1, "a"), (100, "abcdefüx")],
)
def test_reading_stops_at_max_bytes(tmp_path, max_bytes, expected):
    # No document follows a truncated document, even if it would fit.
    write(tmp_path, a_txt="abc", b_txt="defü", c_txt="x")
    assert "".join(texts(tmp_path, max_bytes=max_bytes).values()) == expected


def test_a_document_that_is_truncated_between_parts_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("meshpar.data.text._READ_BYTES", 3)
    write(tmp_path, a_txt="abcdefg")
    for max_bytes, parts in (
        (3, ["abc", ""]),
        (5, ["abc", "de"]),
        (6, ["abc", "def", ""]),
        (None, ["abc", "def", "g"]),
    ):
        documents = list(Reading(files=find([str(tmp_path)]), max_bytes=max_bytes))
        assert [document.text for document in documents] == parts
        assert [document.goes_on for document in documents] == [True] * (len(parts) - 1) + [False]


def test_missing_path_suggests_similar_names(tmp_path):
    write(tmp_path, notes_txt="x")
    with raises("missing-file", str(tmp_path / "note.txt")[:80]) as error:
        find([str(tmp_path / "note.txt")])
    assert "`notes.txt`" in error.value.fix
    with raises("missing-file") as error:
        find([str(tmp_path / "no" / "such" / "folder")])
    assert "stdlib" in error.value.reason


@pytest.mark.parametrize("entry", ["*.rst", "**/*.rst", "."])
def test_entry_without_matches_is_an_error(tmp_path, entry):
    (tmp_path / "a.log").write_text("x")
    with raises("not-found") as error:
        find([str(tmp_path / entry)])
    assert str(tmp_path) in error.value.reason


def test_empty_files_are_an_error(tmp_path):
    write(tmp_path, a_txt="")
    with raises("not-found", "files"):
        texts(tmp_path)
    write(tmp_path, a_txt="ä")
    with raises("not-found", "files") as error:
        texts(tmp_path, max_bytes=1)
    assert "no complete character in the first 1 byte" in error.value.reason


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"text": "incomplete', "bad-syntax"),
        (b"[" * 100_000, "bad-syntax"),
        (b'["a", "b"]', "wrong-type"),
        (b'{"texts": "a"}', "unknown-name"),
        (b'{"text": 3}', "wrong-type"),
        (b'{"text": "\xff"}', "bad-syntax"),
        (b'{"text": "\\ud800"}', "bad-syntax"),
    ],
)
def test_invalid_jsonl_line_is_an_error(tmp_path, line, code):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with raises(code, f"{tmp_path / 'a.jsonl'}, line 3"):
        texts(tmp_path)


def test_invalid_parquet_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"texts": ["a", None], "n": [1, 2]}), path)
    for field, code, where in (
        ("text", "unknown-name", ""),
        ("n", "wrong-type", "row 1"),
        ("texts", "wrong-type", "row 2"),
    ):
        with raises(code, str(path)) as error:
            texts(path, text_field=field)
        assert where in error.value.where
    duplicate = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    latin = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xe4"]).buffers())
    for table, code in ((duplicate, "conflict"), (pyarrow.table({"text": latin}), "bad-syntax")):
        pyarrow.parquet.write_table(table, path)
        for read in (texts, lambda path: list(records(find([str(path)]), "text"))):
            with raises(code, str(path)):
                read(path)
    path.write_text("not parquet")
    with raises("damaged-file", str(path)):
        texts(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some words " * 9] * 2000}), path)
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196  # keeps the footer, which is read first
    path.write_bytes(data)
    with raises("damaged-file", str(path)):
        texts(path)
