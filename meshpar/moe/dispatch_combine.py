"""`dispatch`: send tokens to the ranks of their experts, apply the experts, and combine the results.

    x [T, d] ──sort by expert──► rows ──all-to-all──► rows of local experts ──expert_fn──► ──all-to-all──► y [T, d']

    T  tokens of a rank    k  assignments per token    E  experts    N  ranks

There are two payload all-to-alls in the forward and two in the backward pass, for any routing, with hand-written
transposes. All other movements are gathers, or on CPUs loops over blocks of existing rows. Rows are scattered
only to sum the outputs of expert choice. No array has the size tokens x experts x width.

*Dropless* (`capacity=None`): assignments are sorted by expert and all are computed. The experts of a token are
different, so a rank sends at most P = T min(k, E/N) rows to each rank. Arrays are allocated for N P rows
(`cost_model.dropless_rows`; `dropless_bytes` in total). With balanced routing the ragged implementation sends T k d
numbers, and the fixed implementation N P d; the fraction (N-1)/N leaves the rank. With `bound_factor` f, P is at most f
T k / N, and further assignments are dropped.

*Capacity*: each expert accepts C assignments from each rank (`routing.capacity` computes C from a factor), and buffers
[E, C, d] are sent in full (Lepikhin et al. 2020, "GShard", with buffers by rank; Fedus et al. 2022, "Switch
Transformers"). Expert choice uses this path: its k = E columns need no additional memory.

*Node-first* (`implementation="node-first"`, dropless, M nodes of K ranks): a token is sent once to each of v nodes, to
the rank with the same inner index, which forwards it to its experts in the node and returns a weighted sum. Instead of
T k d, T v d numbers are sent across nodes in each direction, and (M-1)/M leave the node. T k d are sent inside nodes.
Sums are complete when they are sent back, so rematerialization does not repeat the way back across nodes. DeepSeek-AI
2024, "DeepSeek-V3", section 3.2.2: k = 8 assignments in v = 4 nodes.

Dropped assignments add nothing to y and have no gradient. Assignments are kept in row-major order of `experts`, so the
last tokens of a rank are dropped first. `Dispatched.dropped` counts them.

Gradients of x, weights and the values that `expert_fn` closes over are summed over the tokens of all ranks of `axis`.
For expert weights that are replicated over other axes (data, fsdp), each rank returns its part of the sum: JAX adds the
parts if `check_vma` is on and the weights are replicated there, otherwise the caller has to. If experts are sharded
over `tensor`, `expert_fn` may return partial sums. Reducing y, which has T rows, is cheaper than reducing N P rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.collectives.kernel_checks import Axis, ranks_of
from meshpar.collectives.wire import varying_alike
from meshpar.moe import transport_choice as choice
from meshpar.moe.argument_checks import check_positive, check_routed
from meshpar.moe.dispatch_paths import Capacity, Dispatched, Dropless, NodeFirst, Path, Payload, Shape
from meshpar.moe.routing import or_unassigned
from meshpar.moe.transport_choice import GPUS, IMPLEMENTATIONS, NODE_FIRST, TWO_LEVELS, choose_dispatch
from meshpar.sharding.types import check_choice, check_divides, check_positive_int, problem

KERNEL = "dispatch"

ExpertFn: TypeAlias = Callable[[jax.Array, Any], jax.Array]
"""(rows [R, d] sorted by local expert, group_sizes int32 [E/N]) -> [R, d']. Rows past the sum are unassigned."""


def dispatch(
    x: Float[Array, "T d"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    expert_fn: ExpertFn,
    *,
    axis: Axis,
    num_experts: int,
    capacity: int | None = None,
    implementation: str = "auto",
    bound_factor: float | None = None,
    payload: Payload | None = None,
    chunks: int = 1,
    nodes_per_token: int | None = None,
) -> tuple[Float[Array, "T e"], Dispatched]:
    """y[t] = sum over j of weights[t, j] expert_{experts[t, j]}(x[t]), with experts sharded over a mesh axis.

        per device: x [T, d], experts [T, k], weights [T, k] -> y [T, d'];  rank r owns experts [r E/N, (r+1) E/N)
        2 payload all-to-alls forward and 2 backward, and 1 forward of E/N + 1 counts per rank

    The module docstring describes the paths, what they send and drop, and the gradients. The plain reference is
    `meshpar.moe.reference.moe`.

    Args:
      x: local tokens, replicated over axes that shard the experts' width.
      experts: experts of each token, all different. -1, or any other invalid index, marks an unassigned element.
      weights: gate weights with any floating-point dtype. Weights of unassigned elements are ignored.
      expert_fn: applies the local experts to rows sorted by expert, `group_sizes` rows each, as `grouped_matmul` does.
        With a capacity, each expert has N C rows and the sizes are a NumPy array. Without, they sum to T k / chunks on
        average.
      axis: mesh axis or axes of the experts; (outer, inner) for implementations with two levels.
      num_experts: E, on all ranks together.
      capacity: C, or None for dropless.
      implementation: `fixed`, `ragged` (for GPUs or an abstract mesh), `hierarchical`, `node-first` (dropless only), or
        `auto`, as chosen by `choose_dispatch`.
      bound_factor: limit of the rows between two ranks, as a multiple of a balanced load (dropless only). None allows
        any routing.
      payload: number formats of the rows sent. None keeps the dtype.
      chunks: number of chunks of tokens. Communication of a chunk can overlap with experts of the next. Each chunk has
        separate all-to-alls, a separate capacity and a separate bound.
      nodes_per_token: limit of the nodes per token, for `node-first`. Assignments on further nodes are dropped.

    Returns:
      y, and the counts of assignments.

    Raises:
      ValueError: the axis does not exist; shapes, dtypes or options do not fit together; N does not divide E.

    Example:
      def expert_fn(rows, group_sizes):
          return grouped_swiglu(rows, gate, up, down, group_sizes)

      y, counts = dispatch(x, routed.experts, routed.weights, expert_fn, axis="expert", num_experts=8)
    """
    check_routed(KERNEL, x, experts, weights)
    num_ranks = ranks_of(KERNEL, axis)
    check_positive_int(KERNEL, "the number of experts", num_experts=num_experts)
    fix = f"use {-(-num_experts // num_ranks) * num_ranks} experts, or an axis whose size divides {num_experts}"
    check_divides(KERNEL, f"shard {num_experts} experts over {num_ranks} ranks", num_experts, num_ranks, fix)
    _check_chunks(chunks, x.shape[0])
    implementation = _chosen_implementation(axis, capacity, bound_factor, implementation)
    check_payload(KERNEL, payload)
    num_nodes, nodes_per_token = _nodes(axis, implementation, experts.shape[1], nodes_per_token)
    experts = or_unassigned(experts, num_experts)
    _, x, _ = varying_alike(axis, experts, x, weights)
    # Experts and weights vary over `axis` only, so that counts are replicated over other axes.
    (experts,), (weights,) = varying_alike(axis, experts), varying_alike(axis, weights)
    size, names = x.shape[0] // chunks, (axis,) if isinstance(axis, str) else axis
    shape, payload = Shape(size, experts.shape[1], num_experts, num_ranks, names, implementation), payload or Payload()
    path: Path
    if capacity is not None:
        path = Capacity(shape, payload, min(capacity, size))
    elif implementation == NODE_FIRST:
        path = NodeFirst.of(shape, payload, bound_factor, num_nodes, nodes_per_token)
    else:
        path = Dropless.of(shape, payload, bound_factor)
    slices = [slice(begin, begin + size) for begin in range(0, len(x), size)]
    outputs, stats = _pipelined(path, x, experts, weights, expert_fn, slices)
    return jnp.concatenate(outputs), Dispatched(*(sum(field[1:], field[0]) for field in zip(*stats, strict=True)))


def _pipelined(
    path: Path, x: jax.Array, experts: jax.Array, weights: jax.Array, expert_fn: ExpertFn, slices: list[slice]
) -> tuple[list[jax.Array], list[Dispatched]]:
    """Process chunks as a pipeline: send chunk i + 1 and return chunk i - 1 while the experts of chunk i compute.

    XLA would send all chunks first. The barriers order the sends of consecutive chunks and their experts, in the
    forward and the backward pass, so that there is work to overlap with each message.
    """
    waiting = [x[chunk] for chunk in slices]
    outputs, stats = [], []
    with jax.named_scope(KERNEL):
        arrived = path.send(waiting.pop(0), experts[slices[0]], weights[slices[0]])
    rows = arrived.rows
    if waiting:
        rows, waiting[0] = lax.optimization_barrier((rows, waiting[0]))
    for following in [*slices[1:], None]:
        if following is not None:
            with jax.named_scope(KERNEL):
                next_arrived = path.send(waiting.pop(0), experts[following], weights[following])
        with jax.named_scope("experts"):
            expert_outputs = _checked_outputs(expert_fn(rows, arrived.sizes), rows)
        if following is not None:
            expert_outputs, rows, waiting[:1] = lax.optimization_barrier(
                (expert_outputs, next_arrived.rows, waiting[:1])
            )
        with jax.named_scope("combine"):
            outputs.append(path.combine(expert_outputs, arrived))
        stats.append(arrived.stats)
        arrived = next_arrived if following is not None else arrived
    return outputs, stats


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _chosen_implementation(axis: Axis, capacity: int | None, bound_factor: float | None, implementation: str) -> str:
    """Check the options and return the implementation, which stays `auto` for dropless dispatch."""
    check_choice(KERNEL, "the way in which tokens are sent", IMPLEMENTATIONS, implementation=implementation)
    if capacity is not None:
        check_positive_int(KERNEL, "the capacity of an expert", capacity=capacity)
    check_bound(KERNEL, bound_factor)
    is_pair, requested = isinstance(axis, tuple) and len(axis) == 2, f"use implementation={implementation!r}"
    if capacity is not None and bound_factor is not None:
        reason, fix = "the capacity is the bound", "leave out bound_factor"
        both = f"use bound_factor={bound_factor!r} with capacity={capacity!r}"
        raise problem(KERNEL, both, reason, fix, "conflict")
    if capacity is not None and implementation in ("ragged", NODE_FIRST):
        other = "hierarchical" if implementation == NODE_FIRST else "fixed"
        reason = "buffers of fixed capacity are sent in full, with a row per assignment"
        fix = f"use implementation={other!r}, or leave out the capacity"
        raise problem(KERNEL, f"{requested} with capacity={capacity!r}", reason, fix, "conflict")
    if implementation == "ragged" and (platform := choice.platform_of_mesh()) not in (None, *GPUS):
        reason = f"XLA has no ragged-all-to-all for {platform}"
        fix = "use implementation='auto', which is ragged if the program is compiled for GPUs, or 'fixed'"
        raise problem(KERNEL, f"{requested} on {platform} devices", reason, fix, "unsupported-feature")
    if implementation in TWO_LEVELS and not is_pair:
        reason, fix = "its two levels are two axes", 'pass axis=("outer", "inner"), across nodes and inside a node'
        raise problem(KERNEL, f"{requested} over axis={axis!r}", reason, fix, "conflict")
    if implementation != "auto" or capacity is None:  # token_exchange chooses for dropless dispatch, at lowering
        return implementation
    return choose_dispatch(dropless=False, two_levels=is_pair).implementation


def _nodes(axis: Axis, implementation: str, k: int, nodes_per_token: int | None) -> tuple[int, int]:
    """Return the number of nodes and the limit of nodes per token, for node-first dispatch."""
    if nodes_per_token is not None:
        check_positive_int(KERNEL, "the limit of nodes per token", nodes_per_token=nodes_per_token)
        if implementation != NODE_FIRST:
            reason = f"implementation={implementation!r} sends a row per assignment"
            fix = "use implementation='node-first', or leave it out"
            raise problem(KERNEL, f"use nodes_per_token={nodes_per_token}", reason, fix, "conflict")
    num_nodes = ranks_of(KERNEL, axis[0]) if implementation == NODE_FIRST else 1
    return num_nodes, min(num_nodes, k, nodes_per_token or num_nodes)


def check_bound(where: str, factor: Any) -> None:
    """Check a `bound_factor`: a positive number or None."""
    if factor is not None:
        check_positive(where, "bound_factor", factor, "2.0 for twice a balanced load, or None for any routing")


def check_payload(where: str, payload: object) -> None:
    """Check that an argument is a `Payload` or None."""
    if payload is not None and not isinstance(payload, Payload):
        reason, fix = "it describes the number formats of each direction", 'pass moe.Payload(dispatch="int8"), or None'
        raise problem(where, f"use payload={payload!r}", reason, fix, "wrong-type")


def _check_chunks(chunks: int, num_tokens: int) -> None:
    check_positive_int(KERNEL, "the number of chunks", chunks=chunks)
    if num_tokens % chunks:
        divisors = ", ".join(str(n) for n in range(1, num_tokens + 1) if num_tokens % n == 0)[:60]
        requested, fix = f"divide {num_tokens} tokens into {chunks} chunks", f"use one of {divisors}"
        check_divides(KERNEL, requested, num_tokens, chunks, fix)


def _checked_outputs(outputs: jax.Array, rows: jax.Array) -> jax.Array:
    where = f"{KERNEL}(expert_fn=...)"
    if not hasattr(outputs, "dtype") or jnp.ndim(outputs) != 2 or outputs.shape[0] != rows.shape[0]:
        result = f"an array of shape {outputs.shape}" if hasattr(outputs, "shape") else f"a {type(outputs).__name__}"
        reason, fix = "it must return a row for each input row, in the same order", f"return [{rows.shape[0]}, width]"
        raise problem(where, f"return {result} for rows {rows.shape}", reason, fix, "wrong-shape")
    if not jnp.issubdtype(outputs.dtype, jnp.floating):
        reason = "outputs are multiplied with gate weights and summed"
        raise problem(where, f"return {outputs.dtype}", reason, "return a floating-point dtype", "wrong-dtype")
    return outputs
