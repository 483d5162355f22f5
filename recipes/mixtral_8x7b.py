"""Mixtral 8x7B on 64 GPUs: an expert on each GPU of a node, everything else over the eight nodes.

    meshpar shard recipes/mixtral_8x7b.py                               # every leaf, its spec, bytes per device
    meshpar explain recipes/mixtral_8x7b.py --cluster h100:8x8
    meshpar train recipes/mixtral_8x7b.py --text /data/corpus --tokenizer /data/tokenizer.json          # on the pod

Hardware: 64 GPUs of 80 GB. 46.7e9 parameters, of which 12.9e9 are active. State is 10.86 GB on each GPU: 12 bytes a
parameter, experts over all 64 GPUs, the rest over eight. One step is 4,194,304 tokens.
Tried with `meshpar shard` and `meshpar explain`; to be measured by whoever has the pod.

`explain` finds 49 GB of 80 in use, and in a step of two micro-steps 183 GB of tokens sent by each GPU over expert,
inside a node, and 100 GB of weights and gradients over fsdp; with --check it passes. A step takes 16.5 s, 53 % of the
communication hidden. Where 49 GB are too much, accumulate=4 with strategy=fsdp()|expert_parallel() takes 33 GB, sends
those weights twice as often and takes 18.6 s.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import mixtral_8x7b, next_token_loss


def recipe(devices: int = 64) -> mp.Recipe:
    # Mesh: experts inside a node, whose links carry every token there and back in each layer; fsdp across nodes.
    expert = 8
    mesh = mp.MeshSpec(fsdp=devices // expert, expert=expert)

    # Model: the real sizes. Nothing is dropped, and Mixtral's own auxiliary loss keeps the load even.
    model = mixtral_8x7b(attention="cudnn")

    # Strategy: every rank of `expert` owns one expert, cut over fsdp; tokens are split over both axes. Each layer's
    # weights are gathered between nodes during the layer before.
    strategy = mp.fsdp(prefetch=1) | mp.expert_parallel()

    # Data: your own text and tokenizer, from the command line.
    data = TextData(seq_len=8192, valid_batches=2, cache="runs/tokens")

    # Optimizer: a usual rate for this size; the paper gives none.
    optimizer = mp.AdamW(lr=2e-4, warmup_steps=2000, weight_decay=0.1, clip_norm=1.0)

    # Run: four rows of 8,192 tokens for each GPU and micro-step: half as many gathers of weights as by two rows.
    return mp.Recipe(
        name="mixtral_8x7b",
        mesh=mesh,
        strategy=strategy,
        model=model,
        loss=next_token_loss,
        data=data,
        optimizer=optimizer,
        steps=100_000,
        batch_size=8 * devices,
        accumulate=2,
        precision=mp.Precision(compute="bfloat16"),
        remat="full",
        nonfinite="skip",
        validate_every=1000,
        checkpoint_every=500,
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
