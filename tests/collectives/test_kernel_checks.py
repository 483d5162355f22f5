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
ROOTED = ("broadcast", "reduce", "scatter", "gather")
REDUCTIONS = ("reduce", "reduce_scatter", "all_reduce")
TILED = ("scatter", "gather", "all_gather", "reduce_scatter", "all_to_all")
LEVELS = ("hierarchical_all_reduce", "hierarchical_all_to_all")
DIVIDING = {"scatter": "dim", "reduce_scatter": "dim", "all_to_all": "split_dim"}
WRONG = [
    *(("unknown-axis", AXIS_KERNELS, {"axis": axis}) for axis in ("y", ("x", "xx"))),
    *(("wrong-type", ["all_reduce"], {"axis": axis}) for axis in (0, (), ["x"], ("x", 1))),
    ("axis-used-twice", ["all_reduce"], {"axis": ("x", "x")}),
    ("axis-used-twice", LEVELS, {"axis": None, "inner": "x", "outer": "x"}),
    ("wrong-type", LEVELS, {"axis": None, "inner": 3, "outer": "x"}),
    ("wrong-type", LEVELS, {"axis": None, "inner": "x", "outer": None}),
    ("unknown-choice", ["all_gather"], {"algorithm": "tree"}),
    ("conflict", ["all_reduce"], {"algorithm": "tree", "channels": 2}),
    ("conflict", ["all_reduce"], {"num_servers": 2}),
    ("out-of-range", ["all_reduce"], {"algorithm": "parameter_server", "num_servers": 3}),
    *(("not-an-int", ["reduce_scatter"], {"channels": channels}) for channels in (0, 1.5, "2", True)),
    ("unknown-choice", REDUCTIONS, {"op": "product"}),
    ("wrong-dtype", REDUCTIONS, {"dtype": "bool"}),
    ("wrong-dtype", REDUCTIONS, {"op": "max", "dtype": "complex64"}),
    *(("out-of-range", ROOTED, {"root": root}) for root in (-1, 2, 0.0, True)),
    ("wrong-shape", DIVIDING, {"tiled": False}),
    ("out-of-range", TILED, {"shape": ()}),
    *(("out-of-range", [name], {dim: 2}) for name, dim in DIVIDING.items()),
    ("out-of-range", ["gather", "all_gather"], {"dim": -3}),
    ("out-of-range", ["gather", "all_gather"], {"dim": 3, "tiled": False}),
    *(("not-an-int", ["shift"], {"by": by}) for by in (1.5, "1", True, None)),
    *(("not-a-bool", TILED, {"tiled": tiled}) for tiled in ("no", 0, None)),
    *(("out-of-range", ["bucketed_all_reduce"], {"bucket_bytes": size}) for size in ("25", None, True, 0)),
]


@pytest.fixture
def refuses(ranks):
    """Return a function that checks the error of a kernel on two ranks and returns its message."""

    def check(code, name, *, shape=(4, 4), dtype="float32", axis="x", **options):
        options |= {} if axis is None else {"axis": axis}
        kernel = functools.partial(getattr(mc, name), **options)
        with raises(code, name) as error:
            jax.eval_shape(ranks(2).view(kernel), jax.ShapeDtypeStruct((2, *shape), dtype))
        return str(error.value)

    return check


@pytest.mark.parametrize(("code", "names", "options"), WRONG)
def test_kernels_check_their_arguments(refuses, code, names, options):
    for name in names:
        refuses(code, name, **options)


def test_errors_name_a_fix(ranks, refuses):
    assert "Did you mean `x`?" in refuses("unknown-axis", "all_reduce", axis=("x", "xx"))
    assert "Did you mean `ring`?" in refuses("unknown-choice", "all_reduce", algorithm="rings")
    assert "Did you mean `halving_doubling`" in refuses("unknown-choice", "all_reduce", algorithm="halving-doubling")
    for name in REDUCTIONS:
        assert 'use op="sum" and divide' in refuses("wrong-dtype", name, op="mean", dtype="int32")
    for name, dim in DIVIDING.items():
        assert "Pad it to 6" in refuses("indivisible", name, shape=(4, 5), **{dim: 1})
    partly_manual = jax.shard_map(
        functools.partial(mc.all_reduce, axis="inner"), mesh=ranks(outer=2, inner=2).mesh,
        in_specs=P("outer"), out_specs=P("outer"), axis_names={"outer"},
    )  # fmt: skip
    with raises("unknown-axis") as error:
        jax.eval_shape(partly_manual, jnp.ones(4))
    assert error.value.fix == "add `inner` to the axis_names of the `shard_map`"


@pytest.mark.parametrize("name", AXIS_KERNELS)
def test_kernels_run_in_a_shard_map(name):
    with raises("unknown-axis", name):
        getattr(mc, name)(jnp.ones(4), axis="x")


def test_package_lists_its_names():
    assert set(mc.__all__) == set(dir(mc))
    assert all(getattr(mc, name) for name in mc.__all__)
    with pytest.raises(AttributeError, match="no 'all_reducee'; it has .*all_reduce"):
        _ = mc.all_reducee
