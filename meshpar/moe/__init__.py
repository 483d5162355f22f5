"""Mixture of experts: routing, dispatch and combine over a mesh axis, balancing, placement.

routing.py            logits -> experts and gate weights of each token; capacity
balance.py            auxiliary loss, z-loss, balancing bias
router_stats.py       sums over tokens, and the statistics that follow from them
load_metrics.py       load of experts and ranks, and advice
dispatch_combine.py   tokens to their experts and back, with dispatch_paths.py (capacity, dropless, node-first),
                      assignment_order.py (sorting), token_exchange.py (all-to-alls), transport_choice.py (`auto`)
grouped.py            rows sorted by expert, each times its expert's weight; tokamax_kernels.py on GPUs
layer.py              the routed part of an MoE layer; layer_config.py its options, nnx.py the Flax module,
                      expert_reduction.py its collectives
expert_placement.py   assignment of experts to ranks by measured loads
argument_checks.py    checks of arrays and options
reference.py          plain reference: all tokens through all experts
"""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.hardware.compile_target import KernelChoice
    from meshpar.layers.token_mask import masking
    from meshpar.moe import reference
    from meshpar.moe.balance import auxiliary_loss, update_bias, z_loss
    from meshpar.moe.dispatch_combine import dispatch
    from meshpar.moe.dispatch_paths import Dispatched, Payload
    from meshpar.moe.expert_placement import ExpertPlacement, permute, place
    from meshpar.moe.grouped import choose_grouped_matmul, grouped_matmul, grouped_swiglu
    from meshpar.moe.layer import Weights, moe_layer, report_layers
    from meshpar.moe.layer_config import MoEConfig
    from meshpar.moe.load_metrics import Advice, Load, Loads, advice, loads, measure, scalars
    from meshpar.moe.nnx import MoE
    from meshpar.moe.router_stats import RouterStats
    from meshpar.moe.routing import Routed, Routing, assign_slots, capacity, count, route
    from meshpar.moe.transport_choice import choose_dispatch

__getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Advice", "Dispatched", "ExpertPlacement", "KernelChoice", "Load", "Loads", "MoE", "MoEConfig",
    "Payload", "Routed", "RouterStats", "Routing", "Weights", "advice", "assign_slots", "auxiliary_loss", "capacity",
    "choose_dispatch", "choose_grouped_matmul", "count", "dispatch", "grouped_matmul", "grouped_swiglu",
    "loads", "masking", "measure", "moe_layer", "permute", "place", "reference", "report_layers", "route", "scalars",
    "update_bias", "z_loss",
]  # fmt: skip
