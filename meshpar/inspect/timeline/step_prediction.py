"""Report data derived from a timeline: hidden communication, FLOPs, and the predicted step time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshpar.hardware.clusters import Cluster
from meshpar.inspect.hlo.parser import Module
from meshpar.inspect.model_flops import ModelFlops
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.timeline import program_work as work
from meshpar.inspect.timeline.simulator import Timed, Timeline, timeline
from meshpar.sharding.printing import Plain, plain
from meshpar.sharding.units import human_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap(Plain):
    """Overlap of communication with compute."""

    hidden_fraction: float | None
    """Hidden fraction of the communication time over all axes; None without a timeline or without communication."""
    per_axis: Mapping[str, float]
    """The hidden fraction of each label of mesh axes, such as `fsdp` or `data*fsdp`."""
    exposed: tuple[Timed, ...]
    """Collectives without a matmul to overlap with, longest exposed time first."""
    reason: str = ""
    """Reason why the numbers are missing, or empty."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        exposed = [
            {name: plain(getattr(timed.collective, name)) for name in ("kind", "axes", "module", "source")}
            | {"time_s": timed.time_s, "hidden_s": timed.hidden_s, "behind": timed.cover}
            for timed in self.exposed
        ]
        return super().to_json() | {"exposed": exposed}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bracket(Plain):
    """The range in which the step time is expected.

    If a profile has measured matmul rates (`meshpar bench gpu`), both bounds use them. Otherwise `low_s` uses the data
    sheet's peak, and `high_s` the planner's assumed fraction of the peak. Both use the catalogue's rates of fused
    attention, and the launch time if the profile has it. Neither accounts for concurrent kernels that slow each other
    down.
    """

    low_s: float
    """Step time with the fastest kernel rates of the catalogue or the profile, and all communication overlapped."""
    high_s: float
    """Step time with the expected kernel rates, and no communication overlapped."""
    sources: tuple[str, ...]
    """Sources of the kernel rates and of all links that are used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute(Plain):
    """FLOPs and predicted time of a step."""

    flops_per_device: int
    """Matmul FLOPs in the compiled program, without opaque kernels."""
    model_flops_per_device: float | None
    """Model FLOPs over the number of devices; None if they are not counted."""
    ratio: float | None
    """Compiled FLOPs over model FLOPs. Recomputation, padding and replicated work raise the ratio above 1."""
    predicted_step_s: float | None = None
    """Simulated step time; None without a timeline."""
    utilisation: float | None = None
    """Model FLOP utilisation: model FLOP/s of the predicted step over the GPU's peak, for the dtype with most FLOPs."""
    bound: str | None = None
    """The largest component of the step: `compute`, `memory`, `launches`, `bubble` or `network:<axes>`."""
    compute_s: float | None = None
    """Time of compute-bound kernels."""
    memory_s: float | None = None
    """Time of memory-bound kernels."""
    network_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Communication time by mesh axes, hidden or not."""
    exposed_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Part of `network_s` that compute waits for."""
    launch_s: float | None = None
    """Time that short kernels take longer than their work due to their launch; None if launches were not measured."""
    bracket: Bracket | None = None
    """Range of the expected step time and its sources; None without a cluster."""
    bubble_s: float | None = None
    """Time that a stage waits for other stages, averaged over stages; None without stages or a timeline."""
    rates: str = ""
    """Kernel rates assumed by the predicted step and the utilisation; empty without a prediction."""
    library_calls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Calls per step of each library kernel, such as `__cudnn$fmhaSoftmax`."""
    notes: tuple[str, ...] = ()
    """Limitations of the numbers, or reasons why they are missing."""


def why_not_timed(target: str, cluster: Cluster | None) -> str:
    """Return why the step time for a target cannot be estimated; empty if it can."""
    if cluster is None:
        return f"compiled for `{target}`: for times, pass a cluster of GPUs, such as `h100:1x8`"
    if target in ("cpu", "tpu"):
        return f"compiled for `{target}`: overlap is known only from the GPU compiler's schedule"
    return ""


def overlap(times: Timeline | None, reason: str = "") -> Overlap:
    """Return the hidden fraction of the communication, and the exposed collectives."""
    if times is None:
        return Overlap(hidden_fraction=None, per_axis={}, exposed=(), reason=reason)
    network_s = sum(times.network_s.values())
    exposed = [timed for timed in times.collectives if timed.has_nothing_to_hide_behind]
    return Overlap(
        hidden_fraction=sum(times.hidden_s.values()) / network_s if network_s else None,
        per_axis={label: times.hidden_s[label] / time_s for label, time_s in times.network_s.items() if time_s},
        exposed=tuple(sorted(exposed, key=lambda timed: -timed.exposed_s)),
        reason="" if network_s else "no communication",
    )


def bracket(
    module: Module, expected: Timeline, cluster: Cluster, schedule_counts: ScheduleCounts | None = None
) -> Bracket:
    """Return the range of the step time, given the simulation `expected` at the cluster's expected rates."""
    sources = [f"{cluster.rates}"]
    if cluster.best_rates != cluster.rates:
        sources[0] += f"; at best, {cluster.best_rates.of_products}"
    if cluster.launch_s:
        sources.append(f"launches of {human_time(cluster.launch_s)}, measured ({cluster.source})")
    used = sorted(label for label, time_s in expected.network_s.items() if time_s)
    measured = [label for label in used if cluster.measured(label.split("*")) is not None]
    if measured:
        sources.append(f"links of {', '.join(measured)} as measured ({cluster.source})")
    if others := [label for label in used if label not in measured]:
        sources.append(f"links of {', '.join(others)} by data sheets and NCCL's latencies")
    return Bracket(
        low_s=timeline(module, (), cluster, schedule_counts, rates=cluster.best_rates).step_s,
        high_s=expected.step_s + sum(expected.hidden_s.values()),
        sources=tuple(sources),
    )


def compute(
    module: Module,
    *,
    num_devices: int,
    model_flops: ModelFlops | None = None,
    times: Timeline | None = None,
    reason: str = "",
    schedule_counts: ScheduleCounts | None = None,
    cluster: Cluster | None = None,
) -> Compute:
    """Return the FLOPs and the predicted time of a step.

    Args:
      module: the compiled program.
      num_devices: the number of devices that share the model FLOPs.
      model_flops: FLOPs of the model itself.
      times: the simulated program, or None.
      reason: why there is no simulation.
      cells: execution counts of a pipelined program; the results are then averages over stages.
      cluster: the cluster that `times` was simulated for. None omits the range of the step time.
    """
    flops = work.flops_per_step(module, schedule_counts)
    model_share = model_flops.step / num_devices if model_flops is not None else None
    opaque = work.custom_calls(module, schedule_counts)
    notes = [reason] if reason else []
    if (repeated := work.repeated_flops(module)) > 0.005 * flops:
        share = f"XLA recomputes {repeated / max(flops, 1):.0%} of the FLOPs to fit in memory"
        notes.append(f'{share}: remat="minimal" saves only the results of matmuls')
    if model_share is not None and flops < 0.99 * model_share:
        notes.append("the program has fewer FLOPs than three forward passes: the batch needs no gradient")
    if times is None:
        notes += [f"FLOPs of `{target}` ({n} calls per step) are not counted" for target, n in opaque.items()]
    else:
        notes += times.notes
    compute = Compute(
        flops_per_device=flops,
        model_flops_per_device=model_share,
        ratio=flops / model_share if model_share else None,
        library_calls=dict(sorted((work.custom_calls(module, schedule_counts, seen=True) | opaque).items())),
        notes=(*notes, *(model_flops.notes if model_flops is not None else ())),
    )
    if times is None:
        return compute
    peak_flops = times.step_s * times.peak_flops_per_s
    return dataclasses.replace(
        compute,
        predicted_step_s=times.step_s,
        bracket=bracket(module, times, cluster, schedule_counts) if cluster is not None else None,
        utilisation=model_share / peak_flops if model_share is not None and peak_flops else None,
        rates=times.rates,
        bound=times.bound,
        compute_s=times.compute_s,
        memory_s=times.memory_s,
        launch_s=times.launch_s if cluster is not None and cluster.launch_s else None,
        network_s=dict(times.network_s),
        exposed_s=times.exposed_s,
        bubble_s=times.bubble_s if schedule_counts is not None else None,
    )
