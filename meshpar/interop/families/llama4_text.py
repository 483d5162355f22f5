"""Llama 4 text checkpoints with MoE layers only, also within multimodal releases.

RoPE layers have chunks, and the other layers scale their queries by position. Rotary embeddings rotate adjacent
dimensions of a head in these checkpoints, and dimensions i and `i + D/2` in our decoders, so the mapping permutes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshpar.interop import decoder
from meshpar.interop.fields import Field, bad_value, typed
from meshpar.interop.weight_mapping import DimPart, WeightMapping, contiguous
from meshpar.models.architecture import LayerKind, QueryScaling
from meshpar.models.config import TransformerConfig

_CHUNKED, _SCALED = "attention_chunk_size", ("attn_temperature_tuning", "floor_scale", "attn_scale")
_ROWS: tuple[decoder.Row, ...] = (
    ("feed_forward.router.weight", "mlp/router", "X E -> L E X"),
    ("feed_forward.experts.gate_up_proj", "mlp/gate", "X E F -> L X E F"),
    ("feed_forward.experts.gate_up_proj", "mlp/up", "X E F -> L X E F"),
    ("feed_forward.experts.down_proj", "mlp/down", "X F E -> L X F E"),
    ("feed_forward.shared_expert.gate_proj.weight", "mlp/shared_gate", "S E -> L E S"),
    ("feed_forward.shared_expert.up_proj.weight", "mlp/shared_up", "S E -> L E S"),
    ("feed_forward.shared_expert.down_proj.weight", "mlp/shared_down", "E S -> L S E"),
)


def _tensors(cfg: TransformerConfig) -> list[WeightMapping]:
    assert cfg.moe is not None
    size, dim = cfg.moe.mlp_dim, cfg.head_dim
    in_pairs = DimPart((*range(0, dim, 2), *range(1, dim, 2)), dim)
    halves = {"mlp/gate": contiguous(0, size, 2 * size), "mlp/up": contiguous(size, 2 * size, 2 * size)}
    parts: dict[str, dict[str, DimPart]] = {path: {"F": part} for path, part in halves.items()}
    parts |= {f"attention/{name}/{x}": {"D": in_pairs} for name in ("query", "key") for x in ("kernel", "bias")}
    mappings = decoder.tensors(*_ROWS)(cfg)
    return [dataclasses.replace(each, parts=parts.get(each.path.partition("/")[2], {})) for each in mappings]


def _read_more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    def field(name: str, default: Any, kind: type) -> Any:
        return typed(where, name, default if document.get(name) is None else document[name], kind)

    num_layers = values["num_layers"]
    moe_layers = document.get("moe_layers")
    step = field("interleave_moe_layer_step", 1, int)
    if moe_layers != [*range(num_layers)] and not (moe_layers is None and step == 1):
        name, value = ("moe_layers", moe_layers) if moe_layers is not None else ("interleave_moe_layer_step", step)
        reason = "the decoders have an MoE layer in every block, or dense layers before all MoE layers"
        raise bad_value(where, name, value, reason, "use a checkpoint with MoE layers only, such as Scout")
    decoder.read_moe(where, document, values)
    decoder.read_biases(where, document, values)
    has_rope = decoder.read_no_rope(where, document, num_layers)
    chunk = None if _CHUNKED in document and document[_CHUNKED] is None else field(_CHUNKED, 8192, int)
    types = ["chunked_attention" if has and chunk is not None else decoder.FULL for has in has_rope]
    if document.get("layer_types") not in (None, types):
        raise bad_value(where, "layer_types", document["layer_types"], "layers with rotary embeddings have chunks")
    kinds = LayerKind(has_rope=False), LayerKind(chunk=chunk)
    decoder.set_kinds(values, [kinds[has] for has in has_rope])
    is_scaled = document.get(_SCALED[0])  # a number in some releases
    is_scaled = is_scaled is None or typed(where, _SCALED[0], is_scaled, bool if isinstance(is_scaled, bool) else int)
    values["qk_l2_norm"] = values["qk_l2_norm"] and any(has_rope)
    if is_scaled and not all(has_rope):
        interval, factor = field(_SCALED[1], 8192, int), field(_SCALED[2], 0.1, float)
        values["query_scaling"] = QueryScaling(interval=interval, factor=factor)
    values |= {"moe.gates_inputs": True, "moe.shared_experts": 1}
    values |= {"moe.routing.score": "sigmoid", "moe.routing.normalize": False}


def _write_more(cfg: TransformerConfig) -> dict[str, Any]:
    scaling = cfg.query_scaling
    numbers = {} if scaling is None else dict(zip(_SCALED[1:], (scaling.interval, scaling.factor), strict=True))
    has_rope = [int(kind.has_rope) for kind in cfg.kind_of_layer]
    return {
        _CHUNKED: cfg.chunk, _SCALED[0]: scaling is not None, **numbers, "no_rope_layers": has_rope,
        "intermediate_size_mlp": cfg.mlp_dim,
    } | decoder.write_moe(cfg)  # fmt: skip


FAMILY = decoder.Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    wrapper="llama4",
    fields=decoder.fields(
        *decoder.GROUPED,
        decoder.BIAS,
        Field("intermediate_size", "moe.mlp_dim"),
        Field("num_local_experts", "moe.routing.num_experts", int, 16),
        Field("num_experts_per_tok", "moe.routing.top_k", int, 1),
        Field("use_qk_norm", "qk_l2_norm", bool, True),
        rope_theta=500_000.0,
        norm_eps=1e-5,
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "router_jitter_noise": 0.0, "for_llm_compressor": False},
    ignored=decoder.ROUTER_LOSS | {
        *_SCALED, _CHUNKED, "intermediate_size_mlp", "interleave_moe_layer_step", "layer_types", "moe_layers",
        "no_rope_layer_interval", "_attn_implementation_autoset", "cache_implementation", "no_rope_layers",
    },
    tensors=_tensors,
    read_more=_read_more,
    write_more=_write_more,
)  # fmt: skip
