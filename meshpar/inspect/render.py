"""Renderers of a report: tables in a terminal, plain text, and HTML for notebooks and files.

    Report ─► sections of plain cells ─► rich | HTML

Cells are plain text, and each renderer escapes them. Paths and names of a program are never interpreted as markup.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

from meshpar.inspect.matching import MatchEntry, MatchResult, Unexpected
from meshpar.inspect.memory import Memory
from meshpar.inspect.report import FunctionMemory, FunctionReport, Report, Sent
from meshpar.sharding.printing import flat, human_mesh
from meshpar.sharding.units import human_bytes, human_flops, human_time

Style = Literal["", "good", "bad", "warn", "faint", "strong"]
AnyReport: TypeAlias = Report | FunctionReport

MOST_ROWS = 20
"""Maximum number of rows in a table. Text counts the others in one line, HTML folds them."""
TEXT_COLUMNS = 160
"""Width of a report as plain text."""
ROOMY_COLUMNS = 130
"""Minimum width for optional columns."""
SHORT_CELL = 22
"""Cells up to this length are not wrapped."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table, or a line of text."""

    text: str
    style: Style = ""
    share: float | None = None
    """Length of the bar that HTML draws, between 0 and 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table as plain cells."""

    columns: tuple[str, ...]
    """Headings. A column ending with `>` is right-aligned, a column ending with `?` is omitted in narrow terminals."""
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    rest: str = "more"
    """Description of omitted rows, printed after their number."""
    most: int = MOST_ROWS
    """Maximum number of rows that are shown."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.rstrip(">?") for name in self.columns)

    @property
    def are_numbers(self) -> tuple[bool, ...]:
        return tuple(name.endswith(">") for name in self.columns)

    def without_optional(self) -> Table:
        required = [i for i, name in enumerate(self.columns) if not name.endswith("?")]
        rows = tuple(tuple(row[i] for i in required) for row in self.rows)
        return dataclasses.replace(self, columns=tuple(self.columns[i] for i in required), rows=rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A titled part of a report."""

    title: str
    verdict: Cell | None = None
    parts: tuple[Table | Cell, ...] = ()


# ---- Formatting ------------------------------------------------------------------------------------------------------


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{share:.0%}" if share == 0 or share >= 0.01 else "< 1%"


def place(source: str) -> str:
    """Return `file:line` relative to the working directory, or with the last two path components elsewhere.

    Lines of notebook cells become `cell:line`.
    """
    path, colon, line = source.rpartition(":")
    if not colon:
        path, line = source, ""
    if "ipykernel_" in path:  # the temporary file of a notebook cell
        return "cell" + colon + line
    cwd = os.getcwd() + os.sep
    short = path.removeprefix(cwd) if path.startswith(cwd) else "/".join(PurePath(path).parts[-2:])
    return short + colon + line


def _where(module: str, source: str) -> str:
    return " · ".join(filter(None, (module or "–", place(source))))


# ---- Contents --------------------------------------------------------------------------------------------------------


def sections(report: AnyReport) -> tuple[Section, ...]:
    """Return the report as titled tables of plain cells."""
    first = (
        (_memory(report), _promise(report), _stages(report))
        if isinstance(report, Report)
        else (_program_memory(report),)
    )
    others = (_collectives(report), _overlap(report), _compute(report), _lint(report), _notes(report))
    return tuple(section for section in (*first, *others) if section is not None)


INVALIDATING = ("wide-compute",)
"""Lint rules that the headline repeats, because its time and utilisation are wrong for the requested precision."""


def headline(report: AnyReport) -> tuple[Cell, ...]:
    """Return one line about the strategy or function and the target, and one per verdict."""
    devices = f"{report.devices:,} device" + "s" * (report.devices != 1)
    speed = () if report.compute.predicted_step_s is None else _speed(report)
    name = report.strategy if isinstance(report, Report) else f"`{report.name}`"
    return (
        Cell(f"{name} on {human_mesh(report.mesh)} · {report.target} · {devices}", "strong"),
        *((_promise_verdict(report.promise),) if isinstance(report, Report) else ()),
        *((_memory_verdict(report.memory),) if report.memory.fits is not None else ()),
        *speed,
    )


def _speed(report: AnyReport) -> tuple[Cell, ...]:
    """Return the predicted step time in one line, followed by the findings that invalidate it."""
    compute, hidden = report.compute, report.overlap.hidden_fraction
    assert compute.predicted_step_s is not None
    phrases = [f"a {report.unit} takes {human_time(compute.predicted_step_s)}", f"bound by {compute.bound}"]
    if compute.bracket is not None:
        # The lower end assumes that all communication is hidden, so the simulated schedule is not the best case.
        low_s, high_s = compute.bracket.low_s, compute.bracket.high_s
        phrases[0] = f"a {report.unit} takes {human_time(low_s)} to {human_time(high_s)}"
        if low_s <= compute.predicted_step_s <= high_s:  # measured rates can move the range past it
            phrases.insert(1, f"{human_time(compute.predicted_step_s)} in the simulated schedule")
    if compute.utilisation is not None:
        phrases.append(f"{compute.utilisation:.0%} model FLOP utilisation with {compute.rates}")
    if hidden is not None:
        phrases.append(f"{_percent(hidden)} of communication hidden")
    wrong = [finding for finding in report.findings if finding.rule in INVALIDATING]
    reason = "time and utilisation are not for the requested precision"
    return (
        Cell(", ".join(phrases), "warn" if wrong else ""),
        *(Cell(f"✘ {reason}: {finding.what}", "bad") for finding in wrong),
    )


def _memory_verdict(memory: Memory | FunctionMemory) -> Cell:
    peak = human_bytes(memory.peak_bytes)
    if memory.fits is None or memory.limit_bytes is None:
        return Cell(f"peak {peak} per device; the memory limit of this device is unknown")
    share = f"{peak} of {human_bytes(memory.limit_bytes)} ({_percent(memory.peak_bytes / memory.limit_bytes)})"
    if not memory.fits:
        return Cell(f"✘ does not fit: {share}", "bad")
    return Cell(f"✔ fits: {share}", "warn" if memory.note else "good")


def _memory(report: Report) -> Section:
    memory = report.memory
    sizes: list[tuple[str, int, Style]] = [
        ("parameters", memory.params_bytes, ""),
        ("optimizer state", memory.optimizer_bytes, ""),
        ("other state", memory.other_bytes, ""),
        ("batch", memory.batch_bytes, ""),
        ("temporaries", memory.temporaries_bytes, ""),
        ("  of these, gradients", memory.gradients_bytes, "faint"),
        ("outputs", memory.output_bytes, ""),
        ("peak", memory.peak_bytes, "strong"),
    ]
    remedies = (_remedies(memory),) if memory.remedies else ()
    return _memory_section(memory, sizes, remedies)


def _program_memory(report: FunctionReport) -> Section:
    memory = report.memory
    sizes: list[tuple[str, int, Style]] = [
        ("arguments", memory.argument_bytes, ""),
        ("temporaries", memory.temporaries_bytes, ""),
        ("outputs", memory.output_bytes, ""),
        ("peak", memory.peak_bytes, "strong"),
    ]
    return _memory_section(memory, sizes)


def _memory_section(
    memory: Memory | FunctionMemory, sizes: Iterable[tuple[str, int, Style]], remedies: Sequence[Table] = ()
) -> Section:
    total = memory.limit_bytes or memory.peak_bytes or 1
    head = "of the limit>" if memory.limit_bytes else "of the peak>"
    rows = tuple(
        (Cell(name, style), Cell(human_bytes(size), style), Cell(_percent(size / total), style, share=size / total))
        for name, size, style in sizes
    )
    parts: list[Table | Cell] = [Table(columns=("per device", "bytes>", head), rows=rows)]
    if memory.host_bytes:
        parts.append(Cell(f"plus {human_bytes(memory.host_bytes)} in pinned host memory"))
    if memory.note:
        parts.append(Cell(memory.note, "warn"))
    parts.extend(remedies)
    if memory.largest:
        parts.append(_largest(memory))
    return Section(title="Memory", parts=tuple(parts))


def _remedies(memory: Memory) -> Table:
    rows = tuple(
        (
            Cell("✔" if remedy.fits else "✘", "good" if remedy.fits else "bad"),
            Cell(remedy.change, "strong" if remedy.fits else ""),
            Cell("–" if remedy.peak_bytes is None else human_bytes(remedy.peak_bytes)),
            Cell(remedy.reason, "faint"),
        )
        for remedy in memory.remedies
    )
    return Table(title="Changes that save memory", columns=("", "change", "peak>", "why not compiled"), rows=rows)


def _largest(memory: Memory | FunctionMemory) -> Table:
    maximum = max(item.nbytes for item in memory.largest)
    rows = tuple(
        (
            Cell(human_bytes(item.nbytes), share=item.nbytes / (maximum or 1)),
            Cell(item.what),
            Cell(_where(item.module, item.source)),
            Cell(item.shape + (f" ×{item.count}" if item.count > 1 else ""), "faint"),
        )
        for item in memory.largest[:8]
    )
    return Table(title="Largest", columns=("bytes>", "kind", "where", "largest array?"), rows=rows)


def _promise_verdict(promise: MatchResult) -> Cell:
    counts = {"unexpected": len(promise.unexpected), "missing": len(promise.missing)}
    wrong = [f"{count} {name} collective{'s' * (count > 1)}" for name, count in counts.items() if count]
    if wrong:
        return Cell("✘ " + ", ".join(wrong), "bad" if promise.unexpected else "warn")
    if promise.unannotated_axes:
        axes = ", ".join(f"`{axis}`" for axis in promise.unannotated_axes)
        return Cell(f"✔ collectives match the strategy; those over {axes} cannot be checked", "warn")
    return Cell("✔ collectives match the strategy", "good")


def _promise(report: Report) -> Section:
    promise = report.promise
    parts: list[Table | Cell] = []
    if promise.unexpected:
        parts.append(_unexpected(promise.unexpected))
    if promise.missing:
        parts.append(_lines("Missing", promise.missing, "bad"))
    if promise.kept:
        parts.append(_lines("Found", promise.kept, ""))
    if promise.kernels:
        parts.append(_lines("From kernels", promise.kernels, ""))
    if promise.unannotated_axes:
        axes = ", ".join(f"`{axis}`" for axis in promise.unannotated_axes)
        parts.append(
            Cell(
                f"Rules shard parameters over {axes}, but activations have no sharding over these axes, so their "
                "collectives cannot be checked. To check them, name the dims of parameters with mp.names(...), add "
                "Rules(activations=...), and add mp.tensor_parallel() to the strategy.",
                "warn",
            )
        )
        if promise.untold:
            parts.append(_lines(f"Over {axes}", promise.untold, ""))
    if promise.small:
        sent = human_bytes(sum(entry.found_bytes for entry in promise.small))
        count = sum(entry.found_count for entry in promise.small)
        parts.append(Cell(f"Losses, metrics, norms etc.: {count:,} small arrays, {sent} in total.", "faint"))
    if not report.collectives:
        parts.append(Cell("The program has no collectives."))
    return Section(title="Expected collectives", parts=tuple(parts))


def _stages(report: Report) -> Section | None:
    stages = report.stages
    if stages is None:
        return None
    verdict = f"{stages.schedule}: {stages.stages} stages, {stages.microbatches} microbatches, {stages.ticks} ticks"
    numbers = {
        "bubble of the schedule, a single step": f"{stages.bubble_fraction:.1%}",
        "bubble of the schedule, from a stage's first op to its last": f"{stages.span_bubble_fraction:.1%}",
    }
    if stages.waiting_fraction is not None:
        numbers["waiting for other stages, fraction of the predicted step"] = f"{stages.waiting_fraction:.1%}"
    numbers["peak number of saved chunk activations per stage"] = ", ".join(map(str, stages.peak_activations))
    messages = f"{stages.messages:,} of {human_bytes(stages.message_bytes)} per device"
    numbers["messages between stages"] = messages
    rows = tuple((Cell(name), Cell(number)) for name, number in numbers.items())
    parts = [Table(columns=("", "per step"), rows=rows)]
    if stages.gathering:
        choices = tuple(
            (
                Cell(f"once per {option.gather}" + " ✔" * is_used, "strong" if is_used else ""),
                Cell(human_bytes(option.sent_bytes)),
                Cell(human_bytes(option.held_bytes)),
            )
            for option in stages.gathering
            for is_used in [option.gather == stages.gather]
        )
        columns = ("gather", "sent per step>", "gathered weights>")
        parts.append(Table(title="Gathering of weights", columns=columns, rows=choices))
    return Section(title="Stages", verdict=Cell(verdict), parts=tuple(parts))


def unexpected_text(collective: Unexpected) -> str:
    """Return a line about an unexpected collective."""
    sent = f"{human_bytes(collective.bytes_sent_per_device)} in {collective.count_per_step:,} per step"
    where = _where(collective.module, collective.source)
    operation = f"{collective.kind} over {'*'.join(collective.axes)} of {collective.tensor}"
    return f"{operation}, {sent}, in {where}: {collective.fix}"


def _unexpected(collectives: Sequence[Unexpected]) -> Table:
    rows = tuple(
        (
            Cell(f"{collective.kind} over {'*'.join(collective.axes)}", "bad"),
            Cell(f"{human_bytes(collective.bytes_sent_per_device)} in {collective.count_per_step:,}"),
            Cell(
                f"{collective.tensor} in {_where(collective.module, collective.source)}"
                + (f" ({collective.operation})" if collective.operation else "")
                + f", in {collective.layers} layers" * (collective.layers > 1)
            ),
            Cell(fix),
        )
        for collective, fix in zip(collectives, _once(c.fix for c in collectives), strict=True)
    )
    columns = ("collective", "sent per step>", "tensor and source line", "suggested fix")
    return Table(title="Unexpected", columns=columns, rows=rows, rest="more, smaller")


def _once(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, with repetitions replaced by "as above"."""
    seen: set[str] = set()
    for text in texts:
        yield "as above" if text in seen else text
        seen.add(text)


def _lines(title: str, lines: Sequence[MatchEntry], style: Style) -> Table:
    rows = tuple(
        (
            Cell(entry.role, style),
            Cell(entry.kind + (f", lowered as {entry.lowered_as}" if entry.lowered_as else "")),
            Cell("*".join(entry.axes)),
            Cell(" to ".join(f"{count:,}" for count in dict.fromkeys(entry.count))),
            Cell(f"{entry.found_count:,}", "" if entry.count[0] <= entry.found_count <= entry.count[1] else "bad"),
            Cell(human_bytes(entry.bytes_sent_per_device)),
            Cell(human_bytes(entry.found_bytes)),
            Cell(
                ", ".join(entry.tensors[:2])
                + (f" and {len(entry.tensors) - 2} more" if len(entry.tensors) > 2 else ""),
                "faint",
            ),
        )
        for entry in lines
    )
    columns = ("purpose", "kind", "axes", "expected arrays>", "found>", "expected bytes>", "found>", "tensors?")
    return Table(title=title, columns=columns, rows=rows)


def _collectives(report: AnyReport) -> Section | None:
    if not report.collectives:
        return None
    sent = sum(item.collective.bytes_sent_per_step for item in report.collectives)
    runs = sum(item.collective.count_per_step for item in report.collectives)
    verdict = Cell(
        f"each device sends {human_bytes(sent)} per {report.unit}, in {runs:,} collective" + "s" * (runs != 1)
    )
    return Section(title="Collectives", verdict=verdict, parts=(_totals(report), _groups(report)))


def _totals(report: AnyReport) -> Table:
    totals = flat(report.totals)
    maximum = max(total.bytes_sent_per_device for total in totals.values()) or 1
    crossing = {item.collective.axes_label for item in report.collectives if item.crosses_node}
    has_nodes = any(item.crosses_node is not None for item in report.collectives)
    rows = tuple(
        (
            Cell(axes, "strong"),
            Cell(kind),
            Cell(f"{total.count_per_step:,}"),
            Cell(human_bytes(total.bytes_sent_per_device), share=total.bytes_sent_per_device / maximum),
            *((Cell("across nodes" if axes in crossing else "within a node"),) if has_nodes else ()),
        )
        for (axes, kind), total in sorted(totals.items(), key=lambda item: -item[1].bytes_sent_per_device)
    )
    columns = (
        "axes",
        "kind",
        f"runs per {report.unit}>",
        f"sent per {report.unit}>",
        *(("where",) if has_nodes else ()),
    )
    return Table(title="Totals", columns=columns, rows=rows)


def _groups(report: AnyReport) -> Table:
    """Return a row for all collectives of a kind from the same source line, the most expensive first."""
    groups: dict[tuple[Any, ...], list[Sent]] = {}
    for item in report.collectives:
        c = item.collective
        key = (c.kind, c.axes, c.dtype, c.module, c.source, c.is_backward, c.origin, c.logical_kind)
        groups.setdefault(key, []).append(item)
    timed = any(item.time_s is not None for item in report.collectives)

    def cost(members: Sequence[Sent]) -> tuple[float, float]:
        return sum(m.time_s or 0.0 for m in members), sum(m.collective.bytes_sent_per_step for m in members)

    ordered = sorted(groups.values(), key=cost, reverse=True)
    maximum = max(cost(members)[1] for members in ordered) or 1
    rows = []
    for members in ordered:
        c = members[0].collective
        time_s, nbytes = cost(members)
        hidden_s = sum((m.time_s or 0.0) * (m.hidden_fraction or 0.0) for m in members)
        arrays = sum(len(m.collective.parts) for m in members)
        runs = sum(m.collective.count_per_step for m in members)
        rows.append(
            (
                Cell(c.kind + (f" (a {c.logical_kind})" if c.logical_kind != c.kind else "")),
                Cell(c.axes_label),
                Cell(_where(c.module, c.source) + ("" if c.origin == "partitioner" else " · kernel")),
                Cell("backward" if c.is_backward else "forward", "faint"),
                Cell(f"{c.dtype} ×{arrays}" if arrays > 1 else c.dtype),
                Cell(f"{runs:,}" + ("" if c.count_known else "+")),
                Cell(human_bytes(nbytes), share=nbytes / maximum),
                *((Cell(human_time(time_s)), Cell(_percent(hidden_s / time_s if time_s else None))) if timed else ()),
            )
        )
    columns = ("kind", "axes", "where", "pass?", "arrays?", "runs>", "sent>", *(("time>", "hidden>") if timed else ()))
    return Table(title="By source line", columns=columns, rows=tuple(rows), rest="more, smaller")


def _overlap(report: AnyReport) -> Section | None:
    overlap = report.overlap
    if overlap.hidden_fraction is None:
        return None
    waits = report.compute.exposed_s
    verdict = Cell(f"{_percent(overlap.hidden_fraction)} of the communication time is overlapped with compute")
    exposed = Table(
        title="Not overlapped",
        columns=("kind", "axes", "where", "exposed>", "overlapped with"),
        rows=tuple(
            (
                Cell(item.collective.kind, "warn"),
                Cell(item.collective.axes_label),
                Cell(_where(item.collective.module, item.collective.source)),
                Cell(human_time(item.exposed_s)),
                Cell("small kernels only" if item.cover == "kernels" else item.cover, "faint"),
            )
            for item in overlap.exposed
        ),
        most=8,
    )
    per_axis = Table(
        columns=("axes", "communication>", "hidden>", "exposed>"),
        rows=tuple(
            (
                Cell(axes, "strong"),
                Cell(human_time(report.compute.network_s.get(axes, 0.0))),
                Cell(_percent(share), share=share),
                Cell(human_time(waits.get(axes, 0.0))),
            )
            for axes, share in sorted(overlap.per_axis.items(), key=lambda item: -waits.get(item[0], 0.0))
        ),
    )
    return Section(title="Overlap", verdict=verdict, parts=((exposed,) if exposed.rows else ()) + (per_axis,))


def _compute(report: AnyReport) -> Section:
    compute = report.compute
    rows = [(Cell("in the program"), Cell(human_flops(compute.flops_per_device)), Cell(""))]
    if compute.model_flops_per_device is not None:
        ratio = "" if compute.ratio is None else f"the program has {compute.ratio:.2f}× as many"
        rows.append((Cell("in the model"), Cell(human_flops(compute.model_flops_per_device)), Cell(ratio, "faint")))
    parts: list[Table | Cell] = [
        Table(columns=(f"FLOPs per device and {report.unit}", "number>", ""), rows=tuple(rows))
    ]
    if compute.library_calls:
        calls = tuple((Cell(target), Cell(f"{times:,}")) for target, times in compute.library_calls.items())
        parts.append(Table(columns=("library kernels", f"calls per {report.unit}>"), rows=calls))
    if compute.predicted_step_s is not None:
        parts.append(_step_time(report))
    if compute.bracket is not None:
        sources = "; ".join(compute.bracket.sources)
        low, high = human_time(compute.bracket.low_s), human_time(compute.bracket.high_s)
        parts.append(Cell(f"· {low} with full overlap, {high} with no overlap. {sources}", "faint"))
    return Section(title="Compute", parts=tuple(parts))


def _step_time(report: AnyReport) -> Table:
    compute = report.compute
    step_s = compute.predicted_step_s or 1.0
    times = {"kernels bound by FLOPs": compute.compute_s or 0.0, "kernels bound by memory": compute.memory_s or 0.0}
    times |= {} if compute.launch_s is None else {"launch overhead": compute.launch_s}
    times |= {f"exposed communication over {axes}": time_s for axes, time_s in compute.exposed_s.items()}
    times |= {} if compute.bubble_s is None else {"pipeline bubble": compute.bubble_s}
    rows = tuple(
        (Cell(name), Cell(human_time(time_s)), Cell(_percent(time_s / step_s), share=time_s / step_s))
        for name, time_s in sorted(times.items(), key=lambda item: -item[1])
    )
    return Table(columns=(f"{report.unit} time by cause", "time>", f"of the {report.unit}>"), rows=rows)


def _lint(report: AnyReport) -> Section | None:
    if not report.findings:
        return None
    rows = tuple(
        (
            Cell(finding.rule, "warn"),
            Cell(human_bytes(finding.nbytes)),
            Cell(
                f"{finding.what} in {_where(finding.module, finding.source)}"
                + f", {finding.count} times" * (finding.count > 1)
            ),
            Cell(fix),
        )
        for finding, fix in zip(report.findings, _once(f.fix for f in report.findings), strict=True)
    )
    verdict = Cell(f"{len(rows)} finding" + "s" * (len(rows) > 1), "warn")
    columns = ("rule", "cost>", "finding", "suggested fix")
    return Section(title="Lint", verdict=verdict, parts=(Table(columns=columns, rows=rows),))


def _notes(report: AnyReport) -> Section:
    notes = dict.fromkeys([*report.notes, *filter(None, [report.overlap.reason]), *report.compute.notes])
    options = ", ".join(f"{name}={json.dumps(value)}" for name, value in report.compile_options.items())
    compiled = f"program {report.fingerprint}, compiled in {human_time(report.compile_s)}"
    compiled += f" with {options}" * bool(options)
    return Section(title="Notes", parts=tuple(Cell(f"· {note}", "faint") for note in (*notes, compiled)))


# ---- Terminal --------------------------------------------------------------------------------------------------------

_RICH: Mapping[Style, str] = {
    "": "", "good": "green", "bad": "bold red", "warn": "yellow", "faint": "dim", "strong": "bold"
}  # fmt: skip


def as_rich(report: AnyReport) -> Any:
    """Return the report as a renderable of rich."""
    from rich.console import Group

    return Group(*_rich_parts(headline(report), sections(report)))


def as_text(report: AnyReport) -> str:
    """Return the report as plain text, 160 columns wide."""
    return text_of(as_rich(report))


def text_of(renderable: Any, columns: int = TEXT_COLUMNS) -> str:
    """Return the text that rich prints, without colours."""
    from rich.console import Console

    console = Console(width=columns, color_system=None, force_terminal=False, force_jupyter=False, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def rich_of(parts: Iterable[Section]) -> Any:
    """Return sections as a renderable of rich."""
    from rich.console import Group

    return Group(*_rich_parts((), tuple(parts)))


def _rich_parts(head: Sequence[Cell], parts: Sequence[Section]) -> Iterator[Any]:
    from rich.padding import Padding

    yield from (_rich_text(cell) for cell in head)
    needs_gap = bool(head)
    for section in parts:
        if needs_gap:
            yield ""
        yield _rich_title(section)
        for part in section.parts:
            yield Padding(_rich_text(part) if isinstance(part, Cell) else _Fitted(part), (0, 0, 0, 2), expand=False)
            # A table ends with an empty line, unless its caption counts further rows.
            needs_gap = isinstance(part, Cell) or len(part.rows) > part.most


def _rich_title(section: Section) -> Any:
    from rich.text import Text

    title = Text(section.title.upper(), style="bold cyan")
    if section.verdict is not None:
        title.append("  ")
        title.append_text(_rich_text(section.verdict))
    return title


@dataclasses.dataclass(frozen=True)
class _Fitted:
    """A table without its optional columns in a narrow terminal."""

    table: Table

    def _fitted(self, options: Any) -> Any:
        return _rich_table(self.table if options.max_width >= ROOMY_COLUMNS else self.table.without_optional())

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield self._fitted(options)

    def __rich_measure__(self, console: Any, options: Any) -> Any:
        from rich.measure import Measurement

        return Measurement.get(console, options, self._fitted(options))


def _rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(
        box=box.SIMPLE_HEAD,
        title=Text(table.title, style="bold") if table.title else None,
        title_justify="left",
        pad_edge=False,
        header_style="dim",
    )
    shown = table.rows[: table.most]
    for i, (name, right) in enumerate(zip(table.names, table.are_numbers, strict=True)):
        no_wrap = right or max((len(row[i].text) for row in shown), default=0) <= SHORT_CELL
        drawn.add_column(Text(name), justify="right" if right else "left", no_wrap=no_wrap, overflow="fold")
    for row in shown:
        drawn.add_row(*map(_rich_text, row))
    num_hidden = len(table.rows) - table.most
    if num_hidden > 0:
        drawn.caption, drawn.caption_justify = Text(f"and {num_hidden:,} {table.rest}", style="dim"), "left"
    return drawn


def _rich_text(cell: Cell) -> Any:
    from rich.text import Text

    return Text(_printable(cell.text), style=_RICH[cell.style], overflow="fold")


def _printable(text: str) -> str:
    """Return the text with control characters replaced."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else "�" for c in text)


# ---- HTML ------------------------------------------------------------------------------------------------------------

# Colours inherit from the surrounding page, so the report is readable on light and dark backgrounds.
_CSS = """
.meshpar{font:13px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif;max-width:1200px;color:inherit}
.meshpar h2{font-size:15px;margin:1.4em 0 .3em;font-weight:650}
.meshpar h2 span{font-weight:400;margin-left:.6em}
.meshpar h3{font-size:13px;margin:.9em 0 .2em;font-weight:600}
.meshpar p{margin:.2em 0}
.meshpar .scroll{overflow-x:auto}
.meshpar table{border-collapse:collapse;margin:.2em 0 .4em;background:none;color:inherit}
.meshpar th,.meshpar td{text-align:left;vertical-align:top;padding:.22em .8em .22em 0;border:0;
background-color:transparent;overflow-wrap:anywhere;color:inherit}
.meshpar th{font-weight:500;opacity:.65;border-bottom:1px solid rgba(128,128,128,.5)}
.meshpar tr{background:none}
.meshpar tbody tr+tr td{border-top:1px solid rgba(128,128,128,.18)}
.meshpar .n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.meshpar .bar{background-image:linear-gradient(rgba(66,133,220,.35),rgba(66,133,220,.35));background-repeat:no-repeat;
background-position:left center;background-origin:content-box}
.meshpar .good{color:#2e9e58}.meshpar .bad{color:#e0483d}.meshpar .warn{color:#c8860b}
.meshpar .faint{opacity:.65}.meshpar .strong{font-weight:650}
.meshpar summary{cursor:pointer;opacity:.75}
.meshpar img{max-width:min(100%,900px);max-height:480px;background:#fff;border-radius:6px;margin:.4em 0}
"""
_PAGE_CSS = ":root{color-scheme:light dark}body{margin:2em auto;padding:0 1.2em;max-width:1200px}"


def as_html(report: AnyReport) -> str:
    """Return the report as a self-contained HTML fragment, for notebooks."""
    return html_of(headline(report), sections(report))


def as_page(
    report: Report, *, title: str, pictures: Mapping[str, str] | None = None, more: Iterable[Section] = ()
) -> str:
    """Return the report as a self-contained HTML page."""
    body = html_of(headline(report), (*sections(report), *more), pictures or {})
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escaped(title)}</title><style>{_PAGE_CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def html_of(head: Sequence[Cell], parts: Iterable[Section], pictures: Mapping[str, str] | None = None) -> str:
    """Return cells, SVG pictures by caption, and sections as an HTML fragment."""
    images = [f"<h3>{_escaped(caption)}</h3>{_html_picture(caption, svg)}" for caption, svg in (pictures or {}).items()]
    cells = [f"<p>{_html_span(cell)}</p>" for cell in head]
    lines = ['<div class="meshpar">', f"<style>{_CSS}</style>", *cells, *images, *map(_html_section, parts), "</div>"]
    return "\n".join(lines)


def _html_section(section: Section) -> str:
    verdict = "" if section.verdict is None else _html_span(section.verdict)
    body = (f"<p>{_html_span(part)}</p>" if isinstance(part, Cell) else _html_table(part) for part in section.parts)
    return f"<h2>{_escaped(section.title)}{verdict}</h2>\n" + "\n".join(body)


def _html_table(table: Table) -> str:
    title = f"<h3>{_escaped(table.title)}</h3>" if table.title else ""
    shown = _html_rows(table, table.rows[: table.most])
    hidden = table.rows[table.most :]
    if not hidden:
        return title + shown
    folded = f"<summary>{len(hidden):,} {_escaped(table.rest)}</summary>{_html_rows(table, hidden)}"
    return f"{title}{shown}<details>{folded}</details>"


def _html_rows(table: Table, rows: Sequence[Sequence[Cell]]) -> str:
    numbers = table.are_numbers
    heads = (
        f'<th class="{"n" if right else ""}">{_escaped(name)}</th>'
        for name, right in zip(table.names, numbers, strict=True)
    )
    body = ("<tr>" + "".join(itertools.starmap(_html_cell, zip(row, numbers, strict=True))) + "</tr>" for row in rows)
    head, lines = "".join(heads), "\n".join(body)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>'


def _html_cell(cell: Cell, right: bool) -> str:
    classes = " ".join(filter(None, ("n" if right else "", cell.style, "" if cell.share is None else "bar")))
    style = "" if cell.share is None else f' style="background-size:{min(max(cell.share, 0), 1):.1%} 70%"'
    return f'<td class="{classes}"{style}>{_escaped(cell.text)}</td>'


def _html_span(cell: Cell) -> str:
    attribute = f' class="{cell.style}"' if cell.style else ""
    return f"<span{attribute}>{_escaped(cell.text)}</span>"


def _html_picture(caption: str, svg: str) -> str:
    # An image, because the ids of inline SVGs would clash.
    encoded = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{_escaped(caption)}" src="data:image/svg+xml;base64,{encoded}">'


def _escaped(text: str) -> str:
    return html.escape(_printable(text), quote=True)
