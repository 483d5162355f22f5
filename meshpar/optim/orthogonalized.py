"""Muon on a mesh: each full matrix is orthogonalized by one owner, or by all ranks if cheaper.

    momentum of a group [K, m/N, n] on N ranks
      owners   all-to-all [K/N, m, n] ─► Newton-Schulz ─► all-to-all back
      gather   all-gather [K, m, n] ─► Newton-Schulz ─► each rank keeps its shard

A group has all matrices with the same shape and sharding, from any arrays: layers of a stack, experts, gate and up.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from meshpar.optim.matrix_dims import stack_dims
from meshpar.sharding.context import TraceOption
from meshpar.sharding.errors import problem
from meshpar.sharding.types import AnyMesh, Names, PyTree, axis_sizes, path_str, scores_experts, spec_axes

Dims: TypeAlias = optax.contrib.MuonDimensionNumbers
"""Dims of an array that are the rows of a matrix, and dims that are the columns. Other dims are batch dims."""
Kernel: TypeAlias = Callable[..., Any]
_ADAM_LEAVES = ("scale", "bias", "embedding")


class MuonState(NamedTuple):
    """State of `mp.muon` for the orthogonalized arrays."""

    count: jax.Array  # type: ignore[assignment]
    mu: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Updating:
    """Mesh and sharding of the arrays that an optimizer updates, by path. Compared by identity, as a jax cache key."""

    mesh: AnyMesh
    specs: Mapping[str, PartitionSpec]


UPDATES = TraceOption[Updating]("updates")


def exchange(num_matrices: int, *, ranks: int, replicas: int = 1) -> tuple[Literal["owners", "gather"], float]:
    """Return the cheaper algorithm to orthogonalize sharded matrices, and its communication volume.

        owners  2 (N-1)/N · C + (R-1) · C     C = ceil(K / (N R)) matrices per rank: to their owners, and back
        gather    (N-1)/N · K                 each rank orthogonalizes all matrices

    K is `num_matrices`, all of the same shape, and N (`ranks`) is the number of shards of each. R (`replicas`) is the
    number of replicas that divide the work, or 1 if each replica does all of it. The volume is the number of matrices
    that a rank sends. If both send the same volume, the result is "owners", which computes less. With R > 1, the result
    is always "owners".

    Source: Liu et al. 2025, "Muon is Scalable for LLM Training" (owners that gather, with ZeRO-1).
    """
    num_owned = -(-num_matrices // (ranks * replicas))
    owners = 2 * (ranks - 1) / ranks * num_owned + (replicas - 1) * num_owned
    gather = (ranks - 1) / ranks * num_matrices
    return ("owners", owners) if replicas > 1 or owners <= gather else ("gather", gather)


def matrices(names: Mapping[str, Names]) -> Callable[[PyTree], PyTree]:
    """Return the rule that selects the arrays for Muon and their matrix dims, by logical names.

    Dims that stack layers or experts are batch dims. `head_dim` belongs to the heads dim before it. The remaining dims
    must be a row dim and a column dim. Adam updates all other arrays: embedding tables, arrays with the name `scale`,
    `bias` or `embedding`, routers, whose experts are not columns, and arrays without a row and a column dim. An array
    with two dims and without names is a matrix.

    Args:
      names: names of parameters, by path: `{d.path: d.leaf.names for d in mp.shardings(model, mesh, strategy).params}`.

    Returns:
      A function for `mp.muon(muon_weight_dimension_numbers=)`, and for optax's.
    """

    def dims_of(key_path: Any, x: Any) -> Dims | None:
        path = path_str(key_path)
        dim_names = names.get(path) or (None,) * x.ndim
        if path.rpartition("/")[2] in _ADAM_LEAVES or "vocab" in dim_names or scores_experts(dim_names):
            return None
        stacked = stack_dims(dim_names)
        sides: list[list[int]] = []
        for dim, name in enumerate(dim_names):
            if name == "head_dim" and sides:
                sides[-1].append(dim)
            elif dim not in stacked:
                sides.append([dim])
        return Dims(*map(tuple, sides)) if len(sides) == 2 else None

    return lambda params: jax.tree_util.tree_map_with_path(dims_of, params)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: tuple[float, ...] | tuple[tuple[float, ...], ...] = (3.4445, -4.7750, 2.0315), ns_steps: int = 5,
    beta: float = 0.95, eps: float = 1e-8, weight_decay: float = 0.0, weight_decay_mask: PyTree = None,
    mu_dtype: jax.typing.DTypeLike | None = None, *,
    nesterov: bool = True, preconditioning: str = "frobenius", adam_b1: float = 0.9, adam_b2: float = 0.999,
    adam_eps_root: float = 0.0, adam_weight_decay: float = 0.0, adam_weight_decay_mask: PyTree = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None, muon_weight_dimension_numbers: PyTree = None,
    consistent_rms: float | None = None, share: bool = True,
) -> optax.GradientTransformation:  # fmt: skip
    """Return `optax.contrib.muon` for sharded arrays, with the same numerical results.

    In `mp.train_step`, full matrices are orthogonalized, either each by the rank that owns it or all by every rank (see
    `exchange`). `mp.explain` lists this communication under its kernels. Outside of a step it computes like optax.
    Other arguments are as in `optax.contrib.muon`.

    Args:
      muon_weight_dimension_numbers: a pytree like the parameters, with `MuonDimensionNumbers`, or None for arrays that
        Adam updates; or a function that returns it for the parameters, such as `matrices(names)`. By default, arrays
        with two dims are matrices.
      adam_weight_decay_mask: arrays with weight decay among those that Adam updates, as in `optax.adamw(mask=)`.
      share: whether replicas (over `data`, for example) divide the matrices among them and exchange the results, if
        there is a matrix for each rank. Otherwise each replica orthogonalizes all of them, without communication.

    Raises:
      ValueError: the dimension numbers do not describe a matrix. Raised by `init`.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

    Example:
      >>> tx = mp.muon(0.02)
      >>> state = mp.init_state(model, tx, mesh=mesh, strategy=strategy, key=0)
    """
    transform = optax.contrib.scale_by_muon(
        ns_coeffs, ns_steps, beta=0.0, eps=eps, nesterov=False, preconditioning=preconditioning,  # type: ignore[arg-type]
        weight_dimension_numbers=Dims((1,), (2,)),
    )  # fmt: skip

    def newton_schulz(x: jax.Array) -> jax.Array:
        # Without momentum the transformation is the iteration alone, for which optax has no public function.
        return transform.update(x, transform.init(x))[0]  # type: ignore[return-value]

    def is_dims(x: Any) -> bool:
        return x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)

    def dims_of(tree: PyTree) -> dict[str, Dims | None]:
        dims = muon_weight_dimension_numbers
        if dims is None:
            dims = jax.tree.map(lambda x: Dims() if x.ndim == 2 else None, tree)
        dims = dims(tree) if callable(dims) else dims
        return {path_str(path): x for path, x in jax.tree_util.tree_leaves_with_path(dims, is_leaf=is_dims)}

    def labels(params: PyTree) -> PyTree:
        dims = dims_of(params)
        return jax.tree_util.tree_map_with_path(lambda path, x: _label(path_str(path), x, dims), params)

    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    scaled = _scale_by_muon(newton_schulz, dims_of, beta, nesterov, mu_dtype, consistent_rms, share)
    decay = optax.add_decayed_weights(weight_decay, weight_decay_mask)
    adam = optax.adamw(
        rate, adam_b1, adam_b2, eps, adam_eps_root, mu_dtype, adam_weight_decay, adam_weight_decay_mask,
        nesterov=nesterov,
    )  # fmt: skip
    orthogonalized = optax.chain(scaled, decay, optax.scale_by_learning_rate(learning_rate))
    return optax.partition({"muon": orthogonalized, "adam": adam}, labels)


def _label(path: str, x: Any, dims: Mapping[str, Dims | None]) -> str:
    """Return the optimizer that updates an array, "muon" or "adam"."""
    if dims.get(path, path) is None or 0 in x.shape:  # the scale of an empty matrix is not defined
        return "adam"
    rows, columns = _sides(dims[path], x.ndim) if path in dims else ((), ())
    sides = (*rows, *columns)
    if not rows or not columns or len(set(sides)) < len(sides) or max(sides) >= x.ndim:
        reason = f"row dims {rows} and column dims {columns} must be different, and at least one each"
        where, code = f"muon, `{path}` of shape {tuple(x.shape)}", "wrong-shape" if path in dims else "not-found"
        fix = "write MuonDimensionNumbers((0,), (1,)) in muon_weight_dimension_numbers; None leaves it to Adam"
        raise problem(where, "find its rows and columns", reason, fix, code=code)
    return "muon"


def _sides(dims: Any, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows, columns = ((side,) if isinstance(side, int) else tuple(side) for side in dims)
    return tuple(dim + ndim * (dim < 0) for dim in rows), tuple(dim + ndim * (dim < 0) for dim in columns)


def _scale_by_muon(
    newton_schulz: Kernel, dims_of: Callable[[PyTree], dict[str, Dims | None]],
    beta: float, nesterov: bool, mu_dtype: Any, consistent_rms: float | None, share: bool,
) -> optax.GradientTransformation:  # fmt: skip
    """Return optax's `scale_by_muon` and `scale_by_shape` (momentum, orthogonalization, scaling) for sharded arrays."""

    def init(params: PyTree) -> MuonState:
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params, dtype=mu_dtype))

    def update(grads: PyTree, state: MuonState, params: PyTree = None) -> tuple[PyTree, MuonState]:
        del params
        mu, count = optax.tree.update_moment(grads, state.mu, beta, 1), optax.safe_increment(state.count)
        if nesterov:
            mu_hat = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            grads_hat = optax.tree.bias_correction(grads, beta, count)
            hat = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, mu_hat, grads_hat)
        else:
            hat = optax.tree.bias_correction(mu, beta, count)
        dims, (leaves, structure) = dims_of(hat), jax.tree_util.tree_flatten_with_path(hat)
        arrays = [_Array.create(path_str(path), x, dims[path_str(path)]) for path, x in leaves]
        with jax.named_scope("muon"):
            orthogonal = _orthogonalized(arrays, newton_schulz, share)
        scaled = [array.scale(consistent_rms) * x for array, x in zip(arrays, orthogonal, strict=True)]
        return jax.tree.unflatten(structure, scaled), MuonState(count, optax.tree.cast(mu, mu_dtype))

    return optax.GradientTransformation(init, update)


# ---- Distribution of the matrices ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Array:
    """An array of matrices, and the order of its dims in a stack of matrices, with the shorter side first."""

    x: jax.Array
    order: tuple[int, ...]
    """Batch dims, dims of the shorter side, dims of the longer side."""
    num_batch: int
    num_short: int
    fans: tuple[int, int]
    """Number of inputs and outputs."""
    axes: tuple[tuple[str, ...], ...]
    """Mesh axes larger than 1 that shard each dim of `order`."""

    @staticmethod
    def create(path: str, x: jax.Array, dims: Dims | None) -> _Array:
        rows, columns = _sides(dims, x.ndim)
        fans = tuple(math.prod(x.shape[dim] for dim in side) for side in (rows, columns))
        # The iteration commutes with transposition, so `down` and `up` can be in the same group.
        short, long = (rows, columns) if fans[0] <= fans[1] else (columns, rows)
        batch = tuple(dim for dim in range(x.ndim) if dim not in (*rows, *columns))
        updating = UPDATES.value
        spec = () if updating is None else tuple(updating.specs[path])
        sizes = {} if updating is None else axis_sizes(updating.mesh)
        axes = [tuple(a for a in spec_axes(entry) if sizes[a] > 1) for entry in spec]
        axes += [()] * (x.ndim - len(spec))
        order = (*batch, *short, *long)
        return _Array(x, order, len(batch), len(short), fans, tuple(axes[dim] for dim in order))  # type: ignore[arg-type]

    @property
    def group_key(self) -> Any:
        """Return the properties that arrays of a group have in common."""
        shape = tuple(self.x.shape[dim] for dim in self.order[self.num_batch :])
        return shape, self.num_short, self.axes[self.num_batch :], self.batch_axes, self.x.dtype

    @property
    def batch_axes(self) -> frozenset[str]:
        return frozenset(axis for axes in self.axes[: self.num_batch] for axis in axes)

    @property
    def spec(self) -> PartitionSpec:
        entries = dict(zip(self.order, self.axes, strict=True))
        return PartitionSpec(*(entries[dim] or None for dim in range(self.x.ndim)))

    def flat(self, x: jax.Array) -> jax.Array:
        """Return the local shards as a stack of matrices."""
        x = x.transpose(self.order)
        return x.reshape(-1, *x.shape[self.num_batch :])

    def unflat(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Return a stack of matrices as local shards with the shape of `like`."""
        x = x.reshape([like.shape[dim] for dim in self.order])
        return x.transpose(sorted(range(x.ndim), key=lambda dim: self.order[dim]))

    def scale(self, consistent_rms: float | None) -> Any:
        inputs, outputs = self.fans
        if consistent_rms is None:
            return jnp.sqrt(jnp.maximum(1, outputs / inputs))
        return jnp.sqrt(jnp.maximum(inputs, outputs)) * consistent_rms


def _orthogonalized(arrays: Sequence[_Array], newton_schulz: Kernel, share: bool) -> list[jax.Array]:
    updating = UPDATES.value
    groups: dict[Any, list[int]] = {}
    for index, array in enumerate(arrays):
        groups.setdefault(array.group_key, []).append(index)
    out: dict[int, jax.Array] = {}
    for indices in groups.values():
        group = [arrays[index] for index in indices]
        kernel = functools.partial(_orthogonalize_group, group, newton_schulz, share)
        if updating is not None and updating.mesh.size > 1:
            specs = [array.spec for array in group]
            kernel = jax.shard_map(kernel, mesh=updating.mesh, in_specs=(specs,), out_specs=specs)
        out |= dict(zip(indices, kernel([array.x for array in group]), strict=True))
    return [out[index] for index in range(len(arrays))]


def _orthogonalize_group(
    arrays: list[_Array], newton_schulz: Kernel, share: bool, shards: list[jax.Array]
) -> list[jax.Array]:
    """Orthogonalize the matrices of a group. Inputs and outputs are local shards."""
    flat = [array.flat(x) for array, x in zip(arrays, shards, strict=True)]
    ends = np.cumsum([len(x) for x in flat])
    layout = _Layout.create(arrays[0], int(ends[-1]), share)
    out = jnp.split(_orthogonalize_stack(layout, newton_schulz, jnp.concatenate(flat)), ends[:-1])
    return [array.unflat(y, x) for array, y, x in zip(arrays, out, shards, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Sharding of the matrices of a group."""

    dims: tuple[tuple[str, ...], ...]
    """Mesh axes of each dim of a matrix."""
    num_short: int
    sizes: Mapping[str, int]
    replicas: tuple[str, ...]
    """Mesh axes of replicas that share the work."""

    @staticmethod
    def create(array: _Array, num_matrices: int, share: bool) -> _Layout:
        updating = UPDATES.value
        sizes, dims = {} if updating is None else axis_sizes(updating.mesh), array.axes[array.num_batch :]
        axes = {axis for dim_axes in dims for axis in dim_axes}
        replicas = tuple(a for a, n in sizes.items() if n > 1 and a not in axes | array.batch_axes)
        # With fewer matrices than ranks, some ranks would send padding.
        is_enough = num_matrices >= math.prod(sizes[axis] for axis in (*axes, *replicas))
        return _Layout(dims, array.num_short, sizes, replicas if share and is_enough else ())

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axes in self.dims for axis in axes)

    def num_ranks(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)


def _orthogonalize_stack(layout: _Layout, newton_schulz: Kernel, x: jax.Array) -> jax.Array:
    """Orthogonalize [matrices, *local shard] with the algorithm of `exchange`."""
    num_matrices, axes, replicas = len(x), layout.axes, layout.replicas
    ranks, num_replicas = layout.num_ranks(axes), layout.num_ranks(replicas)
    algorithm, _ = exchange(num_matrices, ranks=ranks, replicas=num_replicas)
    if algorithm == "gather":
        full = _join_shards(layout, jax.lax.all_gather(x, axes))
        return _split_shards(layout, _iterate(layout, newton_schulz, full))[jax.lax.axis_index(axes)]
    num_owned = -(-num_matrices // (ranks * num_replicas))
    x = jnp.pad(x, [(0, num_owned * ranks * num_replicas - num_matrices), *[(0, 0)] * (x.ndim - 1)])
    if replicas:
        num_local = num_owned * ranks
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(replicas) * num_local, num_local)
    if axes:
        x = _join_shards(layout, jax.lax.all_to_all(x.reshape(ranks, num_owned, *x.shape[1:]), axes, 0, 0))
    x = _iterate(layout, newton_schulz, x)
    if axes:
        x = jax.lax.all_to_all(_split_shards(layout, x), axes, 0, 0)
        x = x.reshape(ranks * num_owned, *x.shape[2:])
    if replicas:
        x = jax.lax.all_gather(x, replicas, tiled=True, to="invarying")
    return x[:num_matrices]


def _iterate(layout: _Layout, newton_schulz: Kernel, x: jax.Array) -> jax.Array:
    """Apply Newton-Schulz to full matrices, whose sides may have several dims."""
    num_rows = math.prod(x.shape[1 : 1 + layout.num_short])
    return newton_schulz(x.reshape(len(x), num_rows, -1)).reshape(x.shape)


def _join_shards(layout: _Layout, x: jax.Array) -> jax.Array:
    """Reshape [rank, matrices, *local shard] to [matrices, *full]. Ranks are in the order of the dims they shard."""
    ranks = [layout.num_ranks(axes) for axes in layout.dims]
    x = x.reshape(*ranks, *x.shape[1:])
    for dim in range(len(ranks)):  # (rank, ..., matrices, ...) to (..., matrices, rank, size, ...)
        x = jnp.moveaxis(x, 0, len(ranks) + dim)
    return x.reshape(len(x), *(n * size for n, size in zip(ranks, x.shape[2::2], strict=True)))


def _split_shards(layout: _Layout, x: jax.Array) -> jax.Array:
    """Reshape [matrices, *full] to [rank, matrices, *local shard], in the order of `_join_shards`."""
    ranks = [layout.num_ranks(axes) for axes in layout.dims]
    x = x.reshape(len(x), *(m for n, size in zip(ranks, x.shape[1:], strict=True) for m in (n, size // n)))
    x = x.transpose(*range(1, x.ndim, 2), *range(0, x.ndim, 2))
    return x.reshape(math.prod(ranks), *x.shape[len(ranks) :])
