"""Data source of arrays in memory, such as images and labels."""

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
from meshpar.data.source import RowSource, check_fields
from meshpar.data.split import split_examples
from meshpar.sharding.errors import problem

Arrays: TypeAlias = Mapping[str, Shaped[np.ndarray, "examples ..."]]
"""Arrays by name. The first dim of each is the example."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ArrayData:
    """Named arrays with the same number of examples, split into a training set and a validation set.

    Example:
      >>> data = mp.data.ArrayData(arrays={"x": np.arange(100.0), "y": np.arange(100)})
      >>> source = data.open(batch_size=8, seed=0)
      >>> with source.train() as batches:
      ...     print(next(iter(batches))["x"].shape)
      (8,)
    """

    arrays: Arrays | Callable[[], Arrays] = dataclasses.field(repr=False)
    """The examples, or a function that loads them when the data is opened."""
    valid: Arrays | Callable[[], Arrays] | None = dataclasses.field(default=None, repr=False)
    """The validation examples. None holds out `valid_fraction` of `arrays`."""
    valid_fraction: float = 0.1
    """Fraction of the examples in the validation set, chosen by the hash of their index. Ignored if `valid` is set."""
    valid_batches: int | None = None
    """Maximum number of batches per validation, spread evenly over the validation set. None serves all full batches."""
    prefetch: int = PREFETCH
    """Number of batches prepared in the background."""

    def __post_init__(self) -> None:
        check_fields(self)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of a batch. Calls `arrays` if it is a function."""
        arrays = _loaded(self.arrays)
        return {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in arrays.items()}

    def open(self, *, batch_size: int, seed: int) -> ArraySource:
        """Load, check and split the arrays. 64-bit values become 32-bit values unless `jax_enable_x64` is set."""
        train = _loaded(self.arrays)
        num_train = _num_examples("arrays", train)
        if self.valid is None:
            train_indices, valid_indices = split_examples(num_train, self.valid_fraction)
            sets = ArrayRows(train, train_indices), ArrayRows(train, valid_indices)
            held_out = f"{len(valid_indices)} of {num_train} examples, by the hash of their number"
        else:
            valid = _loaded(self.valid)
            num_valid = _num_examples("valid", valid)
            specs = [{name: (x.shape[1:], str(x.dtype)) for name, x in arrays.items()} for arrays in (train, valid)]
            if specs[0] != specs[1]:
                requested, reason = f"use validation examples of {specs[1]}", f"the training examples have {specs[0]}"
                fix = "use the same names, shapes and dtypes in both sets"
                raise problem("`ArrayData.valid`", requested, reason, fix, "wrong-shape")
            sets = ArrayRows(train, np.arange(num_train)), ArrayRows(valid, np.arange(num_valid))
            held_out = f"{num_valid} examples given as `valid`"
        return ArraySource(self, *sets, held_out=held_out, batch_size=batch_size, seed=seed)


class ArraySource(RowSource):
    """Opened arrays, returned by `ArrayData.open`."""

    def __init__(self, data: ArrayData, *rows: ArrayRows, held_out: str, batch_size: int, seed: int) -> None:
        super().__init__(data, *rows, batch_size=batch_size, seed=seed)
        self._held_out = held_out

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the training examples and the validation examples."""
        digest = hashlib.blake2b(b"arrays", digest_size=16)
        for rows in (self.train_rows, self.valid_rows):
            for name, array in sorted(rows.read(np.arange(len(rows))).items()):
                digest.update(f" {name} {array.shape} {array.dtype} ".encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return shapes and dtypes of an example, the sizes of both sets, and how they were split."""
        empty = self.train_rows.read(np.array([], dtype=np.int64))
        return {
            "arrays": {name: {"shape": list(x.shape[1:]), "dtype": str(x.dtype)} for name, x in empty.items()},
            "held_out": self._held_out,
            "train": {"examples": len(self.train_rows)},
            "valid": {"examples": len(self.valid_rows), "batches": len(self.served) // self.batch_size},
            "fingerprint": self.fingerprint,
        }


def _loaded(arrays: Arrays | Callable[[], Arrays]) -> dict[str, np.ndarray]:
    loaded = arrays() if callable(arrays) else arrays
    # Convert to the dtype that jax uses, which depends on jax_enable_x64.
    return {name: np.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)) for name, x in loaded.items()}


def _num_examples(field: str, arrays: dict[str, np.ndarray]) -> int:
    shapes = {name: array.shape for name, array in arrays.items()}
    sizes = {shape[:1] for shape in shapes.values()}
    if len(sizes) != 1 or sizes <= {(), (0,)}:
        fix, code = "make the first dim of all arrays the example", "wrong-shape"
        if sizes <= {(0,)}:
            fix, code = "add an example", "not-found"
        raise problem(f"`ArrayData.{field}`", "find the examples", f"the shapes are {shapes}", fix, code)
    return sizes.pop()[0]
