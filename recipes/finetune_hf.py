"""Fine-tuning of a Hugging Face model on the source code of the Python standard library.

    meshpar train recipes/finetune_hf.py --from-hf Llama-3.2-1B --set batch_size=64
    meshpar convert to-hf runs/finetune_hf finetuned --dtype bfloat16

Train LoRA adapters instead:

    meshpar train recipes/finetune_hf.py --from-hf Llama-3.1-8B --set lora.rank=16 --set optimizer.lr=1e-4 --name lora
    meshpar convert to-peft runs/lora adapter --base meta-llama/Llama-3.1-8B

The folder determines the config of the model, its weights and the tokenizer. The recipe determines the sharding, the
precision and the training. Without a folder, `meshpar train recipes/finetune_hf.py --name small` trains a small
byte-level Llama from random weights.

Hardware: eight GPUs for the float32 parameters and optimizer state of a model with 8e9 parameters. The small model
needs two CPU cores with 8 host devices.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import RopeScaling, TransformerConfig, next_token_loss


def recipe(devices: int = 8) -> mp.Recipe:
    # Mesh: shard the batch over all devices, and the training state over the largest power of two that divides them.
    fsdp = devices & -devices
    mesh = mp.MeshSpec(data=devices // fsdp, fsdp=fsdp)

    # Model: a small byte-level Llama. `--from-hf` replaces its sizes.
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

    # Data: `--from-hf` replaces the tokenizer.
    data = TextData(files=("stdlib",), tokenizer="bytes", seq_len=256, valid_batches=16)

    # Optimizer: a small learning rate that decays to zero, without weight decay of the pretrained weights.
    optimizer = mp.AdamW(lr=1e-5, warmup_steps=20, weight_decay=0.0, final_lr=0.0, clip_norm=1.0)

    # Run: float32 parameters and optimizer state, because updates are small. Matmuls are in bfloat16.
    return mp.Recipe(
        name="finetune_hf",
        mesh=mesh,
        strategy=mp.fsdp() if fsdp == devices else mp.hsdp(),
        model=model,
        loss=next_token_loss,
        data=data,
        optimizer=optimizer,
        steps=200,
        batch_size=devices,
        step=mp.StepOptions(precision=mp.Precision(compute="bfloat16"), remat="minimal"),
        validate_every=100,
        sample=mp.Sample(prompt="def ", num_tokens=64, temperature=0.7),
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
