"""Reports as rich tables, and as plain text where they become strings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any


class Printed:
    """What has `__rich__`; as a string it is the same without colours, 160 columns wide."""

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160, color_system=None, force_terminal=False, force_jupyter=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    left: Collection[str] = (),
    caption: str | None = None,
) -> Any:
    """A rich table. An empty row stands for a line between two sections.

    Args:
      title: above it.
      columns: their heads.
      rows: of strings and rich's own renderables.
      left: the columns that are aligned to the left; the others are numbers.
      caption: below it, one line or more.
    """
    from rich.table import Table

    made = Table(title=title, caption=caption, caption_justify="left")
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        if row:
            made.add_row(*row)
        else:
            made.add_section()
    return made
