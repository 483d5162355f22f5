"""The search for faster options: decisions, failures and time limit, with planted times of steps and compilations."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest

import meshpar as mp
from meshpar.bench import tuning
from meshpar.bench.tuning import OPTIONS, Option, Times, alternatives
from meshpar.bench.variants import Variant, simulated_step_s
from meshpar.hardware.clusters import parse_cluster
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.runs.overrides import override
from meshpar.sharding.errors import problem
from tests.errors import raises

STEP_S, COMPILE_S = 0.1, 4.0
"""Planted seconds of a step and of a compilation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted:
    """A model whose fields change its program."""

    a: int = 1
    b: int = 1
    c: int = 1
    width: int = 4

    def build(self):
        if self.c == 13:
            raise problem("Planted", "build it", "13 is refused", "use 1", code="out-of-range")
        if self.c == 14:
            raise KeyError("14 fails")

        def apply(params, x):
            return x @ params["w"] + 10.0 * self.a + 100.0 * self.b + 1000.0 * self.c

        return mp.from_functions(lambda key: {"w": np.ones((8, self.width), np.float32)}, apply)


def loss(model, batch, key):
    outputs = model(batch["x"])
    return mp.MeanLoss(outputs.sum(), outputs.size), {}


RECIPE = mp.Recipe(
    name="planted", mesh=mp.MeshSpec(data=1), strategy=mp.ddp(), model=Planted(), loss=loss, steps=10, batch_size=4,
    data=mp.data.ArrayData(arrays={"x": np.zeros((128, 8), np.float32)}),
)  # fmt: skip


def option(name: str, *values: object) -> Option:
    return Option(name=name, alternatives=tuple({f"model.{name}": value} for value in values))


@pytest.fixture
def search(monkeypatch) -> Callable[..., tuning.Tuning]:
    """Return a function that searches with a planted clock and planted factors of the step time, by change."""

    def run(options, factors, *, seconds=300.0, predictions=None, peaks=None, limit=None, intervals=None):
        clock = types.SimpleNamespace(now=0.0)
        rounds = {}

        def compiled(self, trial):
            clock.now += COMPILE_S
            self.longest_compile_s = trial.compile_s = COMPILE_S
            trial.peak_bytes = (peaks or {}).get(trial.changes, 0)
            if predictions is not None:
                trial.step_s = STEP_S * predictions.get(trial.changes, 1)

        def ran(self, state, batches, count):
            rounds[self.changes] = rounds.get(self.changes, 0) + 1
            step_s = STEP_S
            for change in [self.changes] if self.changes in factors else self.changes:
                factor = factors.get(change, 1)
                step_s *= factor(rounds[self.changes]) if callable(factor) else factor
            clock.now += count * step_s
            return state, [step_s] * count if intervals is None else intervals(step_s, count)

        monkeypatch.setattr(tuning, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
        monkeypatch.setattr(tuning._Search, "_compile", compiled)
        monkeypatch.setattr(tuning, "_memory_limit", lambda variant: limit)
        monkeypatch.setattr(Variant, "run", ran)
        # Lowering would take most of the time of these tests.
        monkeypatch.setattr(Variant, "fingerprint", property(lambda self: f"{self.recipe.model} {self.recipe.step}"))
        return tuning.tune(RECIPE, seconds=seconds, devices=jax.devices()[:1], options=options)

    return run


def outcomes(found: tuning.Tuning) -> dict[str, str]:
    return {" ".join(alternative.changes): alternative.outcome for alternative in found.alternatives}


def test_the_fastest_alternatives_are_combined(search) -> None:
    factors = {"model.a=2": 0.9, "model.a=3": 0.8, "model.b=2": 0.95, "model.c=2": 1.3}
    found = search([option("a", 2, 3), option("b", 2), option("c", 2)], factors)
    assert [alternative.ratio.rounds for alternative in found.alternatives] == [5, 5, 5, 2]
    assert found.settings == ("model.a=3", "model.b=2")
    assert found.ratio.ratio == pytest.approx(0.76)
    assert outcomes(found) == {
        "model.a=2": "measured", "model.a=3": "chosen", "model.b=2": "chosen", "model.c=2": "measured",
    }  # fmt: skip
    assert found.tuned().settings == found.settings
    assert "use --set model.a=3 --set model.b=2: 0.760" in str(found)


def test_a_combination_that_is_slower_than_its_parts_is_not_chosen(search) -> None:
    factors = {"model.a=2": 0.8, "model.b=2": 0.9, ("model.a=2", "model.b=2"): 0.85}
    assert search([option("a", 2), option("b", 2)], factors).settings == ("model.a=2",)


def test_effects_within_the_noise_and_lucky_ones_are_not_chosen(search) -> None:
    noisy = search([option("a", 2)], {"model.a=2": lambda number: (0.7, 0.97, 1.2)[number % 3]})
    assert noisy.settings == ()
    assert noisy.ratio is None
    assert noisy.alternatives[0].ratio.rounds == 15  # undecided
    tiny = search([option("a", 2)], {"model.a=2": 0.997})
    assert tiny.settings == ()
    lucky = search([option("a", 2)], {"model.a=2": lambda number: 0.9 if number <= 6 else 1.0})
    assert lucky.alternatives[0].ratio.ratio == pytest.approx(0.9)
    assert lucky.settings == ()


def test_failures_are_reported(search) -> None:
    def no_memory(number):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB.")

    options = [option("a", 2), option("b", 2), option("c", 13, 14), option("width", 8), option("nothing", 1)]
    options.append(Option(name="micro-steps", alternatives=({"step.accumulate": Times(Fraction(3))},)))
    options.append(Option(name="same", alternatives=({"max_skipped": 7},)))
    found = search(options, {"model.a=2": no_memory, "model.b=2": 0.9})
    assert outcomes(found) == {
        "model.a=2": "out of memory",
        "model.b=2": "chosen",
        "model.c=13": "refused: 13 is refused",
        "model.c=14": "failed: KeyError: '14 fails'",
        "model.width=8": "not compared: it has a different state",
        "step.accumulate=3": "refused: 4 is not divisible by 3",
        "max_skipped=7": "the same program",
    }


def test_state_that_a_failure_has_freed_is_created_again(monkeypatch) -> None:
    """A step donates its state, so an error during the step may leave deleted arrays."""
    found = tuning._Search(RECIPE, 300.0, jax.devices()[:1], print)
    found.state, found.batches = found.main.setup.init(0), []
    trial = tuning._Trial("", (), found.main)

    def fail(self, state, batches, count):
        jax.tree.map(lambda x: x.delete(), state.params)
        raise jax.errors.JaxRuntimeError("INTERNAL: failed")

    monkeypatch.setattr(Variant, "run", fail)
    assert found._block(trial, 2) == []
    assert trial.outcome == "failed: JaxRuntimeError: INTERNAL: failed"
    assert not any(x.is_deleted() for x in jax.tree.leaves(found.state))


def test_programs_that_do_not_fit_or_are_predicted_to_be_slow_are_not_measured(search) -> None:
    found = search(
        [option("a", 2, 3, 4)],
        {"model.a=4": 0.9},
        predictions={("model.a=2",): 1.5, ("model.a=4",): 0.95},
        peaks={("model.a=3",): 2_000_000_000},
        limit=1_000_000_000,
    )
    assert outcomes(found) == {
        "model.a=2": "predicted to be much slower", "model.a=3": "does not fit in 1 GB", "model.a=4": "chosen",
    }  # fmt: skip
    assert [alternative.predicted for alternative in found.alternatives] == pytest.approx([1.5, 1, 0.95])


@pytest.mark.parametrize("seconds", [1, 12, 30, 60, 120])
def test_nothing_starts_that_exceeds_the_time(search, seconds) -> None:
    """The recipe itself is always compiled and measured."""
    found = search([option("a", 2, 3, 4), option("b", 2)], {"model.a=2": 0.9}, seconds=seconds)
    assert found.seconds <= max(seconds, COMPILE_S + 6 * STEP_S)
    assert found.settings == (("model.a=2",) if seconds >= 30 else ())
    assert all(outcome.endswith("no time") for outcome in outcomes(found).values()) == (seconds <= 12)


def test_first_alternatives_of_all_options_are_compiled_first(search) -> None:
    options = [option("a", *range(2, 9)), option("b", 2)]
    short, long = (search(options, {"model.b=2": 0.9}, seconds=seconds) for seconds in (40, 300))
    outcome = [outcomes(found) for found in (short, long)]
    assert [found["model.b=2"] for found in outcome] == ["chosen", "chosen"]
    assert outcome[0]["model.a=8"] == tuning.NOT_COMPILED
    assert outcome[1]["model.a=8"] == "measured"


def test_time_that_is_left_after_the_measurement_is_used(search) -> None:
    """Half of the time is too short to compile all alternatives."""
    found = search([option("a", *range(2, 12))], {}, seconds=80)
    assert set(outcomes(found).values()) == {"measured"}
    assert found.seconds <= 80


def test_alternatives_are_fields_of_the_recipe() -> None:
    """The table has values that recipes accept, for both platforms."""
    config = TransformerConfig(
        vocab_size=32, num_layers=2, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=16
    )  # fmt: skip
    recipe = RECIPE.replace(model=config, loss=next_token_loss, step=mp.StepOptions(accumulate=2, remat="full"))
    on_cpu, on_gpu = ([changes for _, changes in alternatives(recipe, name)] for name in ("cpu", "cuda"))
    for changes in {*on_cpu, *on_gpu}:
        assert str(override(recipe, changes)) != str(recipe)  # True equals 1
    assert ("model.attention=cudnn",) in on_gpu
    assert ("step.xla.xla_gpu_enable_command_buffer=",) in on_gpu
    assert ("model.attention=xla",) in on_cpu
    moe = mp.moe.MoEConfig(routing=mp.moe.Routing(num_experts=4, top_k=2), mlp_dim=16)
    with_experts = recipe.replace(model=dataclasses.replace(config, moe=moe))
    of_experts = {changes for _, changes in alternatives(with_experts, "cuda")} - {*on_gpu}
    assert of_experts == {("model.moe.grouped_matmul=tokamax",), ("model.moe.grouped_matmul=blocked",)}
    assert all(override(with_experts, changes) != with_experts for changes in of_experts)
    assert not [changes for changes in on_cpu if "cudnn" in str(changes) or "xla_gpu" in str(changes)]
    assert ("step.remat=full",) not in on_cpu  # the recipe's value
    assert ("step.accumulate=1",) in on_cpu
    assert ("step.accumulate=4", "step.remat=none") in on_cpu
    assert {option.name for option in OPTIONS} >= {"attention", "rematerialization", "micro-steps", "CUDA graphs"}


def test_tune_rejects_invalid_time() -> None:
    with raises("out-of-range"):
        mp.bench.tune(RECIPE, seconds=0)


def test_tune_rejects_several_processes(monkeypatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with raises("unsupported-feature"):
        mp.bench.tune(RECIPE, seconds=60)


def test_time_of_a_step_includes_the_wait_for_its_loss(search) -> None:
    """On a busy machine the losses of the later steps may be ready together with the first."""
    found = search([], {}, intervals=lambda step_s, count: [count * step_s - 1e-4 * (count - 1), *[1e-4] * (count - 1)])
    assert found.step_s == pytest.approx(STEP_S)


@pytest.mark.pod
def test_prediction_equals_that_of_explain(pod) -> None:
    config = TransformerConfig(
        vocab_size=512, num_layers=2, embed_dim=256, num_heads=2, num_kv_heads=1, head_dim=128, mlp_dim=512
    )  # fmt: skip
    tokens = np.zeros((256, 64), np.int32)
    recipe = RECIPE.replace(
        model=config, loss=next_token_loss, data=mp.data.ArrayData(arrays={"inputs": tokens, "targets": tokens})
    )
    variant, cluster = Variant.of(recipe, devices=jax.devices()[:1]), parse_cluster("h100:1x1")
    report = mp.explain(variant.step, variant.setup.abstract, variant.batch, cluster, pod=pod, advise=False)
    predicted_s = simulated_step_s(variant, report.program.module, cluster)
    assert predicted_s == pytest.approx(report.compute.predicted_step_s)


@pytest.mark.pod
def test_the_gpu_compiler_accepts_the_options(pod) -> None:
    recipe = RECIPE.replace(step=mp.StepOptions(accumulate=1))
    xla = [changes for _, changes in alternatives(recipe, "cuda") if "step.xla" in changes[0]]
    assert len(xla) == 3
    for changes in xla:
        variant = Variant.of(recipe, changes, jax.devices()[:1])
        state = variant.setup.abstract
        report = mp.explain(variant.step, state, variant.batch, parse_cluster("h100:1x1"), pod=pod, advise=False)
        assert set(variant.recipe.step.xla) <= set(report.compile_options)


@pytest.mark.matrix
def test_tuned_options_are_used_by_train(meshpar, tmp_path, monkeypatch) -> None:
    """With real programs and times. The options that are faster depend on the machine."""
    monkeypatch.chdir(tmp_path)
    recipe = Path(__file__).parents[2] / "recipes" / "gpt_stdlib.py"
    small = ("steps=2", "batch_size=2", "data.seq_len=64", "model.num_layers=1", "optimizer.warmup_steps=0")
    fields = ("--devices", 1, "--compile-cache", "cache", *(word for field in small for word in ("--set", field)))
    code, out, err = meshpar("tune", recipe, *fields, "--seconds", 60, "--save", "tuned.json", "--json")
    assert code == 0, err
    found, saved = json.loads(out), json.loads((tmp_path / "tuned.json").read_text())
    assert saved["settings"] == found["settings"]
    assert {a["outcome"] for a in found["alternatives"]} & {"measured", "chosen"}
    programs = {*(tmp_path / "cache").glob("jit__step-*")}
    args = ("--name", "x", "--set", "sample=none", "--tuned", "tuned.json")
    code, out, err = meshpar("train", recipe, *fields, *args)
    assert code == 0, err
    assert "tuned" in out
    assert programs == {*(tmp_path / "cache").glob("jit__step-*")} != set()  # the step was not compiled again
    code, out, err = meshpar("train", recipe, *fields, *args, "--set", "model.mlp_dim=128")
    assert code == 2
    assert "was measured, and the program of the recipe is" in err
