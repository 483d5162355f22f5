"""Data parallelism: replicated state, and a batch sharded over the batch axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshpar.parallel.execution import Execution
from meshpar.parallel.parallelism import Parallelism, RuleSets, SearchSpace, activations, replicated_all
from meshpar.parallel.strategy import Strategy, preset
from meshpar.parallel.zero import stages_above


@dataclasses.dataclass(frozen=True, repr=False)
class Data(Parallelism):
    """The `Parallelism` of `ddp`."""

    name = "ddp"
    shards_state = True
    axes = ("data",)

    def rules(self) -> RuleSets:
        replicated = replicated_all("ddp")
        return RuleSets(replicated, replicated, replicated, activations("ddp"))

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        return iter((cls(),) if space.num_shards("fsdp") == 1 else ())

    def memory_reductions(self, step: Execution) -> tuple[Parallelism, ...]:
        return stages_above("ddp", step)


@preset
def ddp() -> Strategy:
    """Data parallelism: replicate parameters, gradients and optimizer state, and shard the batch.

    Gradients are all-reduced over the batch axes.

    Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".

    Example:
      >>> mp.ddp().params, mp.ddp().activations.name_rule("batch").value == ("data", "fsdp", "expert")
      (Rules(), True)
    """
    return Strategy((Data(),))
