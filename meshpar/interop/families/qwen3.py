"""Dense Qwen3 checkpoints: the tensors of Llama, and an RMSNorm of the query and key of each head."""

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
    unsupported_value,
)
from meshpar.models.config import TransformerConfig

FIXED = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False}
# These fields have no effect unless `use_sliding_window` is set.
IGNORED = frozenset({"sliding_window", "max_window_layers"})


def normed(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Set `qk_norm`, and check that all layers use full attention.

    Args:
      where: the file, for error messages.
      document: the parsed config.json.
      values: values by path, which this function updates.

    Raises:
      ValueError: some layers have another kind of attention.
    """
    kinds = document.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        reason = "the decoders have the same attention_window in all layers"
        raise unsupported_value(
            where, "layer_types", kinds, reason, "use a checkpoint with full attention in all layers"
        )
    values["qk_norm"] = True


def written(cfg: TransformerConfig) -> dict[str, Any]:
    """Return the fields of config.json that the table does not include.

    Args:
      cfg: the config of the decoder.
    """
    return {"use_sliding_window": False, "sliding_window": None}


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=fields(*GROUPED, *DENSE),
    fixed=FIXED,
    ignored=IGNORED | {"layer_types"},
    tensors=lambda cfg: [*embedding_and_head(cfg), *layers(cfg, *NORMS, *ATTENTION, *QK_NORMS, *MLP)],
    read_more=normed,
    write_more=written,
)
