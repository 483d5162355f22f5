"""`Model`, the interface between a model and the training state."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import jax

from meshpar.sharding.adapters.random_keys import (
    is_key,
    key_data_like,
    key_impls,
    with_key_types,
    without_key_types,
)
from meshpar.sharding.errors import problem
from meshpar.sharding.types import Leaf, Names, PyTree, leaf_of, tree_leaves_with_paths

OVERWRITTEN = "_overwrite_with_gradient"
"""Flax's collection for scales and histories of 8-bit matmuls. The gradient of each variable is its next value."""


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
    intercept: Callable[[Any, Callable[..., Any]], Any] = lambda bound, through: intercepted(bound, through)
    """Wrap the methods of a newly bound model: each call becomes `through(method, *args, **kwargs)`."""
    after_update: Callable[[PyTree], PyTree] = lambda extra: extra
    """Return `extra` for the next step. Called after all micro-steps of a training step."""
    build: Callable[[Any], Any] | None = None
    """The function passed to `from_nnx`. None for other models."""
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
      >>> def apply(params, x):
      ...     return jnp.dot(x, params["w"], out_sharding=P("data", None))
      >>> model = mp.explicit(mp.from_functions(lambda key: {"w": jax.random.normal(key, (8, 4))}, apply))
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


def intercepted(bound: Any, through: Callable[..., Any]) -> Any:
    """Return a bound model whose call becomes `through(bound, *args, **kwargs)`."""
    if isinstance(bound, functools.partial):
        return functools.partial(through, bound)
    wrap_methods(bound, through, ("__call__",))
    return bound


def wrap_methods(module: Any, through: Callable[..., Any], names: tuple[str, ...]) -> None:
    """Wrap methods of a new module: each call becomes `through(method, *args, **kwargs)`.

    Flax NNX has no public API to intercept method calls, like `nn.intercept_methods` in Linen: `nnx.capture` records
    outputs, but cannot change them. Python looks up `__call__` in the class, so the class is replaced by a subclass.
    """
    object.__setattr__(module, "__class__", _wrapped_class(cast(Any, type(module)), through, names))


@functools.lru_cache(maxsize=4096)
def _wrapped_class(cls: Any, through: Callable[..., Any], names: tuple[str, ...]) -> Any:
    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return through(functools.partial(method, self), *args, **kwargs)

        return wrapped

    methods = {
        name: wrap(getattr(cls, name)) for name in names if inspect.isfunction(inspect.getattr_static(cls, name, None))
    }
    return type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **methods})


def with_raw_keys(model: Model) -> Model:
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


def padded(names: Any, ndim: int) -> Names:
    """Pad names with None for the last dims, like a PartitionSpec."""
    return (*names, *[None] * (ndim - len(names)))
