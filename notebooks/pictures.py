"""Pictures of notebook 03: a ring step by step, what goes over which link, attention round a ring."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from meshpar.cli.plots import AXES, INK, MORE, figure_of, styled
from meshpar.sharding.units import human_bytes

TERMS, COMPLETE = ("#f1f4f7", "#5b93c7"), "#7cc08a"
"""Colours of a partial sum, from one term to all but one, and of a complete one."""


@styled
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
    """What goes over each kind of link: a group of bars for each algorithm, a bar in it for each kind.

    Args:
      sent_bytes: algorithm to kind of link to bytes.
      title: above the picture.
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
