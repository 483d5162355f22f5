"""Deterministic, resumable global batches from text files, conversations and arrays.

    files ─► documents ─► train | validation ─► token streams ─► windows ─► batches ──► global arrays
    text.py               split.py              streams.py       rows.py     batches.py

`TextData`, `ChatData` and `ArrayData` describe data. `.open(batch_size=, seed=)` returns a `Source` with the methods
`train()`, `valid()` and `describe()`. `baseline.py` computes the loss of a bigram model on the validation tokens.
Imports are lazy.
"""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.data.arrays import ArrayData, ArraySource
    from meshpar.data.baseline import Baseline, CrossEntropy, bigram_baseline
    from meshpar.data.batches import Batch, Batches, Sharding, ValidBatches
    from meshpar.data.chat import ChatData, ChatSource
    from meshpar.data.corpus import TextData, TextSource
    from meshpar.data.mixture import MixedSource
    from meshpar.data.rows import ArrayRows, Rows, Windows
    from meshpar.data.source import DataSource, RowSource, Source
    from meshpar.data.tokens import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

__getattr__, __dir__ = lazy(__name__)

__all__ = [  # noqa: RUF022
    "ArrayData", "ArraySource", "Baseline", "CrossEntropy", "bigram_baseline", "Batch", "Batches", "Sharding",
    "ValidBatches", "ChatData", "ChatSource", "TextData", "TextSource", "MixedSource", "ArrayRows", "Rows", "Windows",
    "DataSource", "RowSource", "Source", "ByteTokenizer", "HuggingFaceTokenizer", "Tokenizer", "load_tokenizer",
]  # fmt: skip
