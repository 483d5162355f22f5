"""Mixtral checkpoints: Mistral with an MoE layer in every block and a softmax over the top-k experts."""

from __future__ import annotations

from meshpar.interop.decoder import GROUPED, ROUTER_LOSS, Family, experts, fields, read_moe, tensors, write_moe
from meshpar.interop.families.mistral import WINDOW
from meshpar.interop.fields import Field

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
    tensors=tensors(*experts("block_sparse_moe", "w1", "w3", "w2")),
    read_more=read_moe,
    write_more=write_moe,
)
