"""`MeshSpec`, the sizes of the mesh axes, and the assignment of devices to mesh positions."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshpar.sharding.errors import check_cases, is_int, near, problem
from meshpar.sharding.host_resources import check_not_forked
from meshpar.sharding.types import AnyMesh

AXES = ("data", "stage", "fsdp", "expert", "tensor")
"""The standard mesh axes, from the slowest network to the fastest. Custom axes come just before `tensor`."""

AxisTypes: TypeAlias = str | AxisType | Mapping[str, str | AxisType]
"""The type of all mesh axes, or a type for each axis."""

MAX_DEVICES = 1 << 24
"""Larger than any pod. jax counts devices with 32 bits."""


class MeshSpec(Mapping[str, int]):
    """Sizes of the mesh axes, as an immutable mapping. A size of -1 stands for the remaining devices.

    A mesh has the five standard axes, with size 1 by default, so a strategy works with any mesh. The innermost axis,
    `tensor`, connects neighboring devices of a node.

    Args:
      inside_node: axes that must not cross nodes (hosts with fast internal links). Checked if there are several nodes.
      axis_types: "auto" (the default), "explicit" or a `jax.sharding.AxisType`, for all axes or for each axis. On
        Explicit axes, arrays outside a step have their sharding as a type. The collectives are the same.
      **sizes: size of each axis. A name that is not a standard axis adds a custom axis.

    Raises:
      ValueError: a size is not a positive integer or -1, two sizes are -1, or a custom axis looks like a typo of a
        standard axis.

    Example:
      >>> mp.MeshSpec(fsdp=-1, tensor=2).build().shape["fsdp"]
      4
      >>> mp.MeshSpec(data=8, fsdp=64, tensor=8).abstract().size
      4096
    """

    __slots__ = ("_sizes", "axis_types", "inside_node")
    _sizes: dict[str, int]
    inside_node: tuple[str, ...]
    axis_types: tuple[AxisType, ...]

    def __init__(
        self, *, inside_node: Sequence[str] = ("tensor",), axis_types: AxisTypes = "auto", **sizes: int
    ) -> None:
        for name, size in sizes.items():
            similar = difflib.get_close_matches(name.lower(), AXES, n=1, cutoff=0.75) if name.isalpha() else []
            if name not in AXES and similar:  # no rule uses the axis `fdsp`, so its devices would repeat the same work
                reason = f"it looks like a typo of `{similar[0]}`; the standard axes are {', '.join(AXES)}"
                fix = f"write {similar[0]}=..., or choose a less similar name: my_{name}=..."
                raise problem(f"MeshSpec axis `{name}`", "add a custom axis", reason, fix, code="unknown-axis")
            if not is_int(size, -1) or size == 0:
                reason = "a size is a positive integer, or -1 for the remaining devices"
                text = str(size).removesuffix(".0")
                fix = f"write {name}={text if text.isdigit() and int(text) else 4}, or leave out {name}"
                raise problem(f"MeshSpec axis `{name}` of size {size!r}", "", reason, fix, code="not-an-int")
        order = (*AXES[:-1], *(name for name in sizes if name not in AXES), AXES[-1])
        all_sizes = {name: int(sizes.get(name, 1)) for name in order}
        remaining = [name for name, size in all_sizes.items() if size == -1]
        if len(remaining) > 1:
            reason, fix = "only one axis can have size -1", "choose the size of all other axes"
            raise problem(f"MeshSpec axes {', '.join(remaining)}", "use size -1", reason, fix, code="conflict")
        inside_node = (inside_node,) if isinstance(inside_node, str) else inside_node
        where = f"MeshSpec(inside_node={inside_node!r})"
        if not isinstance(inside_node, Sequence) or not all(isinstance(name, str) for name in inside_node):
            fix = 'write inside_node=("tensor",), or inside_node=() to let all axes cross nodes'
            reason = "the value must be a tuple of axis names"
            raise problem(where, "keep these axes inside a node", reason, fix, code="wrong-type")
        for name in set(inside_node) - set(all_sizes):
            requested, reason = f"keep `{name}` inside a node", f"the mesh has no axis `{name}`"
            raise problem(where, requested, reason, near(name, all_sizes), code="unknown-axis")
        object.__setattr__(self, "_sizes", all_sizes)
        object.__setattr__(self, "inside_node", tuple(inside_node))
        object.__setattr__(self, "axis_types", _checked_types(axis_types, all_sizes))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a MeshSpec is immutable; use .replace(fsdp=8)")

    def __getitem__(self, axis: str) -> int:
        return self._sizes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def _key(self) -> tuple[Any, ...]:
        return tuple(self._sizes.items()), self.inside_node, self.axis_types

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, MeshSpec) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return _create, (self._sizes, self.inside_node, self.explicit_axes)

    @property
    def explicit_axes(self) -> dict[str, str]:
        """Axes with a type other than Auto, as a mapping to the type."""
        pairs = zip(self._sizes, self.axis_types, strict=True)
        return {name: axis_type.name.lower() for name, axis_type in pairs if axis_type is not AxisType.Auto}

    def __repr__(self) -> str:
        args = [f"{name}={size}" for name, size in self._sizes.items() if size != 1 or name not in AXES]
        if self.inside_node != ("tensor",):
            args.append(f"inside_node={self.inside_node}")
        if self.explicit_axes:
            is_all = len(self.explicit_axes) == len(self)
            args.append(f"axis_types={'explicit' if is_all else self.explicit_axes!r}")
        return f"MeshSpec({', '.join(args)})"

    def replace(
        self, *, inside_node: Sequence[str] | None = None, axis_types: AxisTypes | None = None, **sizes: int
    ) -> MeshSpec:
        """Return a spec with other sizes, `inside_node` or `axis_types`."""
        inside = self.inside_node if inside_node is None else inside_node
        return _create({**self._sizes, **sizes}, inside, self.explicit_axes if axis_types is None else axis_types)

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Return the spec for a text such as "fsdp=64,tensor=8". Raises `ValueError` for other texts."""
        sizes: dict[str, int] = {}
        for entry in filter(None, (entry.strip() for entry in text.split(","))):
            name, _, size = (token.strip() for token in entry.partition("="))
            is_valid = re.fullmatch("-?[0-9]{1,18}", size) and name.isidentifier()
            if not is_valid or name in (*sizes, "inside_node", "axis_types"):
                where, requested = f"mesh `{text[:100]}`", f"read `{entry[:100]}`"
                reason = "an entry has the form axis=size, and each axis occurs once"
                raise problem(where, requested, reason, "write fsdp=64,tensor=8", code="bad-syntax")
            sizes[name] = int(size)
        return _create(sizes, ("tensor",))

    def resolve(self, num_devices: int) -> dict[str, int]:
        """Return the size of each axis for a number of devices, with -1 replaced."""
        if not 1 <= num_devices <= MAX_DEVICES:
            requested = f"use {num_devices:,} devices"
            reason, fix = f"a mesh has 1 to {MAX_DEVICES:,} devices", "choose other sizes"
            raise problem(repr(self), requested, reason, fix, code="out-of-range")
        product = math.prod(size for size in self._sizes.values() if size != -1)
        has_remaining = -1 in self._sizes.values()
        if num_devices % product or (not has_remaining and num_devices != product):
            reason = f"the product of the sizes is {product}"
            fix = f"choose sizes whose product {'divides' if has_remaining else 'is'} {num_devices}, or use "
            fix += f"{'a multiple of ' * has_remaining}{product} devices (.abstract() needs no devices)"
            if num_devices % product == 0:
                fix = f"set an axis to -1, for example data=-1, to multiply it by {num_devices // product}"
                fix += f", or use {product} of the devices: .build(jax.devices()[:{product}])"
            raise problem(repr(self), f"use {num_devices} devices", reason, fix, code="indivisible")
        return {name: num_devices // product if size == -1 else size for name, size in self._sizes.items()}

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Return a mesh of devices.

        Devices are ordered by node, so the innermost axes connect devices of the same node. For TPUs jax chooses the
        order that fits the torus.

        Args:
          devices: the devices of the mesh. The default is all devices of all processes.

        Raises:
          ValueError: the sizes do not match the number of devices, or an axis of `inside_node` would cross nodes.
        """
        check_not_forked("MeshSpec.build", "use the devices of jax")
        if isinstance(devices, int):
            fix = f"write .build(jax.devices()[:{devices}]), or .abstract(devices={devices}) to plan without devices"
            reason = "build takes a list of devices, not a number"
            raise problem(f"{self!r}.build({devices})", f"use {devices} devices", reason, fix, code="wrong-type")
        if devices is None:
            devices = jax.devices()
            self._check_host_devices(devices)
        devices = list(devices)
        check_cases(
            f"{self!r}.build", "place the mesh on these devices", "wrong-type",
            (not all(hasattr(device, "platform") for device in devices), "an element is not a device",
             "pass elements of jax.devices()"),
            (len(set(devices)) < len(devices), "a device occurs twice", "pass each device once"),
        )  # fmt: skip
        sizes = self.resolve(len(devices))
        if devices[0].platform == "tpu":
            from jax.experimental import mesh_utils

            grid = mesh_utils.create_device_mesh(tuple(sizes.values()), devices)
            return Mesh(grid, tuple(sizes), axis_types=self.axis_types)
        devices.sort(key=lambda device: (node_of(device), device.process_index, device.id))
        node_sizes = [len(list(node)) for _, node in itertools.groupby(devices, key=node_of)]
        if len(node_sizes) > 1:
            self._check_inside(sizes, set(node_sizes))
        grid = np.empty(len(devices), dtype=object)
        grid[:] = devices
        return Mesh(grid.reshape(tuple(sizes.values())), tuple(sizes), axis_types=self.axis_types)

    def abstract(self, devices: int | None = None, *, devices_per_node: int | None = None) -> AbstractMesh:
        """Return the mesh without devices, for planning. Raises like `build`.

        Args:
          devices: number of devices. Required if the size of an axis is -1.
          devices_per_node: if set, `inside_node` is checked as in `build`.
        """
        if devices is None:
            if -1 in self._sizes.values():
                fix = "pass the number of devices: .abstract(devices=4096)"
                raise problem(repr(self), "plan without devices", "the size of an axis is -1", fix, code="conflict")
            devices = math.prod(self._sizes.values())
        sizes = self.resolve(devices)
        if devices_per_node is not None and devices_per_node < devices:
            self._check_inside(sizes, {devices_per_node})
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=self.axis_types)

    def _check_host_devices(self, devices: Sequence[jax.Device]) -> None:
        """Raise an error that names jax's flag if the mesh needs more CPU devices than this process has."""
        needed = math.prod(size for size in self._sizes.values() if size != -1)
        if devices[0].platform == "cpu" and len(devices) < needed and jax.process_count() == 1:
            requested = f"use {len(devices)} CPU device{'s' * (len(devices) > 1)}"
            fix = f"set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before Python starts"
            fix += "; .abstract() needs no devices"
            raise problem(repr(self), requested, f"the product of the sizes is {needed}", fix, code="indivisible")

    def _check_inside(self, sizes: dict[str, int], node_sizes: set[int]) -> None:
        """Check `inside_node`. The size of an axis times all inner sizes must divide the devices of a node."""
        names = list(sizes)
        for axis in self.inside_node:
            span = math.prod(sizes[name] for name in names[names.index(axis) :])
            if sizes[axis] > 1 and any(size % span for size in node_sizes):
                where, per_node = (
                    f"mesh axis `{axis}` ({sizes[axis]}) of inside_node",
                    "/".join(map(str, sorted(node_sizes))),
                )
                reason = f"it spans {span} neighboring devices, and a node has {per_node}"
                fix = f"choose a divisor of {min(node_sizes)}, or let all axes cross nodes with inside_node=()"
                raise problem(where, "", reason, fix, code="indivisible")


def _create(sizes: Mapping[str, int], inside_node: Sequence[str], axis_types: AxisTypes = "auto") -> MeshSpec:
    args: dict[str, Any] = {**sizes, "inside_node": inside_node, "axis_types": axis_types}
    return MeshSpec(**args)


def _checked_types(value: AxisTypes, sizes: Mapping[str, int]) -> tuple[AxisType, ...]:
    by_name = {axis_type.name.lower(): axis_type for axis_type in (AxisType.Auto, AxisType.Explicit)}
    requested = dict(value) if isinstance(value, Mapping) else dict.fromkeys(sizes, value)
    types = {axis: by_name.get(x) if isinstance(x, str) else x for axis, x in requested.items()}
    for axis, axis_type in types.items():
        if axis not in sizes or axis_type not in by_name.values():
            reason = f"the mesh has the axes {', '.join(sizes)}, and the types are {', '.join(by_name)}"
            if axis_type is AxisType.Manual:
                reason += "; axes become Manual inside a shard_map only"
            fix = 'write axis_types="explicit", or axis_types={"fsdp": "explicit"}'
            where = f"MeshSpec(axis_types={value!r})"
            raise problem(where, f"give `{axis}` the type {requested[axis]!r}", reason, fix, code="unknown-choice")
    return tuple(types.get(axis, AxisType.Auto) or AxisType.Auto for axis in sizes)


def with_auto_axes(where: str, mesh: AnyMesh) -> AnyMesh:
    """Return the mesh with Explicit axes changed to Auto. Steps are traced on it.

    Arrays between steps keep the types of the original mesh (`meshpar.sharding.constraints`).
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        reason, fix = f"it is of type {type(mesh).__name__}", "write mp.MeshSpec(fsdp=-1).build()"
        if isinstance(mesh, MeshSpec):
            reason, fix = "a MeshSpec has sizes, but no devices", "append .build(), or .abstract() to plan"
        raise problem(where, f"use {mesh!r} as a mesh", reason, fix, code="wrong-type")
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    types = tuple(AxisType.Auto if x == AxisType.Explicit else x for x in mesh.axis_types)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    device = mesh.abstract_device
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types, abstract_device=device)


def node_of(device: jax.Device) -> int:
    """Return the node of a device. Devices of a node are connected by fast links.

    On GPUs this is `slice_index`, the host or NVLink domain. On other platforms it is the process.
    """
    index = getattr(device, "slice_index", None)
    return device.process_index if index is None else index
