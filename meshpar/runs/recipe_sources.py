"""Recipes completed from other sources: a Hugging Face folder, a plan, the vocabulary of the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshpar.data.arrays import ArraySource
from meshpar.data.source import Source
from meshpar.interop.hf import config_of
from meshpar.pod import watchdog as watchdog
from meshpar.runs.recipe import Recipe
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import check_name

KEPT = ("attention", "tensor_matmul", "vocab_chunk", "param_dtype")
"""Model fields that the recipe keeps with --from-hf. The Hugging Face folder sets all others."""
VOCAB_MULTIPLE = 128
"""The vocabulary of a tokenizer is padded to this multiple, which common mesh sizes and matmul tiles divide."""


def with_hf(recipe: Recipe, folder: str | Path) -> Recipe:
    """Return the recipe with the model of a Hugging Face folder, and its tokenizer if the data is text."""
    from meshpar.data import ChatData, TextData
    from meshpar.models.config import TransformerConfig

    model, data = recipe.model, recipe.data
    if not isinstance(model, TransformerConfig):
        reason = f"the model of the recipe is a {type(model).__name__}"
        fix = "use a recipe with a TransformerConfig; the folder then sets its sizes"
        raise problem(f"--from-hf {folder}", "train the model of the folder", reason, fix, code="conflict")
    tokenizer = Path(folder) / "tokenizer.json"
    if isinstance(data, TextData | ChatData) and tokenizer.exists():
        data = dataclasses.replace(data, tokenizer=str(tokenizer))
    return recipe.replace(model=config_of(folder, **{name: getattr(model, name) for name in KEPT}), data=data)


def check_left_to_folder(folder: str, assignments: Sequence[str], tokenizer: str | None) -> None:
    """Check that no option sets a field that `with_hf` takes from the folder."""
    check_name(folder, f"--from-hf {folder}", "name a folder with config.json")
    has_tokenizer = (Path(folder) / "tokenizer.json").exists()
    settings = [(f"--set {assignment}", assignment.partition("=")[0].strip()) for assignment in assignments]
    if tokenizer:
        settings.append((f"--tokenizer {tokenizer}", "data.tokenizer"))
    for option, path in settings:
        owner, _, name = path.partition(".")
        is_model_field = owner == "model" and name.split(".")[0] not in KEPT
        if is_model_field or (has_tokenizer and name == "tokenizer"):
            reason = f"the folder sets this field; only {', '.join(KEPT)} of the model can be changed"
            fix = "remove the option, or edit a copy of the folder"
            raise problem(option, f"combine it with --from-hf {folder}", reason, fix, code="conflict")


def with_plan(recipe: Recipe, path: str | Path, assignments: Sequence[str] = ()) -> Recipe:
    """Return the recipe with the first layout in a plan file, and with fields set by text.

    Plans assume that gradients are reduced after each microbatch. `assignments` may set the batch size, which must be
    divisible by the plan's number of microbatches. Therefore both are set together.
    """
    from meshpar.planner.plan import load_plans

    layout = load_plans(path)[0].layout
    step = dataclasses.replace(layout.options(recipe.step), accumulate=1, reduce_gradients=None)
    planned = recipe.replace(mesh=layout.mesh, strategy=layout.strategy, step=step)
    return planned.override(f"step.accumulate={layout.accumulate}", *assignments)


def padded_vocab(num_tokens: int) -> int:
    """Return the size of the vocabulary of a model for a tokenizer with this number of ids."""
    return -(-num_tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def with_vocab(recipe: Recipe, source: Source, fit_vocab: bool, from_hf: str | Path | None) -> Recipe:
    """Return the recipe with a vocabulary that contains every token of the data."""
    data_size, config = getattr(source, "vocab_size", None), recipe.model
    model_size = getattr(config, "vocab_size", None)
    if data_size is None or model_size is None:
        return recipe
    padded = padded_vocab(data_size)
    if fit_vocab and model_size != padded:
        return recipe.replace(model=dataclasses.replace(config, vocab_size=padded))  # type: ignore[type-var]
    if data_size > model_size:
        fix = "use tokenizer.json and weights of the same release" if from_hf else f"--set model.vocab_size={padded}"
        requested, reason = f"train on token ids up to {data_size - 1}", f"the vocabulary has {model_size} entries"
        raise problem(f"model.vocab_size ({model_size})", requested, reason, fix, code="out-of-range")
    return recipe


def check_ids(recipe: Recipe, source: Source) -> None:
    """Check that the token ids of `ArrayData` are below the vocabulary size."""
    from meshpar.models.token_loss import IGNORE_TARGET

    vocab_size = getattr(recipe.model, "vocab_size", None)
    if vocab_size is None or not isinstance(source, ArraySource):
        return
    for rows in (source.train_rows, source.valid_rows):
        examples = rows.read(np.arange(len(rows)))
        for name in {"inputs", "targets"} & examples.keys():
            ids = examples[name]
            is_invalid = (ids < 0) | (ids >= vocab_size)
            if name == "targets":
                is_invalid &= ids != IGNORE_TARGET
            if np.issubdtype(ids.dtype, np.integer) and is_invalid.any():
                where = f"data array `{name}`, example {int(np.argwhere(is_invalid)[0][0])}"
                ignored = f"; {IGNORE_TARGET} marks targets to ignore" * (name == "targets")
                reason = f"valid ids are 0 to {vocab_size - 1}{ignored}"
                fix = f"correct the data, or set model.vocab_size to {int(ids.max()) + 1} or more"
                requested = f"train on the token id {int(ids[is_invalid][0])}"
                raise problem(where, requested, reason, fix, code="out-of-range")
