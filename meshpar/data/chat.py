"""ChatData: conversations as a source of next-token batches, of which the assistant's tokens alone are learnt.

    messages ─► template ─► text, spans of the assistant's ─► tokens, weights ─► several in a row ─► batches

`template.py` renders the texts, in a process with limited time and memory.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Integer, UInt

from meshpar.data.batches import PREFETCH
from meshpar.data.rows import ArrayRows
from meshpar.data.source import RowSource, checked_files
from meshpar.data.split import check_fraction, split_rows
from meshpar.data.streams import mapped, spooled, zeros
from meshpar.data.template import DATE, EXTRAS, Template, check_day
from meshpar.data.text import find, records
from meshpar.data.tokens import Tokenizer, load_tokenizer, token_dtype
from meshpar.sharding.errors import check_int, check_positive_int, problem

logger = logging.getLogger(__name__)

OPEN_ROWS = 64
"""Rows that a conversation may still go into: few are left half empty, and packing stays quick."""
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
        object.__setattr__(self, "files", checked_files("`ChatData.files`", self.files, "chats.jsonl"))
        for name, kinds in (("field", str), ("tokenizer", str | Path), ("template", str | Path | None), ("date", str)):
            if not isinstance(value := getattr(self, name), kinds):
                raise problem(f"`ChatData.{name}`", f"use {value!r}"[:100], "it is a name", f'write {name}="..."')
        check_day(self.date)
        check_fraction("ChatData", self.valid_fraction)
        check_positive_int("ChatData", "the number of predictions per row", seq_len=self.seq_len)
        check_positive_int("ChatData", "the number of batches per validation", valid_batches=self.valid_batches)
        check_int("ChatData", "the number of batches prepared in the background", prefetch=self.prefetch)

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
    ids, offsets = tokenizer.encode_with_offsets(text)
    is_learnt = np.zeros(len(ids), np.int32)
    for start, stop in spans:
        is_learnt |= ((offsets >= start) & (offsets < stop)).astype(np.int32)
    return Conversation(ids, is_learnt)
