"""Tensor parallelism: weight matrices split inside a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshpar.parallel.expected.matmuls import contracted
from meshpar.parallel.expected.step_spec import ExpectedCollective, StepSpec
from meshpar.parallel.parallelism import Parallelism, RuleSets, SearchSpace, activations, axes_of, split
from meshpar.parallel.strategy import Strategy, preset
from meshpar.sharding.types import problem


@dataclasses.dataclass(frozen=True, repr=False)
class Tensor(Parallelism):
    """See `tensor_parallel`."""

    sequence: bool = False
    axis: str = "tensor"

    name = "tensor_parallel"
    axes = ("tensor",)

    def __post_init__(self) -> None:
        axes_of(self.name, self.axis)
        if not isinstance(self.sequence, bool):
            where, exists = f"tensor_parallel(sequence={self.sequence!r})", "it is True or False"
            raise problem(where, "split the sequence between blocks", exists, "write sequence=True, or leave it out")

    def rules(self) -> RuleSets:
        rules = split(self.name, dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), self.axis))
        inner = dict.fromkeys(("act_heads", "act_kv_heads", "act_mlp", "act_vocab"), self.axis)
        between = {"norm_seq": self.axis} if self.sequence else {}
        return RuleSets(rules, rules, rules, activations(self.name, {**inner, **between}))

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        divides = space.seq_len is not None and space.seq_len % space.num_shards("tensor", "context") == 0
        return iter((cls(sequence=True) if divides else cls(),))

    def expected_collectives(self, step: StepSpec) -> Iterator[ExpectedCollective]:
        return contracted(step)


@preset
def tensor_parallel(*, sequence: bool = False, axis: str = "tensor") -> Strategy:
    """Tensor parallel: heads, MLP width and vocabulary split over `axis`, inside every layer.

    Column-parallel then row-parallel matmuls leave one all-reduce per block and direction (Shoeybi et al. 2019,
    "Megatron-LM").

    Args:
      sequence: also split the residual stream's sequence between blocks, which turns each all-reduce into a
        reduce-scatter and an all-gather of the same bytes (Korthikanti et al. 2022, "Reducing Activation
        Recomputation in Large Transformer Models").
      axis: the mesh axis to split over.

    Example:
      >>> tensor_parallel(sequence=True).activations.name_rule("norm_seq").value
      'tensor'
    """
    return Strategy((Tensor(sequence, axis),))
