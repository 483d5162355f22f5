"""Registry of checkpoint families by the `model_type` of their config.json.

Each module of this package has a `FAMILY`.
"""

from __future__ import annotations

import importlib
import pkgutil

from meshpar.interop.decoder import Family

_FOUND = [importlib.import_module(f"{__name__}.{module.name}").FAMILY for module in pkgutil.iter_modules(__path__)]
ALL: tuple[Family, ...] = tuple(sorted(_FOUND, key=lambda family: family.model_type != "llama"))
"""All families. Llama, which has the fewest options, precedes other families that can express the same config."""
BY_TYPE: dict[str, Family] = {name: family for family in ALL for name in (family.model_type, *family.aliases)}
WRAPPERS = {family.wrapper for family in ALL if family.wrapper is not None}
