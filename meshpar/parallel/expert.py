"""Expert parallelism: the experts of MoE layers sharded over devices, with all-to-alls for tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from meshpar.parallel.execution import Execution, parent
from meshpar.parallel.expected.collective import ExpectedCollective
from meshpar.parallel.parallelism import Axes, Parallelism, RuleSets, SearchSpace, activations, axes_of, split
from meshpar.parallel.strategy import Strategy, preset


@dataclasses.dataclass(frozen=True, repr=False)
class Expert(Parallelism):
    """The `Parallelism` of `expert_parallel`."""

    axis: Axes = "expert"

    name = "expert_parallel"
    axes = ("expert",)

    def __post_init__(self) -> None:
        axes_of(self.name, self.axis)

    def rules(self) -> RuleSets:
        rules = split(self.name, {"expert": self.axis})
        return RuleSets(rules, rules, rules, activations(self.name, {"act_expert": self.axis}))

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        yield cls()
        if space.is_node_first and space.num_shards("data") > 1:
            yield cls(("data", "expert"))

    def kernels(self, step: Execution) -> Iterator[ExpectedCollective]:
        """Yield the exchanges of token-expert assignments, forward, backward and for rematerialized layers.

        In node-first dispatch over two axes, a token is sent at most once to each node over the first axis.
        """
        routers = (weight.decision for weight in step.weights if weight.leaf.is_router)
        layers = {(parent(router), router.leaf.num_layers): router for router in routers}
        tokens = 0 if step.is_by_device else step.tokens or 0
        for decision in layers.values() if tokens else ():
            stack = decision.leaf.num_layers
            width = decision.leaf.size_of("embed")
            plain = width, step.wire(step.compute_dtype(decision))
            for axes, rows, directions in self._levels(step, step.recomputed(stack)):
                forms: Counter[tuple[int, str]] = Counter()
                for direction, times in directions.items():
                    nbytes = step.row_bytes and step.row_bytes(direction, width)
                    forms[(nbytes, "u8") if nbytes else plain] += times * stack * step.microbatches
                for (elements, dtype), count in forms.items():
                    yield ExpectedCollective(
                        role="rows to experts and back", kind="exchange", axes=axes,
                        elements=tokens * rows * elements, dtype=dtype, count=(count, count),
                        tensors=(decision.path,),
                    )  # fmt: skip

    def _levels(self, step: Execution, forward: int) -> Iterator[tuple[tuple[str, ...], int, dict[str, int]]]:
        """Yield (mesh axes, copies sent per token, exchanges by direction) for each communication level.

        `forward` is the number of forward passes, including recomputation.
        """
        axes, exchanges = axes_of(self.name, self.axis), {"dispatch": forward, "combine": forward, "grad": 2}
        if step.nodes_visited is None or len(axes) != 2 or step.sizes.get(axes[0], 1) == 1:
            yield step.ordered(axes), step.experts_per_token, exchanges
            return
        yield step.ordered(axes[:1]), step.nodes_visited(step.sizes[axes[0]]), {**exchanges, "combine": 1}
        if inside := step.ordered(axes[1:]):
            yield inside, step.experts_per_token, exchanges


@preset
def expert_parallel(*, axis: Axes = "expert") -> Strategy:
    """Expert parallelism: shard the experts of MoE layers over `axis`.

    All-to-alls send tokens to their experts and return the results. Gradients of other parameters are reduced over
    `axis`, which is a batch axis for them.

    Lepikhin et al. 2020, "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding".

    Args:
      axis: mesh axis to shard over. Two axes, as in ("data", "expert"), serve MoE layers that send tokens across nodes
        first and then within a node (`MoEConfig(implementation="node-first")`).

    Raises:
      MeshparError: `axis` is not a mesh axis.

    Example:
      >>> mp.expert_parallel().params
      Rules(expert='expert')
    """
    return Strategy((Expert(axis),))
