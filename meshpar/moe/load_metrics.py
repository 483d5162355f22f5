"""Load of experts and ranks in each MoE layer: measurement in the step, and advice on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from meshpar.collectives.kernel_checks import Axis, ranks_of
from meshpar.moe.argument_checks import check_mask, check_scores
from meshpar.moe.routing import count, entropy, or_unassigned
from meshpar.sharding.errors import check_cases, check_divides, check_positive_int

HEALTHY_MAX_OVER_MIN = 1.3
"""Healthy limit of the largest load divided by the smallest."""
IMBALANCED_MAX_OVER_MIN = 2.0
"""Largest load divided by the smallest, above which rarely used experts learn little and busy ranks delay the step."""
HEALTHY_DROP_RATE = 0.01
"""Healthy limit of the fraction of dropped assignments. More drops reduce the quality of the model."""


class Load(NamedTuple):
    """Assignments of each of n experts or ranks. Leading dims are layers."""

    tokens: Int32[Array, "*layers n"]
    """Assignments, including dropped ones."""
    max_over_mean: Float[Array, "*layers"]
    max_over_min: Float[Array, "*layers"]
    """Largest load divided by the smallest. The smallest counts as at least 1, so the ratio is finite."""
    variation: Float[Array, "*layers"]
    """Coefficient of variation: standard deviation over mean."""


class Loads(NamedTuple):
    """Load of an MoE layer in a step, as a pytree of arrays that a scan over layers stacks."""

    experts: Load
    ranks: Load
    """Load of the ranks that experts are sharded over. The largest determines the time of the step."""
    drop_rate: Float[Array, "*layers"]
    """Fraction of assignments dropped over capacity."""
    router_entropy: Float[Array, "*layers"]
    """Mean entropy of a token's scores in nats: ln E for equal scores, 0 for a single non-zero score."""


def measure(
    experts: Int[Array, "T k"],
    scores: Float[Array, "T E"],
    *,
    num_ranks: int = 1,
    is_kept: Bool[Array, "T k"] | None = None,
    axis: Axis | None = None,
    mask: Bool[Array, " T"] | None = None,
) -> Loads:
    """Return the load of a layer over the tokens of all ranks of `axis`, without gradients.

    Args:
      experts: experts of each token, from `route`.
      scores: scores of all experts, from `route`.
      num_ranks: size of the mesh axes that experts are sharded over, with E / num_ranks consecutive experts per rank.
      is_kept: True for assignments that were not dropped, from `routing.assign_slots`. None means all.
      axis: mesh axes that shard tokens, inside a `shard_map`. E + 3 numbers are summed over them.
      mask: False for padding, which does not count. None: all tokens count.

    Raises:
      ValueError: num_ranks does not divide E; the arrays describe different tokens, or none; the axis does not exist.
    """
    check_scores("measure", scores, experts)
    check_mask("measure", mask, len(scores))
    check_positive_int("measure", "the number of ranks that own experts", num_ranks=num_ranks)
    if is_kept is not None:
        reason, fix = f"it must have a bool per assignment, {experts.shape}", "pass the result of `assign_slots`"
        is_wrong = jnp.shape(is_kept) != experts.shape or jnp.result_type(is_kept) != jnp.bool_
        requested = f"use `is_kept` with shape {jnp.shape(is_kept)} and dtype {jnp.result_type(is_kept)}"
        check_cases("measure", requested, "wrong-shape", (is_wrong, reason, fix))
    num_experts = scores.shape[-1]
    fix = "pass the size of the expert axis"
    check_divides("measure", f"shard {num_experts} experts over {num_ranks} ranks", num_experts, num_ranks, fix)
    with jax.named_scope("measure_load"):
        scores = lax.stop_gradient(scores)
        experts = experts if mask is None else jnp.where(mask[:, None], experts, num_experts)
        is_assigned = or_unassigned(experts, num_experts) < num_experts
        sums = {
            "tokens": count(experts, num_experts),
            "dropped": jnp.zeros((), jnp.int32) if is_kept is None else (is_assigned & ~is_kept).sum(dtype=jnp.int32),
            "entropy": jnp.sum(entropy(scores), where=mask),
            "routed": jnp.asarray(len(scores) if mask is None else mask.sum(), scores.dtype),
        }
        if axis is not None:
            ranks_of("measure", axis)
            sums = {name: lax.psum(value, axis) for name, value in sums.items()}
        tokens, dtype = sums["tokens"], scores.dtype
        return Loads(
            experts=_load(tokens, dtype),
            ranks=_load(tokens.reshape(num_ranks, -1).sum(-1), dtype),
            drop_rate=sums["dropped"].astype(dtype) / jnp.maximum(tokens.sum(), 1).astype(dtype),
            router_entropy=sums["entropy"] / jnp.maximum(sums["routed"], 1),
        )


def scalars(loads: Loads, *, prefix: str = "moe_") -> dict[str, Float[Array, ""]]:
    """Return scalar metrics of the worst layer: each the maximum over layers, or the minimum for the entropy.

    Args:
      loads: loads of all layers.
      prefix: start of each name.
    """
    worst = {
        f"{prefix}{name}_{kind}": getattr(load, kind).max()
        for name, load in (("expert", loads.experts), ("rank", loads.ranks))
        for kind in ("max_over_mean", "max_over_min", "variation")
    }
    worst[f"{prefix}drop_rate"] = loads.drop_rate.max()
    worst[f"{prefix}router_entropy"] = loads.router_entropy.min()
    return worst


def loads(metrics: Mapping[str, Any]) -> Loads | None:
    """Return the loads of all MoE layers from the metrics of a step, on the host. None for a model without such layers.

    Args:
      metrics: metrics of a step (see `moe.report_layers`). To combine steps, sum `moe/load` and `moe/rank_load` and
        average the rates.

    Raises:
      ValueError: some of the metrics are missing.

    Example:
      >>> metrics = {"moe/load": np.array([[6, 2]]), "moe/rank_load": np.array([[6, 2]])}
      >>> metrics |= {"moe/drop_rate": np.zeros(1), "moe/router_entropy": np.ones(1)}
      >>> mp.moe.loads(metrics).experts.max_over_mean.tolist()
      [1.5]
    """
    if "moe/load" not in metrics:
        return None
    names = ("moe/load", "moe/rank_load", "moe/drop_rate", "moe/router_entropy")
    missing = ", ".join(f"`{name}`" for name in names if name not in metrics)
    case = missing, f"there is `moe/load`, but no {missing}", "pass all metrics of a step"
    check_cases("loads", "read the load of experts", "unknown-name", case)
    experts, ranks, *rates = (np.asarray(metrics[name], np.float64) for name in names)
    return Loads(_load(experts, np.float64, np), _load(ranks, np.float64, np), *rates)  # type: ignore[arg-type]


AdviceKind: TypeAlias = Literal["experts", "ranks", "drops"]


class Advice(NamedTuple):
    """Advice about a load outside of the healthy range."""

    kind: AdviceKind
    layers: tuple[int, ...]
    """Layers outside of the range, the worst first."""
    text: str
    """A sentence with the problem, its size, and the remedy."""


def advice(loads: Loads) -> list[Advice]:
    """Return advice for loads outside of the healthy range, at most one of each kind. Empty if all are healthy.

    With few tokens the load of a perfect router is uneven by chance. Therefore a ratio is reported only above the ratio
    expected for n equal probabilities and a mean of m tokens: (m + s) / (m - s) with s = √(2 m ln n).

    Args:
      loads: loads of a layer, or stacked over layers.
    """
    loads = jax.tree.map(np.asarray, loads)
    if loads.drop_rate.ndim == 0:
        loads = jax.tree.map(lambda x: x[None], loads)
    experts, ranks, num_layers = loads.experts, loads.ranks, len(loads.drop_rate)

    def of_experts(layer: int) -> str:
        ratio, num_idle = float(experts.max_over_min[layer]), int((experts.tokens[layer] == 0).sum())
        return (
            f"{_degree(ratio)}: the busiest expert gets {ratio:.3g} times the tokens of the least busy"
            f"{f', {num_idle} get none' if num_idle else ''} (healthy up to {HEALTHY_MAX_OVER_MIN}): use an auxiliary "
            "loss or a balancing bias, or raise its alpha or rate"
        )

    def of_ranks(layer: int) -> str:
        ratio = float(ranks.max_over_min[layer])
        return (
            f"{_degree(ratio)} over ranks: all ranks wait for the busiest, which gets {ranks.max_over_mean[layer]:.3g} "
            f"times the mean (busiest over least busy {ratio:.3g}, healthy up to {HEALTHY_MAX_OVER_MIN}): rebalance "
            "them with `mp.rebalance_experts`"
        )

    def of_drops(layer: int) -> str:
        needed = math.ceil(100 * float(experts.max_over_mean[layer])) / 100
        return (
            f"drops {loads.drop_rate[layer]:.1%} of the assignments (healthy up to {HEALTHY_DROP_RATE:.0%}): balance "
            f"the experts, raise capacity_factor (this load needs at least {needed:.2f}), or set it to None"
        )

    findings: dict[AdviceKind, tuple[tuple[int, ...], Callable[[int], str]]] = {
        "experts": (_uneven(experts), of_experts),
        "ranks": (_uneven(ranks), of_ranks),
        "drops": (_worst_first(loads.drop_rate, HEALTHY_DROP_RATE), of_drops),
    }
    results = []
    for kind, (layers, text_of) in findings.items():
        if layers:
            more = f" (and {len(layers) - 1} more of {num_layers})" if len(layers) > 1 else ""
            name = "the MoE layer" if num_layers == 1 else f"layer {layers[0]}{more}"
            results.append(Advice(kind, layers, f"{name} {text_of(layers[0])}"))
    return results


def _uneven(load: Load) -> tuple[int, ...]:
    """Return the layers whose `max_over_min` is above the healthy limit and above that of a perfect router."""
    mean = load.tokens.mean(-1)
    spread = np.sqrt(2 * mean * math.log(load.tokens.shape[-1]))
    by_chance = (mean + spread) / np.maximum(mean - spread, 1)
    return _worst_first(load.max_over_min, np.maximum(HEALTHY_MAX_OVER_MIN, by_chance))


def _worst_first(values: Any, limits: Any) -> tuple[int, ...]:
    values = np.asarray(values)
    layers = np.flatnonzero(values > limits)
    return tuple(layers[np.argsort(-values[layers], kind="stable")].tolist())


def _degree(ratio: float) -> str:
    return "is imbalanced" if ratio > IMBALANCED_MAX_OVER_MIN else "is uneven"


def _load(tokens: Any, dtype: Any, xp: Any = jnp) -> Load:
    counts = tokens.astype(dtype)
    mean = xp.maximum(counts.mean(-1), xp.finfo(dtype).tiny)
    busiest = counts.max(-1)
    return Load(tokens, busiest / mean, busiest / xp.maximum(counts.min(-1), 1), counts.std(-1) / mean)
