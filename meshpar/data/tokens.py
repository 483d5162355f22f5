"""Tokenizers: text to token ids and back, for bytes and for Hugging Face `tokenizer.json` files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer, UInt

from meshpar.sharding.host_resources import check_name
from meshpar.sharding.types import near, problem

BYTES = "bytes"
"""The word for `ByteTokenizer` where a tokenizer is named."""
SEPARATORS = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]", "[SEP]",
)  # fmt: skip
"""Tokens that usually end a document, tried in this order when none is named."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    name: str
    """Says which tokenizer it is; two that differ have different names."""
    vocab_size: int
    """Every id is below it."""
    separator_id: int | None
    """The token put after each document, None to join documents with nothing between."""

    def encode(self, text: str) -> UInt[np.ndarray, " tokens"]:
        """Ids of the text's tokens, in the smallest unsigned dtype that holds the vocabulary."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[UInt[np.ndarray, " tokens"]]:
        """`encode` of every text, together where that is faster."""
        ...

    def encode_with_places(self, text: str) -> tuple[UInt[np.ndarray, " tokens"], Integer[np.ndarray, " tokens"]]:
        """`encode`, and at which character of the text each token begins."""
        ...

    def decode(self, ids: Integer[np.ndarray, " tokens"]) -> str:
        """The text that the tokens spell."""
        ...


class ByteTokenizer:
    """Each byte of UTF-8 is a token; byte 0, which text does not use, separates documents."""

    name = BYTES
    vocab_size = 256
    separator_id: int | None = 0

    def encode(self, text: str) -> UInt[np.ndarray, " tokens"]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[UInt[np.ndarray, " tokens"]]:
        return [self.encode(text) for text in texts]

    def encode_with_places(self, text: str) -> tuple[UInt[np.ndarray, " tokens"], Integer[np.ndarray, " tokens"]]:
        """Ids, and at which character of the text each begins."""
        widths = [len(character.encode()) for character in text]
        return self.encode(text), np.repeat(np.arange(len(text)), widths)

    def decode(self, ids: Integer[np.ndarray, " tokens"]) -> str:
        """The text; bytes that are not UTF-8, as a model may write, become U+FFFD."""
        return np.asarray(ids).astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` library.

    No special tokens are added to a text, and the file's own truncation and padding are turned off: a corpus is one
    stream of all of its tokens.

    Args:
      path: the `tokenizer.json`, or a folder with one in it.
      separator: the token put after each document. None takes the first of `SEPARATORS` that the vocabulary has; ""
        puts nothing between documents.

    Raises:
      ValueError: no such file, not a tokenizer, or no such separator.
    """

    def __init__(self, path: str | os.PathLike[str], *, separator: str | None = None) -> None:
        file = _tokenizer_file(Path(path).expanduser())
        self._tokenizer = _load(file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        _check_ids(file, vocab)
        self.name = f"tokenizer.json:{hashlib.blake2b(file.read_bytes(), digest_size=6).hexdigest()}"
        self.vocab_size = max(vocab.values()) + 1  # ids may have gaps
        self.separator_id = _separator_id(file, vocab, separator)
        self._dtype = token_dtype(self.vocab_size)

    def encode(self, text: str) -> UInt[np.ndarray, " tokens"]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[UInt[np.ndarray, " tokens"]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def encode_with_places(self, text: str) -> tuple[UInt[np.ndarray, " tokens"], Integer[np.ndarray, " tokens"]]:
        """Ids, and at which character of the text each begins."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        places = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        return np.array(encoding.ids, dtype=self._dtype), places

    def encode_prompt(self, text: str) -> UInt[np.ndarray, " tokens"]:
        """The text's tokens with the special ones that the file puts around a text, as Llama's beginning is."""
        return np.array(self._tokenizer.encode(text).ids, dtype=self._dtype)

    def decode(self, ids: Integer[np.ndarray, " tokens"]) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def load_tokenizer(name: str, *, separator: str | None = None) -> Tokenizer:
    """The tokenizer of that name: `bytes`, or the path of a `tokenizer.json`."""
    if name != BYTES:
        return HuggingFaceTokenizer(name, separator=separator)
    if separator is not None:
        asked, exists = f"separate documents with {separator!r}", "the byte tokenizer always uses byte 0"
        raise problem("`separator`", asked, exists, "leave `separator` out, or name a tokenizer.json")
    return ByteTokenizer()


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned dtype that holds every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


def _tokenizer_file(path: Path) -> Path:
    check_name(path, "`tokenizer`", f'name a tokenizer.json, or use "{BYTES}"')
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        fix = f'name a tokenizer.json or a folder that holds one, or use "{BYTES}"'
        raise problem("`tokenizer`", f"load {file}", "there is no such file", fix)
    return file


def _load(file: Path) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        fix = "name a file that the `tokenizers` library wrote"
        raise problem("`tokenizer`", f"load {file}", f"it is not a tokenizer ({error})", fix) from error


def _check_ids(file: Path, vocab: dict[str, int]) -> None:
    """Raise `ValueError` for a vocabulary without tokens, or with two tokens of one id, which no text survives."""
    by_id = {number: token for token, number in vocab.items()}
    if len(by_id) < len(vocab) or not vocab:
        twice = next((token for token, number in vocab.items() if by_id[number] != token), None)
        exists = (
            "its vocabulary is empty"
            if twice is None
            else f"the tokens {twice!r:.40} and {by_id[vocab[twice]]!r:.40} have the same id {vocab[twice]}"
        )
        raise problem("`tokenizer`", f"load {file}", exists, "take the tokenizer.json of the release")


def _separator_id(file: Path, vocab: dict[str, int], separator: str | None) -> int | None:
    if separator == "":
        return None
    if separator is not None:
        if separator not in vocab:
            exists = f"the vocabulary of {file} has no such token"
            asked = f"separate documents with {separator!r}"
            raise problem("`separator`", asked, exists, near(separator, vocab))
        return vocab[separator]
    usual = [token for token in SEPARATORS if token in vocab]
    if not usual:
        asked = "find the token that ends a document"
        fix = 'name one of its tokens as `separator`, or set separator="" to join documents with nothing between'
        raise problem("`separator`", asked, f"the vocabulary of {file} has none of {', '.join(SEPARATORS)}", fix)
    return vocab[usual[0]]
