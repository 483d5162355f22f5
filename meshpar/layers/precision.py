"""The dtypes in which a training step stores, computes and reduces parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.hardware.compile_target import KernelChoice
from meshpar.layers.fp8_dot import WeightSharding, dot_with_gradient_dtype, fp8_dot_general, rowwise_fp8_dot_general
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.context import BOUNDARIES, TraceOption, ambient, param_spec, spec_of
from meshpar.sharding.errors import check_cases, check_choice, problem
from meshpar.sharding.jaxprs import equations
from meshpar.sharding.manual_regions import outer_axes, weight_axes
from meshpar.sharding.printing import with_field_docs
from meshpar.sharding.rules import check_pattern
from meshpar.sharding.types import PyTree, axes_of_spec

if TYPE_CHECKING:
    from meshpar.parallel.execution import StageUses


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a training step, as names such as "float32" or "bfloat16".

    Example:
      >>> step = mp.train_step(loss_fn, precision=mp.Precision(compute="bfloat16"))
      >>> mp.Precision(compute="bfloat16").reduce_dtype("bfloat16").name
      'float32'
    """

    params: str | None = None
    """Parameters between steps and in the optimizer. None: the dtype in which the model creates them."""
    compute: str | None = None
    """Forward and backward pass. Parameters are cast before they are gathered, so this dtype is sent. None: the dtype
    of the parameters."""
    reduce: str | None = None
    """Sums of gradients over devices and micro-steps. None: the compute dtype, but at least float32. A 16-bit dtype
    halves the bytes of a reduction, but each partial sum is rounded. Devices sum a gradient in the dtype of the matmul
    that computes it. Flax's linear layers and `dot_general` use the `reduce` dtype for this matmul, other code uses the
    compute dtype (see `explain`)."""

    matmul: str | Mapping[str, str | None] | None = None
    """Format of the matmuls with weights in layers. "fp8" rounds both operands to 8-bit floats in all passes, with a
    scale per tensor (`meshpar.layers.fp8_dot.fp8_dot_general`; for experts `meshpar.moe.grouped`). "fp8-rowwise" has a
    scale per row of activations and column of a weight, and computes weight gradients in the compute dtype
    (`rowwise_fp8_dot_general`). Attention scores, router and output layer stay in the compute dtype. None: no 8-bit
    matmuls. A mapping selects modules: each key is a regular expression for the full path of a module, which includes
    its submodules, and each value is one of these formats. The last match counts. Other modules have no 8-bit matmuls.
    Example: `{r"layers/.*": "fp8", r"layers/attention/out": None}`"""

    def __post_init__(self) -> None:
        if isinstance(self.matmul, Mapping):
            object.__setattr__(self, "matmul", tuple(self.matmul.items()))  # to be hashable
        for field in ("params", "compute", "reduce"):
            _check_dtype(field, getattr(self, field), FLOATS)
        for pattern, word in self._matmuls:
            check_pattern(pattern)
            _check_dtype("matmul", word, MATMULS)

    @property
    def _matmuls(self) -> tuple[tuple[str, str | None], ...]:
        value: Any = self.matmul
        is_mapping = isinstance(value, tuple) and all(isinstance(item, tuple) for item in value)
        return value if is_mapping else ((".*", value),)

    def matmul_in(self, module: str) -> tuple[str | None, set[str]]:
        """Return the format of the matmuls of a module, and the patterns that match the module or a parent."""
        paths = list(itertools.accumulate(module.split("/"), "{}/{}".format))
        matches = [item for item in self._matmuls if any(re.fullmatch(item[0], path) for path in paths)]
        return (matches[-1][1] if matches else None), {pattern for pattern, _ in matches}

    def narrow(self, paths: Iterable[str], by: str | None = None) -> frozenset[str]:
        """Return those of the parameter paths whose modules have 8-bit matmuls, or 8-bit matmuls in the format `by`."""
        if self.matmul is None:
            return frozenset()
        formats = MATMULS if by is None else (by,)
        return frozenset(path for path in paths if self.matmul_in(path.rpartition("/")[0])[0] in formats)

    def unmatched(self, matched: Collection[str]) -> str | None:
        """Return the first pattern of `matmul` that matched no module, or None."""
        patterns = [] if self.matmul is None else [pattern for pattern, _ in self._matmuls]
        return next((pattern for pattern in patterns if pattern not in matched), None)

    def reduce_dtype(self, compute: jax.typing.DTypeLike) -> jnp.dtype:
        if jnp.issubdtype(compute, jnp.complexfloating):  # a real dtype would drop the imaginary part
            return jnp.dtype(compute)
        return jnp.dtype(self.reduce) if self.reduce else jnp.promote_types(compute, jnp.float32)


def as_precision(precision: Precision | None, where: str) -> Precision:
    """Return the precision, or `Precision()` for None. Other types are a `MeshparError`."""
    if precision is not None and not isinstance(precision, Precision):
        compute = precision if isinstance(precision, str) and precision in FLOATS else "bfloat16"
        requested, reason = f"use precision={precision!r}", f"it is a {type(precision).__name__} and not a Precision"
        raise problem(where, requested, reason, f'write mp.Precision(compute="{compute}")', "wrong-type")
    return Precision() if precision is None else precision


FLOATS = ("float64", "float32", "bfloat16", "float16")
BY_ROW = "fp8-rowwise"
MATMULS = ("fp8", BY_ROW)
_UNSUPPORTED = {
    "fp8-blockwise": "XLA has no kernel for it, and multiplies in 16 bits or keeps the product of each block in memory",
    "mxfp8": "XLA compiles jax.nn.scaled_dot_general to 16-bit matmuls without a GPU, and jax.lax.scaled_dot only for "
    "a single device",
    "nvfp4": "jax.nn.scaled_dot_general supports it for inference, with gradients in 16 bits",
}
"""Formats of other frameworks that are not supported, with the reason (tested with jax 0.10.2 and 0.12.0)."""


def _check_dtype(field: str, value: str | None, choices: tuple[str, ...]) -> None:
    reason = _UNSUPPORTED.get(value or "") if field == "matmul" else None
    case = reason is not None, reason or "", f"use {choices[-1]!r}"
    check_cases("Precision()", f"use matmul={value!r}", "unsupported-feature", case)
    kind = "the format of matmuls" if field == "matmul" else f"the dtype of {field}"
    check_choice("Precision()", kind, (*choices, None), **{field: value})


def check_bits(where: str, dtype: str) -> None:
    """Check that a 64-bit dtype is only used if jax supports 64 bits."""
    is_rounded = jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype)
    reason = "jax rounds 64-bit dtypes to 32 bits unless jax_enable_x64 is set"
    case = is_rounded, reason, 'use "float32", or set jax_enable_x64'
    check_cases(where, f"use {dtype!r}", "unsupported-feature", case)


def cast_floating(tree: PyTree, dtype: str | None) -> PyTree:
    """Cast the floating leaves of a tree. None returns the tree unchanged."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


# ---- Matmuls in a higher precision than requested -------------------------------------------------------------------

MIN_REPORTED_SHARE = 0.1
"""Share of a step's matmul FLOPs below which high-precision matmuls, such as a router's, are not reported."""


class WideWork(NamedTuple):
    """Matmuls and convolutions of a step in a higher precision than `Precision.compute`."""

    where: str
    """Source line with the most FLOPs."""
    message: str
    fix: str


def cast_back_fix(compute: str | None) -> str:
    """Return the advice for a model that casts its parameters to a higher precision."""
    return (
        f"build the model's modules with dtype={compute}, and cast inputs and constants to it: modules cast "
        "their parameters to their own dtype, or promote them to the dtype of the inputs"
    )


def high_precision_ops(
    jaxpr: core.Jaxpr | core.ClosedJaxpr, compute: str | None, meant: Collection[str] = ()
) -> WideWork | None:
    """Return the matmuls of a traced step in a wider dtype than `compute`, or None for a negligible share.

    Dtypes in `meant`, which precision rules assign to modules, are not reported.
    """
    if compute is None:
        return None
    itemsize, all_flops = jnp.dtype(compute).itemsize, 0
    flops_by_source: dict[tuple[str, str], int] = {}
    for flops, eqn in products(jaxpr):
        dtypes = [x.aval.dtype for x in eqn.invars[:2]]
        all_flops += flops
        is_wide = all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > itemsize for dtype in dtypes)
        if is_wide and dtypes[0].name not in meant:
            key = dtypes[0].name, source_info_util.summarize(eqn.source_info)
            flops_by_source[key] = flops_by_source.get(key, 0) + flops
    if sum(flops_by_source.values()) < max(MIN_REPORTED_SHARE * all_flops, 1):
        return None
    dtype, where = max(flops_by_source, key=lambda key: flops_by_source[key])
    message = (
        f"{sum(flops_by_source.values()) / all_flops:.0%} of the matmul FLOPs are in {dtype}, most of them at {where}, "
        f"although Precision(compute={compute!r}) casts the parameters"
    )
    return WideWork(where, message, cast_back_fix(compute))


def products(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> Iterator[tuple[int, Any]]:
    """Yield (FLOPs, equation) of each matmul and convolution. FLOPs count all iterations of enclosing scans."""
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            lhs, rhs = (x.aval for x in eqn.invars[:2])
            numbers = eqn.params["dimension_numbers"]
            if eqn.primitive.name == "dot_general":
                each = math.prod(lhs.shape[dim] for dim in numbers[0][0])
            else:  # the kernel's window and input features
                each = rhs.size // max(rhs.shape[numbers.rhs_spec[0]], 1)
            yield 2 * times * eqn.outvars[0].aval.size * each, eqn


@dataclasses.dataclass(eq=False)
class Numerics:
    """Options of a step for the model that it traces. Compared by identity, because each trace needs a new object."""

    precision: Precision = dataclasses.field(default_factory=Precision)
    remat: str | None = None
    """Remat specification; see `meshpar.layers.remat.remat_policy`."""
    names: set[str] = dataclasses.field(default_factory=set)
    """Names for `jax.checkpoint` that the layers use."""
    batch_slices: int = 1
    """Number of slices of the local batch on which each layer runs; see `meshpar.layers.batch_slices`."""
    num_scans: int = 0
    """Number of calls of `scan_layers` so far."""
    matched: set[str] = dataclasses.field(default_factory=set)
    """Patterns of `Precision.matmul` that matched a module with a supported matmul."""
    kernels: dict[str, KernelChoice] = dataclasses.field(default_factory=dict)
    """Implementations that "auto" chose or the model names, by operation."""
    stage_uses: StageUses | None = None
    """Uses of parameters by pipeline stages, recorded by their engine."""


NUMERICS = TraceOption[Numerics]("numerics")
REGATHERS = TraceOption[bool]("regathers")
"""Whether the runner of the layers gathers their weights in both passes; see `LayerRunner.regathers`."""


@contextlib.contextmanager
def numerics(precision: Precision, remat: str | None, batch_slices: int = 1) -> Iterator[Numerics]:
    """Set the options of a step for `dot_general` and `meshpar.scan_layers`."""
    context = Numerics(precision, remat, batch_slices=batch_slices)
    with NUMERICS.set(context):
        yield context


def record_kernel(operation: str, choice: KernelChoice) -> None:
    """Record an implementation that "auto" chose or the model names, for the reports of `train` and `explain`."""
    if (context := NUMERICS.value) is not None:
        context.kernels[operation] = choice


def matmul_here() -> str | None:
    """Return the matmul format of the module that is being traced: one of `MATMULS`, or None."""
    context, boundaries = NUMERICS.value, BOUNDARIES.value
    if context is None or context.precision.matmul is None:
        return None
    word, matched = context.precision.matmul_in("" if boundaries is None else boundaries.module)
    context.matched |= matched
    return word


def check_wide(where: str, operation: str, fix: str) -> None:
    """Check that the module does not request 8-bit matmuls, for kernels that do not support them."""
    requested = f"compute {operation} in 8 bits for Precision(matmul={(word := matmul_here())!r})"
    check_cases(where, requested, "unsupported-feature", (word is not None, "the kernel has no 8-bit matmuls", fix))


def check_narrow(word: str, dtype: jax.typing.DTypeLike) -> None:
    """Check that 8-bit matmuls support the dtype of an operand."""
    fix = 'use compute="bfloat16", or select modules with a mapping from patterns'
    check_cases(
        f"Precision(matmul={word!r})", f"multiply by a weight in {jnp.dtype(dtype).name}", "wrong-dtype",
        (jnp.issubdtype(dtype, jnp.complexfloating), "8-bit floats have no imaginary part", fix),
        (dtype == jnp.float16, "sums of 8-bit products exceed the range of float16", fix),
    )  # fmt: skip


def weight_grad_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype | None:
    """Return the dtype of the weight gradient's matmul, as in `dot_general`, or None outside a step."""
    context = NUMERICS.value
    return None if context is None else context.precision.reduce_dtype(dtype)


def _weight_sharding(weight: jax.Array, names: tuple[str | None, ...]) -> WeightSharding | None:
    axes, context = weight_axes(weight, *names, in_region=True), ambient()
    if context is None or not any(axes):
        return None
    return WeightSharding(jax.sharding.get_abstract_mesh() if outer_axes() else context.mesh, axes)


_FP8_DOTS = {"fp8": fp8_dot_general, BY_ROW: rowwise_fp8_dot_general}


def _replicated_heads(weight: jax.Array, names: tuple[str | None, ...]) -> NamedSharding | None:
    """Return the gathered layout of a weight whose key heads are replicated over the axes that shard query heads.

    Without this layout, XLA divides the matmul among the ranks of these axes, and exchanges parts of the weight and of
    its gradient. None: the weight is not such a weight, or the engine has gathered it.
    """
    context, is_gathered = ambient(), REGATHERS.value
    if context is None or "kv_heads" not in names or is_gathered or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    heads = spec_of(jax.ShapeDtypeStruct((context.mesh.size,), weight.dtype), "act_heads")
    query_axes = {axis for axis in axes_of_spec(heads) if context.mesh.shape[axis] > 1}
    axes = set(axes_of_spec(param_spec(weight, *names)))
    if not axes or not query_axes or query_axes & axes:
        return None
    return NamedSharding(context.mesh, PartitionSpec())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient_layout(layout: NamedSharding, weight: jax.Array) -> jax.Array:
    """Return the weight, whose gradient has this layout before it is scattered."""
    return weight


_with_gradient_layout.defvjp(lambda _, weight: (weight, None), lambda layout, _, g: (with_layout(g, layout),))


def dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any,
    precision: jax.lax.PrecisionLike = None, *, low_precision: bool = True, names: tuple[str | None, ...] = (),
    **kwargs: Any,
) -> jax.Array:  # fmt: skip
    """Return `lax.dot_general` of activations (lhs) and a weight (rhs), whose gradient has the reduction dtype.

    XLA reduces a weight gradient over devices directly after its matmul, in the dtype of that matmul. The sum over
    devices therefore has the dtype `Precision.reduce` only in layers that use this function. Pass it as `dot_general=`
    to Flax layers.

    Args:
      lhs, rhs: activations and weight.
      dimension_numbers, precision, **kwargs: see `lax.dot_general`.
      low_precision: whether `Precision.matmul` applies. False in output layers, for example.
      names: logical names of the weight's dims, which tell 8-bit matmuls the dims that tensor parallelism shards.
    """
    context = NUMERICS.value
    contracting, batch = (tuple(map(tuple, dims)) for dims in dimension_numbers)
    if context is not None and low_precision and (word := matmul_here()) is not None:
        check_narrow(word, jnp.result_type(lhs, rhs) if jnp.iscomplexobj(lhs) else rhs.dtype)
        reduce = context.precision.reduce_dtype(rhs.dtype)
        return _FP8_DOTS[word](contracting, batch, reduce, _weight_sharding(rhs, names), lhs.astype(rhs.dtype), rhs)

    layout = _replicated_heads(rhs, names)

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        # The backward pass gathers the weight again, because `dot_with_gradient_dtype` saves its shard.
        b = b if layout is None else with_layout(b, layout)
        return lax.dot_general(a, b, dimension_numbers, precision=precision, **kwargs)

    grad_dtype = weight_grad_dtype(rhs.dtype) if jnp.issubdtype(rhs.dtype, jnp.floating) else None
    if layout is not None and grad_dtype is not None:
        rhs = _with_gradient_layout(layout, rhs)
    elif grad_dtype is None or grad_dtype == rhs.dtype:
        return plain(lhs, rhs)
    return dot_with_gradient_dtype(plain, contracting, batch, grad_dtype, lhs, rhs)


@dataclasses.dataclass(frozen=True)
class NamedDot:
    """`dot_general` for a weight whose dims have these names. Equal names make equal objects, as Flax needs."""

    names: tuple[str | None, ...]

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        return dot_general(*operands, names=self.names, **options)
