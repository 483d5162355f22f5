"""Output, files, resuming and errors of the commands."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

from meshpar.cli import main as cli
from meshpar.cli import train_command
from meshpar.loop.fit import Hook
from meshpar.runs import recipe_sources, training_run
from meshpar.runs.tuned import Tuned
from tests.grid import cases

RECIPE = """
from __future__ import annotations
from pathlib import Path
import meshpar as mp
from meshpar.data import TextData
from meshpar.models import TransformerConfig, next_token_loss

def recipe(devices: int = 8) -> mp.Recipe:
    model = TransformerConfig(
        vocab_size=256, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
    )
    return mp.Recipe(
        name="tiny", mesh=mp.MeshSpec(fsdp=devices // 2, tensor=2), strategy=mp.fsdp() | mp.tensor_parallel(),
        model=model, loss=next_token_loss, data=TextData(files=(str(Path(__file__).parent / "text"),), seq_len=16,
        valid_fraction=0.3, valid_batches=2), optimizer=mp.AdamW(schedule="constant"), steps=3, batch_size=8,
        sample=mp.Sample(prompt="the", num_tokens=4),
    )
"""


def write_recipe(folder: Path) -> Path:
    (folder / "text").mkdir()
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * (20 + number))
    recipe = folder / "tiny.py"
    recipe.write_text(RECIPE)
    return recipe


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


# train ---------------------------------------------------------------------------------------------------------------


def test_train_runs_and_resumes(meshpar, tmp_path):
    recipe, out, umask = write_recipe(tmp_path), tmp_path / "runs", os.umask(0o022)
    try:
        code, text, _ = meshpar("train", recipe, "--out", out)
    finally:
        os.umask(umask)
    assert code == 0
    folder = out / "tiny"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes["tiny"] == 0o700  # a new folder is private
    assert modes["recipe.json"] == modes["metrics.jsonl"] == modes["loss.png"] == 0o644
    wrote = {"recipe.json", "sharding.txt", "sharding.json", "metrics.jsonl", "checkpoints", "loss.png", "summary.json"}
    wrote |= {"goodput.json"}
    assert {path.name for path in folder.iterdir()} == wrote
    for said in ("mesh: fsdp=4, tensor=2", "fsdp() | tensor_parallel()", "per device: params", "training 3 steps"):
        assert said in text
    for said in ("held-out loss", "bits per byte", "bigram model", "sample:", "  | the"):
        assert said in text
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["step"] == summary["steps_taken"] == 3
    # Bits per byte are the validation loss in other units. The baseline uses the same tokens.
    assert summary["bits_per_byte"] == pytest.approx(summary["validation"]["loss"] / math.log(2))
    assert summary["held_out_tokens"] == 2 * 8 * 16
    assert summary["below_bigram_bits_per_byte"] == pytest.approx(
        summary["bigram_bits_per_byte"] - summary["bits_per_byte"]
    )
    assert summary["sample"].startswith("the")
    assert json.loads((folder / "recipe.json").read_text())["steps"] == 3
    assert summary["wall_s"].keys() >= {"steps", "compile", "data", "save", "validate", "start"}

    code, text, _ = meshpar("train", recipe, "--out", out)
    assert code == 0
    assert "step 3 of 3 is done" in text
    assert json.loads((folder / "summary.json").read_text())["validation"] == summary["validation"]

    code, text, _ = meshpar("train", recipe, "--out", out, "--steps", 6, "--set", "sample=none")
    assert code == 0
    assert "resuming at step 3 of 6" in text
    assert "steps was 3 and is 6" in text

    assert [step for step, _ in losses(folder)] == [1, 2, 3, 4, 5, 6]

    code, _, error = meshpar("train", recipe, "--out", out, "--set", "optimizer.lr=1", "--set", "model.mlp_dim=64")
    assert code == 2
    assert "optimizer.lr was 0.0003 and is 1.0" in error
    assert "model.mlp_dim was 32 and is 64" in error
    assert "--fresh" in error
    assert "--name" in error


@pytest.mark.matrix
def test_losses_of_a_resumed_run_are_those_of_a_straight_run(meshpar, tmp_path):
    args = ("train", write_recipe(tmp_path), "--out", tmp_path, "--set", "sample=none")
    for options in ((), ("--steps", 6), ("--name", "straight", "--set", "steps=6")):
        assert meshpar(*args, *options)[0] == 0
    assert losses(tmp_path / "tiny") == losses(tmp_path / "straight")  # to the bit


BODIES = """
from __future__ import annotations
from pathlib import Path
import numpy as np
import jax.numpy as jnp
import optax
import meshpar as mp
from meshpar.data import ArrayData

def arrays():
    return {"x": np.ones((200, 4), np.float32)}

def loss(model, batch, key):
    return 1.0 * jnp.mean((model(batch["x"]) - 1.0) ** 2), {}

def recipe() -> mp.Recipe:
    return mp.Recipe(
        name="bodies", mesh=mp.MeshSpec(data=2), strategy=mp.ddp(), steps=2, batch_size=8, loss=loss,
        model=mp.from_functions(lambda key: {"w": jnp.ones((4, 8))}, lambda p, x: x @ p["w"]),
        data=ArrayData(arrays=arrays), optimizer=mp.Optax(make=lambda steps: optax.sgd(1e-3)),
    )
"""


@pytest.fixture
def train_bodies(meshpar, tmp_path):
    """Train the recipe `BODIES`, with a text replaced."""

    def train(*args, old="", new=""):
        (tmp_path / "recipe.py").write_text(BODIES.replace(old, new) if old else BODIES)
        return meshpar("train", tmp_path / "recipe.py", "--devices", 2, "--out", tmp_path, *args)

    return train


@pytest.mark.parametrize(
    ("old", "new", "is_other"),
    [
        pytest.param("optax.sgd(1e-3)", "optax.sgd(9e-1)", True, marks=pytest.mark.matrix),
        ("return 1.0 * jnp", "return 2.0 * jnp", True),
        ("import optax", "import optax  # a comment\n\n", False),
    ],
    ids=["optimizer", "loss", "comment"],
)
@pytest.mark.parametrize(
    "fields", [(), pytest.param(("--steps", 4), marks=pytest.mark.matrix)], ids=["same fields", "more steps"]
)
def test_changed_code_must_be_accepted_to_resume(train_bodies, old, new, is_other, fields):
    assert train_bodies()[0] == 0
    code, _, error = train_bodies(*fields, old=old, new=new)
    assert code == (2 if is_other else 0)
    if is_other:
        assert "the model, the optimizer or a library has changed: the run was trained with program" in error
        code, text, _ = train_bodies(*fields, "--accept-changes", old=old, new=new)
        assert code == 0
        assert "the code changed since the run started" in text
        assert train_bodies(*fields, old=old, new=new)[0] == 0  # the run now has the new code


def test_programs_are_compared_with_the_fields_of_the_run(train_bodies):
    change = {"old": "lambda steps: optax.sgd(1e-3)", "new": "lambda steps: optax.sgd(1 / steps)"}
    assert train_bodies(**change)[0] == 0
    assert train_bodies("--steps", 4, **change)[0] == 0  # another program, which follows from the steps
    code, text, _ = train_bodies("--steps", 4, "--set", "mesh.fsdp=2", "--set", "mesh.data=1", **change)
    assert code == 0
    assert "skipping the comparison with the program of the earlier steps: mesh.data, mesh.fsdp changed" in text


def test_missing_recipe_json_must_be_accepted_to_resume(train_bodies, tmp_path):
    assert train_bodies()[0] == 0
    (tmp_path / "bodies" / "recipe.json").unlink()
    code, _, error = train_bodies()
    assert code == 2
    assert "recipe.json is missing, so the recipe of its 2 steps is unknown" in error
    assert train_bodies("--accept-changes")[0] == 0
    assert (tmp_path / "bodies" / "recipe.json").exists()


def test_removed_files_of_a_run_are_written_again(train_bodies, tmp_path, monkeypatch):
    folder, fit = tmp_path / "bodies", training_run.fit

    class Remove(Hook):
        def on_record(self, run, record):
            if record.step == 1:
                shutil.rmtree(folder)

    def with_removal(*args, hooks, **options):
        return fit(*args, hooks=[*hooks, Remove()], **options)

    monkeypatch.setattr(training_run, "fit", with_removal)
    files = "recipe.json, sharding.json, sharding.txt"
    with pytest.warns(UserWarning, match=f"{files} were removed during the run and are written again"):
        code, _, error = train_bodies()
    assert code == 2
    assert "the metrics of steps 1 are missing" in error
    written = {path.name for path in folder.iterdir()}
    assert {"recipe.json", "sharding.json", "sharding.txt", "metrics.jsonl", "checkpoints"} <= written
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="it lacks steps 1"):
        assert train_bodies("--steps", 3)[0] == 2
    assert json.loads((folder / "summary.json").read_text())["step"] == 3


@pytest.mark.parametrize("damage", cases("renamed", grid=["file", "renamed"]))
def test_resumed_run_reports_later_steps_without_a_checkpoint(train_bodies, tmp_path, damage):
    checkpoints = tmp_path / "bodies" / "checkpoints"
    assert train_bodies("--set", "checkpoint_every=1")[0] == 0
    if damage == "file":
        shutil.rmtree(checkpoints / "2")
        (checkpoints / "2").touch()
    else:
        (checkpoints / "2").rename(checkpoints / "0")
    code, text, _ = train_bodies()
    assert code == 0
    assert "resuming at step 1 of 2 (an earlier run reached step 2" in text


@pytest.mark.matrix
def test_run_does_not_write_through_links(train_bodies, tmp_path):
    run, victim = tmp_path / "bodies", tmp_path / "victim"
    victim.write_text('{"step": 0}\n')
    run.mkdir(parents=True)
    files = ("recipe.json", "sharding.json", "sharding.txt", "goodput.json", "summary.json", "loss.png")
    for name in (*(f"{name}.new" for name in files), "metrics.jsonl"):
        (run / name).symlink_to(victim)
    assert train_bodies()[0] == 0
    assert victim.read_text() == '{"step": 0}\n'
    assert all((run / name).is_file() and not (run / name).is_symlink() for name in (*files, "metrics.jsonl"))
    assert not list(run.glob("*.new"))


def test_report_omits_an_earlier_validation_if_the_last_one_was_lost(train_bodies, tmp_path):
    metrics, args = tmp_path / "bodies" / "metrics.jsonl", ("--set", "validate_every=1")
    code, out, _ = train_bodies(*args)
    assert code == 0
    assert "held-out" in out
    summary = metrics.parent / "summary.json"
    assert json.loads(summary.read_text())["validation"]["loss"] > 0
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if not ('"step": 2,' in line and "val_loss" in line)))
    with pytest.warns(UserWarning, match="it lacks validations after steps 2"):
        code, out, error = train_bodies(*args)
    assert code == 2
    assert "the metrics of validations after steps 2 are missing" in error
    assert "held-out" not in out
    assert json.loads(summary.read_text())["validation"] == {}


@pytest.mark.matrix
def test_lost_metrics_exit_with_2_until_they_are_restored(meshpar, tmp_path):
    recipe, metrics = write_recipe(tmp_path), tmp_path / "runs" / "tiny" / "metrics.jsonl"
    args = ("train", recipe, "--out", tmp_path / "runs", "--set", "sample=none")
    assert meshpar(*args)[0] == 0
    metrics.rename(tmp_path / "away")
    with pytest.warns(UserWarning, match="metrics.jsonl: it lacks steps 1 to 3"):
        code, _, error = meshpar(*args, "--steps", 5)
    assert code == 2
    assert "metrics.jsonl: cannot report the metrics of all steps: the metrics of steps 1 to 3 are missing" in error
    assert json.loads((metrics.parent / "summary.json").read_text())["missing_steps"] == [[1, 3]]
    assert [step for step, _ in losses(metrics.parent)] == [4, 5]
    metrics.write_text((tmp_path / "away").read_text() + metrics.read_text())
    code, _, _ = meshpar(*args, "--steps", 5)
    assert code == 0
    assert [step for step, _ in losses(metrics.parent)] == [1, 2, 3, 4, 5]
    metrics.unlink()
    with pytest.warns(UserWarning, match="metrics.jsonl: it lacks steps 1 to 5"):
        code, _, error = meshpar(*args, "--steps", 5)  # the run is complete, so there is nothing to profile
    assert (code, "Traceback" in error) == (2, False)


@pytest.mark.matrix
def test_repeated_failures_of_saves_stop_the_run(child_env, tmp_path):
    recipe, run = write_recipe(tmp_path), tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "checkpoints").touch()  # a file in place of the folder makes each save fail
    fields = ["steps=6", "checkpoint_every=1", "checkpoint_retries=1", "sample=none"]
    command = ["train", str(recipe), *(word for field in fields for word in ("--set", field))]
    python = [sys.executable, "-m", "meshpar.cli.main", *command]
    done = subprocess.run(python, cwd=tmp_path, env=child_env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("meshpar: warning: checkpoints in ")
    assert "cannot save step 1" in first
    assert second.startswith("meshpar: checkpoints in ")
    assert second.endswith("(the run stops: 2 saves in a row failed)")


@pytest.mark.matrix
@pytest.mark.call_stacks
def test_trace_of_a_run_has_axes_bytes_phases_and_kernels(meshpar, tmp_path):
    recipe, out = write_recipe(tmp_path), tmp_path / "runs"
    assert meshpar("train", recipe, "--out", out, "--profile", "2:3", "--set", "sample=none")[0] == 0
    code, text, _ = meshpar("trace", out / "tiny", "--json")
    assert code == 0
    found = json.loads(text)
    assert (found["devices"], found["steps"], found["program"]) == (8, 2, "jit__step")
    assert 0 < found["busy_s"] <= found["step_s"]
    assert {one["kind"] for one in found["collectives"]} >= {"all-gather", "all-reduce"}
    assert len(found["costs"]) == 3
    assert all(one["axes"] and one["payload_bytes"] and one["predicted_s"] for one in found["collectives"])
    assert min(found["phases"][phase] for phase in ("forward", "backward", "optimizer")) > 0
    matmuls = [kernel for kernel in found["kernels"] if kernel["kind"] == "matmul"]
    assert any("mlp" in kernel["module"] and kernel["measured_s"] > 0 for kernel in matmuls)
    assert sum(found["causes"].values()) > 0
    (file,) = (out / "tiny").glob("**/*.xplane.pb")
    copied = shutil.copy(file, tmp_path / "copy.xplane.pb")
    code, text, _ = meshpar("trace", copied, "--json")
    assert any("--mesh" in note for note in json.loads(text)["notes"])
    code, text, _ = meshpar("trace", copied, "--mesh", "fsdp=4,tensor=2", "--json")
    assert json.loads(text)["collectives"] == found["collectives"]
    for given, said in (("3:2", "Write --profile 10:15"), ("9:12", "steps 1 to 6"), ("1:2", "steps 4 to 6")):
        code, _, error = meshpar("train", recipe, "--out", out, "--steps", 6, "--profile", given)
        assert code == 2
        assert said in error


@pytest.mark.matrix
def test_fresh_renames_the_earlier_run_and_prints_only_json(meshpar, tmp_path):
    recipe, out = write_recipe(tmp_path), tmp_path / "runs"
    (out / "tiny").mkdir(parents=True)
    (out / "tiny" / "recipe.json").write_text('{"steps": 1, "batch_size": 4}')
    more = ("--steps", 1, "--set", "sample=none", "--devices", 4, "--json")
    code, text, error = meshpar("train", recipe, "--out", out, "--fresh", *more)
    assert code == 0
    assert (out / "tiny.old1" / "recipe.json").exists()
    assert json.loads(text)["step"] == 1
    assert "mesh: fsdp=2, tensor=2" in error


def write_tokenizer(file: Path) -> None:
    """Write a tokenizer of six words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["</s>", "a", "b", ".", "the", "[UNK]"]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(file))


@pytest.mark.matrix
def test_train_accepts_text_and_tokenizer_options(meshpar, tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "mine").mkdir()
    for number in range(6):
        (tmp_path / "mine" / f"{number}.md").write_text("a b the . " * (60 + number))
    recipe = write_recipe(tmp_path)
    own = ("--text", tmp_path / "mine", "--tokenizer", tmp_path / "tokenizer.json")
    code, _, _ = meshpar("train", recipe, "--out", tmp_path, "--steps", 1, "--set", "data.valid_batches=1", *own)
    assert code == 0
    written = json.loads((tmp_path / "tiny" / "recipe.json").read_text())
    assert written["model"]["vocab_size"] == 128  # six words, padded to a multiple of 128
    assert written["data"]["files"] == [str(tmp_path / "mine")]

    code, _, error = meshpar("train", recipe, "--out", tmp_path, "--name", "x", "--set", "model.vocab_size=2", *own)
    assert code == 2
    assert "--set model.vocab_size=128" in error


@pytest.fixture
def train_without_memory(meshpar, monkeypatch, tmp_path):
    """Train a recipe whose run raises an error with this text. Returns the error output."""

    def train(text: str, *args: str | Path) -> str:
        def run(*_, **__):
            raise jax.errors.JaxRuntimeError(text)

        monkeypatch.setattr(training_run, "run", run)
        code, _, err = meshpar("train", "recipes/gpt_stdlib.py", "--out", tmp_path, *args)
        assert code == 2
        return err

    return train


ALLOCATION = "Out of memory while trying to allocate 68.00GiB"


def test_out_of_memory_names_the_command_that_lists_changes(train_without_memory, monkeypatch, tmp_path):
    text = f"RESOURCE_EXHAUSTED: {ALLOCATION}. [tf-allocator-allocation-error='']\nBufferAssignment OOM Debugging.\n"
    err = train_without_memory(text, "--set", "batch_size=16")
    assert f"cannot run the step: {ALLOCATION}. List changes that fit" in err
    assert "meshpar explain recipes/gpt_stdlib.py --set batch_size=16 --fit --cluster h100:1x8" in err
    fields = ("mesh=fsdp=8", "strategy=fsdp()", "step.remat=full", "step.accumulate=2")
    monkeypatch.setattr(recipe_sources, "with_plan", lambda recipe, *_: recipe.override(*fields))
    err = train_without_memory(text, "--plan", "plan.json")
    assert "--set mesh=fsdp=8 --set 'strategy=fsdp()' --set step.remat=full --set step.accumulate=2" in err
    write_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setattr(Tuned, "load", lambda path: types.SimpleNamespace(settings=("model.unroll=2",)))
    err = train_without_memory(text, "--tokenizer", tmp_path / "tokenizer.json", "--tuned", "tuned.json")
    assert "explain recipes/gpt_stdlib.py --set model.unroll=2 --set model.vocab_size=128 --fit" in err


@pytest.mark.parametrize(("fraction", "has_setting"), [(0.75, True), (0.95, False)])
def test_out_of_memory_of_a_small_pool_names_the_setting(train_without_memory, monkeypatch, fraction, has_setting):
    """XLA's pool has 75 % of the GPU's memory by default, and `explain --fit` assumes 90 %."""
    pool = int(fraction * 80e9), 80 * 10**9
    monkeypatch.setattr(train_command, "_pool_bytes", lambda device: pool)
    err = train_without_memory(f"RESOURCE_EXHAUSTED: {ALLOCATION}.")
    assert ("XLA's pool has 60 GB of the GPU's 80 GB. Set XLA_CLIENT_MEM_FRACTION=.95" in err) == has_setting
    assert "meshpar explain recipes/gpt_stdlib.py --fit" in err


def test_out_of_memory_of_the_driver_reduces_the_pool(train_without_memory):
    text = "INTERNAL: Failed to instantiate CUDA graph: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
    err = train_without_memory(text)
    assert "the CUDA driver has too little memory outside of XLA's pool" in err
    assert "Reduce the pool with XLA_CLIENT_MEM_FRACTION; if" in err


def test_pools_of_known_gpus_have_sizes():
    device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", memory_stats=lambda: {"bytes_limit": 7})
    assert train_command._pool_bytes(device) == (7, 80 * 10**9)
    assert train_command._pool_bytes(jax.devices()[0]) is None


# shard ---------------------------------------------------------------------------------------------------------------


def test_shard_prints_json(meshpar, tmp_path):
    code, text, _ = meshpar("shard", write_recipe(tmp_path), "--json")
    assert code == 0
    found = json.loads(text)
    assert found["mesh"] == {"data": 1, "stage": 1, "fsdp": 4, "expert": 1, "tensor": 2}
    parts = {f"{part}_bytes" for part in ("params", "grads", "optimizer", "state", "host")}
    assert set(found["totals"]) == {*parts, "num_params"}
    for leaf in found["leaves"]:
        assert set(leaf) == {"path", "shape", "dtype", "names", "rule", "spec", "bytes_per_device"}
    (up,) = (leaf for leaf in found["leaves"] if leaf["path"] == "layers/mlp/up/kernel")
    assert up["shape"] == [1, 16, 32]
    assert up["names"] == ["layers", "embed", "mlp"]
    assert up["spec"] == [None, "fsdp", "tensor"]
    assert up["bytes_per_device"] == 16 * 32 * 4 // 8
    assert found["totals"]["params_bytes"] == sum(leaf["bytes_per_device"] for leaf in found["leaves"])


def test_shard_needs_no_devices_of_the_mesh(meshpar, tmp_path):
    recipe = write_recipe(tmp_path)
    wide = ("--set", "model.embed_dim=4096", "--set", "model.mlp_dim=64", "--strategy", "fsdp()")
    code, text, _ = meshpar("shard", recipe, "--mesh", "data=-1,fsdp=1024", "--devices", 4096, "--json", *wide)
    assert code == 0
    found = json.loads(text)
    assert found["mesh"]["data"] == 4
    assert found["strategy"] == "fsdp()"
    assert len(jax.devices()) == 8
    code, text, _ = meshpar("shard", recipe, "--mesh", "fsdp=2,tensor=2")
    assert code == 0
    assert "layers/mlp/up/kernel" in text
    assert "fsdp: embed='fsdp'" in text


# The command itself --------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom meshpar.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'jax', 'numpy', 'flax', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    root = str(Path(cli.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert "train" in done.stdout
    assert "shard" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("args", [[], ["budget"]])
def test_a_group_without_command_prints_its_help(meshpar, args):
    code, out, error = meshpar(*args)
    assert code in (0, 2)  # by the version of click
    assert "Commands:" in (out + error).splitlines()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["trian"], "Did you mean `train` or `trace`?"),
        (["train"], "Missing argument 'RECIPE'"),
        (["train", "x.py", "--stepps", "3"], "--steps"),
        (["train", "x.py", "--steps", "many"], "not a valid integer"),
        (["train", "x.py", "--devices", "0"], "1<=x<=1024"),
        (["train", "gpt_stdlib.py"], "Did you mean `recipes/gpt_stdlib.py`"),
        (["train", "recipes/gpt_stdlib.py", "--devices", "64"], "jax was already started with 8 devices"),
        (["shard", "recipes/gpt_stdlib.py", "--mesh", "fsdp=3"], "fsdp"),
        (["shard", "recipes/gpt_stdlib.py", "--mesh", "fsdp=-1"], "--devices 4096"),
    ],
)
def test_errors_are_a_single_paragraph(meshpar, monkeypatch, args, says):
    monkeypatch.chdir(Path(cli.__file__).parents[2])
    code, out, error = meshpar(*args)
    assert code == 2
    assert says in error
    assert not out
    assert "Traceback" not in error


def test_traceback_option_prints_the_traceback(meshpar, tmp_path):
    code, _, shown = meshpar("shard", tmp_path / "none.py", "--traceback")
    assert code == 2
    assert "Traceback" in shown
    assert "no such file" in shown


# Devices -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "flags", "platforms", "accelerator", "expected"),
    [
        (None, "", None, False, ("cpu", "8")),
        (3, "", None, True, ("cpu", "3")),
        (3, f"{cli._DEVICE_COUNT_FLAG}=5", "cpu", False, ("cpu", "3")),
        (None, f"{cli._DEVICE_COUNT_FLAG}=5", None, False, ("cpu", "5")),
        (None, "", None, True, (None, None)),
        (None, "", "cuda", False, ("cuda", None)),
        (None, "", "", False, ("cpu", "8")),
    ],
)
def test_devices_are_chosen_before_jax_starts(monkeypatch, count, flags, platforms, accelerator, expected):
    monkeypatch.setattr(cli, "_has_accelerator", lambda: accelerator)
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("JAX_PLATFORMS")
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    cli.prepare_devices(count)
    found = dict(flag.split("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    assert (os.environ.get("JAX_PLATFORMS"), found.get(cli._DEVICE_COUNT_FLAG)) == expected


@pytest.mark.matrix
def test_cuda_plugins_stay_importable_and_silent():
    """The plugins are not replaced, because tracing cuDNN attention reads the version from the plugin."""
    code = """
import importlib, importlib.util, sys
from meshpar.cli.main import prepare_devices
names = [name for v in (12, 13) for name in (f"jax_cuda{v}_plugin", f"jax_plugins.xla_cuda{v}")]
there = [name for name in names if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(name)]
prepare_devices(3)
import jax
assert all(importlib.import_module(name).__file__ for name in there), there
assert not (set(names) - set(there)) & set(sys.modules), "a module that is not installed"
print(jax.device_count(), jax.default_backend())
"""
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "3 cpu", "")


@pytest.mark.matrix
def test_xla_message_before_an_abort_is_shown():
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_no_such_flag=1"}
    command = [sys.executable, "-m", "meshpar.cli.main", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1" in done.stderr


@pytest.mark.matrix
def test_command_works_with_closed_standard_streams():
    command = 'exec "$0" -m meshpar.cli.main doctor <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command, sys.executable], check=False).returncode == 0
