"""Clusters of GPUs and their links, by name or from a saved profile. SI units.

A profile is a JSON file. For GPUs it contains a `Cluster`, and for other devices `Links`: the links measured between
them by mesh axis (`meshpar bench collectives --save`).

    {"gpu": "h100", "nodes": 2, "gpus_per_node": 8, "axes": {"data": {"alpha_s": 2.1e-5, "bytes_per_s": 4.4e10}}}
    {"devices": "cpu", "axes": {"data": ...}, "permutes": {"data": ...}}
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from meshpar.hardware.catalogue import GPUS, AttentionKernel, Gpu, gpu_from, rate_table, rates_by_size
from meshpar.hardware.kernel_rates import TYPICAL, AttentionSize, RateTable, attention_rate, interpolated
from meshpar.sharding.errors import MeshparError, is_int, near, problem
from meshpar.sharding.host_resources import read_json, write_json
from meshpar.sharding.types import MeshLike, axis_sizes

MAX_SECONDS, MAX_VALUE, MAX_NODES = 1e9, 1e24, 999_999
"""Upper limits in profiles, so that products do not overflow: of times, of rates, of nodes and of GPUs per node."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A link in the alpha-beta model: a message of n bytes takes `alpha_s + n / bytes_per_s`."""

    alpha_s: float
    """Latency of a message, in seconds."""
    bytes_per_s: float

    def __post_init__(self) -> None:
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
this value, published training runs are predicted with a median error of 3 % in bfloat16 and 19 % in fp8
(`tests/planner/published.txt`). Attention has its own rates (`Gpu.attention_flops_per_s`)."""
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
    products_fp8: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    """The same of 8-bit matmuls."""
    shapes: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """Measured FLOP/s of matmuls by dtype size and shape (`shape_key`); may be empty."""
    attention: RateTable = dataclasses.field(default_factory=dict, hash=False)
    """Measured FLOP/s of attention kernels; may be empty."""
    grouped: RateTable = dataclasses.field(default_factory=dict, hash=False)
    """Measured FLOP/s of grouped matmuls; may be empty."""
    copy_bytes_per_s: float = 0.0
    """Bytes read and written per second by memory-bound kernels; 0 for the data sheet's bandwidth."""
    source: str = ""
    """How and when the rates were measured; may be empty."""

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes read and written per second by memory-bound kernels."""
        return self.copy_bytes_per_s or self.gpu.memory_bytes_per_s

    def peak_flops_per_s(self, bits: int) -> float:
        """Return the data sheet's peak FLOP/s of matmuls whose larger operand dtype has `bits` bits."""
        if bits <= 8:
            return self.gpu.fp8_flops_per_s
        return self.gpu.bf16_flops_per_s if bits <= 16 else self.gpu.fp32_flops_per_s

    def share_of_peak(self, flops: float, bits: int = 16) -> float:
        """Return the fraction of the peak that a square matmul with this number of FLOPs reaches.

        Without rates for 8 bits, 8-bit matmuls reach the fraction of 16-bit matmuls times `Gpu.fp8_efficiency`, except
        if the fraction is 1, the data sheet's peak.
        """
        n = max(flops / 2, 1.0) ** (1 / 3)  # n × n × n multiply-adds are 2 n³ FLOPs
        if bits <= 8 and self.products_fp8:
            return interpolated(self.products_fp8, n) / self.gpu.fp8_flops_per_s
        share = interpolated(self.products, n) / self.gpu.bf16_flops_per_s if self.products else self.efficiency
        return share * self.gpu.fp8_efficiency if bits <= 8 and share != 1.0 else share

    def product_flops_per_s(self, bits: int, flops: float, shape: tuple[int, int, int] | None = None) -> float:
        """Return the FLOP/s of a matmul.

        Args:
          bits: size of the larger operand dtype.
          flops: FLOPs of the matmul.
          shape: (m, k, n) of `[m, k] @ [k, n]`, if known. Rates that were measured for a shape take precedence.
        """
        measured = None if shape is None else self.shapes.get(shape_key(bits, *shape))
        return measured or self.peak_flops_per_s(bits) * self.share_of_peak(flops, bits)

    def attention_flops_per_s(
        self, kernel: AttentionKernel = "cudnn", size: AttentionSize = TYPICAL
    ) -> tuple[float, float]:
        """Return the FLOP/s of attention, forward and backward: of the profile, or of the catalogue."""
        forward, backward = self.gpu.attention_flops_per_s(kernel, size)
        measured = (
            attention_rate(self.attention, kernel, direction, size, GPUS["h100"].attention)
            for direction in ("forward", "backward")
        )
        return next(measured) or forward, next(measured) or backward

    def grouped_flops_per_s(self, kernel: str, operand: str, n: float) -> float:
        """Return the FLOP/s of a grouped matmul: of the profile, or of the catalogue (`Gpu.grouped_flops_per_s`)."""
        measured = self.grouped.get(f"{kernel} {operand}")
        return interpolated(measured, n) if measured else self.gpu.grouped_flops_per_s(kernel, operand, n)

    def __str__(self) -> str:
        return f"{self.of_products}, {self.of_attention()}, memory at {self.memory_bytes_per_s / 1e12:.2f} TB/s"

    def of_attention(self, kernel: AttentionKernel = "cudnn", size: AttentionSize = TYPICAL) -> str:
        """Text about the rates of attention."""
        forward, backward = (f"{rate / 1e12:,.0f}" for rate in self.attention_flops_per_s(kernel, size))
        is_measured = self.gpu.has_attention_rates(kernel) or any(key.startswith(kernel) for key in self.attention)
        assumed = "" if is_measured else " (assumed: the fraction of the peak of an H100)"
        return f"attention at {forward} TFLOP/s forward and {backward} backward ({size}){assumed}"

    @property
    def of_products(self) -> str:
        """Text about the matmul rates: measured, assumed, or the data sheet's peak."""
        if self.products:
            sizes = f"{min(self.products):,} to {max(self.products):,}"
            return f"matmuls at the rates measured for sizes {sizes} ({self.source})"
        if self.efficiency == 1.0:
            return f"matmuls at {self.gpu.name}'s data sheet peak"
        return f"matmuls at an assumed {self.efficiency:.0%} of the data sheet's peak"


_SHAPE_KEY = r"\d{1,2} bits \d+x\d+x\d+"


def shape_key(bits: int, m: int, k: int, n: int) -> str:
    """Return the key of `[m, k] @ [k, n]` in `Cluster.shapes`, which is also that of the transposed matmul.

    The matmuls of a product and of its gradients have the same sizes in another order, and keys of their own.
    """
    return f"{bits} bits {min(m, n)}x{k}x{max(m, n)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Measured:
    """Links measured by mesh axis."""

    axes: Mapping[str, Link] = dataclasses.field(default_factory=dict, hash=False)
    """Mesh axis -> link measured for XLA's collectives. The key `data*fsdp` means combined axes, `*` all other axes."""
    permutes: Mapping[str, Link] = dataclasses.field(default_factory=dict, hash=False)
    """Mesh axis -> link measured for single messages, as in `meshpar.collectives`. Missing axes use `axes`."""
    source: str = ""
    """How and when the links were measured."""

    @property
    def axis_names(self) -> str:
        """The measured mesh axes as text: `data, tensor`."""
        return ", ".join("any axis" if axis == ANY else axis for axis in dict.fromkeys((*self.axes, *self.permutes)))

    @property
    def links_from(self) -> str:
        """Text about the source of the links."""
        return f"links measured along {self.axis_names}" + f" ({self.source})" * bool(self.source)

    def measured(self, axes: Sequence[str], *, permute: bool = False) -> Link | None:
        """Return the link measured along mesh axes, or None.

        Combined axes may have their own link, with the key `data*fsdp`. Otherwise the result has the largest latency
        and the smallest bandwidth of the axes. Axes without a link use the link with the key `*`, if there is one.
        `permute` selects links for single messages; by default, links are for XLA's collectives.
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
        """Return whether both XLA's collectives and single messages were measured along these mesh axes."""
        both = (self.axes, self.permutes)
        return all("*".join(axes) in by or all(axis in by or ANY in by for axis in axes) for by in both)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain data for `from_json`, without empty fields."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}

    def save(self, path: str | Path) -> None:
        """Write the profile as a JSON file that `parse_profile` reads. Raise `MeshparError` if it cannot be written."""
        write_json(path, self.to_json(), "cluster profile")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links(_Measured):
    """Measured links by mesh axis, between devices that are not in the catalogue."""

    devices: str
    """The name of the devices in jax: `cpu`."""

    @property
    def name(self) -> str:
        """Name with the devices and the measured axes, such as `cpu links of data, tensor`."""
        return f"{self.devices} links of {self.axis_names}"

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Links:
        """Return the profile from plain data. Raises `MeshparError` if a field is missing, unknown or invalid."""
        with _reading():
            return Links(**_fields_from_json(data))


VARIABLE = "MESHPAR_CLUSTER"
"""Environment variable with the default cluster, or with the path of the default profile."""
ANY = "*"
"""Key of the link for all mesh axes that have no link of their own."""

MAX_LAUNCH_S = 0.1
"""Upper limit of the kernel launch time in a profile, 100 times a GPU's. Larger values are in a wrong unit."""

HOST_DEVICES = Links(
    devices="cpu",
    permutes={ANY: Link(alpha_s=2.5e-4, bytes_per_s=8.9e7)},
    source="default for CPU host devices: meshpar bench collectives --mesh data=8 --max-bytes 10MB, jax 0.10.2 on a "
    "2-core Xeon at 2.5 GHz with other work on it, 2026-11-22; typical error of the fit 55%",
)
"""Links that `algorithm="auto"` assumes for CPU host devices, which share the cores of a machine."""


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
    products_fp8: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    """The same of matmuls in e4m3."""
    shapes: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """Measured FLOP/s of the matmuls of a recipe, by `shape_key`."""
    attention: RateTable = dataclasses.field(default_factory=dict, hash=False)
    """Measured FLOP/s of attention (`meshpar.hardware.kernel_rates`). They replace the catalogue's."""
    grouped: RateTable = dataclasses.field(default_factory=dict, hash=False)
    """Measured FLOP/s of grouped matmuls. They replace the catalogue's, and select the fastest kernels."""
    copy_bytes_per_s: float = 0.0
    """Measured bytes read and written per second by a copy of a large array; 0 if it was not measured."""
    launch_s: float = 0.0
    """Minimum time between the starts of two kernels (`meshpar bench gpu`); 0 if it was not measured."""
    is_shared: bool = False
    """Whether the devices share the cores of a machine, as jax's host devices do, so that messages do not overlap with
    compute."""

    def __post_init__(self) -> None:
        for field in ("nodes", "gpus_per_node"):
            if not is_int(count := getattr(self, field), 1) or count > MAX_NODES:
                where = f"cluster of {self.gpu.name} with {field}={count!r:.80}"
                reason = f"the number must be an integer from 1 to {MAX_NODES:,}"
                raise problem(where, "", reason, "write `h100:8x8`", code="out-of-range")
        if not 0 <= self.copy_bytes_per_s <= MAX_VALUE:
            where, requested = f"cluster of {self.gpu.name}", f"use copy_bytes_per_s={self.copy_bytes_per_s}"
            reason, fix = f"a bandwidth is at most {MAX_VALUE:g} B/s", "write bytes per second, as 3e12"
            raise problem(where, requested, reason, fix, code="out-of-range")
        if not 0 <= self.launch_s <= MAX_LAUNCH_S:
            reason, fix = f"the launch of a kernel takes at most {MAX_LAUNCH_S:g} s", "write seconds, as 2.5e-06"
            where, requested = f"cluster of {self.gpu.name}", f"use launch_s={self.launch_s}"
            raise problem(where, requested, reason, fix, code="out-of-range")

    @property
    def name(self) -> str:
        """Name as GPU:NODESxGPUS, such as `h100:8x8`."""
        return f"{self.gpu.name}:{self.nodes}x{self.gpus_per_node}"

    @property
    def links_from(self) -> str:
        """Text about the source of the links: measurements, the data sheet, or values in the profile."""
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
    def memory_bytes_per_s(self) -> float:
        """Bytes read and written per second by memory-bound kernels: measured, or of the catalogue."""
        return self.copy_bytes_per_s or self.gpu.memory_bytes_per_s * self.gpu.memory_efficiency

    @property
    def rates(self) -> Rates:
        """Expected FLOP/s of kernels: measured rates, or assumed rates if none were measured."""
        measured = {
            name: getattr(self, name) for name in ("products", "products_fp8", "shapes", "attention", "grouped")
        }
        return Rates(
            gpu=self.gpu, efficiency=MATMUL_EFFICIENCY, **measured, copy_bytes_per_s=self.memory_bytes_per_s,
            source=self.source,
        )  # fmt: skip

    @property
    def best_rates(self) -> Rates:
        """Most optimistic rates of kernels: measured rates, or the data sheet's peaks if none were measured."""
        return dataclasses.replace(self.rates, efficiency=1.0, copy_bytes_per_s=self.copy_bytes_per_s)

    def layout(self, axes: Iterable[str], mesh: MeshLike) -> tuple[int, int]:
        """Return (number of nodes, devices per node) of the groups of devices along mesh axes.

        If groups differ, the result is the maximum number of nodes and the minimum number of devices per node. Devices
        are numbered in mesh order.
        """
        sizes, axes = axis_sizes(mesh), list(axes)
        for axis in axes:
            if axis not in sizes:
                requested, fix = f"use mesh axis `{axis}`", near(axis, sizes)
                raise problem(f"cluster `{self.name}`", requested, "the mesh lacks it", fix, code="unknown-axis")
        if (num_devices := math.prod(sizes.values())) > self.num_devices:
            requested, reason = f"use a mesh of {num_devices} devices", f"it has {self.num_devices} GPUs"
            raise problem(f"cluster `{self.name}`", requested, reason, "use a larger cluster", code="out-of-range")
        nodes = np.arange(num_devices).reshape(tuple(sizes.values())) // self.gpus_per_node
        along = [dim for dim, axis in enumerate(sizes) if axis in axes]
        group_size = math.prod(nodes.shape[dim] for dim in along)
        groups = np.moveaxis(nodes, along, range(-len(along), 0)).reshape(-1, group_size)
        counts = [np.unique(group, return_counts=True)[1] for group in groups]
        return max(map(len, counts)), int(min(count.min() for count in counts))

    def crosses_node(self, axes: Iterable[str], mesh: MeshLike) -> bool:
        """Return whether any group of devices along these mesh axes spans several nodes."""
        return self.layout(axes, mesh)[0] > 1

    def groups_cross_node(self, groups: Sequence[Sequence[int]]) -> bool:
        """Return whether any of these groups of device numbers spans several nodes."""
        return any(len({device // self.gpus_per_node for device in group}) > 1 for group in groups)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain data for `from_json`, without empty fields."""
        data = super().to_json()
        return data | {"gpu": self.gpu.name} if GPUS.get(self.gpu.name) == self.gpu else data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Cluster:
        """Return the profile from plain data. The catalogue supplies missing values of `inside` and `across`."""
        with _reading():
            fields = _fields_from_json(data)
            gpu = gpu_from(data["gpu"]) if isinstance(data["gpu"], Mapping) else gpu_by_name(data["gpu"])
            default = cluster_of(gpu, nodes=data["nodes"], gpus_per_node=data["gpus_per_node"])
            links = {
                key: dataclasses.replace(getattr(default, key), **data.get(key, {})) for key in ("inside", "across")
            }
            return dataclasses.replace(default, **{**fields, **links, "gpu": gpu})


Profile: TypeAlias = Cluster | Links
"""Content of a saved profile."""


def parse_profile(text: str | Profile) -> Profile:
    """Return the cluster that a text such as `h100:8x8` names, or the profile saved in a .json file."""
    if isinstance(text, Cluster | Links):
        return text
    if not isinstance(text, str):
        reason, fix = f"it is a {type(text).__name__} and not a string", "write `h100:8x8`"
        raise problem(f"cluster {text!r}", "read it", reason, fix, code="wrong-type")
    if text.endswith(".json"):
        data = read_json(text, f"cluster profile `{text}`", "use the path of a saved profile")
        return Links.from_json(data) if isinstance(data, Mapping) and "devices" in data else Cluster.from_json(data)
    match = re.fullmatch(r"([A-Za-z0-9_\-]+):(?:([0-9]{1,6})x)?([0-9]{1,6})", text.strip())
    if match is None:
        reason, fix = "it is neither GPU:NODESxGPUS nor a .json profile", "write `h100:8x8`"
        raise problem(f"cluster `{text}`", "read it", reason, fix, code="bad-syntax")
    return cluster_of(gpu_by_name(match.group(1)), nodes=int(match.group(2) or 1), gpus_per_node=int(match.group(3)))


def parse_cluster(text: str | Cluster) -> Cluster:
    """Return the cluster that a text names: `h100:8x8` (GPU:NODESxGPUS), `h100:8` (one node), or a file `my.json`.

    Example:
      >>> parse_cluster("h100:8x8").num_devices
      64
    """
    profile = parse_profile(text)
    if isinstance(profile, Links):
        where = f"cluster profile `{text if isinstance(text, str) else profile.name}`"
        reason = f"it has links measured on `{profile.devices}` devices, and no GPU"
        fix = 'name GPUs, such as h100:1x8; the profile can be used with algorithm="auto" and meshpar cost --axis'
        raise problem(where, "use it as a cluster of GPUs", reason, fix, code="wrong-type")
    return profile


def cluster_of(gpu: Gpu, *, nodes: int, gpus_per_node: int) -> Cluster:
    """Return a cluster with the bandwidths of the catalogue and default latencies."""
    inside = Link(alpha_s=ALPHA_S[gpu.link], bytes_per_s=gpu.link_bytes_per_s)
    across = Link(alpha_s=ALPHA_S["network"], bytes_per_s=gpu.nic_bytes_per_s)
    return Cluster(gpu=gpu, nodes=nodes, gpus_per_node=gpus_per_node, inside=inside, across=across)


def gpu_by_name(name: str) -> Gpu:
    """Return a GPU of the catalogue. Raises `MeshparError` if the name is unknown."""
    gpu = GPUS.get(str(name).lower())
    if gpu is None:
        fix = near(str(name), GPUS)
        raise problem(f"GPU `{name}`", "use it", "it is not in the catalogue", fix, code="unknown-name")
    return gpu


def gpu_of_kind(device_kind: str) -> Gpu | None:
    """Return the GPU that jax calls `device_kind`, or None for other devices and for parts of a GPU (MIG)."""
    return next((gpu for gpu in GPUS.values() if device_kind in gpu.device_kinds), None)


def cluster_here(devices: Sequence[Any]) -> Cluster | None:
    """Return the local GPUs as a cluster, or None if they are not in the catalogue.

    A profile of the same GPU in `MESHPAR_CLUSTER` replaces rates and links of the catalogue.
    """
    gpu = gpu_of_kind(devices[0].device_kind) if len(devices) else None
    if gpu is None:
        return None
    num_nodes = len({device.process_index for device in devices})
    default = cluster_of(gpu, nodes=num_nodes, gpus_per_node=-(-len(devices) // num_nodes))
    profile = parse_profile(path) if (path := os.environ.get(VARIABLE)) else None
    if isinstance(profile, Cluster) and profile.gpu == gpu:
        return dataclasses.replace(profile, nodes=default.nodes, gpus_per_node=default.gpus_per_node)
    return default


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


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Convert the errors of an invalid profile to a `MeshparError`."""
    try:
        yield
    except MeshparError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        reason = f"a field is missing, unknown or invalid: {type(error).__name__}: {error}"
        fix = 'write {"gpu": "h100", "nodes": 8, "gpus_per_node": 8, "across": {"bytes_per_s": 5e10}}'
        raise problem("cluster profile", "read it", reason, fix, code="damaged-file") from error


def _fields_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a profile from plain data, with its links."""
    fields = dict(data)
    for key in {"axes", "permutes"} & data.keys():
        fields[key] = {axis: Link(**link) for axis, link in data[key].items()}
    for key in {"products", "products_fp8"} & data.keys():
        fields[key] = rates_by_size(data[key])
    for key in {"attention", "grouped"} & data.keys():
        fields[key] = rate_table(data[key])
    if "shapes" in data:
        fields["shapes"] = shapes = {key: float(rate) for key, rate in data["shapes"].items()}
        if not all(re.fullmatch(_SHAPE_KEY, key) and 0 < rate < math.inf for key, rate in shapes.items()):
            raise ValueError(f"shapes need keys such as `{shape_key(16, 64, 128, 32)}` and positive rates")
    return fields
