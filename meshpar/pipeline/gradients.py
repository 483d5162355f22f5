"""Loss and gradients of a model cut into stages, by any schedule, as one program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshpar.collectives import broadcast
from meshpar.pipeline.executor import Executor, Functions, Micro, Plan, Sums, layout_of
from meshpar.pipeline.placement import Placement
from meshpar.pipeline.schedules import Schedule
from meshpar.pipeline.slicing import Cut, flat_jaxpr
from meshpar.sharding.rules import BATCH_AXES
from meshpar.sharding.types import (
    AnyMesh,
    PyTree,
    axes_of_spec,
    axis_sizes,
    is_spec,
    num_shards,
    problem,
    spec_axes,
    tree_leaves_with_paths,
    without_axes,
)
from meshpar.training.layers import REMAT_POLICIES, Aux, check_alike, check_remat, with_aux
from meshpar.training.reports import check_numbers, means


class Params(NamedTuple):
    """The parameters of a model that is cut into parts, and likewise their gradients."""

    parts: PyTree
    """Each leaf `[part, ...]`, in the order of the model; split over the mesh axis of the stages."""
    ends: PyTree = None
    """Of what stands before the first part and behind the last: embedding, head. Whole on every stage. None: nothing
    does that has parameters."""


class Result(NamedTuple):
    """What a step tells beside its gradients."""

    loss: jax.Array
    """Mean over microbatches and devices of the loss, auxiliary losses of all parts included."""
    metrics: dict[str, jax.Array]
    """Of the loss function, likewise; whole numbers are counts, and summed."""
    aux: dict[str, jax.Array]
    """Of the parts: `[part, ...]`; means, and sums of whole numbers."""
    late: jax.Array
    """Sums over stages of the numbers that each brought along."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """How a model is run by stages."""

    functions: Functions
    schedule: Schedule
    mesh: AnyMesh
    axis: str = "stage"
    batch_axes: tuple[str, ...] = ()
    """Those of more than one rank that split the batch."""
    gather: Literal["step", "microbatch"] = "step"
    grad_dtype: Callable[[Any], Any] = lambda dtype: jnp.promote_types(dtype, jnp.float32)
    meet: bool = True
    own: PyTree = None
    """Of each leaf of the parts a PartitionSpec with the axes of the batch over which every rank has a slice of its
    own: never whole, with a gradient of its own, as experts are. None: of no leaf."""
    messages: Literal["permute", "pairs"] = "permute"
    split_inside: tuple[str, ...] = ()
    """Axes, not the batch's, over which what goes from part to part is to be split; the first part says how."""

    def sums(
        self, params: Params, specs: Params, grad_specs: Params, batch: PyTree, key: jax.Array, late: jax.Array,
        extra: PyTree = (),
    ) -> tuple[Sums, Params]:  # fmt: skip
        """Sums over all microbatches and devices, and of the gradients.

        Args:
          params: in the compute dtype.
          specs: how they lie, PartitionSpecs.
          grad_specs: how gradients come out.
          batch: each leaf `[rows, ...]`; a device's own rows are cut into microbatches.
          key: for random numbers.
          late: `[stage, numbers]`.
          extra: what the model keeps beside parameters; every stage has all of it.

        Returns:
          the sums, with no gradients in them: loss, metrics and weight as scalars, `aux` by part; where the stages do
          not meet each with a leading dim `[stage]`. And the gradients, in the dtype they are summed in.
        """
        pairs = self.messages == "pairs"
        plan, placement = Plan.of(self.schedule, pairs=pairs), Placement.of(self.schedule, self.axis)
        manual = (self.axis, *self.batch_axes)
        own = jax.tree.map(lambda _: PartitionSpec(), specs.parts, is_leaf=is_spec) if self.own is None else self.own
        at_entry = self._entering(specs, own)
        auto = jax.tree.map(lambda spec: without_axes(spec, manual), specs, is_leaf=is_spec)
        sharded = jax.tree.map(lambda spec: _only(spec, manual), at_entry, is_leaf=is_spec)
        params = self.laid(params, at_entry)
        executor = Executor(
            plan=plan,
            functions=self.functions,
            axis=self.axis,
            grad_dtype=self.grad_dtype,
            messages=self.messages,
            whole=self._gatherer(_each(_but, sharded.parts, own), auto.parts),
            pin=lambda parts, ends: (_pinned(parts, auto.parts), _pinned(ends, auto.ends)),
        )
        num_parts = self.schedule.num_parts
        owners: list[set[int]] = []

        def local(
            columns: Any, params: Params, rows: PyTree, key_data: jax.Array, late: jax.Array, extra: PyTree
        ) -> Any:
            columns = jax.tree.map(lambda x: x[:, 0], columns)
            key = jax.random.wrap_key_data(key_data)
            if self.batch_axes:
                key = jax.random.fold_in(key, lax.axis_index(self.batch_axes))
            rows = jax.tree.map(
                lambda x: x.reshape(self.schedule.microbatches, x.shape[0] // self.schedule.microbatches, *x.shape[1:]),
                rows,
            )
            parts = placement.spread(params.parts)
            # Here, where the axes that the functions may communicate over have names.
            owners[:] = self._checked(
                executor.whole(jax.tree.map(lambda p: p[0], parts)), params.ends, rows, key, extra
            )
            sums = executor(columns, parts, params.ends, rows, key, late[0], extra)
            grads = jax.tree.map(lambda g: g[None], Params(placement.collect(sums.params), sums.ends))
            grads = Params(grads.parts, jax.tree.map(lambda g: g[None], grads.ends))
            held = jnp.asarray(self.schedule.parts)[lax.axis_index(self.axis)]
            aux = {k: jnp.zeros((num_parts, *x.shape[1:]), x.dtype).at[held].add(x) for k, x in sums.aux.items()}
            told = dataclasses.replace(sums, params={}, ends={}, aux=aux, late=sums.late[:0])
            told = lax.psum(told, manual if self.meet else self.batch_axes) if manual else told
            told = dataclasses.replace(told, late=sums.late)
            return (told if self.meet else jax.tree.map(lambda x: x[None], told)), grads

        here = PartitionSpec() if self.meet else PartitionSpec(self.axis)
        by_batch = self.batch_axes or None

        def of_part(own: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(_but(PartitionSpec(by_batch), own)[0], self.axis, *own[1:])

        told, grads = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(
                PartitionSpec(None, self.axis),
                sharded,
                PartitionSpec(by_batch),
                PartitionSpec(),
                PartitionSpec(self.axis),
                PartitionSpec(),
            ),
            out_specs=(here, Params(_each(of_part, own), PartitionSpec(self.axis, by_batch))),  # type: ignore[arg-type]
            axis_names=set(manual),
            # Everything is differentiated inside, and nothing inside has to vary alike.
            check_vma=False,
        )(plan.columns, params, batch, jax.random.key_data(key), late, extra)
        with jax.named_scope("gradients_meet"):
            parts = jax.tree.map(lambda g: _summed(g, 0), grads.parts)
            ends = jax.tree.map(lambda g: _summed(g, 1), grads.ends)
            grads = self.laid(Params(parts, self._over_stages(ends, grad_specs.ends, owners)), grad_specs)
        return told, grads

    def _entering(self, specs: Params, own: PyTree) -> Params:
        """How parameters enter the loop: whole over the axes that split the batch, unless every cell gathers them."""

        def whole(spec: PartitionSpec, own: PartitionSpec) -> PartitionSpec:
            return without_axes(spec, set(self.batch_axes) - _axes_of(own))

        parts = specs.parts if self.gather == "microbatch" else _each(whole, specs.parts, own)
        return Params(parts, _each(lambda spec: without_axes(spec, self.batch_axes), specs.ends))

    def laid(self, tree: PyTree, specs: PyTree) -> PyTree:
        return jax.tree.map(
            lambda spec, x: lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec)), specs, tree,
            is_leaf=is_spec,
        )  # fmt: skip

    def _gatherer(self, sharded: PyTree, auto: PyTree) -> Callable[[PyTree], PyTree]:
        """Of a part's shards its weights, whole over the axes that split the batch and split as ever over others."""
        if self.gather == "step" or not self.batch_axes:
            return lambda params: params

        def gathered(spec: PartitionSpec, x: jax.Array) -> jax.Array:
            for dim, entry in enumerate(spec[1:]):
                if spec_axes(entry):
                    x = lax.all_gather(x, spec_axes(entry), axis=dim, tiled=True)
            return x

        def whole(params: PyTree) -> PyTree:
            return jax.tree.map(gathered, sharded, params, is_leaf=is_spec)

        held = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), auto, is_leaf=is_spec)
        axes = {axis for spec in jax.tree.leaves(held, is_leaf=is_spec) for entry in spec for axis in spec_axes(entry)}

        def apart(params: PyTree) -> PyTree:
            with jax.named_scope("gather_part"):
                if not axes:
                    return whole(params)
                # Per device: left to XLA, what is split over its own axes would be gathered over them first.
                return jax.shard_map(whole, in_specs=(held,), out_specs=held, axis_names=axes, check_vma=False)(params)

        return apart

    def _over_stages(self, ends: PyTree, specs: PyTree, owners: list[set[int]]) -> PyTree:
        """Gradients `[stage, ...]` of the ends, on all stages: sent from the one that has them, or summed."""
        leaves, structure = jax.tree.flatten(ends)
        out = []
        for g, spec, of in zip(leaves, jax.tree.leaves(specs, is_leaf=is_spec), owners, strict=True):
            if len(of) > 1:
                out.append(_summed(g, 0))
                continue
            laid = lax.with_sharding_constraint(g, NamedSharding(self.mesh, PartitionSpec(self.axis, *spec)))
            out.append(self._sent(laid, next(iter(of), 0)))
        return jax.tree.unflatten(structure, out)

    def _sent(self, x: jax.Array, root: int) -> jax.Array:
        """`[stage, ...]` -> the root's, on all stages."""
        return jax.shard_map(
            lambda x: broadcast(x[0], axis=self.axis, root=root),
            mesh=self.mesh,
            in_specs=PartitionSpec(self.axis),
            out_specs=PartitionSpec(),
            axis_names={self.axis},
            check_vma=False,
        )(x)

    def _checked(self, one: PyTree, ends: PyTree, rows: PyTree, key: jax.Array, extra: PyTree) -> list[set[int]]:
        """For each leaf of the ends, the stages that make gradients of it; the functions fit each other."""
        functions, count = self.functions, len(jax.tree.leaves(ends))
        micro = Micro(jax.tree.map(lambda x: x[0], rows), key, jnp.zeros((), jnp.int32), extra)
        x = jax.eval_shape(functions.first, ends, micro)
        _check_sent(x)
        y, _ = jax.eval_shape(functions.stage, one, x, micro)
        check_alike("stage_fn", x, y)
        if self.split_inside and not any(layout_of(functions.first, ends, micro)):
            raise problem(
                "what stands before the stacked layers",
                f"give them activations split over {', '.join(self.split_inside)}",
                "its result is no meshpar.constrain(...) that splits them so",
                'end it with x = mp.constrain(x, "batch", "norm_seq", "act_embed"), with the names of its dims',
            )
        if functions.inside is not None:
            _check_own(functions.inside, one, ends, x, micro)

        def loss(ends: PyTree, y: PyTree, micro: Micro) -> Any:
            found = functions.last(ends, y, micro)
            _check_loss(found, functions.weight)
            return found[0]

        uses = []
        for name, function, args in (
            ("first_fn", functions.first, (ends, micro)),
            ("stage_fn", functions.stage, (one, x, micro)),
            ("loss_fn", loss, (ends, x, micro)),
        ):
            closed, _ = flat_jaxpr(lambda *args, f=function: (f(*args), ()), *args)
            _check_apart(name, closed.jaxpr, self.axis, axis_sizes(self.mesh))
            if name != "stage_fn":
                uses.append(Cut(closed, first=[True] * len(closed.jaxpr.outvars)).first_needs[:count])
        parts = self.schedule.parts.tolist()
        held = [{s for s, row in enumerate(parts) if part in row} for part in (0, self.schedule.num_parts - 1)]
        return [
            set[int]().union(*(stages for use, stages in zip(of, held, strict=True) if use))
            for of in zip(*uses, strict=True)
        ]


def _each(function: Callable[..., PartitionSpec], *specs: PyTree) -> PyTree:
    return jax.tree.map(function, *specs, is_leaf=is_spec)


def _axes_of(spec: PartitionSpec) -> set[str]:
    return set(axes_of_spec(spec))


def _but(spec: PartitionSpec, own: PartitionSpec) -> PartitionSpec:
    return without_axes(spec, _axes_of(own))


def _only(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(tuple(a for a in spec_axes(entry) if a in axes) or None for entry in spec))


def _pinned(tree: PyTree, specs: PyTree) -> PyTree:
    """Laid out over the axes that are XLA's, inside the `shard_map`."""

    def pin(spec: PartitionSpec, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, spec) if any(spec_axes(entry) for entry in spec) else x

    return jax.tree.map(pin, specs, tree, is_leaf=is_spec)


def _summed(x: jax.Array, dim: int) -> jax.Array:
    # lax.reduce, for jnp.sum would widen a narrow reduction to float32.
    return lax.reduce(x, np.zeros((), x.dtype), lax.add, (dim,))


# ---------------------------------------------------------------------------------------------------------------------
# For any stage function
# ---------------------------------------------------------------------------------------------------------------------


class ValueAndGrad:
    """`(params, batch, key) -> (Result, Params of gradients)`. Made by `value_and_grad`."""

    def __init__(self, pipeline: Pipeline, specs: PyTree | None) -> None:
        self.pipeline, self.specs = pipeline, specs
        # Devices hold shares of everything on the way, which jax can only name inside a compiled program.
        self._compiled = jax.jit(self._run)

    def __call__(
        self, params: Params, batch: PyTree, key: jax.Array | None = None, late: jax.Array | None = None
    ) -> tuple[Result, Params]:
        """One step's loss and gradients; traceable, so jit it with the optimizer.

        Args:
          params: `parts` with a leading dim of parts, `ends`.
          batch: a pytree of arrays `[rows, ...]`.
          key: a typed random key; None: that of seed 0.
          late: `[stage, numbers]`, float32: what every stage brings along from the step before.

        Raises:
          ValueError: shapes that do not fit the schedule or the mesh.
        """
        if not isinstance(params, tuple) or len(params) not in (1, 2):
            raise problem(
                "pipeline parameters",
                f"run a model of {type(params).__name__}",
                "they are those of the parts, and of what stands before and behind them",
                "give pipeline.Params(parts, ends)",
            )
        params = Params(*params)
        pipe = self.pipeline
        _check_parts(pipe, params)
        if self.specs is not None:
            _check_specs(pipe, params, self.specs)
        check_rows(batch, pipe.schedule, axis_sizes(pipe.mesh), pipe.batch_axes)
        _check_key(key)
        _check_late(late, pipe.schedule)
        if late is not None and pipe.messages == "pairs":
            raise problem(
                "late",
                'send numbers along with messages="pairs"',
                "they go over every link in every tick, so that all stages would wait for each other",
                'use messages="permute", or leave out late',
            )
        return self._compiled(params, batch, key, late)

    def _run(
        self, params: Params, batch: PyTree, key: jax.Array | None, late: jax.Array | None
    ) -> tuple[Result, Params]:
        pipe = self.pipeline
        specs = Params(
            jax.tree.map(lambda _: PartitionSpec(pipe.axis), params.parts) if self.specs is None else self.specs,
            jax.tree.map(lambda _: PartitionSpec(), params.ends),
        )
        key = jax.random.key(0) if key is None else key
        stages = pipe.schedule.stages
        late = jnp.zeros((stages, 0), jnp.float32) if late is None else late
        sums, grads = pipe.sums(params, specs, specs, batch, key, late)
        shards = math.prod(axis_sizes(pipe.mesh)[axis] for axis in pipe.batch_axes)
        count = pipe.schedule.microbatches * shards
        if pipe.functions.weight is None:
            total: Any = count
        else:
            total = sums.weight
        grads = jax.tree.map(lambda g, p: (g / total).astype(g.dtype), grads, params)
        return Result(sums.loss / total, means(sums.metrics, total), means(sums.aux, count), sums.late), grads


def value_and_grad(
    stage_fn: Callable[[PyTree, PyTree, Micro], Any],
    loss_fn: Callable[[PyTree, PyTree, Micro], tuple[jax.Array, dict[str, jax.Array]]],
    *,
    schedule: Schedule,
    mesh: AnyMesh,
    first_fn: Callable[[PyTree, Micro], PyTree] | None = None,
    axis: str = "stage",
    batch_axes: tuple[str, ...] | None = None,
    specs: PyTree | None = None,
    gather: Literal["step", "microbatch"] = "step",
    remat: str | None = None,
    weight: str | None = None,
    meet: bool = True,
    messages: Literal["permute", "pairs"] = "permute",
) -> ValueAndGrad:
    """Loss and gradients of a model cut into parts, run over the stages of a mesh as the schedule says.

        params.parts [part, ...]   ─► stage_fn, part by part   (each stage holds its parts)
        params.ends                ─► first_fn before part 0, loss_fn behind the last part

    One scan over the ticks of the schedule's table runs every schedule. In a tick a stage runs its cell: a forward, the
    gradient of an input (B), of weights (W), several of them, or nothing; then what it made goes to the neighbours.
    Buffers have as many slots as the stage that needs most (`Schedule.slots`). Inside a cell all mesh axes but the
    stages' and the batch's are XLA's.

    Gradients are those of the mean over microbatches and devices, summed in float32 at the least on every device and
    over devices once, behind the loop. Where a schedule holds parts elsewhere than in order (several on a stage, or two
    copies), weights go there before the loop and gradients come back behind it.

    Qi et al. 2024, "Zero Bubble Pipeline Parallelism", has B and W apart; Narayanan et al. 2021, "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM", the stages.

    Args:
      stage_fn: `(parameters of one part, x, micro) -> y`, or `-> (y, Aux)`; y has the shapes and dtypes of x. It is the
        same function for all parts and must not communicate over `axis`.
      loss_fn: `(ends, y, micro) -> (loss, metrics)`: the mean over the microbatch's rows, and a dict of scalars:
        means, or counts if they are whole numbers. Its forward and backward pass run in the last part's B, so no logits
        are kept.
      schedule: from `meshpar.pipeline`, or your own table.
      mesh: with Auto axes; `axis` has as many ranks as the schedule has stages.
      first_fn: `(ends, micro) -> x`, say the embedding, run again in the first part's B; None: `micro.rows["inputs"]`.
      axis: the mesh axis of the stages.
      batch_axes: mesh axes that split the batch's rows; None: those of `data`, `fsdp` and `expert` that the mesh has.
      specs: for each leaf of `params.parts` a PartitionSpec, the first entry of which is `axis`; None: whole but for
        the stages. Axes that split the batch split weights as FSDP does.
      gather: where `specs` split weights over the batch's axes: "step" gathers a stage's weights before the loop and
        holds them; "microbatch" in every cell that needs them, and holds shards. Gradients are summed whole in both.
      remat: what F does not keep and B computes again, as in `train_step`; None keeps all residuals.
      weight: a metric by which microbatches are weighed in the mean.
      meet: False leaves out what makes all stages wait for each other at a step's end, for schedules without a bubble
        over consecutive steps: loss and metrics then come as `[stage, ...]`, each stage's share, to be summed when they
        are read; and a number that an optimizer needs of all stages (a norm to clip by) is best had a step late: what
        is given as `late` `[stage, numbers]` rides along with the messages, and its sums come back as `[stage,
        numbers]`, the same on all stages. With `meet=True` no more than scalars is summed over the stages.
      messages: "permute" sends by collective permutes, in which an accelerator's stages wait for their neighbours and
        host devices for all of each other. "pairs" sends by gathers of the two stages that a message is for, so that
        host devices too wait for nobody else; for an even number of stages, and without `late`.

    Returns:
      `f(params, batch, key=None, late=None) -> (Result, gradients)`, compiled; also inside a `jax.jit` of yours.

    Raises:
      ValueError: a schedule that does not validate, or does not fit the mesh; an option that does not exist.
    """
    where = "pipeline.value_and_grad"
    if not isinstance(schedule, Schedule):
        raise problem(
            f"{where}(schedule={schedule!r})",
            "run it",
            f"it is a {type(schedule).__name__}, not a Schedule",
            "write schedule=mp.pipeline.one_f_one_b(stages=4, microbatches=8)",
        )
    for name, function in (("stage_fn", stage_fn), ("loss_fn", loss_fn), ("first_fn", first_fn or _inputs)):
        if not callable(function):
            raise problem(
                f"{where}({name}={function!r})",
                "call it",
                f"it is a {type(function).__name__}, not a function",
                "give stage_fn(parameters, x, micro) and loss_fn(ends, y, micro); first_fn(ends, micro) or None",
            )
    if not isinstance(mesh, AnyMesh) or any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise problem(
            f"{where}(mesh={mesh!r})",
            "run stages on it",
            "it takes a mesh whose axes are all of type Auto",
            f"write mesh=mp.MeshSpec({axis}={schedule.stages}, ...).build()",
        )
    sizes = axis_sizes(mesh)
    if sizes.get(axis) != schedule.stages:
        raise problem(
            f"{where}(axis={axis!r})",
            f"run the {schedule.stages} stages of schedule `{schedule.name}`",
            f"the mesh has {', '.join(f'{k}={v}' for k, v in sizes.items())}",
            f"give it {schedule.stages} ranks, MeshSpec({axis}={schedule.stages}, ...), or a schedule of other stages",
        )
    if gather not in ("step", "microbatch"):
        raise problem(
            f"{where}(gather={gather!r})",
            "gather weights then",
            "there is no such choice",
            'use "step" or "microbatch"',
        )
    if messages not in ("permute", "pairs"):
        raise problem(
            f"{where}(messages={messages!r})", "send by them", "there is no such choice", 'use "permute" or "pairs"'
        )
    if messages == "pairs" and schedule.stages % 2 and schedule.stages > 1:
        raise problem(
            f'{where}(messages="pairs")',
            f"send between {schedule.stages} stages",
            "an odd number of them cannot meet two by two around a ring",
            'use messages="permute", or an even number of stages',
        )
    if weight is not None and not meet:
        raise problem(
            f"{where}(weight={weight!r}, meet=False)",
            "weigh microbatches while the stages do not meet",
            "only the last stage knows the sum of the weights",
            "use meet=True, or weigh rows inside loss_fn and leave out weight",
        )
    check_remat(remat)
    named = (batch_axes,) if isinstance(batch_axes, str) else batch_axes
    if named is not None and not (isinstance(named, tuple | list) and all(isinstance(name, str) for name in named)):
        raise problem(
            f"{where}(batch_axes={batch_axes!r})",
            "split the batch's rows over them",
            "those are no names of mesh axes",
            f'write batch_axes=("data", "fsdp"), of {", ".join(sizes)}, or leave it out',
        )
    axes = tuple(a for a in BATCH_AXES if a in sizes) if named is None else tuple(named)
    for name in axes:
        if name == axis or name not in sizes or axes.count(name) > 1:
            once = f"the mesh has {', '.join(sizes)}, each to be named once"
            raise problem(
                f"{where}(batch_axes={axes!r})",
                f"split the batch over `{name}`",
                "that axis is the stages'" if name == axis else once,
                "name axes of the mesh that split rows",
            )
    schedule.validate()
    stage = _with_aux(stage_fn, weight)
    if remat is not None:
        stage = jax.checkpoint(stage, policy=REMAT_POLICIES[remat], prevent_cse=False)
    pipe = Pipeline(
        functions=Functions(first=first_fn or _inputs, stage=stage, last=_of_numbers(loss_fn, weight), weight=weight),
        schedule=schedule,
        mesh=mesh,
        axis=axis,
        batch_axes=tuple(name for name in axes if sizes[name] > 1),
        gather=gather,
        meet=meet,
        messages=messages,
    )
    return ValueAndGrad(pipe, specs)


def _inputs(ends: PyTree, micro: Micro) -> PyTree:
    if not isinstance(micro.rows, Mapping) or "inputs" not in micro.rows:
        raise problem(
            "pipeline.value_and_grad(first_fn=None)",
            "begin with the batch's `inputs`",
            "the batch has no such entry",
            'give {"inputs": ..., ...} as the batch, or a first_fn',
        )
    return micro.rows["inputs"]


def _of_numbers(loss_fn: Callable[..., Any], weight: str | None) -> Callable[..., Any]:
    def last(ends: PyTree, y: PyTree, micro: Micro) -> Any:
        found = loss_fn(ends, y, micro)
        _check_loss(found, weight)
        check_numbers(found[1])
        return found

    return last


def _with_aux(stage_fn: Callable[..., Any], weight: str | None) -> Callable[..., tuple[PyTree, Aux]]:
    def stage(params: PyTree, x: PyTree, micro: Micro) -> tuple[PyTree, Aux]:
        y, aux = with_aux(stage_fn(params, x, micro))
        if aux is not None:
            if weight is not None:
                raise problem(
                    f"pipeline.value_and_grad(weight={weight!r}) and a stage_fn that gives Aux",
                    "weigh auxiliary losses as the loss",
                    "only the last stage knows a microbatch's weight",
                    "weigh rows inside loss_fn and leave out weight",
                )
            return y, aux
        return y, Aux(jnp.zeros((), jnp.float32), {})

    return stage


def _check_parts(pipe: Pipeline, params: Params) -> None:
    wanted = pipe.schedule.num_parts
    for path, x in tree_leaves_with_paths(params.parts):
        if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended):
            raise problem(
                f"pipeline parameters `{path}`",
                f"be trained as {x.dtype}",
                "parameters are numbers",
                "draw random numbers from micro.key",
            )
        if np.shape(x)[:1] != (wanted,):
            raise problem(
                f"pipeline parameters `{path}` of shape {np.shape(x)} dim 0",
                f"be the parts of schedule `{pipe.schedule.name}`",
                f"it has {wanted} parts",
                f"stack {wanted} parts along the first dim",
            )


def _check_specs(pipe: Pipeline, params: Params, specs: PyTree) -> None:
    """Of how the parts' parameters are to lie."""
    sizes = axis_sizes(pipe.mesh)
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    if str(structure) != str(jax.tree.structure(params.parts)):
        raise problem(
            f"pipeline.value_and_grad(specs=...) of structure {structure}",
            "lay out the parts' parameters",
            f"those are of structure {jax.tree.structure(params.parts)}",
            f'give a PartitionSpec("{pipe.axis}", ...) for each leaf',
        )
    for (path, x), spec in zip(tree_leaves_with_paths(params.parts), leaves, strict=True):
        entries = [spec_axes(entry) for entry in spec] if is_spec(spec) else []
        axes = [axis for entry in entries for axis in entry]
        if (
            entries[:1] != [(pipe.axis,)]
            or len(set(axes)) < len(axes)
            or not set(axes) <= set(sizes)
            or len(entries) > np.ndim(x)
            or any(size % num_shards([entry], sizes) for size, entry in zip(np.shape(x), entries, strict=False))
        ):
            raise problem(
                f"pipeline.value_and_grad(specs=...), `{path}` of shape {np.shape(x)}",
                f"lie as {spec!r}",
                f"parts come first, split over `{pipe.axis}` alone; other dims over other axes that divide them, of "
                + ", ".join(f"{k}={v}" for k, v in sizes.items()),
                f'write PartitionSpec("{pipe.axis}"), and for other dims None or axes of the mesh',
            )


def check_rows(batch: PyTree, schedule: Schedule, sizes: Mapping[str, int], batch_axes: tuple[str, ...]) -> None:
    """Every leaf of the batch has the same rows, and they can be cut into microbatches.

    Raises:
      ValueError: they cannot.
    """
    shards = math.prod(sizes[axis] for axis in batch_axes)
    unit = shards * schedule.microbatches
    first = 0
    for path, x in tree_leaves_with_paths(batch):
        rows = np.shape(x)[0] if np.shape(x) else 0
        if rows == 0 or rows % unit:
            over = " × ".join(f"`{axis}`" for axis in batch_axes) or "one device"
            raise problem(
                f"batch leaf `{path}` of shape {np.shape(x)} dim 0",
                f"be split over {over} ({shards}) in {schedule.microbatches} microbatches",
                f"{rows} rows are not a positive multiple of {unit}",
                f"use a batch of {max(1, -(-rows // unit)) * unit}",
            )
        first = first or rows
        if rows != first:
            raise problem(
                f"batch leaf `{path}` of shape {np.shape(x)} dim 0",
                "be split by rows",
                f"it has {rows} rows and another leaf has {first}",
                "give every leaf the same first dim, the global batch",
            )


def _check_key(key: Any) -> None:
    dtype, shape = getattr(key, "dtype", None), np.shape(key)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    if key is not None and not typed and not (dtype == np.uint32 and len(shape) == 1):
        raise problem(
            f"a pipeline's random key, {type(key).__name__} of shape {shape}",
            "draw random numbers for every microbatch from it",
            "it is one key",
            "give jax.random.key(0), or leave it out",
        )


def _check_late(late: Any, schedule: Schedule) -> None:
    if late is not None and (not hasattr(late, "dtype") or late.ndim != 2 or len(late) != schedule.stages):
        raise problem(
            f"late, a {type(late).__name__} of shape {getattr(late, 'shape', ())}",
            "be summed over the stages",
            f"every one of {schedule.stages} stages brings a row of numbers",
            f"give a float32 array [{schedule.stages}, numbers]",
        )


def _check_sent(x: PyTree) -> None:
    """Of what goes from part to part."""
    for path, leaf in tree_leaves_with_paths(x):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise problem(
                f"`{path}` of what first_fn gives",
                f"be sent from stage to stage as {leaf.dtype}",
                "messages and their gradients are plain numbers",
                "take random keys from micro.key, or carry jax.random.key_data(key)",
            )


def _check_loss(found: Any, weight: str | None) -> None:
    """Of what the loss function gives."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        raise problem(
            "loss_fn",
            f"take the loss and the metrics from its result, a {type(found).__name__}",
            "it gives (loss, metrics), a scalar and a dict",
            "return loss, {}",
        )
    if np.shape(found[0]):
        raise problem(
            "loss_fn",
            f"differentiate a loss of shape {np.shape(found[0])}",
            "a loss is a scalar, the mean over the microbatch's rows",
            "return loss.mean(), {...}",
        )
    kind = getattr(found[0], "dtype", None) or np.asarray(found[0]).dtype
    if not jnp.issubdtype(kind, jnp.floating):
        raise problem(
            "loss_fn",
            f"differentiate a loss of dtype {kind}",
            "a loss is a real number, of a floating dtype",
            "return loss.astype(jnp.float32), {...}, and nothing rounded on the way to it",
        )
    if weight is not None and weight in found[1] and np.shape(found[1][weight]):
        raise problem(
            f"weight={weight!r}",
            f"weigh microbatches by a metric of shape {np.shape(found[1][weight])}",
            "a microbatch has one weight",
            "sum it in loss_fn",
        )
    if weight is not None and weight not in found[1]:
        raise problem(
            f"weight={weight!r}",
            "weigh microbatches by that metric",
            f"loss_fn gives {', '.join(map(repr, found[1])) or 'no metrics'}",
            f'return loss, {{"{weight}": ...}} with what the mean loss was divided by',
        )


def _check_own(inside: Callable[..., PyTree], one: PyTree, ends: PyTree, x: PyTree, micro: Micro) -> None:
    """Layers may not use parameters from outside of them: their gradients would be lost."""
    closed, _ = flat_jaxpr(lambda ends, one, x, micro: (inside(one, ends, x, micro), ()), ends, one, x, micro)
    used = Cut(closed, first=[True] * len(closed.jaxpr.outvars)).first_needs
    for leaf, use in zip(jax.tree.leaves(ends), used, strict=False):
        if use:
            raise problem(
                f"the layers of the model, and a parameter of shape {leaf.shape}",
                "use it inside of a stage",
                "it stands outside of the stacked layers: only the first and the last stage have a part in it",
                "give every layer a copy in its own stacked parameters, or use it before or behind the layers",
            )


LOCAL = frozenset({"axis_index", "pvary", "pcast", "pbroadcast"})
"""Primitives that name an axis and send nothing."""


def _check_apart(name: str, jaxpr: Any, axis: str, sizes: Mapping[str, int]) -> None:
    """Nothing communicates over the stages: each is in another part of the model, in another microbatch."""
    for eqn in jaxpr.eqns:
        named = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        axes = named if isinstance(named, tuple | list | frozenset | set) else (named,)
        if axis in axes and eqn.primitive.name not in LOCAL:
            raise problem(
                name,
                f"run `{eqn.primitive.name}` over mesh axis `{axis}`",
                "its ranks are the stages, each at another microbatch and some at none",
                "leave it out: results go from stage to stage by themselves, and gradients are summed behind the loop",
            )
        if eqn.primitive.name == "ppermute" and any(sizes.get(a, 1) > 1 for a in axes):
            raise problem(
                name,
                f"run `ppermute` over {', '.join(f'`{a}`' for a in axes)} inside a stage",
                "host devices all meet in every permute, also of groups of them, and other stages do something else "
                "meanwhile: they would wait for each other for ever",
                "leave out what sends around a ring (context_parallel, matmuls that overlap their messages) under "
                "stages; tensor_parallel(sequence=True) works",
            )
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    _check_apart(name, inner, axis, sizes)
