r"""Byte-level decoder with long sequences and context parallelism.

    meshpar train recipes/long_context.py
    meshpar train recipes/long_context.py --set data.seq_len=4096 --set batch_size=2 --name longer
    meshpar explain recipes/long_context.py --check     # each device sends 12.6 MB per step, half in the ring

Llama 3.1 8B with sequences of 131,072 tokens on 64 GPUs and cuDNN's kernel in the ring needs 7.0 s per step (compute
bound) and 13 GB on each device:

    meshpar explain recipes/llama3_8b.py --cluster h100:8x8 --mesh fsdp=8,context=8 \
        --strategy "fsdp(axis=('fsdp','context')) | context_parallel()" --set data.seq_len=131072 \
        --set batch_size=8 --set step.accumulate=1 --set step.remat=full

Hardware: two CPU cores with 8 host devices (mesh fsdp=2, context=4), or GPUs. Training needs 275 s of CPU time,
including compilation and the report. The validation loss is 1.82 nats (2.63 bits per byte; a bigram model has 3.47).
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import TransformerConfig, next_token_loss


def recipe(devices: int = 8) -> mp.Recipe:
    # Mesh: context parallelism over up to four devices, and fsdp over the largest power of two that divides the rest.
    context = next(size for size in (4, 2, 1) if devices % size == 0)
    batch_shards = devices // context
    fsdp = batch_shards & -batch_shards
    mesh = mp.MeshSpec(data=batch_shards // fsdp, fsdp=fsdp, context=context)

    # Model: a vocabulary of 256 bytes. The largest rotary wavelength exceeds the sequence length.
    model = TransformerConfig(
        vocab_size=256,
        num_layers=2,
        embed_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=384,
        rope_theta=50_000.0,
    )

    # Strategy: ring attention over the devices that share a sequence. Parameters are sharded over all devices.
    strategy = mp.fsdp(axis=("fsdp", "context")) | mp.context_parallel() if context > 1 else mp.fsdp()

    # Data: each device in the ring has two chunks of a sequence, so the length must be a multiple of 2 × 4.
    data = TextData(files=("stdlib",), tokenizer="bytes", seq_len=1024, valid_batches=16)

    # Optimizer: linear warm-up for 40 steps, then cosine decay to a tenth.
    optimizer = mp.AdamW(lr=4e-3, warmup_steps=40, weight_decay=0.1, clip_norm=1.0)

    # Run: recompute layers in the backward pass, since activations of long sequences dominate the memory.
    return mp.Recipe(
        name="long_context",
        mesh=mesh,
        strategy=strategy,
        model=model,
        loss=next_token_loss,
        data=data,
        optimizer=optimizer,
        steps=400,
        batch_size=-(-4 // batch_shards) * batch_shards,
        step=mp.StepOptions(remat="full"),
        validate_every=200,
        checkpoint_every=200,
        sample=mp.Sample(prompt="def ", num_tokens=120, temperature=0.7),
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
