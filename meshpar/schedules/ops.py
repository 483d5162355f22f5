"""The ops of a pipeline stage: forward, input gradient and weight gradient."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

KINDS = "FBW"
"""Forward, gradient of the input, gradient of the weights. Tables store the index of a kind in this string."""
F, B, W = range(3)
LONG = {"F": "forward", "B": "input gradient", "W": "weight gradient"}


class StageOp(NamedTuple):
    """One op of one stage."""

    kind: str
    """One of `KINDS`."""
    microbatch: int
    chunk: int = 0
    """Index of the pipeline chunk among the chunks of its stage."""

    @property
    def number(self) -> int:
        """Index of the kind in `KINDS`."""
        return KINDS.index(self.kind)

    def text(self, *, chunked: bool = True) -> str:
        """Return the op as tables and errors print it: `F3`, or `F3.1` for chunk 1."""
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if chunked else "")


Block: TypeAlias = tuple[StageOp, ...]
"""Ops that a stage runs as a unit.

A block starts when the inputs of all its ops are available, and its results are sent when the last op is done.

`(B, W)` of one microbatch is a full backward pass. `(F, B)` or `(F, B, W)` of two microbatches is an overlapped pair.
"""
