"""What the families' tables share: the tensors of a decoder's parts by the names most families give them."""

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
"""Fields that change nothing of the forward pass."""
FIXED = {"partial_rotary_factor": 1.0}
"""Fields of any family that our decoders know with one value only."""
TORCH_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "auto")
"""What `torch_dtype` may say."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How a family of checkpoints says what our decoders say, both ways."""

    model_type: str
    """Its name in config.json."""
    architecture: str
    """Its class in transformers."""
    fields: Sequence[Field]
    """What of config.json is ours."""
    tensors: Callable[[TransformerConfig], list[WeightMapping]]
    """What of its files is ours."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields that our decoders know in one way only, with that value; a missing one is that."""
    ignored: frozenset[str] = frozenset()
    """Other fields that are known: `read_more` reads them, or they do not change the forward pass."""
    aliases: tuple[str, ...] = ()
    """Other names of the same in config.json."""
    read_more: Callable[[str, Mapping[str, Any], dict[str, Any]], None] = lambda where, document, values: None
    """Adds to the fields' values, or refuses: (where, document, values by path)."""
    write_more: Callable[[TransformerConfig], dict[str, Any]] = lambda cfg: {}
    """The same for writing."""
    kept: Callable[[TransformerConfig, Mapping[str, Any]], list[WeightMapping]] = lambda cfg, document: []
    """Tensors of its files that our decoders have no use for, and that are carried along: (config, document)."""


# ---- Fields ----------------------------------------------------------------------------------------------------------


def fields(*more: Field, rope_theta: float = 10_000.0, norm_eps: float = 1e-6) -> tuple[Field, ...]:
    """Return the fields that every family has, and those of one family.

    Args:
      more: fields of the family.
      rope_theta, norm_eps: values that transformers takes for this family if config.json has none.
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
"""Of grouped-query attention."""
DENSE = (Field("intermediate_size", "mlp_dim"),)


def _head_dim(document: Mapping[str, Any]) -> int:
    width = typed("config.json, `hidden_size`", document.get("hidden_size"), int)
    return width // max(typed("config.json, `num_attention_heads`", document.get("num_attention_heads"), int), 1)


ROUTER_LOSS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""The fields that `read_router_loss` reads."""


def read_router_loss(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Set the weight of the auxiliary loss of the routers from transformers' coefficient.

    Transformers pools the tokens of all layers, so its loss is `coefficient * top_k` when experts are balanced. Ours is
    `auxiliary_weight` in each layer, and layers add up: `auxiliary_weight = coefficient * top_k / layers`. Both give
    the same loss when all layers send the same shares to the experts. Otherwise imbalances of different layers cancel
    in the pooled loss, and ours is larger. Without `output_router_logits` transformers adds no such loss.
    """
    coefficient = document.get("router_aux_loss_coef")
    coefficient = typed(f"{where}, `router_aux_loss_coef`", 0.001 if coefficient is None else coefficient, float)
    is_on = typed(f"{where}, `output_router_logits`", document.get("output_router_logits") or False, bool)
    in_layer = coefficient * values["moe.routing.top_k"] / max(values["num_layers"], 1)
    values["moe.auxiliary_weight"] = in_layer if is_on else 0.0


def write_router_loss(cfg: TransformerConfig) -> dict[str, Any]:
    """Return the fields that `read_router_loss` reads; without a loss the coefficient is left out."""
    assert cfg.moe is not None
    weight = cfg.moe.auxiliary_weight
    coefficient = float(f"{weight * cfg.num_moe_layers / cfg.moe.routing.top_k:.12g}")
    return {"output_router_logits": weight > 0} | ({"router_aux_loss_coef": coefficient} if weight else {})


def refuse(where: str, field: str, value: object, exists: str, fix: str) -> Exception:
    """The error for a field whose value our decoders do not know."""
    shown = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
    return problem(f"{where}, `{field}`", f"be {shown}", exists, fix)


def _ids(value: Any) -> Sequence[Any]:
    return () if value is None else value if isinstance(value, list) else (value,)


def check_known(where: str, document: Mapping[str, Any], family: Family) -> None:
    """Raises `ValueError` for a field that is unknown, or that says what our decoders do not do."""
    known = {name for field in family.fields for name in (field.theirs, field.also) if name is not None}
    known |= HARMLESS | family.ignored | {"rope_scaling", CONFIG_FIELD} | set(family.fixed)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = document.get(name)
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in _ids(value)):
            raise refuse(where, name, value, "it is a token id, a list of ids, or null", "take that of the release")
    for name in ("dtype", "torch_dtype"):
        if document.get(name) not in (None, *TORCH_DTYPES):
            exists = f"it is one of {', '.join(TORCH_DTYPES)}"
            raise refuse(where, name, document[name], exists, "take the config.json of the release")
    for name, value in document.items():
        if name not in known | FIXED.keys():
            exists = f"the table of `{family.model_type}` has no such field, and it may change the forward pass"
            fix = "add it to the table in meshpar/interop/families; remove it only if the model's code does not read it"
            raise problem(f"{where}, `{name[:60]}`", "read it", exists, near_or(name, known, fix))
        only = family.fixed.get(name, FIXED.get(name))
        is_other = value != only or isinstance(value, bool) != isinstance(only, bool)
        if only is not None and value is not None and is_other:
            fix = "take another checkpoint, or add a field to TransformerConfig"
            raise refuse(where, name, value, f"our decoders have {only!r} only", fix)


# ---- Tensors ---------------------------------------------------------------------------------------------------------


def sizes_of(cfg: TransformerConfig) -> dict[str, int]:
    """The letters of the tables' dims."""
    sizes = {
        "V": cfg.vocab_size, "E": cfg.embed_dim, "H": cfg.num_heads, "K": cfg.num_kv_heads, "D": cfg.head_dim,
        "M": cfg.mlp_dim, "L": cfg.num_layers - cfg.num_dense_layers,
    }  # fmt: skip
    if cfg.moe is not None:
        sizes |= {"X": cfg.moe.routing.num_experts, "F": cfg.moe.mlp_dim, "S": cfg.moe.shared_dim}
    return sizes


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def ends(cfg: TransformerConfig) -> list[WeightMapping]:
    """The embedding table, the last norm, and the output layer where it is no table."""
    sizes = sizes_of(cfg)
    found = [
        WeightMapping(TABLE, "embed/embedding", "V E -> V E", sizes),
        WeightMapping("model.norm.weight", "final_norm/scale", "E -> E", sizes),
    ]
    head = WeightMapping(HEAD, "head/kernel", "V E -> E V", sizes)
    return found if cfg.tied_embeddings else [*found, head]


def layers(cfg: TransformerConfig, *rows: tuple[str, str, str], dense: bool = False) -> list[WeightMapping]:
    """Tensors of stacked layers: rows of (their name, our path, dims), below each layer.

    Args:
      cfg: of the decoder.
      rows: names behind `model.layers.{L}.`, paths behind that of the stack.
      dense: of the first layers, that have an MLP where others have experts.
    """
    count = cfg.num_dense_layers if dense else cfg.num_layers - cfg.num_dense_layers
    at, first = ("dense_layers", 0) if dense else ("layers", cfg.num_dense_layers)
    sizes = {**sizes_of(cfg), "L": count}
    return [
        WeightMapping("model.layers.{L}." + theirs, f"{at}/{ours}", dims, sizes, first_layer=first)
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
    """The router and the experts, whose module is called `at` and whose matrices so."""
    return (
        (f"{at}.gate.weight", "mlp/router", "X E -> L E X"),
        (f"{at}.experts.{{X}}.{gate}.weight", "mlp/gate", "F E -> L X E F"),
        (f"{at}.experts.{{X}}.{up}.weight", "mlp/up", "F E -> L X E F"),
        (f"{at}.experts.{{X}}.{down}.weight", "mlp/down", "E F -> L X F E"),
    )
