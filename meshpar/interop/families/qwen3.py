"""Dense Qwen3 checkpoints: the tensors of Llama, and an RMSNorm of the query and key of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.interop.decoder import DENSE, GROUPED, MLP, QK_NORMS, Family, fields, tensors
from meshpar.interop.families import qwen2

FIXED = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}


def normed(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Set the windows and `qk_norm`."""
    qwen2.read_windows(where, document, values)
    values["qk_norm"] = True


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=fields(*GROUPED, *DENSE),
    fixed=FIXED,
    ignored=qwen2.IGNORED,
    tensors=tensors(*QK_NORMS, *MLP),
    read_more=normed,
    write_more=qwen2.write_windows,
)
