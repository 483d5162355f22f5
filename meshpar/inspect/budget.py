"""Budgets: saved communication, memory and compute of a step, compared with later programs.

A step exceeds its budget if the collectives of a kind and axes send more bytes or run more often, if the peak memory,
the FLOPs or the simulated step time is higher, or if it has more unexpected collectives. Small growth passes: up to a
relative tolerance, or up to `SLACK_BYTES` or `SLACK_COUNT`, so that adding a metric does not exceed the budget.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshpar.inspect.census import per_array
from meshpar.inspect.memory_timeline import group_of, memory_timeline
from meshpar.inspect.program import Program
from meshpar.inspect.program_digest import digest, module_digests, opcode_counts
from meshpar.inspect.render import Cell, Section, Style, Table, rich_of, short_source
from meshpar.inspect.report import Report
from meshpar.inspect.timeline.simulator import Timeline
from meshpar.sharding.errors import check_number, problem
from meshpar.sharding.host_resources import read_json, write_json
from meshpar.sharding.printing import Plain, flat, human_mesh, parsed
from meshpar.sharding.units import human_bytes, human_flops, human_time

TOLERANCE = 0.01
"""Growth up to this fraction of the saved value does not exceed the budget."""
SLACK_BYTES = 4096
"""Growth up to this many bytes does not exceed the budget, independent of the saved size."""
SLACK_COUNT = 2
"""Growth up to this many collectives per step does not exceed the budget, independent of the saved count."""
MAX_OPCODES = 4
"""Number of opcodes in the description of a changed program."""
PEAK_MEMORY = "peak memory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference(Plain):
    """A difference between a program and its budget."""

    quantity: str
    """`peak memory`, `all-gather over fsdp`, ..."""
    before: str
    """The saved value, with its unit."""
    after: str
    text: str
    """The difference as a sentence."""
    is_over: bool
    """True if the difference exceeds the budget."""
    where: str = ""
    """Module and source line of the collectives, arrays or instructions that changed most; empty if unknown."""

    @property
    def sentence(self) -> str:
        """The difference and its location."""
        return f"{self.text}, in {self.where}" if self.where else self.text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(Plain):
    """Communication, memory and compute of a step at the time of saving."""

    name: str
    """Name of the recipe."""
    target: str
    """The cluster (`h100:8x8`), or the platform of the local devices (`cpu`)."""
    mesh: Mapping[str, int]
    strategy: str
    totals: Mapping[str, Mapping[str, Mapping[str, float]]]
    """axes -> kind -> `count_per_step` and `bytes_sent_per_device`, as in a report's JSON."""
    peak_bytes: int
    jax_version: str
    """Version of jax. The compiled program depends on it."""
    tolerance: float = TOLERANCE
    flops_per_device: float | None = None
    step_s: float | None = None
    """Simulated step time; None without a cluster."""
    unexpected: int | None = None
    """Number of unexpected collectives."""
    kernels: Mapping[str, float] | None = None
    """Kind, implementation and dtypes of kernels -> executions per step; None without a cluster."""
    sources: Mapping[str, Mapping[str, Sequence[Any]]] = dataclasses.field(default_factory=dict)
    """Quantity -> module -> bytes, share of the executions per step, and source line.

    Bytes are sent per device (`all-gather over fsdp`) or live at the maximum of temporaries (`peak memory`)."""
    fingerprint: str = ""
    """Hash of the lowered program and its options."""
    digest: str = ""
    """Hash of the compiled program without names and source lines."""
    opcodes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Opcode -> number of instructions in the text of the compiled program."""
    modules: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    """Module -> number of instructions, and their hash."""
    arguments: Sequence[str] = ()
    """Arguments of `meshpar explain` that compile the program: the recipe and its options."""

    @staticmethod
    def of(report: Report, name: str, arguments: Sequence[str] = ()) -> Budget:
        """Return a budget with the values of a report."""
        kernels: dict[str, float] = {}
        for row in report.kernel_list:
            kernel = f"{row.kind} ({row.implementation}, {row.dtypes})"
            kernels[kernel] = kernels.get(kernel, 0) + row.count
        assert report.program is not None, "`explain` attaches the program"
        module = report.program.module
        return Budget(
            name=name,
            target=report.target,
            mesh=dict(report.mesh),
            strategy=report.strategy,
            totals=report.to_json()["totals"],
            peak_bytes=report.memory.peak_bytes,
            jax_version=importlib.metadata.version("jax"),
            flops_per_device=report.compute.flops_per_device,
            step_s=report.compute.predicted_step_s,
            unexpected=len(report.matching.unexpected),
            kernels=kernels or None,
            sources={**_sources(report), PEAK_MEMORY: _live_bytes(report.program, report.timeline)},
            fingerprint=report.fingerprint,
            digest=digest(module),
            opcodes=opcode_counts(module),
            modules=module_digests(module),
            arguments=tuple(arguments),
        )

    def save(self, path: str | Path) -> None:
        """Write the budget as JSON, to read with `load`. Raise `MeshparError` if the file cannot be written."""
        write_json(path, self.to_json(), "budget")

    @staticmethod
    def load(path: str | Path) -> Budget:
        """Read a budget from a JSON file. Raise `MeshparError` if the file is missing or not a budget."""
        where, fix = f"budget {path}", "save a budget with meshpar budget save RECIPE"
        data = read_json(path, where, fix)
        budget = parsed(Budget, data if isinstance(data, dict) else {}, where, fix)
        try:
            is_wrong = any(total.keys() != _NOTHING.keys() for total in flat(budget.totals).values())
        except AttributeError:  # not a mapping
            is_wrong = True
        if is_wrong:
            reason = f"each entry of `totals` must have {' and '.join(_NOTHING)}"
            raise problem(where, "read it", reason, fix, code="damaged-file")
        check_number(where, "0.01", positive=False, tolerance=budget.tolerance)
        return budget

    def check_comparable(self, where: str, *, name: str, target: str, mesh: Mapping[str, int]) -> None:
        """Check that the budget was saved for this recipe, target and mesh. Raise `MeshparError` if it was not."""
        for field, saved, actual in (
            ("recipe", self.name, name),
            ("target", self.target, target),
            ("mesh", human_mesh(self.mesh), human_mesh(mesh)),
        ):
            if saved != actual:
                requested, reason = f"apply it to {field} `{actual}`", f"it was saved for {field} `{saved}`"
                fix = f"use that {field}, or save a new budget with --save-budget"
                raise problem(f"budget {where}", requested, reason, fix, code="conflict")

    def differences(self, now: Budget) -> tuple[Difference, ...]:
        """Return the differences of a later program, `now`, from the budget, exceeded limits first."""
        differences = [*self._communication(now), *self._sizes(now), *self._other(now), *self._program(now)]
        return tuple(sorted(differences, key=lambda difference: not difference.is_over))

    def _communication(self, now: Budget) -> Iterator[Difference]:
        saved, later = flat(self.totals), flat(now.totals)
        for axes, kind in {**saved, **later}:
            before, after = (totals.get((axes, kind), _NOTHING) for totals in (saved, later))
            old, new = before["bytes_sent_per_device"], after["bytes_sent_per_device"]
            counts = before["count_per_step"], after["count_per_step"]
            is_more = self._is_over(*counts, slack=SLACK_COUNT)
            times, quantity = f"{counts[0]:,} → {counts[1]:,} per step", f"{kind} over {axes}"
            sent = f"{human_bytes(old)} → {human_bytes(new)} per device"
            if self._is_over(old, new) or self._is_over(new, old):
                text = f"{quantity} sends {'more' if new > old else 'less'}: {sent} ({times})"
                is_over = new > old or is_more
            elif counts[0] != counts[1]:
                often = "more" if counts[1] > counts[0] else "less"
                text, is_over = f"{quantity} runs {often} often: {times} ({sent})", is_more
            else:
                continue
            yield Difference(
                quantity=quantity,
                before=f"{human_bytes(old)} in {counts[0]:,}",
                after=f"{human_bytes(new)} in {counts[1]:,}",
                text=text,
                is_over=is_over,
                where=_most_changed(self.sources.get(quantity, {}), now.sources.get(quantity, {})),
            )

    def _sizes(self, now: Budget) -> Iterator[Difference]:
        for quantity, old, new, human, slack in (
            (PEAK_MEMORY, self.peak_bytes, now.peak_bytes, human_bytes, SLACK_BYTES),
            ("FLOPs per device", self.flops_per_device, now.flops_per_device, human_flops, 0),
            ("simulated step", self.step_s, now.step_s, human_time, 0),
            ("unexpected collectives", self.unexpected, now.unexpected, str, 0),
        ):
            if old is None or new is None:  # a budget of an earlier version, or of a program without a simulation
                continue
            if self._is_over(old, new, slack) or self._is_over(new, old, slack):
                text = f"{quantity}: {human(old)} → {human(new)}, {'higher' if new > old else 'lower'}"
                sources = [budget.sources[quantity] for budget in (self, now) if quantity in budget.sources]
                yield Difference(
                    quantity=quantity,
                    before=human(old),
                    after=human(new),
                    text=text,
                    is_over=new > old,
                    where=_most_changed(*sources) if len(sources) == 2 else "",
                )

    def _other(self, now: Budget) -> Iterator[Difference]:
        if self.kernels is not None and now.kernels is not None:
            for kernel in {**self.kernels, **now.kernels}:
                old, new = self.kernels.get(kernel, 0), now.kernels.get(kernel, 0)
                if old != new:
                    text = f"{kernel} runs {old:,.0f} → {new:,.0f} times per step"
                    counts = {"before": f"{old:,.0f} runs", "after": f"{new:,.0f} runs"}
                    yield Difference(quantity=kernel, text=text, is_over=False, **counts)
        for name, before, after in (
            ("strategy", self.strategy, now.strategy),
            ("jax", self.jax_version, now.jax_version),
        ):
            if before != after:
                text = f"{name} was {before} and is {after}"
                yield Difference(quantity=name, before=before, after=after, text=text, is_over=False)

    def _program(self, now: Budget) -> Iterator[Difference]:
        """Yield a difference if both the lowered and the compiled program differ.

        XLA compiles some changes to the same program, and compiles the same program differently on other processors.
        """
        if not self.digest or self.fingerprint == now.fingerprint or self.digest == now.digest:
            return
        changes = collections.Counter(now.opcodes)
        changes.subtract(self.opcodes)
        most = sorted(filter(changes.get, changes), key=lambda opcode: -abs(changes[opcode]))[:MAX_OPCODES]
        before, after = (
            ", ".join(f"{counts.get(opcode, 0):,} {opcode}" for opcode in most)
            for counts in (self.opcodes, now.opcodes)
        )
        if not most:
            before = f"{sum(self.opcodes.values()):,} instructions"
            after = "the same opcodes with other constants, shapes, operands or order"
        yield Difference(
            quantity="program",
            before=before,
            after=after,
            text=f"program has changed: {before} → {after}",
            is_over=False,
            where=self._most_changed_module(now),
        )

    def _most_changed_module(self, now: Budget) -> str:
        """Return the module whose number of instructions changed most, or the innermost one with other instructions."""
        nothing, changes = (0, ""), dict[str, tuple[int, int]]()
        for module in {**self.modules, **now.modules}:
            (old_count, old_hash), (count, new_hash) = (b.modules.get(module, nothing) for b in (self, now))
            if module and old_hash != new_hash:
                changes[module] = abs(count - old_count), module.count("/")
        return max(changes, key=changes.__getitem__, default="")

    def _is_over(self, limit: float, value: float, slack: float = SLACK_BYTES) -> bool:
        return value > limit * (1 + self.tolerance) and value - limit > slack


_NOTHING: Mapping[str, float] = {"count_per_step": 0, "bytes_sent_per_device": 0.0}


def _sources(report: Report) -> dict[str, dict[str, list[Any]]]:
    sources: dict[str, dict[str, list[Any]]] = {}
    for collective in (sent.collective for sent in report.collectives):
        modules = sources.setdefault(f"{collective.kind} over {collective.axes_label}", {})
        for array in per_array(collective):  # XLA combines arrays of several modules
            entry = modules.setdefault(array.module, [0.0, 0.0, short_source(array.source)])
            entry[0] += array.bytes_sent_per_step
            entry[1] += array.count_per_step / len(collective.parts or (array,))
    for entry in flat(sources).values():
        entry[1] = round(entry[1], 3)
    return sources


def _live_bytes(program: Program, timeline: Timeline | None) -> dict[str, list[Any]]:
    """Return the bytes of each module at the peak, with the source line of its largest array."""
    live, lines = memory_timeline(program, timeline), dict[str, str]()
    for array in live.arrays:
        lines.setdefault(group_of(array.module), short_source(array.source))
    temporaries = {
        module: [float(nbytes[live.peak]), 0, lines.get(module, "")] for module, nbytes in live.live_bytes.items()
    }
    arguments = {"state and batch": [float(live.argument_bytes), 0, ""]}
    return arguments | {module: entry for module, entry in temporaries.items() if entry[0]}


def _most_changed(before: Mapping[str, Sequence[Any]], after: Mapping[str, Sequence[Any]]) -> str:
    """Return the module and source line with the largest share in the change of bytes, or of executions."""
    nothing = (0.0, 0, "")
    modules = [*{**before, **after}]
    changes = {}
    for module in modules:
        old, new = before.get(module, nothing), after.get(module, nothing)
        changes[module] = (new[0] - old[0], new[1] - old[1])
    is_less = (sum(change[0] for change in changes.values()), sum(change[1] for change in changes.values())) < (0, 0)
    module = (min if is_less else max)(modules, key=changes.__getitem__, default="")
    _, _, source = after.get(module) or before.get(module) or nothing
    return " · ".join(filter(None, (module, source)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetCheck(Plain):
    """The comparison of a program with its saved budget."""

    file: str
    """File of the budget."""
    program: str
    """Recipe and target: `llama3_8b on h100:8x8`. The file if it is not a budget."""
    differences: tuple[Difference, ...] = ()
    error: str = ""
    """Reason why the program was not compared: the file is not a budget, or the program does not compile."""
    derived = ("is_over",)

    @property
    def is_over(self) -> bool:
        return any(difference.is_over for difference in self.differences)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetChecks(Plain):
    """Comparisons of programs with their budgets. Prints as a table."""

    checks: tuple[BudgetCheck, ...]
    derived = ("is_over",)

    @property
    def is_over(self) -> bool:
        """Whether any program exceeds its budget."""
        return any(check.is_over for check in self.checks)

    @property
    def verdict(self) -> str:
        """The number of programs that exceed the budget, as a sentence."""
        over, failed = sum(check.is_over for check in self.checks), sum(bool(check.error) for check in self.checks)
        text = f"{over} of {len(self.checks)} programs exceed{'s' * (over == 1)} the budget"
        return text + f", {failed} could not be compared" * bool(failed)

    @property
    def markdown(self) -> str:
        """The changes as a Markdown table, for comments on pull requests and job summaries."""
        rows = [row for check in self.checks for row in _rows(check)]
        lines = [f"**meshpar budgets: {self.verdict}.**", ""]
        if rows:
            lines += ["| " + " | ".join(_COLUMNS) + " |", "|" + " --- |" * len(_COLUMNS)]
            lines += ["| " + " | ".join(_markdown_cell(text) for text in row) + " |" for row in rows] + [""]
        if same := [check.program for check in self.checks if not check.differences and not check.error]:
            lines += [f"Unchanged: {', '.join(same)}.", ""]
        return "\n".join(lines)

    def __rich__(self) -> Any:
        styles: dict[str, Style] = {"✘": "bad", "·": ""}
        rows = [
            [Cell(text, styles[row[1][0]] if column == 1 else "") for column, text in enumerate(row)]
            for check in self.checks
            for row in _rows(check) or [(check.program, "· unchanged", "", "", "")]
        ]
        table = Table(columns=_COLUMNS, rows=rows, most=len(rows))
        bad = self.is_over or any(check.error for check in self.checks)
        return rich_of([Section(title="Budgets", verdict=Cell(self.verdict, "bad" if bad else "good"), parts=(table,))])


_COLUMNS = ("program", "changed", "budget", "now", "where")


def _rows(check: BudgetCheck) -> list[tuple[str, str, str, str, str]]:
    if check.error:
        return [(check.program, "✘ not compared", "", "", check.error)]
    return [
        (check.program, f"{'✘' if d.is_over else '·'} {d.quantity}", d.before, d.after, d.where)
        for d in check.differences
    ]


def _markdown_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
