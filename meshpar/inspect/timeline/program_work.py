"""Matmuls of a program with their FLOPs, and the arrays that need memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from meshpar.collectives import flash
from meshpar.collectives.attention import window_shares
from meshpar.hardware.catalogue import AttentionKernel
from meshpar.hardware.kernel_rates import AttentionSize
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.hlo.parser import ArrayShape, Computation, Instruction, Module, TupleShape
from meshpar.inspect.hlo.walk import MAX_HOPS, branches, executed, runs, skip_views, trip_count
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.moe.tokamax_kernels import SCOPE

_GEMM = re.compile(r"__cublas\$(?:lt\$)?(?:gemm|matmul)")
_ATTENTION = re.compile(r"__cudnn\$fmha\w*?(Backward)?(?:F8)?$")
_GROUPED = re.compile(rf"{SCOPE}(\d+)_(\w+?)\b")
_COPY = re.compile(r"\.remat[0-9]*\Z")
_NO_MEMORY = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"}
    | {"after-all", "partition-id", "replica-id"}
)


class AttentionPass(NamedTuple):
    """Library kernel of attention."""

    kernel: AttentionKernel
    is_backward: bool
    size: AttentionSize = AttentionSize()
    repetition: float = 1.0
    """FLOPs of the backward kernels over the FLOPs of a single kernel, if several kernels repeat matmuls."""


class GroupedPass(NamedTuple):
    """tokamax's kernel of a grouped matmul or of one of its gradients."""

    kernel: str
    """`mosaic` or `triton`."""
    operand: str
    """`product`, or `rows` or `weights` for a gradient."""
    num_groups: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """A matmul or convolution of the program, per device."""

    flops: int
    """FLOPs of one execution; a multiply-add is two FLOPs."""
    count_per_step: int
    """Executions per step: the product of the trip counts of the enclosing loops."""
    in_branch: bool
    computation: Computation
    ins: Instruction
    attention: AttentionPass | None
    """None for other matmuls."""
    grouped: GroupedPass | None = None
    """None for other matmuls."""
    shape: tuple[int, int, int] | None = None
    """(m, k, n) of `[m, k] @ [k, n]`; None for other matmuls."""

    @property
    def flops_per_step(self) -> int:
        """FLOPs per run of the program."""
        return self.flops * self.count_per_step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Temporary:
    """A value of the program that needs memory."""

    nbytes: int
    shape: str
    name: str
    opcode: str
    computation: str
    module: str
    source: str


def matmuls(module: Module) -> tuple[Matmul, ...]:
    """Return every dot, convolution, cuBLAS call and fused attention, including those inside fusions."""
    return tuple(
        Matmul(
            flops=flops,
            count_per_step=visit.times,
            in_branch=visit.in_branch,
            computation=visit.computation,
            ins=ins,
            attention=library if isinstance(library, AttentionPass) else None,
            grouped=library if isinstance(library, GroupedPass) else None,
            shape=None if library else _product_shape(visit.computation, ins),
        )
        for visit in executed(module)
        for ins in visit.computation
        for flops, library in [_kernel(visit.computation, ins)]
        if flops
    )


def flops_per_step(module: Module, schedule_counts: ScheduleCounts | None = None) -> int:
    """Return the matmul FLOPs per device and step.

    A conditional that selects the attention window of a layer counts as the mean over layers. For other conditionals,
    the most expensive branch counts.

    Args:
      module: the program.
      cells: execution counts of a pipelined program; the result is then an average over stages.
    """
    cost = _costs(module)
    if schedule_counts is None:
        return cost(module.entry.name)
    choices = ((ins.name, branches(computation, ins)) for computation in module for ins in computation)
    costs = {name: [cost(branch) for branch in names] for name, names in choices if names}
    costliest = {name: values.index(max(values)) for name, values in costs.items()}
    total = 0.0
    for visit in executed(module):
        flops = sum(_flops(visit.computation, ins) for ins in visit.computation)
        model_branches = (b for b in visit.branches if b.share is None and schedule_counts.mask(b) is None)
        if flops and all(costliest[branch.name] == branch.index for branch in model_branches):
            counts = schedule_counts.counts(visit)
            total += flops * (visit.times if counts is None else sum(counts) / len(counts))
    return round(total)


def repeated_flops(module: Module) -> int:
    """Return the FLOPs per step of matmuls that XLA recomputes so that the program fits in memory.

    XLA names the copies of an instruction `dot.3.remat`, `dot.3.remat2`, ... and drops the original if it is unused.
    """
    cost, total = _costs(module), 0
    for visit in executed(module):
        seen: set[str] = set()
        for ins in () if visit.in_fusion else visit.computation:
            flops = _flops(visit.computation, ins) + sum(cost(name) for name in runs(ins))
            name = _COPY.sub("", ins.name)
            total += flops * visit.times * (name in seen)
            seen.add(name)
    return total


def _costs(module: Module) -> Callable[[str], int]:
    """Return a function that returns the FLOPs of a computation by name, including its callees."""

    @functools.cache
    def cost(name: str) -> int:
        computation, total = module.computations[name], 0
        for ins in computation:
            times = trip_count(ins) if ins.opcode == "while" else 1
            costs = [cost(branch) for branch in branches(computation, ins)]
            shares = window_shares(ins.metadata.op_name) if costs else None
            total += max(costs, default=0) if shares is None else round(sum(map(operator.mul, shares, costs)))
            total += _flops(computation, ins)
            total += (1 if times is None else times) * sum(map(cost, (*ins.called_as("body"), *runs(ins))))
        return total

    return cost


def custom_calls(
    module: Module, schedule_counts: ScheduleCounts | None = None, *, seen: bool = False
) -> dict[str, int]:
    """Return custom-call target -> calls per step, for library kernels whose FLOPs `matmuls` does not count.

    Args:
      module: the program.
      cells: execution counts of a pipelined program; the result is for the stage with most calls.
      seen: True to return the kernels that `matmuls` counts, instead of the others.
    """
    calls: dict[str, int] = {}
    for visit in executed(module):
        counts = None if schedule_counts is None else schedule_counts.counts(visit)
        times = visit.times if counts is None else max(counts)
        for ins in visit.computation:
            target = ins.attributes.get("custom_call_target", "").strip('"')
            if ins.opcode == "custom-call" and bool(_flops(visit.computation, ins)) is seen:
                calls[target] = calls.get(target, 0) + times
    return calls


def largest_temporaries(module: Module, most: int = 10) -> tuple[Temporary, ...]:
    """Return the largest arrays that need memory in addition to the program's arguments and outputs, largest first.

    Use it to find why a program does not fit. The arrays of a tuple are separate entries. Views, tuples and values
    inside a fusion need no memory. An in-place update (`dynamic-update-slice`) reuses its buffer. Results of the
    program are outputs. Two entries may share memory, because lifetimes are not analyzed.
    """
    visited = {visit.computation.name: visit.computation for visit in executed(module) if not visit.in_fusion}
    root = module.entry.root
    outputs = {(root.name, index) for index, _ in enumerate(root.shape.leaves())}
    if root.opcode == "tuple":
        outputs = {_viewed_array(module.entry, module.entry[name]) for name in root.operands}
    arrays = [
        (leaf, index, computation, ins)
        for computation in visited.values()
        for ins in computation
        if ins.opcode not in _NO_MEMORY and not ins.opcode.endswith(("-start", "-update"))
        for index, leaf in enumerate(ins.shape.leaves())
        if (computation is not module.entry or (ins.name, index) not in outputs)
        and not _updates_in_place(module, ins, index)
    ]
    arrays.sort(key=lambda item: -item[0].nbytes)
    return tuple(temporary_of(module, *item) for item in arrays[:most])


def temporary_of(module: Module, leaf: ArrayShape, index: int, computation: Computation, ins: Instruction) -> Temporary:
    """Return the `Temporary` of an array. If the compiler lost the origin, use the origin of a related instruction."""
    origin = ins
    if not _module(ins):
        origin = _filled_by(module, computation, ins, index) or _nearest_with_module(computation, ins) or ins
    return Temporary(
        nbytes=leaf.nbytes,
        shape=str(leaf),
        name=ins.name,
        opcode=ins.opcode,
        computation=computation.name,
        module=_module(origin),
        source=scopes.source(module, origin),
    )


def _module(ins: Instruction) -> str:
    return scopes.module_path(ins.metadata.op_name)


def _updates_in_place(module: Module, ins: Instruction, index: int) -> bool:
    """Return whether array `index` of a result is an operand that the instruction updates in place."""
    if ins.opcode != "fusion":
        return ins.opcode == "dynamic-update-slice"
    inner = module.computations[ins.called[0][1]]
    root = inner.root
    if root.opcode == "tuple":
        root = inner[root.operands[index]] if index < len(root.operands) else root
    return skip_views(inner, root).opcode == "dynamic-update-slice"


def _viewed_array(computation: Computation, ins: Instruction) -> tuple[str, int]:
    """Return (instruction, index in its result) of the array that a value is a view of."""
    index = 0
    for _ in range(MAX_HOPS):
        if ins.opcode == "get-tuple-element":
            index = ins.tuple_index or 0
        elif ins.opcode != "bitcast":
            break
        if not ins.operands:
            break
        ins = computation[ins.operands[0]]
    return ins.name, index


def _filled_by(module: Module, computation: Computation, ins: Instruction, index: int) -> Instruction | None:
    """Return an instruction in a loop body that uses a buffer of the loop state; None if no loop carries it."""
    is_tuple = isinstance(ins.shape, TupleShape)
    views = [user for user in computation.users[ins.name] if user.tuple_index == index] if is_tuple else [ins]
    views += [user for view in views for user in computation.users[view.name] if user.opcode in ("bitcast", "copy")]
    for view in views:
        for carrier in (user for user in computation.users[view.name] if user.opcode == "tuple"):
            position = carrier.operands.index(view.name)
            loops = (user for user in computation.users[carrier.name] if user.opcode == "while")
            for body in (module.computations[name] for loop in loops for name in loop.called_as("body")):
                parameter = (getattr(body.parameters.get(0), "name", ""),)
                elements = (ins for ins in body if ins.tuple_index == position and ins.operands[:1] == parameter)
                for user in (user for element in elements for user in body.users[element.name]):
                    if _module(user):
                        return user
    return None


def _nearest_with_module(computation: Computation, ins: Instruction) -> Instruction | None:
    """Return the nearest instruction with a module path, first among inputs, then among users."""
    source: Instruction | None = ins
    for _ in range(MAX_HOPS):
        if source is None or _module(source):
            break
        source = computation[source.operands[0]] if source.operands else None
    return source or next((user for user in computation.users[ins.name] if _module(user)), None)


def _flops(computation: Computation, ins: Instruction) -> int:
    return _kernel(computation, ins)[0]


def _kernel(computation: Computation, ins: Instruction) -> tuple[int, AttentionPass | GroupedPass | None]:
    """Return the matmul FLOPs of an instruction, and the kernel if it is attention or a grouped matmul of a library."""
    if ins.opcode == "convolution":
        return _convolution_flops(computation, ins), None
    if (contracted := _contracted(ins)) is not None:
        return _product_flops(computation, ins, contracted), None
    target = _target(ins)
    if match := _ATTENTION.match(target):
        flops = _attention_flops(computation, ins, num_products=5 if match[1] else 2)
        return flops, AttentionPass("cudnn", bool(match[1]), _attention_size(computation, ins))
    name, op_name = "mosaic" if target.startswith("mosaic_gpu") else "triton", ins.metadata.op_name
    if target.endswith((".triton", "mosaic_gpu_v2")) and (flops := flash.product_flops(op_name) or 0):
        num_products, query = _flash_products(computation, ins), _array(computation, ins, 0)
        kernel: AttentionKernel = "mosaic" if name == "mosaic" else "triton"
        sizes = AttentionSize() if query is None else AttentionSize(query.dims[-1], query.dims[-3])
        # The kernels for the gradients of queries (3), and of keys and values (4), do the work of a kernel with 5.
        repetition = (3 + 4) / 5 if num_products in (3, 4) else 1.0
        return flops * num_products, AttentionPass(kernel, num_products > 2, sizes, repetition)
    if target.startswith(("mosaic_gpu", "triton_kernel_call")) and (rows := _GROUPED.search(op_name)):
        # A group's weight is [d, f], among the operands or the results.
        arrays = [leaf for name in ins.operands for leaf in computation[name].shape.leaves()]
        weights = next((array.dims for array in (*arrays, *ins.shape.leaves()) if len(array.dims) == 3), (0,))
        return 2 * int(rows[1]) * math.prod(weights[1:]), GroupedPass(name, rows[2], weights[0])
    return 0, None


def _target(ins: Instruction) -> str:
    return ins.attributes.get("custom_call_target", "").strip('"') if ins.opcode == "custom-call" else ""


def _contracted(ins: Instruction) -> list[int] | None:
    """Return the contracted dims of the first operand of a matmul, or None for other instructions."""
    if ins.opcode == "dot":
        return _dims(ins.attributes.get("lhs_contracting_dims", ""))
    if not _GEMM.match(_target(ins)):
        return None
    numbers = _nested(ins.backend_config, "gemm_backend_config", "dot_dimension_numbers")
    return _dims(str(numbers.get("lhs_contracting_dimensions", "")))


def _product_shape(computation: Computation, ins: Instruction) -> tuple[int, int, int] | None:
    """Return (m, k, n) of a matmul of two matrices with one contracted dim, or None."""
    contracted, lhs, out = _contracted(ins), _array(computation, ins, 0), next(ins.shape.leaves(), None)
    if contracted is None or len(contracted) != 1 or lhs is None or out is None or len(lhs.dims) != 2:
        return None
    k = lhs.dims[contracted[0]]
    m = lhs.size // k if k else 0
    return (m, k, out.size // m) if m else None


def _attention_size(computation: Computation, ins: Instruction) -> AttentionSize:
    """Return the sizes of cuDNN's attention."""
    query, config = _array(computation, ins, 0), _nested(ins.backend_config, "cudnn_fmha_backend_config")
    scores = _nested(config, "intermediate_tensor_shape").get("dimensions")
    if query is None or not isinstance(scores, list) or not scores:
        return AttentionSize()
    return AttentionSize(query.dims[-1], int(str(scores[-1])), "CAUSAL" in str(config.get("mask_type", "")))


def _flash_products(computation: Computation, ins: Instruction) -> int:
    """Return the number of matmuls in a kernel of tokamax's attention.

    Only backward kernels receive the output's gradient. Forward kernels have two matmuls. The kernel for the query
    gradient has three, for key and value gradients four, for all gradients five: each recomputes the scores and their
    gradient.
    """
    query = _array(computation, ins, 0)
    operands = map(functools.partial(_array, computation, ins), range(len(ins.operands)))
    if query is None or sum(_is_like(array, query) for array in operands) <= 3:
        return 2
    return 2 + sum(_is_like(array, query) for array in ins.shape.leaves())


def _is_like(array: ArrayShape | None, query: ArrayShape) -> bool:
    return array is not None and len(array.dims) == len(query.dims) and array.dims[-1] == query.dims[-1]


def _product_flops(computation: Computation, ins: Instruction, contracted: Sequence[int]) -> int:
    lhs, out = _array(computation, ins, 0), next(ins.shape.leaves(), None)
    if lhs is None or out is None or any(dim >= len(lhs.dims) for dim in contracted):
        return 0
    return 2 * out.size * math.prod(lhs.dims[dim] for dim in contracted)


def _attention_flops(computation: Computation, ins: Instruction, num_products: int) -> int:
    """Return the FLOPs of cuDNN's attention, whose matmuls all have the size of the scores times the head width.

    The forward pass has two matmuls. The backward pass has five, because it recomputes the scores. A causal mask
    removes half of each, and a window all older keys.
    """
    query = _array(computation, ins, 0)
    config = _nested(ins.backend_config, "cudnn_fmha_backend_config")
    scores = _nested(config, "intermediate_tensor_shape").get("dimensions")
    if query is None or not query.dims or not isinstance(scores, list):
        return 0
    dims = _dims(" ".join(map(str, scores)))
    flops = 2 * math.prod(dims) * query.dims[-1] * num_products
    if "CAUSAL" not in str(config.get("mask_type", "")):
        return flops
    return causal_share(flops, dims[-1], int(str(config.get("sliding_window_length") or 0)))


def causal_share(flops: int, num_keys: int, window: int | None) -> int:
    """Return the FLOPs that remain of `flops` under a causal mask over `num_keys` keys.

    With a `window`, each query sees only so many keys. None and 0 mean no window.

    Example:
      >>> causal_share(800, 4, None), causal_share(800, 4, 4), causal_share(800, 4, 2)
      (400, 400, 300)
    """
    window = min(window or num_keys, num_keys)
    return flops * window * (2 * num_keys - window) // (2 * num_keys**2)


def _convolution_flops(computation: Computation, ins: Instruction) -> int:
    """Return the FLOPs of a convolution: each output element sums over the kernel's spatial dims and input features."""
    kernel, out = _array(computation, ins, 1), next(ins.shape.leaves(), None)
    labels = re.fullmatch(r"[0-9bf?]+_([0-9io?]+)->[0-9bf?]+", ins.attributes.get("dim_labels", ""))
    if kernel is None or out is None or labels is None or len(labels.group(1)) != len(kernel.dims):
        return 0
    summed = (size for label, size in zip(labels.group(1), kernel.dims, strict=True) if label != "o")
    return 2 * out.size * math.prod(summed)


def _array(computation: Computation, ins: Instruction, number: int) -> ArrayShape | None:
    shape = computation[ins.operands[number]].shape if number < len(ins.operands) else None
    return shape if isinstance(shape, ArrayShape) else None


def _dims(text: str) -> list[int]:
    return [int(dim) for dim in re.findall(r"[0-9]{1,9}", text)]


def _nested(config: Mapping[str, object], *keys: str) -> Mapping[str, object]:
    value: object = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}
