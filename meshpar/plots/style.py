"""Style of all plots: colors, panels, axes and legends."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


_Given = ParamSpec("_Given")

INK, FAINT = "#22303c", "#c9d1d9"
STYLE: Any = {
    "figure.dpi": 120,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # labels are names and paths, which may contain dollar signs
}
"""Settings of matplotlib for all plots."""
TRAIN, SMOOTH, VALID, BASELINE = "#c3d3e8", "#86a9d6", "#174f91", "#c2571a"

MATMUL, KERNEL, WAITING = "#4a5c6d", "#aebac5", "#fdf3f0"
AXES = {"data": "#e0a32e", "stage": "#8f6bb3", "fsdp": "#2f7fc1", "expert": "#4a9e5c", "tensor": "#d1495b"}
"""Colors of mesh axes. All other labels use the colors of `MORE`, in order."""
MORE = (
    "#3aa6a0", "#b5651d", "#6c7fd8", "#9c8f2f", "#c77fb0", "#7d8a97", "#d1495b", "#2f7fc1", "#22303c", "#4a9e5c",
)  # fmt: skip
OPS = {"F": ("#8ecae6", "#5aa9d6"), "B": ("#a8d8a0", "#6dbb6a"), "W": ("#ffd166", "#e0a93b")}
"""Colors of forward pass, input gradient and weight gradient, on even and on odd chunks."""
OPS_MEAN = {"F": "forward", "B": "backward: input", "W": "backward: weights"}
MEMORY = {
    "parameters": "#4c78a8",
    "optimizer state": "#9ecae9",
    "gradients": "#54a24b",
    "other temporaries": "#b6dcae",
    "batch and the rest": "#8a8f98",
}
"""Colors of the parts of device memory, from bottom to top."""
KINDS = {"all-reduce": "", "all-gather": "\\\\\\\\", "reduce-scatter": "////", "all-to-all": "xxxx"}
"""Hatch pattern of each kind of collective. Other kinds use `OTHER_KIND`.

SVG files draw each dot as a path: a bar with dots needs 270 kB, and with lines 12 kB."""
OTHER_KIND = "||||"

MOST_NUMBERED = 64
"""Maximum number of devices that are labeled individually."""
DASHED = (0, (5, 3))


def styled(draw: Callable[_Given, Figure]) -> Callable[_Given, Figure]:
    """Decorate a plot function: draw with `STYLE`, independent of the matplotlib settings of the caller."""

    @functools.wraps(draw)
    def drawn(*args: _Given.args, **kwargs: _Given.kwargs) -> Figure:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def figure_of(
    width: float, height: float, *, columns: int = 1, rows: int = 1, **options: Any
) -> tuple[Figure, Sequence[Axes]]:
    """Return a new figure and its panels, row by row. `options` are further arguments of `Figure.subplots`.

    pyplot does not keep the figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    panels = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for panel in panels:  # ticks are created when the figure is saved, with the style of that time
        panel.tick_params(colors=INK, length=3)
    return figure, panels


def axis_colors(labels: Iterable[str]) -> dict[str, str]:
    """Return a color for each label. Mesh axes (`fsdp`) have fixed colors, others (`data*fsdp`, `ring`) use `MORE`."""
    others = itertools.cycle(MORE)
    return {label: AXES.get(label) or next(others) for label in labels}


def name_rows(axes: Axes, names: Iterable[str], **style: Any) -> None:
    """Label the rows of a plot, from top to bottom, without ticks."""
    names = list(names)
    axes.set_yticks(range(len(names)), names, **style)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def bar(panel: Axes, row: float, start: float, end: float, color: str, *, height: float = 0.62, **style: Any) -> None:
    """Draw a horizontal bar from `start` to `end`."""
    # An outline would hide a very short bar.
    width = 0.4 if end - start > 0.003 * panel.get_xlim()[1] else 0
    style = {"edgecolors": "white", "linewidth": width, **style}
    panel.broken_barh([(start, end - start)], (row - height / 2, height), facecolors=color, **style)


def legend_below(figure: Figure, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw a legend below the panels, from the patch style of each name."""
    from matplotlib.patches import Patch

    handles = [Patch(**style, label=name) for name, style in parts.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(max(len(handles), 1), 6))


def mark(axes: Axes, text: str, x: float) -> None:
    """Draw a vertical line at a value of x, with a text."""
    axes.axvline(x, color=INK, lw=1.0, ls=(0, (2, 2)), zorder=0)
    axes.annotate(
        text, (x, 0.02), (4, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
        fontsize=8, va="bottom",
    )  # fmt: skip


def si_ticks(axis: Axis, unit: str, of_decade: tuple[float, ...]) -> None:
    """Set ticks at the multiples `of_decade` of each power of ten, with labels such as `10 kB`."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=of_decade, numticks=12))
    axis.set_major_formatter(EngFormatter(unit))
    axis.set_minor_formatter(NullFormatter())
