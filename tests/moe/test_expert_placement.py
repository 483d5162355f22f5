"""Placement: the busiest rank's load as low as predicted, and a model that computes the same bits."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar import moe
from meshpar.models import LinenTransformer, TransformerConfig
from meshpar.moe import MoEConfig, Routing
from meshpar.moe.linen import LinenMoE
from meshpar.moe.nnx import MoE
from meshpar.sharding.types import MeshparError
from tests.grid import cases


def zipf(num_experts, total=100_000, seed=0):
    shares = 1 / np.arange(1, num_experts + 1)
    return np.random.default_rng(seed).permutation((total * shares / shares.sum()).round())


def busiest(loads, order, num_ranks):
    """The load of the busiest rank, counted expert by expert."""
    each, totals = len(loads) // num_ranks, [0.0] * num_ranks
    for place, expert in enumerate(order):
        totals[place // each] += loads[expert]
    return max(totals)


def every_sharing(experts, num_ranks):
    """All ways to share experts out in equal numbers, ranks being alike."""
    if not experts:
        yield []
        return
    first, *rest = experts
    each = len(experts) // num_ranks
    for others in itertools.combinations(rest, each - 1):
        left = [expert for expert in rest if expert not in others]
        for more in every_sharing(left, num_ranks - 1):
            yield [(first, *others), *more]


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(4, 2), (6, 3), (8, 2), (8, 4), (9, 3), (10, 5)])
def test_a_placement_is_within_2_percent_of_the_optimum(num_experts, num_ranks):
    rng = np.random.default_rng(num_experts)
    skewed = [rng.lognormal(0, width, num_experts) for width in (0.3, 0.6, 1.0, 1.5)]
    for loads in (rng.integers(0, 100, num_experts), zipf(num_experts), rng.random(num_experts), *skewed):
        best = min(
            max(sum(loads[e] for e in share) for share in shares)
            for shares in every_sharing(list(range(num_experts)), num_ranks)
        )
        placed = moe.place(loads, num_ranks)
        assert best * (1 - 1e-12) <= busiest(loads, placed.order, num_ranks) <= 1.02 * best
        assert max(placed.after) <= max(placed.before)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(4, 4), (8, 1), (16, 4), (64, 8), (256, 8)])
def test_a_placement_is_a_permutation_and_says_what_it_does(num_experts, num_ranks):
    loads = zipf(num_experts)
    placed = moe.place(loads, num_ranks)
    assert sorted(placed.order) == list(range(num_experts))
    assert max(placed.before) == busiest(loads, range(num_experts), num_ranks)
    assert max(placed.after) == busiest(loads, placed.order, num_ranks)
    assert placed.gain == max(placed.before) / max(placed.after) >= 1
    each = num_experts // num_ranks
    moved = sum(place // each != expert // each for place, expert in enumerate(placed.order))
    assert placed.moved == moved
    stay = [(place, expert) for place, expert in enumerate(placed.order) if place // each == expert // each]
    assert all(place == expert for place, expert in stay)


def test_a_single_swap_is_preferred_to_another_assignment_that_is_as_good():
    placed = moe.place([9, 8, 7, 6, 5, 4], 2)
    assert (placed.before, max(placed.after), placed.moved) == ((24, 15), 20, 2)


@pytest.mark.parametrize(
    ("loads", "best"),
    [
        ([9, 11, 2, 2, 6, 7, 10, 5], 26),  # swaps from the present assignment stop at 27
        ([7, 7, 10, 6, 10, 2, 7, 5], 27),  # swaps from the greedy assignment stop at 28
    ],
)
def test_the_better_of_two_starts_is_used(loads, best):
    assert max(moe.place(loads, 2).after) == best


@pytest.mark.parametrize("loads", [[5, 5, 5, 5], [3, 1, 1, 3], [0, 0, 0, 0]])
def test_nothing_moves_for_no_gain(loads):
    placed = moe.place(loads, 2)
    assert placed.order == (0, 1, 2, 3)
    assert (placed.moved, placed.gain) == (0, 1.0)


def test_where_one_swap_will_do_the_others_stay():
    placed = moe.place([10, 9, 8, 1, 5, 6, 5, 6], 2)
    assert placed.order == (0, 5, 2, 3, 4, 1, 6, 7)
    assert (placed.before, placed.after, placed.moved) == ((28, 22), (25, 25), 2)
    assert str(placed) == "busiest of 2 ranks 1.12 → 1 times the mean load, gain 1.12; 2 of 8 experts move"


@pytest.mark.parametrize(("groups", "num_ranks"), [(8, 4), (8, 2), (4, 8), (2, 8), (4, 4)])
def test_groups_stay_whole_and_within_their_ranks(groups, num_ranks):
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
    """(y, experts)."""
    layer = params["moe"]
    routed = moe.route(x @ layer["router"]["kernel"], routing, bias=layer["bias"])
    own = {"up": layer["up"], "down": layer["down"]}
    y = moe.reference.moe(x, routed.experts, routed.weights, mlp, own, capacity=capacity)
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
def test_the_busiest_rank_gets_as_much_less_as_predicted_and_the_output_has_the_same_bits(
    kind, num_ranks, gain, capacity
):
    routing = ROUTINGS[kind]
    params, x = model(), tokens()
    y, experts = forward(params, x, routing, capacity)
    loads = moe.count(experts, NUM_EXPERTS)
    done = moe.rebalance(params, loads, names=NAMES, num_ranks=num_ranks, groups=routing.groups)
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
        assert not moe.kept(experts, capacity, NUM_EXPERTS)[1].all()


def test_without_the_router_the_model_would_be_another():
    params, x = model(), tokens()
    routing = ROUTINGS["normalized softmax"]
    y, experts = forward(params, x, routing)
    loads = moe.count(experts, NUM_EXPERTS)
    placed = moe.place(np.asarray(loads), 4)
    without = {path: names for path, names in NAMES.items() if "router" not in path}
    other, _ = forward(moe.permute(params, placed.order, names=without), x, routing)
    assert np.abs(other - y).max() > 0.1
    with pytest.raises(MeshparError, match="no router is among the leaves with a dim named `expert` .*`moe/bias`"):
        moe.rebalance(params, loads, names=without, num_ranks=4)


def test_what_is_kept_elsewhere_is_permuted_by_itself():
    placed = moe.place(zipf(NUM_EXPERTS), 4)
    extra = {"moe": {"bias": np.arange(16.0)}, "count": np.arange(16)}
    found = moe.permute(extra, placed.order, names=NAMES)
    assert found["moe"]["bias"].tolist() == list(placed.order)
    assert found["count"] is extra["count"]


@pytest.mark.parametrize("layers_first", [True, False])
def test_stacked_layers_are_placed_each_by_itself(layers_first):
    params = [model(seed) for seed in range(3)]
    at = 0 if layers_first else 1
    together = jax.tree.map(lambda *leaves: np.stack(leaves, axis=min(at, leaves[0].ndim)), *params)
    names = {path: (*given[:at], "layers", *given[at:]) for path, given in NAMES.items()}
    loads = np.stack([zipf(NUM_EXPERTS, seed=seed) for seed in range(3)])
    done = moe.rebalance(together, loads, names=names, num_ranks=4)
    placed = done.placements[""]
    assert len({one.order for one in placed}) == 3
    assert done.gain == sum(max(p.before) for p in placed) / sum(max(p.after) for p in placed)
    for layer, (one, row) in enumerate(zip(params, loads, strict=True)):
        alone = moe.rebalance(one, row, names=NAMES, num_ranks=4)
        assert alone.placements[""] == (placed[layer],)
        found = jax.tree.map(lambda leaf, layer=layer: np.take(leaf, layer, axis=min(at, leaf.ndim - 1)), done.state)
        jax.tree.map(np.testing.assert_array_equal, found, alone.state)


def test_layers_at_paths_of_their_own():
    tree = {"block_0": model(0), "block_1": model(1), "block_10": model(2)}
    names = {f"{block}/{path}": given for block in tree for path, given in NAMES.items()}
    loads = {"block_0/moe": zipf(16, seed=0), "block_1": zipf(16, seed=1)}
    done = moe.rebalance(tree, loads, names=names, num_ranks=4)
    for block, scope in (("block_0", "block_0/moe"), ("block_1", "block_1")):
        (placed,) = done.placements[scope]
        np.testing.assert_array_equal(done.state[block]["moe"]["up"], tree[block]["moe"]["up"][list(placed.order)])
    assert done.state["block_10"]["moe"]["up"] is tree["block_10"]["moe"]["up"]


def test_arrays_keep_their_sharding_and_dtype(mesh8):
    specs = {"router": {"kernel": P(None, "fsdp")}, "up": P("fsdp", None, "tensor"), "down": P("fsdp", "tensor")}
    params = model()
    del params["moe"]["bias"]
    placed_on = jax.tree.map(lambda spec: NamedSharding(mesh8, spec), specs, is_leaf=lambda x: isinstance(x, P))
    sharded = params | {"moe": jax.device_put(jax.tree.map(jnp.bfloat16, params["moe"]), placed_on)}
    loads = zipf(NUM_EXPERTS)
    found = moe.rebalance(sharded, loads, names=NAMES, num_ranks=4).state["moe"]
    expected = moe.rebalance(params, loads, names=NAMES, num_ranks=4).state["moe"]
    for (path, one), other, where in zip(
        jax.tree_util.tree_leaves_with_path(found), *map(jax.tree.leaves, (expected, placed_on)), strict=True
    ):
        assert one.sharding.is_equivalent_to(where, one.ndim), path
        assert one.dtype == jnp.bfloat16
        np.testing.assert_array_equal(one, other.astype(jnp.bfloat16))


# Mistakes ------------------------------------------------------------------------------------------------------------


def test_leaves_that_do_not_fit_the_loads():
    with pytest.raises(MeshparError, match="`moe/bias`: asked to rebalance 8 experts"):
        moe.rebalance(model(), zipf(8), names=NAMES, num_ranks=4)
    with pytest.raises(MeshparError, match="16 experts in 2 layers"):
        moe.rebalance(model(), np.stack([zipf(16)] * 2), names=NAMES, num_ranks=4)
    with pytest.raises(MeshparError, match=r"leaves below `block`: .*none at all"):
        moe.rebalance(model(), {"block": zipf(16)}, names=NAMES, num_ranks=4)


# A whole state -------------------------------------------------------------------------------------------------------


class Layer(nnx.Module):
    """An MoE layer with a vector of their number beside it that is none of theirs."""

    def __init__(self, *, rngs):
        routing = Routing(num_experts=NUM_EXPERTS, top_k=2)
        self.moe = MoE(WIDTH, MoEConfig(routing=routing, mlp_dim=HIDDEN, bias_rate=0.05), rngs=rngs)
        self.scale = nnx.Param(nnx.with_partitioning(nnx.initializers.normal(), ("embed",))(rngs.params(), (WIDTH,)))

    def __call__(self, x):
        y, told = self.moe(x)
        return y * self.scale[...], told


class LinenLayer(linen.Module):
    """Likewise."""

    @linen.compact
    def __call__(self, x):
        routing = Routing(num_experts=NUM_EXPERTS, top_k=2)
        y, told = LinenMoE(WIDTH, MoEConfig(routing=routing, mlp_dim=HIDDEN, bias_rate=0.05), name="moe")(x)
        return y * self.param("scale", linen.with_partitioning(linen.initializers.ones, ("embed",)), (WIDTH,)), told


def square_loss(model, batch, key):
    y, told = model(batch["x"])
    return jnp.mean((y - batch["y"]) ** 2) + told.loss, {}


@functools.cache
def trained(kind):
    """(a state after two steps with Adam, the router loaded as by Zipf's law; the step; a batch)."""
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
    """A step gives its arguments' memory away."""
    return jax.device_put(jax.device_get(state), state.setup.shardings)


def with_zipf(params):
    """The parameters with a router that loads experts unevenly."""
    router = params["moe"]["router"]
    skewed = np.random.default_rng(10).normal(size=router.shape)
    skewed[0] += 1.5 * np.random.default_rng(0).permutation(np.log(NUM_EXPERTS / np.arange(1, NUM_EXPERTS + 1)))
    moe_params = params["moe"] | {"router": jax.device_put(skewed.astype(router.dtype), router.sharding)}
    return params | {"moe": moe_params}


@jax.jit
def output(state, batch):
    with mp.use_rules(state.setup.mesh, state.setup.strategy):
        return state.bound()(batch["x"])


@pytest.mark.parametrize("kind", ["nnx", pytest.param("linen", marks=pytest.mark.matrix)])
def test_a_state_is_permuted_as_a_whole_and_goes_on_as_it_would_have(kind):
    state, step, batch = trained(kind)
    y, told = output(state, batch)
    before = np.asarray(told.load)
    done = moe.rebalance(state, before)
    (placed,) = done.placements[""]
    order, new = np.array(placed.order), done.state

    # The busiest of the four ranks that share the experts gets less, as much as predicted, of the very same tokens.
    y_after, told_after = output(new, batch)
    np.testing.assert_array_equal(y_after, y)
    per_rank = np.asarray(told_after.load).reshape(4, -1).sum(1)
    assert per_rank.tolist() == list(placed.after)
    assert placed.gain == before.reshape(4, -1).sum(1).max() / per_rank.max() > 1.2

    # Everything that has a dim of experts is permuted along it, and nothing else is touched or laid anew.
    moved = 0
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(new), strict=True):
        assert other.sharding.is_equivalent_to(one.sharding, one.ndim), path
        where, one = jax.tree_util.keystr(path), np.asarray(one)
        if NUM_EXPERTS not in one.shape:
            np.testing.assert_array_equal(other, one, err_msg=where)
        else:
            moved += 1
            np.testing.assert_array_equal(other, np.take(one, order, one.shape.index(NUM_EXPERTS)), err_msg=where)
    assert moved == 3 * 4 + 2  # router, gate, up and down, each with two moments; bias and counts

    for _ in range(2):
        (state, metrics), (new, metrics_after) = step(copied(state), batch), step(copied(new), batch)
        np.testing.assert_allclose(metrics_after["loss"], metrics["loss"], rtol=1e-6)
    gate, gate_after = (np.asarray(one.params["moe"]["gate"]) for one in (state, new))
    np.testing.assert_allclose(gate_after, gate[order], atol=1e-6)


def test_a_state_whose_experts_are_whole_and_parameters_without_names():
    state, _, _ = trained("nnx")
    mesh = mp.MeshSpec(fsdp=8).build()
    whole = mp.init_state(state.setup.model, optax.sgd(0.1), mesh=mesh, strategy=mp.fsdp(min_bytes=0), key=0)
    with pytest.raises(MeshparError, match="split no dim named `expert` over more than one"):
        moe.rebalance(whole, zipf(NUM_EXPERTS))
    assert moe.rebalance(whole, zipf(NUM_EXPERTS), num_ranks=4).gain > 1
    with pytest.raises(MeshparError, match="without names and num_ranks"):
        moe.rebalance(state.params, zipf(NUM_EXPERTS))
    with pytest.raises(MeshparError, match="leaves below `decoder`"):
        moe.rebalance(state, {"decoder": zipf(NUM_EXPERTS)})


def test_loads_that_are_not_there():
    with pytest.raises(MeshparError, match="by no loads"):
        moe.rebalance(model(), {}, names=NAMES, num_ranks=4)
    with pytest.raises(MeshparError, match="outside of jax.jit"):
        jax.jit(lambda loads: moe.rebalance(model(), loads, names=NAMES, num_ranks=4))(zipf(16))


# What stays the same to the bit, and what does not -----------------------------------------------------------------


@functools.cache
def decoder(tx=None, strategy=None, mesh=None, kind="nnx", rows=8, routing=None, **config):
    """(a state of a decoder with two MoE layers, what computes its logits, loads by layer that make experts move)."""
    routing = routing or Routing(num_experts=NUM_EXPERTS, top_k=2)
    cfg = TransformerConfig(
        vocab_size=64, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32,
        moe=MoEConfig(routing=routing, mlp_dim=32, **config),
    )  # fmt: skip
    words = np.random.default_rng(0).integers(0, 64, (rows, 32)).astype(np.int32)
    model = cfg.build() if kind == "nnx" else mp.from_linen(LinenTransformer(cfg), words)
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
        {"bound_factor": 4.0},  # two of a token's choices may both go to one of four ranks: no routing is over it
        {"routing": Routing(num_experts=NUM_EXPERTS, top_k=2, capacity_factor=0.5)},
        {"routing": Routing(num_experts=NUM_EXPERTS, top_k=3)},
    ],
    ids=["a bound that none is over", "capacity", "three choices"],
)
def test_logits_have_the_same_bits_where_tokens_travel(config):
    state, logits, loads = decoder(**config)
    done = moe.rebalance(state, loads)
    assert all(placed.moved for placed in done.placements[""])
    np.testing.assert_array_equal(logits(done.state), logits(state))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["nnx", pytest.param("linen", marks=pytest.mark.matrix)])
def test_a_bound_between_ranks_drops_others_and_rebalance_says_so(kind):
    state, logits, loads = decoder(bound_factor=1.0, kind=kind)
    with pytest.warns(UserWarning, match=r"bound_factor=1\.0 .*from bound_factor=4 on"):
        done = moe.rebalance(state, loads)
    assert np.abs(logits(done.state) - logits(state)).max() > 0.1


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["tokens replicated", "experts choose", "node first"])
def test_another_order_of_sums_is_told_and_changes_by_rounding(what):
    if what == "tokens replicated":
        own = {"strategy": mp.fsdp() | mp.expert_parallel() | mp.Rules(batch=("fsdp",))}
        told = "replicated over `expert`.*by rounding"
    elif what == "node first":
        levels = mp.expert_parallel(axis=("data", "expert"))
        own = {"mesh": mp.MeshSpec(data=2, expert=4), "strategy": mp.ddp() | levels, "implementation": "node-first"}
        told = "to others of 2 nodes.*by rounding.*hierarchical"
    else:
        chosen = {"choice": "expert", "force": True, "normalize": False}
        own, told = {"routing": Routing(num_experts=NUM_EXPERTS, top_k=2, **chosen)}, "that choose.*by rounding"
    state, logits, loads = decoder(**own)
    with pytest.warns(UserWarning, match=told):
        done = moe.rebalance(state, loads)
    np.testing.assert_allclose(logits(done.state), logits(state), atol=1e-5)  # logits of up to 3, sums of float32


def test_nothing_is_told_where_nothing_moves():
    state, _, _ = decoder(bound_factor=1.0, kind="nnx")
    even = np.full((2, NUM_EXPERTS), 7)
    assert not any(placed.moved for placed in moe.rebalance(state, even).placements[""])


@pytest.mark.matrix
def test_groups_of_the_models_own_routers_are_asked_for():
    routing = Routing(num_experts=NUM_EXPERTS, top_k=2, groups=8, top_groups=2)
    state, _, loads = decoder(routing=routing)
    with pytest.raises(MeshparError, match=r"rebalance\(groups=1\).*model's have 8.*write groups=8"):
        moe.rebalance(state, loads)
    assert all(placed.moved for placed in moe.rebalance(state, loads, groups=8).placements[""])


@pytest.mark.matrix
def test_an_optimizer_that_keeps_one_number_for_all_layers():
    state, logits, loads = decoder(tx=optax.sm3(0.1))
    told = r"`opt_state/\S+`.*each by itself.*one number for an expert of all layers.*loads\.sum\(0\)"
    with pytest.raises(MeshparError, match=told):
        moe.rebalance(state, loads)
    done = moe.rebalance(state, loads.sum(0))  # what the message says to do
    np.testing.assert_array_equal(logits(done.state), logits(state))
    assert done.gain > 1
