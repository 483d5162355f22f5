"""Value and gradient of all kernels against their references."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from meshpar import collectives as mc
from meshpar.collectives import reference, ring
from meshpar.collectives.reduction import ALGORITHMS
from tests.collectives.gradients import with_gradient
from tests.grid import cases

COUNTS = cases(3, grid=[1, 2, 3, 5, 8])


class Case(NamedTuple):
    kernel: Callable
    reference: Callable
    shape: Callable[[int], tuple[int, ...]]


def case(name, shape, **options):
    """Return a kernel and the reference of the same name, which has no options of the algorithm."""
    shared = {k: v for k, v in options.items() if k not in ("algorithm", "channels", "num_servers")}
    kernel = functools.partial(getattr(mc, name), axis="x", **options)
    return Case(kernel, functools.partial(getattr(reference, name), **shared), shape)


def any_shape(n):
    return (5, 3)


def divisible(n):
    return (2, 3 * n)


def per_rank(n):
    return (3, n)


CASES = {
    "shift": case("shift", any_shape),
    "shift back": case("shift", any_shape, by=-2),
    "shift, ends": case("shift", any_shape, by=2, wrap=False),
    "shift back, ends": case("shift", any_shape, by=-1, wrap=False),
    "broadcast": case("broadcast", any_shape),
    "reduce": case("reduce", any_shape),
    "reduce mean": case("reduce", any_shape, op="mean"),
    "reduce max": case("reduce", any_shape, op="max"),
    "scatter": case("scatter", divisible, dim=1),
    "scatter stacked": case("scatter", per_rank, dim=-1, tiled=False),
    "gather": case("gather", any_shape, dim=1),
    "gather stacked": case("gather", any_shape, dim=-1, tiled=False),
    "all_gather": case("all_gather", any_shape, dim=-1),
    "all_gather stacked": case("all_gather", any_shape, dim=2, tiled=False, algorithm="bidirectional"),
    "all_gather, rings": case("all_gather", any_shape, channels=4),
    "reduce_scatter": case("reduce_scatter", divisible, dim=1),
    "reduce_scatter stacked": case("reduce_scatter", per_rank, dim=-1, tiled=False, algorithm="bidirectional"),
    "reduce_scatter max": case("reduce_scatter", divisible, dim=-1, op="max"),
    "reduce_scatter mean, rings": case("reduce_scatter", divisible, dim=1, op="mean", channels=3),
    "all_to_all": case("all_to_all", lambda n: (3 * n, 2)),
    "all_to_all across dims": case("all_to_all", divisible, split_dim=-1, concat_dim=0),
    "all_to_all stacked": case("all_to_all", per_rank, split_dim=1, concat_dim=0, tiled=False),
    "all_reduce bidirectional, rings": case("all_reduce", any_shape, algorithm="bidirectional", channels=2),
    "all_reduce more rings than elements": case("all_reduce", lambda n: (), channels=3),
    "all_reduce ring min": case("all_reduce", any_shape, op="min"),
    "all_reduce ring mean": case("all_reduce", any_shape, op="mean"),
    **{f"all_reduce {algorithm}": case("all_reduce", any_shape, algorithm=algorithm) for algorithm in ALGORITHMS},
    "all_reduce recursive doubling max": case("all_reduce", any_shape, algorithm="recursive_doubling", op="max"),
    "all_reduce tree min": case("all_reduce", any_shape, algorithm="tree", op="min"),
    "all_reduce xla max": case("all_reduce", any_shape, algorithm="xla", op="max"),
    "all_gather xla": case("all_gather", any_shape, dim=-1, algorithm="xla"),
    "all_gather xla stacked": case("all_gather", any_shape, dim=1, tiled=False, algorithm="xla"),
    "reduce_scatter xla mean": case("reduce_scatter", divisible, dim=1, op="mean", algorithm="xla"),
    "reduce_scatter xla max": case("reduce_scatter", divisible, dim=-1, op="max", algorithm="xla"),
    "all_reduce, servers": case("all_reduce", any_shape, algorithm="parameter_server", num_servers=1),
}
POWER_OF_TWO = {
    "all_gather doubling": case("all_gather", any_shape, algorithm="recursive_doubling"),
    "reduce_scatter halving": case("reduce_scatter", divisible, dim=1, algorithm="recursive_halving"),
}
EACH_MOTION = (
    "shift back",
    "reduce max",
    "gather",
    "all_gather, rings",
    "reduce_scatter",
    "all_to_all",
    "all_reduce tree",
)


def parts_of(shape, dtype="float32", seed=0):
    """Return integers with ties, whose sums are exact in float32 but not in bfloat16."""
    return (np.random.default_rng(seed).integers(-40, 40, shape) * 3).astype(jnp.dtype(dtype))


@pytest.fixture(scope="module")
def outcomes(ranks):
    """Return a function to the results of all kernels and references, with gradients for float32."""

    @functools.cache
    def run(count, dtype="float32"):
        row, apply = ranks(count), with_gradient if dtype == "float32" else lambda f, x: f(x)

        def all_of(use):
            return jax.jit(
                lambda: {
                    name: apply(use(case), parts_of((count, *case.shape(count)), dtype))
                    for name, case in CASES.items()
                    if dtype != "int32" or "mean" not in name
                }
            )()

        return all_of(lambda case: row.view(case.kernel)), all_of(lambda case: case.reference)

    return run


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(outcomes, name, count):
    actual, expected = outcomes(count)
    np.testing.assert_array_equal(actual[name][0], expected[name][0])  # sums of integers are exact
    np.testing.assert_allclose(actual[name][1], expected[name][1], rtol=1e-5, atol=1e-6)  # float32, up to 8 terms


@pytest.mark.matrix
@pytest.mark.parametrize("count", [6, 7])
@pytest.mark.parametrize("name", [name for name in CASES if "mean" not in name])
def test_integers_are_exact(outcomes, name, count):
    actual, expected = outcomes(count, "int32")
    assert actual[name].dtype == jnp.int32
    np.testing.assert_array_equal(actual[name], expected[name])


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_stays_bfloat16(outcomes, name):
    actual, expected = outcomes(5, "bfloat16")
    assert actual[name].dtype == jnp.bfloat16
    # Four additions, each rounded to 2^-8 of sums up to 5 * 120.
    atol = 4 * 5 * 120 / 256 if name.startswith(("reduce", "all_reduce")) else 0
    if "max" in name or "min" in name:
        atol = 0
    np.testing.assert_allclose(actual[name].astype("float32"), expected[name].astype("float32"), rtol=0, atol=atol)


@pytest.mark.parametrize("root", cases(4, grid=[1, 4]))
@pytest.mark.parametrize("name", ["broadcast", "reduce max", "scatter", "gather"])
def test_any_rank_can_be_the_root(ranks, name, root):
    case = CASES[name]
    parts = parts_of((5, *case.shape(5)))
    actual = jax.jit(ranks(5).view(functools.partial(case.kernel, root=root)))(parts)
    np.testing.assert_array_equal(actual, case.reference(parts, root=root))


@pytest.mark.parametrize("dtype", cases("bfloat16", grid=["bfloat16", "float32"]))
@pytest.mark.usefixtures("strict")
def test_no_implicit_promotion_or_broadcast(ranks, dtype):
    for case in CASES.values():
        parts = jax.ShapeDtypeStruct((5, *case.shape(5)), dtype)
        view = ranks(5).view(case.kernel)
        y = jax.eval_shape(lambda x, f=view: jax.vjp(f, x)[0], parts)
        assert (y.shape, y.dtype) == (jax.eval_shape(case.reference, parts).shape, parts.dtype)


def test_several_axes_act_as_one(ranks):
    row, parts = ranks(outer=2, inner=3), parts_of((6, 4))
    both = functools.partial(mc.all_gather, axis=("outer", "inner"))
    np.testing.assert_array_equal(jax.jit(row.view(both))(parts), reference.all_gather(parts))


@pytest.mark.parametrize(
    "names", [EACH_MOTION, pytest.param((*CASES, *POWER_OF_TWO), marks=pytest.mark.matrix)], ids=["few", "all"]
)
def test_axes_in_another_order_than_the_mesh(out_of_order, names):
    row = out_of_order
    available = {**CASES, **(POWER_OF_TWO if row.count & (row.count - 1) == 0 else {})}
    cases = {name: available[name] for name in names if name in available}
    arrays = {name: parts_of((row.count, *case.shape(row.count))) for name, case in cases.items()}

    def all_of(use):
        return jax.jit(lambda: {name: with_gradient(use(case), arrays[name]) for name, case in cases.items()})()

    actual = all_of(lambda case: row.view(functools.partial(case.kernel, axis=row.axis)))
    expected = all_of(lambda case: case.reference)
    for name in cases:
        np.testing.assert_array_equal(actual[name][0], expected[name][0], err_msg=name)
        np.testing.assert_allclose(actual[name][1], expected[name][1], rtol=1e-5, atol=1e-6, err_msg=name)


def test_rank_numbers_follow_the_order_of_the_axes(ranks):
    """Rank numbers agree with PartitionSpecs, `axis_index` and XLA's collectives."""
    sizes = {"a": 2, "b": 2, "c": 2}
    orders = [order for number in (2, 3) for order in itertools.permutations(sizes, number)]

    def kernel(axis, x):
        return mc.shift(x, axis=axis), mc.all_gather(x, axis=axis) - lax.all_gather(x, axis, tiled=True)

    def run(order):
        return ranks(order=order, **sizes).view(functools.partial(kernel, order))(parts_of((2 ** len(order), 2)))

    results = jax.jit(lambda: [run(order) for order in orders])()
    for order, (shifted, difference) in zip(orders, results, strict=True):
        np.testing.assert_array_equal(shifted, reference.shift(parts_of(shifted.shape)), err_msg=str(order))
        assert not np.asarray(difference).any(), order


def test_all_reduce_over_an_axis_of_several(ranks):
    parts = parts_of((6, 4))
    actual = jax.jit(ranks(outer=2, inner=3).view(functools.partial(mc.all_reduce, axis="outer")))(parts)
    by_group = jax.vmap(reference.all_reduce, in_axes=1, out_axes=1)(parts.reshape(2, 3, 4))
    np.testing.assert_array_equal(actual, by_group.reshape(6, 4))


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_arrays_without_elements(ranks, name):
    parts = jnp.zeros((3, 0, 4))
    kernel = functools.partial(getattr(mc, name), axis="x")
    actual = jax.jit(ranks(3).view(kernel))(parts)
    np.testing.assert_array_equal(actual, getattr(reference, name)(parts))


# ---------------------------------------------------------------------------------------------------------------------
# Properties
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_reduces(ranks):
    """Return programs for all-reduce, and for reduce-scatter and all-gather, of 12 floats on 6 ranks."""

    @functools.cache
    def program(algorithm):
        ring = functools.partial(mc.all_reduce, axis="x", algorithm=algorithm, channels=2)
        scatter = functools.partial(mc.reduce_scatter, axis="x", algorithm=algorithm, channels=2)
        gather = functools.partial(mc.all_gather, axis="x", algorithm=algorithm, channels=2)
        return jax.jit(ranks(6).view(lambda x: (ring(x), gather(scatter(x)))))

    return program


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


@pytest.mark.parametrize("algorithm", ["ring", "bidirectional"])
@settings(max_examples=20)
@given(rows=st.lists(FLOATS, min_size=72, max_size=72))
def test_all_reduce_equals_reduce_scatter_and_all_gather(all_reduces, algorithm, rows):
    direct, composed = all_reduces(algorithm)(np.array(rows, "float32").reshape(6, 12))
    np.testing.assert_array_equal(np.asarray(direct).view("int32"), np.asarray(composed).view("int32"))


@pytest.fixture(scope="module")
def all_algorithms(ranks):
    """Return a program with all all-reduce algorithms, for five floats on 7 ranks."""

    def run(x):
        return {name: mc.all_reduce(x, axis="x", algorithm=name) for name in ALGORITHMS}

    return jax.jit(ranks(7).view(run))


@settings(max_examples=20)
@given(rows=st.lists(FLOATS, min_size=35, max_size=35))
def test_all_ranks_get_the_same_bits(all_algorithms, rows):
    for name, total in all_algorithms(np.array(rows, "float32").reshape(7, 5)).items():
        bits = np.asarray(total).view("int32")
        assert (bits == bits[0]).all(), name


@settings(max_examples=6)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    algorithm=st.sampled_from(ALGORITHMS),
    op=st.sampled_from(["sum", "max", "min"]),
)
def test_any_shape(ranks, shape, algorithm, op):
    parts = parts_of((3, *shape), "int32")
    actual = jax.jit(ranks(3).view(functools.partial(mc.all_reduce, axis="x", algorithm=algorithm, op=op)))(parts)
    np.testing.assert_array_equal(actual, reference.all_reduce(parts, op=op))


@pytest.mark.parametrize("count", cases(3, grid=[1, 2, 3, 8]))
def test_ring_states_lead_to_the_result(ranks, count):
    """Each step of the first half adds a term to a chunk. The last state is the result."""
    terms = jnp.repeat(jnp.eye(count, dtype=int)[:, None, :], count, axis=1)  # [rank, chunk, rank of the term]
    mesh = ranks(count)
    states, reduced = jax.jit(
        lambda x: [mesh.view(functools.partial(f, axis="x"))(x) for f in (ring.ring_states, mc.all_reduce)]
    )(terms)
    states = np.asarray(states).reshape(count, 2 * count - 1, count, count)
    assert (states[:, 0] == np.asarray(terms)).all()
    assert (states[:, -1] == np.asarray(reduced)).all()
    for step in range(count):
        assert states[:, step].sum(axis=-1).max() == step + 1
        assert states[:, step].sum() == count * (count + sum(range(1, step + 1)))
