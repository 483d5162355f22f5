"""Config fields and tensor names that several checkpoint families share."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshpar.interop.block_fp8 import CONFIG_FIELD
from meshpar.interop.fields import Field, bad_value, positive, same, typed
from meshpar.interop.weight_mapping import WeightMapping
from meshpar.models.architecture import LayerKind
from meshpar.models.config import TransformerConfig
from meshpar.sharding.errors import is_int, near_or

HARMLESS = frozenset({
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_position_embeddings", "model_type", "pad_token_id", "pretraining_tp", "torch_dtype", "transformers_version",
    "use_cache",
})  # fmt: skip
"""Fields that do not affect the forward pass."""
PARTIAL = "partial_rotary_factor"
"""Field that `described` moves from `rope_scaling` or `rope_parameters` to the config."""
FIXED = {PARTIAL: 1.0}
"""Fields of any family that have a single supported value, unless a family reads them."""
TORCH_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "auto")
"""Valid values of `torch_dtype`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Conversion tables between a checkpoint family and the decoders, for reading and writing."""

    model_type: str
    """`model_type` in config.json."""
    architecture: str
    """Class name in transformers."""
    fields: Sequence[Field]
    """Fields of config.json with a counterpart in `TransformerConfig`."""
    tensors: Callable[[TransformerConfig], list[WeightMapping]]
    """Function that returns the mapping of the weights."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields with a single supported value, which is also their default."""
    ignored: frozenset[str] = frozenset()
    """Other supported fields: `read_more` reads them, or they do not affect the forward pass."""
    aliases: tuple[str, ...] = ()
    """Alternative `model_type` values."""
    wrapper: str | None = None
    """`model_type` of multimodal releases that contain the model, with its config in `text_config` and the prefix
    `language_model.` of its tensors. Only the text model is read."""
    read_more: Callable[[str, Mapping[str, Any], dict[str, Any]], None] = lambda where, document, values: None
    """Function of (where, document, values by path) that adds values or raises an error."""
    write_more: Callable[[TransformerConfig], dict[str, Any]] = lambda cfg: {}
    """Function that returns additional fields of config.json."""
    extra_tensors: Callable[[TransformerConfig, Mapping[str, Any]], list[WeightMapping]] = lambda cfg, document: []
    """Function of (config, document) that returns tensors to copy, which the decoders do not use."""


# ---- Fields ----------------------------------------------------------------------------------------------------------


def fields(*more: Field, rope_theta: float = 10_000.0, norm_eps: float = 1e-6, tied: bool = False) -> tuple[Field, ...]:
    """Return the common and additional fields of a family, with the defaults of transformers for this family."""
    return (
        Field("vocab_size", "vocab_size"),
        Field("num_hidden_layers", "num_layers"),
        Field("hidden_size", "embed_dim"),
        Field("num_attention_heads", "num_heads"),
        Field("rope_theta", "rope_theta", float, rope_theta),
        Field("rms_norm_eps", "norm_eps", float, norm_eps),
        Field("tie_word_embeddings", "tied_embeddings", bool, tied),
        *more,
    )


GROUPED = (
    Field("num_key_value_heads", "num_kv_heads", int, lambda document: document.get("num_attention_heads")),
    Field("head_dim", "head_dim", int, lambda document: _head_dim(document)),
)
"""Fields of grouped-query attention."""
DENSE = (Field("intermediate_size", "mlp_dim"),)


def _head_dim(document: Mapping[str, Any]) -> int:
    width, heads = (
        typed("config.json", name, document.get(name), int) for name in ("hidden_size", "num_attention_heads")
    )
    return width // max(heads, 1)


ROUTER_LOSS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""The fields that `read_moe` reads."""


def read_moe(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Set the weight of the router auxiliary loss from the coefficient in transformers, for a model of MoE layers.

    Transformers pools the tokens of all layers, so its loss is `coefficient * top_k` for balanced experts. In meshpar
    the loss is `auxiliary_weight` per layer and summed over layers: `auxiliary_weight = coefficient * top_k / layers`.
    Both losses are equal if the expert load is the same in all layers. Otherwise imbalances of different layers cancel
    in the pooled loss, and ours is larger. Without `output_router_logits` transformers adds no auxiliary loss.
    """
    coefficient = document.get("router_aux_loss_coef")
    coefficient = typed(where, "router_aux_loss_coef", 0.001 if coefficient is None else coefficient, float)
    if coefficient < 0:
        raise bad_value(where, "router_aux_loss_coef", coefficient, "it must be at least 0")
    is_on = typed(where, "output_router_logits", document.get("output_router_logits") or False, bool)
    in_layer = coefficient * values["moe.routing.top_k"] / max(values["num_layers"], 1)
    values["moe.auxiliary_weight"] = in_layer if is_on else 0.0
    values["mlp_dim"] = values["moe.mlp_dim"]  # unused, because there are no dense layers


def write_moe(cfg: TransformerConfig) -> dict[str, Any]:
    """Return the fields for `read_moe`. The coefficient is omitted if there is no auxiliary loss."""
    assert cfg.moe is not None
    weight = cfg.moe.auxiliary_weight
    coefficient = float(f"{weight * cfg.num_moe_layers / cfg.moe.routing.top_k:.12g}")
    return {"output_router_logits": weight > 0} | ({"router_aux_loss_coef": coefficient} if weight else {})


def check_known(where: str, document: Mapping[str, Any], family: Family) -> None:
    """Check that all fields of a config.json are known and have supported values."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = document.get(name)
        if not all(is_int(token) for token in (ids if isinstance(ids, list) else (ids,) if ids is not None else ())):
            raise bad_value(where, name, ids, "it must be a token id, a list of token ids, or null")
    for name in ("dtype", "torch_dtype"):
        if document.get(name) not in (None, *TORCH_DTYPES):
            raise bad_value(where, name, document[name], f"the supported dtypes are {', '.join(TORCH_DTYPES)}")
    supported = {name for field in family.fields for name in (field.theirs, field.also) if name is not None}
    supported |= HARMLESS | family.ignored | {"rope_scaling", CONFIG_FIELD} | set(family.fixed)
    for name, value in document.items():
        only = family.fixed.get(name, None if name in family.ignored else FIXED.get(name))
        if name not in supported | FIXED.keys():
            reason = f"the table of `{family.model_type}` has no such field, and it may change the forward pass"
            fix = "add it to the table in meshpar/interop/families; remove it only if the model's code does not read it"
            raise bad_value(where, name, value, reason, near_or(name, supported, fix), code="unknown-name")
        if None not in (only, value) and not same(value, only):
            fix = "use a different checkpoint, or add a field to TransformerConfig"
            if name == PARTIAL:
                fix = "remove it if the model's code does not read it: transformers rotates all dimensions"
            raise bad_value(where, name, value, f"the decoders support {only!r} only", fix)


# ---- Layers of different kinds ---------------------------------------------------------------------------------------

SLIDING, FULL = "sliding_attention", "full_attention"
LONGEST_PATTERN = 64
"""Longest pattern of layers that is searched for, so that untrusted configs cannot cause long searches."""


def set_kinds(values: dict[str, Any], kinds: Sequence[LayerKind]) -> None:
    """Set the kinds of all layers: as `attention_window` if they are equal, otherwise as the shortest pattern."""
    periods = range(1, min(len(kinds), LONGEST_PATTERN) + 1)
    period = next((p for p in periods if all(map(operator.eq, kinds, kinds[p:]))), len(kinds))
    if period == 1 and kinds[0] == LayerKind(window=kinds[0].window):
        values["attention_window"] = kinds[0].window
    else:
        values["layer_pattern"] = tuple(kinds[:period])


def read_sliding(
    where: str, document: Mapping[str, Any], num_layers: int, default: Callable[[int], bool]
) -> list[bool]:
    """Return whether each layer has a sliding window, from `layer_types` or a function of the layer's index."""
    types = document.get("layer_types")
    if types is None:
        return [default(layer) for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not {*map(str, types)} <= {SLIDING, FULL}:
        reason = f'it must be a list of "{SLIDING}" and "{FULL}" for the {num_layers} layers'
        raise bad_value(where, "layer_types", types, reason)
    return [kind == SLIDING for kind in types]


def read_no_rope(where: str, document: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return 1 for the layers with rotary embeddings and 0 for the others."""
    has_rope = document.get("no_rope_layers")
    if has_rope is None:
        interval = document.get("no_rope_layer_interval")
        interval = positive(where, "no_rope_layer_interval", 4 if interval is None else interval)
        has_rope = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if (
        not isinstance(has_rope, list)
        or len(has_rope) != num_layers
        or not all(is_int(x, 0) and x < 2 for x in has_rope)
    ):
        raise bad_value(where, "no_rope_layers", has_rope, f"it must be a list of 0 and 1 for the {num_layers} layers")
    return has_rope


def write_sliding(cfg: TransformerConfig) -> dict[str, Any]:
    """Return the fields for the windows of the layers."""
    sizes = [kind.window for kind in cfg.kind_of_layer]
    window = next((size for size in sizes if size is not None), None)
    return {"sliding_window": window, "layer_types": [FULL if size is None else SLIDING for size in sizes]}


def set_attention_scale(values: dict[str, Any], scale: float) -> None:
    """Set the factor of the scores. The default factor is written as None."""
    values["attention_scale"] = None if scale == values["head_dim"] ** -0.5 else scale


def write_attention_scale(cfg: TransformerConfig) -> float:
    """Return the factor of the scores."""
    return cfg.head_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale


BIAS = Field("attention_bias", "qkv_bias", bool, False)


def read_biases(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Set `out_bias`, for families whose `attention_bias` concerns all projections of the attention."""
    values["out_bias"] = values["qkv_bias"]


# ---- Tensors ---------------------------------------------------------------------------------------------------------

Row = tuple[str, str, str]
"""Tensor name relative to `model.layers.{L}.`, path relative to the stack, and dims."""


def sizes_of(cfg: TransformerConfig) -> dict[str, int]:
    """Return the size of each dim letter in the tables."""
    sizes = {
        "V": cfg.vocab_size, "E": cfg.embed_dim, "H": cfg.num_heads, "K": cfg.num_kv_heads, "D": cfg.head_dim,
        "M": cfg.mlp_dim, "L": cfg.num_layers - cfg.num_dense_layers,
        "A": cfg.num_heads * cfg.head_dim, "B": cfg.num_kv_heads * cfg.head_dim,
    }  # fmt: skip
    if cfg.moe is not None:
        sizes |= {"X": cfg.moe.routing.num_experts, "F": cfg.moe.mlp_dim, "S": cfg.moe.shared_dim}
    return sizes


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def embedding_and_head(cfg: TransformerConfig) -> list[WeightMapping]:
    """Return the mappings of the embedding table, the final norm, and the output layer if it is not tied."""
    sizes = sizes_of(cfg)
    mappings = [
        WeightMapping(TABLE, "embed/embedding", "V E -> V E", sizes),
        WeightMapping("model.norm.weight", "final_norm/scale", "E -> E", sizes),
    ]
    head = WeightMapping(HEAD, "head/kernel", "V E -> E V", sizes)
    return mappings if cfg.tied_embeddings else [*mappings, head]


def layers(cfg: TransformerConfig, *rows: Row, dense: bool = False) -> list[WeightMapping]:
    """Return the mappings of stacked layers: the MoE layers, or the dense layers before them."""
    count = cfg.num_dense_layers if dense else cfg.num_layers - cfg.num_dense_layers
    stack, first = ("dense_layers", 0) if dense else ("layers", cfg.num_dense_layers)
    sizes = {**sizes_of(cfg), "L": count}
    return [
        WeightMapping("model.layers.{L}." + theirs, f"{stack}/{ours}", dims, sizes, first_layer=first)
        for theirs, ours, dims in rows
    ]


NORMS: tuple[Row, ...] = (
    ("input_layernorm.weight", "attention_norm/scale", "E -> L E"),
    ("post_attention_layernorm.weight", "mlp_norm/scale", "E -> L E"),
)
OUTPUT_NORMS: tuple[Row, ...] = (
    ("post_attention_layernorm.weight", "attention_out_norm/scale", "E -> L E"),
    ("post_feedforward_layernorm.weight", "mlp_out_norm/scale", "E -> L E"),
)
FOUR_NORMS: tuple[Row, ...] = (
    ("input_layernorm.weight", "attention_norm/scale", "E -> L E"),
    ("pre_feedforward_layernorm.weight", "mlp_norm/scale", "E -> L E"),
    *OUTPUT_NORMS,
)
ATTENTION: tuple[Row, ...] = (
    ("self_attn.q_proj.weight", "attention/query/kernel", "(H D) E -> L E H D"),
    ("self_attn.k_proj.weight", "attention/key/kernel", "(K D) E -> L E K D"),
    ("self_attn.v_proj.weight", "attention/value/kernel", "(K D) E -> L E K D"),
    ("self_attn.o_proj.weight", "attention/out/kernel", "E (H D) -> L H D E"),
)
QK_NORMS: tuple[Row, ...] = (
    ("self_attn.q_norm.weight", "attention/query_norm/scale", "D -> L D"),
    ("self_attn.k_norm.weight", "attention/key_norm/scale", "D -> L D"),
)
MLP: tuple[Row, ...] = (
    ("mlp.gate_proj.weight", "mlp/gate/kernel", "M E -> L E M"),
    ("mlp.up_proj.weight", "mlp/up/kernel", "M E -> L E M"),
    ("mlp.down_proj.weight", "mlp/down/kernel", "E M -> L M E"),
)


QKV_BIASES: tuple[Row, ...] = (
    ("self_attn.q_proj.bias", "attention/query/bias", "(H D) -> L H D"),
    ("self_attn.k_proj.bias", "attention/key/bias", "(K D) -> L K D"),
    ("self_attn.v_proj.bias", "attention/value/bias", "(K D) -> L K D"),
)
OUT_BIAS: tuple[Row, ...] = (("self_attn.o_proj.bias", "attention/out/bias", "E -> L E"),)


def experts(prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Row, ...]:
    """Return the table rows of the router and the experts."""
    return (
        (f"{prefix}.gate.weight", "mlp/router", "X E -> L E X"),
        (f"{prefix}.experts.{{X}}.{gate}.weight", "mlp/gate", "F E -> L X E F"),
        (f"{prefix}.experts.{{X}}.{up}.weight", "mlp/up", "F E -> L X E F"),
        (f"{prefix}.experts.{{X}}.{down}.weight", "mlp/down", "E F -> L X F E"),
    )


def tensors(*rows: Row) -> Callable[[TransformerConfig], list[WeightMapping]]:
    """Return a `Family.tensors` for embedding, head, and layers with norms, grouped-query attention and `rows`."""
    norms = {"before": NORMS, "after": OUTPUT_NORMS, "both": FOUR_NORMS}

    def mappings(cfg: TransformerConfig) -> list[WeightMapping]:
        table = (*norms[cfg.norm_placement], *ATTENTION, *biases(cfg), *rows)
        return [*embedding_and_head(cfg), *layers(cfg, *table)]

    return mappings


def biases(cfg: TransformerConfig) -> tuple[Row, ...]:
    """Return the rows of the tensor table for the biases of attention."""
    return QKV_BIASES * cfg.qkv_bias + OUT_BIAS * cfg.out_bias
