"""The records that travel through meshpar: a leaf, and the decision about it. Errors are those of `errors.py`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshpar.sharding.errors import MeshparError as MeshparError
from meshpar.sharding.errors import check_bool as check_bool
from meshpar.sharding.errors import check_choice as check_choice
from meshpar.sharding.errors import check_divides as check_divides
from meshpar.sharding.errors import check_int as check_int
from meshpar.sharding.errors import check_positive_int as check_positive_int
from meshpar.sharding.errors import check_takes as check_takes
from meshpar.sharding.errors import is_int as is_int
from meshpar.sharding.errors import named as named
from meshpar.sharding.errors import near as near
from meshpar.sharding.errors import near_or as near_or
from meshpar.sharding.errors import problem as problem

PyTree: TypeAlias = Any
AnyMesh: TypeAlias = Mesh | AbstractMesh
MeshLike: TypeAlias = AnyMesh | Mapping[str, int]
"""A mesh, or just the sizes of its axes in order."""
Names: TypeAlias = tuple[str | None, ...]
"""Logical names of an array's dims, `None` for a dim that has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of a model before anything is decided about it."""

    path: str
    """Where it stands in the tree, as "decoder/mlp/up/kernel"."""
    shape: tuple[int, ...]
    dtype: np.dtype
    names: Names | None = None
    """Logical names of its dims; None when the model says nothing about it."""
    is_trained: bool = True
    """Whether the optimizer updates it; what it does not has no gradient."""

    def __post_init__(self) -> None:
        if self.names is not None and len(self.names) != len(self.shape):
            asked, exists = f"carry the names {self.names}", f"it has {len(self.shape)} dims, not {len(self.names)}"
            raise problem(f"`{self.path}` of shape {self.shape}", asked, exists, "give one name (or None) to each dim")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_stacked(self) -> bool:
        """Whether its first dim is the layers of the model."""
        return (self.names or ())[:1] == ("layers",)

    @functools.cached_property
    def num_layers(self) -> int:
        """Layers stacked in it; 1 where no dim is named `layers`."""
        return math.prod(n for n, name in zip(self.shape, self.names or (), strict=False) if name == "layers")

    @property
    def layer_ndim(self) -> int:
        """Dims of one layer of it."""
        return len(self.shape) - (self.names or ()).count("layers")

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return self.size * self.dtype.itemsize

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of it."""
        return self.nbytes // max(self.num_layers, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided about one leaf, and by which rule: feeds errors, tables and the planner."""

    leaf: Leaf
    rule: str
    """The rule that fired, as a person would name it."""
    spec: PartitionSpec
    shards: int
    """Over how many different pieces the leaf is split."""
    replicated_on_purpose: bool
    """False when the leaf is replicated and no rule said it should be."""
    sources: frozenset[tuple[str, str]] = frozenset()
    """The rules that were used, each as (origin, key): the others are idle."""
    is_on_host: bool = False
    """Whether it lies in the host's memory between steps."""

    @property
    def path(self) -> str:
        """Where the leaf stands in the tree."""
        return self.leaf.path

    @property
    def bytes_per_device(self) -> int:
        """Bytes one device holds of it."""
        return self.leaf.nbytes // self.shards


def path_str(key_path: tuple[Any, ...]) -> str:
    """A pytree key path as "decoder/mlp/up/kernel"."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def leaf_of(path: str, x: Any, names: Names | None = None) -> Leaf:
    """The leaf for an array, or for its `ShapeDtypeStruct`. Typed random keys count as the words they are made of."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.eval_shape(jax.random.key_data, x)
    return Leaf(path=path, shape=tuple(x.shape), dtype=np.dtype(x.dtype), names=names)


def axis_sizes(mesh: MeshLike) -> dict[str, int]:
    """Size of every mesh axis, in the mesh's order."""
    if isinstance(mesh, Mapping):
        return dict(mesh)
    return dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def spec_axes(entry: Any) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec, as a tuple."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of_spec(spec: Iterable[Any], sizes: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Every mesh axis that a PartitionSpec names, dim by dim; with `sizes` those of more than one rank."""
    return tuple(axis for entry in spec for axis in spec_axes(entry) if sizes is None or sizes[axis] > 1)


def is_spec(x: Any) -> bool:
    """For `jax.tree` functions: specs are leaves of a tree, however jax keeps them."""
    return isinstance(x, PartitionSpec)


def without_axes(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """Replicated over these mesh axes, sharded over the others as before."""
    left_out = frozenset(axes)
    return PartitionSpec(*(tuple(a for a in spec_axes(entry) if a not in left_out) or None for entry in spec))


PAIR = ("lora_a", "lora_b")
"""Names of the low-rank pair beside a layer's `kernel`: from its inputs to a few numbers, and from these on."""
BESIDE = "_pair"
"""Behind the name of experts' stacked matrix: what their pairs stand in."""


def matrix_of(module: str) -> str:
    """Path of the matrix whose pair stands in a module."""
    return module.removesuffix(BESIDE) if module.endswith(BESIDE) else f"{module}/kernel"


def scores_experts(names: Names) -> bool:
    """Whether these are the dims of a router: a matrix, stacked or not, whose last dim is the experts'."""
    return names[-1:] == ("expert",) and "embed" in names


def num_shards(spec: Iterable[Any], mesh: MeshLike) -> int:
    """Into how many different pieces a spec cuts an array on this mesh."""
    sizes = axis_sizes(mesh)
    return math.prod(sizes[axis] for entry in spec for axis in spec_axes(entry))


def owner_of(path: str, params: Collection[str]) -> str:
    """The parameter that a leaf of the state is or belongs to: the longest end of its path that is one's."""
    parts = path.split("/")
    return next((end for at in range(len(parts)) if (end := "/".join(parts[at:])) in params), path)


def tree_leaves_with_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a pytree, each with its path string."""
    return [(path_str(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
