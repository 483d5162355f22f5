"""A report to be read: tables in a terminal, plain text in a pipe, HTML in a notebook or a file.

    Report ─► sections of plain cells ─► rich | HTML

Nothing of a program (paths, names, lines) is ever read as markup: cells stay plain text until each renderer writes them
down in its own way.
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
from typing import Any, Literal

from meshpar.inspect.matching import MatchEntry, MatchResult, Unexpected
from meshpar.inspect.memory import Memory
from meshpar.inspect.report import Report, Sent
from meshpar.sharding.printing import flat, human_mesh
from meshpar.sharding.units import human_bytes, human_flops, human_time

Style = Literal["", "good", "bad", "warn", "faint", "strong"]

MOST_ROWS = 20
"""Rows of a table before the rest is summed up in one line; HTML folds them away instead."""
TEXT_COLUMNS = 160
"""Width of a report as plain text."""
ROOMY_COLUMNS = 130
"""From this width on a table has all its columns."""
SHORT_CELL = 22
"""Cells up to this length are not broken."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of a table, or one line of text."""

    text: str
    style: Style = ""
    share: float | None = None
    """Of the largest in its column: HTML draws a bar of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings."""

    columns: tuple[str, ...]
    """A heading that ends with `>` stands over numbers, to the right; one that ends with `?` is left out where there is
    little room."""
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    rest: str = "more"
    """What further rows are, after their number."""
    most: int = MOST_ROWS
    """Rows before the rest is summed up in one line."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.rstrip(">?") for name in self.columns)

    @property
    def are_numbers(self) -> tuple[bool, ...]:
        return tuple(name.endswith(">") for name in self.columns)

    def without_optional(self) -> Table:
        kept = [at for at, name in enumerate(self.columns) if not name.endswith("?")]
        rows = tuple(tuple(row[at] for at in kept) for row in self.rows)
        return dataclasses.replace(self, columns=tuple(self.columns[at] for at in kept), rows=rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A titled part of a report."""

    title: str
    verdict: Cell | None = None
    parts: tuple[Table | Cell, ...] = ()


# ---- Numbers in words ------------------------------------------------------------------------------------------------


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{share:.0%}" if share == 0 or share >= 0.01 else "< 1%"


def _times(count: tuple[int, int]) -> str:
    return f"{count[0]:,}" if count[0] == count[1] else f"{count[0]:,} to {count[1]:,}"


def place(source: str) -> str:
    """`file:line` from the folder one stands in, else the last two parts of its path; `cell:line` in a notebook."""
    path, colon, line = source.rpartition(":")
    if not colon:
        path, line = source, ""
    if "ipykernel_" in path:  # a notebook's cells are files of names that mean nothing
        return "cell" + colon + line
    here = os.getcwd() + os.sep
    short = path.removeprefix(here) if path.startswith(here) else "/".join(PurePath(path).parts[-2:])
    return short + colon + line


def _where(module: str, source: str) -> str:
    return " · ".join(filter(None, (module or "–", place(source))))


# ---- What is said ----------------------------------------------------------------------------------------------------


def sections(report: Report) -> tuple[Section, ...]:
    """The report as titled tables of plain cells."""
    parts = (_memory, _promise, _stages, _collectives, _overlap, _compute, _lint, _notes)
    return tuple(section for part in parts if (section := part(report)) is not None)


INVALIDATING = ("wide-compute",)
"""Lint rules that the headline repeats, because its time and utilisation are wrong for the requested precision."""


def headline(report: Report) -> tuple[Cell, ...]:
    """What was compiled for what, and the verdicts in one line each."""
    devices = f"{report.devices:,} device" + "s" * (report.devices != 1)
    speed = () if report.compute.predicted_step_s is None else _speed(report)
    return (
        Cell(f"{report.strategy} on {human_mesh(report.mesh)} · {report.target} · {devices}", "strong"),
        _promise_verdict(report.promise),
        *((_memory_verdict(report.memory),) if report.memory.fits is not None else ()),
        *speed,
    )


def _speed(report: Report) -> tuple[Cell, ...]:
    """The predicted time in one line, then the findings that invalidate it."""
    compute, hidden = report.compute, report.overlap.hidden_fraction
    assert compute.predicted_step_s is not None
    said = [f"a step takes {human_time(compute.predicted_step_s)}", f"bound by {compute.bound}"]
    if compute.bracket is not None:
        # The lower end assumes that all communication is hidden, so the simulated schedule is not the best case.
        low_s, high_s = compute.bracket.low_s, compute.bracket.high_s
        said[0] = f"a step takes {human_time(low_s)} to {human_time(high_s)}"
        if low_s <= compute.predicted_step_s <= high_s:  # measured rates can move the range past it
            said.insert(1, f"{human_time(compute.predicted_step_s)} in the simulated schedule")
    if compute.utilisation is not None:
        said.append(f"{compute.utilisation:.0%} model FLOP utilisation with {compute.rates}")
    if hidden is not None:
        said.append(f"{_percent(hidden)} of communication hidden")
    wrong = [one for one in report.findings if one.rule in INVALIDATING]
    return (
        Cell(", ".join(said), "warn" if wrong else ""),
        *(Cell(f"✘ time and utilisation are not for the requested precision: {one.what}", "bad") for one in wrong),
    )


def _memory_verdict(memory: Memory) -> Cell:
    peak = human_bytes(memory.peak_bytes)
    if memory.fits is None or memory.limit_bytes is None:
        return Cell(f"peak {peak} a device; the limit of this device is not known")
    share = f"{peak} of {human_bytes(memory.limit_bytes)} ({_percent(memory.peak_bytes / memory.limit_bytes)})"
    if not memory.fits:
        return Cell(f"✘ does not fit: {share}", "bad")
    return Cell(f"✔ fits: {share}", "warn" if memory.note else "good")


def _memory(report: Report) -> Section:
    memory = report.memory
    whole = memory.limit_bytes or memory.peak_bytes or 1
    said: list[tuple[str, int, Style]] = [
        ("parameters", memory.params_bytes, ""),
        ("optimizer state", memory.optimizer_bytes, ""),
        ("other state", memory.other_bytes, ""),
        ("batch", memory.batch_bytes, ""),
        ("temporaries", memory.temporaries_bytes, ""),
        ("  gradients among them", memory.gradients_bytes, "faint"),
        ("outputs", memory.output_bytes, ""),
        ("peak", memory.peak_bytes, "strong"),
    ]
    head = "of the limit>" if memory.limit_bytes else "of the peak>"
    rows = tuple(
        (Cell(what, style), Cell(human_bytes(size), style), Cell(_percent(size / whole), style, share=size / whole))
        for what, size, style in said
    )
    parts: list[Table | Cell] = [Table(columns=("on one device", "bytes>", head), rows=rows)]
    if memory.host_bytes:
        parts.append(Cell(f"{human_bytes(memory.host_bytes)} more in pinned memory of the host"))
    if memory.note:
        parts.append(Cell(memory.note, "warn"))
    if memory.remedies:
        parts.append(_remedies(memory))
    if memory.largest:
        parts.append(_largest(memory))
    return Section(title="Memory", parts=tuple(parts))


def _remedies(memory: Memory) -> Table:
    rows = tuple(
        (
            Cell("✔" if one.fits else "✘", "good" if one.fits else "bad"),
            Cell(one.change, "strong" if one.fits else ""),
            Cell("–" if one.peak_bytes is None else human_bytes(one.peak_bytes)),
            Cell(one.reason, "faint"),
        )
        for one in memory.remedies
    )
    return Table(title="What would make it fit", columns=("", "change", "peak>", "why not compiled"), rows=rows)


def _largest(memory: Memory) -> Table:
    most = max(one.nbytes for one in memory.largest)
    rows = tuple(
        (
            Cell(human_bytes(one.nbytes), share=one.nbytes / (most or 1)),
            Cell(one.what),
            Cell(_where(one.module, one.source)),
            Cell(one.shape + (f" ×{one.count}" if one.count > 1 else ""), "faint"),
        )
        for one in memory.largest[:8]
    )
    return Table(title="Largest", columns=("bytes>", "what", "where", "the largest array?"), rows=rows)


def _promise_verdict(promise: MatchResult) -> Cell:
    broken = [
        *([f"{len(promise.unexpected)} unexpected collective(s)"] if promise.unexpected else []),
        *([f"{len(promise.missing)} promise(s) not found"] if promise.missing else []),
    ]
    if not broken and promise.unannotated_axes:
        over = ", ".join(f"`{axis}`" for axis in promise.unannotated_axes)
        return Cell(f"✔ sends what the strategy promised; over {over} nothing can be promised", "warn")
    if not broken:
        return Cell("✔ sends what the strategy promised, and nothing else", "good")
    return Cell("✘ " + ", ".join(broken), "bad" if promise.unexpected else "warn")


def _promise(report: Report) -> Section:
    promise = report.promise
    parts: list[Table | Cell] = []
    if promise.unexpected:
        parts.append(_unexpected(promise.unexpected))
    if promise.missing:
        parts.append(_lines("Missing", promise.missing, "bad"))
    if promise.kept:
        parts.append(_lines("Kept", promise.kept, ""))
    if promise.kernels:
        parts.append(_lines("Sent by kernels", promise.kernels, ""))
    if promise.unannotated_axes:
        over = ", ".join(f"`{axis}`" for axis in promise.unannotated_axes)
        parts.append(
            Cell(
                f"Rules split parameters over {over}, but nothing says how activations lie there, so what they send "
                "cannot be held to anything. To have it held, give parameters names, mp.names(...), lay activations "
                "out, Rules(activations=...), and join mp.tensor_parallel().",
                "warn",
            )
        )
        if promise.untold:
            parts.append(_lines(f"Sent over {over}", promise.untold, ""))
    if promise.small:
        sent = human_bytes(sum(one.found_bytes for one in promise.small))
        count = sum(one.found_count for one in promise.small)
        parts.append(Cell(f"Losses, metrics, norms and the like: {count:,} small arrays, {sent} in all.", "faint"))
    if not report.collectives:
        parts.append(Cell("Nothing is sent."))
    return Section(title="Promise", parts=tuple(parts))


def _stages(report: Report) -> Section | None:
    stages = report.stages
    if stages is None:
        return None
    whole = f"{stages.schedule}: {stages.stages} stages, {stages.microbatches} microbatches, {stages.ticks} ticks"
    said = [
        ("bubble of the schedule, one step alone", f"{stages.bubble_fraction:.1%}"),
        ("bubble of the schedule, from a stage's first op to its last", f"{stages.span_bubble_fraction:.1%}"),
        *(() if stages.waiting_fraction is None else (
            ("of the predicted step, waiting for other stages", f"{stages.waiting_fraction:.1%}"),
        )),
        ("activations of a part that each stage holds at once", ", ".join(map(str, stages.peak_activations))),
        ("results from stage to stage", f"{stages.messages:,} of {human_bytes(stages.message_bytes)} a device"),
    ]  # fmt: skip
    rows = tuple((Cell(what), Cell(number)) for what, number in said)
    parts = [Table(columns=("", "in a step"), rows=rows)]
    if stages.gathering:
        parts.append(
            Table(
                title="When weights are gathered",
                columns=("gather", "sent a step>", "weights held>"),
                rows=tuple(
                    (
                        Cell(f"once a {one.gather}" + " ✔" * is_so, "strong" if is_so else ""),
                        Cell(human_bytes(one.sent_bytes)),
                        Cell(human_bytes(one.held_bytes)),
                    )
                    for one in stages.gathering
                    for is_so in [one.gather == stages.gather]
                ),
            )
        )
    return Section(title="Stages", verdict=Cell(whole), parts=tuple(parts))


def unexpected_text(one: Unexpected) -> str:
    """An unexpected collective in one line."""
    sent = f"{human_bytes(one.bytes_sent_per_device)} in {one.count_per_step:,} a step"
    return (
        f"{one.kind} over {'*'.join(one.axes)} of {one.tensor}, {sent}, in {_where(one.module, one.source)}: {one.fix}"
    )


def _unexpected(found: Sequence[Unexpected]) -> Table:
    rows = tuple(
        (
            Cell(f"{one.kind} over {'*'.join(one.axes)}", "bad"),
            Cell(f"{human_bytes(one.bytes_sent_per_device)} in {one.count_per_step:,}"),
            Cell(
                f"{one.tensor} in {_where(one.module, one.source)}"
                + (f" ({one.operation})" if one.operation else "")
                + f", in {one.layers} layers" * (one.layers > 1)
            ),
            Cell(fix),
        )
        for one, fix in zip(found, _once(one.fix for one in found), strict=True)
    )
    columns = ("collective", "sent a step>", "what travels, and the line that caused it", "suggested fix")
    return Table(title="Unexpected", columns=columns, rows=rows, rest="more, smaller")


def _once(texts: Iterable[str]) -> Iterator[str]:
    """Each text where it comes first; `as above` where it comes again."""
    seen: set[str] = set()
    for text in texts:
        yield "as above" if text in seen else text
        seen.add(text)


def _lines(title: str, lines: Sequence[MatchEntry], style: Style) -> Table:
    rows = tuple(
        (
            Cell(one.role, style),
            Cell(one.kind + (f", lowered as {one.lowered_as}" if one.lowered_as else "")),
            Cell("*".join(one.axes)),
            Cell(_times(one.count)),
            Cell(f"{one.found_count:,}", "" if one.count[0] <= one.found_count <= one.count[1] else "bad"),
            Cell(human_bytes(one.bytes_sent_per_device)),
            Cell(human_bytes(one.found_bytes)),
            Cell(_some(one.tensors), "faint"),
        )
        for one in lines
    )
    columns = ("what for", "kind", "axes", "arrays promised>", "found>", "bytes promised>", "found>", "tensors?")
    return Table(title=title, columns=columns, rows=rows)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _collectives(report: Report) -> Section | None:
    if not report.collectives:
        return None
    sent = sum(one.collective.bytes_sent_per_step for one in report.collectives)
    runs = sum(one.collective.count_per_step for one in report.collectives)
    verdict = Cell(f"{human_bytes(sent)} sent by each device in a step, in {runs:,} collectives")
    return Section(title="Collectives", verdict=verdict, parts=(_totals(report), _groups(report)))


def _totals(report: Report) -> Table:
    found = flat(report.totals)
    most = max(total.bytes_sent_per_device for total in found.values()) or 1
    crossing = {one.collective.axes_label for one in report.collectives if one.crosses_node}
    rows = tuple(
        (
            Cell(axes, "strong"),
            Cell(kind),
            Cell(f"{total.count_per_step:,}"),
            Cell(human_bytes(total.bytes_sent_per_device), share=total.bytes_sent_per_device / most),
            *((Cell("across nodes" if axes in crossing else "inside a node"),) if _knows_nodes(report) else ()),
        )
        for (axes, kind), total in sorted(found.items(), key=lambda item: -item[1].bytes_sent_per_device)
    )
    columns = ("axes", "kind", "runs a step>", "sent a step>", *(("where",) if _knows_nodes(report) else ()))
    return Table(title="Totals", columns=columns, rows=rows)


def _knows_nodes(report: Report) -> bool:
    return any(one.crosses_node is not None for one in report.collectives)


def _groups(report: Report) -> Table:
    """Collectives of one kind from one line as one row, the ones that cost most first."""
    groups: dict[tuple[Any, ...], list[Sent]] = {}
    for one in report.collectives:
        it = one.collective
        key = (it.kind, it.axes, it.dtype, it.module, it.source, it.is_backward, it.origin, it.logical_kind)
        groups.setdefault(key, []).append(one)
    timed = any(one.time_s is not None for one in report.collectives)

    def cost(members: Sequence[Sent]) -> tuple[float, float]:
        return sum(m.time_s or 0.0 for m in members), sum(m.collective.bytes_sent_per_step for m in members)

    ordered = sorted(groups.values(), key=cost, reverse=True)
    most = max(cost(members)[1] for members in ordered) or 1
    rows = []
    for members in ordered:
        it = members[0].collective
        time_s, nbytes = cost(members)
        hidden_s = sum((m.time_s or 0.0) * (m.hidden_fraction or 0.0) for m in members)
        arrays = sum(len(m.collective.parts) for m in members)
        runs = sum(m.collective.count_per_step for m in members)
        rows.append(
            (
                Cell(it.kind + (f" (a {it.logical_kind})" if it.logical_kind != it.kind else "")),
                Cell(it.axes_label),
                Cell(_where(it.module, it.source) + ("" if it.origin == "partitioner" else " · written in a kernel")),
                Cell("backward" if it.is_backward else "forward", "faint"),
                Cell(f"{it.dtype} ×{arrays}" if arrays > 1 else it.dtype),
                Cell(f"{runs:,}" + ("" if it.count_known else "+")),
                Cell(human_bytes(nbytes), share=nbytes / most),
                *((Cell(human_time(time_s)), Cell(_percent(hidden_s / time_s if time_s else None))) if timed else ()),
            )
        )
    columns = ("kind", "axes", "where", "pass?", "arrays?", "runs>", "sent>", *(("time>", "hidden>") if timed else ()))
    return Table(title="Each, with what XLA combined as one", columns=columns, rows=tuple(rows), rest="more, smaller")


def _overlap(report: Report) -> Section | None:
    overlap = report.overlap
    if overlap.hidden_fraction is None:
        return None
    waits = report.compute.exposed_s
    verdict = Cell(f"{_percent(overlap.hidden_fraction)} of the time on the wire is hidden behind compute")
    exposed = Table(
        title="Nothing to hide behind",
        columns=("kind", "axes", "where", "waited for>", "behind"),
        rows=tuple(
            (
                Cell(one.collective.kind, "warn"),
                Cell(one.collective.axes_label),
                Cell(_where(one.collective.module, one.collective.source)),
                Cell(human_time(one.exposed_s)),
                Cell("small kernels only" if one.cover == "kernels" else one.cover, "faint"),
            )
            for one in overlap.exposed
        ),
        most=8,
    )
    per_axis = Table(
        columns=("axes", "on the wire>", "hidden>", "waited for>"),
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


def _compute(report: Report) -> Section:
    compute = report.compute
    rows = [(Cell("in the program"), Cell(human_flops(compute.flops_per_device)), Cell(""))]
    if compute.model_flops_per_device is not None:
        over = "" if compute.ratio is None else f"the program has {compute.ratio:.2f}× as many"
        rows.append(
            (Cell("the model asks for"), Cell(human_flops(compute.model_flops_per_device)), Cell(over, "faint"))
        )
    parts: list[Table | Cell] = [Table(columns=("FLOPs a device and step", "number>", ""), rows=tuple(rows))]
    if compute.library_calls:
        calls = tuple((Cell(target), Cell(f"{times:,}")) for target, times in compute.library_calls.items())
        parts.append(Table(columns=("kernels of libraries", "calls a step>"), rows=calls))
    if compute.predicted_step_s is not None:
        parts.append(_step_time(report))
    if compute.bracket is not None:
        whose = "; ".join(compute.bracket.sources)
        low, high = human_time(compute.bracket.low_s), human_time(compute.bracket.high_s)
        parts.append(Cell(f"· {low} with every message hidden, {high} with none. {whose}", "faint"))
    return Section(title="Compute", parts=tuple(parts))


def _step_time(report: Report) -> Table:
    compute = report.compute
    whole = compute.predicted_step_s or 1.0
    spent = {"kernels bound by FLOPs": compute.compute_s or 0.0, "kernels bound by memory": compute.memory_s or 0.0}
    spent |= {} if compute.launch_s is None else {"launching what is shorter than a launch": compute.launch_s}
    spent |= {f"waiting for {axes}": time_s for axes, time_s in compute.exposed_s.items()}
    spent |= {} if compute.bubble_s is None else {"waiting for other stages: the bubble": compute.bubble_s}
    rows = tuple(
        (Cell(what), Cell(human_time(time_s)), Cell(_percent(time_s / whole), share=time_s / whole))
        for what, time_s in sorted(spent.items(), key=lambda item: -item[1])
    )
    return Table(columns=("where the step goes", "time>", "of the step>"), rows=rows)


def _lint(report: Report) -> Section | None:
    if not report.findings:
        return None
    rows = tuple(
        (
            Cell(one.rule, "warn"),
            Cell(human_bytes(one.nbytes)),
            Cell(f"{one.what} in {_where(one.module, one.source)}" + f", {one.count} alike" * (one.count > 1)),
            Cell(fix),
        )
        for one, fix in zip(report.findings, _once(one.fix for one in report.findings), strict=True)
    )
    verdict = Cell(f"{len(rows)} finding" + "s" * (len(rows) > 1), "warn")
    columns = ("rule", "costs>", "what", "suggested fix")
    return Section(title="Lint", verdict=verdict, parts=(Table(columns=columns, rows=rows),))


def _notes(report: Report) -> Section:
    said = dict.fromkeys([*report.notes, *filter(None, [report.overlap.reason]), *report.compute.notes])
    options = ", ".join(f"{name}={json.dumps(value)}" for name, value in report.compile_options.items())
    compiled = f"program {report.fingerprint}, compiled in {human_time(report.compile_s)}" + f" with {options}" * bool(
        options
    )
    return Section(title="Notes", parts=tuple(Cell(f"· {note}", "faint") for note in (*said, compiled)))


# ---- In a terminal ---------------------------------------------------------------------------------------------------

_RICH: Mapping[Style, str] = {
    "": "", "good": "green", "bad": "bold red", "warn": "yellow", "faint": "dim", "strong": "bold"
}  # fmt: skip


def as_rich(report: Report) -> Any:
    """The report as something rich can print."""
    from rich.console import Group

    return Group(*_rich_parts(headline(report), sections(report)))


def as_text(report: Report) -> str:
    """The report as plain text, 160 columns wide."""
    return text_of(as_rich(report))


def text_of(renderable: Any, columns: int = TEXT_COLUMNS) -> str:
    """What rich would print, without colours."""
    from rich.console import Console

    console = Console(width=columns, color_system=None, force_terminal=False, force_jupyter=False, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def rich_of(parts: Iterable[Section]) -> Any:
    """Sections as something rich can print."""
    from rich.console import Group

    return Group(*_rich_parts((), tuple(parts)))


def _rich_parts(head: Sequence[Cell], parts: Sequence[Section]) -> Iterator[Any]:
    from rich.padding import Padding

    yield from (_rich_text(cell) for cell in head)
    room_above = bool(head)
    for section in parts:
        if room_above:
            yield ""
        yield _rich_title(section)
        for part in section.parts:
            yield Padding(_rich_text(part) if isinstance(part, Cell) else _Fitted(part), (0, 0, 0, 2), expand=False)
            # A table ends with an empty line, but for one that tells of further rows there.
            room_above = isinstance(part, Cell) or len(part.rows) > part.most


def _rich_title(section: Section) -> Any:
    from rich.text import Text

    title = Text(section.title.upper(), style="bold cyan")
    if section.verdict is not None:
        title.append("  ")
        title.append_text(_rich_text(section.verdict))
    return title


@dataclasses.dataclass(frozen=True)
class _Fitted:
    """A table with as many of its columns as there is room for."""

    table: Table

    def _drawn(self, options: Any) -> Any:
        return _rich_table(self.table if options.max_width >= ROOMY_COLUMNS else self.table.without_optional())

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield self._drawn(options)

    def __rich_measure__(self, console: Any, options: Any) -> Any:
        from rich.measure import Measurement

        return Measurement.get(console, options, self._drawn(options))


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
    for at, (name, right) in enumerate(zip(table.names, table.are_numbers, strict=True)):
        whole = right or max((len(row[at].text) for row in shown), default=0) <= SHORT_CELL
        drawn.add_column(Text(name), justify="right" if right else "left", no_wrap=whole, overflow="fold")
    for row in shown:
        drawn.add_row(*map(_rich_text, row))
    rest = len(table.rows) - table.most
    if rest > 0:
        drawn.caption, drawn.caption_justify = Text(f"and {rest:,} {table.rest}", style="dim"), "left"
    return drawn


def _rich_text(cell: Cell) -> Any:
    from rich.text import Text

    return Text(_printable(cell.text), style=_RICH[cell.style], overflow="fold")


def _printable(text: str) -> str:
    """The text with control characters shown, not obeyed."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else "�" for c in text)


# ---- In a browser ----------------------------------------------------------------------------------------------------

# Colours are mixed from whatever text and background are around it, so a light and a dark page both stay readable.
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


def as_html(report: Report) -> str:
    """The report as a piece of HTML that needs nothing else; for notebooks."""
    return html_of(headline(report), sections(report))


def as_page(
    report: Report, *, title: str, pictures: Mapping[str, str] | None = None, more: Iterable[Section] = ()
) -> str:
    """The report as a whole HTML file that needs nothing else."""
    body = html_of(headline(report), (*sections(report), *more), pictures or {})
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escaped(title)}</title><style>{_PAGE_CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def html_of(head: Sequence[Cell], parts: Iterable[Section], pictures: Mapping[str, str] | None = None) -> str:
    """Cells, sections and pictures as a piece of HTML."""
    drawn = [f"<h3>{_escaped(caption)}</h3>{_html_picture(caption, svg)}" for caption, svg in (pictures or {}).items()]
    said = [f"<p>{_html_span(cell)}</p>" for cell in head]
    lines = ['<div class="meshpar">', f"<style>{_CSS}</style>", *said, *drawn, *map(_html_section, parts), "</div>"]
    return "\n".join(lines)


def _html_section(section: Section) -> str:
    verdict = "" if section.verdict is None else _html_span(section.verdict)
    said = (f"<p>{_html_span(part)}</p>" if isinstance(part, Cell) else _html_table(part) for part in section.parts)
    return f"<h2>{_escaped(section.title)}{verdict}</h2>\n" + "\n".join(said)


def _html_table(table: Table) -> str:
    title = f"<h3>{_escaped(table.title)}</h3>" if table.title else ""
    shown = _html_rows(table, table.rows[: table.most])
    rest = table.rows[table.most :]
    if not rest:
        return title + shown
    folded = f"<summary>{len(rest):,} {_escaped(table.rest)}</summary>{_html_rows(table, rest)}"
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
    return (
        f'<span class="{cell.style}">{_escaped(cell.text)}</span>'
        if cell.style
        else f"<span>{_escaped(cell.text)}</span>"
    )


def _html_picture(caption: str, svg: str) -> str:
    # As an image and not as markup: ids of several drawings in one page would clash.
    encoded = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{_escaped(caption)}" src="data:image/svg+xml;base64,{encoded}">'


def _escaped(text: str) -> str:
    return html.escape(_printable(text), quote=True)
