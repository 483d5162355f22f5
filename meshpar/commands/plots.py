"""matplotlib pictures of data that others have computed; every function returns a `Figure`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshpar.planner.units import si
from meshpar.sharding.table import human_bytes
from meshpar.sharding.types import axis_sizes, near, problem, spec_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from meshpar.bench.found import Collectives, Row
    from meshpar.compiled.clock.timeline import Segment, Timeline
    from meshpar.compiled.memory import Memory
    from meshpar.compiled.report import Report
    from meshpar.pipeline.schedules import Schedule, ScheduleTimeline

Curve = Iterable[tuple[float, float]]
"""Points (step, value)."""

INK, FAINT = "#22303c", "#c9d1d9"
TRAIN, SMOOTH, VALID, BASELINE = "#c3d3e8", "#86a9d6", "#174f91", "#c2571a"
# One colour for each shard, light enough for dark numbers on it; more shards than colours begin again.
SHARDS = (
    "#8ecae6", "#ffd166", "#a8d8a0", "#f4a6a0", "#c9b6e4", "#f7c59f", "#9ad9d2", "#e6b8d3",
    "#bcd4f0", "#e9e08a", "#c6e5b1", "#f2c4ce", "#b3b9ea", "#e8cfa6", "#b7e4dc", "#d8c4e0",
)  # fmt: skip

MATMUL, KERNEL, WAITING = "#4a5c6d", "#aebac5", "#fdf3f0"
AXES = {"data": "#e0a32e", "stage": "#8f6bb3", "fsdp": "#2f7fc1", "expert": "#4a9e5c", "tensor": "#d1495b"}
"""One colour for each mesh axis, the same in every picture; other axes and products of axes take the next of `MORE`."""
MORE = ("#3aa6a0", "#b5651d", "#6c7fd8", "#9c8f2f", "#c77fb0", "#7d8a97")

MEMORY = {
    "parameters": "#4c78a8",
    "optimizer state": "#9ecae9",
    "gradients": "#54a24b",
    "other temporaries": "#b6dcae",
    "batch and the rest": "#8a8f98",
}
"""Parts of a device's memory, from the bottom up."""
KINDS = {"all-reduce": "", "all-gather": "....", "reduce-scatter": "////", "all-to-all": "xxxx"}
"""A hatch for each kind of collective; others take `OTHER_KIND`."""
OTHER_KIND = "||||"

MOST_NUMBERED = 64
"""Up to so many devices a picture names each."""


def loss_curve(
    *,
    train: Curve,
    valid: Curve = (),
    baselines: Mapping[str, float] | None = None,
    title: str = "",
    unit: str = "loss",
) -> Figure:
    """How the loss fell: training and validation over steps, baselines as horizontal lines.

    Args:
      train: the training loss; also drawn smoothed where it has many points.
      valid: the validation loss.
      baselines: name to value, in the same unit.
      title: above the picture.
      unit: of the vertical axis.
    """
    figure, axes = _figure(8.0, 4.5)
    steps, losses = _points(train)
    many = len(steps) >= 50
    axes.plot(steps, losses, color=TRAIN, lw=0.9 if many else 1.6, label="training")
    if many:
        axes.plot(steps, _smoothed(losses), color=SMOOTH, lw=2.2, label="training, smoothed")
    valid_steps, valid_losses = _points(valid)
    if len(valid_steps):
        label = f"held out ({valid_losses[-1]:.3f} at the end)"
        axes.plot(valid_steps, valid_losses, color=VALID, lw=1.8, marker="o", ms=4.5, label=label)
    for name, value in (baselines or {}).items():
        axes.axhline(value, color=BASELINE, lw=1.4, ls=(0, (5, 3)), label=f"{name} ({value:.3f})")
    _fit_height(axes, losses, [*valid_losses, *(baselines or {}).values()])
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    axes.legend(frameon=False)
    return figure


def sharding(
    spec: PartitionSpec,
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    *,
    names: Sequence[str | None] | None = None,
    title: str | None = None,
) -> Figure:
    """Where each piece of an array lives: the array cut as the mesh cuts it, each piece with its devices' numbers.

    Pieces of one colour are copies of the same part, held by the devices named on it. An array of more than two dims is
    drawn as a row of slices along the split ones among the others.

    Args:
      spec: how the array is split.
      shape: of the array.
      mesh: over which; an abstract mesh numbers its devices in mesh order.
      names: of the dims, for the labels.
      title: default: the shape and the spec.

    Raises:
      ValueError: a spec with more entries than dims, or a dim that does not divide.
    """
    cuts = _cuts(spec, shape, mesh)
    holders = _holders(spec, cuts, mesh)
    rows, columns, slices = _seen_flat(shape, cuts)
    width, height = _panel_size(shape, rows, columns)
    indices = list(itertools.product(*(range(cuts[dim]) for dim in slices)))
    figure, panels = _figure(width * len(indices) + 0.9, height + 1.1, columns=len(indices))
    labels = [_dim_label(dim, shape, cuts, spec, names) for dim in range(len(shape))]
    for panel, index in zip(np.atleast_1d(panels), indices, strict=True):
        _draw_slice(panel, dict(zip(slices, index, strict=True)), holders, cuts, shape, rows, columns)
        where = ", ".join(f"{labels[dim]}: part {part}" for dim, part in zip(slices, index, strict=True))
        panel.set_xlabel("\n".join(filter(None, (labels[columns] if columns is not None else "", where))), color=INK)
    first = np.atleast_1d(panels)[0]
    first.set_ylabel(labels[rows] if rows is not None else "", color=INK)
    shown = " × ".join(map(str, shape)) or "scalar"
    figure.suptitle(title or f"{shown}   {_spec_text(spec, len(shape))}", color=INK, fontweight="bold", fontsize=11)
    return figure


def timeline(timeline: Timeline, *, loop: str | None = None, title: str | None = None) -> Figure:
    """One layer on the clock: its kernels above, its collectives below, and where compute waits for them.

    Args:
      timeline: of a program, as `meshpar.compiled.clock.timeline.timeline` gives it.
      loop: name of the loop of which one iteration is drawn; None: the one that takes most of the step, or the whole
        program when it has no loop.
      title: default: what is drawn, and how long it takes.

    Raises:
      ValueError: the program has no loop of this name.
    """
    segment = _drawn(timeline, loop)
    scale, unit = _unit(segment)
    figure, axes = _figure(10.0, 3.9)
    per_inch = max(segment.duration_s, 1e-12) * scale / _TIMELINE_INCHES
    labels = sorted({op.label for op in segment.ops if op.label}, key=lambda label: (label not in AXES, label))
    colors = axis_colors(labels)
    axes.set_xlim(0, max(segment.duration_s, 1e-12) * scale)
    for start, end in _idle(segment):
        _bar(axes, 1, start * scale, end * scale, WAITING, edge=FAINT, hatch="////")
    for op in segment.ops:
        start, end = op.start_s * scale, op.end_s * scale
        if op.stream == "communication":
            _bar(axes, 0, start, end, colors[op.label])
            _name(axes, 0, start, end, op.kind, (end - start) / per_inch)
        else:
            _bar(axes, 1, start, end, MATMUL if op.kind == "matmul" else KERNEL)
    for start, end, name in _parts_of_model(segment):
        if _fitting(name, (end - start) * scale / per_inch, lines=1):
            _bracket(axes, start * scale, end * scale, name)
    axes.set_ylim(-0.5, 1.85)
    axes.set_yticks([1, 0], ["compute", "communication"])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(unit, color=INK)
    axes.set_title(title or _segment_title(timeline, segment), loc="left", color=INK, fontweight="bold", fontsize=11)
    _legend(figure, segment, colors)
    return figure


def axes_bytes(reports: Mapping[str, Report], *, title: str = "") -> Figure:
    """What a device sends in a step: a bar for each report, a colour for each mesh axis, a hatch for each kind.

    Parts that would not be seen, as a metric's few bytes, are left out.

    Args:
      reports: by label, drawn from the top down.
      title: above the picture.
    """
    sent = [_sent(report) for report in reports.values()]
    longest = max((sum(parts.values()) for parts in sent), default=0.0)
    scale, unit = next(((size, name) for size, name in _BYTES if longest >= size), (1.0, "bytes"))
    shown = {part for parts in sent for part, size in parts.items() if size > _UNSEEN * longest}
    labels = sorted({label for label, _ in shown}, key=lambda label: (label not in AXES, label))
    colors, kinds = axis_colors(labels), sorted({kind for _, kind in shown})
    figure, axes = _figure(9.0, 1.3 + 0.42 * len(sent))
    for row, parts in enumerate(sent):
        start = 0.0
        for label, kind in itertools.product(labels, kinds):
            size = parts.get((label, kind), 0.0) / scale * ((label, kind) in shown)
            axes.barh(
                row, size, left=start, height=0.64, color=colors[label], hatch=KINDS.get(kind, OTHER_KIND) or None,
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            start += size
        axes.text(start, row, f" {sum(parts.values()) / scale:.3g}", va="center", color=INK, fontsize=8)
    axes.set_yticks(range(len(sent)), list(reports))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} sent by each device in a step", color=INK)
    axes.set_title(title, loc="left", color=INK, fontweight="bold", fontsize=11)
    _axes_legend(figure, colors, kinds)
    return figure


def ring_steps(held: Any, *, title: str = "") -> Figure:
    """A ring all-reduce, step by step: whose terms each slot of each rank's buffer holds.

    One panel for the start and one after each step, a row for each rank, a column for each chunk; a cell names the
    ranks whose terms are in it, its colour says how many they are, and a dark edge that it has just arrived. The upper
    panels are the reduce-scatter, the lower ones the all-gather.

    Args:
      held: numbers [2N-1, N, N, N]: how often, after a step, a rank's chunk holds the term of each rank.
      title: above the picture.
    """
    states = np.asarray(held)
    num_ranks = states.shape[1]
    figure, panels = _figure(0.5 + 2.2 * num_ranks, 5.6, columns=num_ranks, rows=2)
    for spare in panels.flat[0 if num_ranks > 1 else 1 :]:
        spare.axis("off")
    places = [(0, column) for column in range(num_ranks)] + [(1, column) for column in range(1, num_ranks)]
    for step, (place, state) in enumerate(zip(places, states, strict=True)):
        panel = panels[place] if num_ranks > 1 else panels[0]
        panel.axis("on")
        _draw_slots(panel, state, arrived=(state != states[max(step - 1, 0)]).any(axis=-1))
        phase = "reduce-scatter" if step < num_ranks else "all-gather"
        panel.set_title(f"step {step}: {phase}" if step else "start", color=INK, fontsize=9)
        if place[1] == (0 if place[0] == 0 else 1):
            panel.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    _terms_legend(panels.flat[num_ranks] if num_ranks > 1 else panels[1], num_ranks)
    figure.suptitle(title, color=INK, fontweight="bold", fontsize=11)
    return figure


def collective_times(
    sizes_bytes: Sequence[float],
    times_s: Mapping[str, Sequence[float]],
    *,
    crossovers_bytes: Mapping[str, float] | None = None,
    title: str = "",
) -> Figure:
    """How long a collective takes, by size of the message: a line for each algorithm, both scales logarithmic.

    Args:
      sizes_bytes: of the message.
      times_s: algorithm to its time at each of these sizes.
      crossovers_bytes: sizes to mark, with what they are.
      title: above the picture.
    """
    figure, axes = _figure(8.0, 4.6)
    colors = axis_colors([f"algorithm {number}" for number in range(len(times_s))]).values()
    for (name, times), color, style in zip(times_s.items(), colors, itertools.cycle(_DASHES), strict=False):
        axes.plot(sizes_bytes, times, color=color, lw=2.0, ls=style, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for name, size in (crossovers_bytes or {}).items():
        axes.axvline(size, color=INK, lw=1.0, ls=(0, (2, 2)))
        axes.annotate(
            f"{name}\n{human_bytes(int(size))}", (size, 0.03), (5, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", color=INK, fontsize=9, va="bottom",
        )  # fmt: skip
    axes.xaxis.set_major_formatter(lambda size, _: human_bytes(int(size)))
    axes.yaxis.set_major_formatter(lambda time_s, _: _human_time(time_s))
    axes.set_xlim(min(sizes_bytes), max(sizes_bytes))
    axes.grid(color=FAINT, lw=0.5)
    axes.set_xlabel("bytes of the message", color=INK)
    axes.set_title(title, loc="left", color=INK, fontweight="bold", fontsize=11)
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def sent_by_link(sent_bytes: Mapping[str, Mapping[str, float]], *, title: str = "") -> Figure:
    """What goes over each kind of link: a group of bars for each algorithm, a bar in it for each kind.

    Args:
      sent_bytes: algorithm to kind of link to bytes.
      title: above the picture.
    """
    links = list(dict.fromkeys(link for parts in sent_bytes.values() for link in parts))
    colors = dict(zip(links, itertools.cycle((AXES["fsdp"], AXES["tensor"], *MORE)), strict=False))
    height = 0.8 / max(len(links), 1)
    figure, axes = _figure(9.0, 1.2 + 0.32 * len(sent_bytes) * max(len(links), 1))
    for row, parts in enumerate(sent_bytes.values()):
        for place, link in enumerate(links):
            at = row - 0.4 + (place + 0.5) * height
            axes.barh(at, parts.get(link, 0.0), height=0.9 * height, color=colors[link], label=link if not row else "")
            axes.text(
                parts.get(link, 0.0), at, " " + human_bytes(int(parts.get(link, 0.0))), va="center", color=INK,
                fontsize=8,
            )  # fmt: skip
    axes.set_yticks(range(len(sent_bytes)), list(sent_bytes))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title(title, loc="left", color=INK, fontweight="bold", fontsize=11)
    figure.legend(loc="outside lower center", ncols=max(len(links), 1), frameon=False, fontsize=9, labelcolor=INK)
    return figure


def attention_steps(
    chunks: Mapping[str, Any], shares: Mapping[str, Any], *, title: str = "attention round a ring"
) -> Figure:
    """Which chunks of keys every rank attends to at every step, and how much of that work a causal mask leaves.

    One panel for each order of the sequence, a row for each rank, a column for each step. Below a column stands the
    share of the rank that has most to do, for which all others wait.

    Args:
      chunks: order to numbers [rank, step, chunk]: the chunks of keys that are at a rank.
      shares: order to numbers [rank, step]: how much of the full product of queries and keys is left to compute.
      title: above the picture.
    """
    figure, panels = _figure(1.4 + 4.6 * len(chunks), 4.4, columns=len(chunks))
    for panel, (order, at_rank) in zip(np.atleast_1d(panels), chunks.items(), strict=True):
        work = np.asarray(shares[order])
        num_ranks, num_steps = work.shape
        longest = work.max(axis=0)
        panel.imshow(work, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
        for rank, step in np.ndindex(num_ranks, num_steps):
            text = "keys " + " ".join(map(str, np.asarray(at_rank)[rank, step])) + f"\n{work[rank, step]:.0%}"
            panel.text(step, rank, text, ha="center", va="center", color=INK, fontsize=8, linespacing=1.3)
        waits = [f"step {step}\n{share:.0%}" for step, share in enumerate(longest)]
        panel.set_xticks(range(num_steps), waits)
        panel.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
        panel.set_xticks(np.arange(1, num_steps) - 0.5, minor=True)
        panel.set_yticks(np.arange(1, num_ranks) - 0.5, minor=True)
        panel.grid(which="minor", color="white", lw=3)
        panel.tick_params(which="both", length=0)
        panel.spines[:].set_visible(False)
        panel.set_title(f"{order}: the longest steps add up to {longest.sum():.2f} blocks", color=INK, fontsize=10)
    figure.suptitle(title, color=INK, fontweight="bold", fontsize=11)
    return figure


def quantized_errors(
    blocks: Sequence[int], errors: Mapping[str, Sequence[float]], bounds: Mapping[str, Sequence[float]], *, title: str
) -> Figure:
    """How far numbers are off after quantization, by the elements that share a scale; dashed the bounds.

    Args:
      blocks: elements of a block.
      errors: format to the error at each of these.
      bounds: format to what it may be at most.
      title: above the picture.
    """
    figure, axes = _figure(8.0, 4.2)
    colors = dict(zip(errors, itertools.cycle((AXES["fsdp"], AXES["tensor"], *MORE)), strict=False))
    for name, found in errors.items():
        axes.plot(blocks, found, color=colors[name], lw=2, marker="o", ms=4, label=name)
        axes.plot(blocks, bounds[name], color=colors[name], lw=1.4, ls=(0, (5, 3)), label=f"{name}, bound")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(blocks, [str(block) for block in blocks])
    axes.minorticks_off()
    axes.grid(color=FAINT, lw=0.5)
    axes.set_xlabel("elements that share a scale", color=INK)
    axes.set_ylabel("error over size, root mean square", color=INK)
    axes.set_title(title, loc="left", color=INK, fontweight="bold", fontsize=11)
    axes.legend(frameon=False, labelcolor=INK, ncols=len(errors), fontsize=9)
    return figure


def axis_colors(labels: Sequence[str]) -> dict[str, str]:
    """A colour for each label of mesh axes: `fsdp`, `data*fsdp`."""
    others = itertools.cycle(MORE)
    return {label: AXES[label] if label in AXES else next(others) for label in labels}


def memory(reports: Mapping[str, Memory], *, title: str = "memory of one device") -> Figure:
    """What fills a device, stacked, against the GPU's limit; several programs side by side.

    Args:
      reports: label to the account of its memory (`report.memory`).
      title: above the picture.

    Raises:
      ValueError: no report.
    """
    if not reports:
        raise problem("plots.memory", "draw reports", "there are none", "give a label and a report.memory for each bar")
    figure, axes = _figure(3.6 + 1.4 * len(reports), 4.8)
    shares = [_memory_shares(report) for report in reports.values()]
    top = np.zeros(len(reports))
    for number, (name, color) in enumerate(MEMORY.items()):
        heights = np.array([share[number] for share in shares], dtype=float)
        axes.bar(
            range(len(reports)), heights, bottom=top, width=0.62, color=color, label=name, edgecolor="white", lw=0.8
        )
        top += heights
    limits = [report.limit_bytes for report in reports.values()]
    highest = max([*top, *(limit for limit in limits if limit is not None)])
    for place, (report, limit) in enumerate(zip(reports.values(), limits, strict=True)):
        over = limit is not None and not report.fits
        text = human_bytes(report.peak_bytes) + (" – too much" if over else "")
        axes.annotate(
            text, (place, top[place]), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=9,
            color=BASELINE if over else INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    _draw_limits(axes, limits)
    axes.set_xticks(range(len(reports)), list(reports))
    axes.set_xlim(-0.6, len(reports) - 0.4)
    axes.set_ylim(0, 1.12 * highest or 1)
    axes.yaxis.set_major_formatter(lambda value, _: human_bytes(value) if value else "0")
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right center", frameon=False, fontsize=9, labelcolor=INK)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Curves
# ---------------------------------------------------------------------------------------------------------------------


ALGORITHMS = {
    "XLA": INK,
    "ring": "#2f7fc1",
    "bidirectional": "#8ecae6",
    "recursive_doubling": "#d1495b",
    "recursive_halving": "#d1495b",
    "halving_doubling": "#e0a32e",
    "tree": "#4a9e5c",
    "hierarchical": "#8f6bb3",
    "direct": "#2f7fc1",
}
"""One colour for each algorithm of a collective; others take the next of `MORE`."""


def collectives(found: Collectives, *, title: str | None = None) -> Figure:
    """Time of a collective against its size, measured (points, quartiles as bars) and by the fitted model (dashed).

    One panel for each collective and mesh axis. Where ring and recursive doubling cross by the model, a vertical line.

    Args:
      found: what `meshpar.bench.collectives` measured.
      title: above the picture.
    """
    cases = list(dict.fromkeys((row.collective, row.axis) for row in found.rows))
    columns = min(2, len(cases))
    lines = -(-len(cases) // columns)
    figure, panels = _figure(6.2 * columns, 4.2 * lines, columns=columns, rows=lines)
    more = iter(itertools.cycle(MORE))
    names = dict.fromkeys(row.algorithm for row in found.rows)
    colors = {name: ALGORITHMS.get(name) or next(more) for name in names}
    flat = list(np.atleast_1d(panels).flat)
    for panel in flat[len(cases) :]:
        panel.set_axis_off()
    for (collective, axis), panel in zip(cases, flat, strict=False):
        rows = [row for row in found.rows if (row.collective, row.axis) == (collective, axis)]
        for name in dict.fromkeys(row.algorithm for row in rows):
            _draw_times(panel, [row for row in rows if row.algorithm == name], colors[name])
        if collective == "all_reduce":
            _draw_crossover(panel, found.crossover_bytes(axis), [row.size_bytes for row in rows])
        panel.set(xscale="log", yscale="log", xlabel="size", ylabel="time")
        _si_ticks(panel.xaxis, "B", (1.0,))
        _si_ticks(panel.yaxis, "s", (1.0, 3.0))
        panel.set_title(f"{collective} over {axis}={rows[0].num_ranks}", fontsize=10, color=INK)
        panel.legend(fontsize=8, frameon=False, ncols=2)
    figure.suptitle(f"{found.title}\nmeasured, and the fitted model (dashed)" if title is None else title, fontsize=11)
    return figure


def _draw_times(panel: Axes, rows: Sequence[Row], color: str) -> None:
    """One algorithm: medians with their quartiles, and what the model predicts."""
    sizes, times = [row.size_bytes for row in rows], [row.time_s for row in rows]
    bars = [[max(row.time_s - row.low_s, 0) for row in rows], [max(row.high_s - row.time_s, 0) for row in rows]]
    name = rows[0].algorithm
    panel.errorbar(sizes, times, yerr=bars, color=color, marker="o", ms=4, lw=1.5, elinewidth=0.8, label=name)
    model = [(row.size_bytes, row.predicted_s) for row in rows if row.predicted_s is not None]
    panel.plot(*_points(model), color=color, lw=1, ls="--", alpha=0.7)


def _draw_crossover(panel: Axes, crossover_bytes: float | None, sizes: Sequence[int]) -> None:
    if crossover_bytes is None or not min(sizes) / 10 <= crossover_bytes <= max(sizes) * 10:
        return  # out of sight, or nearly
    panel.axvline(crossover_bytes, color=FAINT, lw=1.5, zorder=0)
    panel.annotate(
        f"ring / recursive doubling\n{si(crossover_bytes, 'B', digits=3)}", (crossover_bytes, 0.02),
        xycoords=("data", "axes fraction"), ha="right", va="bottom", fontsize=8, color=INK,
        xytext=(-3, 0), textcoords="offset points",
    )  # fmt: skip


def _si_ticks(axis: Axis, unit: str, of_decade: tuple[float, ...]) -> None:
    """Some figures of each decade, written as `10 kB`, and nothing between them."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=of_decade, numticks=12))
    axis.set_major_formatter(lambda value, _: si(value, unit))
    axis.set_minor_formatter(NullFormatter())


def _figure(width: float, height: float, *, columns: int = 1, rows: int = 1) -> tuple[Figure, Any]:
    """A figure that no window and no global list of figures knows of."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns)
    for panel in np.atleast_1d(panels).flat:
        panel.tick_params(colors=INK, length=3)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            panel.spines[side].set_color(FAINT)
    return figure, panels


def _points(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    points = np.array(list(curve), dtype=float).reshape(-1, 2)
    return points[:, 0], points[:, 1]


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Each value with the mean of its neighbours, a fiftieth of the curve to either side."""
    reach = max(len(values) // 50, 1)
    sums = np.cumsum(np.concatenate([[0.0], values]))
    low = np.clip(np.arange(len(values)) - reach, 0, None)
    high = np.clip(np.arange(len(values)) + reach + 1, None, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _fit_height(axes: Axes, losses: np.ndarray, also: Sequence[float]) -> None:
    """Leave out the first steep drop, which would press everything else to the floor."""
    shown = np.array([*losses[len(losses) // 50 :], *also], dtype=float)
    shown = shown[np.isfinite(shown)]
    if len(shown) and shown.max() > shown.min():
        room = 0.08 * (shown.max() - shown.min())
        axes.set_ylim(shown.min() - room, shown.max() + room)


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


def _memory_shares(report: Memory) -> tuple[int, ...]:
    """Bytes of each part of `MEMORY`; together they are the peak."""
    others = report.temporaries_bytes - report.gradients_bytes
    rest = report.batch_bytes + report.other_bytes + report.output_bytes
    return report.params_bytes, report.optimizer_bytes, report.gradients_bytes, others, rest


def _draw_limits(axes: Axes, limits: Sequence[int | None]) -> None:
    """The GPU's memory: one line where all bars share it, else one over each bar."""
    known = [(place, limit) for place, limit in enumerate(limits) if limit is not None]
    style: dict[str, Any] = {"color": BASELINE, "lw": 1.4, "ls": (0, (5, 3))}
    if len(known) == len(limits) and len(set(limits)) == 1:
        axes.axhline(known[0][1], label=f"GPU memory ({human_bytes(known[0][1])})", **style)
        return
    for number, (place, limit) in enumerate(known):
        axes.plot([place - 0.42, place + 0.42], [limit, limit], label=None if number else "GPU memory", **style)


# ---------------------------------------------------------------------------------------------------------------------
# Shards
# ---------------------------------------------------------------------------------------------------------------------


def _cuts(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> list[int]:
    """Into how many parts each dim is cut."""
    sizes = axis_sizes(mesh)
    if len(spec) > len(shape):
        raise problem(
            f"plots.sharding of shape {tuple(shape)}",
            f"draw it as {spec}",
            f"it has {len(shape)} dims and the spec {len(spec)} entries",
            "give at most one entry per dim",
        )
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    cuts = [math.prod(sizes[axis] for axis in spec_axes(entry)) for entry in entries]
    for dim, (size, count) in enumerate(zip(shape, cuts, strict=True)):
        if size % count:
            raise problem(
                f"plots.sharding of shape {tuple(shape)}, dim {dim}",
                f"cut it into {count} parts over {entries[dim]!r}",
                f"{size} is not a multiple of {count}",
                f"draw {-(-size // count) * count}",
            )
    return cuts


def _holders(spec: PartitionSpec, cuts: Sequence[int], mesh: Mesh | AbstractMesh) -> dict[tuple[int, ...], list[int]]:
    """Numbers of the devices that hold each part, by the part's place."""
    sizes = axis_sizes(mesh)
    numbers = (
        np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
        if isinstance(mesh, Mesh)
        else np.arange(mesh.size).reshape(tuple(sizes.values()))
    )
    found: dict[tuple[int, ...], list[int]] = {}
    for place in np.ndindex(numbers.shape):
        at = dict(zip(sizes, place, strict=True))
        part = []
        for dim in range(len(cuts)):
            index = 0
            for axis in spec_axes(spec[dim]) if dim < len(spec) else ():  # the first axis named is the slowest
                index = index * sizes[axis] + at[axis]
            part.append(index)
        found.setdefault(tuple(part), []).append(int(numbers[place]))
    return found


def _seen_flat(shape: Sequence[int], cuts: Sequence[int]) -> tuple[int | None, int | None, list[int]]:
    """Which dim runs down, which one across, and along which others slices are drawn."""
    if len(shape) < 2:
        return None, (0 if shape else None), []
    split_first = sorted(range(len(shape)), key=lambda dim: (cuts[dim] == 1, -dim))
    rows, columns = sorted(split_first[:2])
    return rows, columns, [dim for dim in range(len(shape)) if dim not in (rows, columns) and cuts[dim] > 1]


def _panel_size(shape: Sequence[int], rows: int | None, columns: int | None) -> tuple[float, float]:
    """Inches, near the array's own proportions but never a thin line."""
    across = 1 if columns is None else shape[columns]
    down = max(across / 5, 1) if rows is None else shape[rows]
    ratio = min(max(across / down, 0.6), 2.4)
    return (3.4, 3.4 / ratio) if ratio > 1.2 else (2.7 * ratio, 2.7)


def _draw_slice(
    axes: Axes,
    fixed: Mapping[int, int],
    holders: Mapping[tuple[int, ...], list[int]],
    cuts: Sequence[int],
    shape: Sequence[int],
    rows: int | None,
    columns: int | None,
) -> None:
    from matplotlib.patches import Rectangle

    down, across = (1 if dim is None else cuts[dim] for dim in (rows, columns))
    order = {part: number for number, part in enumerate(sorted(holders))}
    num_devices = sum(map(len, holders.values()))
    for i, j in itertools.product(range(down), range(across)):
        place = {**fixed, **({rows: i} if rows is not None else {}), **({columns: j} if columns is not None else {})}
        part = tuple(place.get(dim, 0) for dim in range(len(shape)))
        color = SHARDS[order[part] % len(SHARDS)]
        axes.add_patch(Rectangle((j, i), 1, 1, facecolor=color, edgecolor="white", lw=2.5))
        axes.text(
            j + 0.5, i + 0.5, _device_text(holders[part], num_devices),
            ha="center", va="center", color=INK, fontsize=9 if max(down, across) <= 8 else 7, linespacing=1.25,
        )  # fmt: skip
    axes.set_xlim(0, across)
    axes.set_ylim(down, 0)
    for ticks, labels, dim, count in (
        (axes.set_xticks, axes.set_xticklabels, columns, across),
        (axes.set_yticks, axes.set_yticklabels, rows, down),
    ):
        roomy = count * len(str(shape[dim] if dim is not None else 0)) <= 24
        shown = range(count + 1) if roomy else (0, count)
        ticks([] if dim is None else list(shown))
        labels([] if dim is None else [str(shape[dim] * k // count) for k in shown])
    axes.spines[:].set_visible(False)


def _device_text(devices: Sequence[int], num_devices: int) -> str:
    if num_devices > MOST_NUMBERED:
        return f"{len(devices)} dev." if len(devices) > 1 else str(devices[0])
    lines = [", ".join(map(str, devices[k : k + 4])) for k in range(0, len(devices), 4)]
    return ("device " if len(devices) == 1 else "devices\n") + ",\n".join(lines)


def _dim_label(
    dim: int, shape: Sequence[int], cuts: Sequence[int], spec: PartitionSpec, names: Sequence[str | None] | None
) -> str:
    name = (names[dim] if names else None) or f"dim {dim}"
    axes = spec_axes(spec[dim]) if dim < len(spec) else ()
    return f"{name} ({shape[dim]})" + (f" over {' × '.join(axes)}" if cuts[dim] > 1 else "")


def _spec_text(spec: PartitionSpec, num_dims: int) -> str:
    entries = ["×".join(spec_axes(entry)) or "–" for entry in spec] + ["–"] * (num_dims - len(spec))
    return f"({', '.join(entries)})"


# ---------------------------------------------------------------------------------------------------------------------
# Timelines
# ---------------------------------------------------------------------------------------------------------------------


_TIMELINE_INCHES = 8.6
"""Width of a timeline's axes: what the labels leave of the figure's."""


def _drawn(timeline: Timeline, loop: str | None) -> Segment:
    if loop is None:
        return max(timeline.loops, key=lambda one: one.duration_s * (one.trip_count or 1), default=timeline.segments[0])
    named = {one.name: one for one in timeline.loops}
    if loop not in named:
        raise problem("plots.timeline", f"draw loop `{loop}`", "the program has no such loop", near(loop, named))
    return named[loop]


def _unit(segment: Segment) -> tuple[float, str]:
    """How many of a unit a second has, and its name."""
    return (1e3, "ms") if segment.duration_s >= 1e-3 else (1e6, "µs")


def _segment_title(timeline: Timeline, segment: Segment) -> str:
    scale, unit = _unit(segment)
    length = f"{segment.duration_s * scale:.3g} {unit} on {timeline.cluster}"
    if not segment.name:
        return f"one step: {length}"
    where = segment.module or segment.name
    times = f", {segment.trip_count} iterations" if segment.trip_count is not None else ""
    return f"one iteration of {where}, {'backward' if segment.is_backward else 'forward'}: {length}{times}"


def _idle(segment: Segment) -> list[tuple[float, float]]:
    """Where no kernel runs."""
    found, at = [], 0.0
    for op in sorted((op for op in segment.ops if op.stream == "compute"), key=lambda op: op.start_s):
        found.append((at, op.start_s))
        at = max(at, op.end_s)
    found.append((at, segment.duration_s))
    return [(start, end) for start, end in found if end - start > 1e-4 * segment.duration_s]


def _parts_of_model(segment: Segment) -> list[tuple[float, float, str]]:
    """(start, end, name) of the stretches in which kernels of one part of the model follow each other."""
    found: list[tuple[float, float, str]] = []
    for op in sorted((op for op in segment.ops if op.stream == "compute"), key=lambda op: op.start_s):
        name = op.module.removeprefix(segment.module).strip("/").split("/")[0]
        if not name or op.end_s - op.start_s < 0.01 * segment.duration_s:
            continue  # a kernel between two of another part does not tear them apart
        if found and found[-1][2] == name:
            found[-1] = (found[-1][0], op.end_s, name)
        else:
            found.append((op.start_s, op.end_s, name))
    return found


def _bar(axes: Axes, row: int, start: float, end: float, color: str, *, edge: str = "white", hatch: str = "") -> None:
    # A line around a sliver would hide it.
    width = 0.4 if end - start > 0.003 * axes.get_xlim()[1] else 0
    axes.barh(
        row, end - start, left=start, height=0.62, color=color, edgecolor=edge, linewidth=width, hatch=hatch or None
    )


def _name(axes: Axes, row: int, start: float, end: float, text: str, inches: float) -> None:
    """Writes on a bar: across if it is wide enough, else upwards, else not at all."""
    shown = _fitting(text, inches)
    if shown or inches >= 0.12:
        axes.text(
            (start + end) / 2, row, shown or text, ha="center", va="center", color="white", fontsize=7,
            linespacing=1.0, rotation=0 if shown else 90,
        )  # fmt: skip


def _bracket(axes: Axes, start: float, end: float, text: str) -> None:
    axes.plot([start, start, end, end], [1.37, 1.42, 1.42, 1.37], color=INK, lw=0.8, solid_joinstyle="miter")
    axes.text((start + end) / 2, 1.47, text, ha="center", va="bottom", color=INK, fontsize=8)


def _fitting(text: str, inches: float, *, lines: int = 2) -> str:
    """The text if it fits into a width, in two lines if that helps, or nothing."""
    for shown in [text, text.replace("-", "-\n", 1)][:lines]:
        if max(map(len, shown.split("\n"))) * 0.064 + 0.04 <= inches:
            return shown
    return ""


def _legend(figure: Figure, segment: Segment, colors: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    kinds = {op.kind for op in segment.ops if op.stream == "compute"}
    handles = [Patch(facecolor=MATMUL, label="matrix products")] if "matmul" in kinds else []
    handles += [Patch(facecolor=KERNEL, label="other kernels")] if kinds - {"matmul"} else []
    if _idle(segment):
        handles.append(Patch(facecolor=WAITING, edgecolor=FAINT, hatch="////", label="waiting"))
    handles += [Patch(facecolor=color, label=" × ".join(label.split("*"))) for label, color in colors.items()]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=max(len(handles), 1),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Collectives
# ---------------------------------------------------------------------------------------------------------------------

TERMS, COMPLETE = ("#f1f4f7", "#5b93c7"), "#7cc08a"
"""Colours of a partial sum, from one term to all but one, and of a whole one."""
_DASHES = ("-", "--", "-.", ":")


def _draw_slots(panel: Axes, state: np.ndarray, *, arrived: np.ndarray) -> None:
    from matplotlib.patches import Rectangle

    num_ranks = len(state)
    for rank, chunk in np.ndindex(num_ranks, num_ranks):
        holders = np.flatnonzero(state[rank, chunk])
        edge: dict[str, Any] = {"edgecolor": INK if arrived[rank, chunk] else "white", "lw": 1.6}
        color = _terms_color(int(state[rank, chunk].sum()), num_ranks)
        panel.add_patch(Rectangle((chunk - 0.47, rank - 0.47), 0.94, 0.94, facecolor=color, **edge))
        if num_ranks <= 6:
            text = "".join(map(str, holders))
            panel.text(chunk, rank, text, ha="center", va="center", color=INK, fontsize=8 if num_ranks <= 4 else 6)
    panel.set_xlim(-0.53, num_ranks - 0.47)
    panel.set_ylim(num_ranks - 0.47, -0.53)
    panel.set_aspect("equal")
    panel.set_xticks(range(num_ranks))
    panel.set_yticks([])
    panel.tick_params(length=0, labelsize=8)
    panel.spines[:].set_visible(False)
    panel.set_xlabel("chunk", color=INK, fontsize=8)


def _terms_color(terms: int, num_ranks: int) -> Any:
    from matplotlib.colors import to_rgb

    if terms == num_ranks:
        return COMPLETE
    share = (terms - 1) / max(num_ranks - 2, 1)
    return tuple((1 - share) * low + share * high for low, high in zip(*map(to_rgb, TERMS), strict=True))


def _terms_legend(panel: Axes, num_ranks: int) -> None:
    from matplotlib.patches import Patch

    words = {1: "1 term"} | {terms: f"{terms} terms" for terms in range(2, num_ranks)} | {num_ranks: "all terms"}
    handles = [Patch(facecolor=_terms_color(terms, num_ranks), label=word) for terms, word in words.items()]
    handles.append(Patch(facecolor="white", edgecolor=INK, lw=1.6, label="just arrived"))
    panel.legend(handles=handles, loc="center", frameon=False, labelcolor=INK, fontsize=9)


def _human_time(time_s: float) -> str:
    scale, unit = next(((size, unit) for size, unit in ((1, "s"), (1e-3, "ms")) if time_s >= size), (1e-6, "µs"))
    return f"{time_s / scale:.3g} {unit}"


# ---------------------------------------------------------------------------------------------------------------------
# Bytes
# ---------------------------------------------------------------------------------------------------------------------

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_UNSEEN = 0.002
"""Of the longest bar."""


def _sent(report: Report) -> dict[tuple[str, str], float]:
    """Bytes by (label of axes, kind)."""
    return {
        (label, kind): total.bytes_sent_per_device
        for label, kinds in report.totals.items()
        for kind, total in kinds.items()
    }


def _axes_legend(figure: Figure, colors: Mapping[str, str], kinds: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, label="over " + " × ".join(label.split("*"))) for label, color in colors.items()]
    handles += [
        Patch(facecolor=KERNEL, edgecolor="white", hatch=KINDS.get(kind, OTHER_KIND), label=kind) for kind in kinds
    ]
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False, fontsize=9,
            labelcolor=INK,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Pipelines
# ---------------------------------------------------------------------------------------------------------------------

OPS = {"F": "#8ecae6", "B": "#a8d8a0", "W": "#ffd166"}
"""Forward, gradient of the input, gradient of the weights; every other chunk is drawn darker."""
_OPS_DARK = {"F": "#5aa9d6", "B": "#6dbb6a", "W": "#e0a93b"}
_OPS_MEAN = {"F": "forward", "B": "backward: input", "W": "backward: weights"}
SCHEDULES = {
    "gpipe": "#7d8a97",
    "1f1b": "#22303c",
    "interleaved-1f1b": "#2f7fc1",
    "zb-h1": "#e0a32e",
    "zb-h2": "#d1495b",
    "zb-v": "#4a9e5c",
    "dualpipe": "#8f6bb3",
    "dualpipe-v": "#c77fb0",
}
"""One colour for each pipeline schedule; others take the next of `MORE`."""


def schedule(
    *schedules: Schedule, f: float = 1.0, b: float = 1.0, w: float = 1.0, comm: float = 0.0, lockstep: bool = False
) -> Figure:
    """Pipeline schedules on the clock, one above the other on one time axis: a line for each stage.

    Args:
      schedules: one or more.
      f: time of one stage's forward.
      b: of its gradient to the input.
      w: of its gradient to the weights.
      comm: of a message between neighbours.
      lockstep: whether all stages begin each tick together; otherwise each begins as soon as it can.
    """
    times = [one.simulate(f=f, b=b, w=w, comm=comm) for one in schedules]
    return schedule_times(
        [(one, found.lockstep if lockstep else found.free) for one, found in zip(schedules, times, strict=True)]
    )


def schedule_times(
    lines: Sequence[tuple[Schedule, ScheduleTimeline]], *, titles: Sequence[str] | None = None, unit: str = ""
) -> Figure:
    """Pipeline schedules on a clock, simulated or measured, one above the other on one time axis.

    Args:
      lines: schedules and their times.
      titles: of each; default: the schedule's name.
      unit: of the times.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [one.stages for one, _ in lines]
    longest = max(line.makespan for _, line in lines)
    figure = Figure(figsize=(12.0, 0.7 * len(lines) + 0.24 * sum(heights) + 0.8), layout="constrained")
    panels = figure.subplots(len(lines), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    names = [one.name for one, _ in lines] if titles is None else titles
    for panel, (one, line), name in zip(panels, lines, names, strict=True):
        _draw_schedule(panel, one, line, inches_per_unit=10.5 / longest)
        panel.set_title(
            f"{name}   makespan {f'{line.makespan:.4g} {unit}'.strip()}, bubble {line.bubble_fraction:.1%}, "
            f"of a stage's span {line.span_bubble_fraction:.1%}", loc="left", fontsize=9, color=INK, fontweight="bold",
        )  # fmt: skip
    panels[-1].set_xlim(0, max(np.nanmax(line.end) for _, line in lines) * 1.01)
    panels[-1].set_xlabel(f"time in {unit}" if unit else "time", color=INK)
    handles = [Patch(facecolor=OPS[kind], label=meaning) for kind, meaning in _OPS_MEAN.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _draw_schedule(panel: Axes, one: Schedule, line: ScheduleTimeline, *, inches_per_unit: float) -> None:
    for tick, stage in np.argwhere(one.busy).tolist():
        cell = one.cell(tick, stage)
        height = 0.9 / len(cell)
        for row, op in enumerate(cell):
            at = (tick, stage, op.number)
            start, length = line.start[at], line.end[at] - line.start[at]
            low = stage - 0.45 + row * height
            color = (_OPS_DARK if op.chunk % 2 else OPS)[op.kind]
            panel.broken_barh([(start, length)], (low, height), facecolors=color, edgecolors="white", linewidth=0.4)
            if length * inches_per_unit > 0.07 * len(str(op.microbatch)):
                size = 6.5 if len(cell) == 1 else 4.5
                middle = (start + length / 2, low + height / 2)
                panel.text(*middle, str(op.microbatch), ha="center", va="center", fontsize=size, color=INK)
    panel.set_yticks(range(one.stages), [f"stage {stage}" for stage in range(one.stages)], fontsize=7)
    panel.set_ylim(one.stages - 0.5, -0.5)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def schedule_curves(
    microbatches: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[float]]], *, title: str = ""
) -> Figure:
    """Numbers of pipeline schedules against the number of microbatches, a panel for each kind of number.

    Args:
      microbatches: where.
      panels: what is told -> schedule -> its numbers there. Lines that coincide share a label.
      title: above all panels.
    """
    figure, axes = _figure(6.2 * len(panels), 3.9, columns=len(panels))
    more = itertools.cycle(MORE)
    for panel, (what, curves) in zip(np.atleast_1d(axes).flat, panels.items(), strict=True):
        together: dict[tuple[float, ...], list[str]] = {}
        for name, values in curves.items():
            together.setdefault(tuple(round(float(value), 9) for value in values), []).append(name)
        for values, names in together.items():
            color = SCHEDULES.get(names[0]) or next(more)
            panel.plot(microbatches, values, color=color, lw=1.8, marker="o", ms=4, clip_on=False)
        panel.set_ylim(bottom=0)
        panel.set_xticks(microbatches)
        panel.grid(color=FAINT, lw=0.5)
        panel.set_xlabel("microbatches", color=INK)
        panel.set_title(what, loc="left", color=INK, fontsize=10)
        lines = panel.get_lines()
        ends = {", ".join(names): line for names, line in zip(together.values(), lines, strict=True)}
        _name_at_end(panel, ends)
    figure.suptitle(title, color=INK, fontweight="bold", fontsize=11)
    return figure


def _name_at_end(panel: Axes, lines: Mapping[str, Any]) -> None:
    """Each line's name at its right end, or as near as the others let it."""
    low, high = panel.get_ylim()
    named = sorted(lines.items(), key=lambda item: item[1].get_ydata()[-1])
    heights = _apart([line.get_ydata()[-1] for _, line in named], room=0.062 * (high - low), low=low)
    for (name, line), height in zip(named, heights, strict=True):
        panel.annotate(
            name, (line.get_xdata()[-1], height), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8.5,
            color=line.get_color(), annotation_clip=False,
        )  # fmt: skip


def _apart(values: Sequence[float], *, room: float, low: float) -> list[float]:
    """These rising values moved as little as it takes to have so much room between them; none below `low`."""
    groups: list[tuple[float, int]] = []
    """Mean of what stands side by side, less its place in the row times `room`; how many."""
    for at, value in enumerate(values):
        mean, count = value - at * room, 1
        while groups and groups[-1][0] > mean:
            before, more = groups.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        groups.append((mean, count))
    means = [mean for mean, count in groups for _ in range(count)]
    return [max(mean, low) + at * room for at, mean in enumerate(means)]


# ---------------------------------------------------------------------------------------------------------------------
# Experts
# ---------------------------------------------------------------------------------------------------------------------

_LOAD_COLORS = ((0.0, "#2f6ea5"), (0.35, "#9cc3de"), (0.5, "#f7f6f2"), (0.65, "#f3b48b"), (1.0, "#b2401f"))
"""Below the mean blue, above it red: read from 1/4 to 4 times the mean, evenly in its logarithm."""
_NO_LOAD = "#2b2b33"
_MOST_WRITTEN = 16
"""Up to so many experts each cell says its number, and every expert has a tick."""


def expert_load(
    load: Any, *, num_ranks: int = 1, rows: Sequence[str] | None = None, title: str = "load of experts"
) -> Figure:
    """How many tokens each expert got, layer by layer, in multiples of its layer's mean: white is even.

    With several ranks, lines stand between their experts, and bars beside the picture show the busiest rank of each
    layer, which the others wait for.

    Args:
      load: tokens [layers, experts], as `moe.measure(...).experts.tokens` stacked over layers.
      num_ranks: of the mesh axis that the experts are split over.
      rows: what the rows are, when they are not layers of one model.
      title: above the picture.

    Raises:
      ValueError: a load that is not [layers, experts], or experts that cannot be split so.
    """
    load = np.asarray(load, float)
    _check_load(load, num_ranks)
    layers, experts = load.shape
    over_mean = load / np.maximum(load.mean(1, keepdims=True), np.finfo(float).tiny)
    figure, (axes, *beside) = _load_panels(layers, experts, num_ranks)
    image = _draw_load(axes, over_mean, num_ranks)
    if rows is not None:
        axes.set_yticks(range(layers), rows)
        axes.set_ylabel("")
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    none = ", none: black" if (load == 0).any() else ""
    bar = figure.colorbar(image, ax=[axes, *beside], extend="both", aspect=30, pad=0.02, ticks=[0.25, 0.5, 1, 2, 4])
    bar.ax.set_yticklabels(["¼", "½", "1", "2", "4"], color=INK)
    bar.ax.minorticks_off()
    bar.set_label(f"tokens, in means of the layer{none}", color=INK, fontsize=8)
    bar.outline.set_visible(False)
    for panel in beside:
        _draw_busiest(panel, over_mean.reshape(layers, num_ranks, -1).mean(-1).max(1))
    return figure


def expert_curves(
    x: Sequence[float],
    measured: Mapping[str, Sequence[float]],
    expected: Mapping[str, Sequence[float]] | None = None,
    *,
    x_label: str,
    y_label: str,
    title: str,
    healthy: float | None = None,
    log_unit: str | None = None,
) -> Figure:
    """Numbers of experts against something, a line for each way; dots where a dashed formula says what they should be.

    Args:
      x: where.
      measured: way to the number at each of these.
      expected: way to what it should be, for some of the ways or others.
      x_label, y_label: what they are.
      title: above the picture.
      healthy: all is well up to here; a band is drawn.
      log_unit: unit of what is drawn; given, both scales are logarithmic.
    """
    figure, axes = _figure(8.0, 3.8)
    expected = expected or {}
    ways = dict.fromkeys((*measured, *expected))
    colors = dict(zip(ways, itertools.cycle((AXES["expert"], AXES["tensor"], AXES["fsdp"], *MORE)), strict=False))
    for name, values in measured.items():
        line = "none" if name in expected else "-"
        axes.plot(x, values, color=colors[name], lw=1.8, ls=line, marker="o" if len(x) <= 32 else "", ms=6, label=name)
    for name, values in expected.items():
        label = f"{name}, by formula" if name not in measured else f"_{name}, by formula"
        axes.plot(x, values, color=colors[name], lw=1.4, ls=(0, (5, 3)), label=label, zorder=1)
    if log_unit is not None:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.xaxis.minorticks_off()
        _si_ticks(axes.yaxis, log_unit, (1.0, 2.0, 5.0))
    else:
        axes.set_ylim(bottom=min(0.0, *(min(values) for values in measured.values())))
    if healthy is not None:
        axes.axhspan(0, healthy, color=AXES["expert"], alpha=0.12, lw=0, zorder=0)
        axes.text(x[0], healthy, " healthy", ha="left", va="top", color=INK, fontsize=8)
    axes.grid(color=FAINT, lw=0.5)
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.set_title(title, loc="left", color=INK, fontweight="bold", fontsize=11)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    return figure


def _check_load(load: np.ndarray, num_ranks: int) -> None:
    if load.ndim != 2 or not load.size:
        exists = "a load is [layers, experts], with something in it"
        raise problem("plots.expert_load", f"draw a load of shape {load.shape}", exists, "stack the loads of layers")
    if num_ranks < 1 or load.shape[1] % num_ranks:
        exists = f"there are {load.shape[1]} experts, and every rank has the same number"
        raise problem("plots.expert_load", f"split experts over {num_ranks} ranks", exists, "give a divisor of them")


def _load_panels(layers: int, experts: int, num_ranks: int) -> tuple[Figure, Sequence[Axes]]:
    """A panel for the load, as large as its cells need, and one for the busiest rank where there are several."""
    from matplotlib.figure import Figure

    wide, high = max(min(0.42 * experts, 10.0), 3.2) + 1.6, max(min(0.32 * layers, 8.0), 1.2) + 1.2
    sizes = [wide, 1.8] if num_ranks > 1 else [wide]
    figure = Figure(figsize=(sum(sizes), high), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True, width_ratios=sizes)[0]
    for panel in panels:
        panel.tick_params(colors=INK, length=3)
    return figure, panels


def _draw_load(axes: Axes, over_mean: np.ndarray, num_ranks: int) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    layers, experts = over_mean.shape
    colors = LinearSegmentedColormap.from_list("load", _LOAD_COLORS).with_extremes(bad=_NO_LOAD)
    seen = np.ma.masked_equal(over_mean, 0)
    image = axes.imshow(seen, cmap=colors, norm=LogNorm(0.25, 4), aspect="auto", interpolation="nearest")
    if experts <= _MOST_WRITTEN and layers <= 2 * _MOST_WRITTEN:
        for (layer, expert), value in np.ndenumerate(over_mean):
            ink = INK if 0.4 < value < 2.4 else "white"
            axes.text(expert, layer, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=ink)
    for rank in range(1, num_ranks):
        axes.axvline(rank * experts / num_ranks - 0.5, color=INK, lw=1.4)
    axes.set_xticks(range(0, experts, -(-experts // _MOST_WRITTEN)))
    axes.set_yticks(range(0, layers, -(-layers // _MOST_WRITTEN)))
    axes.spines[:].set_visible(False)
    axes.set_xlabel("expert" + f", {experts // num_ranks} at each rank" * (num_ranks > 1), color=INK)
    axes.set_ylabel("layer", color=INK)
    return image


def _draw_busiest(panel: Axes, over_mean: np.ndarray) -> None:
    panel.barh(np.arange(len(over_mean)), over_mean, height=0.7, color=AXES["expert"])
    panel.axvline(1.0, color=INK, lw=1.0, ls=(0, (4, 3)))
    if len(over_mean) <= 2 * _MOST_WRITTEN:
        for layer, value in enumerate(over_mean):
            panel.text(value, layer, f" {value:.2f}", va="center", fontsize=7, color=INK)
    panel.set_xlim(0, 1.35 * over_mean.max())
    panel.tick_params(axis="y", length=0, labelleft=False)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.spines["bottom"].set_color(FAINT)
    panel.set_xlabel("the busiest rank", color=INK)
