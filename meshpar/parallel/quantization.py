"""Quantized communication of weights and gradients: ZeRO++."""

from __future__ import annotations

import dataclasses

from meshpar.sharding.errors import check_bool, check_choice, check_positive_int, problem

QUANTIZED = ("int8", "fp8")
"""Formats of quantized weights and gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize:
    """Quantization of all-gathered weights and reduce-scattered gradients.

    Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training".

    Raises:
      MeshparError: a field is invalid, or weights and gradients are both None.

    Example:
      >>> strategy = mp.fsdp(quantize=mp.Quantize(gradients=None, block=128))
      >>> mp.Quantize(gradients=None, block=128).literal
      {'gradients': None, 'block': 128}
    """

    weights: str | None = "int8"
    """Format of gathered weights: "int8", "fp8" (e4m3), or None for the compute dtype (qwZ)."""
    gradients: str | None = "int8"
    """Format of sent gradients, summed in float32 (qgZ), or None for the reduction dtype."""
    block: int = 256
    """Maximum number of elements that share a scale."""
    stochastic: bool = False
    """Use unbiased stochastic rounding instead of rounding to nearest."""
    secondary: str | tuple[str, ...] | None = None
    """Axes within a node that shard a second, quantized copy of the weights (hpZ). The backward pass gathers the copy
    within the node. The copy has a byte per parameter, and its shards are larger than the primary shards by the
    size of the other axes. Gradients are also reduced within the node first."""

    def __post_init__(self) -> None:
        if isinstance(self.secondary, list):
            object.__setattr__(self, "secondary", tuple(self.secondary))
        for field in ("weights", "gradients"):
            check_choice("Quantize()", f"the format of {field}", (*QUANTIZED, None), **{field: getattr(self, field)})
        if self.weights is None and self.gradients is None and self.secondary is None:
            fix = 'write quantize="int8", or leave it out'
            reason = "weights and gradients would not be quantized"
            raise problem("Quantize()", "set weights=None and gradients=None", reason, fix, code="conflict")
        check_positive_int("Quantize()", "the number of elements that share a scale", block=self.block)
        check_bool("Quantize()", "rounding is stochastic", stochastic=self.stochastic)

    @property
    def literal(self) -> str | dict[str, object]:
        """The shortest equivalent plain value for `fsdp(quantize=...)`."""
        changed = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        }
        if self.weights == self.gradients and set(changed) <= {"weights", "gradients"} and self.weights:
            return self.weights
        return changed
