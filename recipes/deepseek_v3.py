"""DeepSeek-V3 on 2,048 GPUs: four of its 256 experts on each of 64 ranks, everything else over fsdp.

    meshpar shard recipes/deepseek_v3.py                                # every leaf, its spec, bytes per device
    meshpar explain recipes/deepseek_v3.py --cluster h100:256x8
    meshpar train recipes/deepseek_v3.py --text /data/corpus --tokenizer /data/tokenizer.json           # on the pod

Hardware: 2,048 GPUs of 80 GB, as in the paper, which has 16 pipeline stages where this has fsdp. 671e9 parameters, of
which 37e9 are active; the module that predicts a second token is left out. State is 10.21 GB on each GPU: 12 bytes a
parameter, experts over all GPUs, the rest over 32. One step is 67,108,864 tokens.
Tried with `meshpar shard` and `meshpar explain`; to be measured by whoever has the pod.

`explain` (jax 0.10) finds 74 GB of 80 in use. In a step of two micro-steps each GPU sends 0.38 TB of tokens between the
nodes (data), and on inside them over NVLink (expert), and 0.40 TB of weights and gradients over fsdp; with --check it
passes. Layers run on two slices of the examples, so that messages of one slice overlap with matmuls of the other, and
sum their gradients before the reduction: 45 s a step, 34 % of the communication hidden. By default XLA's scheduler uses
95 % of the memory that the state leaves of four fifths of a GPU. A program that needs that much saves memory instead of
hiding messages, so this recipe allows 115 %.
"""

from __future__ import annotations

import dataclasses

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import deepseek_v3, next_token_loss


def recipe(devices: int = 2048) -> mp.Recipe:
    # Mesh: 64 ranks of experts as in the paper, eight nodes (data) of eight GPUs (expert); fsdp across these.
    expert = min(8, devices)
    nodes = min(8, devices // expert)
    mesh = mp.MeshSpec(data=nodes, fsdp=devices // (nodes * expert), expert=expert)

    # Model: the real sizes, with latent attention, a shared expert, and balance by a bias. Room for any routing would
    # be a million rows a layer, 15 GB for each array of them; for twice an even load from each rank it is a sixteenth,
    # and what is above that drops.
    model = deepseek_v3(attention="cudnn")
    # A token goes once to each of the four nodes it visits, and on from there over NVLink; out in fp8, as in the paper.
    moe = dataclasses.replace(
        model.moe, bound_factor=2.0, implementation="node-first", payload=mp.moe.Payload(dispatch="fp8")
    )
    model = dataclasses.replace(model, moe=moe)

    # Strategy: every rank of data × expert owns four experts of a layer, cut over fsdp; tokens are split over all axes.
    strategy = mp.fsdp(prefetch=1) | mp.expert_parallel(axis=("data", "expert"))

    # Data: your own text and tokenizer, from the command line.
    data = TextData(seq_len=4096, valid_batches=2, cache="runs/tokens")

    # Optimizer: the published peak rate, warm-up, decay and clipping.
    optimizer = mp.AdamW(lr=2.2e-4, warmup_steps=2000, weight_decay=0.1, clip_norm=1.0)

    # Run: four rows of 4,096 tokens for each GPU and micro-step, two in a slice. XLA may fill more of the memory: near
    # its limit it saves memory instead of hiding messages.
    return mp.Recipe(
        name="deepseek_v3",
        mesh=mesh,
        strategy=strategy,
        model=model,
        loss=next_token_loss,
        data=data,
        optimizer=optimizer,
        steps=220_000,
        batch_size=8 * devices,
        accumulate=2,
        interleave=2,
        precision=mp.Precision(compute="bfloat16"),
        remat="full",
        xla={"xla_gpu_memory_limit_slop_factor": 115},
        nonfinite="skip",
        validate_every=1000,
        checkpoint_every=500,
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
