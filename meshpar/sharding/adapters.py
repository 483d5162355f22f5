"""Adapters: an NNX module, a Linen module or two plain functions, seen as one `Model`.

The spine knows a model only as this: how to make its arrays, what names they carry, and how to turn arrays back into
what a loss function calls.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import threading
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
"""Of a variable, key by key."""


class Variables(NamedTuple):
    """A model's arrays, as plain nested dicts."""

    params: PyTree
    """What the optimizer updates."""
    extra: PyTree
    """What else the model keeps: batch statistics, the state of random streams, caches."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """What meshpar knows of a model. Made by `from_nnx`, `from_linen` or `from_functions`."""

    kind: Literal["nnx", "linen", "functions"]
    init: Callable[[jax.Array], Variables]
    """From a key to the arrays; pure, so that it can be traced for shapes and jitted to be born sharded."""
    bind: Callable[[PyTree, PyTree], Any]
    """From (params, extra) to what a loss function is given as `model`."""
    collect: Callable[[Any], PyTree]
    """From that, after the forward pass, to the new `extra`."""
    names: Callable[[], Mapping[str, Names]]
    """Logical names by the path of the parameter; a leaf that is missing carries none. Call it after `init`."""
    random_keys: Callable[[], Mapping[str, str]] = dict
    """Random keys from which the model draws by itself (NNX's `Rngs`): their implementation by their path in `extra`,
    which holds their raw words."""
    batch_stats: Callable[[PyTree], frozenset[str]] = lambda extra: frozenset()
    """Paths in `extra` of statistics of the global batch: `nnx.BatchStat`, and Linen's collection `batch_stats`."""
    is_explicit: bool = False
    """Whether the model and the loss say themselves how every array lies: `explicit`."""
    after_update: Callable[[PyTree], PyTree] = lambda extra: extra
    """From `extra` behind the forward passes of a training step, all its micro-steps, to that of the next step."""
    build: Callable[[Any], Any] | None = None
    """What `from_nnx` was given."""
    lora: Any = None
    """The `meshpar.training.lora.Lora` whose adapters it has, which alone are trained where nothing else is said."""

    def abstract(self) -> Variables:
        """Shapes and dtypes of the arrays; nothing is computed."""
        return jax.eval_shape(self.init, key_data_like())

    def leaves(self) -> list[Leaf]:
        """Every parameter, with its names."""
        params = self.abstract().params
        names = self.names()
        return [leaf_of(path, x, names.get(path)) for path, x in tree_leaves_with_paths(params)]


def explicit(model: Model) -> Model:
    """A model written for jax's Explicit axes: in it, and in the loss, types say how arrays lie.

    Parameters and the batch come in as the strategy lays them out, each with its type. What the compiler does on Auto
    axes is then the model's: gathering a weight (`jax.sharding.reshard`), and the layout of lookups, reshapes and
    contractions (`out_sharding=`), which may be `unreduced`. jax raises `ShardingTypeError` where a type is missing.
    `mp.constrain` reshards by the strategy's rules. The mesh may be of either kind.

    Source: jax's documentation, "Explicit sharding (a.k.a. sharding in types)".

    Args:
      model: from an adapter. The shipped decoders are not written so.

    Raises:
      ValueError: no model, or one with adapters; when a step is made with an engine inside `shard_map` (stages,
        `quantize`, `reduce_gradients="once"`), for jax gives Manual axes no types.

    Example:
      >>> model = mp.explicit(mp.from_functions(init, apply))  # doctest: +SKIP
    """
    if not isinstance(model, Model) or model.lora is not None:
        exists = "its adapters say no types" if isinstance(model, Model) else f"a {type(model).__name__} is no Model"
        fix = "give what mp.from_nnx, from_linen or from_functions made, without adapters"
        raise problem("mp.explicit", "trace a model on Explicit axes", exists, fix)
    return dataclasses.replace(model, is_explicit=True)


def key_data_like() -> jax.ShapeDtypeStruct:
    """Raw data of a random key, by jax's default implementation (`jax_default_prng_impl`)."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))


def is_key(x: Any) -> bool:
    """Whether an array, concrete or abstract, holds typed random keys."""
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_impls(tree: PyTree) -> PyTree:
    """Return the implementation of each typed random key of a pytree, traced or concrete; "" for other leaves."""
    return jax.tree.map(lambda x: jax.random.key_impl(x) if is_key(x) else "", tree)


def without_key_types(tree: PyTree) -> PyTree:
    """Replace typed random keys by their raw words, which can be donated, sharded and saved as any array."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def with_key_types(tree: PyTree, impls: PyTree) -> PyTree:
    """Undo `without_key_types`, with what `key_impls` returned for the pytree of typed keys."""
    return jax.tree.map(lambda impl, x: jax.random.wrap_key_data(x, impl=impl) if impl else x, impls, tree)


def _with_raw_keys(model: Model) -> Model:
    """Let `extra` hold raw words outside of the model wherever the model itself keeps typed random keys."""
    traced: list[PyTree] = []

    def init(key: jax.Array) -> Variables:
        params, extra = model.init(key)
        for path, x in tree_leaves_with_paths(params):
            if is_key(x):
                exists = "it holds typed random keys, which have no gradient"
                fix = "keep keys in the state: from_functions(keeps_state=True), a Linen collection, an nnx.Variable"
                raise problem(f"parameter `{path}`", "train it", exists, fix)
        traced[:] = [key_impls(extra)]
        return Variables(params, without_key_types(extra))

    def impls() -> PyTree:
        if not traced:
            jax.eval_shape(init, key_data_like())
        return traced[0]

    return dataclasses.replace(
        model,
        init=init,
        bind=lambda params, extra: model.bind(params, with_key_types(extra, impls())),
        collect=lambda bound: without_key_types(model.collect(bound)),
        after_update=lambda extra: without_key_types(model.after_update(with_key_types(extra, impls()))),
        random_keys=lambda: {path: impl for path, impl in tree_leaves_with_paths(impls()) if impl},
    )


def key_of(data: jax.Array) -> jax.Array:
    """A typed key from raw key data; state holds raw data, which every checkpoint format knows."""
    return jax.random.wrap_key_data(data) if data.dtype == jnp.uint32 else data


# ---- NNX -------------------------------------------------------------------------------------------------------------


def from_nnx(build: Callable[[Any], Any]) -> Model:
    """See a Flax NNX module as a `Model`.

    Args:
      build: makes the module from an `nnx.Rngs`: `lambda rngs: Transformer(cfg, rngs=rngs)`. It is called while
        tracing, so nothing is allocated before the shardings are known. An argument named `rngs` is passed by name,
        so a module class that needs no other argument will do.

    Names come from `nnx.with_partitioning`; in a model without any, what modules give with the batch's rows is split as
    the batch is, unless `Rules(activations=...)` says otherwise. The loss function is given the module itself; what the
    forward pass changes beside parameters (batch statistics, random counts) is carried in the state. Modules with a
    method `after_update()` get it called once a training step, behind all micro-steps, and may change such variables
    there.
    """
    from flax import nnx

    if isinstance(build, nnx.Module):
        asked = f"take a {type(build).__name__} that exists already"
        fix = "give a function that makes it: mp.from_nnx(lambda rngs: Transformer(cfg, rngs=rngs))"
        raise problem("from_nnx", asked, "its arrays are on one device already", fix)

    with_signature, fix = _with_signature(build), "mp.from_nnx(lambda rngs: Transformer(cfg, rngs=rngs))"
    by_name = _takes_rngs_by_name(with_signature)
    check_takes(
        "from_nnx", with_signature, () if by_name else ("an nnx.Rngs",), fix, keywords=["rngs"] * by_name,
        name=getattr(build, "__name__", ""),
    )  # fmt: skip
    module = _Nnx((lambda rngs: build(rngs=rngs)) if by_name else build)  # type: ignore[call-arg]
    model = Model(
        kind="nnx",
        init=module.init,
        bind=module.bind,
        collect=lambda bound: _split(bound).extra,
        names=module.names,
        batch_stats=module.batch_stats,
        after_update=module.after_update,
        build=build,
    )
    return _with_raw_keys(model)


def _with_signature(build: Any) -> Any:
    """Return a function with the signature of `build`, which NNX's metaclass hides if it is a module class."""
    if isinstance(build, functools.partial):
        return functools.partial(_with_signature(build.func), *build.args, **build.keywords)
    return functools.partial(build.__init__, None) if isinstance(build, type) else build  # type: ignore[misc]


def _takes_rngs_by_name(build: Any) -> bool:
    try:
        parameter = inspect.signature(build).parameters.get("rngs")
    except (TypeError, ValueError):  # not callable, or a function of C, which has no signature
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


class _Nnx:
    """An NNX module that is made while tracing: its structure, and its state put in and taken out."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self._build = build

    def _made(self, rngs: Any) -> Any:
        from flax import nnx

        # NNX would place annotated arrays on the mesh of the context; here the mesh is not known yet.
        with nnx.use_eager_sharding(False):
            try:
                made = self._build(nnx.Rngs(rngs))
            except TypeError as error:
                if "'rngs'" not in str(error):
                    raise
                fix = "pass it on: mp.from_nnx(lambda rngs: Transformer(cfg, rngs=rngs))"
                raise problem("from_nnx", "make the module", f"a module gets no `rngs`: {error}", fix) from error
        if made is None or isinstance(made, type):
            exists = f"it gives {'None' if made is None else f'the class {made.__name__}'}"
            raise problem("from_nnx", "train what the function makes", exists, "return the module from it")
        return made

    @functools.cached_property
    def _structure(self) -> Any:
        """(graph, parameters, what else it keeps), with no arrays."""
        from flax import nnx

        graphs: list[Any] = []

        def states() -> Any:
            graph, *parts = nnx.split(self._made(0), nnx.Param, ...)
            graphs.append(graph)
            return parts

        # Not `nnx.eval_shape`: it looks for the names of the parameters among the axes of the context's mesh.
        parts = jax.eval_shape(states)
        return graphs[0], *parts

    def init(self, key: jax.Array) -> Variables:
        return _split(self._made(key_of(key)))

    def bind(self, params: PyTree, extra: PyTree) -> Any:
        from flax import nnx

        graph, params_like, extra_like = self._structure
        return _nnx_modules(nnx.merge(graph, _filled(params_like, params), _filled(extra_like, extra)))

    def names(self) -> Mapping[str, Names]:
        given = {path: (x, x.get_metadata().get("out_sharding")) for path, x in _by_path(self._structure[1])}
        return {
            path: _for_each_dim(names, _value_of(x).ndim)
            for path, (x, names) in given.items()
            if names and hasattr(_value_of(x), "ndim")
        }

    def batch_stats(self, extra: PyTree) -> frozenset[str]:
        from flax import nnx

        return frozenset(path for path, x in _by_path(self._structure[2]) if isinstance(x, nnx.BatchStat))

    def after_update(self, extra: PyTree) -> PyTree:
        from flax import nnx

        graph, params_like, extra_like = self._structure
        if not jax.tree.leaves(extra):
            return extra
        module = nnx.merge(graph, params_like, _filled(extra_like, extra))
        for _, part in nnx.iter_modules(module):
            update = getattr(type(part), "after_update", None)
            if update is not None:
                update(part)
        return _split(module).extra


def _nnx_modules(module: Any) -> Any:
    """An NNX module, fresh from `nnx.merge`: it, and the modules in it, hold what they give."""
    from flax import nnx

    if current().boundaries is not None:
        for path, part in nnx.iter_modules(module):
            # Only this merged copy changes: its class is one derived from its own.
            object.__setattr__(part, "__class__", _holding(type(part), "/".join(map(str, path))))
            use_dot_general(part)
    return module


def _handing_on(cls: Any) -> Iterator[str]:
    """Methods by which a module hands on: those that are called from outside, and not those of every module."""
    from flax import nnx

    for name in dir(cls):
        is_own = name == "__call__" or not (name.startswith("_") or hasattr(nnx.Module, name))
        if is_own and inspect.isfunction(inspect.getattr_static(cls, name)):
            yield name


def _nnx_again(path: str, method: Any, policy: Any, within: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of an NNX module that the backward pass runs again; what it changes beside parameters is handed out.

    Raises:
      ValueError: it changes what no variable holds, or gives what is no array.
    """
    from flax import nnx

    parts: Any = nnx.split(module, nnx.Param, ...)
    graph, params, others = parts

    def run(others: Any) -> Any:
        copy = nnx.merge(graph, params, others)
        out, after = method(copy, *args, **kwargs), cast(Any, nnx.split(copy, nnx.Param, ...))
        check_array_outputs(path, out)
        if after[0] != graph:
            exists = "its call makes or changes attributes that are no variables, and would lose them"
            fix = "hold them in an nnx.Variable made with the module, or leave it out of the rules"
            raise problem(f"remat rule for `{path}`", "make the module again in the backward pass", exists, fix)
        return out, after[2]

    with within:
        out, changed = jax.checkpoint(run, policy=policy)(others)
    nnx.update(module, changed)
    return out


@functools.lru_cache(maxsize=4096)
def _holding(cls: Any, path: str) -> Any:
    def holding(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def held(self: Any, *args: Any, **kwargs: Any) -> Any:
            with in_module(path):
                again = remat_of(path)
                run = method if again is None else functools.partial(_nnx_again, path, method, *again)
                return constrain_output(path, run(self, *args, **kwargs))

        return held

    return _with_methods(cls, {name: holding(getattr(cls, name)) for name in _handing_on(cls)})


def _with_methods(cls: Any, methods: Mapping[str, Any]) -> Any:
    """A class of the same name, some of its methods others."""
    return type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **methods})


def call_through(bound: Any, through: Callable[..., Any]) -> Any:
    """What `Model.bind` gave, fresh, called by `through(call, *args, **kwargs)`: an NNX module by each of its methods,
    and so are the modules in it."""
    if isinstance(bound, functools.partial):
        return functools.partial(through, bound)
    parts = [bound]
    if not isinstance(bound, BoundLinen | _WithState):
        from flax import nnx

        parts = [part for _, part in nnx.iter_modules(bound)]
    for part in parts:
        object.__setattr__(part, "__class__", _calling(part.__class__, through))
    return bound


@functools.lru_cache(maxsize=256)
def _calling(cls: Any, through: Callable[..., Any]) -> Any:
    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            return through(functools.partial(method, self), *args, **kwargs)

        return called

    names = ["__call__"] if issubclass(cls, BoundLinen | _WithState) else _handing_on(cls)
    return _with_methods(cls, {name: around(getattr(cls, name)) for name in names})


def _split(module: Any) -> Variables:
    from flax import nnx

    parts: Any = nnx.split(module, nnx.Param, ...)
    return Variables(*(jax.tree.map(_as_array, _plain(part)) for part in parts[1:]))


def _by_path(state: Any) -> Iterator[tuple[str, Any]]:
    from flax import nnx

    for path, variable in nnx.to_flat_state(state):
        yield "/".join(str(part) for part in path), variable


def _plain(state: Any) -> PyTree:
    from flax import nnx

    return _string_keys(nnx.to_pure_dict(state))


def _string_keys(tree: PyTree) -> PyTree:
    if not isinstance(tree, dict):
        return tree
    return {str(key): _string_keys(value) for key, value in tree.items()}


def _filled(like: Any, values: PyTree) -> Any:
    """The state `like`, holding `values` (nested dicts with string keys)."""
    from flax import nnx

    filled = []
    for path, one in nnx.to_flat_state(like):
        value = functools.reduce(lambda node, part: node[str(part)], path, values)
        # A variable holds an array, or a tree of them, or nothing; what stands outside of variables is bare.
        filled.append((path, one.replace(value) if isinstance(one, nnx.Variable) else value))
    return nnx.from_flat_state(filled)


def _value_of(x: Any) -> Any:
    """What a leaf of NNX's state holds: a variable's value, or the bare array itself."""
    from flax import nnx

    return x.get_value() if isinstance(x, nnx.Variable) else x


def _as_array(x: Any) -> Any:
    """An array of the state as it is, a Python number as an array of jax's width."""
    return x if hasattr(x, "dtype") else jnp.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))


def _for_each_dim(names: Any, ndim: int) -> Names:
    """Names as a PartitionSpec has them: dims behind the last one carry none."""
    return (*names, *[None] * (ndim - len(names)))


# ---- Linen -----------------------------------------------------------------------------------------------------------

OVERWRITTEN = "_overwrite_with_gradient"
"""Flax's name of the collection whose next values are what its gradient says: scales and histories of 8-bit matmuls."""


class LinenInfo(NamedTuple):
    """Facts about a Linen module, collected in one abstract initialization."""

    names: Mapping[str, Names]
    """Logical names by the path of the parameter."""
    sown: frozenset[Path]
    """Paths of the variables that the module sows, with the collection first."""
    shapes: PyTree
    """Parameters as `jax.ShapeDtypeStruct`s."""


class BoundLinen:
    """A Linen module together with its variables, called like the module.

    Collections other than `params` are mutable and remembered, so that the step can carry them on. What the module sows
    is that of its last call alone.
    """

    def __init__(self, module: Any, info: LinenInfo, params: PyTree, extra: PyTree) -> None:
        self.module, self.info, self.params, self.extra = module, info, params, extra

    def __call__(self, *args: Any, rngs: Any = None, method: Any = None, mutable: Any = None, **kwargs: Any) -> Any:
        """`module.apply` on the bound variables; `rngs` and `method` as in Linen.

        Raises:
          ValueError: `mutable` is given.
        """
        if mutable is not None:
            exists = "all collections except `params` are mutable, and the step carries them to the next call"
            fix = "leave out mutable=; the call then returns the module's output alone"
            raise problem(f"model(..., mutable={mutable!r})", "select mutable collections", exists, fix)
        variables = {"params": self.params, **_without(self.extra, self.info.sown)}
        mutable = list(self.extra)
        with _linen_modules(self.info.shapes), _bare_boxes():
            out = self.module.apply(variables, *args, rngs=rngs, method=method, mutable=mutable or False, **kwargs)
        if mutable:
            out, changed = out
            self.extra = _joined(self.extra, changed)
        return out


def from_linen(module: Any, *example_args: Any, **example_kwargs: Any) -> Model:
    """See a Flax Linen module as a `Model`.

    Args:
      module: the module.
      *example_args, **example_kwargs: what it is called with, as arrays or `jax.ShapeDtypeStruct`s. An initialisation
        that depends on data sees the arrays, which are the same on all processes, and zeros where only a shape is
        given. The batch must be one that the mesh divides, when the module constrains its activations.

    Names come from `nn.with_logical_partitioning` (or `nn.with_partitioning`); a model without any has its activations
    held as in `from_nnx`. The loss function is given a callable
    that applies the module to its variables. Collections beside `params` are carried from step to step, but for what is
    sown in them (`Module.sow`), which begins anew with every call. A method `after_update(collections) -> collections`
    of the module is called once a training step, behind all micro-steps, with the collections beside `params`. The
    collection of Flax's 8-bit matmuls with delayed scaling (`nn.Fp8DotGeneral` as a layer's `dot_general_cls`) becomes
    what its gradient says after every micro-step, and no optimizer sees it.
    """
    from flax import linen as nn

    if not isinstance(module, nn.Module):
        fix = "use from_nnx or from_functions"
        raise problem("from_linen", f"take {type(module).__name__}", "it is no flax.linen.Module", fix)
    if "__call__" in dir(type(module)):
        call = functools.partial(type(module).__call__, module)
        fix = "mp.from_linen(module, example_batch), with every argument that the module needs"
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
    """A Linen module and what it is called with: its variables, and what is known of them."""

    def __init__(self, module: Any, args: Any, kwargs: Any) -> None:
        self._module = module
        self._args, self._kwargs = jax.tree.map(_on_host, (args, kwargs))

    def init(self, key: jax.Array) -> Variables:
        variables = dict(jax.tree.map(_unboxed, self._boxed(key), is_leaf=_is_box))
        if "params" not in variables:
            raise problem("from_linen", "train the module", "it has no `params` collection", "give it parameters")
        return Variables(variables.pop("params"), variables)

    @functools.cached_property
    def info(self) -> LinenInfo:
        sown: set[Path] = set()

        def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            sow = type(module).sow

            def seen(col: str, name: str, *rest: Any, **more: Any) -> bool:
                sown.add((col, *module.path, name))
                return sow(module, col, name, *rest, **more)

            object.__setattr__(module, "sow", seen)  # of this one call's copy, which Linen does not let be set
            return call(*args, **kwargs)

        with linen_methods(watch):
            variables = jax.eval_shape(self._boxed, key_data_like())
        leaves = jax.tree_util.tree_leaves_with_path(variables["params"], is_leaf=_is_box)
        named = ((path_str(path), leaf, _names_of_box(leaf)) for path, leaf in leaves if _is_box(leaf))
        names = {path: _for_each_dim(names, leaf.value.ndim) for path, leaf, names in named if names}
        return LinenInfo(names, frozenset(sown), jax.tree.map(_unboxed, variables["params"], is_leaf=_is_box))

    def _boxed(self, key: jax.Array) -> Any:
        args, kwargs = jax.tree.map(_array, (self._args, self._kwargs))
        params_key, other_key = jax.random.split(key_of(key))
        init = functools.partial(self._module.init, {"params": params_key, "dropout": other_key}, *args, **kwargs)
        try:
            # In a mesh Linen takes the names of parameters for mesh axes, and lays each out by them as it is made.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return init()
        except RuntimeError as error:
            if "requires a non-empty mesh" not in str(error):
                raise
        return init()  # the module lays activations out by axes of the mesh


def linen_methods(intercept: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Intercept methods as `nn.intercept_methods` does, except for Python's own such as `__getattr__`.

    An interceptor that reads an attribute of such a module would otherwise call itself.
    """
    from flax import linen as nn

    def own(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        name = context.method_name
        if name.startswith("__") and name != "__call__":
            return call(*args, **kwargs)
        return intercept(call, args, kwargs, context)

    return nn.intercept_methods(own)


@contextlib.contextmanager
def _bare_boxes() -> Iterator[None]:
    """While a Linen module is traced, named parameters come out of their boxes as they are.

    In a mesh Flax constrains what it takes out of a box by the names, also where it only asks for the shape that a
    layer would make, and for a `DenseGeneral` before that shape has all the dims that are named. What other threads
    take out meanwhile is constrained as ever.
    """
    _look_before_unboxing()
    token = _BARE.set(True)
    try:
        yield
    finally:
        _BARE.reset(token)


_BARE: contextvars.ContextVar[bool] = contextvars.ContextVar("bare_boxes", default=False)


@functools.cache
def _look_before_unboxing() -> None:
    """Once: Flax's boxes look whether they are to give what they hold as it is. They are Flax's own otherwise."""
    from flax.linen import spmd

    constrained = spmd.LogicallyPartitioned.unbox

    @functools.wraps(constrained)
    def unbox(self: Any, apply_constraint: bool = True) -> Any:
        return constrained(self, apply_constraint and not _BARE.get())

    with _UNBOXING:
        if getattr(spmd.LogicallyPartitioned.unbox, "__wrapped__", None) is None:
            spmd.LogicallyPartitioned.unbox = unbox  # type: ignore[method-assign]


_UNBOXING = threading.Lock()


@contextlib.contextmanager
def _linen_modules(shapes: PyTree) -> Iterator[None]:
    """Around a Linen module that is applied: what its modules give is held, and `nn.with_logical_constraint` honoured.

    A name of the latter goes by `nn.logical_axis_rules`, where the user has put it in force, else by activation rules.

    Args:
      shapes: of the full parameters.

    Raises:
      ValueError: from the model, where it uses a name that neither knows; Flax would replicate that dim.
    """
    from flax import linen as nn

    here, boundaries = ambient(), current().boundaries
    if here is None or boundaries is None:
        yield
        return

    def hold(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        use_dot_general(context.module)
        _accept_shards(context.module, _at(shapes, (*boundaries.prefix, *context.module.path)))
        path = "/".join((*boundaries.prefix, *context.module.path))
        again = None if context.method_name == "setup" else remat_of(path)
        with calling(path):
            out = call(*args, **kwargs) if again is None else _linen_again(path, context, *again, args, kwargs)
        return out if context.method_name == "setup" else constrain_output(path, out)

    theirs = tuple(nn.get_logical_axis_rules())
    known = {name for name, _ in theirs}
    ours = [(name, axes) for name, axes in _axes_by_name(here) if name not in known]
    strict = (_Strict({*known, *here.rules.names}), None)
    with nn.logical_axis_rules([*theirs, *ours, strict]), linen_methods(hold):
        yield


def _accept_shards(module: Any, shapes: PyTree) -> None:
    """Let `module.param` return shards: a stage has some layers of a stack, and quantized layers are gathered later.

    Flax compares the shape of a parameter with what its initializer makes, which is the full shape.
    """

    def param(name: str, init: Callable[..., Any], *args: Any, unbox: bool = True, **kwargs: Any) -> Any:
        full, held = _at(shapes, (name,)), module.variables.get("params", {}).get(name)

        def expected(*given: Any, **more: Any) -> Any:
            made = init(*given, **more)
            return held if _shapes(made) == _shapes(full) else made

        is_sharded = held is not None and full is not None and _shapes(held) != _shapes(full)
        return type(module).param(module, name, expected if is_sharded else init, *args, unbox=unbox, **kwargs)

    object.__setattr__(module, "param", param)  # only on the copy that Linen made for this call


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [jnp.shape(x) for x in jax.tree.leaves(tree)]


def _at(tree: PyTree, path: Path) -> Any:
    """What nested dicts have at a path, or None."""
    return functools.reduce(lambda node, key: node.get(key) if isinstance(node, Mapping) else None, path, tree)


def _linen_again(path: str, context: Any, policy: Any, within: Any, args: Any, kwargs: Any) -> Any:
    """A method of a Linen module that the backward pass runs again."""
    from flax import linen as nn

    def run(module: Any) -> Any:
        with nn.override_named_call(True):
            out = context.orig_method.func(module, *args, **kwargs)
        check_array_outputs(path, out)
        return out

    # Linen intercepts `run`, too, and would write the module's scope once more.
    run.__name__ = context.method_name
    with within, nn.override_named_call(False):
        return nn.remat(run, policy=policy)(context.module)


def _axes_by_name(here: Ambient) -> Iterator[tuple[str, Any]]:
    """As Flax's rules are written: mesh axes by name, and for `first` one line after the other."""
    sizes = auto_sizes(here)
    lines: list[tuple[int, str, Any]] = []
    for name in sorted(here.rules.names):
        rule = here.rules.name_rule(name)
        value = None if rule is None or not isinstance(rule.value, str | tuple | First) else rule.value
        choices = value.alternatives if isinstance(value, First) else (value,)
        numbers = value.lines if isinstance(value, InTurn) else (0,) * len(choices)
        lines += zip(numbers, (name,) * len(choices), choices, strict=True)
    for _, name, choice in sorted(lines, key=lambda line: line[0]):
        yield name, tuple(axis for axis in spec_axes(choice) if sizes.get(axis, 1) > 1) or None


class _Strict(str):
    """The last of Flax's rules, which is compared with every name of a constraint: the place to see unknown ones."""

    _known: set[str]

    def __new__(cls, known: set[str]) -> _Strict:
        made = super().__new__(cls, "meshpar")
        made._known = known
        return made

    def __eq__(self, name: object) -> bool:
        if isinstance(name, str) and name not in self._known and not isinstance(name, _Strict):
            raise problem(
                f"nn.with_logical_constraint, name `{name}`",
                "split a dim of an activation by it",
                "no activation rule of the strategy and no nn.logical_axis_rules in force knows it",
                near_or(
                    name,
                    self._known,
                    "join mp.Rules.from_logical_axis_rules([...]) to the strategy, or call the step inside "
                    f"nn.logical_axis_rules([({name!r}, None), ...])",
                ),
            )
        return False

    __hash__ = str.__hash__


def _without(tree: PyTree, paths: Collection[Path]) -> PyTree:
    """Nested dicts without what stands at these paths."""
    below = {key: [path[1:] for path in paths if path[0] == key] for key in tree} if paths else {}
    return {
        key: _without(x, [path for path in below.get(key, []) if path]) if isinstance(x, Mapping) else x
        for key, x in tree.items()
        if () not in below.get(key, [])
    }


def _joined(tree: PyTree, changed: PyTree) -> PyTree:
    """Nested dicts, the second's entries over the first's."""
    if not (isinstance(tree, Mapping) and isinstance(changed, Mapping)):
        return changed
    return {**tree, **{key: _joined(tree[key], x) if key in tree else x for key, x in changed.items()}}


def _on_host(x: Any) -> Any:
    """An example array as NumPy's, to be part of any program."""
    if not isinstance(x, jax.Array) or is_key(x) or isinstance(x, jax.core.Tracer):
        return x
    if not (x.is_fully_addressable or x.is_fully_replicated):
        exists = "its shards are on several processes, and each makes the same program"
        fix = "give jax.ShapeDtypeStruct(x.shape, x.dtype), or a small array that is the same on all processes"
        raise problem(f"from_linen, example array of shape {x.shape}", "initialise the module on it", exists, fix)
    return np.asarray(x)


def _array(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
    # As jax would take it: NumPy's float64 and int64 are 32 bits wide unless x64 is on.
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _is_box(x: Any) -> bool:
    from flax.core import meta

    return isinstance(x, meta.AxisMetadata)


def _names_of_box(box: Any) -> Names | None:
    """Return the logical names in Linen metadata, or in that of an NNX module that `flax.nnx.bridge.ToLinen` wraps."""
    return getattr(box, "names", None) or getattr(box, "metadata", {}).get("out_sharding")


def _unboxed(x: Any) -> Any:
    # Not `unbox()`: it would constrain the array by whatever mesh and rules Linen finds in its own context.
    return x.value if _is_box(x) and hasattr(x, "value") else x.unbox() if _is_box(x) else x


# ---- Plain functions -------------------------------------------------------------------------------------------------


def from_functions(
    init: Callable[[jax.Array], PyTree],
    apply: Callable[..., Any],
    *,
    names: Mapping[str, Names] | None = None,
    keeps_state: bool = False,
) -> Model:
    """See two plain functions as a `Model`.

    Args:
      init: from a key to the parameters, any pytree of arrays.
      apply: from (params, *inputs) to outputs. The loss function is given `apply` with the parameters filled in.
      names: logical names by path, say {"up/kernel": ("embed", "mlp")}.
      keeps_state: whether the model keeps more than parameters, that no optimizer updates: then `init` gives
        (params, state), and `apply` takes (params, state, *inputs) and gives (outputs, state), whose state it is given
        at the next call, in the next step, too.

    Libraries whose models are trees or pairs of functions come in by this door. Equinox: arrays are the parameters, and
    what is none is made once, outside. Haiku: `hk.transform` gives the two functions, and `hk.transform_with_state`
    those of a model that keeps state. Neither names dims: `names` does, or `Rules(paths=...)` by the paths that
    `shardings` prints (`mlp/layers/0/weight`, `mlp/~/linear_0/w`), and `constrain` lays activations out in `apply`.

    Example:
      >>> shapes = eqx.filter_eval_shape(Net, jax.random.key(0))  # doctest: +SKIP
      >>> static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]  # doctest: +SKIP
      >>> model = from_functions(  # doctest: +SKIP
      ...     lambda key: eqx.partition(Net(key), eqx.is_array)[0],
      ...     lambda params, x: jax.vmap(eqx.combine(params, static))(constrain(x, "batch", None)),
      ... )
      >>> net = hk.without_apply_rng(hk.transform(forward))  # doctest: +SKIP
      >>> model = from_functions(lambda key: net.init(key, example), net.apply)  # doctest: +SKIP
      >>> net = hk.without_apply_rng(hk.transform_with_state(forward))  # doctest: +SKIP
      >>> model = from_functions(lambda key: net.init(key, example), net.apply, keeps_state=True)  # doctest: +SKIP

    Raises:
      ValueError: a path in `names` that the parameters do not have.
    """
    given = {path: _names_of(path, dims) for path, dims in (names or {}).items()}

    def make(key: jax.Array) -> Variables:
        made = init(key_of(key))
        params, extra = _two(made, "init", "(params, state)") if keeps_state else (made, {})
        paths = {path for path, _ in tree_leaves_with_paths(params)}
        for path in (path for path in given if path not in paths):
            raise problem(
                f"from_functions(names={{{path!r}: ...}})", "name that leaf", "no leaf has this path", near(path, paths)
            )
        return Variables(params, extra)

    model = Model(
        kind="functions",
        init=make,
        bind=functools.partial(_WithState, apply)
        if keeps_state
        else lambda params, _: functools.partial(apply, params),
        collect=lambda bound: bound.extra if keeps_state else {},
        names=lambda: given,
    )
    return _with_raw_keys(model)


class _WithState:
    """`apply` with parameters, and the state that its calls hand on."""

    def __init__(self, apply: Callable[..., Any], params: PyTree, extra: PyTree) -> None:
        self.apply, self.params, self.extra = apply, params, extra

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, self.extra = _two(self.apply(self.params, self.extra, *args, **kwargs), "apply", "(outputs, state)")
        return out


def _two(given: Any, function: str, what: str) -> tuple[Any, Any]:
    if isinstance(given, tuple) and len(given) == 2:
        return given
    where = f"from_functions(keeps_state=True), `{function}`"
    raise problem(where, f"give {what}", f"it gives {type(given).__name__}", f"return {what}, or leave out keeps_state")


def _names_of(path: str, dims: Any) -> Names:
    if isinstance(dims, tuple | list):
        return tuple(dims)
    where = f"from_functions(names={{{path!r}: {dims!r}}})"
    exists = f"it is a {type(dims).__name__}, not a tuple with one name a dim"
    raise problem(where, "name the dims of that leaf", exists, 'write {"up/kernel": ("embed", "mlp")}')
