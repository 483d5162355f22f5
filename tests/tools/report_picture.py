"""Draw the pictures of `explain`'s report of a decoder for eight H100s: the numbered text, and the HTML page.

    python -m tests.tools.report_picture docs/images/report.svg
    python -m tests.tools.report_picture docs/images/report_page.png    # needs a Chromium browser on the PATH

It needs the `aot` extra.
"""

from __future__ import annotations

import html
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from rich.console import Console

import meshpar as mp
from meshpar.inspect.page import as_page
from meshpar.inspect.report import Report
from meshpar.models import TransformerConfig, next_token_loss
from tests.tools.browser import BROWSER

NUM_COLUMNS = 120
FONT_PX, LINE_PX, COLUMN_PX, MARGIN_PX = 13, 17, 7.83, 44
MARKS = {"fsdp() |": 1, "MEMORY": 2, "EXPECTED COLLECTIVES": 3, "COLLECTIVES": 4, "OVERLAP": 5, "COMPUTE": 6}
"""Start of the first line of each part, and its number in docs/explain.md."""
HIDDEN = ("  Largest", "  From kernels", "  By source line", "  Not overlapped")
"""Tables that the picture leaves out, up to the next part or the line before a table of sums."""


def report() -> Report:
    config = TransformerConfig(
        vocab_size=32_000, num_layers=8, embed_dim=2048, num_heads=16, num_kv_heads=8, head_dim=128, mlp_dim=5632
    )
    mesh, strategy = mp.MeshSpec(fsdp=4, tensor=2).abstract(), mp.fsdp() | mp.tensor_parallel()
    state = mp.abstract_state(config.build(), optax.adam(1e-3), mesh=mesh, strategy=strategy)
    batch = {name: jax.ShapeDtypeStruct((16, 2048), np.int32) for name in ("inputs", "targets")}
    step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"), remat="dots")
    return mp.explain(step, state, batch, cluster="h100:1x8")


def lines_of(report: Report) -> list[str]:
    """Return the lines of the report without the long tables and without empty lines."""
    console = Console(width=NUM_COLUMNS)
    with console.capture() as capture:
        console.print(report)
    lines, is_hidden = [], False
    for line in capture.get().splitlines():
        if line.startswith("NOTES"):
            break
        if line.startswith((*MARKS, "   axes", "  Losses")):
            is_hidden = False
        is_hidden = is_hidden or line.startswith(HIDDEN)
        if line.strip() and not is_hidden:
            lines.append(line.rstrip())
    return lines


def svg(lines: list[str]) -> str:
    """Return a picture of text lines, with the numbers of `MARKS` in the left margin."""
    width, height = MARGIN_PX + COLUMN_PX * NUM_COLUMNS + 12, LINE_PX * (len(lines) + 2)
    shapes = []
    for row, line in enumerate(lines):
        y = LINE_PX * (row + 2)
        number = next((number for start, number in MARKS.items() if line.startswith(start)), None)
        weight = ' font-weight="bold"' if number else ""
        shapes.append(f'<text x="{MARGIN_PX}" y="{y}" xml:space="preserve"{weight}>{html.escape(line)}</text>')
        if number:
            shapes.append(f'<circle cx="20" cy="{y - 5}" r="10" fill="#0969da"/>')
            shapes.append(f'<text x="20" y="{y}" fill="white" text-anchor="middle">{number}</text>')
    style = f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{FONT_PX}" fill="#1f2328"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" {style}>',
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#f6f8fa"/>',
        *shapes,
        "</svg>\n",
    ])  # fmt: skip


def photograph(file: Path) -> None:
    """Write a screenshot of the first views of the page."""
    compiled = report()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(as_page([(compiled.strategy, compiled)], title="explain"))
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,680", f"--user-data-dir={folder}")
        subprocess.run([BROWSER, *options, f"--screenshot={file.absolute()}", page.as_uri()], check=True)


if __name__ == "__main__":
    picture = Path(sys.argv[1])
    if picture.suffix == ".png":
        photograph(picture)
    else:
        picture.write_text(svg(lines_of(report())))
