"""Configs as JSON values, and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshpar.layers.precision import Precision
from meshpar.parallel import Strategy
from meshpar.sharding.mesh import MeshSpec
from meshpar.training.options import StepOptions


def to_plain(value: object) -> Any:
    """Convert a value to JSON values. Functions and other objects are represented by their names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, MeshSpec):
        inside = {} if value.inside_node == ("tensor",) else {"inside_node": list(value.inside_node)}
        types = {"axis_types": value.explicit_axes} if value.explicit_axes else {}
        return {**value, **inside, **types}
    if isinstance(value, Strategy):
        return value.label
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        has_one_type = isinstance(value, StepOptions | Precision)
        return plain_fields(value) if has_one_type else {"type": type(value).__name__, **plain_fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, functools.partial):
        args = [*map(repr, value.args), *(f"{key}={item!r}" for key, item in value.keywords.items())]
        return f"{to_plain(value.func)}({', '.join(args)})"
    if callable(value) and hasattr(value, "__qualname__"):
        # The module name of a recipe file depends only on how it was loaded.
        module = "" if value.__module__.startswith(("meshpar_recipe_", "__main__")) else f"{value.__module__}."
        return f"{module}{value.__qualname__}"
    return type(value).__name__


def plain_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON values."""
    return {field.name: to_plain(getattr(config, field.name)) for field in dataclasses.fields(config) if field.repr}


def from_plain(plain: Any, hint: Any) -> Any:
    """Invert `to_plain` for a config of a dataclass in the annotation `hint`.

    Fields that are missing in the file of an earlier version have their defaults. Other mappings are returned as they
    are.
    """
    if isinstance(plain, list):
        return tuple(from_plain(item, hint) for item in plain)
    if not isinstance(plain, Mapping):
        return plain
    kind = next((kind for kind in _dataclasses_in(hint) if kind.__name__ == plain.get("type")), None)
    if kind is None:
        return plain
    hints = typing.get_type_hints(kind)
    return kind(**{name: from_plain(value, hints.get(name)) for name, value in plain.items() if name != "type"})


def _dataclasses_in(hint: Any) -> Iterator[type]:
    """Yield the dataclasses in an annotation such as `tuple[LayerKind, ...] | None`."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for inner in typing.get_args(hint):
        yield from _dataclasses_in(inner)


def json_finite(value: object) -> Any:
    """Replace infinities and NaN, which JSON does not have, with strings."""
    if isinstance(value, Mapping):
        return {key: json_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def json_text(document: object) -> str:
    """Return a document as indented JSON, for a file."""
    return json.dumps(json_finite(document), indent=2, ensure_ascii=False) + "\n"
