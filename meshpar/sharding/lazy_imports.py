"""Lazy imports: a package imports the module of a name when the name is first used."""

from __future__ import annotations

import functools
import importlib
import sys

TYPE_CHECKING = False  # importing `typing` and `ast` would take longer than the rest of `import meshpar`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package."""
    module = sys.modules[package]

    @functools.cache
    def modules() -> dict[str, str]:
        import ast

        source = module.__spec__.loader.get_source(package)  # type: ignore[union-attr]
        blocks = (block for block in ast.parse(source).body if isinstance(block, ast.If))
        imports = (line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom))
        return {alias.name: str(line.module) for line in imports for alias in line.names}

    def get(name: str) -> Any:
        if name not in modules():
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(sorted(modules()))}")
        source = importlib.import_module(modules()[name])
        is_module = source is module or not hasattr(source, name)
        value = importlib.import_module(f"{source.__name__}.{name}") if is_module else getattr(source, name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*modules(), *module.__all__})
