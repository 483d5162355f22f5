"""Low-rank adapters: matrices stay as they are, and a narrow pair beside each is trained.

    y = x W + (alpha / rank) (x A) B        A: [inputs, rank]    B: [rank, outputs], zeros at first

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models". Experts, `[E, d, f]`, have a pair each,
`[E, d, rank]` and `[E, rank, f]`, which the MoE layer multiplies in groups as it does the matrices (`Adapted`). Shared
experts have one as a linear layer has.

Flax's own `nnx.LoRA` wraps one `nnx.Linear`, and knows neither several dims in or out nor Linen. qwix 0.1.8 was tried:
its adapters and bases in int8 and nf4 work in models of plain layers, under our rules, as

    mp.from_nnx(lambda rngs: qwix.apply_lora_to_model(Net(rngs), provider, x, rngs=rngs)), trainable=r".*lora_[ab]"

and fail in stacked layers, as the decoders' are, in int8 and nf4 alike. The pair it adds has no dim of layers to scan
over (IndexError). With `qwix.quantize_model(..., PtqProvider(...))`, with our adapters or without any, it quantizes the
one layer that the scan's body is given, and puts that in the stack's place (an assertion: shape (16, 2, 8), names
`layers, embed, heads, head_dim`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.layers.precision import cast_floating, check_bits, dot_general
from meshpar.layers.scan import Adapted
from meshpar.sharding.adapters import BoundLinen, Model, Variables, key_of, linen_methods
from meshpar.sharding.context import ambient, apart, spec_of, tracing
from meshpar.sharding.manual_regions import outer_axes, weight_axes
from meshpar.sharding.types import (
    BESIDE,
    PAIR,
    Names,
    PyTree,
    axis_sizes,
    is_int,
    near_or,
    problem,
    tree_leaves_with_paths,
)
from meshpar.training.state import Setup, TrainState, key_words

INWARD, OUTWARD = PAIR
TRAINED = rf"(.*/)?({INWARD}|{OUTWARD})"
"""What is trained of a model with adapters, where nothing else is said."""
ATTENTION = r"(.*/)?(query|key|value|out|query_down|query_up)"
"""The projections of attention in the shipped decoders."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of a model; see `lora`."""

    rank: int = 8
    """Width between the pair."""
    alpha: float = 16.0
    """The pair's product counts `alpha / rank` times."""
    modules: str = ATTENTION
    """Pattern of the whole paths of linear layers and experts' matrices that get a pair."""
    dtype: str = "float32"
    """Of the pairs, whatever that of the matrices."""

    def __post_init__(self) -> None:
        for name, is_right, rule in (
            ("rank", is_int(self.rank, 1), "it is a whole number of at least 1"),
            ("alpha", _is_number(self.alpha) and 0 < self.alpha < math.inf, "it is a number above 0"),
            ("dtype", self.dtype in ("float32", "bfloat16", "float16", "float64"), "it is a dtype of weights"),
            ("modules", _is_pattern(self.modules), "it is a regular expression for whole paths of linear layers"),
        ):
            if not is_right:
                raise problem(f"lora({name}={getattr(self, name)!r})", "use it", rule, "change it")

    @property
    def scale(self) -> float:
        """How often the pair's product counts."""
        return self.alpha / self.rank

    @property
    def trained(self) -> str:
        """Pattern of what is trained where nothing else is said."""
        return TRAINED

    def __call__(self, model: Model) -> Model:
        """The model with pairs beside the layers that are chosen; of it they are trained, and nothing else.

        Raises:
          ValueError: no model; one of plain functions, with adapters, or of `mp.explicit`; a pattern that chooses no
            linear layer, or what is none, as routers and tables; 64 bits where jax has none.
        """
        where = f"lora(modules={self.modules!r})"
        if not isinstance(model, Model):
            exists, fix = f"a {type(model).__name__} is no Model", "wrap it: mp.from_nnx(lambda rngs: ...)"
            raise problem(where, "give the model adapters", exists, fix)
        if model.lora is not None:
            raise problem(where, "give the model adapters", "it has some already", "take the model without them")
        if model.is_explicit:
            exists, fix = "it says its own types (mp.explicit), and adapters say none", "leave mp.explicit out"
            raise problem(where, "give the model adapters", exists, fix)
        if model.kind == "functions":
            exists, fix = "plain functions have no linear layers to name", "add x @ a @ b, and train by trainable="
            raise problem(where, "give the model adapters", exists, fix)
        check_bits("lora(dtype=...)", self.dtype)
        return _on_nnx(self, model) if model.kind == "nnx" else _on_linen(self, model)

    def merged(self, params: PyTree) -> PyTree:
        """Parameters without the pairs, whose products are in the matrices: in float32 at the least, then rounded."""
        if not isinstance(params, Mapping):
            return params
        pairs = {name.removesuffix(BESIDE): below for name, below in params.items() if _is_beside(name, below)}
        pairs |= {"kernel": params} if INWARD in params else {}
        return {
            name: self._sum(below, pairs[name]) if name in pairs else self.merged(below)
            for name, below in params.items()
            if name not in PAIR and not _is_beside(name, below)
        }

    def _sum(self, kernel: jax.Array, pair: Mapping[str, jax.Array]) -> jax.Array:
        """A matrix, with what its pair makes."""
        a, b = pair[INWARD], pair[OUTWARD]
        stacked = a.ndim + b.ndim - 2 - kernel.ndim
        lead, wide = a.shape[:stacked], jnp.promote_types(kernel.dtype, jnp.float32)
        product = a.reshape(*lead, -1, self.rank).astype(wide) @ b.reshape(*lead, self.rank, -1).astype(wide)
        return (kernel + self.scale * product.reshape(kernel.shape)).astype(kernel.dtype)

    def chosen(self, layers: Collection[str], params: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Paths of the linear layers that get a pair.

        Args:
          layers: paths of the linear layers there are.
          params: shapes of the parameters by path.
        """
        where, pattern = f"lora(modules={self.modules!r})", re.compile(self.modules)
        for path, shape in params.items():
            module = path.rpartition("/")[0]
            if len(shape) < 2 or {path, module} & set(layers):
                continue
            if pattern.fullmatch(path) or pattern.fullmatch(module):
                exists = f"`{path}` {list(shape)} is no linear layer's matrix: routers and tables have none"
                raise problem(where, "give it adapters", exists, "write a pattern that leaves it out")
        found = [path for path in sorted(layers) if pattern.fullmatch(path)]
        if not found:
            exists = f"it chooses none of the model's {len(layers)} linear layers"
            fix = near_or(self.modules, layers, "choose one by its whole path")
            raise problem(where, "give the model adapters", exists, fix)
        return found


def lora(*, rank: int = 8, alpha: float = 16.0, modules: str = ATTENTION, dtype: str = "float32") -> Lora:
    """Low-rank adapters: `lora(rank=8)(model)` is the model with a narrow pair beside each matrix that is chosen.

    The pairs lie by the names of their matrix's dims, so the strategy's rules are theirs; the matrices are frozen, in
    whatever dtype they are: no gradient, no reduction, no optimizer state.

    Args:
      rank: width between the pair.
      alpha: the pair's product counts `alpha / rank` times.
      modules: pattern for the whole paths of linear layers (Flax's `Linear`, `LinearGeneral`, `Dense`, `DenseGeneral`,
        also within stacked layers), of experts' stacked matrices, which get a pair an expert, and of shared experts:
        `r".*/(query|value)"`. Default: the projections of the decoders' attention.
      dtype: of the pairs.

    Raises:
      ValueError: a rank, alpha, dtype or pattern that is none.

    Example:
      >>> lora(rank=4, alpha=8).scale
      2.0
    """
    return Lora(rank=rank, alpha=alpha, modules=modules, dtype=dtype)


def _is_beside(name: str, below: Any) -> bool:
    return name.endswith(BESIDE) and isinstance(below, Mapping) and INWARD in below and "kernel" not in below


def of_pair(path: str) -> bool:
    """Whether it is the path of an adapter."""
    return path.rpartition("/")[2] in PAIR


@apart()
def fresh_pairs(setup: Setup, key: jax.Array | int) -> dict[str, jax.Array]:
    """Adapters by path, in their shards, as training begins with them; of the rest of the model nothing is made."""
    paths = [path for path, _ in tree_leaves_with_paths(setup.abstract.params) if of_pair(path)]
    if not paths:
        return {}

    def make(key_data: jax.Array) -> dict[str, jax.Array]:
        init_key, _ = jax.random.split(jax.random.wrap_key_data(key_data))  # as in `Setup.init`
        with tracing(setup.mesh, setup.strategy):
            made = dict(tree_leaves_with_paths(setup.model.init(jax.random.key_data(init_key)).params))
        return {path: cast_floating(made[path], setup.precision.params) for path in paths}

    lie = dict(tree_leaves_with_paths(setup.shardings.params))
    return setup.jit(make, {path: lie[path] for path in paths})(key_words(key))


@apart()
def merged_params(state: TrainState) -> PyTree:
    """A state's parameters, with adapters merged into the matrices, which lie as they did; without any, as they are."""
    lora = state.setup.model.lora
    if lora is None:
        return state.params
    like = jax.eval_shape(lora.merged, state.params)
    lie = dict(tree_leaves_with_paths(state.setup.shardings.params))
    shardings = [lie[path] for path, _ in tree_leaves_with_paths(like)]
    return state.setup.jit(lora.merged, jax.tree.unflatten(jax.tree.structure(like), shardings))(state.params)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _is_pattern(text: Any) -> bool:
    try:
        return isinstance(text, str) and re.compile(text) is not None
    except re.error:
        return False


# ---- The pair beside a matrix ----------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """A linear layer's matrix: stacked dims, inputs, outputs."""

    shape: tuple[int, ...]
    num_in: int
    num_out: int
    names: Names | None = None
    of_experts: bool = False
    """Whether it is a matrix of an MoE layer's, and no layer of its own."""

    def held(self, path: str) -> str:
        """Where the pair of a layer of this path stands."""
        return path + BESIDE if self.of_experts else path

    @property
    def num_stacked(self) -> int:
        return len(self.shape) - self.num_in - self.num_out

    def pair(self, lora: Lora, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The pair as training begins with it: the first as PEFT draws it, the second zero."""
        at = self.num_stacked
        lead, inputs, outputs = self.shape[:at], self.shape[at : at + self.num_in], self.shape[at + self.num_in :]
        reach = 1 / math.sqrt(math.prod(inputs))
        a = jax.random.uniform(key, (*lead, *inputs, lora.rank), jnp.dtype(lora.dtype), -reach, reach)
        return a, jnp.zeros((*lead, lora.rank, *outputs), jnp.dtype(lora.dtype))

    def pair_names(self) -> tuple[Names, Names] | tuple[None, None]:
        """Logical names of the pair's dims: those of the matrix, and none between the two."""
        if self.names is None:
            return None, None
        at = self.num_stacked
        lead, inputs, outputs = self.names[:at], self.names[at : at + self.num_in], self.names[at + self.num_in :]
        return (*lead, *inputs, None), (*lead, None, *outputs)

    @property
    def is_between_blocks(self) -> bool:
        """Whether it makes the residual stream as it lies between blocks, or a narrow vector out of that."""
        outputs = (self.names or ())[len(self.shape) - self.num_out :]
        return outputs in (("embed",), (None,))


def _laid(narrow: jax.Array, layer: _Layer) -> jax.Array:
    """The few numbers between a pair, [batch, sequence, rank], split as the tokens are and nowhere else.

    Left to itself XLA splits the rank where few tokens are a device's, and sends more than the numbers are worth.
    """
    if layer.names is None or narrow.ndim != 3:
        return narrow
    return _by_names(narrow, "batch", "norm_seq" if layer.is_between_blocks else "seq", None)


def _gathered(a: jax.Array, b: jax.Array, layer: _Layer) -> tuple[jax.Array, jax.Array]:
    """The pair, split over the residual stream's width as that is, where one of the two takes it in or makes it.

    Left to itself XLA takes it to other shards first, where fewer ranks split it than the matrix beside it.
    """
    names = (layer.names or ())[layer.num_stacked :]
    if names[: layer.num_in] == ("embed",):
        a = _by_names(a, "act_embed", None)
    return a, _by_names(b, None, "act_embed") if names[layer.num_in :] == ("embed",) else b


def _by_names(x: jax.Array, *names: str | None) -> jax.Array:
    """Laid out by names of activations, in a step that knows them; else as it is."""
    here = ambient()
    if here is None or not set(names) - {None} <= here.rules.names or outer_axes() or here.mesh.size == 1:
        return x
    # Not `constrain`: that a pair is laid out does not say that the model's activations are.
    return jax.lax.with_sharding_constraint(x, NamedSharding(here.mesh, spec_of(x, *names)))


def _added(lora: Lora, path: str, layer: _Layer, y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """What a layer makes of x, and what its pair adds."""
    num_in, at = a.ndim - 1, x.ndim - a.ndim + 1
    if y.shape != (*x.shape[:at], *b.shape[1:]):
        exists = f"of x {list(x.shape)} it made {list(y.shape)}: its matrix is taken out of it and multiplied elsewhere"
        fix = 'leave it out of `modules`; of the decoders, tensor_matmul="xla" multiplies in the layer'
        raise problem(f"lora, `{path}`", f"add {[*x.shape[:at], *b.shape[1:]]} to what the layer makes", exists, fix)
    dtype, (a, b) = jnp.result_type(x, a), _gathered(a, b, layer)
    dims = tuple(range(at, x.ndim)), tuple(range(num_in))
    x, b = x.astype(dtype), b.astype(dtype)
    if axes := _output_axes(layer, b):
        more = _by_shard(x, a, b, axes)
    else:
        narrow = _laid(dot_general(x, a.astype(dtype), (dims, ((), ())), narrow=False), layer)
        more = dot_general(narrow, b, (((at,), (0,)), ((), ())), narrow=False)
    return y + (lora.scale * more).astype(y.dtype)


def _output_axes(layer: _Layer, b: jax.Array) -> tuple[str, ...]:
    """Mesh axes that split what a layer makes, and not the batch: those of tensor parallelism."""
    names = layer.names
    return () if names is None else weight_axes(b, None, *names[layer.num_stacked + layer.num_in :])[1]


def _by_shard(x: jax.Array, a: jax.Array, b: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x A B, by each rank of the axes that split B's outputs for itself: x's gradient of it is a part of a sum then.

    So it is of the matrix beside it: XLA adds up what all layers that take x in make of it, and sums that over the
    ranks once. Of one x A for all ranks the gradient is summed on the way, and nothing behind that can be added first.
    """
    here = ambient()
    assert here is not None
    ranks, lead = math.prod(axis_sizes(here.mesh)[axis] for axis in axes), x.ndim - a.ndim + 1

    def split(array: jax.Array, dim: int) -> jax.Array:
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * array.ndim
        spec[dim] = axes
        return jax.lax.with_sharding_constraint(array, NamedSharding(here.mesh, PartitionSpec(*spec)))

    # The sum over ranks of A's gradient, which this makes, is in float32 at the least.
    wide = a.astype(jnp.promote_types(a.dtype, jnp.float32))
    of_ranks = split(jnp.broadcast_to(wide, (ranks, *a.shape)).astype(x.dtype), 0)
    dims = tuple(range(lead, x.ndim)), tuple(range(1, a.ndim))
    narrow = split(dot_general(x, of_ranks, (dims, ((), ())), narrow=False), lead)
    shards = split(b.reshape(b.shape[0], ranks, -1, *b.shape[2:]), 1)
    more = dot_general(narrow, shards, (((lead + 1,), (0,)), ((lead,), (1,))), narrow=False)
    return split(jnp.moveaxis(more, 0, lead), lead).reshape(*x.shape[:lead], *b.shape[1:])


# ---- NNX -------------------------------------------------------------------------------------------------------------


def _on_nnx(lora: Lora, model: Model) -> Model:
    from meshpar.sharding.adapters import from_nnx

    adapted = _NnxAdapters(lora, model.build)
    made = from_nnx(adapted)

    def collect(bound: Any) -> PyTree:
        adapted.check_used()
        return made.collect(bound)

    return dataclasses.replace(made, lora=lora, collect=collect)


class _NnxAdapters:
    """Makes an NNX module whose chosen layers have pairs, and classes that add what these make."""

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
        for path in self._lora.chosen(layers, params):
            part, layer = layers[path]
            held = part
            if layer.of_experts:
                held = nnx.Module()
                setattr(part, path.rpartition("/")[2] + BESIDE, held)
            for name, value, names in zip(
                (INWARD, OUTWARD), layer.pair(self._lora, rngs.params()), layer.pair_names(), strict=True
            ):
                given: dict[str, Any] = {} if names is None else {"out_sharding": names}
                setattr(held, name, nnx.LoRAParam(value, **given))
            # NNX has no public API to intercept calls, such as `nn.intercept_methods` in Linen (see `adapters`).
            object.__setattr__(part, "__class__", self._class(type(part), path, layer))
        return module

    def _class(self, cls: Any, path: str, layer: _Layer) -> Any:
        """The layer's class, whose `__call__` adds what the pair makes; the same one whenever the module is made."""
        lora, used = self._lora, self._used

        def call(self: Any, inputs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
            used.add(path)
            y = cls.__call__(self, inputs, *args, **kwargs)
            return _added(lora, path, layer, y, inputs, getattr(self, INWARD)[...], getattr(self, OUTWARD)[...])

        def product(self: Any, inputs: jax.Array, name: str) -> jax.Array:
            y = cls.product(self, inputs, name)
            if name != path.rpartition("/")[2]:
                return y
            used.add(path)
            pair = getattr(self, name + BESIDE)
            return _added(lora, path, layer, y, inputs, getattr(pair, INWARD)[...], getattr(pair, OUTWARD)[...])

        def weight(self: Any, name: str) -> Any:
            found = cls.weight(self, name)
            if name != path.rpartition("/")[2]:
                return found
            used.add(path)
            pair = getattr(self, name + BESIDE)
            return Adapted(found, getattr(pair, INWARD)[...], getattr(pair, OUTWARD)[...], lora.scale)

        if (cls, path) not in self._classes:
            changed = {"weight": weight, "product": product} if layer.of_experts else {"__call__": call}
            about = {**changed, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
            self._classes[cls, path] = type(cls)(cls.__name__, (cls,), about)
        return self._classes[cls, path]

    def check_used(self) -> None:
        """Raises `ValueError` for a layer with a pair that no forward pass has called."""
        for path in sorted({path for _, path in self._classes} - self._used):
            exists = "the model has not called that layer: its matrix is taken out of it, or not used"
            raise problem(f"lora, `{path}`", "train its adapters", exists, "leave it out of `modules`")


def _nnx_layers(module: Any) -> Iterator[tuple[str, tuple[Any, _Layer]]]:
    """Every linear layer of a module, by path."""
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
    """Pairs beside the matrices of a Linen module's chosen layers, and their part of what these layers make."""

    def __init__(self, lora: Lora, model: Model) -> None:
        self._lora, self._model = lora, model
        self._chosen: dict[str, _Layer] = {}

    def init(self, key: jax.Array) -> Variables:
        seen: dict[str, tuple[int, int]] = {}

        def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            dims = _linen_dims(context.module) if context.method_name == "__call__" else None
            path = "/".join(context.module.path)
            if dims is not None:
                seen[path] = dims
            seen.update({_below(path, name): (1, 1) for name in getattr(context.module, "adapted", ())})
            return call(*args, **kwargs)

        with linen_methods(watch):
            params, extra = self._model.init(key)
        shapes = {path: x.shape for path, x in tree_leaves_with_paths(params)}
        layers = {path: dims for path, dims in seen.items() if {path, _below(path, "kernel")} & set(shapes)}
        names = self._model.names()
        for number, path in enumerate(self._lora.chosen(layers, shapes)):
            kernel = path if path in shapes else _below(path, "kernel")
            layer = _Layer(shapes[kernel], *layers[path], names.get(kernel), of_experts=kernel == path)
            self._chosen[path] = layer
            pair = layer.pair(self._lora, jax.random.fold_in(key_of(key), number))
            params = _with(params, layer.held(path).split("/") if path else [], dict(zip(PAIR, pair, strict=True)))
        return Variables(params, extra)

    def names(self) -> Mapping[str, Names]:
        found = dict(self._model.names())
        for path, layer in self._chosen.items():
            for name, names in zip((INWARD, OUTWARD), layer.pair_names(), strict=True):
                if names is not None:
                    found[_below(layer.held(path), name)] = names
        return found

    def bind(self, params: PyTree, extra: PyTree) -> BoundLinen:
        plain = self._model.bind(params, extra)
        return _BoundWithPairs(self._lora, self._chosen, plain.module, plain.info, params, plain.extra)


class _BoundWithPairs(BoundLinen):
    """A Linen module with its variables, some of whose layers have pairs."""

    def __init__(self, lora: Lora, layers: Mapping[str, _Layer], *given: Any) -> None:
        super().__init__(*given)
        self._lora, self._layers = lora, layers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def add(call: Any, inputs: Any, more: Any, context: Any) -> Any:
            y, module = call(*inputs, **more), context.module
            if context.method_name == "weight" and hasattr(module, "adapted"):
                pair = module.variables.get("params", {}).get(inputs[0] + BESIDE)
                return y if pair is None else Adapted(y, pair[INWARD], pair[OUTWARD], self._lora.scale)
            pair, path = module.variables.get("params", {}), "/".join(module.path)
            if context.method_name == "product" and hasattr(module, "adapted"):
                pair, path = pair.get(inputs[1] + BESIDE, {}), _below(path, inputs[1])
            elif context.method_name != "__call__" or _linen_dims(module) is None:
                return y
            if INWARD not in pair:
                return y
            x = inputs[0] if inputs else more["inputs"]
            # Within stacked layers a module knows the end of its path only; such ends make the same kind of thing.
            layer = next(layer for whole, layer in self._layers.items() if f"/{whole}".endswith(f"/{path}"))
            return _added(self._lora, path, layer, y, x, pair[INWARD], pair[OUTWARD])

        with linen_methods(add):
            return super().__call__(*args, **kwargs)


def _linen_dims(module: Any) -> tuple[int, int] | None:
    """Of a linear layer's matrix, how many dims are inputs and how many outputs; None for another module."""
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
    return f"{path}/{name}" if path else name


def _with(tree: PyTree, path: list[str], more: Mapping[str, Any]) -> PyTree:
    """Nested dicts with entries added at a path."""
    if not path:
        return {**tree, **more}
    return {**tree, path[0]: _with(tree.get(path[0], {}), path[1:], more)}
