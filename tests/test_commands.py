"""Every command that README.md, a recipe's docstring or a notebook's text prints is run as it stands there.

Commands are found by reading those places, so a new one is run without being listed here. Quick ones run in this
process; compilation for pods, training and measurements run in a process of their own, and are marked `matrix`.
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
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from meshpar.commands import cli
from meshpar.commands.recipe import load_recipe
from meshpar.models.config import TransformerConfig

ROOT = Path(__file__).parents[1]
LIMIT_S = 1800
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


# ---------------------------------------------------------------------------------------------------------------------
# What is printed where
# ---------------------------------------------------------------------------------------------------------------------


class Printed(NamedTuple):
    """A command line and who prints it."""

    where: str
    line: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line.removeprefix("$ "), comments=True)

    @property
    def is_quick(self) -> bool:
        return self.words[1] in ("shard", "schedule", "cost") or len(self.words) == 2

    def __str__(self) -> str:
        return f"{self.where}: {' '.join(self.words)}"


def in_blocks(text: str) -> list[str]:
    """Lines of fenced shell blocks."""
    fenced = re.findall(r"^```(?:bash|sh|console|shell)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in fenced for line in block.replace("\\\n", " ").splitlines()]


def in_docstring(text: str) -> list[str]:
    """Lines set off by an indent that begin with the command."""
    return re.findall(r"^ {4,}((?:\$ )?(?:meshpar|make|pip) .*)$", text.replace("\\\n", " "), flags=re.MULTILINE)


def in_backticks(text: str) -> list[str]:
    """What stands in backticks in a sentence, which may be broken over two lines."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(found.split()) for found in re.findall(r"`((?:meshpar|make|pip)\s[^`]+)`", prose)]


def printed() -> list[Printed]:
    """Each once, in the order in which a reader meets them."""
    text = (ROOT / "README.md").read_text()
    found = [Printed("README", line) for find in (in_blocks, in_backticks) for line in find(text)]
    for path in sorted((ROOT / "recipes").glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        found += [Printed(path.stem, line) for find in (in_docstring, in_backticks) for line in find(text)]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
        found += [Printed(path.stem, line) for find in (in_blocks, in_backticks) for line in find(text)]
    return list({tuple(one.words): one for one in reversed(found) if one.words}.values())[::-1]


PRINTED = printed()
OURS = [one for one in PRINTED if one.words[0] == "meshpar"]


def test_commands_are_found_in_each_of_the_places() -> None:
    lines = {" ".join(one.words) for one in PRINTED}
    for expected in (
        "make train",
        "make test",
        "meshpar explain --table",
        "meshpar shard recipes/llama3_405b.py --mesh fsdp=512,tensor=8",
        "meshpar shard recipes/llama3_405b.py --json | python -m json.tool",
        "meshpar schedule zb-v --stages 8 --microbatches 32 --png zb-v.png",
    ):
        assert expected in lines
    broken = [one.words for one in PRINTED if "strategy=fsdp() | tensor_parallel()" in one.words]
    assert [words[:3] for words in broken] == [["meshpar", "train", "recipes/gpt_pipeline.py"]]
    for recipe in (ROOT / "recipes").glob("*.py"):
        assert any(f"recipes/{recipe.name}" in one.words for one in OURS), recipe.name
    assert {one.words[0] for one in PRINTED} == {"meshpar", "make", "pip"}


@pytest.mark.parametrize("one", [one for one in PRINTED if one.words[0] == "make"], ids=str)
def test_a_make_target_exists(one: Printed) -> None:
    """`.ci/run` runs them."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    asked = {word for word in one.words[1:] if "=" not in word and not word.startswith("-")}
    assert asked <= targets


@pytest.mark.parametrize("one", [one for one in PRINTED if one.words[0] == "pip"], ids=str)
def test_what_pip_installs_is_declared(one: Printed) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, _, extra = one.words[-1].rstrip("]").partition("[")
    assert one.words[:2] == ["pip", "install"]
    assert name == project["name"]
    assert set(filter(None, extra.split(","))) <= set(project["optional-dependencies"])


# ---------------------------------------------------------------------------------------------------------------------
# Run
# ---------------------------------------------------------------------------------------------------------------------

FEW_STEPS = ("steps=2", "data.valid_fraction=0.2", "data.valid_batches=1", "optimizer.warmup_steps=1")
SHORT_TEXT = (*FEW_STEPS, "data.max_bytes=600000", "data.seq_len=64", "sample.num_tokens=4")
SMALL = (
    *FEW_STEPS, "data.seq_len=16", "batch_size=16", "accumulate=1", "model.num_layers=2", "model.embed_dim=16",
    "model.num_heads=8", "model.num_kv_heads=8", "model.mlp_dim=32", "model.attention=xla",
)  # fmt: skip
SMALLER = {
    "digits_linen": ("steps=2", "optimizer.warmup_steps=1", "validate_every=none"),
    "llama3_8b": (*SMALL, "model.head_dim=2"),
    "llama3_70b": (*SMALL, "model.head_dim=2"),
    "mixtral_8x7b": (*SMALL, "model.head_dim=2", "model.moe.mlp_dim=32"),
    "deepseek_v3": (
        *SMALL, "model.num_dense_layers=1", "model.moe.mlp_dim=16", "model.head_dim=8", "model.latent.q_rank=8",
        "model.latent.kv_rank=8", "model.latent.nope_dim=4", "model.latent.rope_dim=4", "model.latent.v_dim=4",
    ),
}  # fmt: skip
"""Fields of a recipe that is trained; those that the command itself sets stay, but for the number of steps."""
FEWER = {
    "step": ("--pairs", "2"),
    "collectives": ("--max-bytes", "1kB", "--repeats", "1"),
    "overlap": ("--options", "default"),
    "run": (
        "--part", "input", "--pairs", "1", "--set", "data.seq_len=16", "--set", "data.max_bytes=600000",
        "--set", "model.num_layers=1", "--set", "data.valid_fraction=0.2", "--set", "data.valid_batches=1",
    ),
    "watch": ("--pairs", "1", "--steps", "10"),
    "moe": ("--experts", "8", "--tokens", "64", "--repeats", "1"),
}  # fmt: skip
"""Options of a measurement."""


def within_budget(words: list[str]) -> list[str]:
    """The arguments of `meshpar`, with less to do where that changes nothing of what they show."""
    _, command, *rest = words
    if command in ("train", "shard", "explain") and not rest:
        return [command, "--help"]  # a sentence that only names the command
    if command == "trace":
        return [command, "--help"]
    if command == "checkpoint":
        return [command, rest[0], "--help"]  # of a run that is not there
    if command == "bench":
        return [command, *rest, *FEWER[rest[0]]]
    if command == "train":
        own = {rest[at + 1].partition("=")[0] for at, word in enumerate(rest) if word == "--set"} - {"steps"}
        rest = [*rest[: rest.index("--steps")], *rest[rest.index("--steps") + 2 :]] if "--steps" in rest else rest
        fields = [field for field in SMALLER.get(Path(rest[0]).stem, SHORT_TEXT) if field.partition("=")[0] not in own]
        return [command, *rest, *(word for field in fields for word in ("--set", field))]
    return [command, *rest]


def folder(path: Path) -> Path:
    """Where a command is run: beside the recipes, with a recipe, texts and a tokenizer of the reader's own."""
    (path / "recipes").symlink_to(ROOT / "recipes")
    shutil.copy(ROOT / "recipes" / "digits_linen.py", path / "recipe.py")
    for name in ("notes", "data/corpus", "logs/one"):
        (path / name).mkdir(parents=True)
    for number in range(8):
        (path / "notes" / f"{number}.txt").write_text(TEXT + str(number))
        (path / "data" / "corpus" / f"{number}.txt").write_text(TEXT * 4 + str(number))
        (path / "logs" / "one" / f"{number}.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
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
    """A small Llama over bytes, in a folder of Hugging Face's."""
    pytest.importorskip("safetensors", reason="reads its files: pip install meshpar[hf]")
    import jax
    import optax

    import meshpar as mp

    config = load_recipe(ROOT / "recipes" / "finetune_hf.py").model
    assert isinstance(config, TransformerConfig)
    mesh = mp.MeshSpec().build(jax.devices()[:1])
    state = mp.init_state(config.build(), optax.identity(), mesh=mesh, strategy=mp.ddp(), key=0)
    return mp.interop.to_hf(state, config, path)


def files_written(words: list[str]) -> list[str]:
    """Files that a command is told to write."""
    options = ("--png", "--html", "--save", "--plot", "--save-budget")
    return [words[at + 1] for at, word in enumerate(words) if word in options]


@pytest.mark.parametrize("one", OURS, ids=str)
def test_a_command_exists_with_its_options(one: Printed) -> None:
    command: click.Command = cli.cli
    context = click.Context(command)
    rest = one.words[1 : one.words.index("|")] if "|" in one.words else one.words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        assert found is not None, f"`{rest[0]}` is none of {command.list_commands(context)}"
        command, rest = found, rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    asked = {word.split("=")[0] for word in rest if word.startswith("--")}
    assert asked <= known | {"--help"}


@pytest.mark.parametrize(
    "one",
    [pytest.param(one, marks=() if one.where == "README" else pytest.mark.matrix) for one in OURS if one.is_quick],
    ids=str,
)
def test_a_quick_command_runs(one: Printed, tmp_path, monkeypatch, capsys) -> None:
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):  # what a command sets for its own process
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


def _cut(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    """What stands before a pipe, and behind it."""
    at = words.index("|") if "|" in words else len(words)
    return words[:at], words[at : at + 1], words[at + 1 :]


@pytest.mark.matrix
@pytest.mark.parametrize("one", [one for one in OURS if not one.is_quick], ids=str)
def test_a_long_command_runs(one: Printed, tmp_path, child_env) -> None:
    here = folder(tmp_path)
    tokenizer(here / "data" / "tokenizer.json")
    if "Llama-3.2-1B" in one.words:
        pretrained(here / "Llama-3.2-1B")
    if "runs/finetune_hf" in one.words:
        source = pretrained(here / "source")
        make = ["convert", "from-hf", str(source), "runs/finetune_hf"]
        subprocess.run([sys.executable, "-m", "meshpar.commands.cli", *make], cwd=here, env=child_env, check=True)
    words = one.words
    if words[:2] == ["meshpar", "train"] and "--plan" in words:  # one that fits here
        words = [re.sub("llama3_8b", "gpt_stdlib", word) for word in words]
        make = ["plan", words[2], "--cluster", "h100:1x8", "--save", words[words.index("--plan") + 1]]
        subprocess.run([sys.executable, "-m", "meshpar.commands.cli", *make], cwd=here, env=child_env, check=True)
    args = [re.sub(r"^/data\b", str(here / "data"), word) for word in within_budget(words)]
    done = subprocess.run(
        [sys.executable, "-m", "meshpar.commands.cli", *args],
        cwd=here, env=child_env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.stdout.strip(), done.stderr
    if args[:2] == ["bench", "collectives"] and "no α and β explain the times" in done.stderr:
        return  # said in place of saving a profile, on a machine that was busy while it measured
    assert done.returncode == 0, done.stderr
    for name in files_written(one.words):
        assert (here / name).stat().st_size > 0
    if args[0] == "train":
        (summary,) = (here / "runs").glob("*/summary.json")
        assert json.loads(summary.read_text())["reason"] == "done"
