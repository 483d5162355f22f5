"""Process that renders a chat template with limited processor time, memory and output.

    meshpar.data.template ── pickled conversation ──► this process ── a line of JSON: texts or an error ──► back

Templates are untrusted programs. The sandbox of jinja2 isolates them. The kernel limits the memory of this process, and
stops it if rendering exceeds the time limit, even during a single call of a C function.
"""

from __future__ import annotations

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


class _Rejected(Exception):
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
        self.reads = {node.name for node in names if node.ctx == "load"} & {*EXTRAS}
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
                raise _Rejected(number, before[len(history) :] if is_kept else "")
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


def _reply(function: Callable[..., Any], *args: Any) -> bytes:
    try:
        return json.dumps({"result": function(*args)}, ensure_ascii=False).encode()
    except _Rejected as rejected:
        reply = {"rejected": rejected.args[0], "prompt": rejected.args[1]}
    except MemoryError:
        reply = {"error": "it needs too much memory"}
    except Exception as error:  # including SyntaxError, RecursionError and AssertionError
        reply = {"error": f"{type(error).__name__}: {' '.join(str(error)[:1000].split())[:200]}"}
    return json.dumps(reply).encode()


def main() -> None:
    """Compile the template of the first request, then render the conversations of further requests."""
    max_seconds, max_bytes, max_chars = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; its exit closes the input
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # other systems do not enforce the limit
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    requests, replies, renderer = sys.stdin.buffer, sys.stdout.buffer, None

    def compile_template(*request: Any) -> list[str]:
        nonlocal renderer
        renderer = Renderer(*request, max_chars=max_chars)
        return sorted(renderer.reads)

    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, max_seconds)  # SIGPROF ends this process
        reply = _reply(compile_template if renderer is None else renderer.render, *request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
