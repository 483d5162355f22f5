"""Figures of notebook 03: ring all-reduce steps, bytes sent over each link, and ring attention."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from meshpar.plots.figures import AXES, INK, MORE, figure_of, styled
from meshpar.sharding.units import human_bytes

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
