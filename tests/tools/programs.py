"""Record the programs of training steps, and compare two recordings.

    python -m tests.tools.programs record FOLDER [NAME ...]
    python -m tests.tools.programs compare FOLDER OTHER

A refactoring must not change a program. Record the programs before it and after it, and compare the folders. Each step
is lowered, and the small ones are also compiled for 8 host devices. Function names and source locations are removed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import lzma
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before jax is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = "model.num_layers=4 model.embed_dim=32 model.num_heads=4 model.num_kv_heads=2 model.head_dim=8"
DENSE = f"{SMALL} model.mlp_dim=64 batch_size=16"
MOE = f"{SMALL} model.mlp_dim=32 model.moe.mlp_dim=32 batch_size=16"

SMALL_CASES = {
    "ddp": "strategy=ddp() mesh=data=8",
    "zero1": "strategy=zero1() mesh=fsdp=8",
    "zero2": "strategy=zero2() mesh=fsdp=8",
    "fsdp": "strategy=fsdp() mesh=fsdp=8",
    "hsdp": "strategy=hsdp() mesh=data=2,fsdp=4",
    "tensor": "strategy=ddp()|tensor_parallel() mesh=data=2,tensor=4",
    "fsdp_tensor": "strategy=fsdp()|tensor_parallel() mesh=fsdp=4,tensor=2",
    "fsdp_sequence": "strategy=fsdp()|tensor_parallel(sequence=True) mesh=fsdp=4,tensor=2",
    "context_ring": "strategy=fsdp()|context_parallel() mesh=fsdp=4,context=2",
    "context_all_to_all": "strategy=fsdp()|context_parallel(kind='all-to-all') mesh=fsdp=4,context=2",
    "fsdp_int8": "strategy=fsdp(quantize='int8') mesh=fsdp=8",
    "fsdp_fp8": "strategy=fsdp(quantize='fp8') mesh=fsdp=8",
    "ddp_int8": "strategy=ddp(quantize='int8') mesh=data=8",
    "prefetch": "strategy=fsdp(prefetch=1) mesh=fsdp=8",
    "prefetch_tensor": "strategy=fsdp(prefetch=1)|tensor_parallel(sequence=True) mesh=fsdp=4,tensor=2",
    "accumulate": "strategy=fsdp() mesh=fsdp=8 step.accumulate=2",
    "accumulate_ddp": "strategy=ddp() mesh=data=8 step.accumulate=2",
    "accumulate_once": "strategy=fsdp() mesh=fsdp=8 step.accumulate=2 step.reduce_gradients=once",
    "accumulate_prefetch": "strategy=fsdp(prefetch=1) mesh=fsdp=8 step.accumulate=2",
    "accumulate_int8": "strategy=fsdp(quantize='int8') mesh=fsdp=8 step.accumulate=2",
    "slices": "strategy=fsdp() mesh=fsdp=8 step.batch_slices=2",
    "slices_tensor": "strategy=fsdp()|tensor_parallel(sequence=True) mesh=fsdp=4,tensor=2 step.batch_slices=2",
    "slices_prefetch": "strategy=fsdp(prefetch=1) mesh=fsdp=8 step.batch_slices=2",
    "remat_full": "strategy=fsdp() mesh=fsdp=8 step.remat=full",
    "remat_dots": "strategy=fsdp()|tensor_parallel() mesh=fsdp=4,tensor=2 step.remat=dots",
    "remat_minimal": "strategy=fsdp() mesh=fsdp=8 step.remat=minimal",
    "vocab_chunks": "strategy=fsdp() mesh=fsdp=8 model.vocab_chunk=64",
    "bfloat16": "strategy=fsdp() mesh=fsdp=8 step.precision.compute=bfloat16",
    "ema": "strategy=fsdp() mesh=fsdp=8 optimizer.ema=0.99",
    "skip_nonfinite": "strategy=fsdp() mesh=fsdp=8 step.nonfinite=skip",
    **{
        f"stages_{schedule}": f"strategy=pipeline_parallel(stages=2,microbatches=4,schedule='{schedule}')|ddp()"
        " mesh=stage=2,data=4"
        for schedule in (
            "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v",
        )
    },
    "stages_fsdp_tensor": "strategy=pipeline_parallel(stages=2,microbatches=4)|fsdp()|tensor_parallel()"
    " mesh=stage=2,fsdp=2,tensor=2",
    "stages_zero1": "strategy=pipeline_parallel(stages=2,microbatches=4,schedule='zb-h1')|zero1() mesh=stage=2,fsdp=4",
    "stages_slices": "strategy=pipeline_parallel(stages=2,microbatches=2)|ddp() mesh=stage=2,data=4"
    " step.batch_slices=2",
}  # fmt: skip
MOE_CASES = {
    "moe_ddp": "strategy=ddp() mesh=data=8",
    "moe_experts": "strategy=fsdp()|expert_parallel() mesh=fsdp=2,expert=4",
    "moe_experts_tensor": "strategy=fsdp()|expert_parallel()|tensor_parallel() mesh=fsdp=2,expert=2,tensor=2",
    "moe_accumulate": "strategy=fsdp()|expert_parallel() mesh=fsdp=2,expert=4 step.accumulate=2",
    "moe_slices": "strategy=fsdp()|expert_parallel() mesh=fsdp=2,expert=4 step.batch_slices=2",
    "moe_remat": "strategy=fsdp()|expert_parallel() mesh=fsdp=2,expert=4 step.remat=full",
    "moe_stages": "strategy=pipeline_parallel(stages=2,microbatches=2,schedule='dualpipe-v')|fsdp()|expert_parallel()"
    " mesh=stage=2,fsdp=2,expert=2",
    "moe_prefetch": "strategy=fsdp(prefetch=1)|expert_parallel() mesh=fsdp=2,expert=4",
    "moe_int8": "strategy=fsdp(quantize='int8')|expert_parallel() mesh=fsdp=2,expert=4",
}
PODS = {
    "llama3_8b": "h100:8x8",
    "llama3_70b": "h100:64x8",
    "llama3_405b": "h100:512x8",
    "mixtral_8x7b": "h100:8x8",
    "deepseek_v3": "h100:256x8",
}
"""Recipes that are lowered for a cluster and not compiled."""


def cases() -> dict[str, tuple[str, str | None, list[str]]]:
    """Return recipe, cluster and overridden fields by name."""
    found: dict[str, tuple[str, str | None, list[str]]] = {}
    for file in sorted(RECIPES.glob("*.py")):
        found[f"recipe_{file.stem}"] = (
            str(file),
            PODS.get(file.stem),
            ["model.attention=blockwise"] if file.stem in PODS else [],
        )
    for name, fields in SMALL_CASES.items():
        found[name] = (str(RECIPES / "gpt_stdlib.py"), None, f"{DENSE} {fields}".split(" "))
    for name, fields in MOE_CASES.items():
        found[name] = (str(RECIPES / "moe_stdlib.py"), None, f"{MOE} {fields}".split(" "))
    return found


def normalized(text: str) -> str:
    """Number the functions by first use, and drop the module's name."""
    names: dict[str, str] = {}
    text = re.sub(r"@([\w.$-]+)", lambda match: "@" + names.setdefault(match[1], f"f{len(names)}"), text)
    return re.sub(r" loc\(.*?\)|#loc.*\n", "", text)


def recorded(recipe: str, cluster: str | None, fields: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the normalized StableHLO of a recipe's step, and the collectives and memory of the compiled program."""
    from meshpar.cli.explain_command import Subject
    from meshpar.inspect.explain import explain

    subject = Subject.of(recipe, cluster, layout=(), assignments=fields, shapes=None)
    step, state = subject.step_and_state()
    batch = dict(subject.batch)
    traced = step.trace(state, batch)
    lowered = traced.lower() if cluster is None else traced.lower(lowering_platforms=("cuda",))
    if cluster is not None:
        return normalized(lowered.as_text()), {}
    report = explain(step, state, batch, advise=False).to_json()
    kept = {"totals": report["totals"]}
    kept["unmatched"] = {key: len(report["matching"][key]) for key in ("unexpected", "missing")}
    kept["memory"] = {key: value for key, value in report["memory"].items() if isinstance(value, int)}
    return normalized(lowered.as_text()), kept


def record(folder: Path, only: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in cases().items():
        if only and name not in only:
            continue
        start = time.time()
        try:
            text, report = recorded(*case)
        except ValueError as error:
            text, report = f"refused: {type(error).__name__}\n", {"refused": str(error)}
        (folder / f"{name}.mlir.xz").write_bytes(lzma.compress(text.encode(), preset=3))
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {len(text)} characters, {time.time() - start:.0f} s", report.get("refused", ""), flush=True)


def compare(folder: Path, other: Path) -> int:
    """Print what differs; return how many programs do."""
    names = sorted({file.name for path in (folder, other) for file in path.glob("*.json")})
    changed = 0
    for name in names:
        pair = [path / name for path in (folder, other)]
        if not all(file.exists() for file in pair):
            print(f"{name}: recorded once only")
            changed += 1
            continue
        texts = [lzma.decompress(file.with_suffix(".mlir.xz").read_bytes()).decode() for file in pair]
        reports = [file.read_text() for file in pair]
        lines: list[str] = []
        for before, after in (texts, reports):
            if before != after:
                lines += list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
        if lines:
            changed += 1
            print(f"{name}: {len(lines)} lines differ")
            print(*(f"    {line[:160]}" for line in lines[:8]), sep="\n")
    print(f"{changed} of {len(names)} programs differ")
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("rest", nargs="*", help="names to record, or the other folder")
    args = parser.parse_args()
    if args.verb == "record":
        record(args.folder, args.rest)
        return 0
    return 1 if compare(args.folder, Path(args.rest[0])) else 0


if __name__ == "__main__":
    sys.exit(main())
