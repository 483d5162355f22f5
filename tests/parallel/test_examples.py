"""Tests of the examples in the docstrings of strategies and collectives."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from meshpar import parallel

MODULES = [f"{parallel.__name__}.{module.name}" for module in pkgutil.iter_modules(parallel.__path__)]
MODULES.append("meshpar.collectives.reduction")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert not doctest.testmod(importlib.import_module(name)).failed


def test_every_strategy_has_an_example():
    without = [name for name, make in parallel.PRESETS.items() if ">>>" not in (make.__doc__ or "")]
    assert not without, f"give the docstring of {', '.join(without)} an example"
