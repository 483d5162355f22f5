"""The ops of a pipeline: forward, input gradient, weight gradient; and how one is written."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from meshpar.sharding.errors import MeshparError, problem

KINDS = "FBW"
"""Forward, backward to the input, backward to the weights; a kind's place in this string is its number in tables."""
F, B, W = range(3)
LONG = {"F": "forward", "B": "input gradient", "W": "weight gradient"}
"""A kind in words."""


class StageOp(NamedTuple):
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


Block: TypeAlias = tuple[StageOp, ...]
"""Ops that a stage runs as one piece: it begins when all of them can, and what they send leaves when the last is done.

`(B, W)` of one microbatch is a whole backward; `(F, B)` or `(F, B, W)` of two microbatches is an overlapped pair.
"""


def unreadable(path: str, error: Exception, fix: str) -> MeshparError:
    """Of a file that holds no schedule, or is not there."""
    if isinstance(error, FileNotFoundError):
        return problem(path, "read a schedule", "there is no such file", "give the path of one")
    why = error.strerror if isinstance(error, OSError) else f"it is none: {error}"
    return problem(path, "read a schedule", why or str(error), fix)
