"""Renderers of a report: tables in a terminal, plain text, and HTML for notebooks and files.

    Report ─► sections of tables and cells ─► rich | HTML

Cells are plain text, and both renderers escape them. Paths and names of a program are never interpreted as markup.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from meshpar.inspect.census import Collective
from meshpar.inspect.kernels import KernelRow
from meshpar.inspect.lint import Finding
from meshpar.inspect.matching import MatchEntry, MatchResult, Unexpected
from meshpar.inspect.memory import Contributor, Memory
from meshpar.inspect.report_data import FunctionData, FunctionMemory, Sent, StepData
from meshpar.sharding.printing import flat, human_mesh
from meshpar.sharding.units import human_bytes, human_flops, human_time

if TYPE_CHECKING:
    from rich.console import RenderableType

Style = Literal["", "good", "bad", "warn", "faint", "strong"]
AnyReport: TypeAlias = StepData | FunctionData

MOST_ROWS = 20
"""Maximum number of rows of a table. Plain text counts the omitted rows in a line, HTML folds them."""
MIN_SHARE = 0.001
"""Fraction of the step below which kernels without matmuls are not shown."""
TEXT_COLUMNS = 160
"""Width of a report as plain text."""
ROOMY_COLUMNS = 130
"""Minimum width of the output, in characters, at which optional columns are shown."""
SHORT_CELL = 22
"""Cells of up to this many characters are not wrapped."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table, or a line of text."""

    text: str
    style: Style = ""
    share: float | None = None
    """Relative length, from 0 to 1, of a bar behind the text in HTML; None draws no bar."""

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(_printable(self.text), style=_RICH[self.style], overflow="fold")

    def html(self, tag: str = "span", *classes: str) -> str:
        """Return the cell as an HTML element."""
        names = " ".join(filter(None, (*classes, self.style, "" if self.share is None else "bar")))
        style = "" if self.share is None else f' style="background-size:{min(max(self.share, 0), 1):.1%} 70%"'
        attribute = f' class="{names}"' if names else ""
        return f"<{tag}{attribute}{style}>{escaped(self.text)}</{tag}>"


Text: TypeAlias = Cell | str
"""A cell, or the text of a cell without style."""


def _cell(text: Text) -> Cell:
    return Cell(text) if isinstance(text, str) else text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of cells."""

    columns: Sequence[str]
    """Headings. A column ending with `>` is right-aligned, a column ending with `?` is omitted in narrow terminals."""
    rows: Sequence[Sequence[Text]]
    title: str = ""
    rest: str = "more"
    """Description of omitted rows, printed after their number."""
    most: int = MOST_ROWS
    """Maximum number of rows that are shown."""

    @property
    def is_cut(self) -> bool:
        """Whether the table has more rows than it shows."""
        return len(self.rows) > self.most

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich import box
        from rich.table import Table as RichTable

        title = Cell(self.title, "strong").__rich__() if self.title else None
        drawn = RichTable(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, header_style="dim")
        shown = [i for i, name in enumerate(self.columns) if options.max_width >= ROOMY_COLUMNS or name[-1:] != "?"]
        rows = [[_cell(row[i]) for i in shown] for row in self.rows[: self.most]]
        for i, name in enumerate(self.columns[i] for i in shown):
            is_number = name.endswith(">")
            no_wrap = is_number or max((len(row[i].text) for row in rows), default=0) <= SHORT_CELL
            justify: Any = "right" if is_number else "left"
            drawn.add_column(Cell(name.rstrip(">?")).__rich__(), justify=justify, no_wrap=no_wrap, overflow="fold")
        for row in rows:
            drawn.add_row(*row)
        if self.is_cut:
            caption = f"and {len(self.rows) - self.most:,} {self.rest}"
            drawn.caption, drawn.caption_justify = Cell(caption, "faint").__rich__(), "left"
        yield drawn

    def html(self) -> str:
        """Return the table as HTML. Rows beyond `most` are folded."""
        text = f"<h3>{escaped(self.title)}</h3>" if self.title else ""
        text += self._html(self.rows[: self.most])
        if self.is_cut:
            summary = f"{len(self.rows) - self.most:,} {escaped(self.rest)}"
            text += f"<details><summary>{summary}</summary>{self._html(self.rows[self.most :])}</details>"
        return text

    def _html(self, rows: Sequence[Sequence[Text]]) -> str:
        classes = [
            "n" if name.endswith(">") else "" if _has_long_word(column) else "short"
            for name, *column in zip(self.columns, *self.rows, strict=True)
        ]
        lines = [
            "<tr>"
            + "".join(
                cell.html(tag, name, "long" if name == "n" and len(cell.text) > SHORT_CELL else "")
                for cell, name in zip(map(_cell, row), classes, strict=True)
            )
            + "</tr>"
            for tag, row in (("th", [name.rstrip(">?") for name in self.columns]), *(("td", row) for row in rows))
        ]
        body = "\n".join(lines[1:])
        return f'<div class="scroll"><table><thead>{lines[0]}</thead>\n<tbody>{body}</tbody></table></div>'


def _has_long_word(column: Iterable[Text]) -> bool:
    """Return whether a column has a path or another word that may be broken, so that the table is not too wide."""
    return any(len(word) > SHORT_CELL for text in column for word in _cell(text).text.split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A titled part of a report."""

    title: str
    verdict: Cell | None = None
    parts: Sequence[Table | Cell] = ()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.padding import Padding
        from rich.text import Text

        verdict = () if self.verdict is None else ("  ", self.verdict.__rich__())
        yield Text.assemble((self.title.upper(), "bold cyan"), *verdict)
        for part in self.parts:
            yield Padding(part, (0, 0, 0, 2), expand=False)

    def html(self) -> str:
        """Return the section as HTML."""
        heading = escaped(self.title) + ("" if self.verdict is None else self.verdict.html())
        parts = (f"<p>{part.html()}</p>" if isinstance(part, Cell) else part.html() for part in self.parts)
        return "\n".join((f"<h2>{heading}</h2>", *parts))


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{share:.0%}" if share == 0 or share >= 0.01 else "< 1%"


def short_source(source: str) -> str:
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


def _where(item: Collective | Contributor | Finding | Unexpected) -> str:
    return " · ".join(filter(None, (item.module or "–", short_source(item.source))))


def _without_repeats(texts: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for text in texts:
        yield "as above" if text and text in seen else text
        seen.add(text)


def sections(report: AnyReport) -> tuple[Section, ...]:
    """Return the report as titled tables, without styles of a particular output."""
    of_step = (_matching(report), _stages(report)) if isinstance(report, StepData) else ()
    kernels = _kernels(report) if isinstance(report, StepData) else None
    others = (_collectives(report), _overlap(report), _compute(report), kernels, _lint(report), _notes(report))
    return tuple(section for section in (_memory(report), *of_step, *others) if section is not None)


INVALIDATING = ("wide-compute",)
"""Lint rules whose findings the headline repeats: the program does not compute in the requested precision."""


def headline(report: AnyReport) -> tuple[Cell, ...]:
    """Return the first lines of a report: strategy or function with its target, then a line per verdict."""
    devices = f"{report.devices:,} device" + "s" * (report.devices != 1)
    name = report.strategy if isinstance(report, StepData) else f"`{report.name}`"
    return (
        Cell(f"{name} on {human_mesh(report.mesh)} · {report.target} · {devices}", "strong"),
        *((_matching_verdict(report.matching),) if isinstance(report, StepData) else ()),
        *_memory_verdict(report.memory),
        *_speed(report),
    )


def _speed(report: AnyReport) -> Iterator[Cell]:
    """Yield the predicted step time in one line, followed by the findings that invalidate it."""
    compute, hidden = report.compute, report.overlap.hidden_fraction
    if compute.predicted_step_s is None:
        return
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
    yield Cell(", ".join(phrases), "warn" if wrong else "")
    for finding in wrong:
        yield Cell(f"✘ time and utilisation are not for the requested precision: {finding.message}", "bad")


def _memory_verdict(memory: Memory | FunctionMemory) -> Iterator[Cell]:
    if memory.limit_bytes is None:
        return
    share = _percent(memory.peak_bytes / memory.limit_bytes)
    sizes = f"{human_bytes(memory.peak_bytes)} of {human_bytes(memory.limit_bytes)} ({share})"
    if memory.fits:
        yield Cell(f"✔ fits: {sizes}", "warn" if memory.note else "good")
    else:
        yield Cell(f"✘ does not fit: {sizes}", "bad")


def _memory(report: AnyReport) -> Section:
    memory = report.memory
    sizes: list[tuple[str, int, Style]]
    if isinstance(memory, FunctionMemory):
        sizes = [("arguments", memory.argument_bytes, "")]
    else:
        sizes = [
            ("parameters", memory.params_bytes, ""),
            ("optimizer state", memory.optimizer_bytes, ""),
            ("other state", memory.other_bytes, ""),
            ("batch", memory.batch_bytes, ""),
        ]
    sizes.append(("temporaries", memory.temporaries_bytes, ""))
    if isinstance(memory, Memory):
        sizes.append(("  of these, gradients", memory.gradients_bytes, "faint"))
    sizes += [("outputs", memory.output_bytes, ""), ("peak", memory.peak_bytes, "strong")]
    total = memory.limit_bytes or memory.peak_bytes or 1
    longest = max(size for _, size, _ in sizes) or 1  # bars of a small program would be invisible at the limit's scale
    rows = [
        (Cell(name, style), Cell(human_bytes(size), style), Cell(_percent(size / total), style, size / longest))
        for name, size, style in sizes
    ]
    columns = ("per device", "bytes>", "of the limit>" if memory.limit_bytes else "of the peak>")
    parts: list[Table | Cell] = [Table(columns=columns, rows=rows)]
    if memory.host_bytes:
        parts.append(Cell(f"plus {human_bytes(memory.host_bytes)} in pinned host memory"))
    if memory.note:
        parts.append(Cell(memory.note, "warn"))
    if isinstance(memory, Memory) and memory.fits is False:
        text = "does not fit: meshpar explain RECIPE --fit, or mp.fit_memory, lists changes that do, fastest first"
        parts.append(Cell(text, "bad"))
    if isinstance(memory, Memory) and memory.remedies:
        remedies = [
            (
                Cell("✔", "good") if remedy.fits else Cell("✘", "bad"),
                Cell(remedy.change, "strong" if remedy.fits else ""),
                "–" if remedy.peak_bytes is None else human_bytes(remedy.peak_bytes),
                Cell(remedy.reason, "faint"),
            )
            for remedy in memory.remedies
        ]
        heads = ("", "change", "peak>", "why not compiled")
        parts.append(Table(title="Changes that save memory", columns=heads, rows=remedies))
    if memory.largest:
        maximum = max(item.nbytes for item in memory.largest) or 1
        largest = [
            (
                Cell(human_bytes(item.nbytes), share=item.nbytes / maximum),
                item.kind,
                _where(item),
                Cell(item.shape + (f" ×{item.count}" if item.count > 1 else ""), "faint"),
            )
            for item in memory.largest[:8]
        ]
        parts.append(Table(title="Largest", columns=("bytes>", "kind", "where", "largest array?"), rows=largest))
    return Section(title="Memory", parts=parts)


def _matching_verdict(matching: MatchResult) -> Cell:
    counts = {"unexpected": len(matching.unexpected), "missing": len(matching.missing)}
    wrong = [f"{count} {name} collective{'s' * (count > 1)}" for name, count in counts.items() if count]
    if wrong:
        return Cell("✘ " + ", ".join(wrong), "bad" if matching.unexpected else "warn")
    if matching.unannotated_axes:
        axes = ", ".join(f"`{axis}`" for axis in matching.unannotated_axes)
        return Cell(f"✔ collectives match the strategy; those over {axes} cannot be checked", "warn")
    return Cell("✔ collectives match the strategy", "good")


def _matching(report: StepData) -> Section:
    matching = report.matching
    parts: list[Table | Cell] = []
    if matching.unexpected:
        parts.append(_unexpected(matching.unexpected))
    parts += _lines("Missing", matching.missing, "bad")
    parts += _lines("Found", matching.matched)
    parts += _lines("From kernels", matching.kernels)
    if matching.unannotated_axes:
        axes = ", ".join(f"`{axis}`" for axis in matching.unannotated_axes)
        text = (
            f"Rules shard parameters over {axes}, but activations have no sharding over these axes, so their "
            "collectives cannot be checked. To check them, name the dims of parameters with mp.names(...), add "
            "Rules(activations=...), and add mp.tensor_parallel() to the strategy."
        )
        parts += [Cell(text, "warn"), *_lines(f"Over {axes}", matching.unjudged)]
    if matching.small:
        sent = human_bytes(sum(entry.actual_bytes for entry in matching.small))
        count = sum(entry.actual_count for entry in matching.small)
        parts.append(Cell(f"Losses, metrics, norms etc.: {count:,} small arrays, {sent} in total.", "faint"))
    if not report.collectives:
        parts.append(Cell("The program has no collectives."))
    return Section(title="Expected collectives", parts=parts)


def unexpected_text(collective: Unexpected) -> str:
    """Return a line about an unexpected collective."""
    sent = f"{human_bytes(collective.bytes_sent_per_device)} in {collective.count_per_step:,} per step"
    operation = f"{collective.kind} over {'*'.join(collective.axes)} of {collective.tensor}"
    return f"{operation}, {sent}, in {_where(collective)}: {collective.fix}"


def _unexpected(collectives: Sequence[Unexpected]) -> Table:
    rows = [
        (
            Cell(f"{collective.kind} over {'*'.join(collective.axes)}", "bad"),
            f"{human_bytes(collective.bytes_sent_per_device)} in {collective.count_per_step:,}",
            f"{collective.tensor} in {_where(collective)}"
            + (f" ({collective.operation})" if collective.operation else "")
            + f", in {collective.layers} layers" * (collective.layers > 1),
            fix,
        )
        for collective, fix in zip(collectives, _without_repeats(c.fix for c in collectives), strict=True)
    ]
    columns = ("collective", "sent per step>", "tensor and source line", "suggested fix")
    return Table(title="Unexpected", columns=columns, rows=rows, rest="more, smaller")


def _lines(title: str, lines: Sequence[MatchEntry], style: Style = "") -> list[Table]:
    """Return a table with a row for each entry; no table if there are no entries."""
    rows = [
        (
            Cell(entry.role, style),
            entry.kind + (f", lowered as {entry.lowered_as}" if entry.lowered_as else ""),
            "*".join(entry.axes),
            " to ".join(f"{count:,}" for count in dict.fromkeys(entry.count)),
            Cell(f"{entry.actual_count:,}", "" if entry.count[0] <= entry.actual_count <= entry.count[1] else "bad"),
            human_bytes(entry.bytes_sent_per_device),
            human_bytes(entry.actual_bytes),
            Cell(
                ", ".join(entry.tensors[:2]) + f" and {len(entry.tensors) - 2} more" * (len(entry.tensors) > 2), "faint"
            ),
        )
        for entry in lines
    ]
    columns = ("purpose", "kind", "axes", "expected arrays>", "found>", "expected bytes>", "found>", "tensors?")
    return [Table(title=title, columns=columns, rows=rows)] if rows else []


def _stages(report: StepData) -> Section | None:
    stages = report.stages
    if stages is None:
        return None
    verdict = f"{stages.schedule}: {stages.stages} stages, {stages.microbatches} microbatches, {stages.ticks} ticks"
    numbers = {
        "bubble of the schedule, a single step": f"{stages.bubble_fraction:.1%}",
        "bubble of the schedule, from a stage's first op to its last": f"{stages.span_bubble_fraction:.1%}",
    }
    if stages.waiting_fraction is not None:
        waiting = "computing without a microbatch" if stages.is_uniform else "waiting for other stages"
        numbers[f"{waiting}, fraction of the predicted step"] = f"{stages.waiting_fraction:.1%}"
    if (work := stages.executor) is not None:
        terms = {
            "copies": work.copies_s, "slices": work.slices_s, "gradient sums": work.sums_s,
            "saved activations": work.saved_s, "converts": work.converts_s,
        }  # fmt: skip
        text = ", ".join(f"{name} {human_time(time_s)}" for name, time_s in terms.items() if time_s >= 1e-6)
        numbers["pipeline executor"] = f"{text or 'nothing'}: {work.share:.1%} of the matmuls"
    numbers["peak number of saved chunk activations per stage"] = ", ".join(map(str, stages.peak_activations))
    numbers["messages between stages"] = f"{stages.messages:,} of {human_bytes(stages.message_bytes)} per device"
    parts = [Table(columns=("", "per step"), rows=list(numbers.items()))]
    if stages.gathering:
        choices = [
            (
                Cell(f"once per {option.gather} ✔", "strong")
                if option.gather == stages.gather
                else f"once per {option.gather}",
                human_bytes(option.sent_bytes),
                human_bytes(option.held_bytes),
            )
            for option in stages.gathering
        ]
        columns = ("gather", "sent per step>", "gathered weights>")
        parts.append(Table(title="Gathering of weights", columns=columns, rows=choices))
    return Section(title="Stages", verdict=Cell(verdict), parts=parts)


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
    rows = [
        (
            Cell(axes, "strong"),
            kind,
            f"{total.count_per_step:,}",
            Cell(human_bytes(total.bytes_sent_per_device), share=total.bytes_sent_per_device / maximum),
            *(("across nodes" if axes in crossing else "within a node",) if has_nodes else ()),
        )
        for (axes, kind), total in sorted(totals.items(), key=lambda item: -item[1].bytes_sent_per_device)
    ]
    unit = report.unit
    columns = ("axes", "kind", f"runs per {unit}>", f"sent per {unit}>", *(("where",) if has_nodes else ()))
    return Table(title="Totals", columns=columns, rows=rows)


def _groups(report: AnyReport) -> Table:
    """Return a table with one row for all equal collectives of a source line, the most expensive first."""
    groups: dict[tuple[Any, ...], list[Sent]] = {}
    for item in report.collectives:
        c = item.collective
        key = (c.kind, c.axes, c.dtype, c.module, c.source, c.is_backward, c.origin, c.logical_kind)
        groups.setdefault(key, []).append(item)
    timed = any(item.time_s is not None for item in report.collectives)

    def cost(members: Sequence[Sent]) -> tuple[float, float]:
        return sum(m.time_s or 0.0 for m in members), sum(m.collective.bytes_sent_per_step for m in members)

    maximum = max(cost(members)[1] for members in groups.values()) or 1
    rows: list[tuple[Text, ...]] = []
    for members in sorted(groups.values(), key=cost, reverse=True):
        c = members[0].collective
        time_s, nbytes = cost(members)
        hidden_s = sum((m.time_s or 0.0) * (m.hidden_fraction or 0.0) for m in members)
        arrays = sum(len(m.collective.parts) for m in members)
        runs = sum(m.collective.count_per_step for m in members)
        rows.append(
            (
                c.kind + (f" (a {c.logical_kind})" if c.logical_kind != c.kind else ""),
                c.axes_label,
                _where(c) + " · kernel" * (c.origin != "partitioner"),
                Cell("backward" if c.is_backward else "forward", "faint"),
                f"{c.dtype} ×{arrays}" if arrays > 1 else c.dtype,
                f"{runs:,}" + "+" * (not c.count_known),
                Cell(human_bytes(nbytes), share=nbytes / maximum),
                *((human_time(time_s), _percent(hidden_s / time_s if time_s else None)) if timed else ()),
            )
        )
    columns = ("kind", "axes", "where", "pass?", "arrays?", "runs>", "sent>", *(("time>", "hidden>") if timed else ()))
    return Table(title="By source line", columns=columns, rows=rows, rest="more, smaller")


def _overlap(report: AnyReport) -> Section | None:
    overlap, waits = report.overlap, report.compute.exposed_s
    if overlap.hidden_fraction is None:
        return None
    verdict = Cell(f"{_percent(overlap.hidden_fraction)} of the communication time is overlapped with compute")
    exposed = [
        (
            Cell(item.collective.kind, "warn"),
            item.collective.axes_label,
            _where(item.collective),
            human_time(item.exposed_s),
            Cell("small kernels only" if item.cover == "kernels" else item.cover, "faint"),
        )
        for item in overlap.exposed
    ]
    per_axis = [
        (
            Cell(axes, "strong"),
            human_time(report.compute.network_s.get(axes, 0.0)),
            Cell(_percent(share), share=share),
            human_time(waits.get(axes, 0.0)),
        )
        for axes, share in sorted(overlap.per_axis.items(), key=lambda item: -waits.get(item[0], 0.0))
    ]
    columns = ("kind", "axes", "where", "exposed>", "overlapped with")
    parts = [Table(title="Not overlapped", columns=columns, rows=exposed, most=8)] if exposed else []
    parts.append(Table(columns=("axes", "communication>", "hidden>", "exposed>"), rows=per_axis))
    return Section(title="Overlap", verdict=verdict, parts=parts)


def _compute(report: AnyReport) -> Section:
    compute = report.compute
    rows: list[tuple[Text, ...]] = [("in the program", human_flops(compute.flops_per_device), "")]
    if compute.model_flops_per_device is not None:
        ratio = "" if compute.ratio is None else f"the program has {compute.ratio:.2f}× as many"
        rows.append(("in the model", human_flops(compute.model_flops_per_device), Cell(ratio, "faint")))
    parts: list[Table | Cell] = [Table(columns=(f"FLOPs per device and {report.unit}", "number>", ""), rows=rows)]
    if compute.library_calls:
        calls = [(target, f"{times:,}") for target, times in compute.library_calls.items()]
        parts.append(Table(columns=("library kernels", f"calls per {report.unit}>"), rows=calls))
    if (step_s := compute.predicted_step_s) is not None:
        times = {
            "kernels bound by FLOPs": compute.compute_s or 0.0,
            "kernels bound by memory": compute.memory_s or 0.0,
            "launch overhead": compute.launch_s,
            **{f"exposed communication over {axes}": time_s for axes, time_s in compute.exposed_s.items()},
            "pipeline bubble": compute.bubble_s,
        }
        shares = {name: (time_s, time_s / (step_s or 1.0)) for name, time_s in times.items() if time_s is not None}
        causes = [
            (name, human_time(time_s), Cell(_percent(share), share=share))
            for name, (time_s, share) in sorted(shares.items(), key=lambda item: -item[1][0])
        ]
        parts.append(Table(columns=(f"{report.unit} time by cause", "time>", f"of the {report.unit}>"), rows=causes))
    if compute.bracket is not None:
        low, high = human_time(compute.bracket.low_s), human_time(compute.bracket.high_s)
        sources = "; ".join(compute.bracket.sources)
        parts.append(Cell(f"· {low} with full overlap, {high} with no overlap. {sources}", "faint"))
    return Section(title="Compute", parts=parts)


def _kernels(report: StepData) -> Section | None:
    if not report.kernel_list:
        return None
    # Rows without matmuls and with little time follow at the end, and are cut.
    ordered = sorted(report.kernel_list, key=lambda row: not _is_main(row))
    rows = [
        (
            Cell(row.kind, "strong"),
            row.implementation,
            row.dtypes,
            f"{row.count:,.0f}",
            human_time(row.time_s),
            Cell(_percent(row.share), share=row.share),
            Cell(", ".join(row.modules[:2]) + f" and {len(row.modules) - 2} more" * (len(row.modules) > 2), "faint"),
            Cell(why, "faint"),
        )
        for row, why in zip(ordered, _without_repeats(row.reason for row in ordered), strict=True)
    ]
    columns = ("kind", "implementation", "dtypes", "runs>", "time>", "of the step>", "modules?", "why not a faster one")
    cut = Table(
        columns=columns, rows=rows, most=min(sum(map(_is_main, ordered)), MOST_ROWS), rest="more, with less time"
    )
    return Section(title="Kernels", parts=(cut,))


def _is_main(row: KernelRow) -> bool:
    return bool(row.flops) or row.share >= MIN_SHARE


def _lint(report: AnyReport) -> Section | None:
    if not report.findings:
        return None
    rows = [
        (
            Cell(finding.rule, "warn"),
            human_bytes(finding.nbytes),
            f"{finding.message} in {_where(finding)}" + f", {finding.count} times" * (finding.count > 1),
            fix,
        )
        for finding, fix in zip(report.findings, _without_repeats(f.fix for f in report.findings), strict=True)
    ]
    verdict = Cell(f"{len(rows)} finding" + "s" * (len(rows) > 1), "warn")
    columns = ("rule", "cost>", "finding", "suggested fix")
    return Section(title="Lint", verdict=verdict, parts=(Table(columns=columns, rows=rows),))


def _notes(report: AnyReport) -> Section:
    notes = dict.fromkeys([*report.notes, *filter(None, [report.overlap.reason]), *report.compute.notes])
    options = ", ".join(f"{name}={json.dumps(value)}" for name, value in report.compile_options.items())
    compiled = f"program {report.fingerprint}, compiled in {human_time(report.compile_s)}"
    compiled += f" with {options}" * bool(options)
    choices = report.kernels if isinstance(report, StepData) else {}
    kernels = [f"{operation}: {choice}" for operation, choice in choices.items()]
    return Section(title="Notes", parts=tuple(Cell(f"· {note}", "faint") for note in (*kernels, *notes, compiled)))


_RICH: Mapping[Style, str] = {
    "": "", "good": "green", "bad": "bold red", "warn": "yellow", "faint": "dim", "strong": "bold"
}  # fmt: skip


def as_rich(report: AnyReport) -> RenderableType:
    """Return the report as a renderable of rich."""
    return rich_of(sections(report), headline(report))


def rich_of(parts: Iterable[Section], head: Iterable[Cell] = ()) -> RenderableType:
    """Return lines followed by sections as a renderable of rich."""
    from rich.console import Group

    lines: list[Any] = list(head)
    needs_gap = bool(lines)
    for section in parts:
        lines += [*([""] if needs_gap else []), section]
        # A table ends with an empty line, unless its caption counts further rows.
        needs_gap = not section.parts or isinstance(last := section.parts[-1], Cell) or last.is_cut
    return Group(*lines)


def as_text(report: AnyReport) -> str:
    """Return the report as plain text, 160 columns wide."""
    return text_of(as_rich(report))


def text_of(renderable: RenderableType, columns: int = TEXT_COLUMNS) -> str:
    """Return the text that rich prints, without colours."""
    from rich.console import Console

    console = Console(width=columns, color_system=None, force_terminal=False, force_jupyter=False, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " if c in "\n\t" else "�" for c in text)


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
.meshpar th,.meshpar .short{overflow-wrap:normal}
.meshpar th{font-weight:500;opacity:.65;border-bottom:1px solid rgba(128,128,128,.5)}
.meshpar tr{background:none}
.meshpar tbody tr+tr td{border-top:1px solid rgba(128,128,128,.18)}
.meshpar .n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.meshpar .long{white-space:normal;min-width:12em}
.meshpar .bar{background-image:linear-gradient(rgba(66,133,220,.35),rgba(66,133,220,.35));background-repeat:no-repeat;
background-position:left center;background-origin:content-box}
.meshpar .good{color:#2e9e58}.meshpar .bad{color:#e0483d}.meshpar .warn{color:#c8860b}
.meshpar .faint{opacity:.65}.meshpar .strong{font-weight:650}
.meshpar summary{cursor:pointer;opacity:.75}
.meshpar img{max-width:min(100%,900px);max-height:480px;background:#fff;border-radius:6px;margin:.4em 0}
"""


def as_html(report: AnyReport, *, pictures: Mapping[str, str] | None = None, views: str = "") -> str:
    """Return the report as a self-contained HTML fragment, with the HTML `views` and SVG pictures by caption."""
    cells = [f"<p>{cell.html()}</p>" for cell in headline(report)]
    # Pictures are images, because the ids of inline SVGs would clash.
    images = [
        f'<h3>{escaped(caption)}</h3><img alt="{escaped(caption)}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}">'
        for caption, svg in (pictures or {}).items()
    ]
    body = (section.html() for section in sections(report))
    return "\n".join(['<div class="meshpar">', f"<style>{_CSS}</style>", *cells, views, *images, *body, "</div>"])


def escaped(text: str) -> str:
    """Return text for HTML, without control codes."""
    return html.escape(_printable(text), quote=True)
