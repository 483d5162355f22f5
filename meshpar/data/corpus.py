"""TextData: text files as a source of next-token batches."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Integer, UInt

from meshpar.data.baseline import Baseline, bigram_baseline
from meshpar.data.batches import PREFETCH
from meshpar.data.rows import Windows
from meshpar.data.source import RowSource, check_least, check_names
from meshpar.data.split import check_fraction
from meshpar.data.streams import Streams, token_streams
from meshpar.data.text import STDLIB, Reading, find
from meshpar.data.token_file import TokenFile
from meshpar.data.tokens import BYTES, Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData:
    """Text files -> documents -> train and held-out documents -> one token stream each -> windows -> batches."""

    files: tuple[str, ...] = (STDLIB,)
    """Files, globs, folders of .txt/.py/.md/.jsonl/.parquet, or `stdlib`: the Python standard library's own source."""
    text_field: str = "text"
    """Which field of a .jsonl line, or column of a .parquet file, holds the text."""
    max_bytes: int | None = None
    """Read about this many bytes of text, from the start; None reads all."""
    tokenizer: str = BYTES
    """`bytes`, or the path of a Hugging Face `tokenizer.json`."""
    separator: str | None = None
    """The token put after each document; None finds the usual one, "" puts nothing. Bytes always use byte 0."""
    seq_len: int = 256
    """Predictions per window."""
    valid_fraction: float = 0.05
    """About which part of the documents is held out, chosen by their names; of a single document, its tail."""
    valid_batches: int = 8
    """Batches a validation serves, spread evenly over the held-out set; fewer where it has not as many."""
    cache: str | None = None
    """A folder where tokens are kept between runs, for tokenizers that take their time; None keeps nothing: longer text
    goes to a temporary file. Either way text need not fit into memory. All kept tokens are verified when opened."""
    prefetch: int = PREFETCH
    """Batches made ahead in the background; 0 makes each when it is needed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", check_names("TextData.files", self.files, STDLIB))
        check_fraction("`TextData.valid_fraction`", self.valid_fraction)
        for name, least in (("seq_len", 1), ("valid_batches", 1), ("max_bytes", 1), ("prefetch", 0)):
            check_least(f"TextData.{name}", getattr(self, name), least)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a batch; reads nothing."""
        return {name: jax.ShapeDtypeStruct((batch_size, self.seq_len), np.int32) for name in ("inputs", "targets")}

    def open(self, *, batch_size: int, seed: int) -> TextSource:
        """Reads, splits and tokenizes the text.

        Raises:
          ValueError: files that are not there or hold no text, a tokenizer that does not load, or a training or
            held-out set too small for one window or one batch.
        """
        tokenizer = load_tokenizer(self.tokenizer, separator=self.separator)
        reading = Reading(files=find(self.files), text_field=self.text_field, max_bytes=self.max_bytes)
        streams = token_streams(reading, tokenizer, valid_fraction=self.valid_fraction, cache=self.cache)
        return TextSource(self, tokenizer, streams, batch_size=batch_size, seed=seed)


class TextSource(RowSource):
    """Opened text: a training stream and a held-out stream of tokens. Made by `TextData.open`.

    A batch is `inputs` and `targets`, int32 `[batch_size, seq_len]`, the targets one token ahead.
    """

    def __init__(self, data: TextData, tokenizer: Tokenizer, streams: Streams, *, batch_size: int, seed: int) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.train_tokens: UInt[np.ndarray, " tokens"] | TokenFile = streams.train
        self.valid_tokens: UInt[np.ndarray, " tokens"] | TokenFile = streams.valid
        self._fingerprint = streams.fingerprint
        super().__init__(
            Windows(self.train_tokens, data.seq_len, what="training set"),
            Windows(self.valid_tokens, data.seq_len, what="held-out set"),
            batch_size=batch_size,
            seed=seed,
            valid_batches=data.valid_batches,
            prefetch=data.prefetch,
            extra={"seq_len": data.seq_len},
        )
        self._facts = self._describe(streams.facts)

    @property
    def vocab_size(self) -> int:
        """Every token id is below it."""
        return self.tokenizer.vocab_size

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes one held-out token stands for, on average; a separator counts as one byte."""
        held_out = self._facts["valid"]
        separators = 0 if self.tokenizer.separator_id is None else held_out["documents"]
        return (held_out["bytes"] + separators) / held_out["tokens"]

    @property
    def fingerprint(self) -> str:
        """A hash of the tokenizer, the training tokens and the held-out tokens, in order."""
        return self._fingerprint

    def encode(self, text: str) -> UInt[np.ndarray, " tokens"]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Integer[np.ndarray, " tokens"]) -> str:
        """The text that the tokens spell."""
        return self.tokenizer.decode(ids)

    def baseline(self, on: Literal["served", "all"] = "served") -> Baseline:
        """What a bigram model reaches on the held-out set.

        Args:
          on: "served" scores exactly the targets that `valid()` serves, so that a model's mean loss over those batches
            and the baseline are about the same tokens. "all" scores every token of the held-out stream but its first.
        """
        if on == "served":
            windows = self.valid_rows.read(self.served)
            before, after = windows["inputs"].ravel(), windows["targets"].ravel()
        else:
            before, after = self.valid_tokens[:-1], self.valid_tokens[1:]
        return bigram_baseline(
            self.train_tokens, before, after, vocab_size=self.vocab_size, bytes_per_token=self.bytes_per_token
        )

    def describe(self) -> dict[str, Any]:
        """Documents, bytes, tokens and windows of both sets, and how they were split; JSON values only."""
        return {**self._facts, "fingerprint": self.fingerprint}

    def _describe(self, facts: dict[str, Any]) -> dict[str, Any]:
        served = {"batches": len(self.served) // self.batch_size, "served_tokens": len(self.served) * self.data.seq_len}
        return {
            "files": list(self.data.files),
            "skipped": facts["skipped"],
            "tokenizer": self.tokenizer.name,
            "vocab_size": self.vocab_size,
            "seq_len": self.data.seq_len,
            "held_out": facts["held_out"],
            "train": facts["train"] | {"windows": len(self.train_rows)},
            "valid": facts["valid"] | {"windows": len(self.valid_rows)} | served,
        }
