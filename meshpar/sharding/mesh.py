"""MeshSpec: sizes of the named mesh axes, laid over devices so that the chattiest axis stays inside a node."""

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

from meshpar.sharding.types import AnyMesh, is_int, near, problem

AXES = ("data", "stage", "fsdp", "expert", "tensor")
"""The standard mesh axes, slowest network first. Axes a user adds stand just outside `tensor`."""

AxisTypes: TypeAlias = str | AxisType | Mapping[str, str | AxisType]
"""Of all axes of a mesh, or by axis."""

MOST_DEVICES = 1 << 24
"""More than any pod has; jax counts devices in 32 bits."""


class MeshSpec(Mapping[str, int]):
    """Sizes of the mesh axes; one of them may be -1 and takes what is left.

    Every mesh has the five standard axes, of size 1 unless given, so that one strategy serves every mesh.

    Args:
      **sizes: size of each axis. Names beyond the standard ones are the user's own axes.
      inside_node: axes that must not cross a node (a host with its own fast links). They are checked when devices
        on several nodes are laid out.
      axis_types: "auto" (the default), "explicit" or a `jax.sharding.AxisType`, for all axes, or by axis for some. On
        Explicit axes arrays have types that say how they lie, before and behind a step; what is sent is the same.

    Raises:
      ValueError: a size that is not a positive integer or -1, more than one -1, or an axis of the user's own whose
        name is a standard one mistyped.
    """

    __slots__ = ("_sizes", "axis_types", "inside_node")
    _sizes: dict[str, int]
    inside_node: tuple[str, ...]
    axis_types: tuple[AxisType, ...]

    def __init__(
        self, *, inside_node: Sequence[str] = ("tensor",), axis_types: AxisTypes = "auto", **sizes: int
    ) -> None:
        more = [_checked_name(name) for name in sizes if name not in AXES]
        order = (*AXES[:-1], *more, AXES[-1])
        object.__setattr__(self, "_sizes", {name: _checked_size(name, sizes.get(name, 1)) for name in order})
        inside = _checked_inside(inside_node)
        object.__setattr__(self, "inside_node", inside)
        object.__setattr__(self, "axis_types", _checked_types(axis_types, self._sizes))
        fills = [name for name, size in self._sizes.items() if size == -1]
        if len(fills) > 1:
            where, asked = f"MeshSpec axes {', '.join(fills)}", "fill what is left with each of them (-1)"
            raise problem(where, asked, "only one axis can take what is left", "give all but one a size")
        for name in inside:
            if name not in self._sizes:
                where, exists = f"MeshSpec inside_node={inside}", f"the mesh has no axis `{name}`"
                raise problem(where, f"keep `{name}` inside a node", exists, near(name, self._sizes))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a MeshSpec does not change; use .replace(fsdp=8)")

    def __getitem__(self, axis: str) -> int:
        return self._sizes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __hash__(self) -> int:
        return hash((tuple(self._sizes.items()), self.inside_node, self.axis_types))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshSpec):
            return NotImplemented
        # As pairs: the order of the axes is part of the mesh, and dicts compare without it.
        mine, its = ((list(one.items()), one.inside_node, one.axis_types) for one in (self, other))
        return mine == its

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (self._sizes, self.inside_node, self.explicit_axes)

    @property
    def explicit_axes(self) -> dict[str, str]:
        """Axes that are not Auto, each with its type."""
        pairs = zip(self._sizes, self.axis_types, strict=True)
        return {name: kind.name.lower() for name, kind in pairs if kind is not AxisType.Auto}

    def __repr__(self) -> str:
        parts = [f"{name}={size}" for name, size in self._sizes.items() if size != 1 or name not in AXES]
        if self.inside_node != ("tensor",):
            parts.append(f"inside_node={self.inside_node}")
        if self.explicit_axes:
            every = len(self.explicit_axes) == len(self)
            parts.append(f"axis_types={'explicit' if every else self.explicit_axes!r}")
        return f"MeshSpec({', '.join(parts)})"

    def replace(
        self, *, inside_node: Sequence[str] | None = None, axis_types: AxisTypes | None = None, **sizes: int
    ) -> MeshSpec:
        """The same spec with some sizes, `inside_node`, or `axis_types`, changed."""
        inside = self.inside_node if inside_node is None else inside_node
        return _remake({**self._sizes, **sizes}, inside, self.explicit_axes if axis_types is None else axis_types)

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Read "fsdp=64,tensor=8".

        Raises:
          ValueError: an entry that is not `axis=size`, or an axis that stands there twice.
        """
        sizes: dict[str, int] = {}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            name, _, size = (part.strip() for part in entry.partition("="))
            taken = name in (*sizes, "inside_node", "axis_types")
            if not re.fullmatch("-?[0-9]{1,18}", size) or not name.isidentifier() or taken:
                exists = "each entry is one axis, once, as axis=size"
                raise problem(f"mesh `{text[:100]}`", f"read `{entry[:100]}`", exists, "write it like fsdp=64,tensor=8")
            sizes[name] = int(size)
        return _remake(sizes, ("tensor",))

    def resolve(self, num_devices: int) -> dict[str, int]:
        """Sizes with -1 filled in for this many devices, in mesh order.

        Raises:
          ValueError: the axes do not multiply to the number of devices.
        """
        if num_devices < 1:
            raise problem(repr(self), f"lay {num_devices} devices on it", "a mesh has at least one", "give it devices")
        if num_devices > MOST_DEVICES:
            exists = f"a mesh has {MOST_DEVICES:,} at most"
            raise problem(repr(self), f"lay {num_devices:,} devices on it", exists, "choose smaller sizes")
        known = math.prod(size for size in self._sizes.values() if size != -1)
        fill = next((name for name, size in self._sizes.items() if size == -1), None)
        if (num_devices % known) if fill else (num_devices != known):
            where = repr(self)
            exists = f"the sizes given multiply to {known}" + (f", which does not divide {num_devices}" if fill else "")
            raise problem(where, f"lay {num_devices} devices on it", exists, self._advice(num_devices, known, fill))
        return {name: num_devices // known if size == -1 else size for name, size in self._sizes.items()}

    def _advice(self, num_devices: int, known: int, fill: str | None) -> str:
        if fill is None and num_devices % known == 0:
            return (
                f"set one axis to -1, say data=-1, to take the remaining factor {num_devices // known}, or use "
                f"{known} of the devices: .build(jax.devices()[:{known}])"
            )
        return (
            f"choose sizes whose product {'divides' if fill else 'is'} {num_devices}, or use "
            f"{'a multiple of ' if fill else ''}{known} devices (.abstract() plans without any)"
        )

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """A `jax.sharding.Mesh` over `devices` (default: all of the process group's).

        Devices are ordered node by node, so the innermost axes connect devices of one node.

        Raises:
          ValueError: sizes that do not fit the devices, or an axis of `inside_node` that would cross a node.
        """
        if isinstance(devices, int):
            exists = "that is a number, and build takes the devices themselves"
            fix = f"write .build(jax.devices()[:{devices}]), or .abstract(devices={devices}) to plan without devices"
            raise problem(f"{self!r}.build({devices})", f"lay {devices} devices on it", exists, fix)
        devices = list(jax.devices() if devices is None else devices)
        sizes = self.resolve(len(devices))
        if devices[0].platform == "tpu":  # the torus has its own best order, which jax knows
            from jax.experimental import mesh_utils

            grid = mesh_utils.create_device_mesh(tuple(sizes.values()), devices)
            return Mesh(grid, tuple(sizes), axis_types=self.axis_types)
        nodes = _by_node(devices)
        if len(nodes) > 1:
            self._check_inside(sizes, {len(node) for node in nodes})
        grid = np.empty(len(devices), dtype=object)
        grid[:] = list(itertools.chain.from_iterable(nodes))
        return Mesh(grid.reshape(tuple(sizes.values())), tuple(sizes), axis_types=self.axis_types)

    def abstract(self, devices: int | None = None, *, devices_per_node: int | None = None) -> AbstractMesh:
        """The same mesh with no devices behind it, to plan with.

        Args:
          devices: how many devices to pretend; needed only where an axis is -1.
          devices_per_node: when given, `inside_node` is checked as `build` would.
        """
        if devices is None:
            if -1 in self._sizes.values():
                raise problem(
                    repr(self), "plan without devices", "one axis is -1", "say how many: .abstract(devices=4096)"
                )
            devices = math.prod(self._sizes.values())
        sizes = self.resolve(devices)
        if devices_per_node is not None and devices_per_node < devices:
            self._check_inside(sizes, {devices_per_node})
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=self.axis_types)

    def _check_inside(self, sizes: dict[str, int], node_sizes: set[int]) -> None:
        """An axis stays inside a node when it, and all axes inside it, fill a divisor of the node."""
        names = list(sizes)
        for axis in self.inside_node:
            span = math.prod(sizes[name] for name in names[names.index(axis) :])
            if sizes[axis] > 1 and any(node % span for node in node_sizes):
                per_node = "/".join(str(n) for n in sorted(node_sizes))
                exists = f"it spans {span} neighbouring devices and a node has {per_node}"
                fix = f"make it a divisor of {min(node_sizes)}, or allow it to cross with inside_node=()"
                raise problem(f"mesh axis `{axis}` ({sizes[axis]})", "keep it inside a node", exists, fix)


def _remake(sizes: Mapping[str, int], inside_node: Sequence[str], axis_types: AxisTypes = "auto") -> MeshSpec:
    arguments: dict[str, Any] = {**sizes, "inside_node": inside_node, "axis_types": axis_types}
    return MeshSpec(**arguments)


def _checked_name(name: str) -> str:
    """An axis of the user's own. `fdsp=4` would make one that nothing is split over: four copies of the same work."""
    near_names = difflib.get_close_matches(name.lower(), AXES, n=1, cutoff=0.75) if name.isalpha() else []
    if near_names:
        exists = f"it looks like the standard axis `{near_names[0]}`, mistyped; the standard axes are {', '.join(AXES)}"
        fix = f"write {near_names[0]}=..., or give your own axis a name less like it: my_{name}=..."
        raise problem(f"MeshSpec axis `{name}`", "add an axis of your own", exists, fix)
    return name


def _checked_inside(inside_node: Sequence[str]) -> tuple[str, ...]:
    inside = (inside_node,) if isinstance(inside_node, str) else inside_node
    if not isinstance(inside, Sequence) or not all(isinstance(name, str) for name in inside):
        where = f"MeshSpec(inside_node={inside_node!r})"
        fix = 'write inside_node=("tensor",), or inside_node=() to allow all axes to cross'
        raise problem(where, "keep these axes inside a node", "inside_node is a tuple of names of axes", fix)
    return tuple(inside)


def _checked_types(given: AxisTypes, sizes: Mapping[str, int]) -> tuple[AxisType, ...]:
    """One for each axis."""
    kinds = {kind.name.lower(): kind for kind in (AxisType.Auto, AxisType.Explicit)}
    by_axis = dict(given) if isinstance(given, Mapping) else dict.fromkeys(sizes, given)
    found = {name: kinds.get(kind) if isinstance(kind, str) else kind for name, kind in by_axis.items()}
    for name, kind in found.items():
        if name not in sizes or kind not in kinds.values():
            raise problem(
                f"MeshSpec(axis_types={given!r})",
                f"make axis `{name}` of type {by_axis[name]!r}",
                f"the mesh has the axes {', '.join(sizes)}; a type is one of {', '.join(kinds)}"
                + (", and Manual is what a shard_map makes of either" if kind is AxisType.Manual else ""),
                'write axis_types="explicit", or axis_types={"fsdp": "explicit"}',
            )
    return tuple(found.get(name, AxisType.Auto) or AxisType.Auto for name in sizes)


def _checked_size(name: str, size: int) -> int:
    if not is_int(size, -1) or size == 0:
        where, fix = f"MeshSpec axis `{name}`", f"write it as {name}=4, or leave {name} out where it is not used"
        raise problem(where, f"have size {size!r}", "a size is a positive integer, or -1 for what is left", fix)
    return int(size)


def with_auto_axes(where: str, mesh: Any) -> AnyMesh:
    """The mesh that a step is traced on, its axes XLA's to split: where one is Explicit, as in `jax.make_mesh`, Auto.

    Devices and names stay. Arrays between steps keep the types of the mesh as it was given
    (`meshpar.sharding.constraints`).

    Raises:
      ValueError: it is no mesh.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        spec = isinstance(mesh, MeshSpec)
        exists = "it is only the sizes of one" if spec else f"it is a {type(mesh).__name__}"
        fix = "write .build() behind it, or .abstract() to plan" if spec else "write mp.MeshSpec(fsdp=-1).build()"
        raise problem(where, f"use {mesh!r} as a mesh", exists, fix)
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    types = tuple(AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    device = mesh.abstract_device
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types, abstract_device=device)


def node_of(device: jax.Device) -> int:
    """The node a device belongs to: devices of one node share its fast links.

    GPU backends say so themselves (`slice_index` is the host or NVLink domain); elsewhere it is the process.
    """
    index = getattr(device, "slice_index", None)
    return device.process_index if index is None else index


def _by_node(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    ordered = sorted(devices, key=lambda d: (node_of(d), d.process_index, d.id))
    return [list(node) for _, node in itertools.groupby(ordered, key=node_of)]
