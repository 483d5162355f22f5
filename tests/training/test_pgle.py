"""Profile-guided latency estimation: checks, and the JAX options that it sets."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshpar.runs.training_run import run
from meshpar.training.pgle import check_pgle, pgle_enabled
from tests.errors import raises
from tests.runs.test_compile_cache import jax_options
from tests.runs.test_recipe import small

GPUS = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))


def test_train_refuses_pgle_on_cpus_before_writing(tmp_path):
    with raises("unsupported-feature", "Recipe.pgle=True"):
        run(small(pgle=True), out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_check_pgle_names_conflicts():
    check_pgle(GPUS, keeps_programs=True)
    with raises("conflict") as error:
        check_pgle(GPUS, keeps_programs=False)
    assert "--compile-cache DIR" in error.value.fix
    with raises("conflict"):
        check_pgle(GPUS, profile=(1, 2), keeps_programs=True)
    with jax_options(jax_pgle_profiling_runs=0), raises("out-of-range") as error:
        check_pgle(GPUS, keeps_programs=True)
    assert "jax_pgle_profiling_runs" in error.value.reason


def test_pgle_enabled_restores_the_option():
    with pgle_enabled():
        assert jax.config.jax_enable_pgle
    assert not jax.config.jax_enable_pgle


@pytest.mark.parametrize("value", [1, "yes", None])
def test_recipe_refuses_pgle_that_is_not_a_bool(value):
    with raises("not-a-bool"):
        small(pgle=value)
