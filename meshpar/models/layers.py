"""Pure functions of a decoder: sharded embedding lookup, rotary embeddings and SwiGLU.

Shape suffixes: B batch, T query positions, S key positions, H query heads, K key/value heads, G = H/K query heads per
key/value head, D head dimension, F = D/2, W dimension of a value head (D by default), E embedding dimension, M hidden
dimension of the MLP, V vocabulary size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from meshpar.layers.precision import dot_general
from meshpar.models import context_attention as context
from meshpar.models.architecture import Activation, Architecture, LayerKind, RopeScaling, YarnScaling
from meshpar.models.embedding_lookup import GATHERED, exchanged_rows, lookup_of
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.context import ambient, constrain, param_spec, spec_of
from meshpar.sharding.manual_regions import outer_axes
from meshpar.sharding.types import PyTree, axes_of_spec, spec_axes

# ---- The layout of activations ---------------------------------------------------------------------------------------


def residual(x_BTE: Array) -> Array:
    """Constrain the residual stream, or an update of it, to its sharding.

    After a row-parallel matmul, this constraint reduces the partial sums: with an all-reduce, or with a reduce-scatter
    under sequence parallelism.
    """
    return constrain(x_BTE, "batch", "norm_seq", "act_embed")


def block_output(y_BTE: Array, name: str) -> Array:
    """Constrain the output of a block to the sharding of the residual stream, and name it for remat policies."""
    return checkpoint_name(residual(y_BTE), name)


def block_input(h_BTE: Array) -> Array:
    """Constrain the output of a norm to the input sharding of column-parallel matmuls.

    Under sequence parallelism this constraint is the all-gather, which must follow the norm. In the backward pass it is
    the reduce-scatter of the input gradients.
    """
    return constrain(residual(h_BTE), "batch", "seq", "act_embed")


# ---- Embedding -------------------------------------------------------------------------------------------------------


def embed(table_VE: Array, tokens_BT: Array, *, is_tied: bool = False) -> Array:
    """Look up token embeddings, sharded as the residual stream.

    There are two algorithms:

    * If the width of the table is sharded over batch axes and a device has fewer tokens than table rows, devices
      exchange the embeddings of their tokens (`meshpar.models.embedding_lookup`).
    * Otherwise, and for tied tables, which the output layer gathers anyway, the width of the table is all-gathered.
      Each device looks up the tokens in its vocabulary shard, and an all-reduce combines the results.

    With an unconstrained `take`, XLA would emit permutes and all-to-alls of indices and embeddings. A one-hot matmul
    would cost as many FLOPs as the output layer.
    """
    context.check_lookup(table_VE, tokens_BT)
    lookup = None if is_tied else lookup_of(table_VE, tokens_BT)
    if lookup is not None:
        # Local row indices of tokens in other vocabulary shards can be negative.
        signed = jax.dtypes.canonicalize_dtype(jnp.promote_types(tokens_BT.dtype, jnp.int32))
        return residual(exchanged_rows(lookup, table_VE, tokens_BT.astype(signed)))
    with jax.named_scope(GATHERED):
        x_BTE = _take(table_VE.shape[0], table_VE, tokens_BT)
    # Without this constraint XLA would gather the full table if `norm_seq` and `vocab` are sharded over the same axis.
    return residual(constrain(x_BTE, "batch", "seq", "act_embed"))


@jax.custom_vjp
def gathered_table(table_VE: Array) -> Array:
    """Return the embedding table sharded over the vocabulary only, as lookups and logits need it.

    The gradient is not constrained, so that its reduction can be a reduce-scatter to the sharding of the parameter.
    """
    return constrain(table_VE, "act_vocab", "act_embed")


gathered_table.defvjp(lambda table_VE: (gathered_table(table_VE), None), lambda _, d_table_VE: (d_table_VE,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(vocab_size: int, table_VE: Array, tokens_BT: Array) -> Array:
    return jnp.take(gathered_table(table_VE), tokens_BT, axis=0)


def _take_backward(vocab_size: int, tokens_BT: Array, g_BTE: Array) -> tuple[Array, None]:
    # A frequent token accumulates thousands of gradients, so they are summed in float32 or higher precision, over
    # tokens and devices. With the constraint before the cast, the reduction can be a reduce-scatter.
    dtype = jnp.promote_types(g_BTE.dtype, jnp.float32)
    d_table_VE = jnp.zeros((vocab_size, g_BTE.shape[-1]), dtype).at[tokens_BT].add(g_BTE.astype(dtype))
    return gathered_table(d_table_VE).astype(g_BTE.dtype), None


_take.defvjp(lambda size, table_VE, tokens_BT: (_take(size, table_VE, tokens_BT), tokens_BT), _take_backward)


# ---- Head ------------------------------------------------------------------------------------------------------------


def reduced_first(x_BTE: Array, kernel_EV: Array) -> tuple[Array, Array]:
    """Return both arguments unchanged, but reduce the kernel gradient before the backward pass of the layers.

    This gradient is the largest message of a step. By default XLA reduces it after the loop over layers, with no
    computation to overlap. Here the reduction overlaps with the matmul of the other gradient, and the unreduced
    gradient is freed before the loop.
    """
    current = ambient()
    if current is None or outer_axes():
        return x_BTE, kernel_EV
    spec = param_spec(kernel_EV, "embed", "vocab")
    if not set(axes_of_spec(spec)) & set(spec_axes(spec_of(x_BTE, "batch", "norm_seq", "act_embed")[0])):
        return x_BTE, kernel_EV
    return _reduced_first(NamedSharding(current.mesh, spec), x_BTE, kernel_EV)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduced_first(shards: NamedSharding, x_BTE: Array, kernel_EV: Array) -> tuple[Array, Array]:
    return x_BTE, kernel_EV


_reduced_first.defvjp(
    lambda _, *arrays: (arrays, None),
    lambda shards, _, grads: jax.lax.optimization_barrier((grads[0], with_layout(grads[1], shards))),
)


def logits(h_BTE: Array, matrix: Array, vocab_dim: int) -> Array:
    """Return logits computed with the kernel of the output layer, or with the embedding table if `vocab_dim` is 0.

    The table is all-gathered over its width, as in `embed`. A kernel promotes the dtype as in Flax's layers.
    """
    if vocab_dim == 0:
        matrix, dtype = gathered_table(matrix), h_BTE.dtype
    else:
        dtype = jnp.promote_types(h_BTE.dtype, matrix.dtype)
    dims = (((2,), (1 - vocab_dim,)), ((), ()))
    return dot_general(h_BTE.astype(dtype), matrix.astype(dtype), dims, low_precision=False)


# ---- Rotary embeddings -----------------------------------------------------------------------------------------------


class Rope(NamedTuple):
    """Cosines and sines of the rotary angles for each position and pair of dimensions."""

    cos_BTF: Float[Array, "B T F"]
    sin_BTF: Float[Array, "B T F"]
    segments_BT: Int[Array, "B T"] | None = None
    """Segment ids of packed sequences. Positions attend only within their segment. `None` means no packing."""
    kind: Int[Array, ""] | None = None
    """Index of the layer's kind in `TransformerConfig.kinds`, if there are several."""
    query_scale_BT: Float[Array, "B T"] | None = None
    """Factor of the queries in layers without rotary embeddings."""
    chunk_BT: Int[Array, "B T"] | None = None
    """Index of the chunk of each position, for layers with chunks. `None` if there is a single chunk."""
    mask_BT: Bool[Array, "B T"] | None = None
    """False for padding, which MoE layers do not route. `None`: all tokens count."""


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | YarnScaling | None = None) -> np.ndarray:
    """Return the rotary frequency of each pair of dimensions, in radians per position: `theta ** (-2 i / head_dim)`.

    Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    frequencies_F = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return frequencies_F
    if isinstance(scaling, YarnScaling):
        # The ramp starts at the pair with `beta_fast` rotations and ends at the pair with `beta_slow`. As in the
        # official code, it is clipped at twice the number of pairs.
        pairs, turns = len(frequencies_F), (scaling.beta_fast, scaling.beta_slow)
        bounds = [pairs * np.log(scaling.original_seq_len / (beta * 2 * np.pi)) / np.log(theta) for beta in turns]
        bounds = [np.floor(bounds[0]), np.ceil(bounds[1])] if scaling.truncate else bounds
        low, high = max(bounds[0], 0), min(bounds[1], 2 * pairs - 1)
        stretched_F = np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0, 1)
        return frequencies_F * (1 - stretched_F) + frequencies_F / scaling.factor * stretched_F
    wavelengths_F, low, high = 2 * np.pi / frequencies_F, scaling.low_freq_factor, scaling.high_freq_factor
    # Llama 4 has equal factors, and therefore no transition.
    kept_F = np.clip((scaling.original_seq_len / wavelengths_F - low) / (high - low or 1e-9), 0, 1)
    return kept_F * frequencies_F + (1 - kept_F) * frequencies_F / scaling.factor


def rope(positions_BT: Array, frequencies_F: np.ndarray, dtype: jax.typing.DTypeLike) -> Rope:
    """Return the rotary cosines and sines of positions, in float32 or higher precision."""
    angles_BTF = positions_BT[..., None] * jnp.asarray(frequencies_F, jnp.promote_types(dtype, jnp.float32))
    return Rope(jnp.cos(angles_BTF), jnp.sin(angles_BTF))


def of_kind(cfg: Architecture, angles_BTRF: Rope, kind: Array) -> Rope:
    """Select the angles of a layer of this kind. Dim R of the angles is the index in `rope_tables`."""
    tables = rope_tables(cfg)
    if len(tables) == 1:
        return angles_BTRF._replace(kind=kind)
    index = jnp.asarray([tables.index((each.has_rope, each.rope_theta)) for each in cfg.kinds])[kind]
    cos_BTF, sin_BTF = (jax.lax.dynamic_index_in_dim(x, index, 2, keepdims=False) for x in angles_BTRF[:2])
    return angles_BTRF._replace(cos_BTF=cos_BTF, sin_BTF=sin_BTF, kind=kind)


def rope_tables(cfg: Architecture) -> list[tuple[bool, float | None]]:
    """Return the distinct values of (has_rope, rope_theta) among the kinds of layers."""
    return list(dict.fromkeys((kind.has_rope, kind.rope_theta) for kind in cfg.kinds))


def by_kind(cfg: Architecture, kind: Array | None, value_of: Callable[[LayerKind], Any]) -> PyTree:
    """Return a value of the layer's kind: static if all kinds have it, otherwise an array."""
    values = [value_of(each) for each in cfg.kinds]
    return values[0] if len(set(values)) == 1 else jnp.asarray(values)[kind]


def rotate(x_BTHD: Array, angles: Rope) -> Array:
    """Rotate the pairs of dimensions (i, i + F) of each head by the angles of its position.

    If D > 2 F, the dimensions after the first 2 F are unchanged.
    """
    num_rotated = 2 * angles.cos_BTF.shape[-1]
    if num_rotated < x_BTHD.shape[-1]:
        turned_BTHD = rotate(x_BTHD[..., :num_rotated], angles)
        return jnp.concatenate([turned_BTHD, x_BTHD[..., num_rotated:]], axis=-1)
    cos_BT1F, sin_BT1F = angles.cos_BTF[:, :, None], angles.sin_BTF[:, :, None]
    a_BTHF, b_BTHF = jnp.split(x_BTHD.astype(cos_BT1F.dtype), 2, axis=-1)
    turned = (a_BTHF * cos_BT1F - b_BTHF * sin_BT1F, b_BTHF * cos_BT1F + a_BTHF * sin_BT1F)
    return jnp.concatenate(turned, axis=-1).astype(x_BTHD.dtype)


# ---- MLP -------------------------------------------------------------------------------------------------------------


MATMULS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
"""Remat policy for `swiglu` and the next matmul. It saves only the input times `a` of a LoRA pair `a b`, if any."""


def swiglu(gate_BTM: Array, up_BTM: Array, activation: Activation = "silu") -> Array:
    """Return `activation(gate) * up` (Shazeer 2020, "GLU Variants Improve Transformer").

    Call this function and the next matmul under `jax.checkpoint`, which saves only the two inputs. Without it, six
    arrays of this size are saved for the backward pass.
    """
    activate = jax.nn.silu if activation == "silu" else functools.partial(jax.nn.gelu, approximate=True)
    return constrain(activate(gate_BTM) * up_BTM, "batch", "seq", "act_mlp")
