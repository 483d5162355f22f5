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
from collections.abc import Iterator, Sequence

from meshpar.parallel.expected.step_spec import ExpectedCollective, StepSpec, has_vocabulary, is_expert
from meshpar.sharding.types import Decision, spec_axes

SCALES = "fp8 scales of rows"


def promised(step: StepSpec) -> Iterator[ExpectedCollective]:
    """Yield the collectives for scales of weights with rowwise fp8 matmuls. Scales of experts are local."""
    for decision in (weight.decision for weight in step.weights):
        is_multiplied = decision.leaf.layer_ndim > 1 and not (is_expert(decision) or has_vocabulary(decision))
        if decision.path in step.by_row and is_multiplied:
            yield from _of_columns(step, decision)
            yield from _of_tokens(step, decision)


def _contracted(decision: Decision) -> tuple[range, range]:
    """Return the contracted and the remaining dims. Dims before `embed` are contracted, or `embed` if it is first."""
    leaf = decision.leaf
    dims = range(len(leaf.shape) - leaf.layer_ndim, len(leaf.shape))
    names = (leaf.names or ())[dims.start :]
    boundary = dims.start + max(1, names.index("embed") if "embed" in names else 1)
    return range(dims.start, boundary), range(boundary, dims.stop)


def _split(step: StepSpec, decision: Decision, dims: Sequence[int]) -> set[str]:
    entries = [decision.spec[dim] for dim in dims if dim < len(decision.spec)]
    return {axis for entry in entries for axis in spec_axes(entry) if step.sizes[axis] > 1}


def _of_columns(step: StepSpec, decision: Decision) -> Iterator[ExpectedCollective]:
    """Yield the collectives for scales of columns. They run in the forward pass and in its recomputation."""
    leaf, (contracted, columns) = decision.leaf, _contracted(decision)
    sum_axes, column_axes = _split(step, decision, contracted), _split(step, decision, columns)
    stack, tensor = leaf.num_layers, set(step.tensor_axes)
    if step.is_prefetched or step.is_once or step.by_stages or step.quantize is not None:
        # The weight has been gathered over the other axes.
        sum_axes, column_axes = sum_axes & tensor, column_axes & tensor
    runs, recomputed = stack * step.accumulate, step.recomputed(stack)
    slices = step.interleave if stack > 1 else 1
    width = math.prod(leaf.shape[dim] for dim in columns)
    required = stack > 1 and leaf.names is not None  # XLA may gather other weights before it computes scales
    for axes, kind, dtype, sharding_axes, maximum in (
        (sum_axes, "sum", step.compute_dtype(decision), column_axes, recomputed * slices),
        (column_axes - tensor, "gather", "float32", column_axes & tensor, (1 + recomputed) * slices),
    ):
        if axes:
            yield ExpectedCollective(
                role=SCALES,
                kind=kind,  # type: ignore[arg-type]
                axes=step.ordered(axes),
                elements=width // step.num_shards(sharding_axes),
                dtype=step.wire(dtype),
                count=(runs if required else 0, maximum * runs),
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
        for kind, dtype, minimum, maximum in (
            ("sum", compute, is_row, is_row * recomputed),
            ("sum", step.wire("float32"), is_column, is_column),
            ("gather", step.wire("float32"), 0, gathered * (is_row + is_column * (1 + recomputed))),
        ):
            if maximum:
                yield ExpectedCollective(
                    role=SCALES,
                    kind=kind,  # type: ignore[arg-type]
                    axes=(axis,),
                    scattered=(axis,) if kind == "sum" and gathered else (),
                    whole=gathered,
                    elements=max(1, step.rows // slices) if step.tokens is None else step.tokens // slices,
                    multiple=step.tokens is None,
                    dtype=dtype,
                    count=(minimum * runs, maximum * runs),
                    tensors=(decision.path,),
                )
