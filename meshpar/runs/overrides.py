"""Overrides: fields of a recipe set from text by dotted path, typed by the annotations of the fields."""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from meshpar.parallel import Strategy, parse_strategy
from meshpar.runs.plain import to_plain
from meshpar.sharding.errors import MeshparError, near, near_or, problem

# Not for type checkers only: overrides read the annotations at run time.
from meshpar.sharding.host_resources import check_unicode
from meshpar.sharding.mesh import MeshSpec
from meshpar.training.options import RENAMED

T = TypeVar("T")
_Texts: TypeAlias = Mapping[tuple[str, ...], str]
"""Path of a field inside a config -> text of the new value. The empty path is the config itself."""


def override(recipe: T, assignments: Iterable[str]) -> T:
    """Return a recipe with fields set from assignments "dotted.path=text".

    The type of the field determines how the text is read: numbers, true and false, none, words, `a,b` for tuples,
    `fsdp=4,tensor=2` for the mesh, `fsdp() | tensor_parallel()` for the strategy. All assignments are applied together,
    so the order of related fields does not matter. The last assignment to a field wins.
    """
    texts: dict[tuple[str, ...], str] = {}
    for assignment in assignments:
        check_unicode(assignment, "an override")
        path, equals, text = assignment.partition("=")
        names = tuple(name.strip() for name in path.split("."))
        if not equals or not all(names):
            where, fix = f"override `{assignment}`", "write it like mesh.fsdp=8"
            raise problem(where, "set a field", "it is not path=value", fix, code="bad-syntax")
        texts[names] = text.strip()
    for names in texts:
        for outer in (names[:length] for length in range(1, len(names)) if names[:length] in texts):
            where, fix = f"override `{'.'.join(names)}`", f"set only fields of `{outer[-1]}`, or only `{outer[-1]}`"
            requested, reason = f"set `{outer[-1]}` and a field of it", "the order of the two is ambiguous"
            raise problem(where, requested, reason, fix, code="conflict")
    return _with(recipe, texts, ()) if texts else recipe


def _with(value: Any, texts: _Texts, path: tuple[str, ...]) -> Any:
    """Return `value` with the fields in `texts` set. `path` is the position of `value` in the recipe, for errors."""
    if isinstance(value, type | Strategy) or not (isinstance(value, Mapping) or dataclasses.is_dataclass(value)):
        outer, where = f"`{'.'.join(path)}`", f"`{'.'.join((*path, next(iter(texts))[0]))}`"
        reason, fix = f"{outer} is {value!r}, which has no fields", f"set {outer} itself, or change the recipe file"
        raise problem(where, "set it", reason, fix, code="unknown-name")
    changed: dict[str, Any] = {}
    for name in dict.fromkeys(names[0] for names in texts):
        inner = {names[1:]: text for names, text in texts.items() if names[0] == name}
        hint, field = _annotation(value, name, path), (*path, name)
        current = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
        if () in inner:
            changed[name] = read(inner[()], hint, field, current=current)
            continue
        for member in typing.get_args(hint) if current is None else ():
            if dataclasses.is_dataclass(member) and isinstance(member, type):
                with contextlib.suppress(TypeError):  # some fields have no default
                    current = member()
                    break
        changed[name] = _with(current, inner, field)
    if isinstance(value, Mapping):
        return value.replace(**changed) if isinstance(value, MeshSpec) else {**value, **changed}
    try:
        return dataclasses.replace(value, **changed)  # type: ignore[type-var]
    except MeshparError:
        raise
    except ValueError as error:  # from a class of the user
        requested = "set " + ", ".join(f"{'.'.join((*path, name))}={new!r}" for name, new in changed.items())
        where = f"`{'.'.join(path) or 'recipe'}`"
        raise problem(where, requested, str(error), "choose other values", code="invalid-value") from error


def _annotation(value: Any, name: str, path: tuple[str, ...]) -> Any:
    """Return the type of a field of a config, a mesh or a mapping."""
    where = f"`{'.'.join((*path, name))}`"
    if isinstance(value, MeshSpec):
        if name != "inside_node" and name not in value:
            requested, fix = f"set the size of axis `{name}`", near_or(name, value, f"add it with mesh={name}=2,fsdp=4")
            raise problem(where, requested, "the mesh has no such axis", fix, code="unknown-axis")
        return tuple[str, ...] if name == "inside_node" else int
    if isinstance(value, Mapping):
        return int | float | bool | str
    fields = {field.name for field in dataclasses.fields(value) if field.init}
    if name not in fields:
        elsewhere = [inner for inner in _paths(to_plain(value)) if inner.rpartition(".")[2] == name]
        others = " or ".join(f"`{'.'.join((*path, inner))}`" for inner in elsewhere[:3])
        reason, fix = f"{type(value).__name__} has no field `{name}`", f"did you mean {others}?"
        fix = f"it is now `{RENAMED[name]}`" if name in RENAMED else fix if others else near(name, fields)
        raise problem(where, "set a field", reason, fix, code="unknown-name")
    try:
        return typing.get_type_hints(type(value))[name]
    except NameError:  # an annotation that only a type checker can resolve
        return type(getattr(value, name))


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


class _Unreadable(Exception):
    """The text does not have the expected type."""


def read(text: str, hint: Any, path: tuple[str, ...], *, current: Any = None) -> Any:
    """Convert text to a value of the type `hint`. The path and current value of the field are for the error."""
    try:
        return _read(text, hint)
    except _Unreadable as error:
        field, reason = ".".join(path), f"it must be {inspect.formatannotation(hint)}"
        fix = str(error) or "write a value of this type"
        if dataclasses.is_dataclass(current) and not isinstance(current, Strategy):
            names = ", ".join(
                f"`{field}.{subfield.name}`" for subfield in dataclasses.fields(current)[:8] if subfield.init
            )
            fix = f"set its fields ({names}, …), or write `{path[-1]}=...` in the recipe file"
        raise problem(f"`{field}`", f"set it to `{text}`", reason, fix, code="wrong-type") from None


def _read(text: str, hint: Any) -> Any:
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    unquoted = text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text
    if origin in (typing.Union, types.UnionType):
        message = ""
        # None first and strings last, because "none" and "3" are strings, too.
        for member in sorted(args, key=lambda m: (m is str or m is Any, m is not types.NoneType)):
            try:
                return _read(text, member)
            except _Unreadable as error:
                message = str(error) or message
        raise _Unreadable(message)
    if origin is Literal:
        for choice in args:
            if unquoted == str(choice):
                return choice
        raise _Unreadable(near(text, args))
    if origin in _WORDS:
        if text.lower() not in _WORDS[origin]:
            raise _Unreadable
        return _WORDS[origin][text.lower()]
    if origin in (int, float):
        return _read_number(text, origin)
    if origin in (tuple, list, collections.abc.Sequence):
        return _read_many(text, origin, args)
    if origin in (dict, collections.abc.Mapping):
        items = _read_literal(text)
        if not isinstance(items, dict):
            raise _Unreadable('write it like {"a": 1}')
        return {_read(_text_of(key), args[0]): _read(_text_of(value), args[1]) for key, value in items.items()}
    readers: dict[Any, Callable[[str], Any]] = {
        Any: _read_literal, MeshSpec: MeshSpec.parse, Strategy: parse_strategy, str: lambda _: unquoted,
        Path: lambda _: Path(unquoted),
    }  # fmt: skip
    if origin not in readers:
        raise _Unreadable("change the recipe file, because this type cannot be written as text")
    return readers[origin](text)


_WORDS: Mapping[Any, Mapping[str, bool | None]] = {
    types.NoneType: {"none": None, "null": None},
    bool: {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False},
}


def _read_number(text: str, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(text)
    except ValueError:
        raise _Unreadable from None
    if kind is int and abs(number) >= 2**63:  # a larger integer may overflow a float, too
        raise _Unreadable("use an integer below 2^63")
    if not math.isfinite(number):
        raise _Unreadable("use a finite number")
    return number


def _read_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two if nested too deeply
        return text


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _read_many(text: str, kind: Any, args: tuple[Any, ...]) -> Any:
    """Read `a,b`, `(1, 2)` or `["a", "b"]`."""
    items = _read_literal(text) if text[:1] in ("(", "[") else None
    if isinstance(items, tuple | list):
        texts = [_text_of(item) for item in items]
    else:
        words = text if items is None else text[1:-1].strip()  # words without quotes, such as (a, b)
        if items is not None and (not words or set(words) & set("()[]")):
            raise _Unreadable("write it like a,b")
        texts = [word.strip() for word in words.split(",") if word.strip()]
    if not args:
        values = [_read_literal(item) for item in texts]
    elif kind is not tuple or args[-1] is Ellipsis:
        values = [_read(item, args[0]) for item in texts]
    elif len(texts) == len(args):
        values = [_read(item, arg) for item, arg in zip(texts, args, strict=True)]
    else:
        raise _Unreadable(f"write {len(args)} values, separated by commas, instead of {len(texts)}")
    return values if kind is list else tuple(values)
