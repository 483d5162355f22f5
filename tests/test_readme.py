"""README.md does what it says: its Python runs, and the commands it names exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """The command lines of the shell blocks, as words; comments and prompts left out."""
    text = "\n".join(block for language in ("bash", "sh", "console") for block in blocks(language))
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def test_it_has_a_program_and_the_two_commands() -> None:
    assert blocks("python")
    assert ["make", "train"] in commands()
    assert ["make", "test"] in commands()


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_a_python_block_runs_by_itself(number: int, child_env: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", blocks("python")[number]],
        cwd=tmp_path,
        env=child_env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [w for w in commands() if w[0] == "make"], ids=" ".join)
def test_a_make_target_exists(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    asked = {word for word in words[1:] if "=" not in word and not word.startswith("-")}
    assert asked <= targets


@pytest.mark.parametrize("words", [w for w in commands() if w[0] == "meshpar"], ids=" ".join)
def test_a_meshpar_command_exists_with_its_options(words: list[str]) -> None:
    from meshpar.commands.cli import cli

    command: click.Command = cli
    context = click.Context(command)
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        assert found is not None, f"`{rest[0]}` is none of {command.list_commands(context)}"
        command, rest = found, rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    asked = {word.split("=")[0] for word in rest if word.startswith("--")}
    assert asked <= known | {"--help"}
    files = [word for word in rest if word.endswith(".py")]
    assert all((ROOT / name).exists() for name in files), files
