"""Collectives for the scales of rowwise fp8 matmuls (`layers.fp8_dot.rowwise_fp8_dot_general`).

    weights: what is contracted is split              sum of each column's largest number, over those axes
             columns are split over batch axes        gather of their scales, for weights that are gathered in 8 bits
    rows:    contracted forward over a split dim      sum of each token's largest number    (row-parallel)
             contracted backward over a split dim     the same of the output's gradient     (column-parallel)
             the sequence is split between blocks     gather of each token's scale, where rows are gathered in 8 bits

Sums are all-reduces whose operation is the maximum. With one scale a tensor each of them is of one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshpar.parallel.expected.step_spec import ExpectedCollective, StepSpec, has_vocabulary, is_expert
from meshpar.sharding.types import Decision, spec_axes

SCALES = "scales of 8-bit rows"


def promised(step: StepSpec) -> Iterator[ExpectedCollective]:
    """Of every weight that is multiplied so. Experts' are not: a rank takes the scales of what it has."""
    for decision in (one.decision for one in step.weights):
        is_multiplied = decision.leaf.layer_ndim > 1 and not (is_expert(decision) or has_vocabulary(decision))
        if decision.path in step.by_row and is_multiplied:
            yield from _of_columns(step, decision)
            yield from _of_tokens(step, decision)


def _contracted(decision: Decision) -> tuple[range, range]:
    """Dims that a matmul sums over, and the others: `embed` where it is first, those before it elsewhere."""
    leaf = decision.leaf
    dims = range(len(leaf.shape) - leaf.layer_ndim, len(leaf.shape))
    names = (leaf.names or ())[dims.start :]
    at = dims.start + max(1, names.index("embed") if "embed" in names else 1)
    return range(dims.start, at), range(at, dims.stop)


def _split(step: StepSpec, decision: Decision, dims: Sequence[int]) -> set[str]:
    entries = [decision.spec[dim] for dim in dims if dim < len(decision.spec)]
    return {axis for entry in entries for axis in spec_axes(entry) if step.sizes[axis] > 1}


def _of_columns(step: StepSpec, decision: Decision) -> Iterator[ExpectedCollective]:
    """In the forward pass, and where that runs again; the backward pass is left the scales."""
    leaf, (contracted, columns) = decision.leaf, _contracted(decision)
    of_sum, of_columns = _split(step, decision, contracted), _split(step, decision, columns)
    stack, tensor = leaf.num_layers, set(step.tensor_axes)
    if step.is_prefetched or step.is_once or step.by_stages or step.quantize is not None:
        of_sum, of_columns = of_sum & tensor, of_columns & tensor  # it is replicated over the others
    runs, recomputed = stack * step.accumulate, step.recomputed(stack)
    slices = step.interleave if stack > 1 else 1
    width = math.prod(leaf.shape[dim] for dim in columns)
    is_sure = stack > 1 and leaf.names is not None  # XLA gathers others first, or as it likes
    for axes, kind, dtype, own, least, most in (
        (of_sum, "sum", step.compute_dtype(decision), of_columns, 1, recomputed * slices),
        (of_columns - tensor, "gather", "float32", of_columns & tensor, 1, (1 + recomputed) * slices),
    ):
        if axes:
            yield ExpectedCollective(
                role=SCALES,
                kind=kind,  # type: ignore[arg-type]
                axes=step.ordered(axes),
                elements=width // step.num_shards(own),
                dtype=step.wire(dtype),
                count=(least * runs if is_sure else 0, most * runs),
                tensors=(decision.path,),
                stack=stack,
            )


def _of_tokens(step: StepSpec, decision: Decision) -> Iterator[ExpectedCollective]:
    contracted, columns = _contracted(decision)
    stack = decision.leaf.num_layers
    slices, recomputed = step.interleave if stack > 1 else 1, step.recomputed(stack)
    runs = stack * step.accumulate * slices
    for axis in step.tensor_axes:
        is_row, is_column = (axis in _split(step, decision, dims) for dims in (contracted, columns))
        gathered = axis in step.sequence_axes
        compute = step.wire(step.compute_dtype(decision))
        for kind, dtype, least, most in (
            ("sum", compute, is_row, is_row * recomputed),
            ("sum", step.wire("float32"), is_column, is_column),
            ("gather", step.wire("float32"), 0, gathered * (is_row + is_column * (1 + recomputed))),
        ):
            if most:
                yield ExpectedCollective(
                    role=SCALES,
                    kind=kind,  # type: ignore[arg-type]
                    axes=(axis,),
                    scattered=(axis,) if kind == "sum" and gathered else (),
                    whole=gathered,
                    elements=max(1, step.rows // slices) if step.tokens is None else step.tokens // slices,
                    multiple=step.tokens is None,
                    dtype=dtype,
                    count=(least * runs, most * runs),
                    tensors=(decision.path,),
                )
