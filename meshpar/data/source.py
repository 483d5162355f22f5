"""Interface between data and training loop: a training and a validation set, served as batches."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from meshpar.data.batches import Batches, RowOrder, Sharding, ValidBatches, check_batch_size, spread_evenly
from meshpar.data.rows import Rows
from meshpar.data.split import check_fraction
from meshpar.data.tokens import Tokenizer
from meshpar.sharding.errors import check_int, check_positive_int, problem


@runtime_checkable
class Source(Protocol):
    """Opened data, returned by `DataSource.open`."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Hash of the training set and the validation set. All processes must agree on it."""

    def train(self, sharding: Sharding = None) -> Batches:
        """Return endless batches of the training set, from step 0."""
        ...

    def valid(self, sharding: Sharding = None) -> ValidBatches:
        """Return batches of the validation set, identical in all iterations."""
        ...

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return a description of the data that can be written as JSON."""


@runtime_checkable
class DataSource(Protocol):
    """Description of data in a recipe: a small frozen value. The data is read when it is opened."""

    def open(self, *, batch_size: int, seed: int) -> Source:
        """Read the data.

        Args:
          batch_size: number of examples in a global batch.
          seed: determines the order of the training examples.
        """
        ...


class RowSource(Source):
    """A `Source` of training rows and validation rows. Subclasses add `fingerprint` and `describe`.

    Args:
      data: the description, with the fields `valid_batches` and `prefetch`.
      train_rows: the training set.
      valid_rows: the validation set.
      batch_size: number of examples in a global batch of either set.
      seed: determines the order of the training examples.
      extra: additional values that a saved state must match.
    """

    def __init__(
        self, data: Any, train_rows: Rows, valid_rows: Rows, *, batch_size: int, seed: int,
        extra: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        check_batch_size(batch_size, len(train_rows), "training set")
        self.data, self.train_rows, self.valid_rows = data, train_rows, valid_rows
        self.batch_size, self.seed, self._extra = batch_size, seed, extra
        self.served = spread_evenly(len(valid_rows), batch_size, data.valid_batches)
        """Indices of the validation rows that `valid()` serves."""

    def train(self, sharding: Sharding = None) -> Batches:
        return Batches(
            self.train_rows, batch_size=self.batch_size, seed=self.seed, fingerprint=self.fingerprint,
            sharding=sharding, prefetch=self.data.prefetch, extra=self._extra, order=self.order(),
        )  # fmt: skip

    def order(self) -> RowOrder | None:
        """Return the order of the training rows for `Batches`. None shuffles all rows in each epoch."""
        return None

    def valid(self, sharding: Sharding = None) -> ValidBatches:
        options = {"batch_size": self.batch_size, "prefetch": self.data.prefetch}
        return ValidBatches(self.valid_rows, self.served, sharding=sharding, **options)


class TokenSource(RowSource):
    """A `RowSource` of `seq_len` tokens per row, with `encode` and `decode` of its tokenizer."""

    def __init__(self, data: Any, tokenizer: Tokenizer, *rows: Rows, batch_size: int, seed: int) -> None:
        super().__init__(data, *rows, batch_size=batch_size, seed=seed, extra={"seq_len": data.seq_len})
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.encode, self.decode = tokenizer.encode, tokenizer.decode


def check_fields(data: Any) -> None:
    """Check the fields that all descriptions of data have, and `seq_len`."""
    where = type(data).__name__
    check_fraction(where, data.valid_fraction)
    check_int(where, "the number of batches prepared in the background", prefetch=data.prefetch)
    if data.valid_batches is not None:
        check_positive_int(where, "the number of batches per validation", valid_batches=data.valid_batches)
    if hasattr(data, "seq_len"):
        check_positive_int(where, "the number of predictions per row", seq_len=data.seq_len)


def checked_files(where: str, files: object, example: str) -> tuple[str, ...]:
    """Return the field `files` as a tuple of strings."""
    if isinstance(files, tuple | list) and files and all(isinstance(name, str) for name in files):
        return tuple(files)
    fix = f'write files=("{files if files and isinstance(files, str) else example}",)'
    raise problem(where, f"read {files!r}"[:100], "it must be a non-empty tuple of strings", fix, "wrong-type")
