"""The alpha-beta model: steps, bytes and time of every collective algorithm, in closed form.

n is the payload in bytes, N the ranks of a group. A message of n bytes takes `alpha + n beta`. Every rank sends and
receives at once, over one link.

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

from meshpar.hardware.clusters import Cluster, Link
from meshpar.sharding.types import near, problem


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one algorithm costs a rank; costs of what runs one after the other are added with `+`."""

    steps: int
    """Messages one after the other."""
    bytes_sent: float
    """By one rank; by the busiest one where ranks differ."""
    bytes_in_turn: float
    """Through one link, one after the other, counted along the longest way: what beta is paid for."""

    def time_s(self, link: Link) -> float:
        """Time over a link."""
        return self.steps * link.alpha_s + self.bytes_in_turn * link.beta_s_per_byte

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            steps=self.steps + other.steps,
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_in_turn=self.bytes_in_turn + other.bytes_in_turn,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HierarchicalCost:
    """What an algorithm costs that uses two kinds of link, one after the other."""

    inside: Cost
    """Within the groups of K ranks."""
    across: Cost
    """Between the groups: every rank of a group with its counterparts, all K at the same time."""

    def time_s(self, inside: Link, across: Link) -> float:
        """Time over a link inside the groups and one between them."""
        return self.inside.time_s(inside) + self.across.time_s(across)


# ---- Point to point --------------------------------------------------------------------------------------------------


def message(payload_bytes: float) -> Cost:
    """One message to another rank: `alpha + n beta`. A permute is one message of every rank."""
    _check(payload_bytes, 1)
    return Cost(steps=1, bytes_sent=float(payload_bytes), bytes_in_turn=float(payload_bytes))


# ---- Gather, scatter, exchange ---------------------------------------------------------------------------------------


def ring_all_gather(payload_bytes: float, num_ranks: int) -> Cost:
    """Every rank passes on what it has just received. The payload is the gathered array."""
    sent = _all_but_own(payload_bytes, num_ranks)
    return Cost(steps=num_ranks - 1, bytes_sent=sent, bytes_in_turn=sent)


def ring_reduce_scatter(payload_bytes: float, num_ranks: int) -> Cost:
    """As the all-gather, each part summed on its way. The payload is the array before scattering."""
    return ring_all_gather(payload_bytes, num_ranks)


def doubling_all_gather(payload_bytes: float, num_ranks: int) -> Cost:
    """Ranks 1, 2, 4, ... apart swap what they have: the ring's bytes in `log2 N` steps, for a power of two of ranks."""
    sent = _all_but_own(payload_bytes, num_ranks)
    rounds, rest = _doublings(num_ranks)
    if rest:
        exists = "ranks pair up anew at each step, so there has to be a power of two of them"
        raise problem("recursive doubling", f"gather over {num_ranks} ranks", exists, "use a ring")
    return Cost(steps=rounds, bytes_sent=sent, bytes_in_turn=sent)


def halving_reduce_scatter(payload_bytes: float, num_ranks: int) -> Cost:
    """The all-gather by doubling backwards, what arrives summed: `log2 N` steps, for a power of two of ranks."""
    return doubling_all_gather(payload_bytes, num_ranks)


def all_to_all(payload_bytes: float, num_ranks: int) -> Cost:
    """One part to each other rank, `n / N` each. The payload is what one rank holds."""
    return ring_all_gather(payload_bytes, num_ranks)


def ring_broadcast(payload_bytes: float, num_ranks: int) -> Cost:
    """From a root round the ring, cut so finely that all links are busy at once: `(N-1) alpha + n beta`."""
    _check(payload_bytes, num_ranks)
    sent = float(payload_bytes) if num_ranks > 1 else 0.0
    return Cost(steps=num_ranks - 1, bytes_sent=sent, bytes_in_turn=sent)


def all_gather_matmul(payload_bytes: float, num_ranks: int, *, backward: bool = False) -> Cost:
    """What the overlapped matmul sends: a ring all-gather, half of it each way. The payload is the gathered rows.

    Backward it scatters the sum of their gradients, and in the same steps gathers the rows once more.
    """
    gather = ring_all_gather(payload_bytes, num_ranks)
    if not backward:
        return gather
    return dataclasses.replace(gather + ring_reduce_scatter(payload_bytes, num_ranks), steps=gather.steps)


def matmul_reduce_scatter(payload_bytes: float, num_ranks: int) -> Cost:
    """What the overlapped matmul sends: a ring reduce-scatter, half of it each way. The payload is the whole sum.

    Backward it gathers the gradient, which takes as much.
    """
    return ring_reduce_scatter(payload_bytes, num_ranks)


# ---- All-reduce ------------------------------------------------------------------------------------------------------


def ring_all_reduce(payload_bytes: float, num_ranks: int) -> Cost:
    """A ring reduce-scatter, then a ring all-gather: `2(N-1) alpha + 2(N-1)/N n beta`. Bandwidth-optimal."""
    sent = all_reduce_lower_bound_bytes(payload_bytes, num_ranks)
    return Cost(steps=2 * (num_ranks - 1), bytes_sent=sent, bytes_in_turn=sent)


def both_ways(ring: Cost) -> Cost:
    """Cost of a bidirectional ring, from that of the ring: each step sends two messages of half the size.

    A rank has one port, so the two messages leave one after the other: twice the latency, and the same bytes.
    """
    return dataclasses.replace(ring, steps=2 * ring.steps)


def tree_all_reduce(payload_bytes: float, num_ranks: int) -> Cost:
    """Recursive doubling: in each of `log2 N` steps pairs swap the whole message. Latency-optimal.

    Ranks beyond a power of two hand their part in first and get the result last: two messages more. One tree that
    reduces upwards and broadcasts downwards takes `2 log2 N` steps.
    """
    _check(payload_bytes, num_ranks)
    rounds, rest = _doublings(num_ranks)
    moved = float((rounds + rest) * payload_bytes)
    # Of the two messages more, a rank sends one and receives the other.
    sent = moved - rest // 2 * payload_bytes
    return Cost(steps=rounds + rest, bytes_sent=sent, bytes_in_turn=moved)


def halving_doubling_all_reduce(payload_bytes: float, num_ranks: int) -> Cost:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling: `2 log2 N` steps, the ring's bytes.

    Ranks beyond a power of two hand their part in first and get the result last: two whole messages more.
    """
    _check(payload_bytes, num_ranks)
    rounds, rest = _doublings(num_ranks)
    moved = all_reduce_lower_bound_bytes(payload_bytes, 2**rounds) + rest * payload_bytes
    sent = moved - rest // 2 * payload_bytes  # as in the tree
    return Cost(steps=2 * rounds + rest, bytes_sent=sent, bytes_in_turn=moved)


def binomial_tree_all_reduce(payload_bytes: float, num_ranks: int) -> Cost:
    """One tree that reduces up to a root and broadcasts down again: `2 log2 N` whole messages, log2 N rounded up."""
    _check(payload_bytes, num_ranks)
    levels = (num_ranks - 1).bit_length()
    whole = float(levels * payload_bytes)
    return Cost(steps=2 * levels, bytes_sent=whole, bytes_in_turn=2 * whole)


def hierarchical_all_reduce(payload_bytes: float, num_ranks: int, *, inner: int) -> HierarchicalCost:
    """Reduce-scatter inside groups of `inner` ranks, all-reduce of `n / inner` across, all-gather inside (all rings).

    Raises:
      ValueError: the groups do not divide the ranks.
    """
    _check(payload_bytes, num_ranks)
    nodes, inner = _nodes("hierarchical all-reduce", num_ranks, inner)
    inside = ring_reduce_scatter(payload_bytes, inner) + ring_all_gather(payload_bytes, inner)
    return HierarchicalCost(inside=inside, across=ring_all_reduce(payload_bytes / inner, nodes))


def parameter_server_all_reduce(payload_bytes: float, num_ranks: int, *, num_servers: int = 1) -> Cost:
    """Every rank sends its part to the servers, which sum it and send it back; the servers are ranks, too.

    A server holds `n / num_servers`, and its link carries that N-1 times in and N-1 times out: with one server the hot
    spot of the naive root. With as many servers as ranks it is the reduce-scatter and all-gather of the ring.

    Raises:
      ValueError: there are more servers than ranks, or none.
    """
    _check(payload_bytes, num_ranks)
    if not 1 <= num_servers <= num_ranks:
        asked = f"keep the parameters on {num_servers} servers"
        raise problem("parameter server", asked, f"there are {num_ranks} ranks", f"use 1 to {num_ranks}")
    part = payload_bytes / num_servers
    one_way = (num_ranks - 1) * part
    as_worker = (num_servers - 1) * part
    return Cost(steps=2 * (num_ranks - 1), bytes_sent=one_way + as_worker, bytes_in_turn=2 * one_way)


def naive_root_all_reduce(payload_bytes: float, num_ranks: int) -> Cost:
    """All ranks send to a root, which sums and sends to all: its link carries `(N-1) n` in, then `(N-1) n` out."""
    return parameter_server_all_reduce(payload_bytes, num_ranks, num_servers=1)


def all_reduce_lower_bound_bytes(payload_bytes: float, num_ranks: int) -> float:
    """Least bytes that a rank has to send in any all-reduce: `2(N-1)/N n` (Patarasuk and Yuan 2009)."""
    _check(payload_bytes, num_ranks)
    return 2 * (num_ranks - 1) * payload_bytes / num_ranks


def ring_tree_crossover_bytes(num_ranks: int, link: Link, *, tree_link: Link | None = None) -> float | None:
    """The payload at which ring and tree all-reduce take equally long: the tree is quicker below, the ring above.

    For N a power of two it is `(2(N-1) - log2 N) alpha / ((log2 N - 2(N-1)/N) beta)`.

    Args:
      num_ranks: N.
      link: between them.
      tree_link: what the tree goes through, where that is another one.

    Returns:
      bytes; 0 on a link without latency, where the ring is never slower; None when there is no crossover: for two
      ranks, where the tree takes a step less and the same bytes, and for one, which sends nothing.
    """
    ring, tree = ring_all_reduce(1.0, num_ranks), tree_all_reduce(1.0, num_ranks)
    other = tree_link or link
    ahead_s = ring.steps * link.alpha_s - tree.steps * other.alpha_s
    behind_s_per_byte = tree.bytes_in_turn * other.beta_s_per_byte - ring.bytes_in_turn * link.beta_s_per_byte
    if behind_s_per_byte <= 0:
        return None
    return max(ahead_s, 0.0) / behind_s_per_byte


# ---- Quantized -------------------------------------------------------------------------------------------------------


def quantized_bytes(num_elements: int, *, block: int = 256) -> int:
    """What an array takes on the wire: a byte an element and four a block of at most `block`, blocks of one size."""
    if num_elements < 0 or block < 1:
        exists, fix = "an array has 0 elements or more, and a block at least one", "give both as such"
        raise problem("quantized array", f"send {num_elements} elements in blocks of {block}", exists, fix)
    num_blocks = -(-num_elements // block)
    return num_blocks * (-(-num_elements // max(num_blocks, 1)) + 4)


def quantized_all_gather(
    num_elements: int, num_ranks: int, *, inner: int | None = None, block: int = 256
) -> HierarchicalCost:
    """Every rank's `num_elements / N` elements to all others, quantized once.

    With nodes of `inner` ranks (None: one node) counterparts gather first, across; what they then have goes round
    inside. Wang et al. 2023, "ZeRO++", as what follows.
    """
    nodes, inner = _nodes("quantized all-gather", num_ranks, inner)
    mine = quantized_bytes(-(-num_elements // num_ranks), block=block)
    inside, across = ring_all_gather(num_ranks * mine, inner), ring_all_gather(nodes * mine, nodes)
    return HierarchicalCost(inside=inside, across=across)


def quantized_reduce_scatter(
    num_elements: int, num_ranks: int, *, inner: int | None = None, block: int = 256
) -> HierarchicalCost:
    """An all-to-all of parts, summed where they arrive.

    With nodes of `inner` ranks (None: one node) they are exchanged and summed inside first: a K-th goes across.
    """
    nodes, inner = _nodes("quantized reduce-scatter", num_ranks, inner)
    part = quantized_bytes(-(-num_elements // num_ranks), block=block)
    return HierarchicalCost(inside=all_to_all(num_ranks * part, inner), across=all_to_all(nodes * part, nodes))


def quantized_all_reduce(
    num_elements: int, num_ranks: int, *, inner: int | None = None, block: int = 256
) -> HierarchicalCost:
    """The reduce-scatter, then the all-gather."""
    scattered = quantized_reduce_scatter(num_elements, num_ranks, inner=inner, block=block)
    gathered = quantized_all_gather(num_elements, num_ranks, inner=inner, block=block)
    return HierarchicalCost(inside=scattered.inside + gathered.inside, across=scattered.across + gathered.across)


def _nodes(what: str, num_ranks: int, inner: int | None) -> tuple[int, int]:
    """(nodes, ranks in each)."""
    inner = num_ranks if inner is None else inner
    if inner < 1 or num_ranks % inner:
        asked = f"form groups of {inner} out of {num_ranks} ranks"
        raise problem(what, asked, "groups of one size do not divide them", f"use a divisor of {num_ranks}")
    return num_ranks // inner, inner


# ---- Attention over a split sequence ---------------------------------------------------------------------------------


def ring_attention(kv_bytes: float, num_ranks: int) -> Cost:
    """Forward: keys and values of every rank go round the ring (Liu et al. 2023). `kv_bytes` are those of one rank."""
    _check(kv_bytes, num_ranks)
    sent = float((num_ranks - 1) * kv_bytes)
    return Cost(steps=num_ranks - 1, bytes_sent=sent, bytes_in_turn=sent)


def ring_attention_backward(kv_bytes: float, gradient_bytes: float, num_ranks: int) -> Cost:
    """Backward: keys and values once more, and their gradients behind them, summed on the way home.

    Args:
      kv_bytes: keys and values of one rank.
      gradient_bytes: their gradients in the dtype they are summed in, float32 for bfloat16.
      num_ranks: N.
    """
    return ring_attention(kv_bytes, num_ranks) + ring_attention(gradient_bytes, num_ranks)


# ---- Mixture of experts: T tokens a rank (b s / N), k choices each, E experts over N ranks, rows of d numbers --------


def dropless_rows(num_tokens: int, k: int, num_experts: int, num_ranks: int, bound_factor: float | None = None) -> int:
    """Rows that a rank makes room for so that any routing fits: `N T min(k, E/N)`, on one rank `T k`.

    A token's choices are different experts, so that at most E/N of them are of one rank. It does not grow with E at
    fixed k (once E/N is k or more). With a bound factor f there is room for `f T k / N` rows from each rank, if less.
    """
    _check_routed(num_tokens, k, num_experts, num_ranks)
    if num_ranks == 1:
        return num_tokens * k
    pair_rows = num_tokens * min(k, num_experts // num_ranks)
    if bound_factor is not None:
        pair_rows = max(1, min(pair_rows, math.ceil(round(bound_factor * num_tokens * k / num_ranks, 9))))
    return num_ranks * pair_rows


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
    """What dropless dispatch and combine hold at the most, forward and backward, beside what the experts hold.

    Five arrays of `dropless_rows` rows and two of `T k`, with 16 bytes a row of where it stands; of chunks, which take
    turns, no more than whole. The routing does not come in, nor E once E/N is k or more.

    Args:
      row_bytes: of a row, the wider of what goes into the experts and what comes out.
    """
    rows = chunks * dropless_rows(num_tokens // chunks, k, num_experts, num_ranks, bound_factor)
    return (5 * rows + 2 * num_tokens * k) * (row_bytes + 16)


def moe_all_to_all(row_bytes: float, num_tokens: int, k: int, num_ranks: int, *, padding: float = 1.0) -> Cost:
    """One of the two all-to-alls of a layer and direction: `T k` rows a rank, of which `(N-1)/N` leave it.

    Args:
      row_bytes: of one token's row on the wire.
      padding: rows that travel per choice: `E C / (T k)` with capacity C, `dropless_rows / (T k)` for dropless in
        parts of one size, 1 for ragged ones.
    """
    return all_to_all(padding * num_tokens * k * row_bytes, num_ranks)


def hierarchical_all_to_all(payload_bytes: float, num_ranks: int, *, inner: int) -> HierarchicalCost:
    """All-to-all in two levels: `K-1` messages inside the node, then `N/K-1` across, the whole payload in each level.

    Rajbhandari et al. 2022, "DeepSpeed-MoE".
    """
    nodes, inner = _nodes("hierarchical all-to-all", num_ranks, inner)
    return HierarchicalCost(inside=all_to_all(payload_bytes, inner), across=all_to_all(payload_bytes, nodes))


def grouped_rows(num_rows: int, num_groups: int, block: int) -> int:
    """Rows that a blocked grouped matmul computes at the most: `R + G (block - 1)`, in whole blocks.

    Gale et al. 2022, "MegaBlocks".
    """
    if num_rows < 0 or num_groups < 1 or block < 1:
        asked = f"cut {num_rows} rows of {num_groups} groups into blocks of {block}"
        raise problem("grouped matmul", asked, "rows are counted from 0, groups and blocks from 1", "give them as such")
    return min((num_rows + num_groups * (block - 1)) // block, num_rows) * block


BLOCKS_A_GROUP = 4
"""A block is at most so small a part of a group of mean size: padding adds a quarter to the rows at the most, an eighth
on the mean. With 16 the gradients of DeepSeek-V3's experts take twice as long by the clock of an H100, for a block
reads and writes the sums of all of them, and on CPU hosts forward and backward together take 1.2 to 1.9 times as
long."""
MOST_BLOCK_ROWS = 4096
"""Of a block. Each block reads and writes the whole gradient of its group's weights: on an H100 that takes as long as
the matmuls of 900 rows."""


def grouped_block(num_rows: int, num_groups: int) -> int:
    """Rows of a block of a grouped matmul, where nobody names them: a power of two."""
    wanted = max(num_rows // (BLOCKS_A_GROUP * num_groups), 1)
    return min(max(1 << (wanted.bit_length() - 1), 8), MOST_BLOCK_ROWS)


def _check_routed(num_tokens: int, k: int, num_experts: int, num_ranks: int) -> None:
    if min(num_tokens, k, num_experts, num_ranks) < 1 or num_experts % num_ranks:
        asked = f"send {num_tokens} tokens to {k} of {num_experts} experts on {num_ranks} ranks"
        exists = "there is at least one of each, and every rank has as many experts"
        raise problem("mixture of experts", asked, exists, "give a number of experts that the ranks divide")


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
"""Kinds of collectives, as XLA names them."""

_RINGS = frozenset({"all-reduce", "all-gather", "reduce-scatter", "collective-broadcast"})
_MESSAGES = frozenset({"collective-permute", "send", "recv"})


def bytes_sent(kind: str, payload_bytes: float, group_size: int) -> float:
    """Bytes a device sends for one collective, by ring algorithms.

    Args:
      kind: one of `KINDS`.
      payload_bytes: of an all-gather the gathered array, of a reduce-scatter the array before scattering, of an
        all-to-all what a device holds, of all others the array.
      group_size: devices that take part together.

    Raises:
      ValueError: no such kind, or a size that cannot be.
    """
    return as_sent(kind, payload_bytes, group_size).bytes_sent


def collective_time_s(kind: str, payload_bytes: float, group_size: int, link: Link) -> float:
    """Time of one collective over a link: rings, but for an all-reduce the quicker of ring and tree.

    Args:
      kind: one of `KINDS`.
      payload_bytes: as for `bytes_sent`.
      group_size: devices that take part together.
      link: between them.

    Raises:
      ValueError: no such kind, or a size that cannot be.
    """
    time_s = as_sent(kind, payload_bytes, group_size).time_s(link)
    return time_s if kind != "all-reduce" else min(time_s, tree_all_reduce(payload_bytes, group_size).time_s(link))


def collective_link(kind: str, cluster: Cluster, *, num_nodes: int, per_node: int, axes: Sequence[str] = ()) -> Link:
    """The link that a collective over groups of `num_nodes * per_node` GPUs goes through.

    The one that was measured along its mesh axes, where the cluster's profile has it. Else, inside a node, the node's.
    Between nodes a ring that visits `per_node` GPUs of each is laid `per_node` times, once through the network port of
    each, so it has that many times a port's bandwidth (no more than inside a node), and of its N-1 steps
    `num_nodes - 1` have the network's latency: NCCL's way (NVIDIA/nccl, src/graph/tuning.cc, version 2.23, 2024).
    Exchanges and messages have a port each.
    """
    if num_nodes < 1 or per_node < 1:
        asked = f"join {per_node} GPUs in each of {num_nodes} nodes"
        raise problem(f"cluster `{cluster.name}`", asked, "a group has at least one", "give both as 1 or more")
    measured = cluster.measured(axes, permute=kind in _MESSAGES)
    if measured is not None:
        return measured
    if num_nodes == 1 or kind not in _RINGS:
        return cluster.link(crosses_node=num_nodes > 1)
    steps, across_steps = num_nodes * per_node - 1, num_nodes - 1
    alpha_s = (across_steps * cluster.across.alpha_s + (steps - across_steps) * cluster.inside.alpha_s) / steps
    ports_bytes_per_s = per_node * cluster.across.bytes_per_s
    if per_node > 1:
        ports_bytes_per_s = min(ports_bytes_per_s, cluster.inside.bytes_per_s)
    return Link(alpha_s=alpha_s, bytes_per_s=ports_bytes_per_s)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def matmul_flops(rows: int, inner: int, columns: int) -> int:
    """FLOPs of `[rows, inner] @ [inner, columns]`: a multiply and an add each."""
    return 2 * rows * inner * columns


# ---- Parts -----------------------------------------------------------------------------------------------------------


def as_sent(kind: str, payload_bytes: float, group_size: int) -> Cost:
    """What a collective costs by the ring algorithm of its kind; arguments and errors as for `bytes_sent`."""
    if kind not in _AS_SENT:
        raise problem(f"collective `{kind}`", "be priced", "there is no such kind", near(kind, KINDS))
    return _AS_SENT[kind](payload_bytes, group_size)


def _all_but_own(payload_bytes: float, num_ranks: int) -> float:
    _check(payload_bytes, num_ranks)
    return (num_ranks - 1) * payload_bytes / num_ranks


def _doublings(num_ranks: int) -> tuple[int, int]:
    """(log2 of the largest power of two among the ranks, 2 when ranks are left over, else 0)."""
    rounds = num_ranks.bit_length() - 1
    return rounds, 2 * (num_ranks != 2**rounds)


def _check(payload_bytes: float, num_ranks: int) -> None:
    if num_ranks < 1:
        raise problem("a collective", f"run on {num_ranks} ranks", "a group has at least one", "give 1 or more")
    if not payload_bytes >= 0:
        raise problem("a collective", f"send {payload_bytes} bytes", "no message is shorter than 0", "give 0 or more")
