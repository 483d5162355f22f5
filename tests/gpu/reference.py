"""Values and gradients on the device of the suite, and their references in float32 on the CPU."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ON_GPU = jax.default_backend() == "gpu"
DEVICE, CPU = jax.devices()[0], jax.devices("cpu")[0]
BFLOAT16_RTOL = 1e-2
"""Three roundings of bfloat16 (2^-8). Measured on an H100: at most 3.5e-3."""
TF32_RTOL = 2e-3
"""Matmuls of float32 arrays round operands to TF32 (2^-11). Measured on an H100: 5e-4."""
FP8_RTOL = 8e-2
"""Gradients in e5m2 are rounded by at most 2^-3. Measured on an H100: 5.9e-2."""


def size(on_gpu: int, on_cpu: int) -> int:
    """Return a size for the device of the suite."""
    return on_gpu if ON_GPU else on_cpu


def available(kernel: str, substitute: str = "blockwise") -> str:
    """Return the name of a GPU kernel, or its substitute on CPU devices. Skip the test if its package is missing."""
    if kernel == "tokamax" and ON_GPU and importlib.util.find_spec("tokamax") is None:
        pytest.skip("tests a kernel of tokamax, which needs `pip install meshpar[cuda13]` with Python 3.12 or newer")
    return kernel if ON_GPU or kernel not in ("cudnn", "tokamax") else substitute


def normal(seed: int, *shapes: Sequence[int]) -> list[np.ndarray]:
    """Return arrays of standard normal float32 numbers."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def value_and_gradients(function: Callable[..., Any], cotangent: np.ndarray) -> Callable[..., tuple[Any, ...]]:
    """Return a function that computes the value of `function` and the gradients of all arguments."""

    def run(*args: jax.Array) -> tuple[Any, ...]:
        value, backward = jax.vjp(function, *args)
        return value, *backward(jnp.asarray(cotangent, value.dtype))

    return run


def run_on(device: jax.Device, function: Callable[..., Any], *args: np.ndarray, dtype: Any = None) -> Any:
    """Compile and run a function on a device, with the arguments converted to a dtype."""
    with jax.default_device(device):
        return jax.device_get(jax.jit(function)(*(jax.device_put(jnp.asarray(x, dtype), device) for x in args)))


def relative_errors(actual: Any, expected: Any) -> list[float]:
    """Return the norm of the difference of each array, relative to the norm of the expected array."""

    def error(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    return jax.tree.leaves(jax.tree.map(error, tuple(actual), tuple(expected)))


def assert_close_to_cpu(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    args: Sequence[np.ndarray],
    cotangent: np.ndarray,
    *,
    dtype: Any = jnp.bfloat16,
    rtol: float = BFLOAT16_RTOL,
) -> None:
    """Compare value and gradients of `function` with `reference`, which runs in float32 on the CPU."""
    actual = run_on(DEVICE, value_and_gradients(function, cotangent), *args, dtype=dtype)
    with jax.default_matmul_precision("highest"):
        # Both start from the same rounded arguments.
        rounded = [np.asarray(jnp.asarray(x, dtype), np.float32) for x in args]
        expected = run_on(CPU, value_and_gradients(reference, cotangent), *rounded, dtype=jnp.float32)
    errors = relative_errors(actual, expected)
    assert max(errors) < rtol, errors


def compiled_text(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return the program of a function, compiled for the default device with these options of XLA."""
    return jax.jit(function).lower(*args).compile(options).as_text()


def library_calls(text: str) -> list[str]:
    """Return the names of the kernels that a program calls, such as `__cudnn$fmhaSoftmax`."""
    return re.findall(r'custom_call_target="([^"]+)"', text)
