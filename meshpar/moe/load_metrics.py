"""How even the load of experts is, layer by layer: measured in the step, judged on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from meshpar.collectives.kernel_checks import Axis, ranks_of
from meshpar.moe.argument_checks import check_scores, check_whole
from meshpar.moe.routing import count, entropy, or_unassigned
from meshpar.sharding.types import problem

HEALTHY_MAX_OVER_MIN = 1.3
"""Busiest over least busy: up to here all is well."""
IMBALANCED_MAX_OVER_MIN = 2.0
"""Above this, the least busy learn little and the busiest are waited for."""
HEALTHY_DROP_RATE = 0.01
"""Of all choices: dropping more is a real loss of quality."""


class Load(NamedTuple):
    """How many of the routed tokens each of n experts, or ranks, got. Leading dims are layers."""

    tokens: Int32[Array, "*layers n"]
    """Choices that fell on each, those that dropped later included."""
    max_over_mean: Float[Array, "*layers"]
    max_over_min: Float[Array, "*layers"]
    """The least busy is counted as one token when it got none, which keeps the number finite."""
    variation: Float[Array, "*layers"]
    """Coefficient of variation: standard deviation over mean."""


class Loads(NamedTuple):
    """An MoE layer in one step: a pytree of arrays, that a scan over layers stacks."""

    experts: Load
    ranks: Load
    """Ranks of the mesh axis that the experts are split over: they set the time of the step."""
    drop_rate: Float[Array, "*layers"]
    """Share of all choices that were dropped over capacity."""
    router_entropy: Float[Array, "*layers"]
    """Mean over tokens, in nats, of the entropy of a token's scores: ln E when undecided, 0 when there is no doubt."""


def measure(
    experts: Int[Array, "T k"],
    scores: Float[Array, "T E"],
    *,
    num_ranks: int = 1,
    kept: Bool[Array, "T k"] | None = None,
    axis: Axis | None = None,
) -> Loads:
    """The load of one layer, over the tokens of all ranks along `axis`; differentiable in nothing.

    Args:
      experts: of every token, from `route`.
      scores: likewise.
      num_ranks: of the mesh axis that the experts are split over, E / num_ranks neighbours at each.
      kept: which choices were not dropped, from `routing.kept`; None: all.
      axis: mesh axes that the tokens are split over, when called inside `shard_map`: E + 3 numbers are summed.

    Raises:
      ValueError: experts that cannot be split so; arrays of different tokens, or of none; no such axis here.
    """
    check_scores("measure", scores, experts)
    check_whole("measure", "num_ranks", num_ranks)
    if kept is not None and (jnp.shape(kept) != experts.shape or jnp.result_type(kept) != jnp.bool_):
        asked = f"take `kept` of shape {jnp.shape(kept)} and dtype {jnp.result_type(kept)}"
        exists = f"it says of each of the choices {experts.shape} whether it was kept"
        raise problem("measure", asked, exists, "give what `routing.kept` gives for the same experts")
    num_experts = scores.shape[-1]
    if num_experts % num_ranks:
        exists = f"there are {num_experts} experts, and every rank has the same number"
        raise problem("measure", f"split experts over {num_ranks} ranks", exists, "give the size of the expert axis")
    with jax.named_scope("measure_load"):
        scores = lax.stop_gradient(scores)
        chosen = or_unassigned(experts, num_experts) < num_experts
        here = {
            "tokens": count(experts, num_experts),
            "dropped": jnp.zeros((), jnp.int32) if kept is None else (chosen & ~kept).sum(dtype=jnp.int32),
            "entropy": entropy(scores).sum(),
            "routed": jnp.asarray(len(scores), scores.dtype),
        }
        if axis is not None:
            ranks_of("measure", axis)
            here = {name: lax.psum(value, axis) for name, value in here.items()}
        tokens, dtype = here["tokens"], scores.dtype
        return Loads(
            experts=_load(tokens, dtype),
            ranks=_load(tokens.reshape(num_ranks, -1).sum(-1), dtype),
            drop_rate=here["dropped"].astype(dtype) / jnp.maximum(tokens.sum(), 1).astype(dtype),
            router_entropy=here["entropy"] / here["routed"],
        )


def scalars(loads: Loads, *, prefix: str = "moe_") -> dict[str, Float[Array, ""]]:
    """One number of each kind for metrics.jsonl: the worst layer's (of the entropy, the lowest)."""
    worst = {
        f"{prefix}{name}_{kind}": getattr(load, kind).max()
        for name, load in (("expert", loads.experts), ("rank", loads.ranks))
        for kind in ("max_over_mean", "max_over_min", "variation")
    }
    worst[f"{prefix}drop_rate"] = loads.drop_rate.max()
    worst[f"{prefix}router_entropy"] = loads.router_entropy.min()
    return worst


def loads(metrics: Mapping[str, Any]) -> Loads | None:
    """The loads of a model's MoE layers out of the metrics of its step, on the host; None where it has none.

    Args:
      metrics: of one step; or sums over several of what counts tokens, and means of the rest.

    Raises:
      ValueError: some of them only.
    """
    if "moe/load" not in metrics:
        return None
    names = ("load", "rank_load", "drop_rate", "router_entropy")
    if missing := [f"moe/{name}" for name in names if f"moe/{name}" not in metrics]:
        exists = f"there is `moe/load`, and no {', '.join(f'`{name}`' for name in missing)}"
        raise problem("loads(metrics)", "read the load of experts", exists, "give the metrics of a step as they are")
    experts, ranks, *rest = (np.asarray(metrics[f"moe/{name}"], np.float64) for name in names)
    return Loads(_load(experts, np.float64, np), _load(ranks, np.float64, np), *rest)  # type: ignore[arg-type]


class Advice(NamedTuple):
    """Something about the load that is past its healthy range."""

    kind: Literal["experts", "ranks", "drops"]
    layers: tuple[int, ...]
    """Where, the worst first."""
    text: str
    """What is wrong, by how much, and what to do about it; one sentence."""


def advice(loads: Loads) -> list[Advice]:
    """What is past its healthy range, each kind once for all layers; empty when all is well.

    Ranges: busiest over least busy up to 1.3 is healthy, above 2 imbalanced; dropping above 1 % is a real loss. Among
    few tokens even a perfect router looks uneven, so a ratio counts only beyond what chance makes of n equal shares of
    m tokens: (m + s) / (m - s) with s = √(2 m ln n).

    Args:
      loads: of one layer, or stacked over layers, and arrived on the host or about to.
    """
    loads = jax.tree.map(np.asarray, loads)
    if loads.drop_rate.ndim == 0:
        loads = jax.tree.map(lambda x: x[None], loads)
    found = [_uneven_experts(loads), _uneven_ranks(loads), _drops(loads)]
    return [one for one in found if one is not None]


def _uneven_experts(loads: Loads) -> Advice | None:
    layers = _uneven(loads.experts)
    if not layers:
        return None
    ratio, idle = float(loads.experts.max_over_min[layers[0]]), int((loads.experts.tokens[layers[0]] == 0).sum())
    none = f", {idle} of them get none" if idle else ""
    text = (
        f"{_where(layers, loads)} {_degree(ratio)}: the busiest expert gets {ratio:.3g} times the tokens of the least "
        f"busy{none} (healthy up to {HEALTHY_MAX_OVER_MIN}): use an auxiliary loss or a balancing bias, or raise its "
        "alpha or rate"
    )
    return Advice("experts", layers, text)


def _uneven_ranks(loads: Loads) -> Advice | None:
    layers = _uneven(loads.ranks)
    if not layers:
        return None
    ratio, over_mean = float(loads.ranks.max_over_min[layers[0]]), loads.ranks.max_over_mean[layers[0]]
    text = (
        f"{_where(layers, loads)} {_degree(ratio)} over ranks: all wait for one that gets {over_mean:.3g} times the "
        f"mean (busiest over least busy {ratio:.3g}, healthy up to {HEALTHY_MAX_OVER_MIN}): rebalance them "
        "with `mp.rebalance_experts`"
    )
    return Advice("ranks", layers, text)


def _drops(loads: Loads) -> Advice | None:
    layers = _worst_first(loads.drop_rate, HEALTHY_DROP_RATE)
    if not layers:
        return None
    rate, over_mean = loads.drop_rate[layers[0]], loads.experts.max_over_mean[layers[0]]
    enough = math.ceil(100 * float(over_mean)) / 100
    text = (
        f"{_where(layers, loads)} drops {rate:.1%} of its choices (above {HEALTHY_DROP_RATE:.0%} is a real loss): "
        f"balance the experts, or raise capacity_factor (this load needs {enough:.2f} at least), or set it to None"
    )
    return Advice("drops", layers, text)


def _uneven(load: Load) -> tuple[int, ...]:
    num = load.tokens.shape[-1]
    mean = load.tokens.mean(-1)
    spread = np.sqrt(2 * mean * math.log(num))
    by_chance = (mean + spread) / np.maximum(mean - spread, 1)
    return _worst_first(load.max_over_min, np.maximum(HEALTHY_MAX_OVER_MIN, by_chance))


def _worst_first(values: Any, limits: Any) -> tuple[int, ...]:
    values = np.asarray(values)
    layers = np.flatnonzero(values > limits)
    return tuple(layers[np.argsort(-values[layers], kind="stable")].tolist())


def _where(layers: tuple[int, ...], loads: Loads) -> str:
    total = len(loads.drop_rate)
    if total == 1:
        return "the MoE layer"
    also = f" (and {len(layers) - 1} more of {total})" if len(layers) > 1 else ""
    return f"layer {layers[0]}{also}"


def _degree(ratio: float) -> str:
    return "is imbalanced" if ratio > IMBALANCED_MAX_OVER_MIN else "is uneven"


def _load(tokens: Any, dtype: Any, xp: Any = jnp) -> Load:
    exact = tokens.astype(dtype)
    mean = xp.maximum(exact.mean(-1), xp.finfo(dtype).tiny)
    busiest = exact.max(-1)
    return Load(tokens, busiest / mean, busiest / xp.maximum(exact.min(-1), 1), exact.std(-1) / mean)
