"""Mistral: Llama's tensors, with a window over which a position sees those before it."""

from meshpar.interop.decoder import ATTENTION, DENSE, GROUPED, MLP, NORMS, Family, ends, fields, layers
from meshpar.interop.fields import Field

WINDOW = Field("sliding_window", "attention_window", int, None)

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=fields(*GROUPED, *DENSE, WINDOW),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    tensors=lambda cfg: [*ends(cfg), *layers(cfg, *NORMS, *ATTENTION, *MLP)],
)
