"""Bucketed all-reduce: assignment of arrays to buckets, results, and bytes."""

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
from meshpar.collectives.reduction import buckets
from meshpar.hardware import cost_model as cost
from meshpar.inspect.census import census
from meshpar.inspect.hlo import parser as hlo

SHAPES = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["float32", "bfloat16"])), max_size=12)


def leaf(size, dtype="float32"):
    return jax.ShapeDtypeStruct((size,), jnp.dtype(dtype))


def test_buckets_start_with_the_last_arrays():
    assert buckets([leaf(3), leaf(4), leaf(5), leaf(1)], 24) == [[3, 2], [1], [0]]
    assert buckets([leaf(2), leaf(100), leaf(2)], 24) == [[2], [1], [0]]  # larger than a bucket
    assert buckets([leaf(2), leaf(2, "bfloat16"), leaf(2)], 24) == [[2, 0], [1]]  # separate buckets per dtype
    assert buckets([], 24) == []


@given(SHAPES, st.integers(1, 200))
def test_every_array_is_in_one_bucket(shapes, bucket_bytes):
    leaves = [leaf(*shape) for shape in shapes]
    result = buckets(leaves, bucket_bytes)
    assert sorted(i for bucket in result for i in bucket) == list(range(len(leaves)))
    for bucket in result:
        assert bucket == sorted(bucket, reverse=True)
        assert len({leaves[i].dtype for i in bucket}) == 1
        assert len(bucket) == 1 or sum(leaves[i].size * leaves[i].dtype.itemsize for i in bucket) <= bucket_bytes


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
def test_matches_reference(ranks, bucket_bytes):
    tree = gradients(3)
    reduce = functools.partial(mc.bucketed_all_reduce, axis="x", bucket_bytes=bucket_bytes)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(ranks(3).view(reduce))(tree), summed(tree))


def test_bytes_match_closed_forms(ranks):
    sizes = {"a": 60, "b": 30, "c": 30, "d": 90}
    arrays = {name: jax.ShapeDtypeStruct((3, size), "float32") for name, size in sizes.items()}
    row = ranks(3)
    reduce = row.view(functools.partial(mc.bucketed_all_reduce, axis="x", bucket_bytes=4 * 100))
    collectives = census(hlo.parse(jax.jit(reduce).lower(arrays).compile().as_text()), row.mesh)
    expected = [cost.ring_all_reduce(4 * n, 3) for n in (90, 60, 60)]  # d; c and b; a
    assert sum(c.count_per_step for c in collectives) == sum(c.steps for c in expected)
    assert sum(c.bytes_sent_per_step for c in collectives) == sum(c.bytes_sent for c in expected)
