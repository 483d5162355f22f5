"""Qwen3 MoE checkpoints, with an MoE layer in every block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.interop import decoder
from meshpar.interop.families import qwen3
from meshpar.interop.fields import Field
from meshpar.models.config import TransformerConfig

_DENSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _read_more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    values["qk_norm"] = True
    decoder.read_moe(where, document, values)


def _write_more(cfg: TransformerConfig) -> dict[str, Any]:
    return {"sliding_window": None} | _DENSE | {"intermediate_size": cfg.mlp_dim} | decoder.write_moe(cfg)


FAMILY = decoder.Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=decoder.fields(
        *decoder.GROUPED,
        Field("moe_intermediate_size", "moe.mlp_dim"),
        Field("num_experts", "moe.routing.num_experts", also="num_local_experts"),
        Field("num_experts_per_tok", "moe.routing.top_k"),
        Field("norm_topk_prob", "moe.routing.normalize", bool, False),
    ),
    fixed=qwen3.FIXED | _DENSE | {"use_sliding_window": False},
    ignored=decoder.ROUTER_LOSS | {"intermediate_size", "max_window_layers", "sliding_window"},
    tensors=decoder.tensors(*decoder.QK_NORMS, *decoder.experts("mlp")),
    read_more=_read_more,
    write_more=_write_more,
)
