"""Rebalancing of experts: move them between ranks without changing the function of the model.

A placement permutes the experts and the outputs of the router, so it only renumbers the experts. If each rank sends its
local tokens to the experts, outputs are bitwise equal, with and without a capacity. Routing weights, dropped tokens and
the order of summation do not depend on the experts' numbers, unless a token has exactly equal scores. Outputs change in
four cases:

- `bound_factor`: assignments above the bound between two ranks are dropped, and their number depends on the placement.
- Tokens replicated over the expert axes: each rank sums over its local experts, so outputs change by rounding.
- `Routing(choice="expert")`: outputs of experts are summed in the order of their numbers.
- `implementation="node-first"`: outputs are summed node by node.

Auxiliary losses and gradients are sums over experts and change by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.moe.expert_placement import ExpertPlacement, expert_leaves, is_below, permute_leaves, place
from meshpar.sharding.errors import problem
from meshpar.sharding.types import Names, PyTree, axis_sizes, owner_of, spec_axes, tree_leaves_with_paths
from meshpar.training.state import TrainState

ExpertLeaves = dict[str, tuple[Names, str]]
"""Maps the path of each leaf with a dim named `expert` to its logical names and the path of its parameter."""


class Rebalanced(NamedTuple):
    """The result of `rebalance_experts`."""

    state: PyTree
    """The new TrainState, or the new parameters if parameters were passed."""
    placements: dict[str, tuple[ExpertPlacement, ...]]
    """Placements of the layers, by the keys of `loads` ("" if `loads` is an array)."""

    @property
    def gain(self) -> float:
        """Load of the busiest ranks before the move divided by their load after it, each summed over layers."""
        layers = [placement for placements in self.placements.values() for placement in placements]
        after = sum(max(placement.after) for placement in layers)
        return sum(max(placement.before) for placement in layers) / after if after else 1.0


def rebalance_experts(
    state: TrainState | PyTree,
    loads: np.ndarray | jax.Array | Mapping[str, Any],
    *,
    names: Mapping[str, Names] | None = None,
    num_ranks: int | None = None,
    groups: int = 1,
) -> Rebalanced:
    """Move experts between ranks to reduce the number of tokens on the busiest rank of each layer.

    Arrays keep their dtype and sharding. In a TrainState, the optimizer's moments are permuted with their parameters,
    and so are vectors of values per expert in the module of a router, such as the balancing bias.

    Args:
      state: a TrainState, or a tree of parameters. Other arrays of the experts need the same placement: apply it with
        `moe.permute`.
      loads: tokens per expert, [E] or [layers, E], or a dict of such arrays by the path of the layers.
      names: logical names of the dims by path, as `Model.names()` returns them. Required for a tree of parameters. The
        last dim of a router must be named `expert`.
      num_ranks: size of the mesh axes that experts are sharded over. Required for a tree of parameters.
      groups: number of expert groups of the router, as in `Routing`. With another number, outputs change.

    Returns:
      The new state and the placements of the layers.

    Raises:
      MeshparError: invalid loads; no router among the leaves; missing names or number of ranks; called inside
        `jax.jit`.

    Example:
      >>> state, placements = mp.rebalance_experts(state, mp.moe.loads(metrics).experts.tokens)  # doctest: +SKIP
    """
    is_state = isinstance(state, TrainState)
    missing = [name for name, value in (("names", names), ("num_ranks", num_ranks)) if value is None and not is_state]
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(loads))
    for is_wrong, code, reason, fix in (
        (isinstance(loads, Mapping) and not loads, "missing-argument", "`loads` is empty",
         'pass {"decoder/moe": tokens of each expert}, or an array'),
        (is_traced, "wrong-type", "loads are unknown while jax.jit traces a program", "call it outside of jax.jit"),
        (missing, "missing-argument", f"a tree of arrays has no {' and '.join(missing)}",
         "pass the TrainState, or names=model.names() and num_ranks=mesh.shape['expert']"),
    ):  # fmt: skip
        if is_wrong:
            raise problem("rebalance_experts", "place experts", reason, fix, code=code)
    trees = {"params": state.params, "opt_state": state.opt_state, "extra": state.extra} if is_state else {"": state}
    leaves = _leaves_of_state(state, names or {}) if is_state else {"": _with_paths(state, names or {})}
    num_ranks = num_ranks if num_ranks is not None else _num_expert_ranks(state)
    placements = {}
    for scope, of_scope in (loads if isinstance(loads, Mapping) else {"": loads}).items():
        params = {
            path: dims for path, (dims, _) in leaves["params" if is_state else ""].items() if is_below(path, scope)
        }
        if not any(map(_is_router, params.values())):
            reason = f"no leaf with a dim named `expert` is a router ({', '.join([*params][:4]) or 'there are none'})"
            where, fix = (
                f"leaves below `{scope}`" if scope else "parameters",
                "name the last dim of the router's kernel [d, E] `expert`",
            )
            raise problem(where, "rebalance experts", reason, fix, code="not-found")
        loads_LE = np.atleast_2d(np.asarray(of_scope))
        placements[scope] = tuple(place(loads_E, num_ranks, groups=groups) for loads_E in loads_LE)
        order = np.array([placement.order for placement in placements[scope]]).reshape(np.shape(of_scope))
        for name, of_tree in leaves.items():
            selected = {path: dims for path, (dims, home) in of_tree.items() if is_below(home, scope)}
            trees[name] = permute_leaves(trees[name], order, selected, name)
    return Rebalanced(state.replace(**trees) if is_state else trees[""], placements)


# ---- Arrays of the experts -------------------------------------------------------------------------------------------


def _with_paths(tree: PyTree, names: Mapping[str, Names]) -> ExpertLeaves:
    return {path: (dims, path) for path, dims in expert_leaves(tree, names).items()}


def _leaves_of_state(state: TrainState, names: Mapping[str, Names]) -> dict[str, ExpertLeaves]:
    model_names = {
        decision.path: decision.leaf.names for decision in state.table.params if decision.leaf.names is not None
    }
    params = _with_paths(state.params, {**model_names, **names})
    slots: ExpertLeaves = {}
    for decision in state.table.optimizer:
        path = decision.path.removeprefix("opt_state/")
        if "expert" in (decision.leaf.names or ()):
            slots[path] = (decision.leaf.names or (), owner_of(path, params))
    return {"params": params, "opt_state": slots, "extra": _vectors_of_routers(state, params, names)}


def _vectors_of_routers(state: TrainState, params: ExpertLeaves, names: Mapping[str, Names]) -> ExpertLeaves:
    """Return the variables of router modules that have a value per expert, such as the balancing bias."""
    leaves = _with_paths(state.extra, names)
    shapes = {path: x.shape for path, x in tree_leaves_with_paths(state.params)}
    for router, (router_dims, _) in params.items():
        if not _is_router(router_dims):
            continue
        sizes = {n: size for n, size in zip(router_dims, shapes[router], strict=True) if n in ("layers", "expert")}
        module = router.rpartition("/")[0]
        for path, x in tree_leaves_with_paths(state.extra):
            # In Linen, paths begin with the name of the collection.
            for inside in (path, path.partition("/")[2]):
                is_near = inside and inside.rpartition("/")[0] in (module, module.rpartition("/")[0])
                if path not in leaves and is_near and jnp.shape(x) == tuple(sizes.values()):
                    leaves[path] = (tuple(sizes), inside)
    return leaves


def _num_expert_ranks(state: TrainState) -> int:
    sizes, num_ranks = axis_sizes(state.setup.mesh), 1
    for decision in state.table.params:
        for name, entry in zip(decision.leaf.names or (), decision.spec, strict=False):
            if name == "expert":
                num_ranks = max(num_ranks, math.prod(sizes[axis] for axis in spec_axes(entry)))
    if num_ranks == 1:
        reason = "the rules of the state shard no dim named `expert`"
        fix = "create the state with mp.expert_parallel() on a mesh with expert > 1, or pass num_ranks"
        raise problem("rebalance_experts", "place experts on ranks", reason, fix, code="missing-argument")
    return num_ranks


def _is_router(names: Names) -> bool:
    return names[-1] == "expert" and len([name for name in names if name != "layers"]) > 1
