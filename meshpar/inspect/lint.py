"""Lint rules: performance mistakes that a compiled training step proves.

    rule                    finding                                                              platforms
    rematerialization       the partitioner replicates a full tensor in order to reshard it      GPU, CPU
    replicated              a large leaf is replicated although other leaves are sharded         GPU, CPU
    whole-batch             activations are gathered over the axes of the batch                  GPU, CPU
    rows-moved              examples move between devices before they are used                   GPU, CPU
    sliced-all-reduce       an all-reduce whose result is sliced, instead of a reduce-scatter    GPU
    loop-invariant          a collective in a loop sends the same data in every iteration        GPU, CPU
    float32-on-the-wire     weights or activations are sent in float32 although compute is 16-bit    GPU
    slow-axis               an axis with communication in every layer crosses nodes              with a cluster
    small-messages          the latency of small messages is a large part of the step            with a cluster
    idle-axis               no array is sharded over a mesh axis, so its devices repeat work     GPU, CPU

XLA:CPU lowers a reduce-scatter to an all-reduce and a slice, and sends bfloat16 as float32, so two rules are limited to
GPUs. Float32 is expected for gradients (`Precision.reduce`) and for new parameters that are gathered after an update.
Arrays smaller than `SMALL_BYTES` are ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from meshpar.hardware.clusters import Cluster
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.census import KINDS, UNKNOWN, Collective, per_array
from meshpar.inspect.compiler_messages import Rematerialization
from meshpar.inspect.expected import scopes_above
from meshpar.inspect.hlo.parser import ArrayShape, Computation, Instruction, Module
from meshpar.inspect.hlo.shapes import dtype_bits, parse_shape
from meshpar.inspect.hlo.walk import executed
from meshpar.inspect.program import Program
from meshpar.inspect.timeline import program_work as work
from meshpar.inspect.timeline.simulator import Timed, Timeline
from meshpar.parallel.execution import Execution, split_axes
from meshpar.parallel.strategy import BIG_LEAF_BYTES
from meshpar.sharding.printing import Plain
from meshpar.sharding.rules import USER
from meshpar.sharding.types import Decision, num_shards, owner_of, spec_axes
from meshpar.sharding.units import human_bytes, human_time
from meshpar.training.state import Setup

_Place = tuple[Computation, Instruction]

LATENCY_SHARE = 0.05
"""The rule `small-messages` reports axes whose exposed latency exceeds this fraction of the simulated step."""
SMALL_BYTES = 2**16
"""Arrays below this size are ignored, such as norm scales and statistics of the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding(Plain):
    """A performance mistake."""

    rule: str
    """Name of the rule: one of the table in the module docstring, or `other-dtype` or `wide-compute`."""
    module: str = ""
    """Named scopes of the module, or the path of a parameter."""
    source: str = ""
    """`file:line`, or empty if the program does not contain it."""
    message: str
    """Description, with sizes."""
    fix: str
    """Suggested fix."""
    nbytes: int
    """Cost per device: bytes sent per step, or bytes of unnecessary memory."""
    count: int = 1
    """Number of layers with this finding. A star in `module` stands for the layer number."""


def lint(
    program: Program,
    collectives: Iterable[Collective],
    setup: Setup | None = None,
    execution: Execution | None = None,
    cluster: Cluster | None = None,
    times: Timeline | None = None,
) -> tuple[Finding, ...]:
    """Return the findings in a compiled program, the most expensive first, merged over layers.

    `times` is the simulated step, for the rule `small-messages`. Without a `setup`, the program is not a training step,
    and only rules that need no strategy apply.
    """
    execution = Execution(sizes={}) if execution is None else execution
    context = _Context(program, tuple(collectives), setup, execution, cluster, times)
    rules = _RULES if setup is not None else _RULES_OF_PROGRAMS
    by_layer: dict[Any, list[Finding]] = {}
    for finding in itertools.chain.from_iterable(rule(context) for rule in rules):
        module, message = scopes.layerless(finding.module), scopes.layerless(finding.message)
        by_layer.setdefault((finding.rule, module, finding.source, message, finding.fix), []).append(finding)
    merged = [
        dataclasses.replace(
            findings[0],
            module=scopes.merge_layers([finding.module for finding in findings]),
            nbytes=sum(finding.nbytes for finding in findings),
            count=len(findings),
        )
        for findings in by_layer.values()
    ]
    return tuple(sorted(merged, key=lambda f: (-f.nbytes, f.rule, f.module, f.source, f.message)))


@dataclasses.dataclass(frozen=True)
class _Context:
    """A compiled program with its step and cluster, and derived data that several rules use."""

    program: Program
    collectives: tuple[Collective, ...]
    setup: Any
    """The `Setup` of a training step; None for other programs, which skip the rules that use it."""
    execution: Execution
    cluster: Cluster | None
    times: Timeline | None

    @property
    def module(self) -> Module:
        return self.program.module

    @property
    def is_gpu(self) -> bool:
        return self.program.target != "cpu"

    @property
    def batch_axes(self) -> frozenset[str]:
        return frozenset(self.execution.batch_axes)

    @functools.cached_property
    def arrays(self) -> tuple[Collective, ...]:
        """The arrays of all collectives as separate records, as before XLA combined them. Omits small arrays."""
        arrays = itertools.chain.from_iterable(map(per_array, self.collectives))
        return tuple(array for array in arrays if array.payload_bytes >= SMALL_BYTES)

    @functools.cached_property
    def batch_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Local shapes of the batch's leaves, as the program receives them."""
        arguments = (ins for ins in self.module.entry if _is_argument(ins, "batch"))
        return tuple(ins.shape.dims for ins in arguments if isinstance(ins.shape, ArrayShape))

    @functools.cached_property
    def param_dims(self) -> frozenset[tuple[int, ...]]:
        """Shapes, with sorted dims, of parameters, gradients and optimizer state: full, sharded and per layer."""
        dims: set[tuple[int, ...]] = set()
        for decision in (*self.setup.table.params, *self.setup.table.grads, *self.setup.table.optimizer):
            shards = [num_shards((entry,), self.execution.sizes) for entry in decision.spec]
            options = itertools.zip_longest(decision.leaf.shape, shards, fillvalue=1)
            for shape in itertools.product(*({size, size // n} for size, n in options)):
                dims |= {tuple(sorted(shape)), tuple(sorted(shape[1:]))}
        return frozenset(dims)

    @functools.cached_property
    def callers(self) -> dict[str, list[_Place]]:
        callers: dict[str, list[_Place]] = {}
        for computation in self.module:
            for ins in computation:
                for _, name in ins.called:
                    callers.setdefault(name, []).append((computation, ins))
        return callers

    @functools.cached_property
    def computes_in_16_bits(self) -> bool:
        """True if the compute dtype has 16 bits; if none is set, true if most matmul FLOPs are in 16 bits."""
        if self.execution.compute is not None:
            return np.dtype(self.execution.compute).itemsize == 2
        flops_16_bits = total = 0
        for matmul in work.matmuls(self.module):
            operand = matmul.computation[matmul.ins.operands[0]].shape
            total += matmul.flops_per_step
            is_16_bits = isinstance(operand, ArrayShape) and dtype_bits(operand.dtype) == 16
            flops_16_bits += matmul.flops_per_step * is_16_bits
        return 2 * flops_16_bits > total


def _rematerialization(context: _Context) -> Iterator[Finding]:
    by_module: dict[str, list[Rematerialization]] = {}
    instructions = [ins for visit in executed(context.module) for ins in visit.computation]
    for message in context.program.rematerializations:
        by_module.setdefault(message.module, []).append(message)
    for module, messages in by_module.items():
        largest = max(messages, key=_full_bytes)
        same_op = (ins for ins in instructions if largest.op_name and ins.metadata.op_name == largest.op_name)
        same_module = (ins for ins in instructions if module and scopes.module_path(ins.metadata.op_name) == module)
        ins = next(same_op, None) or next(same_module, None)
        tensor = largest.shape.partition("{")[0] or "a tensor"
        more = f" ({len(messages) - 1} more here)" if len(messages) > 1 else ""
        yield Finding(
            rule="rematerialization",
            module=module,
            source=scopes.source(context.module, ins) if ins is not None else "",
            message=f"{tensor} is resharded from {largest.before} to {largest.after}{more}: the compiler gathers the "
            "full tensor on every device and slices it",
            fix="use the same sharding in both places, or add a constraint in between that shares a sharded dim "
            "with each",
            nbytes=sum(map(_full_bytes, messages)),
        )


def _full_bytes(message: Rematerialization) -> int:
    """Return the size of the full tensor from the local shape and the number of tiles in the message."""
    match = re.search(r"devices=\[([0-9,]+)\]", message.before)
    tiles = [int(tile) for tile in match.group(1).split(",")] if match else []
    if "last_tile_dim" in message.before:
        tiles = tiles[:-1]
    try:
        return parse_shape(message.shape.partition("{")[0]).nbytes * math.prod(tiles)
    except ValueError:
        return 0


def _replicated(context: _Context) -> Iterator[Finding]:
    """Yield a finding for each large replicated leaf, unless a preset such as `ddp` replicates it on purpose."""
    setup, table, by_param = context.setup, context.setup.table, dict[str, list[Decision]]()
    min_bytes = min(setup.strategy.big_leaf_bytes, BIG_LEAF_BYTES)
    paths = {decision.path for decision in table.params}
    for decisions in (table.params, table.optimizer):
        if not any(decision.shards > 1 for decision in decisions):
            continue
        for decision in decisions:
            by_user = not decision.replicated_on_purpose or any(origin == USER for origin, _ in decision.sources)
            if decision.shards == 1 and by_user and decision.leaf.layer_nbytes >= min_bytes:
                by_param.setdefault(owner_of(decision.path, paths), []).append(decision)
    max_shards = max((decision.shards for decision in (*table.params, *table.optimizer)), default=1)
    for path, replicated in by_param.items():
        leaf, nbytes = replicated[0].leaf, sum(decision.leaf.nbytes for decision in replicated)
        dims = "×".join(map(str, leaf.shape))
        slots = f", with {len(replicated) - 1} of its optimizer state" if len(replicated) > 1 else ""
        yield Finding(
            rule="replicated",
            module=path,
            message=f"`{leaf.path}` ({dims} {leaf.dtype.name}{slots}, {human_bytes(nbytes)}) is replicated by the rule "
            f"{replicated[0].rule}, while other leaves have up to {max_shards} shards",
            fix="remove the rule so that the strategy applies, or map a dim to a mesh axis",
            nbytes=nbytes - nbytes // max_shards,
        )


def _gathers_batch(context: _Context, array: Collective) -> bool:
    """Return whether an all-gather gathers the batch dim of an activation.

    An array is an activation if its first dims match the batch: examples and positions.
    """
    dims = array.arrays[0].dims
    if array.kind != "all-gather" or not set(array.axes) & context.batch_axes:
        return False
    # A rematerialized tensor has its own finding.
    rematerialized = {message.module for message in context.program.rematerializations}
    if tuple(sorted(dims)) in context.param_dims or array.module in rematerialized:
        return False
    gathered_dim = context.module.computations[array.computation][array.name].attributes.get("dimensions")
    # [examples, positions] of a batch or a micro-step
    micro_steps = {1, context.execution.micro_steps}
    prefixes = {(shape[0] // n, *shape[1:2]) for shape in context.batch_shapes for n in micro_steps if shape}
    is_activation = any(len(dims) > len(prefix) and dims[: len(prefix)] == prefix for prefix in prefixes)
    return gathered_dim == "{0}" and is_activation


def _is_repeated(context: _Context, array: Collective) -> bool:
    """Return whether a collective in a loop sends the same data in every iteration of the innermost loop."""
    trips, micro_steps = [loop.trip_count for loop in array.loops], context.execution.micro_steps
    # Weights may be gathered in each micro-step on purpose.
    if not trips or trips[-1] == 1 or (micro_steps > 1 and trips == [micro_steps]):
        return False
    body, name = context.module.computations[array.loops[-1].body], array.name
    if array.computation != body.name:  # in an async wrapper
        callers = [ins for ins in body if array.computation in ins.called_as("calls", "to_apply")]
        if len(callers) != 1:
            return False
        name = callers[0].name
    unchanged, is_invariant, stack = _unchanged(body), dict[str, bool](), [name]
    while stack:
        ins = body[stack[-1]]
        if ins.name in is_invariant:
            stack.pop()
        elif ins.opcode == "get-tuple-element" and body[ins.operands[0]].opcode == "parameter":
            is_invariant[ins.name] = ins.tuple_index in unchanged
        elif ins.opcode in ("parameter", "infeed", "recv", "rng", "rng-get-and-update-state"):
            is_invariant[ins.name] = False
        elif unknown := [operand for operand in ins.operands if operand not in is_invariant]:
            stack.extend(unknown)
        else:
            is_invariant[ins.name] = all(is_invariant[operand] for operand in ins.operands)
    return is_invariant[name]


def _unchanged(body: Computation) -> frozenset[int]:
    """Return the indices of the elements of the loop state that the loop body does not change."""
    if body.root.opcode != "tuple":
        return frozenset()
    unchanged = set()
    for index, name in enumerate(body.root.operands):
        ins = body[name]
        while ins.opcode in ("copy", "bitcast") and ins.operands:
            ins = body[ins.operands[0]]
        if ins.tuple_index == index and body[ins.operands[0]].opcode == "parameter":
            unchanged.add(index)
    return frozenset(unchanged)


def _is_needlessly_float32(context: _Context, array: Collective) -> bool:
    dims = array.arrays[0].dims
    if not context.is_gpu or not context.computes_in_16_bits:
        return False
    tokens = max((math.prod(shape) for shape in context.batch_shapes), default=0)
    if array.dtype != "f32" or len(dims) < 2 or math.prod(dims) <= tokens:
        return False  # float32 statistics of the loss are intended
    if array.module.split("/")[0] == "update":
        return False  # new parameters are gathered in their storage dtype
    has_param_dims = tuple(sorted(dims)) in context.param_dims
    if array.kind not in ("all-reduce", "reduce-scatter"):
        return not has_param_dims or _is_moved_argument(context, "state.params", array)
    # Sums over batch axes are gradients. Backward sums over other axes are gradients if they have a parameter's dims.
    return not set(array.axes) <= context.batch_axes and not (array.is_backward and has_param_dims)


_MOVES: Mapping[str, slice] = {
    **dict.fromkeys(("bitcast", "convert", "copy", "reshape", "transpose", "slice", "broadcast", "reverse"), slice(1)),
    **dict.fromkeys(("dynamic-slice", "gather", "pad"), slice(1)),
    **dict.fromkeys(("concatenate", "optimization-barrier"), slice(None)),
    "dynamic-update-slice": slice(2),
    "select": slice(1, 3),
}
"""Opcode of an operation that only moves data -> the operands that contain this data."""
_NEUTRAL = frozenset({"constant", "iota", "partition-id", "replica-id"})


def _is_argument(ins: Instruction, name: str) -> bool:
    """Return whether an instruction is the argument `name` of the step or one of its leaves: `batch['inputs']`."""
    return ins.opcode == "parameter" and re.match(rf"{re.escape(name)}(?![\w])", ins.metadata.op_name) is not None


def _is_moved_argument(context: _Context, argument: str, collective: Collective) -> bool:
    """Return whether a collective sends an argument of the step, or parts of it, unmodified."""
    module = context.module
    computation = module.computations[collective.computation]
    seen: set[tuple[str, str]] = set()
    stack: list[_Place | None] = [(computation, computation[name]) for name in computation[collective.name].operands]
    has_argument = False
    while stack:
        place = stack.pop()
        if place is None:
            return False
        computation, ins = place
        if (computation.name, ins.name) in seen or ins.opcode in _NEUTRAL:
            continue
        seen.add((computation.name, ins.name))
        if computation is module.entry and ins.opcode == "parameter":
            if not _is_argument(ins, argument):
                return False
            has_argument = True
        else:
            stack.extend(_data_sources(context, computation, ins))
    return has_argument


def _data_sources(context: _Context, computation: Computation, ins: Instruction) -> list[_Place | None]:
    """Return the instructions from which an instruction moves or copies data; `[None]` if it computes new data."""
    kind = ins.opcode.removesuffix("-start").removesuffix("-done")
    is_called = kind in ("fusion", "call", "async")
    if kind in _MOVES or kind in KINDS or (is_called and ins.opcode.endswith("-done")):
        return [(computation, computation[name]) for name in ins.operands[_MOVES.get(kind, slice(None))]]
    if is_called:
        called = [context.module.computations[name] for name in ins.called_as("calls", "to_apply")]
        return [(inner, inner.root) for inner in called] or [None]
    if kind == "get-tuple-element":
        return [_element(context, computation, computation[ins.operands[0]], ins.tuple_index or 0)]
    if kind == "parameter":
        return [_passed(computation, ins, *caller) for caller in context.callers.get(computation.name, [])] or [None]
    return [None]


def _element(context: _Context, computation: Computation, value: Instruction, index: int) -> _Place | None:
    """Return the instruction that produced element `index` of a tuple, or None if unknown or changed by a loop."""
    if value.opcode == "tuple":
        return (computation, computation[value.operands[index]]) if index < len(value.operands) else None
    if value.opcode.removesuffix("-done") in KINDS:  # combined collectives
        start = computation[value.operands[0]] if value.opcode.endswith("-done") else value
        return (computation, computation[start.operands[index]]) if index < len(start.operands) else None
    if value.opcode == "fusion":
        inner = context.module.computations[value.called[0][1]]
        return _element(context, inner, inner.root, index) if inner.root.opcode == "tuple" else None
    if value.opcode == "while":
        body = context.module.computations[value.called_as("body")[0]]
        is_unchanged = index in _unchanged(body)
        return _element(context, computation, computation[value.operands[0]], index) if is_unchanged else None
    if value.opcode == "parameter":
        loops = [place for place in context.callers.get(computation.name, []) if place[1].opcode == "while"]
        if len(loops) == 1 and index in _unchanged(computation):
            caller, loop = loops[0]
            return _element(context, caller, caller[loop.operands[0]], index)
    return None


def _passed(computation: Computation, param: Instruction, caller: Computation, call: Instruction) -> _Place | None:
    """Return the operand that `call` passes for the parameter `param` of `computation`, or None."""
    number = next((n for n, ins in computation.parameters.items() if ins is param), len(call.operands))
    is_call = call.opcode.removesuffix("-start") in ("fusion", "call", "async")
    return (caller, caller[call.operands[number]]) if is_call and number < len(call.operands) else None


def _slow_axis(context: _Context) -> Iterator[Finding]:
    cluster, execution = context.cluster, context.execution
    if cluster is None:
        return
    # Axes with communication within a layer: they shard weights or activations, but not the batch.
    weight_axes = {axis for weight in execution.weights for axis in split_axes(execution, weight.decision.spec)}
    inner = {*execution.tensor_axes, *execution.context_axes, *(weight_axes - context.batch_axes)}
    for axis in sorted(inner - (set() if execution.pipeline is None else {execution.pipeline.axis})):
        collectives = [collective for collective in context.collectives if axis in collective.axes]
        if not collectives or not cluster.crosses_node([axis], execution.sizes):
            continue
        nbytes = int(sum(collective.bytes_sent_per_step for collective in collectives))
        largest = max(collectives, key=lambda collective: collective.bytes_sent_per_step)
        link = cluster.measured([axis]) or cluster.across
        yield Finding(
            rule="slow-axis",
            module=largest.module,
            source=largest.source,
            message=f"mesh axis `{axis}` ({execution.sizes[axis]}) crosses nodes of {cluster.gpus_per_node} GPUs: "
            f"layers wait for {human_bytes(nbytes)} per step at {human_bytes(link.bytes_per_s)}/s instead of "
            f"{human_bytes(cluster.inside.bytes_per_s)}/s",
            fix=f"use a divisor of {cluster.gpus_per_node} for `{axis}` and more devices for fsdp or data",
            nbytes=nbytes,
        )


def _small_messages(context: _Context) -> Iterator[Finding]:
    """Yield a finding for each mesh axis whose small messages add more than `LATENCY_SHARE` to the step.

    A message is small if its latency exceeds its bandwidth time. Most messages of most steps are small, but hidden or
    few. Therefore the rule compares the latency that is not hidden with the step time.
    """
    if context.times is None:
        return
    by_axes: dict[str, list[Timed]] = {}
    for timed_op in context.times.collectives:
        by_axes.setdefault(timed_op.collective.axes_label, []).append(timed_op)
    for label, timed in by_axes.items():
        small = [t for t in timed if 2 * t.latency_s > t.time_s and t.lost_s > 0]
        lost_s = sum(timed_op.lost_s for timed_op in small)
        if lost_s <= LATENCY_SHARE * context.times.step_s:
            continue
        by_place: dict[tuple[str, str, str], list[Timed]] = {}
        for timed_op in small:
            place = scopes.layerless(timed_op.collective.module), timed_op.collective.source, timed_op.collective.kind
            by_place.setdefault(place, []).append(timed_op)
        group = max(by_place.values(), key=lambda group: sum(timed_op.lost_s for timed_op in group))
        largest = max(group, key=lambda timed_op: timed_op.lost_s)
        sent, share = largest.collective, lost_s / context.times.step_s
        crossover_bytes = sent.payload_bytes * largest.latency_s / max(largest.time_s - largest.latency_s, 1e-12)
        yield Finding(
            rule="small-messages",
            module=sent.module,
            source=sent.source,
            message=f"latency of {_num_runs(small):,} of {_num_runs(timed):,} messages over {label} adds "
            f"{human_time(lost_s)} ({share:.0%}) to the step. The largest part is due to {sent.kind} of "
            f"{human_bytes(sent.payload_bytes)}, {_num_runs(group):,} times per step. Below "
            f"{human_bytes(int(crossover_bytes))}, latency exceeds bandwidth time",
            fix=_fix_of_small_messages(context, sent),
            nbytes=int(sum(timed_op.collective.bytes_sent_per_step for timed_op in small)),
        )


def _num_runs(timed: Iterable[Timed]) -> int:
    return sum(timed_op.collective.count_per_step for timed_op in timed)


def _fix_of_small_messages(context: _Context, sent: Collective) -> str:
    fixes, axes = [f"use fewer shards over {', '.join(sent.axes)}"], set(sent.axes)
    if context.setup is not None:
        fixes.append("use more examples per device")
        if context.execution.micro_steps > 1:
            fixes.append("use fewer micro-steps")
        if context.execution.batch_slices == 1 and not axes <= context.batch_axes:
            fixes.append("use batch_slices=2, which overlaps messages with matmuls")
    if sent.kind in ("all-gather", "all-reduce", "reduce-scatter"):
        option = f"xla_gpu_{sent.kind.replace('-', '_')}_combine_threshold_bytes"
        fixes.append(f"combine independent messages with XLA's option {option}")
    return ", or ".join(filter(None, [", ".join(fixes[:-1]), fixes[-1]]))


def _idle_axis(context: _Context) -> Iterator[Finding]:
    table = context.setup.table
    decisions = (*table.params, *table.grads, *table.optimizer)
    used = {axis for decision in decisions for entry in decision.spec for axis in spec_axes(entry)}
    used |= context.batch_axes | {axis for collective in context.collectives for axis in collective.axes}
    for axis, size in context.execution.sizes.items():
        if size == 1 or axis in used or UNKNOWN in used:
            continue
        yield Finding(
            rule="idle-axis",
            message=f"no array is sharded over mesh axis `{axis}` ({size}), so its devices repeat the same work",
            fix=f"use its devices for the batch (data, fsdp), or add a strategy that shards over `{axis}`",
            nbytes=table.totals.state_bytes,
        )


def _fix_of_whole_batch(context: _Context, module: str) -> str:
    above = scopes_above(context.setup)
    rule = 'constrain(x, "batch", ...)' if above is None else scopes.rule_for(module, above)
    return f"keep the batch dim sharded with {rule}, and sort, take or reshape only within an example"


def _fix_of_float32(context: _Context, module: str) -> str:
    cause = "the model undoes the cast of Precision.compute: look for a module with dtype=float32 or float32 inputs"
    if context.execution.compute is None:
        cause = 'cast before the sharding changes: Precision(compute="bfloat16") casts weights before they are gathered'
    return f"{cause}; call astype on an activation before constrain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CollectiveRule:
    """A rule that judges each collective separately, and merges findings of the same module and kind."""

    rule: str
    matches: Callable[[_Context, Collective], bool]
    message: str
    fix: str | Callable[[_Context, str], str]
    """The suggested fix, or a function that returns it for a module path."""
    is_per_array: bool = True
    """Whether `matches` gets the entries of `_Context.arrays` instead of the program's collectives."""

    def __call__(self, context: _Context) -> Iterator[Finding]:
        groups: dict[tuple[str, str], list[Collective]] = {}
        for array in context.arrays if self.is_per_array else context.collectives:
            if self.matches(context, array):
                groups.setdefault((array.module, array.kind), []).append(array)
        for (module, kind), group in groups.items():
            largest = max(group, key=lambda array: array.bytes_sent_per_step)
            shapes = ", ".join(map(str, largest.arrays[:2])) + ", …" * (len(largest.arrays) > 2)
            more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
            times = f", {largest.count_per_step} times per step" if largest.count_per_step > 1 else ""
            yield Finding(
                rule=self.rule,
                module=module,
                source=largest.source,
                message=f"{kind} of {shapes} over {largest.axes_label}{times}{more}: {self.message}",
                fix=self.fix if isinstance(self.fix, str) else self.fix(context, module),
                nbytes=int(sum(array.bytes_sent_per_step for array in group)),
            )


_RULES_OF_PROGRAMS: tuple[Callable[[_Context], Iterator[Finding]], ...] = (
    _rematerialization,
    _CollectiveRule(
        rule="sliced-all-reduce",
        matches=lambda context, array: context.is_gpu and all(array.sliced),
        message="each device keeps only a slice of the result, so a reduce-scatter would send half the bytes",
        fix="use lax.psum_scatter, or slice by the device's index, which the compiler turns into a reduce-scatter",
    ),
    _CollectiveRule(
        rule="loop-invariant",
        matches=_is_repeated,
        message="all iterations of a loop send the same data",
        fix="move it before the loop, if there is memory for its result during the loop",
    ),
    _small_messages,
)
_RULES: tuple[Callable[[_Context], Iterator[Finding]], ...] = (
    *_RULES_OF_PROGRAMS,
    _replicated,
    _CollectiveRule(
        rule="whole-batch",
        matches=_gathers_batch,
        message="all devices gather the activations of the global batch and repeat the same work",
        fix=_fix_of_whole_batch,
    ),
    _CollectiveRule(
        rule="rows-moved",
        matches=lambda context, collective: (
            bool(set(collective.axes) & context.batch_axes)
            and collective.origin == "partitioner"
            and _is_moved_argument(context, "batch", collective)
        ),
        message="examples of the batch move between devices before they are used",
        fix="keep examples on their device: use train_step(accumulate=...), which splits the local batch, instead of a "
        "reshape to [steps, examples]",
        is_per_array=False,
    ),
    _CollectiveRule(
        rule="float32-on-the-wire",
        matches=_is_needlessly_float32,
        message="sent in float32 although the step computes in 16 bits, which doubles the bytes",
        fix=_fix_of_float32,
    ),
    _slow_axis,
    _idle_axis,
)
