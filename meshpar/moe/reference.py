"""What an MoE layer computes, in plain global-view jax.numpy: every token through every expert, then masked."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshpar.moe.argument_checks import check_routed, check_whole
from meshpar.moe.routing import kept, or_unassigned
from meshpar.sharding.types import PyTree, problem


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
    """y_t = Σ_j weights_tj · expert_fn(params of experts_tj, x_t), over the choices that are kept, in their order.

    E/k times the work that is needed, and temporaries [E, T, d_out]: for tests and for small things. An unassigned
    choice (no number from 0 to E - 1) adds nothing. The sum runs over a token's choices, not over the experts, so it
    has the same bits however the experts are numbered.

    Args:
      x: all tokens.
      experts: of every token, as `route` gives them.
      weights: likewise.
      expert_fn: one expert for any number of tokens, given its own parameters.
      params: leaves [E, ...].
      capacity: room at each expert for the tokens of one rank, see `routing.kept`; None: nothing drops.
      token_ranks: over how many ranks the tokens are cut, in their order; each has room of its own at every expert.

    Raises:
      ValueError: arrays of different tokens; leaves of different E; tokens that cannot be cut so; a capacity below 0.
    """
    num_experts = _num_experts(params)
    check_routed("reference.moe", x, experts, weights)
    check_whole("reference.moe", "token_ranks", token_ranks)
    if len(x) % token_ranks:
        exists = f"there are {len(x)} tokens, and every rank has the same number"
        raise problem("reference.moe", f"cut tokens over {token_ranks} ranks", exists, "give a divisor of them")
    experts = or_unassigned(experts, num_experts)
    weights = jnp.where(experts < num_experts, weights, 0)
    if capacity is not None:
        of_ranks = experts.reshape(token_ranks, -1, experts.shape[1])
        _, keep = jax.vmap(lambda of_rank: kept(of_rank, capacity, num_experts))(of_ranks)
        weights = jnp.where(keep.reshape(weights.shape), weights, 0)
    y = jax.vmap(expert_fn, in_axes=(0, None))(params, x)
    total = jnp.zeros_like(y[0])
    for expert, weight in zip(experts.T, weights.T, strict=True):
        chosen = y.at[expert, jnp.arange(len(x))].get(mode="fill", fill_value=0)
        total += weight[:, None].astype(y.dtype) * chosen
    return total


def _num_experts(params: PyTree) -> int:
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(params)}
    if len(sizes) != 1 or 0 in sizes:
        exists, fix = "each leaf is [E, ...], one entry an expert", "stack the experts along the first dim"
        raise problem("reference.moe", f"take parameters with a first dim of {sorted(sizes)}", exists, fix)
    return sizes.pop()
