"""Fields of reports on compiled steps and functions: memory, collectives, compute and findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from meshpar.hardware.compile_target import KernelChoice
from meshpar.inspect import census
from meshpar.inspect.census import Collective, Total
from meshpar.inspect.kernels import KernelRow
from meshpar.inspect.lint import Finding
from meshpar.inspect.matching import MatchResult
from meshpar.inspect.memory import Contributor, Memory
from meshpar.inspect.program import Program
from meshpar.inspect.stage_summary import Stages
from meshpar.inspect.timeline.simulator import Timeline
from meshpar.inspect.timeline.step_prediction import Compute, Overlap
from meshpar.sharding.printing import Plain, plain
from meshpar.training.sharding_table import ShardingTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """A collective of the program, with its simulated duration and overlap."""

    collective: Collective
    crosses_node: bool | None
    """True if a device group spans nodes; None without a cluster."""
    time_s: float | None
    """Duration of all runs in a step; None without a timeline."""
    hidden_fraction: float | None
    """Fraction of `time_s` that is overlapped with compute."""

    def to_json(self) -> dict[str, Any]:
        collective = self.collective
        names = (
            "kind", "axes", "dtype", "payload_bytes", "bytes_sent_per_device", "count_per_step", "count_known",
            "group_size", "module", "source", "op_name", "origin", "is_backward", "is_async", "in_branch",
        )  # fmt: skip
        return {
            **{name: plain(getattr(collective, name)) for name in names},
            "count_by_stage": list(collective.count_by_stage) or None,
            "num_arrays": len(collective.parts),
            "stands_for": collective.logical_kind if collective.logical_kind != collective.kind else None,
            "crosses_node": self.crosses_node,
            "time_s": self.time_s,
            "hidden_fraction": self.hidden_fraction,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramData(Plain):
    """Fields of all reports."""

    devices: int
    mesh: Mapping[str, int]
    """Sizes of the mesh axes, in mesh order."""
    target: str
    """The cluster (`h100:8x8`), or the platform of the local devices (`cpu`)."""
    collectives: tuple[Sent, ...]
    overlap: Overlap
    compute: Compute
    findings: tuple[Finding, ...]
    """Findings of the lint rules, the most expensive first."""
    compile_s: float
    compile_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """XLA options that differ from the defaults of XLA."""
    fingerprint: str
    """Hash of the lowered program and its options. `meshpar train` prints it for the program that it runs."""
    notes: tuple[str, ...] = ()
    """Limitations of the numbers on this target."""
    timeline: Timeline | None = dataclasses.field(default=None, repr=False)
    """The simulated step or call, for plots. Not part of the JSON."""
    program: Program | None = dataclasses.field(default=None, repr=False, compare=False)
    """The compiled program. Not part of the JSON."""
    derived = ("totals",)

    @property
    def totals(self) -> dict[str, dict[str, Total]]:
        """Collectives per step or call, by axes and kind."""
        return census.totals(sent.collective for sent in self.collectives)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepData(ProgramData):
    """Fields of `Report`."""

    strategy: str
    memory: Memory
    matching: MatchResult
    kernels: Mapping[str, KernelChoice] = dataclasses.field(default_factory=dict)
    """Implementations that "auto" chose or the model names, by operation, such as `attention`."""
    kernel_list: tuple[KernelRow, ...] = ()
    """Kernels of a program for GPUs of the catalogue, merged by kind, implementation, dtypes and reason."""
    stages: Stages | None = None
    """Summary of the pipeline schedule; None without pipeline stages."""
    shardings: ShardingTable | None = dataclasses.field(default=None, repr=False, compare=False)
    """The sharding of the training state. Not part of the JSON."""
    unit: ClassVar[str] = "step"
    """Unit to which counts and times refer: a training step."""

    @property
    def is_as_expected(self) -> bool:
        """Whether the program has no unexpected collectives.

        Activations without constraints are expected to keep the sharding of the batch, so that only parameters and
        gradients are sent. Collectives over `matching.unannotated_axes` are not judged.
        """
        return not self.matching.unexpected

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, with sizes in bytes and times in seconds."""
        return {"lint" if name == "findings" else name: value for name, value in super().to_json().items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionMemory(Plain):
    """Memory of a compiled function, in bytes per device, as reported by the compiler."""

    argument_bytes: int
    output_bytes: int
    """Outputs that do not reuse a donated argument."""
    temporaries_bytes: int
    peak_bytes: int
    """Sum of argument, output and temporary bytes."""
    limit_bytes: int | None
    """Full memory of the GPU; None if the GPU is unknown."""
    fits: bool | None
    """Whether the peak is within the limit; None without a limit."""
    host_bytes: int
    """Temporaries in host memory; not included in the other numbers."""
    note: str
    """A warning for a program that fits but uses most of the memory."""
    largest: tuple[Contributor, ...]
    """The largest temporaries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionData(ProgramData):
    """Fields of `FunctionReport`.

    `compute` is for a call, and its model FLOPs count the matmuls of the traced function. `findings` come from
    the lint rules that need no strategy.
    """

    name: str
    memory: FunctionMemory
    unit: ClassVar[str] = "call"
    """Unit to which counts and times refer: a call of the function."""
