"""A run folder in a bucket: files are uploaded when they change, and a single run writes to it."""

from __future__ import annotations

import json
import os
import shutil
import threading

import fsspec
import pytest

from meshpar.runs import folder as module
from meshpar.runs.folder import run_folder
from tests.errors import raises


def no_warning(text: str) -> None:
    raise AssertionError(text)


def test_local_folder_is_used_as_it_is(tmp_path):
    with run_folder(tmp_path / "run", write=True) as folder:
        folder.upload()
        assert (folder.local, str(folder), folder.path) == (tmp_path / "run", f"{tmp_path}/run", tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_files_return_without_the_checkpoints(bucket):
    url, files = f"{bucket}/runs/a", fsspec.filesystem("s3")
    with run_folder(url, write=True) as folder:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "x.txt").write_text("1")
        (folder / "x.txt.new").write_text("temporary")
    files.pipe_file(f"{url}/checkpoints/1/y", b"y")
    with run_folder(url) as folder:
        assert {path.name for path in folder.local.rglob("*")} == {"deep", "x.txt"}
        assert (folder / "deep" / "x.txt").read_text() == "1"
        temporary = folder.local
    assert not temporary.exists()
    assert folder.path.joinpath("deep", "x.txt").read_text() == "1"


def test_only_changed_files_are_uploaded(bucket):
    url, files = f"{bucket}/runs/a", fsspec.filesystem("s3")
    with run_folder(url, write=True) as folder:
        folder.local.mkdir(exist_ok=True)
        for name in ("a", "b"):
            (folder / name).write_text("1")
        folder.upload()
        files.pipe_file(f"{url}/a", b"changed by another")
        (folder / "b").write_text("22")
    assert (files.cat_file(f"{url}/a"), files.cat_file(f"{url}/b")) == (b"changed by another", b"22")


def test_object_that_leads_out_of_the_folder_is_refused(bucket):
    fsspec.filesystem("s3").pipe_file(f"{bucket}/runs/a/../../../x", b"")
    with raises("bad-syntax"), run_folder(f"{bucket}/runs/a"):
        pass


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "UPLOAD_EVERY_S", 0.2)
    monkeypatch.setattr(module, "LEASE_S", 1.0)


def test_lease_keeps_a_second_run_out_until_the_end(bucket, quick):
    messages = []
    with run_folder(f"{bucket}/a", write=True, warn=no_warning):
        with raises("conflict"), run_folder(f"{bucket}/a", write=True, warn=messages.append):
            pass
        with run_folder(f"{bucket}/a"):
            pass
    assert f"process {os.getpid()}" in messages[0]
    with run_folder(f"{bucket}/a", write=True, warn=no_warning):
        pass


def test_lease_of_a_killed_run_ends(bucket, quick):
    messages, files = [], fsspec.filesystem("s3")
    lease = {"host": "other", "pid": 1, "id": "x", "count": 1}
    files.pipe_file(f"{bucket}/a/.lease", json.dumps(lease).encode())
    with run_folder(f"{bucket}/a", write=True, warn=messages.append):
        assert "process 1 on other" in messages[0]


def test_lost_lease_stops_the_uploads(bucket, quick):
    files, seen = fsspec.filesystem("s3"), threading.Event()
    with raises("conflict"), run_folder(f"{bucket}/a", write=True, warn=no_warning) as folder:
        folder.upload()
        files.pipe_file(f"{bucket}/a/.lease", json.dumps({"id": "other"}).encode())
        while not folder._lost:
            seen.wait(0.05)
    assert json.loads(files.cat_file(f"{bucket}/a/.lease")) == {"id": "other"}


def test_changed_files_are_uploaded_in_the_background(bucket, quick):
    url, files, wait = f"{bucket}/a", fsspec.filesystem("s3"), threading.Event()
    with run_folder(url, write=True, warn=no_warning) as folder:
        folder.upload()
        folder.local.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("{}\n")
        while not files.exists(f"{url}/metrics.jsonl"):
            wait.wait(0.05)


def test_files_of_a_failed_upload_are_kept(bucket, quick):
    with raises("missing-file") as error, run_folder(f"{bucket}/a", write=True) as folder:
        folder.local.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("{}\n")
        folder.url = "s3://no-such-bucket/a"
    assert str(folder.local) in error.value.__notes__[0]
    assert (folder / "metrics.jsonl").exists()
    shutil.rmtree(folder.local.parent)
