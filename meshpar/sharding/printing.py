"""Reports as rich tables, as plain text where they become strings, and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

Of = TypeVar("Of")


def plain(value: Any) -> Any:
    """A value as JSON has it: what has `to_json` as that says, records and mappings as dicts, sequences as lists."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def flat(nested: Mapping[str, Mapping[str, Of]]) -> dict[tuple[str, str], Of]:
    """What is known by one name and then another, by both at once."""
    return {(outer, inner): value for outer, named in nested.items() for inner, value in named.items()}


def human_mesh(mesh: Mapping[str, int]) -> str:
    """The axes that split something: `fsdp=4, tensor=2`."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "one device"


class Plain:
    """A dataclass that becomes plain data: its fields, but for those not printed, and what is derived from them."""

    __slots__ = ()
    derived: ClassVar[tuple[str, ...]] = ()
    """Properties that the data hold, too."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain data."""
        fields = (field.name for field in dataclasses.fields(self) if field.repr)  # type: ignore[arg-type]
        return {name: plain(getattr(self, name)) for name in (*fields, *self.derived)}


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
    """A rich table. An empty row stands for a line between two sections."""
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
