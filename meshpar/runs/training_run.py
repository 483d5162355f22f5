"""The training run of `meshpar train`: prepare the run folder, train, validate and report.

runs/<name>/  recipe.json · sharding.txt · sharding.json · metrics.jsonl · checkpoints/ · loss.png · summary.json
              goodput.json · optional: experts.png, tensorboard/, wandb/, profile/
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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

from meshpar.pod.multihost import version_of
from meshpar.runs.recipe import (
    AdamW,
    Optax,
    Recipe,
    breaks_resuming,
    build_model,
    build_optimizer,
    build_step,
    changes,
    defaults_of,
    open_data,
)
from meshpar.runs.lock import lock_run_folder
from meshpar.data.arrays import ArraySource
from meshpar.data.batches import Batches
from meshpar.data.mixture import MixedSource
from meshpar.data.source import Source
from meshpar.hardware.clusters import peak_flops_per_s
from meshpar.hardware.compile_options import fingerprint
from meshpar.interop.hf import check_weights, config_of, load_hf
from meshpar.runs.saved_run import RUN_MODE, SOURCE_FOLDER, check_source, keep_source_files
from meshpar.layers.precision import cast_floating
from meshpar.loop import expert_load as experts
from meshpar.pod import watchdog as watchdog
from meshpar.loop.checkpoint import Checkpoints, barrier
from meshpar.pod.coordination import check_shared, this_pod
from meshpar.loop.fit import (
    Checkpointer,
    FitResult,
    Hook,
    Preemption,
    Record,
    Validator,
    fit,
    restore_or_init,
)
from meshpar.loop.goodput import Goodput
from meshpar.loop.goodput import words as goodput_words
from meshpar.loop.learning_rate import LearningRate
from meshpar.loop.metric_writers import check_writers, writers
from meshpar.loop.metrics_file import (
    MetricsFile,
    describe_missing,
    missing_steps,
    missing_validations,
    read_lines,
)
from meshpar.loop.profiler import Profile
from meshpar.loop.progress_bar import ProgressBar
from meshpar.runs.folder import RunFolder, run_folder
from meshpar.moe.load_metrics import Loads
from meshpar.optim.averages import eval_params
from meshpar.sharding import remote
from meshpar.sharding.context import use_rules
from meshpar.sharding.host_resources import check_memory, check_name, is_url, read_json, replace_file
from meshpar.sharding.printing import human_mesh
from meshpar.sharding.types import is_int, problem
from meshpar.sharding.units import human_bytes
from meshpar.training.lora import merged_params
from meshpar.training.pgle import check_pgle, pgle_enabled
from meshpar.training.state import Setup, TrainState, make_setup
from meshpar.training.step import eval_step

KEPT = ("attention", "tensor_matmul", "vocab_chunk", "param_dtype")
"""Model fields that the recipe keeps with --from-hf. The Hugging Face folder sets all others."""
REPLAYED = ("steps", "optimizer.schedule_steps", "step.remat", "step.nonfinite")
"""Recipe fields that may change on resume although they change the program.

To compare programs, the step is lowered again with the old values of these fields.
"""
NO_PROGRAM = (
    "name", "max_skipped", "validate_every", "checkpoint_every", "checkpoint_retries", "keep_checkpoints", "sample",
    "writers", "pgle", "data.prefetch", "data.cache",
)  # fmt: skip
"""Recipe fields that may change on resume and do not change the program."""
_RUN_FILES = ("recipe.json", "sharding.json", "sharding.txt")
"""Files that describe a run, written before its first step."""
VOCAB_MULTIPLE = 128
"""The vocabulary of a tokenizer is padded to this multiple, which common mesh sizes and matmul tiles divide."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """Result of a run."""

    folder: Any
    """The run folder, a `Path`. In a bucket, an `epath.Path`."""
    reason: str
    """"done", or "interrupted" if the same command resumes the run."""
    summary: dict[str, Any]
    """Contents of summary.json."""


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
    """Train a recipe or resume a run of the same name, and report the result.

    Args:
      recipe: the run to train.
      out: folder of all runs, or its gs:// or s3:// URL. The run writes to `out/<name>/`.
      devices: devices of the mesh; by default all.
      fresh: start from step 0, and rename the folder of an earlier run.
      fit_vocab: set the vocabulary size of the model to that of the data's tokenizer.
      from_hf: Hugging Face folder of the model and its initial weights. The recipe keeps the fields in `KEPT`.
      profile: first and last step of a trace that is written to `profile/` in the run folder.
      accept_changes: resume a run whose program has changed or whose recipe.json is missing.
      stream: receives progress and report; by default standard output.

    Raises:
      ValueError: if the recipe does not fit its devices or data, or differs from the recipe of the run to resume.
    """
    check_writers(recipe.writers)
    screen = Screen(stream or sys.stdout)
    if is_url(out):
        remote.check_url(remote.join(out), f"run {out}/{recipe.name}")
    path = remote.join(out, recipe.name) if is_url(out) else Path(out) / recipe.name
    with run_folder(path, write=True, warn=screen.print) as folder:
        return _train_in(
            folder, recipe, devices=devices, fresh=fresh, fit_vocab=fit_vocab, from_hf=from_hf, profile=profile,
            accept_changes=accept_changes, screen=screen,
        )  # fmt: skip


def _train_in(
    folder: RunFolder, recipe: Recipe, *, devices: Sequence[jax.Device] | None, fresh: bool, fit_vocab: bool,
    from_hf: str | Path | None, profile: tuple[int, int] | None, accept_changes: bool, screen: Screen,
) -> RunOutcome:  # fmt: skip
    start_time_s = time.time()
    if from_hf is not None:
        recipe = with_hf(recipe, from_hf)
        # Before anything is written: a run that has started must have started from these weights.
        if fresh or not Checkpoints(folder.checkpoints).steps():
            check_weights(from_hf)
        else:
            check_source(from_hf, folder.local)
    pod = this_pod()
    if pod is not None:
        pod.agree("recipe", recipe.to_json(), fix="start every process with the same command and recipe file")
    mesh = recipe.mesh.build(devices)
    if recipe.pgle:
        check_pgle(mesh, profile)
    with screen.progress("reading the data"), watchdog.busy(watchdog.READS):
        source = open_data(recipe)
    recipe = _with_vocab(recipe, source, fit_vocab, from_hf)
    check_ids(recipe, source)
    if recipe.sample is not None and not (hasattr(recipe.model, "vocab_size") and hasattr(source, "decode")):
        names = f"the model is a {type(recipe.model).__name__} and the data is {type(recipe.data).__name__}"
        reason, fix = f"a sample needs a TransformerConfig and text data, but {names}", "--set sample=none"
        raise problem("Recipe.sample", "generate text after training", reason, fix, code="conflict")
    recipe = recipe if fresh else _with_schedule(recipe, folder, screen)
    setup = _setup(recipe, mesh)
    with source.train(setup.batch_sharding) as batches, contextlib.ExitStack() as stack:
        if recipe.pgle:
            stack.enter_context(pgle_enabled(folder.local.parent if folder.url is None else remote.cache_folder()))
        with screen.progress("tracing and lowering the training step"):
            program = StepProgram(recipe, setup, batches)
        if pod is not None:  # before a device waits for another one
            data = {**source.describe(), "order": batches.get_state(), "fingerprint": source.fingerprint}
            run_info = {"data": data, "sharding": setup.table.to_json(), "program": str(program)}
            with watchdog.busy(watchdog.WAITS):
                pod.agree("run", run_info, fix="use the same data, recipe file and imported modules on every host")
        texts = stack.enter_context(_prepared(folder, program, fresh=fresh, accept=accept_changes, screen=screen))
        screen.fields("meshpar train", _run_description(recipe, setup, source, folder))
        with Checkpoints(folder.checkpoints, keep=recipe.keep_checkpoints) as checkpoints:
            with screen.progress("restoring or initializing the state"), _cleaned_up(folder, checkpoints):
                if from_hf is not None and jax.process_index() == 0 and not checkpoints.steps():
                    keep_source_files(from_hf, folder.local)  # records the initial weights, for the check on resume
                init = Setup.init if from_hf is None else lambda setup, key: load_hf(from_hf, setup, key=key)
                state = restore_or_init(checkpoints, setup, key=recipe.seed, batches=batches, init=init)
                folder.upload()  # from here on, checkpoints depend on these files
            first_step = int(state.step)
            screen.print(_start_line(first_step, recipe.steps, folder))
            screen.print(str(program))
            goodput = Goodput(folder / "goodput.json", metrics=folder / "metrics.jsonl", began_s=start_time_s)
            save_files = functools.partial(_restore_files, folder, texts, from_hf)
            hooks = _hooks(recipe, setup, source, folder, checkpoints, screen, goodput, save_files)
            if profile is not None:
                about = {"program": str(program)}
                hooks.append(Profile(folder / "profile", first=profile[0], last=profile[1], about=about))
            result = fit(program.step, state, batches, hooks=hooks, **_fit_options(recipe, batches, setup))
            del state
    steps_taken = result.step - first_step
    return _report(recipe, result, source, folder, screen, steps_taken=steps_taken, goodput=goodput)


def _setup(recipe: Recipe, mesh: jax.sharding.Mesh) -> Setup:
    """Derive the shardings of the state, and check that the state of all host devices fits in this host's memory."""
    model = build_model(recipe)
    tx = build_optimizer(recipe, model, mesh)
    setup = make_setup(model, tx, mesh=mesh, strategy=recipe.strategy, precision=recipe.step.precision)
    local_devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if local_devices and local_devices[0].platform == "cpu":
        totals = setup.table.totals
        needed = len(local_devices) * (totals.params_bytes + totals.grads_bytes + totals.optimizer_bytes)
        requested = f"train {totals.num_params:,} parameters on {len(local_devices)} host devices"
        check_memory("the training state", requested, needed, "make the model smaller, or shard it over more hosts")
    return setup


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
    step = dataclasses.replace(
        recipe.step, accumulate=1, reduce_gradients=None, remat=layout.remat, interleave=layout.interleave
    )
    planned = recipe.replace(mesh=layout.mesh, strategy=layout.strategy, step=step)
    return planned.override(f"step.accumulate={layout.accumulate}", *assignments)


def _hooks(
    recipe: Recipe,
    setup: Setup,
    source: Source,
    folder: RunFolder,
    checkpoints: Checkpoints,
    screen: Screen,
    goodput: Goodput,
    save_files: Callable[[], None],
) -> list[Hook]:
    # Ten measurements in a short run, one per 100 steps in a long run.
    expert_load = experts.ExpertLoad(every=min(max(recipe.steps // 10, 1), 100), stream=screen.stream)
    validation = eval_step(recipe.loss, precision=recipe.step.precision, xla=recipe.step.xla)
    learning_rate = None
    if isinstance(recipe.optimizer, AdamW):
        with warnings.catch_warnings(action="ignore"):  # the optimizer has warned about a long warm-up
            learning_rate = LearningRate(recipe.optimizer.learning_rate(recipe.steps))
    mixture = source if isinstance(source, MixedSource) else None
    batches = source.valid if mixture is None else mixture.valid_by_source
    weights = None if mixture is None else mixture.shares

    def more_metrics(record: Record) -> dict[str, Any]:
        progress = {} if mixture is None else mixture.progress(record.step)
        mixed = {f"data/{name}/{key}": values[key] for name, values in progress.items() for key in ("share", "epochs")}
        rate = {} if learning_rate is None else learning_rate.line(record)
        return {**rate, **expert_load.line(record), **goodput.line(record), **mixed, **watchdog.slow_processes()}

    return [
        *([] if learning_rate is None else [learning_rate]),
        expert_load,
        goodput,
        MetricsFile(folder / "metrics.jsonl", also=more_metrics),
        *writers(recipe.writers, folder.local, config=_json_finite(recipe.to_json()), also=more_metrics),
        ProgressBar(stream=screen.stream, also=expert_load.words),
        Validator(
            validation,
            batches(setup.batch_sharding),
            every=recipe.validate_every or recipe.steps,
            of=eval_params,
            weights=weights,
        ),
        Checkpointer(
            checkpoints,
            every=recipe.checkpoint_every or recipe.steps,
            retries=recipe.checkpoint_retries,
            before_save=save_files,
        ),
        Preemption(),
    ]


class StepProgram:
    """The lowered training step of a run.

    `str` returns the fingerprint followed by the compile options, as in `meshpar explain`.
    """

    def __init__(self, recipe: Recipe, setup: Setup, batches: Batches) -> None:
        self.recipe, self.setup, self.batches, self.step = recipe, setup, batches, build_step(recipe)
        options = self.step.compile_options(setup)
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in options.items())
        digest = fingerprint(self.step.lower(setup.abstract, batches.spec), options)
        self._text = f"program {digest}" + f" with {words}" * bool(words)

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


def _start_line(step: int, steps: int, folder: RunFolder) -> str:
    if step >= steps:
        return f"step {step} of {steps} is done: nothing left to train"
    reached = max((line["step"] for line in read_lines(folder / "metrics.jsonl")), default=0)
    if step:
        repeated = f" (an earlier run reached step {reached}, whose checkpoint is missing or was not written)"
        return f"resuming at step {step} of {steps}" + repeated * (reached > step)
    return f"training {steps} steps" + f" (an earlier run reached step {reached} but has no checkpoint)" * bool(reached)


# ---- Before the run --------------------------------------------------------------------------------------------------


def _with_vocab(recipe: Recipe, source: Source, fit_vocab: bool, from_hf: str | Path | None) -> Recipe:
    """Return the recipe with a vocabulary that contains every token of the data."""
    data_size, config = getattr(source, "vocab_size", None), recipe.model
    model_size = getattr(config, "vocab_size", None)
    if data_size is None or model_size is None:
        return recipe
    padded = -(-data_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
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


@contextlib.contextmanager
def _prepared(
    folder: RunFolder, program: StepProgram, *, fresh: bool, accept: bool, screen: Screen
) -> Iterator[dict[str, str]]:
    """Lock the run folder, check that it belongs to this run, and write `_RUN_FILES`. Yield their texts by name."""
    pod, is_first, table = this_pod(), jax.process_index() == 0, program.setup.table
    recipe = {**program.recipe.to_json(), "program": program.to_json()}
    texts = dict(zip(_RUN_FILES, (_json_text(recipe), _json_text(table.to_json()), f"{table}\n"), strict=True))
    with contextlib.ExitStack() as stack:
        existed = folder.local.exists()
        if pod is not None and folder.url is None:
            check_shared(pod, folder.local)
        if is_first and folder.url is None:  # `run_folder` has taken the lease of a folder in a bucket
            stack.enter_context(lock_run_folder(folder.local, warn=screen.print))
        if not fresh:
            _check_same_run(folder, program, accept=accept, screen=screen)
        elif folder.url is not None and (existed or Checkpoints(folder.checkpoints).steps()):
            reason, fix = "a bucket cannot rename the folder of the earlier run", "use --name, or remove the folder"
            raise problem("--fresh", f"start {folder} over", reason, fix, code="unsupported-feature")
        barrier("meshpar: folder checked")  # no process writes before all have read the folder
        if is_first:
            if fresh and existed:
                number = 1
                while (renamed := folder.local.with_name(f"{folder.local.name}.old{number}")).exists():
                    number += 1
                screen.print(f"renamed the folder of the earlier run to {folder.local.rename(renamed)}")
            folder.local.mkdir(mode=RUN_MODE, parents=True, exist_ok=True)
            for name, text in texts.items():
                replace_file(folder / name, text)
        barrier("meshpar: folder prepared")
        if (watch := watchdog.current()) is not None:
            watch.log = folder / f"process-{jax.process_index()}.log"
        yield texts


@contextlib.contextmanager
def _cleaned_up(folder: RunFolder, checkpoints: Checkpoints) -> Iterator[None]:
    """Remove `_RUN_FILES` if the block fails before the first checkpoint."""
    try:
        yield
    except BaseException:
        if jax.process_index() == 0 and not checkpoints.steps():
            for name in _RUN_FILES:
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / SOURCE_FOLDER, ignore_errors=True)
        raise


def _restore_files(folder: RunFolder, texts: Mapping[str, str], from_hf: str | Path | None) -> None:
    """Write the files of a running run again if they were removed, with a warning, and upload changed files."""
    if jax.process_index() == 0:
        missing = [name for name in texts if not (folder / name).exists()]
        for name in missing:
            folder.local.mkdir(mode=RUN_MODE, parents=True, exist_ok=True)
            replace_file(folder / name, texts[name])
        if from_hf is not None and not (folder / SOURCE_FOLDER).exists():
            keep_source_files(from_hf, folder.local)
            missing.append(SOURCE_FOLDER)
        if missing:
            text = f"{', '.join(missing)} were removed during the run and are written again"
            warnings.warn(f"{folder}: {text}", stacklevel=2)
    folder.upload()


def _with_schedule(recipe: Recipe, folder: RunFolder, screen: Screen) -> Recipe:
    """Return the recipe with the schedule of the run in this folder, unless the recipe sets its number of steps."""
    saved, optimizer = _saved_recipe(folder), recipe.optimizer
    if saved is None or not isinstance(optimizer, AdamW | Optax) or optimizer.schedule_steps is not None:
        return recipe
    saved_optimizer = saved.get("optimizer")
    kept = saved_optimizer.get("schedule_steps") if isinstance(saved_optimizer, dict) else None
    steps = saved.get("steps") if kept is None else kept
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


def _saved_recipe(folder: RunFolder) -> dict[str, Any] | None:
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


def _check_same_run(folder: RunFolder, program: StepProgram, *, accept: bool, screen: Screen) -> None:
    """Check that the run in this folder was started with the same recipe and the same program."""
    recipe, where, anew = program.recipe, f"run {folder}", _start_anew(folder)
    saved = _saved_recipe(folder)
    if saved is None:
        steps = [step for step in Checkpoints(folder.checkpoints).steps() if step]
        if steps and not accept:  # `meshpar convert from-hf` writes a checkpoint 0 without a recipe
            reason = f"recipe.json is missing, so the recipe of its {steps[-1]} steps is unknown"
            fix = f"restore the file from a copy, use --accept-changes to resume with this recipe, or {anew}"
            raise problem(where, "resume it", reason, fix, code="missing-file")
        return
    saved_program = saved.pop("program", None)
    changed = changes(saved, _json_finite(recipe.to_json()), _json_finite(defaults_of(recipe)))
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
        current = StepProgram(recipe, _setup(recipe, mesh), program.batches).to_json()
    if saved["fingerprint"] == current["fingerprint"]:
        return
    difference = f"the run was trained with {saved['fingerprint']}, and the recipe now gives {current['fingerprint']}"
    if accept:
        screen.print(f"the code changed since the run started: {difference}")
        return
    reason = f"the code of the loss, the model, the optimizer or a library has changed: {difference}"
    fix = "restore the old code, use --accept-changes to resume with the new code, or --name to start a new run"
    raise problem(f"run {folder}", "resume it", reason, fix, code="conflict")


def _format_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} was {old!r} and is {new!r}" for name, (old, new) in changed.items())


def _json_text(document: Any) -> str:
    return json.dumps(_json_finite(document), indent=2, ensure_ascii=False) + "\n"


def _json_finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, with strings."""
    if isinstance(value, Mapping):
        return {key: _json_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _run_description(recipe: Recipe, setup: Setup, source: Source, folder: RunFolder) -> dict[str, str]:
    totals = setup.table.totals
    per_device = {"params": totals.params_bytes, "grads": totals.grads_bytes, "optimizer": totals.optimizer_bytes}
    has_urls = any(f'"{scheme}://' in json.dumps(recipe.to_json()["data"]) for scheme in remote.SCHEMES)
    accumulation = f" in {recipe.step.accumulate} microbatches" if recipe.step.accumulate > 1 else ""
    return {
        "run": str(folder),
        "devices": f"{setup.mesh.size} × {setup.mesh.devices.flat[0].device_kind}",
        "mesh": human_mesh(setup.table.mesh),
        "strategy": setup.strategy.label,
        "parameters": setup.table.parameters_text.replace(" parameters", ""),
        "per device": ", ".join(f"{name} {human_bytes(size)}" for name, size in per_device.items()),
        "data": _data_line(source.describe()),
        **({"copies of files": str(remote.cache_folder())} if has_urls else {}),
        "batch": f"{recipe.batch_size} examples{accumulation}",
    }


def _data_line(description: Mapping[str, Any]) -> str:
    """Format the result of `Source.describe` as a line: sizes and warnings of the data."""
    items = []
    for split, purpose in (("train", "training"), ("valid", "validation")):
        counts = description.get(split, {})
        unit = next((unit for unit in ("tokens", "examples") if unit in counts), None)
        items += [f"{counts[unit]:,} {unit} for {purpose}"] if unit else []
    items += [f"{source['weight']:.1%} from {name}" for name, source in description.get("sources", {}).items()]
    parts = [description, *description.get("sources", {}).values()]
    joined = [part["train"] for part in parts if part.get("separate_documents") is False]
    if any(counts["documents"] >= counts["windows"] for counts in joined):
        items.append("the documents in a row attend to each other (data.separate_documents=false)")
    if count := description.get("in_parts"):
        items.append(f"{count:,} conversations in parts, because their template changes earlier turns")
    if count := description.get("unended_answers"):
        items.append(f"{count:,} answers end without a special token (data.stop_tokens)")
    if unused := description.get("unused_fields"):
        counts = ", ".join(f"{name} ({count:,} records)" for name, count in unused.items())
        items.append(f"nothing reads the fields {counts}")
    return ", ".join(items)


def _fit_options(recipe: Recipe, batches: Batches, setup: Setup) -> dict[str, Any]:
    """Return keyword arguments for `fit`. Tokens per step, FLOPs per step and peak FLOP/s are None if unknown."""
    inputs, precision = batches.spec.get("inputs"), recipe.step.precision
    tokens = flops = None
    if inputs is not None and len(inputs.shape) == 2 and np.issubdtype(inputs.dtype, np.integer):
        tokens, flops_per_token = math.prod(inputs.shape), getattr(recipe.model, "flops_per_token", None)
        flops = None if flops_per_token is None else tokens * flops_per_token(inputs.shape[1])
    dtype = precision.compute or precision.params or "float32"
    peak = peak_flops_per_s(setup.mesh.devices.flat[0].device_kind, dtype)
    return {
        "steps": recipe.steps,
        "max_skipped": recipe.max_skipped,
        "tokens_per_step": tokens,
        "flops_per_step": flops,
        "peak_flops_per_s": None if peak is None else peak * setup.mesh.size,
    }


# ---- The report ------------------------------------------------------------------------------------------------------


def _report(
    recipe: Recipe,
    result: FitResult,
    source: Source,
    folder: RunFolder,
    screen: Screen,
    *,
    steps_taken: int,
    goodput: Goodput,
) -> RunOutcome:
    done = result.reason == "done"
    curves = list(read_lines(folder / "metrics.jsonl"))
    validations = (
        {name[4:]: value for name, value in line.items() if name.startswith("val_")}
        for line in curves[::-1]
        # If the last validation has no line, an earlier one does not describe the trained model.
        if not done or line.get("step") == result.step
    )
    valid = next(filter(None, validations), {})
    layers = next((line[experts.LAYERS] for line in reversed(curves) if experts.LAYERS in line), None)
    loads = None if layers is None else experts.loads_of(layers)
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
    missing = {"missing_steps": missing_steps(curves, result.step), "missing_validations": missing_validations(curves)}
    summary |= {name: ranges for name, ranges in missing.items() if ranges}
    if isinstance(source, MixedSource):
        summary["sources"] = source.progress(result.step)
    if loads is not None:
        summary["experts"] = experts.worst_layer(loads)
    if unused := source.describe().get("unused_fields"):
        summary["unused_fields"] = unused
    if done:
        summary |= _compare_with_bigrams(source, valid)
        if recipe.sample is not None:
            summary["sample"] = sample_text(recipe, result.state, source)
    outcome = RunOutcome(folder=folder.path, reason=result.reason, summary=summary)
    if jax.process_index() != 0:
        return outcome
    if done:
        _plot(folder, recipe, curves, summary, loads)
    replace_file(folder / "summary.json", _json_text(summary))
    if not done:
        screen.print(
            f"{result.reason} at step {result.step} of {recipe.steps}. The checkpoint is in {folder.checkpoints}. "
            "Repeat the command to resume."
        )
        return outcome
    if "sample" in summary:
        screen.text("sample", summary["sample"])
    screen.fields("result", _result(summary, folder))
    if lost := describe_missing(curves, result.step):
        where = f"run {folder}: metrics.jsonl"
        fix = "restore the file from a copy and repeat the command; the checkpoints are complete"
        requested, reason = "report the metrics of all steps", f"the metrics of {lost} are missing"
        raise problem(where, requested, reason, fix, code="damaged-file")
    return outcome


def _compare_with_bigrams(source: Source, valid: Mapping[str, float]) -> dict[str, Any]:
    """Return bits per byte of the model and of bigram models on the same held-out tokens; empty without text data."""
    if not hasattr(source, "baseline") or not valid.get("loss"):  # a loss of 0 has no ratio to bits per byte
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


def continued(
    state: TrainState, config: Any, batch: Any, *, num_tokens: int, seed: int, model: Any = None, **how: Any
) -> list[list[int]]:
    """Sample continuations of prompts that have the same length. Return token ids, [prompt, position].

    `model` is by default the model of the state, and `how` are further arguments of `meshpar.models.sampling.generate`.
    """
    from meshpar.models.sampling import generate

    setup = state.setup

    def run(params: Any, extra: Any, prompt: jax.Array, key: jax.Array) -> jax.Array:
        with use_rules(setup.mesh, setup.strategy):
            bound = (model or setup.model).bind(params, extra)
            return generate(bound, prompt, config=config, num_tokens=num_tokens, key=key, **how)

    tokens = jax.jit(run)(state.params, state.extra, np.asarray(batch, np.int32), jax.random.key(seed))
    return np.asarray(tokens).tolist()


def sample_text(recipe: Recipe, state: TrainState, source: Any) -> str:
    """Continue the prompt of the recipe on the training mesh, with the parameters of `mp.eval_params`."""
    assert recipe.sample is not None
    state = eval_params(state)
    model = state.setup.model if recipe.lora is None else build_model(recipe.replace(lora=None))
    state = state.replace(params=cast_floating(merged_params(state), recipe.step.precision.compute))
    prompt, num_tokens, temperature = dataclasses.astuple(recipe.sample)
    batch, options = [source.encode(prompt)], {"num_tokens": num_tokens, "temperature": temperature}
    (tokens,) = continued(state, recipe.model, batch, model=model, seed=recipe.seed, **options)
    return source.decode(np.asarray(tokens))


def _plot(
    folder: RunFolder,
    recipe: Recipe,
    curves: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    loads: Loads | None,
) -> None:
    from meshpar import plots

    has_bits = "bits_per_byte" in summary
    scale = summary["bits_per_byte"] / summary["validation"]["loss"] if has_bits else 1.0
    figures = {
        "loss.png": plots.loss_curve(
            train=[(line["step"], line["loss"] * scale) for line in curves if line.get("loss") is not None],
            valid=[(line["step"], line["val_loss"] * scale) for line in curves if line.get("val_loss") is not None],
            baselines={"bigram model": summary["bigram_bits_per_byte"]} if has_bits else {},
            title=recipe.name,
            unit="bits per byte" if has_bits else "loss",
        )
    }
    if loads is not None:
        title = f"{recipe.name}: load of experts, last steps"
        num_ranks = loads.ranks.tokens.shape[-1]
        figures["experts.png"] = plots.expert_load(loads.experts.tokens, num_ranks=num_ranks, title=title)
    for name, figure in figures.items():
        png = io.BytesIO()
        figure.savefig(png, format="png")
        replace_file(folder / name, png.getvalue())


def _result(summary: Mapping[str, Any], folder: RunFolder) -> dict[str, str]:
    fields = {f"held-out {name}": f"{value:.4f}" for name, value in summary["validation"].items() if value is not None}
    if "bits_per_byte" in summary:
        fields["bits per byte"] = f"{summary['bits_per_byte']:.3f} on {summary['held_out_tokens']:,} held-out tokens"
        fields["bigram model"] = (
            f"{summary['bigram_bits_per_byte']:.3f} on the same tokens (lower bound of bigram models: "
            f"{summary['bigram_bound_bits_per_byte']:.3f})"
        )
        below = summary["below_bigram_bits_per_byte"]
        fields["margin"] = f"{abs(below):.3f} bits per byte {'below' if below > 0 else 'ABOVE'} the bigram model"
    if "experts" in summary:
        worst = summary["experts"]
        fields["experts, worst layer"] = (
            f"largest load of an expert {worst['expert_max_over_mean']:.2f} times the mean, of a rank "
            f"{worst['rank_max_over_mean']:.2f}; {worst['drop_rate']:.2%} of assignments dropped "
            f"({folder}/experts.png)"
        )
    if summary["tokens_per_s"] is not None:
        fields["speed"] = f"{summary['tokens_per_s']:,.0f} tokens/s"
    if summary["mfu"] is not None:
        fields["model FLOP utilisation"] = f"{summary['mfu']:.1%}"
    if summary["skipped"]:
        fields["skipped updates"] = f"{summary['skipped']} (not finite)"
    if summary["steps_taken"]:
        fields["time"] = f"{summary['seconds']:.0f} s for {summary['steps_taken']} steps"
        fields["goodput"] = goodput_words(summary["wall_s"])
    return {**fields, "loss curve": f"{folder}/loss.png"}


class Screen:
    """Progress and report of process 0: panels in a terminal, plain lines elsewhere."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream, self._is_first = stream, jax.process_index() == 0
        self._console: Any = None
        if self._is_first and stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console

            self._console = Console(file=stream, highlight=False)

    def print(self, text: str) -> None:
        if self._is_first:
            print(text, file=self.stream, flush=True)

    def progress(self, activity: str) -> contextlib.AbstractContextManager[Any]:
        """Show a spinner during the block, if the stream is a terminal."""
        return contextlib.nullcontext() if self._console is None else self._console.status(activity)

    def fields(self, title: str, fields: Mapping[str, str]) -> None:
        """Show names and values, one pair per line."""
        if self._console is None:
            self.print("\n".join(f"{name}: {value}" for name, value in fields.items()))
            return
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        for name, value in fields.items():
            grid.add_row(Text(name, style="dim"), Text(value))
        self._panel(title, grid)

    def text(self, title: str, text: str) -> None:
        """Show generated text, with control characters replaced."""
        printable = "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else "�" for c in text)
        if self._console is None:
            self.print("\n".join([f"{title}:", *(f"  | {line}" for line in printable.splitlines())]))
        else:
            from rich.text import Text

            self._panel(title, Text(printable))

    def _panel(self, title: str, content: Any) -> None:
        from rich.panel import Panel

        self._console.print(Panel(content, title=title, title_align="left", border_style="cyan", expand=False))
