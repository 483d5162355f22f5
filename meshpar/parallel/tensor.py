"""Tensor parallelism: weight matrices sharded within each layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshpar.parallel.execution import Execution
from meshpar.parallel.expected.collective import ExpectedCollective
from meshpar.parallel.expected.matmuls import contracted
from meshpar.parallel.parallelism import Parallelism, RuleSets, SearchSpace, activations, axes_of, split
from meshpar.parallel.strategy import Strategy, preset
from meshpar.sharding.errors import check_bool


@dataclasses.dataclass(frozen=True, repr=False)
class Tensor(Parallelism):
    """The `Parallelism` of `tensor_parallel`."""

    sequence: bool = False
    axis: str = "tensor"

    name = "tensor_parallel"
    axes = ("tensor",)

    def __post_init__(self) -> None:
        axes_of(self.name, self.axis)
        check_bool("tensor_parallel()", "the sequence is sharded between blocks", sequence=self.sequence)

    def rules(self) -> RuleSets:
        rules = split(self.name, dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), self.axis))
        inner = dict.fromkeys(("act_heads", "act_kv_heads", "act_mlp", "act_vocab"), self.axis)
        between = {"norm_seq": self.axis} if self.sequence else {}
        return RuleSets(rules, rules, rules, activations(self.name, {**inner, **between}))

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        divides = space.seq_len is not None and space.seq_len % space.num_shards("tensor", "context") == 0
        return iter((cls(sequence=True) if divides else cls(),))

    def expected_collectives(self, step: Execution) -> Iterator[ExpectedCollective]:
        return contracted(step)


@preset
def tensor_parallel(*, sequence: bool = False, axis: str = "tensor") -> Strategy:
    """Tensor parallelism: shard heads, MLP width and vocabulary over `axis`.

    A column-parallel matmul followed by a row-parallel matmul needs one all-reduce per block, forward and backward
    (Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism").

    Args:
      sequence: also shard the sequence dim of the residual stream between blocks. Each all-reduce becomes a
        reduce-scatter and an all-gather with the same number of bytes (Korthikanti et al. 2022, "Reducing Activation
        Recomputation in Large Transformer Models").
      axis: mesh axis to shard over.

    Raises:
      MeshparError: `axis` is not a mesh axis, or `sequence` is not a bool.

    Example:
      >>> mp.tensor_parallel(sequence=True).activations.name_rule("norm_seq").value
      'tensor'
    """
    return Strategy((Tensor(sequence, axis),))
