"""Llama 3.1 405B on 4,096 GPUs (512 nodes).

    meshpar shard recipes/llama3_405b.py                                 # the sharding of all parameters
    meshpar shard recipes/llama3_405b.py --json | python -m json.tool    # the same in JSON
    meshpar shard recipes/llama3_405b.py --set model.num_layers=8        # with a changed field
    meshpar explain recipes/llama3_405b.py --cluster h100:512x8

Hardware: 4,096 GPUs with 80 GB. The state is 12 bytes per parameter, sharded over the 512 GPUs of a group: 9.51 GB on
each GPU. A step has 16,777,216 tokens. The recipe is tested with `meshpar shard` and `meshpar explain`, but not
measured on hardware.

`explain` estimates 45 of 80 GB in use. In each step a GPU sends 595 GB over fsdp, 1.3 TB over tensor, and 11 GB over
data (between groups). A step takes 23 s with 94 % of the communication hidden.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import llama3_405b, next_token_loss


def recipe(devices: int = 4096) -> mp.Recipe:
    # Mesh: tensor parallelism inside a node, and fsdp in groups of 64 nodes with a replica of the parameters each.
    tensor, groups = 8, max(devices // 512, 1)
    mesh = mp.MeshSpec(data=groups, fsdp=devices // (tensor * groups), tensor=tensor)

    # Model: the published config.
    model = llama3_405b(attention="cudnn")

    # Strategy: parameters are replicated over data, so that groups exchange only sharded gradients. mp.hsdp() has the
    # same rules but needs more than one group; fsdp() also supports --mesh fsdp=512,tensor=8. The weights of a layer
    # are all-gathered during the previous layer.
    strategy = mp.fsdp(prefetch=1) | mp.tensor_parallel(sequence=True)

    # Data: text and tokenizer from the command line.
    data = TextData(seq_len=8192, valid_batches=2, cache="runs/tokens")

    # Optimizer: the published learning rate, warm-up and weight decay.
    optimizer = mp.AdamW(lr=8e-5, warmup_steps=8000, weight_decay=0.1, clip_norm=1.0)

    # Run: four sequences of 8,192 tokens for each node, in two slices. Communication of a slice over tensor overlaps
    # with matmuls of the other. Only the inputs of layers are saved for the backward pass.
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
        step=mp.StepOptions(batch_slices=2, precision=mp.Precision(compute="bfloat16"), remat="full", nonfinite="skip"),
        validate_every=1000,
        checkpoint_every=500,
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
