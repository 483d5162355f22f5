"""tokamax's grouped matmul and its gradients as a JAX primitive that is expanded at lowering.

Inside a `shard_map`, tokamax's arithmetic does not track varying mesh axes, and JAX (0.12) rejects it whenever the
equation is traced. A primitive is a single equation whose results vary like the operands. Its body is traced as for a
single device.

The plain reference of these kernels is the blocked implementation in `meshpar.moe.grouped`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from meshpar.collectives.kernel_checks import library_errors
from meshpar.hardware.compile_target import target

GROUPED_MATMUL = "tokamax_ragged_dot"
"""Name of the primitive. Its parameter `operand` is an element of `meshpar.hardware.grouped_kernels.OPERANDS`."""
SCOPE = "tokamax_rows_"
"""Prefix of the kernels' named scope. The typical number of rows and the operand follow."""
REFUSED = ('grouped_matmul(implementation="tokamax")', "multiply", "use implementation='blocked'")
"""Where, operation and fix in error messages of these kernels (the first arguments of `library_errors`)."""


def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, kernel: str, typical_rows: int) -> jax.Array:
    """[R, d] . [G, d, f] -> [R, f], with rows sorted by group. Unassigned rows of the result are undefined.

    Kernels skip rows past the sum of `sizes`, which is usually `typical_rows`. The named scope contains `typical_rows`,
    so that FLOPs of compiled programs can be counted.
    """
    return _bind("product", rows, weights, sizes, kernel, typical_rows)


def rows_gradient(
    grad: jax.Array, weights: jax.Array, sizes: jax.Array, *, kernel: str, typical_rows: int
) -> jax.Array:
    """Return the gradient of `product` for rows. Unassigned rows of the result are undefined.

    [R, f] . [G, d, f] -> [R, d]
    """
    return _bind("rows", grad, weights, sizes, kernel, typical_rows)


def weights_gradient(
    rows: jax.Array, grad: jax.Array, sizes: jax.Array, *, kernel: str, typical_rows: int
) -> jax.Array:
    """Return the gradient of `product` for weights, written once. Empty groups have zeros.

    [R, d] . [R, f] -> [G, d, f]
    """
    return _bind("weights", rows, grad, sizes, kernel, typical_rows)


def _bind(operand: str, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, kernel: str, typical_rows: int) -> jax.Array:
    return _grouped_matmul.bind(lhs, rhs, sizes, operand=operand, kernel=kernel, typical_rows=typical_rows)[0]


def zero_unassigned(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Replace rows past the last group by zeros."""
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None], x, jnp.zeros_like(x))


_NUMBERS = {
    operand: lax.RaggedDotDimensionNumbers((contracted, ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=dims)
    for operand, contracted, dims in (
        ("product", ([1], [1]), [0]), ("rows", ([1], [2]), [0]), ("weights", ([0], [0]), []),
    )
}  # fmt: skip


def _run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, operand: str, kernel: str) -> jax.Array:
    import tokamax  # type: ignore[import-not-found,unused-ignore]

    # Mosaic's kernel multiplies rows of other groups by zero, so they must be finite. It does not write gradients of
    # empty groups. Triton's kernel reads only the rows of a group, and writes zeros for empty groups.
    is_masked = operand == "weights" and kernel == "mosaic"
    if is_masked:
        lhs, rhs = zero_unassigned(lhs, sizes), zero_unassigned(rhs, sizes)
    with library_errors(*REFUSED, lhs, rhs):
        # With the total size and this dtype, tokamax finds the kernel's parameters in its tuning files.
        group_sizes, dtype = (
            tokamax.RaggedDotGroupSizes(sizes, lhs.shape[0]),
            None if operand == "product" else lhs.dtype,
        )
        out = tokamax.ragged_dot_general(
            lhs, rhs, group_sizes, _NUMBERS[operand], preferred_element_type=dtype, implementation=kernel,
            bypass_device_check=False,
        )  # fmt: skip
    return jnp.where((sizes > 0)[:, None, None], out, jnp.zeros_like(out)) if is_masked else out


def _result(lhs: Any, rhs: Any, sizes: Any, *, operand: str, **_: Any) -> tuple[Any]:
    """Return the abstract result, which varies over the same mesh axes as the operands."""
    shapes = {
        "product": (lhs.shape[0], rhs.shape[-1]), "rows": (lhs.shape[0], rhs.shape[1]),
        "weights": (*sizes.shape, lhs.shape[-1], rhs.shape[-1]),
    }  # fmt: skip
    return (lhs.update(shape=shapes[operand]),)


def _in_scope(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, operand: str, kernel: str, typical_rows: int
) -> tuple[jax.Array]:
    with jax.named_scope(f"{SCOPE}{typical_rows}_{operand}"):
        return (_run(lhs, rhs, sizes, operand=operand, kernel=kernel),)


def _lower(ctx: Any, *args: Any, **params: Any) -> Any:
    """Trace the kernel without varying axes, and lower it."""
    avals = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    with _triton_target(params["kernel"]):
        return mlir.lower_fun(_in_scope, multiple_results=True)(ctx.replace(avals_in=avals), *args, **params)


@contextlib.contextmanager
def _triton_target(kernel: str) -> Iterator[None]:
    """Let Triton compile for the GPU that the program is traced for, in PTX that XLA's assembler can read.

    `jax_triton.triton_call` has arguments for both, but tokamax 0.0.17 does not pass them. Without them, the compute
    capability is that of the local GPU, and the PTX version that of Triton's assembler, which may be newer than XLA's.
    """
    if kernel != "triton":
        yield
        return
    from jax_triton import triton_lib  # type: ignore[import-not-found,unused-ignore]
    from triton import knobs  # type: ignore[import-not-found,unused-ignore]

    major, minor = target()[1] or (0, 0)
    capability = 10 * major + minor
    with (
        mock.patch.object(triton_lib.triton_kernel_call_lib, "get_compute_capability", return_value=capability),
        knobs.nvidia.scope(),
    ):
        knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path  # the assembler of CUDA 12, whose PTX newer ones read
        yield


_grouped_matmul = Primitive(GROUPED_MATMUL)
_grouped_matmul.multiple_results = True
_grouped_matmul.def_impl(lambda *args, **params: jax.jit(lambda *x: _grouped_matmul.bind(*x, **params))(*args))
_grouped_matmul.def_abstract_eval(_result)
mlir.register_lowering(_grouped_matmul, _lower)
