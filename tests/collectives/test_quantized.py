"""Quantized collectives: each element within the stated bound, what is not finite visible, bytes as the closed form."""

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
from meshpar.sharding.types import MeshparError
from tests import grid

DTYPES = ["int8", "fp8"]
COUNTS = [(1,), (2,), (3,), (8,), (2, 3), (2, 1)]
LARGEST = float(np.finfo("float32").max)


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@functools.partial(jax.jit, static_argnames=("dtype", "block"))
def there_and_back(x, **options):
    return mc.dequantize(mc.quantize(x, **options), shape=x.shape, dtype=x.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# One array
# ---------------------------------------------------------------------------------------------------------------------

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
def test_every_element_is_within_the_bound(dtype, block, stochastic):
    for name, x in HARD.items():
        key = jax.random.key(1) if stochastic else None
        found = np.asarray(there_and_back(x, dtype=dtype, block=block, key=key), "float64")
        width = -(-x.size // -(-x.size // block))
        blocks = np.pad(np.abs(np.asarray(x, "float64")), (0, -x.size % width)).reshape(-1, width)
        largest = np.repeat(blocks.max(1), width)[: x.size]
        bound = error_bound(largest, dtype=dtype, stochastic=stochastic)
        assert (np.abs(found - np.asarray(x, "float64")) <= bound).all(), name


EDGES = [2.0**-e for e in range(110, 128)] + [
    limit * 2.0**-126 * (1 + off) for limit in (127.0, 448.0) for off in (-(2.0**-20), 0.0, 2.0**-20)
]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_blocks_are_within_the_bound(dtype, stochastic):
    key = jax.random.key(2) if stochastic else None
    shape = np.concatenate([[1.0, -1.0, 0.0], np.geomspace(2.0**-20, 1.0, 61)])
    for largest in EDGES:
        x = (largest * shape).astype("float32")
        found = np.asarray(there_and_back(jnp.asarray(x), dtype=dtype, block=64, key=key), "float64")
        bound = error_bound(largest, dtype=dtype, stochastic=stochastic)
        assert (np.abs(found - x.astype("float64")) <= bound).all(), largest
        if largest >= 2.0**-123:  # not one that is zeros throughout
            assert found.max() >= largest / 2, largest
    assert error_bound(2.0**-126, dtype=dtype) < 2.0**-125


@pytest.mark.parametrize(("stochastic", "relative", "least"), [(False, 1 / 16, 2.0**-18), (True, 1 / 8, 2.0**-17)])
def test_fp8_moves_small_elements_no_further_than_it_says(stochastic, relative, least):
    x = jnp.asarray([448.0, 2.0**-10, 3 * 2.0**-10, *np.geomspace(2.0**-12, 448.0, 997)], "float32")
    key = jax.random.key(3) if stochastic else None
    error = jnp.abs(there_and_back(x, dtype="fp8", block=1000, key=key) - x)
    assert (error <= jnp.maximum(x * relative, 448 * least) + 448 * 2.0**-21).all()


def test_fp8_keeps_small_elements_beside_a_large_one():
    x = jnp.asarray([448.0, *np.geomspace(2.0**-6, 400.0, 200)], "float32")
    error = jnp.abs(there_and_back(x, dtype="fp8") - x)
    assert (error <= x / 16 + 1e-6).all()
    assert (jnp.abs(there_and_back(x, dtype="int8") - x) > x / 16 + 1e-6).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_in_the_format_is_exact(dtype):
    values = jnp.arange(-127.0, 128.0) if dtype == "int8" else jnp.asarray([448.0, -416, 15, 0.875, 2.0**-6, 2.0**-9])
    np.testing.assert_array_equal(there_and_back(values, dtype=dtype), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_shows_in_its_block_and_in_no_other(dtype, bad):
    found = there_and_back(normal(30).at[13].set(bad), dtype=dtype, block=10, key=jax.random.key(0))
    assert np.isnan(found[10:20]).all()
    assert np.isfinite(found[:10]).all()
    assert np.isfinite(found[20:]).all()


@pytest.mark.parametrize("dtype", grid.cases("fp8", grid=DTYPES))
def test_stochastic_rounding_is_right_in_the_mean(dtype):
    x, draws = jnp.asarray([100.0, 0.1, -0.3, 7.7, 33.3, -61.0]), 4000
    keys = jax.random.split(jax.random.key(0), draws)
    many = jax.vmap(lambda key: there_and_back(x, dtype=dtype, key=key))(keys)
    off = jnp.abs(many.mean(0) - x)
    # Five standard errors of a value that jumps between the two neighbours it was seen at; and the mean's own rounding.
    most = 5 * (many.max(0) - many.min(0)) / 2 / np.sqrt(draws) + 1e-6 * jnp.abs(x)
    assert (off <= most).all()
    assert (jnp.abs(there_and_back(x, dtype=dtype) - x) > most).any()


def test_blocks_share_scales_and_are_of_one_size():
    found = mc.quantize(normal(20, 30), block=256)
    assert found.values.shape == (3, 200)
    assert found.values.dtype == jnp.int8
    assert found.scales.dtype == jnp.float32


SIZES = [(0, 256), (1, 256), (300, 256), (513, 256), (10, 1), (10, 3)]


@pytest.mark.parametrize(("size", "block"), grid.cases((513, 256), grid=SIZES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_message_is_as_long_as_the_closed_form(dtype, size, block):
    x = normal(2, size)
    message = jax.jit(encoded, static_argnums=(1, 2, 3))(x, dtype, block, None)
    assert message.shape == (2, cost.quantized_bytes(size, block=block))
    expected = jnp.stack([there_and_back(row, dtype=dtype, block=block) for row in x])
    found = jax.jit(decoded, static_argnums=(1, 2, 3))(message, size, dtype, block)
    np.testing.assert_array_equal(found, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


def whole(n):
    return (5, 9)


def divisible(n):
    return (2, 3 * n)


def per_rank(n):
    return (3, n)


CASES = {
    "gather": ("quantized_all_gather", whole, {"dim": 1}),
    "gather stacked": ("quantized_all_gather", whole, {"dim": -1, "tiled": False, "dtype": "fp8"}),
    "gather, at random": ("quantized_all_gather", whole, {"key": True, "block": 4}),
    "gather, gradient too": ("quantized_all_gather", whole, {"grad_dtype": "int8"}),
    "scatter": ("quantized_reduce_scatter", divisible, {"dim": 1}),
    "scatter stacked": ("quantized_reduce_scatter", per_rank, {"dim": -1, "tiled": False, "dtype": "fp8"}),
    "scatter mean, at random": ("quantized_reduce_scatter", divisible, {"dim": 1, "op": "mean", "key": True}),
    "scatter, gradient too": ("quantized_reduce_scatter", divisible, {"dim": 1, "grad_dtype": "int8"}),
    "reduce": ("quantized_all_reduce", whole, {"block": 4}),
    "reduce mean, at random": ("quantized_all_reduce", whole, {"op": "mean", "key": True, "dtype": "fp8"}),
    "reduce, gradient too": ("quantized_all_reduce", whole, {"grad_dtype": "fp8"}),
}
WHAT = ("dim", "tiled", "op")
KERNELS = "quantized_all_gather", "quantized_reduce_scatter", "quantized_all_reduce"


AT_RANDOM = [name for name in CASES if "random" in name]
"""Drawing bits takes long to compile: these run on 3 ranks, and on 2 nodes of 3."""


def cases_of(counts):
    return [name for name in CASES if name not in AT_RANDOM or counts in [(3,), (2, 3)]]


def case(name, **axes):
    """(kernel, reference)"""
    kernel, _, options = CASES[name]
    options = {**options, **({"key": jax.random.key(0)} if "key" in options else {})}
    what = {k: v for k, v in options.items() if k in WHAT}
    return functools.partial(getattr(mc, kernel), **axes, **options), functools.partial(
        getattr(reference, kernel), **what
    )


def with_gradient(f, x):
    y, pull = jax.vjp(f, x)
    return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))[0]


@pytest.fixture(scope="module")
def outcomes(ranks):
    """(found, expected): value and gradient of every case, in one program for each layout of ranks."""

    @functools.cache
    def run(*counts):
        row = ranks(counts[0]) if len(counts) == 1 else ranks(outer=counts[0], inner=counts[1])
        axes = {"axis": "x"} if len(counts) == 1 else {"axis": "inner", "outer": "outer"}
        arrays = {name: normal(row.count, *CASES[name][1](row.count)) for name in cases_of(counts)}
        sides = [{name: case(name, **axes)[side] for name in arrays} for side in (0, 1)]
        found = jax.jit(lambda: {n: with_gradient(row.view(sides[0][n]), x) for n, x in arrays.items()})()
        expected = jax.jit(lambda: {n: with_gradient(sides[1][n], x) for n, x in arrays.items()})()
        return found, expected, arrays

    return run


def bound_of(name, x, expected, num_terms, num_nodes):
    """What the docstrings state, with the largest of the array for that of each block."""
    kernel, _, options = CASES[name]
    n = len(x) if options.get("op") == "mean" else 1
    bound = functools.partial(error_bound, dtype=options.get("dtype", "int8"), stochastic="key" in options)
    largest = float(jnp.abs(x).max())
    if kernel == "quantized_all_gather":
        return bound(largest)
    total = num_terms * bound(largest)
    if num_nodes > 1:  # sums of each node, with the errors they have
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
def test_value_and_gradient_are_the_references_within_the_bound(outcomes, name, counts):
    check(outcomes(*counts), name, counts)


@pytest.mark.parametrize("num_outer", grid.cases(1, grid=[0, 1]))
def test_axes_out_of_the_order_of_the_mesh(out_of_order, num_outer):
    """Nothing is sent by permutes: XLA's own collectives count ranks as the axes are named."""
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
    found, expected, arrays = outcome
    num_ranks, num_nodes = int(np.prod(counts)), counts[0] if len(counts) == 2 else 1
    atol = bound_of(name, arrays[name], expected[name][0], num_ranks, num_nodes)
    np.testing.assert_allclose(found[name][0], expected[name][0], rtol=1e-5, atol=atol)
    if num_ranks == 1:
        np.testing.assert_array_equal(*(jnp.asarray(side[name][0]) for side in (found, expected)))
    # The cotangents are at most 1. Straight through: without `grad_dtype` nothing but the order of sums differs.
    quantized = "grad_dtype" in CASES[name][2]
    atol = num_ranks * 3 * error_bound(1.0, dtype="fp8") + num_ranks**2 / 28 if quantized else 1e-5
    np.testing.assert_allclose(found[name][1], expected[name][1], rtol=1e-5, atol=atol)
    if quantized and num_ranks > 1:
        assert (found[name][1] != expected[name][1]).any()


def test_all_ranks_get_the_same_bits_their_own_part_too(ranks):
    row, parts = ranks(outer=2, inner=3), normal(6, 5, 9)
    for axes in ({"axis": ("outer", "inner")}, {"axis": "inner", "outer": "outer"}):
        gather = functools.partial(mc.quantized_all_gather, tiled=False, **axes)
        found = jax.jit(row.view(gather))(parts)
        expected = jnp.stack([there_and_back(part) for part in parts])
        np.testing.assert_array_equal(found, jnp.broadcast_to(expected, (6, *expected.shape)))


def test_ranks_round_independently(ranks):
    """With one key for all, the error of a sum of equal terms would be N times that of one."""
    same = jnp.broadcast_to(normal(64), (8, 64)).at[:, 0].set(100.0)
    scatter = functools.partial(mc.quantized_reduce_scatter, axis="x", key=jax.random.key(0))
    error = jnp.abs(jax.jit(ranks(8).view(scatter))(same).reshape(-1) - 8 * same[0])
    assert error.mean() < 0.5 * 8 * jnp.abs(there_and_back(same[0], key=jax.random.key(0)) - same[0]).mean()


@pytest.mark.parametrize("name", grid.cases("quantized_all_reduce", grid=KERNELS))
def test_under_vmap_and_in_a_scan_and_without_elements(ranks, name):
    kernel = functools.partial(getattr(mc, name), axis="x")

    def many(x):
        scanned = jax.lax.scan(lambda carry, row: (carry, kernel(row)), 0, x)[1]
        return jax.vmap(kernel)(x), scanned, jnp.stack([kernel(row) for row in x]), kernel(x[0, :, :0])

    by_vmap, scanned, one_by_one, empty = jax.jit(ranks(3).view(many))(normal(3, 2, 6, 3))
    np.testing.assert_array_equal(scanned, one_by_one)
    np.testing.assert_array_equal(by_vmap, one_by_one)
    assert empty.size == 0


@pytest.mark.parametrize("dtype", grid.cases("bfloat16", grid=["bfloat16", "float32"]))
@pytest.mark.usefixtures("strict")
def test_the_dtype_stays_and_nothing_is_promoted_silently(ranks, dtype):
    for name, (_, shape, _) in CASES.items():
        kernel, plain = case(name, axis="x")
        parts = jax.ShapeDtypeStruct((3, *shape(3)), dtype)
        view = ranks(3).view(kernel)
        found = jax.eval_shape(lambda x, f=view: jax.vjp(f, x)[0], parts)
        assert (found.shape, found.dtype) == (jax.eval_shape(plain, parts).shape, parts.dtype)


def sent(found):
    """{(kind, axes): bytes}"""
    keys = {(one.kind, one.axes) for one in found}
    return {key: sum(one.bytes_sent_per_step for one in found if (one.kind, one.axes) == key) for key in keys}


ELEMENTS = 840 * 2


@pytest.mark.parametrize("count", grid.cases(3, grid=[2, 3, 7, 8]))
def test_the_wire_carries_what_the_closed_form_says(ranks, count):
    """Bytes, and a sum of all three kernels in one program: each collective stands for itself."""

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
    assert {array.dtype for one in collectives for array in one.arrays} == {"u8"}


@pytest.mark.parametrize(("outer", "inner"), grid.cases((2, 3), grid=[(2, 3), (4, 2)]))
def test_two_levels_send_a_part_across(ranks, outer, inner):
    kernel = functools.partial(mc.quantized_all_reduce, axis="inner", outer="outer")
    found = sent(ranks(outer=outer, inner=inner).sent(kernel, (ELEMENTS,)))
    expected = cost.quantized_all_reduce(ELEMENTS, outer * inner, inner=inner)
    for axis, part in (("inner", expected.inside), ("outer", expected.across)):
        assert sum(bytes_sent for (_, axes), bytes_sent in found.items() if axes == (axis,)) == part.bytes_sent
        assert part.bytes_sent > 0
    flat = cost.quantized_all_reduce(ELEMENTS, outer * inner)
    assert expected.across.bytes_sent < flat.inside.bytes_sent / inner


def test_a_quarter_of_float32_and_half_of_bfloat16(ranks):
    n = 2**16
    plain, few = cost.ring_all_gather(4 * n, 8), cost.quantized_all_gather(n, 8).inside
    assert few.bytes_sent / plain.bytes_sent == 0.25 * (1 + 4 / 256)


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int4"}, "dtype='int4'.*`int8`, `fp8`"),
        ({"grad_dtype": "int16"}, "grad_dtype='int16'"),
        ({"block": 0}, "block=0"),
        ({"axis": "y"}, "mesh axis `y`"),
        ({"outer": "x"}, "either inside the nodes or across"),
    ],
)
@pytest.mark.parametrize("name", KERNELS)
def test_mistakes_are_told(ranks, name, wrong, message):
    kernel = functools.partial(getattr(mc, name), **{"axis": "x", **wrong})
    with pytest.raises(MeshparError, match=f"{name}: .*{message}"):
        jax.eval_shape(ranks(2).view(kernel), jnp.zeros((2, 4)))


def test_what_holds_no_floats_is_not_quantized(ranks):
    with pytest.raises(MeshparError, match="quantize int32"):
        jax.eval_shape(ranks(2).view(functools.partial(mc.quantized_all_gather, axis="x")), jnp.zeros((2, 4), "int32"))
    with pytest.raises(MeshparError, match="op='max'"):
        mc.quantized_all_reduce(jnp.zeros(4), axis="x", op="max")
    with pytest.raises(MeshparError, match="not inside a `jax.shard_map`"):
        mc.quantized_all_gather(jnp.zeros(4), axis="x")


def test_a_scatter_divides(ranks):
    kernel = functools.partial(mc.quantized_reduce_scatter, axis="x")
    with pytest.raises(MeshparError, match="cut dim 0 of size 5 into 2"):
        jax.eval_shape(ranks(2).view(kernel), jnp.zeros((2, 5)))


def test_an_array_comes_back_in_its_own_shape():
    with pytest.raises(MeshparError, match="Give the shape of the array that was quantized"):
        mc.dequantize(mc.quantize(normal(10)), shape=(11,))


def test_the_account_wants_groups_that_divide():
    with pytest.raises(MeshparError, match="groups of 3 out of 8"):
        cost.quantized_all_gather(100, 8, inner=3)
    with pytest.raises(MeshparError, match="-1 elements"):
        cost.quantized_bytes(-1)


@pytest.mark.matrix
def test_numbers_that_are_no_jax_array():
    found = mc.quantize([1.0, -2.0, 0.5])
    np.testing.assert_allclose(mc.dequantize(found, shape=(3,)), [1.0, -2.0, 0.5], atol=float(error_bound(2.0)))
    with pytest.raises(MeshparError, match="quantize int32"):
        mc.quantize([1, 2])


@pytest.mark.parametrize("kernel", ["gather", "scatter", "scatter in two levels", "reduce"])
def test_ranks_round_equal_numbers_by_draws_of_their_own(ranks, kernel):
    """With the same draws on all ranks, the errors of a sum would add up instead of cancelling."""
    row = ranks(outer=2, inner=2) if kernel == "scatter in two levels" else ranks(4)
    axes = {"axis": "inner", "outer": "outer"} if kernel == "scatter in two levels" else {"axis": "x"}
    options = {**axes, "key": jax.random.key(0), "block": 4096}
    # Each block has a scale of one, and half of a step is left to the draws.
    x = jnp.full((4, 4096), 2.5).at[:, ::1024].set(127.0)
    if kernel == "gather":
        parts = jax.jit(row.view(lambda x: mc.quantized_all_gather(x, tiled=False, **options)))(x)[0]
        assert {tuple(np.unique(one)) for one in np.asarray(parts)} == {(2.0, 3.0, 127.0)}
        assert all((a != b).any() for a, b in itertools.combinations(np.asarray(parts), 2))
        return
    run = mc.quantized_all_reduce if kernel == "reduce" else mc.quantized_reduce_scatter
    total = np.asarray(jax.jit(row.view(lambda x: run(x, **options)))(x))
    total = total[total < 400]
    # Four draws of half a step, each off by 0.5: a standard deviation of 1, and with the same draws of 2. The sums of
    # a node, or of all ranks, are rounded once more, to steps of at most 508 / 127.
    most = {"scatter": 1.1, "scatter in two levels": 1.8, "reduce": 2.4}[kernel]
    assert abs(total.mean() - 10) < 0.2
    assert 0.9 < total.std() < most
