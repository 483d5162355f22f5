"""The promise: what a strategy says it will send, before any program is read.

What is promised follows from the rules, not from the program (a stacked leaf counts once a layer):

    a parameter split over batch axes       all-gather before use, forward and backward, in the compute dtype
    its gradient                            reduce-scatter over the axes that split its update,
                                            all-reduce over the other axes that split the batch
    ... both, where the strategy quantizes  all-gather of bytes, all-to-all of bytes
    a parameter not split as its update is  all-gather of the new value
    a weight contracted over a split dim    all-reduce of its result, forward            (row-parallel, Megatron's g)
    weights that share a whole input        all-reduce of its gradient, backward         (column-parallel, Megatron's f)
    ... with the sequence split between     reduce-scatter where the sum was, all-gather where the whole is needed again
    logits split over the vocabulary        all-reduce of max, sum and target, one number a token
    attention, the sequence split           permutes of keys and values round a ring, and backward of their gradients
    experts split over axes of the batch    all-to-alls, two forward and two backward a layer; counts of choices
    numbers or vectors over the batch       losses, metrics, norms, statistics of a batch: counted, not promised

A weight is row-parallel when its split dim stands before its `embed` dim, column-parallel when behind it (without
names: the first or a later dim), as in Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from meshpar.compiled.parts import Parts
from meshpar.compiled.promise_kernels import attended, gathered_in_bytes, scattered_in_bytes
from meshpar.compiled.promise_leaves import gathered, reduced, renewed
from meshpar.compiled.promise_matmul import contracted
from meshpar.compiled.promise_moe import routed
from meshpar.compiled.promise_stages import by_stage
from meshpar.compiled.terms import Facts, Promised, facts_of
from meshpar.moe.layer import MoESpec
from meshpar.sharding.types import Decision, is_spec
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup

Layers: TypeAlias = tuple[Callable[[Facts], Iterable[Promised]], ...]


def _layers(experts: Sequence[MoESpec]) -> Layers:
    """What the layers' own work promises for `Facts.leaves`, each a function of the facts.

    Under stages they are asked for the leaves before the layers, inside and behind them one by one.
    """
    return contracted, attended, functools.partial(routed, asked=experts)


def promised(
    setup: Setup, options: StepOptions, batch: Any, *, experts: Sequence[MoESpec] = (), on_cpu: bool = False
) -> tuple[Promised, ...]:
    """What a training step promises to send.

    Args:
      setup: the state's: model, mesh, strategy and every leaf's decision.
      options: the step's.
      batch: the global batch, or its shapes.
      experts: what layers of experts are asked in a step (`asked_of`), by which their bytes are known.
      on_cpu: promise what XLA:CPU makes of it: float32 on the wire, and a sum of several all-reduces instead of one
        all-reduce of the sum.
    """
    facts = facts_of(setup, options, batch, on_cpu)
    leaves = list(zip(facts.leaves, _specs(setup.layout.grads), _specs(setup.layout.updates), strict=True))
    found: list[Promised] = []
    in_bytes = {decision.path: gathered_in_bytes(facts, decision) for decision, _, _ in leaves}
    for parts in in_bytes.values():
        found += parts or ()
    for make in (
        lambda d, g, u: None if in_bytes[d.path] is not None else gathered(facts, d),
        lambda d, g, u: scattered_in_bytes(facts, d) or reduced(facts, d, g, u),
        lambda d, g, u: renewed(facts, d, u),
    ):
        for decision, grads, update in leaves:
            one = make(decision, grads, update)
            if one is not None:
                layered = _as_layers(decision)
                stacked = make(layered, grads, update) if layered is not None else None
                found.append(dataclasses.replace(_of_leaf(one), stacked=stacked and _of_leaf(stacked)))
    return _merged([*found, *(one for make in _layers(experts) for one in make(facts))])


def promised_by_stage(
    setup: Setup,
    options: StepOptions,
    batch: Any,
    parts: Parts,
    *,
    experts: Sequence[MoESpec] = (),
    on_cpu: bool = False,
) -> tuple[tuple[Promised, ...], ...]:
    """What each stage of a pipelined training step promises to send.

    Args:
      setup, options, batch, experts, on_cpu: as for `promised`.
      parts: how stages cut the model.
    """
    return tuple(_merged(one) for one in by_stage(setup, options, batch, parts, _layers(experts), on_cpu=on_cpu))


def _as_layers(decision: Decision) -> Decision | None:
    """The decision about a leaf without names as if its first dim were layers; None when that cannot be."""
    leaf = decision.leaf
    if leaf.names is not None or len(leaf.shape) < 2 or leaf.shape[0] < 2:
        return None
    names = ("layers", *(None for _ in leaf.shape[1:]))
    return dataclasses.replace(decision, leaf=dataclasses.replace(leaf, names=names))


def _of_leaf(one: Promised) -> Promised:
    marked = (tuple(dataclasses.replace(leg, of_leaf=True) for leg in spelling) for spelling in one.spellings)
    return dataclasses.replace(one, spellings=tuple(marked))


def _specs(tree: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(tree, is_leaf=is_spec)


def _merged(found: Sequence[Promised]) -> tuple[Promised, ...]:
    """Promises that differ in their tensors only, as one."""
    merged: dict[Any, Promised] = {}
    for one in found:
        key = (one.role, one.stack, one.spellings, one.stacked)
        if key in merged:
            so_far = merged[key]
            count = (so_far.count[0] + one.count[0], so_far.count[1] + one.count[1])
            vector = max(so_far.vector, one.vector)
            one = dataclasses.replace(so_far, tensors=so_far.tensors + one.tensors, count=count, vector=vector)
        merged[key] = one
    return tuple(merged.values())
