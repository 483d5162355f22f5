"""Annotated Flax decoders: `Transformer` (NNX) and `LinenTransformer`, their loss, sampling, and published shapes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshpar.models.config import LatentAttention, RopeScaling, TransformerConfig
    from meshpar.models.llama import llama3_8b, llama3_70b, llama3_405b
    from meshpar.models.loss import next_token_loss
    from meshpar.models.sampling import generate
    from meshpar.models.sparse import deepseek_v3, mixtral_8x7b
    from meshpar.models.transformer import Transformer
    from meshpar.models.transformer_linen import LinenTransformer

# Sizes are asked for without Flax, by planners and tables; so modules are imported when a name of theirs is used.
_HOME_OF = {
    "LatentAttention": "config",
    "RopeScaling": "config",
    "TransformerConfig": "config",
    "Transformer": "transformer",
    "LinenTransformer": "transformer_linen",
    "next_token_loss": "loss",
    "generate": "sampling",
    "llama3_8b": "llama",
    "llama3_70b": "llama",
    "llama3_405b": "llama",
    "mixtral_8x7b": "sparse",
    "deepseek_v3": "sparse",
}

__all__ = [
    "LatentAttention",
    "LinenTransformer",
    "RopeScaling",
    "Transformer",
    "TransformerConfig",
    "deepseek_v3",
    "generate",
    "llama3_8b",
    "llama3_70b",
    "llama3_405b",
    "mixtral_8x7b",
    "next_token_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"meshpar.models has no {name!r}; it has {', '.join(sorted(__all__))}")
    value = getattr(importlib.import_module(f"meshpar.models.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
