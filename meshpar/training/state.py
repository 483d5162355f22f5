"""TrainState: the arrays of a training run between steps, created sharded."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.layers.precision import Precision, as_precision, cast_floating
from meshpar.optim.averages import check_averages
from meshpar.optim.orthogonalized import Updating
from meshpar.parallel import Strategy, as_strategy
from meshpar.parallel.batch import StepBatch, batch_sharding, split_by
from meshpar.parallel.execution import Weight, with_layers
from meshpar.sharding.adapters.model import OVERWRITTEN, Model
from meshpar.sharding.adapters.random_keys import is_key, key_data_like, key_impls, with_key_types, without_key_types
from meshpar.sharding.constraints import abstract_of, is_typed, with_auto_types, without_types
from meshpar.sharding.context import clear_context_mesh, replacing_mesh, tracing
from meshpar.sharding.errors import check_cases, near_or, problem
from meshpar.sharding.host_resources import check_not_forked
from meshpar.sharding.mesh import with_auto_axes
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import AnyMesh, Leaf, PyTree, axes_of_spec, axis_sizes, is_spec, path_str, without_axes
from meshpar.training.sharding_table import ShardingTable, TableLayout, Trainable, lay_out, only

OPTIMIZATION_LEVEL = "xla_backend_optimization_level"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """Model, optimizer, strategy and shardings of a state. Compared by identity, as a key of compiled programs."""

    model: Model
    tx: optax.GradientTransformation
    given_mesh: AnyMesh
    """The mesh of the user, for arrays between steps."""
    strategy: Strategy
    precision: Precision
    layout: TableLayout
    trainable: Trainable = None
    unconstrained_losses: list[Any] = dataclasses.field(default_factory=list, repr=False)
    """Training steps whose loss functions constrain no activation."""

    @property
    def table(self) -> ShardingTable:
        return self.layout.table

    @property
    def has_free_activations(self) -> bool:
        """True if the model does not constrain its activations, so that outputs of its modules are constrained.

        For models with logical names of parameters, it is known only after a training step was traced.
        """
        return not self.model.names() or bool(self.unconstrained_losses)

    @functools.cached_property
    def mesh(self) -> AnyMesh:
        """The mesh of a step, with Auto axes."""
        return with_auto_axes("mesh", self.given_mesh)

    @property
    def replicated_sharding(self) -> NamedSharding:
        """The replicated sharding on the user's mesh, for metrics."""
        return NamedSharding(self.given_mesh, PartitionSpec())

    def jit(self, f: Callable[..., PyTree], out: PyTree, **options: Any) -> jax.stages.Wrapped:
        """Return `jax.jit` of a function that is traced on Auto axes. Its inputs and outputs have the user's mesh."""
        return jax.jit(without_types(f, self.given_mesh), out_shardings=out, **options)

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of the batch: its first dim, by the strategy's rule for `batch`."""
        return batch_sharding(self.mesh, self.strategy)

    def on_explicit_axes(self, loss: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Return a function (params, extra, examples, key) that runs on Explicit axes, for a model of `mp.explicit`."""
        layouts = (self.layout.params, self.layout.extra, self.batch_sharding.spec, PartitionSpec())
        trivial = [axis for axis, size in self.sizes.items() if size == 1]  # they would only complicate types
        specs = jax.tree.map(lambda spec: without_axes(spec, trivial), layouts, is_leaf=is_spec)
        return jax.sharding.explicit_axes(loss, in_sharding=specs)

    @property
    def batch_shardings(self) -> StepBatch:
        """The shardings of a batch inside a step."""
        return StepBatch(self.batch_sharding, NamedSharding(self.mesh, PartitionSpec()))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes larger than 1 that shard the batch."""
        return split_by(self.batch_sharding)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis."""
        return axis_sizes(self.mesh)

    @functools.cached_property
    def weights(self) -> tuple[Weight, ...]:
        """The parameters with the shardings of their gradients and updates. Stacked dims have the name `layers`."""
        grads, updates = (jax.tree.leaves(tree, is_leaf=is_spec) for tree in (self.layout.grads, self.layout.updates))
        return tuple(map(Weight, with_layers(self.table.params), grads, updates))

    @functools.cached_property
    def splitting_modules(self) -> frozenset[str]:
        """Paths of modules with parameters sharded over axes that do not shard the batch."""
        batch = set(self.batch_axes)
        return frozenset(
            d.path.rpartition("/")[0] for d in self.table.params if set(axes_of_spec(d.spec, self.sizes)) - batch
        )

    @functools.cached_property
    def updating(self) -> Updating:
        """The shardings of arrays in the optimizer's update, by path."""
        specs = jax.tree.leaves(self.layout.updates, is_leaf=is_spec)
        return Updating(self.mesh, {d.path: spec for d, spec in zip(self.table.params, specs, strict=True)})

    @property
    def is_frozen(self) -> tuple[bool, ...]:
        """Whether each parameter is frozen, in the order of the table."""
        return tuple(not decision.leaf.is_trained for decision in self.table.params)

    def trained(self, tree: PyTree) -> PyTree:
        """Return a tree like the parameters with None in place of frozen parameters."""
        return only([not frozen for frozen in self.is_frozen], tree, self.layout.variables.params)

    def overwritten(self, extra: PyTree) -> dict[str, PyTree]:
        """Return the Linen collection whose gradients are its next values, if there is one."""
        return {OVERWRITTEN: extra[OVERWRITTEN]} if self.model.kind == "linen" and OVERWRITTEN in extra else {}

    def with_frozen(self, trained: PyTree, tree: PyTree) -> PyTree:
        """Return `trained` with its Nones replaced by the leaves of `tree`."""
        return jax.tree.map(lambda x, y: y if x is None else x, trained, tree, is_leaf=lambda x: x is None)

    def named(self, specs: PyTree, mesh: AnyMesh | None = None) -> PyTree:
        """Return NamedShardings for specs. The default mesh is the mesh of a step, with Auto axes."""
        return jax.tree.map(lambda spec: NamedSharding(mesh or self.mesh, spec), specs, is_leaf=is_spec)

    def _offloaded(self, f: Callable[[Any], Any], opt_state: PyTree) -> PyTree:
        """Apply `f` to the offloaded leaves of the optimizer state."""
        pairs = zip(jax.tree.leaves(opt_state), self.table.optimizer, strict=True)
        return jax.tree.unflatten(jax.tree.structure(opt_state), [f(x) if d.is_on_host else x for x, d in pairs])

    def for_update(self, grads: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Return gradients and optimizer state, with offloaded state moved to device memory."""
        if not any(decision.is_on_host for decision in self.table.optimizer):
            return grads, opt_state
        # Without the barrier, XLA would fetch the state before the gradients exist, and hold both.
        grads, opt_state = jax.lax.optimization_barrier((grads, opt_state))
        return grads, self._offloaded(lambda x: jax.device_put(x, jax.memory.Space.Device), opt_state)

    @functools.cached_property
    def shardings(self) -> TrainState:
        """The sharding of each array of the state. Offloaded optimizer state is in pinned host memory."""
        optimizer = self.named(self.layout.optimizer, self.given_mesh)
        optimizer = self._offloaded(lambda sharding: sharding.with_memory_kind("pinned_host"), optimizer)
        params, extra = self.named((self.layout.params, self.layout.extra), self.given_mesh)
        return self._state(
            params, optimizer, extra, self.replicated_sharding, (self.replicated_sharding, self.replicated_sharding)
        )

    @functools.cached_property
    def abstract(self) -> TrainState:
        """Shape, dtype and sharding of each array of the state."""
        (params, extra), count = self.layout.variables, jax.ShapeDtypeStruct((), np.int32)
        shapes = self._state(params, self.layout.opt_state, extra, key_data_like(), (count, count))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, self.shardings
        )

    def _state(self, params: PyTree, opt_state: PyTree, extra: PyTree, key: Any, counts: tuple[Any, Any]) -> TrainState:
        return TrainState(
            step=counts[0], params=params, opt_state=opt_state, extra=extra, key=key, skipped=counts[1], setup=self
        )

    def called(self, f: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call a function on the mesh of the step, whatever mesh is set in jax's context."""
        returns_types = is_typed(self.given_mesh) and jax.sharding.get_abstract_mesh() == abstract_of(self.given_mesh)
        with replacing_mesh(self.mesh):
            args, kwargs = with_auto_types((args, kwargs))
            out = f(*args, **kwargs)
        count = math.prod(self.sizes[axis] for axis in self.batch_axes)

        def typed(x: Any) -> Any:
            if not isinstance(x, jax.Array):
                return x
            batch_axes = self.batch_axes if x.ndim and x.shape[0] % count == 0 else None
            spec = PartitionSpec(*[batch_axes] * (x.ndim > 0))
            return jax.sharding.reshard(x, NamedSharding(self.given_mesh, spec))

        return jax.tree.map(typed, out) if returns_types else out

    @clear_context_mesh()
    def init(self, key: jax.Array | int) -> TrainState:
        """Create the state. All arrays are created sharded."""
        check_not_forked("the training state", "create it")
        return self._jitted_init(key_words(key))

    @clear_context_mesh()
    def begin(self, params: PyTree, extra: PyTree, key: jax.Array | int) -> TrainState:
        """Return the initial state for existing arrays, which must be sharded as in `shardings`."""

        def init_rest(key_data: jax.Array, trained: PyTree) -> tuple[PyTree, jax.Array]:
            _, step_key = jax.random.split(jax.random.wrap_key_data(key_data))  # as in `init`
            return self.tx.init(trained), jax.random.key_data(step_key)

        shardings = self.shardings
        program = self.jit(init_rest, (shardings.opt_state, shardings.key))
        opt_state, step_key = program(key_words(key), self.trained(params))
        counts = self.jit(lambda: (jnp.zeros((), jnp.int32),) * 2, (shardings.step, shardings.skipped))()
        return self._state(params, opt_state, extra, step_key, counts)

    @clear_context_mesh()
    def lower_init(self) -> jax.stages.Lowered:
        """Return the lowered program that creates the state."""
        return self._jitted_init.lower(key_data_like())

    @functools.cached_property
    def _jitted_init(self) -> Any:
        def make(key_data: jax.Array) -> TrainState:
            init_key, step_key = jax.random.split(jax.random.wrap_key_data(key_data))
            with tracing(self.mesh, self.strategy):
                params, extra = self.model.init(jax.random.key_data(init_key))
            params = cast_floating(params, self.precision.params)
            opt_state, counts = self.tx.init(self.trained(params)), (jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
            return self._state(params, opt_state, extra, jax.random.key_data(step_key), counts)

        # The program runs once. At level 1, it computes the same values, and XLA compiles it in two thirds of the time.
        is_cpu = isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"
        is_set = OPTIMIZATION_LEVEL in os.environ.get("XLA_FLAGS", "")
        options = {OPTIMIZATION_LEVEL: 1} if is_cpu and not is_set else None
        return self.jit(make, self.shardings, compiler_options=options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The arrays of a training run between steps, as a pytree."""

    step: jax.Array
    """Number of steps, int32."""
    params: PyTree
    """Parameters, as nested dicts of arrays."""
    opt_state: PyTree
    """State of the optimizer."""
    extra: PyTree
    """Variables of the model other than parameters."""
    key: jax.Array
    """Raw data of the PRNG key, uint32[2] with jax's default implementation. Each step folds in its number."""
    skipped: jax.Array
    """Number of updates that were skipped because loss or gradients were not finite, int32."""
    setup: Setup = dataclasses.field(metadata={"static": True})
    """Origin and shardings of the state."""

    def replace(self, **changes: Any) -> TrainState:
        return dataclasses.replace(self, **changes)

    @property
    def table(self) -> ShardingTable:
        return self.setup.table

    @property
    def num_params(self) -> int:
        return self.table.totals.num_params

    def bound(self) -> Any:
        """Return the model with these parameters, as loss functions receive it.

        If the mesh has Explicit axes, or a mesh is set in jax's context, the model is called on Auto axes of the
        state's mesh. If the context has the user's mesh, outputs have its types, and are sharded like the batch if
        their first dim is divisible.
        """
        check_state("state.bound()", self)
        bound = self.setup.model.bind(*with_auto_types((self.params, self.extra)))
        is_plain = jax.sharding.get_abstract_mesh().empty and not is_typed(self.setup.given_mesh)
        return bound if is_plain else self.setup.model.intercept(bound, self.setup.called)


def check_state(where: str, state: object) -> None:
    """Check that `state` is a `TrainState` with live buffers."""
    if not isinstance(state, TrainState):
        fix = "pass the TrainState that mp.init_state(...) or the previous step returned"
        raise problem(where, "use the training state", f"it is a {type(state).__name__}", fix, code="wrong-type")
    if _has_deleted(jax.tree.leaves(state)):
        reason = "its buffers were deleted or donated: a training step donates the buffers of its input state"
        fix = "use the new state, `state, metrics = step(state, batch)`; jax.tree.map(jnp.copy, state) makes a copy"
        raise problem(where, "use this state", reason, fix, code="deleted")


def _has_deleted(leaves: list[Any]) -> bool:
    """Return whether a buffer was deleted. Each step calls this function, because jax 0.10 crashes on such arrays."""
    try:
        return any([leaf.is_deleted() for leaf in leaves])  # noqa: C419 - faster than a generator
    except (AttributeError, jax.errors.ConcretizationTypeError):  # NumPy, abstract or traced arrays
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
        return any(array.is_deleted() for array in arrays)


def make_setup(
    model: Model,
    tx: optax.GradientTransformation,
    mesh: AnyMesh,
    strategy: Strategy | Rules,
    *,
    precision: Precision | None = None,
    trainable: Trainable = None,
) -> Setup:
    """Resolve the shardings of a state without creating it. Errors are those of `shardings`."""
    strategy, precision = as_strategy(strategy), as_precision(precision, "init_state")
    layout = lay_out(model, with_auto_axes("mesh", mesh), strategy, tx, precision, trainable)
    params = only([d.leaf.is_trained for d in layout.table.params], *[layout.variables.params] * 2)
    if any(map(is_key, jax.tree.leaves(layout.opt_state))):
        tx = _with_raw_keys(tx, params)
        layout = dataclasses.replace(layout, opt_state=jax.eval_shape(tx.init, params))
    check_averages(layout.opt_state, params)
    return Setup(
        model=model, tx=tx, given_mesh=mesh, strategy=strategy, precision=precision, layout=layout, trainable=trainable
    )


def _with_raw_keys(tx: optax.GradientTransformation, params: PyTree) -> optax.GradientTransformation:
    """Store raw key data in the state of an optimizer with typed PRNG keys."""
    traced: list[PyTree] = []
    jax.eval_shape(lambda params: traced.append(key_impls(tx.init(params))), params)

    @functools.wraps(tx.update)
    def update(grads: PyTree, state: PyTree, *args: Any, **kwargs: Any) -> tuple[PyTree, PyTree]:
        updates, new = tx.update(grads, with_key_types(state, traced[0]), *args, **kwargs)
        return updates, without_key_types(new)

    make = optax.GradientTransformation
    if isinstance(tx, optax.GradientTransformationExtraArgs):
        make = optax.GradientTransformationExtraArgs
    return make(lambda params: without_key_types(tx.init(params)), update)


def abstract_state(
    model: Model,
    tx: optax.GradientTransformation,
    mesh: AnyMesh,
    strategy: Strategy | Rules,
    *,
    precision: Precision | None = None,
    trainable: Trainable = None,
) -> TrainState:
    """Return the shapes, dtypes and shardings of a state, without arrays.

    Args:
      model, tx, mesh, strategy, precision, trainable: as in `init_state`. The mesh may be abstract.

    Returns:
      A `TrainState` of `jax.ShapeDtypeStruct`, for `explain`, for lowering and for restoring checkpoints.

    Raises:
      MeshparError: as in `shardings`.

    Example:
      >>> mesh = mp.MeshSpec(fsdp=512, tensor=8).abstract()
      >>> config = mp.models.llama3_8b()
      >>> state = mp.abstract_state(config.build(), optax.adamw(3e-4), mesh=mesh, strategy=mp.fsdp())
      >>> state.params["embed"]["embedding"].shape
      (128256, 4096)
    """
    return make_setup(model, tx, mesh=mesh, strategy=strategy, precision=precision, trainable=trainable).abstract


def init_state(
    model: Model,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    strategy: Strategy | Rules,
    *,
    key: jax.Array | int,
    precision: Precision | None = None,
    trainable: Trainable = None,
) -> TrainState:
    """Create a training state. All arrays are created sharded, so no device ever stores a full sharded array.

    Args:
      model: a model from an adapter.
      tx: an optax optimizer. The step passes `value`, `grad`, `value_fn` and `obj_fn` to optimizers that take them.
      mesh: the devices.
      strategy: a strategy, or `Rules`.
      key: a PRNG key, or a seed.
      precision: its `params` is the dtype in which parameters are created.
      trainable: the trainable parameters, as a pattern for full paths or a predicate of the path. The other parameters
        are frozen: they have no gradient, no optimizer state and no part in `grad_norm`. The default is all.

    Returns:
      The state, a pytree.

    Raises:
      MeshparError: as in `shardings`, or the mesh is abstract.

    Example:
      >>> state = mp.init_state(model, optax.adamw(3e-4), mesh=mesh, strategy=strategy, key=0)
      >>> state.params["up"]["kernel"].sharding.spec
      P('fsdp', 'tensor')
    """
    _check_devices("init_state", mesh)
    setup = make_setup(model, tx, mesh=mesh, strategy=strategy, precision=precision, trainable=trainable)
    return setup.init(key)


def _check_devices(where: str, mesh: AnyMesh) -> None:
    reason, fix = "the mesh is abstract and has no devices", "use MeshSpec.build(), or abstract_state"
    check_cases(where, "create arrays", "abstract-mesh", (not isinstance(mesh, Mesh), reason, fix))


@clear_context_mesh()
def load_params(state: TrainState, params: PyTree) -> TrainState:
    """Return a state with pretrained weights and a new optimizer state.

    The parameters are copies, so a step with the result leaves `params` as they are. All other arrays are shared with
    the input state.

    Args:
      state: the state.
      params: arrays with the structure of `state.params`, as nested dicts or an `nnx.State`. They are equal on all
        processes. Each is cast to the dtype and sharded like the parameter of the state.

    Raises:
      MeshparError: a parameter is missing, unknown, not finite, too large for the dtype, or has a different shape or
        kind of dtype, or the state has no arrays.

    Example:
      >>> state = mp.load_params(state, jax.tree.map(np.zeros_like, jax.device_get(state.params)))
    """
    check_state("load_params", state)
    setup = state.setup
    _check_devices("load_params", setup.given_mesh)
    params = params.to_pure_dict() if hasattr(params, "to_pure_dict") else params
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(setup.layout.variables.params)]
    counts = collections.Counter(map(path_str, paths))

    def name(path: tuple[Any, ...]) -> str:  # the keys `a/b` and `a: {b}` would have the same path
        return path_str(path) if counts[path_str(path)] < 2 else jax.tree_util.keystr(path)

    weights = {name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: x is None)}
    decisions = dict(zip(map(name, paths), setup.table.params, strict=True))
    from_state = "pass all arrays, {**state.params, ...}"
    reason = f"there are none, and the model has {len(decisions)} parameters, such as `{next(iter(decisions), '')}`"
    check_cases("load_params", "load weights", "missing-argument", (decisions and not weights, reason, from_state))
    for path in sorted(decisions.keys() ^ weights.keys()):
        check_cases(
            f"load_params, `{path}`", "load it", "unknown-name",
            (path in decisions, "none of the weights has this path", near_or(path, weights, from_state)),
            (True, "the model has no such parameter", near_or(path, decisions, "leave it out")),
        )  # fmt: skip
    loaded = [
        jax.device_put(_cast(path, weights[path], decision.leaf), NamedSharding(setup.given_mesh, decision.spec))
        for path, decision in decisions.items()
    ]
    others = [*jax.tree.leaves(state.extra), *(x for x in weights.values() if isinstance(x, jax.Array))]
    new = jax.tree.unflatten(jax.tree.structure(state.params), _without_aliases(loaded, others))
    init = setup.jit(setup.tx.init, setup.shardings.opt_state)
    return state.replace(params=new, opt_state=init(setup.trained(new)))


def _without_aliases(arrays: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
    """Copy arrays that share a buffer with an earlier array or with `others`, because a step donates all of them."""

    def buffers(x: jax.Array) -> set[tuple[int, int]]:
        return {(s.device.id, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards if s.data.size}

    used = set[tuple[int, int]]().union(*map(buffers, others))
    result = []
    for x in arrays:
        result.append(jax.jit(jnp.copy, out_shardings=x.sharding)(x) if used & buffers(x) else x)
        used |= buffers(result[-1])
    return result


def _cast(path: str, x: Any, leaf: Leaf) -> Any:
    """Return a weight in the dtype of its parameter, after checking its shape and values."""
    where = f"load_params, `{path}`"
    check_cases(where, "load it", "wrong-type", (x is None, "the weight is None", "pass an array"))
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    kinds = [
        next((kind for kind in (jnp.complexfloating, jnp.floating) if jnp.issubdtype(dtype, kind)), None)
        for dtype in (x.dtype, leaf.dtype)
    ]
    requested, reason = f"load {x.dtype.name}{list(x.shape)}", f"the model has {leaf.dtype.name}{list(leaf.shape)}"
    is_other = x.shape != leaf.shape or kinds[0] is not kinds[1]
    check_cases(where, requested, "wrong-shape", (is_other, reason, "transpose, reshape or cast it first"))
    # NumPy's isfinite does not support bfloat16.
    values = x if isinstance(x, jax.Array) else x.astype(np.complex128 if kinds[0] is jnp.complexfloating else float)
    is_finite = kinds[0] is None or bool((jnp if values is x else np).isfinite(values).all())
    check_cases(where, "use it", "not-finite", (not is_finite, "some values are not finite", "check their origin"))
    with np.errstate(over="ignore"):
        cast = x.astype(leaf.dtype)
    if not bool((jnp.isfinite(cast) if kinds[0] is not None else cast == x).all()):
        reason = f"its largest value, {float(abs(x).max()):.3g}, is out of the range of {leaf.dtype.name}"
        fix = "scale or clip it first, or create the state with mp.Precision(params=...) of a larger dtype"
        raise problem(where, f"convert {x.dtype.name} to {leaf.dtype.name}", reason, fix, code="out-of-range")
    return cast


def key_words(key: jax.Array | int) -> np.ndarray:
    """Return the raw data of a key or a seed, on the host so that it is not committed to a device."""
    key = jax.random.key(key) if isinstance(key, int | np.integer) else key
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(key) if typed else key)
