"""Reports on compiled training steps and functions, which display themselves."""

from __future__ import annotations

from typing import Any

from meshpar.hardware.clusters import Cluster
from meshpar.inspect.census import Collective
from meshpar.inspect.program import Program
from meshpar.inspect.render import as_html, as_rich, as_text
from meshpar.inspect.report_data import FunctionData, Sent, StepData
from meshpar.inspect.timeline.simulator import Timeline


class _Displayed:
    """Display of a report: tables in a terminal, plain text, and HTML in notebooks."""

    def __rich__(self: Any) -> Any:
        return as_rich(self)

    def _repr_html_(self: Any) -> str:
        return as_html(self)

    def __str__(self: Any) -> str:
        return as_text(self)


class Report(_Displayed, StepData):
    """The result of `explain`. It prints as tables, displays as HTML in notebooks, and has `to_json`."""

    def __repr__(self) -> str:
        verdict = "as expected" if self.is_as_expected else f"{len(self.matching.unexpected)} unexpected collectives"
        return f"<Report: {self.strategy} on {self.devices} devices, {self.target}, {verdict}>"


class FunctionReport(_Displayed, FunctionData):
    """The result of `explain` for a function. It prints as tables, displays as HTML in notebooks, and has `to_json`."""

    def __repr__(self) -> str:
        return f"<FunctionReport: {self.name} on {self.devices} devices, {self.target}>"


def timed_collectives(
    collectives: tuple[Collective, ...], times: Timeline | None, cluster: Cluster | None
) -> tuple[Sent, ...]:
    """Return the collectives of a program with their simulated times."""
    timed = times.collectives if times is not None else (None,) * len(collectives)
    return tuple(
        Sent(
            collective=collective,
            crosses_node=None if cluster is None else cluster.groups_cross_node(collective.groups),
            time_s=None if timing is None else timing.time_s,
            hidden_fraction=None if timing is None else timing.hidden_fraction,
        )
        for collective, timing in zip(collectives, timed, strict=True)
    )


def program_notes(
    program: Program, collectives: tuple[Collective, ...], host_bytes: int, *, is_for_pod: bool
) -> tuple[str, ...]:
    """Return the limitations of a program's numbers."""
    notes = []
    if host_bytes:
        notes.append("transfers of offloaded arrays to and from the host are not simulated")
    if program.target == "cpu":
        notes.append("XLA:CPU lowers a reduce-scatter to an all-reduce and a slice, which sends twice the bytes")
        notes.append("XLA:CPU sends bfloat16 as float32, and does not overlap collectives with compute")
    elif is_for_pod:
        notes.append(
            "compiled without a GPU, so without autotuning: on the pod XLA may choose other kernels and other tile "
            "sizes for matmuls"
        )
    if any(not collective.count_known for collective in collectives):
        notes.append("a loop of unknown length counts once")
    if any(collective.count_by_stage for collective in collectives):
        notes.append("collectives that depend on the stage are counted for the stage that runs them most often")
    if any(collective.in_branch for collective in collectives):
        notes.append("both branches of a conditional are counted")
    return tuple(notes)
