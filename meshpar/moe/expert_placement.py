"""The assignment of experts to ranks that balances their measured loads.

Rank r of N owns the experts at positions r E/N to (r+1) E/N - 1. A placement is a permutation of the experts over these
positions. `meshpar.training.expert_rebalancing` applies it to a training state.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.sharding.errors import check_cases, check_divides, check_positive_int
from meshpar.sharding.types import Names, PyTree, path_str, tree_leaves_with_paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Assignment of a layer's experts to ranks."""

    order: tuple[int, ...]
    """The expert at each position after the placement."""
    before: tuple[float, ...]
    """Load of each rank before the placement."""
    after: tuple[float, ...]
    """Load of each rank after the placement, if the load of each expert stays the same."""
    moved: int
    """Number of experts that change rank."""

    @property
    def gain(self) -> float:
        """Return the largest load of a rank before the placement, divided by the largest load after it."""
        return max(self.before) / max(self.after) if max(self.after) else 1.0

    def __str__(self) -> str:
        mean = sum(self.after) / len(self.after) or 1.0
        return (
            f"busiest of {len(self.after)} ranks {max(self.before) / mean:.3g} → {max(self.after) / mean:.3g} times "
            f"the mean load, gain {self.gain:.3g}; {self.moved} of {len(self.order)} experts move"
        )


def place(loads: Sequence[float] | np.ndarray, num_ranks: int, *, groups: int = 1) -> ExpertPlacement:
    """Assign E / num_ranks experts to each rank, so that the load of the busiest rank is small.

    Experts are assigned in order of decreasing load, each to the rank with the smallest load that has a free position.
    No expert moves unless the largest load decreases.

    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (longest processing time first).

    Args:
      loads: [E], tokens per expert, as measured by `measure(...).experts.tokens`, or their sum over steps.
      num_ranks: size of the mesh axes that experts are sharded over.
      groups: number of expert groups, as in `Routing`. If there are at least as many groups as ranks, full groups move;
        otherwise experts move among the ranks of their group.

    Raises:
      ValueError: the loads are invalid, or the numbers of experts, groups and ranks do not divide each other.

    Example:
      >>> placement = mp.moe.place([9, 8, 2, 1], num_ranks=2)
      >>> placement.before, placement.after
      ((17.0, 3.0), (10.0, 10.0))
    """
    try:
        loads = np.asarray(loads)
    except ValueError:  # ragged lists
        loads = np.asarray(None)
    is_number = np.issubdtype(loads.dtype, np.number) and not np.iscomplexobj(loads) and loads.ndim == 1 and loads.size
    case = (
        not is_number or not np.isfinite(loads).all() or (loads < 0).any(),
        "loads must be finite, non-negative numbers of tokens per expert",
        "pass `measure(...).experts.tokens` of a layer, or a sum over steps",
    )
    check_cases("place", f"place experts by loads {loads.dtype}{list(loads.shape)}", "wrong-type", case)
    loads, num_experts = loads.astype(float), len(loads)
    check_positive_int("place", "a number of ranks or groups", num_ranks=num_ranks, groups=groups)
    fix = "pass the size of the mesh axis `expert`"
    check_divides("place", f"assign {num_experts} experts to {num_ranks} ranks", num_experts, num_ranks, fix)
    reason = "groups must divide the experts, and each rank must own full groups or each group full ranks"
    is_wrong = num_experts % groups or (groups % num_ranks and num_ranks % groups)
    requested = f"place {groups} groups of {num_experts} experts on {num_ranks} ranks"
    check_cases("place", requested, "indivisible", (is_wrong, reason, "change groups or num_ranks"))
    by_group = np.arange(len(loads)).reshape(groups, -1)
    if groups > 1 and groups % num_ranks == 0:
        order = by_group[_balanced_order(loads[by_group].sum(1), num_ranks)].reshape(-1)
    else:
        order = np.concatenate([group[_balanced_order(loads[group], num_ranks // groups)] for group in by_group])
    rank_of = np.arange(len(loads)) // (len(loads) // num_ranks)
    return ExpertPlacement(
        order=tuple(order.tolist()),
        before=tuple(loads.reshape(num_ranks, -1).sum(1).tolist()),
        after=tuple(loads[order].reshape(num_ranks, -1).sum(1).tolist()),
        moved=int((rank_of[order] != rank_of).sum()),
    )


def permute(
    params: PyTree, order: np.ndarray | Sequence[int], *, names: Mapping[str, Names], scope: str = ""
) -> PyTree:
    """Reorder the experts in all leaves below `scope` that have a dim named `expert`.

    Args:
      params: arrays.
      order: [E], the expert at each position; or [layers, E] for leaves with a dim named `layers`.
      names: logical names by path.
      scope: a path such as "decoder/moe". "" selects all leaves.

    Raises:
      ValueError: the shape of a leaf does not match the order.
    """
    selected = {path: names[path] for path in expert_leaves(params, names) if is_below(path, scope)}
    return permute_leaves(params, order, selected)


def expert_leaves(tree: PyTree, names: Mapping[str, Names]) -> dict[str, Names]:
    """Return the logical names of the leaves that have a dim named `expert`, by path."""
    return {path: names[path] for path, _ in tree_leaves_with_paths(tree) if "expert" in (names.get(path) or ())}


def is_below(path: str, scope: str) -> bool:
    """Return whether a path is `scope` or below it."""
    return not scope or path == scope or path.startswith(scope + "/")


def permute_leaves(
    tree: PyTree, order: np.ndarray | Sequence[int], names: Mapping[str, Names], where: str = ""
) -> PyTree:
    """Reorder the experts of the leaves in `names`. `where` is a prefix of paths in error messages."""
    order = np.asarray(order)
    for path, x in tree_leaves_with_paths(tree):
        if path in names:
            _check_leaf(path, x, names[path], order, where)

    def permuted(key_path: tuple[Any, ...], x: Any) -> Any:
        leaf_names = names.get(path_str(key_path))
        if leaf_names is None:
            return x
        dim = leaf_names.index("expert")
        others = [i for i, name in enumerate(leaf_names) if name != "expert" and (order.ndim == 1 or name != "layers")]
        is_transposed = order.ndim == 2 and leaf_names.index("layers") > dim
        index = np.expand_dims(order.T if is_transposed else order, others)
        if isinstance(x, np.ndarray):
            return np.take_along_axis(x, index, axis=dim)
        return jax.jit(lambda x: jnp.take_along_axis(x, index, axis=dim), out_shardings=x.sharding)(x)

    return jax.tree_util.tree_map_with_path(permuted, tree)


# ---- Balancing -------------------------------------------------------------------------------------------------------


def _balanced_order(loads: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the permutation of items (experts or groups) that balances the loads of the ranks."""
    size = len(loads) // num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    queue = [(0.0, rank) for rank in range(num_ranks)]
    for item in np.argsort(-loads, kind="stable").tolist():
        load, rank = heapq.heappop(queue)
        shares[rank].append(item)
        if len(shares[rank]) < size:
            heapq.heappush(queue, (load + loads[item], rank))
    before, after = np.arange(len(loads)), np.array([item for share in shares for item in sorted(share)])
    busiest_before, busiest_after = (loads[order].reshape(num_ranks, -1).sum(1).max() for order in (before, after))
    return after if busiest_after < busiest_before else before


def _check_leaf(path: str, x: Any, names: Names, order: np.ndarray, where: str) -> None:
    sizes, requested = dict(zip(names, x.shape, strict=True)), f"use an order of experts of shape {list(order.shape)}"
    has_experts, is_per_layer = sizes["expert"] == order.shape[-1], order.ndim == 2
    if where == "opt_state" and is_per_layer and has_experts:
        reason, fix = "this state has one number per expert for all layers", "place the experts by loads.sum(0)"
        fix += ", or use an optimizer whose state has the shapes of the parameters, such as optax.adamw"
        check_cases(f"`{where}/{path}`", requested, "wrong-shape", ("layers" not in sizes, reason, fix))
    is_wrong = not has_experts or (is_per_layer and sizes.get("layers") != len(order))
    reason, fix = f"its shape is {x.shape}, with the names {names}", "pass the loads of these experts, a row per layer"
    check_cases(f"`{path}`", requested, "wrong-shape", (is_wrong, reason, fix))
