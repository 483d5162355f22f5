"""Value and gradient of all kernels against their references."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from meshpar import collectives as mc
from meshpar.collectives import reference, ring
from meshpar.collectives.reduction import ALGORITHMS
from tests.collectives.gradients import with_gradient
from tests.grid import cases


class Case(NamedTuple):
    kernel: Callable
    reference: Callable
    shapes: Callable[[int], Any]
    """Local shapes for a number of ranks: a shape, or a list or dict of shapes."""
    has_levels: bool = False
    """Whether the kernel has an axis within nodes and one across nodes."""
    values: tuple[int, int] = (40, 3)
    """Largest integer of the arrays, and a factor. Sums are exact in float32, but not in bfloat16, and have ties."""
    atol: float = 1e-6
    """Tolerance of gradients."""


def case(name, shapes, **options):
    """Return a kernel and the reference of the same name, which has no options of the algorithm."""
    shared = {k: v for k, v in options.items() if k not in ("algorithm", "channels", "num_servers")}
    reference_name = name.removeprefix("hierarchical_")
    return Case(
        functools.partial(getattr(mc, name), **options),
        functools.partial(getattr(reference, reference_name), **shared),
        shapes, has_levels=reference_name != name,
    )  # fmt: skip


def matmul(name, shapes, *, num_weights=1, **options):
    """Return an overlapped matmul of a list of operands: rows, then weights."""

    def kernel(operands, **axes):
        rows, *weights = operands
        return getattr(mc, name)(rows, weights[0] if num_weights == 1 else tuple(weights), **axes, **options)

    def plain(operands):
        products = tuple(getattr(reference, name)(operands[0], weight, **options) for weight in operands[1:])
        return products[0] if num_weights == 1 else products

    # Gradients are sums of up to 100 products with cosines, in float32.
    return Case(kernel, plain, shapes, values=(5, 1), atol=1e-4)


def any_shape(n):
    return (5, 3)


def divisible(n):
    return (2, 3 * n)


def per_rank(n):
    return (3, n)


def gradients(n):
    return {"w": (4, 6), "none": (0,), "scale": (), "layers": [(12,)] * 3}


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
    "to_zigzag": case("to_zigzag", lambda n: (2, 6, 3)),
    "from_zigzag": case("from_zigzag", lambda n: (2, 6, 3), dim=1),
    "buckets": Case(
        functools.partial(mc.bucketed_all_reduce, op="mean", bucket_bytes=100),
        functools.partial(jax.tree.map, functools.partial(reference.all_reduce, op="mean")), gradients,
    ),
    "gather_matmul": matmul("all_gather_matmul", lambda n: [(3, 5), (5, 4)]),
    "gather_matmul, one row": matmul("all_gather_matmul", lambda n: [(1, 5), (5, 4)]),
    "gather_matmul, two weights": matmul(
        "all_gather_matmul", lambda n: [(2, 3, 5), (5, 4), (5, 2, 3)], num_weights=2, dim=0
    ),
    "matmul_scatter": matmul("matmul_reduce_scatter", lambda n: [(2, 3 * n, 4), (4, 5)]),
    "matmul_scatter, one row": matmul("matmul_reduce_scatter", lambda n: [(n, 4), (4, 5)]),
    "matmul_scatter, two contracted": matmul(
        "matmul_reduce_scatter", lambda n: [(2 * n, 3, 2, 2), (2, 2, 5)], dim=0
    ),
    **{f"levels {op}": case("hierarchical_all_reduce", any_shape, op=op) for op in ("sum", "mean", "max")},
    "levels exchange": case("hierarchical_all_to_all", lambda n: (2, n), split_dim=1),
    "levels exchange stacked": case("hierarchical_all_to_all", lambda n: (2, n), split_dim=1, tiled=False),
}  # fmt: skip
POWER_OF_TWO = {
    "all_gather doubling": case("all_gather", any_shape, algorithm="recursive_doubling"),
    "reduce_scatter halving": case("reduce_scatter", divisible, dim=1, algorithm="recursive_halving"),
}
EACH_MOTION = (
    "shift back", "reduce max", "gather", "all_gather, rings", "reduce_scatter", "all_to_all", "all_reduce tree",
    "to_zigzag", "from_zigzag", "buckets", "gather_matmul", "matmul_scatter", "levels sum", "levels exchange",
)  # fmt: skip


def arrays_of(shapes, count, dtype="float32", values=(40, 3)):
    """Return integers of all ranks for local shapes."""
    largest, factor = values

    def draw(shape):
        integers = np.random.default_rng(len(shape)).integers(-largest, largest, (count, *shape))
        return (integers * factor).astype(jnp.dtype(dtype))

    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def run(row, names, dtype="float32", *, apply=with_gradient, table=CASES, check_vma=True):
    """Return the results of kernels and of their references by name, computed in a program per 16 kernels."""
    chosen = {name: table[name] for name in names if len(row.axis) > 1 or not table[name].has_levels}
    arrays = {name: arrays_of(case.shapes(row.count), row.count, dtype, case.values) for name, case in chosen.items()}

    def view(case):
        axes = {"axis": row.axis if len(row.axis) > 1 else row.axis[0]}
        axes = {"outer": row.axis[:1], "inner": row.axis[1:]} if case.has_levels else axes
        return row.view(functools.partial(case.kernel, **axes), check_vma=check_vma)

    def results(use, names):
        return jax.block_until_ready(jax.jit(lambda: {n: apply(use(chosen[n]), arrays[n]) for n in names})())

    actual, expected, names = {}, {}, list(chosen)
    for first in range(0, len(names), 16):
        actual |= results(view, names[first : first + 16])
        expected |= results(lambda case: case.reference, names[first : first + 16])
    return actual, expected


def assert_same(actual, expected):
    for name, (value, gradient) in expected.items():
        # Sums of integers are exact; a mean is rounded once or twice.
        rtol = 1e-6 if "mean" in name or name == "buckets" else 0
        close = functools.partial(np.testing.assert_allclose, err_msg=name)
        jax.tree.map(functools.partial(close, rtol=rtol), actual[name][0], value)
        atol = {**CASES, **POWER_OF_TWO}[name].atol
        jax.tree.map(functools.partial(close, rtol=1e-5, atol=atol), actual[name][1], gradient)


LEVELS = [name for name in CASES if name.startswith("levels")]


@pytest.mark.parametrize("count", cases(3, grid=[1, 2, 3, 5, 8]))
def test_kernels_match_references(ranks, count):
    assert_same(*run(ranks(count), CASES))


@pytest.mark.parametrize(("outer", "inner"), cases((2, 3), grid=[(1, 3), (2, 3), (4, 2), (2, 1)]))
def test_kernels_over_several_axes_match_references(ranks, outer, inner):
    assert_same(*run(ranks(outer=outer, inner=inner), [*LEVELS, "all_gather"]))


@pytest.mark.parametrize(
    "names", [EACH_MOTION, pytest.param((*CASES, *POWER_OF_TWO), marks=pytest.mark.matrix)], ids=["few", "all"]
)
def test_axes_in_another_order_than_the_mesh(out_of_order, names):
    table = {**CASES, **(POWER_OF_TWO if out_of_order.count & (out_of_order.count - 1) == 0 else {})}
    assert_same(*run(out_of_order, [name for name in names if name in table], table=table))


@pytest.mark.parametrize(
    ("dtype", "count", "names"),
    cases(
        grid=[("bfloat16", 5, EACH_MOTION), ("bfloat16", 5, CASES), ("int32", 6, CASES), ("int32", 7, CASES)],
    ),
    ids=lambda x: x if isinstance(x, str) else len(x) if isinstance(x, tuple | dict) else str(x),
)
def test_other_dtypes_are_kept(ranks, dtype, count, names):
    is_kept = {name: dtype != "int32" or not ("mean" in name or name == "buckets") for name in CASES}
    names = [name for name in names if is_kept.get(name)]
    actual, expected = run(ranks(count), names, dtype, apply=lambda f, x: f(x))
    for name, exact_tree in expected.items():
        atol = 0.0
        if dtype == "bfloat16" and "reduce" in name and not ("max" in name or "min" in name):
            atol = 4 * 5 * 120 / 256  # four additions, each rounded to 2^-8 of sums up to 5 * 120
        if dtype == "bfloat16" and ("matmul" in name or name == "buckets"):
            atol = 4.0  # integers up to 512 are rounded to even integers, at most twice
        for y, exact in zip(*map(jax.tree.leaves, (actual[name], exact_tree)), strict=True):
            assert y.dtype == jnp.dtype(dtype), name
            y, exact = (np.asarray(z, np.float64) for z in (y, exact))
            np.testing.assert_allclose(y, exact, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("root", cases(4, grid=[1, 4]))
@pytest.mark.parametrize("name", ["broadcast", "reduce max", "scatter", "gather"])
def test_any_rank_can_be_the_root(ranks, name, root):
    case = CASES[name]
    parts = arrays_of(case.shapes(5), 5)
    actual = jax.jit(ranks(5).view(functools.partial(case.kernel, axis="x", root=root)))(parts)
    np.testing.assert_array_equal(actual, case.reference(parts, root=root))


@pytest.mark.parametrize("dtype", cases("bfloat16", grid=["bfloat16", "float32"]))
@pytest.mark.usefixtures("strict")
def test_no_implicit_promotion_or_broadcast(ranks, dtype):
    for name, case in CASES.items():
        if case.has_levels:
            continue
        arrays = arrays_of(case.shapes(5), 5, dtype)
        view = ranks(5).view(functools.partial(case.kernel, axis="x"))
        actual = jax.eval_shape(functools.partial(with_gradient, view), arrays)
        expected = jax.eval_shape(case.reference, arrays), arrays
        assert jax.tree.map(lambda x: (x.shape, jnp.dtype(dtype)), expected) == jax.tree.map(
            lambda x: (x.shape, x.dtype), actual
        ), name


# ---- Transforms ------------------------------------------------------------------------------------------------------


def batched(f, x):
    return jax.vmap(f, -1, -1)(jax.tree.map(lambda a: jnp.stack([a, -a, 2 * a], axis=-1), x))


def scanned(f, x):
    def body(total, scale):
        y, gradient = with_gradient(f, jax.tree.map(lambda a: scale * a, x))
        return total + sum(leaf.sum() for leaf in jax.tree.leaves(y)), gradient

    return lax.scan(body, jnp.float32(0), jnp.arange(3.0))


def curved(f, x):
    """Return second derivatives, reverse over reverse."""
    x = jax.tree.map(lambda a: a / 128, x)

    def slope(x):
        return jax.grad(lambda x: sum((jnp.sin(y) ** 3).sum() for y in jax.tree.leaves(f(x))))(x)

    return jax.grad(lambda x: sum((jnp.cos(s) * s).sum() for s in jax.tree.leaves(slope(x))))(x)


ALL_REDUCES = tuple(name for name in CASES if name.startswith("all_reduce"))
FEW = ("reduce max", "reduce_scatter", "all_to_all", "all_reduce tree", "gather_matmul", "matmul_scatter")


@pytest.mark.parametrize(
    ("transform", "names"),
    [
        (batched, FEW),
        (with_gradient, FEW),
        pytest.param(scanned, FEW, marks=pytest.mark.matrix),
        *(
            pytest.param(transform, names, marks=pytest.mark.matrix)
            for transform, names in (
                (batched, ALL_REDUCES + EACH_MOTION),
                (scanned, ALL_REDUCES + EACH_MOTION),
                (with_gradient, ALL_REDUCES + EACH_MOTION),
                (curved, ("all_gather", "all_reduce ring", "all_reduce ring mean", "gather_matmul", "matmul_scatter")),
            )
        ),
    ],
)
def test_transforms_of_kernels(ranks, transform, names):
    """Gradients are taken without `check_vma`, which a `shard_map` with it compares with the reference elsewhere."""
    actual, expected = run(ranks(3), names, apply=transform, check_vma=transform is not with_gradient)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), actual, expected)


def test_gradient_of_a_scan_with_a_reduced_carry(ranks):
    def looped(reduce, x):
        return lax.scan(lambda h, _: (jnp.sin(reduce(h)), None), x, length=3)[0]

    x = arrays_of((3,), 5) / 128
    mean = functools.partial(mc.all_reduce, axis="x", op="mean")
    view = ranks(5).view(functools.partial(looped, mean))
    expected = with_gradient(functools.partial(looped, functools.partial(reference.all_reduce, op="mean")), x)
    actual = jax.jit(functools.partial(with_gradient, view))(x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_a_replicated_array(ranks, check_vma):
    def total(x):
        rank = lax.axis_index("x")
        return mc.all_reduce(x * (rank + 1), axis="x")[None] + mc.all_reduce(x, axis="x", op="mean")[None]

    shared = jax.shard_map(total, mesh=ranks(5).mesh, in_specs=P(), out_specs=P("x"), check_vma=check_vma)
    weights = jnp.arange(15.0).reshape(5, 3)
    actual = jax.jit(jax.grad(lambda x: (shared(x) * weights).sum()))(jnp.ones(3))
    np.testing.assert_allclose(actual, (15 + 1) * weights.sum(0), rtol=1e-5)


def test_gradient_inside_shard_map(ranks):
    """The loss of each rank depends on the arrays of all ranks."""

    def inside(x):
        return jax.grad(lambda x: (mc.all_reduce(x, axis="x") * (lax.axis_index("x") + 1)).sum())(x)

    actual = jax.jit(ranks(5).view(inside))(jnp.ones((5, 2)))
    np.testing.assert_allclose(actual, jnp.full((5, 2), 15.0), rtol=1e-5)  # 1 + 2 + 3 + 4 + 5


# ---- Ranks and shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_arrays_without_elements(ranks, name):
    parts = jnp.zeros((3, 0, 4))
    kernel = functools.partial(getattr(mc, name), axis="x")
    actual = jax.jit(ranks(3).view(kernel))(parts)
    np.testing.assert_array_equal(actual, getattr(reference, name)(parts))


# ---- Properties ------------------------------------------------------------------------------------------------------


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


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
    parts = arrays_of(tuple(shape), 3, "int32")
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
