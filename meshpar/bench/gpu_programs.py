"""The programs that `meshpar bench gpu` measures, with their priorities."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import shape_key
from meshpar.hardware.grouped_kernels import OPERANDS, has_triton
from meshpar.inspect.model_flops import forward_of
from meshpar.models.attention import KERNELS, AttentionQuery, causal_attention
from meshpar.moe import tokamax_kernels
from meshpar.moe.grouped import grouped_matmul
from meshpar.runs.recipe import Recipe, batch_shapes, build_model, build_optimizer, build_step
from meshpar.sharding.jaxprs import equations
from meshpar.training.state import abstract_state

MIN_COPIED_BYTES = 64_000_000
"""Minimum size of the copied array, larger than the caches."""
CHAINED = 32
"""Number of kernels in a chain. A chain of twice the length has the same overhead, so the difference is kernel time."""
E4M3 = jnp.float8_e4m3fn
MAX_PLAIN = 4096
"""Largest sequence length of attention without a library kernel, whose scores need memory or whose loops are slow."""
MOST_SHAPES = 6
"""Number of weights of a recipe whose matmuls are measured, by FLOPs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the measured programs."""

    matmuls: tuple[int, ...]
    """Values of n for `[n, n] @ [n, n]`, the most important first."""
    copied_bytes: int
    """Size of the copied array, larger than the caches."""
    attention: tuple[tuple[int, int], ...]
    """(head size, sequence length)."""
    heads_bytes: int
    """Bytes of the queries of an attention call in bfloat16, which determine the number of heads and examples."""
    grouped: tuple[int, int, int, int]
    """Rows, groups, input size and output size of a grouped matmul."""


LARGE = Sizes(
    matmuls=(8192, 4096, 2048, 16_384, 1024, 512), copied_bytes=1 << 30,
    attention=((128, 8192), (128, 2048), (64, 8192), (128, 4096), (256, 8192), (64, 2048)),
    heads_bytes=1 << 27, grouped=(32_768, 16, 2048, 4096),
)  # fmt: skip
"""Sizes on GPUs."""
SMALL = Sizes(
    matmuls=(512, 256, 128, 64), copied_bytes=MIN_COPIED_BYTES, attention=((16, 128), (16, 64)), heads_bytes=1 << 14,
    grouped=(256, 4, 32, 64),
)  # fmt: skip
"""Sizes on CPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A program whose time is measured."""

    kind: str
    """Field of the result: `matmuls`, `matmuls_fp8`, `shapes`, `attention`, `grouped`, `copy` or `launch`."""
    key: str
    """Key in the field, as in a profile (`meshpar.hardware.kernel_rates`); empty for fields without keys."""
    size: int
    """Size below the key."""
    priority: int
    """Programs with large numbers are dropped first if there is no time for them."""
    function: Callable[..., Any]
    args: tuple[jax.ShapeDtypeStruct, ...]
    work: float
    """FLOPs, bytes or launches. A backward pass does not include the forward pass."""
    calls: int = 1
    """Number of times that the program does the work."""
    minus: str = ""
    """Name of the measurement whose time is subtracted, such as the forward pass; empty for none."""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kind, self.key, f"{self.size:,}" if self.size else "")))


def measurements(sizes: Sizes, dtype: str, device: jax.Device, recipe: Recipe | None = None) -> list[Measurement]:
    """Return the programs that run on a device, in the order of their priority."""
    capability = _capability(device)
    found = [*_matmuls(sizes, dtype, capability), *_memory(sizes), *_attention(sizes, device, capability)]
    found += _grouped(sizes, capability)
    if recipe is not None:
        found += _shapes(recipe, capability)
    # Matmuls of a recipe with equal shapes are measured once.
    return sorted({each.name: each for each in found}.values(), key=lambda each: each.priority)


def _capability(device: jax.Device) -> tuple[int, int]:
    major, _, minor = str(getattr(device, "compute_capability", "0.0")).partition(".")
    return int(major), int(minor or 0)


def has_fp8(capability: tuple[int, int]) -> bool:
    """Return whether GPUs with this compute capability have 8-bit matmuls."""
    return capability >= (8, 9)


def _matmuls(sizes: Sizes, dtype: str, capability: tuple[int, int]) -> Iterator[Measurement]:
    for priority, n in enumerate(sizes.matmuls):
        like = jax.ShapeDtypeStruct((n, n), jnp.dtype(dtype))
        common: dict[str, Any] = {"key": "", "size": n, "work": cost.matmul_flops(n, n, n)}
        # A chain of small matmuls, because a program starts more slowly than a small matmul runs.
        calls = max(max(sizes.matmuls) // (4 * n), 1) ** 3
        chain = functools.partial(_matmuls_in_turn, calls=calls)
        yield Measurement(kind="matmuls", priority=priority, function=chain, args=(like, like), calls=calls, **common)
        if has_fp8(capability) and n >= 1024:
            narrow = jax.ShapeDtypeStruct((n, n), E4M3)
            yield Measurement(kind="matmuls_fp8", priority=priority + 1, function=_fp8, args=(narrow, narrow), **common)


def _matmuls_in_turn(a: jax.Array, b: jax.Array, *, calls: int) -> jax.Array:
    return lax.fori_loop(0, calls, lambda _, x: jnp.matmul(x, b), a) if calls > 1 else jnp.matmul(a, b)


def _fp8(a: jax.Array, b: jax.Array) -> jax.Array:
    # The scale is in float32, as in 8-bit matmuls of a step, so that XLA can choose cuBLASLt's kernel.
    return (jnp.matmul(a, b, preferred_element_type=jnp.float32) * 1e-3).astype(jnp.bfloat16)


def _memory(sizes: Sizes) -> Iterator[Measurement]:
    array = jax.ShapeDtypeStruct((sizes.copied_bytes // 4,), jnp.float32)
    yield Measurement(
        kind="copy", key="", size=0, priority=0, function=lambda x: x + 1, args=(array,), work=2 * sizes.copied_bytes
    )
    few = jax.ShapeDtypeStruct((8,), jnp.float32)
    for count in (CHAINED, 2 * CHAINED):
        chain = functools.partial(_chain, count=count)
        minus = "" if count == CHAINED else f"launch {CHAINED}"
        yield Measurement(
            kind="launch", key="", size=count, priority=0, function=chain, args=(few,), work=CHAINED, minus=minus
        )


def _chain(x: jax.Array, count: int) -> jax.Array:
    for _ in range(count):  # barriers keep XLA from fusing the kernels
        x = lax.optimization_barrier(x + 1)
    return x


def _attention(sizes: Sizes, device: jax.Device, capability: tuple[int, int]) -> Iterator[Measurement]:
    for name, kernel in KERNELS.items():
        # tokamax uses its Mosaic kernels from Hopper on.
        label = name if name != "tokamax" else "mosaic" if capability >= (9, 0) else "triton"
        for order, (head_dim, seq_len) in enumerate(sizes.attention):
            query = AttentionQuery(head_dim=head_dim, seq_len=seq_len)
            is_plain = name in ("xla", "blockwise")
            if kernel.runs(query, device.platform, capability) or kernel.supports(query):
                continue
            if is_plain and seq_len > MAX_PLAIN:
                continue
            heads = max(sizes.heads_bytes // (2 * head_dim * seq_len), 1)
            like = jax.ShapeDtypeStruct((1, seq_len, heads, head_dim), jnp.bfloat16)
            forward = functools.partial(causal_attention, implementation=name)
            flops = 2 * heads * seq_len * seq_len * head_dim
            priority = order + (3 if is_plain else name == "tokamax")
            common: dict[str, Any] = {"kind": "attention", "size": seq_len, "priority": priority}
            first = Measurement(
                **common, key=f"{label} forward causal {head_dim}", function=forward, args=(like,) * 3, work=flops
            )
            yield first
            both = functools.partial(_with_gradients, forward)
            yield Measurement(
                **common, key=f"{label} backward causal {head_dim}", function=both, args=(like,) * 4, work=2.5 * flops,
                minus=first.name,
            )  # fmt: skip


def _with_gradients(function: Callable[..., jax.Array], *args: jax.Array) -> Any:
    y, pull = jax.vjp(function, *args[:-1])
    return y, pull(args[-1])


def _grouped(sizes: Sizes, capability: tuple[int, int]) -> Iterator[Measurement]:
    num_rows, num_groups, d, f = sizes.grouped
    rows, grad = (jax.ShapeDtypeStruct((num_rows, width), jnp.bfloat16) for width in (d, f))
    weights = jax.ShapeDtypeStruct((num_groups, d, f), jnp.bfloat16)
    args = {"product": (rows, weights), "rows": (grad, weights), "weights": (rows, grad)}
    group_sizes = np.full(num_groups, num_rows // num_groups, np.int32)
    n = round((num_rows * d * f / num_groups) ** (1 / 3))
    on_hopper = capability[0] == 9 and importlib.util.find_spec("tokamax") is not None
    for kernel in ("mosaic", *["triton"] * has_triton()) if on_hopper else ("blocked",):
        for operand in OPERANDS:
            run = _blocked if kernel == "blocked" else functools.partial(_tokamax, kernel)
            yield Measurement(
                kind="grouped", key=f"{kernel} {operand}", size=n, priority=2,
                function=functools.partial(run, operand, group_sizes), args=args[operand],
                work=2 * num_rows * d * f,
            )  # fmt: skip


def _tokamax(kernel: str, operand: str, sizes: np.ndarray, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    run = {
        "product": tokamax_kernels.product, "rows": tokamax_kernels.rows_gradient,
        "weights": tokamax_kernels.weights_gradient,
    }[operand]  # fmt: skip
    return run(lhs, rhs, jnp.asarray(sizes), kernel=kernel, typical_rows=lhs.shape[0])


def _blocked(operand: str, sizes: np.ndarray, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Compute the product or a gradient with the blocked implementation. XLA removes the unused results."""

    def product(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return grouped_matmul(rows, weights, jnp.asarray(sizes), implementation="blocked")

    if operand == "product":
        return product(lhs, rhs)
    if operand == "rows":
        _, pull = jax.vjp(product, jnp.zeros((lhs.shape[0], rhs.shape[1]), lhs.dtype), rhs)
        return pull(lhs)[0]
    _, pull = jax.vjp(product, lhs, jnp.zeros((len(sizes), lhs.shape[1], rhs.shape[1]), lhs.dtype))
    return pull(rhs)[1]


def _shapes(recipe: Recipe, capability: tuple[int, int]) -> Iterator[Measurement]:
    """Yield the matmuls of a recipe's weights on a device: each product and its two gradients."""
    for order, (m, k, n) in enumerate(shapes_of(recipe)[:MOST_SHAPES]):
        for lhs, rhs in (((m, k), (k, n)), ((m, n), (n, k)), ((k, m), (m, n))):
            for bits in (16, *[8] * has_fp8(capability)):
                dtype, function = (jnp.bfloat16, jnp.matmul) if bits == 16 else (E4M3, _fp8)
                yield Measurement(
                    kind="shapes", key=shape_key(bits, *lhs, rhs[1]), size=0, priority=1 + order // 3 + (bits == 8),
                    function=function, args=(jax.ShapeDtypeStruct(lhs, dtype), jax.ShapeDtypeStruct(rhs, dtype)),
                    work=cost.matmul_flops(m, k, n),
                )  # fmt: skip


def shapes_of(recipe: Recipe) -> Sequence[tuple[int, int, int]]:
    """Return (m, k, n) of the matmuls with weights in the forward pass of a micro-step on a device, by FLOPs.

    They are the matmuls of the traced step with the local examples of a device. Weights are not sharded.
    """
    num_devices = jax.device_count() if -1 in dict(recipe.mesh).values() else None
    model, mesh, shapes = build_model(recipe), recipe.mesh.abstract(num_devices), batch_shapes(recipe)
    state = abstract_state(
        model,
        build_optimizer(recipe, model, mesh),
        mesh=mesh,
        strategy=recipe.strategy,
        precision=recipe.step.precision,
    )
    jaxpr = forward_of(build_step(recipe), state, shapes)
    like = next(iter(shapes.values())).shape
    num_shards = like[0] // state.setup.batch_sharding.shard_shape(like)[0]
    flops: dict[tuple[int, int, int], int] = {}
    for equation, runs in equations(jaxpr):
        if equation.primitive.name != "dot_general":
            continue
        (contracted, _), (batch, _) = equation.params["dimension_numbers"]
        lhs, rhs = (x.aval for x in equation.invars)
        if batch or rhs.ndim != 2 or len(contracted) != 1:
            continue
        k = lhs.shape[contracted[0]]
        shape = (max(lhs.size // k // num_shards, 1), k, rhs.size // k)
        flops[shape] = flops.get(shape, 0) + runs * cost.matmul_flops(*shape)
    return sorted(flops, key=lambda shape: -flops[shape])
