"""Context parallelism: the sequence dim sharded in every layer."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, get_args

from meshpar.parallel.execution import Execution, parent, split_axes
from meshpar.parallel.expected.collective import ExpectedCollective
from meshpar.parallel.parallelism import Parallelism, RequiredAxis, RuleSets, SearchSpace, activations, split
from meshpar.parallel.strategy import Strategy, preset
from meshpar.sharding.errors import check_choice, problem
from meshpar.sharding.rules import DimRule, first
from meshpar.sharding.types import Decision

Kind: TypeAlias = Literal["ring", "all-to-all"]


@dataclasses.dataclass(frozen=True, repr=False)
class Context(Parallelism):
    """The `Parallelism` of `context_parallel`."""

    axis: str = "context"
    kind: Kind = "ring"

    name = "context_parallel"
    axes = ("context",)

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str) or not self.axis:
            reason, fix = "it must be the name of one mesh axis", 'write axis="context"'
            raise problem("context_parallel()", f"set axis={self.axis!r}", reason, fix, code="unknown-axis")
        check_choice("context_parallel()", "the attention algorithm", get_args(Kind), kind=self.kind)

    def rules(self) -> RuleSets:
        rules = split(self.name)
        inside: dict[str, DimRule] = {
            # In attention, the sequence is unsharded and the heads are sharded. Key/value heads may be repeated.
            "attn_seq": None, "attn_heads": self.axis, "attn_kv_heads": first(self.axis, None),
        }  # fmt: skip
        around = {"seq": self.axis} | (inside if self.kind == "all-to-all" else {})
        return RuleSets(rules, rules, rules, activations(self.name, around))

    def required_axes(self) -> tuple[RequiredAxis, ...]:
        fix = "remove context_parallel()"
        return (RequiredAxis(axis=self.axis, strategy=repr(self), fix=fix),)

    def expected_collectives(self, step: Execution) -> Iterator[ExpectedCollective]:
        """Yield the all-to-alls of `kind="all-to-all"`. For `kind="ring"`, see `kernels`."""
        return _scattered(step) if self.kind == "all-to-all" else iter(())

    def kernels(self, step: Execution) -> Iterator[ExpectedCollective]:
        """Yield the ring's messages: keys and values forward and backward, and their float32 gradients backward."""
        tokens = step.tokens if self.kind == "ring" and step.tokens else 0
        for decision in (weight.decision for weight in step.weights) if tokens else ():
            leaf = decision.leaf
            if not (leaf.has("kv_heads") and leaf.has("embed")):
                continue
            width = _elements_per_token(step, decision)
            runs, compute = leaf.num_layers * step.microbatches, step.wire(step.compute_dtype(decision))
            for dtype, count in ((compute, runs * (1 + step.recomputed(leaf.num_layers))), ("f32", runs)):
                yield ExpectedCollective(
                    role="keys and values round the ring", kind="gather", axes=step.context_axes,
                    elements=tokens * width * step.num_shards(step.context_axes), dtype=dtype, count=(count, count),
                    tensors=(decision.path,),
                )  # fmt: skip

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        if space.seq_len is not None and space.seq_len % (2 * space.num_shards("context")) == 0:
            yield from (cls(), cls(kind="all-to-all"))


def _scattered(step: Execution) -> Iterator[ExpectedCollective]:
    """Yield four all-to-alls per attention layer (queries, keys, values, output), and four for their gradients.

    Layers that have weights with a `kv_heads` dim are attention layers.
    """
    layers: dict[tuple[str, int], tuple[list[Decision], list[Decision]]] = defaultdict(lambda: ([], []))
    for decision in (weight.decision for weight in step.weights if weight.leaf.has("embed")):
        for index, name in enumerate(("kv_heads", "heads")):
            if decision.leaf.has(name):
                layers[parent(decision), decision.leaf.num_layers][index].append(decision)
    for (_, stack), (keys, heads) in layers.items():
        if not keys or step.tokens is None:
            continue
        slices = step.slices(stack)
        runs = stack * step.microbatches * slices
        for elements in _elements_sent(step, keys[0], heads):
            for direction, most in (("forward", step.recomputed(stack)), ("backward", 1)):
                yield ExpectedCollective(
                    role=f"heads scattered for attention, {direction}", kind="exchange", axes=step.context_axes,
                    elements=step.tokens // slices * elements, dtype=step.wire(step.compute_dtype(keys[0])),
                    count=(runs, most * runs), tensors=tuple(decision.path for decision in (*keys, *heads)),
                )  # fmt: skip


def _elements_per_token(step: Execution, decision: Decision) -> int:
    """Return the number of elements per token and device that a projection of the residual stream computes."""
    tensor = step.num_shards(set(split_axes(step, decision.spec)) & set(step.tensor_axes))
    return decision.leaf.size // decision.leaf.num_layers // decision.leaf.size_of("embed") // tensor


def _elements_sent(step: Execution, keys: Decision, heads: Sequence[Decision]) -> Iterator[int]:
    """Yield the elements per token and device that the all-to-alls of queries, keys, output and values send.

    Queries and keys have the same head dim, and so have outputs and values.
    """
    for decision in heads:
        num_heads, num_kv_heads = decision.leaf.size_of("heads"), keys.leaf.size_of("kv_heads")
        tensor = step.num_shards(set(split_axes(step, decision.spec)) & set(step.tensor_axes))
        times = repeats(num_heads, num_kv_heads, tensor * step.num_shards(step.context_axes))
        elements = _elements_per_token(step, decision)
        yield from (elements, elements * num_kv_heads * times // num_heads)


def repeats(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """Return how often to repeat each key/value head, so that all ranks have equally many.

    Example:
      >>> repeats(num_heads=32, num_kv_heads=8, num_ranks=16), repeats(num_heads=32, num_kv_heads=8, num_ranks=4)
      (2, 1)
    """
    shared = num_heads // num_kv_heads
    fits = (times for times in range(1, shared + 1) if not shared % times and not num_kv_heads * times % num_ranks)
    times = next(fits, None)
    if times is None:
        where, reason = 'context_parallel(kind="all-to-all")', f"{num_heads} is not divisible by {num_ranks}"
        fix = 'use fewer ranks, or context_parallel(kind="ring")'
        requested = f"shard {num_heads} query heads over {num_ranks} ranks"
        raise problem(where, requested, reason, fix, code="indivisible")
    return times


@preset
def context_parallel(*, axis: str = "context", kind: Kind = "ring") -> Strategy:
    """Context parallelism: shard the sequence dim of activations over `axis` in every layer.

    Attention is the only layer that communicates across positions. The included decoders support two algorithms:

    - `kind="ring"`: keys and values are sent from rank to rank (`meshpar.collectives.ring_attention`; Liu et al. 2023,
      "Ring Attention with Blockwise Transformers for Near-Infinite Context"). Tiles use cuDNN if the model's attention
      does. Attention windows, logit caps and packed examples need tiles of plain matmuls (`attention="blockwise"`). The
      number of heads is arbitrary. The sequence length must be divisible by twice the number of ranks.
    - `kind="all-to-all"`: an all-to-all before attention shards the heads and gathers the sequence, and an all-to-all
      after attention reverses this (Jacobs et al. 2023, "DeepSpeed Ulysses"). Each layer needs four all-to-alls
      forward and four backward. Any attention implementation works. The number of ranks must divide the query heads;
      with `tensor_parallel`, the product of both axis sizes must divide them. Key/value heads are repeated if
      necessary (`Rules(attn_kv_heads="context")` makes this an error).

    Weights are replicated over `axis` unless another strategy shards them, as in
    `mp.fsdp(axis=("fsdp", "context")) | mp.context_parallel()`. Their gradients are reduced over `axis`. The batch is
    replicated over `axis`: each rank uses its positions of every example. With `tensor_parallel(sequence=True)`, the
    residual stream is sharded over both axes.

    Args:
      axis: mesh axis to shard over. It must not be a batch axis: `MeshSpec(fsdp=2, context=4)`.
      kind: the attention algorithm, "ring" or "all-to-all".

    Raises:
      MeshparError: `axis` is not a name, or `kind` is unknown.

    Example:
      >>> rules = mp.context_parallel(kind="all-to-all").activations
      >>> {name: rules.name_rule(name).value for name in ("seq", "attn_seq", "attn_heads")}
      {'seq': 'context', 'attn_seq': None, 'attn_heads': 'context'}
    """
    return Strategy((Context(axis, kind),))
