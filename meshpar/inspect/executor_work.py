"""Work of a pipeline executor in a compiled program, in addition to the operations of the model."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator

from meshpar.inspect.hlo.parser import Computation, Instruction, Module
from meshpar.inspect.hlo.walk import MAX_HOPS, executed, runs
from meshpar.inspect.kernels import ProgramKernel
from meshpar.pipeline.traffic import executed as executed_ops
from meshpar.schedules import Schedule
from meshpar.schedules.ops import B, F
from meshpar.sharding.printing import Plain

_ELEMENTWISE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "fusion", "broadcast", "reshape", "transpose"}
    | {"compare", "select", "add", "multiply", "clamp"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorWork(Plain):
    """Predicted seconds per step of kernels without matmuls in the loops over ticks, by purpose."""

    copies_s: float
    """Copies of buffers."""
    slices_s: float
    """Reads of the weights and saved activations of a layer."""
    sums_s: float
    """Additions of weight gradients to their sums."""
    saved_s: float
    """Writes of saved activations and other buffer slots."""
    converts_s: float
    """Conversions and broadcasts."""
    matmul_s: float
    """Matmuls and attention in these loops, for comparison."""
    derived = ("share",)

    @property
    def share(self) -> float:
        """Sum of the first five terms, as a fraction of `matmul_s`."""
        total = self.copies_s + self.slices_s + self.sums_s + self.saved_s + self.converts_s
        return total / self.matmul_s if self.matmul_s else 0.0


def executor_work(module: Module, kernels: Iterable[ProgramKernel]) -> ExecutorWork:
    """Return the work of the executor of a pipelined program, from its kernels."""
    in_loops = {visit.computation.name for visit in executed(module) if visit.loops}
    spent: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        if kernel.computation in in_loops:
            computation = module.computations[kernel.computation]
            opcodes = set(_opcodes(module, computation[kernel.name], MAX_HOPS))
            spent[_purpose(kernel, opcodes)] += kernel.time_s
    fields = (field.name for field in dataclasses.fields(ExecutorWork))
    return ExecutorWork(**{name: spent[name.removesuffix("_s")] for name in fields})


def unused_s(schedule: Schedule, kernels: Iterable[ProgramKernel]) -> float:
    """Return the predicted seconds per step of ops without a microbatch, which a uniform schedule computes."""
    ran, useful = executed_ops(schedule).sum((0, 1)), (schedule.table[..., 0] >= 0).sum((0, 1))
    unused = 1 - useful / ran
    total = 0.0
    for kernel in kernels:
        if "tick/" in kernel.module:
            total += kernel.time_s * float(unused[F if "tick/forward" in kernel.module else B])
    return total


def _purpose(kernel: ProgramKernel, opcodes: set[str]) -> str:
    moves = opcodes - _ELEMENTWISE
    if kernel.flops:
        return "matmul"
    if moves == {"copy"}:
        return "copies"
    if moves & {"dynamic-update-slice", "scatter"}:
        return "sums" if kernel.module.endswith("weights") else "saved"
    if moves and moves <= {"dynamic-slice", "slice", "convert", "copy"} and moves & {"dynamic-slice", "slice"}:
        return "slices"
    is_converting = moves == {"convert"} or (not moves and not opcodes & {"add", "multiply"})
    return "converts" if is_converting else "other"


def _opcodes(module: Module, ins: Instruction, hops: int) -> Iterator[str]:
    yield ins.opcode
    for name in runs(ins) if hops else ():
        inner: Computation = module.computations[name]
        for other in inner:
            yield from _opcodes(module, other, hops - 1)
