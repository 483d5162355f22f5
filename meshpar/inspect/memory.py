"""Memory per device of a compiled step, and changes that reduce it.

    peak = state (parameters + optimizer state + other) + batch + outputs + temporaries (gradients among them)

The sizes of state and batch follow from shapes and shardings; temporaries and outputs are reported by the compiler. The
limit is the total memory of the GPU, of which XLA's allocator uses 75 % unless `XLA_PYTHON_CLIENT_MEM_FRACTION` is set.
The CUDA context and the buffers of NCCL need about 1 GB in addition. `note` warns above 75 %, where the variable must
be raised, and above 90 %, where the program probably does not fit.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.hardware.clusters import Cluster, gpu_of_kind
from meshpar.inspect.program import Program
from meshpar.inspect.source_scopes import layerless
from meshpar.inspect.timeline import program_work as work
from meshpar.parallel.batch import without_whole
from meshpar.parallel.data import Data
from meshpar.parallel.expected.step_spec import StepSpec
from meshpar.parallel.strategy import Custom, Strategy
from meshpar.sharding.printing import Plain
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import (
    Decision,
    MeshparError,
    PyTree,
    axis_sizes,
    is_spec,
    leaf_of,
    num_shards,
    owner_of,
    tree_leaves_with_paths,
)
from meshpar.sharding.units import human_bytes
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState, abstract_state
from meshpar.training.step import TrainStep

PREALLOCATED = 0.75
"""Fraction of GPU memory that XLA's allocator takes by default (jax documentation, "GPU memory allocation")."""
COMFORTABLE = 0.90
"""Above this fraction, the CUDA context, NCCL buffers and fragmentation probably exceed the remaining memory."""
MOST_COMPILATIONS = 6
"""Maximum number of remedies to compile."""
MOST_CONTRIBUTORS = 6
"""Number of entries per kind: parameters, optimizer state, temporaries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contributor(Plain):
    """A large use of memory, with its place in the model."""

    module: str
    """Path in the parameter tree, or the named scopes of a temporary."""
    nbytes: int
    """Bytes per device of all `count` arrays."""
    what: str
    """`parameters`, `optimizer state` or `temporary`."""
    shape: str
    """Local shape in XLA syntax, of the largest array."""
    source: str
    """`file:line` of a temporary; empty for the state."""
    count: int
    """Number of arrays. Temporaries of the same shape and line are merged, although they may not be alive together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy(Plain):
    """A change that may make a program fit, with the result of compiling it."""

    change: str
    """What to change: `strategy=zero3()`, `remat=full`, `accumulate=4`, several joined with ` + `."""
    peak_bytes: int | None
    """Peak memory of the changed program. None if it was not compiled."""
    fits: bool
    reason: str = ""
    """Reason why it was not compiled; empty if it was."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Plain):
    """Memory of a compiled step, in bytes per device."""

    params_bytes: int
    optimizer_bytes: int
    other_bytes: int
    """Non-parameter state of the model, the PRNG key and the counters."""
    state_bytes: int
    """Sum of the three fields above: memory between steps."""
    batch_bytes: int
    gradients_bytes: int
    """Gradients, as sharded by the strategy, in the reduce dtype. They are temporaries, so at most that size, because
    the compiler may not store all of them at once."""
    temporaries_bytes: int
    """Temporaries, as reported by the compiler."""
    output_bytes: int
    """Outputs that do not reuse the buffer of a donated argument: the metrics."""
    peak_bytes: int
    """Sum of arguments, outputs and temporaries, as reported by the compiler."""
    limit_bytes: int | None
    """Total memory of the GPU. None if the GPU is unknown."""
    fits: bool | None
    """True if the peak is within the limit. None without a limit."""
    host_bytes: int = 0
    """Host memory per device: offloaded optimizer state and temporaries. The other fields exclude it."""
    note: str = ""
    """Warning for a program that fits only with little margin."""
    largest: tuple[Contributor, ...] = ()
    """Largest first."""
    remedies: tuple[Remedy, ...] = ()
    """Remedies in the order of compilation; empty if the step fits."""


def memory(
    program: Program, setup: Setup, batch: PyTree, cluster: Cluster | None, *, options: StepOptions | None = None
) -> Memory:
    """The account of a training step's memory on one device.

    Args:
      program: the compiled step.
      setup: of the state it was traced for.
      batch: arrays or their shapes, the global batch.
      cluster: whose GPU limits it; None: the GPU of the mesh, if the catalogue knows it.
      options: of the step, which say how gradients are held. None: those of a plain one.
    """
    params, optimizer, other = _state_bytes(setup)
    limit = limit_bytes(setup, cluster)
    peak = program.peak_bytes
    return Memory(
        params_bytes=params,
        optimizer_bytes=optimizer,
        other_bytes=other,
        state_bytes=params + optimizer + other,
        batch_bytes=_batch_bytes(setup, batch),
        gradients_bytes=min(_gradients_bytes(setup, options or StepOptions()), program.temporary_bytes),
        temporaries_bytes=program.temporary_bytes,
        output_bytes=program.output_bytes - program.alias_bytes,
        peak_bytes=peak,
        limit_bytes=limit,
        fits=None if limit is None else peak <= limit,
        host_bytes=program.host_temporary_bytes + setup.table.totals.host_bytes,
        note=_note(peak, limit),
        largest=_largest(program, setup),
    )


def limit_bytes(setup: Setup, cluster: Cluster | None) -> int | None:
    """Memory of the cluster's GPU, else of the mesh's; None when it is none of the catalogue."""
    if cluster is not None:
        return int(cluster.gpu.memory_bytes)
    devices = setup.mesh.devices.flat if isinstance(setup.mesh, Mesh) else ()
    gpu = next((gpu_of_kind(device.device_kind) for device in devices), None)
    return None if gpu is None else int(gpu.memory_bytes)


def _note(peak: int, limit: int | None) -> str:
    if limit is None or peak > limit or peak <= PREALLOCATED * limit:
        return ""
    share = f"{peak / limit:.0%} of the GPU's memory"
    if peak <= COMFORTABLE * limit:
        return f"{share}: above XLA's default of {PREALLOCATED:.0%}, so set XLA_PYTHON_CLIENT_MEM_FRACTION=.95"
    return f"{share}: the CUDA context, NCCL's buffers and fragmentation may not leave room for it"


# ---- Closed forms ----------------------------------------------------------------------------------------------------


def _state_bytes(setup: Setup) -> tuple[int, int, int]:
    totals, state = setup.table.totals, setup.abstract
    counters = sum(x.dtype.itemsize * math.prod(x.shape) for x in (state.step, state.key, state.skipped))
    extra = totals.state_bytes - totals.params_bytes - totals.optimizer_bytes
    return totals.params_bytes, totals.optimizer_bytes, extra + counters


def _batch_bytes(setup: Setup, batch: PyTree) -> int:
    shards = num_shards(setup.batch_sharding.spec, setup.mesh)
    # As jax takes it: NumPy's float64 and int64 are 32 bits wide unless x64 is on.
    taken = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)),
        batch,
    )
    nbytes, cut = (
        sum(leaf_of(path, x).nbytes for path, x in tree_leaves_with_paths(tree))
        for tree in (taken, without_whole(taken))
    )
    return nbytes - cut + cut // shards


def _gradients_bytes(setup: Setup, options: StepOptions) -> int:
    """Gradients as they wait for the update. Summed over micro-steps, or by stages, and reduced once: whole."""
    layout = setup.layout
    specs = layout.updates if options.accumulate == 1 else layout.grads
    pipelined = setup.strategy.pipeline
    whole_over = setup.batch_axes if options.is_once or pipelined is not None else ()
    sizes = {axis: 1 if axis in whole_over else size for axis, size in axis_sizes(setup.mesh).items()}

    # A schedule may run a part of the layers on two stages, and sums its gradients on both.
    copies = Fraction(pipelined.table().copies) if pipelined is not None else Fraction(1)

    def held(decision: Decision, spec: PartitionSpec) -> int:
        leaf = decision.leaf
        compute = options.precision.compute or leaf.dtype
        width = np.dtype(options.precision.reduce_dtype(compute)).itemsize
        whole = width * leaf.size * (copies if leaf.is_stacked else 1)
        return int(whole) // num_shards(spec, sizes)

    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    pairs = zip(setup.table.params, leaves, strict=True)
    return sum(held(decision, spec) for decision, spec in pairs if decision.leaf.is_trained)


# ---- The largest contributors ----------------------------------------------------------------------------------------


def _largest(program: Program, setup: Setup) -> tuple[Contributor, ...]:
    found = [
        *_grouped(setup, setup.table.params, "parameters"),
        *_grouped(setup, [one for one in setup.table.optimizer if not one.is_on_host], "optimizer state"),
        *_temporaries(program),
    ]
    return tuple(sorted(found, key=lambda one: (-one.nbytes, one.what, one.module, one.shape)))


def _grouped(setup: Setup, decisions: Iterable[Decision], what: str) -> list[Contributor]:
    """State by module, the largest few: the parent of a parameter's path, for optimizer state that of its parameter."""
    paths = {decision.path for decision in setup.table.params}
    groups: dict[str, list[Decision]] = {}
    for decision in decisions:
        owner = owner_of(decision.path, paths)
        groups.setdefault(owner.rpartition("/")[0] or owner, []).append(decision)
    found = []
    for module, members in groups.items():
        biggest = max(members, key=lambda d: d.bytes_per_device)
        total = sum(d.bytes_per_device for d in members)
        found.append(
            Contributor(
                module=module, nbytes=total, what=what, shape=_shard_text(setup, biggest), source="", count=len(members)
            )
        )
    return sorted(found, key=lambda one: -one.nbytes)[:MOST_CONTRIBUTORS]


def _shard_text(setup: Setup, decision: Decision) -> str:
    leaf = decision.leaf
    dtype = {"float": "f", "int": "s", "uint": "u", "bfloat": "bf"}.get(leaf.dtype.name.rstrip("0123456789"), "x")
    dims = NamedSharding(setup.mesh, decision.spec).shard_shape(leaf.shape)
    return f"{dtype}{leaf.dtype.itemsize * 8}[{','.join(map(str, dims))}]"


def _temporaries(program: Program) -> list[Contributor]:
    groups: dict[tuple[str, str, str], list[work.Temporary]] = {}
    for one in work.largest_temporaries(program.module, most=8 * MOST_CONTRIBUTORS):
        groups.setdefault((one.module, one.shape, one.source), []).append(one)
    found = [
        Contributor(
            module=module,
            nbytes=sum(one.nbytes for one in members),
            what="temporary",
            shape=shape,
            source=source,
            count=len(members),
        )
        for (module, shape, source), members in groups.items()
    ]
    return sorted(found, key=lambda one: -one.nbytes)[:MOST_CONTRIBUTORS]


# ---- What would make it fit ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Change:
    """A candidate: another strategy, other options, or both."""

    strategy: Strategy | None = None
    remat: str | None = None
    accumulate: int | None = None
    can_wait: int = 0
    """Those with the highest number are left out first when there are too many."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Each thing changed, in words."""
        strategy = () if self.strategy is None else (str(self.strategy),)
        return strategy + tuple(f"{key}={value}" for key, value in self.options.items())

    @property
    def options(self) -> dict[str, Any]:
        """The options of the step that it sets."""
        return {key: value for key in ("remat", "accumulate") if (value := getattr(self, key)) is not None}


def remedies(
    step: TrainStep,
    setup: Setup,
    batch: PyTree,
    compile: Callable[[jax.stages.Traced], Program],
    limit_bytes: int,
) -> tuple[Remedy, ...]:
    """What would make a step fit that does not: each change is really made, compiled, and its peak taken.

    Tried are ZeRO's next stages, more micro-steps (under stages: microbatches) and recomputation of layers (where a
    model numbers them instead of stacking them, by a rule), cheap ones first, then several together.
    The first that fits ends the search; at most `MOST_COMPILATIONS` are compiled. What cannot be made (a batch that
    does not divide, a model that marks no layers), or would not fit with its state and batch alone, says so.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype)), batch)
    found: list[Remedy] = []
    broken: set[str] = set()
    hopeful, hopeless = _sorted_out(_candidates(step.options, setup, shapes), setup, shapes, limit_bytes)
    for change in hopeful:
        if broken & set(change.parts):  # a part of it could not be made alone
            continue
        try:
            state = _abstract(setup, change.strategy or setup.strategy)
            changed = TrainStep(step.loss_fn, dataclasses.replace(step.options, **change.options))
            peak = compile(changed.trace(state, shapes)).peak_bytes
        except Exception as error:  # a model of the user's may raise anything at another batch
            found.append(_unmade(change, str(error).partition("\n")[0] or type(error).__name__))
            broken.update(change.parts if len(change.parts) == 1 else ())
            continue
        found.append(Remedy(change=" + ".join(change.parts), peak_bytes=peak, fits=peak <= limit_bytes))
        if found[-1].fits:
            break
    return (*found, *hopeless)


def _candidates(options: StepOptions, setup: Setup, batch: PyTree) -> tuple[_Change, ...]:
    """Single changes, cheap ones first, then several together.

    ZeRO's first stages send what data parallelism sends; micro-steps make smaller matmuls; recomputation adds a third
    of the compute; ZeRO's last stage sends half as much again.
    """
    stages = _smaller(setup, options, state=True)
    early, last = stages[:-1], (stages[-1] if stages else None)
    pipelined = setup.strategy.pipeline
    rows = _batch_rows(setup, batch) // (options.accumulate if pipelined is None else pipelined.microbatches)
    more = [times for times in (2, 4, 8) if times == 2 or rows % times == 0]
    steps = [options.accumulate * times for times in more if pipelined is None]
    by_path = _by_path(setup)
    policies = [] if options.remat == "full" or by_path else ["full"] if options.remat else ["dots", "full"]
    remat = "full" if policies else None

    def again(strategy: Strategy | None, **more: Any) -> _Change:
        if by_path is None:
            return _Change(strategy=strategy, remat=remat, **more)
        return _Change(strategy=(strategy or setup.strategy) | by_path, **more)

    changes = [
        *(_Change(strategy=strategy) for strategy in early),
        *(_Change(accumulate=count, can_wait=2 * at) for at, count in enumerate(steps)),
        *(_Change(strategy=strategy) for strategy in _smaller(setup, options, state=False)[: len(more)]),
        *(_Change(remat=policy, can_wait=0 if policy == "full" else 3) for policy in policies),
        *([again(None)] if by_path else []),
        _Change(strategy=last),
        *(again(strategy, can_wait=1) for strategy in early),
        again(last),
        *(again(last, accumulate=count, can_wait=count != steps[-1]) for count in steps),
    ]
    return tuple({change.parts: change for change in changes[::-1] if change.parts}.values())[::-1]


def _by_path(setup: Setup) -> Rules | None:
    """Recomputation by a rule, for modules that a model numbers instead of stacking them; None where it does not."""
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
    """The changes to compile, and those known not to fit or not to exist."""
    hopeful: list[_Change] = []
    hopeless: list[Remedy] = []
    for change in changes:
        try:
            reason = _too_big_alone(_abstract(setup, change.strategy or setup.strategy).setup, batch, limit_bytes)
        except MeshparError as error:
            reason = str(error)
        if not reason:
            hopeful.append(change)
        elif len(change.parts) == 1:  # what is hopeless alone need not be said of all it is a part of
            hopeless.append(_unmade(change, reason))
    while len(hopeful) > MOST_COMPILATIONS:
        hopeful.remove(max(reversed(hopeful), key=lambda change: change.can_wait))
    return hopeful, hopeless


def _too_big_alone(setup: Setup, batch: PyTree, limit_bytes: int) -> str:
    alone = sum(_state_bytes(setup)) + _batch_bytes(setup, batch)
    if alone <= limit_bytes:
        return ""
    return f"state and batch alone take {human_bytes(alone)} of {human_bytes(limit_bytes)}"


def _unmade(change: _Change, reason: str) -> Remedy:
    return Remedy(change=" + ".join(change.parts), peak_bytes=None, fits=False, reason=reason)


def _abstract(setup: Setup, strategy: Strategy) -> TrainState:
    if strategy is setup.strategy:
        return setup.abstract
    kept: dict[str, Any] = {"precision": setup.precision, "trainable": setup.trainable}
    return abstract_state(setup.model, setup.tx, mesh=setup.given_mesh, strategy=strategy, **kept)


def _batch_rows(setup: Setup, batch: PyTree) -> int:
    rows = max((shape[0] for x in jax.tree.leaves(without_whole(batch)) if (shape := np.shape(x))), default=0)
    return rows // num_shards(setup.batch_sharding.spec, setup.mesh)


def _smaller(setup: Setup, options: StepOptions, *, state: bool) -> list[Strategy]:
    """The strategy with a smaller part in a part's place, the mildest first."""
    strategy, step_spec = setup.strategy, StepSpec(sizes=axis_sizes(setup.mesh), accumulate=options.accumulate)
    parts = [part for part in strategy.parts if part.shards_state == state]
    if parts or not state:
        return [smaller for part in parts for smaller in strategy.memory_reductions(part, step_spec)]
    found = []
    for part in Data().memory_reductions(step_spec):  # custom rules: add ZeRO's own, and keep their batch
        params, grads, optimizer, _ = strategy.rules & part.rules()
        label = f"{strategy} | {part}"
        hand = Custom(params=params, grads=grads, optimizer=optimizer, activations=strategy.activations, label=label)
        found.append(Strategy((hand,), strategy.big_leaf_bytes))
    return found
