"""A training run: prepare its folder, resume from the newest checkpoint, fit and report.

runs/<name>/  recipe.json · sharding.txt · sharding.json · metrics.jsonl · checkpoints/ · loss.png · summary.json
              goodput.json · optional: experts.png, tensorboard/, wandb/, profile/
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

import jax
import numpy as np

from meshpar.data.batches import Batches, ValidBatches
from meshpar.data.mixture import MixedSource
from meshpar.hardware.clusters import peak_flops_per_s
from meshpar.hardware.compile_options import NO_GRAPHS
from meshpar.hardware.compile_target import GPUS
from meshpar.interop.hf import check_weights, load_hf
from meshpar.loop.checkpoint import Checkpoints
from meshpar.loop.checkpoint_index import barrier
from meshpar.loop.expert_load import ExpertLoad
from meshpar.loop.fit import (
    Checkpointer,
    FitResult,
    Hook,
    Preemption,
    Record,
    Step,
    Validator,
    fit,
    restore_or_init,
)
from meshpar.loop.goodput import Goodput
from meshpar.loop.learning_rate import LearningRate
from meshpar.loop.metric_writers import check_writers, writers
from meshpar.loop.metrics_file import MetricsFile, read_lines
from meshpar.loop.profiler import Profile, parse_steps
from meshpar.loop.progress_bar import ProgressBar
from meshpar.pod import watchdog
from meshpar.pod.coordination import check_shared, this_pod
from meshpar.runs.background_compilation import BackgroundCompilation
from meshpar.runs.compile_cache import cache_location, keeping_programs
from meshpar.runs.folder import RunFolder, run_folder
from meshpar.runs.lock import lock_run_folder
from meshpar.runs.optimizers import AdamW
from meshpar.runs.plain import json_finite, json_text
from meshpar.runs.recipe import Recipe, build_setup, open_data
from meshpar.runs.recipe_file import load_recipe
from meshpar.runs.recipe_sources import check_ids, with_hf, with_vocab
from meshpar.runs.report import data_line, import_plots, report
from meshpar.runs.resuming import StepProgram, check_same_run, with_schedule
from meshpar.runs.sample import SampleProgram
from meshpar.runs.saved_run import RUN_MODE, SOURCE_FOLDER, check_source, keep_source_files
from meshpar.runs.screen import Screen
from meshpar.runs.start_timings import Phases, StartTimings
from meshpar.runs.tuned import Tuned
from meshpar.sharding import remote
from meshpar.sharding.errors import check_bool, check_cases, problem
from meshpar.sharding.host_resources import is_url, replace_file
from meshpar.sharding.printing import human_mesh
from meshpar.sharding.units import human_bytes
from meshpar.training.eval_params import eval_params
from meshpar.training.pgle import check_pgle, pgle_enabled
from meshpar.training.state import Setup, TrainState
from meshpar.training.step import TrainStep, eval_step

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_RUN_FILES = ("recipe.json", "sharding.json", "sharding.txt")
"""Files that describe a run, written before its first step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """Result of a run."""

    folder: Any
    """The run folder, a `Path`. In a bucket, an `epath.Path`."""
    reason: str
    """"done", or "interrupted" if the same call resumes the run."""
    summary: dict[str, Any]
    """Contents of summary.json."""
    state: TrainState = dataclasses.field(repr=False)
    """The last training state."""


def run(
    recipe: Recipe | str | Path,
    *,
    out: str | Path = "runs",
    hooks: Sequence[Hook] = (),
    devices: Sequence[jax.Device] | None = None,
    fresh: bool = False,
    fit_vocab: bool = False,
    from_hf: str | Path | None = None,
    profile: tuple[int, int] | None = None,
    accept_changes: bool = False,
    compile_cache: str | Path | None = None,
    tuned: str | Path | None = None,
    timings: bool | Phases = False,
    stream: IO[str] | None = None,
) -> RunOutcome:
    """Train a recipe, or resume its run, as `meshpar train` does, and report the result.

    Call it in the main thread. Ctrl-C saves a checkpoint, and the outcome has the reason "interrupted".

    Args:
      recipe: the run to train: a recipe, a recipe file, or the name of an installed recipe.
      out: folder of all runs, or its gs:// or s3:// URL. The run writes to `out/<name>/`.
      hooks: additional hooks; see `mp.hooks`. A run has hooks for metrics, validation and checkpoints.
      devices: devices of the mesh; by default all.
      fresh: start from step 0, and rename the folder of an earlier run.
      fit_vocab: set `vocab_size` of the model, if it has this field, to the size of the data's tokenizer.
      from_hf: Hugging Face folder of the model and its initial weights. The recipe keeps the fields in
        `meshpar.runs.recipe_sources.KEPT`.
      profile: first and last step of a trace that is written to `profile/` in the run folder.
      accept_changes: resume a run whose program has changed or whose recipe.json is missing.
      compile_cache: folder or URL for compiled programs, which later starts load, or "none". By default programs for
        CPUs are not kept, and others are kept in `~/.cache/meshpar/programs`, with several processes in
        `out/jax_cache`; the folder in `jax_compilation_cache_dir` has precedence.
      tuned: file of `meshpar tune --save`, whose options the run uses. It is refused for a different program, for
        different devices, and for different versions of jax and meshpar.
      timings: print the time of each phase until the end of the first step. `Phases` has the phases before the call.
      stream: receives progress and report; by default standard output.

    Raises:
      ValueError: if the recipe does not fit its devices or data, or differs from the recipe of the run to resume.

    Example:
      >>> outcome = mp.run(recipe.override("steps=100"), out="runs")  # doctest: +SKIP
      >>> outcome.summary["validation"]["loss"]  # doctest: +SKIP
    """
    flags = {"fresh": fresh, "fit_vocab": fit_vocab, "accept_changes": accept_changes}
    flags |= {} if isinstance(timings, Phases) else {"timings": timings}
    _check_arguments(recipe, hooks, profile, compile_cache, stream, **flags)
    phases = timings if isinstance(timings, Phases) else Phases()
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, devices=None if devices is None else len(devices))
        phases.end("recipe")
    check_writers(recipe.writers)
    screen = Screen(stream or sys.stdout)
    if is_url(out):
        remote.check_url(remote.join(out), f"run {out}/{recipe.name}")
    path = remote.join(out, recipe.name) if is_url(out) else Path(out) / recipe.name
    with run_folder(path, write=True, warn=screen.print) as folder:
        course = TrainingRun(
            recipe, folder, screen,
            fresh=fresh, from_hf=from_hf, accept_changes=accept_changes, compile_cache=compile_cache, tuned=tuned,
            phases=phases,
        )  # fmt: skip
        with course.prepare(devices, fit_vocab=fit_vocab, profile=profile):
            timed = [StartTimings(phases, screen, course.compilation)] if timings else []
            result = course.fit(course.resume(), [*timed, *hooks])
        summary = course.report(result)
    return RunOutcome(folder=folder.path, reason=result.reason, summary=summary, state=result.state)


def _check_arguments(recipe: Any, hooks: Any, profile: Any, compile_cache: Any, stream: Any, **flags: Any) -> None:
    check_cases(
        "mp.run", "start the run", "wrong-type",
        (not isinstance(recipe, Recipe | str | os.PathLike), f"the recipe is {recipe!r:.100}",
         "pass an mp.Recipe, as from recipe(), a recipe file, or the name of an installed recipe"),
        (not isinstance(hooks, Sequence), f"hooks is a {type(hooks).__name__}", "pass a list: hooks=[...]"),
        (profile is not None and not isinstance(profile, tuple | list), f"profile is {profile!r:.100}",
         "pass the first and the last step: profile=(10, 15)"),
        (not isinstance(compile_cache or "", str | os.PathLike), f"compile_cache is {compile_cache!r:.100}",
         "pass a folder, a URL, or 'none'"),
        (not hasattr(stream or sys.stdout, "isatty"), f"the output is {stream or sys.stdout!r:.100}",
         "redirect standard output to a file, or pass a text stream: stream=io.StringIO()"),
        (threading.current_thread() is not threading.main_thread(), "Python handles Ctrl-C in the main thread only",
         "call it in the main thread, or use mp.fit without the hook Preemption"),
    )  # fmt: skip
    for hook in hooks:
        if not isinstance(hook, Hook):
            reason, fix = f"{type(hook).__name__} is not a subclass", "pass instances of mp.hooks.Hook"
            raise problem("mp.run(hooks=...)", "call its methods", reason, fix, code="wrong-type")
    if profile is not None:
        parse_steps(":".join(map(str, profile)))
    for name, value in flags.items():
        check_bool("mp.run", f"the run uses the option {name}", **{name: value})


class TrainingRun:
    """The course of a run: `prepare`, `resume`, `fit` and `report`, in this order.

    Attributes:
      recipe: the recipe. `prepare` adds the values that depend on the data and on an earlier run.
      folder: the run folder.
      setup, source, program, checkpoints: set by `prepare`.
      compilation: compilation of the step in a thread, set by `prepare`; None if the first step compiles it.
    """

    setup: Setup
    program: StepProgram
    checkpoints: Checkpoints
    compilation: BackgroundCompilation | None

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        screen: Screen,
        *,
        fresh: bool = False,
        from_hf: str | Path | None = None,
        accept_changes: bool = False,
        compile_cache: str | Path | None = None,
        tuned: str | Path | None = None,
        phases: Phases | None = None,
    ) -> None:
        """Check the initial weights, before anything is written: a run that has started must have started from them."""
        self.recipe = recipe if from_hf is None else with_hf(recipe, from_hf)
        self.folder, self.screen = folder, screen
        self._fresh, self._from_hf, self._accept_changes = fresh, from_hf, accept_changes
        self._compile_cache = compile_cache
        self._tuned = None if tuned is None else Tuned.load(tuned)
        self._phases, self._start_time_s = phases or Phases(), time.time()
        if from_hf is not None:
            if fresh or not Checkpoints(folder.checkpoints).steps():
                check_weights(from_hf)
            else:
                check_source(from_hf, folder.local)

    @contextlib.contextmanager
    def prepare(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        fit_vocab: bool = False,
        profile: tuple[int, int] | None = None,
    ) -> Iterator[None]:
        """Open the data, derive the shardings, lower the step, and lock and write the run folder during the block."""
        pod = this_pod()
        if pod is not None:
            pod.agree("recipe", self.recipe.to_json(), fix="start all processes with the same command and recipe file")
        mesh, self._profile = self.recipe.mesh.build(devices), profile
        self._platform, option = mesh.devices.flat[0].platform, self._compile_cache
        programs = cache_location(option, platform=self._platform, folder=self.folder, warn=self.screen.print)
        if self.recipe.pgle:
            check_pgle(mesh, profile, keeps_programs=programs is not None)
        self._phases.end("mesh")
        with self.screen.progress("reading the data"), watchdog.busy(watchdog.READS):
            self.source = open_data(self.recipe)
        recipe = with_vocab(self.recipe, self.source, fit_vocab, self._from_hf)
        check_ids(recipe, self.source)
        _check_sample(recipe, self.source)
        self._phases.end("data")
        recipe = recipe if self._tuned is None else self._tuned.apply(recipe, mesh)
        self.recipe = recipe = recipe if self._fresh else with_schedule(recipe, self.folder, self.screen)
        self.setup = setup = build_setup(recipe, mesh)
        self._phases.end("shardings")
        with contextlib.ExitStack() as stack:
            stack.enter_context(keeping_programs(programs, is_profiled=profile is not None))
            self._init_compilation = self._compile_init()
            self.batches = stack.enter_context(self.source.train(setup.batch_sharding))
            self._phases.end("data")
            if recipe.pgle:
                stack.enter_context(pgle_enabled())
            with self.screen.progress("tracing and lowering the training step"):
                self.program = StepProgram(recipe, setup, self.batches, phases=self._phases)
            if pod is not None:  # before a device waits for the other devices
                order, fingerprint = self.batches.get_state(), self.source.fingerprint
                data = {**self.source.describe(), "order": order, "fingerprint": fingerprint}
                run_info = {"data": data, "sharding": setup.table.to_json(), "program": str(self.program)}
                with watchdog.busy(watchdog.WAITS):
                    pod.agree("run", run_info, fix="use the same data, recipe file and imported modules on all hosts")
            stack.enter_context(self._locked_folder())
            kept = {} if programs is None else {"compiled programs": programs}
            tuned = {} if self._tuned is None else {"tuned": str(self._tuned)}
            self.screen.fields("meshpar train", self._description() | kept | tuned)
            checkpoints = Checkpoints(self.folder.checkpoints, keep=recipe.keep_checkpoints)
            self.checkpoints = stack.enter_context(checkpoints)
            self.compilation = self._compile_step()
            self._phases.end("run folder")
            yield

    def resume(self) -> TrainState:
        """Restore the newest checkpoint, or create the initial state."""
        with self.screen.progress("restoring or initializing the state"), self._removed_on_error():
            if self._from_hf is not None and jax.process_index() == 0 and not self.checkpoints.steps():
                keep_source_files(self._from_hf, self.folder.local)  # records the weights, for the check on resume
            source = self._from_hf

            def init(setup: Setup, key: int) -> TrainState:
                if self._init_compilation is not None:
                    self._init_compilation.wait()
                return setup.init(key) if source is None else load_hf(source, setup, key=key)

            # On accelerators, XLA measures kernels while it compiles, so nothing else may run there.
            if self.compilation is not None and self._platform != "cpu":
                self.compilation.wait()
            state = restore_or_init(self.checkpoints, self.setup, key=self.recipe.seed, batches=self.batches, init=init)
            self.folder.upload()  # from here on, checkpoints depend on these files
        self._first_step = int(state.step)
        self._phases.end("init" if self._first_step == 0 else "restore")
        self.screen.print(_start_line(self._first_step, self.recipe.steps, self.folder))
        self.screen.print(str(self.program))
        for operation, choice in self.program.kernels.items():
            self.screen.print(f"{operation}: {choice}")
        return state

    def fit(self, state: TrainState, hooks: Sequence[Hook] = ()) -> FitResult:
        """Train until the last step or until the process is interrupted."""
        self.goodput = Goodput(
            self.folder / "goodput.json", metrics=self.folder / "metrics.jsonl", began_s=self._start_time_s
        )
        hooks = [*self._hooks(), *([] if self.compilation is None else [self.compilation]), *hooks]
        self._sample = self._sampler()
        if self.compilation is not None and jax.process_index() == 0:
            self.compilation.during_wait(import_plots)
        step: Step = self.program.step
        if self._profile is not None:
            first, last = self._profile
            about = {"program": str(self.program)}
            profile = Profile(self.folder / "profile", first=first, last=last, about=about)
            step = profile.step(step, profiled_step(self.program.step, self._platform))
            hooks.append(profile)
        options = _fit_options(self.recipe, self.batches, self.setup)
        return fit(step, state, self.batches, hooks=hooks, **options)

    def report(self, result: FitResult) -> dict[str, Any]:
        """Write summary.json and the plots, print the result, and return the summary."""
        steps_taken = result.step - self._first_step
        return report(
            self.recipe, result, self.source, self.folder, self.screen,
            steps_taken=steps_taken, goodput=self.goodput, sample=self._sample,
        )  # fmt: skip

    def _compile_init(self) -> BackgroundCompilation | None:
        """Start to compile the initialization while the step is traced, or return None if it is not needed."""
        is_restored = not self._fresh and Checkpoints(self.folder.checkpoints).steps()
        if is_restored or self._from_hf is not None or not self._compiles_in_threads:
            return None
        return BackgroundCompilation(self.setup.lower_init())

    def _compile_step(self) -> BackgroundCompilation | None:
        """Start to compile the training step, or return None if the first step compiles it, or if no step is left."""
        is_done = max(self.checkpoints.steps(), default=0) >= self.recipe.steps
        return None if is_done or not self._compiles_in_threads else BackgroundCompilation(self.program.lowered)

    def _compiled_early(
        self, lower: Callable[[], jax.stages.Lowered], call: Callable[_Args, _Result]
    ) -> Callable[_Args, _Result]:
        """Return `call`. On CPU devices, its program is compiled in a thread during the first steps.

        On accelerators, XLA measures kernels while it compiles, so the program is compiled when it is called.
        """
        if self.compilation is None or self._platform != "cpu":
            return call
        return self.compilation.then(lower, call)

    def _sampler(self) -> Callable[[TrainState], str] | None:
        if self.recipe.sample is None:
            return None
        program = SampleProgram(self.recipe, self.setup, self.source)
        return program.text if self.recipe.lora is not None else self._compiled_early(program.lower, program.text)

    @property
    def _compiles_in_threads(self) -> bool:
        """False for processes of a pod: they share XLA's measurements of kernels, and compile in the same order."""
        return jax.process_count() == 1 and not self.recipe.pgle

    def _hooks(self) -> list[Hook]:
        recipe, folder, source, screen, goodput = self.recipe, self.folder, self.source, self.screen, self.goodput
        # Ten measurements in a short run, a measurement per 100 steps in a long run.
        expert_load = ExpertLoad(every=min(max(recipe.steps // 10, 1), 100), stream=screen.stream)
        learning_rate = None
        if isinstance(recipe.optimizer, AdamW):
            with warnings.catch_warnings(action="ignore"):  # the optimizer has warned about a long warm-up
                learning_rate = LearningRate(recipe.optimizer.learning_rate(recipe.steps))
        mixture = source if isinstance(source, MixedSource) else None
        sharding = self.setup.batch_sharding
        valid_batches: Any = source.valid(sharding) if mixture is None else mixture.valid_by_source(sharding)
        program = eval_step(recipe.loss, precision=recipe.step.precision, xla=recipe.step.xla)
        evaluate: Callable[[TrainState, Any], Any] = program
        valid = valid_batches if mixture is None else next(iter(valid_batches.values()))
        if isinstance(valid, ValidBatches):  # the shapes of other batches are unknown until they are read
            evaluate = self._compiled_early(lambda: program.lower(self.setup.abstract, valid.spec), program)

        def more_metrics(record: Record) -> dict[str, Any]:
            progress = {} if mixture is None else mixture.progress(record.step)
            mixed = {
                f"data/{name}/{key}": values[key] for name, values in progress.items() for key in ("share", "epochs")
            }
            rate = {} if learning_rate is None else learning_rate.line(record)
            return {**rate, **expert_load.line(record), **goodput.line(record), **mixed, **watchdog.slow_processes()}

        return [
            *([] if learning_rate is None else [learning_rate]),
            expert_load,
            goodput,
            MetricsFile(folder / "metrics.jsonl", also=more_metrics),
            *writers(recipe.writers, folder.local, config=json_finite(recipe.to_json()), also=more_metrics),
            ProgressBar(stream=screen.stream, also=expert_load.words),
            Validator(
                evaluate,
                valid_batches,
                every=recipe.validate_every or recipe.steps,
                of=eval_params,
                weights=None if mixture is None else mixture.shares,
            ),
            Checkpointer(
                self.checkpoints,
                every=recipe.checkpoint_every or recipe.steps,
                retries=recipe.checkpoint_retries,
                before_save=self._restore_files,
            ),
            Preemption(),
        ]

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[None]:
        """Lock the run folder, check that it belongs to this run, and write `_RUN_FILES`."""
        folder, screen, fresh, table = self.folder, self.screen, self._fresh, self.setup.table
        pod, is_first = this_pod(), jax.process_index() == 0
        recipe = {**self.recipe.to_json(), "program": self.program.to_json()}
        texts = (json_text(recipe), json_text(table.to_json()), f"{table}\n")
        self._texts = dict(zip(_RUN_FILES, texts, strict=True))
        with contextlib.ExitStack() as stack:
            existed = folder.local.exists()
            if pod is not None and folder.url is None:
                check_shared(pod, folder.local)
            if is_first and folder.url is None:  # `run_folder` has taken the lease of a folder in a bucket
                stack.enter_context(lock_run_folder(folder.local, warn=screen.print))
            if not fresh:
                check_same_run(folder, self.program, accept=self._accept_changes, screen=screen)
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
                for name, text in self._texts.items():
                    replace_file(folder / name, text)
            barrier("meshpar: folder prepared")
            if (watch := watchdog.current()) is not None:
                watch.log = folder / f"process-{jax.process_index()}.log"
            yield

    @contextlib.contextmanager
    def _removed_on_error(self) -> Iterator[None]:
        """Remove `_RUN_FILES` if the block fails before the first checkpoint."""
        try:
            yield
        except BaseException:
            if jax.process_index() == 0 and not self.checkpoints.steps():
                for name in _RUN_FILES:
                    (self.folder / name).unlink(missing_ok=True)
                shutil.rmtree(self.folder / SOURCE_FOLDER, ignore_errors=True)
            raise

    def _restore_files(self) -> None:
        """Write files of the run again if they were removed, with a warning, and upload changed files."""
        folder = self.folder
        if jax.process_index() == 0:
            missing = [name for name in self._texts if not (folder / name).exists()]
            for name in missing:
                folder.local.mkdir(mode=RUN_MODE, parents=True, exist_ok=True)
                replace_file(folder / name, self._texts[name])
            if self._from_hf is not None and not (folder / SOURCE_FOLDER).exists():
                keep_source_files(self._from_hf, folder.local)
                missing.append(SOURCE_FOLDER)
            if missing:
                text = f"{', '.join(missing)} were removed during the run and are written again"
                warnings.warn(f"{folder}: {text}", stacklevel=2)
        folder.upload()

    def _description(self) -> dict[str, str]:
        recipe, setup, totals = self.recipe, self.setup, self.setup.table.totals
        per_device = {"params": totals.params_bytes, "grads": totals.grads_bytes, "optimizer": totals.optimizer_bytes}
        has_urls = any(f'"{scheme}://' in json_text(recipe.to_json()["data"]) for scheme in remote.SCHEMES)
        accumulation = f" in {recipe.step.accumulate} microbatches" if recipe.step.accumulate > 1 else ""
        return {
            "run": str(self.folder),
            "devices": f"{setup.mesh.size} × {setup.mesh.devices.flat[0].device_kind}",
            "mesh": human_mesh(setup.table.mesh),
            "strategy": setup.strategy.label,
            "parameters": setup.table.parameters_text.replace(" parameters", ""),
            "per device": ", ".join(f"{name} {human_bytes(size)}" for name, size in per_device.items()),
            "data": data_line(self.source.describe()),
            **({"copies of files": str(remote.cache_folder())} if has_urls else {}),
            "batch": f"{recipe.batch_size} examples{accumulation}",
        }


def profiled_step(step: TrainStep, platform: str) -> TrainStep:
    """Return the step to run while it is profiled: on GPUs without CUDA graphs, see `meshpar.inspect.trace`."""
    return step.with_xla(NO_GRAPHS) if platform in GPUS else step


def _check_sample(recipe: Recipe, source: Any) -> None:
    if recipe.sample is not None and not (hasattr(recipe.model, "vocab_size") and hasattr(source, "decode")):
        names = f"the model is a {type(recipe.model).__name__} and the data is {type(recipe.data).__name__}"
        reason, fix = f"a sample needs a TransformerConfig and text data, but {names}", "--set sample=none"
        raise problem("Recipe.sample", "generate text after training", reason, fix, code="conflict")


def _start_line(step: int, steps: int, folder: RunFolder) -> str:
    if step >= steps:
        return f"step {step} of {steps} is done"
    reached = max((line["step"] for line in read_lines(folder / "metrics.jsonl")), default=0)
    if step:
        repeated = f" (an earlier run reached step {reached}, whose checkpoint is missing or was not written)"
        return f"resuming at step {step} of {steps}" + repeated * (reached > step)
    return f"training {steps} steps" + f" (an earlier run reached step {reached} but has no checkpoint)" * bool(reached)


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
