"""ArrayData: arrays in memory, as images and their labels, as a source of batches."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Shaped

from meshpar.data.batches import PREFETCH
from meshpar.data.rows import ArrayRows
from meshpar.data.source import RowSource, check_least
from meshpar.data.split import check_fraction, split_rows
from meshpar.sharding.types import problem

Arrays: TypeAlias = Mapping[str, Shaped[np.ndarray, "examples ..."]]
"""Name to array; the first dim of each runs over the same examples."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ArrayData:
    """Named arrays of the same first dim -> train and held-out examples -> batches."""

    arrays: Arrays | Callable[[], Arrays] = dataclasses.field(repr=False)
    """The examples, or a function that loads them when the data is opened, so that a recipe stays cheap to make."""
    valid: Arrays | Callable[[], Arrays] | None = dataclasses.field(default=None, repr=False)
    """The held-out examples; None holds out `valid_fraction` of `arrays`."""
    valid_fraction: float = 0.1
    """Which part of the examples is held out, by the hash of their number; not used where `valid` is given."""
    valid_batches: int | None = None
    """Batches a validation serves, spread evenly over the held-out set; None, or too many: all whole ones."""
    prefetch: int = PREFETCH
    """Batches made ahead in the background; 0 makes each when it is needed."""

    def __post_init__(self) -> None:
        check_fraction("`ArrayData.valid_fraction`", self.valid_fraction)
        for name, least in (("valid_batches", 1), ("prefetch", 0)):
            check_least(f"ArrayData.{name}", getattr(self, name), least)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What a batch will be; arrays that a function loads are loaded for it."""
        arrays = _loaded("arrays", self.arrays)
        return {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in arrays.items()}

    def open(self, *, batch_size: int, seed: int) -> ArraySource:
        """Loads, checks and splits the arrays. 64-bit numbers become 32-bit ones unless jax has x64 enabled.

        Raises:
          ValueError: no arrays, first dims that differ, held-out arrays that do not match, or too few examples for one
            batch on either side.
        """
        train = _loaded("arrays", self.arrays)
        num_rows = _num_rows("arrays", train)
        if self.valid is None:
            train_which, valid_which = split_rows(num_rows, self.valid_fraction)
            sides = ArrayRows(train, train_which), ArrayRows(train, valid_which)
            how = f"{len(valid_which)} of {num_rows} examples, by the hash of their number"
        else:
            valid = _loaded("valid", self.valid)
            num_valid = _num_rows("valid", valid)
            _check_alike(train, valid)
            sides = ArrayRows(train, np.arange(num_rows)), ArrayRows(valid, np.arange(num_valid))
            how = f"{num_valid} examples given as `valid`"
        return ArraySource(self, *sides, how=how, batch_size=batch_size, seed=seed)


class ArraySource(RowSource):
    """Opened arrays: training and held-out examples. Made by `ArrayData.open`."""

    def __init__(
        self, data: ArrayData, train: ArrayRows, valid: ArrayRows, *, how: str, batch_size: int, seed: int
    ) -> None:
        super().__init__(
            train, valid, batch_size=batch_size, seed=seed, valid_batches=data.valid_batches, prefetch=data.prefetch
        )
        self.data = data
        self._how = how

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the training and the held-out examples."""
        digest = hashlib.blake2b(b"arrays", digest_size=16)
        for rows in (self.train_rows, self.valid_rows):
            for name, array in sorted(rows.read(np.arange(len(rows))).items()):
                digest.update(f" {name} {array.shape} {array.dtype} ".encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Shapes and dtypes of an example, the sizes of both sets, and how they were split; JSON values only."""
        empty = self.train_rows.read(np.array([], dtype=np.int64))
        return {
            "arrays": {name: {"shape": list(x.shape[1:]), "dtype": str(x.dtype)} for name, x in empty.items()},
            "held_out": self._how,
            "train": {"examples": len(self.train_rows)},
            "valid": {"examples": len(self.valid_rows), "batches": len(self.served) // self.batch_size},
            "fingerprint": self.fingerprint,
        }


def _loaded(field: str, arrays: Arrays | Callable[[], Arrays]) -> dict[str, np.ndarray]:
    loaded = arrays() if callable(arrays) else arrays
    if not loaded:
        raise problem(f"`ArrayData.{field}`", "open it", "it holds no arrays", "give at least one, by name")
    arrays = {name: np.asarray(array) for name, array in loaded.items()}
    # In the dtype that jax would hold each in.
    return {name: x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False) for name, x in arrays.items()}


def _num_rows(field: str, arrays: dict[str, np.ndarray]) -> int:
    shapes = {name: array.shape for name, array in arrays.items()}
    if any(not shape for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) != 1:
        exists = f"their shapes are {shapes}"
        fix = "give every array one entry per example in its first dim"
        raise problem(f"`ArrayData.{field}`", "pair up the arrays' examples", exists, fix)
    num_rows = next(iter(shapes.values()))[0]
    if not num_rows:
        raise problem(f"`ArrayData.{field}`", "open it", "it holds no examples", "give at least one")
    return num_rows


def _check_alike(train: dict[str, np.ndarray], valid: dict[str, np.ndarray]) -> None:
    train_kind, valid_kind = (
        {name: (array.shape[1:], str(array.dtype)) for name, array in arrays.items()} for arrays in (train, valid)
    )
    if train_kind != valid_kind:
        asked, exists = f"hold out examples of {valid_kind}", f"the training examples are {train_kind}"
        raise problem("`ArrayData.valid`", asked, exists, "give both the same names, shapes and dtypes")
