"""Training steps of a recipe with some fields changed, which run on synthetic batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from meshpar.hardware.clusters import Cluster, cluster_here
from meshpar.hardware.compile_options import fingerprint, overlap_limit
from meshpar.inspect.census import census
from meshpar.inspect.explain import check_equal_parts
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.program import Program, memory_of
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.timeline.simulator import timeline
from meshpar.loop.fit import Hook, Record, Run, fit
from meshpar.runs.recipe import Recipe, batch_shapes, build_setup, build_step, open_data
from meshpar.sharding.errors import MeshparError
from meshpar.sharding.types import axis_sizes
from meshpar.training.state import Setup, TrainState
from meshpar.training.step import TrainStep

NUM_BATCHES = 4
"""Number of batches on the devices, which the steps repeat."""
DOCUMENTS = 4
"""Number of documents in each synthetic packed sequence."""
_FIELDS = {"inputs", "targets", "segments", "positions", "weights"}
"""Fields of a batch of tokens."""


class Prediction(NamedTuple):
    """A compiled step, and its time as in `explain`."""

    step_s: float | None
    """Predicted time, or None."""
    reason: str
    """Reason why there is no predicted time, or empty."""
    peak_bytes: int
    """Peak memory of a device."""
    compile_s: float


Batches = Sequence[Mapping[str, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """The training step of a recipe with some fields changed, on local devices."""

    changes: tuple[str, ...]
    """Changed fields of the recipe, as `FIELD=VALUE`."""
    recipe: Recipe
    """The recipe with the changes."""
    setup: Setup
    step: TrainStep
    batch: Mapping[str, jax.ShapeDtypeStruct]
    """Shape, dtype and sharding of each array of the global batch."""

    @staticmethod
    def of(recipe: Recipe, changes: Sequence[str] = (), devices: Sequence[jax.Device] | None = None) -> Variant:
        """Build the step and the shardings, without tracing.

        Raises:
          MeshparError: a field does not exist, or its value does not fit the recipe or the devices.
        """
        changed = recipe.override(*changes)
        setup = build_setup(changed, changed.mesh.build(devices))
        return Variant(
            changes=tuple(changes),
            recipe=changed,
            setup=setup,
            step=build_step(changed),
            batch={
                name: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=setup.batch_sharding)
                for name, like in batch_shapes(changed).items()
            },
        )

    @property
    def label(self) -> str:
        return ", ".join(self.changes) or "the recipe"

    @property
    def devices(self) -> np.ndarray:
        """The devices of the mesh."""
        mesh = self.setup.given_mesh
        assert isinstance(mesh, jax.sharding.Mesh)
        return mesh.devices

    @property
    def tokens_shape(self) -> tuple[int, int] | None:
        """Examples and positions of a batch of tokens; None for other batches."""
        inputs = self.batch.get("inputs")
        if inputs is None or len(inputs.shape) != 2 or not np.issubdtype(inputs.dtype, np.integer):
            return None
        return inputs.shape[0], inputs.shape[1]

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The lowered step. jax runs the executable of `lowered.compile()` when the step is called."""
        return self.step.lower(self.setup.abstract, self.batch)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the program and its compile options, as in `explain` and `train`."""
        return fingerprint(self.lowered, self.step.compile_options(self.setup))

    def predicted(self) -> Prediction:
        """Compile the step, unless it is compiled, and predict its time. The step then runs this executable."""
        start = time.perf_counter()
        compiled = self.lowered.compile()
        compile_s = time.perf_counter() - start
        memory, cluster = memory_of(compiled.memory_analysis()), cluster_here(list(self.devices.flat))
        program = Program(target="", text=compiled.as_text() or "", compile_s=compile_s, **memory)
        step_s, reason = None, f"{self.devices.flat[0].device_kind} is not in the catalogue of GPUs"
        if cluster is not None:
            try:
                step_s, reason = simulated_step_s(self, program.module, cluster), ""
            except MeshparError as error:  # a pipeline that `explain` refuses, too
                reason = error.reason
        return Prediction(step_s, reason, program.peak_bytes, compile_s)

    def shares_state_of(self, other: Variant) -> bool:
        """Return whether both steps take the same arrays with the same shardings."""
        leaves, structures = zip(*(jax.tree.flatten(_arrays(v.setup.abstract)) for v in (self, other)), strict=True)
        kinds = [[(x.shape, x.dtype, x.sharding) for x in side] for side in leaves]
        return structures[0] == structures[1] and kinds[0] == kinds[1]

    def batches(self) -> Batches:
        """Return batches on the devices: random tokens for decoders, and examples of the data for other models."""
        recipe, setup = self.recipe, self.setup
        vocab_size = getattr(recipe.model, "vocab_size", None)
        if vocab_size is None or not set(self.batch) <= _FIELDS:
            with open_data(recipe).train(setup.batch_sharding) as batches:
                return list(itertools.islice(batches, NUM_BATCHES))
        numbers = np.random.default_rng(0)
        return [
            jax.device_put(_tokens(self.batch, vocab_size, numbers), setup.batch_sharding) for _ in range(NUM_BATCHES)
        ]

    def run(self, state: TrainState, batches: Batches, count: int) -> tuple[TrainState, list[float]]:
        """Run steps as `train` does, which reads the loss of a step while later steps run.

        Args:
          state: a state with the arrays and shardings of this step. It is donated.
          batches: from `batches`.
          count: number of steps.

        Returns:
          The new state, and the seconds of each step.
        """
        seconds = _StepSeconds()
        first = int(state.step)
        state = state.replace(setup=self.setup)
        order = itertools.cycle(batches)
        result = fit(self.step, state, order, steps=first + count, hooks=[seconds])
        return result.state, seconds.values


def _arrays(state: TrainState) -> Any:
    return state.params, state.opt_state, state.extra


class _StepSeconds(Hook):
    """Hook that collects the seconds of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_record(self, run: Run, record: Record) -> None:
        self.values.append(record.seconds)


def _tokens(
    batch: Mapping[str, jax.ShapeDtypeStruct], vocab_size: int, numbers: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return random tokens and targets. Packed sequences have documents of equal length."""

    def array(name: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
        place = np.arange(like.shape[-1])
        length = -(-like.shape[-1] // DOCUMENTS)
        documents = {"segments": place // length + 1, "positions": place % length, "weights": np.ones_like(place)}
        if name in documents:
            return np.broadcast_to(documents[name], like.shape).astype(like.dtype)
        return numbers.integers(0, vocab_size, like.shape).astype(like.dtype)

    return {name: array(name, like) for name, like in batch.items()}


def simulated_step_s(variant: Variant, module: hlo.Module, cluster: Cluster) -> float:
    """Return the predicted time of a compiled step, as in `explain`."""
    check_equal_parts(variant.setup.abstract)
    execution = variant.step.describe(variant.setup.abstract, variant.batch)
    counts = None if execution.pipeline is None else ScheduleCounts(execution.pipeline.table())
    collectives = census(module, axis_sizes(variant.setup.mesh), counts)
    limit = overlap_limit(variant.step.compile_options(variant.setup))
    return timeline(module, collectives, cluster, counts, overlap_limit=limit).step_s
