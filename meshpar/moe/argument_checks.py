"""Checks of the arguments of functions on routed tokens."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from meshpar.sharding.errors import check_cases, check_number, problem

_DTYPES = {"floating": (jnp.floating, "floating-point numbers"), "integer": (jnp.integer, "integers")}


def check_array(
    where: str, name: str, x: object, dims: str, dtype: Literal["floating", "integer"] = "floating"
) -> None:
    """Check that `x` is a floating-point or integer array. `dims` names its dims, such as "T k"; "..." allows any."""
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
    raise problem(where, requested, f"it must be {expected} of {numbers}", "pass such a JAX or NumPy array", code)


def check_scores(where: str, scores: Any, experts: Any) -> None:
    """Check that scores [T, E] and experts [T, k] describe the same tokens, and that T is at least 1."""
    check_array(where, "scores", scores, "T E")
    check_array(where, "experts", experts, "T k", "integer")
    requested = f"use scores of shape {scores.shape} with experts of shape {experts.shape}"
    reason, fix = "they must be [T, E] and [T, k], with T of at least 1", "pass both from the same `Routed`"
    check_cases(where, requested, "wrong-shape", (len(scores) != len(experts) or not len(scores), reason, fix))


def check_mask(where: str, mask: Any, *shape: int) -> None:
    """Check that a mask of tokens is None, or a boolean array of this shape."""
    if mask is None:
        return
    reason = f"it must be a boolean array of shape {shape}, False for padding"
    requested = f"use `mask` with shape {jnp.shape(mask)} and dtype {jnp.result_type(mask)}"
    is_wrong = jnp.shape(mask) != shape or jnp.result_type(mask) != jnp.bool_
    check_cases(where, requested, "wrong-shape", (is_wrong, reason, "pass one element per token, such as segments > 0"))


def check_routed(where: str, x: Any, experts: Any, weights: Any) -> None:
    """Check that tokens [T, d], their experts [T, k] and gate weights [T, k] have matching shapes."""
    check_array(where, "x", x, "T d")
    check_array(where, "experts", experts, "T k", "integer")
    check_array(where, "weights", weights, "T k")
    is_wrong = experts.shape != weights.shape or len(x) != len(experts) or not experts.size or not x.size
    requested = f"use x {x.shape}, experts {experts.shape} and weights {weights.shape}"
    reason = "they must be [T, d], [T, k] and [T, k], without dims of size 0"
    fix = "pass k experts and k weights per token; expert -1 means unassigned"
    check_cases(where, requested, "wrong-shape", (is_wrong, reason, fix))


def check_factor(where: str, **values: Any) -> None:
    """Check that arguments are finite numbers of at least 0, or scalar arrays from a schedule."""
    for name, value in values.items():
        if not (getattr(value, "shape", None) == () and jnp.issubdtype(value.dtype, jnp.number)):
            check_number(where, "0.001", positive=False, **{name: value})


def check_bound(where: str, factor: Any) -> None:
    """Check a `bound_factor`: a positive number or None."""
    if factor is not None:
        check_number(where, "2.0 for twice a balanced load, or None for any routing", bound_factor=factor)
