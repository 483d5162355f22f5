"""The `ranks` fixture: meshes of host devices, and kernels as functions of the stacked arrays of all ranks."""

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
    """A mesh of the first N devices, whose ranks are numbered in the order of the mesh or in another order of axes."""

    def __init__(self, order: tuple[str, ...] = (), **axes: int) -> None:
        devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
        self.mesh = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
        self.axis = order or tuple(axes)
        self.count = math.prod(axes[axis] for axis in self.axis)

    def view(self, kernel, *, check_vma: bool = True):
        """Return a kernel as a function of arrays stacked over ranks."""
        spec = P(self.axis)

        def on_rank(x):
            return jax.tree.map(lambda y: y[None], kernel(jax.tree.map(lambda part: part[0], x)))

        return jax.shard_map(on_rank, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)

    def compiled(self, kernel, shape, dtype="float32"):
        """Compile a kernel for local arrays of a shape."""
        return jax.jit(self.view(kernel)).lower(jax.ShapeDtypeStruct((self.count, *shape), dtype)).compile()

    def sent(self, kernel, shape, dtype="float32"):
        """Return the collectives of the compiled kernel, in program order."""
        return census(hlo.parse(self.compiled(kernel, shape, dtype).as_text()), self.mesh)


@pytest.fixture(scope="session")
def ranks():
    """Return a function: `ranks(5)` has five ranks along `x`, `ranks(outer=2, inner=3)` has two axes."""
    cached = functools.cache(lambda order, axes: Ranks(order, **dict(axes)))

    def get(count: int | None = None, *, order: tuple[str, ...] = (), **axes: int) -> Ranks:
        return cached(order, tuple({"x": count, **axes}.items() if count else axes.items()))

    return get


@pytest.fixture(
    scope="module",
    params=[
        # With different sizes a numbering differs from its inverse.
        pytest.param(((2, 3), "ba"), id="ba of 2x3"),
        *(
            pytest.param((sizes, order), marks=pytest.mark.matrix, id=f"{order} of {'x'.join(map(str, sizes))}")
            for sizes, orders in (((4, 2), ["ba"]), ((2, 2, 2), ["bca", "cab", "cba", "ca"]))
            for order in orders
        ),
    ],
)
def out_of_order(request, ranks):
    """Return ranks over several axes, which `.axis` names in another order than the mesh."""
    sizes, order = request.param
    return ranks(order=tuple(order), **dict(zip("abc", sizes, strict=False)))
