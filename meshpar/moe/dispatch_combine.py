"""dispatch: routed tokens to the ranks of their experts, through the experts, and the weighted sum back.

    x [T, d] ──sort by expert──► rows ──all-to-all──► rows of my experts ──expert_fn──► ──all-to-all──► y [T, d']

Two payload all-to-alls forward and two backward, whatever the routing. What they carry is differentiated by hand, each
by the other one's transpose, and so are all other motions: gathers, or on CPUs loops over blocks of the rows there are.
No scatter of rows, and nothing of the size of tokens x experts x width.

*Dropless* (`capacity=None`): choices are sorted by expert, and every one is computed. A rank may be sent
P = T min(k, E/N) rows by each other one, for the choices of a token are different experts: that is the bound all arrays
have, N P rows, for every routing (`planner.cost.dropless_rows`; `dropless_bytes` in all). Only rows there are travel in
the ragged form, T k d numbers of which (N-1)/N leave the rank if routing is even; in the fixed form N P d, of which
(N-1)/N. With `bound_factor` f, P is f T k / N where that is less, and what is over is dropped.

*Capacity*: every expert takes C choices of each rank (`routing.capacity` says how many for a factor), and the buffers
[E, C, d] travel whole (Lepikhin et al. 2020, "GShard", with buffers by rank; Fedus et al. 2022, "Switch Transformers").
It is the form for experts that choose, too: k = E columns cost no room.

What is dropped has no part in y and no gradient: the residual carries the token. First come, first served: choices
count token by token, and a token's own in their order (column by column), so that what is over are the last tokens of a
rank. `Dispatched.dropped` counts it.

Gradients are those of the formula: of x, weights, and what `expert_fn` closes over, summed over the tokens of the ranks
of `axis`. Weights of experts that are alike on other axes (data, fsdp) get this rank's part of the sum: jax adds the
parts when `check_vma` is on and they come in as alike there, else that is the caller's psum. Experts cut over `tensor`
may end with a psum over it in `expert_fn`; it is cheaper to leave partial sums and psum y, which has T rows instead of
R.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.collectives.check import Axis, check_choice, checked_count, ranks_of
from meshpar.collectives.quantized import BLOCK, FORMATS
from meshpar.collectives.wire import varying_alike
from meshpar.moe import choice, exchange
from meshpar.moe.check import check_positive, check_routed
from meshpar.moe.choice import GPUS, IMPLEMENTATIONS, choose_dispatch
from meshpar.moe.exchange import Coding, RowCounts, RowLink
from meshpar.moe.order import Order, Places, Runs, by_expert, in_buffers, moved, part_of, spread, weighted_sum
from meshpar.moe.routing import count, kept, or_unassigned
from meshpar.planner import cost
from meshpar.sharding.types import problem

KERNEL = "dispatch"

ExpertFn: TypeAlias = Callable[[jax.Array, Any], jax.Array]
"""(rows [R, d] sorted by local expert, group_sizes int32 [E/N]) -> [R, d']; rows beyond the sum are unassigned."""


class Dispatched(NamedTuple):
    """What was sent where, as one rank sees it: int32, no gradient."""

    chosen: jax.Array
    """[E]: choices of this rank's tokens for each expert, dropped ones included."""
    received: jax.Array
    """[E/N]: rows that this rank's experts computed for the tokens of all ranks."""
    dropped: jax.Array
    """[]: choices of this rank's tokens that no expert computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Payload:
    """How rows travel: each number format "int8", "fp8" or None, as they are.

    Rows are quantized one by one, to nearest (`collectives.quantize`: a scale for each run of at most `block` numbers),
    and rounding counts as the identity in the gradient. DeepSeek-V3 (2024, section 3.3.2) dispatches in fp8 and
    combines in bf16.
    """

    dispatch: str | None = None
    """Tokens to their experts."""
    combine: str | None = None
    """What the experts made of them, back."""
    grad: str | None = None
    """The cotangents, both ways."""
    block: int = BLOCK

    def __post_init__(self) -> None:
        for name in ("dispatch", "combine", "grad"):
            if getattr(self, name) is not None:
                check_choice("Payload", name, getattr(self, name), FORMATS)
        checked_count("Payload", "block", self.block)


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
) -> tuple[Float[Array, "T e"], Dispatched]:
    """y[t] = sum over j of weights[t, j] expert_{experts[t, j]}(x[t]), with the experts spread over a mesh axis.

        per device x [T, d], experts [T, k], weights [T, k] -> y [T, d'];  of N ranks, r owns experts [r E/N, (r+1) E/N)
        2 all-to-alls forward and 2 backward of payload, and one all-gather forward of E counts (4 (N-1) E bytes)

    Dropless without a capacity, else in buffers: the module's docstring says what each form sends and
    drops, and what gradients are.

    Args:
      x: this rank's tokens; the same at all ranks of axes that cut the experts' width.
      experts: whom each token goes to, different ones; -1 (or whatever is no expert) for none: a token of padding, or
        all of a rank's.
      weights: of any floating dtype; those of no expert count nothing.
      expert_fn: computes rows sorted by local expert, of which there are `group_sizes`, as `grouped_matmul` does. With
        capacity every expert has N C rows, and the sizes are NumPy's; without, they sum to T k / chunks on the mean.
      axis: the axis of the experts, or several as one; a pair (outer, inner) for the hierarchical form.
      num_experts: E, in all.
      capacity: C; None: dropless.
      implementation: how rows travel: `fixed`, `ragged` (for GPUs, on whose mesh or on an abstract one it has to be
        traced), `hierarchical`, or `auto`: `choose_dispatch` says which and why.
      bound_factor: for dropless only: rows from one rank to another, in units of an even load; None: any routing fits.
      payload: number formats on the wire; None: as the rows are.
      chunks: cuts the tokens into so many parts, so that the messages of one may travel while another's experts
        compute; each has its own all-to-alls, capacity and bound.

    Raises:
      ValueError: no such axis here; shapes, dtypes or options that do not go together; experts that N does not divide.
    """
    num_ranks = ranks_of(KERNEL, axis)
    check_routed(KERNEL, x, experts, weights)
    _check_experts(num_experts, num_ranks)
    _check_chunks(chunks, x.shape[0])
    how = _checked_how(axis, capacity, bound_factor, implementation)
    check_payload(KERNEL, payload)
    experts = or_unassigned(experts, num_experts)
    _, x, weights = varying_alike(axis, experts, x, weights)
    (experts,) = varying_alike(axis, experts)  # and no further: so what is counted is the same at ranks of other axes
    size, (num_tokens, k) = x.shape[0] // chunks, experts.shape
    shape = _Shape(size, k, num_experts, num_ranks, (axis,) if isinstance(axis, str) else axis, how)
    payload = payload or Payload()
    path: _Dropless | _Capacity = _Dropless(shape, payload, bound_factor)
    if capacity is not None:
        path = _Capacity(shape, payload, min(capacity, size))
    parts = [slice(begin, begin + size) for begin in range(0, num_tokens, size)]
    outputs, stats = _pipelined(path, x, experts, weights, expert_fn, parts)
    return jnp.concatenate(outputs), Dispatched(*(sum(of[1:], of[0]) for of in zip(*stats, strict=True)))


def _pipelined(
    path: _Dropless | _Capacity,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    expert_fn: ExpertFn,
    parts: list[slice],
) -> tuple[list[jax.Array], list[Dispatched]]:
    """Chunk by chunk: while the experts of one compute, the one before travels back and the one after travels there.

    XLA would send all chunks first. The barriers have a chunk wait for the arrival of the one before, and its experts
    for those of the one before, so that there is something to compute while it is under way. Backward likewise.
    """
    waiting = [x[part] for part in parts]
    outputs, stats = [], []
    with jax.named_scope(KERNEL):
        one = path.out(waiting.pop(0), experts[parts[0]])
    rows = one.rows
    if waiting:
        rows, waiting[0] = lax.optimization_barrier((rows, waiting[0]))
    for part, after in itertools.zip_longest(parts, parts[1:]):
        if after is not None:
            with jax.named_scope(KERNEL):
                following = path.out(waiting.pop(0), experts[after])
        with jax.named_scope("experts"):
            made = _checked_rows(expert_fn(rows, one.sizes), rows)
        if after is not None:
            made, rows, waiting[:1] = lax.optimization_barrier((made, following.rows, waiting[:1]))
        with jax.named_scope("combine"):
            outputs.append(weighted_sum(path.back(made, one), weights[part], one.order))
        stats.append(one.stats)
        one = following if after is not None else one
    return outputs, stats


# ---- The two paths ---------------------------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """What is known when the program is traced, of one chunk."""

    tokens: int
    k: int
    num_experts: int
    num_ranks: int
    axis: tuple[str, ...]
    how: str

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def link(self, pair_rows: int) -> RowLink:
        return RowLink(self.axis, self.num_ranks, self.how, pair_rows, self.tokens * self.k)

    def counts_of_all(self, counts: jax.Array) -> jax.Array:
        """int32 [N from, N to, E/N], of every rank's [E]."""
        with jax.named_scope("counts"):
            gathered = counts[None] if self.num_ranks == 1 else lax.all_gather(counts, self.axis)
        return gathered.reshape(self.num_ranks, self.num_ranks, self.local_experts)

    def rank(self) -> jax.Array:
        return lax.axis_index(self.axis)


class _Arrived(NamedTuple):
    """Rows of this rank's experts, and what takes them back."""

    rows: jax.Array
    sizes: Any
    order: Order
    """Of this rank's own choices."""
    traffic: RowCounts | None
    runs: Runs | Places | None
    """From where rows came in to where they stand."""
    stats: Dispatched


class _Capacity(NamedTuple):
    """A buffer of `room` rows for every pair of rank and expert; all of them travel."""

    shape: _Shape
    payload: Payload
    room: int

    def out(self, x: jax.Array, experts: jax.Array) -> _Arrived:
        shape, room = self.shape, self.room
        order = in_buffers(experts, shape.num_experts, room)
        link = shape.link(shape.local_experts * room)
        parts = spread(x, order).reshape(shape.num_ranks, link.pair_rows, x.shape[1])
        parts = exchange.swapped(link, _coding(self.payload, "dispatch"), parts)
        rows = self._turned(parts.reshape(shape.num_ranks, shape.local_experts, room, x.shape[1]))
        sizes = np.full(shape.local_experts, shape.num_ranks * room, np.int32)
        return _Arrived(rows, sizes, order, None, None, self._stats(experts))

    def back(self, made: jax.Array, arrived: _Arrived) -> jax.Array:
        """[E C, d']: rows in the order of this rank's own choices."""
        shape = self.shape
        link, width = shape.link(shape.local_experts * self.room), made.shape[1]
        parts = self._turned(made.reshape(shape.local_experts, shape.num_ranks, self.room, width))
        parts = exchange.swapped(
            link, _coding(self.payload, "combine"), parts.reshape(shape.num_ranks, link.pair_rows, width)
        )
        return parts.reshape(-1, width)

    def _turned(self, parts: jax.Array) -> jax.Array:
        """[N, E/N, C, d] <-> [E/N, N, C, d], as rows."""
        return jnp.swapaxes(parts, 0, 1).reshape(-1, parts.shape[3])

    def _stats(self, experts: jax.Array) -> Dispatched:
        chosen = count(experts, self.shape.num_experts)
        fitting = jnp.minimum(chosen, self.room)
        received = self.shape.counts_of_all(fitting)[:, self.shape.rank()].sum(0, dtype=jnp.int32)
        return Dispatched(chosen, received, jnp.sum(chosen - fitting, dtype=jnp.int32))


class _Dropless(NamedTuple):
    """Rows sorted by expert, as many to each rank as there are."""

    shape: _Shape
    payload: Payload
    bound_factor: float | None

    @property
    def link(self) -> RowLink:
        shape = self.shape
        return shape.link(
            cost.dropless_rows(shape.tokens, shape.k, shape.num_experts, shape.num_ranks, self.bound_factor)
            // shape.num_ranks
        )

    def out(self, x: jax.Array, experts: jax.Array) -> _Arrived:
        shape, link = self.shape, self.link
        chosen = sent = count(experts, shape.num_experts)
        if link.pair_rows < link.send_rows:  # what a rank takes may be less than all, and who comes late is dropped
            _, fits = kept(experts // shape.local_experts, link.pair_rows, shape.num_ranks)
            experts = jnp.where(fits, experts, shape.num_experts)
            sent = count(experts, shape.num_experts)
        order, of_all = by_expert(experts, shape.num_experts), shape.counts_of_all(sent)
        traffic, mine = self._traffic(of_all), of_all[:, shape.rank()]
        came_in = exchange.sent_out(link, _coding(self.payload, "dispatch"), spread(x, order), traffic)
        stats = Dispatched(chosen, mine.sum(0, dtype=jnp.int32), jnp.sum(chosen - sent, dtype=jnp.int32))
        # Runs spare a CPU the rows that are not there. On GPUs, where all are read either way, places leave XLA the
        # freedom to let chunks travel while experts work: with runs it hid two exchanges of eight, with places four.
        on_cpu = choice.platform_of_mesh() == "cpu"
        runs = _runs_by_expert(mine, link.pair_rows) if on_cpu else _places_by_expert(mine, link.pair_rows)
        rows = came_in if runs is None else moved(came_in, runs, len(came_in))
        return _Arrived(rows, stats.received, order, traffic, runs, stats)

    def back(self, made: jax.Array, arrived: _Arrived) -> jax.Array:
        """[A, d']: rows in the order of this rank's own choices."""
        assert arrived.traffic is not None
        rows = made if arrived.runs is None else moved(made, arrived.runs.undone, len(made))
        return exchange.sent_back(self.link, _coding(self.payload, "combine"), rows, arrived.traffic)

    def _traffic(self, of_all: jax.Array) -> RowCounts:
        sums = of_all.sum(2, dtype=jnp.int32)  # [from, to]
        begins, rank = jnp.cumsum(sums, axis=1) - sums, self.shape.rank()
        return RowCounts(sums[rank], begins[rank], sums[:, rank], begins[:, rank])


def _begins(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where each rank's rows for each expert begin: among that rank's, and among all in the order of the experts."""
    of_experts = counts.sum(0, dtype=jnp.int32)
    before = (jnp.cumsum(of_experts) - of_experts) + (jnp.cumsum(counts, axis=0) - counts)
    return jnp.cumsum(counts, axis=1) - counts, before


def _runs_by_expert(counts: jax.Array, pair_rows: int) -> Runs | None:
    """Rows [N P] came in rank by rank, each rank's by expert, and are to stand in the order of the experts.

    Args:
      counts: int32 [N, E/N].

    Returns:
      A run for each expert and rank; None for one rank's, which stand so.
    """
    if len(counts) == 1:
        return None
    within, before = _begins(counts)
    begins = jnp.arange(len(counts), dtype=jnp.int32)[:, None] * pair_rows + within
    return Runs(begins.T.reshape(-1), before.T.reshape(-1), counts.T.reshape(-1))


def _places_by_expert(counts: jax.Array, pair_rows: int) -> Places:
    """The same motion, row by row."""
    num_ranks = len(counts)
    within, before = _begins(counts)
    at = jnp.arange(pair_rows, dtype=jnp.int32)
    shift = jnp.take_along_axis(before - within, part_of(within, pair_rows), axis=1)
    size = num_ranks * pair_rows
    back = jnp.where(at < counts.sum(1, dtype=jnp.int32)[:, None], at + shift, -1).reshape(size)
    to = jnp.full_like(back, -1).at[jnp.where(back < 0, size, back)].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    return Places(to, back)


def _coding(payload: Payload, way: str) -> Coding:
    return Coding(getattr(payload, way), payload.grad, payload.block)


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _check_experts(num_experts: int, num_ranks: int) -> None:
    checked_count(KERNEL, "num_experts", num_experts)
    if num_experts % num_ranks:
        raise problem(
            KERNEL,
            f"spread {num_experts} experts over {num_ranks} ranks",
            f"{num_experts} is not a multiple of {num_ranks}",
            f"take {-(-num_experts // num_ranks) * num_ranks} experts, or an axis whose size divides {num_experts}",
        )


def _checked_how(axis: Axis, capacity: int | None, bound_factor: float | None, implementation: str) -> str:
    """How rows travel."""
    check_choice(KERNEL, "implementation", implementation, IMPLEMENTATIONS)
    if capacity is not None:
        checked_count(KERNEL, "capacity", capacity)
    check_bound(KERNEL, bound_factor)
    is_dropless, is_pair = capacity is None, isinstance(axis, tuple) and len(axis) == 2
    if bound_factor is not None and not is_dropless:
        raise problem(
            KERNEL,
            f"use bound_factor={bound_factor!r} with capacity={capacity!r}",
            "buffers have their capacity for a bound",
            "leave out one of them",
        )
    if implementation == "ragged" and not is_dropless:
        raise problem(
            KERNEL,
            f"use implementation='ragged' with capacity={capacity!r}",
            "buffers of fixed capacity travel whole",
            "take implementation='fixed', or leave out the capacity",
        )
    if implementation == "ragged" and (platform := choice.platform_of_mesh()) not in (None, *GPUS):
        raise problem(
            KERNEL,
            f"use implementation='ragged' on {platform} devices",
            f"XLA has no ragged-all-to-all for {platform}",
            "leave it to 'auto', which is ragged where the program is compiled for GPUs, or take 'fixed'",
        )
    if implementation == "hierarchical" and not is_pair:
        raise problem(
            KERNEL,
            f"use implementation='hierarchical' over axis={axis!r}",
            "its two levels are two axes",
            'give axis=("outer", "inner"), across the nodes and inside them',
        )
    if implementation != "auto":
        return implementation
    if is_dropless:
        return "auto"  # the exchange decides when it is lowered, as `choose_dispatch` says
    return choose_dispatch(dropless=False, two_levels=is_pair).implementation


def check_bound(where: str, factor: Any) -> None:
    """Raises `ValueError` for a `bound_factor` that is neither a number above 0 nor None."""
    if factor is not None:
        check_positive(where, "bound_factor", factor, "2.0, say, in units of an even load, or None: any routing fits")


def check_payload(where: str, payload: object) -> None:
    """Raises `ValueError` for what is neither a `Payload` nor None."""
    if payload is not None and not isinstance(payload, Payload):
        exists = "it says of each way how rows travel"
        raise problem(where, f"use payload={payload!r}", exists, 'give moe.Payload(dispatch="int8"), say, or None')


def _check_chunks(chunks: int, num_tokens: int) -> None:
    checked_count(KERNEL, "chunks", chunks)
    if num_tokens % chunks:
        raise problem(
            KERNEL,
            f"cut {num_tokens} tokens into {chunks} chunks",
            f"{num_tokens} is not a multiple of {chunks}",
            f"give one of {', '.join(str(n) for n in range(1, num_tokens + 1) if num_tokens % n == 0)[:60]}",
        )


def _shown(made: Any) -> str:
    return f"an array of shape {made.shape}" if hasattr(made, "shape") else f"a {type(made).__name__}"


def _checked_rows(made: jax.Array, rows: jax.Array) -> jax.Array:
    if not hasattr(made, "dtype") or jnp.ndim(made) != 2 or made.shape[0] != rows.shape[0]:
        raise problem(
            f"{KERNEL}: expert_fn",
            f"give back {_shown(made)} for rows {rows.shape}",
            "there is one row for each that came in, in the same order",
            f"give [{rows.shape[0]}, width]",
        )
    if not jnp.issubdtype(made.dtype, jnp.floating):
        exists = "rows are summed with weights, which whole numbers would round"
        raise problem(f"{KERNEL}: expert_fn", f"give back an array of {made.dtype}", exists, "give a floating dtype")
    return made
