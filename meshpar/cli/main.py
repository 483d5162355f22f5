"""The `meshpar` command line: commands, shared options, device setup and error output.

No command is imported before it runs, and XLA's flags are set before jax is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from meshpar.pod import signals
from meshpar.sharding.errors import MeshparError, near, problem
from meshpar.sharding.host_resources import check_local, unexpected, user_line

if TYPE_CHECKING:
    from meshpar.runs.recipe import Recipe

STARTED_S = time.perf_counter()
"""Time at which this module was imported, by `time.perf_counter`."""
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
    env_flags = os.environ.get("XLA_FLAGS", "").split()
    if env_flags and not env_flags[0].startswith("--"):  # XLA would read a file of this name, with our flags in it
        reason, fix = f"`{env_flags[0][:100]}` does not start with --", "write flags such as --xla_dump_to=/tmp/xla"
        raise problem("XLA_FLAGS", "add flags for host devices", reason, fix, code="bad-syntax")
    flags = {name: f"{name}={value}" for name, value in _COLLECTIVE_TIMEOUTS_S.items()}
    flags |= {flag.partition("=")[0]: flag for flag in env_flags}
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
    "train": "Train a recipe, or resume its run.",
    "adopt": "Write a recipe for a model of another package.",
    "shard": "Show how the model of a recipe is sharded.",
    "explain": "Show the collectives, memory and overlap of a compiled step, for any cluster.",
    "budget": "Save the communication and memory of programs, and check later programs against them.",
    "plan": "Rank the layouts of a recipe on a cluster by predicted speed.",
    "cost": "Show the time, bytes and formula of a collective for each algorithm.",
    "schedule": "Show a pipeline schedule: its table, bubbles and memory.",
    "convert": "Convert Hugging Face folders to runs, and runs to such folders.",
    "generate": "Continue prompts with the model of a run or of a Hugging Face folder.",
    "bench": "Measure collectives, a GPU and training steps, and save profiles for plan and explain.",
    "tune": "Search for faster options of a recipe by measurement.",
    "checkpoint": "List, inspect, verify and export checkpoints of a run, without its recipe.",
    "trace": "Read a profile of training steps and compare it with the prediction of explain.",
    "verify": "Compare random layouts and restarts of a recipe's model with one device.",
    "diff": "Find the first value in which two layouts of a recipe differ.",
    "doctor": "Report versions, devices, links and environment, with a fix for each problem.",
}
"""One line of help for each command, which is defined in the module `meshpar.cli.NAME_command`."""


class _Group(click.Group):
    """Click group of `COMMANDS`. The module of a command is imported when it runs."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `meshpar explain ... | head`: the reader has closed the pipe
            # Python flushes standard output at exit, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(BROKEN_PIPE)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return None if name not in COMMANDS else getattr(importlib.import_module(f"meshpar.cli.{name}_command"), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = near(args[0], COMMANDS)
            raise click.UsageError(f"{error.format_message()} {hint[0].upper()}{hint[1:]}", ctx) from None


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


def with_model(recipe: Recipe, from_hf: str | None, assignments: Sequence[str]) -> Recipe:
    """Return the recipe with the model of a Hugging Face folder, without loading weights, if `from_hf` is set."""
    if from_hf is None:
        return recipe
    from meshpar.runs.recipe_sources import check_left_to_folder, with_hf

    check_left_to_folder(from_hf, assignments, None)
    return with_hf(recipe, from_hf)


# ---- Output ----------------------------------------------------------------------------------------------------------


def print_json(document: object) -> None:
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
    folder, path_exists = Path(path).absolute().parent, os.path.exists(path)
    for is_wrong, reason, fix, code in (
        (suffixes and Path(path).suffix not in suffixes, f"its name must end in {' or '.join(suffixes)}",
         f"name it {Path(path).stem or 'my'}{(*suffixes, '')[0]}", "unknown-choice"),
        (not folder.is_dir(), f"there is no folder {folder}", f"make it: mkdir -p {folder}", "missing-file"),
        (path_exists and Path(path).is_fifo(), "it is a pipe, which may have no reader", "name a file", "wrong-type"),
        (not os.access(path if path_exists else folder, os.W_OK), "you do not have permission",
         "name a file in a folder that you can write to", "not-writable"),
    ):  # fmt: skip
        if is_wrong:
            raise problem(path, "write to it", reason, fix, code=code)


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
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command; click 8.1 prints the help itself
            error.show()
            sys.exit(error.exit_code)
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
