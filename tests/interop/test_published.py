"""Published models by the fields of their config.json: the decoders' own shapes, on the pods they are trained on."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar import models
from meshpar.interop.hf import described, family_of, written
from meshpar.models import TransformerConfig, next_token_loss
from tests.grid import cases

YARN = {
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "hidden_act": "silu", "max_position_embeddings": 131_072, "mlp_bias": False, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128_256,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
QWEN3 = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 12_288, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 1_000_000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151_936,
}  # fmt: skip
DEEPSEEK = {
    "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18_432, "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "v_head_dim": 128, "seq_aux": True, "aux_loss_alpha": 0.001,
}  # fmt: skip
PUBLISHED = {
    "llama3_8b": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
                  "num_hidden_layers": 32},
    "llama3_70b": {**LLAMA, "hidden_size": 8192, "intermediate_size": 28_672, "num_attention_heads": 64,
                   "num_hidden_layers": 80},
    "llama3_405b": {**LLAMA, "hidden_size": 16_384, "intermediate_size": 53_248, "num_attention_heads": 128,
                    "num_hidden_layers": 126},
    "qwen3_8b": {**QWEN3, "model_type": "qwen3", "max_window_layers": 36, "num_attention_heads": 32,
                 "num_hidden_layers": 36, "num_key_value_heads": 8},
    "qwen3_235b": {**QWEN3, "model_type": "qwen3_moe", "decoder_sparse_step": 1, "max_window_layers": 94,
                   "mlp_only_layers": [], "moe_intermediate_size": 1536, "norm_topk_prob": True,
                   "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 94,
                   "num_key_value_heads": 4, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    "mixtral_8x7b": {"model_type": "mixtral", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
                     "intermediate_size": 14_336, "max_position_embeddings": 32_768, "num_attention_heads": 32,
                     "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
                     "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-5,
                     "rope_theta": 1_000_000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
                     "tie_word_embeddings": False, "vocab_size": 32_000},
    "deepseek_v3": {**DEEPSEEK, "model_type": "deepseek_v3", "first_k_dense_replace": 3, "n_group": 8,
                    "n_routed_experts": 256, "num_attention_heads": 128, "num_key_value_heads": 128,
                    "num_nextn_predict_layers": 1, "rope_scaling": {**YARN, "beta_fast": 32, "factor": 40},
                    "rope_theta": 10_000, "routed_scaling_factor": 2.5, "topk_group": 4, "vocab_size": 129_280},
    "kimi_k2": {**DEEPSEEK, "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1,
                "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
                "num_nextn_predict_layers": 0, "rope_scaling": {**YARN, "beta_fast": 1.0, "factor": 32.0},
                "rope_theta": 50_000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163_840},
}  # fmt: skip
"""Fields of each release's config.json, Instruct and Base alike."""


_COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "rope_scaling": None, "use_cache": True,
}  # fmt: skip
_GEMMA = {
    **_COMMON, "cache_implementation": "hybrid", "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
RELEASES = {
    7_615_616_512: {  # Qwen2.5-7B, whose config has no `attention_bias`
        "model_type": "qwen2", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 3584,
        "intermediate_size": 18_944, "max_position_embeddings": 131_072, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "sliding_window": 131_072, "tie_word_embeddings": False, "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 152_064,
    },
    7_298_617_344: {  # OLMo-2-1124-7B
        **_COMMON, "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11_008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6, "rope_theta": 500_000, "tie_word_embeddings": False, "vocab_size": 100_352,
    },
    3_836_021_760: {  # Phi-4-mini-instruct, with other factors of the wavelengths
        **_COMMON, "model_type": "phi3", "embd_pdrop": 0.0, "full_attn_mod": 1, "hidden_size": 3072,
        "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131_072,
        "mlp_bias": False, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "sliding_window": 262_144, "tie_word_embeddings": True,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
        "vocab_size": 200_064,
    },
    3_075_098_624: {  # SmolLM3-3B
        **_COMMON, "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11_008, "max_window_layers": 28,
        "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65_536, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
        "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 5_000_000.0, "sliding_window": None, "use_sliding_window": False, "vocab_size": 128_256,
    },
    8_170_835_968: {  # Granite 3, 8B
        **_COMMON, "model_type": "granite", "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
        "hidden_size": 4096, "intermediate_size": 12_800, "logits_scaling": 16.0, "max_position_embeddings": 131_072,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_theta": 10_000_000.0, "tie_word_embeddings": True,
        "vocab_size": 49_152,
    },
    9_241_705_984: {  # gemma-2-9b
        **_GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_size": 3584, "intermediate_size": 14_336, "max_position_embeddings": 8192, "num_attention_heads": 16,
        "num_hidden_layers": 42, "num_key_value_heads": 8, "rope_theta": 10_000.0, "sliding_window": 4096,
        "sliding_window_size": 4096, "vocab_size": 256_000,
    },
    999_885_952: {  # gemma-3-1b
        **_GEMMA, "model_type": "gemma3_text", "attn_logit_softcapping": None, "eos_token_id": [1, 106],
        "final_logit_softcapping": None, "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32_768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "rope_local_base_freq": 10_000, "rope_theta": 1_000_000, "sliding_window": 512, "sliding_window_pattern": 6,
        "vocab_size": 262_144,
    },
}  # fmt: skip
"""Fields of the config.json of other releases, by their number of parameters."""


@pytest.mark.parametrize("num_params", RELEASES)
def test_other_releases_are_read_and_written(num_params):
    config, family, *_ = described(RELEASES[num_params])
    assert config.num_params == num_params
    assert described(written(config, family)).config == config
    assert family_of(config) is family


def test_original_length_may_be_outside_of_the_rope_scaling():
    long = described(RELEASES[3_836_021_760]).config.rope_long
    assert long is not None
    assert long.original_seq_len == 4096
    assert long.rotated_factor == pytest.approx(math.sqrt(1 + math.log(131_072 / 4096) / math.log(4096)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_equal_the_decoders(name):
    config, family, *_ = described(PUBLISHED[name])
    ours = getattr(models, name)()
    same = {"rope_yarn": config.rope_yarn} if name == "deepseek_v3" else {}  # trained without, released with it
    if config.moe is not None:
        assert config.moe.routing == ours.moe.routing
        same["moe"] = ours.moe
        if "router_aux_loss_coef" in PUBLISHED[name]:
            assert described({**PUBLISHED[name], "output_router_logits": True}).config.moe == ours.moe
    assert dataclasses.replace(config, **same) == dataclasses.replace(ours, **same)
    assert described(written(config, family)).config.num_params == ours.num_params
    assert family_of(config) is family


@pytest.mark.parametrize(
    ("name", "active"), cases(("qwen3_8b", None), grid=[("qwen3_8b", None), ("qwen3_235b", 0), ("kimi_k2", 0)])
)
def test_numbers_of_parameters_are_those_said(name, active):
    cfg, said = getattr(models, name)(), " ".join(getattr(models, name).__doc__.split())
    assert sum(leaf.size for leaf in cfg.build().leaves()) == cfg.num_params
    assert f"{cfg.num_params:,} parameters" in said
    if active is not None:
        assert f"{cfg.num_active_params:,} of them active" in said


def layout_of(cfg: TransformerConfig, devices: int):
    """Experts over as many ranks as a pod's nodes take, tensors over a node's GPUs where layers are wide."""
    if cfg.moe is not None:
        expert = min(cfg.moe.routing.num_experts & -cfg.moe.routing.num_experts, devices // 8, 64)
        return mp.MeshSpec(fsdp=devices // expert, expert=expert), mp.fsdp() | mp.expert_parallel()
    if cfg.embed_dim < 8192:
        return mp.MeshSpec(data=devices // 64, fsdp=64), mp.hsdp() if devices > 64 else mp.fsdp()
    return mp.MeshSpec(fsdp=devices // 8, tensor=8), mp.fsdp() | mp.tensor_parallel(sequence=True)


@pytest.mark.parametrize(
    ("name", "devices"),
    cases(("qwen3_235b", 512), grid=[(name, count) for name in PUBLISHED for count in (64, 512, 2048)]),
)
def test_published_models_are_sharded_over_a_pod(name, devices):
    cfg = described(PUBLISHED[name]).config
    spec, strategy = layout_of(cfg, devices)
    table = mp.shardings(cfg.build(), spec.abstract(), strategy, tx=optax.adamw(1e-4))
    owned = sum(d.leaf.size for d in table.params if "expert" in (d.leaf.names or ()))
    split = math.prod(size for axis, size in spec.items() if axis not in ("data", "expert"))
    share = owned / (split * spec["expert"]) + (table.totals.num_params - owned) / split
    assert table.totals.params_bytes == pytest.approx(4 * share, rel=1e-2)


@pytest.mark.pod
@pytest.mark.parametrize(
    ("name", "devices"),
    cases(
        ("qwen3_8b", 64), ("qwen3_235b", 64), ("deepseek_v3", 2048),
        grid=[(name, devices) for name in PUBLISHED for devices in (64, 2048)],
    ),
)  # fmt: skip
def test_explain_finds_nothing_unexpected(name, devices):
    """Two layers of each kind it has, as wide as published: layers are a loop, so more send the same more often."""
    cfg = described(PUBLISHED[name]).config
    dense = min(cfg.num_dense_layers, 2)
    cfg = dataclasses.replace(cfg, num_layers=2 + dense, num_dense_layers=dense)
    spec, strategy = layout_of(cfg, devices)
    state = mp.abstract_state(cfg.build(), optax.adamw(1e-4), mesh=spec.abstract(), strategy=strategy)
    step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"), remat="full")
    batch = {key: jax.ShapeDtypeStruct((devices, 1024), np.int32) for key in ("inputs", "targets")}
    report = mp.explain(step, state, batch, f"h100:{devices // 8}x8")
    assert report.is_as_expected, str(report)
    assert not report.matching.missing
