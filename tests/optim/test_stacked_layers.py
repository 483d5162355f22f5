"""Optimizers with a statistic per array, on stacks of layers and experts, compared with optax on separate arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.optim.stacked_layers import check_stacks, per_layer
from meshpar.runs.optimizers import Optax
from tests.errors import raises
from tests.grid import cases

NAMES = {
    "up": ("layers", "embed", "mlp"), "scale": ("layers", "embed"), "expert": ("layers", "expert", "embed", "mlp"),
    "odd": ("embed", "dense_layers", "mlp"), "head": ("embed", "vocab"), "router": ("layers", "embed", "expert"),
}  # fmt: skip
SHAPES = {
    "up": (4, 16, 24), "scale": (4, 16), "expert": (2, 3, 8, 6), "odd": (130, 2, 140), "head": (16, 32),
    "router": (2, 8, 3),
}  # fmt: skip
DRAW = np.random.default_rng(0)
# With different scales, a statistic of the stack differs most from that of the first layer.
PARAMS = {name: DRAW.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
PARAMS["up"] *= 10.0 ** np.arange(4, dtype=np.float32)[:, None, None]
GRADS = jax.tree.map(lambda x: np.sin(7 * x), PARAMS)
OPTIMIZERS = {
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "lars": lambda: optax.lars(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "sm3": lambda: optax.sm3(0.1),
    "novograd": lambda: optax.novograd(0.1),
    "fromage": lambda: optax.fromage(0.1),
    "clip to the third largest": lambda: optax.stateless_with_tree_map(
        lambda g, _: jnp.minimum(g, jnp.sort(g.ravel())[-3])
    ),
    "optax.muon": lambda: optax.contrib.muon(0.1),
    "in a condition": lambda: optax.apply_if_finite(optax.lamb(0.1), 3),
    "after a global norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1)),
    "before a global norm": lambda: optax.chain(optax.lamb(0.1), optax.clip_by_global_norm(1.0)),
    "between global norms": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.lamb(0.1), optax.normalize_by_update_norm()
    ),
}
INDEPENDENT = {
    "adamw": lambda: optax.adamw(0.1),
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "int8 moments": lambda: mp.optim.low_precision_moments(optax.adam(0.1), "int8"),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "prodigy": lambda: optax.contrib.prodigy(),
    "muon": lambda: mp.Muon().build(steps=3, names=NAMES),
    "the loss": lambda: optax.contrib.momo_adam(0.1),
    "line search": lambda: optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3)),
    "large updates": lambda: optax.MultiSteps(
        optax.adam(0.1), 1, lambda *args: optax.skip_large_updates(*args, max_squared_norm=1.0)
    ).gradient_transformation(),
    "lookahead": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


def unstacked(tree):
    """Return each layer and expert as a separate array."""
    layers = {}
    for name, x in tree.items():
        dims = [dim for dim, stack in enumerate(NAMES[name]) if stack in ("layers", "dense_layers", "expert")]
        dims = dims[:1] if name == "router" else dims
        x = jnp.moveaxis(x, dims, range(len(dims)))
        layers |= {(name, *index): x[index] for index in np.ndindex(*x.shape[: len(dims)])}
    return layers


def two_updates(tx, params, grads):
    def update(params, grads):
        _, state = tx.update(grads, tx.init(params), params)
        return tx.update(grads, state, params)[0]

    return jax.jit(update)(params, grads)


PER_ARRAY = [name for name in OPTIMIZERS if "global norm" not in name]


@pytest.mark.parametrize("name", cases("adafactor", grid=PER_ARRAY))
def test_updates_equal_those_of_separate_arrays(name):
    tx = OPTIMIZERS[name]()
    expected = two_updates(tx, unstacked(PARAMS), unstacked(GRADS))
    actual = unstacked(two_updates(per_layer(tx, NAMES), PARAMS, GRADS))
    for key, x in expected.items():  # float32 roundings of sums in another order
        np.testing.assert_allclose(actual[key], x, rtol=3e-5, atol=3e-6 * float(jnp.abs(x).max()), err_msg=str(key))


def test_a_stack_as_one_array_is_wrong():
    tx = optax.lamb(1e-2)
    expected, actual = two_updates(tx, unstacked(PARAMS), unstacked(GRADS)), two_updates(tx, PARAMS, GRADS)
    assert float(jnp.abs(actual["up"][0]).max() / jnp.abs(expected["up", 0]).max()) > 50


@pytest.mark.parametrize(
    "name",
    cases("lamb", "sm3", "clip to the third largest", "after a global norm", "before a global norm", grid=OPTIMIZERS),
)
def test_statistics_over_stacks_are_refused(name):
    tx = OPTIMIZERS[name]()
    with raises("unsupported-feature", "the optimizer"):
        check_stacks(tx, PARAMS, jax.eval_shape(tx.init, PARAMS), NAMES)
    wrapped = per_layer(tx, NAMES)
    check_stacks(wrapped, PARAMS, jax.eval_shape(wrapped.init, PARAMS), NAMES)
    check_stacks(tx, PARAMS, jax.eval_shape(tx.init, PARAMS), {})


def test_optimizers_that_need_the_loss_are_checked():
    plateau = optax.contrib.reduce_on_plateau()
    for tx in (optax.chain(optax.lamb(0.1), plateau), optax.chain(plateau, optax.fromage(0.1))):
        with raises("unsupported-feature", "the optimizer"):
            check_stacks(tx, PARAMS, jax.eval_shape(tx.init, PARAMS), NAMES)
    tx = optax.chain(per_layer(optax.lamb(0.1), NAMES), plateau)
    check_stacks(tx, PARAMS, jax.eval_shape(tx.init, PARAMS), NAMES)


@pytest.mark.parametrize("name", cases("global norm", "int8 moments", grid=INDEPENDENT))
def test_other_optimizers_are_accepted(name):
    tx = INDEPENDENT[name]()
    check_stacks(tx, PARAMS, jax.eval_shape(tx.init, PARAMS), NAMES)


def test_state_is_sharded_like_the_parameters():
    names, params = ({name: tree[name] for name in ("up", "head")} for tree in (NAMES, PARAMS))
    model = mp.from_functions(lambda key: params, lambda params, x: x @ params["head"], names=names)
    tx = Optax(make=lambda steps: optax.lamb(1e-2), per_layer=True).build(steps=3, names=model.names())
    table = mp.shardings(model, mp.MeshSpec(fsdp=8).abstract(), mp.fsdp(min_bytes=0), tx=tx)
    moments = [decision for decision in table.optimizer if decision.path.endswith("/up")]
    assert len(moments) == 2
    assert all(moment.spec == table["up"].spec and moment.shards == 8 for moment in moments)


def test_a_step_refuses_statistics_over_stacks():
    def loss(model, batch, key):
        return mp.SumLoss(model(batch["x"]).sum()), {}

    model = mp.from_functions(
        lambda key: {"up": PARAMS["up"], "head": PARAMS["head"]},
        lambda params, x: x @ (params["up"].sum(0) @ jnp.ones((24, 32)) + params["head"]),
        names={name: NAMES[name] for name in ("up", "head")},
    )
    batch = {"x": np.ones((8, 16), np.float32)}
    for tx, expected in ((optax.lars(0.1), "unsupported-feature"), (per_layer(optax.lars(0.1), model.names()), None)):
        state = mp.abstract_state(model, tx, mesh=mp.MeshSpec(fsdp=8).build(), strategy=mp.fsdp(min_bytes=0))
        if expected is None:
            mp.train_step(loss).trace(state, batch)
        else:
            with raises(expected, "the optimizer"):
                mp.train_step(loss).trace(state, batch)


def test_eval_params_of_schedule_free_layers():
    names, params = ({name: tree[name] for name in ("up", "odd", "head")} for tree in (NAMES, PARAMS))
    model = mp.from_functions(lambda key: params, lambda params, x: x, names=names)
    tx = per_layer(optax.contrib.schedule_free(optax.lamb(0.1), 0.1, b1=0.8), names)
    mesh = mp.MeshSpec(data=1).build(jax.devices()[:1])
    state = mp.init_state(model, tx, mesh=mesh, strategy=mp.ddp(), key=0)
    # The iterate z is still the initial value.
    state = state.replace(params=jax.tree.map(lambda p: p + 1, params))
    for name, x in mp.eval_params(state).params.items():
        np.testing.assert_allclose(x, params[name] + 1 / 0.8, rtol=1e-5, atol=1e-5)
