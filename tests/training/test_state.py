"""Tests of the training state: shardings, values, memory, and loading of weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import meshpar as mp
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.types import tree_leaves_with_paths
from meshpar.training.state import OPTIMIZATION_LEVEL, Setup, make_setup
from tests.errors import raises

EMBED, MLP, LAYERS = 64, 256, 4
NUM_PARAMS = LAYERS * (2 * EMBED * MLP + EMBED)


def make_model() -> Model:
    def init(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (LAYERS, EMBED, MLP)),
            "down": jax.random.normal(down, (LAYERS, MLP, EMBED)),
            "scale": jnp.ones((LAYERS, EMBED)),
        }

    names = {
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "scale": ("layers", "embed"),
    }
    return mp.from_functions(init, lambda params, x: x, names=names)


def loss(model, batch, key):
    return (model(batch["x"]) ** 2).mean() + model.args[0]["up"].sum(), {}


def test_init_accepts_seeds_and_keys():
    mesh = mp.MeshSpec(fsdp=8).build()
    setup = make_setup(make_model(), optax.adam(1e-3), mesh=mesh, strategy=mp.fsdp())
    for seed in (np.int64(0), jax.random.key(0), jax.random.key_data(jax.random.key(0))):
        np.testing.assert_array_equal(setup.init(seed).params["up"], setup.init(0).params["up"])


def test_arrays_are_sharded_like_the_table():
    mesh = mp.MeshSpec(fsdp=4, tensor=2).build()
    strategy = mp.fsdp() | mp.tensor_parallel()
    state = mp.init_state(make_model(), optax.adam(1e-3), mesh=mesh, strategy=strategy, key=0)
    for decision in state.table.params:
        array = state.params[decision.path]
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, decision.spec), array.ndim)
        shard = array.addressable_shards[0].data
        assert shard.nbytes == decision.bytes_per_device
        assert decision.shards > 1
    for moments in (state.opt_state[0].mu, state.opt_state[0].nu):
        for path, array in moments.items():
            assert array.sharding.is_equivalent_to(state.params[path].sharding, array.ndim)


def test_values_do_not_depend_on_the_mesh():
    """Random numbers depend on the position in the array, so values are equal on all meshes."""
    one = mp.init_state(
        make_model(), optax.sgd(1.0), mesh=mp.MeshSpec().build(jax.devices()[:1]), strategy=mp.ddp(), key=3
    )
    for spec, strategy in [
        (mp.MeshSpec(fsdp=8), mp.fsdp()),
        (mp.MeshSpec(fsdp=2, tensor=4), mp.fsdp() | mp.tensor_parallel()),
    ]:
        split = mp.init_state(make_model(), optax.sgd(1.0), mesh=spec.build(), strategy=strategy, key=3)
        for path, array in tree_leaves_with_paths(split.params):
            np.testing.assert_array_equal(array, one.params[path])


def test_init_never_creates_an_unsharded_array():
    """With 8 shards, the compiled program needs less temporary memory than a single unsharded leaf."""
    mesh = mp.MeshSpec(fsdp=8).build()
    setup = make_setup(make_model(), optax.adam(1e-3), mesh=mesh, strategy=mp.fsdp())
    memory = setup.lower_init().compile().memory_analysis()
    assert memory.output_size_in_bytes == pytest.approx(setup.table.totals.state_bytes, rel=1e-2)
    assert memory.temp_size_in_bytes < LAYERS * EMBED * MLP * 4


@pytest.mark.parametrize(
    ("spec", "strategy", "bytes_per_param"),
    [
        (mp.MeshSpec(data=8), mp.ddp(), 12),
        (mp.MeshSpec(fsdp=8), mp.zero1(), 4 + 8 / 8),
        (mp.MeshSpec(fsdp=8), mp.zero2(), 4 + 8 / 8),
        (mp.MeshSpec(fsdp=8), mp.zero3(), 12 / 8),
        (mp.MeshSpec(data=2, fsdp=4), mp.hsdp(), 12 / 4),
    ],
    ids=lambda x: str(x),
)
def test_step_argument_bytes_equal_the_formula(spec, strategy, bytes_per_param):
    """Each parameter needs 4 bytes in float32 and 8 bytes for Adam's moments, sharded as the ZeRO stage requires.

    Further arguments: step, skipped and Adam's count (4 bytes each), the key (8), and the local batch.
    """
    rows, width = 16, 3
    state = mp.abstract_state(make_model(), optax.adam(1e-3), mesh=spec.build(), strategy=strategy)
    step = mp.train_step(loss)
    batch = {"x": jax.ShapeDtypeStruct((rows, width), np.float32)}
    argument_bytes = step.lower(state, batch).compile().memory_analysis().argument_size_in_bytes
    assert argument_bytes == NUM_PARAMS * bytes_per_param + 3 * 4 + 8 + rows * width * 4 // 8
    assert state.table.totals.state_bytes == NUM_PARAMS * bytes_per_param + 4


def test_precision_sets_the_parameter_dtype():
    mesh = mp.MeshSpec(fsdp=8).build()
    precision = mp.Precision(params="bfloat16")
    state = mp.init_state(make_model(), optax.adam(1e-3), mesh=mesh, strategy=mp.fsdp(), key=0, precision=precision)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert state.table.totals.params_bytes == NUM_PARAMS * 2 // 8
    with raises("wrong-dtype", "parameter `"):
        mp.train_step(loss, precision=mp.Precision(params="float32")).lower(state, {"x": jnp.ones((8, 3))})


def test_load_params_casts_shards_and_checks_weights():
    mesh = mp.MeshSpec(fsdp=8).build()
    tx = optax.chain(optax.trace(0.9), optax.ema(0.5), optax.scale(-0.1))
    state = mp.init_state(make_model(), tx, mesh=mesh, strategy=mp.fsdp(), key=0)
    given = {path: np.full(x.shape, 2.0, np.float16) for path, x in state.params.items()}
    loaded = mp.load_params(state, {**given, "scale": state.params["scale"]})
    assert loaded.params["up"].sharding == state.params["up"].sharding
    np.testing.assert_array_equal(loaded.params["up"], np.full_like(state.params["up"], 2.0))
    np.testing.assert_array_equal(loaded.params["scale"], state.params["scale"])
    for wrong, code, where in (
        ({**given, "upp": given["up"]}, "unknown-name", "`upp`"),
        ({"up": given["up"], "down": given["down"]}, "unknown-name", "`scale`"),
        ({}, "missing-argument", "load_params"),
        ({**given, "up": None}, "wrong-type", "`up`"),
        ({**given, "scale": given["scale"].T}, "wrong-shape", "`scale`"),
        ({**given, "scale": given["scale"].astype(int)}, "wrong-shape", "`scale`"),
        ({**given, "up": np.full_like(given["up"], np.nan)}, "not-finite", "`up`"),
        ({**given, "up": np.full(given["up"].shape, 1e300)}, "out-of-range", "`up`"),
    ):
        with raises(code, where):
            mp.load_params(state, wrong)
    with raises("wrong-type", "load_params"):
        mp.load_params(5, given)


def test_step_refuses_parameters_of_another_dtype():
    state = mp.init_state(make_model(), optax.sgd(0.1), mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.fsdp(), key=0)
    half = {**state.params, "up": state.params["up"].astype(jnp.bfloat16)}
    wrong = state.replace(params=half)
    for run in (mp.train_step(loss), mp.eval_step(loss)):
        with raises("wrong-dtype", "`params/up`"):
            run(wrong, {"x": np.ones((8, 3), np.float32)})


def test_abstract_mesh_has_a_state_without_arrays():
    mesh = mp.MeshSpec(fsdp=64, tensor=8).abstract()
    strategy = mp.fsdp() | mp.tensor_parallel()
    state = mp.abstract_state(make_model(), optax.adam(1e-3), mesh=mesh, strategy=strategy)
    assert state.params["up"].sharding.shard_shape(state.params["up"].shape) == (LAYERS, EMBED // 64, MLP // 8)
    with raises("abstract-mesh", "load_params"):
        mp.load_params(state, {})
    with raises("abstract-mesh", "init_state"):
        mp.init_state(make_model(), optax.adam(1e-3), mesh=mesh, strategy=strategy, key=0)


def test_state_is_a_pytree_with_a_static_setup():
    state = mp.abstract_state(make_model(), optax.adam(1e-3), mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.fsdp())
    assert len(jax.tree.leaves(state)) == 3 + (3 + 3 + 1) + 3
    assert jax.tree.map(lambda x: x, state).setup is state.setup
    assert state.num_params == NUM_PARAMS


def test_load_params_distinguishes_equal_path_strings():
    params = {"a/b": np.full((8, 8), 2, np.float32), "a": {"b": np.full((8, 8), 3, np.float32)}}
    model = mp.from_functions(
        lambda key: jax.tree.map(jnp.ones_like, params), lambda params, x: x @ params["a/b"] @ params["a"]["b"]
    )
    state = mp.init_state(model, optax.sgd(0.1), mesh=mp.MeshSpec(data=8).build(), strategy=mp.ddp(), key=0)
    jax.tree.map(np.testing.assert_array_equal, mp.load_params(state, params).params, params)
    with raises("unknown-name", "`['a']['b']`"):
        mp.load_params(state, {"a/b": params["a/b"]})


def test_equal_paths_with_different_shardings_are_an_error():
    params = {"a/b": jnp.ones((8, 8)), "a": {"b": jnp.ones((16, 3))}}
    model = mp.from_functions(lambda key: params, lambda params, x: x)
    with raises("conflict", "path `a/b`"):
        mp.shardings(model, mp.MeshSpec(fsdp=8).abstract(), mp.fsdp(min_bytes=0))


def test_load_params_leaves_the_weights_to_the_caller():
    mesh, batch = mp.MeshSpec(fsdp=8).build(), {"x": np.ones((8, 3), np.float32)}
    teacher, student = (
        mp.init_state(make_model(), optax.sgd(0.1), mesh=mesh, strategy=mp.fsdp(), key=key) for key in (0, 1)
    )
    single = jax.tree.map(jnp.asarray, jax.device_get(teacher.params))  # on one device
    for weights in (teacher.params, single):
        before = jax.device_get(weights)
        mp.train_step(loss)(mp.load_params(student, weights), batch)  # donates the loaded state
        jax.tree.map(np.testing.assert_array_equal, weights, before)
        student = mp.init_state(make_model(), optax.sgd(0.1), mesh=mesh, strategy=mp.fsdp(), key=1)


@pytest.mark.parametrize("again", [False, True])
def test_load_params_copies_weights_used_twice(again):
    def init(key):
        return {name: {"w": jax.random.normal(key, (8, 8))} for name in ("policy", "ref")}

    def apply(params, x):
        x = mp.constrain(x, "batch", None)
        return x @ params["policy"]["w"] - x @ params["ref"]["w"] + 1

    state = mp.init_state(
        mp.from_functions(init, apply), optax.adam(0.1), mesh=mp.MeshSpec(fsdp=8).build(),
        strategy=mp.fsdp(min_bytes=0), key=0, trainable="policy/.*",
    )  # fmt: skip
    step = mp.train_step(lambda model, batch, key: ((model(batch) ** 2).mean(), {}))
    batch = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    state, _ = step(state, batch)
    loaded = mp.load_params(state, {**state.params, "ref": state.params["policy"]})
    if again:  # the copies do not share buffers
        loaded = mp.load_params(loaded, {**loaded.params, "ref": loaded.params["policy"]})
    before = jax.device_get(loaded.params)
    loaded, metrics = step(loaded, batch)
    assert float(metrics["loss"]) == 1  # policy and reference cancel
    np.testing.assert_array_equal(loaded.params["ref"]["w"], before["policy"]["w"])
    assert (np.asarray(loaded.params["policy"]["w"]) != before["policy"]["w"]).any()


@pytest.mark.parametrize(("flags", "options"), [("", {OPTIMIZATION_LEVEL: 1}), (f"--{OPTIMIZATION_LEVEL}=0", None)])
def test_init_is_compiled_at_level_1_unless_the_flags_have_a_level(monkeypatch, flags, options):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(Setup, "jit", lambda self, f, out, **options: options)
    setup = make_setup(make_model(), optax.adam(1e-3), mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.fsdp())
    assert setup._jitted_init == {"compiler_options": options}


def test_the_program_of_init_computes_the_same_values_with_all_optimizations(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    mesh, strategy = mp.MeshSpec(fsdp=4, tensor=2).build(), mp.fsdp() | mp.tensor_parallel()
    setup = make_setup(make_model(), optax.adam(1e-3), mesh=mesh, strategy=strategy)
    words = np.array([0, 7], np.uint32)
    optimized = setup.lower_init().compile({"xla_backend_optimization_level": 3})
    jax.tree.map(np.testing.assert_array_equal, optimized(words), setup.init(7))
