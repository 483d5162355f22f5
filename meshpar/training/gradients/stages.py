"""Gradients of a loss function whose stacked layers run in pipeline stages.

    loss_fn(model, batch, key):   embedding ─► scan_layers ─► head, loss
                                   `first`   │   `stage`   │   `last`

The user writes the model as usual, and the loss function is traced several times. `first` and `last` are the code
before and after `scan_layers`, traced without the layers. `stage` is the call of `scan_layers`, with the layers of a
pipeline chunk. Computations that use the layers' `Aux` are removed from `last` and run once, after the last tick.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.hardware.compile_options import APART, IN_PLACE, OVERLAP_LIMIT, Options
from meshpar.layers.losses import Loss, LossTerms, MeanLoss, MicrobatchTotals, ScalarLoss
from meshpar.layers.precision import NUMERICS
from meshpar.layers.scan import Aux, Layer, StageRunner, running, scanned, with_aux
from meshpar.parallel.batch import check_examples
from meshpar.parallel.execution import Execution, LayerGather, StageUses
from meshpar.parallel.pipeline import Pipeline
from meshpar.pipeline.gradients import LeafUses, StagedRun
from meshpar.pipeline.jaxpr_slicing import PartialEval, depends, flat_jaxpr
from meshpar.pipeline.stage_program import Functions, MicrobatchInputs, Params
from meshpar.schedules import Schedule
from meshpar.schedules.uniform import uniform
from meshpar.sharding.errors import check_cases, problem
from meshpar.sharding.rules import resolve
from meshpar.sharding.types import (
    Leaf,
    Names,
    PyTree,
    is_spec,
    scores_experts,
    spec_axes,
    tree_leaves_with_paths,
    without_axes,
)
from meshpar.training.accumulation import compute_params, grad_specs
from meshpar.training.execution import Sharded, described
from meshpar.training.gradients.engine import GradientEngine
from meshpar.training.gradients.stack_uses import check_stacks
from meshpar.training.gradients.stage_messages import StageMessages
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState

MAX_UNROLLED = 10
"""Maximum number of layers of a pipeline chunk that run without a loop. A loop slices parameters and stacks results
twice, by chunk and by layer, and adds weight gradients in a separate kernel."""


def gradients(loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array) -> MicrobatchTotals:
    """Return loss, metrics and gradients of a batch, averaged over the microbatches of the pipeline."""
    setup, pipeline = state.setup, state.setup.strategy.pipeline
    assert pipeline is not None
    params = compute_params(setup, state.params, options.precision.compute)
    batch_axes, schedule = setup.batch_axes, pipeline.table()
    _check(setup, schedule, pipeline)
    count, slices = schedule.microbatches, options.batch_slices
    unit = "microbatches" if slices == 1 else f"slices (microbatches={count}, batch_slices={slices})"
    check_examples(batch, {axis: setup.sizes[axis] for axis in batch_axes}, count * slices, unit)
    chunked = _ChunkedModel.of(setup, schedule, pipeline)
    paths = [decision.path for decision in setup.table.params]
    leaves_of_stacks = (chunked.partition(each)[0] for each in (paths, jax.tree.leaves(params)))
    stacks = {
        path: (x.dtype, ((pipeline.axis,), *[()] * (x.ndim - 1))) for path, x in zip(*leaves_of_stacks, strict=True)
    }
    check_stacks(loss, setup, stacks, params, state.extra, batch, key, remove="the stages")
    epilogue = _Epilogue.of(loss, params, state.extra, batch, key, f"strategy {setup.strategy.label}")
    layers, others = chunked.partition(paths)
    context = NUMERICS.value
    assert context is not None

    def record(uses: LeafUses) -> None:
        context.stage_uses = StageUses(
            outputs=uses.outputs,
            first=frozenset(itertools.compress(others, uses.first)),
            last=frozenset(itertools.compress(others, uses.last)),
            reads=dict(zip(layers, uses.reads, strict=True)),
        )

    split, specs = chunked.split(params), chunked.specs(setup.layout.params)
    owned, messages, step = chunked.expert_specs(setup.layout.params, batch_axes), None, describe(setup, options)
    if step.formats is not None and batch_axes:
        leaves = Params(*chunked.partition([decision.leaf for decision in setup.table.params]))
        messages = StageMessages.of(
            leaves, split, specs, owned, key, setup=setup, precision=options.precision, step=step
        )
    run = StagedRun(
        functions=chunked.functions(loss, params, epilogue),
        schedule=schedule,
        mesh=setup.mesh,
        axis=pipeline.axis,
        batch_axes=batch_axes,
        gather=pipeline.gather,
        grad_dtype=options.precision.reduce_dtype,
        expert_specs=owned,
        messages=messages,
        activation_axes=_activation_axes(setup),
        record=record,
    )
    result_specs = chunked.specs(grad_specs(setup, options))
    if not chunked.is_even:
        # XLA lowers each of the two changes of the sharding to an all-to-all. For a single change it would gather the
        # full stacks and select layers.
        split = run.constrain(run.constrain(split, chunked.specs(setup.layout.params, at_rest=True)), specs)
    result, grads = run(split, batch, key, specs=specs, grad_specs=result_specs, extra=state.extra)
    if not chunked.is_even:
        grads = run.constrain(grads, chunked.specs(grad_specs(setup, options), at_rest=True))
    aux = {name: chunked.by_layer(x) for name, x in result.aux.items()}
    metrics, extra = epilogue(state.extra, aux)
    return MicrobatchTotals(result.loss, {**result.metrics, **metrics}, chunked.joined(grads), extra)


def compile_options(execution: Execution) -> Options:
    """Return XLA options that avoid copies of buffers, hide messages, and keep slices of the batch apart."""
    if execution.batch_slices > 1:
        return {**IN_PLACE, **APART}
    assert execution.pipeline is not None
    # The messages of a stage use other links than the collectives within it.
    is_uniform = uniform(execution.pipeline.table()) is not None
    return {**IN_PLACE, OVERLAP_LIMIT: 2} if is_uniform and execution.tensor_axes else IN_PLACE


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ChunkedModel:
    """Parameters and loss function of a model, divided into pipeline chunks, embedding and head."""

    structure: Any
    names: tuple[Names, ...]
    """Logical names of the dims of each parameter."""
    is_layer: tuple[bool, ...]
    """True for the parameters of the stacked layers."""
    is_frozen: tuple[bool, ...]
    counts: tuple[int, ...]
    """Number of layers of each chunk."""
    axis: str
    """Mesh axis of the stages."""

    @staticmethod
    def of(setup: Setup, schedule: Schedule, pipeline: Pipeline) -> _ChunkedModel:
        leaves = [decision.leaf for decision in setup.table.params]
        is_layer = tuple(leaf.is_stacked for leaf in leaves)
        counts = {leaf.shape[0] for leaf in leaves if leaf.is_stacked}
        if len(counts) != 1:
            where, requested = f"strategy {setup.strategy.label}", f"assign layers to {schedule.stages} stages"
            reason = "no parameter has a dim `layers`"
            fix = "name the first dim of stacked parameters `layers`, and run them with meshpar.scan_layers"
            if counts:
                reason = f"there are stacks of {' and '.join(map(str, sorted(counts)))} layers"
                fix = "run all layers as a single stack, in one call of meshpar.scan_layers, or remove the pipeline"
            raise problem(where, requested, reason, fix, code="conflict" if counts else "not-found")
        return _ChunkedModel(
            structure=jax.tree.structure(setup.layout.variables.params),
            names=tuple(leaf.names or () for leaf in leaves),
            is_layer=is_layer,
            is_frozen=setup.is_frozen,
            counts=pipeline.layers_of_parts(counts.pop(), schedule.num_parts),
            axis=pipeline.axis,
        )

    # -- Parameters ---------------------------------------------------------------------------------------------------

    def split(self, params: PyTree) -> Params:
        """Return two lists of leaves. Stacks become `[chunk, max layers of a chunk, ...]`."""
        stacks, embedding_and_head = self.partition(jax.tree.leaves(params))
        if self.is_even:
            return Params([x.reshape(len(self.counts), -1, *x.shape[1:]) for x in stacks], embedding_and_head)
        return Params([x[self.layer_indices] for x in stacks], embedding_and_head)

    def joined(self, params: Params) -> PyTree:
        """Return a tree with stacks `[layers, ...]` from the two lists of `split`, which may contain None."""
        return self._tree([None if x is None else self.by_layer(x) for x in params.chunks], params.embedding_and_head)

    def by_layer(self, x: jax.Array) -> jax.Array:
        """Reshape `[chunk, max layers of a chunk, ...]` to `[layers, ...]`, and remove the padding.

        An array with one value per chunk, `[chunk, 1, ...]`, becomes `[chunk, ...]`.
        """
        flat = x.reshape(-1, *x.shape[2:])
        if self.is_even or x.shape[1] != max(self.counts):
            return flat
        return flat[np.flatnonzero(np.arange(max(self.counts)) < np.asarray(self.counts)[:, None])]

    @property
    def is_even(self) -> bool:
        return len(set(self.counts)) == 1

    @property
    def unroll(self) -> int:
        """Number of layers in an iteration of the loop over the layers of a chunk: all if they are few."""
        return min(self.counts) if min(self.counts) <= MAX_UNROLLED else 1

    @property
    def layer_indices(self) -> np.ndarray:
        """Indices of the layers, `[chunk, max layers of a chunk]`. Shorter chunks repeat their last layer."""
        counts = np.asarray(self.counts)[:, None]
        return np.minimum(np.arange(counts.max()), counts - 1) + counts.cumsum()[:, None] - counts

    def specs(self, specs: PyTree, *, at_rest: bool = False) -> Params:
        """Return the specs of the lists that `split` returns.

        With `at_rest`, uneven chunks are sharded like the parameters between steps.
        """
        stacks, embedding_and_head = self.partition(jax.tree.leaves(specs, is_leaf=is_spec))
        if self.is_even:
            return Params([PartitionSpec(self.axis, None, *spec[1:]) for spec in stacks], embedding_and_head)
        first, removed = (None, ()) if at_rest else (self.axis, (self.axis,))
        chunks = [PartitionSpec(first, None, *without_axes(spec, removed)[1:]) for spec in stacks]
        return Params(chunks, embedding_and_head)

    def expert_specs(self, specs: PyTree, batch_axes: tuple[str, ...]) -> list[PartitionSpec]:
        """Return the specs of the stacks with only the batch axes that shard experts.

        Tokens travel to these experts. Routers are excluded, because every rank needs the scores of all experts.
        """

        def over_experts(spec: PartitionSpec, names: Names) -> PartitionSpec:
            if "expert" not in names or scores_experts(names):
                return PartitionSpec()
            dims = zip([*spec, *[None] * (len(names) - len(spec))], names, strict=True)
            axes = [[a for a in spec_axes(e) if a in batch_axes and name == "expert"] for e, name in dims]
            return PartitionSpec(None, None, *(tuple(dim_axes) or None for dim_axes in axes[1:]))

        leaves = jax.tree.leaves(specs, is_leaf=is_spec)
        return self.partition([over_experts(spec, names) for spec, names in zip(leaves, self.names, strict=True)])[0]

    def partition(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return two lists: the stacked leaves, and the leaves of embedding and head."""
        pairs = list(zip(leaves, self.is_layer, strict=True))
        return [x for x, is_layer in pairs if is_layer], [x for x, is_layer in pairs if not is_layer]

    def _tree(self, stacks: list[Any], embedding_and_head: list[Any]) -> PyTree:
        remaining = {True: iter(stacks), False: iter(embedding_and_head)}
        return jax.tree.unflatten(self.structure, [next(remaining[is_layer]) for is_layer in self.is_layer])

    def layers_of_chunk(self, inputs: PyTree, chunk: jax.Array) -> PyTree:
        """Select the layers of a chunk in arrays `[layers, ...]`. Arrays with another first dim are unchanged."""

        def select(x: jax.Array) -> jax.Array:
            if x.shape[:1] != (sum(self.counts),) or len(self.counts) == 1:
                return x
            if self.is_even:
                return jax.lax.dynamic_slice_in_dim(x, chunk * self.counts[0], self.counts[0])
            return x[jnp.asarray(self.layer_indices)[chunk]]

        return jax.tree.map(select, inputs)

    def run(self, layer: Layer, x: PyTree, inputs: PyTree, chunk: jax.Array) -> Any:
        """Run the layers of a chunk. With uneven chunks, `lax.cond` skips the padding."""
        inputs = self.layers_of_chunk(inputs, chunk)
        if self.is_even:
            return scanned(layer, x, inputs, unroll=self.unroll)
        least, most = min(self.counts), max(self.counts)
        count = jnp.asarray(self.counts)[chunk]
        x, aux = with_aux(scanned(layer, x, jax.tree.map(lambda p: p[:least], inputs), unroll=self.unroll))

        def run_or_skip(x: PyTree, indexed: tuple[jax.Array, PyTree]) -> Any:
            index, layer_inputs = indexed

            def run_layer(x: PyTree, layer_inputs: PyTree) -> Any:
                return with_aux(layer(x, layer_inputs))

            def skip(x: PyTree, layer_inputs: PyTree) -> Any:
                _, aux = jax.eval_shape(lambda: with_aux(layer(x, layer_inputs)))
                return x, _zeros(aux)

            return jax.lax.cond(index < count, run_layer, skip, x, layer_inputs)

        x, more = jax.lax.scan(run_or_skip, x, (jnp.arange(least, most), jax.tree.map(lambda p: p[least:], inputs)))
        if aux is None:
            return x
        metrics = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), aux.metrics, more.metrics)
        return x, Aux(aux.loss + more.loss.sum(0), metrics)

    # -- Functions ----------------------------------------------------------------------------------------------------

    def functions(self, loss: Loss, params: PyTree, epilogue: _Epilogue) -> Functions:
        """Return the functions of the stages. Each receives zeros for the parameters that it does not use."""
        like = jax.eval_shape(self.split, params)
        chunk_like = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in like.chunks]

        def traced(chunk: list[Any], embedding_and_head: list[Any], inputs: MicrobatchInputs, run: Any) -> LossTerms:
            calls: list[Any] = []

            def counted(layer: Layer, x: Any, params: PyTree) -> Any:
                calls.append(x)
                return run(layer, x, params)

            with running(StageRunner(counted, in_part=True)):
                params = self._tree(chunk, embedding_and_head)
                terms, _ = loss.terms(params, inputs.extra, inputs.examples, inputs.key)
            _check_single_call(len(calls))
            return terms

        def first(embedding_and_head: list[Any], inputs: MicrobatchInputs) -> PyTree:
            outputs: list[Any] = []

            def run(layer: Layer, x: Any, params: PyTree) -> Any:
                outputs.append(x)
                return epilogue.with_zeros(x)

            traced(_zeros(chunk_like), embedding_and_head, inputs, run)
            return outputs[0]

        def inside(chunk: list[Any], embedding_and_head: list[Any], x: PyTree, inputs: MicrobatchInputs) -> Any:
            outputs: list[Any] = []

            def run(layer: Layer, before: Any, params: PyTree) -> Any:
                outputs.append(self.run(layer, x, params, inputs.chunk))
                return epilogue.with_zeros(x)

            traced(chunk, embedding_and_head, inputs, run)
            return outputs[0]

        def stage(chunk: list[Any], x: PyTree, inputs: MicrobatchInputs) -> tuple[PyTree, Aux]:
            y, aux = with_aux(inside(chunk, _zeros(like.embedding_and_head), x, inputs))
            return y, epilogue.aux_of_chunk(aux)

        def last(embedding_and_head: list[Any], y: PyTree, inputs: MicrobatchInputs) -> LossTerms:
            def run(layer: Layer, x: Any, params: PyTree) -> Any:
                return epilogue.with_zeros(y)

            terms = traced(_zeros(chunk_like), embedding_and_head, inputs, run)
            metrics, reported = (
                {name: x for name, x in metrics.items() if name not in epilogue.metrics}
                for metrics in (terms.metrics, terms.reported)
            )
            return dataclasses.replace(terms, metrics=metrics, reported=reported)

        is_trained = [not is_frozen for is_frozen in self.is_frozen]
        trained = None if all(is_trained) else Params(*self.partition(is_trained))
        return Functions(first=first, stage=stage, last=last, inside=inside, trained=trained)


# ---- Uses of the layers' Aux -----------------------------------------------------------------------------------------

_LOSS = "aux.loss"
"""Name of the auxiliary loss among the metrics of the layers."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Epilogue:
    """The computations of a model and its loss function that use the `Aux` of all layers.

    They run once, after all microbatches. In the stages the `Aux` is replaced by zeros.
    """

    aux: Aux | None
    """Shapes of the `Aux` that `scan_layers` returns."""
    metrics: frozenset[str]
    """Names of the metrics that use the `Aux`."""
    share: jax.Array | float
    """The constant by which the loss function multiplies the auxiliary loss."""
    _run: Callable[[PyTree, Aux | None], tuple[dict[str, jax.Array], PyTree]]

    @staticmethod
    def of(loss: Loss, params: PyTree, extra: PyTree, batch: PyTree, key: jax.Array, where: str) -> _Epilogue:
        """Trace a loss function, and extract the computations that use the `Aux` of all layers."""
        y, aux = _results_of_layers(loss, params, extra, batch, key)
        if aux is None and not jax.tree.leaves(extra):
            return _Epilogue(aux=None, metrics=frozenset(), share=0.0, _run=lambda extra, aux: ({}, extra))

        def traced(extra: PyTree, aux: Aux | None, others: tuple[PyTree, ...]) -> tuple[Any, ...]:
            params, y, examples, key_data = others
            result = y if aux is None else (y, aux)
            with running(StageRunner(lambda layer, x, params: result, in_part=True)):
                terms, after = loss.terms(params, extra, examples, jax.random.wrap_key_data(key_data))
            is_weighted.append(isinstance(terms.loss, MeanLoss))
            value, _ = terms.normalized()
            # The weight of the loss depends on the examples, so metrics of the Aux are not weighted.
            _, metrics = dataclasses.replace(terms, loss=ScalarLoss(value)).normalized()
            return value, metrics, after

        args = (extra, aux, (params, y, batch, jax.random.key_data(key)))
        is_weighted: list[bool] = []
        closed, results = flat_jaxpr(traced, *args)
        _, metrics, after = results
        dependencies = _Dependencies(closed, args, results)
        aux_metrics = [name for name in metrics if dependencies.on_aux[1][name]]
        dependencies.check(where, aux_metrics)
        share: jax.Array | float = 0.0 if aux is None else _loss_share(traced, args, where, is_weighted=is_weighted[-1])
        is_needed = [False, *(name in aux_metrics for name in metrics), *[True] * len(jax.tree.leaves(after))]
        partial_eval = PartialEval(closed, known=is_needed)

        def run(extra: PyTree, aux: Aux | None) -> tuple[dict[str, jax.Array], PyTree]:
            leaves = jax.tree.leaves((extra, aux))
            out, _ = partial_eval.run_known([*leaves, *[None] * (len(closed.jaxpr.invars) - len(leaves))])
            _, metrics, after_step = jax.tree.unflatten(jax.tree.structure(results), out)
            return {name: metrics[name] for name in aux_metrics}, after_step

        return _Epilogue(aux=aux, metrics=frozenset(aux_metrics), share=share, _run=run)

    def with_zeros(self, y: Any) -> Any:
        """Return `y`, or if the layers have an `Aux`, a tuple of `y` and an `Aux` of zeros, as from `scan_layers`."""
        return y if self.aux is None else (y, _zeros(self.aux))

    def aux_of_chunk(self, aux: Aux | None) -> Aux:
        """Return the `Aux` of a chunk with the loss times `share`, and the original loss as an additional metric."""
        if aux is None:
            return Aux(jnp.zeros((), jnp.float32), {})
        # The first dim is the layer, as in the metrics.
        return Aux(aux.loss * self.share, {**aux.metrics, _LOSS: aux.loss[None]})

    def __call__(self, extra: PyTree, totals: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], PyTree]:
        """Return metrics and new variables. `totals` has the metrics of the layers, `[layers, ...]`."""
        if self.aux is None:
            return self._run(extra, None)
        metrics = {name: totals[name].astype(x.dtype) for name, x in self.aux.metrics.items()}
        return self._run(extra, Aux(totals[_LOSS].sum().astype(self.aux.loss.dtype), metrics))


def _results_of_layers(loss: Loss, params: PyTree, extra: PyTree, batch: PyTree, key: jax.Array) -> Any:
    """Return the shapes of the output of the layers and of their `Aux`, or None if they have no `Aux`."""
    results: list[Any] = []

    def run(layer: Layer, x: Any, params: PyTree) -> Any:
        y, aux = jax.eval_shape(lambda x, params: with_aux(scanned(layer, x, params)), x, params)
        results.append((y, aux))
        return x if aux is None else (x, _zeros(aux))

    def traced(params: PyTree, extra: PyTree, batch: PyTree, key_data: jax.Array) -> Any:
        with running(StageRunner(run)):
            return loss(params, extra, batch, jax.random.wrap_key_data(key_data))

    jax.eval_shape(traced, params, extra, batch, jax.random.key_data(key))
    _check_single_call(len(results))
    return results[0]


class _Dependencies:
    """Dependencies of the loss, metrics and variables on the layers' `Aux` and on values of single microbatches."""

    def __init__(self, closed: Any, args: tuple[PyTree, Any, PyTree], results: tuple[Any, ...]) -> None:
        counts = [len(jax.tree.leaves(arg)) for arg in args]

        def dependent(*groups: bool) -> Any:
            marked = [mark for mark, count in zip(groups, counts, strict=True) for _ in range(count)]
            return jax.tree.unflatten(jax.tree.structure(results), depends(closed.jaxpr, marked))

        self.on_aux, self.on_others = dependent(False, True, False), dependent(False, False, True)
        num_losses = 0 if args[1] is None else len(jax.tree.leaves(args[1].loss))
        is_metric = [False] * (counts[0] + num_losses) + [True] * (counts[1] - num_losses) + [False] * counts[2]
        self.loss_on_metrics = depends(closed.jaxpr, is_metric)[0]

    def check(self, where: str, aux_metrics: list[str]) -> None:
        """Check that no result combines the `Aux` of all microbatches with values of a single microbatch."""
        mixed = [f"metric `{name}`" for name in aux_metrics if self.on_others[1][name]]
        updated = [f"`{path}` of the model" for path, is_used in tree_leaves_with_paths(self.on_others[2]) if is_used]
        for names, requested, reason, fix in (
            (mixed, "combine the layers' Aux with other values", "the Aux is complete only after all microbatches",
             "use only the Aux, constants, and the values that the model's variables had before the step"),
            (updated, "update a variable in each microbatch", "stages run microbatches in different orders",
             "compute it from the Aux that meshpar.scan_layers returns, or remove it"),
            (["the loss"] * self.loss_on_metrics, "use the metrics in the layers' Aux",
             "metrics have no gradient, and are complete only after all microbatches", "add the value to Aux.loss"),
        ):  # fmt: skip
            for name in names:
                check_cases(f"{name} under {where}", requested, "unsupported-feature", (True, reason, fix))


def _loss_share(
    traced: Callable[..., Any], args: tuple[PyTree, Any, PyTree], where: str, *, is_weighted: bool
) -> jax.Array:
    """Return the constant factor of the auxiliary loss in the loss, the first result of `traced`."""

    def slope(extra: PyTree, aux: Aux, others: PyTree) -> Any:
        return jax.grad(lambda loss: traced(extra, aux._replace(loss=loss), others)[0])(aux.loss), ()

    closed, _ = flat_jaxpr(slope, *args)
    num_inputs = len(closed.jaxpr.invars)
    if depends(closed.jaxpr, [True] * num_inputs)[0]:
        reason = "its derivative with respect to the auxiliary loss is not constant, but the stages need it in advance"
        fix = "write `loss + aux.loss`, or multiply aux.loss by a constant"
        if is_weighted:
            reason = "`MeanLoss` divides its total, with the auxiliary loss in it, by the weight of the batch"
            fix = "remove it from the total, and call `meshpar.layers.auxiliary.report(loss=aux.loss)` instead"
        where, requested = f"the loss under {where}", "use the layers' auxiliary loss"
        raise problem(where, requested, reason, fix, code="unsupported-feature")
    return PartialEval(closed, known=[True]).run_known([None] * num_inputs)[0][0]


def _zeros(like: PyTree) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def _check_single_call(calls: int) -> None:
    reason, fix = f"it calls meshpar.scan_layers {calls or 'no'} times", "run all layers of the stages in one call"
    where, requested = "the model under pipeline_parallel", "divide it into stages"
    check_cases(where, requested, "unsupported-feature", (calls != 1, reason, fix))


def _check(setup: Setup, schedule: Schedule, pipeline: Pipeline) -> None:
    where, axis = f"strategy {setup.strategy.label}", pipeline.axis
    requested = f"run {schedule.stages} stages over mesh axis `{axis}`"
    case = axis in setup.batch_axes, "that axis shards the batch", "use a separate mesh axis: MeshSpec(stage=...)"
    check_cases(where, requested, "axis-used-twice", case)
    check_cases(
        where, requested, "conflict",
        (schedule.microbatches != pipeline.microbatches,
         f"schedule `{pipeline.schedule}` runs {schedule.microbatches} microbatches, not {pipeline.microbatches}",
         f"write pipeline_parallel(microbatches={schedule.microbatches}, ...), or use another schedule file"),
        (setup.sizes.get(axis) != schedule.stages, f"the mesh has sizes {setup.sizes}",
         f"write MeshSpec({axis}={schedule.stages}, ...), or change pipeline_parallel(stages=...)"),
    )  # fmt: skip
    case = (
        setup.strategy.gathering.formats is not None and pipeline.gather == "microbatch",
        "stages gather quantized weights once per step, and keep them", 'use gather="step", or remove quantize',
    )  # fmt: skip
    check_cases(where, 'quantize the gathers of gather="microbatch"', "conflict", case)
    for path in sorted(setup.model.random_keys()):
        reason = "a random stream of the model would repeat its numbers in all microbatches"
        fix = "draw random numbers from the key that the loss function receives"
        requested = "draw random numbers in each microbatch"
        raise problem(f"`{path}` of the model under {where}", requested, reason, fix, code="unsupported-feature")


def _activation_axes(setup: Setup) -> tuple[str, ...]:
    """Return the mesh axes, other than batch axes, that shard the activations between layers."""
    axes: list[str] = []
    for names in (("batch", "norm_seq", "act_embed"), ("batch", "seq", "act_embed")):
        like = Leaf(path="activations", shape=(setup.mesh.size,) * 3, dtype=np.dtype(np.float32), names=names)
        for entry in resolve(like, setup.strategy.activations, setup.mesh).spec[1:]:
            axes += [axis for axis in spec_axes(entry) if setup.sizes[axis] > 1]
    return tuple(dict.fromkeys(axes))


def describe(setup: Sharded, options: StepOptions) -> Execution:
    """Describe a pipelined step."""
    gathering = LayerGather(formats=setup.strategy.gathering.formats)
    return described(setup, options, pipeline=setup.strategy.pipeline, gathers_once=True, gathering=gathering)


ENGINE = GradientEngine(gradients, supports=frozenset(), describe=describe, compile_options=compile_options)
