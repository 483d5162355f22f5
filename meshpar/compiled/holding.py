"""Holding: the compiled program's collectives against what was promised, into kept, missing and surprise.

Every array of every collective is claimed by at most one promise: first by what must be there, then by what may. What
no promise claims is a number or a vector over the batch (losses, metrics, norms), a kernel's own, or a surprise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshpar.compiled.census import Collective, per_array
from meshpar.compiled.terms import Leg, Promised
from meshpar.parallel.part import MIN_SHARDED_BYTES

SMALL = 64
"""Arrays of up to so many numbers are bookkeeping: losses, metrics, norms."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One role of a promise, as it was found."""

    role: str
    kind: str
    axes: tuple[str, ...]
    tensors: tuple[str, ...]
    count: tuple[int, int]
    """Promised arrays a step, before the compiler combines them: fewest and most."""
    bytes_sent_per_device: float
    """Promised, per step; for a range of counts, at the count found."""
    found_count: int
    found_bytes: float
    dtype: str = ""
    """Promised on the wire."""
    found_dtypes: tuple[str, ...] = ()
    """Where big arrays came in another dtype: which."""
    spelled: str = ""
    """The kind that stands for it in the program, where that is another one."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        lists = {key: list(getattr(self, key)) for key in ("axes", "tensors", "count", "found_dtypes")}
        return dataclasses.asdict(self) | lists


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Surprise:
    """A collective that nothing promised."""

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
    """What usually mends it."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**dataclasses.asdict(self), "axes": list(self.axes)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What was promised, held against what was found."""

    kept: tuple[Line, ...]
    missing: tuple[Line, ...]
    surprise: tuple[Surprise, ...]
    written: tuple[Line, ...] = ()
    """Collectives of the user's own `shard_map` kernels: neither promised nor, where nothing is missing, a surprise."""
    small: tuple[Line, ...] = ()
    """Losses, metrics, norms."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {field.name: [one.to_json() for one in getattr(self, field.name)] for field in dataclasses.fields(self)}


# ---------------------------------------------------------------------------------------------------------------------
# What was found
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Pool:
    """Arrays of collectives that no promise has claimed yet."""

    left: list[tuple[Collective, int]]
    micro_steps: int
    stacks: frozenset[int]
    """Numbers of layers that are stacked."""

    def available(self, leg: Leg, stack: int) -> int:
        """How often a leg can be served."""
        return sum(count * worth for _, count, worth in self._fitting(leg, stack)) // leg.times

    def take(self, leg: Leg, stack: int, times: int) -> list[tuple[Collective, int]]:
        """Takes what serves a leg so many times; gives (array, runs taken)."""
        wanted, taken = times * leg.times, []
        for at, count, worth in self._fitting(leg, stack):
            runs = min(count, wanted // worth)
            if runs:
                one, _ = self.left[at]
                self.left[at] = (one, count - runs)
                taken.append((one, runs))
                wanted -= runs * worth
        return taken

    def _fitting(self, leg: Leg, stack: int) -> list[tuple[int, int, int]]:
        """(place, runs left, how many layers one run serves), the ones that fit nothing else first.

        Those are single layers in the loop over layers, then whole stacks; an array outside the loop that is as large
        as one layer may as well be the whole of something smaller.
        """
        found = []
        for at, (one, count) in enumerate(self.left):
            if (leg.forward and one.is_backward) or (leg.in_loop and not one.loops) or (leg.outside and one.loops):
                continue
            if (one.dtype == "s32") != (leg.dtype == "s32"):  # counts are no weights, however many
                continue
            if leg.of_leaf and stack == 1 and any(self._in_layers(one, layers) for layers in self.stacks):
                continue
            if count and (one.axes, _kind(one)) == (leg.axes, leg.kind):
                in_layers = self._in_layers(one, stack)
                if leg.serves > 1:
                    of_all = not one.loops and _elements(one) == leg.elements * stack
                    worth = leg.serves * stack * of_all
                else:
                    worth = _worth(leg, _elements(one), 1 if in_layers else stack)
                if worth:
                    unlike = worth == 1 < stack and not in_layers, one.dtype != leg.dtype
                    found.append((unlike, worth, at, count))
        return [(at, count, worth) for _, worth, at, count in sorted(found)]

    def has_layers(self, promise: Promised) -> bool:
        """Whether a loop over layers sends what is promised of each."""
        wanted = {(leg.axes, leg.kind, leg.elements) for spelling in promise.spellings for leg in spelling}
        return any(
            (one.axes, _kind(one), _elements(one)) in wanted and self._in_layers(one, promise.stack)
            for one, _ in self.left
        )

    def _in_layers(self, one: Collective, stack: int) -> bool:
        """Whether it runs in the loop over layers, and so serves one of them."""
        loops = sum(loop.trip_count == stack for loop in one.loops)
        return loops > (self.micro_steps == stack)


def _worth(leg: Leg, elements: int, stack: int) -> int:
    if leg.multiple:
        return int(elements % leg.elements == 0)
    if elements == leg.elements:
        return 1
    return stack if elements == leg.elements * stack else 0


def _elements(one: Collective) -> int:
    ways = one.group_size if one.kind == "all-gather" else 1
    return sum(array.size for array in one.arrays) * ways


def _kind(one: Collective) -> str:
    return one.logical_kind


def hold(
    promises: Sequence[Promised],
    collectives: Sequence[Collective],
    *,
    micro_steps: int = 1,
    closed: Collection[str] = (),
) -> Promise:
    """Holds a program's collectives to what was promised.

    Args:
      promises: from `promised`.
      collectives: the program's census.
      micro_steps: the step's `accumulate`, to tell the loop over them from the one over layers.
      closed: axes over which no kernel of the user's may send anything, as stages are.
    """
    parts = [(part, part.count_per_step) for one in collectives for part in per_array(one)]
    pool = _Pool(parts, micro_steps, frozenset())
    promises = [one.stacked if one.stacked is not None and pool.has_layers(one.stacked) else one for one in promises]
    pool.stacks = frozenset(one.stack for one in promises if one.stack > 1)
    # Those that only one pass may serve choose first, then the largest, then those that can be kept in fewest ways.
    ordered = sorted(
        promises,
        key=lambda one: (
            not one.spellings[0][0].forward,
            -max(leg.elements for leg in one.spellings[0]),
            len(one.spellings),
        ),
    )
    claims: dict[int, list[tuple[Leg, int, list[tuple[Collective, int]]]]] = {id(one): [] for one in ordered}
    served = dict.fromkeys(claims, 0)
    # First what must be there, then what may: a promise with a range must not take what another one needs.
    for bound in (0, 1):
        for one in ordered:
            for spelling in one.spellings:
                times = one.count[1 if spelling[0].forward else bound] - served[id(one)]
                times = min([times, *(pool.available(leg, one.stack) for leg in spelling)])
                if times > 0:
                    claims[id(one)] += [(leg, times, pool.take(leg, one.stack, times)) for leg in spelling]
                    served[id(one)] += times
    lines = [line for one in promises for line in _lines(one, served[id(one)], claims[id(one)])]
    left = [(one, count) for one, count in pool.left if count]
    small = [item for item in left if _is_bookkeeping(item[0], promises)]
    others = [item for item in left if not _is_bookkeeping(item[0], promises)]
    broken = _broken(promises, served) | set(closed)
    written = [
        (one, count)
        for one, count in others
        if one.origin == "kernel"
        and not broken & set(one.axes)
        and not _is_repeated(one, promises)
        and not _is_exact(one, promises)
    ]
    surprising = [item for item in others if item not in written]
    return Promise(
        kept=_joined(line for line, is_kept in lines if is_kept),
        missing=_joined(line for line, is_kept in lines if not is_kept),
        surprise=_surprises(surprising, promises),
        written=_joined(_loose("written in a kernel", *item) for item in written),
        small=_joined(_loose("losses, metrics, norms, statistics", *item) for item in small),
    )


def most_of(promises: Sequence[Promise]) -> Promise:
    """What several stages sent, each line as on the stage that sends most of it."""

    def most(name: str) -> tuple[Any, ...]:
        found: dict[Any, Any] = {}
        for one in (one for promise in promises for one in getattr(promise, name)):
            is_line = isinstance(one, Line)
            key = (one.kind, one.axes, *((one.role, one.spelled) if is_line else (one.tensor, one.source)))
            weight = (one.bytes_sent_per_device, one.count[1] if is_line else one.count_per_step)
            if key not in found or weight > found[key][0]:
                found[key] = weight, one
        return tuple(one for _, one in found.values())

    return Promise(**{field.name: most(field.name) for field in dataclasses.fields(Promise)})


def _broken(promises: Sequence[Promised], served: Mapping[int, int]) -> set[str]:
    """Axes over which something promised is not sent: what a kernel sends there instead is a surprise."""
    missing = (one for one in promises if served[id(one)] < one.count[0])
    return {axis for one in missing for leg in one.spellings[0] for axis in leg.axes}


def _is_repeated(one: Collective, promises: Sequence[Promised]) -> bool:
    """Whether it sums in a loop what is promised once, outside of every loop: a gradient, or one part's share of it."""
    legs = [leg for promise in promises for spelling in promise.spellings for leg in spelling if leg.outside]
    vector = max((promise.vector for promise in promises), default=0)
    is_sum = one.kind in ("all-reduce", "reduce-scatter") and _elements(one) > vector
    return (
        is_sum
        and bool(one.loops)
        and any(set(one.axes) == set(leg.axes) and leg.elements % _elements(one) == 0 for leg in legs)
    )


def _is_exact(one: Collective, promises: Sequence[Promised]) -> bool:
    """Whether it stands where all that is sent was promised: in such a layer, or beside its like over the same axes."""
    exact = [promise for promise in promises if promise.scope]
    sent = {(leg.kind, leg.axes) for promise in exact for spelling in promise.spellings for leg in spelling}
    return (one.kind, one.axes) in sent or bool({promise.scope for promise in exact} & set(one.module.split("/")))


def _is_bookkeeping(one: Collective, promises: Sequence[Promised]) -> bool:
    """Whether it is a number, or a vector over the batch: losses, metrics, norms, statistics of a batch.

    A vector is no longer than the longest dim of a parameter. An optimizer may move vectors of its own in any way.
    """
    if _elements(one) <= SMALL:
        return True
    gradients = [promise for promise in promises if promise.role == "gradients"]
    axes = {axis for promise in gradients for spelling in promise.spellings for leg in spelling for axis in leg.axes}
    is_vector = _elements(one) <= max((promise.vector for promise in gradients), default=0)
    of_optimizer = one.module.partition("/")[0] == "update"
    return is_vector and set(one.axes) <= axes and (one.kind == "all-reduce" or of_optimizer)


def _lines(
    one: Promised, served: int, claims: Sequence[tuple[Leg, int, list[tuple[Collective, int]]]]
) -> Iterator[tuple[Line, bool]]:
    """The lines of one promise, each with whether it was kept."""
    least, most = one.count
    if served >= least and most:
        for leg, times, taken in claims:
            count = (times, times) if times != served else (max(least, times), most) if least != most else (times,) * 2
            yield _line(one, leg, (count[0], count[1]), times, taken), True
        return
    for leg, times, taken in claims:
        yield _line(one, leg, (times, times), times, taken), True
    for leg in one.spellings[0] if served < least else ():
        yield _line(one, leg, (least - served, most - served), least - served, []), False


def _line(one: Promised, leg: Leg, count: tuple[int, int], times: int, taken: Sequence[tuple[Collective, int]]) -> Line:
    meant = one.spellings[0]
    same = leg if leg in meant else next((other for other in meant if other.axes == leg.axes), meant[0])
    real = {part.kind for part, _ in taken} - {same.kind}
    # A collective of unknown size is promised at the size that was found.
    found = sum(part.bytes_sent_per_device * runs for part, runs in taken)
    promised_bytes = found if leg.multiple else times * leg.times * leg.bytes_sent_per_device
    return Line(
        role=one.role,
        kind=same.kind if len(meant) == 1 or leg in meant else leg.kind,
        axes=leg.axes,
        tensors=one.tensors,
        count=(count[0] * leg.times, count[1] * leg.times),
        bytes_sent_per_device=promised_bytes,
        # A run that serves a whole stack of layers counts for each of them.
        found_count=times * leg.times if taken else 0,
        found_bytes=found,
        dtype=leg.dtype,
        found_dtypes=tuple(sorted({part.dtype for part, _ in taken if _is_other_dtype(part, leg)})),
        spelled=", ".join(sorted(real)),
    )


def _is_other_dtype(part: Collective, leg: Leg) -> bool:
    """Whether a big array travels in another dtype than promised; norm scales may."""
    return part.dtype != leg.dtype and 4 * leg.elements >= MIN_SHARDED_BYTES


def _loose(role: str, one: Collective, count: int) -> Line:
    sent = one.bytes_sent_per_device * count
    return Line(
        role=role, kind=_kind(one), axes=one.axes, tensors=(one.module,) if one.module else (), count=(count, count),
        bytes_sent_per_device=sent, found_count=count, found_bytes=sent,
    )  # fmt: skip


def _joined(lines: Iterable[Line]) -> tuple[Line, ...]:
    """One line a role, kind and axes."""
    joined: dict[tuple[str, str, tuple[str, ...], str], Line] = {}
    for line in lines:
        key = (line.role, line.kind, line.axes, line.spelled)
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


# ---------------------------------------------------------------------------------------------------------------------
# Surprises
# ---------------------------------------------------------------------------------------------------------------------


def _surprises(left: Sequence[tuple[Collective, int]], promises: Sequence[Promised]) -> tuple[Surprise, ...]:
    joined: dict[tuple[Any, ...], Surprise] = {}
    for one, count in left:
        weight = _weight_of(one, promises)
        surprise = Surprise(
            kind=_kind(one),
            axes=one.axes,
            tensor=f"{one.arrays[0]}" + (f", as large as {weight}" if weight else ""),
            module=one.module,
            source=one.source,
            operation=one.op_name.rpartition("/")[2],
            count_per_step=count,
            bytes_sent_per_device=one.bytes_sent_per_device * count,
            fix=_fix(one, weight),
        )
        key = (surprise.kind, surprise.axes, surprise.tensor, surprise.module, surprise.source)
        if key in joined:
            so_far = joined[key]
            surprise = dataclasses.replace(
                so_far,
                count_per_step=so_far.count_per_step + surprise.count_per_step,
                bytes_sent_per_device=so_far.bytes_sent_per_device + surprise.bytes_sent_per_device,
            )
        joined[key] = surprise
    return tuple(sorted(joined.values(), key=lambda one: -one.bytes_sent_per_device))


def _weight_of(one: Collective, promises: Sequence[Promised]) -> str:
    """A parameter of the size that travels, if some promise names one."""
    for promise in promises:
        if promise.role in ("weights before use", "gradients", "new parameters"):
            for leg in (leg for spelling in promise.spellings for leg in spelling):
                if leg.axes == one.axes and _elements(one) in (leg.elements, leg.elements * promise.stack):
                    near = [path for path in promise.tensors if path.split("/")[-2:-1] == one.module.split("/")[-1:]]
                    return f"`{(near or promise.tensors)[0]}`"
    return ""


def _fix(one: Collective, weight: str) -> str:
    kind, where = _kind(one), f"`{one.axes_label}`"
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
        return (
            f"an activation is needed whole over {where}: name its dims where it is made and where it is used, "
            'mp.constrain(x, "batch", "seq", "act_embed"), so that no operation asks for another layout'
        )
    if kind == "all-reduce" and weight:
        return (
            f"a gradient is summed over {where} once more, or whole where it should be scattered: see that its rule in "
            "Strategy.grads is the parameter's, and that the loss is a mean over the batch"
        )
    if kind in ("all-reduce", "reduce-scatter"):
        return (
            f"an operation contracts or reduces a dim that is split over {where}: split the other dim of the weight, "
            "or constrain the operand first; of two matmuls in a row the first is column-, the second row-parallel"
        )
    if kind in ("all-to-all", "collective-permute"):
        return (
            f"the split over {where} moves from one dim, or from one device, to another: two constraints in a row "
            "disagree, or a reshape or slice cuts through a split dim; keep the split dim whole and outermost"
        )
    return f"nothing in the strategy asks for it over {where}: look at the line that made it"
