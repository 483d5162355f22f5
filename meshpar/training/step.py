"""Training and evaluation steps: loss, gradients and optimizer update as a compiled program.

The engines in `meshpar.training.gradients` compute gradients. With more than one micro-step,
`reduce_gradients="each_microbatch"` reduces the gradients of every micro-step and accumulates shards, which needs the
least memory. `"once"` accumulates unreduced gradients on every device and reduces them after the loop, which needs the
least communication. Gradients of complex parameters are conjugated before the update, so that optimizers descend.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.hardware.compile_options import Options, Value, check_kind, check_options, options_for
from meshpar.hardware.compile_target import KernelChoice
from meshpar.layers.auxiliary import is_counted
from meshpar.layers.losses import (
    LOSS_WEIGHT,
    Loss,
    MicrobatchTotals,
    at_least_float32,
)
from meshpar.layers.precision import Numerics, Precision, as_precision, high_precision_ops, numerics
from meshpar.layers.remat import check_remat
from meshpar.optim.orthogonalized import UPDATES
from meshpar.optim.rounding import lost_updates
from meshpar.optim.stacked_layers import check_stacks
from meshpar.parallel.batch import StepBatch, StepBatches
from meshpar.parallel.execution import Execution, StageUses
from meshpar.sharding.context import Boundaries, clear_context_mesh, tracing
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.host_resources import check_not_forked
from meshpar.sharding.types import PyTree, tree_leaves_with_paths
from meshpar.training.accumulation import compute_params, constrained
from meshpar.training.checks import (
    check_arrays,
    check_layers,
    check_loss,
    check_parameters,
    check_precision_rules,
    may_move_activations,
)
from meshpar.training.earlier_steps import LOST_UPDATES, EarlierSteps, to_host
from meshpar.training.gradients.engine import Feature, GradientEngine, unsupported
from meshpar.training.gradients.selection import check_setup, describe, engine_of_setup
from meshpar.training.independence import REFUSALS, check_parts
from meshpar.training.model_loss import LossFn, batch_sizes, loss_of
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState, check_state

_Options = ParamSpec("_Options")


Kernels = dict[str, KernelChoice]
"""Implementations that "auto" chose or the model names, by operation."""


class _Program(abc.ABC):
    """A function of (state, batch), compiled once per setup."""

    def __init__(self, xla: Options, parts: tuple[int, str] = (1, "micro-steps")) -> None:
        self._xla, self._parts = xla, parts
        self._programs: weakref.WeakKeyDictionary[Setup, Any] = weakref.WeakKeyDictionary()
        self._batches: weakref.WeakKeyDictionary[Setup, StepBatches] = weakref.WeakKeyDictionary()
        self._calls: weakref.WeakKeyDictionary[Setup, tuple[Any, StepBatches]] = weakref.WeakKeyDictionary()

    def compile_options(self, setup: Setup) -> dict[str, Value]:
        """Return the XLA options for the devices of a setup, including the user's."""
        return options_for(setup.mesh, self._xla)

    @abc.abstractmethod
    def _jit(self, setup: Setup, traced: list[Boundaries]) -> Any:
        """Return the jitted function. Each trace of the loss function appends its `Boundaries` to `traced`."""

    def _check_loss(self, state: TrainState, batch: StepBatch) -> None:  # noqa: B027 - nothing to check by default
        """Check that the loss function may be evaluated as the step does."""

    def _prepare(self, state: TrainState, batch: PyTree) -> tuple[Any, StepBatch]:
        """Return the jitted function, and the batch in the form that it expects."""
        check_state("step(state, batch)", state)
        setup = state.setup
        if (batches := self._batches.get(setup)) is None:
            batches = StepBatches(setup.batch_sharding, setup.strategy.activations, *self._parts)
            self._batches[setup] = batches
        batch = batches.of(batch)
        if setup not in self._programs:
            check_options(self._xla)
            traced: list[Boundaries] = []
            program = self._jit(setup, traced)
            try:
                self._check_loss(state, batch)
            except Exception as error:
                if getattr(error, "code", None) not in REFUSALS:
                    program.trace(state, batch)  # report an error of the step first
                raise
            if not setup.has_free_activations and self._may_constrain_outputs(setup):
                program.trace(state, batch)  # jit reuses this trace for the call
                if not any(boundaries.num_constrained for boundaries in traced):
                    setup.unconstrained_losses.append(self)
                    program = self._jit(setup, [])
            self._programs[setup] = program
        return self._programs[setup], batch

    def _may_constrain_outputs(self, setup: Setup) -> bool:
        return setup.model.kind != "functions" and may_move_activations(setup)

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        if jax.sharding.get_abstract_mesh().empty:  # a `with` in each call would cost as much as the checks
            return self._call(state, batch)
        with clear_context_mesh():
            return self._call(state, batch)

    def _call(self, state: TrainState, batch: PyTree) -> Any:
        check_not_forked("a step", "run it")
        check_state("step(state, batch)", state)
        if (call := self._calls.get(state.setup)) is None:
            call = self._begin(state, batch)
        program, batches = call
        return program(state, batches.of(batch))

    def _begin(self, state: TrainState, batch: PyTree) -> tuple[Any, StepBatches]:
        """Prepare the first call for a setup."""
        self._prepare(state, batch)
        self._calls[state.setup] = call = self._programs[state.setup], self._batches[state.setup]
        return call

    @clear_context_mesh()
    def trace(self, state: TrainState, batch: PyTree) -> Any:
        """Return the traced program, as from `jax.jit(...).trace`. Arrays and mesh may be abstract."""
        program, batch = self._prepare(state, batch)
        return program.trace(state, batch)

    def lower(self, state: TrainState, batch: PyTree) -> Any:
        """Return the lowered program, as from `jax.jit(...).lower`. Arrays may be abstract."""
        return self.trace(state, batch).lower()


class TrainStep(_Program):
    """A training step, `(state, batch) -> (state, metrics)`. Created by `train_step`."""

    def __init__(self, loss_fn: LossFn, options: StepOptions) -> None:
        super().__init__(options.xla, options.batch_parts)
        self.loss_fn, self.options = loss_fn, options
        self._earlier: weakref.WeakKeyDictionary[Setup, EarlierSteps] = weakref.WeakKeyDictionary()
        self._kernels: weakref.WeakKeyDictionary[Setup, dict[str, Kernels]] = weakref.WeakKeyDictionary()
        self._stage_uses: weakref.WeakKeyDictionary[Setup, dict[str, StageUses | None]] = weakref.WeakKeyDictionary()

    def with_xla(self, xla: Options) -> TrainStep:
        """Return the same step with additional XLA compile options."""
        return TrainStep(self.loss_fn, dataclasses.replace(self.options, xla={**self.options.xla, **xla}))

    def _engine(self, setup: Setup) -> GradientEngine:
        return engine_of_setup(setup, self.options)

    def compile_options(self, setup: Setup) -> dict[str, Value]:
        return options_for(setup.mesh, self._xla, self._engine(setup).compile_options(describe(setup, self.options)))

    @clear_context_mesh()
    def describe(self, state: TrainState, batch: PyTree) -> Execution:
        """Return how the step executes: division of the batch, communication, saved activations and dtypes.

        With a pipeline, the step is traced to find the parameters that each stage reads.

        Args:
          state: the training state, which may be abstract.
          batch: the global batch, as arrays or shapes.
        """
        execution = describe(state.setup, self.options, batch)
        if execution.pipeline is None:
            return execution
        program, batch = self._prepare(state, batch)
        program.trace(state, batch)  # jit reuses an earlier trace
        return dataclasses.replace(execution, stage_uses=self._stage_uses[state.setup][_shapes(batch)])

    @clear_context_mesh()
    def kernels(self, state: TrainState, batch: PyTree) -> Kernels:
        """Return the implementations that "auto" chose or the model names, by operation, such as `attention`.

        Arrays may be abstract.
        """
        program, batch = self._prepare(state, batch)
        program.trace(state, batch)  # jit reuses an earlier trace
        return self._kernels[state.setup][_shapes(batch)]

    def loss_of(self, setup: Setup, traced: list[Boundaries] | None = None) -> Loss:
        """Return the loss as a function of parameters, including the losses that the model reports."""
        return loss_of(self.loss_fn, setup, traced, loss_is=self.options.loss_is)

    def _check_loss(self, state: TrainState, batch: StepBatch) -> None:
        options, setup, divided = self.options, state.setup, None
        execution = describe(setup, options)
        if execution.divides_batch:
            divided = f"{setup.strategy.label} with accumulate={options.accumulate}"
        elif options.accumulate > 1:
            divided = f"train_step(accumulate={options.accumulate})"
        is_by_device = execution.divides_batch and not execution.is_pipelined
        check_parts(self.loss_fn, options, state, batch, divided, is_by_device=is_by_device)

    def _numerics(self) -> contextlib.AbstractContextManager[Numerics]:
        return numerics(self.options.precision, self.options.remat, self.options.batch_slices)

    def _jit(self, setup: Setup, traced: list[Boundaries]) -> Any:
        check_parameters(setup, self.options.precision)
        check_setup(setup, self.options)
        names = {decision.path: decision.leaf.names for decision in setup.table.params}
        check_stacks(setup.tx, setup.trained(setup.layout.variables.params), setup.layout.opt_state, names)
        check_precision_rules(setup, self.options.precision)
        for rule in setup.strategy.activations.remat:
            check_remat(rule.value, f"remat rule `{rule.key}`: {rule.value!r}")
        return setup.jit(
            functools.partial(self._step, traced),
            (setup.shardings, setup.replicated_sharding),
            donate_argnums=0,  # the new state reuses the buffers of the old one
            in_shardings=(setup.shardings, setup.batch_shardings),
            compiler_options=dict(self.compile_options(setup)) or None,
        )

    def _may_constrain_outputs(self, setup: Setup) -> bool:
        return not describe(setup, self.options).is_by_device and super()._may_constrain_outputs(setup)

    def _call(self, state: TrainState, batch: PyTree) -> Any:
        new, metrics = super()._call(state, batch)
        self._earlier[state.setup].add(state.step, new.step, metrics)
        return new, metrics

    def read(self, metrics: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Wait for metrics that this step has returned, and return their values. The step does not read them again."""
        values = to_host(metrics)
        for earlier in self._earlier.values():
            earlier.replace(metrics, values)
        return values

    def _begin(self, state: TrainState, batch: PyTree) -> tuple[Any, StepBatches]:
        program, step_batch = self._prepare(state, batch)
        jaxpr = program.trace(state, step_batch).jaxpr.jaxpr  # jit reuses this trace for the call
        wide = high_precision_ops(jaxpr, self.options.precision.compute, state.setup.strategy.activations.dtypes)
        if wide is not None:
            warnings.warn(f"{wide.message}. To change it, {wide.fix}.", stacklevel=5)
        self._earlier[state.setup] = EarlierSteps(raises=self.options.nonfinite == "raise")
        return super()._begin(state, batch)

    def _step(
        self, traced: list[Boundaries], state: TrainState, batch: StepBatch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        setup, options = state.setup, self.options
        check_arrays(state)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        with tracing(setup.mesh, setup.strategy), self._numerics() as context, jax.named_scope("gradients"):
            loss = self.loss_of(setup, traced)
            totals = self._engine(setup).gradients(loss, options, state, batch, key)
        self._stage_uses.setdefault(setup, {})[_shapes(batch)] = context.stage_uses
        self._kernels.setdefault(setup, {})[_shapes(batch)] = context.kernels
        check_layers(setup, options, context)
        with jax.named_scope("update"):
            return _update(state, totals, options, self._loss_at(state, batch, key))

    def _loss_at(self, state: TrainState, batch: StepBatch, key: jax.Array) -> Callable[..., jax.Array]:
        """Return the loss of this batch as a function of the trainable parameters, for line searches."""
        setup, options = state.setup, self.options

        # optax's line searches pass all extra arguments of the update, and reject functions that do not take them.
        def value_fn(trained: PyTree, *_: Any, obj_fn: Any = None) -> jax.Array:
            if Feature.LOSS_AT_OTHER_PARAMS not in self._engine(setup).supports or options.accumulate > 1:
                raise unsupported(Feature.LOSS_AT_OTHER_PARAMS, setup.strategy.label)
            with tracing(setup.mesh, setup.strategy), self._numerics():
                params = setup.with_frozen(trained, state.params)
                params = compute_params(setup, params, options.precision.compute)
                return self.loss_of(setup)(params, state.extra, batch, key)[0]

        return value_fn


def _takes(
    options: Callable[_Options, StepOptions],
) -> Callable[[Callable[..., TrainStep]], Callable[Concatenate[LossFn, _Options], TrainStep]]:
    """Give a function `(loss_fn, **options)` the signature of `options`, for editors and type checkers."""

    def declare(function: Callable[..., TrainStep]) -> Callable[Concatenate[LossFn, _Options], TrainStep]:
        signature, fields = inspect.signature(function), inspect.signature(options).parameters.values()
        parameters = [signature.parameters["loss_fn"], *fields]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return declare


@_takes(StepOptions)
def train_step(loss_fn: LossFn, **options: Any) -> TrainStep:
    """Create a training step from a loss function.

    Args:
      loss_fn: `(model, batch, key) -> (loss, metrics)`. The loss is `mp.MeanLoss(total, weight)`, `mp.SumLoss(total)`
        or a scalar. Metrics are a dict of scalars. Floats are means with the weight of the loss, integers are counts.
        `model` is the NNX module, the bound Linen module, or `apply` with its parameters.
      **options: fields of `mp.StepOptions`: `accumulate`, `reduce_gradients`, `precision`, `remat`, `batch_slices`,
        `nonfinite`, `loss_is` and `xla`.

    Returns:
      `step(state, batch) -> (state, metrics)`. The step donates the buffers of its input state. Metrics are device
      scalars: `loss`, `loss_weight` (total weight of a `MeanLoss`), the loss function's own, and unless
      `nonfinite="ignore"`, `grad_norm` and `finite`. If `loss_weight` is 0, the loss is 0, and parameters and optimizer
      state do not change. Steps that train 16-bit parameters add `lost_updates`, the share of updates that rounding
      loses, and warn once.

    Raises:
      MeshparError: an invalid option. When called: a batch that is not divisible by devices and micro-steps, or a
        model that the strategy or an option does not support. With `nonfinite="raise"`, a loss or gradients that were
        not finite three calls earlier; `mp.check_finite(metrics)` checks the last steps.

    Example:
      >>> def loss_fn(model, batch, key):
      ...     error = (model(batch["x"]) - batch["y"]) ** 2
      ...     return mp.MeanLoss(error.sum(), error.size), {"largest": error.max()}
      >>> step = mp.train_step(loss_fn, accumulate=2)
      >>> state, metrics = step(state, batch)
      >>> sorted(metrics)
      ['finite', 'grad_norm', 'largest', 'loss', 'loss_weight']
    """
    check_loss("train_step", loss_fn)
    return TrainStep(loss_fn, StepOptions(**options))


class EvalStep(_Program):
    """An evaluation step, `(state, batch) -> metrics`. Created by `eval_step`."""

    def __init__(self, loss_fn: LossFn, precision: Precision, xla: Options) -> None:
        super().__init__(xla)
        self.loss_fn, self.precision = loss_fn, precision

    def _jit(self, setup: Setup, traced: list[Boundaries]) -> Any:
        return setup.jit(
            functools.partial(self._evaluate, traced),
            setup.replicated_sharding,
            in_shardings=(setup.shardings, setup.batch_shardings),
            compiler_options=dict(self.compile_options(setup)) or None,
        )

    def _evaluate(self, traced: list[Boundaries], state: TrainState, batch: StepBatch) -> dict[str, jax.Array]:
        setup = state.setup
        check_arrays(state)
        key = jax.random.wrap_key_data(state.key)
        with tracing(setup.mesh, setup.strategy), numerics(self.precision, None):
            params = compute_params(setup, state.params, self.precision.compute)
            evaluate = loss_of(self.loss_fn, setup, traced, trains=False)
            loss, (metrics, _) = evaluate(params, state.extra, batch, key)
        if LOSS_WEIGHT not in metrics:  # a scalar or a sum: the weight of a batch is its number of examples
            num_examples = max(batch_sizes(batch), default=1)
            metrics = {**metrics, LOSS_WEIGHT: jnp.asarray(num_examples, jnp.int32)}
        return {"loss": loss, **metrics}


def eval_step(loss_fn: LossFn, *, precision: Precision | None = None, xla: Options | None = None) -> EvalStep:
    """Create an evaluation step from a loss function.

    Args:
      loss_fn: as for `train_step`. Changes of the model's variables in the forward pass are discarded.
      precision, xla: as for `train_step`.

    Returns:
      `evaluate(state, batch) -> metrics`. The state is not donated. Metrics are device scalars: `loss`, the loss
      function's own, and `loss_weight`. This is the weight of the batch in a mean over several batches: the total
      weight of a `MeanLoss`, otherwise the number of examples.

    Raises:
      MeshparError: as for `train_step`.

    Example:
      >>> metrics = mp.eval_step(loss_fn)(state, batch)
      >>> float(metrics["loss_weight"])
      128.0
    """
    check_loss("eval_step", loss_fn)
    options: Options = {} if xla is None else xla
    check_kind(options)
    return EvalStep(loss_fn, as_precision(precision, "eval_step"), options)


def _shapes(batch: PyTree) -> str:
    """Return the shapes of a batch as a key."""
    return str(jax.tree.map(np.shape, batch))


# ---- The update ------------------------------------------------------------------------------------------------------


def _optimizer_update(
    setup: Setup, grads: PyTree, opt_state: PyTree, params: PyTree, **extra_args: Any
) -> tuple[PyTree, PyTree]:
    """Return the optimizer's updates and new state. Pass only the `extra_args` that the optimizer accepts."""
    update = optax.with_extra_args_support(setup.tx).update
    parameters = inspect.signature(update).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        extra_args = {name: x for name, x in extra_args.items() if name in parameters}
    try:
        with UPDATES.set(setup.updating):
            updates, new = update(grads, opt_state, params, **extra_args)
        for name, tree, like in (("state", new, opt_state), ("parameters", updates, params)):
            if jax.tree.structure(tree) != jax.tree.structure(like):  # type: ignore[operator]
                raise TypeError(f"the structure of the new {name} differs from the old")
        for (path, param), change in zip(tree_leaves_with_paths(params), jax.tree.leaves(updates), strict=True):
            if jnp.shape(change) not in ((), param.shape):
                raise TypeError(f"the update of `{path}` has shape {jnp.shape(change)} instead of {param.shape}")
        return updates, new
    except MeshparError:
        raise
    except Exception as error:
        requested = f"update {len(jax.tree.leaves(params))} parameters with their gradients"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        fix = (
            "use an optimizer whose update takes gradients, state and parameters, and by name at most value, grad, "
            "value_fn and obj_fn"
        )
        raise problem("the optimizer's update", requested, reason, fix, code="unsupported-feature") from error


def _update(
    state: TrainState, totals: MicrobatchTotals, options: StepOptions, value_fn: Callable[..., jax.Array]
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Average the accumulated gradients, run the optimizer, and return the new state and the metrics."""
    setup = state.setup
    shards = setup.named(setup.trained(setup.layout.updates))

    def mean(x: jax.Array) -> jax.Array:
        return x if totals.count == 1 else x / jnp.asarray(totals.count, x.dtype)

    loss = mean(totals.loss)
    metrics = {"loss": loss, **{name: x if is_counted(x) else mean(x) for name, x in totals.metrics.items()}}
    # With ZeRO-1 and ZeRO-2, parameters are replicated and optimizer state is sharded. Each device updates its shard,
    # and the output sharding of each new parameter causes an all-gather.
    old = constrained(setup.trained(state.params), shards)
    # For complex parameters, jax returns the conjugate of the direction of steepest ascent.
    grads = jax.tree.map(lambda g, p: jnp.conj(mean(g)).astype(p.dtype), constrained(totals.grads, shards), old)
    grads, before_update = setup.for_update(grads, state.opt_state)
    updates, opt_state = _optimizer_update(
        setup, grads, before_update, old, value=loss, grad=grads, value_fn=value_fn, obj_fn=value_fn
    )
    if (lost := lost_updates(old, updates)) is not None:
        # Counted before the update, whose result then reuses the buffers of the old parameters.
        old, metrics[LOST_UPDATES] = jax.lax.optimization_barrier((old, lost))
    params = optax.apply_updates(old, updates)
    skipped, extra = state.skipped, setup.model.after_update(totals.extra)
    conditions = [metrics[LOSS_WEIGHT] > 0] if LOSS_WEIGHT in metrics else []
    if options.nonfinite != "ignore":
        norm = optax.tree.norm(jax.tree.map(at_least_float32, grads))  # the square of a float16 above 256 overflows
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        conditions.append(finite)
        skipped = skipped + jnp.where(finite, 0, 1)
        metrics |= {"grad_norm": norm, "finite": finite}
    if conditions:
        is_applied = functools.reduce(jnp.logical_and, conditions)
        params, opt_state, extra = jax.tree.map(
            lambda new, before: jnp.where(is_applied, new, before),
            (params, opt_state, extra),
            (old, before_update, state.extra),
        )
    new = state.replace(
        step=state.step + 1,
        params=setup.with_frozen(params, state.params),
        opt_state=opt_state,
        extra=extra,
        skipped=skipped.astype(jnp.int32),
    )
    return new, metrics
