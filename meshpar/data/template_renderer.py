"""Rendering of chat templates in the immutable sandbox of jinja2, as in transformers.

The sandbox isolates templates from Python. It does not limit their time and memory.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

_BEGIN, _END = "\ud800", "\udfff"
"""Temporary markers of generated parts. Valid texts do not contain these characters."""


class _Generation(jinja2.ext.Extension):
    """Implements the tags `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        self.environment.has_generation_tags = True  # type: ignore[attr-defined]
        line, body = next(parser.stream).lineno, parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        self.environment.num_marks += 1  # type: ignore[attr-defined]
        return f"{_BEGIN}{caller()}{_END}"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    has_generation_tags = False
    num_marks = 0


class UnknownPosition(Exception):
    """Raised if the position of an answer in the text cannot be determined.

    The arguments are the index of the message and the generation prompt, which is not the start of the message. The
    prompt is empty if the template changes earlier messages.
    """


class Renderer:
    """A compiled template."""

    def __init__(self, source: str, variables: Mapping[str, str], date: str, *, max_chars: int) -> None:
        self._variables, self._max_chars = variables, max_chars
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        self._env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        del self._env.globals["lipsum"]  # generates random text
        self._env.globals["raise_exception"] = _raise
        self._env.globals["strftime_now"] = datetime.datetime.strptime(date, "%Y-%m-%d").strftime
        self._env.filters["tojson"] = _to_json
        names = self._env.parse(source).find_all(jinja2.nodes.Name)
        self.reads = {node.name for node in names if node.ctx == "load"}
        """Names of the variables that the template reads."""
        self._template = self._env.from_string(source)

    def render(self, messages: list[dict[str, Any]], extras: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
        """Return the texts of a conversation, each with the character spans of the answers; see `Template.render`."""
        text = functools.partial(self._text, extras)
        full, full_spans = text(messages, prompt=False)
        if self._env.has_generation_tags:
            return [(full, full_spans)]
        texts: list[tuple[str, list[Any]]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = text(messages[:number], prompt=True)
            upto, _ = text(messages[: number + 1], prompt=False)
            if not upto.startswith(before):
                history, _ = text(messages[:number], prompt=False)
                is_kept = before.startswith(history) and upto.startswith(history)
                raise UnknownPosition(number, before[len(history) :] if is_kept else "")
            spans = texts.pop()[1] if texts and upto.startswith(texts[-1][0]) else []
            texts.append((upto, [*spans, (len(before), len(upto))]))
        if not texts or full.startswith(texts[-1][0]):
            texts[-1:] = [(full, texts[-1][1] if texts else [])]
        self._check_length(sum(len(text) for text, _ in texts))
        return texts

    def _text(
        self, extras: Mapping[str, Any], messages: list[dict[str, Any]], *, prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        self._env.num_marks = 0
        text = self._template.render(messages=messages, add_generation_prompt=prompt, **extras, **self._variables)
        self._check_length(len(text))
        spans: list[tuple[int, int]] = []
        if self._env.num_marks:
            parts = re.split(f"[{_BEGIN}{_END}]", text)
            if len(parts) != 2 * self._env.num_marks + 1:
                raise ValueError("a generated part does not occur exactly once, or a message contains a surrogate")
            text, ends = "".join(parts), list(itertools.accumulate(map(len, parts)))
            spans = list(zip(ends[:-1:2], ends[1::2], strict=True))
        text.encode()  # fails for unpaired surrogates, which JSON can contain and tokenizers reject
        return text, spans

    def _check_length(self, num_chars: int) -> None:
        if num_chars > self._max_chars:
            raise ValueError(f"it writes {num_chars:,} characters, and the limit is {self._max_chars:,}")


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without HTML escapes, unlike jinja2's filter. The signature is as in transformers."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
