"""Pipeline parallelism: the stacked layers split over stages, every batch run through them in microbatches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from meshpar.parallel.expected.step_spec import StepSpec
from meshpar.parallel.parallelism import Parallelism, RequiredAxis, RuleSets, SearchSpace, activations, axes_of, split
from meshpar.parallel.strategy import Strategy, preset
from meshpar.sharding.rules import BATCH_AXES
from meshpar.sharding.types import MeshparError, near, problem

if TYPE_CHECKING:
    from meshpar.schedules import Schedule

Gather: TypeAlias = Literal["step", "microbatch"]


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Pipeline(Parallelism):
    """How a model's stacked layers are run stage by stage; see `pipeline_parallel`."""

    stages: int
    """Ranks of `axis`; each holds a share of the layers."""
    microbatches: int
    """Into which the rows of every device are cut."""
    schedule: str = "1f1b"
    """A name from `meshpar.pipeline.SCHEDULES`, or the path of a `.csv` file as `Schedule.from_csv` reads it."""
    chunks: int | None = None
    """Shares of the layers on one stage, for a schedule that takes several."""
    gather: Gather = "step"
    """Weights that are split over axes that split the batch, too: gathered once a step and held whole, or in every
    forward and backward of a microbatch and held as shards."""
    axis: str = "stage"

    stage_layer_offset: tuple[int, int] = (0, 0)
    """How many layers fewer than the parts between them the first and the last part have, beside embedding and head."""

    name = "pipeline_parallel"
    axes = ("stage",)

    def __post_init__(self) -> None:
        axes_of(self.name, self.axis)
        fewer = self.stage_layer_offset
        whole = isinstance(fewer, tuple) and all(type(count) is int and count >= 0 for count in fewer)
        if not whole or len(fewer) != 2:
            where, fix = (
                f"pipeline_parallel(stage_layer_offset={fewer!r})",
                "write stage_layer_offset=(0, 1) for a lighter last part",
            )
            exists = "it is two whole numbers, of the first part and of the last"
            raise problem(where, "make parts that much lighter", exists, fix)
        for field in ("stages", "microbatches", *(() if self.chunks is None else ("chunks",))):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                where, exists = f"pipeline_parallel({field}={value!r})", "it is a whole number, one or more"
                raise problem(where, "run a pipeline of so many", exists, "write pipeline_parallel(stages=4, ...)")
        if self.gather not in get_args(Gather):
            where, fix = f"pipeline_parallel(gather={self.gather!r})", near(str(self.gather), get_args(Gather))
            raise problem(where, "gather weights then", "there is no such choice", fix)
        if not isinstance(self.schedule, str):
            exists = "a strategy names its schedule, so that it can be written down"
            fix = 'give a name, schedule="zb-h1", or a file that Schedule.to_csv wrote'
            raise problem(f"pipeline_parallel(schedule={self.schedule!r})", "run it", exists, fix)
        if self.schedule.endswith(".csv"):
            if self.chunks is not None:
                where, exists = f"pipeline_parallel(chunks={self.chunks})", "a file says which parts a stage holds"
                raise problem(where, f"run `{self.schedule}` with so many", exists, "leave chunks out")
        else:
            self._check_table()

    def _check_table(self) -> None:
        """Raises `ValueError` for what the schedule cannot run, told by a few microbatches: a table of many takes long.

        Schedules ask for a number of microbatches, for even ones, or for multiples of the stages: the few are alike.
        """
        try:
            self.shortened()
        except MeshparError:
            self.table()

    def shortened(self) -> Schedule:
        """The schedule with a few microbatches: it checks as the whole one does, and has as many parts."""
        if self.schedule.endswith(".csv"):
            return self.table()
        around = 2 * self.stages
        few = min(self.microbatches, around + self.microbatches % around)
        return _made(self.schedule, self.stages, few, self.chunks)

    def table(self) -> Schedule:
        """The schedule that is named."""
        from meshpar.schedules import Schedule

        if self.schedule.endswith(".csv"):
            return Schedule.from_csv(self.schedule)
        return _made(self.schedule, self.stages, self.microbatches, self.chunks)

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        """Rows of a device in up to eight times as many microbatches as stages: more shorten the bubble by little."""
        stages, rows = space.num_shards("stage"), space.rows // space.num_shards(*BATCH_AXES)
        fits = [count for count in range(2 * stages, 8 * stages + 1, stages) if rows % count == 0]
        for count in fits[-1:]:
            for schedule, parts in _TRIED.items():
                if space.num_layers % (parts * stages) == 0:
                    yield _piped(stages, count, schedule)

    def layers_of_parts(self, num_layers: int, num_parts: int) -> tuple[int, ...]:
        """How many layers each part of the model runs: as even as they go, what is over to the parts between the ends.

        Raises:
          ValueError: a part would have none.
        """
        first, last = self.stage_layer_offset
        level, over = divmod(num_layers + first + last, num_parts)
        counts = [level] * num_parts
        for part in [*range(1, num_parts - 1), 0, num_parts - 1][:over]:
            counts[part] += 1
        counts[0] -= first
        counts[-1] -= last
        if min(counts) < 1:
            lighter = any(self.stage_layer_offset)
            least = num_parts * (1 + max(first, last)) - first - last
            raise problem(
                f"{num_layers} stacked layers under pipeline_parallel(schedule={self.schedule!r})",
                f"be cut into {num_parts} parts" + f" with stage_layer_offset={self.stage_layer_offset}" * lighter,
                "every part of the model has one layer at the least",
                f"use {least} layers or more, or fewer stages (times chunks)"
                + ", or leave stage_layer_offset out" * lighter,
            )
        return tuple(counts)

    def rules(self) -> RuleSets:
        rules = split(self.name, {"layers": self.axis})
        return RuleSets(rules, rules, rules, activations(self.name))

    def required_axes(self) -> tuple[RequiredAxis, ...]:
        why = "leave it out, for there are no stages to split the layers over"
        return (RequiredAxis(axis=self.axis, strategy=repr(self), why=why),)

    def memory_reductions(self, step: StepSpec) -> tuple[Parallelism, ...]:
        """More microbatches, each as much smaller."""
        return tuple(dataclasses.replace(self, microbatches=self.microbatches * times) for times in (2, 4, 8))


_TRIED = {"1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1, "eager-1f1b": 1}
"""What a planner tries, each with its parts a stage: a copy of the model, as DualPipe keeps, is asked for by name."""


@functools.lru_cache(maxsize=64)
def _made(schedule: str, stages: int, microbatches: int, chunks: int | None) -> Schedule:
    """A table takes a tenth of a second to make, and is asked for at every turn."""
    from meshpar.schedules import make

    return make(schedule, stages, microbatches, **({} if chunks is None else {"chunks": chunks}))


@functools.lru_cache(maxsize=256)
def _piped(stages: int, microbatches: int, schedule: str) -> Pipeline:
    return Pipeline(stages=stages, microbatches=microbatches, schedule=schedule)


@preset
def pipeline_parallel(
    *,
    stages: int,
    microbatches: int,
    schedule: str = "1f1b",
    chunks: int | None = None,
    gather: Gather = "step",
    stage_layer_offset: tuple[int, int] = (0, 0),
    axis: str = "stage",
) -> Strategy:
    """Pipeline parallel: the stacked layers split over `axis`, and every batch run through them in microbatches.

    The model runs its layers by `meshpar.scan_layers`, as the shipped decoders do; what stands before is the
    first stage's and what stands behind the last one's. Any schedule of `meshpar.pipeline` runs as one program, with
    what other strategies split inside a stage left to XLA. Gradients are summed on every device and over the axes that
    split the batch once, behind the last microbatch. Parameters outside of the layers (embedding, head) are whole on
    every stage; their gradients are sent from the stage that makes them, or summed where two do. The stages meet at the
    end of a step, for the gradient norm and the metrics.

    Layers need not divide: parts have as many as they go evenly, those between the ends what is over, 10 layers on 4
    stages 2, 3, 3 and 2. Between steps such layers are split over `axis` along another dim (the largest that divides,
    not split otherwise where there is one), and go to their stages once a step; a leaf with no such dim is whole on
    every stage. `Setup.table` tells.

    Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM"; Qi et al. 2024, "Zero Bubble Pipeline Parallelism".

    Args:
      stages: ranks of `axis`.
      microbatches: into which the rows of every device are cut; the loss is the mean over them.
      schedule: a name from `meshpar.pipeline.SCHEDULES`, or the path of a `.csv` file. Stages meet in every tick: by
        "1f1b" one's forward then waits for another's backward, which is longer where layers are recomputed; by
        "eager-1f1b" all do the same, and it holds twice as many microbatches.
      chunks: shares of the layers on one stage, for "interleaved-1f1b" and "eager-1f1b".
      gather: with `fsdp()`, weights are gathered once a "step" and held, or for every "microbatch" and dropped again.
      stage_layer_offset: numbers of layers that the first and the last chunk have less than the others, to balance
        embedding and head.
      axis: the mesh axis of the stages.

    Raises:
      ValueError: no such schedule, or not for these numbers.

    Example:
      >>> pipeline_parallel(stages=4, microbatches=16, schedule="zb-h1")
      pipeline_parallel(stages=4, microbatches=16, schedule='zb-h1')
    """
    part = Pipeline(
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        gather=gather,
        axis=axis,
        stage_layer_offset=stage_layer_offset,
    )
    return Strategy((part,))
