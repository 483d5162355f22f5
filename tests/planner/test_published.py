"""Published throughputs beside what the planner tells of the same layout; nothing is tuned to them.

`published.txt` is the table of them all, with why each is off: `python -m tests.planner.test_published` writes it anew.
Times of pipelines are told without what the ticks of our executor copy, which theirs do not; the table has both.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.hardware.clusters import parse_cluster
from meshpar.models import TransformerConfig, llama3_8b, llama3_70b, llama3_405b, mixtral_8x7b, next_token_loss
from meshpar.planner.layout import Layout
from meshpar.planner.search import Found, Search
from meshpar.planner.workload import Workload, describe

llama2 = functools.partial(TransformerConfig, vocab_size=32_000, head_dim=128)
LLAMA2_7B = functools.partial(
    llama2, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=32, mlp_dim=11_008
)  # fmt: skip
LLAMA2_13B = functools.partial(
    llama2, num_layers=40, embed_dim=5120, num_heads=40, num_kv_heads=40, mlp_dim=13_824
)  # fmt: skip
META = {
    "bf16_flops_per_s": 835e12, "memory_bytes": 96e9, "memory_bytes_per_s": 2.4e12, "attention_rates": (333e12, 318e12),
}  # fmt: skip
"""The H100s of torchtitan's benchmarks: limited to 500 W, with HBM2e of 2.4 TB/s; their peak lies by its footnote
between that of an H100 NVL, which is taken, and of an SXM. Its attention was FlashAttention-2, by the figures that
`attention_rates` of an H100 in `gpus.toml` have cuDNN's from."""
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, 2024-12"
TITAN_OLD = "torchtitan, docs/performance.md, 2024"
BRIDGE = "Megatron-Bridge, docs/performance-summary.md, 25.11, FP8-CS; recomputation, which it does not say, as told"
SELECTIVE = ("key", "out", "up")
"""Of torchtitan's selective recomputation, which keeps every other product with a weight and attention: those that it
computes again. It keeps more than `minimal`, which computes none again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A run as it was published."""

    family: str
    """Whose run of which GPUs."""
    model: Callable[..., TransformerConfig]
    cluster: str
    rows: int
    mesh: str
    strategy: str
    tokens_per_s: float
    """Of one GPU."""
    source: str
    length: int = 8192
    remat: str | None = None
    again: tuple[str, ...] = ()
    """Weights whose products are computed again, beside what the policy does."""
    accumulate: int = 1
    gpu: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Figures of its GPUs that are not the catalogue's."""
    matmul: str | None = None
    """`fp8`, where its products ran in 8 bits."""
    off: str = ""
    """Why what is told may be off, beside what is assumed of all."""


def stages(count, **how):
    told = "".join(f", {name}={value!r}" for name, value in how.items())
    return f"pipeline_parallel(stages={count}{told}) | {{}} | tensor_parallel(sequence=True)"


ONE = {"mesh": "fsdp=8", "strategy": "fsdp(prefetch=1)"}
MINE = {"family": "torchtitan H100", "gpu": META, "source": TITAN}
FULL8 = {"remat": "full", "matmul": "fp8"}
RUNS = {
    "8B, 8 H100": Published(
        model=llama3_8b, cluster="h100:1x8", rows=16, remat="minimal", again=SELECTIVE,
        tokens_per_s=6667, **ONE, **MINE,
        off="how much 500 W slow its GPUs is not known",
    ),
    "8B, 128 H100": Published(
        model=llama3_8b, cluster="h100:16x8", rows=256, mesh="fsdp=128", strategy="fsdp(prefetch=1)", remat="minimal",
        again=SELECTIVE, tokens_per_s=6514, **MINE,
        off="how much 500 W slow its GPUs is not known",
    ),
    "405B, 128 H100": Published(
        model=llama3_405b, cluster="h100:16x8", rows=32, mesh="fsdp=16,tensor=8", remat="full", tokens_per_s=109,
        strategy="fsdp() | tensor_parallel(sequence=True)", **{**MINE, "source": TITAN_OLD},
        off="whether it was compiled is not said",
    ),
    "7B of Llama 2, 8 H100": Published(
        family="MaxText H100", model=LLAMA2_7B, cluster="h100:1x8", rows=32, length=4096, remat="minimal",
        tokens_per_s=22.19 * 4096 / 8, **ONE,
        source="MaxText, Llama-2-7B on 8 H100s, 22.19 sequences a second; four rows a GPU assumed",
        off="four rows a GPU are assumed",
    ),
    "8B, 64 A100": Published(
        family="torchtitan A100", model=llama3_8b, cluster="a100:8x8", rows=64, mesh="fsdp=64", remat="minimal",
        strategy="fsdp(prefetch=1)", again=SELECTIVE, tokens_per_s=2973, source=TITAN_OLD,
        off="its network is assumed to be a DGX's",
    ),
    "70B, 64 A100": Published(
        family="torchtitan A100", model=llama3_70b, cluster="a100:8x8", rows=64, mesh="fsdp=64", remat="full",
        strategy="fsdp(prefetch=1)", tokens_per_s=331, source=TITAN_OLD,
        off="its network is assumed to be a DGX's",
    ),
    "13B of Llama 2, 64 A100": Published(
        family="torchtitan A100", model=LLAMA2_13B, cluster="a100:8x8", rows=128, length=4096, mesh="fsdp=64",
        strategy="fsdp(prefetch=1)", tokens_per_s=2162, source=TITAN_OLD,
        off="without recomputation XLA keeps more than fits by our estimate",
    ),
    "Mixtral 8x7B, 64 H100": Published(
        family="Megatron H100", model=mixtral_8x7b, cluster="h100:8x8", rows=256, length=4096, remat="minimal",
        mesh="data=2,stage=4,expert=8", tokens_per_s=468e12 / 82.9e9,
        strategy="pipeline_parallel(stages=4, microbatches=16, schedule='interleaved-1f1b', chunks=8) | "
        "zero1(axis='data') | expert_parallel()",
        source="Megatron-LM, megatron/core/transformer/moe/README.md, core 0.9: 468 TFLOP/s with the mapping it names; "
        "82.9e9 FLOPs a token as Megatron-LM counts them, attention without its mask",
        off="our grouped products move gradients of weights block by block, and rows for any routing",
    ),
    "8B, 8 H100, fp8": Published(
        model=llama3_8b, cluster="h100:1x8", rows=16, remat="minimal", again=SELECTIVE, matmul="fp8", tokens_per_s=8532,
        **ONE, **MINE,
        off="how much 500 W slow its GPUs is not known",
    ),
    "8B, 128 H100, fp8": Published(
        model=llama3_8b, cluster="h100:16x8", rows=256, mesh="fsdp=128", strategy="fsdp(prefetch=1)", remat="minimal",
        again=SELECTIVE, matmul="fp8", tokens_per_s=8380, **MINE,
        off="how much 500 W slow its GPUs is not known",
    ),
    "70B, 256 H100, fp8": Published(
        model=llama3_70b, cluster="h100:32x8", rows=512, mesh="fsdp=32,tensor=8", tokens_per_s=829,
        strategy="fsdp() | tensor_parallel(sequence=True)", **FULL8, **MINE,
        off="how much 500 W slow its GPUs is not known",
    ),
    "405B, 512 H100, fp8, 1F1B": Published(
        model=llama3_405b, cluster="h100:64x8", rows=256, mesh="stage=8,fsdp=8,tensor=8", tokens_per_s=100,
        strategy=stages(8, microbatches=8).format("fsdp()"), **FULL8, **MINE,
        off="8 microbatches, its default, are assumed; how much 500 W slow its GPUs is not known",
    ),
    "405B, 512 H100, fp8, interleaved": Published(
        model=llama3_405b, cluster="h100:64x8", rows=256, mesh="stage=8,fsdp=8,tensor=8", tokens_per_s=128,
        strategy=stages(8, microbatches=8, schedule="interleaved-1f1b", chunks=2).format("fsdp()"), **FULL8, **MINE,
        off="8 microbatches, its default, are assumed; how much 500 W slow its GPUs is not known",
    ),
    "8B, 8 H100, Megatron": Published(
        family="Megatron H100", model=llama3_8b, cluster="h100:1x8", rows=128, remat="minimal", accumulate=16,
        matmul="fp8", tokens_per_s=14451, source=BRIDGE, **ONE,
        off="recomputation is assumed",
    ),
    "70B, 64 H100, Megatron": Published(
        family="Megatron H100", model=llama3_70b, cluster="h100:8x8", rows=128, mesh="data=2,stage=8,tensor=4",
        strategy=stages(8, microbatches=64, schedule="interleaved-1f1b", chunks=5).format("zero1(axis='data')"),
        remat="minimal", matmul="fp8", tokens_per_s=1602, source=BRIDGE,
        off="a stage of ours hands whole sequences to every tensor rank and waits for it",
    ),
    "405B, 1024 H100, Megatron": Published(
        family="Megatron H100", model=llama3_405b, cluster="h100:128x8", rows=512,
        mesh="data=8,stage=8,context=2,tensor=8", remat="minimal", matmul="fp8", tokens_per_s=292, source=BRIDGE,
        strategy=stages(8, microbatches=64, schedule="interleaved-1f1b", chunks=8).format("zero1(axis='data')")
        + " | context_parallel()",
        off="a stage of ours hands whole sequences to every tensor rank and waits for it",
    ),
}  # fmt: skip


def told(run: Published) -> tuple[float, float, Found]:
    """Tokens a second of one GPU by the planner, without and with what our executor copies; and what was found."""
    cluster = parse_cluster(run.cluster)
    cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, **run.gpu))
    batch = {name: jax.ShapeDtypeStruct((run.rows, run.length), np.int32) for name in ("inputs", "targets")}
    config, precision = run.model(attention="cudnn"), mp.Precision(compute="bfloat16", matmul=run.matmul)
    bound = config.moe and config.moe.bound_factor
    how = {"tx": optax.adamw(1e-3), "precision": precision, "cluster": cluster, "bound_factor": bound}
    search = Search(with_again(describe(config.build(), batch, next_token_loss, **how), run), cluster)
    strategy = mp.parallel.parse_strategy(run.strategy)
    mesh, count = mp.MeshSpec.parse(run.mesh), run.accumulate
    found = search.estimate(Layout(mesh=mesh, strategy=strategy, remat=run.remat, accumulate=count))
    time, tokens = found.time, run.rows * run.length / cluster.num_devices
    stretch = 1 + time.bubble_s / (time.compute_s + time.memory_s)
    return tokens / (time.step_s - stretch * time.copied_s), tokens / time.step_s, found


def with_again(work: Workload, run: Published) -> Workload:
    """The workload, which computes some more products again."""
    again = sum(2 * leaf.size * run.length for leaf in work.leaves if leaf.path.split("/")[-2] in run.again)
    return dataclasses.replace(work, flops={remat: flops + again for remat, flops in work.flops.items()})


TABLE = Path(__file__).parent / "published.txt"


@functools.cache
def errors() -> dict[str, tuple[float, float]]:
    """Of every run, without and with what our executor copies."""
    return {name: tuple(one / run.tokens_per_s - 1 for one in told(run)[:2]) for name, run in RUNS.items()}


def median(*, but: str = "", matmul: str | None = None) -> float:
    """Of errors of the runs in 16 bits, or in 8, without one family."""
    return statistics.median(
        abs(errors()[name][0]) for name, run in RUNS.items() if run.family != but and run.matmul == matmul
    )


def written() -> str:
    """Every run with what was published, what is told, by how much it is off, and why."""
    lines = [f"{'tokens/s a GPU':>14}  error  ours   run"]
    for name, run in RUNS.items():
        off, ours = errors()[name]
        copies = f"{ours:+5.0%}" if ours != off else "     "
        lines.append(
            f"{run.tokens_per_s:14,.0f}  {off:+5.0%}  {copies}  {name} ({run.family}){': ' * bool(run.off)}{run.off}"
        )
    families = sorted({run.family for run in RUNS.values() if run.matmul is None})
    lines += ["", f"median error in bf16 {median():.0%}, in fp8 {median(matmul='fp8'):.0%}"]
    lines += [f"median error in bf16 without {family}: {median(but=family):.0%}" for family in families]
    return "\n".join([*lines, ""])


@pytest.mark.matrix
def test_planner_predicts_published_bf16_runs_within_20_percent():
    assert median() < 0.2
    for family in {run.family for run in RUNS.values()}:
        assert median(but=family) < 0.2, family


@pytest.mark.matrix
def test_planner_bounds_the_error_of_every_published_run():
    assert all(abs(off) < 0.5 for off, _ in errors().values()), errors()
    assert median(matmul="fp8") < 0.25


@pytest.mark.matrix
def test_table_of_published_runs_is_up_to_date():
    assert written() == TABLE.read_text(encoding="utf-8")


if __name__ == "__main__":
    TABLE.write_text(written(), encoding="utf-8")
