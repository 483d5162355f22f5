"""The devices that a program is traced for, and the kernels that are chosen for them."""

from __future__ import annotations

import contextlib
import dataclasses

import jax

GPUS = ("gpu", "cuda", "rocm")
_TARGET = jax.make_user_context(None)
"""(platform, compute capability) of the devices that a program is traced for. It is part of jit cache keys."""


def compiled_for(platform: str, capability: tuple[int, int] | None = None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which kernels are chosen for the given devices instead of the local devices."""
    return _TARGET((platform, capability))


def target() -> tuple[str, tuple[int, int] | None]:
    """Return platform and compute capability of the devices that a program is traced for.

    They are those of `compiled_for`, of the current mesh, or of JAX's default backend.
    """
    if _TARGET.value is not None:
        return _TARGET.value
    platform = platform_of_mesh() or jax.default_backend()
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
    """An implementation of attention, of a grouped matmul or of `dispatch`, with the reason for choosing it."""

    implementation: str
    why: str
    is_named: bool = False
    """True if the model names the implementation, False if "auto" chose it."""

    def __str__(self) -> str:
        return f"{self.implementation} ({self.why})"
