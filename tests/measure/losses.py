"""Loss of the main recipe with matmuls in 16 and 8 bits: `python -m tests.measure.losses --seeds 8`.

The runs of a seed start from the same weights and read the same batches. Only the precision of the matmuls differs. A
run uses a single device, which needs a third of the processor time of eight host devices. Rounding changes the
validation loss by about 0.01, so smaller differences need many seeds. A finished run is stored in `losses.json` and not
repeated. Notebook 09 plots the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before jax is imported
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import meshpar as mp
from meshpar.runs.recipe import Recipe, build_model, build_optimizer, build_step
from meshpar.runs.recipe_file import load_recipe

FILE = Path(__file__).with_name("losses.json")
RECIPE = Path(__file__).parents[2] / "recipes" / "gpt_stdlib.py"
WAYS = {"bfloat16": None, "fp8": "fp8", "fp8-rowwise": "fp8-rowwise"}
EVERY = 20
"""Number of steps whose mean loss is stored."""


def trained(recipe: Recipe) -> dict[str, Any]:
    """Train, and return mean losses over `EVERY` steps, validation losses and processor seconds."""
    began_s = time.process_time()
    model, mesh = build_model(recipe), recipe.mesh.build(jax.devices()[:1])
    tx, data = build_optimizer(recipe, model, mesh), recipe.data.open(batch_size=recipe.batch_size, seed=recipe.seed)
    options = {"strategy": recipe.strategy, "precision": recipe.step.precision, "key": recipe.seed}
    state, step = mp.init_state(model, tx, mesh=mesh, **options), build_step(recipe)
    evaluate = mp.eval_step(recipe.loss, precision=recipe.step.precision)
    losses, held_out = [], {}
    for count, batch in zip(range(1, recipe.steps + 1), data.train(), strict=False):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        if count % recipe.validate_every == 0:
            found = [evaluate(state, each) for each in data.valid()]
            weights = [one["loss_weight"] for one in found]
            held_out[count] = float(np.average([one["loss"] for one in found], weights=weights))
    means = np.mean(np.reshape(losses, (-1, EVERY)), axis=1)
    took_s = time.process_time() - began_s
    return {"losses": [round(float(x), 4) for x in means], "held_out": held_out, "processor_s": round(took_s)}


def paired(runs: dict[str, Any], way: str) -> list[float]:
    """Return the final validation loss minus that in bfloat16, for each seed that has both."""
    last = {key: list(run["held_out"].values())[-1] for key, run in runs.items()}
    seeds = sorted(int(key.split()[1]) for key in last if key.startswith(f"{way} "))
    return [last[f"{way} {seed}"] - last[f"bfloat16 {seed}"] for seed in seeds if f"bfloat16 {seed}" in last]


def told(runs: dict[str, Any]) -> Iterable[str]:
    for way in WAYS:
        last = [list(run["held_out"].values())[-1] for key, run in runs.items() if key.startswith(f"{way} ")]
        yield f"{way:12} {statistics.mean(last):.4f} nats held out, mean of {len(last)} seeds" if last else way
        if way != "bfloat16" and len(off := paired(runs, way)) > 1:
            error = statistics.stdev(off) / len(off) ** 0.5
            yield f"{'':12} {statistics.mean(off):+.4f} ± {error:.4f} of bfloat16's, {len(off)} pairs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--file", type=Path, default=FILE)
    asked = parser.parse_args()
    runs = json.loads(asked.file.read_text()) if asked.file.exists() else {}
    for seed in range(asked.seeds):
        for way in asked.ways:
            if (key := f"{way} {seed}") in runs:
                continue
            precision = mp.Precision(compute="bfloat16", matmul=WAYS[way])
            step = mp.StepOptions(precision=precision)
            runs[key] = trained(load_recipe(RECIPE, devices=1).replace(step=step, seed=seed))
            asked.file.write_text(json.dumps(runs, indent=1) + "\n")
            print(key, list(runs[key]["held_out"].values())[-1], f"{runs[key]['processor_s']} s", flush=True)
    print("\n".join(told(runs)))


if __name__ == "__main__":
    main()
