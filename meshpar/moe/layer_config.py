"""What an MoE layer is, and how it is computed and balanced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshpar.collectives.kernel_checks import check_choice
from meshpar.moe.argument_checks import check_factor, check_whole
from meshpar.moe.dispatch_combine import check_bound, check_payload
from meshpar.moe.dispatch_paths import Payload
from meshpar.moe.routing import Routing
from meshpar.moe.transport_choice import IMPLEMENTATIONS, NODE_FIRST
from meshpar.sharding.types import problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """An MoE layer of SwiGLU experts.

    Mixtral's is `MoEConfig(routing=Routing(num_experts=8, top_k=2), mlp_dim=14_336, auxiliary_weight=0.00125)`;
    DeepSeek-V3's is `MoEConfig(routing=Routing(num_experts=256, top_k=8, score="sigmoid", scale=2.5, groups=8,
    top_groups=4), mlp_dim=2048, shared_experts=1, bias_rate=1e-3)`.
    """

    routing: Routing
    """How tokens find their experts, and with a capacity factor how many have room there."""
    mlp_dim: int
    """Width of the hidden layer of one expert."""
    shared_experts: int = 0
    """Experts that every token visits besides; they are computed as one, of `shared_experts · mlp_dim` hidden width."""
    auxiliary_weight: float = 0.0
    """Weight of the auxiliary loss (`balance.auxiliary_loss`) of each layer; the layers' losses are added to the loss.
    With balanced experts a model with L MoE layers adds `L * auxiliary_weight`. Transformers' `router_aux_loss_coef` c
    adds `c * top_k` for all layers together: c is `auxiliary_weight * L / top_k`."""
    z_weight: float = 0.0
    """Of the router z-loss (`balance.z_loss`), likewise."""
    bias_rate: float = 0.0
    """By how much a step moves the balancing bias of an expert (`balance.update_bias`); 0: there is no bias."""
    implementation: str = "auto"
    """How rows travel between the ranks of experts: as for `dispatch`. Forms in two levels want experts split over two
    axes; over one, a warning says that there is one level."""
    bound_factor: float | None = None
    """Room for rows from one rank to another, as for `dispatch`; None: for any routing."""
    payload: Payload | None = None
    """Number formats of rows that travel; None: as they are."""
    chunks: int = 1
    """Parts of a device's tokens, so that one travels while another is computed, as for `dispatch`."""

    def __post_init__(self) -> None:
        if not isinstance(self.routing, Routing):
            fix = "write moe.Routing(num_experts=8, top_k=2)"
            raise problem("MoEConfig(routing=...)", f"be {self.routing!r}", "it is a Routing", fix)
        for field, least in (("mlp_dim", 1), ("shared_experts", 0), ("chunks", 1)):
            check_whole("MoEConfig", field, getattr(self, field), least=least)
        for field in ("auxiliary_weight", "z_weight", "bias_rate"):
            check_factor("MoEConfig", field, getattr(self, field), scheduled=False)
        check_choice("MoEConfig", "implementation", self.implementation, IMPLEMENTATIONS)
        self._check_expert_choice()
        check_bound("MoEConfig", self.bound_factor)
        check_payload("MoEConfig", self.payload)
        self._check_buffers()

    def _check_expert_choice(self) -> None:
        if self.routing.choice != "expert":
            return
        for field, unused in (("bias_rate", self.bias_rate > 0), ("chunks", self.chunks > 1)):
            if unused:
                where = f'MoEConfig({field}={getattr(self, field)}) with Routing(choice="expert")'
                exists = "an expert takes the best of all tokens of a device, and always as many"
                raise problem(where, f"use {field}", exists, f"leave {field} out")

    def _check_buffers(self) -> None:
        """Experts that have so much room, or that choose, get buffers; the other forms are of dropless dispatch."""
        routing = self.routing
        if routing.choice == "token" and routing.capacity_factor is None:
            return
        where = 'Routing(choice="expert")'
        if routing.choice == "token":
            where = f"Routing(capacity_factor={routing.capacity_factor!r})"
        for field, unused in (
            ("bound_factor", self.bound_factor),
            ("implementation", self.implementation in ("ragged", NODE_FIRST)),
        ):
            if unused:
                exists = "buffers of fixed capacity travel whole, and that capacity is their bound"
                fix = f"leave {field} out" + ", or the capacity_factor" * (routing.choice == "token")
                raise problem(f"MoEConfig({field}={getattr(self, field)!r}) with {where}", f"use {field}", exists, fix)

    @property
    def nodes_visited(self) -> Callable[[int], int] | None:
        """Of so many nodes, those that a token goes to; None: rows travel choice by choice, whatever the nodes."""
        return self.routing.nodes_visited if self.implementation == NODE_FIRST else None

    @property
    def row_bytes(self) -> Callable[[str, int], int | None] | None:
        """Of a row of so many numbers under way, as `Payload.row_bytes`; None: rows travel as they are."""
        return None if self.payload is None else self.payload.row_bytes

    @property
    def is_biased(self) -> bool:
        return self.bias_rate > 0

    @property
    def shared_dim(self) -> int:
        return self.shared_experts * self.mlp_dim

    def num_params(self, embed_dim: int) -> int:
        """Parameters of a layer: router, experts and shared experts; the balancing bias is none."""
        each = 3 * embed_dim * self.mlp_dim
        return embed_dim * self.routing.num_experts + each * (self.routing.num_experts + self.shared_experts)

    def active_params(self, embed_dim: int) -> int:
        """Parameters that one token is multiplied with: the router's, and those of the experts it visits."""
        each = 3 * embed_dim * self.mlp_dim
        return embed_dim * self.routing.num_experts + each * (self.routing.top_k + self.shared_experts)
