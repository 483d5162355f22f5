"""tokamax's grouped matmul and its gradients as JAX primitives that are expanded at lowering.

Inside a `shard_map`, tokamax's arithmetic does not track varying mesh axes, and JAX (0.12) rejects it whenever the
equation is traced. A primitive is a single equation whose results vary like the operands. Its body is traced as for a
single device.

The plain reference of these kernels is the blocked implementation in `meshpar.moe.grouped`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from meshpar.collectives.kernel_checks import library_errors

PRODUCT, GRADIENTS = "tokamax_ragged_dot", "tokamax_ragged_dot_gradients"
SCOPE = "tokamax_rows_"
"""Prefix of the kernels' named scope. The typical number of rows follows."""
REFUSED = ('grouped_matmul(implementation="tokamax")', "multiply", "use implementation='blocked'")
"""Where, operation and fix in error messages of these kernels (the first arguments of `library_errors`)."""


def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, typical_rows: int) -> jax.Array:
    """[R, d] . [G, d, f] -> [R, f], with rows sorted by group. Unassigned rows of the result are undefined.

    Kernels skip rows past the sum of `sizes`, which is usually `typical_rows`. The named scope contains `typical_rows`,
    so that FLOPs of compiled programs can be counted.
    """
    return _product.bind(rows, weights, sizes, typical_rows=typical_rows)[0]


def gradients(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, grad: jax.Array, *, typical_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `product` for rows and weights. Unassigned rows of `rows` and `grad` must be zero."""
    d_rows, d_weights = _gradients.bind(rows, weights, sizes, grad, typical_rows=typical_rows)
    return d_rows, d_weights


def _ragged_dot(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    import tokamax  # type: ignore[import-not-found,unused-ignore]

    # tokamax uses the first of these that supports the operands. Without the list it could fall back to XLA, which
    # multiplies all rows with all groups.
    with library_errors(*REFUSED, rows, weights):
        return tokamax.ragged_dot(rows, weights, sizes, implementation=("mosaic", "triton"))


def _ragged_dot_vjp(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    _, pull = jax.vjp(lambda r, w: _ragged_dot(r, w, sizes), rows, weights)
    with library_errors(*REFUSED, rows, weights):  # some GPUs have a kernel for the product and none for its gradients
        return pull(grad)


def _primitive(
    name: str, run: Callable[..., tuple[jax.Array, ...]], abstract_eval: Callable[..., tuple[Any, ...]]
) -> Primitive:
    """Return a primitive whose lowering traces `run` without varying axes."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **params: jax.jit(lambda *x: primitive.bind(*x, **params))(*args))
    primitive.def_abstract_eval(abstract_eval)

    def in_scope(*args: jax.Array, typical_rows: int) -> tuple[jax.Array, ...]:
        with jax.named_scope(f"{SCOPE}{typical_rows}"):
            return run(*args)

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        avals = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
        return mlir.lower_fun(in_scope, multiple_results=True)(ctx.replace(avals_in=avals), *args, **params)

    mlir.register_lowering(primitive, lower)
    return primitive


_product = _primitive(
    PRODUCT,
    lambda rows, weights, sizes: (_ragged_dot(rows, weights, sizes),),
    lambda rows, weights, *_, **__: (rows.update(shape=(rows.shape[0], weights.shape[2])),),
)
_gradients = _primitive(GRADIENTS, _ragged_dot_vjp, lambda rows, weights, *_, **__: (rows, weights))
