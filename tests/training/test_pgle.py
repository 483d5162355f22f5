"""Profile-guided latency estimation: checks, and the JAX options that it sets."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshpar.runs.training_run import run
from meshpar.training.pgle import CACHE_FOLDER, check_pgle, pgle_enabled
from tests.errors import raises
from tests.runs.test_recipe import small

GPUS = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))


def test_train_refuses_pgle_on_cpus_before_writing(tmp_path):
    with raises("unsupported-feature", "Recipe.pgle=True"):
        run(small(pgle=True), out=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [("jax_enable_compilation_cache", False, "conflict"), ("jax_pgle_profiling_runs", 0, "out-of-range")],
)
def test_check_pgle_names_conflicting_jax_options(option, value, code):
    check_pgle(GPUS)
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        with raises(code) as error:
            check_pgle(GPUS)
        assert option in error.value.reason
    finally:
        jax.config.update(option, before)


def test_check_pgle_refuses_profile():
    with raises("conflict"):
        check_pgle(GPUS, profile=(1, 2))


@pytest.mark.parametrize("is_set", [False, True])
def test_pgle_enabled_sets_and_restores_options(tmp_path, monkeypatch, is_set):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "user") if is_set else None)
    try:
        with pgle_enabled(tmp_path / "runs"):
            assert jax.config.jax_enable_pgle
            expected = tmp_path / "user" if is_set else tmp_path / "runs" / CACHE_FOLDER
            assert jax.config.jax_compilation_cache_dir == str(expected)
        assert not jax.config.jax_enable_pgle
        assert jax.config.jax_compilation_cache_dir == (str(tmp_path / "user") if is_set else None)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    folder = tmp_path / "runs" / CACHE_FOLDER
    assert folder.exists() != is_set
    if not is_set:
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("value", [1, "yes", None])
def test_recipe_refuses_pgle_that_is_not_a_bool(value):
    with raises("not-a-bool"):
        small(pgle=value)
