"""Mixtral 8x7B on 64 GPUs with expert parallelism inside nodes and fsdp over eight nodes.

    meshpar shard recipes/mixtral_8x7b.py                               # the sharding of all parameters
    meshpar explain recipes/mixtral_8x7b.py --cluster h100:8x8
    meshpar train recipes/mixtral_8x7b.py --text /data/corpus --tokenizer /data/tokenizer.json          # on the pod

Hardware: 64 GPUs with 80 GB. The model has 46.7e9 parameters (12.9e9 active). The state needs 10.86 GB on each GPU: 12
bytes per parameter, with experts sharded over all GPUs and other parameters over eight. A step has 4,194,304 tokens.
The recipe is tested with `meshpar shard` and `meshpar explain`, but not measured on hardware.

`explain --check` passes and estimates 49 of 80 GB in use. In a step of two micro-steps each GPU sends 183 GB of tokens
inside its node (expert) and 100 GB of weights and gradients (fsdp). The simulated step lasts 16.5 s, and 53 % of the
communication is hidden. With step.accumulate=4 and strategy=fsdp()|expert_parallel(), the estimates are 33 GB and
18.6 s, with twice the communication of weights.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import mixtral_8x7b, next_token_loss


def recipe(devices: int = 64) -> mp.Recipe:
    # Mesh: expert parallelism inside a node with its fast links for the all-to-alls, and fsdp over nodes.
    expert = 8
    mesh = mp.MeshSpec(fsdp=devices // expert, expert=expert)

    # Model: the published config. No tokens are dropped, and Mixtral's auxiliary loss balances the load.
    model = mixtral_8x7b(attention="cudnn")

    # Strategy: each device along `expert` has a single expert per layer, sharded over fsdp. The batch is sharded over
    # both axes. The weights of a layer are all-gathered during the previous layer.
    strategy = mp.fsdp(prefetch=1) | mp.expert_parallel()

    # Data: text and tokenizer from the command line.
    data = TextData(seq_len=8192, valid_batches=2, cache="runs/tokens")

    # Optimizer: a typical learning rate for this size, since the paper does not report it.
    optimizer = mp.AdamW(lr=2e-4, warmup_steps=2000, weight_decay=0.1, clip_norm=1.0)

    # Run: four sequences for each GPU and micro-step. With two, the weights would be gathered twice as often.
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
        step=mp.StepOptions(accumulate=2, precision=mp.Precision(compute="bfloat16"), remat="full", nonfinite="skip"),
        validate_every=1000,
        checkpoint_every=500,
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
