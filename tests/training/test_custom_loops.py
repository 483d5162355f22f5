"""Training loops of the user that take only states and shardings from meshpar."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.sharding.adapters.model import Model
from meshpar.training.state import TrainState
from tests.grid import cases

RNG = np.random.default_rng(0)
IMAGES, NOISE, TEXTS = (RNG.normal(size=(32, dim)).astype(np.float32) for dim in (24, 16, 40))
ONE_DEVICE = {}, mp.ddp()
MESHES = {
    "fsdp": ({"fsdp": 8}, mp.fsdp(min_bytes=0)),
    "fsdp, tensor": ({"fsdp": 4, "tensor": 2}, mp.fsdp(min_bytes=0) | mp.tensor_parallel()),
    "hsdp": ({"data": 2, "fsdp": 4}, mp.hsdp(min_bytes=0)),
}


def mlp(inputs: int, outputs: int) -> Model:
    def init(key):
        up, down = jax.random.split(key)
        return {"up": jax.random.normal(up, (inputs, 64)) / 4, "down": jax.random.normal(down, (64, outputs)) / 8}

    def apply(params, x):
        hidden = mp.constrain(jnp.tanh(x @ params["up"]), "batch", "act_mlp")
        return mp.constrain(hidden @ params["down"], "batch", "act_embed")

    return mp.from_functions(init, apply, names={"up": ("embed", "mlp"), "down": ("mlp", "embed")})


def updated(state: TrainState, loss) -> tuple[TrainState, jax.Array]:
    """Return the state after an update by a loss of the bound model."""
    value, grads = jax.value_and_grad(lambda params: loss(state.replace(params=params).bound()))(state.params)
    updates, opt_state = state.setup.tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state.replace(params=params, opt_state=opt_state, step=state.step + 1), value


def gan(states, batch):
    """Update the discriminator, then the generator, each with an optimizer of its own."""
    generator, discriminator = states
    fakes = generator.bound()(batch["noise"])

    def loss_of_discriminator(model):
        return jnp.mean(jax.nn.softplus(-model(batch["x"])) + jax.nn.softplus(model(fakes)))

    discriminator, first = updated(discriminator, loss_of_discriminator)
    judge = discriminator.bound()
    generator, second = updated(generator, lambda model: jnp.mean(jax.nn.softplus(-judge(model(batch["noise"])))))
    return (generator, discriminator), first + second


def distilled(states, batch):
    """Train a model towards a frozen reference model."""
    student, reference = states
    targets = reference.bound()(batch["x"])
    student, loss = updated(student, lambda model: jnp.mean((model(batch["x"]) - targets) ** 2))
    return (student, reference), loss


def contrastive(states, batch):
    """Contrast each pair with all other pairs of the global batch; both towers share a step."""
    towers = dict(zip(("x", "text"), states, strict=True))

    def loss(params):
        first, second = (towers[name].replace(params=params[name]).bound()(batch[name]) for name in towers)
        logits = first @ second.T
        labels = jnp.arange(len(logits))
        both = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(both(logits, labels) + both(logits.T, labels)) / 2

    value, grads = jax.value_and_grad(loss)({name: state.params for name, state in towers.items()})
    new = []
    for name, state in towers.items():
        updates, opt_state = state.setup.tx.update(grads[name], state.opt_state, state.params)
        new.append(state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state))
    return tuple(new), value


LOOPS = {
    "gan": (gan, ((mlp(16, 24), optax.adam(1e-3, b1=0.5)), (mlp(24, 8), optax.sgd(1e-2)))),
    "frozen reference": (distilled, ((mlp(24, 8), optax.adamw(1e-2)), (mlp(24, 8), optax.identity()))),
    "contrastive": (contrastive, ((mlp(24, 16), optax.adam(1e-2)), (mlp(40, 16), optax.adam(1e-2)))),
}


def trained(loop, models, axes, strategy, num_steps=3):
    mesh = mp.MeshSpec(**axes).build(jax.devices()[: int(np.prod(list(axes.values()), dtype=int))])
    make = functools.partial(mp.init_state, mesh=mesh, strategy=strategy)
    states = tuple(make(model, tx, key=key) for key, (model, tx) in enumerate(models))
    shardings = jax.tree.map(lambda x: x.sharding, states)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def step(states, batch):
        with mp.use_rules(mesh, strategy):
            return loop(states, batch)

    batch = mp.shard_batch({"x": IMAGES, "noise": NOISE, "text": TEXTS}, mesh, strategy)
    losses = []
    for _ in range(num_steps):
        states, loss = step(states, batch)
        losses.append(loss)
    assert jax.tree.map(lambda x: x.sharding, states) == shardings
    return np.array(losses), [state.params for state in states], (step, states, batch)


@pytest.mark.parametrize(
    "setup", [pytest.param(name, marks=[pytest.mark.matrix] * (name != "hsdp")) for name in MESHES]
)
@pytest.mark.parametrize("name", cases("gan", "contrastive", grid=LOOPS))
def test_custom_loop_equals_one_device(name, setup):
    loop, models = LOOPS[name]
    losses, params, (step, states, batch) = trained(loop, models, *MESHES[setup])
    expected_losses, expected_params, _ = trained(loop, models, *ONE_DEVICE)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), params, expected_params)
    assert losses[-1] < losses[0]
    report = mp.explain(step, states, batch)
    over_fsdp = {sent.collective.logical_kind for sent in report.collectives if "fsdp" in sent.collective.axes}
    assert "all-gather" in over_fsdp
    assert over_fsdp & {"reduce-scatter", "all-reduce"}


def test_frozen_reference_is_unchanged():
    loop, models = LOOPS["frozen reference"]
    _, (_, params), (_, (_, reference), _) = trained(loop, models, *MESHES["fsdp"])
    mesh, strategy = reference.setup.mesh, reference.setup.strategy
    initial = mp.init_state(*models[1], mesh=mesh, strategy=strategy, key=1).params
    jax.tree.map(np.testing.assert_array_equal, params, initial)
