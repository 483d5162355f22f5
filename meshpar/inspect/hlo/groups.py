"""Replica groups of a collective as tuples of device numbers, parsed from XLA's three notations."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Groups: TypeAlias = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.+?)\](?:, device_ids=\((.+?)\))? \{(.*)\}")
_SIZE = re.compile(r"'?([^',=]+)'?=(\d+)")
_REF = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|\Z)")


@functools.lru_cache(maxsize=1024)
def parse_groups(text: str) -> Groups:
    """Parse `{{0,1},{2,3}}`, `[4,2]<=[2,4]T(1,0)` or `mesh['a'=2,'b'=4] {'b'}`; `{}` gives `()`: all devices."""
    if text.startswith("{"):
        return tuple(group for group in parse_lists(text) if group)  # `{{}}` means the same as `{}`
    devices = _iota_list(text) if text.startswith("[") else _mesh_groups(text)
    return tuple(map(tuple, devices.tolist()))


def parse_lists(text: str) -> Groups:
    """Parse a list of lists of numbers: `{{0,1},{1,2}}`."""
    return tuple(_ints(numbers) for numbers in re.findall(r"\{([\d, ]*)\}", text[1:-1]))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _iota_list(text: str) -> np.ndarray:
    """Parse `[4,2]<=[2,4]T(1,0)`: an iota of the right shape, transposed, then reshaped to the left shape."""
    match = _IOTA.fullmatch(text)
    if match is None:
        raise ValueError("replica groups in no known form")
    shape = _ints(match[1])
    sizes = _ints(match[2] or match[1])
    order = _ints(match[3]) if match[3] else range(len(sizes))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(shape if match[2] else -1)


def _mesh_groups(text: str) -> np.ndarray:
    """Parse `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(1)2}`, groups over mesh axes or sub-axes.

    The sub-axis `'a':(2)4` of size 4 has a stride of `size / (2 * 4)` in axis `a`.
    """
    match = _MESH.fullmatch(text)
    if match is None:
        raise ValueError("replica groups in no known form")
    axes = {name: int(size) for name, size in _SIZE.findall(match[1])}
    names, sizes = list(axes), list(axes.values())
    ids = match[2] or str(sizes).replace(" ", "")
    devices = (_iota_list(ids) if ids.startswith("[") else np.array(_ints(ids))).reshape(sizes)
    refs = [(names.index(name), int(pre or 1), int(size or axes[name])) for name, pre, size in _REF.findall(match[3])]
    return _groups_over(devices, refs)


def _groups_over(devices: np.ndarray, refs: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Return groups `[group, member]` of devices that differ only along the (sub-)axes, in reference order.

    A reference is (index of the axis, product of the sizes of sub-axes before this one, size of the sub-axis).
    """
    coords = np.indices(devices.shape).reshape(devices.ndim, -1)
    inside, fixed = [], [coord.copy() for coord in coords]
    for index, pre, size in refs:
        stride = devices.shape[index] // (pre * size)
        inside.append(coords[index] // stride % size)
        fixed[index] -= inside[-1] * stride
    order = np.lexsort([*reversed(inside), *reversed(fixed)])
    return devices.reshape(-1)[order].reshape(-1, math.prod(size for _, _, size in refs))
