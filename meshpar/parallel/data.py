"""Data parallelism: everything replicated, the batch split."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshpar.parallel.expected.step_spec import StepSpec
from meshpar.parallel.parallelism import Parallelism, RuleSets, SearchSpace, activations, replicated_all
from meshpar.parallel.strategy import Strategy, preset
from meshpar.parallel.zero import stages_above


@dataclasses.dataclass(frozen=True, repr=False)
class Data(Parallelism):
    """See `ddp`."""

    name = "ddp"
    shards_state = True
    axes = ("data",)

    def rules(self) -> RuleSets:
        whole = replicated_all("ddp")
        return RuleSets(whole, whole, whole, activations("ddp"))

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        return iter((cls(),) if space.num_shards("fsdp") == 1 else ())

    def memory_reductions(self, step: StepSpec) -> tuple[Parallelism, ...]:
        return stages_above("ddp", step)


@preset
def ddp() -> Strategy:
    """Data parallel: everything replicated on every device, the batch split; gradients are all-reduced.

    Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".

    Example:
      >>> print(ddp())
      ddp()
    """
    return Strategy((Data(),))
