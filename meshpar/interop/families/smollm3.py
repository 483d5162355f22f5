"""SmolLM3 checkpoints: the tensors of Llama, and layers without rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.interop import decoder
from meshpar.interop.fields import bad_value
from meshpar.models.architecture import LayerKind
from meshpar.models.config import TransformerConfig


def _read_more(where: str, document: Mapping[str, Any], values: dict[str, Any]) -> None:
    decoder.read_biases(where, document, values)
    num_layers = values["num_layers"]
    has_rope = decoder.read_no_rope(where, document, num_layers)
    if any(decoder.read_sliding(where, document, num_layers, lambda layer: False)):
        raise bad_value(where, "layer_types", document["layer_types"], "no release has windows (`use_sliding_window`)")
    kinds = LayerKind(has_rope=False), LayerKind()
    decoder.set_kinds(values, [kinds[has] for has in has_rope])


def _write_more(cfg: TransformerConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(kind.has_rope) for kind in cfg.kind_of_layer]}


FAMILY = decoder.Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=decoder.fields(*decoder.GROUPED, *decoder.DENSE, decoder.BIAS, rope_theta=2e6, tied=True),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "mlp_bias": False, "use_sliding_window": False},
    ignored=frozenset({
        "layer_types", "max_window_layers", "no_rope_layers", "no_rope_layer_interval", "sliding_window",
    }),
    tensors=decoder.tensors(*decoder.MLP),
    read_more=_read_more,
    write_more=_write_more,
)  # fmt: skip
