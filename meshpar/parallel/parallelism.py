"""The `Parallelism` interface: sharding rules, required mesh axes and expected collectives.

    rules()                 rules for parameters, gradients, optimizer state and activations
    required_axes()         mesh axes whose size must be greater than 1
    expected_collectives()  activation collectives that XLA inserts for the rules
    kernels()               communication of meshpar's own kernels
    memory_reductions()     variants that need less memory
    candidates()            configurations for the planner

A `Strategy` is a sequence of these components. `explain`, the planner and the command line use only this interface.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from meshpar.parallel.execution import Execution, LayerGather
from meshpar.parallel.expected.collective import ExpectedCollective
from meshpar.sharding.errors import problem
from meshpar.sharding.rules import ACTIVATION_NAMES, BATCH_AXES, PARAMETER_NAMES, DimRule, Largest, Rules

MIN_SHARDED_BYTES = 2**16
"""Minimum size of an unnamed leaf that ZeRO shards. Below it, a collective costs more than it saves."""

Axes = str | tuple[str, ...]
"""The name of a mesh axis, or a tuple of names."""


class RuleSets(NamedTuple):
    """The sharding rules of a training step. `a & b` merges two sets; the rules of `b` take precedence."""

    params: Rules
    """Rules for parameters between steps."""
    grads: Rules
    """Rules for gradients after the backward pass."""
    optimizer: Rules
    """Rules for optimizer state that has the shape of a parameter."""
    activations: Rules
    """Rules for the batch and for the activations that the model passes to `constrain`."""

    def __and__(self, other: RuleSets) -> RuleSets:
        return RuleSets(*(left | right for left, right in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequiredAxis:
    """A mesh axis that a strategy needs. With size 1, the strategy would silently become a different strategy."""

    axis: str
    """Name of the mesh axis."""
    strategy: str
    """The call that creates the strategy, for the error message."""
    fix: str
    """How to fix a mesh without the axis, as an imperative."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The mesh and the training job for which the planner searches a strategy."""

    sizes: Mapping[str, int]
    """Size of each mesh axis, in mesh order."""
    examples: int
    """Number of examples in the global batch."""
    seq_len: int | None
    """Tokens per example. `None` means that the batch has no tokens."""
    num_layers: int
    """Number of layers in the longest stack."""
    is_node_first: bool = False
    """True if MoE layers send tokens in two levels, first across nodes and then within a node."""

    def num_shards(self, *axes: str) -> int:
        """Return the product of the axis sizes. A missing axis has size 1."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """A form of parallelism, such as `fsdp()`, as an immutable value.

    Subclasses are frozen dataclasses. Their fields are the arguments of the public constructor, and `repr` prints the
    call that creates them.
    """

    name: ClassVar[str]
    """Name of the public constructor, such as `tensor_parallel`."""
    shards_state: ClassVar[bool] = False
    """True if this parallelism decides how parameters, gradients and optimizer state are sharded."""
    axes: ClassVar[tuple[str, ...]] = ()
    """Default mesh axes. The planner chooses their sizes."""

    def rules(self) -> RuleSets:
        """Return the sharding rules that this parallelism contributes to a strategy."""
        raise NotImplementedError

    def required_axes(self) -> tuple[RequiredAxis, ...]:
        """Return the mesh axes whose size must be greater than 1."""
        return ()

    def gathering(self) -> LayerGather:
        """Return how an engine gathers the weights of stacked layers."""
        return LayerGather()

    def expected_collectives(self, step: Execution) -> Iterator[ExpectedCollective]:
        """Yield the activation collectives that XLA inserts for these rules.

        Collectives for parameters and gradients follow from their shardings and are added by the caller.

        Args:
          step: the training step under the rules of the complete strategy.
        """
        return iter(())

    def kernels(self, step: Execution) -> Iterator[ExpectedCollective]:
        """Yield the communication of meshpar's kernels, as collectives of the same size. Cost estimates use them."""
        return iter(())

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        """Yield the configurations of this parallelism that the planner should evaluate.

        A candidate strategy has one component that shards the state, and one of each other parallelism whose axes have
        more than one rank.
        """
        return iter(())

    def memory_reductions(self, step: Execution) -> tuple[Parallelism, ...]:
        """Return variants that need less memory, ordered from the least to the most intrusive."""
        return ()

    def arguments(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain values."""
        fields = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {field.name: getattr(value, "literal", value) for field, value in fields if value != field.default}

    def to_json(self) -> dict[str, Any]:
        return {"part": self.name, **self.arguments()}

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments().items())})"


# ---- Rules and checks for subclasses ---------------------------------------------------------------------------------


def activations(origin: str, by_name: Mapping[str, DimRule] | None = None) -> Rules:
    """Return the activation rules of the preset `origin`, which also shard the batch over the available batch axes."""
    return Rules.preset(
        origin, {"batch": BATCH_AXES, **(by_name or {})}, known=ACTIVATION_NAMES, optional_axes=BATCH_AXES
    )


def split(origin: str, by_name: Mapping[str, DimRule] | None = None, *, largest: Largest | None = None) -> Rules:
    """Return the parameter rules of the preset `origin`: rules by name, and `largest` for unnamed leaves."""
    return Rules.preset(origin, by_name, known=PARAMETER_NAMES, largest=largest)


def replicated_all(origin: str) -> Rules:
    """Return the rules of the preset `origin`, which replicate all parameters on purpose."""
    return Rules.preset(origin, known=PARAMETER_NAMES, everything=True)


def axes_of(origin: str, axis: Axes) -> tuple[str, ...]:
    """Return one or several mesh axes as a tuple. Errors name the preset `origin`."""
    axes = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, tuple | list) else ()
    if not axes or not all(isinstance(name, str) and name for name in axes) or len(set(axes)) != len(axes):
        fix = 'write the name of a mesh axis, as in mp.fsdp(axis="data"), or several: mp.fsdp(axis=("data", "fsdp"))'
        reason = "axis must be a name or a nonempty tuple of different names"
        raise problem(f"{origin}(axis={axis!r})", "shard over this axis", reason, fix, code="unknown-axis")
    return axes
