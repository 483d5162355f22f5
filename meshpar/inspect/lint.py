"""Findings: costly mistakes that a compiled program shows with certainty, each at its place in the model.

    rule                    what was found                                                       seen on
    rematerialization       the partitioner gave up on a resharding and gathers the whole tensor GPU, CPU
    replicated              a big leaf is whole on every device though the others are split      GPU, CPU
    whole-batch             activations hold every row of the batch though the batch is split    GPU, CPU
    rows-moved              rows of the batch travel between devices before they are used        GPU, CPU
    sliced-all-reduce       an all-reduce of which every device keeps its slice: a reduce-scatter would do   GPU
    loop-invariant          a collective in a loop sends the same in every iteration             GPU, CPU
    float32-on-the-wire     weights or activations travel in float32 though compute is 16 bits   GPU
    slow-axis               an axis that every layer waits for crosses nodes                     a cluster
    idle-axis               nothing is split over a mesh axis: its devices repeat each other     GPU, CPU

XLA:CPU lowers a reduce-scatter to a sliced all-reduce and widens bfloat16 to float32 on the wire: those two rules are
left out there. Gradients in float32 are what `Precision.reduce` asks for, and so are new parameters gathered after an
update. Arrays under `SMALL_BYTES` are passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from meshpar.hardware.clusters import Cluster
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.census import KINDS, UNKNOWN, Collective, per_array
from meshpar.inspect.compiler_messages import Rematerialization
from meshpar.inspect.expected import facts_of, scopes_above
from meshpar.inspect.hlo.cursor import HloSyntaxError, Scanner
from meshpar.inspect.hlo.parser import ArrayShape, Computation, Instruction, Module
from meshpar.inspect.hlo.shapes import dtype_bits, scan_shape
from meshpar.inspect.hlo.walk import executed
from meshpar.inspect.program import Program
from meshpar.inspect.timeline import program_work as work
from meshpar.parallel.expected.step_spec import split_axes
from meshpar.parallel.strategy import BIG_LEAF_BYTES
from meshpar.sharding.printing import Plain
from meshpar.sharding.rules import USER
from meshpar.sharding.types import Decision, axis_sizes, num_shards, owner_of, spec_axes
from meshpar.sharding.units import human_bytes
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup

_Place = tuple[Computation, Instruction]

SMALL_BYTES = 2**16
"""Arrays below this size are not worth a finding: norm scales, statistics of the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding(Plain):
    """One costly mistake."""

    rule: str
    """As in the table at the head of this module; `explain`'s own are `other-dtype`, from what the promise held, and
    `wide-compute`, from the traced step."""
    module: str
    """Module path: named scopes, or a parameter's path."""
    source: str
    """`file:line`, or empty when the program does not say."""
    what: str
    """What was found, with its sizes."""
    fix: str
    """The suggested fix."""
    nbytes: int
    """What it costs a device: bytes it sends in a step, or holds too much."""
    count: int = 1
    """Layers in which it was found alike; their number is a star in `module`."""


def lint(
    program: Program, collectives: Sequence[Collective], setup: Setup, options: StepOptions, cluster: Cluster | None
) -> tuple[Finding, ...]:
    """What is costly in a compiled training step and need not be, the costliest first."""
    look = _Look(program, tuple(collectives), setup, options, cluster)
    found = _of_layers(finding for rule in _RULES for finding in rule(look))
    return tuple(sorted(found, key=lambda one: (-one.nbytes, one.rule, one.module, one.source, one.what)))


def _of_layers(found: Iterable[Finding]) -> list[Finding]:
    """Findings that differ in the number of a layer only, as one."""
    alike: dict[Any, list[Finding]] = {}
    for one in found:
        key = (one.rule, scopes.layerless(one.module), one.source, scopes.layerless(one.what), one.fix)
        alike.setdefault(key, []).append(one)
    return [
        dataclasses.replace(
            some[0],
            module=scopes.of_layers([one.module for one in some]),
            nbytes=sum(one.nbytes for one in some),
            count=len(some),
        )
        for some in alike.values()
    ]


@dataclasses.dataclass(frozen=True)
class _Look:
    """What the rules look at."""

    program: Program
    collectives: tuple[Collective, ...]
    setup: Setup
    options: StepOptions
    cluster: Cluster | None

    @property
    def module(self) -> Module:
        return self.program.module

    @property
    def is_gpu(self) -> bool:
        return self.program.target != "cpu"

    @property
    def sizes(self) -> dict[str, int]:
        return axis_sizes(self.setup.mesh)

    @property
    def batch_axes(self) -> frozenset[str]:
        return frozenset(self.setup.batch_axes)

    @property
    def batch_shards(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    @functools.cached_property
    def batch(self) -> tuple[tuple[int, ...], ...]:
        """One device's shapes of the batch's leaves, as the program takes them."""
        arguments = (
            ins for ins in self.module.entry if _is_argument(ins, "batch") and isinstance(ins.shape, ArrayShape)
        )
        return tuple(ins.shape.dims for ins in arguments)  # type: ignore[union-attr]

    def row_rule(self, module: str) -> str:
        """What keeps rows of activations split there."""
        above = scopes_above(self.setup)
        return 'constrain(x, "batch", ...)' if above is None else scopes.rule_for(module, above)

    @property
    def rows(self) -> frozenset[tuple[int, ...]]:
        """How the dims of one device's activations begin: rows and positions, of the batch or of a micro-step."""
        times = {1, self.options.accumulate}
        return frozenset((shape[0] // time, *shape[1:2]) for shape in self.batch for time in times if shape)


# ---- What the compiler said ------------------------------------------------------------------------------------------


def _rematerialization(look: _Look) -> Iterator[Finding]:
    by_module: dict[str, list[Rematerialization]] = {}
    for one in look.program.rematerializations:
        by_module.setdefault(one.module, []).append(one)
    for module, some in by_module.items():
        worst = max(some, key=_whole_bytes)
        place = _instruction_of(look.module, worst)
        tensor = worst.shape.partition("{")[0] or "a tensor"
        more = f" ({len(some) - 1} more here)" if len(some) > 1 else ""
        yield Finding(
            rule="rematerialization",
            module=module,
            source=scopes.source(look.module, place) if place is not None else "",
            what=f"{tensor} goes from sharding {worst.before} to {worst.after}{more}: the compiler "
            "knows no way but to gather it whole on every device and to slice it again",
            fix="constrain it in between to a layout that shares a split dim with both, or let both agree",
            nbytes=sum(map(_whole_bytes, some)),
        )


def _whole_bytes(one: Rematerialization) -> int:
    """Bytes of the gathered tensor: the message gives one device's part and in how many parts it is cut."""
    tiles = re.search(r"devices=\[([0-9,]+)\]", one.before)
    cuts = [int(cut) for cut in tiles.group(1).split(",")] if tiles else []
    if "last_tile_dim" in one.before:
        cuts = cuts[:-1]
    try:
        return scan_shape(Scanner(one.shape.partition("{")[0])).nbytes * math.prod(cuts)
    except HloSyntaxError:
        return 0


def _instruction_of(module: Module, one: Rematerialization) -> Instruction | None:
    """The instruction that a warning speaks of: with its op name, else the first in its module path."""
    everything = [ins for visit in executed(module) for ins in visit.computation]
    exact = (ins for ins in everything if one.op_name and ins.metadata.op_name == one.op_name)
    near = (ins for ins in everything if one.module and scopes.module_path(ins.metadata.op_name) == one.module)
    return next(exact, None) or next(near, None)


# ---- What is whole ---------------------------------------------------------------------------------------------------


def _replicated(look: _Look) -> Iterator[Finding]:
    """Leaves that a user's rule leaves whole. A preset that says so for everything (`ddp`) means it."""
    table, found = look.setup.table, dict[str, list[Decision]]()
    paths = {one.path for one in table.params}
    for decisions in (table.params, table.optimizer):
        if any(decision.shards > 1 for decision in decisions):
            for decision in filter(functools.partial(_is_int_by_a_user, look.setup), decisions):
                found.setdefault(owner_of(decision.path, paths), []).append(decision)
    most = max((decision.shards for decision in (*table.params, *table.optimizer)), default=1)
    for path, whole in found.items():
        leaf, held = whole[0].leaf, sum(decision.leaf.nbytes for decision in whole)
        dims = "×".join(map(str, leaf.shape))
        slots = f", with {len(whole) - 1} of its optimizer's" if len(whole) > 1 else ""
        yield Finding(
            rule="replicated",
            module=path,
            source="",
            what=f"`{leaf.path}` ({dims} {leaf.dtype.name}{slots}, {human_bytes(held)}) is whole on every "
            f"device by the rule {whole[0].rule}, while others are split into up to {most}",
            fix="leave it to the strategy, or map one of its dims to a mesh axis",
            nbytes=held - held // most,
        )


def _is_int_by_a_user(setup: Setup, decision: Decision) -> bool:
    by_user = not decision.replicated_on_purpose or any(origin == USER for origin, _ in decision.sources)
    least = min(setup.strategy.big_leaf_bytes, BIG_LEAF_BYTES)
    return decision.shards == 1 and by_user and decision.leaf.layer_nbytes >= least


def _whole_batch(look: _Look) -> Iterator[Finding]:
    params = _parameter_dims(look.setup)
    told = {one.module for one in look.program.rematerializations}  # those gathers have been reported
    for some in _by_place(one for one in _arrays(look) if _gathers_rows(look, one, params)):
        if some[0].module in told:
            continue
        yield _sent(
            some,
            rule="whole-batch",
            what=f"activations with every row of the batch on every device, though it is split in {look.batch_shards}: "
            "each device goes on with the work of all",
            fix=f"keep the rows split with {look.row_rule(some[0].module)}, and sort, take, reshape within a row only",
        )


def _gathers_rows(look: _Look, one: Collective, params: frozenset[tuple[int, ...]]) -> bool:
    """Whether it puts together the rows of an activation: an array that begins like the batch and is no parameter."""
    dims = one.arrays[0].dims
    if one.kind != "all-gather" or not set(one.axes) & look.batch_axes or tuple(sorted(dims)) in params:
        return False
    along = look.module.computations[one.computation][one.name].attributes.get("dimensions")
    return along == "{0}" and any(len(dims) > len(shape) and dims[: len(shape)] == shape for shape in look.rows)


def _parameter_dims(setup: Setup) -> frozenset[tuple[int, ...]]:
    """Dims, sorted, that an array may have because a parameter, its shard or one layer of either has them."""
    found: set[tuple[int, ...]] = set()
    for decision in (*setup.table.params, *setup.table.grads, *setup.table.optimizer):
        shape = decision.leaf.shape
        found |= {tuple(sorted(dims)) for dims in _parts(shape, decision.spec, axis_sizes(setup.mesh))}
    return frozenset(found)


def _parts(shape: tuple[int, ...], spec: Iterable[Any], sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """The whole shape, every way of splitting some of its dims as the spec does, and the layers of each."""
    cuts = [num_shards((entry,), sizes) for entry in spec]
    cuts += [1] * (len(shape) - len(cuts))
    choices: list[tuple[int, ...]] = [()]
    for size, cut in zip(shape, cuts, strict=True):
        choices = [(*dims, one) for dims in choices for one in {size, size // cut}]
    for dims in choices:
        yield dims
        yield dims[1:]


# ---- What is sent ----------------------------------------------------------------------------------------------------


def _sliced_all_reduce(look: _Look) -> Iterator[Finding]:
    if not look.is_gpu:
        return
    for some in _by_place(one for one in _arrays(look) if all(one.sliced)):
        yield _sent(
            some,
            rule="sliced-all-reduce",
            what="every device keeps only its slice, at twice the bytes of a reduce-scatter",
            fix="use lax.psum_scatter, or slice by the device's own index: the compiler then makes a reduce-scatter",
        )


def _loop_invariant(look: _Look) -> Iterator[Finding]:
    for some in _by_place(one for one in _arrays(look) if _repeats_itself(look, one)):
        yield _sent(
            some,
            rule="loop-invariant",
            what="the same in every iteration of a loop, and sent in each",
            fix="move it in front of the loop, if there is memory to hold its result throughout",
        )


def _repeats_itself(look: _Look, one: Collective) -> bool:
    trips = [loop.trip_count for loop in one.loops]
    # In the loop over micro-steps `reduce_gradients="each_microbatch"` asks for weights anew.
    is_micro_step = look.options.accumulate > 1 and trips == [look.options.accumulate]
    return bool(trips) and trips[-1] != 1 and not is_micro_step and _is_invariant(look.module, one)


def _is_invariant(module: Module, one: Collective) -> bool:
    """Whether what it sends is made of nothing that changes in the innermost loop around it."""
    body = module.computations[one.loops[-1].body]
    kept = _kept(body)
    name = one.name
    if one.computation != body.name:  # inside an async wrapper
        callers = [ins for ins in body if one.computation in ins.called_as("calls", "to_apply")]
        if len(callers) != 1:
            return False
        name = callers[0].name
    known: dict[str, bool] = {}
    stack = [name]
    while stack:
        ins = body[stack[-1]]
        if ins.name in known:
            stack.pop()
        elif ins.opcode == "get-tuple-element" and body[ins.operands[0]].opcode == "parameter":
            known[ins.name] = ins.tuple_index in kept
        elif ins.opcode in ("parameter", "infeed", "recv", "rng", "rng-get-and-update-state"):
            known[ins.name] = False
        elif missing := [operand for operand in ins.operands if operand not in known]:
            known[ins.name] = False  # until shown otherwise: a damaged program may run in a circle
            del known[ins.name]
            stack.extend(missing)
        else:
            known[ins.name] = all(known[operand] for operand in ins.operands)
    return known[name]


def _kept(body: Computation) -> frozenset[int]:
    """Elements of a loop's tuple that its body hands on as they are."""
    if body.root.opcode != "tuple":
        return frozenset()
    kept = set()
    for at, name in enumerate(body.root.operands):
        ins = body[name]
        while ins.opcode in ("copy", "bitcast") and ins.operands:
            ins = body[ins.operands[0]]
        if ins.tuple_index == at and body[ins.operands[0]].opcode == "parameter":
            kept.add(at)
    return frozenset(kept)


def _float32_on_the_wire(look: _Look) -> Iterator[Finding]:
    if not look.is_gpu or not _computes_in_16_bits(look):
        return
    params, callers = _parameter_dims(look.setup), _callers(look.module)
    for some in _by_place(one for one in _arrays(look) if _is_needlessly_wide(look, one, params, callers)):
        yield _sent(
            some,
            rule="float32-on-the-wire",
            what="float32 although compute is in 16 bits, so twice the bytes",
            fix=(
                "something in the model casts back what Precision.compute has cast: a module with dtype=float32, or "
                "float32 inputs; "
                if look.options.precision.compute is not None
                else 'cast before the layout changes: Precision(compute="bfloat16") casts weights before they are '
                "gathered, and "
            )
            + ".astype(...) of an activation belongs in front of constrain",
        )


def _is_needlessly_wide(
    look: _Look, one: Collective, params: frozenset[tuple[int, ...]], callers: Mapping[str, list[_Place]]
) -> bool:
    dims = one.arrays[0].dims
    per_token = max((math.prod(shape) for shape in look.batch), default=0)
    if one.dtype != "f32" or len(dims) < 2 or math.prod(dims) <= per_token or one.module.split("/")[0] == "update":
        return False  # new parameters are gathered as they are kept, statistics of the loss are wide on purpose
    is_like_a_parameter = tuple(sorted(dims)) in params
    if one.kind not in ("all-reduce", "reduce-scatter"):
        return not is_like_a_parameter or _is_made_of("state.params", look.module, callers, one)
    # Sums over the axes that split the batch are of gradients; over others they are, of what has a parameter's dims.
    return not set(one.axes) <= look.batch_axes and not (one.is_backward and is_like_a_parameter)


def _computes_in_16_bits(look: _Look) -> bool:
    """What the step was asked; failing that, what most matrix products read."""
    if look.options.precision.compute is not None:
        return np.dtype(look.options.precision.compute).itemsize == 2
    narrow = total = 0
    for product in work.matmuls(look.module):
        computation = look.module.computations[product.computation]
        operand = computation[computation[product.name].operands[0]].shape
        total += product.flops_per_step
        narrow += product.flops_per_step * (isinstance(operand, ArrayShape) and dtype_bits(operand.dtype) == 16)
    return 2 * narrow > total


def _rows_moved(look: _Look) -> Iterator[Finding]:
    callers = _callers(look.module)
    over_rows = [one for one in look.collectives if set(one.axes) & look.batch_axes and one.origin == "partitioner"]
    for some in _by_place(one for one in over_rows if _is_made_of("batch", look.module, callers, one)):
        yield _sent(
            some,
            rule="rows-moved",
            what="rows of the batch move between devices before anything is computed from them",
            fix="let every device keep its own rows: train_step(accumulate=...) splits a batch so, and a plain reshape "
            "to [steps, rows] does not",
        )


_MOVES: Mapping[str, slice] = {
    **dict.fromkeys(("bitcast", "convert", "copy", "reshape", "transpose", "slice", "broadcast", "reverse"), slice(1)),
    **dict.fromkeys(("dynamic-slice", "gather", "pad"), slice(1)),
    **dict.fromkeys(("concatenate", "optimization-barrier"), slice(None)),
    "dynamic-update-slice": slice(2),
    "select": slice(1, 3),
}
"""Operations that only move data, and which of their operands are data."""
_NEUTRAL = frozenset({"constant", "iota", "partition-id", "replica-id"})


def _is_argument(ins: Instruction, name: str) -> bool:
    """Whether it is an argument of the step, or a leaf of one: jax writes `batch['inputs']`."""
    return ins.opcode == "parameter" and re.match(rf"{re.escape(name)}(?![\w])", ins.metadata.op_name) is not None


def _callers(module: Module) -> dict[str, list[_Place]]:
    """Who calls each computation."""
    found: dict[str, list[_Place]] = {}
    for computation in module:
        for ins in computation:
            for _, name in ins.called:
                found.setdefault(name, []).append((computation, ins))
    return found


def _is_made_of(argument: str, module: Module, callers: Mapping[str, list[_Place]], one: Collective) -> bool:
    """Whether it sends parts of an argument of the step that were only moved about, and nothing else."""
    computation = module.computations[one.computation]
    seen: set[tuple[str, str]] = set()
    stack: list[_Place | None] = [(computation, computation[name]) for name in computation[one.name].operands]
    found = False
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
            found = True
        else:
            stack.extend(_moved_from(module, callers, computation, ins))
    return found


def _moved_from(
    module: Module, callers: Mapping[str, list[_Place]], computation: Computation, ins: Instruction
) -> list[_Place | None]:
    """Where the data of a value comes from; None among them when it is computed."""
    kind = ins.opcode.removesuffix("-start").removesuffix("-done")
    if kind in _MOVES:
        return [(computation, computation[name]) for name in ins.operands[_MOVES[kind]]]
    if kind in KINDS:
        return [(computation, computation[name]) for name in ins.operands]
    if kind in ("fusion", "call", "async"):
        inner = [module.computations[name] for name in ins.called_as("calls", "to_apply")]
        if ins.opcode.endswith("-done"):
            return [(computation, computation[name]) for name in ins.operands]
        return [(one, one.root) for one in inner] or [None]
    if kind == "get-tuple-element":
        return [_element(module, callers, computation, computation[ins.operands[0]], ins.tuple_index or 0)]
    if kind == "parameter":
        return [_argument(computation, ins, caller) for caller in callers.get(computation.name, [])] or [None]
    return [None]


def _element(
    module: Module, callers: Mapping[str, list[_Place]], computation: Computation, of: Instruction, at: int
) -> _Place | None:
    """Element `at` of a tuple; of what a loop carries, when the loop hands it on as it is."""
    if of.opcode == "tuple":
        return (computation, computation[of.operands[at]]) if at < len(of.operands) else None
    if of.opcode.removesuffix("-done") in KINDS:  # a combined one
        start = computation[of.operands[0]] if of.opcode.endswith("-done") else of
        return (computation, computation[start.operands[at]]) if at < len(start.operands) else None
    if of.opcode == "fusion":
        inner = module.computations[of.called[0][1]]
        return _element(module, callers, inner, inner.root, at) if inner.root.opcode == "tuple" else None
    if of.opcode == "while":
        body = module.computations[of.called_as("body")[0]]
        return _element(module, callers, computation, computation[of.operands[0]], at) if at in _kept(body) else None
    if of.opcode == "parameter":
        loops = [(where, ins) for where, ins in callers.get(computation.name, []) if ins.opcode == "while"]
        if len(loops) == 1 and at in _kept(computation):
            where, loop = loops[0]
            return _element(module, callers, where, where[loop.operands[0]], at)
    return None


def _argument(computation: Computation, ins: Instruction, caller: _Place) -> _Place | None:
    """What a caller passes for a parameter."""
    where, call = caller
    number = next((at for at, one in computation.parameters.items() if one is ins), len(call.operands))
    is_call = call.opcode.removesuffix("-start") in ("fusion", "call", "async")
    return (where, where[call.operands[number]]) if is_call and number < len(call.operands) else None


# ---- Axes ------------------------------------------------------------------------------------------------------------


def _slow_axis(look: _Look) -> Iterator[Finding]:
    if look.cluster is None:
        return
    for axis in sorted(_inner_axes(look)):
        over = [one for one in look.collectives if axis in one.axes]
        if not over or not look.cluster.crosses_node([axis], look.sizes):
            continue
        nbytes = int(sum(one.bytes_sent_per_step for one in over))
        worst = max(over, key=lambda one: one.bytes_sent_per_step)
        slow = look.cluster.measured([axis]) or look.cluster.across
        yield Finding(
            rule="slow-axis",
            module=worst.module,
            source=worst.source,
            what=f"mesh axis `{axis}` ({look.sizes[axis]}) crosses nodes of {look.cluster.gpus_per_node} GPUs: layers "
            f"wait for {human_bytes(nbytes)} a step at {human_bytes(slow.bytes_per_s)}/s instead of "
            f"{human_bytes(look.cluster.inside.bytes_per_s)}/s",
            fix=f"make `{axis}` a divisor of {look.cluster.gpus_per_node} and give the rest to fsdp or data",
            nbytes=nbytes,
        )


def _inner_axes(look: _Look) -> frozenset[str]:
    """Axes that split what is inside a layer, so that the layer waits for them: weights or activations, no rows."""
    step_spec, pipelined = facts_of(look.setup, look.options, ()), look.setup.strategy.pipeline
    weights = {axis for one in step_spec.weights for axis in split_axes(step_spec, one.decision.spec)} - look.batch_axes
    found = {*step_spec.tensor_axes, *step_spec.context_axes, *weights}
    return frozenset(found - (set() if pipelined is None else {pipelined.axis}))


def _idle_axis(look: _Look) -> Iterator[Finding]:
    table = look.setup.table
    decisions = (*table.params, *table.grads, *table.optimizer)
    used = {axis for decision in decisions for entry in decision.spec for axis in spec_axes(entry)}
    used |= look.batch_axes | {axis for one in look.collectives for axis in one.axes}
    for axis, size in look.sizes.items():
        if size == 1 or axis in used or UNKNOWN in used:
            continue
        yield Finding(
            rule="idle-axis",
            module="",
            source="",
            what=f"nothing is split over mesh axis `{axis}` ({size}): its devices all do the same work",
            fix=f"give its devices to the batch (data, fsdp), or join a strategy that splits over `{axis}`",
            nbytes=table.totals.state_bytes,
        )


# ---- Telling ---------------------------------------------------------------------------------------------------------


def _arrays(look: _Look) -> Iterator[Collective]:
    """The arrays of every collective that are not small, as they stood before XLA combined them."""
    return (part for one in look.collectives for part in per_array(one) if part.payload_bytes >= SMALL_BYTES)


def _sent(some: Sequence[Collective], *, rule: str, what: str, fix: str) -> Finding:
    """One finding about collectives of one place."""
    worst = max(some, key=lambda one: one.bytes_sent_per_step)
    arrays = ", ".join(map(str, worst.arrays[:2])) + (", …" if len(worst.arrays) > 2 else "")
    more = f" (and {len(some) - 1} more)" if len(some) > 1 else ""
    times = f", {worst.count_per_step} times a step" if worst.count_per_step > 1 else ""
    return Finding(
        rule=rule,
        module=worst.module,
        source=worst.source,
        what=f"{worst.kind} of {arrays} over {worst.axes_label}{times}{more}: {what}",
        fix=fix,
        nbytes=int(sum(one.bytes_sent_per_step for one in some)),
    )


def _by_place(found: Iterable[Collective]) -> Iterable[list[Collective]]:
    """Collectives of one kind and module together: one mistake is one finding."""
    places: dict[tuple[str, str], list[Collective]] = {}
    for one in found:
        places.setdefault((one.module, one.kind), []).append(one)
    return places.values()


_RULES: tuple[Callable[[_Look], Iterator[Finding]], ...] = (
    _rematerialization,
    _replicated,
    _whole_batch,
    _rows_moved,
    _sliced_all_reduce,
    _loop_invariant,
    _float32_on_the_wire,
    _slow_axis,
    _idle_axis,
)
