"""Loss and gradients of a model cut into stages, by any schedule, as one program.

One scan over the ticks of the schedule's table runs every schedule. In a tick a stage runs its cell: a forward, the
gradient of an input (B), of weights (W), several of them, or nothing; then what it made goes to the neighbours. Buffers
have as many slots as the stage that needs most (`Schedule.slots`). Inside a cell all mesh axes but the stages' and the
batch's are XLA's. Where a schedule holds parts elsewhere than in order (several on a stage, or two copies), weights go
there before the loop and gradients come back behind it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.collectives import broadcast
from meshpar.hardware.compile_options import IN_PLACE, options_for
from meshpar.layers.auxiliary import means
from meshpar.layers.losses import MEAN_OVER_EXAMPLES, LossTerms, Normalizer, normalizer_of
from meshpar.layers.scan import Aux, check_remat, named_in, remat_policy, with_aux
from meshpar.parallel.batch import check_rows
from meshpar.pipeline import stage_checks as checks
from meshpar.pipeline.executor import Executor, First, Functions, Last, Micro, Params, Plan, StageTotals, micro_key
from meshpar.pipeline.stage_placement import WeightPlacement
from meshpar.schedules import Schedule
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.rules import BATCH_AXES
from meshpar.sharding.types import AnyMesh, PyTree, axes_of_spec, axis_sizes, is_spec, problem, spec_axes, without_axes


class Result(NamedTuple):
    """What a step gives beside its gradients."""

    loss: jax.Array
    """Mean over microbatches and devices of the loss, auxiliary losses of all parts included."""
    metrics: dict[str, jax.Array]
    """Of the loss function, likewise; whole numbers are counts, and summed."""
    aux: dict[str, jax.Array]
    """Of the parts: `[part, ...]`; means, and sums of whole numbers."""
    late: jax.Array
    """Sums over stages of the numbers that each brought along."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StagedRun:
    """How a model is run by stages; what does not fit together is said when it is made."""

    functions: Functions
    schedule: Schedule
    mesh: AnyMesh
    axis: str = "stage"
    batch_axes: str | tuple[str, ...] | None = None
    """That split the batch; None: those of `BATCH_AXES` that the mesh has."""
    gather: Literal["step", "microbatch"] = "step"
    grad_dtype: Callable[[Any], Any] = lambda dtype: jnp.promote_types(dtype, jnp.float32)
    sync: bool = True
    own: PyTree = None
    """Of each leaf of the parts a PartitionSpec with the axes of the batch over which every rank has a slice of its
    own: never whole, with a gradient of its own, as experts are. None: of no leaf."""
    split_inside: tuple[str, ...] = ()
    """Axes, not the batch's, over which what goes from part to part is to be split; the first part says how."""

    def __post_init__(self) -> None:
        checks.check_run(self)

    @functools.cached_property
    def split_by(self) -> dict[str, int]:
        """Axes that split the batch, and their sizes; those of one rank are left out."""
        sizes = axis_sizes(self.mesh)
        named = (self.batch_axes,) if isinstance(self.batch_axes, str) else self.batch_axes
        named = BATCH_AXES if named is None else named
        return {axis: sizes[axis] for axis in named if sizes.get(axis, 1) > 1}

    def __call__(
        self, params: Params, batch: PyTree, key: jax.Array, *, specs: Params, grad_specs: Params,
        late: jax.Array | None = None, extra: PyTree = (),
    ) -> tuple[Result, Params]:  # fmt: skip
        """Means over all microbatches and devices, and gradients of the loss's, in the dtype they are summed in.

        Without `sync` loss, metrics, aux and late are each stage's share, `[stage, ...]`.

        Args:
          params: in the compute dtype.
          batch: each leaf `[rows, ...]`; a device's own rows are cut into microbatches.
          key: for random numbers.
          specs: how the parameters lie, PartitionSpecs.
          grad_specs: how gradients come out. What the functions do not train has none: None stands there.
          late: `[stage, numbers]`; None: no numbers.
          extra: what the model keeps beside parameters; every stage has all of it.
        """
        share, of_trained = _Share(self, specs), self.functions.of_trained
        grad_specs = Params(of_trained(grad_specs.parts, "parts"), of_trained(grad_specs.ends, "ends"))
        if share.placement.moves_shards:
            params = params._replace(parts=self._moved(share.placement.spread, params.parts, specs.parts))
        late = jnp.zeros((self.schedule.stages, 0), jnp.float32) if late is None else late
        (totals, late), grads = jax.shard_map(
            share,
            mesh=self.mesh,
            in_specs=share.in_specs,
            out_specs=share.out_specs,
            axis_names=set(share.manual),
            # Everything is differentiated inside, and nothing inside has to vary alike.
            check_vma=False,
        )(share.executor.plan.columns, self.laid(params, share.at_entry), batch, jax.random.key_data(key), late, extra)
        with jax.named_scope("reduce_gradients"):
            parts = jax.tree.map(lambda g: _summed(g, 0), grads.parts)
            ends = jax.tree.map(lambda g: _summed(g, 1), grads.ends)
            grads = self.laid(Params(parts, self._over_stages(ends, grad_specs.ends, share.owners)), grad_specs)
        if share.placement.moves_shards:
            grads = grads._replace(parts=self._moved(share.placement.collect, grads.parts, grad_specs.parts))
        sums, count = totals.sums, self.schedule.microbatches * math.prod(self.split_by.values())
        loss, grads = jax.tree.map(lambda x: x / jnp.asarray(count, x.dtype), (sums.loss, grads))
        return Result(loss, means(sums.metrics, count), means(totals.aux, count), late), grads

    def _moved(self, move: Callable[[PyTree], PyTree], parts: PyTree, specs: PyTree) -> PyTree:
        """Parts from stage to stage, each device its shard of them."""
        # Behind a barrier, or XLA merges the choice of a part into the cut to shards, and no longer sees that an
        # all-reduce before it is a reduce-scatter. Nothing is differentiated here.
        return jax.shard_map(
            lambda parts: move(lax.optimization_barrier(parts)),
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=specs,
            check_vma=False,
        )(parts)

    def laid(self, tree: PyTree, specs: PyTree) -> PyTree:
        """Every array laid out by its spec."""
        return _each(lambda spec, x: with_layout(x, NamedSharding(self.mesh, spec)), specs, tree)

    def _over_stages(self, ends: PyTree, specs: PyTree, owners: list[set[int]]) -> PyTree:
        """Gradients `[stage, ...]` of the ends, on all stages: sent from the one that has them, or summed."""
        leaves, structure = jax.tree.flatten(ends)
        out = []
        for g, spec, of in zip(leaves, jax.tree.leaves(specs, is_leaf=is_spec), owners, strict=True):
            if len(of) > 1:
                out.append(_summed(g, 0))
                continue
            laid = with_layout(g, NamedSharding(self.mesh, P(self.axis, *spec)))
            out.append(self._sent(laid, next(iter(of), 0)))
        return jax.tree.unflatten(structure, out)

    def _sent(self, x: jax.Array, root: int) -> jax.Array:
        """`[stage, ...]` -> the root's, on all stages."""
        return jax.shard_map(
            lambda x: broadcast(x[0], axis=self.axis, root=root),
            mesh=self.mesh,
            in_specs=P(self.axis),
            out_specs=P(),
            axis_names={self.axis},
            # What a tree of messages brings is the same on all stages, which its type does not say. It is a gradient:
            # nothing is differentiated here.
            check_vma=False,
        )(x)


class _Share:
    """One device's share of a step, inside the `shard_map` that is manual over the stages and the batch's axes."""

    def __init__(self, run: StagedRun, specs: Params) -> None:
        self.run, self.placement = run, WeightPlacement.of(run.schedule, run.axis)
        self.batch_axes = tuple(run.split_by)
        self.manual = (run.axis, *self.batch_axes)
        self.own = _each(lambda _: P(), specs.parts) if run.own is None else run.own
        self.at_entry = self._entering(specs)
        self.sharded = _each(lambda spec: without_axes(spec, {*axes_of_spec(spec)} - {*self.manual}), self.at_entry)
        auto = _each(lambda spec: without_axes(spec, self.manual), specs)
        self.executor = Executor(
            plan=Plan.of(run.schedule),
            functions=run.functions,
            axis=run.axis,
            grad_dtype=run.grad_dtype,
            whole=self._gatherer(_each(_but, self.sharded.parts, self.own), auto.parts),
            pin=lambda parts, ends: (_pinned(parts, auto.parts), _pinned(ends, auto.ends)),
        )
        self.owners: list[set[int]] = []
        """For each leaf of the ends that is trained, the stages that make its gradient; known once this is traced."""

    @property
    def in_specs(self) -> tuple[Any, ...]:
        stage = self.run.axis
        return P(None, stage), self.sharded, P(self.batch_axes or None), P(), P(stage), P()

    @property
    def out_specs(self) -> Any:
        by_batch, axis = self.batch_axes or None, self.run.axis
        own = self.run.functions.of_trained(self.own, "parts")
        grads = _each(lambda own: P(_but(P(by_batch), own)[0], axis, *own[1:]), own)
        return P() if self.run.sync else P(axis), Params(grads, P(axis, by_batch))

    def __call__(
        self, columns: Any, params: Params, rows: PyTree, key_data: jax.Array, late: jax.Array, extra: PyTree
    ) -> tuple[tuple[StageTotals, jax.Array], Params]:
        """StageTotals without gradients, `late`; and gradients, `[1, chunk, ...]` and of the ends `[1, 1, ...]`."""
        run, count = self.run, self.run.schedule.microbatches
        columns = jax.tree.map(lambda x: x[:, 0], columns)
        key = jax.random.wrap_key_data(key_data)
        if self.batch_axes:
            key = jax.random.fold_in(key, lax.axis_index(self.batch_axes))
        rows = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), rows)
        parts = params.parts if self.placement.moves_shards else self.placement.spread(params.parts)
        # Here, where the axes that the functions may communicate over have names.
        one = self.executor.whole(jax.tree.map(lambda p: p[0], parts))
        micro = Micro(jax.tree.map(lambda x: x[0], rows), key, jnp.zeros((), jnp.int32), extra)
        owners = jax.tree.unflatten(
            jax.tree.structure(params.ends), checks.owners_of_ends(run, one, params.ends, micro)
        )
        of_trained = run.functions.of_trained(owners, "ends")
        self.owners = jax.tree.leaves(of_trained, is_leaf=lambda x: isinstance(x, set))
        functions = dataclasses.replace(run.functions, normalizer=self._normalizer(params.ends, rows, key, extra))
        (sums, aux), late = dataclasses.replace(self.executor, functions=functions)(
            columns, parts, params.ends, rows, key, late[0], extra
        )
        back = sums.grads.parts if self.placement.moves_shards else self.placement.collect(sums.grads.parts)
        grads = jax.tree.map(lambda g: g[None], Params(back, sums.grads.ends))
        grads = grads._replace(ends=jax.tree.map(lambda g: g[None], grads.ends))
        held = jnp.asarray(run.schedule.parts)[lax.axis_index(run.axis)]
        aux = {k: jnp.zeros((run.schedule.num_parts, *x.shape[1:]), x.dtype).at[held].add(x) for k, x in aux.items()}
        over = self.manual if run.sync else self.batch_axes
        totals = StageTotals(sums.replace(grads=None), aux)
        out = (lax.psum(totals, over) if over else totals), late
        return (out if run.sync else jax.tree.map(lambda x: x[None], out)), grads

    def _normalizer(self, ends: PyTree, rows: PyTree, key: jax.Array, extra: PyTree) -> Normalizer:
        """Sum the weights of the losses of all microbatches and devices."""
        run, last = self.run, jnp.asarray(self.run.schedule.num_parts - 1, jnp.int32)
        keys = jax.vmap(lambda index: micro_key(key, index, last))(jnp.arange(run.schedule.microbatches))
        micro = Micro(jax.tree.map(lambda x: x[0], rows), keys[0], last, extra)
        y = jax.eval_shape(run.functions.first, ends, micro)  # stages keep the shapes of activations

        def terms(args: tuple[PyTree, PyTree, PyTree], rows: PyTree, key: jax.Array) -> LossTerms:
            ends, y, extra = args
            return run.functions.last(ends, y, Micro(rows, key, last, extra))

        where = f"the loss function of `{run.schedule.name}` stages"
        return normalizer_of(where, terms, (ends, y, extra), rows, keys, axes=run.split_by)

    def _entering(self, specs: Params) -> Params:
        """How parameters enter the loop: replicated over the batch's axes, unless every cell gathers them."""

        def whole(spec: P, own: P) -> P:
            return without_axes(spec, set(self.batch_axes) - set(axes_of_spec(own)))

        parts = specs.parts if self.run.gather == "microbatch" else _each(whole, specs.parts, self.own)
        return Params(parts, _each(lambda spec: without_axes(spec, self.batch_axes), specs.ends))

    def _gatherer(self, sharded: PyTree, auto: PyTree) -> Callable[[PyTree], PyTree]:
        """Of a part's shards its weights, replicated over the batch's axes and split as ever over others."""
        if self.run.gather == "step" or not self.batch_axes:
            return lambda params: params

        def gathered(spec: P, x: jax.Array) -> jax.Array:
            for dim, entry in enumerate(spec[1:]):
                if spec_axes(entry):
                    x = lax.all_gather(x, spec_axes(entry), axis=dim, tiled=True)
            return x

        def whole(params: PyTree) -> PyTree:
            return _each(gathered, sharded, params)

        held = _each(lambda spec: P(*spec[1:]), auto)
        axes = {axis for spec in jax.tree.leaves(held, is_leaf=is_spec) for axis in axes_of_spec(spec)}

        def apart(params: PyTree) -> PyTree:
            with jax.named_scope("gather_part"):
                if not axes:
                    return whole(params)
                # Per device: left to XLA, what is split over its own axes would be gathered over them first. It sends
                # over axes of the region around it, and what varies over those is not known inside. Gradients are those
                # of what it gives: nothing is differentiated through it.
                return jax.shard_map(whole, in_specs=(held,), out_specs=held, axis_names=axes, check_vma=False)(params)

        return apart


def _each(function: Callable[..., Any], *trees: PyTree) -> PyTree:
    """`jax.tree.map` over specs, and whatever trees go with them, which may have nothing (None) in a place."""
    return jax.tree.map(lambda *of: None if any(x is None for x in of) else function(*of), *trees, is_leaf=is_spec)


def _but(spec: P, own: P) -> P:
    return without_axes(spec, axes_of_spec(own))


def _pinned(tree: PyTree, specs: PyTree) -> PyTree:
    """Laid out over the axes that are XLA's, inside the `shard_map`."""
    return _each(lambda spec, x: with_layout(x, spec) if axes_of_spec(spec) else x, specs, tree)


def _summed(x: jax.Array, dim: int) -> jax.Array:
    # lax.reduce, for jnp.sum would widen a narrow reduction to float32.
    return lax.reduce(x, np.zeros((), x.dtype), lax.add, (dim,))


# ---- For any stage function ------------------------------------------------------------------------------------------

Stage: TypeAlias = Callable[[PyTree, PyTree, Micro], Any]
"""(parameters of one part, x, micro) -> y, or (y, Aux)."""


class ValueAndGrad:
    """`(params, batch, key) -> (Result, Params of gradients)`. Made by `value_and_grad`."""

    def __init__(self, run: StagedRun, specs: PyTree | None) -> None:
        self.run, self.specs = run, specs
        # Devices hold shares of everything on the way, which jax can only name inside a compiled program.
        self._inside = jax.jit(self._run)
        self._compiled = jax.jit(self._run, compiler_options=options_for(run.mesh, {}, IN_PLACE))

    def __call__(
        self, params: Params, batch: PyTree, key: jax.Array | None = None, late: jax.Array | None = None
    ) -> tuple[Result, Params]:
        """One step's loss and gradients; traceable, so jit it with the optimizer.

        Args:
          params: `parts` with a leading dim of parts, `ends`.
          batch: a pytree of arrays `[rows, ...]`.
          key: a typed random key; None: that of seed 0.
          late: `[stage, numbers]`, float32: what every stage brings along from the step before, say its share of a norm
            to clip by. It goes along with the messages, and its sums over the stages come back, on each of them.

        Raises:
          ValueError: shapes that do not fit the schedule or the mesh.
        """
        params = checks.checked_params(self.run, params, self.specs)
        check_rows(batch, self.run.split_by, self.run.schedule.microbatches, "microbatches")
        checks.check_key(key)
        checks.check_late(late, self.run.schedule)
        is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, batch, key, late)))
        return (self._inside if is_traced else self._compiled)(params, batch, key, late)

    def _run(
        self, params: Params, batch: PyTree, key: jax.Array | None, late: jax.Array | None
    ) -> tuple[Result, Params]:
        parts = jax.tree.map(lambda _: P(self.run.axis), params.parts) if self.specs is None else self.specs
        specs = Params(parts, jax.tree.map(lambda _: P(), params.ends))
        key = jax.random.key(0) if key is None else key
        return self.run(params, batch, key, specs=specs, grad_specs=specs, late=late)


def value_and_grad(
    stage_fn: Stage,
    loss_fn: Last,
    *,
    schedule: Schedule,
    mesh: AnyMesh,
    first_fn: First | None = None,
    axis: str = "stage",
    batch_axes: str | tuple[str, ...] | None = None,
    specs: PyTree | None = None,
    gather: Literal["step", "microbatch"] = "step",
    remat: str | None = None,
    sync: bool = True,
) -> ValueAndGrad:
    """Loss and gradients of a model cut into parts, run over the stages of a mesh as the schedule says.

        params.parts [part, ...]   ─► stage_fn, part by part   (each stage holds its parts)
        params.ends                ─► first_fn before part 0, loss_fn behind the last part

    Gradients are those of the mean over microbatches and devices, summed in float32 at the least on every device, and
    over devices once, behind the loop over ticks. Qi et al. 2024, "Zero Bubble Pipeline Parallelism", has B and W
    apart; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", the stages.

    Args:
      stage_fn: `(parameters of one part, x, micro) -> y`, or `-> (y, Aux)`; y has the shapes and dtypes of x. The same
        for all parts; it must not communicate over `axis`.
      loss_fn: `(ends, y, micro) -> (loss, metrics)`: the loss of a microbatch and a dict of scalars. `mp.MeanLoss` and
        `mp.SumLoss` combine exactly over microbatches and devices; a scalar is a mean over equally many examples.
        Floating metrics are means with the weight of the loss, integers are counts. It runs in the last part's B,
        forward and backward: no logits are kept.
      schedule: from `meshpar.pipeline`, or your own table.
      mesh: with Auto axes; `axis` has as many ranks as the schedule has stages.
      first_fn: `(ends, micro) -> x`, say the embedding, run again in the first part's B; None: `micro.rows["inputs"]`.
      axis: the mesh axis of the stages.
      batch_axes: mesh axes that split the batch's rows; None: those of `data`, `fsdp` and `expert` that the mesh has.
      specs: for each leaf of `params.parts` a PartitionSpec, the first entry of which is `axis`; None: whole but for
        the stages. Axes that split the batch split weights as FSDP does.
      gather: where `specs` split weights over the batch's axes, "step" gathers a stage's weights before the loop and
        holds them, "microbatch" gathers them in every cell that needs them and holds shards.
      remat: what F does not keep and B computes again, as in `train_step`, but for names; None keeps all residuals.
      sync: False leaves out what makes all stages wait for each other at a step's end, for schedules without a bubble
        over consecutive steps: loss and metrics come as each stage's share, `[stage, ...]`, to be summed when read.

    Returns:
      `f(params, batch, key=None, late=None) -> (Result, gradients)`, compiled; also inside a `jax.jit` of yours, to
      which `compiler_options={"xla_gpu_copy_insertion_use_region_analysis": True}` saves copies of buffers; on CPUs
      it is `xla_cpu_...`.

    Raises:
      ValueError: a schedule that does not validate, or does not fit the mesh; an option that does not exist.
    """
    functions = _functions(stage_fn, loss_fn, first_fn, remat)
    run = StagedRun(
        functions=functions, schedule=schedule, mesh=mesh, axis=axis, batch_axes=batch_axes, gather=gather, sync=sync
    )
    return ValueAndGrad(run, specs)


def _functions(stage_fn: Stage, loss_fn: Last, first_fn: First | None, remat: str | None) -> Functions:
    """What the executor runs: stages with an Aux in any case, rematerialised."""
    checks.check_functions(stage_fn=stage_fn, loss_fn=loss_fn, first_fn=first_fn or _inputs)
    check_remat(remat)
    if remat is not None and named_in(remat):
        exists = "nothing here sees a stage's marks, so a mistyped one would keep nothing"
        fix = "use a policy's word, or jax.checkpoint inside stage_fn"
        raise problem(f"pipeline.value_and_grad(remat={remat!r})", "keep what a stage marks by name", exists, fix)

    def stage(params: PyTree, x: PyTree, micro: Micro) -> tuple[PyTree, Aux]:
        y, aux = with_aux(stage_fn(params, x, micro))
        return y, Aux(jnp.zeros((), jnp.float32), {}) if aux is None else aux

    if remat is not None:
        stage = jax.checkpoint(stage, policy=remat_policy(remat), prevent_cse=False)

    def last(ends: PyTree, y: PyTree, micro: Micro) -> LossTerms:
        loss, metrics = checks.checked_loss(loss_fn(ends, y, micro))
        return LossTerms.of(loss, metrics, MEAN_OVER_EXAMPLES)

    return Functions(first=first_fn or _inputs, stage=stage, last=last)


def _inputs(ends: PyTree, micro: Micro) -> PyTree:
    if not isinstance(micro.rows, Mapping) or "inputs" not in micro.rows:
        asked, fix = "begin with the batch's `inputs`", 'give {"inputs": ..., ...} as the batch, or a first_fn'
        raise problem("pipeline.value_and_grad(first_fn=None)", asked, "the batch has no such entry", fix)
    return micro.rows["inputs"]
