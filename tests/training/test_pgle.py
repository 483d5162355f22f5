"""Profile-guided latency estimation: where it is refused, and which options of jax it sets."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import meshpar as mp
from meshpar.cli.train_command import train
from meshpar.training.pgle import CACHE_FOLDER, check_pgle, pgle_enabled
from tests.cli.test_recipe import small

GPUS = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))


def test_a_run_on_cpus_refuses_it_before_it_writes(tmp_path):
    with pytest.raises(mp.MeshparError, match=r"Recipe.pgle=True.*only XLA's GPU compiler.*these devices are cpus"):
        train(small(pgle=True), out=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("jax_enable_compilation_cache", False, "jax_enable_compilation_cache is off"),
        ("jax_pgle_profiling_runs", 0, "jax_pgle_profiling_runs is 0"),
    ],
)
def test_options_of_jax_that_forbid_it_are_named(option, value, says):
    check_pgle(GPUS)
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        with pytest.raises(mp.MeshparError, match=says):
            check_pgle(GPUS)
    finally:
        jax.config.update(option, before)


def test_a_second_profiler_is_refused():
    with pytest.raises(mp.MeshparError, match=r"one profiler at a time.*JAX_COMPILATION_CACHE_EXPECT_PGLE"):
        check_pgle(GPUS, profile=(1, 2))


@pytest.mark.parametrize("is_set", [False, True])
def test_it_is_on_with_a_private_cache_and_off_afterwards(tmp_path, monkeypatch, is_set):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own") if is_set else None)
    try:
        with pgle_enabled(tmp_path / "runs"):
            assert jax.config.jax_enable_pgle
            wanted = tmp_path / "own" if is_set else tmp_path / "runs" / CACHE_FOLDER
            assert jax.config.jax_compilation_cache_dir == str(wanted)
        assert not jax.config.jax_enable_pgle
        assert jax.config.jax_compilation_cache_dir == (str(tmp_path / "own") if is_set else None)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    folder = tmp_path / "runs" / CACHE_FOLDER
    assert folder.exists() != is_set
    if not is_set:
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_it_is_true_or_false(wrong):
    with pytest.raises(mp.MeshparError, match=r"pgle=.*True or False"):
        small(pgle=wrong)
