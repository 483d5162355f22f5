"""Test the reduced models of `meshpar verify` and its command to reproduce a failure."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar.cli.verify_command import ROWS, batch_of, shrunk
from meshpar.runs.recipe_file import load_recipe

ROOT = Path(__file__).parents[2]
WRONG = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import meshpar as mp
from meshpar.data import ArrayData

def arrays():
    return {"x": np.random.default_rng(0).normal(size=(160, 8)).astype(np.float32)}

def apply(p, x):
    part = lambda h, w: h @ w   # the all-reduce over `tensor` is missing
    run = jax.shard_map(part, in_specs=(P(None, "tensor"), P("tensor", None)), out_specs=P(),
                        axis_names={"tensor"}, check_vma=False)
    return run(jnp.tanh(x @ p["up"]), p["down"])

def init(key):
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (8, 16)), "down": jax.random.normal(down, (16, 8))}

def loss(model, batch, key):
    return jnp.mean((model(batch["x"]) - 1.0) ** 2), {}

def recipe():
    names = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    return mp.Recipe(
        name="wrong", mesh=mp.MeshSpec(fsdp=8), strategy=mp.fsdp(min_bytes=0),
        model=mp.from_functions(init, apply, names=names), loss=loss, data=ArrayData(arrays=arrays), steps=6,
        batch_size=16,
    )
"""


def command(words: str, folder: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    args = [sys.executable, "-m", "meshpar.cli.main", *shlex.split(words)]
    return subprocess.run(args, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.matrix
def test_the_printed_command_reproduces_the_failure(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    found = command("verify wrong.py --cases 20", tmp_path)
    assert found.returncode == 1, found.stderr
    again = next(line for line in found.stdout.splitlines() if line.startswith("again: meshpar "))
    assert "--case 'tensor=2; ddp() | tensor_parallel()'" in again
    shown = command(again.removeprefix("again: meshpar "), tmp_path)
    assert shown.returncode == 1
    smallest = [line for line in found.stdout.splitlines() if line.startswith("  step ")]
    assert smallest
    assert smallest[0] in shown.stdout


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt_stdlib", "moe_stdlib", "digits_linen"])
def test_recipes_match_a_single_device(name, tmp_path):
    if name == "digits_linen":
        pytest.importorskip("sklearn", reason="reads the digits, which needs `pip install meshpar[recipes]`")
    done = command(f"verify {ROOT / 'recipes' / name}.py --cases 4", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 layouts match a single device" in done.stdout


@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b", "deepseek_v3", "long_context", "gpt_pipeline"])
def test_shrunk_keeps_the_kinds_of_layers(name):
    recipe = load_recipe(ROOT / "recipes" / f"{name}.py", devices=8)
    small = shrunk(recipe, "float64")
    assert small.model.num_params < 60_000
    for field in ("moe", "latent", "tied_embeddings", "rope_scaling", "rope_yarn", "vocab_chunk"):
        assert bool(getattr(small.model, field)) == bool(getattr(recipe.model, field)), field
    if recipe.model.moe is not None:
        kept = {"score", "normalize", "choice"}
        before, after = (dataclasses.asdict(one.model.moe.routing) for one in (recipe, small))
        assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    rows = batch_of(small, 0)
    assert all(x.shape[0] == ROWS for x in rows.values())
    assert max(int(x.max()) for x in rows.values()) < small.model.vocab_size
