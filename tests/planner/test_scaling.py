"""Throughput of each kind of layout on a growing number of GPUs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar import plots
from meshpar.hardware.clusters import Link, parse_cluster
from meshpar.models import next_token_loss
from meshpar.planner.scaling import Growth, Size, grow, kind_of, with_examples
from meshpar.planner.search import Search
from meshpar.planner.workload import describe
from tests.errors import raises
from tests.inspect.planted import CONFIG

CLUSTER = parse_cluster("h100:1x8")


@pytest.fixture(scope="module")
def work():
    batch = {name: jax.ShapeDtypeStruct((16, 64), np.int32) for name in ("inputs", "targets")}
    how = {"tx": optax.adamw(1e-3), "precision": mp.Precision(compute="bfloat16")}
    return describe(CONFIG.build(), batch, next_token_loss, **how)


@pytest.fixture(scope="module")
def grown(work):
    return grow(work, CLUSTER, max_gpus=32)


@pytest.mark.matrix
def test_growth_sizes_match_the_search(work, grown):
    assert {(one.scaling, one.num_gpus) for one in grown.sizes} == {
        (scaling, num) for scaling in ("strong", "weak") for num in (8, 16, 32)
    }
    for scaling, rows in (("strong", 16), ("weak", 64)):
        found = [one for one in grown.sizes if (one.scaling, one.num_gpus) == (scaling, 32)]
        (best,) = Search(with_examples(work, rows), parse_cluster("h100:4x8")).best(1)
        quickest = min(found, key=lambda one: one.step_s)
        assert best.time.step_s <= quickest.step_s
        if len(best.layout.strategy.components) <= 2:
            assert quickest.step_s == pytest.approx(best.time.step_s)
            assert quickest.kind == kind_of(best.layout.strategy)
        assert quickest.tokens_per_s == pytest.approx(rows * 64 / 32 / quickest.step_s)


def size(num, tokens_per_s, kind="fsdp", scaling="strong"):
    return Size(
        scaling=scaling, num_gpus=num, kind=kind, layout="", step_s=1.0, tokens_per_s=tokens_per_s, bound="compute"
    )


def test_growth_stops_at_half_the_throughput_per_gpu():
    sizes = (size(8, 100.0), size(16, 70.0), size(32, 49.0), size(8, 90.0, "ddp"), size(16, 80.0, "ddp"))
    found = Growth(
        gpu="h100", rates="", sizes=(*sizes, size(8, 9.0, "hsdp"), size(16, 4.0, "hsdp"), size(32, 4.0, "hsdp"))
    )
    assert [found.stops("strong", kind) for kind in ("fsdp", "ddp", "hsdp")] == [16, 16, 8]
    assert found.stops("weak", "fsdp") is None
    shown = str(found)
    for text in ("fsdp: worthwhile up to 16 GPUs", "hsdp: worthwhile on 8 GPUs only", "100 *", "80 *"):
        assert text in shown


def test_growth_ignores_links_of_another_size(work, monkeypatch):
    """A profile's links of mesh axes were measured on one cluster. The batch is for the same cluster, of two nodes."""
    searches = []
    monkeypatch.setattr("meshpar.planner.scaling.best_by_kind", lambda search: searches.append(search) or {})
    measured = dataclasses.replace(CLUSTER, nodes=2, axes={"*": Link(alpha_s=1e-2, bytes_per_s=1e6)})
    with raises("does-not-fit"):
        grow(work, measured, max_gpus=16)
    found = [(one.cluster.num_devices, one.workload.examples, dict(one.cluster.axes)) for one in searches]
    assert found == [(8, 16, {}), (16, 16, {}), (8, 8, {}), (16, 16, {})]  # strong, then weak scaling


def test_pipeline_times_are_python_floats(work):
    search = Search(work, CLUSTER)
    strategy = mp.pipeline_parallel(stages=2, microbatches=4) | mp.ddp()
    found = search.of(search.placer.place(mp.MeshSpec(data=4, stage=2), strategy))
    times = [time for one in found for time in (one.time.step_s, one.time.bubble_s)]
    assert times
    assert {type(time) for time in times} == {float}


def test_growth_prints_numpy_numbers():
    found = Growth(gpu="h100", rates="", sizes=(size(8, np.float64(100.0)), size(8, np.float64(90.0), "ddp")))
    assert "100 *" in str(found)
    assert "90 *" not in str(found)


@pytest.mark.matrix
def test_growth_plot_has_a_line_for_each_kind(grown):
    assert "tokens/s a GPU" in str(grown)
    figure = plots.growth(grown)
    strong, weak = figure.axes
    assert [panel.get_title().partition(":")[0] for panel in (strong, weak)] == ["strong scaling", "weak scaling"]
    kinds = {one.kind for one in grown.sizes if one.scaling == "strong"}
    assert {text.get_text() for text in strong.get_legend().get_texts()} == kinds


def test_growth_rejects_invalid_arguments(meshpar, tmp_path):
    with pytest.raises(mp.MeshparError, match="a node has 8"):
        grow(None, CLUSTER, max_gpus=4)  # checked before the workload
    recipe = Path(__file__).parents[2] / "recipes" / "gpt_stdlib.py"
    for words, text in (
        (("--plot", tmp_path / "a.png"), "--growth is not set"),
        (("--growth", "--verify", "1"), "cannot be combined with --top, --verify"),
    ):
        code, _, error = meshpar("plan", recipe, "--cluster", "h100:1x8", *words)
        assert code == 2
        assert text in error
