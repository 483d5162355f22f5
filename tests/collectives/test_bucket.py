"""Buckets: which arrays share one, one all-reduce each, and the tree as if reduced array by array."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar import collectives as mc
from meshpar.collectives import reference
from meshpar.collectives.bucket import buckets
from meshpar.hardware import cost_model as cost
from meshpar.inspect.census import census
from meshpar.inspect.hlo import parser as hlo
from meshpar.sharding.types import MeshparError

SHAPES = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["float32", "bfloat16"])), max_size=12)


def leaf(size, dtype="float32"):
    return jax.ShapeDtypeStruct((size,), jnp.dtype(dtype))


def test_last_arrays_come_first_and_no_bucket_overflows():
    assert buckets([leaf(3), leaf(4), leaf(5), leaf(1)], 24) == [[3, 2], [1], [0]]
    assert buckets([leaf(2), leaf(100), leaf(2)], 24) == [[2], [1], [0]]  # too large to share
    assert buckets([leaf(2), leaf(2, "bfloat16"), leaf(2)], 24) == [[2, 0], [1]]  # no casts
    assert buckets([], 24) == []


@given(SHAPES, st.integers(1, 200))
def test_every_array_is_in_one_bucket(shapes, most):
    leaves = [leaf(*one) for one in shapes]
    found = buckets(leaves, most)
    assert sorted(at for bucket in found for at in bucket) == list(range(len(leaves)))
    for bucket in found:
        assert bucket == sorted(bucket, reverse=True)
        assert len({leaves[at].dtype for at in bucket}) == 1
        assert len(bucket) == 1 or sum(leaves[at].size * leaves[at].dtype.itemsize for at in bucket) <= most


def gradients(count):
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.integers(-9, 9, (count, 4, 6)), "float32"),
        "b": jnp.asarray(rng.integers(-9, 9, (count, 5)), "bfloat16"),
        "none": jnp.zeros((count, 0)),
        "scale": jnp.asarray(rng.integers(-9, 9, (count,)), "float32"),
        "layers": [jnp.asarray(rng.integers(-9, 9, (count, 12)), "float32")] * 3,
    }


summed = jax.jit(functools.partial(jax.tree.map, reference.all_reduce))


@pytest.mark.parametrize("bucket_bytes", [1, 100, 25e6])
def test_the_tree_is_reduced_array_by_array(ranks, bucket_bytes):
    tree = gradients(3)
    found = jax.jit(ranks(3).view(functools.partial(mc.bucketed_all_reduce, axis="x", bucket_bytes=bucket_bytes)))(tree)
    jax.tree.map(np.testing.assert_array_equal, found, summed(tree))


def test_axes_out_of_the_order_of_the_mesh(out_of_order):
    tree = gradients(out_of_order.count)
    found = jax.jit(out_of_order.view(functools.partial(mc.bucketed_all_reduce, axis=out_of_order.axis)))(tree)
    jax.tree.map(np.testing.assert_array_equal, found, summed(tree))


def test_gradients_pass_through(ranks):
    tree = jax.tree.map(lambda x: x.astype("float32"), gradients(3))

    def slope(reduce):
        def loss(tree):
            return sum((y**2).sum() for y in jax.tree.leaves(reduce(tree)))

        return jax.jit(jax.grad(loss))(tree)

    found = slope(ranks(3).view(functools.partial(mc.bucketed_all_reduce, axis="x", op="mean", bucket_bytes=100)))
    expected = slope(functools.partial(jax.tree.map, functools.partial(reference.all_reduce, op="mean")))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


def test_one_all_reduce_for_each_bucket(ranks):
    sizes = {"a": 60, "b": 30, "c": 30, "d": 90}
    arrays = {name: jax.ShapeDtypeStruct((3, size), "float32") for name, size in sizes.items()}
    row = ranks(3)
    reduce = row.view(functools.partial(mc.bucketed_all_reduce, axis="x", bucket_bytes=4 * 100))
    found = census(hlo.parse(jax.jit(reduce).lower(arrays).compile().as_text()), row.mesh)
    expected = [cost.ring_all_reduce(4 * n, 3) for n in (90, 60, 60)]  # d; c and b; a
    assert sum(one.count_per_step for one in found) == sum(one.steps for one in expected)
    assert sum(one.bytes_sent_per_step for one in found) == sum(one.bytes_sent for one in expected)


def test_a_bucket_holds_something(ranks):
    with pytest.raises(MeshparError, match="buckets of 0 bytes.*positive"):
        jax.eval_shape(
            ranks(2).view(functools.partial(mc.bucketed_all_reduce, axis="x", bucket_bytes=0)), jnp.ones((2, 3))
        )
