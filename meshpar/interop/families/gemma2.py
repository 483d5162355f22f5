"""Gemma 2 checkpoints: four norms in a layer, scaled embeddings, soft caps and alternating windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshpar.interop import decoder
from meshpar.interop.fields import Field, bad_value, typed
from meshpar.models.architecture import LayerKind
from meshpar.models.config import TransformerConfig

SCALAR = "query_pre_attn_scalar"
FIXED = {
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0.0,
    "use_bidirectional_attention": False,
}  # fmt: skip
IGNORED = frozenset(
    {"cache_implementation", "hidden_act", "layer_types", SCALAR, "sliding_window", "sliding_window_size"}
)
"""`hidden_act` is the former name of `hidden_activation`, and transformers does not read it."""


def cap(name: str, ours: str, default: float | None) -> Field:
    """Return the field of a soft cap. A null value means no cap."""
    return Field(name, ours, float, lambda document: None if name in document else default)


def read_layers(
    where: str, document: Mapping[str, Any], values: dict[str, Any], *, period: int, rope_theta: float | None = None
) -> None:
    """Set the fields that Gemma 2 and 3 share.

    All but each `period`-th layer have a window, and rotary embeddings with this base (None: the base of the model).
    """
    window, scalar = (
        typed(where, name, default if document.get(name) is None else document[name], kind)
        for name, default, kind in (("sliding_window", 4096, int), (SCALAR, 256, float))
    )
    if scalar <= 0:
        raise bad_value(where, SCALAR, scalar, "it must be above 0")
    decoder.set_attention_scale(values, scalar**-0.5)
    values |= {
        "norm_offset": 1.0, "norm_placement": "both", "activation": "gelu_tanh",
        "embed_scale": math.sqrt(values["embed_dim"]),
    }  # fmt: skip
    sliding = decoder.read_sliding(where, document, values["num_layers"], lambda layer: bool((layer + 1) % period))
    kinds = LayerKind(), LayerKind(window=window, rope_theta=rope_theta)
    decoder.set_kinds(values, [kinds[is_sliding] for is_sliding in sliding])


def write_layers(cfg: TransformerConfig) -> dict[str, Any]:
    """Return the fields for `read_layers`."""
    scalar = round(decoder.write_attention_scale(cfg) ** -2, 6)
    return {SCALAR: int(scalar) if scalar == int(scalar) else scalar, **decoder.write_sliding(cfg)}


def _read_more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    read_layers(where, document, values, period=2)


FAMILY = decoder.Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=decoder.fields(
        *decoder.GROUPED,
        *decoder.DENSE,
        cap("attn_logit_softcapping", "attention_cap", 50.0),
        cap("final_logit_softcapping", "logits_cap", 30.0),
        tied=True,
    ),
    fixed=FIXED,
    ignored=IGNORED,
    tensors=decoder.tensors(*decoder.MLP),
    read_more=_read_more,
    write_more=write_layers,
)
