"""Mixture of experts: routing, dispatch and combine over a mesh axis, balance, placement.

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

_HOMES: dict[str, tuple[str, ...]] = {}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"meshpar.moe has no {name!r}; it has {', '.join(sorted(_HOME_OF))}")
    value = getattr(importlib.import_module(f"meshpar.moe.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
