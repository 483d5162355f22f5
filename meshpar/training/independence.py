"""Check that an engine may divide the batch: the loss is a sum over independent examples.

The loss function is traced once more, on a single device, and `meshpar.layers.example_flow` follows the examples.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh

from meshpar.layers.example_flow import LAYERS, Examination, examine
from meshpar.layers.example_values import Combined, is_exact, per_example, varying
from meshpar.layers.losses import SUM_OVER_PARTS, EqualMean, LossTerms, MeanLoss, ScalarLoss, SumLoss
from meshpar.layers.precision import Precision, cast_floating, numerics
from meshpar.layers.scan import LayerRunner, running
from meshpar.parallel.batch import as_given, shape_of
from meshpar.sharding.constraints import with_auto_types
from meshpar.sharding.context import OTHER_MESH, tracing
from meshpar.sharding.errors import MeshparError, check_cases, problem
from meshpar.sharding.rules import replicated
from meshpar.sharding.types import AnyMesh, PyTree, path_str
from meshpar.training.options import StepOptions
from meshpar.training.state import TrainState

REFUSALS = "dependent-examples", "undecided-examples", "ambiguous-loss"
"""Codes of the errors for a loss that may not be evaluated on parts of the batch."""
LossFn = Callable[[Any, PyTree, jax.Array], tuple[Any, dict[str, Any]]]


def traced_alone(
    loss_fn: LossFn,
    options: StepOptions,
    state: TrainState,
    batch: PyTree,
    read: Callable[[Any], PyTree],
    *,
    with_variables: bool = False,
) -> core.ClosedJaxpr:
    """Return the forward pass on a batch of shapes, traced for a single device. `read` selects parts of the loss.

    `with_variables` adds the model's variables after the forward pass to the outputs.

    Kernels that distribute work may skip some of it, such as ring attention with a causal mask. On a single device they
    compute all of it. A model that passes its mesh to `jax.shard_map` can only be traced on the mesh of the step.
    """
    setup = state.setup

    def traced_on(mesh: AnyMesh) -> core.ClosedJaxpr:
        def loss(params: PyTree, extra: PyTree, examples: PyTree, key_data: jax.Array) -> PyTree:
            model = setup.model.bind(cast_floating(params, options.precision.compute), extra)
            loss = read(loss_fn(model, examples, jax.random.wrap_key_data(key_data))[0])
            return (loss, setup.model.collect(model)) if with_variables else loss

        def on_mesh(*args: Any) -> PyTree:
            with tracing(mesh, setup.strategy), numerics(options.precision, None):
                return (setup.on_explicit_axes(loss) if is_explicit else loss)(*args)

        params, extra, key = jax.eval_shape(lambda *x: x, *with_auto_types((state.params, state.extra, state.key)))
        return jax.make_jaxpr(on_mesh)(params, extra, batch, key)

    is_explicit = setup.model.is_explicit and with_variables
    if is_explicit:
        return traced_on(setup.mesh)
    try:
        sizes = (1,) * len(setup.mesh.axis_names)
        return traced_on(AbstractMesh(sizes, setup.mesh.axis_names, axis_types=setup.mesh.axis_types))
    except MeshparError as error:
        if error.code != OTHER_MESH:
            raise
        return traced_on(setup.mesh)


class _MarkedLayers(LayerRunner):
    def run(self, stack_path: str, layer: Any, x: Any, inputs: Any) -> Any:
        with jax.named_scope(LAYERS):
            return super().run(stack_path, layer, x, inputs)


def arrays_of(terms: LossTerms) -> tuple[jax.Array, ...]:
    """Return the total of a loss and, if it is an array, its weight."""
    loss = terms.loss
    if isinstance(loss, MeanLoss):
        return loss.total, loss.weight  # type: ignore[return-value]
    if isinstance(loss, EqualMean) and loss.weight is not None:
        return (loss.value * loss.weight,)
    return (loss.total if isinstance(loss, SumLoss) else loss.value,)


def examined(
    loss_fn: LossFn,
    options: StepOptions,
    state: TrainState,
    batch: PyTree,
    read: Callable[[LossTerms], tuple[jax.Array, ...]] = arrays_of,
) -> Examination:
    """Examine the loss of a step. `batch` is the batch of a step, or its shapes, and `read` selects the arrays."""
    return _examined_and_traced(loss_fn, options, state, batch, read)[0]


def _examined_and_traced(
    loss_fn: LossFn,
    options: StepOptions,
    state: TrainState,
    batch: PyTree,
    read: Callable[[LossTerms], tuple[jax.Array, ...]],
) -> tuple[Examination, core.ClosedJaxpr]:
    """Examine the loss of a step. Return its trace too, whose outputs are arrays of the loss and the variables."""
    batch = as_given(jax.tree.map(shape_of, batch))
    options = dataclasses.replace(options, precision=without_matmul(options.precision))

    def arrays(loss: Any) -> PyTree:
        return read(LossTerms.of(loss, {}, options.loss_is))

    with running(_MarkedLayers()):
        traced = traced_alone(loss_fn, options, state, batch, arrays, with_variables=True)
    outputs = traced.jaxpr.outvars[: len(traced.jaxpr.outvars) - len(jax.tree.leaves(state.extra))]
    jaxpr = core.ClosedJaxpr(traced.jaxpr.replace(outvars=outputs), traced.consts)
    rules = state.setup.strategy.activations
    before = state.params, state.extra
    return examined_trace(jaxpr, before, batch, lambda path: rules.input_rule(path) is replicated), traced


def without_matmul(precision: Precision) -> Precision:
    """Return a precision without 8-bit matmuls, whose scales are statistics of all examples, but only round."""
    return dataclasses.replace(precision, matmul=None)


def examined_trace(
    jaxpr: core.ClosedJaxpr,
    before: PyTree,
    batch: PyTree,
    is_replicated: Callable[[str], bool] = lambda path: False,
    *,
    zero: int | None = None,
) -> Examination:
    """Determine which operations of a traced loss combine examples of the batch.

    Args:
      jaxpr: a function of the arrays in `before`, the batch, and other arrays, that returns `arrays_of` a loss.
      before, batch: arguments of the function, or their shapes.
      is_replicated: function of a path, True for a leaf of the batch without a batch dim.
      zero: index of an array in `before` that is zero.
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    is_example = [bool(x.shape) and not is_replicated(path_str(path)) for path, x in leaves]
    sizes = [x.shape[0] for (_, x), example in zip(leaves, is_example, strict=True) if example]
    num_examples = min(sizes, default=1)
    values = [
        per_example(x.shape, num_examples) if example else varying(x.shape)
        for (_, x), example in zip(leaves, is_example, strict=True)
    ]
    start = len(jax.tree.leaves(before))
    inputs = [varying(x.aval.shape) for x in jaxpr.jaxpr.invars]
    inputs[start : start + len(values)] = values
    if zero is not None:
        inputs[zero] = dataclasses.replace(inputs[zero], is_zero=True)
    return examine(jaxpr, inputs)


def check_parts(
    loss_fn: LossFn, options: StepOptions, state: TrainState, batch: PyTree, divided: str | None,
    *, is_by_device: bool = False,
) -> None:  # fmt: skip
    """Check that the loss, or each layer with `batch_slices`, may be evaluated on parts of the batch.

    Args:
      loss_fn, options, state: the step and its state.
      batch: the batch of a step.
      divided: name of the option that divides the batch, or None if only `batch_slices` does.
      is_by_device: whether devices or groups update the model's variables from their examples.
    """
    if options.loss_is == SUM_OVER_PARTS or (divided is None and options.batch_slices == 1):
        return

    def read(terms: LossTerms) -> tuple[jax.Array, ...]:  # engines refuse scalars themselves
        return () if isinstance(terms.loss, ScalarLoss) and divided is not None else arrays_of(terms)

    result, traced = _examined_and_traced(loss_fn, options, state, batch, read)
    combined, is_layer = result.combined, divided is None
    if divided is None:
        divided = f"train_step(batch_slices={options.batch_slices})"
        combined = min(result.in_layers, key=lambda x: x.kind, default=None)
    elif combined is None and options.loss_is is None and result.divisor > 1:
        _check_not_a_mean(loss_fn, options, state, batch, result.divisor, divided)
    if combined is None or (combined.kind == "undecided" and options.loss_is is not None):
        if options.accumulate > 1:
            _check_variables(traced.jaxpr, state, batch, divided)
        if is_by_device:
            _check_averages(traced, loss_fn, options, state, batch, divided)
        return
    raise _refusal(combined, divided, is_weight=combined in result.outputs[1:], is_layer=is_layer)


def _check_not_a_mean(
    loss_fn: LossFn, options: StepOptions, state: TrainState, batch: PyTree, divisor: float, divided: str
) -> None:
    """Check that the total was not divided by the number of examples, which a second trace shows."""
    sizes = {x.shape[0] for x in jax.tree.leaves(as_given(jax.tree.map(shape_of, batch))) if x.shape}
    if not any(divisor % size == 0 for size in sizes if size > 1):
        return
    doubled = examined(loss_fn, options, state, _doubled(state, batch))
    reason = f"the total is divided by {divisor:g}, which grows with the number of examples"
    fix = "return the sum as the total: mp.MeanLoss(losses.sum(), losses.size)"
    case = doubled.divisor == 2 * divisor, reason, fix
    check_cases(f"MeanLoss or SumLoss, under {divided}", "add the totals of parts of the batch", "ambiguous-loss", case)


def _doubled(state: TrainState, batch: PyTree) -> PyTree:
    """Return the shapes of a batch with twice as many examples."""
    rules = state.setup.strategy.activations

    def double(path: Any, x: Any) -> Any:
        is_kept = not x.shape or rules.input_rule(path_str(path)) is replicated
        return x if is_kept else jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)

    return jax.tree_util.tree_map_with_path(double, as_given(jax.tree.map(shape_of, batch)))


def _examined_variable(traced: core.ClosedJaxpr, state: TrainState, batch: PyTree, index: int) -> Examination:
    """Examine the change of a variable, whose value before the step counts as zero."""
    num_variables, before = len(jax.tree.leaves(state.extra)), (state.params, state.extra)
    outputs = traced.jaxpr.outvars[-num_variables:][index]
    jaxpr = core.ClosedJaxpr(traced.jaxpr.replace(outvars=[outputs]), traced.consts)
    rules, zero = state.setup.strategy.activations, len(jax.tree.leaves(state.params)) + index
    batch = as_given(jax.tree.map(shape_of, batch))
    return examined_trace(jaxpr, before, batch, lambda path: rules.input_rule(path) is replicated, zero=zero)


def _update_without_batch(traced: core.ClosedJaxpr, state: TrainState, index: int) -> str | None:
    """Return the equations of a variable's new value, or None if there are none or they read the batch.

    They differ between batches of two sizes if the new value depends on the number of examples.
    """
    num_variables, before = len(jax.tree.leaves(state.extra)), len(jax.tree.leaves(state.params))
    first = len(traced.jaxpr.outvars) - num_variables
    wanted = [number == first + index for number in range(len(traced.jaxpr.outvars))]
    reduced, used = partial_eval.dce_jaxpr(traced.jaxpr, wanted)
    reads_batch = any(used[before + num_variables : -1])  # the last input is the random key
    return None if reads_batch or not reduced.eqns else re.sub(r" at 0x[0-9a-f]+", "", str(reduced))


def _check_averages(
    traced: core.ClosedJaxpr, loss_fn: LossFn, options: StepOptions, state: TrainState, batch: PyTree, divided: str
) -> None:
    """Check that the mean of a variable over devices, or the maximum of integers, is its value for the global batch."""
    variables = jax.tree_util.tree_flatten_with_path(state.extra)[0]

    @functools.cache
    def doubled() -> tuple[core.ClosedJaxpr, TrainState, PyTree]:
        shapes = _doubled(state, batch)
        return _examined_and_traced(loss_fn, options, state, shapes, arrays_of)[1], state, shapes

    for index, (path, x) in enumerate(variables):
        update = _examined_variable(traced, state, batch, index)
        combined, is_integer = update.outputs[0], is_exact(x.dtype)
        if not update.depends[0]:
            text = _update_without_batch(traced, state, index)
            if text is None or text == _update_without_batch(doubled()[0], state, index):
                continue
        elif is_integer and combined is not None and combined.why.startswith("`reduce_max`"):
            continue
        elif (
            combined is None and not is_integer and update.divisor > 1
            and _examined_variable(*doubled(), index).divisor == 2 * update.divisor
        ):  # fmt: skip
            continue
        if combined is not None and combined.kind == "undecided" and options.loss_is is not None:
            continue
        added = "a sum over the examples" if update.depends[0] else "the number of examples"
        why = f"it is updated with {added}" if combined is None else combined.why
        reason = (
            f"devices update it from their examples, and their {'maximum' if is_integer else 'mean'} is another value"
        )
        fix = (
            'use reduce_gradients="each_microbatch" without quantize, return the value as a metric, or accept the '
            f'values of devices with train_step(..., loss_is="{SUM_OVER_PARTS}")'
        )
        where = f"`{path_str(path)}` of the model, under {divided}"
        requested = "carry its value for the global batch to the next step"
        raise problem(where, requested, f"{reason}: {why}", fix, "dependent-examples")


def _check_variables(jaxpr: core.Jaxpr, state: TrainState, batch: PyTree, divided: str) -> None:
    """Check that the loss reads no variable that an earlier micro-step has updated from its examples."""
    structs, rules = as_given(jax.tree.map(shape_of, batch)), state.setup.strategy.activations
    variables = jax.tree_util.tree_flatten_with_path(state.extra)[0]
    before = len(jax.tree.leaves(state.params))
    is_example = [
        bool(x.shape) and rules.input_rule(path_str(path)) is not replicated
        for path, x in jax.tree_util.tree_flatten_with_path(structs)[0]
    ]
    num_arrays = len(jaxpr.outvars) - len(variables)

    def inputs_of(*outputs: int) -> tuple[list[bool], list[bool]]:
        """Return the variables and the leaves of the batch that some outputs depend on."""
        wanted = [i in outputs for i in range(len(jaxpr.outvars))]
        used = partial_eval.dce_jaxpr(jaxpr, wanted)[1][before:]
        return used[: len(variables)], used[len(variables) : len(variables) + len(is_example)]

    in_loss, _ = inputs_of(*range(num_arrays))
    for i, (path, _) in enumerate(variables):
        if not in_loss[i]:
            continue
        leaves = inputs_of(num_arrays + i)[1]
        if any(used and example for used, example in zip(leaves, is_example, strict=True)):
            why = "the loss reads this variable, which each micro-step updates from its examples"
            raise _refusal(Combined("dependent", why, f"`{path_str(path)}` of the model"), divided)


def _refusal(combined: Combined, divided: str, *, is_weight: bool = False, is_layer: bool = False) -> Exception:
    where, requested = f"{combined.where}, under {divided}", "evaluate the loss on parts of the batch"
    parts = 'accept that each part computes its own value with train_step(..., loss_is="sum_over_parts")'
    if combined.kind == "dependent":
        reason = f"the loss combines examples: {combined.why}"
        fix = f"use ddp() or fsdp() with accumulate=1, which evaluate it on the global batch, or {parts}"
        if is_layer:
            reason, fix = f"a layer combines examples: {combined.why}", f"use batch_slices=1, or {parts}"
        if is_weight:
            reason = f"the weight of the MeanLoss is not a sum over examples: {combined.why}"
            fix = "return a sum as the weight, such as mask.sum(); the loss is 0 if it is 0"
        return problem(where, requested, reason, fix, "dependent-examples")
    reason = f"the loss may not be a sum over independent examples: {combined.why}"
    fix = f'if it is such a sum, write train_step(..., loss_is="sum_over_examples"); or {parts}'
    return problem(where, requested, reason, fix, "undecided-examples")
