"""Products of all pairs of examples in a traced step, and the collectives that they cause.

A contrastive loss compares all pairs of examples (Radford et al. 2021, "Learning Transferable Visual Models
From Natural Language Supervision", section 2.3). It is a function of the global batch, so XLA gathers one operand of
the product over the devices that share the batch, and reduces the gradient of that operand over them:

    images[B_data, d]  texts[B_data, d] ─► all-gather ─► texts[B, d]        logits[B_data, B]

Softmax over the sharded dim of the logits adds all-reduces of vectors with an entry per example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Literal, jaxprs_in_params

from meshpar.parallel.expected.step_spec import ExpectedCollective, StepSpec

ROLE = "examples compared with each other"
_Operands: TypeAlias = Counter[tuple[int, str]]
"""(number of elements, dtype) -> number of all-pairs matmuls per step with an operand of this size and dtype."""


def expected(jaxpr: Any, num_batch_leaves: int, rows: int, step_spec: StepSpec) -> Iterator[ExpectedCollective]:
    """Yield the collectives that matmuls over all pairs of examples may cause.

    Args:
      jaxpr: the traced step. Its last arguments are the leaves of the batch.
      num_batch_leaves: number of these leaves.
      rows: number of examples of a micro-step, over all devices.
      step_spec: description of the step.
    """
    axes = step_spec.ordered(step_spec.batch_axes)
    if not axes or rows < 2:
        return
    jaxpr, operands = getattr(jaxpr, "jaxpr", jaxpr), _Operands()
    num_other_args = len(jaxpr.invars) - num_batch_leaves
    _follow(jaxpr, [i >= num_other_args for i in range(len(jaxpr.invars))], rows, 1, operands)
    for (elements, dtype), count in operands.items():
        common: dict[str, Any] = {
            "role": ROLE, "axes": axes, "elements": elements, "dtype": step_spec.wire(dtype), "tensors": ()
        }  # fmt: skip
        # Twice, because the backward pass may recompute the forward pass.
        yield ExpectedCollective(kind="gather", count=(0, 2 * count), **common)
        yield ExpectedCollective(kind="sum", scattered=axes, may_all_reduce=True, count=(0, 2 * count), **common)
    if operands:
        # Maximum, sum and target of a softmax and the sum in its gradient. The forward pass may be recomputed.
        count, dtype = 4 * sum(operands.values()), step_spec.wire("float32")
        yield ExpectedCollective(
            role=ROLE, kind="sum", axes=axes, elements=rows, dtype=dtype, count=(0, count), tensors=()
        )


_WITH_SEVERAL = frozenset({"cond", "custom_linear_solve"})
"""Primitives with several inner jaxprs. All their results count as dependent on the batch if an argument is."""


def _follow(jaxpr: Any, arg_marks: Sequence[bool], rows: int, times: int, operands: _Operands) -> list[bool]:
    """Add the operands of all-pairs matmuls to `operands`. Return for each result whether it depends on the batch.

    `arg_marks` states for each argument whether it depends on the batch, and `times` how often the jaxpr runs per step.
    """
    marked = {v for v, mark in zip(jaxpr.invars, arg_marks, strict=True) if mark}

    def marks(atoms: Sequence[Any]) -> list[bool]:
        return [not isinstance(atom, Literal) and atom in marked for atom in atoms]

    for eqn in jaxpr.eqns:
        args = marks(eqn.invars)
        results = [any(args)] * len(eqn.outvars)
        if eqn.primitive.name == "dot_general" and all(args) and _is_of_pairs(eqn, rows):
            for x in eqn.invars:
                operands[x.aval.size, x.aval.dtype.name] += times
        # Inside a `shard_map`, XLA inserts no collectives over the axes of the batch.
        for inner in () if eqn.primitive.name == "shard_map" else jaxprs_in_params(eqn.params):
            count, is_loop = len(inner.invars), eqn.primitive.name == "scan"
            inner_args = args[-count:] if count and len(args) >= count else [any(args)] * count
            if is_loop:
                inner_args = _carried(eqn, inner, inner_args)
            out = _follow(inner, inner_args, rows, times * (eqn.params["length"] if is_loop else 1), operands)
            if eqn.primitive.name not in _WITH_SEVERAL and len(out) == len(results):
                results = out
        marked.update(v for v, mark in zip(eqn.outvars, results, strict=True) if mark)
    return marks(jaxpr.outvars)


def _carried(scan: Any, body: Any, args: Sequence[bool]) -> list[bool]:
    """Return which arguments of a scan's body depend on the batch, in the first or in a later iteration."""
    # Stacked inputs and outputs have an extra leading dim outside the loop. jax versions differ in the scan's params.
    num_carry, num_before = (
        sum(a.aval.ndim == b.aval.ndim for a, b in zip(outside, inside, strict=True))
        for outside, inside in ((scan.outvars, body.outvars), (scan.invars, body.invars))
    )
    num_consts = num_before - num_carry
    while True:
        out = _follow(body, args, 0, 1, Counter())
        carry = [a or b for a, b in zip(args[num_consts:num_before], out[:num_carry], strict=True)]
        after = [*args[:num_consts], *carry, *args[num_before:]]
        if after == list(args):
            return after
        args = after


def _is_of_pairs(eqn: Any, rows: int) -> bool:
    """Return whether a matmul pairs all examples: `[B, d] x [d, B] -> [B, B]`, with B = `rows`."""
    contracting, batch = eqn.params["dimension_numbers"]
    for x, summed, shared in zip(eqn.invars, contracting, batch, strict=True):
        free = [size for dim, size in enumerate(x.aval.shape) if dim not in (*summed, *shared)]
        if rows not in free or any(x.aval.shape[dim] == rows for dim in (*summed, *shared)):
            return False  # e.g. the gradient of a weight, or a product per example
    return True
