from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import meshpar as mp
from meshpar.sharding.mesh import AXES, node_of, with_auto_axes
from meshpar.sharding.types import axis_sizes
from tests.errors import raises


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    slice_index: int | None
    platform: str = "gpu"


def fake_devices(nodes: int, per_node: int, *, slices: bool = False, shuffle: bool = True) -> list[FakeDevice]:
    """Return the devices of a pod in random order. With `slices`, each device is a process."""
    devices = [
        FakeDevice(id=i, process_index=i if slices else i // per_node, slice_index=i // per_node if slices else None)
        for i in range(nodes * per_node)
    ]
    if shuffle:
        np.random.default_rng(0).shuffle(devices)
    return devices


def nodes_of_groups(mesh: Mesh, axis: str) -> list[set[int]]:
    """Return the nodes of each group of devices along an axis."""
    groups = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    return [{node_of(device) for device in group} for group in groups.reshape(-1, groups.shape[-1])]


# ---------------------------------------------------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------------------------------------------------


def test_mesh_has_the_standard_axes_with_tensor_innermost():
    mesh = mp.MeshSpec(fsdp=4, tensor=2).build()
    assert mesh.axis_names == AXES == ("data", "stage", "fsdp", "expert", "tensor")
    assert axis_sizes(mesh) == {"data": 1, "stage": 1, "fsdp": 4, "expert": 1, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert [d.id for d in mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize(
    ("spec", "devices", "expected"),
    [
        (mp.MeshSpec(data=-1, tensor=2), 8, {"data": 4, "tensor": 2}),
        (mp.MeshSpec(fsdp=-1), 8, {"fsdp": 8}),
        (mp.MeshSpec(fsdp=-1, data=8), 8, {"data": 8}),
        (mp.MeshSpec(data=-1, fsdp=64, tensor=8), 4096, {"data": 8, "fsdp": 64, "tensor": 8}),
        (mp.MeshSpec(), 1, {}),
        (mp.MeshSpec(fsdp=np.int64(8)), 8, {"fsdp": 8}),
    ],
)
def test_resolve_replaces_minus_one(spec, devices, expected):
    assert spec.resolve(devices) == {**dict.fromkeys(AXES, 1), **expected}
    assert axis_sizes(spec.abstract(devices)) == spec.resolve(devices)


def test_custom_axes_are_between_expert_and_tensor():
    spec = mp.MeshSpec(tensor=2, context=2, fsdp=2, ring=1)
    assert tuple(spec) == ("data", "stage", "fsdp", "expert", "context", "ring", "tensor")
    assert spec.build().axis_names == tuple(spec)
    assert spec.build().devices.shape == (1, 1, 2, 1, 2, 1, 2)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("fsdp=64,tensor=8", mp.MeshSpec(fsdp=64, tensor=8)),
        (" data = -1 , tensor=2 ", mp.MeshSpec(data=-1, tensor=2)),
        ("context=4", mp.MeshSpec(context=4)),
        ("fsdp=2,", mp.MeshSpec(fsdp=2)),
        ("", mp.MeshSpec()),
    ],
)
def test_parse(text, spec):
    assert mp.MeshSpec.parse(text) == spec


# ---------------------------------------------------------------------------------------------------------------------
# Specs as values
# ---------------------------------------------------------------------------------------------------------------------

SPECS = [
    mp.MeshSpec(),
    mp.MeshSpec(data=-1, fsdp=4, tensor=2),
    mp.MeshSpec(context=2, ring=3, inside_node=("tensor", "context")),
    mp.MeshSpec(inside_node=()),
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_spec_survives_pickle_copy_and_repr(spec):
    for restored in (pickle.loads(pickle.dumps(spec)), copy.copy(spec), copy.deepcopy(spec), eval(f"mp.{spec!r}")):
        assert restored == spec
        assert hash(restored) == hash(spec)
        assert restored.inside_node == spec.inside_node
        assert tuple(restored) == tuple(spec)


def test_equality_includes_sizes_order_and_inside_node():
    assert len(set(SPECS)) == len(SPECS)
    assert mp.MeshSpec(context=2, ring=2) != mp.MeshSpec(ring=2, context=2)
    assert mp.MeshSpec(fsdp=2, data=4) == mp.MeshSpec(data=4, fsdp=2)
    assert mp.MeshSpec() != {"data": 1}


def test_spec_is_immutable():
    spec = mp.MeshSpec(fsdp=4)
    with pytest.raises(AttributeError, match="replace"):
        spec.inside_node = ()
    assert spec.replace(fsdp=8, tensor=2) == mp.MeshSpec(fsdp=8, tensor=2)
    assert spec.replace(inside_node=()) == mp.MeshSpec(fsdp=4, inside_node=())
    assert spec == mp.MeshSpec(fsdp=4)


# ---------------------------------------------------------------------------------------------------------------------
# Order of devices
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [False, True], ids=["by process", "by slice"])
def test_tensor_stays_inside_a_node(slices):
    mesh = mp.MeshSpec(data=2, fsdp=4, tensor=4).build(fake_devices(4, 8, slices=slices))
    assert mesh.shape["tensor"] == 4
    assert all(len(nodes) == 1 for nodes in nodes_of_groups(mesh, "tensor"))
    # Two tensor groups fit in a node, so an fsdp group spans two nodes. The outermost axis, data, always crosses nodes.
    assert all(len(nodes) == 2 for nodes in nodes_of_groups(mesh, "fsdp"))
    assert all(len(nodes) == 2 for nodes in nodes_of_groups(mesh, "data"))


def test_device_order_is_independent_of_the_argument_order():
    spec = mp.MeshSpec(fsdp=4, tensor=4)
    ids = [
        [d.id for d in spec.build(devices).devices.flat]
        for devices in (fake_devices(2, 8), fake_devices(2, 8, shuffle=False))
    ]
    assert ids[0] == ids[1] == list(range(16))


@pytest.mark.parametrize(
    ("spec", "axis"),
    [
        (mp.MeshSpec(tensor=16), "tensor"),
        (mp.MeshSpec(data=2, fsdp=4, tensor=4, inside_node=("tensor", "fsdp")), "fsdp"),
        (mp.MeshSpec(expert=16, inside_node="expert"), "expert"),
        (mp.MeshSpec(context=4, tensor=8, inside_node=("tensor", "context")), "context"),
        (mp.MeshSpec(data=8, tensor=3), "tensor"),
    ],
)
def test_axis_that_would_cross_nodes_is_refused(spec, axis):
    devices = fake_devices(math.prod(spec.values()) // 8, 8)
    with raises("indivisible", f"`{axis}` ({spec[axis]})") as error:
        spec.build(devices)
    assert "a node has 8" in error.value.reason
    assert "inside_node=()" in error.value.fix
    with raises("indivisible", f"`{axis}`"):
        spec.abstract(devices_per_node=8)
    assert spec.replace(inside_node=()).build(devices).shape[axis] == spec[axis]


def test_axis_that_would_cross_only_the_smaller_nodes_is_refused():
    devices = [FakeDevice(i, node, None) for i, node in enumerate([0] * 8 + [1] * 4 + [2] * 4)]
    with raises("indivisible", "`tensor` (8)") as error:
        mp.MeshSpec(data=2, tensor=8).build(devices)
    assert "a node has 4/8" in error.value.reason
    assert mp.MeshSpec(data=4, tensor=4).build(devices).shape["tensor"] == 4


def test_axes_of_a_single_node_may_have_any_size():
    assert mp.MeshSpec(tensor=8).build(fake_devices(1, 8)).shape["tensor"] == 8
    assert mp.MeshSpec(tensor=8).abstract(devices_per_node=8).shape["tensor"] == 8


# ---------------------------------------------------------------------------------------------------------------------
# Abstract meshes and jax's own meshes
# ---------------------------------------------------------------------------------------------------------------------


def test_axis_types_are_auto_by_default():
    spec = mp.MeshSpec(fsdp=4, tensor=2, axis_types={"fsdp": "explicit"})
    for mesh in (spec.build(), spec.abstract()):
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        assert [axis for axis, axis_type in types.items() if axis_type is AxisType.Explicit] == ["fsdp"]
    assert pickle.loads(pickle.dumps(spec)) == spec.replace(tensor=2) == eval(repr(spec), {"MeshSpec": mp.MeshSpec})
    assert spec != mp.MeshSpec(fsdp=4, tensor=2)
    assert set(mp.MeshSpec(axis_types=AxisType.Explicit).axis_types) == {AxisType.Explicit}
    for axis_types in ("explict", {"fdsp": "explicit"}, AxisType.Manual, 3):
        with raises("unknown-choice", "axis_types"):
            mp.MeshSpec(fsdp=4, axis_types=axis_types)


def test_abstract_mesh_needs_no_devices():
    mesh = mp.MeshSpec(data=-1, fsdp=64, tensor=8).abstract(devices=4096)
    assert isinstance(mesh, AbstractMesh)
    assert mesh.size == 4096
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mp.MeshSpec(fsdp=64, tensor=8).abstract().size == 512


def test_with_auto_axes_accepts_jax_meshes(mesh8):
    for mesh in (
        mesh8,
        Mesh(np.array(jax.devices()), ("fsdp",)),
        AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,)),
    ):
        assert with_auto_axes("here", mesh) is mesh
    explicit = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    assert with_auto_axes("here", explicit) == Mesh(explicit.devices, ("fsdp", "tensor"))
    abstract = with_auto_axes("here", explicit.abstract_mesh)
    assert abstract == with_auto_axes("here", explicit).abstract_mesh
    assert abstract.abstract_device.platform == "cpu"
