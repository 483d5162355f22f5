"""Quantized communication of weights and gradients: ZeRO++."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshpar.parallel.parallelism import axes_of
from meshpar.sharding.types import near, problem

QUANTIZED = ("int8", "fp8")
"""What weights and gradients can be sent as."""
ENGINE = "meshpar.training.gradients.per_device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize:
    """In how few bits split parameters and their gradients travel.

    Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training".
    """

    weights: str | None = "int8"
    """Weights, when they are gathered: "int8", "fp8" (e4m3), or None: in the compute dtype (qwZ)."""
    gradients: str | None = "int8"
    """Gradients, when reduced: each rank adds up what arrives in float32 (qgZ). None: in the reduction dtype."""
    block: int = 256
    """The most elements that share a scale."""
    stochastic: bool = False
    """Round up or down at random, right in the mean, instead of to the nearest."""
    secondary: str | tuple[str, ...] | None = None
    """Axes inside a node over which a second shard is kept from forward to backward, so that the backward pass gathers
    inside the node only (hpZ): `size of the other axes` times the bytes of the first, one byte a parameter. Gradients
    are then reduced inside the node first, too."""

    def __post_init__(self) -> None:
        if isinstance(self.secondary, list):
            object.__setattr__(self, "secondary", tuple(self.secondary))
        for field in ("weights", "gradients"):
            name = getattr(self, field)
            if name is not None and name not in QUANTIZED:
                fix = near(str(name), QUANTIZED)
                raise problem(f"quantize {field}={name!r}", "send them in that", "there is no such format", fix)
        if self.weights is None and self.gradients is None and self.secondary is None:
            fix = 'write quantize="int8", or leave it out'
            raise problem("quantize", "send weights and gradients as they are", "that is what quantize=None does", fix)
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            exists = "a block has a whole number of elements, one or more"
            raise problem(f"quantize block={self.block!r}", "share scales among so many", exists, "write block=256")
        if not isinstance(self.stochastic, bool):
            exists = "it is neither True nor False"
            raise problem(f"quantize stochastic={self.stochastic!r}", "round so", exists, "write one of them")

    @property
    def literal(self) -> str | dict[str, object]:
        """The shortest plain value that means the same."""
        changed = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        }
        if self.weights == self.gradients and set(changed) <= {"weights", "gradients"} and self.weights:
            return self.weights
        return changed


def quantize_of(
    origin: str, axes: tuple[str, ...], given: str | Mapping[str, object] | Quantize | None
) -> Quantize | None:
    """What a preset over these axes is given as `quantize`.

    Raises:
      ValueError: no such format or field, or a second shard that is not over some of the axes.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        known = [field.name for field in dataclasses.fields(Quantize)]
        for name in given:
            if name not in known:
                exists = "Quantize has no such field"
                raise problem(f"{origin}(quantize={given!r})", f"set `{name}`", exists, near(str(name), known))
        given = Quantize(**given)  # type: ignore[arg-type]
    wire = given if isinstance(given, Quantize) else Quantize(weights=given, gradients=given)
    if wire.secondary is not None:
        inside = axes_of(f"{origin}(quantize=...) secondary", wire.secondary)
        if not set(inside) < set(axes):
            where = f"{origin}(axis={axes!r}, quantize=...) secondary={wire.secondary!r}"
            exists = "those are some of the axes that parameters are split over, and the others go across nodes"
            fix = 'split over both kinds: mp.fsdp(axis=("data", "fsdp"), quantize={"secondary": "fsdp"})'
            raise problem(where, "keep a second shard inside the node", exists, fix)
    return wire
