"""Ranks to run kernels on: the first N host devices, stacked rows on the outside and per-device views inside."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshpar.inspect.census import census
from meshpar.inspect.hlo import parser as hlo


class Ranks:
    """The first N devices as one axis `x`, or several axes; ranks count in the order of the mesh, or another one."""

    def __init__(self, order: tuple[str, ...] = (), **axes: int) -> None:
        devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
        self.mesh = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
        self.axis = order or tuple(axes)
        self.count = math.prod(axes[axis] for axis in self.axis)

    def view(self, kernel, *, check_vma: bool = True):
        """A kernel as a function of rows, one for each rank."""
        rows = P(self.axis)

        def one(x):
            return jax.tree.map(lambda y: y[None], kernel(jax.tree.map(lambda row: row[0], x)))

        return jax.shard_map(one, mesh=self.mesh, in_specs=rows, out_specs=rows, check_vma=check_vma)

    def compiled(self, kernel, shape, dtype="float32"):
        """A kernel compiled for one row of this shape at each rank."""
        return jax.jit(self.view(kernel)).lower(jax.ShapeDtypeStruct((self.count, *shape), dtype)).compile()

    def sent(self, kernel, shape, dtype="float32"):
        """The collectives of the compiled kernel, in the order they stand in it."""
        return census(hlo.parse(self.compiled(kernel, shape, dtype).as_text()), self.mesh)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(5)`: five ranks along `x`; `ranks(outer=2, inner=3)`: six in two groups."""
    cached = functools.cache(lambda order, axes: Ranks(order, **dict(axes)))

    def get(count: int | None = None, *, order: tuple[str, ...] = (), **axes: int) -> Ranks:
        return cached(order, tuple({"x": count, **axes}.items() if count else axes.items()))

    return get


@pytest.fixture(
    scope="module",
    params=[
        # Sizes that differ, so that a numbering and its inverse do.
        pytest.param(((2, 3), "ba"), id="ba of 2x3"),
        *(
            pytest.param((sizes, order), marks=pytest.mark.matrix, id=f"{order} of {'x'.join(map(str, sizes))}")
            for sizes, orders in (((4, 2), ["ba"]), ((2, 2, 2), ["bca", "cab", "cba", "ca"]))
            for order in orders
        ),
    ],
)
def out_of_order(request, ranks):
    """Ranks of several axes that count as one, named in another order than the mesh has them: `.axis`."""
    sizes, order = request.param
    return ranks(order=tuple(order), **dict(zip("abc", sizes, strict=False)))
