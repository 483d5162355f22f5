from __future__ import annotations

import dataclasses
import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.types import tree_leaves_with_paths
from meshpar.training.state import TrainState
from tests.errors import raises
from tests.grid import cases

# ---------------------------------------------------------------------------------------------------------------------
# Models without names
# ---------------------------------------------------------------------------------------------------------------------


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 16, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.hidden = nnx.Linear(16 * 4 * 4, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2)).reshape(x.shape[0], -1)
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


class UnnamedLinen(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.relu(nn.Dense(64, name="hidden")(x))
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return nn.Dense(10, name="out")(x)


def cnn() -> Model:
    return mp.from_nnx(CNN)


def linen() -> Model:
    return mp.from_linen(UnnamedLinen(), jax.ShapeDtypeStruct((8, 16), jnp.float32))


def shard_shapes(state: TrainState) -> dict[str, tuple[int, ...]]:
    """Return the shape of the shards of each parameter, which is the same on all devices."""
    shapes = {}
    for path, x in tree_leaves_with_paths(state.params):
        (shapes[path],) = {shard.data.shape for shard in x.addressable_shards}
        assert len(x.addressable_shards) == 8
    return shapes


@pytest.fixture(scope="module")
def mesh():
    return mp.MeshSpec(fsdp=4, tensor=2).build()


FULL_SHAPES = {
    "cnn": {
        "conv/bias": (16,), "conv/kernel": (3, 3, 3, 16), "hidden/bias": (64,), "hidden/kernel": (256, 64),
        "norm/bias": (16,), "norm/scale": (16,), "out/bias": (10,), "out/kernel": (64, 10),
    },
    "linen": {
        "hidden/bias": (64,), "hidden/kernel": (16, 64), "norm/bias": (64,), "norm/scale": (64,), "out/bias": (10,),
        "out/kernel": (64, 10),
    },
}  # fmt: skip
CNN_RULES = mp.Rules(
    paths={
        r".*": mp.replicated, r"conv/kernel": (None, None, None, "tensor"), r"hidden/kernel": ("fsdp", "tensor"),
        r"hidden/bias": ("tensor",), r"out/kernel": (("fsdp", "tensor"),),
    }
)  # fmt: skip
LINEN_RULES = mp.fsdp() | mp.tensor_parallel() | mp.Rules(
    classes=None,
    paths={
        r"hidden/kernel": mp.names("embed", "mlp"), r"out/kernel": mp.names("mlp", "classes"),
        r"(norm|hidden)/(bias|scale)": mp.names("mlp"),
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "rules", "sharded"),
    [
        (cnn, CNN_RULES, {
            "conv/kernel": (3, 3, 3, 8), "hidden/kernel": (64, 32), "hidden/bias": (32,), "out/kernel": (8, 10),
        }),
        (linen, LINEN_RULES, {
            "hidden/kernel": (4, 32), "out/kernel": (32, 10), "hidden/bias": (32,), "norm/bias": (32,),
            "norm/scale": (32,),
        }),
    ],
)  # fmt: skip
def test_path_rules_shard_a_model_without_names(mesh, model, rules, sharded):
    state = mp.init_state(model(), optax.sgd(0.1, momentum=0.9), mesh=mesh, strategy=rules, key=0)
    shapes = FULL_SHAPES[model.__name__]
    assert {path: x.shape for path, x in tree_leaves_with_paths(state.params)} == shapes
    assert shard_shapes(state) == {**shapes, **sharded}
    trace = state.opt_state[0].trace
    for (_, p), (_, t) in zip(tree_leaves_with_paths(state.params), tree_leaves_with_paths(trace), strict=True):
        assert p.sharding.is_equivalent_to(t.sharding, p.ndim)


# ---------------------------------------------------------------------------------------------------------------------
# Models with names
# ---------------------------------------------------------------------------------------------------------------------


class NamedNNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(
            8, 16, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), use_bias=False, rngs=rngs
        )
        self.down = nnx.Linear(16, 8, kernel_init=nnx.with_partitioning(init, ("mlp", None)), rngs=rngs)


class NamedLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        up = nn.Dense(16, use_bias=False, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")), name="up")
        down = nn.Dense(8, kernel_init=nn.with_partitioning(init, ("mlp", None)), name="down")
        return down(up(x))


class ScannedLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        layers = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layers(nn.Dense(8, use_bias=False, kernel_init=init, name="up"), x, None)[0]


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
def scanned_nnx(rngs):
    return NamedNNX(rngs)


NAMED = {
    "up/kernel": ((8, 16), ("embed", "mlp")), "down/kernel": ((16, 8), ("mlp", None)), "down/bias": ((8,), None),
}  # fmt: skip
SCANNED = {path: ((3, *shape), names and ("layers", *names)) for path, (shape, names) in NAMED.items()}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: mp.from_nnx(lambda rngs: NamedNNX(rngs)), NAMED),
        (lambda: mp.from_linen(NamedLinen(), jnp.ones((2, 8))), NAMED),
        (lambda: mp.from_nnx(scanned_nnx), SCANNED),
        (
            lambda: mp.from_linen(ScannedLinen(), jnp.ones((2, 8))),
            {"up/kernel": ((3, 8, 8), ("layers", "embed", "mlp"))},
        ),
        (
            lambda: mp.from_functions(
                lambda key: {"up": [jnp.zeros((8, 16)), jnp.zeros(16)]},
                lambda params, x: x,
                names={"up/0": ["embed", "mlp"]},
            ),
            {"up/0": ((8, 16), ("embed", "mlp")), "up/1": ((16,), None)},
        ),
    ],
    ids=["nnx", "linen", "scanned nnx", "scanned linen", "functions"],
)
def test_names_come_from_the_model(model, expected, mesh):
    assert {leaf.path: (leaf.shape, leaf.names) for leaf in model().leaves()} == expected
    if expected is NAMED:
        strategy = mp.fsdp() | mp.tensor_parallel()
        state = mp.init_state(model(), optax.adam(0.1), mesh=mesh, strategy=strategy, key=0)
        assert shard_shapes(state) == {"up/kernel": (2, 8), "down/kernel": (8, 8), "down/bias": (8,)}


# ---------------------------------------------------------------------------------------------------------------------
# Initialization, binding and collection of state
# ---------------------------------------------------------------------------------------------------------------------


def test_params_and_extra_are_nested_dicts():
    params, extra = cnn().abstract()
    assert {path for path, _ in tree_leaves_with_paths(params)} == set(FULL_SHAPES["cnn"])
    assert {path for path, _ in tree_leaves_with_paths(extra)} >= {"norm/mean", "norm/var", "dropout/rngs/count"}
    _, extra = linen().abstract()
    assert {path for path, _ in tree_leaves_with_paths(extra)} == {"batch_stats/norm/mean", "batch_stats/norm/var"}
    for x in jax.tree.leaves((params, extra)):
        assert not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


class Mini(nnx.Module):
    def __init__(self, width: int = 4, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, width, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.parametrize("build", [Mini, functools.partial(Mini, 8), lambda streams: Mini(rngs=streams)])
def test_from_nnx_passes_rngs_by_name_or_position(build, mesh):
    width = 8 if isinstance(build, functools.partial) else 4
    assert mp.from_nnx(build).abstract().params["linear"]["kernel"].shape == (4, width)


def test_bind_returns_the_nnx_module():
    key = jax.random.key(3)
    model = cnn()
    bound = model.bind(*model.init(key))
    direct = CNN(nnx.Rngs(key))
    x = jnp.ones((2, 8, 8, 3))
    np.testing.assert_array_equal(bound.conv(x), direct.conv(x))
    assert isinstance(bound, CNN)


def test_collect_returns_changed_state():
    for model, x in ((cnn(), jnp.ones((2, 8, 8, 3))), (linen(), jnp.ones((2, 16)))):

        def run(model=model, x=x):
            before = model.init(jax.random.key(0))
            bound = model.bind(*before)
            bound(x)
            return before[1], model.collect(bound)

        extra, after = jax.jit(run)()
        assert jax.tree.structure(after) == jax.tree.structure(extra)
        moved = {
            path
            for (path, a), (_, b) in zip(tree_leaves_with_paths(extra), tree_leaves_with_paths(after), strict=True)
            if not np.array_equal(a, b)
        }
        assert {path.rpartition("norm/")[2] for path in moved} >= {"mean", "var"}


def test_bind_of_plain_functions():
    model = mp.from_functions(lambda key: jax.random.normal(key, (3,)), lambda w, x, scale=1: scale * (x @ w))
    params, extra = model.init(jax.random.key(0))
    assert extra == {}
    np.testing.assert_allclose(model.bind(params, extra)(jnp.ones(3), scale=2), 2 * params.sum(), rtol=1e-6)
    assert model.leaves()[0].path == ""


class Sows(nn.Module):
    """Sows an auxiliary loss as a sum, and a statistic in a tuple, which is the default."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        self.sow("losses", "aux", (x**2).mean(), init_fn=lambda: jnp.zeros(()), reduce_fn=lambda a, b: a + b)
        self.sow("seen", "mean", x.mean())
        return x


def test_sown_values_are_those_of_one_call(mesh):
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

    def loss_fn(model, batch, key):
        y = model(batch)
        return (y**2).mean() + model.extra["losses"]["aux"], {"aux": model.extra["losses"]["aux"]}

    model = mp.from_linen(Sows(), x)
    state = mp.init_state(model, optax.sgd(0.0), mesh=mesh, strategy=mp.ddp(), key=0)
    params, stats = (jax.tree.map(np.asarray, tree) for tree in (state.params, state.extra["batch_stats"]))
    _, flax = Sows().apply({"params": params, "batch_stats": stats}, x, mutable=["losses", "seen", "batch_stats"])
    step = mp.train_step(loss_fn)
    for _ in range(3):
        state, metrics = step(state, x)
        np.testing.assert_allclose(metrics["aux"], flax["losses"]["aux"], rtol=1e-5)
        assert [x.shape for x in state.extra["seen"]["mean"]] == [()]
    moved = state.extra["batch_stats"]["BatchNorm_0"]["var"]
    assert not np.allclose(moved, flax["batch_stats"]["BatchNorm_0"]["var"]), "statistics accumulate over steps"


class FromData(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x - self.param("mean", lambda key: x.mean(0))


def test_linen_initialization_uses_example_arrays(mesh):
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    for example, mean in ((x, x.mean(0)), (jax.device_put(x), x.mean(0)), (shape, np.zeros(4))):
        state = mp.init_state(mp.from_linen(FromData(), example), optax.sgd(0.1), mesh=mesh, strategy=mp.ddp(), key=0)
        np.testing.assert_array_equal(state.params["mean"], mean)


# ---------------------------------------------------------------------------------------------------------------------
# State in unusual forms
# ---------------------------------------------------------------------------------------------------------------------


class Odd(nnx.Module):
    """Has state outside of variables, and variables of Python numbers, None and pytrees."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.bare = nnx.data([jnp.arange(4.0), np.ones(4)])
        self.table = np.arange(4.0)
        self.calls = nnx.Variable(0)
        self.nothing, self.no_weight = nnx.Variable(None), nnx.Param(None)
        self.tree = nnx.Variable({"mean": jnp.zeros(4)})
        self.normed = nnx.WeightNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        self.tree.set_value({"mean": x.mean(0)})
        return self.normed(self.linear(x) + self.bare[1] + self.table)


X_4 = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def _square(model, batch, key):
    squares = model(batch) ** 2
    return mp.MeanLoss(squares.sum(), squares.size), {}


def test_nnx_state_in_unusual_forms(mesh):
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    state = mp.init_state(mp.from_nnx(Odd), optax.sgd(0.0), mesh=mesh, strategy=mp.ddp(), key=jax.random.key(0))
    step = mp.train_step(_square)
    first, metrics = step(state, x)
    second, _ = step(first, x)
    assert int(second.extra["calls"]) == 2
    assert second.extra["calls"].dtype == jnp.int32
    np.testing.assert_allclose(second.extra["tree"]["mean"], x.mean(0), rtol=1e-5)
    assert "no_weight" not in {path for path, _ in tree_leaves_with_paths(second.params)}
    model = second.bound()
    assert isinstance(model.calls, nnx.Variable)
    np.testing.assert_allclose(metrics["loss"], (model(x) ** 2).mean(), rtol=1e-5)


class ShortNames(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.normal()
        self.conv = nnx.Conv(8, 8, (4,), kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs)
        self.out = nnx.Linear(8, 8, kernel_init=nnx.with_partitioning(init, P()), rngs=rngs)


def test_names_for_the_first_dims_are_padded_with_none(mesh):
    model = mp.from_nnx(ShortNames)
    names = {leaf.path: leaf.names for leaf in model.leaves()}
    assert names["conv/kernel"] == ("embed", "mlp", None)
    assert names["out/kernel"] is None
    rules = mp.fsdp() | mp.Rules(paths={r"conv/kernel": mp.names(None, "embed", "mlp")})
    assert mp.shardings(model, mesh, rules)["conv/kernel"].spec == P(None, "fsdp", None)


def test_functions_with_state(mesh):
    def init(key):
        return {"w": jax.random.normal(key, (4, 4))}, {"calls": jnp.zeros((), jnp.int32)}

    def apply(params, kept, x):
        return x @ params["w"], {"calls": kept["calls"] + 1}

    model = mp.from_functions(init, apply, keeps_state=True)
    state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=mp.ddp(), key=0)
    step = mp.train_step(_square, accumulate=2)
    for _ in range(3):
        state, _ = step(state, np.ones((16, 4), np.float32))
    assert int(state.extra["calls"]) == 6
    with raises("wrong-type", "`init`"):
        mp.from_functions(lambda key: {"w": key}, apply, keeps_state=True).abstract()
    for calls in (np.zeros(3, np.int32), 0.5):
        invalid = dataclasses.replace(model, collect=lambda bound, calls=calls: {"calls": jnp.asarray(calls)})
        state = mp.abstract_state(invalid, optax.sgd(0.1), mesh=mesh, strategy=mp.ddp())
        with pytest.raises(mp.MeshparError, match="`calls` of the model"):
            mp.train_step(_square).trace(state, np.ones((16, 4), np.float32))


def test_default_prng_impl_of_the_context_is_used(mesh):
    class Drops(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.linear(x))

    with jax.default_prng_impl("rbg"):
        state = mp.init_state(mp.from_nnx(Drops), optax.sgd(0.1), mesh=mesh, strategy=mp.ddp(), key=0)
        state, metrics = mp.train_step(_square)(state, np.ones((8, 4), np.float32))
        assert state.key.shape == (4,)
        assert np.isfinite(metrics["loss"])


def keyed_functions(impl):
    def init(key):
        return {"w": jax.random.normal(key, (4, 4))}, {"key": jax.random.key(3, impl=impl)}

    def apply(params, state, x):
        key, mask_key = jax.random.split(state["key"])
        x = mp.constrain(x, "batch", None)
        return (x * jax.random.bernoulli(mask_key, 0.5, x.shape)) @ params["w"], {"key": key}

    return mp.from_functions(init, apply, keeps_state=True)


class KeyedLinen(nn.Module):
    impl: str

    @nn.compact
    def __call__(self, x):
        key = self.variable("random", "key", lambda: jax.random.key(3, impl=self.impl))
        mask_key, next_key = jax.random.split(key.value)
        if not self.is_initializing():
            key.value = next_key
        return nn.Dense(4)(x * jax.random.bernoulli(mask_key, 0.5, x.shape))


class KeyedNnx(nnx.Module):
    def __init__(self, rngs, impl):
        self.linear, self.key = nnx.Linear(4, 4, rngs=rngs), nnx.Variable(jax.random.key(3, impl=impl))

    def __call__(self, x):
        mask_key, self.key[...] = jax.random.split(self.key[...])
        return self.linear(x * jax.random.bernoulli(mask_key, 0.5, x.shape))


@pytest.mark.parametrize("impl", cases("rbg", grid=["threefry2x32", "rbg"]))
@pytest.mark.parametrize("kind", [pytest.param("functions", marks=pytest.mark.matrix), "linen", "nnx"])
def test_typed_keys_in_the_state_are_trained_and_restored(kind, impl, mesh, tmp_path):
    model = {
        "functions": lambda: keyed_functions(impl),
        "linen": lambda: mp.from_linen(KeyedLinen(impl), np.ones((8, 4), np.float32)),
        "nnx": lambda: mp.from_nnx(lambda rngs: KeyedNnx(rngs, impl)),
    }[kind]()
    tx, x = optax.sgd(0.1), np.ones((16, 4), np.float32)
    arguments = {"mesh": mesh, "strategy": mp.ddp()}
    state = mp.init_state(model, tx, key=0, **arguments)
    step = mp.train_step(_square, accumulate=2, reduce_gradients="once")
    (key_data,) = [np.asarray(leaf) for leaf in jax.tree.leaves(state.extra) if leaf.dtype == np.uint32]
    np.testing.assert_array_equal(key_data, jax.random.key_data(jax.random.key(3, impl=impl)))
    state, first = step(state, x)
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, wait=True)
        restored = checkpoints.restore(mp.abstract_state(model, tx, **arguments)).state
    (state, second), (restored, second_restored) = step(state, x), step(restored, x)
    assert first["loss"] != second["loss"] == second_restored["loss"]
    jax.tree.map(np.testing.assert_array_equal, restored.extra, state.extra)
    assert list(model.random_keys().values()) == [impl]


def test_typed_key_as_parameter_is_refused():
    model = mp.from_functions(lambda key: {"w": jnp.ones(4), "noise": key}, lambda params, x: x * params["w"])
    with raises("wrong-dtype", "parameter `noise`"):
        model.abstract()


def test_batch_norm_over_a_pmap_axis_is_refused(mesh):
    class PerDevice(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False, axis_name="devices")(nn.Dense(4)(x))

    x = np.ones((8, 4), np.float32)
    state = mp.init_state(mp.from_linen(PerDevice(), x), optax.sgd(0.1), mesh=mesh, strategy=mp.ddp(), key=0)
    with pytest.raises(mp.MeshparError, match="`devices`.*axis_name"):
        mp.train_step(_square)(state, x)


def test_bound_linen_accepts_methods_and_arguments():
    class Two(nn.Module):
        def setup(self):
            self.dense = nn.Dense(4)

        def __call__(self, x, *, double: bool = False):
            return self.dense(x) * (2 if double else 1)

        def half(self, x):
            return self.dense(x) / 2

    model = mp.from_linen(Two(), jnp.ones((1, 3)), double=True)
    bound = model.bind(*model.init(jax.random.key(0)))
    x = jnp.ones((2, 3))
    np.testing.assert_allclose(bound(x, double=True), bound(x) * 2)
    np.testing.assert_allclose(bound(x, method="half") * 2, bound(x))


def test_linen_parameter_of_wrong_shape_is_refused(mesh):
    """Flax's own check accepts shards of the full shape only."""
    state = mp.init_state(mp.from_linen(nn.Dense(4), X_4), optax.sgd(0.1), mesh=mesh, strategy=mp.ddp(), key=0)
    with pytest.raises(flax.errors.ScopeParamShapeError):
        mp.train_step(_square)(state, X_4[:, :2])


class Forwards(nn.Module):
    def __getattr__(self, name):
        return super().__getattr__(name)


class Delegates(nn.Module):
    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name) if "inner" in self.__dict__ else super().__getattr__(name)


@pytest.mark.parametrize("base", [pytest.param(Forwards, marks=pytest.mark.matrix), Delegates])
def test_linen_module_may_define_getattr(base, mesh):
    """Linen intercepts `__getattr__`, too, so an interceptor that reads an attribute would call itself."""

    def model_of(parent):
        class Wraps(parent):
            inner: nn.Module

            @nn.compact
            def __call__(self, x):
                self.sow("seen", "mean", x.mean())
                return self.inner(x)

        return mp.from_linen(Wraps(Wraps(nn.Dense(4))), X_4)

    def trained(model):
        strategy = mp.fsdp(min_bytes=0) | mp.Rules(remat={r"inner": "full"})
        state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)
        state, metrics = mp.train_step(_square)(state, X_4)
        return float(metrics["loss"]), jax.device_get(state.params)

    for adapted in (lambda model: model, mp.lora(rank=2, modules=r".*")):
        actual, expected = trained(adapted(model_of(base))), trained(adapted(model_of(nn.Module)))
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_nnx_module_that_delegates_attributes_is_updated_once(mesh):
    class Counts(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.updates = nnx.Linear(4, 4, rngs=rngs), nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            return self.linear(x)

        def after_update(self):
            self.updates.set_value(self.updates.get_value() + 1)

    class Wraps(nnx.Module):
        def __init__(self, rngs):
            self.inner = Counts(rngs)

        def __call__(self, x):
            return self.inner(x)

        def __getattr__(self, name):
            return getattr(self.__dict__["inner"], name)

    state = mp.init_state(mp.from_nnx(Wraps), optax.sgd(0.1), mesh=mesh, strategy=mp.ddp(), key=0)
    state, _ = mp.train_step(_square)(state, X_4)
    assert int(state.extra["inner"]["updates"]) == 1


class NamedHeads(nn.Module):
    """`DenseGeneral` unboxes a kernel that does not have the named dims yet."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.normal(), ("embed", "heads", "head_dim"))
        heads = nn.DenseGeneral((2, 2), kernel_init=init, name="heads")(x)
        return nn.DenseGeneral(4, axis=(-2, -1), name="out")(heads)


def test_linen_initializers_do_not_use_the_mesh(mesh):
    strategy = mp.fsdp() | mp.tensor_parallel()
    state = mp.init_state(mp.from_linen(NamedHeads(), X_4), optax.sgd(0.0), mesh=mesh, strategy=strategy, key=0)
    assert state.table["heads/kernel"].spec == P("fsdp", "tensor", None)
    expected = (NamedHeads().apply({"params": jax.device_get(state.params)}, X_4) ** 2).mean()
    state, metrics = mp.train_step(_square)(state, X_4)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose((state.bound()(X_4) ** 2).mean(), expected, rtol=1e-5)
