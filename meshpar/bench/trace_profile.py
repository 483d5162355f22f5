"""Cluster profiles from traces: the rates of matmuls, attention and links in a measured step."""

from __future__ import annotations

import dataclasses
import datetime
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshpar.hardware import cost_model as cost
from meshpar.hardware.catalogue import AttentionKernel
from meshpar.hardware.clusters import Cluster, Link, Links, Profile, parse_profile
from meshpar.hardware.link_fit import Point, fit_link
from meshpar.inspect.kernels import LIBRARIES
from meshpar.inspect.trace import MeasuredCollective, MeasuredKernel, Trace
from meshpar.sharding.errors import problem

_RATES: Mapping[AttentionKernel, str] = {
    "cudnn": "attention_rates", "mosaic": "mosaic_rates", "triton": "triton_rates"
}  # fmt: skip


def profile_of_trace(trace: Trace, path: str | Path, cluster: Cluster | None = None) -> Profile:
    """Return the profile in a file with the rates of a trace. Without a file, start from the cluster of the trace.

    The rates are: 16-bit matmuls by size, library kernels of attention, and links of mesh axes with collectives of at
    least two sizes. Measured times of kernels include the effects of the step, such as a lower clock or concurrent
    collectives.

    Args:
      trace: the trace, read with the options `mesh` and `cluster`.
      path: the profile. If the file exists, its other values are kept.
      cluster: the GPUs of the trace. None for other devices, whose profile has links only.

    Raises:
      MeshparError: the trace has no rates, or the profile is for other devices.
    """
    base: Profile = cluster if cluster is not None else Links(devices="cpu")
    if Path(path).exists():
        saved = parse_profile(str(path))
        if _devices(saved) != _devices(base):
            requested, reason = f"add rates of {_devices(base)}", f"it is for {_devices(saved)}"
            raise problem(f"profile `{path}`", requested, reason, "use a different file", code="conflict")
        base = saved
    changes: dict[str, Any] = {}
    for field, links in _links(trace.collectives).items():
        changes[field] = {**getattr(base, field), **links}
    if isinstance(base, Cluster):
        if products := _products(trace.kernels):
            changes["products"] = {**base.products, **products}
        if attention := _attention(trace.kernels, base):
            changes["gpu"] = dataclasses.replace(base.gpu, **attention)
    if not changes:
        reason = "it has no matmul or attention with a prediction, and no mesh axis with collectives of two sizes"
        fix = "trace a larger step, and read it with its run folder, or with --mesh and --cluster"
        raise problem(f"trace `{trace.source}`", "save its rates", reason, fix, code="not-found")
    source = f"meshpar trace, {trace.steps} steps on {trace.devices} devices, {datetime.date.today().isoformat()}"
    return dataclasses.replace(base, **changes, source="; ".join(filter(None, (base.source, source))))


def _devices(profile: Profile) -> str:
    return profile.gpu.name if isinstance(profile, Cluster) else profile.devices


def _products(kernels: Iterable[MeasuredKernel]) -> dict[int, float]:
    """Return n -> FLOP/s of 16-bit matmuls that have as many FLOPs as a matmul of n × n matrices."""
    flops, time_s = defaultdict[int, float](float), defaultdict[int, float](float)
    for kernel in kernels:
        if kernel.kind == "matmul" and kernel.dtypes in ("bf16", "f16") and kernel.measured_s:
            n = round((kernel.flops / kernel.program_count / 2) ** (1 / 3))  # 2 n³ FLOPs
            flops[n] += kernel.flops
            time_s[n] += kernel.measured_s
    return {n: flops[n] / time_s[n] for n in sorted(flops) if n}


def _attention(kernels: Iterable[MeasuredKernel], cluster: Cluster) -> dict[str, Any]:
    """Return the fields of `Gpu` with the rates of attention, forward and backward."""
    times: dict[tuple[str, bool], list[MeasuredKernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.kind == "attention" and kernel.flops and kernel.measured_s:
            times[kernel.implementation, kernel.is_backward_attention].append(kernel)
    rates: dict[str, Any] = {}
    for library, field in _RATES.items():
        forward, backward = (times.get((LIBRARIES[library], is_backward), []) for is_backward in (False, True))
        known = cluster.gpu.attention_flops_per_s(library)
        if forward or backward:  # evaluation has no backward pass
            rates[field] = (_rate(forward) or known[0], _rate(backward) or known[1])
    return rates


def _rate(kernels: Iterable[MeasuredKernel]) -> float:
    kernels = list(kernels)
    return sum(kernel.flops for kernel in kernels) / (sum(kernel.measured_s for kernel in kernels) or 1.0)


def _links(collectives: Iterable[MeasuredCollective]) -> dict[str, dict[str, Link]]:
    """Return field of the profile -> mesh axes -> link. A link needs two sizes and a usable fit."""
    points: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for sent in collectives:
        if not sent.axes or not sent.payload_bytes or not sent.count or not sent.measured_s:
            continue
        form = cost.as_sent(sent.kind, sent.payload_bytes, sent.group_size or 1)
        field = "permutes" if sent.kind == "collective-permute" else "axes"
        points[field, "*".join(sent.axes)].append(Point(form.steps, form.bytes_in_turn, sent.measured_s / sent.count))
    links: dict[str, dict[str, Link]] = {}
    for (field, axes), measured in points.items():
        fit = fit_link(axes, field, measured) if len({point.bytes_in_turn for point in measured}) > 1 else None
        if fit is not None and fit.link is not None and fit.verdict != "none":
            links.setdefault(field, {})[axes] = fit.link
    return links
