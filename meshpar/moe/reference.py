"""Plain reference of an MoE layer in global-view jax.numpy, without communication or sorting."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshpar.moe.argument_checks import check_routed
from meshpar.moe.routing import assign_slots, or_unassigned
from meshpar.sharding.errors import check_cases, check_divides, check_positive_int
from meshpar.sharding.types import PyTree


def moe(
    x: Float[Array, "T d"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    expert_fn: Callable[[PyTree, Float[Array, "T d"]], Float[Array, "T d_out"]],
    params: PyTree,
    *,
    capacity: int | None = None,
    token_ranks: int = 1,
) -> Float[Array, "T d_out"]:
    """Return y_t = Σ_j weights_tj · expert_fn(params of expert experts_tj, x_t), summed over kept assignments in order.

    All experts are applied to all tokens, which is E/k times the required work, with temporaries [E, T, d_out]. It is
    meant for tests and small problems. Unassigned elements (not in [0, E)) add nothing. The sum runs over a token's
    assignments, not over experts, so it is bitwise independent of the numbering of the experts.

    Args:
      x: all tokens.
      experts: experts of each token, from `route`.
      weights: gate weights, from `route`.
      expert_fn: applies an expert, given its parameters, to any number of tokens.
      params: parameters with leaves [E, ...].
      capacity: capacity of each expert for the tokens of a rank, as in `routing.assign_slots`. None means unlimited.
      token_ranks: number of ranks that tokens are sharded over. Each has a separate capacity.

    Raises:
      ValueError: arrays describe different tokens; leaves have different E; `token_ranks` does not divide T; the
        capacity is negative.
    """
    where = "reference.moe"
    first_dims = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(params)}
    case = len(first_dims) != 1 or 0 in first_dims, "each leaf is [E, ...]", "stack the experts along the first dim"
    check_cases(where, f"use parameters with first dims {sorted(first_dims)}", "wrong-shape", case)
    num_experts = first_dims.pop()
    check_routed(where, x, experts, weights)
    check_positive_int(where, "the number of ranks that tokens are sharded over", token_ranks=token_ranks)
    fix = "use a divisor of the number of tokens"
    check_divides(where, f"shard {len(x)} tokens over {token_ranks} ranks", len(x), token_ranks, fix)
    experts = or_unassigned(experts, num_experts)
    weights = jnp.where(experts < num_experts, weights, 0)
    if capacity is not None:
        by_rank = experts.reshape(token_ranks, -1, experts.shape[1])
        _, is_kept = jax.vmap(lambda rank_experts: assign_slots(rank_experts, capacity, num_experts))(by_rank)
        weights = jnp.where(is_kept.reshape(weights.shape), weights, 0)
    outputs = jax.vmap(expert_fn, in_axes=(0, None))(params, x)
    total = jnp.zeros_like(outputs[0])
    for expert, weight in zip(experts.T, weights.T, strict=True):
        output = outputs.at[expert, jnp.arange(len(x))].get(mode="fill", fill_value=0)
        total += weight[:, None].astype(outputs.dtype) * output
    return total
