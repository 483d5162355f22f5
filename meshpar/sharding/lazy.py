"""Names of a package that are imported when they are first used, so that importing the package costs little."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy(
    package: str, homes: Mapping[str, Sequence[str]], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, which has an `__all__`.

    Args:
      package: its `__name__`.
      homes: modules below the package (beside it where they begin with a dot), and the names that each gives.
      modules: names of modules themselves, and where they are below the package.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    known = sorted([*home_of, *(modules or {})])

    def get(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(known)}")
        module = importlib.import_module(f".{home_of[name] if name in home_of else (modules or {})[name]}", package)
        value = getattr(module, name) if name in home_of else module
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*known, *sys.modules[package].__all__})
