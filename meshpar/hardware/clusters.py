"""Clusters of GPUs: how many, joined by which links, by name or from a saved profile. SI units.

A profile is a JSON file. Of GPUs it is a `Cluster`; of any other devices it is `Links`: what was measured between them
by mesh axis (`meshpar bench collectives --save`), and nothing that would pass for a GPU.

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

MOST_SECONDS, MOST_FIGURE, MOST_NODES = 1e9, 1e24, 999_999
"""Upper limits of what a user may give, so that no product overflows: latencies, rates and sizes, numbers of GPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A kind of link in the alpha-beta model: a message of n bytes takes `alpha_s + n / bytes_per_s`."""

    alpha_s: float
    """Time of a message without its bytes."""
    bytes_per_s: float

    def __post_init__(self) -> None:
        for field in ("alpha_s", "bytes_per_s"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise problem("a cluster's link", f"set {field} to {value!r}", "it is a number", "write 2e-6, say")
        if not 0 <= self.alpha_s <= MOST_SECONDS or not 1 / MOST_FIGURE <= self.bytes_per_s <= MOST_FIGURE:
            exists = f"a latency is from 0 to {MOST_SECONDS:g} s, a bandwidth above 0 and at most {MOST_FIGURE:g} B/s"
            raise problem("a cluster's link", f"use {self}", exists, "write alpha_s=2e-6, bytes_per_s=4.5e11, say")

    @property
    def beta_s_per_byte(self) -> float:
        """Time of one byte."""
        return 1 / self.bytes_per_s


MATMUL_EFFICIENCY = 0.65
"""Share of the peak that products reach where a profile has none measured: assumed, not fitted. Alone, large ones in
bfloat16 reach 0.79 of it on an H100 (XLA's table, xla/service/gpu/model/matmul_interpolator_data.h, 2025), 0.60 to 0.69
on Meta's of 500 W (pytorch/ao, torchao/testing/float8/roofline_utils.py, 2024 and 2025), and in a step they are not
alone; published training is told with it to a median of a tenth (`tests/planner/published.txt`). Attention goes by
rates of its own (`Gpu.attention_flops_per_s`)."""
ALPHA_S: Mapping[str, float] = {"nvlink": 1.9e-6, "pcie": 2.5e-6, "network": 4.0e-6}
"""Latency of one ring step by kind of link: the figures NCCL's own tuning model uses for its ring with the LL128
protocol (NVIDIA/nccl, src/graph/tuning.cc, `hwLat`, version 2.23, 2024). Measure yours and save a profile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """FLOP/s of a GPU's kernels: matrix products by the width of their operands and by size, and attention."""

    gpu: Gpu
    efficiency: float
    """Share of the data sheet's peak that matrix products reach where none were measured."""
    products: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    """Measured FLOP/s of bfloat16 products of n × n matrices, by n; empty: none were measured."""
    source: str = ""
    """Where the measured rates come from."""

    def peak_flops_per_s(self, bits: int) -> float:
        """Data sheet's peak of products whose wider operand has elements of this many bits."""
        if bits <= 8:
            return self.gpu.fp8_flops_per_s
        return self.gpu.bf16_flops_per_s if bits <= 16 else self.gpu.fp32_flops_per_s

    def share_of_peak(self, flops: float) -> float:
        """Share of the peak that a product with this many FLOPs reaches: that of a square product of the same size."""
        if not self.products:
            return self.efficiency
        sizes = sorted(self.products)
        n = max(flops / 2, 1.0) ** (1 / 3)  # n × n × n multiply-adds are 2 n³ FLOPs
        rate = np.interp(math.log(n), [math.log(size) for size in sizes], [self.products[size] for size in sizes])
        return float(rate) / self.gpu.bf16_flops_per_s

    def product_flops_per_s(self, bits: int, flops: float) -> float:
        """Rate of a product with this many FLOPs, whose wider operand has elements of this many bits."""
        return self.peak_flops_per_s(bits) * self.share_of_peak(flops)

    @property
    def attention_flops_per_s(self) -> tuple[float, float]:
        """Rate of a fused attention kernel, forward and backward."""
        return self.gpu.attention_flops_per_s

    def __str__(self) -> str:
        forward, backward = (f"{rate / 1e12:,.0f}" for rate in self.attention_flops_per_s)
        measured = "" if self.gpu.attention_rates else " (assumed: an H100's share of the peak)"
        return f"{self.of_products}, attention at {forward} TFLOP/s forward and {backward} backward{measured}"

    @property
    def of_products(self) -> str:
        """The rates of matrix products in words."""
        if self.products:
            sizes = f"{min(self.products):,} to {max(self.products):,}"
            return f"matmuls at the rates measured for sizes {sizes} ({self.source})"
        if self.efficiency == 1.0:
            return f"matmuls at {self.gpu.name}'s data sheet peak"
        return f"matmuls at an assumed {self.efficiency:.0%} of the data sheet's peak"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Measured:
    """Links as they were measured by mesh axis."""

    axes: Mapping[str, Link] = dataclasses.field(default_factory=dict, hash=False)
    """As XLA's own collectives use it, by axis; several axes that count as one go by `data*fsdp`, others by `*`."""
    permutes: Mapping[str, Link] = dataclasses.field(default_factory=dict, hash=False)
    """As single messages use it, of which `meshpar.collectives` is made; where an axis is missing, `axes` serves."""
    source: str = ""
    """How and when it was measured, if it was."""

    @property
    def links_from(self) -> str:
        """Which figures its links have, for whoever reads a time that is made of them."""
        axes = ", ".join("any axis" if axis == ANY else axis for axis in dict.fromkeys((*self.axes, *self.permutes)))
        return f"links measured along {axes}" + f" ({self.source})" * bool(self.source)

    def measured(self, axes: Sequence[str], *, permute: bool = False) -> Link | None:
        """The link that was measured along mesh axes; None when it is not known.

        Several axes have a measurement of their own, or else the worse figures of their links when each has one. An
        axis that has none goes by that of `ANY`, where there is one.

        Args:
          axes: mesh axes that count as one.
          permute: whether single messages use it, not XLA's own collectives.
        """
        known = {**self.axes, **self.permutes} if permute else {**self.permutes, **self.axes}
        whole, parts = known.get("*".join(axes)), [known.get(axis, known.get(ANY)) for axis in axes]
        if whole is not None or not parts or None in parts:
            return whole
        each = [part for part in parts if part is not None]
        return Link(alpha_s=max(one.alpha_s for one in each), bytes_per_s=min(one.bytes_per_s for one in each))

    def compares(self, axes: Sequence[str]) -> bool:
        """Whether XLA's own collectives and single messages were both measured along these mesh axes."""
        both = (self.axes, self.permutes)
        return all("*".join(axes) in by or all(axis in by or ANY in by for axis in axes) for by in both)

    def to_json(self) -> dict[str, Any]:
        """The profile as plain data; `from_json` reads it back."""
        links = {"axes": self.axes, "permutes": self.permutes}
        found: dict[str, Any] = {
            field: {axis: dataclasses.asdict(link) for axis, link in by_axis.items()}
            for field, by_axis in links.items()
            if by_axis
        }
        return found | ({"source": self.source} if self.source else {})

    def save(self, path: str | Path) -> None:
        """Write it as JSON, which `parse_profile` reads. Raises `ValueError` where it cannot be written."""
        write_json(path, self.to_json(), "cluster profile")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links(_Measured):
    """Measured links by mesh axis, between devices that the catalogue does not know; each at any distance along it."""

    devices: str
    """What jax calls them: `cpu`."""

    def __post_init__(self) -> None:
        if not self.axes and not self.permutes:
            fix = "measure some: meshpar bench collectives --mesh data=8 --save my.json"
            raise problem(f"profile `{self.name}`", "hold links", "it names no mesh axis", fix)

    @property
    def name(self) -> str:
        """`cpu links of data, tensor`."""
        named = dict.fromkeys((*self.axes, *self.permutes))
        return f"{self.devices} links of {', '.join('any axis' if axis == ANY else axis for axis in named)}"

    def to_json(self) -> dict[str, Any]:
        """The profile as plain data; `from_json` reads it back."""
        return {"devices": self.devices, **super().to_json()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Links:
        """Reads a profile.

        Raises:
          ValueError: a field is missing, unknown or of the wrong kind.
        """
        _check_fields(data, {"devices", *_MEASURED})
        _check("devices", data.get("devices"), isinstance(data.get("devices"), str), "a name, as jax gives it")
        return Links(devices=data["devices"], **_axes_from_json(data))


ANY = "*"
"""In place of a mesh axis: whichever has no measurement of its own."""

LONGEST_LAUNCH_S = 1e-3
"""A hundred times what a GPU's driver needs: above it a profile has another unit."""

HOST_DEVICES = Links(
    devices="cpu",
    permutes={ANY: Link(alpha_s=2.5e-4, bytes_per_s=8.9e7)},
    source="default for CPU host devices: meshpar bench collectives --mesh data=8 --max-bytes 10MB, jax 0.10.2 on a "
    "2-core Xeon at 2.5 GHz with other work on it, 2026-11-22; typical error of the fit 55%",
)
"""What `algorithm="auto"` takes on the CPU devices of one machine. They share its cores: measure yours and save a
profile where it matters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster(_Measured):
    """Nodes of equal GPUs; device i stands in node `i // gpus_per_node`. What was measured along a mesh axis comes
    before `inside` and `across`."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    inside: Link
    """Between GPUs of one node."""
    across: Link
    """Between nodes."""
    products: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    """FLOP/s that were measured of products of n × n matrices, by n (`meshpar bench gpu`); empty: none were."""
    launch_s: float = 0.0
    """From the start of a kernel to the next one's at the least (`meshpar bench gpu`); 0: nobody measured it."""
    is_shared: bool = False
    """Whether the devices share the cores of one machine, as jax's host devices do: messages are work of the same
    cores, so that nothing hides them, and who waits leaves its cores to others."""

    def __post_init__(self) -> None:
        for field in ("nodes", "gpus_per_node"):
            if not 1 <= (count := getattr(self, field)) <= MOST_NODES:
                asked = f"have {count if abs(count) < 1e18 else 'more than 1e18'} {field}"
                exists = f"it is a whole number from 1 to {MOST_NODES:,}"
                raise problem(f"a cluster of {self.gpu.name}", asked, exists, "write it as `h100:8x8`")

    @property
    def name(self) -> str:
        """`h100:8x8`."""
        return f"{self.gpu.name}:{self.nodes}x{self.gpus_per_node}"

    @property
    def links_from(self) -> str:
        """As above; of links that nobody measured it is not known how far off they are."""
        if self.axes or self.permutes:
            return super().links_from
        usual = cluster_of(self.gpu, nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        if (self.inside, self.across) == (usual.inside, usual.across):
            return "data-sheet links and NCCL's latencies, unmeasured"
        return "links as its profile gives them" + f" ({self.source})" * bool(self.source)

    @property
    def num_devices(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node

    @property
    def rates(self) -> Rates:
        """The rates that a step is expected to reach: measured ones where there are any, else assumed ones."""
        return Rates(gpu=self.gpu, efficiency=MATMUL_EFFICIENCY, products=self.products, source=self.source)

    @property
    def best_rates(self) -> Rates:
        """The fastest rates that the catalogue or the profile supports."""
        return dataclasses.replace(self.rates, efficiency=1.0)

    def link(self, *, crosses_node: bool) -> Link:
        """The link that messages inside a node or between nodes use."""
        return self.across if crosses_node else self.inside

    def layout(self, axes: Iterable[str], mesh: AnyMesh | Mapping[str, int]) -> tuple[int, int]:
        """(nodes, devices in each of them) of a group of devices that differ only along these mesh axes.

        Where groups differ: the most nodes, and the fewest devices in one.

        Args:
          axes: names of mesh axes.
          mesh: the mesh, or its axis sizes in order; its devices are counted in its own order.

        Raises:
          ValueError: the mesh lacks an axis, or has more devices than the cluster.
        """
        nodes, along = self._nodes(axes, mesh)
        if nodes.size > self.num_devices:
            asked, fix = f"hold a mesh of {nodes.size} devices", "name a cluster of as many"
            raise problem(f"cluster `{self.name}`", asked, f"it has {self.num_devices} GPUs", fix)
        groups = np.moveaxis(nodes, along, range(-len(along), 0)).reshape(
            -1, math.prod(nodes.shape[at] for at in along)
        )
        counts = [np.unique(group, return_counts=True)[1] for group in groups]
        return max(map(len, counts)), int(min(count.min() for count in counts))

    def _nodes(self, axes: Iterable[str], mesh: AnyMesh | Mapping[str, int]) -> tuple[np.ndarray, tuple[int, ...]]:
        """The node of each device of a mesh, and which of its dims these axes are."""
        sizes = dict(mesh) if isinstance(mesh, Mapping) else axis_sizes(mesh)
        for axis in (wanted := list(axes)):
            if axis not in sizes:
                raise problem(
                    f"cluster `{self.name}`", f"look at mesh axis `{axis}`", "the mesh has none", near(axis, sizes)
                )
        nodes = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())) // self.gpus_per_node
        return nodes, tuple(at for at, axis in enumerate(sizes) if axis in wanted)

    def crosses_node(self, axes: Iterable[str], mesh: AnyMesh | Mapping[str, int]) -> bool:
        """Whether devices that differ only along these mesh axes stand in different nodes.

        Args:
          axes: names of mesh axes.
          mesh: the mesh, or its axis sizes in order; its devices are counted in its own order.

        Raises:
          ValueError: the mesh lacks an axis.
        """
        nodes, along = self._nodes(axes, mesh)
        return bool(along) and bool((nodes.min(axis=along) != nodes.max(axis=along)).any())

    def groups_cross_node(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether some group of device numbers spans more than one node."""
        return any(len({device // self.gpus_per_node for device in group}) > 1 for group in groups)

    def to_json(self) -> dict[str, Any]:
        """The profile as plain data; `from_json` reads it back."""
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
        """Reads a profile. `inside` and `across` may be left out or hold one number each: the catalogue gives the rest.

        Raises:
          ValueError: a field is missing, unknown or of the wrong kind.
        """
        own = {"gpu", "nodes", "gpus_per_node", "inside", "across", "products", "launch_s", "is_shared"}
        _check_fields(data, {*own, *_MEASURED})
        is_shared, launch_s = data.get("is_shared", False), data.get("launch_s", 0.0)
        is_time = (
            isinstance(launch_s, int | float) and not isinstance(launch_s, bool) and 0 <= launch_s < LONGEST_LAUNCH_S
        )
        _check("launch_s", launch_s, is_time, f"seconds below {LONGEST_LAUNCH_S:g}, as 2.5e-06")
        _check("is_shared", is_shared, isinstance(is_shared, bool), "true or false")
        try:
            gpu = data["gpu"] if isinstance(data["gpu"], Mapping) else gpu_by_name(data["gpu"])
            gpu = gpu if isinstance(gpu, Gpu) else _gpu_from_json(gpu)
            for key in ("nodes", "gpus_per_node"):
                _check(key, data[key], type(data[key]) is int, "a whole number")
            usual = cluster_of(gpu, nodes=data["nodes"], gpus_per_node=data["gpus_per_node"])
            links: dict[str, Any] = _axes_from_json(data)
            for key in ("inside", "across"):
                links[key] = dataclasses.replace(getattr(usual, key), **data.get(key, {}))
            products = _products_from_json(data.get("products", {}))
            return dataclasses.replace(usual, products=products, launch_s=float(launch_s), is_shared=is_shared, **links)
        except MeshparError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            exists = f"it lacks or garbles something: {type(error).__name__}: {error}"
            fix = 'write {"gpu": "h100", "nodes": 8, "gpus_per_node": 8, "across": {"bytes_per_s": 5e10}}'
            raise problem("a cluster's profile", "read it", exists, fix) from None


Profile: TypeAlias = Cluster | Links
"""What a saved profile may hold, and all that the time of a message needs."""


def parse_profile(text: str | Profile) -> Profile:
    """What a user named: a cluster, as `parse_cluster` takes it, or the file of a profile of any devices.

    Raises:
      ValueError: no such GPU, no such file, or neither form.
    """
    if isinstance(text, Links):
        return text
    return _load(Path(text)) if isinstance(text, str) and text.endswith(".json") else parse_cluster(text)


def parse_cluster(text: str | Cluster) -> Cluster:
    """The cluster that a user named: `h100:8x8` (GPU:NODESxGPUS), `h100:8` (one node), or a profile's file `my.json`.

    Raises:
      ValueError: no such GPU, no such file, neither form, or a profile of devices that are no known GPU.
    """
    if isinstance(text, Cluster):
        return text
    if isinstance(text, Links):
        raise _no_gpu(text.name, text)
    if not isinstance(text, str):
        raise problem(
            f"cluster {text!r}", "be read", f"it is a {type(text).__name__}, no text", "write it as `h100:8x8`"
        )
    if text.endswith(".json"):
        profile = _load(Path(text))
        if isinstance(profile, Links):
            raise _no_gpu(text, profile)
        return profile
    match = re.fullmatch(r"([A-Za-z0-9_\-]+):(?:([0-9]{1,6})x)?([0-9]{1,6})", text.strip())
    if match is None:
        raise problem(
            f"cluster `{text}`", "be read", "it is neither GPU:NODESxGPUS nor a .json profile", "write it as `h100:8x8`"
        )
    return cluster_of(gpu_by_name(match.group(1)), nodes=int(match.group(2) or 1), gpus_per_node=int(match.group(3)))


def cluster_of(gpu: Gpu, *, nodes: int, gpus_per_node: int) -> Cluster:
    """A cluster with the catalogue's bandwidths and the default latencies."""
    inside = Link(alpha_s=ALPHA_S[gpu.link], bytes_per_s=gpu.link_bytes_per_s)
    across = Link(alpha_s=ALPHA_S["network"], bytes_per_s=gpu.nic_bytes_per_s)
    return Cluster(gpu=gpu, nodes=nodes, gpus_per_node=gpus_per_node, inside=inside, across=across)


def gpu_by_name(name: str) -> Gpu:
    """A GPU of the catalogue. Raises `ValueError` when it has none of this name."""
    gpu = GPUS.get(str(name).lower())
    if gpu is None:
        raise problem(f"GPU `{name}`", "be looked up", "the catalogue lacks it", near(str(name), GPUS))
    return gpu


def gpu_of_kind(device_kind: str) -> Gpu | None:
    """The catalogue's GPU that jax calls `device_kind`; None for any other device, parts of a GPU (MIG) included."""
    return next((gpu for gpu in GPUS.values() if device_kind in gpu.device_kinds), None)


def cluster_here(devices: Sequence[Any]) -> Cluster | None:
    """The GPUs at hand, as jax lists them, as a cluster; None when the catalogue does not know them."""
    gpu = gpu_of_kind(devices[0].device_kind) if len(devices) else None
    if gpu is None:
        return None
    nodes = len({device.process_index for device in devices})
    return cluster_of(gpu, nodes=nodes, gpus_per_node=-(-len(devices) // nodes))


def peak_flops_per_s(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Peak FLOP/s of a device by the name jax gives its kind, for utilisation; None when it is not known (a CPU).

    Args:
      device_kind: `jax.devices()[0].device_kind`, as `NVIDIA H100 80GB HBM3`.
      dtype: `bfloat16` or `float16` (dense tensor cores), or `float32` (outside them).
    """
    gpu = gpu_of_kind(device_kind)
    if gpu is None or dtype not in ("bfloat16", "float16", "float32"):
        return None
    return gpu.fp32_flops_per_s if dtype == "float32" else gpu.bf16_flops_per_s


def _no_gpu(name: str, links: Links) -> MeshparError:
    exists = f"it was measured on `{links.devices}` devices: it holds links, and nothing about a GPU"
    fix = 'name GPUs, as h100:1x8; the profile itself serves algorithm="auto" and meshpar cost --axis'
    return problem(f"cluster profile `{name}`", "stand for a cluster of GPUs", exists, fix)


def _load(path: Path) -> Profile:
    data = read_json(path, f"cluster profile `{path}`", "give the path of a saved profile")
    if not isinstance(data, Mapping):
        raise problem(f"cluster profile `{path}`", "be read", "it holds no JSON object", "save one with `Cluster.save`")
    return Links.from_json(data) if "devices" in data else Cluster.from_json(data)


_MEASURED = ("axes", "permutes", "source")


def _axes_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    _check("source", data.get("source", ""), isinstance(data.get("source", ""), str), "a text")
    found: dict[str, Any] = {"source": data.get("source", "")}
    for field in ("axes", "permutes"):
        links = data.get(field, {})
        _check(field, links, isinstance(links, Mapping), "a link for each mesh axis")
        found[field] = {axis: _link_from_json(f"{field}.{axis}", link) for axis, link in links.items()}
    return found


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
        kind = 'a latency of at least 0 and a bandwidth above 0, as {"alpha_s": 2e-6, "bytes_per_s": 4.5e11}'
        raise problem(
            "a cluster's profile", f"set `{field}` to {data!r}", f"it is {kind}", "correct the file"
        ) from None


def _check_fields(data: Mapping[str, Any], known: set[str]) -> None:
    for key in data.keys() - known:
        raise problem("a cluster's profile", f"set `{key}`", "a profile has no such field", near(key, known))


def _gpu_from_json(data: Mapping[str, Any]) -> Gpu:
    capability, kinds = data["chip"]["compute_capability"], data["device_kinds"]
    is_capability = isinstance(capability, list | tuple) and [type(part) for part in capability] == [int, int]
    _check("compute_capability", capability, is_capability, "two whole numbers, as [9, 0]")
    are_kinds = isinstance(kinds, list | tuple) and bool(kinds) and all(isinstance(kind, str) for kind in kinds)
    _check("device_kinds", kinds, are_kinds, "a list of at least one name")
    gpu = gpu_from(data)
    for one in (gpu, gpu.chip):
        for field in dataclasses.fields(one):
            if field.type in ("int", "float"):
                _check_figure(field.name, getattr(one, field.name), is_int=field.type == "int")
    return gpu


def _check_figure(field: str, value: Any, *, is_int: bool) -> None:
    is_number = isinstance(value, int if is_int else int | float) and not isinstance(value, bool)
    kind = "a whole number above 0" if is_int else "a number above 0"
    _check(field, value, is_number and 0 < value <= MOST_FIGURE, f"{kind} and at most {MOST_FIGURE:g}")


def _check(field: str, value: Any, holds: bool, kind: str) -> None:
    if not holds:
        raise problem("a cluster's profile", f"set `{field}` to {value!r:.60}", f"it is {kind}", "correct the file")
