"""DeepSeek-V3 on 2,048 GPUs with expert parallelism over 64 devices and fsdp over the remaining 32.

    meshpar shard recipes/deepseek_v3.py                                # the sharding of all parameters
    meshpar explain recipes/deepseek_v3.py --cluster h100:256x8
    meshpar train recipes/deepseek_v3.py --text /data/corpus --tokenizer /data/tokenizer.json           # on the pod

Hardware: 2,048 GPUs with 80 GB, as in the paper, which uses 16 pipeline stages instead of fsdp. The model has 671e9
parameters (37e9 active) without the multi-token prediction module. The state needs 10.21 GB on each GPU: 12 bytes per
parameter, with experts sharded over all GPUs and other parameters over 32. A step has 67,108,864 tokens. The recipe is
tested with `meshpar shard` and `meshpar explain`, but not measured on hardware.

`explain --check` passes (jax 0.10) and estimates 75 of 80 GB in use. In a step of two micro-steps each GPU sends 0.38
TB of tokens between nodes (data), 1.9 TB over NVLink (expert), and 0.60 TB of weights and gradients (fsdp). Layers
process two slices of the batch, so that communication of a slice overlaps with matmuls of the other. Each slice
reduces its weight gradients. The simulated step lasts 50 s, and 29 % of the communication is hidden. By default, XLA's
scheduler may use 95 % of the free memory, which is 80 % of the GPU memory minus the state. Close to this limit it
reduces memory instead of hiding communication, so this recipe allows 115 %.
"""

from __future__ import annotations

import dataclasses

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import deepseek_v3, next_token_loss


def recipe(devices: int = 2048) -> mp.Recipe:
    # Mesh: expert parallelism over 64 GPUs as in the paper, on eight nodes (data) with eight GPUs (expert).
    expert = min(8, devices)
    nodes = min(8, devices // expert)
    mesh = mp.MeshSpec(data=nodes, fsdp=devices // (nodes * expert), expert=expert)

    # Model: the published config. Receive buffers for any routing would need a million tokens per layer, 15 GB for each
    # array. With bound_factor=2 they have space for twice the balanced load of each device, and drop further tokens.
    model = deepseek_v3(attention="cudnn")
    # A token is sent once to the four nodes of its experts, then over NVLink. The dispatch is in fp8, as in the paper.
    moe = dataclasses.replace(
        model.moe, bound_factor=2.0, implementation="node-first", payload=mp.moe.Payload(dispatch="fp8")
    )
    model = dataclasses.replace(model, moe=moe)

    # Strategy: each device of data × expert has four experts per layer, which are also sharded over fsdp. The batch is
    # sharded over all axes.
    strategy = mp.fsdp(prefetch=1) | mp.expert_parallel(axis=("data", "expert"))

    # Data: text and tokenizer from the command line.
    data = TextData(seq_len=4096, valid_batches=2, cache="runs/tokens")

    # Optimizer: the published learning rate, warm-up, weight decay and clipping.
    optimizer = mp.AdamW(lr=2.2e-4, warmup_steps=2000, weight_decay=0.1, clip_norm=1.0)

    # Run: four sequences of 4,096 tokens for each GPU and micro-step, in two slices.
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
        step=mp.StepOptions(
            accumulate=2,
            batch_slices=2,
            precision=mp.Precision(compute="bfloat16"),
            remat="full",
            xla={"xla_gpu_memory_limit_slop_factor": 115},
            nonfinite="skip",
        ),
        validate_every=1000,
        checkpoint_every=500,
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
