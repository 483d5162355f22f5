"""Measurement of collectives by size, algorithm and mesh axis, in the style of nccl-tests.

For each size, all programs run once per round, for several rounds. The ratio to XLA's collective compares times of the
same round. A program applies its collective repeatedly to its own result, so that a run is long compared with its
launch. The time of a run without the collective is subtracted. Results are compared once with the reference.

The size is the payload: the gathered array of an all-gather, the array before scattering of a reduce-scatter, and the
local array otherwise. SI units.
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
from meshpar.bench.timing import quartiles, seconds_of
from meshpar.collectives import reference
from meshpar.hardware import cost_model as cost
from meshpar.hardware.collective_results import FITTED, XLA, CollectiveRow, Collectives
from meshpar.hardware.link_fit import Fit, Point, fit_link
from meshpar.sharding.errors import check_choice, near, problem
from meshpar.sharding.host_resources import check_memory
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.types import axis_sizes, num_shards
from meshpar.sharding.units import si

Kernel = Callable[[jax.Array], jax.Array]
Ranks = tuple[str, ...]
"""Mesh axes along which a collective communicates. Several axes are combined into one group of ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveKernels:
    """Implementations of a collective: the algorithms of `meshpar.collectives` and XLA's collective."""

    algorithms: Mapping[str, Callable[[float, int], cost.Cost]]
    """Name of an algorithm -> its cost for (payload bytes, ranks). XLA's collective has the cost of the first one."""
    xla: Callable[[jax.Array, Ranks], jax.Array]
    is_reduction: bool = False
    is_part_before: bool = False
    """Whether the input of each of the N devices is 1/N of the payload, as in an all-gather."""
    is_part_after: bool = False
    """Whether the output of each of the N devices is 1/N of the payload, as in a reduce-scatter."""


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
        xla=lax.psum,
        is_reduction=True,
    ),
    "all_gather": CollectiveKernels(
        algorithms={
            "ring": cost.ring_all_gather,
            "bidirectional": lambda n, ranks: cost.both_ways(cost.ring_all_gather(n, ranks)),
            "recursive_doubling": cost.doubling_all_gather,
        },
        xla=lambda x, ranks: lax.all_gather(x, ranks, tiled=True),
        is_part_before=True,
    ),
    "reduce_scatter": CollectiveKernels(
        algorithms={
            "ring": cost.ring_reduce_scatter,
            "bidirectional": lambda n, ranks: cost.both_ways(cost.ring_reduce_scatter(n, ranks)),
            "recursive_halving": cost.halving_reduce_scatter,
        },
        xla=lambda x, ranks: lax.psum_scatter(x, ranks, tiled=True),
        is_reduction=True,
        is_part_after=True,
    ),
    "all_to_all": CollectiveKernels(
        algorithms={"direct": cost.all_to_all},
        xla=lambda x, ranks: lax.all_to_all(x, ranks, split_axis=0, concat_axis=0, tiled=True),
    ),
}
ALGORITHMS = tuple(dict.fromkeys(name for collective in COLLECTIVES.values() for name in collective.algorithms))
TWO_LEVELS = "hierarchical"
"""Name of the two-level algorithm, which is measured along combined axes. The last axis is the inner axis."""
UNFITTED = ("bidirectional", TWO_LEVELS)
"""Algorithms that are not fitted: they use both directions of a link, or two kinds of links."""
CPU_COPIES = 16
"""Number of copies of the payload that a CPU device needs at most, to check the memory before measuring: input, output,
loop carry and temporaries, for the program and for the reference."""
DEFAULT = tuple(name for name in ALGORITHMS if name not in ("root", "parameter_server"))
"""Algorithms that are measured by default."""


def collectives(
    mesh: str | Mesh | None = None,
    *,
    axes: Sequence[str] = (),
    names: Sequence[str] = tuple(COLLECTIVES),
    algorithms: Sequence[str] = DEFAULT,
    min_bytes: float = 1e3,
    max_bytes: float = 1e6,
    factor: float = 10,
    dtype: str = "float32",
    repeats: int = 5,
    target_s: float = 8e-3,
    progress: Callable[[str], None] = lambda line: None,
) -> Collectives:
    """Measure the algorithms of `meshpar.collectives` and XLA's, and fit a link to each mesh axis.

    Args:
      mesh: `data=2,tensor=4`, or a mesh. The default is all devices along `data`.
      axes: mesh axes; `data*tensor` combines two axes. The default is all axes larger than 1.
      names: collectives to measure.
      algorithms: algorithms of `meshpar.collectives` to measure. A collective skips algorithms that it lacks.
      min_bytes, max_bytes, factor: payloads from `min_bytes` to `max_bytes`, each `factor` times the previous.
      dtype: dtype of the elements.
      repeats: number of rounds. The median is reported.
      target_s: minimum time of a run, which determines how often a program repeats its collective.
      progress: called with a line of text before each measurement.

    Raises:
      MeshparError: an argument is invalid, an axis has a single device, or the memory is not sufficient.

    Returns:
      The measured rows, the fitted links, and the profile that they form.
    """
    where = "bench collectives"
    for name in names:
        check_choice(where, "a collective", tuple(COLLECTIVES), collective=name)
    for algorithm in algorithms:
        check_choice(where, "an algorithm", ALGORITHMS, algorithm=algorithm)
    check_choice(where, "the dtype", ("float32", "bfloat16", "float16", "int32"), dtype=dtype)
    available = dict.fromkeys(algorithm for name in names for algorithm in COLLECTIVES[name].algorithms)
    if "direct" not in available and not available.keys() & set(algorithms):  # "direct" is always measured
        requested = f"measure {', '.join(names)} with {', '.join(algorithms)}"
        reason, fix = "the collectives do not have these algorithms", f"use one of {', '.join(available)}"
        raise problem(where, requested, reason, fix, code="unknown-choice")
    over, element_type = _mesh(mesh), jnp.dtype(dtype)
    sizes = _sizes(min_bytes, max_bytes, factor)
    if over.devices.flat[0].platform == "cpu":
        requested = f"send {si(max(sizes), 'B')} from each of {over.size} devices"
        check_memory(where, requested, CPU_COPIES * max(sizes) * over.size, "use a smaller --max-bytes")
    rows: list[CollectiveRow] = []
    fits: list[Fit] = []
    for ranks in _axes(over, axes):
        measured: list[tuple[CollectiveRow, cost.Cost]] = []
        for name in names:
            for size in sizes:
                progress(f"{name} of {si(size, 'B')} over {'*'.join(ranks)}")
                case = _Case(name, over, ranks, size, element_type)
                measured += case.measured(algorithms, repeats=repeats, target_s=target_s)
        points: dict[str, list[Point]] = {}
        for row, form in (pair for pair in measured if pair[0].algorithm not in UNFITTED):
            points.setdefault(row.of, []).append(Point(form.steps, form.bytes_in_turn, row.time_s))
        axis_fits = {of: fit_link("*".join(ranks), of, points[of]) for of in FITTED if of in points}
        for row, form in measured:
            fit = axis_fits.get(row.of)
            predicted_s = None if fit is None else fit.time_s(form.steps, form.bytes_in_turn)
            rows.append(dataclasses.replace(row, predicted_s=predicted_s))
        fits += axis_fits.values()
    return Collectives(
        devices=over.devices.flat[0].device_kind,
        mesh=axis_sizes(over),
        rows=tuple(rows),
        fits=tuple(fits),
        repeats=repeats,
        notes=tuple(_notes(over, rows)),
    )


def _mesh(mesh: str | Mesh | None) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    spec = MeshSpec.parse(mesh) if mesh else MeshSpec(data=-1)
    sizes = list(spec.values())
    num_devices = math.prod(sizes) if -1 not in sizes else len(jax.devices())
    return spec.build(jax.devices()[:num_devices])


def _axes(mesh: Mesh, names: Sequence[str]) -> list[Ranks]:
    where, sizes = "bench collectives", axis_sizes(mesh)
    selected = [tuple(name.split("*")) for name in names] or [(axis,) for axis, size in sizes.items() if size > 1]
    for ranks in selected or [()]:
        label = "*".join(ranks)
        if len(set(ranks)) < len(ranks):
            code, reason, fix = "axis-used-twice", "an axis appears twice", "use each axis once"
        elif unknown := [axis for axis in ranks if axis not in sizes]:
            code, reason, fix = "unknown-axis", f"the mesh has no axis `{unknown[0]}`", near(unknown[0], sizes)
        elif num_shards((ranks,), mesh) == 1:
            code, reason = "out-of-range", "there is only one device along it"
            fix = "use several devices: --mesh data=8, with --devices 8 if there is no accelerator"
        else:
            continue
        raise problem(where, f"measure along `{label}`" if label else "measure", reason, fix, code=code)
    return selected


def _sizes(min_bytes: float, max_bytes: float, factor: float) -> list[int]:
    if not 0 < min_bytes <= max_bytes < math.inf or not 1 < factor < math.inf:
        requested = f"measure from {min_bytes:g} to {max_bytes:g} bytes with a factor of {factor:g}"
        reason, fix = "sizes must be positive and increasing, and the factor above 1", "use --min-bytes 1kB --factor 10"
        raise problem("bench collectives", requested, reason, fix, code="out-of-range")
    steps = math.floor(math.log(max_bytes / min_bytes, factor) + 1e-9)
    return [round(min_bytes * factor**step) for step in range(steps + 1)]


class _Case:
    """A measurement of a collective with one payload along mesh axes, with all algorithms."""

    def __init__(self, name: str, mesh: Mesh, ranks: Ranks, size_bytes: int, dtype: np.dtype) -> None:
        self._collective, self._name, self._mesh, self._ranks = COLLECTIVES[name], name, mesh, ranks
        self._num_ranks = num_shards((ranks,), mesh)
        self._dtype = dtype
        # Round the number of elements to a multiple of the number of ranks.
        self._count = max(round(size_bytes / dtype.itemsize / self._num_ranks), 1) * self._num_ranks
        self._part = self._count // self._num_ranks

    def measured(
        self, algorithms: Sequence[str], *, repeats: int, target_s: float
    ) -> list[tuple[CollectiveRow, cost.Cost]]:
        """Measure all programs and return (row, cost) for each of them, XLA's first."""
        forms = dict(self._forms(algorithms))
        programs = {name: self._program(kernel) for name, (kernel, _) in forms.items()}
        x, expected, rounding = self._data()
        errors = {
            name: np.abs(np.asarray(program(x, 1)[1]).astype(np.float64) - expected.astype(np.float64))
            for name, program in programs.items()
        }
        x = jnp.zeros_like(x)  # repeated sums would overflow

        def run(program: Callable[..., Any], times: int) -> float:
            return seconds_of(lambda: jax.block_until_ready(program(x, times)))

        runs = {name: functools.partial(run, program) for name, program in programs.items()}
        times = _in_turn(runs, repeats, target_s)
        return [(self._row(name, times, errors[name], rounding), forms[name][1]) for name in programs]

    def _forms(self, algorithms: Sequence[str]) -> Iterator[tuple[str, tuple[Kernel, cost.Cost]]]:
        collective, nbytes = self._collective, float(self._count * self._dtype.itemsize)
        first = next(iter(collective.algorithms.values()))
        yield XLA, (lambda x: collective.xla(x, self._ranks), first(nbytes, self._num_ranks))
        options: dict[str, Any] = {"axis": self._ranks}
        kernel = getattr(kernels, self._name)
        for name, form in collective.algorithms.items():
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
            options = {"inner": inner, "outer": tuple(outer)}
            levels = form_of(nbytes, self._num_ranks, inner=axis_sizes(self._mesh)[inner])
            yield TWO_LEVELS, (functools.partial(two_levels, **options), levels.inside + levels.across)

    def _program(self, kernel: Kernel) -> Callable[..., Any]:
        """Return a program `(x, times) -> (next input, last output)` that repeats the kernel on its own result."""
        rows = P(tuple(self._mesh.axis_names))

        def body(_: int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, _y = carry
            # The barrier prevents the compiler from simplifying the collective together with later operations.
            y = lax.optimization_barrier(kernel(x))
            return self._next(x, y), y

        def per_device(x: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = x[0]
            y = jnp.zeros(self._part if self._collective.is_part_after else self._count, x.dtype)
            x, y = lax.fori_loop(0, times, body, (x, y))
            return x[None], y[None]

        # Without check_vma, because the result of a psum is replicated and the loop carry is not.
        mapped = jax.shard_map(
            per_device, mesh=self._mesh, in_specs=(rows, P()), out_specs=(rows, rows), check_vma=False
        )
        return jax.jit(mapped)

    def _next(self, x: jax.Array, y: jax.Array) -> jax.Array:
        if self._collective.is_part_before:
            return y[: self._part]
        return x.at[: self._part].set(y) if self._collective.is_part_after else y

    def _data(self) -> tuple[jax.Array, np.ndarray, float]:
        """Return the input, the expected result (with a row per device), and the maximum rounding error."""
        sizes = axis_sizes(self._mesh)
        row = self._part if self._collective.is_part_before else self._count
        values = np.random.default_rng(0).standard_normal((self._mesh.size, row), np.float32)
        values = (values * 100 if self._dtype == np.int32 else values).astype(self._dtype)
        x = jax.device_put(values, NamedSharding(self._mesh, P(tuple(self._mesh.axis_names))))
        along = [list(sizes).index(axis) for axis in self._ranks]
        by_axis = np.moveaxis(values.reshape(*sizes.values(), row), along, range(len(along)))
        groups = by_axis.reshape(self._num_ranks, -1, row)  # [rank, group, ...]
        exact = groups if self._dtype == np.int32 else groups.astype(np.float32)
        compute = getattr(reference, self._name)
        with jax.default_device(_host()):
            results = [np.asarray(compute(jnp.asarray(exact[:, group]))) for group in range(groups.shape[1])]
        stacked = np.stack(results, axis=1).reshape(*by_axis.shape[:-1], -1)
        expected = np.moveaxis(stacked, range(len(along)), along).reshape(self._mesh.size, -1)
        is_rounded = self._collective.is_reduction and self._dtype != np.int32
        largest = np.abs(groups.astype(np.float32)).sum(axis=0).max() if is_rounded else 0.0
        # A rounding error per rank, of partial sums that are at most the sum of the absolute values.
        return x, expected, self._num_ranks * float(jnp.finfo(self._dtype).eps) * largest if is_rounded else 0.0

    def _row(
        self, name: str, times: Mapping[str, Sequence[float]], errors: np.ndarray, rounding: float
    ) -> CollectiveRow:
        low, median, high = quartiles(times[name])
        ratio = None
        if name != XLA:
            ratio = statistics.median(ours / xla for ours, xla in zip(times[name], times[XLA], strict=True))
        return CollectiveRow(
            axis="*".join(self._ranks),
            num_ranks=self._num_ranks,
            collective=self._name,
            algorithm=name,
            size_bytes=self._count * self._dtype.itemsize,
            count=self._count,
            dtype=self._dtype.name,
            time_s=median,
            low_s=low,
            high_s=high,
            ratio=ratio,
            wrong=int((errors > rounding).sum()),
            max_error=float(errors.max(initial=0)),
        )


_TWO_LEVELS: Mapping[str, tuple[Callable[..., jax.Array], Callable[..., cost.HierarchicalCost]]] = {
    "all_reduce": (kernels.hierarchical_all_reduce, cost.hierarchical_all_reduce),
    "all_to_all": (kernels.hierarchical_all_to_all, cost.hierarchical_all_to_all),
}


def _host() -> jax.Device | None:
    """Return a CPU device, for large arrays, or None if jax has no host platform."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


MAX_REPEATS = 10_000
"""Maximum number of times that a run repeats its collective."""


def _in_turn(runs: Mapping[str, Callable[[int], float]], repeats: int, target_s: float) -> dict[str, list[float]]:
    """Run all programs in each round, in rotating order. Return program -> seconds per collective in each round."""
    idle_s = {name: statistics.median(run(0) for _ in range(3)) for name, run in runs.items()}
    times = {}
    for name, run in runs.items():  # a run is long compared with an empty run
        each_s = max(run(2) - idle_s[name], 1e-6) / 2
        times[name] = min(max(math.ceil(max(target_s, 4 * idle_s[name]) / each_s), 1), MAX_REPEATS)
    measured: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for index in range(repeats):
        first = index % len(order)
        for name in order[first:] + order[:first]:
            run_s = runs[name](times[name])
            # On a busy machine an empty run may have taken longer. Then its time is not subtracted.
            measured[name].append((run_s - idle_s[name] if run_s > 2 * idle_s[name] else run_s) / times[name])
    return measured


def _notes(mesh: Mesh, rows: Sequence[CollectiveRow]) -> Iterator[str]:
    wrong = sum(bool(row.wrong) for row in rows)
    if wrong:
        yield f"{wrong} rows have wrong values"
    unfitted = [name for name in UNFITTED if any(row.algorithm == name for row in rows)]
    if unfitted:
        yield f"{' and '.join(unfitted)}: predicted and not fitted, because of two directions or two kinds of links"
    yield _choices(rows)
    if mesh.devices.flat[0].platform == "cpu":
        yield ("host devices share the cores and the memory of a machine, so these times say nothing about a network")


def _choices(rows: Sequence[CollectiveRow]) -> str:
    """Return a note on how often the alpha-beta model chooses the algorithm that was measured as the fastest."""
    cases: dict[tuple[str, str, int], list[CollectiveRow]] = {}
    for row in rows:
        if row.predicted_s is not None:
            cases.setdefault((row.collective, row.axis, row.size_bytes), []).append(row)
    ratios = []
    for candidates in (candidates for candidates in cases.values() if len(candidates) > 1):
        choice = min(candidates, key=lambda row: row.predicted_s or 0.0)
        ratios.append(choice.time_s / min(row.time_s for row in candidates))
    if not ratios:
        return "there was only one algorithm"
    best = sum(ratio == 1 for ratio in ratios)
    return (
        f"the model's choice was the fastest algorithm in {best} of {len(ratios)} cases; its time is "
        f"{statistics.median(ratios):.2f} times the minimum in the median, and {max(ratios):.2f} times at worst"
    )
