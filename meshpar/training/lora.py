"""Low-rank adapters (LoRA): frozen matrices with a trainable low-rank pair for each.

    y = x W + (alpha / rank) (x A) B        A: [inputs, rank]    B: [rank, outputs], initialized to zeros

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models". Each expert has a pair: a matrix
`[E, d, f]` has the pair `[E, d, rank]` and `[E, rank, f]`. The MoE layer multiplies the pairs in groups, like the
matrices (`LoraWeight`). A shared expert has a pair like a linear layer.

Flax's `nnx.LoRA` wraps an `nnx.Linear`. It does not support several input or output dims, or Linen. qwix 0.1.8 supports
adapters with int8 and nf4 bases, but fails for stacked layers, as in the decoders: its pairs have no layers dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.layers.precision import cast_floating, check_bits, dot_general
from meshpar.layers.scan import LoraWeight
from meshpar.sharding.adapters.model import Model, Variables
from meshpar.sharding.adapters.random_keys import key_of
from meshpar.sharding.context import ambient, clear_context_mesh, spec_of, tracing
from meshpar.sharding.errors import check_cases, check_choice, check_number, check_positive_int, near_or, problem
from meshpar.sharding.manual_regions import outer_axes, weight_axes
from meshpar.sharding.types import LORA_SUFFIX, PAIR, Names, PyTree, axis_sizes, tree_leaves_with_paths
from meshpar.training.state import Setup, TrainState, key_words

INWARD, OUTWARD = PAIR
TRAINED = rf"(.*/)?({INWARD}|{OUTWARD})"
"""Default pattern of trainable parameters of a model with adapters."""
ATTENTION = r"(.*/)?(query|key|value|out|query_down|query_up)"
"""Pattern of the attention projections in the decoders of meshpar."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of a model; see `lora`."""

    rank: int = 8
    alpha: float = 16.0
    modules: str = ATTENTION
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_positive_int("lora", "the inner dimension of the pair", rank=self.rank)
        dtypes = ("float32", "bfloat16", "float16", "float64")
        check_choice("lora", "the dtype of the pairs", dtypes, dtype=self.dtype)
        check_number("lora", "16.0", alpha=self.alpha)
        try:
            re.compile(self.modules)
        except (re.error, TypeError) as error:
            reason, fix = (
                f"it is not a regular expression ({error})",
                'write r".*/(query|value)", for full paths of layers',
            )
            raise problem("lora", f"set modules={self.modules!r}", reason, fix, code="bad-syntax") from error

    @property
    def scale(self) -> float:
        """Factor of the product A B, `alpha / rank`."""
        return self.alpha / self.rank

    trained = TRAINED
    """Default pattern of trainable parameters."""

    def __call__(self, model: Model) -> Model:
        """Add a trainable pair to each matching layer of a model, and freeze all other parameters.

        Raises:
          MeshparError: an unsupported model (no `Model`, from plain functions, explicit, or with adapters); a pattern
            that matches no linear layer, or a router or embedding table; a 64-bit dtype without jax_enable_x64.
        """
        where, requested = f"lora(modules={self.modules!r})", "add adapters to the model"
        reason, fix = f"it is a {type(model).__name__}", "wrap it: mp.from_nnx(lambda rngs: ...)"
        check_cases(where, requested, "wrong-type", (not isinstance(model, Model), reason, fix))
        check_cases(
            where, requested, "unsupported-feature",
            (model.lora is not None, "it already has adapters", "use the model without adapters"),
            (model.is_explicit, "adapters do not support mp.explicit", "remove mp.explicit"),
            (model.kind == "functions", "plain functions have no named layers",
             "add x @ a @ b in the function, and select a and b with init_state(trainable=...)"),
        )  # fmt: skip
        check_bits("lora(dtype=...)", self.dtype)
        return _on_nnx(self, model) if model.kind == "nnx" else _on_linen(self, model)

    def merged(self, params: PyTree, *, dtype: str | None = None) -> PyTree:
        """Add the products of pairs to the matrices, in at least float32, and return parameters without pairs.

        The sums have at least the precision of `dtype`, by default that of the matrix.
        """
        if not isinstance(params, Mapping):
            return params
        pairs = {name.removesuffix(LORA_SUFFIX): tree for name, tree in params.items() if _is_separate_pair(name, tree)}
        pairs |= {"kernel": params} if INWARD in params else {}
        return {
            name: self._sum(tree, pairs[name], dtype) if name in pairs else self.merged(tree, dtype=dtype)
            for name, tree in params.items()
            if name not in PAIR and not _is_separate_pair(name, tree)
        }

    def _sum(self, kernel: jax.Array, pair: Mapping[str, jax.Array], sum_dtype: str | None) -> jax.Array:
        """Return a matrix plus the scaled product of its pair."""
        a, b = pair[INWARD], pair[OUTWARD]
        stacked = a.shape[: a.ndim + b.ndim - 2 - kernel.ndim]
        dtype = jnp.promote_types(kernel.dtype, jnp.float32)
        product = a.reshape(*stacked, -1, self.rank).astype(dtype) @ b.reshape(*stacked, self.rank, -1).astype(dtype)
        return (kernel + self.scale * product.reshape(kernel.shape)).astype(
            kernel.dtype if sum_dtype is None else jnp.promote_types(kernel.dtype, sum_dtype)
        )

    def matches(self, layers: Collection[str], params: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return the paths in `layers` that the pattern matches. `params` has the shapes of all parameters, by path."""
        where, pattern = f"lora(modules={self.modules!r})", re.compile(self.modules)
        for path, shape in params.items():
            module = path.rpartition("/")[0]
            is_other = len(shape) > 1 and not {path, module} & set(layers)
            is_matched = is_other and (pattern.fullmatch(path) or pattern.fullmatch(module))
            reason = (
                f"`{path}` {list(shape)} is not the matrix of a linear layer (nor are routers and embedding tables)"
            )
            fix = "write a pattern that does not match it"
            check_cases(where, "add adapters to it", "unsupported-feature", (is_matched, reason, fix))
        paths = [path for path in sorted(layers) if pattern.fullmatch(path)]
        reason = f"it matches none of the {len(layers)} linear layers"
        fix = near_or(self.modules, layers, "write a pattern that matches full paths of layers")
        check_cases(where, "add adapters to the model", "unknown-name", (not paths, reason, fix))
        return paths


def lora(*, rank: int = 8, alpha: float = 16.0, modules: str = ATTENTION, dtype: str = "float32") -> Lora:
    """Return a transformation that adds low-rank adapters to a model: `lora(rank=8)(model)`.

    Pairs have the logical names of their matrices, so the strategy's rules apply to them. Matrices are frozen and keep
    their dtype. They have no gradients and no optimizer state.

    Args:
      rank: inner dimension of the pair.
      alpha: the product of the pair is scaled by `alpha / rank`.
      modules: pattern that matches full paths, such as `r".*/(query|value)"`, of linear layers (Flax's `Linear`,
        `LinearGeneral`, `Dense`, `DenseGeneral`, stacked or not), of stacked expert matrices and of shared experts. The
        default matches the attention projections of the decoders.
      dtype: dtype of the pairs.

    Returns:
      A `Lora`, to be called with a model.

    Raises:
      MeshparError: an invalid rank, alpha, dtype or pattern.

    Example:
      >>> adapted = mp.lora(rank=4, alpha=8, modules="up|down")(model)
      >>> state = mp.init_state(adapted, optax.adamw(1e-4), mesh=mesh, strategy=strategy, key=0)
      >>> sorted(state.params["up"])
      ['bias', 'kernel', 'lora_a', 'lora_b']
    """
    return Lora(rank=rank, alpha=alpha, modules=modules, dtype=dtype)


def _is_separate_pair(name: str, tree: Any) -> bool:
    """Return whether a subtree is the pair of an expert matrix, stored next to the matrix."""
    return name.endswith(LORA_SUFFIX) and isinstance(tree, Mapping) and INWARD in tree and "kernel" not in tree


def of_pair(path: str) -> bool:
    """Return whether a path belongs to an adapter parameter."""
    return path.rpartition("/")[2] in PAIR


@clear_context_mesh()
def fresh_pairs(setup: Setup, key: jax.Array | int) -> dict[str, jax.Array]:
    """Return newly initialized, sharded adapters by path, without creating other parameters."""
    paths = [path for path, _ in tree_leaves_with_paths(setup.abstract.params) if of_pair(path)]
    if not paths:
        return {}

    def make(key_data: jax.Array) -> dict[str, jax.Array]:
        init_key, _ = jax.random.split(jax.random.wrap_key_data(key_data))  # as in `Setup.init`
        with tracing(setup.mesh, setup.strategy):
            params = dict(tree_leaves_with_paths(setup.model.init(jax.random.key_data(init_key)).params))
        return {path: cast_floating(params[path], setup.precision.params) for path in paths}

    shardings = dict(tree_leaves_with_paths(setup.shardings.params))
    return setup.jit(make, {path: shardings[path] for path in paths})(key_words(key))


@clear_context_mesh()
def merged_params(state: TrainState, *, dtype: str | None = None) -> PyTree:
    """Return the parameters of a state with adapters merged into the matrices, whose shardings do not change.

    Merged matrices have at least the precision of `dtype`, by default that of the matrices.
    """
    lora = state.setup.model.lora
    if lora is None:
        return state.params
    merge = functools.partial(lora.merged, dtype=dtype)
    like = jax.eval_shape(merge, state.params)
    by_path = dict(tree_leaves_with_paths(state.setup.shardings.params))
    shardings = [by_path[path] for path, _ in tree_leaves_with_paths(like)]
    return state.setup.jit(merge, jax.tree.unflatten(jax.tree.structure(like), shardings))(state.params)


# ---- Pairs ----------------------------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """The matrix of a linear layer, with stacked dims, input dims and output dims."""

    shape: tuple[int, ...]
    num_in: int
    num_out: int
    names: Names | None = None
    of_experts: bool = False
    """True for a matrix of an MoE layer."""

    def pair_path(self, path: str) -> str:
        return path + LORA_SUFFIX if self.of_experts else path

    @property
    def num_stacked(self) -> int:
        return len(self.shape) - self.num_in - self.num_out

    def pair(self, lora: Lora, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the initial pair: A uniform as in PEFT, B zeros."""
        stacked, inputs, outputs = self._groups(self.shape)
        limit = 1 / math.sqrt(math.prod(inputs))
        a = jax.random.uniform(key, (*stacked, *inputs, lora.rank), jnp.dtype(lora.dtype), -limit, limit)
        return a, jnp.zeros((*stacked, lora.rank, *outputs), jnp.dtype(lora.dtype))

    def pair_names(self) -> tuple[Names, Names] | tuple[None, None]:
        """Return the logical names of the pair. The rank has the name None."""
        if self.names is None:
            return None, None
        stacked, inputs, outputs = self._groups(self.names)
        return (*stacked, *inputs, None), (*stacked, None, *outputs)

    def _groups(self, dims: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Split values of the dims into stacked dims, inputs and outputs."""
        first, last = self.num_stacked, self.num_stacked + self.num_in
        return dims[:first], dims[first:last], dims[last:]


def _like_residual(a: jax.Array, b: jax.Array, layer: _Layer) -> tuple[jax.Array, jax.Array]:
    """Shard the embed dim of a pair like the residual stream, if it is the input or output of the layer.

    Without the constraint, XLA reshards the pair first if it has fewer shards than the matrix.
    """
    names = (layer.names or ())[layer.num_stacked :]
    if names[: layer.num_in] == ("embed",):
        a = _by_names(a, "act_embed", None)
    return a, _by_names(b, None, "act_embed") if names[layer.num_in :] == ("embed",) else b


def _by_names(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain an array by activation names, if the current rules have them."""
    context = ambient()
    if context is None or not set(names) - {None} <= context.rules.names or outer_axes() or context.mesh.size == 1:
        return x
    # `constrain` would count as a constraint of the model on its activations.
    return jax.lax.with_sharding_constraint(x, NamedSharding(context.mesh, spec_of(x, *names)))


def _added(lora: Lora, path: str, layer: _Layer, y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return `y`, the output of a layer, plus the scaled product x A B of its pair."""
    num_in, num_lead = a.ndim - 1, x.ndim - a.ndim + 1
    shape = (*x.shape[:num_lead], *b.shape[1:])
    reason = f"for x {list(x.shape)}, its output is {list(y.shape)}: its matrix is multiplied outside of the layer"
    fix = 'exclude it from `modules`, or in the decoders use tensor_matmul="xla"'
    requested = f"add {list(shape)} to the output of the layer"
    check_cases(f"lora, `{path}`", requested, "wrong-shape", (y.shape != shape, reason, fix))
    dtype, (a, b) = jnp.result_type(x, a), _like_residual(a, b, layer)
    dims = tuple(range(num_lead, x.ndim)), tuple(range(num_in))
    x, b = x.astype(dtype), b.astype(dtype)
    output_names = () if layer.names is None else layer.names[layer.num_stacked + layer.num_in :]
    # Mesh axes, other than batch axes, that shard the outputs.
    if layer.names is not None and (axes := weight_axes(b, None, *output_names)[1]):
        product = _by_shard(x, a, b, axes)
    else:
        xa = dot_general(x, a.astype(dtype), (dims, ((), ())), low_precision=False)
        if layer.names is not None and xa.ndim == 3:
            # Sharded like the tokens: XLA would shard the rank if devices have few tokens, and send more bytes. Layers
            # that return the residual stream or a low-rank projection have the tokens of the norms.
            is_between_blocks = output_names in (("embed",), (None,))
            xa = _by_names(xa, "batch", "norm_seq" if is_between_blocks else "seq", None)
        product = dot_general(xa, b, (((num_lead,), (0,)), ((), ())), low_precision=False)
    return y + (lora.scale * product).astype(y.dtype)


def _by_shard(x: jax.Array, a: jax.Array, b: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Compute x A B separately on each rank of the axes that shard the outputs of B.

    The gradient with respect to x is then a partial sum, as for the matrix. XLA adds the partial sums of all layers
    with input x and all-reduces them once. A shared x A would need an additional all-reduce.
    """
    context = ambient()
    assert context is not None
    num_ranks, num_lead = math.prod(axis_sizes(context.mesh)[axis] for axis in axes), x.ndim - a.ndim + 1

    def split(array: jax.Array, dim: int) -> jax.Array:
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * array.ndim
        spec[dim] = axes
        return jax.lax.with_sharding_constraint(array, NamedSharding(context.mesh, PartitionSpec(*spec)))

    # The gradient of A is summed over ranks in at least float32.
    a_float32 = a.astype(jnp.promote_types(a.dtype, jnp.float32))
    a_of_ranks = split(jnp.broadcast_to(a_float32, (num_ranks, *a.shape)).astype(x.dtype), 0)
    dims = tuple(range(num_lead, x.ndim)), tuple(range(1, a.ndim))
    xa = split(dot_general(x, a_of_ranks, (dims, ((), ())), low_precision=False), num_lead)
    b_shards = split(b.reshape(b.shape[0], num_ranks, -1, *b.shape[2:]), 1)
    product = dot_general(xa, b_shards, (((num_lead + 1,), (0,)), ((num_lead,), (1,))), low_precision=False)
    return split(jnp.moveaxis(product, 0, num_lead), num_lead).reshape(*x.shape[:num_lead], *b.shape[1:])


# ---- NNX -------------------------------------------------------------------------------------------------------------


def _on_nnx(lora: Lora, model: Model) -> Model:
    from meshpar.sharding.adapters.nnx import from_nnx

    adapted = _NnxAdapters(lora, model.build)
    result = from_nnx(adapted)

    def collect(bound: Any) -> PyTree:
        adapted.check_used()
        return result.collect(bound)

    return dataclasses.replace(result, lora=lora, collect=collect)


class _NnxAdapters:
    """Adds pairs to the matching layers of an NNX module, and adds their outputs to the layers' outputs."""

    def __init__(self, lora: Lora, build: Callable[[Any], Any] | None) -> None:
        assert build is not None
        self._lora, self._build = lora, build
        self._classes: dict[tuple[Any, str], Any] = {}
        self._used: set[str] = set()

    def __call__(self, rngs: Any) -> Any:
        from flax import nnx

        module = self._build(rngs)
        layers = dict(_nnx_layers(module))
        flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
        params = {"/".join(map(str, path)): x.get_value().shape for path, x in flat if hasattr(x.get_value(), "shape")}
        for path in self._lora.matches(layers, params):
            part, layer = layers[path]
            owner = part
            if layer.of_experts:
                owner = nnx.Module()
                setattr(part, path.rpartition("/")[2] + LORA_SUFFIX, owner)
            for name, value, names in zip(
                (INWARD, OUTWARD), layer.pair(self._lora, rngs.params()), layer.pair_names(), strict=True
            ):
                metadata: dict[str, Any] = {} if names is None else {"out_sharding": names}
                setattr(owner, name, nnx.LoRAParam(value, **metadata))
            # NNX has no public API to intercept calls, such as `nn.intercept_methods` in Linen (see `adapters`).
            object.__setattr__(part, "__class__", self._class(type(part), path, layer))
        return module

    def _class(self, cls: Any, path: str, layer: _Layer) -> Any:
        """Return a cached subclass of a layer, whose `__call__` adds the output of the pair."""
        lora, used = self._lora, self._used

        def pair_of(owner: Any) -> tuple[jax.Array, jax.Array]:
            used.add(path)
            return getattr(owner, INWARD)[...], getattr(owner, OUTWARD)[...]

        def call(self: Any, inputs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
            return _added(lora, path, layer, cls.__call__(self, inputs, *args, **kwargs), inputs, *pair_of(self))

        def product(self: Any, inputs: jax.Array, name: str) -> jax.Array:
            y = cls.product(self, inputs, name)
            is_adapted = name == path.rpartition("/")[2]
            return (
                _added(lora, path, layer, y, inputs, *pair_of(getattr(self, name + LORA_SUFFIX))) if is_adapted else y
            )

        def weight(self: Any, name: str) -> Any:
            matrix, is_adapted = cls.weight(self, name), name == path.rpartition("/")[2]
            return LoraWeight(matrix, *pair_of(getattr(self, name + LORA_SUFFIX)), lora.scale) if is_adapted else matrix

        if (cls, path) not in self._classes:
            methods = {"weight": weight, "product": product} if layer.of_experts else {"__call__": call}
            attributes = {**methods, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
            self._classes[cls, path] = type(cls)(cls.__name__, (cls,), attributes)
        return self._classes[cls, path]

    def check_used(self) -> None:
        """Check that the forward pass called all layers with pairs."""
        for path in sorted({path for _, path in self._classes} - self._used):
            reason = "the model does not call this layer: its matrix is unused, or multiplied outside of the layer"
            raise problem(f"lora, `{path}`", "train its adapters", reason, "exclude it from `modules`", "not-found")


def _nnx_layers(module: Any) -> Iterator[tuple[str, tuple[Any, _Layer]]]:
    from flax import nnx

    for keys, part in nnx.iter_modules(module):
        path = "/".join(map(str, keys))
        if isinstance(part, nnx.LinearGeneral) and not part.batch_axis:
            axes = (part.axis,) if isinstance(part.axis, int) else tuple(part.axis)
            num_in, num_out = len(axes), len(part.out_features)
            if axes != tuple(range(-num_in, 0)):
                continue
        elif isinstance(part, nnx.Linear):
            num_in = num_out = 1
        else:
            for name in getattr(part, "adapted", ()):
                if not hasattr(part, name):
                    continue
                shape, names = _of_param(getattr(part, name))
                yield f"{path}/{name}".removeprefix("/"), (part, _Layer(shape, 1, 1, names, of_experts=True))
            continue
        shape, names = _of_param(part.kernel)
        yield path, (part, _Layer(shape, num_in, num_out, names))


def _of_param(param: Any) -> tuple[tuple[int, ...], Names | None]:
    shape, names = param.get_value().shape, param.get_metadata().get("out_sharding")
    return shape, names and (*names, *[None] * (len(shape) - len(names)))


# ---- Linen -----------------------------------------------------------------------------------------------------------


def _on_linen(lora: Lora, model: Model) -> Model:
    adapted = _LinenAdapters(lora, model)
    return dataclasses.replace(model, lora=lora, init=adapted.init, bind=adapted.bind, names=adapted.names)


class _LinenAdapters:
    """Adds pairs to the matching layers of a Linen module, and adds their outputs to the layers' outputs."""

    def __init__(self, lora: Lora, model: Model) -> None:
        self._lora, self._model = lora, model
        self._adapted: dict[str, _Layer] = {}

    def init(self, key: jax.Array) -> Variables:
        from meshpar.sharding.adapters.linen import linen_methods

        dims_of: dict[str, tuple[int, int]] = {}

        def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            dims = _linen_dims(context.module) if context.method_name == "__call__" else None
            path = "/".join(context.module.path)
            if dims is not None:
                dims_of[path] = dims
            dims_of.update({_below(path, name): (1, 1) for name in getattr(context.module, "adapted", ())})
            return call(*args, **kwargs)

        with linen_methods(watch):
            params, extra = self._model.init(key)
        shapes = {path: x.shape for path, x in tree_leaves_with_paths(params)}
        layers = {path: dims for path, dims in dims_of.items() if {path, _below(path, "kernel")} & set(shapes)}
        names = self._model.names()
        for index, path in enumerate(self._lora.matches(layers, shapes)):
            kernel = path if path in shapes else _below(path, "kernel")
            layer = _Layer(shapes[kernel], *layers[path], names.get(kernel), of_experts=kernel == path)
            self._adapted[path] = layer
            pair = layer.pair(self._lora, jax.random.fold_in(key_of(key), index))
            params = _with(params, layer.pair_path(path).split("/") if path else [], dict(zip(PAIR, pair, strict=True)))
        return Variables(params, extra)

    def names(self) -> Mapping[str, Names]:
        result = dict(self._model.names())
        for path, layer in self._adapted.items():
            for name, names in zip((INWARD, OUTWARD), layer.pair_names(), strict=True):
                if names is not None:
                    result[_below(layer.pair_path(path), name)] = names
        return result

    def bind(self, params: PyTree, extra: PyTree) -> Any:
        bound = self._model.bind(params, extra)
        bound.interceptor = self._add
        return bound

    def _add(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Call a method of a module, and add the output of the pair."""
        y, module = call(*args, **kwargs), context.module
        if context.method_name == "weight" and hasattr(module, "adapted"):
            pair = module.variables.get("params", {}).get(args[0] + LORA_SUFFIX)
            return y if pair is None else LoraWeight(y, pair[INWARD], pair[OUTWARD], self._lora.scale)
        pair, path = module.variables.get("params", {}), "/".join(module.path)
        if context.method_name == "product" and hasattr(module, "adapted"):
            pair, path = pair.get(args[1] + LORA_SUFFIX, {}), _below(path, args[1])
        elif context.method_name != "__call__" or _linen_dims(module) is None:
            return y
        if INWARD not in pair:
            return y
        x = args[0] if args else kwargs["inputs"]
        # In stacked layers, `module.path` is only the end of the path. Layers with equal ends have equal shapes.
        layer = next(layer for name, layer in self._adapted.items() if f"/{name}".endswith(f"/{path}"))
        return _added(self._lora, path, layer, y, x, pair[INWARD], pair[OUTWARD])


def _linen_dims(module: Any) -> tuple[int, int] | None:
    """Return the numbers of input and output dims of a linear layer, or None for other modules."""
    from flax import linen as nn

    if isinstance(module, nn.Dense):
        return 1, 1
    if not isinstance(module, nn.DenseGeneral) or module.batch_dims:
        return None
    axes = (module.axis,) if isinstance(module.axis, int) else tuple(module.axis)
    if axes != tuple(range(-len(axes), 0)):
        return None
    return len(axes), 1 if isinstance(module.features, int) else len(module.features)


def _below(path: str, name: str) -> str:
    return f"{path}/{name}".removeprefix("/")


def _with(tree: PyTree, path: list[str], entries: Mapping[str, Any]) -> PyTree:
    """Return nested dicts with entries added at a path."""
    if not path:
        return {**tree, **entries}
    return {**tree, path[0]: _with(tree.get(path[0], {}), path[1:], entries)}
