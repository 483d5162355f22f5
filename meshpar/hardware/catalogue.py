"""The GPU catalogue, `gpus.toml`, with a source and a date for each number.

SI units. Bandwidths are per direction and per GPU.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

AttentionKernel = Literal["cudnn", "mosaic", "triton"]
"""Library kernel of attention: cuDNN's, or one of tokamax's two."""
ATTENTION_SHARES: Mapping[AttentionKernel, tuple[float, float]] = {
    "cudnn": (0.53, 0.52), "mosaic": (0.63, 0.44), "triton": (0.37, 0.32),
}  # fmt: skip
"""Rates of attention on an H100 as fractions of the peak, forward and backward (`gpus.toml`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Properties of a GPU that XLA needs to compile for it. The names follow CUDA's device properties."""

    compute_capability: tuple[int, int]
    num_cores: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    """float32 units per multiprocessor."""
    clock_hz: float
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    """Maximum shared memory of a block."""
    threads_per_core: int = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU model."""

    name: str
    """Name in cluster strings, such as `h100`."""
    device_kinds: tuple[str, ...]
    """Values of `device.device_kind` in jax for this GPU. Programs are compiled for the first."""
    bf16_flops_per_s: float
    """Peak FLOP/s of dense bfloat16 matmuls."""
    fp32_flops_per_s: float
    """Peak FLOP/s in float32 without tensor cores."""
    memory_bytes: float
    memory_bytes_per_s: float
    link: str
    """Kind of link between the GPUs of a node: `nvlink` or `pcie`."""
    link_bytes_per_s: float
    nic_bytes_per_s: float
    """Bandwidth of the network between nodes, per GPU."""
    chip: Chip
    attention_rates: tuple[float, float] | None = None
    """Measured FLOP/s of cuDNN's attention, forward and backward, or None."""
    mosaic_rates: tuple[float, float] | None = None
    """The same of tokamax's Mosaic kernels."""
    triton_rates: tuple[float, float] | None = None
    """The same of tokamax's Triton kernels."""
    sources: tuple[tuple[str, str, str], ...] = ()
    """(numbers, source, date) for all numbers above."""

    @property
    def fp8_flops_per_s(self) -> float:
        """Peak FLOP/s of dense fp8 matmuls: twice the bfloat16 peak, as in all data sheets of `gpus.toml`.

        GPUs before compute capability 8.9 have no fp8 matmuls and convert the operands to 16 bits.
        """
        return self.bf16_flops_per_s * (2 if self.chip.compute_capability >= (8, 9) else 1)

    @property
    def reduction_s_per_byte(self) -> float:
        """Time to reduce a byte without overlap (gamma in `cost_model`): read two operands and write the sum."""
        return 3 / self.memory_bytes_per_s

    def attention_flops_per_s(self, kernel: AttentionKernel = "cudnn") -> tuple[float, float]:
        """Return the FLOP/s of attention, forward and backward: measured, or the H100's fractions of the peak."""
        measured = {"cudnn": self.attention_rates, "mosaic": self.mosaic_rates, "triton": self.triton_rates}[kernel]
        if measured is not None:
            return measured
        forward, backward = ATTENTION_SHARES[kernel]
        return forward * self.bf16_flops_per_s, backward * self.bf16_flops_per_s


def gpu_from(data: Mapping[str, Any]) -> Gpu:
    """Return the GPU that an entry of `gpus.toml` or of a profile describes."""
    lists: dict[str, Any] = {field: tuple(map(_tuple, data.get(field, ()))) for field in ("device_kinds", "sources")}
    rates = ("attention_rates", "mosaic_rates", "triton_rates")
    lists |= {field: _tuple(data[field]) for field in rates if data.get(field) is not None}
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


_ENTRIES = _read(Path(__file__).with_name("gpus.toml"))
GPUS: Mapping[str, Gpu] = {**_ENTRIES, "a100": _ENTRIES["a100-80"]}
"""The catalogue. `a100` is the A100 with 80 GB."""
