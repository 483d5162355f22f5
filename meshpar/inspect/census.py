"""Census of a program's collectives: kind, mesh axes, bytes, count and origin.

Bytes sent per device, with payload n and group size N (ring algorithms):

    kind                  payload n                        bytes sent per device
    all-reduce            the array                        2(N-1)/N n
    all-gather            the gathered array               (N-1)/N n
    reduce-scatter        the array before scattering      (N-1)/N n
    all-to-all            the local array                  (N-1)/N n
    ragged-all-to-all     the smaller buffer               (N-1)/N n; a bound for the mean device
    collective-broadcast  the array                        n, from its root
    collective-permute    the array                        n
    send                  the array                        n
    recv                  the array                        0
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from meshpar.hardware.cost_model import KINDS, bytes_sent
from meshpar.inspect import source_scopes as scopes
from meshpar.inspect.hlo.groups import Groups, parse_lists
from meshpar.inspect.hlo.parser import ArrayShape, Computation, Instruction, Module
from meshpar.inspect.hlo.walk import MAX_HOPS, VIEWS, Loop, Visit, executed, skip_views
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.pipeline.stage_placement import RETURNED
from meshpar.sharding.errors import problem
from meshpar.sharding.types import MeshLike, axis_sizes

UNKNOWN = "unknown"
"""Axis name for replica groups that are not a product of mesh axes."""

_PAIRWISE = frozenset({"collective-permute", "send", "recv"})
_PRIMITIVE = re.compile(
    r"(?:unreduced_|ragged_)?"
    r"(?:psum|pmax|pmin|pmean|all_gather|reduce_scatter|all_to_all|ppermute|pbroadcast|psend|precv)"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """An array of a collective before XLA combined it with others."""

    array: ArrayShape
    """The local operand."""
    op_name: str
    source: str
    """Line of the user's code as `file:line`, or empty."""
    is_sliced: bool
    """True if every device keeps only a slice of the all-reduced array."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A collective instruction of the program."""

    kind: str
    """One of `KINDS`."""
    axes: tuple[str, ...]
    """Mesh axes over which its groups communicate, in mesh order; `("unknown",)` if the groups match no mesh axes."""
    group_size: int
    """Number of devices in a group; for a permute, the number of devices that take part."""
    arrays: tuple[ArrayShape, ...]
    """Local operands; several if XLA combined collectives."""
    dtype: str
    """Element type on the wire; several are joined with `+`."""
    payload_bytes: int
    """Size of the payload, summed over all arrays. The module docstring defines the payload of each kind."""
    bytes_sent_per_device: float
    """Bytes that a device sends each time the collective runs."""
    count_per_step: int
    """Executions per step: the product of the trip counts of `loops`. A loop of unknown length counts once."""
    count_by_stage: tuple[int, ...]
    """Count on each pipeline stage, if the schedule's table determines it; `count_per_step` is then the largest.
    Empty if all devices have the same count."""
    count_known: bool
    """False if a loop in `loops` has no known length."""
    loops: tuple[Loop, ...]
    """Enclosing loops, outermost first."""
    in_branch: bool
    """True if it runs only in a branch of a conditional, and the pipeline schedule does not determine the branch."""
    op_name: str
    module: str
    """Named scopes of the operation, such as `decoder/mlp`."""
    source: str
    """Line of the user's code as `file:line`, or empty."""
    is_backward: bool
    origin: str
    """`partitioner`, or `kernel` for a collective of a `shard_map`."""
    is_async: bool
    """True if it has separate start and done instructions, so that other work can run in between."""
    is_promoted: bool
    """True if the backend promoted the reduction's type (XLA:CPU sums bfloat16 as float32)."""
    parts: tuple[Member, ...]
    """The original arrays, before XLA combined them into one collective or concatenated them into one array."""
    name: str
    computation: str
    groups: Groups = dataclasses.field(repr=False)
    """Groups of devices as positions in the mesh; for a permute, (source, target) pairs."""

    @property
    def in_loop(self) -> bool:
        return bool(self.loops)

    @property
    def sliced(self) -> tuple[bool, ...]:
        """For each array in `parts`, whether every device keeps only a slice of the result."""
        return tuple(part.is_sliced for part in self.parts)

    @property
    def axes_label(self) -> str:
        return "*".join(self.axes)

    @property
    def reduce_scatter_as_all_reduce(self) -> bool:
        """True for an all-reduce whose result is sliced on every device: XLA:CPU lowers reduce-scatter like this."""
        return bool(self.parts) and all(part.is_sliced for part in self.parts)

    @property
    def logical_kind(self) -> str:
        """The kind, where an all-reduce that XLA:CPU slices on every device counts as a reduce-scatter."""
        return "reduce-scatter" if self.reduce_scatter_as_all_reduce else self.kind

    @property
    def bytes_sent_per_step(self) -> float:
        """Bytes that a device sends for all runs of this collective in a step."""
        return self.bytes_sent_per_device * self.count_per_step


@dataclasses.dataclass(frozen=True, slots=True)
class Total:
    """Total over all collectives of the same kind and axes; for a pipeline, on the stage with the largest total."""

    count_per_step: int
    bytes_sent_per_device: float
    """Bytes that a device sends per step."""


def census(module: Module, mesh: MeshLike, schedule_counts: ScheduleCounts | None = None) -> tuple[Collective, ...]:
    """Return the collectives of a program in program order, callers before callees.

    A device's number in the program is its position in the mesh. Groups of a single device send nothing and are left
    out, as are transfers to and from the host. For a pipelined program, `schedule_counts` states how often each stage
    runs a branch.
    """
    axes = axis_sizes(mesh)
    devices = module.num_partitions * module.replica_count
    if devices > 1 and devices != math.prod(axes.values()):
        requested = f"read it with the mesh {dict(axes)} of {math.prod(axes.values())} devices"
        fix = "pass the mesh it was compiled for"
        raise problem(
            f"program `{module.name}`", requested, f"it was compiled for {devices} devices", fix, code="conflict"
        )
    return tuple(
        collective
        for visit in executed(module)
        for instruction in visit.computation
        if (collective := _collective(module, visit, instruction, axes, schedule_counts)) is not None
    )


def totals(collectives: Iterable[Collective]) -> dict[str, dict[str, Total]]:
    """Return the totals per step as axes -> kind -> `Total`. Combined axes have a key such as `data*fsdp`."""
    sums_by_axes: dict[str, dict[str, np.ndarray]] = {}
    for c in collectives:
        kinds = sums_by_axes.setdefault(c.axes_label, {})
        counts = np.array(c.count_by_stage or (c.count_per_step,), float)
        kinds[c.kind] = kinds.get(c.kind, 0) + np.stack([counts, counts * c.bytes_sent_per_device])
    return {
        axes: {kind: Total(int(sums[0].max()), float(sums[1].max())) for kind, sums in kinds.items()}
        for axes, kinds in sums_by_axes.items()
    }


def on_stage(collectives: Iterable[Collective], stage: int) -> tuple[Collective, ...]:
    """Return the collectives that a pipeline stage runs, with their counts on this stage."""
    counted = (
        dataclasses.replace(c, count_per_step=c.count_by_stage[stage]) if c.count_by_stage else c for c in collectives
    )
    return tuple(c for c in counted if c.count_per_step)


def per_array(collective: Collective) -> tuple[Collective, ...]:
    """Split a combined collective into one record for each array."""
    if len(collective.parts) == 1:
        return (collective,)
    by_kernel = collective.origin == "kernel"
    return tuple(
        dataclasses.replace(
            collective,
            parts=(part,),
            arrays=(part.array,),
            **_sizes(collective.kind, (part.array,), collective.group_size),  # type: ignore[arg-type]
            op_name=part.op_name,
            module=scopes.module_path(part.op_name),
            source=part.source,
            is_backward=scopes.is_backward(part.op_name),
            # XLA may combine collectives of kernels with the partitioner's and keep a single name.
            origin=_origin(part.op_name, collective.op_name) if by_kernel else collective.origin,
        )
        for part in collective.parts
    )


def axes_of(groups: Groups, axes: Mapping[str, int], *, pairwise: bool = False) -> tuple[str, ...]:
    """Return the mesh axes of replica groups: `()` for groups of size 1, `("unknown",)` if they match no mesh axes.

    The order inside a group does not matter. With `pairwise`, the groups are (source, target) pairs, and the result
    contains all axes along which a pair differs.
    """
    return _axes_of(groups, tuple(axes.items()), pairwise)


@functools.lru_cache(maxsize=4096)
def _axes_of(groups: Groups, axes: tuple[tuple[str, int], ...], pairwise: bool) -> tuple[str, ...]:
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    width = {len(group) for group in groups}
    members = np.array(groups, dtype=np.int64) if len(width) == 1 else None
    if members is None or members.size == 0 or members.min() < 0 or members.max() >= math.prod(sizes):
        return (UNKNOWN,)
    coords = np.stack(np.unravel_index(members, sizes))  # [axis, group, member]
    varies = (coords != coords[:, :, :1]).any(axis=2)  # [axis, group]
    varying = tuple(name for name, varies_in_any in zip(names, varies.any(axis=1), strict=True) if varies_in_any)
    if pairwise or not varying:
        return varying
    # Each group must contain all combinations of its varying axes, and the groups together each device once.
    spanned = math.prod(size for name, size in axes if name in varying)
    same_axes = (varies == varies[:, :1]).all()
    is_partition = spanned == members.shape[1] and len(np.unique(members)) == members.size == math.prod(sizes)
    return varying if same_axes and is_partition else (UNKNOWN,)


def _collective(
    module: Module, visit: Visit, ins: Instruction, axes: Mapping[str, int], schedule_counts: ScheduleCounts | None
) -> Collective | None:
    kind = ins.opcode.removesuffix("-start")
    if kind not in KINDS or ins.attributes.get("is_host_transfer") == "true":
        return None
    groups = _participants(module, kind, ins, math.prod(axes.values()))
    if kind == "collective-permute" and not groups:
        return None
    group_axes = axes_of(groups, axes, pairwise=kind in _PAIRWISE)
    if not group_axes:
        return None
    group_size = len({device for pair in groups for device in pair}) if kind in _PAIRWISE else len(groups[0])
    arrays = _arrays(kind, visit.computation, ins)
    named = [i for i in (ins, visit.wrapper) if i is not None]
    if kind == "ragged-all-to-all" and ins.operands[1] in visit.computation.by_name:
        # XLA drops its op name. The buffer that it fills is created in the same named scope.
        named.append(visit.computation[ins.operands[1]])
    origin = _first_named(visit.computation, named) or ins
    parts = _parts(module, visit, ins, arrays, origin, group_size)
    op_name, source = origin.metadata.op_name, scopes.source(module, origin)
    if len(parts) == 1:
        op_name, source = parts[0].op_name, parts[0].source
    counts = None if schedule_counts is None else schedule_counts.counts(visit)
    made_by = "kernel" if kind == "ragged-all-to-all" else _origin(ins.metadata.op_name, ins.name)
    if ins.frontend_attributes.get("is_spmd_generated") == "true":
        made_by = "partitioner"
    return Collective(
        kind=kind,
        axes=group_axes,
        group_size=group_size,
        arrays=arrays,
        **_sizes(kind, arrays, group_size),  # type: ignore[arg-type]
        count_per_step=visit.times if counts is None else max(counts),
        count_by_stage=counts or (),
        count_known=visit.times_known,
        loops=visit.loops,
        in_branch=any(
            branch.share is None and (schedule_counts is None or schedule_counts.mask(branch) is None)
            for branch in visit.branches
        ),
        op_name=op_name,
        module=scopes.module_path(op_name),
        source=source,
        is_backward=scopes.is_backward(op_name),
        origin=made_by,
        is_async=_is_async(ins, visit),
        is_promoted=any(name.endswith("_promoted") for name in ins.called_as("to_apply")),
        parts=parts,
        name=ins.name,
        computation=visit.computation.name,
        groups=groups,
    )


def _sizes(kind: str, arrays: Sequence[ArrayShape], group_size: int) -> dict[str, object]:
    payload = sum(array.nbytes for array in arrays) * (group_size if kind == "all-gather" else 1)
    return {
        "dtype": "+".join(dict.fromkeys(array.dtype for array in arrays)),
        "payload_bytes": payload,
        "bytes_sent_per_device": bytes_sent(kind, payload, group_size),
    }


def _arrays(kind: str, computation: Computation, ins: Instruction) -> tuple[ArrayShape, ...]:
    """Return the local arrays that a collective sends.

    They are read from the operands, because the result of a start instruction may or may not repeat the operands.
    """
    if kind == "recv":
        return tuple(ins.shape.leaves())[:1]
    operands = [leaf for name in ins.operands for leaf in computation[name].shape.leaves()]
    if kind == "send":  # a token follows the data
        operands = operands[:1]
    if kind == "ragged-all-to-all":
        # Operands: a send buffer, a receive buffer, offsets and sizes. Their fill is known only at run time, but
        # everything sent is received, so the mean device sends at most the smaller buffer.
        operands = [min(operands[:2], key=lambda array: array.nbytes)]
    return tuple(operands)


def _participants(module: Module, kind: str, ins: Instruction, num_devices: int) -> Groups:
    """Return the groups of devices that communicate, as device numbers. XLA numbers devices in four ways."""
    if kind in _PAIRWISE:
        pairs = ins.source_target_pairs
        if pairs is None:
            text = ins.frontend_attributes.get("_xla_send_recv_source_target_pairs")
            pairs = parse_lists(text) if text else ()
        return pairs
    groups = ins.replica_groups or ()
    everyone = (tuple(range(num_devices)),)
    across_partitions = ins.channel_id is not None
    if not across_partitions:  # numbers are replicas, and a partitioned program has one replica
        return (groups or everyone) if module.replica_count > 1 else tuple((device,) for device in range(num_devices))
    numbers_replicas = kind in ("all-reduce", "all-gather", "reduce-scatter") and (
        ins.attributes.get("use_global_device_ids") != "true"
    )
    return everyone if numbers_replicas or not groups else groups


def _first_named(computation: Computation, instructions: Sequence[Instruction]) -> Instruction | None:
    """Return the first of the instructions that has an op name. If none has one, search their operands."""
    for _ in range(MAX_HOPS):
        named = next((ins for ins in instructions if ins.metadata.op_name), None)
        if named is not None or not instructions:
            return named
        inputs = (computation.by_name.get(name) for ins in instructions for name in ins.operands)
        instructions = [ins for ins in inputs if ins is not None][:MAX_HOPS]
    return None


def _parts(
    module: Module, visit: Visit, ins: Instruction, arrays: Sequence[ArrayShape], combined: Instruction, group_size: int
) -> tuple[Member, ...]:
    """Split a combined collective into its arrays. An array without an op name gets the op name of `combined`."""
    computation, kind = visit.computation, ins.opcode.removesuffix("-start")
    sliced = _sliced(module, visit, ins, group_size, len(arrays))
    flat = _concatenated(module, computation, ins) if kind == "all-reduce" and len(arrays) == 1 else ()
    if flat:
        arrays_in = [(array, operand, False) for array, operand in flat]
    elif len(arrays) == 1 or kind == "all-to-all":  # an all-to-all has an array per peer
        arrays_in = [(array, "", bool(sliced) and all(sliced)) for array in arrays[:1]]
    else:
        operands = [(leaf, name) for name in ins.operands for leaf in computation[name].shape.leaves()]
        arrays_in = [(array, name, is_sliced) for (array, name), is_sliced in zip(operands, sliced, strict=False)]
    merged = scopes.members(ins.metadata.op_name)
    parts = []
    for index, (array, operand, is_sliced) in enumerate(arrays_in):
        origin = (_first_named(computation, [computation[operand]]) if operand else None) or combined
        # A merged name lists the original names of the arrays, in order.
        op_name = merged[index] if len(merged) == len(arrays_in) else origin.metadata.op_name
        source = scopes.source(module, origin) or scopes.source(module, combined)
        reader = None if flat else _reader(computation, visit.wrapper or ins, index, len(arrays), op_name)
        if reader is not None:
            op_name, source = reader.metadata.op_name, scopes.source(module, reader) or source
        parts.append(Member(array=array, op_name=op_name, source=source, is_sliced=is_sliced))
    return tuple(parts)


def _reader(
    computation: Computation, start: Instruction, index: int, num_arrays: int, op_name: str
) -> Instruction | None:
    """Return the instruction that reads array `index` of a collective, if it has a deeper module path than `op_name`.

    A collective may lose its own op name when XLA combines it with others, or when XLA moves it to the slice of stacked
    weights in a loop. The op name of the reader then shows the origin.
    """
    above, backward = scopes.module_path(op_name), scopes.is_backward(op_name)
    if start.name not in computation.users:
        return None
    done = [user for user in computation.users[start.name] if user.opcode.endswith("-done")]
    readers = list(computation.users[(done[0] if start.opcode.endswith("-start") and done else start).name])
    if num_arrays > 1:
        readers = [user for user in readers if user.tuple_index == index]
    for _ in range(4):  # through views
        for reader in readers:
            path = scopes.module_path(reader.metadata.op_name)
            is_deeper = path != above and (not above or path.startswith(f"{above}/"))
            if is_deeper and (not op_name or scopes.is_backward(reader.metadata.op_name) == backward):
                return reader
        views = [reader for reader in readers if reader.opcode == "get-tuple-element" or reader.opcode in VIEWS]
        readers = [user for view in views for user in computation.users[view.name]]
    return None


def _concatenated(module: Module, computation: Computation, ins: Instruction) -> list[tuple[ArrayShape, str]]:
    """Return (array, name of its instruction) for arrays that XLA concatenated for an all-reduce; otherwise empty."""
    fusion = skip_views(computation, computation[ins.operands[0]])
    if fusion.opcode == "concatenate":
        return [(shape, name) for name in fusion.operands if isinstance(shape := computation[name].shape, ArrayShape)]
    inner = module.computations.get(fusion.called[0][1]) if fusion.opcode == "fusion" and fusion.called else None
    if inner is None or inner.root.opcode != "concatenate":
        return []
    concatenated = []
    for name in inner.root.operands:
        part = inner[name]
        value = skip_views(inner, part)
        number = int(value.payload) if value.opcode == "parameter" else -1
        if not (0 <= number < len(fusion.operands)) or not isinstance(part.shape, ArrayShape):
            return []
        concatenated.append((part.shape, fusion.operands[number]))
    return concatenated


def _origin(op_name: str, name: str = "") -> str:
    """Return `kernel` if the op name ends with a collective primitive of jax, otherwise `partitioner`."""
    return "kernel" if _PRIMITIVE.match(scopes.primitive(op_name) or scopes.primitive(name) or name) else "partitioner"


def _is_async(ins: Instruction, visit: Visit) -> bool:
    start = visit.wrapper or ins
    if not start.opcode.endswith("-start") and ins.opcode not in ("send", "recv"):
        return False
    config = start.backend_config.get("collective_backend_config")
    return not (isinstance(config, dict) and config.get("is_sync") is True)


def _sliced(module: Module, visit: Visit, ins: Instruction, group_size: int, num_arrays: int) -> tuple[bool, ...]:
    """Return for each array of an all-reduce whether all its uses keep a slice of size 1/`group_size`."""
    computation, value = visit.computation, ins
    nowhere = (False,) * num_arrays
    if not ins.opcode.startswith("all-reduce") or len(ins.operands) != num_arrays:
        return nowhere
    if ins.opcode.endswith("-start"):
        done = [user for user in computation.users[ins.name] if user.opcode.endswith("-done")]
        if len(done) != 1:
            return nowhere
        value = done[0]
    if len(ins.operands) == 1:
        return (_is_sliced(module, computation, value, group_size),)
    parts: dict[int | None, list[Instruction]] = {}
    for user in computation.users[value.name]:
        parts.setdefault(user.tuple_index, []).append(user)
    if None in parts or value is computation.root:
        return nowhere
    return tuple(
        index in parts and all(_is_sliced(module, computation, part, group_size) for part in parts[index])
        for index in range(num_arrays)
    )


def _is_sliced(module: Module, computation: Computation, value: Instruction, group_size: int) -> bool:
    """Return whether all final readers of a value are slices of size 1/`group_size`."""
    uses = list(_uses(module, computation, value, MAX_HOPS))
    return bool(uses) and all(
        use is not None
        and of is not None
        and use.opcode == "dynamic-slice"
        and isinstance(use.shape, ArrayShape)
        and RETURNED not in scopes.components(use.metadata.op_name)  # a chunk that returns to its stage
        and use.shape.size * group_size == of.size
        for use, of in uses
    )


def _uses(
    module: Module, computation: Computation, value: Instruction, hops: int
) -> Iterator[tuple[Instruction | None, ArrayShape | None]]:
    """Follow a value through views and fusions, and yield (reader, shape of the value) for each final reader.

    The reader is None if the value is returned. The shape is None if the value is not the reader's first operand.
    """
    if value is computation.root or hops == 0:
        yield None, None
        return
    for user in computation.users[value.name]:
        if user.opcode in VIEWS:
            yield from _uses(module, computation, user, hops - 1)
        elif user.opcode in ("fusion", "call"):
            inner = module.computations[user.called[0][1]]
            for number, operand in enumerate(user.operands):
                if operand != value.name:
                    continue
                for use, of in _uses(module, inner, inner.parameters[number], hops - 1):
                    if use is None and inner.root.opcode in VIEWS:  # the fusion is a view: follow its result
                        yield from _uses(module, computation, user, hops - 1)
                    else:
                        yield use, of
        else:
            is_sliced_operand = user.operands[:1] == (value.name,)
            yield user, value.shape if is_sliced_operand and isinstance(value.shape, ArrayShape) else None
