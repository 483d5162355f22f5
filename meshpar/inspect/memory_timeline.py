"""Live arrays of a compiled program over time, from the schedule and the aliases of its instructions.

A buffer is live from the instruction that writes it to the last instruction that reads it. Views, tuples, loop states
and in-place updates share a buffer. Loops are walked once, stretched to the time of all iterations, and the branches of
a conditional one after the other. XLA also shares buffers between results and operands of other kernels and leaves gaps
between buffers, so the maximum differs from the compiler's number of temporary bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshpar.inspect.hlo.parser import ArrayShape, Computation, Instruction, Module, TupleShape
from meshpar.inspect.hlo.walk import branches, runs, skip_views
from meshpar.inspect.program import Program
from meshpar.inspect.source_scopes import layerless, module_path, source
from meshpar.inspect.timeline.program_work import temporary_of
from meshpar.inspect.timeline.simulator import Timeline
from meshpar.sharding.printing import Plain

MIN_SHARE = 1e-4
"""Share of the peak below which the module of an array is not looked up."""
MIN_STEP = 2e-3
"""Change of the live bytes, as a share of the peak, below which a sample is left out."""
MOST_ARRAYS = 12
"""Maximum number of arrays that are listed at the peak."""
_VIEWS = frozenset({"bitcast", "optimization-barrier", "opt-barrier", "add-dependency", "domain"})
_FREE = frozenset({"constant", "after-all", "partition-id", "replica-id"})
_ALIAS = re.compile(r"\{([\d, ]*)\}: ?\((\d+), ?\{([\d, ]*)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveArray(Plain):
    """A temporary that is live at the peak."""

    nbytes: int
    shape: str
    """Local shape, in HLO syntax."""
    module: str
    """Named scopes of the operation that computes it."""
    source: str
    """`file:line`, or empty."""
    start_s: float
    """Time of the instruction that writes it; a position from 0 to 1 without simulated times."""
    end_s: float
    """Time of the last instruction that reads it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTimeline(Plain):
    """Memory of a step over time, in bytes per device."""

    argument_bytes: int
    """State and batch, which are live during the step."""
    temporary_bytes: int
    """Temporaries, as reported by the compiler."""
    times_s: tuple[float, ...]
    """Times of the samples; positions from 0 to 1 without simulated times."""
    is_timed: bool
    """Whether `times_s` are simulated times."""
    live_bytes: Mapping[str, tuple[int, ...]]
    """Module -> bytes of its live temporaries at each time, largest at the peak first."""
    arrays: tuple[LiveArray, ...]
    """The largest temporaries that are live at the peak."""

    @property
    def peak(self) -> int:
        """Index of the sample with most live temporaries."""
        return int(np.argmax(self.totals))

    @property
    def totals(self) -> np.ndarray:
        """Bytes of live temporaries at each time."""
        return np.sum([*self.live_bytes.values()], axis=0) if self.live_bytes else np.zeros(1, np.int64)


def memory_timeline(program: Program, timeline: Timeline | None = None) -> MemoryTimeline:
    """Return the live temporaries of a program over time.

    Args:
      program: a compiled program, whose text has the schedule.
      timeline: its simulation. None uses the position of an instruction in the program as its time.
    """
    walk = _Walk(program.module, timeline)
    buffers = walk.buffers()
    times = np.array(walk.times or [0.0])
    live = np.zeros(len(times) + 1, np.int64)
    for buffer in buffers:
        live[buffer.start] += buffer.nbytes
        live[buffer.end + 1] -= buffer.nbytes
    totals = np.cumsum(live)[:-1]
    peak = int(np.argmax(totals))
    series: dict[str, np.ndarray] = {}
    for buffer in buffers:
        module = walk.module_of(buffer) if buffer.nbytes > MIN_SHARE * totals[peak] else ""
        by_module = series.setdefault(group_of(module), np.zeros(len(times) + 1, np.int64))
        by_module[buffer.start] += buffer.nbytes
        by_module[buffer.end + 1] -= buffer.nbytes
    sums = {name: np.cumsum(change)[:-1] for name, change in series.items()}
    at_peak = sorted((b for b in buffers if b.start <= peak <= b.end), key=lambda b: -b.nbytes)
    shown = _samples(totals)
    scale = 1.0 if timeline is not None else 1 / max(len(times) - 1, 1)
    return MemoryTimeline(
        argument_bytes=program.argument_bytes,
        temporary_bytes=program.temporary_bytes,
        times_s=tuple((times[shown] * scale).tolist()),
        is_timed=timeline is not None,
        live_bytes={
            name: tuple(values[shown].tolist()) for name, values in sorted(sums.items(), key=lambda i: -i[1][peak])
        },
        arrays=tuple(walk.live_array(buffer, scale) for buffer in at_peak[:MOST_ARRAYS]),
    )


def group_of(module: str) -> str:
    """Return the first two scopes of a module path, without scopes of the engine and without layer numbers.

    >>> group_of("gradients/layers/mlp/up"), group_of("update/adam"), group_of("")
    ('layers/mlp', 'update', 'other')
    """
    scopes = [scope for scope in layerless(module).split("/") if scope not in ("gradients", "micro_steps", "")]
    return "update" if scopes[:1] == ["update"] else "/".join(scopes[:2]) or "other"


def _samples(totals: np.ndarray, most: int = 400) -> np.ndarray:
    """Return the indices of the samples to keep: the maximum of each of `most` intervals, without small changes."""
    bounds = np.unique(np.linspace(0, len(totals), most + 1).astype(int))
    maxima = [start + int(np.argmax(totals[start:end])) for start, end in itertools.pairwise(bounds.tolist())]
    kept = [0]
    for index in maxima:
        if abs(int(totals[index]) - int(totals[kept[-1]])) > MIN_STEP * totals.max():
            kept.append(index)
    return np.unique([*kept, int(np.argmax(totals)), len(totals) - 1])


class _Buffer(NamedTuple):
    array: int
    nbytes: int
    start: int
    end: int
    origin: tuple[ArrayShape, int, Computation, Instruction]
    """Shape, index in the result, computation and instruction of the largest array in the buffer."""


@dataclasses.dataclass
class _Clock:
    """Times of the instructions of a segment of the simulation: the program, or a loop."""

    ends_s: Mapping[str, float]
    """End of each op in the segment."""
    start_s: float = 0.0
    """Start of the segment in the step."""
    scale: float = 1.0
    """Time of all iterations divided by the time of an iteration."""
    elapsed_s: float = 0.0
    """Time in the segment."""

    @property
    def now_s(self) -> float:
        return self.start_s + self.scale * self.elapsed_s

    def advance(self, ins: Instruction) -> None:
        self.elapsed_s = max(self.elapsed_s, self.ends_s.get(ins.name, 0.0))


class _Walk:
    """Walk over the instructions of a program in the order of execution."""

    def __init__(self, module: Module, timeline: Timeline | None) -> None:
        self._module = module
        self._segments = {} if timeline is None else {segment.name: segment for segment in timeline.segments}
        self.times: list[float] = []
        """Time of each executed instruction."""
        # Arrays are numbered. `_parents` joins the arrays of a buffer (union-find).
        self._parents: list[int] = []
        self._spans: list[list[int]] = []
        self._origins: list[tuple[ArrayShape, int, Computation, Instruction]] = []
        self._arguments: set[int] = set()
        self._updates: list[tuple[int, Instruction]] = []
        """Arrays with updated slices, and the instruction that computes the update."""
        self._collected: dict[int, Instruction] = {}
        """Buffer -> instruction whose values a loop collects in it."""
        self._reusable: list[tuple[int, int, int]] = []
        """(result, operand, time) of elementwise kernels, whose result may overwrite an operand."""

    def buffers(self) -> list[_Buffer]:
        """Return the buffers of temporaries and outputs."""
        entry = self._module.entry
        numbers = {
            number: [self._new(leaf, i, entry, ins) for i, leaf in enumerate(ins.shape.leaves())]
            for number, ins in entry.parameters.items()
        }
        self._arguments = {array for arrays in numbers.values() for array in arrays}
        self.times.append(0.0)
        root = self._run(entry, numbers, self._clock(""))
        for out, number, index in _aliases(self._module.attributes.get("input_output_alias", "")):
            if out < len(root) and index < len(numbers.get(number, ())):
                self._join(root[out], numbers[number][index])
        for array in root:
            self._touch([array], len(self.times) - 1)
        self._reuse()
        self._collected = {self._find(array): ins for array, ins in self._updates if _module(ins)}
        arguments = {self._find(array) for array in self._arguments}
        groups: dict[int, list[int]] = {}
        for array in range(len(self._parents)):
            groups.setdefault(self._find(array), []).append(array)
        return [
            _Buffer(largest, _nbytes(self._origins[largest][0]), start, end, self._origins[largest])
            for buffer, arrays in groups.items()
            if buffer not in arguments
            for largest in [max(arrays, key=lambda array: _nbytes(self._origins[array][0]))]
            for start, end in [self._spans[buffer]]
            if _nbytes(self._origins[largest][0])
        ]

    def module_of(self, buffer: _Buffer) -> str:
        """Return the module of a buffer: of the values that it collects, or of the instruction that creates it."""
        collected = self._collected.get(self._find(buffer.array))
        return temporary_of(self._module, *buffer.origin).module if collected is None else _module(collected)

    def live_array(self, buffer: _Buffer, scale: float) -> LiveArray:
        """Return the description of a buffer, with times multiplied by `scale`."""
        found, collected = temporary_of(self._module, *buffer.origin), self._collected.get(self._find(buffer.array))
        return LiveArray(
            nbytes=buffer.nbytes,
            shape=found.shape,
            module=self.module_of(buffer),
            source=found.source if collected is None else source(self._module, collected) or found.source,
            start_s=self.times[buffer.start] * scale,
            end_s=self.times[buffer.end] * scale,
        )

    # ---- Arrays ------------------------------------------------------------------------------------------------------

    def _new(self, leaf: ArrayShape, index: int, computation: Computation, ins: Instruction) -> int:
        now = max(len(self.times) - 1, 0)
        self._parents.append(len(self._parents))
        self._spans.append([now, now])
        self._origins.append((leaf, index, computation, ins))
        return len(self._parents) - 1

    def _find(self, array: int) -> int:
        while self._parents[array] != array:
            self._parents[array] = self._parents[self._parents[array]]
            array = self._parents[array]
        return array

    def _join(self, array: int, other: int) -> None:
        a, b = self._find(array), self._find(other)
        if a != b:
            self._parents[a] = b
            self._spans[b] = [min(self._spans[a][0], self._spans[b][0]), max(self._spans[a][1], self._spans[b][1])]

    def _touch(self, arrays: Sequence[int], now: int) -> None:
        for array in arrays:
            span = self._spans[self._find(array)]
            span[0], span[1] = min(span[0], now), max(span[1], now)

    def _reuse(self) -> None:
        """Join results of elementwise kernels with an operand of the same size that is not read later."""
        for result, operand, now in self._reusable:
            buffer = self._find(operand)
            is_same = _nbytes(self._origins[result][0]) == _nbytes(self._origins[operand][0])
            is_free = self._spans[buffer][1] == now and self._spans[self._find(result)][0] == now
            if is_same and is_free and buffer not in self._arguments:
                self._join(result, operand)

    # ---- Instructions ------------------------------------------------------------------------------------------------

    def _clock(self, loop: str, start_s: float = 0.0, duration_s: float | None = None) -> _Clock:
        """Return the clock of a loop, or of the program (""). A loop without simulated times has no duration."""
        segment = self._segments.get(loop)
        ends_s = {} if segment is None else {op.name: op.end_s for op in segment.ops}
        own_s = 0.0 if segment is None else segment.duration_s
        return _Clock(ends_s, start_s, 1.0 if duration_s is None else duration_s / own_s if own_s else 0.0)

    def _run(self, computation: Computation, numbers: Mapping[int, list[int]], clock: _Clock) -> list[int]:
        """Walk over a computation, given the arrays of the parameters. Returns the arrays of the result."""
        values: dict[str, list[int]] = {}
        outputs: dict[str, list[int]] = {}
        for ins in computation:
            arrays = [array for name in ins.operands for array in values[name]]
            if ins.opcode == "parameter":
                values[ins.name] = list(numbers.get(int(ins.payload), ()))
            elif ins.opcode == "tuple" or ins.opcode in _VIEWS:
                values[ins.name] = arrays
            elif ins.opcode == "get-tuple-element":
                values[ins.name] = _element(computation[ins.operands[0]], ins.tuple_index or 0, arrays)
            elif ins.opcode in _FREE:
                values[ins.name] = []
            elif ins.opcode.endswith(("-done", "-update")):
                clock.advance(ins)
                self._touch(arrays, len(self.times) - 1)
                values[ins.name] = outputs[ins.name] = outputs.get(ins.operands[0], arrays)
            else:
                self.times.append(clock.now_s if self._segments else float(len(self.times)))
                self._touch(arrays, len(self.times) - 1)
                values[ins.name] = self._execute(computation, ins, values, clock)
                outputs[ins.name] = _started(ins, values[ins.name])
                clock.advance(ins)
        return values[computation.root.name]

    def _execute(
        self, computation: Computation, ins: Instruction, values: Mapping[str, list[int]], clock: _Clock
    ) -> list[int]:
        """Return the arrays of the result of an instruction."""
        computations = self._module.computations
        operands = [values[name] for name in ins.operands]
        if ins.opcode == "while":
            (carried,) = operands
            start_s = clock.now_s
            end_s = clock.start_s + clock.scale * clock.ends_s.get(ins.name, clock.elapsed_s)
            inner = self._clock(ins.name, start_s, max(end_s - start_s, 0.0))
            result = self._run(computations[ins.called_as("body")[0]], {0: carried}, inner)
            for array, new in zip(carried, result, strict=False):
                self._join(new, array)
            self._touch(carried, len(self.times) - 1)
            return carried
        if branches(computation, ins):
            names = ins.called_as("branch")
            results = [
                self._run(computations[name], {0: given}, clock)
                for name, given in zip(names, operands[1:], strict=False)
            ]
            for result in results[1:]:
                for array, other in zip(result, results[0], strict=False):
                    self._join(array, other)
            self._touch([array for arrays in (*operands, results[0]) for array in arrays], len(self.times) - 1)
            return results[0]
        if ins.opcode == "call" and (callees := runs(ins)):
            return self._run(computations[callees[0]], dict(enumerate(operands)), clock)
        return self._written(computation, ins, [array for arrays in operands for array in arrays], values)

    def _written(
        self, computation: Computation, ins: Instruction, arrays: list[int], values: Mapping[str, list[int]]
    ) -> list[int]:
        """Return the arrays that a kernel writes, joined with the operands that it updates in place."""
        result = [self._new(leaf, index, computation, ins) for index, leaf in enumerate(ins.shape.leaves())]
        if _has_operands_in_result(ins):
            for array, operand in zip(result, arrays, strict=False):
                self._join(array, operand)
        aliases = [*_aliases(ins.attributes.get("output_to_operand_aliasing", ""))]
        for out, number, value in self._in_place(computation, ins):
            aliases.append((out, number, 0))
            if out < len(result):
                self._updates.append((result[out], value))
        for out, number, index in aliases:
            updated = values[ins.operands[number]] if number < len(ins.operands) else []
            if out < len(result) and index < len(updated):
                self._join(result[out], updated[index])
        if ins.opcode == "fusion" and ins.attributes.get("kind") == "kLoop":
            now = len(self.times) - 1
            self._reusable += [(array, operand, now) for array in result for operand in arrays]
        return result

    def _in_place(self, computation: Computation, ins: Instruction) -> Iterator[tuple[int, int, Instruction]]:
        """Yield (index in the result, operand, instruction of the update) of dynamic updates of slices."""
        if ins.opcode == "dynamic-update-slice":
            yield 0, 0, skip_views(computation, computation[ins.operands[1]])
        if ins.opcode not in ("fusion", "fusion-start"):
            return
        inner = self._module.computations[ins.called[0][1]]
        roots = [inner[name] for name in inner.root.operands] if inner.root.opcode == "tuple" else [inner.root]
        for out, root in enumerate(roots):
            update = skip_views(inner, root)
            if update.opcode == "dynamic-update-slice":
                target, value = (skip_views(inner, inner[name]) for name in update.operands[:2])
                if value.opcode == "parameter":
                    value = skip_views(computation, computation[ins.operands[int(value.payload)]])
                if target.opcode == "parameter":
                    yield out + len(ins.operands) * (ins.opcode == "fusion-start"), int(target.payload), value


def _module(ins: Instruction) -> str:
    return module_path(ins.metadata.op_name)


def _nbytes(leaf: ArrayShape) -> int:
    return 0 if "S(5)" in leaf.layout else leaf.nbytes  # host memory


def _element(ins: Instruction, index: int, arrays: list[int]) -> list[int]:
    """Return the arrays of an element of a tuple."""
    assert isinstance(ins.shape, TupleShape)
    counts = [len(list(element.leaves())) for element in ins.shape.elements]
    start = sum(counts[:index])
    return arrays[start : start + counts[index]]


def _has_operands_in_result(ins: Instruction) -> bool:
    """Return whether the first element of the result of a start instruction repeats its operands."""
    is_start = ins.opcode.endswith("-start") and ins.opcode not in ("copy-start", "all-reduce-start")
    return is_start and isinstance(ins.shape, TupleShape) and len(ins.shape.elements) > 1


def _started(ins: Instruction, arrays: list[int]) -> list[int]:
    """Return the arrays that the done of a start instruction returns."""
    if ins.opcode == "copy-start":
        return arrays[:1]
    return _element(ins, 1, arrays) if _has_operands_in_result(ins) else arrays


def _aliases(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield (output, operand, index in the operand) of `{0}: (2, {1}), ...`. Only flat tuples are supported."""
    for out, number, index in _ALIAS.findall(text):
        yield int(out or 0), int(number), int(index or 0)
