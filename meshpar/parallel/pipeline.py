"""Pipeline parallelism: the stacked layers split over stages, every batch run through them in microbatches."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, get_args

from meshpar.parallel.part import Facts, Need, Part, RuleSets, activations, axes_of, split
from meshpar.parallel.strategy import Strategy, preset
from meshpar.sharding.types import near, problem

Gather: TypeAlias = Literal["step", "microbatch"]


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Pipeline(Part):
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

    name = "pipeline_parallel"

    def __post_init__(self) -> None:
        axes_of(self.name, self.axis)
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
            from meshpar.pipeline.schedules import make

            make(
                self.schedule,
                self.stages,
                self.microbatches,
                **({} if self.chunks is None else {"chunks": self.chunks}),
            )

    def rules(self) -> RuleSets:
        rules = split(self.name, {"layers": self.axis})
        return RuleSets(rules, rules, rules, activations(self.name))

    def needs(self) -> tuple[Need, ...]:
        why = "leave it out, for there are no stages to split the layers over"
        return (Need(axis=self.axis, strategy=repr(self), why=why),)

    def engine(self) -> str | None:
        return "meshpar.training.engines.staged"

    def smaller(self, facts: Facts) -> tuple[Part, ...]:
        """More microbatches, each as much smaller."""
        return tuple(dataclasses.replace(self, microbatches=self.microbatches * times) for times in (2, 4, 8))


@preset
def pipeline_parallel(
    *,
    stages: int,
    microbatches: int,
    schedule: str = "1f1b",
    chunks: int | None = None,
    gather: Gather = "step",
    axis: str = "stage",
) -> Strategy:
    """Pipeline parallel: the stacked layers split over `axis`, and every batch run through them in microbatches.

    The model runs its layers by `meshpar.pipeline.scan_layers`, as the shipped decoders do; what stands before is the
    first stage's and what stands behind the last one's. Any schedule of `meshpar.pipeline` runs as one program, with
    what other strategies split inside a stage left to XLA. Gradients are summed on every device and over the axes that
    split the batch once, behind the last microbatch. Parameters outside of the layers (embedding, head) are whole on
    every stage; their gradients are sent from the stage that makes them, or summed where two do. The stages meet at the
    end of a step, for the gradient norm and the metrics.

    Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM"; Qi et al. 2024, "Zero Bubble Pipeline Parallelism".

    Args:
      stages: ranks of `axis`.
      microbatches: into which the rows of every device are cut; the loss is the mean over them.
      schedule: a name from `meshpar.pipeline.SCHEDULES`, or the path of a `.csv` file.
      chunks: shares of the layers on one stage, for the interleaved schedule.
      gather: with `fsdp()`, weights are gathered once a "step" and held, or for every "microbatch" and dropped again.
      axis: the mesh axis of the stages.

    Raises:
      ValueError: no such schedule, or not for these numbers.

    Example:
      >>> pipeline_parallel(stages=4, microbatches=16, schedule="zb-h1")
      pipeline_parallel(stages=4, microbatches=16, schedule='zb-h1')
    """
    return Strategy(
        (
            Pipeline(
                stages=stages, microbatches=microbatches, schedule=schedule, chunks=chunks, gather=gather, axis=axis
            ),
        )
    )
