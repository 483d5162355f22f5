"""Report: what a compiled training step holds, sends and computes, as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshpar.inspect import census
from meshpar.inspect.census import Collective, Total
from meshpar.inspect.lint import Finding
from meshpar.inspect.matching import MatchResult
from meshpar.inspect.memory import Memory
from meshpar.inspect.program import Program
from meshpar.inspect.stage_summary import Stages
from meshpar.inspect.timeline.simulator import Timeline
from meshpar.inspect.timeline.step_prediction import Compute, Overlap
from meshpar.sharding.printing import Plain, plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """One collective of the program, with where it runs and what hides it."""

    collective: Collective
    crosses_node: bool | None
    """Whether some group has devices of several nodes; None without a cluster."""
    time_s: float | None
    """On the wire, all its runs in a step; None without a timeline."""
    hidden_fraction: float | None
    """Of that time, while compute was at work."""

    def to_json(self) -> dict[str, Any]:
        one = self.collective
        said = (
            "kind", "axes", "dtype", "payload_bytes", "bytes_sent_per_device", "count_per_step", "count_known",
            "group_size", "module", "source", "op_name", "origin", "is_backward", "is_async", "in_branch",
        )  # fmt: skip
        return {
            **{name: plain(getattr(one, name)) for name in said},
            "count_by_stage": list(one.count_by_stage) or None,
            "num_arrays": len(one.parts),
            "stands_for": one.logical_kind if one.logical_kind != one.kind else None,
            "crosses_node": self.crosses_node,
            "time_s": self.time_s,
            "hidden_fraction": self.hidden_fraction,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Plain):
    """What `explain` found. Prints as tables, shows as HTML in a notebook, and is plain data with `to_json`."""

    devices: int
    mesh: Mapping[str, int]
    """Axis sizes in the mesh's order."""
    target: str
    """A cluster (`h100:8x8`) or the platform at hand (`cpu`)."""
    strategy: str
    memory: Memory
    collectives: tuple[Sent, ...]
    promise: MatchResult
    overlap: Overlap
    compute: Compute
    findings: tuple[Finding, ...]
    """What is costly and need not be."""
    compile_s: float
    compile_options: Mapping[str, Any]
    """XLA's options by which it was compiled, beside its own defaults."""
    fingerprint: str
    """Of the lowered program and its options: `meshpar train` prints the same where it runs the same."""
    notes: tuple[str, ...] = ()
    """What the reader of the numbers should know about the target."""
    stages: Stages | None = None
    """How stages share the work; None without them."""
    timeline: Timeline | None = dataclasses.field(default=None, repr=False)
    """The simulated step, to draw; not part of the JSON."""
    program: Program | None = dataclasses.field(default=None, repr=False, compare=False)
    """What was compiled; not part of the JSON."""
    derived = ("totals",)

    @property
    def totals(self) -> dict[str, dict[str, Total]]:
        """Collectives a step by axes and kind."""
        return census.totals(one.collective for one in self.collectives)

    @property
    def is_as_promised(self) -> bool:
        """Whether nothing is sent that the strategy did not promise.

        Of a model that lays no activations out this says: between modules they lie as the batch, and nothing is sent
        but parameters and gradients. It says nothing of `promise.unannotated_axes`.
        """
        return not self.promise.unexpected

    def to_json(self) -> dict[str, Any]:
        """As plain data; sizes in bytes, times in seconds."""
        return {"lint" if name == "findings" else name: value for name, value in super().to_json().items()}

    def __rich__(self) -> Any:
        from meshpar.inspect.render import as_rich

        return as_rich(self)

    def _repr_html_(self) -> str:
        from meshpar.inspect.render import as_html

        return as_html(self)

    def __repr__(self) -> str:
        verdict = "as promised" if self.is_as_promised else f"{len(self.promise.unexpected)} unexpected collectives"
        return f"<Report: {self.strategy} on {self.devices} devices, {self.target}, {verdict}>"

    def __str__(self) -> str:
        from meshpar.inspect.render import as_text

        return as_text(self)
