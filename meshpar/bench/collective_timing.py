"""Collectives timed, in the shape of nccl-tests: sizes × algorithms × mesh axes, with XLA's own beside ours.

For each size all programs run in turn, round after round, and ratios are taken within a round. A program repeats its
collective in a loop, each time on the result of the time before, as often as makes the run long against its launch, and
what a run without the collective takes is subtracted. Values are checked once, against the reference.

Sizes are the payload n: of an all-gather the gathered array, of a reduce-scatter the array before scattering, of an
all-to-all what a device holds. SI units.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import collectives as kernels
from meshpar.bench.found import FITTED, XLA, CollectiveRow, Collectives
from meshpar.bench.link_fit import Fit, Point, fit_link
from meshpar.bench.timing import quartiles, seconds_of
from meshpar.collectives import reference
from meshpar.collectives.kernel_checks import check_op
from meshpar.hardware import cost_model as cost
from meshpar.sharding.host_resources import free_memory_bytes
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.types import axis_sizes, near, problem
from meshpar.sharding.units import si

Kernel = Callable[[jax.Array], jax.Array]
Ranks = tuple[str, ...]
"""Mesh axes that count as one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveKernels:
    """What is measured, by which algorithms, and what each costs."""

    algorithms: Mapping[str, Callable[[float, int], cost.Cost]]
    """Ours, with their closed forms; the first is taken for XLA's own."""
    xla: Callable[[jax.Array, Ranks, str], jax.Array]
    ops: tuple[str, ...]
    """Reductions that XLA's own has; none where nothing is reduced."""
    is_part_before: bool = False
    """Whether a device holds an N-th of the payload before."""
    is_part_after: bool = False


def _xla_reduce(x: jax.Array, ranks: Ranks, op: str) -> jax.Array:
    return {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin}[op](x, ranks)


COLLECTIVES: Mapping[str, CollectiveKernels] = {
    "all_reduce": CollectiveKernels(
        algorithms={
            "ring": cost.ring_all_reduce,
            "bidirectional": lambda n, ranks: cost.both_ways(cost.ring_all_reduce(n, ranks)),
            "recursive_doubling": cost.tree_all_reduce,
            "halving_doubling": cost.halving_doubling_all_reduce,
            "tree": cost.binomial_tree_all_reduce,
            "root": cost.naive_root_all_reduce,
            "parameter_server": cost.parameter_server_all_reduce,
        },
        xla=_xla_reduce,
        ops=("sum", "mean", "max", "min"),
    ),
    "all_gather": CollectiveKernels(
        algorithms={
            "ring": cost.ring_all_gather,
            "bidirectional": lambda n, ranks: cost.both_ways(cost.ring_all_gather(n, ranks)),
            "recursive_doubling": cost.doubling_all_gather,
        },
        xla=lambda x, ranks, op: lax.all_gather(x, ranks, tiled=True),
        ops=(),
        is_part_before=True,
    ),
    "reduce_scatter": CollectiveKernels(
        algorithms={
            "ring": cost.ring_reduce_scatter,
            "bidirectional": lambda n, ranks: cost.both_ways(cost.ring_reduce_scatter(n, ranks)),
            "recursive_halving": cost.halving_reduce_scatter,
        },
        xla=lambda x, ranks, op: lax.psum_scatter(x, ranks, tiled=True),
        ops=("sum",),
        is_part_after=True,
    ),
    "all_to_all": CollectiveKernels(
        algorithms={"direct": cost.all_to_all},
        xla=lambda x, ranks, op: lax.all_to_all(x, ranks, split_axis=0, concat_axis=0, tiled=True),
        ops=(),
    ),
}
ALGORITHMS = tuple(dict.fromkeys(name for one in COLLECTIVES.values() for name in one.algorithms))
TWO_LEVELS = "hierarchical"
"""Of collectives that have one, along several axes that count as one: the last is inside."""
UNFITTED = ("bidirectional", TWO_LEVELS)
"""They say nothing about one link: both directions at once, and two kinds of link."""
USUAL = tuple(name for name in ALGORITHMS if name not in ("root", "parameter_server"))
"""Without those that are there for comparison only."""


def collectives(
    mesh: str | Mesh | None = None,
    *,
    axes: Sequence[str] = (),
    names: Sequence[str] = tuple(COLLECTIVES),
    algorithms: Sequence[str] = USUAL,
    min_bytes: float = 1e3,
    max_bytes: float = 1e6,
    factor: float = 10,
    dtype: str = "float32",
    op: str = "sum",
    repeats: int = 5,
    target_s: float = 8e-3,
    progress: Callable[[str], None] = lambda line: None,
) -> Collectives:
    """Measures our collectives and XLA's own along the axes of a mesh, and fits a link to each.

    Args:
      mesh: `data=2,tensor=4`, or a mesh. None: all devices along `data`.
      axes: which of its axes; `data*tensor` is two that count as one. Empty: each that is longer than one.
      names: which collectives.
      algorithms: which of ours; a collective that lacks one goes without it.
      min_bytes, max_bytes, factor: payloads, each so many times the one before.
      dtype: of the elements.
      op: of reductions.
      repeats: rounds, the median of which is kept.
      target_s: how long a run of a program should take at least; it repeats its collective as often.
      progress: is called with a line that says what is being measured.

    Raises:
      ValueError: no such axis, collective, algorithm, dtype or op; sizes that cannot be; no device to send to; more
        memory than there is; several processes.
    """
    _check_names(names, algorithms)
    over = _mesh(mesh)
    element_type = _dtype(dtype)
    if any(COLLECTIVES[name].ops for name in names):
        check_op("bench collectives", op, element_type)
    sizes = _sizes(min_bytes, max_bytes, factor)
    _check_memory(max(sizes), over)
    rows: list[CollectiveRow] = []
    fits: list[Fit] = []
    for ranks in _axes(over, axes):
        measured: list[tuple[CollectiveRow, cost.Cost]] = []
        for name in names:
            for size in sizes:
                progress(f"{name} of {si(size, 'B')} over {'*'.join(ranks)}")
                case = _Case(COLLECTIVES[name], name, over, ranks, size, element_type, op)
                measured += case.measured(algorithms, repeats=repeats, target_s=target_s)
        found = _fits("*".join(ranks), measured)
        rows += [_predict(row, form, found) for row, form in measured]
        fits += found
    return Collectives(
        devices=over.devices.flat[0].device_kind,
        mesh=axis_sizes(over),
        rows=tuple(rows),
        fits=tuple(fits),
        repeats=repeats,
        notes=tuple(_notes(over, rows)),
    )


# ---- Arguments -------------------------------------------------------------------------------------------------------


def _check_names(names: Sequence[str], algorithms: Sequence[str]) -> None:
    for what, given, there in (("collective", names, COLLECTIVES), ("algorithm", algorithms, ALGORITHMS)):
        for name in given:
            if name not in there:
                raise problem("bench collectives", f"measure {what} `{name}`", "there is none", near(name, there))
    known = dict.fromkeys(one for name in names for one in COLLECTIVES[name].algorithms)
    if "direct" not in known and not known.keys() & set(algorithms):  # "direct" needs no asking
        asked, exists = f"measure {', '.join(names)} by {', '.join(algorithms)}", "none of these goes that way"
        raise problem("bench collectives", asked, exists, f"there are {', '.join(f'`{one}`' for one in known)}")


def _mesh(mesh: str | Mesh | None) -> Mesh:
    if jax.process_count() > 1:
        exists = "it looks at all values, which lie in several of them"
        fix = "run it in one process, on the devices of one machine"
        raise problem("bench collectives", f"measure with {jax.process_count()} processes", exists, fix)
    if isinstance(mesh, Mesh):
        return mesh
    spec = MeshSpec.parse(mesh) if mesh else MeshSpec(data=-1)
    sizes = list(spec.values())
    wanted = math.prod(sizes) if -1 not in sizes else len(jax.devices())
    return spec.build(jax.devices()[:wanted])


def _axes(mesh: Mesh, given: Sequence[str]) -> list[Ranks]:
    sizes = axis_sizes(mesh)
    chosen = [tuple(one.split("*")) for one in given] or [(axis,) for axis, size in sizes.items() if size > 1]
    for ranks in chosen:
        if len(set(ranks)) < len(ranks):
            exists = "it names an axis twice"
            raise problem("bench collectives", f"measure along `{'*'.join(ranks)}`", exists, "name every axis once")
        for axis in ranks:
            if axis not in sizes:
                exists = "the mesh has no such axis"
                raise problem("bench collectives", f"measure along mesh axis `{axis}`", exists, near(axis, sizes))
    if not chosen or any(math.prod(sizes[axis] for axis in ranks) == 1 for ranks in chosen):
        asked = "measure messages along " + (" and ".join(f"`{'*'.join(ranks)}`" for ranks in chosen) or "a mesh")
        fix = "take several devices: --mesh data=8, with --devices 8 where there is no accelerator"
        raise problem("bench collectives", asked, "there is one device along it, and no other to send to", fix)
    return chosen


def _dtype(name: str) -> np.dtype:
    known = ("float32", "bfloat16", "float16", "int32")
    if name not in known:
        raise problem("bench collectives", f"send {name}", f"it sends {', '.join(known)}", near(name, known))
    return jnp.dtype(name)


def _sizes(min_bytes: float, max_bytes: float, factor: float) -> list[int]:
    if not 0 < min_bytes <= max_bytes < math.inf or not 1 < factor < math.inf:
        asked = f"measure from {min_bytes:g} to {max_bytes:g} bytes, each {factor:g} times the one before"
        fix = "write --min-bytes 1kB --max-bytes 1MB --factor 10"
        raise problem("bench collectives", asked, "sizes grow from one above 0 by a factor above 1", fix)
    steps = math.floor(math.log(max_bytes / min_bytes, factor) + 1e-9)
    return [round(min_bytes * factor**step) for step in range(steps + 1)]


_COPIES = 8
"""Of the payload on a device at most: in, out, what a loop carries and what an algorithm holds meanwhile."""


def _check_memory(size_bytes: int, mesh: Mesh) -> None:
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        free, needed = free_memory_bytes(), 2 * _COPIES * size_bytes * mesh.size  # the reference is there, too
    else:
        stats = device.memory_stats() or {}
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None
        needed = _COPIES * size_bytes
    if free is not None and needed > free:
        exists = f"that takes about {si(needed, 'B')} of memory, and {si(free, 'B')} are free"
        fix = f"use --max-bytes {si(0.5 * size_bytes * free / needed, 'B', digits=1).replace(' ', '')} or less"
        raise problem("bench collectives", f"send {si(size_bytes, 'B')} from each of {mesh.size} devices", exists, fix)


# ---- One collective at one size --------------------------------------------------------------------------------------


class _Case:
    """One collective of one size along some axes: its programs, their times, their values."""

    def __init__(
        self, what: CollectiveKernels, name: str, mesh: Mesh, ranks: Ranks, size_bytes: int, dtype: np.dtype, op: str
    ) -> None:
        sizes = axis_sizes(mesh)
        self._what, self._name, self._mesh, self._ranks = what, name, mesh, ranks
        self._num_ranks = math.prod(sizes[axis] for axis in ranks)
        self._op = op if what.ops else ""
        self._dtype = dtype
        # A whole number of elements for each rank.
        self._count = max(round(size_bytes / dtype.itemsize / self._num_ranks), 1) * self._num_ranks
        self._part = self._count // self._num_ranks

    def measured(
        self, algorithms: Sequence[str], *, repeats: int, target_s: float
    ) -> list[tuple[CollectiveRow, cost.Cost]]:
        """A row for each program, XLA's own first, and what the model says it is made of."""
        forms = dict(self._forms(algorithms))
        programs = {name: self._program(kernel) for name, (kernel, _) in forms.items()}
        x, expected, rounding = self._data()
        checked = {name: self._checked(program(x, 1)[1], expected, rounding) for name, program in programs.items()}
        x = jnp.zeros_like(x)  # sums of sums would overflow in time
        times = _in_turn(
            {name: functools.partial(_run, program, x) for name, program in programs.items()}, repeats, target_s
        )
        return [(self._row(name, times, *checked[name]), forms[name][1]) for name in programs]

    def _forms(self, algorithms: Sequence[str]) -> Iterator[tuple[str, tuple[Kernel, cost.Cost]]]:
        what, nbytes = self._what, float(self._count * self._dtype.itemsize)
        if not what.ops or self._op in what.ops:
            usual = next(iter(what.algorithms.values()))
            yield XLA, (lambda x: what.xla(x, self._ranks, self._op), usual(nbytes, self._num_ranks))
        options: dict[str, Any] = {"axis": self._ranks} | ({"op": self._op} if what.ops else {})
        kernel = getattr(kernels, self._name)
        for name, form in what.algorithms.items():
            halves = name in ("recursive_halving", "recursive_doubling") and self._name != "all_reduce"
            if halves and self._num_ranks & (self._num_ranks - 1):
                continue
            if name == "direct":
                yield name, (functools.partial(kernel, **options), form(nbytes, self._num_ranks))
            elif name in algorithms:
                yield name, (functools.partial(kernel, algorithm=name, **options), form(nbytes, self._num_ranks))
        if self._name in _TWO_LEVELS and len(self._ranks) > 1:
            *outer, inner = self._ranks
            two_levels, form_of = _TWO_LEVELS[self._name]
            options |= {"inner": inner, "outer": tuple(outer)}
            del options["axis"]
            levels = form_of(nbytes, self._num_ranks, inner=axis_sizes(self._mesh)[inner])
            yield TWO_LEVELS, (functools.partial(two_levels, **options), levels.inside + levels.across)

    def _program(self, kernel: Kernel) -> Callable[..., Any]:
        """`(rows, times) -> (what goes in next, what came out last)`: the kernel so often, each on what came before."""
        rows = P(tuple(self._mesh.axis_names))

        def turn(_: int, held: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, _y = held
            # The barrier keeps the compiler from simplifying the collective with what follows it.
            y = lax.optimization_barrier(kernel(x))
            return self._next(x, y), y

        def one(x: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = x[0]
            y = jnp.zeros(self._part if self._what.is_part_after else self._count, x.dtype)
            x, y = lax.fori_loop(0, times, turn, (x, y))
            return x[None], y[None]

        # Off: what comes out of a psum is the same everywhere, what goes into a loop is not; nothing is differentiated.
        mapped = jax.shard_map(one, mesh=self._mesh, in_specs=(rows, P()), out_specs=(rows, rows), check_vma=False)
        return jax.jit(mapped)

    def _next(self, x: jax.Array, y: jax.Array) -> jax.Array:
        if self._what.is_part_before:
            return y[: self._part]
        return x.at[: self._part].set(y) if self._what.is_part_after else y

    def _data(self) -> tuple[jax.Array, np.ndarray, float]:
        """The rows, one a device; what the reference makes of them; and how far rounding may take sums from that."""
        sizes = axis_sizes(self._mesh)
        row = self._part if self._what.is_part_before else self._count
        values = np.random.default_rng(0).standard_normal((self._mesh.size, row), np.float32)
        values = (values * 100 if self._dtype == np.int32 else values).astype(self._dtype)
        x = jax.device_put(values, NamedSharding(self._mesh, P(tuple(self._mesh.axis_names))))
        along = [list(sizes).index(axis) for axis in self._ranks]
        by_axis = np.moveaxis(values.reshape(*sizes.values(), row), along, range(len(along)))
        groups = by_axis.reshape(self._num_ranks, -1, row)  # [rank, group, ...]
        made = [self._reference(groups[:, group]) for group in range(groups.shape[1])]
        whole = np.stack(made, axis=1).reshape(*by_axis.shape[:-1], -1)
        expected = np.moveaxis(whole, range(len(along)), along).reshape(self._mesh.size, -1)
        is_rounded = self._op in ("sum", "mean") and self._dtype != np.int32
        largest = np.abs(groups.astype(np.float32)).sum(axis=0).max() if is_rounded else 0.0
        # A rounding for each rank, of partial sums that are none larger than the sum of the terms' sizes.
        return x, expected, self._num_ranks * float(jnp.finfo(self._dtype).eps) * largest if is_rounded else 0.0

    def _reference(self, parts: np.ndarray) -> np.ndarray:
        options = {"op": self._op} if self._what.ops else {}
        exact = parts if self._dtype == np.int32 else parts.astype(np.float32)
        with jax.default_device(_host()):
            return np.asarray(getattr(reference, self._name)(jnp.asarray(exact), **options))

    def _checked(self, found: jax.Array, expected: np.ndarray, rounding: float) -> tuple[int, float]:
        """(elements off by more than rounding, the largest error)."""
        off = np.abs(np.asarray(found).astype(np.float64) - expected.astype(np.float64))
        return int((off > rounding).sum()), float(off.max(initial=0))

    def _row(self, name: str, times: Mapping[str, Sequence[float]], wrong: int, max_error: float) -> CollectiveRow:
        low, median, high = quartiles(times[name])
        ratio = None
        if name != XLA and XLA in times:
            ratio = statistics.median(ours / own for ours, own in zip(times[name], times[XLA], strict=True))
        return CollectiveRow(
            axis="*".join(self._ranks),
            num_ranks=self._num_ranks,
            collective=self._name,
            algorithm=name,
            size_bytes=self._count * self._dtype.itemsize,
            count=self._count,
            dtype=self._dtype.name,
            op=self._op,
            time_s=median,
            low_s=low,
            high_s=high,
            ratio=ratio,
            wrong=wrong,
            max_error=max_error,
        )


_TWO_LEVELS: Mapping[str, tuple[Callable[..., jax.Array], Callable[..., cost.HierarchicalCost]]] = {
    "all_reduce": (kernels.hierarchical_all_reduce, cost.hierarchical_all_reduce),
    "all_to_all": (kernels.hierarchical_all_to_all, cost.hierarchical_all_to_all),
}


def _host() -> jax.Device | None:
    """Where there is most memory; None where jax has no host platform."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _run(program: Callable[..., Any], x: jax.Array, times: int) -> float:
    return seconds_of(lambda: jax.block_until_ready(program(x, times)))


def _in_turn(runs: Mapping[str, Callable[[int], float]], repeats: int, target_s: float) -> dict[str, list[float]]:
    """Seconds of one collective, round by round, for each program; who begins changes from round to round."""
    idle_s = {name: statistics.median(run(0) for _ in range(3)) for name, run in runs.items()}
    times = {name: _repeats(run, idle_s[name], target_s) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for turn in range(repeats):
        at = turn % len(order)
        for name in order[at:] + order[:at]:
            took_s = runs[name](times[name])
            # On a busy machine a run may be shorter than one that does nothing was: then the latter is not counted.
            found[name].append((took_s - idle_s[name] if took_s > 2 * idle_s[name] else took_s) / times[name])
    return found


def _repeats(run: Callable[[int], float], idle_s: float, target_s: float, most: int = 10_000) -> int:
    """How often a program repeats its collective, for a run to be long against one that does nothing."""
    each_s = max(run(2) - idle_s, 1e-6) / 2
    return min(max(math.ceil(max(target_s, 4 * idle_s) / each_s), 1), most)


# ---- Links -----------------------------------------------------------------------------------------------------------


def _fits(axis: str, measured: Sequence[tuple[CollectiveRow, cost.Cost]]) -> list[Fit]:
    points: dict[str, list[Point]] = {of: [] for of in FITTED}
    for row, form in (one for one in measured if one[0].algorithm not in UNFITTED):
        of = "axes" if row.algorithm == XLA else "permutes"
        points[of].append(Point(form.steps, form.bytes_in_turn, row.time_s))
    return [fit_link(axis, of, found) for of, found in points.items() if found]


def _predict(row: CollectiveRow, form: cost.Cost, fits: Sequence[Fit]) -> CollectiveRow:
    of = "axes" if row.algorithm == XLA else "permutes"
    fit = next((fit for fit in fits if fit.of == of), None)
    predicted_s = None if fit is None else fit.time_s(form.steps, form.bytes_in_turn)
    return dataclasses.replace(row, predicted_s=predicted_s)


def _notes(mesh: Mesh, rows: Sequence[CollectiveRow]) -> Iterator[str]:
    wrong = sum(bool(row.wrong) for row in rows)
    if wrong:
        yield f"{wrong} rows have wrong values"
    unfitted = [name for name in UNFITTED if any(row.algorithm == name for row in rows)]
    if unfitted:
        yield f"{' and '.join(unfitted)}: predicted, not fitted, for it uses more than one direction or kind of link"
    yield _choices(rows)
    if mesh.devices.flat[0].platform == "cpu":
        yield (
            "host devices share the cores and the memory of one machine: times hold for this run, ratios between "
            "programs of the run; neither says anything about a network"
        )


def _choices(rows: Sequence[CollectiveRow]) -> str:
    """Compare the model's choice among all algorithms, XLA's own included, with the measured times."""
    cases: dict[tuple[str, str, int], list[CollectiveRow]] = {}
    for row in rows:
        if row.predicted_s is not None:
            cases.setdefault((row.collective, row.axis, row.size_bytes), []).append(row)
    behind = []
    for found in (found for found in cases.values() if len(found) > 1):
        chosen = min(found, key=lambda row: row.predicted_s or 0.0)
        behind.append(chosen.time_s / min(row.time_s for row in found))
    if not behind:
        return "there was no algorithm to choose"
    best = sum(one == 1 for one in behind)
    return (
        f"the model's choice was the quickest in {best} of {len(behind)} cases; typically it takes "
        f"{statistics.median(behind):.2f} times what the quickest does, at worst {max(behind):.2f}"
    )
