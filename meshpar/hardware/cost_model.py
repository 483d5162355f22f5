"""The alpha-beta model: steps, bytes and time of collective algorithms in closed form.

n is the payload in bytes and N the number of ranks of a group. A message of n bytes takes `alpha + n beta`. A rank
sends and receives at the same time, over a single link. To reduce a byte takes `gamma`, which is 0 by default: NCCL
reduces while it sends, so the measured and published bandwidths of its collectives include the reduction.

    algorithm                                steps            bytes sent per rank
    ring all-reduce                          2(N-1)           2(N-1)/N n
    bidirectional ring all-reduce            4(N-1)           2(N-1)/N n
    ring all-gather, ring reduce-scatter     N-1              (N-1)/N n
    doubling all-gather, halving r.-scatter  log2 N           (N-1)/N n
    tree all-reduce (recursive doubling)     log2 N           n log2 N
    binomial tree all-reduce, up and down    2 log2 N         n log2 N at the root
    halving-doubling all-reduce              2 log2 N         2(N-1)/N n
    hierarchical all-reduce, K inside        2(K-1) inside    2(K-1)/K n inside
                                             2(N/K-1) across  2(N/K-1)/(N/K) n/K across
    naive root, parameter server             2(N-1)           (N-1) n each way at the root
    all-to-all                               N-1              (N-1)/N n

Sources: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH"; Patarasuk and
Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from meshpar.hardware.clusters import Cluster, Link
from meshpar.sharding.errors import check_choice, check_positive_int, problem


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost of an algorithm for a rank. `+` adds the costs of consecutive phases."""

    steps: int
    """Number of consecutive messages."""
    bytes_sent: float
    """Bytes sent by a rank, or by the busiest rank if ranks differ."""
    bytes_in_turn: float
    """Bytes on the critical path: those that are sent one after another. Their time is this number times beta."""
    bytes_reduced: float = 0.0
    """Received bytes on the critical path that are added to a local array. Their time is this number times gamma."""

    def time_s(self, link: Link, *, gamma_s_per_byte: float = 0.0) -> float:
        """Return the time in seconds over a link."""
        sending_s = self.steps * link.alpha_s + self.bytes_in_turn * link.beta_s_per_byte
        return sending_s + self.bytes_reduced * gamma_s_per_byte

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            steps=self.steps + other.steps,
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_in_turn=self.bytes_in_turn + other.bytes_in_turn,
            bytes_reduced=self.bytes_reduced + other.bytes_reduced,
        )


class HierarchicalCost(NamedTuple):
    """Cost of an algorithm with two consecutive phases on different links."""

    inside: Cost
    """Phase within groups of K ranks."""
    across: Cost
    """Phase between groups. All K ranks of a group communicate with their counterparts at the same time."""


# ---- Point to point --------------------------------------------------------------------------------------------------


def message(payload_bytes: float) -> Cost:
    """Return the cost of a message, `alpha + n beta`. In a permute, each rank sends a message."""
    _check(payload_bytes, 1)
    return Cost(steps=1, bytes_sent=float(payload_bytes), bytes_in_turn=float(payload_bytes))


# ---- Gather, scatter, exchange ---------------------------------------------------------------------------------------


def ring_all_gather(payload_bytes: float, num_ranks: int) -> Cost:
    """Return the cost of a ring all-gather. The payload is the gathered array."""
    _check(payload_bytes, num_ranks)
    sent = (num_ranks - 1) * payload_bytes / num_ranks
    return Cost(steps=num_ranks - 1, bytes_sent=sent, bytes_in_turn=sent)


def ring_reduce_scatter(payload_bytes: float, num_ranks: int) -> Cost:
    """Return the cost of a ring reduce-scatter. The payload is the array before scattering."""
    gather = ring_all_gather(payload_bytes, num_ranks)
    return dataclasses.replace(gather, bytes_reduced=gather.bytes_sent)


all_to_all = ring_all_gather
"""Cost of an all-to-all: `n / N` bytes to each other rank. The payload is the array of a rank."""


def doubling_all_gather(payload_bytes: float, num_ranks: int) -> Cost:
    """Return the cost of an all-gather by recursive doubling: `log2 N` steps, if N is a power of two."""
    sent = ring_all_gather(payload_bytes, num_ranks).bytes_sent
    rounds, rest = _doublings(num_ranks)
    if rest:
        reason = "the number of ranks must be a power of two"
        raise problem("recursive doubling", f"gather over {num_ranks} ranks", reason, "use a ring", code="indivisible")
    return Cost(steps=rounds, bytes_sent=sent, bytes_in_turn=sent)


def halving_reduce_scatter(payload_bytes: float, num_ranks: int) -> Cost:
    """Return the cost of a reduce-scatter by recursive halving: `log2 N` steps, if N is a power of two."""
    gather = doubling_all_gather(payload_bytes, num_ranks)
    return dataclasses.replace(gather, bytes_reduced=gather.bytes_sent)


def ring_broadcast(payload_bytes: float, num_ranks: int) -> Cost:
    """Return the cost of a pipelined broadcast around a ring: `(N-1) alpha + n beta`."""
    _check(payload_bytes, num_ranks)
    sent = float(payload_bytes) if num_ranks > 1 else 0.0
    return Cost(steps=num_ranks - 1, bytes_sent=sent, bytes_in_turn=sent)


def all_gather_matmul(payload_bytes: float, num_ranks: int, *, backward: bool = False) -> Cost:
    """Return the cost of the messages of `collectives.all_gather_matmul`. The payload is the gathered array.

    The forward pass is a bidirectional ring all-gather. The backward pass reduce-scatters gradients and gathers the
    array again in the same steps.
    """
    gather = ring_all_gather(payload_bytes, num_ranks)
    if not backward:
        return gather
    return dataclasses.replace(gather + ring_reduce_scatter(payload_bytes, num_ranks), steps=gather.steps)


matmul_reduce_scatter = ring_reduce_scatter
"""Cost of the messages of `collectives.matmul_reduce_scatter`, a bidirectional ring reduce-scatter. The payload is the
unsharded sum. The backward pass, an all-gather, has the same cost."""


# ---- All-reduce ------------------------------------------------------------------------------------------------------


def ring_all_reduce(payload_bytes: float, num_ranks: int) -> Cost:
    """Return the cost of a ring all-reduce: `2(N-1) alpha + 2(N-1)/N n beta`. It is bandwidth-optimal."""
    sent = all_reduce_lower_bound_bytes(payload_bytes, num_ranks)
    return Cost(steps=2 * (num_ranks - 1), bytes_sent=sent, bytes_in_turn=sent, bytes_reduced=sent / 2)


def both_ways(ring: Cost) -> Cost:
    """Return the cost of a bidirectional ring, given the cost of a ring: each step sends two messages of half the size.

    A rank has a single port, so it sends the two messages consecutively: twice the latency, the same bytes.
    """
    return dataclasses.replace(ring, steps=2 * ring.steps)


def tree_all_reduce(payload_bytes: float, num_ranks: int) -> Cost:
    """Return the cost of recursive doubling: `log2 N` steps with the full message. It is latency-optimal.

    Ranks beyond a power of two send their array first and receive the result last, in two additional messages.
    """
    _check(payload_bytes, num_ranks)
    rounds, rest = _doublings(num_ranks)
    moved = float((rounds + rest) * payload_bytes)
    # A rank sends only one of the two additional messages.
    sent = moved - rest // 2 * payload_bytes
    return Cost(steps=rounds + rest, bytes_sent=sent, bytes_in_turn=moved, bytes_reduced=sent)


def halving_doubling_all_reduce(payload_bytes: float, num_ranks: int) -> Cost:
    """Return the cost of recursive halving and doubling: `2 log2 N` steps with the bytes of a ring.

    Ranks beyond a power of two send their array first and receive the result last, in two additional full messages.
    """
    _check(payload_bytes, num_ranks)
    rounds, rest = _doublings(num_ranks)
    moved = all_reduce_lower_bound_bytes(payload_bytes, 2**rounds) + rest * payload_bytes
    sent = moved - rest // 2 * payload_bytes  # as in the tree
    return Cost(steps=2 * rounds + rest, bytes_sent=sent, bytes_in_turn=moved, bytes_reduced=moved / 2)


def binomial_tree_all_reduce(payload_bytes: float, num_ranks: int) -> Cost:
    """Return the cost of a reduction to a root and a broadcast: `2 log2 N` full messages, log2 N rounded up."""
    _check(payload_bytes, num_ranks)
    levels = (num_ranks - 1).bit_length()
    one_way = float(levels * payload_bytes)
    return Cost(steps=2 * levels, bytes_sent=one_way, bytes_in_turn=2 * one_way, bytes_reduced=one_way)


def hierarchical_all_reduce(payload_bytes: float, num_ranks: int, *, inner: int) -> HierarchicalCost:
    """Return the cost of a hierarchical all-reduce by rings.

    It is a reduce-scatter within groups of `inner` ranks, an all-reduce of `n / inner` between the groups, and an
    all-gather within the groups.
    """
    _check(payload_bytes, num_ranks)
    nodes, inner = _nodes("hierarchical all-reduce", num_ranks, inner)
    inside = ring_reduce_scatter(payload_bytes, inner) + ring_all_gather(payload_bytes, inner)
    return HierarchicalCost(inside=inside, across=ring_all_reduce(payload_bytes / inner, nodes))


def parameter_server_all_reduce(payload_bytes: float, num_ranks: int, *, num_servers: int = 1) -> Cost:
    """Return the cost of a parameter server. The servers are ranks, too.

    Each rank sends `n / num_servers` bytes to each server, which returns the sum. The link of a server carries these
    bytes N-1 times in each direction. A single server costs as much as `naive_root_all_reduce`. With N servers, a rank
    sends as much as in a ring.
    """
    _check(payload_bytes, num_ranks)
    if not 1 <= num_servers <= num_ranks:
        requested, reason = f"use {num_servers} servers", f"there are {num_ranks} ranks"
        raise problem("parameter server", requested, reason, f"use 1 to {num_ranks}", code="out-of-range")
    shard = payload_bytes / num_servers
    one_way = (num_ranks - 1) * shard
    as_worker = (num_servers - 1) * shard
    sent = one_way + as_worker
    return Cost(steps=2 * (num_ranks - 1), bytes_sent=sent, bytes_in_turn=2 * one_way, bytes_reduced=one_way)


def naive_root_all_reduce(payload_bytes: float, num_ranks: int) -> Cost:
    """Return the cost of an all-reduce at a root rank: its link receives `(N-1) n` bytes and then sends as many."""
    return parameter_server_all_reduce(payload_bytes, num_ranks, num_servers=1)


def all_reduce_lower_bound_bytes(payload_bytes: float, num_ranks: int) -> float:
    """Return the minimum bytes that a rank sends in an all-reduce: `2(N-1)/N n` (Patarasuk and Yuan 2009)."""
    _check(payload_bytes, num_ranks)
    return 2 * (num_ranks - 1) * payload_bytes / num_ranks


def ring_tree_crossover_bytes(
    num_ranks: int, link: Link, *, tree_link: Link | None = None, gamma_s_per_byte: float = 0.0
) -> float | None:
    """Return the payload in bytes at which ring and tree all-reduce take the same time.

    For smaller payloads the tree is faster, for larger payloads the ring. If N is a power of two, the payload is

        (2(N-1) - log2 N) alpha / ((log2 N - 2(N-1)/N) beta + (log2 N - (N-1)/N) gamma)

    It is 0 on a link without latency. It is None if the ring is faster for no payload, as for two ranks without gamma.
    `link` is the link of the ring, and `tree_link` the link of the tree, by default the same.
    """
    ring, tree = ring_all_reduce(1.0, num_ranks), tree_all_reduce(1.0, num_ranks)
    tree_link = tree_link or link
    latency_gain_s = ring.steps * link.alpha_s - tree.steps * tree_link.alpha_s
    loss_s_per_byte = tree.bytes_in_turn * tree_link.beta_s_per_byte - ring.bytes_in_turn * link.beta_s_per_byte
    loss_s_per_byte += (tree.bytes_reduced - ring.bytes_reduced) * gamma_s_per_byte
    if loss_s_per_byte <= 0:
        return None
    return max(latency_gain_s, 0.0) / loss_s_per_byte


# ---- Quantized -------------------------------------------------------------------------------------------------------


def quantized_bytes(num_elements: int, *, block: int = 256) -> int:
    """Return the bytes of a quantized array: one per element, and a scale of four bytes per block of elements."""
    num_blocks = -(-num_elements // block)
    return num_blocks * (-(-num_elements // max(num_blocks, 1)) + 4)


def quantized_all_gather(
    num_elements: int, num_ranks: int, *, inner: int | None = None, block: int = 256
) -> HierarchicalCost:
    """Return the cost of an all-gather of quantized shards with `num_elements / N` elements per rank.

    The shards are quantized once. With nodes of `inner` ranks there are two phases: first, ranks with the same position
    in different nodes gather, then the ranks within each node (Wang et al. 2023, "ZeRO++"). None means a single node.
    """
    nodes, inner = _nodes("quantized all-gather", num_ranks, inner)
    shard = quantized_bytes(-(-num_elements // num_ranks), block=block)
    inside, across = ring_all_gather(num_ranks * shard, inner), ring_all_gather(nodes * shard, nodes)
    return HierarchicalCost(inside=inside, across=across)


def quantized_reduce_scatter(
    num_elements: int, num_ranks: int, *, inner: int | None = None, block: int = 256
) -> HierarchicalCost:
    """Return the cost of a reduce-scatter by an all-to-all of quantized shards (Wang et al. 2023, "ZeRO++").

    With nodes of `inner` ranks, shards are exchanged and summed within the node first. None means a single node.
    """
    nodes, inner = _nodes("quantized reduce-scatter", num_ranks, inner)
    shard = quantized_bytes(-(-num_elements // num_ranks), block=block)
    return HierarchicalCost(inside=all_to_all(num_ranks * shard, inner), across=all_to_all(nodes * shard, nodes))


def quantized_all_reduce(
    num_elements: int, num_ranks: int, *, inner: int | None = None, block: int = 256
) -> HierarchicalCost:
    """Return the cost of a quantized reduce-scatter followed by a quantized all-gather."""
    scattered = quantized_reduce_scatter(num_elements, num_ranks, inner=inner, block=block)
    gathered = quantized_all_gather(num_elements, num_ranks, inner=inner, block=block)
    return HierarchicalCost(inside=scattered.inside + gathered.inside, across=scattered.across + gathered.across)


def _nodes(where: str, num_ranks: int, inner: int | None) -> tuple[int, int]:
    inner = num_ranks if inner is None else inner
    if inner < 1 or num_ranks % inner:
        reason, fix = f"{inner} does not divide {num_ranks}", f"use a divisor of {num_ranks}"
        raise problem(where, f"form groups of {inner} of {num_ranks} ranks", reason, fix, code="indivisible")
    return num_ranks // inner, inner


# ---- Attention over a sharded sequence -------------------------------------------------------------------------------


def ring_attention(kv_bytes: float, num_ranks: int) -> Cost:
    """Return the forward cost of ring attention (Liu et al. 2023). `kv_bytes` are the keys and values of a rank."""
    _check(kv_bytes, num_ranks)
    sent = float((num_ranks - 1) * kv_bytes)
    return Cost(steps=num_ranks - 1, bytes_sent=sent, bytes_in_turn=sent)


def ring_attention_backward(kv_bytes: float, gradient_bytes: float, num_ranks: int) -> Cost:
    """Return the cost of the backward pass of ring attention, which sends keys, values and their gradients.

    The gradients are in the dtype of their sum, float32 for bfloat16.
    """
    return ring_attention(kv_bytes, num_ranks) + ring_attention(gradient_bytes, num_ranks)


# ---- Mixture of experts: T = b s / N tokens per rank, k experts per token, E experts over N ranks, width d ----------


def dropless_rows(num_tokens: int, k: int, num_experts: int, num_ranks: int, bound_factor: float | None = None) -> int:
    """Return the rows of a receive buffer that fits any routing: `N T min(k, E/N)`, or `T k` on one rank.

    A token chooses different experts, so at most E/N of its k experts belong to a rank. With a bound factor f, the
    buffer has at most `f T k / N` rows per sending rank.
    """
    if min(num_tokens, k, num_experts, num_ranks) < 1 or num_experts % num_ranks:
        requested = f"send {num_tokens} tokens to {k} of {num_experts} experts on {num_ranks} ranks"
        reason, fix = (
            "the number of experts is not a multiple of the number of ranks, or a number is 0",
            "use a multiple of the number of ranks",
        )
        raise problem("mixture of experts", requested, reason, fix, code="indivisible")
    if num_ranks == 1:
        return num_tokens * k
    pair_rows = num_tokens * min(k, num_experts // num_ranks)
    if bound_factor is not None:
        pair_rows = max(1, min(pair_rows, math.ceil(round(bound_factor * num_tokens * k / num_ranks, 9))))
    return num_ranks * pair_rows


WINDOW_LOAD = 1.25
"""Rows of the first window of grouped kernels over those of a balanced load."""


def dropless_bytes(
    row_bytes: float,
    num_tokens: int,
    k: int,
    num_experts: int,
    num_ranks: int,
    *,
    bound_factor: float | None = None,
    chunks: int = 1,
) -> float:
    """Return the maximum bytes of dropless dispatch and combine, forward and backward, without the experts.

    There are five arrays with `dropless_rows` rows and two with `T k` rows. Each row has `row_bytes` bytes, the larger
    of the experts' input and output, and 16 bytes of indices. If the tokens are processed in several `chunks`, the
    arrays of all chunks count. The bytes do not depend on the routing.
    """
    rows = chunks * dropless_rows(num_tokens // chunks, k, num_experts, num_ranks, bound_factor)
    return (5 * rows + 2 * num_tokens * k) * (row_bytes + 16)


def moe_all_to_all(row_bytes: float, num_tokens: int, k: int, num_ranks: int, *, padding: float = 1.0) -> Cost:
    """Return the cost of dispatch or combine: `T k` rows per rank, of which `(N-1)/N` are sent.

    `padding` is the number of rows sent per token-expert assignment: `E C / (T k)` with capacity C, `dropless_rows /
    (T k)` for dropless dispatch with fixed sizes, and 1 for ragged messages.
    """
    return all_to_all(padding * num_tokens * k * row_bytes, num_ranks)


def hierarchical_all_to_all(payload_bytes: float, num_ranks: int, *, inner: int) -> HierarchicalCost:
    """Return the cost of a two-level all-to-all: `K-1` messages within a node of K ranks, then `N/K-1` between nodes.

    Each level sends the full payload.

    Rajbhandari et al. 2022, "DeepSpeed-MoE".
    """
    nodes, inner = _nodes("hierarchical all-to-all", num_ranks, inner)
    return HierarchicalCost(inside=all_to_all(payload_bytes, inner), across=all_to_all(payload_bytes, nodes))


def grouped_rows(num_rows: int, num_groups: int, block: int) -> int:
    """Return the maximum number of rows of a blocked grouped matmul: `R + G (block - 1)`, in full blocks.

    Gale et al. 2022, "MegaBlocks".
    """
    return min((num_rows + num_groups * (block - 1)) // block, num_rows) * block


BLOCKS_A_GROUP = 4
"""Minimum number of blocks per group of average size. With 4, padding adds at most a quarter to the rows, on average an
eighth. With 16, the gradients of DeepSeek-V3's experts take twice as long in the simulation of an H100, because each
block reads and writes all sums, and on CPUs forward and backward pass together take 1.2 to 1.9 times as long."""
MAX_BLOCK_ROWS = 4096
"""Maximum number of rows of a block. Each block reads and writes the full gradient of its group's weights. On an H100
this traffic takes as long as the matmuls of 900 rows."""


def grouped_block(num_rows: int, num_groups: int) -> int:
    """Return the default number of rows per block of a grouped matmul, a power of two."""
    rows = max(num_rows // (BLOCKS_A_GROUP * num_groups), 1)
    return min(max(1 << (rows.bit_length() - 1), 8), MAX_BLOCK_ROWS)


# ---- Collectives as the compiler names them --------------------------------------------------------------------------

_AS_SENT: Mapping[str, Callable[[float, int], Cost]] = {
    "all-reduce": ring_all_reduce,
    "all-gather": ring_all_gather,
    "reduce-scatter": ring_reduce_scatter,
    "all-to-all": all_to_all,
    "ragged-all-to-all": all_to_all,
    "collective-broadcast": ring_broadcast,
    "collective-permute": lambda n, _: message(n),
    "send": lambda n, _: message(n),
    "recv": lambda n, _: dataclasses.replace(message(n), bytes_sent=0.0),
}
KINDS = tuple(_AS_SENT)
"""Names of collectives in XLA."""

_RINGS = frozenset({"all-reduce", "all-gather", "reduce-scatter", "collective-broadcast"})
_MESSAGES = frozenset({"collective-permute", "send", "recv"})


def as_sent(kind: str, payload_bytes: float, group_size: int) -> Cost:
    """Return the cost of a collective with ring algorithms. The arguments are those of `bytes_sent`."""
    check_choice("cost model", "a collective", KINDS, kind=kind)
    return _AS_SENT[kind](payload_bytes, group_size)


def bytes_sent(kind: str, payload_bytes: float, group_size: int) -> float:
    """Return the bytes that a device sends in a collective, with ring algorithms.

    Args:
      kind: one of `KINDS`.
      payload_bytes: bytes of the gathered array for an all-gather, of the array before scattering for a reduce-scatter,
        and of the local array otherwise.
      group_size: number of devices.
    """
    return as_sent(kind, payload_bytes, group_size).bytes_sent


def collective_time_s(kind: str, payload_bytes: float, group_size: int, link: Link) -> float:
    """Return the time of a collective over a link, by rings; for an all-reduce, the faster of ring and tree.

    See `bytes_sent` for the arguments.
    """
    time_s = as_sent(kind, payload_bytes, group_size).time_s(link)
    return time_s if kind != "all-reduce" else min(time_s, tree_all_reduce(payload_bytes, group_size).time_s(link))


def collective_link(kind: str, cluster: Cluster, *, num_nodes: int, per_node: int, axes: Sequence[str] = ()) -> Link:
    """Return the link of a collective over groups of `num_nodes * per_node` GPUs.

    If the profile has a measured link of the mesh axes, return it. Within a node, return the cluster's `inside`.
    Between nodes, NCCL builds `per_node` rings, each through the network port of a different GPU (NVIDIA/nccl,
    src/graph/tuning.cc, version 2.23, 2024). Rings therefore have the bandwidth of `per_node` ports, at most the
    bandwidth inside a node, and `num_nodes - 1` of the N-1 steps have the latency of the network. Other collectives use
    a single port.
    """
    check_positive_int(f"cluster `{cluster.name}`", "a group size", num_nodes=num_nodes, per_node=per_node)
    measured = cluster.measured(axes, permute=kind in _MESSAGES)
    if measured is not None:
        return measured
    if num_nodes == 1 or kind not in _RINGS:
        return cluster.across if num_nodes > 1 else cluster.inside
    steps, across_steps = num_nodes * per_node - 1, num_nodes - 1
    alpha_s = (across_steps * cluster.across.alpha_s + (steps - across_steps) * cluster.inside.alpha_s) / steps
    ports_bytes_per_s = per_node * cluster.across.bytes_per_s
    if per_node > 1:
        ports_bytes_per_s = min(ports_bytes_per_s, cluster.inside.bytes_per_s)
    return Link(alpha_s=alpha_s, bytes_per_s=ports_bytes_per_s)


def matmul_flops(rows: int, inner: int, columns: int) -> int:
    """Return the FLOPs of `[rows, inner] @ [inner, columns]`; a multiply-add is two FLOPs."""
    return 2 * rows * inner * columns


def _doublings(num_ranks: int) -> tuple[int, int]:
    """Return log2 N rounded down, and the additional messages: 2 if N is not a power of two, else 0."""
    rounds = num_ranks.bit_length() - 1
    return rounds, 2 * (num_ranks != 2**rounds)


def _check(payload_bytes: float, num_ranks: int) -> None:
    if num_ranks < 1 or not payload_bytes >= 0:
        requested, reason = (
            f"send {payload_bytes} bytes on {num_ranks} ranks",
            "the group is empty, or the payload is negative",
        )
        raise problem("collective", requested, reason, "use at least 1 rank and 0 bytes", code="out-of-range")
