"""`meshpar explain`: compile the training step of a recipe, and report memory and communication.

The exit code is 0, 1 only if `--check` fails, or 2 for errors, including exceptions in the recipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from meshpar.cli.main import (
    check_output_file,
    field_options,
    hf_option,
    layout_fields,
    layout_options,
    prepare_devices,
    print_report,
    with_model,
)
from meshpar.sharding.errors import problem
from meshpar.sharding.printing import plain

if TYPE_CHECKING:
    import jax

    from meshpar.hardware.clusters import Cluster
    from meshpar.inspect.budget import Budget, Difference
    from meshpar.inspect.comparison import Comparison
    from meshpar.inspect.pod import PodProcess
    from meshpar.inspect.report import Report
    from meshpar.runs.memory_fit import MemoryFit
    from meshpar.runs.recipe import Recipe
    from meshpar.sharding.types import AnyMesh
    from meshpar.training.state import TrainState
    from meshpar.training.step import TrainStep


@click.command()
@click.argument("recipe", type=click.Path(), required=False)
@field_options
@hf_option
@click.option(
    "--cluster", metavar="GPUS",
    help="Compile for this cluster: h100:8x8 (GPU:NODESxGPUS), or a saved profile: my.json.",
)  # fmt: skip
@layout_options
@click.option(
    "--batch", metavar="SHAPES",
    help="Shapes of the global batch, if the data has no batch_shapes: 'x=float32[64,784],y=int32[64]'.",
)  # fmt: skip
@click.option("--against", metavar="OTHER", help="Compare with another recipe, mesh, strategy or cluster.")
@click.option(
    "--html", metavar="FILE", type=click.Path(dir_okay=False), help="Write the report with plots to an HTML file."
)
@click.option(
    "--check", is_flag=True,
    help="Exit with 1 on an unexpected collective, an exceeded budget, unfused attention, or a float32 matmul in a "
    "16-bit step. A recipe can declare such kernels.",
)  # fmt: skip
@click.option(
    "--save-budget", metavar="FILE", type=click.Path(dir_okay=False),
    help="Save the communication and memory as a budget.",
)  # fmt: skip
@click.option(
    "--budget", metavar="FILE", type=click.Path(), help="Compare with a saved budget; with --check, enforce it."
)
@click.option(
    "--fit", is_flag=True,
    help="If the step does not fit in memory, compile changes of the recipe, and list those that fit, fastest first.",
)  # fmt: skip
@click.option(
    "--table", is_flag=True, help="Print a Markdown table of the sharding and communication of all strategies."
)
def explain(
    recipe: str | None, assignments: tuple[str, ...], as_json: bool, from_hf: str | None, cluster: str | None,
    mesh: str | None, strategy: str | None, batch: str | None, against: str | None, html: str | None, check: bool,
    save_budget: str | None, budget: str | None, fit: bool, table: bool,
) -> int:  # fmt: skip
    """Show the compiled training step: `meshpar explain recipes/llama3_8b.py --cluster h100:8x8`.

    The report shows memory, the collectives over each mesh axis, the expected collectives of the strategy, and overlap.
    The step is compiled but not run. Without --cluster, it is compiled for the local devices.
    """
    prepare_devices(None, use_host=bool(cluster or table))
    if table:
        from meshpar.inspect.strategy_table import strategy_table

        context = click.get_current_context()
        ignored = [
            option.opts[0] if isinstance(option, click.Option) else str(option.name).upper()
            for option in context.command.params
            if option.name not in ("table", "cluster", "as_json")
            and context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        ]
        if ignored:
            requested, reason = f"use {', '.join(ignored)}", "the table is compiled from a reference decoder"
            raise problem("--table", requested, reason, "use only --cluster and --json with it", code="conflict")
        rows = strategy_table(cluster)
        print_report(rows, as_json=True) if as_json else click.echo(rows.markdown)
        return 0
    if recipe is None:
        raise click.UsageError("Missing argument 'RECIPE'.", click.get_current_context())
    for path in filter(None, (html, save_budget)):
        check_output_file(path)
    from meshpar.inspect.budget import Budget
    from meshpar.runs.recipe_file import explain_recipe_errors

    # An exception in the recipe must not exit with code 1, which means that a check failed.
    files = [path for path in (recipe, against) if path]
    # Recipes and losses may print, but stdout is for the report.
    with contextlib.redirect_stdout(sys.stderr), explain_recipe_errors(files, "explain its training step"):
        limits = Budget.load(budget) if budget else None
        subject = Subject.of(**Subject.options_of(click.get_current_context().params))
        if limits is not None:
            limits.check_comparable(str(budget), name=subject.recipe.name, target=subject.target, mesh=subject.sizes)
        other = subject.against(against) if against else None
        result = _compile_report(subject, other, limits, subject.fit_cluster() if fit else None)
    print_report(result, as_json=as_json)
    if html:
        from meshpar.inspect.page import as_page

        title = f"meshpar explain {subject.recipe.name}"
        reports = result.reports
        pictures = [_plots(label, report) for label, report in reports]
        page = as_page(reports, title=title, pictures=pictures, more=result.sections)
        Path(html).write_text(page, encoding="utf-8")
    if save_budget:
        Budget.of(result.report, subject.recipe.name, _arguments()).save(save_budget)
    reasons = result.reasons if check else []
    for reason in reasons:
        click.secho(f"meshpar: {reason}", fg="red", err=True)
    return 1 if reasons else 0


def _arguments() -> list[str]:
    """Return the arguments of this command that determine the program."""
    params = click.get_current_context().params
    options = [
        (f"--{name.replace('_', '-')}", params[name]) for name in ("cluster", "mesh", "strategy", "batch", "from_hf")
    ]
    options += [("--set", assignment) for assignment in params["assignments"]]
    return [params["recipe"], *(word for option, value in options if value for word in (option, value))]


# ---- Subject ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A recipe with overrides, to compile for a cluster or for the local devices."""

    path: str
    recipe: Recipe
    cluster: Cluster | None
    mesh: AnyMesh
    batch: Mapping[str, jax.ShapeDtypeStruct]
    layout: Sequence[str]
    """Assignments of mesh and strategy from the command line."""
    assignments: Sequence[str]
    """Assignments of other recipe fields from the command line."""
    shapes: str | None
    """Value of --batch."""
    from_hf: str | None = None
    """Value of --from-hf."""

    @staticmethod
    def options_of(params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `Subject.of` for the parameters of the command."""
        layout = layout_fields(params["mesh"], params["strategy"])
        names = {"path": "recipe", "cluster": "cluster", "assignments": "assignments", "from_hf": "from_hf"}
        return {"layout": layout, "shapes": params["batch"], **{key: params[name] for key, name in names.items()}}

    @staticmethod
    def of(
        path: str,
        cluster: str | Cluster | None,
        *,
        layout: Sequence[str],
        assignments: Sequence[str],
        shapes: str | None,
        from_hf: str | None = None,
    ) -> Subject:
        """Load a recipe and override its fields."""
        import jax

        from meshpar.hardware.clusters import parse_cluster
        from meshpar.inspect.target import require_aot
        from meshpar.runs.recipe_file import load_recipe

        pod = parse_cluster(cluster) if cluster is not None else None
        if pod is not None:
            require_aot(pod.name)
        recipe = load_recipe(path, devices=pod.num_devices if pod else len(jax.devices()))
        recipe = with_model(recipe.override(*layout, *assignments), from_hf, assignments)
        options: Any = {"layout": layout, "assignments": assignments, "shapes": shapes, "from_hf": from_hf}
        mesh, batch = _mesh_of(recipe, pod), batch_of(recipe, shapes)
        return Subject(path=path, recipe=recipe, cluster=pod, mesh=mesh, batch=batch, **options)

    def against(self, other: str) -> Subject:
        """Return the second subject of a comparison. `other` (--against) is a recipe, mesh, strategy or cluster."""
        from meshpar.runs.recipe_file import is_recipe_path

        same: dict[str, Any] = {"assignments": self.assignments, "shapes": self.shapes}
        if is_recipe_path(other):
            return Subject.of(other, self.cluster, layout=(), **same)
        if "(" not in other and re.fullmatch(r"[A-Za-z0-9_\-]+:[0-9x]+|.*\.json", other):
            return Subject.of(self.path, other, layout=self.layout, from_hf=self.from_hf, **same)
        field = "mesh" if "=" in other and "(" not in other else "strategy"
        recipe = self.recipe.override(f"{field}={other}")
        mesh, batch = _mesh_of(recipe, self.cluster), batch_of(recipe, self.shapes)
        return dataclasses.replace(self, recipe=recipe, mesh=mesh, batch=batch)

    @property
    def target(self) -> str:
        """Name of the cluster or of the local backend, as in reports."""
        import jax

        return self.cluster.name if self.cluster is not None else jax.default_backend()

    @property
    def sizes(self) -> Mapping[str, int]:
        from meshpar.sharding.types import axis_sizes

        return axis_sizes(self.mesh)

    def step_and_state(self) -> tuple[TrainStep, TrainState]:
        """Build the training step and the abstract training state."""
        from meshpar.runs.recipe import build_abstract

        return build_abstract(self.recipe, self.mesh)

    def explained(self, pod: PodProcess | None, *, advise: bool = True) -> Report:
        """Compile the step and return the report. For a cluster, it is compiled in the process `pod`."""
        from meshpar.inspect.explain import explain as report_on

        return report_on(*self.step_and_state(), dict(self.batch), self.cluster, pod=pod, advise=advise)

    def fit_cluster(self) -> Cluster:
        """Return the cluster whose memory --fit compares the step with: by default the local GPUs."""
        from meshpar.hardware.clusters import cluster_here

        devices = () if self.cluster is not None else self.mesh.devices.flat  # type: ignore[union-attr]
        cluster = self.cluster or cluster_here(list(devices))
        if cluster is None:
            reason = f"the memory of a device of `{self.target}` is unknown"
            fix = "name the cluster: --cluster h100:1x8"
            raise problem("--fit", "compare the step with the memory", reason, fix, code="missing-argument")
        return cluster

    def fitted(self, report: Report, cluster: Cluster) -> MemoryFit:
        """Return changes with which the step fits in memory."""
        from meshpar.runs.memory_fit import fit_memory

        def progress(line: str) -> None:
            if sys.stderr.isatty():
                click.echo(line, err=True)

        return fit_memory(self.recipe, cluster, batch=self.batch, report=report, progress=progress)


def _mesh_of(recipe: Recipe, cluster: Cluster | None) -> AnyMesh:
    """Return the mesh of a recipe on a cluster, or on the first local devices."""
    import jax

    sizes, takes_rest = [size for size in recipe.mesh.values() if size != -1], -1 in recipe.mesh.values()
    size, available = math.prod(sizes), len(jax.devices()) if cluster is None else cluster.num_devices
    fits = size <= available if cluster is None else size == available
    if not (available % size == 0 if takes_rest else fits):
        target = f"{available:,} local devices" if cluster is None else f"{available:,} GPUs of {cluster.name}"
        gpu = "h100" if cluster is None else cluster.gpu.name
        raise problem(
            f"mesh {_axes(recipe.mesh)} of {size:,} devices" + " or a multiple" * takes_rest,
            "compile the step", f"it does not match the {target}",
            f"use --mesh fsdp={available}, or --cluster {gpu}:{-(-size // 8)}x{min(size, 8)}",
            code="out-of-range" if cluster is None else "wrong-shape",
        )  # fmt: skip
    if cluster is not None:
        return recipe.mesh.abstract(available)
    return recipe.mesh.build(jax.devices()[: available if takes_rest else size])


def _axes(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items() if size != 1) or "of one device"


_SHAPE = re.compile(r"\s*(\w+)\s*=\s*(\w+)\[([0-9,\s]*)\]\s*(?:,|$)")


def batch_of(recipe: Recipe, shapes: str | None) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the global batch, from --batch or from the data's `batch_shapes`."""
    if shapes is not None:
        return _read_shapes(shapes)
    shapes_of, reason = getattr(recipe.data, "batch_shapes", None), "it has no method `batch_shapes`"
    if shapes_of is not None:
        try:
            return shapes_of(recipe.batch_size)
        except (ImportError, OSError) as error:  # files or packages may be missing on this machine
            reason = f"loading it failed: {type(error).__name__}: {error}"
    fix = f"add --batch 'inputs=int32[{recipe.batch_size},1024],targets=int32[{recipe.batch_size},1024]'"
    where = f"the recipe's data ({type(recipe.data).__name__})"
    raise problem(where, "infer the batch shapes", reason, fix, code="missing-argument")


def _read_shapes(text: str) -> dict[str, jax.ShapeDtypeStruct]:
    import jax
    import numpy as np

    shapes, end = {}, 0
    with contextlib.suppress(TypeError):  # raised by np.dtype for an unknown dtype
        while match := _SHAPE.match(text, end):
            name, dtype, dims = match.groups()
            shapes[name] = jax.ShapeDtypeStruct(tuple(map(int, filter(str.strip, dims.split(",")))), np.dtype(dtype))
            end = match.end()
    if end < len(text) or not shapes:
        requested = f"parse `{text[end:].strip()}`" if text[end:].strip() else "parse it"
        reason = "the format is name=dtype[sizes] for each array, with a NumPy dtype"
        fix = "write it like 'inputs=int32[64,1024],targets=int32[64,1024]'"
        raise problem(f"--batch {text}", requested, reason, fix, code="bad-syntax")
    return shapes


# ---- Result ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explained:
    """A report, with an optional comparison and budget."""

    report: Report
    comparison: Comparison | None = None
    differences: Sequence[Difference] | None = None
    """Differences from the budget; None without a budget."""
    fit: MemoryFit | None = None
    """Changes with which the step fits in memory; None without --fit."""
    allow: Sequence[str] = ()
    """Lint rules whose findings do not fail --check (`Recipe.allow`)."""

    @property
    def reasons(self) -> list[str]:
        """Reasons why --check fails; empty if it passes."""
        from meshpar.inspect.kernels import CHECKED_RULES
        from meshpar.inspect.render import unexpected_text

        failing = {*CHECKED_RULES} - {*self.allow}
        slow = [f for f in self.report.findings if f.rule in failing]
        unexpected = [f"unexpected: {unexpected_text(collective)}" for collective in self.report.matching.unexpected]
        unexpected += [f"{finding.rule}: {finding.message}, in {finding.module}: {finding.fix}" for finding in slow]
        return unexpected + [f"over budget: {change.sentence}" for change in self.differences or () if change.is_over]

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the report, with the additional fields `against`, `budget` and `fit`."""
        more: dict[str, Any] = {} if self.comparison is None else {"against": self.comparison.to_json()}
        if self.differences is not None:
            is_over = any(change.is_over for change in self.differences)
            more["budget"] = plain({"differences": self.differences, "is_kept": not is_over})
        if self.fit is not None:
            more["fit"] = self.fit.to_json()
        return {**self.report.to_json(), **more}

    @property
    def reports(self) -> list[tuple[str, Report]]:
        """The report and the second report of a comparison, with their labels."""
        if self.comparison is None:
            return [(self.report.strategy, self.report)]
        return [*zip(self.comparison.labels, (self.report, self.comparison.second), strict=True)]

    @property
    def sections(self) -> list[Any]:
        from meshpar.inspect.render import Cell, Section

        sections = [] if self.comparison is None else [*self.comparison.sections]
        if self.differences is not None:
            lines = tuple(
                Cell(f"{'✘' if change.is_over else '·'} {change.sentence}", "bad" if change.is_over else "faint")
                for change in self.differences
            )
            sections.append(Section(title="Budget", parts=lines or (Cell("✔ matches the budget", "good"),)))
        if self.fit is not None:
            sections.append(self.fit.section)
        return sections

    def __rich__(self) -> Any:
        from rich.console import Group

        from meshpar.inspect.render import rich_of

        return Group(self.report, *(rich_of([section]) for section in self.sections))


def _compile_report(
    subject: Subject, other: Subject | None, budget: Budget | None, fit_cluster: Cluster | None
) -> Explained:
    from meshpar.inspect.budget import Budget
    from meshpar.inspect.comparison import Comparison
    from meshpar.inspect.pod import PodError, PodProcess

    if sys.stderr.isatty():
        click.echo(f"compiling {subject.recipe.name} for {subject.target} …", err=True)
    comparison = None
    try:
        with contextlib.nullcontext() if subject.cluster is None else PodProcess() as pod:
            report = subject.explained(pod, advise=fit_cluster is None)
            if other is not None:
                labels = (_label(subject, other), _label(other, subject))
                comparison = Comparison(first=report, second=other.explained(pod), labels=labels)
    except PodError as error:
        raise click.ClickException(f"the compiler failed: {error}") from error
    return Explained(
        report=report,
        comparison=comparison,
        differences=None if budget is None else budget.differences(Budget.of(report, subject.recipe.name)),
        fit=None if fit_cluster is None else subject.fitted(report, fit_cluster),
        allow=subject.recipe.allow,
    )


def _label(subject: Subject, other: Subject) -> str:
    """Return a short label for `subject` in a comparison: the first of its attributes that differs from `other`."""
    if subject.path != other.path:
        return Path(subject.path).stem
    if subject.target != other.target:
        return subject.target
    if subject.recipe.mesh != other.recipe.mesh:
        return _axes(subject.recipe.mesh)
    return str(subject.recipe.strategy)


def _plots(label: str, report: Report) -> dict[str, str]:
    """Return caption -> plot, as SVG text."""
    import io
    import textwrap
    import warnings

    import matplotlib

    from meshpar import plots
    from meshpar.inspect.memory_timeline import memory_timeline

    label = textwrap.fill(label, 32)  # a strategy may be longer than the picture is wide
    figures = {
        "Bytes over each axis": plots.axes_bytes({label: report}),
        "Memory": plots.memory({label: report.memory}),
    }
    if report.program is not None:
        live = memory_timeline(report.program, report.timeline)
        figures["Memory over time"] = plots.memory_timeline(live, limit_bytes=report.memory.limit_bytes)

    def svg(figure: Any) -> str:
        # The browser draws the text, with fonts for all alphabets. matplotlib's font, which measures it, has fewer.
        with matplotlib.rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(buffer := io.StringIO(), format="svg")
        return buffer.getvalue()

    return {caption: svg(figure) for caption, figure in figures.items()}
