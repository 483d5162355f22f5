"""Dims of parameters that stack arrays, and dims of the arrays themselves, by their logical names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshpar.sharding.types import Names, PyTree, path_str, scores_experts

STACK_NAMES = ("layers", "dense_layers", "expert")
"""Names of dims that stack independent arrays. In a router, `expert` is a dim of the matrix."""


def stack_dims(names: Names | None) -> tuple[int, ...]:
    """Return the dims of a parameter that stack the arrays of layers or experts.

    They are not dims of a matrix. Weight decay, Muon and optimizers with a statistic per array depend on them.

    Args:
      names: logical name of each dim, or None for a parameter without names.

    Example:
      >>> stack_dims(("layers", "expert", "embed", "mlp")), stack_dims(("layers", "embed", "expert"))
      ((0, 1), (0,))
    """
    names = names or ()
    is_router = scores_experts(names) and not {*names} <= {*STACK_NAMES}
    stacked = {*STACK_NAMES} - ({"expert"} if is_router else set())
    return tuple(dim for dim, name in enumerate(names) if name in stacked)


def decayed(names: Mapping[str, Names | None]) -> Callable[[PyTree], PyTree]:
    """Return the usual mask for weight decay: True for matrices and convolution kernels, False for norms and biases.

    Args:
      names: names of parameters, by path, such as `model.names()`.

    Returns:
      A function for `optax.adamw(mask=)`. Parameters decay if they have at least two dims, not counting stack dims, and
      are not called `scale` or `bias`.
    """

    def is_decayed(key_path: Any, x: Any) -> bool:
        path = path_str(key_path)
        return x.ndim - len(stack_dims(names.get(path))) >= 2 and path.rpartition("/")[2] not in ("scale", "bias")

    return lambda params: jax.tree_util.tree_map_with_path(is_decayed, params)
