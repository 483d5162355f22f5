"""A byte-level decoder with long sequences, each split over several devices: context parallelism.

    meshpar train recipes/long_context.py
    meshpar train recipes/long_context.py --set data.seq_len=4096 --set batch_size=2 --name longer
    meshpar explain recipes/long_context.py --check     # each device sends 12.6 MB a step, half of it round the ring

Llama 3.1 8B at 131,072 tokens on 64 GPUs, where the ring's tiles are cuDNN's kernel: 7.0 s a step, bound by compute, in
13 GB a device.

    meshpar explain recipes/llama3_8b.py --cluster h100:8x8 --mesh fsdp=8,context=8 \
        --strategy "fsdp(axis=('fsdp','context')) | context_parallel()" --set data.seq_len=131072 \
        --set batch_size=8 --set accumulate=1 --set remat=full

Hardware: two CPU cores, as 8 host devices (mesh fsdp=2, context=4); GPUs where there are any. It takes 275 s of CPU
time with compilation and report. Held-out loss 1.82 nats, which is 2.63 bits per byte; a bigram model has 3.47 on the
same bytes.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import TransformerConfig, next_token_loss


def recipe(devices: int = 8) -> mp.Recipe:
    # Mesh: up to four devices share every sequence; the rest split the batch, and parameters as often as 2 goes.
    context = next(ranks for ranks in (4, 2, 1) if devices % ranks == 0)
    rows = devices // context
    fsdp = rows & -rows
    mesh = mp.MeshSpec(data=rows // fsdp, fsdp=fsdp, context=context)

    # Model: bytes in, bytes out. Rotary wavelengths reach past the longest sequence.
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

    # Strategy: keys and values of every layer go round a ring of the devices that share a sequence. Weights are split
    # over all devices, for those of a ring have the same use for them as those of a batch.
    strategy = mp.fsdp(axis=("fsdp", "context")) | mp.context_parallel() if context > 1 else mp.fsdp()

    # Data: a sequence is two chunks of equal length for every device of its ring, so a multiple of 2 x 4.
    data = TextData(files=("stdlib",), tokenizer="bytes", seq_len=1024, valid_batches=16)

    # Optimizer: the rate rises for 40 steps and falls along a cosine to a tenth.
    optimizer = mp.AdamW(lr=4e-3, warmup_steps=40, weight_decay=0.1, clip_norm=1.0)

    # Run. Layers are recomputed in the backward pass: of a long sequence their activations are what fills a device.
    return mp.Recipe(
        name="long_context",
        mesh=mesh,
        strategy=strategy,
        model=model,
        loss=next_token_loss,
        data=data,
        optimizer=optimizer,
        steps=400,
        batch_size=-(-4 // rows) * rows,
        remat="full",
        validate_every=200,
        checkpoint_every=200,
        sample=mp.Sample(prompt="def ", num_tokens=120, temperature=0.7),
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
