"""Choice of the `dispatch` implementation."""

from __future__ import annotations

import jax

from meshpar.hardware.compile_target import GPUS, KernelChoice

NODE_FIRST = "node-first"
IMPLEMENTATIONS = ("auto", "fixed", "ragged", "hierarchical", NODE_FIRST)
TWO_LEVELS = ("hierarchical", NODE_FIRST)
"""Implementations over a pair of axes, across nodes and inside a node."""


def choose_dispatch(platform: str | None = None, *, dropless: bool = True, two_levels: bool = False) -> KernelChoice:
    """Return the implementation that `dispatch(implementation="auto")` uses.

    Dropless dispatch chooses at lowering: a program that is traced on a laptop and compiled for GPUs uses `ragged`.

    Args:
      platform: `cpu`, `gpu`, `cuda`, ...; None for JAX's default backend.
      dropless: True if the experts have no capacity.
      two_levels: True if the expert axis is a pair (outer, inner).
    """
    platform = platform or jax.default_backend()
    if dropless and platform in GPUS:
        choice = "ragged", "XLA supports ragged-all-to-all on GPUs, which sends no padding"
    elif dropless:
        choice = "fixed", f"XLA has no ragged-all-to-all for {platform}: rows are sent in padded buffers"
    elif two_levels:
        choice = (
            "hierarchical",
            "with fixed capacity over two axes, a rank sends a message per node instead of per rank",
        )
    else:
        choice = "fixed", "with fixed capacity over a single axis, there is a dense all-to-all in each direction"
    return KernelChoice(implementation=choice[0], why=choice[1])
