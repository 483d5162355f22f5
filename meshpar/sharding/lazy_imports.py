"""Names of a package that are imported when they are first used, so that importing the package costs little."""

from __future__ import annotations

import functools
import importlib
import sys

TYPE_CHECKING = False  # `typing` and `ast` take longer than the rest of `import meshpar`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, which has an `__all__`.

    Args:
      package: its `__name__`. What its source imports under `if TYPE_CHECKING:` are the names.
    """
    module = sys.modules[package]

    @functools.cache
    def homes() -> dict[str, str]:
        import ast

        source = module.__spec__.loader.get_source(package)  # type: ignore[union-attr]
        blocks = (block for block in ast.parse(source).body if isinstance(block, ast.If))
        imports = (line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom))
        return {one.name: str(line.module) for line in imports for one in line.names}

    def get(name: str) -> Any:
        home_of = homes()
        if name not in home_of:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(sorted(home_of))}")
        home = importlib.import_module(home_of[name])
        is_module = home is module or not hasattr(home, name)
        value = importlib.import_module(f"{home.__name__}.{name}") if is_module else getattr(home, name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*homes(), *module.__all__})
