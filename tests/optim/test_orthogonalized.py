"""Muon on a mesh: the values of optax's on one device, the bytes of its closed form, and what goes to Adam."""

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
from meshpar.optim.orthogonalized import Updating, exchange, matrices
from meshpar.sharding.context import within
from tests.equal import VOCAB, assert_same, mesh_of, model_of, token_batches, train
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
    names = {one.path: one.leaf.names for one in mp.shardings(model, mesh_of(spec), strategy).params}
    tx = make(1e-2, consistent_rms=0.2, muon_weight_dimension_numbers=matrices(names))
    return train(model, token_batches(ROWS, SEQ, 5), spec, strategy, tx=tx, params=params, **options)


@functools.cache
def by_optax(framework):
    return five_steps(optax.contrib.muon, framework, mp.MeshSpec(), mp.ddp(), {})


@pytest.mark.parametrize(
    ("framework", "case"),
    cases(("nnx", "hsdp"), grid=[(framework, case) for framework in ("nnx", "linen") for case in CASES]),
)
def test_as_optax_on_one_device(framework, case):
    """Float32, to some ten roundings of a weight of about one."""
    expected = by_optax(framework)
    found = five_steps(mp.muon, framework, *CASES[case], params=expected.start.params)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    assert_same(found.params, expected.params, atol=1e-6)


# One group of matrices ------------------------------------------------------------------------------------------------


def updates_of(tx, params, spec=None, **axes):
    """Two updates of matrices that lie by one spec."""
    grads = jax.tree.map(lambda x: np.sin(7 * x), params)

    def two(params, grads):
        state = tx.init(params)
        _, state = tx.update(grads, state, params)
        return tx.update(params, state, params)[0]

    if spec is None:
        return jax.jit(two)(params, grads)
    mesh = mp.MeshSpec(**axes).build(jax.devices()[: math.prod(axes.values())])
    here = Updating(mesh, dict.fromkeys(params, spec))
    with within(updates=here):
        return jax.jit(two)(*jax.device_put((params, grads), jax.NamedSharding(mesh, spec)))


@pytest.mark.parametrize(
    ("num", "spec", "axes"),
    cases(
        (3, P(None, "fsdp", "tensor"), {"fsdp": 4, "tensor": 2}),  # fewer than ranks, split along both sides
        (9, P(None, None, "fsdp"), {"data": 2, "fsdp": 4}),  # more than ranks, and replicas share them
        (1, P(None, "fsdp", None), {"fsdp": 4}),  # gathered
        grid=[
            (3, P(None, "fsdp", "tensor"), {"fsdp": 4, "tensor": 2}),
            (9, P(None, None, "fsdp"), {"data": 2, "fsdp": 4}),
            (1, P(None, "fsdp", None), {"fsdp": 4}),
            (1, P(None, "tensor", "fsdp"), {"fsdp": 4, "tensor": 2}),
            (3, P(None, ("tensor", "fsdp"), None), {"fsdp": 4, "tensor": 2}),
            (8, P(), {"data": 8}),  # whole everywhere: each orthogonalises one
            (8, P("fsdp", "tensor"), {"fsdp": 4, "tensor": 2}),  # layers are split, too
            (8, P("fsdp"), {"fsdp": 8}),  # nothing is sent
        ],
    ),
)
def test_every_way_to_share_them_gives_the_same(num, spec, axes):
    draw = np.random.default_rng(0)
    params = {
        name: draw.normal(size=(num, *shape)).astype(np.float32) for name, shape in (("up", (8, 16)), ("down", (16, 8)))
    }
    # A stack of 2 num in one group: `down` lies as the transposed `up` does where both sides are split alike.
    own = {"muon_weight_dimension_numbers": optax.contrib.MuonDimensionNumbers((1,), (2,))}
    own["muon_weight_dimension_numbers"] = dict.fromkeys(params, own["muon_weight_dimension_numbers"])
    expected = updates_of(optax.contrib.muon(1.0, **own), params)
    found = updates_of(mp.muon(1.0, **own), params, spec, **axes)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-6), found, expected)


def test_what_is_empty_is_left_to_adam():
    """A layer of no columns, a stack of no layers: optax divides by their sizes."""
    params = {"none": np.zeros((0, 8), np.float32), "stack": np.zeros((0, 8, 8), np.float32)}
    dims = {"none": optax.contrib.MuonDimensionNumbers(), "stack": optax.contrib.MuonDimensionNumbers((1,), (2,))}
    found = updates_of(mp.muon(1.0, muon_weight_dimension_numbers=dims), params)
    assert {name: x.shape for name, x in found.items()} == {"none": (0, 8), "stack": (0, 8, 8)}


def test_what_a_way_sends():
    """By hand, in matrices a rank sends: 2 (N-1)/N a matrix owned, against (N-1)/N of every one that is gathered."""
    assert exchange(1, ranks=8) == ("gather", 7 / 8)
    assert exchange(2, ranks=8) == ("owners", 2 * 7 / 8)  # as much as gathering both, and half the work
    assert exchange(32, ranks=8) == ("owners", 2 * 7 / 8 * 4)  # an eighth of the 28 that a gather sends, twice
    assert exchange(3, ranks=2) == ("gather", 3 / 2)
    assert exchange(32, ranks=4, replicas=2) == ("owners", 2 * 3 / 4 * 4 + 4)
    assert exchange(8, ranks=1) == ("owners", 0)


# What explain says ----------------------------------------------------------------------------------------------------


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


def ours(names):
    return mp.Muon(clip_norm=None, schedule="constant").build(steps=5, names=names)


def optaxs(names):
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=matrices(names))


@pytest.mark.matrix
def test_explain_promises_what_it_sends():
    """Beside what AdamW's step sends: of 8 layers 4 matrices of 64 x 64 and 3 of 64 x 128, on 8 ranks."""
    muon, adam = reported(ours), reported(lambda names: optax.adamw(1e-3))
    assert not muon.promise.unexpected
    assert not muon.promise.missing
    square, wide = 4 * 64 * 64 * exchange(4 * 8, ranks=8)[1], 4 * 64 * 128 * exchange(3 * 8, ranks=8)[1]
    assert sent(muon) - sent(adam) == pytest.approx(square + wide, rel=0.01)  # and norms and counts
    lines = [line for line in muon.promise.kernels if line.kind == "all-to-all"]
    assert sum(line.found_bytes for line in lines) == pytest.approx(square + wide)
    assert {line.axes for line in lines} == {("fsdp",)}


@pytest.mark.matrix
def test_optaxs_own_sends_more_and_nothing_promises_it():
    theirs = reported(optaxs)
    assert theirs.promise.unexpected
    assert sent(theirs) > 1.5 * sent(reported(ours))


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["ddp", "zero1", "hsdp", "hsdp|tensor", "fsdp|tensor+sequence"])
def test_nothing_is_unexpected_under(case):
    found = reported(ours, case).promise
    assert not found.unexpected
    assert not found.missing


# The recipe's ---------------------------------------------------------------------------------------------------------


def test_tables_norms_and_routers_are_adams():
    names = {
        "embed/embedding": ("vocab", "embed"), "head/kernel": ("embed", "vocab"),
        "router": ("layers", "embed", "expert"), "up": ("layers", "expert", "embed", "mlp"),
        "query": ("embed", "heads", "head_dim"), "out": ("layers", "heads", "head_dim", "embed"),
        "latent": ("embed", None), "scale": ("layers", "embed"),
    }  # fmt: skip
    params = {path: np.zeros((2,) * len(named)) for path, named in names.items()} | {"bare": np.zeros((2, 2))}
    dims = optax.contrib.MuonDimensionNumbers
    assert matrices(names)(params) == dict.fromkeys(names) | {
        "up": dims((2,), (3,)), "query": dims((0,), (1, 2)), "out": dims((1, 2), (3,)), "latent": dims((0,), (1,)),
        "bare": dims((0,), (1,)),
    }  # fmt: skip


def test_moments_and_offloading_and_decay_of_the_recipe_s():
    model = TransformerConfig(**CONFIG).build()
    tx = mp.Muon(moments="bfloat16", offload=True).build(steps=100, names=model.names())
    state = mp.abstract_state(model, tx, mesh=mp.MeshSpec(fsdp=8).abstract(), strategy=mp.fsdp())
    kept = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert {(x.dtype.name, x.sharding.memory_kind) for x in kept} == {("bfloat16", "pinned_host")}
    # One momentum of each matrix, two moments of each of the rest.
    own = sum(d.bytes_per_device for d in state.table.params)
    assert state.table.totals.host_bytes < 0.6 * own


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mp.Muon(momentum=1.0), "momentum.*below 1"),
        (lambda: mp.Muon(ns_steps=0), "ns_steps.*at least 1"),
        (lambda: mp.Muon(rms=0), "rms.*above 0"),
        (lambda: init({"w": optax.contrib.MuonDimensionNumbers((0,), (0,))}), "w.*rows.*none twice.*None leaves it"),
        (lambda: init({}), "w.*say nothing of it"),
    ],
)
def test_what_does_not_go_is_told(make, says):
    with pytest.raises(mp.MeshparError, match=says):
        make()


def init(dims):
    return mp.muon(1.0, muon_weight_dimension_numbers=dims).init({"w": np.zeros((2, 2), np.float32)})
