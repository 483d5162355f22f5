"""The process that renders a chat template, limited in processor time, memory and output.

    meshpar.data.template ── pickled conversation ──► this process ── texts or an error, as a line of JSON ──► back

A template is a program of somebody else. jinja2's sandbox keeps it from everything outside of it. The kernel ends this
process if one conversation takes too long, even inside a single call of C, and gives it no more than its memory.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import pickle
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from meshpar.data.template import EXTRAS

_BEGIN, _END = "\ud800", "\udfff"
"""Mark the start and the end of a generated part until it is cut out. No valid text contains these characters."""


class _Generation(jinja2.ext.Extension):
    """The tags `{% generation %}` and `{% endgeneration %}`."""

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


class _Rejected(Exception):
    """A message whose position in the text cannot be found: its number."""


class Renderer:
    """A compiled template."""

    def __init__(self, source: str, variables: Mapping[str, str], date: str, *, max_chars: int) -> None:
        self._variables, self._max_chars = variables, max_chars
        self._env = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        del self._env.globals["lipsum"]  # random text
        self._env.globals["raise_exception"] = _raise
        self._env.globals["strftime_now"] = datetime.datetime.strptime(date, "%Y-%m-%d").strftime
        self._env.filters["tojson"] = _to_json
        names = self._env.parse(source).find_all(jinja2.nodes.Name)
        self.reads = {node.name for node in names if node.ctx == "load"} & {*EXTRAS}
        self._template = self._env.from_string(source)

    def render(self, messages: list[dict[str, Any]], extras: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
        """Return the texts of a conversation, each with the character spans of its answers; see `Template.render`."""
        text = functools.partial(self._text, extras)
        full, full_spans = text(messages, prompt=False)
        if self._env.has_generation_tags:
            return [(full, full_spans)]
        found: list[tuple[str, list[Any]]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = text(messages[:number], prompt=True)
            upto, _ = text(messages[: number + 1], prompt=False)
            if not upto.startswith(before):
                raise _Rejected(number)
            spans = found.pop()[1] if found and upto.startswith(found[-1][0]) else []
            found.append((upto, [*spans, (len(before), len(upto))]))
        if not found or full.startswith(found[-1][0]):
            found[-1:] = [(full, found[-1][1] if found else [])]
        self._check_length(sum(len(text) for text, _ in found))
        return found

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
                raise ValueError("a part marked as generated is not written exactly once, or a message has a surrogate")
            text, ends = "".join(parts), list(itertools.accumulate(map(len, parts)))
            spans = list(zip(ends[:-1:2], ends[1::2], strict=True))
        text.encode()  # JSON can contain half of a surrogate pair, which no tokenizer takes
        return text, spans

    def _check_length(self, chars: int) -> None:
        if chars > self._max_chars:
            raise ValueError(f"it writes {chars:,} characters, and {self._max_chars:,} are the most")


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON with the arguments of transformers; jinja2's own filter escapes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _reply(function: Callable[..., Any], *args: Any) -> bytes:
    try:
        return json.dumps({"result": function(*args)}, ensure_ascii=False).encode()
    except _Rejected as rejected:
        reply = {"rejected": rejected.args[0]}
    except MemoryError:
        reply = {"error": "it needs too much memory"}
    except Exception as error:  # a template fails in any way: SyntaxError, RecursionError, AssertionError
        reply = {"error": f"{type(error).__name__}: {' '.join(str(error)[:1000].split())[:200]}"}
    return json.dumps(reply).encode()


def main() -> None:
    """Compile the first request's template, then render each further request, until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--bytes", type=int)
    parser.add_argument("--chars", type=int)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, at whose end the input ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # other systems do not limit memory
        resource.setrlimit(resource.RLIMIT_AS, (args.bytes, args.bytes))
    requests, replies, renderer = sys.stdin.buffer, sys.stdout.buffer, None

    def compile_template(*request: Any) -> list[str]:
        nonlocal renderer
        renderer = Renderer(*request, max_chars=args.chars)
        return sorted(renderer.reads)

    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, args.seconds)  # at its end, SIGPROF ends this process
        reply = _reply(compile_template if renderer is None else renderer.render, *request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
