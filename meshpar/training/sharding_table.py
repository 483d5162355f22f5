"""ShardingTable: the sharding decisions for all leaves of a model and its optimizer."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import optax
from jax.sharding import PartitionSpec

from meshpar.layers.precision import Precision, cast_floating
from meshpar.optim.moments import on_host
from meshpar.parallel import Strategy, as_strategy
from meshpar.sharding.adapters.model import Model, Variables
from meshpar.sharding.context import clear_context_mesh, tracing
from meshpar.sharding.errors import near, near_or, problem
from meshpar.sharding.mesh import with_auto_axes
from meshpar.sharding.printing import Printed, human_mesh
from meshpar.sharding.rules import ACTIVATION_NAMES, LARGEST_DIM, USER, Rules, resolve
from meshpar.sharding.types import (
    AnyMesh,
    Decision,
    Leaf,
    MeshLike,
    PyTree,
    axes_of_spec,
    axis_sizes,
    is_spec,
    leaf_of,
    num_shards,
    path_str,
    spec_axes,
    tree_leaves_with_paths,
)
from meshpar.sharding.units import human_bytes

Trainable: TypeAlias = str | Callable[[str], bool] | None
"""A pattern for full parameter paths, a predicate of the path, or None for all parameters."""


class Totals(NamedTuple):
    """Bytes per device, and the number of parameters of the model."""

    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    state_bytes: int
    num_params: int
    host_bytes: int = 0
    """Bytes of offloaded optimizer state per device. They are not part of the other fields."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingTable(Printed):
    """The `Decision` of each leaf of a training state. Prints as a table."""

    mesh: dict[str, int]
    strategy: str
    params: tuple[Decision, ...]
    grads: tuple[Decision, ...]
    optimizer: tuple[Decision, ...]
    """Decisions for the optimizer state. Empty without an optimizer."""
    extra: tuple[Decision, ...]
    """Variables of the model other than parameters."""
    idle: tuple[str, ...] = ()
    """Mesh axes larger than 1 without a rule. Their devices repeat work, unless the model shards over them."""

    @property
    def totals(self) -> Totals:
        """Bytes per device. The state is parameters, optimizer state and other variables."""
        params, grads, optimizer, extra = (
            sum(d.bytes_per_device for d in decisions if not d.is_on_host)
            for decisions in (self.params, self.grads, self.optimizer, self.extra)
        )
        return Totals(
            params_bytes=params,
            grads_bytes=grads,
            optimizer_bytes=optimizer,
            state_bytes=params + optimizer + extra,
            num_params=sum(d.leaf.size for d in self.params),
            host_bytes=sum(d.bytes_per_device for d in self.optimizer if d.is_on_host),
        )

    @property
    def parameters_text(self) -> str:
        """The number of parameters, and of trained parameters if some are frozen."""
        total = sum(d.leaf.size for d in self.params)
        trained = sum(d.leaf.size for d in self.params if d.leaf.is_trained)
        return f"{total:,} parameters" + (f", {trained:,} trained ({trained / total:.2%})" if trained < total else "")

    def __getitem__(self, path: str) -> Decision:
        decision = next((d for d in self.params if d.path == path), None)
        if decision is None:
            fix = near(path, (d.path for d in self.params))
            raise problem("ShardingTable", f"find `{path}`", "no leaf has this path", fix, code="unknown-name")
        return decision

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain data: `mesh, strategy, leaves, totals`."""
        leaves = [
            {
                "path": d.path,
                "shape": list(d.leaf.shape),
                "dtype": d.leaf.dtype.name,
                "names": None if d.leaf.names is None else list(d.leaf.names),
                "rule": d.rule,
                "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in d.spec],
                "bytes_per_device": d.bytes_per_device,
            }
            for d in self.params
        ]
        return {"mesh": self.mesh, "strategy": self.strategy, "leaves": leaves, "totals": self.totals._asdict()}

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        totals = self.totals
        table = Table(
            title=f"mesh {human_mesh(self.mesh)} · {self.strategy}",
            caption=f"{self.parameters_text} · per device: params {human_bytes(totals.params_bytes)}, "
            f"grads {human_bytes(totals.grads_bytes)}, optimizer {human_bytes(totals.optimizer_bytes)}, "
            f"state {human_bytes(totals.state_bytes)}"
            + f", on the host {human_bytes(totals.host_bytes)}" * bool(totals.host_bytes)
            + "".join(
                f"\nno rule uses mesh axis `{axis}`: its {self.mesh[axis]} devices repeat work, "
                "unless the model shards over it"
                for axis in self.idle
            ),
        )
        for column in ("path", "shape", "dtype", "names", "rule", "spec"):
            table.add_column(column, overflow="fold")
        table.add_column("per device", justify="right", no_wrap=True)
        groups: dict[tuple[str, ...], list[str]] = {}
        for d in self.params:
            shape = "×".join(map(str, d.leaf.shape)) or "scalar"
            names = "" if d.leaf.names is None else ", ".join(name or "–" for name in d.leaf.names)
            rule = d.rule if d.leaf.is_trained else f"{d.rule}; frozen"
            cells = (shape, d.leaf.dtype.name, names, rule, spec_text(d.spec), human_bytes(d.bytes_per_device))
            groups.setdefault((re.sub(r"\d+", "#", d.path), *cells), []).append(d.path)
        for (_, *columns, size), paths in groups.items():
            for count, path in _folded(paths):
                table.add_row(*map(Text, (path, *columns, f"{count} × {size}" if count > 1 else size)))
        return table


def _folded(paths: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield (1, path) for each path, or (12, `layers/0…11/up`) if they differ only in a number without gaps."""
    numbers = [re.findall(r"\d+", path) for path in paths]
    varying = [i for i, values in enumerate(zip(*numbers, strict=True)) if len(set(values)) > 1]
    values = sorted(int(number[varying[0]]) for number in numbers) if len(varying) == 1 else []
    if not values or values != list(range(values[0], values[0] + len(paths))):
        yield from ((1, path) for path in paths)
        return
    position = list(re.finditer(r"\d+", paths[0]))[varying[0]]
    yield len(paths), f"{paths[0][: position.start()]}{values[0]}…{values[-1]}{paths[0][position.end() :]}"


def spec_text(spec: PartitionSpec) -> str:
    """Return a spec as text, such as "fsdp, –, tensor"."""
    return ", ".join("–" if e is None else e if isinstance(e, str) else "×".join(e) for e in spec)


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
      strategy: a strategy, or `Rules` for parameters, gradients, optimizer state and activations.
      tx: the optimizer. If given, the table includes its state.
      precision: leaves are counted in its parameter dtype.
      trainable: as in `init_state`.

    Returns:
      An immutable table. `table["up/kernel"]` is the `Decision` for a leaf, and `print(table)` shows all of them.

    Raises:
      ValueError: a rule is invalid for a leaf, a user's rule or a preset matches no leaf, or a large leaf would be
        replicated by accident.

    Example:
      >>> table = mp.shardings(model, mp.MeshSpec(fsdp=8).abstract(), mp.fsdp(min_bytes=0))
      >>> table["up/kernel"].spec
      P(None, 'fsdp')
    """
    return lay_out(model, mesh, as_strategy(strategy), tx, precision or Precision(), trainable).table


# ---- The layout of a state -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableLayout:
    """The sharding table, and a pytree of PartitionSpecs for each part of the training state."""

    table: ShardingTable
    params: PyTree
    grads: PyTree
    updates: PyTree
    """Specs of the parameter updates, which are computed with the sharding of the optimizer state."""
    optimizer: PyTree
    extra: PyTree
    variables: Variables
    """Shapes and dtypes of the model's arrays."""
    opt_state: PyTree
    """Shapes and dtypes of the optimizer state."""


@clear_context_mesh()
def lay_out(
    model: Model,
    mesh: AnyMesh,
    strategy: Strategy,
    tx: optax.GradientTransformation | None,
    precision: Precision,
    trainable: Trainable = None,
) -> TableLayout:
    """Resolve all leaves of a state, and check the decisions. Errors are those of `shardings`."""
    mesh = with_auto_axes("mesh", mesh)
    _check_kinds(model, tx)
    strategy.check_axes(mesh)
    with tracing(mesh, strategy):
        variables = model.abstract()
        names = model.names()
    if precision.params is not None:
        cast = jax.eval_shape(lambda params: cast_floating(params, precision.params), variables.params)
        variables = variables._replace(params=cast)
    leaves = [leaf_of(path, x, names.get(path)) for path, x in tree_leaves_with_paths(variables.params)]
    extra_leaves = [leaf_of(path, x) for path, x in tree_leaves_with_paths(variables.extra)]
    leaves = _with_frozen(leaves, model.lora.trained if trainable is None and model.lora is not None else trainable)
    trained = [leaf.is_trained for leaf in leaves]
    rule_sets = (strategy.params, strategy.grads, strategy.optimizer)
    decided = {
        rules: [resolve_by_stage(leaf, rules, mesh, strategy) for leaf in leaves] for rules in dict.fromkeys(rule_sets)
    }
    params, grads, updates = (decided[rules] for rules in rule_sets)
    _check_duplicate_paths(params, updates)
    _check_rules_used(leaves, extra_leaves, [*params, *grads, *updates], strategy)
    opt_state = None if tx is None else jax.eval_shape(tx.init, only(trained, variables.params, variables.params))
    optimizer = [] if tx is None else optimizer_decisions(tx, opt_state, updates, mesh)
    # Other variables have no names. They are sharded by path rules or replicated.
    rules = strategy.params
    extra = [resolve(leaf, rules if rules.path_rule(leaf.path) else Rules(), mesh) for leaf in extra_leaves]
    for decision in (*params, *grads, *updates, *optimizer, *extra):
        _check_replication(decision, strategy, mesh)

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


def resolve_by_stage(leaf: Leaf, rules: Rules, mesh: MeshLike, strategy: Strategy) -> Decision:
    """Resolve a leaf. Stacked layers have a special layout if pipeline stages have unequal numbers of layers.

    JAX needs shards of equal sizes. Between steps, such stacks are therefore sharded over the stages along another dim,
    and each step sends the layers to their stages.
    """
    pipeline, rule, sizes = strategy.pipeline, rules.name_rule("layers"), axis_sizes(mesh)
    axis = None if pipeline is None else pipeline.axis
    if pipeline is None or axis is None or rule is None or rule.value != axis or sizes.get(axis, 1) == 1:
        return resolve(leaf, rules, mesh)
    decision = resolve(leaf, rules | Rules(layers=None), mesh)
    is_over_stages = decision.leaf.is_stacked and axis not in axes_of_spec(decision.spec)
    counts = pipeline.layers_of_parts(leaf.shape[0], pipeline.shortened().num_parts) if is_over_stages else ()
    if len(set(counts)) <= 1:
        return resolve(leaf, rules, mesh)
    entries = [spec_axes(entry) for entry in decision.spec]
    divisible = [
        dim
        for dim, (size, axes) in enumerate(zip(leaf.shape, entries, strict=True))
        if dim and size and size % math.prod(sizes[a] for a in (*axes, axis)) == 0
    ]
    layout = "replicated over the stages between steps"
    if divisible:
        dim = max(divisible, key=lambda dim: (not entries[dim], leaf.shape[dim], -dim))
        entries[dim] = (*entries[dim], axis)
        layout = f"dim {dim} sharded over `{axis}` between steps"
    spec = PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))
    return dataclasses.replace(
        decision,
        rule=f"{rule}, {'+'.join(map(str, counts))} layers: {layout}" + f"; {decision.rule}" * any(decision.spec),
        spec=spec,
        shards=num_shards(spec, mesh),
        sources=decision.sources - {(USER, "layers")} | {(rule.origin, rule.key)},
    )


def only(selected: Sequence[bool], tree: PyTree, like: PyTree) -> PyTree:
    """Return a tree with the structure of `like`, and None in place of leaves that are not selected."""
    leaves = zip(jax.tree.leaves(tree, is_leaf=is_spec), selected, strict=True)
    return jax.tree.unflatten(jax.tree.structure(like), [x if is_selected else None for x, is_selected in leaves])


def _with_frozen(leaves: list[Leaf], trainable: Trainable) -> list[Leaf]:
    if trainable is None:
        return leaves
    where, requested, paths = f"trainable={trainable!r}", "select parameters", [leaf.path for leaf in leaves]
    try:
        predicate = trainable if callable(trainable) else re.compile(trainable).fullmatch
    except (re.error, TypeError) as error:
        code, fix = "bad-syntax" if isinstance(error, re.error) else "wrong-type", "write r'.*/(lora_a|lora_b)'"
        raise problem(where, requested, f"it is neither a path pattern nor a predicate ({error})", fix, code) from error
    selected = {path: predicate(path) for path in paths}
    for path in (path for path in paths if callable(trainable) and not isinstance(selected[path], bool)):
        reason = f"for `{path}` it returned {selected[path]!r} instead of True or False"
        raise problem(where, requested, reason, "return a bool, as lambda path: 'lora' in path", code="not-a-bool")
    if not any(selected.values()):
        reason = f"it selects none of the model's {len(paths)} parameters"
        fix = near_or(str(trainable), paths, "use the full path of a parameter")
        raise problem(where, requested, reason, fix, code="unknown-name")
    return [dataclasses.replace(leaf, is_trained=bool(selected[leaf.path])) for leaf in leaves]


def optimizer_decisions(
    tx: optax.GradientTransformation, opt_state: PyTree, updates: Sequence[Decision], mesh: MeshLike
) -> list[Decision]:
    """Return the decisions for optimizer state: like its parameters, and replicated for leaves such as counts."""
    by_path = {decision.path: decision for decision in updates if decision.leaf.is_trained}

    no_owner = object()  # None would be an empty subtree

    def owners_of(tree: PyTree) -> PyTree:
        # By path and not by structure, because of masks and of optimizers with a list per parameter.
        def owner(path: Any, _: Any) -> Any:
            parts = path_str(path).split("/")
            prefixes = ("/".join(parts[:end]) for end in range(len(parts), -1, -1))
            return next((by_path[prefix] for prefix in prefixes if prefix in by_path), no_owner)

        return jax.tree_util.tree_map_with_path(owner, tree)

    def find_owners() -> None:
        slots = optax.tree_utils.tree_map_params(
            tx, owners_of, opt_state, transform_non_params=lambda _: no_owner, is_leaf=lambda _: True
        )
        owners.extend(None if owner is no_owner else owner for owner in jax.tree.leaves(slots))

    leaves, owners = tree_leaves_with_paths(opt_state), list[Decision | None]()
    try:
        # `tree_map_params` runs `tx.init`, whose arrays would initialize the devices outside of a trace.
        jax.eval_shape(find_owners)
    except Exception:
        # It passes placeholders to `tx.init`, which label functions and L-BFGS reject. Then the owner of a leaf is the
        # parameter whose full path is the end of the path of the leaf.
        suffixes = (
            ["/".join(keys[start:]) for start in range(len(keys))] for keys in (path.split("/") for path, _ in leaves)
        )
        owners = [next((by_path[suffix] for suffix in each if suffix in by_path), None) for each in suffixes]
    decisions = [_slot_decision(path, x, owner, mesh) for (path, x), owner in zip(leaves, owners, strict=True)]
    offloaded = jax.tree.leaves(on_host(opt_state))
    return [
        dataclasses.replace(d, is_on_host=is_offloaded and bool(d.leaf.shape))
        for d, is_offloaded in zip(decisions, offloaded, strict=True)
    ]


def _slot_decision(path: str, x: Any, owner: Decision | None, mesh: MeshLike) -> Decision:
    leaf = leaf_of(f"opt_state/{path}", x)
    dims = None if owner is None else _kept_dims(leaf.shape, owner.leaf.shape)
    if owner is None or dims is None:
        rule = "belongs to no parameter" if owner is None else f"shape differs from `{owner.path}`"
        return Decision(leaf=leaf, rule=rule, spec=PartitionSpec(), shards=1, replicated_on_purpose=False)
    names = owner.leaf.names
    entries = [None if dim is None or dim >= len(owner.spec) else owner.spec[dim] for dim in dims]
    # Factored moments (Adafactor) have some of the parameter's dims, the history of L-BFGS has an additional dim.
    return dataclasses.replace(
        owner,
        leaf=dataclasses.replace(leaf, names=names and tuple(None if dim is None else names[dim] for dim in dims)),
        spec=PartitionSpec(*entries),
        shards=num_shards(PartitionSpec(*entries), mesh),
    )


def _kept_dims(shape: tuple[int, ...], param: tuple[int, ...]) -> tuple[int | None, ...] | None:
    """Return the dim of the parameter that each dim of an optimizer leaf corresponds to, with None for new dims.

    Returns None if the shapes do not match.
    """
    num_new = len(shape) - len(param)
    if num_new > 0 and shape[num_new:] == param:
        return (*[None] * num_new, *range(len(param)))
    for dims in itertools.combinations(range(len(param)), len(shape)):
        if tuple(param[dim] for dim in dims) == shape:
            return dims
    return None


def _check_kinds(model: Any, tx: Any) -> None:
    is_optimizer = tx is None or (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)))
    for applies, name, requested, reason, fix in (
        (not isinstance(model, Model), "model", f"shard a {type(model).__name__}", "it is not a Model",
         "wrap it: mp.from_nnx(lambda rngs: ...), mp.from_linen(module, batch) or mp.from_functions(init, apply)"),
        (not is_optimizer, "optimizer", f"train with {getattr(tx, '__name__', tx)!r}", "it is not an optax optimizer",
         "write optax.adamw(3e-4)"),
    ):  # fmt: skip
        if applies:
            raise problem(name, requested, reason, fix, code="wrong-type")


def _check_duplicate_paths(*decision_lists: Sequence[Decision]) -> None:
    """Check that parameters with the same path, such as the keys `a/b` and `a: {b}`, have the same sharding."""
    for decisions in decision_lists:
        by_path: dict[str, Decision] = {}
        for second in decisions:
            first = by_path.setdefault(second.path, second)
            if (first.leaf, first.spec) != (second.leaf, second.spec):
                reason = " and ".join(f"one is {list(d.leaf.shape)} sharded as {d.spec}" for d in (first, second))
                where, fix = f"two parameters with path `{second.path}`", "rename one of them"
                raise problem(where, "shard them by their path", reason, fix, code="conflict")


def _check_rules_used(
    leaves: Sequence[Leaf], extra: Sequence[Leaf], decisions: Sequence[Decision], strategy: Strategy
) -> None:
    """Check that rules of the user match leaves, and that presets apply to the model."""
    paths = [leaf.path for leaf in (*leaves, *extra)]
    names = {name for d in decisions for name in d.leaf.names or () if name}
    for rules in (strategy.params, strategy.grads, strategy.optimizer):
        patterns = (p for p in rules.patterns if not any(re.fullmatch(p, path) for path in paths))
        unmatched = [
            (f"path rule `{p}`", near_or(p, paths, "write a pattern that matches a full path")) for p in patterns
        ]
        # Names of activations are known only during a trace, so rules for the standard names are accepted.
        for name in (name for name in rules.user_names if name not in names and name not in ACTIVATION_NAMES):
            fix = near_or(name, names, "use a name of the model; rules for activations belong in Strategy.activations")
            unmatched.append((f"rule for the name `{name}`", fix))
        for where, fix in unmatched:
            raise problem(where, "apply it", "no leaf of the model matches", fix, code="unmatched-rule")
        _check_presets_used(rules, leaves, decisions, names)


def _check_presets_used(rules: Rules, leaves: Sequence[Leaf], decisions: Sequence[Decision], names: set[str]) -> None:
    keys: dict[str, list[str]] = {}
    for origin, key in rules.sources:
        keys.setdefault(origin, []).append(key)
    applied = {origin for d in decisions for origin, _ in d.sources}
    for origin in sorted(keys.keys() - applied - {USER}):
        if keys[origin] == [LARGEST_DIM]:  # the user replaced its rules for names, and all leaves have names
            continue
        examples = ", ".join(f"`{leaf.path}`" for leaf in leaves[:3]) + (", …" if len(leaves) > 3 else "")
        by_size, wanted = LARGEST_DIM in keys[origin], [key for key in keys[origin] if key != LARGEST_DIM]
        indivisible = any(d.rule.startswith(f"{origin}: no dim is divisible") for d in decisions)
        condition = "has a dim of such a name" * bool(wanted) + " or" * (by_size and bool(wanted))
        condition += (" is large enough" + " and divisible" * indivisible) * by_size
        reason = f"none of the model's {len(leaves)} leaves ({examples}) {condition.strip()}; "
        reason += (
            "their dims are named " + ", ".join(f"`{name}`" for name in sorted(names))
            if names
            else "their dims have no names"
        )
        dims = "'embed', 'mlp'" if "mlp" in wanted or not wanted else f"{wanted[0]!r}, ..."
        fix = f"annotate the model, or add rules by path: mp.Rules(paths={{r'.*/up/kernel': mp.names({dims})}})"
        if wanted == ["layers"]:
            fix = "stack the layers, and call them with mp.scan_layers; then name the first dim: "
            fix += "mp.Rules(paths={r'blocks/.*': mp.names('layers', ...)})"
        if indivisible:
            fix += "; or pad a dim, change the size of the axis, or replicate all leaves with mp.ddp()"
        elif by_size:
            fix += f"; or shard small leaves too: mp.{origin}(min_bytes=0)"
        by_name = f"dims named {', '.join(f'`{key}`' for key in wanted)}" if wanted else ""
        requested = "shard " + " or ".join(filter(None, (by_name, "the largest dim of leaves without names" * by_size)))
        raise problem(f"strategy {origin}", requested, reason, fix, code="unmatched-rule")


def _check_replication(decision: Decision, strategy: Strategy, mesh: AnyMesh) -> None:
    if decision.replicated_on_purpose or decision.shards > 1 or mesh.size == 1:
        return
    leaf, sizes = decision.leaf, axis_sizes(mesh)
    if leaf.layer_nbytes < strategy.big_leaf_bytes:
        return
    used = {axis: size for axis, size in sizes.items() if size > 1}
    idle = sorted(set(axes_of_spec(decision.spec)) - used.keys())
    cause = f"mesh axis {', '.join(f'`{a}`' for a in idle)} has size 1" if idle else decision.rule
    named = f"names {leaf.names}" if leaf.names else "no names"
    where = f"`{leaf.path}` ({leaf.dtype.name}{list(leaf.shape)}, {human_bytes(leaf.nbytes)}, {named})"
    reason = f"it would be replicated on all devices ({cause}), and no rule requests replication"
    fix = f"shard a dim with a rule, or replicate it with mp.Rules(paths={{r'{re.escape(leaf.path)}': mp.replicated}})"
    if leaf.path.startswith("opt_state/"):
        fix = "use an optimizer whose state has the dims of its parameters"
    fix += f", or raise the limit: strategy.replace(big_leaf_bytes={leaf.nbytes + 1})"
    requested = f"place it on a mesh with axes {', '.join(f'`{name}` ({size})' for name, size in used.items())}"
    if idle and "data" in used:
        moved = ", ".join(f"{axis}={size}" for axis, size in {idle[0]: used.pop("data"), **used}.items())
        fix = f"give `{idle[0]}` the devices of `data`, MeshSpec({moved}); or {fix}"
    raise problem(where, requested, reason, fix, code="replicated-by-accident")
