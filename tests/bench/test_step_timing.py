"""Measured training steps: alternate configurations, FLOP conventions, and the prediction next to them."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import meshpar as mp
from meshpar.bench import step_timing
from meshpar.bench.step_timing import Ratio, StepTiming, StepTimings
from meshpar.bench.variants import Variant
from meshpar.inspect.explain import explain
from meshpar.models import TransformerConfig, next_token_loss
from tests.errors import raises

TINY = TransformerConfig(
    vocab_size=32, num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=16
)  # fmt: skip
LLAMA_LAYERS = TransformerConfig(
    vocab_size=32_768, num_layers=8, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14_336
)  # fmt: skip
"""The decoder that was measured on an H100 (docs/performance.md)."""


def recipe(batch_size: int = 4, **fields) -> mp.Recipe:
    tokens = np.zeros((128, 8), np.int32)
    return mp.Recipe(
        name="tiny", mesh=mp.MeshSpec(data=1), strategy=mp.ddp(), model=TINY, loss=next_token_loss, steps=10,
        data=mp.data.ArrayData(arrays={"inputs": tokens, "targets": tokens}), batch_size=batch_size, **fields,
    )  # fmt: skip


def linear_recipe() -> mp.Recipe:
    """Return a recipe of a model that compiles quickly. Its data are integers, as tokens are."""

    def loss(model, batch, key):
        outputs = model(batch["inputs"].astype(np.float32))
        return mp.MeanLoss(outputs.sum(), outputs.size), {}

    model = mp.from_functions(lambda key: {"w": np.ones((8, 16), np.float32)}, lambda params, x: x @ params["w"])
    return recipe().replace(model=model, loss=loss)


@pytest.fixture(scope="module")
def timings() -> StepTimings:
    """Measure three steps of a recipe, in alternation with two micro-steps."""
    return mp.bench.steps(linear_recipe(), steps=3, against=["step.accumulate=2"], devices=jax.devices()[:1])


def test_two_configurations_are_measured_in_alternate_blocks(timings) -> None:
    first, second = timings.timings
    assert [first.label, second.label] == ["the recipe", "step.accumulate=2"]
    assert [len(timing.steps_s) for timing in timings.timings] == [3, 3]
    assert timings.ratio.rounds == 3
    assert first.tokens_per_s == 4 * 8 / first.median_s
    assert first.causal_flops == second.causal_flops == 3 * 2 * 4 * 8 * 16  # [4, 8] @ [8, 16]
    assert first.full_flops is None
    # The first step includes the compilation.
    assert all(timing.min_s <= timing.median_s < timing.first_step_s for timing in timings.timings)


def test_program_and_memory_are_those_of_explain(timings) -> None:
    variant = Variant.of(linear_recipe(), devices=jax.devices()[:1])
    report = explain(variant.step, variant.setup.abstract, variant.batch, advise=False)
    first, second = timings.timings
    assert first.fingerprint == report.fingerprint != second.fingerprint
    assert first.predicted_peak_bytes == report.memory.peak_bytes


def test_missing_values_have_a_reason_on_cpus(timings) -> None:
    first = timings.to_json()["timings"][0]
    assert first["peak_bytes"] is first["predicted_step_s"] is first["utilization"] is None
    assert [note.partition(":")[0] for note in first["notes"]] == [
        "the devices do not report their peak memory", "no predicted time", "no utilization",
    ]  # fmt: skip
    assert "step.accumulate=2: " in str(timings)


def test_utilization_in_both_conventions() -> None:
    """The H100 step of docs/performance.md: 41,813 tokens/s, 54.45 %, predicted 51.8 %."""
    tokens = 2 * 8192
    causal, full = (tokens * LLAMA_LAYERS.flops_per_token(8192, causal=causal) for causal in (True, False))
    timing = StepTiming(
        label="", fingerprint="", steps_s=(0.38884, 0.39184, 0.4), first_step_s=10.75, peak_bytes=46_860_000_000,
        num_devices=1, tokens=tokens, causal_flops=causal, full_flops=full, peak_flops_per_s=989.5e12,
        predicted_step_s=0.4118, predicted_peak_bytes=46_350_000_000,
    )  # fmt: skip
    assert causal == pytest.approx(211.11e12, rel=1e-4)
    assert full - causal == 6 * 8 * 32 * 128 * 8192 * tokens
    assert timing.tokens_per_s == pytest.approx(41_813, rel=1e-4)
    assert timing.utilization == pytest.approx(0.5445, abs=1e-4)
    assert timing.predicted_utilization == pytest.approx(0.518, abs=5e-4)
    assert timing.full_utilization == pytest.approx(0.5445 * full / causal, abs=1e-4)
    rows = {quantity: rest for quantity, *rest in timing.rows()}
    assert rows["step, median"] == ["392 ms", "412 ms", "+5.1%"]
    assert rows["peak memory per device"] == ["46.9 GB", "46.4 GB", "-1.1%"]
    assert rows["first step, with compilation"] == ["10.8 s", "", ""]


@pytest.mark.parametrize(
    ("other_s", "is_significant"), [((0.9, 0.9, 0.9, 0.91), True), ((0.9, 1.1, 0.95, 1.08), False)]
)
def test_ratio_is_compared_with_its_noise(other_s, is_significant) -> None:
    ratio = Ratio.of((1.0, 1.0, 1.0, 1.0), other_s)
    assert ratio.is_significant == is_significant
    assert ("no difference" in str(ratio)) != is_significant


def test_noise_of_too_few_rounds_is_unknown() -> None:
    for rounds in (1, 2, 3):
        ratio = Ratio.of((1.0,) * rounds, (0.8,) * rounds)
        assert ratio.is_significant == (rounds == 3)
        assert ("the noise is unknown" in str(ratio)) == (rounds < 3)


def test_peak_of_the_second_configuration_is_unknown_below_that_of_the_first(monkeypatch) -> None:
    """The counter of a device never falls."""
    peaks = iter((100, 300, 300, 300))  # before and after the first steps of each configuration
    monkeypatch.setattr(step_timing, "_peak_bytes", lambda variant: next(peaks))
    variant = Variant.of(linear_recipe(), devices=jax.devices()[:1])
    first = step_timing._Run(variant, None)
    second = step_timing._Run(variant, first)
    assert (first.peak_bytes, first.notes) == (300, [])
    assert (second.peak_bytes, second.notes) == (
        None,
        ["its peak memory is at most 300 B, the peak of the first program"],
    )


def test_states_with_other_shardings_are_not_shared() -> None:
    recipe = linear_recipe().replace(mesh=mp.MeshSpec(fsdp=2), strategy=mp.fsdp(min_bytes=0))
    sharded, replicated = (Variant.of(recipe, changes, jax.devices()[:2]) for changes in ((), ("strategy=ddp()",)))
    assert sharded.shares_state_of(Variant.of(recipe, ("step.accumulate=2",), jax.devices()[:2]))
    assert not replicated.shares_state_of(sharded)


def test_executable_that_was_compiled_before_is_the_one_that_runs() -> None:
    """`tune` compiles in threads, so a step must not be compiled again when it is called."""
    compilations = []

    def listen(event: str, duration_s: float, **_: object) -> None:
        if "backend_compile" in event:
            compilations.append(event)

    first, second = (
        Variant.of(linear_recipe(), changes, jax.devices()[:1]) for changes in ((), ("step.accumulate=2",))
    )
    state, batches = first.setup.init(0), first.batches()
    state, _ = first.run(state, batches, 1)
    second.predicted()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        state, seconds = second.run(state, batches, 2)
        assert first.predicted().step_s is None  # it has run, and is not compiled again
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(seconds) == 2
    assert compilations == []
    assert int(state.step) == 3


def test_drift_of_both_configurations_cancels() -> None:
    base = (1.0, 1.5, 2.0, 2.5)
    ratio = Ratio.of(base, [0.8 * time_s for time_s in base])
    assert (ratio.ratio, ratio.noise) == pytest.approx((0.8, 0), abs=1e-12)


def test_synthetic_packed_sequences_have_documents() -> None:
    names = ("inputs", "targets", "segments", "positions", "weights")
    data = mp.data.ArrayData(arrays={name: np.zeros((128, 8), np.int32) for name in names})
    batch = Variant.of(recipe().replace(data=data), devices=jax.devices()[:1]).batches()[0]
    assert batch["segments"][0].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert batch["positions"][0].tolist() == [0, 1] * 4
    assert int(batch["inputs"].max()) < TINY.vocab_size
    assert len(np.unique(batch["inputs"])) > 8


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"steps": 0}, "not-an-int"),
        ({"against": "step.remat=full"}, "wrong-type"),
        ({"against": ["step.remt=full"]}, "unknown-name"),
        ({"against": ["step.accumulate=3"]}, "indivisible"),
    ],
)
def test_steps_rejects_invalid_arguments(arguments, code) -> None:
    with raises(code):
        mp.bench.steps(recipe(), devices=jax.devices()[:1], **arguments)


@pytest.mark.matrix
def test_command_measures_a_recipe(meshpar) -> None:
    """Also with configurations whose states differ."""
    args = ("--steps", 2, "--set", "batch_size=4", "--set", "data.files=pyproject.toml", "--devices", 2)
    code, out, err = meshpar("bench", "step", "recipes/gpt_stdlib.py", *args, "--against", "mesh=fsdp=2", "--json")
    assert code == 0, err
    first, second = json.loads(out)["timings"]
    assert first["causal_flops"] == second["causal_flops"] < first["full_flops"]
    assert first["predicted_peak_bytes"] != second["predicted_peak_bytes"]
