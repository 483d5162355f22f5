"""Chat templates of Hugging Face tokenizers, with limits on the size of their inputs and outputs."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import check_local, read_json, read_text

DATE = "2024-07-26"
"""Default date of Llama's templates."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Field names for the reasoning of an assistant's message."""
MAX_CHARS = 10_000_000
"""Maximum bytes of the messages of a conversation in JSON, and maximum characters of its rendered texts."""
MAX_TEMPLATE_CHARS = 100_000
"""Maximum length of a template. Published templates have up to 15,000 characters."""
EXTRAS = ("tools", "documents")
"""Fields of a record that templates can read, in addition to the messages."""

_FIX_RELEASE = "use the file of the model's release"


class Rendered(NamedTuple):
    """A text, and the character spans of the assistant's answers."""

    text: str
    spans: list[tuple[int, int]]


class Template:
    """A chat template. `template_renderer.py` renders it."""

    def __init__(
        self, source: str, variables: Mapping[str, str], *, where: str, date: str = DATE, tool_use: str | None = None
    ) -> None:
        self.where = where
        self._tool_template = None if tool_use is None else Template(tool_use, variables, where=where, date=date)
        if importlib.util.find_spec("jinja2") is None:
            reason, fix = "jinja2 is not installed", "pip install 'meshpar[hf]'"
            raise problem("meshpar.data.ChatData", "render a chat template", reason, fix, "missing-package")
        from meshpar.data.template_renderer import Renderer

        requested = "compile it as a chat template"
        if len(source) > MAX_TEMPLATE_CHARS:
            reason = f"it has {len(source):,} characters, and the limit is {MAX_TEMPLATE_CHARS:,}"
            raise problem(where, requested, reason, _FIX_RELEASE, "bad-syntax")
        try:
            self._renderer = Renderer(source, variables, date, max_chars=MAX_CHARS)
        except Exception as error:  # jinja2 raises SyntaxError, RecursionError and AssertionError, too
            raise problem(where, requested, _reason(error), _FIX_RELEASE, "bad-syntax") from error
        self.reads = self._renderer.reads & {*EXTRAS}
        """The fields among `EXTRAS` that the template reads."""
        if self._tool_template is not None:
            self.reads |= self._tool_template.reads | {"tools"}

    @staticmethod
    def of(tokenizer: str, template: str | None, *, date: str = DATE) -> Template:
        """Load a template from a file, or from the folder of the tokenizer."""
        check_local(
            tokenizer, f"`tokenizer` {tokenizer}", "use a local folder: the chat template is next to the tokenizer"
        )
        path = Path(tokenizer).expanduser()
        folder = path if path.is_dir() else path.parent
        config_file, config = folder / "tokenizer_config.json", {}
        if tokenizer != "bytes" and config_file.exists():
            content = read_json(config_file, str(config_file), _FIX_RELEASE, requested="read it as JSON")
            config = content if isinstance(content, dict) else {}
        tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        contents = {name: x.get("content") if isinstance(x, dict) else x for name, x in tokens.items()}
        variables = {name: x for name, x in contents.items() if isinstance(x, str)}
        file = folder / "chat_template.jinja" if template is None else Path(template).expanduser()
        tool_file = folder / "additional_chat_templates" / "tool_use.jinja"
        if template is not None or (tokenizer != "bytes" and file.exists()):
            source, tool_use = _read(file), _read(tool_file) if template is None and tool_file.exists() else None
            return Template(source, variables, where=str(file), date=date, tool_use=tool_use)
        templates = config.get("chat_template")
        by_name: dict[Any, Any] = {"default": templates}
        if isinstance(templates, list):  # objects with the fields `name` and `template`
            by_name = {item.get("name"): item.get("template") for item in templates if isinstance(item, dict)}
        default, tool_use = by_name.get("default"), by_name.get("tool_use")
        if not isinstance(default, str):
            reason = "chat_template.jinja and tokenizer_config.json do not have a template"
            fix = "pass the file of a template: ChatData(template=...)"
            raise problem(f"folder `{folder}`", "find a chat template", reason, fix, "missing-file")
        tool_use = tool_use if isinstance(tool_use, str) else None
        return Template(default, variables, where=str(config_file), date=date, tool_use=tool_use)

    def render(self, where: str, messages: Any, *, tools: Any = None, documents: Any = None) -> list[Rendered]:
        """Return the texts of a conversation, each with the character spans of the answers to train on.

        An answer is the text that an assistant message adds after its prompt. If the template has `{% generation %}`
        tags, the spans are the tagged parts of a single text. Otherwise there is a single text if the rendering of a
        message does not depend on later messages. Some templates rewrite the history: Qwen3's template omits the
        reasoning of earlier turns. In this case, a new text starts, and each answer is trained once, in the context in
        which the model generates it.

        With `tools`, the `tool_use` template of the release is used if available.
        """
        extras = {"tools": _objects(where, "tools", tools), "documents": _objects(where, "documents", documents)}
        _check_text(where, {"messages": messages, **extras})
        if self._tool_template is not None and extras["tools"] is not None:
            return self._tool_template.render(where, messages, **extras)
        from meshpar.data.template_renderer import UnknownPosition

        requested, texts = f"render it with {self.where}", _messages(where, messages)
        try:
            return [Rendered(*text) for text in self._renderer.render(texts, extras)]
        except UnknownPosition as error:
            number, prompt = error.args
            if prompt:
                reason = f"the rendered message does not start with the generation prompt, {prompt!r:.60}"
                fix = "use a template that writes it in messages, or that marks answers with {% generation %}"
            else:
                reason = "the template renders earlier messages differently if this message follows"
                fix = "use a template that keeps earlier messages, or that marks answers with {% generation %}"
            raise problem(f"{where}, message {number}", requested, reason, fix, "unsupported-feature") from error
        except Exception as error:  # a template can raise any exception
            raise problem(where, requested, _reason(error), "use a different template", "render-failed") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error)[:1000].split())[:200]}"


def _read(file: Path) -> str:
    return read_text(file, "`ChatData.template`", "use the file of a template", requested=f"read {file}")


def _objects(where: str, field: str, value: Any) -> list[dict[str, Any]] | None:
    """Return the tools or documents of a record, which may be a JSON string, or None."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if value is None or (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        return value
    reason, fix = "it is neither a list of objects nor one in JSON", f'write "{field}": [{{...}}], or remove the field'
    raise problem(where, f"render its `{field}`", reason, fix, "wrong-type")


def _messages(where: str, messages: Any) -> list[dict[str, Any]]:
    """Return messages without empty fields, with their reasoning under all names.

    Rows of a parquet file have the fields of all rows, most of them empty. Transformers 5.24 fills only
    `reasoning_content` and `thinking`, and drops the reasoning if the template reads `reasoning`.
    """
    result: list[dict[str, Any]] = []
    for message in messages if isinstance(messages, list) else ():
        fields = {name: x for name, x in message.items() if x is not None} if isinstance(message, dict) else {}
        # jinja2 would render a message without content as an empty message.
        if not isinstance(fields.get("role"), str) or not fields.keys() & {"content", "tool_calls"}:
            result = []
            break
        reasoning = next((fields[name] for name in REASONING if name in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, "reasoning": reasoning, **fields, "reasoning_content": reasoning}
        result.append(fields)
    if not result:
        reason = "it is not a list of messages with a `role`, and `content` or `tool_calls`"
        raise problem(where, "read a conversation", reason, 'write [{"role": ..., "content": ...}]', "wrong-type")
    return result


def _check_text(where: str, fields: Mapping[str, Any]) -> None:
    """Check the size of the fields of a record, that their text is UTF-8, and that they have no NaN or infinity."""
    for name, value in fields.items():
        try:
            size = len(json.dumps(value, allow_nan=False, ensure_ascii=False, default=str).encode())
        except UnicodeError as error:
            reason, fix, code = f"its text is not UTF-8 ({error})", "write it in UTF-8", "bad-syntax"
        except RecursionError:
            reason, fix, code = "it is nested too deep", "write it with fewer levels", "bad-syntax"
        except ValueError:
            reason, fix, code = "it contains NaN or an infinity", "use text or null instead", "wrong-type"
        else:
            if size <= MAX_CHARS:
                continue
            reason, code = f"it has {size:,} bytes, and the limit is {MAX_CHARS:,}", "out-of-range"
            fix = "split the conversation"
        raise problem(where, f"read its `{name}`", reason, fix, code)


def check_day(date: str) -> None:
    """Check that a date has the format `YYYY-MM-DD`."""
    try:
        datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        reason, fix = "it is not a date YYYY-MM-DD", f'write date="{DATE}"'
        raise problem("`ChatData.date`", f"use {date!r}"[:100], reason, fix, "bad-syntax") from error
