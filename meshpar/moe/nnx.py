"""The MoE layer as a Flax NNX module: `MoE`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from meshpar.layers.precision import dot_general
from meshpar.layers.token_mask import mask_for
from meshpar.moe.balance import update_bias
from meshpar.moe.grouped import ACTIVATIONS
from meshpar.moe.layer import Weights, check_config, moe_layer
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.router_stats import RouterStats
from meshpar.sharding.context import ambient, constrain
from meshpar.sharding.errors import check_cases, check_positive_int

Initializer = nnx.initializers.Initializer
SHARED = ("shared_gate", "shared_up", "shared_down")
BIASES: dict[str, tuple[str | None, ...]] = {
    "gate_bias": ("expert", "mlp"), "up_bias": ("expert", "mlp"), "down_bias": ("expert", None),
    "router_bias": ("expert",),
}  # fmt: skip


class BalancingBias(nnx.Variable):
    """Bias that is added to the experts' scores for the assignment only. It has no gradient and no optimizer state."""


class LoadCount(nnx.Variable):
    """Number of assignments of each expert since the last update of the bias."""


class MoE(nnx.Module):
    """MoE layer with SwiGLU experts, for any NNX model.

    Parameters, with logical names: `router [d, E]`, `gate` and `up [E, d, f]`, `down [E, f, d]`, and for shared experts
    `shared_gate` and `shared_up [d, s]`, `shared_down [s, d]`; with `config.has_biases`, `router_bias [E]`,
    `gate_bias` and `up_bias [E, f]`, `down_bias [E, d]`. If `config.bias_rate` is set, the variables `bias` and
    `load` [E] hold the balancing bias, and the training step calls `after_update` once per update.

    Args:
      embed_dim: d, the size of a token.
      config: the MoE layer's experts, routing and dispatch.
      param_dtype: dtype of the parameters. The compute dtype follows the inputs.
      down_init: initializer of `down` and `shared_down`. None for the default, which scales by the input size.
      rngs: source of the PRNG keys for the parameters.

    Raises:
      ValueError: `embed_dim`, `config` or `param_dtype` is invalid.

    Example:
      >>> routing = mp.moe.Routing(num_experts=8, top_k=2)
      >>> config = mp.moe.MoEConfig(routing=routing, mlp_dim=32, auxiliary_weight=0.01)
      >>> layer = mp.moe.MoE(16, config, rngs=nnx.Rngs(0))
      >>> y, stats = nnx.jit(layer)(jnp.ones((2, 4, 16)))
      >>> y.shape, int(stats.load.sum())
      ((2, 4, 16), 16)
      >>> mp.moe.report_layers(stats, config)  # adds the auxiliary loss and the load metrics to a training step
    """

    adapted = ("gate", "up", "down", *SHARED)
    """Weights that `mp.lora` can adapt."""

    def __init__(
        self,
        embed_dim: int,
        config: MoEConfig,
        *,
        param_dtype: str = "float32",
        down_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_positive_int("MoE", "the size of a token", embed_dim=embed_dim)
        check_config("MoE", config)
        try:
            is_floating = param_dtype is not None and jnp.issubdtype(jnp.dtype(param_dtype), jnp.floating)
        except TypeError:
            is_floating = False
        case = not is_floating, "parameters have a floating-point dtype", 'use param_dtype="float32" or "bfloat16"'
        check_cases("MoE", f"set param_dtype={param_dtype!r}", "wrong-dtype", case)
        self.config = config
        dtype = jnp.dtype(param_dtype)
        inward, outward, init = ("embed", "mlp"), ("mlp", "embed"), jax.nn.initializers.lecun_normal()
        names: dict[str, tuple[str | None, ...]]
        names = {"router": ("embed", "expert"), "gate": ("expert", *inward), "up": ("expert", *inward)}
        names |= {"down": ("expert", *outward)}
        if config.shared_experts:
            names |= dict(zip(SHARED, (inward, inward, outward), strict=True))
        if config.has_biases:
            names |= BIASES
        # NNX would place annotated parameters on its own mesh. meshpar's rules place them when they are created.
        with nnx.use_eager_sharding(False):
            for name, dims in names.items():  # in the order of their PRNG keys
                mlp_dim = config.shared_dim if name in SHARED else config.mlp_dim
                sizes = {"embed": embed_dim, None: embed_dim, "expert": config.routing.num_experts, "mlp": mlp_dim}
                init_fn = (down_init or init) if name.endswith("down") else init
                init_fn = _per_expert(init_fn) if dims[0] == "expert" else init_fn
                init_fn = nnx.with_partitioning(jax.nn.initializers.zeros if name in BIASES else init_fn, dims)
                setattr(self, name, nnx.Param(init_fn(rngs.params(), tuple(sizes[dim] for dim in dims), dtype)))
            if config.is_biased:
                self.bias = BalancingBias(jnp.zeros(config.routing.num_experts, jnp.promote_types(dtype, jnp.float32)))
                self.load = LoadCount(jnp.zeros(config.routing.num_experts, jnp.int32))

    def __call__(
        self, x: Float[Array, "B T d"], *, mask: Bool[Array, "B T"] | None = None, drops: bool = True
    ) -> tuple[Float[Array, "B T d"], RouterStats]:
        """Return the gate-weighted sum of the experts' outputs, and the router statistics.

        Args:
          x: tokens.
          mask: False for padding, as in `moe_layer`. None: the mask of `moe.masking`, which `next_token_loss` sets.
          drops: False to ignore capacities, as in `moe_layer`.

        Returns:
          The output, and `RouterStats`. The auxiliary loss is not yet part of the training loss: pass the statistics to
          `report_layers`, or add `stats.loss` to the loss.
        """
        config = self.config
        names = Weights._fields if config.has_biases else Weights._fields[:4]
        weights = Weights(*(self.weight(name) for name in names))
        mask = mask_for("MoE", x) if mask is None else mask
        bias = self.bias[...] if config.is_biased else None
        y, stats = moe_layer(x, weights, config, bias=bias, mask=mask, drops=drops)
        if config.shared_experts:
            gate, up, down = SHARED
            with jax.named_scope("shared_experts"):
                hidden = ACTIVATIONS[config.activation](self.product(x, gate), self.product(x, up))
                if ambient() is not None:
                    hidden = constrain(hidden, "batch", "seq", "act_mlp")
                shared = self.product(hidden, down)
            y = y + shared
        if config.is_biased:
            self.load[...] = self.load[...] + stats.load
        return y, stats

    def weight(self, name: str) -> Array:
        """Return a weight of the router or the experts. `mp.lora` overrides this to add low-rank pairs."""
        return getattr(self, name)[...]

    def product(self, x: Float[Array, "B T d"], name: str) -> Float[Array, "B T f"]:
        """Multiply by a matrix of the shared experts. `mp.lora` overrides this to add low-rank products."""
        return dot_general(x, getattr(self, name)[...], (((2,), (0,)), ((), ())))

    def after_update(self) -> None:
        """Update the bias from the counted load, and reset the count. The training step calls it after each update."""
        if self.config.is_biased:
            self.bias[...] = update_bias(self.bias[...], self.load[...], rate=self.config.bias_rate)
            self.load[...] = jnp.zeros_like(self.load[...])


def _per_expert(init: Initializer) -> Initializer:
    """Return an initializer of stacked matrices [E, ...] that initializes each matrix with its own key and fan-in."""

    def init_stacked(key: jax.Array, shape: Sequence[int], dtype: Any = None) -> jax.Array:
        return jax.vmap(lambda key: init(key, tuple(shape[1:]), dtype))(jax.random.split(key, shape[0]))

    return init_stacked  # type: ignore[return-value]
