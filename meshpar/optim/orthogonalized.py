"""Muon on a mesh: every matrix is orthogonalised whole, by one rank or, where that sends less, by all that hold it.

    momentum of a group [K, m/N, n] on N ranks
      owners   all-to-all [K/N, m, n] ─► Newton-Schulz ─► all-to-all back
      gather   all-gather [K, m, n] ─► Newton-Schulz ─► each keeps its part

A group is all matrices of one shape that lie alike, in whatever arrays: layers of a stack, experts, gate with up.
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

from meshpar.sharding.context import current
from meshpar.sharding.types import AnyMesh, Names, PyTree, axis_sizes, path_str, problem, spec_axes

Dims: TypeAlias = optax.contrib.MuonDimensionNumbers
"""Of an array, the dims of a matrix's rows and of its columns; the others are of several matrices."""
Kernel: TypeAlias = Callable[..., Any]
_BATCH = ("layers", "expert")
_NO_MATRIX = ("scale", "bias", "embedding")


class MuonState(NamedTuple):
    """What `mp.muon` keeps of the arrays it orthogonalises."""

    count: jax.Array  # type: ignore[assignment]
    mu: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Updating:
    """Where an optimizer runs: how the arrays it updates lie, by path. Compared by identity: jax keeps traces by it."""

    mesh: AnyMesh
    specs: Mapping[str, PartitionSpec]


def exchange(num_matrices: int, *, ranks: int, replicas: int = 1) -> tuple[Literal["owners", "gather"], float]:
    """The cheaper way to orthogonalise matrices of which each of N ranks holds a part, and what a rank sends for it.

        owners  2 (N-1)/N · C + (R-1) · C     C = ceil(K / (N R)) matrices a rank: to their owners, and back
        gather    (N-1)/N · K                 every rank orthogonalises all of them

    Args:
      num_matrices: K, of one shape.
      ranks: N, over which each matrix is split.
      replicas: R, ranks that hold the same part and share the work; 1: they repeat it.

    Returns:
      The way, and what a rank sends in matrices: times their bytes. Where both send alike owners do, who compute less.
      Replicas that share exchange results, which is more than to send nothing: that choice is the caller's.

    Source: Liu et al. 2025, "Muon is Scalable for LLM Training" (owners that gather, under ZeRO-1).
    """
    each = -(-num_matrices // (ranks * replicas))
    owners, gather = 2 * (ranks - 1) / ranks * each + (replicas - 1) * each, (ranks - 1) / ranks * num_matrices
    return ("owners", owners) if replicas > 1 or owners <= gather else ("gather", gather)


def matrices(names: Mapping[str, Names]) -> Callable[[PyTree], PyTree]:
    """Which arrays Muon is for, and where their matrices lie, from the logical names of their dims.

    Dims named `layers` and `expert` count matrices; `head_dim` goes with the heads before it. Of the rest, rows and
    columns must be left. Tables of the vocabulary, what is called `scale`, `bias` or `embedding`, and what has no such
    two dims (a router's experts are no columns) are left to Adam. Without names an array of two dims is a matrix.

    Args:
      names: of parameters, by path: `{one.path: one.leaf.names for one in mp.shardings(model, mesh, strategy).params}`.

    Returns:
      For `mp.muon(muon_weight_dimension_numbers=)`, and optax's.
    """

    def dims_of(key_path: Any, x: Any) -> Dims | None:
        path = path_str(key_path)
        named = names.get(path, (None,) * x.ndim)
        if path.rpartition("/")[2] in _NO_MATRIX or "vocab" in named:
            return None
        sides: list[list[int]] = []
        for dim, name in enumerate(named):
            if name == "head_dim" and sides:
                sides[-1].append(dim)
            elif name not in _BATCH:
                sides.append([dim])
        return Dims(*map(tuple, sides)) if len(sides) == 2 else None

    return lambda params: jax.tree_util.tree_map_with_path(dims_of, params)


def muon(
    learning_rate: Any, ns_coeffs: Any = (3.4445, -4.7750, 2.0315), ns_steps: int = 5, beta: float = 0.95,
    eps: float = 1e-8, weight_decay: float = 0.0, weight_decay_mask: Any = None, mu_dtype: Any = None, *,
    nesterov: bool = True, preconditioning: str = "frobenius", adam_b1: float = 0.9, adam_b2: float = 0.999,
    adam_eps_root: float = 0.0, adam_weight_decay: float = 0.0, adam_weight_decay_mask: Any = None,
    adam_learning_rate: Any = None, muon_weight_dimension_numbers: Any = None, consistent_rms: float | None = None,
    share: bool = True,
) -> optax.GradientTransformation:  # fmt: skip
    """`optax.contrib.muon` for arrays that are split over a mesh; values are its own.

    In a step of `mp.train_step` whole matrices are orthogonalised by owners (`exchange` says when, and what that
    sends); anywhere else as optax does. What it sends stands among the kernels of `mp.explain`. What is not named here
    is as in `optax.contrib.muon`.

    Args:
      muon_weight_dimension_numbers: a tree like the parameters of `MuonDimensionNumbers`, None where Adam is to
        update; or a function from parameters to it, as `matrices(names)`. None: every array of two dims.
      adam_weight_decay_mask: what of Adam's is decayed, as in `optax.adamw(mask=)`.
      share: ranks that hold the same matrices (of `data`, say) each orthogonalise some and exchange what comes out,
        where there is one for each; False: each does all, and sends nothing.

    Raises:
      ValueError: when it is initialised, dimension numbers that are of no matrix.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    each = optax.contrib.scale_by_muon(
        ns_coeffs, ns_steps, beta=0.0, eps=eps, nesterov=False, preconditioning=preconditioning,  # type: ignore[arg-type]
        weight_dimension_numbers=Dims((1,), (2,)),
    )  # fmt: skip

    def newton_schulz(x: jax.Array) -> jax.Array:
        # Without momentum optax's transform is the iteration alone, and the public way to it.
        return each.update(x, each.init(x))[0]  # type: ignore[return-value]

    def dims_of(tree: PyTree) -> dict[str, Dims | None]:
        given = muon_weight_dimension_numbers
        if given is None:
            given = jax.tree.map(lambda x: Dims() if x.ndim == 2 else None, tree)
        given = given(tree) if callable(given) else given
        return {path_str(path): one for path, one in jax.tree_util.tree_leaves_with_path(given, is_leaf=_is_dims)}

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
    own = optax.chain(scaled, decay, optax.scale_by_learning_rate(learning_rate))
    return optax.partition({"muon": own, "adam": adam}, labels)


def _is_dims(x: Any) -> bool:
    return x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)


def _label(path: str, x: Any, dims: Mapping[str, Dims | None]) -> str:
    if dims.get(path, path) is None or 0 in x.shape:  # what is empty has no shape to scale by
        return "adam"
    where, fix = f"muon, `{path}` of shape {tuple(x.shape)}", "None leaves it to Adam"
    if path not in dims:
        exists = "muon_weight_dimension_numbers say nothing of it"
        raise problem(where, "find its rows and columns", exists, f"give MuonDimensionNumbers; {fix}")
    rows, columns = _sides(dims[path], x.ndim)
    if not rows or not columns or len({*rows, *columns}) < len((*rows, *columns)) or max(*rows, *columns) >= x.ndim:
        exists = f"a matrix has some of each, of {x.ndim} dims, and none twice"
        asked = f"orthogonalise its rows {rows} and columns {columns}"
        raise problem(where, asked, exists, f"give MuonDimensionNumbers((0,), (1,)); {fix}")
    return "muon"


def _sides(dims: Any, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows, columns = ((side,) if isinstance(side, int) else tuple(side) for side in dims)
    return tuple(dim + ndim * (dim < 0) for dim in rows), tuple(dim + ndim * (dim < 0) for dim in columns)


def _scale_by_muon(
    newton_schulz: Kernel, dims_of: Callable[[PyTree], dict[str, Dims | None]],
    beta: float, nesterov: bool, mu_dtype: Any, consistent_rms: float | None, share: bool,
) -> optax.GradientTransformation:  # fmt: skip
    """Momentum, orthogonalised and scaled by shape: optax's `scale_by_muon` and `scale_by_shape`."""

    def init(params: PyTree) -> MuonState:
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params, dtype=mu_dtype))

    def update(grads: PyTree, state: MuonState, params: PyTree = None) -> tuple[PyTree, MuonState]:
        del params
        mu, count = optax.tree.update_moment(grads, state.mu, beta, 1), optax.safe_increment(state.count)
        if nesterov:
            later = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            now = optax.tree.bias_correction(grads, beta, count)
            hat = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, later, now)
        else:
            hat = optax.tree.bias_correction(mu, beta, count)
        dims, (found, structure) = dims_of(hat), jax.tree_util.tree_flatten_with_path(hat)
        arrays = [_Array.of(path_str(path), x, dims[path_str(path)]) for path, x in found]
        with jax.named_scope("muon"):
            orthogonal = _orthogonalised(arrays, newton_schulz, share)
        scaled = [one.scale(consistent_rms) * x for one, x in zip(arrays, orthogonal, strict=True)]
        return jax.tree.unflatten(structure, scaled), MuonState(count, optax.tree.cast(mu, mu_dtype))

    return optax.GradientTransformation(init, update)


# ---- Who orthogonalises what -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Array:
    """An array of matrices: how its dims stand once the matrices are flat, the shorter side first."""

    x: jax.Array
    order: tuple[int, ...]
    """Its dims: those that count matrices, of the shorter side, of the longer."""
    num_batch: int
    num_short: int
    fans: tuple[int, int]
    """Inputs and outputs."""
    axes: tuple[tuple[str, ...], ...]
    """Mesh axes of more than one rank that split each dim of `order`."""

    @staticmethod
    def of(path: str, x: jax.Array, dims: Dims | None) -> _Array:
        rows, columns = _sides(dims, x.ndim)
        fans = tuple(math.prod(x.shape[dim] for dim in side) for side in (rows, columns))
        # The iteration of a transposed matrix is the transposed one, so `down` may stand beside `up`.
        short, long = (rows, columns) if fans[0] <= fans[1] else (columns, rows)
        batch = tuple(dim for dim in range(x.ndim) if dim not in (*rows, *columns))
        here = current().updates
        spec = () if here is None else tuple(here.specs[path])
        sizes = {} if here is None else axis_sizes(here.mesh)
        axes = [tuple(a for a in spec_axes(entry) if sizes[a] > 1) for entry in spec]
        axes += [()] * (x.ndim - len(spec))
        order = (*batch, *short, *long)
        return _Array(x, order, len(batch), len(short), fans, tuple(axes[dim] for dim in order))  # type: ignore[arg-type]

    @property
    def alike(self) -> Any:
        """What arrays of one group have in common."""
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
        """A device's part of it, its matrices along the first dim."""
        x = x.transpose(self.order)
        return x.reshape(-1, *x.shape[self.num_batch :])

    def unflat(self, x: jax.Array, like: jax.Array) -> jax.Array:
        x = x.reshape([like.shape[dim] for dim in self.order])
        return x.transpose(sorted(range(x.ndim), key=lambda dim: self.order[dim]))

    def scale(self, consistent_rms: float | None) -> Any:
        inputs, outputs = self.fans
        if consistent_rms is None:
            return jnp.sqrt(jnp.maximum(1, outputs / inputs))
        return jnp.sqrt(jnp.maximum(inputs, outputs)) * consistent_rms


def _orthogonalised(arrays: Sequence[_Array], newton_schulz: Kernel, share: bool) -> list[jax.Array]:
    here = current().updates
    groups: dict[Any, list[int]] = {}
    for at, one in enumerate(arrays):
        groups.setdefault(one.alike, []).append(at)
    out: dict[int, jax.Array] = {}
    for places in groups.values():
        group = [arrays[at] for at in places]
        kernel = functools.partial(_group, group, newton_schulz, share)
        if here is not None and here.mesh.size > 1:
            specs = [one.spec for one in group]
            kernel = jax.shard_map(kernel, mesh=here.mesh, in_specs=(specs,), out_specs=specs)
        out |= dict(zip(places, kernel([one.x for one in group]), strict=True))
    return [out[at] for at in range(len(arrays))]


def _group(arrays: list[_Array], newton_schulz: Kernel, share: bool, held: list[jax.Array]) -> list[jax.Array]:
    """Orthogonalises matrices of one shape that lie alike: each device's part in, the same part out."""
    flat = [one.flat(x) for one, x in zip(arrays, held, strict=True)]
    ends = np.cumsum([len(x) for x in flat])
    found = _exchanged(_Split.of(arrays[0], int(ends[-1]), share), newton_schulz, jnp.concatenate(flat))
    parts = jnp.split(found, ends[:-1])
    return [one.unflat(part, x) for one, part, x in zip(arrays, parts, held, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Split:
    """How the matrices of a group are split."""

    dims: tuple[tuple[str, ...], ...]
    """Axes of each dim of a matrix."""
    num_short: int
    sizes: Mapping[str, int]
    replicas: tuple[str, ...]
    """Axes whose ranks hold the same and share the work."""

    @staticmethod
    def of(one: _Array, num_matrices: int, share: bool) -> _Split:
        here = current().updates
        sizes, dims = {} if here is None else axis_sizes(here.mesh), one.axes[one.num_batch :]
        over = {axis for axes in dims for axis in axes}
        others = tuple(a for a, n in sizes.items() if n > 1 and a not in over | one.batch_axes)
        # With fewer matrices than ranks some would send what is not used.
        enough = num_matrices >= math.prod(sizes[axis] for axis in (*over, *others))
        return _Split(dims, one.num_short, sizes, others if share and enough else ())

    @property
    def over(self) -> tuple[str, ...]:
        return tuple(axis for axes in self.dims for axis in axes)

    def ways(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)


def _exchanged(split: _Split, newton_schulz: Kernel, x: jax.Array) -> jax.Array:
    """[matrices, part of each], orthogonalised, on every rank."""
    num, over, replicas = len(x), split.over, split.replicas
    ranks, copies = split.ways(over), split.ways(replicas)
    way, _ = exchange(num, ranks=ranks, replicas=copies)
    if way == "gather":
        whole = _joined(split, jax.lax.all_gather(x, over))
        return _parts(split, _iterated(split, newton_schulz, whole))[jax.lax.axis_index(over)]
    each = -(-num // (ranks * copies))
    x = jnp.pad(x, [(0, each * ranks * copies - num), *[(0, 0)] * (x.ndim - 1)])
    if replicas:
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(replicas) * each * ranks, each * ranks)
    if over:
        x = _joined(split, jax.lax.all_to_all(x.reshape(ranks, each, *x.shape[1:]), over, 0, 0))
    x = _iterated(split, newton_schulz, x)
    if over:
        x = jax.lax.all_to_all(_parts(split, x), over, 0, 0)
        x = x.reshape(ranks * each, *x.shape[2:])
    if replicas:
        x = jax.lax.all_gather(x, replicas, tiled=True, to="invarying")
    return x[:num]


def _iterated(split: _Split, newton_schulz: Kernel, x: jax.Array) -> jax.Array:
    """Newton-Schulz of whole matrices whose rows and columns may be of several dims."""
    rows = math.prod(x.shape[1 : 1 + split.num_short])
    return newton_schulz(x.reshape(len(x), rows, -1)).reshape(x.shape)


def _joined(split: _Split, x: jax.Array) -> jax.Array:
    """[rank, matrices, part of each] to [matrices, whole]: ranks stand in the order of the dims that they split."""
    ranks = [split.ways(axes) for axes in split.dims]
    x = x.reshape(*ranks, *x.shape[1:])
    for dim in range(len(ranks)):  # (rank, ..., matrices, ...) to (..., matrices, rank, size, ...)
        x = jnp.moveaxis(x, 0, len(ranks) + dim)
    return x.reshape(len(x), *(n * size for n, size in zip(ranks, x.shape[2::2], strict=True)))


def _parts(split: _Split, x: jax.Array) -> jax.Array:
    """[matrices, whole] to [rank, matrices, part of each]."""
    ranks = [split.ways(axes) for axes in split.dims]
    x = x.reshape(len(x), *(m for n, size in zip(ranks, x.shape[1:], strict=True) for m in (n, size // n)))
    x = x.transpose(*range(1, x.ndim, 2), *range(0, x.ndim, 2))
    return x.reshape(math.prod(ranks), *x.shape[len(ranks) :])
