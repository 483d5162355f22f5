"""Figures as people write them: `24.5 GB`, `3.89 ms`, `450 GB/s`, and `14GB` or `70B` read back. SI: 1 kB is 1e3."""

from __future__ import annotations

import math
import re

from meshpar.sharding.types import problem

_PREFIXES = {
    "E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9, "p": 1e-12,
}  # fmt: skip
_LARGE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def si(value: float, unit: str, *, digits: int = 4) -> str:
    """A figure with a unit and the SI prefix that suits it; bytes are never less than whole."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    prefixes = [(p, size) for p, size in _PREFIXES.items() if size >= 1 or not unit.startswith("B")]
    # Rounded first: 999.99 is 1 of the prefix above.
    rounded = abs(float(f"{value:.{digits}g}"))
    prefix, size = next(((p, size) for p, size in prefixes if rounded >= size), prefixes[-1])
    return f"{float(f'{value / size:.{digits}g}'):.15g} {prefix}{unit}"


def parse_bytes(text: str, *, least: float = -math.inf) -> float:
    """Bytes that a user wrote: `14e9`, `14GB`, `256 kB`.

    Raises:
      ValueError: neither form, no finite number, or fewer than `least`.
    """
    found = re.fullmatch(r"([-+]?[0-9.]+(?:e[-+]?[0-9]+)?) *([kmgt]?)b?", text.strip().lower())
    try:
        if found is None:
            raise ValueError
        value = float(found.group(1)) * _LARGE[found.group(2)]
        if not least <= value <= MOST_BYTES:
            raise ValueError
        return value
    except ValueError:
        exists = f"it is no number of bytes up to {MOST_BYTES:g}" + f", {least:g} or more" * math.isfinite(least)
        raise problem(f"`{text}`", "be read as bytes", exists, "write 14e9, 14GB or 256kB (SI: 1 kB is 1e3)") from None


MOST_BYTES = 1e24
"""The largest payload that is taken."""
MOST = 10**18
"""The largest count that is taken: products of several stay finite."""


def parse_count(given: str | float, where: str) -> int:
    """A count that a user wrote: `64`, `70e9`, or `70B`, `8M`, `4k` (SI; `B` and `G` are 1e9).

    Args:
      given: the text, or a number.
      where: it was given, for the error.

    Raises:
      ValueError: no whole number from 1 to 1e18.
    """
    found = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?) *([kmgbt]?)", str(given).strip().lower())
    try:
        if found is None:
            raise ValueError
        value = float(found.group(1)) * {**_LARGE, "b": 1e9}[found.group(2)]
        # The nearest whole number: 1.1e9 is not one to the last bit.
        if not 1 <= value <= MOST or abs(value - round(value)) > 1e-9 * value:
            raise ValueError
        return round(value)
    except ValueError:
        exists = "it is a whole number from 1 to 1e18"
        raise problem(where, "count by it", exists, "write 64, 70e9 or 70B (SI: k is 1e3, M 1e6, B 1e9)") from None
