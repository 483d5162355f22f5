"""Qwen3 MoE checkpoints, with an MoE layer in every block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.interop.decoder import (
    ATTENTION,
    GROUPED,
    NORMS,
    QK_NORMS,
    ROUTER_LOSS,
    Family,
    embedding_and_head,
    experts,
    fields,
    layers,
    read_router_loss,
    write_router_loss,
)
from meshpar.interop.families import qwen3
from meshpar.interop.fields import Field
from meshpar.models.config import TransformerConfig


def _more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    qwen3.normed(where, document, values)
    values["mlp_dim"] = values["moe.mlp_dim"]  # unused, because there are no dense layers
    read_router_loss(where, document, values)


def _written(cfg: TransformerConfig) -> dict[str, Any]:
    rest = {"decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": cfg.mlp_dim}
    return {**qwen3.written(cfg), **rest, **write_router_loss(cfg)}


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=fields(
        *GROUPED,
        Field("moe_intermediate_size", "moe.mlp_dim"),
        Field("num_experts", "moe.routing.num_experts", also="num_local_experts"),
        Field("num_experts_per_tok", "moe.routing.top_k"),
        Field("norm_topk_prob", "moe.routing.normalize", bool, False),
    ),
    fixed={**qwen3.FIXED, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ignored=qwen3.IGNORED | ROUTER_LOSS | {"intermediate_size", "layer_types"},
    tensors=lambda cfg: [*embedding_and_head(cfg), *layers(cfg, *NORMS, *ATTENTION, *QK_NORMS, *experts("mlp"))],
    read_more=_more,
    write_more=_written,
)
