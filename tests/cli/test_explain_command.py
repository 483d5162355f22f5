"""Test the output, files, checks and errors of `meshpar explain`."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import meshpar as mp
from meshpar.cli import explain_command as command
from meshpar.cli import main as cli
from meshpar.data import ArrayData, TextData
from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect import strategy_table as reference
from meshpar.inspect import target
from meshpar.runs import memory_fit
from meshpar.runs.memory_fit import MemoryChange
from meshpar.runs.recipe_file import load_recipe

ROOT = Path(cli.__file__).parents[2]
pytestmark = pytest.mark.call_stacks

RECIPE = """
from __future__ import annotations
import jax
import meshpar as mp
from meshpar.data import TextData
from meshpar.models import TransformerConfig, next_token_loss

def recipe(devices: int = 8) -> mp.Recipe:
    model = TransformerConfig(
        vocab_size=256, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128
    )
    return mp.Recipe(
        name="tiny", mesh=mp.MeshSpec(fsdp=devices), strategy=mp.fsdp(), model=model, loss=next_token_loss,
        data=TextData(files=("no/such/file.txt",), seq_len=128), steps=3, batch_size=2 * devices,
    )

def talkative(devices: int = 8) -> mp.Recipe:
    print("a recipe that talks")
    return streamed(devices)

def shifted(model, batch, key):
    return next_token_loss(model, {name: jax.numpy.roll(x, 1, axis=0) for name, x in batch.items()}, key)

def unexpected(devices: int = 8) -> mp.Recipe:
    return recipe(devices).replace(loss=shifted)

class Stream:
    def open(self, *, batch_size, seed):
        raise AssertionError("the data must not be opened")

def streamed(devices: int = 8) -> mp.Recipe:
    return recipe(devices).replace(data=Stream())

def crashing(devices: int = 8) -> mp.Recipe:
    return {}["missing key"]

def wrong(model, batch, key):
    return jax.numpy.zeros(3) + jax.numpy.zeros(4), {}

def crashing_loss(devices: int = 8) -> mp.Recipe:
    return recipe(devices).replace(loss=wrong)

def leaving(devices: int = 8) -> mp.Recipe:
    raise SystemExit(0)
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipes") / "tiny.py"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def explain(meshpar):
    return functools.partial(meshpar, "explain")


# Output --------------------------------------------------------------------------------------------------------------


BATCH = "inputs=int32[16,128], targets=int32[16,128]"


def test_json_has_the_documented_fields(explain, recipe):
    code, out, error = explain(f"{recipe}:talkative", "--json", "--check", "--batch", BATCH)
    assert (code, error.strip()) == (0, "a recipe that talks")  # stdout has only the report, and the data is not opened
    found = json.loads(out)
    assert found["memory"]["batch_bytes"] == 2 * 16 * 128 * 4 // 8
    top = "devices mesh target memory collectives totals matching overlap compute compile_s"
    assert set(top.split()) <= set(found)
    memory = "state_bytes params_bytes optimizer_bytes temporaries_bytes peak_bytes limit_bytes fits"
    assert set(memory.split()) <= set(found["memory"])
    fields = "kind axes dtype payload_bytes bytes_sent_per_device count_per_step module source origin"
    for one in found["collectives"]:
        assert {*fields.split(), "crosses_node", "hidden_fraction"} <= set(one)
        assert one["origin"] in ("partitioner", "kernel")
    assert {"matched", "missing", "unexpected"} <= set(found["matching"])
    assert {"hidden_fraction", "per_axis"} <= set(found["overlap"])
    asked = "flops_per_device model_flops_per_device predicted_step_s bound"
    assert set(asked.split()) <= set(found["compute"])
    # The totals are the sums of the list.
    for axes, kinds in found["totals"].items():
        for kind, total in kinds.items():
            members = [c for c in found["collectives"] if ("*".join(c["axes"]), c["kind"]) == (axes, kind)]
            assert total["count_per_step"] == sum(c["count_per_step"] for c in members)
            sent = sum(c["count_per_step"] * c["bytes_sent_per_device"] for c in members)
            assert total["bytes_sent_per_device"] == pytest.approx(sent)
    assert found["mesh"] == {"data": 1, "stage": 1, "fsdp": 8, "expert": 1, "tensor": 1}
    assert (found["devices"], found["target"]) == (8, "cpu")


def test_fit_needs_the_memory_of_a_gpu(explain, recipe):
    code, _, err = explain(recipe, "--fit", "--batch", BATCH)
    assert code == 2
    assert "the memory of a device of `cpu` is unknown. Name the cluster: --cluster h100:1x8" in err


def test_fit_is_part_of_the_report(explain, recipe, monkeypatch, tmp_path):
    """The step is compiled once for the report, and the search starts from its peak memory."""
    page, reports = tmp_path / "report.html", []
    change = MemoryChange(
        kind="micro-steps", settings=("step.accumulate=2",), command="--set step.accumulate=2", fits=True,
        python="recipe.replace(step=dataclasses.replace(recipe.step, accumulate=2))",
        peak_bytes=6 * 10**8, saved_bytes=4 * 10**8, step_s=0.11, slowdown=0.1,
    )  # fmt: skip

    def fit_memory(recipe, cluster, *, batch, report, progress):
        reports.append(report)
        options = {"limit_bytes": 9 * 10**8, "peak_bytes": 10**9, "step_s": 0.1, "changes": (change,)}
        return memory_fit.MemoryFit(recipe=recipe.name, cluster=cluster.name, **options)

    monkeypatch.setattr(memory_fit, "fit_memory", fit_memory)
    monkeypatch.setattr(command.Subject, "fit_cluster", lambda self: parse_cluster("h100:1x8"))
    code, out, _ = explain(recipe, "--fit", "--batch", BATCH, "--json", "--html", page)
    assert code == 0
    assert json.loads(out)["fit"]["changes"][0]["settings"] == ["step.accumulate=2"]
    assert "the fastest change that fits: --set step.accumulate=2" in page.read_text()
    (report,) = reports
    assert report.memory.remedies == ()


@pytest.mark.pod
@pytest.mark.matrix
def test_the_first_change_fits_from_the_command_line(explain, tmp_path):
    """Apply the `--set` line to the same command, and the Python line to the same recipe."""
    page = tmp_path / "report.html"
    args = ("recipes/gpt_stdlib.py", "--cluster", "h100:1x8", "--set", "batch_size=131072")
    code, out, _ = explain(*args, "--fit", "--json", "--html", page)
    assert code == 0
    found = json.loads(out)
    first, limit = found["fit"]["changes"][0], found["fit"]["limit_bytes"]
    assert found["memory"]["peak_bytes"] == found["fit"]["peak_bytes"] > limit == 72 * 10**9
    assert first["fits"]
    assert len([change for change in found["fit"]["changes"] if change["peak_bytes"]]) >= 5
    text = page.read_text()
    assert html.escape(f"the fastest change that fits: {first['command']}") in text
    assert text.count("<h3>Memory over time</h3>") == 1

    code, out, _ = explain(*args, *shlex.split(first["command"]), "--fit", "--json")
    assert code == 0
    changed = json.loads(out)
    assert changed["memory"]["peak_bytes"] == first["peak_bytes"] <= limit
    assert changed["compute"]["predicted_step_s"] == first["step_s"]
    assert (changed["fit"]["fits"], changed["fit"]["changes"]) == (True, [])

    recipe = load_recipe("recipes/gpt_stdlib.py", devices=8).override("batch_size=131072")
    python = eval(first["python"], {"recipe": recipe, "dataclasses": dataclasses, "mp": mp})
    assert python == recipe.override(*first["settings"]) != recipe


@pytest.mark.matrix
@pytest.mark.parametrize("option", ["--html", "--save-budget"])
def test_an_unwritable_file_exits_with_2(explain, recipe, tmp_path, option):
    code, _, err = explain(recipe, option, tmp_path / ("x" * 300), "--check")
    assert code == 2
    assert "that failed (File name too long)" in err


def test_permissions_are_checked_before_compilation(explain, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_compile_report", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    code, _, err = explain(recipe, "--html", tmp_path / "report.html")
    assert code == 2
    assert "you do not have permission" in err


@pytest.mark.matrix
def test_text_and_html_compare_two_strategies(explain, recipe, tmp_path):
    page = tmp_path / "report.html"
    args = (recipe, "--mesh", "fsdp=4", "--set", "batch_size=8", "--against", "zero1()", "--html", page)
    code, out, _ = explain(*args)
    assert code == 0
    for text in ("fsdp() on fsdp=4 · cpu · 4 devices", "MEMORY", "EXPECTED COLLECTIVES", "SIDE BY SIDE"):
        assert text in out
    (peak,) = re.findall(r"^ *peak memory +(\S+ \S+) +(\S+ \S+) +([+−]).*$", out, flags=re.MULTILINE)
    assert peak[2] == "+"  # ZeRO-1 stores unsharded parameters
    assert max(len(line) for line in out.splitlines()) <= cli.PIPE_WIDTH
    assert not any(line.endswith(" ") for line in out.splitlines())
    html = page.read_text()
    assert html.startswith("<!doctype html>")
    assert html.count("<img ") == 6  # bytes, memory, and memory over time of each report
    assert "Side by side" in html
    assert html.count('class="meshpar" data-report=') == 2
    assert not re.findall(r"https?://(?!www.w3.org/2000/svg)", html)  # the page loads no other files


@pytest.mark.matrix
def test_pipeline_recipe_shows_its_schedule(explain, recipe):
    strategy = "pipeline_parallel(stages=2, microbatches=4, schedule='zb-h1') | fsdp() | tensor_parallel()"
    args = (recipe, "--mesh", "stage=2,fsdp=2,tensor=2", "--set", f"strategy={strategy}", "--check")
    code, out, _ = explain(*args)
    assert code == 0
    assert "collectives match the strategy" in out
    for text in ("zb-h1: 2 stages, 4 microbatches", "bubble of the schedule", "once per step ✔", "once per microbatch"):
        assert text in out


@pytest.mark.matrix
def test_against_as_json(explain, recipe):
    code, out, _ = explain(recipe, "--against", "fsdp=4,data=2", "--json")
    assert code == 0
    found = json.loads(out)["against"]
    assert found["labels"] == ["fsdp=8", "data=2,fsdp=4"]
    assert found["report"]["mesh"]["data"] == 2
    (state,) = (row for row in found["differences"] if row["quantity"].strip() == "state")
    assert state["difference"] == state["second"] - state["first"] > 0


def test_against_keeps_other_options(recipe, monkeypatch):
    monkeypatch.setattr(target, "missing_aot", lambda: "")
    asked = {"layout": ["mesh=fsdp=4,data=2"], "assignments": ["model.num_layers=3"], "shapes": None}
    subject = command.Subject.of(recipe, "h100:1x8", **asked)
    other = subject.against("a100-80:2x4")
    assert (other.target, other.sizes["data"], other.recipe.model.num_layers) == ("a100-80:2x4", 2, 3)
    other = subject.against(f"{recipe}:unexpected")
    assert (other.target, other.sizes["data"], other.recipe.model.num_layers) == ("h100:1x8", 1, 3)
    assert subject.against("gpt_stdlib").recipe.name == "gpt_stdlib"
    assert subject.against("zero1()").recipe.strategy == mp.zero1()
    assert subject.against("data=8").sizes["data"] == 8


# Checks --------------------------------------------------------------------------------------------------------------


def test_check_fails_on_an_unexpected_collective(explain, recipe):
    code, out, error = explain(f"{recipe}:unexpected", "--check")
    assert code == 1
    assert "Unexpected" in out
    reasons = error.strip().splitlines()
    assert all(reason.startswith("meshpar: unexpected: ") for reason in reasons)
    assert "tiny.py" in error  # the source line of the collective


@pytest.mark.parametrize(
    ("function", "line", "raised"),
    [
        ("crashing", '{}["missing key"]', "KeyError ('missing key')"),
        ("crashing_loss", "zeros(3) + ", "TypeError (add got incompatible shapes"),
        ("leaving", "raise SystemExit", "SystemExit (0)"),
    ],
)
def test_an_exception_in_a_recipe_exits_with_2(explain, recipe, function, line, raised):
    """The error names the line in the recipe, not in the functions that it called."""
    at = next(number for number, text in enumerate(RECIPE.split("\n"), start=1) if line in text)
    code, out, error = explain(f"{recipe}:{function}", "--check")
    assert (code, out) == (2, "")
    for part in (f"recipe `{recipe}:{function}`", raised, f"tiny.py:{at}", "--traceback"):
        assert part in error
    assert "Traceback" not in error


def test_a_syntax_error_in_a_recipe_exits_with_2(explain, tmp_path):
    (tmp_path / "broken.py").write_text("import jax\n\ndef recipe(:\n")
    code, _, error = explain(tmp_path / "broken.py", "--check")
    assert code == 2
    assert "SyntaxError" in error
    assert "broken.py:3" in error


@pytest.mark.matrix
def test_a_closed_pipe_exits_with_broken_pipe(recipe):
    """`meshpar explain ... | head` prints no traceback and exits with the code for SIGPIPE."""
    command = subprocess.Popen(
        [sys.executable, "-m", "meshpar.cli.main", "explain", recipe, "--check", "--set", "model.num_layers=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
    )
    command.stdout.close()
    stderr = command.stderr.read()
    assert (command.wait(), stderr) == (cli.BROKEN_PIPE, "")


@pytest.mark.matrix
def test_a_shipped_recipe_passes_the_check(explain):
    # Stacked weights of different layers and the embedding have equal sizes in this recipe.
    gpt = ROOT / "recipes" / "gpt_stdlib.py"
    code, _, error = explain(gpt, "--strategy", "zero1() | tensor_parallel()", "--check", "--set", "data.seq_len=64")
    assert (code, error) == (0, "")


@pytest.mark.matrix
def test_check_fails_if_a_budget_is_exceeded(explain, recipe, tmp_path):
    saved = tmp_path / "budget.json"
    assert explain(recipe, "--save-budget", saved)[0] == 0
    more = ("--set", "step.accumulate=2", "--strategy", "zero3()")
    code, out, error = explain(recipe, "--budget", saved, "--check", "--json", *more)
    assert code == 1
    assert re.search(r"over budget: all-gather over fsdp sends more: .*, in \S+ · \S+\.py:\d+", error)
    budget = json.loads(out)["budget"]
    assert budget["is_kept"] is False
    changes = {change["text"]: change["is_over"] for change in budget["differences"]}
    assert changes["strategy was fsdp() and is zero3()"] is False
    code, _, error = explain(recipe, "--budget", saved, "--set", "name=other")
    assert code == 2
    assert "saved for recipe `tiny`" in error


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "Missing argument 'RECIPE'"),
        (("RECIPE", "--mesh", "fsdp=512"), "8 local devices. Use --mesh fsdp=8, or --cluster h100:64x8"),
        (("RECIPE", "--cluster", "h1000:8x8"), "Did you mean `h100`"),
        (("RECIPE", "--cluster", "FOLDER/broken.json"), "broken.json"),
        (("RECIPE", "--cluster", "h100:8x8", "--mesh", "fsdp=8"), "64 GPUs of h100:8x8"),
        (("RECIPE", "--html", "FOLDER/none/report.html"), "no folder"),
        (("RECIPE", "--save-budget", "FOLDER/none/budget.json"), "no folder"),
        (("RECIPE", "--budget", "FOLDER/none.json"), "no such file"),
        (("RECIPE", "--budget", "FOLDER/broken.json"), "JSON"),
        (("RECIPE", "--batch", "inputs=int33[4,8]"), "with a NumPy dtype"),
        (("RECIPE", "--batch", "inputs"), "Write it like 'inputs=int32[64,1024]"),
        (("RECIPE:streamed",), "--batch 'inputs=int32[16,1024]"),
        (("RECIPE", "--against", "fdsp()"), "fsdp"),
    ],
)
def test_errors_are_raised_before_compilation(explain, recipe, tmp_path, monkeypatch, args, message):
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.setattr(target, "missing_aot", lambda: "")
    monkeypatch.setattr("meshpar.cli.explain_command._compile_report", lambda *_: pytest.fail("compiled"))
    words = [arg.replace("RECIPE", recipe).replace("FOLDER", str(tmp_path)) for arg in args]
    code, out, error = explain(*words)
    assert code == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not out


def test_a_missing_extra_is_reported(explain, recipe, monkeypatch):
    monkeypatch.setattr(target, "missing_aot", lambda: "jax's CUDA plugin is not installed")
    for args in ((recipe, "--cluster", "h100:1x8"), ("--table",)):
        code, _, error = explain(*args)
        assert code == 2
        assert "pip install 'meshpar[aot]'" in error


def test_primitives_that_need_devices_are_reported(explain, recipe, monkeypatch):
    monkeypatch.setattr(target, "missing_aot", str)

    def refuse(*args, **kwargs):
        raise ValueError("AbstractMesh cannot be used when jaxpr contains primitives that require devices")

    monkeypatch.setattr("meshpar.training.step.TrainStep.trace", refuse)
    code, _, error = explain(recipe, "--cluster", "h100:1x8")
    assert code == 2
    assert "Set JAX_PLATFORMS=cpu before Python starts" in error


# Batches -------------------------------------------------------------------------------------------------------------


def test_batch_shapes_match_the_batches(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox. " * 200)
    arrays = {"x": np.zeros((64, 3, 2), np.float64), "y": np.zeros(64, np.int64)}
    for data in (TextData(files=(str(tmp_path / "text.txt"),), seq_len=16), ArrayData(arrays=lambda: arrays)):
        served = data.open(batch_size=4, seed=0).train().spec
        shapes = data.batch_shapes(4)
        assert {name: (x.shape, x.dtype) for name, x in shapes.items()} == {
            name: (x.shape, x.dtype) for name, x in served.items()
        }


# On a pod ------------------------------------------------------------------------------------------------------------


@pytest.mark.pod
def test_a_cluster_is_compiled_ahead_of_time(explain, recipe, tmp_path):
    if target.missing_aot():
        pytest.skip(f"compiles for GPUs, which needs `pip install meshpar[aot]`: {target.missing_aot()}")
    page = tmp_path / "report.html"
    code, out, error = explain(recipe, "--cluster", "h100:2x4", "--json", "--check", "--html", page)
    assert (code, error) == (0, "")
    found = json.loads(out)
    assert found["target"] == "h100:2x4"
    assert found["memory"]["fits"] is True
    assert found["compute"]["predicted_step_s"] > 0
    assert any(one["crosses_node"] for one in found["collectives"])
    assert page.read_text().count("<img ") == 3  # bytes, memory, timeline of a layer


def test_explain_prints_the_table_of_strategies(explain, monkeypatch):
    made = reference.StrategyTable(cluster="h100:1x8", cases=(), reports=())
    asked = []
    monkeypatch.setattr(reference, "strategy_table", lambda cluster: asked.append(cluster) or made)
    code, out, _ = explain("--table")
    assert (code, out.splitlines()[0]) == (0, made.markdown.splitlines()[0])
    code, out, _ = explain("--table", "--json", "--cluster", "a100-80:1x8")
    assert json.loads(out) == {"cluster": "h100:1x8", "rows": []}
    assert asked == [None, "a100-80:1x8"]
    for more in (("--html", "/nosuch/x"), ("--budget", "b.json"), ("--check",), ("recipe.py",)):
        code, _, error = explain("--table", *more)
        assert code == 2
        assert f"--table: cannot use {more[0] if more[0] != 'recipe.py' else 'RECIPE'}: the table" in error
    assert len(asked) == 2
