"""Tokenizers for bytes and for Hugging Face `tokenizer.json` files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer, UInt

from meshpar.sharding import remote
from meshpar.sharding.errors import near_or, problem
from meshpar.sharding.host_resources import check_file, check_name

BYTES = "bytes"
"""Name of the `ByteTokenizer`."""
SEPARATORS = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]", "[SEP]",
)  # fmt: skip
"""Common end-of-document tokens, in order of preference."""


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    name: str
    """Identifies the tokenizer. Different tokenizers have different names."""
    vocab_size: int
    """Upper bound of the ids."""
    separator_id: int | None
    """Token after each document, or None."""
    special_ids: frozenset[int]
    """Special tokens, such as the end of a turn; may be empty."""

    def encode(self, text: str) -> UInt[np.ndarray, " tokens"]:
        """Return the token ids in the smallest unsigned dtype for the vocabulary."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[UInt[np.ndarray, " tokens"]]:
        """Return the token ids of each text."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[UInt[np.ndarray, " tokens"], Integer[np.ndarray, "tokens 2"]]:
        """Return the token ids and the character range of each token: start, stop."""
        ...

    def decode(self, ids: Integer[np.ndarray, " tokens"]) -> str:
        """Return the text of token ids."""
        ...


class ByteTokenizer:
    """Uses each byte of UTF-8 as a token. Byte 0, which does not occur in text, separates documents."""

    name = BYTES
    vocab_size = 256
    separator_id: int | None = 0
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> UInt[np.ndarray, " tokens"]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[UInt[np.ndarray, " tokens"]]:
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[UInt[np.ndarray, " tokens"], Integer[np.ndarray, "tokens 2"]]:
        starts = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, ids: Integer[np.ndarray, " tokens"]) -> str:
        """Return the text. Invalid UTF-8, which a model may generate, becomes U+FFFD."""
        return np.asarray(ids).astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """Tokenizer of a Hugging Face `tokenizer.json`.

    Adds no special tokens, and ignores the truncation and padding settings of the file.

    Args:
      path: the `tokenizer.json`, or its folder.
      separator: token after each document. None uses the first of `SEPARATORS` in the vocabulary, "" adds none.
    """

    def __init__(self, path: str | os.PathLike[str], *, separator: str | None = None) -> None:
        import tokenizers

        path = Path(remote.copy_of(str(path), "`tokenizer`")).expanduser()
        fix = f'use the path of a tokenizer.json or its folder, or "{BYTES}"'
        check_name(path, "`tokenizer`", fix)
        file = path / "tokenizer.json" if path.is_dir() else path
        check_file(file, "`tokenizer`", fix, requested=f"load {file}", max_bytes=None)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            vocab = self._tokenizer.get_vocab(with_added_tokens=True)
            if not vocab or len(set(vocab.values())) < len(vocab):
                raise ValueError("its vocabulary is empty or has several tokens with the same id")
        except Exception as error:  # the library raises Exception, not a subclass
            fix = "use the tokenizer.json of the model's release"
            raise problem("`tokenizer`", f"load {file}", f"it is damaged ({error})", fix, "damaged-file") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = f"tokenizer.json:{hashlib.blake2b(file.read_bytes(), digest_size=6).hexdigest()}"
        self.vocab_size = max(vocab.values()) + 1  # ids may have gaps
        self.separator_id = _separator_id(file, vocab, separator)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._dtype = token_dtype(self.vocab_size)

    def encode(self, text: str) -> UInt[np.ndarray, " tokens"]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[UInt[np.ndarray, " tokens"]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[UInt[np.ndarray, " tokens"], Integer[np.ndarray, "tokens 2"]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, dtype=self._dtype), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def encode_prompt(self, text: str) -> UInt[np.ndarray, " tokens"]:
        """Return the token ids with the special tokens that the file adds, such as Llama's begin-of-text token."""
        return np.array(self._tokenizer.encode(text).ids, dtype=self._dtype)

    def decode(self, ids: Integer[np.ndarray, " tokens"]) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def load_tokenizer(name: str, *, separator: str | None = None) -> Tokenizer:
    """Return a tokenizer.

    Args:
      name: `bytes`, or the path of a `tokenizer.json`.
      separator: token after each document. None detects the token of the file, "" adds none.
    """
    if name != BYTES:
        return HuggingFaceTokenizer(name, separator=separator)
    if separator is not None:
        requested, reason = f"separate documents with {separator!r}", "the byte tokenizer always uses byte 0"
        fix = "remove `separator`, or use a tokenizer.json"
        raise problem("`separator`", requested, reason, fix, "conflict")
    return ByteTokenizer()


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest unsigned dtype for ids less than `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


def _separator_id(file: Path, vocab: dict[str, int], separator: str | None) -> int | None:
    if separator == "":
        return None
    candidates = SEPARATORS if separator is None else (separator,)
    token = next((token for token in candidates if token in vocab), None)
    if token is None:
        requested, reason = f"separate documents with {' or '.join(candidates)}", f"{file} has no such token"
        fix = 'set `separator` to a token of the vocabulary, or to "" for no separator'
        if separator is None:
            raise problem("`separator`", requested, reason, fix, "not-found")
        raise problem("`separator`", requested, reason, near_or(separator, vocab, fix), "unknown-name")
    return vocab[token]
