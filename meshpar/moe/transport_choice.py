"""Choice of the `dispatch` implementation, and the platform that it depends on."""

from __future__ import annotations

import contextlib
import dataclasses

import jax

NODE_FIRST = "node-first"
IMPLEMENTATIONS = ("auto", "fixed", "ragged", "hierarchical", NODE_FIRST)
TWO_LEVELS = ("hierarchical", NODE_FIRST)
"""Implementations over a pair of axes, across nodes and inside a node."""
GPUS = ("gpu", "cuda", "rocm")
_TARGET = jax.make_user_context(None)
"""(platform, compute capability) of the devices that a program is traced for. It is part of jit cache keys."""


def compiled_for(platform: str, capability: tuple[int, int] | None = None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which kernels are chosen for the given devices instead of the local devices."""
    return _TARGET((platform, capability))


def target() -> tuple[str, tuple[int, int] | None]:
    """Return the platform and compute capability that `compiled_for` sets, by default those of JAX's backend."""
    if _TARGET.value is not None:
        return _TARGET.value
    platform = jax.default_backend()
    capability = getattr(jax.devices()[0], "compute_capability", None) if platform in GPUS else None
    if capability is None:
        return platform, None
    major, _, minor = str(capability).partition(".")
    return platform, (int(major), int(minor or 0))


def platform_of_mesh() -> str | None:
    """Return the platform of the current mesh (`cpu`, `gpu`, ...), or None for an abstract mesh without devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """An implementation of `dispatch` or of a grouped matmul, with the reason for choosing it."""

    implementation: str
    why: str


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
