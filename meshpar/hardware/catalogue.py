"""The GPU catalogue, `gpus.toml` and `kernel_rates.toml`, with a source and a date for each number.

SI units. Bandwidths are per direction and per GPU.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from meshpar.hardware.kernel_rates import TYPICAL, AttentionSize, RateTable, attention_rate, interpolated

AttentionKernel = Literal["cudnn", "mosaic", "triton"]
"""Library kernel of attention: cuDNN's, or one of tokamax's two."""


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
    host_bytes_per_s: float = 32e9
    """Bandwidth between the GPU and host memory. The default is PCIe Gen4 x16."""
    memory_efficiency: float = 1.0
    """Fraction of `memory_bytes_per_s` that large copies reach; 1 if it was not measured."""
    matmul_rates: tuple[float, float] | None = None
    """Measured FLOP/s of a large matmul in bfloat16 and in e4m3."""
    attention: RateTable = dataclasses.field(default_factory=dict, hash=False)
    """Measured FLOP/s of attention (`meshpar.hardware.kernel_rates`)."""
    grouped: RateTable = dataclasses.field(default_factory=dict, hash=False)
    """Measured FLOP/s of grouped matmuls."""
    attention_rates: tuple[float, float] | None = None
    """FLOP/s of cuDNN's attention, forward and backward, at all sizes. They replace those in `attention`."""
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
    def fp8_efficiency(self) -> float:
        """Fraction of the fp8 peak that fp8 matmuls reach, relative to bfloat16's; 1 if it was not measured."""
        if self.matmul_rates is None:
            return 1.0
        wide, narrow = self.matmul_rates
        return (narrow / self.fp8_flops_per_s) / (wide / self.bf16_flops_per_s)

    @property
    def reduction_s_per_byte(self) -> float:
        """Time to reduce a byte without overlap (gamma in `cost_model`): read two operands and write the sum."""
        return 3 / self.memory_bytes_per_s

    def attention_flops_per_s(
        self, kernel: AttentionKernel = "cudnn", size: AttentionSize = TYPICAL
    ) -> tuple[float, float]:
        """Return the FLOP/s of attention, forward and backward: measured, or the H100's fractions of the peak."""
        pair = {"cudnn": self.attention_rates, "mosaic": self.mosaic_rates, "triton": self.triton_rates}[kernel]
        if pair is not None:
            return pair
        h100 = GPUS["h100"]
        scale = self.bf16_flops_per_s / h100.bf16_flops_per_s

        def rate(direction: str) -> float:
            measured = attention_rate(self.attention, kernel, direction, size, h100.attention)
            if measured is not None:
                return measured
            assumed = attention_rate(h100.attention, kernel, direction, size, h100.attention)
            assert assumed is not None
            return scale * assumed

        return rate("forward"), rate("backward")

    def has_attention_rates(self, kernel: AttentionKernel) -> bool:
        """Return whether the rates of this kernel were measured on this GPU, forward and backward."""
        pair = {"cudnn": self.attention_rates, "mosaic": self.mosaic_rates, "triton": self.triton_rates}[kernel]
        measured = {key.split()[1] for key in self.attention if key.startswith(f"{kernel} ")}
        return pair is not None or measured >= {"forward", "backward"}

    def grouped_flops_per_s(self, kernel: str, operand: str, n: float) -> float:
        """Return the FLOP/s of a grouped matmul, measured, or the H100's fraction of the peak.

        Args:
          kernel: `mosaic` or `triton`.
          operand: `product`, or `rows` or `weights` for a gradient.
          n: equivalent size of a group, whose FLOPs are `2 n³`.
        """
        h100 = GPUS["h100"]
        measured = self.grouped.get(f"{kernel} {operand}")
        if measured:
            return interpolated(measured, n)
        return interpolated(h100.grouped[f"{kernel} {operand}"], n) * self.bf16_flops_per_s / h100.bf16_flops_per_s


def gpu_from(data: Mapping[str, Any]) -> Gpu:
    """Return the GPU that an entry of `gpus.toml` or of a profile describes."""
    lists: dict[str, Any] = {field: tuple(map(_tuple, data.get(field, ()))) for field in ("device_kinds", "sources")}
    rates = ("matmul_rates", "attention_rates", "mosaic_rates", "triton_rates")
    lists |= {field: _tuple(data[field]) for field in rates if data.get(field) is not None}
    lists |= {field: rate_table(data[field]) for field in ("attention", "grouped") if field in data}
    chip = Chip(**{**data["chip"], "compute_capability": _tuple(data["chip"]["compute_capability"])})
    return Gpu(**{**data, **lists, "chip": chip})


_TABLE_KEY = re.compile(r"[a-z]+ (?:(?:forward|backward) (?:causal|full) [1-9]\d*|product|rows|weights)")


def rate_table(data: Mapping[str, Mapping[Any, Any]]) -> RateTable:
    """Return a table of rates from plain data. Raises `ValueError` for unknown keys and invalid rates."""
    for key, by_size in data.items():
        if not by_size or not _TABLE_KEY.fullmatch(key):
            raise ValueError(f"rates need a key such as `cudnn forward causal 128` or `triton weights`, not `{key}`")
    return {key: rates_by_size(by_size) for key, by_size in data.items()}


def rates_by_size(data: Mapping[Any, Any]) -> dict[int, float]:
    """Return size -> FLOP/s from plain data, sorted. Raises `ValueError` for rates that are not positive numbers."""
    rates = dict(sorted((int(size), float(rate)) for size, rate in data.items()))
    if not all(size > 0 and 0 < rate < math.inf for size, rate in rates.items()):
        raise ValueError(f"sizes and rates must be positive numbers, and are {rates}")
    return rates


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read(folder: Path) -> dict[str, Gpu]:
    entries, rates = (
        tomllib.loads((folder / name).read_text(encoding="utf-8")) for name in ("gpus.toml", "kernel_rates.toml")
    )
    for name, measured in rates.items():
        entry = entries[name]
        source = ["attention grouped", measured.pop("source"), "2026-07"]
        entry |= {field: {**table, **entry.get(field, {})} for field, table in measured.items()}
        entry["sources"] = [*entry["sources"], source]
    for entry in entries.values():
        like = entries[entry.pop("like")] if "like" in entry else {}
        entry.update({**like, **entry})
    return {name: gpu_from({"name": name, **entry}) for name, entry in entries.items()}


_ENTRIES = _read(Path(__file__).parent)
GPUS: Mapping[str, Gpu] = {**_ENTRIES, "a100": _ENTRIES["a100-80"]}
"""The catalogue. `a100` is the A100 with 80 GB."""
