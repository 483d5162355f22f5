"""The devices that a program is traced for, and the kernels that are chosen for them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax

GPUS = ("gpu", "cuda", "rocm")
_TARGET = jax.make_user_context(None)
"""(platform, compute capability, profile) of the devices that a program is traced for. Part of jit cache keys."""


def compiled_for(
    platform: str, capability: tuple[int, int] | None = None, profile: Any = None
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which kernels are chosen for the given devices, or by their profile."""
    return _TARGET((platform, capability, profile))


def target_profile() -> Any:
    """Return the profile of `compiled_for`, or None."""
    return None if _TARGET.value is None else _TARGET.value[2]


def target() -> tuple[str, tuple[int, int] | None]:
    """Return platform and compute capability of the devices that a program is traced for.

    They are those of `compiled_for`, of the current mesh, or of JAX's default backend.
    """
    if _TARGET.value is not None:
        platform, capability, _ = _TARGET.value
        return platform, capability
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
