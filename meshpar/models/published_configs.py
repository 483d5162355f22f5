"""Configs of published decoders.

Llama 3.1: model cards and `params.json` of Meta's release (Grattafiori et al. 2024, "The Llama 3 Herd of Models",
table 3). Mixtral and DeepSeek-V3: the papers and each release's `config.json` (Jiang et al. 2024, "Mixtral of Experts",
table 1; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 4.2). Qwen3 and Kimi K2: each release's `config.json`
(Qwen Team 2025, "Qwen3 Technical Report"; Kimi Team 2025, "Kimi K2: Open Agentic Intelligence").

The keyword arguments of all functions replace fields of the config.
"""

from __future__ import annotations

import math
from typing import Any

from meshpar.models.architecture import LatentAttention, RopeScaling, YarnScaling
from meshpar.models.config import TransformerConfig
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing


def llama3_8b(**changes: Any) -> TransformerConfig:
    """Return the config of Llama 3.1 8B, with 8,030,261,248 parameters.

    Example:
      >>> config = mp.models.llama3_8b(attention="cudnn", vocab_chunk=8192)
      >>> f"{config.num_params:,}"
      '8,030,261,248'
    """
    return _llama3(num_layers=32, embed_dim=4096, num_heads=32, mlp_dim=14_336, changes=changes)


def llama3_70b(**changes: Any) -> TransformerConfig:
    """Return the config of Llama 3.1 70B, with 70,553,706,496 parameters."""
    return _llama3(num_layers=80, embed_dim=8192, num_heads=64, mlp_dim=28_672, changes=changes)


def llama3_405b(**changes: Any) -> TransformerConfig:
    """Return the config of Llama 3.1 405B, with 405,853,388,800 parameters."""
    return _llama3(num_layers=126, embed_dim=16_384, num_heads=128, mlp_dim=53_248, changes=changes)


def _llama3(*, changes: dict[str, Any], **sizes: int) -> TransformerConfig:
    family = {"vocab_size": 128_256, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 500_000.0}
    return TransformerConfig(**{**family, "rope_scaling": RopeScaling(), **sizes, **changes})


def mixtral_8x7b(**changes: Any) -> TransformerConfig:
    """Return the config of Mixtral 8x7B, with 46,702,792,704 parameters (12,879,925,248 active).

    The weight of the auxiliary loss corresponds to `router_aux_loss_coef` 0.02 of the release, which is for the sum
    over layers. The `config.json` of the release disables the loss (`output_router_logits`).
    """
    sizes: dict[str, Any] = {
        "vocab_size": 32_000, "num_layers": 32, "embed_dim": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
        "mlp_dim": 14_336, "rope_theta": 1_000_000.0,
        "moe": MoEConfig(routing=Routing(num_experts=8, top_k=2), mlp_dim=14_336, auxiliary_weight=0.02 * 2 / 32),
    }  # fmt: skip
    return TransformerConfig(**{**sizes, **changes})


def deepseek_v3(**changes: Any) -> TransformerConfig:
    """Return the config of DeepSeek-V3, with 671,026,404,352 parameters (37,552,282,624 active).

    The multi-token prediction module (14e9 parameters) is not included. The expert biases (14,848 values) are not
    counted, because they are not trainable parameters. The balance loss with a weight of 0.0001 is computed over the
    batch; the paper computes it over each sequence.
    """
    routing = Routing(num_experts=256, top_k=8, score="sigmoid", scale=2.5, groups=8, top_groups=4)
    sizes: dict[str, Any] = {
        "vocab_size": 129_280, "num_layers": 61, "num_dense_layers": 3, "embed_dim": 7168, "num_heads": 128,
        "num_kv_heads": 128, "head_dim": 192, "mlp_dim": 18_432, "norm_eps": 1e-6,
        "latent": LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        "moe": MoEConfig(routing=routing, mlp_dim=2048, shared_experts=1, auxiliary_weight=1e-4, bias_rate=1e-3),
    }  # fmt: skip
    return TransformerConfig(**{**sizes, **changes})


def qwen3_8b(**changes: Any) -> TransformerConfig:
    """Return the config of Qwen3 8B, with 8,190,735,360 parameters."""
    sizes: dict[str, Any] = {"num_layers": 36, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 12_288}
    return TransformerConfig(**{**_QWEN3, **sizes, **changes})


def qwen3_235b(**changes: Any) -> TransformerConfig:
    """Return the config of Qwen3 235B-A22B, with 235,093,634,560 parameters (22,190,763,520 active).

    The weight of the auxiliary loss corresponds to `router_aux_loss_coef` 0.001 of the release, which is for the sum
    over layers. The `config.json` of the release disables the loss (`output_router_logits`).
    """
    sizes: dict[str, Any] = {
        "num_layers": 94, "num_heads": 64, "num_kv_heads": 4, "mlp_dim": 1536,
        "moe": MoEConfig(routing=Routing(num_experts=128, top_k=8), mlp_dim=1536, auxiliary_weight=0.001 * 8 / 94),
    }  # fmt: skip
    return TransformerConfig(**{**_QWEN3, **sizes, **changes})


_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936, "embed_dim": 4096, "head_dim": 128, "rope_theta": 1_000_000.0, "norm_eps": 1e-6,
    "qk_norm": True,
}  # fmt: skip


def kimi_k2(**changes: Any) -> TransformerConfig:
    """Return the config of Kimi K2, with 1,026,408,209,408 parameters (32,861,477,888 active).

    The architecture is that of DeepSeek-V3 with more experts and fewer heads. The rotary frequencies are scaled for
    131,072 tokens, as in the release.
    """
    routing = Routing(num_experts=384, top_k=8, score="sigmoid", scale=2.827)
    mscale = 0.1 * math.log(32.0) + 1.0
    sizes: dict[str, Any] = {
        "vocab_size": 163_840, "num_dense_layers": 1, "num_heads": 64, "num_kv_heads": 64, "rope_theta": 50_000.0,
        "rope_yarn": YarnScaling(factor=32.0, original_seq_len=4096, beta_fast=1.0, score_factor=mscale**2),
        "moe": MoEConfig(routing=routing, mlp_dim=2048, shared_experts=1, bias_rate=1e-3),
    }  # fmt: skip
    return deepseek_v3(**{**sizes, **changes})
