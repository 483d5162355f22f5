"""Replica groups of a collective as tuples of device numbers, from the three forms of XLA."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from meshpar.inspect.hlo.cursor import HloSyntaxError, Scanner, split_top, unquote

Groups: TypeAlias = tuple[tuple[int, ...], ...]

MAX_DEVICES = 1 << 18
"""Largest number of devices in a group list; protects the memory against a damaged size."""

_LISTS = re.compile(r"\{\s*+(?:\{[0-9,\s]*+\}\s*+,?\s*+)*+\}\Z")
_LIST = re.compile(r"\{([^}]*+)\}")
_INT = re.compile(r"[0-9]{1,18}\Z")
_IOTA = re.compile(r"\[([0-9, ]{1,400})\](?:<=\[([0-9, ]{1,400})\])?(?:T\(([0-9, ]{1,400})\))?\Z")
_SUB_AXIS = re.compile(r"(.+):\(([0-9]{1,18})\)([0-9]{1,18})\Z", re.DOTALL)


def parse_groups(text: str, line: int = 1) -> Groups:
    """Parse `{{0,1},{2,3}}`, `[4,2]<=[2,4]T(1,0)` or `mesh['a'=2,'b'=4] {'b'}`; `{}` gives `()`: all devices.

    Raises:
      HloSyntaxError: the text has none of these forms.
    """
    try:
        return _parse_groups(text)
    except HloSyntaxError as error:
        raise HloSyntaxError(error.message, line) from None


@functools.lru_cache(maxsize=1024)
def _parse_groups(text: str) -> Groups:
    if text.startswith("{"):
        return tuple(group for group in parse_lists(text, 1) if group)  # `{{}}` means the same as `{}`
    if text.startswith("["):
        devices = _iota_list(text)
        if devices.ndim != 2:
            raise HloSyntaxError(f"replica groups have two dims, {text!r} has {devices.ndim}", 1)
        return _rows(devices)
    if text.startswith("mesh["):
        return _mesh_groups(text)
    raise HloSyntaxError(f"replica groups in no known form: {text[:60]!r}", 1)


def parse_lists(text: str, line: int) -> Groups:
    """Parse a list of lists of numbers: `{{0,1},{1,2}}`."""
    if not _LISTS.match(text):
        raise HloSyntaxError(f"expected lists of numbers, found {text[:40]!r}", line)
    return tuple(_ints(inside, line) for inside in _LIST.findall(text[1:-1]))


def _inside(text: str, brackets: str, line: int) -> str:
    if not (len(text) >= 2 and text[0] == brackets[0] and text[-1] == brackets[1]):
        raise HloSyntaxError(f"expected {brackets[0]}...{brackets[1]}, found {text[:40]!r}", line)
    return text[1:-1]


def _ints(text: str, line: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(_INT.match(part) for part in parts):
        raise HloSyntaxError(f"expected numbers, found {text[:40]!r}", line)
    return tuple(map(int, parts))


def _rows(devices: np.ndarray) -> Groups:
    return tuple(map(tuple, devices.tolist()))


def _count_up(sizes: Sequence[int], order: Sequence[int]) -> np.ndarray:
    if not 0 < math.prod(sizes) <= MAX_DEVICES or len(sizes) > 32:
        raise HloSyntaxError(f"no device list has the shape {tuple(sizes)}", 1)
    if sorted(order) != list(range(len(sizes))):
        raise HloSyntaxError(f"{tuple(order)} does not permute {len(sizes)} dims", 1)
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order)


def _iota_list(text: str) -> np.ndarray:
    """Parse `[4,2]<=[2,4]T(1,0)`: an iota of the right shape, transposed, then reshaped to the left shape."""
    match = _IOTA.match(text)
    if match is None:
        raise HloSyntaxError(f"expected [..]<=[..], found {text[:60]!r}", 1)
    shape = _ints(match.group(1), 1)
    sizes = _ints(match.group(2), 1) if match.group(2) else shape
    order = _ints(match.group(3), 1) if match.group(3) else range(len(sizes))
    devices = _count_up(sizes, order)
    if match.group(2) is None:
        return devices
    return _reshape(devices, shape, text)


def _reshape(devices: np.ndarray, shape: Sequence[int], text: str) -> np.ndarray:
    if math.prod(shape) != devices.size or len(shape) > 32:
        raise HloSyntaxError(f"{text[:60]!r} does not keep the number of devices", 1)
    return devices.reshape(shape)


def _mesh_groups(text: str) -> Groups:
    """Parse `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(1)2}`, groups over mesh axes or sub-axes."""
    scanner = Scanner(text)
    scanner.expect("mesh")
    names, sizes = _mesh_axes(scanner.group())
    devices = _count_up(sizes, range(len(sizes)))
    if scanner.take(", device_ids="):
        ids = scanner.group()[1:-1].strip()
        listed = _iota_list(ids) if ids.startswith("[") else np.array(_ints(ids, 1), dtype=np.int64)
        devices = _reshape(listed, sizes, text)
    refs = split_top(_inside(scanner.text[scanner.pos :].strip(), "{}", 1), 1)
    return _rows(_groups_over(devices, [_axis_ref(ref, names, sizes) for ref in refs]))


def _mesh_axes(text: str) -> tuple[list[str], list[int]]:
    names: list[str] = []
    sizes: list[int] = []
    for part in split_top(_inside(text, "[]", 1), 1):
        name, _, size = part.rpartition("=")
        names.append(unquote(name.strip()))
        sizes += _ints(size, 1)
    if len(names) != len(sizes) or not names or len(set(names)) != len(names):
        raise HloSyntaxError(f"bad mesh {text[:60]!r}", 1)
    return names, sizes


def _axis_ref(text: str, names: Sequence[str], sizes: Sequence[int]) -> tuple[int, int, int]:
    """Return (index of the axis, pre-size, size) of `'a'` or of the sub-axis `'a':(2)4`."""
    sub = _SUB_AXIS.match(text)
    name = unquote((sub.group(1) if sub else text).strip())
    if name not in names:
        raise HloSyntaxError(f"replica groups name the axis {name!r}, the mesh has {list(names)}", 1)
    index = list(names).index(name)
    if sub is None:
        return index, 1, sizes[index]
    pre, size = int(sub.group(2)), int(sub.group(3))
    if pre < 1 or size < 1 or sizes[index] % (pre * size):
        raise HloSyntaxError(f"sub-axis {text!r} does not divide an axis of size {sizes[index]}", 1)
    return index, pre, size


def _groups_over(devices: np.ndarray, refs: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Return groups `[group, member]` of devices that differ only along the given (sub-)axes, in reference order."""
    coords = np.indices(devices.shape).reshape(devices.ndim, -1)
    inside, fixed = [], [coord.copy() for coord in coords]
    for index, pre, size in refs:
        stride = devices.shape[index] // (pre * size)
        inside.append(coords[index] // stride % size)
        fixed[index] -= inside[-1] * stride
    order = np.lexsort([*reversed(inside), *reversed(fixed)])
    group_size = math.prod(size for _, _, size in refs)
    keys = np.ravel_multi_index(np.stack(fixed) % np.array(devices.shape)[:, None], devices.shape)
    if len(np.unique(keys)) * group_size != devices.size:
        raise HloSyntaxError("replica groups name one sub-axis twice", 1)
    return devices.reshape(-1)[order].reshape(-1, group_size)
