"""Adapters that convert a Flax NNX module, a Flax Linen module or plain functions to a `Model`.

A `Model` creates the arrays, provides their logical names, and converts arrays to the argument `model` of a loss
function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from meshpar.sharding.activations import (
    calling,
    check_array_outputs,
    constrain_output,
    in_module,
    remat_of,
    use_dot_general,
)
from meshpar.sharding.context import Ambient, ambient, auto_sizes, current
from meshpar.sharding.rules import First, InTurn
from meshpar.sharding.types import (
    Leaf,
    Names,
    PyTree,
    check_takes,
    leaf_of,
    near,
    near_or,
    path_str,
    problem,
    spec_axes,
    tree_leaves_with_paths,
)

Path: TypeAlias = tuple[str, ...]
"""Keys of a variable in nested dicts."""


class Variables(NamedTuple):
    """Arrays of a model, as nested dicts."""

    params: PyTree
    """Parameters, which the optimizer updates."""
    extra: PyTree
    """Other state: batch statistics, the state of random streams, caches."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """Interface of a model. Created by `from_nnx`, `from_linen` or `from_functions`."""

    kind: Literal["nnx", "linen", "functions"]
    init: Callable[[jax.Array], Variables]
    """Pure function from a key to the arrays. It is traced for shapes, and jitted to create sharded arrays."""
    bind: Callable[[PyTree, PyTree], Any]
    """Return the argument `model` of a loss function, from (params, extra)."""
    collect: Callable[[Any], PyTree]
    """Return the new `extra` from the bound model, after the forward pass."""
    names: Callable[[], Mapping[str, Names]]
    """Return the logical names of each parameter that has names, by path. Call it after `init`."""
    random_keys: Callable[[], Mapping[str, str]] = dict
    """Return the PRNG implementation of each random key in `extra`, by path. `extra` itself has raw key data only."""
    batch_stats: Callable[[PyTree], frozenset[str]] = lambda extra: frozenset()
    """Return the paths in `extra` of batch statistics: `nnx.BatchStat`, and Linen's collection `batch_stats`."""
    is_explicit: bool = False
    """Whether model and loss determine all shardings themselves; see `explicit`."""
    after_update: Callable[[PyTree], PyTree] = lambda extra: extra
    """Return `extra` for the next step. Called after all micro-steps of a training step."""
    build: Callable[[Any], Any] | None = None
    """The argument of `from_nnx`."""
    lora: Any = None
    """The `meshpar.training.lora.Lora` whose adapters are added. By default only these are trained."""

    def abstract(self) -> Variables:
        """Return shapes and dtypes of the arrays, without computation."""
        return jax.eval_shape(self.init, key_data_like())

    def leaves(self) -> list[Leaf]:
        """Return all parameters with their names."""
        params = self.abstract().params
        names = self.names()
        return [leaf_of(path, x, names.get(path)) for path, x in tree_leaves_with_paths(params)]


def explicit(model: Model) -> Model:
    """Mark a model as written for jax's Explicit axes: types determine the shardings in the model and in the loss.

    Parameters and the batch have the strategy's layout as their type. The model must do what the compiler does on Auto
    axes. It gathers weights with `jax.sharding.reshard`. It passes `out_sharding=` to lookups, reshapes and
    contractions; the sharding may be `unreduced`. If one is missing, jax raises `ShardingTypeError`. `mp.constrain`
    reshards by the strategy's rules. The mesh may have Auto or Explicit axes.

    Source: jax documentation, "Explicit sharding (a.k.a. sharding in types)".

    Args:
      model: from an adapter. The decoders in `meshpar.models` do not support Explicit axes.

    Returns:
      The model with `is_explicit=True`.

    Raises:
      ValueError: `model` is not a Model or has LoRA adapters. `train_step` raises it for engines inside `shard_map`
        (stages, `quantize`, `reduce_gradients="once"`), because Manual axes have no types.

    Example:
      >>> model = mp.explicit(mp.from_functions(init, apply))  # doctest: +SKIP
    """
    if not isinstance(model, Model) or model.lora is not None:
        is_model = isinstance(model, Model)
        reason = (
            "LoRA adapters do not support explicit sharding types"
            if is_model
            else f"a {type(model).__name__} is not a Model"
        )
        fix = "pass the result of mp.from_nnx, from_linen or from_functions, without adapters"
        raise problem("mp.explicit", "trace the model on Explicit axes", reason, fix, code="unsupported-feature")
    return dataclasses.replace(model, is_explicit=True)


# ---- Random keys -----------------------------------------------------------------------------------------------------


def key_data_like() -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of raw key data, for jax's default implementation (`jax_default_prng_impl`)."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))


def is_key(x: Any) -> bool:
    """Return whether an array, concrete or abstract, has typed random keys."""
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_impls(tree: PyTree) -> PyTree:
    """Return the implementation of each typed random key of a pytree, traced or concrete; "" for other leaves."""
    return jax.tree.map(lambda x: jax.random.key_impl(x) if is_key(x) else "", tree)


def without_key_types(tree: PyTree) -> PyTree:
    """Replace typed random keys by raw key data, which can be donated, sharded and saved like other arrays."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def with_key_types(tree: PyTree, impls: PyTree) -> PyTree:
    """Undo `without_key_types`. `impls` is the result of `key_impls` for the pytree with typed keys."""
    return jax.tree.map(lambda impl, x: jax.random.wrap_key_data(x, impl=impl) if impl else x, impls, tree)


def key_of(data: jax.Array) -> jax.Array:
    """Return a typed key from raw key data. The training state has raw data, which all checkpoint formats support."""
    return jax.random.wrap_key_data(data) if data.dtype == jnp.uint32 else data


def _with_raw_keys(model: Model) -> Model:
    """Let `extra` have raw key data outside of the model, and typed random keys inside."""
    traced: list[PyTree] = []

    def init(key: jax.Array) -> Variables:
        params, extra = model.init(key)
        for path, x in tree_leaves_with_paths(params):
            if is_key(x):
                reason = "typed random keys have no gradient"
                fix = "keep keys in the state: from_functions(keeps_state=True), a Linen collection, an nnx.Variable"
                raise problem(f"parameter `{path}`", "train it", reason, fix, code="wrong-dtype")
        traced[:] = [key_impls(extra)]
        return Variables(params, without_key_types(extra))

    def impls() -> PyTree:
        if not traced:
            jax.eval_shape(init, key_data_like())
        return traced[0]

    return dataclasses.replace(
        model, init=init, bind=lambda params, extra: model.bind(params, with_key_types(extra, impls())),
        collect=lambda bound: without_key_types(model.collect(bound)),
        after_update=lambda extra: without_key_types(model.after_update(with_key_types(extra, impls()))),
        random_keys=lambda: {path: impl for path, impl in tree_leaves_with_paths(impls()) if impl},
    )  # fmt: skip


# ---- NNX -------------------------------------------------------------------------------------------------------------


def from_nnx(build: Callable[[Any], Any]) -> Model:
    """Convert a Flax NNX module to a `Model`.

    Logical names come from `nnx.with_partitioning`. If the model has no names, module outputs are sharded along the
    batch, except where `Rules(activations=...)` applies. The loss function receives the module. State that the forward
    pass changes (batch statistics, random counts) becomes part of the training state. A method `after_update()` of a
    module is called after all micro-steps of a training step and may change such state.

    Args:
      build: function that creates the module from an `nnx.Rngs`. It is called while tracing, so no arrays are created
        before the shardings are known. An argument with the name `rngs` is passed by keyword, so a module class
        without further arguments works, too.

    Returns:
      The model.

    Raises:
      ValueError: `build` is a module, does not accept an `nnx.Rngs`, or returns None or a class.

    Example:
      >>> model = mp.from_nnx(lambda rngs: Transformer(cfg, rngs=rngs))  # doctest: +SKIP
    """
    from flax import nnx

    fix = "mp.from_nnx(lambda rngs: Transformer(cfg, rngs=rngs))"
    if isinstance(build, nnx.Module):
        requested, reason = f"use an existing {type(build).__name__}", "its arrays are on a single device"
        raise problem("from_nnx", requested, reason, f"pass a function that creates it: {fix}", code="wrong-type")
    signature = _with_signature(build)
    try:
        parameter = inspect.signature(signature).parameters.get("rngs")
    except (TypeError, ValueError):  # not callable, or a C function without a signature
        parameter = None
    by_name = parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    args, name = () if by_name else ("an nnx.Rngs",), getattr(build, "__name__", "")
    check_takes("from_nnx", signature, args, fix, keywords=["rngs"] * by_name, name=name)
    module = _Nnx((lambda rngs: build(rngs=rngs)) if by_name else build)  # type: ignore[call-arg]
    model = Model(
        kind="nnx", init=module.init, bind=module.bind, collect=lambda bound: _split(bound).extra, names=module.names,
        batch_stats=module.batch_stats, after_update=module.after_update, build=build,
    )  # fmt: skip
    return _with_raw_keys(model)


def _with_signature(build: Any) -> Any:
    """Return a function with the signature of `build`. NNX's metaclass hides the signature of a module class."""
    if isinstance(build, functools.partial):
        return functools.partial(_with_signature(build.func), *build.args, **build.keywords)
    return functools.partial(build.__init__, None) if isinstance(build, type) else build  # type: ignore[misc]


class _Nnx:
    """Structure of an NNX module, and conversion of its state. The module is created while tracing."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self._build = build

    def _create(self, rngs: Any) -> Any:
        from flax import nnx

        # NNX would shard annotated arrays over the context mesh, but the mesh is not known yet.
        with nnx.use_eager_sharding(False):
            try:
                module = self._build(nnx.Rngs(rngs))
            except TypeError as error:
                if "'rngs'" not in str(error):
                    raise
                reason, fix = f"a module gets no `rngs`: {error}", "pass `rngs` on to its submodules"
                raise problem("from_nnx", "create the module", reason, fix, code="wrong-signature") from error
        if module is None or isinstance(module, type):
            reason = f"the function returns {'None' if module is None else f'the class {module.__name__}'}"
            raise problem("from_nnx", "create the module", reason, "return the module", code="wrong-type")
        return module

    @functools.cached_property
    def _structure(self) -> Any:
        """The graph, the parameters and the other state, without arrays."""
        from flax import nnx

        graphs: list[Any] = []

        def states() -> Any:
            graph, *states = nnx.split(self._create(0), nnx.Param, ...)
            graphs.append(graph)
            return states

        # `nnx.eval_shape` would interpret the logical names as axes of the context mesh.
        states_like = jax.eval_shape(states)
        return graphs[0], *states_like

    def init(self, key: jax.Array) -> Variables:
        return _split(self._create(key_of(key)))

    def bind(self, params: PyTree, extra: PyTree) -> Any:
        from flax import nnx

        graph, params_like, extra_like = self._structure
        module = nnx.merge(graph, _filled(params_like, params), _filled(extra_like, extra))
        if current().boundaries is not None:
            for path, submodule in nnx.iter_modules(module):
                _wrap_methods(submodule, _NnxBoundary("/".join(map(str, path))))
                use_dot_general(submodule)
        return module

    def names(self) -> Mapping[str, Names]:
        names = {}
        for path, x in _flat_state(self._structure[1]):
            value, sharding = x.get_value(), x.get_metadata().get("out_sharding")
            if sharding and hasattr(value, "ndim"):
                names[path] = _padded(sharding, value.ndim)
        return names

    def batch_stats(self, extra: PyTree) -> frozenset[str]:
        from flax import nnx

        return frozenset(path for path, x in _flat_state(self._structure[2]) if isinstance(x, nnx.BatchStat))

    def after_update(self, extra: PyTree) -> PyTree:
        from flax import nnx

        graph, params_like, extra_like = self._structure
        if not jax.tree.leaves(extra):
            return extra
        module = nnx.merge(graph, params_like, _filled(extra_like, extra))
        for _, submodule in nnx.iter_modules(module):
            update = getattr(type(submodule), "after_update", None)
            if update is not None:
                update(submodule)
        return _split(module).extra


def call_through(bound: Any, through: Callable[..., Any]) -> Any:
    """Wrap the methods of a newly bound model: each call becomes `through(method, *args, **kwargs)`.

    In an NNX module, these are the public methods of the module and of all its submodules.
    """
    if isinstance(bound, functools.partial):
        return functools.partial(through, bound)
    modules = [bound]
    if not isinstance(bound, BoundLinen | _WithState):
        from flax import nnx

        modules = [module for _, module in nnx.iter_modules(bound)]
    for module in modules:
        _wrap_methods(module, through)
    return bound


def _wrap_methods(module: Any, through: Callable[..., Any]) -> None:
    """Wrap the public methods of a new module: each call becomes `through(method, *args, **kwargs)`.

    Flax NNX has no public API to intercept method calls, like `nn.intercept_methods` in Linen: `nnx.capture` records
    outputs, but cannot change them. Python looks up `__call__` in the class, so the class is replaced by a subclass.
    """
    object.__setattr__(module, "__class__", _wrapped_class(cast(Any, type(module)), through))


@functools.lru_cache(maxsize=4096)
def _wrapped_class(cls: Any, through: Callable[..., Any]) -> Any:
    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return through(functools.partial(method, self), *args, **kwargs)

        return wrapped

    names = ["__call__"]
    if not issubclass(cls, BoundLinen | _WithState):  # also the public methods that `nnx.Module` does not have
        from flax import nnx

        names += [name for name in dir(cls) if not (name.startswith("_") or hasattr(nnx.Module, name))]
    methods = {
        name: wrap(getattr(cls, name)) for name in names if inspect.isfunction(inspect.getattr_static(cls, name, None))
    }
    return type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **methods})


@dataclasses.dataclass(frozen=True)
class _NnxBoundary:
    """Calls a method of an NNX module under the remat rule for its path, and constrains the output."""

    path: str

    def __call__(self, call: functools.partial[Any], *args: Any, **kwargs: Any) -> Any:
        with in_module(self.path):
            remat = remat_of(self.path)
            out = call(*args, **kwargs) if remat is None else self._remat(*remat, call, args, kwargs)
            return constrain_output(self.path, out)

    def _remat(self, policy: Any, within: Any, call: functools.partial[Any], args: Any, kwargs: Any) -> Any:
        from flax import nnx

        (module,) = call.args
        states: Any = nnx.split(module, nnx.Param, ...)
        graph, params, extra = states

        def run(extra: Any) -> Any:
            copy = nnx.merge(graph, params, extra)
            out, after = call.func(copy, *args, **kwargs), cast(Any, nnx.split(copy, nnx.Param, ...))
            check_array_outputs(self.path, out)
            if after[0] != graph:
                reason = "the call changes attributes that are not variables; these changes would be lost"
                fix = "use an nnx.Variable created with the module, or exclude the module from the rules"
                where, code = f"remat rule for `{self.path}`", "unsupported-feature"
                raise problem(where, "recompute the module", reason, fix, code=code)
            return out, after[2]

        with within:
            out, extra = jax.checkpoint(run, policy=policy)(extra)
        nnx.update(module, extra)
        return out


def _split(module: Any) -> Variables:
    from flax import nnx

    def as_array(x: Any) -> Any:  # state may have Python numbers
        return x if hasattr(x, "dtype") else jnp.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))

    _, *states = nnx.split(module, nnx.Param, ...)
    return Variables(*(jax.tree.map(as_array, _with_string_keys(nnx.to_pure_dict(state))) for state in states))


def _flat_state(state: Any) -> Iterator[tuple[str, Any]]:
    from flax import nnx

    for path, variable in nnx.to_flat_state(state):
        yield "/".join(map(str, path)), variable


def _with_string_keys(tree: PyTree) -> PyTree:
    return {str(key): _with_string_keys(x) for key, x in tree.items()} if isinstance(tree, dict) else tree


def _filled(like: Any, values: PyTree) -> Any:
    """Return a state with the structure of `like` and the given values (nested dicts with string keys)."""
    from flax import nnx

    filled = []
    for path, variable in nnx.to_flat_state(like):
        value = functools.reduce(lambda node, key: node[str(key)], path, values)
        # A variable has an array, a pytree or None. Arrays outside of variables are leaves themselves.
        filled.append((path, variable.replace(value) if isinstance(variable, nnx.Variable) else value))
    return nnx.from_flat_state(filled)


def _padded(names: Any, ndim: int) -> Names:
    """Pad names with None for the last dims, like a PartitionSpec."""
    return (*names, *[None] * (ndim - len(names)))


# ---- Linen -----------------------------------------------------------------------------------------------------------

OVERWRITTEN = "_overwrite_with_gradient"
"""Flax's collection for scales and histories of 8-bit matmuls. The gradient of each variable is its next value."""


class LinenInfo(NamedTuple):
    """Properties of a Linen module, determined by an abstract initialization."""

    names: Mapping[str, Names]
    """Logical names by parameter path."""
    sown: frozenset[Path]
    """Paths of sown variables. The first key is the collection."""
    shapes: PyTree
    """Parameters as `jax.ShapeDtypeStruct`s."""


class BoundLinen:
    """A Linen module with its variables, called like the module.

    Collections other than `params` are mutable and part of the training state. Sown values last until the next call.
    """

    def __init__(self, module: Any, info: LinenInfo, params: PyTree, extra: PyTree) -> None:
        self.module, self.info, self.params, self.extra = module, info, params, extra

    def __call__(self, *args: Any, rngs: Any = None, method: Any = None, mutable: Any = None, **kwargs: Any) -> Any:
        """Call `module.apply` with the bound variables; `rngs` and `method` as in Linen."""
        if mutable is not None:
            reason = "all collections other than `params` are mutable and part of the training state"
            fix = "leave out mutable=; the call then returns the module's output alone"
            where = f"model(..., mutable={mutable!r})"
            raise problem(where, "select mutable collections", reason, fix, code="unsupported-feature")
        variables = {"params": self.params, **_without(self.extra, self.info.sown)}
        mutable = list(self.extra)
        with _linen_boundaries(self.info.shapes):
            out = self.module.apply(variables, *args, rngs=rngs, method=method, mutable=mutable or False, **kwargs)
        if mutable:
            out, changed = out
            self.extra = _joined(self.extra, changed)
        return out


def from_linen(module: Any, *example_args: Any, **example_kwargs: Any) -> Model:
    """Convert a Flax Linen module to a `Model`.

    Logical names are set with `nn.with_logical_partitioning` or `nn.with_partitioning`. If the model has no names,
    module outputs are sharded as in `from_nnx`. The loss function receives a `BoundLinen`, called like the module.

    Collections other than `params` are part of the training state. Sown values (`Module.sow`) are kept until the next
    call only. A method `after_update(collections) -> collections` of the module is called after all
    micro-steps of a training step. The collection of Flax's 8-bit matmuls with delayed scaling (`nn.Fp8DotGeneral` as
    `dot_general_cls` of a layer) is replaced by its gradient after each micro-step; no optimizer updates it.

    Args:
      module: the module.
      *example_args, **example_kwargs: example arguments of a call, as arrays or `jax.ShapeDtypeStruct`s. The
        initialization calls the module with them, and with zeros in place of a `ShapeDtypeStruct`. Arrays must be the
        same on all processes. If the module constrains its activations, the batch of the example must be divisible by
        the number of its shards.

    Returns:
      The model.

    Raises:
      ValueError: `module` is not a Linen module, has no parameters, or does not accept the arguments.

    Example:
      >>> model = mp.from_linen(Transformer(cfg), jax.ShapeDtypeStruct((8, 1024), jnp.int32))  # doctest: +SKIP
    """
    from flax import linen as nn

    if not isinstance(module, nn.Module):
        requested, fix = f"use a {type(module).__name__}", "use from_nnx or from_functions"
        raise problem("from_linen", requested, "it is not a flax.linen.Module", fix, code="wrong-type")
    if "__call__" in dir(type(module)):
        call = functools.partial(type(module).__call__, module)
        fix = "mp.from_linen(module, example_batch), with all arguments that the module needs"
        examples = ("an example",) * len(example_args)
        check_takes("from_linen", call, examples, fix, keywords=example_kwargs, name=type(module).__name__)
    linen = _Linen(module, example_args, example_kwargs)
    model = Model(
        kind="linen",
        init=linen.init,
        bind=lambda params, extra: BoundLinen(module, linen.info, params, extra),
        collect=lambda bound: bound.extra,
        names=lambda: linen.info.names,
        batch_stats=lambda extra: frozenset(
            path for path, _ in tree_leaves_with_paths(extra) if path.startswith("batch_stats/")
        ),
        after_update=module.after_update if hasattr(type(module), "after_update") else lambda extra: extra,
    )
    return _with_raw_keys(model)


class _Linen:
    """Initialization of a Linen module with its example arguments."""

    def __init__(self, module: Any, args: Any, kwargs: Any) -> None:
        self._module = module
        self._args, self._kwargs = jax.tree.map(_on_host, (args, kwargs))

    def init(self, key: jax.Array) -> Variables:
        variables = dict(jax.tree.map(_unboxed, self._init_boxed(key), is_leaf=_is_box))
        if "params" not in variables:
            reason, fix = "it has no `params` collection", "add parameters to the module"
            raise problem("from_linen", "train the module", reason, fix, code="not-found")
        return Variables(variables.pop("params"), variables)

    @functools.cached_property
    def info(self) -> LinenInfo:
        sown: set[Path] = set()

        def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            original = type(module).sow

            def sow(col: str, name: str, *args: Any, **kwargs: Any) -> bool:
                sown.add((col, *module.path, name))
                return original(module, col, name, *args, **kwargs)

            # Linen does not intercept `sow`. The module is a frozen copy for this call.
            object.__setattr__(module, "sow", sow)
            return call(*args, **kwargs)

        with linen_methods(intercept):
            params = jax.eval_shape(self._init_boxed, key_data_like())["params"]
        boxes = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_box) if _is_box(x)]
        names = {path_str(path): _padded(_box_names(x), x.value.ndim) for path, x in boxes if _box_names(x)}
        return LinenInfo(names, frozenset(sown), jax.tree.map(_unboxed, params, is_leaf=_is_box))

    def _init_boxed(self, key: jax.Array) -> Any:
        def example(x: Any) -> Any:
            if isinstance(x, jax.ShapeDtypeStruct):
                return jnp.zeros(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
            # jax converts NumPy's float64 and int64 to 32 bits unless x64 is enabled.
            return jnp.asarray(x) if isinstance(x, np.ndarray) else x

        args, kwargs = jax.tree.map(example, (self._args, self._kwargs))
        params_key, dropout_key = jax.random.split(key_of(key))
        rngs = {"params": params_key, "dropout": dropout_key}
        return _without_mesh(functools.partial(self._module.init, rngs, *args, **kwargs))


def _without_mesh(f: Callable[[], Any]) -> Any:
    """Call a Linen initializer without a mesh, because Linen shards parameters by their names if there is a mesh."""
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return f()
    except RuntimeError as error:
        if "requires a non-empty mesh" not in str(error):
            raise
    return f()  # the initializer constrains arrays over mesh axes


def linen_methods(intercept: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Intercept methods as `nn.intercept_methods` does, except for special methods such as `__getattr__`.

    An interceptor that reads an attribute of a module with `__getattr__` would otherwise call itself.
    """
    from flax import linen as nn

    def intercept_regular(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        name = context.method_name
        if name.startswith("__") and name != "__call__":
            return call(*args, **kwargs)
        return intercept(call, args, kwargs, context)

    return nn.intercept_methods(intercept_regular)


@contextlib.contextmanager
def _linen_boundaries(shapes: PyTree) -> Iterator[None]:
    """Constrain module outputs while a Linen module is applied, and define the names of `nn.with_logical_constraint`.

    Names are looked up in `nn.logical_axis_rules` if the user has set them, and then in the activation rules.

    Args:
      shapes: shapes of the full parameters.
    """
    from flax import linen as nn

    rules_context, boundaries = ambient(), current().boundaries
    is_step = rules_context is not None and boundaries is not None

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        path = (*boundaries.prefix, *context.module.path) if is_step else ()
        _override_param(context.module, _at(shapes, path) if is_step else None)
        if not is_step:
            return call(*args, **kwargs)
        use_dot_general(context.module)
        path_text, is_setup = "/".join(path), context.method_name == "setup"
        remat = None if is_setup else remat_of(path_text)
        with calling(path_text):
            out = call(*args, **kwargs) if remat is None else _linen_remat(path_text, context, *remat, args, kwargs)
        return out if is_setup else constrain_output(path_text, out)

    with contextlib.ExitStack() as stack:
        stack.enter_context(linen_methods(intercept))
        if rules_context is not None and is_step:
            user_rules = tuple(nn.get_logical_axis_rules())
            user_names = {name for name, _ in user_rules}
            rules = [(name, axes) for name, axes in _logical_axis_rules(rules_context) if name not in user_names]
            strict = (_UnknownName({*user_names, *rules_context.rules.names}), None)
            stack.enter_context(nn.logical_axis_rules([*user_rules, *rules, strict]))
        yield


def _override_param(module: Any, shapes: PyTree) -> None:
    """Let `module.param` return shards of parameters with these full shapes, and ignore the mesh in initializers.

    Flax compares the shape of a parameter with its initializer, which returns the full shape. A parameter is a shard if
    a pipeline stage has some layers of a stack, or if quantized layers are gathered later.
    """

    def param(name: str, init: Callable[..., Any], *args: Any, unbox: bool = True, **kwargs: Any) -> Any:
        full, local = _at(shapes, (name,)), module.variables.get("params", {}).get(name)
        is_sharded = local is not None and full is not None and _shapes(local) != _shapes(full)

        def expected(*args: Any, **kwargs: Any) -> Any:
            value = _without_mesh(functools.partial(init, *args, **kwargs))
            return local if is_sharded and _shapes(value) == _shapes(full) else value

        return type(module).param(module, name, expected, *args, unbox=unbox, **kwargs)

    object.__setattr__(module, "param", param)  # Linen does not intercept `param`; the module is a copy for this call


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [jnp.shape(x) for x in jax.tree.leaves(tree)]


def _at(tree: PyTree, path: Path) -> Any:
    """Return the value in nested dicts at a path, or None."""
    return functools.reduce(lambda node, key: node.get(key) if isinstance(node, Mapping) else None, path, tree)


def _linen_remat(path: str, context: Any, policy: Any, within: Any, args: Any, kwargs: Any) -> Any:
    """Call a method of a Linen module that the backward pass recomputes."""
    from flax import linen as nn

    def run(module: Any) -> Any:
        with nn.override_named_call(True):
            out = context.orig_method.func(module, *args, **kwargs)
        check_array_outputs(path, out)
        return out

    # Linen intercepts `run`, too, and would open the module's named scope a second time.
    run.__name__ = context.method_name
    with within, nn.override_named_call(False):
        return nn.remat(run, policy=policy)(context.module)


def _logical_axis_rules(context: Ambient) -> Iterator[tuple[str, Any]]:
    """Yield the activation rules in the format of Flax. A rule with alternatives yields a pair for each."""
    sizes = auto_sizes(context)
    lines: list[tuple[int, str, Any]] = []
    for name in sorted(context.rules.names):
        rule = context.rules.name_rule(name)
        value = None if rule is None or not isinstance(rule.value, str | tuple | First) else rule.value
        alternatives = value.alternatives if isinstance(value, First) else (value,)
        numbers = value.lines if isinstance(value, InTurn) else (0,) * len(alternatives)
        lines += zip(numbers, (name,) * len(alternatives), alternatives, strict=True)
    for _, name, axes in sorted(lines, key=lambda line: line[0]):
        yield name, tuple(axis for axis in spec_axes(axes) if sizes.get(axis, 1) > 1) or None


class _UnknownName(str):
    """The name in the last logical axis rule, which raises an error if it is compared with an unknown name.

    Flax compares the names in a constraint with the name in each rule. By default it replicates dims with unknown
    names, and it has no public API to change the default `fallback` of `nn.with_logical_constraint`.
    """

    _valid: set[str]

    def __new__(cls, valid: set[str]) -> _UnknownName:
        self = super().__new__(cls, "meshpar")
        self._valid = valid
        return self

    def __eq__(self, name: object) -> bool:
        if isinstance(name, str) and name not in self._valid and not isinstance(name, _UnknownName):
            where, requested = f"nn.with_logical_constraint, name `{name}`", "shard a dim of an activation"
            reason = "this name is not in the activation rules of the strategy or in nn.logical_axis_rules"
            fix = f"add it to the strategy, mp.Rules({name}=...), or call the step inside nn.logical_axis_rules"
            raise problem(where, requested, reason, near_or(name, self._valid, fix), code="unknown-name")
        return False

    __hash__ = str.__hash__


def _without(tree: PyTree, paths: Collection[Path]) -> PyTree:
    """Return nested dicts without the values at these paths."""
    below = {key: [path[1:] for path in paths if path[0] == key] for key in tree} if paths else {}
    return {
        key: _without(x, [path for path in below.get(key, []) if path]) if isinstance(x, Mapping) else x
        for key, x in tree.items()
        if () not in below.get(key, [])
    }


def _joined(tree: PyTree, changed: PyTree) -> PyTree:
    """Return nested dicts with the values of both trees. `changed` takes precedence."""
    if not (isinstance(tree, Mapping) and isinstance(changed, Mapping)):
        return changed
    return {**tree, **{key: _joined(tree[key], x) if key in tree else x for key, x in changed.items()}}


def _on_host(x: Any) -> Any:
    """Convert an example array to NumPy, so that programs for any mesh can use it as a constant."""
    if not isinstance(x, jax.Array) or is_key(x) or isinstance(x, jax.core.Tracer):
        return x
    if not (x.is_fully_addressable or x.is_fully_replicated):
        where, requested = f"from_linen, example array of shape {x.shape}", "initialize the module"
        reason = "its shards are on several processes, but each process must trace the same program"
        fix = "pass jax.ShapeDtypeStruct(x.shape, x.dtype), or a small array that is the same on all processes"
        raise problem(where, requested, reason, fix, code="unsupported-feature")
    return np.asarray(x)


def _is_box(x: Any) -> bool:
    from flax.core import meta

    return isinstance(x, meta.AxisMetadata)


def _box_names(box: Any) -> Names | None:
    """Return the logical names in the metadata of Linen, or of an NNX module in `flax.nnx.bridge.ToLinen`."""
    return getattr(box, "names", None) or getattr(box, "metadata", {}).get("out_sharding")


def _unboxed(x: Any) -> Any:
    # `unbox()` would constrain the array over the context mesh.
    return x.value if _is_box(x) and hasattr(x, "value") else x.unbox() if _is_box(x) else x


# ---- Plain functions -------------------------------------------------------------------------------------------------


def from_functions(
    init: Callable[[jax.Array], PyTree],
    apply: Callable[..., Any],
    *,
    names: Mapping[str, Names] | None = None,
    keeps_state: bool = False,
) -> Model:
    """Convert two plain functions to a `Model`.

    This supports libraries whose models are pytrees or pairs of functions, such as Equinox and Haiku. They have no
    logical names. Use `names`, or `Rules(paths=...)` with the paths that `shardings` prints (`mlp/layers/0/weight`,
    `mlp/~/linear_0/w`), and call `constrain` in `apply`.

    Args:
      init: function from a key to the parameters, a pytree of arrays.
      apply: function from (params, *inputs) to outputs. The loss function receives `apply` with bound parameters.
      names: logical names by path, for example {"up/kernel": ("embed", "mlp")}.
      keeps_state: whether the model has state that no optimizer updates. Then `init` returns (params, state), and
        `apply` maps (params, state, *inputs) to (outputs, state). The state is passed to the next call and the next
        step.

    Returns:
      The model.

    Raises:
      ValueError: `names` has a path without a parameter, or a function with `keeps_state` does not return a pair.

    Example:
      Equinox, where arrays are the parameters and the rest of the module is static:

      >>> shapes = eqx.filter_eval_shape(Net, jax.random.key(0))  # doctest: +SKIP
      >>> static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]  # doctest: +SKIP
      >>> model = from_functions(  # doctest: +SKIP
      ...     lambda key: eqx.partition(Net(key), eqx.is_array)[0],
      ...     lambda params, x: jax.vmap(eqx.combine(params, static))(constrain(x, "batch", None)),
      ... )

      Haiku, without and with state:

      >>> net = hk.without_apply_rng(hk.transform(forward))  # doctest: +SKIP
      >>> model = from_functions(lambda key: net.init(key, example), net.apply)  # doctest: +SKIP
      >>> net = hk.without_apply_rng(hk.transform_with_state(forward))  # doctest: +SKIP
      >>> model = from_functions(lambda key: net.init(key, example), net.apply, keeps_state=True)  # doctest: +SKIP
    """
    for path, dims in (names or {}).items():
        if not isinstance(dims, tuple | list):
            where, reason = (
                f"from_functions(names={{{path!r}: {dims!r}}})",
                f"it is a {type(dims).__name__}, not a tuple",
            )
            raise problem(where, "name the dims", reason, 'write {"up/kernel": ("embed", "mlp")}', code="wrong-type")
    by_path = {path: tuple(dims) for path, dims in (names or {}).items()}

    def init_variables(key: jax.Array) -> Variables:
        out = init(key_of(key))
        params, extra = _checked_pair(out, "init", "(params, state)") if keeps_state else (out, {})
        paths = {path for path, _ in tree_leaves_with_paths(params)}
        for path in by_path.keys() - paths:
            where, reason = f"from_functions(names={{{path!r}: ...}})", "there is no parameter with this path"
            raise problem(where, "name its dims", reason, near(path, paths), code="not-found")
        return Variables(params, extra)

    def bind(params: PyTree, extra: PyTree) -> Any:
        return _WithState(apply, params, extra) if keeps_state else functools.partial(apply, params)

    model = Model(
        kind="functions", init=init_variables, bind=bind, collect=lambda bound: bound.extra if keeps_state else {},
        names=lambda: by_path,
    )  # fmt: skip
    return _with_raw_keys(model)


class _WithState:
    """A function `apply` with bound parameters and state. Each call replaces the state."""

    def __init__(self, apply: Callable[..., Any], params: PyTree, extra: PyTree) -> None:
        self.apply, self.params, self.extra = apply, params, extra

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.apply(self.params, self.extra, *args, **kwargs)
        out, self.extra = _checked_pair(out, "apply", "(outputs, state)")
        return out


def _checked_pair(out: Any, function: str, pair: str) -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2:
        return out
    where, reason = f"from_functions(keeps_state=True), `{function}`", f"it returns a {type(out).__name__}"
    raise problem(where, f"return {pair}", reason, f"return {pair}, or leave out keeps_state", code="wrong-type")
