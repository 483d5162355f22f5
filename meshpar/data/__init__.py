"""Text files or arrays as deterministic, resumable global batches.

    files ─► documents ─► train | held out ─► token streams ─► windows ─► batches ──► global arrays
    text.py               split.py            tokens.py        rows.py     batches.py  assembly.py

`TextData` and `ArrayData` describe data; `.open(batch_size=, seed=)` reads it and gives a `Source`: `train()`,
`valid()`, `describe()`. `baseline.py` says what a bigram model reaches on the same held-out tokens. Names are imported
when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshpar.data.arrays import ArrayData, ArraySource
    from meshpar.data.assembly import Batch, Sharding
    from meshpar.data.baseline import Baseline, CrossEntropy, bigram_baseline
    from meshpar.data.batches import Batches, ValidBatches
    from meshpar.data.corpus import TextData, TextSource
    from meshpar.data.rows import ArrayRows, Rows, Windows
    from meshpar.data.source import DataSource, Source
    from meshpar.data.tokens import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

_HOMES = {
    "arrays": ("ArrayData", "ArraySource"),
    "baseline": ("Baseline", "CrossEntropy", "bigram_baseline"),
    "assembly": ("Batch", "Sharding"),
    "batches": ("Batches", "ValidBatches"),
    "corpus": ("TextData", "TextSource"),
    "rows": ("ArrayRows", "Rows", "Windows"),
    "source": ("DataSource", "Source"),
    "tokens": ("ByteTokenizer", "HuggingFaceTokenizer", "Tokenizer", "load_tokenizer"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022
    "ArrayData", "ArraySource", "Baseline", "CrossEntropy", "bigram_baseline", "Batch", "Batches", "Sharding",
    "ValidBatches", "TextData", "TextSource", "ArrayRows", "Rows", "Windows", "DataSource", "Source", "ByteTokenizer",
    "HuggingFaceTokenizer", "Tokenizer", "load_tokenizer",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"meshpar.data has no {name!r}; it has {', '.join(sorted(_HOME_OF))}")
    value = getattr(importlib.import_module(f"meshpar.data.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
