"""Gemma 3 text checkpoints: Gemma 2 with norms of queries and keys, and two rotary bases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.interop import decoder
from meshpar.interop.families import gemma2
from meshpar.interop.fields import positive, typed
from meshpar.models.config import TransformerConfig

LOCAL = "rope_local_base_freq"
_PERIODS = ("sliding_window_pattern", "_sliding_window_pattern")


def _read_more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    local = document.get(LOCAL)
    local = typed(where, LOCAL, 10_000.0 if local is None else local, float)
    period = next((document[name] for name in _PERIODS if document.get(name) is not None), 6)
    period = positive(where, _PERIODS[0], period)
    gemma2.read_layers(where, document, values, period=period, rope_theta=local)
    values["qk_norm"] = True


def _write_more(cfg: TransformerConfig) -> dict[str, Any]:
    thetas = [kind.rope_theta for kind in cfg.kind_of_layer if kind.rope_theta is not None]
    return {**gemma2.write_layers(cfg), LOCAL: thetas[0] if thetas else 10_000.0}


FAMILY = decoder.Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=decoder.fields(
        *decoder.GROUPED,
        *decoder.DENSE,
        gemma2.cap("attn_logit_softcapping", "attention_cap", None),
        gemma2.cap("final_logit_softcapping", "logits_cap", None),
        rope_theta=1e6,
        tied=True,
    ),
    fixed=gemma2.FIXED,
    ignored=gemma2.IGNORED | {LOCAL, *_PERIODS},
    tensors=decoder.tensors(*decoder.QK_NORMS, *decoder.MLP),
    read_more=_read_more,
    write_more=_write_more,
)
