"""`diff` names the line of planted faults, and finds no difference between correct layouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshpar as mp
from tests.errors import raises
from tests.loop.diff_faults import CORRECT, FAULTS, difference, located


def one_device():
    return mp.MeshSpec().build(jax.devices()[:1])


def partial_sum(x, w):
    return jax.shard_map(
        lambda x, w: x @ w, in_specs=(P(None, "tensor"), P("tensor")), out_specs=P(), axis_names={"tensor"},
        check_vma=False,
    )(x, w)  # fmt: skip


def linear(product):
    return mp.from_functions(
        lambda key: {"w": jax.random.normal(key, (8, 4))}, lambda p, x: product(x, p["w"]), names={"w": ("mlp", None)}
    )


def squares(model, batch, key):
    return mp.SumLoss(((model(batch["x"]) - 1) ** 2).sum()), {}


def found(product, loss=squares, **options):
    state = mp.init_state(linear(product), optax.sgd(0.1), mesh=one_device(), strategy=mp.ddp(), key=0)
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    mesh = mp.MeshSpec(tensor=2).build(jax.devices()[:2])
    options = {"mesh": mesh, "strategy": mp.ddp() | mp.tensor_parallel(), **options}
    return mp.diff(mp.train_step(loss), state, {"x": x}, **options)


def test_missing_reduction_is_named():
    difference = found(partial_sum)
    assert difference
    assert difference.results[:2] == ("loss", "gradient of w")
    origin = difference.origin
    assert origin.kind == "missing reduction"
    assert "`tensor`" in origin.detail
    assert origin.lines[0].line == partial_sum.__code__.co_firstlineno + 2
    assert origin.lines[0].file == __file__
    text = str(difference)
    assert "different: loss" in text
    assert "test_diff.py" in text
    assert difference.to_json()["origin"]["kind"] == "missing reduction"


def test_correct_layouts_do_not_differ():
    difference = found(jnp.dot)
    assert not difference
    assert difference.is_equal
    assert difference.compared["gradient"] == 1
    assert str(difference).startswith("no difference beyond rounding (1 x loss")


def test_equal_nans_are_reported():
    def infinite(model, batch, key):
        return mp.SumLoss(jnp.log(-1 - (model(batch["x"]) ** 2).sum())), {}

    difference = found(jnp.dot, loss=infinite)
    assert difference.is_equal
    assert str(difference).endswith("the loss is not finite")


def row_norms(is_wrong):
    """An optimizer whose first different value, a norm of rows, has another shape than the parameter."""

    def update(grads, state, params=None):
        norms = jax.tree.map(lambda g: jnp.abs(g).sum(-1, keepdims=True) * (3.0 if is_wrong() else 1.0), grads)
        return jax.tree.map(lambda g, norm: -g / (norm + 1), grads, norms), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def old_moments(is_wrong):
    """Momentum that is not stored."""
    tx = optax.trace(0.9)

    def update(grads, state, params=None):
        updates, new = tx.update(grads, state, params)
        return updates, state if is_wrong() else new

    return optax.GradientTransformation(tx.init, update)


@pytest.mark.parametrize(
    ("make", "kind", "line"),
    [(row_norms, "factor", 4), pytest.param(old_moments, "not updated", 5, marks=pytest.mark.matrix)],
)
def test_kinds_of_wrong_optimizers(make, kind, line):
    traces = []

    def is_wrong():  # in the second trace
        traces.append(0)
        return len(traces) > 1

    state = mp.init_state(linear(jnp.dot), make(is_wrong), mesh=one_device(), strategy=mp.ddp(), key=0)
    traces.clear()
    mesh = mp.MeshSpec(tensor=2).build(jax.devices()[:2])
    batch = {"x": np.ones((4, 8), np.float32)}
    difference = mp.diff(mp.train_step(squares), state, batch, mesh=mesh, strategy=mp.ddp() | mp.tensor_parallel())
    assert difference.origin.kind == kind
    assert (__file__, make.__code__.co_firstlineno + line) in [x[:2] for x in difference.origin.lines]
    assert not difference.origin.source.file.endswith("training/step.py")


def sum_of_sums(x, w):
    y = jax.lax.psum(x @ w, "tensor")
    y = jax.lax.psum(y, "tensor")
    return 3 * -(2 * y)


def test_two_reductions_over_a_model_axis_are_a_factor():
    """Engines scale values by the number of parts of the batch, but not by the size of other axes."""
    specs = {"in_specs": (P(None, "tensor"), P("tensor")), "out_specs": P(), "check_vma": False}
    origin = found(lambda x, w: jax.shard_map(sum_of_sums, **specs, axis_names={"tensor"})(x, w)).origin
    assert origin.kind == "factor"
    assert "`tensor`" in origin.detail
    assert (origin.source.file, origin.source.line) == (__file__, sum_of_sums.__code__.co_firstlineno + 2)


@pytest.mark.matrix
def test_line_of_a_random_key_comes_first():
    def noisy(model, batch, key):
        if jax.sharding.get_abstract_mesh().size > 1:
            key = jax.random.fold_in(key, 1)
        return mp.SumLoss(((model(batch["x"] + jax.random.normal(key, batch["x"].shape))) ** 2).sum()), {}

    difference = found(jnp.dot, loss=noisy)
    assert difference.origin.kind == "random"
    assert difference.origin.lines[0][:2] == (__file__, noisy.__code__.co_firstlineno + 2)


@pytest.mark.matrix
def test_values_beyond_the_limit_are_compared_in_turn():
    assert found(partial_sum, max_bytes=200).origin == found(partial_sum).origin


def doubled():
    def product(x, w):
        return 2 * jnp.dot(x, w)

    return product


def plain():
    def product(x, w):
        return 1 * jnp.dot(x, w)

    return product


def test_versions_are_matched_by_function():
    difference = found(plain(), model=linear(doubled()), mesh=None, strategy=None)
    assert difference.origin.kind == "factor"
    assert difference.origin.detail == "constant factor 2"
    assert difference.origin.equation == "mul"
    assert difference.origin.source.line == plain.__code__.co_firstlineno + 2


def test_models_with_other_parameters_are_rejected():
    other = mp.from_functions(lambda key: {"v": jnp.zeros(3)}, lambda p, x: x * p["v"])
    with raises("wrong-shape", "diff(model=...)"):
        found(jnp.dot, model=other, strategy=mp.ddp())


def test_arguments_are_checked():
    step, batch, one = mp.train_step(squares), {"x": np.ones((4, 8), np.float32)}, one_device()
    setup = {"mesh": one, "strategy": mp.ddp()}
    state = mp.abstract_state(linear(jnp.dot), optax.sgd(0.1), **setup)
    live = mp.init_state(linear(jnp.dot), optax.sgd(0.1), **setup, key=0)
    for code, reason, arguments, options in (
        ("wrong-type", "int", (step, 0, {}), {}),
        ("wrong-type", "function", (squares, live, batch), setup),
        ("wrong-type", "function", (step, live, batch, squares), setup),
        ("wrong-type", "state or batch are abstract", (step, state, batch), setup),
        ("wrong-type", "no devices", (step, live, batch), {"mesh": mp.MeshSpec(data=8).abstract(8)}),
        ("wrong-type", "the same", (step, live, batch), {}),
        ("not-an-int", "at least 1", (step, live, batch), {**setup, "max_bytes": 0}),
    ):
        with raises(code) as error:
            mp.diff(*arguments, **options)
        assert reason in error.value.reason


# ---- Planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_located(name):
    fault = FAULTS[name]
    found, is_located = located(fault)
    assert found, "no difference"
    assert is_located == fault.is_located, str(found)


def test_most_faults_are_located():
    assert len(FAULTS) >= 30
    assert sum(fault.is_located for fault in FAULTS.values()) >= 27


def correct_pairs():
    """XLA's CPU backend aborts on bfloat16 collectives in a `shard_map` that is manual over some of the mesh axes."""
    for compute in (None, "bfloat16"):
        yield from ((*pair, compute) for pair in CORRECT if compute is None or pair[0] != "sequence")


def test_there_are_30_correct_pairs():
    assert len(list(correct_pairs())) >= 30


@pytest.mark.matrix
@pytest.mark.parametrize(("program", "case", "compute"), list(correct_pairs()))
def test_correct_layouts_have_no_difference(program, case, compute):
    found = difference(program, case, compute=compute, find_origin=False)
    assert not found, str(found)
