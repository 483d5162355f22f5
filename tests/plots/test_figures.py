"""Test that plots show the points, devices and bars of their data."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
from matplotlib.colors import to_hex

import meshpar as mp
from meshpar.inspect.census import Total
from meshpar.inspect.memory import Memory
from meshpar.inspect.memory_timeline import MemoryTimeline
from meshpar.inspect.timeline.simulator import Op, Segment, Timeline
from meshpar.plots import figures as plots
from meshpar.schedules import makers
from tests.errors import raises

MESH = mp.MeshSpec(fsdp=4, tensor=2)


def texts(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def devices_named(figure) -> list[int]:
    """Every device number written on a picture, in order."""
    return sorted(int(number) for text in texts(figure) for number in re.findall(r"\d+", text))


def test_loss_curve_draws_every_point_and_the_baseline():
    train = [(step, 5.0 / step) for step in range(1, 11)]
    figure = plots.loss_curve(train=train, valid=[(5, 1.5), (10, 0.75)], baselines={"bigram": 2.25}, unit="bits")
    (axes,) = figure.axes
    training, held_out, baseline = axes.lines
    assert np.asarray(training.get_xydata()).tolist() == [list(point) for point in train]
    assert np.asarray(held_out.get_xydata()).tolist() == [[5, 1.5], [10, 0.75]]
    assert list(baseline.get_ydata()) == [2.25, 2.25]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training", "validation (0.750 at the end)", "bigram (2.250)"]
    assert axes.get_ylabel() == "bits"


def test_a_long_curve_is_smoothed_and_ignores_nan():
    values = np.arange(100.0) ** 2
    values[99] = np.nan
    (axes,) = plots.loss_curve(train=enumerate(values)).axes
    smooth = np.asarray(axes.lines[1].get_ydata())
    assert smooth[50] == pytest.approx(values[48:53].mean())
    assert smooth[0] == pytest.approx(values[:3].mean())
    assert np.isfinite(axes.get_ylim()).all()


# Timelines


def op(name, stream, start_s, end_s, kind, label="", module=""):
    return Op(name=name, stream=stream, start_s=start_s, end_s=end_s, kind=kind, label=label, module=module)


LAYER = Segment(
    name="while.1", module="layers", is_backward=True, trip_count=4, duration_s=0.010,
    ops=(
        op("gather", "communication", 0.0, 0.004, "all-gather", "fsdp"),
        op("qkv", "compute", 0.001, 0.003, "matmul", module="layers/attention"),
        op("softmax", "compute", 0.004, 0.006, "kernel", module="layers/attention"),
        op("up", "compute", 0.006, 0.008, "matmul", module="layers/mlp"),
        op("reduce", "communication", 0.008, 0.010, "all-reduce", "data*fsdp"),
    ),
)  # fmt: skip
PROGRAM = dataclasses.replace(
    LAYER, name="", module="", is_backward=False, trip_count=1, ops=(op("w", "compute", 0, 0.04, "loop"),)
)
STEP = Timeline(
    cluster="h100:1x8", peak_flops_per_s=1e15, step_s=0.04, compute_s=0.016, memory_s=0.008,
    network_s={"fsdp": 0.016, "data*fsdp": 0.008}, hidden_s={"fsdp": 0.008, "data*fsdp": 0.0}, collectives=(),
    segments=(PROGRAM, LAYER),
)  # fmt: skip


def bars(figure):
    """Return (row, start, end) of each bar, with times in milliseconds, by color."""
    found = {}
    for bar in figure.axes[0].collections:
        box = bar.get_paths()[0].get_extents()
        span = (round((box.y0 + box.y1) / 2), round(box.x0, 3), round(box.x1, 3))
        found.setdefault(to_hex(bar.get_facecolor()[0]), []).append(span)
    return found


def test_a_timeline_shows_each_op_and_the_waiting():
    figure = plots.timeline(STEP)
    colors = plots.axis_colors(["fsdp", "data*fsdp"])
    assert bars(figure) == {
        plots.WAITING: [(0, 0, 1), (0, 3, 4), (0, 8, 10)],
        colors["fsdp"]: [(1, 0, 4)],
        plots.MATMUL: [(0, 1, 3), (0, 6, 8)],
        plots.KERNEL: [(0, 4, 6)],
        colors["data*fsdp"]: [(1, 8, 10)],
    }
    assert texts(figure) == ["all-gather", "all-reduce", "attention", "mlp"]
    (axes,) = figure.axes
    assert axes.get_xlabel() == "ms"
    assert axes.get_title(loc="left") == "one iteration of layers, backward: 10 ms on h100:1x8, 4 iterations"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["matrix products", "other kernels", "waiting", "fsdp", "data × fsdp"]
    figure.draw_without_rendering()
    sent = sorted((start, end) for row, start, end in itertools.chain(*bars(figure).values()) if row == 1)
    for text, (start, end) in zip(axes.texts[:2], sent, strict=True):  # names stay inside their bars
        box = text.get_window_extent().transformed(axes.transData.inverted())
        assert start <= box.x0
        assert box.x1 <= end


def test_names_with_dollar_signs_are_not_formulas():
    names = ["$x^2$", "_hidden", r"a\b$"]
    live = MemoryTimeline(
        argument_bytes=1, temporary_bytes=9, times_s=(0.0, 1.0), is_timed=True,
        live_bytes=dict.fromkeys(names, (1, 2)), arrays=(),
    )  # fmt: skip
    (legend,) = plots.memory_timeline(live).legends
    assert [text.get_text() for text in legend.get_texts()] == ["state and batch", *names]
    assert not any(text.get_parse_math() for text in legend.get_texts())


def test_a_timeline_shows_the_longest_innermost_loop():
    quick = dataclasses.replace(LAYER, name="while.2", is_backward=False, duration_s=0.005, ops=())
    outer = dataclasses.replace(LAYER, name="while.3", duration_s=1.0, ops=(op("while.1", "compute", 0, 1, "loop"),))
    nested = dataclasses.replace(STEP, segments=(STEP.segments[0], quick, outer, LAYER))
    assert "10 ms" in plots.timeline(nested).axes[0].get_title(loc="left")
    inner = dataclasses.replace(LAYER, name="while.4", duration_s=2.0, ops=(op("softmax", "compute", 0, 2, "kernel"),))
    layer = dataclasses.replace(LAYER, ops=(*LAYER.ops, op("while.4", "compute", 0, 2, "loop")))
    silent = dataclasses.replace(STEP, segments=(STEP.segments[0], layer, inner))  # a loop without communication
    assert "iteration of layers, backward: 10 ms" in plots.timeline(silent).axes[0].get_title(loc="left")
    figure = plots.timeline(dataclasses.replace(STEP, segments=STEP.segments[:1]))  # without loops
    assert figure.axes[0].get_title(loc="left") == "one step: 10 ms on h100:1x8"


def test_axes_keep_their_colours_and_no_two_labels_share_one():
    colors = plots.axis_colors(["tensor", "data*fsdp", "data", "context"])
    assert colors["tensor"] == plots.AXES["tensor"]
    assert colors["data"] == plots.AXES["data"]
    assert len(set(colors.values())) == 4


# Memory


def account(*parts: int, limit: int | None = None) -> Memory:
    """Parameters, optimizer state, gradients, other temporaries, batch, outputs, other state: their bytes."""
    params, optimizer, gradients, temporaries, batch, output, other = parts
    peak = sum(parts)
    return Memory(
        params_bytes=params, optimizer_bytes=optimizer, other_bytes=other, state_bytes=params + optimizer + other,
        batch_bytes=batch, gradients_bytes=gradients, temporaries_bytes=gradients + temporaries, output_bytes=output,
        peak_bytes=peak, limit_bytes=limit, fits=None if limit is None else peak <= limit,
    )  # fmt: skip


SMALL = (10, 20, 10, 5, 1, 1, 1)
LARGE = (40, 80, 40, 20, 4, 4, 4)


def test_memory_is_stacked_to_the_peak_with_the_limit():
    reports = {"ddp": account(*LARGE, limit=100), "zero3": account(*SMALL, limit=100)}
    figure = plots.memory(reports)
    (axes,) = figure.axes
    heights = [bar.get_height() for container in axes.containers for bar in container]
    assert heights == [40, 80, 40, 20, 12, 10, 20, 10, 5, 3]
    tops = [bar.get_y() + bar.get_height() for container in axes.containers[4::5] for bar in container]
    assert tops == [report.peak_bytes for report in reports.values()] == [192, 48]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["ddp", "zero3"]
    assert texts(figure) == ["192 B – too much", "48 B"]
    assert {tuple(line.get_ydata()) for line in axes.lines} == {(100, 100)}
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert sorted(names) == sorted([*plots.MEMORY, "GPU memory (100 B)"])
    assert axes.get_ylim()[1] > 192


@pytest.mark.parametrize(
    ("name", "entries"), [("1f1b", []), ("interleaved-1f1b", ["darker: the second chunk of a stage"])]
)
def test_schedule_explains_the_shade_of_chunks(name, entries):
    figure = plots.schedule(makers.make(name, stages=2, microbatches=4))
    assert [text.get_text() for text in figure.legends[0].get_texts()][3:] == entries


def test_each_bar_has_its_limit():
    reports = {"a": account(*SMALL, limit=100), "b": account(*SMALL, limit=60), "c": account(*SMALL)}
    (axes,) = plots.memory(reports).axes
    lines = [(line.get_xdata().mean(), *set(line.get_ydata())) for line in axes.lines]
    assert lines == [(0.0, 100), (1.0, 60)]


def test_a_distant_limit_is_not_drawn():
    (axes,) = plots.memory({"a": account(*SMALL, limit=48_000)}).axes
    assert not axes.lines
    assert axes.get_ylim()[1] < 100


def test_memory_of_nothing_is_an_error():
    with raises("missing-argument", "plots.memory"):
        plots.memory({})


# Bytes over each axis


@dataclasses.dataclass
class Sends:
    """What `axes_bytes` asks of a report."""

    totals: dict[str, dict[str, Total]]


def test_bars_are_as_long_as_the_bytes_sent():
    reports = {
        "ddp()": Sends({"data": {"all-reduce": Total(7, 8e6)}}),
        "fsdp()": Sends(
            {"fsdp": {"all-gather": Total(3, 2e6), "reduce-scatter": Total(3, 1e6), "all-reduce": Total(1, 9)}}
        ),
        "both": Sends({"fsdp": {"all-gather": Total(3, 2e6)}, "data*fsdp": {"collective-permute": Total(1, 4e6)}}),
    }
    figure = plots.axes_bytes(reports, title="bytes")
    (axes,) = figure.axes
    found = {}
    for bar in axes.patches:
        if bar.get_width():
            found.setdefault(round(bar.get_y() + bar.get_height() / 2), []).append((bar.get_x(), bar.get_width()))
    assert found == {0: [(0, 8)], 1: [(0, 2), (2, 1)], 2: [(0, 2), (2, 4)]}  # MB, end to end
    assert [label.get_text() for label in axes.get_yticklabels()] == list(reports)
    assert [text.strip() for text in texts(figure)] == ["8", "3", "6"]
    assert axes.get_xlabel().startswith("MB ")
    (legend,) = figure.legends
    names = {text.get_text() for text in legend.get_texts()}
    kinds = {"all-reduce", "all-gather", "reduce-scatter", "collective-permute"}
    assert names == {"over data", "over fsdp", "over data × fsdp"} | kinds
    by_kind = {bar.get_hatch() for bar in axes.patches if bar.get_width()}
    assert len(by_kind) == len(kinds)


def test_nothing_sent_is_a_bar_of_length_0():
    figure = plots.axes_bytes({"one device": Sends({})})
    assert [text.strip() for text in texts(figure)] == ["0"]


# Experts -------------------------------------------------------------------------------------------------------------


def test_loads_are_drawn_in_means_of_their_layer():
    load = [[30, 10, 10, 10], [5, 5, 5, 5], [0, 8, 4, 4]]
    figure = plots.expert_load(load, num_ranks=2, title="loads")
    axes, beside, _ = figure.axes
    (image,) = axes.images
    shown = np.ma.asarray(image.get_array())
    assert shown.filled(0).tolist() == [[2, 2 / 3, 2 / 3, 2 / 3], [1, 1, 1, 1], [0, 2, 1, 1]]
    assert shown.mask.sum() == 1
    assert [text.get_text() for text in axes.texts] == [f"{value:.2f}" for value in shown.filled(0).flat]
    assert [line.get_xdata()[0] for line in axes.lines] == [1.5]
    assert [bar.get_width() for bar in beside.patches] == pytest.approx([4 / 3, 1.0, 1.0])
    assert axes.get_title("left") == "loads"
    little, even, much = (np.array(image.cmap(image.norm(value))[:3]) for value in (0.25, 1.0, 4.0))
    assert (even > 0.9).all()  # white
    assert little[2] > little[0]  # blue
    assert much[0] > much[2]  # red


def test_loads_of_one_rank_and_of_many_experts():
    figure = plots.expert_load(np.ones((1, 64)))
    axes, _ = figure.axes
    assert not axes.lines
    assert not axes.texts
    assert axes.get_yticks().tolist() == [0]
    assert axes.get_xticks().tolist() == list(range(0, 64, 4))


def test_rows_of_loads_can_have_names():
    (axes, _) = plots.expert_load(np.ones((2, 4)), rows=("before", "after")).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["before", "after"]
    assert axes.get_ylabel() == ""


def test_experts_must_be_divisible_by_the_ranks():
    with raises("indivisible", "plots.expert_load"):
        plots.expert_load([[1, 2, 3]], num_ranks=2)


# Pipelines -----------------------------------------------------------------------------------------------------------


def test_a_measured_timeline_is_drawn_where_its_ops_were():
    one = mp.pipeline.make("1f1b", 2, 4)
    simulated = one.simulate().free
    late = dataclasses.replace(simulated, start=10 * simulated.start, end=10 * simulated.end, busy=10 * simulated.busy)
    figure = plots.schedule_times([(one, simulated), (one, late)], titles=["theory", "measured"], unit="ms")
    above, below = figure.axes
    assert "theory   makespan 15 ms" in above.get_title(loc="left")
    assert "measured   makespan 150 ms" in below.get_title(loc="left")
    ends = [
        max(path.get_extents().x1 for bars in panel.collections for path in bars.get_paths())
        for panel in (above, below)
    ]
    assert ends == [15, 150]
    assert below.get_xlabel() == "time in ms"
    assert above.get_xlim()[1] > 150, "the longest is seen whole"
