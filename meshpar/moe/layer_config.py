"""Configuration of an MoE layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from meshpar.moe import grouped
from meshpar.moe.argument_checks import check_bound
from meshpar.moe.dispatch_paths import Payload, check_payload
from meshpar.moe.grouped import ACTIVATIONS
from meshpar.moe.routing import Routing
from meshpar.moe.transport_choice import IMPLEMENTATIONS, NODE_FIRST
from meshpar.sharding.errors import (
    check_bool,
    check_cases,
    check_choice,
    check_int,
    check_number,
    check_positive_int,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts, routing, balancing and dispatch of an MoE layer with SwiGLU experts.

    Example:
      >>> routing = mp.moe.Routing(num_experts=8, top_k=2)
      >>> mixtral = mp.moe.MoEConfig(routing=routing, mlp_dim=14_336, auxiliary_weight=0.00125)
      >>> f"{mixtral.num_params(4096):,}"
      '1,409,318,912'
      >>> routing = mp.moe.Routing(num_experts=256, top_k=8, score="sigmoid", scale=2.5, groups=8, top_groups=4)
      >>> deepseek_v3 = mp.moe.MoEConfig(routing=routing, mlp_dim=2048, shared_experts=1, bias_rate=1e-3)
    """

    routing: Routing
    """Assignment of tokens to experts, with an optional capacity factor."""
    mlp_dim: int
    """Hidden size of an expert."""
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """Function of the products with gate and up in all experts. "swiglu" is `silu(gate) * up`, and "clamped_swiglu" is
    `meshpar.moe.grouped.clamped_swiglu` (GPT-OSS)."""
    has_biases: bool = False
    """Whether the router and the routed experts have biases (GPT-OSS)."""
    gates_inputs: bool = False
    """Whether the gate weight of a token scales the input of its expert instead of the output (Llama 4). With
    `top_k=1` only."""
    shared_experts: int = 0
    """Number of experts for all tokens. They are computed as an MLP with hidden size shared_experts · mlp_dim."""
    auxiliary_weight: float = 0.0
    """Weight of the auxiliary loss of a layer (`balance.auxiliary_loss`). The losses of all layers are added to the
    loss: with balanced experts, L MoE layers add L · auxiliary_weight. `router_aux_loss_coef` c of Transformers adds
    c · top_k for all layers together, so c is auxiliary_weight · L / top_k. With micro-steps or pipeline microbatches,
    the losses are means over these parts, each computed from the tokens of a part."""
    z_weight: float = 0.0
    """Weight of the router z-loss of a layer (`balance.z_loss`)."""
    bias_rate: float = 0.0
    """Change of an expert's balancing bias per step (`balance.update_bias`). 0 means no bias."""
    implementation: str = "auto"
    """How tokens are sent to other ranks, as in `dispatch`. If experts are sharded over one axis, implementations with
    two levels cause a warning."""
    grouped_matmul: Literal["auto", "blocked", "tokamax"] = "auto"
    """Implementation of the matmuls of experts, as in `grouped_matmul`. A named implementation never falls back."""
    bound_factor: float | None = None
    """Limit of the rows from a rank to another, as in `dispatch`. None allows any routing. With `batch_slices`, each
    slice of the batch has its own limit, so results equal the full batch only if nothing is dropped."""
    payload: Payload | None = None
    """Number formats of the rows sent. None keeps the dtype."""
    chunks: int = 1
    """Number of chunks of a device's tokens, for overlapping communication with computation, as in `dispatch`."""

    def __post_init__(self) -> None:
        where, routing = "MoEConfig", self.routing
        case = not isinstance(routing, Routing), "it must be a moe.Routing", "pass moe.Routing(num_experts=8, top_k=2)"
        check_cases(where, f"set routing={routing!r}", "wrong-type", case)
        check_positive_int(where, "the hidden size of an expert", mlp_dim=self.mlp_dim)
        check_int(where, "the number of shared experts", shared_experts=self.shared_experts)
        check_positive_int(where, "the number of chunks", chunks=self.chunks)
        weights = {field: getattr(self, field) for field in ("auxiliary_weight", "z_weight", "bias_rate")}
        check_number(where, "0.001", positive=False, **weights)
        check_choice(where, "the function of the products", [*ACTIVATIONS], activation=self.activation)
        check_bool(where, "router and experts have biases", has_biases=self.has_biases)
        check_bool(where, "gate weights scale the inputs", gates_inputs=self.gates_inputs)
        check_choice(where, "the way in which tokens are sent", IMPLEMENTATIONS, implementation=self.implementation)
        check_choice(where, "the matmuls of experts", grouped.IMPLEMENTATIONS, grouped_matmul=self.grouped_matmul)
        check_bound(where, self.bound_factor)
        check_payload(where, self.payload)
        by_experts, needs_dropless = routing.choice == "expert", self.implementation in ("ragged", NODE_FIRST)
        has_capacity = by_experts or routing.capacity_factor is not None
        each_the_same = "each expert chooses the same number of a device's tokens"
        in_full = "experts have buffers of fixed capacity, which are sent in full"
        check_cases(
            where, f"combine this with {routing}", "conflict",
            (by_experts and self.is_biased, each_the_same, "leave bias_rate out"),
            (by_experts and self.chunks > 1, each_the_same, "leave chunks out"),
            (has_capacity and self.bound_factor is not None, in_full, "leave bound_factor out"),
            (self.gates_inputs and (by_experts or routing.top_k > 1),
             "a token is sent once to each expert, with a single factor", "use top_k=1, or gates_inputs=False"),
            (has_capacity and needs_dropless, in_full, "leave implementation out"),
        )  # fmt: skip

    @property
    def nodes_visited(self) -> Callable[[int], int] | None:
        """Return `Routing.nodes_visited` for node-first. None for implementations with one row per assignment."""
        return self.routing.nodes_visited if self.implementation == NODE_FIRST else None

    @property
    def row_bytes(self) -> Callable[[str, int], int | None] | None:
        """Return `Payload.row_bytes`, or None if rows keep their dtype."""
        return None if self.payload is None else self.payload.row_bytes

    @property
    def is_biased(self) -> bool:
        return self.bias_rate > 0

    @property
    def shared_dim(self) -> int:
        return self.shared_experts * self.mlp_dim

    def num_params(self, embed_dim: int) -> int:
        """Return the number of parameters of a layer: router, experts, shared experts, without `bias`."""
        return self._params(embed_dim, self.routing.num_experts)

    def active_params(self, embed_dim: int) -> int:
        """Return the number of parameters used for a token: the router, its experts and the shared experts."""
        return self._params(embed_dim, self.routing.top_k)

    def _params(self, embed_dim: int, num_routed: int) -> int:
        matrices = embed_dim * (self.routing.num_experts + 3 * self.mlp_dim * (num_routed + self.shared_experts))
        biases = self.routing.num_experts + num_routed * (2 * self.mlp_dim + embed_dim)
        return matrices + self.has_biases * biases
