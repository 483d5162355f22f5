"""Llama 3.1 70B on 512 GPUs: layers split over the eight GPUs of a node, everything else over the 64 nodes.

    meshpar shard recipes/llama3_70b.py                                  # every leaf, its spec, bytes per device
    meshpar shard recipes/llama3_70b.py --mesh data=8,fsdp=64 --strategy 'hsdp()'        # groups of 64, eight copies
    meshpar explain recipes/llama3_70b.py --cluster h100:64x8
    meshpar train recipes/llama3_70b.py --text /data/corpus --tokenizer /data/tokenizer.json     # on the pod

Hardware: 512 GPUs of 80 GB. State is 12 bytes a parameter over 512 devices: 1.65 GB each. One step is 4,194,304 tokens.
Tried with `meshpar shard` and `meshpar explain`; to be measured by whoever has the pod.

`explain` (jax 0.10) finds 51 GB of 80 in use, 68 GB sent by each GPU over fsdp and 755 GB over tensor in a step, and a
step of 8.5 s, 83 % of the communication hidden. By the same simulation --set interleave=4 takes 7.9 s and hides 90 %
(jax 0.12). One row a micro-step, eight of them, computes too little to hide the messages between nodes.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import llama3_70b, next_token_loss


def recipe(devices: int = 512) -> mp.Recipe:
    # Mesh: tensor inside a node, where links are fast; fsdp across nodes, where gathers overlap with compute.
    tensor = 8
    mesh = mp.MeshSpec(fsdp=devices // tensor, tensor=tensor)

    # Model: the real sizes. Its eight key/value heads are just enough for tensor=8.
    model = llama3_70b(attention="cudnn")

    # Strategy: sequence parallelism, so that norms and the residual stream are split over tensor as well; each layer's
    # weights are gathered between nodes during the layer before.
    strategy = mp.fsdp(prefetch=1) | mp.tensor_parallel(sequence=True)

    # Data: your own text and tokenizer, from the command line.
    data = TextData(seq_len=8192, valid_batches=2, cache="runs/tokens")

    # Optimizer: the published peak rate, warm-up and weight decay.
    optimizer = mp.AdamW(lr=1.5e-4, warmup_steps=2000, weight_decay=0.1, clip_norm=1.0)

    # Run: all eight rows of 8,192 tokens of a node at once, so that a layer computes longer than it is sent, and in
    # two slices, so that messages of one slice over tensor overlap with matmuls of the other. On few nodes, where the
    # state takes more of the memory, one row a micro-step.
    many = devices > 128
    return mp.Recipe(
        name="llama3_70b",
        mesh=mesh,
        strategy=strategy,
        model=model,
        loss=next_token_loss,
        data=data,
        optimizer=optimizer,
        steps=100_000,
        batch_size=8 * (devices // tensor),
        accumulate=1 if many else 8,
        interleave=2 if many else 1,
        precision=mp.Precision(compute="bfloat16"),
        remat="save:query,key,value,attention_out" if many else "dots",
        nonfinite="skip",
        validate_every=1000,
        checkpoint_every=500,
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
