"""Finding files and reading documents."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from meshpar.data.text import Reading, find, records
from meshpar.sharding.types import MeshparError


def write(root: Path, **files: str) -> Path:
    """Writes `a__b_txt="..."` as the file a/b.txt under root."""
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


def message(error: pytest.ExceptionInfo[MeshparError], *parts: object) -> None:
    """All four parts are there, and each of `parts` is said."""
    assert all((error.value.where, error.value.requested, error.value.reason, error.value.fix))
    for part in parts:
        assert str(part) in str(error.value)


def test_stdlib_is_the_librarys_own_source_in_order():
    files = find(["stdlib"])
    found = [file.name for file in files]
    assert found == sorted(found)
    assert len(set(found)) == len(found) > 100
    assert {"abc.py", "json/decoder.py"} <= set(found)
    assert not [name for name in found if "site-packages" in name or "_sysconfigdata" in name]
    root = Path(sysconfig.get_path("stdlib"))
    assert all(file.path == root / file.name and file.path.suffix == ".py" for file in files)


def test_a_folder_is_searched_for_text(tmp_path):
    write(tmp_path, b_txt="b", a__c_py="c", a__d_md="d", a__e_log="no")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "g.txt").write_text("g")
    assert names(tmp_path) == ["a/c.py", "a/d.md", "b.txt"]


def test_a_glob_takes_what_it_matches(tmp_path, monkeypatch):
    write(tmp_path, x_log="x", a__y_log="y", a__b__z_log="z", a__w_txt="w")
    assert names(tmp_path / "*.log") == ["x.log"]
    assert names(tmp_path / "**" / "*.log") == ["a/b/z.log", "a/y.log", "x.log"]
    monkeypatch.chdir(tmp_path)
    assert names("a/*") == ["w.txt", "y.log"]
    assert names("*/y.log") == ["a/y.log"]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("bracket")
    assert texts(tmp_path / "a[1].txt") == {"a[1].txt": "bracket"}


def test_a_file_reached_twice_is_one_document(tmp_path):
    write(tmp_path, a_txt="a", b_txt="b")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    assert names(tmp_path / "b.txt", tmp_path / "*.txt", tmp_path) == ["b.txt", "a.txt"]


def test_names_do_not_depend_on_where_the_data_lies(tmp_path):
    here = write(tmp_path / "here", a__x_txt="1", a__y_txt="2")
    there = shutil.copytree(here, tmp_path / "far" / "there")
    assert names(here) == names(there)
    assert names(here / "**/*.txt") == names(there / "**/*.txt")
    assert names(here / "a" / "x.txt") == names(there / "a" / "x.txt") == ["x.txt"]


def test_equal_names_grow_until_they_differ(tmp_path):
    write(tmp_path, a__sub__x_txt="1", b__sub__x_txt="2", c__y_txt="3")
    files = (tmp_path / "a/sub/x.txt", tmp_path / "b/sub/x.txt", tmp_path / "c/y.txt")
    assert names(*files) == ["a/sub/x.txt", "b/sub/x.txt", "y.txt"]


def test_plain_text_is_kept_byte_for_byte(tmp_path):
    write(tmp_path, a_txt="one\r\ntwo\n", b_txt="Füße", c_txt="")
    reading = Reading(files=find([str(tmp_path)]))
    assert [(d.name, d.text, d.num_bytes) for d in reading] == [
        ("a.txt", "one\r\ntwo\n", 9),
        ("b.txt", "Füße", 6),
    ]
    assert reading.skipped == []


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
    # A document that is cut must be the last: the small one behind it would still fit.
    write(tmp_path, a_txt="abc", b_txt="defü", c_txt="x")
    assert "".join(texts(tmp_path, max_bytes=max_bytes).values()) == expected


def test_files_that_are_not_text_are_skipped_and_counted(tmp_path):
    write(tmp_path, a_txt="fine")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe not UTF-8")
    reading = Reading(files=find([str(tmp_path)]))
    assert [d.name for d in reading] == ["a.txt"]
    assert reading.skipped == ["b.txt"]


def test_a_file_the_user_named_is_never_skipped(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe not UTF-8")
    with pytest.raises(MeshparError) as error:
        texts(tmp_path / "b.txt")
    message(error, tmp_path / "b.txt", "not UTF-8")
    with pytest.raises(MeshparError) as error:
        texts(tmp_path)
    message(error, "all 1 files that are not UTF-8")


def test_a_missing_path_lists_the_near_ones(tmp_path):
    write(tmp_path, notes_txt="x")
    with pytest.raises(MeshparError) as error:
        find([str(tmp_path / "note.txt")])
    message(error, tmp_path / "note.txt", "`notes.txt`")
    with pytest.raises(MeshparError) as error:
        find([str(tmp_path / "no" / "such" / "folder")])
    message(error, "stdlib")


@pytest.mark.parametrize("entry", ["*.rst", "**/*.rst", "."])
def test_an_entry_that_matches_nothing_is_an_error(tmp_path, entry):
    (tmp_path / "a.log").write_text("x")
    with pytest.raises(MeshparError) as error:
        find([str(tmp_path / entry)])
    message(error, tmp_path, ".jsonl")


def test_only_empty_files_are_an_error(tmp_path):
    write(tmp_path, a_txt="")
    with pytest.raises(MeshparError) as error:
        texts(tmp_path)
    message(error, "only empty files")
    write(tmp_path, a_txt="ä")
    with pytest.raises(MeshparError) as error:
        texts(tmp_path, max_bytes=1)
    message(error, "no whole character in 1 byte")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'["a", "b"]', "a list"),
        (b'{"texts": "a"}', "did you mean `texts`?"),
        (b'{"text": 3}', "a int"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "not UTF-8"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, said):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(MeshparError) as error:
        texts(tmp_path)
    message(error, f"{tmp_path / 'a.jsonl'}, line 3", said)


def test_bad_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"texts": ["a", None], "n": [1, 2]}), path)
    for field, said in (("text", "`texts`"), ("n", "a int"), ("texts", "row 2")):
        with pytest.raises(MeshparError) as error:
            texts(path, text_field=field)
        message(error, path, said)
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    latin = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xe4"]).buffers())
    for table, said in ((twice, "2 columns of that name"), (pyarrow.table({"text": latin}), "not UTF-8")):
        pyarrow.parquet.write_table(table, path)
        for read in (texts, lambda at: list(records(find([str(at)]), "text"))):
            with pytest.raises(MeshparError) as error:
                read(path)
            message(error, path, said)
    path.write_text("not parquet")
    with pytest.raises(MeshparError) as error:
        texts(path)
    message(error, path, "parquet")


def test_a_parquet_file_with_damaged_pages_is_named(tmp_path):
    path = tmp_path / "damaged.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some words " * 9] * 2000}), path)
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196  # the footer at the end, which is read first, stays whole
    path.write_bytes(data)
    with pytest.raises(MeshparError, match="the file is damaged"):
        list(Reading(files=find([str(path)])))


def test_json_that_is_nested_too_deep_is_named(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(MeshparError, match=r"deep.jsonl, line 1.*(nested too deep|not JSON)"):
        list(Reading(files=find([str(path)])))


def test_a_file_that_went_away_is_named(tmp_path):
    write(tmp_path, a_txt="x", b_jsonl="{}")
    files = find([str(tmp_path)])
    for file in files:
        file.path.unlink()
        with pytest.raises(MeshparError) as error:
            list(Reading(files=[file]))
        message(error, file.path, "no such file")
