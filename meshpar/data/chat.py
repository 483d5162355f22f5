"""ChatData: conversations as a source of next-token batches, of which the assistant's tokens alone are learnt.

    messages ─► template ─► text, spans of the assistant's ─► tokens, weights ─► several in a row ─► batches

Templates are programs: they are run by jinja2's sandbox, which lets them reach and change nothing outside.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib.util
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Integer, UInt

from meshpar.data.batches import PREFETCH
from meshpar.data.rows import ArrayRows
from meshpar.data.source import RowSource, check_least, check_names
from meshpar.data.split import check_fraction, split_rows
from meshpar.data.streams import mapped, spooled, zeros
from meshpar.data.text import find, records
from meshpar.data.tokens import Tokenizer, load_tokenizer, token_dtype
from meshpar.sharding.host_resources import read_json
from meshpar.sharding.types import problem

logger = logging.getLogger(__name__)

EXTRAS = ("tools", "documents")
"""Fields of a record that a template may read, besides the messages."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Field names for the reasoning of an assistant's message."""
OPEN_ROWS = 64
"""Rows that a conversation may still go into: few are left half empty, and packing stays quick."""
DATE = "2024-07-26"
"""What Llama's templates say where they are told no day."""
MOST_STEPS = 1_000_000
"""Turns of loops and calls that a template may take for one conversation: those of the field take a few a message."""
MOST_PRODUCT = 100_000
"""What a template multiplies is no longer, and no larger."""
MOST_LENGTH = 10_000_000
"""Characters or items of whatever a template makes, its text included."""
BEGINS, ENDS = "\ud800", "\udfff"
"""Around what a template marks as the assistant's, until it is cut out: no character of any text."""
_FIELDS = ("inputs", "targets", "segments", "positions", "weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatData:
    """Conversations -> text by the model's own template -> tokens -> rows of several conversations -> batches.

    Needs `pip install meshpar[hf]`. A batch is `inputs`, `targets`, `segments` (numbers of the conversations in a row,
    0 behind the last), `positions` (from 0 in each) and `weights` (1 for a target that is the assistant's, else 0),
    int32 `[batch_size, seq_len]`, as `next_token_loss` takes them.
    """

    files: tuple[str, ...]
    """.jsonl and .parquet files, globs or folders of them; a line or row is a conversation.

    Where the template reads them, a record's `tools` (a list of JSON schemas, or a string with one) and `documents` are
    rendered, too. Fields that nothing reads are logged once and counted in `describe()`."""
    field: str = "messages"
    """Which field holds a list of `{"role": ..., "content": ...}`. Reasoning may be called `reasoning_content`,
    `thinking` or `reasoning`: the template finds it under each of these names."""
    tokenizer: str
    """A folder with `tokenizer.json`, or the file; `bytes`."""
    template: str | None = None
    """The file of a jinja template; None: that of the tokenizer's folder, `chat_template.jinja` or in
    `tokenizer_config.json`."""
    date: str = DATE
    """The day, `YYYY-MM-DD`, that a template is told it is: a run that is resumed another day reads the same rows."""
    seq_len: int = 1024
    """Predictions a row; what a conversation has more is cut off."""
    valid_fraction: float = 0.05
    """Which part of the conversations is held out, chosen by their numbers."""
    valid_batches: int = 8
    """Batches a validation serves; fewer where the held-out set has not as many."""
    prefetch: int = PREFETCH
    """Batches made ahead in the background."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", check_names("ChatData.files", self.files, "chats.jsonl"))
        for name, kinds in (("field", str), ("tokenizer", str | Path), ("template", str | Path | None), ("date", str)):
            if not isinstance(value := getattr(self, name), kinds):
                raise problem(f"`ChatData.{name}`", f"use {value!r}"[:100], "it is a name", f'write {name}="..."')
        _day(self.date)
        check_fraction("`ChatData.valid_fraction`", self.valid_fraction)
        for name, least in (("seq_len", 1), ("valid_batches", 1), ("prefetch", 0)):
            check_least(f"ChatData.{name}", getattr(self, name), least)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a batch; reads nothing."""
        return {name: jax.ShapeDtypeStruct((batch_size, self.seq_len), np.int32) for name in _FIELDS}

    def open(self, *, batch_size: int, seed: int) -> ChatSource:
        """Reads, renders, tokenizes and packs the conversations.

        Raises:
          ValueError: files that are not there or are damaged; a template or tokenizer that does not load; messages that
            the template refuses, or whose assistant's part it does not tell; too few of them for a batch.
        """
        tokenizer = load_tokenizer(self.tokenizer, separator=None if self.tokenizer == "bytes" else "")
        template = Template.of(self.tokenizer, self.template, date=self.date)
        unused: collections.Counter[str] = collections.Counter()

        def found() -> Iterator[list[Conversation]]:
            extras = [name for name in EXTRAS if name in template.reads and name != self.field]
            for record in records(find(self.files, (".jsonl", ".parquet")), self.field, extras):
                unused.update(record.others)
                fields = dict(record.fields)
                texts = template.render(record.where, fields.pop(self.field), **fields)
                yield [_tokens(tokenizer, *one) for one in texts]

        try:
            return ChatSource(self, tokenizer, found(), unused, batch_size=batch_size, seed=seed)
        except OSError as error:
            exists, fix = f"that failed ({error.strerror})", "free some room, or set TMPDIR to a folder that has room"
            raise problem("`ChatData.files`", "write tokens to a temporary file", exists, fix) from error


class Rendered(NamedTuple):
    """A text, and from where to where the assistant writes it."""

    text: str
    spans: list[tuple[int, int]]


class Conversation(NamedTuple):
    """Tokens, and which of them are the assistant's."""

    ids: UInt[np.ndarray, " tokens"]
    is_learnt: Integer[np.ndarray, " tokens"]


class Conversations(Sequence[Conversation]):
    """Many of them, one behind the other in two arrays, which may lie on disk."""

    def __init__(self, all_: Conversation, starts: Integer[np.ndarray, " some"], ends: Integer[np.ndarray, " some"]):
        self._all, self._starts, self._ends = all_, starts, ends

    @staticmethod
    def of(found: Iterable[Conversation], vocab_size: int) -> Conversations:
        """Of conversations that come one at a time, written to temporary files where they are many."""
        dtypes, ends = (token_dtype(vocab_size), np.dtype(np.uint8)), [0]
        with contextlib.ExitStack() as until_mapped:
            files = [until_mapped.enter_context(spooled()) for _ in dtypes]
            for one in found:
                for file, part, dtype in zip(files, one, dtypes, strict=True):
                    file.write(part.astype(dtype).tobytes())
                ends.append(ends[-1] + len(one.ids))
            ids, is_learnt = (mapped(file, ends[-1], dtype) for file, dtype in zip(files, dtypes, strict=True))
        return Conversations(Conversation(ids, is_learnt), np.array(ends[:-1]), np.array(ends[1:]))

    def take(self, which: Integer[np.ndarray, " fewer"]) -> Conversations:
        """Some of them."""
        return Conversations(self._all, self._starts[which], self._ends[which])

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> Any:
        where = slice(self._starts[number], self._ends[number])
        return Conversation(self._all.ids[where], self._all.is_learnt[where])


class ChatSource(RowSource):
    """Opened conversations. Made by `ChatData.open`."""

    def __init__(
        self, data: ChatData, tokenizer: Tokenizer, found: Iterable[list[Conversation]], unused: Mapping[str, int],
        *, batch_size: int, seed: int,
    ) -> None:  # fmt: skip
        self.tokenizer, self._data, self._found, self._unused = tokenizer, data, 0, unused
        starts = [0]

        def learnt() -> Iterator[Conversation]:
            """Of what was cut off before the assistant says a word nothing is learnt."""
            for parts in found:
                self._found += 1
                kept = [one for one in parts if one.is_learnt[1 : data.seq_len + 1].any()]
                yield from (Conversation(*(part[: data.seq_len + 1] for part in one)) for one in kept)
                starts.extend([starts[-1] + len(kept)] if kept else [])

        kept, num = Conversations.of(learnt(), tokenizer.vocab_size), len(starts) - 1
        if unused:
            counts = ", ".join(f"`{name}` ({count:,} records)" for name, count in sorted(unused.items()))
            logger.warning("ChatData: nothing reads these fields of the records: %s", counts)
        if num < 2:
            exists = f"of {self._found} conversations, {num} have a word of the assistant's within seq_len"
            raise problem("`ChatData.files`", "train on some and hold out others", exists, "give more, or longer rows")
        # All parts of a conversation are on one side: the later ones hold what the earlier ones teach.
        owners, sides = np.repeat(np.arange(num), np.diff(starts)), split_rows(num, data.valid_fraction)
        self._packed = [packed(kept.take(np.flatnonzero(np.isin(owners, side))), data.seq_len) for side in sides]
        train, valid = (ArrayRows(rows, np.arange(len(rows["inputs"]))) for rows in self._packed)
        self._sides, self._in_parts = [len(side) for side in sides], int((np.diff(starts) > 1).sum())
        super().__init__(
            train, valid, batch_size=batch_size, seed=seed, valid_batches=data.valid_batches, prefetch=data.prefetch,
            extra={"seq_len": data.seq_len},
        )  # fmt: skip

    @property
    def vocab_size(self) -> int:
        """Every token id is below it."""
        return self.tokenizer.vocab_size

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all rows, in their order."""
        digest = hashlib.blake2b(f"chat {self.tokenizer.name}".encode(), digest_size=16)
        for rows in self._packed:
            for name in _FIELDS:
                digest.update(np.ascontiguousarray(rows[name]).data)
        return digest.hexdigest()

    def encode(self, text: str) -> UInt[np.ndarray, " tokens"]:
        """Ids of a text, as it stands."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Integer[np.ndarray, " tokens"]) -> str:
        """The text that the tokens spell."""
        return self.tokenizer.decode(ids)

    def describe(self) -> dict[str, Any]:
        """Conversations, rows and tokens of both sets; JSON values only.

        `in_parts` are conversations of which a turn is rendered more than once (`Template.render`), `left_out` those of
        which nothing is learnt. `unused_fields` counts the records that have a field which nothing reads.
        """
        sides = {
            name: {"conversations": count, "rows": len(rows["inputs"]),
                   "tokens": int(np.count_nonzero(rows["segments"])), "learnt_tokens": int(rows["weights"].sum())}
            for name, count, rows in zip(("train", "valid"), self._sides, self._packed, strict=True)
        }  # fmt: skip
        about = {"files": list(self._data.files), "tokenizer": self.tokenizer.name, "vocab_size": self.vocab_size}
        left_out = self._found - sum(self._sides)
        about |= {"seq_len": self._data.seq_len, "left_out": left_out, "in_parts": self._in_parts}
        about["unused_fields"] = dict(sorted(self._unused.items()))
        return {**about, "fingerprint": self.fingerprint, **sides}


def packed(conversations: Sequence[Conversation], seq_len: int) -> dict[str, Integer[np.ndarray, "rows seq_len"]]:
    """Rows of several conversations, each in the first row that has room, and the rest padded with weight 0.

    Many rows lie in a temporary file.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for number, one in enumerate(conversations):
        needed = min(len(one.ids) - 1, seq_len)
        first = max(len(rows) - OPEN_ROWS, 0)
        at = next((i for i in range(first, len(rows)) if room[i] >= needed), None)
        if at is None:
            at = len(rows)
            rows.append([])
            room.append(seq_len)
        rows[at].append(number)
        room[at] -= needed
    out = {name: zeros((len(rows), seq_len), np.int32) for name in _FIELDS}
    for number, row in enumerate(rows):
        start = 0
        for segment, which in enumerate(row, start=1):
            one = Conversation(*(part[: seq_len + 1] for part in conversations[which]))
            to = slice(start, start := start + len(one.ids) - 1)
            out["inputs"][number, to], out["targets"][number, to] = one.ids[:-1], one.ids[1:]
            out["segments"][number, to], out["weights"][number, to] = segment, one.is_learnt[1:]
            out["positions"][number, to] = np.arange(len(one.ids) - 1)
        out["positions"][number, start:] = np.arange(seq_len - start)
    return out


def _tokens(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]) -> Conversation:
    ids, places = tokenizer.encode_with_places(text)
    is_learnt = np.zeros(len(ids), np.int32)
    for start, stop in spans:
        is_learnt |= ((places >= start) & (places < stop)).astype(np.int32)
    return Conversation(ids, is_learnt)


# ---- Templates -------------------------------------------------------------------------------------------------------


class Template:
    """A chat template, as Hugging Face's tokenizers have them.

    Raises:
      ValueError: jinja2 is not installed; no template of jinja's.
    """

    def __init__(
        self, source: str, named: Mapping[str, str], *, where: str, date: str = DATE, tool_use: str | None = None
    ) -> None:
        self.where, self._named = where, dict(named)
        self._of_tools = None if tool_use is None else Template(tool_use, named, where=where, date=date)
        if importlib.util.find_spec("jinja2") is None:
            exists, fix = "jinja2 is not installed", "pip install 'meshpar[hf]'"
            raise problem("meshpar.data.ChatData", "render a chat template", exists, fix)
        self._steps = self._marks = 0
        env = _environment(self._step, _marking(self._marked))
        env.globals["raise_exception"] = _refused
        env.globals["strftime_now"] = _day(date).strftime
        try:
            parsed = env.parse(source)
            self.reads = _names_in(parsed) & {*EXTRAS}
            self._template = env.from_string(_counting(parsed))
            self._marks_answers = env.marks_answers
        except Exception as error:  # a program of others fails in any way: SyntaxError, MemoryError, AssertionError
            raise problem(where, "read it as a chat template", _told(error), "take the file of the release") from error
        if self._of_tools is not None:
            self.reads |= self._of_tools.reads | {"tools"}

    @staticmethod
    def of(tokenizer: str, template: str | None, *, date: str = DATE) -> Template:
        """That of a file, or of the folder that a tokenizer lies in. Raises `ValueError`: there is none."""
        at = Path(tokenizer).expanduser()
        folder = at if at.is_dir() else at.parent
        config = {} if tokenizer == "bytes" else _config(folder / "tokenizer_config.json")
        tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        contents = {name: x.get("content") if isinstance(x, dict) else x for name, x in tokens.items()}
        named = {name: x for name, x in contents.items() if isinstance(x, str)}
        file = folder / "chat_template.jinja" if template is None else Path(template).expanduser()
        more = folder / "additional_chat_templates" / "tool_use.jinja"
        try:
            if template is not None or (tokenizer != "bytes" and file.is_file()):
                with_tools = more.read_text(encoding="utf-8") if template is None and more.is_file() else None
                text = file.read_text(encoding="utf-8")
                return Template(text, named, where=str(file), date=date, tool_use=with_tools)
        except (OSError, UnicodeError) as error:
            fix = "name a file with a template"
            raise problem("`ChatData.template`", f"read {file}", f"that fails ({error})"[:160], fix) from error
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
        """The texts of a conversation, each with from where to where the assistant writes what is learnt of it.

        One text with all answers, where the template writes each message alike whatever follows. Where it writes
        earlier ones otherwise once others follow, as Qwen3's leaves out their reasoning, another text begins: each
        answer is learnt once, behind what the model is given when it has to make it.

        An answer is what the messages up to it add to the messages before it with the prompt for an answer; where the
        template marks answers itself (`{% generation %}`), it is what it marks, in the one text of the conversation.

        With `tools` it is the release's template of that name, `tool_use`, where it has one.

        Raises:
          ValueError: no list of messages, tools or documents; the template refuses them, or writes the messages before
            an answer otherwise once that is there.
        """
        extras = {"tools": _objects(where, "tools", tools), "documents": _objects(where, "documents", documents)}
        if self._of_tools is not None and extras["tools"] is not None:
            return self._of_tools.render(where, messages, **extras)
        messages = [_message(where, one) for one in messages] if isinstance(messages, list) else None
        if not messages:
            raise problem(
                where, "take a conversation", "it is no list of messages", 'write [{"role": ..., "content": ...}]'
            )
        text = functools.partial(self._text, where, extras)
        whole = text(messages, prompts=False)
        if self._marks_answers:
            return [whole]
        found: list[Rendered] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = text(messages[:number], prompts=True).text
            upto = text(messages[: number + 1], prompts=False).text
            if not upto.startswith(before):
                exists = f"{self.where} writes the messages before it in another way once it is there"
                fix = "use a template that writes them alike, or marks what the assistant writes by {% generation %}"
                raise problem(f"{where}, message {number}", "find what the assistant writes", exists, fix)
            learnt = found.pop().spans if found and upto.startswith(found[-1].text) else []
            found.append(Rendered(upto, [*learnt, (len(before), len(upto))]))
        if not found or whole.text.startswith(found[-1].text):
            found[-1:] = [Rendered(whole.text, found[-1].spans if found else [])]
        return found

    def _marked(self, text: str) -> str:
        self._marks += 1
        return f"{BEGINS}{text}{ENDS}"

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise ValueError(f"it takes more than {MOST_STEPS:,} steps")

    def _text(
        self, where: str, extras: Mapping[str, Any], messages: list[dict[str, Any]], *, prompts: bool
    ) -> Rendered:
        """A text, and of it what the template marks."""
        self._steps = self._marks = 0
        try:
            text = self._template.render(messages=messages, add_generation_prompt=prompts, **extras, **self._named)
            found, spans = text, []
            if self._marks:
                parts = re.split(f"[{BEGINS}{ENDS}]", text)
                if len(parts) != 2 * self._marks + 1:
                    raise ValueError("what it marks as generated it writes not once, or a message has half a character")
                found, ends = "".join(parts), list(itertools.accumulate(map(len, parts)))
                spans = list(zip(ends[:-1:2], ends[1::2], strict=True))
            found.encode()  # JSON can spell half a character, which no tokenizer takes
            return Rendered(found, spans)
        except Exception as error:
            fix = "correct the conversation, or name another template"
            raise problem(where, f"render it by {self.where}", _told(error), fix) from error


def _names_in(template: Any) -> set[str]:
    """The variables that a parsed template reads."""
    from jinja2 import nodes

    return {node.name for node in template.find_all(nodes.Name) if node.ctx == "load"}


def _counting(template: Any) -> Any:
    """The parsed template, with each loop's turns counted, what `~` joins made by a filter that knows how much, and
    what lists hold counted, too."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    class Counting(NodeTransformer):
        def visit_For(self, node: Any) -> Any:
            node = self.generic_visit(node)
            node.iter = nodes.Filter(node.iter, "counted", [], [], None, None)
            return node

        def visit_Concat(self, node: Any) -> Any:
            node = self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes), "joined", [], [], None, None)

        def visit_List(self, node: Any) -> Any:
            node = self.generic_visit(node)
            is_read = getattr(node, "ctx", "load") == "load"  # a tuple may be the names that a loop sets
            return nodes.Filter(node, "unfolded", [], [], None, None) if is_read else node

        visit_Tuple = visit_Dict = visit_List

    return Counting().visit(template)


def _marking(mark: Callable[[str], str]) -> Any:
    """An extension of jinja2's: `mark` is given what stands between `{% generation %}` and `{% endgeneration %}`."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            self.environment.marks_answers = True  # type: ignore[attr-defined]
            line, body = next(parser.stream).lineno, parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Callable[[], str]) -> str:
            return mark(caller())

    return Generation


def _environment(step: Callable[[], None], marking: Any) -> Any:
    """A sandbox of jinja2's that tells of each turn of a loop and each call, and makes nothing huge."""
    import jinja2.filters
    import jinja2.sandbox
    import jinja2.utils

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        marks_answers = False
        intercepted_binops = frozenset({"+", "*", "**", "%"})
        concat = staticmethod(_joined)  # all it writes, and what blocks and macros do

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            step()
            bound = getattr(function, "__wrapped__", function)  # jinja2 wraps `format`
            name, of = getattr(bound, "__name__", ""), getattr(bound, "__self__", None)
            if isinstance(of, str):
                args = (list(args[0]), *args[1:]) if name == "join" and args else args
                _check_made(name, of, *args, *kwargs.values())
            made = super().call(context, function, *args, **kwargs)
            return unfolded(made) if isinstance(made, dict | jinja2.utils.Namespace) else made

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            numbers = [x for x in (left, right) if isinstance(x, int | float)]
            sizes = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
            _check_numbers(operator, numbers, max(sizes, default=0), right)
            if operator == "+":
                _check_length(sum(sizes))
            if operator == "%" and isinstance(left, str):
                _check_made("format", left, *(right if isinstance(right, tuple) else (right,)))
            return unfolded(super().call_binop(context, operator, left, right))

    unfolded = functools.partial(_unfolded, step)

    env = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", marking])

    def join(items: Any, d: str = "", attribute: str | None = None) -> str:
        each = items if attribute is None else map(jinja2.filters.make_attrgetter(env, attribute), items)
        parts = [str(x) for x in each]
        _check_made("join", str(d), parts)
        return str(d).join(parts)

    def checked(name: str) -> Any:
        made = env.filters[name]

        @functools.wraps(made)  # with what jinja2 marks such a function by
        def check(*given: Any, **kwargs: Any) -> Any:
            _check_made(name, *(x for x in (*given, *kwargs.values()) if isinstance(x, str | int | float)))
            return made(*given, **kwargs)

        return check

    del env.globals["lipsum"]  # any amount of made-up text
    env.filters["tojson"] = _to_json
    env.filters |= {name: checked(name) for name in _WIDENING & env.filters.keys()}
    env.filters |= {"counted": functools.partial(_counted, step), "join": join, "joined": _joined, "unfolded": unfolded}
    return env


def _counted(step: Callable[[], None], items: Any) -> Iterator[Any]:
    for item in items:
        step()
        yield item


_WIDENING = frozenset({"batch", "center", "format", "indent", "replace", "slice", "tojson", "wordwrap"})
"""Filters that may write more than they are given."""


def _check_made(name: str, *given: Any) -> None:
    """Raises `ValueError` where what a method of text, or a filter, is given makes it write more than `MOST_LENGTH`."""
    text = [x for x in given if isinstance(x, str)]
    if name == "replace" and len(text) > 2:
        _check_length(len(text[0]) + text[0].count(text[1]) * len(text[2]))
    elif name == "translate" and isinstance(given[1], dict):
        _check_length(len(text[0]) * max((len(x) for x in given[1].values() if isinstance(x, str)), default=1))
    elif name == "join":
        _check_length(sum(len(given[0]) + len(x) for x in given[1] if isinstance(x, str)))
    else:
        is_wide = any(isinstance(x, int | float) and abs(x) > MOST_PRODUCT for x in given)
        if is_wide or ("format" in name and re.search(r"\d{6}", text[0])):
            raise ValueError(f"it makes something wider than {MOST_PRODUCT:,}")


def _check_numbers(operator: str, numbers: Sequence[int | float], size: int, right: Any) -> None:
    if operator == "*" and size and numbers and size * max(numbers) > MOST_PRODUCT:
        raise ValueError(f"it repeats something to more than {MOST_PRODUCT:,}")
    if operator == "*" and sum(x.bit_length() for x in numbers if isinstance(x, int)) > MOST_PRODUCT:
        raise ValueError("it multiplies large numbers")
    if operator == "**" and any(abs(x) > MOST_PRODUCT for x in (*numbers, abs(right) * 10)):
        raise ValueError("it takes the power of a large number")


def _check_length(length: int) -> None:
    if length > MOST_LENGTH:
        raise ValueError(f"it makes something longer than {MOST_LENGTH:,}")


def _unfolded(step: Callable[[], None], made: Any) -> Any:
    """As it is, each thing in it a step however often it is there.

    A list of itself twice, forty times over, is quick to make, and takes for ever to write, compare or hash.
    """
    from jinja2.utils import Namespace

    left = [made]
    while left:
        here = left.pop()
        if isinstance(here, Namespace):
            here = object.__getattribute__(here, "_Namespace__attrs")
        if isinstance(here, dict | list | tuple):
            for inner in (*here.keys(), *here.values()) if isinstance(here, dict) else here:
                step()
                left.append(inner)
    return made


def _joined(parts: Iterable[Any]) -> str:
    found, length = [], 0
    for part in map(str, parts):
        _check_length(length := length + len(part))
        found.append(part)
    return "".join(found)


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
    found = read_json(file, str(file), fix, asked="read it as JSON") if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _day(date: str) -> datetime.datetime:
    try:
        return datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        raise problem("`ChatData.date`", f"use {date!r}"[:100], "it is no day", f'write date="{DATE}"') from error


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own escapes for HTML; arguments as transformers has them."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refused(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
