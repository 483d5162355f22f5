"""Numbers with SI units, such as `24.5 GB`, `450 GB/s` and `70B`, as text."""

from __future__ import annotations

import math
import re

from meshpar.sharding.errors import problem

_PREFIXES = {
    "E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9, "p": 1e-12,
}  # fmt: skip
_LARGE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def si(value: float, unit: str, *, digits: int = 4) -> str:
    """Format a number with a unit and a suitable SI prefix: `24.5 GB`, `3.89 ms`. Bytes have no prefix below 1."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    prefix, size = prefix_of(value, digits=digits, minimum=1.0 if unit.startswith("B") else 0.0)
    return f"{float(f'{value / size:.{digits}g}'):.15g} {prefix}{unit}"


def prefix_of(value: float, *, digits: int = 4, minimum: float = 1.0) -> tuple[str, float]:
    """Return a suitable SI prefix for a number, and the size of the prefix, at least `minimum`: `("G", 1e9)`."""
    prefixes = [(prefix, size) for prefix, size in _PREFIXES.items() if size >= minimum]
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


MAX_BYTES = 1e24
"""Maximum value of `parse_bytes`."""
MAX_COUNT = 10**18
"""Maximum value of `parse_count`. Products of counts stay finite."""


def parse_bytes(text: str, *, minimum: float = -math.inf) -> float:
    """Parse a number of bytes, such as `14e9`, `14GB` or `256 kB`."""
    match = re.fullmatch(r"([-+]?[0-9.]+(?:e[-+]?[0-9]+)?) *([kmgt]?)b?", text.strip().lower())
    value = _scaled(match, _LARGE)
    if value is None or not minimum <= value <= MAX_BYTES:
        limits = f"up to {MAX_BYTES:g}" if minimum == -math.inf else f"between {minimum:g} and {MAX_BYTES:g}"
        fix = "write 14e9, 14GB or 256kB (SI: 1 kB is 1e3)"
        raise problem(f"`{text}`", "", f"it is not a number of bytes {limits}", fix, code="bad-syntax")
    return value


def parse_count(text: str | float, where: str) -> int:
    """Parse a count, such as `64`, `70e9`, `70B`, `8M` or `4k` (SI; `B` and `G` are 1e9)."""
    match = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?) *([kmgbt]?)", str(text).strip().lower())
    value = _scaled(match, {**_LARGE, "b": 1e9})
    # A product such as 1.1 * 1e9 may differ from the integer by a rounding error.
    if value is None or not 1 <= value <= MAX_COUNT or abs(value - round(value)) > 1e-9 * value:
        fix = "write 64, 70e9 or 70B (SI: k is 1e3, M 1e6, B 1e9, T 1e12)"
        raise problem(where, f"use {text!r}", "a count is an integer from 1 to 1e18", fix, code="not-an-int")
    return round(value)


def _scaled(match: re.Match[str] | None, prefixes: dict[str, float]) -> float | None:
    try:
        return None if match is None else float(match.group(1)) * prefixes[match.group(2)]
    except ValueError:
        return None
