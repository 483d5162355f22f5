"""Makes the annotated matrices and norms that the decoders are built of: each once in NNX and once in Linen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jaxtyping import Array

from meshpar.models.config import TransformerConfig
from meshpar.sharding.types import PAIR, problem
from meshpar.training.precision import dot_general

Initializer = nnx.initializers.Initializer


def into_residual(cfg: TransformerConfig) -> Initializer:
    """For matrices that add to the residual stream, which 2 L of them do: its variance must not grow with depth.

    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    return nnx.initializers.variance_scaling(1 / (2 * cfg.num_layers), "fan_in", "normal")


def nnx_linear(cfg: TransformerConfig, rngs: nnx.Rngs) -> Any:
    """Makes matrices without bias, with logical names."""

    def make(
        inputs: Any, outputs: Any, *, names: tuple[str | None, ...], axis: Any = -1, init: Initializer | None = None
    ) -> nnx.LinearGeneral:
        return nnx.LinearGeneral(
            inputs,
            outputs,
            axis=axis,
            use_bias=False,
            param_dtype=jnp.dtype(cfg.param_dtype),
            kernel_init=nnx.with_partitioning(init or nnx.initializers.lecun_normal(), names),
            dot_general=dot_general,
            rngs=rngs,
        )

    return make


def bare(layer: nnx.LinearGeneral) -> Array:
    """A layer's matrix, to multiply by elsewhere.

    Raises:
      ValueError: the layer has adapters, which would be left out.
    """
    if hasattr(layer, PAIR[0]):
        exists = "here its matrix is used without the layer, as overlapped matmuls, heads and cached latents do"
        fix = 'leave it out of lora(modules=...), use tensor_matmul="xla", or merge the adapters first'
        raise problem("lora", "add what adapters make to what their layer makes", exists, fix)
    return layer.kernel[...]


class Norm(nnx.RMSNorm):
    """RMSNorm of which the backward pass is left its input alone: else it is several arrays as wide, in float32."""

    def __call__(self, x: Array, **options: Any) -> Array:
        """As x is."""
        return jax.checkpoint(functools.partial(super().__call__, **options), prevent_cse=False)(x)


def nnx_norm(cfg: TransformerConfig, rngs: nnx.Rngs, *, width: int | None = None, name: str = "embed") -> nnx.RMSNorm:
    """RMSNorm of the residual stream, or of something as wide as `width`; `name` is the logical one of its dim."""
    return Norm(
        width or cfg.embed_dim,
        epsilon=cfg.norm_eps,
        param_dtype=jnp.dtype(cfg.param_dtype),
        scale_init=nnx.with_partitioning(nnx.initializers.ones_init(), (name,)),
        rngs=rngs,
    )


def linen_linear(
    cfg: TransformerConfig,
    name: str,
    outputs: Any,
    names: tuple[str | None, ...],
    *,
    axis: Any = -1,
    init: Initializer | None = None,
    dot: Callable[..., Array] = dot_general,
) -> nn.DenseGeneral:
    """A matrix without bias, with logical names."""
    return nn.DenseGeneral(
        outputs,
        axis=axis,
        use_bias=False,
        param_dtype=jnp.dtype(cfg.param_dtype),
        kernel_init=nn.with_logical_partitioning(init or nn.initializers.lecun_normal(), names),
        dot_general=dot,
        name=name,
    )


def linen_kernel(inputs: Array, kernel: Array, *_: Any, **__: Any) -> Array:
    """In place of a layer's matmul: its weight, made and named by the layer as always, for a matmul elsewhere."""
    return kernel


def linen_norm(cfg: TransformerConfig, name: str, *, dim: str = "embed") -> nn.RMSNorm:
    """RMSNorm over the last dim of what it is given, whose logical name is `dim`; see `Norm`."""
    init = nn.with_logical_partitioning(nn.initializers.ones_init(), (dim,))
    return nn.checkpoint(nn.RMSNorm, prevent_cse=False)(
        epsilon=cfg.norm_eps, param_dtype=jnp.dtype(cfg.param_dtype), scale_init=init, name=name
    )
