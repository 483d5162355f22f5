"""Llama 3.1 405B on 4,096 GPUs: 512 nodes of eight.

    meshpar shard recipes/llama3_405b.py                                 # every leaf, its spec, bytes per device
    meshpar shard recipes/llama3_405b.py --json | python -m json.tool    # the same, for a program
    meshpar shard recipes/llama3_405b.py --set model.num_layers=8        # any field can be set
    meshpar explain recipes/llama3_405b.py --cluster h100:512x8

Hardware: 4,096 GPUs of 80 GB. State is 12 bytes a parameter over the 512 GPUs of a group: 9.51 GB each. One step is
16,777,216 tokens. Tried with `meshpar shard` and `meshpar explain`; to be measured by whoever has the pod.

`explain` finds 43 GB of 80 in use, 397 GB sent by each GPU over fsdp and 1.3 TB over tensor in a step, and only 6 GB
over data, between the groups; and a step of 22 s, 93 % of the communication hidden.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import llama3_405b, next_token_loss


def recipe(devices: int = 4096) -> mp.Recipe:
    # Mesh: tensor inside a node; parameters over 64 nodes; each further 64 hold a copy, so gathers stay inside.
    tensor, groups = 8, max(devices // 512, 1)
    mesh = mp.MeshSpec(data=groups, fsdp=devices // (tensor * groups), tensor=tensor)

    # Model: the real sizes.
    model = llama3_405b(attention="cudnn")

    # Strategy: copies over data, so between the groups only gradients travel, and each GPU's are 1/512 of the whole.
    # mp.hsdp() is the same rules, but insists on several groups; this serves --mesh fsdp=512,tensor=8, too.
    # Each layer's weights are gathered between nodes during the layer before.
    strategy = mp.fsdp(prefetch=1) | mp.tensor_parallel(sequence=True)

    # Data: your own text and tokenizer, from the command line.
    data = TextData(seq_len=8192, valid_batches=2, cache="runs/tokens")

    # Optimizer: the published peak rate, warm-up and weight decay.
    optimizer = mp.AdamW(lr=8e-5, warmup_steps=8000, weight_decay=0.1, clip_norm=1.0)

    # Run: four rows of 8,192 tokens for each node, in two slices, one's messages over tensor behind the matmuls of the
    # other; layers keep their input only.
    return mp.Recipe(
        name="llama3_405b",
        mesh=mesh,
        strategy=strategy,
        model=model,
        loss=next_token_loss,
        data=data,
        optimizer=optimizer,
        steps=1_200_000,
        batch_size=4 * (devices // tensor),
        interleave=2,
        precision=mp.Precision(compute="bfloat16"),
        remat="full",
        nonfinite="skip",
        validate_every=1000,
        checkpoint_every=500,
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
