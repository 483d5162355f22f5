"""Figures of the notebooks: curves, shards, ring all-reduce steps, bytes sent over each link, and ring attention."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from meshpar.plots.style import AXES, DASHED, FAINT, INK, MORE, axis_colors, bar, figure_of, mark, si_ticks, styled
from meshpar.sharding.types import axis_sizes, spec_axes
from meshpar.sharding.units import human_bytes, si

TERMS, COMPLETE = ("#f1f4f7", "#5b93c7"), "#7cc08a"
"""Colors of partial sums (from 1 to N − 1 terms) and of complete sums."""


@styled
def ring_steps(counts: Any, *, title: str = "") -> Figure:
    """Draw the steps of a ring all-reduce.

    There is a panel for the initial state and for each step, with a row for each rank and a column for each chunk. A
    cell lists the ranks whose terms its partial sum includes. Its color shows the number of terms, and a dark edge
    marks chunks received in this step. The upper panels show the reduce-scatter, the lower panels the all-gather.

    Args:
      counts: array [2N-1, N, N, N] of the terms of each rank in each chunk of each rank, after each step.
      title: title of the figure.
    """
    states = np.asarray(counts)
    num_ranks = states.shape[1]
    figure, panels = figure_of(0.5 + 2.2 * num_ranks, 5.6, columns=num_ranks, rows=2)
    above, (legend, *below) = panels[:num_ranks], panels[num_ranks:]
    for step, (panel, state) in enumerate(zip((*above, *below), states, strict=True)):
        _draw_slots(panel, state, arrived=(state != states[max(step - 1, 0)]).any(axis=-1))
        phase = "reduce-scatter" if step < num_ranks else "all-gather"
        panel.set_title(f"step {step}: {phase}" if step else "start", fontsize=9, fontweight="normal")
    for panel in (*above[:1], *below[:1]):
        panel.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    words = {1: "1 term"} | {terms: f"{terms} terms" for terms in range(2, num_ranks)} | {num_ranks: "all terms"}
    handles = [Patch(facecolor=_terms_color(terms, num_ranks), label=word) for terms, word in words.items()]
    handles.append(Patch(facecolor="white", edgecolor=INK, lw=1.6, label="just arrived"))
    legend.axis("off")
    legend.legend(handles=handles, loc="center")
    figure.suptitle(title)
    return figure


def _draw_slots(panel: Axes, state: np.ndarray, *, arrived: np.ndarray) -> None:
    num_ranks = len(state)
    for rank, chunk in np.ndindex(num_ranks, num_ranks):
        edge: dict[str, Any] = {"edgecolor": INK if arrived[rank, chunk] else "white", "lw": 1.6}
        color = _terms_color(int(state[rank, chunk].sum()), num_ranks)
        panel.add_patch(Rectangle((chunk - 0.47, rank - 0.47), 0.94, 0.94, facecolor=color, **edge))
        if num_ranks <= 6:
            text = "".join(map(str, np.flatnonzero(state[rank, chunk])))
            panel.text(chunk, rank, text, ha="center", va="center", fontsize=8 if num_ranks <= 4 else 6)
    low, high = -0.53, num_ranks - 0.47
    panel.set(xlim=(low, high), ylim=(high, low), aspect="equal", xticks=range(num_ranks), yticks=[], xlabel="chunk")
    panel.tick_params(length=0, labelsize=8)
    panel.spines[:].set_visible(False)


def _terms_color(terms: int, num_ranks: int) -> Any:
    if terms == num_ranks:
        return COMPLETE
    return LinearSegmentedColormap.from_list("terms", TERMS)((terms - 1) / max(num_ranks - 2, 1))


@styled
def sent_by_link(sent_bytes: Mapping[str, Mapping[str, float]], *, title: str = "") -> Figure:
    """Draw the bytes sent over each kind of link, as a group of bars for each algorithm.

    Args:
      sent_bytes: for each algorithm, the bytes for each kind of link.
      title: title of the figure.
    """
    links = list(dict.fromkeys(link for parts in sent_bytes.values() for link in parts))
    colors = dict(zip(links, itertools.cycle((AXES["fsdp"], AXES["tensor"], *MORE)), strict=False))
    height = 0.8 / max(len(links), 1)
    figure, (axes,) = figure_of(9.0, 1.2 + 0.32 * len(sent_bytes) * max(len(links), 1))
    for place, link in enumerate(links):
        sizes = [parts.get(link, 0.0) for parts in sent_bytes.values()]
        rows = np.arange(len(sizes)) - 0.4 + (place + 0.5) * height
        bars = axes.barh(rows, sizes, height=0.9 * height, color=colors[link], label=link)
        axes.bar_label(bars, [human_bytes(int(size)) for size in sizes], padding=3, fontsize=8)
    axes.set_yticks(range(len(sent_bytes)), list(sent_bytes))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(left=0)
    axes.margins(x=0.1)
    axes.set(xticks=[], title=title)
    axes.spines["bottom"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=max(len(links), 1))
    return figure


@styled
def attention_steps(chunks: Mapping[str, Any], shares: Mapping[str, Any], *, title: str = "ring attention") -> Figure:
    """Draw the key chunks and the causal work of each rank in each step of ring attention.

    There is a panel for each order of the sequence, with a row for each rank and a column for each step. The label of a
    column shows the work of the slowest rank, which determines the duration of the step.

    Args:
      chunks: for each order, an array [rank, step, chunk] with the indices of the key chunks.
      shares: for each order, an array [rank, step] with the unmasked fraction of the attention scores.
      title: title of the figure.
    """
    figure, panels = figure_of(1.4 + 4.6 * len(chunks), 4.4, columns=len(chunks))
    for panel, (order, at_rank) in zip(panels, chunks.items(), strict=True):
        work = np.asarray(shares[order])
        num_ranks, num_steps = work.shape
        longest = work.max(axis=0)
        panel.imshow(work, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
        for rank, step in np.ndindex(num_ranks, num_steps):
            text = "keys " + " ".join(map(str, np.asarray(at_rank)[rank, step])) + f"\n{work[rank, step]:.0%}"
            panel.text(step, rank, text, ha="center", va="center", fontsize=8, linespacing=1.3)
        panel.set_xticks(range(num_steps), [f"step {step}\n{share:.0%}" for step, share in enumerate(longest)])
        panel.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
        panel.set_xticks(np.arange(1, num_steps) - 0.5, minor=True)
        panel.set_yticks(np.arange(1, num_ranks) - 0.5, minor=True)
        panel.grid(which="minor", color="white", lw=3)
        panel.tick_params(which="both", length=0)
        panel.spines[:].set_visible(False)
        panel.set_title(f"{order}: the longest steps add up to {longest.sum():.2f} blocks", fontsize=10)
    figure.suptitle(title)
    return figure


# ---- Curves and shards -----------------------------------------------------------------------------------------------

# Colors of shards, light enough for dark numbers. They repeat if there are more shards.
SHARDS = (
    "#8ecae6", "#ffd166", "#a8d8a0", "#f4a6a0", "#c9b6e4", "#f7c59f", "#9ad9d2", "#e6b8d3",
    "#bcd4f0", "#e9e08a", "#c6e5b1", "#f2c4ce", "#b3b9ea", "#e8cfa6", "#b7e4dc", "#d8c4e0",
)  # fmt: skip
MOST_NUMBERED = 64
"""Maximum number of devices that are labeled individually."""


@styled
def curves(
    x: Sequence[float],
    measured: Mapping[str, Sequence[float]],
    expected: Mapping[str, Sequence[float]] | None = None,
    *,
    x_label: str = "",
    y_label: str = "",
    title: str = "",
    log: bool = False,
    x_unit: str | None = None,
    y_unit: str | None = None,
    marks: Mapping[str, float] | None = None,
    healthy: float | None = None,
) -> Figure:
    """Plot measured lines, and dashed lines of formulas, by name.

    The ticks have SI units. If the scales are logarithmic and x has no unit, each value of x has a tick. `marks` are
    vertical lines by name, and `healthy` is the upper limit of a band of normal values.
    """
    figure, (axes,) = figure_of(8.0, 4.2)
    expected = expected or {}
    colors = dict(zip(dict.fromkeys((*measured, *expected)), itertools.cycle(MORE), strict=False))
    for name, values in measured.items():
        line = "none" if name in expected else "-"
        axes.plot(x, values, color=colors[name], lw=1.8, ls=line, marker="o" if len(x) <= 32 else "", ms=6, label=name)
    for name, values in expected.items():
        label = f"{name}, by formula" if name not in measured else f"_{name}, by formula"
        axes.plot(x, values, color=colors[name], lw=1.4, ls=DASHED, label=label, zorder=1)
    if log:
        axes.set(xscale="log", yscale="log")
        if x_unit is None:
            axes.set_xticks(x, [f"{value:g}" for value in x])
            axes.xaxis.minorticks_off()
    else:
        axes.set_ylim(bottom=min(0.0, *(min(values) for values in measured.values())))
    for axis, unit, decade in ((axes.xaxis, x_unit, (1.0,)), (axes.yaxis, y_unit, (1.0, 2.0, 5.0))):
        if unit is not None:
            si_ticks(axis, unit, decade)
    for name, at in (marks or {}).items():
        mark(axes, f"{name}\n{si(at, x_unit or '', digits=3)}".strip(), at)
    if healthy is not None:
        axes.axhspan(0, healthy, color=AXES["expert"], alpha=0.12, lw=0, zorder=0)
        axes.text(x[0], healthy, " healthy", ha="left", va="top", fontsize=8)
    axes.grid(color=FAINT, lw=0.5)
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.legend()
    return figure


@styled
def schedule_curves(
    microbatches: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[float]]], *, title: str = ""
) -> Figure:
    """Plot quantities of pipeline schedules over the number of microbatches, with a panel per quantity.

    `panels` is quantity -> schedule -> values. Lines that coincide share a label.
    """
    figure, axes = figure_of(6.2 * len(panels), 3.9, columns=len(panels))
    colors = axis_colors(name for of_schedules in panels.values() for name in of_schedules)
    for panel, (quantity, of_schedules) in zip(axes, panels.items(), strict=True):
        together: dict[tuple[float, ...], list[str]] = {}
        for name, values in of_schedules.items():
            together.setdefault(tuple(round(float(value), 9) for value in values), []).append(name)
        for values, names in together.items():
            style: dict[str, Any] = {"color": colors[names[0]], "lw": 1.8, "marker": "o", "ms": 4}
            panel.plot(microbatches, values, label=", ".join(names), clip_on=False, **style)
        panel.set_ylim(bottom=0)
        panel.set_xticks(microbatches)
        panel.grid(color=FAINT, lw=0.5)
        panel.set_xlabel("microbatches")
        panel.set_title(quantity, fontsize=10, fontweight="normal")
        panel.legend(fontsize=8)
    figure.suptitle(title)
    return figure


@styled
def sharding(
    spec: PartitionSpec,
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    *,
    names: Sequence[str | None] | None = None,
) -> Figure:
    """Plot the shards of an array, with the numbers of the devices that have each shard.

    Two dims are drawn. If more dims are sharded, a cell lists the devices of all its shards along the other dims. The
    devices of an abstract mesh are numbered in mesh order. `names` of the dims are shown on the axes.
    """
    counts = [
        size // part for size, part in zip(shape, NamedSharding(mesh, spec).shard_shape(tuple(shape)), strict=True)
    ]
    axes_of = [*map(spec_axes, spec), *[()] * (len(shape) - len(spec))]
    sizes = axis_sizes(mesh)
    position = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    drawn = sorted(sorted(range(len(shape)), key=lambda dim: (counts[dim] == 1, -dim))[:2])
    dims: list[int | None] = [None, None, *drawn][-2:]
    devices = np.arange(mesh.size) if isinstance(mesh, AbstractMesh) else [device.id for device in mesh.devices.flat]
    cells: dict[tuple[int, ...], list[int]] = {}
    shard_of = [np.zeros(mesh.size, int), np.zeros(mesh.size, int)]
    for number, dim in enumerate(dims):
        for axis in () if dim is None else axes_of[dim]:  # the first axis varies slowest
            shard_of[number] = shard_of[number] * sizes[axis] + position[axis].ravel()
    for device, *cell in zip(devices, *shard_of, strict=True):
        cells.setdefault(tuple(map(int, cell)), []).append(int(device))
    down, across = (1 if dim is None else counts[dim] for dim in dims)
    # Similar to the proportions of the array, but never a thin line.
    ratio = 2.4 if len(shape) < 2 else min(max(shape[drawn[1]] / shape[drawn[0]], 0.6), 2.4)
    figure, (axes,) = figure_of(2.5 * ratio**0.5 + 0.9, 2.5 / ratio**0.5 + 1.1)
    for number, ((i, j), holders) in enumerate(sorted(cells.items())):
        bar(axes, i + 0.5, j, j + 1, SHARDS[number % len(SHARDS)], height=1, linewidth=2.5)
        size = 9 if max(down, across) <= 8 else 7
        text = _device_text(holders, mesh.size)
        axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=size, linespacing=1.25)
    axes.set(xlim=(0, across), ylim=(down, 0))
    for side, dim, count in ((axes.yaxis, dims[0], down), (axes.xaxis, dims[1], across)):
        if dim is None:
            side.set_ticks([])
            continue
        size = shape[dim]
        ticks = list(range(count + 1)) if count * len(str(size)) <= 24 else [0, count]
        side.set_ticks(ticks, [str(size * k // count) for k in ticks])
        over = f" over {' × '.join(axes_of[dim])}" if count > 1 else ""
        side.set_label_text(f"{(names and names[dim]) or f'dim {dim}'} ({size}){over}")
    axes.spines[:].set_visible(False)
    text = " × ".join(map(str, shape)) or "scalar"
    figure.suptitle(f"{text}   ({', '.join('×'.join(entry) or '–' for entry in axes_of)})")
    return figure


def _device_text(devices: Sequence[int], num_devices: int) -> str:
    if num_devices > MOST_NUMBERED:
        return f"{len(devices)} dev." if len(devices) > 1 else str(devices[0])
    lines = [", ".join(map(str, devices[k : k + 4])) for k in range(0, len(devices), 4)]
    return ("device " if len(devices) == 1 else "devices\n") + ",\n".join(lines)
