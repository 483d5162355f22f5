"""Fine-tune a model of Hugging Face's on the Python standard library's own source, and take it home.

    meshpar train recipes/finetune_hf.py --from-hf Llama-3.2-1B --set batch_size=64
    meshpar convert to-hf runs/finetune_hf finetuned --dtype bfloat16

or adapters alone, over matrices that stay as they are:

    meshpar train recipes/finetune_hf.py --from-hf Llama-3.1-8B --set lora.rank=16 --set optimizer.lr=1e-4 --name lora
    meshpar convert to-peft runs/lora adapter --base meta-llama/Llama-3.1-8B

The folder gives the model's sizes, its weights and its tokenizer; the recipe says how the model is sharded, computed
and trained. Without a folder, `meshpar train recipes/finetune_hf.py --name small` trains a small Llama over bytes from
random weights.

Hardware: any; eight GPUs hold a model of 8 billion parameters in float32 with its moments. The small one takes two CPU
cores, as 8 host devices.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import RopeScaling, TransformerConfig, next_token_loss


def recipe(devices: int = 8) -> mp.Recipe:
    # Mesh: every device has its own rows, and an equal part of parameters, gradients and moments as often as 2 goes.
    fsdp = devices & -devices
    mesh = mp.MeshSpec(data=devices // fsdp, fsdp=fsdp)

    # Model: that of `--from-hf`, computed as said here. Without it, a small Llama over bytes.
    model = TransformerConfig(
        vocab_size=256,
        num_layers=2,
        embed_dim=64,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        mlp_dim=192,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(),
    )

    # Data: the folder's tokenizer, where it has one.
    data = TextData(files=("stdlib",), tokenizer="bytes", seq_len=256, valid_batches=16)

    # Optimizer: a small rate that falls to nothing, and no decay towards zero of what was learnt before.
    optimizer = mp.AdamW(lr=1e-5, warmup_steps=20, weight_decay=0.0, final_lr=0.0, clip_norm=1.0)

    # Run: parameters and moments in float32, as small steps need; matmuls in bfloat16.
    return mp.Recipe(
        name="finetune_hf",
        mesh=mesh,
        strategy=mp.fsdp() if fsdp == devices else mp.hsdp(),
        model=model,
        loss=next_token_loss,
        data=data,
        optimizer=optimizer,
        precision=mp.Precision(compute="bfloat16"),
        remat="minimal",
        steps=200,
        batch_size=devices,
        validate_every=100,
        sample=mp.Sample(prompt="def ", num_tokens=64, temperature=0.7),
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
