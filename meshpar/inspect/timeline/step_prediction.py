"""What the timeline says of a step as a report needs it: how much communication is hidden, how long a step takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshpar.hardware.clusters import Cluster
from meshpar.inspect.hlo.parser import Module
from meshpar.inspect.model_flops import ModelFlops
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.timeline import program_work as work
from meshpar.inspect.timeline.error_bounds import Bracket, bracket
from meshpar.inspect.timeline.simulator import Timed, Timeline
from meshpar.sharding.printing import Plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """How much of the communication compute hides."""

    hidden_fraction: float | None
    """Of the time on the wire, over all axes; None when there is no timeline or nothing is sent."""
    per_axis: Mapping[str, float]
    """The same for each label of mesh axes, as `fsdp` or `data*fsdp`."""
    exposed: tuple[Timed, ...]
    """Collectives with nothing to hide behind, the ones waited for longest first."""
    reason: str = ""
    """Why there is no number; empty when there is one."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "hidden_fraction": self.hidden_fraction,
            "per_axis": dict(self.per_axis),
            "exposed": [
                {
                    "kind": one.collective.kind,
                    "axes": list(one.collective.axes),
                    "module": one.collective.module,
                    "source": one.collective.source,
                    "time_s": one.time_s,
                    "hidden_s": one.hidden_s,
                    "behind": one.cover,
                }
                for one in self.exposed
            ],
            "reason": self.reason,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute(Plain):
    """What a step computes, and how long it takes."""

    flops_per_device: int
    """Of the matrix products in the compiled program; those in kernels that cannot be seen into are missing."""
    model_flops_per_device: float | None
    """What the model asks for, over the devices; None when it is not counted."""
    ratio: float | None
    """FLOPs over model FLOPs: above 1 what recomputation, padding and work done on several devices add."""
    predicted_step_s: float | None
    """Length of the timeline; None without one."""
    utilisation: float | None
    """Model FLOPs over what the GPU could do in the predicted step, at the peak of the type most FLOPs are in."""
    bound: str | None
    """`compute`, `memory`, `launches`, `bubble` or `network:<axes>`: what most of the step is spent on."""
    compute_s: float | None
    """Kernels that their FLOPs bound."""
    memory_s: float | None
    """Kernels that their bytes bound."""
    network_s: Mapping[str, float]
    """Time on the wire by mesh axes, hidden or not."""
    exposed_s: Mapping[str, float]
    """Of that, while compute waits."""
    launch_s: float | None = None
    """Kernels shorter than a launch, what it takes beyond them; None where nobody measured launches."""
    bracket: Bracket | None = None
    """Between which times the step is expected, and by whose figures; None without a cluster."""
    bubble_s: float | None = None
    """Waiting for other stages, of the mean stage; None without stages or a timeline."""
    rates: str = ""
    """Rates of kernels that the predicted step, and so the utilisation, assumes; empty without a prediction."""
    library_calls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How often a step the program calls each kernel of a library, as `__cudnn$fmhaSoftmax`."""
    notes: tuple[str, ...] = ()
    """What the numbers leave out, or why there are none."""


def why_not_timed(target: str, cluster: Cluster | None) -> str:
    """Why the time of a program compiled for a target cannot be estimated; empty when it can."""
    if cluster is None:
        return f"compiled for `{target}`: name a cluster of GPUs, as `h100:1x8`, for times"
    if target in ("cpu", "tpu"):
        return f"compiled for `{target}`: only the GPU compiler's schedule tells what runs beside what"
    return ""


def overlap(timeline: Timeline | None, reason: str = "") -> Overlap:
    """What of the communication is hidden."""
    if timeline is None:
        return Overlap(hidden_fraction=None, per_axis={}, exposed=(), reason=reason)
    network_s = sum(timeline.network_s.values())
    exposed = [one for one in timeline.collectives if one.has_nothing_to_hide_behind]
    return Overlap(
        hidden_fraction=sum(timeline.hidden_s.values()) / network_s if network_s else None,
        per_axis={label: timeline.hidden_s[label] / time_s for label, time_s in timeline.network_s.items() if time_s},
        exposed=tuple(sorted(exposed, key=lambda one: -one.exposed_s)),
        reason="" if network_s else "nothing is sent",
    )


def compute(
    module: Module,
    *,
    num_devices: int,
    model_flops: ModelFlops | None = None,
    timeline: Timeline | None = None,
    reason: str = "",
    cells: ScheduleCounts | None = None,
    cluster: Cluster | None = None,
) -> Compute:
    """What a step computes, and how long it takes.

    Args:
      module: the compiled program.
      num_devices: over which the model's FLOPs are split.
      model_flops: what the model asks for.
      timeline: of the program, or None when it has none.
      reason: why there is no timeline.
      cells: of a pipelined program, whose stages pick what they compute; figures are then the mean stage's.
      cluster: of the timeline, for its error bar.
    """
    flops = work.flops_per_step(module, cells)
    asked = model_flops.step / num_devices if model_flops is not None else None
    unseen = work.custom_calls(module, cells)
    opaque = (f"the FLOPs in `{target}`, {times} a step, are not seen" for target, times in unseen.items())
    again = work.repeated_flops(module)
    repeats = (
        f"{again / max(flops, 1):.0%} of the FLOPs are products that XLA computes again, else it would not fit: "
        'remat="minimal" keeps what products give and nothing else'
    )
    fewer = "the program has fewer FLOPs than three forward passes: the batch itself needs no gradient"
    return Compute(
        flops_per_device=flops,
        model_flops_per_device=asked,
        ratio=flops / asked if asked else None,
        predicted_step_s=timeline.step_s if timeline is not None else None,
        bracket=bracket(module, timeline, cluster, cells) if timeline is not None and cluster is not None else None,
        utilisation=_utilisation(asked, timeline),
        rates=timeline.rates if timeline is not None else "",
        bound=timeline.bound if timeline is not None else None,
        compute_s=timeline.compute_s if timeline is not None else None,
        memory_s=timeline.memory_s if timeline is not None else None,
        launch_s=timeline.launch_s if timeline is not None and cluster is not None and cluster.launch_s else None,
        network_s=dict(timeline.network_s) if timeline is not None else {},
        exposed_s=timeline.exposed_s if timeline is not None else {},
        bubble_s=timeline.bubble_s if timeline is not None and cells is not None else None,
        library_calls=dict(sorted((work.custom_calls(module, cells, seen=True) | unseen).items())),
        notes=(
            *((reason,) if reason else ()),
            *((repeats,) if again > 0.005 * flops else ()),
            *((fewer,) if asked is not None and flops < 0.99 * asked else ()),
            *(timeline.notes if timeline is not None else opaque),
            *(model_flops.notes if model_flops is not None else ()),
        ),
    )


def _utilisation(model_flops_per_device: float | None, timeline: Timeline | None) -> float | None:
    if model_flops_per_device is None or timeline is None or not timeline.step_s:
        return None
    return model_flops_per_device / (timeline.step_s * timeline.peak_flops_per_s)
