"""Training and evaluation steps: loss, gradients and optimizer update as one compiled program.

`meshpar.training.gradients` holds the engines that compute gradients. With several micro-steps,
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
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.hardware.compile_options import Options, Value, check_kind, check_options, options_for
from meshpar.layers.auxiliary import checked, collecting, is_counted
from meshpar.layers.losses import (
    LOSS_WEIGHT,
    Evaluate,
    Loss,
    LossTerms,
    MeanLoss,
    MicrobatchTotals,
    SumLoss,
    at_least_float32,
)
from meshpar.layers.precision import Numerics, Precision, as_precision, check_bits, dot_general, numerics, wide_work
from meshpar.layers.remat import MATMUL, SECOND_SHARD, check_remat, named_in, remat_policy
from meshpar.layers.scan import is_part
from meshpar.optim.rounding import lost_updates
from meshpar.optim.stacked_layers import check_stacks
from meshpar.parallel.batch import StepBatch, as_given, rows_of
from meshpar.parallel.expected.execution import Execution, StageUses
from meshpar.sharding.activations import Boundaries, check_rules_matched, constrain_module_outputs
from meshpar.sharding.context import ambient, apart, auto_sizes, current, tracing, within
from meshpar.sharding.errors import check_cases
from meshpar.sharding.host_resources import check_not_forked, user_line
from meshpar.sharding.rules import Rules, axes_in
from meshpar.sharding.types import (
    MeshparError,
    PyTree,
    axes_of_spec,
    check_takes,
    is_spec,
    named,
    near_or,
    problem,
    tree_leaves_with_paths,
)
from meshpar.training.accumulation import compute_params, constrained
from meshpar.training.earlier_steps import LOST_UPDATES, EarlierSteps
from meshpar.training.gradients.engine import Feature, GradientEngine, unsupported
from meshpar.training.gradients.selection import check_setup, describe, engine_of_setup
from meshpar.training.independence import REFUSALS, check_parts
from meshpar.training.options import StepOptions, check_not_float16
from meshpar.training.state import Setup, TrainState, check_state

LossFn = Callable[[Any, PyTree, jax.Array], tuple[MeanLoss | SumLoss | jax.Array, dict[str, jax.Array]]]
"""(model, batch, key) -> (loss, metrics): a `MeanLoss`, a `SumLoss` or a scalar, and a dict of scalars.

Losses and metrics that the model reports (`meshpar.layers.auxiliary`) are added."""
_Options = ParamSpec("_Options")


class _Program(abc.ABC):
    """A function of (state, batch) that is compiled once per setup."""

    def __init__(self, xla: Options, parts: tuple[int, str] = (1, "micro-steps")) -> None:
        self._xla, self._parts = xla, parts
        self._programs: weakref.WeakKeyDictionary[Setup, Any] = weakref.WeakKeyDictionary()

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
        batch = StepBatch.of(batch, setup.batch_sharding, setup.strategy.activations, *self._parts)
        if setup not in self._programs:
            check_options(self._xla)
            traced: list[Boundaries] = []
            program = self._jit(setup, traced)
            try:
                self._check_loss(state, batch)
            except Exception as error:
                if getattr(error, "code", None) not in REFUSALS:
                    program.trace(state, batch)  # an error of the step itself comes first
                raise
            if not setup.has_free_activations and self._may_constrain_outputs(setup):
                program.trace(state, batch)  # jit reuses this trace for the call
                if not any(boundaries.num_constrained for boundaries in traced):
                    setup.unconstrained_losses.append(self)
                    program = self._jit(setup, [])
            self._programs[setup] = program
        return self._programs[setup], batch

    def _may_constrain_outputs(self, setup: Setup) -> bool:
        return setup.model.kind != "functions" and _may_move_activations(setup)

    @apart()
    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        check_not_forked("a step", "run it")
        program, batch = self._prepare(state, batch)
        return program(state, batch)

    @apart()
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
        self._called: weakref.WeakSet[Setup] = weakref.WeakSet()
        self._earlier: weakref.WeakKeyDictionary[Setup, EarlierSteps] = weakref.WeakKeyDictionary()
        self._stage_uses: weakref.WeakKeyDictionary[Setup, dict[str, StageUses | None]] = weakref.WeakKeyDictionary()

    def _engine(self, setup: Setup) -> GradientEngine:
        return engine_of_setup(setup, self.options)

    def compile_options(self, setup: Setup) -> dict[str, Value]:
        return options_for(setup.mesh, self._xla, self._engine(setup).compile_options(describe(setup, self.options)))

    @apart()
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

    def loss_of(self, setup: Setup, traced: list[Boundaries] | None = None) -> Loss:
        """Return the loss as a function of parameters, including the losses that the model reports."""
        return loss_of(self.loss_fn, setup, traced, loss_is=self.options.loss_is)

    def _check_loss(self, state: TrainState, batch: StepBatch) -> None:
        options, setup, divided = self.options, state.setup, None
        if self._engine(setup).divides_batch:
            divided = f"{setup.strategy.label} with accumulate={options.accumulate}"
        elif options.accumulate > 1:
            divided = f"train_step(accumulate={options.accumulate})"
        check_parts(self.loss_fn, options, state, batch, divided)

    def _numerics(self) -> contextlib.AbstractContextManager[Numerics]:
        return numerics(self.options.precision, self.options.remat, self.options.interleave)

    def _jit(self, setup: Setup, traced: list[Boundaries]) -> Any:
        _check_parameters(setup, self.options.precision)
        check_setup(setup, self.options)
        names = {decision.path: decision.leaf.names for decision in setup.table.params}
        check_stacks(setup.tx, setup.trained(setup.layout.variables.params), setup.layout.opt_state, names)
        _check_precision_rules(setup, self.options.precision)
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
        return not self._engine(setup).uses_local_batch and super()._may_constrain_outputs(setup)

    @apart()
    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        check_not_forked("a step", "run it")
        program, batch = self._prepare(state, batch)
        if state.setup not in self._called:
            self._called.add(state.setup)
            jaxpr = program.trace(state, batch).jaxpr.jaxpr  # jit reuses this trace for the call
            wide = wide_work(jaxpr, self.options.precision, state.setup.strategy.activations.dtypes)
            if wide is not None:
                warnings.warn(f"{wide.what}. To change it, {wide.fix}.", stacklevel=3)
        earlier = self._earlier.setdefault(state.setup, EarlierSteps(raises=self.options.nonfinite == "raise"))
        new, metrics = program(state, batch)
        earlier.add(state.step, new.step, metrics)
        return new, metrics

    def _step(
        self, traced: list[Boundaries], state: TrainState, batch: StepBatch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        setup, options = state.setup, self.options
        _check_state(state)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        with tracing(setup.mesh, setup.strategy), self._numerics() as context, jax.named_scope("gradients"):
            loss = self.loss_of(setup, traced)
            totals = self._engine(setup).gradients(loss, options, state, batch, key)
        self._stage_uses.setdefault(setup, {})[_shapes(batch)] = context.stage_uses
        _check_layers(setup, options, context)
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
      **options: fields of `mp.StepOptions`: `accumulate`, `reduce_gradients`, `precision`, `remat`, `interleave`,
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
        _check_state(state)
        key = jax.random.wrap_key_data(state.key)
        with tracing(setup.mesh, setup.strategy), numerics(self.precision, None):
            params = compute_params(setup, state.params, self.precision.compute)
            evaluate = loss_of(self.loss_fn, setup, traced, trains=False)
            loss, (metrics, _) = evaluate(params, state.extra, batch, key)
        if LOSS_WEIGHT not in metrics:  # a scalar or a sum: the weight of a batch is its number of examples
            num_examples = max(_batch_sizes(batch), default=1)
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


# ---- Checks ----------------------------------------------------------------------------------------------------------


def check_loss(where: str, loss_fn: Any) -> None:
    """Check that a loss function takes a model, a batch and a key."""
    fix = f"mp.{where}(lambda model, batch, key: (loss, metrics)), with a dict of metrics"
    check_takes(where, loss_fn, ("model", "batch", "key"), fix)


def _check_parameters(setup: Setup, precision: Precision) -> None:
    """Check that dtypes of parameters fit the precision, can be differentiated, and can be quantized."""
    for leaf in (decision.leaf for decision in setup.table.params):
        if leaf.is_trained and precision.compute is None:
            check_not_float16(f"train_step, parameter `{leaf.path}`", leaf.dtype)
        is_other = precision.params is not None and leaf.dtype != jnp.dtype(precision.params)
        is_quantized, is_exact = setup.strategy.quantize is not None, not jnp.issubdtype(leaf.dtype, jnp.inexact)
        check_cases(
            f"train_step, parameter `{leaf.path}` of dtype {leaf.dtype.name}", "train it", "wrong-dtype",
            (is_other and jnp.issubdtype(leaf.dtype, jnp.floating), "init_state was called with a different precision",
             f"pass precision=mp.Precision(params={precision.params!r}) to init_state"),
            (leaf.is_trained and is_exact, "integers have no gradient", "freeze it with init_state(trainable=...), or "
             "store it as an nnx.Variable, in a Linen collection, or with from_functions(keeps_state=True)"),
            (is_quantized and jnp.issubdtype(leaf.dtype, jnp.complexfloating), "the kernels quantize real numbers",
             "remove quantize, or store the real and imaginary parts separately"),
        )  # fmt: skip


def _check_precision_rules(setup: Setup, precision: Precision) -> None:
    """Check that precision rules match modules with parameters, and widen their compute dtype."""
    strategy, compute = setup.strategy, precision.compute
    paths = [decision.path for decision in setup.table.params]
    modules = {path.rpartition("/")[0] for path in paths}
    for rule in strategy.activations.precision:
        where, requested = f"precision rule `{rule.key}`", f"compute in {rule.value}"
        is_matched = any(Rules(precision={rule.key: rule.value}).dtype_in(path) for path in paths)
        reason = f"it matches none of the {len(modules)} modules that have parameters"
        fix = near_or(rule.key, modules, "write a pattern that matches the full path of a module")
        check_cases(where, requested, "unknown-name", (not is_matched, reason, fix))
        is_wider = compute is not None and jnp.dtype(rule.value).itemsize > jnp.dtype(compute).itemsize
        reason = f"it must be wider than train_step(precision=Precision(compute={compute!r}))"
        fix = 'use compute="bfloat16" and a wider rule, or remove the rule'
        check_cases(where, requested, "wrong-dtype", (not is_wider, reason, fix))
        case = strategy.quantize is not None, f"{strategy.label} gathers all weights in the compute dtype", "remove it"
        check_cases(where, requested, "conflict", case)
        check_bits(where, rule.value)


def _check_state(state: TrainState) -> None:
    """Check shapes and dtypes of arrays that may come from `state.replace`."""
    for (path, x), like in zip(tree_leaves_with_paths(state), jax.tree.leaves(state.setup.abstract), strict=True):
        if (x.shape, x.dtype) != (like.shape, like.dtype):
            requested = f"train it as {x.dtype.name}{list(x.shape)}"
            reason = f"the state was created with {like.dtype.name}{list(like.shape)}"
            fix = "load weights with mp.load_params; choose dtypes with init_state(precision=mp.Precision(params=...))"
            code = "wrong-shape" if x.shape != like.shape else "wrong-dtype"
            raise problem(f"`{path}` of the state", requested, reason, fix, code=code)


def _check_layers(setup: Setup, options: StepOptions, context: Numerics) -> None:
    """Check, after the model was traced, that `remat`, `interleave` and `matmul` matched layers and marked arrays."""
    uses_layers = options.remat is not None or options.interleave > 1
    where = f"train_step(remat={options.remat!r}, interleave={options.interleave})"
    reason = "the model marks no layer: it never calls meshpar.scan_layers"
    fix = "run its stacked layers with mp.scan_layers(layer, x, params), or use Flax's own remat"
    is_unused = uses_layers and not context.num_scans
    check_cases(where, "change how layers run", "unsupported-feature", (is_unused, reason, fix))
    pattern = options.precision.unmatched(context.matched)
    where, requested = f"Precision(matmul=...), modules `{pattern}`", "compute their matmuls in 8 bits"
    reason = "none of their matmuls calls meshpar.layers.precision.dot_general"
    fix = "write a pattern for the full path of a module, or pass dot_general=... to the layers of the model"
    check_cases(where, requested, "unknown-name", (pattern is not None, reason, fix))
    rules = [(f"remat rule `{rule.key}`", rule.value) for rule in setup.strategy.activations.remat]
    marked = sorted(context.names - {MATMUL, SECOND_SHARD})
    reason = f"the layers mark {', '.join(f'`{mark}`' for mark in marked) or 'nothing'}"
    for where, value in ((f"train_step(remat={options.remat!r})", options.remat), *rules):
        for name in () if value is None else named_in(value):
            fix = near_or(name, marked, f'mark it: jax.ad_checkpoint.checkpoint_name(x, "{name}")')
            case = name not in context.names, reason, fix
            check_cases(where, f"save arrays marked `{name}`", "unknown-name", case)


def _check_extra(before: PyTree, after: PyTree) -> None:
    """Check that the forward pass keeps structure, shapes and dtypes of the model's variables."""
    types: list[dict[str, Any]] = [
        {path: (jnp.shape(x), jnp.result_type(x)) for path, x in tree_leaves_with_paths(t)} for t in (before, after)
    ]
    for path in sorted(types[0].keys() | types[1].keys()):
        old, new = (of_tree.get(path, ((), None)) for of_tree in types)
        if old[1] is None or new[1] is None:
            reason = f"it exists only {'after' if old[1] is None else 'before'} the forward pass"
            fix = "return it from the loss function as a metric, or create it with the model (`sow` creates it later)"
        elif old[0] != new[0] or (old[1] != new[1] and jnp.promote_types(old[1], new[1]) != old[1]):
            was, now = (f"{dtype.name}{list(shape)}" for shape, dtype in (old, new))
            reason, fix = f"it is {was} before the forward pass and {now} after it", "keep its shape and dtype"
        else:
            continue
        raise problem(f"`{path}` of the model", "carry it from step to step", reason, fix, code="wrong-shape")


# ---- The loss --------------------------------------------------------------------------------------------------------


def loss_of(
    loss_fn: LossFn, setup: Setup, traced: list[Boundaries] | None = None, *, trains: bool = True,
    loss_is: str | None = None,
) -> Loss:  # fmt: skip
    """Return the user's loss as a function of parameters. In training, losses that the model reports are added.

    Each trace of the loss function appends its `Boundaries` to `traced`.
    """

    def terms(params: PyTree, extra: PyTree, examples: PyTree, key: jax.Array) -> tuple[LossTerms, PyTree]:
        with _constraining_modules(setup, examples, trains) as boundaries, collecting() as reports:
            model = setup.model.bind(params, extra)
            out = _call(loss_fn, model, examples, key)
        if traced is not None:
            traced.append(boundaries)
        if trains:
            _check_constraints(setup, boundaries)
        loss, metrics = checked(out, loss_fn, trains=trains)
        after = setup.model.collect(model)
        _check_extra(extra, after)
        reported = {name: jnp.asarray(x) for name, x in reports.metrics.items() if name not in metrics}
        added = reports.loss if trains and reports.loss is not None else 0.0
        return LossTerms.of(loss, metrics, loss_is, reported=reported, added=added), after

    if not setup.model.is_explicit:
        return Loss(terms)
    return Loss(_refusing_other_axes(setup.on_explicit_axes(terms), setup))


def _call(loss_fn: LossFn, model: Any, examples: PyTree, key: jax.Array) -> Any:
    """Call the user's loss function, and explain an unbound axis name."""
    batch = as_given(examples)
    try:
        return loss_fn(model, batch, key)
    except KeyError as error:
        if not isinstance(batch, Mapping) or not error.args or error.args[0] in batch or not _reads(error, batch):
            raise
        names, line = ", ".join(f"`{name}`" for name in batch), user_line(error)
        where, reason = f"loss function `{named(loss_fn)}`", f"the batch has the keys {names}"
        requested = f"read {error.args[0]!r}" + (f" at {line}" if line else "")
        fix = near_or(str(error.args[0]), batch, "add the key to the batch, or read one of these", list_known=False)
        raise problem(where, requested, reason, fix, code="unknown-name") from error
    except NameError as error:
        axis = re.search(r"unbound axis name: (\w+)", str(error))
        if axis is None:
            raise
        reason = "the loss function receives the global batch, so means and sums are global without a collective"
        where, requested = f"axis name `{axis[1]}` in the model", "reduce over it, as BatchNorm(axis_name=...) does"
        fix = f"remove axis_name={axis[1]!r}"
        raise problem(where, requested, reason, fix, code="unsupported-feature") from error


def _reads(error: BaseException, batch: PyTree) -> bool:
    """Return whether the function that raised an error has the batch as a local variable."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return any(value is batch for value in frame.f_locals.values())


def _refusing_other_axes(loss: Evaluate, setup: Setup) -> Evaluate:
    """Return a loss in which jax refuses collectives over mesh axes that no rule of the strategy names.

    The error then names a line of the user's code. jax 0.10 lacks `jax.sharding.no_collectives`. There, `explain` finds
    such collectives in the compiled program.
    """
    used = frozenset[str]().union(*(rules.axes for rules in setup.strategy.rules))
    unused = frozenset(axis for axis, size in setup.sizes.items() if size > 1 and axis not in used)
    no_collectives = getattr(jax.sharding, "no_collectives", None)
    if no_collectives is None or not unused:
        return loss

    def evaluate(*args: Any) -> Any:
        try:
            with no_collectives(unused):
                return loss(*args)
        except Exception as error:
            if type(error).__name__ != "ForbiddenCollectiveError":
                raise
            where, reason = f"mp.explicit(model) and {setup.strategy.label}", " ".join(str(error).split())
            requested = f"communicate over {', '.join(f'`{axis}`' for axis in sorted(unused))}, which no rule names"
            fix = "keep the sharding of arrays over that axis, or add a strategy that shards over it"
            raise problem(where, requested, reason, fix, code="unknown-axis") from error

    return evaluate


def _batch_sizes(batch: PyTree) -> set[int]:
    return {np.shape(x)[0] for x in jax.tree.leaves(rows_of(batch)) if np.ndim(x)}


def _constraining_modules(
    setup: Setup, examples: PyTree, trains: bool
) -> contextlib.AbstractContextManager[Boundaries]:
    """Apply activation rules to module outputs. If the model has no constraints, shard outputs along the batch."""
    sizes, is_explicit = _batch_sizes(examples), setup.model.is_explicit
    return constrain_module_outputs(
        max(sizes, default=0),
        shard_batch=setup.has_free_activations and not is_explicit,
        other_batch_sizes=frozenset(sizes),
        sharded_modules=setup.splitting_modules,
        dot_general=None if is_explicit else functools.partial(dot_general, narrow=False),
        policy=(lambda remat: remat_policy(remat, current().numerics.names)) if trains else None,
    )


def _may_move_activations(setup: Setup) -> bool:
    """Return whether XLA may reshard activations that have no constraints, because the parameters are sharded."""
    updates = jax.tree.leaves(setup.layout.updates, is_leaf=is_spec)
    return not setup.model.is_explicit and any(
        set(axes_of_spec(spec, setup.sizes)) & set(setup.batch_axes) for spec in updates
    )


def _check_constraints(setup: Setup, boundaries: Boundaries) -> None:
    """Check that rules matched modules, and warn if nothing constrains activations."""
    context = ambient()
    assert context is not None
    if not is_part():
        check_rules_matched(boundaries, context)
        _check_axes_used(setup, boundaries)
    is_local_batch = all(auto_sizes(context)[axis] == 1 for axis in setup.batch_axes)
    if boundaries.num_constrained or is_local_batch or not boundaries.shard_batch or not _may_move_activations(setup):
        return
    sharded = [d.path for d in setup.table.params if set(axes_of_spec(d.spec, setup.sizes)) & set(setup.batch_axes)]
    if sharded:
        axes = ", ".join(f"`{axis}`" for axis in setup.batch_axes)
        warnings.warn(
            f"the model does not constrain its activations, and {len(sharded)} parameters (`{sharded[0]}`, ...) are "
            f"sharded over {axes}, like the batch. XLA may communicate activations instead of parameters. Add "
            'mp.constrain(x, "batch", ...) between layers; mp.explain(step, state, batch) lists the communication.',
            stacklevel=2,
        )


def _check_axes_used(setup: Setup, boundaries: Boundaries) -> None:
    """Check that no mesh axis is only for activations that the model never constrains."""
    context, params = ambient(), jax.tree.leaves(setup.layout.params, is_leaf=is_spec)
    assert context is not None
    used = boundaries.constrained_axes.union(setup.batch_axes, *map(axes_of_spec, params))
    sizes, rules = auto_sizes(context), context.rules
    for axis in sorted(axis for axis in rules.axes - used if sizes.get(axis, 1) > 1):
        names = sorted(name for name in rules.names if (rule := rules.name_rule(name)) and axis in axes_in(rule.value))
        shown = ", ".join(f"`{name}`" for name in names)
        reason = (
            f"its rules shard activations named {shown}, and the model constrains none, so its devices would repeat "
        )
        reason += "the same work"
        dims = f'"batch", "{names[0]}", None' if names else '"batch", None'
        fix = f"write x = mp.constrain(x, {dims}) between layers, or use a strategy without rules for this axis"
        requested = "divide the work over it"
        raise problem(f"mesh axis `{axis}` ({sizes[axis]})", requested, reason, fix, code="unmatched-rule")


# ---- The update ------------------------------------------------------------------------------------------------------


def _optimizer_update(
    setup: Setup, grads: PyTree, opt_state: PyTree, params: PyTree, **extra_args: Any
) -> tuple[PyTree, PyTree]:
    """Return the optimizer's updates and new state. Pass only the `extra_args` that the optimizer takes."""
    update = optax.with_extra_args_support(setup.tx).update
    parameters = inspect.signature(update).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        extra_args = {name: x for name, x in extra_args.items() if name in parameters}
    try:
        with within(updates=setup.updating):
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
    # and the output sharding of the new parameters causes one all-gather each.
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
