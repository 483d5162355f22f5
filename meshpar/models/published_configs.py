"""Published shapes of decoders, to plan and train on pods.

Llama 3.1: model cards and `params.json` of Meta's release (Grattafiori et al. 2024, "The Llama 3 Herd of Models",
table 3). Mixtral and DeepSeek-V3: the papers and each release's `config.json` (Jiang et al. 2024, "Mixtral of Experts",
table 1; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 4.2). Qwen3 and Kimi K2: each release's `config.json`
(Qwen Team 2025, "Qwen3 Technical Report"; Kimi Team 2025, "Kimi K2: Open Agentic Intelligence").
"""

from __future__ import annotations

import math
from typing import Any

from meshpar.models.config import LatentAttention, RopeScaling, TransformerConfig, YarnScaling
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing


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


def mixtral_8x7b(**changes: Any) -> TransformerConfig:
    """Mixtral 8x7B: 46,702,792,704 parameters, 12,879,925,248 of them active. Any field can be changed.

    The weight of the auxiliary loss is the release's `router_aux_loss_coef` of 0.02 for all layers together. The
    release's `config.json` leaves the loss off (`output_router_logits`).
    """
    sizes: dict[str, Any] = {
        "vocab_size": 32_000,
        "num_layers": 32,
        "embed_dim": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "mlp_dim": 14_336,
        "rope_theta": 1_000_000.0,
        "moe": MoEConfig(routing=Routing(num_experts=8, top_k=2), mlp_dim=14_336, auxiliary_weight=0.02 * 2 / 32),
    }
    return TransformerConfig(**{**sizes, **changes})


def deepseek_v3(**changes: Any) -> TransformerConfig:
    """DeepSeek-V3: 671,026,404,352 parameters, 37,552,282,624 of them active. Any field can be changed.

    Without the module that predicts a second token, which the release counts besides (14e9), and without the balancing
    bias, which is no parameter (14,848 numbers, that the release counts among them). Its balancing loss of every
    sequence, with a weight of 0.0001, is taken over the batch here.
    """
    routing = Routing(num_experts=256, top_k=8, score="sigmoid", scale=2.5, groups=8, top_groups=4)
    sizes: dict[str, Any] = {
        "vocab_size": 129_280,
        "num_layers": 61,
        "num_dense_layers": 3,
        "embed_dim": 7168,
        "num_heads": 128,
        "num_kv_heads": 128,
        "head_dim": 192,
        "mlp_dim": 18_432,
        "norm_eps": 1e-6,
        "latent": LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        "moe": MoEConfig(routing=routing, mlp_dim=2048, shared_experts=1, auxiliary_weight=1e-4, bias_rate=1e-3),
    }
    return TransformerConfig(**{**sizes, **changes})


def qwen3_8b(**changes: Any) -> TransformerConfig:
    """Qwen3 8B: 8,190,735,360 parameters. Any field can be changed."""
    sizes: dict[str, Any] = {"num_layers": 36, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 12_288}
    return TransformerConfig(**{**_QWEN3, **sizes, **changes})


def qwen3_235b(**changes: Any) -> TransformerConfig:
    """Qwen3 235B-A22B: 235,093,634,560 parameters, 22,190,763,520 of them active. Any field can be changed.

    The weight of the auxiliary loss is the release's `router_aux_loss_coef` of 0.001 for all layers together. The
    release's `config.json` leaves the loss off (`output_router_logits`).
    """
    sizes: dict[str, Any] = {
        "num_layers": 94,
        "num_heads": 64,
        "num_kv_heads": 4,
        "mlp_dim": 1536,
        "moe": MoEConfig(routing=Routing(num_experts=128, top_k=8), mlp_dim=1536, auxiliary_weight=0.001 * 8 / 94),
    }
    return TransformerConfig(**{**_QWEN3, **sizes, **changes})


_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "embed_dim": 4096,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-6,
    "qk_norm": True,
}


def kimi_k2(**changes: Any) -> TransformerConfig:
    """Kimi K2: DeepSeek-V3's layers with more experts and fewer heads. Any field can be changed.

    1,026,408,209,408 parameters, 32,861,477,888 of them active. Rotary frequencies are those of the release for 131,072
    tokens.
    """
    routing = Routing(num_experts=384, top_k=8, score="sigmoid", scale=2.827)
    stretched = 0.1 * math.log(32.0) + 1.0
    sizes: dict[str, Any] = {
        "vocab_size": 163_840,
        "num_dense_layers": 1,
        "num_heads": 64,
        "num_kv_heads": 64,
        "rope_theta": 50_000.0,
        "rope_yarn": YarnScaling(factor=32.0, original_seq_len=4096, beta_fast=1.0, score_factor=stretched**2),
        "moe": MoEConfig(routing=routing, mlp_dim=2048, shared_experts=1, bias_rate=1e-3),
    }
    return deepseek_v3(**{**sizes, **changes})
