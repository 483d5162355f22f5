"""Run the `>>>` examples of all docstrings. Examples of public names need only the names of docs/prelude.py."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp

ROOT = Path(__file__).parents[1]
FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "meshpar").rglob("*.py")) if ">>> " in path.read_text()]
PACKAGES = (
    mp, mp.hooks, mp.collectives, mp.data, mp.interop, mp.models, mp.moe, mp.optim, mp.pipeline, mp.plots, mp.bench,
)  # fmt: skip
FREQUENT = (
    *(name for name in mp.__all__ if callable(getattr(mp, name))),
    "hooks.Checkpointer", "hooks.Hook", "hooks.MetricsFile", "hooks.ProgressBar", "hooks.Validator",
    "data.ArrayData", "data.TextData", "interop.from_hf", "interop.to_hf", "models.TransformerConfig",
    "models.generate", "models.llama3_8b", "models.next_token_loss", "moe.MoE", "moe.MoEConfig", "moe.Routing",
    "moe.loads", "moe.place", "optim.low_precision_moments", "pipeline.make", "pipeline.value_and_grad",
    "collectives.all_reduce", "collectives.choose",
)  # fmt: skip
"""Names that recipes, notebooks and docs use most."""


@functools.cache
def prelude() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec((ROOT / "docs" / "prelude.py").read_text(), names)
    return names


@functools.cache
def public() -> set[str]:
    """Return the module and name of each public function and class."""
    values = [getattr(package, name) for package in PACKAGES for name in package.__all__]
    return {f"{value.__module__}.{value.__qualname__}" for value in values if hasattr(value, "__qualname__")}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_examples_run(file: Path) -> None:
    module = importlib.import_module(".".join(file.with_suffix("").parts))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, globs=prelude()):
        if example.name not in public():
            example.globs = vars(module) | example.globs
        # A step donates the buffers of its state.
        example.globs["state"] = jax.tree.map(jnp.copy, prelude()["state"])
        runner.run(example)
    assert not runner.failures


def test_frequent_names_have_an_example() -> None:
    values = {name: functools.reduce(getattr, name.split("."), mp) for name in FREQUENT}
    assert not [name for name, value in values.items() if ">>> " not in (inspect.getdoc(value) or "")]
