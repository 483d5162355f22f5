"""Expert parallelism: the experts of MoE layers split over devices, to which tokens travel."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from meshpar.parallel.expected.step_spec import ExpectedCollective, StepSpec, is_router, parent, size_of
from meshpar.parallel.parallelism import Axes, Parallelism, RuleSets, SearchSpace, activations, axes_of, split
from meshpar.parallel.strategy import Strategy, preset
from meshpar.sharding.types import Decision


@dataclasses.dataclass(frozen=True, repr=False)
class Expert(Parallelism):
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
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        yield cls()
        if space.is_node_first and space.num_shards("data") > 1:
            yield cls(("data", "expert"))

    def kernels(self, step: StepSpec) -> Iterator[ExpectedCollective]:
        """Rows to their experts and back, once a choice, forward and backward, and again where a layer is computed
        again. Node-first over two axes they go once to each node over the first, from where none comes back again."""
        layers = {
            (parent(one), one.leaf.num_layers): one for one in (w.decision for w in step.weights) if is_router(one)
        }
        tokens = 0 if step.is_by_device else step.tokens or 0
        for decision in layers.values() if tokens else ():
            stack = decision.leaf.num_layers
            for axes, rows, ways in self._levels(step, step.recomputed(stack)):
                forms: Counter[tuple[int, str]] = Counter()
                for way, times in ways.items():
                    forms[self._row(step, decision, way)] += times * stack * step.accumulate
                for (width, dtype), count in forms.items():
                    yield ExpectedCollective(
                        role="rows to experts and back",
                        kind="exchange",
                        axes=axes,
                        elements=tokens * rows * width,
                        dtype=dtype,
                        count=(count, count),
                        tensors=(decision.path,),
                    )

    def _row(self, step: StepSpec, router: Decision, way: str) -> tuple[int, str]:
        """(numbers, dtype) of a row under way."""
        width = size_of(router, "embed")
        nbytes = step.row_bytes and step.row_bytes(way, width)
        return (nbytes, "u8") if nbytes else (width, step.wire(step.compute_dtype(router)))

    def _levels(self, step: StepSpec, forward: int) -> Iterator[tuple[tuple[str, ...], int, dict[str, int]]]:
        """(axes, rows of a token, how often each way) of a layer whose forward pass runs so often."""
        axes, given = step.ordered(axes_of(self.name, self.axis)), axes_of(self.name, self.axis)
        whole = {"dispatch": forward, "combine": forward, "grad": 2}
        if step.nodes_visited is None or len(given) != 2 or step.sizes.get(given[0], 1) == 1:
            yield axes, step.choices, whole
            return
        yield step.ordered(given[:1]), step.nodes_visited(step.sizes[given[0]]), {**whole, "combine": 1}
        if inside := step.ordered(given[1:]):
            yield inside, step.choices, whole


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
