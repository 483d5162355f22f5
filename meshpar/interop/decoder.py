"""The description of a model family, and the tensors and fields that most families have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshpar.interop.block_fp8 import CONFIG_FIELD
from meshpar.interop.fields import RELEASE_CONFIG, Field, parse_scalar
from meshpar.interop.weight_mapping import WeightMapping
from meshpar.models.config import TransformerConfig
from meshpar.sharding.types import MeshparError, near_or, problem

HARMLESS = frozenset({
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_position_embeddings", "model_type", "pad_token_id", "pretraining_tp", "torch_dtype", "transformers_version",
    "use_cache",
})  # fmt: skip
"""Fields that do not change the forward pass."""
FIXED = {"partial_rotary_factor": 1.0}
"""Fields that are supported only with this value, in all families."""
TORCH_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "auto")
"""Valid values of `torch_dtype`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of checkpoints: the mapping of its config and its tensors to `TransformerConfig`'s decoder."""

    model_type: str
    """`model_type` in config.json."""
    architecture: str
    """Class name in transformers."""
    fields: Sequence[Field]
    tensors: Callable[[TransformerConfig], list[WeightMapping]]
    """Returns the tensors of a model."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields that are supported only with this value. It is also their default."""
    ignored: frozenset[str] = frozenset()
    """Other known fields: `read_more` reads them, or they do not change the forward pass."""
    aliases: tuple[str, ...] = ()
    """Other values of `model_type`."""
    read_more: Callable[[str, Mapping[str, Any], dict[str, Any]], None] = lambda where, document, values: None
    """Checks fields and changes the values: (file name, document, values by path in `TransformerConfig`)."""
    write_more: Callable[[TransformerConfig], dict[str, Any]] = lambda cfg: {}
    """Returns the fields of config.json that are not in `fields` or `fixed`."""
    passthrough: Callable[[TransformerConfig, Mapping[str, Any]], list[WeightMapping]] = lambda cfg, document: []
    """Returns the tensors that the decoder does not use and `to_hf` copies: (config, document)."""


# ---- Fields ----------------------------------------------------------------------------------------------------------


def fields(*more: Field, rope_theta: float = 10_000.0, norm_eps: float = 1e-6) -> tuple[Field, ...]:
    """Return the fields that every family has, and those of one family.

    Args:
      more: fields of the family.
      rope_theta, norm_eps: defaults of transformers for this family.
    """
    return (
        Field("vocab_size", "vocab_size"),
        Field("num_hidden_layers", "num_layers"),
        Field("hidden_size", "embed_dim"),
        Field("num_attention_heads", "num_heads"),
        Field("rope_theta", "rope_theta", float, rope_theta),
        Field("rms_norm_eps", "norm_eps", float, norm_eps),
        Field("tie_word_embeddings", "tied_embeddings", bool, False),
        *more,
    )


def _head_dim(document: Mapping[str, Any]) -> int:
    embed_dim = parse_scalar("config.json, `hidden_size`", document.get("hidden_size"), int)
    num_heads = parse_scalar("config.json, `num_attention_heads`", document.get("num_attention_heads"), int)
    return embed_dim // max(num_heads, 1)


GROUPED = (
    Field("num_key_value_heads", "num_kv_heads", int, lambda document: document.get("num_attention_heads")),
    Field("head_dim", "head_dim", int, _head_dim),
)
"""Fields of grouped-query attention."""
DENSE = (Field("intermediate_size", "mlp_dim"),)
ROUTER_LOSS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""Fields that `read_router_loss` reads."""


def read_router_loss(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Set the weight of the auxiliary loss of the routers from transformers' coefficient.

    Transformers pools the tokens of all layers, so its loss is `coefficient * top_k` when experts are balanced. Ours is
    `auxiliary_weight` in each layer, and layers add up: `auxiliary_weight = coefficient * top_k / layers`. Both give
    the same loss when all layers send the same shares to the experts. Otherwise imbalances of different layers cancel
    in the pooled loss, and ours is larger. Without `output_router_logits` transformers adds no such loss.
    """
    coefficient = document.get("router_aux_loss_coef")
    coefficient = parse_scalar(f"{where}, `router_aux_loss_coef`", 0.001 if coefficient is None else coefficient, float)
    is_on = parse_scalar(f"{where}, `output_router_logits`", document.get("output_router_logits") or False, bool)
    in_layer = coefficient * values["moe.routing.top_k"] / max(values["num_layers"], 1)
    values["moe.auxiliary_weight"] = in_layer if is_on else 0.0


def write_router_loss(cfg: TransformerConfig) -> dict[str, Any]:
    """Return the fields that `read_router_loss` reads. Without a loss there is no coefficient."""
    assert cfg.moe is not None
    weight = cfg.moe.auxiliary_weight
    coefficient = float(f"{weight * cfg.num_moe_layers / cfg.moe.routing.top_k:.12g}")
    return {"output_router_logits": weight > 0} | ({"router_aux_loss_coef": coefficient} if weight else {})


def unsupported(
    where: str, field: str, value: object, reason: str, fix: str, code: str = "unsupported-feature"
) -> MeshparError:
    """Return the error for a field with an unsupported value."""
    shown = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
    return problem(f"{where}, `{field}`", f"be {shown}", reason, fix, code)


def check_known(where: str, document: Mapping[str, Any], family: Family) -> None:
    """Check that all fields of a config.json are known and have supported values."""
    known = {name for field in family.fields for name in (field.name, field.alias) if name is not None}
    known |= HARMLESS | family.ignored | {"rope_scaling", CONFIG_FIELD} | set(family.fixed)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = document.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            reason = "it must be a token id, a list of ids, or null"
            raise unsupported(where, name, value, reason, RELEASE_CONFIG, "wrong-type")
    for name in ("dtype", "torch_dtype"):
        if document.get(name) not in (None, *TORCH_DTYPES):
            reason = f"it must be one of {', '.join(TORCH_DTYPES)}"
            raise unsupported(where, name, document[name], reason, RELEASE_CONFIG, "unknown-choice")
    for name, value in document.items():
        if name not in known | FIXED.keys():
            reason = f"`{family.model_type}` has no such field here, and it may change the forward pass"
            fix = "add it in meshpar/interop/families, or remove it if the code of the model does not read it"
            hint = near_or(name, known, fix)
            raise problem(f"{where}, `{name[:60]}`", "read it", reason, hint, code="unknown-name")
        expected = family.fixed.get(name, FIXED.get(name))
        is_equal = value == expected and isinstance(value, bool) == isinstance(expected, bool)
        if expected is not None and value is not None and not is_equal:
            fix = "use another checkpoint, or add a field to TransformerConfig"
            raise unsupported(where, name, value, f"only {expected!r} is supported", fix)


# ---- Tensors ---------------------------------------------------------------------------------------------------------


def dim_sizes(cfg: TransformerConfig) -> dict[str, int]:
    """Return the size of each letter in `WeightMapping.dims`."""
    sizes = {
        "V": cfg.vocab_size, "E": cfg.embed_dim, "H": cfg.num_heads, "K": cfg.num_kv_heads, "D": cfg.head_dim,
        "M": cfg.mlp_dim, "L": cfg.num_layers - cfg.num_dense_layers,
    }  # fmt: skip
    if cfg.moe is not None:
        sizes |= {"X": cfg.moe.routing.num_experts, "F": cfg.moe.mlp_dim, "S": cfg.moe.shared_dim}
    return sizes


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def embedding_and_head(cfg: TransformerConfig) -> list[WeightMapping]:
    """Return the mappings of the embedding, the final norm, and the head unless it is tied."""
    sizes = dim_sizes(cfg)
    return [
        WeightMapping(EMBEDDING, "embed/embedding", "V E -> V E", sizes),
        WeightMapping("model.norm.weight", "final_norm/scale", "E -> E", sizes),
        *([] if cfg.tied_embeddings else [WeightMapping(HEAD, "head/kernel", "V E -> E V", sizes)]),
    ]


Row = tuple[str, str, str]
"""Tensor name below `model.layers.{L}.`, path below the stacked layers, and dims."""


def layers(cfg: TransformerConfig, *rows: Row, dense: bool = False) -> list[WeightMapping]:
    """Return the mappings of stacked layers.

    Args:
      cfg: the config.
      rows: the tensors of a layer.
      dense: True for the first, dense layers of an MoE model.
    """
    num_layers = cfg.num_dense_layers if dense else cfg.num_layers - cfg.num_dense_layers
    stack, first = ("dense_layers", 0) if dense else ("layers", cfg.num_dense_layers)
    sizes = {**dim_sizes(cfg), "L": num_layers}
    return [
        WeightMapping("model.layers.{L}." + name, f"{stack}/{path}", dims, sizes, first_layer=first)
        for name, path, dims in rows
    ]


NORMS: tuple[Row, ...] = (
    ("input_layernorm.weight", "attention_norm/scale", "E -> L E"),
    ("post_attention_layernorm.weight", "mlp_norm/scale", "E -> L E"),
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


def experts(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Row, ...]:
    """Return the rows of the router and the experts of an MoE module, whose matrices have these names."""
    return (
        (f"{module}.gate.weight", "mlp/router", "X E -> L E X"),
        (f"{module}.experts.{{X}}.{gate}.weight", "mlp/gate", "F E -> L X E F"),
        (f"{module}.experts.{{X}}.{up}.weight", "mlp/up", "F E -> L X E F"),
        (f"{module}.experts.{{X}}.{down}.weight", "mlp/down", "E F -> L X F E"),
    )
