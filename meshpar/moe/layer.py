"""An MoE layer on the global view: routed, dispatched, computed, combined, and what balancing needs.

    x [B, T, d] ─► router ─► dispatch over the axes of experts ─► SwiGLU, column and row parallel ─► combine ─► y
                     └─► RouterStats: auxiliary losses, tokens of every expert

What the Flax module is made of (`meshpar.moe.nnx`), and usable without Flax. The rules in force say
which mesh axes split what: tokens by `batch` and `seq`, experts by `act_expert`, their hidden width by `act_mlp`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from meshpar.collectives.wire import varying_alike
from meshpar.layers.auxiliary import report
from meshpar.layers.precision import dot_general
from meshpar.layers.scan import Adapted, Ahead, Aux, is_staged
from meshpar.moe.argument_checks import check_array, check_whole
from meshpar.moe.assignment_order import by_expert, in_buffers, spread, weighted_sum
from meshpar.moe.balance import auxiliary_loss, z_loss
from meshpar.moe.dispatch_combine import ExpertFn, dispatch
from meshpar.moe.dispatch_paths import Dispatched
from meshpar.moe.expert_reduction import Dims, ahead, alike, scattered, total, varies_beside, whole
from meshpar.moe.grouped import grouped_swiglu
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routed, capacity, count, entropy, route
from meshpar.moe.transport_choice import NODE_FIRST, TWO_LEVELS
from meshpar.sharding.context import Ambient, ambient, constrain, param_spec, spec_of
from meshpar.sharding.manual_regions import outer_axes, per_device
from meshpar.sharding.rules import Rules, resolve
from meshpar.sharding.types import AnyMesh, Leaf, axes_of_spec, axis_sizes, problem, spec_axes

ROUTER_NAMES = ("embed", "expert")
INWARD_NAMES = ("expert", "embed", "mlp")
OUTWARD_NAMES = ("expert", "mlp", "embed")


Experts: TypeAlias = tuple[Any, Any, Any]
"""Gate, up and down of the experts that are here: arrays, or `Adapted`."""


class Weights(NamedTuple):
    """Of the router and of all experts, stacked."""

    router: Float[Array, "d E"]
    gate: Float[Array, "E d f"]
    up: Float[Array, "E d f"]
    down: Float[Array, "E f d"]


class RouterStats(NamedTuple):
    """Router statistics, beside a layer's output: of all tokens that it was given."""

    loss: Float[Array, ""]
    """Auxiliary losses, to be added to the loss."""
    load: Int32[Array, " E"]
    """Choices that fell on each expert, dropped ones included."""
    dropped: Int32[Array, ""]
    """Choices dropped over capacity."""
    router_entropy: Float[Array, ""]
    """Mean over tokens of the entropy of a token's scores, in nats."""

    @property
    def aux(self) -> Aux:
        """As `meshpar.scan_layers` takes it."""
        metrics = {"load": self.load, "dropped": self.dropped, "router_entropy": self.router_entropy}
        return Aux(self.loss, metrics)


def report_layers(aux: Aux | RouterStats, config: MoEConfig) -> None:
    """Report to the step the router statistics of all MoE layers of a model: the losses, and the metrics by layer.

        moe/load            [layers, E]  choices that fell on each expert
        moe/rank_load       [layers, N]  on the experts of each rank
        moe/drop_rate       [layers]     share of them dropped over capacity
        moe/router_entropy  [layers]     in nats
        moe/aux_loss        []           what is added to the loss of training

    `meshpar.moe.load_metrics.loads` reads them on the host. Each is a mean over micro-steps; under stages loads
    are sums.

    Args:
      aux: of all layers, the losses summed and the metrics stacked, as `scan_layers` gives them; of a model with one
        layer its `RouterStats`.
      config: of a layer.

    Raises:
      ValueError: something else than router statistics of this config.
    """
    check_config("report_layers", config)
    aux = _of_layers(aux, config)
    load, here = aux.metrics["load"], ambient()
    wide = jnp.promote_types(aux.loss.dtype, jnp.float32)
    ranks = 1 if here is None else math.prod(axis_sizes(here.mesh)[a] for a in _axes_of_experts(here, load.shape[1]))
    metrics = {
        "moe/load": load.astype(wide),
        "moe/rank_load": load.reshape(len(load), ranks, -1).sum(-1).astype(wide),
        "moe/drop_rate": aux.metrics["dropped"] / jnp.maximum(load.sum(-1), 1).astype(wide),
        "moe/router_entropy": aux.metrics["router_entropy"],
        "moe/aux_loss": aux.loss,
    }
    report(loss=aux.loss if config.auxiliary_weight or config.z_weight else None, metrics=metrics)


def _of_layers(aux: Aux | RouterStats, config: MoEConfig) -> Aux:
    """Statistics of several layers, or of one as the only layer there is."""
    given = aux.aux if isinstance(aux, RouterStats) else aux
    load = given.metrics.get("load") if isinstance(given, Aux) else None
    if load is None or load.ndim not in (1, 2) or load.shape[-1] != config.routing.num_experts or given.loss.ndim:
        shown = f"a {type(aux).__name__}" + ("" if load is None else f" of loads {load.shape}, loss {given.loss.shape}")
        exists = f"loads are [layers, {config.routing.num_experts}] or [{config.routing.num_experts}], with one loss"
        fix = "give the RouterStats of one layer, or stack the metrics of `stats.aux` over layers and sum the losses"
        raise problem("report_layers", f"report {shown}", exists, fix)
    return given if load.ndim == 2 else Aux(given.loss, {name: x[None] for name, x in given.metrics.items()})


def moe_layer(
    x: Float[Array, "B T d"],
    weights: Weights,
    config: MoEConfig,
    *,
    bias: Float[Array, " E"] | None = None,
    drops: bool = True,
) -> tuple[Float[Array, "B T d"], RouterStats]:
    """Every token through its experts, summed with their weights: the routed part of a layer.

    On one device, and where no rules are in force, everything is computed here. Under rules it runs per device over the
    axes that split tokens, experts and the experts' hidden width:

    - tokens split over the axes of experts travel to their experts and back (`dispatch`): two all-to-alls;
    - tokens replicated over them stay: every rank computes its own experts' part, and the parts are summed;
    - hidden width split over `tensor`: partial sums, summed over it behind the combine, where there are T rows;
    - weights that the strategy splits over axes of the tokens, as `fsdp()` does, come in as they lie: they are gathered
      forward and again backward, and their gradients reduce-scattered in float32; over other axes that split tokens,
      but for those of the experts, over which dispatch has summed them, gradients are summed.

    Inside a region that is manual over the axes of the batch (`reduce_gradients="once"`, `quantize=...`, stages)
    experts may come whole, and are all computed here, or as the rank's own slice, and tokens travel as always.

    Args:
      x: tokens.
      weights: global, or inside such a region as they are held there.
      config: of the layer.
      bias: of the balancing, added to scores for the choice alone.
      drops: whether the routing's capacity and the config's bound hold; a decoder that adds one token after the other
        has no use for them. Without them `chunks` changes nothing but time, and need not divide the tokens.

    Returns:
      y, laid out as the rules say for `norm_seq` (partial sums are scattered where that splits the sequence further),
      and the router's statistics.

    Raises:
      ValueError: x that is not [B, T, d] of floating numbers, or holds no token; weights of other sizes than the
        config's; tokens that are split over some axes of the experts only.
    """
    here = ambient()
    is_alone = here is None or here.mesh.size == 1
    _check_given(x, weights, config)
    _check_sizes(x, weights, config, bias, is_alone=is_alone)
    cut = _SplitAxes() if here is None or is_alone else _SplitAxes.of(here, x, weights, config)
    kernel = functools.partial(_per_device, config=config, cut=cut, drops=drops)
    with jax.named_scope("moe"):
        if not cut.inner:
            return kernel(x, weights, bias)
        same = PartitionSpec()
        specs = (cut.tokens, Weights(same, *_specs_of(weights[1:], cut)), same)  # type: ignore[arg-type]
        stats = RouterStats(*[same] * 4)  # type: ignore[arg-type]
        kept = jax.checkpoint(kernel, policy=_keeps, prevent_cse=False)
        if outer_axes():
            return _nested(kept, specs, (cut.out, stats))(x, weights, bias)
        return per_device(kept, specs, (cut.out, stats))(x, weights, bias)


def _specs_of(experts: Sequence[Any], cut: _SplitAxes) -> list[Any]:
    """How gate, up and down enter the layer's region: as they lie, and beside that as they are used, where gathered."""

    def specs(weight: Any, split: _Split) -> Any:
        lies, used = (PartitionSpec(*(axes or None for axes in dims)) for dims in (split.lies, split.used))
        return Ahead(lies, used) if isinstance(weight, Ahead) else lies  # type: ignore[arg-type]

    return _each(specs, experts, cut.weights)


def _each(function: Callable[..., Any], experts: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """What a function makes of gate, up and down, and of the pairs beside them."""
    return jax.tree.map(function, list(experts), *map(list, others), is_leaf=lambda x: isinstance(x, Ahead))


def _nested(kernel: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
    """The kernel per device inside a region that is per device already.

    Nothing there says what varies over which axes, and gradients of what is replicated over some are summed on the way
    out, in the dtype it came in: the router's in float32 at the least, and on CPUs, whose compiler aborts on sums of
    bfloat16, the tokens' too.
    """
    here = ambient()
    assert here is not None
    # A mesh without devices is one of a cluster that is compiled for.
    on_cpu = isinstance(here.mesh, jax.sharding.Mesh) and here.mesh.devices.flat[0].platform == "cpu"

    def nested(x: jax.Array, weights: Weights, bias: jax.Array | None) -> Any:
        def widened(array: jax.Array) -> jax.Array:
            return array.astype(jnp.promote_types(array.dtype, jnp.float32))

        def local(wide: jax.Array, weights: Weights, bias: jax.Array | None) -> Any:
            return kernel(wide.astype(x.dtype), weights, bias)

        # Inside another region what varies over its axes is not known here, and experts may be split over them.
        run = per_device(local, specs, out, check_vma=False)
        weights = weights._replace(router=widened(weights.router))
        for name, one in weights._asdict().items():
            if isinstance(one, Adapted):
                a, b = jax.tree.map(widened, (one.a, one.b))
                weights = weights._replace(**{name: dataclasses.replace(one, a=a, b=b)})  # type: ignore[arg-type]
        return run(widened(x) if on_cpu else x, weights, bias)

    return nested


_FORMS = frozenset({"convert_element_type", "pcast", "pvary", "copy"})
"""What gives back the same numbers in another form."""


def _keeps(primitive: Any, *operands: Any, **params: Any) -> bool:
    """A policy for `jax.checkpoint`: not the backward pass's to keep are weights as they are used here.

    They are replicated over axes whose ranks hold a shard of each, and are gathered again. Of a frozen one `whole`
    stands there as a call, for it has no gradient.
    """
    inner = getattr(params.get("call_jaxpr"), "eqns", ())
    names = {one.primitive.name for one in inner} or {primitive.name}
    gathers = "all_gather" in names and jnp.issubdtype(operands[0].dtype, jnp.floating)
    return not gathers and not names <= _FORMS


def shared_experts(x: Float[Array, "B T d"], product: Callable[[jax.Array, str], jax.Array]) -> Float[Array, "B T d"]:
    """SwiGLU of the shared experts, for every token; `product` is of rows and a matrix by its name in `SHARED`."""
    gate, up, down = SHARED
    with jax.named_scope("shared_experts"):
        hidden = jax.nn.silu(product(x, gate)) * product(x, up)
        if ambient() is not None:
            hidden = constrain(hidden, "batch", "seq", "act_mlp")
        return product(hidden, down)


def of_rows(x: Float[Array, "B T d"], weight: Float[Array, "d f"]) -> Float[Array, "B T f"]:
    """Rows times a matrix: a plain matmul, left to XLA."""
    return dot_general(x, weight, (((2,), (0,)), ((), ())))


Init: TypeAlias = Callable[..., jax.Array]
"""(key, shape, dtype) -> array."""
EXPERTS = Weights._fields[1:]
SHARED = ("shared_gate", "shared_up", "shared_down")


def parameters(
    embed_dim: int, config: MoEConfig, down_init: Init | None
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], Init]]:
    """Logical names, shape and initializer of a layer's parameters, in the order in which they are drawn."""
    num_experts, width, shared = config.routing.num_experts, config.mlp_dim, (embed_dim, config.shared_dim)
    init = jax.nn.initializers.lecun_normal()
    down, inward, outward = down_init or init, (num_experts, embed_dim, width), (num_experts, width, embed_dim)
    found = {
        "router": (ROUTER_NAMES, (embed_dim, num_experts), init),
        "gate": (INWARD_NAMES, inward, _of_each_expert(init)),
        "up": (INWARD_NAMES, inward, _of_each_expert(init)),
        "down": (OUTWARD_NAMES, outward, _of_each_expert(down)),
    }
    if config.shared_experts:
        names = (INWARD_NAMES[1:], INWARD_NAMES[1:], OUTWARD_NAMES[1:])
        shapes = (shared, shared, shared[::-1])
        found |= dict(zip(SHARED, zip(names, shapes, (init, init, down), strict=True), strict=True))
    return found


def _of_each_expert(init: Init) -> Init:
    """An initializer of one expert's matrix, as one of all experts, `[E, ...]`: each is drawn by itself."""

    def make(key: jax.Array, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> jax.Array:
        return jax.vmap(lambda one: init(one, tuple(shape[1:]), dtype))(jax.random.split(key, shape[0]))

    return make


# ---- Which axes split what -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Split:
    """Of each dim of a weight, the axes that split it."""

    lies: Dims = ()
    """On the way in: as it lies, or as it is used."""
    used: Dims = ()
    """Where it is multiplied."""

    @property
    def gathered(self) -> Dims:
        """The axes to gather it over."""
        return tuple(axes[len(used) :] for axes, used in zip(self.lies, self.used, strict=True))


class _SplitAxes(NamedTuple):
    """Axes of more than one rank, by what they split. With none, one device has everything."""

    inner: tuple[str, ...] = ()
    """Axes that the layer's own region is manual over."""
    batch: tuple[str, ...] = ()
    """Axes that split tokens, those of a region around included."""
    outer: tuple[str, ...] = ()
    """Of these, the ones of a region around."""
    experts: tuple[str, ...] = ()
    inner_experts: tuple[str, ...] = ()
    """The same, unless a region around has cut the experts already."""
    is_one_level: bool = False
    """Experts lie over two axes, of which one has one rank: two levels are then one."""
    hidden: tuple[str, ...] = ()
    weights: tuple[Any, ...] = ()
    """A `_Split` of gate, up and down, and of the pairs beside them."""
    scattered: tuple[str, ...] = ()
    """Axes of `hidden` that split the sequence behind the layer."""
    tokens: PartitionSpec = PartitionSpec()
    out: PartitionSpec = PartitionSpec()

    @staticmethod
    def of(here: Ambient, x: jax.Array, weights: Weights, config: MoEConfig) -> _SplitAxes:
        sizes, outer, num_experts = axis_sizes(here.mesh), outer_axes(), config.routing.num_experts

        def several(entry: object) -> tuple[str, ...]:
            return tuple(axis for axis in spec_axes(entry) if sizes[axis] > 1)  # type: ignore[arg-type]

        tokens = [several(entry) for entry in _padded(spec_of(x, "batch", "seq", None), 3)]
        behind = [several(entry) for entry in _padded(spec_of(x, "batch", "norm_seq", None), 3)]
        like = jax.ShapeDtypeStruct((num_experts, 1, config.mlp_dim), x.dtype)
        of_experts, _, of_hidden = _padded(spec_of(like, "act_expert", None, "act_mlp"), 3)
        experts, hidden = several(of_experts), several(of_hidden)
        inner_experts = experts
        if weights.gate.shape[0] != num_experts:
            experts, inner_experts = _cut_outside(here, weights, num_experts), ()
        around = tuple(axis for axis in axes_over(here.mesh, here.rules, "batch", "seq") if axis in outer)
        batch = (*tokens[0], *tokens[1], *around)
        _check_experts(experts, batch)
        scattered = behind[1][len(tokens[1]) :] if set(behind[1][len(tokens[1]) :]) <= set(hidden) else ()
        seq = tokens[1] + scattered
        by_tokens = (*tokens[0], *tokens[1])

        def split(weight: Any, names: tuple[str | None, ...], used: Dims) -> Any:
            if isinstance(weight, Adapted):
                (_, inputs, outputs), (of_experts, of_inputs, of_outputs) = names, used
                return Adapted(
                    split(weight.weight, names, used),
                    split(weight.a, ("expert", inputs, None), (of_experts, of_inputs, ())),
                    split(weight.b, ("expert", None, outputs), (of_experts, (), of_outputs)),
                    weight.scale,
                )
            if outer:  # whose region has gathered them
                return _Split(used, used)
            like = jax.ShapeDtypeStruct((num_experts, *weight.shape[1:]), weight.dtype)
            lie = [several(entry) for entry in _padded(param_spec(like, *names), 3)]
            lies = tuple(_as_it_lies(of, dim, by_tokens, used) for of, dim in zip(lie, used, strict=True))
            return _Split(lies, used)

        inward = INWARD_NAMES, (inner_experts, (), hidden)
        outward = OUTWARD_NAMES, (inner_experts, hidden, ())

        return _SplitAxes(
            inner=tuple(dict.fromkeys((*tokens[0], *tokens[1], *inner_experts, *hidden))),
            batch=batch,
            outer=around,
            experts=experts,
            inner_experts=inner_experts,
            is_one_level=len(experts) == 1 and len(spec_axes(of_experts)) == 2,  # type: ignore[arg-type]
            hidden=hidden,
            weights=tuple(split(one, *of) for one, of in zip(weights[1:], (inward, inward, outward), strict=True)),
            scattered=scattered,
            tokens=PartitionSpec(tokens[0] or None, tokens[1] or None),
            out=PartitionSpec(tokens[0] or None, seq or None),
        )

    @property
    def travels(self) -> bool:
        """Whether tokens go to the ranks of their experts."""
        return bool(self.experts) and set(self.experts) <= set(self.batch)

    @property
    def counted(self) -> tuple[str, ...]:
        """Axes to sum counts over: stages sum over the devices of the batch themselves."""
        return tuple(axis for axis in self.batch if not (is_staged() and axis in self.outer))


def _padded(spec: PartitionSpec, ndim: int) -> list[object]:
    return [*spec, *[None] * (ndim - len(spec))]


def _as_it_lies(
    lies: tuple[str, ...], used: tuple[str, ...], by_tokens: tuple[str, ...], all_used: Dims
) -> tuple[str, ...]:
    """Axes that a dim of a weight may come in split over: what it is used with, and then axes that split tokens.

    Over these its gradient has to be summed anyway. Any other way to lie is XLA's to bring into the form that is used.
    """
    more, taken = lies[len(used) :], {axis for axes in all_used for axis in axes}
    return lies if lies[: len(used)] == used and set(more) <= set(by_tokens) - taken else used


def axes_over(mesh: AnyMesh, rules: Rules, *names: str, size: int | None = None) -> tuple[str, ...]:
    """Mesh axes above 1 over which rules split activations with dims of these names, each of a size or as they divide.

    Those of a region around are among them.
    """
    shape = (size or mesh.size,) * len(names)
    like = Leaf(path="×".join(names), shape=shape, dtype=np.dtype(np.int32), names=names)
    return axes_of_spec(resolve(like, rules, mesh).spec, axis_sizes(mesh))


def _axes_of_experts(here: Ambient, num_experts: int) -> tuple[str, ...]:
    return axes_over(here.mesh, here.rules, "act_expert", size=num_experts)


def _cut_outside(here: Ambient, weights: Weights, num_experts: int) -> tuple[str, ...]:
    """Axes of a region around over which the rank's own experts were cut."""
    axes, sizes = _axes_of_experts(here, num_experts), axis_sizes(here.mesh)
    own = weights.gate.shape[0]
    if own * math.prod(sizes[axis] for axis in axes) != num_experts or not set(axes) <= set(outer_axes()):
        exists = f"the rules in force split `act_expert` over {', '.join(f'`{a}`' for a in axes) or 'nothing'}"
        fix = "give all experts, or in a region that is manual over those axes the rank's own"
        raise problem(f"experts of shape {weights.gate.shape}", f"be {own} of {num_experts} experts", exists, fix)
    return axes


def _check_experts(experts: tuple[str, ...], batch: tuple[str, ...]) -> None:
    common = set(experts) & set(batch)
    if common and common != set(experts):
        missing = ", ".join(f"`{axis}`" for axis in experts if axis not in batch)
        exists = f"they are replicated over {missing}, so that its ranks would all send the same"
        fix = f"let the rule for `batch` name {missing} too, as the presets do for `expert`"
        raise problem("the MoE layer", f"send tokens over {' × '.join(f'`{axis}`' for axis in experts)}", exists, fix)


def check_config(where: str, config: object) -> None:
    """Raises `ValueError` for what is no `MoEConfig`."""
    if not isinstance(config, MoEConfig):
        fix = "write moe.MoEConfig(routing=moe.Routing(num_experts=8, top_k=2), mlp_dim=1024), say"
        raise problem(where, f"be a layer of {config!r}", "an MoE layer is described by a MoEConfig", fix)


def check_layer(where: str, embed_dim: object, config: object, param_dtype: Any) -> None:
    """Raises `ValueError` for what no MoE layer can be made of."""
    check_whole(where, "embed_dim", embed_dim)
    check_config(where, config)
    try:
        is_floating = param_dtype is not None and jnp.issubdtype(jnp.dtype(param_dtype), jnp.floating)
    except TypeError:
        is_floating = False
    if not is_floating:
        exists, fix = "it is the name of a floating dtype", 'use "float32" or "bfloat16", say'
        raise problem(f"{where}(param_dtype={param_dtype!r})", "make parameters in it", exists, fix)


def _check_given(x: jax.Array, weights: Weights, config: MoEConfig) -> None:
    """Whether these are tokens, weights and a config at all."""
    where = "moe_layer"
    check_config(where, config)
    check_array(where, "x", x, "B T d")
    if not x.size:
        asked, exists = f"send tokens x of shape {x.shape} to experts", "there is none"
        raise problem(where, asked, exists, "give one token at the least")
    if not isinstance(weights, Weights):
        asked, exists = f"take a {type(weights).__name__} for the weights", "they are named"
        raise problem(where, asked, exists, "give moe.Weights(router=..., gate=..., up=..., down=...)")
    for name, dims in (("router", "d E"), ("gate", "..."), ("up", "..."), ("down", "...")):
        check_array(where, name, getattr(weights, name), dims)


def _check_sizes(x: jax.Array, weights: Weights, config: MoEConfig, bias: jax.Array | None, *, is_alone: bool) -> None:
    num_experts, width, hidden = config.routing.num_experts, x.shape[-1], config.mlp_dim
    own = weights.gate.shape[0] if weights.gate.ndim == 3 and num_experts % max(weights.gate.shape[0], 1) == 0 else 0
    own = 0 if is_alone and own != num_experts else own  # no other rank has the rest
    expected = {"gate": (own, width, hidden), "up": (own, width, hidden), "down": (own, hidden, width)}
    for name, shape in expected.items():
        if not own or getattr(weights, name).shape != shape:
            where = f"experts' `{name}` of shape {getattr(weights, name).shape}"
            asked = f"be that of {num_experts} experts of width {width} and hidden width {hidden}"
            raise problem(where, asked, f"it would be {(num_experts, *shape[1:])}", "make the weights for this config")
    if weights.router.shape not in ((width, num_experts), (width, own)):
        asked, exists = f"score {num_experts} experts", f"it would be {(width, num_experts)}"
        raise problem(f"a router of shape {weights.router.shape}", asked, exists, "make the weights for this config")
    if config.is_biased and bias is None:
        where, asked = f"an MoE layer with bias_rate={config.bias_rate}", "choose without its balancing bias"
        raise problem(where, asked, "that would be another choice than in training", "give `bias`, or use bias_rate=0")


# ---- Per device ------------------------------------------------------------------------------------------------------


def _per_device(
    x: jax.Array, weights: Weights, bias: jax.Array | None, *, config: MoEConfig, cut: _SplitAxes, drops: bool
) -> tuple[jax.Array, RouterStats]:
    routing, flat = config.routing, x.reshape(-1, x.shape[-1])
    router = weights.router
    if router.shape[1] != routing.num_experts:  # a slice of its columns, as experts are cut
        router = lax.all_gather(router, cut.experts, axis=1, tiled=True)
    # Logits decide and are compared, so they are as exact as float32 makes them; so is the router's gradient.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    with jax.named_scope("router"):
        logits = jnp.matmul(flat.astype(wide), router.astype(wide), precision=lax.Precision.HIGHEST)
        routed = route(logits, routing, bias=bias)
    rows, (gate, up, down) = _one_dtype(flat, weights, cut)
    if not drops:
        config = dataclasses.replace(config, bound_factor=None, chunks=math.gcd(config.chunks, len(flat)))
    limited = routing.choice == "expert" or (drops and routing.capacity_factor is not None)
    # Only what travels is cut into chunks, each with room of its own.
    room = capacity(len(flat) // (config.chunks if cut.travels else 1), routing) if limited else None
    if cut.travels:
        y, counted = _travelling(rows, routed, (gate, up, down), config, cut, room)
    else:
        y, counted = _staying(rows, routed, (gate, up, down), config, cut, room)
    partial = (*(() if cut.travels else cut.experts), *(axis for axis in cut.hidden if axis not in cut.scattered))
    y = y.reshape(*x.shape[:2], -1)
    with jax.named_scope("combine"):
        y = total(y, partial)
        for axis in cut.scattered:
            y = scattered(y, axis, 1)
    return y, _router_stats(logits, routed, counted.dropped, config, cut)


def _one_dtype(x: jax.Array, weights: Weights, cut: _SplitAxes) -> tuple[jax.Array, Experts]:
    """Rows and whole experts; these vary as shards in float32 at the least, so that their gradients are summed so."""
    experts = weights[1:]
    dtype = jnp.result_type(x, *(weight.dtype for weight in experts))
    wide = jnp.promote_types(dtype, jnp.float32)

    def used(weight: jax.Array | Ahead, split: _Split | None = None) -> jax.Array:
        dims = () if split is None else split.gathered
        shard = weight.shard if isinstance(weight, Ahead) else weight
        shard = varying_alike((), x, shard.astype(wide))[1]
        return ahead(dims, dtype, shard, weight.whole) if isinstance(weight, Ahead) else whole(dims, dtype, shard)

    gate, up, down = _each(used, experts, *([cut.weights] if cut.weights else []))
    return x.astype(dtype), (gate, up, down)


def _swiglu(experts: Experts, typical_rows: int | None) -> ExpertFn:
    gate, up, down = experts

    def expert_fn(rows: jax.Array, sizes: Any) -> jax.Array:
        # The same rows go through every rank's part of the hidden width.
        rows = alike(_varies_beside(gate, rows), rows)
        return grouped_swiglu(rows, gate, up, down, sizes, typical_rows=typical_rows)

    return expert_fn


def _varies_beside(weight: jax.Array | Adapted, rows: jax.Array) -> tuple[str, ...]:
    return varies_beside(weight.weight if isinstance(weight, Adapted) else weight, rows)


def _travelling(
    rows: jax.Array, routed: Routed, experts: Experts, config: MoEConfig, cut: _SplitAxes, room: int | None
) -> tuple[jax.Array, Dispatched]:
    """Rows to the ranks of their experts, and back."""
    typical = len(rows) // config.chunks * routed.experts.shape[1] if room is None else None
    # Where the experts' width is split the same rows go to every part of it. Their gradients travel as they are, and
    # are summed over the parts here, where they are the tokens' and not as many as there is room for.
    rows = alike(_varies_beside(experts[0], rows), rows)
    how, nodes = config.implementation, None
    if how in TWO_LEVELS and len(cut.experts) == 1:
        how = "auto"
        if not cut.is_one_level:
            _tell_one_level(config.implementation, cut.experts[0])
    elif how == NODE_FIRST:
        nodes = config.routing.nodes_visited(lax.axis_size(cut.experts[0]))
    return dispatch(
        rows,
        routed.experts,
        routed.weights,
        _swiglu(experts, typical),
        axis=cut.experts,
        num_experts=config.routing.num_experts,
        capacity=room,
        implementation=how,
        bound_factor=config.bound_factor,
        payload=config.payload,
        chunks=config.chunks,
        nodes_per_token=nodes,
    )


def _tell_one_level(implementation: str, axis: str) -> None:
    told = problem(
        "the MoE layer",
        f"send tokens {implementation!r}, in two levels",
        f"experts are split over `{axis}` alone, so that rows travel as by 'auto', in one",
        'split them over two axes, across the nodes and inside them: mp.expert_parallel(axis=("data", "expert"))',
    )
    warnings.warn(str(told), stacklevel=2)


def _staying(
    rows: jax.Array, routed: Routed, experts: Experts, config: MoEConfig, cut: _SplitAxes, room: int | None
) -> tuple[jax.Array, Dispatched]:
    """Rows through the experts that are here; those of other ranks are theirs to compute."""
    own = experts[0].shape[0]
    first = lax.axis_index(cut.experts) * own if cut.experts else 0
    mine = routed.experts - first
    mine = jnp.where((mine >= 0) & (mine < own), mine, own).astype(jnp.int32)
    rows, mine, weights = varying_alike((), alike(varies_beside(mine, rows), rows), mine, routed.weights)
    chosen = count(mine, own)
    if room is None:
        order, dropped = by_expert(mine, own), jnp.zeros_like(chosen[0])
        sizes: Any = chosen
        typical = max(mine.size * own // config.routing.num_experts, 1)
    else:
        order, sizes, typical = in_buffers(mine, own, room), np.full(own, room, np.int32), None
        dropped = jnp.sum(jnp.maximum(chosen - room, 0), dtype=jnp.int32)
    with jax.named_scope("experts"):
        made = _swiglu(experts, typical)(spread(rows, order), sizes)
    return weighted_sum(made, weights, order), Dispatched(chosen, chosen, dropped)


def _router_stats(
    logits: jax.Array, routed: Routed, dropped: jax.Array, config: MoEConfig, cut: _SplitAxes
) -> RouterStats:
    """Losses and means are those of all tokens, wherever they are; so are counts, but where stages sum them."""
    axis, scores = cut.batch or None, routed.scores
    loss = jnp.zeros((), logits.dtype)
    if config.auxiliary_weight:
        loss += auxiliary_loss(scores, routed.experts, alpha=config.auxiliary_weight, axis=axis)
    if config.z_weight:
        loss += z_loss(logits, weight=config.z_weight, axis=axis)
    scores = lax.stop_gradient(scores)
    mean = entropy(scores).mean()
    load = count(routed.experts, config.routing.num_experts)
    if cut.experts and not cut.travels:
        dropped = lax.psum(dropped, cut.experts)
    if cut.counted:
        load, dropped = lax.psum((load, dropped), cut.counted)
    return RouterStats(loss, load, dropped, mean if axis is None else lax.pmean(mean, axis))
