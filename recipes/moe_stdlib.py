"""A small mixture of experts on the text of the main recipe (gpt_stdlib.py), its load shown while it trains.

    meshpar train recipes/moe_stdlib.py                    # the busiest expert and rank stand beside the loss
    meshpar train recipes/moe_stdlib.py --set model.moe.bias_rate=0.001 --name slowly_balanced

Hardware: two CPU cores, as 8 host devices (mesh fsdp=2, expert=4); GPUs where there are any. It takes 530 s of CPU time
with compilation and report. Held-out loss 1.397 nats after 1,000 steps (1.391 with --devices 1), and 1.412 of the dense
recipe, gpt_stdlib.py, with the same FLOPs a token, rows and steps. Over the last steps the busiest expert of a layer
had 1.15 times the mean, the busiest rank 1.03 times.

It takes that many steps: a run of 300 ends at 1.828 nats and the dense one's at 1.778, for each expert has then seen an
eighth of 614,400 tokens, and the first hundred steps went into evening out their load. At a tenth of the bias rate the
busiest expert had 3.6 times the mean after 240 steps.
"""

from __future__ import annotations

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing


def recipe(devices: int = 8) -> mp.Recipe:
    # Mesh: four ranks share the experts, or two, or one has all; the rest split parameters.
    expert = next(size for size in (4, 2, 1) if devices % size == 0)
    rows = devices // expert
    fsdp = rows & -rows
    mesh = mp.MeshSpec(data=rows // fsdp, fsdp=fsdp, expert=expert)

    # Model: that of gpt_stdlib.py, its MLP of 384 cut into three active ones of 128, out of 16 and a shared one. So as
    # many parameters are active as there, but for the router's.
    model = TransformerConfig(
        vocab_size=256,
        num_layers=2,
        embed_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=128,
        moe=MoEConfig(
            routing=Routing(num_experts=16, top_k=2, score="sigmoid"),
            mlp_dim=128,
            shared_experts=1,
            bias_rate=0.01,  # ten times the published rate, for a run of a few hundred steps
        ),
    )

    # Strategy: experts to their ranks, everything cut by fsdp as well; tokens are split over all axes. An odd number of
    # devices has a copy each.
    strategy = mp.fsdp() | mp.expert_parallel() if expert > 1 else mp.ddp()

    # Data: whole files are held out, by the hash of their names.
    data = TextData(files=("stdlib",), tokenizer="bytes", seq_len=256, valid_batches=32)

    # Optimizer: the rate rises for 50 steps and falls along a cosine to a tenth.
    optimizer = mp.AdamW(lr=4e-3, warmup_steps=50, weight_decay=0.1, clip_norm=1.0)

    # Run.
    return mp.Recipe(
        name="moe_stdlib",
        mesh=mesh,
        strategy=strategy,
        model=model,
        loss=next_token_loss,
        data=data,
        optimizer=optimizer,
        steps=1000,
        batch_size=-(-8 // devices) * devices,
        validate_every=200,
        checkpoint_every=200,
        sample=mp.Sample(prompt="def ", num_tokens=240, temperature=0.7),
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
