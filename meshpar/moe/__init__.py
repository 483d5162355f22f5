"""Mixture of experts: routing, dispatch and combine over a mesh axis, balance, placement.

    routing.py    logits -> experts and weights of every token; who finds room
    balance.py    auxiliary loss, z-loss, the balancing bias
    metrics.py    how even the load is, over experts and over ranks, and what to do about it
    dispatch_combine.py  tokens to their experts and back: order.py (what stands where), exchange.py (rows on the wire),
                  choice.py (how they travel when nothing is said about it)
    grouped.py    rows sorted by expert, each times its own expert's weight
    config.py     what an MoE layer is: layer.py computes it, nnx.py and linen.py make Flax modules of it
    placement.py  expert rebalancing: which rank owns which experts, by measured loads
    check.py      four-part errors of the functions on routed tokens
    reference.py  what an MoE layer computes, every token through every expert

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshpar.moe import reference as reference
    from meshpar.moe.balance import auxiliary_loss as auxiliary_loss
    from meshpar.moe.balance import update_bias as update_bias
    from meshpar.moe.balance import z_loss as z_loss
    from meshpar.moe.choice import KernelChoice as KernelChoice
    from meshpar.moe.choice import choose_dispatch as choose_dispatch
    from meshpar.moe.config import MoEConfig as MoEConfig
    from meshpar.moe.dispatch_combine import Dispatched as Dispatched
    from meshpar.moe.dispatch_combine import Payload as Payload
    from meshpar.moe.dispatch_combine import dispatch as dispatch
    from meshpar.moe.grouped import choose_grouped_matmul as choose_grouped_matmul
    from meshpar.moe.grouped import grouped_matmul as grouped_matmul
    from meshpar.moe.grouped import grouped_swiglu as grouped_swiglu
    from meshpar.moe.layer import RouterStats as RouterStats
    from meshpar.moe.layer import Weights as Weights
    from meshpar.moe.layer import moe_layer as moe_layer
    from meshpar.moe.layer import report_layers as report_layers
    from meshpar.moe.linen import LinenMoE as LinenMoE
    from meshpar.moe.metrics import Advice as Advice
    from meshpar.moe.metrics import Load as Load
    from meshpar.moe.metrics import Loads as Loads
    from meshpar.moe.metrics import advice as advice
    from meshpar.moe.metrics import loads as loads
    from meshpar.moe.metrics import measure as measure
    from meshpar.moe.metrics import scalars as scalars
    from meshpar.moe.nnx import MoE as MoE
    from meshpar.moe.placement import ExpertPlacement as ExpertPlacement
    from meshpar.moe.placement import Rebalanced as Rebalanced
    from meshpar.moe.placement import permute as permute
    from meshpar.moe.placement import place as place
    from meshpar.moe.placement import rebalance as rebalance
    from meshpar.moe.routing import Routed as Routed
    from meshpar.moe.routing import Routing as Routing
    from meshpar.moe.routing import capacity as capacity
    from meshpar.moe.routing import count as count
    from meshpar.moe.routing import kept as kept
    from meshpar.moe.routing import route as route

_HOMES: dict[str, tuple[str, ...]] = {
    "balance": ("auxiliary_loss", "update_bias", "z_loss"),
    "choice": ("KernelChoice", "choose_dispatch"),
    "config": ("MoEConfig",),
    "dispatch_combine": ("Dispatched", "Payload", "dispatch"),
    "grouped": ("choose_grouped_matmul", "grouped_matmul", "grouped_swiglu"),
    "layer": ("RouterStats", "Weights", "moe_layer", "report_layers"),
    "linen": ("LinenMoE",),
    "metrics": ("Advice", "Load", "Loads", "advice", "loads", "measure", "scalars"),
    "nnx": ("MoE",),
    "placement": ("ExpertPlacement", "Rebalanced", "permute", "place", "rebalance"),
    "routing": ("Routed", "Routing", "capacity", "count", "kept", "route"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF, "reference"]


def __getattr__(name: str) -> Any:
    if name == "reference":
        value: Any = importlib.import_module("meshpar.moe.reference")
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(f"meshpar.moe.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"meshpar.moe has no {name!r}; it has {', '.join(sorted(__all__))}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
