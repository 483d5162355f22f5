"""Precision: in which dtype parameters are kept, computed with and reduced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util

from meshpar.sharding.context import current, within
from meshpar.sharding.types import PyTree, near, problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a training step, each a name such as "float32" or "bfloat16"."""

    params: str | None = None
    """Parameters between steps, and the optimizer's view of them. None: as the model makes them."""
    compute: str | None = None
    """Forward and backward pass; parameters are cast before they are gathered, so the wire carries this dtype. None:
    the parameters' own."""
    reduce: str | None = None
    """Sums of gradients over devices and micro-steps. None: the compute dtype, and float32 at the least. A lower
    dtype halves the bytes of a reduction and rounds at every hop."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name = getattr(self, field.name)
            if name is not None and name not in FLOATS:
                raise problem(
                    f"Precision({field.name}={name!r})", "use that dtype", "it is no floating dtype", near(name, FLOATS)
                )

    def reduce_dtype(self, compute: Any) -> jnp.dtype:
        return jnp.dtype(self.reduce) if self.reduce else jnp.promote_types(compute, jnp.float32)


FLOATS = ("float64", "float32", "bfloat16", "float16")


def cast_floating(tree: PyTree, dtype: str | None) -> PyTree:
    """The tree with its floating leaves in another dtype; None leaves it alone."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


# ---- What computes in a wider dtype than asked ---------------------------------------------------------------------

TOLD_FROM = 0.1
"""From this share of a step's matmuls on: a router, or a head in float32, is meant."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideWork:
    """Matmuls and convolutions that a step computes in a wider dtype than `Precision.compute` asks for."""

    precision: Precision
    share: float
    """Of the FLOPs of all of them."""
    dtype: str
    where: str
    """The line of the costliest one."""

    def __str__(self) -> str:
        return (
            f"{self.share:.0%} of the matmul FLOPs are in {self.dtype}, most at {self.where}, although "
            f"Precision(compute={self.precision.compute!r}) hands the model its parameters in that dtype"
        )

    @property
    def fix(self) -> str:
        return (
            f"build the model's modules with dtype={self.precision.compute}, and cast {self.dtype} inputs in the loss "
            "function: modules of a wider dtype, and wider inputs, make a model cast its parameters back"
        )


def wide_work(jaxpr: Any, precision: Precision) -> WideWork | None:
    """What a traced step computes wider than asked; None: nothing worth telling, or nothing was asked."""
    if precision.compute is None:
        return None
    asked, all_flops = jnp.dtype(precision.compute).itemsize, 0
    wide: dict[tuple[str, str], int] = {}
    for flops, eqn in _products(jaxpr, 1):
        dtypes = [x.aval.dtype for x in eqn.invars[:2]]
        all_flops += flops
        if all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > asked for dtype in dtypes):
            key = dtypes[0].name, source_info_util.summarize(eqn.source_info)
            wide[key] = wide.get(key, 0) + flops
    if sum(wide.values()) < max(TOLD_FROM * all_flops, 1):
        return None
    dtype, where = max(wide, key=lambda key: wide[key])
    return WideWork(precision=precision, share=sum(wide.values()) / all_flops, dtype=dtype, where=where)


def _products(jaxpr: Any, times: int) -> Iterator[tuple[int, Any]]:
    """(FLOPs, equation) of every matmul and convolution, those in loops as often as they run."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            lhs, rhs = (x.aval for x in eqn.invars[:2])
            numbers = eqn.params["dimension_numbers"]
            if eqn.primitive.name == "dot_general":
                each = math.prod(lhs.shape[dim] for dim in numbers[0][0])
            else:  # the kernel's window and input features
                each = rhs.size // max(rhs.shape[numbers.rhs_spec[0]], 1)
            yield 2 * times * eqn.outvars[0].aval.size * each, eqn
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from _products(inner, times * length)


@dataclasses.dataclass(eq=False)
class Numerics:
    """What a step asks of the model it traces. Compared by identity: every trace is its own."""

    precision: Precision = dataclasses.field(default_factory=Precision)
    remat: str | None = None
    """A policy of `meshpar.training.layers`."""
    names: set[str] = dataclasses.field(default_factory=set)
    """Marks for `jax.checkpoint` that its layers were seen to have."""
    gather: Any = None
    """In force while a model is traced whose layers are shards: `meshpar.training.layers.gathering`."""
    prefetch: Any = None
    """(path of the stacked layers, layer, x, rows) -> what a scan gives: `meshpar.training.engines.prefetch`."""
    interleave: int = 1
    """Slices of the rows that a layer runs beside each other: `meshpar.training.interleaved`."""
    num_scans: int = 0
    """Times that the model has called `scan_layers`."""


@contextlib.contextmanager
def numerics(precision: Precision, remat: str | None, interleave: int = 1) -> Iterator[Numerics]:
    """Put in force what a step asks of `dot_general` and of `meshpar.scan_layers`."""
    context = Numerics(precision, remat, interleave=interleave)
    with within(numerics=context):
        yield context


def weight_grad_dtype(dtype: Any) -> jnp.dtype | None:
    """In which dtype the gradient of a weight of dtype `dtype` leaves its matmul, as in `dot_general`.

    None outside of a step.
    """
    context = current().numerics
    return None if context is None else context.precision.reduce_dtype(dtype)


def dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, precision: Any = None, **kwargs: Any
) -> jax.Array:
    """`lax.dot_general` of activations (lhs) and a weight (rhs), whose weight gradient leaves in the reduction dtype.

    XLA places the reduction of a weight's gradient right behind the matmul that makes it, in the dtype of that
    matmul. So the sum over devices is as precise as `Precision.reduce` asks only where the layers use this function:
    pass it as `dot_general=` to Flax layers.
    """
    context = current().numerics

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, dimension_numbers, precision=precision, **kwargs)

    if context is None or not jnp.issubdtype(rhs.dtype, jnp.floating):
        return plain(lhs, rhs)
    reduce = context.precision.reduce_dtype(rhs.dtype)
    if reduce == rhs.dtype:
        return plain(lhs, rhs)
    contracting, batch = (tuple(map(tuple, dims)) for dims in dimension_numbers)
    return _dot(plain, contracting, batch, reduce, lhs, rhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _dot(plain: Any, contracting: Any, batch: Any, reduce: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return plain(lhs, rhs)


def _dot_backward(plain: Any, contracting: Any, batch: Any, reduce: Any, saved: Any, g: jax.Array) -> Any:
    lhs, rhs = saved
    (d_lhs,) = jax.vjp(lambda x: plain(x, rhs), lhs)[1](g)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = contracting, batch
    lhs_free = [d for d in range(lhs.ndim) if d not in lhs_contract and d not in lhs_batch]
    rhs_free = [d for d in range(rhs.ndim) if d not in rhs_contract and d not in rhs_batch]
    # g's dims are (batch, free of lhs, free of rhs): contract it with lhs over what is free in lhs.
    g_batch = tuple(range(len(lhs_batch)))
    g_free = tuple(range(len(lhs_batch), len(lhs_batch) + len(lhs_free)))
    d_rhs = lax.dot_general(
        lhs, g, ((tuple(lhs_free), g_free), (lhs_batch, g_batch)), preferred_element_type=reduce
    )  # (batch, what lhs contracts in lhs's order, free of rhs)
    came = [*rhs_batch, *(rhs_contract[lhs_contract.index(d)] for d in sorted(lhs_contract)), *rhs_free]
    d_rhs = jnp.transpose(d_rhs, [came.index(d) for d in range(rhs.ndim)])
    return d_lhs, d_rhs.astype(rhs.dtype)


_dot.defvjp(lambda plain, _, __, ___, lhs, rhs: (plain(lhs, rhs), (lhs, rhs)), _dot_backward)
