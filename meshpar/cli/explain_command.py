"""`meshpar explain`: a recipe's training step, compiled and read back.

Exit codes: 0; 1 when `--check` finds something and for nothing else; 2 for what cannot be done, and for a
recipe that raises an exception of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
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
    layout_options,
    prepare_devices,
    print_report,
    with_model,
    writing,
)
from meshpar.sharding.errors import problem
from meshpar.sharding.printing import plain

if TYPE_CHECKING:
    import jax

    from meshpar.cli.recipe import Recipe
    from meshpar.hardware.clusters import Cluster
    from meshpar.inspect.budget import Budget, Difference
    from meshpar.inspect.comparison import Comparison
    from meshpar.inspect.pod import PodProcess
    from meshpar.inspect.report import Report
    from meshpar.inspect.timeline.simulator import Timeline
    from meshpar.sharding.types import AnyMesh
    from meshpar.training.state import TrainState
    from meshpar.training.step import TrainStep


@click.command()
@click.argument("recipe", type=click.Path(), required=False)
@field_options
@hf_option
@click.option(
    "--cluster",
    metavar="GPUS",
    help="Compile for a pod that is not here: h100:8x8 (GPU:NODESxGPUS), or a profile's my.json.",
)
@layout_options
@click.option(
    "--batch", metavar="SHAPES", help="The global batch, for data that does not say: 'x=float32[64,784],y=int32[64]'."
)
@click.option("--against", metavar="OTHER", help="Compare with another recipe, mesh, strategy or cluster.")
@click.option(
    "--html", metavar="FILE", type=click.Path(dir_okay=False), help="Write the report, with pictures, to a file."
)
@click.option("--check", is_flag=True, help="Exit with 1 on a collective that the strategy did not promise.")
@click.option(
    "--save-budget", metavar="FILE", type=click.Path(dir_okay=False), help="Write down what is sent and held."
)
@click.option(
    "--budget", metavar="FILE", type=click.Path(), help="Compare with a saved budget; --check holds the step to it."
)
@click.option(
    "--table",
    is_flag=True,
    help="Instead: what each strategy shards and sends, for the reference decoder, as Markdown.",
)
def explain(
    recipe: str | None,
    assignments: tuple[str, ...],
    as_json: bool,
    from_hf: str | None,
    cluster: str | None,
    mesh: str | None,
    strategy: str | None,
    batch: str | None,
    against: str | None,
    html: str | None,
    check: bool,
    save_budget: str | None,
    budget: str | None,
    table: bool,
) -> int:
    """Show what the compiler inserted: `meshpar explain recipes/llama3_8b.py --cluster h100:8x8`.

    Compiles the training step and reads the program back: memory, collectives over each mesh axis, what the strategy
    promised, overlap. Nothing is run. Without --cluster it compiles for the devices at hand.
    """
    if cluster or table:
        os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed: starting an accelerator would only take time
    prepare_devices(None)
    if table:
        _check_alone()
        from meshpar.inspect.strategy_table import strategy_table

        rows = strategy_table(cluster)
        print_report(rows, as_json=True) if as_json else click.echo(rows.markdown)
        return 0
    if recipe is None:
        raise click.UsageError("Missing argument 'RECIPE'.", click.get_current_context())
    _check_written(html, save_budget)
    from meshpar.cli.recipe import explain_recipe_errors
    from meshpar.inspect.budget import Budget

    # A recipe's own exception is not a finding: Python's exit code for it, 1, would say that it is one.
    files = {path: path.partition(":")[0] for path in (recipe, against) if path}
    # A recipe, or a loss while it is traced, may print; the report has standard output for itself.
    with contextlib.redirect_stdout(sys.stderr), explain_recipe_errors(files, "explain its training step"):
        held_to = Budget.load(budget) if budget else None
        layout = [f"{field}={value}" for field, value in (("mesh", mesh), ("strategy", strategy)) if value]
        subject = Subject.of(recipe, cluster, layout=layout, assignments=assignments, shapes=batch, from_hf=from_hf)
        if held_to is not None:
            held_to.check_comparable(str(budget), name=subject.recipe.name, target=subject.target, mesh=subject.sizes)
        other = subject.against(against) if against else None
        found = _explained(subject, other, held_to)
    print_report(found, as_json=as_json)
    if html:
        _save_page(found, subject, html)
    if save_budget:
        with writing(save_budget):
            Budget.of(found.report, subject.recipe.name).save(save_budget)
    reasons = found.reasons if check else []
    for reason in reasons:
        click.secho(f"meshpar: {reason}", fg="red", err=True)
    return 1 if reasons else 0


def _check_alone() -> None:
    """Raise `ValueError` for options that --table would not look at."""
    context = click.get_current_context()
    ignored = [
        option.opts[0] if isinstance(option, click.Option) else str(option.name).upper()
        for option in context.command.params
        if option.name not in ("table", "cluster", "as_json")
        and context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    ]
    if ignored:
        asked, fix = f"use {', '.join(ignored)} with it", "leave one of them out"
        raise problem("--table", asked, "it takes --cluster and --json only: it compiles its own decoder", fix)


def _check_written(html: str | None, save_budget: str | None) -> None:
    """Raises `ValueError` for files that cannot be written, before anything is compiled."""
    for path in filter(None, (html, save_budget)):
        check_output_file(path)


def _save_page(found: Explained, subject: Subject, path: str) -> None:
    from meshpar.inspect.render import as_page

    title = f"meshpar explain {subject.recipe.name}"
    page = as_page(found.report, title=title, pictures=_pictures(found), more=found.sections)
    with writing(path):
        Path(path).write_text(page, encoding="utf-8")


# ---- What is compiled ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A recipe, where it is to run, and what its batches are."""

    path: str
    recipe: Recipe
    cluster: Cluster | None
    mesh: AnyMesh
    batch: Mapping[str, jax.ShapeDtypeStruct]
    layout: Sequence[str]
    """Mesh and strategy as the command line gave them."""
    assignments: Sequence[str]
    """Other fields of the recipe, too."""
    shapes: str | None
    """The batch, too."""
    from_hf: str | None = None
    """The folder whose model it is, too."""

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
        """A recipe from a file, with fields set by text.

        Raises:
          ValueError: a recipe, a cluster or a field that cannot be read, or a mesh that does not fit the devices.
        """
        import jax

        from meshpar.cli.recipe import load_recipe
        from meshpar.hardware.clusters import parse_cluster
        from meshpar.inspect.target import require_aot

        pod = parse_cluster(cluster) if cluster is not None else None
        if pod is not None:
            require_aot(pod.name)
        recipe = load_recipe(path, devices=pod.num_devices if pod else len(jax.devices()))
        recipe = with_model(recipe.override(*layout, *assignments), from_hf, assignments)
        mesh = _mesh_here(recipe) if pod is None else _mesh_on(recipe, pod)
        return Subject(
            path=path,
            recipe=recipe,
            cluster=pod,
            mesh=mesh,
            batch=batch_of(recipe, shapes),
            layout=layout,
            assignments=assignments,
            shapes=shapes,
            from_hf=from_hf,
        )

    def against(self, other: str) -> Subject:
        """Another recipe, or the same with another mesh, strategy or cluster."""
        if re.search(r"\.py(:\w+)?$", other):
            return Subject.of(other, self.cluster, layout=(), assignments=self.assignments, shapes=self.shapes)
        if "(" not in other and re.fullmatch(r"[A-Za-z0-9_\-]+:[0-9x]+|.*\.json", other):
            given = {"layout": self.layout, "assignments": self.assignments}
            return Subject.of(self.path, other, **given, shapes=self.shapes, from_hf=self.from_hf)
        field = "mesh" if "=" in other and "(" not in other else "strategy"
        recipe = self.recipe.override(f"{field}={other}")
        mesh = _mesh_here(recipe) if self.cluster is None else _mesh_on(recipe, self.cluster)
        return dataclasses.replace(self, recipe=recipe, mesh=mesh, batch=batch_of(recipe, self.shapes))

    @property
    def target(self) -> str:
        """As a report names it."""
        import jax

        return self.cluster.name if self.cluster is not None else jax.default_backend()

    @property
    def sizes(self) -> Mapping[str, int]:
        from meshpar.sharding.types import axis_sizes

        return axis_sizes(self.mesh)

    def step_and_state(self) -> tuple[TrainStep, TrainState]:
        """The training step, and the shapes of its state."""
        from meshpar.cli.recipe import build_model, build_optimizer, build_step
        from meshpar.training.state import abstract_state

        recipe = self.recipe
        model = build_model(recipe)
        tx = build_optimizer(recipe, model, self.mesh)
        state = abstract_state(model, tx, mesh=self.mesh, strategy=recipe.strategy, precision=recipe.precision)
        return build_step(recipe), state

    def explained(self, pod: PodProcess | None) -> Report:
        """The report about it."""
        from meshpar.inspect.explain import explain as report_on

        return report_on(*self.step_and_state(), dict(self.batch), self.cluster, pod=pod)


def _mesh_here(recipe: Recipe) -> AnyMesh:
    import jax

    here = jax.devices()
    sizes = list(recipe.mesh.values())
    wanted = math.prod(sizes) if -1 not in sizes else len(here)
    if wanted > len(here):
        where = f"mesh {_axes(recipe.mesh)} of {wanted:,} devices"
        fix = f"name the pod it is for, as --cluster h100:{-(-wanted // 8)}x{min(wanted, 8)}, or a smaller --mesh"
        raise problem(where, "compile for the devices at hand", f"there are {len(here)} ({here[0].device_kind})", fix)
    return recipe.mesh.build(here[:wanted])


def _mesh_on(recipe: Recipe, cluster: Cluster) -> AnyMesh:
    sizes = list(recipe.mesh.values())
    known = math.prod(size for size in sizes if size != -1)
    fits = cluster.num_devices % known == 0 if -1 in sizes else cluster.num_devices == known
    if not fits:
        raise problem(
            f"--cluster {cluster.name}",
            f"run mesh {_axes(recipe.mesh)}, which takes {known:,} devices" + (" or a multiple" if -1 in sizes else ""),
            f"the cluster has {cluster.num_devices:,} GPUs",
            f"use --mesh fsdp={cluster.num_devices}, or --cluster {cluster.gpu.name}:{-(-known // 8)}x{min(known, 8)}",
        )
    return recipe.mesh.abstract(cluster.num_devices)


def _axes(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items() if size != 1) or "of one device"


_SHAPE = re.compile(r"\s*(\w+)\s*=\s*(\w+)\[([0-9,\s]*)\]\s*(?:,|$)")


def batch_of(recipe: Recipe, shapes: str | None) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the global batch, without reading the data."""
    if shapes is not None:
        return _read_shapes(shapes)
    shapes_of, why = getattr(recipe.data, "batch_shapes", None), "it has no method `batch_shapes`"
    if shapes_of is not None:
        try:
            return shapes_of(recipe.batch_size)
        except (ImportError, OSError) as error:  # a function that loads arrays may need what is not here
            why = f"loading it failed: {type(error).__name__}: {error}"
    fix = f"give them: --batch 'inputs=int32[{recipe.batch_size},1024],targets=int32[{recipe.batch_size},1024]'"
    raise problem(f"the recipe's data ({type(recipe.data).__name__})", "give the shapes of a batch", why, fix)


def _read_shapes(text: str) -> dict[str, jax.ShapeDtypeStruct]:
    import jax
    import numpy as np

    found, at = {}, 0
    with contextlib.suppress(TypeError):  # numpy's word for a dtype that does not exist
        while match := _SHAPE.match(text, at):
            name, dtype, dims = match.groups()
            found[name] = jax.ShapeDtypeStruct(tuple(map(int, filter(str.strip, dims.split(",")))), np.dtype(dtype))
            at = match.end()
    if at < len(text) or not found:
        asked = f"read `{text[at:].strip()}`" if text[at:].strip() else "read it"
        exists = "each entry is one array as name=dtype[sizes], with a dtype that NumPy knows"
        raise problem(f"--batch {text}", asked, exists, "write it like 'inputs=int32[64,1024],targets=int32[64,1024]'")
    return found


# ---- What comes of it ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explained:
    """A report, with what it was compared to."""

    report: Report
    comparison: Comparison | None = None
    budget: Budget | None = None

    @property
    def differences(self) -> tuple[Difference, ...]:
        return () if self.budget is None else self.budget.differences(self.report)

    @property
    def reasons(self) -> list[str]:
        """Why a check fails; empty when it does not."""
        from meshpar.inspect.render import unexpected_text

        unexpected = [f"unexpected: {unexpected_text(one)}" for one in self.report.promise.unexpected]
        return unexpected + [f"over budget: {one.text}" for one in self.differences if one.is_over]

    def to_json(self) -> dict[str, Any]:
        """The report's own fields, and beside them `against` and `budget`."""
        more: dict[str, Any] = {}
        if self.comparison is not None:
            more["against"] = self.comparison.to_json()
        if self.budget is not None:
            broken = any(one.is_over for one in self.differences)
            more["budget"] = plain({"differences": self.differences, "is_kept": not broken})
        return {**self.report.to_json(), **more}

    @property
    def sections(self) -> tuple[Any, ...]:
        from meshpar.inspect.render import Cell, Section

        found = [] if self.comparison is None else [*self.comparison.sections]
        if self.budget is not None:
            lines = tuple(
                Cell(("✘ " if one.is_over else "· ") + one.text, "bad" if one.is_over else "faint")
                for one in self.differences
            )
            parts = lines or (Cell("✔ as the budget says", "good"),)
            found.append(Section(title="Budget", parts=parts))
        return tuple(found)

    def __rich__(self) -> Any:
        from rich.console import Group

        from meshpar.inspect.render import rich_of

        return Group(self.report, *(rich_of([section]) for section in self.sections))


def _explained(subject: Subject, other: Subject | None, budget: Budget | None) -> Explained:
    from meshpar.inspect.comparison import Comparison
    from meshpar.inspect.pod import PodError, PodProcess

    if sys.stderr.isatty():
        click.echo(f"compiling {subject.recipe.name} for {subject.target} …", err=True)
    try:
        with contextlib.nullcontext() if subject.cluster is None else PodProcess() as pod:
            second = other.explained(pod) if other is not None else None
            report = subject.explained(pod)
    except PodError as error:
        raise click.ClickException(f"the compiler failed: {error}") from error
    comparison = None
    if second is not None and other is not None:
        labels = (_label(subject, other), _label(other, subject))
        comparison = Comparison(first=report, second=second, labels=labels)
    return Explained(report=report, comparison=comparison, budget=budget)


def _label(subject: Subject, other: Subject) -> str:
    """What they differ in, shortly."""
    if subject.path != other.path:
        return Path(subject.path).stem
    if subject.target != other.target:
        return subject.target
    if subject.recipe.mesh != other.recipe.mesh:
        return _axes(subject.recipe.mesh)
    return str(subject.recipe.strategy)


def _pictures(found: Explained) -> dict[str, str]:
    """SVG by caption."""
    import io

    from meshpar.cli import plots

    report = found.report
    side_by_side = {report.strategy: report}
    if found.comparison is not None:
        first, second = found.comparison.labels
        side_by_side = {first: report, second: found.comparison.second}
    figures = {
        "Bytes over each axis": plots.axes_bytes(side_by_side),
        "Memory": plots.memory({k: r.memory for k, r in side_by_side.items()}),
    }
    if report.timeline is not None:
        figures["One layer, simulated"] = plots.timeline(report.timeline, loop=_layer(report.timeline))

    def drawn(figure: Any) -> str:
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg")
        return buffer.getvalue()

    return {caption: drawn(figure) for caption, figure in figures.items()}


def _layer(timeline: Timeline) -> str | None:
    """The innermost loop that takes most of the step: one layer, not one micro-step."""
    innermost = [loop for loop in timeline.loops if all(op.kind != "loop" for op in loop.ops)]
    longest = max(innermost, key=lambda loop: loop.duration_s * (loop.trip_count or 1), default=None)
    return None if longest is None else longest.name
