"""Expert rebalancing: which rank owns which experts, by measured loads; the model's function unchanged.

Rank r of N owns places [r E/N, (r+1) E/N). A placement is a permutation of the experts over these places; applied to
experts and router alike it renumbers the experts, and nothing else.

Outputs stay the same to the bit where each rank sends its own tokens to the experts, with a capacity or dropless:
neither the weights of `route`, nor what is dropped over capacity, nor the order in which a token's choices are summed
depends on how the experts are numbered. Excepted are tokens whose scores tie exactly, since a tie goes to the lowest
number. There are four cases in which outputs change, and a warning where the state shows one:

- `bound_factor`: what is over the bound between two ranks is dropped, so it depends on which experts share a rank.
  Outputs of a batch of which nothing is dropped, before and after, stay the same to the bit.
- Tokens replicated over the axes of the experts: each rank sums over its own experts, and then ranks are summed, so
  outputs are equal up to rounding.
- `Routing(choice="expert")`: a token's experts are summed in the order of their numbers; up to rounding.
- `implementation="node-first"`: a token's experts are summed node by node, and then nodes are; up to rounding where an
  expert moves to another node.

The state shows the config of a layer when it is an attribute of a module, at any depth: in NNX always, in Linen unless
it is made inside a compact method. Auxiliary losses and gradients are sums over experts: equal up to rounding.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.moe.argument_checks import check_whole
from meshpar.moe.layer import axes_over
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.transport_choice import NODE_FIRST
from meshpar.sharding.types import (
    Names,
    PyTree,
    axis_sizes,
    owner_of,
    path_str,
    problem,
    spec_axes,
    tree_leaves_with_paths,
)
from meshpar.training.state import Setup, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Experts of one layer over ranks."""

    order: tuple[int, ...]
    """Expert order[p] stands at place p from now on."""
    before: tuple[float, ...]
    """Load of each rank, as the experts stood."""
    after: tuple[float, ...]
    """As they stand from now on, if the load of every expert stays."""
    moved: int
    """Experts that change rank."""

    @property
    def gain(self) -> float:
        """The busiest rank's load before, over the busiest one's after: how much quicker the experts are done."""
        return max(self.before) / max(self.after) if max(self.after) else 1.0

    def __str__(self) -> str:
        mean = sum(self.after) / len(self.after) or 1.0
        return (
            f"busiest of {len(self.after)} ranks {max(self.before) / mean:.3g} → {max(self.after) / mean:.3g} times "
            f"the mean load, gain {self.gain:.3g}; {self.moved} of {len(self.order)} experts move"
        )


class Rebalanced(NamedTuple):
    """A model with its experts rebalanced."""

    state: Any
    """What was given: a TrainState, or parameters."""
    placements: dict[str, tuple[ExpertPlacement, ...]]
    """By the path given with the loads ("" when there was none), one for each layer."""

    @property
    def gain(self) -> float:
        """Sum over layers of the busiest rank's load, before over after."""
        each = [one for placements in self.placements.values() for one in placements]
        after = sum(max(one.after) for one in each)
        return sum(max(one.before) for one in each) / after if after else 1.0


def place(loads: Sequence[float] | np.ndarray, num_ranks: int, *, groups: int = 1) -> ExpertPlacement:
    """Assign E / num_ranks experts to each rank so that the load of the busiest rank is low.

    A greedy assignment gives each expert, from the largest load down, to the least loaded rank that has a place left.
    This assignment and the present one are improved by swaps of two experts, and the better result is used. Nothing
    moves unless the load of the busiest rank falls. Ranks are numbered so that many experts keep their rank.

    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (longest processing time first).

    Args:
      loads: tokens of each expert, as measured: `measure(...).experts.tokens`, or their sum over steps.
      num_ranks: of the mesh axis that experts are split over.
      groups: as in `Routing`. Experts stay among the neighbours of their group: whole groups move where there are more
        groups than ranks, and experts within the ranks of their group where there are fewer.

    Raises:
      ValueError: loads that are no loads; experts, groups and ranks that do not divide.
    """
    loads = _checked_loads(loads)
    _check_sizes(len(loads), num_ranks, groups)
    by_group = np.arange(len(loads)).reshape(groups, -1)
    if groups > 1 and groups % num_ranks == 0:
        order = by_group[_order(loads[by_group].sum(1), num_ranks)].reshape(-1)
    else:
        order = np.concatenate([of[_order(loads[of], num_ranks // groups)] for of in by_group])
    rank_of = np.arange(len(loads)) // (len(loads) // num_ranks)
    return ExpertPlacement(
        order=tuple(order.tolist()),
        before=tuple(loads.reshape(num_ranks, -1).sum(1).tolist()),
        after=tuple(loads[order].reshape(num_ranks, -1).sum(1).tolist()),
        moved=int((rank_of[order] != rank_of).sum()),
    )


def rebalance(
    state: TrainState | PyTree,
    loads: np.ndarray | jax.Array | Mapping[str, Any],
    *,
    names: Mapping[str, Names] | None = None,
    num_ranks: int | None = None,
    groups: int = 1,
) -> Rebalanced:
    """The same model, its experts rebalanced: every dim named `expert` permuted, in experts, router and bias.

    Outputs stay the same to the bit, but for what the module's docstring names. Arrays keep their dtype and sharding;
    experts travel between ranks once. Not to be called inside `jax.jit`: the loads have to be known.

    Of a TrainState the optimizer's moments are permuted like the parameters they belong to, and so are vectors of E
    numbers that the model keeps beside its parameters in the module of a router (the balancing bias, the loads it
    counts), one for each layer where layers are stacked.

    Args:
      state: a TrainState, or a tree of parameters; what belongs to the experts and is not in such a tree has to be
        given the same placements with `permute`.
      loads: tokens of each expert [E], or [layers, E] for layers stacked along a dim named `layers`, each of which is
        placed by itself; or several such by the path that the layer's leaves begin with.
      names: logical names of the dims by path, as `Model.names()` gives them. The router's last dim has to be named
        `expert`, whatever splits it. A TrainState knows those of its parameters; given all the same, they come first.
      num_ranks: of the mesh axes that experts are split over; a TrainState knows it.
      groups: as for `place`. A router that chooses among groups needs them, or it would choose otherwise.

    Warns:
      UserWarning: experts move, and outputs will not be the same to the bit.

    Raises:
      ValueError: as for `place`; no leaf named so, no router among them, or one of another size; parameters without
        names or number of ranks; other groups than those of the state's routers; stacked layers with an optimizer that
        keeps one number for an expert of all layers.
    """
    _check_given(loads)
    is_state = isinstance(state, TrainState)
    _check_known(is_state, names, num_ranks)
    parts = {"params": state.params, "opt_state": state.opt_state, "extra": state.extra} if is_state else {"": state}
    known = _known(state, names or {}) if is_state else {"": _own_names(state, names or {})}
    ranks = num_ranks if num_ranks is not None else _ranks_of_experts(state)
    configs = _configs(state.bound()) if is_state else []
    _check_groups(configs, groups)
    placements = {}
    for scope, given in (loads if isinstance(loads, Mapping) else {"": loads}).items():
        _check_router({path: named for path, (named, _) in known["params" if is_state else ""].items()}, scope)
        rows = np.asarray(given)
        each = rows if rows.ndim == 2 else rows[None]
        placed = tuple(place(row, ranks, groups=groups) for row in each)
        order = np.array([one.order for one in placed]).reshape(rows.shape)
        for part, leaves in known.items():
            inside = {path: named for path, (named, home) in leaves.items() if _below(home, scope)}
            parts[part] = _permuted_tree(parts[part], order, inside, part)
        placements[scope] = placed
    each_layer = [one for each in placements.values() for one in each]
    if is_state and any(one.moved for one in each_layer):
        for reason in _inexact(state.setup, configs, ranks, each_layer):
            warnings.warn(f"rebalance: {reason}", stacklevel=2)
    return Rebalanced(state.replace(**parts) if is_state else parts[""], placements)


def permute(
    params: PyTree, order: np.ndarray | Sequence[int], *, names: Mapping[str, Names], scope: str = ""
) -> PyTree:
    """The tree with expert order[p] at place p, in every leaf below `scope` that has a dim named `expert`.

    Args:
      params: arrays.
      order: [E], or [layers, E] for leaves with a dim named `layers`.
      names: logical names by path.
      scope: a path, "decoder/moe" for what stands below it; "" for everything.

    Raises:
      ValueError: as for `rebalance`.
    """
    known = _own_names(params, names)
    return _permuted_tree(params, order, {path: named for path, (named, _) in known.items() if _below(path, scope)})


# ---- What belongs to the experts -------------------------------------------------------------------------------------

_Known: TypeAlias = dict[str, tuple[Names, str]]
"""Leaves with a dim named `expert`, by path: names, and the path in the model by which a scope finds them."""


def _own_names(tree: PyTree, names: Mapping[str, Names]) -> _Known:
    named = {path: names[path] for path, _ in tree_leaves_with_paths(tree) if path in names}
    return {path: (given, path) for path, given in named.items() if given and "expert" in given}


def _known(state: TrainState, names: Mapping[str, Names]) -> dict[str, _Known]:
    """Of each part of a state."""
    of_params = {one.path: one.leaf.names for one in state.table.params if one.leaf.names is not None}
    params = _own_names(state.params, {**of_params, **names})
    slots: _Known = {}
    for decision in state.table.optimizer:
        path = decision.path.removeprefix("opt_state/")
        if decision.leaf.names is not None and "expert" in decision.leaf.names:
            slots[path] = (decision.leaf.names, owner_of(path, params))
    return {"params": params, "opt_state": slots, "extra": _vectors(state.extra, state.params, params, names)}


def _vectors(extra: PyTree, params: PyTree, known: _Known, names: Mapping[str, Names]) -> _Known:
    """What the model keeps beside its parameters, one number for each expert, where it keeps a router."""
    found = _own_names(extra, names)
    shapes = {path: x.shape for path, x in tree_leaves_with_paths(params)}
    routers = {path: named for path, (named, _) in known.items() if _is_router(named)}
    for path, x in tree_leaves_with_paths(extra):
        for router, named in routers.items():
            sizes = [(name, n) for name, n in zip(named, shapes[router], strict=True) if name in ("layers", "expert")]
            home = _home(path, router)
            if path not in names and home is not None and jnp.shape(x) == tuple(n for _, n in sizes):
                found[path] = (tuple(name for name, _ in sizes), home)
    return found


def _home(path: str, router: str) -> str | None:
    """The path in the model of what stands in the router's module, or right above it; None: it stands elsewhere."""
    module = router.rpartition("/")[0]
    for inside in (path, path.partition("/")[2]):  # Linen has the name of a collection before it
        if inside and inside.rpartition("/")[0] in (module, module.rpartition("/")[0]):
            return inside
    return None


def _ranks_of_experts(state: TrainState) -> int:
    sizes, ranks = axis_sizes(state.setup.mesh), 1
    for decision in state.table.params:
        for name, entry in zip(decision.leaf.names or (), decision.spec, strict=False):
            if name == "expert":
                ranks = max(ranks, math.prod(sizes[axis] for axis in spec_axes(entry)))
    if ranks == 1:
        exists = "the state's rules split no dim named `expert` over more than one"
        fix = "make the state with mp.expert_parallel() on a mesh with expert > 1, or give num_ranks"
        raise problem("rebalance(state, loads)", "place experts over ranks", exists, fix)
    return ranks


# ---- What would not be the same to the bit ---------------------------------------------------------------------------


def _configs(model: Any) -> list[MoEConfig]:
    """Configs of MoE layers in the attributes of a model, at any depth."""
    found: dict[MoEConfig, None] = {}
    waiting: list[Any] = [model]
    seen: set[int] = set()
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, MoEConfig):
            found[x] = None
        elif isinstance(x, Mapping | list | tuple):
            waiting += x.values() if isinstance(x, Mapping) else x
        elif type(x).__module__.partition(".")[0] not in ("builtins", "jax", "jaxlib", "numpy"):
            waiting += getattr(x, "__dict__", {}).values()
    return list(found)


def _inexact(
    setup: Setup, configs: Sequence[MoEConfig], num_ranks: int, placements: Sequence[ExpertPlacement]
) -> list[str]:
    """Why outputs change when experts move."""
    reasons = []
    rules = setup.strategy.activations
    levels = axes_over(setup.mesh, rules, "act_expert")
    experts, tokens = set(levels), set(axes_over(setup.mesh, rules, "batch", "seq"))
    travels = experts <= tokens
    nodes = axis_sizes(setup.mesh)[levels[0]] if len(levels) == 2 else 1
    for config in configs:
        routing, factor = config.routing, config.bound_factor
        most = num_ranks * min(1, routing.num_experts / num_ranks / routing.top_k)
        if travels and factor is not None and factor < most:
            reasons.append(
                f"with bound_factor={factor} a token may be dropped now that was not before, and the other way round: "
                "what is over the bound depends on which experts share a rank; outputs stay the same to the bit where "
                f"nothing is dropped, as without a bound or from bound_factor={most:g} on"
            )
        node = np.arange(routing.num_experts) * nodes // routing.num_experts
        if (
            travels
            and config.implementation == NODE_FIRST
            and any((node[list(one.order)] != node).any() for one in placements)
        ):
            reasons.append(
                f"node-first a token's experts are summed node by node, and experts move to others of {nodes} nodes: "
                'outputs change by rounding; they stay the same to the bit with implementation="hierarchical"'
            )
        if routing.choice == "expert":
            reasons.append("experts that choose are summed in the order of their numbers: outputs change by rounding")
    if not travels:
        shown = " × ".join(f"`{axis}`" for axis in sorted(experts - tokens))
        reasons.append(
            f"tokens are replicated over {shown}, so a token's experts are summed rank by rank: outputs change by "
            "rounding; they stay the same to the bit where the rule for `batch` names the axes of the experts"
        )
    return reasons


def _permuted_tree(
    tree: PyTree, order: np.ndarray | Sequence[int], inside: Mapping[str, Names], part: str = ""
) -> PyTree:
    order = np.asarray(order)
    for path, x in tree_leaves_with_paths(tree):
        if path in inside:
            _check_leaf(path, x, inside[path], order, part)

    def one(key_path: tuple[Any, ...], x: Any) -> Any:
        path = path_str(key_path)
        return _permuted(x, order, inside[path]) if path in inside else x

    return jax.tree_util.tree_map_with_path(one, tree)


def _permuted(x: Any, order: np.ndarray, names: Names) -> Any:
    dim = names.index("expert")
    shape = [1] * x.ndim
    shape[dim] = order.shape[-1]
    if order.ndim == 2:
        # Layers stand before experts in `order`; in the leaf, either way round.
        layers = names.index("layers")
        shape[layers] = len(order)
        order = order if layers < dim else order.T
    index = order.reshape(shape)
    if isinstance(x, np.ndarray):
        return np.take_along_axis(x, index, axis=dim)
    return jax.jit(lambda x: jnp.take_along_axis(x, index, axis=dim), out_shardings=x.sharding)(x)


# ---- Sharing out -----------------------------------------------------------------------------------------------------


def _order(loads: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the permutation of items, which are experts or groups of experts."""
    now = np.repeat(np.arange(num_ranks), len(loads) // num_ranks)

    def busiest(rank_of: np.ndarray) -> float:
        return float(np.bincount(rank_of, loads, num_ranks).max())

    best = min((_swapped(loads, start, num_ranks) for start in (now, _greedy(loads, num_ranks))), key=busiest)
    if busiest(best) >= busiest(now):
        return np.arange(len(loads))
    return _few_moves([np.flatnonzero(best == rank).tolist() for rank in range(num_ranks)], len(loads) // num_ranks)


def _greedy(loads: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the rank of each item: from the largest load down, the least loaded rank that has a place left."""
    rank_of, left = np.empty(len(loads), int), [len(loads) // num_ranks] * num_ranks
    least_loaded = [(0.0, rank) for rank in range(num_ranks)]
    for item in np.argsort(-loads, kind="stable").tolist():
        load, rank = heapq.heappop(least_loaded)
        rank_of[item] = rank
        left[rank] -= 1
        if left[rank]:
            heapq.heappush(least_loaded, (load + loads[item], rank))
    return rank_of


def _swapped(loads: np.ndarray, rank_of: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the ranks after swaps of an item of the busiest rank with another, the best swap each time."""
    rank_of = rank_of.copy()
    while True:
        totals = np.bincount(rank_of, loads, num_ranks)
        top = totals.argmax()
        inside, outside = np.flatnonzero(rank_of == top), np.flatnonzero(rank_of != top)
        less = loads[inside, None] - loads[outside]
        busier = np.maximum(totals[top] - less, totals[rank_of[outside]] + less)
        if busier.min(initial=np.inf) >= totals[top] * (1 - 1e-12):  # a smaller gain is rounding
            return rank_of
        one, other = np.unravel_index(busier.argmin(), busier.shape)
        rank_of[inside[one]], rank_of[outside[other]] = rank_of[outside[other]], top


def _few_moves(shares: list[list[int]], room: int) -> np.ndarray:
    """The shares on ranks that hold much of them already; who stays keeps its place, the others fill the gaps."""
    holds = np.zeros((len(shares), len(shares)), int)
    for number, share in enumerate(shares):
        np.add.at(holds[number], np.array(share) // room, 1)
    order = np.full(len(shares) * room, -1)
    for _ in shares:
        number, rank = divmod(int(holds.argmax()), len(shares))
        holds[number], holds[:, rank] = -1, -1
        stays = [item for item in shares[number] if item // room == rank]
        order[stays] = stays
        places = np.arange(rank * room, (rank + 1) * room)
        order[places[order[places] < 0]] = sorted(set(shares[number]) - set(stays))
    return order


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _check_given(loads: Any) -> None:
    if isinstance(loads, Mapping) and not loads:
        asked, exists = "place experts by no loads", "they are what says where experts belong"
        raise problem("rebalance", asked, exists, 'give {"decoder/moe": tokens of each expert}, or the tokens alone')
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(loads)):
        asked, exists = "place experts while a program is traced", "the loads are not known before it runs"
        raise problem("rebalance", asked, exists, "call it outside of jax.jit, on loads that have arrived")


def _check_known(is_state: bool, names: object, num_ranks: object) -> None:
    missing = " and ".join(what for what, given in (("names", names), ("num_ranks", num_ranks)) if given is None)
    if missing and not is_state:
        asked = f"place the experts of parameters without {missing}"
        fix = "give the state, or names=model.names() and num_ranks=mesh.shape['expert']"
        raise problem("rebalance", asked, "a TrainState knows both, a tree of arrays neither", fix)


def _checked_loads(loads: Any) -> np.ndarray:
    try:
        loads = np.asarray(loads)
    except ValueError:  # of several lengths, or a record of arrays
        loads = np.asarray(None)
    is_number = np.issubdtype(loads.dtype, np.number) and not np.iscomplexobj(loads)
    if not is_number or loads.ndim != 1 or not loads.size or not np.isfinite(loads).all() or (loads < 0).any():
        exists = "a load is a number of tokens, none negative or infinite, one for each expert"
        fix = "give `measure(...).experts.tokens` of one layer, or its sum over steps"
        raise problem("place", f"place experts by loads of shape {loads.shape} and dtype {loads.dtype}", exists, fix)
    return loads.astype(float)


def _check_sizes(num_experts: int, num_ranks: int, groups: int) -> None:
    check_whole("place", "num_ranks", num_ranks)
    check_whole("place", "groups", groups)
    if num_experts % num_ranks:
        exists = f"there are {num_experts}, and every rank has the same number"
        raise problem("place", f"share experts over {num_ranks} ranks", exists, "give the size of the expert axis")
    if num_experts % groups or (groups % num_ranks and num_ranks % groups):
        asked = f"keep {groups} groups of {num_experts} experts whole over {num_ranks} ranks"
        fix = "make one of the two numbers a multiple of the other"
        raise problem("place", asked, "a rank holds whole groups, or a group whole ranks", fix)


def _check_router(named: Mapping[str, Names], scope: str) -> None:
    inside = {path: given for path, given in named.items() if _below(path, scope)}
    if not any(map(_is_router, inside.values())):
        shown = ", ".join(f"`{path}`" for path in list(inside)[:4]) or "none at all"
        raise problem(
            f"leaves below `{scope}`" if scope else "the tree",
            "rebalance experts",
            f"no router is among the leaves with a dim named `expert` ({shown}), and without it the model would change",
            "give names whose last is `expert` to the router's kernel [d, E]",
        )


def _check_leaf(path: str, x: Any, names: Names, order: np.ndarray, part: str) -> None:
    sizes = dict(zip(names, x.shape, strict=True))
    asked = f"rebalance {order.shape[-1]} experts" + f" in {len(order)} layers" * (order.ndim == 2)
    exists, where = f"its shape is {x.shape}, with the names {names}", f"`{path}`"
    if part == "opt_state" and order.ndim == 2 and "layers" not in sizes and sizes["expert"] == order.shape[-1]:
        raise problem(
            f"`{part}/{path}`",
            f"{asked}, each by itself",
            f"{exists}: the optimizer keeps one number for an expert of all layers",
            "place the experts of all layers alike, by loads.sum(0); or use an optimizer whose state has the shapes of "
            "the parameters, as optax.adamw",
        )
    if sizes["expert"] != order.shape[-1] or (order.ndim == 2 and sizes.get("layers") != len(order)):
        raise problem(where, asked, exists, "give the loads of these experts, one row for each stacked layer")


def _check_groups(configs: Sequence[MoEConfig], groups: int) -> None:
    known = {config.routing.groups for config in configs}
    if known and groups not in known:
        asked = "place experts as if routers chose among so many groups"
        exists = f"the model's have {' or '.join(str(one) for one in sorted(known))}, and would choose other experts"
        raise problem(f"rebalance(groups={groups})", asked, exists, f"write groups={max(known)}")


def _is_router(names: Names) -> bool:
    return names[-1] == "expert" and len([name for name in names if name != "layers"]) > 1


def _below(path: str, scope: str) -> bool:
    return not scope or path == scope or path.startswith(scope + "/")
