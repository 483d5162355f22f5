"""Runs a recipe, act by act: mesh, model, strategy, data, optimizer, run, report.

runs/<name>/  recipe.json · sharding.txt · sharding.json · metrics.jsonl · checkpoints/ · loss.png · summary.json
              goodput.json · experts.png, tensorboard/, wandb/, profile/, where there are any
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from meshpar.cli.multihost import version_of
from meshpar.cli.recipe import (
    Recipe,
    breaks_resuming,
    build_model,
    build_optimizer,
    build_step,
    changes,
    defaults_of,
)
from meshpar.cli.run_lock import held
from meshpar.data.arrays import ArraySource
from meshpar.data.batches import Batches
from meshpar.data.source import Source
from meshpar.hardware.clusters import peak_flops_per_s
from meshpar.hardware.compile_options import fingerprint
from meshpar.interop.hf import check_weights, config_of, load_hf
from meshpar.interop.runs import BESIDE_RUN, RUN_MODE, check_source, keep_beside
from meshpar.layers.precision import cast_floating
from meshpar.loop import expert_load as experts
from meshpar.loop import heartbeat as watchdog
from meshpar.loop.checkpoint import Checkpoints, barrier
from meshpar.loop.coordination import Pod, check_shared, this_pod
from meshpar.loop.fit import (
    Checkpointer,
    FitResult,
    Hook,
    Preemption,
    Record,
    Run,
    Validator,
    fit,
    restore_or_init,
)
from meshpar.loop.goodput import Goodput
from meshpar.loop.goodput import words as goodput_words
from meshpar.loop.metric_writers import check_writers, writers
from meshpar.loop.metrics_file import JsonlWriter, missing_steps, read_lines
from meshpar.loop.profiler import Profile
from meshpar.loop.progress_bar import ProgressBar
from meshpar.moe.load_metrics import Loads
from meshpar.optim.averages import averages_of, ema_params
from meshpar.sharding.context import use_rules
from meshpar.sharding.host_resources import check_local, check_memory, check_name, read_json, replace_file
from meshpar.sharding.printing import human_mesh
from meshpar.sharding.types import problem
from meshpar.sharding.units import human_bytes
from meshpar.training.lora import merged_params
from meshpar.training.pgle import check_pgle, pgle_enabled
from meshpar.training.state import Setup, TrainState, make_setup
from meshpar.training.step import TrainStep, eval_step

KEPT = ("attention", "tensor_matmul", "vocab_chunk", "param_dtype")
"""Fields of a recipe's model that stay where it begins with a folder of Hugging Face's."""
REPLAYED = ("steps", "remat", "nonfinite")
"""Fields that may change when a run goes on, with which the earlier program is lowered again to compare it."""
NO_PROGRAM = (
    "name", "max_skipped", "validate_every", "checkpoint_every", "checkpoint_retries", "keep_checkpoints", "sample",
    "writers", "pgle", "data.prefetch", "data.cache",
)  # fmt: skip
"""Fields that may change when a run goes on, and that are not in its program."""
VOCAB_MULTIPLE = 128
"""A vocabulary that follows a tokenizer is rounded up to this: any usual mesh divides it, and matmuls like it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What became of a run."""

    folder: Path
    """Where it wrote."""
    reason: str
    """"done", or "interrupted": the same command goes on."""
    summary: dict[str, Any]
    """What summary.json holds."""


def train(
    recipe: Recipe,
    *,
    out: str | Path = "runs",
    devices: Sequence[jax.Device] | None = None,
    fresh: bool = False,
    fit_vocab: bool = False,
    from_hf: str | Path | None = None,
    profile: tuple[int, int] | None = None,
    accept_changes: bool = False,
    stream: IO[str] | None = None,
) -> RunOutcome:
    """Train a recipe, or go on with a run of the same name, and report.

    Args:
      recipe: what to train.
      out: the run writes to `out/<name>/`.
      devices: default: all there are.
      fresh: begin anew; what an earlier run of this name wrote is moved aside.
      fit_vocab: give the model the vocabulary of the data's tokenizer.
      from_hf: a Hugging Face folder to take the model and its weights from; the recipe keeps the fields in `KEPT`.
      profile: the first and the last step of a trace that is written to `profile/` of the run.
      accept_changes: go on with a run whose program was another one, or whose recipe.json is lost.
      stream: where progress and report are shown; standard output by default.

    Raises:
      ValueError: a recipe that does not fit its devices or data, or that is not the recipe of the run to be resumed.
    """
    check_local(out, f"--out {out}", "name a local folder, or the folder where the bucket is mounted")
    screen, folder, began_s = Screen(stream or sys.stdout), Path(out) / recipe.name, time.time()
    check_writers(recipe.writers)
    recipe = recipe if from_hf is None else _begun_with(recipe, from_hf, folder, fresh)
    pod = this_pod()
    if pod is not None:
        pod.agree("recipe", recipe.to_json(), fix="start every process with the same command and recipe file")
    mesh = recipe.mesh.build(devices)
    if recipe.pgle:
        check_pgle(mesh, profile)
    source = _opened(recipe, screen)
    recipe = _with_vocab(recipe, source, fit_vocab, from_hf)
    check_ids(recipe, source)
    _check_sample(recipe, source)
    setup = _setup(recipe, mesh)
    with source.train(setup.batch_sharding) as batches, contextlib.ExitStack() as until_end:
        if recipe.pgle:
            until_end.enter_context(pgle_enabled(Path(out)))
        step = build_step(recipe)
        with screen.doing("traces and lowers the training step"):
            program = StepProgram(recipe, setup, batches, step)
        if pod is not None:
            _agree(pod, setup, source, batches, str(program))
        write = until_end.enter_context(_prepared(folder, program, fresh=fresh, accept=accept_changes, screen=screen))
        screen.facts("meshpar train", _facts(recipe, setup, source, folder))
        with Checkpoints(folder / "checkpoints", keep=recipe.keep_checkpoints) as checkpoints:
            with screen.doing("restores the state, or makes it"), _undone(folder, checkpoints):
                state = _state(recipe, setup, checkpoints, batches, folder, from_hf)
            before = int(state.step)
            screen.line(_where_it_starts(before, recipe.steps) + _what_is_lost(folder, before))
            screen.line(str(program))
            goodput = Goodput(folder / "goodput.json", metrics=folder / "metrics.jsonl", began_s=began_s)
            hooks = _hooks(recipe, setup, source, folder, checkpoints, screen, goodput)
            hooks = [_RunFolder(folder, write), *hooks, *_profile(profile, folder, str(program))]
            result = fit(step, state, batches, hooks=hooks, **_fit_options(recipe, batches, setup))
            del state
    outcome = _report(recipe, result, source, folder, screen, steps_taken=result.step - before, goodput=goodput)
    if outcome.reason == "done" and "missing_steps" in outcome.summary and jax.process_index() == 0:
        ranges = ", ".join(f"{first} to {last}" for first, last in outcome.summary["missing_steps"][:4])
        where, exists = f"run {folder}: metrics.jsonl", f"those of steps {ranges} are lost"
        fix = "bring the file back from a copy and run the same command again; the checkpoints are whole"
        raise problem(where, "hold the numbers of all steps", exists, fix)
    return outcome


def _opened(recipe: Recipe, screen: Screen) -> Source:
    with screen.doing("reads the data"), watchdog.busy(watchdog.READS):
        return recipe.data.open(batch_size=recipe.batch_size, seed=recipe.seed)


def _setup(recipe: Recipe, mesh: jax.sharding.Mesh) -> Setup:
    model = build_model(recipe)
    tx = build_optimizer(recipe, model, mesh)
    setup = make_setup(model, tx, mesh=mesh, strategy=recipe.strategy, precision=recipe.precision)
    _check_fits_host(setup)
    return setup


def _state(
    recipe: Recipe, setup: Setup, checkpoints: Checkpoints, batches: Batches, folder: Path, from_hf: str | Path | None
) -> TrainState:
    """Where the run goes on, or begins."""
    if from_hf is not None and jax.process_index() == 0 and not checkpoints.steps():
        keep_beside(from_hf, folder)  # later, its weights are those that the run began with, whatever is named
    init = Setup.init if from_hf is None else lambda setup, key: load_hf(from_hf, setup, key=key)
    return restore_or_init(checkpoints, setup, key=recipe.seed, batches=batches, init=init)


def _begun_with(recipe: Recipe, from_hf: str | Path, folder: Path, fresh: bool) -> Recipe:
    """`with_hf`, and the weights looked at before anything is written: those of the run, where it has begun."""
    recipe = with_hf(recipe, from_hf)
    if fresh or not any((folder / "checkpoints").glob("*")):
        check_weights(from_hf)
    else:
        check_source(from_hf, folder)
    return recipe


def with_hf(recipe: Recipe, folder: str | Path) -> Recipe:
    """The recipe with the model of a folder of Hugging Face's, and its tokenizer where the data is text.

    Raises:
      ValueError: the recipe's model is no decoder; a config.json that is none of ours.
    """
    from meshpar.data import ChatData, TextData
    from meshpar.models.config import TransformerConfig

    model, data = recipe.model, recipe.data
    if not isinstance(model, TransformerConfig):
        fix = "give the recipe a TransformerConfig, whose sizes are then those of the folder"
        raise problem(f"--from-hf {folder}", "train its model", f"the recipe's is a {type(model).__name__}", fix)
    kept = {name: getattr(model, name) for name in KEPT}
    tokenizer = Path(folder) / "tokenizer.json"
    if isinstance(data, TextData | ChatData) and tokenizer.exists():
        data = dataclasses.replace(data, tokenizer=str(tokenizer))
    return recipe.replace(model=config_of(folder, **kept), data=data)


def check_left_to_folder(folder: str, assignments: Sequence[str], tokenizer: str | None) -> None:
    """Raises `ValueError` for an option that sets what `with_hf` takes from the folder."""
    check_name(folder, f"--from-hf {folder}", "name a folder with config.json")
    has_tokenizer = (Path(folder) / "tokenizer.json").exists()
    for option in [f"--set {one}" for one in assignments] + ([f"--tokenizer {tokenizer}"] if tokenizer else []):
        first, _, name = option.removeprefix("--set ").partition("=")[0].strip().partition(".")
        of_model = first == "model" and name.split(".")[0] not in KEPT
        if of_model or (has_tokenizer and (name == "tokenizer" or option.startswith("--tokenizer"))):
            exists = f"the folder says it; of the recipe's model stay {', '.join(KEPT)}"
            fix = "leave it out, or change a copy of the folder"
            raise problem(option, f"train with it and --from-hf {folder}", exists, fix)


def with_plan(recipe: Recipe, path: str | Path, assignments: Sequence[str] = ()) -> Recipe:
    """The recipe under the first of the plans in a file, which are of gradients that every micro-step reduces; and with
    fields set by text, for which the plan's micro-steps may have been made. Raises `ValueError`: no plans there."""
    from meshpar.planner.plan import load_plans

    layout = load_plans(path)[0].layout
    fields = {one.name: getattr(layout, one.name) for one in dataclasses.fields(layout)}
    planned = recipe.replace(**{**fields, "accumulate": 1, "reduce_gradients": "each_microbatch"})
    return planned.override(f"accumulate={layout.accumulate}", *assignments)


def _agree(pod: Pod, setup: Setup, source: Source, batches: Batches, program: str) -> None:
    """All processes have the same data, shardings and program: compared before a device of one waits for another's."""
    facts = {
        "data": {**source.describe(), "order": batches.get_state(), "fingerprint": source.fingerprint},
        "sharding": setup.table.to_json(),
        "program": program,
    }
    with watchdog.busy(watchdog.WAITS):
        pod.agree("run", facts, fix="see that data, recipe file and what it imports are the same on every host")


def _hooks(
    recipe: Recipe,
    setup: Setup,
    source: Source,
    folder: Path,
    checkpoints: Checkpoints,
    screen: Screen,
    goodput: Goodput,
) -> list[Hook]:
    # Ten looks in a short run, one every hundred steps in a long one.
    expert_load = experts.ExpertLoad(every=min(max(recipe.steps // 10, 1), 100), stream=screen.stream)
    validation = eval_step(recipe.loss, precision=recipe.precision, xla=recipe.xla)
    of = None if averages_of(setup.abstract.opt_state) is None else ema_params

    def also(record: Record) -> dict[str, Any]:
        return {**expert_load.line(record), **goodput.line(record)}

    return [
        expert_load,
        goodput,
        JsonlWriter(folder / "metrics.jsonl", also=also),
        *writers(recipe.writers, folder, config=_finite(recipe.to_json()), also=also),
        ProgressBar(stream=screen.stream, also=expert_load.words),
        Validator(validation, source.valid(setup.batch_sharding), every=recipe.validate_every or recipe.steps, of=of),
        Checkpointer(checkpoints, every=recipe.checkpoint_every or recipe.steps, retries=recipe.checkpoint_retries),
        Preemption(),
    ]


class _RunFolder(Hook):
    """Check after each step that the run's folder is there, and make it again if it was removed or renamed.

    Args:
      write: makes the folder, and writes what it says about the run. Called in process 0.
    """

    def __init__(self, folder: Path, write: Callable[[], None]) -> None:
        self._folder, self._write = folder, write
        self._made: os.stat_result | None = None

    def on_start(self, run: Run) -> None:
        self._made = self._folder.stat() if jax.process_index() == 0 else None

    def on_dispatched(self, run: Run) -> None:
        self._check()

    def on_end(self, run: Run, reason: str) -> None:
        self._check()

    def _check(self) -> None:
        if self._made is None:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(self._made, self._folder.stat()) and (self._folder / "recipe.json").exists():
                return
        try:
            self._write()
            self._made = self._folder.stat()
        except OSError as error:
            asked, exists = "go on writing to it", f"it was removed or renamed ({error.strerror or error})"
            raise problem(
                f"run {self._folder}", asked, exists, "move it back, and run the same command again"
            ) from error
        text = "was removed, renamed or emptied while the run goes on: it is made again, without earlier checkpoints"
        warnings.warn(f"run {self._folder} {text}", stacklevel=2)


def _profile(steps: tuple[int, int] | None, folder: Path, program: str) -> list[Hook]:
    if steps is None:
        return []
    return [Profile(folder / "profile", first=steps[0], last=steps[1], about={"program": program})]


def _program(step: TrainStep, setup: Setup, batches: Batches) -> str:
    """The fingerprint of what is about to run, and the options it is compiled by; `meshpar explain` has the same."""
    options = step.compile_options(setup)
    words = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    found = fingerprint(step.lower(setup.abstract, batches.spec), options)
    return f"program {found}" + f" with {' '.join(words)}" * bool(words)


class StepProgram:
    """The lowered training step of a run; its text is the fingerprint and the compile options."""

    def __init__(self, recipe: Recipe, setup: Setup, batches: Batches, step: TrainStep) -> None:
        self.recipe, self.setup, self._batches = recipe, setup, batches
        self._text = _program(step, setup, batches)

    def __str__(self) -> str:
        return self._text

    def to_json(self) -> dict[str, str | int]:
        """The fingerprint, and what it depends on besides the recipe and the code that it calls."""
        devices = self.setup.mesh.devices
        versions = {f"{name} version": version_of(name) for name in ("meshpar", "jax", "flax", "optax")}
        of = {"devices": f"{devices.size} × {devices.flat[0].device_kind}", "processes": jax.process_count()}
        return {"fingerprint": self._text, **of, **versions}

    def of(self, recipe: Recipe) -> StepProgram:
        """The program of another recipe, on the same mesh and batches."""
        mesh = self.setup.mesh
        assert isinstance(mesh, jax.sharding.Mesh)
        return StepProgram(recipe, _setup(recipe, mesh), self._batches, build_step(recipe))


def _where_it_starts(step: int, steps: int) -> str:
    if step >= steps:
        return f"step {step} of {steps} is done already: nothing to train"
    return f"resuming at step {step} of {steps}" if step else f"training {steps} steps"


def _what_is_lost(folder: Path, step: int) -> str:
    """Return what to add if the run has numbers of earlier steps and no checkpoint."""
    reached = 0 if step else max((line["step"] for line in read_lines(folder / "metrics.jsonl")), default=0)
    return f" (an earlier run reached step {reached}, and there is no checkpoint of it)" * bool(reached)


# ---- Before the run --------------------------------------------------------------------------------------------------


def _with_vocab(recipe: Recipe, source: Source, fit_vocab: bool, from_hf: str | Path | None) -> Recipe:
    """The recipe with a model that knows every token of the data."""
    needed, config = getattr(source, "vocab_size", None), recipe.model
    known = getattr(config, "vocab_size", None)
    if needed is None or known is None:
        return recipe
    rounded = -(-needed // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if fit_vocab and known != rounded:
        return recipe.replace(model=dataclasses.replace(config, vocab_size=rounded))  # type: ignore[type-var]
    if needed > known:
        raise problem(
            f"model.vocab_size ({known})",
            f"train on the data's tokens, which go up to {needed - 1}",
            f"the model knows {known}",
            f"--set model.vocab_size={rounded}"
            if from_hf is None
            else "take tokenizer.json and weights of one release",
        )
    return recipe


def check_ids(recipe: Recipe, source: Source) -> None:
    """Check that token ids in arrays are in the model's vocabulary. Ids of a tokenizer are checked by its size."""
    from meshpar.models.token_loss import IGNORE_TARGET

    known = getattr(recipe.model, "vocab_size", None)
    if known is None or not isinstance(source, ArraySource):
        return
    for rows in (source.train_rows, source.valid_rows):
        examples = rows.read(np.arange(len(rows)))
        for name in {"inputs", "targets"} & examples.keys():
            ids = examples[name]
            is_wrong = (ids < 0) | (ids >= known)
            if name == "targets":
                is_wrong &= ids != IGNORE_TARGET
            if np.issubdtype(ids.dtype, np.integer) and is_wrong.any():
                example = int(np.argwhere(is_wrong)[0][0])
                ignored = f"; targets to be ignored are {IGNORE_TARGET}" * (name == "targets")
                raise problem(
                    f"data array `{name}`, example {example}",
                    f"train on the token id {int(ids[is_wrong][0])}",
                    f"the model knows the ids 0 to {known - 1}{ignored}",
                    f"correct the data, or set model.vocab_size to {int(ids.max()) + 1} or more",
                )


def _check_sample(recipe: Recipe, source: Source) -> None:
    from meshpar.models.config import TransformerConfig

    if recipe.sample is None or (isinstance(recipe.model, TransformerConfig) and hasattr(source, "decode")):
        return
    raise problem(
        "Recipe.sample",
        "write a text at the end",
        f"the model is a {type(recipe.model).__name__} and the data a {type(recipe.data).__name__}; a sample needs "
        "a TransformerConfig and text",
        "--set sample=none",
    )


def _check_fits_host(setup: Setup) -> None:
    """The state fits into the memory of this host, where it is the host's that host devices share."""
    here = [device for device in setup.mesh.devices.flat if device.process_index == jax.process_index()]
    if here and here[0].platform == "cpu":
        totals = setup.table.totals
        needed = len(here) * (totals.params_bytes + totals.grads_bytes + totals.optimizer_bytes)
        asked = f"train {totals.num_params:,} parameters on {len(here)} host devices"
        check_memory("the training state", asked, needed, "make the model smaller, or shard it over more hosts")


@contextlib.contextmanager
def _prepared(
    folder: Path, program: StepProgram, *, fresh: bool, accept: bool, screen: Screen
) -> Iterator[Callable[[], None]]:
    """Prepare the run's folder, held against other runs; yields what makes it and writes its descriptions again."""
    recipe, setup, pod = program.recipe, program.setup, this_pod()

    def write() -> None:
        folder.mkdir(mode=RUN_MODE, parents=True, exist_ok=True)
        made()
        _write(folder / "recipe.json", {**recipe.to_json(), "program": program.to_json()})
        _write(folder / "sharding.json", setup.table.to_json())
        replace_file(folder / "sharding.txt", f"{setup.table}\n")

    with contextlib.ExitStack() as until_end:
        existed = folder.exists()
        if pod is not None:
            check_shared(pod, folder)
        if jax.process_index() == 0:
            made = until_end.enter_context(held(folder, tell=screen.line))
        if not fresh:
            _check_same_run(folder, program, accept=accept, screen=screen)
        barrier("meshpar: folder checked")  # no process writes before all have looked
        if jax.process_index() == 0:
            if fresh and existed:
                screen.line(f"the earlier run is moved to {_move_aside(folder)}")
            write()
        barrier("meshpar: folder prepared")
        if (watch := watchdog.current()) is not None:
            watch.log = folder / f"process-{jax.process_index()}.log"
        yield write


@contextlib.contextmanager
def _undone(folder: Path, checkpoints: Checkpoints) -> Iterator[None]:
    """What is within fails: of a run that has not begun nothing stays that would hold the next one to its recipe."""
    try:
        yield
    except BaseException:
        if jax.process_index() == 0 and not checkpoints.steps():
            for name in ("recipe.json", "sharding.json", "sharding.txt"):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / BESIDE_RUN, ignore_errors=True)
        raise


def _check_same_run(folder: Path, program: StepProgram, *, accept: bool, screen: Screen) -> None:
    """Check that a run in this folder was begun with the same recipe and the same program."""
    path, recipe = folder / "recipe.json", program.recipe
    if not path.exists():
        saved = [step for step in Checkpoints(folder / "checkpoints").steps() if step]
        if saved and not accept:  # step 0 is that of `meshpar convert from-hf`, which writes no recipe
            exists = f"recipe.json is missing, so that nothing says how its {saved[-1]} steps were trained"
            fix = "bring it back from a copy; or --accept-changes to go on with this recipe, or --name for a new run"
            raise problem(f"run {folder}", "go on with it", exists, fix)
        return
    fix = f"bring it back from a copy; or use --name for a new run, or --fresh to begin anew ({folder} is moved aside)"
    written = read_json(path, f"run {folder}: {path.name}", fix)
    if not isinstance(written, dict):
        raise problem(f"run {folder}: {path.name}", "read it", f"it holds a {type(written).__name__}", fix)
    before = written.pop("program", None)
    changed = changes(written, _finite(recipe.to_json()), _finite(defaults_of(recipe)))
    breaking = {name: values for name, values in changed.items() if breaks_resuming(name)}
    if breaking:
        raise problem(
            f"run {folder}",
            "go on with it",
            "it was trained with another recipe: " + _listed(breaking),
            f"use --name for a new run beside it, or --fresh to begin anew ({folder} is moved aside)",
        )
    if changed:
        screen.line("changed since the run began: " + _listed(changed))
    if isinstance(before, dict):
        _check_same_program(folder, program, before, changed, accept=accept, screen=screen)


def _check_same_program(
    folder: Path,
    program: StepProgram,
    before: Mapping[str, Any],
    changed: Mapping[str, tuple[Any, Any]],
    *,
    accept: bool,
    screen: Screen,
) -> None:
    """Compare the program that a run was trained with, under the fields that its recipe had.

    Functions are only names in recipe.json: that the body of a loss has changed shows in the program alone.
    """
    now, fields = program.to_json(), set(changed) - set(NO_PROGRAM)
    others = [name for name in now if name != "fingerprint" and before.get(name) != now[name]]
    if others or not fields <= set(REPLAYED):
        reasons = ", ".join([*others, *sorted(fields - set(REPLAYED))])
        screen.line(f"its program cannot be compared with the one that the run began with: {reasons} changed")
        return
    if fields:
        now = program.of(program.recipe.replace(**{name: changed[name][0] for name in fields})).to_json()
    if before["fingerprint"] == now["fingerprint"]:
        return
    exists = f"it was trained with {before['fingerprint']}, and its fields now give {now['fingerprint']}"
    if accept:
        screen.line(f"the code changed since the run began: {exists}")
        return
    where = "the code of the loss, the model, the optimizer or of a library has changed"
    fix = "bring the old code back; or --accept-changes to go on with the new one, or --name for a new run"
    raise problem(f"run {folder}", "go on with it", f"{where}: {exists}", fix)


def _listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} was {old!r} and is {new!r}" for name, (old, new) in changed.items())


def _move_aside(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    return folder.rename(aside)


def _write(path: Path, document: Any) -> None:
    replace_file(path, json.dumps(_finite(document), indent=2, ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    """The value with numbers that JSON does not know as words."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _facts(recipe: Recipe, setup: Setup, source: Source, folder: Path) -> dict[str, str]:
    """What a person wants to know before it starts."""
    totals = setup.table.totals
    devices = setup.mesh.devices.flat
    per_device = {"params": totals.params_bytes, "grads": totals.grads_bytes, "optimizer": totals.optimizer_bytes}
    return {
        "run": str(folder),
        "devices": f"{setup.mesh.size} × {devices[0].device_kind}",
        "mesh": human_mesh(setup.table.mesh),
        "strategy": setup.strategy.label,
        "parameters": f"{totals.num_params:,}",
        "per device": ", ".join(f"{part} {human_bytes(count)}" for part, count in per_device.items()),
        "data": _data_line(source.describe()),
        "batch": f"{recipe.batch_size} rows"
        + (f" in {recipe.accumulate} micro-steps" if recipe.accumulate > 1 else ""),
    }


def _data_line(facts: Mapping[str, Any]) -> str:
    sides = []
    for side in ("train", "valid"):
        counts = facts.get(side, {})
        unit = next((unit for unit in ("tokens", "examples") if unit in counts), None)
        sides += [f"{counts[unit]:,} {unit} to {'train on' if side == 'train' else 'validate on'}"] if unit else []
    if parts := facts.get("in_parts"):
        sides.append(
            f"{parts:,} conversations in parts, as their template writes earlier turns otherwise in later ones"
        )
    if unused := facts.get("unused_fields"):
        counts = ", ".join(f"{name} ({count:,} records)" for name, count in unused.items())
        sides.append(f"nothing reads the fields {counts}")
    return ", ".join(sides)


def _fit_options(recipe: Recipe, batches: Batches, setup: Setup) -> dict[str, Any]:
    """Arguments of `fit`; tokens and FLOPs of a step, and the peak of all devices, are None where they are unknown."""
    inputs, precision = batches.spec.get("inputs"), recipe.precision
    tokens = flops = None
    if inputs is not None and len(inputs.shape) == 2 and np.issubdtype(inputs.dtype, np.integer):
        tokens, per_token = math.prod(inputs.shape), getattr(recipe.model, "flops_per_token", None)
        flops = None if per_token is None else tokens * per_token(inputs.shape[1])
    dtype = precision.compute or precision.params or "float32"
    peak = peak_flops_per_s(setup.mesh.devices.flat[0].device_kind, dtype)
    peak = None if peak is None else peak * setup.mesh.size
    worth = {"tokens_per_step": tokens, "flops_per_step": flops, "peak_flops_per_s": peak}
    return {"steps": recipe.steps, "max_skipped": recipe.max_skipped, **worth}


# ---- The report ------------------------------------------------------------------------------------------------------


def _report(
    recipe: Recipe,
    result: FitResult,
    source: Source,
    folder: Path,
    screen: Screen,
    *,
    steps_taken: int,
    goodput: Goodput,
) -> RunOutcome:
    done = result.reason == "done"
    curves = list(read_lines(folder / "metrics.jsonl"))
    valid = _last_validation(curves)
    loads = _last_loads(curves)
    summary: dict[str, Any] = {
        "name": recipe.name,
        "reason": result.reason,
        "step": result.step,
        "steps": recipe.steps,
        "steps_taken": steps_taken,
        "num_params": result.state.num_params,
        "seconds": round(result.seconds, 3),
        "tokens_per_s": result.tokens_per_s,
        "mfu": None if result.last is None else result.last.mfu,
        "skipped": result.skipped,
        "validation": valid,
        "goodput": goodput.share,
        "wall_s": {name: round(seconds, 3) for name, seconds in goodput.seconds.items()},
    }
    if missing := missing_steps(curves, result.step):
        summary["missing_steps"] = missing
    if loads is not None:
        summary["experts"] = experts.worst_layer(loads)
    if unused := source.describe().get("unused_fields"):
        summary["unused_fields"] = unused
    if done:
        summary |= _against_baseline(source, valid)
        if recipe.sample is not None:
            summary["sample"] = sample_text(recipe, result.state, source)
    if jax.process_index() == 0:
        if done:
            _plot(folder / "loss.png", recipe, curves, source, summary)
            if loads is not None:
                _plot_loads(folder / "experts.png", recipe, loads)
        _write(folder / "summary.json", summary)
        _show(screen, recipe, summary, folder)
    return RunOutcome(folder=folder, reason=result.reason, summary=summary)


def _last_validation(curves: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    for line in reversed(curves):
        found = {name.removeprefix("val_"): value for name, value in line.items() if name.startswith("val_")}
        if found:
            return found
    return {}


def _last_loads(curves: Sequence[Mapping[str, Any]]) -> Loads | None:
    """The load of experts over the last steps; None for a model without."""
    found = next((line[experts.LAYERS] for line in reversed(curves) if experts.LAYERS in line), None)
    return None if found is None else experts.loads_of(found)


def _against_baseline(source: Source, valid: Mapping[str, float]) -> dict[str, Any]:
    """The model and bigram models on the same held-out tokens, in bits per byte; nothing for data that is no text."""
    if not hasattr(source, "baseline") or valid.get("loss") is None:
        return {}
    baseline = source.baseline("served")
    bits, fitted = baseline.of(valid["loss"]).bits_per_byte, baseline.fitted.bits_per_byte
    return {
        "bits_per_byte": bits,
        "bigram_bits_per_byte": fitted,
        "bigram_bound_bits_per_byte": baseline.oracle.bits_per_byte,
        "below_bigram_bits_per_byte": fitted - bits,
        "held_out_tokens": baseline.num_tokens,
    }


def sample_text(recipe: Recipe, state: TrainState, source: Any) -> str:
    """The recipe's prompt, continued by the model on the mesh it was trained on; by averages where it keeps them."""
    from meshpar.models import generate

    assert recipe.sample is not None
    state = state if averages_of(state.opt_state) is None else ema_params(state)
    wanted, setup = recipe.sample, state.setup
    plain = setup.model if recipe.lora is None else build_model(recipe.replace(lora=None))
    prompt = np.asarray(source.encode(wanted.prompt), np.int32)[None]

    def write(params: Any, extra: Any, prompt: jax.Array, key: jax.Array) -> jax.Array:
        with use_rules(setup.mesh, setup.strategy):
            model = plain.bind(cast_floating(params, recipe.precision.compute), extra)
            return generate(
                model,
                prompt,
                config=recipe.model,  # type: ignore[arg-type]
                num_tokens=wanted.num_tokens,
                key=key,
                temperature=wanted.temperature,
            )

    tokens = jax.jit(write)(merged_params(state), state.extra, prompt, jax.random.key(recipe.seed))
    return source.decode(np.asarray(tokens)[0])


def _plot(
    path: Path, recipe: Recipe, curves: Sequence[Mapping[str, Any]], source: Source, summary: Mapping[str, Any]
) -> None:
    from meshpar.cli import plots

    bits = "bits_per_byte" in summary
    scale = summary["bits_per_byte"] / summary["validation"]["loss"] if bits else 1.0
    figure = plots.loss_curve(
        train=[(line["step"], line["loss"] * scale) for line in curves if line.get("loss") is not None],
        valid=[(line["step"], line["val_loss"] * scale) for line in curves if line.get("val_loss") is not None],
        baselines={"bigram model": summary["bigram_bits_per_byte"]} if bits else {},
        title=recipe.name,
        unit="bits per byte" if bits else "loss",
    )
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    replace_file(path, picture.getvalue())


def _plot_loads(path: Path, recipe: Recipe, loads: Loads) -> None:
    from meshpar.cli import plots

    num_ranks = loads.ranks.tokens.shape[-1]
    title = f"{recipe.name}: load of experts, last steps"
    _save(plots.expert_load(loads.experts.tokens, num_ranks=num_ranks, title=title), path)


def _show(screen: Screen, recipe: Recipe, summary: Mapping[str, Any], folder: Path) -> None:
    if summary["reason"] != "done":
        screen.line(
            f"{summary['reason']} at step {summary['step']} of {summary['steps']}; saved in {folder / 'checkpoints'}. "
            "The same command goes on from there."
        )
        return
    if "sample" in summary:
        screen.text("sample", summary["sample"])
    screen.facts("result", _result(summary, folder))


def _result(summary: Mapping[str, Any], folder: Path) -> dict[str, str]:
    facts = {f"held-out {name}": f"{value:.4f}" for name, value in summary["validation"].items() if value is not None}
    if "bits_per_byte" in summary:
        facts["bits per byte"] = f"{summary['bits_per_byte']:.3f} on {summary['held_out_tokens']:,} held-out tokens"
        facts["bigram model"] = (
            f"{summary['bigram_bits_per_byte']:.3f} on the same tokens (no bigram model is below "
            f"{summary['bigram_bound_bits_per_byte']:.3f})"
        )
        below = summary["below_bigram_bits_per_byte"]
        facts["margin"] = f"{abs(below):.3f} bits per byte {'below' if below > 0 else 'ABOVE'} the bigram model"
    if "experts" in summary:
        worst = summary["experts"]
        facts["experts, worst layer"] = (
            f"the busiest has {worst['expert_max_over_mean']:.2f} times the mean, the busiest rank "
            f"{worst['rank_max_over_mean']:.2f}; {worst['drop_rate']:.2%} of choices dropped ({folder / 'experts.png'})"
        )
    if summary["tokens_per_s"] is not None:
        facts["speed"] = f"{summary['tokens_per_s']:,.0f} tokens/s"
    if summary["mfu"] is not None:
        facts["model FLOP utilisation"] = f"{summary['mfu']:.1%}"
    if summary["skipped"]:
        facts["skipped updates"] = f"{summary['skipped']} (not finite)"
    if summary["steps_taken"]:
        facts["time"] = f"{summary['seconds']:.0f} s for {summary['steps_taken']} steps"
        facts["goodput"] = goodput_words(summary["wall_s"])
    return {**facts, "loss curve": str(folder / "loss.png")}


class Screen:
    """Where a run is shown: boxes in a terminal, plain lines elsewhere; nothing on other processes than the first."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self._console: Any = None
        if stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console

            self._console = Console(file=stream, highlight=False)

    def line(self, text: str) -> None:
        """One line."""
        if jax.process_index() == 0:
            print(text, file=self.stream, flush=True)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """A block that may take long: in a terminal, what it does and for how long."""
        if self._console is None or jax.process_index() != 0:
            yield
            return
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=self._console, transient=True) as shown:
            shown.add_task(what, total=None)
            yield

    def facts(self, title: str, facts: Mapping[str, str]) -> None:
        """Names and values, below each other."""
        if self._console is None:
            for name, value in facts.items():
                self.line(f"{name}: {value}")
        elif jax.process_index() == 0:
            from rich.table import Table
            from rich.text import Text

            grid = Table.grid(padding=(0, 2))
            for name, value in facts.items():
                grid.add_row(Text(name, style="dim"), Text(value))
            self._boxed(title, grid)

    def text(self, title: str, text: str) -> None:
        """A text that a model wrote: control characters are shown, not obeyed."""
        shown = "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else "�" for c in text)
        if self._console is None:
            self.line(f"{title}:")
            for line in shown.splitlines():
                self.line(f"  | {line}")
        elif jax.process_index() == 0:
            from rich.text import Text

            self._boxed(title, Text(shown))

    def _boxed(self, title: str, content: Any) -> None:
        from rich.panel import Panel

        self._console.print(Panel(content, title=title, title_align="left", border_style="cyan", expand=False))
