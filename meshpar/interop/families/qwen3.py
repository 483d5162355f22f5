"""Dense Qwen3 checkpoints: the tensors of Llama, and an RMSNorm of the query and key of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.interop.decoder import DENSE, GROUPED, MLP, QK_NORMS, Family, fields, tensors
from meshpar.interop.fields import bad_value

FIXED = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False}
IGNORED = frozenset({"layer_types", "max_window_layers", "sliding_window"})
"""`normed` checks `layer_types`. The other fields have no effect unless `use_sliding_window` is set."""
WRITTEN = {"use_sliding_window": False, "sliding_window": None}


def normed(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Set `qk_norm`, and check that all layers use full attention."""
    kinds = document.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        reason = "the decoders have the same attention_window in all layers"
        raise bad_value(where, "layer_types", kinds, reason, "use a checkpoint with full attention in all layers")
    values["qk_norm"] = True


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=fields(*GROUPED, *DENSE),
    fixed=FIXED,
    ignored=IGNORED,
    tensors=tensors(*QK_NORMS, *MLP),
    read_more=normed,
    write_more=lambda cfg: WRITTEN,
)
