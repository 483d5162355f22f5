"""MoE layer: values and gradients against the dense reference on many meshes, and the router statistics."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import bridge
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar import moe
from meshpar.collectives.kernel_checks import ranks_of
from meshpar.layers.auxiliary import collecting, is_listening, report
from meshpar.layers.precision import products
from meshpar.layers.remat import remat_policy
from meshpar.layers.scan import StageRunner, running
from meshpar.moe import MoEConfig, Routing, Weights, moe_layer
from meshpar.moe.nnx import MoE
from meshpar.parallel.strategy import Strategy
from meshpar.sharding.types import tree_leaves_with_paths
from tests.grid import cases

ROWS, SEQ, WIDTH, HIDDEN, EXPERTS = 8, 4, 4, 6, 8

EXPERT = mp.expert_parallel()
CASES: dict[str, tuple[dict[str, int], Strategy]] = {
    "expert": ({"expert": 8}, EXPERT),
    "fsdp x expert x tensor": ({"fsdp": 2, "expert": 2, "tensor": 2}, mp.fsdp() | EXPERT | mp.tensor_parallel()),
    "sequence parallel": ({"data": 2, "expert": 2, "tensor": 2}, mp.ddp() | EXPERT | mp.tensor_parallel(sequence=True)),
    "context parallel": ({"expert": 4, "context": 2}, EXPERT | mp.context_parallel()),
    "expert of 2": ({"expert": 2}, EXPERT),
    "expert of 4": ({"expert": 4}, EXPERT),
    "data x expert": ({"data": 4, "expert": 2}, mp.ddp() | EXPERT),
    "fsdp x expert": ({"fsdp": 2, "expert": 4}, mp.fsdp() | EXPERT),
    "expert x tensor": ({"expert": 4, "tensor": 2}, EXPERT | mp.tensor_parallel()),
    "no expert axis": ({"fsdp": 4, "tensor": 2}, mp.fsdp() | mp.tensor_parallel()),
    "fsdp x expert x context": ({"fsdp": 2, "expert": 2, "context": 2}, mp.fsdp() | EXPERT | mp.context_parallel()),
    "all axes": (
        {"expert": 2, "context": 2, "tensor": 2},
        EXPERT | mp.context_parallel() | mp.tensor_parallel(sequence=True),
    ),
}


def config(**changes: Any) -> MoEConfig:
    routing = Routing(num_experts=EXPERTS, top_k=changes.pop("top_k", 2), **changes.pop("routing", {}))
    return MoEConfig(routing=routing, mlp_dim=HIDDEN, **{"auxiliary_weight": 0.1, "z_weight": 0.01, **changes})


def draw(seed: int, *shape: int) -> np.ndarray:
    """Return normal numbers in JAX's default precision: float64 if x64 is enabled."""
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.result_type(float))


def arrays() -> tuple[np.ndarray, Weights, np.ndarray, np.ndarray]:
    """Return tokens, weights, a bias, and the cotangent of y."""
    inward, outward = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    weights = Weights(draw(1, WIDTH, EXPERTS), draw(2, *inward), draw(3, *inward), draw(4, *outward))
    return draw(0, ROWS, SEQ, WIDTH), weights, 0.3 * draw(5, EXPERTS), draw(6, ROWS, SEQ, WIDTH)


def arrays_of(cfg: MoEConfig) -> tuple[np.ndarray, Weights, np.ndarray, np.ndarray]:
    """Return the arrays for a config. With biases, some products exceed the limits of the activation."""
    x, weights, *others = arrays()
    if cfg.has_biases:
        shapes = (EXPERTS, HIDDEN), (EXPERTS, HIDDEN), (EXPERTS, WIDTH), (EXPERTS,)
        weights = Weights(*weights[:4], *(4 * draw(7 + i, *shape) for i, shape in enumerate(shapes)))
    return x, weights, *others


def swiglu(params, x):
    gate, up, down, *biases = params
    gate_bias, up_bias, down_bias = biases or (0.0, 0.0, 0.0)
    gate, up = x @ gate + gate_bias, x @ up + up_bias
    if not biases:
        return (jax.nn.silu(gate) * up) @ down
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return (gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)) @ down + down_bias


def dense_loss(cfg: MoEConfig, x, weights, bias, cotangent, *, token_ranks=1, mask=None):
    """Return the loss and the routing of the dense reference, with the auxiliary losses, for the tokens in the mask."""
    flat = x.reshape(-1, WIDTH)
    if mask is not None:
        flat, x, cotangent = flat[mask.reshape(-1)], x[mask], cotangent[mask]
    logits = flat @ weights.router + (0.0 if weights.router_bias is None else weights.router_bias)
    routed = moe.route(logits, cfg.routing, bias=bias)
    room = moe.capacity(len(flat) // token_ranks, cfg.routing) if cfg.routing.capacity_factor else None
    gates, factors = routed.weights, 1.0
    if cfg.gates_inputs:
        gates, factors = jnp.ones_like(gates), gates
    y = moe.reference.moe(
        flat * factors, routed.experts, gates, swiglu, weights.experts, capacity=room, token_ranks=token_ranks
    )
    losses = moe.auxiliary_loss(routed.scores, routed.experts, alpha=cfg.auxiliary_weight)
    losses += moe.z_loss(logits, weight=cfg.z_weight)
    return (y.reshape(x.shape) * cotangent).sum() + losses, routed


def loss_of(cfg: MoEConfig, x, weights, bias, cotangent, mask=None):
    y, stats = moe_layer(x, weights, cfg, bias=bias, mask=mask)
    return (y * cotangent).sum() + stats.loss, stats


def mesh_of(axes: dict[str, int]) -> jax.sharding.Mesh:
    return mp.MeshSpec(**axes).build(jax.devices()[: math.prod(axes.values())])


def on_mesh(cfg, axes, strategy, x, weights, bias, cotangent, mask=None):
    """Return ((loss, stats), gradients of x and of the weights), compiled under rules."""
    mesh = mesh_of(axes)

    def run(x, weights):
        with mp.use_rules(mesh, strategy):
            return loss_of(cfg, x, weights, bias, cotangent, mask)

    return jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(x, weights)


def check(actual, expected, routed, *, atol=1e-12):
    (loss, stats), gradients = actual
    (expected_loss, _), expected_gradients = expected
    np.testing.assert_allclose(loss, expected_loss, rtol=0, atol=atol)
    for path, x in tree_leaves_with_paths(gradients):
        exact = dict(tree_leaves_with_paths(expected_gradients))[path]
        np.testing.assert_allclose(x, exact, rtol=0, atol=atol * max(1, np.abs(exact).max()), err_msg=path)
    np.testing.assert_array_equal(stats.load, moe.count(routed.experts, EXPERTS))


@functools.cache
def reference(cfg: MoEConfig, token_ranks: int = 1, biased: bool = False, padded: bool = False):
    x, weights, bias, cotangent = arrays_of(cfg)
    bias, options = bias if biased else None, {"token_ranks": token_ranks, "mask": MASK if padded else None}

    def run(x, weights):
        return dense_loss(cfg, x, weights, bias, cotangent, **options)

    return jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(x, weights)


# ---- Against the reference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("fsdp x expert x tensor", grid=CASES))
def test_moe_layer_matches_reference_on_mesh(case):
    with jax.enable_x64(True):
        x, weights, _, cotangent = arrays()
        expected = reference(config())
        actual = on_mesh(config(), *CASES[case], x, weights, None, cotangent)
        check(actual, expected, expected[0][1])


OTHERS = {
    "gpt-oss": {"has_biases": True, "activation": "clamped_swiglu"},
    "gpt-oss, with capacity": {
        "has_biases": True, "activation": "clamped_swiglu", "routing": {"capacity_factor": 1.5},
    },
    "gpt-oss, in chunks": {"has_biases": True, "activation": "clamped_swiglu", "chunks": 2},
    "llama4": {"gates_inputs": True, "routing": {"score": "sigmoid", "normalize": False}, "top_k": 1},
}  # fmt: skip


MESHES = ["fsdp x expert x tensor", "single", "fsdp x expert", "no expert axis", "replicated tokens", "all axes"]
MESHES += ["expert x tensor", "sequence parallel"]


@pytest.mark.parametrize(
    ("kind", "case"),
    cases(
        ("gpt-oss", "fsdp x expert x tensor"),
        grid=[(kind, case) for kind in OTHERS for case in MESHES[: 4 if "," in kind else None]],
    ),
)
def test_biases_and_gated_inputs_match_reference(kind, case):
    with jax.enable_x64(True):
        cfg = config(**OTHERS[kind])
        x, weights, _, cotangent = arrays_of(cfg)
        axes, strategy = {"expert": 1}, EXPERT
        if case == "replicated tokens":
            axes, strategy = {"expert": 4, "tensor": 2}, EXPERT | mp.tensor_parallel() | mp.Rules(batch=None)
        elif case != "single":
            axes, strategy = CASES[case]
        has_capacity, sharded = cfg.routing.capacity_factor, dict(axes) | {"tensor": 1}
        token_ranks = math.prod(sharded.values()) if has_capacity and case != "replicated tokens" else 1
        expected = reference(cfg, token_ranks)
        check(on_mesh(cfg, axes, strategy, x, weights, None, cotangent), expected, expected[0][1])


MASK = np.random.default_rng(8).random((ROWS, SEQ)) < 0.6
"""True for 20 of 32 tokens."""
PADDED = {
    **CASES, "single": ({"expert": 1}, EXPERT),
    "replicated tokens": ({"expert": 4, "tensor": 2}, EXPERT | mp.tensor_parallel() | mp.Rules(batch=None)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "changes"),
    cases(
        ("context parallel", {"routing": {"capacity_factor": 7.0}}),
        grid=[
            (case, changes) for case in PADDED for changes in ({}, {"chunks": 2}, {"routing": {"capacity_factor": 7.0}})
        ],
    ),
)
def test_padding_is_not_routed(case, changes):
    """Loss, statistics and gradients are those of the other tokens, and no slot of a buffer is taken."""
    with jax.enable_x64(True):
        x, weights, _, cotangent = arrays()
        cfg = config(**changes)
        expected = reference(config(), padded=True)
        actual = on_mesh(cfg, *PADDED[case], x, weights, None, cotangent, MASK)
        check(actual, expected, expected[0][1])
        assert actual[0][1].dropped == 0
        assert not actual[1][0][~MASK].any()


PAIR = mp.expert_parallel(axis=("data", "expert"))
NODES = {
    "nodes x expert x tensor": ({"data": 2, "expert": 2, "tensor": 2}, mp.ddp() | PAIR | mp.tensor_parallel()),
    "nodes x fsdp x expert": ({"data": 2, "fsdp": 2, "expert": 2}, mp.fsdp() | PAIR),
    "nodes x expert": ({"data": 4, "expert": 2}, mp.ddp() | PAIR),
    "one node": ({"data": 1, "expert": 4}, mp.ddp() | PAIR),
}


@pytest.mark.parametrize("case", cases("nodes x expert x tensor", grid=NODES))
def test_node_first_matches_reference_on_mesh(case, recwarn):
    """Tokens use two of four expert groups, and therefore half of the nodes."""
    with jax.enable_x64(True):
        x, weights, _, cotangent = arrays()
        chunks = 1 if "tensor" in case else 2
        cfg = config(routing={"groups": 4, "top_groups": 2}, implementation="node-first", chunks=chunks)
        expected = reference(cfg)
        check(on_mesh(cfg, *NODES[case], x, weights, None, cotangent), expected, expected[0][1])
    assert not [warning for warning in recwarn if "two levels" in str(warning.message)]


def test_two_levels_over_one_axis_warn():
    x, weights, *_ = arrays()
    run = functools.partial(under, mesh_of({"expert": 4}), EXPERT)
    with pytest.warns(UserWarning, match="sharded over one axis, `expert`.*mp.expert_parallel"):
        jax.eval_shape(lambda x, weights: run(x, weights, config(implementation="node-first")), x, weights)


@pytest.mark.parametrize(
    ("groups", "top_groups", "nodes", "expected"),
    [(8, 4, 8, 4), (8, 4, 4, 4), (8, 4, 16, 8), (4, 2, 8, 4), (1, 1, 8, 8), (8, 2, 6, 6), (8, 1, 2, 1), (16, 4, 2, 2)],
)
def test_nodes_visited(groups, top_groups, nodes, expected):
    routing = Routing(num_experts=64, top_k=8 if top_groups > 1 else 4, groups=groups, top_groups=top_groups)
    assert routing.nodes_visited(nodes) == min(expected, routing.top_k)


def test_moe_layer_without_mesh_matches_reference():
    with jax.enable_x64(True):
        x, weights, bias, cotangent = arrays()
        cfg = config(routing={"score": "sigmoid", "scale": 2.5}, bias_rate=0.1)
        expected = reference(cfg, biased=True)
        run = jax.value_and_grad(lambda x, weights: loss_of(cfg, x, weights, bias, cotangent), (0, 1), has_aux=True)
        check(jax.jit(run)(x, weights), expected, expected[0][1])


@pytest.mark.matrix
def test_capacity_is_per_device():
    """Eight devices route four tokens each, and an expert accepts one assignment of each device."""
    with jax.enable_x64(True):
        x, weights, _, cotangent = arrays()
        cfg = config(routing={"capacity_factor": 1.0})
        expected = reference(cfg, token_ranks=8)
        actual = on_mesh(cfg, {"data": 2, "expert": 4}, mp.ddp() | EXPERT, x, weights, None, cotangent)
        check(actual, expected, expected[0][1])
        experts = np.asarray(expected[0][1].experts).reshape(8, -1)
        over = sum(np.maximum(np.bincount(row, minlength=EXPERTS) - 1, 0).sum() for row in experts)
        assert actual[0][1].dropped == over > 0


def test_chunks_do_not_change_local_computation():
    """On a single device the capacity follows from all tokens, not from the tokens of a chunk."""
    x, weights, *_ = arrays()
    cfg = config(routing={"capacity_factor": 1.0})
    expected, chunked = (
        jax.jit(functools.partial(moe_layer, config=dataclasses.replace(cfg, chunks=n)))(x, weights) for n in (1, 8)
    )
    np.testing.assert_array_equal(chunked[0], expected[0])
    assert chunked[1].dropped == expected[1].dropped > 0


@pytest.mark.matrix
def test_drops_false_ignores_bound_and_chunks():
    """Eight tokens per device, three chunks, and a bound of 0.4 times a balanced load."""
    with jax.enable_x64(True):
        x, weights, *_ = arrays()
        cfg = config(bound_factor=0.4, chunks=3)
        (y, stats), (expected, _) = (
            jax.jit(functools.partial(run, x, weights))()
            for run in (
                lambda x, weights: under(mesh_of({"expert": 4}), EXPERT, x, weights, cfg, drops=False),
                lambda x, weights: moe_layer(x, weights, config()),
            )
        )
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)
        assert stats.dropped == 0


def under(mesh, strategy, *args, **options):
    with mp.use_rules(mesh, strategy):
        return moe_layer(*args, **options)


@pytest.mark.matrix
def test_replicated_tokens_are_computed_locally():
    """Each rank computes its local experts and the results are all-reduced, as in decoding with batch size 1."""
    with jax.enable_x64(True):
        x, weights, _, cotangent = arrays()
        strategy = EXPERT | mp.tensor_parallel() | mp.Rules(batch=None)
        expected = reference(config())
        actual = on_mesh(config(), {"expert": 4, "tensor": 2}, strategy, x, weights, None, cotangent)
        check(actual, expected, expected[0][1])


@pytest.mark.parametrize("sharded", cases(True, grid=[True, False]), ids=["sharded experts", "all experts"])
@pytest.mark.parametrize("tensor", cases(2, grid=[1, 2]))
@pytest.mark.parametrize(
    "changes", [{}, pytest.param(OTHERS["gpt-oss"], marks=pytest.mark.matrix)], ids=["", "gpt-oss"]
)
def test_moe_layer_inside_a_shard_map_over_the_batch(sharded, tensor, changes):
    """As in stages, and with reduce_gradients="once": each device differentiates its local part of the loss."""
    strategy = EXPERT | mp.tensor_parallel()
    with jax.enable_x64(True):
        mesh, cfg = mesh_of({"expert": 4, "tensor": tensor}), config(**changes)
        x, weights, _, cotangent = arrays_of(cfg)
        expected = reference(cfg)

        def inside(x, weights, cotangent):
            # The auxiliary losses are global values, so each device counts a fraction.
            def local_loss(x, weights):
                y, stats = moe_layer(x, weights, cfg)
                return (y * cotangent).sum() + stats.loss / ranks_of("test", "expert"), stats

            (loss, stats), (dx, dw) = jax.value_and_grad(local_loss, (0, 1), has_aux=True)(x, weights)
            dw = dw if sharded else jax.lax.psum(dw, "expert")
            return (jax.lax.psum(loss, "expert"), stats), (dx, dw)

        num_others = len(weights) - 1 if cfg.has_biases else 3
        weight_specs = Weights(P(None, "expert"), *[P("expert")] * num_others) if sharded else P()
        run = jax.shard_map(
            inside,
            mesh=mesh,
            in_specs=(P("expert"), weight_specs, P("expert")),
            out_specs=((P(), P()), (P("expert"), weight_specs)),
            axis_names={"expert"},
            check_vma=False,
        )

        def ruled(x, weights):
            with mp.use_rules(mesh, strategy):
                return run(x, weights, cotangent)

        check(jax.jit(ruled)(x, weights), expected, expected[0][1])


def test_counts_are_local_inside_stages():
    """Pipeline stages sum the counts of the devices themselves."""
    mesh, cfg = mesh_of({"expert": 4}), config()
    x, weights, *_ = arrays()

    def inside(x, weights):
        with running(StageRunner(lambda *_: None)):
            _, stats = moe_layer(x, weights, cfg)
        return stats.load[None]

    run = jax.shard_map(
        inside, mesh=mesh, in_specs=(P("expert"), P()), out_specs=P("expert"), axis_names={"expert"}, check_vma=False
    )
    with mp.use_rules(mesh, EXPERT):
        load = jax.jit(run)(x, weights)
    assert load.shape == (4, EXPERTS)
    assert (load.sum(1) == ROWS * SEQ * 2 // 4).all()


# ---- Memory ----------------------------------------------------------------------------------------------------------


def test_backward_pass_saves_weight_shards_only():
    """Eight layers over fsdp=8 without remat: gathered weights of different layers are not live at the same time."""
    num_layers, width, hidden = 8, 32, 128
    mesh, cfg = mesh_of({"fsdp": 8}), dataclasses.replace(config(), mlp_dim=hidden)

    def run(stacked, x):
        with mp.use_rules(mesh, mp.fsdp()):
            x, _ = jax.lax.scan(lambda x, weights: (x + moe_layer(x, weights, cfg)[0], None), x, stacked)
        return (x**2).sum()

    def sharded(*shape, dim):
        spec = P(*[None] * dim, "fsdp")
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec))

    inward, outward = (num_layers, EXPERTS, width, hidden), (num_layers, EXPERTS, hidden, width)
    router = sharded(num_layers, width, EXPERTS, dim=1)
    stacked = Weights(router, sharded(*inward, dim=2), sharded(*inward, dim=2), sharded(*outward, dim=3))
    gradient = jax.jit(jax.grad(run), out_shardings=jax.tree.map(lambda x: x.sharding, stacked))
    temp_bytes = gradient.lower(stacked, sharded(8, SEQ, width, dim=0)).compile().memory_analysis().temp_size_in_bytes
    full_bytes = 3 * 4 * math.prod(inward)
    assert temp_bytes < full_bytes / 2


@pytest.mark.parametrize("routing", cases({}, grid=[{}, {"capacity_factor": 1.0}]), ids=str)
def test_minimal_remat_saves_the_products_of_experts(routing):
    """With "minimal", the backward pass repeats no matmul. With "full", it repeats those with gate, up and router."""
    x, weights, *_ = arrays()

    def num_products(remat):
        layer = functools.partial(moe_layer, config=config(routing=routing, grouped_matmul="blocked"))
        saving = layer if remat is None else jax.checkpoint(layer, policy=remat_policy(remat))

        def run(x, weights):
            with mp.use_rules(mesh_of({"expert": 2}), EXPERT):
                return (saving(x, weights)[0] ** 2).sum()

        return len(list(products(jax.make_jaxpr(jax.grad(run, (0, 1)))(x, weights))))

    assert num_products("minimal") == num_products(None)
    assert num_products("full") >= num_products(None) + 3


# ---- Precision -------------------------------------------------------------------------------------------------------


def test_router_computes_in_float32():
    """Logits of two experts differ in float32 and are equal in bfloat16."""
    width = 256
    x = jnp.ones((1, 1, width), jnp.bfloat16)
    router = jnp.full((width, EXPERTS), 1.0, jnp.bfloat16).at[0, 5].set(1.0078125)  # 256 and 256.0078125
    experts = jnp.zeros((EXPERTS, width, 2), jnp.bfloat16)
    weights = Weights(router, experts, experts, experts.swapaxes(1, 2))
    cfg = MoEConfig(routing=Routing(num_experts=EXPERTS, top_k=1, normalize=False), mlp_dim=2)
    y, stats = jax.jit(functools.partial(moe_layer, config=cfg))(x, weights)
    assert (y.dtype, stats.loss.dtype) == (jnp.bfloat16, jnp.float32)
    assert np.asarray(stats.load).tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.matrix
@pytest.mark.parametrize("nested", [False, True])
def test_bfloat16_with_sharded_hidden_dim(nested):
    """The layer sums over `tensor`. XLA aborts on such sums in bfloat16 on CPUs, so they are computed in float32."""
    cfg, strategy = config(auxiliary_weight=0.0, z_weight=0.0), mp.fsdp() | EXPERT | mp.tensor_parallel()
    mesh = mesh_of({"expert": 2, "tensor": 2} if nested else {"fsdp": 2, "expert": 2, "tensor": 2})
    single = arrays()
    x, weights, _, cotangent = jax.tree.map(lambda a: a.astype(jnp.bfloat16), single)

    def gradients(x, weights, cotangent):
        return jax.grad(lambda x, weights: loss_of(cfg, x, weights, None, cotangent)[0], (0, 1))(x, weights)

    weight_specs = Weights(P(None, "expert"), *[P("expert")] * 3)
    specs = {"in_specs": (P("expert"), weight_specs, P("expert")), "out_specs": (P("expert"), weight_specs)}
    run = jax.shard_map(gradients, mesh=mesh, axis_names={"expert"}, check_vma=False, **specs)

    def ruled(*args):
        with mp.use_rules(mesh, strategy):
            return (run if nested else gradients)(*args)

    actual = jax.tree.leaves(jax.jit(ruled)(x, weights, cotangent))
    expected = jax.tree.leaves(jax.jit(gradients)(single[0], single[1], single[3]))
    for rounded, exact in zip(actual, expected, strict=True):
        assert rounded.dtype == jnp.bfloat16
        np.testing.assert_allclose(rounded.astype(np.float32), exact, rtol=0, atol=0.03 * np.abs(exact).max())


def test_gradients_are_reduced_in_float32():
    """With bfloat16 parameters, gradients are cast to float32 before the all-reduce."""
    x, weights, _, cotangent = jax.tree.map(lambda a: a.astype(jnp.bfloat16), arrays())
    mesh = mesh_of({"data": 2, "expert": 2})

    def run(weights, x):
        with mp.use_rules(mesh, mp.ddp() | EXPERT):
            return loss_of(config(auxiliary_weight=0.0, z_weight=0.0), x, weights, None, cotangent)[0]

    sums = [
        [var.aval for var in equation.invars]
        for equation in equations(jax.make_jaxpr(jax.grad(run))(weights, x).jaxpr)
        if equation.primitive.name.startswith("psum")
    ]
    shapes = {aval.shape: aval.dtype for avals in sums for aval in avals}
    for shape in ((EXPERTS // 2, WIDTH, HIDDEN), (EXPERTS // 2, HIDDEN, WIDTH), (WIDTH, EXPERTS)):
        assert shapes[shape] == jnp.float32


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


# ---- Flax modules ----------------------------------------------------------------------------------------------------

BIASED = MoEConfig(
    routing=Routing(num_experts=EXPERTS, top_k=2, score="sigmoid"), mlp_dim=HIDDEN, shared_experts=2, bias_rate=0.5
)


@pytest.fixture(scope="module")
def modules():
    """Return the NNX module, its parameters as a dict, tokens, and the result of the module."""
    module = nnx.jit(lambda: moe.MoE(WIDTH, BIASED, rngs=nnx.Rngs(0)))()
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    x = arrays()[0]
    return module, params, x, nnx.jit(lambda module, x: module(x))(nnx.clone(module), x)


def test_shared_experts_are_added_for_all_tokens(modules):
    _, params, x, (y, _) = modules

    @jax.jit
    def summands(params, x):
        routed, _ = moe_layer(
            x, Weights(*(params[name] for name in Weights._fields[:4])), BIASED, bias=jnp.zeros(EXPERTS)
        )
        return routed, swiglu([params[f"shared_{name}"] for name in ("gate", "up", "down")], x)

    routed, shared = summands(params, x)
    assert np.abs(shared).max() > 0.1
    np.testing.assert_allclose(y, routed + shared, rtol=1e-5, atol=1e-6)


def test_logical_names_of_parameters(modules):
    model = mp.from_nnx(lambda rngs: moe.MoE(WIDTH, BIASED, rngs=rngs))
    names = {leaf.path: leaf.names for leaf in model.leaves()}
    assert names == {
        "router": ("embed", "expert"),
        "gate": ("expert", "embed", "mlp"),
        "up": ("expert", "embed", "mlp"),
        "down": ("expert", "mlp", "embed"),
        "shared_gate": ("embed", "mlp"),
        "shared_up": ("embed", "mlp"),
        "shared_down": ("mlp", "embed"),
    }
    assert sum(math.prod(leaf.shape) for leaf in model.leaves()) == BIASED.num_params(WIDTH)
    linen = mp.from_linen(bridge.to_linen(MoE, WIDTH, BIASED), jax.ShapeDtypeStruct((2, 2, WIDTH), jnp.float32))
    assert {leaf.path: leaf.names for leaf in linen.leaves()} == names


def test_experts_are_initialized_independently(modules):
    gate = np.asarray(modules[0].gate[...])
    assert np.unique(gate).size == gate.size
    # The standard deviation follows from the fan-in of a single expert.
    large = nnx.jit(lambda: moe.MoE(64, dataclasses.replace(BIASED, mlp_dim=64), rngs=nnx.Rngs(0)))()
    assert np.std(np.asarray(large.gate[...])) == pytest.approx(1 / 8, rel=0.05)


def test_after_update_moves_the_bias_by_the_counted_load():
    model = mp.from_nnx(lambda rngs: moe.MoE(WIDTH, BIASED, rngs=rngs))

    @jax.jit
    def run(params, extra, rows):
        bound = model.bind(params, extra)
        return bound(rows)[1].load, model.collect(bound)

    params, extra = jax.jit(model.init)(jax.random.key_data(jax.random.key(0)))
    x, loads = arrays()[0], []
    for rows in (x[:4], x[4:]):
        load, extra = run(params, extra, rows)
        loads.append(load)
    total = np.asarray(loads[0] + loads[1])
    np.testing.assert_array_equal(extra["load"], total)
    np.testing.assert_array_equal(extra["bias"], np.zeros(EXPERTS))
    after = model.after_update(extra)
    np.testing.assert_array_equal(after["load"], np.zeros(EXPERTS))
    np.testing.assert_array_equal(after["bias"], -0.5 * np.sign(total - total.mean()))
    assert jax.tree.structure(after) == jax.tree.structure(extra)


# ---- Reports ---------------------------------------------------------------------------------------------------------


def test_report_is_collected():
    report(loss=jnp.ones(()))  # dropped outside of `collecting`
    assert not is_listening()
    with collecting() as reports:
        assert is_listening()
        report(loss=jnp.ones(()), metrics={"a": jnp.zeros(3)})
        report(loss=2.0, metrics={"a": jnp.ones(3)})
    assert (float(reports.loss), reports.metrics["a"].tolist()) == (3.0, [1.0, 1.0, 1.0])
    with collecting() as reports:
        pass
    assert reports.loss is None


def test_report_layers_of_stacked_layers():
    load = jnp.asarray([[4, 0, 0, 4], [2, 2, 2, 2]])
    aux = moe.RouterStats(jnp.full((), 0.5), load, jnp.asarray([2, 0]), jnp.asarray([0.1, 0.2])).aux
    cfg = MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=2, z_weight=1.0)
    mesh = mesh_of({"expert": 2})
    with collecting() as reports, mp.use_rules(mesh, EXPERT):
        moe.report_layers(aux, cfg)
    actual = {name: np.asarray(x).tolist() for name, x in reports.metrics.items()}
    assert actual["moe/load"] == load.tolist()
    assert actual["moe/rank_load"] == [[4, 4], [4, 4]]
    assert actual["moe/drop_rate"] == [0.25, 0]
    assert (float(reports.loss), actual["moe/aux_loss"]) == (0.5, 0.5)
    with collecting() as reports:
        moe.report_layers(aux, dataclasses.replace(cfg, z_weight=0.0))
    assert reports.loss is None
    assert np.asarray(reports.metrics["moe/rank_load"]).tolist() == [[8], [8]]


def test_report_layers_of_one_layer():
    stats = moe.RouterStats(jnp.zeros(()), jnp.asarray([4, 0, 0, 4]), jnp.asarray(2), jnp.asarray(0.1))
    cfg = MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=2)
    with collecting() as reports, mp.use_rules(mesh_of({"expert": 2}), EXPERT):
        moe.report_layers(stats, cfg)
    read = moe.loads(reports.metrics)
    assert (read.experts.tokens.tolist(), read.ranks.tokens.tolist()) == ([[4, 0, 0, 4]], [[4, 4]])
    assert (read.experts.max_over_mean.tolist(), read.drop_rate.tolist()) == ([2.0], [0.25])
