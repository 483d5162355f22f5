"""The search for changes that fit: planted peaks and times without a compiler, and programs for GPUs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect.memory import COMFORTABLE
from meshpar.inspect.memory_timeline import LiveArray, MemoryTimeline
from meshpar.inspect.pod import PodError, PodPool
from meshpar.inspect.step_numbers import LoweredStep, StepNumbers, lower
from meshpar.models import TransformerConfig
from meshpar.runs import memory_fit
from meshpar.runs.memory_changes import Change, ladders
from meshpar.runs.memory_fit import MemoryFit, fit_memory
from meshpar.runs.recipe import batch_shapes, build_abstract, build_step
from meshpar.runs.recipe_file import load_recipe
from meshpar.sharding.errors import MeshparError
from tests.errors import raises
from tests.runs.test_memory_changes import decoder

GB = 10**9
CLUSTER = parse_cluster("h100:1x4")


def planted(step, state) -> StepNumbers:
    """Peak and time of a step: 100 GB, 50 GB are activations and 20 GB moments."""
    options, slots = step.options, state.setup.table.totals
    activations = 50 / options.accumulate * {"minimal": 1.0, "dots": 0.9, "full": 0.2}.get(options.remat, 0.8)
    moments = 20 * slots.optimizer_bytes / (2 * slots.params_bytes)
    slower = {"minimal": 0, "dots": 1, "full": 30}.get(options.remat, 3) + 10 * (options.accumulate - 1)
    slower += 2 * (slots.optimizer_bytes < 1.9 * slots.params_bytes)
    return StepNumbers(int((30 + moments + activations) * GB), 0.1 * (1 + slower / 100))


LIVE = MemoryTimeline(
    argument_bytes=2 * GB, temporary_bytes=98 * GB, times_s=(0.0, 0.05), is_timed=True,
    live_bytes={"head": (GB, 2 * GB)},
    arrays=(LiveArray(nbytes=GB, shape="bf16[5]", module="head", source="model.py:7", start_s=0.01, end_s=0.06),),
)  # fmt: skip


class Pool:
    """A fake of `PodPool` with planted numbers."""

    num_processes = 2

    def __init__(self) -> None:
        self.compiled: list = []

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass

    def submit(self, compile, lowered):
        step, state = lowered
        self.compiled.append(step.options)
        numbers = planted(step, state)
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result((numbers, LIVE) if compile is LoweredStep.profile else numbers)
        return future


@pytest.fixture(scope="module")
def traced():
    recipe = decoder(step=mp.StepOptions(remat="minimal"))
    step, state = build_abstract(recipe, recipe.mesh.abstract(4))
    return step.trace(state, batch_shapes(recipe))


_STATES: dict = {}


def state_of(recipe, mesh):
    """Return the state of a recipe. Recipes with the same model, optimizer and strategy share it."""
    key = recipe.model, recipe.optimizer, str(recipe.strategy), str(mesh)
    if key not in _STATES:
        _STATES[key] = build_abstract(recipe, mesh)[1]
    return _STATES[key]


@pytest.fixture
def search(monkeypatch, traced):
    """Search with planted numbers for a GPU whose usable memory has this many GB."""
    pool = Pool()
    monkeypatch.setattr(memory_fit, "lower", lambda step, state, *_: ((step, state), traced))
    monkeypatch.setattr(memory_fit, "build_abstract", lambda recipe, mesh: (build_step(recipe), state_of(recipe, mesh)))
    monkeypatch.setattr(memory_fit, "PodPool", lambda num: pool)
    monkeypatch.setattr(memory_fit, "layouts", lambda *args: iter(()))

    def run(usable_gb: float, **options) -> MemoryFit:
        gpu = dataclasses.replace(CLUSTER.gpu, memory_bytes=usable_gb * GB / 0.9 + 1)
        recipe = decoder(step=mp.StepOptions(remat="minimal"))
        return fit_memory(recipe, dataclasses.replace(CLUSTER, gpu=gpu), **options)

    run.pool = pool
    return run


def test_a_step_that_fits_needs_no_change(search):
    found = search(101)
    assert (found.fits, found.changes, found.best) == (True, (), None)
    assert len(search.pool.compiled) == 1
    assert "it fits: 100 GB of 101 GB" in str(found)
    assert "set XLA_CLIENT_MEM_FRACTION=.95" in str(found)
    assert "MEM_FRACTION" not in str(search(130))


def test_the_fastest_change_that_fits_is_first(search):
    found = search(91)
    fitting = [change for change in found.changes if change.fits]
    assert [change.step_s for change in fitting] == sorted(change.step_s for change in fitting)
    # Moments in bfloat16 save 10 GB for 2 %, fewer saved activations 10 GB for 3 %.
    assert found.best.settings == ("optimizer.moments=bfloat16",)
    assert (found.best.saved_bytes, found.best.peak_bytes) == (pytest.approx(10 * GB, rel=1e-2), found.best.peak_bytes)
    assert found.best.slowdown == pytest.approx(0.02)
    assert "set XLA_CLIENT_MEM_FRACTION=.95" in str(found)
    assert len({change.kind for change in found.changes}) >= 5
    # Changes that do not fit follow, smallest first.
    others = [change.peak_bytes for change in found.changes if not change.fits]
    assert others == sorted(others)


def test_stronger_changes_of_a_kind_follow_only_if_the_weaker_do_not_fit(search):
    found = search(91)
    texts = [change.settings for change in found.changes]
    assert ("step.accumulate=2",) in texts
    assert ("step.accumulate=4",) not in texts
    assert ("step.remat=dots",) in texts  # 95 GB do not fit
    assert ("step.remat=full",) in texts


def test_peaks_are_extrapolated(search):
    texts = [change.settings for change in search(57).changes]
    assert ("step.accumulate=2",) in texts
    assert ("step.accumulate=4",) not in texts  # 62.5 GB
    assert ("step.accumulate=8",) in texts  # 56.25 GB


def test_pairs_are_compiled_if_no_change_fits(search):
    found = search(50)
    assert found.best.kind.count(" + ") == 1
    assert found.best.peak_bytes <= 50 * GB
    assert all(" + " in change.kind for change in found.changes if change.fits)


def test_nothing_fits(search):
    found = search(20)
    assert found.best is None
    assert "no change and no combination fits" in str(found)
    assert any(change.kind.count(" + ") == 2 for change in found.changes)


def test_failures_have_a_reason(search, monkeypatch):
    submit = search.pool.submit

    def fails(compile, lowered):
        if lowered[0].options.remat != "dots":
            return submit(compile, lowered)
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_exception(RuntimeError("the compiler fails\n\nXLA: unknown kernel\n"))
        return future

    monkeypatch.setattr(search.pool, "submit", fails)
    bad = Change(kind="micro-steps", fields={"step.accumulate": 7})
    monkeypatch.setattr(memory_fit, "layouts", lambda *args: iter([bad]))
    found = {change.settings: change for change in search(91).changes}
    assert found["step.remat=dots",].reason == "XLA: unknown kernel"
    assert "7 micro-steps" in found["step.accumulate=7",].reason
    assert found["step.accumulate=7",].peak_bytes is None


def test_state_that_cannot_fit_is_not_compiled(search):
    gpu = dataclasses.replace(CLUSTER.gpu, memory_bytes=1000.0)
    found = fit_memory(decoder(), dataclasses.replace(CLUSTER, gpu=gpu))
    assert found.best is None
    assert any("state and batch need" in change.reason for change in found.changes)


def test_json_and_html(search):
    found = search(91)
    data = json.loads(json.dumps(found.to_json()))
    assert data["fits"] is False
    assert data["changes"][0]["command"] == "--set optimizer.moments=bfloat16"
    assert data["changes"][0]["python"] == (
        "recipe.replace(optimizer=dataclasses.replace(recipe.optimizer, moments='bfloat16'))"
    )
    assert data["best"] == data["changes"][0]
    assert data["note"] == found.note
    assert data["largest"][0]["module"] == "head"
    assert "timeline" not in data
    html = found._repr_html_()
    assert "Largest temporaries at the peak, 50 ms after the start" in html
    assert "model.py:7" in html
    assert "10 ms to 60 ms" in html


def test_invalid_arguments():
    with raises("not-an-int"):
        fit_memory(decoder(), CLUSTER, num_processes=0)
    with raises("wrong-type"):
        fit_memory(None, CLUSTER)
    with raises("wrong-type"):
        fit_memory(decoder(), CLUSTER, batch=[1])


# Programs for GPUs ---------------------------------------------------------------------------------------------------


SMALL = TransformerConfig(
    vocab_size=8192, num_layers=2, embed_dim=256, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=1024
)


@pytest.mark.pod
def test_the_first_change_fits_when_compiled(monkeypatch):
    """Compile the first change with `explain`, and compare peak and time."""
    monkeypatch.setattr(memory_fit, "layouts", lambda *args: iter(()))
    step = mp.StepOptions(remat="minimal", precision=mp.Precision(compute="bfloat16"))
    optimizer = mp.Optax(make=lambda steps: optax.adamw(1e-3))  # without changes of the optimizer
    recipe = decoder(model=SMALL, step=step, optimizer=optimizer, strategy=mp.fsdp())
    shapes = {name: jax.ShapeDtypeStruct((32, 1024), np.int32) for name in ("inputs", "targets")}
    gpu = dataclasses.replace(CLUSTER.gpu, memory_bytes=3.6e8)
    cluster = dataclasses.replace(CLUSTER, gpu=gpu)
    found = fit_memory(recipe, cluster, batch=shapes)
    assert not found.fits
    assert len([change for change in found.changes if change.peak_bytes is not None]) >= 5
    best = found.best
    assert best is not None
    changed = recipe.override(*best.settings)
    report = mp.explain(*build_abstract(changed, changed.mesh.abstract(4)), shapes, cluster)
    assert (report.memory.peak_bytes, report.compute.predicted_step_s) == (best.peak_bytes, best.step_s)
    assert report.memory.peak_bytes <= found.limit_bytes


PROGRAMS = {
    "small dense": ("gpt_stdlib", "h100:1x8", 0.8, ("batch_size=256",)),
    "small context parallel": ("long_context", "h100:1x8", 0.8, ("batch_size=16", "step.remat=none")),
    "small fine-tuning": ("finetune_hf", "h100:1x8", 0.8, ("batch_size=256",)),
    "small pipeline": ("gpt_pipeline", "h100:1x8", 0.85, ("batch_size=64",)),
    "small pipeline, tensor and data": ("gpt_3d", "h100:1x8", 0.85, ("batch_size=64",)),
    "small experts": ("moe_stdlib", "h100:1x8", 0.85, ("batch_size=128",)),
    "8B on a node": ("llama3_8b", "h100:1x8", None, ("batch_size=64", "step.accumulate=1")),
    "8B on eight nodes": ("llama3_8b", "h100:8x8", None, ("batch_size=512", "step.accumulate=1")),
    "70B": ("llama3_70b", "h100:8x8", None, ("batch_size=128", "step.accumulate=1")),
    "Mixtral": ("mixtral_8x7b", "h100:8x8", None, ("step.accumulate=1", "step.remat=minimal")),
}
"""Recipe, cluster, usable memory as a share of the recipe's peak (None: the memory of the GPU), and changed fields. The
batch of the large recipes is increased until they do not fit."""


@pytest.mark.pod
@pytest.mark.matrix
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_other_change_is_predicted_to_be_faster(name):
    """Compile all changes of all kinds. None that fits is over 3 % faster than the first of the search."""
    file, target, share, fields = PROGRAMS[name]
    cluster = parse_cluster(target)
    recipe = load_recipe(f"recipes/{file}.py", devices=cluster.num_devices).override(*fields)
    tokens = (recipe.batch_size, getattr(recipe.data, "seq_len", 1024))
    batch = {name: jax.ShapeDtypeStruct(tokens, np.int32) for name in ("inputs", "targets")}

    def lowered(*settings: str):
        changed = recipe.override(*settings)
        step, state = build_abstract(changed, changed.mesh.abstract(cluster.num_devices))
        return lower(step, state, batch, cluster)[0]

    with PodPool() as pool:
        if share is not None:
            peak = pool.submit(LoweredStep.compile, lowered()).result().peak_bytes
            gpu = dataclasses.replace(cluster.gpu, memory_bytes=float(round(peak * share / COMFORTABLE, -6)))
            cluster = dataclasses.replace(cluster, gpu=gpu)
        found = fit_memory(recipe, cluster, batch=batch)
        assert not found.fits
        assert found.best is not None, found
        assert len({change.settings for change in found.changes if change.peak_bytes is not None}) >= 5
        again = pool.submit(LoweredStep.compile, lowered(*found.best.settings)).result()
        assert again.peak_bytes == found.best.peak_bytes <= found.limit_bytes
        if " + " in found.best.kind:
            return
        step, state = build_abstract(recipe, recipe.mesh.abstract(cluster.num_devices))
        jaxpr = lower(step, state, batch, cluster)[1].jaxpr
        compiled = {change.settings for change in found.changes}
        for ladder in ladders(recipe, state.setup, step.describe(state, batch), jaxpr):
            for change in ladder:
                if change.settings in compiled:
                    continue
                with contextlib.suppress(MeshparError, PodError):  # invalid for this recipe
                    other = pool.submit(LoweredStep.compile, lowered(*change.settings)).result()
                    assert other.peak_bytes > found.limit_bytes or other.step_s > 0.97 * found.best.step_s, change
