"""Conventions of docstrings: short first lines of files, and arguments of exported functions."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("meshpar", "recipes") for path in (ROOT / folder).rglob("*.py"))
MAX_FIRST_LINE = 100
PACKAGES = (
    "meshpar", "meshpar.collectives", "meshpar.pipeline", "meshpar.moe", "meshpar.interop", "meshpar.data",
    "meshpar.models", "meshpar.optim",
)  # fmt: skip


def test_files_begin_with_a_short_description():
    wrong = {}
    for path in FILES:
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        first = docstring.split("\n", 1)[0]
        if not 0 < len(first) <= MAX_FIRST_LINE or re.match(r"(What|Of)\b", first):
            wrong[str(path.relative_to(ROOT))] = first
    assert not wrong, "\n".join(f"{name}: {len(first)}: {first}" for name, first in wrong.items())


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_functions_describe_their_arguments(package):
    module = importlib.import_module(package)
    wrong = []
    for name in module.__all__:
        value = getattr(module, name)
        if not inspect.isfunction(value):
            continue
        parameters = inspect.signature(value).parameters.values()
        if all(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):  # none, or `**changes` of a config
            continue
        docstring = inspect.getdoc(value) or ""
        if "Args:" not in docstring and not re.search(r"\b[Aa]s (in|for) `", docstring):
            wrong.append(f"{package}.{name}")
    assert not wrong
