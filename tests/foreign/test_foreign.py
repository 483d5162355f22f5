"""Models of other packages train on a mesh as on a single device, and `explain` reports no false findings.

`make test-foreign` runs these tests in a separate environment, because the packages need other versions of jax.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.training.state import abstract_state, make_setup
from tests.equal import mesh_of
from tests.foreign import zoo

pytestmark = [pytest.mark.foreign, pytest.mark.filterwarnings("ignore")]

PACKAGES = {
    **dict.fromkeys(("gpt2", "bert", "vit", "llama", "resnet", "bart"), "transformers"),
    **dict.fromkeys(("tunix_llama", "tunix_qwen3"), "tunix"),
    "unet": "diffusers",
    "nano_moe": "nano_moe",
    "mamba2": "mamba2_jax",
    "graph": "jraphx",
    "equinox": "equinox",
    "haiku": "haiku",
}
STRATEGIES = {
    "fsdp": (mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0), 1),
    "fsdp|tensor by path": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp(min_bytes=0), 1),
    "zero1": (mp.MeshSpec(fsdp=8), mp.zero1(min_bytes=0), 1),
    "hsdp": (mp.MeshSpec(data=2, fsdp=4), mp.hsdp(min_bytes=0), 1),
    "fsdp on Explicit axes": (mp.MeshSpec(fsdp=8, axis_types="explicit"), mp.fsdp(min_bytes=0), 1),
    "accumulate": (mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0), 2),
}


def needs(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        pytest.skip(f"needs {package}, which `make test-foreign` installs: {error}")


@functools.cache
def case_of(name: str) -> zoo.Case:
    return zoo.CASES[name]()


def batches(case: zoo.Case) -> list:
    rng = np.random.default_rng(0)
    return [case.batch(rng) for _ in range(5)]


def setup_of(case: zoo.Case, spec: mp.MeshSpec, strategy, *, by_path: bool = False):
    rules = case.rules | mp.Rules(paths=case.paths) if by_path else case.rules
    # With the default epsilon, Adam would amplify rounding errors of gradients that are zero.
    return make_setup(case.model, optax.adam(1e-3, eps=1e-6), mesh=mesh_of(spec), strategy=strategy | rules)


def step_of(case: zoo.Case, accumulate: int) -> Any:
    return mp.train_step(
        lambda model, batch, key: (case.loss(model, batch), {}), accumulate=accumulate, loss_is=case.loss_is
    )


def losses_of(case: zoo.Case, setup, start, accumulate: int) -> list[float]:
    """A single device receives examples in the order of the micro-steps of eight devices."""
    state, found = jax.device_put(start.replace(setup=setup), setup.shardings), []
    step = step_of(case, accumulate)
    for batch in batches(case):
        if accumulate == 2 and setup.mesh.size == 1:
            batch = jax.tree.map(_as_eight_devices, batch)
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def _as_eight_devices(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x.reshape(8, 2, -1, *x.shape[1:]), 1, 0).reshape(x.shape)


@functools.cache
def alone(name: str, accumulate: int):
    """Return state and losses on a single device."""
    setup = setup_of(case_of(name), mp.MeshSpec(), mp.ddp())
    start = jax.device_get(setup.init(0))
    return start, losses_of(case_of(name), setup, start, accumulate)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", zoo.CASES)
def test_sharded_training_matches_one_device(name, strategy):
    needs(PACKAGES[name])
    case, (spec, parts, accumulate) = case_of(name), STRATEGIES[strategy]
    start, expected = alone(name, accumulate)
    setup = setup_of(case, spec, parts, by_path="path" in strategy)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = losses_of(case, setup, start, accumulate)
    # Sums in float32 over devices have a different order.
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not [one for one in told if "activations of this model" in str(one.message)]
    assert any(decision.shards > 1 for decision in (*setup.table.params, *setup.table.optimizer))


@pytest.mark.call_stacks
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", zoo.CASES)
def test_explain_raises_no_false_alarm(name, strategy):
    needs(PACKAGES[name])
    case, (spec, parts, accumulate) = case_of(name), STRATEGIES[strategy]
    setup = setup_of(case, spec, parts, by_path="path" in strategy)
    step = step_of(case, accumulate)
    report = mp.explain(step, setup.abstract, batches(case)[0])
    assert not [one for one in report.matching.unexpected if not re.fullmatch(case.costly, one.module)], str(report)
    assert not report.matching.missing, str(report)
    assert report.matching.matched
    assert report.matching.unannotated_axes == (("tensor",) if "path" in strategy else ())
    assert ("over `tensor` cannot be checked" in str(report)) == ("path" in strategy and report.is_as_expected)


def test_gpt2_costs_no_more_than_the_annotated_decoder(pod):
    """GPT-2 small without names needs no more bytes and time than a decoder of `mp.models` of the same size.

    Both run under `mp.fsdp()` with 64 sequences of 512 tokens in bfloat16 on eight H100s. Both save all attention
    scores. Blockwise attention, and GPT-2 with rematerialization, need less memory.
    """
    needs("transformers")
    import transformers

    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    module = transformers.FlaxGPT2LMHeadModel(config, _do_init=False, dtype=jnp.bfloat16).module
    ids = jax.ShapeDtypeStruct((64, 512), np.int32)

    def loss(model, batch, key):
        ids = batch["inputs"]
        logits = model(ids, jnp.ones_like(ids), jnp.broadcast_to(jnp.arange(512), ids.shape)).logits
        return zoo.cross_entropy(logits.astype(jnp.float32), batch["targets"]), {}

    def found(model, loss_fn, rules) -> np.ndarray:
        """Return the bytes that a device sends, its peak bytes, and the step time."""
        mesh = mp.MeshSpec(fsdp=8).abstract(devices=8)
        state = abstract_state(model, optax.adamw(1e-3), mesh=mesh, strategy=mp.fsdp() | rules)
        step = mp.train_step(loss_fn, precision=mp.Precision(compute="bfloat16"))
        report = mp.explain(step, state, {"inputs": ids, "targets": ids}, "h100:1x8", pod=pod, advise=False)
        assert report.is_as_expected, str(report)
        assert not report.matching.missing, str(report)
        sent = sum(one.collective.bytes_sent_per_step for one in report.collectives)
        return np.array((sent, report.memory.peak_bytes, report.timeline.step_s))

    # Equal parameters per layer: the MLP has three matrices of width 2,048 instead of two of 3,072.
    annotated = TransformerConfig(
        vocab_size=50_256, num_layers=12, embed_dim=768, num_heads=12, num_kv_heads=12, head_dim=64, mlp_dim=2048,
        tied_embeddings=True,
    )  # fmt: skip
    remade = mp.Rules(remat={r"transformer/h/\d+": "full"})
    gpt2 = mp.from_linen(module, ids, ids, ids)
    twin, blockwise = (
        found(dataclasses.replace(annotated, attention=attention).build(), next_token_loss, mp.Rules())
        for attention in ("xla", annotated.attention)
    )
    plain, recomputed = (found(gpt2, loss, rules) for rules in (mp.Rules(), remade))
    print("over the twin", plain / twin, "over the blockwise decoder", plain / blockwise, recomputed / blockwise)
    assert (plain <= 1.1 * twin).all()
    assert (recomputed[:2] <= 1.1 * blockwise[:2]).all()
