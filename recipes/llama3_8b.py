"""Llama 3.1 8B on 64 GPUs (eight nodes) with fsdp.

    meshpar shard recipes/llama3_8b.py                                   # the sharding of all parameters
    meshpar shard recipes/llama3_8b.py --mesh fsdp=16,tensor=4           # with tensor parallelism
    meshpar explain recipes/llama3_8b.py --cluster h100:8x8
    meshpar train recipes/llama3_8b.py --text /data/corpus --tokenizer /data/tokenizer.json      # on the pod

Hardware: 64 GPUs with 80 GB. The state is 12 bytes per parameter, sharded over all GPUs: 1.51 GB on each GPU. A step
has 2,097,152 tokens. The recipe is tested with `meshpar shard` and `meshpar explain`, but not measured on hardware.

`explain` needs two minutes and 0.9 GB on two CPU cores. It estimates 59 of 80 GB in use. Each GPU sends 117 GB per
step: in each micro-step it all-gathers the weights twice and reduce-scatters the gradients once. The simulated
step lasts 3.2 s, and 89 % of the communication is hidden. Four micro-steps with remat="dots" need half the memory and
twice the communication.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import llama3_8b, next_token_loss


def recipe(devices: int = 64) -> mp.Recipe:
    # Mesh: only fsdp. A layer easily fits in GPU memory, so tensor parallelism is not needed.
    mesh = mp.MeshSpec(fsdp=devices)

    # Model: the published config, with cuDNN's flash attention.
    model = llama3_8b(attention="cudnn")

    # Strategy: shard parameters, gradients and optimizer state. All-gather the weights of a layer during the
    # previous layer.
    strategy = mp.fsdp(prefetch=1)

    # Data: text and tokenizer from the command line. The tokens are cached between runs. For a mixture, add
    # sources={"/data/web": 0.7, "/data/code": 0.3}.
    data = TextData(seq_len=8192, valid_batches=2, cache="runs/tokens")

    # Optimizer: the published learning rate, warm-up and weight decay.
    optimizer = mp.AdamW(lr=3e-4, warmup_steps=2000, weight_decay=0.1, clip_norm=1.0)

    # Run: bfloat16 compute with float32 parameters, and two micro-steps of two sequences per GPU. Outputs of matmuls
    # and attention are saved for the backward pass.
    return mp.Recipe(
        name="llama3_8b",
        mesh=mesh,
        strategy=strategy,
        model=model,
        loss=next_token_loss,
        data=data,
        optimizer=optimizer,
        steps=100_000,
        batch_size=4 * devices,
        step=mp.StepOptions(
            accumulate=2,
            precision=mp.Precision(compute="bfloat16"),
            remat="minimal",
            nonfinite="skip",
        ),
        validate_every=1000,
        checkpoint_every=1000,
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
