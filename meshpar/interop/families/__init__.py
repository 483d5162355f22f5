"""Registry of checkpoint families by the `model_type` of their config.json."""

from __future__ import annotations

from meshpar.interop.decoder import Family
from meshpar.interop.families import deepseek_v3, llama, mistral, mixtral, qwen3, qwen3_moe

ALL: tuple[Family, ...] = (
    llama.FAMILY, mistral.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY, mixtral.FAMILY, deepseek_v3.FAMILY,
)  # fmt: skip
BY_TYPE: dict[str, Family] = {name: family for family in ALL for name in (family.model_type, *family.aliases)}
_GEMMA3 = "layer_types, rope_local_base_freq, query_pre_attn_scalar, gelu, norms after sublayers, scaled embeddings"
LACKING: dict[str, str] = {"gemma3": _GEMMA3, "gemma3_text": _GEMMA3}
"""Unsupported families, with the features that `TransformerConfig` lacks."""
