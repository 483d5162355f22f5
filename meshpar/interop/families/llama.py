"""Llama 3.x checkpoints: grouped-query attention, Llama 3.1 or YaRN scaling of rotary frequencies."""

from meshpar.interop.decoder import BIAS, DENSE, GROUPED, MLP, Family, fields, read_biases, tensors

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=fields(*GROUPED, *DENSE, BIAS),
    fixed={"hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0.0},
    tensors=tensors(*MLP),
    read_more=read_biases,
)
