"""Mistakes in everything of `meshpar.moe`, told in four parts before anything is traced or sent."""

from __future__ import annotations

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
from meshpar.sharding.types import MeshparError

WHOLE, FLOATS = jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 8))
TOP2 = Routing(num_experts=8, top_k=2)
CHOSEN = {"choice": "expert", "causal": False}
BY_EXPERTS = Routing(num_experts=4, top_k=2, normalize=False, **CHOSEN)
WITH_ROOM = Routing(num_experts=4, top_k=2, capacity_factor=1.0)
CONFIG = MoEConfig(routing=TOP2, mlp_dim=6)
BIASED = MoEConfig(routing=Routing(num_experts=8, top_k=2, score="sigmoid"), mlp_dim=6, bias_rate=0.5)

ROUTINGS = [
    ({"num_experts": 0}, "whole number"),
    ({"top_k": 2.0}, "whole number"),
    ({"top_k": 9}, "Use at most 8"),
    ({"top_k": 1}, "the router gets no gradient"),
    ({"score": "sigmoids"}, "Did you mean `sigmoid`"),
    ({"choice": "tokens"}, "Did you mean `token`"),
    ({"normalize": "no"}, "True or False"),
    ({"causal": None}, "True or False"),
    ({"force": 2}, "True or False"),
    ({"scale": 0.0}, "a number above 0"),
    ({"scale": True}, "a number above 0"),
    ({"capacity_factor": 0}, "or None"),
    ({"capacity_factor": math.inf}, "or None"),
    ({"groups": 3}, "a divisor of 8"),
    ({"groups": 2, "top_groups": 3}, "no more to visit than there are"),
    ({"groups": 4, "top_groups": 1, "top_k": 3}, "8 experts, 2 in 1 groups"),
    ({**CHOSEN}, "Use normalize=False"),
    ({**CHOSEN, "normalize": False, "groups": 2, "top_groups": 2}, "Leave groups out"),
    ({**CHOSEN, "normalize": False, "capacity_factor": 1.0}, "Leave capacity_factor out"),
]
CONFIGS = [
    ({"routing": "top2"}, "it is a Routing"),
    ({"mlp_dim": 0}, "whole number, 1 or more"),
    ({"shared_experts": -1}, "whole number, 0 or more"),
    ({"bias_rate": -1.0}, "from 0 on"),
    ({"bias_rate": jnp.ones(())}, "from 0 on"),
    ({"z_weight": math.inf}, "from 0 on"),
    ({"implementation": "rugged"}, "`ragged`"),
    ({"bound_factor": -1.0}, "be -1.0"),
    ({"bound_factor": "2"}, "be '2'"),
    ({"bound_factor": 1.5, "routing": WITH_ROOM}, "or the capacity_factor"),
    ({"implementation": "ragged", "routing": WITH_ROOM}, "travel whole"),
    ({"implementation": "ragged", "routing": BY_EXPERTS}, "Leave implementation out"),
    ({"payload": "int8"}, "says of each way"),
    ({"chunks": 2, "routing": BY_EXPERTS}, "Leave chunks out"),
    ({"bias_rate": 0.1, "routing": BY_EXPERTS}, "Leave bias_rate out"),
]
FUNCTIONS = [
    (lambda: moe.route([[0.0] * 8], TOP2), "a list for `logits`"),
    (lambda: moe.route(jnp.zeros((4, 7)), TOP2), r"\[tokens, 8\]"),
    (lambda: moe.route(jnp.zeros((2, 4, 8)), TOP2), "Merge batch and sequence"),
    (lambda: moe.route(jnp.zeros((4, 8), int), TOP2), "int32"),
    (lambda: moe.route(FLOATS, TOP2, bias=jnp.zeros(7)), r"Give \(8,\)"),
    (lambda: moe.route(FLOATS, TOP2, bias=0.5), "a float for `bias`"),
    (lambda: moe.route(FLOATS, TOP2, bias=jnp.zeros(8, complex)), "`bias` of shape .* complex64"),
    (lambda: moe.route(jnp.zeros((4, 4)), BY_EXPERTS, bias=jnp.zeros(4)), "Leave the bias out"),
    (lambda: moe.capacity(-1, TOP2), "be -1"),
    (lambda: moe.capacity(1.5, TOP2), "be 1.5"),
    (lambda: moe.kept(WHOLE, -1, 8), "0 or more"),
    (lambda: moe.kept(WHOLE, 1.5, 8), "be 1.5"),
    (lambda: moe.kept(WHOLE, 2, 0), "1 or more"),
    (lambda: moe.kept(WHOLE.astype(float), 2, 8), "dtype float32"),
    (lambda: moe.kept(WHOLE[0], 2, 8), r"an array \[T, k\]"),
    (lambda: moe.count(WHOLE > 0, 8), "dtype bool"),
    (lambda: moe.count([[0, 1]], 8), "a list for `experts`"),
    # Without a check the 3D logits gave a loss of four numbers, and floats for experts some loss or other.
    (lambda: moe.auxiliary_loss(jnp.zeros((0, 8)), jnp.zeros((0, 2), int)), "of one at the least"),
    (lambda: moe.auxiliary_loss(FLOATS, jnp.zeros((5, 2), int)), "of one `Routed`"),
    (lambda: moe.auxiliary_loss(FLOATS, jnp.zeros((4, 2))), "`experts` of shape .* dtype float32"),
    (lambda: moe.auxiliary_loss(jnp.ones((4, 8), int), WHOLE), "`scores` of shape .* dtype int32"),
    (lambda: moe.auxiliary_loss([[1.0]], jnp.zeros((1, 1), int)), "a list for `scores`"),
    (lambda: moe.auxiliary_loss(FLOATS, WHOLE, alpha=-0.1), "a number from 0 on"),
    (lambda: moe.auxiliary_loss(FLOATS, WHOLE, axis="data"), "not inside a `jax.shard_map`"),
    (lambda: moe.z_loss(jnp.zeros((2, 4, 8))), r"an array \[T, E\]"),
    (lambda: moe.z_loss(jnp.zeros((0, 8))), "one token at the least"),
    (lambda: moe.z_loss(FLOATS, weight="1"), "be '1'"),
    (lambda: moe.z_loss(FLOATS, axis="data"), "not inside a `jax.shard_map`"),
    (lambda: moe.update_bias([0.0], [1.0]), "a list for `bias`"),
    (lambda: moe.update_bias(jnp.zeros(4), jnp.zeros(4, bool)), "`loads` of shape .* dtype bool"),
    (lambda: moe.update_bias(jnp.zeros(4), jnp.zeros(4), rate=math.nan), "be nan"),
    (lambda: moe.update_bias(jnp.zeros(()), jnp.zeros(())), "one load for each bias"),
    (lambda: moe.update_bias(jnp.zeros(4), jnp.zeros((2, 4))), "Give one load for each bias"),
    (lambda: moe.update_bias(jnp.zeros(4), jnp.zeros(4), axis="data"), "not inside a `jax.shard_map`"),
    # Three choices with four tokens' scores, or room for all said by one, gave some load or other.
    (lambda: moe.measure(WHOLE[:3], FLOATS), "of the same tokens"),
    (lambda: moe.measure(WHOLE[:0], FLOATS[:0]), "of one at the least"),
    (lambda: moe.measure(WHOLE.astype(float), FLOATS), "`experts` of shape .* dtype float32"),
    (lambda: moe.measure(WHOLE, FLOATS.astype(int)), "`scores` of shape .* dtype int"),
    (lambda: moe.measure(WHOLE, FLOATS, num_ranks=2.0), "be 2.0"),
    (lambda: moe.measure(WHOLE, FLOATS, num_ranks=True), "be True"),
    (lambda: moe.measure(WHOLE, FLOATS, num_ranks=3), "split experts over 3 ranks"),
    (lambda: moe.measure(WHOLE, FLOATS, kept=np.ones((1,), bool)), "whether it was kept"),
    (lambda: moe.measure(WHOLE, FLOATS, kept=np.ones((4, 2), np.float32)), "whether it was kept"),
    (lambda: moe.loads({"moe/load": np.ones((1, 4))}), "no `moe/rank_load`"),
    (lambda: Payload(dispatch="int4"), "int8"),
    (lambda: Payload(block=0), "block=0"),
    (lambda: moe.report_layers(None, CONFIG), "report a NoneType"),
    (lambda: moe.report_layers(moe.RouterStats(*[jnp.zeros(())] * 4), CONFIG), r"loads \(\)"),
    (lambda: moe.report_layers(moe.RouterStats(*[jnp.zeros(5)] * 4), CONFIG), r"loads \(5,\)"),
    (lambda: moe.report_layers(moe.RouterStats(*[jnp.zeros((2, 8))] * 4), CONFIG), r"loss \(2, 8\)"),
    (lambda: report(loss=jnp.ones(3)), r"it has shape \(3,\)"),
    (lambda: report(loss="x"), "use 'x'"),
    (lambda: report(metrics=[1]), "a dict from names to arrays"),
    (lambda: report(metrics={"a": None}), "`a`: cannot use None"),
]
PLACEMENTS = [
    ([1, 2, 3], 2, {}, "assign 3 experts to 2 ranks"),
    ([1, 2, 3, 4], 0, {}, "set num_ranks=0"),
    ([1, 2, 3, 4], 2.0, {}, "set num_ranks=2.0"),
    ([1, 2, 3, 4], True, {}, "set num_ranks=True"),
    ([1, 2, 3, 4], "2", {}, "set num_ranks='2'"),
    ([1, 2, 3, 4], 2, {"groups": 2.0}, "set groups=2.0"),
    ([1, -2], 1, {}, "finite, non-negative"),
    ([1, np.nan], 1, {}, "finite, non-negative"),
    ([[1, 2], [3]], 2, {}, "finite, non-negative"),
    ([[1, 2]], 1, {}, "of one layer"),
    ([True, False], 1, {}, "numbers of tokens"),
    ([1, 2, 3, 4], 2, {"groups": 3}, "place 3 groups of 4"),
    (range(12), 6, {"groups": 4}, "a multiple of the other"),
]


def asked(function, cases, **given):
    return [(functools.partial(function, **{**given, **changes}), told) for changes, told in cases]


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        *asked(Routing, ROUTINGS, num_experts=8, top_k=2),
        *asked(MoEConfig, CONFIGS, routing=Routing(num_experts=4, top_k=2), mlp_dim=4),
        *FUNCTIONS,
        *((functools.partial(moe.place, loads, ranks, **more), told) for loads, ranks, more, told in PLACEMENTS),
    ],
)
def test_mistakes_are_told(ask, told):
    with pytest.raises(MeshparError, match=told):
        ask()


# ---------------------------------------------------------------------------------------------------------------------
# The layer
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x, w, c: (x[0], w, c), r"x` of shape \(4, 4\) .* \[B, T, d\]"),
        (lambda x, w, c: (x[None], w, c), r"\[B, T, d\]"),
        (lambda x, w, c: (x.astype(int), w, c), "dtype int"),
        (lambda x, w, c: (x.tolist(), w, c), "a list for `x`"),
        (lambda x, w, c: (x[:0], w, c), "one token at the least"),
        (lambda x, w, c: (x, tuple(w), c), "a tuple for the weights"),
        (lambda x, w, c: (x, w._replace(gate=w.gate.astype(int)), c), "`gate` of shape"),
        (lambda x, w, c: (x, w._replace(down=w.gate), c), r"`down` of shape \(8, 4, 6\)"),
        (lambda x, w, c: (x, w._replace(router=w.router[:, :7]), c), "a router of shape"),
        (lambda x, w, c: (x, w._replace(router=w.router[:, :0]), c), r"a router of shape \(4, 0\)"),
        (lambda x, w, c: (x, Weights(w.router, *(of[:4] for of in w[1:])), c), "be that of 8 experts"),
        (lambda x, w, c: (x, w, c.routing), "described by a MoEConfig"),
        (lambda x, w, c: (x, w, BIASED), "without its balancing bias"),
    ],
)
def test_what_is_no_layer_is_told_before_it_is_traced(change, told):
    """Without a mesh, tokens [T, d] gave an output [T, d, 1], and half of the experts the sum over that half."""
    with pytest.raises(MeshparError, match=told):
        moe_layer(*change(*layer_arrays(), CONFIG))


def layer_arrays():
    inward = jnp.ones((8, 4, 6))
    return jnp.ones((8, 4, 4)), Weights(jnp.ones((4, 8)), inward, inward, inward.swapaxes(1, 2))


def test_layers_that_do_not_fit_the_rules():
    x, weights = layer_arrays()
    fewer = Weights(weights.router, *(of[:4] for of in weights[1:]))
    alone = mp.MeshSpec(expert=4).build(jax.devices()[:4])
    with pytest.raises(MeshparError, match="be 4 of 8 experts"), mp.use_rules(alone, mp.expert_parallel()):
        moe_layer(x, fewer, CONFIG)
    strategy = mp.expert_parallel() | mp.Rules(act_expert=("expert", "inner"), batch="expert")
    mesh = mp.MeshSpec(expert=2, inner=2).build(jax.devices()[:4])
    with pytest.raises(MeshparError, match="replicated over `inner`"), mp.use_rules(mesh, strategy):
        moe_layer(x, weights, CONFIG)


@pytest.mark.parametrize(
    ("width", "cfg", "dtype", "told"),
    [
        (0, BIASED, "float32", r"embed_dim=.* be 0"),
        (4.0, BIASED, "float32", r"be 4.0"),
        (4, BIASED.routing, "float32", "described by a MoEConfig"),
        (4, BIASED, "int8", "floating dtype"),
        (4, BIASED, "float_32", "floating dtype"),
        (4, BIASED, None, "floating dtype"),
    ],
)
def test_modules_that_cannot_be_made(width, cfg, dtype, told):
    with pytest.raises(MeshparError, match=told):
        moe.MoE(width, cfg, param_dtype=dtype, rngs=nnx.Rngs(0))


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------

INT, FLOAT = "int32", "float32"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts": 6}, "6 is not a multiple of 4.*Take 8 experts"),
        ({"implementation": "fixd"}, "Did you mean `fixed`"),
        ({"implementation": "ragged"}, "no ragged-all-to-all for cpu.*'auto'"),
        ({"implementation": "hierarchical"}, "its two levels are two axes"),
        ({"implementation": "node-first"}, "its two levels are two axes"),
        ({"implementation": "node-first", "capacity": 2}, "a row for every choice.*'hierarchical'"),
        ({"nodes_per_token": 2}, "'auto' sends a row for every choice.*'node-first'"),
        ({"implementation": "ragged", "capacity": 2}, "buffers of fixed capacity travel whole"),
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": 2, "bound_factor": 1.0}, "Leave out one of them"),
        ({"bound_factor": 0.0}, "be 0.0"),
        ({"bound_factor": math.nan}, "be nan"),
        ({"bound_factor": "2"}, "be '2'"),
        ({"payload": "int8"}, "says of each way how rows travel"),
        ({"chunks": 16, "capacity": 1}, "8 is not a multiple of 16"),
        ({"chunks": 3}, "8 is not a multiple of 3.*one of 1, 2, 4, 8"),
        ({"axis": "experts"}, "Did you mean `expert`"),
        ({"shapes": ((32, 6), (32, 2), (32, 3))}, "they are .T, d., .T, k. and .T, k."),
        ({"shapes": ((32, 6), (16, 2), (16, 2))}, "they are .T, d."),
        ({"shapes": ((32, 6), (32, 0), (32, 0))}, "at least one token and one choice"),
        ({"shapes": ((32, 0), (32, 2), (32, 2))}, "of some width"),
        ({"dtypes": (FLOAT, FLOAT, FLOAT)}, "numbers of experts"),
        ({"dtypes": (INT, INT, FLOAT)}, "take x of int32"),
        ({"dtypes": (FLOAT, INT, INT)}, "take weights of int32"),
        ({"expert_fn": lambda rows, _: rows[1:]}, "one row for each that came in"),
        ({"expert_fn": lambda rows, _: [rows]}, "give back a list"),
        ({"expert_fn": lambda rows, _: rows.astype(int)}, "whole numbers would round"),
    ],
)
def test_mistakes_in_a_dispatch_are_told_before_anything_is_sent(changes, told):
    given = {"shapes": ((32, 6), (32, 2), (32, 2)), "dtypes": (FLOAT, INT, FLOAT), "expert_fn": lambda rows, _: rows}
    given |= {"axis": "expert", "num_experts": 8, **changes}
    shapes, dtypes = given.pop("shapes"), given.pop("dtypes")

    def one_device(*arrays):
        return dispatch(*arrays, **given)[0]

    rows, mesh = P("expert"), mp.MeshSpec(expert=4).build(jax.devices()[:4])
    run = jax.shard_map(one_device, mesh=mesh, in_specs=rows, out_specs=rows)
    with pytest.raises(MeshparError, match=told):
        jax.eval_shape(run, *(jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)))


@pytest.mark.parametrize(
    ("rows", "weights", "sizes", "options", "told"),
    [
        ((4, 3), (2, 5, 3), 2, {}, "of one width d"),
        ((4, 3), (2, 3, 3), 3, {}, "one size a group"),
        ((4, 3), (0, 3, 3), 0, {}, "at least one group"),
        ((4, 0), (2, 0, 3), 2, {}, "of some width"),
        ((4, 3), (2, 3, 3), 2, {"implementation": "blocks"}, "Did you mean `blocked`"),
        ((4, 3), (2, 3, 3), 2, {"block": 0}, "block=0"),
        ((4, 3), (2, 3, 3), 2, {"typical_rows": 0}, "typical_rows=0"),
    ],
)
def test_mistakes_in_a_grouped_matmul_are_told_apart(rows, weights, sizes, options, told):
    with pytest.raises(MeshparError, match=told):
        grouped_matmul(jnp.ones(rows), jnp.ones(weights), jnp.ones(sizes, jnp.int32), **options)


ROWS, WEIGHTS, SIZES = jnp.ones((4, 3)), jnp.ones((2, 3, 5)), jnp.ones(2, jnp.int32)


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: grouped_swiglu(ROWS, WEIGHTS, WEIGHTS[:, :, 1:], jnp.ones((2, 4, 3)), SIZES), "both the same shape"),
        (lambda: grouped_swiglu(ROWS, WEIGHTS, WEIGHTS, jnp.ones((2, 4, 3)), SIZES), "of one width d"),
        (lambda: grouped_matmul(ROWS, WEIGHTS.astype("bfloat16"), SIZES), "both are of one floating dtype"),
        (lambda: grouped_matmul(ROWS, WEIGHTS, jnp.ones(2)), "they count rows"),
        # The blocked form would read other groups' rows, and say nothing.
        (lambda: grouped_matmul(ROWS, WEIGHTS, np.array([3, 2])), "each of one group at the most"),
        (lambda: grouped_matmul(ROWS, WEIGHTS, np.array([-1, 5])), "each of one group at the most"),
    ],
)
def test_operands_of_grouped_matmuls_have_to_go_together(ask, told):
    with pytest.raises(MeshparError, match=told):
        ask()
