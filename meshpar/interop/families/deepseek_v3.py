"""DeepSeek-V3 and Kimi-K2 checkpoints: latent attention, dense layers, shared experts, expert biases.

Rotary embeddings rotate adjacent dimensions of a head in these checkpoints, and dimensions `D/2` apart in our decoders.
The mapping therefore permutes these dimensions. The multi-token prediction modules (`num_nextn_predict_layers`) are
checked and copied, but the decoders do not run them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshpar.interop import decoder
from meshpar.interop.fields import Field, bad_value, typed
from meshpar.interop.weight_mapping import DimPart, WeightMapping, contiguous
from meshpar.models.config import TransformerConfig

BIAS_RATE = 1e-3
"""Update rate of the expert biases (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 4.2)."""
_SHARED: tuple[decoder.Row, ...] = (
    ("mlp.shared_experts.gate_proj.weight", "mlp/shared_gate", "S E -> L E S"),
    ("mlp.shared_experts.up_proj.weight", "mlp/shared_up", "S E -> L E S"),
    ("mlp.shared_experts.down_proj.weight", "mlp/shared_down", "E S -> L S E"),
)


def _attention(cfg: TransformerConfig, *, dense: bool) -> list[WeightMapping]:
    latent = cfg.latent
    assert latent is not None
    nope, rope, rank, value = latent.nope_dim, latent.rope_dim, latent.kv_rank, latent.v_dim
    of_query = "q_proj" if latent.q_rank is None else "q_b_proj"
    query = "query" if latent.q_rank is None else "query_up"
    in_pairs = tuple(nope + i for i in (*range(0, rope, 2), *range(1, rope, 2)))
    parts: dict[str, dict[str, DimPart]] = {
        f"attention/{query}/kernel": {"D": DimPart((*range(nope), *in_pairs), nope + rope)},
        "attention/latent_down/kernel": {"C": contiguous(0, rank, rank + rope)},
        "attention/key_rope/kernel": {"R": DimPart(tuple(rank - nope + i for i in in_pairs), rank + rope)},
        "attention/key_up/kernel": {"N": contiguous(0, nope, nope + value)},
        "attention/value_up/kernel": {"W": contiguous(nope, nope + value, nope + value)},
    }
    into = "E" if latent.q_rank is None else "Q"
    rows: list[decoder.Row] = [
        (f"self_attn.{of_query}.weight", f"attention/{query}/kernel", f"(H D) {into} -> L {into} H D"),
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
    widths = {"Q": latent.q_rank or 0, "C": rank, "N": nope, "R": rope, "W": value}
    return [
        dataclasses.replace(
            mapping, sizes={**mapping.sizes, **widths}, parts=parts.get(mapping.path.partition("/")[2], {}),
        )
        for mapping in decoder.layers(cfg, *rows, dense=dense)
    ]  # fmt: skip


def _tensors(cfg: TransformerConfig) -> list[WeightMapping]:
    assert cfg.moe is not None
    mappings = [*decoder.embedding_and_head(cfg), *decoder.layers(cfg, *decoder.NORMS), *_attention(cfg, dense=False)]
    mappings += decoder.layers(cfg, *decoder.experts("mlp"), *(_SHARED if cfg.moe.shared_experts else ()))
    if cfg.moe.is_biased:
        bias = decoder.layers(cfg, ("mlp.gate.e_score_correction_bias", "mlp/bias", "X -> L X"))
        mappings += [dataclasses.replace(mapping, is_extra=True) for mapping in bias]
    if cfg.num_dense_layers:
        mappings += [*decoder.layers(cfg, *decoder.NORMS, *decoder.MLP, dense=True), *_attention(cfg, dense=True)]
    return mappings


def _extra_tensors(cfg: TransformerConfig, document: Mapping[str, Any]) -> list[WeightMapping]:
    """Return the mappings of the multi-token prediction modules, which follow the last layer.

    Each module has a transformer layer, norms, a projection, an embedding and a head.
    """
    count = typed("config.json", "num_nextn_predict_layers", document.get("num_nextn_predict_layers") or 0, int)
    if not count:
        return []
    sizes = {**decoder.sizes_of(cfg), "T": 2 * cfg.embed_dim}
    mappings = [mapping for mapping in _tensors(cfg) if mapping.path.startswith("layers/")]
    rows = (
        ("embed_tokens.weight", "V E -> L V E"), ("enorm.weight", "E -> L E"), ("hnorm.weight", "E -> L E"),
        ("eh_proj.weight", "E T -> L E T"), ("shared_head.norm.weight", "E -> L E"),
        ("shared_head.head.weight", "V E -> L V E"),
    )  # fmt: skip
    mappings += [WeightMapping("model.layers.{L}." + theirs, f"kept/{theirs}", dims, sizes) for theirs, dims in rows]
    return [dataclasses.replace(m, first_layer=cfg.num_layers, sizes={**m.sizes, "L": count}) for m in mappings]


def _read_more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    heads = document.get("num_key_value_heads")
    if heads not in (None, values["num_heads"]):
        reason = "latent attention has as many key/value heads as query heads"
        raise bad_value(where, "num_key_value_heads", heads, reason, f"set it to {values['num_heads']}")
    if values["norm_eps"] != 1e-6:
        reason = "its latent norms always use 1e-6, and the decoders use the same epsilon in all norms"
        raise bad_value(where, "rms_norm_eps", values["norm_eps"], reason, "use a checkpoint with 1e-6")
    values["num_kv_heads"] = values["num_heads"]
    values["head_dim"] = values["latent.nope_dim"] + values["latent.rope_dim"]
    values["moe.bias_rate"] = BIAS_RATE
    values["moe.routing.score"] = "sigmoid"
    if values["num_dense_layers"] == 0:
        values["mlp_dim"] = values["moe.mlp_dim"]


def _write_more(cfg: TransformerConfig) -> dict[str, Any]:
    assert cfg.latent is not None
    return {
        "num_key_value_heads": cfg.num_heads,
        "qk_head_dim": cfg.head_dim,
        "head_dim": cfg.latent.rope_dim,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }


FAMILY = decoder.Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    aliases=("kimi_k2",),
    fields=decoder.fields(
        Field("intermediate_size", "mlp_dim"),
        Field("q_lora_rank", "latent.q_rank", int, None),
        Field("kv_lora_rank", "latent.kv_rank"),
        Field("qk_nope_head_dim", "latent.nope_dim"),
        Field("qk_rope_head_dim", "latent.rope_dim"),
        Field("v_head_dim", "latent.v_dim"),
        Field("first_k_dense_replace", "num_dense_layers", int, 0),
        Field("moe_intermediate_size", "moe.mlp_dim"),
        Field("n_shared_experts", "moe.shared_experts", int, 0),
        Field("n_routed_experts", "moe.routing.num_experts", also="num_local_experts"),
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
    extra_tensors=_extra_tensors,
    read_more=_read_more,
    write_more=_write_more,
)  # fmt: skip
