"""`from_nnx`, the adapter for Flax NNX modules."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.sharding.activations import check_array_outputs, constrain_output, in_module, remat_of, use_dot_general
from meshpar.sharding.adapters.model import Model, Variables, padded, with_raw_keys, wrap_methods
from meshpar.sharding.adapters.random_keys import key_of
from meshpar.sharding.context import BOUNDARIES
from meshpar.sharding.errors import check_takes, problem
from meshpar.sharding.types import Names, PyTree


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
      >>> kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
      >>> model = mp.from_nnx(lambda rngs: nnx.Linear(8, 4, kernel_init=kernel_init, rngs=rngs))
      >>> model.names()
      {'kernel': ('embed', 'mlp')}
    """
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
        batch_stats=module.batch_stats, intercept=_intercepted, after_update=module.after_update, build=build,
    )  # fmt: skip
    return with_raw_keys(model)


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
        # NNX would shard annotated arrays over the context mesh, but the mesh is not known yet.
        with nnx.use_eager_sharding(False):
            try:
                module = self._build(nnx.Rngs(rngs))
            except TypeError as error:
                if "'rngs'" not in str(error):
                    raise
                reason, fix = f"a module was created without `rngs`: {error}", "pass `rngs` to all modules"
                raise problem("from_nnx", "create the module", reason, fix, code="wrong-signature") from error
        if module is None or isinstance(module, type):
            reason = f"the function returns {'None' if module is None else f'the class {module.__name__}'}"
            raise problem("from_nnx", "create the module", reason, "return the module", code="wrong-type")
        return module

    @functools.cached_property
    def _structure(self) -> Any:
        """The graph, the parameters and the other state, without arrays."""
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
        graph, params_like, extra_like = self._structure
        module = nnx.merge(graph, _filled(params_like, params), _filled(extra_like, extra))
        if BOUNDARIES.value is not None:
            for path, submodule in nnx.iter_modules(module):
                wrap_methods(submodule, _NnxBoundary("/".join(map(str, path))), _public_methods(type(submodule)))
                use_dot_general(submodule)
        return module

    def names(self) -> Mapping[str, Names]:
        names = {}
        for path, x in _flat_state(self._structure[1]):
            value, sharding = x.get_value(), x.get_metadata().get("out_sharding")
            if sharding and hasattr(value, "ndim"):
                names[path] = padded(sharding, value.ndim)
        return names

    def batch_stats(self, extra: PyTree) -> frozenset[str]:
        return frozenset(path for path, x in _flat_state(self._structure[2]) if isinstance(x, nnx.BatchStat))

    def after_update(self, extra: PyTree) -> PyTree:
        graph, params_like, extra_like = self._structure
        if not jax.tree.leaves(extra):
            return extra
        module = nnx.merge(graph, params_like, _filled(extra_like, extra))
        for _, submodule in nnx.iter_modules(module):
            update = getattr(type(submodule), "after_update", None)
            if update is not None:
                update(submodule)
        return _split(module).extra


def _intercepted(bound: Any, through: Callable[..., Any]) -> Any:
    """Pass each call of a public method of a newly bound module, or of a submodule, to `through`."""
    for _, module in nnx.iter_modules(bound):
        wrap_methods(module, through, _public_methods(type(module)))
    return bound


@functools.lru_cache(maxsize=4096)
def _public_methods(cls: Any) -> tuple[str, ...]:
    """Return `__call__` and the names of the public methods that `nnx.Module` does not have."""
    return ("__call__", *(name for name in dir(cls) if not (name.startswith("_") or hasattr(nnx.Module, name))))


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
    def as_array(x: Any) -> Any:  # state may have Python numbers
        return x if hasattr(x, "dtype") else jnp.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))

    _, *states = nnx.split(module, nnx.Param, ...)
    return Variables(*(jax.tree.map(as_array, _with_string_keys(nnx.to_pure_dict(state))) for state in states))


def _flat_state(state: Any) -> Iterator[tuple[str, Any]]:
    for path, variable in nnx.to_flat_state(state):
        yield "/".join(map(str, path)), variable


def _with_string_keys(tree: PyTree) -> PyTree:
    return {str(key): _with_string_keys(x) for key, x in tree.items()} if isinstance(tree, dict) else tree


def _filled(like: Any, values: PyTree) -> Any:
    """Return a state with the structure of `like` and the given values (nested dicts with string keys)."""
    filled = []
    for path, variable in nnx.to_flat_state(like):
        value = functools.reduce(lambda node, key: node[str(key)], path, values)
        # A variable has an array, a pytree or None. Arrays outside of variables are leaves themselves.
        filled.append((path, variable.replace(value) if isinstance(variable, nnx.Variable) else value))
    return nnx.from_flat_state(filled)
