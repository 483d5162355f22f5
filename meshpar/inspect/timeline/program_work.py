"""What a program computes and holds: matrix products with their FLOPs, and the arrays that need memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from meshpar.collectives import flash
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.hlo.parser import ArrayShape, Computation, Instruction, Module, TupleShape
from meshpar.inspect.hlo.walk import branches, executed, runs, trip_count
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.moe.tokamax_kernels import SCOPE

_GEMM = re.compile(r"__cublas\$(?:lt\$)?(?:gemm|matmul)")
_ATTENTION = re.compile(r"__cudnn\$fmha\w*?(Backward)?(?:F8)?$")
_GROUPED = re.compile(rf"{SCOPE}(\d+)")
_VIEWS = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})
_COPY = re.compile(r"\.remat[0-9]*\Z")
_MAX_HOPS = 64
_NO_MEMORY = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"}
    | {"after-all", "partition-id", "replica-id"}
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """One matrix product (or convolution) of the program, as one device runs it."""

    flops: int
    """Two for each multiply-add, each time it runs."""
    count_per_step: int
    """Trip counts of the loops around it multiplied."""
    in_branch: bool
    op_name: str
    module: str
    source: str
    is_backward: bool
    name: str
    computation: str
    attention: Literal["", "forward", "backward"] = ""
    """Pass of a fused attention kernel; empty for any other product."""

    @property
    def flops_per_step(self) -> int:
        """FLOPs in one run of the program."""
        return self.flops * self.count_per_step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Temporary:
    """One value of the program that needs memory of its own."""

    nbytes: int
    shape: str
    name: str
    opcode: str
    computation: str
    op_name: str
    module: str
    source: str


def matmuls(module: Module) -> tuple[Matmul, ...]:
    """Every dot, convolution, cuBLAS call and cuDNN attention the program runs, those inside fusions included."""
    return tuple(
        Matmul(
            flops=flops,
            count_per_step=visit.times,
            in_branch=visit.in_branch,
            op_name=ins.metadata.op_name,
            module=scopes.module_path(ins.metadata.op_name),
            source=scopes.source(module, ins),
            is_backward=scopes.is_backward(ins.metadata.op_name),
            name=ins.name,
            computation=visit.computation.name,
            attention=_attention_pass(visit.computation, ins),
        )
        for visit in executed(module)
        for ins in visit.computation
        if (flops := _flops(visit.computation, ins))
    )


def flops_per_step(module: Module, cells: ScheduleCounts | None = None) -> int:
    """FLOPs of the matrix products one device runs in one step; of a conditional's branches the costliest counts.

    Args:
      module: the program.
      cells: of a pipelined program: what its stages pick is counted by the table, for the mean stage.
    """
    cost = _costs(module)
    if cells is None:
        return cost[module.entry.name]
    choices = ((ins.name, branches(computation, ins)) for computation in module for ins in computation)
    costs = {name: [cost[one] for one in found] for name, found in choices if found}
    costliest = {name: found.index(max(found)) for name, found in costs.items()}
    total = 0.0
    for visit in executed(module):
        flops = sum(_flops(visit.computation, ins) for ins in visit.computation)
        own = (branch for branch in visit.branches if cells.mask(branch) is None)
        if flops and all(costliest[branch.name] == branch.index for branch in own):
            counts = cells.counts(visit)
            total += flops * (visit.times if counts is None else sum(counts) / len(counts))
    return round(total)


def repeated_flops(module: Module) -> int:
    """FLOPs a step of matrix products that XLA itself computes again, for the program would not fit otherwise.

    It names copies of an instruction `dot.3.remat`, `dot.3.remat2`, ... and leaves out the first where none needs it.
    """
    cost, total = _costs(module), 0
    for visit in executed(module):
        seen: set[str] = set()
        for ins in () if visit.in_fusion else visit.computation:
            flops = _flops(visit.computation, ins) + sum(cost[name] for name in runs(ins))
            name = _COPY.sub("", ins.name)
            total += flops * visit.times * (name in seen)
            seen.add(name)
    return total


def _costs(module: Module) -> dict[str, int]:
    """FLOPs of one run of each computation, with all that it calls."""
    cost: dict[str, int] = {}
    for computation in _callees_first(module):
        cost[computation.name] = sum(
            _flops(computation, ins) + _called_flops(module, computation, ins, cost) for ins in computation
        )
    return cost


def custom_calls(module: Module, cells: ScheduleCounts | None = None, *, seen: bool = False) -> dict[str, int]:
    """How often per step the program calls each kernel of a library that `matmuls` cannot see into, by target.

    Args:
      module: the program.
      cells: of a pipelined program, of which the stage that calls most often counts.
      seen: those whose products `matmuls` knows, instead.
    """
    found: dict[str, int] = {}
    for visit in executed(module):
        counts = None if cells is None else cells.counts(visit)
        times = visit.times if counts is None else max(counts)
        for ins in visit.computation:
            target = ins.attributes.get("custom_call_target", "").strip('"')
            if ins.opcode == "custom-call" and bool(_flops(visit.computation, ins)) is seen:
                found[target] = found.get(target, 0) + times
    return found


def largest_temporaries(module: Module, most: int = 10) -> tuple[Temporary, ...]:
    """The largest arrays that need memory beside the program's arguments and outputs, largest first.

    What to look at when a program does not fit. Each array of a tuple counts for itself. Values inside a fusion, views
    and tuples need no memory, an update in place (`dynamic-update-slice`) takes its buffer over, and what the program
    gives back is output. Two arrays listed here may still share memory: their lifetimes are not looked at.
    """
    visited = {visit.computation.name: visit.computation for visit in executed(module) if not visit.in_fusion}
    given_back = _given_back(module.entry)
    found = [
        (leaf, at, computation, ins)
        for computation in visited.values()
        for ins in computation
        if ins.opcode not in _NO_MEMORY and not ins.opcode.endswith(("-start", "-update"))
        for at, leaf in enumerate(ins.shape.leaves())
        if (computation is not module.entry or (ins.name, at) not in given_back)
        and not _updates_in_place(module, ins, at)
    ]
    found.sort(key=lambda item: -item[0].nbytes)
    return tuple(_temporary(module, *item) for item in found[:most])


def _temporary(module: Module, leaf: ArrayShape, at: int, computation: Computation, ins: Instruction) -> Temporary:
    """The record of one array. One the compiler named no place for is named by what fills it, or by a neighbour."""
    told = ins
    if not _module(ins):
        told = _filled_by(module, computation, ins, at) or _near(computation, ins) or ins
    return Temporary(
        nbytes=leaf.nbytes,
        shape=str(leaf),
        name=ins.name,
        opcode=ins.opcode,
        computation=computation.name,
        op_name=told.metadata.op_name,
        module=_module(told),
        source=scopes.source(module, told),
    )


def _module(ins: Instruction) -> str:
    return scopes.module_path(ins.metadata.op_name)


def _updates_in_place(module: Module, ins: Instruction, at: int) -> bool:
    """Whether array `at` of a result is an operand of which a part was written anew."""
    if ins.opcode != "fusion":
        return ins.opcode == "dynamic-update-slice"
    inner = module.computations[ins.called[0][1]]
    root = inner.root
    if root.opcode == "tuple":
        root = inner[root.operands[at]] if at < len(root.operands) else root
    for _ in range(_MAX_HOPS):
        if root.opcode not in _VIEWS or not root.operands:
            break
        root = inner[root.operands[0]]
    return root.opcode == "dynamic-update-slice"


def _given_back(entry: Computation) -> set[tuple[str, int]]:
    """(instruction, number of the array in its result) of what the program gives back."""
    root = entry.root
    if root.opcode != "tuple":
        return {(root.name, at) for at, _ in enumerate(root.shape.leaves())}
    return {_behind_views(entry, entry[name]) for name in root.operands}


def _behind_views(computation: Computation, ins: Instruction) -> tuple[str, int]:
    """What a value is a view of: the instruction that made it, and which array of its result."""
    at = 0
    for _ in range(_MAX_HOPS):
        if ins.opcode == "get-tuple-element":
            at = ins.tuple_index or 0
        elif ins.opcode != "bitcast":
            break
        if not ins.operands:
            break
        ins = computation[ins.operands[0]]
    return ins.name, at


def _filled_by(module: Module, computation: Computation, ins: Instruction, at: int) -> Instruction | None:
    """The instruction of a loop that reads or fills a buffer made before it; None when no loop carries the buffer."""
    is_tuple = isinstance(ins.shape, TupleShape)
    views = [user for user in computation.users[ins.name] if user.tuple_index == at] if is_tuple else [ins]
    views += [user for view in views for user in computation.users[view.name] if user.opcode in ("bitcast", "copy")]
    for view in views:
        for carrier in (user for user in computation.users[view.name] if user.opcode == "tuple"):
            place = carrier.operands.index(view.name)
            loops = (user for user in computation.users[carrier.name] if user.opcode == "while")
            for body in (module.computations[name] for loop in loops for name in loop.called_as("body")):
                inside = (
                    one
                    for one in body
                    if one.tuple_index == place and one.operands[:1] == (getattr(body.parameters.get(0), "name", ""),)
                )
                for user in (user for one in inside for user in body.users[one.name]):
                    if _module(user):
                        return user
    return None


def _near(computation: Computation, ins: Instruction) -> Instruction | None:
    """The nearest instruction with a place in the model among what a value is made of, else among what reads it."""
    at: Instruction | None = ins
    for _ in range(_MAX_HOPS):
        if at is None or _module(at):
            break
        at = computation[at.operands[0]] if at.operands else None
    return at or next((user for user in computation.users[ins.name] if _module(user)), None)


def _flops(computation: Computation, ins: Instruction) -> int:
    if ins.opcode == "dot":
        return _product_flops(computation, ins, _dims(ins.attributes.get("lhs_contracting_dims", "")))
    if ins.opcode == "convolution":
        return _convolution_flops(computation, ins)
    target = ins.attributes.get("custom_call_target", "").strip('"') if ins.opcode == "custom-call" else ""
    if found := _ATTENTION.match(target):
        return _attention_flops(computation, ins, num_products=5 if found[1] else 2)
    if _GEMM.match(target):
        numbers = _nested(ins.backend_config, "gemm_backend_config", "dot_dimension_numbers")
        return _product_flops(computation, ins, _dims(str(numbers.get("lhs_contracting_dimensions", ""))))
    if product := _flash_flops(target, ins):
        return product * _flash_products(computation, ins)
    if target.startswith("mosaic_gpu") and (rows := _GROUPED.search(ins.metadata.op_name)):
        return 2 * int(rows[1]) * _weight_size(computation, ins)
    return 0


def _attention_pass(computation: Computation, ins: Instruction) -> Literal["", "forward", "backward"]:
    """Which pass of attention a fused kernel, cuDNN's or tokamax's, computes; empty for other kernels."""
    target = ins.attributes.get("custom_call_target", "").strip('"') if ins.opcode == "custom-call" else ""
    if found := _ATTENTION.match(target):
        return "backward" if found[1] else "forward"
    if _flash_flops(target, ins):
        return "backward" if _flash_products(computation, ins) > 2 else "forward"
    return ""


def _flash_flops(target: str, ins: Instruction) -> int:
    """FLOPs of one product of tokamax's attention; 0 for other kernels."""
    return (target.endswith((".triton", "mosaic_gpu_v2")) and flash.product_flops(ins.metadata.op_name)) or 0


def _flash_products(computation: Computation, ins: Instruction) -> int:
    """Products in a kernel of tokamax's attention, by what it is given: the gradient of the output only backward.

    Forward there are two. The gradient of queries takes three, those of keys and values four, all three five: scores
    and their gradient are made in each kernel.
    """
    query = _array(computation, ins, 0)
    given = map(functools.partial(_array, computation, ins), range(len(ins.operands)))
    if query is None or sum(_is_like(one, query) for one in given) <= 3:
        return 2
    return 2 + sum(_is_like(one, query) for one in ins.shape.leaves())


def _is_like(one: ArrayShape | None, query: ArrayShape) -> bool:
    return one is not None and len(one.dims) == len(query.dims) and one.dims[-1] == query.dims[-1]


def _weight_size(computation: Computation, ins: Instruction) -> int:
    """Elements of one group's weight `[d, f]`, among the operands of tokamax's grouped matmul or its result."""
    arrays = [leaf for name in ins.operands for leaf in computation[name].shape.leaves()]
    weights = (one.dims for one in (*arrays, *ins.shape.leaves()) if len(one.dims) == 3)
    return math.prod(next(weights, (0,))[1:])


def _product_flops(computation: Computation, ins: Instruction, contracted: Sequence[int]) -> int:
    lhs, out = _array(computation, ins, 0), next(ins.shape.leaves(), None)
    if lhs is None or out is None or any(dim >= len(lhs.dims) for dim in contracted):
        return 0
    return 2 * out.size * math.prod(lhs.dims[dim] for dim in contracted)


def _attention_flops(computation: Computation, ins: Instruction, num_products: int) -> int:
    """cuDNN's attention, of which every product is as large as the scores times the head width.

    Forward there are two, backward five: the scores are made again. A causal mask leaves half of each out, a window all
    that is farther back.
    """
    query = _array(computation, ins, 0)
    config = _nested(ins.backend_config, "cudnn_fmha_backend_config")
    scores = _nested(config, "intermediate_tensor_shape").get("dimensions")
    if query is None or not query.dims or not isinstance(scores, list):
        return 0
    dims = _dims(" ".join(map(str, scores)))
    whole = 2 * math.prod(dims) * query.dims[-1] * num_products
    if "CAUSAL" not in str(config.get("mask_type", "")):
        return whole
    return causal_share(whole, dims[-1], int(str(config.get("sliding_window_length") or 0)))


def causal_share(whole: int, num_keys: int, window: int | None) -> int:
    """Of `whole`, done for so many keys: what a causal mask leaves, and a window of so many positions (0, None: all).

    Example:
      >>> causal_share(800, 4, None), causal_share(800, 4, 4), causal_share(800, 4, 2)
      (400, 400, 300)
    """
    near = min(window or num_keys, num_keys)
    return whole * near * (2 * num_keys - near) // (2 * num_keys**2)


def _convolution_flops(computation: Computation, ins: Instruction) -> int:
    """Each output element sums over the kernel's spatial dims and input features."""
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


def _called_flops(module: Module, computation: Computation, ins: Instruction, cost: Mapping[str, int]) -> int:
    if not ins.called:
        return 0
    times = 1
    if ins.opcode == "while":
        known = trip_count(module, computation, ins)
        times = known if known is not None else 1
    costliest = max((cost[name] for name in ins.called_as("branch")), default=0)
    return costliest + times * sum(cost[name] for name in (*ins.called_as("body"), *runs(ins)))


def _callees_first(module: Module) -> Iterator[Computation]:
    """All computations, each after those it calls."""
    done: set[str] = set()
    for start in module.computations:
        stack = [start]
        while stack:
            name = stack[-1]
            callees = {callee for ins in module.computations[name] for _, callee in ins.called} - done
            if name in done or not callees:
                stack.pop()
                if name not in done:
                    done.add(name)
                    yield module.computations[name]
            else:
                stack.extend(callees)
