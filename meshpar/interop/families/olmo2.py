"""OLMo 2 checkpoints: norms after attention and MLP, and over the queries and keys of all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.interop.decoder import BIAS, DENSE, GROUPED, MLP, Family, fields, read_biases, tensors

_QK_NORMS = (
    ("self_attn.q_norm.weight", "attention/query_norm/scale", "A -> L A"),
    ("self_attn.k_norm.weight", "attention/key_norm/scale", "B -> L B"),
)


def _read_more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    read_biases(where, document, values)
    values |= {"qk_norm": "all_heads", "norm_placement": "after"}


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=fields(*GROUPED, *DENSE, BIAS, norm_eps=1e-5),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    tensors=tensors(*_QK_NORMS, *MLP),
    read_more=_read_more,
)
