"""`mp.run`: runs that are started from Python."""

from __future__ import annotations

import concurrent.futures
import io
import json

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.data import ArrayData
from meshpar.hardware.compile_options import check_options
from meshpar.runs.recipe_file import load_recipe
from meshpar.runs.training_run import profiled_step
from tests.cli.test_main import BODIES
from tests.errors import raises


def loss(model, batch, key):
    error = model(batch["inputs"]) - batch["targets"]
    return mp.MeanLoss((error**2).sum(), error.size), {}


def init(key):
    return {"w": jax.random.normal(key, (4, 2))}


def recipe(**fields) -> mp.Recipe:
    values = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    arrays = {"inputs": values, "targets": values[:, :2] ** 2}
    return mp.Recipe(
        **{
            "name": "line", "mesh": mp.MeshSpec(data=8), "strategy": mp.ddp(), "loss": loss, "steps": 4,
            "model": mp.from_functions(init, lambda params, x: x @ params["w"]), "batch_size": 16,
            "optimizer": mp.Optax(make=lambda steps: optax.sgd(0.1)),
            "data": ArrayData(arrays=arrays, valid=arrays),
        }
        | fields
    )  # fmt: skip


class Steps(mp.hooks.Hook):
    """Record the steps of a run."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_record(self, run, record) -> None:
        self.steps.append(record.step)


def test_run_resumes_with_the_hooks_of_the_caller(tmp_path) -> None:
    first, second, text = Steps(), Steps(), io.StringIO()
    outcome = mp.run(recipe(), out=tmp_path / "a", hooks=[first], stream=text)
    assert (outcome.reason, int(outcome.state.step), outcome.folder) == ("done", 4, tmp_path / "a" / "line")
    assert json.loads((outcome.folder / "summary.json").read_text()) == outcome.summary
    outcome = mp.run(recipe(steps=6), out=tmp_path / "a", hooks=[second], stream=text)
    assert (first.steps, second.steps) == ([1, 2, 3, 4], [5, 6])
    assert "resuming at step 4 of 6" in text.getvalue()
    straight = mp.run(recipe(steps=6), out=tmp_path / "b", stream=text)
    np.testing.assert_array_equal(outcome.state.params["w"], straight.state.params["w"])
    assert outcome.summary["validation"] == straight.summary["validation"]


def test_a_run_without_fingerprint_does_not_resume(tmp_path) -> None:
    file = mp.run(recipe(), out=tmp_path, stream=io.StringIO()).folder / "recipe.json"
    saved = json.loads(file.read_text())
    del saved["program"]["fingerprint"]
    file.write_text(json.dumps(saved))
    with raises("conflict", "run "):
        mp.run(recipe(steps=6), out=tmp_path, stream=io.StringIO())


def test_run_reads_a_recipe_file_as_the_command_does(tmp_path, meshpar) -> None:
    file, text = tmp_path / "recipe.py", io.StringIO()
    file.write_text(BODIES.replace("data=2", "data=8"))
    outcome = mp.run(file, out=tmp_path / "python", stream=text)
    code, printed, _ = meshpar("train", file, "--out", tmp_path / "command")
    summary = json.loads((tmp_path / "command" / "bodies" / "summary.json").read_text())
    assert code == 0
    assert outcome.summary["validation"] == summary["validation"]
    assert [line for line in printed.splitlines() if line.startswith("program")] == [
        line for line in text.getvalue().splitlines() if line.startswith("program")
    ]


def test_hooks_must_be_hooks(tmp_path) -> None:
    with raises("wrong-type", "mp.run(hooks=...)"):
        mp.run(recipe(), out=tmp_path, hooks=[Steps])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ({"recipe": recipe}, "wrong-type", "the recipe is <function recipe"),
        ({"recipe": None}, "wrong-type", "the recipe is None"),
        ({"hooks": iter([Steps()])}, "wrong-type", "hooks is a list_iterator"),  # the check would consume it
        ({"hooks": Steps()}, "wrong-type", "hooks is a Steps"),
        ({"profile": 3}, "wrong-type", "profile is 3"),
        ({"profile": (3, 1)}, "bad-syntax", "--profile 3:1"),
        ({"stream": "log.txt"}, "wrong-type", "the output is 'log.txt'"),
        ({"fresh": "no"}, "not-a-bool", "fresh='no'"),
        ({"devices": ["cpu"] * 8}, "wrong-type", "an element is not a device"),
        ({"devices": jax.devices()[:1] * 8}, "wrong-type", "a device occurs twice"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path, arguments, code, text) -> None:
    with raises(code, "") as error:
        mp.run(**{"recipe": recipe(), "out": tmp_path} | arguments)
    assert text in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_run_starts_in_the_main_thread(tmp_path) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool, raises("wrong-type", "mp.run"):
        pool.submit(mp.run, recipe(), out=tmp_path).result()


def test_run_takes_the_name_of_an_installed_recipe(tmp_path) -> None:
    with raises("missing-file", "recipe `gpt_stdlip`"):
        mp.run("gpt_stdlip", out=tmp_path)
    assert load_recipe("gpt_stdlib").name == "gpt_stdlib"


def test_profiled_steps_on_gpus_use_no_cuda_graphs():
    step = mp.train_step(loss, xla={"xla_gpu_enable_triton_gemm": False})
    assert profiled_step(step, "cpu") is step
    graphless = profiled_step(step, "gpu")
    assert graphless.options.xla == {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_command_buffer": ""}
    assert graphless.loss_fn is step.loss_fn
    check_options({"xla_gpu_enable_command_buffer": ""})
