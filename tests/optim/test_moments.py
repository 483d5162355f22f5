"""Low-precision optimizer state, and optimizer state in host memory: values, placement and memory estimates."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.inspect.memory import memory
from meshpar.inspect.program import compile_here
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.optim.moments import _from_bytes, _in_bytes
from meshpar.optim.rounding import in_bfloat16, random_bits
from meshpar.sharding.types import tree_leaves_with_paths
from tests.equal import mesh_of
from tests.errors import raises
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


def test_bfloat16_moments_are_updated_in_float32():
    tx, small = optax.adam(1e-2), mp.optim.low_precision_moments(optax.adam(1e-2), "bfloat16")
    params = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.float32(2)}
    state, expected = small.init(params), tx.init(params)
    for k in range(3):
        grads = jax.tree.map(lambda p, k=k: np.sin(p + k), params)
        updates, state = small.update(grads, state, params)
        expected_updates, expected = tx.update(grads, expected, params)
        jax.tree.map(np.testing.assert_array_equal, updates, expected_updates)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2**-7), jax.tree.map(np.float64, state.inner), expected
        )
        expected = jax.tree.map(lambda x: x.astype("float32") if x.dtype == "bfloat16" else x, state.inner)
    assert [x.dtype.name for x in jax.tree.leaves(state) if x.ndim] == ["bfloat16"] * 2


def draws(shape, count=1):
    return random_bits(shape, count, 0)


def test_bfloat16_rounding_is_to_adjacent_numbers_and_unbiased():
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    below = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # nearer zero
    above = ((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    rounded = np.asarray(in_bfloat16(x, draws(x.shape)), np.float32)
    assert np.all((rounded == below) | (rounded == above))
    np.testing.assert_array_equal(rounded == above, rounded != below)
    # The error is a third of the distance between adjacent numbers, which is at most x / 128.
    assert abs((rounded - x).mean()) < 4 / 3 / 128 / np.sqrt(x.size)
    exact = np.float32([0, -0.0, 1.5, -2.0, jnp.finfo("bfloat16").max, np.inf, -np.inf, np.nan])
    rounded = np.asarray(in_bfloat16(exact, draws(exact.shape)), np.float32)
    np.testing.assert_array_equal(rounded, np.float32(exact.astype("bfloat16")))


def test_int8_rounding_is_to_adjacent_levels_and_unbiased():
    x = np.random.default_rng(0).normal(size=(64, 2048)).astype(np.float32) ** 3
    x[0], x[1, 0] = 0, 0
    rounded = _in_bytes(x, draws(x.shape))
    levels, scales = rounded.levels, rounded.scales
    assert (levels.dtype, levels.shape, scales.shape) == (np.int8, x.shape, (64,))
    k = np.abs(np.asarray(levels, np.float64))
    low, high = (np.maximum(k - 1, 0) / 127) ** 4, ((k + 1) / 127) ** 4
    share = np.abs(x) / np.maximum(np.asarray(scales), 1e-30)[:, None]
    assert np.all((low <= share + 1e-6) & (share <= high + 1e-6))  # float32 around the levels
    np.testing.assert_array_equal(np.asarray(levels) == 0, x == 0)
    assert _in_bytes(jnp.zeros((8, 0)), draws((8, 0))).scales.tolist() == [0] * 8
    values = np.asarray(_from_bytes(rounded, np.float32))
    # 1e5 numbers, each with an error of 1/50 of their root mean square.
    assert abs((values - x).mean()) < 5 * 0.02 * np.sqrt((x**2).mean()) / np.sqrt(x.size)
    largest = np.abs(x) == np.asarray(scales)[:, None]
    np.testing.assert_allclose(values[largest], x[largest], rtol=1e-6)


def test_draws_are_uniform_over_elements_and_updates():
    over_elements = np.asarray(draws((64, 1024)))
    over_updates = np.asarray(jax.vmap(functools.partial(draws, (16,)))(jnp.arange(4096, dtype=jnp.int32)))
    for bits in (over_elements, over_updates):
        counts = np.bincount(bits.ravel() >> 26, minlength=64)
        # 63 degrees of freedom: chi-squared is below 130 except once in a million.
        assert ((counts - bits.size / 64) ** 2 / (bits.size / 64)).sum() < 130
    successive = np.corrcoef((over_updates[:-1] >> 8).ravel(), (over_updates[1:] >> 8).ravel())[0, 1]
    assert abs(successive) < 5 / np.sqrt(over_updates.size)
    assert (np.asarray(random_bits((64,), 1, 0)) != np.asarray(random_bits((64,), 1, 1))).all()  # another array


NUM_UPDATES = 3000
MAGNITUDES = np.exp(np.random.default_rng(0).normal(size=(32, 64))).astype(np.float32)


def gradients_of(case, b2):
    """Gradients of `NUM_UPDATES` updates: [update, row, column]."""
    rng, zeros = np.random.default_rng(1), np.zeros((NUM_UPDATES, *MAGNITUDES.shape), np.float32)
    if case == "constant":
        return zeros + MAGNITUDES
    if case == "decay":  # one gradient, then zeros until v is 5 % of its maximum
        zeros[-1 - round(np.log(0.05) / np.log(b2))] = MAGNITUDES
        return zeros
    visited = rng.uniform(size=(*zeros.shape[:2], 1)) < 0.02
    return (visited * rng.normal(size=zeros.shape) * MAGNITUDES).astype(np.float32)


@functools.cache
def _adam_over(dtype):
    def run(grads, b2):
        tx = optax.adam(1e-3, b2=b2)
        tx = tx if dtype is None else mp.optim.low_precision_moments(tx, dtype)
        params = {"w": jnp.zeros(grads.shape[1:])}

        def body(carry, grad):
            updates, state = tx.update({"w": grad}, carry[0], params)
            return (state, updates), None

        (state, updates), _ = jax.lax.scan(body, (tx.init(params), params), grads)
        nu, updates = (state if dtype is None else state.inner)[0].nu["w"], updates["w"]
        return _from_bytes(nu, jnp.float32) if dtype == "int8" else nu.astype(jnp.float32), updates

    return jax.jit(run)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("case", "b2", "bfloat16", "int8"),
    [
        # Measured ranges of v / exact v, rounded up. During decay the errors of bfloat16 accumulate. In int8 only the
        # scale of a row decays, which is exact.
        pytest.param(*("decay", 0.95, (0.8, 1.25), (0.4, 2.0)), marks=pytest.mark.matrix),
        pytest.param(*("decay", 0.99, (0.6, 1.7), (0.4, 2.0)), marks=pytest.mark.matrix),
        ("decay", 0.999, (0.6, 1.7), (0.4, 2.0)),
        pytest.param(*("constant", 0.95, (0.98, 1.02), (0.4, 2.0)), marks=pytest.mark.matrix),
        pytest.param(*("constant", 0.99, (0.98, 1.02), (0.4, 2.0)), marks=pytest.mark.matrix),
        pytest.param(*("constant", 0.999, (0.92, 1.08), (0.4, 2.0)), marks=pytest.mark.matrix),
        pytest.param(*("sparse", 0.95, (0.85, 1.15), (0.25, 3.0)), marks=pytest.mark.matrix),
        pytest.param(*("sparse", 0.99, (0.85, 1.2), (0.25, 3.0)), marks=pytest.mark.matrix),
        pytest.param(*("sparse", 0.999, (0.8, 1.25), (0.25, 3.0)), marks=pytest.mark.matrix),
    ],
)
def test_second_moments_are_close_to_float32(case, b2, bfloat16, int8, dtype):
    grads = gradients_of(case, b2)
    exact, exact_updates = _adam_over(None)(grads, b2)
    nu, updates = _adam_over(dtype)(grads, b2)
    ratio = np.asarray(nu, np.float64) / np.asarray(exact, np.float64)
    low, high = {"bfloat16": bfloat16, "int8": int8}[dtype]
    assert low < ratio.min() <= ratio.max() < high
    assert ratio.mean() == pytest.approx(1, abs=0.02)  # 2,048 elements, each with an error of at most 15 %
    assert float(nu.sum()) == pytest.approx(float(exact.sum()), rel=0.02)
    if case != "decay":  # the first moment is zero at the end of the decay
        assert float(abs(updates).sum()) == pytest.approx(float(abs(exact_updates).sum()), rel=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rounding_does_not_depend_on_the_sharding(dtype):
    tx, rng = mp.optim.low_precision_moments(optax.trace(0.9), dtype), np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 8, 16)).astype(np.float32), "b": rng.normal(size=8).astype(np.float32)}
    # The first momentum is the gradient, so no sum depends on the layout.
    update = jax.jit(lambda grads: tx.update(grads, tx.init(grads), grads)[1])
    mesh, expected = mp.MeshSpec(fsdp=4, tensor=2).build(), update(params)
    for spec in (P("fsdp", None, "tensor"), P(None, ("fsdp", "tensor"))):
        sharding = {"w": NamedSharding(mesh, spec), "b": NamedSharding(mesh, P("fsdp"))}
        jax.tree.map(np.testing.assert_array_equal, update(jax.device_put(params, sharding)), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_restored_run_rounds_like_an_uninterrupted_run(dtype, tmp_path):
    model = mp.from_functions(
        lambda key: {"w": jax.random.normal(key, (8, 16))},
        lambda params, x: mp.constrain(x, "batch", None) @ params["w"],
    )
    tx, batch = (
        mp.optim.low_precision_moments(optax.adam(1e-2), dtype),
        np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32),
    )
    arguments = {"mesh": FSDP.build(), "strategy": mp.fsdp(min_bytes=0)}
    step = mp.train_step(lambda model, batch, key: ((model(batch) ** 2).mean(), {}))
    state = mp.init_state(model, tx, key=0, **arguments)
    for _ in range(2):
        state, _ = step(state, batch)
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, wait=True)
        restored = checkpoints.restore(mp.abstract_state(model, tx, **arguments)).state
    for _ in range(3):
        (state, _), (restored, _) = step(state, batch), step(restored, batch)
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state, state.opt_state)
    assert int(state.opt_state.count) == 5


@pytest.mark.parametrize(
    ("tx", "float32_paths"),
    [
        (optax.contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9), ["z/b", "z/w"]),
        (optax.contrib.schedule_free_adamw(0.1), ["z/b", "z/w"]),
        (optax.contrib.prodigy(0.1), ["params0/b", "params0/w"]),
        (optax.contrib.muon(0.1), ["0/ns_coeffs"]),
        (optax.chain(optax.trace(0.9), optax.ema(0.9)), []),
    ],
)
def test_weights_in_the_optimizer_state_are_not_rounded(tx, float32_paths):
    """In bfloat16, steps of less than 2⁻⁹ of a weight would not change it."""
    params = {"w": np.full((2, 2), 1.001, np.float32), "b": np.full(3, 1.001, np.float32)}
    small = mp.optim.low_precision_moments(tx, "bfloat16")
    state = small.init(params)
    state = small.update(jax.tree.map(np.ones_like, params), state, params)[1]
    paths = [path for path, x in tree_leaves_with_paths(state) if x.ndim and x.dtype == np.float32]
    assert sorted("/".join(path.split("/")[-2:]) for path in paths) == float32_paths
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, small.init(params))


@pytest.fixture(scope="module")
def plain():
    return after(optax.adam(1e-2))


def test_offloaded_state_is_on_the_host_with_equal_values(plain):
    state, loss = after(mp.optim.offload_state(optax.adam(1e-2)))
    assert loss == plain[1]
    jax.tree.map(np.testing.assert_array_equal, state.params, plain[0].params)
    assert {x.sharding.memory_kind for x in moments(state)} == {"pinned_host"}
    on_device = [state.params, [x for x in jax.tree.leaves(state.opt_state) if not x.ndim]]
    assert {x.sharding.memory_kind for x in jax.tree.leaves(on_device)} == {"device"}
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
        lambda tx: mp.optim.low_precision_moments(tx, "bfloat16"),
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.masked(tx, lambda params: jax.tree.map(lambda _: True, params)),
        lambda tx: optax.apply_if_finite(tx, 3),
    ],
)
def test_offloaded_state_inside_another_optimizer(within):
    tx, tokens = within(mp.optim.offload_state(optax.adam(1e-2))), {"mesh": FSDP.build(), "strategy": mp.fsdp()}
    state = mp.abstract_state(CONFIG.build(), tx, **tokens)
    assert {x.sharding.memory_kind for x in moments(state)} == {"pinned_host"}


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{"nonfinite": "ignore"}, {"accumulate": 2, "reduce_gradients": "once"}])
def test_offloaded_bfloat16_moments_with_step_options(options):
    both = mp.optim.offload_state(
        mp.optim.low_precision_moments(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.95)), "bfloat16"
        )
    )
    strategy = mp.zero1()
    state, loss = after(both, strategy=strategy, **options)
    assert {(x.dtype.name, x.sharding.memory_kind) for x in moments(state)} == {("bfloat16", "pinned_host")}
    exact = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.95))
    assert loss == pytest.approx(after(exact, strategy=strategy, **options)[1], rel=1e-3)  # 8 bits of precision


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
def test_int8_moments_are_sharded_and_equal_in_all_layouts(spec, strategy):
    tx = mp.optim.low_precision_moments(optax.adam(1e-2), "int8")
    expected, expected_loss = after(tx, spec=mp.MeshSpec(data=1), strategy=mp.ddp())
    state, loss = after(tx, spec=spec, strategy=strategy)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    different = [
        np.not_equal(*pair).mean()
        for pair in zip(*map(jax.device_get, (moments(state), moments(expected))), strict=True)
        if pair[0].dtype == np.int8
    ]
    assert max(different) < 0.05  # a different order of summation changes the rounding of a few numbers
    tables = {leaf.path: leaf for leaf in state.table.optimizer}
    down = {name: tables[f"opt_state/inner/0/mu/layers/mlp/down/kernel/{name}"] for name in ("levels", "scales")}
    param = next(leaf for leaf in state.table.params if leaf.path == "layers/mlp/down/kernel")
    if strategy != mp.zero1():
        assert down["levels"].spec == param.spec
        assert tuple(down["scales"].spec) == tuple(param.spec)[:2]
    like = mp.abstract_state(CONFIG.build(), optax.adam(1e-2), mesh=spec.build(), strategy=strategy)
    assert state.table.totals.optimizer_bytes < like.table.totals.optimizer_bytes / 3  # a scale for each 16 elements


@pytest.mark.matrix
def test_int8_moments_cause_no_unexpected_collectives():
    spec, strategy = mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel()
    state = mp.abstract_state(
        CONFIG.build(), mp.optim.low_precision_moments(optax.adam(1e-2), "int8"), mesh=spec.build(), strategy=strategy
    )
    report = mp.explain(mp.train_step(next_token_loss), state, BATCH)
    assert not report.matching.unexpected
    assert not report.matching.missing


@pytest.mark.matrix
def test_checkpoint_restores_moments_to_the_host(tmp_path):
    tx = mp.optim.offload_state(mp.optim.low_precision_moments(optax.adam(1e-2), "int8"))
    state, _ = after(tx)
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        like = mp.abstract_state(CONFIG.build(), tx, mesh=FSDP.build(), strategy=mp.fsdp())
        restored = checkpoints.restore(like).state
    jax.tree.map(np.testing.assert_array_equal, moments(restored), moments(state))
    assert {x.sharding.memory_kind for x in moments(restored)} == {"pinned_host"}


@pytest.mark.matrix
def test_load_params_creates_moments_on_the_host():
    tx = mp.optim.offload_state(optax.adam(1e-2))
    state = mp.init_state(CONFIG.build(), tx, mesh=FSDP.build(), strategy=mp.fsdp(), key=0)
    loaded = mp.load_params(state, state.params)
    assert {x.sharding.memory_kind for x in moments(loaded)} == {"pinned_host"}


@pytest.mark.matrix
def test_memory_report_counts_host_memory(plain):
    state = mp.abstract_state(
        CONFIG.build(), mp.optim.offload_state(optax.adam(1e-2)), mesh=FSDP.build(), strategy=mp.fsdp()
    )
    program = compile_here(mp.train_step(next_token_loss).trace(state, BATCH))
    report = memory(program, state.setup, BATCH, None)
    assert report.host_bytes == plain[0].table.totals.optimizer_bytes - 4
    assert report.optimizer_bytes == 4
    assert not [array for array in report.largest if array.kind == "optimizer state" and array.nbytes > 4]


def test_recipe_with_bfloat16_moments_on_the_host():
    tx = mp.AdamW(moments="bfloat16", offload=True).build(steps=100, names={})
    state = mp.abstract_state(CONFIG.build(), tx, mesh=FSDP.abstract(), strategy=mp.fsdp())
    assert {(x.dtype.name, x.sharding.memory_kind) for x in moments(state)} == {("bfloat16", "pinned_host")}


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: mp.optim.low_precision_moments(optax.adam(1e-3), "bfloat"), "unknown-choice"),
        (lambda: mp.optim.low_precision_moments(optax.adam, "bfloat16"), "wrong-type"),
        (lambda: mp.optim.offload_state(3e-4), "wrong-type"),
    ],
)
def test_invalid_arguments_are_refused(call, code):
    with raises(code):
        call()
    with pytest.raises(mp.MeshparError, match="int3"):
        mp.AdamW(moments="int3")


# Compiled for GPUs ---------------------------------------------------------------------------------------------------


@pytest.mark.pod
def test_offloading_reduces_peak_memory_by_the_moments(pod):
    """On 8 H100s, according to XLA, if the peak is in the forward and backward pass and not in the update."""
    cfg = TransformerConfig(
        vocab_size=512, num_layers=8, embed_dim=1024, num_heads=8, num_kv_heads=8, head_dim=128, mlp_dim=4096
    )
    batch = {name: jax.ShapeDtypeStruct((64, 1024), np.int32) for name in BATCH}
    reports = []
    for tx in (optax.adam(1e-3), mp.optim.offload_state(optax.adam(1e-3))):
        state = mp.abstract_state(cfg.build(), tx, mesh=FSDP.abstract(), strategy=mp.fsdp())
        step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"), remat="full")
        reports.append(mp.explain(step, state, batch, "h100:1x8", pod=pod, advise=False).memory)
    plain, offloaded = reports
    moved = plain.optimizer_bytes - offloaded.optimizer_bytes
    assert offloaded.host_bytes == moved
    assert plain.peak_bytes - offloaded.peak_bytes == pytest.approx(moved, rel=0.05)
