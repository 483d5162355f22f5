"""The table of a family: which of its tensors is which of ours, cut and transposed how; read in both directions.

    FileTensor("model.layers.{L}.self_attn.q_proj.weight", "layers/attention/query/kernel", "(H D) E -> L E H D")

says that a file's matrix has rows of H heads of D and columns of E, that ours is `[L, E, H, D]`, and that a dim which
the matrix has not, L or X, is a number in its name.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Slices = tuple[slice, ...]
Read = Callable[[str, Slices], np.ndarray]
"""Of a tensor by its name, a part of each of its dims."""


@dataclasses.dataclass(frozen=True)
class DimPart:
    """The part of a file's dim that is one of ours: other parts are other arrays' or it stands in another order."""

    order: tuple[int, ...]
    """Where each index of ours stands in the file's dim."""
    size: int
    """Of the file's dim."""


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """One of our arrays, and the tensors of a file that it is made of."""

    theirs: str
    """Name in files; `{L}` and `{X}` stand for the numbers of a layer and of an expert."""
    ours: str
    """Path in the state: of parameters, or in `extra` what is no parameter."""
    dims: str
    """`"their dims -> our dims"`; dims of theirs that are several of ours stand in brackets."""
    sizes: Mapping[str, int]
    """Of our dims; L is the number of layers in the stack."""
    parts: Mapping[str, DimPart] = dataclasses.field(default_factory=dict)
    """Of the dims that are a part of the file's."""
    first: int = 0
    """Number of the first layer."""
    is_extra: bool = False
    """Whether it is no parameter; its dtype is float32 then."""

    @property
    def groups(self) -> list[str]:
        """Our dims in each of theirs."""
        found = re.findall(r"\(([A-Za-z ]+)\)|(\w)", self.dims.partition("->")[0])
        return [(several or one).replace(" ", "") for several, one in found]

    @property
    def letters(self) -> str:
        """Our dims."""
        return self.dims.partition("->")[2].replace(" ", "")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of our array."""
        return tuple(self.sizes[letter] for letter in self.letters)

    def full(self, letter: str) -> int:
        """Size of a dim in the file."""
        return self.parts[letter].size if letter in self.parts else self.sizes[letter]

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Of a tensor in the file."""
        return tuple(math.prod(self.full(letter) for letter in group) for group in self.groups)

    @property
    def num_names(self) -> int:
        """How many tensors it is made of."""
        return math.prod(self.sizes[letter] for letter in self._named)

    @property
    def _named(self) -> str:
        return "".join(letter for letter in self.letters if letter not in "".join(self.groups))

    def name(self, at: Mapping[str, int]) -> str:
        """Of the tensor of a layer and an expert."""
        return self.theirs.format(**{**at, "L": at.get("L", 0) + self.first})

    def names(self, within: Slices | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor it is made of, and where it stands in our array's leading dims; or those within a part of it."""
        named = self._named
        ranges = [range(self.sizes[letter]) for letter in named]
        if within is not None:
            ranges = [range(*of.indices(self.sizes[letter])) for letter, of in zip(named, within, strict=False)]
        for at in itertools.product(*ranges):
            yield self.name(dict(zip(named, at, strict=True))), at

    def read(self, index: Slices, dtype: Any, read: Read) -> np.ndarray:
        """A part of our array, of the same part of each tensor and no more than that."""
        named = len(self._named)
        bounds = [range(*of.indices(size)) for of, size in zip(index, self.shape, strict=True)]
        out = np.empty([len(one) for one in bounds], dtype)
        inner = dict(zip(self.letters[named:], bounds[named:], strict=True))
        for name, at in self.names(index):
            place = tuple(i - bounds[dim].start for dim, i in enumerate(at))
            out[place] = self._block(name, inner, read)
        return out

    def _block(self, name: str, inner: Mapping[str, range], read: Read) -> np.ndarray:
        """One tensor's part, its dims in our order. Of a dim in brackets what stands first is cut in the file."""
        slices, shape, cuts = [], [], []
        for group in self.groups:
            for place, letter in enumerate(group):
                cut: Any = slice(inner[letter].start, inner[letter].stop)
                part, size = self.parts.get(letter), self.full(letter)
                if part is not None:
                    cut = _run(part.order[cut])
                if place == 0:
                    behind = math.prod(self.full(other) for other in group[1:])
                    if isinstance(cut, slice):  # in the file; else all of it is read
                        slices.append(slice(cut.start * behind, cut.stop * behind))
                        size, cut = cut.stop - cut.start, slice(None)
                    else:
                        slices.append(slice(0, size * behind))
                shape.append(size)
                cuts.append(cut)
        block = read(name, tuple(slices)).reshape(shape)
        for dim, cut in enumerate(cuts):
            block = block[(slice(None),) * dim + (cut,)]
        return block.transpose(self._to_ours)

    @property
    def _to_ours(self) -> list[int]:
        theirs, inner = "".join(self.groups), self.letters[len(self._named) :]
        return [theirs.index(letter) for letter in inner]

    def write(self, block: np.ndarray, into: np.ndarray) -> None:
        """Put one layer's and expert's part of our array where it stands in the file's tensor."""
        theirs = "".join(self.groups)
        view = into.reshape([self.full(letter) for letter in theirs])
        where = np.ix_(*[
            np.asarray(self.parts[letter].order) if letter in self.parts else np.arange(self.sizes[letter])
            for letter in theirs
        ])  # fmt: skip
        view[where] = block.transpose(np.argsort(self._to_ours)).astype(into.dtype, copy=False)


def _run(order: tuple[int, ...]) -> slice | list[int]:
    """Neighbouring indices as a slice."""
    is_run = order == tuple(range(order[0], order[0] + len(order)))
    return slice(order[0], order[0] + len(order)) if is_run else list(order)


def run(start: int, stop: int, size: int) -> DimPart:
    """A run of a file's dim."""
    return DimPart(tuple(range(start, stop)), size)
