"""The ops of a pipeline: forward, input gradient, weight gradient; and how one is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from meshpar.types import MeshparError

KINDS = "FBW"
"""Forward, backward to the input, backward to the weights; a kind's place in this string is its number in tables."""
F, B, W = range(3)


class Op(NamedTuple):
    """One op of one stage."""

    kind: str
    """One of `KINDS`."""
    microbatch: int
    chunk: int = 0
    """Which of the parts of the model that the stage holds."""

    @property
    def number(self) -> int:
        """Of its kind, as tables hold it."""
        return KINDS.index(self.kind)

    def text(self, *, chunked: bool = True) -> str:
        """As pictures and errors write it: `F3`, and `F3.1` for chunk 1."""
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if chunked else "")


Block: TypeAlias = tuple[Op, ...]
"""Ops that a stage runs as one piece: it begins when all of them can, and what they send leaves when the last is done.

`(B, W)` of one microbatch is a whole backward; `(F, B)` or `(F, B, W)` of two microbatches is an overlapped pair.
"""


def problem(where: str, asked: str, exists: str, fix: str) -> MeshparError:
    """The four-part error. Its module brings jax along, which schedules do without until something is wrong."""
    from meshpar.types import problem

    return problem(where, asked, exists, fix)
