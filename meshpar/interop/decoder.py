"""Shared table entries of the checkpoint families: config fields and the common tensor names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshpar.interop.block_fp8 import CONFIG_FIELD
from meshpar.interop.fields import Field, typed
from meshpar.interop.weight_mapping import WeightMapping
from meshpar.models.config import TransformerConfig
from meshpar.sharding.types import near_or, problem

HARMLESS = frozenset({
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_position_embeddings", "model_type", "pad_token_id", "pretraining_tp", "torch_dtype", "transformers_version",
    "use_cache",
})  # fmt: skip
"""Fields that do not affect the forward pass."""
FIXED = {"partial_rotary_factor": 1.0}
"""Fields of any family for which the decoders support a single value."""
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
    read_more: Callable[[str, Mapping[str, Any], dict[str, Any]], None] = lambda where, document, values: None
    """Function of (where, document, values by path) that adds values or raises an error."""
    write_more: Callable[[TransformerConfig], dict[str, Any]] = lambda cfg: {}
    """Function that returns additional fields of config.json."""
    kept: Callable[[TransformerConfig, Mapping[str, Any]], list[WeightMapping]] = lambda cfg, document: []
    """Function of (config, document) that returns tensors to copy, which the decoders do not use."""


# ---- Fields ----------------------------------------------------------------------------------------------------------


def fields(*more: Field, rope_theta: float = 10_000.0, norm_eps: float = 1e-6) -> tuple[Field, ...]:
    """Return the common fields and the additional fields of a family.

    Args:
      *more: additional fields of the family.
      rope_theta: default of transformers for this family.
      norm_eps: default of transformers for this family.
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


GROUPED = (
    Field("num_key_value_heads", "num_kv_heads", int, lambda document: document.get("num_attention_heads")),
    Field("head_dim", "head_dim", int, lambda document: _head_dim(document)),
)
"""Fields of grouped-query attention."""
DENSE = (Field("intermediate_size", "mlp_dim"),)


def _head_dim(document: Mapping[str, Any]) -> int:
    width = typed("config.json, `hidden_size`", document.get("hidden_size"), int)
    return width // max(typed("config.json, `num_attention_heads`", document.get("num_attention_heads"), int), 1)


ROUTER_LOSS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""The fields that `read_router_loss` reads."""


def read_router_loss(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Set the weight of the router auxiliary loss from the coefficient in transformers.

    Transformers pools the tokens of all layers, so its loss is `coefficient * top_k` for balanced experts. In meshpar
    the loss is `auxiliary_weight` per layer and summed over layers: `auxiliary_weight = coefficient * top_k / layers`.
    Both losses are equal if the expert load is the same in all layers. Otherwise imbalances of different layers cancel
    in the pooled loss, and ours is larger. Without `output_router_logits` transformers adds no auxiliary loss.

    Args:
      where: the file, for error messages.
      document: the parsed config.json.
      values: values by path, which this function updates.
    """
    coefficient = document.get("router_aux_loss_coef")
    coefficient = typed(f"{where}, `router_aux_loss_coef`", 0.001 if coefficient is None else coefficient, float)
    is_on = typed(f"{where}, `output_router_logits`", document.get("output_router_logits") or False, bool)
    in_layer = coefficient * values["moe.routing.top_k"] / max(values["num_layers"], 1)
    values["moe.auxiliary_weight"] = in_layer if is_on else 0.0


def write_router_loss(cfg: TransformerConfig) -> dict[str, Any]:
    """Return the fields for `read_router_loss`. The coefficient is omitted if there is no auxiliary loss.

    Args:
      cfg: the config of an MoE decoder.
    """
    assert cfg.moe is not None
    weight = cfg.moe.auxiliary_weight
    coefficient = float(f"{weight * cfg.num_moe_layers / cfg.moe.routing.top_k:.12g}")
    return {"output_router_logits": weight > 0} | ({"router_aux_loss_coef": coefficient} if weight else {})


def unsupported_value(where: str, field: str, value: object, reason: str, fix: str) -> Exception:
    """Return the error for an unsupported value of a field.

    Args:
      where: the file.
      field: the name of the field.
      value: its value.
      reason: why it is not supported.
      fix: how to fix it.
    """
    shown = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
    return problem(f"{where}, `{field}`", f"be {shown}", reason, fix, code="unsupported-feature")


def _ids(value: Any) -> Sequence[Any]:
    return () if value is None else value if isinstance(value, list) else (value,)


def check_known(where: str, document: Mapping[str, Any], family: Family) -> None:
    """Check that all fields of a config.json are known and have supported values.

    Args:
      where: the file, for error messages.
      document: the parsed config.json.
      family: the tables of the family.

    Raises:
      ValueError: a field is unknown, or its value is not supported.
    """
    supported = {name for field in family.fields for name in (field.theirs, field.also) if name is not None}
    supported |= HARMLESS | family.ignored | {"rope_scaling", CONFIG_FIELD} | set(family.fixed)
    release_fix = "use the config.json of the release"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = document.get(name)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in _ids(value)):
            raise unsupported_value(
                where, name, value, "it must be a token id, a list of token ids, or null", release_fix
            )
    for name in ("dtype", "torch_dtype"):
        if document.get(name) not in (None, *TORCH_DTYPES):
            raise unsupported_value(
                where, name, document[name], f"it must be one of {', '.join(TORCH_DTYPES)}", release_fix
            )
    for name, value in document.items():
        if name not in supported | FIXED.keys():
            reason = f"the table of `{family.model_type}` has no such field, and it may change the forward pass"
            fix = "add it to the table in meshpar/interop/families; remove it only if the model's code does not read it"
            fix = near_or(name, supported, fix)
            raise problem(f"{where}, `{name[:60]}`", "read the field", reason, fix, code="unknown-name")
        only = family.fixed.get(name, FIXED.get(name))
        is_other = value != only or isinstance(value, bool) != isinstance(only, bool)
        if only is not None and value is not None and is_other:
            fix = "use a different checkpoint, or add a field to TransformerConfig"
            raise unsupported_value(where, name, value, f"the decoders support {only!r} only", fix)


# ---- Tensors ---------------------------------------------------------------------------------------------------------


def sizes_of(cfg: TransformerConfig) -> dict[str, int]:
    """Return the size of each dim letter in the tables.

    Args:
      cfg: the config of the decoder.
    """
    sizes = {
        "V": cfg.vocab_size, "E": cfg.embed_dim, "H": cfg.num_heads, "K": cfg.num_kv_heads, "D": cfg.head_dim,
        "M": cfg.mlp_dim, "L": cfg.num_layers - cfg.num_dense_layers,
    }  # fmt: skip
    if cfg.moe is not None:
        sizes |= {"X": cfg.moe.routing.num_experts, "F": cfg.moe.mlp_dim, "S": cfg.moe.shared_dim}
    return sizes


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def embedding_and_head(cfg: TransformerConfig) -> list[WeightMapping]:
    """Return the mappings of the embedding table, the final norm, and the output layer if it is not tied.

    Args:
      cfg: the config of the decoder.
    """
    sizes = sizes_of(cfg)
    mappings = [
        WeightMapping(TABLE, "embed/embedding", "V E -> V E", sizes),
        WeightMapping("model.norm.weight", "final_norm/scale", "E -> E", sizes),
    ]
    head = WeightMapping(HEAD, "head/kernel", "V E -> E V", sizes)
    return mappings if cfg.tied_embeddings else [*mappings, head]


def layers(cfg: TransformerConfig, *rows: tuple[str, str, str], dense: bool = False) -> list[WeightMapping]:
    """Return the mappings of stacked layers.

    Args:
      cfg: the config of the decoder.
      *rows: (tensor name, our path, dims). The tensor name is relative to `model.layers.{L}.`, the path to the stack.
      dense: whether to map the first, dense layers of an MoE model.
    """
    count = cfg.num_dense_layers if dense else cfg.num_layers - cfg.num_dense_layers
    stack, first = ("dense_layers", 0) if dense else ("layers", cfg.num_dense_layers)
    sizes = {**sizes_of(cfg), "L": count}
    return [
        WeightMapping("model.layers.{L}." + theirs, f"{stack}/{ours}", dims, sizes, first_layer=first)
        for theirs, ours, dims in rows
    ]


Row = tuple[str, str, str]
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


def experts(at: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Row, ...]:
    """Return the table rows of the router and the experts.

    Args:
      at: the name of the MoE module.
      gate: the name of the gate projection.
      up: the name of the up projection.
      down: the name of the down projection.
    """
    return (
        (f"{at}.gate.weight", "mlp/router", "X E -> L E X"),
        (f"{at}.experts.{{X}}.{gate}.weight", "mlp/gate", "F E -> L X E F"),
        (f"{at}.experts.{{X}}.{up}.weight", "mlp/up", "F E -> L X E F"),
        (f"{at}.experts.{{X}}.{down}.weight", "mlp/down", "E F -> L X F E"),
    )
