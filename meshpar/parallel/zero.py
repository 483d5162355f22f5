"""ZeRO data parallelism: optimizer state, gradients and parameters sharded over the batch axes.

ZeRO-1 shards the optimizer state, ZeRO-2 also the gradients, and ZeRO-3 also the parameters
(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from meshpar.parallel.execution import Execution, LayerGather
from meshpar.parallel.parallelism import (
    MIN_SHARDED_BYTES,
    Axes,
    Parallelism,
    RequiredAxis,
    RuleSets,
    SearchSpace,
    activations,
    axes_of,
    replicated_all,
    split,
)
from meshpar.parallel.quantization import Quantize
from meshpar.parallel.strategy import Strategy, preset
from meshpar.sharding.errors import check_int, near, problem
from meshpar.sharding.rules import Largest

Stage = Literal["zero1", "zero2", "zero3", "fsdp", "hsdp"]
_NUM_SHARDED = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "hsdp": 3}
"""How many of these three are sharded, in this order: optimizer state, gradients, parameters."""


@dataclasses.dataclass(frozen=True, repr=False)
class Zero(Parallelism):
    """The `Parallelism` of `zero1`, `zero2`, `zero3`, `fsdp` and `hsdp`."""

    stage: Stage
    axis: Axes = "fsdp"
    min_bytes: int = MIN_SHARDED_BYTES
    quantize: Quantize | None = None
    prefetch: int = 0
    keep: int = 0

    shards_state = True
    axes = ("fsdp",)

    def __post_init__(self) -> None:
        axes_of(self.stage, self.axis)
        check_int(f"{self.stage}()", "the minimum size in bytes of a sharded leaf", min_bytes=self.min_bytes)
        for field, meaning in (
            ("prefetch", "the number of layers whose weights are gathered in advance"),
            ("keep", "the number of last layers whose gathered weights are kept for the backward pass"),
        ):
            check_int(f"{self.stage}()", meaning, **{field: getattr(self, field)})

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the public constructor."""
        return self.stage

    def rules(self) -> RuleSets:
        axes = axes_of(self.stage, self.axis)
        by_embed = {"embed": axes[0] if len(axes) == 1 else axes}
        sharded = split(self.stage, by_embed, largest=Largest(axes, self.min_bytes, self.stage))
        replicated, num_sharded = replicated_all(self.stage), _NUM_SHARDED[self.stage]
        params = sharded if num_sharded > 2 else replicated
        grads = sharded if num_sharded > 1 else replicated
        return RuleSets(params, grads, sharded, activations(self.stage))

    def gathering(self) -> LayerGather:
        return LayerGather(formats=self.quantize, ahead=self.prefetch, keep=self.keep)

    def required_axes(self) -> tuple[RequiredAxis, ...]:
        fix = "use fsdp(), which does the same without replicas"
        return (RequiredAxis(axis="data", strategy="hsdp()", fix=fix),) if self.stage == "hsdp" else ()

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        if space.num_shards("fsdp") == 1:
            return
        full: Stage = "hsdp" if space.num_shards("data") > 1 else "fsdp"
        # Weights are replicated over the context axis, so the state can be sharded over it too.
        axis: Axes = "fsdp" if space.num_shards("context") == 1 else ("fsdp", "context")
        yield from (cls("zero1", axis), cls("zero2", axis), cls(full, axis))
        # Prefetching does not help if the layers send activations, which compete with the gathers.
        if space.num_shards("stage", "context") == 1:
            yield cls(full, axis, prefetch=1)

    def memory_reductions(self, step: Execution) -> tuple[Parallelism, ...]:
        return stages_above(self.stage, step)

    def arguments(self) -> dict[str, Any]:
        return {key: value for key, value in super().arguments().items() if key != "stage"}


def stages_above(stage: str, step: Execution) -> tuple[Parallelism, ...]:
    """Return the ZeRO stages that shard more of the state than `stage`, in increasing order."""
    axes = [axis for axis in ("fsdp", "data") if step.sizes.get(axis, 1) > 1]
    if not axes:
        return ()
    if _NUM_SHARDED.get(stage, 0) == 3:
        return (Zero("fsdp", axis=tuple(reversed(axes))),) if len(axes) > 1 else ()
    # Without gradient accumulation, ZeRO-1 and ZeRO-2 compile to the same program.
    first: Stage = "zero2" if step.micro_steps > 1 else "zero1"
    higher: tuple[Stage, ...] = tuple(
        name for name in (first, "zero3") if _NUM_SHARDED[name] > _NUM_SHARDED.get(stage, 0)
    )
    return tuple(Zero(name, axis=axes[0]) for name in higher)


@preset
def zero1(*, axis: Axes = "fsdp", min_bytes: int = MIN_SHARDED_BYTES) -> Strategy:
    """ZeRO-1: shard the optimizer state over `axis`.

    Gradients are reduce-scattered, and the updated parameters are all-gathered once per step. Without gradient
    accumulation, ZeRO-1 and ZeRO-2 compile to the same program.

    Args:
      axis: mesh axis, or axes, to shard over.
      min_bytes: unnamed leaves smaller than this are replicated.

    Raises:
      MeshparError: `axis` or `min_bytes` is invalid.

    Example:
      >>> mp.zero1().grads, mp.zero1().optimizer
      (Rules(), Rules(embed='fsdp'))
    """
    return Strategy((Zero("zero1", axis, min_bytes),))


@preset
def zero2(*, axis: Axes = "fsdp", min_bytes: int = MIN_SHARDED_BYTES) -> Strategy:
    """ZeRO-2: shard the optimizer state and the gradients over `axis`.

    Gradients are reduce-scattered in each micro-step, so accumulated gradients are sharded. The updated parameters are
    all-gathered once per step. Arguments and errors are as in `zero1`.

    Example:
      >>> mp.zero2().params, mp.zero2().grads
      (Rules(), Rules(embed='fsdp'))
    """
    return Strategy((Zero("zero2", axis, min_bytes),))


@preset
def zero3(
    *,
    axis: Axes = "fsdp",
    min_bytes: int = MIN_SHARDED_BYTES,
    quantize: str | Mapping[str, object] | Quantize | None = None,
    prefetch: int = 0,
    keep: int = 0,
) -> Strategy:
    """ZeRO-3: shard parameters, gradients and optimizer state over `axis`.

    Weights are all-gathered in each layer, forward and backward, and gradients are reduce-scattered. Arguments and
    errors are as in `fsdp`.

    Example:
      >>> mp.zero3(axis=("data", "fsdp")).params
      Rules(embed=('data', 'fsdp'))
    """
    return _fully_sharded("zero3", axis, min_bytes, quantize, prefetch, keep)


@preset
def fsdp(
    *,
    axis: Axes = "fsdp",
    min_bytes: int = MIN_SHARDED_BYTES,
    quantize: str | Mapping[str, object] | Quantize | None = None,
    prefetch: int = 0,
    keep: int = 0,
) -> Strategy:
    """Fully sharded data parallelism: shard parameters, gradients and optimizer state over `axis`.

    Weights are all-gathered in each layer, forward and backward, and gradients are reduce-scattered. The rules are
    the same as for `zero3`. In a model without logical names, leaves of at least `min_bytes` are sharded along their
    largest divisible dim.

    Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".

    Args:
      axis: mesh axis, or axes, to shard over.
      min_bytes: unnamed leaves smaller than this are replicated.
      quantize: "int8" or "fp8" for weights and gradients, or the fields of `Quantize` (ZeRO++, Wang et al. 2023).
        Weights with at least two dims are gathered with one byte per element, and so are their gradients. The loss
        function then receives the local batch, as with `train_step(reduce_gradients="once")`. `eval_step` gathers
        weights without quantization.
      prefetch: number of `mp.scan_layers` layers whose weights are gathered in advance, while earlier layers compute,
        forward and backward. At least that many more layers of gathered weights are in memory. With 0, weights are
        gathered when they are used. With `train_step(reduce_gradients="once")`, all layers are gathered in advance.
      keep: number of last `mp.scan_layers` layers whose gathered weights are kept in memory for the backward pass,
        which otherwise gathers them again. The last `prefetch` layers are always kept.

    Raises:
      MeshparError: an argument is invalid.

    Example:
      >>> mp.fsdp(axis="data", quantize="int8")
      fsdp(axis='data', quantize='int8')
    """
    return _fully_sharded("fsdp", axis, min_bytes, quantize, prefetch, keep)


@preset
def hsdp(
    *,
    axis: Axes = "fsdp",
    min_bytes: int = MIN_SHARDED_BYTES,
    quantize: str | Mapping[str, object] | Quantize | None = None,
    prefetch: int = 0,
    keep: int = 0,
) -> Strategy:
    """Hybrid sharded data parallelism: `fsdp` over `axis`, replicated over `data` (Zhao et al. 2023).

    All-gathers and reduce-scatters run over `axis`. Gradient shards are then all-reduced over `data`, which sends 1/N
    of the gradients if `axis` has size N. With `train_step(accumulate=n)`, each micro-step reduce-scatters gradients
    over `axis`, and the accumulated shards are all-reduced over `data` once (`reduce_gradients="once_across_groups"`).
    Arguments and errors are as in `fsdp`. With `quantize`, the all-reduce over `data` is quantized, too.

    Example:
      >>> mp.hsdp().params, mp.hsdp().required_axes[0].axis
      (Rules(embed='fsdp'), 'data')
    """
    return _fully_sharded("hsdp", axis, min_bytes, quantize, prefetch, keep)


def _fully_sharded(stage: Stage, axis: Axes, min_bytes: int, quantize: Any, prefetch: int, keep: int) -> Strategy:
    quantization = _quantize_of(stage, axes_of(stage, axis), quantize)
    return Strategy((Zero(stage, axis, min_bytes, quantization, prefetch, keep),))


def _quantize_of(
    origin: str, axes: tuple[str, ...], quantize: str | Mapping[str, object] | Quantize | None
) -> Quantize | None:
    """Convert the `quantize` argument of a preset over these axes to a `Quantize`."""
    if quantize is None:
        return None
    if isinstance(quantize, Mapping):
        fields = [field.name for field in dataclasses.fields(Quantize)]
        for name in quantize.keys() - set(fields):
            fix = near(str(name), fields)
            raise problem(f"{origin}(quantize={quantize!r})", f"set `{name}`", "it is unknown", fix, "unknown-name")
        quantize = Quantize(**quantize)  # type: ignore[arg-type]
    wire = quantize if isinstance(quantize, Quantize) else Quantize(weights=quantize, gradients=quantize)
    if wire.secondary is not None:
        inside = axes_of(f"{origin}(quantize=...) secondary", wire.secondary)
        if not set(inside) < set(axes):
            where = f"{origin}(axis={axes!r}, quantize=...) secondary={wire.secondary!r}"
            reason = "secondary must be a proper subset of the axes that shard the parameters"
            fix = 'write mp.fsdp(axis=("data", "fsdp"), quantize={"secondary": "fsdp"})'
            raise problem(where, "keep a second copy of the weights", reason, fix, code="conflict")
    return wire
