"""Write and read figures with units, such as `24.5 GB`, `450 GB/s` and `70B`. Prefixes are SI: 1 kB is 1e3 bytes."""

from __future__ import annotations

import math
import re

from meshpar.sharding.errors import problem

_PREFIXES = {
    "E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9, "p": 1e-12,
}  # fmt: skip
_LARGE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def si(value: float, unit: str, *, digits: int = 4) -> str:
    """Write a figure with its unit and the SI prefix that suits it: `24.5 GB`, `3.89 ms`. Bytes have no `m`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    prefix, size = prefix_of(value, digits=digits, least=1.0 if unit.startswith("B") else 0.0)
    return f"{float(f'{value / size:.{digits}g}'):.15g} {prefix}{unit}"


def prefix_of(value: float, *, digits: int = 4, least: float = 1.0) -> tuple[str, float]:
    """Return the SI prefix that suits a figure, and its size: `("G", 1e9)`. No prefix is smaller than `least`."""
    prefixes = [(prefix, size) for prefix, size in _PREFIXES.items() if size >= least]
    rounded = abs(float(f"{value:.{digits}g}"))  # 999.99 with four digits is 1 of the next prefix
    return next(((prefix, size) for prefix, size in prefixes if rounded >= size), prefixes[-1])


def human_bytes(count: float) -> str:
    """Write bytes with three digits: `1.5 GB` is 1.5e9 bytes."""
    return si(round(count) if abs(count) < 1e3 else count, "B", digits=3)


def human_time(seconds: float) -> str:
    """Write a duration with three digits: `1.25 s`, `38 ms`, `6.1 µs`."""
    return si(seconds, "s", digits=3)


def human_flops(count: float) -> str:
    """Write floating-point operations with three digits: `312 TFLOP`."""
    return si(count, "FLOP", digits=3)


def human_count(count: float) -> str:
    """Write a count with three digits: `41.2k`."""
    prefix, size = prefix_of(count, digits=3)
    return f"{float(f'{count / size:.3g}'):.15g}{prefix}"


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
