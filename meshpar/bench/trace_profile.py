"""Cluster profiles from traces: rates of matmuls, attention, copies and links in a measured step."""

from __future__ import annotations

import dataclasses
import datetime
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshpar.bench.gpu_programs import MIN_COPIED_BYTES
from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Cluster, Link, Links, Profile, parse_profile, shape_key
from meshpar.hardware.link_fit import Point, fit_link
from meshpar.inspect.timeline.program_work import Matmul
from meshpar.inspect.timeline.roofline import widest
from meshpar.inspect.trace import MeasuredCollective, MeasuredKernel, Trace
from meshpar.sharding.errors import problem


def profile_of_trace(trace: Trace, path: str | Path, cluster: Cluster | None = None) -> Profile:
    """Return the profile in a file with the rates of a trace. Without a file, start from the cluster of the trace.

    The rates are: matmuls by size and shape, library kernels of attention and of grouped matmuls, memory-bound kernels
    that are larger than the caches, and links of mesh axes with collectives of at least two sizes. Measured times of
    kernels include the effects of the step, such as a lower clock or concurrent collectives.

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
        changes |= {field: _merged(getattr(base, field), table) for field, table in _rates(trace.kernels).items()}
        if copy_bytes_per_s := _copy_rate(trace.kernels):
            changes["copy_bytes_per_s"] = copy_bytes_per_s
    if not changes:
        reason = "it has no matmul or attention with a prediction, and no mesh axis with collectives of two sizes"
        fix = "trace a larger step, and read it with its run folder, or with --mesh and --cluster"
        raise problem(f"trace `{trace.source}`", "save its rates", reason, fix, code="not-found")
    source = f"meshpar trace, {trace.steps} steps on {trace.devices} devices, {datetime.date.today().isoformat()}"
    return dataclasses.replace(base, **changes, source="; ".join(filter(None, (base.source, source))))


def _merged(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return two tables of rates as a single table, whose values may be tables by size."""
    inner = {key: {**old.get(key, {}), **value} for key, value in new.items() if isinstance(value, Mapping)}
    return {**old, **new, **inner}


def _devices(profile: Profile) -> str:
    return profile.gpu.name if isinstance(profile, Cluster) else profile.devices


def _rates(kernels: Iterable[MeasuredKernel]) -> dict[str, dict[Any, Any]]:
    """Return the tables of `Cluster` with FLOP/s: by size, by shape, and by key and size."""
    sums: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in kernels:
        product = kernel.product
        # Kernels with several matmuls have no rate of a single matmul.
        if product is None or not kernel.measured_s or kernel.flops > 1.001 * product.flops * kernel.program_count:
            continue
        repetition = 1.0 if product.attention is None else product.attention.repetition
        for key in _keys(product):
            sums[key][0] += kernel.flops / repetition
            sums[key][1] += kernel.measured_s
    tables: dict[str, dict[Any, Any]] = {}
    for (field, name, size), (flops, time_s) in sorted(sums.items()):
        table = tables.setdefault(field, {})
        if field in ("attention", "grouped"):
            table.setdefault(name, {})[size] = flops / time_s
        else:
            table[name or size] = flops / time_s
    return tables


def _keys(product: Matmul) -> Iterator[tuple[str, str, int]]:
    """Yield (field of `Cluster`, key, size) of each rate that a matmul determines."""
    if (attention := product.attention) is not None:
        direction = "backward" if attention.is_backward else "forward"
        mask = "causal" if attention.size.is_causal else "full"
        yield "attention", f"{attention.kernel} {direction} {mask} {attention.size.head_dim}", attention.size.seq_len
    elif (grouped := product.grouped) is not None:
        yield "grouped", f"{grouped.kernel} {grouped.operand}", _size(product.flops / max(grouped.num_groups, 1))
    else:
        bits = widest(product.computation, product.ins)
        if bits <= 16:
            yield "products" if bits == 16 else "products_fp8", "", _size(product.flops)
        if product.shape is not None:
            yield "shapes", shape_key(bits, *product.shape), 0


def _size(flops: float) -> int:
    """Return n of `[n, n] @ [n, n]` with a number of FLOPs, `2 n³`."""
    return max(round((flops / 2) ** (1 / 3)), 1)


def _copy_rate(kernels: Iterable[MeasuredKernel]) -> float:
    """Return the bytes per second of memory-bound kernels that are larger than the caches; 0 if there are none."""
    moved_bytes = time_s = 0.0
    for kernel in kernels:
        if kernel.cause == "memory-bound" and kernel.moved_bytes >= MIN_COPIED_BYTES * max(kernel.program_count, 1):
            moved_bytes += kernel.moved_bytes
            time_s += kernel.measured_s
    return moved_bytes / time_s if time_s else 0.0


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
