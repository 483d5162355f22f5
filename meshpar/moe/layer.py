"""The routed part of an MoE layer, as a function of global arrays.

    x [B, T, d] ─► router ─► dispatch over the expert axes ─► SwiGLU, sharded over `act_mlp` ─► combine ─► y
                     └─► RouterStats: auxiliary losses, tokens per expert

It works without Flax; `meshpar.moe.nnx.MoE` is the module. The current rules say which mesh axes shard tokens (`batch`
and `seq`), experts (`act_expert`) and the hidden dim of an expert (`act_mlp`).

    B, T  batch, sequence    d  token size    f  hidden size    E  experts
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
from jaxtyping import Array, Bool, Float

from meshpar.collectives.wire import varying_alike
from meshpar.layers.auxiliary import report
from meshpar.layers.batch_slices import is_sliced, note_statistics
from meshpar.layers.scan import Aux, LoraWeight, PrefetchedWeight, is_outside_loop, is_staged
from meshpar.moe import expert_reduction as reduction
from meshpar.moe.argument_checks import check_array, check_mask
from meshpar.moe.assignment_order import by_expert, expand, in_buffers, weighted_sum
from meshpar.moe.dispatch_combine import dispatch
from meshpar.moe.dispatch_paths import Dispatched
from meshpar.moe.grouped import grouped_swiglu
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.router_stats import RouterStats, RouterSums, StatsOf
from meshpar.moe.routing import Routed, capacity, count, route
from meshpar.moe.transport_choice import NODE_FIRST, TWO_LEVELS
from meshpar.sharding.context import Ambient, ambient, param_spec, spec_of
from meshpar.sharding.errors import check_cases
from meshpar.sharding.manual_regions import outer_axes, per_device
from meshpar.sharding.rules import Rules, resolve
from meshpar.sharding.types import AnyMesh, Leaf, axes_of_spec, axis_sizes, spec_axes

Experts: TypeAlias = Sequence[Any]
"""Gate, up and down of the local experts, arrays or `LoraWeight`, and their biases if the config has them."""


class Weights(NamedTuple):
    """Weights of the router and of all experts, stacked."""

    router: Float[Array, "d E"]
    gate: Float[Array, "E d f"]
    up: Float[Array, "E d f"]
    down: Float[Array, "E f d"]
    gate_bias: Float[Array, "E f"] | None = None
    up_bias: Float[Array, "E f"] | None = None
    down_bias: Float[Array, "E d"] | None = None
    router_bias: Float[Array, " E"] | None = None
    """All biases are None unless `MoEConfig.has_biases`."""

    @property
    def experts(self) -> tuple[Any, ...]:
        """Return the weights of the experts."""
        return self[1:4] if self.gate_bias is None else self[1:7]


def report_layers(aux: Aux | RouterStats, config: MoEConfig) -> None:
    """Report the auxiliary losses and the metrics of all MoE layers to the training step.

        moe/load            [layers, E]  assignments of each expert
        moe/rank_load       [layers, N]  assignments of each rank's experts
        moe/drop_rate       [layers]     fraction of assignments dropped over capacity
        moe/router_entropy  [layers]     in nats
        moe/aux_loss        []           added to the training loss, summed over layers

    Tokens that `mask` excludes do not count.

    Loads are counted over the global micro-batch, and the step averages all metrics over micro-steps: with
    accumulate=n, `moe/load` is 1/n of the number of assignments in the step. With pipeline stages, loads are summed
    over microbatches instead. `meshpar.moe.load_metrics.loads` reads the metrics on the host.

    Args:
      aux: statistics of all layers, with summed losses and stacked metrics, as returned by `scan_layers`; or the
        `RouterStats` of the only layer.
      config: configuration of a layer.

    Raises:
      ValueError: `aux` has no router statistics for this config.
    """
    check_config("report_layers", config)
    num_experts = config.routing.num_experts
    stats = aux.aux if isinstance(aux, RouterStats) else aux
    load = stats.metrics.get("load", np.zeros(0)) if isinstance(stats, Aux) else np.zeros(0)
    case = (
        load.ndim not in (1, 2) or load.shape[-1] != num_experts or stats.loss.ndim,
        f"loads are [layers, {num_experts}] or [{num_experts}], and the loss is a scalar",
        "pass the RouterStats of one layer, or stack the metrics of `stats.aux` over layers and sum the losses",
    )
    check_cases("report_layers", f"report a {type(aux).__name__} with loads {load.shape}", "wrong-shape", case)
    if load.ndim == 1:
        stats = Aux(stats.loss, {name: x[None] for name, x in stats.metrics.items()})
    load, context = stats.metrics["load"], ambient()
    dtype, num_ranks = jnp.promote_types(stats.loss.dtype, jnp.float32), 1
    if context is not None:
        axes = axes_over(context.mesh, context.rules, "act_expert", size=num_experts)
        num_ranks = math.prod(axis_sizes(context.mesh)[axis] for axis in axes)
    metrics = {
        "moe/load": load.astype(dtype),
        "moe/rank_load": load.reshape(len(load), num_ranks, -1).sum(-1).astype(dtype),
        "moe/drop_rate": stats.metrics["dropped"] / jnp.maximum(load.sum(-1), 1).astype(dtype),
        "moe/router_entropy": stats.metrics["router_entropy"],
        "moe/aux_loss": stats.loss,
    }
    report(loss=stats.loss if config.auxiliary_weight or config.z_weight else None, metrics=metrics)


def moe_layer(
    x: Float[Array, "B T d"],
    weights: Weights,
    config: MoEConfig,
    *,
    bias: Float[Array, " E"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    drops: bool = True,
) -> tuple[Float[Array, "B T d"], RouterStats]:
    """Route each token to its top-k experts and return the gate-weighted sum of their outputs.

    Without rules, or on a single device, the full layer is computed locally. With rules, it is a `shard_map` over the
    axes that shard tokens, experts and hidden dim:

    - If tokens are sharded over the expert axes, they are sent to their experts and back with two all-to-alls
      (`dispatch`).
    - If tokens are replicated over the expert axes, each rank computes its local experts and the results are
      all-reduced.
    - If the hidden dim is sharded over `tensor`, the partial sums are reduced after the combine, on T tokens.
    - If weights are sharded over token axes, as with `fsdp()`, shards are all-gathered in the forward pass and again in
      the backward pass, and their gradients are reduce-scattered in float32. Over token axes that do not shard the
      weights, gradients are all-reduced; dispatch has already summed them over the expert axes.

    Inside a `shard_map` over batch axes (`reduce_gradients="once"`, `quantize=...`, stages), `weights`
    has either all experts, which are then computed locally, or the rank's shard, and tokens are dispatched.

    Args:
      x: tokens.
      weights: global arrays, or local arrays inside such a `shard_map`.
      config: configuration of the layer.
      bias: balancing bias, added to the scores for the assignment only.
      mask: False for padding. Padding has no expert and no slot in buffers, y is 0 there, and it does not count in the
        router statistics. The capacity of an expert follows from all positions. None: all tokens count.
      drops: False to ignore the capacity of the routing and the bound of the config, as in decoding one token at a
        time. Then `chunks` need not divide the number of tokens.

    Returns:
      y with the sharding of `norm_seq` (partial sums are reduce-scattered if it shards the sequence further), and the
      router statistics.

    Raises:
      ValueError: x is not a floating-point array [B, T, d] with at least one token; the weights or the mask do not
        match x and the config; tokens are sharded over some of the expert axes only.

    Example:
      with mp.use_rules(mesh, mp.fsdp() | mp.expert_parallel()):
          y, stats = moe_layer(x, weights, config)
    """
    context = ambient()
    is_single = context is None or context.mesh.size == 1
    _check_arguments(x, weights, config, bias, is_single=is_single)
    check_mask("moe_layer", mask, *x.shape[:2])
    has_capacity = config.routing.capacity_factor is not None or config.routing.choice == "expert"
    case = (
        drops and is_sliced() and has_capacity,
        "the number of tokens that an expert accepts depends on the slices",
        "use batch_slices=1, or dropless experts: capacity_factor=None and choice='token'",
    )
    check_cases("moe_layer", "run on slices of the batch (train_step(batch_slices=...))", "unsupported-feature", case)
    axes = _LayerAxes() if context is None or is_single else _LayerAxes.of(context, x, weights, config)
    kernel = functools.partial(_per_device, config=config, axes=axes, drops=drops)
    with jax.named_scope("moe"):
        if not axes.manual:
            return _with_stats(config, *kernel(x, weights, bias, mask))
        replicated = PartitionSpec()
        expert_specs = _map_weights(_weight_spec, weights.experts, axes.weights)
        weight_specs = Weights(replicated, *expert_specs)._replace(router_bias=replicated)  # type: ignore[arg-type]
        in_specs = (axes.token_spec, weight_specs, replicated, axes.token_spec)
        out_specs = (axes.output_spec, replicated)
        saving = jax.checkpoint(kernel, policy=_is_saved, prevent_cse=is_outside_loop())
        run = _nested if outer_axes() else per_device
        return _with_stats(config, *run(saving, in_specs, out_specs)(x, weights, bias, mask))


def _with_stats(config: MoEConfig, y: jax.Array, sums: RouterSums) -> tuple[jax.Array, RouterStats]:
    if config.auxiliary_weight or config.z_weight:
        note_statistics()
    return y, StatsOf(config).stats(sums)


def _weight_spec(weight: Any, axes: _WeightAxes) -> Any:
    stored, used = (PartitionSpec(*(dim or None for dim in dims)) for dims in (axes.stored, axes.used))
    return PrefetchedWeight(stored, used) if isinstance(weight, PrefetchedWeight) else stored  # type: ignore[arg-type]


def _map_weights(function: Callable[..., Any], experts: Sequence[Any], *trees: Sequence[Any]) -> list[Any]:
    """Apply a function to the weights of the experts and to their low-rank pairs."""
    return jax.tree.map(function, list(experts), *map(list, trees), is_leaf=lambda x: isinstance(x, PrefetchedWeight))


def _nested(kernel: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return the kernel as a `shard_map` inside another `shard_map`.

    It runs without `check_vma`, because the inner region does not know the varying axes of the outer region. JAX
    then sums the gradients of replicated inputs in the dtype of the input. The router is therefore passed in float32,
    and on CPUs, where XLA aborts on sums of bfloat16, the tokens too.
    """
    context = ambient()
    assert context is not None
    # The mesh of a compile-only cluster has no devices.
    on_cpu = isinstance(context.mesh, jax.sharding.Mesh) and context.mesh.devices.flat[0].platform == "cpu"

    def nested(x: jax.Array, weights: Weights, *others: jax.Array | None) -> Any:
        def widened(array: jax.Array) -> jax.Array:
            return array.astype(jnp.promote_types(array.dtype, jnp.float32))

        def local(tokens: jax.Array, weights: Weights, *others: jax.Array | None) -> Any:
            return kernel(tokens.astype(x.dtype), weights, *others)

        run = per_device(local, in_specs, out_specs, check_vma=False)
        weights = weights._replace(router=widened(weights.router))
        if weights.router_bias is not None:
            weights = weights._replace(router_bias=widened(weights.router_bias))
        for name, weight in weights._asdict().items():
            if isinstance(weight, LoraWeight):
                a, b = jax.tree.map(widened, (weight.a, weight.b))
                weights = weights._replace(**{name: dataclasses.replace(weight, a=a, b=b)})  # type: ignore[arg-type]
        return run(widened(x) if on_cpu else x, weights, *others)

    return nested


def _is_saved(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Policy for `jax.checkpoint`: save everything except gathered weights, which are gathered again.

    JAX calls the policy with the all-gather, or with the call of `gather_weight` if the weight is frozen.
    """
    inner = getattr(params.get("call_jaxpr"), "eqns", ())
    names = {equation.primitive.name for equation in inner} or {primitive.name}
    gathers = "all_gather" in names and jnp.issubdtype(operands[0].dtype, jnp.floating)
    return not gathers and not names <= {"convert_element_type", "pcast", "pvary", "copy"}  # casts


# ---- Mesh axes -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _WeightAxes:
    """Mesh axes that shard each dim of a weight, before and after it is gathered for the matmul."""

    stored: reduction.Dims
    """Axes that shard the weight as an input of the `shard_map`."""
    used: reduction.Dims
    """Axes that still shard the weight in the matmul."""


class _LayerAxes(NamedTuple):
    """Mesh axes with at least two ranks, grouped by use. All groups are empty on a single device."""

    manual: tuple[str, ...] = ()
    """Axes of the layer's own `shard_map`."""
    batch: tuple[str, ...] = ()
    """Axes that shard tokens, including axes of an enclosing `shard_map`."""
    outer: tuple[str, ...] = ()
    """The axes in `batch` that belong to an enclosing `shard_map`."""
    experts: tuple[str, ...] = ()
    has_one_level: bool = False
    """True if the rules shard experts over two axes, of which only `experts[0]` is larger than 1."""
    hidden: tuple[str, ...] = ()
    weights: tuple[Any, ...] = ()
    """`_WeightAxes` of the weights of the experts, and of their low-rank pairs."""
    scattered: tuple[str, ...] = ()
    """Axes in `hidden` that shard the sequence of the output."""
    token_spec: PartitionSpec = PartitionSpec()
    output_spec: PartitionSpec = PartitionSpec()

    @staticmethod
    def of(context: Ambient, x: jax.Array, weights: Weights, config: MoEConfig) -> _LayerAxes:
        """Derive the axes from the current rules and the shapes of the arguments."""
        sizes, outer, num_experts = axis_sizes(context.mesh), outer_axes(), config.routing.num_experts

        def dims_of(spec: PartitionSpec) -> list[tuple[str, ...]]:
            dims = [tuple(axis for axis in spec_axes(entry) if sizes[axis] > 1) for entry in spec]  # type: ignore[arg-type]
            return dims + [()] * (3 - len(dims))

        batch, seq, _ = dims_of(spec_of(x, "batch", "seq", None))
        token_axes = (*batch, *seq)
        outer_batch = tuple(axis for axis in axes_over(context.mesh, context.rules, "batch", "seq") if axis in outer)
        hidden_like = jax.ShapeDtypeStruct((num_experts, 1, config.mlp_dim), x.dtype)
        hidden_spec = spec_of(hidden_like, "act_expert", None, "act_mlp")
        experts, _, hidden = dims_of(hidden_spec)
        manual_experts, num_local = experts, weights.gate.shape[0]
        if num_local != num_experts:  # the experts are sharded over the axes of the enclosing `shard_map`
            manual_experts, experts = (), axes_over(context.mesh, context.rules, "act_expert", size=num_experts)
        _check_expert_axes(context, experts, {*token_axes, *outer_batch}, num_local, num_experts)
        more_seq = dims_of(spec_of(x, "batch", "norm_seq", None))[1][len(seq) :]
        scattered = more_seq if set(more_seq) <= set(hidden) else ()

        def weight_axes(weight: Any, names: tuple[str | None, ...], used: reduction.Dims) -> Any:
            if isinstance(weight, LoraWeight):
                (_, inputs, outputs), (expert_axes, input_axes, output_axes) = names, used
                return LoraWeight(
                    weight_axes(weight.weight, names, used),
                    weight_axes(weight.a, ("expert", inputs, None), (expert_axes, input_axes, ())),
                    weight_axes(weight.b, ("expert", None, outputs), (expert_axes, (), output_axes)),
                    weight.scale,
                )
            if outer:  # the enclosing shard_map has gathered the weights
                return _WeightAxes(used, used)
            like = jax.ShapeDtypeStruct((num_experts, *weight.shape[1:]), weight.dtype)
            in_matmul = {axis for axes in used for axis in axes}
            dims = []
            # A dim keeps additional axes if they shard tokens: the gradient has to be summed over these anyway. XLA
            # reshards dims with other layouts.
            for stored, used_axes in zip(dims_of(param_spec(like, *names)), used, strict=False):  # a bias has two dims
                is_prefix, more = stored[: len(used_axes)] == used_axes, stored[len(used_axes) :]
                dims.append(stored if is_prefix and set(more) <= set(token_axes) - in_matmul else used_axes)
            return _WeightAxes(tuple(dims), used)

        inward, outward = (manual_experts, (), hidden), (manual_experts, hidden, ())
        return _LayerAxes(
            manual=tuple(dict.fromkeys((*token_axes, *manual_experts, *hidden))),
            batch=(*token_axes, *outer_batch),
            outer=outer_batch,
            experts=experts,
            has_one_level=len(experts) == 1 and len(spec_axes((*hidden_spec, None)[0])) == 2,  # type: ignore[arg-type]
            hidden=hidden,
            weights=(
                weight_axes(weights.gate, ("expert", "embed", "mlp"), inward),
                weight_axes(weights.up, ("expert", "embed", "mlp"), inward),
                weight_axes(weights.down, ("expert", "mlp", "embed"), outward),
                *(
                    weight_axes(bias, ("expert", name), (manual_experts, used))
                    for name, used, bias in zip(
                        ("mlp", "mlp", None), (hidden, hidden, ()), weights.experts[3:], strict=False
                    )
                ),
            ),
            scattered=scattered,
            token_spec=PartitionSpec(batch or None, seq or None),
            output_spec=PartitionSpec(batch or None, seq + scattered or None),
        )

    @property
    def dispatches(self) -> bool:
        """Return whether tokens are sent to the ranks of their experts."""
        return bool(self.experts) and set(self.experts) <= set(self.batch)

    @property
    def count_axes(self) -> tuple[str, ...]:
        """Return the axes to sum counts over. Pipeline stages sum counts over the axes in `outer` later."""
        return tuple(axis for axis in self.batch if not (is_staged() and axis in self.outer))


def axes_over(mesh: AnyMesh, rules: Rules, *names: str, size: int | None = None) -> tuple[str, ...]:
    """Return the mesh axes (size at least 2) that shard activations with these dim names.

    Axes of an enclosing `shard_map` are included. `size` is the size of the dims; by default all axes divide it.
    """
    shape = (size or mesh.size,) * len(names)
    like = Leaf(path="×".join(names), shape=shape, dtype=np.dtype(np.int32), names=names)
    return axes_of_spec(resolve(like, rules, mesh).spec, axis_sizes(mesh))


def _check_expert_axes(
    context: Ambient, experts: tuple[str, ...], batch: set[str], num_local: int, num_experts: int
) -> None:
    num_shards = math.prod(axis_sizes(context.mesh)[axis] for axis in experts)
    is_shard = num_local * num_shards == num_experts and set(experts) <= set(outer_axes())
    reason, fix = f"the current rules shard `act_expert` over {experts}", "pass all experts, or the rank's shard"
    case = num_local != num_experts and not is_shard, reason, fix
    check_cases("moe_layer", f"use {num_local} of {num_experts} experts", "wrong-shape", case)
    missing = sorted(set(experts) - batch)
    reason = f"tokens are replicated over {missing}, so all ranks along this axis would send the same tokens"
    case = 0 < len(missing) < len(experts), reason, f"add {missing} to the rule for `batch`, as the presets do"
    check_cases("moe_layer", f"dispatch tokens over {experts}", "conflict", case)


def check_config(where: str, config: object) -> None:
    """Check that an argument is a `MoEConfig`."""
    fix = "pass moe.MoEConfig(routing=moe.Routing(num_experts=8, top_k=2), mlp_dim=1024)"
    case = not isinstance(config, MoEConfig), "it must be a MoEConfig", fix
    check_cases(where, f"set config={config!r}", "wrong-type", case)


def _check_arguments(x: Any, weights: Any, config: Any, bias: jax.Array | None, *, is_single: bool) -> None:
    where = "moe_layer"
    check_config(where, config)
    check_array(where, "x", x, "B T d")
    case = not x.size, "x has no tokens", "pass a larger batch"
    check_cases(where, f"use x of shape {x.shape}", "wrong-shape", case)
    fix = "pass moe.Weights(router=..., gate=..., up=..., down=...)"
    case = not isinstance(weights, Weights), "the weights must be a moe.Weights", fix
    check_cases(where, f"use weights of type {type(weights).__name__}", "wrong-type", case)
    for name, dims in (("router", "d E"), ("gate", "..."), ("up", "..."), ("down", "...")):
        check_array(where, name, getattr(weights, name), dims)
    num_experts, d, f = config.routing.num_experts, x.shape[-1], config.mlp_dim
    num_local = weights.gate.shape[0] if weights.gate.ndim == 3 else 0
    if not num_local or num_experts % num_local or (is_single and num_local != num_experts):
        num_local = num_experts  # not a valid shard
    inward, routers = {(num_local, d, f)}, {(d, num_experts), (d, num_local)}
    expected: dict[str, set[Any]] = {"gate": inward, "up": inward, "down": {(num_local, f, d)}, "router": routers}
    # A bias has the dims of its matrix without the dim that the matmul contracts.
    biases = {f"{name}_bias": {(*shape[:-2], shape[-1]) for shape in shapes} for name, shapes in expected.items()}
    expected |= biases if config.has_biases else {name: {None} for name in biases}
    for name, shapes in expected.items():
        shape = getattr(getattr(weights, name), "shape", None)
        reason = f"{num_experts} experts with token size {d} and hidden size {f} need {shapes}"
        case = shape not in shapes, reason, "create the weights for this config"
        check_cases(where, f"use `{name}` of shape {shape}", "wrong-shape", case)
    reason = f"the layer is trained with a balancing bias (bias_rate={config.bias_rate})"
    case = config.is_biased and bias is None, reason, "pass `bias`, or use bias_rate=0"
    check_cases(where, "route tokens without `bias`", "conflict", case)


# ---- Per device ------------------------------------------------------------------------------------------------------


def _per_device(
    x: jax.Array, weights: Weights, bias: jax.Array | None, mask: jax.Array | None, *, config: MoEConfig,
    axes: _LayerAxes, drops: bool,
) -> tuple[jax.Array, RouterSums]:  # fmt: skip
    """[B, T, d] of this device, shards of the weights -> y of this device, sums over all tokens.

    The plain reference is `meshpar.moe.reference.moe`.
    """
    routing, tokens = config.routing, x.reshape(-1, x.shape[-1])
    mask = None if mask is None else mask.reshape(-1)
    router, router_bias = weights.router, weights.router_bias
    if router.shape[1] != routing.num_experts:  # sharded like the experts
        router = lax.all_gather(router, axes.experts, axis=1, tiled=True)
        if router_bias is not None:
            router_bias = lax.all_gather(router_bias, axes.experts, axis=0, tiled=True)
    # In float32: rounding would change the assignment, and the sum of the router's gradients.
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    with jax.named_scope("router"):
        logits = jnp.matmul(tokens.astype(dtype), router.astype(dtype), precision=lax.Precision.HIGHEST)
        logits = logits if router_bias is None else logits + router_bias.astype(dtype)
        routed = route(logits, routing, bias=bias, mask=mask)
    if config.gates_inputs:
        tokens = tokens * routed.weights.astype(tokens.dtype)
        routed = routed._replace(weights=jnp.ones_like(routed.weights))
    tokens, experts = _gather_weights(tokens, weights, axes)
    if not drops:
        config = dataclasses.replace(config, bound_factor=None, chunks=math.gcd(config.chunks, len(tokens)))
    slots = None
    if routing.choice == "expert" or (drops and routing.capacity_factor is not None):
        # Only dispatched tokens are divided into chunks, each with its own capacity.
        slots = capacity(len(tokens) // (config.chunks if axes.dispatches else 1), routing)
    compute = _dispatch if axes.dispatches else _compute_local
    y, dispatched = compute(tokens, routed, experts, config, axes, slots)
    partial = *(() if axes.dispatches else axes.experts), *(a for a in axes.hidden if a not in axes.scattered)
    with jax.named_scope("combine"):
        y = reduction.all_reduce(y.reshape(*x.shape[:2], -1), partial)
        for axis in axes.scattered:
            y = reduction.reduce_scatter(y, axis, 1)
    dropped = dispatched.dropped
    if axes.experts and not axes.dispatches:
        dropped = lax.psum(dropped, axes.experts)
    return y, RouterSums.of(logits, routed, dropped, config, mask, axes=axes.batch, count_axes=axes.count_axes)


def _gather_weights(x: jax.Array, weights: Weights, axes: _LayerAxes) -> tuple[jax.Array, Experts]:
    """Return tokens and the local experts' weights in a common dtype. Gradients of the shards are summed in float32."""
    dtype = jnp.result_type(x, *(weight.dtype for weight in weights.experts))
    grad_dtype = jnp.promote_types(dtype, jnp.float32)
    if weights.down_bias is not None and axes.hidden:  # the outputs of all shards of the hidden dim are summed
        is_first = lax.axis_index(axes.hidden) == 0
        weights = weights._replace(down_bias=jnp.where(is_first, weights.down_bias.astype(grad_dtype), 0))

    def gathered(weight: jax.Array | PrefetchedWeight, weight_axes: _WeightAxes | None = None) -> jax.Array:
        dims: reduction.Dims = ()
        if weight_axes is not None:
            pairs = zip(weight_axes.stored, weight_axes.used, strict=True)
            dims = tuple(stored[len(used) :] for stored, used in pairs)
        shard = weight.shard if isinstance(weight, PrefetchedWeight) else weight
        shard = varying_alike((), x, shard.astype(grad_dtype))[1]
        if isinstance(weight, PrefetchedWeight):
            return reduction.use_gathered(dims, dtype, shard, weight.gathered)
        return reduction.gather_weight(dims, dtype, shard)

    return x.astype(dtype), _map_weights(gathered, weights.experts, *([axes.weights] if axes.weights else []))


def _swiglu(rows: jax.Array, sizes: Any, *, experts: Experts, config: MoEConfig, typical_rows: int | None) -> jax.Array:
    (gate, up, down), biases = experts[:3], tuple(experts[3:]) or None
    options: dict[str, Any] = {"activation": config.activation, "implementation": config.grouped_matmul}
    return grouped_swiglu(
        _for_hidden_shards(rows, experts), gate, up, down, sizes, biases=biases, typical_rows=typical_rows, **options  # type: ignore[arg-type]
    )  # fmt: skip


def _for_hidden_shards(rows: jax.Array, experts: Experts) -> jax.Array:
    """Mark rows that all shards of the hidden dim use, so that their gradient is summed over the shards."""
    gate = experts[0]
    gate = gate.weight if isinstance(gate, LoraWeight) else gate
    return reduction.sum_gradient(reduction.extra_varying_axes(gate, rows), rows)


def _dispatch(
    tokens: jax.Array, routed: Routed, experts: Experts, config: MoEConfig, axes: _LayerAxes, slots: int | None
) -> tuple[jax.Array, Dispatched]:
    typical_rows = len(tokens) // config.chunks * routed.experts.shape[1] if slots is None else None
    # All shards of the hidden dim receive the same tokens. Their gradients are sent back unreduced and summed
    # here, on T tokens, and not on the larger receive buffers.
    tokens = _for_hidden_shards(tokens, experts)
    implementation, nodes_per_token = config.implementation, None
    if implementation in TWO_LEVELS and len(axes.experts) == 1:
        implementation = "auto"
        if not axes.has_one_level:
            warnings.warn(
                f"moe_layer: implementation={config.implementation!r} has two levels, but experts are sharded over one "
                f"axis, `{axes.experts[0]}`, so 'auto' is used. Shard experts across nodes and inside a node: "
                'mp.expert_parallel(axis=("data", "expert")).',
                stacklevel=2,
            )
    elif implementation == NODE_FIRST:
        nodes_per_token = config.routing.nodes_visited(lax.axis_size(axes.experts[0]))
    expert_fn = functools.partial(_swiglu, experts=experts, config=config, typical_rows=typical_rows)
    return dispatch(
        tokens, routed.experts, routed.weights, expert_fn, axis=axes.experts, num_experts=config.routing.num_experts,
        capacity=slots, implementation=implementation, bound_factor=config.bound_factor, payload=config.payload,
        chunks=config.chunks, nodes_per_token=nodes_per_token,
    )  # fmt: skip


def _compute_local(
    tokens: jax.Array, routed: Routed, experts: Experts, config: MoEConfig, axes: _LayerAxes, slots: int | None
) -> tuple[jax.Array, Dispatched]:
    """Compute the local experts for all local tokens. The caller sums over ranks."""
    num_local = experts[0].shape[0]
    first = lax.axis_index(axes.experts) * num_local if axes.experts else 0
    local = routed.experts - first
    local = jnp.where((local >= 0) & (local < num_local), local, num_local).astype(jnp.int32)
    tokens = reduction.sum_gradient(reduction.extra_varying_axes(local, tokens), tokens)
    tokens, local, weights = varying_alike((), tokens, local, routed.weights)
    counts = count(local, num_local)
    if slots is None:
        order, dropped = by_expert(local, num_local), jnp.zeros_like(counts[0])
        sizes: Any = counts
        typical_rows = max(local.size * num_local // config.routing.num_experts, 1)
    else:
        order, sizes = in_buffers(local, num_local, slots), np.full(num_local, slots, np.int32)
        typical_rows = None
        dropped = jnp.sum(jnp.maximum(counts - slots, 0), dtype=jnp.int32)
    with jax.named_scope("experts"):
        rows = expand(tokens, order)
        outputs = _swiglu(rows, sizes, experts=experts, config=config, typical_rows=typical_rows)
    return weighted_sum(outputs, weights, order), Dispatched(counts, counts, dropped)
