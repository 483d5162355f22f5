"""Linear layers and norms of the decoder, with logical names for their dims."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from meshpar.layers.precision import NamedDot
from meshpar.layers.scan import step_selects_residuals
from meshpar.models.architecture import Architecture
from meshpar.sharding.errors import problem
from meshpar.sharding.types import PAIR

Initializer = nnx.initializers.Initializer


def into_residual(cfg: Architecture) -> Initializer:
    """Return the initializer of matrices that write to the residual stream.

    There are 2 L of them, so their variance is divided by 2 L to keep the variance of the residual stream independent
    of depth (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").
    """
    return nnx.initializers.variance_scaling(1 / (2 * cfg.num_layers), "fan_in", "normal")


def nnx_linear(cfg: Architecture, rngs: nnx.Rngs) -> Any:
    """Return a function that creates linear layers with logical dim names."""

    def make(
        inputs: Any,
        outputs: Any,
        *,
        names: tuple[str | None, ...],
        axis: Any = -1,
        init: Initializer | None = None,
        bias: bool = False,
    ) -> nnx.LinearGeneral:
        num_outputs = len(outputs) if isinstance(outputs, tuple) else 1
        return nnx.LinearGeneral(
            inputs,
            outputs,
            axis=axis,
            use_bias=bias,
            param_dtype=jnp.dtype(cfg.param_dtype),
            kernel_init=nnx.with_partitioning(init or nnx.initializers.lecun_normal(), names),
            bias_init=nnx.with_partitioning(nnx.initializers.zeros_init(), names[-num_outputs:]),
            dot_general=NamedDot(names),
            rngs=rngs,
        )

    return make


def add_bias(layer: nnx.LinearGeneral, y: Array) -> Array:
    """Add the bias of a layer, if it has one, to y, the result of a matmul with the kernel of the layer."""
    return y if layer.bias is None else y + layer.bias[...]


def bare(layer: nnx.LinearGeneral) -> Array:
    """Return the kernel of a layer for a matmul outside the layer. Layers with LoRA adapters are an error."""
    if hasattr(layer, PAIR[0]):
        reason = "overlapped matmuls, output layers and cached latents use the kernel without its adapters"
        fix = 'exclude the layer from lora(modules=...), use tensor_matmul="xla", or merge the adapters first'
        raise problem("lora", "add adapters to this layer", reason, fix, code="unsupported-feature")
    return layer.kernel[...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rms_norm(eps: float, offset: float, x: Array, scale: Array) -> Array:
    """Return `x / rms(x) * (scale + offset)` of x `[..., E]`, computed in float32 or higher precision.

    Only x and the scale are saved for the backward pass, and no float32 arrays. The backward pass uses the scale once,
    so that a sharded scale is all-gathered once. Reference: Zhang and Sennrich 2019, "Root Mean Square Layer
    Normalization".
    """
    return _normed(eps, offset, x, scale)


def _normed(eps: float, offset: float, x: Array, scale: Array) -> Array:
    unit, inverse = _unit(eps, x)
    return (unit * (inverse * _shifted(scale, offset, unit))).astype(jnp.promote_types(x.dtype, scale.dtype))


def _shifted(scale: Array, offset: float, like: Array) -> Array:
    scale = scale.astype(like.dtype)
    return scale + offset if offset else scale


def _unit(eps: float, x: Array) -> tuple[Array, Array]:
    """Return x in float32 or higher precision, and its inverse root mean square."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x, jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)


def _rms_norm_backward(eps: float, offset: float, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, scale = saved
    x_float32, inverse = _unit(eps, x)
    unit, g = x_float32 * inverse, g.astype(x_float32.dtype)
    d_scale = jnp.sum(g * unit, axis=tuple(range(x.ndim - 1)))
    g = g * _shifted(scale, offset, x_float32)
    d_x = inverse * (g - unit * jnp.mean(g * unit, -1, keepdims=True))
    return d_x.astype(x.dtype), d_scale.astype(scale.dtype)


rms_norm.defvjp(lambda eps, offset, *args: (rms_norm(eps, offset, *args), args), _rms_norm_backward)


class Norm(nnx.RMSNorm):
    """RMSNorm of Flax with the memory-saving `rms_norm`, unless a remat policy controls the saved activations."""

    offset: float = 0.0
    """Number that is added to the scale."""

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Normalize x along its last dim."""
        assert self.scale is not None
        assert mask is None
        if step_selects_residuals() and not self.offset:
            return super().__call__(x)
        normed = _normed if step_selects_residuals() else rms_norm
        return normed(self.epsilon, self.offset, x, self.scale[...])


def nnx_norm(
    cfg: Architecture, rngs: nnx.Rngs, *, width: int | None = None, name: str = "embed", in_layers: bool = True
) -> nnx.RMSNorm:
    """Return a `Norm`, or Flax's RMSNorm outside scanned layers, where few arrays are saved."""
    initial = nnx.initializers.constant(1 - cfg.norm_offset)
    norm = (Norm if in_layers or cfg.norm_offset else nnx.RMSNorm)(
        width or cfg.embed_dim,
        epsilon=cfg.norm_eps,
        param_dtype=jnp.dtype(cfg.param_dtype),
        scale_init=nnx.with_partitioning(initial if cfg.norm_offset else nnx.initializers.ones_init(), (name,)),
        rngs=rngs,
    )
    if isinstance(norm, Norm):
        norm.offset = cfg.norm_offset
    return norm
