"""Command `meshpar schedule`: show, simulate and export pipeline schedules, without devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshpar.cli.main import check_output_file, output_options, prepare_devices, print_report
from meshpar.schedules import SCHEDULES, Schedule, Simulation, make
from meshpar.schedules.rendering import bands_of, grid
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.host_resources import read_json
from meshpar.sharding.printing import table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

COLORS = {"F": ("bright_cyan", "cyan"), "B": ("bright_green", "green"), "W": ("bright_yellow", "yellow")}
"""Color of each kind of op, on even and on odd chunks."""


@click.command()
@click.argument("name", required=False)
@click.option("--stages", metavar="P", type=click.IntRange(min=1), help="Number of stages.  [default: 4]")
@click.option("--microbatches", metavar="M", type=click.IntRange(min=1), help="Microbatches per step.  [default: 2P]")
@click.option("--chunks", metavar="V", type=int, help="Model chunks per stage (interleaved, eager).")
@click.option("--spread-head", is_flag=True, help="Share the head, as in pipeline_parallel (interleaved, eager).")
@click.option("--split-backward", is_flag=True, help="Run weight gradients in ticks of their own; with --spread-head.")
@click.option("--limit", metavar="K", type=int, help="Maximum number of microbatches in flight on a stage (zb-h2).")
@click.option("--f", default=1.0, show_default=True, help="Time of the forward pass of a stage.")
@click.option("--b", default=1.0, show_default=True, help="Time of the input gradients of a stage.")
@click.option("--w", default=1.0, show_default=True, help="Time of the weight gradients of a stage.")
@click.option("--comm", default=0.0, show_default=True, help="Time of a transfer between neighboring stages.")
@output_options
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print the compute-only CSV format of torch.distributed.pipelining."
)
@click.option("--png", metavar="FILE", type=click.Path(dir_okay=False), help="Write a plot of the timeline.")
def schedule(
    name: str | None, stages: int | None, microbatches: int | None, chunks: int | None, spread_head: bool,
    split_backward: bool, limit: int | None, f: float,
    b: float, w: float, comm: float, as_json: bool, as_csv: bool, png: str | None,
) -> None:  # fmt: skip
    """Show a pipeline schedule: `meshpar schedule zb-h2 --stages 4 --microbatches 8`.

    NAME is gpipe, 1f1b, interleaved-1f1b, eager-1f1b, zb-h1, zb-h2, zb-v, dualpipe or dualpipe-v, or a file: a .csv in
    the compute-only format of torch.distributed.pipelining, or a .json that this command printed. Without NAME, all
    schedules are compared.
    """
    prepare_devices(1, start="nothing")  # plots and errors import jax without using it
    if png is not None:
        check_output_file(png, (".png",))
    costs = {"f": f, "b": b, "w": w, "comm": comm}
    given = {
        "chunks": chunks,
        "limit": limit,
        "spread_head": spread_head or None,
        "split_backward": split_backward or None,
    }
    options = {key: value for key, value in given.items() if value is not None}
    for is_wrong, message in (
        (name is None and options, f"--{next(iter(options), '')} requires a schedule NAME."),
        (name is None and as_csv, "--csv requires a schedule NAME."),
        (as_csv and as_json, "--csv and --json cannot be combined."),
    ):
        if is_wrong:
            raise click.UsageError(message, click.get_current_context())
    sizes = stages or 4, microbatches or 2 * (stages or 4)
    if name is None:
        schedules = [make(name, *sizes) for name in SCHEDULES if name != "dualpipe" or sizes[0] % 2 == 0]
    elif Path(name).suffix in (".csv", ".json"):
        requested = {"stages": stages, "microbatches": microbatches, **options}
        if option := next((f"--{key}" for key, value in requested.items() if value is not None), None):
            raise problem(name, f"set {option}", "the file determines it", f"remove {option}", code="conflict")
        schedules = [_read(name)]
    else:
        schedules = [make(name, *sizes, **options)]
    simulated = [SimulatedSchedule(schedule, schedule.simulate(**costs)) for schedule in schedules]
    if as_csv:
        from meshpar.schedules import csv

        click.echo(csv.text(schedules[0]), nl=False)
    else:
        print_report(ScheduleComparison(simulated) if name is None else simulated[0], as_json=as_json)
    if png is not None:
        from meshpar import plots

        plots.schedule(*schedules, **costs).savefig(png, dpi=150)
        click.echo(f"saved {png}", err=True)


def _read(path: str) -> Schedule:
    if path.endswith(".csv"):
        return Schedule.from_csv(path)
    fix = "use the output of `meshpar schedule NAME --json`"
    try:
        return Schedule.from_json(read_json(path, path, fix, requested="read a schedule"))
    except MeshparError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"its content is invalid ({error})"
        raise problem(path, "read a schedule", reason, fix, code="damaged-file") from error


@dataclasses.dataclass(frozen=True)
class SimulatedSchedule:
    """A schedule with its simulated times. Prints as a grid of ops, with a row per stage."""

    schedule: Schedule
    times: Simulation

    def to_json(self) -> dict[str, Any]:
        return self.schedule.to_json(simulation=self.times)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        yield Text("\n").join([*self._grid(options.max_width), Text(), *map(Text, self._figures())])

    def _grid(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        cells = grid(self.schedule)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        label = f"stage {self.schedule.stages - 1}  "
        for number, band in enumerate(bands_of(widths, width - len(label))):
            if number:
                yield Text()
            for stage, row in enumerate(cells):
                line = Text(f"stage {stage}".ljust(len(label)))
                for tick in band:
                    cell = self.schedule.cell(tick, stage)
                    is_pair = {"F", "B"} <= {op.kind for op in cell}
                    color = "magenta" if is_pair else COLORS[cell[0].kind][cell[0].chunk % 2] if cell else "default"
                    line.append(row[tick].ljust(widths[tick]), style=f"black on {color}" if cell else "dim")
                    line.append(" " if tick < band[-1] else "")
                yield line

    def _figures(self) -> Iterator[str]:
        schedule, times = self.schedule, self.times
        yield (
            f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches, {schedule.ticks} ticks, "
            f"parameters {schedule.copies:g}x"
        )
        yield (
            f"makespan {times.free.makespan:.4g}, with lockstep ticks {times.lockstep.makespan:.4g}; bubble fraction "
            f"of a step {times.free.bubble_fraction:.2%}, of a stage span {times.free.span_bubble_fraction:.2%}"
        )
        share = "" if schedule.stages == schedule.num_parts else f", each 1/{schedule.num_parts} of the model"
        yield f"peak activations by stage{share}: {' '.join(map(str, schedule.peak_activations))}"


@dataclasses.dataclass(frozen=True)
class ScheduleComparison:
    """Comparison of schedules."""

    schedules: Sequence[SimulatedSchedule]

    def to_json(self) -> list[dict[str, Any]]:
        return [each.to_json() for each in self.schedules]

    def __rich__(self) -> RenderableType:
        first = self.schedules[0].schedule
        columns = ("schedule", "makespan", "lockstep", "step bubble", "span bubble", "activations", "parameters")
        rows = [
            (
                each.schedule.name,
                f"{each.times.free.makespan:.4g}",
                f"{each.times.lockstep.makespan:.4g}",
                f"{each.times.free.bubble_fraction:.2%}",
                f"{each.times.free.span_bubble_fraction:.2%}",
                f"{each.schedule.peak_activations.max() * each.schedule.stages / each.schedule.num_parts:g} M",
                f"{each.schedule.copies:g}x",
            )
            for each in self.schedules
        ]
        caption = (
            "lockstep: all stages synchronize after each tick, an upper bound for mp.pipeline_parallel; span: from the "
            "first to the last op of a stage; M: activations of one microbatch on one stage, at the peak"
        )
        title = f"{first.stages} stages, {first.microbatches} microbatches"
        return table(title, columns, rows, left=("schedule",), caption=caption)
