"""Annotated Flax decoders: `Transformer` (NNX) and `LinenTransformer`, their loss, sampling, and published shapes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshpar.models.config import LatentAttention as LatentAttention
    from meshpar.models.config import RopeScaling as RopeScaling
    from meshpar.models.config import TransformerConfig as TransformerConfig
    from meshpar.models.loss import next_token_loss as next_token_loss
    from meshpar.models.published import deepseek_v3 as deepseek_v3
    from meshpar.models.published import llama3_8b as llama3_8b
    from meshpar.models.published import llama3_70b as llama3_70b
    from meshpar.models.published import llama3_405b as llama3_405b
    from meshpar.models.published import mixtral_8x7b as mixtral_8x7b
    from meshpar.models.sampling import generate as generate
    from meshpar.models.transformer import Transformer as Transformer
    from meshpar.models.transformer_linen import LinenTransformer as LinenTransformer

# Planners and tables need sizes without Flax, so modules are imported when a name of theirs is used.
_HOMES = {
    "config": ("LatentAttention", "RopeScaling", "TransformerConfig"),
    "loss": ("next_token_loss",),
    "published": ("deepseek_v3", "llama3_405b", "llama3_70b", "llama3_8b", "mixtral_8x7b"),
    "sampling": ("generate",),
    "transformer": ("Transformer",),
    "transformer_linen": ("LinenTransformer",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"meshpar.models has no {name!r}; it has {', '.join(sorted(__all__))}")
    value = getattr(importlib.import_module(f"meshpar.models.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
