"""The published shapes of Llama 3.1, to plan and train on pods.

Sizes are those of the model cards and `params.json` of Meta's release (Grattafiori et al. 2024, "The Llama 3 Herd of
Models", table 3).
"""

from __future__ import annotations

from typing import Any

from meshpar.models.config import RopeScaling, TransformerConfig


def llama3_8b(**changes: Any) -> TransformerConfig:
    """Llama 3.1 8B: 8,030,261,248 parameters. Any field can be changed."""
    return _llama3(num_layers=32, embed_dim=4096, num_heads=32, mlp_dim=14_336, changes=changes)


def llama3_70b(**changes: Any) -> TransformerConfig:
    """Llama 3.1 70B: 70,553,706,496 parameters. Any field can be changed."""
    return _llama3(num_layers=80, embed_dim=8192, num_heads=64, mlp_dim=28_672, changes=changes)


def llama3_405b(**changes: Any) -> TransformerConfig:
    """Llama 3.1 405B: 405,853,388,800 parameters. Any field can be changed."""
    return _llama3(num_layers=126, embed_dim=16_384, num_heads=128, mlp_dim=53_248, changes=changes)


def _llama3(*, changes: dict[str, Any], **sizes: int) -> TransformerConfig:
    family: dict[str, Any] = {
        "vocab_size": 128_256,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "rope_scaling": RopeScaling(),
    }
    return TransformerConfig(**{**family, **sizes, **changes})
