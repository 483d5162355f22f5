"""A roofline model of kernel times: the maximum of compute time, memory time and launch time.

A kernel is an instruction that the GPU runs: a fusion, a library call, a copy. FLOPs are counted for matmuls. Their
rate (`hardware.clusters.Rates`) depends on the operand type: tensor cores for 16 bits and fewer, the float32 units for
more bits (TF32 is not assumed). Fused attention and tokamax's grouped matmuls have separate rates.
Memory traffic counts each input and output once:
a sliced operand counts as the slice, and a buffer that is updated in place counts as the update. If a profile has the
launch time (`meshpar bench gpu`), no kernel is shorter. Caches and element-wise arithmetic are not modelled, so small
kernels take longer than estimated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshpar.hardware.clusters import Rates
from meshpar.inspect.hlo.parser import ArrayShape, Computation, Instruction, Module
from meshpar.inspect.hlo.shapes import Shape, dtype_bits
from meshpar.inspect.hlo.walk import MAX_HOPS, VIEWS, runs, skip_views
from meshpar.inspect.timeline import program_work as work

_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
    | {"add-dependency", "opt-barrier", "domain"}
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """Cost of running an instruction once on a GPU."""

    flops: int
    """Matmul FLOPs."""
    moved_bytes: int
    """Bytes read and written."""
    time_s: float
    """The maximum of compute time, memory time and launch time."""
    launch_s: float
    """Part of `time_s` beyond compute time and memory time."""
    is_compute_bound: bool
    """True if the compute time exceeds the memory time."""


class Roofline:
    """Kernel times of a program on a GPU."""

    def __init__(self, module: Module, rates: Rates, launch_s: float = 0.0) -> None:
        self._module, self._rates, self._launch_s = module, rates, launch_s
        self._matmuls = {(matmul.computation.name, matmul.ins.name): matmul for matmul in work.matmuls(module)}
        self._reads: dict[tuple[str, int], int] = {}

    @property
    def main_peak_flops_per_s(self) -> float:
        """Peak FLOP/s for the dtype with most matmul FLOPs in the program. For 8-bit dtypes it is the bfloat16 peak."""
        flops: dict[float, int] = {self._rates.peak_flops_per_s(16): 0}
        for matmul in work.matmuls(self._module):
            peak = self._rates.peak_flops_per_s(max(widest(matmul.computation, matmul.ins), 16))
            flops[peak] = flops.get(peak, 0) + matmul.flops_per_step
        return max(flops, key=lambda peak: flops[peak])

    def kernel(self, computation: Computation, ins: Instruction) -> Kernel | None:
        """Return the cost of an instruction, or None if it runs no kernel, such as a view, a tuple or a done."""
        if ins.opcode in _FREE or ins.opcode.endswith(("-done", "-update")):
            return None
        products = list(self._products(computation, ins, MAX_HOPS))
        flops, computes_s = sum(flops for flops, _ in products), sum(time_s for _, time_s in products)
        moved = sum(self._operands(computation, ins)) + self._written(computation, ins)
        moves_s = moved / self._rates.memory_bytes_per_s
        works_s = max(computes_s, moves_s)
        # Instructions without FLOPs and bytes are not launched.
        launch_s = max(self._launch_s - works_s, 0.0) if works_s else 0.0
        return Kernel(
            flops=flops,
            moved_bytes=moved,
            time_s=works_s + launch_s,
            launch_s=launch_s,
            is_compute_bound=computes_s > moves_s,
        )

    def _products(self, computation: Computation, ins: Instruction, hops: int) -> Iterator[tuple[int, float]]:
        """Yield (FLOPs, seconds) of each matmul or attention kernel in an instruction."""
        product = self._matmuls.get((computation.name, ins.name))
        if product is not None:
            yield product.flops, product.flops / self._flops_per_s(product)
        for callee in runs(ins) if hops else ():
            inner = self._module.computations[callee]
            for inner_ins in inner:
                yield from self._products(inner, inner_ins, hops - 1)

    def _flops_per_s(self, product: work.Matmul) -> float:
        if (attention := product.attention) is not None:
            forward, backward = self._rates.attention_flops_per_s(attention.kernel, attention.size)
            return (backward if attention.is_backward else forward) * attention.repetition
        if (grouped := product.grouped) is not None:
            n = max(product.flops / 2 / max(grouped.num_groups, 1), 1.0) ** (1 / 3)
            return self._rates.grouped_flops_per_s(grouped.kernel, grouped.operand, n)
        bits = widest(product.computation, product.ins)
        return self._rates.product_flops_per_s(bits, product.flops, product.shape)

    # Bytes

    def _operands(self, computation: Computation, ins: Instruction) -> Iterator[int]:
        """Yield the bytes that an instruction reads of each operand. An operand that occurs twice is read once."""
        for name in dict.fromkeys(ins.operands):
            shape = computation[name].shape
            if isinstance(shape, ArrayShape):
                yield min(self._read_by(ins, name, computation, shape, MAX_HOPS), shape.nbytes)
            else:
                yield shape.nbytes

    def _read_by(self, user: Instruction, value: str, computation: Computation, of: ArrayShape, hops: int) -> int:
        """Return how many bytes `user` reads of the array `value`, which may be a view of an array of shape `of`."""
        positions = [index for index, name in enumerate(user.operands) if name == value]
        inside = runs(user)
        if inside and hops:
            inner = self._module.computations[inside[0]]
            return sum(self._read_inside(inner, index, of, hops - 1) for index in positions)
        if positions == [0] and user.opcode in ("slice", "dynamic-slice", "gather"):
            return _nbytes(user.shape, of)
        if positions == [0] and user.opcode == "dynamic-update-slice":
            return 0
        if positions == [0] and user.opcode == "scatter":
            return _nbytes(computation[user.operands[-1]].shape, of)
        return of.nbytes

    def _read_inside(self, inner: Computation, number: int, of: ArrayShape, hops: int) -> int:
        """Return how many bytes of parameter `number` a fused computation reads."""
        nbytes = self._reads.get((inner.name, number))
        if nbytes is None:
            parameter = inner.parameters.get(number)
            nbytes = of.nbytes if parameter is None else min(of.nbytes, self._read_of(inner, parameter, of, hops))
            self._reads[inner.name, number] = nbytes
        return nbytes

    def _read_of(self, inner: Computation, value: Instruction, of: ArrayShape, hops: int) -> int:
        """Return how many bytes of an array are read in a fusion, by its users and by users of its views."""
        total = of.nbytes if value is inner.root else 0
        for user in inner.users[value.name]:
            if total >= of.nbytes or not hops:
                return of.nbytes
            if user.opcode in VIEWS:
                total += self._read_of(inner, user, of, hops - 1)
            elif user.opcode == "dynamic-update-slice" and user not in _in_place(inner):
                total += of.nbytes
            else:
                total += self._read_by(user, value.name, inner, of, hops - 1)
        return total

    def _written(self, computation: Computation, ins: Instruction) -> int:
        if ins.opcode.endswith("-start"):  # its shape repeats the operands, so use the computation that it runs
            inside = runs(ins)
            if not inside:
                return sum(computation[name].shape.nbytes for name in ins.operands)  # a copy
            return self._written_inside(self._module.computations[inside[0]], MAX_HOPS)
        if (computation.name, ins.name) in self._matmuls:  # library matmuls also return scratch space
            return sum(leaf.nbytes for leaf in ins.shape.leaves() if leaf.dtype not in ("s8", "u8"))
        if ins.opcode in ("dynamic-update-slice", "scatter"):
            return self._result(computation, ins, MAX_HOPS)
        inside = runs(ins)
        return self._written_inside(self._module.computations[inside[0]], MAX_HOPS) if inside else ins.shape.nbytes

    def _written_inside(self, inner: Computation, hops: int) -> int:
        root = inner.root
        if root.opcode != "tuple":
            return self._result(inner, root, hops)
        return sum(self._result(inner, inner[name], hops) for name in root.operands)

    def _result(self, inner: Computation, ins: Instruction, hops: int) -> int:
        """Return the bytes written for a result; for an in-place update, only the update."""
        shape = ins.shape
        ins = skip_views(inner, ins)
        if ins.opcode in ("dynamic-update-slice", "scatter") and isinstance(shape, ArrayShape):
            update = inner[ins.operands[1 if ins.opcode == "dynamic-update-slice" else -1]]
            return min(_nbytes(update.shape, shape), shape.nbytes)
        inside = runs(ins)
        if inside and hops:
            return self._written_inside(self._module.computations[inside[0]], hops - 1)
        return shape.nbytes


def _in_place(inner: Computation) -> list[Instruction]:
    root = inner.root
    results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    values = [skip_views(inner, result) for result in results]
    return [value for value in values if value.opcode == "dynamic-update-slice"]


def _nbytes(part: Shape, of: ArrayShape) -> int:
    """Return the size of `part` in bytes if its elements had the dtype of the array `of`."""
    size = sum(leaf.size for leaf in part.leaves())
    return -(-size * dtype_bits(of.dtype) // 8)


def widest(computation: Computation, product: Instruction) -> int:
    """Return the larger bit width of a matmul's two operands."""
    leaves = (leaf for name in product.operands[:2] for leaf in computation[name].shape.leaves())
    return max((dtype_bits(leaf.dtype) for leaf in leaves), default=0)
