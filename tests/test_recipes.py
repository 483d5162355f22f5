"""Recipes load, are documented and fit their mesh. Small recipes train."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

import meshpar as mp
from meshpar.runs.recipe import build_model, build_optimizer
from meshpar.runs.recipe_file import load_recipe
from meshpar.runs.training_run import run
from tests.grid import cases

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(FOLDER.glob("*.py"))


PAIR = ("data", "expert")
"""Axes of experts, across the nodes and inside them."""


QUICK = [file for file in RECIPES if file.stem in ("digits_linen", "gpt_3d", "gpt_stdlib", "llama3_8b", "moe_stdlib")]


@pytest.mark.parametrize("file", cases(*QUICK, grid=RECIPES), ids=lambda file: file.stem)
def test_recipe_is_short_documented_and_sharded(file):
    source = file.read_text()
    assert len(source.splitlines()) < 150
    recipe = load_recipe(file)
    assert recipe.name == file.stem
    docstring = source.split('"""')[1]
    assert f"recipes/{file.name}" in docstring
    assert "Hardware" in docstring
    mesh = recipe.mesh.abstract()
    model = build_model(recipe)
    tx = build_optimizer(recipe, model, mesh)
    table = mp.shardings(model, mesh, recipe.strategy, tx=tx, precision=recipe.step.precision)
    assert table.totals.num_params > 0
    json.dumps(recipe.to_json())
    if not file.stem.startswith(("llama", "mixtral", "deepseek")):
        return
    # Experts are sharded over all devices. Other parameters are replicated over the axes of the experts.
    owned = sum(d.leaf.size for d in table.params if "expert" in (d.leaf.names or ()))
    axes = set(PAIR) if recipe.strategy == mp.fsdp(prefetch=1) | mp.expert_parallel(axis=PAIR) else {"expert"}
    everywhere = mesh.size // math.prod(mesh.shape[axis] for axis in {"data"} - axes)
    rest = (table.totals.num_params - owned) * math.prod(mesh.shape[axis] for axis in axes)
    assert table.totals.state_bytes == pytest.approx(12 * (owned + rest) / everywhere, rel=1e-2)
    assert f"{table.totals.state_bytes / 1e9:.2f} GB" in docstring
    assert f"{recipe.batch_size * recipe.data.seq_len:,}" in " ".join(docstring.split())


@pytest.mark.parametrize(
    "name", ["gpt_stdlib", "digits_linen", "long_context", "gpt_pipeline", "gpt_3d", "moe_stdlib", "finetune_hf"]
)
@pytest.mark.parametrize("devices", cases(6, grid=[1, 2, 3, 6, 8]))
def test_small_recipes_fit_any_number_of_devices(name, devices):
    recipe = load_recipe(FOLDER / f"{name}.py", devices=devices)
    mesh = recipe.mesh.abstract()
    assert mesh.size == devices
    assert recipe.batch_size % (mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]) == 0
    assert mp.shardings(build_model(recipe), mesh, recipe.strategy).totals.num_params > 0


@pytest.mark.matrix
def test_digits_are_learnt(tmp_path):
    recipe = load_recipe(FOLDER / "digits_linen.py", devices=8).override("steps=120", "validate_every=none")
    outcome = run(recipe, out=tmp_path, stream=io.StringIO())
    assert outcome.summary["validation"]["accuracy"] > 0.95


QUICK = (
    "steps=2",
    "optimizer.warmup_steps=1",
    "model.num_layers=1",
    "data.max_bytes=600000",
    "data.valid_batches=1",
    "data.valid_fraction=0.2",
    "sample.num_tokens=4",
)


@pytest.mark.matrix
def test_moe_stdlib_shows_the_load_of_its_experts(tmp_path):
    recipe = load_recipe(FOLDER / "moe_stdlib.py", devices=8).override(*QUICK[:-1], "data.seq_len=32", "sample=none")
    screen = io.StringIO()
    outcome = run(recipe, out=tmp_path, stream=screen)
    assert outcome.reason == "done"
    first, last = (json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()[:2])
    numbers = last["moe/layers"]
    # Each of 8 × 32 tokens has two of 16 experts in a layer. Four ranks have four experts each.
    assert sum(numbers["expert_tokens"][0]) == sum(numbers["rank_tokens"][0]) == 2 * 8 * 32
    assert (len(numbers["expert_tokens"][0]), len(numbers["rank_tokens"][0])) == (16, 4)
    assert first["moe/expert_max_over_mean"] > 1
    assert outcome.summary["experts"]["drop_rate"] == 0
    assert "busiest expert" in screen.getvalue()
    assert (outcome.folder / "experts.png").stat().st_size > 1000


def test_experts_cost_a_token_what_the_mlp_of_the_main_recipe_does():
    sparse, dense = (load_recipe(FOLDER / f"{name}.py", devices=8).model for name in ("moe_stdlib", "gpt_stdlib"))
    routers = sparse.num_moe_layers * sparse.embed_dim * sparse.moe.routing.num_experts
    assert sparse.num_active_params == dense.num_params + routers
    assert sparse.flops_per_token(256) == dense.flops_per_token(256) + 6 * routers
