"""Parallelism strategies: presets such as `fsdp()`, and the `Strategy` that `|` composes from them."""

from meshpar.parallel.context_parallelism import context_parallel
from meshpar.parallel.data import ddp
from meshpar.parallel.execution import Execution
from meshpar.parallel.expected.collective import ExpectedCollective
from meshpar.parallel.expert import expert_parallel
from meshpar.parallel.parallelism import Parallelism, RequiredAxis, RuleSets
from meshpar.parallel.pipeline_preset import pipeline_parallel
from meshpar.parallel.quantization import Quantize
from meshpar.parallel.strategy import PRESETS, Strategy, as_strategy, custom, from_json, parse_strategy
from meshpar.parallel.tensor import tensor_parallel
from meshpar.parallel.zero import fsdp, hsdp, zero1, zero2, zero3

__all__ = [
    "PRESETS", "Execution", "ExpectedCollective", "Parallelism", "Quantize", "RequiredAxis", "RuleSets", "Strategy",
    "as_strategy", "context_parallel", "custom", "ddp", "expert_parallel", "from_json", "fsdp", "hsdp",
    "parse_strategy", "pipeline_parallel", "tensor_parallel", "zero1", "zero2", "zero3",
]  # fmt: skip
