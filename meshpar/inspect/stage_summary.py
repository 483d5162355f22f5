"""Summary of a pipelined step: schedule, bubble, and the two gather modes for sharded weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from meshpar.inspect.executor_work import ExecutorWork, executor_work, unused_s
from meshpar.inspect.expected import kept_and_gathered_axes
from meshpar.inspect.hlo.parser import Module
from meshpar.inspect.kernels import ProgramKernel
from meshpar.inspect.timeline.simulator import Timeline
from meshpar.parallel.execution import Execution
from meshpar.parallel.expected.collective import ITEMSIZE
from meshpar.pipeline.traffic import gathers_in_cells, traffic
from meshpar.schedules import Schedule
from meshpar.schedules.ops import W
from meshpar.schedules.uniform import uniform
from meshpar.sharding.printing import Plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathering:
    """Cost of a mode of `pipeline_parallel(gather=...)`, for layers that are sharded over batch axes."""

    gather: str
    sent_bytes: float
    """Bytes that a device of the busiest stage sends per step to gather weights and to move them between stages."""
    held_bytes: int
    """Peak weight bytes per device in the compute dtype. With "step", all weights of the stage are unsharded for the
    full step. With "microbatch", only the weights of the current tick slot are unsharded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages(Plain):
    """A pipelined step according to its schedule."""

    schedule: str
    stages: int
    microbatches: int
    parts: int
    """Number of pipeline chunks of the model, over all stages."""
    ticks: int
    bubble_fraction: float
    """Idle share of all stages' time in a step, if forward, input-gradient and weight-gradient ops take equal time."""
    span_bubble_fraction: float
    """Idle share between the first and the last op of the worst stage, if its ops all take equal time."""
    waiting_fraction: float | None
    """Fraction of the predicted step that stages wait for each other, on average; None without a prediction.

    In a uniform schedule, stages compute unused results instead, and this is the fraction of these computations.
    """
    is_uniform: bool
    """Whether all stages run the same ops in a tick, without conditionals."""
    executor: ExecutorWork | None
    """Work of the executor; None without a prediction."""
    peak_activations: tuple[int, ...]
    """For each stage, peak number of microbatches with saved activations. Each chunk of the stage counts separately."""
    messages: int
    """Number of messages between stages in a step, over all stages."""
    message_bytes: int
    """Bytes of a message, per device."""
    gather: str
    gathering: tuple[Gathering, ...]
    """Both gather modes; empty if layers are not sharded over batch axes."""


def stages(
    execution: Execution, times: Timeline | None, module: Module | None = None, kernels: Sequence[ProgramKernel] = ()
) -> Stages:
    """Return the summary of a pipelined step. `kernels` are those of the program `module`, if their times are known."""
    assert execution.pipeline is not None
    assert execution.stage_uses is not None
    schedule = execution.pipeline.table()
    is_uniform = uniform(schedule) is not None
    waiting_s = unused_s(schedule, kernels) if is_uniform else times.bubble_s if times is not None else 0.0
    return Stages(
        schedule=schedule.name,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        parts=schedule.num_parts,
        ticks=schedule.ticks,
        bubble_fraction=schedule.bubble_fraction,
        span_bubble_fraction=schedule.span_bubble_fraction,
        waiting_fraction=waiting_s / times.step_s if times is not None and times.step_s else None,
        is_uniform=is_uniform,
        executor=executor_work(module, kernels) if module is not None and kernels else None,
        peak_activations=tuple(int(count) for count in schedule.peak_activations),
        messages=traffic(schedule).messages,
        message_bytes=sum(x.dtype.itemsize * math.prod(x.shape) for x in execution.stage_uses.outputs),
        gather=execution.pipeline.gather,
        gathering=_gathering(execution, schedule, execution.stage_uses.reads),
    )


def _gathering(
    execution: Execution, schedule: Schedule, reads: Mapping[str, tuple[bool, bool, bool]]
) -> tuple[Gathering, ...]:
    """Return both gather modes; empty if no layer is sharded over batch axes."""
    rounds = traffic(schedule).rounds
    # An F and a B in the same tick slot use different chunks.
    chunks_in_use = 1 if schedule.chunks == 1 else int((schedule.table[..., :W, 0] >= 0).sum(-1).max())
    sent_bytes, held_bytes = {"step": 0.0, "microbatch": 0.0}, {"step": 0, "microbatch": 0}
    in_slots, is_sharded = np.zeros(schedule.stages), False
    pairs = zip(execution.weights, execution.stage_weights, strict=True)
    for weight in (on_stage for weight, on_stage in pairs if weight.leaf.is_stacked):
        decision = weight.decision
        stage_axes, batch_axes = kept_and_gathered_axes(execution, weight)
        is_sharded |= bool(batch_axes)
        shards, itemsize = execution.num_shards(batch_axes), ITEMSIZE[execution.wire(execution.compute_dtype(decision))]
        stage_bytes = decision.leaf.size // execution.num_shards(stage_axes) * itemsize
        chunk_size = decision.leaf.size * schedule.stages // schedule.num_parts
        chunk_bytes = chunk_size // execution.num_shards(stage_axes) * itemsize
        sent_bytes["step"] += (1 - 1 / shards) * stage_bytes + rounds * chunk_bytes
        held_bytes["step"] += schedule.chunks * chunk_bytes
        sent_bytes["microbatch"] += rounds * chunk_bytes / shards
        if batch_axes:
            in_slots += (1 - 1 / shards) * chunk_bytes * gathers_in_cells(schedule, reads[decision.path])
        held_bytes["microbatch"] += schedule.chunks * chunk_bytes // shards
        held_bytes["microbatch"] += chunks_in_use * chunk_bytes if batch_axes else 0
    sent_bytes["microbatch"] += float(in_slots.max())
    modes = ("step", "microbatch") if is_sharded else ()
    return tuple(Gathering(gather=m, sent_bytes=sent_bytes[m], held_bytes=held_bytes[m]) for m in modes)
