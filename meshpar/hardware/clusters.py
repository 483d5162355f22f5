"""Clusters of GPUs and their links, by name or from a saved profile. SI units.

A profile is a JSON file. For GPUs it contains a `Cluster`, and for other devices `Links`: the links measured between
them by mesh axis (`meshpar bench collectives --save`).

    {"gpu": "h100", "nodes": 2, "gpus_per_node": 8, "axes": {"data": {"alpha_s": 2.1e-5, "bytes_per_s": 4.4e10}}}
    {"devices": "cpu", "axes": {"data": ...}, "permutes": {"data": ...}}
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from meshpar.hardware.catalogue import GPUS, Gpu, gpu_from
from meshpar.sharding.host_resources import read_json, write_json
from meshpar.sharding.types import AnyMesh, MeshparError, axis_sizes, near, problem

MAX_SECONDS, MAX_VALUE, MAX_NODES = 1e9, 1e24, 999_999
"""Upper limits of latencies, of rates and sizes, and of numbers of GPUs, so that products do not overflow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A link in the alpha-beta model: a message of n bytes takes `alpha_s + n / bytes_per_s`."""

    alpha_s: float
    """Latency of a message, in seconds."""
    bytes_per_s: float

    def __post_init__(self) -> None:
        for field in ("alpha_s", "bytes_per_s"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise problem("link", f"set {field}={value!r}", "it is not a number", "use 2e-6", code="wrong-type")
        if not 0 <= self.alpha_s <= MAX_SECONDS or not 1 / MAX_VALUE <= self.bytes_per_s <= MAX_VALUE:
            reason = f"latencies are from 0 to {MAX_SECONDS:g} s, bandwidths above 0 and at most {MAX_VALUE:g} B/s"
            fix = "use values such as alpha_s=2e-6, bytes_per_s=4.5e11"
            raise problem("link", f"use {self}", reason, fix, code="out-of-range")

    @property
    def beta_s_per_byte(self) -> float:
        """Time per byte, in seconds."""
        return 1 / self.bytes_per_s


MATMUL_EFFICIENCY = 0.65
"""Fraction of the peak that matmuls reach if no rates were measured. This is an assumption and not a fit. Large
bfloat16 matmuls alone reach 0.79 on an H100 (XLA's table, xla/service/gpu/model/matmul_interpolator_data.h, 2025), and
0.60 to 0.69 on Meta's H100s with 500 W (pytorch/ao, torchao/testing/float8/roofline_utils.py, 2024 and 2025). With
this value, published training runs are predicted with a median error of 10 % (`tests/planner/published.txt`). Attention
has its own rates (`Gpu.attention_flops_per_s`)."""
ALPHA_S: Mapping[str, float] = {"nvlink": 1.9e-6, "pcie": 2.5e-6, "network": 4.0e-6}
"""Latency of a ring step by kind of link, from NCCL's tuning model for rings with the LL128 protocol (NVIDIA/nccl,
src/graph/tuning.cc, `hwLat`, version 2.23, 2024)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """FLOP/s of a GPU's kernels: matmuls by dtype and size, and attention."""

    gpu: Gpu
    efficiency: float
    """Fraction of the data sheet's peak that matmuls reach if none were measured."""
    products: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    """Measured FLOP/s of bfloat16 matmuls of n × n matrices, by n; may be empty."""
    source: str = ""
    """Source of the measured rates."""

    def peak_flops_per_s(self, bits: int) -> float:
        """Return the data sheet's peak of matmuls whose larger operand dtype has this number of bits."""
        if bits <= 8:
            return self.gpu.fp8_flops_per_s
        return self.gpu.bf16_flops_per_s if bits <= 16 else self.gpu.fp32_flops_per_s

    def share_of_peak(self, flops: float) -> float:
        """Return the fraction of the peak of a matmul with this number of FLOPs, as that of a square matmul."""
        if not self.products:
            return self.efficiency
        sizes = sorted(self.products)
        n = max(flops / 2, 1.0) ** (1 / 3)  # n × n × n multiply-adds are 2 n³ FLOPs
        rate = np.interp(math.log(n), [math.log(size) for size in sizes], [self.products[size] for size in sizes])
        return float(rate) / self.gpu.bf16_flops_per_s

    def product_flops_per_s(self, bits: int, flops: float) -> float:
        """Return the rate of a matmul with this number of FLOPs, whose larger operand dtype has `bits` bits."""
        return self.peak_flops_per_s(bits) * self.share_of_peak(flops)

    @property
    def attention_flops_per_s(self) -> tuple[float, float]:
        """Rates of a fused attention kernel, forward and backward."""
        return self.gpu.attention_flops_per_s

    def __str__(self) -> str:
        forward, backward = (f"{rate / 1e12:,.0f}" for rate in self.attention_flops_per_s)
        measured = "" if self.gpu.attention_rates else " (assumed: the fraction of the peak of an H100)"
        return f"{self.of_products}, attention at {forward} TFLOP/s forward and {backward} backward{measured}"

    @property
    def of_products(self) -> str:
        """Description of the matmul rates."""
        if self.products:
            sizes = f"{min(self.products):,} to {max(self.products):,}"
            return f"matmuls at the rates measured for sizes {sizes} ({self.source})"
        if self.efficiency == 1.0:
            return f"matmuls at {self.gpu.name}'s data sheet peak"
        return f"matmuls at an assumed {self.efficiency:.0%} of the data sheet's peak"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Measured:
    """Links measured by mesh axis."""

    axes: Mapping[str, Link] = dataclasses.field(default_factory=dict, hash=False)
    """Links as XLA's collectives use them, by axis. The key of combined axes is `data*fsdp`, that of other axes `*`."""
    permutes: Mapping[str, Link] = dataclasses.field(default_factory=dict, hash=False)
    """Links as single messages use them, for `meshpar.collectives`. `axes` is used for missing axes."""
    source: str = ""
    """How and when the links were measured."""

    @property
    def links_from(self) -> str:
        """Description of the sources of the links."""
        axes = ", ".join("any axis" if axis == ANY else axis for axis in dict.fromkeys((*self.axes, *self.permutes)))
        return f"links measured along {axes}" + f" ({self.source})" * bool(self.source)

    def measured(self, axes: Sequence[str], *, permute: bool = False) -> Link | None:
        """Return the link measured along mesh axes, or None.

        Combined axes have the link of their key. Without one, the largest latency and the smallest bandwidth of the
        axes are used. `ANY` is used for axes without a link.

        Args:
          axes: mesh axes that are combined.
          permute: whether the link is for single messages instead of XLA's collectives.
        """
        links = {**self.axes, **self.permutes} if permute else {**self.permutes, **self.axes}
        combined, separate = links.get("*".join(axes)), [links.get(axis, links.get(ANY)) for axis in axes]
        if combined is not None or not separate or None in separate:
            return combined
        by_axis = [link for link in separate if link is not None]
        return Link(
            alpha_s=max(link.alpha_s for link in by_axis), bytes_per_s=min(link.bytes_per_s for link in by_axis)
        )

    def compares(self, axes: Sequence[str]) -> bool:
        """Return whether XLA's collectives and single messages were both measured along these mesh axes."""
        both = (self.axes, self.permutes)
        return all("*".join(axes) in by or all(axis in by or ANY in by for axis in axes) for by in both)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain data for `from_json`."""
        links = {"axes": self.axes, "permutes": self.permutes}
        data: dict[str, Any] = {
            field: {axis: dataclasses.asdict(link) for axis, link in by_axis.items()}
            for field, by_axis in links.items()
            if by_axis
        }
        return data | ({"source": self.source} if self.source else {})

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON for `parse_profile`. Raises `MeshparError` if the file cannot be written."""
        write_json(path, self.to_json(), "cluster profile")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links(_Measured):
    """Measured links by mesh axis, between devices that are not in the catalogue."""

    devices: str
    """The name of the devices in jax: `cpu`."""

    def __post_init__(self) -> None:
        if not self.axes and not self.permutes:
            fix = "measure links with meshpar bench collectives --mesh data=8 --save my.json"
            raise problem("profile of links", "use it", "it has no mesh axis", fix, code="damaged-file")

    @property
    def name(self) -> str:
        """`cpu links of data, tensor`."""
        named = dict.fromkeys((*self.axes, *self.permutes))
        return f"{self.devices} links of {', '.join('any axis' if axis == ANY else axis for axis in named)}"

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain data for `from_json`."""
        return {"devices": self.devices, **super().to_json()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Links:
        """Return the profile from plain data.

        Raises:
          MeshparError: a field is missing, unknown or has the wrong type.
        """
        _check_fields(data, {"devices", *_MEASURED})
        _check("devices", data.get("devices"), isinstance(data.get("devices"), str), "the name of the devices in jax")
        return Links(devices=data["devices"], **_axes_from_json(data))


ANY = "*"
"""Key of mesh axes without a measurement."""

MAX_LAUNCH_S = 1e-3
"""Upper limit of a kernel launch, 100 times that of a GPU, to detect a profile in another unit."""

HOST_DEVICES = Links(
    devices="cpu",
    permutes={ANY: Link(alpha_s=2.5e-4, bytes_per_s=8.9e7)},
    source="default for CPU host devices: meshpar bench collectives --mesh data=8 --max-bytes 10MB, jax 0.10.2 on a "
    "2-core Xeon at 2.5 GHz with other work on it, 2026-11-22; typical error of the fit 55%",
)
"""Links that `algorithm="auto"` assumes for the CPU devices of a machine, which share its cores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster(_Measured):
    """Nodes with equal GPUs. Device i is in node `i // gpus_per_node`.

    Links measured along mesh axes take precedence over `inside` and `across`.
    """

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    inside: Link
    """Link between the GPUs of a node."""
    across: Link
    """Link between nodes."""
    products: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    """Measured FLOP/s of matmuls of n × n matrices, by n (`meshpar bench gpu`); may be empty."""
    launch_s: float = 0.0
    """Minimum time between the starts of two kernels (`meshpar bench gpu`); 0 if it was not measured."""
    is_shared: bool = False
    """Whether the devices share the cores of a machine, as jax's host devices do. Then messages cannot overlap with
    compute."""

    def __post_init__(self) -> None:
        for field in ("nodes", "gpus_per_node"):
            if not 1 <= (count := getattr(self, field)) <= MAX_NODES:
                requested = f"have {count if abs(count) < 1e18 else 'more than 1e18'} {field}"
                reason = f"it must be an integer from 1 to {MAX_NODES:,}"
                raise problem(f"cluster of {self.gpu.name}", requested, reason, "write `h100:8x8`", code="out-of-range")

    @property
    def name(self) -> str:
        """`h100:8x8`."""
        return f"{self.gpu.name}:{self.nodes}x{self.gpus_per_node}"

    @property
    def links_from(self) -> str:
        """Description of the sources of the links."""
        if self.axes or self.permutes:
            return super().links_from
        default = cluster_of(self.gpu, nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        if (self.inside, self.across) == (default.inside, default.across):
            return "data-sheet links and NCCL's latencies, unmeasured"
        return "links of its profile" + f" ({self.source})" * bool(self.source)

    @property
    def num_devices(self) -> int:
        """Total number of GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def rates(self) -> Rates:
        """Expected rates of a step: measured rates, or assumed rates if none were measured."""
        return Rates(gpu=self.gpu, efficiency=MATMUL_EFFICIENCY, products=self.products, source=self.source)

    @property
    def best_rates(self) -> Rates:
        """The fastest rates that the catalogue or the profile supports."""
        return dataclasses.replace(self.rates, efficiency=1.0)

    def link(self, *, crosses_node: bool) -> Link:
        """Return the link within a node or between nodes."""
        return self.across if crosses_node else self.inside

    def layout(self, axes: Iterable[str], mesh: AnyMesh | Mapping[str, int]) -> tuple[int, int]:
        """Return the number of nodes of a group of devices along mesh axes, and the number of devices per node.

        If groups differ, these are the maximum number of nodes and the minimum number of devices.

        Args:
          axes: names of mesh axes.
          mesh: the mesh, or its axis sizes in order. Devices are numbered in the order of the mesh.

        Raises:
          MeshparError: the mesh lacks an axis, or has more devices than the cluster.
        """
        nodes, along = self._nodes(axes, mesh)
        if nodes.size > self.num_devices:
            requested, reason = f"use a mesh of {nodes.size} devices", f"it has {self.num_devices} GPUs"
            raise problem(f"cluster `{self.name}`", requested, reason, "use a larger cluster", code="out-of-range")
        group_size = math.prod(nodes.shape[dim] for dim in along)
        groups = np.moveaxis(nodes, along, range(-len(along), 0)).reshape(-1, group_size)
        counts = [np.unique(group, return_counts=True)[1] for group in groups]
        return max(map(len, counts)), int(min(count.min() for count in counts))

    def _nodes(self, axes: Iterable[str], mesh: AnyMesh | Mapping[str, int]) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return the node of each device of a mesh, and the dims of these axes."""
        sizes = dict(mesh) if isinstance(mesh, Mapping) else axis_sizes(mesh)
        for axis in (axes := list(axes)):
            if axis not in sizes:
                requested, fix = f"use mesh axis `{axis}`", near(axis, sizes)
                raise problem(f"cluster `{self.name}`", requested, "the mesh lacks it", fix, code="unknown-axis")
        nodes = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())) // self.gpus_per_node
        return nodes, tuple(dim for dim, axis in enumerate(sizes) if axis in axes)

    def crosses_node(self, axes: Iterable[str], mesh: AnyMesh | Mapping[str, int]) -> bool:
        """Return whether a group of devices along mesh axes spans several nodes.

        Args:
          axes: names of mesh axes.
          mesh: the mesh, or its axis sizes in order. Devices are numbered in the order of the mesh.

        Raises:
          MeshparError: the mesh lacks an axis.
        """
        nodes, along = self._nodes(axes, mesh)
        return bool(along) and bool((nodes.min(axis=along) != nodes.max(axis=along)).any())

    def groups_cross_node(self, groups: Sequence[Sequence[int]]) -> bool:
        """Return whether a group of device numbers spans several nodes."""
        return any(len({device // self.gpus_per_node for device in group}) > 1 for group in groups)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain data for `from_json`."""
        return {
            "gpu": self.gpu.name if GPUS.get(self.gpu.name) == self.gpu else dataclasses.asdict(self.gpu),
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "inside": dataclasses.asdict(self.inside),
            "across": dataclasses.asdict(self.across),
            **({"products": {str(n): rate for n, rate in self.products.items()}} if self.products else {}),
            **({"launch_s": self.launch_s} if self.launch_s else {}),
            **({"is_shared": True} if self.is_shared else {}),
            **super().to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Cluster:
        """Return the profile from plain data. The catalogue supplies missing values of `inside` and `across`.

        Raises:
          MeshparError: a field is missing, unknown or has the wrong type.
        """
        fields = {"gpu", "nodes", "gpus_per_node", "inside", "across", "products", "launch_s", "is_shared"}
        _check_fields(data, {*fields, *_MEASURED})
        is_shared, launch_s = data.get("is_shared", False), data.get("launch_s", 0.0)
        is_number = isinstance(launch_s, int | float) and not isinstance(launch_s, bool)
        _check(
            "launch_s",
            launch_s,
            is_number and 0 <= launch_s < MAX_LAUNCH_S,
            f"seconds below {MAX_LAUNCH_S:g}, as 2.5e-06",
        )
        _check("is_shared", is_shared, isinstance(is_shared, bool), "true or false")
        try:
            gpu = data["gpu"] if isinstance(data["gpu"], Mapping) else gpu_by_name(data["gpu"])
            gpu = gpu if isinstance(gpu, Gpu) else _gpu_from_json(gpu)
            for key in ("nodes", "gpus_per_node"):
                _check(key, data[key], type(data[key]) is int, "an integer")
            default = cluster_of(gpu, nodes=data["nodes"], gpus_per_node=data["gpus_per_node"])
            links: dict[str, Any] = _axes_from_json(data)
            for key in ("inside", "across"):
                links[key] = dataclasses.replace(getattr(default, key), **data.get(key, {}))
            products = _products_from_json(data.get("products", {}))
            return dataclasses.replace(
                default, products=products, launch_s=float(launch_s), is_shared=is_shared, **links
            )
        except MeshparError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            reason = f"a field is missing or invalid: {type(error).__name__}: {error}"
            fix = 'write {"gpu": "h100", "nodes": 8, "gpus_per_node": 8, "across": {"bytes_per_s": 5e10}}'
            raise problem("cluster profile", "read it", reason, fix, code="damaged-file") from None


Profile: TypeAlias = Cluster | Links
"""Content of a saved profile."""


def parse_profile(text: str | Profile) -> Profile:
    """Return the cluster of a text for `parse_cluster`, or the profile of a file.

    Raises:
      MeshparError: the text is invalid, or the GPU or the file does not exist.
    """
    if isinstance(text, Links):
        return text
    return _load(Path(text)) if isinstance(text, str) and text.endswith(".json") else parse_cluster(text)


def parse_cluster(text: str | Cluster) -> Cluster:
    """Return the cluster of a text: `h100:8x8` (GPU:NODESxGPUS), `h100:8` (a single node), or the file `my.json`.

    Raises:
      MeshparError: the text is invalid, the GPU or the file does not exist, or the profile is not for GPUs.

    Example:
      >>> parse_cluster("h100:8x8").num_devices
      64
    """
    if isinstance(text, Cluster):
        return text
    if isinstance(text, Links):
        raise _no_gpu(text.name, text)
    if not isinstance(text, str):
        reason, fix = f"it is a {type(text).__name__} and not a string", "write `h100:8x8`"
        raise problem(f"cluster {text!r}", "read it", reason, fix, code="wrong-type")
    if text.endswith(".json"):
        profile = _load(Path(text))
        if isinstance(profile, Links):
            raise _no_gpu(text, profile)
        return profile
    match = re.fullmatch(r"([A-Za-z0-9_\-]+):(?:([0-9]{1,6})x)?([0-9]{1,6})", text.strip())
    if match is None:
        reason, fix = "it is neither GPU:NODESxGPUS nor a .json profile", "write `h100:8x8`"
        raise problem(f"cluster `{text}`", "read it", reason, fix, code="bad-syntax")
    return cluster_of(gpu_by_name(match.group(1)), nodes=int(match.group(2) or 1), gpus_per_node=int(match.group(3)))


def cluster_of(gpu: Gpu, *, nodes: int, gpus_per_node: int) -> Cluster:
    """Return a cluster with the bandwidths of the catalogue and default latencies."""
    inside = Link(alpha_s=ALPHA_S[gpu.link], bytes_per_s=gpu.link_bytes_per_s)
    across = Link(alpha_s=ALPHA_S["network"], bytes_per_s=gpu.nic_bytes_per_s)
    return Cluster(gpu=gpu, nodes=nodes, gpus_per_node=gpus_per_node, inside=inside, across=across)


def gpu_by_name(name: str) -> Gpu:
    """Return a GPU of the catalogue. Raises `MeshparError` if the name is unknown."""
    gpu = GPUS.get(str(name).lower())
    if gpu is None:
        raise problem(
            f"GPU `{name}`", "use it", "it is not in the catalogue", near(str(name), GPUS), code="unknown-name"
        )
    return gpu


def gpu_of_kind(device_kind: str) -> Gpu | None:
    """Return the GPU that jax calls `device_kind`, or None for other devices and for parts of a GPU (MIG)."""
    return next((gpu for gpu in GPUS.values() if device_kind in gpu.device_kinds), None)


def cluster_here(devices: Sequence[Any]) -> Cluster | None:
    """Return the local GPUs as a cluster, or None if they are not in the catalogue."""
    gpu = gpu_of_kind(devices[0].device_kind) if len(devices) else None
    if gpu is None:
        return None
    nodes = len({device.process_index for device in devices})
    return cluster_of(gpu, nodes=nodes, gpus_per_node=-(-len(devices) // nodes))


def peak_flops_per_s(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Return the peak FLOP/s of a device by its name in jax, or None if it is unknown, such as a CPU.

    Args:
      device_kind: `jax.devices()[0].device_kind`, such as `NVIDIA H100 80GB HBM3`.
      dtype: `bfloat16` or `float16` (dense tensor cores), or `float32` (without tensor cores).
    """
    gpu = gpu_of_kind(device_kind)
    if gpu is None or dtype not in ("bfloat16", "float16", "float32"):
        return None
    return gpu.fp32_flops_per_s if dtype == "float32" else gpu.bf16_flops_per_s


def _no_gpu(name: str, links: Links) -> MeshparError:
    reason = f"it has links measured on `{links.devices}` devices, and no GPU"
    fix = 'name GPUs, such as h100:1x8; the profile can be used with algorithm="auto" and meshpar cost --axis'
    return problem(f"cluster profile `{name}`", "use it as a cluster of GPUs", reason, fix, code="wrong-type")


def _load(path: Path) -> Profile:
    data = read_json(path, f"cluster profile `{path}`", "use the path of a saved profile")
    if not isinstance(data, Mapping):
        reason, fix = "it has no JSON object", "save a profile with `Cluster.save`"
        raise problem(f"cluster profile `{path}`", "read it", reason, fix, code="damaged-file")
    return Links.from_json(data) if "devices" in data else Cluster.from_json(data)


_MEASURED = ("axes", "permutes", "source")


def _axes_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    _check("source", data.get("source", ""), isinstance(data.get("source", ""), str), "a string")
    result: dict[str, Any] = {"source": data.get("source", "")}
    for field in ("axes", "permutes"):
        links = data.get(field, {})
        _check(field, links, isinstance(links, Mapping), "an object with a link for each mesh axis")
        result[field] = {axis: _link_from_json(f"{field}.{axis}", link) for axis, link in links.items()}
    return result


def _products_from_json(data: Any) -> dict[int, float]:
    is_rates = isinstance(data, Mapping) and all(
        str(n).isdigit() and int(n) > 0 and isinstance(rate, int | float) and 0 < rate < math.inf
        for n, rate in data.items()
    )
    _check("products", data, is_rates, 'FLOP/s by the size of the matrices, as {"4096": 6.2e14}')
    return {int(n): float(rate) for n, rate in sorted(data.items(), key=lambda item: int(item[0]))}


def _link_from_json(field: str, data: Any) -> Link:
    try:
        return Link(**data)
    except (TypeError, MeshparError):
        expected = 'a latency of at least 0 and a bandwidth above 0, as {"alpha_s": 2e-6, "bytes_per_s": 4.5e11}'
        raise _invalid_field(field, data, expected) from None


def _check_fields(data: Mapping[str, Any], known: set[str]) -> None:
    for key in data.keys() - known:
        reason, fix = "a profile has no such field", near(key, known)
        raise problem("cluster profile", f"set `{key}`", reason, fix, code="unknown-name")


def _gpu_from_json(data: Mapping[str, Any]) -> Gpu:
    capability, kinds = data["chip"]["compute_capability"], data["device_kinds"]
    is_capability = isinstance(capability, list | tuple) and [type(part) for part in capability] == [int, int]
    _check("compute_capability", capability, is_capability, "two integers, as [9, 0]")
    are_kinds = isinstance(kinds, list | tuple) and bool(kinds) and all(isinstance(kind, str) for kind in kinds)
    _check("device_kinds", kinds, are_kinds, "a list of at least one name")
    gpu = gpu_from(data)
    for record in (gpu, gpu.chip):
        for field in dataclasses.fields(record):
            if field.type in ("int", "float"):
                _check_number(field.name, getattr(record, field.name), is_int=field.type == "int")
    return gpu


def _check_number(field: str, value: Any, *, is_int: bool) -> None:
    is_number = isinstance(value, int if is_int else int | float) and not isinstance(value, bool)
    expected = f"{'an integer' if is_int else 'a number'} above 0 and at most {MAX_VALUE:g}"
    _check(field, value, is_number and 0 < value <= MAX_VALUE, expected)


def _check(field: str, value: Any, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise _invalid_field(field, value, expected)


def _invalid_field(field: str, value: Any, expected: str) -> MeshparError:
    requested = f"set `{field}` to {value!r:.60}"
    return problem("cluster profile", requested, f"it must be {expected}", "correct the file", code="damaged-file")
