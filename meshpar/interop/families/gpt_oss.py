"""GPT-OSS checkpoints: alternating windows, attention sinks, and experts with biases.

The releases store the experts in MXFP4, which `Folder` dequantizes. In a file, gate and up are the even and the odd
columns of a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshpar.interop import decoder
from meshpar.interop.fields import Field, bad_value
from meshpar.interop.weight_mapping import DimPart, WeightMapping
from meshpar.models.architecture import LayerKind
from meshpar.models.config import TransformerConfig

_ROWS: tuple[decoder.Row, ...] = (
    ("self_attn.sinks", "attention/sinks", "H -> L H"),
    ("mlp.router.weight", "mlp/router", "X E -> L E X"),
    ("mlp.router.bias", "mlp/router_bias", "X -> L X"),
    ("mlp.experts.gate_up_proj", "mlp/gate", "X E F -> L X E F"),
    ("mlp.experts.gate_up_proj", "mlp/up", "X E F -> L X E F"),
    ("mlp.experts.gate_up_proj_bias", "mlp/gate_bias", "X F -> L X F"),
    ("mlp.experts.gate_up_proj_bias", "mlp/up_bias", "X F -> L X F"),
    ("mlp.experts.down_proj", "mlp/down", "X F E -> L X F E"),
    ("mlp.experts.down_proj_bias", "mlp/down_bias", "X E -> L X E"),
)


def _tensors(cfg: TransformerConfig) -> list[WeightMapping]:
    assert cfg.moe is not None
    size = 2 * cfg.moe.mlp_dim
    columns = {"gate": DimPart(tuple(range(0, size, 2)), size), "up": DimPart(tuple(range(1, size, 2)), size)}

    def with_columns(mapping: WeightMapping) -> WeightMapping:
        name = mapping.path.rpartition("/")[2].removesuffix("_bias")
        return dataclasses.replace(mapping, parts={"F": columns[name]} if name in columns else {})

    return [*map(with_columns, decoder.tensors(*_ROWS)(cfg))]


def _read_more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    decoder.read_moe(where, document, values)
    decoder.read_biases(where, document, values)
    window = values.pop("attention_window")
    sliding = decoder.read_sliding(where, document, values["num_layers"], lambda layer: layer % 2 == 0)
    if any(sliding) and window is None:
        raise bad_value(where, "sliding_window", None, "layers with a window need its size")
    kinds = LayerKind(), LayerKind(window=window)
    decoder.set_kinds(values, [kinds[is_sliding] for is_sliding in sliding])
    values |= {"attention_sinks": True, "moe.has_biases": True, "moe.activation": "clamped_swiglu"}
    if document.get("rope_scaling") is None:
        reason = "transformers and the decoders would use different defaults"
        raise bad_value(where, "rope_scaling", None, reason, "add the rope_scaling of the release", code="not-found")


FAMILY = decoder.Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=decoder.fields(
        Field("num_key_value_heads", "num_kv_heads", int, 8),
        Field("head_dim", "head_dim", int, 64),
        Field("attention_bias", "qkv_bias", bool, True),
        Field(
            "sliding_window", "attention_window", int, lambda document: None if "sliding_window" in document else 128
        ),
        Field("intermediate_size", "moe.mlp_dim"),
        Field("num_local_experts", "moe.routing.num_experts", int, 128, also="num_experts"),
        Field("num_experts_per_tok", "moe.routing.top_k", int, 4, also="experts_per_token"),
        rope_theta=150_000.0,
        norm_eps=1e-5,
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ignored=decoder.ROUTER_LOSS | {"initial_context_length", "layer_types"},
    tensors=_tensors,
    read_more=_read_more,
    write_more=lambda cfg: decoder.write_sliding(cfg) | decoder.write_moe(cfg),
)
