"""A report as a self-contained HTML page: tables, and views of mesh, timeline and kernels.

    Report ─► tables and pictures (render.py) ┐
           ─► JSON of tensors and ops ────────┴─► page.js draws the views in the browser

The page loads nothing from a network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from meshpar.inspect.render import Section, as_html, escaped
from meshpar.inspect.report_data import StepData
from meshpar.inspect.timeline.simulator import Segment
from meshpar.sharding.types import Decision, axes_of_spec

VIEWS = {"mesh": "Mesh and shards", "timeline": "Simulated timeline"}
"""Titles of the views that page.js draws."""


def as_page(
    reports: Sequence[tuple[str, StepData]],
    *,
    title: str,
    pictures: Sequence[Mapping[str, str]] = (),
    more: Iterable[Section] = (),
) -> str:
    """Return one report, or two side by side, as an HTML page.

    Args:
      reports: one or two pairs of a label and a report.
      title: title of the page.
      pictures: caption -> SVG, for each report.
      more: further sections, above the reports.
    """
    columns = []
    for number, (label, report) in enumerate(reports):
        data = json.dumps(_data(report), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
        heading = f"<h1>{escaped(label)}</h1>" if len(reports) > 1 else ""
        views = "".join(
            f'<h2>{heading_of_view}</h2><div data-view="{view}"></div>'
            for view, heading_of_view in VIEWS.items()
            if view != "timeline" or report.timeline is not None
        )
        body = as_html(report, pictures=pictures[number] if pictures else None, views=views)
        columns.append(
            f'<div>{heading}<div class="meshpar" data-report="{number}">{body}</div>'
            f'<script type="application/json" id="data-{number}">{data}</script></div>'
        )
    sections = "\n".join(section.html() for section in more)
    above = f'<div class="meshpar">{sections}</div>' if sections else ""
    name = ' class="columns"' if len(reports) > 1 else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_file('page.css')}</style></head>\n"
        f"<body>\n{above}<div{name}>{''.join(columns)}</div>\n<script>{_file('page.js')}</script>\n</body></html>\n"
    )


def _file(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _data(report: StepData) -> dict[str, Any]:
    """Return the data of the views: the format that page.js reads."""
    strings: dict[str, int] = {}

    def index(text: str) -> int:
        return strings.setdefault(text, len(strings))

    segments = [_segment(segment, index) for segment in report.timeline.segments] if report.timeline else []
    tensors = []
    if (table := report.shardings) is not None:
        for group, decisions in (("parameter", table.params), ("optimizer", table.optimizer), ("state", table.extra)):
            tensors += [_tensor(group, decision) for decision in decisions if decision.leaf.shape]
    return {"mesh": dict(report.mesh), "tensors": tensors, "segments": segments, "strings": [*strings]}


def _tensor(group: str, decision: Decision) -> dict[str, Any]:
    leaf = decision.leaf
    spec = [*decision.spec, *(None,) * (len(leaf.shape) - len(decision.spec))]
    return {
        "group": group,
        "path": leaf.path,
        "shape": list(leaf.shape),
        "names": list(leaf.names or ()),
        "dtype": leaf.dtype.name,
        "spec": [list(axes_of_spec((entry,))) for entry in spec],
        "bytes": decision.bytes_per_device,
    }


def _segment(segment: Segment, index: Callable[[str], int]) -> dict[str, Any]:
    """Return a segment of the timeline. An op is [start, end, lane, kind, axes, module, name]; texts are indices."""
    return {
        "name": segment.name,
        "module": index(segment.module),
        "backward": segment.is_backward,
        "trips": segment.trip_count,
        "duration_s": segment.duration_s,
        "ops": [
            [
                float(f"{op.start_s:.9g}"), float(f"{op.end_s:.9g}"), int(op.stream == "communication"),
                *map(index, (op.kind, op.label, op.module, op.name)),
            ]
            for op in segment.ops
        ],
    }  # fmt: skip
