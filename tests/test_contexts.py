"""Public functions under different JAX mesh contexts and on meshes with Explicit axes."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.constraints import with_layout

MESH = mp.MeshSpec(fsdp=-1).build()
PLAIN = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
FOREIGN = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
ROWS = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
        self.up = nnx.Linear(16, 32, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(mp.constrain(x, "batch", "act_embed"))))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.normal(), ("embed", "mlp"))
        return nn.Dense(16)(nn.relu(nn.Dense(32, kernel_init=init)(x)))


def _functions(apply=lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"]) -> Model:
    def init(key):
        return {"up": jax.random.normal(key, (16, 32)), "down": jnp.ones((32, 16))}

    return mp.from_functions(init, apply, names={"up": ("embed", "mlp"), "down": ("mlp", "embed")})


MODELS = {
    "nnx": lambda: mp.from_nnx(lambda rngs: Nnx(rngs)),
    "linen": lambda: mp.from_linen(Linen(), ROWS),
    "functions": _functions,
}
CONTEXTS = {
    "none": contextlib.nullcontext,
    "set_mesh(own)": lambda: jax.set_mesh(MESH),
    "set_mesh(foreign)": lambda: jax.set_mesh(FOREIGN),
    "with own": lambda: MESH,
    "use_abstract_mesh(foreign)": lambda: jax.sharding.use_abstract_mesh(FOREIGN.abstract_mesh),
    "make_mesh": lambda: jax.set_mesh(PLAIN),
}
FSDP = mp.fsdp(min_bytes=0)
QUICK = ("nnx-use_abstract_mesh(foreign)", "linen-set_mesh(foreign)")


def _loss(model, batch, key):
    errors = (model(batch) - batch) ** 2
    return mp.MeanLoss(errors.sum(), errors.size), {}


def _trained(model: Model, mesh: jax.sharding.Mesh, folder=None) -> list[float]:
    """Train for two steps, save and restore the state if there is a folder, and return all losses."""
    table = mp.shardings(model, mesh, FSDP)
    state = mp.init_state(model, optax.adam(1e-2), mesh=mesh, strategy=FSDP, key=0)
    assert {d.path: d.spec for d in state.table.params} == {d.path: d.spec for d in table.params}
    step, batch = mp.train_step(_loss), mp.shard_batch(ROWS, mesh, FSDP)
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    if folder is not None:
        with mp.Checkpoints(folder) as checkpoints:
            checkpoints.save(state, wait=True)
            state = checkpoints.restore(state).state
    assert mp.explain(step, state, batch).devices == 8
    return [*losses, float(mp.eval_step(_loss)(state, ROWS)["loss"])]


@functools.cache
def _unwrapped_losses(kind: str) -> list[float]:
    return _trained(MODELS[kind](), MESH)


@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(f"{kind}-{name}", marks=[] if f"{kind}-{name}" in QUICK else pytest.mark.matrix)
        for kind in MODELS
        for name in CONTEXTS
    ],
)
def test_training_is_the_same_in_every_mesh_context(case, tmp_path):
    kind, name = case.split("-")
    expected = _unwrapped_losses(kind)
    with CONTEXTS[name]():
        found = _trained(MODELS[kind](), PLAIN if name == "make_mesh" else MESH, tmp_path / "kept")
        if name.startswith("set_mesh"):
            assert not jax.sharding.get_abstract_mesh().empty, "the user's context is restored"
    # A batch sharded over two axes is reduced in a different order.
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_batches_on_explicit_and_auto_axes_train_equally():
    state = mp.init_state(MODELS["functions"](), optax.sgd(0.0), mesh=MESH, strategy=FSDP, key=0)
    step = mp.train_step(_loss)
    flat = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    sharded = jax.device_put(ROWS, NamedSharding(flat, P("fsdp")))
    state, metrics = step(state, sharded)
    assert metrics["loss"].sharding.mesh == MESH
    state, again = step(state, ROWS)
    assert float(metrics["loss"]) == float(again["loss"])


def test_step_outputs_keep_the_axis_types_of_the_mesh():
    state = mp.init_state(MODELS["functions"](), optax.adam(1e-2), mesh=PLAIN, strategy=FSDP, key=0)
    state, metrics = mp.train_step(_loss)(state, ROWS)
    up, rows = state.params["up"], mp.shard_batch(ROWS, PLAIN, FSDP)
    assert jax.typeof(rows).sharding.spec[0] == ("data", "fsdp")
    assert jax.typeof(up).sharding.spec == state.table["up"].spec == P("fsdp", None)
    with jax.set_mesh(PLAIN):  # user code sees the Explicit types
        assert jax.typeof(up * 2).sharding.spec == jax.typeof(up).sharding.spec
        assert (metrics["loss"] + up.sum()).sharding.mesh == PLAIN
    assert not np.isnan(state.bound()(jnp.asarray(ROWS))).any(), "without a context the axes are Auto"


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("kind", MODELS)
def test_model_and_step_calls_work_in_every_context(kind, name):
    """Call a bound model and a train step, with and without `jax.jit`."""
    mesh = PLAIN if name == "make_mesh" else MESH
    state = mp.init_state(MODELS[kind](), optax.sgd(0.0), mesh=mesh, strategy=FSDP, key=0)
    step = mp.train_step(_loss)

    def apply(x):
        return jnp.tanh(state.bound()(x))

    with mp.use_rules(mesh, FSDP):
        expected = np.asarray(apply(ROWS))
    loss = float(mp.eval_step(_loss)(state, ROWS)["loss"])
    # JAX cannot compile in a context without devices.
    functions = [apply] if name.startswith("use_abstract_mesh") else [apply, jax.jit(apply)]
    with CONTEXTS[name]():
        sharded, found = mp.shard_batch(ROWS, mesh, FSDP), []
        for x in (ROWS, sharded):
            with mp.use_rules(mesh, FSDP):
                found += [f(x) for f in functions]
            if kind == "nnx":  # its mp.constrain needs mp.use_rules outside a train step
                continue
            found.append(np.tanh(np.asarray(state.bound()(x))))
            if name == "make_mesh":  # other user code sees Explicit types
                found += [f(x) for f in functions]
                assert jax.typeof(found[-1]).sharding.spec == P(("data", "fsdp"), None)
        for y in found:
            np.testing.assert_allclose(y, expected, rtol=1e-5)
        if len(functions) > 1:
            assert float(jax.jit(lambda x: step(state, x)[1]["loss"])(sharded)) == pytest.approx(loss)


def _typed() -> Model:
    def apply(params, x):
        assert jax.typeof(x).sharding.spec[0] == jax.typeof(params["up"]).sharding.spec[0] == "fsdp"
        up, down = (jax.sharding.reshard(params[name], P()) for name in ("up", "down"))
        h = mp.constrain(jnp.tanh(x @ up), "batch", "act_embed")
        return jnp.einsum("bm,me->be", h, down, out_sharding=P("fsdp", None))

    return mp.explicit(_functions(apply))


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.matrix), 2])
@pytest.mark.parametrize("types", ["auto", pytest.param("explicit", marks=pytest.mark.matrix)])
def test_explicit_and_auto_models_train_equally(types, accumulate):
    mesh, losses = mp.MeshSpec(fsdp=8, axis_types=types).build(), []
    for model in (_typed(), _functions()):
        state = mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=FSDP, key=0)
        step = mp.train_step(_loss, accumulate=accumulate)
        for _ in range(2):
            state, metrics = step(state, ROWS)
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    # Gradients are summed in a different order.
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.skipif(
    not hasattr(jax.sharding, "no_collectives"), reason="needs jax.sharding.no_collectives, of jax 0.12"
)
def test_explicit_model_rejects_unexpected_collectives():
    def apply(params, x):
        spread = jax.sharding.reshard(x, P("fsdp", "tensor"))
        return jnp.tanh(jax.sharding.reshard(spread, P("fsdp", None)) @ jax.sharding.reshard(params["up"], P()))

    mesh = mp.MeshSpec(fsdp=4, tensor=2).abstract()
    for strategy, says in ((FSDP, "cannot communicate over `tensor`"), (FSDP | mp.tensor_parallel(), None)):
        state = mp.abstract_state(mp.explicit(_functions(apply)), optax.sgd(0.1), mesh=mesh, strategy=strategy)
        step = mp.train_step(lambda model, x, key: (model(x).mean(), {}))
        with pytest.raises(mp.MeshparError, match=says) if says else contextlib.nullcontext():
            step.trace(state, ROWS)


def test_explicit_model_is_rejected_inside_shard_map():
    state = mp.abstract_state(_typed(), optax.sgd(0.1), mesh=MESH, strategy=FSDP)
    with pytest.raises(mp.MeshparError, match="JAX does not support Explicit next to Manual"):
        mp.train_step(_loss, accumulate=2, reduce_gradients="once").trace(state, ROWS)


@pytest.mark.parametrize("operation", [jnp.add, jnp.multiply])
def test_jax_rejects_reduced_weights_next_to_sharded_inputs(operation):
    """If this fails, Explicit types can reduce gradients once (see `engines/by_device.py`)."""
    with jax.set_mesh(PLAIN):
        rows = jax.sharding.reshard(ROWS, P("fsdp", None))
        bias = jax.sharding.reshard(ROWS[0], P(reduced={"fsdp"}))
        jax.eval_shape(jnp.dot, rows, jax.sharding.reshard(ROWS, P(reduced={"fsdp"})))
        with pytest.raises(Exception, match="another input is reduced on"):
            jax.eval_shape(operation, rows, bias)


def test_with_layout_follows_the_axis_types():
    mesh = mp.MeshSpec(fsdp=4, tensor=2, axis_types={"fsdp": "explicit"}).build()

    def sharded(x):
        assert jax.typeof(x).sharding.spec == P(None, None)
        x = with_layout(x, P("fsdp", "tensor"))
        assert jax.typeof(x).sharding.spec == P("fsdp", None), "the Auto axis is absent from the type"
        assert jax.typeof(with_layout(x, P(P.UNCONSTRAINED, None))).sharding.spec == P("fsdp", None)
        return x

    with jax.set_mesh(mesh):
        assert jax.jit(sharded)(ROWS).sharding.spec == P("fsdp", "tensor")
        manual = jax.shard_map(
            lambda x: with_layout(x, P(None, None)), in_specs=P(), out_specs=P(), axis_names=set(mesh.axis_names)
        )
        np.testing.assert_array_equal(jax.jit(manual)(ROWS), ROWS)
