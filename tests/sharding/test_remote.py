"""Buckets are checked before a run starts, and objects are copied once for each of their versions."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from meshpar.data.text import find
from meshpar.loop.checkpoint import Checkpoints
from meshpar.sharding import remote
from tests.errors import raises


@pytest.fixture
def fresh_client(monkeypatch):
    """Clients read the credentials again, in this test and after it."""
    s3fs = pytest.importorskip("s3fs", reason="reads and writes buckets, which needs `pip install meshpar[remote]`")

    def forget():
        s3fs.S3FileSystem.clear_instance_cache()
        remote._filesystem.cache_clear()

    forget()
    yield
    forget()


def test_check_access_leaves_nothing_in_the_bucket(bucket):
    remote.check_access(f"{bucket}/runs", "--out")
    assert fsspec.filesystem("s3").find(bucket) == []


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("az://bucket/runs", "unsupported-feature"), ("http://host/runs", "unsupported-feature"),
        ("s3://", "bad-syntax"), ("s3://no-such-bucket/runs", "missing-file"),
    ],
)  # fmt: skip
def test_check_access_refuses_urls_it_cannot_write(bucket, url, code):
    with raises(code):
        remote.check_access(url, "--out")


def test_join_accepts_paths_and_keeps_a_missing_bucket():
    assert remote.join(Path("s3://bucket/runs")) == remote.join("s3://bucket/runs/") == "s3://bucket/runs"
    assert remote.join("gs://bucket", "a", "b") == "gs://bucket/a/b"
    for url in ("s3:///runs", "gs:////x"):
        with raises("bad-syntax"):
            remote.check_url(remote.join(url), "--out")


def test_missing_credentials_are_named(bucket, fresh_client, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    with raises("missing-credentials"):
        remote.check_access(f"{bucket}/runs", "--out")


@pytest.mark.parametrize(
    "use",
    [
        lambda url: remote.check_access(url, "--out"), lambda url: remote.filesystem(url, "run"),
        lambda url: remote.copy_of(url, "`tokenizer`"), lambda url: find([url]), lambda url: Checkpoints(url),
    ],
    ids=["write", "filesystem", "copy", "data", "checkpoints"],
)  # fmt: skip
def test_missing_gs_credentials_are_named(fresh_client, monkeypatch, use):
    google = pytest.importorskip("google.auth", reason="needs `pip install meshpar[remote]`")

    def fail(**_):
        raise google.exceptions.DefaultCredentialsError("no credentials")

    monkeypatch.setattr(google, "default", fail)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setitem(fsspec.config.conf, "gs", {})
    with raises("missing-credentials"):
        use("gs://bucket/runs")
    fsspec.config.conf["gs"]["token"] = "anon"  # as FSSPEC_GS_TOKEN=anon
    remote.filesystem("gs://bucket/runs", "run")


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(remote.SCHEMES, "gs", "no_such_package")
    with raises("missing-package"):
        remote.filesystem("gs://bucket/runs", "--out")


def test_copy_is_made_once_for_each_version(bucket):
    files, url = fsspec.filesystem("s3"), f"{bucket}/data/a.txt"
    assert remote.copy_of("local.txt", "`files`") == "local.txt"
    files.pipe_file(url, b"first")
    first = Path(remote.copy_of(url, "`files`"))
    assert str(first).endswith(url.removeprefix("s3:/"))
    assert first.read_text() == "first"
    first.write_text("the copy is not downloaded again")
    assert Path(remote.copy_of(url, "`files`")) == first
    assert first.read_text() != "first"
    files.pipe_file(url, b"second")
    assert Path(remote.copy_of(url, "`files`")).read_text() == "second"
