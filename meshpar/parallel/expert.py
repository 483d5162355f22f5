"""Expert parallelism: the experts of MoE layers split over devices, to which tokens travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshpar.parallel.part import Axes, Part, RuleSets, Trial, activations, axes_of, split
from meshpar.parallel.promise import Facts, Promised, is_router, parent, size_of
from meshpar.parallel.strategy import Strategy, preset


@dataclasses.dataclass(frozen=True, repr=False)
class Expert(Part):
    """See `expert_parallel`."""

    axis: Axes = "expert"

    name = "expert_parallel"
    axes = ("expert",)

    def __post_init__(self) -> None:
        axes_of(self.name, self.axis)

    def rules(self) -> RuleSets:
        rules = split(self.name, {"expert": self.axis})
        return RuleSets(rules, rules, rules, activations(self.name, {"act_expert": self.axis}))

    @classmethod
    def tried(cls, trial: Trial) -> Iterator[Part]:
        return iter((cls(),))

    def kernels(self, facts: Facts) -> Iterator[Promised]:
        """Rows to their experts and back, once a choice, forward and backward, and again where a layer is computed
        again."""
        layers = {
            (parent(one), one.leaf.num_layers): one for one in (w.decision for w in facts.weights) if is_router(one)
        }
        tokens = 0 if facts.is_by_device else facts.tokens or 0
        for decision in layers.values() if tokens else ():
            stack = decision.leaf.num_layers
            count = 2 * (1 + facts.recomputed(stack)) * stack * facts.accumulate
            yield Promised(
                role="rows to experts and back",
                kind="exchange",
                axes=facts.ordered(axes_of(self.name, self.axis)),
                elements=tokens * facts.choices * size_of(decision, "embed"),
                dtype=facts.wire(facts.compute_dtype(decision)),
                count=(count, count),
                tensors=(decision.path,),
            )


@preset
def expert_parallel(*, axis: Axes = "expert") -> Strategy:
    """Expert parallel: each rank of `axis` owns some experts; tokens go to their owners and back.

    Lepikhin et al. 2020, "GShard". Gradients of what is not an expert are reduced over `axis` like any batch axis.

    Args:
      axis: the mesh axis to split over; two, as in ("data", "expert"), for MoE layers that send in two levels, across
        the nodes and inside them (`MoEConfig(implementation="node-first")`).

    Example:
      >>> expert_parallel().params
      Rules(expert='expert')
    """
    return Strategy((Expert(axis),))
