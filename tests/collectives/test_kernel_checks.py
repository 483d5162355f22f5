"""Errors for wrong arguments of the kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import collectives as mc
from tests.errors import raises

AXIS_KERNELS = ["shift", "broadcast", "reduce", "scatter", "gather", "all_gather", "reduce_scatter", "all_reduce"]
AXIS_KERNELS += ["all_to_all", "bucketed_all_reduce"]


@pytest.fixture
def refuses(ranks):
    """Return a function that checks the error of a kernel on two ranks and returns its message."""

    def check(code, name, *, shape=(4, 4), dtype="float32", axis="x", **options):
        kernel = functools.partial(getattr(mc, name), axis=axis, **options)
        with raises(code, name) as error:
            jax.eval_shape(ranks(2).view(kernel), jax.ShapeDtypeStruct((2, *shape), dtype))
        return str(error.value)

    return check


@pytest.mark.parametrize("name", AXIS_KERNELS)
def test_kernels_need_a_known_axis_in_shard_map(refuses, name):
    with raises("unknown-axis", name):
        getattr(mc, name)(jnp.ones(4), axis="x")
    refuses("unknown-axis", name, axis="y")


def test_axis_names(ranks, refuses):
    assert "Did you mean `x`?" in refuses("unknown-axis", "all_reduce", axis=("x", "xx"))
    for axis in (0, (), ["x"], ("x", 1)):
        refuses("wrong-type", "all_reduce", axis=axis)
    refuses("axis-used-twice", "all_reduce", axis=("x", "x"))
    partly_manual = jax.shard_map(
        functools.partial(mc.all_reduce, axis="inner"), mesh=ranks(outer=2, inner=2).mesh,
        in_specs=P("outer"), out_specs=P("outer"), axis_names={"outer"},
    )  # fmt: skip
    with raises("unknown-axis") as error:
        jax.eval_shape(partly_manual, jnp.ones(4))
    assert error.value.fix == "add `inner` to its axis_names"


def test_algorithms_and_their_options(refuses):
    assert "Did you mean `ring`?" in refuses("unknown-choice", "all_reduce", algorithm="rings")
    assert "Did you mean `halving_doubling`" in refuses("unknown-choice", "all_reduce", algorithm="halving-doubling")
    refuses("unknown-choice", "all_gather", algorithm="tree")
    refuses("conflict", "all_reduce", algorithm="tree", channels=2)
    refuses("conflict", "all_reduce", num_servers=2)
    refuses("out-of-range", "all_reduce", algorithm="parameter_server", num_servers=3)
    for channels in (0, 1.5, "2", True):
        refuses("not-an-int", "reduce_scatter", channels=channels)


@pytest.mark.parametrize("name", ["reduce", "reduce_scatter", "all_reduce"])
def test_ops_and_dtypes(refuses, name):
    refuses("unknown-choice", name, op="product")
    assert 'use op="sum" and divide' in refuses("wrong-dtype", name, op="mean", dtype="int32")
    refuses("wrong-dtype", name, dtype="bool")
    refuses("wrong-dtype", name, op="max", dtype="complex64")


@pytest.mark.parametrize("name", ["broadcast", "reduce", "scatter", "gather"])
@pytest.mark.parametrize("root", [-1, 2, 0.0, True])
def test_unknown_roots(refuses, name, root):
    refuses("out-of-range", name, root=root)


@pytest.mark.parametrize(("name", "dim"), [("scatter", "dim"), ("reduce_scatter", "dim"), ("all_to_all", "split_dim")])
def test_dims_that_cannot_be_divided(refuses, name, dim):
    assert "Pad it to 6" in refuses("indivisible", name, shape=(4, 5), **{dim: 1})
    refuses("wrong-shape", name, tiled=False)
    refuses("out-of-range", name, **{dim: 2})
    refuses("out-of-range", name, shape=())


@pytest.mark.parametrize("name", ["gather", "all_gather"])
def test_dims_that_cannot_be_concatenated(refuses, name):
    refuses("out-of-range", name, shape=())
    refuses("out-of-range", name, dim=-3)
    refuses("out-of-range", name, dim=3, tiled=False)


def test_package_lists_its_names():
    assert set(mc.__all__) == set(dir(mc))
    assert all(getattr(mc, name) for name in mc.__all__)
    with pytest.raises(AttributeError, match="no 'all_reducee'; it has .*all_reduce"):
        _ = mc.all_reducee


@pytest.mark.parametrize("by", [1.5, "1", True, None])
def test_shift_needs_an_integer(refuses, by):
    refuses("not-an-int", "shift", by=by)


@pytest.mark.parametrize("name", ["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("tiled", ["no", 0, None])
def test_tiled_needs_a_bool(refuses, name, tiled):
    refuses("not-a-bool", name, tiled=tiled)


@pytest.mark.parametrize("bucket_bytes", ["25", None, True])
def test_bucket_bytes_needs_a_positive_number(refuses, bucket_bytes):
    refuses("out-of-range", "bucketed_all_reduce", bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("name", ["hierarchical_all_reduce", "hierarchical_all_to_all"])
@pytest.mark.parametrize("axes", [{"inner": 3, "outer": "x"}, {"inner": "x", "outer": None}])
def test_levels_need_axis_names(ranks, name, axes):
    with raises("wrong-type", name):
        jax.eval_shape(ranks(2).view(functools.partial(getattr(mc, name), **axes)), jnp.ones((2, 4, 4)))
