"""`dispatch`: send tokens to the ranks of their experts, apply the experts, and combine the results.

    x [T, d] ──sort by expert──► rows ──all-to-all──► rows of local experts ──expert_fn──► ──all-to-all──► y [T, d']

    T  tokens of a rank    k  assignments per token    E  experts    N  ranks

There are two payload all-to-alls in the forward and two in the backward pass, for any routing, with hand-written
transposes. All other movements are gathers; rows are scattered only to sum the outputs of expert choice. No array has
the size tokens x experts x width.

*Dropless* (`capacity=None`): assignments are sorted by expert and all are computed. The experts of a token are
different, so a rank sends at most P = T min(k, E/N) rows to each rank, and arrays have N P rows
(`cost_model.dropless_bytes`). The ragged implementation sends T k d numbers, and the fixed implementation N P d; the
fraction (N-1)/N leaves the rank. With `bound_factor` f, P is at most f T k / N, and further assignments are dropped.

*Capacity*: each expert accepts C assignments from each rank (`routing.capacity`), and buffers [E, C, d] are sent in
full (Lepikhin et al. 2020, "GShard"; Fedus et al. 2022, "Switch Transformers"). Expert choice uses this path.

*Node-first* (`implementation="node-first"`, dropless, M nodes of K ranks): a token is sent once to each of v nodes, to
the rank with the same inner index, which forwards it to its experts in the node and returns a weighted sum. Instead of
T k d, T v d numbers are sent across nodes in each direction, and T k d inside nodes. Rows are already weighted and
summed when they are sent back, so rematerialization does not repeat that all-to-all. DeepSeek-AI 2024, "DeepSeek-V3",
section 3.2.2: k = 8 assignments in v = 4 nodes.

Dropped assignments add nothing to y and have no gradient. Assignments are kept in row-major order of `experts`, so the
last tokens of a rank are dropped first. `Dispatched.dropped` counts them.

Gradients are summed over the tokens of all ranks of `axis`. For expert weights that are replicated over other axes,
JAX adds the ranks' parts if `check_vma` is on, otherwise the caller has to. If experts are sharded over `tensor`,
`expert_fn` may return partial sums: reducing y, which has T rows, is cheaper than reducing N P rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.collectives.kernel_checks import Axis, axis_names, ranks_of
from meshpar.collectives.wire import varying_alike
from meshpar.hardware import compile_target
from meshpar.hardware.compile_target import GPUS
from meshpar.moe.argument_checks import check_bound, check_routed
from meshpar.moe.dispatch_paths import (
    Capacity,
    Dispatched,
    Dropless,
    NodeFirst,
    Path,
    Payload,
    ReceivedTokens,
    Shape,
    check_payload,
)
from meshpar.moe.routing import or_unassigned
from meshpar.moe.transport_choice import IMPLEMENTATIONS, NODE_FIRST, TWO_LEVELS, choose_dispatch
from meshpar.sharding.errors import check_cases, check_choice, check_divides, check_positive_int

KERNEL = "dispatch"

ExpertFn: TypeAlias = Callable[[jax.Array, Any], jax.Array]
"""(rows [R, d] sorted by local expert, group_sizes int32 [E/N]) -> [R, d'].

Rows past the sum of `group_sizes` are unassigned.
"""


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
    """Send tokens to the ranks of their experts, apply `expert_fn`, and return the gate-weighted sums.

        y[t] = sum over j of weights[t, j] * expert_{experts[t, j]}(x[t])

        per device: x [T, d], experts [T, k], weights [T, k] -> y [T, d'];  rank r owns experts [r E/N, (r+1) E/N)
        2 payload all-to-alls forward and 2 backward, and 1 forward of counts, E per rank

    The module docstring describes the paths, what they send and drop, and the gradients. The plain reference is
    `meshpar.moe.reference.moe`.

    Args:
      x: local tokens, replicated over axes that shard the experts' width.
      experts: experts of each token, all different. -1, or any other invalid index, marks an unassigned element.
      weights: gate weights with any floating-point dtype. Weights of unassigned elements are ignored.
      expert_fn: applies the local experts to rows sorted by expert, `group_sizes` rows each, as `grouped_matmul` does.
        With a capacity, each expert has N C rows and the sizes are a NumPy array. Without a capacity, the sizes sum to
        T k / chunks on average.
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
    num_ranks, num_tokens = ranks_of(KERNEL, axis), len(x)
    counts = {"num_experts": num_experts, "chunks": chunks, "capacity": capacity, "nodes_per_token": nodes_per_token}
    check_positive_int(KERNEL, "a count", **{name: value for name, value in counts.items() if value is not None})
    fix = f"use {-(-num_experts // num_ranks) * num_ranks} experts, or an axis whose size divides {num_experts}"
    check_divides(KERNEL, f"shard {num_experts} experts over {num_ranks} ranks", num_experts, num_ranks, fix)
    requested, fix = f"divide {num_tokens} tokens into {chunks} chunks", f"use a divisor of {num_tokens}"
    check_divides(KERNEL, requested, num_tokens, chunks, fix)
    check_choice(KERNEL, "the way in which tokens are sent", IMPLEMENTATIONS, implementation=implementation)
    check_bound(KERNEL, bound_factor)
    check_payload(KERNEL, payload)
    is_pair = isinstance(axis, tuple) and len(axis) == 2
    needs_dropless, is_node_first = implementation in ("ragged", NODE_FIRST), implementation == NODE_FIRST
    in_full = "buffers of fixed capacity are sent in full, with a row per assignment"
    check_cases(
        KERNEL, f"combine implementation={implementation!r}, {axis=}, {capacity=}, {bound_factor=}", "conflict",
        (capacity is not None and bound_factor is not None, "the capacity is the limit", "leave out bound_factor"),
        (capacity is not None and needs_dropless, in_full, "use implementation='auto', or leave out the capacity"),
        (implementation in TWO_LEVELS and not is_pair, "two levels need two axes", 'pass axis=("outer", "inner")'),
        (nodes_per_token and not is_node_first, "only node-first limits the nodes", "leave out nodes_per_token"),
    )  # fmt: skip
    is_wrong = implementation == "ragged" and compile_target.platform_of_mesh() not in (None, *GPUS)
    case = is_wrong, "XLA supports ragged-all-to-all on GPUs only", "use 'auto', which is ragged on GPUs, or 'fixed'"
    check_cases(KERNEL, "use implementation='ragged'", "unsupported-feature", case)
    if implementation == "auto" and capacity is not None:  # token_exchange chooses for dropless dispatch, at lowering
        implementation = choose_dispatch(dropless=False, two_levels=is_pair).implementation
    experts = or_unassigned(experts, num_experts)
    _, x, _ = varying_alike(axis, experts, x, weights)
    # Experts and weights vary over `axis` only, so that counts are replicated over other axes.
    (experts,), (weights,) = varying_alike(axis, experts), varying_alike(axis, weights)
    size, k = num_tokens // chunks, experts.shape[1]
    shape = Shape(size, k, num_experts, num_ranks, axis_names(axis), implementation)
    payload = payload or Payload()
    path: Path
    if capacity is not None:
        path = Capacity(shape, payload, min(capacity, size))
    elif is_node_first:
        num_nodes = ranks_of(KERNEL, axis[0])
        path = NodeFirst.of(shape, payload, bound_factor, num_nodes, min(num_nodes, k, nodes_per_token or num_nodes))
    else:
        path = Dropless.of(shape, payload, bound_factor)
    slices = [slice(begin, begin + size) for begin in range(0, num_tokens, size)]
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

    def send(chunk: slice) -> ReceivedTokens:
        with jax.named_scope(KERNEL):
            return path.send(waiting.pop(0), experts[chunk], weights[chunk])

    arrived = send(slices[0])
    if waiting:
        tokens, waiting[0] = lax.optimization_barrier((arrived.tokens, waiting[0]))
        arrived = arrived._replace(tokens=tokens)
    for chunk in [*slices[1:], None]:
        following = arrived if chunk is None else send(chunk)
        with jax.named_scope("experts"):
            tokens = expert_fn(arrived.tokens, arrived.sizes)
            _check_outputs(tokens, arrived.tokens)
        if chunk is not None:
            tokens, next_tokens, waiting[:1] = lax.optimization_barrier((tokens, following.tokens, waiting[:1]))
            following = following._replace(tokens=next_tokens)
        with jax.named_scope("combine"):
            outputs.append(path.combine(tokens, arrived))
        stats.append(arrived.stats)
        arrived = following
    return outputs, stats


def _check_outputs(outputs: Any, tokens: jax.Array) -> None:
    where, shape = f"{KERNEL}(expert_fn=...)", getattr(outputs, "shape", None)
    is_wrong = shape is None or len(shape) != 2 or shape[0] != len(tokens)
    reason, fix = "it must return a row for each input row, in the same order", f"return [{len(tokens)}, width]"
    requested = f"return a {type(outputs).__name__} of shape {shape} for rows {tokens.shape}"
    check_cases(where, requested, "wrong-shape", (is_wrong, reason, fix))
    is_wrong = not jnp.issubdtype(outputs.dtype, jnp.floating)
    case = is_wrong, "outputs are multiplied with gate weights and summed", "return a floating-point dtype"
    check_cases(where, f"return {outputs.dtype}", "wrong-dtype", case)
