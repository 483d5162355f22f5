"""Annotated Flax decoders: `Transformer`, its loss, sampling, and published configurations."""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.models.architecture import LatentAttention, LayerKind, LongRope, QueryScaling, RopeScaling, YarnScaling
    from meshpar.models.config import TransformerConfig
    from meshpar.models.published_configs import (
        deepseek_v3,
        kimi_k2,
        llama3_8b,
        llama3_70b,
        llama3_405b,
        mixtral_8x7b,
        qwen3_8b,
        qwen3_235b,
    )
    from meshpar.models.sampling import generate
    from meshpar.models.token_loss import next_token_loss, token_mask
    from meshpar.models.transformer import Transformer

__getattr__, __dir__ = lazy(__name__)

__all__ = [
    "LatentAttention", "LayerKind", "LongRope", "QueryScaling", "RopeScaling", "Transformer", "TransformerConfig",
    "YarnScaling",
    "deepseek_v3", "generate", "kimi_k2", "llama3_8b", "llama3_70b", "llama3_405b", "mixtral_8x7b", "next_token_loss",
    "qwen3_8b", "qwen3_235b", "token_mask",
]  # fmt: skip
