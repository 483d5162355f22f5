"""Write small random models of each family and their logits: `python -m tests.interop.make_golden`.

The script needs torch and transformers (4.57), the tests do not. A file contains a model's config.json, its weights in
bfloat16, and float32 logits of transformers. `router_loss.json` (transformers 5.24) contains the auxiliary
losses of routers. `python -m tests.interop.make_golden router_loss` writes that file only.

`python -m tests.interop.make_golden odd [FAMILY...]` writes `golden/odd` (transformers 5.24, torch 2.13): models with
odd sizes, their logits, and the gradients of the mean cross-entropy of the next token.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
SMALL: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 4, "rope_scaling": YARN, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "mistral": {"sliding_window": 5},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK,
}
"""Of each family what differs from `SMALL`."""
NUM_TOKENS = 24
ODD: dict[str, Any] = {
    "vocab_size": 29, "hidden_size": 15, "intermediate_size": 21, "num_hidden_layers": 5, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 6, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
ODD_MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    "gemma2": {
        "query_pre_attn_scalar": 5,
        "sliding_window": 5,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 5,
        "sliding_window": 5,
        "tie_word_embeddings": True,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 1.5,
    },
    "olmo2": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
    },
    "phi3": {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "partial_rotary_factor": 0.75,
        "head_dim": 8,
        "original_max_position_embeddings": 16,
        "sliding_window": 11,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [1.5, 3.0, 6.0],
            "original_max_position_embeddings": 16,
        },
    },
    "gpt_oss": {
        "num_hidden_layers": 3,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "num_local_experts": 3,
        "no_rope_layer_interval": 3,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "attention_chunk_size": 7,
        "floor_scale": 5,
        "attn_scale": 0.3,
    },
    "smollm3": {"no_rope_layer_interval": 3, "rope_theta": 500.0, "attention_bias": True},
}
"""What differs from `ODD`."""


def config_of(kind: str) -> dict[str, Any]:
    """Fields of a family's small model."""
    fields = {**SMALL, **MODELS[kind]}
    if kind == "deepseek_v3":
        del fields["head_dim"]
    return fields


def made(kind: str, folder: Path, fields: dict[str, Any] | None = None) -> Any:
    """A small random model of a family, saved as transformers does; with it transformers' model of the same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(kind))
    config = AutoConfig.for_model(kind, **(config_of(kind) if fields is None else fields))
    config._attn_implementation = config._experts_implementation = "eager"  # the other experts need even sizes
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                x.add_(0.2 * torch.randn_like(x))
            if "bias" in name:
                x.copy_(0.1 * torch.rand_like(x))
            if "gate_up_proj_bias" in name:  # some products exceed the limits of the activation
                x.mul_(80)
        for x in model.parameters():
            x.copy_(x.bfloat16())
    model.save_pretrained(folder)
    return model.eval()


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """By transformers, in float32."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def write_odd(kind: str) -> None:
    """Write the odd model of a family with its logits and gradients."""
    import torch
    from safetensors.torch import load_file, save_file

    tokens = np.random.default_rng(0).integers(0, ODD["vocab_size"], (2, NUM_TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        model = made(kind, Path(folder), {**ODD, **ODD_MODELS[kind]})
        config = json.loads((Path(folder) / "config.json").read_text()) | {"dtype": "bfloat16"}
        weights = load_file(str(Path(folder) / "model.safetensors"))
    logits = logits_of(model, tokens)
    found = model(torch.from_numpy(tokens)).logits[:, :-1]
    torch.nn.functional.cross_entropy(found.flatten(0, 1), torch.from_numpy(tokens)[:, 1:].flatten()).backward()
    gradients = {f"gradient.{name}": x.grad for name, x in model.named_parameters() if x.grad is not None}
    golden = {"golden.logits": torch.from_numpy(logits), "golden.tokens": torch.from_numpy(tokens), **gradients}
    weights = {name: x.bfloat16() for name, x in weights.items()}
    (GOLDEN / "odd").mkdir(exist_ok=True)
    save_file({**weights, **golden}, str(GOLDEN / f"odd/{kind}.safetensors"), metadata={"config": json.dumps(config)})


def router_losses() -> dict[str, list[float]]:
    """Auxiliary losses of routers, times the coefficient: of all layers pooled, and the mean over single layers."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    from tests.interop.folders import ROUTER_CASES, router_folder, router_tokens

    losses = {}
    for kind, layers in ROUTER_CASES:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(router_folder(kind, layers, Path(folder) / "model"))
            tokens = torch.from_numpy(router_tokens())
            on, off = (model(tokens, labels=tokens, output_router_logits=is_on) for is_on in (True, False))
        config = model.config
        count, chosen = config.num_experts, config.num_experts_per_tok
        alone = [load_balancing_loss_func((logits,), count, chosen) for logits in on.router_logits]
        per_layer = config.router_aux_loss_coef * float(sum(alone)) / layers
        losses[f"{kind} {layers}"] = [round(float(on.loss - off.loss), 7), round(per_layer, 7)]
    return losses


def main() -> None:
    import torch
    from safetensors.torch import load_file, save_file

    GOLDEN.mkdir(exist_ok=True)
    if sys.argv[1:2] == ["odd"]:
        for kind in sys.argv[2:] or ODD_MODELS:
            write_odd(kind)
        return
    (GOLDEN / "router_loss.json").write_text(json.dumps(router_losses(), indent=2) + "\n")
    if sys.argv[1:] == ["router_loss"]:
        return
    tokens = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, NUM_TOKENS))
    for kind in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            model = made(kind, Path(folder))
            config = json.loads((Path(folder) / "config.json").read_text())
            weights = load_file(str(Path(folder) / "model.safetensors"))
        config |= {"dtype": "bfloat16"}
        if kind == "deepseek_v3":
            weights |= predicts_second(weights, config)
        kept = {name: x if "bias" in name else x.bfloat16() for name, x in weights.items()}
        beside = {
            "golden.logits": torch.from_numpy(logits_of(model, tokens)),
            "golden.tokens": torch.from_numpy(tokens),
        }
        save_file({**kept, **beside}, str(GOLDEN / f"{kind}.safetensors"), metadata={"config": json.dumps(config)})


def predicts_second(weights: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a module that predicts a second token, which releases have and transformers leaves out."""
    import torch

    last, behind = (f"model.layers.{config['num_hidden_layers'] - add}." for add in (1, 0))
    width, vocab = config["hidden_size"], config["vocab_size"]
    layer = {behind + name.removeprefix(last): x.clone() for name, x in weights.items() if name.startswith(last)}
    shapes = {
        "embed_tokens": (vocab, width), "enorm": (width,), "hnorm": (width,), "eh_proj": (width, 2 * width),
        "shared_head.norm": (width,), "shared_head.head": (vocab, width),
    }  # fmt: skip
    return layer | {f"{behind}{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


if __name__ == "__main__":
    main()
