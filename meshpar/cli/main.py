"""The `meshpar` command line: commands, shared options, device setup and error output.

No command is imported before it runs, and XLA's flags are set before jax is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from meshpar.pod import signals
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.host_resources import check_local, unexpected, user_line

if TYPE_CHECKING:
    from meshpar.runs.recipe import Recipe

HOST_DEVICES = 8
"""Default number of XLA host devices on a machine without an accelerator."""
MAX_HOST_DEVICES = 1024
"""Largest number of host devices. Each one starts threads, and XLA aborts if the system refuses to start more."""
PIPE_WIDTH = 160
"""Columns of a report that is not printed to a terminal."""
BROKEN_PIPE = 141
"""Exit code after standard output was closed: 128 plus the number of SIGPIPE, as other commands do in a pipe."""
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# Host devices share the CPU cores, so a thread may wait for minutes without a deadlock.
_COLLECTIVE_TIMEOUTS_S = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
}


# ---- Devices, before jax is imported ---------------------------------------------------------------------------------


def prepare_devices(
    count: int | None, *, start: Literal["devices", "jax", "nothing"] = "devices", use_host: bool = False
) -> None:
    """Choose the devices that jax uses. Call this function before jax creates devices.

    Args:
      count: number of XLA host devices. None selects the accelerators of this machine, or 8 host devices if there
        are none. `JAX_PLATFORMS` and `XLA_FLAGS` of the environment are kept unless they contradict `count`.
      start: "devices" creates the host devices. "jax" only imports jax, for processes that have to join a pod before
        they create devices. "nothing" is for commands that may not need jax.
      use_host: use host devices even if there are accelerators, for commands that compute nothing.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # XLA's warnings and errors, but not its info messages
    platform = "cpu" if use_host else os.environ.get("JAX_PLATFORMS") or "cpu"
    if count is None and (platform != "cpu" or (not use_host and _has_accelerator())):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    given = os.environ.get("XLA_FLAGS", "").split()
    if given and not given[0].startswith("--"):  # XLA would read a file of this name, with our flags in its name
        reason, fix = f"`{given[0][:100]}` does not start with --", "write flags such as --xla_dump_to=/tmp/xla"
        raise problem("XLA_FLAGS", "add flags for host devices", reason, fix, code="bad-syntax")
    flags = {name: f"{name}={value}" for name, value in _COLLECTIVE_TIMEOUTS_S.items()}
    flags |= {flag.partition("=")[0]: flag for flag in given}
    if count is not None or _DEVICE_COUNT_FLAG not in flags:
        flags[_DEVICE_COUNT_FLAG] = f"{_DEVICE_COUNT_FLAG}={count or HOST_DEVICES}"
    os.environ["XLA_FLAGS"] = " ".join(flags.values())
    if "jax" in sys.modules:  # jax read the environment on import; it reads XLA_FLAGS with the first device
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    if start == "nothing":
        return

    import jax

    if start == "devices":
        jax.devices()


def _has_accelerator() -> bool:
    """Return whether jax will find an accelerator, without importing jax."""

    def is_installed(*modules: str) -> bool:
        return any(importlib.util.find_spec(module) is not None for module in modules)

    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    if is_installed("libtpu") and any(Path("/dev").glob("accel[0-9]*")):
        return True
    if is_installed("jax_rocm7_pjrt", "jax_rocm60_pjrt", "jax_rocm7_plugin") and Path("/dev/kfd").exists():
        return True
    if not any(Path("/dev").glob("nvidia[0-9]*")) or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if is_installed("jax_cuda12_plugin", "jax_cuda13_plugin"):
        return True
    message = "this machine has an NVIDIA GPU, but jax's CUDA plugin is missing: pip install 'meshpar[cuda12]'"
    click.secho(message, fg="yellow", err=True)
    return False


def select_devices(count: int | None) -> Sequence[Any]:
    """Return the first `count` devices, or all devices if `count` is None or there are several processes."""
    import jax

    devices = jax.devices()
    if count is None or jax.process_count() > 1:
        return devices
    if count > len(devices):
        reason = f"jax was already started with {len(devices)} devices"
        fix = f"set XLA_FLAGS={_DEVICE_COUNT_FLAG}={count} before anything uses jax"
        raise problem(f"--devices {count}", f"run on {count} host devices", reason, fix, code="out-of-range")
    return devices[:count]


# ---- Commands --------------------------------------------------------------------------------------------------------


COMMANDS = {
    "explain": "Show the collectives, memory and overlap of a compiled step, for any cluster.",
    "plan": "Rank the layouts of a recipe on a cluster by predicted speed.",
    "cost": "Show the time, bytes and formula of a collective for each algorithm.",
    "schedule": "Show a pipeline schedule: its table, bubbles and memory.",
    "convert": "Convert Hugging Face folders to runs, and runs to such folders.",
    "generate": "Continue prompts with the model of a run or of a Hugging Face folder.",
    "bench": "Measure collectives and a GPU, and save profiles for plan and explain.",
    "checkpoint": "List, inspect, verify and export checkpoints of a run, without its recipe.",
    "trace": "Read a profile of training steps and compare it with the prediction of explain.",
    "verify": "Compare random layouts and restarts of a recipe's model with one device.",
    "doctor": "Report versions, devices, links and environment, with a fix for each problem.",
}
"""One line of help for each command that has its own module. `train` and `shard` are defined below."""


class _Group(click.Group):
    """Click group of the commands in this file and in `COMMANDS`. The module of a command is imported when it runs."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `meshpar explain ... | head`: the reader has closed the pipe
            # Python flushes standard output at exit, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(BROKEN_PIPE)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *COMMANDS]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return super().get_command(ctx, name)
        return getattr(importlib.import_module(f"meshpar.cli.{name}_command"), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        eager = [(name, command.get_short_help_str(90)) for name, command in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl([*eager, *COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = self.list_commands(ctx)
            close = difflib.get_close_matches(args[0], names)
            hint = f"Did you mean `{close[0]}`?" if close else f"The commands are {', '.join(names)}."
            raise click.UsageError(f"{error.format_message()} {hint}", ctx) from None


def options(*decorators: Callable[..., Any]) -> Callable[[Any], Any]:
    """Combine several options into one decorator."""

    def add(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return add


devices_option = click.option(
    "--devices", metavar="N", type=click.IntRange(1, MAX_HOST_DEVICES),
    help=f"Run on N XLA host devices. Default: the accelerators of this machine, or {HOST_DEVICES} host devices.",
)  # fmt: skip
layout_options = options(
    click.option(
        "--mesh", metavar="AXES",
        help="Replace the mesh of the recipe, as in fsdp=64,tensor=8. -1 takes the remaining devices.",
    ),
    click.option(
        "--strategy", metavar="STRATEGY",
        help="Replace the strategy of the recipe, as in 'fsdp() | tensor_parallel(sequence=True)'.",
    ),
)  # fmt: skip
cluster_help = "h100:8x8 (GPU:NODESxGPUS), or a saved profile: my.json."


def layout_fields(mesh: str | None, strategy: str | None) -> list[str]:
    """Return the values of --mesh and --strategy as assignments to recipe fields, such as `mesh=fsdp=8`."""
    return [f"{field}={value}" for field, value in (("mesh", mesh), ("strategy", strategy)) if value]


# `main` reads this flag from the arguments.
traceback_option = click.option(
    "--traceback", is_flag=True, expose_value=False, help="Show the Python traceback of an error."
)
output_options = options(
    click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."), traceback_option
)
"""Options of every command that prints a report."""


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(package_name="meshpar", message="meshpar %(version)s")
@traceback_option
def cli() -> None:
    """Train Flax models sharded over a named mesh, and inspect the compiled programs."""


def _xla(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> None:
    """Treat `--xla NAME=VALUE` as `--set step.xla.NAME=VALUE`. An eager option, read before `--set`."""
    for value in values:
        if not re.fullmatch(r"[^=]+=.+", value):
            reason, fix = "the format is NAME=VALUE", "write it like --xla xla_gpu_async_dot=true"
            raise problem(f"--xla {value}", "set an XLA option", reason, fix, code="bad-syntax")
    context.meta[__name__] = tuple(f"step.xla.{value.lstrip('-')}" for value in values)


field_options = options(
    click.option(
        "--set", "assignments", metavar="FIELD=VALUE", multiple=True,
        callback=lambda context, _, values: (*values, *context.meta.get(__name__, ())),
        help="Set a field of the recipe by its dotted path, as in mesh.fsdp=8. Repeatable.",
    ),
    click.option(
        "--xla", metavar="NAME=VALUE", multiple=True, expose_value=False, is_eager=True, callback=_xla,
        help="Set an XLA compile option, as in xla_gpu_all_gather_combine_threshold_bytes=1073741824. Repeatable.",
    ),
    output_options,
)  # fmt: skip
"""Options of every command that reads a recipe."""
hf_option = click.option(
    "--from-hf", metavar="DIR", type=click.Path(), help="Use the model of a Hugging Face folder, as `train` does."
)
recipe_options = options(click.argument("recipe", type=click.Path()), field_options)


COMPARED_LATER = (
    "recipe", "assignments", "steps", "name", "writers", "plan", "text", "tokenizer",
    "as_json",
)  # fmt: skip
"""Options of `train` that are not compared when processes join.

All except `as_json` set fields of the recipe, which is compared later. `as_json` may differ.
"""


@cli.command()
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
    "--shrink", is_flag=True,
    help="With --restarts: restart without the devices of the lost process, on a smaller data axis.",
)  # fmt: skip
@click.option(
    "--writer", "writers", metavar="NAME", multiple=True, type=click.Choice(["tensorboard", "wandb"]),
    help="Also write metrics to tensorboard or wandb. Same as --set writers=NAME,NAME. Repeatable.",
)  # fmt: skip
@click.option(
    "--profile", metavar="FIRST:LAST",
    help="Write an XProf trace of these steps, as in 10:15, to profile/ of the run. Read it with `meshpar trace`.",
)  # fmt: skip
def train(
    *, devices: int | None, stall_limit: float, join_limit: int | None, processes: int | None, restarts: int,
    shrink: bool, **settings: Any,
) -> None:  # fmt: skip
    """Train a recipe: `meshpar train recipes/gpt_stdlib.py`.

    Repeat the command to resume a run that has stopped.
    """
    from meshpar.pod.local_processes import PARENT, follow_parent, run

    for option, is_conflict, reason, fix in (
        (f"--restarts {restarts}", restarts and settings["fresh"], "--fresh would discard the run", "remove --fresh"),
        (f"--restarts {restarts}", restarts and processes is None, "--processes is not set", "add --processes N"),
        ("--shrink", shrink and not restarts, "no restart is allowed", "add --restarts K"),
    ):
        if is_conflict:
            raise problem(option, "restart after a process is lost", reason, fix, code="conflict")
    is_child = PARENT in os.environ
    if processes is not None and not is_child:
        prepare_devices(devices, start="nothing")
        args = click.get_current_context().find_root().obj
        sys.exit(run(args, processes=processes, restarts=restarts, shrink=shrink))
    follow_parent()
    devices = None if is_child else devices  # the parent has already divided the host devices
    prepare_devices(devices, start="jax")
    from meshpar.pod import callback_failures, launch, multihost

    launch.join(alone=is_child, timeout_s=join_limit or (launch.LOCAL_JOIN_S if is_child else launch.JOIN_S))
    command = {f"--{name.replace('_', '-')}": value for name, value in settings.items() if name not in COMPARED_LATER}
    command["--stall-limit"] = stall_limit
    callback_failures.end_on_callback_failures()
    with multihost.pod(stall_s=stall_limit, command=command):
        _train(device_count=devices, **settings)


def _train(
    *, recipe: str, assignments: tuple[str, ...], as_json: bool, plan: str | None, device_count: int | None,
    steps: int | None, name: str | None, out: str, fresh: bool, accept_changes: bool, text: tuple[str, ...],
    tokenizer: str | None, from_hf: str | None, writers: tuple[str, ...], profile: str | None,
) -> None:  # fmt: skip
    prepare_devices(device_count)
    devices = select_devices(device_count)
    import jax

    from meshpar.data import TextData
    from meshpar.loop.profiler import check_steps, parse_steps
    from meshpar.pod.local_processes import shrunk
    from meshpar.runs.recipe import load_recipe
    from meshpar.runs.training_run import check_left_to_folder, with_plan
    from meshpar.runs.training_run import train as run

    profiled_steps = None if profile is None else parse_steps(profile)
    config = load_recipe(recipe, devices=len(devices))
    shortcuts = {"steps": steps, "name": name, "writers": ",".join(writers) or None}
    fields = (*assignments, *(f"{field}={value}" for field, value in shortcuts.items() if value is not None))
    config = config.override(*fields) if plan is None else with_plan(config, plan, fields)
    config = config.replace(mesh=shrunk(config.mesh))
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
    sets_vocab = any(assignment.startswith("model.vocab_size") for assignment in assignments)
    outcome = run(
        config,
        out=out,
        devices=devices,
        fresh=fresh,
        stream=sys.stderr if as_json else sys.stdout,
        fit_vocab=tokenizer is not None and from_hf is None and not sets_vocab,
        from_hf=from_hf,
        profile=profiled_steps,
        accept_changes=accept_changes,
    )
    if as_json and jax.process_index() == 0:
        print_json({"folder": str(outcome.folder), **outcome.summary})
    if outcome.reason == "interrupted":
        sys.exit(signals.exit_code())


@cli.command()
@recipe_options
@layout_options
@hf_option
@click.option("--devices", metavar="N", type=click.IntRange(min=1), help="Number of devices of the mesh.")
def shard(
    recipe: str, assignments: tuple[str, ...], as_json: bool, mesh: str | None, devices: int | None,
    strategy: str | None, from_hf: str | None,
) -> None:  # fmt: skip
    """Show how the model of a recipe is sharded. Needs no devices.

    Lists the shape, logical names, matching rule and bytes per device of each array, and the totals.
    """
    prepare_devices(None, use_host=True)
    from meshpar.hardware.compile_options import check_options
    from meshpar.runs.recipe import build_model, build_optimizer, load_recipe
    from meshpar.training.sharding_table import shardings

    config = load_recipe(recipe, devices=devices).override(*layout_fields(mesh, strategy), *assignments)
    config = with_model(config, from_hf, assignments)
    if devices is None and -1 in config.mesh.values():
        where = f"mesh {', '.join(f'{axis}={size}' for axis, size in config.mesh.items() if size != 1)}"
        reason = "the size -1 depends on the number of devices"
        raise problem(where, "compute shardings", reason, "set the number: --devices 4096", code="missing-argument")
    check_options(config.step.xla)  # they change no sharding, but an error is more useful now than during training
    abstract_mesh = config.mesh.abstract(devices)
    model = build_model(config)
    tx = build_optimizer(config, model, abstract_mesh)
    report = shardings(model, abstract_mesh, config.strategy, tx=tx, precision=config.step.precision)
    print_report(report, as_json=as_json)


def with_model(recipe: Recipe, from_hf: str | None, assignments: Sequence[str]) -> Recipe:
    """Return the recipe with the model of a Hugging Face folder, without loading weights, if `from_hf` is set."""
    if from_hf is None:
        return recipe
    from meshpar.runs.training_run import check_left_to_folder, with_hf

    check_left_to_folder(from_hf, assignments, None)
    return with_hf(recipe, from_hf)


# ---- Output ----------------------------------------------------------------------------------------------------------


def print_json(document: Any) -> None:
    """Print a document as indented JSON."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def print_report(report: Any, *, as_json: bool) -> None:
    """Print a report that has `to_json` and `__rich__`. Output to a pipe has no control codes."""
    if as_json:
        print_json(report.to_json())
        return
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(report)
        return
    # Without a terminal, rich assumes 80 columns and would fold the tables.
    console = Console(width=PIPE_WIDTH, highlight=False)
    with console.capture() as capture:
        console.print(report)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


PLOT_SUFFIXES = (".png", ".svg", ".pdf")
"""File formats of plots."""


def check_output_file(path: str, suffixes: tuple[str, ...] = ()) -> None:
    """Check, before any long computation, that a file can be written and has one of the suffixes."""
    check_local(path, path, "name a local file")
    folder, exists = Path(path).absolute().parent, os.path.exists(path)
    for is_wrong, reason, fix, code in (
        (suffixes and Path(path).suffix not in suffixes, f"its name must end in {' or '.join(suffixes)}",
         f"name it {Path(path).stem or 'my'}{(*suffixes, '')[0]}", "unknown-choice"),
        (not folder.is_dir(), f"there is no folder {folder}", f"make it: mkdir -p {folder}", "missing-file"),
        (exists and Path(path).is_fifo(), "it is a pipe, which may have no reader", "name a file", "wrong-type"),
        (not os.access(path if exists else folder, os.W_OK), "you do not have permission",
         "name a file in a folder that you can write to", "not-writable"),
    ):  # fmt: skip
        if is_wrong:
            raise problem(path, "write to it", reason, fix, code=code)


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn an `OSError` of the block into a `MeshparError` that names the file."""
    try:
        yield
    except OSError as error:
        reason = f"the system reports: {error.strerror or error}"
        raise problem(path, "write to it", reason, "name another file", code="not-writable") from None


# ---- Errors ----------------------------------------------------------------------------------------------------------


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and print errors as one paragraph.

    The exit code is 0, 1 for an unexpected error, 2 for an error of the user, or 128 plus the number of the signal
    that interrupted the command (130 for Ctrl-C).
    """
    # Connect closed standard streams to /dev/null. Otherwise the next opened file would get their descriptor.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115 - open until the process ends
    previous_format, warnings.formatwarning = warnings.formatwarning, _format_warning
    watch = signals.Watch(command=True) if threading.current_thread() is threading.main_thread() else None
    try:
        _run(sys.argv[1:] if args is None else list(args))
    finally:
        warnings.formatwarning = previous_format
        if watch is not None and args is not None:  # without `args` the process ends here, and is watched until then
            watch.close()


def _format_warning(message: Warning | str, *_: Any, **__: Any) -> str:
    return f"meshpar: warning: {' '.join(str(message).split())}\n"


def _check_not_empty(args: Sequence[str]) -> None:
    """Check that no argument is empty, which an unset variable of a shell script causes."""
    for previous, arg in zip(("", *args), args, strict=False):
        if arg == "" or re.fullmatch(r"--[^=]+=", arg):
            option = arg or (previous if previous.startswith("--") and "=" not in previous else "")
            where = f"`{option}`" if option else "an argument"
            reason, fix = "its value is empty; a shell variable may be unset", "give it a value, or remove it"
            raise problem(where, "use it", reason, fix, code="missing-argument")


def _run(args: Sequence[str]) -> None:
    try:
        _check_not_empty(args)
        code = cli.main(args, prog_name="meshpar", standalone_mode=False, obj=list(args))
    except click.ClickException as error:
        _fail(_usage(error), error.exit_code if isinstance(error, click.UsageError) else 2)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", signals.exit_code())
    except SystemExit:
        raise
    except BaseException as error:
        is_file_error = isinstance(error, OSError) and error.filename is not None
        code = 2 if isinstance(error, MeshparError) or is_file_error or user_line(error) else 1
        if "--traceback" in args:
            import traceback

            traceback.print_exception(error)
            sys.exit(code)
        if not isinstance(error, MeshparError):
            error = unexpected(error, command=" ".join(["meshpar", *args[:1]]))
        # jax adds a note about its filtered traceback, which is not shown.
        notes = (note for note in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in note)
        _fail(str(error) + "".join(f" ({note})" for note in notes), code)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _usage(error: click.ClickException) -> str:
    message = re.sub(r"\s+", " ", error.format_message())
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    if "unexpected extra" in message and "=" in message and any("--set" in p.opts for p in context.command.params):
        message += " Set a field of the recipe with --set NAME=VALUE."
    return f"{message} See {context.command_path} --help."


def _fail(message: str, code: int) -> None:
    message = re.sub(r"\S{400,}", lambda word: f"{word[0][:200]}…{word[0][-2:]}", message)  # shorten very long values
    click.secho(f"meshpar: {message}", fg="red", err=True)
    sys.exit(code)


def train_this(file: str) -> None:
    """Run `meshpar train` on a recipe file. Call it in the last line, so that `python recipe.py --steps 20` works."""
    sys.argv[1:1] = ["train", file]
    main()


if __name__ == "__main__":
    main()
