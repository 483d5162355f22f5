"""Context parallelism: the sequence split over devices in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, get_args

from meshpar.parallel.expected.step_spec import ExpectedCollective, StepSpec, parent, size_of, split_axes
from meshpar.parallel.parallelism import Parallelism, RequiredAxis, RuleSets, SearchSpace, activations, split
from meshpar.parallel.strategy import Strategy, preset
from meshpar.sharding.rules import DimRule, first
from meshpar.sharding.types import Decision, near, problem

Kind: TypeAlias = Literal["ring", "all-to-all"]


@dataclasses.dataclass(frozen=True, repr=False)
class Context(Parallelism):
    """See `context_parallel`."""

    axis: str = "context"
    kind: Kind = "ring"

    name = "context_parallel"
    axes = ("context",)

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str) or not self.axis:
            where, exists = f"context_parallel(axis={self.axis!r})", "the sequence is split over one axis"
            raise problem(where, "split over that", exists, 'name it, as axis="context"')
        if self.kind not in get_args(Kind):
            where, exists = f"context_parallel(kind={self.kind!r})", f"there are {' and '.join(get_args(Kind))}"
            raise problem(where, "attend across positions that way", exists, near(str(self.kind), get_args(Kind)))

    def rules(self) -> RuleSets:
        rules = split(self.name)
        inside: dict[str, DimRule] = {
            # Whole inside attention, where each rank has some of the heads; too few of keys are repeated.
            "attn_seq": None, "attn_heads": self.axis, "attn_kv_heads": first(self.axis, None),
        }  # fmt: skip
        around = {"seq": self.axis} | (inside if self.kind == "all-to-all" else {})
        return RuleSets(rules, rules, rules, activations(self.name, around))

    def required_axes(self) -> tuple[RequiredAxis, ...]:
        why = "leave it out, for there is nothing to split the sequence over"
        return (RequiredAxis(axis=self.axis, strategy=repr(self), why=why),)

    def expected_collectives(self, step: StepSpec) -> Iterator[ExpectedCollective]:
        """Of the ring nothing: it is a kernel."""
        return _scattered(step) if self.kind == "all-to-all" else iter(())

    def kernels(self, step: StepSpec) -> Iterator[ExpectedCollective]:
        """Of the ring: keys and values go round it forward and backward, their gradients in float32 backward."""
        tokens = step.tokens if self.kind == "ring" and step.tokens else 0
        for one in step.weights if tokens else ():
            leaf = one.decision.leaf
            if not {"kv_heads", "embed"} <= set(leaf.names or ()):
                continue
            tensor = step.num_shards(set(split_axes(step, one.decision.spec)) & set(step.tensor_axes))
            width = leaf.size // leaf.num_layers // size_of(one.decision, "embed") // tensor
            runs, compute = leaf.num_layers * step.accumulate, step.wire(step.compute_dtype(one.decision))
            for dtype, count in ((compute, runs * (1 + step.recomputed(leaf.num_layers))), ("f32", runs)):
                yield ExpectedCollective(
                    role="keys and values round the ring",
                    kind="gather",
                    axes=step.context_axes,
                    elements=tokens * width * step.num_shards(step.context_axes),
                    dtype=dtype,
                    count=(count, count),
                    tensors=(one.decision.path,),
                )

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        if space.seq_len is not None and space.seq_len % (2 * space.num_shards("context")) == 0:
            yield from (cls(), cls(kind="all-to-all"))


def _scattered(step: StepSpec) -> Iterator[ExpectedCollective]:
    """4 all-to-alls a layer forward, of queries, keys, values and the heads' output, and 4 of their gradients backward.

    A layer with weights of `kv_heads` is one with attention.
    """
    found: dict[tuple[str, int], dict[str, list[Decision]]] = {}
    for decision in (one.decision for one in step.weights):
        for name in ("kv_heads", "heads"):
            if {name, "embed"} <= set(decision.leaf.names or ()):
                layer = found.setdefault((parent(decision), decision.leaf.num_layers), {})
                layer.setdefault(name, []).append(decision)
    for (_, stack), of in found.items():
        if "kv_heads" not in of or step.tokens is None:
            continue
        slices = step.interleave if stack > 1 else 1
        runs, weights = stack * step.accumulate * slices, (*of["kv_heads"], *of.get("heads", ()))
        for numbers in _numbers_a_token(step, of["kv_heads"][0], of.get("heads", [])):
            for direction, most in (("forward", step.recomputed(stack)), ("backward", 1)):
                yield ExpectedCollective(
                    role=f"heads scattered for attention, {direction}",
                    kind="exchange",
                    axes=step.context_axes,
                    elements=step.tokens // slices * numbers,
                    dtype=step.wire(step.compute_dtype(of["kv_heads"][0])),
                    count=(runs, most * runs),
                    tensors=tuple(decision.path for decision in weights),
                )


def _numbers_a_token(step: StepSpec, keys: Decision, heads: Sequence[Decision]) -> Iterator[int]:
    """On one device, of queries, keys, the heads' output and values, as they travel.

    A query is as wide as a key, a head's output as a value.
    """
    for decision in heads:
        num_heads, num_kv_heads = size_of(decision, "heads"), size_of(keys, "kv_heads")
        tensor = step.num_shards(set(split_axes(step, decision.spec)) & set(step.tensor_axes))
        times = repeats(num_heads, num_kv_heads, tensor * step.num_shards(step.context_axes))
        numbers = decision.leaf.size // decision.leaf.num_layers // size_of(decision, "embed") // tensor
        yield from (numbers, numbers * num_kv_heads * times // num_heads)


def repeats(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """How often each key/value head is repeated for every rank to have as many; the ranks divide the query heads.

    Example:
      >>> repeats(num_heads=32, num_kv_heads=8, num_ranks=16), repeats(num_heads=32, num_kv_heads=8, num_ranks=4)
      (2, 1)
    """
    shared = num_heads // num_kv_heads
    fits = (times for times in range(1, shared + 1) if not shared % times and not num_kv_heads * times % num_ranks)
    times = next(fits, None)
    if times is None:
        where, exists = 'context_parallel(kind="all-to-all")', f"{num_heads} is not a multiple of {num_ranks}"
        fix = 'use fewer ranks, or context_parallel(kind="ring")'
        raise problem(where, f"scatter {num_heads} query heads over {num_ranks} ranks", exists, fix)
    return times


@preset
def context_parallel(*, axis: str = "context", kind: Kind = "ring") -> Strategy:
    """Context parallel: the sequence split over `axis` in every layer, for sequences too long for one device.

    Only attention looks across positions. The shipped decoders run it in one of two ways:

    - `kind="ring"`: keys and values travel from rank to rank (`meshpar.collectives.ring_attention`; Liu et al. 2023,
      "Ring Attention"), in tiles that are cuDNN's kernel where the model's attention is; windows, caps and packed rows
      in tiles of plain matmuls (`attention="blockwise"`). Any number of heads; the sequence is a multiple of two chunks
      a rank.
    - `kind="all-to-all"`: heads are scattered and the sequence is gathered before attention, and the other way round
      behind it (Jacobs et al. 2023, "DeepSpeed Ulysses"): four all-to-alls a layer forward and four backward. Each rank
      attends to whole sequences with some of the heads, so any attention serves, cuDNN's too. Query heads are a
      multiple of the ranks, with `tensor_parallel` of those of both axes; key/value heads that are not are repeated
      until they are (`Rules(attn_kv_heads="context")` makes that an error).

    Weights are replicated over `axis` unless another strategy splits them, as in `mp.fsdp(axis=("fsdp", "context")) |
    mp.context_parallel()`, and their gradients are reduced over it. The batch is replicated over `axis`: each rank
    takes its positions of every row. With `tensor_parallel(sequence=True)`, joined in either order, the residual stream
    is split over both.

    Args:
      axis: the mesh axis to split over, one of your own: MeshSpec(fsdp=2, context=4).
      kind: how attention looks across positions.

    Raises:
      ValueError: an axis that is no name of one, or no such kind.

    Example:
      >>> rules = context_parallel(kind="all-to-all").activations
      >>> {name: rules.name_rule(name).value for name in ("seq", "attn_seq", "attn_heads")}
      {'seq': 'context', 'attn_seq': None, 'attn_heads': 'context'}
    """
    return Strategy((Context(axis, kind),))
