"""How rows travel between ranks when nothing is said about it, and why."""

from __future__ import annotations

import contextlib
import dataclasses

import jax

NODE_FIRST = "node-first"
IMPLEMENTATIONS = ("auto", "fixed", "ragged", "hierarchical", NODE_FIRST)
TWO_LEVELS = ("hierarchical", NODE_FIRST)
"""Over a pair of axes, across the nodes and inside them."""
GPUS = ("gpu", "cuda", "rocm")
_TARGET = jax.make_user_context(None)
"""(platform, compute capability) of the devices that a program is traced for; caches of traces go by it."""


def compiled_for(platform: str, capability: tuple[int, int] | None = None) -> contextlib.AbstractContextManager[None]:
    """What is traced inside is for these devices, whichever jax runs on: kernels are chosen as they would be there."""
    return _TARGET((platform, capability))


def target() -> tuple[str, tuple[int, int] | None]:
    """Platform and compute capability that a program is traced for: those of `compiled_for`, else jax's own."""
    if _TARGET.value is not None:
        return _TARGET.value
    platform = jax.default_backend()
    known = getattr(jax.devices()[0], "compute_capability", None) if platform in GPUS else None
    if known is None:
        return platform, None
    major, _, minor = str(known).partition(".")
    return platform, (int(major), int(minor or 0))


def platform_of_mesh() -> str | None:
    """What the devices of the mesh around a kernel are (`cpu`, `gpu`, ...); None where it has none: it is abstract."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """An implementation of `dispatch` or of a grouped matmul, and the reason for it."""

    implementation: str
    why: str


def choose_dispatch(platform: str | None = None, *, dropless: bool = True, two_levels: bool = False) -> KernelChoice:
    """What `dispatch(implementation="auto")` takes.

    For dropless it is decided when the program is lowered: traced on a laptop and compiled for GPUs, it is ragged.

    Args:
      platform: that the program is compiled for (`cpu`, `gpu`, `cuda`, ...); None: the one jax runs on.
      dropless: whether experts have no capacity.
      two_levels: whether the axis is a pair, (outer, inner).
    """
    platform = platform or jax.default_backend()
    if dropless and platform in GPUS:
        why = "XLA has ragged-all-to-all for GPUs: only rows there are travel, where other forms send padding too"
        return KernelChoice(implementation="ragged", why=why)
    if dropless:
        why = f"XLA has no ragged-all-to-all for {platform}: rows travel in parts of one size, one for each rank"
        return KernelChoice(implementation="fixed", why=why)
    if two_levels:
        why = "buffers of one size, over two axes: a rank sends a message to each node, not to each rank there"
        return KernelChoice(implementation="hierarchical", why=why)
    return KernelChoice(implementation="fixed", why="buffers of one size, over one axis: one dense all-to-all each way")
