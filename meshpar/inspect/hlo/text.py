"""Tokens of HLO text: parts outside of brackets and strings, and quoted strings."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"((?:\\[0-7]{3})+)|\\(.)", re.DOTALL)
"""Escapes of XLA's text: bytes of UTF-8 as octal numbers, or a character."""
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')


class HloSyntaxError(ValueError):
    """The text is not an HLO module as XLA prints it."""


def split_top(text: str, start: int = 0) -> tuple[list[str], int]:
    """Split text at the commas outside of brackets and strings, without empty parts.

    Returns:
      The parts from `start` to the closing bracket of an outer group or to the end of the text, and the end position.
    """
    parts, begin, end, depth = [], start, len(text), 0
    for match in _MARK.finditer(text, start):
        mark = match.group()
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
            if depth < 0:
                end = match.start()
                break
        elif mark == "," and not depth:
            parts.append(text[begin : match.start()])
            begin = match.end()
    parts.append(text[begin:end])
    return [part for raw in parts if (part := raw.strip())], end


def unquote(text: str) -> str:
    r"""Remove the quotes and escapes of a quoted string. Return other text unchanged.

    >>> unquote(r'"a\"b\346\227\245"')
    'a"b日'
    """
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "\"'":
        return text
    return _ESCAPE.sub(_unescaped, text[1:-1])


def _unescaped(found: re.Match[str]) -> str:
    octal, char = found.groups()
    if octal is None:
        return _CONTROL.get(char, char)
    return bytes(int(number, 8) & 255 for number in octal[1:].split("\\")).decode(errors="replace")
