"""Programs that the planner's estimates are held to, compiled for GPUs: `python -m tests.measure.plans`.

Writes `tests/planner/compiled.json` and a table of it, `compiled.txt`, in some 20 minutes on two cores. Needs the
`cudnn` extra. With a word, `python -m tests.measure.plans pipeline`, only the cases with the word are compiled again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before jax is imported
    os.environ["JAX_PLATFORMS"] = "cpu"

from meshpar.hardware.clusters import Cluster, parse_cluster

FILE = Path(__file__).parents[1] / "planner" / "compiled.json"
RECIPES = Path(__file__).parents[2] / "recipes"
B8, B70 = "llama3_8b", "llama3_70b"

CASES: tuple[tuple[str, str, tuple[str, ...]], ...] = tuple(
    (recipe, cluster, tuple(fields.split()))
    for recipe, cluster, fields in (
        (B8, "h100:8x8", "strategy=fsdp() step.remat=dots step.accumulate=4"),
        (B70, "h100:64x8", "step.remat=dots step.accumulate=4"),
        ("mixtral_8x7b", "h100:8x8", "strategy=fsdp()|expert_parallel() step.accumulate=4"),
        ("llama3_405b", "h100:512x8", "step.accumulate=2"),
        (B8, "h100:1x8", "strategy=fsdp() step.remat=full step.accumulate=4"),
        (B8, "h100:8x8",
         "strategy=fsdp()|tensor_parallel() mesh=fsdp=16,tensor=4 step.remat=dots batch_size=64 step.accumulate=4"),
        (B8, "h100:4x8", "strategy=zero1() mesh=fsdp=32 step.remat=full model.num_layers=8 step.accumulate=4"),
        (B8, "h100:4x8", "strategy=ddp() mesh=data=32 step.remat=none model.num_layers=4 step.accumulate=2"),
        (B8, "h100:4x8",
         "strategy=pipeline_parallel(stages=4,microbatches=8)|fsdp() mesh=stage=4,fsdp=8 step.remat=full"
         " step.accumulate=1 batch_size=64"),
        (B8, "h100:8x8",
         "strategy=hsdp()|tensor_parallel(sequence=True) mesh=data=4,fsdp=8,tensor=2 step.remat=full batch_size=128"
         " step.accumulate=2"),
        (B8, "h100:4x8",
         "strategy=zero2()|tensor_parallel() mesh=fsdp=8,tensor=4 step.remat=full batch_size=16 step.accumulate=2"),
        (B8, "h100:4x8",
         "strategy=pipeline_parallel(stages=4,microbatches=8)|ddp()|tensor_parallel(sequence=True)"
         " mesh=stage=4,tensor=8 step.remat=full step.accumulate=1 batch_size=8"),
        (B70, "h100:16x8",
         "strategy=pipeline_parallel(stages=4,microbatches=8,schedule='zb-h1')|fsdp()|tensor_parallel(sequence=True)"
         " mesh=stage=4,fsdp=4,tensor=8 step.remat=full step.accumulate=1 batch_size=32"),
        (B8, "h100:2x8", "strategy=fsdp() mesh=fsdp=16 step.remat=none model.num_layers=8 step.accumulate=1"
         " batch_size=16"),
        (B8, "h100:8x8",
         "strategy=fsdp(prefetch=1)|tensor_parallel(sequence=True) mesh=fsdp=16,tensor=4 step.remat=full"
         " batch_size=64 step.accumulate=2"),
        (B70, "h100:8x8",
         "strategy=fsdp()|tensor_parallel(sequence=True) mesh=fsdp=8,tensor=8 step.remat=full batch_size=16"
         " step.accumulate=2"),
        (B70, "h100:32x8", "strategy=fsdp() mesh=fsdp=256 step.remat=full batch_size=256 step.accumulate=1"),
        (B8, "h100:1x8",
         "strategy=zero1()|tensor_parallel() mesh=fsdp=2,tensor=4 step.remat=dots model.num_layers=16 batch_size=4"
         " step.accumulate=1"),
        (B8, "h100:2x8",
         "strategy=hsdp() mesh=data=2,fsdp=8 step.remat=dots model.num_layers=16 batch_size=16 step.accumulate=1"),
        ("mixtral_8x7b", "h100:4x8",
         "strategy=fsdp()|expert_parallel() mesh=fsdp=4,expert=8 batch_size=64 step.accumulate=2"),
        (B8, "h100:1x8", "strategy=zero2() mesh=fsdp=8 step.remat=full model.num_layers=4 batch_size=32"
         " step.accumulate=2"),
        (B8, "h100:1x8", "strategy=ddp() mesh=data=8 step.remat=full model.num_layers=2 batch_size=16"
         " step.accumulate=1"),
        ("deepseek_v3", "h100:256x8",
         "strategy=fsdp()|expert_parallel() mesh=fsdp=32,expert=64 step.accumulate=8 model.moe.implementation=auto"
         " model.moe.payload=none"),
        (B8, "h100:4x8",
         "strategy=fsdp(axis=('fsdp','context'))|context_parallel(kind='all-to-all') mesh=fsdp=8,context=4"
         " step.remat=full step.accumulate=1 batch_size=16"),
        (B8, "h100:2x8", "strategy=fsdp(prefetch=1) mesh=fsdp=16 step.remat=full batch_size=16 step.accumulate=1"),
        (B8, "h100:4x8",
         "strategy=pipeline_parallel(stages=4,microbatches=8,schedule='interleaved-1f1b')|fsdp()|tensor_parallel(sequence=True)"
         " mesh=stage=4,fsdp=2,tensor=4 step.remat=full step.accumulate=1 batch_size=16"),
        (B70, "h100:32x8",
         "strategy=hsdp()|tensor_parallel(sequence=True) mesh=data=4,fsdp=8,tensor=8 step.remat=full batch_size=64"
         " step.accumulate=1"),
        (B70, "h100:64x8",
         "strategy=fsdp(axis=('fsdp','context'),prefetch=1)|context_parallel(kind='all-to-all')"
         " mesh=fsdp=256,context=2 step.remat=dots step.accumulate=2 batch_size=512"),
        (B70, "h100:64x8", "strategy=fsdp(prefetch=1) mesh=fsdp=512 step.remat=full step.accumulate=1 batch_size=512"),
        (B70, "h100:64x8", "strategy=fsdp() mesh=fsdp=512 step.remat=full step.accumulate=1 batch_size=512"),
        (B70, "h100:64x8",
         "strategy=fsdp(prefetch=1)|tensor_parallel(sequence=True) mesh=fsdp=256,tensor=2 step.remat=full"
         " step.accumulate=1 batch_size=512"),
        (B8, "h100:1x8", "strategy=fsdp() step.remat=full model.vocab_chunk=16032 batch_size=8 step.accumulate=1"),
        (B8, "h100:8x8",
         "strategy=fsdp()|tensor_parallel() mesh=fsdp=16,tensor=4 step.remat=dots batch_size=64"
         " model.vocab_chunk=8016 step.accumulate=4"),
        (B8, "h100:2x8",
         "strategy=fsdp(prefetch=1) mesh=fsdp=16 step.remat=full model.vocab_chunk=16032 batch_size=16"
         " step.accumulate=1"),
        (B8, "h100:8x8",
         "strategy=fsdp(prefetch=1)|tensor_parallel(sequence=True) mesh=fsdp=16,tensor=4 step.remat=full"
         " batch_size=64 step.accumulate=1 step.batch_slices=2"),
        (B8, "h100:4x8",
         "strategy=fsdp()|tensor_parallel() mesh=fsdp=8,tensor=4 step.remat=dots batch_size=32 step.accumulate=1"
         " step.batch_slices=2"),
        (B8, "h100:4x8",
         "strategy=fsdp(axis=('fsdp','context'))|context_parallel(kind='all-to-all') mesh=fsdp=8,context=4"
         " step.remat=full step.accumulate=1 batch_size=16 step.batch_slices=2"),
        (B8, "h100:2x8",
         "strategy=fsdp(prefetch=1) mesh=fsdp=16 step.remat=none model.num_layers=8 batch_size=32 step.accumulate=2"),
        (B8, "h100:2x8", "strategy=fsdp() mesh=fsdp=16 step.remat=minimal batch_size=32 step.accumulate=2"),
        (B8, "h100:16x8", "strategy=hsdp(prefetch=1) mesh=data=8,fsdp=16 step.remat=full batch_size=256"
         " step.accumulate=1"),
        (B70, "h100:16x8",
         "strategy=fsdp()|tensor_parallel() mesh=fsdp=32,tensor=4 step.remat=full batch_size=64 step.accumulate=2"),
        (B8, "h100:8x8",
         "strategy=pipeline_parallel(stages=4,microbatches=32,schedule='eager-1f1b')|ddp()|tensor_parallel(sequence=True)"
         " mesh=data=4,stage=4,tensor=4 step.remat=full step.accumulate=1 batch_size=256"),
        ("mixtral_8x7b", "h100:16x8",
         "strategy=pipeline_parallel(stages=4,microbatches=8,schedule='dualpipe-v')|fsdp()|expert_parallel()"
         " mesh=stage=4,fsdp=4,expert=8 step.remat=full step.accumulate=1 batch_size=256"),
        (B70, "h100:32x8",
         "strategy=pipeline_parallel(stages=8,microbatches=16)|fsdp()|tensor_parallel(sequence=True)"
         " mesh=stage=8,fsdp=4,tensor=8 step.remat=full step.accumulate=1 batch_size=64"),
        ("mixtral_8x7b", "h100:16x8",
         "strategy=fsdp()|expert_parallel() mesh=fsdp=32,expert=4 batch_size=128 step.accumulate=1"),
        ("llama3_405b", "h100:512x8", "step.batch_slices=2"),
        # Attention without a library kernel.
        (B8, "h100:8x8", "step.remat=minimal step.accumulate=2 strategy=fsdp(prefetch=1) batch_size=256"
         " model.attention=blockwise"),
        (B8, "h100:1x8", "step.remat=minimal batch_size=16 step.accumulate=1 strategy=fsdp() model.num_layers=4"
         " model.attention=blockwise"),
        (B8, "h100:1x8", "strategy=fsdp()|tensor_parallel() mesh=fsdp=2,tensor=4 step.remat=dots model.num_layers=4"
         " batch_size=16 step.accumulate=1 model.attention=blockwise"),
        (B8, "h100:2x8", "step.remat=full batch_size=16 step.accumulate=1 strategy=fsdp() model.num_layers=8"
         " model.attention=blockwise model.attention_window=1024"),
        (B8, "h100:1x8", "step.remat=full batch_size=64 step.accumulate=1 strategy=fsdp() model.num_layers=4"
         " data.seq_len=2048 model.attention=xla"),
        (B8, "h100:1x8", "step.remat=none batch_size=16 step.accumulate=1 strategy=fsdp() model.num_layers=4"
         " data.seq_len=2048 model.attention=xla"),
        ("llama3_405b", "h100:64x8",
         "strategy=fsdp()|tensor_parallel(sequence=True) mesh=fsdp=64,tensor=8 step.remat=full batch_size=128"
         " step.accumulate=2"),
        (B8, "h100:8x8",
         "strategy=pipeline_parallel(stages=4,microbatches=32)|zero1()|tensor_parallel(sequence=True)"
         " mesh=data=4,stage=4,tensor=4 step.remat=full step.accumulate=1 batch_size=128"),
        (B8, "h100:8x8",
         "strategy=pipeline_parallel(stages=4,microbatches=32,schedule='eager-1f1b')|zero1()|tensor_parallel(sequence=True)"
         " mesh=data=4,stage=4,tensor=4 step.remat=full step.accumulate=1 batch_size=256 step.batch_slices=2"),
        (B8, "h100:8x8",
         "strategy=pipeline_parallel(stages=4,microbatches=16,schedule='eager-1f1b',chunks=2)|fsdp()"
         " mesh=stage=4,fsdp=16 step.remat=full step.accumulate=1 batch_size=256"),
        (B8, "h100:2x8",
         "strategy=fsdp(prefetch=1) mesh=fsdp=16 step.remat=full batch_size=32 step.accumulate=1 step.batch_slices=2"),
        (B8, "h100:2x8",
         "strategy=fsdp(prefetch=1)|tensor_parallel(sequence=True) mesh=fsdp=4,tensor=4 step.remat=dots"
         " model.num_layers=16 batch_size=16 step.accumulate=1 step.batch_slices=2"),
        # Pipelines of eight stages.
        *(
            (recipe, "h100:8x8",
             f"strategy=pipeline_parallel(stages=8,microbatches={microbatches},schedule={schedule})|zero1(axis='data')"
             f"|tensor_parallel(sequence=True) mesh=data=2,stage=8,tensor=4 step.remat=full step.accumulate=1"
             f" batch_size={2 * microbatches}")
            for recipe, microbatches, schedule in (
                (B70, 32, "'interleaved-1f1b',chunks=5"), (B70, 64, "'interleaved-1f1b',chunks=5"),
                (B8, 32, "'eager-1f1b'"), (B8, 64, "'interleaved-1f1b',chunks=2"), (B8, 32, "'zb-h1'"),
                (B8, 32, "'1f1b'"), (B8, 32, "'eager-1f1b',spread_head=False"),
            )
        ),
    )
)  # fmt: skip
"""A recipe, a cluster, and fields of the recipe; `step.batch_slices` is 1 unless set here."""


RATES: dict[str, Any] = {"attention_rates": (529e12, 518e12), "memory_efficiency": 1.0}
"""Rates that the recorded times were computed with. Estimates use the same rates, so that errors are those of the model
and not of the rates. Newer rates in the catalogue do not change them."""


def recorded_on(cluster: str) -> Cluster:
    """Return a cluster with the rates of the recorded programs."""
    found = parse_cluster(cluster)
    return dataclasses.replace(found, gpu=dataclasses.replace(found.gpu, **RATES))


def measured(recipe: str, cluster: str, fields: tuple[str, ...], pod) -> dict:  # type: ignore[no-untyped-def]
    from meshpar.cli.explain_command import Subject
    from meshpar.inspect.explain import explain

    path, fields_set = str(RECIPES / f"{recipe}.py"), ("step.batch_slices=1", *fields)
    subject = Subject.of(path, cluster, layout=(), assignments=fields_set, shapes=None)
    report = explain(*subject.step_and_state(), dict(subject.batch), recorded_on(cluster), pod=pod, advise=False)
    totals = report.to_json()["totals"].items()
    return {
        "recipe": recipe,
        "cluster": cluster,
        "fields": list(fields),
        "state_bytes": report.memory.state_bytes,
        "argument_bytes": report.memory.state_bytes + report.memory.batch_bytes,
        "peak_bytes": report.memory.peak_bytes,
        "sent_bytes": {label: sum(one["bytes_sent_per_device"] for one in kinds.values()) for label, kinds in totals},
        "step_s": report.compute.predicted_step_s,
        "compute_s": report.compute.compute_s,
        "exposed_s": dict(report.compute.exposed_s),
    }


def main(word: str = "") -> None:
    """Compile the cases with fields that contain `word`, and keep the recorded values of the others."""
    from meshpar.inspect.pod import PodProcess

    known = {(one["recipe"], one["cluster"], *one["fields"]): one for one in json.loads(FILE.read_text())}
    with PodProcess() as pod:
        found = []
        for case in CASES:
            recipe, cluster, fields = case
            kept = known.get((recipe, cluster, *fields))
            is_kept = kept is not None and not any(word in field for field in fields)
            found.append(kept if is_kept else measured(*case, pod))
            print(*case, found[-1]["peak_bytes"], file=sys.stderr, flush=True)
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    from tests.planner.test_plan import TABLE, written

    TABLE.write_text(written(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
