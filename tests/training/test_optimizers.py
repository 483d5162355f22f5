"""All public optimizers and wrappers of optax: their state is sharded, or the step raises an error."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import meshpar as mp

SHAPES = {"w": (16, 32), "v": (32, 16), "b": (16,)}
NAMES = {"w": ("embed", "mlp"), "v": ("mlp", "embed"), "b": ("embed",)}
DRAW = np.random.default_rng(0)
BATCH = {name: DRAW.normal(size=(16, 16)).astype(np.float32) for name in ("x", "y")}


def init(key):
    return {
        path: 0.3 * jax.random.normal(jax.random.fold_in(key, len(path + path[0])), shape) + 0.1
        for path, shape in SHAPES.items()
    }


def apply(params, x):
    return jnp.tanh(mp.constrain(x, "batch", None) @ params["w"]) @ params["v"] + params["b"]


def loss(model, batch, key):
    errors = (model(batch["x"]) - batch["y"]) ** 2
    return mp.MeanLoss(errors.sum(), errors.size), {}


MODEL = mp.from_functions(init, apply, names=NAMES)
MESH = mp.MeshSpec(fsdp=8)
STRATEGY = mp.fsdp(min_bytes=0)


def by_name(params):
    return {path: "a" if path == "w" else "b" for path in params}


def norm(updates, *_, **__):
    return optax.tree.norm(updates)


sgd, adam = functools.partial(optax.sgd, 1e-2), functools.partial(optax.adam, 1e-2)
MADE = {
    "add_noise": lambda: optax.add_noise(0.01, 0.5, 0),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "apply_every": lambda: optax.apply_every(2),
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 3),
    "chain": lambda: optax.chain(optax.clip(1.0), adam()),
    "conditionally_mask": lambda: optax.conditionally_mask(adam(), lambda step, *_, **__: step < 1),
    "conditionally_transform": lambda: optax.conditionally_transform(adam(), lambda step, *_, **__: step < 1),
    "flatten": lambda: optax.flatten(adam()),
    "freeze": lambda: optax.freeze(lambda params: {path: path == "w" for path in params}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(1e-2),
    "lookahead": lambda: optax.lookahead(sgd(), 5, 0.5),
    "masked": lambda: optax.masked(adam(), lambda params: jax.tree.map(lambda _: True, params)),
    "measure_with_ema": lambda: optax.measure_with_ema(lambda updates, *_, **__: updates, 0.9),
    "monitor": lambda: optax.chain(optax.monitor({"norm": norm}), adam()),
    "multi_transform": lambda: optax.multi_transform({"a": adam(), "b": sgd()}, by_name),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", adam())),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "partition": lambda: optax.partition({"a": adam(), "b": sgd()}, by_name),
    "polyak_sgd": lambda: optax.polyak_sgd(1.0),
    "scale_by_backtracking_linesearch": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
    "scale_by_rprop": lambda: optax.scale_by_rprop(1e-2),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda count: 0.1),
    "scale_by_zoom_linesearch": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(5)),
    "selective_transform": lambda: optax.selective_transform(
        adam(), freeze_mask=lambda params: dict.fromkeys(params, False)
    ),
    "snapshot": lambda: optax.snapshot("norm", norm),
    "stateless": lambda: optax.stateless(lambda updates, params: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda update, param: update),
    "with_extra_args_support": lambda: optax.with_extra_args_support(sgd()),
    "MultiSteps": lambda: optax.MultiSteps(adam(), 2),
    "differentially_private_aggregate": lambda: contrib.differentially_private_aggregate(1.0, 1.0, 0),
    "dpsgd": lambda: contrib.dpsgd(1e-2, 1.0, 1.0, 0),
    "hutchinson_estimator_diag_hessian": lambda: contrib.hutchinson_estimator_diag_hessian(jax.random.key(0)),
    "mechanize": lambda: contrib.mechanize(sgd()),
    "reduce_on_plateau": lambda: optax.chain(sgd(), contrib.reduce_on_plateau()),
    "sam": lambda: contrib.sam(sgd(), optax.chain(contrib.normalize(), optax.sgd(0.1))),
    "schedule_free": lambda: contrib.schedule_free(sgd(), 1e-2),
    "scale_by_madgrad": lambda: contrib.scale_by_madgrad(1e-2),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(adam()),
}
"""Optimizers with arguments other than a learning rate."""
WITHOUT_RATE = {
    "cocob", "dog", "dowg", "lbfgs", "centralize", "identity", "keep_params_nonnegative", "normalize", "set_to_zero",
    "zero_nans", "normalize_by_update_norm",
}  # fmt: skip
MORE = ("MultiSteps", "dog", "dowg", "hutchinson_estimator_diag_hessian")
"""Functions whose annotations in optax do not name a transformation."""
REFUSED = {
    "lookahead": "has no attribute 'fast'",
    "differentially_private_aggregate": "batch dimension in the 0th axis",
    "dpsgd": "batch dimension in the 0th axis",
    "scale_by_muon": "pytree structure",  # a bias is not a matrix
}
ASKING = (
    "lbfgs", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch", "polyak_sgd", "momo", "reduce_on_plateau",
    "sophia", "hutchinson_estimator_diag_hessian",
)  # fmt: skip
"""Optimizers whose update takes the loss, its gradient or its function."""
UNLIKE = {"flatten", "galore", "scale_by_galore", "sm3", "scale_by_sm3"}
"""Optimizers whose state has different dims than the parameters."""


def public():
    for module in (optax, contrib):
        for name in sorted(dir(module)):
            found = getattr(module, name)
            if name.startswith("_") or not callable(found):
                continue
            try:
                gives = str(inspect.signature(found).return_annotation)
            except (TypeError, ValueError):
                continue
            if "GradientTransformation" in gives or name in MORE:
                yield name


def made(name):
    if name in MADE:
        return MADE[name]()
    make = vars(optax).get(name) or vars(contrib)[name]
    is_plain = name in WITHOUT_RATE or (name.startswith("scale_by") and name != "scale_by_learning_rate")
    return make() if is_plain else make(0.9 if name in ("trace", "ema") else 1e-2)


def traced(name):
    state = mp.abstract_state(MODEL, made(name), mesh=MESH.build(), strategy=STRATEGY)
    mp.train_step(loss).trace(state, BATCH)
    return state


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", list(public()))
def test_state_of_all_optimizers_is_sharded(name):
    if name in REFUSED:
        with pytest.raises(mp.MeshparError, match=f"optimizer's update: cannot.*{REFUSED[name]}.*Use"):
            traced(name)
        return
    table = traced(name).table
    whole = [one.path for one in table.optimizer if one.shards == 1 and one.leaf.size >= 16]
    assert name in UNLIKE or not whole


@pytest.mark.parametrize("impl", [pytest.param("threefry2x32", marks=pytest.mark.matrix), "rbg"])
def test_typed_keys_of_an_optimizer_are_restored(impl, tmp_path):
    tx = mp.ema(optax.chain(adam(), optax.add_noise(0.01, 0.5, jax.random.key(7, impl=impl))), 0.9)
    arguments = {"mesh": MESH.build(), "strategy": STRATEGY}
    state, step = mp.init_state(MODEL, tx, key=0, **arguments), mp.train_step(loss)
    state, _ = step(state, BATCH)
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, wait=True)
        restored = checkpoints.restore(mp.abstract_state(MODEL, tx, **arguments)).state
    before = jax.device_get(state.opt_state.inner[1].rng_key)
    (state, _), (restored, _) = step(state, BATCH), step(restored, BATCH)
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state, state.opt_state)
    assert (np.asarray(state.opt_state.inner[1].rng_key) != before).any()
    assert mp.load_params(state, state.params).opt_state.inner[1].rng_key.dtype == np.uint32


@pytest.mark.parametrize("name", ["lbfgs", "sophia", "multi_transform", "sam"])
def test_state_of_optimizers_with_extra_arguments_is_sharded(name):
    assert all(one.shards == 8 for one in traced(name).table.optimizer if one.leaf.size >= 16)


def after(name, spec, strategy):
    mesh = spec.build(jax.devices()[: max(spec.values())])
    state, step = mp.init_state(MODEL, made(name), mesh=mesh, strategy=strategy, key=0), mp.train_step(loss)
    for _ in range(3):
        state, metrics = step(state, BATCH)
    return jax.device_get((state.params, metrics["loss"]))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ASKING)
def test_updates_equal_one_device(name):
    """Line searches compare losses, so rounding errors affect the step."""
    found, expected = after(name, MESH, STRATEGY), after(name, mp.MeshSpec(), mp.ddp())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-4), found, expected)


def test_line_search_with_micro_steps_is_an_error():
    state = mp.abstract_state(MODEL, optax.lbfgs(), mesh=MESH.build(), strategy=STRATEGY)
    with pytest.raises(
        mp.MeshparError,
        match="optimizer's update.*`value_fn`.*accumulate evaluate the loss only on parts.*accumulate=1",
    ):
        mp.train_step(loss, accumulate=2).trace(state, BATCH)
