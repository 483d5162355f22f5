"""Check the uses of stacked weights that an engine distributes.

    parameter [layers, ...] ─► operations that keep the distributed dims ─► scan_layers
           │
           └─► a sum over a distributed dim, an unknown operation, the loss: refused

Outside of `scan_layers` each device has a part of a stack: shards of its layers, or the layers of a pipeline stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core, source_info_util
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from meshpar.layers.losses import Loss
from meshpar.layers.scan import Layer, LayerRunner, running
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.types import PyTree, path_str
from meshpar.training.state import Setup

Axes: TypeAlias = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim that an engine distributes."""

_PASSED = "passed to scan_layers: "
"""Prefix of the `checkpoint_name` of weights that are passed to `scan_layers`."""
_ELEMENTWISE = {
    "abs", "add", "ceil", "clamp", "convert_element_type", "copy", "cos", "div", "erf", "exp", "exp2", "expm1", "floor",
    "integer_pow", "log", "log1p", "logistic", "max", "min", "mul", "name", "neg", "pow", "reduce_precision", "round",
    "rsqrt", "select_n", "sharding_constraint", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tanh",
}  # fmt: skip
_CALLS = {"closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat", "remat2"}


@dataclasses.dataclass(frozen=True)
class _Stack:
    """An array that is computed from a stack, and sharded like it."""

    path: str
    axes: Axes
    change: str = ""
    """The first unknown operation, or operation that combines or moves elements of different devices."""


def check_stacks(
    loss: Loss, setup: Setup, stacks: Mapping[str, tuple[Any, Axes]], params: PyTree, *args: Any,
    remove: str = "quantize",
) -> None:  # fmt: skip
    """Check that the loss uses stacked weights only in `scan_layers`, and changes them only within shards.

    Elsewhere the loss would receive the local weights. A penalty on all weights would be the penalty on these, and a
    norm of a matrix the norm of its shard.

    Args:
      stacks: compute dtype and distributed dims of the stacked weights by path.
      params, args: arguments of the loss. Other parameters than the stacked weights have the shapes of the model.
      remove: the setting that distributes the weights.
    """
    decisions = {decision.path: decision for decision in setup.table.params}
    paths = sorted(stacks)
    shapes = {path: jax.ShapeDtypeStruct(decisions[path].leaf.shape, stacks[path][0]) for path in paths}

    def run(stacks: dict[str, jax.Array]) -> Any:
        full = jax.tree_util.tree_map_with_path(lambda path, x: stacks.get(path_str(path), x), params)
        with running(_WithoutWeights()):
            return loss(full, *args)

    def refused(path: str, reason: str) -> MeshparError:
        where, requested = f"strategy {setup.strategy.label}, parameter `{path}`", "distribute it by layer"
        fix = "run the layers with mp.scan_layers(layer, x, params), return penalties on weights as mp.Aux(loss, {})"
        fix = f"{fix} of a layer, change weights in the layer, or remove {remove}"
        return problem(where, requested, reason, fix, "unsupported-feature")

    jaxpr = jax.make_jaxpr(run)(shapes).jaxpr
    is_used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    for path, used in zip(paths, is_used, strict=True):
        if used:
            raise refused(
                path, "the loss uses it outside of mp.scan_layers, where devices have different shards or layers"
            )
    arrays = [_Stack(path, stacks[path][1]) for path in paths]
    flow = _Flow()
    flow.run(jaxpr, arrays)
    for stack, name in flow.passed:
        found = [axes for path, (_, axes) in stacks.items() if f"/{path}".endswith(name)]
        change = stack.change or "passed on with other dims" * bool(found and stack.axes not in found)
        if change:
            reason = f"it is {change} before mp.scan_layers, where devices have different shards or layers"
            raise refused(stack.path, reason)


class _WithoutWeights(LayerRunner):
    """Runs stacked layers with zeros as their weights, so that no result depends on these."""

    def run(self, stack_path: str, layer: Layer, x: PyTree, inputs: tuple[PyTree, PyTree, PyTree]) -> PyTree:
        params, *others = inputs

        def zeros(path: Any, weight: jax.Array) -> jax.Array:
            suffix = f"/{stack_path}/{path_str(path).removesuffix('/value')}".rstrip("/")
            return jnp.zeros_like(checkpoint_name(weight, _PASSED + suffix))

        return super().run(stack_path, layer, x, (jax.tree_util.tree_map_with_path(zeros, params), *others))


class _Flow:
    """Follows stacks through a jaxpr."""

    def __init__(self) -> None:
        self.passed: list[tuple[_Stack, str]] = []
        """Stacks that are passed to `scan_layers`, and the ends of the paths under which they are passed."""

    def run(self, jaxpr: core.Jaxpr, inputs: Sequence[_Stack | None]) -> list[_Stack | None]:
        """Return the outputs that depend on stacks, and record the stacks that are passed."""
        values: dict[Any, _Stack | None] = dict(zip(jaxpr.invars, inputs, strict=True))

        def value(atom: Any) -> _Stack | None:
            return None if isinstance(atom, core.Literal) else values.get(atom)

        for eqn in jaxpr.eqns:
            operands = [value(atom) for atom in eqn.invars]
            if any(operands):
                values.update(zip(eqn.outvars, self._results(eqn, operands), strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: Any, operands: list[_Stack | None]) -> list[_Stack | None]:
        name, inner = eqn.primitive.name, [getattr(each, "jaxpr", each) for each in jaxprs_in_params(eqn.params)]
        stack = max(filter(None, operands), key=lambda stack: bool(stack.change))
        if name == "name" and eqn.params["name"].startswith(_PASSED):
            self.passed.append((stack, eqn.params["name"].removeprefix(_PASSED)))
            return [None]
        if name in _CALLS and len(inner) == 1:
            return self.run(inner[0], operands)
        if name == "scan" and _keeps_shapes(eqn, inner[0], operands):
            before = len(self.passed)
            if not any(self.run(inner[0], operands)):  # each iteration passes the same weights to `scan_layers`
                return [None] * len(eqn.outvars)
            del self.passed[before:]
        axes = None if inner or stack.change else _axes_after(eqn, operands, stack)
        if axes is not None:
            return [dataclasses.replace(stack, axes=axes)] * len(eqn.outvars)
        line = source_info_util.summarize(eqn.source_info)
        change = stack.change or f"an operand of `{name}`" + f" at {line}" * bool(line)
        changed = dataclasses.replace(stack, change=change)
        for jaxpr in inner:
            last = operands[len(operands) - len(jaxpr.invars) :]
            self.run(jaxpr, [operand and changed for operand in last])
        return [changed] * len(eqn.outvars)


def _keeps_shapes(eqn: Any, inner: Any, operands: Sequence[_Stack | None]) -> bool:
    """Return whether the body of a loop receives full stacks, and not a slice in each iteration."""
    pairs = zip(eqn.invars, inner.invars, operands, strict=True)
    return all(operand is None or outer.aval.shape == var.aval.shape for outer, var, operand in pairs)


def _axes_after(eqn: Any, operands: Sequence[_Stack | None], stack: _Stack) -> Axes | None:
    """Return the axes of a result, or None if a device cannot compute its shard from its shards of the operands."""
    shape, params, axes = eqn.invars[0].aval.shape, eqn.params, stack.axes
    distributed = [dim for dim, names in enumerate(axes) if names]
    match eqn.primitive.name:
        case name if name in _ELEMENTWISE and all(
            _is_alike(atom.aval.shape, operand, eqn.outvars[0].aval.shape, stack)
            for atom, operand in zip(eqn.invars, operands, strict=True)
        ):
            return axes
        case "reduce_sum" | "reduce_max" | "reduce_min" if not {*params["axes"]} & {*distributed}:
            return tuple(names for dim, names in enumerate(axes) if dim not in params["axes"])
        case "broadcast_in_dim" if all(
            params["shape"][params["broadcast_dimensions"][dim]] == shape[dim] for dim in distributed
        ):
            by_dim = dict(zip(params["broadcast_dimensions"], axes, strict=True))
            return tuple(by_dim.get(dim, ()) for dim in range(len(params["shape"])))
        case "transpose":
            return tuple(axes[dim] for dim in params["permutation"])
        case "slice":
            strides = params["strides"] or (1,) * len(shape)
            bounds = list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
            return axes if all(bounds[dim] == (0, shape[dim], 1) for dim in distributed) else None
        case "rev" if not {*params["dimensions"]} & {*distributed}:
            return axes
        case "concatenate" if params["dimension"] not in distributed and {
            operand and operand.axes for operand in operands
        } == {axes}:
            return axes
    return None


def _is_alike(shape: tuple[int, ...], operand: _Stack | None, result: tuple[int, ...], stack: _Stack) -> bool:
    """Return whether shards of an operand and of an elementwise result correspond.

    Other operands must be constant along distributed dims, because they are not sharded.
    """
    if not shape:
        return operand is None
    if operand is not None and operand.axes != stack.axes:
        return False
    sizes = [(size, total) for size, total, names in zip(shape, result, stack.axes, strict=True) if names]
    return all(size == (1 if operand is None else total) for size, total in sizes)
