"""Granite 3 checkpoints: Llama with factors of embeddings, residual connections, scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.interop import decoder
from meshpar.interop.fields import Field, typed

SCALE = "attention_multiplier"


def _read_more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    decoder.read_biases(where, document, values)
    scale = document.get(SCALE)
    decoder.set_attention_scale(values, typed(where, SCALE, 1.0 if scale is None else scale, float))


FAMILY = decoder.Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields=decoder.fields(
        *decoder.GROUPED,
        *decoder.DENSE,
        decoder.BIAS,
        Field("embedding_multiplier", "embed_scale", float, 1.0),
        Field("residual_multiplier", "residual_scale", float, 1.0),
        Field("logits_scaling", "logits_divisor", float, 1.0),
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "mlp_bias": False},
    ignored=frozenset({SCALE}),
    tensors=decoder.tensors(*decoder.MLP),
    read_more=_read_more,
    write_more=lambda cfg: {SCALE: decoder.write_attention_scale(cfg)},
)
