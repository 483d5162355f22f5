"""Contents of rendered reports, and escaping of texts from the program."""

from __future__ import annotations

import dataclasses
import html.parser
import re

import pytest

import meshpar as mp
from meshpar.inspect import render
from meshpar.inspect.lint import Finding
from meshpar.inspect.matching import MatchResult
from meshpar.inspect.memory import Contributor, Remedy
from meshpar.inspect.page import as_page
from meshpar.inspect.timeline.step_prediction import Bracket, Compute, Overlap

NASTY = "layers/[red]x[/red]<script>alert(1)</script>&amp;\x1b[31m[/"


@pytest.fixture(scope="module")
def reports(planted):
    """Reports of a correct step and of a step with unexpected collectives, compiled for the local devices."""
    plants = {name: planted.PLANTS[name]().on_cpu for name in ("nothing", "wrong_name")}
    return {name: mp.explain(plant.step, plant.state, plant.batch) for name, plant in plants.items()}


@pytest.fixture(scope="module")
def report(reports):
    return reports["nothing"]


@pytest.fixture(scope="module")
def empty(report):
    """A report without collectives and estimates."""
    memory = dataclasses.replace(report.memory, largest=(), remedies=(), note="")
    compute = Compute(flops_per_device=0, model_flops_per_device=None, ratio=None)
    return dataclasses.replace(
        report, mesh={"data": 1}, devices=1, memory=memory, collectives=(), compute=compute, findings=(), notes=(),
        matching=MatchResult(matched=(), missing=(), unexpected=()),
        overlap=Overlap(hidden_fraction=None, per_axis={}, exposed=()),
    )  # fmt: skip


@pytest.fixture(scope="module")
def nasty(reports):
    """A report in which all texts from the program contain markup and control codes."""
    base = reports["wrong_name"]
    sent = [
        dataclasses.replace(one, collective=dataclasses.replace(one.collective, module=NASTY, source=f"{NASTY}:3"))
        for one in base.collectives
    ]
    matching = dataclasses.replace(
        base.matching,
        matched=tuple(dataclasses.replace(one, tensors=(NASTY,)) for one in base.matching.matched),
        unexpected=tuple(dataclasses.replace(one, tensor=NASTY, fix=NASTY) for one in base.matching.unexpected),
    )
    largest = Contributor(module=NASTY, nbytes=5, kind=NASTY, shape=NASTY, source=NASTY, count=2)
    remedy = Remedy(change=NASTY, peak_bytes=None, fits=False, reason=NASTY)
    memory = dataclasses.replace(base.memory, largest=(largest,), remedies=(remedy,), note=NASTY)
    finding = Finding(rule=NASTY, module=NASTY, source=NASTY, message=NASTY, fix=NASTY, nbytes=3)
    return dataclasses.replace(
        base, strategy=NASTY, target=NASTY, collectives=tuple(sent), matching=matching, memory=memory,
        findings=(finding,), notes=(NASTY,),
    )  # fmt: skip


class _Reader(html.parser.HTMLParser):
    """Parser that collects text and tags and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.text, self._open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(text: str) -> _Reader:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert not reader._open
    return reader


def test_text_contains_the_report(report):
    text = str(report)
    assert "fsdp() on fsdp=8 · cpu · 8 devices" in text.splitlines()[0]
    assert "✔ collectives match the strategy" in text
    assert render.human_bytes(report.memory.peak_bytes) in text
    for total in report.totals["fsdp"].values():
        assert render.human_bytes(total.bytes_sent_per_device) in text
    for note in report.notes:
        assert note in " ".join(text.split())
    assert repr(report) == "<Report: fsdp() on 8 devices, cpu, as expected>"
    assert "OVERLAP" not in text  # a CPU program has no timeline; the notes state the reason
    assert report.overlap.reason in " ".join(text.split())


@pytest.mark.parametrize("columns", [60, 100, 160])
@pytest.mark.parametrize("name", ["nothing", "wrong_name"])
def test_lines_fit_the_width_and_numbers_do_not_wrap(reports, name, columns):
    text = render.text_of(render.as_rich(reports[name]), columns)
    assert max(map(len, text.splitlines())) <= columns
    for total in reports[name].totals.values():
        for one in total.values():
            assert render.human_bytes(one.bytes_sent_per_device) in text


def timed(report, step_s, low_s, high_s, **changes):
    """Return the report with a predicted step time, its range and other changes."""
    bracket = Bracket(low_s=low_s, high_s=high_s, sources=("data sheets",))
    compute = dataclasses.replace(
        report.compute, predicted_step_s=step_s, bracket=bracket, bound="compute", utilisation=0.87
    )
    return dataclasses.replace(report, compute=compute, **changes)


@pytest.mark.parametrize(
    ("step_s", "says"),
    [
        (0.0388, "a step takes 38.2 ms to 57.8 ms, 38.8 ms in the simulated schedule, bound by compute, 87% model"),
        *((outside_s, "a step takes 38.2 ms to 57.8 ms, bound by compute") for outside_s in (0.0300, 0.0600)),
    ],
)
def test_headline_has_a_range_and_no_time_outside_it(report, step_s, says):
    speed = render.headline(timed(report, step_s, 0.0382, 0.0578))[-1]
    assert speed.text.startswith(says)
    assert speed.style == ""


def test_headline_repeats_findings_that_invalidate_it(report):
    wide = Finding(
        rule="wide-compute", module="", source="model.py:3", nbytes=0, fix="give the embedding a dtype",
        message="100% of the matmul FLOPs are in float32",
    )  # fmt: skip
    other = dataclasses.replace(wide, rule="slow-axis", message="a slow axis")
    *_, speed, finding = render.headline(timed(report, 0.0388, 0.0382, 0.0578, findings=(other, wide)))
    assert speed.style == "warn"
    assert finding.style == "bad"
    assert "100% of the matmul FLOPs are in float32" in finding.text
    assert "100% of the matmul FLOPs" not in " ".join(cell.text for cell in render.headline(report))


def test_unexpected_collectives_come_first_with_line_and_fix(reports):
    text = str(reports["wrong_name"])
    assert text.index("Unexpected") < text.index("Found")
    first = reports["wrong_name"].matching.unexpected[0]
    assert render.short_source(first.source) in text
    assert first.fix[:40] in text
    assert text.count("as above") >= 1  # a repeated fix is printed once
    assert render.unexpected_text(first).startswith(f"{first.kind} over {first.axes[0]} of {first.tensor}")


def test_collectives_are_sorted_by_cost_and_truncated(report):
    one = report.collectives[0]
    many = tuple(
        dataclasses.replace(one, collective=dataclasses.replace(one.collective, module=f"m{i}", count_per_step=i + 1))
        for i in range(120)
    )
    many = dataclasses.replace(report, collectives=many)
    text = str(many)
    places = [text.index(f" m{i} ") for i in (119, 118, 110, 101)]
    assert places == sorted(places)
    assert " m3 " not in text
    assert "and 100 more, smaller" in text
    page = render.as_html(many)
    assert "m3 ·" in page  # folded, not omitted
    assert page.count("<details>") == 1


def test_empty_report(empty):
    text = str(empty)
    assert "The program has no collectives." in text
    assert "each device sends" not in text
    assert "one device" in text
    read(render.as_html(empty))


def test_memory_lists_remedies_if_it_does_not_fit(report):
    fixes = (
        Remedy(change="remat=full", peak_bytes=70 * 10**9, fits=True),
        Remedy(change="strategy=zero2()", peak_bytes=None, fits=False, reason="the batch does not divide"),
    )
    memory = dataclasses.replace(
        report.memory, peak_bytes=96 * 10**9, limit_bytes=80 * 10**9, fits=False, remedies=fixes
    )
    text = str(dataclasses.replace(report, memory=memory))
    assert "✘ does not fit: 96 GB of 80 GB (120%)" in text
    assert "meshpar explain RECIPE --fit" in text
    assert re.search(r"✔ +remat=full +70 GB", text)
    assert re.search(r"✘ +strategy=zero2\(\) +– +the batch does not divide", text)


def test_memory_bars_are_relative_to_the_largest_size(report):
    memory = dataclasses.replace(report.memory, limit_bytes=10**6 * report.memory.peak_bytes)
    section = render._memory(dataclasses.replace(report, memory=memory))
    shares = [row[-1].share for row in section.parts[0].rows]
    assert max(shares) == 1.0
    assert sum(share > 0.01 for share in shares) > 2


def test_places_are_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert render.short_source(f"{tmp_path}/a/b.py:7") == "a/b.py:7"
    assert render.short_source("/elsewhere/deep/down/model.py:12") == "down/model.py:12"
    assert render.short_source("") == ""


def test_terminal_output_escapes_markup(nasty):
    text = render.text_of(render.as_rich(nasty), 4000)  # wide enough that no cell is folded
    assert "\x1b" not in text
    shown = NASTY.replace("\x1b", "�")
    assert text.count(shown) >= 15


def test_html_escapes_markup(nasty):
    svg = "<svg></svg>"
    page = as_page([(NASTY, nasty), (NASTY, nasty)], title=NASTY, pictures=[{NASTY: svg}, {NASTY: svg}])
    parsed = read(page)
    assert parsed.tags.count("script") == 3  # the data of each report, and the code of the page
    assert "\x1b" not in page
    assert "".join(parsed.text).count("<script>alert(1)</script>&amp;") >= 15
    assert set(parsed.tags) <= {
        *("html", "head", "meta", "title", "style", "body", "div", "h2", "h3", "p", "span", "table", "thead", "tbody"),
        *("tr", "th", "td", "details", "summary", "img", "script", "h1"),
    }


def test_only_long_words_of_a_page_are_broken():
    rows = [("tensor", "meshpar/models/transformer.py:72")]
    page = render.Table(columns=("axes", "where"), rows=rows).html()
    assert 'class="short">tensor' in page
    assert "<td>meshpar" in page
    numbers = render.Table(columns=("first>", "second>"), rows=[("5 MB", "pipeline_parallel(stages=4) | ddp()")]).html()
    assert '<td class="n">5 MB' in numbers
    assert '<td class="n long">pipeline' in numbers


def test_html_is_self_contained(report):
    piece = report._repr_html_()
    assert piece.startswith('<div class="meshpar">')
    read(piece)
    page = as_page([("fsdp()", report)], title="a title")
    read(page)
    assert page.startswith("<!doctype html>")
    assert "color-scheme:light dark" in page
    for text in (piece, page):
        assert not re.findall(r"https?://(?!www.w3.org/2000/svg)|url\(|@import|fetch\(|src=\"(?!data:)", text)
