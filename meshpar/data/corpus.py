"""Data source of text files, as next-token batches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import UInt

from meshpar.data.baseline import Baseline, bigram_baseline
from meshpar.data.batches import PREFETCH
from meshpar.data.mixture import MixedSource, check_sources, open_mixture
from meshpar.data.rows import PACKED_FIELDS, Windows
from meshpar.data.source import TokenSource, check_fields
from meshpar.data.streams import Streams, token_streams
from meshpar.data.text import FOLDER_SUFFIXES, STDLIB, Reading, find
from meshpar.data.tokens import BYTES, Tokenizer, load_tokenizer
from meshpar.sharding.errors import check_bool, check_positive_int, problem

_DEFAULT_FILES = (STDLIB,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData:
    """Text files, split into training and validation documents, tokenized, and cut into windows of `seq_len` tokens.

    Example:
      >>> data = mp.data.TextData(files=("notes/", "logs/**/*.jsonl"), tokenizer="tokenizer.json", seq_len=1024)
      >>> data.batch_shapes(8)["inputs"].shape
      (8, 1024)
    """

    files: Mapping[str, tuple[str, ...]] | tuple[str, ...] = _DEFAULT_FILES
    """Files, globs, folders of .txt/.py/.md/.jsonl/.parquet, or `stdlib`: the source of Python's standard library.
    With `sources`, it may be a mapping from the name of a source to its files."""
    sources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Weights of a mixture: the fraction of the examples that is drawn from each source. A name is a key of `files`, or
    a file, folder or glob. The options below apply to each source."""
    text_field: str = "text"
    """Field of a .jsonl line, or column of a .parquet file, with the text."""
    max_bytes: int | None = None
    """Number of bytes of text to read from the start. None reads all."""
    tokenizer: str = BYTES
    """`bytes`, or the path of a Hugging Face `tokenizer.json`."""
    separator: str | None = None
    """Token after each document. None detects it, "" adds none. The byte tokenizer always uses byte 0."""
    separate_documents: bool = False
    """Whether a position attends only within its document. Batches then also have `segments`, `positions`, which
    restart in each document, and `weights`: the separator does not predict the next document. A document ends with the
    separator, also within a file.

    False by default, because it needs a model with the argument `segments`, and because cuDNN's attention then needs a
    mask of 2 T² bytes per example. In pretraining the effect is small; it grows with `seq_len` (Llama Team 2024, "The
    Llama 3 Herd of Models", section 3.2). Use True to fine-tune on short documents."""
    seq_len: int = 256
    """Number of predictions per window."""
    valid_fraction: float = 0.05
    """Approximate fraction of the documents in the validation set, by hash of the name. A single document is split."""
    valid_batches: int = 8
    """Maximum number of batches per validation, spread evenly over the validation set."""
    cache: str | None = None
    """Folder that stores the tokens for later runs; useful with slow tokenizers. Stored tokens are verified when they
    are opened. With None, large texts are tokenized into a temporary file. The text need not fit in memory."""
    prefetch: int = PREFETCH
    """Number of batches prepared in the background."""

    def __post_init__(self) -> None:
        check_sources(self, default=_DEFAULT_FILES, example=STDLIB)
        check_fields(self)
        check_bool("TextData", "documents are separate", separate_documents=self.separate_documents)
        if self.separate_documents and self.separator == "":
            reason, fix = "the end of a document is not marked", "set `separator` to a token, or omit it"
            raise problem("`TextData.separate_documents`", 'use separator=""', reason, fix, "conflict")
        if self.max_bytes is not None:
            check_positive_int("TextData", "the number of bytes of text to read", max_bytes=self.max_bytes)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of a batch. Does not read the files."""
        names = PACKED_FIELDS if self.separate_documents else PACKED_FIELDS[:2]
        return {name: jax.ShapeDtypeStruct((batch_size, self.seq_len), np.int32) for name in names}

    def open(self, *, batch_size: int, seed: int) -> TextSource | MixedSource:
        """Read, split and tokenize the text. With `sources`, the result is a `MixedSource`."""
        if self.sources:
            return open_mixture(self, FOLDER_SUFFIXES, batch_size=batch_size, seed=seed)
        assert isinstance(self.files, tuple)
        tokenizer = load_tokenizer(self.tokenizer, separator=self.separator)
        reading = Reading(files=find(self.files), text_field=self.text_field, max_bytes=self.max_bytes)
        streams = token_streams(reading, tokenizer, valid_fraction=self.valid_fraction, cache=self.cache)
        return TextSource(self, tokenizer, streams, batch_size=batch_size, seed=seed)


class TextSource(TokenSource):
    """Opened text, returned by `TextData.open`.

    A batch has `inputs` and `targets`, int32 `[batch_size, seq_len]`. Targets are shifted by one token. With
    `separate_documents` it has all `PACKED_FIELDS`.
    """

    def __init__(self, data: TextData, tokenizer: Tokenizer, streams: Streams, *, batch_size: int, seed: int) -> None:
        self.train_tokens: UInt[np.ndarray, " tokens"] = streams.train
        self.valid_tokens: UInt[np.ndarray, " tokens"] = streams.valid
        self._fingerprint, end = streams.fingerprint, None
        if data.separate_documents:
            end = tokenizer.separator_id
            self._fingerprint = hashlib.blake2b(f"separate {self._fingerprint}".encode(), digest_size=16).hexdigest()
        train = Windows(streams.train, data.seq_len, name="training set", separator_id=end)
        valid = Windows(streams.valid, data.seq_len, name="validation set", separator_id=end)
        super().__init__(data, tokenizer, train, valid, batch_size=batch_size, seed=seed)
        info = streams.info
        served = {"batches": len(self.served) // batch_size, "served_tokens": len(self.served) * data.seq_len}
        self._description = {
            "files": list(data.files),
            "skipped": info["skipped"],
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "seq_len": data.seq_len,
            "separate_documents": data.separate_documents,
            "held_out": info["held_out"],
            "train": info["train"] | {"windows": len(self.train_rows)},
            "valid": info["valid"] | {"windows": len(self.valid_rows)} | served,
        }

    @property
    def bytes_per_token(self) -> float:
        """Average number of UTF-8 bytes per validation token. A separator counts as one byte."""
        held_out = self._description["valid"]
        separators = 0 if self.tokenizer.separator_id is None else held_out["documents"]
        return (held_out["bytes"] + separators) / held_out["tokens"]

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer, the training tokens, the validation tokens and `separate_documents`."""
        return self._fingerprint

    def baseline(self, on: Literal["served", "all"] = "served") -> Baseline:
        """Return the cross-entropy of a bigram model on the validation set.

        Args:
          on: "served" scores the targets of `valid()`, for comparison with the mean loss of a model over its batches.
            "all" scores all tokens of the validation stream except the first. With `separate_documents`, neither scores
            the first token after a separator.
        """
        if on == "served":
            windows = self.valid_rows.read(self.served)
            before, after = windows["inputs"].ravel(), windows["targets"].ravel()
        else:
            before, after = self.valid_tokens[:-1], self.valid_tokens[1:]
        if self.data.separate_documents:
            is_within = before != self.tokenizer.separator_id
            before, after = before[is_within], after[is_within]
        return bigram_baseline(
            self.train_tokens, before, after, vocab_size=self.vocab_size, bytes_per_token=self.bytes_per_token
        )

    def describe(self) -> dict[str, Any]:
        """Return the number of documents, bytes, tokens and windows of both sets, and how they were split."""
        return {**self._description, "fingerprint": self.fingerprint}
