"""MoE layers timed: every way that tokens travel, against one-hot einsums.

Most JAX code sends tokens by matrix products with one-hot tensors [tokens, experts, capacity], whose work grows with
the square of a device's tokens. All layers here have the same router, the same weights and the same tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from meshpar.bench.figures import Figures, Measure, in_turn, load, quartiles
from meshpar.hardware.cost_model import matmul_flops
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.timeline import program_work as work
from meshpar.moe.dispatch_paths import Payload
from meshpar.moe.layer import Weights, moe_layer
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing, capacity, count, route
from meshpar.moe.transport_choice import NODE_FIRST
from meshpar.parallel import expert_parallel
from meshpar.sharding.context import use
from meshpar.sharding.printing import Plain, table
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import near, problem
from meshpar.sharding.units import si

ONE_HOT = "one-hot einsum"
PAIRED = ("two levels", NODE_FIRST)
"""Over two axes."""
FORMS = (ONE_HOT, "dropless", "dropless, bound 2", "dropless, 2 chunks", "dropless, int8", "buffers", *PAIRED)
FACTOR = 1.25
"""Of capacity, where there is one: that of Switch Transformers' training."""
NUM_EXPERTS = (8, 16, 64)
WINS_FROM = 16
"""Experts from which on sorting is to be quicker than one-hot einsums."""
COUNTED_TOKENS = 4096
"""Of the layer whose FLOPs and temporaries are counted."""

Program = Callable[[], object]


class LayerShape(NamedTuple):
    """Of a layer."""

    num_experts: int
    tokens: int
    """Of one device."""
    top_k: int
    width: int
    hidden: int
    num_ranks: int

    @property
    def dense_flops(self) -> int:
        """Forward and backward, every token through every expert; of all devices."""
        return 3 * 3 * matmul_flops(self.tokens * self.num_ranks * self.num_experts, self.width, self.hidden)

    @property
    def routed_flops(self) -> float:
        """k/E of that, and the router."""
        router = matmul_flops(self.tokens * self.num_ranks, self.width, self.num_experts)
        return self.dense_flops * self.top_k / self.num_experts + 3 * router

    @property
    def whole_bytes(self) -> int:
        """Of float32 numbers: one for every token, every expert and every place of the width, on all devices."""
        return 4 * self.tokens * self.num_ranks * self.num_experts * self.width


# ---- What most code does ---------------------------------------------------------------------------------------------


def one_hot(
    x: Float[Array, "T d"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    expert_fn: Callable[[jax.Array], jax.Array],
    *,
    axis: str,
    num_experts: int,
    room: int,
) -> Float[Array, "T e"]:
    """Dispatch and combine as one-hot einsums, per device over a mesh axis.

        [T, E, C] one-hot: token t has place c at expert e;  x [T, d] -> [E, C, d] -> all-to-all -> [E/N, N C, d]

    `2 T E C d` FLOPs each way beside the experts', with C = factor T k / E. First come, first served, as `dispatch`.

    Source: Shazeer et al. 2018, "Mesh-TensorFlow"; Lepikhin et al. 2020, "GShard" (algorithm 2); Fedus et al. 2022,
    "Switch Transformers" (appendix F).
    """
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.int32)
    counted = jnp.cumsum(chosen.reshape(-1, num_experts), axis=0).reshape(chosen.shape)
    place = jnp.max(counted * chosen, axis=1) - 1  # [T, E]; -1, and what is past the room, is no place: zeros
    mask = jax.nn.one_hot(place, room, dtype=x.dtype)
    gates = jnp.einsum("tk,tke->te", weights, chosen.astype(weights.dtype))
    sent = jnp.einsum("tec,td->ecd", mask, x)
    made = expert_fn(lax.all_to_all(sent, axis, 0, 1, tiled=True))
    back = lax.all_to_all(made, axis, 1, 0, tiled=True)
    return jnp.einsum("tec,ecd->td", gates[:, :, None].astype(x.dtype) * mask, back)


def one_hot_layer(
    x: jax.Array, weights: Weights, routing: Routing, mesh: Mesh
) -> tuple[Float[Array, "B T d"], Int[Array, ""]]:
    """(y, choices dropped) as of `moe_layer`, by `one_hot`: tokens and experts split over the mesh's axis `expert`."""

    def local(x: jax.Array, weights: Weights) -> tuple[jax.Array, jax.Array]:
        flat = x.reshape(-1, x.shape[-1])
        routed = route(flat @ weights.router, routing)

        def experts(rows: jax.Array) -> jax.Array:
            gate, up = (jnp.einsum("ecd,edf->ecf", rows, weight) for weight in (weights.gate, weights.up))
            return jnp.einsum("ecf,efd->ecd", jax.nn.silu(gate) * up, weights.down)

        room = capacity(len(flat), routing)
        y = one_hot(
            flat, routed.experts, routed.weights, experts, axis="expert", num_experts=routing.num_experts, room=room
        )
        over = jnp.maximum(count(routed.experts, routing.num_experts) - room, 0)
        return y.reshape(x.shape), lax.psum(jnp.sum(over), "expert")

    whole, split = P(), P("expert")
    specs = (split, Weights(whole, split, split, split))  # type: ignore[arg-type]
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(split, whole))(x, weights)


# ---- Programs --------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer of one form."""

    mesh: Mesh
    apply: Callable[[jax.Array, Weights], tuple[jax.Array, jax.Array]]
    """(x, weights) -> (y, choices dropped)."""


def layer(form: str, shape: LayerShape) -> Layer:
    """The layer of a form, traced on the first `num_ranks` devices."""
    options: dict[str, dict[str, Any]] = {
        "dropless, bound 2": {"bound_factor": 2.0},
        "dropless, 2 chunks": {"chunks": 2},
        "dropless, int8": {"payload": Payload(dispatch="int8", combine="int8", grad="int8")},
        "two levels": {"implementation": "hierarchical"},
        NODE_FIRST: {"implementation": NODE_FIRST},
    }
    factor = FACTOR if form in (ONE_HOT, "buffers", "two levels") else None
    routing = Routing(num_experts=shape.num_experts, top_k=shape.top_k, capacity_factor=factor)
    config = MoEConfig(routing=routing, mlp_dim=shape.hidden, **options.get(form, {}))
    outer = 2 if shape.num_ranks % 2 == 0 else 1
    sizes = {"outer": outer, "inner": shape.num_ranks // outer} if form in PAIRED else {"expert": shape.num_ranks}
    devices = np.array(jax.devices()[: shape.num_ranks]).reshape(tuple(sizes.values()))
    mesh = Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    rules = expert_parallel().activations | Rules(batch=tuple(sizes), act_expert=tuple(sizes))

    def ours(x: jax.Array, weights: Weights) -> tuple[jax.Array, jax.Array]:
        with use(mesh, rules):
            y, stats = moe_layer(x, weights, config)
        return y, stats.dropped

    def theirs(x: jax.Array, weights: Weights) -> tuple[jax.Array, jax.Array]:
        return one_hot_layer(x, weights, routing, mesh)

    return Layer(mesh, theirs if form == ONE_HOT else ours)


def arrays(shape: LayerShape, mesh: Mesh, *, abstract: bool = False) -> tuple[jax.Array, Weights, jax.Array]:
    """Tokens [N, T, d], weights, and the cotangent of y."""
    split, whole = NamedSharding(mesh, P(tuple(mesh.axis_names))), NamedSharding(mesh, P())
    rng = np.random.default_rng(0)

    def made(sharding: NamedSharding, scale: float, *dims: int) -> Any:
        if abstract:
            return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=sharding)
        return jax.device_put((scale * rng.standard_normal(dims)).astype(np.float32), sharding)

    tokens = shape.num_ranks, shape.tokens, shape.width
    inward = shape.num_experts, shape.width, shape.hidden
    weights = Weights(
        router=made(whole, shape.width**-0.5, shape.width, shape.num_experts),
        gate=made(split, shape.width**-0.5, *inward),
        up=made(split, shape.width**-0.5, *inward),
        down=made(split, shape.hidden**-0.5, shape.num_experts, shape.hidden, shape.width),
    )
    return made(split, 1.0, *tokens), weights, made(split, 1.0, *tokens)


def compiled(made: Layer, shape: LayerShape, *, abstract: bool = False) -> tuple[Any, Any, tuple[Any, ...]]:
    """(forward, forward and backward, their arguments): the gradients are of the tokens and of all weights."""

    def loss(x: jax.Array, weights: Weights, cotangent: jax.Array) -> jax.Array:
        return jnp.sum(made.apply(x, weights)[0] * cotangent)

    given = arrays(shape, made.mesh, abstract=abstract)
    forward = jax.jit(made.apply).lower(*given[:2]).compile()
    both = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*given).compile()
    return forward, both, given


# ---- What was found --------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Median and quartiles, and the median of the ratios to one-hot einsums, round by round."""

    median_s: float
    low_s: float
    high_s: float
    ratio: float | None
    """None where one-hot einsums were not measured."""

    @staticmethod
    def of(seconds: Sequence[float], theirs: Sequence[float] | None) -> Times:
        low, median, high = quartiles(seconds)
        ratio = None
        if theirs is not None:
            ratio = statistics.median(one / other for one, other in zip(seconds, theirs, strict=True))
        return Times(median, low, high, ratio)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoERow(Plain):
    """One form of a layer, with so many experts."""

    form: str
    num_experts: int
    forward: Times
    both: Times
    """Forward and backward."""
    flops: int
    """Of matrix products, forward and backward, of one device; loops counted by trips."""
    temporary_bytes: int
    """Of one device, forward and backward."""
    largest_bytes: int
    """The largest array among them."""
    largest: str
    """Its shape, and where in the layer."""
    dropped: float
    """Share of the choices that no expert computed."""

    @property
    def cells(self) -> tuple[str, ...]:
        forward, both = self.forward, self.both
        return (
            self.form, str(self.num_experts), f"{forward.median_s * 1e3:.1f}", _ratio(forward.ratio),
            f"{both.median_s * 1e3:.1f}", f"{both.low_s * 1e3:.1f} – {both.high_s * 1e3:.1f}", _ratio(both.ratio),
            f"{self.flops / 1e6:.0f}", si(self.temporary_bytes, "B"), si(self.largest_bytes, "B"),
            f"{self.dropped:.1%}",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers(Plain):
    """Measured MoE layers. Prints as tables."""

    shape: dict[str, int]
    """Of the layers, but for the number of experts."""
    repeats: int
    load: tuple[float, float]
    """The machine's, over a minute, before and after."""
    rows: tuple[MoERow, ...]
    measures: tuple[Measure, ...]

    def to_json(self) -> dict[str, Any]:
        found = super().to_json()
        return {**found.pop("shape"), **found, "cores": os.cpu_count()}

    def __rich__(self) -> Any:
        from rich.console import Group

        shape = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.shape.items())
        columns = (
            "form", "E", "forward ms", "÷", "both ms", "quartiles", "÷", "MFLOP", "temporaries", "largest", "dropped"
        )  # fmt: skip
        by_experts = itertools.groupby(self.rows, lambda row: row.num_experts)
        cells = [cells for _, same in by_experts for cells in ((), *(row.cells for row in same))]
        measured = table(f"an MoE layer: {shape}; {self.repeats} repeats", columns, cells[1:], left=("form",))
        before, after = self.load
        note = (
            f"both: forward and backward. ÷: over {ONE_HOT} of the same round. FLOPs and bytes are of one device. "
            f"Load of the machine {before:.1f} before, {after:.1f} after, {os.cpu_count()} cores."
        )
        return Group(measured, Figures(title="experts", measures=self.measures), note)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


# ---- Measuring -------------------------------------------------------------------------------------------------------


def layers(
    *,
    forms: Sequence[str] = FORMS,
    num_experts: Sequence[int] = NUM_EXPERTS,
    tokens: int = 1024,
    top_k: int = 2,
    width: int = 64,
    hidden: int = 128,
    repeats: int = 5,
    progress: Callable[[str], None] = lambda line: None,
) -> Layers:
    """Measure a layer of SwiGLU experts in every form, over all devices along one axis.

    Raises:
      ValueError: an unknown form; numbers that are none; experts that the devices do not divide.
    """
    shapes = [LayerShape(num, tokens, top_k, width, hidden, len(jax.devices())) for num in num_experts]
    _check(forms, shapes, repeats)
    before = load()
    rows = [row for shape in shapes for row in _rows(forms, shape, repeats, progress)]
    measures = [*_wins(rows)]
    if "dropless" in forms:
        progress("FLOPs and temporaries")
        measures += _counted(shapes[0])
    of_all = {"ranks": len(jax.devices()), "tokens": tokens, "top_k": top_k, "width": width, "hidden": hidden}
    return Layers(
        shape=of_all, repeats=repeats, load=(before, load()), rows=tuple(rows), measures=tuple(measures)
    )  # fmt: skip


def _check(forms: Sequence[str], shapes: Sequence[LayerShape], repeats: int) -> None:
    where = "bench moe"
    for form in forms:
        if form not in FORMS:
            raise problem(where, f"measure `{form}`", "there is no such form", near(form, FORMS))
    for shape in shapes:
        if min(shape) < 1 or repeats < 1:
            raise problem(
                where, f"measure {shape}, {repeats} times", "all of these are counted from 1", "give larger numbers"
            )
        if shape.num_experts % shape.num_ranks or shape.top_k > shape.num_experts:
            raise problem(
                where, f"measure {shape.num_experts} experts, {shape.top_k} a token, on {shape.num_ranks} devices",
                "every device has as many experts, and there are enough for a token",
                f"give a multiple of {shape.num_ranks}, no less than {shape.top_k}",
            )  # fmt: skip


def _rows(forms: Sequence[str], shape: LayerShape, repeats: int, progress: Callable[[str], None]) -> list[MoERow]:
    made = {}
    for form in forms:
        progress(f"{form}, {shape.num_experts} experts")
        made[form] = compiled(layer(form, shape), shape)
    progress(f"{shape.num_experts} experts, timed")
    times = {}
    for at, way in ((0, "forward"), (1, "both")):
        programs = {form: _program(found[at], found[2][: 2 + at]) for form, found in made.items()}
        times[way] = in_turn(programs, repeats)
    rows = []
    for form, (forward, both, given) in made.items():
        module = hlo.parse(both.as_text())
        (largest,) = work.largest_temporaries(module, 1)
        rows.append(
            MoERow(
                form=form, num_experts=shape.num_experts,
                forward=Times.of(times["forward"][form], times["forward"].get(ONE_HOT)),
                both=Times.of(times["both"][form], times["both"].get(ONE_HOT)),
                flops=work.flops_per_step(module), temporary_bytes=both.memory_analysis().temp_size_in_bytes,
                largest_bytes=largest.nbytes, largest=f"{largest.shape} {largest.module}".strip(),
                dropped=int(forward(*given[:2])[1]) / (shape.tokens * shape.num_ranks * shape.top_k),
            )
        )  # fmt: skip
    return rows


def _program(program: Any, given: tuple[Any, ...]) -> Program:
    return lambda: jax.block_until_ready(program(*given))


def _wins(rows: Sequence[MoERow]) -> list[Measure]:
    """Sorted rows, with room for any routing and for twice the mean, against one-hot einsums: below one, quicker."""
    return [
        Measure(
            name=f"{row.form} ÷ {ONE_HOT}, {row.num_experts} experts, {what}", value=times.ratio, unit="×",
            limit=1.0 if row.num_experts >= WINS_FROM else None,
            detail=f"{times.median_s * 1e3:.1f} ms; {ONE_HOT} drop what is over {FACTOR} times the mean load",
        )
        for row in rows
        if row.form in ("dropless", "dropless, bound 2")
        for what, times in (("forward", row.forward), ("forward and backward", row.both))
        if times.ratio is not None
    ]  # fmt: skip


def _counted(like: LayerShape) -> list[Measure]:
    """FLOPs and temporaries of a layer that is only compiled: on all devices, and on one that has all tokens."""
    found = []
    for num_ranks in sorted({1, like.num_ranks}):
        num_experts = math.lcm(WINS_FROM, num_ranks)
        shape = like._replace(num_experts=num_experts, num_ranks=num_ranks, tokens=-(-COUNTED_TOKENS // num_ranks))
        _, both, _ = compiled(layer("dropless", shape), shape, abstract=True)
        module = hlo.parse(both.as_text())
        (largest,) = work.largest_temporaries(module, 1)
        where = f"{shape.num_experts} experts, {shape.tokens * num_ranks} tokens on {num_ranks} " + (
            "device" if num_ranks == 1 else "devices"
        )
        flops = work.flops_per_step(module) * num_ranks
        found += [
            Measure(
                name=f"FLOPs of dropless, {where}", value=flops / shape.routed_flops, unit="×", limit=1.1,
                detail=f"÷ k/E of every token through every expert, and the router; "
                f"{flops / shape.dense_flops:.3f} of dense",
            ),
            Measure(
                name=f"largest temporary of dropless, {where}", value=largest.nbytes / shape.whole_bytes, unit="×",
                limit=0.99, detail=f"÷ tokens x experts x width; {largest.shape} {largest.module}".strip(),
            ),
        ]  # fmt: skip
    return found
