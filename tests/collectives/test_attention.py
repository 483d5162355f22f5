"""Ring attention against its reference; its communication, FLOPs and memory; the zigzag order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshpar import collectives as mc
from meshpar.collectives import reference
from meshpar.hardware import cost_model as cost
from meshpar.inspect.census import census
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.timeline import program_work as work
from tests.collectives.tiles import STAND_IN
from tests.errors import raises
from tests.grid import cases

COUNTS = cases(3, grid=[1, 2, 3, 5, 8])
CASES = {
    "zigzag": {},
    "zigzag, small tiles": {"tile": 1},
    "zigzag, scaled": {"scale": 0.3},
    "contiguous": {"order": "contiguous"},
    "zigzag, capped": {"cap": 0.5},
    "contiguous, small tiles": {"order": "contiguous", "tile": 2},
    "all to all": {"causal": False},
    "zigzag, by a kernel": {"kernel": STAND_IN},
    "zigzag, by a kernel in small tiles": {"kernel": STAND_IN, "tile": 1, "scale": 0.3},
    "contiguous, by a kernel": {"kernel": STAND_IN, "order": "contiguous", "tile": 2},
    "all to all, by a kernel": {"kernel": STAND_IN, "causal": False},
    "all to all, small tiles": {"causal": False, "order": "contiguous", "tile": 3},
    "zigzag, a window": {"window": 4, "tile": 1},
    "zigzag, a window of a rank and more": {"window": 8, "cap": 0.5},
    "zigzag, a window of several ranks": {"window": 14, "tile": 3},
    "contiguous, a window": {"order": "contiguous", "window": 5, "tile": 2},
    "zigzag, packed": {"packed": True, "tile": 1},
    "contiguous, packed": {"packed": True, "order": "contiguous", "tile": 2, "window": 9},
    "all to all, packed": {"packed": True, "causal": False, "order": "contiguous", "tile": 3},
}


def arrays(count, *, B=2, t=6, H=4, K=2, D=3, dtype="float64"):
    """Return q, k and v of all ranks, and weights for the sum that is differentiated."""
    rng = np.random.default_rng(0)
    shapes = ((count, B, t, H, D), (count, B, t, K, D), (count, B, t, K, D), (count, B, t, H, D))
    *qkv, weights = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return tuple(qkv), weights


def segments_of(count, t, order):
    """Return segments `[count, 2, t]` that span ranks and differ between the two examples."""
    positions_1T = jnp.arange(count * t)[None]
    positions_T = (positions_1T if order == "contiguous" else mc.zigzag(positions_1T, count))[0]
    segments = jnp.stack([positions_T // 5, 7 - positions_T // (t + 1)])
    return segments.reshape(2, count, t).swapaxes(0, 1).astype("int32")


def kernel(axis="x", *, packed=False, **options):
    def attend(qkv):
        order = options.get("order", "zigzag")
        numbers = segments_of(lax.axis_size(axis), qkv[0].shape[1], order)[lax.axis_index(axis)] if packed else None
        return mc.ring_attention(*qkv, axis=axis, segments=numbers, **options)

    return attend


def plain(*, packed=False, **options):
    options = {name: value for name, value in options.items() if name not in ("tile", "kernel")}

    def attend(qkv):
        count, _, t = qkv[0].shape[:3]
        numbers = segments_of(count, t, options.get("order", "zigzag")) if packed else None
        return reference.ring_attention(*qkv, segments=numbers, **options)

    return attend


def with_gradients(f, qkv, weights):
    value, pull = jax.vjp(f, qkv)
    return value, pull(weights)[0]


def both(row, cases, dtype, apply=with_gradients, **sizes):
    """Return the results of the kernel and of the reference for some cases, computed in two programs."""
    qkv, weights = arrays(row.count, dtype=dtype, **sizes)
    actual = jax.jit(lambda: {n: apply(row.view(kernel(row.axis, **CASES[n])), qkv, weights) for n in cases})()
    return actual, jax.jit(lambda: {n: apply(plain(**CASES[n]), qkv, weights) for n in cases})()


def close(actual, expected, tolerance):
    def check(a, b):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, "float64"), np.asarray(b, "float64"), rtol=tolerance, atol=tolerance)

    jax.tree.map(check, actual, expected)


@pytest.mark.parametrize("count", COUNTS)
def test_ring_attention_matches_reference(ranks, count):
    some = ["zigzag, small tiles", "zigzag, by a kernel", "all to all", "zigzag, packed"]
    cases = CASES if count == 5 else some
    with jax.enable_x64(True):
        close(*both(ranks(count), cases, "float64"), 1e-12)


@pytest.mark.parametrize(
    "case", cases("zigzag, small tiles", grid=["zigzag, small tiles", "zigzag, by a kernel", "contiguous, a window"])
)
def test_ring_attention_with_sinks_matches_reference(ranks, case):
    """Value and gradients, with the gradient of the sinks summed over ranks."""
    row = ranks(3)
    with jax.enable_x64(True):
        qkv, weights = arrays(3)
        sinks, plain_options = jnp.linspace(-1.0, 2.0, 4), {**CASES[case]}
        plain_options = {name: value for name, value in plain_options.items() if name not in ("tile", "kernel")}

        def ring(qkv, sinks):
            attend = row.view(lambda x: mc.ring_attention(*x[:3], axis=row.axis, sinks=x[3], **CASES[case]))
            return attend((*qkv, jnp.broadcast_to(sinks, (3, 4))))

        def plain(qkv, sinks):
            return reference.ring_attention(*qkv, sinks=sinks, **plain_options)

        def with_gradients(attend):
            o, pull = jax.vjp(attend, qkv, sinks)
            return o, *pull(weights)

        actual, expected = jax.jit(lambda: (with_gradients(ring), with_gradients(plain)))()
        close(actual, expected, 1e-12)


@pytest.mark.matrix
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_window_reaches_back_by_its_size(ranks, order):
    """Windows from within a tile to the full sequence, on four ranks."""
    row, (qkv, _) = ranks(4), arrays(4, B=1, t=4, H=1, K=1, D=16, dtype="float32")
    positions = jnp.arange(16)
    if order == "zigzag":
        positions = mc.zigzag(positions[None], 4)[0]
    # The value of a position is a unit vector, so the output of a query is its attention weights.
    values = jax.nn.one_hot(positions, 16).reshape(4, 1, 4, 1, 16)
    windows = (1, 2), (2, 2), (5, 1), (6, 2), (12, 2), (13, 2)
    options = [{"order": order, "window": window, "tile": tile} for window, tile in windows]

    def outputs(qkv):
        return [row.view(kernel(row.axis, **case))(qkv) for case in options]

    distance = np.asarray(positions)[:, None] - np.arange(16)
    for case, o in zip(options, jax.jit(outputs)((*qkv[:2], values)), strict=True):
        expected = (distance >= 0) & (distance < case["window"])
        np.testing.assert_array_equal(np.asarray(o).reshape(16, 16) > 0, expected, err_msg=str(case))


def test_gradients_on_four_ranks_of_windows_and_capped_scores(ranks):
    """With fewer ranks the backward pass has no steps between the first and the last.

    Gradients include the slope of the cap. At a cap of 0.5 most scores are on its flat part.
    """
    names = ["zigzag, a window of several ranks", "zigzag, capped"]
    close(*both(ranks(4), names, "float32", B=1, H=2, K=1, D=2), 1e-5)


@pytest.mark.parametrize("options", [{"window": 4}, {"packed": True}])
def test_hidden_tiles_are_skipped(ranks, options):
    """NaN values in a tile would make the output NaN if the tile were computed."""
    row, ((q, k, v), _) = ranks(3), arrays(3, dtype="float32")
    attend = row.view(kernel(row.axis, order="contiguous", tile=2, **options))
    o = jax.jit(attend)((q, k, v.at[0].set(np.nan)))
    assert not np.isfinite(o[0]).any()
    assert np.isfinite(o[2]).all()


def test_axes_in_another_order_than_the_mesh(out_of_order):
    close(*both(out_of_order, ["zigzag"], "float32", B=1, t=2), 1e-5)


def test_bfloat16(ranks):
    # Both round weights and results to 8 bits, in different places, in sums of a dozen terms of magnitude 1.
    results = both(ranks(3), ["zigzag, small tiles"], "bfloat16", H=6, K=2)
    close(*results, 0.1)


@pytest.mark.matrix
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_multi_query_and_multi_head_attention(ranks, num_kv_heads):
    close(*both(ranks(2), ["zigzag"], "float32", K=num_kv_heads, B=1, t=2), 1e-5)


@pytest.mark.matrix
def test_under_vmap_scan_and_without_check_vma(ranks):
    row, (qkv, weights) = ranks(3), arrays(3, dtype="float32")

    def stacked(f):
        many = jax.tree.map(lambda x: jnp.stack([x, x * 0.5], axis=-1), qkv)
        return jax.grad(lambda many: (jax.vmap(f, -1, -1)(many) * weights[..., None]).sum())(many)

    def scanned(f):
        def body(q, _):
            return f((q, *qkv[1:])), None

        return jax.grad(lambda q: (lax.scan(body, q, length=2)[0] * weights).sum())(qkv[0])

    def all_of(f, unchecked):
        return jax.jit(lambda: (stacked(f), scanned(f), with_gradients(unchecked, qkv, weights)))()

    actual = all_of(row.view(kernel()), row.view(kernel(), check_vma=False))
    close(actual, all_of(plain(), plain()), 1e-4)


def test_gradients_of_replicated_keys_are_summed(ranks):
    """Keys and values are replicated over the axis that shards the batch."""
    mesh, (qkv, weights) = ranks(rows=2, x=2).mesh, arrays(2, dtype="float32")
    spec = P(None, "x")
    q, k, v, w = (x.reshape(x.shape[1], -1, *x.shape[3:]) for x in (*qkv, weights))
    split = jax.shard_map(
        functools.partial(mc.ring_attention, axis="x", order="contiguous"),
        mesh=mesh, in_specs=(P("rows", "x"), spec, spec), out_specs=P("rows", "x"),
    )  # fmt: skip

    def one_rank(q, k, v):
        k, v = (jnp.broadcast_to(x, (2, *x.shape[1:])) for x in (k, v))
        return reference.ring_attention(q[None], k[None], v[None], order="contiguous")[0]

    def gradients(f):
        return jax.jit(jax.grad(lambda qkv: (f(*qkv) * w).sum()))((q, k[:1], v[:1]))

    close(gradients(split), gradients(one_rank), 1e-5)


# ---- Communication, FLOPs and memory of the compiled program ---------------------------------------------------------

B, HEADS, KV_HEADS, WIDTH, LENGTH = 1, 4, 2, 8, 840
KV_BYTES = 2 * B * KV_HEADS * WIDTH * 4
"""Bytes of keys and values per position."""


@pytest.fixture(scope="module")
def compiled(ranks):
    """Return a function (ranks, is_backward, options) -> compiled kernel over 1680 positions."""

    @functools.cache
    def run(count, is_backward, tile=105, **options):
        length = 2 * LENGTH // count
        q = jax.ShapeDtypeStruct((count, B, length, HEADS, WIDTH), "float32")
        kv = jax.ShapeDtypeStruct((count, B, length, KV_HEADS, WIDTH), "float32")
        view = ranks(count).view(kernel(tile=tile, **options))

        if not is_backward:
            return jax.jit(view).lower((q, kv, kv)).compile()
        _, pull = jax.eval_shape(functools.partial(jax.vjp, view), (q, kv, kv))
        return jax.jit(lambda pull, w: pull(w)).lower(pull, q).compile()

    return run


@pytest.mark.parametrize("count", cases(4, grid=[2, 3, 4, 7, 8]))
def test_messages_and_bytes_match_closed_forms(ranks, compiled, count):
    block = KV_BYTES * (2 * LENGTH // count)
    forward, backward = cost.ring_attention(block, count), cost.ring_attention_backward(block, block, count)
    for is_backward, expected in ((False, forward), (True, backward)):
        collectives = census(hlo.parse(compiled(count, is_backward).as_text()), ranks(count).mesh)
        assert {c.kind for c in collectives} == {"collective-permute"}
        assert sum(c.count_per_step for c in collectives) == expected.steps
        assert sum(c.bytes_sent_per_step for c in collectives) == expected.bytes_sent


def test_causal_zigzag_halves_the_flops(compiled):
    """In zigzag order the program has half the FLOPs and no branches."""

    def flops(is_backward=False, **options):
        module = hlo.parse(compiled(4, is_backward, **options).as_text())
        assert not any(matmul.in_branch for matmul in work.matmuls(module)) or "order" in options
        return work.flops_per_step(module)

    seq_len = 2 * LENGTH
    square = 2 * B * HEADS * WIDTH * (seq_len // 4)
    for tile in (105, 42):
        # Half of the scores, plus the upper halves of the diagonal tiles, which are computed and masked.
        assert flops(tile=tile) == square * (seq_len + tile)
    full = flops(causal=False)
    assert full == 2 * square * seq_len
    assert 0.5 < flops(tile=42) / full < 0.52
    assert flops(is_backward=True) == 2.5 * flops()
    # In contiguous order a branch skips blocks. The last rank skips none and has twice the work.
    assert flops(order="contiguous") > 1.6 * flops()


def test_temporary_memory_grows_with_the_tile(compiled):
    """t is 420 here, and t² floats are 0.7 MB."""
    block_bytes = 4 * B * HEADS * 420 * 420

    def temporary_bytes(is_backward, tile):
        return compiled(4, is_backward, tile=tile).memory_analysis().temp_size_in_bytes

    for is_backward in (False, True):
        assert temporary_bytes(is_backward, 42) < block_bytes / 3 < temporary_bytes(is_backward, 210)


def test_tile_is_the_nearest_divisor():
    from meshpar.collectives.attention import _nearest_divisor

    assert [_nearest_divisor(length, 512) for length in (8192, 768, 640, 1021, 6, 1)] == [512, 384, 640, 1021, 6, 1]


# ---- The zigzag order ------------------------------------------------------------------------------------------------


def test_zigzag_order_of_chunks():
    x = jnp.arange(16).reshape(2, 8)
    np.testing.assert_array_equal(mc.zigzag(x, 2), [[0, 1, 6, 7, 2, 3, 4, 5], [8, 9, 14, 15, 10, 11, 12, 13]])
    np.testing.assert_array_equal(mc.zigzag(jnp.arange(8), 4, dim=0), [0, 7, 1, 6, 2, 5, 3, 4])
    np.testing.assert_array_equal(mc.unzigzag(mc.zigzag(x, 4, dim=-1), 4, dim=-1), x)


@pytest.mark.parametrize("count", COUNTS)
def test_zigzag_conversions_send_two_messages(ranks, count):
    sent = ranks(count).sent(functools.partial(mc.from_zigzag, axis="x"), (2, 6, 3))
    messages = min(count - 1, 2)  # a message per chunk
    assert sum(c.count_per_step for c in sent) == messages
    assert sum(c.bytes_sent_per_step for c in sent) == messages * 4 * 2 * 6 * 3 / 2


# ---- Mistakes --------------------------------------------------------------------------------------------------------

Q, KV = (2, 4, 4, 3), (2, 4, 2, 3)


@pytest.mark.parametrize(
    ("shapes", "options", "code"),
    [
        (((2, 3, 4, 3), (2, 3, 2, 3), (2, 3, 2, 3)), {}, "indivisible"),
        ((Q, KV, KV), {"order": "zig-zag"}, "unknown-choice"),
        ((Q, KV, KV), {"tile": 0}, "not-an-int"),
        ((Q, (2, 4, 3, 3), (2, 4, 3, 3)), {}, "indivisible"),
        ((Q, KV, (2, 4, 2, 5)), {}, "wrong-shape"),
        ((Q, (2, 6, 2, 3), (2, 6, 2, 3)), {}, "wrong-shape"),
        ((Q[1:], KV[1:], KV[1:]), {}, "wrong-shape"),
        ((Q, KV, KV), {"axis": "y"}, "unknown-axis"),
        ((Q, KV, KV), {"causal": "no"}, "not-a-bool"),
        ((Q, KV, KV), {"scale": "a"}, "wrong-type"),
        ((Q, KV, KV), {"cap": 3.0, "kernel": STAND_IN}, "unsupported-feature"),
        ((Q, KV, KV), {"window": 2, "causal": False}, "conflict"),
        ((Q, KV, KV), {"window": 0}, "not-an-int"),
        ((Q, KV, KV), {"segments": jnp.zeros((2, 5), "int32")}, "wrong-shape"),
    ],
)
def test_ring_attention_checks_its_arguments(ranks, shapes, options, code):
    qkv = tuple(jnp.ones((2, *shape)) for shape in shapes)
    with raises(code, "ring_attention"):
        jax.eval_shape(ranks(2).view(lambda qkv: mc.ring_attention(*qkv, **{"axis": "x", **options})), qkv)


def test_ring_attention_checks_dtypes_and_its_context(ranks):
    for dtypes in (("float32", "bfloat16", "bfloat16"), ("int32",) * 3):
        qkv = tuple(jnp.ones((2, *shape), dtype) for shape, dtype in zip((Q, KV, KV), dtypes, strict=True))
        with raises("wrong-dtype", "ring_attention"):
            jax.eval_shape(ranks(2).view(kernel()), qkv)
    with raises("unknown-axis", "ring_attention"):
        mc.ring_attention(*(jnp.ones(shape) for shape in (Q, KV, KV)), axis="x")


def test_zigzag_needs_a_divisible_sequence():
    for move in (mc.zigzag, mc.unzigzag):
        with raises("indivisible") as error:
            move(jnp.ones((2, 8)), 3)
        assert error.value.fix == "pad it to 12"
