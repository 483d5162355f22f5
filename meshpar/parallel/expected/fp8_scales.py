"""Collectives for the scales of rowwise fp8 matmuls (`layers.fp8_dot.rowwise_fp8_dot_general`).

    weights: contracted dim is sharded          max all-reduce of the amax of each column, over its axes
             columns sharded over batch axes    all-gather of their scales, for weights that are gathered in fp8
    tokens:  row-parallel                       max all-reduce of the amax of each token, forward
             column-parallel                    max all-reduce of the amax of each output gradient, backward
             sequence parallelism               all-gather of each token's scale, for activations gathered in fp8

The amax of a row or column is its largest absolute value. With a scale per tensor the arrays have a single element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from meshpar.parallel.execution import Execution
from meshpar.parallel.expected.collective import ExpectedCollective
from meshpar.sharding.types import Decision, axes_of_spec

SCALES = "fp8 scales of rows"
_Reduction = tuple[Literal["sum", "gather"], str, int, int]
"""A collective: kind, dtype, minimum count, maximum count. Counts are per layer and micro-step."""


def expected_collectives(step: Execution) -> Iterator[ExpectedCollective]:
    """Yield the collectives for scales of weights with rowwise fp8 matmuls. Scales of experts are local."""
    for decision in (weight.decision for weight in step.weights):
        leaf = decision.leaf
        if decision.path not in step.rowwise_fp8 or leaf.layer_ndim < 2 or leaf.has("expert") or leaf.has("vocab"):
            continue
        # Dims before `embed` are contracted, or `embed` if it is first.
        first = len(leaf.shape) - leaf.layer_ndim
        names = (leaf.names or ())[first:]
        last = first + max(1, names.index("embed") if "embed" in names else 1)
        axes = [set(step.ordered(axes_of_spec(part))) for part in (decision.spec[first:last], decision.spec[last:])]
        is_gathered = step.gathering.ahead or step.gathers_once or step.is_pipelined or step.formats is not None
        remaining = [part & set(step.tensor_axes) for part in axes] if is_gathered else axes
        yield from _of_columns(step, decision, math.prod(leaf.shape[last:]), *remaining)
        yield from _of_tokens(step, decision, *axes)


def _of_columns(
    step: Execution, decision: Decision, width: int, sum_axes: set[str], column_axes: set[str]
) -> Iterator[ExpectedCollective]:
    """Yield the collectives for scales of `width` columns. They run in the forward pass and in its recomputation."""
    stack, tensor = decision.leaf.num_layers, set(step.tensor_axes)
    runs, recomputed, slices = stack * step.microbatches, step.recomputed(stack), step.slices(stack)
    required = stack > 1 and decision.leaf.names is not None  # XLA may gather other weights before it computes scales
    kinds: tuple[_Reduction, ...] = (
        ("sum", step.compute_dtype(decision).name, required, recomputed * slices),
        ("gather", "float32", required, (1 + recomputed) * slices),
    )
    axes = (sum_axes, column_axes), (column_axes - tensor, column_axes & tensor)
    for (kind, dtype, minimum, maximum), (over, sharding_axes) in zip(kinds, axes, strict=True):
        if over:
            yield ExpectedCollective(
                role=SCALES, kind=kind, axes=step.ordered(over), elements=width // step.num_shards(sharding_axes),
                dtype=step.wire(dtype), count=(minimum * runs, maximum * runs), tensors=(decision.path,), stack=stack,
            )  # fmt: skip


def _of_tokens(
    step: Execution, decision: Decision, sum_axes: set[str], column_axes: set[str]
) -> Iterator[ExpectedCollective]:
    stack = decision.leaf.num_layers
    slices, recomputed = step.slices(stack), step.recomputed(stack)
    runs = stack * step.microbatches * slices
    for axis in step.tensor_axes:
        is_row, is_column, is_gathered = axis in sum_axes, axis in column_axes, axis in step.sequence_axes
        kinds: tuple[_Reduction, ...] = (
            ("sum", step.compute_dtype(decision).name, is_row, is_row * recomputed),
            ("sum", "float32", is_column, is_column),
            ("gather", "float32", 0, is_gathered * (is_row + is_column * (1 + recomputed))),
        )
        for kind, dtype, minimum, maximum in kinds:
            if maximum:
                yield ExpectedCollective(
                    role=SCALES, kind=kind, axes=(axis,), scattered=(axis,) if kind == "sum" and is_gathered else (),
                    may_all_reduce=is_gathered, elements=step.tokens_or_examples // slices or 1,
                    multiple=step.tokens is None, dtype=step.wire(dtype), count=(minimum * runs, maximum * runs),
                    tensors=(decision.path,),
                )  # fmt: skip
