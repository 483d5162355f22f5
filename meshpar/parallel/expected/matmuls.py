"""Expected collectives of matmuls with sharded weights and activations, as with `tensor_parallel`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from meshpar.parallel.execution import Execution, parent, split_axes
from meshpar.parallel.expected.collective import ExpectedCollective
from meshpar.sharding.types import LORA_SUFFIX, PAIR, Decision, axes_of_spec, spec_axes

NORMED_HEADS = "norms over sharded heads"
"""Role of the sums of a norm over all heads, with an element per token."""
VOCABULARY = "loss over a sharded vocabulary"
"""Role of the collectives of a loss with a sharded vocabulary."""


def contracted(step: Execution) -> Iterator[ExpectedCollective]:
    """Yield the collectives of matmuls whose weights are sharded over an axis that also shards activations.

        row-parallel weight                     all-reduce of the result, forward (Megatron's g)
        column-parallel weights, same input     all-reduce of the input's gradient, backward (Megatron's f)
        ... with sequence parallelism           reduce-scatter instead, and an all-gather of the sequence
        logits sharded over the vocabulary      all-reduce of max, sum and target, one element per token
        norm over sharded heads                 all-reduce of means, one element per token

    A weight is row-parallel if its sharded dim is before its `embed` dim, and column-parallel if it is after (Shoeybi
    et al. 2019, "Megatron-LM", section 3). A weight without names is row-parallel if its first dim is sharded. In
    latent attention, a replicated matrix computes a latent vector, from which sharded matrices compute the heads. There
    the latent vector is gathered and its gradient is reduced.
    """
    decisions = [weight.decision for weight in step.weights]
    blocks: dict[tuple[str, str, int, bool], tuple[list[Decision], list[Decision]]] = defaultdict(lambda: ([], []))
    for decision in decisions:
        for axis in step.tensor_axes:
            if decision.path.rpartition("/")[2] in PAIR:
                if not decision.leaf.has("expert"):  # the sums of the MoE layer include those of experts
                    yield from _of_pair(step, decision, axis)
                continue
            if decision.path.endswith("_norm/scale") and axis in split_axes(step, decision.spec):
                sums = _activation_collective(step, axis, 1, (decision,))
                # A mean of squares forward and backward, and a mean of products backward.
                maximum = 3 + step.recomputed(decision.leaf.num_layers)
                yield dataclasses.replace(sums(NORMED_HEADS, "sum", 1, maximum), dtype="f32", scattered=())
            side = _side(decision, axis)
            if side is not None:
                key = parent(decision), axis, decision.leaf.num_layers, decision.leaf.has("expert")
                blocks[key][side == "column"].append(decision)
    for (module, axis, stack, _), (rows, columns) in blocks.items():
        latents = [
            decision
            for decision in (decisions if rows and columns else ())
            if parent(decision) == module and decision.leaf.num_layers == stack and _is_latent(decision)
        ]
        widths = {latent.leaf.shape[-1] for latent in latents} - {_width((rows or columns)[0])}
        of_latents = [column for column in columns if _width(column) in widths]
        yield from _of_block(step, axis, rows, [column for column in columns if column not in of_latents])
        for latent in latents if of_latents else ():
            yield from _of_latent(step, axis, latent, of_latents)
    axes = {axis for (_, axis, *_), block in blocks.items() if any(d.leaf.has("vocab") for d in (*block[0], *block[1]))}
    for axis in step.ordered(axes) if step.tokens is not None else ():
        yield ExpectedCollective(
            role=VOCABULARY, kind="sum", axes=(axis,), elements=step.tokens or 0, dtype="f32",
            count=(0, 3 * step.microbatches), tensors=("max, sum and target logit of each token",), forward_only=True,
        )  # fmt: skip


def _side(decision: Decision, axis: str) -> str | None:
    """Return "row", "column", or None if the axis does not shard the leaf as part of a matmul."""
    names, spec = decision.leaf.names, decision.spec
    sharded = next((dim for dim, entry in enumerate(spec) if axis in spec_axes(entry)), None)
    dims = [dim for dim in range(len(decision.leaf.shape)) if names is None or names[dim] not in ("layers", "expert")]
    if sharded is None or sharded not in dims or len(dims) < 2:
        return None
    if names is None or all(name is None for dim, name in enumerate(names) if dim in dims and dim != sharded):
        return "row" if sharded == dims[0] else "column"
    if "embed" not in names or names[sharded] == "embed":
        return None
    return "row" if sharded < names.index("embed") else "column"


def _of_block(
    step: Execution, axis: str, rows: Sequence[Decision], columns: Sequence[Decision]
) -> Iterator[ExpectedCollective]:
    """Yield the collectives of row-parallel and column-parallel weights of a module."""
    stack, by_sequence = (*rows, *columns)[0].leaf.num_layers, axis in step.sequence_axes
    num_rows, num_lookups = len(rows), sum(row.leaf.has("vocab") for row in rows)
    is_tied = step.is_tied and num_lookups > 0
    if step.exchanges_rows:
        num_rows, num_lookups = num_rows - num_lookups, 0
    inputs = num_rows if num_rows and columns else 1 if columns or is_tied else 0
    recomputed = step.recomputed(stack)
    # XLA:CPU all-reduces each weight's input gradient separately, except in a MoE layer.
    plain = [column for column in columns if not column.leaf.has("expert")]
    num_sums = max(1, _num_partial_sums(step, plain)) if step.on_cpu else 1
    # If the sequence is reordered before the head, XLA all-reduces the gradient and slices it afterwards. Experts
    # are reduced in the same way, inside their layer.
    is_reordered = bool(step.context_axes) and any(column.leaf.has("vocab") for column in columns)
    collective = _activation_collective(step, axis, _width((*rows, *columns)[0]), (*rows, *columns))
    if num_rows > num_lookups:
        minimum = num_rows - num_lookups
        yield collective("partial sums, forward", "sum", minimum, minimum * recomputed)
    if num_lookups:  # XLA all-reduces the result of a lookup and then slices it
        yield collective("partial sums, forward", "sum", num_lookups, num_lookups, may_all_reduce=True)
    if inputs:
        # The input of the first block may be the batch, which needs no gradient.
        may_all_reduce = "always" if num_sums > 1 else step.on_cpu or is_reordered or len(plain) < len(columns)
        minimum, maximum = inputs if stack > 1 else 0, inputs * num_sums
        yield collective("partial sums, backward", "sum", minimum, maximum, may_all_reduce=may_all_reduce)
    if by_sequence and inputs:
        yield collective("gather sequence, forward", "gather", inputs, inputs * (1 + recomputed))
    if by_sequence and num_rows:  # not for a frozen table
        frozen = sum(row.leaf.has("vocab") and not row.leaf.is_trained for row in rows)
        yield collective("gather sequence, backward", "gather", max(0, num_rows - frozen), num_rows)


def _num_partial_sums(step: Execution, columns: Sequence[Decision]) -> int:
    """Return the number of matmuls whose input gradients are partial sums, including LoRA adapters."""
    if step.is_pipelined or step.is_by_device:
        return len(columns)
    paths = {weight.decision.path for weight in step.weights}
    adapters = [module for column in columns for module in (column.path.rpartition("/")[0], column.path + LORA_SUFFIX)]
    return len(columns) + len(paths & {f"{module}/{PAIR[0]}" for module in adapters})


def _of_latent(
    step: Execution, axis: str, latent: Decision, of_latents: Sequence[Decision]
) -> Iterator[ExpectedCollective]:
    """Yield the reduction of a latent vector's gradient, and with sequence parallelism its all-gather."""
    width = latent.leaf.shape[-1]
    num_sums = _num_partial_sums(step, [c for c in of_latents if _width(c) == width]) if step.on_cpu else 1
    collective = _activation_collective(step, axis, width, (latent,))
    yield collective("partial sums, backward", "sum", 1, max(1, num_sums), may_all_reduce=True)
    if axis in step.sequence_axes:
        yield collective("gather sequence, forward", "gather", 1, 1 + step.recomputed(latent.leaf.num_layers))


def _of_pair(step: Execution, decision: Decision, axis: str) -> Iterator[ExpectedCollective]:
    """Yield the reductions of the activations between the matrices of a low-rank pair.

    If the input dim is sharded, these activations are partial sums. If the output dim is sharded, their gradients are
    partial sums, unless each rank computes them separately (`params.outputs_of_pair`). The width is the LoRA rank.
    """
    is_inward, stack = decision.path.endswith(PAIR[0]), decision.leaf.num_layers
    is_by_rank = not is_inward and not (step.is_pipelined or step.is_by_device)
    if axis not in axes_of_spec(decision.spec) or is_by_rank:
        return
    width = decision.leaf.shape[-1] if is_inward else decision.leaf.shape[stack > 1]
    collective = _activation_collective(step, axis, width, (decision,))
    role, maximum = ("forward", step.recomputed(stack)) if is_inward else ("backward", 1)
    yield collective(f"partial sums, {role}", "sum", 1, maximum, may_all_reduce=True)
    if is_inward and axis in step.sequence_axes:
        yield collective("gather sequence, backward", "gather", 1, 1)


def _activation_collective(
    step: Execution, axis: str, width: int, tensors: Sequence[Decision]
) -> Callable[..., ExpectedCollective]:
    """Return a function that creates collectives of activations with `width` elements per token.

    The function takes role, kind, and the minimum and maximum count per layer and micro-step.
    """
    stack, by_sequence = tensors[0].leaf.num_layers, axis in step.sequence_axes
    slices = step.slices(stack)
    runs = stack * step.microbatches * slices

    def collective(
        role: str, kind: Literal["gather", "sum"], minimum: int, maximum: int, *, may_all_reduce: Any = False
    ) -> ExpectedCollective:
        return ExpectedCollective(
            role=role, kind=kind, axes=(axis,), scattered=(axis,) if kind == "sum" and by_sequence else (),
            may_all_reduce=may_all_reduce if by_sequence else False,
            elements=width * max(1, step.tokens_or_examples // slices), multiple=step.tokens is None,
            dtype=step.wire(step.compute_dtype(tensors[0])), count=(minimum * runs, maximum * runs),
            tensors=tuple(decision.path for decision in tensors),
        )  # fmt: skip

    return collective


def _is_latent(decision: Decision) -> bool:
    """Return whether a matrix projects the residual stream to a dim without a name, which is not sharded."""
    names = decision.leaf.names or ()
    return tuple(name for name in names if name != "layers") == ("embed", None)


def _width(decision: Decision) -> int:
    names, shape = decision.leaf.names, decision.leaf.shape
    if names is not None and "embed" in names:
        return shape[names.index("embed")]
    sharded = next(dim for dim, entry in enumerate(decision.spec) if entry is not None)
    return shape[-1] if sharded != len(shape) - 1 else shape[-2]
