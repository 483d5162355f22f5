"""Adapters that convert a Flax NNX module, a Flax Linen module or plain functions to a `Model`.

The modules that import Flax are loaded when their adapter is used.
"""

from meshpar.sharding.lazy_imports import TYPE_CHECKING, lazy

if TYPE_CHECKING:
    from meshpar.sharding.adapters.functions import from_functions
    from meshpar.sharding.adapters.linen import BoundLinen, from_linen
    from meshpar.sharding.adapters.model import Model, Variables, explicit
    from meshpar.sharding.adapters.nnx import from_nnx

__getattr__, __dir__ = lazy(__name__)

__all__ = ["BoundLinen", "Model", "Variables", "explicit", "from_functions", "from_linen", "from_nnx"]
