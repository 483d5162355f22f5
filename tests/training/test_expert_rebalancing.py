"""Expert placement: predicted loads of ranks, and bitwise equal outputs after rebalancing."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.nnx import bridge

import meshpar as mp
from meshpar import moe
from meshpar.models import TransformerConfig
from meshpar.moe import MoEConfig, Routing
from meshpar.moe.nnx import MoE
from tests.equal import linen_decoder
from tests.errors import raises
from tests.grid import cases


def zipf(num_experts, total=100_000, seed=0):
    shares = 1 / np.arange(1, num_experts + 1)
    return np.random.default_rng(seed).permutation((total * shares / shares.sum()).round())


def busiest(loads, order, num_ranks):
    """Return the load of the busiest rank."""
    each, totals = len(loads) // num_ranks, [0.0] * num_ranks
    for place, expert in enumerate(order):
        totals[place // each] += loads[expert]
    return max(totals)


def partitions(experts, num_ranks):
    """Yield all partitions of the experts into groups of equal size."""
    if not experts:
        yield []
        return
    first, *rest = experts
    each = len(experts) // num_ranks
    for members in itertools.combinations(rest, each - 1):
        remaining = [expert for expert in rest if expert not in members]
        for groups in partitions(remaining, num_ranks - 1):
            yield [(first, *members), *groups]


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(4, 2), (6, 3), (8, 2), (8, 4), (9, 3), (10, 5)])
def test_place_is_close_to_the_optimum(num_experts, num_ranks):
    rng = np.random.default_rng(num_experts)
    for loads in (rng.integers(0, 100, num_experts), zipf(num_experts), rng.random(num_experts)):
        best = min(
            max(sum(loads[e] for e in share) for share in shares)
            for shares in partitions(list(range(num_experts)), num_ranks)
        )
        placed = moe.place(loads, num_ranks)
        assert best * (1 - 1e-12) <= busiest(loads, placed.order, num_ranks) <= best * 1.05


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(4, 4), (8, 1), (16, 4), (64, 8), (256, 8)])
def test_placement_is_a_permutation_with_predicted_loads(num_experts, num_ranks):
    loads = zipf(num_experts)
    placed = moe.place(loads, num_ranks)
    assert sorted(placed.order) == list(range(num_experts))
    assert max(placed.before) == busiest(loads, range(num_experts), num_ranks)
    assert max(placed.after) == busiest(loads, placed.order, num_ranks)
    assert placed.gain == max(placed.before) / max(placed.after) >= 1
    each = num_experts // num_ranks
    moved = sum(place // each != expert // each for place, expert in enumerate(placed.order))
    assert placed.moved == moved


@pytest.mark.parametrize("loads", [[5, 5, 5, 5], [3, 1, 1, 3], [0, 0, 0, 0]])
def test_experts_do_not_move_without_gain(loads):
    placed = moe.place(loads, 2)
    assert placed.order == (0, 1, 2, 3)
    assert (placed.moved, placed.gain) == (0, 1.0)


def test_a_placement_prints_its_gain():
    placed = moe.place([10, 9, 8, 1, 5, 6, 5, 6], 2)
    assert (placed.before, placed.after) == ((28, 22), (27, 23))
    assert str(placed).startswith("busiest of 2 ranks 1.12 → 1.08 times the mean load, gain 1.04; ")


@pytest.mark.parametrize(("groups", "num_ranks"), [(8, 4), (8, 2), (4, 8), (2, 8), (4, 4)])
def test_groups_stay_together(groups, num_ranks):
    loads, each = zipf(32, seed=3), 32 // groups
    placed = moe.place(loads, num_ranks, groups=groups)
    group_at = np.array(placed.order).reshape(groups, each) // each
    assert (group_at == group_at[:, :1]).all()
    if groups < num_ranks:
        assert group_at[:, 0].tolist() == list(range(groups))
        for group in range(groups):
            of = slice(group * each, (group + 1) * each)
            alone = moe.place(loads[of], num_ranks // groups)
            assert (np.array(placed.order[of]) - group * each).tolist() == list(alone.order)
    if groups > num_ranks:
        assert placed.gain > 1
    if groups == num_ranks:
        assert placed.moved == 0


# A model -------------------------------------------------------------------------------------------------------------

WIDTH, HIDDEN, NUM_EXPERTS, TOKENS = 8, 12, 16, 256
NAMES = {
    "moe/router/kernel": ("embed", "expert"),
    "moe/up": ("expert", "embed", "mlp"),
    "moe/down": ("expert", "mlp", "embed"),
    "moe/bias": ("expert",),
    "norm/scale": ("embed",),
}
ROUTINGS = {
    "normalized softmax": Routing(num_experts=NUM_EXPERTS, top_k=2),
    "plain softmax": Routing(num_experts=NUM_EXPERTS, top_k=2, normalize=False),
    "groups of sigmoid": Routing(num_experts=NUM_EXPERTS, top_k=3, score="sigmoid", scale=2.5, groups=4, top_groups=2),
}


def model(seed=0, skew=2.0):
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(WIDTH, NUM_EXPERTS)).astype(np.float32)
    kernel[0] = skew * rng.permutation(np.log(NUM_EXPERTS / np.arange(1, NUM_EXPERTS + 1)))
    return {
        "moe": {
            "router": {"kernel": kernel},
            "up": rng.normal(size=(NUM_EXPERTS, WIDTH, HIDDEN)).astype(np.float32),
            "down": rng.normal(size=(NUM_EXPERTS, HIDDEN, WIDTH)).astype(np.float32),
            "bias": rng.normal(size=NUM_EXPERTS).astype(np.float32) * 0.05,
        },
        "norm": {"scale": rng.normal(size=WIDTH).astype(np.float32)},
    }


def tokens(seed=1):
    x = np.random.default_rng(seed).normal(size=(TOKENS, WIDTH)).astype(np.float32)
    x[:, 0] = 1.0
    return x


def mlp(params, x):
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


@functools.partial(jax.jit, static_argnames=("routing", "capacity"))
def forward(params, x, routing, capacity=None):
    """Return y and the experts of each token."""
    layer = params["moe"]
    routed = moe.route(x @ layer["router"]["kernel"], routing, bias=layer["bias"])
    weights = {"up": layer["up"], "down": layer["down"]}
    y = moe.reference.moe(x, routed.experts, routed.weights, mlp, weights, capacity=capacity)
    return y * params["norm"]["scale"], routed.experts


@pytest.mark.parametrize("capacity", cases(20, grid=[None, 20]))
@pytest.mark.parametrize(
    ("kind", "num_ranks", "gain"),
    cases(
        ("groups of sigmoid", 2, 1.04),
        grid=[("normalized softmax", 4, 1.2), ("plain softmax", 4, 1.2), ("groups of sigmoid", 2, 1.04),
              ("groups of sigmoid", 8, 1.1)],
    ),
)  # fmt: skip
def test_rebalancing_has_predicted_gain_and_equal_outputs(kind, num_ranks, gain, capacity):
    routing = ROUTINGS[kind]
    params, x = model(), tokens()
    y, experts = forward(params, x, routing, capacity)
    loads = moe.count(experts, NUM_EXPERTS)
    done = mp.rebalance_experts(params, loads, names=NAMES, num_ranks=num_ranks, groups=routing.groups)
    (placed,) = done.placements[""]
    assert placed.gain > gain
    assert done.gain == placed.gain

    y_after, experts_after = forward(done.state, x, routing, capacity)
    np.testing.assert_array_equal(y_after, y)
    per_rank = moe.count(experts_after, NUM_EXPERTS).reshape(len(placed.after), -1).sum(1)
    assert per_rank.tolist() == list(placed.after)
    assert int(per_rank.max()) == int(max(placed.after)) < max(placed.before)
    assert done.state["norm"]["scale"] is params["norm"]["scale"]
    if capacity is not None:
        assert not moe.assign_slots(experts, capacity, NUM_EXPERTS)[1].all()


def test_rebalancing_requires_the_router():
    params, x = model(), tokens()
    routing = ROUTINGS["normalized softmax"]
    y, experts = forward(params, x, routing)
    loads = moe.count(experts, NUM_EXPERTS)
    placed = moe.place(np.asarray(loads), 4)
    without = {path: names for path, names in NAMES.items() if "router" not in path}
    other, _ = forward(moe.permute(params, placed.order, names=without), x, routing)
    assert np.abs(other - y).max() > 0.1
    with raises("not-found", "parameters"):
        mp.rebalance_experts(params, loads, names=without, num_ranks=4)


def test_permute_arrays_outside_the_parameters():
    placed = moe.place(zipf(NUM_EXPERTS), 4)
    extra = {"moe": {"bias": np.arange(16.0)}, "count": np.arange(16)}
    found = moe.permute(extra, placed.order, names=NAMES)
    assert found["moe"]["bias"].tolist() == list(placed.order)
    assert found["count"] is extra["count"]


@pytest.mark.parametrize("layers_first", [True, False])
def test_stacked_layers_are_placed_separately(layers_first):
    params = [model(seed) for seed in range(3)]
    at = 0 if layers_first else 1
    together = jax.tree.map(lambda *leaves: np.stack(leaves, axis=min(at, leaves[0].ndim)), *params)
    names = {path: (*given[:at], "layers", *given[at:]) for path, given in NAMES.items()}
    loads = np.stack([zipf(NUM_EXPERTS, seed=seed) for seed in range(3)])
    done = mp.rebalance_experts(together, loads, names=names, num_ranks=4)
    placed = done.placements[""]
    assert len({one.order for one in placed}) == 3
    assert done.gain == sum(max(p.before) for p in placed) / sum(max(p.after) for p in placed)
    for layer, (one, row) in enumerate(zip(params, loads, strict=True)):
        alone = mp.rebalance_experts(one, row, names=NAMES, num_ranks=4)
        assert alone.placements[""] == (placed[layer],)
        found = jax.tree.map(lambda leaf, layer=layer: np.take(leaf, layer, axis=min(at, leaf.ndim - 1)), done.state)
        jax.tree.map(np.testing.assert_array_equal, found, alone.state)


def test_layers_with_separate_paths():
    tree = {"block_0": model(0), "block_1": model(1), "block_10": model(2)}
    names = {f"{block}/{path}": given for block in tree for path, given in NAMES.items()}
    loads = {"block_0/moe": zipf(16, seed=0), "block_1": zipf(16, seed=1)}
    done = mp.rebalance_experts(tree, loads, names=names, num_ranks=4)
    for block, scope in (("block_0", "block_0/moe"), ("block_1", "block_1")):
        (placed,) = done.placements[scope]
        np.testing.assert_array_equal(done.state[block]["moe"]["up"], tree[block]["moe"]["up"][list(placed.order)])
    assert done.state["block_10"]["moe"]["up"] is tree["block_10"]["moe"]["up"]


# Errors --------------------------------------------------------------------------------------------------------------


def test_rebalancing_refuses_loads_of_other_shapes():
    with raises("wrong-shape", "`moe/bias`"):
        mp.rebalance_experts(model(), zipf(8), names=NAMES, num_ranks=4)
    with raises("wrong-shape"):
        mp.rebalance_experts(model(), np.stack([zipf(16)] * 2), names=NAMES, num_ranks=4)
    with raises("not-found", "`block`"):
        mp.rebalance_experts(model(), {"block": zipf(16)}, names=NAMES, num_ranks=4)


# Training states -----------------------------------------------------------------------------------------------------


class Layer(nnx.Module):
    """An MoE layer, and a vector whose size equals the width, not the number of experts."""

    def __init__(self, *, rngs):
        routing = Routing(num_experts=NUM_EXPERTS, top_k=2)
        self.moe = MoE(WIDTH, MoEConfig(routing=routing, mlp_dim=HIDDEN, bias_rate=0.05), rngs=rngs)
        self.scale = nnx.Param(nnx.with_partitioning(nnx.initializers.normal(), ("embed",))(rngs.params(), (WIDTH,)))

    def __call__(self, x):
        y, aux = self.moe(x)
        return y * self.scale[...], aux


class LinenLayer(linen.Module):
    """The same layer in Linen."""

    @linen.compact
    def __call__(self, x):
        routing = Routing(num_experts=NUM_EXPERTS, top_k=2)
        y, aux = bridge.to_linen(MoE, WIDTH, MoEConfig(routing=routing, mlp_dim=HIDDEN, bias_rate=0.05), name="moe")(x)
        return y * self.param("scale", linen.with_partitioning(linen.initializers.ones, ("embed",)), (WIDTH,)), aux


def square_loss(model, batch, key):
    y, aux = model(batch["x"])
    return jnp.mean((y - batch["y"]) ** 2) + aux.loss, {}


@functools.cache
def trained(kind):
    """Return a state after two Adam steps, with loads that follow Zipf's law, the step and a batch."""
    mesh = mp.MeshSpec(fsdp=2, expert=4).build()
    strategy = mp.fsdp(min_bytes=0) | mp.expert_parallel()
    x = tokens().reshape(8, -1, WIDTH)
    model = mp.from_nnx(lambda rngs: Layer(rngs=rngs)) if kind == "nnx" else mp.from_linen(LinenLayer(), x)
    state = mp.init_state(model, optax.adam(1e-3), mesh=mesh, strategy=strategy, key=0)
    state = state.replace(params=with_zipf(state.params))
    batch = mp.shard_batch({"x": x, "y": np.tanh(x[..., ::-1])}, mesh, strategy)
    step = mp.train_step(square_loss)
    for _ in range(2):
        state, _ = step(copied(state), batch)
    return state, step, batch


def copied(state):
    """Copy a state, because a step donates its arguments."""
    return jax.device_put(jax.device_get(state), state.setup.shardings)


def with_zipf(params):
    """Return the parameters with a router whose loads follow Zipf's law."""
    router = params["moe"]["router"]
    skewed = np.random.default_rng(10).normal(size=router.shape)
    skewed[0] += 1.5 * np.random.default_rng(0).permutation(np.log(NUM_EXPERTS / np.arange(1, NUM_EXPERTS + 1)))
    moe_params = params["moe"] | {"router": jax.device_put(skewed.astype(router.dtype), router.sharding)}
    return params | {"moe": moe_params}


@jax.jit
def output(state, batch):
    with mp.use_rules(state.setup.mesh, state.setup.strategy):
        return state.bound()(batch["x"])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_rebalanced_state_continues_training(kind):
    state, step, batch = trained(kind)
    y, aux = output(state, batch)
    before = np.asarray(aux.load)
    done = mp.rebalance_experts(state, before)
    (placed,) = done.placements[""]
    order, new = np.array(placed.order), done.state

    # The loads of the ranks are those that the placement predicts.
    y_after, aux_after = output(new, batch)
    np.testing.assert_array_equal(y_after, y)
    per_rank = np.asarray(aux_after.load).reshape(4, -1).sum(1)
    assert per_rank.tolist() == list(placed.after)
    assert placed.gain == before.reshape(4, -1).sum(1).max() / per_rank.max() > 1.2

    # Arrays with a dim of experts are permuted along it. Other arrays and all shardings stay the same.
    moved = 0
    for (path, old), x in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(new), strict=True):
        assert x.sharding.is_equivalent_to(old.sharding, old.ndim), path
        expected = np.asarray(old)
        if NUM_EXPERTS in expected.shape:
            moved += 1
            expected = np.take(expected, order, expected.shape.index(NUM_EXPERTS))
        np.testing.assert_array_equal(x, expected, err_msg=jax.tree_util.keystr(path))
    assert moved == 3 * 4 + 2  # router, gate, up and down, each with two moments; bias and counts

    for _ in range(2):
        (state, metrics), (new, metrics_after) = step(copied(state), batch), step(copied(new), batch)
        np.testing.assert_allclose(metrics_after["loss"], metrics["loss"], rtol=1e-6)
    gate, gate_after = (np.asarray(result.params["moe"]["gate"]) for result in (state, new))
    np.testing.assert_allclose(gate_after, gate[order], atol=1e-6)


def test_rebalancing_requires_ranks_and_names():
    state, _, _ = trained("nnx")
    mesh = mp.MeshSpec(fsdp=8).build()
    unsharded = mp.init_state(state.setup.model, optax.sgd(0.1), mesh=mesh, strategy=mp.fsdp(min_bytes=0), key=0)
    with raises("missing-argument", "rebalance_experts"):
        mp.rebalance_experts(unsharded, zipf(NUM_EXPERTS))
    assert mp.rebalance_experts(unsharded, zipf(NUM_EXPERTS), num_ranks=4).gain > 1
    with raises("missing-argument"):
        mp.rebalance_experts(state.params, zipf(NUM_EXPERTS))
    with raises("not-found", "`decoder`"):
        mp.rebalance_experts(state, {"decoder": zipf(NUM_EXPERTS)})


def test_rebalancing_refuses_empty_or_traced_loads():
    with raises("missing-argument"):
        mp.rebalance_experts(model(), {}, names=NAMES, num_ranks=4)
    with raises("wrong-type"):
        jax.jit(lambda loads: mp.rebalance_experts(model(), loads, names=NAMES, num_ranks=4))(zipf(16))


# Bitwise equal outputs ----------------------------------------------------------------------------------------------


@functools.cache
def decoder(tx=None, strategy=None, mesh=None, kind="nnx", rows=8, routing=None, **config):
    """Return the state of a decoder with two MoE layers, a function that returns its logits, and uneven loads."""
    routing = routing or Routing(num_experts=NUM_EXPERTS, top_k=2)
    cfg = TransformerConfig(
        vocab_size=64, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32,
        moe=MoEConfig(routing=routing, mlp_dim=32, **config),
    )  # fmt: skip
    words = np.random.default_rng(0).integers(0, 64, (rows, 32)).astype(np.int32)
    model = cfg.build() if kind == "nnx" else mp.from_linen(linen_decoder(cfg), words)
    mesh = (mesh or mp.MeshSpec(fsdp=2, expert=4)).build()
    strategy = mp.fsdp() | mp.expert_parallel() if strategy is None else strategy
    state = mp.init_state(model, tx or optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)

    @jax.jit
    def logits(state):
        with mp.use_rules(state.setup.mesh, state.setup.strategy):
            return state.bound()(words)

    return state, logits, np.stack([zipf(NUM_EXPERTS, seed=seed) for seed in range(2)])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "config",
    [
        {"bound_factor": 4.0},  # the largest useful bound: both experts of a token may be on the same of four ranks
        {"routing": Routing(num_experts=NUM_EXPERTS, top_k=2, capacity_factor=0.5)},
        {"routing": Routing(num_experts=NUM_EXPERTS, top_k=3)},
        {"has_biases": True, "activation": "clamped_swiglu"},
    ],
    ids=["large bound", "capacity", "top 3", "biases"],
)
def test_logits_are_bitwise_equal_if_tokens_travel(config):
    state, logits, loads = decoder(**config)

    def different_biases(path, x):  # they are zero initially
        return x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) / 64 if "_bias" in str(path) else x

    state = state.replace(params=jax.tree_util.tree_map_with_path(different_biases, state.params))
    done = mp.rebalance_experts(state, loads)
    assert all(placed.moved for placed in done.placements[""])
    np.testing.assert_array_equal(logits(done.state), logits(state))


@pytest.mark.matrix
def test_optimizer_with_one_slot_for_all_layers():
    state, logits, loads = decoder(tx=optax.sm3(0.1))
    with raises("wrong-shape", "`opt_state/"):
        mp.rebalance_experts(state, loads)
    done = mp.rebalance_experts(state, loads.sum(0))  # the fix of the error
    np.testing.assert_array_equal(logits(done.state), logits(state))
    assert done.gain > 1
