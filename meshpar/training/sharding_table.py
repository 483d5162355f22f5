"""ShardingTable: the decision about every leaf of a model and its optimizer, checked as a whole."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import optax
from jax.sharding import PartitionSpec

from meshpar.layers.precision import Precision, cast_floating
from meshpar.optim.moments import on_host
from meshpar.parallel import Strategy, as_strategy
from meshpar.parallel.pipeline import Pipeline as PipelinePart
from meshpar.sharding.adapters import Model, Variables
from meshpar.sharding.context import apart, tracing
from meshpar.sharding.mesh import with_auto_axes
from meshpar.sharding.printing import Printed, human_mesh
from meshpar.sharding.rules import ACTIVATION_NAMES, LARGEST_DIM, USER, Rules, resolve
from meshpar.sharding.types import (
    AnyMesh,
    Decision,
    Leaf,
    MeshLike,
    Names,
    PyTree,
    axes_of_spec,
    axis_sizes,
    is_spec,
    leaf_of,
    near,
    near_or,
    num_shards,
    path_str,
    problem,
    spec_axes,
    tree_leaves_with_paths,
)
from meshpar.sharding.units import human_bytes

Trainable: TypeAlias = str | Callable[[str], bool] | None
"""A pattern for whole paths of parameters, or a function of a path; None: all of them."""


class Totals(NamedTuple):
    """Bytes per device of each part; `num_params` is the whole model's."""

    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    state_bytes: int
    num_params: int
    host_bytes: int = 0
    """Of the optimizer's state, what lies in the host's memory, for each device; in none of the others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingTable(Printed):
    """Every leaf's `Decision`: what is split how, by which rule, and what it costs a device. Prints as a table."""

    mesh: dict[str, int]
    strategy: str
    params: tuple[Decision, ...]
    grads: tuple[Decision, ...]
    optimizer: tuple[Decision, ...]
    """Empty when no optimizer was given."""
    extra: tuple[Decision, ...]
    """What the model keeps beside parameters."""
    idle: tuple[str, ...] = ()
    """Mesh axes above 1 that no rule names: the user's own code shards over them, or their devices repeat work."""

    @property
    def totals(self) -> Totals:
        """What one device holds. State is what stays between steps: parameters, optimizer state, the model's extras."""
        params, grads, optimizer, extra = (
            sum(d.bytes_per_device for d in part if not d.is_on_host)
            for part in (self.params, self.grads, self.optimizer, self.extra)
        )
        return Totals(
            params_bytes=params,
            grads_bytes=grads,
            optimizer_bytes=optimizer,
            state_bytes=params + optimizer + extra,
            num_params=sum(d.leaf.size for d in self.params),
            host_bytes=sum(d.bytes_per_device for d in self.optimizer if d.is_on_host),
        )

    def __getitem__(self, path: str) -> Decision:
        found = next((d for d in self.params if d.path == path), None)
        if found is None:
            raise problem(
                "ShardingTable", f"find `{path}`", "no leaf has it", near(path, (d.path for d in self.params))
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """The table as plain data: `mesh, strategy, leaves, totals`."""
        leaves = [_decision_json(decision) for decision in self.params]
        return {"mesh": self.mesh, "strategy": self.strategy, "leaves": leaves, "totals": self.totals._asdict()}

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        totals = self.totals
        table = Table(
            title=f"mesh {human_mesh(self.mesh)} · {self.strategy}",
            caption=f"{totals.num_params:,} parameters · per device: params {human_bytes(totals.params_bytes)}, "
            f"grads {human_bytes(totals.grads_bytes)}, optimizer {human_bytes(totals.optimizer_bytes)}, "
            f"state {human_bytes(totals.state_bytes)}"
            + f", on the host {human_bytes(totals.host_bytes)}" * bool(totals.host_bytes)
            + "".join(map(self._idle_line, self.idle)),
        )
        for column in ("path", "shape", "dtype", "names", "rule", "spec"):
            table.add_column(column, overflow="fold")
        table.add_column("per device", justify="right", no_wrap=True)
        for d in self.params:
            shape = "×".join(map(str, d.leaf.shape)) or "scalar"
            names = "" if d.leaf.names is None else ", ".join(name or "–" for name in d.leaf.names)
            rule = d.rule if d.leaf.is_trained else f"{d.rule}; frozen"
            cells = (d.path, shape, d.leaf.dtype.name, names, rule, spec_text(d.spec))
            table.add_row(*map(Text, cells), human_bytes(d.bytes_per_device))
        return table

    def _idle_line(self, axis: str) -> str:
        repeat = f"its {self.mesh[axis]} devices repeat the same work"
        return f"\nno rule names mesh axis `{axis}`: unless your own code shards over it, {repeat}"


def spec_text(spec: PartitionSpec) -> str:
    """A spec with one entry a dim, as "fsdp, –, tensor"."""
    return ", ".join("–" if e is None else e if isinstance(e, str) else "×".join(e) for e in spec)


def _decision_json(d: Decision) -> dict[str, Any]:
    return {
        "path": d.path,
        "shape": list(d.leaf.shape),
        "dtype": d.leaf.dtype.name,
        "names": None if d.leaf.names is None else list(d.leaf.names),
        "rule": d.rule,
        "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in d.spec],
        "bytes_per_device": d.bytes_per_device,
    }


def shardings(
    model: Model,
    mesh: AnyMesh,
    strategy: Strategy | Rules,
    *,
    tx: optax.GradientTransformation | None = None,
    precision: Precision | None = None,
    trainable: Trainable = None,
) -> ShardingTable:
    """Return the sharding of each leaf of a training state. Needs no devices (`MeshSpec.abstract`).

    Args:
      model: the model.
      mesh: a mesh or an abstract mesh, with Auto or Explicit axes. The type of the axes does not change the result.
      strategy: a strategy, or `Rules` for parameters, gradients, optimizer state and activations alike.
      tx: the optimizer. If given, the table includes its state.
      precision: leaves are counted in its parameter dtype.
      trainable: as in `init_state`.

    Returns:
      An immutable table. `table["up/kernel"]` is the `Decision` for a leaf, and `print(table)` shows all of them.

    Raises:
      ValueError: a rule is invalid for a leaf, a user's rule or a preset matches no leaf, or a large leaf would be
        replicated by accident.

    Example:
      >>> mp.shardings(model, mp.MeshSpec(fsdp=8).abstract(), mp.fsdp())["up/kernel"].spec  # doctest: +SKIP
      P('fsdp', None)
    """
    return lay_out(model, mesh, as_strategy(strategy), tx, precision or Precision(), trainable).table


# ---- Laying out a whole state ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableLayout:
    """The table, and for each part a tree of PartitionSpecs with the shape of that part."""

    table: ShardingTable
    params: PyTree
    grads: PyTree
    updates: PyTree
    """How parameter-shaped optimizer state lies: where the update is computed."""
    optimizer: PyTree
    extra: PyTree
    variables: Variables
    """Shapes and dtypes."""
    opt_state: PyTree
    """Shapes and dtypes."""


@apart()
def lay_out(
    model: Model,
    mesh: AnyMesh,
    strategy: Strategy,
    tx: optax.GradientTransformation | None,
    precision: Precision,
    trainable: Trainable = None,
) -> TableLayout:
    """Resolve every leaf of the state and check the decisions as a whole; errors as in `shardings`."""
    mesh = with_auto_axes("mesh", mesh)
    _check_kinds(model, tx)
    strategy.check_axes(mesh)
    with tracing(mesh, strategy):
        variables = model.abstract()
        names = model.names()
    if precision.params is not None:
        cast = jax.eval_shape(lambda params: cast_floating(params, precision.params), variables.params)
        variables = variables._replace(params=cast)
    leaves, extra_leaves = _leaves(variables.params, names), _leaves(variables.extra, {})
    leaves = _with_frozen(leaves, model.lora.trained if trainable is None and model.lora is not None else trainable)
    trained = [leaf.is_trained for leaf in leaves]
    parts = (strategy.params, strategy.grads, strategy.optimizer)
    by_stage = ByStage.of(strategy, mesh)
    decided = {rules: [by_stage.resolve(leaf, rules) for leaf in leaves] for rules in dict.fromkeys(parts)}
    params, grads, updates = (decided[rules] for rules in parts)
    _check_twins(params, updates)
    _check_rules_used(leaves, extra_leaves, [*params, *grads, *updates], strategy)
    opt_state = None if tx is None else jax.eval_shape(tx.init, only(trained, variables.params, variables.params))
    optimizer = [] if tx is None else optimizer_decisions(tx, opt_state, updates, mesh)
    # Extras have no names: a path rule may place them, else they are replicated.
    rules = strategy.params
    extra = [resolve(leaf, rules if rules.path_rule(leaf.path) else Rules(), mesh) for leaf in extra_leaves]
    for decision in (*params, *grads, *updates, *optimizer, *extra):
        _check_not_replicated_by_accident(decision, strategy, mesh)

    named = frozenset().union(*(rules.axes for rules in strategy.rules))

    def specs(decisions: Sequence[Decision], like: PyTree) -> PyTree:
        return jax.tree.unflatten(jax.tree.structure(like), [d.spec for d in decisions])

    return TableLayout(
        table=ShardingTable(
            mesh=axis_sizes(mesh),
            strategy=strategy.label,
            params=tuple(params),
            grads=tuple(decision for decision in grads if decision.leaf.is_trained),
            optimizer=tuple(optimizer),
            extra=tuple(extra),
            idle=tuple(axis for axis, size in axis_sizes(mesh).items() if size > 1 and axis not in named),
        ),
        params=specs(params, variables.params),
        grads=specs(grads, variables.params),
        updates=specs(updates, variables.params),
        optimizer=specs(optimizer, opt_state),
        extra=specs(extra, variables.extra),
        variables=variables,
        opt_state=opt_state,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByStage:
    """Decisions about leaves, where stages may run unequal numbers of layers."""

    mesh: MeshLike
    pipelined: PipelinePart | None
    num_parts: int

    @staticmethod
    def of(strategy: Strategy, mesh: MeshLike) -> ByStage:
        pipelined = strategy.pipeline
        num_parts = 1 if pipelined is None else pipelined.shortened().num_parts
        return ByStage(mesh=mesh, pipelined=pipelined, num_parts=num_parts)

    def resolve(self, leaf: Leaf, rules: Rules) -> Decision:
        """As `rules.resolve`. A stack of layers that parts share unequally is split over the stages along another dim.

        Devices hold equal shards, so those cannot be layers; the step takes the layers to their stages.
        """
        rule, sizes = rules.name_rule("layers"), axis_sizes(self.mesh)
        axis = None if self.pipelined is None else self.pipelined.axis
        if self.pipelined is None or axis is None or rule is None or rule.value != axis or sizes.get(axis, 1) == 1:
            return resolve(leaf, rules, self.mesh)
        found = resolve(leaf, rules | Rules(layers=None), self.mesh)
        if not found.leaf.is_stacked or axis in axes_of_spec(found.spec):
            return resolve(leaf, rules, self.mesh)
        counts = self.pipelined.layers_of_parts(leaf.shape[0], self.num_parts)
        if len(set(counts)) == 1:
            return resolve(leaf, rules, self.mesh)
        entries = [spec_axes(entry) for entry in found.spec]
        fits = [
            dim
            for dim, (size, axes) in enumerate(zip(leaf.shape, entries, strict=True))
            if dim and size and size % math.prod(sizes[a] for a in (*axes, axis)) == 0
        ]
        where = "replicated over the stages between steps"
        if fits:
            dim = max(fits, key=lambda dim: (not entries[dim], leaf.shape[dim], -dim))
            entries[dim] = (*entries[dim], axis)
            where = f"dim {dim} split over `{axis}` between steps"
        spec = PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))
        return dataclasses.replace(
            found,
            rule=f"{rule}, {'+'.join(map(str, counts))} layers: {where}" + f"; {found.rule}" * any(found.spec),
            spec=spec,
            shards=num_shards(spec, self.mesh),
            sources=found.sources - {(USER, "layers")} | {(rule.origin, rule.key)},
        )


def only(chosen: Sequence[bool], tree: PyTree, like: PyTree) -> PyTree:
    """A tree of the structure of `like`, with nothing in the place of what is not chosen."""
    leaves = zip(jax.tree.leaves(tree, is_leaf=is_spec), chosen, strict=True)
    return jax.tree.unflatten(jax.tree.structure(like), [x if is_chosen else None for x, is_chosen in leaves])


def _with_frozen(leaves: list[Leaf], trainable: Trainable) -> list[Leaf]:
    if trainable is None:
        return leaves
    where, paths = f"trainable={trainable!r}", [leaf.path for leaf in leaves]
    if not (isinstance(trainable, str) or callable(trainable)):
        exists = f"it is a {type(trainable).__name__}, and must be a pattern or a function of a path"
        raise problem(where, "choose parameters by it", exists, "write trainable=r'.*/(lora_a|lora_b)'")
    try:
        chosen = re.compile(trainable).fullmatch if isinstance(trainable, str) else trainable
    except re.error as error:
        exists, fix = f"it is no regular expression ({error})", "write one that matches a parameter's whole path"
        raise problem(where, "choose parameters by it", exists, fix) from error
    said = {path: chosen(path) for path in paths}
    for path in (path for path in paths if callable(trainable) and not isinstance(said[path], bool)):
        exists = f"of `{path}` it says {said[path]!r}, neither True nor False"
        raise problem(where, "choose parameters by it", exists, "return True or False, as lambda path: 'lora' in path")
    if not any(said.values()):
        exists = f"it chooses none of the model's {len(paths)} parameters"
        otherwise = "choose one by its whole path"
        raise problem(where, "train something", exists, near_or(str(trainable), paths, otherwise))
    return [dataclasses.replace(leaf, is_trained=bool(said[leaf.path])) for leaf in leaves]


def _leaves(tree: PyTree, names: Mapping[str, Names]) -> list[Leaf]:
    return [leaf_of(path, x, names.get(path)) for path, x in tree_leaves_with_paths(tree)]


def optimizer_decisions(
    tx: optax.GradientTransformation, opt_state: PyTree, updates: Sequence[Decision], mesh: MeshLike
) -> list[Decision]:
    """Optimizer state follows the parameter it belongs to; what belongs to none (counts) is whole everywhere."""
    by_path = {decision.path: decision for decision in updates if decision.leaf.is_trained}

    def owners_of(tree: PyTree) -> PyTree:
        # By path, not by structure: a mask leaves some parameters out, and some optimizers keep a list for each.
        return jax.tree_util.tree_map_with_path(lambda path, _: _owner(path_str(path), by_path), tree)

    def of_slots() -> None:
        slots = optax.tree_utils.tree_map_params(
            tx, owners_of, opt_state, transform_non_params=lambda _: _NO_OWNER, is_leaf=lambda _: True
        )
        owners.extend(None if owner is _NO_OWNER else owner for owner in jax.tree.leaves(slots))

    found, owners = tree_leaves_with_paths(opt_state), list[Decision | None]()
    try:
        # Under a trace: it initialises, and counters made by a device would start one, with jax's plugins.
        jax.eval_shape(of_slots)
    except Exception:
        # It initialises with what are no parameters, which labels by a function of them, or L-BFGS, do not take: then
        # a leaf belongs to the parameter by whose whole path its own ends.
        owners = [_owner_by_end(path, by_path) for path, _ in found]
    decisions = [_slot_decision(path, x, owner, mesh) for (path, x), owner in zip(found, owners, strict=True)]
    offloaded = jax.tree.leaves(on_host(opt_state))
    return [
        dataclasses.replace(d, is_on_host=is_away and bool(d.leaf.shape))
        for d, is_away in zip(decisions, offloaded, strict=True)
    ]


_NO_OWNER = object()
"""Stands for no owner in a tree, where None would be an empty subtree."""


def _owner(path: str, by_path: Mapping[str, Decision]) -> Any:
    while path and path not in by_path:
        path = path.rpartition("/")[0]
    return by_path.get(path, _NO_OWNER)


def _owner_by_end(path: str, by_path: Mapping[str, Decision]) -> Decision | None:
    parts = path.split("/")
    ends = ("/".join(parts[at:]) for at in range(len(parts)))
    return next((by_path[end] for end in ends if end in by_path), None)


def _slot_decision(path: str, x: Any, owner: Decision | None, mesh: MeshLike) -> Decision:
    leaf = leaf_of(f"opt_state/{path}", x)
    kept = None if owner is None else _kept_dims(leaf.shape, owner.leaf.shape)
    if owner is None or kept is None:
        rule = "belongs to no parameter" if owner is None else f"shape unlike `{owner.path}`"
        return Decision(leaf=leaf, rule=rule, spec=PartitionSpec(), shards=1, replicated_on_purpose=False)
    names = owner.leaf.names
    entries = [None if dim is None or dim >= len(owner.spec) else owner.spec[dim] for dim in kept]
    # A factored moment (Adafactor) has some of its parameter's dims, a memory of updates (L-BFGS) has one before them.
    return dataclasses.replace(
        owner,
        leaf=dataclasses.replace(leaf, names=names and tuple(None if dim is None else names[dim] for dim in kept)),
        spec=PartitionSpec(*entries),
        shards=num_shards(PartitionSpec(*entries), mesh),
    )


def _kept_dims(shape: tuple[int, ...], of: tuple[int, ...]) -> tuple[int | None, ...] | None:
    """For each dim of an optimizer leaf, the dim of its parameter (None: a new one); None when its shape is unlike."""
    more = len(shape) - len(of)
    if more > 0 and shape[more:] == of:
        return (*[None] * more, *range(len(of)))
    for kept in itertools.combinations(range(len(of)), len(shape)):
        if tuple(of[dim] for dim in kept) == shape:
            return kept
    return None


# ---- Checks over the whole -------------------------------------------------------------------------------------------


def _check_kinds(model: Any, tx: Any) -> None:
    """The likely mix-ups: the module itself, an optimizer that was not called."""
    if not isinstance(model, Model):
        asked = f"shard a {type(model).__name__}"
        fix = "wrap it: mp.from_nnx(lambda rngs: ...), mp.from_linen(module, example_batch) or mp.from_functions(...)"
        raise problem("model", asked, "meshpar takes a Model, whose arrays do not exist yet", fix)
    if tx is not None and not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        exists = "it has no init and update, as an optax optimizer does"
        raise problem("optimizer", f"train with {getattr(tx, '__name__', repr(tx))}", exists, "write optax.adamw(3e-4)")


def _check_twins(*decided: Sequence[Decision]) -> None:
    """Raise `ValueError` for two parameters of one path, as keys `a/b` and `a: {b}` make, that are sharded unlike."""
    for decisions in decided:
        seen: dict[str, Decision] = {}
        for one in decisions:
            other = seen.setdefault(one.path, one)
            if (other.leaf, other.spec) != (one.leaf, one.spec):
                exists = " and ".join(f"one is {list(x.leaf.shape)} sharded as {x.spec}" for x in (other, one))
                fix = "rename one: a key `a/b` next to a key `a` that holds `b` makes the same path"
                raise problem(f"two parameters of path `{one.path}`", "be sharded by their path", exists, fix)


def _check_rules_used(
    leaves: Sequence[Leaf], extra: Sequence[Leaf], decisions: Sequence[Decision], strategy: Strategy
) -> None:
    """A user's rule must match something; a preset must be about some leaf of this model."""
    paths = [leaf.path for leaf in (*leaves, *extra)]
    names = {name for d in decisions for name in d.leaf.names or () if name}
    for rules in (strategy.params, strategy.grads, strategy.optimizer):
        for pattern in rules.patterns:
            if not any(re.fullmatch(pattern, path) for path in paths):
                asked = "apply to the leaves it matches"
                fix = near_or(pattern, paths, "write a pattern that matches a whole path, not just a part of it")
                raise problem(f"path rule `{pattern}`", asked, f"it matches none of {len(paths)} paths", fix)
        for name in rules.user_names:
            # Names of activations are met only when the model is traced: the shipped ones may stand beside parameters.
            if name not in names and name not in ACTIVATION_NAMES:
                where = f"rule for the name `{name}`"
                fix = near_or(name, names, "write it for a name of the model; for activations, in Strategy.activations")
                raise problem(where, "split the dims that have it", "no leaf of the model has it", fix)
        _check_presets_used(rules, leaves, decisions, names)


def _check_presets_used(rules: Rules, leaves: Sequence[Leaf], decisions: Sequence[Decision], names: set[str]) -> None:
    keys: dict[str, list[str]] = {}
    for origin, key in rules.sources:
        keys.setdefault(origin, []).append(key)
    at_work = {origin for d in decisions for origin, _ in d.sources}
    for origin in sorted(keys.keys() - at_work - {USER}):
        if keys[origin] == [LARGEST_DIM]:  # the user has replaced its rules for names, and no leaf is without names
            continue
        some = ", ".join(f"`{leaf.path}`" for leaf in leaves[:3]) + (", …" if len(leaves) > 3 else "")
        by_size = LARGEST_DIM in keys[origin]
        undivided = any(d.rule.startswith(f"{origin}: no dim divides") for d in decisions)
        fitting = "has such a name" + (" or is big enough" + " and divides" * undivided if by_size else "")
        raise problem(
            f"strategy {origin}",
            f"split leaves by {', '.join(f'`{key}`' for key in keys[origin])}",
            f"none of the model's {len(leaves)} leaves ({some}) {fitting}; "
            f"their names are {', '.join(f'`{name}`' for name in sorted(names)) or 'none'}",
            "annotate the model, or join rules that name leaves by path: mp.Rules(paths={r'.*/kernel': mp.names(...)})"
            + _other_ways(origin, by_size=by_size, undivided=undivided),
        )


def _other_ways(origin: str, *, by_size: bool, undivided: bool) -> str:
    if undivided:
        return "; or pad a dim, give the axis a size that divides one, or replicate them on purpose: mp.ddp()"
    return f"; or split small leaves too: mp.{origin}(min_bytes=0)" if by_size else ""


def _check_not_replicated_by_accident(decision: Decision, strategy: Strategy, mesh: AnyMesh) -> None:
    if decision.replicated_on_purpose or decision.shards > 1 or mesh.size == 1:
        return
    leaf = decision.leaf
    if leaf.layer_nbytes < strategy.big_leaf_bytes:
        return
    idle = sorted({axis for axis, size in axis_sizes(mesh).items() if size == 1} & set(axes_of_spec(decision.spec)))
    why = f"mesh axis {', '.join(f'`{a}`' for a in idle)} has size 1" if idle else f"the rule was: {decision.rule}"
    dims = " × ".join(map(str, leaf.shape))
    axes = ", ".join(f"`{name}` ({size})" for name, size in axis_sizes(mesh).items() if size > 1)
    where = f"`{leaf.path}` ({dims} {leaf.dtype.name}, {human_bytes(leaf.nbytes)}, names {leaf.names})"
    exists = f"it would be replicated on every device, and nothing says that is meant ({why})"
    fix = f"{_advice(leaf)}, or allow bigger ones: strategy.replace(big_leaf_bytes={leaf.nbytes + 1})"
    if idle and (sizes := {axis: size for axis, size in axis_sizes(mesh).items() if size > 1}).get("data"):
        moved = ", ".join(f"{axis}={size}" for axis, size in {idle[0]: sizes.pop("data"), **sizes}.items())
        fix = f"give `{idle[0]}` the devices of `data`, MeshSpec({moved}); or {fix}"
    raise problem(where, f"lie on a mesh with axes {axes}", exists, fix)


def _advice(leaf: Leaf) -> str:
    if leaf.path.startswith("opt_state/"):
        return "use an optimizer whose state has its parameters' dims, which is split as they are"
    return f"split a dim by a rule, say that it is meant (mp.Rules(paths={{r'{re.escape(leaf.path)}': mp.replicated}}))"
