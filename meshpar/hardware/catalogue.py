"""The GPUs of `gpus.toml`, each figure with its source and date. SI units; bandwidths are per direction and per GPU."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ATTENTION_SHARES = (0.53, 0.52)
"""Of the peak, what cuDNN's attention reaches on an H100, forward and backward: 529 and 518 TFLOP/s (`gpus.toml`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What XLA asks about a GPU to compile for it; names follow CUDA's device properties."""

    compute_capability: tuple[int, int]
    num_cores: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    """float32 units in each of them."""
    clock_hz: float
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    """Most a block may ask for."""
    threads_per_core: int = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model."""

    name: str
    """As in a cluster's name: `h100`."""
    device_kinds: tuple[str, ...]
    """What jax calls it in `device.device_kind`; the first is the one compiled for."""
    bf16_flops_per_s: float
    """Peak of dense bfloat16 matrix products."""
    fp32_flops_per_s: float
    """Peak of float32 outside the tensor cores."""
    memory_bytes: float
    memory_bytes_per_s: float
    link: str
    """What joins the GPUs of a node: `nvlink` or `pcie`."""
    link_bytes_per_s: float
    nic_bytes_per_s: float
    """Network between nodes, the GPU's share."""
    chip: Chip
    attention_rates: tuple[float, float] | None = None
    """FLOP/s that cuDNN's attention was measured at, forward and backward; None: it was not."""
    sources: tuple[tuple[str, str, str], ...] = ()
    """(figures, source, date) for every figure above."""

    @property
    def fp8_flops_per_s(self) -> float:
        """Peak of dense products of 8-bit floats: twice that of bfloat16, as all data sheets of `gpus.toml` have it.

        GPUs before compute capability 8.9 have no such products, and widen them.
        """
        return self.bf16_flops_per_s * (2 if self.chip.compute_capability >= (8, 9) else 1)

    @property
    def attention_flops_per_s(self) -> tuple[float, float]:
        """Of cuDNN's attention, forward and backward: where it was not measured, at an H100's shares of the peak."""
        if self.attention_rates is not None:
            return self.attention_rates
        forward, backward = ATTENTION_SHARES
        return forward * self.bf16_flops_per_s, backward * self.bf16_flops_per_s


def gpu_from(data: Mapping[str, Any]) -> Gpu:
    """The GPU that plain data describe, as an entry of `gpus.toml` or of a profile does."""
    lists: dict[str, Any] = {field: tuple(map(_tuple, data.get(field, ()))) for field in ("device_kinds", "sources")}
    if data.get("attention_rates") is not None:
        lists["attention_rates"] = _tuple(data["attention_rates"])
    chip = Chip(**{**data["chip"], "compute_capability": _tuple(data["chip"]["compute_capability"])})
    return Gpu(**{**data, **lists, "chip": chip})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read(path: Path) -> dict[str, Gpu]:
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    for entry in entries.values():
        like = entries[entry.pop("like")] if "like" in entry else {}
        entry.update({**like, **entry})
    return {name: gpu_from({"name": name, **entry}) for name, entry in entries.items()}


_FILED = _read(Path(__file__).with_name("gpus.toml"))
GPUS: Mapping[str, Gpu] = {**_FILED, "a100": _FILED["a100-80"]}
"""The catalogue; `a100` alone means the one of 80 GB."""
