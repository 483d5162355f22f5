"""dispatch: routed tokens to the ranks of their experts, through the experts, and the weighted sum back.

    x [T, d] ──sort by expert──► rows ──all-to-all──► rows of my experts ──expert_fn──► ──all-to-all──► y [T, d']

Two payload all-to-alls forward and two backward, whatever the routing. What they carry is differentiated by hand, each
by the other one's transpose, and so are all other motions: gathers, or on CPUs loops over blocks of the rows there are.
No scatter of rows, and nothing of the size of tokens x experts x width.

*Dropless* (`capacity=None`): choices are sorted by expert, and every one is computed. A rank may be sent
P = T min(k, E/N) rows by each other one, for the choices of a token are different experts: that is the bound all arrays
have, N P rows, for every routing (`cost_model.dropless_rows`; `dropless_bytes` in all). Only rows there are travel in
the ragged form, T k d numbers of which (N-1)/N leave the rank if routing is even; in the fixed form N P d, of which
(N-1)/N. With `bound_factor` f, P is f T k / N where that is less, and what is over is dropped.

*Capacity*: every expert takes C choices of each rank (`routing.capacity` says how many for a factor), and the buffers
[E, C, d] travel whole (Lepikhin et al. 2020, "GShard", with buffers by rank; Fedus et al. 2022, "Switch Transformers").
It is the form for experts that choose, too: k = E columns cost no room.

*Node-first* (`implementation="node-first"`, dropless over two axes: M nodes of K ranks): a token goes once to each node
that it visits, to the rank of its own place there, with its choices and their weights; that rank hands it on to its
experts in the node and sends one weighted sum back. Of T tokens that visit v nodes each, T v d numbers go across the
nodes each way, of which (M-1)/M leave the node, where every other form sends T k d; T k d as before go inside. Weights
are done with before the way home, so recomputing a layer for its gradient does not repeat that across the nodes.
DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.2: k = 8 choices in v = 4 nodes.

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

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.collectives.kernel_checks import Axis, check_choice, checked_count, ranks_of
from meshpar.collectives.wire import varying_alike
from meshpar.moe import transport_choice as choice
from meshpar.moe.argument_checks import check_positive, check_routed
from meshpar.moe.dispatch_paths import Capacity, Dispatched, Dropless, NodeFirst, Path, Payload, Shape
from meshpar.moe.routing import or_unassigned
from meshpar.moe.transport_choice import GPUS, IMPLEMENTATIONS, NODE_FIRST, TWO_LEVELS, choose_dispatch
from meshpar.sharding.types import problem

KERNEL = "dispatch"

ExpertFn: TypeAlias = Callable[[jax.Array, Any], jax.Array]
"""(rows [R, d] sorted by local expert, group_sizes int32 [E/N]) -> [R, d']; rows beyond the sum are unassigned."""


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
    """y[t] = sum over j of weights[t, j] expert_{experts[t, j]}(x[t]), with the experts spread over a mesh axis.

        per device x [T, d], experts [T, k], weights [T, k] -> y [T, d'];  of N ranks, r owns experts [r E/N, (r+1) E/N)
        2 all-to-alls forward and 2 backward of payload, and one forward of E/N + 1 counts for each rank

    Dropless without a capacity, else in buffers: the module's docstring says what each form sends and
    drops, and what gradients are.

    Args:
      x: this rank's tokens; the same at all ranks of axes that cut the experts' width.
      experts: whom each token goes to, different ones; -1 (or whatever is no expert) for none: a token of padding, or
        all of a rank's.
      weights: of any floating dtype; those of no expert count nothing.
      expert_fn: computes rows sorted by local expert, of which there are `group_sizes`, as `grouped_matmul` does. With
        capacity every expert has N C rows, and the sizes are NumPy's; without, they sum to T k / chunks on the mean.
      axis: the axis of the experts, or several as one; a pair (outer, inner) for the forms in two levels.
      num_experts: E, in all.
      capacity: C; None: dropless.
      implementation: how rows travel: `fixed`, `ragged` (traced for GPUs or on an abstract mesh), `hierarchical`,
        `node-first` (dropless only), or `auto`: `choose_dispatch` says which and why.
      bound_factor: for dropless only: rows from one rank to another, in units of an even load; None: any routing fits.
      payload: number formats on the wire; None: as the rows are.
      chunks: parts of the tokens, so that the messages of one may travel while another's experts compute; each has its
        own all-to-alls, capacity and bound.
      nodes_per_token: for `node-first`: nodes that a token's experts lie on at the most; choices on more are dropped.

    Raises:
      ValueError: no such axis here; shapes, dtypes or options that do not go together; experts that N does not divide.
    """
    check_routed(KERNEL, x, experts, weights)
    _check_experts(num_experts, num_ranks := ranks_of(KERNEL, axis))
    _check_chunks(chunks, x.shape[0])
    how = _checked_how(axis, capacity, bound_factor, implementation)
    check_payload(KERNEL, payload)
    nodes = _checked_nodes(axis, how, experts.shape[1], nodes_per_token)
    experts = or_unassigned(experts, num_experts)
    _, x, _ = varying_alike(axis, experts, x, weights)
    # And no further: so what is counted is the same at ranks of other axes.
    (experts,), (weights,) = varying_alike(axis, experts), varying_alike(axis, weights)
    size, names = x.shape[0] // chunks, (axis,) if isinstance(axis, str) else axis
    shape = Shape(size, experts.shape[1], num_experts, num_ranks, names, how)
    path = _path(shape, payload or Payload(), capacity, bound_factor, nodes)
    parts = [slice(begin, begin + size) for begin in range(0, len(x), size)]
    outputs, stats = _pipelined(path, x, experts, weights, expert_fn, parts)
    return jnp.concatenate(outputs), Dispatched(*(sum(of[1:], of[0]) for of in zip(*stats, strict=True)))


def _path(
    shape: Shape, payload: Payload, capacity: int | None, bound_factor: float | None, nodes: tuple[int, int]
) -> Path:
    if capacity is not None:
        return Capacity(shape, payload, min(capacity, shape.tokens))
    if shape.how == NODE_FIRST:
        return NodeFirst.of(shape, payload, bound_factor, *nodes)
    return Dropless.of(shape, payload, bound_factor)


def _pipelined(
    path: Path, x: jax.Array, experts: jax.Array, weights: jax.Array, expert_fn: ExpertFn, parts: list[slice]
) -> tuple[list[jax.Array], list[Dispatched]]:
    """Chunk by chunk: while the experts of one compute, the one before travels back and the one after travels there.

    XLA would send all chunks first. The barriers have a chunk wait for the arrival of the one before, and its experts
    for those of the one before, so that there is something to compute while it is under way. Backward likewise.
    """
    waiting = [x[part] for part in parts]
    outputs, stats = [], []
    with jax.named_scope(KERNEL):
        one = path.out(waiting.pop(0), experts[parts[0]], weights[parts[0]])
    rows = one.rows
    if waiting:
        rows, waiting[0] = lax.optimization_barrier((rows, waiting[0]))
    for after in [*parts[1:], None]:
        if after is not None:
            with jax.named_scope(KERNEL):
                following = path.out(waiting.pop(0), experts[after], weights[after])
        with jax.named_scope("experts"):
            made = _checked_rows(expert_fn(rows, one.sizes), rows)
        if after is not None:
            made, rows, waiting[:1] = lax.optimization_barrier((made, following.rows, waiting[:1]))
        with jax.named_scope("combine"):
            outputs.append(path.back(made, one))
        stats.append(one.stats)
        one = following if after is not None else one
    return outputs, stats


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _check_experts(num_experts: int, num_ranks: int) -> None:
    checked_count(KERNEL, "num_experts", num_experts)
    if num_experts % num_ranks:
        asked = f"spread {num_experts} experts over {num_ranks} ranks"
        fix = f"take {-(-num_experts // num_ranks) * num_ranks} experts, or an axis whose size divides {num_experts}"
        raise problem(KERNEL, asked, f"{num_experts} is not a multiple of {num_ranks}", fix)


def _checked_how(axis: Axis, capacity: int | None, bound_factor: float | None, implementation: str) -> str:
    """How rows travel."""
    check_choice(KERNEL, "implementation", implementation, IMPLEMENTATIONS)
    if capacity is not None:
        checked_count(KERNEL, "capacity", capacity)
    check_bound(KERNEL, bound_factor)
    is_dropless, is_pair = capacity is None, isinstance(axis, tuple) and len(axis) == 2
    if bound_factor is not None and not is_dropless:
        asked = f"use bound_factor={bound_factor!r} with capacity={capacity!r}"
        raise problem(KERNEL, asked, "buffers have their capacity for a bound", "leave out one of them")
    if implementation == "ragged" and not is_dropless:
        exists, fix = "buffers of fixed capacity travel whole", "take implementation='fixed', or leave out the capacity"
        raise problem(KERNEL, f"use implementation='ragged' with capacity={capacity!r}", exists, fix)
    if implementation == "ragged" and (platform := choice.platform_of_mesh()) not in (None, *GPUS):
        asked = f"use implementation='ragged' on {platform} devices"
        fix = "leave it to 'auto', which is ragged where the program is compiled for GPUs, or take 'fixed'"
        raise problem(KERNEL, asked, f"XLA has no ragged-all-to-all for {platform}", fix)
    if implementation == NODE_FIRST and not is_dropless:
        asked = f"use implementation='node-first' with capacity={capacity!r}"
        fix = "take implementation='hierarchical', or leave out the capacity"
        raise problem(KERNEL, asked, "buffers of fixed capacity have a row for every choice", fix)
    if implementation in TWO_LEVELS and not is_pair:
        asked, exists = f"use implementation={implementation!r} over axis={axis!r}", "its two levels are two axes"
        raise problem(KERNEL, asked, exists, 'give axis=("outer", "inner"), across the nodes and inside them')
    if implementation != "auto":
        return implementation
    if is_dropless:
        return "auto"  # the exchange decides when it is lowered, as `choose_dispatch` says
    return choose_dispatch(dropless=False, two_levels=is_pair).implementation


def _checked_nodes(axis: Axis, how: str, k: int, nodes_per_token: int | None) -> tuple[int, int]:
    """(nodes, how many of them a token visits at the most), node-first."""
    if nodes_per_token is not None:
        checked_count(KERNEL, "nodes_per_token", nodes_per_token)
        if how != NODE_FIRST:
            exists = f"implementation={how!r} sends a row for every choice, whatever node it is for"
            fix = "take implementation='node-first', or leave it out"
            raise problem(KERNEL, f"use nodes_per_token={nodes_per_token}", exists, fix)
    nodes = ranks_of(KERNEL, axis[0]) if how == NODE_FIRST else 1
    return nodes, min(nodes, k, nodes_per_token or nodes)


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
        asked = f"cut {num_tokens} tokens into {chunks} chunks"
        fix = f"give one of {', '.join(str(n) for n in range(1, num_tokens + 1) if num_tokens % n == 0)[:60]}"
        raise problem(KERNEL, asked, f"{num_tokens} is not a multiple of {chunks}", fix)


def _shown(made: Any) -> str:
    return f"an array of shape {made.shape}" if hasattr(made, "shape") else f"a {type(made).__name__}"


def _checked_rows(made: jax.Array, rows: jax.Array) -> jax.Array:
    if not hasattr(made, "dtype") or jnp.ndim(made) != 2 or made.shape[0] != rows.shape[0]:
        exists, fix = "there is one row for each that came in, in the same order", f"give [{rows.shape[0]}, width]"
        raise problem(f"{KERNEL}: expert_fn", f"give back {_shown(made)} for rows {rows.shape}", exists, fix)
    if not jnp.issubdtype(made.dtype, jnp.floating):
        exists = "rows are summed with weights, which whole numbers would round"
        raise problem(f"{KERNEL}: expert_fn", f"give back an array of {made.dtype}", exists, "give a floating dtype")
    return made
