"""train_step and eval_step: loss, gradients, accumulation and update as one compiled program.

Where the gradients of several micro-steps are reduced is the caller's choice. With
`reduce_gradients="each_microbatch"` XLA reduces the gradients of every micro-step and the sums are kept in shards:
least memory. With `"once"` every device sums its own gradients, replicated, and one reduction follows the loop: least
traffic. `engines/` holds the ways gradients are made. Gradients of complex parameters are conjugated before the update,
so that optimizers go downhill."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from meshpar.hardware.compile_options import Options, Value, check_kind, check_options, options_for
from meshpar.layers.auxiliary import checked, collecting, is_counted
from meshpar.layers.losses import LOSS_WEIGHT, Evaluate, Loss, LossTerms, MeanLoss, MicrobatchTotals, SumLoss
from meshpar.layers.precision import Numerics, Precision, as_precision, check_bits, dot_general, numerics, wide_work
from meshpar.layers.remat import MATMUL, SECOND_SHARD, check_remat, named_in, remat_policy
from meshpar.layers.scan import is_part
from meshpar.parallel.batch import as_given, as_rows, check_batch, lying, resharded, without_whole
from meshpar.sharding.activations import check_rules_matched, constrain_module_outputs
from meshpar.sharding.constraints import with_auto_types
from meshpar.sharding.context import ambient, apart, auto_sizes, current, tracing, within
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import (
    MeshparError,
    PyTree,
    axes_of_spec,
    check_takes,
    is_spec,
    near_or,
    problem,
    tree_leaves_with_paths,
    without_axes,
)
from meshpar.training.accumulation import compute_params, constrained, wide
from meshpar.training.gradients.engine import Feature, unsupported
from meshpar.training.gradients.selection import check_setup, engine_of
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState, check_state

LossFn = Callable[[Any, PyTree, jax.Array], tuple[MeanLoss | SumLoss | jax.Array, dict[str, jax.Array]]]
"""(model, batch, key) -> (loss, metrics): a `MeanLoss`, a `SumLoss` or a scalar, and a dict of scalars.

Losses and metrics that the model reports (`meshpar.layers.auxiliary`) are added."""


class _Program:
    """A function of (state, batch), compiled once for each setup and called with little host work."""

    def __init__(self) -> None:
        self._jitted: weakref.WeakKeyDictionary[Setup, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._checked: weakref.WeakKeyDictionary[Setup, set[Any]] = weakref.WeakKeyDictionary()
        self._told: weakref.WeakSet[Setup] = weakref.WeakSet()

    def jitted(self, state: TrainState, batch: PyTree) -> Any:
        """The jitted function for this state's setup; the batch is checked when its shapes or dtypes are new."""
        setup, rules = state.setup, state.setup.strategy.activations
        programs = self._jitted.setdefault(setup, {})
        of_leaves = jax.tree.structure(batch) if rules.inputs else None  # else one layout is that of every leaf
        found = programs.get(of_leaves)
        if found is None:
            check_options(self._xla)
            lies = lying(batch, setup.batch_sharding)
            found = programs[of_leaves] = self._jit(setup, self.compile_options(setup), lies)
            self._checked.setdefault(setup, set())
        shapes = of_leaves, tuple((np.shape(x), getattr(x, "dtype", None)) for x in jax.tree.leaves(batch))
        if shapes not in self._checked[setup]:
            check_batch(batch, setup.batch_sharding, self._num_micro_steps, self._num_slices, rules)
            self._checked[setup].add(shapes)
        return found

    _num_micro_steps = _num_slices = 1
    _xla: Options = MappingProxyType({})

    def compile_options(self, setup: Setup) -> dict[str, Value]:
        """XLA's options by which the program is compiled for the devices of this setup, the user's among them."""
        return options_for(setup.mesh, self._xla)

    def _jit(self, setup: Setup, compile_options: Options, batch: PyTree) -> Any:
        raise AssertionError("a program says how it is jitted")

    def _taking(self, state: TrainState, batch: PyTree) -> tuple[Any, PyTree]:
        """Return the jitted function, and the batch in the layout that it takes."""
        check_state("step(state, batch)", state)
        sharding = state.setup.batch_sharding
        batch = with_auto_types(as_rows(batch, sharding, state.setup.strategy.activations))
        program = self.jitted(state, batch)  # which checks the batch
        return program, resharded(batch, sharding)

    @apart()
    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        program, batch = self._taking(state, batch)
        if state.setup not in self._told:
            self._told.add(state.setup)
            self._tell(state.setup, _traced(program.trace, state, batch))
        return program(state, batch)

    def _tell(self, setup: Setup, traced: Any) -> None:
        """Before the first step, what its trace shows to be unlike what was asked. The call uses the same trace."""

    @apart()
    def trace(self, state: TrainState, batch: PyTree) -> Any:
        """The traced program, as `jax.jit(...).trace` gives it; arrays may be abstract, and the mesh too."""
        program, batch = self._taking(state, batch)
        return _traced(program.trace, state, batch)

    @apart()
    def lower(self, state: TrainState, batch: PyTree) -> Any:
        """Return the lowered program, as from `jax.jit(...).lower`. Arrays may be abstract."""
        program, batch = self._taking(state, batch)
        return _traced(program.lower, state, batch)


def _traced(trace: Callable[[TrainState, PyTree], Any], state: TrainState, batch: PyTree) -> Any:
    with contextlib.suppress(_LaysNothingOut):
        return trace(state, batch)
    return trace(state, batch)


class TrainStep(_Program):
    """A training step, `(state, batch) -> (state, metrics)`. Made by `train_step`."""

    def __init__(self, loss_fn: LossFn, options: StepOptions) -> None:
        super().__init__()
        self.loss_fn, self.options = loss_fn, options
        self._num_micro_steps, self._num_slices, self._xla = options.accumulate, options.interleave, options.xla

    def compile_options(self, setup: Setup) -> dict[str, Value]:
        engine = engine_of(setup.strategy, self.options, setup.batch_axes)
        return options_for(setup.mesh, self._xla, engine.compile_options(setup, self.options))

    def _tell(self, setup: Setup, traced: Any) -> None:
        wide = wide_work(traced.jaxpr.jaxpr, self.options.precision, setup.strategy.activations.dtypes)
        if wide is not None:
            warnings.warn(f"{wide}. To change it, {wide.fix}.", stacklevel=4)

    def loss_of(self, setup: Setup) -> Loss:
        """The loss of some rows, with what the model adds to it."""
        return loss_of(self.loss_fn, setup, loss_is=self.options.loss_is)

    def _jit(self, setup: Setup, compile_options: Options, batch: PyTree) -> Any:
        _check_params_dtype(setup, self.options.precision)
        _check_slopes(setup)
        check_setup(setup, self.options, batch)
        _check_wider(setup, self.options.precision)
        _check_complex(setup)
        for rule in setup.strategy.activations.remat:
            check_remat(rule.value, f"remat rule `{rule.key}`: {rule.value!r}")
        return setup.jit(
            self._step,
            (setup.shardings, setup.whole),
            donate_argnums=0,  # the old state's buffers become the new one's: one copy of the state, not two
            in_shardings=(setup.shardings, batch),
            compiler_options=dict(compile_options) or None,
        )

    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        """What happens in a step, in order."""
        setup, options = state.setup, self.options
        _check_state(state)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        engine = engine_of(setup.strategy, options, setup.batch_axes)
        numbers = numerics(options.precision, options.remat, options.interleave)
        with tracing(setup.mesh, setup.strategy), numbers as context, jax.named_scope("gradients"):
            sums = engine.gradients(self.loss_of(setup), options, state, batch, key)
        _check_layers(options, context)
        _check_named(setup, options, context)
        with jax.named_scope("update"):
            return _update(state, sums, options, _value_fn(self, state, batch, key))


def train_step(
    loss_fn: LossFn,
    *,
    accumulate: int = 1,
    reduce_gradients: Literal["each_microbatch", "once"] = "each_microbatch",
    precision: Precision | None = None,
    remat: str | None = None,
    interleave: int = 1,
    nonfinite: Literal["raise", "skip", "ignore"] = "raise",
    loss_is: Literal["mean_over_examples"] | None = None,
    xla: Options | None = None,
) -> TrainStep:
    """Make a training step from a loss.

    Args:
      loss_fn: (model, batch, key) -> (loss, metrics). The loss is `mp.MeanLoss(total, weight)`, `mp.SumLoss(total)` or
        a scalar. Metrics are a dict of scalars: floats are means, with the weight of the loss, and integers are counts.
        `model` is what the adapter promised: the NNX module, the bound Linen module, or `apply` with parameters.
      accumulate: micro-steps that share one update; every device keeps its own rows.
      reduce_gradients: "each_microbatch" reduces the gradients of every micro-step into shards; "once" keeps replicated
        sums and reduces after the loop. The second gathers sharded parameters once and holds them replicated, too, and
        gives the loss a device's own rows only; `key` and an NNX module's own random streams then differ by device.
      precision: dtypes of parameters, compute and gradient reduction.
      remat: what the layers that the model runs by `meshpar.scan_layers` keep for the backward pass, which makes the
        rest again. "full": their input; "dots": what matmuls with weights give, too; "minimal": and what attention
        gives; "all_dots": what all matmuls give; "save:NAMES": what the model marks by `checkpoint_name` with one of
        these names, joined by commas; "offload:NAMES": the same in pinned memory of the host. `+` joins several. The
        shipped decoders mark `query`, `key`, `value`, `attention`, `attention_out`, `gate`, `up` and `mlp_out`.
      interleave: slices of each device's rows that layers run beside each other, so that messages of one (of tensor
        parallelism, or to experts) hide behind matmuls of another, at the price of a gradient reduction for each
        slice; under stages of each microbatch's rows, at none. Means that a layer takes over rows, as routers do, are
        then over slices; it draws other numbers for each by typed keys in `scan_layers(extra=...)` only.
      nonfinite: what to do when loss or gradients are not finite. "skip" leaves the update out and counts it in
        `state.skipped`; "raise" does the same, and `fit` raises when it sees the metric; "ignore" does not look.
      loss_is: "mean_over_examples" states that a scalar loss is a mean over examples that all count the same. Without
        it, micro-steps, stages, quantized gradients and `reduce_gradients="once"` refuse a scalar, because the mean of
        the means of unequal parts is not the mean of the batch.
      xla: compile options, names of XLA's flags without dashes; they join and override `compile_options`.

    Returns:
      `step(state, batch) -> (state, metrics)`. The state given is donated. Metrics are device scalars: the loss,
      `grad_norm` (not with "ignore"), `finite`, `loss_weight` (of a `MeanLoss`, its total weight), and the loss
      function's own. If `loss_weight` is 0, the loss is 0 and parameters and optimizer state do not change.

    Raises:
      ValueError: an option that does not exist; when called, a batch that does not divide.
    """
    check_loss("train_step", loss_fn)
    options = StepOptions(
        accumulate=accumulate,
        reduce_gradients=reduce_gradients,
        precision=as_precision(precision, "train_step"),
        remat=remat,
        interleave=interleave,
        nonfinite=nonfinite,
        loss_is=loss_is,
        xla={} if xla is None else xla,
    )
    return TrainStep(loss_fn, options)


class EvalStep(_Program):
    """An evaluation step, `(state, batch) -> metrics`. Made by `eval_step`."""

    def __init__(self, loss_fn: LossFn, precision: Precision, xla: Options) -> None:
        super().__init__()
        self.loss_fn, self.precision, self._xla = loss_fn, precision, xla

    def _jit(self, setup: Setup, compile_options: Options, batch: PyTree) -> Any:
        return setup.jit(
            self._evaluate,
            setup.whole,
            in_shardings=(setup.shardings, batch),
            compiler_options=dict(compile_options) or None,
        )

    def _evaluate(self, state: TrainState, batch: PyTree) -> dict[str, jax.Array]:
        setup = state.setup
        _check_state(state)
        key = jax.random.wrap_key_data(state.key)
        with tracing(setup.mesh, setup.strategy), numerics(self.precision, None):
            params = compute_params(setup, state.params, self.precision.compute)
            loss, (metrics, _) = loss_of(self.loss_fn, setup, trains=False)(params, state.extra, batch, key)
        if LOSS_WEIGHT not in metrics:  # a scalar or a sum: batches count by their number of examples
            num_rows = max((np.shape(x)[0] for x in jax.tree.leaves(without_whole(batch)) if np.ndim(x)), default=1)
            metrics = {**metrics, LOSS_WEIGHT: jnp.asarray(num_rows, jnp.int32)}
        return {"loss": loss, **metrics}


def eval_step(loss_fn: LossFn, *, precision: Precision | None = None, xla: Options | None = None) -> EvalStep:
    """Make an evaluation step: `evaluate(state, batch) -> metrics`; the state is not donated.

    Metrics contain `loss` and `loss_weight`, the weight with which the batch's means enter the mean of several batches:
    that of a `MeanLoss`, and otherwise the number of examples.

    Args:
      loss_fn: as for `train_step`. What the forward pass changes in the model is thrown away.
      precision, xla: as for `train_step`.
    """
    check_loss("eval_step", loss_fn)
    options: Options = {} if xla is None else xla
    check_kind(options)
    return EvalStep(loss_fn, as_precision(precision, "eval_step"), options)


def _check_layers(options: StepOptions, context: Numerics) -> None:
    """What is asked of layers has found some, and the names of what they are to keep."""
    for asked, spec, otherwise in (
        (f"remat={options.remat!r}" * bool(options.remat), "recompute layers in the backward pass", "Flax's own"),
        (f"interleave={options.interleave}" * (options.interleave > 1), "run layers on slices of the rows", "1"),
    ):
        if asked and not context.num_scans:
            exists = "the model marks no layer: it never calls meshpar.scan_layers"
            fix = f"run its stacked layers by mp.scan_layers(layer, x, params), or use {otherwise}"
            raise problem(f"train_step({asked})", spec, exists, fix)
    if (pattern := options.precision.unmatched(context.matched)) is not None:
        raise problem(
            f"Precision(matmul=...), modules `{pattern}`",
            "compute their matmuls in 8 bits",
            "none of their matmuls goes through meshpar.layers.precision.dot_general",
            "write a pattern of a module's whole path, as r'layers/mlp/.*', give the model's own layers "
            "dot_general=meshpar.layers.precision.dot_general, or leave matmul out",
        )


def _check_named(setup: Setup, options: StepOptions, context: Numerics) -> None:
    """What is to be kept of layers by name is marked in them."""
    rules = [(f"remat rule `{rule.key}`", rule.value) for rule in setup.strategy.activations.remat]
    for where, remat in ((f"train_step(remat={options.remat!r})", options.remat), *rules):
        for name in () if remat is None else named_in(remat):
            if name not in context.names:
                marked = context.names - {MATMUL, SECOND_SHARD}
                exists = f"they mark {', '.join(f'`{one}`' for one in sorted(marked)) or 'nothing'}"
                fix = near_or(name, marked, f'mark it: jax.ad_checkpoint.checkpoint_name(x, "{name}")')
                raise problem(where, f"keep what the layers mark as `{name}`", exists, fix)


def _check_wider(setup: Setup, precision: Precision) -> None:
    """Rules of precision name modules that have parameters, and change how they compute."""
    strategy, compute = setup.strategy, precision.compute
    paths = [decision.path for decision in setup.table.params]
    for rule in strategy.activations.precision:
        where, asked = f"precision rule `{rule.key}`", f"compute in {rule.value}"
        if not any(Rules(precision={rule.key: rule.value}).dtype_in(path) for path in paths):
            modules = {path.rpartition("/")[0] for path in paths}
            exists = f"it matches no module of the {len(modules)} that have parameters"
            raise problem(where, asked, exists, near_or(rule.key, modules, "write a pattern of a module's whole path"))
        if compute is None or jnp.dtype(rule.value).itemsize <= jnp.dtype(compute).itemsize:
            exists = f"it is train_step(precision=Precision(compute={compute!r})), and modules take the wider dtype"
            raise problem(where, asked, exists, 'use compute="bfloat16" and a wider rule, or leave the rule out')
        check_bits(where, rule.value)
        if strategy.quantize is not None:
            exists = f"{strategy.label} sends all weights by kernels, in the compute dtype"
            raise problem(where, asked, exists, "leave quantize out, or the rule")


def _check_complex(setup: Setup) -> None:
    """Raise `ValueError` for complex parameters that a strategy would quantize."""
    for leaf in (decision.leaf for decision in setup.table.params if setup.strategy.quantize is not None):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise problem(
                f"parameter `{leaf.path}` under {setup.strategy.label}",
                f"send {leaf.dtype.name} quantized",
                "the kernels quantize real numbers and would drop the imaginary part",
                "leave quantize out, or hold the real and the imaginary part as two parameters",
            )


def _check_state(state: TrainState) -> None:
    """Arrays put in by `state.replace` are of the dtypes and shapes that the state was laid out with."""
    like = jax.tree.leaves(state.setup.abstract)
    for (path, x), known in zip(tree_leaves_with_paths(state), like, strict=True):
        if (x.shape, x.dtype) != (known.shape, known.dtype):
            raise problem(
                f"`{path}` of the state",
                f"train it as {x.dtype.name}{list(x.shape)}",
                f"the state was laid out with {known.dtype.name}{list(known.shape)}",
                "put weights in by mp.load_params(state, params), which casts them and lays them out; another dtype of "
                "parameters is init_state(precision=mp.Precision(params=...))",
            )


def _check_params_dtype(setup: Setup, precision: Precision) -> None:
    if precision.params is None:
        return
    for decision in setup.table.params:
        if jnp.issubdtype(decision.leaf.dtype, jnp.floating) and decision.leaf.dtype != jnp.dtype(precision.params):
            where = f"train_step(precision=Precision(params={precision.params!r}))"
            asked, fix = f"keep `{decision.path}` in {precision.params}", "give the same precision to init_state"
            raise problem(where, asked, f"the state holds it in {decision.leaf.dtype.name}", fix)


def check_loss(where: str, loss_fn: Any) -> None:
    """Raises `ValueError` for what cannot be called as a loss function."""
    fix = f"mp.{where}(lambda model, batch, key: (loss, metrics)), metrics a dict"
    check_takes(where, loss_fn, ("model", "batch", "key"), fix)


def _check_slopes(setup: Setup) -> None:
    for leaf in (decision.leaf for decision in setup.table.params):
        if leaf.is_trained and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise problem(
                f"train_step, parameter `{leaf.path}`",
                "take its gradient",
                f"it is {leaf.dtype.name}: whole numbers have none",
                "freeze it by init_state(trainable=...), or keep it as what is no parameter (an nnx.Variable, a Linen "
                "collection, from_functions(keeps_state=True))",
            )


# ---- The loss --------------------------------------------------------------------------------------------------------


def loss_of(loss_fn: LossFn, setup: Setup, *, trains: bool = True, loss_is: str | None = None) -> Loss:
    """Return the user's loss as a function of parameters. In training, losses that the model reports are added."""

    def terms(params: PyTree, extra: PyTree, rows: PyTree, key: jax.Array) -> tuple[LossTerms, PyTree]:
        with _held(setup, rows, trains), collecting() as reports:
            model = setup.model.bind(params, extra)
            try:
                out = loss_fn(model, as_given(rows), key)
            except NameError as error:
                raise _explained(error) from error
        loss, metrics = checked(out, loss_fn, trains=trains)
        after = setup.model.collect(model)
        _check_extra(extra, after)
        reported = {name: jnp.asarray(x) for name, x in reports.metrics.items() if name not in metrics}
        added = reports.loss if trains and reports.loss is not None else 0.0
        return LossTerms.of(loss, metrics, loss_is, reported=reported, added=added), after

    if not setup.model.is_explicit:
        return Loss(terms)
    layouts = (setup.layout.params, setup.layout.extra, setup.batch_sharding.spec, PartitionSpec())
    alone = [axis for axis, size in setup.sizes.items() if size == 1]  # in types they would only be in the way
    specs = jax.tree.map(lambda spec: without_axes(spec, alone), layouts, is_leaf=is_spec)
    return Loss(_without_others(jax.sharding.explicit_axes(terms, in_sharding=specs), setup))


def _without_others(loss: Evaluate, setup: Setup) -> Evaluate:
    """The loss, in which jax refuses collectives over axes that no rule of the strategy names, so none promises any.

    While it is traced, and with the user's line. jax 0.10 cannot: there `explain` finds them in the compiled program.
    """
    named = frozenset[str]().union(*(rules.axes for rules in setup.strategy.rules))
    others = frozenset(axis for axis, size in setup.sizes.items() if size > 1 and axis not in named)
    refusing = getattr(jax.sharding, "no_collectives", None)
    if refusing is None or not others:
        return loss

    def refused(*args: Any) -> Any:
        try:
            with refusing(others):
                return loss(*args)
        except Exception as error:
            if type(error).__name__ != "ForbiddenCollectiveError":
                raise
            where = f"mp.explicit(model) and {setup.strategy.label}"
            asked = f"send nothing over {', '.join(f'`{axis}`' for axis in sorted(others))}, which no rule of it names"
            fix = "leave arrays as they lie over that axis, or join a strategy that splits over it"
            raise problem(where, asked, " ".join(str(error).split()), fix) from error

    return refused


def _explained(error: NameError) -> Exception:
    axis = re.search(r"unbound axis name: (\w+)", str(error))
    if axis is None:
        return error
    asked = "reduce over it, as BatchNorm(axis_name=...) does"
    exists = "a step sees the global batch: its means and sums are over all rows already"
    return problem(f"axis name `{axis[1]}` in the model", asked, exists, f"leave out axis_name={axis[1]!r}")


@contextlib.contextmanager
def _held(setup: Setup, rows: PyTree, trains: bool) -> Iterator[None]:
    """What modules hand on is held: by rules for activations, and in models without names along the batch."""
    here = ambient()
    assert here is not None
    counts = {np.shape(x)[0] for x in jax.tree.leaves(without_whole(rows)) if np.ndim(x)}
    num_rows = max(counts, default=0)
    shard_batch = lays_nothing_out(setup) and not setup.model.is_explicit
    product = None if setup.model.is_explicit else functools.partial(dot_general, narrow=False)
    split = setup.splitting_modules
    with constrain_module_outputs(
        num_rows,
        shard_batch=shard_batch,
        other_batch_sizes=frozenset(counts),
        sharded_modules=split,
        dot_general=product,
        policy=_marking_policy if trains else None,
    ) as boundaries:
        yield
    if not trains:
        return
    if not is_part():
        check_rules_matched(boundaries, here)
    # An engine that gives each device its own rows leaves nothing of them to the compiler.
    is_local = all(auto_sizes(here)[axis] == 1 for axis in setup.batch_axes)
    updates = jax.tree.leaves(setup.layout.updates, is_leaf=is_spec)
    is_split = any(set(axes_of_spec(spec, setup.sizes)) & set(setup.batch_axes) for spec in updates)
    if boundaries.num_constrained or is_local or not is_split or setup.model.is_explicit:
        return
    if shard_batch:
        _warn_of_free_activations(setup)
    elif setup.model.kind != "functions":  # which hand nothing on that could be held
        _LAYS_NOTHING_OUT.add(setup)
        raise _LaysNothingOut


def _marking_policy(remat: str) -> Callable[..., Any]:
    """The policy of a remat rule, which notes the names that modules mark what they give by."""
    return remat_policy(remat, current().numerics.names)


_LAYS_NOTHING_OUT: weakref.WeakSet[Setup] = weakref.WeakSet()
"""Of models that name parameters and no activation; a trace tells."""


class _LaysNothingOut(Exception):
    """Raised in a trace that is then made anew, with activations held."""


def lays_nothing_out(setup: Setup) -> bool:
    """Whether the model leaves activations to what holds them between its modules. Known once a step is traced."""
    return not setup.model.names() or setup in _LAYS_NOTHING_OUT


def _warn_of_free_activations(setup: Setup) -> None:
    """Tell it where nothing says how activations lie, and parameters are split over the axes of the batch."""
    split = [d.path for d in setup.table.params if set(axes_of_spec(d.spec, setup.sizes)) & set(setup.batch_axes)]
    if not split:
        return
    axes = ", ".join(f"`{axis}`" for axis in setup.batch_axes)
    warnings.warn(
        f"nothing says how activations of this model lie, and {len(split)} parameters (`{split[0]}`, ...) are split "
        f"over {axes}, as the batch is: the compiler may gather and scatter activations in their place. Lay them out "
        'with mp.constrain(x, "batch", ...) between layers; mp.explain(step, state, batch) shows what is sent.',
        stacklevel=2,
    )


def _check_extra(before: PyTree, after: PyTree) -> None:
    """What a model keeps beside parameters is carried from step to step, so it must keep its structure."""
    paths = [{path for path, _ in tree_leaves_with_paths(tree)} for tree in (before, after)]
    for path in sorted(paths[0] ^ paths[1]):
        raise problem(
            f"`{path}` of the model",
            "be carried from step to step",
            f"it is there only {'after' if path in paths[1] else 'before'} the forward pass",
            "return it from the loss function as a metric, or make it with the model (NNX's `sow` makes it on the way)",
        )
    for (path, old), new in zip(tree_leaves_with_paths(before), jax.tree.leaves(after), strict=True):
        shapes, dtypes = [jnp.shape(x) for x in (old, new)], [jnp.result_type(x) for x in (old, new)]
        if shapes[0] != shapes[1] or (dtypes[0] != dtypes[1] and jnp.promote_types(*dtypes) != dtypes[0]):
            was, now = (f"{dtype.name}{list(shape)}" for dtype, shape in zip(dtypes, shapes, strict=True))
            exists, fix = f"it is {was} before the forward pass and {now} after it", "give it back as it came in"
            raise problem(f"`{path}` of the model", "be carried from step to step", exists, fix)


# ---- The update ------------------------------------------------------------------------------------------------------


def _value_fn(step: TrainStep, state: TrainState, batch: PyTree, key: jax.Array) -> Callable[[PyTree], jax.Array]:
    """The loss of this batch as a function of the parameters that are trained, for optimizers that ask for it."""
    setup, options = state.setup, step.options

    # optax's line searches take it ill when they are given more than they and `value_fn` name.
    def value_fn(trained: PyTree, *_: Any, obj_fn: Any = None) -> jax.Array:
        engine = engine_of(setup.strategy, options, setup.batch_axes)
        if Feature.LOSS_AT_OTHER_PARAMS not in engine.supports or options.accumulate > 1:
            raise unsupported(Feature.LOSS_AT_OTHER_PARAMS, setup.strategy.label)
        with tracing(setup.mesh, setup.strategy), numerics(options.precision, options.remat, options.interleave):
            params = setup.with_frozen(trained, state.params)
            params = compute_params(setup, params, options.precision.compute)
            return step.loss_of(setup)(params, state.extra, batch, key)[0]

    return value_fn


def _updated(setup: Setup, grads: PyTree, opt_state: PyTree, params: PyTree, **asked: Any) -> tuple[PyTree, PyTree]:
    """What the optimizer makes of gradients. It is given all that one may ask for; most take none of it."""
    update = optax.with_extra_args_support(setup.tx).update
    known = inspect.signature(update).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        asked = {name: x for name, x in asked.items() if name in known}
    try:
        with within(updates=setup.updating):
            updates, new = update(grads, opt_state, params, **asked)
        if jax.tree.structure(new) != jax.tree.structure(opt_state):  # type: ignore[operator]
            raise TypeError("its state has another structure after an update than before")
        return updates, new
    except MeshparError:
        raise
    except Exception as error:
        raise problem(
            "the optimizer's update",
            f"update {len(jax.tree.leaves(params))} parameters by their gradients",
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            "a step gives it gradients, state and parameters, and value, grad, value_fn and obj_fn by name: use an "
            "optimizer that needs no more",
        ) from error


def _update(
    state: TrainState, sums: MicrobatchTotals, options: StepOptions, value_fn: Callable[[PyTree], jax.Array]
) -> tuple[TrainState, dict[str, jax.Array]]:
    setup = state.setup
    shards = setup.named(setup.trained(setup.layout.updates))

    def mean(x: jax.Array) -> jax.Array:
        return x if sums.count == 1 else x / jnp.asarray(sums.count, x.dtype)

    loss = mean(sums.loss)
    metrics = {name: x if is_counted(x) else mean(x) for name, x in sums.metrics.items()}
    # Where parameters are whole and optimizer state is not (ZeRO-1 and 2), each device updates its shard, and pinning
    # the new parameters makes one gather each.
    old = constrained(setup.trained(state.params), shards)
    # The gradient that jax gives for a complex parameter is the conjugate of the direction of steepest ascent.
    grads = jax.tree.map(lambda g, p: jnp.conj(mean(g)).astype(p.dtype), constrained(sums.grads, shards), old)
    grads, before_update = setup.for_update(grads, state.opt_state)
    asked = {"value": loss, "grad": grads, "value_fn": value_fn, "obj_fn": value_fn}
    updates, opt_state = _updated(setup, grads, before_update, old, **asked)
    params = optax.apply_updates(old, updates)
    metrics = {"loss": loss, **metrics}
    skipped, extra = state.skipped, setup.model.after_update(sums.extra)
    conditions = [metrics[LOSS_WEIGHT] > 0] if LOSS_WEIGHT in metrics else []
    if options.nonfinite != "ignore":
        norm = optax.tree.norm(jax.tree.map(wide, grads))  # squares of float16 end at 256²
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
    params = setup.with_frozen(params, state.params)
    new = state.replace(
        step=state.step + 1, params=params, opt_state=opt_state, extra=extra, skipped=skipped.astype(jnp.int32)
    )
    return new, metrics
