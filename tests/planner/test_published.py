"""Published throughputs, compared with the planner's estimates of the same layouts. No constant is fitted to them.

`published.txt` lists all runs with their errors and causes. `python -m tests.planner.test_published` regenerates it.
Estimates of pipelines exclude the copies in the ticks of our executor, which the published programs do not make. The
table has both.
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
from meshpar.hardware.clusters import MATMUL_EFFICIENCY, parse_cluster
from meshpar.hardware.grouped_kernels import BY_GENERATION, KERNELS, OPERANDS
from meshpar.models import TransformerConfig, llama3_8b, llama3_70b, llama3_405b, mixtral_8x7b, next_token_loss
from meshpar.planner.layout import Layout
from meshpar.planner.search import Search
from meshpar.planner.workload import describe

llama2 = functools.partial(TransformerConfig, vocab_size=32_000, head_dim=128)
LLAMA2_7B = functools.partial(llama2, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=32, mlp_dim=11_008)
LLAMA2_13B = functools.partial(llama2, num_layers=40, embed_dim=5120, num_heads=40, num_kv_heads=40, mlp_dim=13_824)
META = {
    "bf16_flops_per_s": 835e12, "memory_bytes": 96e9, "memory_bytes_per_s": 2.4e12, "attention_rates": (333e12, 318e12),
    "memory_efficiency": 0.92, "matmul_rates": (585e12, 1126e12),
}  # fmt: skip
"""The H100s of torchtitan's benchmarks: limited to 500 W, with HBM2e of 2.4 TB/s. By its footnote, the peak is between
those of an H100 NVL, which is used here, and of an SXM. They ran FlashAttention-2, whose rates have the same source as
backward rates of cuDNN's attention in `gpus.toml`. The fraction of the bandwidth is torchao's
(torchao/testing/float8/roofline_utils.py, 2025: point-wise kernels on these GPUs). The matmul rates, of which the
ratio is used, are for 8,192³ on an H100 with 500 W (pytorch/FBGEMM, pull request 2546, 2024-04)."""
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, 2024-12"
TITAN_OLD = "torchtitan, docs/performance.md, 2024"
BRIDGE_26 = "Megatron-Bridge, docs/performance-summary.md, 2026, FP8-CS; batch and recomputation are assumed"
BRIDGE = "Megatron-Bridge, docs/performance-summary.md, 25.11, FP8-CS; it does not state recomputation"
SELECTIVE = ("key", "out", "up")
"""Matmuls that torchtitan's selective recomputation recomputes, which `minimal` saves.

torchtitan saves attention and every second matmul with a weight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A published run."""

    family: str
    """Who ran it, on which GPUs."""
    model: Callable[..., TransformerConfig]
    cluster: str
    rows: int
    mesh: str
    strategy: str
    tokens_per_s: float
    """Per GPU."""
    source: str
    length: int = 8192
    remat: str | None = None
    again: tuple[str, ...] = ()
    """Weights whose matmuls are recomputed in addition to the policy."""
    accumulate: int = 1
    gpu: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Figures of its GPUs that differ from the catalogue."""
    matmul: str | None = None
    """`fp8` if its matmuls ran in 8 bits."""
    off: str = ""
    """A possible cause of the error, in addition to the general assumptions."""


def stages(count, strategy, **arguments):
    text = "".join(f", {name}={value!r}" for name, value in arguments.items())
    return f"pipeline_parallel(stages={count}{text}) | {strategy} | tensor_parallel(sequence=True)"


FSDP, FSDP_TP = "fsdp(prefetch=1)", "fsdp() | tensor_parallel(sequence=True)"
POWER, NETWORK = "how much 500 W slow its GPUs is not known", "its network is assumed to be a DGX's"
STAGED = "its batch is assumed; our stages send full sequences to each tensor rank and wait for them"
ONE = {"cluster": "h100:1x8", "mesh": "fsdp=8", "strategy": FSDP}
MINE = {"family": "torchtitan H100", "gpu": META, "source": TITAN, "off": POWER}
ON_8 = {**MINE, **ONE, "model": llama3_8b, "rows": 16, "remat": "minimal", "again": SELECTIVE}
ON_128 = {**ON_8, "cluster": "h100:16x8", "rows": 256, "mesh": "fsdp=128"}
ON_512 = {
    **MINE, "model": llama3_405b, "cluster": "h100:64x8", "rows": 256, "mesh": "stage=8,fsdp=8,tensor=8",
    "remat": "full", "matmul": "fp8", "off": f"8 microbatches, its default, are assumed; {POWER}",
}  # fmt: skip
A100 = {
    "family": "torchtitan A100", "cluster": "a100:8x8", "rows": 64, "mesh": "fsdp=64", "strategy": FSDP,
    "source": TITAN_OLD,
}  # fmt: skip
MEGATRON = {"family": "Megatron H100", "remat": "minimal", "matmul": "fp8", "source": BRIDGE_26, "off": STAGED}
RUNS = {
    "8B, 8 H100": Published(**ON_8, tokens_per_s=6667),
    "8B, 128 H100": Published(**ON_128, tokens_per_s=6514),
    "405B, 128 H100": Published(**{
        **MINE, "model": llama3_405b, "cluster": "h100:16x8", "rows": 32, "mesh": "fsdp=16,tensor=8", "remat": "full",
        "strategy": FSDP_TP, "tokens_per_s": 109, "source": TITAN_OLD, "off": "whether it was compiled is not said",
    }),
    "70B, 128 H100": Published(
        family="MaxText H100", model=llama3_70b, cluster="h100:16x8", rows=256, mesh="fsdp=128", remat="full",
        strategy=FSDP, tokens_per_s=1052, off="two rows a GPU and full rematerialization are assumed",
        source="MaxText, Llama 3.1 70B on 128 H100s in bf16: 506.6 TFLOP/s; batch and rematerialization are assumed",
    ),
    "7B of Llama 2, 8 H100": Published(
        **ONE, family="MaxText H100", model=LLAMA2_7B, rows=32, length=4096, remat="minimal",
        tokens_per_s=22.19 * 4096 / 8, off="four rows a GPU are assumed",
        source="MaxText, Llama-2-7B on 8 H100s, 22.19 sequences a second; four rows a GPU assumed",
    ),
    "8B, 64 A100": Published(
        **A100, model=llama3_8b, remat="minimal", again=SELECTIVE, tokens_per_s=2973, off=NETWORK,
    ),
    "70B, 64 A100": Published(**A100, model=llama3_70b, remat="full", tokens_per_s=331, off=NETWORK),
    "13B of Llama 2, 64 A100": Published(
        **{**A100, "rows": 128}, model=LLAMA2_13B, length=4096, tokens_per_s=2162,
        off="without recomputation XLA keeps more than fits by our estimate",
    ),
    "Mixtral 8x7B, 64 H100": Published(
        family="Megatron H100", model=mixtral_8x7b, cluster="h100:8x8", rows=256, length=4096, remat="minimal",
        mesh="data=2,stage=4,expert=8", tokens_per_s=468e12 / 82.9e9,
        strategy="pipeline_parallel(stages=4, microbatches=16, schedule='interleaved-1f1b', chunks=8) | "
        "zero1(axis='data') | expert_parallel()",
        source="Megatron-LM, megatron/core/transformer/moe/README.md, core 0.9: 468 TFLOP/s with the mapping it names; "
        "82.9e9 FLOPs a token as Megatron-LM counts them, attention without its mask",
        off="its grouped matmuls are assumed to run like other matmuls; our stages wait for each other's messages",
    ),
    "8B, 8 H100, fp8": Published(**ON_8, matmul="fp8", tokens_per_s=8532),
    "8B, 128 H100, fp8": Published(**ON_128, matmul="fp8", tokens_per_s=8380),
    "70B, 256 H100, fp8": Published(
        **MINE, model=llama3_70b, cluster="h100:32x8", rows=512, mesh="fsdp=32,tensor=8", tokens_per_s=829,
        strategy=FSDP_TP, remat="full", matmul="fp8",
    ),
    "405B, 512 H100, fp8, 1F1B": Published(**ON_512, tokens_per_s=100, strategy=stages(8, "fsdp()", microbatches=8)),
    "405B, 512 H100, fp8, interleaved": Published(
        **ON_512, tokens_per_s=128,
        strategy=stages(8, "fsdp()", microbatches=8, schedule="interleaved-1f1b", chunks=2),
    ),
    "8B, 8 H100, Megatron": Published(**{
        **MEGATRON, **ONE, "model": llama3_8b, "rows": 128, "accumulate": 16, "tokens_per_s": 14451,
        "source": BRIDGE, "off": "recomputation is assumed",
    }),
    "70B, 64 H100, Megatron": Published(
        **MEGATRON, model=llama3_70b, cluster="h100:8x8", rows=256, mesh="data=2,stage=8,tensor=4", tokens_per_s=1664,
        strategy=stages(8, "zero1(axis='data')", microbatches=128, schedule="interleaved-1f1b", chunks=5),
    ),
    "405B, 1024 H100, Megatron": Published(
        **MEGATRON, model=llama3_405b, cluster="h100:128x8", rows=1536, mesh="data=8,stage=8,context=2,tensor=8",
        strategy=stages(8, "zero1(axis='data')", microbatches=192, schedule="interleaved-1f1b", chunks=8)
        + " | context_parallel()", tokens_per_s=328,
    ),
}  # fmt: skip


def predicted(run: Published) -> tuple[float, float]:
    """Return the estimated tokens per second and GPU, without and with the copies of our pipeline executor."""
    cluster = parse_cluster(run.cluster)
    cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, **run.gpu))
    batch = {name: jax.ShapeDtypeStruct((run.rows, run.length), np.int32) for name in ("inputs", "targets")}
    config, precision = run.model(attention="cudnn"), mp.Precision(compute="bfloat16", matmul=run.matmul)
    bound = config.moe and config.moe.bound_factor
    work = describe(
        config.build(), batch, next_token_loss, tx=optax.adamw(1e-3), precision=precision, cluster=cluster,
        bound_factor=bound,
    )  # fmt: skip
    again = sum(2 * leaf.size * run.length for leaf in work.leaves if leaf.path.split("/")[-2] in run.again)
    work = dataclasses.replace(work, flops={remat: flops + again for remat, flops in work.flops.items()})
    strategy, mesh = mp.parallel.parse_strategy(run.strategy), mp.MeshSpec.parse(run.mesh)
    if config.moe:  # Megatron's grouped matmuls are CUTLASS's, whose rates are not published
        work = dataclasses.replace(work, grouped_kernels=BY_GENERATION[9])
        assumed = {1: MATMUL_EFFICIENCY * cluster.gpu.bf16_flops_per_s}
        cluster = dataclasses.replace(cluster, grouped={f"{k} {x}": assumed for k in KERNELS for x in OPERANDS})
    layout = Layout(mesh=mesh, strategy=strategy, remat=run.remat, accumulate=run.accumulate)
    time, tokens = Search(work, cluster).estimate(layout).time, run.rows * run.length / cluster.num_devices
    stretch = 1 + time.bubble_s / (time.compute_s + time.memory_s)
    return tokens / (time.step_s - stretch * time.copied_s), tokens / time.step_s


TABLE = Path(__file__).parent / "published.txt"


@functools.cache
def errors() -> dict[str, tuple[float, float]]:
    """Return the relative errors of each run, without and with the copies of our pipeline executor."""
    return {name: tuple(each / run.tokens_per_s - 1 for each in predicted(run)) for name, run in RUNS.items()}


def median(*, but: str = "", matmul: str | None = None) -> float:
    """Return the median error of the runs in 16 bits, or in 8 bits, without a family."""
    runs = (name for name, run in RUNS.items() if run.family != but and run.matmul == matmul)
    return statistics.median(abs(errors()[name][0]) for name in runs)


def written() -> str:
    """Return the table of all runs with their errors."""
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
@pytest.mark.pod  # tracing requires cuDNN
def test_published_runs_are_predicted_within_tolerance():
    for family in ("", *(run.family for run in RUNS.values())):
        assert median(but=family) < 0.2, family
    assert median(matmul="fp8") < 0.25
    assert all(abs(error) < 0.5 for error, _ in errors().values()), errors()
    assert written() == TABLE.read_text(encoding="utf-8")


if __name__ == "__main__":
    TABLE.write_text(written(), encoding="utf-8")
