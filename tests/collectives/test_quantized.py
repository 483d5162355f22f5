"""Quantized collectives: error bounds, values that are not finite, and bytes sent."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import collectives as mc
from meshpar.collectives import reference
from meshpar.collectives.quantized import decoded, encoded, error_bound
from meshpar.hardware import cost_model as cost
from tests import grid
from tests.collectives.gradients import with_gradient
from tests.errors import raises

DTYPES = ["int8", "fp8"]
COUNTS = [(1,), (2,), (3,), (8,), (2, 3), (2, 1)]
LARGEST = float(np.finfo("float32").max)


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@functools.partial(jax.jit, static_argnames=("dtype", "block"))
def round_trip(x, **options):
    return mc.dequantize(mc.quantize(x, **options), shape=x.shape, dtype=x.dtype)


# ---- Blocks ----------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
HARD = {
    name: np.asarray(x, np.float32)
    for name, x in {
        "normal": RNG.normal(size=600),
        "many magnitudes": RNG.normal(size=512) * np.exp(8 * RNG.normal(size=512)),
        "zeros": np.zeros(300),
        "one huge": np.where(np.arange(256) == 17, -1e30, 1e-3),
        "largest there is": LARGEST * (-1.0) ** np.arange(1, 257),
        "smallest there is": np.full(256, 2.0**-140),
        "halves": np.arange(-127.0, 127.5, 0.5),
        "one element": [3.0],
    }.items()
}


@pytest.mark.parametrize(
    ("dtype", "block", "stochastic"),
    grid.cases(("int8", 7, True), ("fp8", 256, False), grid=itertools.product(DTYPES, (1, 7, 256), (False, True))),
)
def test_errors_are_within_the_bound(dtype, block, stochastic):
    for name, x in HARD.items():
        key = jax.random.key(1) if stochastic else None
        actual = np.asarray(round_trip(x, dtype=dtype, block=block, key=key), "float64")
        width = -(-x.size // -(-x.size // block))
        blocks = np.pad(np.abs(np.asarray(x, "float64")), (0, -x.size % width)).reshape(-1, width)
        largest = np.repeat(blocks.max(1), width)[: x.size]
        bound = error_bound(largest, dtype=dtype, stochastic=stochastic)
        assert (np.abs(actual - np.asarray(x, "float64")) <= bound).all(), name


EDGES = [2.0**-e for e in range(110, 128)] + [
    limit * 2.0**-126 * (1 + off) for limit in (127.0, 448.0) for off in (-(2.0**-20), 0.0, 2.0**-20)
]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_of_tiny_blocks_are_within_the_bound(dtype, stochastic):
    key = jax.random.key(2) if stochastic else None
    shape = np.concatenate([[1.0, -1.0, 0.0], np.geomspace(2.0**-20, 1.0, 61)])
    for largest in EDGES:
        x = (largest * shape).astype("float32")
        actual = np.asarray(round_trip(jnp.asarray(x), dtype=dtype, block=64, key=key), "float64")
        bound = error_bound(largest, dtype=dtype, stochastic=stochastic)
        assert (np.abs(actual - x.astype("float64")) <= bound).all(), largest
        if largest >= 2.0**-123:  # smaller blocks become zeros
            assert actual.max() >= largest / 2, largest
    assert error_bound(2.0**-126, dtype=dtype) < 2.0**-125


@pytest.mark.parametrize(("stochastic", "relative", "least"), [(False, 1 / 16, 2.0**-18), (True, 1 / 8, 2.0**-17)])
def test_fp8_bound_of_small_elements(stochastic, relative, least):
    x = jnp.asarray([448.0, 2.0**-10, 3 * 2.0**-10, *np.geomspace(2.0**-12, 448.0, 997)], "float32")
    key = jax.random.key(3) if stochastic else None
    error = jnp.abs(round_trip(x, dtype="fp8", block=1000, key=key) - x)
    assert (error <= jnp.maximum(x * relative, 448 * least) + 448 * 2.0**-21).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_the_format_are_exact(dtype):
    values = jnp.arange(-127.0, 128.0) if dtype == "int8" else jnp.asarray([448.0, -416, 15, 0.875, 2.0**-6, 2.0**-9])
    np.testing.assert_array_equal(round_trip(values, dtype=dtype), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nonfinite_values_make_their_block_nan(dtype, bad):
    actual = round_trip(normal(30).at[13].set(bad), dtype=dtype, block=10, key=jax.random.key(0))
    assert np.isnan(actual[10:20]).all()
    assert np.isfinite(actual[:10]).all()
    assert np.isfinite(actual[20:]).all()


@pytest.mark.parametrize("dtype", grid.cases("fp8", grid=DTYPES))
def test_stochastic_rounding_is_unbiased(dtype):
    x, draws = jnp.asarray([100.0, 0.1, -0.3, 7.7, 33.3, -61.0]), 4000
    keys = jax.random.split(jax.random.key(0), draws)
    many = jax.vmap(lambda key: round_trip(x, dtype=dtype, key=key))(keys)
    error = jnp.abs(many.mean(0) - x)
    # Five standard errors of a variable with the two observed values, and the rounding of the mean.
    limit = 5 * (many.max(0) - many.min(0)) / 2 / np.sqrt(draws) + 1e-6 * jnp.abs(x)
    assert (error <= limit).all()
    assert (jnp.abs(round_trip(x, dtype=dtype) - x) > limit).any()


def test_blocks_have_equal_sizes():
    quantized = mc.quantize(normal(20, 30), block=256)
    assert quantized.values.shape == (3, 200)
    assert quantized.values.dtype == jnp.int8
    assert quantized.scales.dtype == jnp.float32


SIZES = [(0, 256), (1, 256), (300, 256), (513, 256), (10, 1), (10, 3)]


@pytest.mark.parametrize(("size", "block"), grid.cases((513, 256), grid=SIZES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_message_size_matches_closed_form(dtype, size, block):
    x = normal(2, size)
    message = jax.jit(encoded, static_argnums=(1, 2, 3))(x, dtype, block, None)
    assert message.shape == (2, cost.quantized_bytes(size, block=block))
    expected = jnp.stack([round_trip(row, dtype=dtype, block=block) for row in x])
    actual = jax.jit(decoded, static_argnums=(1, 2, 3))(message, size, dtype, block)
    np.testing.assert_array_equal(actual, expected)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def any_shape(n):
    return (5, 9)


def divisible(n):
    return (2, 3 * n)


def per_rank(n):
    return (3, n)


CASES = {
    "gather": ("quantized_all_gather", any_shape, {"dim": 1}),
    "gather stacked": ("quantized_all_gather", any_shape, {"dim": -1, "tiled": False, "dtype": "fp8"}),
    "gather, at random": ("quantized_all_gather", any_shape, {"key": True, "block": 4}),
    "gather, gradient too": ("quantized_all_gather", any_shape, {"grad_dtype": "int8"}),
    "scatter": ("quantized_reduce_scatter", divisible, {"dim": 1}),
    "scatter stacked": ("quantized_reduce_scatter", per_rank, {"dim": -1, "tiled": False, "dtype": "fp8"}),
    "scatter mean, at random": ("quantized_reduce_scatter", divisible, {"dim": 1, "op": "mean", "key": True}),
    "scatter, gradient too": ("quantized_reduce_scatter", divisible, {"dim": 1, "grad_dtype": "int8"}),
    "reduce": ("quantized_all_reduce", any_shape, {"block": 4}),
    "reduce mean, at random": ("quantized_all_reduce", any_shape, {"op": "mean", "key": True, "dtype": "fp8"}),
    "reduce, gradient too": ("quantized_all_reduce", any_shape, {"grad_dtype": "fp8"}),
}
REFERENCE_OPTIONS = ("dim", "tiled", "op")
KERNELS = "quantized_all_gather", "quantized_reduce_scatter", "quantized_all_reduce"


AT_RANDOM = [name for name in CASES if "random" in name]
"""Random bits take long to compile, so these run only on 3 ranks and on 2 nodes of 3."""


def cases_of(counts):
    return [name for name in CASES if name not in AT_RANDOM or counts in [(3,), (2, 3)]]


def case(name, **axes):
    """Return the kernel and its reference."""
    kernel, _, options = CASES[name]
    options = {**options, **({"key": jax.random.key(0)} if "key" in options else {})}
    shared = {k: v for k, v in options.items() if k in REFERENCE_OPTIONS}
    return functools.partial(getattr(mc, kernel), **axes, **options), functools.partial(
        getattr(reference, kernel), **shared
    )


@pytest.fixture(scope="module")
def outcomes(ranks):
    """Return a function from mesh sizes to value and gradient of all cases, of the kernels and the references."""

    @functools.cache
    def run(*counts):
        row = ranks(counts[0]) if len(counts) == 1 else ranks(outer=counts[0], inner=counts[1])
        axes = {"axis": "x"} if len(counts) == 1 else {"axis": "inner", "outer": "outer"}
        arrays = {name: normal(row.count, *CASES[name][1](row.count)) for name in cases_of(counts)}
        sides = [{name: case(name, **axes)[side] for name in arrays} for side in (0, 1)]
        actual = jax.jit(lambda: {n: with_gradient(row.view(sides[0][n]), x) for n, x in arrays.items()})()
        expected = jax.jit(lambda: {n: with_gradient(sides[1][n], x) for n, x in arrays.items()})()
        return actual, expected, arrays

    return run


def bound_of(name, x, expected, num_terms, num_nodes):
    """Return the bound from the docstring, with the largest value of the array instead of each block."""
    kernel, _, options = CASES[name]
    n = len(x) if options.get("op") == "mean" else 1
    bound = functools.partial(error_bound, dtype=options.get("dtype", "int8"), stochastic="key" in options)
    largest = float(jnp.abs(x).max())
    if kernel == "quantized_all_gather":
        return bound(largest)
    total = num_terms * bound(largest)
    if num_nodes > 1:  # the sums of each node, including their errors, are quantized
        total += num_nodes * bound(num_terms / num_nodes * (largest + bound(largest)))
    if kernel == "quantized_all_reduce":
        total += bound(float(jnp.abs(expected).max()) * n + total)
    return total / n


@pytest.mark.parametrize(
    ("counts", "name"),
    grid.cases(
        *[((2, 3), name) for name in cases_of((2, 3))],
        grid=[(counts, name) for counts in COUNTS for name in cases_of(counts)],
    ),
)
def test_matches_reference_within_the_bound(outcomes, name, counts):
    check(outcomes(*counts), name, counts)


@pytest.mark.parametrize("num_outer", grid.cases(1, grid=[0, 1]))
def test_axes_in_another_order_than_the_mesh(out_of_order, num_outer):
    """XLA's own collectives number ranks in the order in which the axes are named."""
    row = out_of_order
    inner, outer = row.axis[num_outer:], row.axis[:num_outer]
    names = ("gather", "scatter", "reduce")
    arrays = {name: normal(row.count, *CASES[name][1](row.count)) for name in names}
    pairs = {name: case(name, axis=inner, outer=outer or None) for name in names}
    outcome = (
        jax.jit(lambda: {n: with_gradient(row.view(pairs[n][0]), x) for n, x in arrays.items()})(),
        jax.jit(lambda: {n: with_gradient(pairs[n][1], x) for n, x in arrays.items()})(),
        arrays,
    )
    sizes = dict(row.mesh.shape)
    num_nodes = int(np.prod([sizes[axis] for axis in outer], dtype=int))
    for name in names:
        check(outcome, name, (num_nodes, row.count // num_nodes))


def check(outcome, name, counts):
    actual, expected, arrays = outcome
    num_ranks, num_nodes = int(np.prod(counts)), counts[0] if len(counts) == 2 else 1
    atol = bound_of(name, arrays[name], expected[name][0], num_ranks, num_nodes)
    np.testing.assert_allclose(actual[name][0], expected[name][0], rtol=1e-5, atol=atol)
    if num_ranks == 1:
        np.testing.assert_array_equal(*(jnp.asarray(side[name][0]) for side in (actual, expected)))
    # The cotangents are at most 1. Without `grad_dtype` only the order of sums differs (straight through).
    quantized = "grad_dtype" in CASES[name][2]
    atol = num_ranks * 3 * error_bound(1.0, dtype="fp8") + num_ranks**2 / 28 if quantized else 1e-5
    np.testing.assert_allclose(actual[name][1], expected[name][1], rtol=1e-5, atol=atol)
    if quantized and num_ranks > 1:
        assert (actual[name][1] != expected[name][1]).any()


def test_gradients_have_the_block_size_of_the_values(ranks):
    """The gradient of each kernel is the value of another kernel, here with blocks of four."""
    options = {"axis": "x", "block": 4}
    pairs = {
        mc.quantized_all_gather: mc.quantized_reduce_scatter,
        mc.quantized_reduce_scatter: mc.quantized_all_gather,
        mc.quantized_all_reduce: mc.quantized_all_reduce,
    }

    def both(x):
        results = []
        for kernel, backward in pairs.items():
            value, pull = jax.vjp(functools.partial(kernel, grad_dtype="int8", **options), x)
            results.append((pull(value)[0], backward(value, dtype="int8", **options)))
        return results

    for gradient, expected in jax.jit(ranks(2).view(both))(normal(2, 4, 9)):
        np.testing.assert_array_equal(gradient, expected)


def test_all_ranks_get_the_same_bits(ranks):
    row, parts = ranks(outer=2, inner=3), normal(6, 5, 9)
    for axes in ({"axis": ("outer", "inner")}, {"axis": "inner", "outer": "outer"}):
        gather = functools.partial(mc.quantized_all_gather, tiled=False, **axes)
        actual = jax.jit(row.view(gather))(parts)
        expected = jnp.stack([round_trip(part) for part in parts])
        np.testing.assert_array_equal(actual, jnp.broadcast_to(expected, (6, *expected.shape)))


@pytest.mark.parametrize("name", grid.cases("quantized_all_reduce", grid=KERNELS))
def test_under_vmap_scan_and_without_elements(ranks, name):
    kernel = functools.partial(getattr(mc, name), axis="x")

    def many(x):
        scanned = jax.lax.scan(lambda carry, row: (carry, kernel(row)), 0, x)[1]
        return jax.vmap(kernel)(x), scanned, jnp.stack([kernel(row) for row in x]), kernel(x[0, :, :0])

    by_vmap, scanned, sequential, empty = jax.jit(ranks(3).view(many))(normal(3, 2, 6, 3))
    np.testing.assert_array_equal(scanned, sequential)
    np.testing.assert_array_equal(by_vmap, sequential)
    assert empty.size == 0


@pytest.mark.parametrize("dtype", grid.cases("bfloat16", grid=["bfloat16", "float32"]))
@pytest.mark.usefixtures("strict")
def test_dtype_is_preserved(ranks, dtype):
    for name, (_, shape, _) in CASES.items():
        kernel, plain = case(name, axis="x")
        parts = jax.ShapeDtypeStruct((3, *shape(3)), dtype)
        view = ranks(3).view(kernel)
        y = jax.eval_shape(lambda x, f=view: jax.vjp(f, x)[0], parts)
        assert (y.shape, y.dtype) == (jax.eval_shape(plain, parts).shape, parts.dtype)


def sent(collectives):
    """Return {(kind, axes): bytes}."""
    keys = {(c.kind, c.axes) for c in collectives}
    return {key: sum(c.bytes_sent_per_step for c in collectives if (c.kind, c.axes) == key) for key in keys}


ELEMENTS = 840 * 2


@pytest.mark.parametrize("count", grid.cases(3, grid=[2, 3, 7, 8]))
def test_bytes_match_closed_forms(ranks, count):
    def kernels(x):
        return (
            mc.quantized_all_gather(x, axis="x", dtype="fp8"),
            mc.quantized_reduce_scatter(x, axis="x"),
            mc.quantized_all_reduce(x, axis="x", block=100),
        )

    collectives = ranks(count).sent(kernels, (ELEMENTS,))
    gather, scatter = cost.quantized_all_gather(count * ELEMENTS, count), cost.quantized_reduce_scatter(ELEMENTS, count)
    both = cost.quantized_all_reduce(ELEMENTS, count, block=100)
    half = both.inside.bytes_sent / 2
    assert sent(collectives) == {
        ("all-gather", ("x",)): gather.inside.bytes_sent + half,
        ("all-to-all", ("x",)): scatter.inside.bytes_sent + half,
    }
    assert {array.dtype for c in collectives for array in c.arrays} == {"u8"}


@pytest.mark.parametrize(("outer", "inner"), grid.cases((2, 3), grid=[(2, 3), (4, 2)]))
def test_two_levels_send_less_across_nodes(ranks, outer, inner):
    kernel = functools.partial(mc.quantized_all_reduce, axis="inner", outer="outer")
    actual = sent(ranks(outer=outer, inner=inner).sent(kernel, (ELEMENTS,)))
    expected = cost.quantized_all_reduce(ELEMENTS, outer * inner, inner=inner)
    for axis, part in (("inner", expected.inside), ("outer", expected.across)):
        assert sum(bytes_sent for (_, axes), bytes_sent in actual.items() if axes == (axis,)) == part.bytes_sent
        assert part.bytes_sent > 0
    flat = cost.quantized_all_reduce(ELEMENTS, outer * inner)
    assert expected.across.bytes_sent < flat.inside.bytes_sent / inner


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "options", "code"),
    [
        (KERNELS, {"dtype": "int4"}, "unknown-choice"),
        (KERNELS, {"grad_dtype": "int16"}, "unknown-choice"),
        (KERNELS, {"block": 0}, "not-an-int"),
        (KERNELS, {"axis": "y"}, "unknown-axis"),
        (KERNELS, {"outer": "x"}, "axis-used-twice"),
        (KERNELS, {"x": "int32"}, "wrong-dtype"),
        (KERNELS[1:], {"op": "max"}, "unknown-choice"),
        (KERNELS[1:2], {"dim": 1}, "indivisible"),
    ],
)
def test_kernels_check_their_arguments(ranks, names, options, code):
    dtype = options.get("x", "float32")
    options = {"axis": "x", **{name: value for name, value in options.items() if name != "x"}}
    for name in names:
        with raises(code, name):
            jax.eval_shape(ranks(2).view(functools.partial(getattr(mc, name), **options)), jnp.zeros((2, 4, 5), dtype))


def test_blocks_and_sizes_are_checked():
    with raises("unknown-axis", "quantized_all_gather"):
        mc.quantized_all_gather(jnp.zeros(4), axis="x")
    with raises("wrong-shape", "dequantize"):
        mc.dequantize(mc.quantize(normal(10)), shape=(11,))
    with raises("wrong-dtype", "quantize"):
        mc.quantize([1, 2])
    with pytest.raises(ValueError, match="groups of 3"):
        cost.quantized_all_gather(100, 8, inner=3)


@pytest.mark.parametrize("kernel", ["gather", "scatter", "scatter in two levels", "reduce"])
def test_ranks_round_with_independent_draws(ranks, kernel):
    """With the same draws on all ranks, the errors of a sum would not cancel."""
    row = ranks(outer=2, inner=2) if kernel == "scatter in two levels" else ranks(4)
    axes = {"axis": "inner", "outer": "outer"} if kernel == "scatter in two levels" else {"axis": "x"}
    options = {**axes, "key": jax.random.key(0), "block": 4096}
    # Each block has a scale of 1, so 2.5 is rounded up or down at random.
    x = jnp.full((4, 4096), 2.5).at[:, ::1024].set(127.0)
    if kernel == "gather":
        parts = jax.jit(row.view(lambda x: mc.quantized_all_gather(x, tiled=False, **options)))(x)[0]
        assert {tuple(np.unique(part)) for part in np.asarray(parts)} == {(2.0, 3.0, 127.0)}
        assert all((a != b).any() for a, b in itertools.combinations(np.asarray(parts), 2))
        return
    run = mc.quantized_all_reduce if kernel == "reduce" else mc.quantized_reduce_scatter
    total = np.asarray(jax.jit(row.view(lambda x: run(x, **options)))(x))
    total = total[total < 400]
    # The sum of four independent errors of 0.5 has a standard deviation of 1; with equal draws it would be 2. The sums
    # of a node, or of all ranks, are rounded again, to steps of at most 508 / 127.
    limit = {"scatter": 1.1, "scatter in two levels": 1.8, "reduce": 2.4}[kernel]
    assert abs(total.mean() - 10) < 0.2
    assert 0.9 < total.std() < limit
