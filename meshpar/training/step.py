"""train_step and eval_step: loss, gradients, accumulation and update as one compiled program.

Where the gradients of several micro-steps meet is the caller's choice. With `accumulate_mode="each"` XLA reduces the
gradients of every micro-step and the sums are kept in shards: least memory. With `"once"` every device sums its own
gradients, whole, and one reduction follows the loop: least traffic.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.parallel import Strategy, as_strategy
from meshpar.pipeline.gradients import means
from meshpar.pipeline.layers import check_numbers, is_counted
from meshpar.sharding.rules import Rules, resolve, use
from meshpar.sharding.types import (
    AnyMesh,
    Leaf,
    PyTree,
    axis_sizes,
    is_spec,
    path_str,
    problem,
    spec_axes,
    tree_leaves_with_paths,
    without_axes,
)
from meshpar.training.engines.staged import staged_gradients
from meshpar.training.engines.unshard import Unshard, make_unshard
from meshpar.training.precision import Numerics, Precision, cast_floating, check_remat, gathering, numerics
from meshpar.training.reports import collecting
from meshpar.training.state import Setup, TrainState

LossFn = Callable[[Any, PyTree, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
"""(model, batch, key) -> (loss, metrics): a scalar mean over the batch, and a dict of scalars.

What the model reports by itself (`meshpar.training.reports`) joins them."""


# ---------------------------------------------------------------------------------------------------------------------
# The batch
# ---------------------------------------------------------------------------------------------------------------------


def batch_sharding(mesh: AnyMesh, strategy: Strategy | Rules) -> NamedSharding:
    """How a batch lies on the mesh: its first dim by the strategy's rule for `batch`."""
    leaf = Leaf(path="batch", shape=(mesh.size,), dtype=np.dtype(np.int32), names=("batch",))
    return NamedSharding(mesh, resolve(leaf, as_strategy(strategy).activations, mesh).spec)


def shard_batch(batch: PyTree, mesh: jax.sharding.Mesh, strategy: Strategy | Rules) -> PyTree:
    """Lay a host batch on the mesh.

    Args:
      batch: a pytree of arrays whose first dim is the global batch.
      mesh: the devices.
      strategy: whose rule for `batch` splits it.

    Raises:
      ValueError: a first dim that the mesh does not divide.
    """
    sharding = batch_sharding(mesh, strategy)
    _check_batch(batch, sharding, accumulate=1)
    return jax.device_put(batch, sharding)


def _batch_axes(sharding: NamedSharding) -> tuple[str, ...]:
    sizes = axis_sizes(sharding.mesh)
    return tuple(axis for entry in sharding.spec for axis in spec_axes(entry) if sizes[axis] > 1)


def _check_batch(batch: PyTree, sharding: NamedSharding, accumulate: int) -> None:
    shards = math.prod(axis_sizes(sharding.mesh)[axis] for axis in _batch_axes(sharding))
    leaves = tree_leaves_with_paths(batch)
    if not leaves:
        raise problem("batch", "train on it", "it holds no arrays", "pass a pytree of arrays with a batch dim first")
    shapes = {path: np.shape(x) for path, x in leaves}
    rows = max((shape[0] for shape in shapes.values() if shape), default=0)
    for path, x in leaves:
        dtype = getattr(x, "dtype", None)
        if dtype is not None and not _is_number(dtype):
            raise problem(
                f"batch leaf `{path}` of dtype {dtype}",
                "be laid on devices",
                "they hold numbers, and this holds none",
                "leave it out of the batch, or turn it into numbers first (text: into tokens)",
            )
    for path, shape in shapes.items():
        if shape[:1] != (rows,):
            raise problem(
                f"batch leaf `{path}` of shape {shape}",
                "be split by rows",
                f"it has {shape[0] if shape else 'no'} rows and another leaf has {rows}",
                "give every leaf the same first dim, the global batch",
            )
    unit = shards * accumulate
    if rows == 0 or rows % unit:
        over = " × ".join(f"`{axis}`" for axis in _batch_axes(sharding)) or "one device"
        raise problem(
            f"batch leaf `{leaves[0][0]}` of shape {shapes[leaves[0][0]]} dim 0 (`batch`)",
            f"split over {over} ({shards})" + (f" in {accumulate} micro-steps" if accumulate > 1 else ""),
            f"{rows} rows are not a positive multiple of {unit}",
            f"use a batch of {max(1, -(-rows // unit)) * unit}",
        )


def _is_number(dtype: Any) -> bool:
    """Whether jax can hold it: numbers, truths, random keys; not strings, objects, times or records."""
    return (
        dtype == np.bool_
        or jax.dtypes.issubdtype(dtype, np.number)
        or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    )


# ---------------------------------------------------------------------------------------------------------------------
# The step
# ---------------------------------------------------------------------------------------------------------------------


class _Program:
    """A function of (state, batch), compiled once for each setup and called with little host work."""

    def __init__(self) -> None:
        self._jitted: weakref.WeakKeyDictionary[Setup, Any] = weakref.WeakKeyDictionary()
        self._checked: weakref.WeakKeyDictionary[Setup, set[Any]] = weakref.WeakKeyDictionary()

    def jitted(self, state: TrainState, batch: PyTree) -> Any:
        """The jitted function for this state's setup; the batch is checked when its shapes or dtypes are new."""
        setup = state.setup
        found = self._jitted.get(setup)
        if found is None:
            found = self._jitted[setup] = self._jit(setup)
            self._checked[setup] = set()
        shapes = tuple((np.shape(x), getattr(x, "dtype", None)) for x in jax.tree.leaves(batch))
        if shapes not in self._checked[setup]:
            _check_batch(batch, batch_sharding(setup.mesh, setup.strategy), self._num_micro_steps)
            self._checked[setup].add(shapes)
        return found

    _num_micro_steps = 1

    def _jit(self, setup: Setup) -> Any:
        raise AssertionError("a program says how it is jitted")

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        return self.jitted(state, batch)(state, batch)

    def trace(self, state: TrainState, batch: PyTree) -> Any:
        """The traced program, as `jax.jit(...).trace` gives it; arrays may be abstract, and the mesh too."""
        return self.jitted(state, batch).trace(state, batch)

    def lower(self, state: TrainState, batch: PyTree) -> Any:
        """The lowered program, as `jax.jit(...).lower` gives it; arrays may be abstract."""
        return self.jitted(state, batch).lower(state, batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What `train_step` was asked."""

    accumulate: int = 1
    accumulate_mode: Literal["each", "once"] = "each"
    precision: Precision = dataclasses.field(default_factory=Precision)
    remat: str | None = None
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    weight: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise problem(
                f"accumulate={self.accumulate!r}",
                "run that many micro-steps",
                "that is no positive integer",
                "use 1 or more",
            )
        for field, known in (("accumulate_mode", ("each", "once")), ("nonfinite", ("raise", "skip", "ignore"))):
            if getattr(self, field) not in known:
                raise problem(
                    f"{field}={getattr(self, field)!r}", "do that", "there is no such choice", f"use one of {known}"
                )
        check_remat(self.remat)


class TrainStep(_Program):
    """A training step, `(state, batch) -> (state, metrics)`. Made by `train_step`."""

    def __init__(self, loss_fn: LossFn, options: StepOptions) -> None:
        super().__init__()
        self.loss_fn, self.options = loss_fn, options
        self._num_micro_steps = options.accumulate

    def loss(
        self, setup: Setup, params: PyTree, extra: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], PyTree]]:
        """Of some rows, with what the model adds to it; the metrics, and what the model keeps beside parameters."""
        return _loss(self.loss_fn, setup, params, extra, batch, key)

    def _jit(self, setup: Setup) -> Any:
        _check_params_dtype(setup, self.options.precision)
        whole = NamedSharding(setup.mesh, PartitionSpec())
        return jax.jit(
            self._step,
            donate_argnums=0,  # the old state's buffers become the new one's: one copy of the state, not two
            in_shardings=(setup.shardings, batch_sharding(setup.mesh, setup.strategy)),
            out_shardings=(setup.shardings, whole),
        )

    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        setup, options = state.setup, self.options
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        with (
            use(setup.mesh, setup.strategy),
            numerics(options.precision, options.remat) as wishes,
            jax.named_scope("gradients"),
        ):
            sums = _gradients(self.loss_fn, options, state, batch, key)
        if options.remat and not wishes.num_layers_marked:
            raise problem(
                f"train_step(remat={options.remat!r})",
                "recompute layers in the backward pass",
                "the model marks no layer",
                "wrap one layer's function in meshpar.training.precision.remat_layer, or use remat=None and Flax's own",
            )
        with jax.named_scope("update"):
            return _update(state, sums, options)


def train_step(
    loss_fn: LossFn,
    *,
    accumulate: int = 1,
    accumulate_mode: Literal["each", "once"] = "each",
    precision: Precision | None = None,
    remat: str | None = None,
    nonfinite: Literal["raise", "skip", "ignore"] = "raise",
    weight: str | None = None,
) -> TrainStep:
    """Make a training step from a loss.

    Args:
      loss_fn: (model, batch, key) -> (loss, metrics): a scalar mean over the batch it is given, and a dict of scalars.
        `model` is what the adapter promised: the NNX module, the bound Linen module, or `apply` with parameters.
      accumulate: micro-steps that share one update; the batch is split so that every device keeps its own rows.
      accumulate_mode: "each" reduces the gradients of every micro-step into shards; "once" sums them whole on every
        device and reduces after the loop. The second gathers split parameters once and holds them whole too, and gives
        the loss a device's own rows only; `key` and an NNX module's own random streams then differ by device.
      precision: dtypes of parameters, compute and gradient reduction.
      remat: name of a policy for the layers that `training.precision.remat_layer` marks: "full", "dots", "all_dots".
      nonfinite: what to do when loss or gradients are not finite. "skip" leaves the update out and counts it in
        `state.skipped`; "raise" does the same, and `fit` raises when it sees the metric; "ignore" does not look.
      weight: name of a metric (say the number of real tokens) by which micro-steps are weighed in the mean.

    Returns:
      `step(state, batch) -> (state, metrics)`. The state given is donated. Metrics are device scalars: the loss,
      `grad_norm` (not with "ignore"), `finite`, and the loss function's own: means over micro-steps; sums of whole
      numbers, for those are counts.

    Raises:
      ValueError: an option that does not exist; when called, a batch that does not divide.
    """
    options = StepOptions(
        accumulate=accumulate,
        accumulate_mode=accumulate_mode,
        precision=precision or Precision(),
        remat=remat,
        nonfinite=nonfinite,
        weight=weight,
    )
    return TrainStep(loss_fn, options)


class EvalStep(_Program):
    """An evaluation step, `(state, batch) -> metrics`. Made by `eval_step`."""

    def __init__(self, loss_fn: LossFn, precision: Precision) -> None:
        super().__init__()
        self.loss_fn, self.precision = loss_fn, precision

    def _jit(self, setup: Setup) -> Any:
        return jax.jit(
            self._evaluate,
            in_shardings=(setup.shardings, batch_sharding(setup.mesh, setup.strategy)),
            out_shardings=NamedSharding(setup.mesh, PartitionSpec()),
        )

    def _evaluate(self, state: TrainState, batch: PyTree) -> dict[str, jax.Array]:
        setup = state.setup
        key = jax.random.wrap_key_data(state.key)
        with use(setup.mesh, setup.strategy), numerics(self.precision, None):
            params = _compute_params(setup, state.params, self.precision)
            loss, (metrics, _) = _loss(self.loss_fn, setup, params, state.extra, batch, key, trains=False)
        return {"loss": loss, **metrics}


def eval_step(loss_fn: LossFn, *, precision: Precision | None = None) -> EvalStep:
    """Make an evaluation step: `evaluate(state, batch) -> metrics`, with `loss` among them; the state is not donated.

    Args:
      loss_fn: as for `train_step`. What the forward pass changes in the model is thrown away.
      precision: as for `train_step`.
    """
    return EvalStep(loss_fn, precision or Precision())


def _check_params_dtype(setup: Setup, precision: Precision) -> None:
    if precision.params is None:
        return
    for decision in setup.table.params:
        if jnp.issubdtype(decision.leaf.dtype, jnp.floating) and decision.leaf.dtype != jnp.dtype(precision.params):
            raise problem(
                f"train_step(precision=Precision(params={precision.params!r}))",
                f"keep `{decision.path}` in {precision.params}",
                f"the state holds it in {decision.leaf.dtype.name}",
                "give the same precision to init_state",
            )


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Sums:
    """What a number of micro-steps add up to, each weighed."""

    loss: jax.Array
    metrics: dict[str, jax.Array]
    """Whole numbers, which are counts, are not weighed."""
    grads: PyTree
    weight: jax.Array
    extra: PyTree


def _loss(
    loss_fn: LossFn, setup: Setup, params: PyTree, extra: PyTree, batch: PyTree, key: jax.Array, trains: bool = True
) -> tuple[jax.Array, tuple[dict[str, jax.Array], PyTree]]:
    """The loss, with what the model adds to it in training; metrics, the model's own among them; and its extras."""
    model = setup.model.bind(params, extra)
    with collecting() as reports:
        out = loss_fn(model, batch, key)
    if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict)):
        raise problem(
            f"loss function `{getattr(loss_fn, '__name__', loss_fn)}`",
            "return (loss, metrics)",
            f"it returned {type(out).__name__}",
            "return a scalar and a dict of scalars, which may be empty",
        )
    loss, metrics = out
    check_numbers({"loss": loss, **metrics})
    if trains and reports.loss is not None:
        loss = loss + reports.loss.astype(loss.dtype)
    after = setup.model.collect(model)
    _check_extra(extra, after)
    return loss, ({name: jnp.asarray(value) for name, value in {**reports.metrics, **metrics}.items()}, after)


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


def _compute_params(setup: Setup, params: PyTree, precision: Precision) -> PyTree:
    """Parameters in the compute dtype, still in their shards: the cast stands before the gather, not behind it."""
    if precision.compute is None:
        return params
    return _constrained(cast_floating(params, precision.compute), setup.named(setup.layout.params))


def _constrained(tree: PyTree, shardings: PyTree) -> PyTree:
    return jax.tree.map(lax.with_sharding_constraint, tree, shardings)


def _wide(x: jax.Array) -> jax.Array:
    """In float32 at the least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _micro_step(
    loss_fn: LossFn, options: StepOptions, setup: Setup, params: PyTree, extra: PyTree, batch: PyTree, key: jax.Array
) -> _Sums:
    """Loss and gradients of one micro-step, times its weight."""
    (loss, (metrics, extra)), grads = jax.value_and_grad(
        lambda p: _loss(loss_fn, setup, p, extra, batch, key), has_aux=True
    )(params)
    grads = jax.tree.map(lambda g: g.astype(options.precision.reduce_dtype(g.dtype)), grads)
    return _weighed(options, loss, metrics, grads, extra)


def _weight(options: StepOptions, metrics: dict[str, jax.Array]) -> jax.Array | None:
    if options.weight is None:
        return None
    if options.weight not in metrics:
        raise problem(
            f"train_step(weight={options.weight!r})",
            "weigh micro-steps by that metric",
            f"the loss function returned {sorted(metrics)}",
            "add it to the metrics",
        )
    return metrics[options.weight]


def _weighed(
    options: StepOptions, loss: jax.Array, metrics: dict[str, jax.Array], grads: PyTree, extra: PyTree
) -> _Sums:
    given = _weight(options, metrics)
    weight = jnp.ones((), loss.dtype) if given is None else given
    # Means are taken in float32 at the least: counts and float16 losses would not survive a weight or a division.
    counts = {name: x.astype(jnp.promote_types(x.dtype, jnp.int32)) for name, x in metrics.items() if is_counted(x)}
    others = {name: x for name, x in metrics.items() if name not in counts}
    loss, others, weight = jax.tree.map(_wide, (loss, others, weight))
    if options.weight is not None:
        # Gradients times a number of tokens are beyond float16, and that number is not in bfloat16. A micro-step of
        # weight zero has no mean: 0/0 in the loss must not spoil the others.
        grads = jax.tree.map(_wide, grads)
        loss, others, grads = jax.tree.map(
            lambda x: jnp.where(weight > 0, x * weight.astype(x.dtype), 0), (loss, others, grads)
        )
    return _Sums(loss, {**others, **counts}, grads, weight, extra)


def _gradients(loss_fn: LossFn, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array) -> _Sums:
    setup = state.setup
    axes = _batch_axes(batch_sharding(setup.mesh, setup.strategy))
    if setup.strategy.pipeline is not None:
        return _staged(loss_fn, options, state, batch, key)
    unshard = make_unshard(setup, options.precision, axes)
    if unshard is not None:
        return _quantized(loss_fn, options, state, batch, key, unshard)
    if options.accumulate > 1 and options.accumulate_mode == "once":
        return _reduced_once(loss_fn, options, state, batch, key)
    params = _compute_params(setup, state.params, options.precision)
    shardings = setup.named(_grad_specs(setup, options))

    def micro_step(extra: PyTree, micro: PyTree, key: jax.Array) -> _Sums:
        sums = _micro_step(loss_fn, options, setup, params, extra, micro, key)
        return dataclasses.replace(sums, grads=_constrained(sums.grads, shardings))

    if options.accumulate == 1:
        return micro_step(state.extra, batch, key)
    sharding = batch_sharding(setup.mesh, setup.strategy)
    micro_batches = jax.tree.map(lambda x: _split_rows(x, options.accumulate, sharding), batch)
    return _accumulate(micro_step, state.extra, micro_batches, key, options.accumulate)


def _staged(loss_fn: LossFn, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array) -> _Sums:
    """Layers run stage by stage: microbatches take the place of micro-steps."""
    setup = state.setup
    for asked, given in (
        (f"train_step(accumulate={options.accumulate})", options.accumulate > 1),
        ("a strategy that quantizes", setup.strategy.quantize is not None),
    ):
        if given:
            raise problem(
                f"{asked} under {setup.strategy.label}",
                "be done by stages",
                "a pipeline sums the gradients of its own microbatches and sends weights as they are",
                "leave it out; more microbatches are what accumulation would be",
            )

    def loss(params: PyTree, extra: PyTree, rows: PyTree, key: jax.Array) -> Any:
        return _loss(loss_fn, setup, params, extra, rows, key)

    mean = staged_gradients(
        loss,
        state,
        batch,
        key,
        params=_compute_params(setup, state.params, options.precision),
        grad_specs=_grad_specs(setup, options),
        batch_axes=_batch_axes(batch_sharding(setup.mesh, setup.strategy)),
        precision=options.precision,
        weight=options.weight,
    )
    return _Sums(mean.loss, mean.metrics, mean.grads, jnp.ones_like(mean.loss), mean.extra)


def _grad_specs(setup: Setup, options: StepOptions) -> PyTree:
    """How gradients leave the backward pass.

    With one micro-step nothing keeps them before the update, which uses them as the optimizer state lies: going there
    straight makes ZeRO-1's reduction a scatter, half the bytes of the all-reduce that whole gradients would need.
    """
    return setup.layout.updates if options.accumulate == 1 else setup.layout.grads


def _accumulate(
    micro_step: Callable[[PyTree, PyTree, jax.Array], _Sums], extra: PyTree, batches: PyTree, key: jax.Array, count: int
) -> _Sums:
    """Sum micro-steps in a scan: the program does not grow with their number."""

    def body(sums: _Sums, xs: tuple[PyTree, jax.Array]) -> tuple[_Sums, None]:
        micro, index = xs
        new = micro_step(sums.extra, micro, jax.random.fold_in(key, index))
        added = jax.tree.map(jnp.add, dataclasses.replace(sums, extra=None), dataclasses.replace(new, extra=None))
        return dataclasses.replace(added, extra=new.extra), None

    first = jax.tree.map(lambda x: x[0], batches)
    like = jax.eval_shape(micro_step, extra, first, key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dataclasses.replace(like, extra=None))
    sums, _ = lax.scan(body, dataclasses.replace(zeros, extra=extra), (batches, jnp.arange(count)))
    return sums


def _split_rows(x: jax.Array, count: int, sharding: NamedSharding) -> jax.Array:
    """[batch, ...] -> [count, batch / count, ...] such that every device keeps its own rows.

    A plain reshape would give micro-step i the i-th block of the batch, which lies on a few devices.
    """
    shards = math.prod(axis_sizes(sharding.mesh)[axis] for axis in _batch_axes(sharding))
    rows = x.shape[0] // (shards * count)
    by_device = x.reshape(shards, count, rows, *x.shape[1:])
    split = jnp.moveaxis(by_device, 1, 0).reshape(count, shards * rows, *x.shape[1:])
    return lax.with_sharding_constraint(split, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec)))


def _reduced_once(loss_fn: LossFn, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array) -> _Sums:
    """Every device sums the gradients of its own rows; one reduction follows.

    Manual over the axes that split the batch, so that XLA sees no sum over devices inside the loop; other axes stay
    XLA's. Parameters enter whole over those axes: gathered once.
    """
    setup = state.setup
    axes = _batch_axes(batch_sharding(setup.mesh, setup.strategy))
    params = cast_floating(state.params, options.precision.compute)
    whole = jax.tree.map(lambda spec: without_axes(spec, axes), setup.layout.params, is_leaf=is_spec)
    params = _constrained(params, setup.named(whole))

    def local(params: PyTree, extra: PyTree, rows: PyTree, key: jax.Array) -> _Sums:
        sums = _local_sums(_whole_step(loss_fn, options, setup, params), options, setup, axes, extra, rows, key)
        if options.weight is not None:
            sums = _evened(sums, axes, options, params)
        if not axes:
            return sums
        # Every device's own gradients behind a dim that the axes split.
        sums = _reduce_all_but_gradients(sums, axes)
        return dataclasses.replace(sums, grads=jax.tree.map(lambda g: g[None], sums.grads))

    if not axes:
        return local(params, state.extra, batch, key)
    sums = _by_device(local, setup, axes, PartitionSpec(), PartitionSpec(axes))(params, state.extra, batch, key)
    # Left to XLA, for a scatter written by hand would first gather what other axes split.
    # lax.reduce, for jnp.sum would widen a narrow reduction to float32.
    summed = jax.tree.map(lambda g: lax.reduce(g, np.zeros((), g.dtype), lax.add, (0,)), sums.grads)
    return dataclasses.replace(sums, grads=_constrained(summed, setup.named(setup.layout.grads)))


def _quantized(
    loss_fn: LossFn, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array, unshard: Unshard
) -> _Sums:
    """Weights gathered and gradients scattered in few bits, by hand: `meshpar.training.engines.unshard` says how.

    Manual over the axes that split the batch, as when gradients are reduced once; parameters enter as shards. In mode
    "each" every micro-step gathers and scatters, stacked layers inside the loops over them; in mode "once" all weights
    are gathered before the micro-steps and all gradients scattered behind them.
    """
    setup, axes = state.setup, unshard.batch_axes
    once = options.accumulate > 1 and options.accumulate_mode == "once"
    noise = jax.random.fold_in(key, options.accumulate)  # micro-steps fold in the numbers below

    def local(params: PyTree, extra: PyTree, rows: PyTree, key: jax.Array, noise: jax.Array) -> _Sums:
        if once:
            whole = unshard.whole(params, noise)
            step = _whole_step(loss_fn, options, setup, whole)
        else:
            step = _sharded_step(loss_fn, options, setup, unshard, params, noise)
        sums = _local_sums(step, options, setup, axes, extra, rows, key)
        if once:
            sums = sums if options.weight is None else _evened(sums, axes, options, whole)
            sums = dataclasses.replace(sums, grads=unshard.scattered(sums.grads, noise))
        return _reduce_all_but_gradients(sums, axes)

    run = _by_device(local, setup, axes, unshard.specs, unshard.specs)
    sums = run(state.params, state.extra, batch, key, noise)
    if options.accumulate == 1 and options.weight is None:  # a mean over devices, where XLA's own is one over rows
        loss, grads = jax.tree.map(lambda x: x / sums.weight.astype(x.dtype), (sums.loss, sums.grads))
        sums = dataclasses.replace(sums, loss=loss, metrics=means(sums.metrics, sums.weight), grads=grads)
    return dataclasses.replace(sums, grads=_constrained(sums.grads, setup.named(_grad_specs(setup, options))))


def _by_device(
    local: Callable[..., _Sums], setup: Setup, axes: tuple[str, ...], params: PyTree, grads: PyTree
) -> Callable[..., _Sums]:
    """A function of (params, extra, rows, keys...) run by every device along the axes that split the batch.

    Args:
      params, grads: specs of what enters and what leaves.
    """
    whole = PartitionSpec()

    def run(held: PyTree, extra: PyTree, rows: PyTree, *keys: jax.Array) -> _Sums:
        def inside(held: PyTree, extra: PyTree, rows: PyTree, *keys: jax.Array) -> _Sums:
            return local(held, extra, rows, *map(jax.random.wrap_key_data, keys))

        return jax.shard_map(
            inside,
            mesh=setup.mesh,
            in_specs=(params, whole, PartitionSpec(axes), *[whole] * len(keys)),
            out_specs=_Sums(whole, whole, grads, whole, whole),  # type: ignore[arg-type]
            axis_names=set(axes),
            # The loss is differentiated inside, and its collectives have derivatives of their own: there is nothing for
            # the check to protect, and it would refuse ordinary models whose scan carries start as constants.
            check_vma=False,
        )(held, extra, rows, *map(jax.random.key_data, keys))

    return run


_Step = Callable[[PyTree, PyTree, jax.Array], _Sums]
"""(extra, micro-batch, key) -> sums of one micro-step."""


def _whole_step(loss_fn: LossFn, options: StepOptions, setup: Setup, params: PyTree) -> _Step:
    def micro_step(extra: PyTree, micro: PyTree, key: jax.Array) -> _Sums:
        return _micro_step(loss_fn, options, setup, params, extra, micro, key)

    return micro_step


def _sharded_step(
    loss_fn: LossFn, options: StepOptions, setup: Setup, unshard: Unshard, params: PyTree, noise: jax.Array
) -> _Step:
    """Gradients by shards: those of all devices have met, each weighed, when they come out."""

    def loss_of(params: PyTree, extra: PyTree, micro: PyTree, key: jax.Array, weight: jax.Array | None) -> Any:
        def gather(at: str, layer: PyTree) -> PyTree:
            return unshard.layer(noise, weight, at, layer)

        with gathering(gather) as wishes:
            wishes.num_layers_gathered = wishes.num_layers_marked = 0
            try:
                out = _loss(loss_fn, setup, unshard.entered(params, noise, weight), extra, micro, key)
            except (TypeError, ValueError) as error:
                _check_layers_gathered(setup, unshard, wishes, error)
                raise
            _check_layers_gathered(setup, unshard, wishes, None)
        return out

    def micro_step(extra: PyTree, micro: PyTree, key: jax.Array) -> _Sums:
        wide = jax.tree.map(_wide, params)
        # Gradients meet weighed, so the weight is known before: a forward pass of which XLA keeps what it takes, which
        # is little where the weight is a count of tokens.
        weight = None
        if options.weight is not None:
            weight = _wide(jnp.asarray(_weight(options, loss_of(wide, extra, micro, key, None)[1][0])))
        (loss, (metrics, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(wide, extra, micro, key, weight)
        return dataclasses.replace(_weighed(options, loss, metrics, {}, after), grads=grads)

    return micro_step


def _check_layers_gathered(setup: Setup, unshard: Unshard, wishes: Numerics, cause: Exception | None) -> None:
    """A model that computes with a layer's shards fails by their shapes: this is why."""
    if not unshard.per_layer:
        return
    where, asked = f"`{unshard.per_layer[0]}` under the strategy {setup.strategy.label}", "gather one layer at a time"
    if not wishes.num_layers_gathered:
        raise problem(
            where,
            asked,
            "the model scans its stacked layers and never calls meshpar.training.precision.layer_weights",
            "call it on the slice of the parameters that the scan's body gets, inside remat_layer",
        ) from cause
    if cause is None and not wishes.num_layers_marked:
        raise problem(
            where,
            asked,
            "nothing marks where a layer ends, so the weights of all would be kept for the backward pass",
            "wrap the scan's body in meshpar.training.precision.remat_layer",
        )


def _local_sums(
    step: _Step, options: StepOptions, setup: Setup, axes: tuple[str, ...], extra: PyTree, rows: PyTree, key: jax.Array
) -> _Sums:
    """The micro-steps of one device's rows, with random keys of its own."""
    random_keys = setup.model.random_keys()
    here = jax.random.fold_in(key, lax.axis_index(axes)) if axes else key
    own = _own_keys(extra, random_keys, axes)
    if options.accumulate == 1:
        sums = step(own, rows, here)
    else:
        micro_batches = jax.tree.map(
            lambda x: x.reshape(options.accumulate, x.shape[0] // options.accumulate, *x.shape[1:]), rows
        )
        sums = _accumulate(step, own, micro_batches, here, options.accumulate)
    return dataclasses.replace(sums, extra=_common_keys(extra, own, sums.extra, random_keys, axes))


def _own_keys(extra: PyTree, random_keys: frozenset[str], axes: tuple[str, ...]) -> PyTree:
    """The model's own random keys, another on every device: with the same, all would drop the same units."""

    def own(path: Any, x: jax.Array) -> jax.Array:
        if not axes or path_str(path) not in random_keys:
            return x
        keys = jax.random.wrap_key_data(x).reshape(-1)
        folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, lax.axis_index(axes))
        return jax.random.key_data(folded).reshape(x.shape)

    return jax.tree_util.tree_map_with_path(own, extra)


def _common_keys(
    before: PyTree, own: PyTree, after: PyTree, random_keys: frozenset[str], axes: tuple[str, ...]
) -> PyTree:
    """The model's extras with the keys that all devices keep: as they were, or the first device's where they moved.

    A stream of NNX counts and leaves its key; a module may also replace a key of its own.
    """

    def kept(path: Any, old: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        if not axes or path_str(path) not in random_keys:
            return end
        mine = jnp.where(jnp.all(end == start), old, end)
        return lax.psum(jnp.where(lax.axis_index(axes) == 0, mine, jnp.zeros_like(mine)), axes)

    return jax.tree_util.tree_map_with_path(kept, before, own, after)


def _evened(sums: _Sums, axes: tuple[str, ...], options: StepOptions, params: PyTree) -> _Sums:
    """The same sums with weights that are 1 in the mean, which the dtype of the reduction can hold."""
    mean = lax.pmean(sums.weight, axes) / options.accumulate
    loss, grads, weight = jax.tree.map(lambda x: x / mean.astype(x.dtype), (sums.loss, sums.grads, sums.weight))
    grads = jax.tree.map(lambda g, p: g.astype(options.precision.reduce_dtype(p.dtype)), grads, params)
    return _Sums(loss, means(sums.metrics, mean), grads, weight, sums.extra)


def _reduce_all_but_gradients(sums: _Sums, axes: tuple[str, ...]) -> _Sums:
    """Sum over devices, model extras averaged; gradients as they are."""

    def reduce_extra(x: jax.Array) -> jax.Array:
        return lax.pmean(x, axes) if jnp.issubdtype(x.dtype, jnp.floating) else lax.pmax(x, axes)

    loss, metrics, weight = lax.psum((sums.loss, sums.metrics, sums.weight), axes)
    return _Sums(loss, metrics, sums.grads, weight, jax.tree.map(reduce_extra, sums.extra))


# ---------------------------------------------------------------------------------------------------------------------
# The update
# ---------------------------------------------------------------------------------------------------------------------


def _update(state: TrainState, sums: _Sums, options: StepOptions) -> tuple[TrainState, dict[str, jax.Array]]:
    setup = state.setup
    shards = setup.named(setup.layout.updates)

    def mean(x: jax.Array) -> jax.Array:
        return x if options.accumulate == 1 and options.weight is None else x / sums.weight.astype(x.dtype)

    loss = mean(sums.loss)
    metrics = {name: x if is_counted(x) else mean(x) for name, x in sums.metrics.items()}
    # Where parameters are whole and optimizer state is not (ZeRO-1 and 2), each device updates its shard, and pinning
    # the new parameters makes one gather each.
    old = _constrained(state.params, shards)
    grads = jax.tree.map(lambda g, p: mean(g).astype(p.dtype), _constrained(sums.grads, shards), old)
    updates, opt_state = setup.tx.update(grads, state.opt_state, old)
    params = optax.apply_updates(old, updates)
    metrics = {"loss": loss, **metrics}
    skipped, extra = state.skipped, setup.model.after_update(sums.extra)
    if options.nonfinite != "ignore":
        norm = optax.tree.norm(jax.tree.map(_wide, grads))  # squares of float16 end at 256²
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        params, opt_state, extra = jax.tree.map(
            lambda new, before: jnp.where(finite, new, before),
            (params, opt_state, extra),
            (old, state.opt_state, state.extra),
        )
        skipped = skipped + jnp.where(finite, 0, 1)
        metrics |= {"grad_norm": norm, "finite": finite}
    new = state.replace(
        step=state.step + 1, params=params, opt_state=opt_state, extra=extra, skipped=skipped.astype(jnp.int32)
    )
    return new, metrics
