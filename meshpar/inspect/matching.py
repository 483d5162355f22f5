"""Comparison of a program's collectives with the expected collectives and traced kernel messages.

Each array of a collective is assigned to at most one expected collective, by kind, axes and size. The assignment
minimizes the number of missing arrays first, and the number of unassigned arrays second. An unassigned array is
bookkeeping (a scalar or a vector over the batch, such as a loss or a norm), a message of a `shard_map` kernel of the
traced step, or unexpected.

Counts are compared on each mesh axis. Bytes are compared with the cheapest lowering that XLA may choose; see
`meshpar.parallel.expected.collective` for the alternatives.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from meshpar.inspect.census import Collective, bytes_sent, per_array
from meshpar.inspect.source_scopes import layerless, merge_layers, rule_for
from meshpar.inspect.traced_collectives import Message
from meshpar.parallel.expected.collective import GRADIENTS, ITEMSIZE, RENEWED, WEIGHTS, ExpectedCollective
from meshpar.parallel.parallelism import MIN_SHARDED_BYTES
from meshpar.sharding.printing import Plain

SMALL = 64
"""Arrays of up to 64 elements are bookkeeping: losses, metrics, norms."""
SMALL_SHARE = 0.01
"""Maximum share of all sent bytes that unexpected small arrays may have, if the model constrains no activations.

Without constraints, XLA chooses the sharding of the activations. Arrays of up to `MIN_SHARDED_BYTES` count as small."""
_RING = "collective-permute"
_MISSING_COST, _UNASSIGNED_COST = 1000.0, 10.0
"""Costs of a missing and of an unassigned array. The cost of a mismatch in dtype, axes or stacking is below 1."""
_LOWERINGS = {"gather": ("all-gather",), "sum": ("all-reduce", "reduce-scatter"), "exchange": ("all-to-all",)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatchEntry(Plain):
    """Expected and compiled collectives with the same role, kind and axes."""

    role: str
    kind: str
    axes: tuple[str, ...]
    tensors: tuple[str, ...]
    count: tuple[int, int]
    """Minimum and maximum expected arrays per step, before XLA combines them. For kernels, the traced count."""
    bytes_sent_per_device: float
    """Expected bytes that a device sends per step, at `actual_count` if the expected count is a range."""
    actual_count: int
    """Number of arrays that the compiled program sends per step."""
    actual_bytes: float
    """Bytes sent per device and step in the compiled program."""
    dtype: str = ""
    """Expected dtype of the payload."""
    actual_dtypes: tuple[str, ...] = ()
    """Dtypes of large compiled arrays that differ from `dtype`."""
    lowered_as: str = ""
    """Kind of the compiled collective, if it differs from `kind`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unexpected(Plain):
    """A collective that neither the strategy nor a kernel of the traced step requires."""

    kind: str
    axes: tuple[str, ...]
    tensor: str
    """Local shape of the payload, and a parameter of the same size, if any."""
    module: str
    source: str
    operation: str
    """Primitive that caused the collective."""
    count_per_step: int
    bytes_sent_per_device: float
    """Bytes that a device sends per step."""
    fix: str
    """Suggested fix."""
    layers: int = 1
    """Number of layers with this collective. A star in `module` stands for the layer number."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatchResult(Plain):
    """The collectives of a program, grouped by the result of the comparison."""

    matched: tuple[MatchEntry, ...]
    """Expected collectives that are in the compiled program."""
    missing: tuple[MatchEntry, ...]
    """Expected collectives that are not in the compiled program."""
    unexpected: tuple[Unexpected, ...]
    kernels: tuple[MatchEntry, ...] = ()
    """Collectives of `shard_map` kernels that are also in the traced step."""
    small: tuple[MatchEntry, ...] = ()
    """Collectives of losses, metrics and norms."""
    unjudged: tuple[MatchEntry, ...] = ()
    """Collectives over `unannotated_axes`, which cannot be judged."""
    unannotated_axes: tuple[str, ...] = ()
    """Axes that shard unnamed parameters by path rules, so that the layout of the activations is unknown."""


@dataclasses.dataclass
class _Pool:
    """Arrays of the compiled collectives, which are assigned to expected collectives."""

    arrays: list[list[Any]]
    """[single-array collective, unassigned runs per step]."""
    sizes: dict[str, int]
    micro_steps: int
    stacks: frozenset[int] = frozenset()
    """Leading dims (numbers of layers) of the stacked parameters."""

    def interchangeable(self) -> list[list[int]]:
        """Group the indices of arrays that are equal for the assignment: same kind, axes, size, dtype and loops."""
        groups: dict[Any, list[int]] = {}
        for index, (array, runs) in enumerate(self.arrays):
            trips = tuple(loop.trip_count for loop in array.loops)
            key = array.logical_kind, array.axes, _elements(array), array.dtype, array.is_backward, array.origin
            if runs:
                groups.setdefault((*key, trips), []).append(index)
        return list(groups.values())

    def fit(self, expected: ExpectedCollective, array: Collective) -> tuple[Fraction, float]:
        """Return how many of the expected arrays one run of `array` sends, and the cost of this assignment.

        The number is 0 if they do not match. The cost is higher if the dtype or the axes differ.
        """
        if (expected.forward_only and array.is_backward) or (expected.outside_loops and array.loops):
            return Fraction(0), 0.0
        is_integer = array.dtype.startswith(("s", "u", "pred"))  # counts or quantized values
        if is_integer != expected.dtype.startswith("s") or not set(array.axes) <= set(expected.axes):
            return Fraction(0), 0.0
        if expected.is_param and expected.stack == 1 and any(self.in_layers(array, layers) for layers in self.stacks):
            return Fraction(0), 0.0
        in_layers = self.in_layers(array, expected.stack)
        num_arrays = self.num_provided(expected, array, 1 if in_layers else expected.stack)
        # Outside the loop, an array as large as a layer may also be a smaller, unstacked parameter.
        cost = 0.4 * (num_arrays == 1 < expected.stack and not in_layers) + 0.2 * (array.logical_kind == _RING)
        cost += 0.3 * (array.dtype != expected.dtype) + 0.1 * (len(expected.axes) - len(array.axes))
        return num_arrays, cost

    def num_provided(self, expected: ExpectedCollective, array: Collective, stack: int) -> Fraction:
        """Return how many of the expected arrays one run of `array` sends; 0 if kind, axes or size do not match.

        A collective of a stack of layers sends `stack` arrays at once.
        """
        kind, axes, elements = array.logical_kind, set(array.axes), _elements(array)
        if kind == _RING and len(expected.axes) == 1 and array.origin == "kernel" and expected.kind != "exchange":
            ranks = self.sizes[expected.axes[0]]
            is_shard = elements <= expected.elements // ranks
            if is_shard and (expected.scattered == expected.axes or expected.kind == "gather"):
                return Fraction(elements * ranks, expected.elements * (ranks - 1))
            return Fraction(0)
        if kind not in _LOWERINGS[expected.kind] or (expected.kind == "exchange" and axes != set(expected.axes)):
            return Fraction(0)
        if kind == "reduce-scatter" and (expected.may_all_reduce == "always" or not axes <= set(expected.scattered)):
            return Fraction(0)
        if kind == "all-reduce" and axes & set(expected.scattered) and not expected.may_all_reduce:
            return Fraction(0)
        if expected.multiple:
            return Fraction(elements % expected.elements == 0)
        # XLA may communicate axis by axis, so the array may still be sharded over some of the axes.
        sharded = {"sum": expected.scattered, "gather": expected.axes}.get(expected.kind, ())
        remaining = set(sharded) - axes
        subsets = itertools.chain.from_iterable(itertools.combinations(remaining, n) for n in range(len(remaining) + 1))
        shards = [expected.elements // math.prod(self.sizes[axis] for axis in subset) for subset in subsets]
        # A stack of shards may be as large as an unsharded layer.
        return Fraction(stack if elements in (shard * stack for shard in shards) else elements in shards)

    def in_layers(self, array: Collective, stack: int) -> bool:
        """Return whether a collective runs once per layer in a loop over `stack` layers."""
        return sum(loop.trip_count == stack for loop in array.loops) > (self.micro_steps == stack)

    def has_layers(self, expected: ExpectedCollective) -> bool:
        """Return whether the program sends the expected arrays layer by layer, in a loop."""
        return any(self.num_provided(expected, a, 1) and self.in_layers(a, expected.stack) for a, _ in self.arrays)


@dataclasses.dataclass
class _Match:
    """An expected collective and the compiled arrays that were assigned to it."""

    expected: ExpectedCollective
    assigned: list[tuple[Collective, int, Fraction]] = dataclasses.field(default_factory=list)
    """(collective, number of assigned runs, number of expected arrays that these runs send)."""

    def num_assigned(self, axis: str) -> Fraction:
        return sum((num_arrays for array, _, num_arrays in self.assigned if axis in array.axes), Fraction(0))

    def num_missing(self, axes: Iterable[str]) -> int:
        return max(0, *(math.ceil(self.expected.count_over(axis)[0] - self.num_assigned(axis)) for axis in axes))


def _assign(expectations: Sequence[ExpectedCollective], pool: _Pool) -> list[_Match]:
    """Assign the arrays of the pool to expected collectives by solving an integer program.

    The variables are the number of runs that each group of arrays assigns to each matching expected collective, and
    the number of missing arrays of each expected collective along each of its axes.
    """
    matches, groups = [_Match(expected) for expected in expectations], pool.interchangeable()
    pairs = [
        (e, g, *fit)
        for g, group in enumerate(groups)
        for e, expected in enumerate(expectations)
        if (fit := pool.fit(expected, pool.arrays[group[0]][0]))[0]
    ]
    demands = [(e, axis) for e, expected in enumerate(expectations) for axis in expected.axes]
    if not pairs:
        return matches
    runs = np.array([sum(pool.arrays[index][1] for index in group) for group in groups], float)
    by_group, by_demand = np.zeros((len(groups), len(pairs))), np.zeros((len(demands), len(pairs)))
    cost = np.zeros(len(pairs))
    for p, (e, g, num_arrays, mismatch) in enumerate(pairs):
        array = pool.arrays[groups[g][0]][0]
        by_group[g, p] = 1
        # Kernel messages may stay unassigned.
        cost[p] = mismatch - (0.0 if array.origin == "kernel" else _UNASSIGNED_COST)
        for d, (owner, axis) in enumerate(demands):
            by_demand[d, p] = float(num_arrays) if owner == e and axis in array.axes else 0
    least, most = np.array([expectations[e].count_over(axis) for e, axis in demands], float).T
    missing = np.eye(len(demands))
    program = {
        "c": np.concatenate([cost, np.full(len(demands), _MISSING_COST)]),
        "integrality": np.concatenate([np.ones(len(pairs)), np.zeros(len(demands))]),
        "bounds": Bounds(0, np.concatenate([runs[[g for _, g, *_ in pairs]], np.full(len(demands), np.inf)])),
        "constraints": [
            LinearConstraint(np.hstack([by_group, np.zeros((len(groups), len(demands)))]), -np.inf, runs),
            LinearConstraint(np.hstack([by_demand, np.zeros_like(missing)]), -np.inf, most + 1e-6),
            LinearConstraint(np.hstack([by_demand, missing]), least - 1e-6, np.inf),
        ],
    }
    # The program is always feasible (assign nothing), but HiGHS sometimes fails after its presolve.
    solutions = (milp(**program, options={"mip_rel_gap": 1e-9, "presolve": presolve}) for presolve in (True, False))
    solution = next(result.x for result in solutions if result.x is not None)
    solved_runs = np.rint(solution[: len(pairs)]).astype(int).tolist()
    for (e, g, num_arrays, _), remaining in zip(pairs, solved_runs, strict=True):
        for index in groups[g]:
            assigned = min(remaining, pool.arrays[index][1])
            if assigned:
                pool.arrays[index][1] -= assigned
                matches[e].assigned.append((pool.arrays[index][0], assigned, assigned * num_arrays))
                remaining -= assigned
    return matches


def match_collectives(
    expectations: Sequence[ExpectedCollective],
    collectives: Sequence[Collective],
    messages: Sequence[Message] = (),
    *,
    sizes: Mapping[str, int],
    micro_steps: int = 1,
    longest: int = 0,
    batch_axes: Collection[str] = (),
    unannotated_axes: Collection[str] = (),
    small_share: float = 0.0,
    scopes_above: int | None = None,
) -> MatchResult:
    """Compare a program's collectives with the expected collectives and the traced kernel messages.

    Args:
      expectations: from `expected.expected_collectives`.
      collectives: the program's census.
      messages: from `traced_collectives.messages`.
      sizes: the size of every mesh axis.
      micro_steps: the `accumulate` of the step. It distinguishes the loop over micro-steps from the loop over layers.
      longest: the longest dim of all parameters. Longer vectors that are summed over the batch are not bookkeeping.
      batch_axes: axes over which gradients are summed.
      unannotated_axes: axes over which the layout of activations is unknown; see `MatchResult.unannotated_axes`.
      small_share: fraction of all bytes that small arrays may send unexpectedly.
      scopes_above: scopes outside the model in module paths, for suggested path rules; see `expected.scopes_above`.
        None if the model's activations are annotated.
    """
    traced = _Traced(messages, sizes)
    arrays = [traced.with_origin(array, collective) for collective in collectives for array in per_array(collective)]
    # Start with the smallest arrays, because they match the fewest messages.
    from_kernels = sorted(
        (i for i, array in enumerate(arrays) if array.origin == "kernel"), key=lambda i: _elements(arrays[i])
    )
    traced_runs = {i: traced.take(arrays[i], arrays[i].count_per_step) for i in from_kernels}
    pool = _Pool([[a, traced_runs.get(i, a.count_per_step)] for i, a in enumerate(arrays)], dict(sizes), micro_steps)
    expectations = [e.as_stacked if e.as_stacked and pool.has_layers(e.as_stacked) else e for e in expectations]
    pool.stacks = frozenset(expected.stack for expected in expectations if expected.stack > 1)
    matches = _assign(expectations, pool)
    summed = {axis for expected in expectations if expected.role == GRADIENTS for axis in expected.axes}
    summed |= set(batch_axes)
    groups: dict[str, list[tuple[Collective, int]]] = {"small": [], "kernels": [], "unjudged": [], "unexpected": []}
    for i, (array, runs) in enumerate(pool.arrays):
        untraced = array.count_per_step - traced_runs.get(i, array.count_per_step)
        if _is_bookkeeping(array, longest, summed):
            groups["small"].append((array, runs + untraced))
            continue
        # If XLA moved a kernel's message, its op name is lost, so its origin is `partitioner`.
        kernel_runs = runs if i in traced_runs else traced.take(array, runs)
        groups["kernels"].append((array, kernel_runs))
        # Device groups that are not along mesh axes come from resharding, which may involve these axes.
        is_unknown = bool(set(array.axes) & set(unannotated_axes)) or not set(array.axes) <= sizes.keys()
        name = "unjudged" if unannotated_axes and is_unknown else "unexpected"
        groups[name].append((array, runs - kernel_runs + untraced))
    groups = {name: [(array, runs) for array, runs in items if runs] for name, items in groups.items()}
    small = [item for item in groups["unexpected"] if 4 * _elements(item[0]) <= MIN_SHARDED_BYTES]
    total_bytes = sum(array.bytes_sent_per_device * array.count_per_step for array in arrays)
    if sum(array.bytes_sent_per_device * runs for array, runs in small) <= small_share * total_bytes:
        groups["small"] += small
        groups["unexpected"] = [item for item in groups["unexpected"] if item not in small]
    return MatchResult(
        matched=_merge(entry for match in matches for entry in _matched(match, pool.sizes)),
        missing=_merge(entry for match in matches for entry in _missing(match, pool.sizes)),
        unexpected=_unexpected(groups["unexpected"], expectations, pool.sizes, scopes_above),
        kernels=_merge(_entry(f"kernel `{array.module or array.op_name}`", array, n) for array, n in groups["kernels"]),
        small=_merge(_entry("losses, metrics, norms, statistics", *item) for item in groups["small"]),
        unjudged=_merge(_entry("activations", *item) for item in groups["unjudged"]),
        unannotated_axes=tuple(axis for axis in sizes if axis in unannotated_axes),
    )


class _Traced:
    """Kernel messages of the traced step that have not been matched yet."""

    def __init__(self, messages: Sequence[Message], sizes: Mapping[str, int]) -> None:
        self._remaining: Counter[tuple[str, tuple[str, ...], int]] = Counter()
        self._sizes = sizes
        for message in messages:
            key = _reduction_or_kind(message.kind), message.axes, message.elements
            self._remaining[key] += message.count  # type: ignore[assignment]

    def with_origin(self, array: Collective, collective: Collective) -> Collective:
        """Return an array of a collective. If no message has its size, a combined array does not come from a kernel.

        XLA combines messages of kernels with messages of the partitioner, and may keep the name of a kernel for all.
        """
        key = _reduction_or_kind(array.kind), array.axes, _elements(array)
        if len(collective.parts) == 1 or array.origin != "kernel" or key in self._remaining:
            return array
        return dataclasses.replace(array, origin="partitioner")

    def take(self, array: Collective, runs: int) -> int:
        """Return how many of the `runs` of a collective match traced messages, and remove these messages.

        A compiled message may be a shard of the traced one, because XLA may shard it over axes that are not manual.
        """
        taken, elements = 0, _elements(array)
        max_shards = math.prod(size for axis, size in self._sizes.items() if axis not in array.axes)
        for key in sorted(self._remaining, key=lambda key: key[2]):
            kind, axes, traced = key
            is_shard = 0 < elements <= traced and traced % elements == 0 and max_shards % (traced // elements) == 0
            if is_shard and (kind, axes) == (_reduction_or_kind(array.kind), array.axes) and taken < runs:
                matched = int(min(runs - taken, self._remaining[key]))
                self._remaining[key] -= matched
                taken += matched
        return taken


def _reduction_or_kind(kind: str) -> str:
    return "sum" if kind in ("all-reduce", "reduce-scatter") else kind


def _elements(array: Collective) -> int:
    shards = array.group_size if array.kind == "all-gather" else 1
    return sum(shape.size for shape in array.arrays) * shards


def merge_stages(results: Sequence[MatchResult]) -> MatchResult:
    """Merge the results of pipeline stages: for each entry, keep the stage that sends the most bytes."""

    def merged(field: str) -> tuple[Any, ...]:
        largest: dict[Any, Any] = {}
        for entry in (entry for result in results for entry in getattr(result, field)):
            is_match = isinstance(entry, MatchEntry)
            names = (entry.role, entry.lowered_as) if is_match else (entry.tensor, entry.source)
            key = entry.kind, entry.axes, *names
            weight = (entry.bytes_sent_per_device, entry.count[1] if is_match else entry.count_per_step)
            if key not in largest or weight > largest[key][0]:
                largest[key] = weight, entry
        return tuple(entry for _, entry in largest.values())

    return MatchResult(**{field.name: merged(field.name) for field in dataclasses.fields(MatchResult)})


def _is_bookkeeping(array: Collective, longest: int, batch_axes: set[str]) -> bool:
    """Return whether an array has at most `SMALL` elements, or is a vector that is summed over the batch axes.

    Examples are losses, metrics, norms and batch statistics. Arrays of at most `longest` elements count as vectors.
    In the optimizer update, vectors may use any kind of collective.
    """
    if _elements(array) <= SMALL:
        return True
    is_vector = _elements(array) <= longest and set(array.axes) <= batch_axes
    return is_vector and (array.kind == "all-reduce" or array.module.partition("/")[0] == "update")


def _matched(match: _Match, sizes: Mapping[str, int]) -> Iterator[MatchEntry]:
    """Yield an entry for each kind and axes of the arrays that were assigned to an expected collective."""
    expected = match.expected
    by_form: dict[tuple[str, tuple[str, ...]], list[tuple[Collective, int, Fraction]]] = {}
    for item in match.assigned:
        by_form.setdefault((item[0].logical_kind, item[0].axes), []).append(item)
    kind_over = {axes: kind for kind, axes, _ in expected.forms(dict(sizes))}
    for (kind, axes), assigned in by_form.items():
        is_ring = kind == _RING
        expected_kind = (kind_over.get(axes) if is_ring else kind) or kind
        actual_bytes = sum(array.bytes_sent_per_device * runs for array, runs, _ in assigned)
        itemsize = ITEMSIZE.get(expected.dtype, 4)
        expected_bytes = actual_bytes if is_ring else sum(
            bytes_sent(kind, _elements(array) * itemsize, array.group_size) * runs for array, runs, _ in assigned
        )  # fmt: skip
        # A run that provides a stack of layers counts once per layer.
        num_arrays = sum(runs for _, runs, _ in assigned) if is_ring else int(sum(n for *_, n in assigned))
        counts = [expected.count_over(axis) for axis in axes]
        is_only_form = set(kind_over) == {axes} and len(by_form) == 1 and not is_ring
        # The scales of norms may be sent in another dtype.
        is_large = 4 * expected.elements >= MIN_SHARDED_BYTES
        yield MatchEntry(
            role=expected.role,
            kind=expected_kind,
            axes=axes,
            tensors=expected.tensors,
            count=(max(n for n, _ in counts), min(n for _, n in counts)) if is_only_form else (num_arrays, num_arrays),
            bytes_sent_per_device=expected_bytes,
            actual_count=num_arrays,
            actual_bytes=actual_bytes,
            dtype=expected.dtype,
            actual_dtypes=tuple(sorted({array.dtype for array, *_ in assigned} - {expected.dtype})) if is_large else (),
            lowered_as=", ".join(sorted({array.kind for array, *_ in assigned} - {expected_kind})),
        )


def _missing(match: _Match, sizes: Mapping[str, int]) -> Iterator[MatchEntry]:
    """Yield entries for the expected arrays that the program does not send, as the cheapest collectives for them."""
    expected = match.expected
    for kind, axes, elements in expected.forms(dict(sizes)):
        num_missing = match.num_missing(axes)
        if num_missing:
            most = max(expected.count_over(axis)[1] - int(match.num_assigned(axis)) for axis in axes)
            nbytes = elements * ITEMSIZE.get(expected.dtype, 4)
            sent = num_missing * bytes_sent(kind, nbytes, math.prod(sizes[axis] for axis in axes))
            yield MatchEntry(
                role=expected.role, kind=kind, axes=axes, tensors=expected.tensors, count=(num_missing, most),
                bytes_sent_per_device=sent, actual_count=0, actual_bytes=0.0, dtype=expected.dtype,
            )  # fmt: skip


def _entry(role: str, array: Collective, count: int) -> MatchEntry:
    sent = array.bytes_sent_per_device * count
    return MatchEntry(
        role=role, kind=array.logical_kind, axes=array.axes, tensors=(array.module,) if array.module else (),
        count=(count, count), bytes_sent_per_device=sent, actual_count=count, actual_bytes=sent,
    )  # fmt: skip


def _merge(entries: Iterable[MatchEntry]) -> tuple[MatchEntry, ...]:
    """Add up the entries of equal role, kind, axes and lowering."""
    merged: dict[tuple[str, str, tuple[str, ...], str], MatchEntry] = {}
    for entry in entries:
        key = (entry.role, entry.kind, entry.axes, entry.lowered_as)
        if key in merged:
            total = merged[key]
            entry = dataclasses.replace(
                total,
                tensors=tuple(dict.fromkeys(total.tensors + entry.tensors)),
                count=(total.count[0] + entry.count[0], total.count[1] + entry.count[1]),
                bytes_sent_per_device=total.bytes_sent_per_device + entry.bytes_sent_per_device,
                actual_count=total.actual_count + entry.actual_count,
                actual_bytes=total.actual_bytes + entry.actual_bytes,
                actual_dtypes=tuple(sorted({*total.actual_dtypes, *entry.actual_dtypes})),
            )
        merged[key] = entry
    return tuple(merged.values())


def _unexpected(
    arrays: Sequence[tuple[Collective, int]],
    expectations: Sequence[ExpectedCollective],
    sizes: dict[str, int],
    scopes_above: int | None,
) -> tuple[Unexpected, ...]:
    """Return the unexpected collectives, merged over layers, largest first."""
    by_layer: dict[tuple[Any, ...], list[tuple[Collective, int, str]]] = {}
    for array, count in arrays:
        param = _param_of_size(array, expectations, sizes)
        key = (array.logical_kind, array.axes, str(array.arrays[0]), layerless(param), layerless(array.module))
        by_layer.setdefault((*key, array.source), []).append((array, count, param))
    merged = []
    for layers in by_layer.values():
        array, _, param = layers[0]
        modules = sorted({array.module for array, *_ in layers})
        merged.append(
            Unexpected(
                kind=array.logical_kind,
                axes=array.axes,
                tensor=f"{array.arrays[0]}" + (f", the size of {param}" if param else ""),
                module=merge_layers(modules),
                source=array.source,
                operation=array.op_name.rpartition("/")[2],
                count_per_step=sum(count for _, count, _ in layers),
                bytes_sent_per_device=sum(array.bytes_sent_per_device * count for array, count, _ in layers),
                fix=_fix(array, bool(param), scopes_above),
                layers=len(modules),
            )
        )
    return tuple(sorted(merged, key=lambda entry: -entry.bytes_sent_per_device))


def _param_of_size(array: Collective, expectations: Sequence[ExpectedCollective], sizes: dict[str, int]) -> str:
    """Return the path of a parameter whose expected collective has this size and these axes, or an empty string."""
    for expected in expectations:
        if expected.role in (WEIGHTS, GRADIENTS, RENEWED):
            forms = {(axes, size * n) for _, axes, size in expected.forms(sizes) for n in (1, expected.stack)}
            if (array.axes, _elements(array)) in forms:
                in_module = [p for p in expected.tensors if p.split("/")[-2:-1] == array.module.split("/")[-1:]]
                return f"`{(in_module or expected.tensors)[0]}`"
    return ""


def _fix(array: Collective, is_param: bool, scopes_above: int | None) -> str:
    kind, axes = array.logical_kind, f"`{array.axes_label}`"
    if array.module.partition("/")[0] == "update":
        return (
            f"the optimizer needs full arrays over {axes}: use an elementwise optimizer (adamw, lion, sgd), or accept "
            "this cost and record it in a budget"
        )
    if kind == "all-gather" and is_param:
        return (
            f"a weight is gathered over {axes} more often than expected: use it inside the scan over layers, once per "
            "pass, and do not constrain it to another layout"
        )
    if kind == "all-gather":
        fix = (
            'constrain it after it is produced and before it is used, mp.constrain(x, "batch", "seq", "act_embed")'
            if scopes_above is None
            else f"add a rule for its module and for the module before it, {rule_for(array.module, scopes_above)}"
        )
        return f"an operation needs an activation replicated over {axes}: {fix}"
    if kind == "all-reduce" and is_param:
        return (
            f"a gradient is summed over {axes} once more, or is all-reduced instead of reduce-scattered: check that "
            "Strategy.grads has the same rule as the parameter, and that the loss is a mean over the batch"
        )
    if kind in ("all-reduce", "reduce-scatter"):
        fix = "constrain the operand" if scopes_above is None else rule_for(array.module, scopes_above)
        return (
            f"an operation contracts or reduces a dim sharded over {axes}: shard the other dim of the weight, "
            f"or {fix}; of two consecutive matmuls, make the first column-parallel and the second row-parallel"
        )
    if kind in ("all-to-all", "collective-permute"):
        return (
            f"the sharding over {axes} moves between dims or devices, because two consecutive constraints disagree, or "
            "a reshape or slice divides a sharded dim: keep the sharded dim outermost and do not divide it"
        )
    return f"the strategy does not require it over {axes}: look at the source line that produced it"
