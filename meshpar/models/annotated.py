"""Linear layers and norms of the decoder, with logical names for their dims."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meshpar.layers.precision import NamedDot
from meshpar.layers.scan import keeps_are_others
from meshpar.models.config import TransformerConfig
from meshpar.sharding.types import PAIR, problem

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
            dot_general=NamedDot(names),
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rms_norm(eps: float, x: Float[Array, "... E"], scale: Float[Array, " E"]) -> Float[Array, "... E"]:
    """`x / rms(x) * scale`, in float32 at the least and given back in the wider dtype of the two.

    The backward pass is left x and the scale, and no arrays in float32; it uses the scale once, so that one that is
    split is gathered once for it. Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    unit, inverse = _unit(eps, x)
    return (unit * (inverse * scale.astype(unit.dtype))).astype(jnp.promote_types(x.dtype, scale.dtype))


def _unit(eps: float, x: Array) -> tuple[Array, Array]:
    """x in a wide dtype, and one over its root mean square."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide, jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)


def _rms_norm_backward(eps: float, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, scale = saved
    wide, inverse = _unit(eps, x)
    unit, g = wide * inverse, g.astype(wide.dtype)
    d_scale = jnp.sum(g * unit, axis=tuple(range(x.ndim - 1)))
    g = g * scale.astype(wide.dtype)
    d_x = inverse * (g - unit * jnp.mean(g * unit, -1, keepdims=True))
    return d_x.astype(x.dtype), d_scale.astype(scale.dtype)


rms_norm.defvjp(lambda eps, *given: (rms_norm(eps, *given), given), _rms_norm_backward)


class Norm(nnx.RMSNorm):
    """Flax's, by `rms_norm`; but as it is where a layer keeps nothing by itself."""

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """As x is."""
        assert self.scale is not None
        assert mask is None
        if keeps_are_others():
            return super().__call__(x)
        return rms_norm(self.epsilon, x, self.scale[...])


def nnx_norm(
    cfg: TransformerConfig, rngs: nnx.Rngs, *, width: int | None = None, name: str = "embed", in_layers: bool = True
) -> nnx.RMSNorm:
    """RMSNorm of the residual stream, or of something as wide as `width`; `name` is the logical one of its dim.

    Outside of layers it is Flax's: there is little to keep, and its scale is gathered once.
    """
    return (Norm if in_layers else nnx.RMSNorm)(
        width or cfg.embed_dim,
        epsilon=cfg.norm_eps,
        param_dtype=jnp.dtype(cfg.param_dtype),
        scale_init=nnx.with_partitioning(nnx.initializers.ones_init(), (name,)),
        rngs=rngs,
    )
