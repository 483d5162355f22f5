"""Dense Qwen3: the tensors of Llama, with norms of queries and keys."""

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
    embedding_and_head,
    fields,
    layers,
    unsupported,
)

FIXED = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False}
# These fields have no effect without `use_sliding_window`, which is fixed.
IGNORED = frozenset({"sliding_window", "max_window_layers"})


WRITTEN = {"use_sliding_window": False, "sliding_window": None}


def read(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Enable the norms of queries and keys, and check that all layers have full attention."""
    kinds = document.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        reason, fix = "all layers must have full attention", "use a checkpoint without sliding-window layers"
        raise unsupported(where, "layer_types", kinds, reason, fix)
    values["qk_norm"] = True


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=fields(*GROUPED, *DENSE),
    fixed=FIXED,
    ignored=IGNORED | {"layer_types"},
    tensors=lambda cfg: [*embedding_and_head(cfg), *layers(cfg, *NORMS, *ATTENTION, *QK_NORMS, *MLP)],
    read_more=read,
    write_more=lambda cfg: WRITTEN,
)
