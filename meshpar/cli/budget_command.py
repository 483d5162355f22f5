"""Commands `meshpar budget`: save the cost of compiled programs, and check later programs.

The cost is communication, memory and compute.

The exit code of `check` is 0, 1 if a program exceeds its budget, or 2 if a program could not be compared.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshpar.cli.main import (
    check_output_file,
    field_options,
    layout_options,
    output_options,
    prepare_devices,
    print_json,
    print_report,
)
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.host_resources import write_text
from meshpar.sharding.remote import cache_folder

if TYPE_CHECKING:
    from meshpar.inspect.budget import Budget

FOLDER = "budgets"
"""Default folder of budgets."""
NO_CACHE = "none"

compile_options = (
    click.option(
        "--jobs", metavar="N", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default="cores",
        help="Number of programs to compile at a time.",
    ),
    click.option(
        "--cache", metavar="DIR", type=click.Path(file_okay=False), default=None,
        help=f"Keep programs for clusters in this folder, or {NO_CACHE}.  [default: ~/.cache/meshpar/explain]",
    ),
)  # fmt: skip


@click.group()
def budget() -> None:
    """Save the communication, memory and compute of programs, and check later programs, for example in CI."""


@budget.command("save", short_help="Compile recipes and save their budgets.")
@click.argument("recipes", nargs=-1, required=True, type=click.Path())
@click.option(
    "--cluster", "clusters", metavar="GPUS", multiple=True,
    help="Compile for this cluster: h100:8x8. Repeatable. Default: the mesh of the recipe on CPU devices.",
)  # fmt: skip
@click.option(
    "--folder", metavar="DIR", default=FOLDER, show_default=True, type=click.Path(file_okay=False),
    help="Folder of the budgets.",
)  # fmt: skip
@layout_options
@click.option("--batch", metavar="SHAPES", help="Shapes of the global batch, as for explain.")
@field_options
@compile_options[0]
@compile_options[1]
def save(
    recipes: tuple[str, ...], clusters: tuple[str, ...], folder: str, mesh: str | None, strategy: str | None,
    batch: str | None, assignments: tuple[str, ...], jobs: int, cache: str | None, as_json: bool,
) -> int:  # fmt: skip
    r"""Compile each recipe for each cluster and write FOLDER/NAME-CLUSTER.json.

    \b
    meshpar budget save recipes/llama3_8b.py --cluster h100:8x8 --cluster h200:2x8
    meshpar budget save recipes/gpt_stdlib.py --set model.num_layers=2 --set name=short
    """
    prepare_devices(None, start="nothing", use_host=True)
    options = [("--mesh", mesh), ("--strategy", strategy), ("--batch", batch), *(("--set", a) for a in assignments)]
    common = [word for option, value in options if value for word in (option, value)]
    programs = [
        [recipe, *(("--cluster", cluster) if cluster else ()), *common]
        for recipe in recipes
        for cluster in clusters or (None,)
    ]
    _check_folder(folder, f"folder {folder}", "keep budgets in it", "name another folder with --folder DIR")
    failed, files = False, dict[str, Any]()
    for arguments, result in zip(programs, _compiled(programs, jobs, cache), strict=True):
        if isinstance(result, str):
            failed = True
            click.secho(f"meshpar: {' '.join(arguments)}: {result}", fg="red", err=True)
            continue
        file = Path(folder) / f"{result.name}-{result.target.replace(':', '-')}.json"
        if str(file) in files:
            requested, reason = f"write {file}", "an earlier recipe has the same name and target"
            raise problem(" ".join(arguments), requested, reason, "add --set name=NAME", code="conflict")
        file.parent.mkdir(parents=True, exist_ok=True)
        result.save(file)
        files[str(file)] = result.to_json()
        if not as_json:
            click.echo(f"{file}: {result.name} on {result.target}")
    if as_json:
        print_json(files)
    return 2 if failed else 0


@budget.command("check", short_help="Compile the programs of budgets again and compare them.")
@click.argument("paths", nargs=-1, type=click.Path())
@click.option(
    "--markdown", metavar="FILE", type=click.Path(dir_okay=False),
    help="Append the table as Markdown to a file, as in $GITHUB_STEP_SUMMARY.",
)  # fmt: skip
@click.option("--update", is_flag=True, help="Write the new values to the budgets of changed programs.")
@compile_options[0]
@compile_options[1]
@output_options
def check(
    paths: tuple[str, ...], markdown: str | None, update: bool, jobs: int, cache: str | None, as_json: bool
) -> int:
    r"""Compile the programs of saved budgets again, and print the changes. PATHS are budgets or folders of budgets.

    \b
    meshpar budget check                                                all budgets in the folder `budgets`
    meshpar budget check budgets/llama3_8b-h100-8x8.json --update       accept the changes
    """
    prepare_devices(None, start="nothing", use_host=True)
    from meshpar.inspect.budget import BudgetCheck, BudgetChecks

    if markdown is not None:
        check_output_file(markdown)
    loaded = {file: _loaded(file) for file in _files(paths or (FOLDER,))}
    budgets = {file: saved for file, saved in loaded.items() if not isinstance(saved, str)}
    results = dict(zip(budgets, _compiled([saved.arguments for saved in budgets.values()], jobs, cache), strict=True))
    checks = []
    for file, saved in loaded.items():
        if isinstance(saved, str):
            checks.append(BudgetCheck(file=str(file), program=str(file), error=saved))
            continue
        program, now = f"{saved.name} on {saved.target}", results[file]
        if isinstance(now, str):
            checks.append(BudgetCheck(file=str(file), program=program, error=now))
            continue
        differences = saved.differences(now)
        checks.append(BudgetCheck(file=str(file), program=program, differences=differences))
        if update and differences:
            dataclasses.replace(now, tolerance=saved.tolerance).save(file)
    report = BudgetChecks(checks=tuple(checks))
    print_report(report, as_json=as_json)
    if markdown is not None:
        existing = Path(markdown).read_text(encoding="utf-8") if Path(markdown).exists() else ""
        write_text(markdown, existing + report.markdown, "table")
    if any(one.error for one in checks):
        return 2
    return 1 if report.is_over and not update else 0


def _files(paths: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files or not path.exists():
            reason = "it has no file *.json" if path.is_dir() else "there is no such file or folder"
            fix = f"save budgets: meshpar budget save RECIPE --folder {path.parent if path.suffix else path}"
            raise problem(str(path), "check its budgets", reason, fix, code="missing-file")
        yield from files


def _loaded(file: Path) -> Budget | str:
    """Return the budget of a file, or the error message."""
    from meshpar.inspect.budget import Budget

    try:
        saved = Budget.load(file)
        _check_repeatable(file, saved)
    except MeshparError as error:
        return str(error)
    return saved


def _check_repeatable(file: Path, saved: Budget) -> None:
    requested, fix = "compile its program again", "save it with meshpar budget save RECIPE"
    if not saved.arguments:
        raise problem(f"budget {file}", requested, "it does not name its recipe", fix, code="missing-argument")
    if saved.target != "cpu" and "--cluster" not in saved.arguments:
        reason = f"it was saved for the local devices ({saved.target})"
        raise problem(f"budget {file}", requested, reason, f"{fix} --cluster GPUS", code="conflict")


# ---- Compilation -----------------------------------------------------------------------------------------------------


def _compiled(programs: Sequence[Sequence[str]], jobs: int, cache: str | None) -> list[Budget | str]:
    """Compile programs in separate processes. Return the budget of each, or the error message.

    Args:
      programs: arguments of `meshpar explain`.
      jobs: maximum number of processes.
      cache: folder for compiled programs, "none", or None for the default.
    """
    if not programs:
        return []
    folder = str(cache_folder() / "explain") if cache is None else cache
    if folder != NO_CACHE and any("--cluster" in arguments for arguments in programs):
        fix = f"name another folder with --cache DIR, or use --cache {NO_CACHE}"
        _check_folder(folder, f"cache {folder}", "keep compiled programs in it", fix, mode=0o700)
    context = multiprocessing.get_context("spawn")
    if sys.stderr.isatty():
        click.echo(f"compiling {len(programs)} programs …", err=True)
    num_processes = min(jobs, len(programs))
    with concurrent.futures.ProcessPoolExecutor(num_processes, context, initializer=_end_with_parent) as pool:
        futures = [pool.submit(budget_of, tuple(arguments), folder) for arguments in programs]
        return [_result(future) for future in futures]


def _end_with_parent() -> None:
    """End this process as soon as its parent has ended, for example by Ctrl-C, which only the parent reports."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, name="meshpar-parent", daemon=True).start()


def _check_folder(folder: str, where: str, requested: str, fix: str, mode: int = 0o777) -> None:
    """Create a folder and check, before any compilation, that files can be written to it."""
    reason = ""
    try:
        Path(folder).mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason or not os.access(folder, os.W_OK):
        raise problem(where, requested, reason or "you do not have permission", fix, code="not-writable")


def _result(future: concurrent.futures.Future[Budget | str]) -> Budget | str:
    try:
        return future.result()
    except concurrent.futures.process.BrokenProcessPool:
        return "its process ended; fewer programs at a time need less memory: --jobs 1"


def budget_of(arguments: Sequence[str], cache: str) -> Budget | str:
    """Compile the program of `meshpar explain ARGUMENTS` and return its budget, or the error message."""
    prepare_devices(None, use_host=True)
    from meshpar.cli.explain_command import Subject, explain
    from meshpar.inspect.budget import Budget
    from meshpar.inspect.pod import PodError, PodProcess
    from meshpar.inspect.program_cache import ProgramCache
    from meshpar.runs.recipe_file import explain_recipe_errors

    programs = None if cache == NO_CACHE else ProgramCache(cache)
    try:
        subject_options = Subject.options_of(explain.make_context("explain", [*arguments]).params)
        path = arguments[0]
        with contextlib.redirect_stdout(sys.stderr), explain_recipe_errors([path], "explain its training step"):
            subject = Subject.of(**subject_options)
            with contextlib.nullcontext() if subject.cluster is None else PodProcess(cache=programs) as pod:
                report = subject.explained(pod, advise=False)
    except (MeshparError, PodError, click.ClickException) as error:
        return str(error)
    return Budget.of(report, subject.recipe.name, arguments)
