"""Progress and report of a run in the terminal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import IO, Any

import jax

from meshpar.pod import watchdog as watchdog


class Screen:
    """Progress and report of process 0: panels in a terminal, plain lines elsewhere."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream, self._is_first = stream, jax.process_index() == 0
        self._console: Any = None
        if self._is_first and stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console

            self._console = Console(file=stream, highlight=False)

    def print(self, text: str) -> None:
        if self._is_first:
            print(text, file=self.stream, flush=True)

    def progress(self, activity: str) -> contextlib.AbstractContextManager[Any]:
        """Show a spinner during the block, if the stream is a terminal."""
        return contextlib.nullcontext() if self._console is None else self._console.status(activity)

    def fields(self, title: str, fields: Mapping[str, str]) -> None:
        """Show names and values, one pair per line."""
        if self._console is None:
            self.print("\n".join(f"{name}: {value}" for name, value in fields.items()))
            return
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        for name, value in fields.items():
            grid.add_row(Text(name, style="dim"), Text(value))
        self._panel(title, grid)

    def text(self, title: str, text: str) -> None:
        """Show generated text, with control characters replaced."""
        printable = "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else "�" for c in text)
        if self._console is None:
            self.print("\n".join([f"{title}:", *(f"  | {line}" for line in printable.splitlines())]))
        else:
            from rich.text import Text

            self._panel(title, Text(printable))

    def _panel(self, title: str, content: Any) -> None:
        from rich.panel import Panel

        self._console.print(Panel(content, title=title, title_align="left", border_style="cyan", expand=False))
