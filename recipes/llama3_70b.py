"""Llama 3.1 70B on 512 GPUs with tensor parallelism inside nodes and fsdp over 64 nodes.

    meshpar shard recipes/llama3_70b.py                                  # the sharding of all parameters
    meshpar shard recipes/llama3_70b.py --mesh data=8,fsdp=64 --strategy 'hsdp()'        # eight replicas
    meshpar explain recipes/llama3_70b.py --cluster h100:64x8
    meshpar train recipes/llama3_70b.py --text /data/corpus --tokenizer /data/tokenizer.json     # on the pod

Hardware: 512 GPUs with 80 GB. The state is 12 bytes per parameter, sharded over all GPUs: 1.65 GB on each GPU. A step
has 4,194,304 tokens. The recipe is tested with `meshpar shard` and `meshpar explain`, but not measured on hardware.

`explain` (jax 0.10) estimates 51 of 80 GB in use. In each step a GPU sends 102 GB over fsdp and 755 GB over tensor. A
step takes 8.9 s with 74 % of the communication hidden. With a single sequence per micro-step, the computation is too
short to hide the communication between nodes.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import llama3_70b, next_token_loss


def recipe(devices: int = 512) -> mp.Recipe:
    # Mesh: tensor parallelism inside a node with its fast links, and fsdp over nodes, where all-gathers are overlapped.
    tensor = 8
    mesh = mp.MeshSpec(fsdp=devices // tensor, tensor=tensor)

    # Model: the published config. Its eight key/value heads allow tensor=8.
    model = llama3_70b(attention="cudnn")

    # Strategy: sequence parallelism shards norms and the residual stream over tensor. The weights of a layer are
    # all-gathered during the previous layer.
    strategy = mp.fsdp(prefetch=1) | mp.tensor_parallel(sequence=True)

    # Data: text and tokenizer from the command line.
    data = TextData(seq_len=8192, valid_batches=2, cache="runs/tokens")

    # Optimizer: the published learning rate, warm-up and weight decay.
    optimizer = mp.AdamW(lr=1.5e-4, warmup_steps=2000, weight_decay=0.1, clip_norm=1.0)

    # Run: all eight sequences of a node in a single micro-step, so that computation hides the all-gather of a layer.
    # With two slices, communication of a slice over tensor overlaps with matmuls of the other. On few nodes the state
    # takes more memory, so each micro-step has a single sequence.
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
        step=mp.StepOptions(
            accumulate=1 if many else 8,
            batch_slices=2 if many else 1,
            precision=mp.Precision(compute="bfloat16"),
            remat="save:query,key,value,attention_out" if many else "dots",
            nonfinite="skip",
        ),
        validate_every=1000,
        checkpoint_every=500,
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
