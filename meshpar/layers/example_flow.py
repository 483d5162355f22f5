"""Decide whether a traced loss is a sum over independent examples.

    batch ─► [B, ...] values with an example dim ─► sum over that dim ─► linear operations ─► loss

Engines that divide the batch evaluate the loss function on each part and add the results. This is right only if
the loss is a sum of terms that read one example each. The analysis follows the example dim through the jaxpr.
Operations that combine examples before the final sum, such as the product of all pairs in a contrastive loss or the
mean of a batch norm, are reported with their source line. Unknown operations are reported, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core, source_info_util
from jax.interpreters import partial_eval

from meshpar.layers.dim_factors import Examples, MixedExamplesError, UndecidedError, size_of
from meshpar.layers.example_rules import RULES, attention, call, custom_vjp, gather, scatter
from meshpar.layers.example_values import Combined, Value, check_distinct, constant, per_example, varying
from meshpar.sharding.jaxprs import in_scope

ROUTED = "moe", "moe_layer"
"""Named scope and function of routed experts. Their capacity and their balancing statistics are documented to be per
part, and their output `[B, T, d]` counts as a value per example."""

LAYERS = "stacked_layers"
"""Named scope of stacked layers in a trace that is examined."""


class Combination(NamedTuple):
    """Sizes of an operation that combines examples."""

    arrays: tuple[tuple[int, str], ...]
    """Number of elements and dtype of each operand that depends on the batch, and of the results."""
    runs: int
    """Number of runs of the operation in enclosing scans."""


class Examination(NamedTuple):
    """Result of the analysis of a loss function."""

    outputs: tuple[Combined | None, ...]
    """For each output the operation that makes it other than a sum over independent examples, or None."""
    in_layers: tuple[Combined, ...]
    """Operations in stacked layers that combine examples, or may do so."""
    combinations: tuple[Combination, ...]
    """All operations that combine examples, including sums."""
    divisor: float = 1.0
    """Constant divisor of the first output, a sum over examples."""
    depends: tuple[bool, ...] = ()
    """For each output whether it depends on the batch."""

    @property
    def combined(self) -> Combined | None:
        """The operation that makes the loss other than a sum over independent examples, or None."""
        return min((x for x in self.outputs if x is not None), key=lambda x: x.kind, default=None)


def examine(jaxpr: core.ClosedJaxpr, args: Sequence[Value]) -> Examination:
    """Examine a loss function.

    Args:
      jaxpr: the traced loss function. Its outputs are the total and, if it is an array, the weight.
      args: a value for each input.
    """
    needed, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True)
    flow = _Flow(frozenset(factor.tag.batch for x in args for factor in x.examples if isinstance(factor.tag, Examples)))
    values = flow.run(needed, [constant(x) for x in jaxpr.consts], args)
    outputs = tuple(value.combined or _not_a_sum(value) for value in values)
    in_layers = tuple(x for x in flow.all_combined if x.in_layers)
    divisor = values[0].divisor if values else 1.0
    depends = tuple(value.depends for value in values)
    return Examination(outputs, in_layers, tuple(flow.combinations.values()), divisor, depends)


def _not_a_sum(value: Value) -> Combined | None:
    if value.is_sum or value.is_zero or value.is_random_sum:
        return None
    why = "it is the value of a single example" if value.examples else "it does not depend on the batch"
    return Combined("undecided", why, "the loss function")


class _Flow:
    """The state of an analysis."""

    def __init__(self, batch_sizes: frozenset[int], *, checks_backward: bool = True) -> None:
        self.batch_sizes, self.checks_backward = batch_sizes, checks_backward
        self.combinations: dict[Any, Combination] = {}
        self.all_combined: list[Combined] = []
        self.where, self.in_layers, self.runs = "", False, 1

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
        """Return the values of the outputs of a jaxpr."""
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        atoms: Any = jaxpr.outvars

        def read(atom: Any) -> Value:
            return constant(atom.val) if isinstance(atom, core.Literal) else values[atom]

        outer, outer_layers = self.where, self.in_layers
        eqn: Any
        for eqn in jaxpr.eqns:
            self.in_layers = outer_layers or in_scope(eqn, LAYERS)
            self.where = source_info_util.summarize(eqn.source_info) or outer  # jax's own functions have no user's line
            is_routed = _is_routed(eqn)
            operands = [read(x) if is_routed else _after_experts(read(x), x.aval.shape) for x in eqn.invars]
            values.update(zip(eqn.outvars, self._outputs(eqn, operands, is_routed), strict=True))
        self.where, self.in_layers = outer, outer_layers
        return [_after_experts(read(x), x.aval.shape) for x in atoms]

    def inner(self, closed: Any, args: Sequence[Value]) -> list[Value]:
        """Return the outputs of an inner jaxpr."""
        jaxpr = getattr(closed, "jaxpr", closed)
        return self.run(jaxpr, [constant(x) for x in getattr(closed, "consts", ())], args)

    def backward(self) -> _Flow:
        """Return an analysis of a backward pass. Its findings are separate from the findings of the forward pass."""
        return _Flow(self.batch_sizes, checks_backward=False)

    def _outputs(self, eqn: Any, operands: Sequence[Value], is_routed: bool) -> list[Value]:
        """Return the outputs of an equation. After an operation that combines examples, the layout is a guess."""
        before = [x.combined for x in operands if x.combined is not None]
        operands = [dataclasses.replace(x, combined=None) for x in operands]
        shapes = [x.aval.shape for x in eqn.outvars]
        try:
            out, new = self._applied(eqn, operands, shapes, is_routed), None
        except Exception as error:
            kind: Any = "dependent" if isinstance(error, MixedExamplesError) else "undecided"
            is_known = isinstance(error, MixedExamplesError | UndecidedError)
            why = str(error) if is_known else f"the analysis of `{eqn.primitive.name}` failed: {error!r}"
            new = Combined(kind, why, self.where, self.in_layers)
            self.all_combined.append(new)
            self._record(eqn, operands)
            out = [_similar(operands, eqn, shape) for shape in shapes]
        # After an undecided operation the layout is a guess, so later operations prove no dependence.
        first = min(before, key=lambda x: x.kind) if before else new
        return [dataclasses.replace(x, combined=first or x.combined) for x in out]

    def _applied(
        self, eqn: Any, operands: Sequence[Value], shapes: Sequence[tuple[int, ...]], is_routed: bool
    ) -> list[Value]:
        """Apply the rule of a primitive."""
        depends = any(x.depends for x in operands)
        if is_routed:
            return [dataclasses.replace(varying(shape), is_routed=depends) for shape in shapes]
        name = eqn.primitive.name
        rule = RULES.get(name)
        if "dot_product_attention" in name:  # cuDNN's kernels
            rule = attention
        has_empty = any(0 in x.aval.shape for x in eqn.invars)
        if any(0 in shape for shape in shapes) or (not depends and (rule is None or has_empty)):
            return list(map(varying, shapes))
        if rule is None:
            raise UndecidedError(f"the operation `{name}` is not known to the analysis")
        if any(x.columns and x.examples for x in operands) and rule not in (call, custom_vjp, gather, scatter):
            raise UndecidedError("it depends on the position of an example in the batch")
        out = rule(self, eqn, operands)
        out = [out] if isinstance(out, Value) else out
        if not depends and any(x.is_random for x in operands):
            out = [dataclasses.replace(x, is_random=True) for x in out]
        for value, shape in zip(out, shapes, strict=True):
            assert tuple(map(size_of, value.dims)) == tuple(shape), (name, value.dims, shape)
            check_distinct(value)
        if any(x.is_sum for x in out) and not any(x.is_sum for x in operands) and rule not in (call, custom_vjp):
            self._record(eqn, operands)
        return out

    def _record(self, eqn: Any, operands: Sequence[Value]) -> None:
        """Store the array sizes and dtypes of an operation that combines examples."""
        arrays = [x.aval for x, value in zip(eqn.invars, operands, strict=True) if value.depends]
        arrays += [x.aval for x in eqn.outvars]
        self.combinations[eqn] = Combination(tuple((math.prod(x.shape), x.dtype.name) for x in arrays), self.runs)


def _is_routed(eqn: Any) -> bool:
    """Return whether `moe_layer` traced an equation. A user's module may have the same scope."""
    scope, function = ROUTED
    traceback = eqn.source_info.traceback
    return in_scope(eqn, scope) and (traceback is None or any(x.function_name == function for x in traceback.frames))


def _similar(operands: Sequence[Value], eqn: Any, shape: tuple[int, ...]) -> Value:
    """Return the form of an operand of this shape that has examples, or a form without examples."""
    for x, atom in zip(operands, eqn.invars, strict=True):
        if x.examples and atom.aval.shape == shape:
            return Value(x.dims)
    return varying(shape)


def _after_experts(value: Value, shape: Sequence[int]) -> Value:
    """Describe a result of routed experts outside their scope: tokens `[B, T, d]`, or a documented statistic."""
    if not value.is_routed:
        return value
    return per_example(shape) if len(shape) == 3 else varying(shape)
