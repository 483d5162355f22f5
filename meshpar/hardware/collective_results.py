"""Results of the measurement of collectives: rows, fitted links, and the profile that they form."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Links, Profile, cluster_of, gpu_of_kind
from meshpar.hardware.cost_breakdown import bus_factor
from meshpar.hardware.link_fit import Fit
from meshpar.sharding.errors import problem
from meshpar.sharding.printing import Plain, Printed, human_mesh, table
from meshpar.sharding.units import si

XLA = "XLA"
"""Name of XLA's collective in the column of algorithms."""
FITTED = {"permutes": "messages of the kernels here", "axes": "XLA's collectives"}
"""Kinds of fitted links, with the messages that each kind describes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRow(Plain):
    """Measured time of an algorithm for a size and an axis."""

    axis: str
    num_ranks: int
    collective: str
    algorithm: str
    size_bytes: int
    count: int
    """Number of elements of the payload."""
    dtype: str
    time_s: float
    """Median time."""
    low_s: float
    """Lower quartile."""
    high_s: float
    """Upper quartile."""
    ratio: float | None
    """Time relative to XLA's collective, median over rounds. None for XLA itself."""
    wrong: int
    """Number of elements whose error exceeds the rounding error."""
    max_error: float
    predicted_s: float | None = None
    """Time of the alpha-beta model with the fitted link of the axis."""
    derived = ("algorithm_bytes_per_s", "bus_bytes_per_s")

    @property
    def of(self) -> str:
        """The kind of link that the algorithm is fitted to, a key of `FITTED`."""
        return "axes" if self.algorithm == XLA else "permutes"

    @property
    def algorithm_bytes_per_s(self) -> float:
        return self.size_bytes / self.time_s

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth as defined by nccl-tests."""
        return self.algorithm_bytes_per_s * bus_factor(self.collective.replace("_", "-"), self.num_ranks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collectives(Printed, Plain):
    """Results of `meshpar bench collectives`. Prints as tables."""

    devices: str
    """Name of the devices in jax."""
    mesh: Mapping[str, int]
    rows: tuple[CollectiveRow, ...]
    fits: tuple[Fit, ...]
    repeats: int
    notes: tuple[str, ...] = ()

    @property
    def poor(self) -> str:
        """Text that lists the fits with a poor or unusable link; empty if all fits are good."""
        errors = {fit: f"the typical error is {fit.typical_error:.0%}" for fit in self.fits if fit.verdict != "good"}
        errors |= {fit: "times do not grow with the bytes" for fit in errors if fit.link is None}
        return "; ".join(f"along `{fit.axis}` ({FITTED[fit.of]}), {error}" for fit, error in errors.items())

    @property
    def title(self) -> str:
        return f"collectives on {math.prod(self.mesh.values())} {self.devices} devices, {human_mesh(self.mesh)}"

    def fit(self, axis: str, of: str) -> Fit | None:
        """Return the fit of an axis to single messages (`of="permutes"`) or to XLA's collectives (`of="axes"`)."""
        return next((fit for fit in self.fits if (fit.axis, fit.of) == (axis, of)), None)

    def crossover_bytes(self, axis: str) -> float | None:
        """Return the payload below which recursive doubling is faster than a ring, with the fitted link."""
        fit = self.fit(axis, "permutes")
        num_ranks = next(row.num_ranks for row in self.rows if row.axis == axis)
        return None if fit is None or fit.link is None else cost.ring_tree_crossover_bytes(num_ranks, fit.link)

    def profile(self) -> Profile:
        """Return the profile for `explain`, `cost` and `algorithm="auto"`, without fits that are not usable.

        It is a `Cluster` for GPUs of the catalogue, and `Links` for other devices.
        """
        usable = [(fit.of, fit.axis, fit.link) for fit in self.fits if fit.link is not None and fit.verdict != "none"]
        links: dict[str, Any] = {of: {axis: link for for_, axis, link in usable if for_ == of} for of in FITTED}
        if not any(links.values()):
            fix = "measure on an idle machine, with a wider range of sizes (--max-bytes) and more rounds (--repeats)"
            reason = f"no fit is usable: {self.poor}"
            raise problem("profile", "save the measured links", reason, fix, code="bad-fit")
        gpu = gpu_of_kind(self.devices)
        errors = ", ".join(f"{fit.axis} {fit.of} {fit.typical_error:.0%}" for fit in self.fits if fit.verdict != "none")
        today = datetime.date.today().isoformat()
        source = f"meshpar bench collectives, {self.title}, {today}; typical error of the fit: {errors}"
        if gpu is None:
            return Links(devices=self.devices, source=source, **links)
        cluster = cluster_of(gpu, nodes=1, gpus_per_node=math.prod(self.mesh.values()))
        return dataclasses.replace(cluster, source=source, **links)

    def to_json(self) -> dict[str, Any]:
        crossover = {axis: self.crossover_bytes(axis) for axis in dict.fromkeys(fit.axis for fit in self.fits)}
        return super().to_json() | {"title": self.title, "crossover_bytes": crossover}

    def __rich__(self) -> Any:
        from rich.console import Group

        cases = dict.fromkeys((row.collective, row.axis) for row in self.rows)
        tables = [self._table([row for row in self.rows if (row.collective, row.axis) == case]) for case in cases]
        return Group(f"{self.title}; medians of {self.repeats} rounds", *tables, self._fits_table(), *self.notes)

    def _table(self, rows: Sequence[CollectiveRow]) -> Any:
        first = rows[0]
        columns = (
            "size", "count", "type", "algorithm", "time", "quartiles", "algbw", "busbw", "÷ XLA", "#wrong", "max error",
            "model", "off",
        )  # fmt: skip
        by_size = itertools.groupby(rows, lambda row: row.size_bytes)
        cells = [cells for _, same in by_size for cells in ([], *([*_cells(row)] for row in same))]
        title = f"{first.collective} over {first.axis}={first.num_ranks}"
        return table(title, columns, cells[1:], left=("type", "algorithm"))

    def _fits_table(self) -> Any:
        columns = ("axis", "as used by", "α", "bandwidth", "typical error", "worst", "points", "fit", "crossover")
        colors = {"good": "green", "poor": "yellow", "none": "red"}
        rows = []
        for fit in self.fits:
            crossover = self.crossover_bytes(fit.axis) if fit.of == "permutes" else None
            link = (None, None) if fit.link is None else (fit.link.alpha_s, fit.link.bytes_per_s)
            rows.append(
                (
                    fit.axis,
                    FITTED[fit.of],
                    *map(_figure, link, ("s", "B/s")),
                    *(f"{error:.0%}" for error in (fit.typical_error, fit.worst_error)),
                    str(fit.num_points),
                    f"[{colors[fit.verdict]}]{fit.verdict}[/]",
                    _figure(crossover, "B"),
                )
            )
        title = "links, fitted to the times: T = steps · α + bytes · β"
        return table(title, columns, rows, left=("axis", "as used by", "fit"))


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else si(value, unit, digits=3)


def _cells(row: CollectiveRow) -> Iterator[str]:
    yield from (si(row.size_bytes, "B"), f"{row.count:,}", row.dtype, row.algorithm)
    yield _figure(row.time_s, "s")
    yield f"{_figure(row.low_s, 's')} – {_figure(row.high_s, 's')}"
    yield from (_figure(rate, "B/s") for rate in (row.algorithm_bytes_per_s, row.bus_bytes_per_s))
    yield "" if row.ratio is None else f"{row.ratio:.2f}"
    yield f"[red]{row.wrong:,}[/]" if row.wrong else "0"
    yield f"{row.max_error:.1e}"
    yield _figure(row.predicted_s, "s")
    yield "" if row.predicted_s is None else f"{row.predicted_s / row.time_s - 1:+.0%}"
