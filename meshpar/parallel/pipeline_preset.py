"""The preset `pipeline_parallel`."""

from __future__ import annotations

from meshpar.parallel.pipeline import Gather, Pipeline
from meshpar.parallel.strategy import Strategy, preset


@preset
def pipeline_parallel(
    *,
    stages: int,
    microbatches: int,
    schedule: str = "1f1b",
    chunks: int | None = None,
    gather: Gather = "step",
    stage_layer_offset: tuple[int, int] = (0, 0),
    spread_head: bool = True,
    split_backward: bool = False,
    axis: str = "stage",
) -> Strategy:
    """Pipeline parallelism: shard the stacked layers over `axis`, and process the batch in microbatches.

    The model must run its layers with `meshpar.scan_layers`, as the included decoders do. Code before it runs on the
    first stage, and code after it on the last stage. The schedule is compiled to a single program. XLA inserts the
    communication of other strategies within a stage. Each device accumulates its gradients locally and reduces them
    over the batch axes once, after the last microbatch. Embedding and head parameters are replicated over the stages.
    Their gradients are sent from the stage that computes them, or summed if two stages do. The stages synchronize at
    the end of a step, for the gradient norm and the metrics.

    The number of layers need not be divisible: 10 layers on 4 stages become 2, 3, 3 and 2. Between steps, such layers
    are sharded over `axis` along their largest divisible dim that no other axis shards, and are sent to their stages
    once per step. A leaf without such a dim is replicated over the stages. `Setup.table` shows the layout.

    Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM"; Qi et al. 2024, "Zero Bubble Pipeline Parallelism".

    Args:
      stages: number of stages, the size of `axis`.
      microbatches: number of microbatches per local batch. The loss is their mean.
      schedule: a name from `meshpar.pipeline.SCHEDULES`, or the path of a `.csv` file. Stages synchronize in every tick
        slot. In "1f1b", a forward pass may wait for the backward pass of another stage, which is longer if layers are
        rematerialized. In "eager-1f1b" and "interleaved-1f1b", all stages run the same ops in a slot, without
        conditionals, and more microbatches are in memory.
      chunks: number of pipeline chunks per stage, for "interleaved-1f1b" and "eager-1f1b".
      gather: with `fsdp()`, "step" gathers weights once and keeps them, and "microbatch" gathers them for each
        microbatch and frees them.
      stage_layer_offset: how many layers fewer the first and the last chunk have than the others, to balance the cost
        of embedding and head.
      spread_head: for "eager-1f1b" and "interleaved-1f1b", whether all stages compute the embedding and the head, each
        for a part of the microbatches. Otherwise the first and the last stage do, while the others wait, and the
        activations of up to `stages - 1` fewer microbatches are in memory.
      split_backward: with `spread_head`, compute weight gradients in their own ticks. The bubble is shorter, and their
        inputs are kept for up to `stages` microbatches of a chunk. It pays if `explain` shows a shorter step.
      axis: mesh axis of the stages.

    Raises:
      MeshparError: an argument is invalid, or the schedule does not support these numbers.

    Example:
      >>> mp.pipeline_parallel(stages=4, microbatches=16, schedule="zb-h1")
      pipeline_parallel(stages=4, microbatches=16, schedule='zb-h1')
    """
    part = Pipeline(
        stages=stages, microbatches=microbatches, schedule=schedule, chunks=chunks, gather=gather, axis=axis,
        stage_layer_offset=stage_layer_offset, spread_head=spread_head,
        split_backward=split_backward,
    )  # fmt: skip
    return Strategy((part,))
