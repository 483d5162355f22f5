"""Phi-3 and Phi-4 checkpoints: fused projections, partial rotary embeddings and LongRoPE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshpar.interop import decoder
from meshpar.interop.families.mistral import WINDOW
from meshpar.interop.fields import bad_value, typed
from meshpar.interop.weight_mapping import DimPart, WeightMapping, contiguous
from meshpar.models.config import TransformerConfig

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def _tensors(cfg: TransformerConfig) -> list[WeightMapping]:
    heads, kv, hidden = cfg.num_heads, cfg.num_kv_heads, cfg.mlp_dim
    total = heads + 2 * kv
    parts: dict[str, dict[str, DimPart]] = {
        "q_proj": {"H": contiguous(0, heads, total)},
        "k_proj": {"K": contiguous(heads, heads + kv, total)},
        "v_proj": {"K": contiguous(heads + kv, total, total)},
        "gate_proj": {"M": contiguous(0, hidden, 2 * hidden)},
        "up_proj": {"M": contiguous(hidden, 2 * hidden, 2 * hidden)},
    }
    mappings = []
    for mapping in decoder.tensors(*decoder.MLP)(cfg):
        name = mapping.template.split(".")[-2]
        template = mapping.template.replace(name, _FUSED.get(name, name))
        mappings.append(dataclasses.replace(mapping, template=template, parts=parts.get(name, {})))
    return mappings


def _read_more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    factor = document.get(decoder.PARTIAL)
    factor = typed(where, decoder.PARTIAL, 1.0 if factor is None else factor, float)
    rotated = int(values["head_dim"] * factor)
    if not 0 < factor <= 1 or rotated % 2:
        reason = f"of the {values['head_dim']} dimensions of a head, it must select an even number"
        raise bad_value(where, decoder.PARTIAL, factor, reason)
    values["rotary_dim"] = None if rotated == values["head_dim"] else rotated


def _write_more(cfg: TransformerConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {decoder.PARTIAL: cfg.num_rotated / cfg.head_dim}
    if cfg.rope_long is not None:
        fields["original_max_position_embeddings"] = cfg.rope_long.original_seq_len
    return fields


FAMILY = decoder.Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields=decoder.fields(*decoder.GROUPED, *decoder.DENSE, WINDOW, norm_eps=1e-5),
    fixed={
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "mlp_bias": False, "lm_head_bias": False,
    },
    ignored=frozenset({
        decoder.PARTIAL, "original_max_position_embeddings", "layer_types", "full_attn_mod", "interpolate_factor",
    }),
    tensors=_tensors,
    read_more=_read_more,
    write_more=_write_more,
)  # fmt: skip
