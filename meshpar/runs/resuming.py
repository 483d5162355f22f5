"""Resuming a run: check that its recipe and its program are unchanged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from meshpar.data.batches import Batches
from meshpar.hardware.compile_options import fingerprint
from meshpar.loop.checkpoint import Checkpoints
from meshpar.parallel import Strategy
from meshpar.pod import watchdog as watchdog
from meshpar.pod.multihost import version_of
from meshpar.runs.folder import RunFolder
from meshpar.runs.optimizers import AdamW, Optax
from meshpar.runs.plain import json_finite, to_plain
from meshpar.runs.recipe import Recipe, build_setup, build_step
from meshpar.runs.screen import Screen
from meshpar.runs.start_timings import Phases
from meshpar.sharding.errors import is_int, problem
from meshpar.sharding.host_resources import read_json
from meshpar.sharding.mesh import MeshSpec
from meshpar.training.options import RENAMED, StepOptions
from meshpar.training.state import Setup

RESUMABLE = (
    "name", "steps", "optimizer.schedule_steps", "mesh", "strategy", "step.remat", "step.nonfinite", "step.xla",
    "max_skipped", "pgle", "validate_every", "checkpoint_every", "checkpoint_retries", "keep_checkpoints", "sample",
    "writers", "allow", "data.prefetch", "data.cache", "model.attention", "model.unroll",
    "model.moe.grouped_matmul",
)  # fmt: skip
"""Fields that may change when a run is resumed. Only `optimizer.schedule_steps` changes the model, the data or the
updates; a resumed run keeps its value unless the user sets it."""
REPLAYED = (
    "steps", "optimizer.schedule_steps", "step.remat", "step.nonfinite", "model.attention", "model.unroll",
    "model.moe.grouped_matmul",
)  # fmt: skip
"""Recipe fields that may change on resume although they change the program.

To compare programs, the step is lowered again with the old values of these fields.
"""
NO_PROGRAM = (
    "name", "max_skipped", "validate_every", "checkpoint_every", "checkpoint_retries", "keep_checkpoints", "sample",
    "writers", "allow", "pgle", "data.prefetch", "data.cache",
)  # fmt: skip
"""Recipe fields that may change on resume and do not change the program."""


class StepProgram:
    """The lowered training step of a run.

    `str` returns the fingerprint followed by the compile options, as in `meshpar explain`.
    """

    def __init__(self, recipe: Recipe, setup: Setup, batches: Batches, *, phases: Phases | None = None) -> None:
        self.recipe, self.setup, self.batches, self.step = recipe, setup, batches, build_step(recipe)
        options = self.step.compile_options(setup)
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in options.items())
        phases = phases or Phases()
        traced = self.step.trace(setup.abstract, batches.spec)
        phases.end("trace")
        self.lowered = traced.lower()
        digest = fingerprint(self.lowered, options)
        self._text = f"program {digest}" + f" with {words}" * bool(words)
        self.kernels = self.step.kernels(setup.abstract, batches.spec)
        """Implementations that "auto" chose or the model names, by operation."""
        phases.end("lower")

    def __str__(self) -> str:
        return self._text

    def to_json(self) -> dict[str, str | int]:
        """Return the fingerprint, and the devices and versions on which it depends."""
        devices = self.setup.mesh.devices
        return {
            "fingerprint": self._text,
            "devices": f"{devices.size} × {devices.flat[0].device_kind}",
            "processes": jax.process_count(),
            **{f"{name} version": version_of(name) for name in ("meshpar", "jax", "flax", "optax")},
        }


def with_schedule(recipe: Recipe, folder: RunFolder, screen: Screen) -> Recipe:
    """Return the recipe with the schedule of the run in this folder, unless the recipe sets its number of steps."""
    saved, optimizer = saved_recipe(folder), recipe.optimizer
    if saved is None or not isinstance(optimizer, AdamW | Optax) or optimizer.schedule_steps is not None:
        return recipe
    saved_optimizer = saved.get("optimizer")
    saved_steps = saved_optimizer.get("schedule_steps") if isinstance(saved_optimizer, dict) else None
    steps = saved.get("steps") if saved_steps is None else saved_steps
    if steps is None or not is_int(steps, 1) or steps == recipe.steps:
        return recipe
    # The rates of the warm-up do not depend on the steps.
    if isinstance(optimizer, AdamW) and (optimizer.schedule == "constant" or optimizer.warmup_steps >= steps):
        return recipe
    screen.print(
        f"the schedule of the learning rate keeps its {steps} steps, and the run has {recipe.steps}; "
        f"--set optimizer.schedule_steps={recipe.steps} changes it"
    )
    return recipe.replace(optimizer=dataclasses.replace(optimizer, schedule_steps=steps))


def check_same_run(folder: RunFolder, program: StepProgram, *, accept: bool, screen: Screen) -> None:
    """Check that the run in this folder was started with the same recipe and the same program."""
    recipe, where, anew = program.recipe, f"run {folder}", _start_anew(folder)
    saved = saved_recipe(folder)
    if saved is None:
        steps = [step for step in Checkpoints(folder.checkpoints).steps() if step]
        if steps and not accept:  # `meshpar convert from-hf` writes a checkpoint 0 without a recipe
            reason = f"recipe.json is missing, so the recipe of its {steps[-1]} steps is unknown"
            fix = f"restore the file from a copy, use --accept-changes to resume with this recipe, or {anew}"
            raise problem(where, "resume it", reason, fix, code="missing-file")
        return
    saved_program = saved.pop("program", None)
    changed = changes(saved, json_finite(recipe.to_json()), json_finite(defaults_of(recipe)))
    breaking = {name: values for name, values in changed.items() if breaks_resuming(name)}
    if breaking:
        reason = f"it was trained with another recipe: {_format_changes(breaking)}"
        raise problem(where, "resume it", reason, anew, code="conflict")
    if changed:
        screen.print(f"changed since the run started: {_format_changes(changed)}")
    if isinstance(saved_program, dict):
        _check_same_program(folder, program, saved_program, changed, accept=accept, screen=screen)


def _check_same_program(
    folder: RunFolder,
    program: StepProgram,
    saved: Mapping[str, Any],
    changed: Mapping[str, tuple[Any, Any]],
    *,
    accept: bool,
    screen: Screen,
) -> None:
    """Check that the step lowers to the same program as before, up to fields that may change on resume.

    recipe.json stores functions by name, so only the program shows that the body of a loss has changed.
    """
    current, fields = program.to_json(), set(changed) - set(NO_PROGRAM)
    reasons = [name for name in current if name != "fingerprint" and saved.get(name) != current[name]]
    reasons += sorted(fields - set(REPLAYED))
    if reasons:
        screen.print(f"skipping the comparison with the program of the earlier steps: {', '.join(reasons)} changed")
        return
    if fields:
        recipe = program.recipe.override(*(f"{name}={changed[name][0]}" for name in fields))
        mesh = program.setup.mesh
        assert isinstance(mesh, jax.sharding.Mesh)
        current = StepProgram(recipe, build_setup(recipe, mesh), program.batches).to_json()
    saved_program = saved.get("fingerprint")
    if saved_program == current["fingerprint"]:
        return
    difference = f"the run was trained with {saved_program}, and the recipe now gives {current['fingerprint']}"
    if accept:
        screen.print(f"the code changed since the run started: {difference}")
        return
    reason = f"the code of the loss, the model, the optimizer or a library has changed: {difference}"
    fix = "restore the old code, use --accept-changes to resume with the new code, or --name to start a new run"
    raise problem(f"run {folder}", "resume it", reason, fix, code="conflict")


def saved_recipe(folder: RunFolder) -> dict[str, Any] | None:
    """Return the content of recipe.json in a run folder, or None if there is no such file."""
    path, where = folder / "recipe.json", f"run {folder}"
    if not path.exists():
        return None
    fix = f"restore it from a copy, {_start_anew(folder)}"
    saved = read_json(path, f"{where}: {path.name}", fix)
    if not isinstance(saved, dict):
        reason = f"it contains a {type(saved).__name__} instead of an object"
        raise problem(f"{where}: {path.name}", "read it", reason, fix, code="damaged-file")
    return saved


def _start_anew(folder: RunFolder) -> str:
    return f"use --name to start a new run, or --fresh to start over ({folder} is renamed)"


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ between results of `to_json`, as dotted path -> (before, after).

    `before` may be from an earlier version. `defaults`, from `defaults_of`, has the values of fields that did not exist
    then. In early versions, the fields of `step` are at the top level, and some have other names.
    """
    absent = "(absent)"
    step_fields = {field.name for field in dataclasses.fields(StepOptions)}
    step = {name: value for name, value in before.items() if name in step_fields}
    before = {"step": step} | {name: value for name, value in before.items() if name not in step}
    old, new = flatten_dict(before, sep="."), flatten_dict(after, sep=".")
    for name, new_name in RENAMED.items():
        if (earlier := f"step.{name}") in old:
            old[f"step.{new_name}"] = old.pop(earlier)
    # Defaults apply only to configs that the older recipe has.
    configs = {"", *(path.rpartition(".")[0] for path in old)}
    implied = {path: value for path, value in (defaults or {}).items() if path.rpartition(".")[0] in configs}
    pairs = {path: (old.get(path, implied.get(path, absent)), new.get(path, absent)) for path in {**old, **new}}
    return {path: (earlier, later) for path, (earlier, later) in pairs.items() if earlier != later}


def defaults_of(recipe: Recipe) -> dict[str, Any]:
    """Return the default value of each field of a recipe and its configs, by dotted path."""
    defaults: dict[str, Any] = {}

    def collect(config: Any, prefix: str) -> None:
        for field in dataclasses.fields(config):
            value, path = getattr(config, field.name), f"{prefix}{field.name}"
            if dataclasses.is_dataclass(value) and not isinstance(value, type | MeshSpec | Strategy):
                collect(value, f"{path}.")
            elif field.default is not dataclasses.MISSING and field.repr:
                defaults.update(flatten_dict({path: to_plain(field.default)}, sep="."))

    collect(recipe, "")
    return defaults


def breaks_resuming(path: str) -> bool:
    """Return whether a run cannot be resumed after a change of this field."""
    return not any(path == free or path.startswith(f"{free}.") for free in RESUMABLE)


def _format_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} was {old!r} and is {new!r}" for name, (old, new) in changed.items())
