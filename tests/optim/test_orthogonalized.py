"""Muon on a mesh: equality with optax on a single device, communication volume, and the arrays left to Adam."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.optim.orthogonalized import UPDATES, Updating, exchange, matrices
from tests.equal import VOCAB, assert_same, mesh_of, model_of, token_batches, train
from tests.errors import raises
from tests.grid import cases

ROWS, SEQ = 16, 8
CONFIG = {
    "vocab_size": VOCAB, "num_layers": 4, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
    "mlp_dim": 32,
}  # fmt: skip
FSDP_TENSOR = (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel())
CASES = {
    "ddp": (mp.MeshSpec(data=8), mp.ddp(), {}),
    "zero1": (mp.MeshSpec(fsdp=8), mp.zero1(), {}),
    "fsdp": (mp.MeshSpec(fsdp=8), mp.fsdp(), {}),
    "hsdp": (mp.MeshSpec(data=2, fsdp=4), mp.hsdp(), {}),
    "hsdp|tensor": (mp.MeshSpec(data=2, fsdp=2, tensor=2), mp.hsdp() | mp.tensor_parallel(), {}),
    "fsdp|tensor+sequence": (FSDP_TENSOR[0], mp.fsdp() | mp.tensor_parallel(sequence=True), {}),
    "fsdp|tensor|accumulate once": (*FSDP_TENSOR, {"accumulate": 2, "reduce_gradients": "once"}),
    "stages": (
        mp.MeshSpec(stage=2, fsdp=2, tensor=2),
        mp.fsdp() | mp.tensor_parallel() | mp.pipeline_parallel(stages=2, microbatches=4, schedule="1f1b"),
        {},
    ),
}


def five_steps(make, framework, spec, strategy, options, params=None):
    model = model_of(framework, TransformerConfig(**CONFIG, param_dtype="float32"), ROWS, SEQ)
    names = {decision.path: decision.leaf.names for decision in mp.shardings(model, mesh_of(spec), strategy).params}
    tx = make(1e-2, consistent_rms=0.2, muon_weight_dimension_numbers=matrices(names))
    return train(model, token_batches(ROWS, SEQ, 5), spec, strategy, tx=tx, params=params, **options)


@functools.cache
def by_optax(framework):
    return five_steps(optax.contrib.muon, framework, mp.MeshSpec(), mp.ddp(), {})


@pytest.mark.parametrize(
    ("framework", "case"),
    cases(("nnx", "hsdp"), grid=[(framework, case) for framework in ("nnx", "linen") for case in CASES]),
)
def test_muon_equals_optax_on_one_device(framework, case):
    """The tolerance is about ten float32 roundings of a weight of size 1."""
    expected = by_optax(framework)
    actual = five_steps(mp.muon, framework, *CASES[case], params=expected.start.params)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-6)
    assert_same(actual.params, expected.params, atol=1e-6)


# A group of matrices --------------------------------------------------------------------------------------------------


def updates_of(tx, params, spec=None, **axes):
    """Return the second of two updates of matrices with the same spec."""
    grads = jax.tree.map(lambda x: np.sin(7 * x), params)

    def two(params, grads):
        state = tx.init(params)
        _, state = tx.update(grads, state, params)
        return tx.update(params, state, params)[0]

    if spec is None:
        return jax.jit(two)(params, grads)
    mesh = mp.MeshSpec(**axes).build(jax.devices()[: math.prod(axes.values())])
    with UPDATES.set(Updating(mesh, dict.fromkeys(params, spec))):
        return jax.jit(two)(*jax.device_put((params, grads), jax.NamedSharding(mesh, spec)))


@pytest.mark.parametrize(
    ("num", "spec", "axes"),
    cases(
        (3, P(None, "fsdp", "tensor"), {"fsdp": 4, "tensor": 2}),  # fewer than ranks, both sides sharded
        (9, P(None, None, "fsdp"), {"data": 2, "fsdp": 4}),  # more than ranks, replicas share the work
        (1, P(None, "fsdp", None), {"fsdp": 4}),  # gathered
        (16, P("expert", None, "fsdp"), {"expert": 2, "fsdp": 4}),  # ranks of `expert` have different matrices
        grid=[
            (3, P(None, "fsdp", "tensor"), {"fsdp": 4, "tensor": 2}),
            (9, P(None, None, "fsdp"), {"data": 2, "fsdp": 4}),
            (1, P(None, "fsdp", None), {"fsdp": 4}),
            (1, P(None, "tensor", "fsdp"), {"fsdp": 4, "tensor": 2}),
            (3, P(None, ("tensor", "fsdp"), None), {"fsdp": 4, "tensor": 2}),
            (16, P("expert", None, "fsdp"), {"expert": 2, "fsdp": 4}),
            (8, P(), {"data": 8}),  # replicated: each rank orthogonalizes a matrix
            (8, P("fsdp", "tensor"), {"fsdp": 4, "tensor": 2}),  # layers are sharded, too
            (8, P("fsdp"), {"fsdp": 8}),  # no communication
        ],
    ),
)
def test_result_does_not_depend_on_the_distribution(num, spec, axes):
    draw = np.random.default_rng(0)
    params = {
        name: draw.normal(size=(num, *shape)).astype(np.float32) for name, shape in (("up", (8, 16)), ("down", (16, 8)))
    }
    # If both sides have the same sharding, `up` and the transposed `down` form a group of 2 num matrices.
    dims = dict.fromkeys(params, optax.contrib.MuonDimensionNumbers((1,), (2,)))
    expected = updates_of(optax.contrib.muon(1.0, muon_weight_dimension_numbers=dims), params)
    actual = updates_of(mp.muon(1.0, muon_weight_dimension_numbers=dims), params, spec, **axes)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-6), actual, expected)


def test_every_option_has_the_effect_of_optax():
    draw = np.random.default_rng(0)
    shapes = {"up": (8, 16), "down": (16, 8), "bias": (16,), "scale": (8,)}
    params = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    options = {
        "ns_coeffs": (3.0, -4.0, 2.0), "ns_steps": 3, "beta": 0.8, "eps": 0.1, "weight_decay": 0.1,
        "weight_decay_mask": {"up": True, "down": False, "bias": False, "scale": False}, "mu_dtype": "float32",
        "adam_b1": 0.7, "adam_b2": 0.9, "adam_eps_root": 0.3, "adam_weight_decay": 0.2, "adam_learning_rate": 0.5,
        "consistent_rms": 0.2, "nesterov": False,
    }  # fmt: skip
    expected, actual = (updates_of(make(0.1, **options), params) for make in (optax.contrib.muon, mp.muon))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), actual, expected)


def test_empty_arrays_are_left_to_adam():
    """For a matrix without rows and a stack without layers, optax divides by zero."""
    params = {"none": np.zeros((0, 8), np.float32), "stack": np.zeros((0, 8, 8), np.float32)}
    dims = {"none": optax.contrib.MuonDimensionNumbers(), "stack": optax.contrib.MuonDimensionNumbers((1,), (2,))}
    updates = updates_of(mp.muon(1.0, muon_weight_dimension_numbers=dims), params)
    assert {name: x.shape for name, x in updates.items()} == {"none": (0, 8), "stack": (0, 8, 8)}


def test_exchange_sends_the_smaller_volume():
    """A rank sends 2 (N-1)/N per owned matrix, or (N-1)/N per gathered matrix."""
    assert exchange(1, ranks=8) == ("gather", 7 / 8)
    assert exchange(2, ranks=8) == ("owners", 2 * 7 / 8)  # the volume of a gather, and half the work
    assert exchange(32, ranks=8) == ("owners", 2 * 7 / 8 * 4)  # a gather sends 28
    assert exchange(3, ranks=2) == ("gather", 3 / 2)
    assert exchange(32, ranks=4, replicas=2) == ("owners", 2 * 3 / 4 * 4 + 4)
    assert exchange(8, ranks=1) == ("owners", 0)


# Expected collectives -------------------------------------------------------------------------------------------------


def reported(tx_of, case="fsdp"):
    cfg = TransformerConfig(
        vocab_size=80, num_layers=8, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128
    )
    model, (spec, strategy, options) = cfg.build(), CASES[case]
    state = mp.abstract_state(model, tx_of(model.names()), mesh=spec.build(), strategy=strategy)
    shape = jax.ShapeDtypeStruct((16, 64), np.int32)
    return mp.explain(mp.train_step(next_token_loss, **options), state, {"inputs": shape, "targets": shape})


def sent(report):
    return sum(total.bytes_sent_per_device for by_kind in report.totals.values() for total in by_kind.values())


def recipe_muon(names):
    return mp.Muon(clip_norm=None, schedule="constant").build(steps=5, names=names)


def optax_muon(names):
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=matrices(names))


@pytest.mark.matrix
def test_explain_expects_the_communication_of_muon():
    """In addition to AdamW's step: 8 layers with 4 matrices of 64 x 64 and 3 of 64 x 128, on 8 ranks."""
    muon, adam = reported(recipe_muon), reported(lambda names: optax.adamw(1e-3))
    assert not muon.matching.unexpected
    assert not muon.matching.missing
    square, rectangular = 4 * 64 * 64 * exchange(4 * 8, ranks=8)[1], 4 * 64 * 128 * exchange(3 * 8, ranks=8)[1]
    assert sent(muon) - sent(adam) == pytest.approx(square + rectangular, rel=0.01)  # and norms and counts
    lines = [line for line in muon.matching.kernels if line.kind == "all-to-all"]
    assert sum(line.actual_bytes for line in lines) == pytest.approx(square + rectangular)
    assert {line.axes for line in lines} == {("fsdp",)}


@pytest.mark.matrix
def test_optax_muon_sends_more_and_is_unexpected():
    report = reported(optax_muon)
    assert report.matching.unexpected
    assert sent(report) > 1.5 * sent(reported(recipe_muon))


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["ddp", "zero1", "hsdp", "hsdp|tensor", "fsdp|tensor+sequence"])
def test_collectives_of_muon_match(case):
    matching = reported(recipe_muon, case).matching
    assert not matching.unexpected
    assert not matching.missing


# Muon in a recipe -----------------------------------------------------------------------------------------------------


def test_embeddings_norms_and_routers_are_left_to_adam():
    names = {
        "embed/embedding": ("vocab", "embed"), "head/kernel": ("embed", "vocab"),
        "router": ("layers", "embed", "expert"), "up": ("layers", "expert", "embed", "mlp"),
        "query": ("embed", "heads", "head_dim"), "out": ("layers", "heads", "head_dim", "embed"),
        "latent": ("embed", None), "scale": ("layers", "embed"),
    }  # fmt: skip
    params = {path: np.zeros((2,) * len(dims)) for path, dims in names.items()} | {"bare": np.zeros((2, 2))}
    dims = optax.contrib.MuonDimensionNumbers
    assert matrices(names)(params) == dict.fromkeys(names) | {
        "up": dims((2,), (3,)), "query": dims((0,), (1, 2)), "out": dims((1, 2), (3,)), "latent": dims((0,), (1,)),
        "bare": dims((0,), (1,)),
    }  # fmt: skip


def test_recipe_with_bfloat16_moments_on_the_host():
    model = TransformerConfig(**CONFIG).build()
    tx = mp.Muon(moments="bfloat16", offload=True).build(steps=100, names=model.names())
    state = mp.abstract_state(model, tx, mesh=mp.MeshSpec(fsdp=8).abstract(), strategy=mp.fsdp())
    arrays = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert {(x.dtype.name, x.sharding.memory_kind) for x in arrays} == {("bfloat16", "pinned_host")}
    # A matrix has a momentum, other arrays have two moments.
    assert state.table.totals.host_bytes < 0.6 * sum(decision.bytes_per_device for decision in state.table.params)


@pytest.mark.parametrize(
    ("field", "value"), [("momentum", 1.0), ("ns_steps", 0), ("rms", 0)], ids=lambda value: str(value)
)
def test_invalid_recipe_is_refused(field, value):
    with pytest.raises(mp.MeshparError, match=field):
        mp.Muon(**{field: value})


@pytest.mark.parametrize(
    ("dims", "code"), [({"w": optax.contrib.MuonDimensionNumbers((0,), (0,))}, "wrong-shape"), ({}, "not-found")]
)
def test_invalid_dimension_numbers_are_refused(dims, code):
    with raises(code, "`w`"):
        mp.muon(1.0, muon_weight_dimension_numbers=dims).init({"w": np.zeros((2, 2), np.float32)})
