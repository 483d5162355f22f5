"""Memory of a training step per device.

    peak = state (parameters + optimizer state + other) + batch + outputs + temporaries (including gradients)

State and batch are computed from shapes and shardings. Temporaries and outputs are reported by the compiler. The limit
is the full memory of the GPU, but a program cannot use all: XLA's allocator reserves 75 % unless
`XLA_CLIENT_MEM_FRACTION` is set, and the CUDA context and NCCL's buffers need about a gigabyte in addition.
`Memory.note` warns above 75 %, where this variable must be set, and above 90 %, where the program may not fit.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshpar.hardware.clusters import Cluster, gpu_of_kind
from meshpar.inspect.program import Program
from meshpar.inspect.source_scopes import layerless
from meshpar.inspect.timeline import program_work as work
from meshpar.parallel.batch import examples_of, shape_of
from meshpar.parallel.data import Data
from meshpar.parallel.execution import Execution, Weight
from meshpar.parallel.strategy import Custom, Strategy
from meshpar.sharding.errors import MeshparError
from meshpar.sharding.printing import Plain
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import AnyMesh, Decision, PyTree, leaf_of, num_shards, owner_of, tree_leaves_with_paths
from meshpar.sharding.units import human_bytes
from meshpar.training.gradients.selection import describe
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState, abstract_state
from meshpar.training.step import TrainStep

PREALLOCATED = 0.75
"""Fraction of GPU memory that XLA's allocator takes by default (jax documentation, "GPU memory allocation")."""
LARGER_POOL = "XLA_CLIENT_MEM_FRACTION=.95"
"""Environment variable with which the allocator takes nearly the full memory."""
COMFORTABLE = 0.90
"""Fraction of GPU memory that leaves enough for the CUDA context, NCCL's buffers and fragmentation."""
MOST_COMPILATIONS = 6
"""Maximum number of remedies that are compiled."""
MOST_CONTRIBUTORS = 6
"""Maximum number of contributors per kind: parameters, optimizer state, temporaries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contributor(Plain):
    """A group of arrays that needs much memory."""

    module: str
    """Module path of parameters, or named scopes of temporaries."""
    nbytes: int
    """Bytes of all `count` arrays on one device."""
    kind: str
    """`parameters`, `optimizer state` or `temporary`."""
    shape: str
    """Local shape of the largest array, in HLO syntax."""
    source: str
    """`file:line` of a temporary; empty for the state."""
    count: int
    """Number of arrays. Temporaries of the same shape and line are grouped, although they may not be live at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy(Plain):
    """A change that may make a program fit in memory, with the peak memory of the changed program."""

    change: str
    """The change, such as `zero3()`, `remat=full` or `accumulate=4`; several are joined with ` + `."""
    peak_bytes: int | None
    """Peak of the compiled program; None if it was not compiled."""
    fits: bool
    reason: str = ""
    """Reason why the changed program was not compiled, or empty."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Plain):
    """Memory of a training step, in bytes per device."""

    params_bytes: int
    optimizer_bytes: int
    other_bytes: int
    """Other model state, the PRNG key and the counters."""
    state_bytes: int
    """Sum of parameters, optimizer state and other state."""
    batch_bytes: int
    gradients_bytes: int
    """Gradients with the strategy's sharding, in the dtype of their reduction. They are temporaries and at most
    `temporaries_bytes`, because the compiler may not keep all of them at once."""
    temporaries_bytes: int
    """Temporaries, as reported by the compiler."""
    output_bytes: int
    """Outputs that do not reuse a donated argument: the metrics."""
    peak_bytes: int
    """Sum of arguments, outputs and temporaries, as reported by the compiler."""
    limit_bytes: int | None
    """Full memory of the GPU; None if the GPU is unknown."""
    fits: bool | None
    """Whether the peak is within the limit; None without a limit."""
    host_bytes: int = 0
    """Offloaded optimizer state and temporaries in host memory, per device. Not included in the other numbers."""
    note: str = ""
    """A warning for a program that fits but uses most of the memory."""
    largest: tuple[Contributor, ...] = ()
    """Contributors, largest first."""
    remedies: tuple[Remedy, ...] = ()
    """Changes in the order of evaluation; empty if the program fits."""


def memory(
    program: Program, setup: Setup, batch: PyTree, cluster: Cluster | None, *, execution: Execution | None = None
) -> Memory:
    """Return the memory of a training step per device. By default, the step has no options."""
    execution = describe(setup, StepOptions()) if execution is None else execution
    params, optimizer, other = _state_bytes(setup)
    limit = limit_bytes(setup.mesh, cluster)
    peak = program.peak_bytes
    contributors = [
        *_grouped(setup, setup.table.params, "parameters"),
        *_grouped(setup, [state for state in setup.table.optimizer if not state.is_on_host], "optimizer state"),
        *temporaries(program),
    ]
    return Memory(
        params_bytes=params,
        optimizer_bytes=optimizer,
        other_bytes=other,
        state_bytes=params + optimizer + other,
        batch_bytes=_batch_bytes(setup, batch),
        gradients_bytes=min(_gradients_bytes(execution), program.temporary_bytes),
        temporaries_bytes=program.temporary_bytes,
        output_bytes=program.output_bytes - program.alias_bytes,
        peak_bytes=peak,
        limit_bytes=limit,
        fits=None if limit is None else peak <= limit,
        host_bytes=program.host_temporary_bytes + setup.table.totals.host_bytes,
        note=memory_note(peak, limit),
        largest=tuple(sorted(contributors, key=lambda c: (-c.nbytes, c.kind, c.module, c.shape))),
    )


def limit_bytes(mesh: AnyMesh | None, cluster: Cluster | None) -> int | None:
    """Return the memory of the cluster's GPU or of the mesh's GPU, or None if the catalogue does not have it."""
    devices = mesh.devices.flat if isinstance(mesh, Mesh) else ()
    gpu = cluster.gpu if cluster is not None else next((gpu_of_kind(device.device_kind) for device in devices), None)
    return None if gpu is None else int(gpu.memory_bytes)


def memory_note(peak: int, limit: int | None) -> str:
    """Return a warning for a program that fits but uses most of the memory; otherwise an empty string."""
    if limit is None or peak > limit or peak <= PREALLOCATED * limit:
        return ""
    share = f"{peak / limit:.0%} of the GPU's memory"
    if peak <= COMFORTABLE * limit:
        return f"{share}: above XLA's default of {PREALLOCATED:.0%}, so set {LARGER_POOL}"
    return f"{share}: the CUDA context, NCCL's buffers and fragmentation may need the remaining memory"


def argument_bytes(setup: Setup, batch: PyTree) -> int:
    """Return the bytes of the state and the batch on a device. They follow from the shardings, without compilation."""
    return sum(_state_bytes(setup)) + _batch_bytes(setup, batch)


def _state_bytes(setup: Setup) -> tuple[int, int, int]:
    totals, state = setup.table.totals, setup.abstract
    counters = sum(x.dtype.itemsize * math.prod(x.shape) for x in (state.step, state.key, state.skipped))
    extra = totals.state_bytes - totals.params_bytes - totals.optimizer_bytes
    return totals.params_bytes, totals.optimizer_bytes, extra + counters


def _batch_bytes(setup: Setup, batch: PyTree) -> int:
    shards = num_shards(setup.batch_sharding.spec, setup.mesh)
    shapes = jax.tree.map(shape_of, batch)
    nbytes, sharded = (
        sum(leaf_of(path, x).nbytes for path, x in tree_leaves_with_paths(tree))
        for tree in (shapes, examples_of(shapes))
    )
    return nbytes - sharded + sharded // shards


def _gradients_bytes(execution: Execution) -> int:
    """Return the bytes of the gradients before the update. Gradients that are reduced once per step count unsharded."""
    unsharded_axes = execution.batch_axes if execution.gathers_once else ()
    sizes = execution.sizes | dict.fromkeys(unsharded_axes, 1)
    # A schedule may run a pipeline chunk on two stages, and accumulates its gradients on both.
    copies = Fraction(1 if execution.pipeline is None else execution.pipeline.table().copies)

    def gradient_bytes(weight: Weight) -> int:
        itemsize, leaf = execution.reduce_dtype(weight.decision).itemsize, weight.leaf
        nbytes = int(itemsize * leaf.size * (copies if leaf.is_stacked else 1))
        return nbytes // num_shards(execution.grad_spec(weight), sizes)

    return sum(gradient_bytes(weight) for weight in execution.weights if weight.leaf.is_trained)


def _grouped(setup: Setup, decisions: Iterable[Decision], kind: str) -> list[Contributor]:
    """Return the modules with the largest state. Optimizer state belongs to the module of its parameter."""
    paths = {decision.path for decision in setup.table.params}
    groups: dict[str, list[Decision]] = {}
    for decision in decisions:
        owner = owner_of(decision.path, paths)
        groups.setdefault(owner.rpartition("/")[0] or owner, []).append(decision)
    contributors = []
    for module, members in groups.items():
        largest = max(members, key=lambda d: d.bytes_per_device)
        leaf, total = largest.leaf, sum(d.bytes_per_device for d in members)
        dtype = {"float": "f", "int": "s", "uint": "u", "bfloat": "bf"}.get(leaf.dtype.name.rstrip("0123456789"), "x")
        dims = NamedSharding(setup.mesh, largest.spec).shard_shape(leaf.shape)
        shape = f"{dtype}{leaf.dtype.itemsize * 8}[{','.join(map(str, dims))}]"
        contributors.append(
            Contributor(module=module, nbytes=total, kind=kind, shape=shape, source="", count=len(members))
        )
    return sorted(contributors, key=lambda c: -c.nbytes)[:MOST_CONTRIBUTORS]


def temporaries(program: Program) -> list[Contributor]:
    """Return the largest temporaries of a program, grouped by source line."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for array in work.largest_temporaries(program.module, most=8 * MOST_CONTRIBUTORS):
        groups.setdefault((array.module, array.shape, array.source), []).append(array.nbytes)
    contributors = [
        Contributor(module=module, nbytes=sum(sizes), kind="temporary", shape=shape, source=source, count=len(sizes))
        for (module, shape, source), sizes in groups.items()
    ]
    return sorted(contributors, key=lambda c: -c.nbytes)[:MOST_CONTRIBUTORS]


@dataclasses.dataclass(frozen=True)
class _Change:
    strategy: Strategy | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Changed options of the step."""
    can_wait: int = 0
    """Priority: if there are too many changes to compile, those with the highest number are dropped first."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Description of each single change, such as `remat=full`."""
        strategy = () if self.strategy is None else (str(self.strategy),)
        return strategy + tuple(f"{key}={value}" for key, value in self.options.items())

    def remedy(self, peak_bytes: int | None = None, *, fits: bool = False, reason: str = "") -> Remedy:
        return Remedy(change=" + ".join(self.parts), peak_bytes=peak_bytes, fits=fits, reason=reason)


def remedies(
    step: TrainStep,
    setup: Setup,
    batch: PyTree,
    compile: Callable[[jax.stages.Traced], Program],
    limit_bytes: int,
) -> tuple[Remedy, ...]:
    """Compile variants of a step until a variant fits, and return the peak of each.

    The changes are the next ZeRO stages, more micro-steps (with a pipeline, more microbatches) and rematerialization of
    layers. Cheap changes are compiled first, then combinations. The search stops at the first variant that fits, and
    compiles at most `MOST_COMPILATIONS`. Invalid variants, and variants whose state and batch exceed the limit, are not
    compiled and have a reason instead.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype)), batch)
    results: list[Remedy] = []
    failed: set[str] = set()
    candidates = _candidates(setup, describe(setup, step.options, shapes))
    changes, excluded = _sorted_out(candidates, setup, shapes, limit_bytes)
    for change in changes:
        if failed & set(change.parts):
            continue
        try:
            state = _abstract(setup, change.strategy or setup.strategy)
            changed = TrainStep(step.loss_fn, dataclasses.replace(step.options, **change.options))
            peak = compile(changed.trace(state, shapes)).peak_bytes
        except Exception as error:  # the user's model may raise any error for another batch shape
            results.append(change.remedy(reason=str(error).partition("\n")[0] or type(error).__name__))
            failed.update(change.parts if len(change.parts) == 1 else ())
            continue
        results.append(change.remedy(peak, fits=peak <= limit_bytes))
        if results[-1].fits:
            break
    return (*results, *excluded)


def _candidates(setup: Setup, execution: Execution) -> tuple[_Change, ...]:
    """Return single changes ordered by cost, then combinations.

    ZeRO-1 and ZeRO-2 send the same bytes as data parallelism. Micro-steps make matmuls smaller. Rematerialization adds
    a third of the compute. ZeRO-3 sends 1.5 times the bytes.
    """
    stages = smaller_strategies(setup, execution, state=True)
    early, last = stages[:-1], (stages[-1] if stages else None)
    factors = [factor for factor in (2, 4, 8) if factor == 2 or execution.examples % factor == 0]
    steps = [execution.micro_steps * factor for factor in factors if not execution.is_pipelined]
    by_path = _by_path(setup)
    policies = [] if execution.remat == "full" or by_path else ["full"] if execution.remat else ["dots", "full"]
    remat = {"remat": "full"} if policies else {}

    def with_remat(strategy: Strategy | None, can_wait: int = 0, **options: Any) -> _Change:
        if by_path is None:
            return _Change(strategy, remat | options, can_wait)
        return _Change((strategy or setup.strategy) | by_path, options, can_wait)

    changes = [
        *(_Change(strategy) for strategy in early),
        *(_Change(None, {"accumulate": count}, 2 * i) for i, count in enumerate(steps)),
        *(_Change(strategy) for strategy in smaller_strategies(setup, execution, state=False)[: len(factors)]),
        *(_Change(None, {"remat": policy}, 0 if policy == "full" else 3) for policy in policies),
        *([with_remat(None)] if by_path else []),
        _Change(last),
        *(with_remat(strategy, 1) for strategy in early),
        with_remat(last),
        *(with_remat(last, int(count != steps[-1]), accumulate=count) for count in steps),
    ]
    return tuple({change.parts: change for change in changes[::-1] if change.parts}.values())[::-1]


def _by_path(setup: Setup) -> Rules | None:
    """Return a remat rule for numbered layers, such as `blocks_0`, `blocks_1`, or None if the model has none."""
    paths = [decision.path for decision in setup.table.params]
    is_stacked = any(decision.leaf.is_stacked for decision in setup.table.params)
    if is_stacked or setup.model.kind == "functions" or setup.strategy.activations.remat:
        return None
    numbers: dict[str, set[str]] = {}
    for path in paths:
        start, star, _ = layerless(path).partition("*")
        if star and "/" in path[len(start) :]:
            numbers.setdefault(start, set()).add(path[len(start) :].partition("/")[0])
    start = max(numbers, key=lambda start: len(numbers[start]), default="")
    if len(numbers.get(start, ())) < 2:
        return None
    return Rules(remat={re.escape(start) + r"\d+": "full"})


def _sorted_out(
    changes: Sequence[_Change], setup: Setup, batch: PyTree, limit_bytes: int
) -> tuple[list[_Change], list[Remedy]]:
    """Return the changes to compile, and remedies with a reason for changes that are invalid or cannot fit."""
    valid: list[_Change] = []
    excluded: list[Remedy] = []
    for change in changes:
        reason = ""
        try:
            changed = _abstract(setup, change.strategy or setup.strategy).setup
            nbytes = argument_bytes(changed, batch)
            if nbytes > limit_bytes:
                reason = f"state and batch alone take {human_bytes(nbytes)} of {human_bytes(limit_bytes)}"
        except MeshparError as error:
            reason = str(error)
        if not reason:
            valid.append(change)
        elif len(change.parts) == 1:  # a combination fails for the same reason and is not listed
            excluded.append(change.remedy(reason=reason))
    while len(valid) > MOST_COMPILATIONS:
        valid.remove(max(reversed(valid), key=lambda change: change.can_wait))
    return valid, excluded


def _abstract(setup: Setup, strategy: Strategy) -> TrainState:
    if strategy is setup.strategy:
        return setup.abstract
    options: dict[str, Any] = {"precision": setup.precision, "trainable": setup.trainable}
    return abstract_state(setup.model, setup.tx, mesh=setup.given_mesh, strategy=strategy, **options)


def smaller_strategies(setup: Setup, execution: Execution, *, state: bool) -> list[Strategy]:
    """Return variants of the strategy that need less memory, ordered from the least to the most intrusive.

    With `state`, vary the components that shard the training state; otherwise, vary the other components.
    """
    strategy = setup.strategy
    parts = [part for part in strategy.components if part.shards_state == state]
    if parts or not state:
        return [variant for part in parts for variant in strategy.memory_reductions(part, execution)]
    variants = []
    for part in Data().memory_reductions(execution):  # custom rules: add the rules of ZeRO and keep the batch rules
        params, grads, optimizer, _ = strategy.rules & part.rules()
        label, activations = f"{strategy} | {part}", strategy.activations
        custom = Custom(params=params, grads=grads, optimizer=optimizer, activations=activations, label=label)
        variants.append(Strategy((custom,), strategy.big_leaf_bytes))
    return variants
