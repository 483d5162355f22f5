"""Base classes and helpers to print reports as rich tables, as text and as JSON."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from meshpar.sharding.errors import problem

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")


def plain(value: object) -> Any:
    """Convert a value to dicts, lists and scalars for JSON. A `to_json` method takes precedence."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def parsed(kind: type[T], data: Mapping[str, Any], where: str, fix: str) -> T:
    """Return a dataclass from JSON data, without derived properties. Lists become tuples."""
    try:
        return kind(**{key: tuple(x) if isinstance(x, list) else x for key, x in data.items()})
    except (TypeError, AttributeError) as error:
        raise problem(where, f"read a {kind.__name__}", str(error), fix, code="damaged-file") from error


def abbreviated(data: object) -> str:
    """Return plain data as text of at most 80 characters."""
    text = json.dumps(data, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def flat(nested: Mapping[str, Mapping[str, T]]) -> dict[tuple[str, str], T]:
    """Flatten a nested mapping: `{a: {b: x}}` becomes `{(a, b): x}`."""
    return {(outer, inner): value for outer, mapping in nested.items() for inner, value in mapping.items()}


def human_mesh(mesh: Mapping[str, int]) -> str:
    """Return the mesh axes larger than 1 as text: `fsdp=4, tensor=2`."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "one device"


class Plain:
    """Base class of dataclasses with a `to_json` method."""

    __slots__ = ()
    derived: ClassVar[tuple[str, ...]] = ()
    """Properties to include in the JSON data."""

    def to_json(self) -> dict[str, Any]:
        """Return the derived properties and the fields with `repr=True` as JSON data."""
        fields = (field.name for field in dataclasses.fields(self) if field.repr)  # type: ignore[arg-type]
        return {name: plain(getattr(self, name)) for name in (*fields, *self.derived)}


class Printed:
    """Base class of objects with `__rich__`. `str` renders them without colors, 160 columns wide."""

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
) -> RenderableType:
    """Return a rich table. An empty row separates two sections. Columns in `left` are left-aligned."""
    from rich.table import Table

    result = Table(title=title, caption=caption, caption_justify="left")
    for column in columns:
        result.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        if row:
            result.add_row(*row)
        else:
            result.add_section()
    return result


def with_field_docs(cls: type[T]) -> type[T]:
    """Append the docstrings of the fields of a dataclass to the docstring of the class, so that `help` shows them."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    lines = ["", "", "Fields:"]
    for field, doc in itertools.pairwise(node.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(doc, ast.Expr):
            continue
        if isinstance(field.target, ast.Name) and isinstance(doc.value, ast.Constant):
            text = textwrap.indent(inspect.cleandoc(str(doc.value.value)), "    ").lstrip()
            lines.append(f"  {field.target.id}: {text}")
    cls.__doc__ = inspect.cleandoc(cls.__doc__ or "") + "\n".join(lines)
    return cls
