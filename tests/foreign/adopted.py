"""Models of other packages as arguments of `meshpar adopt`, with small sizes."""

from __future__ import annotations

from typing import NamedTuple

import jax
from flax import nnx

import meshpar as mp
from tests.foreign import zoo

TOKENS = "input_ids=int32[32,8],attention_mask=int32[32,8]"
POSITIONS = f"{TOKENS},position_ids=int32[32,8]"


class Target(NamedTuple):
    """A model to adopt."""

    package: str
    target: str
    inputs: str
    settings: str = ""
    handwritten: str = ""
    """Name of the case in the zoo with hand-written rules."""


def transformers(name: str, family: str, inputs: str, config: str, fields: str, handwritten: str = "") -> Target:
    settings = " ".join([f"config=transformers:{config}", *(f"config.{field}" for field in fields.split())])
    target = f"transformers.models.{family}.modeling_flax_{family}:Flax{name}Module"
    return Target("transformers", target, inputs, settings, handwritten)


def tunix(name: str, family: str, fields: str = "", handwritten: str = "") -> Target:
    module = f"tunix.models.{family}.model"
    names = "num_layers=2 vocab_size=64 embed_dim=32 hidden_dim=64 num_heads=4 head_dim=8 num_kv_heads=2"
    fields = f"{names} {fields}"
    settings = " ".join([f"config={module}:ModelConfig", *(f"config.{field}" for field in fields.split())])
    inputs = "TOKENS=int32[32,8],positions=int32[32,8],attention_mask=bool[32,8,8],cache=none"
    inputs = inputs.replace("TOKENS", "last_tokens" if family == "gemma" else "input_tokens")
    return Target("tunix", f"{module}:{name}", inputs, settings, handwritten)


ENCODER = "hidden_size=32 num_hidden_layers=2 num_attention_heads=4 intermediate_size=64"
DECODER = f"{ENCODER} vocab_size=64 max_position_embeddings=64"
ROPE = "norm_eps=1e-6 rope_theta=10000"
TARGETS = {
    "gpt2": transformers(
        "GPT2LMHead", "gpt2", POSITIONS, "GPT2Config", "vocab_size=64 n_positions=8 n_embd=32 n_layer=2 n_head=4",
        "gpt2",
    ),
    "gpt_neo": transformers(
        "GPTNeoForCausalLM", "gpt_neo", POSITIONS, "GPTNeoConfig",
        "vocab_size=64 max_position_embeddings=8 hidden_size=32 num_layers=2 num_heads=4 window_size=4 "
        'attention_types=[[["global","local"],1]]',
    ),
    "bert": transformers(
        "BertForMaskedLM", "bert", f"{POSITIONS},token_type_ids=int32[32,8],head_mask=none", "BertConfig",
        f"{ENCODER} vocab_size=64 max_position_embeddings=8", "bert",
    ),
    "opt": transformers(
        "OPTForCausalLM", "opt", POSITIONS, "OPTConfig",
        "hidden_size=32 num_hidden_layers=2 num_attention_heads=4 ffn_dim=64 vocab_size=64 max_position_embeddings=16 "
        "word_embed_proj_dim=32",
    ),
    "vit": transformers(
        "ViTForImageClassification", "vit", "pixel_values=float32[32,16,16,3]", "ViTConfig",
        f"{ENCODER} image_size=16 patch_size=4 num_labels=8", "vit",
    ),
    "llama": transformers("LlamaForCausalLM", "llama", POSITIONS, "LlamaConfig", DECODER, "llama"),
    "mistral": transformers(
        "MistralForCausalLM", "mistral", POSITIONS, "MistralConfig", f"{DECODER} num_key_value_heads=2"
    ),
    "resnet": transformers(
        "ResNetForImageClassification", "resnet", "pixel_values=float32[32,32,32,3],deterministic=False",
        "ResNetConfig", "embedding_size=16 hidden_sizes=[16,32] depths=[1,1] layer_type=basic num_labels=8", "resnet",
    ),
    "bart": transformers(
        "BartForConditionalGeneration", "bart",
        f"{POSITIONS},decoder_input_ids=int32[32,8],decoder_attention_mask=int32[32,8],"
        "decoder_position_ids=int32[32,8]",
        "BartConfig",
        "vocab_size=64 d_model=32 encoder_layers=2 decoder_layers=2 encoder_attention_heads=4 "
        "decoder_attention_heads=4 encoder_ffn_dim=64 decoder_ffn_dim=64 max_position_embeddings=8", "bart",
    ),
    "gemma": transformers(
        "GemmaForCausalLM", "gemma", POSITIONS, "GemmaConfig", f"{DECODER} num_key_value_heads=1 head_dim=8"
    ),
    "unet": Target(
        "diffusers", "diffusers:FlaxUNet2DConditionModel",
        "sample=float32[32,4,8,8],timesteps=int32[32],encoder_hidden_states=float32[32,4,32]",
        "sample_size=8 in_channels=4 out_channels=4 down_block_types=('CrossAttnDownBlock2D','DownBlock2D') "
        "up_block_types=('UpBlock2D','CrossAttnUpBlock2D') block_out_channels=(32,64) layers_per_block=1 "
        "attention_head_dim=8 cross_attention_dim=32", "unet",
    ),
    "nano_moe": Target(
        "nano_moe", "nano_moe:NanoMoE", "x=int32[32,8]",
        "config=nano_moe:NanoMoEConfig config.vocab_size=64 config.n_layers=2 config.n_heads=4 config.d_model=32 "
        "config.d_ff=64 config.n_experts=3 config.block_size=8 config.dropout_rate=0.0", "nano_moe",
    ),
    "tunix_llama": tunix("Llama3", "llama3", ROPE, "tunix_llama"),
    "tunix_qwen3": tunix("Qwen3", "qwen3", ROPE, "tunix_qwen3"),
    "tunix_qwen2": tunix("Qwen2", "qwen2", ROPE),
    "mamba2": Target(
        "mamba2_jax", "mamba2_jax:Mamba2ForCausalLM", "input_ids=int32[32,8]",
        "cfg=mamba2_jax:Mamba2Config cfg.vocab_size=64 cfg.hidden_size=32 cfg.state_size=8 cfg.head_dim=16 "
        "cfg.chunk_size=4 cfg.num_hidden_layers=2", "mamba2",
    ),
    "graph": Target(
        "jraphx", "tests.foreign.adopted:Graphs", "nodes=float32[32,6,16],edges=int32[32,2,12]", "", "graph"
    ),
    "equinox_mlp": Target(
        "equinox", "equinox.nn:MLP", "x=float32[32,16]", "in_size=16 out_size=8 width_size=64 depth=2"
    ),
    "equinox": Target("equinox", "tests.foreign.adopted:equinox_net", "ids=int32[32,8]", "", "equinox"),
    "haiku": Target("haiku", "tests.foreign.adopted:haiku_net", "ids=int32[32,8]", "", "haiku"),
    "attention": Target(
        "flax", "flax.nnx:MultiHeadAttention", "inputs_q=float32[32,8,32],decode=False",
        "num_heads=4 in_features=32 qkv_features=64",
    ),
}  # fmt: skip


class Graphs(nnx.Module):
    """A graph network of jraphx for a batch of graphs."""

    def __init__(self, rngs: nnx.Rngs):
        from jraphx.nn.models import GCN

        self.net = GCN(16, zoo.WIDTH, 2, zoo.LABELS, rngs=rngs)

    def __call__(self, nodes, edges):
        return mp.constrain(jax.vmap(self.net)(nodes, edges), "batch", None, None)


def equinox_net() -> mp.sharding.adapters.model.Model:
    """Return the Equinox model of the zoo."""
    return zoo.equinox().model


def haiku_net() -> mp.sharding.adapters.model.Model:
    """Return the Haiku model of the zoo."""
    return zoo.haiku().model
