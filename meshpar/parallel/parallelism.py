"""Part: one parallelism as a value, which answers what the rest of meshpar has to know of it.

    rules()      four rule sets: parameters, gradients, optimizer state, activations
    needs()      mesh axes without which it would be another strategy
    engine()     the module that makes gradients, where XLA does not
    promise()    the collectives that XLA puts in because of its rules
    kernels()    what its own kernels send beside
    smaller()    the same with less memory, the mildest change first
    tried()      its forms that are worth trying on a mesh

`Strategy` joins parts; `explain`, the planner and the command line learn a parallelism from these answers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from meshpar.parallel.expected.step_spec import ExpectedCollective, StepSpec
from meshpar.sharding.rules import ACTIVATION_NAMES, BATCH_AXES, PARAMETER_NAMES, DimRule, Largest, Rules
from meshpar.sharding.types import problem

MIN_SHARDED_BYTES = 2**16
"""Leaves without names are split by ZeRO from this size on; below it a collective costs more than it saves."""

Axes = str | tuple[str, ...]
"""A mesh axis, or several."""


class RuleSets(NamedTuple):
    """What is split how: four `Rules`. Joined with `&`, the later one wins rule by rule."""

    params: Rules
    """Parameters, between steps."""
    grads: Rules
    """Gradients, as they leave the backward pass."""
    optimizer: Rules
    """Optimizer state of the same shape as a parameter."""
    activations: Rules
    """The batch, and what the model gives names with `constrain`."""

    def __and__(self, other: RuleSets) -> RuleSets:
        return RuleSets(*(mine | theirs for mine, theirs in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequiredAxis:
    """A mesh axis that must be larger than one for a strategy to be what its name says."""

    axis: str
    strategy: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A mesh for which a planner looks for strategies, and what is to be trained on it."""

    sizes: Mapping[str, int]
    """Of every mesh axis, in the mesh's order."""
    rows: int
    """Of the global batch."""
    seq_len: int | None
    """Tokens of a row; None when the batch holds no tokens."""
    num_layers: int
    """Of the longest stack."""
    is_node_first: bool = False
    """Whether tokens may travel in two levels, across the nodes and inside them."""

    def num_shards(self, *axes: str) -> int:
        """Ranks along some axes; an axis that the mesh lacks has one."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """One parallelism. Frozen, comparable; its repr is how to write it in Python.

    A subclass is a frozen dataclass whose fields are the arguments of the function that makes it, and says its `name`.
    """

    name: ClassVar[str]
    """Of the function that makes it: `ddp`, `tensor_parallel`."""
    shards_state: ClassVar[bool] = False
    """Whether it says how data parallelism keeps parameters, gradients and optimizer state."""
    axes: ClassVar[tuple[str, ...]] = ()
    """Mesh axes that it lives on unless told otherwise: what a planner gives sizes to."""

    def rules(self) -> RuleSets:
        """Four rule sets; origin and known names included."""
        raise AssertionError("a part has rules")

    def required_axes(self) -> tuple[RequiredAxis, ...]:
        """Axes that must be larger than one."""
        return ()

    def engine(self) -> str | None:
        """The module whose `gradients` makes the gradients of a step; None: XLA does it."""
        return None

    def expected_collectives(self, step: StepSpec) -> Iterator[ExpectedCollective]:
        """The collectives that XLA puts in because of its rules, beside those of parameters (`leaves.promised`).

        Args:
          facts: of the step, with all parts' rules in force.
        """
        return iter(())

    def kernels(self, step: StepSpec) -> Iterator[ExpectedCollective]:
        """What its own kernels send, as collectives of the same bytes: for estimates, where no program is traced."""
        return iter(())

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Parallelism]:
        """The forms of it that are worth trying on a mesh.

        Of parts that split the state, one is taken; of any other kind that lives on an axis above one, one of these.
        """
        return iter(())

    def memory_reductions(self, step: StepSpec) -> tuple[Parallelism, ...]:
        """The same with less memory, the mildest change first; empty where there is none."""
        return ()

    def arguments(self) -> dict[str, Any]:
        """Fields that differ from their defaults, as plain values."""
        fields = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {field.name: getattr(value, "literal", value) for field, value in fields if value != field.default}

    def to_json(self) -> dict[str, Any]:
        return {"part": self.name, **self.arguments()}

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments().items())})"


# ---- What parts are made of ------------------------------------------------------------------------------------------


def activations(origin: str, by_name: Mapping[str, DimRule] | None = None) -> Rules:
    """Rules of activations: the batch over the batch axes that the mesh has, and more."""
    return Rules.preset(
        origin, {"batch": BATCH_AXES, **(by_name or {})}, known=ACTIVATION_NAMES, optional_axes=BATCH_AXES
    )


def split(origin: str, by_name: Mapping[str, DimRule] | None = None, *, largest: Largest | None = None) -> Rules:
    """Rules of parameters by the names of their dims."""
    return Rules.preset(origin, by_name, known=PARAMETER_NAMES, largest=largest)


def replicated_all(origin: str) -> Rules:
    """Rules of parameters that are replicated on purpose."""
    return Rules.preset(origin, known=PARAMETER_NAMES, everything=True)


def axes_of(origin: str, axis: Axes) -> tuple[str, ...]:
    """One mesh axis or several as a tuple. Raises `ValueError`: no axis, or the same one twice."""
    axes = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, tuple | list) else ()
    if not axes or not all(isinstance(name, str) and name for name in axes) or len(set(axes)) != len(axes):
        where = f"{origin}(axis={axis!r})"
        fix = 'write the name of one, as in mp.fsdp(axis="data"), or several: mp.fsdp(axis=("data", "fsdp"))'
        raise problem(where, "split over that", "it is no mesh axis, and no tuple of different ones", fix)
    return axes
