r"""The main recipe's decoder, with four layers, split in three ways: data, pipeline and tensor parallelism.

    meshpar train recipes/gpt_3d.py
    meshpar explain recipes/gpt_3d.py --check           # each device sends 11.9 MB a step, once 0.9 MB of it over data
    meshpar train recipes/gpt_3d.py --set mesh.data=1 --set mesh.stage=4 \
        --set 'strategy=pipeline_parallel(stages=4, microbatches=8) | ddp() | tensor_parallel()'

Stop the first, and the last goes on from its checkpoint, on a mesh with other stages and another schedule.

Hardware: two CPU cores, as 8 host devices (mesh data=2, stage=2, tensor=2); GPUs where there are any. It takes 110 s of
CPU time with compilation and report. Held-out loss 1.90 nats, which is 2.75 bits per byte; a bigram model has 3.50 on
the same bytes. Losses are those of `recipes/gpt_pipeline.py`, to 4e-5 in each of the 200 steps.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import TransformerConfig, next_token_loss


def recipe(devices: int = 8) -> mp.Recipe:
    # Mesh: every kind of split once, where it divides: pairs share each layer's work, pairs of pairs the layers, the
    # rest the batch. Tensor talks most and is innermost; data talks once a step and is outermost.
    tensor = 2 if devices % 2 == 0 else 1
    stages = 2 if devices // tensor % 2 == 0 else 1
    data = devices // tensor // stages
    mesh = mp.MeshSpec(data=data, stage=stages, tensor=tensor)

    # Model: the main recipe's, with four layers.
    model = TransformerConfig(
        vocab_size=256,
        num_layers=4,
        embed_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=384,
    )

    # Strategy: with ZB-V a stage has two parts of the model, its first from the front and its second from the back, so
    # a batch goes down the stages and back up. Gradients are reduced over `data` once, behind the last microbatch.
    strategy = mp.ddp() | mp.tensor_parallel() if tensor > 1 else mp.ddp()
    if stages > 1:
        strategy = mp.pipeline_parallel(stages=stages, microbatches=4, schedule="zb-v") | strategy

    # Data: whole files are held out, by the hash of their names.
    text = TextData(files=("stdlib",), tokenizer="bytes", seq_len=256, valid_batches=32)

    # Optimizer: the rate rises for 50 steps and falls along a cosine to a tenth.
    optimizer = mp.AdamW(lr=4e-3, warmup_steps=50, weight_decay=0.1, clip_norm=1.0)

    # Run: every microbatch has a row for each device that the batch is sharded over.
    return mp.Recipe(
        name="gpt_3d",
        mesh=mesh,
        strategy=strategy,
        model=model,
        loss=next_token_loss,
        data=text,
        optimizer=optimizer,
        steps=200,
        batch_size=4 * data,
        validate_every=100,
        checkpoint_every=100,
        sample=mp.Sample(prompt="def ", num_tokens=240, temperature=0.7),
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
