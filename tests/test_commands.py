"""Run the example commands in README, CONTRIBUTING, docs/, Makefile, docstrings, `--help` and notebooks.

The commands are extracted from these files, so new examples are tested without further changes. Quick commands run in
this process. Compilation for pods, training and measurements run in subprocesses with reduced sizes and are marked
`matrix`. A quick test checks that the recipes accept the original sizes.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from meshpar.cli import main as cli
from meshpar.cli.explain_command import _read_shapes
from meshpar.hardware.clusters import Link, Links, parse_cluster
from meshpar.loop.profiler import parse_steps
from meshpar.models.config import TransformerConfig
from meshpar.parallel import parse_strategy
from meshpar.runs.recipe import build_model, build_optimizer
from meshpar.runs.recipe_file import load_recipe
from meshpar.runs.resuming import breaks_resuming, changes
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.units import parse_bytes

ROOT = Path(__file__).parents[1]
LIMIT_S = 1800
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


# ---------------------------------------------------------------------------------------------------------------------
# Collect commands
# ---------------------------------------------------------------------------------------------------------------------


class Printed(NamedTuple):
    """A command line and the file that contains it."""

    where: str
    line: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line.removeprefix("$ "), comments=True)

    @property
    def is_quick(self) -> bool:
        return self.words[1] in ("shard", "schedule", "cost")

    @property
    def is_example(self) -> bool:
        """Whether the command can run. Some sentences omit arguments or contain placeholders such as RECIPE."""
        command, rest = found(self.words)
        if isinstance(command, click.Group) or self.words[1:] == ["explain"]:
            return False
        if any(word == "..." or re.fullmatch("[A-Z]+", word) for word in rest):
            return False
        try:
            given, _, _ = command.make_parser(click.Context(command)).parse_args(list(rest))
        except click.BadOptionUsage:  # an option without its value
            return False
        needed = [one.name for one in command.params if isinstance(one, click.Argument) and one.required]
        return all(isinstance(given[name], str | tuple | list) and given[name] for name in needed)

    def __str__(self) -> str:
        return f"{self.where}: {' '.join(self.words)}"


def _cut(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Split words at a pipe: words before it, the pipe, words after it."""
    at = words.index("|") if "|" in words else len(words)
    return words[:at], words[at : at + 1], words[at + 1 :]


def found(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the click command of a line and its arguments."""
    command: click.Command = cli.cli
    rest, _, _ = _cut(words[1:])
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        inner = command.get_command(click.Context(command), rest[0])
        assert inner is not None, f"`{rest[0]}` is none of {command.list_commands(click.Context(command))}"
        command, rest = inner, rest[1:]
    return command, rest


def in_blocks(text: str) -> list[str]:
    """Return the lines of fenced shell blocks."""
    fenced = re.findall(r"^```(?:bash|sh|console|shell)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in fenced for line in block.replace("\\\n", " ").splitlines()]


def in_docstring(text: str) -> list[str]:
    """Return indented lines that start with a command, without trailing comments."""
    lines = re.findall(r"^ {4,}((?:\$ )?(?:meshpar|make|pip) .*)$", re.sub(r"\\\n\s*", " ", text), flags=re.MULTILINE)
    return [re.split(r" {3,}(?!-)", line)[0] for line in lines]


def in_backticks(text: str) -> list[str]:
    """Return commands in backticks, which can contain a line break."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(found.split()) for found in re.findall(r"`((?:meshpar|make|pip)\s[^`]+)`", prose)]


def in_makefile() -> list[Printed]:
    """Return each target, alone and with the example values of ARGS in its comment."""
    text = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^RECIPE = (.*)$", text, flags=re.MULTILINE)
    lines = []
    for target, comment in re.findall(r"^([a-z-]+):.*## (.*)$", text, flags=re.MULTILINE):
        for args in ("", *re.findall(r'ARGS="([^"]*)"', comment)):
            lines.append(f"meshpar train {recipe} {args}" if target == "train" else f'make {target} ARGS="{args}"')
    return [Printed("Makefile", line) for line in lines]


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node, clean=False) or ""


def printed() -> list[Printed]:
    """Return the unique commands in document order."""
    found = in_makefile()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        found += [Printed(path.stem, line) for find in (in_blocks, in_backticks) for line in find(text)]
    for path in sorted((ROOT / "recipes").glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        found += [Printed(path.stem, line) for find in (in_docstring, in_backticks) for line in find(text)]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
        found += [Printed(path.stem, line) for find in (in_blocks, in_backticks) for line in find(text)]
    for path in sorted((ROOT / "meshpar").rglob("*.py")):
        name, source = str(path.relative_to(ROOT)), path.read_text()
        # Few files contain a command, and each worker would parse all files.
        for text in docstrings(source) if re.search(r"(`|^ {4,}(\$ )?)meshpar\s", source, re.MULTILINE) else ():
            lines = [line for find in (in_docstring, in_backticks) for line in find(text)]
            found += [Printed(name, line) for line in lines if line.startswith("meshpar ")]
    first: dict[tuple[str, ...], Printed] = {}
    for one in found:
        if one.words:
            first.setdefault(tuple(one.words), one)
    return list(first.values())


PRINTED = printed()
OURS = [one for one in PRINTED if one.words[0] == "meshpar"]
EXAMPLES = [one for one in OURS if one.is_example]


def test_commands_are_found_in_each_of_the_places() -> None:
    lines = {" ".join(one.words) for one in PRINTED}
    assert lines >= {
        "make train",
        "make test",
        "meshpar explain --table",
        "meshpar shard recipes/llama3_405b.py --json | python -m json.tool",
        "meshpar schedule zb-v --stages 8 --microbatches 32 --png zb-v.png",
        "make test ARGS=tests/sharding/test_mistakes.py -k typo",
        "meshpar cost all-gather --cluster my.json --axis data",
        "meshpar convert from-hf Llama-3.1-8B runs/llama --mesh fsdp=8",
    }
    broken = [one.words for one in PRINTED if "strategy=fsdp() | tensor_parallel()" in one.words]
    assert [words[:3] for words in broken] == [["meshpar", "train", "recipes/gpt_pipeline.py"]]
    for recipe in (ROOT / "recipes").glob("*.py"):
        assert any(f"recipes/{recipe.name}" in one.words for one in EXAMPLES), recipe.name
    assert {one.words[0] for one in PRINTED} == {"meshpar", "make", "pip", "source"}


def test_make_targets_exist() -> None:
    """The targets themselves are run by `.ci/run`."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    words = {word for one in PRINTED if one.words[0] == "make" for word in one.words[1:]}
    assert {word for word in words if "=" not in word and not word.startswith("-")} <= targets


SELECTIONS = [
    (one, word.removeprefix("ARGS="))
    for one in PRINTED if one.words[:2] == ["make", "test"]
    for word in one.words[2:] if word.startswith("ARGS=") and word != "ARGS="
]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize(("one", "args"), SELECTIONS, ids=str)
def test_an_example_of_make_test_selects_tests(one: Printed, args: str, child_env) -> None:
    (quick,) = re.findall(r'^QUICK := "(.*)"$', (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", quick, *shlex.split(args)]
    done = subprocess.run(command, cwd=ROOT, env=child_env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-600:]
    assert "::test_" in done.stdout


def test_modules_and_scripts_that_contributing_names_exist() -> None:
    named = re.findall(r"`python (?:-m )?(tests[\w./]+)", (ROOT / "CONTRIBUTING.md").read_text())
    assert named
    for name in named:
        assert (ROOT / (name if name.endswith(".py") else f"{name.replace('.', '/')}.py")).is_file(), name


def test_pip_commands_install_declared_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for one in (one for one in PRINTED if one.words[0] == "pip"):
        name, _, extra = one.words[-1].removesuffix(" @ git+URL").rstrip("]").partition("[")
        assert one.words[:2] == ["pip", "install"]
        assert name in (project["name"], ".")
        assert set(filter(None, extra.split(","))) <= set(project["optional-dependencies"])


# ---------------------------------------------------------------------------------------------------------------------
# Run
# ---------------------------------------------------------------------------------------------------------------------

FEW_STEPS = ("steps=2", "data.valid_fraction=0.2", "data.valid_batches=1")
SHORT_TEXT = (*FEW_STEPS, "data.max_bytes=600000", "data.seq_len=64", "sample.num_tokens=4")
SMALL = (
    *FEW_STEPS, "data.seq_len=16", "batch_size=16", "step.accumulate=1", "model.num_layers=2", "model.embed_dim=16",
    "model.num_heads=8", "model.num_kv_heads=8", "model.mlp_dim=32", "model.attention=xla",
)  # fmt: skip
SMALLER = {
    "digits_linen": ("steps=2", "validate_every=none"),
    "llama3_8b": (*SMALL, "model.head_dim=2"),
    "llama3_70b": (*SMALL, "model.head_dim=2"),
    "mixtral_8x7b": (*SMALL, "model.head_dim=2", "model.moe.mlp_dim=32"),
    "deepseek_v3": (
        *SMALL, "model.num_dense_layers=1", "model.moe.mlp_dim=16", "model.head_dim=8", "model.latent.q_rank=8",
        "model.latent.kv_rank=8", "model.latent.nope_dim=4", "model.latent.rope_dim=4", "model.latent.v_dim=4",
    ),
}  # fmt: skip
"""Fields that reduce the training time of a recipe. Fields set by the command have precedence, except steps."""
FEWER = {
    "collectives": ("--max-bytes", "1kB", "--repeats", "1"),
    "gpu": ("--size", "64", "--repeats", "1"),
}
"""Options that reduce the time of a benchmark."""
ABSENT = {"/data": "data", "/mnt/disk": "."}
"""Folders in examples and their replacements."""


def within_budget(words: list[str]) -> list[str]:
    """Return the arguments of `meshpar` with reduced sizes."""
    _, command, *rest = words
    limits: tuple[str, ...] = ()
    if command == "bench" and rest[0] != "step":
        return [command, *rest, *FEWER[rest[0]]]
    if command == "verify":
        return [command, *rest, "--cases", "1"]
    if command == "bench":
        command, *rest = "bench step", *rest[1:]
        limits = ("--steps", "2", *(("--devices", "1") if "mesh=data=1" in rest else ()))
    if command == "tune":
        limits = ("--seconds", "20")
    if command in ("train", "tune", "bench step"):
        own = {rest[at + 1].partition("=")[0] for at, word in enumerate(rest) if word == "--set"} - {"steps"}
        rest = [*rest[: rest.index("--steps")], *rest[rest.index("--steps") + 2 :]] if "--steps" in rest else rest
        fields = [field for field in SMALLER.get(Path(rest[0]).stem, SHORT_TEXT) if field.partition("=")[0] not in own]
        return [*command.split(), *rest, *limits, *(word for field in fields for word in ("--set", field))]
    return [command, *rest]


def folder(path: Path) -> Path:
    """Create a working folder with the recipes, a recipe of the user, texts and a profile."""
    (path / "recipes").symlink_to(ROOT / "recipes")
    shutil.copy(ROOT / "recipes" / "digits_linen.py", path / "recipe.py")
    for name in ("notes", "data/corpus", "logs/one"):
        (path / name).mkdir(parents=True)
    for number in range(8):
        (path / "notes" / f"{number}.txt").write_text(TEXT + str(number))
        (path / "data" / "corpus" / f"{number}.txt").write_text(TEXT * 4 + str(number))
        (path / "logs" / "one" / f"{number}.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    Links(devices="cpu", axes={"data": Link(alpha_s=3e-3, bytes_per_s=1e9)}).save(path / "my.json")
    return path


def tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["</s>", *sorted(set(TEXT.replace(".", " .").split())), "[UNK]"]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.save(str(path))


def pretrained(path: Path) -> Path:
    """Save a small byte-level Llama as a Hugging Face folder."""
    pytest.importorskip("safetensors", reason="requires pip install meshpar[hf]")
    import jax
    import optax

    import meshpar as mp

    config = load_recipe(ROOT / "recipes" / "finetune_hf.py").model
    assert isinstance(config, TransformerConfig)
    mesh = mp.MeshSpec().build(jax.devices()[:1])
    state = mp.init_state(config.build(), optax.identity(), mesh=mesh, strategy=mp.ddp(), key=0)
    return mp.interop.to_hf(state, config, path)


def files_written(words: list[str]) -> list[str]:
    """Return the output files in the options of a command."""
    options = ("--png", "--html", "--save", "--plot", "--save-budget")
    return [words[at + 1] for at, word in enumerate(words) if word in options]


@pytest.mark.parametrize("one", OURS, ids=str)
def test_a_command_exists_with_its_options(one: Printed) -> None:
    command, rest = found(one.words)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    asked = {word.split("=")[0] for word in rest if word.startswith("--")}
    assert asked <= known | {"--help"}


def layouts() -> dict[tuple[str, ...], Printed]:
    """Return one example for each combination of recipe, fields and layout."""
    each = {}
    for one in EXAMPLES:
        command, rest = found(one.words)
        given = command.make_context(command.name, rest, resilient_parsing=True).params
        path = given["recipes"][0] if given.get("recipes") else given.get("recipe")
        if path is None:
            continue
        shorthands = (f"{name}={given[name]}" for name in ("mesh", "strategy", "steps", "name") if given.get(name))
        each.setdefault((path, given.get("devices") or 8, *shorthands, *given["assignments"]), one)
    return each


@pytest.mark.parametrize(("words", "one"), layouts().items(), ids=lambda one: str(one)[:80])
def test_a_recipe_accepts_the_fields_of_an_example(words: tuple[Any, ...], one: Printed, tmp_path, monkeypatch) -> None:
    """The sizes are not reduced."""
    monkeypatch.chdir(folder(tmp_path))
    path, devices, *assignments = words
    if path == "recipes/llama3_8b.py" and one.words[1] != "train":
        devices = 64
    recipe = load_recipe(path, devices=devices).override(*assignments)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the warm-up is longer than the run")
        build_optimizer(recipe, build_model(recipe), recipe.mesh.abstract())


def test_examples_of_train_can_run_in_order(tmp_path, monkeypatch) -> None:
    """A user who runs all examples in order has all their runs in the same folder."""
    monkeypatch.chdir(folder(tmp_path))
    wrong, runs = [], dict[str, tuple[Printed, dict[str, Any]]]()
    for one in (one for one in EXAMPLES if one.words[1] == "train"):
        command, rest = found(one.words)
        given = command.make_context("train", rest).params
        recipe = load_recipe(given["recipe"], devices=given["devices"] or 8).override(*given["assignments"])
        recipe = recipe.replace(steps=given["steps"] or recipe.steps, name=given["name"] or recipe.name)
        begun = {name: str(given[name]) for name in ("text", "tokenizer", "from_hf")}
        if recipe.name in runs:
            before, fields = runs[recipe.name]
            changed = changes(fields, {**recipe.to_json(), **begun})
            breaking = [field for field in changed if breaks_resuming(field)]
            if breaking:
                wrong.append(f"`{one}` cannot resume the run of `{before}` because of {breaking}: add --name")
            elif (
                recipe.steps <= fields["steps"] and one.where != before.where
            ):  # docstrings of recipes show how to resume
                wrong.append(f"`{one}` has no steps left after `{before}`: add --name")
        runs.setdefault(recipe.name, (one, {**recipe.to_json(), **begun}))
    assert not wrong, "\n".join(wrong)


READERS = {
    "--mesh": MeshSpec.parse,
    "--strategy": lambda text: parse_strategy(text.strip("'")),
    "--cluster": lambda text: text == "my.json" or parse_cluster(text),
    "--batch": lambda text: _read_shapes(text.strip("'")),
    "--why-not": MeshSpec.parse,
    "--bytes": parse_bytes,
    "--profile": parse_steps,
    "--set": lambda text: load_recipe(ROOT / "recipes" / "gpt_stdlib.py").override(text),
    "--xla": lambda text: load_recipe(ROOT / "recipes" / "gpt_stdlib.py").override(f"step.xla.{text}"),
}
"""Parsers of options whose help contains examples."""


def options_of(command: click.Command) -> Iterator[click.Option]:
    """Yield the options of a command and its subcommands."""
    yield from (one for one in command.params if isinstance(one, click.Option))
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from options_of(command.get_command(click.Context(command), name))


def test_example_values_in_help_are_valid() -> None:
    read = set()
    for option in options_of(cli.cli):
        text = option.help or ""
        for example in re.findall(r"(?:such as |, as(?: in)?|: ) ?('[^']+'|[\w.:=,]*\d[\w.:=,]*|my\.json)", text):
            if (reader := READERS.get(option.opts[0])) is not None:
                reader(example.rstrip(",."))
                read.add(option.opts[0])
    assert read == set(READERS)


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, marks=() if one.where.startswith(("README", "meshpar/")) else pytest.mark.matrix)
        for one in EXAMPLES
        if one.is_quick
    ],
    ids=str,
)
def test_a_quick_command_runs(one: Printed, tmp_path, monkeypatch, capsys) -> None:
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):  # commands change these variables
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.chdir(folder(tmp_path))
    words, _, piped = (list(part) for part in _cut(one.words))
    with pytest.raises(SystemExit) as end:
        cli.main(within_budget(words))
    out, err = capsys.readouterr()
    assert not end.value.code, err
    assert out.strip()
    for name in files_written(words):
        assert (tmp_path / name).stat().st_size > 0
    if piped:
        assert piped[0] == "python"
        subprocess.run([sys.executable, *piped[1:]], input=out, text=True, capture_output=True, check=True)


def prepare(here: Path, words: list[str], run: Callable[..., Any]) -> None:
    """Create the folders and runs that an example requires."""
    tokenizer(here / "data" / "tokenizer.json")
    for name in {"Llama-3.2-1B", "Llama-3.1-8B"} & set(words):
        pretrained(here / name)
    fields = [word for field in SHORT_TEXT for word in ("--set", field)]
    if words[1:3] == ["budget", "check"]:
        run("budget", "save", "recipes/gpt_stdlib.py", *fields)
        for name in (word for word in words if word.endswith(".json")):
            shutil.copy(here / "budgets" / "gpt_stdlib-cpu.json", here / name)
    if "--tuned" in words:
        run(*within_budget(["meshpar", "tune", words[2], "--save", words[words.index("--tuned") + 1]]))
    if "runs/gpt_stdlib" in words:
        run("train", "recipes/gpt_stdlib.py", "--profile", "1:2", *fields)
    if "runs/finetune_hf" in words:
        run("convert", "from-hf", str(pretrained(here / "source")), "runs/finetune_hf")
    if "runs/lora" in words:
        lora = ("--from-hf", str(pretrained(here / "source")), "--set", "lora.rank=4", "--name", "lora")
        run("train", "recipes/finetune_hf.py", *lora, *fields)


@pytest.mark.matrix
@pytest.mark.parametrize("one", [one for one in EXAMPLES if not one.is_quick], ids=str)
def test_a_long_command_runs(one: Printed, tmp_path, child_env) -> None:
    here = folder(tmp_path)

    def run(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "meshpar.cli.main", *args]
        return subprocess.run(
            command, cwd=here, env=child_env, capture_output=True, text=True, timeout=LIMIT_S, check=check
        )

    prepare(here, one.words, run)
    words = one.words
    if words[:2] == ["meshpar", "train"] and "--plan" in words:  # a plan for 8 devices
        words = [re.sub("llama3_8b", "gpt_stdlib", word) for word in words]
        run("plan", words[2], "--cluster", "h100:1x8", "--save", words[words.index("--plan") + 1])
    absent = re.compile("|".join(rf"^{name}\b" for name in ABSENT))
    args = [absent.sub(lambda name: str(here / ABSENT[name[0]]), word) for word in within_budget(words)]
    done = run(*args, check=False)
    assert done.stdout.strip(), done.stderr
    if args[:2] == ["bench", "collectives"] and "no α and β explain the times" in done.stderr:
        return  # noisy measurements on a busy machine cannot be fitted
    assert done.returncode == 0, done.stderr
    for name in files_written(one.words):
        assert (here / name).stat().st_size > 0
    if args[0] == "train":
        (summary,) = (here / "runs").glob("*/summary.json")
        assert json.loads(summary.read_text())["reason"] == "done"
