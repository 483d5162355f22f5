"""An MoE layer as a Flax NNX module: `MoE`."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meshpar.moe.balance import update_bias
from meshpar.moe.layer import (
    EXPERTS,
    SHARED,
    RouterStats,
    Weights,
    check_layer,
    moe_layer,
    of_rows,
    parameters,
    shared_experts,
)
from meshpar.moe.layer_config import MoEConfig

Initializer = nnx.initializers.Initializer


class BalancingBias(nnx.Variable):
    """What is added to an expert's score for the choice alone. Not a parameter: no gradient, no optimizer."""


class LoadCount(nnx.Variable):
    """Choices that fell on each expert since the last update of the bias."""


class MoE(nnx.Module):
    """An MoE layer of SwiGLU experts, for any NNX model.

    Parameters: `router [d, E]`, `gate` and `up [E, d, f]`, `down [E, f, d]`, and of shared experts `shared_gate`,
    `shared_up [d, s]`, `shared_down [s, d]`, with logical names. With `config.bias_rate` there are two variables more,
    `bias` and `load`, which the training step keeps up to date (`after_update`).

    Args:
      embed_dim: width of the tokens, d.
      config: of the layer.
      param_dtype: in which parameters are made; compute follows what the layer is given.
      down_init: of the matrices that lead back to tokens; None: as all others, by the width they come from.
      rngs: draws the parameters.

    Raises:
      ValueError: a width that is none; something else than a config, or than a floating dtype.
    """

    adapted = (*EXPERTS, *SHARED)

    def __init__(
        self,
        embed_dim: int,
        config: MoEConfig,
        *,
        param_dtype: str = "float32",
        down_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_layer("MoE", embed_dim, config, param_dtype)
        self.config = config
        dtype = jnp.dtype(param_dtype)
        # NNX would place annotated parameters on a mesh of its own; meshpar's rules place them when they are born.
        with nnx.use_eager_sharding(False):
            for name, (names, shape, init) in parameters(embed_dim, config, down_init).items():
                setattr(self, name, nnx.Param(nnx.with_partitioning(init, names)(rngs.params(), shape, dtype)))
            if config.is_biased:
                self.bias = BalancingBias(jnp.zeros(config.routing.num_experts, jnp.promote_types(dtype, jnp.float32)))
                self.load = LoadCount(jnp.zeros(config.routing.num_experts, jnp.int32))

    def __call__(self, x: Float[Array, "B T d"], *, drops: bool = True) -> tuple[Float[Array, "B T d"], RouterStats]:
        """The experts' output for every token, and the router's statistics; see `moe_layer`.

        The auxiliary loss, `stats.loss`, is the caller's to add to the loss, or to hand to
        `meshpar.layers.auxiliary.report`.
        """
        config = self.config
        weights = Weights(*(self.weight(name) for name in Weights._fields))
        y, stats = moe_layer(x, weights, config, bias=self.bias[...] if config.is_biased else None, drops=drops)
        if config.shared_experts:
            y = y + shared_experts(x, self.product)
        if config.is_biased:
            self.load[...] = self.load[...] + stats.load
        return y, stats

    def weight(self, name: str) -> Array:
        """What the layer computes with in place of a weight: `mp.lora` puts pairs beside experts' here."""
        return getattr(self, name)[...]

    def product(self, x: Float[Array, "B T d"], name: str) -> Float[Array, "B T f"]:
        """Rows times a matrix of the shared experts: `mp.lora` adds what pairs make here."""
        return of_rows(x, getattr(self, name)[...])

    def after_update(self) -> None:
        """Move the bias by what was counted since the last time; a training step does it once, behind its update."""
        if self.config.is_biased:
            self.bias[...] = update_bias(self.bias[...], self.load[...], rate=self.config.bias_rate)
            self.load[...] = jnp.zeros_like(self.load[...])
