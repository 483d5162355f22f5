"""Llama 3.x checkpoints: grouped-query attention, Llama 3.1 or YaRN scaling of rotary frequencies."""

from meshpar.interop.decoder import DENSE, GROUPED, MLP, Family, fields, tensors

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=fields(*GROUPED, *DENSE),
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
    tensors=tensors(*MLP),
)
