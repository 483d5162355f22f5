"""Checks of the arguments of functions on routed tokens."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax.numpy as jnp

from meshpar.sharding.types import is_int, problem

_DTYPES = {"floating": (jnp.floating, "floating-point numbers"), "integer": (jnp.integer, "integers")}


def check_array(where: str, name: str, x: Any, dims: str, dtype: Literal["floating", "integer"] = "floating") -> None:
    """Check that an argument is an array with these dims and this kind of dtype.

    Args:
      where: the function that received the argument.
      name: the name of the argument.
      x: its value.
      dims: names of its dims, such as "T k", or "..." for any number of dims.
      dtype: the kind of dtype.
    """
    shape, (kind, numbers) = getattr(x, "shape", None), _DTYPES[dtype]
    if shape is None or not hasattr(x, "dtype"):
        code, requested = "wrong-type", f"use a {type(x).__name__} as `{name}`"
    elif not jnp.issubdtype(x.dtype, kind):
        code, requested = "wrong-dtype", f"use `{name}` with dtype {x.dtype}"
    elif dims != "..." and len(dims.split()) != len(shape):
        code, requested = "wrong-shape", f"use `{name}` with shape {shape}"
    else:
        return
    expected = "an array" if dims == "..." else f"an array [{', '.join(dims.split())}]"
    raise problem(where, requested, f"it must be {expected} of {numbers}", "pass a JAX or NumPy array like that", code)


def check_scores(where: str, scores: Any, experts: Any) -> None:
    """Check that scores [T, E] and experts [T, k] describe the same tokens, and at least one."""
    check_array(where, "scores", scores, "T E")
    check_array(where, "experts", experts, "T k", "integer")
    if len(scores) != len(experts) or not len(scores):
        raise problem(
            where,
            f"use scores of shape {scores.shape} with experts of shape {experts.shape}",
            "they are [T, E] and [T, k] of the same T tokens, with T of at least 1",
            "pass `scores` and `experts` of the same `Routed`",
            "wrong-shape",
        )


def check_routed(where: str, x: Any, experts: Any, weights: Any) -> None:
    """Check that tokens [T, d], their experts [T, k] and gate weights [T, k] belong together."""
    check_array(where, "x", x, "T d")
    check_array(where, "experts", experts, "T k", "integer")
    check_array(where, "weights", weights, "T k")
    if experts.shape != weights.shape or len(x) != len(experts) or not experts.size or not x.size:
        raise problem(
            where,
            f"use x {x.shape}, experts {experts.shape} and weights {weights.shape}",
            "they are [T, d], [T, k] and [T, k], without dims of size 0",
            "pass k experts and k weights per token; expert -1 marks an unassigned one",
            "wrong-shape",
        )


def check_whole(where: str, name: str, value: Any, *, least: int = 1) -> None:
    """Check that an argument is an integer of at least `least`."""
    if not is_int(value, least):
        reason = f"it must be an integer of at least {least}"
        raise problem(where, f"set {name}={value!r}", reason, f"use {name}={max(least, 1)}", "not-an-int")


def check_factor(where: str, name: str, value: Any, *, scheduled: bool = True) -> None:
    """Check that an argument is a finite number of at least 0, or a scalar array from a schedule."""
    if scheduled and getattr(value, "shape", None) == () and jnp.issubdtype(value.dtype, jnp.number):
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        reason = "it must be a finite number of at least 0"
        raise problem(where, f"set {name}={value!r}", reason, f"use {name}=0.001", "out-of-range")


def check_positive(where: str, name: str, value: Any, fix: str) -> None:
    """Check that an argument is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        reason = "it must be a finite number above 0"
        raise problem(where, f"set {name}={value!r}", reason, f"use {name}={fix}", "out-of-range")
