"""Mapping between checkpoint tensors and the arrays of a model, for reading and writing.

    WeightMapping("model.layers.{L}.self_attn.q_proj.weight", "layers/attention/query/kernel", "(H D) E -> L E H D")

Each layer has a matrix of shape `[H * D, E]` in the file. The model stacks them in an array of shape `[L, E, H, D]`. A
model dim without a file dim (L for layers, X for experts) appears as a number in the tensor names.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

Slices = tuple[slice, ...]
ReadTensor = Callable[[str, Slices], np.ndarray]
"""(tensor name, slices) -> that part of the tensor."""


@dataclasses.dataclass(frozen=True)
class DimPart:
    """Indices of a file dim that form a model dim. The remaining indices belong to other arrays."""

    indices: tuple[int, ...]
    """Index in the file for each index of the model dim."""
    size: int
    """Size of the file dim."""


@dataclasses.dataclass(frozen=True)
class WeightMapping:
    """Mapping between an array of the model and its checkpoint tensors."""

    template: str
    """Tensor name with placeholders: `{L}` for the layer index and `{X}` for the expert index."""
    path: str
    """Path of the parameter, or the end of the path of a variable in `TrainState.extra`."""
    dims: str
    """`"file dims -> model dims"`. Model dims that are combined in a file dim are in parentheses."""
    sizes: Mapping[str, int]
    """Sizes of the model dims. L is the number of stacked layers."""
    parts: Mapping[str, DimPart] = dataclasses.field(default_factory=dict)
    """For model dims that are only a part of a file dim."""
    first_layer: int = 0
    is_extra: bool = False
    """True for a variable in `TrainState.extra`. It is written as float32."""

    @property
    def file_dims(self) -> list[str]:
        """The letters of each file dim."""
        groups = re.findall(r"\(([A-Za-z ]+)\)|(\w)", self.dims.partition("->")[0])
        return [(combined or letter).replace(" ", "") for combined, letter in groups]

    @property
    def model_dims(self) -> str:
        return self.dims.partition("->")[2].replace(" ", "")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the model's array."""
        return tuple(self.sizes[letter] for letter in self.model_dims)

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of each tensor in the file."""
        return tuple(math.prod(map(self.file_size, group)) for group in self.file_dims)

    @property
    def num_tensors(self) -> int:
        return math.prod(self.sizes[letter] for letter in self._name_dims)

    @property
    def _name_dims(self) -> str:
        """The leading model dims, which are numbers in the tensor's name."""
        in_file = "".join(self.file_dims)
        return "".join(letter for letter in self.model_dims if letter not in in_file)

    @property
    def _transpose(self) -> list[int]:
        """Permutation of the file dims that gives the order of the model dims."""
        in_file = "".join(self.file_dims)
        return [in_file.index(letter) for letter in self.model_dims if letter in in_file]

    def file_size(self, letter: str) -> int:
        """Return the size that a model dim has in the file."""
        return self.parts[letter].size if letter in self.parts else self.sizes[letter]

    def tensors(self, within: Slices | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name of each tensor and its index in the leading dims of the array."""
        dims = self._name_dims
        slices = within or (slice(None),) * len(dims)
        ranges = [range(*part.indices(self.sizes[letter])) for letter, part in zip(dims, slices, strict=False)]
        for index in itertools.product(*ranges):
            numbers = {"L": 0, **dict(zip(dims, index, strict=True))}
            yield self.template.format(**{**numbers, "L": numbers["L"] + self.first_layer}), index

    def read(self, index: Slices, dtype: jax.typing.DTypeLike, read: ReadTensor) -> np.ndarray:
        """Return a slice of the array. Only the matching slice of each tensor is read."""
        bounds = [range(*part.indices(size)) for part, size in zip(index, self.shape, strict=True)]
        out = np.empty([len(bound) for bound in bounds], dtype)
        ranges = dict(zip(self.model_dims, bounds, strict=True))
        for name, leading in self.tensors(index):
            out[tuple(i - bound.start for i, bound in zip(leading, bounds, strict=False))] = self._read_one(
                name, ranges, read
            )
        return out

    def _read_one(self, name: str, ranges: Mapping[str, range], read: ReadTensor) -> np.ndarray:
        """Read a slice of a tensor, and transpose it to the order of the model dims."""
        slices, shape, cuts = [], [], []
        for group in self.file_dims:
            for position, letter in enumerate(group):
                cut: Any = slice(ranges[letter].start, ranges[letter].stop)
                size = self.file_size(letter)
                if letter in self.parts:
                    indices = list(self.parts[letter].indices[cut])
                    end = indices[0] + len(indices)
                    cut = slice(indices[0], end) if indices == list(range(indices[0], end)) else indices
                if position == 0:  # a contiguous range of the outermost dim is a contiguous range of the file dim
                    stride = math.prod(map(self.file_size, group[1:]))
                    first, stop = (cut.start, cut.stop) if isinstance(cut, slice) else (min(cut), max(cut) + 1)
                    slices.append(slice(first * stride, stop * stride))
                    cut = slice(None) if isinstance(cut, slice) else [index - first for index in cut]
                    size = stop - first
                shape.append(size)
                cuts.append(cut)
        block = read(name, tuple(slices)).reshape(shape)
        for dim, cut in enumerate(cuts):
            block = block[(slice(None),) * dim + (cut,)]
        return block.transpose(self._transpose)

    def write(self, block: np.ndarray, into: np.ndarray) -> None:
        """Write the array of one layer, or of one expert, into its part of a tensor of the file."""
        letters = "".join(self.file_dims)
        indices = [self.parts[a].indices if a in self.parts else range(self.sizes[a]) for a in letters]
        view = into.reshape([self.file_size(letter) for letter in letters])
        view[np.ix_(*indices)] = block.transpose(np.argsort(self._transpose)).astype(into.dtype, copy=False)


def contiguous(start: int, stop: int, size: int) -> DimPart:
    """Return the part `start:stop` of a file dim of this size."""
    return DimPart(tuple(range(start, stop)), size)
