"""Data parallelism: everything replicated, the batch split."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshpar.parallel.expected.step_spec import Facts
from meshpar.parallel.parallelism import Part, RuleSets, Trial, activations, replicated_all
from meshpar.parallel.strategy import Strategy, preset
from meshpar.parallel.zero import stages_above


@dataclasses.dataclass(frozen=True, repr=False)
class Data(Part):
    """See `ddp`."""

    name = "ddp"
    splits_state = True
    axes = ("data",)

    def rules(self) -> RuleSets:
        whole = replicated_all("ddp")
        return RuleSets(whole, whole, whole, activations("ddp"))

    @classmethod
    def tried(cls, trial: Trial) -> Iterator[Part]:
        return iter((cls(),) if trial.ways("fsdp") == 1 else ())

    def smaller(self, facts: Facts) -> tuple[Part, ...]:
        return stages_above("ddp", facts)


@preset
def ddp() -> Strategy:
    """Data parallel: everything replicated on every device, the batch split; gradients are all-reduced.

    Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".

    Example:
      >>> print(ddp())
      ddp()
    """
    return Strategy((Data(),))
