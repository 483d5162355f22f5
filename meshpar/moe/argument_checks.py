"""What is asked of functions on routed tokens, checked where they are called: four-part errors before any trace."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshpar.sharding.types import is_whole, problem

_KINDS = {"floating": jnp.floating, "whole": jnp.integer}


def check_array(kernel: str, name: str, x: Any, dims: str, of: Literal["floating", "whole"] = "floating") -> None:
    """Raises `ValueError` for what is no array of so many dims and of that kind of numbers.

    Args:
      kernel: who asks.
      name: of the argument.
      x: given for it.
      dims: their letters, as "T k"; "...": any number of dims.
      of: kind of the numbers.
    """
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is None or dtype is None:
        asked = f"take a {type(x).__name__} for `{name}`"
    elif not jnp.issubdtype(dtype, _KINDS[of]) or (dims != "..." and len(dims.split()) != len(shape)):
        asked = f"take `{name}` of shape {shape} and dtype {dtype}"
    else:
        return
    wanted = f"[{', '.join(dims.split())}]"
    raise problem(kernel, asked, f"it is an array {wanted} of {of} numbers", f"give a jax or NumPy array {wanted}")


def check_tokens(kernel: str, scores: Any, experts: Any) -> None:
    """Raises `ValueError` unless these are scores [T, E] and choices [T, k] of the same tokens, of one at least."""
    check_array(kernel, "scores", scores, "T E")
    check_array(kernel, "experts", experts, "T k", "whole")
    if len(scores) != len(experts) or not len(scores):
        asked = f"take scores of shape {scores.shape} with experts of shape {experts.shape}"
        exists = "they are [tokens, num_experts] and [tokens, k], of the same tokens, and of one at the least"
        raise problem(kernel, asked, exists, "give `scores` and `experts` of one `Routed`")


def check_routed(kernel: str, x: Any, experts: Any, weights: Any) -> None:
    """Raises `ValueError` unless these are tokens [T, d] with the numbers and the weights [T, k] of their experts."""
    for name, array in (("x", x), ("experts", experts), ("weights", weights)):
        if not hasattr(array, "dtype"):
            check_array(kernel, name, array, "T d" if name == "x" else "T k")
    shapes = f"x {x.shape}, experts {experts.shape} and weights {weights.shape}"
    fits = x.ndim == experts.ndim == 2 and experts.shape == weights.shape and len(x) == len(experts)
    if not fits or not experts.size or not x.size:
        exists = "they are [T, d], [T, k] and [T, k], with at least one token and one choice, of some width"
        fix = "give each token its experts and their weights; -1 marks a token that goes nowhere"
        raise problem(kernel, f"take {shapes}", exists, fix)
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        raise problem(kernel, f"take experts of {experts.dtype}", "they are numbers of experts", "give int32")
    for name, array in (("x", x), ("weights", weights)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise problem(kernel, f"take {name} of {array.dtype}", "it has a gradient", "give a floating dtype")


def check_whole(kernel: str, name: str, asked: Any, *, least: int = 1) -> None:
    """Raises `ValueError` for what is no whole number from `least` on; one that is traced may be any."""
    if isinstance(asked, jax.core.Tracer) and jnp.issubdtype(asked.dtype, jnp.integer) and not asked.ndim:
        return
    if not is_whole(asked, least):
        exists = f"it is a whole number, {least} or more"
        raise problem(f"{kernel}({name}=...)", f"be {asked!r}", exists, f"write {name}={max(least, 1)}, say")


def check_factor(kernel: str, name: str, asked: Any, *, scheduled: bool = True) -> None:
    """Raises `ValueError` for what is no number from 0 on; a schedule's, that is an array, may be any."""
    if scheduled and getattr(asked, "shape", None) == () and jnp.issubdtype(asked.dtype, jnp.number):
        return
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not 0 <= asked < math.inf:
        exists = "it is a number from 0 on"
        raise problem(f"{kernel}({name}=...)", f"be {asked!r}", exists, f"write {name}=0.001, say")


def check_positive(where: str, name: str, asked: Any, fix: str) -> None:
    """Raises `ValueError` for what is no number above 0."""
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not 0 < asked < math.inf:
        raise problem(f"{where}({name}=...)", f"be {asked!r}", "it is a number above 0", f"write {name}={fix}")
