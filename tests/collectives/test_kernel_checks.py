"""Every mistake is told in four parts, and where jax would have said less."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import collectives as mc
from meshpar.sharding.types import MeshparError

AXIS_KERNELS = ["shift", "broadcast", "reduce", "scatter", "gather", "all_gather", "reduce_scatter", "all_reduce"]
AXIS_KERNELS += ["all_to_all", "bucketed_all_reduce"]


def told(ranks, name, *, shape=(4, 4), dtype="float32", axis="x", **options):
    """The error of a kernel at two ranks."""
    kernel = functools.partial(getattr(mc, name), axis=axis, **options)
    with pytest.raises(MeshparError) as raised:
        jax.eval_shape(ranks(2).view(kernel), jax.ShapeDtypeStruct((2, *shape), dtype))
    error = raised.value
    assert all((error.where, error.requested, error.reason, error.fix))
    return str(error)


@pytest.mark.parametrize("name", AXIS_KERNELS)
def test_outside_shard_map(name):
    with pytest.raises(MeshparError, match=f"^{name}: .*mesh axis `x`: it is not inside a `jax.shard_map`"):
        getattr(mc, name)(jnp.ones(4), axis="x")


@pytest.mark.parametrize("name", AXIS_KERNELS)
def test_an_unknown_axis(ranks, name):
    assert "`y`: the `shard_map` around it is manual over `x`" in told(ranks, name, axis="y")


def test_an_axis_nearly_right_an_odd_one_and_one_left_to_the_compiler(ranks):
    assert "`xx`: the `shard_map` around it is manual over `x`. Did you mean `x`?" in told(
        ranks, "all_reduce", axis=("x", "xx")
    )
    for odd in (0, (), ["x"], ("x", 1)):
        assert "an axis is a name, or a tuple of names" in told(ranks, "all_reduce", axis=odd)
    assert "it names an axis twice" in told(ranks, "all_reduce", axis=("x", "x"))
    mesh = ranks(outer=2, inner=2).mesh
    partly = jax.shard_map(
        functools.partial(mc.all_reduce, axis="inner"),
        mesh=mesh,
        in_specs=P("outer"),
        out_specs=P("outer"),
        axis_names={"outer"},
    )
    with pytest.raises(MeshparError, match="manual over `outer` only.*Add `inner` to its axis_names"):
        jax.eval_shape(partly, jnp.ones(4))


def test_algorithms_and_their_options(ranks):
    assert "Did you mean `ring`?" in told(ranks, "all_reduce", algorithm="rings")
    assert "there are `ring`, `bidirectional`" in told(ranks, "all_gather", algorithm="tree")
    assert "Did you mean `halving_doubling`" in told(ranks, "all_reduce", algorithm="halving-doubling")
    assert "that one has no channels" in told(ranks, "all_reduce", algorithm="tree", channels=2)
    assert "that one has no num_servers" in told(ranks, "all_reduce", num_servers=2)
    servers = {"algorithm": "parameter_server", "num_servers": 3}
    assert "a whole number from 1 to 2" in told(ranks, "all_reduce", **servers)
    for odd in (0, 1.5, "2", True):
        assert "a whole number from 1" in told(ranks, "reduce_scatter", channels=odd)


@pytest.mark.parametrize("name", ["reduce", "reduce_scatter", "all_reduce"])
def test_reductions_that_do_not_exist(ranks, name):
    assert "there are `sum`, `mean`, `max`, `min`" in told(ranks, name, op="product")
    assert 'take op="sum" and divide' in told(ranks, name, op="mean", dtype="int32")
    assert "reductions are of numbers" in told(ranks, name, dtype="bool")
    assert "have no order" in told(ranks, name, op="max", dtype="complex64")


@pytest.mark.parametrize("name", ["broadcast", "reduce", "scatter", "gather"])
@pytest.mark.parametrize("root", [-1, 2, 0.0, True])
def test_roots_that_do_not_exist(ranks, name, root):
    assert "there are 2 ranks. Use 0 to 1" in told(ranks, name, root=root)


@pytest.mark.parametrize(("name", "dim"), [("scatter", "dim"), ("reduce_scatter", "dim"), ("all_to_all", "split_dim")])
def test_dims_that_cannot_be_cut(ranks, name, dim):
    odd = told(ranks, name, shape=(4, 5), **{dim: 1})
    assert "cut dim 1 of size 5 into 2 equal parts: 5 is not a multiple of 2. Pad it to 6" in odd
    assert "as long as there are ranks" in told(ranks, name, tiled=False)
    assert "the array has 2 dims" in told(ranks, name, **{dim: 2})
    assert "the array is a scalar" in told(ranks, name, shape=())


@pytest.mark.parametrize("name", ["gather", "all_gather"])
def test_dims_that_cannot_be_joined(ranks, name):
    assert "the array is a scalar" in told(ranks, name, shape=())
    assert "the array has 2 dims" in told(ranks, name, dim=-3)
    assert "the array has 3 dims" in told(ranks, name, dim=3, tiled=False)


def test_the_package_lists_what_it_has():
    assert set(mc.__all__) == set(dir(mc))
    assert all(getattr(mc, name) for name in mc.__all__)
    with pytest.raises(AttributeError, match="no 'all_reducee'; it has .*all_reduce"):
        _ = mc.all_reducee


@pytest.mark.parametrize("by", [1.5, "1", True, None])
def test_distances_that_are_no_number_of_ranks(ranks, by):
    assert "a whole number, negative for backwards" in told(ranks, "shift", by=by)


@pytest.mark.parametrize("name", ["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("tiled", ["no", 0, None])
def test_tiled_is_true_or_false(ranks, name, tiled):
    assert "Write True or False" in told(ranks, name, tiled=tiled)


@pytest.mark.parametrize("bucket_bytes", ["25", None, True])
def test_buckets_without_a_size(ranks, bucket_bytes):
    assert "Use a positive size" in told(ranks, "bucketed_all_reduce", bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("name", ["hierarchical_all_reduce", "hierarchical_all_to_all"])
@pytest.mark.parametrize("axes", [{"inner": 3, "outer": "x"}, {"inner": "x", "outer": None}])
def test_levels_that_are_no_axes(ranks, name, axes):
    with pytest.raises(MeshparError, match="an axis is a name, or a tuple of names"):
        jax.eval_shape(ranks(2).view(functools.partial(getattr(mc, name), **axes)), jnp.ones((2, 4, 4)))
