"""Qwen2 and Qwen2.5 checkpoints: Llama with biases of queries, keys and values, and optional windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.interop.decoder import DENSE, GROUPED, MLP, Family, fields, read_sliding, set_kinds, tensors, write_sliding
from meshpar.interop.fields import bad_value, typed
from meshpar.models.architecture import LayerKind
from meshpar.models.config import TransformerConfig

IGNORED = frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})
"""Fields that `read_windows` reads."""


def read_windows(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Set the windows: with `use_sliding_window`, the layers from `max_window_layers` on have one."""

    def field(name: str, default: Any, kind: type) -> Any:
        return typed(where, name, default if document.get(name) is None else document[name], kind)

    window = field("sliding_window", 4096, int)
    has_window = field("use_sliding_window", False, bool) and document.get("sliding_window", 4096) is not None
    first = field("max_window_layers", 28, int)
    sliding = read_sliding(where, document, values["num_layers"], lambda layer: has_window and layer >= first)
    if any(sliding) and not has_window:
        raise bad_value(where, "layer_types", document["layer_types"], "there is no window (`use_sliding_window`)")
    kinds = LayerKind(), LayerKind(window=window)
    set_kinds(values, [kinds[is_sliding] for is_sliding in sliding])


def write_windows(cfg: TransformerConfig) -> dict[str, Any]:
    """Return the fields for `read_windows`."""
    fields = write_sliding(cfg)
    return fields | {"use_sliding_window": fields["sliding_window"] is not None}


def _read_more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    read_windows(where, document, values)
    values["qkv_bias"] = True


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=fields(*GROUPED, *DENSE),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "use_mrope": False},
    ignored=IGNORED,
    tensors=tensors(*MLP),
    read_more=_read_more,
    write_more=write_windows,
)
