"""DeepSeek-V3 and Kimi-K2: latent attention, leading dense layers, shared experts, router biases.

These checkpoints rotate adjacent elements of a head (interleaved rope), and our decoder rotates elements half a head
apart, so the elements are permuted. Multi-token prediction modules (`num_nextn_predict_layers`) are checked and copied,
but the decoder does not run them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshpar.interop.decoder import (
    MLP,
    NORMS,
    Family,
    Row,
    dim_sizes,
    embedding_and_head,
    experts,
    fields,
    layers,
    unsupported,
)
from meshpar.interop.fields import Field, parse_scalar
from meshpar.interop.weight_mapping import DimPart, WeightMapping, contiguous
from meshpar.models.config import TransformerConfig

BIAS_RATE = 1e-3
"""DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 4.2. It is not in config.json."""
_SHARED: tuple[Row, ...] = (
    ("mlp.shared_experts.gate_proj.weight", "mlp/shared_gate", "S E -> L E S"),
    ("mlp.shared_experts.up_proj.weight", "mlp/shared_up", "S E -> L E S"),
    ("mlp.shared_experts.down_proj.weight", "mlp/shared_down", "E S -> L S E"),
)


def _attention(cfg: TransformerConfig, *, dense: bool) -> list[WeightMapping]:
    latent = cfg.latent
    assert latent is not None
    nope, rope, rank, value = latent.nope_dim, latent.rope_dim, latent.kv_rank, latent.v_dim
    query_name = "q_proj" if latent.q_rank is None else "q_b_proj"
    query = "query" if latent.q_rank is None else "query_up"
    interleaved = tuple(nope + i for i in (*range(0, rope, 2), *range(1, rope, 2)))
    parts: dict[str, dict[str, DimPart]] = {
        f"attention/{query}/kernel": {"D": DimPart((*range(nope), *interleaved), nope + rope)},
        "attention/latent_down/kernel": {"C": contiguous(0, rank, rank + rope)},
        "attention/key_rope/kernel": {"R": DimPart(tuple(rank - nope + i for i in interleaved), rank + rope)},
        "attention/key_up/kernel": {"N": contiguous(0, nope, nope + value)},
        "attention/value_up/kernel": {"W": contiguous(nope, nope + value, nope + value)},
    }
    query_input = "E" if latent.q_rank is None else "Q"
    rows: list[Row] = [
        (f"self_attn.{query_name}.weight", f"attention/{query}/kernel", f"(H D) {query_input} -> L {query_input} H D"),
        ("self_attn.kv_a_proj_with_mqa.weight", "attention/latent_down/kernel", "C E -> L E C"),
        ("self_attn.kv_a_proj_with_mqa.weight", "attention/key_rope/kernel", "R E -> L E R"),
        ("self_attn.kv_a_layernorm.weight", "attention/latent_norm/scale", "C -> L C"),
        ("self_attn.kv_b_proj.weight", "attention/key_up/kernel", "(H N) C -> L C H N"),
        ("self_attn.kv_b_proj.weight", "attention/value_up/kernel", "(H W) C -> L C H W"),
        ("self_attn.o_proj.weight", "attention/out/kernel", "E (H W) -> L H W E"),
    ]
    if latent.q_rank is not None:
        rows += [
            ("self_attn.q_a_proj.weight", "attention/query_down/kernel", "Q E -> L E Q"),
            ("self_attn.q_a_layernorm.weight", "attention/query_norm/scale", "Q -> L Q"),
        ]
    sizes = {"Q": latent.q_rank or 0, "C": rank, "N": nope, "R": rope, "W": value}
    return [
        dataclasses.replace(row, sizes={**row.sizes, **sizes}, parts=parts.get(row.path.partition("/")[2], {}))
        for row in layers(cfg, *rows, dense=dense)
    ]


def _tensors(cfg: TransformerConfig) -> list[WeightMapping]:
    assert cfg.moe is not None
    tensors = [*embedding_and_head(cfg), *layers(cfg, *NORMS), *_attention(cfg, dense=False)]
    tensors += layers(cfg, *experts("mlp"), *(_SHARED if cfg.moe.shared_experts else ()))
    if cfg.moe.is_biased:
        bias = layers(cfg, ("mlp.gate.e_score_correction_bias", "mlp/bias", "X -> L X"))
        tensors += [dataclasses.replace(row, is_extra=True) for row in bias]
    if cfg.num_dense_layers:
        tensors += [*layers(cfg, *NORMS, *MLP, dense=True), *_attention(cfg, dense=True)]
    return tensors


def _passthrough(cfg: TransformerConfig, document: Mapping[str, Any]) -> list[WeightMapping]:
    """Return the tensors of the multi-token prediction modules, which are numbered after the last layer.

    Each module has a decoder layer, norms, a projection, an embedding and a head.
    """
    count = parse_scalar("config.json, `num_nextn_predict_layers`", document.get("num_nextn_predict_layers") or 0, int)
    if not count:
        return []
    sizes = {**dim_sizes(cfg), "T": 2 * cfg.embed_dim}
    tensors = [row for row in _tensors(cfg) if row.path.startswith("layers/")]
    rows = (
        ("embed_tokens.weight", "V E -> L V E"), ("enorm.weight", "E -> L E"), ("hnorm.weight", "E -> L E"),
        ("eh_proj.weight", "E T -> L E T"), ("shared_head.norm.weight", "E -> L E"),
        ("shared_head.head.weight", "V E -> L V E"),
    )  # fmt: skip
    tensors += [WeightMapping("model.layers.{L}." + name, f"passthrough/{name}", dims, sizes) for name, dims in rows]
    return [dataclasses.replace(row, first_layer=cfg.num_layers, sizes={**row.sizes, "L": count}) for row in tensors]


def _read(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    heads = document.get("num_key_value_heads")
    if heads not in (None, values["num_heads"]):
        reason = "with latent attention it must be the number of heads"
        raise unsupported(where, "num_key_value_heads", heads, reason, f"write {values['num_heads']}", "conflict")
    if values["norm_eps"] != 1e-6:
        reason = "its latent norms always use 1e-6, and our decoder has the same epsilon in all norms"
        raise unsupported(where, "rms_norm_eps", values["norm_eps"], reason, "use a checkpoint with 1e-6")
    values["num_kv_heads"] = values["num_heads"]
    values["head_dim"] = values["latent.nope_dim"] + values["latent.rope_dim"]
    values["moe.bias_rate"] = BIAS_RATE
    values["moe.routing.score"] = "sigmoid"
    if values["num_dense_layers"] == 0:
        values["mlp_dim"] = values["moe.mlp_dim"]


def _write(cfg: TransformerConfig) -> dict[str, Any]:
    assert cfg.latent is not None
    return {
        "num_key_value_heads": cfg.num_heads,
        "qk_head_dim": cfg.head_dim,
        "head_dim": cfg.latent.rope_dim,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    aliases=("kimi_k2",),
    fields=fields(
        Field("intermediate_size", "mlp_dim"),
        Field("q_lora_rank", "latent.q_rank", int, None),
        Field("kv_lora_rank", "latent.kv_rank"),
        Field("qk_nope_head_dim", "latent.nope_dim"),
        Field("qk_rope_head_dim", "latent.rope_dim"),
        Field("v_head_dim", "latent.v_dim"),
        Field("first_k_dense_replace", "num_dense_layers", int, 0),
        Field("moe_intermediate_size", "moe.mlp_dim"),
        Field("n_shared_experts", "moe.shared_experts", int, 0),
        Field("n_routed_experts", "moe.routing.num_experts", alias="num_local_experts"),
        Field("num_experts_per_tok", "moe.routing.top_k"),
        Field("n_group", "moe.routing.groups", int, 8),
        Field("topk_group", "moe.routing.top_groups", int, 4),
        Field("norm_topk_prob", "moe.routing.normalize", bool, True),
        Field("routed_scaling_factor", "moe.routing.scale", float, 2.5),
    ),
    fixed={
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "moe_layer_freq": 1,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True,
    },
    ignored=frozenset({
        "aux_loss_alpha", "ep_size", "head_dim", "num_key_value_heads", "num_nextn_predict_layers",
        "output_router_logits", "qk_head_dim", "seq_aux",
    }),
    tensors=_tensors,
    passthrough=_passthrough,
    read_more=_read,
    write_more=_write,
)  # fmt: skip
