"""Data source of conversations, as next-token batches that train only on the assistant's messages.

    messages ─► template ─► text and spans of answers ─► tokens, weights ─► packed rows ─► batches

`template.py` renders the texts.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Integer, UInt

from meshpar.data.batches import PREFETCH
from meshpar.data.mixture import MixedSource, check_sources, open_mixture
from meshpar.data.rows import PACKED_FIELDS, ArrayRows
from meshpar.data.source import TokenSource, check_fields
from meshpar.data.split import split_examples
from meshpar.data.streams import mapped, spooled, writing, zeros
from meshpar.data.template import DATE, EXTRAS, Template, check_day
from meshpar.data.text import find, records
from meshpar.data.tokens import Tokenizer, load_tokenizer, token_dtype
from meshpar.sharding.errors import problem

logger = logging.getLogger(__name__)

OPEN_ROWS = 64
"""Number of incomplete rows to consider when packing. Bounds the time of packing."""
_SUFFIXES = (".jsonl", ".parquet")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatData:
    """Conversations, rendered by a chat template, tokenized, and packed into rows of `seq_len` tokens.

    Needs `pip install meshpar[hf]`. A batch has int32 arrays `[batch_size, seq_len]` for `next_token_loss`: `inputs`,
    `targets`, `segments` (index of the conversation in the row, from 1; 0 for padding), `positions` (from 0 in each
    conversation) and `weights` (1 for targets in the assistant's answers, otherwise 0).
    """

    files: Mapping[str, tuple[str, ...]] | tuple[str, ...] = ()
    """.jsonl and .parquet files, globs or folders. Each line or row is a conversation. With `sources`, it may be a
    mapping from the name of a source to its files.

    The fields `tools` (a list of JSON schemas, or the list as a JSON string) and `documents` are rendered if the
    template reads them. Unused fields are logged once and counted in `describe()`."""
    sources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Weights of a mixture, as in `TextData`: the fraction of the rows that is drawn from each source. All
    conversations of a row are from the same source."""
    field: str = "messages"
    """Field with a list of `{"role": ..., "content": ...}`. Reasoning may have the name `reasoning_content`, `thinking`
    or `reasoning`; templates can read it under all three names."""
    tokenizer: str
    """A `tokenizer.json`, its folder, or `bytes`."""
    template: str | None = None
    """File of a jinja template. None uses `chat_template.jinja` or `tokenizer_config.json` next to the tokenizer."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end an answer although the template does not write them in the answer. In GLM's template it is the
    role of the next message: `("<|user|>", "<|observation|>")`. A stop token after an answer has weight 1, and the
    first one is appended to a text that ends with an answer."""
    date: str = DATE
    """Current day for the template, `YYYY-MM-DD`. It is fixed so that resumed runs read the same data."""
    seq_len: int = 1024
    """Number of predictions per row. Longer conversations are truncated."""
    valid_fraction: float = 0.05
    """Fraction of the conversations in the validation set, chosen by the hash of their index."""
    valid_batches: int = 8
    """Maximum number of batches per validation."""
    prefetch: int = PREFETCH
    """Number of batches prepared in the background."""

    def __post_init__(self) -> None:
        check_sources(self, default=(), example="chats.jsonl")
        for name, types in (("field", str), ("tokenizer", str | Path), ("template", str | Path | None), ("date", str)):
            if not isinstance(value := getattr(self, name), types):
                requested, fix = f"use {value!r}"[:100], f'write {name}="..."'
                raise problem(f"`ChatData.{name}`", requested, "it is not a string", fix, "wrong-type")
        stop_tokens = self.stop_tokens
        if not isinstance(stop_tokens, tuple | list) or not all(isinstance(token, str) for token in stop_tokens):
            requested, fix = f"use {stop_tokens!r}"[:100], 'write stop_tokens=("<|user|>",)'
            raise problem("`ChatData.stop_tokens`", requested, "it is not a tuple of strings", fix, "wrong-type")
        object.__setattr__(self, "stop_tokens", tuple(stop_tokens))
        check_day(self.date)
        check_fields(self)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of a batch. Does not read the files."""
        return {name: jax.ShapeDtypeStruct((batch_size, self.seq_len), np.int32) for name in PACKED_FIELDS}

    def open(self, *, batch_size: int, seed: int) -> ChatSource | MixedSource:
        """Read, render, tokenize and pack the conversations. With `sources`, the result is a `MixedSource`."""
        if self.sources:
            return open_mixture(self, _SUFFIXES, batch_size=batch_size, seed=seed)
        assert isinstance(self.files, tuple)
        files = self.files
        tokenizer = load_tokenizer(self.tokenizer, separator=None if self.tokenizer == "bytes" else "")
        template = Template.of(self.tokenizer, self.template, date=self.date)
        stop_ids = _stop_ids(tokenizer, self.stop_tokens)
        unused: collections.Counter[str] = collections.Counter()
        unended: collections.Counter[str] = collections.Counter()

        def conversations() -> Iterator[list[Conversation]]:
            extras = [name for name in EXTRAS if name in template.reads and name != self.field]
            for record in records(find(files, _SUFFIXES), self.field, extras):
                unused.update(record.other_fields)
                fields = dict(record.fields)
                rendered = template.render(record.where, fields.pop(self.field), **fields)
                tokenized = [tokens_of(tokenizer, text, spans, stop_ids) for text, spans in rendered]
                unended["answers"] += sum(count for _, count in tokenized)
                yield [conversation for conversation, _ in tokenized]

        with writing("`ChatData.files`"):
            return ChatSource(self, tokenizer, conversations(), unused, unended, batch_size=batch_size, seed=seed)


class Conversation(NamedTuple):
    """Tokens of a conversation, and which of them belong to answers."""

    ids: UInt[np.ndarray, " tokens"]
    is_answer: Integer[np.ndarray, " tokens"]

    def part(self, tokens: slice) -> Conversation:
        return Conversation(self.ids[tokens], self.is_answer[tokens])


def stored(conversations: Iterable[Conversation], vocab_size: int) -> list[Conversation]:
    """Return conversations as views of two arrays. Large arrays are mapped from temporary files."""
    dtypes, ends = (token_dtype(vocab_size), np.dtype(np.uint8)), [0]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(spooled()) for _ in dtypes]
        for conversation in conversations:
            for file, array, dtype in zip(files, conversation, dtypes, strict=True):
                file.write(array.astype(dtype).tobytes())
            ends.append(ends[-1] + len(conversation.ids))
        arrays = (mapped(file, ends[-1], dtype) for file, dtype in zip(files, dtypes, strict=True))
        tokens = Conversation(*map(np.asarray, arrays))
    return [tokens.part(slice(start, end)) for start, end in itertools.pairwise(ends)]


class ChatSource(TokenSource):
    """Opened conversations, returned by `ChatData.open`."""

    def __init__(
        self, data: ChatData, tokenizer: Tokenizer, rendered: Iterable[list[Conversation]], unused: Mapping[str, int],
        unended: Mapping[str, int], *, batch_size: int, seed: int,
    ) -> None:  # fmt: skip
        self._num_records, self._unused = 0, unused
        starts = [0]

        def trainable() -> Iterator[Conversation]:
            for texts in rendered:
                self._num_records += 1
                truncated = [text.part(slice(data.seq_len + 1)) for text in texts]
                truncated = [text for text in truncated if text.is_answer[1:].any()]
                yield from truncated
                starts.extend([starts[-1] + len(truncated)] if truncated else [])

        texts, num_conversations = stored(trainable(), tokenizer.vocab_size), len(starts) - 1
        if unused:
            counts = ", ".join(f"`{name}` ({count:,} records)" for name, count in sorted(unused.items()))
            logger.warning("ChatData: these fields of the records are not used: %s", counts)
        self._num_unended = unended["answers"]
        if self._num_unended:
            logger.warning(
                "ChatData: %s answers end without a special token, so the model does not learn to stop there. Set "
                "`stop_tokens`, or use a template that ends answers.", f"{self._num_unended:,}"
            )  # fmt: skip
        if num_conversations < 2:
            reason = f"{num_conversations} of {self._num_records} conversations have an answer within seq_len"
            fix = "add conversations, or increase seq_len"
            raise problem("`ChatData.files`", "create a training set and a validation set", reason, fix, "out-of-range")
        # All texts of a conversation are in the same set, because they have common messages.
        sets = split_examples(num_conversations, data.valid_fraction)
        texts_of = ([text for i in indices for text in texts[starts[i] : starts[i + 1]]] for indices in sets)
        self._packed = [packed(texts, data.seq_len) for texts in texts_of]
        train, valid = (ArrayRows(rows, np.arange(len(rows["inputs"]))) for rows in self._packed)
        self._num_conversations = [len(indices) for indices in sets]
        self._num_in_parts = int((np.diff(starts) > 1).sum())
        super().__init__(data, tokenizer, train, valid, batch_size=batch_size, seed=seed)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all rows in order."""
        digest = hashlib.blake2b(f"chat {self.tokenizer.name}".encode(), digest_size=16)
        for rows in self._packed:
            for name in PACKED_FIELDS:
                digest.update(np.ascontiguousarray(rows[name]).data)
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return the number of conversations, rows and tokens of both sets.

        `in_parts` counts conversations with several texts (see `Template.render`), `left_out` counts conversations
        without answers, `unended_answers` counts answers without a special token at their end, and `unused_fields`
        counts the records that have an unused field.
        """
        sets = {
            name: {"conversations": count, "rows": len(rows["inputs"]),
                   "tokens": int(np.count_nonzero(rows["segments"])), "learnt_tokens": int(rows["weights"].sum())}
            for name, count, rows in zip(("train", "valid"), self._num_conversations, self._packed, strict=True)
        }  # fmt: skip
        return {
            "files": list(self.data.files),
            "tokenizer": self.tokenizer.name,
            "vocab_size": self.vocab_size,
            "seq_len": self.data.seq_len,
            "left_out": self._num_records - sum(self._num_conversations),
            "in_parts": self._num_in_parts,
            "unended_answers": self._num_unended,
            "unused_fields": dict(sorted(self._unused.items())),
            "fingerprint": self.fingerprint,
            **sets,
        }


def packed(conversations: Sequence[Conversation], seq_len: int) -> dict[str, Integer[np.ndarray, "rows seq_len"]]:
    """Pack conversations into rows: each in the first row with enough space. Padding has weight 0.

    Large arrays are mapped from temporary files.
    """
    rows: list[list[int]] = []
    space: list[int] = []
    for index, conversation in enumerate(conversations):
        needed = min(len(conversation.ids) - 1, seq_len)
        first = max(len(rows) - OPEN_ROWS, 0)
        row = next((row for row in range(first, len(rows)) if space[row] >= needed), len(rows))
        if row == len(rows):
            rows.append([])
            space.append(seq_len)
        rows[row].append(index)
        space[row] -= needed
    out = {name: zeros((len(rows), seq_len), np.int32) for name in PACKED_FIELDS}
    for row, indices in enumerate(rows):
        start = 0
        for segment, index in enumerate(indices, start=1):
            ids, is_answer = conversations[index].part(slice(seq_len + 1))
            to = slice(start, start := start + len(ids) - 1)
            out["inputs"][row, to], out["targets"][row, to] = ids[:-1], ids[1:]
            out["segments"][row, to], out["weights"][row, to] = segment, is_answer[1:]
            out["positions"][row, to] = np.arange(len(ids) - 1)
        out["positions"][row, start:] = np.arange(seq_len - start)
    return out


def tokens_of(
    tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]], stop_ids: Sequence[int] = ()
) -> tuple[Conversation, int]:
    """Return the tokens of a rendered text, and the number of answers that end without a special token.

    All tokens that overlap a span belong to the answer, as in transformers: a token may contain the space before it.
    """
    ids, offsets = tokenizer.encode_with_offsets(text)
    starts, ends = offsets[:, 0], offsets.max(axis=1, initial=0)
    is_answer, end_ids, num_unended = np.zeros(len(ids), np.int32), tokenizer.special_ids | {*stop_ids}, 0
    for start, stop in spans:
        tokens = np.flatnonzero((starts < stop) & (np.maximum(ends, starts + 1) > start))
        is_answer[tokens] = 1
        written = [token for token in tokens if text[starts[token] : ends[token]].strip()]
        if not written or not end_ids or ids[written[-1]] in end_ids:
            continue
        following = tokens[-1] + 1
        if following < len(ids) and ids[following] in stop_ids:
            is_answer[following] = 1
        elif following == len(ids) and stop_ids:
            ids, is_answer = np.append(ids, ids.dtype.type(stop_ids[0])), np.append(is_answer, np.int32(1))
        else:
            num_unended += 1
    return Conversation(ids, is_answer), num_unended


def _stop_ids(tokenizer: Tokenizer, stop_tokens: Sequence[str]) -> list[int]:
    stop_ids = []
    for token in stop_tokens:
        ids = tokenizer.encode(token)
        if len(ids) != 1:
            reason, fix = f"the tokenizer encodes it as {len(ids)} tokens", "use tokens of the vocabulary"
            raise problem("`ChatData.stop_tokens`", f"use {token!r}"[:100], reason, fix, "unknown-name")
        stop_ids.append(int(ids[0]))
    return stop_ids
