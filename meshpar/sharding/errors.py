"""The error that says where, what was asked, what exists and what to do; it needs no jax."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import os
from collections.abc import Iterable
from typing import Any


class MeshparError(ValueError):
    """A user's mistake, in four parts: where, what was asked, what exists, what to do."""

    def __init__(self, where: str, asked: str, exists: str, fix: str) -> None:
        self.where, self.asked, self.exists, self.fix = where, asked, exists, fix
        end = "" if fix.endswith("?") else "."
        super().__init__(f"{where}: asked to {asked}, but {exists}. To fix it: {fix}{end}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        # Exceptions pickle by their args; ours has four, and test workers send errors between processes.
        return type(self), (self.where, self.asked, self.exists, self.fix)


def problem(where: str, asked: str, exists: str, fix: str) -> MeshparError:
    """The error to raise for a user's mistake.

    Reads as "`where`: asked to `asked`, but `exists`. To fix it: `fix`."
    """
    return MeshparError(where, asked, exists, fix)


def is_whole(value: Any, least: float = -math.inf) -> bool:
    """Whether it is a whole number from `least` on; a truth value is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= least  # type: ignore[operator]


def check_count(where: str, asked: str, value: Any, fix: str = "use 1 or more") -> None:
    """Raises `ValueError` for what is no whole number from 1 on."""
    if not is_whole(value, 1):
        raise problem(where, asked, "it is a positive integer", fix)


def near(word: str, options: Iterable[str], *, most: int = 3) -> str:
    """The options closest to a mistyped word, as half a sentence for an error's fix."""
    known = sorted({str(option) for option in options})
    close = difflib.get_close_matches(word, known, n=most, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(f"`{c}`" for c in close) + "?"
    shown = ", ".join(f"`{k}`" for k in known[:12]) + (", …" if len(known) > 12 else "")
    return f"known: {shown}" if known else "none are known"


def near_or(word: str, options: Iterable[str], otherwise: str) -> str:
    """What to do about a string that is not among the options: the near ones first, or else another way out."""
    hint = near(word, options)
    return f"{hint} If not, {otherwise}" if hint.endswith("?") else f"{otherwise} ({hint})"


def named(f: Any) -> str:
    """Return the name of a function with its file and line, if it is a Python function."""
    code = getattr(inspect.unwrap(f), "__code__", None)
    name = getattr(f, "__name__", str(f))
    return name if code is None else f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def check_takes(
    where: str, f: Any, arguments: tuple[str, ...], fix: str, *, keywords: Iterable[str] = (), name: str = ""
) -> None:
    """Raises `ValueError` for a function that does not take these arguments, as its signature says."""
    try:
        inspect.signature(f).bind(*arguments, **dict.fromkeys(keywords))
    except ValueError:  # a function of C has none
        return
    except TypeError as error:
        names = *arguments, *(f"{name}=..." for name in keywords)
        asked = f"call {name or getattr(f, '__name__', f)} with {', '.join(names) or 'no arguments'}"
        raise problem(where, asked, f"that does not go: {error}", f"write {fix}") from None
