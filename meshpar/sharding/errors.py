"""Errors caused by user input, and shared validators. Does not import jax."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class MeshparError(ValueError):
    """An error caused by user input.

    The message reads "`where`: cannot `requested`: `reason`. `Fix`.", or "`where`: `reason`. `Fix`." without a request.

    Attributes:
      where: the argument, file or array that the error is about.
      requested: the request, as an infinitive without "to", or empty if `where` states it, such as `top_k=0`.
      reason: why the request cannot work.
      fix: a solution, as an imperative.
      code: a stable identifier for the kind of error, such as "unknown-axis". Tests compare the code, not the message.

    Example:
      >>> try:
      ...     mp.shardings(model, mesh, mp.fsdp() | mp.Rules(mpl="tensor"))
      ... except mp.MeshparError as error:
      ...     print(error.code)
      unmatched-rule
    """

    def __init__(self, where: str, requested: str, reason: str, fix: str, code: str = "invalid") -> None:
        self.where, self.requested, self.reason, self.fix, self.code = where, requested, reason, fix, code
        # A fix that starts with code keeps its case.
        sentence = fix[0].upper() + fix[1:] if re.match(r"[a-z]+ (?!install)", fix) else fix
        request = f"cannot {requested}: " if requested else ""
        super().__init__(f"{where}: {request}{reason}. {sentence}{'' if fix.endswith('?') else '.'}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str, str]]:
        # By default only the message is pickled. Test workers send errors between processes.
        return type(self), (self.where, self.requested, self.reason, self.fix, self.code)


def problem(where: str, requested: str, reason: str, fix: str, code: str = "invalid") -> MeshparError:
    """Return a `MeshparError` to raise."""
    return MeshparError(where, requested, reason, fix, code)


def is_int(value: object, minimum: float = -math.inf) -> bool:
    """Return whether a value is an integer of at least `minimum`. A bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= minimum  # type: ignore[operator]


def check_int(where: str, meaning: str, *, minimum: int = 0, **values: Any) -> None:
    """Check that keyword arguments are integers of at least `minimum`.

    Args:
      where: the function or object that received them.
      meaning: what the value is, as a noun phrase: "the number of micro-steps per update".
      minimum: the smallest valid value.
      **values: the arguments by name.
    """
    for name, value in values.items():
        if not is_int(value, minimum) or value >= 2**63:
            limit = " and less than 2**63" * is_int(value, minimum)
            reason = f"it is {meaning} and must be an integer of at least {minimum}{limit}"
            raise MeshparError(where, f"set {name}={value!r}", reason, f"use {name}={max(minimum, 1)}", "not-an-int")


def check_positive_int(where: str, meaning: str, **values: object) -> None:
    """Check that keyword arguments are positive integers; see `check_int`."""
    check_int(where, meaning, minimum=1, **values)


def check_bool(where: str, meaning: str, **values: object) -> None:
    """Check that keyword arguments are True or False. `meaning` is a clause: "the sequence is sharded"."""
    for name, value in values.items():
        if not isinstance(value, bool):
            reason = f"it determines whether {meaning} and must be True or False"
            raise MeshparError(where, f"set {name}={value!r}", reason, f"use {name}=True or {name}=False", "not-a-bool")


def check_choice(where: str, meaning: str, choices: Sequence[Any], **values: object) -> None:
    """Check that keyword arguments are among the choices; `meaning` as in `check_int`."""
    for name, value in values.items():
        if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
            names = ", ".join(repr(choice) for choice in choices)
            close = near(value, choices) if isinstance(value, str) else ""
            fix = close if close.endswith("?") else f"use {name}={choices[0]!r}"
            raise MeshparError(
                where, f"set {name}={value!r}", f"it is {meaning} and must be one of {names}", fix, "unknown-choice"
            )


def check_divides(where: str, requested: str, size: int, divisor: int, fix: str | None = None) -> None:
    """Check that `divisor` divides `size`. The default fix is to pad `size` to the next multiple."""
    if size % divisor:
        padded = -(-size // divisor) * divisor
        raise MeshparError(
            where, requested, f"{size} is not divisible by {divisor}", fix or f"pad it to {padded}", "indivisible"
        )


def check_cases(where: str, requested: str, code: str, *cases: tuple[object, str, str]) -> None:
    """Raise an error for the first case that applies. A case is a tuple (whether it applies, reason, fix)."""
    for applies, reason, fix in cases:
        if applies:
            raise MeshparError(where, requested, reason, fix, code)


def check_number(where: str, example: str, *, positive: bool = True, **values: Any) -> None:
    """Check that keyword arguments are finite and above 0, or at least 0 with `positive=False`.

    `example` is a valid value for the fix.
    """
    for name, value in values.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= sys.float_info.max or (positive and value == 0):
            reason = f"it must be a finite number {'above' if positive else 'of at least'} 0"
            raise MeshparError(where, f"set {name}={value!r}", reason, f"use {name}={example}", "out-of-range")


def near(word: str, options: Iterable[Any]) -> str:
    """Return a hint for a mistyped word: "did you mean `fsdp`?", or the list of the known words."""
    names = sorted({str(option) for option in options})
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(f"`{c}`" for c in close) + "?"
    shown = ", ".join(f"`{name}`" for name in names[:12]) + (", …" if len(names) > 12 else "")
    return f"known: {shown}" if names else "none are known"


def near_or(word: str, options: Iterable[Any], otherwise: str, *, list_known: bool = True) -> str:
    """Return "did you mean ...? If not, `otherwise`", or only `otherwise` if no option is similar to the word.

    Without a similar option, the known words are appended, unless `list_known` is False.
    """
    hint = near(word, options)
    if hint.endswith("?"):
        return f"{hint} If not, {otherwise}"
    return f"{otherwise} ({hint})" if list_known else otherwise


def named(f: Callable[..., Any]) -> str:
    """Return the name of a function with its file and line, if it is a Python function."""
    code = getattr(inspect.unwrap(f), "__code__", None)
    name = getattr(f, "__name__", str(f))
    return name if code is None else f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def check_takes(
    where: str,
    f: Callable[..., Any],
    arguments: tuple[str, ...],
    fix: str,
    *,
    keywords: Iterable[str] = (),
    name: str = "",
) -> None:
    """Check that the signature of a function accepts these arguments."""
    try:
        inspect.signature(f).bind(*arguments, **dict.fromkeys(keywords))
    except ValueError:  # functions written in C may have no signature
        return
    except TypeError as error:
        names = *arguments, *(f"{name}=..." for name in keywords)
        requested = f"call {name or getattr(f, '__name__', f)} with {', '.join(names) or 'no arguments'}"
        raise MeshparError(where, requested, str(error), f"write {fix}", "wrong-signature") from None
