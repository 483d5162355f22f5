"""A cursor over HLO text: white space, words, strings, bracketed groups, and errors with line numbers."""

from __future__ import annotations

import re

MAX_DEPTH = 200
"""Maximum nesting of brackets; real programs stay below ten."""

# Possessive quantifiers keep these patterns from backtracking on any input. They contain no lookahead, because
# lookahead inside a possessive group fails on early releases of Python 3.11.
_COMMENT = r"/\*[^*]*+\*++(?:[^/*][^*]*+\*++)*+/"
_SPACE = re.compile(r"(?:[ \t\r\n]++|" + _COMMENT + r"|//[^\n]*+)*+")
_STRING = re.compile(r"\"[^\"\\]*+(?:\\.[^\"\\]*+)*+\"|'[^'\\]*+(?:\\.[^'\\]*+)*+'", re.DOTALL)
_MARK = re.compile(r"[\"'(){}\[\]]|/\*")
_PLAIN_VALUE = re.compile(r"[^,\"'(){}\[\]\n/]*+")
_CLOSER = {"(": ")", "{": "}", "[": "]"}


class HloSyntaxError(ValueError):
    """The text is not an HLO module; `line` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        self.message, self.line = message, line
        super().__init__(f"HLO text, line {line}: {message}")

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (self.message, self.line)


class Scanner:
    """A reader of `text` that advances `pos`."""

    def __init__(self, text: str, *, first_line: int = 1) -> None:
        self.text = text
        self.pos = 0
        self._counted_pos, self._counted_line = 0, first_line

    def line(self) -> int:
        """Return the line of `pos`. Counting resumes at the previous call, so a call per instruction stays linear."""
        if self.pos < self._counted_pos:
            return self._counted_line - self.text.count("\n", self.pos, self._counted_pos)
        self._counted_line += self.text.count("\n", self._counted_pos, self.pos)
        self._counted_pos = self.pos
        return self._counted_line

    def error(self, message: str) -> HloSyntaxError:
        """Return the error to raise for the text at `pos`."""
        text = self.text[self.pos : self.pos + 40].split("\n", 1)[0]
        return HloSyntaxError(f"{message}, found {text!r}", self.line())

    def at_end(self) -> bool:
        return self.pos >= len(self.text)

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.pos)
        assert match is not None
        self.pos = match.end()

    def take(self, literal: str) -> bool:
        if self.text.startswith(literal, self.pos):
            self.pos += len(literal)
            return True
        return False

    def expect(self, literal: str) -> None:
        if not self.take(literal):
            raise self.error(f"expected {literal!r}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.pos)
        if match is not None:
            self.pos = match.end()
        return match

    def string(self) -> str:
        """Read a quoted string and return it with its quotes."""
        match = self.match(_STRING)
        if match is None:
            raise self.error("expected a quoted string")
        return match.group()

    def group(self) -> str:
        """Read a bracketed group, including strings and inner groups, and return it with its brackets."""
        start, closers = self.pos, []
        while mark := _MARK.search(self.text, self.pos):
            self.pos = mark.start()
            mark_text = mark.group()
            if mark_text in _CLOSER:
                closers.append(_CLOSER[mark_text])
                self.pos += 1
                if len(closers) > MAX_DEPTH:
                    raise self.error(f"brackets nest deeper than {MAX_DEPTH}")
            elif mark_text in "\"'":
                self.string()
            elif mark_text == "/*":
                self._comment()
            elif not closers or mark_text != closers.pop():
                raise self.error("a closing bracket has no opening bracket")
            else:
                self.pos += 1
                if not closers:
                    return self.text[start : self.pos]
        self.pos = start
        raise self.error("a bracket is never closed")

    def value(self) -> str:
        """Read an attribute's value, up to the next comma, line end or closing bracket outside any group."""
        start = self.pos
        while True:
            self.match(_PLAIN_VALUE)
            next_char = self.text[self.pos : self.pos + 1]
            if next_char in _CLOSER:
                self.group()
            elif next_char in ("'", '"'):
                self.string()
            elif self.text.startswith("/*", self.pos):
                self._comment()
            elif next_char == "/":
                self.pos += 1
            else:
                return self.text[start : self.pos].strip()

    def _comment(self) -> None:
        end = self.text.find("*/", self.pos)
        if end < 0:
            raise self.error("a comment is never closed")
        self.pos = end + 2


def split_top(text: str, line: int, separator: str = ",") -> list[str]:
    """Split text at separators outside brackets and strings, dropping empty parts."""
    if not any(mark in text for mark in "([{\"'/"):
        return [part for raw in text.split(separator) if (part := raw.strip())]
    scanner, parts, start = Scanner(text, first_line=line), [], 0
    stop = re.compile(r"[\"'({\[" + re.escape(separator) + r"]|/\*")
    while match := stop.search(text, scanner.pos):
        scanner.pos = match.start()
        if match.group() == separator:
            parts.append(text[start : match.start()])
            scanner.pos = start = match.end()
        elif match.group() in _CLOSER:
            scanner.group()
        elif match.group() == "/*":
            scanner._comment()
        else:
            scanner.string()
    parts.append(text[start:])
    return [part for raw in parts if (part := _without_comments(raw).strip())]


def _without_comments(text: str) -> str:
    return re.sub(_COMMENT, " ", text) if "/*" in text else text


def unquote(text: str) -> str:
    """Remove the quotes and escapes of a quoted string; return other text unchanged."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        body = text[1:-1]
        return re.sub(r"\\(.)", r"\1", body, flags=re.DOTALL) if "\\" in body else body
    return text
