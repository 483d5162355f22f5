"""Precision: in which dtype parameters are kept, computed with and reduced."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util

from meshpar.layers.fp8_dot import Split, fp8_dot_general, rowwise_fp8_dot_general, wide_gradient_dot
from meshpar.sharding.context import ambient, current, within
from meshpar.sharding.jaxprs import equations
from meshpar.sharding.manual_regions import outer_axes, weight_axes
from meshpar.sharding.rules import check_pattern
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
    dtype halves the bytes of a reduction and rounds at every hop. Over devices a gradient is summed in the dtype that
    its matmul gives it: this one in linear layers of Flax's and with `dot_general`, else the compute dtype, as
    `explain` says."""

    matmul: str | Mapping[str, str | None] | None = None
    """Matmuls with weights inside of layers: "fp8" rounds both operands to 8-bit floats, forward and backward, each by
    a scale of its own (`meshpar.layers.fp8_dot.float8_dot`; experts: `meshpar.moe.grouped`);
    "fp8-rowwise" has one for each row of activations and column of a weight, and weights' gradients stay wide
    (`float8_rows_dot`).
    Attention, router, output layer and everything else stay in the compute dtype. None: as they are. A mapping says it
    by path: pattern of a module's whole path to one of these, for it and all that it holds; a pattern that stands later
    wins, and what none matches stays as it is. `{r"layers/.*": "fp8", r"layers/attention/out": None}`"""

    def __post_init__(self) -> None:
        if isinstance(self.matmul, Mapping):
            object.__setattr__(self, "matmul", tuple(self.matmul.items()))  # a precision is hashed
        for field in ("params", "compute", "reduce"):
            _check_word(field, getattr(self, field), FLOATS, "it is no floating dtype")
        for pattern, word in self._matmuls:
            check_pattern(pattern)
            _check_word("matmul", word, MATMULS, _BY_BLOCK.get(str(word), f"there is {', '.join(MATMULS)}"))

    @property
    def _matmuls(self) -> tuple[tuple[str, str | None], ...]:
        said: Any = self.matmul
        is_mapping = isinstance(said, tuple) and all(isinstance(one, tuple) for one in said)
        return said if is_mapping else ((".*", said),)

    def matmul_in(self, module: str) -> tuple[str | None, set[str]]:
        """How the matmuls of the module at a path are computed, and the patterns that match it or what it stands in."""
        paths = list(itertools.accumulate(module.split("/"), "{}/{}".format))
        found = [one for one in self._matmuls if any(re.fullmatch(one[0], path) for path in paths)]
        return (found[-1][1] if found else None), {pattern for pattern, _ in found}

    def narrow(self, paths: Iterable[str], by: str | None = None) -> frozenset[str]:
        """Of parameters' paths those in modules whose matmuls are in 8 bits, or by one of `MATMULS`."""
        if self.matmul is None:
            return frozenset()
        words = MATMULS if by is None else (by,)
        return frozenset(path for path in paths if self.matmul_in(path.rpartition("/")[0])[0] in words)

    def unmatched(self, matched: Collection[str]) -> str | None:
        """The first pattern of `matmul` that is not among those that a model's modules matched; None: there is none."""
        said = () if self.matmul is None else self._matmuls
        return next((pattern for pattern, _ in said if pattern not in matched), None)

    def reduce_dtype(self, compute: Any) -> jnp.dtype:
        if jnp.issubdtype(compute, jnp.complexfloating):  # in no real dtype, which would drop the imaginary part
            return jnp.dtype(compute)
        return jnp.dtype(self.reduce) if self.reduce else jnp.promote_types(compute, jnp.float32)


def as_precision(precision: Precision | None, where: str) -> Precision:
    """A precision as it is, and None as one that says nothing.

    Raises:
      ValueError: it is something else.
    """
    if precision is not None and not isinstance(precision, Precision):
        named = precision if isinstance(precision, str) and precision in FLOATS else "bfloat16"
        exists, fix = f"it is a {type(precision).__name__}, no Precision", f'write mp.Precision(compute="{named}")'
        raise problem(f"{where}(precision={precision!r})", "compute by it", exists, fix)
    return Precision() if precision is None else precision


FLOATS = ("float64", "float32", "bfloat16", "float16")
BY_ROW = "fp8-rowwise"
MATMULS = ("fp8", BY_ROW)
_BY_BLOCK = {
    "fp8-blockwise": "XLA has no kernel for it: it multiplies in 16 bits, or keeps each block's product in memory",
    "mxfp8": "compiled without a GPU, XLA makes products in 16 bits of jax.nn.scaled_dot_general, and "
    "jax.lax.scaled_dot compiles for one device alone",
    "nvfp4": "jax.nn.scaled_dot_general has it for inference: its gradients are in 16 bits",
}
"""Recipes of other frameworks, and why they are not here (tried with jax 0.10.2 and 0.12.0)."""


def _check_word(field: str, word: str | None, known: tuple[str, ...], exists: str) -> None:
    if word is not None and word not in known:
        fix = f"use {known[-1]!r}" if word in _BY_BLOCK else near(str(word), known)
        raise problem(f"Precision({field}={word!r})", "use that dtype", exists, fix)


def check_bits(where: str, dtype: str) -> None:
    """Raises `ValueError` for 64 bits where jax has none."""
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        exists = "jax keeps 32 bits of them unless jax_enable_x64 is set, and would round them without a word"
        raise problem(where, f"be {dtype!r}", exists, 'say so: "float32", or set it')


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
        return cast_back_fix(self.precision)


def cast_back_fix(precision: Precision) -> str:
    """What to do with a model that computes wider than it is asked to."""
    return (
        f"build the model's modules with dtype={precision.compute}, and cast wider inputs in the loss function: "
        "modules of a wider dtype, and wider inputs and constants, make a model cast its parameters back"
    )


def wide_work(jaxpr: Any, precision: Precision, meant: Collection[str] = ()) -> WideWork | None:
    """What a traced step computes wider than asked; None: nothing worth telling, or nothing was asked.

    `meant` are dtypes that rules give to some modules.
    """
    if precision.compute is None:
        return None
    asked, all_flops = jnp.dtype(precision.compute).itemsize, 0
    wide: dict[tuple[str, str], int] = {}
    for flops, eqn in products(jaxpr):
        dtypes = [x.aval.dtype for x in eqn.invars[:2]]
        all_flops += flops
        is_wide = all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > asked for dtype in dtypes)
        if is_wide and dtypes[0].name not in meant:
            key = dtypes[0].name, source_info_util.summarize(eqn.source_info)
            wide[key] = wide.get(key, 0) + flops
    if sum(wide.values()) < max(TOLD_FROM * all_flops, 1):
        return None
    dtype, where = max(wide, key=lambda key: wide[key])
    return WideWork(precision=precision, share=sum(wide.values()) / all_flops, dtype=dtype, where=where)


def products(jaxpr: Any) -> Iterator[tuple[int, Any]]:
    """Yield the FLOPs and the equation of each matmul and convolution, multiplied by the runs of enclosing scans."""
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
    """What a step asks of the model it traces. Compared by identity: every trace is its own."""

    precision: Precision = dataclasses.field(default_factory=Precision)
    remat: str | None = None
    """A policy of `meshpar.layers.scan`."""
    names: set[str] = dataclasses.field(default_factory=set)
    """Marks for `jax.checkpoint` that its layers were seen to have."""
    gather: Any = None
    """In force while a model is traced whose layers are shards: `meshpar.layers.scan.gathering`."""
    prefetch: Any = None
    """(path of the stacked layers, layer, x, rows) -> what a scan gives: `meshpar.training.gradients.fsdp_prefetch`."""
    interleave: int = 1
    """Slices of the rows that a layer runs beside each other: `meshpar.layers.batch_slices`."""
    num_scans: int = 0
    """Times that the model has called `scan_layers`."""
    matched: set[str] = dataclasses.field(default_factory=set)
    """Patterns of `Precision.matmul` that a module matched whose matmuls are computed as it says."""


@contextlib.contextmanager
def numerics(precision: Precision, remat: str | None, interleave: int = 1) -> Iterator[Numerics]:
    """Put in force what a step asks of `dot_general` and of `meshpar.scan_layers`."""
    context = Numerics(precision, remat, interleave=interleave)
    with within(numerics=context):
        yield context


def matmul_here() -> str | None:
    """How the step asks for the matmuls of the module that is being traced: a word of `MATMULS`, or None."""
    context, boundaries = current().numerics, current().boundaries
    if context is None or context.precision.matmul is None:
        return None
    word, matched = context.precision.matmul_in("" if boundaries is None else boundaries.module)
    context.matched |= matched
    return word


def check_wide(where: str, what: str, fix: str) -> None:
    """Raise where a kernel's own matmuls are to be computed in 8 bits, which it cannot."""
    if (word := matmul_here()) is not None:
        asked = f"compute {what} in 8 bits, as Precision(matmul={word!r}) asks"
        raise problem(where, asked, "its kernel has no such products", fix)


def check_narrow(word: str, dtype: Any) -> None:
    """Raise `ValueError` for dtypes that 8-bit matmuls do not support."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        exists = "8-bit floats have no imaginary part"
        fix = "leave matmul out, or set it by modules: matmul={pattern: word}"
        raise problem(f"Precision(matmul={word!r})", f"multiply by a weight in {jnp.dtype(dtype).name}", exists, fix)
    if dtype == jnp.float16:
        exists = "sums of products of 8-bit floats exceed what float16 holds"
        raise problem(f"Precision(matmul={word!r})", "compute in float16 around it", exists, 'use compute="bfloat16"')


def weight_grad_dtype(dtype: Any) -> jnp.dtype | None:
    """In which dtype the gradient of a weight of dtype `dtype` leaves its matmul, as in `dot_general`.

    None outside of a step.
    """
    context = current().numerics
    return None if context is None else context.precision.reduce_dtype(dtype)


def _split_of(weight: jax.Array, names: tuple[str | None, ...]) -> Split | None:
    axes, here = weight_axes(weight, *names, in_region=True), ambient()
    if here is None or not any(axes):
        return None
    return Split(jax.sharding.get_abstract_mesh() if outer_axes() else here.mesh, axes)


_NARROW = {"fp8": fp8_dot_general, BY_ROW: rowwise_fp8_dot_general}


def dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, precision: Any = None, *, narrow: bool = True,
    names: tuple[str | None, ...] = (), **kwargs: Any,
) -> jax.Array:  # fmt: skip
    """`lax.dot_general` of activations (lhs) and a weight (rhs), whose weight gradient leaves in the reduction dtype.

    Where the step asks for it it is computed in fewer bits (`Precision.matmul`), unless `narrow` is False, as in output
    layers. By logical `names` of the weight's dims that knows which of them tensor parallelism splits.

    XLA places the reduction of a weight's gradient right behind the matmul that makes it, in the dtype of that
    matmul. So the sum over devices is as precise as `Precision.reduce` asks only where the layers use this function:
    pass it as `dot_general=` to Flax layers.
    """
    context = current().numerics
    contracting, batch = (tuple(map(tuple, dims)) for dims in dimension_numbers)
    if context is not None and narrow and (word := matmul_here()) is not None:
        check_narrow(word, jnp.result_type(lhs, rhs) if jnp.iscomplexobj(lhs) else rhs.dtype)
        reduce = context.precision.reduce_dtype(rhs.dtype)
        return _NARROW[word](contracting, batch, reduce, _split_of(rhs, names), lhs.astype(rhs.dtype), rhs)

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, dimension_numbers, precision=precision, **kwargs)

    if context is None or not jnp.issubdtype(rhs.dtype, jnp.floating):
        return plain(lhs, rhs)
    reduce = context.precision.reduce_dtype(rhs.dtype)
    if reduce == rhs.dtype:
        return plain(lhs, rhs)
    return wide_gradient_dot(plain, contracting, batch, reduce, lhs, rhs)


@dataclasses.dataclass(frozen=True)
class NamedDot:
    """`dot_general` with a weight whose dims have these names; equal where they are, as Flax compares layers."""

    names: tuple[str | None, ...]

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        return dot_general(*operands, names=self.names, **options)
