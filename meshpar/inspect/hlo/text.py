"""Tokens of HLO text: parts outside of brackets and strings, and quoted strings."""

from __future__ import annotations

import re

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
    """Remove the quotes and escapes of a quoted string. Return other text unchanged."""
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "\"'":
        return text
    return re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)
