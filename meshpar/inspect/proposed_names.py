"""Proposal of logical names for a model without names, from the flow of dims in the forward pass.

    column-parallel matmul [embed, C] ─► element-wise operations or attention ─► row-parallel matmul [C, embed]

A class of dims that is sharded over `tensor` costs an all-reduce for each matmul that contracts it. The proposal takes
the classes with the fewest elements to reduce per FLOP, at most one for each parameter. Reference: Shoeybi et al. 2019,
"Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism".
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from meshpar.inspect.dim_classes import Dim
from meshpar.inspect.dim_flow import DimFlow, dim_flow
from meshpar.parallel import ddp
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.context import tracing
from meshpar.sharding.errors import problem
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.rules import NamesOf, Rules, names
from meshpar.sharding.types import Leaf, Names, PyTree

MIN_FLOPS = 0.002
"""Minimum fraction of the FLOPs for a class of dims to be sharded over `tensor`."""


class ProposedLeaf(NamedTuple):
    """A parameter and the proposed name of each dim."""

    path: str
    shape: tuple[int, ...]
    names: Names
    reason: str
    """Why the dims have these names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProposedNames(Printed, Plain):
    """Proposed logical names of a model's parameters. Prints as a table."""

    leaves: tuple[ProposedLeaf, ...]
    """Parameters with proposed names."""
    divisors: Mapping[str, int]
    """The size of the mesh axis must divide this number, for each name: the number of heads, experts, layers or
    columns."""
    moved: Mapping[str, int]
    """Elements to reduce or to move in a step if the dims with a name are sharded, by name."""
    unnamed: tuple[str, ...]
    """Paths of other parameters. The strategy shards the largest dim of large ones."""

    @property
    def names(self) -> frozenset[str]:
        """All proposed names."""
        return frozenset(name for leaf in self.leaves for name in leaf.names if name)

    def paths(self, *, without: Iterable[str] = (), embed_divisor: int = 1) -> dict[str, NamesOf]:
        r"""Return the names by path pattern, with a pattern for all layers: `h/\d+/mlp/kernel`.

        Args:
          without: names to leave out. A parameter without other names than `embed` gets no rule, so that the strategy
            shards the largest dim.
          embed_divisor: number of shards of dims named `embed`. Dims that it does not divide keep no name.
        """
        removed = frozenset(without)
        kept = {
            leaf.path: tuple(
                None if name in removed or (name == "embed" and size % embed_divisor) else name
                for name, size in zip(leaf.names, leaf.shape, strict=True)
            )
            for leaf in self.leaves
        }
        named = {path: dims for path, dims in kept.items() if {*dims} - {None, "embed"}}
        patterns = _patterns({**dict.fromkeys(self.unnamed, ()), **dict.fromkeys(kept, ()), **named})
        return {patterns[path]: names(*dims) for path, dims in named.items()}

    def rules(self, *, without: Iterable[str] = ()) -> Rules:
        """Return `paths` as rules for a strategy."""
        return Rules(paths=self.paths(without=without))

    def __rich__(self) -> Any:
        patterns = _patterns({**dict.fromkeys(self.unnamed, ()), **{leaf.path: leaf[1:] for leaf in self.leaves}})
        groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for leaf in self.leaves:
            groups[patterns[leaf.path], leaf.shape, leaf.names, leaf.reason].append(leaf.path)
        rows = [
            (
                paths[0] if len(paths) == 1 else f"{len(paths)} × {pattern.replace(_DIGITS, 'N')}",
                "×".join(map(str, shape)),
                ", ".join(name or "–" for name in dims),
                reason,
            )
            for (pattern, shape, dims, reason), paths in groups.items()
        ]
        caption = (
            f"other parameters have no names: {len(self.unnamed)}; the strategy shards the largest dim of large ones"
        )
        columns = ("parameter", "shape", "names", "reason")
        return table("proposed logical names", columns, rows, left=columns, caption=caption)


_DIGITS = r"\d+"


def _patterns(values: Mapping[str, Any]) -> dict[str, str]:
    """Return for each path a pattern that matches paths with equal values only.

    Numbers in a path, such as layers and experts, are replaced from left to right, where this adds paths with the same
    value only.
    """

    def matches(parts: Sequence[str]) -> list[str]:
        pattern = re.compile("".join(parts))
        return [path for path in values if pattern.fullmatch(path)]

    patterns: dict[str, str] = {}
    for path, value in values.items():
        parts = [re.escape(part) for part in re.split(r"(\d+)", path)]
        for index in range(1, len(parts), 2):
            general = [*parts[:index], _DIGITS, *parts[index + 1 :]]
            matched = matches(general)
            if len(matched) > len(matches(parts)) and all(values[other] == value for other in matched):
                parts = general
        patterns[path] = "".join(parts)
    return patterns


def propose_names(model: Model, *args: PyTree, **kwargs: PyTree) -> ProposedNames:
    """Propose logical names for the parameters of a model, from a trace of the forward pass.

    Args:
      model: the model. Its own names are ignored.
      *args, **kwargs: example arrays of a call, or their shapes. The first dim is the batch.

    Returns:
      The names. `rules()` returns them as rules for a strategy.

    Raises:
      MeshparError: the model has no parameters that meet in a matmul.

    Example:
      >>> proposed = propose_names(model, jax.ShapeDtypeStruct((8, 64), np.float32))  # doctest: +SKIP
      >>> strategy = mp.fsdp() | mp.tensor_parallel() | proposed.rules()  # doctest: +SKIP
    """
    flow, leaves, _ = traced_flow(model, lambda bound, inputs: bound(*inputs[0], **inputs[1]), (args, kwargs))
    return names_from_flow(flow, leaves)


def traced_flow(
    model: Model, call: Callable[[Any, PyTree], PyTree], batch: PyTree
) -> tuple[DimFlow, list[Leaf], PyTree]:
    """Trace the forward pass of a model on a single device.

    Args:
      model: the model.
      call: function from (bound model, batch) to outputs.
      batch: arrays, or shapes.

    Returns:
      The flow of dims, the parameters, and the shapes of the outputs.
    """

    def forward(params: PyTree, batch: PyTree, extra: PyTree) -> PyTree:
        return call(model.bind(params, extra), batch)

    with tracing(MeshSpec().abstract(1), ddp()):
        variables = model.abstract()
        jaxpr, out = jax.make_jaxpr(forward, return_shape=True)(variables.params, batch, variables.extra)
        leaves = model.leaves()
    return dim_flow(jaxpr, len(leaves), len(jax.tree.leaves(batch))), leaves, out


def names_from_flow(flow: DimFlow, leaves: Sequence[Leaf]) -> ProposedNames:
    """Return names for the parameters `leaves` of a traced function, in their order."""
    proposal = _Proposal(flow, leaves)
    if not any(param is not None for matmul in flow.matmuls for param in matmul.params):
        reason, fix = "no matmul of the forward pass has a parameter", "name the dims with mp.Rules(paths=...)"
        raise problem("propose_names", "find column- and row-parallel matmuls", reason, fix, code="not-found")
    found = [proposal.named(index) for index in range(len(leaves))]
    return ProposedNames(
        leaves=tuple(leaf for leaf in found if leaf is not None),
        divisors=proposal.divisors(),
        moved=proposal.moved(),
        unnamed=tuple(leaf.path for leaf, names in zip(leaves, found, strict=True) if names is None),
    )


class _Group(NamedTuple):
    """Atoms that have the same position in different layers."""

    atoms: frozenset[int]
    name: str
    cost: int
    """Elements to reduce, in the forward pass."""
    flops: int


class _Proposal:
    """Choice of the classes of dims with a name."""

    def __init__(self, flow: DimFlow, leaves: Sequence[Leaf]) -> None:
        self.flow, self.leaves, self.resolved = flow, leaves, flow.classes.resolved
        self.params = [tuple(map(self.resolved, dims)) for dims in flow.params]
        self.layers = self._atoms(flow.scanned)
        self.pieces = self._atoms(flow.pieces)
        self.inputs = self._atoms(dim for dims in flow.inputs for dim in dims)
        self.matrices = {index for matmul in flow.matmuls for index in matmul.params} | {x.param for x in flow.lookups}
        self.experts = self._experts()
        self.chosen: dict[int, _Group] = {}
        for group in sorted(self._groups(), key=lambda group: (group.cost / group.flops, -group.flops)):
            if not self._conflicts(group.atoms):
                self.chosen.update(dict.fromkeys(group.atoms, group))
        self._add_tables()

    def _atoms(self, dims: Iterable[Dim]) -> frozenset[int]:
        return frozenset(atom for dim in dims for atom in self.resolved(dim))

    def _experts(self) -> frozenset[int]:
        """Return the atoms that number the matrices of a stack: batch dims of matmuls with a parameter."""
        stacked = [
            dim for matmul in self.flow.matmuls for dim in matmul.batch if any(x is not None for x in matmul.params)
        ]
        in_params = self._atoms(dim for dims in self.flow.params for dim in dims)
        return (self._atoms([*stacked, *self.flow.grouped]) & in_params) - self.layers - self.inputs

    @functools.cached_property
    def _uses(self) -> dict[int, list[tuple[int, int, Dim]]]:
        """Return the uses of each atom in matrices: index of the parameter, index of the dim, atoms of the dim."""
        uses: dict[int, list[tuple[int, int, Dim]]] = defaultdict(list)
        for index, dims in enumerate(self.params):
            if sum(not {*dim} <= self.layers | self.experts for dim in dims) < 2:
                continue
            for position, dim in enumerate(dims):
                for atom in {*dim} - self.layers - self.experts - self.inputs - self.pieces:
                    uses[atom].append((index, position, dim))
        return uses

    def _groups(self) -> list[_Group]:
        """Return the classes that may be sharded over `tensor`. The classes of equal layers are joined."""
        cost, flops, cut = self._costs(), self._flops(), self._atoms(self.flow.cut)
        by_layer: dict[Any, list[int]] = defaultdict(list)
        for atom, uses in self._uses.items():
            size = self.flow.classes.size((atom,))
            if size % 2 == 0 and atom not in cut and all(self._leads(atom, dim) for _, _, dim in uses):
                paths = (re.sub(_DIGITS, "N", self.leaves[index].path, count=1) for index, *_ in uses)
                positions = (position for _, position, _ in uses)
                by_layer[size, frozenset(zip(paths, positions, strict=True))].append(atom)
        groups = []
        for atoms in by_layer.values():
            # Layers in sequence may share a parameter.
            joined = [atoms] if not self._share(atoms) else [[atom] for atom in atoms]
            for each in joined:
                work = sum(flops[atom] for atom in each)
                groups.append(_Group(frozenset(each), self._role(each), sum(cost[atom] for atom in each), work))
        total = sum(matmul.flops for matmul in self.flow.matmuls)
        return [group for group in groups if group.flops >= MIN_FLOPS * total]

    def _share(self, atoms: Iterable[int]) -> bool:
        """Return whether a parameter has more than one of these atoms."""
        params = {index for atom in atoms for index, *_ in self._uses[atom]}
        return any(sum(atom in atoms for dim in self.params[index] for atom in dim) > 1 for index in params)

    def _leads(self, atom: int, dim: Dim) -> bool:
        """Return whether an atom is the major atom of a dim, ignoring the number of a piece."""
        return next((x for x in dim if x not in self.pieces), None) == atom

    def _costs(self) -> Counter[int]:
        """Return atom -> elements to reduce or to move, forward and backward, if the atom is sharded."""
        cost: Counter[int] = Counter()
        backward: dict[tuple[int, Any], int] = {}
        for matmul in self.flow.matmuls:
            for atom in self._atoms(matmul.contracted):
                cost[atom] += matmul.out_size
            for side, param in enumerate(matmul.params):
                if param is None:
                    continue
                # The other operand's gradient contracts the free dims. All matmuls of an activation share it.
                for atom in self._atoms(matmul.free[side]):
                    backward[atom, matmul.operands[1 - side]] = matmul.sizes[1 - side]
                # A shard of fused columns, such as query, key and value, has columns of other pieces.
                for atom in (atom for dim in self.params[param] if {*dim[:1]} & self.pieces for atom in dim[1:]):
                    cost[atom] += matmul.out_size
        for (atom, _), size in backward.items():
            cost[atom] += size
        for reduction in self.flow.reductions:
            for atom in self._atoms(reduction.dims):
                cost[atom] += reduction.out_size
        for lookup in self.flow.lookups:
            for atom in self.resolved(lookup.rows):
                cost[atom] += lookup.out_size
        return cost

    def _flops(self) -> Counter[int]:
        """Return atom -> FLOPs of the matmuls that the atom divides."""
        flops: Counter[int] = Counter()
        for matmul in self.flow.matmuls:
            dims = (*matmul.batch, *matmul.contracted, *matmul.free[0], *matmul.free[1])
            for atom in self._atoms(dims):
                flops[atom] += matmul.flops
        return flops

    def _role(self, atoms: Iterable[int]) -> str:
        chosen = {*atoms}
        rows = self._atoms(lookup.rows for lookup in self.flow.lookups if lookup.param is not None)
        outputs = self._atoms(value.dims[-1] for value in self.flow.outputs if value.dims)
        attention = self._atoms(
            dim for matmul in self.flow.matmuls for dim in matmul.batch if matmul.params == (None, None)
        )
        return "vocab" if chosen & (rows | outputs) else "heads" if chosen & attention else "mlp"

    def _conflicts(self, atoms: frozenset[int]) -> bool:
        """Return whether a parameter would have two dims, or two parts of a dim, sharded over `tensor`."""
        params = {index for atom in atoms for index, *_ in self._uses[atom]}
        chosen = {atom for index in params for dim in self.params[index] for atom in dim if atom in self.chosen}
        return self._share(atoms | chosen)

    def _add_tables(self) -> None:
        """Shard the rows of a separate embedding table like the logits."""
        vocabulary = {
            self.flow.classes.size((atom,)): group for atom, group in self.chosen.items() if group.name == "vocab"
        }
        for lookup in self.flow.lookups:
            rows = frozenset(self.resolved(lookup.rows))
            group = vocabulary.get(self.flow.classes.size(lookup.rows))
            is_free = len(rows) == 1 and rows <= self._uses.keys() - self.chosen.keys()
            if group and lookup.param is not None and is_free and not self._conflicts(rows):
                self.chosen.update(dict.fromkeys(rows, group))

    def named(self, index: int) -> ProposedLeaf | None:
        """Return the names of a parameter, or None if no dim has a name."""
        leaf, dims = self.leaves[index], self.params[index]
        named: list[str | None] = [self._name(dim) for dim in dims]
        found = [name for name in named if name]
        if not found or len({*found}) < len(found):
            return None
        # The largest of the other dims is sharded by ZeRO.
        free = [i for i, (name, dim) in enumerate(zip(named, dims, strict=True)) if name is None and dim]
        if free and index in self.matrices and found != ["layers"]:
            named[max(free, key=lambda i: (leaf.shape[i], -i))] = "embed"
        reasons = [
            reason for name, dim in zip(named, dims, strict=True) if name and (reason := self._reason(name, dim))
        ]
        return ProposedLeaf(leaf.path, leaf.shape, tuple(named), "; ".join(reasons))

    def _name(self, dim: Dim) -> str | None:
        if dim and {*dim} <= self.layers:
            return "layers"
        if {*dim} & self.experts:
            return "expert"
        group = next((self.chosen[atom] for atom in dim if atom in self.chosen), None)
        if group is None:
            return None
        return "kv_heads" if group.name == "heads" and self._is_shared(dim, group) else group.name

    def _is_shared(self, dim: Dim, group: _Group) -> bool:
        """Return whether a dim has fewer heads than the queries, which then share keys and values."""

        (atom,) = {*dim} & group.atoms

        def size(dim: Dim) -> int:
            return self.flow.classes.size(dim[dim.index(atom) :])  # without the number of a fused piece

        return size(dim) < max(size(other) for _, _, other in self._uses[atom])

    def _reason(self, name: str, dim: Dim) -> str:
        if name == "layers":
            return "scanned"
        if name == "expert":
            return "stack of matrices"
        if name == "embed":
            return ""
        (atom,) = {*dim} & self.chosen.keys()
        leaves = {self.leaves[index].path for index, *_ in self._uses[atom]}
        kind = {"vocab": "rows of a table or logits", "mlp": "inside a block"}.get(name, "heads of attention")
        fused = ", fused with others" if dim[0] in self.pieces else ""
        matrices = f"{len(leaves)} {'matrices' if len(leaves) > 1 else 'matrix'}"
        return f"{kind}: {self.flow.classes.size((atom,))}, {matrices}{fused}"

    def moved(self) -> dict[str, int]:
        """Return the elements to reduce or to move if the dims with a name are sharded."""
        moved: Counter[str] = Counter()
        for group in {*self.chosen.values()}:
            moved[group.name] += group.cost
        return dict(moved)

    def divisors(self) -> dict[str, int]:
        """Return for each name the number that the size of the mesh axis must divide."""
        sizes: dict[str, list[int]] = defaultdict(list)
        for atom, group in self.chosen.items():
            sizes[group.name].append(self.flow.classes.size((atom,)))
        for dims in self.params:
            for dim in dims:
                if (name := self._name(dim)) in ("expert", "layers"):
                    sizes[name].append(self.flow.classes.size(dim))
        return {name: math.gcd(*values) for name, values in sizes.items()}
