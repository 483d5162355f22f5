"""The seam between data and the training loop: what a recipe's data must offer, whatever it is made of."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from meshpar.data.assembly import Sharding, check_batch_size
from meshpar.data.batches import Batches, ValidBatches, spread_evenly
from meshpar.data.rows import Rows
from meshpar.sharding.types import is_int, problem


@runtime_checkable
class Source(Protocol):
    """Opened data: a training set and a held-out set, served as batches."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A hash of what is trained on and what is held out; equal on every process of a healthy run."""

    def train(self, sharding: Sharding = None) -> Batches:
        """Endless batches of the training set, from step 0."""
        ...

    def valid(self, sharding: Sharding = None) -> ValidBatches:
        """The same few batches of the held-out set every time."""
        ...

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the data is, in numbers and words; JSON values only."""


@runtime_checkable
class DataSource(Protocol):
    """A recipe's description of its data: small, frozen, and read only when opened."""

    def open(self, *, batch_size: int, seed: int) -> Source:
        """Reads the data for global batches of `batch_size` rows, trained on in an order chosen by `seed`."""
        ...


class RowSource(Source):
    """A `Source` made of rows to train on and rows held out; says what the two that ship have in common.

    Args:
      train_rows: the training set.
      valid_rows: the held-out set.
      batch_size: rows in a global batch, of either set.
      seed: chooses the order of the training rows.
      valid_batches: batches a validation serves at most; None serves every whole one.
      prefetch: batches made ahead in the background.
      extra: further facts that a saved state must agree on.

    Raises:
      ValueError: too few rows for one batch, of either set.
    """

    def __init__(
        self,
        train_rows: Rows,
        valid_rows: Rows,
        *,
        batch_size: int,
        seed: int,
        valid_batches: int | None,
        prefetch: int,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        check_batch_size(batch_size, len(train_rows), "training set")
        self.train_rows, self.valid_rows = train_rows, valid_rows
        self.batch_size, self.seed = batch_size, seed
        self.served = spread_evenly(len(valid_rows), batch_size, valid_batches)
        """Numbers of the held-out rows that `valid()` serves."""
        self._prefetch, self._extra = prefetch, extra

    def train(self, sharding: Sharding = None) -> Batches:
        return Batches(
            self.train_rows,
            batch_size=self.batch_size,
            seed=self.seed,
            fingerprint=self.fingerprint,
            sharding=sharding,
            prefetch=self._prefetch,
            extra=self._extra,
        )

    def valid(self, sharding: Sharding = None) -> ValidBatches:
        """Whole batches, spread evenly over the held-out set."""
        return ValidBatches(
            self.valid_rows, self.served, batch_size=self.batch_size, sharding=sharding, prefetch=self._prefetch
        )


def check_least(where: str, value: int | None, least: int) -> None:
    """Raises ValueError for what is no whole number from `least` on; None passes."""
    if value is not None and not is_int(value, least):
        exists = f"the least is {least}" if is_int(value) else "it is a whole number"
        raise problem(f"`{where}`", f"use {value!r}", exists, f"set it to {least} or more")


def check_names(where: str, files: object, example: str) -> tuple[str, ...]:
    """Names of files, as a tuple; raises ValueError for what is none."""
    if isinstance(files, tuple | list) and files and all(isinstance(name, str) for name in files):
        return tuple(files)
    fix = f'write files=("{files if files and isinstance(files, str) else example}",)'
    raise problem(f"`{where}`", f"read {files!r}"[:100], "it must be a tuple of one or more names", fix)
