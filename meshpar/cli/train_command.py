"""Command `meshpar train`: start or resume the run of a recipe, also as a process of a pod."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from meshpar.cli.main import STARTED_S, devices_option, prepare_devices, print_json, recipe_options, select_devices
from meshpar.pod import signals
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.host_resources import out_of_memory
from meshpar.sharding.printing import human_mesh
from meshpar.sharding.units import human_bytes

if TYPE_CHECKING:
    from meshpar.runs.recipe import Recipe

COMPARED_LATER = (
    "recipe", "assignments", "steps", "name", "writers", "plan", "text", "tokenizer",
    "as_json", "timings",
)  # fmt: skip
"""Options of `train` that are not compared when processes join.

All set fields of the recipe, which is compared later, except `as_json` and `timings`, which may differ.
"""

COLLECTION_THRESHOLD = 50_000
"""Number of new objects at which Python collects garbage until the first step. Python's default is 700."""


@click.command()
@recipe_options
@devices_option
@click.option("--steps", metavar="N", type=click.IntRange(min=1), help="Same as --set steps=N.")
@click.option("--name", metavar="NAME", help="Same as --set name=NAME. The run writes to OUT/NAME/.")
@click.option(
    "--out", metavar="OUT", default="runs", show_default=True, help="Folder of all runs; may be a gs:// or s3:// URL."
)
@click.option("--fresh", is_flag=True, help="Start from step 0 and rename the folder of an earlier run.")
@click.option(
    "--accept-changes", is_flag=True,
    help="Resume a run although its code has changed or its recipe.json is missing.",
)  # fmt: skip
@click.option(
    "--compile-cache", metavar="DIR",
    help="Folder or URL for compiled programs, which later starts load, or none. Default: none on CPUs, otherwise "
    "~/.cache/meshpar/programs, and OUT/jax_cache with several processes.",
)  # fmt: skip
@click.option(
    "--text", metavar="PATH", multiple=True,
    help="Train on your text: files, globs or folders of .txt .py .md .jsonl .parquet. Repeatable.",
)  # fmt: skip
@click.option(
    "--tokenizer", metavar="JSON", help="A Hugging Face tokenizer.json. The vocabulary of the model is set to its size."
)
@click.option("--from-hf", metavar="DIR", help="Start from the model, weights and tokenizer of a Hugging Face folder.")
@click.option(
    "--plan", metavar="FILE",
    help="Use the mesh, strategy and step options of the first layout that `meshpar plan --save` wrote.",
)  # fmt: skip
@click.option(
    "--tuned", metavar="FILE",
    help="Use the options that `meshpar tune --save` found for the same program, devices and versions.",
)  # fmt: skip
@click.option(
    "--stall-limit", metavar="SECONDS", type=click.IntRange(5, 86_400), default=40, show_default=True,
    help="With several processes: seconds without progress before a process counts as lost.",
)  # fmt: skip
@click.option(
    "--join-limit", metavar="SECONDS", type=click.IntRange(5, 86_400),
    help="With several processes: seconds to wait until all have started. Default: 300, or 90 with --processes.",
)  # fmt: skip
@click.option(
    "--processes", metavar="N", type=click.IntRange(min=1),
    help="Start N processes on this machine, to test a multi-host run. The losses are equal bit for bit for any N. "
    "Default: the process joins the job of its launcher (Slurm, MPI, ...), if there is one.",
)  # fmt: skip
@click.option(
    "--restarts", metavar="K", type=click.IntRange(min=0), default=0, show_default=True,
    help="With --processes: after a process is lost, restart from the newest checkpoint, at most K times.",
)  # fmt: skip
@click.option(
    "--writer", "writers", metavar="NAME", multiple=True, type=click.Choice(["tensorboard", "wandb"]),
    help="Also write metrics to tensorboard or wandb. Same as --set writers=NAME,NAME. Repeatable.",
)  # fmt: skip
@click.option(
    "--profile", metavar="FIRST:LAST",
    help="Write an XProf trace of these steps, as in 10:15, to profile/ of the run. Read it with `meshpar trace`.",
)  # fmt: skip
@click.option(
    "--timings", is_flag=True, help="Print the time of each phase, from the imports to the end of the first step."
)
def train(
    *, devices: int | None, stall_limit: float, join_limit: int | None, processes: int | None, restarts: int,
    **settings: Any,
) -> None:  # fmt: skip
    """Train a recipe: `meshpar train recipes/gpt_stdlib.py`.

    Repeat the command to resume a run that has stopped.
    """
    thresholds = gc.get_threshold()
    # Imports and traces create many objects and little garbage: with Python's thresholds, 700 collections take a tenth
    # of the processor time until the step is lowered.
    gc.set_threshold(COLLECTION_THRESHOLD)
    from meshpar.pod.local_processes import PARENT, follow_parent, run

    for option, is_conflict, reason, fix in (
        (f"--restarts {restarts}", restarts and settings["fresh"], "--fresh would discard the run", "remove --fresh"),
        (f"--restarts {restarts}", restarts and processes is None, "--processes is not set", "add --processes N"),
    ):
        if is_conflict:
            raise problem(option, "restart after a process is lost", reason, fix, code="conflict")
    is_child = PARENT in os.environ
    if processes is not None and not is_child:
        prepare_devices(devices, start="nothing")
        args = click.get_current_context().find_root().obj
        sys.exit(run(args, processes=processes, restarts=restarts))
    follow_parent()
    devices = None if is_child else devices  # the parent has already divided the host devices
    prepare_devices(devices, start="jax")
    from meshpar.pod import callback_failures, launch, multihost

    launch.join(alone=is_child, timeout_s=join_limit or (launch.LOCAL_JOIN_S if is_child else launch.JOIN_S))
    command = {f"--{name.replace('_', '-')}": value for name, value in settings.items() if name not in COMPARED_LATER}
    command["--stall-limit"] = stall_limit
    callback_failures.end_on_callback_failures()
    with multihost.pod(stall_s=stall_limit, command=command):
        _train(device_count=devices, thresholds=thresholds, **settings)


def _train(
    *, recipe: str, assignments: tuple[str, ...], as_json: bool, plan: str | None, device_count: int | None,
    steps: int | None, name: str | None, out: str, fresh: bool, accept_changes: bool,
    compile_cache: str | None, tuned: str | None, text: tuple[str, ...],
    tokenizer: str | None, from_hf: str | None, writers: tuple[str, ...], profile: str | None,
    timings: bool, thresholds: tuple[int, int, int],
) -> None:  # fmt: skip
    from meshpar.runs.start_timings import Phases

    phases = Phases(STARTED_S)
    phases.end("imports")
    prepare_devices(device_count)
    devices = select_devices(device_count)
    phases.end("devices")
    import jax

    from meshpar.data import TextData
    from meshpar.loop.profiler import check_steps, parse_steps
    from meshpar.runs.recipe_file import load_recipe
    from meshpar.runs.recipe_sources import check_left_to_folder, with_plan
    from meshpar.runs.startup_collections import UsualCollections
    from meshpar.runs.training_run import run

    phases.end("imports")
    profiled_steps = None if profile is None else parse_steps(profile)
    config = load_recipe(recipe, devices=len(devices))
    shortcuts = {"steps": steps, "name": name, "writers": ",".join(writers) or None}
    fields = (*assignments, *(f"{field}={value}" for field, value in shortcuts.items() if value is not None))
    config = config.override(*fields) if plan is None else with_plan(config, plan, fields)
    if profiled_steps is not None:
        check_steps(*profiled_steps, done=0, steps=config.steps)  # also here, before anything is compiled
    if from_hf is not None:
        check_left_to_folder(from_hf, assignments, tokenizer)
    if text or tokenizer:
        data: Any = config.data
        if not isinstance(data, TextData):
            option, reason = "--text" if text else "--tokenizer", f"the data of the recipe is {type(data).__name__}"
            fix = "use a recipe whose data is TextData, such as recipes/gpt_stdlib.py"
            raise problem(option, "train on your text", reason, fix, code="conflict")
        replaced: Any = {"files": tuple(text), "sources": {}} if text else {}
        config = config.replace(data=dataclasses.replace(data, tokenizer=tokenizer or data.tokenizer, **replaced))
    phases.end("recipe")
    sets_vocab = any(assignment.startswith("model.vocab_size") for assignment in assignments)
    fits_vocab = tokenizer is not None and from_hf is None and not sets_vocab
    fit_command = functools.partial(
        _fit_command, recipe, assignments, config, devices, planned=plan is not None, from_hf=from_hf, tuned=tuned,
        fits_vocab=fits_vocab,
    )  # fmt: skip
    with explained_out_of_memory(fit_command, devices):
        outcome = run(
            config,
            out=out,
            devices=devices,
            fresh=fresh,
            stream=sys.stderr if as_json else sys.stdout,
            fit_vocab=fits_vocab,
            from_hf=from_hf,
            profile=profiled_steps,
            accept_changes=accept_changes,
            compile_cache=compile_cache,
            tuned=tuned,
            timings=timings and phases,
            hooks=[UsualCollections(thresholds)],
        )
    if as_json and jax.process_index() == 0:
        print_json({"folder": str(outcome.folder), **outcome.summary})
    if outcome.reason == "interrupted":
        sys.exit(signals.exit_code())


@contextlib.contextmanager
def explained_out_of_memory(fit_command: Callable[[], str], devices: Sequence[Any]) -> Iterator[None]:
    """Convert an out-of-memory error of a device to an error with the command that lists changes."""
    try:
        yield
    except Exception as error:
        found = None if isinstance(error, MeshparError) else out_of_memory(error)
        if found is None:
            raise
        from meshpar.inspect.memory import COMFORTABLE, LARGER_POOL

        (reason, is_of_driver), pool = found, _pool_bytes(devices[0])
        fix = f"list changes that fit, fastest first: {fit_command()}"
        if is_of_driver:
            reason = f"the CUDA driver has too little memory outside of XLA's pool ({reason})"
            fix = f"reduce the pool with {LARGER_POOL.partition('=')[0]}; if the step does not fit then, {fix}"
        elif pool is not None and pool[0] < COMFORTABLE * pool[1]:
            reason += f"; XLA's pool has {human_bytes(pool[0])} of the GPU's {human_bytes(pool[1])}"
            fix = f"set {LARGER_POOL}; if the step does not fit then, {fix}"
        raise problem("meshpar train", "run the step", reason, fix, code="out-of-memory") from error


def _pool_bytes(device: Any) -> tuple[int, int] | None:
    """Return the sizes of XLA's memory pool and of the memory of a GPU, or None if one is unknown."""
    from meshpar.hardware.clusters import gpu_of_kind

    gpu, limit = gpu_of_kind(device.device_kind), (device.memory_stats() or {}).get("bytes_limit")
    return None if gpu is None or limit is None else (limit, int(gpu.memory_bytes))


def _fit_command(
    recipe: str,
    assignments: Sequence[str],
    config: Recipe,
    devices: Sequence[Any],
    *,
    planned: bool,
    from_hf: str | None,
    tuned: str | None,
    fits_vocab: bool,
) -> str:
    """Return the command that lists changes with which the step of a run fits on the same devices."""
    from meshpar.data.tokens import load_tokenizer
    from meshpar.hardware.clusters import cluster_here
    from meshpar.runs.recipe_sources import padded_vocab
    from meshpar.runs.tuned import Tuned

    cluster = cluster_here(devices)
    fields = [*assignments]
    if planned:
        fields += [f"mesh={human_mesh(config.mesh).replace(' ', '')}", f"strategy={config.strategy}"]
        fields += [f"step.{name}={getattr(config.step, name)}" for name in ("remat", "accumulate", "batch_slices")]
    if tuned is not None:
        fields += Tuned.load(tuned).settings
    if fits_vocab and hasattr(config.model, "vocab_size"):
        num_tokens = load_tokenizer(config.data.tokenizer).vocab_size  # type: ignore[attr-defined]
        fields.append(f"model.vocab_size={padded_vocab(num_tokens)}")
    words = ["meshpar", "explain", recipe, *(word for text in fields for word in ("--set", text))]
    words += ["--from-hf", from_hf] if from_hf is not None else []
    return shlex.join([*words, "--fit", "--cluster", "h100:1x8" if cluster is None else cluster.name])
