"""Qwen3 without experts: Llama's tensors, and a norm of every head's query and key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.interop.decoder import (
    ATTENTION,
    DENSE,
    GROUPED,
    MLP,
    NORMS,
    QK_NORMS,
    Family,
    ends,
    fields,
    layers,
    refuse,
)
from meshpar.models.config import TransformerConfig

FIXED = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False}
# The window is that of `use_sliding_window`, which is fixed; so are the kinds of layers.
IGNORED = frozenset({"sliding_window", "max_window_layers"})


def normed(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Every Qwen3 has the norms; all layers attend alike."""
    kinds = document.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        exists = "attention_window holds for all layers alike"
        raise refuse(where, "layer_types", kinds, exists, "take a checkpoint whose layers all have full attention")
    values["qk_norm"] = True


def written(cfg: TransformerConfig) -> dict[str, Any]:
    """What is no line of the table."""
    return {"use_sliding_window": False, "sliding_window": None}


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=fields(*GROUPED, *DENSE),
    fixed=FIXED,
    ignored=IGNORED | {"layer_types"},
    tensors=lambda cfg: [*ends(cfg), *layers(cfg, *NORMS, *ATTENTION, *QK_NORMS, *MLP)],
    read_more=normed,
    write_more=written,
)
