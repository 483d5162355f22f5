"""Kernels of a program for GPUs: implementation, dtypes, time, and why no faster one was used.

    kind               recognized by
    attention          a library kernel; the scope of blockwise or ring attention; or batched matmuls and a softmax in a
                       module whose name contains `attention` or `attn`
    grouped matmul     the scope of `meshpar.moe.grouped_matmul` or `grouped_swiglu`
    matmul             any other matmul or convolution, also inside fusions
    optimizer update   kernels without a matmul in the scope `update`
    norm               kernels without a matmul that compute a reciprocal square root
    other              all other kernels

Collectives are not listed. A conditional lists the kernels of all branches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from meshpar.hardware.clusters import Cluster
from meshpar.hardware.compile_target import KernelChoice
from meshpar.hardware.cost_model import KINDS
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.hlo.parser import Computation, Instruction, Module
from meshpar.inspect.hlo.shapes import dtype_bits
from meshpar.inspect.hlo.walk import Visit, executed, runs
from meshpar.inspect.lint import Finding
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.timeline import program_work as work
from meshpar.inspect.timeline.roofline import Roofline
from meshpar.moe import grouped, tokamax_kernels
from meshpar.parallel.execution import Execution
from meshpar.sharding.printing import Plain
from meshpar.sharding.rules import Rules
from meshpar.sharding.units import human_time

Kind = Literal["attention", "matmul", "grouped matmul", "norm", "optimizer update", "other"]
LOOP, PLAIN, SOFTMAX = "XLA loop", "XLA matmuls", "XLA softmax"
"""Implementations of attention without a fused kernel: matmuls in a loop over tiles, matmuls that store all scores, and
the kernels between these matmuls."""
LIBRARIES = {"cudnn": "cuDNN", "mosaic": "tokamax Mosaic", "triton": "tokamax Triton"}
"""Names of the library kernels of attention."""

CHECKED_RULES = ("unfused-attention", "float32-matmul")
"""Lint rules whose findings fail `explain --check`, unless the recipe lists them in `allow`."""
FLOAT32_SHARE = 0.01
"""The rule `float32-matmul` reports modules whose float32 matmuls have more than this fraction of the matmul FLOPs.
The matmul of a router is below it."""

_CALLS = frozenset({"while", "conditional", "call", "async-start"})
_TILED = frozenset({"blockwise_attention", "ring_attention"})
_GROUPED = frozenset({grouped.KERNEL, grouped.SWIGLU})
_BLOCKED = re.compile(rf"({'|'.join(sorted(_GROUPED))})\W.*/while/")
"""Op names of grouped matmuls in a loop over blocks of rows. Groups of equal size are a batched matmul."""
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_EINSUM = re.compile(r"([A-Za-z.]+),([A-Za-z.]+)->([A-Za-z.]+)\Z")
_SOFTMAX = frozenset({"exp", "exp2", "div", "sub", "max", "reduce_max", "reduce_sum", "select_n", "where"})
_GEMMS = (
    ("__cublas$lt$matmul$f8", "cuBLASLt fp8"), ("__cublas$lt", "cuBLASLt"), ("__cublas$gemm", "cuBLAS"),
    ("__cudnn$", "cuDNN"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramKernel:
    """An instruction of the program that runs as a kernel, with its executions in a step."""

    name: str
    computation: str
    kind: Kind
    implementation: str
    dtypes: tuple[str, ...]
    """HLO dtypes of the operands of the largest matmul; for other kernels, the dtype of the largest operand."""
    count: float
    """Executions per step; an average over pipeline stages."""
    flops: float
    """Matmul FLOPs per step."""
    time_s: float
    """Predicted seconds per step."""
    moved_bytes: float
    """Bytes read and written per step."""
    module: str
    phase: str
    """`forward`, `backward`, `optimizer` or `other`."""
    source: str
    product: work.Matmul | None = None
    """The largest matmul, or the library kernel of attention."""

    @property
    def bits(self) -> int:
        """Bits of the narrowest operand dtype."""
        return min(map(dtype_bits, self.dtypes), default=0)

    @property
    def is_unfused_attention(self) -> bool:
        """True for attention that XLA computes with separate matmuls."""
        return self.kind == "attention" and self.implementation in (LOOP, PLAIN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelRow(Plain):
    """Equal kernels of a program: a row of the list of kernels."""

    kind: str
    implementation: str
    dtypes: str
    """Operand dtypes, such as `bf16` or `bf16 × f32`."""
    modules: tuple[str, ...]
    """Modules in the order of their time. A star stands for the layer number."""
    count: float
    """Executions per step."""
    flops: float
    time_s: float
    """Predicted seconds per step."""
    share: float
    """Fraction of the predicted step. The shares of all kernels may exceed 1 if the program has conditionals."""
    reason: str
    """Why a faster implementation was not used; empty if none is known."""


def program_kernels(
    module: Module, cluster: Cluster, schedule_counts: ScheduleCounts | None = None
) -> tuple[ProgramKernel, ...]:
    """Return the kernels of a program that was compiled for a cluster, in program order."""
    listing = _Listing(module, cluster, schedule_counts)
    return tuple(kernel for visit in executed(module) for kernel in listing.kernels(visit))


def kernel_rows(
    kernels: Iterable[ProgramKernel], step_s: float, reason: Callable[[ProgramKernel], str]
) -> tuple[KernelRow, ...]:
    """Merge kernels by kind, implementation, dtypes and reason, and sort the rows by time."""
    groups: dict[tuple[str, ...], list[ProgramKernel]] = {}
    for kernel in kernels:
        dtypes = "" if kernel.kind == "other" or kernel.implementation == SOFTMAX else dtype_text(kernel.dtypes)
        key = (kernel.kind, kernel.implementation, dtypes, reason(kernel))
        groups.setdefault(key, []).append(kernel)
    rows = []
    for (kind, implementation, dtypes, why), members in groups.items():
        time_s, by_module = sum(member.time_s for member in members), dict[str, float]()
        for member in members:
            path = scopes.layerless(member.module)
            by_module[path] = by_module.get(path, 0.0) + member.time_s
        row = KernelRow(
            kind=kind, implementation=implementation, dtypes=dtypes, time_s=time_s, reason=why,
            modules=tuple(sorted(filter(None, by_module), key=lambda path: -by_module[path])),
            count=sum(member.count for member in members), flops=sum(member.flops for member in members),
            share=time_s / step_s if step_s else 0.0,
        )  # fmt: skip
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: -row.time_s))


def dtype_text(dtypes: Sequence[str]) -> str:
    """Return operand dtypes as text: `bf16`, or `bf16 × f32` if they differ."""
    return " × ".join(dict.fromkeys(dtypes))


def reasons(
    choices: Mapping[str, KernelChoice], *, grouped_why: str = "", is_autotuned: bool = True
) -> Callable[[ProgramKernel], str]:
    """Return a function that returns why a faster implementation of a kernel was not used, or an empty text.

    Args:
      choices: the implementations that the model chose (`TrainStep.kernels`).
      grouped_why: why grouped matmuls use no library kernel.
      is_autotuned: whether the program was compiled on a GPU, where XLA measures kernels.
    """

    def reason(kernel: ProgramKernel) -> str:
        if kernel.kind == "attention":
            is_fastest = kernel.implementation in (LIBRARIES["cudnn"], SOFTMAX)
            return "" if is_fastest else _why_unfused(kernel, choices)
        if kernel.kind not in ("matmul", "grouped matmul") or kernel.implementation in LIBRARIES.values():
            return ""
        if kernel.kind == "grouped matmul" and kernel.implementation == LOOP:
            return grouped_why
        if is_float32(kernel):
            return f"{dtype_text(kernel.dtypes)} operands: tensor cores need 16 or 8 bits"
        if kernel.implementation == LOOP and kernel.product is not None:
            sizes = next(kernel.product.ins.shape.leaves()).dims
            is_vector = math.prod(sizes) == max(sizes, default=1)
            return "a matrix-vector product" if is_vector else "XLA fused it with element-wise operations"
        if not is_autotuned and kernel.implementation == "Triton":
            return "not autotuned without a GPU"
        is_fp8 = all(dtype.startswith("f8") for dtype in kernel.dtypes)
        return "XLA did not choose cuBLASLt's fp8 kernel" if is_fp8 and kernel.implementation != "cuBLASLt fp8" else ""

    return reason


def kernel_findings(
    kernels: Sequence[ProgramKernel],
    execution: Execution,
    choices: Mapping[str, KernelChoice],
    activations: Rules,
    outer_scopes: int = 1,
) -> Iterator[Finding]:
    """Yield a finding for each module with unfused attention or float32 matmuls, in a step that computes in 16 bits.

    Attention that the model names (`attention="blockwise"`) and modules with a precision rule are intended. The
    matmuls of the optimizer have their own precision. `outer_scopes` is the number of named scopes around the model.
    """
    if not _computes_in_16_bits(kernels, execution):
        return
    why, total_flops = reasons(choices), sum(kernel.flops for kernel in kernels)
    if "attention" in choices and choices["attention"].is_named:
        kernels = [kernel for kernel in kernels if kernel.kind != "attention"]
    for module, members in _by_module(kernel for kernel in kernels if kernel.is_unfused_attention):
        largest = max(members, key=lambda kernel: kernel.time_s)
        yield Finding(
            rule="unfused-attention",
            module=module,
            source=largest.source,
            message=f"attention runs as separate kernels ({largest.implementation}, matmuls of "
            f"{human_time(sum(kernel.time_s for kernel in members))} per step): {why(largest)}",
            fix="remove the cause, or declare it: name the implementation, as in --set model.attention=blockwise, or "
            "use --set allow=unfused-attention",
            nbytes=0,
        )
    wide = [kernel for kernel in kernels if kernel.flops and is_float32(kernel) and kernel.phase != "optimizer"]
    for module, members in _by_module(wide):
        flops, path = sum(kernel.flops for kernel in members), module.split("/")[outer_scopes:]
        declared = activations.dtype_in("/".join((*path, "kernel")))
        if flops <= FLOAT32_SHARE * total_flops or (declared is not None and np.dtype(declared).itemsize > 2):
            continue
        yield Finding(
            rule="float32-matmul",
            module=module,
            source=max(members, key=lambda kernel: kernel.time_s).source,
            message=f"{flops / total_flops:.0%} of the matmul FLOPs have float32 operands, although the step computes "
            f"in 16 bits: {human_time(sum(kernel.time_s for kernel in members))} per step without tensor cores",
            fix="cast the operands to the compute dtype; or declare it: a precision rule, as in "
            "Rules(precision={r'.*/router': 'float32'}), or --set allow=float32-matmul",
            nbytes=0,
        )


def _computes_in_16_bits(kernels: Iterable[ProgramKernel], execution: Execution) -> bool:
    """Return whether the compute dtype has 16 bits; if none is set, whether most matmul FLOPs are in 16 or 8 bits."""
    if execution.compute is not None:
        return np.dtype(execution.compute).itemsize == 2
    narrow = [kernel.flops * (0 < kernel.bits <= 16) - kernel.flops / 2 for kernel in kernels]
    return sum(narrow) > 0


def _by_module(kernels: Iterable[ProgramKernel]) -> Iterable[tuple[str, list[ProgramKernel]]]:
    groups: dict[str, list[ProgramKernel]] = {}
    for kernel in kernels:
        groups.setdefault(scopes.layerless(kernel.module), []).append(kernel)
    return groups.items()


def _why_unfused(kernel: ProgramKernel, choices: Mapping[str, KernelChoice]) -> str:
    choice = choices.get("attention")
    if choice is not None:
        return choice.why
    if kernel.implementation in LIBRARIES.values():
        return ""
    if is_float32(kernel):
        return f"cuDNN and tokamax compute in 16 bits, and the operands are {dtype_text(kernel.dtypes)}"
    return "the model computes scores and softmax; jax.nn.dot_product_attention(implementation='cudnn') is fused"


def is_float32(kernel: ProgramKernel) -> bool:
    """Return whether all operands of a kernel's matmul are real numbers with more than 16 bits."""
    return bool(kernel.dtypes) and all(dtype in ("f32", "f64") for dtype in kernel.dtypes)


class _Listing:
    def __init__(self, module: Module, cluster: Cluster, schedule_counts: ScheduleCounts | None) -> None:
        self._module, self._counts = module, schedule_counts
        self._roofline = Roofline(module, cluster.rates, cluster.launch_s)
        self._products = {(product.computation.name, product.ins.name): product for product in work.matmuls(module)}

    def kernels(self, visit: Visit) -> Iterator[ProgramKernel]:
        """Yield the kernels of a computation. The body of a fusion belongs to the fusion."""
        by_stage = None if self._counts is None else self._counts.counts(visit)
        trips = math.prod(1 if loop.trip_count is None else loop.trip_count for loop in visit.loops)
        count = trips * float(visit.share) if by_stage is None else float(np.mean(by_stage))
        for ins in () if visit.in_fusion else visit.computation:
            if ins.opcode in _CALLS or ins.opcode.removesuffix("-start") in KINDS:
                continue
            cost = self._roofline.kernel(visit.computation, ins)
            if cost is not None and cost.time_s:
                yield dataclasses.replace(
                    self._kernel(visit.computation, ins), count=count, flops=count * cost.flops,
                    time_s=count * cost.time_s, moved_bytes=count * cost.moved_bytes,
                )  # fmt: skip

    def _kernel(self, computation: Computation, ins: Instruction) -> ProgramKernel:
        inside = list(_inside(self._module, computation, ins))
        products = [self._products[key] for c, i in inside if (key := (c.name, i.name)) in self._products]
        product = max(products, key=lambda product: product.flops, default=None)
        origin = ins if ins.metadata.op_name or product is None else product.ins
        kind, implementation = self._classify(ins, origin.metadata.op_name, product, inside)
        arrays = [computation[name].shape for name in ins.operands] or [ins.shape]
        leaves = sorted((leaf for shape in arrays for leaf in shape.leaves()), key=lambda leaf: -leaf.nbytes)
        dtypes = tuple(leaf.dtype for leaf in leaves[:1])
        if product is not None:
            operands = (product.computation[name].shape.leaves() for name in product.ins.operands[:2])
            dtypes = tuple(next(shape).dtype for shape in operands)
        return ProgramKernel(
            name=ins.name, computation=computation.name, kind=kind, implementation=implementation, dtypes=dtypes,
            count=0, flops=0, time_s=0, moved_bytes=0, module=scopes.module_path(origin.metadata.op_name),
            phase=scopes.phase(origin.metadata.op_name), source=scopes.source(self._module, origin),
            product=product,
        )  # fmt: skip

    def _classify(
        self,
        ins: Instruction,
        op_name: str,
        product: work.Matmul | None,
        inside: Collection[tuple[Computation, Instruction]],
    ) -> tuple[Kind, str]:
        path = scopes.module_path(op_name)
        parts, target = set(path.split("/")), _target(ins)
        if product is not None and product.attention is not None:
            return "attention", LIBRARIES[product.attention.kernel]
        if tokamax_kernels.SCOPE in op_name and ins.opcode == "custom-call":
            return "grouped matmul", LIBRARIES["triton" if "triton" in target else "mosaic"]
        if parts & _TILED:
            return "attention", LOOP if product is not None else SOFTMAX
        if product is not None and parts & _GROUPED:
            return "grouped matmul", LOOP if _BLOCKED.search(op_name) else _gemm(ins, target)
        if path in self._plain_attention:
            if product is not None and self._is_batched(product):
                return "attention", PLAIN
            if product is None and scopes.primitive(op_name) in _SOFTMAX and not _has(inside, "rsqrt"):
                return "attention", SOFTMAX
        if product is not None:
            return "matmul", _gemm(ins, target)
        implementation = _fusion(ins, target)
        if scopes.phase(op_name) == "optimizer":
            return "optimizer update", implementation
        return ("norm" if _has(inside, "rsqrt") else "other"), implementation

    @functools.cached_property
    def _plain_attention(self) -> frozenset[str]:
        """Modules with a batched matmul and an exponential, whose name contains `attention` or `attn`."""
        exponentials = {
            scopes.module_path(ins.metadata.op_name)
            for computation in self._module
            for ins in computation
            if ins.opcode == "exponential" and scopes.primitive(ins.metadata.op_name).startswith("exp")
        }
        batched = {scopes.module_path(p.ins.metadata.op_name) for p in self._products.values() if self._is_batched(p)}
        return frozenset(path for path in exponentials & batched if _ATTENTION.search(path))

    @functools.cached_property
    def _batched_einsums(self) -> frozenset[str]:
        """Modules with an einsum that has batch dims."""
        op_names = (product.ins.metadata.op_name for product in self._products.values())
        return frozenset(scopes.module_path(op_name) for op_name in op_names if _einsum_is_batched(op_name))

    def _is_batched(self, product: work.Matmul) -> bool:
        """Return whether a matmul has batch dims, as the products of attention have.

        XLA may divide a contracted dim into a batch dim and a sum ("split-K"). The formula of an einsum shows the
        original dims. Therefore the dims of the instruction count only in modules without such a formula.
        """
        op_name = product.ins.metadata.op_name
        if scopes.module_path(op_name) in self._batched_einsums:
            return bool(_einsum_is_batched(op_name))
        config = product.ins.backend_config.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})
        is_batched = bool(product.ins.attributes.get("lhs_batch_dims", "{}").strip("{}"))
        return (is_batched or bool(config.get("lhs_batch_dimensions"))) and _einsum_is_batched(op_name) is not False


def _einsum_is_batched(op_name: str) -> bool | None:
    """Return whether the formula in an op name has batch dims, or None without a formula."""
    formula = _EINSUM.match((["", "", *scopes.components(op_name)])[-2])
    return None if formula is None else bool(set(formula[1]) & set(formula[2]) & set(formula[3]) - {"."})


def _inside(module: Module, computation: Computation, ins: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """Yield an instruction and all instructions of its fused computations."""
    yield computation, ins
    for name in runs(ins):
        inner = module.computations[name]
        for inner_ins in inner:
            yield from _inside(module, inner, inner_ins)


def _has(inside: Iterable[tuple[Computation, Instruction]], opcode: str) -> bool:
    return any(ins.opcode == opcode for _, ins in inside)


def _target(ins: Instruction) -> str:
    return ins.attributes.get("custom_call_target", "").strip('"')


def _fusion_kind(ins: Instruction) -> str:
    config = ins.backend_config.get("fusion_backend_config")
    return str(config.get("kind", "")) if isinstance(config, dict) else ""


def _gemm(ins: Instruction, target: str) -> str:
    """Return the implementation of a matmul."""
    for prefix, name in _GEMMS:
        if (target or _fusion_kind(ins)).startswith(prefix):
            return name
    if ins.opcode == "custom-call":
        return target
    return "Triton" if "triton" in _fusion_kind(ins) else LOOP


def _fusion(ins: Instruction, target: str) -> str:
    """Return the implementation of a kernel without a matmul."""
    if ins.opcode == "custom-call":
        return target
    if ins.opcode.startswith("copy"):
        return "copy"
    return "Triton fusion" if "triton" in _fusion_kind(ins) else "XLA fusion"
