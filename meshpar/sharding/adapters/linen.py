"""`from_linen`, the adapter for Flax Linen modules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import meta
from jax.sharding import AbstractMesh

from meshpar.sharding.activations import calling, check_array_outputs, constrain_output, remat_of, use_dot_general
from meshpar.sharding.adapters.model import Model, Variables, padded, with_raw_keys
from meshpar.sharding.adapters.random_keys import is_key, key_data_like, key_of
from meshpar.sharding.context import BOUNDARIES, Ambient, ambient, auto_sizes
from meshpar.sharding.errors import check_takes, near_or, problem
from meshpar.sharding.rules import First, InTurn
from meshpar.sharding.types import Names, PyTree, path_str, spec_axes, tree_leaves_with_paths

Path: TypeAlias = tuple[str, ...]
"""Keys of a variable in nested dicts."""


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

    interceptor: Callable[..., Any] | None = None
    """Intercepts methods of the module, as in `nn.intercept_methods`."""

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
        with _linen_boundaries(self.info.shapes, self.interceptor):
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
      >>> from flax import linen as nn
      >>> kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
      >>> model = mp.from_linen(nn.Dense(4, kernel_init=kernel_init), jax.ShapeDtypeStruct((16, 8), jnp.float32))
      >>> model.names()
      {'kernel': ('embed', 'mlp')}
    """
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
    return with_raw_keys(model)


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
        names = {path_str(path): padded(_box_names(x), x.value.ndim) for path, x in boxes if _box_names(x)}
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

    def intercept_regular(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        name = context.method_name
        if name.startswith("__") and name != "__call__":
            return call(*args, **kwargs)
        return intercept(call, args, kwargs, context)

    return nn.intercept_methods(intercept_regular)


@contextlib.contextmanager
def _linen_boundaries(shapes: PyTree, interceptor: Callable[..., Any] | None) -> Iterator[None]:
    """Constrain module outputs while a Linen module is applied, and define the names of `nn.with_logical_constraint`.

    Names are looked up in `nn.logical_axis_rules` if the user has set them, and then in the activation rules.

    Args:
      shapes: shapes of the full parameters.
      interceptor: intercepts methods before the outputs are constrained.
    """
    rules_context, boundaries = ambient(), BOUNDARIES.value

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if rules_context is None or boundaries is None:
            _override_param(context.module, None)
            return call(*args, **kwargs)
        path = (*boundaries.prefix, *context.module.path)
        _override_param(context.module, _at(shapes, path))
        use_dot_general(context.module)
        path_text, is_setup = "/".join(path), context.method_name == "setup"
        remat = None if is_setup else remat_of(path_text)
        with calling(path_text):
            out = call(*args, **kwargs) if remat is None else _linen_remat(path_text, context, *remat, args, kwargs)
        return out if is_setup else constrain_output(path_text, out)

    with contextlib.ExitStack() as stack:
        if interceptor is not None:
            stack.enter_context(linen_methods(interceptor))
        stack.enter_context(linen_methods(intercept))
        if rules_context is not None and boundaries is not None:
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
    return functools.reduce(lambda node, key: node.get(key) if isinstance(node, Mapping) else None, path, tree)


def _linen_remat(path: str, context: Any, policy: Any, within: Any, args: Any, kwargs: Any) -> Any:
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
    return isinstance(x, meta.AxisMetadata)


def _box_names(box: Any) -> Names | None:
    """Return the logical names in the metadata of Linen, or of an NNX module in `flax.nnx.bridge.ToLinen`."""
    return getattr(box, "names", None) or getattr(box, "metadata", {}).get("out_sharding")


def _unboxed(x: Any) -> Any:
    # `unbox()` would constrain the array over the context mesh.
    return x.value if _is_box(x) and hasattr(x, "value") else x.unbox() if _is_box(x) else x
