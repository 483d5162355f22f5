"""Plots with matplotlib. Functions take computed data and return a `Figure`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshpar.plots.style import (
    AXES,
    BASELINE,
    DASHED,
    FAINT,
    INK,
    KERNEL,
    KINDS,
    MATMUL,
    MEMORY,
    OPS,
    OPS_MEAN,
    OTHER_KIND,
    SMOOTH,
    TRAIN,
    VALID,
    WAITING,
    axis_colors,
    bar,
    figure_of,
    legend_below,
    mark,
    name_rows,
    si_ticks,
    styled,
)
from meshpar.sharding.errors import check_divides, problem
from meshpar.sharding.printing import flat
from meshpar.sharding.units import human_bytes, prefix_of, si

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from meshpar.hardware.collective_results import Collectives
    from meshpar.inspect.memory import Memory
    from meshpar.inspect.memory_timeline import MemoryTimeline
    from meshpar.inspect.report import Report
    from meshpar.inspect.timeline.simulator import Segment, Timeline
    from meshpar.planner.scaling import Growth
    from meshpar.schedules import Schedule, ScheduleTimeline

Curve = Iterable[tuple[float, float]]
"""Points (step, value)."""
MOST_PEAKS = 20
"""GPU memory above this multiple of the peak is not drawn, because the parts of the peak would be invisible."""


def _points(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    points = np.array(list(curve), dtype=float).reshape(-1, 2)
    return points[:, 0], points[:, 1]


# ---- Curves ----------------------------------------------------------------------------------------------------------


@styled
def loss_curve(
    *,
    train: Curve,
    valid: Curve = (),
    baselines: Mapping[str, float] | None = None,
    title: str = "",
    unit: str = "loss",
) -> Figure:
    """Plot training and validation loss over steps, with baselines as horizontal lines."""
    figure, (axes,) = figure_of(8.0, 4.5)
    steps, losses = _points(train)
    many = len(steps) >= 50
    axes.plot(steps, losses, color=TRAIN, lw=0.9 if many else 1.6, label="training")
    if many:
        window = np.ones(2 * (len(losses) // 50) + 1)
        smooth = np.convolve(losses, window, "same") / np.convolve(np.ones(len(losses)), window, "same")
        axes.plot(steps, smooth, color=SMOOTH, lw=2.2, label="training, smoothed")
    valid_steps, valid_losses = _points(valid)
    if len(valid_steps):
        label = f"validation ({valid_losses[-1]:.3f} at the end)"
        axes.plot(valid_steps, valid_losses, color=VALID, lw=1.8, marker="o", ms=4.5, label=label)
    for name, value in (baselines or {}).items():
        axes.axhline(value, color=BASELINE, lw=1.4, ls=DASHED, label=f"{name} ({value:.3f})")
    # The range excludes the steep drop at the start, which would flatten the rest.
    shown = np.array([*losses[len(losses) // 50 :], *valid_losses, *(baselines or {}).values()], float)
    shown = shown[np.isfinite(shown)]
    if len(shown) and np.ptp(shown) > 0:
        axes.set_ylim(shown.min() - 0.08 * np.ptp(shown), shown.max() + 0.08 * np.ptp(shown))
    axes.set(xlabel="step", ylabel=unit, title=title)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.legend()
    return figure


# ---- Compiled programs -----------------------------------------------------------------------------------------------

_TIMELINE_INCHES = 8.6
"""Width of the plot area of a timeline in inches, without the labels."""


@styled
def timeline(timeline: Timeline, *, title: str | None = None) -> Figure:
    """Plot the simulated timeline of a layer: kernels, collectives, and exposed communication.

    The plot shows an iteration of the innermost loop with communication that has the longest time per step. A program
    without loops is drawn completely.
    """
    sending = {loop.name for loop in timeline.loops if any(op.stream == "communication" for op in loop.ops)}
    loops = [loop for loop in timeline.loops if loop.name in sending and sending.isdisjoint(op.name for op in loop.ops)]
    longest = lambda loop: loop.duration_s * (loop.trip_count or 1)  # noqa: E731
    segment = max(loops or timeline.loops, key=longest, default=timeline.segments[0])
    scale, unit = (1e3, "ms") if segment.duration_s >= 1e-3 else (1e6, "µs")
    length = max(segment.duration_s, 1e-12) * scale
    labels = sorted({op.label for op in segment.ops if op.label}, key=lambda label: (label not in AXES, label))
    colors = axis_colors(labels)
    figure, (axes,) = figure_of(10.0, 3.9)
    name_rows(axes, ["compute", "communication"])
    axes.set(xlim=(0, length), ylim=(1.5, -0.85))
    waits = _idle(segment)
    for start, end in waits:
        bar(axes, 0, start * scale, end * scale, WAITING, edgecolors=FAINT, hatch="////")
    for op in segment.ops:
        start, end = op.start_s * scale, op.end_s * scale
        if op.stream == "communication":
            bar(axes, 1, start, end, colors[op.label])
            inches = (end - start) / length * _TIMELINE_INCHES
            if inches >= 0.12:  # vertical text needs less space
                turn, center = 0 if _fits(op.kind, inches) else 90, (start + end) / 2
                axes.text(center, 1, op.kind, ha="center", va="center", rotation=turn, color="white", fontsize=7)
        else:
            bar(axes, 0, start, end, MATMUL if op.kind == "matmul" else KERNEL)
    for start, end, name in _parts_of_model(segment):
        if _fits(name, (end - start) * scale / length * _TIMELINE_INCHES):
            a, b = start * scale, end * scale
            axes.plot([a, a, b, b], [-0.37, -0.42, -0.42, -0.37], color=INK, lw=0.8, solid_joinstyle="miter")
            axes.text((a + b) / 2, -0.47, name, ha="center", va="bottom", fontsize=8)
    axes.set(xlabel=unit, title=title or _segment_title(timeline, segment, f"{segment.duration_s * scale:.3g} {unit}"))
    kinds = {op.kind for op in segment.ops if op.stream == "compute"}
    legend: dict[str, Any] = {"matrix products": {"facecolor": MATMUL}} if "matmul" in kinds else {}
    legend |= {"other kernels": {"facecolor": KERNEL}} if kinds - {"matmul"} else {}
    legend |= {"waiting": {"facecolor": WAITING, "edgecolor": FAINT, "hatch": "////"}} if waits else {}
    legend_below(figure, legend | {" × ".join(label.split("*")): {"facecolor": c} for label, c in colors.items()})
    return figure


def _segment_title(timeline: Timeline, segment: Segment, length: str) -> str:
    length = f"{length} on {timeline.cluster}"
    if not segment.name:
        return f"one step: {length}"
    where = segment.module or segment.name
    times = f", {segment.trip_count} iterations" if segment.trip_count is not None else ""
    return f"one iteration of {where}, {'backward' if segment.is_backward else 'forward'}: {length}{times}"


def _idle(segment: Segment) -> list[tuple[float, float]]:
    gaps, busy_until_s = [], 0.0
    for op in sorted((op for op in segment.ops if op.stream == "compute"), key=lambda op: op.start_s):
        gaps.append((busy_until_s, op.start_s))
        busy_until_s = max(busy_until_s, op.end_s)
    gaps.append((busy_until_s, segment.duration_s))
    return [(start, end) for start, end in gaps if end - start > 1e-4 * segment.duration_s]


def _parts_of_model(segment: Segment) -> list[tuple[float, float, str]]:
    """Return (start, end, name) for each group of consecutive kernels of the same part of the model."""
    groups: list[tuple[float, float, str]] = []
    for op in sorted((op for op in segment.ops if op.stream == "compute"), key=lambda op: op.start_s):
        name = op.module.removeprefix(segment.module).strip("/").split("/")[0]
        if not name or op.end_s - op.start_s < 0.01 * segment.duration_s:
            continue  # short kernels do not interrupt the part around them
        if groups and groups[-1][2] == name:
            groups[-1] = (groups[-1][0], op.end_s, name)
        else:
            groups.append((op.start_s, op.end_s, name))
    return groups


def _fits(text: str, inches: float) -> bool:
    return len(text) * 0.064 + 0.04 <= inches


@styled
def axes_bytes(reports: Mapping[str, Report], *, title: str = "") -> Figure:
    """Plot the bytes that a device sends per step: a bar per report, colored by mesh axis and hatched by kind.

    Parts that are too small to see are left out.
    """
    sent = [
        {part: total.bytes_sent_per_device for part, total in flat(report.totals).items()}
        for report in reports.values()
    ]
    longest = max((sum(parts.values()) for parts in sent), default=0.0)
    prefix, scale = prefix_of(longest, digits=15)
    shown = {part for parts in sent for part, size in parts.items() if size > 0.002 * longest}
    labels = sorted({label for label, _ in shown}, key=lambda label: (label not in AXES, label))
    colors, kinds = axis_colors(labels), sorted({kind for _, kind in shown})
    figure, (axes,) = figure_of(9.0, 1.3 + 0.42 * len(sent))
    for row, parts in enumerate(sent):
        start = 0.0
        for label, kind in itertools.product(labels, kinds):
            size = parts.get((label, kind), 0.0) / scale * ((label, kind) in shown)
            hatch = KINDS.get(kind, OTHER_KIND) or None
            axes.barh(row, size, 0.64, start, color=colors[label], hatch=hatch, edgecolor="white", linewidth=0.5)
            start += size
        axes.text(start, row, f" {sum(parts.values()) / scale:.3g}", va="center", fontsize=8)
    name_rows(axes, reports)
    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    axes.set(xlabel=f"{f'{prefix}B' if prefix else 'bytes'} sent by each device in a step", title=title)
    legend = {"over " + " × ".join(label.split("*")): {"facecolor": color} for label, color in colors.items()}
    of_kind = {"facecolor": KERNEL, "edgecolor": "white"}
    legend_below(figure, legend | {kind: {**of_kind, "hatch": KINDS.get(kind, OTHER_KIND)} for kind in kinds})
    return figure


@styled
def memory(reports: Mapping[str, Memory]) -> Figure:
    """Plot the memory of a device for multiple programs: a bar per label, divided by contents, and the GPU's limit."""
    if not reports:
        fix = "pass a label and a report.memory for each bar"
        raise problem("plots.memory", "draw reports", "there are none", fix, code="missing-argument")
    figure, (axes,) = figure_of(3.6 + 1.4 * len(reports), 4.8)
    largest = max(report.peak_bytes for report in reports.values())
    for place, report in enumerate(reports.values()):
        parts = (
            report.params_bytes,
            report.optimizer_bytes,
            report.gradients_bytes,
            report.temporaries_bytes - report.gradients_bytes,
            report.batch_bytes + report.other_bytes + report.output_bytes,
        )
        top = 0
        for height, (name, color) in zip(parts, MEMORY.items(), strict=True):
            axes.bar(place, height, 0.62, top, color=color, label="_" * (place > 0) + name, edgecolor="white", lw=0.8)
            top += height
        over = report.limit_bytes is not None and not report.fits
        axes.annotate(
            human_bytes(report.peak_bytes) + (" – too much" if over else ""), (place, top), (0, 3),
            textcoords="offset points", ha="center", va="bottom", fontsize=9, color=BASELINE if over else INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
        if (limit := report.limit_bytes) is not None and limit <= MOST_PEAKS * largest:
            line = axes.plot([place - 0.42, place + 0.42], [limit, limit], color=BASELINE, lw=1.4, ls=DASHED)
            line[0].set_label(f"GPU memory ({human_bytes(limit)})")
    axes.set_xticks(range(len(reports)), list(reports))
    axes.set(xlim=(-0.6, len(reports) - 0.4), title="memory of one device")
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: human_bytes(value) if value else "0")
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.set_axisbelow(True)
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, reverse=True, loc="outside right center")
    return figure


MOST_MODULES = 8
"""Maximum number of modules with a colour of their own in a plot of memory over time."""


@styled
def memory_timeline(timeline: MemoryTimeline, *, limit_bytes: int | None = None) -> Figure:
    """Plot the memory of a step over time: state and batch, the temporaries of each module, and the peak."""
    figure, (axes,) = figure_of(10.0, 4.6)
    end = timeline.times_s[-1]
    scale, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    scale, unit = (scale, unit) if timeline.is_timed else (100.0, "% of the instructions")
    times = np.array(timeline.times_s) * scale
    modules = [*timeline.live_bytes.items()]
    shown = [(name, np.array(values)) for name, values in modules[:MOST_MODULES]]
    if rest := [values for _, values in modules[MOST_MODULES:]]:
        shown.append(("other modules", np.sum(rest, axis=0)))
    state = ("state and batch", np.full(len(times), timeline.argument_bytes))
    colors = [KERNEL, *axis_colors([name for name, _ in shown]).values()]
    axes.stackplot(times, [values for _, values in (state, *shown)], colors=colors, step="post", lw=0)
    peak = timeline.peak
    height = timeline.argument_bytes + int(timeline.totals[peak])
    axes.plot(times[peak], height, "o", ms=5, color=INK)
    axes.annotate(
        f"peak {human_bytes(height)}", (times[peak], height), (0, 5), textcoords="offset points", ha="center",
        va="bottom", fontsize=9, color=INK,
    )  # fmt: skip
    if limit_bytes is not None and limit_bytes > MOST_PEAKS * height:
        limit_bytes = None
    if limit_bytes is not None:
        axes.axhline(limit_bytes, color=BASELINE, lw=1.4, ls=DASHED)
        label = f"GPU memory ({human_bytes(limit_bytes)})"
        axes.text(times[-1], limit_bytes, label, ha="right", va="bottom", fontsize=9, color=BASELINE)
    axes.set(xlabel=f"simulated time ({unit})" if timeline.is_timed else unit, xlim=(0, times[-1]))
    axes.set_title("memory of one device during a step")
    axes.set_ylim(0, max(height, limit_bytes or 0) * 1.12)
    axes.yaxis.set_major_formatter(lambda value, _: human_bytes(value) if value else "0")
    axes.grid(axis="y", color=FAINT, lw=0.6)
    names = ["state and batch", *(name for name, _ in shown)]
    patches = {name: {"facecolor": color, "edgecolor": "white"} for name, color in zip(names, colors, strict=True)}
    legend_below(figure, patches)
    return figure


# ---- Collectives and scaling -----------------------------------------------------------------------------------------


@styled
def collectives(results: Collectives) -> Figure:
    """Plot the time of collectives over size: measured (points with quartiles) and by the fitted model (dashed).

    Each collective and mesh axis has a panel. A vertical line marks the size at which the ring and recursive doubling
    take the same time in the model.
    """
    cases = list(dict.fromkeys((row.collective, row.axis) for row in results.rows))
    columns = min(2, len(cases))
    lines = -(-len(cases) // columns)
    figure, panels = figure_of(6.2 * columns, 4.2 * lines, columns=columns, rows=lines)
    colors = axis_colors(dict.fromkeys(row.algorithm for row in results.rows))
    for panel in panels[len(cases) :]:
        panel.set_axis_off()
    for (collective, axis), panel in zip(cases, panels, strict=False):
        in_panel = [row for row in results.rows if (row.collective, row.axis) == (collective, axis)]
        for name in dict.fromkeys(row.algorithm for row in in_panel):
            rows = [row for row in in_panel if row.algorithm == name]
            sizes, times = [row.size_bytes for row in rows], np.array([row.time_s for row in rows])
            quartiles = np.array([[row.low_s for row in rows], [row.high_s for row in rows]])
            bars = np.maximum((times - quartiles[0], quartiles[1] - times), 0)
            style: dict[str, Any] = {"color": colors[name], "marker": "o", "ms": 4, "lw": 1.5, "elinewidth": 0.8}
            panel.errorbar(sizes, times, yerr=bars, label=name, **style)
            model = [(row.size_bytes, row.predicted_s) for row in rows if row.predicted_s is not None]
            panel.plot(*_points(model), color=colors[name], lw=1, ls="--", alpha=0.7)
        smallest, largest = min(row.size_bytes for row in in_panel), max(row.size_bytes for row in in_panel)
        crossover = results.crossover_bytes(axis) if collective == "all_reduce" else None
        if crossover is not None and smallest / 10 <= crossover <= largest * 10:  # otherwise it is far outside the plot
            mark(panel, f"ring / recursive doubling\n{si(crossover, 'B', digits=3)}", crossover)
        panel.set(xscale="log", yscale="log", xlabel="size", ylabel="time")
        si_ticks(panel.xaxis, "B", (1.0,))
        si_ticks(panel.yaxis, "s", (1.0, 3.0))
        panel.set_title(f"{collective} over {axis}={in_panel[0].num_ranks}", fontsize=10)
        panel.legend(fontsize=8, ncols=2)
    figure.suptitle(f"{results.title}\nmeasured, and the fitted model (dashed)")
    return figure


@styled
def growth(growth_report: Growth) -> Figure:
    """Plot tokens per second and GPU over the number of GPUs, for a constant and a growing batch.

    Each kind of layout has a line, which is dashed where the layout is inefficient.
    """
    scalings = list(dict.fromkeys(size.scaling for size in growth_report.sizes))
    figure, panels = figure_of(6.2 * len(scalings), 4.2, columns=len(scalings), rows=1)
    colors = axis_colors(growth_report.kinds)
    for scaling, panel in zip(scalings, panels, strict=True):
        for kind in growth_report.kinds:
            sizes, stops = growth_report.of(scaling, kind), growth_report.stops(scaling, kind)
            curve = [(size.num_gpus, size.tokens_per_s) for size in sizes]
            pays = [point for point in curve if stops is None or point[0] <= stops]
            if curve:
                panel.plot(*_points(curve), color=colors[kind], lw=1, ls="--", alpha=0.6)
                panel.plot(*_points(pays), color=colors[kind], lw=1.6, marker="o", ms=4, label=kind)
        batch = "the same batch" if scaling == "strong" else "the batch grows with the GPUs"
        panel.set(xscale="log", xlabel="GPUs", ylabel="tokens/s of one GPU", ylim=(0, None))
        panel.set_title(f"{scaling} scaling: {batch}", fontsize=10)
        ticks = sorted({size.num_gpus for size in growth_report.sizes})[::2]
        panel.set_xticks(ticks, [f"{num:,}" for num in ticks])
        panel.minorticks_off()
        panel.legend(fontsize=7)
    figure.suptitle(f"{growth_report.gpu}, dashed where a layout is inefficient")
    return figure


# ---- Pipelines -------------------------------------------------------------------------------------------------------


def schedule(*schedules: Schedule, f: float = 1.0, b: float = 1.0, w: float = 1.0, comm: float = 0.0) -> Figure:
    """Simulate pipeline schedules and plot each in a panel, with a row per stage.

    `f`, `b` and `w` are the durations of forward, input-gradient and weight-gradient ops, and `comm` of a message.
    """
    return schedule_times([(schedule, schedule.simulate(f=f, b=b, w=w, comm=comm).free) for schedule in schedules])


@styled
def schedule_times(
    lines: Sequence[tuple[Schedule, ScheduleTimeline]], *, titles: Sequence[str] | None = None, unit: str = ""
) -> Figure:
    """Plot simulated or measured timelines of pipeline schedules, each in a panel."""
    heights = [schedule.stages for schedule, _ in lines]
    height = 0.7 * len(lines) + 0.24 * sum(heights) + 0.8
    figure, panels = figure_of(12.0, height, rows=len(lines), sharex=True, height_ratios=heights)
    longest = max(np.nanmax(line.end) for _, line in lines) * 1.01
    panels[-1].set(xlim=(0, longest), xlabel=f"time in {unit}" if unit else "time")
    names = [schedule.name for schedule, _ in lines] if titles is None else titles
    for panel, (schedule, line), name in zip(panels, lines, names, strict=True):
        for tick, stage in np.argwhere(schedule.busy).tolist():
            cell = schedule.cell(tick, stage)
            height = 0.9 / len(cell)
            for row, op in enumerate(cell):
                start, end = (times[tick, stage, op.number] for times in (line.start, line.end))
                middle = stage - 0.45 + (row + 0.5) * height
                bar(panel, middle, start, end, OPS[op.kind][op.chunk % 2], height=height)
                if (end - start) * 10.5 / longest > 0.07 * len(str(op.microbatch)):  # inches
                    size = 6.5 if len(cell) == 1 else 4.5
                    panel.text((start + end) / 2, middle, str(op.microbatch), ha="center", va="center", fontsize=size)
        name_rows(panel, [f"stage {stage}" for stage in range(schedule.stages)], fontsize=7)
        makespan = f"{line.makespan:.4g} {unit}".strip()
        bubbles = f"bubble {line.bubble_fraction:.1%}, of a stage's span {line.span_bubble_fraction:.1%}"
        panel.set_title(f"{name}   makespan {makespan}, {bubbles}", fontsize=9)
    legend = {meaning: {"facecolor": OPS[kind][0]} for kind, meaning in OPS_MEAN.items()}
    num_chunks = max(schedule.chunks for schedule, _ in lines)
    if num_chunks > 1:
        chunks = "the second chunk" if num_chunks == 2 else "chunks 2, 4, …"
        legend |= {f"darker: {chunks} of a stage": {"facecolor": OPS["F"][1]}}
    legend_below(figure, legend)
    return figure


# ---- Experts ---------------------------------------------------------------------------------------------------------

_LOAD_COLORS = ((0.0, "#2f6ea5"), (0.35, "#9cc3de"), (0.5, "#f7f6f2"), (0.65, "#f3b48b"), (1.0, "#b2401f"))
"""Colors of loads from 1/4 to 4 times the mean, logarithmic: blue below the mean, red above it."""
_NO_LOAD = "#2b2b33"
_MOST_WRITTEN = 16
"""Maximum number of experts for which each cell shows its number and each expert has a tick."""


@styled
def expert_load(
    load: np.typing.ArrayLike, *, num_ranks: int = 1, rows: Sequence[str] | None = None, title: str = "load of experts"
) -> Figure:
    """Plot the load of experts per layer, as a multiple of the mean of the layer. White is the mean.

    With multiple ranks, lines separate their experts, and bars show the busiest rank of each layer. The load has the
    shape [layers, experts], as `moe.measure(...).experts.tokens` stacked over layers. `rows` are labels of the rows,
    by default the layers.
    """
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    load = np.asarray(load, float)
    layers, experts = load.shape
    check_divides("plots.expert_load", f"shard experts over {num_ranks} ranks", experts, num_ranks)
    over_mean = load / np.maximum(load.mean(1, keepdims=True), np.finfo(float).tiny)
    # The size follows from the cells. With multiple ranks, a panel shows the busiest rank.
    wide, high = max(min(0.42 * experts, 10.0), 3.2) + 1.6, max(min(0.32 * layers, 8.0), 1.2) + 1.2
    widths = [wide, 1.8] if num_ranks > 1 else [wide]
    figure, (axes, *more) = figure_of(sum(widths), high, columns=len(widths), sharey=True, width_ratios=widths)
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
    axes.set_yticks(range(0, layers, -(-layers // _MOST_WRITTEN)) if rows is None else range(layers), rows)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("expert" + f", {experts // num_ranks} at each rank" * (num_ranks > 1))
    axes.set_ylabel("layer" if rows is None else "")
    axes.set_title(title)
    bar = figure.colorbar(image, ax=[axes, *more], extend="both", aspect=30, pad=0.02, ticks=[0.25, 0.5, 1, 2, 4])
    bar.ax.set_yticklabels(["¼", "½", "1", "2", "4"], color=INK)
    bar.ax.minorticks_off()
    bar.set_label("tokens, in means of the layer" + ", none: black" * bool((load == 0).any()), fontsize=8)
    bar.outline.set_visible(False)
    for panel in more:
        busiest = over_mean.reshape(layers, num_ranks, -1).mean(-1).max(1)
        bars = panel.barh(np.arange(layers), busiest, height=0.7, color=AXES["expert"])
        panel.axvline(1.0, color=INK, lw=1.0, ls=(0, (4, 3)))
        if layers <= 2 * _MOST_WRITTEN:
            panel.bar_label(bars, fmt=" %.2f", fontsize=7)
        panel.set_xlim(0, 1.35 * busiest.max())
        panel.tick_params(axis="y", length=0, labelleft=False)
        panel.spines["left"].set_visible(False)
        panel.set_xlabel("the busiest rank")
    return figure
