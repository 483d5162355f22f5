"""tokamax's grouped matmul and its gradients, as primitives that are opened when they are lowered and not before.

A `shard_map` follows which axes each value varies over. The package's arithmetic does not say so, jax asserts about it
(0.12), and its rules ask again whenever an equation is traced anew; so there is one equation for it all, whose result
varies as its operands do, and what is in it is traced as for one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from meshpar.sharding.types import MeshparError, problem

PRODUCT, GRADIENTS = "tokamax_ragged_dot", "tokamax_ragged_dot_gradients"
SCOPE = "tokamax_rows_"
"""Behind it the number of rows that there are as a rule."""


def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, typical_rows: int) -> jax.Array:
    """[R, d] . [G, d, f] -> [R, f], rows sorted by group; what stands in rows of no group is not said.

    Args:
      typical_rows: what `sizes` sum to as a rule. Kernels visit no others; the compiled program says it, in the name of
        their scope, to whoever counts FLOPs.

    Raises:
      ValueError: while it is lowered, where the package has no kernel for it.
    """
    return _product.bind(rows, weights, sizes, typical_rows=typical_rows)[0]


def gradients(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, grad: jax.Array, *, typical_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Of `product`, for the cotangent [R, f]: those of rows and weights. Rows of no group are zeros on both sides."""
    d_rows, d_weights = _gradients.bind(rows, weights, sizes, grad, typical_rows=typical_rows)
    return d_rows, d_weights


def _ragged_dot(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    import tokamax  # type: ignore[import-not-found,unused-ignore]

    # Of these names the package takes the first that can do it; its own fallback to XLA's masked product is not there.
    with _refusals(rows, weights):
        return tokamax.ragged_dot(rows, weights, sizes, implementation=("mosaic", "triton"))


def _pulled(rows: jax.Array, weights: jax.Array, sizes: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, pull = jax.vjp(lambda r, w: _ragged_dot(r, w, sizes), rows, weights)
    with _refusals(rows, weights):  # not all GPUs that have a kernel have those of its gradients
        return pull(grad)


@contextlib.contextmanager
def _refusals(rows: jax.Array, weights: jax.Array) -> Iterator[None]:
    """What the package has no kernel for, on this device or with this release and jax, as an error of ours."""
    try:
        yield
    except (NotImplementedError, ExceptionGroup, ValueError) as error:
        if isinstance(error, MeshparError):
            raise
        asked = f"multiply {rows.dtype}{list(rows.shape)} and {weights.dtype}{list(weights.shape)} by tokamax's kernels"
        raise problem("grouped_matmul", asked, f"it refuses: {error}", "take implementation='blocked'") from error


def _primitive(
    name: str, run: Callable[..., tuple[jax.Array, ...]], shapes: Callable[..., tuple[Any, ...]]
) -> Primitive:
    """A primitive of arrays whose results are shaped as `shapes` says of its operands."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(lambda *given, **how: jax.jit(lambda *x: made.bind(*x, **how))(*given))
    made.def_abstract_eval(shapes)

    def named(*given: jax.Array, typical_rows: int) -> tuple[jax.Array, ...]:
        with jax.named_scope(f"{SCOPE}{typical_rows}"):
            return run(*given)

    def lowered(ctx: Any, *given: Any, **how: Any) -> Any:
        plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
        return mlir.lower_fun(named, multiple_results=True)(ctx.replace(avals_in=plain), *given, **how)

    mlir.register_lowering(made, lowered)
    return made


_product = _primitive(
    PRODUCT,
    lambda rows, weights, sizes: (_ragged_dot(rows, weights, sizes),),
    lambda rows, weights, *_, **__: (rows.update(shape=(rows.shape[0], weights.shape[2])),),
)
_gradients = _primitive(GRADIENTS, _pulled, lambda rows, weights, *_, **__: (rows, weights))
