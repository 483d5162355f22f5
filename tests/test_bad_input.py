"""Test that commands answer bad input with success or one clear error, before they take much memory.

Random cases are drawn from kinds of invalid files, numbers, names and variables. `make test` tries some in one process,
`make test-all` all of them. An alarm ends a case that hangs.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from meshpar.cli import main as cli
from meshpar.data import text
from meshpar.data.tokens import load_tokenizer
from meshpar.hardware.clusters import parse_profile
from meshpar.inspect.budget import Budget
from meshpar.planner.plan import load_plans
from meshpar.pod import launch
from meshpar.sharding.errors import MeshparError
from meshpar.sharding.host_resources import check_memory, read_json, replace_file, unexpected
from tests import grid

HANGS_S = 300
RECIPE = """
import meshpar as mp
from meshpar.data import TextData
from meshpar.models import TransformerConfig, next_token_loss

def recipe():
    return mp.Recipe(
        name="bad", mesh=mp.MeshSpec(fsdp=2), strategy=mp.fsdp(min_bytes=0), loss=next_token_loss,
        model=TransformerConfig(vocab_size=256, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8,
                                mlp_dim=16),
        data=TextData(files=("text.txt",), seq_len=16, valid_fraction=0.2, valid_batches=1), steps=2, batch_size=4,
    )

def raises():
    return {}["no such key"]

def leaves():
    raise SystemExit(0)

def recurses():
    return recurses()

def another():
    return 3

def with_loss(loss):
    import dataclasses
    return lambda: dataclasses.replace(recipe(), loss=loss)

def absent(model, batch, key):
    return batch["mask"], {}

raises_in_loss = with_loss(absent)
takes_no_key = with_loss(lambda model, batch: (0.0, {}))
returns_no_pair = with_loss(lambda model, batch, key: next_token_loss(model, batch, key)[0])

def no_rate():
    raise RuntimeError("no rate")

def takes_no_steps():
    import dataclasses
    return dataclasses.replace(recipe(), optimizer=mp.Optax(make=lambda: None))

def raises_in_optimizer():
    import dataclasses
    return dataclasses.replace(recipe(), optimizer=mp.Optax(make=lambda steps: no_rate()))
"""
DEEP = "[" * 100_000
WEIRD = (
    "", "-1", "0", "1e20", "1e400", "nan", "inf", "9" * 30, "9" * 5000, "4000000000", "99999999999", "2147483648",
    "none", "true", "[]", "{}", "()", "[[[", "'", "\\", "é", "x", "a=b", "..", "/", "~", "~nobody/x",
    "x" * 5000, "1,2,3", "0x10", "1_000", " ", "-0", "*", "**/**/**", "%s", "{x}", "__import__('os').abort()",
)  # fmt: skip
FIELDS = (
    "steps", "batch_size", "step.accumulate", "seed", "mesh.fsdp", "mesh.data", "mesh", "strategy", "model.vocab_size",
    "model.num_layers", "model.embed_dim", "model.num_heads", "model.head_dim", "model.mlp_dim", "model.attention",
    "data.seq_len", "data.prefetch", "data.files", "data.valid_fraction", "data.max_bytes", "data.tokenizer",
    "optimizer.lr", "optimizer.warmup_steps", "optimizer.b1", "step.precision.compute", "step.remat",
    "step.batch_slices", "step.nonfinite", "validate_every", "checkpoint_every", "keep_checkpoints",
    "sample.num_tokens", "sample.temperature", "name",
    "step.xla.x", "no.such", "model", "data",
)  # fmt: skip
CONTENTS = (
    "", "{}", "[]", "null", "3", '"x"', "{", DEEP, '{"a":' * 50_000, "\x00\x01", '{"devices": 1}', '{"plans": []}',
    '{"plans": [3]}', '{"plans": 1e999}', '{"table": [[["F", 0, 99999999999]]]}', '{"name": ' + "9" * 5000 + "}",
    '{"step": 1}', '{"nodes": 1e30}', '{"axes": {"x": {}}, "devices": "cpu"}', "0F0,0B0", "a,b\nc", '{"model": null}',
    '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 99999999999}, "unk_token": "a"}}',
)  # fmt: skip


class Place:
    """A folder with a recipe, a text, and everything that can be in the place of a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "recipe.py").write_text(RECIPE)
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
        for name in ("pipes", "folder.json", "tangle"):
            (folder / name).mkdir()
        for name in ("pipe", "pipe.json", "pipe.py", "pipes/config.json", "pipes/tokenizer.json"):
            os.mkfifo(folder / name)
        (folder / "gone").symlink_to(folder / "nowhere")
        (folder / "loop").symlink_to(folder / "loop")
        (folder / "tangle" / "a.txt").write_text("some text " * 200)
        for name in ("one", "two", "three"):  # a naive walk would follow these links forever
            (folder / "tangle" / name).symlink_to(folder / "tangle")
        (folder / "broken.py").write_text("def recipe(:\n")
        (folder / "bytes.py").write_bytes(bytes(range(256)))
        for number, content in enumerate(CONTENTS):
            for suffix in ("json", "csv", "jsonl"):
                (folder / f"file{number}.{suffix}").write_text(content)


VARIABLES = sorted(
    {name for one in launch._LAUNCHERS for name in (*one.signs, one.process_id, *one.num_processes, *one.coordinator)}
    | {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"}
    | {"JAX_LOCAL_DEVICE_IDS", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "MASTER_PORT", "JAX_COORDINATOR_PORT"}
)
READ: dict[str, Callable[[str], object]] = {
    "budget": Budget.load,
    "plans": load_plans,
    "profile": parse_profile,
    "text": lambda path: list(text.Reading(files=text.find([path]))),
    "tokenizer": load_tokenizer,
}
"""Functions that read a file before a command compiles."""
ODD = ("pipe", "pipe.json", "folder.json", "gone", "loop", "no/such", "x" * 300, "x/" * 3000, "", ".", "/dev/zero")
JSONS, CSVS, LINES = ([*(f"file{k}.{end}" for k in range(len(CONTENTS))), *ODD] for end in ("json", "csv", "jsonl"))
RECIPES = [*JSONS, "pipe.py", "broken.py", "bytes.py", "recipe.py:raises"]
SETS = [f"{field}={word}" for field in FIELDS for word in WEIRD]
CLUSTERS = [*JSONS, *WEIRD, "h100:-1x8", "h100:8", "h100:1e9x1e9", "h100:0x0", "no:1x1"]
ENVIRONMENT = [
    f"{name}={word}"
    for name in VARIABLES
    for word in (*WEIRD, "0", "1", "2", "host", "host:1", "gpu[001-004]", "4(x2)", "0,1")
]
COST = ("--ranks", "--bytes", "--alpha", "--bandwidth", "--inner", "--servers", "--axis")
PLAN = ("--save", "--plot", "--why-not", "--strategy", "--top", "--verify")
EXPLAIN = ("--batch", "--against", "--budget", "--html", "--cluster", "--set", "--save-budget")
CLASSES: list[tuple[Sequence[str], ...]] = [
    (["shard"], ["recipe.py"], ["--set"], SETS),
    (["shard"], ["recipe.py"], ["--set"], SETS, ["--set"], SETS),
    (["shard"], [*RECIPES, *(f"recipe.py:{name}" for name in ("no", "leaves", "recurses", "another", "RECIPE", ""))]),
    (["shard"], ["recipe.py"], ["--mesh", "--strategy", "--devices"], WEIRD),
    (["cost"], ["ring", "tree", ""], COST, WEIRD),
    (["cost"], ["ring"], ["--cluster"], CLUSTERS),
    (["schedule"], [*CSVS, *JSONS]),
    (["schedule"], ["gpipe"], ["--stages", "--microbatches", "--chunks", "--limit", "--f", "--b", "--w"], WEIRD),
    ([*READ], [*JSONS, *LINES]),
    (["launch"], *[ENVIRONMENT] * 5),
    (["plan"], ["recipe.py", *JSONS], ["--cluster"], CLUSTERS, PLAN, CLUSTERS),
    (["explain"], [*RECIPES, *["recipe.py"] * 4], EXPLAIN, [*JSONS, *WEIRD, "inputs=float99[8]", "inputs=int32[1e9]"]),
    (["verify"], RECIPES, ["--case", "--cases", "--seed", "--time", "--dtype", "--devices"], WEIRD),
]
"""Kinds of commands. A case has one random word of each list."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("bad"))


@pytest.fixture
def alarm() -> Iterator[Callable[[], None]]:
    """End a case that hangs. The limit is far above the time of any case."""

    def ring(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda: signal.alarm(HANGS_S)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def wrong_with(code: int, err: str) -> str | None:
    """Return the defect of an answer; None for success or one clear error."""
    if code == 0:
        return None
    if "Traceback" in err:
        return "a traceback"
    errors = [line for line in err.splitlines() if line.startswith("meshpar: ")]
    if code not in (1, 2) or len(errors) != 1:
        return f"exit code {code} with {len(errors)} errors"
    if code == 1:
        return "an unexpected error"
    return None if re.search(r": cannot | See meshpar|known|\. [A-Z]", errors[0]) else "no way out"


def answer(meshpar, args: list[str]) -> tuple[int, str]:
    """Return the exit code and standard error of a command, or of a function in `READ`."""
    if args[0] not in READ and args[0] != "launch":
        code, _, err = meshpar(*args)
        return code, err
    try:
        if args[0] == "launch":
            launch.detect(dict(one.split("=", 1) for one in args[1:]))
        else:
            READ[args[0]](args[1])
    except MeshparError as error:
        return 2, f"meshpar: {error}".replace("\n", " ")
    except OSError as error:  # as the command line does, if Python names the file
        return 2 if error.filename else 1, f"meshpar: {unexpected(error, command='meshpar')}"
    except Exception as error:
        return 1, f"meshpar: {error!r}"
    return 0, ""


@pytest.mark.parametrize(
    ("number", "seed"), [(65, 1), *(pytest.param(300, seed, marks=pytest.mark.matrix) for seed in range(2, 7))]
)
def test_bad_input_has_one_clear_error(meshpar, place, alarm, monkeypatch, number, seed) -> None:
    monkeypatch.chdir(place.folder)
    wrong = []
    for case in range(number):
        draw = random.Random(f"{seed} {case}")
        args = [draw.choice(words) for words in CLASSES[case % len(CLASSES)]]
        alarm()
        code, err = answer(meshpar, args)
        if (defect := wrong_with(code, err)) is not None:
            wrong.append(f"{defect}: {[arg[:80] for arg in args]}: {err[-600:]}")
    assert wrong == []


def test_a_long_list_of_tasks_is_not_expanded() -> None:
    assert launch._tasks_on_node("4(x999999999),2", 999999999) == 2


HUGE, LONG = "9" * 400, "9" * 5000
TRAIN = ["train", "recipe.py", "--devices", 2]
THOUSANDS = " | ".join(["fsdp()"] * 3001)
QUICK = [
    *(["shard", "recipe.py", "--set", field] for field in (
        "writers=((((", "writers=(tensorboard", "writers=[]]", "strategy=tensor_parallel(sequence=3)",
        "model.qk_norm=3", "model.norm_eps=1e12", "sample.prompt=\udc80", "strategy=\udc80", f"steps={HUGE}",
    )),
    ["shard", "recipe.py", "--mesh", f"fsdp={LONG}"],
    ["shard", "recipe.py", "--strategy", THOUSANDS],
    ["shard", "pipe.py"],
    ["shard", ""],
    ["schedule", "gpipe", "--stages", HUGE],
    ["schedule", "pipe.json"],
    ["cost", "ring", "--cluster", "pipe.json"],
    ["generate", "no/run", "--prompt", "a\udc80"],
    ["explain", "recipe.py", "--save-budget", "pipe.json"],
    ["explain", "recipe.py", "--html", "gs://bucket/report.html"],
    ["plan", "recipe.py", "--cluster", "h100:1x8", "--save", "gs://bucket/plan.json"],
    ["convert", "from-hf", "folder.json", "gs://bucket/run"],
    ["train", "recipe.py", "--devices", 5000],
    [*TRAIN, "--text", "pipe"],
    [*TRAIN, "--tokenizer", "pipe.json"],
    [*TRAIN, "--out", "az://bucket/runs"],
    [*TRAIN, "--set", "data.cache=s3://bucket/tokens"],
    [*TRAIN, "--set", "model.vocab_size=4000000000"],  # more memory than there is
    [*TRAIN, "--set", "data.prefetch=100000000"],
]  # fmt: skip
MORE = [
    ["shard", "recipe.py", "--set", f"mesh=fsdp={LONG}"],
    ["shard", "recipe.py", "--set", f"optimizer.lr={HUGE}"],
    ["shard", "recipe.py", "--set", f"strategy=fsdp(min_bytes={HUGE})"],
    ["shard", "recipe.py", "--strategy", "(" * 3000 + "fsdp()" + ")" * 3000],
    ["shard", "recipe.py", "--strategy", "fsdp(min_bytes=" + "-" * 5000 + "1)"],
    ["shard", "recipe.py", "--from-hf", HUGE],
    ["schedule", "gpipe", "--microbatches", HUGE],
    ["cost", "ring", "--ranks", LONG],
    ["bench", "step", "--devices", "9" * 23],
    ["tune", "recipe.py", "--save", "gs://bucket/tuned.json"],
    [*TRAIN, "--tuned", "pipe.json"],
    ["train", "recipe.py", "--devices", "9" * 23],
    [*TRAIN, "--plan", "pipe.json"],
    [*TRAIN, "--from-hf", "pipes"],
    ["convert", "from-hf", "pipes", "run"],
    ["generate", "pipes", "--prompt", "a"],
    ["explain", "recipe.py", "--budget", "pipe.json"],
    ["explain", "recipe.py", "--html", "pipe"],
    ["plan", "recipe.py", "--cluster", "h100:1x2", "--save", "pipe.json"],
]


@pytest.mark.parametrize(
    "args",
    grid.cases(*QUICK, grid=[*QUICK, *MORE]),
    ids=lambda args: " ".join(map(str, args))[:60].encode("unicode_escape").decode(),
)
def test_invalid_arguments_have_one_clear_error(meshpar, place, alarm, monkeypatch, args) -> None:
    """Pipes, URLs, text that is not UTF-8, huge numbers, and sizes that need more memory than there is."""
    monkeypatch.chdir(place.folder)
    before = set(place.folder.iterdir())
    alarm()
    code, _, err = meshpar(*args)
    assert (code, wrong_with(code, err)) == (2, None)
    assert len(err) < 1500
    assert set(place.folder.iterdir()) == before


@pytest.mark.parametrize(
    ("function", "where"),
    grid.cases(
        ("raises_in_loss", 'batch["mask"]'), ("takes_no_key", "lambda model, batch:"),
        grid=[
            ("raises_in_loss", 'batch["mask"]'), ("takes_no_key", "lambda model, batch:"),
            ("returns_no_pair", "batch, key)[0]"), ("raises_in_optimizer", "raise RuntimeError"),
            ("takes_no_steps", "make=lambda: None"),
        ],
    ),
)  # fmt: skip
def test_an_error_in_a_recipe_names_its_line(meshpar, place, monkeypatch, tmp_path, function, where) -> None:
    monkeypatch.chdir(place.folder)
    code, _, err = meshpar("train", f"recipe.py:{function}", "--devices", 2, "--out", tmp_path)
    assert code == 2, err
    line = next(number for number, text in enumerate(RECIPE.splitlines(), start=1) if where in text)
    assert f"recipe.py:{line}" in err
    assert len(err.splitlines()) < 5


def test_huge_numbers_in_a_file_are_errors(tmp_path) -> None:
    (tmp_path / "huge.json").write_text(f'{{"nodes": {HUGE}}}')
    with pytest.raises(MeshparError, match="a number has 400 digits"):
        read_json(tmp_path / "huge.json", "it", "do")


def test_a_file_that_grows_too_large_is_named(tmp_path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            replace_file(tmp_path / "recipe.json", "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(unexpected(caught.value, command="meshpar train")).startswith(f"{tmp_path / 'recipe.json'}: cannot")


def test_ctrl_c_ends_a_command_that_is_still_importing() -> None:
    # A shell ignores SIGINT in its background jobs.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = heeding + "import meshpar.__main__, os, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nmeshpar: interrupted\n")
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import meshpar.__main__; "
    subprocess.run([sys.executable, "-c", ignoring + "signal.raise_signal(signal.SIGINT)"], check=True)


VALUES = [
    (command, name)
    for command in ("train", "explain", "plan", "shard", "generate", "verify", "trace", "doctor", "cost", "schedule")
    for option in cli.cli.get_command(None, command).params
    for name in option.opts
    if name.startswith("--") and not option.is_flag
]  # fmt: skip


@pytest.mark.parametrize("form", ["{} ", "{}="], ids=["--name ''", "--name="])
def test_an_empty_value_of_any_option_is_an_error(meshpar, place, monkeypatch, form) -> None:
    """`--budget "$UNSET"` in CI must not pass."""
    monkeypatch.chdir(place.folder)
    for command, name in VALUES:
        code, out, err = meshpar(command, "recipe.py", *form.format(name).split(" "))
        assert (code, out) == (2, ""), (command, name)
        assert f"meshpar: `{name}" in err
        assert "its value is empty" in err
    assert {("explain", "--budget"), ("explain", "--against"), ("train", "--out"), ("plan", "--plot")} <= set(VALUES)


def test_too_little_memory_and_deep_json_are_errors(tmp_path: Path) -> None:
    check_memory("here", "take it", 1.0, "do")
    with pytest.raises(MeshparError, match="takes 1 PB here"):
        check_memory("here", "take it", 1e15, "do")
    (tmp_path / "deep.json").write_text(DEEP)
    with pytest.raises(MeshparError, match="not valid JSON"):
        read_json(tmp_path / "deep.json", "it", "do")
    (tmp_path / "big.json").write_bytes(b"")
    os.truncate(tmp_path / "big.json", 1 << 40)  # a sparse file without disk blocks
    with pytest.raises(MeshparError, match="the limit is"):
        read_json(tmp_path / "big.json", "it", "do")


@pytest.mark.parametrize(
    "content", grid.cases(DEEP, "[]", grid=["{", DEEP, "[]", "\x00"]), ids=lambda text: repr(text[:2])
)
def test_a_damaged_recipe_of_a_run_is_reported(meshpar, place, monkeypatch, tmp_path, content) -> None:
    monkeypatch.chdir(place.folder)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "recipe.json").write_text(content)
    code, _, err = meshpar("train", "recipe.py", "--devices", 2, "--out", tmp_path)
    assert code == 2, err
    assert "recipe.json: cannot read it" in err
    assert "--fresh" in err


def test_a_file_that_cannot_be_replaced_is_named(tmp_path):
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        replace_file(tmp_path / "summary.json", "{}")
    assert error.value.filename == str(tmp_path / "summary.json")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
