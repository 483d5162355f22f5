"""`verify` finds planted faults, simplifies the layout that shows them, and accepts correct models."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.layers.auxiliary import report
from meshpar.loop import verify as verifying
from meshpar.loop.verify import named
from meshpar.models import token_mask
from tests.errors import raises
from tests.grid import cases
from tests.loop.diff_models import routed_model

NAMES = {"layers/up": ("layers", "embed", "mlp"), "layers/down": ("layers", "mlp", "embed")}


def start(key):
    up, down = jax.random.split(key)
    layers = {"up": 0.3 * jax.random.normal(up, (4, 8, 16)), "down": 0.3 * jax.random.normal(down, (4, 16, 8))}
    return {"layers": layers}


def product(h, layer):
    """A row-parallel matmul, which sums over `mlp`."""
    return h @ layer["down"]


def model_of(product=product):
    def apply(params, x):
        return mp.scan_layers(lambda x, layer: x + product(jnp.tanh(x @ layer["up"]), layer), x, params["layers"])

    return mp.from_functions(start, apply, names=NAMES)


def squares(model, batch, key):
    errors = (model(batch["x"]) - batch["y"]) ** 2 * batch["mask"][:, None]
    return mp.MeanLoss(errors.sum(), batch["mask"].sum()), {}


def noisy(model, batch, key):
    return squares(model, {**batch, "x": batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)}, key)


def scalar(model, batch, key):
    loss, metrics = squares(model, batch, key)
    return loss.total / jnp.maximum(loss.weight, 1), metrics


def batch():
    x, y = np.random.default_rng(0).normal(size=(2, 16, 8))
    return {"x": x, "y": y, "mask": np.arange(16) % 5}


def verified(model=None, loss=squares, **options):
    return mp.verify(model or model_of(), loss, batch(), **{"find_origin": False, **options})


# ---- Faults in meshpar -----------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A wrong line and a layout that shows it."""

    module: str
    old: str
    new: str
    case: str
    loss: object = squares
    words: str = "step 1: "
    at: str = ""
    """The line that is reported, if it is not `old`."""


ONCE = "accumulate=2, reduce_gradients=once"
FAULTS = {
    "a dropped psum of the loss": Fault(
        "training.gradients.batch_region", "lax.psum((sums.loss, sums.metrics), self.axes)",
        "(sums.loss, sums.metrics)", f"data=2; ddp(); {ONCE}",
    ),
    "gradients of one group": Fault(
        "training.gradients.fsdp", "lax.reduce(g, zero, lax.add, range(len(remaining)))",
        "g[(0,) * len(remaining)]", "data=2,fsdp=2; hsdp(min_bytes=0); accumulate=2", words="step 1: gradient",
    ),
    "gradients that are not finite": Fault(
        "training.gradients.fsdp", "lax.reduce(g, zero, lax.add, range(len(remaining)))",
        "g[(0,) * len(remaining)] * np.nan", "data=2,fsdp=2; hsdp(min_bytes=0); accumulate=2", words="step 1: gradient",
    ),
    "a reduction over the wrong axis": Fault(
        "training.gradients.batch_region", "lax.psum((sums.loss, sums.metrics), self.axes)",
        "lax.psum((sums.loss, sums.metrics), self.axes[:1])", f"data=2,fsdp=2; hsdp(min_bytes=0); {ONCE}",
    ),
    "a lost micro-step": Fault(
        "training.accumulation", "(batches, keys))",
        "(jax.tree.map(lambda x: x.at[0].set(x[-1]), batches), keys))", "data=2; ddp(); accumulate=2",
    ),
    "a lost microbatch of a pipeline": Fault(
        "pipeline.stage_program", "(read(self.examples, microbatch)",
        "(read(self.examples, jnp.maximum(microbatch, 1))",
        "stage=2; ddp() | pipeline_parallel(stages=2, microbatches=2, schedule='gpipe')",
    ),
    "a mean of the means of micro-steps": Fault(
        "layers.losses", "return Normalizer(num_parts, lax.psum(total, tuple(axes)) if axes else total)",
        "return Normalizer(num_parts, weight_of(part, keys[0]) * num_parts)", "data=2; ddp(); accumulate=2",
    ),
    "a mean of the means of devices": Fault(
        "layers.losses", "lax.psum(total, tuple(axes)) if axes else total", "total * num_parts / len(keys)",
        f"data=2; ddp(); {ONCE}",
    ),
    "a mean of the means of microbatches": Fault(
        "layers.losses", "total = jax.vmap(weight_of)(examples, keys).sum()",
        "total = jax.vmap(weight_of)(examples, keys)[0] * len(keys)",
        "stage=2; ddp() | pipeline_parallel(stages=2, microbatches=2, schedule='gpipe')",
    ),
    "a loss over pairs in micro-steps": Fault(
        "training.step", "check_parts(self.loss_fn, options, state, batch, divided, is_by_device=is_by_device)", "pass",
        "data=2; ddp(); accumulate=2, loss=pairs",
    ),
    "weights of a layer before": Fault(
        "training.gradients.layer_loop", "self._gathered(params, layer + self.ahead)",
        "self._gathered(params, layer + self.ahead - 1)", "fsdp=2; fsdp(min_bytes=0, prefetch=1)",
    ),
    "weights that stay as they were": Fault(
        "training.step", "params = optax.apply_updates(old, updates)",
        "params = optax.apply_updates(old, updates) if setup.mesh.size == 1 else old", "data=2; ddp()",
        words="step 2: loss",
    ),
    "a different random key on a mesh": Fault(
        "training.step", "jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)",
        "jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step + setup.mesh.size)", "data=2; ddp()",
        loss=noisy,
    ),
    "an optimizer that is reset at a restart": Fault(
        "loop.checkpoint", "Restored(state=state, data_state=",
        "Restored(state=state.replace(opt_state=setup.init(0).opt_state), data_state=", "data=2; ddp()",
        words="step 3 after a restart: ",
    ),
    "a restart that repeats a step's random numbers": Fault(
        "loop.checkpoint", "Restored(state=state, data_state=",
        "Restored(state=state.replace(step=state.step * 0), data_state=", "data=2; ddp()", loss=noisy,
        words="step 2 after a restart: loss",
    ),
}  # fmt: skip


@pytest.fixture
def plant():
    """Return a function that plants a fault until the end of the test; see `diff_faults.planted`."""
    from tests.loop import diff_faults  # which imports this module

    with contextlib.ExitStack() as stack:
        yield lambda fault: stack.enter_context(diff_faults.planted(fault))


@pytest.mark.parametrize(
    "name",
    cases(
        "a dropped psum of the loss",
        "gradients of one group",
        "gradients that are not finite",
        "a mean of the means of micro-steps",
        "a loss over pairs in micro-steps",
        grid=FAULTS,
    ),
)
def test_verify_finds_a_planted_fault(plant, name):
    plant(FAULTS[name])
    result = verified(case=FAULTS[name].case, loss=FAULTS[name].loss)
    assert result.smallest is not None
    assert result.smallest.words.startswith(FAULTS[name].words)
    assert not result.ok


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAULTS)
def test_random_layouts_find_a_planted_fault(plant, name):
    fault = FAULTS[name]
    plant(fault)
    smallest = verified(cases=40, loss=fault.loss).smallest
    assert smallest is not None
    assert verified(case=smallest.case, loss=fault.loss).smallest == smallest
    num_axes, limit = (sum(size > 1 for size in named(case).mesh.values()) for case in (smallest.case, fault.case))
    # If an option is removed first, the remaining options may need two axes.
    assert num_axes <= max(limit, 2)


# ---- Faults in routers -----------------------------------------------------------------------------------------------


def routed_loss(model, batch, key):
    errors = ((model(batch["inputs"], token_mask(batch)) - 1) ** 2).sum(-1) * batch["weights"]
    return mp.MeanLoss(errors.sum(), batch["weights"].sum()), {}


def sorted_batch():
    """Rows sorted by token, and padding."""
    tokens = np.sort(np.random.default_rng(0).integers(0, 8, 16 * 4)).reshape(16, 4)
    weights = (np.arange(4) < np.random.default_rng(1).integers(0, 5, (16, 1))).astype(np.int32)
    return {"inputs": tokens, "targets": tokens, "weights": weights, "segments": weights}


ROUTER_FAULTS = {
    "padding has experts": Fault(
        "moe.routing", "experts = jnp.where(mask[:, None], experts, num_experts)", "experts = experts + 0",
        "data=1; ddp()", words="step 1 with other tokens in the padding",
    ),
    "padding has scores": Fault(
        "moe.balance", "axis=0, where=None if mask is None else mask[:, None])", "axis=0)", "data=1; ddp()",
        words="step 1 with other tokens in the padding",
    ),
    "router losses are means over slices": Fault(
        "layers.batch_slices", "if totals.sums is not None:", "if False:", "data=1; ddp(); batch_slices=2",
    ),
    "a right router": Fault("layers.batch_slices", "num_layers: int = 0", "num_layers: int = 0",
                            "data=2; ddp(); batch_slices=2", words=""),
}  # fmt: skip


@pytest.mark.parametrize("counts_padding", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_verify_changes_tokens_in_the_padding(counts_padding):
    model = mp.from_functions(lambda key: {"table": jax.random.normal(key, (8,))}, lambda params, x: params["table"][x])

    def loss(model, batch, key):
        x = model(batch["inputs"])
        mean = jnp.mean(x**2, where=True if counts_padding else token_mask(batch))
        report(loss=mean, metrics={"moe/aux_loss": mean})
        return mp.MeanLoss((x * batch["weights"]).sum(), batch["weights"].sum()), {}

    result = mp.verify(model, loss, sorted_batch(), case="data=2; ddp()")
    assert [text.partition(":")[0] for text in result.left_out] == ["micro-steps and pipelines"]
    assert result.ok != counts_padding
    if counts_padding:
        assert result.smallest.words.startswith("step 1 with other tokens in the padding: loss")


@pytest.mark.matrix
@pytest.mark.parametrize("name", ROUTER_FAULTS)
def test_verify_finds_a_fault_of_a_router(plant, name):
    fault = ROUTER_FAULTS[name]
    model = routed_model(auxiliary_weight=10.0, scale=1 / 3)
    plant(fault)
    result = mp.verify(model, routed_loss, sorted_batch(), case=fault.case, dtype="float32")
    assert [text.partition(":")[0] for text in result.left_out] == ["micro-steps and pipelines"]
    assert result.ok == (not fault.words)
    if fault.words:
        assert result.smallest.words.startswith(fault.words)


# ---- Faults in a model -----------------------------------------------------------------------------------------------


def by_hand(collective):
    """The row-parallel matmul in `shard_map`, with a given collective."""

    def product(h, layer):
        run = jax.shard_map(
            lambda h, w: collective(h @ w),
            in_specs=(P(None, "tensor"), P("tensor", None)), out_specs=P(), axis_names={"tensor", "data"},
            check_vma=False,
        )  # fmt: skip
        return run(h, layer["down"])

    return product


BY_HAND = {
    "right": (lambda y: jax.lax.psum(y, "tensor"), True),
    "a dropped psum": (lambda y: y, False),
    "a mean for a sum": (lambda y: jax.lax.pmean(y, "tensor"), False),
    "a sum over the wrong axis": (lambda y: jax.lax.psum(y, "data"), False),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", BY_HAND)
def test_verify_checks_a_model_with_shard_map(name):
    collective, is_right = BY_HAND[name]
    result = verified(model_of(by_hand(collective)), case="tensor=2; ddp() | tensor_parallel()")
    assert result.ok == is_right
    assert is_right or result.smallest.words.startswith("step 1: ")


@pytest.mark.matrix
def test_verify_names_the_line_of_a_difference():
    collective, _ = BY_HAND["a mean for a sum"]
    result = verified(model_of(by_hand(collective)), case="tensor=2; ddp() | tensor_parallel()", find_origin=True)
    assert result.difference is not None
    assert result.difference.origin.kind == "factor"
    assert "1 / the size of `tensor`" in result.difference.origin.detail
    assert "a mean for a sum" in Path(__file__).read_text().splitlines()[result.difference.origin.lines[0].line - 1]
    assert "first different value" in str(result)


@pytest.mark.matrix
def test_verify_finds_random_numbers_that_depend_on_shards():
    def loss(model, batch, key):
        def noise(x):
            return x + 0.1 * jax.random.normal(jax.random.fold_in(key, jax.lax.axis_index("data")), x.shape)

        x = jax.shard_map(noise, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False)
        return squares(model, {**batch, "x": x(batch["x"])}, key)

    result = verified(loss=loss, case="data=2; ddp()")
    assert result.smallest is not None
    assert "draws random numbers" in result.left_out[0]


# ---- Correct models --------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(("loss", "dtype"), [(squares, "float64"), (squares, "float32"), (noisy, "float64")])
def test_verify_accepts_a_correct_model(loss, dtype):
    result = verified(loss=loss, dtype=dtype, cases=12)
    assert result.ok, str(result)
    assert sum(outcome.verdict == "same" for outcome in result.outcomes) == 12
    assert bool(result.left_out) == (loss is noisy)
    assert "12 layouts match a single device" in str(result)
    assert result.to_json()["ok"]


def test_random_layouts_depend_on_the_seed_and_have_names():
    verifier = object.__new__(verifying._Verifier)
    vars(verifier).update(devices=list(range(8)), batch_size=16, excluded=frozenset(), _leaves=[], _seq_len=16)
    samples = [[case.name for case in verifier.sample(random.Random(seed), limit=320)] for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    assert len(set(samples[0])) == len(samples[0]) > 20
    names = [name for name in samples[0] if "rows_parallel" not in name]  # defined by a test
    assert [named(name).name for name in names] == names


@pytest.mark.parametrize(
    ("option", "code"),
    [
        ({"case": "fsdp=2"}, "bad-syntax"),
        ({"case": "fsdp=2; fsdp(); speed=2"}, "unknown-name"),
        ({"dtype": "bfloat16"}, "unknown-choice"),
    ],
)
def test_verify_rejects_invalid_options(option, code):
    with raises(code):
        verified(**option)


def test_verify_scalar_loss_leaves_out_parts_unless_stated():
    result = verified(loss=scalar, case="data=2; ddp()")
    assert result.ok
    assert "the loss is a scalar" in result.left_out[0]
    stated = verified(loss=scalar, case="data=2; ddp(); accumulate=2", loss_is="mean_over_examples")
    assert not stated.ok  # the examples have different weights


@pytest.mark.parametrize("batch", [{}, {"x": np.float32(1)}, {"x": np.zeros((0, 8))}], ids=str)
def test_verify_rejects_a_batch_without_examples(batch):
    with raises("wrong-shape", "batch"):
        mp.verify(model_of(), squares, batch)
