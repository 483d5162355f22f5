"""Rates of library kernels in tokamax's tuning files: `python -m tests.measure.kernel_rates`, with tokamax installed.

Writes `meshpar/hardware/kernel_rates.toml` from the times in these files. tokamax measured bfloat16 kernels with the
fastest parameters. A causal mask halves the FLOPs. The backward pass of attention has five matmuls. The size n of a
group is the cube root of its multiply-adds, as a power of two. Rates of the same size are reduced to their median.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "meshpar" / "hardware" / "kernel_rates.toml"
GPUS = {"a100-40": "nvidia_a100-sxm4-40gb", "h100": "nvidia_h100_80gb_hbm3"}
ATTENTION = {
    ("cudnn", "forward"): "jax_nn_dot_product_attention",
    ("mosaic", "forward"): "pallas_mosaic_gpu_flash_attention",
    ("triton", "forward"): "pallas_triton_flash_attention",
    ("mosaic", "backward"): "pallas_mosaic_gpu_flash_attention_vjp",
    ("triton", "backward"): "pallas_triton_flash_attention_vjp",
}
GROUPED = {"mosaic": "pallas_mosaic_gpu_ragged_dot", "triton": "triton_ragged_dot"}
OPERANDS = {"[[1], [1]]": "product", "[[1], [2]]": "rows", "[[0], [0]]": "weights"}
MIN_ROWS = 4096
"""Smaller grouped matmuls are bound by the weights."""

Rates = dict[str, dict[int, list[float]]]


def times(path: Path) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the arguments of each call in a file, and the median seconds with the fastest parameters."""
    if path.exists():
        for key, configs in json.loads(path.read_text()).items():
            if configs:
                medians = (statistics.median(each["evaluation_times_ms"]) for each in configs.values())
                yield json.loads(key), min(medians) / 1e3


def dims(array: Any) -> tuple[int, ...]:
    """Return the shape of an array such as `bf16[8,4]`, or an empty tuple for other dtypes."""
    match = re.fullmatch(r"bf16\[([\d,]+)\]", str(array))
    return tuple(map(int, match[1].split(","))) if match else ()


def attention(folder: Path) -> Rates:
    """Return `KERNEL DIRECTION MASK HEAD_DIM` -> sequence length -> FLOP/s."""
    rates: Rates = defaultdict(lambda: defaultdict(list))
    for (kernel, direction), name in ATTENTION.items():
        for call, time_s in times(folder / f"{name}.json"):
            q, k, v, mask = dims(call["q"]), dims(call["k"]), dims(call["v"]), call["mask"]
            has_options = call["bias"] or call["logits_soft_cap"] or mask["bool_mask"] or call["dropout_rate"]
            causal = mask["causal_mask"]
            if not q or has_options or q[1] != k[1] or q[3] != v[3] or q[1] < 512 or (causal and causal["window_size"]):
                continue
            flops = 2 * (2 if direction == "forward" else 5) * q[0] * q[2] * q[1] ** 2 * q[3] // (2 if causal else 1)
            rates[f"{kernel} {direction} {'causal' if causal else 'full'} {q[3]}"][q[1]].append(flops / time_s)
    return rates


def grouped(folder: Path) -> Rates:
    """Return `KERNEL OPERAND` -> n -> FLOP/s."""
    rates: Rates = defaultdict(lambda: defaultdict(list))
    for kernel, name in GROUPED.items():
        for call, time_s in times(folder / f"{name}.json"):
            lhs, rhs, sizes = dims(call["lhs"]), dims(call["rhs"]), call["group_sizes"]
            # A list has the actual sizes of groups that are not balanced.
            if lhs and rhs and lhs[0] >= MIN_ROWS and not isinstance(sizes, list):
                num_groups = sizes["num_groups"]
                operand = OPERANDS[str(call["ragged_dot_dimension_numbers"]["dot_dimension_numbers"][0])]
                products = lhs[0] * lhs[1] * (rhs[2] if operand == "product" else rhs[1])
                n = 2 ** round(math.log2(products / num_groups) / 3)
                rates[f"{kernel} {operand}"][n].append(2 * products / time_s)
    return rates


def written() -> str:
    """Return the text of the file."""
    spec = util.find_spec("tokamax")
    if spec is None or spec.origin is None:
        raise SystemExit("install tokamax")
    data = Path(spec.origin).parent / "data" / "autotuning"
    lines = [
        "# FLOP/s of library kernels, from the tuning files of tokamax.",
        "# Written by `python -m tests.measure.kernel_rates`. kernel_rates.py describes the keys.",
    ]
    for gpu, folder in GPUS.items():
        lines += ["", f"[{gpu}]", f'source = "tuning files of tokamax {metadata.version("tokamax")}, {folder}"']
        for section, rates in (("attention", attention(data / folder)), ("grouped", grouped(data / folder))):
            lines += _section(f"{gpu}.{section}", rates)
    return "\n".join([*lines, ""])


def _section(name: str, rates: Mapping[str, Mapping[int, list[float]]]) -> list[str]:
    rows = (
        f'"{key}" = {{ ' + ", ".join(f"{n} = {statistics.median(by_n[n]):.3g}" for n in sorted(by_n)) + " }"
        for key, by_n in sorted(rates.items())
    )
    return ["", f"[{name}]", *(row.replace("e+", "e") for row in rows)] if rates else []


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
