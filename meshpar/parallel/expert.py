"""Expert parallelism: the experts of MoE layers split over devices, to which tokens travel."""

from __future__ import annotations

import dataclasses

from meshpar.parallel.part import Part, RuleSets, activations, axes_of, split
from meshpar.parallel.strategy import Strategy, preset


@dataclasses.dataclass(frozen=True, repr=False)
class Expert(Part):
    """See `expert_parallel`."""

    axis: str = "expert"

    name = "expert_parallel"

    def __post_init__(self) -> None:
        axes_of(self.name, self.axis)

    def rules(self) -> RuleSets:
        rules = split(self.name, {"expert": self.axis})
        return RuleSets(rules, rules, rules, activations(self.name, {"act_expert": self.axis}))


@preset
def expert_parallel(*, axis: str = "expert") -> Strategy:
    """Expert parallel: each rank of `axis` owns some experts; tokens go to their owners and back.

    Lepikhin et al. 2020, "GShard". Gradients of what is not an expert are reduced over `axis` like any batch axis.

    Args:
      axis: the mesh axis to split over.

    Example:
      >>> expert_parallel().params
      Rules(expert='expert')
    """
    return Strategy((Expert(axis),))
