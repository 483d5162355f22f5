"""Conversion of typed random keys to raw key data, which the training state contains."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshpar.sharding.types import PyTree


def key_data_like() -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of raw key data, for jax's default implementation (`jax_default_prng_impl`)."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))


def is_key(x: object) -> bool:
    """Return whether an array, concrete or abstract, has typed random keys."""
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_impls(tree: PyTree) -> PyTree:
    """Return the implementation of each typed random key of a pytree, traced or concrete; "" for other leaves."""
    return jax.tree.map(lambda x: jax.random.key_impl(x) if is_key(x) else "", tree)


def without_key_types(tree: PyTree) -> PyTree:
    """Replace typed random keys by raw key data, which can be donated, sharded and saved like other arrays."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def with_key_types(tree: PyTree, impls: PyTree) -> PyTree:
    """Convert raw key data to typed random keys. `impls` has the implementation of each key, as from `key_impls`."""
    return jax.tree.map(lambda impl, x: jax.random.wrap_key_data(x, impl=impl) if impl else x, impls, tree)


def key_of(data: jax.Array) -> jax.Array:
    """Return a typed key from raw key data. The training state has raw data, which all checkpoint formats support."""
    return jax.random.wrap_key_data(data) if data.dtype == jnp.uint32 else data
