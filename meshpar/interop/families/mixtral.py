"""Mixtral checkpoints: Mistral with an MoE layer in every block and a softmax over the top-k experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.interop.decoder import (
    ATTENTION,
    GROUPED,
    NORMS,
    ROUTER_LOSS,
    Family,
    embedding_and_head,
    experts,
    fields,
    layers,
    read_router_loss,
    write_router_loss,
)
from meshpar.interop.families.mistral import WINDOW
from meshpar.interop.fields import Field


def _more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    values["mlp_dim"] = values["moe.mlp_dim"]  # unused, because there are no dense layers
    read_router_loss(where, document, values)


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=fields(
        *GROUPED,
        WINDOW,
        Field("intermediate_size", "moe.mlp_dim"),
        Field("num_local_experts", "moe.routing.num_experts", int, 8, also="num_experts"),
        Field("num_experts_per_tok", "moe.routing.top_k", int, 2),
        rope_theta=1e6,
        norm_eps=1e-5,
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "router_jitter_noise": 0.0},
    ignored=ROUTER_LOSS,
    tensors=lambda cfg: [
        *embedding_and_head(cfg),
        *layers(cfg, *NORMS, *ATTENTION, *experts("block_sparse_moe", "w1", "w3", "w2")),
    ],
    read_more=_more,
    write_more=write_router_loss,
)
