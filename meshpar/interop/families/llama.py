"""Llama 3.x: grouped-query attention, with the rope scaling of Llama 3.1 or YaRN."""

from meshpar.interop.decoder import ATTENTION, DENSE, GROUPED, MLP, NORMS, Family, embedding_and_head, fields, layers

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=fields(*GROUPED, *DENSE),
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
    tensors=lambda cfg: [*embedding_and_head(cfg), *layers(cfg, *NORMS, *ATTENTION, *MLP)],
)
