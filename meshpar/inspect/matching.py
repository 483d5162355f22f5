"""Holding: the compiled program's collectives against what was promised and traced: kept, missing, unexpected.

Every array of every collective is claimed by at most one promise, by its kind, axes and size, so that as few as can be
are lacking, and then as few as can be are left. What no promise claims is a number or a vector over the batch (losses,
metrics, norms), a kernel's message as the traced step has it, or unexpected.

A promise is held over each of its axes: so many arrays, and of each the bytes of the cheapest form that XLA may lower
it to, or at most those of the dearest it allows (`parallel.promise`).
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
from meshpar.inspect.source_scopes import layerless, of_layers, rule_for
from meshpar.inspect.traced_collectives import Message
from meshpar.parallel.expected.step_spec import GRADIENTS, ITEMSIZE, RENEWED, WEIGHTS, ExpectedCollective
from meshpar.parallel.parallelism import MIN_SHARDED_BYTES
from meshpar.sharding.printing import Plain

SMALL = 64
"""Arrays of up to so many numbers are bookkeeping: losses, metrics, norms."""
SMALL_SHARE = 0.01
"""Of the bytes a program sends. Where nothing lays activations out, XLA splits small ones as it likes: so much, in
arrays of up to `MIN_SHARDED_BYTES` each, is not unexpected."""
_RING = "collective-permute"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatchEntry(Plain):
    """One role of a promise, as it was found."""

    role: str
    kind: str
    axes: tuple[str, ...]
    tensors: tuple[str, ...]
    count: tuple[int, int]
    """Promised arrays a step, before the compiler combines them: fewest and most. Of a kernel: none, and as traced."""
    bytes_sent_per_device: float
    """Promised, per step; for a range of counts, at the count found."""
    found_count: int
    found_bytes: float
    dtype: str = ""
    """Promised on the wire."""
    found_dtypes: tuple[str, ...] = ()
    """Where big arrays came in another dtype: which."""
    lowered_as: str = ""
    """The kind that stands for it in the program, where that is another one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unexpected(Plain):
    """A collective that nothing promised, and no kernel of the traced step asks for."""

    kind: str
    axes: tuple[str, ...]
    tensor: str
    """What travels: its shape on one device, and what it is as far as can be told."""
    module: str
    source: str
    operation: str
    """The primitive it was made for."""
    count_per_step: int
    bytes_sent_per_device: float
    """Per step."""
    fix: str
    """The suggested fix."""
    layers: int = 1
    """Of which it was found alike; their number is a star in `module`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Promise(Plain):
    """What was promised, held against what was found."""

    kept: tuple[MatchEntry, ...]
    missing: tuple[MatchEntry, ...]
    unexpected: tuple[Unexpected, ...]
    kernels: tuple[MatchEntry, ...] = ()
    """Messages of `shard_map` kernels, ours and the user's: as many as the traced step asks for, at the most."""
    small: tuple[MatchEntry, ...] = ()
    """Losses, metrics, norms."""
    untold: tuple[MatchEntry, ...] = ()
    """Over axes that path rules split parameters without names by: nothing says what activations send over these."""
    unannotated_axes: tuple[str, ...] = ()


# ---- What was found --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Pool:
    """Arrays of collectives that promises may claim."""

    left: list[list[Any]]
    """[collective, runs a step]."""
    sizes: dict[str, int]
    micro_steps: int
    stacks: frozenset[int] = frozenset()
    """Numbers of layers that are stacked."""

    def alike(self) -> list[list[int]]:
        """Places of arrays that serve the same promises, together."""
        groups: dict[Any, list[int]] = {}
        for at, (one, runs) in enumerate(self.left):
            trips = tuple(loop.trip_count for loop in one.loops)
            same = (one.logical_kind, one.axes, _elements(one), one.dtype, trips, one.is_backward, one.origin)
            if runs:
                groups.setdefault(same, []).append(at)
        return list(groups.values())

    def fit(self, one: ExpectedCollective, collective: Collective) -> tuple[Fraction, float]:
        """(how many arrays of a promise one run serves, how unlike what is promised it is); 0: it does not fit."""
        if (one.forward and collective.is_backward) or (one.outside and collective.loops):
            return Fraction(0), 0.0
        is_int_number = collective.dtype.startswith(("s", "u", "pred"))
        if is_int_number != one.dtype.startswith("s") or not set(collective.axes) <= set(one.axes):
            return Fraction(0), 0.0  # counts, and what is quantized, are no weights
        if one.of_leaf and one.stack == 1 and any(self.in_layers(collective, layers) for layers in self.stacks):
            return Fraction(0), 0.0
        in_layers = self.in_layers(collective, one.stack)
        worth = self._worth(one, collective, 1 if in_layers else one.stack)
        # An array outside the loop that is as large as one layer may as well be the whole of something smaller.
        unlike = 0.4 * (worth == 1 < one.stack and not in_layers) + 0.2 * (collective.logical_kind == _RING)
        return worth, unlike + 0.3 * (collective.dtype != one.dtype) + 0.1 * (len(one.axes) - len(collective.axes))

    def _worth(self, one: ExpectedCollective, collective: Collective, stack: int) -> Fraction:
        kind, axes, elements = collective.logical_kind, set(collective.axes), _elements(collective)
        if kind == _RING and len(one.axes) == 1 and collective.origin == "kernel" and one.kind != "exchange":
            ranks = self.sizes[one.axes[0]]
            is_part = elements <= one.elements // ranks and (one.scattered == one.axes or one.kind == "gather")
            return Fraction(elements * ranks, one.elements * (ranks - 1)) if is_part else Fraction(0)
        if kind not in _ALLOWED[one.kind] or (one.kind == "exchange" and axes != set(one.axes)):
            return Fraction(0)
        if kind == "reduce-scatter" and (one.whole == "only" or not axes <= set(one.scattered)):
            return Fraction(0)
        if kind == "all-reduce" and axes & set(one.scattered) and not one.whole:
            return Fraction(0)
        if one.multiple:
            return Fraction(elements % one.elements == 0)
        later = set(one.scattered if one.kind == "sum" else one.axes if one.kind == "gather" else ()) - axes
        subsets = itertools.chain.from_iterable(itertools.combinations(later, n) for n in range(len(later) + 1))
        parts = [one.elements // math.prod(self.sizes[axis] for axis in subset) for subset in subsets]
        # A whole stack of parts may be as large as one layer whole.
        return Fraction(stack if elements in (part * stack for part in parts) else elements in parts)

    def in_layers(self, one: Collective, stack: int) -> bool:
        """Whether it runs in the loop over layers, and so serves one of them."""
        loops = sum(loop.trip_count == stack for loop in one.loops)
        return loops > (self.micro_steps == stack)

    def has_layers(self, one: ExpectedCollective) -> bool:
        """Whether a loop over layers sends what is promised of each."""
        return any(
            self._worth(one, collective, 1) and self.in_layers(collective, one.stack) for collective, _ in self.left
        )


_ALLOWED = {"gather": ("all-gather",), "sum": ("all-reduce", "reduce-scatter"), "exchange": ("all-to-all",)}


@dataclasses.dataclass
class _Claim:
    """A promise, and what it has been given."""

    one: ExpectedCollective
    taken: list[tuple[Collective, int, Fraction]] = dataclasses.field(default_factory=list)
    """(collective, runs, arrays)."""

    def served(self, axis: str) -> Fraction:
        """Arrays over one of its axes."""
        return sum((arrays for one, _, arrays in self.taken if axis in one.axes), Fraction(0))

    def lacking(self, axes: Iterable[str]) -> int:
        """Arrays that are due over some of its axes and were not found."""
        return max(0, *(math.ceil(self.one.count_over(axis)[0] - self.served(axis)) for axis in axes))


_LACKING, _LEFT = 1000.0, 10.0
"""What an array costs that is due and not found, and one that is found and not claimed, over one that is unlike."""


def _claimed(promises: Sequence[ExpectedCollective], pool: _Pool) -> list[_Claim]:
    """The pool's arrays shared out among promises, so that fewest are lacking, then fewest left: an integer program."""
    claims, groups = [_Claim(one) for one in promises], pool.alike()
    fits = [
        (c, g, *found)
        for g, group in enumerate(groups)
        for c, one in enumerate(promises)
        if (found := pool.fit(one, pool.left[group[0]][0]))[0]
    ]
    due = [(c, axis) for c, one in enumerate(promises) for axis in one.axes]
    if not fits:
        return claims
    runs = [sum(pool.left[at][1] for at in group) for group in groups]
    by_group, by_axis = np.zeros((len(groups), len(fits))), np.zeros((len(due), len(fits)))
    cost = np.zeros(len(fits))
    for k, (c, g, worth, unlike) in enumerate(fits):
        collective = pool.left[groups[g][0]][0]
        by_group[g, k] = 1
        # What a kernel was traced to send may stay its own.
        cost[k] = unlike - (0.0 if collective.origin == "kernel" else _LEFT)
        for d, (owner, axis) in enumerate(due):
            by_axis[d, k] = float(worth) if owner == c and axis in collective.axes else 0
    least, most = (np.array([promises[c].count_over(axis)[bound] for c, axis in due], float) for bound in (0, 1))
    lacking = np.eye(len(due))
    problem = {
        "c": np.concatenate([cost, np.full(len(due), _LACKING)]),
        "integrality": np.concatenate([np.ones(len(fits)), np.zeros(len(due))]),
        "bounds": Bounds(
            0, np.concatenate([np.array([runs[g] for _, g, *_ in fits], float), np.full(len(due), np.inf)])
        ),
        "constraints": [
            LinearConstraint(np.hstack([by_group, np.zeros((len(groups), len(due)))]), -np.inf, np.array(runs, float)),
            LinearConstraint(np.hstack([by_axis, np.zeros_like(lacking)]), -np.inf, most + 1e-6),
            LinearConstraint(np.hstack([by_axis, lacking]), least - 1e-6, np.inf),
        ],
    }
    # To take nothing is always allowed; HiGHS fails at times on what its presolve leaves, and not without.
    tries = (milp(**problem, options={"mip_rel_gap": 1e-9, "presolve": presolve}) for presolve in (True, False))
    found = next(one for one in tries if one.x is not None)
    for (c, g, worth, _), taken in zip(fits, np.rint(found.x[: len(fits)]).astype(int).tolist(), strict=True):
        for at in groups[g]:
            here = min(taken, pool.left[at][1])
            if here:
                pool.left[at][1] -= here
                claims[c].taken.append((pool.left[at][0], here, here * worth))
                taken -= here
    return claims


def match_collectives(
    promises: Sequence[ExpectedCollective],
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
) -> Promise:
    """Holds a program's collectives to what was promised, and to what its kernels were traced to send.

    Args:
      promises: from `promised`.
      collectives: the program's census.
      messages: from `traced.messages`.
      sizes: of every mesh axis.
      micro_steps: the step's `accumulate`, to tell the loop over them from the one over layers.
      longest: the longest dim of a parameter; what is summed over the batch and no longer is bookkeeping.
      batch_axes: over which gradients are summed.
      unannotated_axes: of which no promise is made.
      small_share: of all bytes, that small arrays may send unexpectedly.
      scopes_above: for advice by paths of modules, as `promise.scopes_above` says.
    """
    found, traced = [part for one in collectives for part in per_array(one)], _Traced(messages, sizes)
    is_kernels = [one.origin == "kernel" for one in found]
    # The smallest first: those that XLA split have the fewest to choose from.
    smallest = sorted((at for at, is_one in enumerate(is_kernels) if is_one), key=lambda at: _elements(found[at]))
    served = {at: traced.serve(found[at], found[at].count_per_step) for at in smallest}
    pool = _Pool([[one, served.get(at, one.count_per_step)] for at, one in enumerate(found)], dict(sizes), micro_steps)
    promises = [one.stacked if one.stacked is not None and pool.has_layers(one.stacked) else one for one in promises]
    pool.stacks = frozenset(one.stack for one in promises if one.stack > 1)
    claims = _claimed(promises, pool)
    summed = {axis for one in promises if one.role == GRADIENTS for axis in one.axes} | set(batch_axes)
    by_kind: dict[str, list[tuple[Collective, int]]] = {"small": [], "kernels": [], "untold": [], "unexpected": []}
    for at, (one, runs) in enumerate(pool.left):
        beyond = one.count_per_step - served.get(at, one.count_per_step)
        if _is_bookkeeping(one, longest, summed):
            by_kind["small"].append((one, runs + beyond))
            continue
        # XLA may move a kernel's message, by which it loses its name.
        moved = runs if is_kernels[at] else traced.serve(one, runs)
        by_kind["kernels"].append((one, moved))
        # Axes of no one shape come from moves between layouts, some of which are over these axes.
        is_untold = bool(unannotated_axes) and (
            set(one.axes) & set(unannotated_axes) or not set(one.axes) <= sizes.keys()
        )
        by_kind["untold" if is_untold else "unexpected"].append((one, runs - moved + beyond))
    by_kind = {name: [(one, runs) for one, runs in items if runs] for name, items in by_kind.items()}
    _set_apart(by_kind, small_share * sum(one.bytes_sent_per_device * one.count_per_step for one in found))
    return Promise(
        kept=_joined(line for claim in claims for line in _kept(claim, pool.sizes)),
        missing=_joined(line for claim in claims for line in _missing(claim, pool.sizes)),
        unexpected=_unexpected(by_kind["unexpected"], promises, pool.sizes, scopes_above),
        kernels=_joined(_loose(f"kernel `{one.module or one.op_name}`", one, runs) for one, runs in by_kind["kernels"]),
        small=_joined(_loose("losses, metrics, norms, statistics", *item) for item in by_kind["small"]),
        untold=_joined(_loose("activations", *item) for item in by_kind["untold"]),
        unannotated_axes=tuple(axis for axis in sizes if axis in unannotated_axes),
    )


def _set_apart(by_kind: dict[str, list[tuple[Collective, int]]], most: float) -> None:
    """Counts small arrays as bookkeeping that are unexpected, where all of them together are so few bytes."""
    is_small = [4 * _elements(one) <= MIN_SHARDED_BYTES for one, _ in by_kind["unexpected"]]
    small = [item for item, chosen in zip(by_kind["unexpected"], is_small, strict=True) if chosen]
    if sum(one.bytes_sent_per_device * runs for one, runs in small) <= most:
        by_kind["small"] += small
        by_kind["unexpected"] = [item for item in by_kind["unexpected"] if item not in small]


class _Traced:
    """The messages of kernels that the traced step asks for, and how many of them have been found."""

    def __init__(self, messages: Sequence[Message], sizes: Mapping[str, int]) -> None:
        self._left: Counter[tuple[str, tuple[str, ...], int]] = Counter()
        self._sizes = sizes
        for message in messages:
            self._left[_class(message.kind), message.axes, message.elements] += message.count  # type: ignore[assignment]

    def serve(self, one: Collective, runs: int) -> int:
        """How many runs of a collective are some kernel's, which are then taken.

        Axes that a kernel leaves to XLA may split what it sends: then so many times less is sent.
        """
        served, whole = 0, _elements(one)
        ways = math.prod(size for axis, size in self._sizes.items() if axis not in one.axes)
        for kind, axes, elements in sorted(self._left, key=lambda key: key[2]):
            fits = 0 < whole <= elements and elements % whole == 0 and ways % (elements // whole) == 0
            if fits and (kind, axes) == (_class(one.kind), one.axes) and served < runs:
                here = int(min(runs - served, self._left[kind, axes, elements]))
                self._left[kind, axes, elements] -= here
                served += here
        return served


def _class(kind: str) -> str:
    return "sum" if kind in ("all-reduce", "reduce-scatter") else kind


def _elements(one: Collective) -> int:
    ways = one.group_size if one.kind == "all-gather" else 1
    return sum(array.size for array in one.arrays) * ways


def most_of(promises: Sequence[Promise]) -> Promise:
    """What several stages sent, each line as on the stage that sends most of it."""

    def most(name: str) -> tuple[Any, ...]:
        found: dict[Any, Any] = {}
        for one in (one for promise in promises for one in getattr(promise, name)):
            is_line = isinstance(one, MatchEntry)
            key = (one.kind, one.axes, *((one.role, one.lowered_as) if is_line else (one.tensor, one.source)))
            weight = (one.bytes_sent_per_device, one.count[1] if is_line else one.count_per_step)
            if key not in found or weight > found[key][0]:
                found[key] = weight, one
        return tuple(one for _, one in found.values())

    return Promise(**{field.name: most(field.name) for field in dataclasses.fields(Promise)})


def _is_bookkeeping(one: Collective, longest: int, batch_axes: set[str]) -> bool:
    """Whether it is a number, or a vector over the batch: losses, metrics, norms, statistics of a batch.

    A vector is no longer than the longest dim of a parameter. An optimizer may move vectors of its own in any way.
    """
    if _elements(one) <= SMALL:
        return True
    of_optimizer = one.module.partition("/")[0] == "update"
    is_vector = _elements(one) <= longest and set(one.axes) <= batch_axes
    return is_vector and (one.kind == "all-reduce" or of_optimizer)


def _kept(claim: _Claim, sizes: Mapping[str, int]) -> Iterator[MatchEntry]:
    """What was found of a promise, by kind and axes."""
    one = claim.one
    by_form: dict[tuple[str, tuple[str, ...]], list[tuple[Collective, int, Fraction]]] = {}
    for item in claim.taken:
        by_form.setdefault((item[0].logical_kind, item[0].axes), []).append(item)
    replicated_on_purpose = {axes: kind for kind, axes, _ in one.forms(dict(sizes))}
    for (kind, axes), taken in by_form.items():
        count = sum(arrays for *_, arrays in taken)
        as_meant = replicated_on_purpose.get(axes) if kind == _RING else kind
        found = sum(part.bytes_sent_per_device * runs for part, runs, _ in taken)
        promised_bytes = found if kind == _RING else sum(
            bytes_sent(kind, _elements(part) * ITEMSIZE.get(one.dtype, 4), part.group_size) * runs
            for part, runs, _ in taken
        )  # fmt: skip
        arrays = sum(runs for _, runs, _ in taken) if kind == _RING else int(count)
        ways = [one.count_over(axis) for axis in axes]
        least, most = max(low for low, _ in ways), min(high for _, high in ways)
        is_big = 4 * one.elements >= MIN_SHARDED_BYTES
        is_all = set(replicated_on_purpose) == {axes} and len(by_form) == 1 and kind != _RING
        yield MatchEntry(
            role=one.role,
            kind=as_meant or kind,
            axes=axes,
            tensors=one.tensors,
            count=(least, most) if is_all else (arrays, arrays),
            bytes_sent_per_device=promised_bytes,
            # A run that serves a whole stack of layers counts for each of them.
            found_count=arrays,
            found_bytes=found,
            dtype=one.dtype,
            # Norm scales may travel in another dtype.
            found_dtypes=tuple(sorted({part.dtype for part, *_ in taken} - {one.dtype})) if is_big else (),
            lowered_as=", ".join(sorted({part.kind for part, *_ in taken} - {as_meant or kind})),
        )


def _missing(claim: _Claim, sizes: Mapping[str, int]) -> Iterator[MatchEntry]:
    """What is due of a promise and was not found, in its cheapest form."""
    one = claim.one
    for kind, axes, elements in one.forms(dict(sizes)):
        lacking = claim.lacking(axes)
        if lacking:
            most = max(one.count_over(axis)[1] - int(claim.served(axis)) for axis in axes)
            nbytes = elements * ITEMSIZE.get(one.dtype, 4)
            sent = lacking * bytes_sent(kind, nbytes, math.prod(sizes[axis] for axis in axes))
            yield MatchEntry(
                role=one.role, kind=kind, axes=axes, tensors=one.tensors, count=(lacking, most),
                bytes_sent_per_device=sent, found_count=0, found_bytes=0.0, dtype=one.dtype,
            )  # fmt: skip


def _loose(role: str, one: Collective, count: int) -> MatchEntry:
    sent = one.bytes_sent_per_device * count
    return MatchEntry(
        role=role, kind=one.logical_kind, axes=one.axes, tensors=(one.module,) if one.module else (),
        count=(count, count), bytes_sent_per_device=sent, found_count=count, found_bytes=sent,
    )  # fmt: skip


def _joined(lines: Iterable[MatchEntry]) -> tuple[MatchEntry, ...]:
    """One line a role, kind and axes."""
    joined: dict[tuple[str, str, tuple[str, ...], str], MatchEntry] = {}
    for line in lines:
        key = (line.role, line.kind, line.axes, line.lowered_as)
        if key in joined:
            so_far = joined[key]
            line = dataclasses.replace(
                so_far,
                tensors=tuple(dict.fromkeys(so_far.tensors + line.tensors)),
                count=(so_far.count[0] + line.count[0], so_far.count[1] + line.count[1]),
                bytes_sent_per_device=so_far.bytes_sent_per_device + line.bytes_sent_per_device,
                found_count=so_far.found_count + line.found_count,
                found_bytes=so_far.found_bytes + line.found_bytes,
                found_dtypes=tuple(sorted({*so_far.found_dtypes, *line.found_dtypes})),
            )
        joined[key] = line
    return tuple(joined.values())


# ---- Unexpected collectives ------------------------------------------------------------------------------------------


def _unexpected(
    left: Sequence[tuple[Collective, int]],
    promises: Sequence[ExpectedCollective],
    sizes: Mapping[str, int],
    scopes_above: int | None,
) -> tuple[Unexpected, ...]:
    alike: dict[tuple[Any, ...], list[Unexpected]] = {}
    for one, count in left:
        weight = _weight_of(one, promises, dict(sizes))
        found = Unexpected(
            kind=one.logical_kind,
            axes=one.axes,
            tensor=f"{one.arrays[0]}" + (f", as large as {weight}" if weight else ""),
            module=one.module,
            source=one.source,
            operation=one.op_name.rpartition("/")[2],
            count_per_step=count,
            bytes_sent_per_device=one.bytes_sent_per_device * count,
            fix=_fix(one, weight, scopes_above),
        )
        key = (found.kind, found.axes, layerless(found.tensor), layerless(found.module), found.source)
        alike.setdefault(key, []).append(found)
    joined = []
    for some in alike.values():
        modules = {one.module for one in some}
        joined.append(
            dataclasses.replace(
                some[0],
                module=of_layers(sorted(modules)),
                count_per_step=sum(one.count_per_step for one in some),
                bytes_sent_per_device=sum(one.bytes_sent_per_device for one in some),
                layers=len(modules),
            )
        )
    return tuple(sorted(joined, key=lambda one: -one.bytes_sent_per_device))


def _weight_of(one: Collective, promises: Sequence[ExpectedCollective], sizes: dict[str, int]) -> str:
    """A parameter of the size that travels, if some promise names one."""
    for promise in promises:
        if promise.role in (WEIGHTS, GRADIENTS, RENEWED):
            sent = {(axes, size * times) for _, axes, size in promise.forms(sizes) for times in (1, promise.stack)}
            if (one.axes, _elements(one)) in sent:
                near = [path for path in promise.tensors if path.split("/")[-2:-1] == one.module.split("/")[-1:]]
                return f"`{(near or promise.tensors)[0]}`"
    return ""


def _fix(one: Collective, weight: str, scopes_above: int | None) -> str:
    kind, where = one.logical_kind, f"`{one.axes_label}`"
    if one.module.partition("/")[0] == "update":
        return (
            f"the optimizer works on whole arrays over {where} and not on shards: use one that works number by number "
            "(adamw, lion, sgd), or take it as the price of this one and keep a budget"
        )
    if kind == "all-gather" and weight:
        return (
            f"a weight is gathered over {where} more often than the strategy says: use it inside the scan over layers, "
            "once a pass, and do not constrain it to a layout of its own"
        )
    if kind == "all-gather":
        layout = (
            'name its dims where it is made and where it is used, mp.constrain(x, "batch", "seq", "act_embed")'
            if scopes_above is None
            else f"say by path how what its module and the one before give lies, {rule_for(one.module, scopes_above)}"
        )
        return (
            f"an activation is needed replicated over {where}: {layout}, so that no operation asks for another layout"
        )
    if kind == "all-reduce" and weight:
        return (
            f"a gradient is summed over {where} once more, or whole where it should be scattered: see that its rule in "
            "Strategy.grads is the parameter's, and that the loss is a mean over the batch"
        )
    if kind in ("all-reduce", "reduce-scatter"):
        return (
            f"an operation contracts or reduces a dim that is split over {where}: split the other dim of the weight, "
            "or "
            + ("constrain the operand first" if scopes_above is None else rule_for(one.module, scopes_above))
            + "; of two matmuls in a row the first is column-, the second row-parallel"
        )
    if kind in ("all-to-all", "collective-permute"):
        return (
            f"the split over {where} moves from one dim, or from one device, to another: two constraints in a row "
            "disagree, or a reshape or slice cuts through a split dim; keep the split dim whole and outermost"
        )
    return f"nothing in the strategy asks for it over {where}: look at the line that made it"
