"""ZeRO: optimizer state, gradients and parameters split over the devices that split the batch.

ZeRO-1, ZeRO-2 and ZeRO-3 differ in nothing but what is split: the optimizer state, the gradients too, the parameters
too (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from meshpar.parallel.expected.step_spec import StepSpec
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
from meshpar.parallel.quantization import ENGINE, Quantize, quantize_of
from meshpar.parallel.strategy import Strategy, preset
from meshpar.sharding.rules import Largest
from meshpar.sharding.types import is_whole, problem

Stage = Literal["zero1", "zero2", "zero3", "fsdp", "hsdp"]
_SPLIT_BY = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "hsdp": 3}
"""Of optimizer state, gradients and parameters, how many are split."""


@dataclasses.dataclass(frozen=True, repr=False)
class Zero(Parallelism):
    """See `zero1`, `zero2`, `zero3`, `fsdp` and `hsdp`."""

    stage: Stage
    axis: Axes = "fsdp"
    min_bytes: int = MIN_SHARDED_BYTES
    quantize: Quantize | None = None
    prefetch: int = 0

    shards_state = True
    axes = ("fsdp",)

    def __post_init__(self) -> None:
        axes_of(self.stage, self.axis)
        if not is_whole(self.min_bytes, 0) or self.min_bytes >= 2**63:
            where, asked = f"{self.stage}(min_bytes={self.min_bytes!r})", "leave smaller leaves whole"
            raise problem(where, asked, "it is not a number of bytes", "write one, say min_bytes=2**16")
        if type(self.prefetch) is not int or self.prefetch not in (0, 1):
            where, exists = f"{self.stage}(prefetch={self.prefetch!r})", "it is 0, where a layer needs them, or 1"
            raise problem(where, "gather weights so many layers ahead", exists, "write prefetch=1, or leave it out")
        if self.prefetch and self.quantize is not None:
            where = f"{self.stage}(prefetch=1, quantize={self.quantize.literal!r})"
            exists = "kernels gather quantized weights, inside the layer that needs them"
            raise problem(where, "gather weights a layer ahead", exists, "leave one of the two out")

    @property
    def name(self) -> str:  # type: ignore[override]
        """Of the function that makes it."""
        return self.stage

    def rules(self) -> RuleSets:
        axes = axes_of(self.stage, self.axis)
        by_embed = {"embed": axes[0] if len(axes) == 1 else axes}
        sharded = split(self.stage, by_embed, largest=Largest(axes, self.min_bytes, self.stage))
        whole, count = replicated_all(self.stage), _SPLIT_BY[self.stage]
        return RuleSets(
            sharded if count > 2 else whole, sharded if count > 1 else whole, sharded, activations(self.stage)
        )

    def required_axes(self) -> tuple[RequiredAxis, ...]:
        why = "use fsdp(), which it is with nothing to replicate over"
        return (RequiredAxis(axis="data", strategy="hsdp()", why=why),) if self.stage == "hsdp" else ()

    def engine(self) -> str | None:
        if self.prefetch:
            return "meshpar.training.gradients.fsdp_prefetch"
        return None if self.quantize is None else ENGINE

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        if space.num_shards("fsdp") == 1:
            return
        whole: Stage = "hsdp" if space.num_shards("data") > 1 else "fsdp"
        # Ranks that share a sequence have the same weights, as those that share a batch do.
        axis: Axes = "fsdp" if space.num_shards("context") == 1 else ("fsdp", "context")
        yield from (cls("zero1", axis), cls("zero2", axis), cls(whole, axis))
        if (
            space.num_shards("stage", "context") == 1
        ):  # where a layer sends rows of its own, gathers hide no better ahead
            yield cls(whole, axis, prefetch=1)

    def memory_reductions(self, step: StepSpec) -> tuple[Parallelism, ...]:
        return stages_above(self.stage, step)

    def arguments(self) -> dict[str, Any]:
        return {key: value for key, value in super().arguments().items() if key != "stage"}


def stages_above(stage: str, step: StepSpec) -> tuple[Parallelism, ...]:
    """The ZeRO stages that split more of the state than a preset, the mildest first."""
    over = [axis for axis in ("fsdp", "data") if step.sizes.get(axis, 1) > 1]
    if not over:
        return ()
    if _SPLIT_BY.get(stage, 0) == 3:
        return (Zero("fsdp", axis=tuple(reversed(over))),) if len(over) > 1 else ()
    first: Stage = "zero2" if step.accumulate > 1 else "zero1"  # with one micro-step they are the same program
    higher: tuple[Stage, ...] = tuple(one for one in (first, "zero3") if _SPLIT_BY[one] > _SPLIT_BY.get(stage, 0))
    return tuple(Zero(one, axis=over[0]) for one in higher)


@preset
def zero1(*, axis: Axes = "fsdp", min_bytes: int = MIN_SHARDED_BYTES) -> Strategy:
    """ZeRO-1: optimizer state split over `axis`; the new parameters are gathered after the update.

    The compiler scatters the gradients as soon as it sees that only shards are used, so the program is ZeRO-2's.

    Arguments are those of `fsdp`.

    Example:
      >>> zero1().grads, zero1().optimizer
      (Rules(), Rules(embed='fsdp'))
    """
    return Strategy((Zero("zero1", axis, min_bytes),))


@preset
def zero2(*, axis: Axes = "fsdp", min_bytes: int = MIN_SHARDED_BYTES) -> Strategy:
    """ZeRO-2: optimizer state and gradients split over `axis`; no device ever holds a whole gradient.

    Arguments are those of `fsdp`.

    Example:
      >>> zero2().params, zero2().grads
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
) -> Strategy:
    """ZeRO-3: parameters, gradients and optimizer state split over `axis`; weights are gathered where they are used.

    Arguments are those of `fsdp`.

    Example:
      >>> zero3(axis=("data", "fsdp")).params
      Rules(embed=('data', 'fsdp'))
    """
    return _fully_sharded("zero3", axis, min_bytes, quantize, prefetch)


@preset
def fsdp(
    *,
    axis: Axes = "fsdp",
    min_bytes: int = MIN_SHARDED_BYTES,
    quantize: str | Mapping[str, object] | Quantize | None = None,
    prefetch: int = 0,
) -> Strategy:
    """Fully sharded data parallel: another name for ZeRO-3 (Zhao et al. 2023, "PyTorch FSDP").

    On a model with no names at all every leaf of at least `min_bytes` is split on its largest dim that divides, and
    the table says so.

    With `quantize` it is ZeRO++ (Wang et al. 2023): weights of two dims or more are gathered, and their gradients
    exchanged, in a byte an element. The loss is then given a device's own rows only, as in `train_step` with
    `reduce_gradients="once"`; `eval_step` gathers weights as they are.

    Args:
      axis: the mesh axis, or axes, to split over.
      min_bytes: unnamed leaves smaller than this stay whole.
      quantize: "int8" or "fp8" for weights and gradients; or fields of `Quantize`, as a dict or as such.
      prefetch: 1 gathers the weights of the next layer that `mp.scan_layers` runs while this one computes, forward and
        backward, so that the gathers have a layer's matmuls to hide behind; one more layer's weights are held whole.
        On GPUs it needs gathers that are combined, `xla_gpu_all_gather_combine_threshold_bytes` of a layer's weights:
        of several, XLA's scheduler starts some late. 0: where needed.

    Example:
      >>> fsdp(axis="data", quantize="int8")
      fsdp(axis='data', quantize='int8')
    """
    return _fully_sharded("fsdp", axis, min_bytes, quantize, prefetch)


@preset
def hsdp(
    *,
    axis: Axes = "fsdp",
    min_bytes: int = MIN_SHARDED_BYTES,
    quantize: str | Mapping[str, object] | Quantize | None = None,
    prefetch: int = 0,
) -> Strategy:
    """Hybrid sharding: ZeRO-3 inside a group of `axis`, replicated over `data`.

    Gathers and scatters stay in the group; only 1/size of the gradients is all-reduced across groups. With
    `train_step(accumulate=n)`, this all-reduce is sent in each of the n micro-steps; `reduce_gradients="once"` sends it
    once, and keeps unsharded gradients between the micro-steps.

    Arguments are those of `fsdp`; with `quantize` the all-reduce across groups is quantized too.

    Example:
      >>> hsdp().params, hsdp().needs[0].axis
      (Rules(embed='fsdp'), 'data')
    """
    return _fully_sharded("hsdp", axis, min_bytes, quantize, prefetch)


def _fully_sharded(stage: Stage, axis: Axes, min_bytes: int, quantize: Any, prefetch: int) -> Strategy:
    wire = quantize_of(stage, axes_of(stage, axis), quantize)
    return Strategy((Zero(stage, axis, min_bytes, wire, prefetch),))
