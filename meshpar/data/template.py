"""A chat template, as the tokenizers of Hugging Face have them, and the texts that it makes of conversations."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import read_json, read_text

DATE = "2024-07-26"
"""The day that Llama's templates write if they are given none."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Field names for the reasoning of an assistant's message."""
MAX_SECONDS = 5.0
"""Processor time that a template may take for one conversation. Published templates take milliseconds."""
MAX_CHARS = 10_000_000
"""Length of the texts of a conversation, in characters."""
MAX_BYTES = 1 << 29
"""Memory of the process that renders."""
EXTRAS = ("tools", "documents")
"""Fields of a record that a template may read, in addition to the messages."""


class Rendered(NamedTuple):
    """A text, and the character spans that the assistant writes."""

    text: str
    spans: list[tuple[int, int]]


class Template:
    """A chat template, which a process with limited time and memory renders (`template_process.py`).

    Raises:
      ValueError: jinja2 is not installed, or it cannot compile the template.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], *, where: str, date: str = DATE, tool_use: str | None = None
    ) -> None:
        self.where = where
        self._of_tools = None if tool_use is None else Template(tool_use, variables, where=where, date=date)
        if importlib.util.find_spec("jinja2") is None:
            exists, fix = "jinja2 is not installed", "pip install 'meshpar[hf]'"
            raise problem("meshpar.data.ChatData", "render a chat template", exists, fix)
        self._process = _Process((source, dict(variables), date))
        reply = self._process.start()
        if "error" in reply:
            fix = "take the file of the release"
            raise problem(where, "read it as a chat template", reply["error"], fix)
        self.reads = set(reply["result"])
        """The fields of a record, in addition to the messages, that the template reads."""
        if self._of_tools is not None:
            self.reads |= self._of_tools.reads | {"tools"}

    @staticmethod
    def of(tokenizer: str, template: str | None, *, date: str = DATE) -> Template:
        """Load a template from a file or the tokenizer's folder. Raises `ValueError` if there is none."""
        at = Path(tokenizer).expanduser()
        folder = at if at.is_dir() else at.parent
        config = {} if tokenizer == "bytes" else _config(folder / "tokenizer_config.json")
        tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        contents = {name: x.get("content") if isinstance(x, dict) else x for name, x in tokens.items()}
        named = {name: x for name, x in contents.items() if isinstance(x, str)}
        file = folder / "chat_template.jinja" if template is None else Path(template).expanduser()
        more = folder / "additional_chat_templates" / "tool_use.jinja"
        if template is not None or (tokenizer != "bytes" and file.exists()):
            text, with_tools = _read(file), _read(more) if template is None and more.exists() else None
            return Template(text, named, where=str(file), date=date, tool_use=with_tools)
        given = config.get("chat_template")
        by_name: dict[Any, Any] = {"default": given}
        if isinstance(given, list):  # several, by name
            by_name = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
        source, tool_use = by_name.get("default"), by_name.get("tool_use")
        if not isinstance(source, str):
            exists = "neither chat_template.jinja nor tokenizer_config.json has one"
            raise problem(f"folder `{folder}`", "find a chat template", exists, "name a file: ChatData(template=...)")
        tool_use = tool_use if isinstance(tool_use, str) else None
        return Template(source, named, where=str(folder / "tokenizer_config.json"), date=date, tool_use=tool_use)

    def render(self, where: str, messages: Any, *, tools: Any = None, documents: Any = None) -> list[Rendered]:
        """Return the texts of a conversation, each with the character spans of the answers to train on.

        An answer is the text that a message of the assistant adds after the prompt for it. If the template has
        `{% generation %}` tags, the spans are the tagged parts of a single text. Otherwise there is a single text if
        the template renders each message alike whatever follows. Some templates do not: Qwen3's omits the reasoning of
        earlier turns. Then another text begins, and each answer is learnt once, after the context in which the model
        has to write it.

        With `tools`, the template `tool_use` of the release is used if it has one.

        Raises:
          ValueError: messages, tools or documents of another type; the template refuses them, exceeds its limits, or
            renders the messages before an answer differently if the answer follows.
        """
        extras = {"tools": _objects(where, "tools", tools), "documents": _objects(where, "documents", documents)}
        if self._of_tools is not None and extras["tools"] is not None:
            return self._of_tools.render(where, messages, **extras)
        messages = [_message(where, one) for one in messages] if isinstance(messages, list) else None
        if not messages:
            exists, fix = "it is no list of messages", 'write [{"role": ..., "content": ...}]'
            raise problem(where, "take a conversation", exists, fix)
        reply = self._process.ask((messages, extras))
        if "rejected" in reply:
            exists = f"{self.where} writes the messages before it in another way once it is there"
            fix = "use a template that writes them alike, or marks what the assistant writes by {% generation %}"
            raise problem(f"{where}, message {reply['rejected']}", "find what the assistant writes", exists, fix)
        if "error" in reply:
            fix = "correct the conversation, or name another template"
            raise problem(where, f"render it by {self.where}", reply["error"], fix)
        return [Rendered(text, [(start, stop) for start, stop in spans]) for text, spans in reply["result"]]


class _Process:
    """Runs `template_process` for a template, and starts it again after a conversation that ended it.

    Args:
      settings: source, variables and date of the template.
    """

    def __init__(self, settings: tuple[str, dict[str, str], str]) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[str, Any]:
        """Start the process and return its reply to the settings."""
        limits = {"--seconds": MAX_SECONDS, "--bytes": MAX_BYTES, "--chars": MAX_CHARS}
        args = [f"{name}={value}" for name, value in limits.items()]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipe, module = subprocess.PIPE, "meshpar.data.template_process"
        command = [sys.executable, "-P", "-m", module, *args]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env)
        self._end = weakref.finalize(self, _end, self._process)
        return self._exchange(self._process, self._settings)

    def ask(self, request: object) -> dict[str, Any]:
        """Return the reply to a request: `result`, or `error` if it has none."""
        if self._process is None:
            self.start()
        assert self._process is not None
        return self._exchange(self._process, request)

    def _exchange(self, process: subprocess.Popen[bytes], request: object) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            message = pickle.dumps(request)
        except RecursionError:
            return {"error": "it is nested too deep"}
        try:
            process.stdin.write(message)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line:
            return json.loads(line)
        process.stdout.close()
        code = process.wait()
        self._end()
        self._process = None
        if code == -signal.SIGPROF:
            return {"error": f"it takes more than {MAX_SECONDS:g} seconds of processor time"}
        return {"error": f"the process that renders it ended with code {code}"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and close its pipes."""
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()


def _read(file: Path) -> str:
    return read_text(file, "`ChatData.template`", "name a file with a template", requested=f"read {file}")


def _objects(where: str, field: str, value: Any) -> list[dict[str, Any]] | None:
    """Return the tools or documents of a record, parsed if they are a JSON string; `None` if it has none."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if value is None or (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        return value
    exists = "it is neither a list of objects nor a string with one in JSON"
    raise problem(where, f"render its `{field}`", exists, f'write "{field}": [{{...}}], or leave it out')


def _message(where: str, message: Any) -> dict[str, Any]:
    """Return a message without its empty fields, with its reasoning under all names.

    Rows of a parquet file have the fields of all rows, so most may be empty. Transformers 5.24 fills only
    `reasoning_content` and `thinking`, and drops the reasoning if the template reads `reasoning`.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise problem(where, "take a message", "it has no `role`", 'write {"role": "user", "content": "..."}')
    told = {name: x for name, x in message.items() if x is not None}
    if not told.keys() & {"content", "tool_calls"}:  # jinja2 would write nothing for it
        exists = f"it has {', '.join(map(str, told))}, and neither `content` nor `tool_calls`"[:200]
        raise problem(where, "take a message", exists, 'write {"role": "user", "content": "..."}')
    reasoning = next((told[name] for name in REASONING if name in told), None)
    if reasoning is not None:
        told = {"thinking": reasoning, "reasoning": reasoning, **told, "reasoning_content": reasoning}
    return told


def _config(file: Path) -> dict[str, Any]:
    fix = "take the file of the release"
    found = read_json(file, str(file), fix, requested="read it as JSON") if file.exists() else {}
    return found if isinstance(found, dict) else {}


def check_day(date: str) -> None:
    """Raise `ValueError` if a date is not a day as `YYYY-MM-DD`."""
    try:
        datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        raise problem("`ChatData.date`", f"use {date!r}"[:100], "it is no day", f'write date="{DATE}"') from error
