"""Loss and gradients of a pipelined model for any schedule.

A scan over the ticks of the table runs any schedule; see `meshpar.pipeline.executor`. If a schedule does not place the
chunks of the model in order (interleaved chunks, or two copies), weights are sent to their stages before the loop and
gradients are sent back after it; see `meshpar.pipeline.stage_placement`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
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
from meshpar.layers.remat import check_remat, named_in, remat_policy
from meshpar.layers.scan import Aux, with_aux
from meshpar.parallel.batch import check_examples
from meshpar.pipeline import stage_checks as checks
from meshpar.pipeline.executor import Executor, TickPlan
from meshpar.pipeline.jaxpr_slicing import arrays
from meshpar.pipeline.stage_placement import WeightPlacement
from meshpar.pipeline.stage_program import (
    First,
    Functions,
    Last,
    MicrobatchInputs,
    Params,
    StageProgram,
    StageTotals,
    micro_key,
)
from meshpar.pipeline.staged_model import StagedModel
from meshpar.pipeline.uniform_executor import UniformExecutor, UniformPlan
from meshpar.schedules import Schedule
from meshpar.sharding.constraints import with_layout
from meshpar.sharding.errors import problem
from meshpar.sharding.types import (
    AnyMesh,
    PyTree,
    axes_of_spec,
    axis_sizes,
    is_spec,
    num_shards,
    spec_axes,
    without_axes,
)


class Result(NamedTuple):
    """Results of a step other than gradients."""

    loss: jax.Array
    """Mean loss over microbatches and devices, including the auxiliary losses of all chunks."""
    metrics: dict[str, jax.Array]
    """Metrics of the loss function: means, and sums of integers."""
    aux: dict[str, jax.Array]
    """Auxiliary metrics of the chunks, `[chunk, ...]`: means, and sums of integers."""


class LeafUses(NamedTuple):
    """Arrays that stages send, and uses of the leaves of `Params`."""

    outputs: tuple[jax.ShapeDtypeStruct, ...]
    """Local shapes of the arrays that a chunk sends to the next chunk."""
    first: list[bool]
    """For each leaf of `embedding_and_head`, whether the code before the layers uses it."""
    last: list[bool]
    """The same for the code after the layers."""
    reads: tuple[tuple[bool, bool, bool], ...]
    """For each leaf of the chunks, whether the F, B and W ops of a microbatch read it."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StagedRun(StagedModel):
    """Loss and gradients of a pipelined model, whose options are checked on construction."""

    record: Callable[[LeafUses], None] = lambda uses: None
    """Called in each trace."""

    def __post_init__(self) -> None:
        checks.check_run(self)

    def __call__(
        self, params: Params, batch: PyTree, key: jax.Array, *, specs: Params, grad_specs: Params,
        extra: PyTree = (),
    ) -> tuple[Result, Params]:  # fmt: skip
        """Return means over all microbatches and devices, and gradients in the dtype in which they are accumulated.

        `params` are in the compute dtype, and the leaves of `batch` are `[examples, ...]`. `extra` are the other
        variables of the model, replicated over the stages. `specs` and `grad_specs` are the shardings of parameters and
        gradients. Frozen parameters have the gradient None.
        """
        device, of_trained = _PerDevice(self, specs), self.functions.of_trained
        grad_specs = Params(
            of_trained(grad_specs.chunks, "chunks"), of_trained(grad_specs.embedding_and_head, "embedding_and_head")
        )
        if device.placement.moves_shards:
            params = params._replace(chunks=self._moved(device.placement.spread, params.chunks, specs.chunks))
        params = params if self.messages is None else self.messages.gather(params)
        entry_params = self.constrain(params, device.entry_specs)
        totals, grads = jax.shard_map(
            device,
            mesh=self.mesh,
            in_specs=device.in_specs,
            out_specs=device.out_specs,
            axis_names=set(device.manual),
            # Gradients are computed inside, so replication does not need to be checked.
            check_vma=False,
        )(device.plan.columns, entry_params, batch, jax.random.key_data(key), extra)
        with jax.named_scope("reduce_gradients"):
            chunks, other = self._summed(grads) if self.messages is None else self.messages.reduce(grads)
            other = self._over_stages(other, grad_specs.embedding_and_head, device.owners)
            grads = self.constrain(Params(chunks, other), grad_specs)
        if device.placement.moves_shards:
            grads = grads._replace(chunks=self._moved(device.placement.collect, grads.chunks, grad_specs.chunks))
        sums, count = totals.sums, self.schedule.microbatches * math.prod(self.batch_axis_sizes.values())
        loss, grads = jax.tree.map(lambda x: x / jnp.asarray(count, x.dtype), (sums.loss, grads))
        return Result(loss, means(sums.metrics, count), means(totals.aux, count)), grads

    def _summed(self, grads: Params) -> Params:
        """Sum gradients over the batch axes. XLA reduce-scatters them if their sums are sharded."""
        chunks = jax.tree.map(lambda g: _summed(g, 0), grads.chunks)
        return Params(chunks, jax.tree.map(lambda g: _summed(g, 1), grads.embedding_and_head))

    def _moved(self, move: Callable[[PyTree], PyTree], chunks: PyTree, specs: PyTree) -> PyTree:
        """Move chunks between stages. Each device moves its shards."""

        def move_shard(chunks: PyTree) -> PyTree:
            # Without the barrier, XLA merges the selection of a chunk into the slice of the shard, and does not convert
            # the all-reduce before it into a reduce-scatter.
            return move(lax.optimization_barrier(chunks))

        return jax.shard_map(move_shard, mesh=self.mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(chunks)

    def constrain(self, tree: PyTree, specs: PyTree) -> PyTree:
        """Constrain each array to its spec."""
        return _each(lambda spec, x: with_layout(x, NamedSharding(self.mesh, spec)), specs, tree)

    def _over_stages(self, grads: PyTree, specs: PyTree, owners: list[set[int]]) -> PyTree:
        """Replicate gradients `[stage, ...]`: broadcast them if a single stage computes them, otherwise all-reduce."""
        leaves, structure = jax.tree.flatten(grads)
        out = []
        for g, spec, stages in zip(leaves, jax.tree.leaves(specs, is_leaf=is_spec), owners, strict=True):
            if len(stages) > 1:
                out.append(_summed(g, 0))
                continue
            root = next(iter(stages), 0)
            from_owner = jax.shard_map(
                lambda x, root=root: broadcast(x[0], axis=self.axis, root=root),
                mesh=self.mesh,
                in_specs=P(self.axis, *spec),
                out_specs=spec,
                # The result is the same on all stages, but the type system cannot infer it.
                check_vma=False,
            )
            out.append(from_owner(g))
        return jax.tree.unflatten(structure, out)


class _PerDevice:
    """The per-device part of a step, inside a `shard_map` manual over the stages and the batch axes."""

    def __init__(self, run: StagedRun, specs: Params) -> None:
        self.run, self.placement = run, WeightPlacement.of(run.schedule, run.axis)
        self.schedule = self.placement.schedule
        self.batch_axes = tuple(run.batch_axis_sizes)
        self.manual = (run.axis, *self.batch_axes)
        self.expert_specs = _each(lambda _: P(), specs.chunks) if run.expert_specs is None else run.expert_specs

        def replicated(spec: P, expert_spec: P) -> P:
            return without_axes(spec, set(self.batch_axes) - set(axes_of_spec(expert_spec)))

        # Before the loop, parameters are replicated over the batch axes unless ticks gather them.
        is_sharded = run.gather == "microbatch"
        chunks = specs.chunks if is_sharded else _each(replicated, specs.chunks, self.expert_specs)
        other = _each(lambda spec: without_axes(spec, self.batch_axes), specs.embedding_and_head)
        self.entry_specs = Params(chunks, other)
        self.manual_specs = _each(
            lambda spec: without_axes(spec, {*axes_of_spec(spec)} - {*self.manual}), self.entry_specs
        )
        auto = _each(lambda spec: without_axes(spec, self.manual), specs)
        uniform = UniformPlan.of(self.schedule)
        executor: Any
        if uniform is None:
            self.plan: TickPlan | UniformPlan = TickPlan.of(self.schedule)
            executor = Executor
        else:
            self.plan, executor = uniform, UniformExecutor
        manual = _each(_without_axes_of, self.manual_specs.chunks, self.expert_specs)
        self.gather_weights = self._gather_weights(manual, auto.chunks)
        self.executor: Callable[..., StageProgram] = functools.partial(
            executor,
            schedule=self.schedule,
            plan=self.plan,
            axis=run.axis,
            grad_dtype=run.grad_dtype,
            gather_weights=self.gather_weights,
            constrain_grads=lambda chunks, other: (
                _constrained(chunks, auto.chunks),
                _constrained(other, auto.embedding_and_head),
            ),
        )
        by_batch, axis = self.batch_axes or None, run.axis
        self.in_specs = P(None, axis), self.manual_specs, P(by_batch), P(), P()
        grads = _each(
            lambda spec: P(_without_axes_of(P(by_batch), spec)[0], axis, *spec[1:]),
            run.functions.of_trained(self.expert_specs, "chunks"),
        )
        self.out_specs = P(), Params(grads, P(axis, by_batch))
        self.owners: list[set[int]] = []
        """Stages that compute the gradient of each trainable leaf of `embedding_and_head`; set when this is traced."""

    def __call__(
        self, columns: Any, params: Params, examples: PyTree, key_data: jax.Array, extra: PyTree
    ) -> tuple[StageTotals, Params]:
        """Return the totals without gradients, and the gradients.

        Gradients of chunks are `[1, chunk, ...]`, gradients of embedding and head `[1, 1, ...]`.
        """
        run, count = self.run, self.schedule.microbatches
        columns = jax.tree.map(lambda x: x[:, 0], columns)
        key = jax.random.wrap_key_data(key_data)
        if self.batch_axes:
            key = jax.random.fold_in(key, lax.axis_index(self.batch_axes))
        examples = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), examples)
        chunks = params.chunks if self.placement.moves_shards else self.placement.spread(params.chunks)
        # The functions are checked here, where the axes of their collectives are bound.
        chunk_params = self.gather_weights(jax.tree.map(lambda p: p[0], chunks))
        inputs = MicrobatchInputs(jax.tree.map(lambda x: x[0], examples), key, jnp.zeros((), jnp.int32), extra)
        uses = checks.checked_uses(run, chunk_params, params.embedding_and_head, inputs)
        structure = jax.tree.structure(params.embedding_and_head)
        owners = jax.tree.unflatten(structure, self._owners(*uses))
        owners = run.functions.of_trained(owners, "embedding_and_head")
        self.owners = jax.tree.leaves(owners, is_leaf=lambda x: isinstance(x, set))
        arrays: dict[str, Any] = {"examples": examples, "key": key, "extra": extra}
        normalizer = self._normalizer(params.embedding_and_head, **arrays)
        functions = dataclasses.replace(run.functions, normalizer=normalizer)
        executor = self.executor(
            functions=functions, params=chunks, embedding_and_head=params.embedding_and_head, **arrays
        )
        run.record(LeafUses(self._outputs(executor), *uses, executor.split.reads))
        sums, aux = executor(columns)
        grads = sums.grads
        if not self.placement.moves_shards:
            grads = grads._replace(chunks=self.placement.collect(grads.chunks))
        grads = jax.tree.map(lambda g: g[None], grads)
        grads = grads._replace(embedding_and_head=jax.tree.map(lambda g: g[None], grads.embedding_and_head))
        parts = jnp.asarray(self.schedule.parts)[lax.axis_index(run.axis)]
        aux = {k: jnp.zeros((self.schedule.num_parts, *x.shape[1:]), x.dtype).at[parts].add(x) for k, x in aux.items()}
        return lax.psum(StageTotals(sums.replace(grads=None), aux), self.manual), grads

    def _owners(self, first: Sequence[bool], last: Sequence[bool]) -> list[set[int]]:
        """Return the stages that compute gradients of each leaf of `embedding_and_head`."""
        rows, last_chunk = self.schedule.parts.tolist(), self.schedule.num_parts - 1
        if isinstance(self.plan, UniformPlan):
            return [set(range(len(rows))) if any(uses) else set() for uses in zip(first, last, strict=True)]
        stages = [{stage for stage, row in enumerate(rows) if chunk in row} for chunk in (0, last_chunk)]
        return [
            set[int]().union(*(owners for use, owners in zip(uses, stages, strict=True) if use))
            for uses in zip(first, last, strict=True)
        ]

    def _outputs(self, executor: StageProgram) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes on one device of the arrays that a chunk sends to the next chunk."""
        sizes = axis_sizes(self.run.mesh) | dict.fromkeys(self.manual, 1)
        outputs = []
        for x, spec in zip(jax.tree.leaves(executor.x), executor.x_specs, strict=True):
            shards = [num_shards([entry], sizes) for entry in spec or ()] + [1] * x.ndim
            shape = tuple(size // count for size, count in zip(x.shape, shards, strict=False))
            outputs.append(jax.ShapeDtypeStruct(shape, x.dtype))
        return tuple(outputs)

    def _normalizer(self, embedding_and_head: PyTree, examples: PyTree, key: jax.Array, extra: PyTree) -> Normalizer:
        run, last = self.run, jnp.asarray(self.schedule.num_parts - 1, jnp.int32)
        keys = jax.vmap(lambda index: micro_key(key, index, last))(jnp.arange(self.schedule.microbatches))
        inputs = MicrobatchInputs(jax.tree.map(lambda x: x[0], examples), keys[0], last, extra)
        # All chunks keep the shapes of the activations.
        y = jax.eval_shape(run.functions.first, embedding_and_head, inputs)

        def terms(args: tuple[PyTree, PyTree, PyTree], examples: PyTree, key: jax.Array) -> LossTerms:
            params, y, extra = args
            return run.functions.last(params, y, MicrobatchInputs(examples, key, last, extra))

        where = f"the loss function of `{self.schedule.name}` stages"
        return normalizer_of(where, terms, (embedding_and_head, y, extra), examples, keys, axes=run.batch_axis_sizes)

    def _gather_weights(self, manual: PyTree, auto: PyTree) -> Callable[[PyTree], PyTree]:
        """Return the function that gathers the weights of a chunk over the batch axes, and keeps all other sharding."""
        if self.run.gather == "step" or not self.batch_axes:
            return lambda params: params

        def gather_leaf(spec: P, x: jax.Array) -> jax.Array:
            for dim, entry in enumerate(spec[1:]):
                if spec_axes(entry):
                    x = lax.all_gather(x, spec_axes(entry), axis=dim, tiled=True)
            return x

        auto = _each(lambda spec: P(*spec[1:]), auto)
        axes = {axis for spec in jax.tree.leaves(auto, is_leaf=is_spec) for axis in axes_of_spec(spec)}

        def gather(params: PyTree) -> PyTree:
            return _each(gather_leaf, manual, params)

        def gather_chunk(params: PyTree) -> PyTree:
            params = arrays(params)
            with jax.named_scope("gather_part"):
                if not axes:
                    return gather(params)
                # Without this shard_map, XLA would first gather the weights over the axes that are left to it. It is
                # not differentiated, so replication does not need to be checked.
                return jax.shard_map(gather, in_specs=(auto,), out_specs=auto, axis_names=axes, check_vma=False)(params)

        return gather_chunk


def _each(function: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Map over trees, the first of which contains specs. The result is None where any tree has None."""
    return jax.tree.map(lambda *xs: None if any(x is None for x in xs) else function(*xs), *trees, is_leaf=is_spec)


def _without_axes_of(spec: P, other: P) -> P:
    return without_axes(spec, axes_of_spec(other))


def _constrained(tree: PyTree, specs: PyTree) -> PyTree:
    """Constrain arrays over the axes that are left to XLA."""
    return _each(lambda spec, x: with_layout(x, spec) if axes_of_spec(spec) else x, specs, tree)


def _summed(x: jax.Array, dim: int) -> jax.Array:
    # jnp.sum would accumulate low-precision gradients in float32.
    return lax.reduce(x, np.zeros((), x.dtype), lax.add, (dim,))


# ---- Public API ------------------------------------------------------------------------------------------------------

Stage: TypeAlias = Callable[[PyTree, PyTree, MicrobatchInputs], Any]
"""(parameters of a chunk, x, inputs) -> y, or (y, Aux)."""


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
) -> Callable[..., tuple[Result, Params]]:
    """Return a function that computes loss and gradients of a pipelined model.

        params.chunks [chunk, ...]    ─► stage_fn for each chunk, on its stage
        params.embedding_and_head     ─► first_fn before the first chunk, loss_fn after the last

    The loss is the mean over microbatches and devices. Each device accumulates gradients in at least float32. They are
    reduced once, after the loop over ticks. Splitting the backward pass into B and W follows Qi
    et al. 2024, "Zero Bubble Pipeline Parallelism"; stages follow Narayanan et al. 2021, "Efficient Large-Scale
    Language Model Training on GPU Clusters".

    Args:
      stage_fn: `(params of a chunk, x, inputs) -> y` or `(y, Aux)`; y has the shapes and dtypes of x. All chunks use
        the same function, which must not communicate over `axis`. `inputs` is a `MicrobatchInputs`.
      loss_fn: `(embedding_and_head, y, inputs) -> (loss, metrics)` for one microbatch; metrics is a dict of scalars.
        `mp.MeanLoss` and `mp.SumLoss` combine exactly over microbatches and devices. A scalar loss is a mean over
        equally many examples. Floating metrics are averaged with the weight of the loss, integers are summed.
        `loss_fn` runs in B of the last chunk, forward and backward, so logits are not saved.
      schedule: a schedule of `meshpar.pipeline`, or a custom table.
      mesh: a mesh with Auto axes. The size of `axis` is the number of stages.
      first_fn: `(embedding_and_head, inputs) -> x`, such as the embedding. B of the first chunk runs it again. None:
        `inputs.examples["inputs"]`.
      axis: the mesh axis of the stages.
      batch_axes: mesh axes that shard the batch; None: the axes `data`, `fsdp` and `expert` of the mesh.
      specs: PartitionSpec for each leaf of `params.chunks`, starting with `axis`; None: replicated over all other axes.
        Batch axes in a spec shard the weights as FSDP does.
      gather: when weights that are sharded over batch axes are gathered. "step": once, before the loop. "microbatch":
        in each tick that uses them, which saves memory.
      remat: the remat policy of a stage, as in `train_step`, except named policies; None saves all residuals.

    Returns:
      `f(params, batch, key=None) -> (Result, gradients)`. `params` is a `Params` with leaves `[chunk, ...]` in
      `chunks`, and the gradients have the same structure. `batch` is a pytree of arrays `[examples, ...]`. `key` is a
      typed PRNG key, by default `jax.random.key(0)`.

      The function is compiled, and can be called inside `jax.jit`, together with the optimizer. In that case,
      `compiler_options={"xla_gpu_copy_insertion_use_region_analysis": True}` (on CPUs `xla_cpu_...`) avoids copies of
      the buffers.

    Raises:
      MeshparError: the schedule is invalid or does not fit the mesh, or an option is unknown. The returned function
        raises it if shapes do not fit the schedule or the mesh.

    Example:
      >>> import jax, jax.numpy as jnp, meshpar as mp
      >>> f = mp.pipeline.value_and_grad(
      ...     lambda params, x, inputs: x * params["scale"],
      ...     lambda embedding_and_head, y, inputs: ((y - inputs.examples["targets"]).mean(), {}),
      ...     schedule=mp.pipeline.one_f_one_b(stages=1, microbatches=2),
      ...     mesh=mp.MeshSpec(stage=1).build(jax.devices()[:1]),
      ... )
      >>> batch = {"inputs": jnp.ones((4, 3)), "targets": jnp.zeros((4, 3))}
      >>> result, grads = f(mp.pipeline.Params({"scale": jnp.array([2.0])}), batch)
      >>> float(result.loss), grads.chunks["scale"].tolist()
      (2.0, [1.0])
    """
    functions = _functions(stage_fn, loss_fn, first_fn, remat)
    staged = StagedRun(
        functions=functions, schedule=schedule, mesh=mesh, axis=axis, batch_axes=batch_axes, gather=gather
    )

    def run(params: Params, batch: PyTree, key: jax.Array | None) -> tuple[Result, Params]:
        chunks = jax.tree.map(lambda _: P(axis), params.chunks) if specs is None else specs
        all_specs = Params(chunks, jax.tree.map(lambda _: P(), params.embedding_and_head))
        key = jax.random.key(0) if key is None else key
        return staged(params, batch, key, specs=all_specs, grad_specs=all_specs)

    # shard_map with auto axes requires jit.
    traced, compiled = jax.jit(run), jax.jit(run, compiler_options=options_for(mesh, {}, IN_PLACE))

    def value_and_grad(params: Params, batch: PyTree, key: jax.Array | None = None) -> tuple[Result, Params]:
        params = checks.checked_params(staged, params, specs)
        check_examples(batch, staged.batch_axis_sizes, schedule.microbatches, "microbatches")
        checks.check_key(key)
        is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, batch, key)))
        return (traced if is_traced else compiled)(params, batch, key)

    return value_and_grad


def _functions(stage_fn: Stage, loss_fn: Last, first_fn: First | None, remat: str | None) -> Functions:
    """Wrap the user's functions for the executor: add an `Aux` if needed, the remat policy, and checks of the loss."""
    checks.check_functions(stage_fn=stage_fn, loss_fn=loss_fn, first_fn=first_fn or _inputs)
    check_remat(remat)
    if remat is not None and named_in(remat):
        reason = "checkpoint names are not visible here, so a mistyped name would be ignored"
        fix = "use a different policy, or jax.checkpoint inside stage_fn"
        where = f"{checks.WHERE}(remat={remat!r})"
        raise problem(where, "save activations by name", reason, fix, code="unsupported-feature")

    def stage(params: PyTree, x: PyTree, inputs: MicrobatchInputs) -> tuple[PyTree, Aux]:
        y, aux = with_aux(stage_fn(params, x, inputs))
        return y, Aux(jnp.zeros((), jnp.float32), {}) if aux is None else aux

    if remat is not None:
        stage = jax.checkpoint(stage, policy=remat_policy(remat), prevent_cse=False)

    def last(embedding_and_head: PyTree, y: PyTree, inputs: MicrobatchInputs) -> LossTerms:
        loss, metrics = checks.checked_loss(loss_fn(embedding_and_head, y, inputs))
        return LossTerms.of(loss, metrics, MEAN_OVER_EXAMPLES)

    return Functions(first=first_fn or _inputs, stage=stage, last=last)


def _inputs(embedding_and_head: PyTree, inputs: MicrobatchInputs) -> PyTree:
    if not isinstance(inputs.examples, Mapping) or "inputs" not in inputs.examples:
        fix = 'pass a batch {"inputs": ..., ...}, or a first_fn'
        where = f"{checks.WHERE}(first_fn=None)"
        raise problem(where, 'read batch["inputs"]', "the batch has no entry `inputs`", fix, code="not-found")
    return inputs.examples["inputs"]
