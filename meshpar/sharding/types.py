"""Leaves of a model, sharding decisions, and helpers for specs and paths."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshpar.sharding.errors import problem

PyTree: TypeAlias = Any
AnyMesh: TypeAlias = Mesh | AbstractMesh
MeshLike: TypeAlias = AnyMesh | Mapping[str, int]
"""A mesh, or the size of each axis, in mesh order."""
Names: TypeAlias = tuple[str | None, ...]
"""Logical names of the dims of an array. None: the dim has no name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """An array of a model, described by path, shape, dtype and logical names."""

    path: str
    """Path in the pytree, such as "decoder/mlp/up/kernel"."""
    shape: tuple[int, ...]
    dtype: np.dtype
    names: Names | None = None
    """Logical names of the dims. None: the model has no names for this leaf."""
    is_trained: bool = True
    """Whether the leaf has a gradient and the optimizer updates it."""

    def __post_init__(self) -> None:
        if self.names is not None and len(self.names) != len(self.shape):
            where = f"`{self.path}` of shape {self.shape}"
            reason = f"it has {len(self.shape)} dims, not {len(self.names)}"
            fix = "write a name or None for each dim"
            raise problem(where, f"use the names {self.names}", reason, fix, code="wrong-shape")

    def has(self, name: str) -> bool:
        """Return whether a dim has this name."""
        return name in (self.names or ())

    def size_of(self, name: str) -> int:
        """Return the size of the dim with this name."""
        return self.shape[(self.names or ()).index(name)]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_stacked(self) -> bool:
        """Whether the first dim is `layers`."""
        return (self.names or ())[:1] == ("layers",)

    @property
    def is_router(self) -> bool:
        """Whether the leaf is the weight of an MoE router, which scores the experts."""
        return scores_experts(self.names or ())

    @property
    def is_expert(self) -> bool:
        """Whether the leaf is a weight of experts. Routers have an `expert` dim, too, but every rank needs them."""
        return self.has("expert") and not self.is_router

    @property
    def is_table(self) -> bool:
        """Whether the leaf is an embedding table, [vocab, embed]."""
        return [name for name in self.names or () if name in ("vocab", "embed")] == ["vocab", "embed"]

    @functools.cached_property
    def num_layers(self) -> int:
        """Number of stacked layers; 1 without a dim named `layers`."""
        return self.size_of("layers") if self.has("layers") else 1

    @property
    def layer_ndim(self) -> int:
        """Number of dims without `layers`."""
        return len(self.shape) - (self.names or ()).count("layers")

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return self.size * self.dtype.itemsize

    @property
    def layer_nbytes(self) -> int:
        """Bytes of a single layer of a stacked array."""
        return self.nbytes // max(self.num_layers, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The sharding of a leaf, and the rules that determined it."""

    leaf: Leaf
    rule: str
    """A readable description of the rules."""
    spec: PartitionSpec
    shards: int
    """Number of different shards."""
    replicated_on_purpose: bool
    """Whether a rule permits that the leaf is replicated."""
    sources: frozenset[tuple[str, str]] = frozenset()
    """The rules that determined the sharding, as pairs (origin, key) like those of `Rules.sources`."""
    is_on_host: bool = False
    """Whether the leaf is in host memory between steps."""

    @property
    def path(self) -> str:
        """Path of the leaf in the pytree."""
        return self.leaf.path

    @property
    def bytes_per_device(self) -> int:
        """Bytes of a shard."""
        return self.leaf.nbytes // self.shards


def path_str(key_path: tuple[Any, ...]) -> str:
    """Format a pytree key path as "decoder/mlp/up/kernel"."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def leaf_of(path: str, x: Any, names: Names | None = None) -> Leaf:
    """Return the leaf for an array or `ShapeDtypeStruct`. Typed PRNG keys are described by their raw key data."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.eval_shape(jax.random.key_data, x)
    return Leaf(path=path, shape=tuple(x.shape), dtype=np.dtype(x.dtype), names=names)


def axis_sizes(mesh: MeshLike) -> dict[str, int]:
    """Return the size of each mesh axis, in mesh order."""
    if isinstance(mesh, Mapping):
        return dict(mesh)
    return dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def spec_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in an entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of_spec(spec: Iterable[Any], sizes: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Return all mesh axes in a PartitionSpec; with `sizes`, only axes larger than 1."""
    return tuple(axis for entry in spec for axis in spec_axes(entry) if sizes is None or sizes[axis] > 1)


def is_spec(x: object) -> bool:
    """Return whether a value is a PartitionSpec, for the argument `is_leaf` of `jax.tree` functions."""
    return isinstance(x, PartitionSpec)


def without_axes(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """Return a spec without some mesh axes."""
    removed = frozenset(axes)
    return PartitionSpec(*(tuple(a for a in spec_axes(entry) if a not in removed) or None for entry in spec))


PAIR = ("lora_a", "lora_b")
"""Names of the LoRA parameters next to a `kernel`: down-projection and up-projection."""
LORA_SUFFIX = "_pair"
"""Suffix of the module with the LoRA parameters of a stacked expert matrix."""


def matrix_of(module: str) -> str:
    """Return the path of the matrix that the LoRA parameters of a module adapt."""
    return module.removesuffix(LORA_SUFFIX) if module.endswith(LORA_SUFFIX) else f"{module}/kernel"


def scores_experts(names: Names) -> bool:
    """Return whether the names belong to a weight or bias of an MoE router, stacked or not.

    The last dim of both is `expert`. A weight has the dim `embed`. A bias has no dim other than `expert` and `layers`.
    """
    return names[-1:] == ("expert",) and ("embed" in names or {*names} <= {"expert", "layers"})


def num_shards(spec: Iterable[Any], mesh: MeshLike) -> int:
    """Return the number of different shards of an array with this spec."""
    sizes = axis_sizes(mesh)
    return math.prod(sizes[axis] for entry in spec for axis in spec_axes(entry))


def owner_of(path: str, params: Collection[str]) -> str:
    """Return the parameter of a leaf of the optimizer state: the longest suffix of `path` that is in `params`.

    Without such a suffix, return `path`.
    """
    keys = path.split("/")
    return next((suffix for i in range(len(keys)) if (suffix := "/".join(keys[i:])) in params), path)


def tree_leaves_with_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Return the leaves of a pytree with their paths."""
    return [(path_str(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
