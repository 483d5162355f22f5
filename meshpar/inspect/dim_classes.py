"""Classes of dims that must have the same sharding, found by following dims through a traced function.

A dim is a product of atoms, from major to minor. After `q.reshape(B, S, heads, head_dim)`, the last dim of the
projection has two atoms. Operations that combine two arrays unify their dims. An atom that must be divided is bound to
a product of smaller atoms. This is unification of terms, with products of sizes as terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Dim: TypeAlias = tuple[int, ...]
"""Atoms of a dim, from major to minor. A dim of size 1 has none."""


class DimClasses:
    """Atoms with their sizes, and the atoms that replace them."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._bound: dict[int, Dim] = {}

    def new(self, size: int) -> Dim:
        """Return a dim with a new atom."""
        if size == 1:
            return ()
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def new_dims(self, shape: Iterable[int]) -> tuple[Dim, ...]:
        """Return a new dim for each size."""
        return tuple(map(self.new, shape))

    def size(self, dim: Dim) -> int:
        """Return the number of elements along a dim."""
        return math.prod(self._sizes[atom] for atom in dim)

    def resolved(self, dim: Iterable[int]) -> Dim:
        """Return the dim with unbound atoms only."""
        atoms: list[int] = []
        for atom in dim:
            atoms += self.resolved(self._bound[atom]) if atom in self._bound else (atom,)
        return tuple(atoms)

    def unify(self, a: Dim, b: Dim) -> None:
        """Record that two dims have the same sharding.

        Atoms are compared from minor to major, and divided where the sizes differ. Without a common division, the
        remaining atoms stay separate.
        """
        if self.size(a) != self.size(b):
            return
        while True:
            a, b = self.resolved(a), self.resolved(b)
            if not a or not b:
                return
            x, y = a[-1], b[-1]
            small, large = sorted((x, y), key=lambda atom: self._sizes[atom])
            if x != y:
                if self._sizes[large] % self._sizes[small]:
                    return
                self._bound[large] = (*self.new(self._sizes[large] // self._sizes[small]), small)
                continue
            a, b = a[:-1], b[:-1]

    def divide(self, dim: Dim, minor: int) -> tuple[Dim, Dim] | None:
        """Return the major and the minor part of a dim, where the minor part has `minor` elements.

        Returns None if the atoms do not permit it.
        """
        major, rest = list(self.resolved(dim)), minor
        taken: list[int] = []
        while rest > 1:
            if not major:
                return None
            atom = major.pop()
            size = self._sizes[atom]
            if rest % size == 0:
                taken.insert(0, atom)
                rest //= size
            elif size % rest == 0:
                self._bound[atom] = (*self.new(size // rest), *self.new(rest))
                major.append(self._bound[atom][0])
                taken.insert(0, self._bound[atom][1])
                rest = 1
            else:
                return None
        return tuple(major), tuple(taken)

    def reshaped(self, dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
        """Return the dims after a row-major reshape.

        Equal sizes at the start are kept. The remaining dims are divided from the last dim on, and are new where no
        division is possible.
        """
        start = 0
        while start < min(len(dims), len(shape)) and self.size(dims[start]) == shape[start]:
            start += 1
        rest: Dim = tuple(atom for dim in dims[start:] for atom in dim)
        out: list[Dim] = []
        for size in reversed(shape[start:]):
            parts = self.divide(rest, size)
            if parts is None:
                return (*dims[:start], *self.new_dims(shape[start : len(shape) - len(out)]), *out)
            rest = parts[0]
            out.insert(0, parts[1])
        return (*dims[:start], *out)
