"""Compiled programs that are kept between runs: their folder, and starts that compile nothing."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.loop.metrics_file import read_lines
from meshpar.runs import compile_cache
from meshpar.runs.compile_cache import UNUSED_S, cache_location, keeping_programs
from meshpar.runs.folder import RunFolder
from tests.errors import raises
from tests.runs.test_training_run import recipe

EVENTS = {f"/jax/compilation_cache/{name}": name for name in ("compile_requests_use_cache", "cache_hits")}


@contextlib.contextmanager
def jax_options(**values):
    before = {name: getattr(jax.config, name) for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@contextlib.contextmanager
def counted_programs():
    """Count the programs that are requested, and those that the cache contains."""
    counts = Counter(dict.fromkeys(EVENTS.values(), 0))

    def count(event, **_):
        if event in EVENTS:
            counts[EVENTS[event]] += 1

    jax.monitoring.register_event_listener(count)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_listener(count)


def trained(out: Path, cache: str | Path, **fields):
    """Return the losses of a new run in an empty process: without the programs that jax holds in memory."""
    jax.clear_caches()
    with counted_programs() as counts:
        outcome = mp.run(recipe(**fields), out=out, compile_cache=cache, stream=io.StringIO())
    return [line["loss"] for line in read_lines(outcome.folder / "metrics.jsonl") if "loss" in line], counts


def test_second_start_compiles_nothing_and_has_bit_equal_losses(tmp_path):
    losses, first = trained(tmp_path / "a", tmp_path / "cache")
    assert first["cache_hits"] < first["compile_requests_use_cache"]
    again, second = trained(tmp_path / "b", tmp_path / "cache")
    assert second["cache_hits"] == second["compile_requests_use_cache"] > 0
    assert losses == again
    assert len(losses) == 4
    resumed, third = trained(tmp_path / "b", tmp_path / "cache", steps=6)
    assert third["cache_hits"] == third["compile_requests_use_cache"] > 0
    assert len(resumed) == 6
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_none_keeps_no_program(tmp_path):
    _, counts = trained(tmp_path / "a", "none")
    assert counts == {"compile_requests_use_cache": 0, "cache_hits": 0}


@pytest.mark.matrix
def test_programs_are_kept_in_a_bucket(bucket, tmp_path):
    losses, first = trained(tmp_path / "a", f"{bucket}/cache")
    again, second = trained(tmp_path / "b", f"{bucket}/cache")
    assert first["cache_hits"] == 0
    assert second["cache_hits"] == second["compile_requests_use_cache"] > 0
    assert losses == again


@pytest.mark.parametrize(
    ("option", "platform", "is_pod", "set_in_jax", "expected"),
    [
        (None, "cpu", False, None, None),
        (None, "gpu", False, None, "{tmp}/user/programs"),
        (None, "gpu", True, None, "{tmp}/runs/jax_cache"),
        (None, "cpu", False, "{tmp}/jax", "{tmp}/jax"),
        (None, "gpu", True, "{tmp}/jax", "{tmp}/jax"),
        ("none", "gpu", False, "{tmp}/jax", None),
        ("{tmp}/mine", "cpu", False, "{tmp}/jax", "{tmp}/mine"),
    ],
)
def test_location(tmp_path, monkeypatch, option, platform, is_pod, set_in_jax, expected):
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "user"))
    monkeypatch.setattr(compile_cache, "this_pod", lambda: SimpleNamespace(process_id=0) if is_pod else None)
    monkeypatch.setattr(compile_cache, "check_shared", lambda pod, folder: None)
    option, set_in_jax, expected = (text and text.format(tmp=tmp_path) for text in (option, set_in_jax, expected))
    with jax_options(jax_compilation_cache_dir=set_in_jax):
        folder = RunFolder(tmp_path / "runs" / "small")
        assert cache_location(option, platform=platform, folder=folder, warn=pytest.fail) == expected
    assert (tmp_path / "user").exists() == (expected == f"{tmp_path}/user/programs")


def test_pod_with_runs_in_a_bucket_keeps_its_programs_there(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "this_pod", lambda: SimpleNamespace(process_id=0))
    with jax_options(jax_compilation_cache_dir=None):
        folder = RunFolder(tmp_path, "gs://bucket/runs/small")
        location = cache_location(None, platform="gpu", folder=folder, warn=pytest.fail)
    assert location == "gs://bucket/runs/jax_cache"
    with keeping_programs(location):
        assert jax.config.jax_persistent_cache_enable_xla_caches is None


def test_profiled_runs_load_no_program_with_other_scopes(tmp_path):
    def program(scope):
        jax.clear_caches()
        jax.jit(jax.named_scope(scope)(lambda x: jnp.sin(x) + 1))(np.float32(1))

    def hits(**options):
        with jax_options(jax_compilation_cache_include_metadata_in_key=False), counted_programs() as counts:
            for scope in ("attention", "mlp"):
                with keeping_programs(f"{tmp_path}/{options}", **options):
                    program(scope)
        return counts["cache_hits"]

    assert hits() == 1
    assert hits(is_profiled=True) == 0


def test_unusable_folders(tmp_path, monkeypatch):
    """A folder of the user's own is an error; without the default folder programs are compiled at each start."""
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / "runs" / "small")
    with raises("not-writable") as error:
        cache_location(tmp_path / "file" / "cache", platform="cpu", folder=folder, warn=pytest.fail)
    assert "--compile-cache none" in error.value.fix
    with raises("unsupported-feature"):
        cache_location("ftp://host/cache", platform="cpu", folder=folder, warn=pytest.fail)
    with raises("wrong-type", "mp.run"):
        mp.run(recipe(), out=tmp_path, compile_cache=3)
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "file"))
    warnings = []
    with jax_options(jax_compilation_cache_dir=None):
        assert cache_location(None, platform="gpu", folder=folder, warn=warnings.append) is None
    assert "Not a directory" in warnings[0]


def test_programs_that_no_run_reads_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path))
    old, recent = (tmp_path / "programs" / name for name in ("old-cache", "recent-cache"))
    old.parent.mkdir()
    for path, age_s in ((old, UNUSED_S + 60), (recent, UNUSED_S - 60)):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    with jax_options(jax_compilation_cache_dir=None):
        cache_location(None, platform="gpu", folder=RunFolder(tmp_path / "runs" / "small"), warn=pytest.fail)
    assert [path.name for path in old.parent.iterdir()] == ["recent-cache"]
