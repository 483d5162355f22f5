"""Optimizer state in bfloat16 and in the host's memory: values, where it lies, and what is said of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.compiled.memory import memory
from meshpar.compiled.program import compile_here
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.sharding.types import tree_leaves_with_paths
from meshpar.training.moments import _from_bytes, _in_bfloat16, _in_bytes
from tests.equal import mesh_of
from tests.grid import cases

CONFIG = TransformerConfig(
    vocab_size=64, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128
)
TOKENS = np.random.default_rng(0).integers(0, 64, (16, 17), dtype=np.int32)
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
FSDP = mp.MeshSpec(fsdp=8)


def after(tx, *, steps=2, spec=FSDP, strategy=None, **options):
    state = mp.init_state(CONFIG.build(), tx, mesh=mesh_of(spec), strategy=strategy or mp.fsdp(), key=0)
    step = mp.train_step(next_token_loss, **options)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return state, float(metrics["loss"])


def moments(state):
    return [x for x in jax.tree.leaves(state.opt_state) if x.ndim]


def test_moments_are_kept_in_bfloat16_and_computed_with_as_before():
    tx, small = optax.adam(1e-2), mp.moments_in(optax.adam(1e-2), "bfloat16")
    params = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.float32(2)}
    state, expected = small.init(params), tx.init(params)
    for k in range(3):
        grads = jax.tree.map(lambda p, k=k: np.sin(p + k), params)
        updates, state = small.update(grads, state, params)
        wanted, expected = tx.update(grads, expected, params)
        jax.tree.map(np.testing.assert_array_equal, updates, wanted)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2**-7), jax.tree.map(np.float64, state), expected
        )
        expected = jax.tree.map(lambda x: x.astype("float32") if x.dtype == "bfloat16" else x, state)
    assert [x.dtype.name for x in jax.tree.leaves(state) if x.ndim] == ["bfloat16"] * 2


def test_in_bfloat16_a_number_is_one_of_the_two_nearest_and_the_mean_of_many_is_itself():
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    below = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # nearer zero
    above = ((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    found = np.asarray(_in_bfloat16(x), np.float32)
    assert np.all((found == below) | (found == above))
    np.testing.assert_array_equal(found == above, found != below)
    # Each is off by a third of the step between two numbers, which is at most x / 128.
    assert abs((found - x).mean()) < 4 / 3 / 128 / np.sqrt(x.size)
    kept = np.float32([0, -0.0, 1.5, -2.0, 3.3e38, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(np.asarray(_in_bfloat16(kept), np.float32), np.float32(kept.astype("bfloat16")))


def test_in_bytes_a_number_is_one_of_the_two_nearest_levels_and_the_mean_of_many_is_itself():
    x = np.random.default_rng(0).normal(size=(64, 2048)).astype(np.float32) ** 3
    x[0], x[1, 0] = 0, 0
    kept, scales = (getattr(_in_bytes(x), name) for name in ("levels", "scales"))
    assert (kept.dtype, kept.shape, scales.shape) == (np.int8, x.shape, (64,))
    k = np.abs(np.asarray(kept, np.float64))
    low, high = (np.maximum(k - 1, 0) / 127) ** 4, ((k + 1) / 127) ** 4
    share = np.abs(x) / np.maximum(np.asarray(scales), 1e-30)[:, None]
    assert np.all((low <= share + 1e-6) & (share <= high + 1e-6))  # float32 around the levels
    np.testing.assert_array_equal(np.asarray(kept) == 0, x == 0)
    assert _in_bytes(jnp.zeros((8, 0))).scales.tolist() == [0] * 8
    found = np.asarray(_from_bytes(_in_bytes(x), np.float32))
    # 1e5 numbers, each off by a fiftieth of the root of their mean square.
    assert abs((found - x).mean()) < 5 * 0.02 * np.sqrt((x**2).mean()) / np.sqrt(x.size)
    np.testing.assert_allclose(
        found[np.abs(x) == np.asarray(scales)[:, None]], x[np.abs(x) == np.asarray(scales)[:, None]], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("there", "back"),
    [(_in_bytes, lambda x: _from_bytes(x, jnp.float32)), (_in_bfloat16, lambda x: x.astype(jnp.float32))],
    ids=["int8", "bfloat16"],
)
def test_a_slow_average_still_moves(there, back):
    """By a thousandth a step, where levels are thirty, or eight, times as far apart."""
    kept, wanted = there(jnp.ones((64, 64))), 0.999**500

    @jax.jit
    def step(kept, noise):
        return there(0.999 * back(kept) + 1e-3 * (noise - 0.5))

    for noise in np.random.default_rng(0).uniform(size=(500, 64, 64)).astype(np.float32):
        kept = step(kept, noise)
    # Each row's largest number drifts up, for in bytes it is never rounded; the others are right on average.
    assert np.median(back(kept)) == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize(
    ("tx", "kept"),
    [
        (optax.contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9), ["z/b", "z/w"]),
        (optax.contrib.schedule_free_adamw(0.1), ["z/b", "z/w"]),
        (optax.contrib.prodigy(0.1), ["params0/b", "params0/w"]),
        (optax.contrib.muon(0.1), ["0/ns_coeffs"]),
        (optax.chain(optax.trace(0.9), optax.ema(0.9)), []),
    ],
)
def test_weights_that_an_optimizer_keeps_are_not_rounded(tx, kept):
    """Steps of less than 2⁻⁹ of a weight would not move it."""
    params = {"w": np.full((2, 2), 1.001, np.float32), "b": np.full(3, 1.001, np.float32)}
    small = mp.moments_in(tx, "bfloat16")
    state = small.init(params)
    state = small.update(jax.tree.map(np.ones_like, params), state, params)[1]
    wide = {path: x for path, x in tree_leaves_with_paths(state) if x.ndim and x.dtype == np.float32}
    assert sorted("/".join(path.split("/")[-2:]) for path in wide) == kept
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, small.init(params))


def test_a_small_step_moves_the_weights_that_an_optimizer_keeps():
    params = {"w": np.full(4, 1.001, np.float32)}
    tx = optax.contrib.schedule_free(optax.sgd(1e-4), 1e-4, b1=0.9)
    small = mp.moments_in(tx, "bfloat16")
    found, expected = (
        one.update({"w": np.ones(4, np.float32)}, one.init(params), params)[1].z["w"] for one in (small, tx)
    )
    np.testing.assert_array_equal(found, expected)
    assert (found != params["w"]).all()


@pytest.fixture(scope="module")
def plain():
    return after(optax.adam(1e-2))


def test_offloaded_it_lies_on_the_host_and_changes_nothing(plain):
    state, loss = after(mp.offloaded(optax.adam(1e-2)))
    assert loss == plain[1]
    jax.tree.map(np.testing.assert_array_equal, state.params, plain[0].params)
    assert {x.sharding.memory_kind for x in moments(state)} == {"pinned_host"}
    kept = [state.params, [x for x in jax.tree.leaves(state.opt_state) if not x.ndim]]
    assert {x.sharding.memory_kind for x in jax.tree.leaves(kept)} == {"device"}
    assert max(x.addressable_shards[0].data.size / x.size for x in moments(state)) == 1 / 8
    totals, before = state.table.totals, plain[0].table.totals
    counter = 4
    assert (totals.optimizer_bytes, totals.host_bytes) == (counter, before.optimizer_bytes - counter)
    assert totals.state_bytes == before.state_bytes - totals.host_bytes
    assert "on the host" in str(state.table)
    assert "on the host" not in str(plain[0].table)


@pytest.mark.parametrize(
    "within",
    [
        lambda tx: mp.moments_in(tx, "bfloat16"),
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.masked(tx, lambda params: jax.tree.map(lambda _: True, params)),
        lambda tx: optax.apply_if_finite(tx, 3),
    ],
)
def test_offloaded_as_a_part_of_another_optimizer(within):
    tx, tokens = within(mp.offloaded(optax.adam(1e-2))), {"mesh": FSDP.build(), "strategy": mp.fsdp()}
    state = mp.abstract_state(CONFIG.build(), tx, **tokens)
    assert {x.sharding.memory_kind for x in moments(state)} == {"pinned_host"}


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{"nonfinite": "ignore"}, {"accumulate": 2, "accumulate_mode": "once"}])
def test_both_in_other_steps(options):
    both = mp.offloaded(
        mp.moments_in(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.95)), "bfloat16")
    )
    strategy = mp.zero1()
    state, loss = after(both, strategy=strategy, **options)
    assert {(x.dtype.name, x.sharding.memory_kind) for x in moments(state)} == {("bfloat16", "pinned_host")}
    wide = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.95))
    assert loss == pytest.approx(after(wide, strategy=strategy, **options)[1], rel=1e-3)  # moments of 8 bits


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("spec", "strategy"),
    cases(
        (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel()),
        grid=[
            (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel()),
            (mp.MeshSpec(fsdp=8), mp.zero1()),
            (mp.MeshSpec(data=2, fsdp=4), mp.hsdp()),
        ],
    ),
)
def test_in_bytes_every_layout_keeps_the_same_in_shards(spec, strategy):
    tx = mp.moments_in(optax.adam(1e-2), "int8")
    one, loss = after(tx, spec=mp.MeshSpec(data=1), strategy=mp.ddp())
    state, found = after(tx, spec=spec, strategy=strategy)
    assert found == pytest.approx(loss, rel=1e-5)
    apart = [
        np.not_equal(*pair).mean()
        for pair in zip(*map(jax.device_get, (moments(state), moments(one))), strict=True)
        if pair[0].dtype == np.int8
    ]
    assert max(apart) < 0.05  # of numbers whose leading 13 bits of significand sums in another order change
    tables = {leaf.path: leaf for leaf in state.table.optimizer}
    down = {name: tables[f"opt_state/0/mu/layers/mlp/down/kernel/{name}"] for name in ("levels", "scales")}
    whole = next(leaf for leaf in state.table.params if leaf.path == "layers/mlp/down/kernel")
    if strategy != mp.zero1():
        assert down["levels"].spec == whole.spec
        assert tuple(down["scales"].spec) == tuple(whole.spec)[:2]
    like = mp.abstract_state(CONFIG.build(), optax.adam(1e-2), mesh=spec.build(), strategy=strategy)
    assert state.table.totals.optimizer_bytes < like.table.totals.optimizer_bytes / 3  # a scale for 16 numbers


@pytest.mark.matrix
def test_in_bytes_nothing_unexpected_is_sent():
    spec, strategy = mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel()
    state = mp.abstract_state(
        CONFIG.build(), mp.moments_in(optax.adam(1e-2), "int8"), mesh=spec.build(), strategy=strategy
    )
    report = mp.explain(mp.train_step(next_token_loss), state, BATCH)
    assert not report.promise.unexpected
    assert not report.promise.missing


@pytest.mark.matrix
def test_a_checkpoint_brings_it_back_to_the_host(tmp_path):
    tx = mp.offloaded(mp.moments_in(optax.adam(1e-2), "int8"))
    state, _ = after(tx)
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        like = mp.abstract_state(CONFIG.build(), tx, mesh=FSDP.build(), strategy=mp.fsdp())
        found = checkpoints.restore(like).state
    jax.tree.map(np.testing.assert_array_equal, moments(found), moments(state))
    assert {x.sharding.memory_kind for x in moments(found)} == {"pinned_host"}


@pytest.mark.matrix
def test_pretrained_weights_begin_with_moments_on_the_host():
    tx = mp.offloaded(optax.adam(1e-2))
    state = mp.init_state(CONFIG.build(), tx, mesh=FSDP.build(), strategy=mp.fsdp(), key=0)
    loaded = mp.load_params(state, state.params)
    assert {x.sharding.memory_kind for x in moments(loaded)} == {"pinned_host"}


@pytest.mark.matrix
def test_the_account_of_memory_says_where_it_lies(plain):
    state = mp.abstract_state(CONFIG.build(), mp.offloaded(optax.adam(1e-2)), mesh=FSDP.build(), strategy=mp.fsdp())
    program = compile_here(mp.train_step(next_token_loss).trace(state, BATCH))
    account = memory(program, state.setup, BATCH, None)
    assert account.host_bytes == plain[0].table.totals.optimizer_bytes - 4
    assert account.optimizer_bytes == 4
    assert not [one for one in account.largest if one.what == "optimizer state" and one.nbytes > 4]


def test_the_recipe_s_optimizer_takes_both():
    tx = mp.AdamW(moments="bfloat16", offload=True).build(steps=100, names={})
    state = mp.abstract_state(CONFIG.build(), tx, mesh=FSDP.abstract(), strategy=mp.fsdp())
    assert {(x.dtype.name, x.sharding.memory_kind) for x in moments(state)} == {("bfloat16", "pinned_host")}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mp.AdamW(moments="int3"), "moments.*int3.*bfloat16"),
        (lambda: mp.moments_in(optax.adam(1e-3), "bfloat"), "bfloat.*`bfloat16`"),
        (lambda: mp.moments_in(optax.adam, "bfloat16"), "it has no init and update"),
        (lambda: mp.offloaded(3e-4), "take 0.0003 as the optimizer"),
    ],
)
def test_what_does_not_go_is_told(make, says):
    with pytest.raises(mp.MeshparError, match=says):
        make()


# Compiled for GPUs ---------------------------------------------------------------------------------------------------


@pytest.mark.pod
def test_offloaded_the_gpu_holds_less_by_its_bytes(pod):
    """Where the step holds more beside its state than the update does: 8 H100, XLA's figures."""
    cfg = TransformerConfig(
        vocab_size=512, num_layers=8, embed_dim=1024, num_heads=8, num_kv_heads=8, head_dim=128, mlp_dim=4096
    )
    batch = {name: jax.ShapeDtypeStruct((64, 1024), np.int32) for name in BATCH}
    found = {}
    for name, tx in {"plain": optax.adam(1e-3), "offloaded": mp.offloaded(optax.adam(1e-3))}.items():
        state = mp.abstract_state(cfg.build(), tx, mesh=FSDP.abstract(), strategy=mp.fsdp())
        step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"), remat="full")
        found[name] = mp.explain(step, state, batch, "h100:1x8", pod=pod, advise=False).memory
    plain, offloaded = found["plain"], found["offloaded"]
    moved = plain.optimizer_bytes - offloaded.optimizer_bytes
    assert offloaded.host_bytes == moved
    assert plain.peak_bytes - offloaded.peak_bytes == pytest.approx(moved, rel=0.05)
