"""Mixture of experts: routing, dispatch and combine over a mesh axis, balance, placement.

    routing.py    logits -> experts and weights of every token; who finds room
    balance.py    auxiliary loss, z-loss, the balancing bias
    metrics.py    how even the load is, over experts and over ranks, and what to do about it
    dispatch_combine.py  tokens to their experts and back: paths.py (in buffers, sorted, node first), order.py (what
                  stands where), exchange.py (rows on the wire), choice.py (how they travel when nothing is said)
    grouped.py    rows sorted by expert, each times its own expert's weight
    config.py     what an MoE layer is: layer.py computes it, nnx.py makes a Flax module of it
    placement.py  expert rebalancing: which rank owns which experts, by measured loads
    check.py      four-part errors of the functions on routed tokens
    reference.py  what an MoE layer computes, every token through every expert

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.moe import reference
    from meshpar.moe.balance import auxiliary_loss, update_bias, z_loss
    from meshpar.moe.dispatch_combine import dispatch
    from meshpar.moe.dispatch_paths import Dispatched, Payload
    from meshpar.moe.expert_placement import ExpertPlacement, permute, place
    from meshpar.moe.grouped import choose_grouped_matmul, grouped_matmul, grouped_swiglu
    from meshpar.moe.layer import RouterStats, Weights, moe_layer, report_layers
    from meshpar.moe.layer_config import MoEConfig
    from meshpar.moe.load_metrics import Advice, Load, Loads, advice, loads, measure, scalars
    from meshpar.moe.nnx import MoE
    from meshpar.moe.routing import Routed, Routing, capacity, count, kept, route
    from meshpar.moe.transport_choice import KernelChoice, choose_dispatch

__getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Advice", "Dispatched", "ExpertPlacement", "KernelChoice", "Load", "Loads", "MoE", "MoEConfig",
    "Payload", "Routed", "RouterStats", "Routing", "Weights", "advice", "auxiliary_loss", "capacity",
    "choose_dispatch", "choose_grouped_matmul", "count", "dispatch", "grouped_matmul", "grouped_swiglu", "kept",
    "loads", "measure", "moe_layer", "permute", "place", "reference", "report_layers", "route", "scalars",
    "update_bias", "z_loss",
]  # fmt: skip
