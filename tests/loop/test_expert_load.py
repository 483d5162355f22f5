"""The load of experts is accumulated over steps, written to metrics.jsonl, and reported with advice."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest

from meshpar import plots
from meshpar.loop import expert_load as experts
from meshpar.loop.expert_load import LAYERS, ExpertLoad, layer_numbers, loads_of
from meshpar.loop.metrics_file import MetricsFile
from meshpar.loop.progress_bar import ProgressBar
from tests.errors import raises
from tests.loop.test_fit import FakeStep, run
from tests.loop.test_metrics_file import lines


def metrics_of(load, *, ranks=2, dropped=0.0, entropy=1.0):
    load = np.asarray(load, np.float32)
    layers = len(load)
    return {
        "moe/load": load,
        "moe/rank_load": load.reshape(layers, ranks, -1).sum(-1),
        "moe/drop_rate": np.full(layers, dropped, np.float32),
        "moe/router_entropy": np.full(layers, entropy, np.float32),
    }


class ExpertStep(FakeStep):
    """A step that returns the given loads in turn."""

    def __init__(self, loads):
        super().__init__()
        self.loads = loads

    def __call__(self, state, batch):
        load = self.loads[state.step]
        state, metrics = super().__call__(state, batch)
        return state, {**metrics, **load}


EVEN = metrics_of([[500, 500, 500, 500], [510, 490, 500, 500]])
UNEVEN = metrics_of([[500, 500, 500, 500], [1700, 100, 100, 100]])


def test_lines_contain_the_load_since_the_previous_report(tmp_path):
    path, hook = tmp_path / "metrics.jsonl", ExpertLoad(every=2)
    loads = [EVEN, metrics_of([[0, 0, 400, 600], [250, 250, 250, 250]], dropped=0.5, entropy=0.5), EVEN, EVEN, UNEVEN]
    run(5, step=ExpertStep(loads), hooks=[MetricsFile(path, also=hook.line), hook])
    written = lines(path)
    assert [LAYERS in line for line in written] == [False, True, False, True, True]
    first = written[1][LAYERS]
    assert first["expert_tokens"] == [[500, 500, 900, 1100], [760, 740, 750, 750]]
    assert first["rank_tokens"] == [[1000, 2000], [1500, 1500]]
    assert first["expert_max_over_mean"] == pytest.approx([1100 / 750, 760 / 750])
    assert first["expert_max_over_min"] == pytest.approx([1100 / 500, 760 / 740])
    assert first["expert_variation"][0] == pytest.approx(np.std([500, 500, 900, 1100]) / 750)
    assert first["rank_max_over_mean"] == pytest.approx([4 / 3, 1])
    assert first["drop_rate"] == [0.25, 0.25]
    assert first["router_entropy"] == [0.75, 0.75]
    assert written[3][LAYERS]["expert_tokens"][1] == [1020, 980, 1000, 1000]
    assert written[4][LAYERS]["expert_tokens"] == UNEVEN["moe/load"].tolist()


def test_loads_of_inverts_layer_numbers(tmp_path):
    path, hook = tmp_path / "metrics.jsonl", ExpertLoad(every=1)
    run(1, step=ExpertStep([UNEVEN]), hooks=[MetricsFile(path, also=hook.line), hook])
    (line,) = lines(path)
    loads = loads_of(line[LAYERS])
    assert layer_numbers(loads) == line[LAYERS]
    worst = experts.worst_layer(loads)
    assert (worst["expert_max_over_mean"], worst["rank_max_over_mean"], worst["drop_rate"]) == (3.4, 1.8, 0.0)
    assert {name: line[f"moe/{name}"] for name in worst} == worst
    figure = plots.expert_load(loads.experts.tokens, num_ranks=2)
    assert "1.80" in [text.get_text().strip() for text in figure.axes[1].texts]


def test_advice_is_printed_when_it_first_applies():
    out = io.StringIO()
    run(6, step=ExpertStep([EVEN, UNEVEN, UNEVEN, EVEN, EVEN, UNEVEN]), hooks=[ExpertLoad(every=1, stream=out)])
    printed = out.getvalue().splitlines()
    assert [line.split(":")[0] for line in printed] == ["step 2", "step 2", "step 6", "step 6"]
    assert "layer 1 is imbalanced: the busiest expert gets 17 times" in printed[0]
    assert "over ranks" in printed[1]


def test_worst_layer_is_shown_in_the_progress_bar():
    out, hook = io.StringIO(), ExpertLoad(every=1)
    load = metrics_of([[1, 3, 2, 2], [2, 2, 2, 2]], dropped=0.25)
    run(1, step=ExpertStep([load]), hooks=[hook, ProgressBar(stream=out, also=hook.words)])
    assert out.getvalue() == "step 1/1  loss 1  busiest expert 1.50x, rank 1.00x  25.0% dropped\n"


def test_nonfinite_values_are_written_as_none(tmp_path):
    path, hook = tmp_path / "metrics.jsonl", ExpertLoad(every=1)
    run(1, step=ExpertStep([metrics_of([[1, 2]], entropy=math.nan)]), hooks=[MetricsFile(path, also=hook.line), hook])
    (line,) = lines(path)
    assert line[LAYERS]["router_entropy"] == [None]
    assert np.isnan(loads_of(line[LAYERS]).router_entropy).all()


def test_model_without_experts_is_ignored(tmp_path):
    path, out = tmp_path / "metrics.jsonl", io.StringIO()
    hook = ExpertLoad(every=1, stream=out)
    run(2, hooks=[MetricsFile(path, also=hook.line), ProgressBar(stream=out, also=hook.words), hook])
    assert "expert" not in out.getvalue()
    assert not any(name.startswith("moe") for line in lines(path) for name in line)


@pytest.mark.parametrize("every", [0, -1, True, 1.5])
def test_every_is_a_positive_integer(every):
    with raises("not-an-int", "ExpertLoad"):
        ExpertLoad(every=every)
