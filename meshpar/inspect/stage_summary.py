"""How the stages of a pipeline share a step: schedule, bubble, and the two ways to hold weights that are split."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from meshpar.inspect.expected import facts_of, of_stage, split_for_good
from meshpar.inspect.stage_partition import StagePartition
from meshpar.inspect.timeline.simulator import Timeline
from meshpar.parallel.expected.step_spec import ITEMSIZE
from meshpar.pipeline.traffic import gathers_in_cells, traffic
from meshpar.schedules.ops import W
from meshpar.sharding.printing import Plain
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathering:
    """One of the choices of `pipeline_parallel(gather=...)`, for layers split over axes that split the batch."""

    gather: str
    sent_bytes: float
    """Of weights, by each device of the busiest stage in a step: gathered, and moved to the stages that run them."""
    held_bytes: int
    """Of weights in the compute dtype, most at once on a device: whole for the step; or shards, and whole what one cell
    uses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages(Plain):
    """A pipelined step, as its schedule has it."""

    schedule: str
    stages: int
    microbatches: int
    parts: int
    """Of the model, over all stages."""
    ticks: int
    bubble_fraction: float
    """Makespan bubble: idle share of a step alone, stages beginning and ending together; F, B and W of equal length."""
    span_bubble_fraction: float
    """Span bubble: idle share between a stage's first op and its last, of the worst stage; likewise."""
    waiting_fraction: float | None
    """Of the predicted step, while the mean stage waits for others; None without a prediction."""
    peak_activations: tuple[int, ...]
    """Of each stage, most microbatches of a part whose activations it holds at once."""
    messages: int
    """Results that go from stage to stage in a step, all stages together."""
    message_bytes: int
    """Of each, from one device."""
    gather: str
    gathering: tuple[Gathering, ...]
    """Both choices; empty where layers are not split over the batch's axes."""


def stages(
    setup: Setup,
    options: StepOptions,
    batch: Any,
    parts: StagePartition,
    times: Timeline | None,
    *,
    on_cpu: bool = False,
) -> Stages:
    """The account of a pipelined step."""
    schedule = parts.schedule
    assert setup.strategy.pipeline is not None
    return Stages(
        schedule=schedule.name,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        parts=schedule.num_parts,
        ticks=schedule.ticks,
        bubble_fraction=schedule.bubble_fraction,
        span_bubble_fraction=schedule.span_bubble_fraction,
        waiting_fraction=times.bubble_s / times.step_s if times is not None and times.step_s else None,
        peak_activations=tuple(int(count) for count in schedule.peak_activations),
        messages=traffic(schedule).messages,
        message_bytes=sum(x.dtype.itemsize * math.prod(x.shape) for x in parts.handed_on),
        gather=setup.strategy.pipeline.gather,
        gathering=_gathering(setup, options, batch, parts, on_cpu=on_cpu),
    )


def _gathering(
    setup: Setup, options: StepOptions, batch: Any, parts: StagePartition, *, on_cpu: bool
) -> tuple[Gathering, ...]:
    """Both choices of `gather`; none when no layer is split over axes that split the batch."""
    schedule, pipelined = parts.schedule, setup.strategy.pipeline
    assert pipelined is not None
    step_spec = dataclasses.replace(facts_of(setup, options, batch, on_cpu=on_cpu), by_stages=True)
    rounds = traffic(schedule).rounds
    # An F and a B in one cell hold a part each.
    at_once = 1 if schedule.chunks == 1 else int((schedule.table[..., :W, 0] >= 0).sum(-1).max())
    sent, held = {"step": 0.0, "microbatch": 0.0}, {"step": 0, "microbatch": 0}
    in_cells, is_split = np.zeros(schedule.stages), False
    for weight in (one for one in step_spec.weights if one.decision.leaf.is_stacked):
        decision = of_stage(weight, pipelined.axis, schedule.stages).decision
        kept, split = split_for_good(step_spec, dataclasses.replace(weight, decision=decision))
        is_split |= bool(split)
        ways, width = step_spec.num_shards(split), ITEMSIZE[step_spec.wire(step_spec.compute_dtype(decision))]
        own = decision.leaf.size // step_spec.num_shards(kept) * width
        part = decision.leaf.size * schedule.stages // schedule.num_parts // step_spec.num_shards(kept) * width
        sent["step"] += (1 - 1 / ways) * own + rounds * part
        held["step"] += schedule.chunks * part
        sent["microbatch"] += rounds * part / ways
        if split:
            in_cells += (1 - 1 / ways) * part * gathers_in_cells(schedule, parts.reads[decision.path])
        held["microbatch"] += schedule.chunks * part // ways + (at_once * part if split else 0)
    sent["microbatch"] += float(in_cells.max())
    names = ("step", "microbatch") if is_split else ()
    return tuple(Gathering(gather=name, sent_bytes=sent[name], held_bytes=held[name]) for name in names)
