"""Context parallelism: the sequence split over devices in every layer."""

from __future__ import annotations

import dataclasses

from meshpar.parallel.part import Need, Part, RuleSets, activations, split
from meshpar.parallel.strategy import Strategy, preset
from meshpar.sharding.types import problem


@dataclasses.dataclass(frozen=True, repr=False)
class Context(Part):
    """See `context_parallel`."""

    axis: str = "context"

    name = "context_parallel"

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str) or not self.axis:
            where, exists = f"context_parallel(axis={self.axis!r})", "the sequence goes round one axis"
            raise problem(where, "split over that", exists, 'name it, as axis="context"')

    def rules(self) -> RuleSets:
        rules = split(self.name)
        return RuleSets(rules, rules, rules, activations(self.name, {"seq": self.axis}))

    def needs(self) -> tuple[Need, ...]:
        why = "leave it out, for there is nothing to split the sequence over"
        return (Need(axis=self.axis, strategy=repr(self), why=why),)


@preset
def context_parallel(*, axis: str = "context") -> Strategy:
    """Context parallel: the sequence split over `axis` in every layer, for sequences too long for one device.

    Only attention looks across positions: the shipped decoders run it as a ring, in which keys and values travel from
    rank to rank (`meshpar.collectives.ring_attention`; Liu et al. 2023, "Ring Attention"). Weights are whole over
    `axis` unless another strategy splits them, as in `mp.fsdp(axis=("fsdp", "context")) | mp.context_parallel()`, and
    their gradients are reduced over it. The batch is whole over `axis`: each rank takes its positions of every row.
    With `tensor_parallel(sequence=True)`, joined in either order, the residual stream is split over both.

    Args:
      axis: the mesh axis to split over, one of your own: MeshSpec(fsdp=2, context=4).

    Raises:
      ValueError: an axis that is no name of one.

    Example:
      >>> context_parallel().activations.name_rule("seq").value
      'context'
    """
    return Strategy((Context(axis),))
