"""The `meshpar` command. Nothing heavy is imported before a command runs, and devices are set up before jax is."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from meshpar.loop import signals as interrupts
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.host_resources import check_local, unexpected, user_line

if TYPE_CHECKING:
    from meshpar.cli.recipe import Recipe

HOST_DEVICES = 8
"""XLA host devices where there is no accelerator and no number is given."""
MAX_HOST_DEVICES = 1024
"""Each host device takes threads of its own, and XLA aborts if the system gives it no more."""

# Devices of one machine take turns on its cores: a thread may wait long for its turn before that means a deadlock.
_PATIENCE = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
}
PIPE_WIDTH = 160
"""Columns of a report that does not go to a terminal."""
BROKEN_PIPE = 141
"""Exit code when standard output is closed: 128 and the number of the signal, as of other commands in a pipe."""
_COUNT_FLAG = "--xla_force_host_platform_device_count"
_NO_DRIVER = "Could not find cuda drivers on your machine"
_NO_LOG = "WARNING: All log messages before absl::InitializeLog() is called"


# ---- Devices, before jax is imported ---------------------------------------------------------------------------------


def prepare_devices(count: int | None, *, start: Literal["devices", "jax", "nothing"] = "devices") -> None:
    """Decide on which devices jax will run; must come before anything asks jax for devices.

    Args:
      count: that many XLA host devices. None: accelerators where there are any that jax can use, else 8 host devices.
        What the environment says already (`JAX_PLATFORMS`, `XLA_FLAGS`) stays, where `count` does not speak against it.
      start: what is started of host devices: jax alone where processes have to join first, nothing where jax may not be
        needed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # XLA's warnings and errors, not its chat
    if count is None and ((os.environ.get("JAX_PLATFORMS") or "cpu") != "cpu" or _has_accelerator()):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = {flag.partition("=")[0]: flag for flag in os.environ.get("XLA_FLAGS", "").split()}
    for name, value in _PATIENCE.items():
        flags.setdefault(name, f"{name}={value}")
    if count is not None or _COUNT_FLAG not in flags:
        flags[_COUNT_FLAG] = f"{_COUNT_FLAG}={count or HOST_DEVICES}"
    os.environ["XLA_FLAGS"] = " ".join(flags.values())
    if "jax" in sys.modules:  # it has read the environment; flags are read later, with the first device
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    if start != "nothing":
        _start(with_devices=start == "devices")


def _start(*, with_devices: bool) -> None:
    """Import jax, and have it find its devices, without what its CUDA plugin says where there is no driver.

    jax 0.10's plugin writes that to standard error as it is loaded, whatever the log level and the platform chosen.
    Everything else passes.
    """
    from meshpar.inspect.compiler_messages import catch_stderr

    with catch_stderr() as caught:
        import jax

        if with_devices:
            jax.devices()
    lines = caught.text.splitlines(keepends=True)
    if any(_NO_DRIVER in line for line in lines):
        lines = [line for line in lines if _NO_DRIVER not in line and not line.startswith(_NO_LOG)]
    sys.stderr.write("".join(lines))


def _has_accelerator() -> bool:
    """Whether jax will find an accelerator, judged without importing it."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    if _importable("libtpu") and any(Path("/dev").glob("accel[0-9]*")):
        return True
    if _importable("jax_rocm7_pjrt", "jax_rocm60_pjrt", "jax_rocm7_plugin") and Path("/dev/kfd").exists():
        return True
    if not any(Path("/dev").glob("nvidia[0-9]*")) or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if _importable("jax_cuda12_plugin", "jax_cuda13_plugin"):
        return True
    click.secho("an NVIDIA GPU is here, but not jax's plugin: pip install 'meshpar[cuda12]'", fg="yellow", err=True)
    return False


def _importable(*modules: str) -> bool:
    return any(importlib.util.find_spec(module) is not None for module in modules)


def _devices(count: int | None) -> Sequence[Any]:
    import jax

    found = jax.devices()
    if count is None or count == len(found) or jax.process_count() > 1:
        return found
    if count > len(found):
        where, fix = f"--devices {count}", f"set XLA_FLAGS={_COUNT_FLAG}={count} before anything uses jax"
        raise problem(where, f"run on {count} host devices", f"jax was started with {len(found)} before", fix)
    return found[:count]


# ---- Commands --------------------------------------------------------------------------------------------------------


class Lazy(NamedTuple):
    """A command that another module holds, imported when it is used; it sets up its own devices."""

    home: str
    """`module:attribute`."""
    help: str
    """Its line in the list of commands."""


COMMANDS: dict[str, Lazy] = {
    "explain": Lazy(
        "meshpar.cli.explain_command:explain",
        "Show what the compiler inserted: collectives, memory, overlap; for a pod you do not have.",
    ),
    "plan": Lazy(
        "meshpar.cli.plan_command:plan",
        "The best layouts of a recipe on a cluster, confirmed by the compiler if asked.",
    ),
    "cost": Lazy(
        "meshpar.cli.cost_command:cost", "What a collective costs by each algorithm: steps, bytes, time, the formulas."
    ),
    "schedule": Lazy(
        "meshpar.cli.schedule_command:schedule", "Show a pipeline schedule: its table, bubbles and memory."
    ),
    "convert": Lazy("meshpar.cli.convert_command:convert", "Hugging Face's folders to runs, and runs to such folders."),
    "generate": Lazy(
        "meshpar.cli.generate_command:generate",
        "Continue prompts by the model of a run, or of a folder of Hugging Face's.",
    ),
    "bench": Lazy(
        "meshpar.cli.bench_command:bench", "Measure collectives and a GPU, as profiles for plan and explain."
    ),
    "checkpoint": Lazy(
        "meshpar.cli.checkpoint_command:checkpoint",
        "List, inspect, verify, export a run's checkpoints; needs no recipe.",
    ),
    "trace": Lazy("meshpar.cli.trace_command:trace", "A profile of training steps, beside what explain predicts."),
    "verify": Lazy(
        "meshpar.cli.verify_command:verify", "Hold a recipe's model to one device, under random layouts and restarts."
    ),
    "doctor": Lazy(
        "meshpar.cli.doctor_command:doctor", "Versions, devices, links, environment; what looks wrong, and what to do."
    ),
}
"""Commands whose options stand beside what they run; `train` and `shard` are below."""


class _Group(click.Group):
    """Commands of this file and of `COMMANDS`, of which none is imported to list them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `meshpar explain ... | head`: whoever read has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it ends
            ctx.exit(BROKEN_PIPE)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *COMMANDS]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        lazy = COMMANDS.get(name)
        if lazy is None:
            return super().get_command(ctx, name)
        module, _, attribute = lazy.home.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = {name: self.commands[name].get_short_help_str(90) for name in super().list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([*own.items(), *((name, lazy.help) for name, lazy in COMMANDS.items())])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            close = difflib.get_close_matches(args[0], self.list_commands(ctx))
            hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(self.list_commands(ctx))}"
            raise click.UsageError(f"{error.format_message()} {hint}", ctx) from None


def options(*each: Callable[..., Any]) -> Callable[[Any], Any]:
    """Several options as one decorator."""

    def add(command: Any) -> Any:
        for option in reversed(each):
            command = option(command)
        return command

    return add


devices_option = click.option(
    "--devices", metavar="N", type=click.IntRange(1, MAX_HOST_DEVICES),
    help=f"Run on N XLA host devices. Without it: on this machine's accelerators, else on {HOST_DEVICES} host devices.",
)  # fmt: skip
layout_options = options(
    click.option("--mesh", metavar="AXES", help="Another mesh, as fsdp=64,tensor=8; -1 takes what is left."),
    click.option(
        "--strategy", metavar="STRATEGY", help="Another strategy, as 'fsdp() | tensor_parallel(sequence=True)'."
    ),
)
traceback_option = click.option(
    "--traceback", is_flag=True, expose_value=False, help="Show where in the code an error came from."
)  # `main` looks for it
output_options = options(
    click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."), traceback_option
)
"""What every command takes that prints a report."""


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(package_name="meshpar", message="meshpar %(version)s")
@traceback_option
def cli() -> None:
    """Train Flax models sharded over a named mesh, and see what the sharding does."""


def _xla(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> None:
    """`--xla NAME=VALUE` is `--set xla.NAME=VALUE`, whichever of the two click looks at first."""
    for one in given:
        if not re.fullmatch(r"[^=]+=.+", one):
            exists = "it is the name of an option, =, and its value"
            raise problem(f"--xla {one}", "set an option of XLA's", exists, "write --xla xla_gpu_async_dot=true, say")
    context.meta[__name__] = tuple(f"xla.{one.lstrip('-')}" for one in given)
    if "assignments" in context.params:
        context.params["assignments"] += context.meta[__name__]


def _set(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    return (*given, *context.meta.get(__name__, ()))


field_options = options(
    click.option(
        "--set", "assignments", metavar="FIELD=VALUE", multiple=True, callback=_set,
        help="Set a field of the recipe by its dotted path, as mesh.fsdp=8; may be repeated.",
    ),
    click.option(
        "--xla", metavar="NAME=VALUE", multiple=True, expose_value=False, callback=_xla,
        help="Set one of XLA's compile options, as xla_gpu_all_gather_combine_threshold_bytes=1073741824.",
    ),
    output_options,
)  # fmt: skip
"""What every command that reads a recipe takes beside it."""
hf_option = click.option(
    "--from-hf", metavar="DIR", type=click.Path(), help="With the model of a folder of Hugging Face's, as `train` has."
)
recipe_options = options(click.argument("recipe", type=click.Path()), field_options)


COMPARED_LATER = (
    "recipe", "assignments", "steps", "name", "writers", "plan", "text", "tokenizer",
    "as_json",
)  # fmt: skip
"""Options of `train` that processes do not compare at once: the first row as fields of the recipe, the second never."""


@cli.command()
@recipe_options
@devices_option
@click.option("--steps", metavar="N", type=click.IntRange(min=1), help="Same as --set steps=N.")
@click.option("--name", metavar="NAME", help="Same as --set name=NAME: the run writes to OUT/NAME/.")
@click.option("--out", metavar="OUT", default="runs", show_default=True, help="Folder of all runs.")
@click.option("--fresh", is_flag=True, help="Begin anew; an earlier run of this name is moved aside.")
@click.option(
    "--accept-changes", is_flag=True,
    help="Go on with a run although its code has changed since it began, or its recipe.json is lost.",
)  # fmt: skip
@click.option(
    "--text", metavar="PATH", multiple=True,
    help="Train on your own text: files, globs or folders of .txt .py .md .jsonl .parquet; may be repeated.",
)  # fmt: skip
@click.option("--tokenizer", metavar="JSON", help="A Hugging Face tokenizer.json; the model's vocabulary follows it.")
@click.option(
    "--from-hf", metavar="DIR", help="Begin with the model, weights and tokenizer of a folder of Hugging Face's."
)
@click.option(
    "--plan",
    metavar="FILE",
    help="Mesh, strategy and how a step is cut, by the first plan of `meshpar plan`.",
)
@click.option(
    "--stall-limit", metavar="SECONDS", type=click.IntRange(5, 86_400), default=40, show_default=True,
    help="Several processes: after how long one that is not heard of, or stays behind in a step, is given up.",
)  # fmt: skip
@click.option(
    "--join-limit", metavar="SECONDS", type=click.IntRange(5, 86_400),
    help="Several processes: how long to wait until all have started; 300, and 90 with --processes.",
)  # fmt: skip
@click.option(
    "--processes", metavar="N", type=click.IntRange(min=1),
    help="Start N processes on this machine as one pod, to try it: any N gives the same losses bit for bit. "
    "Without it, the launcher around says which this is.",
)  # fmt: skip
@click.option(
    "--restarts", metavar="K", type=click.IntRange(min=0), default=0, show_default=True,
    help="With --processes: when one is lost, the others start again from the newest checkpoint, K times at most.",
)  # fmt: skip
@click.option(
    "--shrink", is_flag=True,
    help="With --restarts: a lost process takes its devices along, as a host does, and the mesh's data axis shrinks.",
)  # fmt: skip
@click.option(
    "--writer", "writers", metavar="NAME", multiple=True, type=click.Choice(["tensorboard", "wandb"]),
    help="Write numbers there, too: tensorboard or wandb; may be repeated. Same as --set writers=NAME,NAME.",
)  # fmt: skip
@click.option(
    "--profile", metavar="FIRST:LAST",
    help="Write an XProf trace of these steps, as 10:15, into the run's profile/; `meshpar trace` reads it back.",
)  # fmt: skip
def train(
    *,
    devices: int | None,
    stall_limit: float,
    join_limit: int | None,
    processes: int | None,
    restarts: int,
    shrink: bool,
    **given: Any,
) -> None:
    """Train a recipe: `meshpar train recipes/gpt_stdlib.py`.

    The same command again goes on where the run stopped.
    """
    from meshpar.cli.local_processes import PARENT, follow_parent, run

    if restarts and (processes is None or given["fresh"]):
        exists = (
            "a restart would begin anew, too" if given["fresh"] else "a launcher around starts processes, or nobody"
        )
        fix = (
            "move the run's folder away instead" if given["fresh"] else "add --processes N, or let the launcher restart"
        )
        raise problem(f"--restarts {restarts}", "start again what is lost", exists, fix)
    if shrink and not restarts:
        raise problem("--shrink", "go on with fewer devices", "nothing starts again by itself", "add --restarts K")
    if processes is not None and PARENT not in os.environ:
        prepare_devices(devices, start="nothing")
        args = click.get_current_context().find_root().obj
        sys.exit(run(args, processes=processes, restarts=restarts, shrink=shrink))
    follow_parent()
    # What started this process has shared the host devices already.
    devices = None if PARENT in os.environ else devices
    prepare_devices(devices, start="jax")
    from meshpar.cli import launch
    from meshpar.cli import multihost as together

    is_local = PARENT in os.environ
    launch.join(alone=is_local, timeout_s=join_limit or (launch.LOCAL_JOIN_S if is_local else launch.JOIN_S))
    command = {f"--{name.replace('_', '-')}": value for name, value in given.items() if name not in COMPARED_LATER}
    command["--stall-limit"] = stall_limit
    with together.pod(stall_s=stall_limit, command=command):
        _train(devices=devices, **given)


def _train(
    *,
    recipe: str,
    assignments: tuple[str, ...],
    as_json: bool,
    plan: str | None,
    devices: int | None,
    steps: int | None,
    name: str | None,
    out: str,
    fresh: bool,
    accept_changes: bool,
    text: tuple[str, ...],
    tokenizer: str | None,
    from_hf: str | None,
    writers: tuple[str, ...],
    profile: str | None,
) -> None:
    prepare_devices(devices)
    here = _devices(devices)
    import jax

    from meshpar.cli.local_processes import shrunk
    from meshpar.cli.recipe import load_recipe
    from meshpar.cli.train_command import check_left_to_folder, with_plan
    from meshpar.cli.train_command import train as run
    from meshpar.loop.profiler import check_steps, parse_steps

    steps_traced = None if profile is None else parse_steps(profile)
    found = load_recipe(recipe, devices=len(here))
    own = (("steps", steps), ("name", name), ("writers", ",".join(writers) or None))
    fields = (*assignments, *(f"{field}={value}" for field, value in own if value is not None))
    found = found.override(*fields) if plan is None else with_plan(found, plan, fields)
    found = found.replace(mesh=shrunk(found.mesh))
    if steps_traced is not None:
        check_steps(*steps_traced, done=0, steps=found.steps)  # here, too: before anything is compiled
    if from_hf is not None:
        check_left_to_folder(from_hf, assignments, tokenizer)
    if text or tokenizer:
        found = found.replace(data=_own_text(found.data, text, tokenizer))
    fit_vocab = (
        tokenizer is not None and from_hf is None and not any(a.startswith("model.vocab_size") for a in assignments)
    )
    stream = sys.stderr if as_json else sys.stdout
    more: dict[str, Any] = {"fit_vocab": fit_vocab, "from_hf": from_hf, "profile": steps_traced}
    more["accept_changes"] = accept_changes
    outcome = run(found, out=out, devices=here, fresh=fresh, stream=stream, **more)
    if as_json and jax.process_index() == 0:
        _print_json({"folder": str(outcome.folder), **outcome.summary})
    if outcome.reason == "interrupted":
        sys.exit(interrupts.exit_code())


def _own_text(data: Any, text: Sequence[str], tokenizer: str | None) -> Any:
    from meshpar.data import TextData

    if not isinstance(data, TextData):
        asked, fix = "train on your own text", "use a recipe whose data is TextData, as recipes/gpt_stdlib.py"
        raise problem("--text" if text else "--tokenizer", asked, f"the recipe's data is {type(data).__name__}", fix)
    return dataclasses.replace(data, files=tuple(text) or data.files, tokenizer=tokenizer or data.tokenizer)


@cli.command()
@recipe_options
@layout_options
@hf_option
@click.option("--devices", metavar="N", type=click.IntRange(min=1), help="How many devices to plan for.")
def shard(
    recipe: str,
    assignments: tuple[str, ...],
    as_json: bool,
    mesh: str | None,
    devices: int | None,
    strategy: str | None,
    from_hf: str | None,
) -> None:
    """Show how every leaf of a recipe's model lies on its mesh. Needs no devices.

    Each leaf with its shape, names, the rule that fired, and bytes per device; then the totals.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed: starting an accelerator would only take time
    prepare_devices(None)
    from meshpar.cli.recipe import build_model, build_optimizer, load_recipe
    from meshpar.hardware.compile_options import check_options
    from meshpar.training.sharding_table import shardings

    given = [f"{field}={value}" for field, value in (("mesh", mesh), ("strategy", strategy)) if value]
    found = with_model(load_recipe(recipe, devices=devices).override(*given, *assignments), from_hf, assignments)
    if devices is None and -1 in found.mesh.values():
        where = f"mesh {', '.join(f'{axis}={size}' for axis, size in found.mesh.items() if size != 1)}"
        exists = "one axis is -1, which takes what is left of a number of devices"
        raise problem(where, "plan without devices", exists, "say how many: --devices 4096")
    check_options(found.xla)  # changes no sharding, but whoever looks here trains with it next
    over = found.mesh.abstract(devices)
    model = build_model(found)
    tx = build_optimizer(found, model, over)
    print_report(shardings(model, over, found.strategy, tx=tx, precision=found.precision), as_json=as_json)


def with_model(recipe: Recipe, from_hf: str | None, assignments: Sequence[str]) -> Recipe:
    """The recipe with the model of a folder of Hugging Face's, where one is named; its weights are not looked at."""
    if from_hf is None:
        return recipe
    from meshpar.cli.train_command import check_left_to_folder, with_hf

    check_left_to_folder(from_hf, assignments, None)
    return with_hf(recipe, from_hf)


def print_report(report: Any, *, as_json: bool) -> None:
    """Print what has `to_json` and `__rich__`: as JSON, in a terminal as it likes, in a pipe without control codes."""
    if as_json:
        _print_json(report.to_json())
        return
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(report)
        return
    # A pipe has no width; a table that is folded to a guess of 80 columns helps no reader.
    console = Console(width=PIPE_WIDTH, highlight=False)
    with console.capture() as capture:
        console.print(report)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


PICTURES = (".png", ".svg", ".pdf")
"""What a plot is written as."""


def check_file(path: str, suffixes: tuple[str, ...]) -> None:
    """See that a file to write has a name that says what it is, and a folder. Raises `ValueError`: it has not."""
    if Path(path).suffix not in suffixes:
        exists = f"its name ends in neither of {', '.join(suffixes)}" if len(suffixes) > 1 else "a profile is a .json"
        raise problem(path, "write to it", exists, f"name it {Path(path).stem or 'my'}{suffixes[0]}")
    check_folder(path)


def check_folder(path: str) -> None:
    """Raise `ValueError` where a file cannot be written: before minutes of work, not after."""
    check_local(path, path, "name a local file")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise problem(path, "write to it", f"there is no folder {folder}", f"make it: mkdir -p {folder}")
    if os.path.exists(path) and Path(path).is_fifo():
        raise problem(path, "write to it", "it is a pipe, which may have no reader", "name a file")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise problem(path, "write to it", "you may not", "name a file in a folder of yours")


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """A file that cannot be written is a mistake of the user's."""
    try:
        yield
    except OSError as error:
        why = f"that failed ({error.strerror or error})"
        raise problem(path, "write to it", why, "name another file") from None


def _print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


# ---- Errors ----------------------------------------------------------------------------------------------------------


def main(args: Sequence[str] | None = None) -> None:
    """The command, with errors as one readable paragraph.

    Exits 0, 2 for a mistake of the user's, 128 and the signal's number (130 for Ctrl-C) when it was interrupted.
    """
    _open_what_is_closed()
    format_before, warnings.formatwarning = warnings.formatwarning, _one_line
    watch = interrupts.Watch(command=True) if threading.current_thread() is threading.main_thread() else None
    try:
        _run(sys.argv[1:] if args is None else list(args))
    finally:
        warnings.formatwarning = format_before
        if watch is not None and args is not None:  # else the process ends here, and is watched to its end
            watch.close()


def _one_line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None) -> str:
    """Format a warning for a person: its text, without the Python line that it comes from."""
    return f"meshpar: warning: {' '.join(str(message).split())}\n"


def _open_what_is_closed() -> None:
    """Standard streams that who started the command has closed lead nowhere; any other file would take their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115 - for as long as the process


def _check_values(args: Sequence[str]) -> None:
    """Raise `ValueError` for an empty argument or option value, which a script's unset variable leaves."""
    for at, word in enumerate(args):
        before = args[at - 1] if at else ""
        name = before if before.startswith("--") and "=" not in before else "an argument"
        if word == "" or re.fullmatch(r"--[^=]+=", word):
            where = f"`{word or name}`" if word or name != "an argument" else name
            exists = "its value is empty, as that of an unset variable is"
            raise problem(where, "use it", exists, "give it a value, or leave it out")


def _run(args: Sequence[str]) -> None:
    try:
        _check_values(args)
        code = cli.main(args, prog_name="meshpar", standalone_mode=False, obj=list(args))
    except click.ClickException as error:
        _complain(_usage(error), error.exit_code if isinstance(error, click.UsageError) else 2)
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted", interrupts.exit_code())
    except Exception as error:  # ours are written for a person; others are no pass, and no mistake of the user's
        code = 2 if isinstance(error, MeshparError) or user_line(error) else 1
        if "--traceback" in args:
            import traceback

            traceback.print_exception(error)
            sys.exit(code)
        if not isinstance(error, MeshparError):
            error = unexpected(error, command=" ".join(["meshpar", *args[:1]]))
        # jax adds a note on its tracebacks, of which none is shown.
        notes = (note for note in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in note)
        _complain(str(error) + "".join(f" ({note})" for note in notes), code)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    see = f" See {context.command_path} --help." if context is not None else ""
    if context is not None and "unexpected extra" in error.format_message() and "=" in error.format_message():
        takes = any("--set" in one.opts for one in context.command.params)
        see = f" Fields of a recipe are set as --set NAME=VALUE.{see}" if takes else see
    return re.sub(r"\s+", " ", error.format_message()) + see


def _complain(text: str, code: int) -> None:
    text = re.sub(r"\S{400,}", lambda word: f"{word[0][:200]}…", text)  # somebody's value of thousands of characters
    click.secho(f"meshpar: {text}", fg="red", err=True)
    sys.exit(code)


def train_this(file: str) -> None:
    """Train the recipe that a file holds: its last line, so that `python recipe.py --steps 20` works too."""
    sys.argv[1:1] = ["train", file]
    main()


if __name__ == "__main__":
    main()
