"""Test `meshpar budget`: saved files, changes of recipes, exit codes and the CI file."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar.cli import budget_command as command
from meshpar.cli import main as cli
from meshpar.inspect.budget import Budget

ROOT = Path(cli.__file__).parents[2]
RECIPE = """
import meshpar as mp
from meshpar.data import TextData
from meshpar.models import TransformerConfig, next_token_loss

def recipe(devices: int = 8) -> mp.Recipe:
    model = TransformerConfig(
        vocab_size=256, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128
    )
    return mp.Recipe(
        name="tiny", mesh=mp.MeshSpec(fsdp=devices), strategy=mp.fsdp(min_bytes=0), model=model, loss=next_token_loss,
        data=TextData(files=("none.txt",), seq_len=32), steps=3, batch_size=2 * devices,
    )
"""
PROGRAM = Budget(
    name="tiny", target="cpu", mesh={"fsdp": 8}, strategy="fsdp()", peak_bytes=10**6, jax_version="1", fingerprint="a",
    totals={"fsdp": {"all-gather": {"count_per_step": 8, "bytes_sent_per_device": 1e6}}}, arguments=("recipe.py",),
)  # fmt: skip


@pytest.fixture
def meshpar(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command in a folder with a recipe, and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, "cpu" if name == "JAX_PLATFORMS" else "")

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["budget", *map(str, args)])
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def compiled(monkeypatch):
    """Return a list of results, which replace the compilation of programs."""
    results: list[Budget | str] = []
    monkeypatch.setattr(command, "_compiled", lambda programs, jobs, cache: results[: len(programs)])
    return results


def test_check_compares_the_files_of_a_folder(meshpar, compiled, tmp_path):
    compiled += [PROGRAM, dataclasses.replace(PROGRAM, name="other")]
    assert meshpar("save", "recipe.py", "recipe.py")[0] == 0
    assert sorted(path.name for path in (tmp_path / "budgets").iterdir()) == ["other-cpu.json", "tiny-cpu.json"]
    assert meshpar("check")[0] == 0
    compiled[0] = dataclasses.replace(PROGRAM, name="other", peak_bytes=2 * 10**6)  # sorted by file name
    code, out, _ = meshpar("check", "--markdown", "table.md")
    assert code == 1
    assert "peak memory" in out
    assert meshpar("check", "budgets/tiny-cpu.json")[0] == 1
    meshpar("check", "--markdown", "table.md")
    assert (tmp_path / "table.md").read_text().count("| other on cpu | ✘ peak memory | 1 MB | 2 MB |") == 2
    edited = dataclasses.replace(Budget.load(tmp_path / "budgets" / "other-cpu.json"), tolerance=0.05)
    edited.save(tmp_path / "budgets" / "other-cpu.json")
    assert meshpar("check", "--update")[0] == 0
    assert meshpar("check")[0] == 0
    assert Budget.load(tmp_path / "budgets" / "other-cpu.json").tolerance == 0.05


def test_a_program_that_does_not_compile_is_an_error_and_others_are_compared(meshpar, compiled):
    compiled += [dataclasses.replace(PROGRAM, name="a"), dataclasses.replace(PROGRAM, name="b")]
    meshpar("save", "recipe.py", "recipe.py")
    compiled[:] = ["recipe recipe.py: no such file", dataclasses.replace(PROGRAM, name="b", peak_bytes=2 * 10**6)]
    code, out, _ = meshpar("check", "--json")
    assert code == 2
    first, second = json.loads(out)["checks"]
    assert (first["error"], first["is_over"]) == ("recipe recipe.py: no such file", False)
    assert second["is_over"]
    code, _, err = meshpar("save", "recipe.py")
    assert code == 2
    assert "no such file" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: {**fields, "arguments": []}, "does not name its recipe"),
        (lambda fields: {**fields, "target": "NVIDIA H100"}, "saved for the local devices"),
        (lambda fields: [fields], "missing"),
        (None, "not valid JSON"),
    ],
)
def test_other_budgets_are_compared_if_a_file_cannot_be_read(meshpar, compiled, change, message, tmp_path):
    compiled.append(dataclasses.replace(PROGRAM, peak_bytes=2 * 10**6))
    folder = tmp_path / "budgets"
    folder.mkdir()
    text = "<<<<<<< HEAD\n" if change is None else json.dumps(change(PROGRAM.to_json()))
    (folder / "a.json").write_text(text)
    PROGRAM.save(folder / "b.json")
    code, out, _ = meshpar("check", "--json", "--update", "--markdown", "table.md")
    assert code == 2
    broken, other = json.loads(out)["checks"]
    assert (broken["file"], broken["program"]) == ("budgets/a.json", "budgets/a.json")
    assert message in broken["error"]
    assert "meshpar budget save RECIPE" in broken["error"]
    assert other["is_over"]
    assert Budget.load(folder / "b.json") == compiled[0]
    assert (folder / "a.json").read_text() == text
    assert "1 could not be compared" in (tmp_path / "table.md").read_text()


def test_a_check_without_any_budget_compiles_nothing(meshpar, tmp_path):
    (tmp_path / "b.json").touch()
    code, out, _ = meshpar("check", "b.json")
    assert code == 2
    assert "1 could not be compared" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("check",), "folder budgets"),
        (("check", "none.json"), "none.json"),
        (("save",), "Missing argument"),
        (("check", "--markdown", "no/folder.md"), "no folder"),
        (("check", "--jobs", "0"), "--jobs"),
        (("save", "gpt_stdlib", "--folder", "file"), "--folder"),
        (("save", "gpt_stdlib", "--folder", "file/budgets"), "--folder DIR"),
        (("save", "gpt_stdlib", "--cluster", "h100:1x8", "--cache", "file/cache"), "--cache none"),
    ],
)
def test_errors(meshpar, args, message, tmp_path):
    (tmp_path / "budgets").mkdir()
    (tmp_path / "file").touch()
    code, _, err = meshpar(*args)
    assert code == 2
    assert message in err


def test_compiling_processes_end_with_the_command():
    code = """
import multiprocessing, time
from meshpar.cli.budget_command import _end_with_parent

def compile():
    _end_with_parent()
    print("started", flush=True)
    time.sleep(60)

multiprocessing.get_context("fork").Process(target=compile).start()
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    parent.kill()
    assert parent.communicate(timeout=30)[0] == b""  # the other process has closed its end of the pipe


def test_two_budgets_do_not_share_a_file(meshpar, compiled):
    compiled += [PROGRAM, PROGRAM]
    code, _, err = meshpar("save", "recipe.py", "recipe.py")
    assert code == 2
    assert "--set name=NAME" in err


@pytest.mark.matrix
def test_budget_of_a_recipe_follows_its_changes(meshpar, tmp_path):
    assert meshpar("save", "recipe.py", "--set", "model.num_layers=3")[0] == 0
    saved = Budget.load(tmp_path / "budgets" / "tiny-cpu.json")
    assert saved.arguments == ("recipe.py", "--set", "model.num_layers=3")
    code, out, err = meshpar("check")
    assert (code, "unchanged" in out) == (0, True), err
    (tmp_path / "recipe.py").write_text(RECIPE.replace("steps=3", "steps=3, step=mp.StepOptions(accumulate=2)"))
    code, out, _ = meshpar("check", "--json")
    assert code == 1
    over = {d["quantity"]: d for d in json.loads(out)["checks"][0]["differences"] if d["is_over"]}
    assert "all-gather over fsdp" in over
    assert re.search(r"layers.* · .*\.py:\d+", over["all-gather over fsdp"]["where"])
    (tmp_path / "recipe.py").write_text(RECIPE.replace("fsdp(min_bytes=0)", "fsdq()"))
    code, out, _ = meshpar("check")
    assert code == 2
    assert "fsdq" in out


def test_ci_file_has_commands_that_exist():
    lines = (ROOT / "recipes" / "ci" / "budgets.yaml").read_text().splitlines()
    commands = [line.partition("meshpar ")[2].rstrip("` ") for line in lines if "meshpar budget" in line]
    assert len(commands) >= 3
    for line in commands:
        words = shlex.split(line.partition("`")[0])[1:]
        subcommand = command.budget.commands[words[0]]
        subcommand.make_context(words[0], words[1:])
