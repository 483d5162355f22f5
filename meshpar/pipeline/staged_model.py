"""`StagedModel`: the functions of a pipelined model with its schedule, mesh and options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax.numpy as jnp

from meshpar.pipeline.stage_program import Functions, Params
from meshpar.schedules import Schedule
from meshpar.sharding.rules import BATCH_AXES
from meshpar.sharding.types import AnyMesh, PyTree, axis_sizes


class Messages(Protocol):
    """Messages for weights and gradients of a pipelined model."""

    def gather(self, params: Params) -> Params:
        """Gather sharded weights over the batch axes."""

    def reduce(self, grads: Params) -> Params:
        """Sum gradients over the batch axes: chunks `[rank, chunk, ...]`, embedding and head `[stage, rank, ...]`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StagedModel:
    """A pipelined model with its schedule, mesh and options."""

    functions: Functions
    schedule: Schedule
    mesh: AnyMesh
    axis: str = "stage"
    batch_axes: str | tuple[str, ...] | None = None
    """Mesh axes that shard the batch; None: the axes of `BATCH_AXES` that the mesh has."""
    gather: Literal["step", "microbatch"] = "step"
    grad_dtype: Callable[[Any], Any] = lambda dtype: jnp.promote_types(dtype, jnp.float32)
    expert_specs: PyTree = None
    """PartitionSpec per leaf of the chunks with the batch axes that shard experts. These weights are not gathered, and
    their gradients are not reduced, over these axes. None: the model has no experts."""
    messages: Messages | None = None
    """Gathers weights before the first tick and reduces gradients after the last; None: XLA does."""
    activation_axes: tuple[str, ...] = ()
    """Mesh axes, other than batch axes, that `first` must use to shard the activations."""

    @functools.cached_property
    def batch_axis_sizes(self) -> dict[str, int]:
        """Sizes of the mesh axes that shard the batch, without axes of size 1."""
        sizes = axis_sizes(self.mesh)
        names = (self.batch_axes,) if isinstance(self.batch_axes, str) else self.batch_axes
        names = BATCH_AXES if names is None else names
        return {axis: sizes[axis] for axis in names if sizes.get(axis, 1) > 1}
