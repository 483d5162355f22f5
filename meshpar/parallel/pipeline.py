"""`Pipeline`: stacked layers sharded over stages, and microbatches that flow through them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from meshpar.parallel.execution import Execution
from meshpar.parallel.parallelism import Parallelism, RequiredAxis, RuleSets, SearchSpace, activations, axes_of, split
from meshpar.sharding.errors import MeshparError, check_cases, check_choice, check_positive_int, is_int, problem
from meshpar.sharding.rules import BATCH_AXES

if TYPE_CHECKING:
    from meshpar.schedules import Schedule

Gather: TypeAlias = Literal["step", "microbatch"]


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Pipeline(Parallelism):
    """The `Parallelism` of `pipeline_parallel`."""

    stages: int
    """Number of stages, the size of `axis`."""
    microbatches: int
    """Number of microbatches per local batch."""
    schedule: str = "1f1b"
    """A name from `meshpar.pipeline.SCHEDULES`, or the path of a `.csv` file for `Schedule.from_csv`."""
    chunks: int | None = None
    """Number of pipeline chunks per stage, for schedules with chunks."""
    gather: Gather = "step"
    """When to gather weights that are sharded over batch axes: once per step, which keeps unsharded weights in memory,
    or in the forward and backward pass of every microbatch."""
    axis: str = "stage"

    stage_layer_offset: tuple[int, int] = (0, 0)
    """Number of layers by which the first and the last pipeline chunk are smaller than inner chunks."""
    spread_head: bool = True
    """Whether all stages compute the embedding and the head, in schedules with this option."""
    split_backward: bool = False
    """Whether W has its own tick, in schedules with this option."""

    name = "pipeline_parallel"
    axes = ("stage",)

    def __post_init__(self) -> None:
        axes_of(self.name, self.axis)
        offset = self.stage_layer_offset
        if not isinstance(offset, tuple) or len(offset) != 2 or not all(is_int(count, 0) for count in offset):
            reason = "it must be two nonnegative integers, for the first and the last chunk"
            fix = "write stage_layer_offset=(0, 1) for fewer layers in the last chunk"
            raise problem("pipeline_parallel()", f"set stage_layer_offset={offset!r}", reason, fix, code="not-an-int")
        check_choice("pipeline_parallel()", "the stages of the head", (True, False), spread_head=self.spread_head)
        choices = (True, False) if self.schedule in SPLIT else (False,)
        check_choice("pipeline_parallel()", "the ticks of W", choices, split_backward=self.split_backward)
        for field in ("stages", "microbatches", *(() if self.chunks is None else ("chunks",))):
            check_positive_int("pipeline_parallel()", f"the number of {field}", **{field: getattr(self, field)})
        check_choice("pipeline_parallel()", "the time of the weight gather", get_args(Gather), gather=self.gather)
        if not isinstance(self.schedule, str):
            reason = "strategies are serializable, so the schedule must be a name or a path"
            fix = 'write schedule="zb-h1", or the path of a file that Schedule.to_csv wrote'
            raise problem("pipeline_parallel()", f"set schedule={self.schedule!r}", reason, fix, code="wrong-type")
        if self.schedule.endswith(".csv"):
            reason, requested = f"`{self.schedule}` determines the chunks of each stage", f"set chunks={self.chunks}"
            check_cases(
                "pipeline_parallel()", requested, "conflict", (self.chunks is not None, reason, "remove chunks")
            )
            return
        # Large tables are slow to build, so a schedule with few microbatches is checked first. It is valid if the full
        # schedule is: it preserves a minimum number of microbatches, their parity and their divisibility by the number
        # of stages.
        try:
            self.shortened()
        except MeshparError:
            self.table()

    def shortened(self) -> Schedule:
        """Return the schedule for few microbatches, which is quick to build and has the same pipeline chunks."""
        if self.schedule.endswith(".csv"):
            return self.table()
        around = 2 * self.stages
        few = min(self.microbatches, around + self.microbatches % around)
        return _cached_schedule(self.schedule, self.stages, few, self.chunks, self.spread_head, self.split_backward)

    def table(self) -> Schedule:
        """Return the schedule for all microbatches."""
        from meshpar.schedules import Schedule

        if self.schedule.endswith(".csv"):
            return Schedule.from_csv(self.schedule)
        spread, split = self.spread_head, self.split_backward
        return _cached_schedule(self.schedule, self.stages, self.microbatches, self.chunks, spread, split)

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        """Yield schedules with at most 8 microbatches per stage. More microbatches hardly shorten the bubble."""
        stages, examples = space.num_shards("stage"), space.examples // space.num_shards(*BATCH_AXES)
        fits = [count for count in range(2 * stages, 8 * stages + 1, stages) if examples % count == 0]
        for count in fits[-1:]:
            for schedule, parts in _PLANNED_SCHEDULES.items():
                if space.num_layers % (parts * stages) == 0:
                    yield _cached_pipeline(stages, count, schedule)

    def layers_of_parts(self, num_layers: int, num_parts: int) -> tuple[int, ...]:
        """Return the number of layers in each pipeline chunk. Inner chunks get the remainder of an uneven division."""
        first, last = self.stage_layer_offset
        level, over = divmod(num_layers + first + last, num_parts)
        counts = [level] * num_parts
        for part in [*range(1, num_parts - 1), 0, num_parts - 1][:over]:
            counts[part] += 1
        counts[0] -= first
        counts[-1] -= last
        if min(counts) < 1:
            least = num_parts * (1 + max(first, last)) - first - last
            where = f"{num_layers} stacked layers under {self!r}"
            reason, fix = (
                "every chunk needs at least one layer",
                f"use at least {least} layers, or fewer stages or chunks",
            )
            raise problem(where, f"create {num_parts} chunks", reason, fix, code="out-of-range")
        return tuple(counts)

    def rules(self) -> RuleSets:
        rules = split(self.name, {"layers": self.axis})
        return RuleSets(rules, rules, rules, activations(self.name))

    def required_axes(self) -> tuple[RequiredAxis, ...]:
        fix = "remove pipeline_parallel()"
        return (RequiredAxis(axis=self.axis, strategy=repr(self), fix=fix),)

    def memory_reductions(self, step: Execution) -> tuple[Parallelism, ...]:
        """Return variants with more and smaller microbatches."""
        return tuple(dataclasses.replace(self, microbatches=self.microbatches * times) for times in (2, 4, 8))


SPLIT = ("eager-1f1b", "interleaved-1f1b")
"""Schedules with the option `split_backward`."""
_PLANNED_SCHEDULES = {"1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1, "eager-1f1b": 1}
"""Schedules that the planner evaluates, with their chunks per stage. DualPipe is not evaluated, because it needs two
copies of the model."""


@functools.lru_cache(maxsize=64)
def _cached_schedule(
    schedule: str, stages: int, microbatches: int, chunks: int | None, spread_head: bool, split_backward: bool
) -> Schedule:
    """Return a cached schedule, because building a table needs about 0.1 s."""
    from meshpar.schedules import SCHEDULES, make

    options = {} if chunks is None else {"chunks": chunks}
    if schedule in SCHEDULES and "spread_head" in (SCHEDULES[schedule].__kwdefaults__ or {}):
        options |= {"spread_head": spread_head, "split_backward": split_backward}
    return make(schedule, stages, microbatches, **options)


@functools.lru_cache(maxsize=256)
def _cached_pipeline(stages: int, microbatches: int, schedule: str) -> Pipeline:
    return Pipeline(stages=stages, microbatches=microbatches, schedule=schedule)
