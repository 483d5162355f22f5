"""An MoE layer as a Flax Linen module: `LinenMoE`, with the parameters and functions of the NNX one."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
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
from meshpar.sharding.types import PyTree

BALANCE = "balance"
"""The collection of the balancing bias, and of the counts it is moved by."""


class LinenMoE(nn.Module):
    """An MoE layer of SwiGLU experts, for any Linen model; see `meshpar.moe.MoE`.

    With `config.bias_rate` the collection `balance` holds `bias` and `load`, which has to be mutable in training. A
    model that is trained with it hands on `after_update` (`from_linen` calls that of the module it is given).
    """

    embed_dim: int
    config: MoEConfig
    param_dtype: str = "float32"
    down_init: Any = None
    adapted: ClassVar[tuple[str, ...]] = (*EXPERTS, *SHARED)

    @nn.compact
    def __call__(self, x: Float[Array, "B T d"], *, drops: bool = True) -> tuple[Float[Array, "B T d"], RouterStats]:
        """The experts' output for every token, and the router's statistics; see `moe_layer`."""
        check_layer("LinenMoE", self.embed_dim, self.config, self.param_dtype)
        config, dtype = self.config, jnp.dtype(self.param_dtype)

        def param(name: str, names: tuple[str, ...], shape: tuple[int, ...], init: Any) -> Array:
            # Of experts a rank may hold its own only, inside stages; `moe_layer` sees to their sizes.
            held = None if self.is_initializing() else self.get_variable("params", name)
            shape = shape if held is None else jax.tree.leaves(held)[0].shape
            boxed: Any = nn.with_logical_partitioning(init, names)
            return self.param(name, boxed, shape, dtype)

        made = {name: param(name, *of) for name, of in parameters(self.embed_dim, config, self.down_init).items()}
        bias = load = None
        if config.is_biased:
            wide = jnp.promote_types(dtype, jnp.float32)
            bias = self.variable(BALANCE, "bias", jnp.zeros, (config.routing.num_experts,), wide)
            load = self.variable(BALANCE, "load", jnp.zeros, (config.routing.num_experts,), jnp.int32)
        weights = Weights(*(self.weight(name, made[name]) for name in Weights._fields))
        y, stats = moe_layer(x, weights, config, bias=None if bias is None else bias.value, drops=drops)
        if config.shared_experts:
            y = y + shared_experts(x, lambda rows, name: self.product(rows, name, made[name]))
        if load is not None and self.is_mutable_collection(BALANCE) and not self.is_initializing():
            load.value = load.value + stats.load
        return y, stats

    def weight(self, name: str, weight: Array) -> Array:
        """What the layer computes with in place of a weight: `mp.lora` puts pairs beside experts' here."""
        return weight

    def product(self, x: Float[Array, "B T d"], name: str, weight: Float[Array, "d f"]) -> Float[Array, "B T f"]:
        """Rows times a matrix of the shared experts: `mp.lora` adds what pairs make here."""
        return of_rows(x, weight)

    @nn.nowrap
    def after_update(self, extra: PyTree) -> PyTree:
        """Collections with the bias moved by what was counted since the last time; a training step does it once."""
        if not self.config.is_biased:
            return extra
        return {**extra, BALANCE: moved(extra[BALANCE], self.config)}


def moved(balance: PyTree, config: MoEConfig) -> PyTree:
    """`{"bias": [..., E], "load": [..., E]}` of one layer, or of stacked ones, behind an update."""
    bias = update_bias(balance["bias"], balance["load"], rate=config.bias_rate)
    return {"bias": bias, "load": jnp.zeros_like(balance["load"])}
