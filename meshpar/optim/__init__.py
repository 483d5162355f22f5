"""Optimizers and optimizer state on a mesh."""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.optim.averages import ema
    from meshpar.optim.moments import low_precision_moments, offload_state
    from meshpar.optim.orthogonalized import muon
    from meshpar.optim.rounding import stochastic_rounding
    from meshpar.optim.stacked_layers import per_layer

__getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ema",
    "low_precision_moments",
    "muon",
    "offload_state",
    "per_layer",
    "stochastic_rounding",
]
