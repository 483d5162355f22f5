"""Errors of `meshpar.moe` for invalid arguments, raised before tracing."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar import moe
from meshpar.layers.auxiliary import report
from meshpar.moe import MoEConfig, Payload, Routing, Weights, dispatch, grouped_matmul, grouped_swiglu, moe_layer
from meshpar.sharding.errors import MeshparError
from tests.errors import raises

INTS, FLOATS = jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 8))
TOP2 = Routing(num_experts=8, top_k=2)
EXPERT_CHOICE = {"choice": "expert", "causal": False}
EXPERTS_CHOOSE = Routing(num_experts=4, top_k=2, normalize=False, **EXPERT_CHOICE)
WITH_CAPACITY = Routing(num_experts=4, top_k=2, capacity_factor=1.0)
CONFIG = MoEConfig(routing=TOP2, mlp_dim=6)
BIASED = MoEConfig(routing=Routing(num_experts=8, top_k=2, score="sigmoid"), mlp_dim=6, bias_rate=0.5)

ROUTINGS = [
    ({"num_experts": 0}, "not-an-int"),
    ({"top_k": 2.0}, "not-an-int"),
    ({"top_k": 9}, "out-of-range"),
    ({"top_k": 1}, "conflict"),
    ({"score": "sigmoids"}, "unknown-choice"),
    ({"choice": "tokens"}, "unknown-choice"),
    ({"normalize": "no"}, "not-a-bool"),
    ({"scale": 0.0}, "out-of-range"),
    ({"capacity_factor": 0}, "out-of-range"),
    ({"groups": 3}, "indivisible"),
    ({"groups": 2, "top_groups": 3}, "out-of-range"),
    ({"groups": 4, "top_groups": 1, "top_k": 3}, "out-of-range"),
    (EXPERT_CHOICE, "conflict"),
    ({**EXPERT_CHOICE, "normalize": False, "groups": 2, "top_groups": 2}, "conflict"),
    ({**EXPERT_CHOICE, "normalize": False, "capacity_factor": 1.0}, "conflict"),
]
CONFIGS = [
    ({"activation": "gelu"}, "unknown-choice"),
    ({"has_biases": 1}, "not-a-bool"),
    ({"gates_inputs": True}, "conflict"),
    ({"routing": "top2"}, "wrong-type"),
    ({"mlp_dim": 0}, "not-an-int"),
    ({"shared_experts": -1}, "not-an-int"),
    ({"bias_rate": -1.0}, "out-of-range"),
    ({"implementation": "rugged"}, "unknown-choice"),
    ({"grouped_matmul": "cublas"}, "unknown-choice"),
    ({"bound_factor": -1.0}, "out-of-range"),
    ({"bound_factor": 1.5, "routing": WITH_CAPACITY}, "conflict"),
    ({"implementation": "ragged", "routing": WITH_CAPACITY}, "conflict"),
    ({"payload": "int8"}, "wrong-type"),
    ({"chunks": 2, "routing": EXPERTS_CHOOSE}, "conflict"),
    ({"bias_rate": 0.1, "routing": EXPERTS_CHOOSE}, "conflict"),
]
FUNCTIONS = [
    (lambda: moe.route([[0.0] * 8], TOP2), "wrong-type"),
    (lambda: moe.route(jnp.zeros((4, 7)), TOP2), "wrong-shape"),
    (lambda: moe.route(jnp.zeros((2, 4, 8)), TOP2), "wrong-shape"),
    (lambda: moe.route(jnp.zeros((4, 8), int), TOP2), "wrong-dtype"),
    (lambda: moe.route(FLOATS, TOP2, bias=jnp.zeros(7)), "wrong-shape"),
    (lambda: moe.route(FLOATS, TOP2, bias=0.5), "wrong-type"),
    (lambda: moe.route(FLOATS, TOP2, bias=jnp.zeros(8, complex)), "wrong-dtype"),
    (lambda: moe.route(jnp.zeros((4, 4)), EXPERTS_CHOOSE, bias=jnp.zeros(4)), "conflict"),
    (lambda: moe.capacity(-1, TOP2), "not-an-int"),
    (lambda: moe.assign_slots(INTS, -1, 8), "not-an-int"),
    (lambda: moe.assign_slots(INTS, 2, 0), "not-an-int"),
    (lambda: moe.assign_slots(INTS.astype(float), 2, 8), "wrong-dtype"),
    (lambda: moe.assign_slots(INTS[0], 2, 8), "wrong-shape"),
    (lambda: moe.count(INTS > 0, 8), "wrong-dtype"),
    (lambda: moe.count([[0, 1]], 8), "wrong-type"),
    (lambda: moe.auxiliary_loss(jnp.zeros((0, 8)), jnp.zeros((0, 2), int)), "wrong-shape"),
    (lambda: moe.auxiliary_loss(FLOATS, jnp.zeros((5, 2), int)), "wrong-shape"),
    (lambda: moe.auxiliary_loss(FLOATS, jnp.zeros((4, 2))), "wrong-dtype"),
    (lambda: moe.auxiliary_loss(jnp.ones((4, 8), int), INTS), "wrong-dtype"),
    (lambda: moe.auxiliary_loss([[1.0]], jnp.zeros((1, 1), int)), "wrong-type"),
    (lambda: moe.auxiliary_loss(FLOATS, INTS, alpha=-0.1), "out-of-range"),
    (lambda: moe.z_loss(jnp.zeros((2, 4, 8))), "wrong-shape"),
    (lambda: moe.z_loss(jnp.zeros((0, 8))), "wrong-shape"),
    (lambda: moe.z_loss(FLOATS, weight="1"), "out-of-range"),
    (lambda: moe.update_bias([0.0], [1.0]), "wrong-type"),
    (lambda: moe.update_bias(jnp.zeros(4), jnp.zeros(4, bool)), "wrong-dtype"),
    (lambda: moe.update_bias(jnp.zeros(4), jnp.zeros(4), rate=math.nan), "out-of-range"),
    (lambda: moe.update_bias(jnp.zeros(()), jnp.zeros(())), "wrong-shape"),
    (lambda: moe.update_bias(jnp.zeros(4), jnp.zeros((2, 4))), "wrong-shape"),
    (lambda: moe.measure(INTS[:3], FLOATS), "wrong-shape"),
    (lambda: moe.measure(INTS, FLOATS, num_ranks=2.0), "not-an-int"),
    (lambda: moe.measure(INTS, FLOATS, num_ranks=3), "indivisible"),
    (lambda: moe.measure(INTS, FLOATS, is_kept=np.ones((1,), bool)), "wrong-shape"),
    (lambda: moe.measure(INTS, FLOATS, is_kept=np.ones((4, 2), np.float32)), "wrong-shape"),
    (lambda: moe.loads({"moe/load": np.ones((1, 4))}), "unknown-name"),
    (lambda: Payload(dispatch="int4"), "unknown-choice"),
    (lambda: Payload(block=0), "not-an-int"),
    (lambda: moe.report_layers(None, CONFIG), "wrong-shape"),
    (lambda: moe.report_layers(moe.RouterStats(*[jnp.zeros(())] * 4), CONFIG), "wrong-shape"),
    (lambda: moe.report_layers(moe.RouterStats(*[jnp.zeros(5)] * 4), CONFIG), "wrong-shape"),
    (lambda: moe.report_layers(moe.RouterStats(*[jnp.zeros((2, 8))] * 4), CONFIG), "wrong-shape"),
]
PLACEMENTS = [
    ([1, 2, 3], 2, {}, "indivisible"),
    ([1, 2, 3, 4], 0, {}, "not-an-int"),
    ([1, 2, 3, 4], 2, {"groups": 2.0}, "not-an-int"),
    ([1, -2], 1, {}, "wrong-type"),
    ([1, np.nan], 1, {}, "wrong-type"),
    ([[1, 2], [3]], 2, {}, "wrong-type"),
    ([[1, 2]], 1, {}, "wrong-type"),
    ([True, False], 1, {}, "wrong-type"),
    ([1, 2, 3, 4], 2, {"groups": 3}, "indivisible"),
    (range(12), 6, {"groups": 4}, "indivisible"),
]


def calls(function, cases, **options):
    return [(functools.partial(function, **{**options, **changes}), code) for changes, code in cases]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        *calls(Routing, ROUTINGS, num_experts=8, top_k=2),
        *calls(MoEConfig, CONFIGS, routing=Routing(num_experts=4, top_k=2), mlp_dim=4),
        *FUNCTIONS,
        *(
            (functools.partial(moe.place, loads, num_ranks, **options), code)
            for loads, num_ranks, options, code in PLACEMENTS
        ),
    ],
)
def test_invalid_arguments(call, code):
    with raises(code):
        call()


@pytest.mark.parametrize(
    ("call", "where", "code"),
    [
        (lambda: moe.auxiliary_loss(FLOATS, INTS, axis="data"), "auxiliary_loss", "unknown-axis"),
        (lambda: moe.z_loss(FLOATS, axis="data"), "z_loss", "unknown-axis"),
        (lambda: moe.update_bias(jnp.zeros(4), jnp.zeros(4), axis="data"), "update_bias", "unknown-axis"),
        (lambda: dense(x=FLOATS[1:]), "reference.moe", "wrong-shape"),
        (lambda: dense(token_ranks=3), "reference.moe", "indivisible"),
        (lambda: dense(params=[jnp.ones((4, 1)), jnp.ones((3, 1))]), "reference.moe", "wrong-shape"),
    ],
)
def test_errors_of_axes_and_references(call, where, code):
    with raises(code, where):
        call()


def dense(x=FLOATS, params=FLOATS, **options):
    return moe.reference.moe(x, INTS, jnp.ones((4, 2)), lambda w, x: x * w, params, **options)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"loss": jnp.ones(3)}, "report"),
        ({"loss": "x"}, "report"),
        ({"metrics": [1]}, "report"),
        ({"metrics": {"a": None}}, "`a`"),
    ],
)
def test_errors_of_reports(options, where):
    with pytest.raises(MeshparError) as error:
        report(**options)
    assert where in error.value.where


# ---- The layer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda x, w, c: (x[0], w, c), "wrong-shape"),
        (lambda x, w, c: (x[None], w, c), "wrong-shape"),
        (lambda x, w, c: (x.astype(int), w, c), "wrong-dtype"),
        (lambda x, w, c: (x.tolist(), w, c), "wrong-type"),
        (lambda x, w, c: (x[:0], w, c), "wrong-shape"),
        (lambda x, w, c: (x, tuple(w), c), "wrong-type"),
        (lambda x, w, c: (x, w._replace(gate=w.gate.astype(int)), c), "wrong-dtype"),
        (lambda x, w, c: (x, w._replace(down=w.gate), c), "wrong-shape"),
        (lambda x, w, c: (x, w._replace(router=w.router[:, :7]), c), "wrong-shape"),
        (lambda x, w, c: (x, w._replace(router=w.router[:, :0]), c), "wrong-shape"),
        (lambda x, w, c: (x, half_of_the_experts(w), c), "wrong-shape"),
        (lambda x, w, c: (x, w, c.routing), "wrong-type"),
        (lambda x, w, c: (x, w, BIASED), "conflict"),
        (lambda x, w, c: (x, w, dataclasses.replace(c, has_biases=True)), "wrong-shape"),
        (lambda x, w, c: (x, w._replace(down_bias=jnp.ones((8, 4))), c), "wrong-shape"),
    ],
)
def test_invalid_arguments_of_moe_layer(change, code):
    with raises(code, "moe_layer"):
        moe_layer(*change(*layer_arrays(), CONFIG))


@pytest.mark.parametrize("implementation", ["auto", "blocked", "tokamax"])
@pytest.mark.parametrize("axes", [{"fsdp": 1}, {"expert": 2}], ids=str)
def test_a_layer_uses_its_grouped_matmul(monkeypatch, implementation, axes):
    """With experts on one device, and with dispatch."""
    requested = []

    def spy(rows, *args, implementation, **options):
        requested.append(implementation)
        return rows

    monkeypatch.setattr("meshpar.moe.layer.grouped_swiglu", spy)
    config = dataclasses.replace(CONFIG, grouped_matmul=implementation)
    with mp.use_rules(mp.MeshSpec(**axes).build(jax.devices()[: math.prod(axes.values())]), mp.expert_parallel()):
        jax.eval_shape(lambda x, weights: moe_layer(x, weights, config), *layer_arrays())
    assert set(requested) == {implementation}


def layer_arrays():
    inward = jnp.ones((8, 4, 6))
    return jnp.ones((8, 4, 4)), Weights(jnp.ones((4, 8)), inward, inward, inward.swapaxes(1, 2))


def half_of_the_experts(weights):
    return Weights(weights.router, *(weight[:4] for weight in weights.experts))


def test_moe_layer_with_incompatible_rules():
    x, weights = layer_arrays()
    expert_mesh = mp.MeshSpec(expert=4).build(jax.devices()[:4])
    with raises("wrong-shape", "moe_layer"), mp.use_rules(expert_mesh, mp.expert_parallel()):
        moe_layer(x, half_of_the_experts(weights), CONFIG)
    strategy = mp.expert_parallel() | mp.Rules(act_expert=("expert", "inner"), batch="expert")
    mesh = mp.MeshSpec(expert=2, inner=2).build(jax.devices()[:4])
    with raises("conflict", "moe_layer"), mp.use_rules(mesh, strategy):
        moe_layer(x, weights, CONFIG)


@pytest.mark.parametrize(
    ("embed_dim", "cfg", "dtype", "code"),
    [
        (0, BIASED, "float32", "not-an-int"),
        (4, BIASED.routing, "float32", "wrong-type"),
        (4, BIASED, "int8", "wrong-dtype"),
        (4, BIASED, "float_32", "wrong-dtype"),
        (4, BIASED, None, "wrong-dtype"),
    ],
)
def test_invalid_arguments_of_the_module(embed_dim, cfg, dtype, code):
    with raises(code, "MoE"):
        moe.MoE(embed_dim, cfg, param_dtype=dtype, rngs=nnx.Rngs(0))


# ---- Kernels ---------------------------------------------------------------------------------------------------------

INT, FLOAT = "int32", "float32"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"num_experts": 6}, "indivisible"),
        ({"implementation": "fixd"}, "unknown-choice"),
        ({"implementation": "ragged"}, "unsupported-feature"),
        ({"implementation": "hierarchical"}, "conflict"),
        ({"implementation": "node-first"}, "conflict"),
        ({"implementation": "node-first", "capacity": 2}, "conflict"),
        ({"nodes_per_token": 2}, "conflict"),
        ({"implementation": "ragged", "capacity": 2}, "conflict"),
        ({"capacity": 0}, "not-an-int"),
        ({"capacity": 2, "bound_factor": 1.0}, "conflict"),
        ({"bound_factor": 0.0}, "out-of-range"),
        ({"payload": "int8"}, "wrong-type"),
        ({"chunks": 16, "capacity": 1}, "indivisible"),
        ({"chunks": 3}, "indivisible"),
        ({"shapes": ((32, 6), (32, 2), (32, 3))}, "wrong-shape"),
        ({"shapes": ((32, 6), (16, 2), (16, 2))}, "wrong-shape"),
        ({"shapes": ((32, 6), (32, 0), (32, 0))}, "wrong-shape"),
        ({"shapes": ((32, 0), (32, 2), (32, 2))}, "wrong-shape"),
        ({"dtypes": (FLOAT, FLOAT, FLOAT)}, "wrong-dtype"),
        ({"dtypes": (INT, INT, FLOAT)}, "wrong-dtype"),
        ({"dtypes": (FLOAT, INT, INT)}, "wrong-dtype"),
        ({"expert_fn": lambda rows, _: rows[1:]}, "wrong-shape"),
        ({"expert_fn": lambda rows, _: [rows]}, "wrong-shape"),
        ({"expert_fn": lambda rows, _: rows.astype(int)}, "wrong-dtype"),
    ],
)
def test_invalid_arguments_of_dispatch(changes, code):
    with raises(code, "dispatch"):
        trace_dispatch(**changes)


def test_unknown_axis_of_dispatch():
    with pytest.raises(MeshparError, match="Did you mean `expert`"):
        trace_dispatch(axis="experts")


def trace_dispatch(
    shapes=((32, 6), (32, 2), (32, 2)), dtypes=(FLOAT, INT, FLOAT), expert_fn=lambda rows, _: rows, **options
):
    options = {"axis": "expert", "num_experts": 8, **options}
    spec, mesh = P("expert"), mp.MeshSpec(expert=4).build(jax.devices()[:4])
    run = jax.shard_map(
        lambda *arrays: dispatch(*arrays, expert_fn, **options)[0], mesh=mesh, in_specs=spec, out_specs=spec
    )
    jax.eval_shape(run, *(jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)))


ROWS, WEIGHTS, SIZES, DOWN = jnp.ones((4, 3)), jnp.ones((2, 3, 5)), jnp.ones(2, jnp.int32), jnp.ones((2, 4, 3))
UP = WEIGHTS.swapaxes(1, 2)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: grouped_matmul(ROWS, jnp.ones((2, 5, 3)), SIZES), "wrong-shape"),
        (lambda: grouped_matmul(ROWS, WEIGHTS, jnp.ones(3, jnp.int32)), "wrong-shape"),
        (lambda: grouped_matmul(ROWS, WEIGHTS[:0], SIZES[:0]), "wrong-shape"),
        (lambda: grouped_matmul(ROWS[:, :0], WEIGHTS[:, :0], SIZES), "wrong-shape"),
        (lambda: grouped_matmul(ROWS, WEIGHTS, SIZES, implementation="blocks"), "unknown-choice"),
        (lambda: grouped_matmul(ROWS, WEIGHTS, SIZES, block=0), "not-an-int"),
        (lambda: grouped_matmul(ROWS, WEIGHTS, SIZES, typical_rows=0), "not-an-int"),
        (lambda: grouped_swiglu(ROWS, WEIGHTS, WEIGHTS[:, :, 1:], DOWN, SIZES), "wrong-shape"),
        (lambda: grouped_swiglu(ROWS, WEIGHTS, WEIGHTS, DOWN, SIZES), "wrong-shape"),
        (lambda: grouped_swiglu(ROWS, WEIGHTS, WEIGHTS, UP, SIZES, biases=(SIZES,) * 3), "wrong-shape"),
        (lambda: grouped_swiglu(ROWS, WEIGHTS, WEIGHTS, UP, SIZES, activation="relu"), "unknown-choice"),
        (lambda: grouped_matmul(ROWS, WEIGHTS.astype("bfloat16"), SIZES), "wrong-dtype"),
        (lambda: grouped_matmul(ROWS, WEIGHTS, jnp.ones(2)), "wrong-dtype"),
        (lambda: grouped_matmul(ROWS, WEIGHTS, np.array([3, 2])), "out-of-range"),
        (lambda: grouped_matmul(ROWS, WEIGHTS, np.array([-1, 5])), "out-of-range"),
    ],
)
def test_invalid_arguments_of_grouped_matmuls(call, code):
    with raises(code, "grouped_"):
        call()
