"""TrainState: everything held between steps, born sharded."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.layers.precision import Precision, as_precision, cast_floating
from meshpar.optim.orthogonalized import Updating
from meshpar.parallel import Strategy, as_strategy
from meshpar.parallel.batch import batch_sharding, split_by
from meshpar.sharding.adapters import (
    OVERWRITTEN,
    Model,
    call_through,
    is_key,
    key_data_like,
    key_impls,
    with_key_types,
    without_key_types,
)
from meshpar.sharding.constraints import abstract_of, is_typed, with_auto_types, without_types
from meshpar.sharding.context import apart, replacing_mesh, tracing
from meshpar.sharding.mesh import with_auto_axes
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import AnyMesh, Leaf, PyTree, axes_of_spec, axis_sizes, is_spec, near_or, path_str, problem
from meshpar.training.sharding_table import ShardingTable, TableLayout, Trainable, lay_out, only


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """What a state was made of and how it lies. Compared by identity, as it is part of a compiled program's key."""

    model: Model
    tx: optax.GradientTransformation
    given_mesh: AnyMesh
    """As the user gave it: what arrays lie on between steps, with its types."""
    strategy: Strategy
    precision: Precision
    layout: TableLayout
    trainable: Trainable = None

    @property
    def table(self) -> ShardingTable:
        return self.layout.table

    @functools.cached_property
    def mesh(self) -> AnyMesh:
        """The mesh that a step is traced on, its axes Auto."""
        return with_auto_axes("mesh", self.given_mesh)

    @property
    def whole(self) -> NamedSharding:
        """Replicated, on the mesh as given: how metrics lie."""
        return NamedSharding(self.given_mesh, PartitionSpec())

    def jit(self, f: Callable[..., PyTree], out: PyTree, **options: Any) -> Any:
        """`jax.jit` of a function that is traced on Auto axes; what it takes and gives has the given mesh's types."""
        return jax.jit(without_types(f, self.given_mesh), out_shardings=out, **options)

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        """How a batch lies: its first dim by the strategy's rule for `batch`."""
        return batch_sharding(self.mesh, self.strategy)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes of more than one rank that split the batch."""
        return split_by(self.batch_sharding)

    @property
    def sizes(self) -> dict[str, int]:
        """Of every mesh axis."""
        return axis_sizes(self.mesh)

    @functools.cached_property
    def splitting_modules(self) -> frozenset[str]:
        """Modules with a parameter of their own that is split over axes that do not split the batch."""
        batch = set(self.batch_axes)
        return frozenset(
            one.path.rpartition("/")[0] for one in self.table.params if set(axes_of_spec(one.spec, self.sizes)) - batch
        )

    @functools.cached_property
    def updating(self) -> Updating:
        """How arrays lie where the optimizer updates them, by path."""
        specs = jax.tree.leaves(self.layout.updates, is_leaf=is_spec)
        return Updating(self.mesh, {one.path: spec for one, spec in zip(self.table.params, specs, strict=True)})

    @property
    def is_frozen(self) -> tuple[bool, ...]:
        """Of each parameter, in the order of the table."""
        return tuple(not decision.leaf.is_trained for decision in self.table.params)

    def trained(self, tree: PyTree) -> PyTree:
        """Of a tree like the parameters what the optimizer updates; None stands for the others."""
        return only([not frozen for frozen in self.is_frozen], tree, self.layout.variables.params)

    def overwritten(self, extra: PyTree) -> dict[str, PyTree]:
        """Of what a Linen module keeps the collection whose next values are its gradients."""
        return {OVERWRITTEN: extra[OVERWRITTEN]} if self.model.kind == "linen" and OVERWRITTEN in extra else {}

    def with_frozen(self, trained: PyTree, tree: PyTree) -> PyTree:
        """A tree like the parameters: what `trained` has, and what it has not of `tree`."""
        return jax.tree.map(lambda x, y: y if x is None else x, trained, tree, is_leaf=lambda x: x is None)

    def named(self, specs: PyTree) -> PyTree:
        """A tree of PartitionSpecs as NamedShardings, for arrays inside a step."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)

    def _lying(self, specs: PyTree) -> PyTree:
        """The same for arrays between steps."""
        return jax.tree.map(lambda spec: NamedSharding(self.given_mesh, spec), specs, is_leaf=is_spec)

    def _between_steps(self, shardings: PyTree) -> PyTree:
        """Of the optimizer's state: what is offloaded lies in pinned memory of the host."""
        return self._offloaded(lambda sharding: sharding.with_memory_kind("pinned_host"), shardings)

    def _offloaded(self, f: Callable[[Any], Any], opt_state: PyTree) -> PyTree:
        """A tree like the optimizer's state, f of those that are offloaded."""
        pairs = zip(jax.tree.leaves(opt_state), self.table.optimizer, strict=True)
        return jax.tree.unflatten(jax.tree.structure(opt_state), [f(x) if d.is_on_host else x for x, d in pairs])

    def for_update(self, grads: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Gradients and the optimizer's state, traced, all in the device's memory."""
        if not any(decision.is_on_host for decision in self.table.optimizer):
            return grads, opt_state
        # XLA would fetch it while gradients are made, and hold both: the barrier has it come when they are there.
        grads, opt_state = jax.lax.optimization_barrier((grads, opt_state))
        return grads, self._offloaded(lambda x: jax.device_put(x, jax.memory.Space.Device), opt_state)

    @functools.cached_property
    def shardings(self) -> TrainState:
        """A NamedSharding for every array of the state."""
        return TrainState(
            step=self.whole,
            params=self._lying(self.layout.params),
            opt_state=self._between_steps(self._lying(self.layout.optimizer)),
            extra=self._lying(self.layout.extra),
            key=self.whole,
            skipped=self.whole,
            setup=self,
        )

    @functools.cached_property
    def abstract(self) -> TrainState:
        """Shape, dtype and sharding of every array of the state."""
        like = TrainState(
            step=jax.ShapeDtypeStruct((), np.int32),
            params=self.layout.variables.params,
            opt_state=self.layout.opt_state,
            extra=self.layout.variables.extra,
            key=key_data_like(),
            skipped=jax.ShapeDtypeStruct((), np.int32),
            setup=self,
        )
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like, self.shardings
        )

    def called(self, f: Callable[..., PyTree], *args: Any, **kwargs: Any) -> PyTree:
        """What a bound model gives, in any context of jax's."""
        is_typed_here = is_typed(self.given_mesh) and jax.sharding.get_abstract_mesh() == abstract_of(self.given_mesh)
        with replacing_mesh(self.mesh):
            args, kwargs = with_auto_types((args, kwargs))
            out = f(*args, **kwargs)
        count = math.prod(self.sizes[axis] for axis in self.batch_axes)

        def typed(x: Any) -> Any:
            if not isinstance(x, jax.Array):
                return x
            rows = self.batch_axes if x.ndim and x.shape[0] % count == 0 else None
            return jax.sharding.reshard(x, NamedSharding(self.given_mesh, PartitionSpec(*[rows] * (x.ndim > 0))))

        return jax.tree.map(typed, out) if is_typed_here else out

    @apart()
    def init(self, key: jax.Array | int) -> TrainState:
        """Make the state; every array is born in its shards."""
        return self._jitted_init(key_words(key))

    @apart()
    def begin(self, params: PyTree, extra: PyTree, key: jax.Array | int) -> TrainState:
        """The state before the first step of a model whose arrays are there, laid out as `shardings` says."""

        def rest(key_data: jax.Array, trained: PyTree) -> tuple[PyTree, jax.Array]:
            _, step_key = jax.random.split(jax.random.wrap_key_data(key_data))  # as in `init`
            return self.tx.init(trained), jax.random.key_data(step_key)

        lie = self.shardings
        made = self.jit(rest, (lie.opt_state, lie.key))
        opt_state, step_key = made(key_words(key), self.trained(params))
        zeros = self.jit(lambda: (jnp.zeros((), jnp.int32),) * 2, (lie.step, lie.skipped))()
        step, skipped = zeros
        return TrainState(
            step=step, params=params, opt_state=opt_state, extra=extra, key=step_key, skipped=skipped, setup=self
        )

    @apart()
    def lower_init(self) -> Any:
        """The lowered program that makes the state, to look at."""
        return self._jitted_init.lower(key_data_like())

    @functools.cached_property
    def _jitted_init(self) -> Any:
        def make(key_data: jax.Array) -> TrainState:
            init_key, step_key = jax.random.split(jax.random.wrap_key_data(key_data))
            with tracing(self.mesh, self.strategy):
                params, extra = self.model.init(jax.random.key_data(init_key))
            params = cast_floating(params, self.precision.params)
            return TrainState(
                step=jnp.zeros((), jnp.int32),
                params=params,
                opt_state=self.tx.init(self.trained(params)),
                extra=extra,
                key=jax.random.key_data(step_key),
                skipped=jnp.zeros((), jnp.int32),
                setup=self,
            )

        return self.jit(make, self.shardings)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything held between steps; a pytree."""

    step: Any
    """Steps taken, int32."""
    params: PyTree
    """Parameters, nested dicts of arrays."""
    opt_state: PyTree
    """The optimizer's own."""
    extra: PyTree
    """What the model keeps beside parameters."""
    key: Any
    """Raw data of the random key, uint32[2] by jax's default implementation; every step folds its number in."""
    skipped: Any
    """Skipped updates: loss or gradients were not finite; int32."""
    setup: Setup = dataclasses.field(metadata={"static": True})
    """What it was made of."""

    def replace(self, **changes: Any) -> TrainState:
        return dataclasses.replace(self, **changes)

    @property
    def table(self) -> ShardingTable:
        return self.setup.table

    @property
    def num_params(self) -> int:
        return self.table.totals.num_params

    def bound(self) -> Any:
        """The model with these parameters, as a loss function is given it.

        If the mesh has Explicit axes, or jax's own context holds a mesh, the model is called on Auto axes of the
        state's mesh. If the context holds the mesh as given, outputs have its types and the layout of the batch where
        their first dim divides.
        """
        check_state("state.bound()", self)
        bound = self.setup.model.bind(*with_auto_types((self.params, self.extra)))
        is_plain = jax.sharding.get_abstract_mesh().empty and not is_typed(self.setup.given_mesh)
        return bound if is_plain else call_through(bound, self.setup.called)


def check_state(where: str, state: Any) -> None:
    """Check that `state` is a `TrainState` with live buffers.

    Raises:
      ValueError: another type, or deleted arrays.
    """
    if not isinstance(state, TrainState):
        exists = f"its first argument is a {type(state).__name__}"
        fix = "pass the TrainState that mp.init_state(model, tx, mesh=..., strategy=..., key=...) returns first"
        raise problem(where, "use the training state", exists, fix)
    arrays = (x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
    if any(x.is_deleted() for x in arrays):
        exists = "its buffers were deleted or donated: a training step donates the buffers of its input state"
        fix = "use the new state, `state, metrics = step(state, batch)`; jax.tree.map(jnp.copy, state) makes a copy"
        raise problem(where, "use this state", exists, fix)


def make_setup(
    model: Model,
    tx: optax.GradientTransformation,
    mesh: AnyMesh,
    strategy: Strategy | Rules,
    *,
    precision: Precision | None = None,
    trainable: Trainable = None,
) -> Setup:
    """Resolve every leaf of a state without making it; errors as in `shardings`."""
    strategy, precision = as_strategy(strategy), as_precision(precision, "init_state")
    layout = lay_out(model, with_auto_axes("mesh", mesh), strategy, tx, precision, trainable)
    if any(map(is_key, jax.tree.leaves(layout.opt_state))):
        params = only([one.leaf.is_trained for one in layout.table.params], *[layout.variables.params] * 2)
        tx = _with_raw_keys(tx, params)
        layout = dataclasses.replace(layout, opt_state=jax.eval_shape(tx.init, params))
    return Setup(
        model=model, tx=tx, given_mesh=mesh, strategy=strategy, precision=precision, layout=layout, trainable=trainable
    )


def _with_raw_keys(tx: optax.GradientTransformation, params: PyTree) -> optax.GradientTransformation:
    """Let the optimizer's state hold raw words where the optimizer itself keeps typed random keys."""
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
    """The state's shapes, dtypes and shardings, with no arrays behind them: to lower, plan and restore with."""
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
    """Make a training state, every array born in its shards: no device ever holds a whole copy of a split array.

    Args:
      model: from an adapter.
      tx: an optax optimizer. One that asks for `value`, `grad`, or the loss at other parameters (`value_fn`, `obj_fn`),
        as line searches do, is given it by the step.
      mesh: the devices, by axis.
      strategy: a strategy, or bare `Rules`.
      key: a jax random key, or a seed.
      precision: when it names a parameter dtype, parameters are made in it.
      trainable: which parameters are trained, by a pattern for their whole paths, or a function from a path to a truth.
        The others are frozen: no gradient, no reduction, no optimizer state, and no part of `grad_norm`. None: all.

    Raises:
      ValueError: as in `shardings`; or an abstract mesh.
    """
    _check_devices("init_state", mesh)
    setup = make_setup(model, tx, mesh=mesh, strategy=strategy, precision=precision, trainable=trainable)
    return setup.init(key)


def _check_devices(where: str, mesh: AnyMesh) -> None:
    if not isinstance(mesh, Mesh):
        exists, fix = "the mesh is abstract: it has no devices", "use MeshSpec.build(), or abstract_state"
        raise problem(where, "make arrays", exists, fix)


@apart()
def load_params(state: TrainState, params: PyTree) -> TrainState:
    """Put pretrained weights into a state; go on with the one returned, which shares arrays with it.

    An array that is given for several parameters is copied.

    Args:
      state: from `init_state`. Its optimizer begins anew with the weights; all else stays.
      params: as `state.params`: nested dicts (or what has their paths, an `nnx.State` too) of arrays, NumPy's or jax's,
        the same on every process. Each is cast to the dtype of the state's and laid out as that lies.

    Raises:
      ValueError: a parameter that is missing or unknown, has another shape, is no number where the state's is one, is
        infinite or not a number, or larger than the state's dtype holds; a state without arrays.

    Example:
      >>> state = load_params(state, {**state.params, "head": new_head})  # the others as they are
    """
    check_state("load_params", state)
    setup = state.setup
    _check_devices("load_params", setup.given_mesh)
    params = params.to_pure_dict() if hasattr(params, "to_pure_dict") else params
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(setup.layout.variables.params)]
    name = _names_of(paths)
    given = {name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: x is None)}
    known = dict(zip(map(name, paths), setup.table.params, strict=True))
    keep = "take it from the state: {**state.params, ...}"
    if known and not given:
        exists = f"none are given; the model has {len(known)}, from `{next(iter(known))}` on"
        raise problem("load_params", "put weights in", exists, f"give one for each parameter, or {keep}")
    for path in sorted(path for path, x in given.items() if x is None and path in known):
        raise problem(f"load_params, `{path}`", "put weights in it", "None is given", f"give an array, or {keep}")
    for path in sorted(known.keys() ^ given.keys()):
        is_known = path in known
        exists = f"the {len(given)} weights given have no such path" if is_known else "the model has no such parameter"
        fix = near_or(path, given, keep) if is_known else near_or(path, known, "leave it out")
        raise problem(f"load_params, `{path}`", "find weights for it" if is_known else "put it in", exists, fix)
    loaded = [
        jax.device_put(_fitting(path, given[path], decision.leaf), NamedSharding(setup.given_mesh, decision.spec))
        for path, decision in known.items()
    ]
    new = jax.tree.unflatten(jax.tree.structure(state.params), _without_aliases(loaded, jax.tree.leaves(state.extra)))
    begin = setup.jit(setup.tx.init, setup.shardings.opt_state)
    return state.replace(params=new, opt_state=begin(setup.trained(new)))


def _without_aliases(arrays: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
    """Copy each array that shares a buffer with one before it or with `others`: a step donates all of them."""

    def buffers(x: jax.Array) -> set[tuple[int, int]]:
        return {(s.device.id, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards if s.data.size}

    taken = set[tuple[int, int]]().union(*map(buffers, others))
    own = []
    for x in arrays:
        own.append(jax.jit(jnp.copy, out_shardings=x.sharding)(x) if taken & buffers(x) else x)
        taken |= buffers(own[-1])
    return own


def _names_of(paths: Sequence[tuple[Any, ...]]) -> Callable[[tuple[Any, ...]], str]:
    """Return a function from key paths to names; with keys `a/b` and `a: {b}` two paths are the same string."""
    counts = collections.Counter(map(path_str, paths))
    return lambda path: path_str(path) if counts[path_str(path)] < 2 else jax.tree_util.keystr(path)


def _fitting(path: str, x: Any, leaf: Leaf) -> Any:
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    kinds = [_kind(dtype) for dtype in (x.dtype, leaf.dtype)]
    if x.shape != leaf.shape or kinds[0] != kinds[1]:
        asked, fix = f"take {x.dtype.name}{list(x.shape)}", "transpose, reshape or cast it first"
        raise problem(f"load_params, `{path}`", asked, f"the model has {leaf.dtype.name}{list(leaf.shape)}", fix)
    if kinds[0] == "exact":
        _check_kept(path, x, leaf.dtype, bool(np.all(x.astype(leaf.dtype) == x)))
        return x.astype(leaf.dtype)
    wide = x if isinstance(x, jax.Array) or kinds[0] == "complex" else x.astype(np.float64)  # NumPy's bfloat16
    if not bool((jnp if isinstance(x, jax.Array) else np).isfinite(wide).all()):
        where, exists = f"load_params, `{path}`", "some are infinite or not a number"
        raise problem(
            where, "train from these weights", exists, "look at where they come from: no step makes them finite again"
        )
    with np.errstate(over="ignore"):
        cast = x.astype(leaf.dtype)
    _check_kept(path, x, leaf.dtype, bool(jnp.isfinite(cast).all()))
    return cast


def _kind(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(dtype, jnp.floating) else "exact"


def _check_kept(path: str, x: Any, dtype: np.dtype, is_kept: bool) -> None:
    if not is_kept:
        largest = float(abs(x).max())
        exists = f"its numbers go up to {largest:.3g}, which {dtype.name} does not hold"
        fix = "scale or clip them first, or make the state with mp.Precision(params=...) of a wider dtype"
        raise problem(f"load_params, `{path}`", f"take {x.dtype.name} as {dtype.name}", exists, fix)


def key_words(key: jax.Array | int) -> np.ndarray:
    """Raw data of a key or a seed, on the host so that it belongs to no device yet."""
    key = jax.random.key(key) if isinstance(key, int | np.integer) else key
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(key) if typed else key)
