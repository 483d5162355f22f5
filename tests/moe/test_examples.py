"""Examples in the docstrings of MoE layers."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["grouped", "layer_config", "nnx", "routing"])
def test_examples_run(module):
    result = doctest.testmod(importlib.import_module(f"meshpar.moe.{module}"))
    assert result.attempted
    assert not result.failed
