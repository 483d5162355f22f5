"""Tests on a GPU: skipped without one, and with small sizes on CPU devices if `MESHPAR_TEST_GPU=cpu`."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Annotated

import jax
import pytest

if importlib.util.find_spec("jaxtyping") is None:  # Its types are annotations, which no test reads.
    stub = types.ModuleType("jaxtyping")
    stub.__getattr__ = lambda name: jax.Array if name == "Array" else Annotated  # type: ignore[method-assign]
    sys.modules["jaxtyping"] = stub

HERE = Path(__file__).parent


def reason_to_skip() -> str:
    """Return why the tests cannot run in this process, or an empty string."""
    if os.environ["MESHPAR_TEST_GPU"] == "cpu" or jax.default_backend() == "gpu":
        return ""
    devices = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    return f"needs a GPU, a driver and jax[cuda12] or jax[cuda13]; JAX {jax.__version__} found only: {devices}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all tests without a GPU. Warnings of GPU libraries are not errors."""
    reason = reason_to_skip()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("default"))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def gpu() -> jax.Device:
    """Return the GPU. Tests that read the kernels of a program have no counterpart on CPU devices."""
    if jax.default_backend() != "gpu":
        pytest.skip("reads the names of GPU kernels in a compiled program, which programs for CPUs do not have")
    return jax.devices()[0]
