"""A training step's loss run by stages: the user's loss function, cut where the model runs its stacked layers.

    loss_fn(model, batch, key):   embedding ─► scan_layers ─► head, loss
                                  first part │  each stage  │ last part

The loss function is traced several times. Before the layers and behind them it is traced as it is, with the layers
left out; inside, with the layers of one part. What it makes of the layers' Aux is cut out of it and done behind the
loop over ticks. Nobody has to write a model in pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.hardware.compile_options import APART, IN_PLACE, Options
from meshpar.layers.losses import Loss, LossTerms, MeanLoss, MicrobatchTotals, ScalarLoss
from meshpar.layers.scan import Aux, Layer, Run, running, scanned, with_aux
from meshpar.parallel.batch import check_rows
from meshpar.parallel.pipeline import Pipeline as PipelinePart
from meshpar.pipeline.executor import Functions, MicrobatchInputs, Params, split_stage
from meshpar.pipeline.gradients import StagedRun
from meshpar.pipeline.jaxpr_slicing import Cut, depends, flat_jaxpr
from meshpar.schedules import Schedule
from meshpar.sharding.rules import resolve
from meshpar.sharding.types import (
    Leaf,
    Names,
    PyTree,
    axis_sizes,
    is_spec,
    problem,
    scores_experts,
    spec_axes,
    tree_leaves_with_paths,
    without_axes,
)
from meshpar.training.accumulation import compute_params, grad_specs
from meshpar.training.gradients.engine import GradientEngine
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState


def gradients(loss: Loss, options: StepOptions, state: TrainState, batch: PyTree, key: jax.Array) -> MicrobatchTotals:
    """Loss, metrics and gradients over a batch, means of microbatches, which take the place of micro-steps.

    Args:
      loss: of whole models.
      options: of the step.
      state: whose strategy has stages.
      batch, key: as a step gets them.

    Raises:
      ValueError: options or a strategy that stages cannot do; a model whose layers are not stacked, or not run by
        `meshpar.scan_layers`; fewer layers than the schedule has parts; rows that the microbatches do not
        divide; uses of an Aux that `scan_layers` has none for.
    """
    params = compute_params(state.setup, state.params, options.precision.compute)
    batch_axes = state.setup.batch_axes
    setup, pipelined = state.setup, state.setup.strategy.pipeline
    assert pipelined is not None
    schedule = pipelined.table()
    _check(setup, schedule, pipelined, batch_axes)
    sizes = axis_sizes(setup.mesh)
    count, slices = schedule.microbatches, options.interleave
    what = "microbatches" if slices == 1 else f"slices (microbatches={count}, interleave={slices})"
    check_rows(batch, {axis: sizes[axis] for axis in batch_axes}, count * slices, what)
    cut = _Cut.of(setup, schedule, pipelined)
    behind = _Behind.of(loss, params, state.extra, batch, key, f"strategy {setup.strategy.label}")
    run = StagedRun(
        functions=cut.functions(loss, params, behind),
        schedule=schedule,
        mesh=setup.mesh,
        axis=pipelined.axis,
        batch_axes=batch_axes,
        gather=pipelined.gather,
        grad_dtype=options.precision.reduce_dtype,
        expert_specs=cut.own(setup.layout.params, batch_axes),
        activation_axes=_split_inside(setup),
    )
    specs, out = cut.specs(setup.layout.params), cut.specs(grad_specs(setup, options))
    parted = cut.parted(params)
    if not cut.is_even:
        # One change at a time, for which XLA has an all-to-all: else it gathers whole stacks and picks layers.
        parted = run.constrain(run.constrain(parted, cut.specs(setup.layout.params, at_rest=True)), specs)
    result, grads = run(parted, batch, key, specs=specs, grad_specs=out, extra=state.extra)
    if not cut.is_even:
        grads = run.constrain(grads, cut.specs(grad_specs(setup, options), at_rest=True))
    aux = {name: cut.by_layer(x) for name, x in result.aux.items()}
    metrics, extra = behind(state.extra, aux)
    return MicrobatchTotals(result.loss, {**result.metrics, **metrics}, cut.joined(grads), extra)


def compile_options(setup: Setup, options: StepOptions) -> Options:
    """What keeps a stage's buffers in their place; and slices of the rows apart, as `prefetch.compile_options` says."""
    if options.interleave == 1:
        return IN_PLACE
    return {**IN_PLACE, **APART}


def reads_of_layers(
    loss: Loss, setup: Setup, params: PyTree, extra: PyTree, rows: PyTree, key: jax.Array
) -> dict[str, tuple[bool, bool, bool]]:
    """By path, whether the F, the B and the W of a microbatch read the values of a parameter of the layers.

    Args:
      loss, setup: as `gradients` has them.
      params: shapes, in the compute dtype.
      extra, rows, key: shapes, of one microbatch on one device; the key's numbers.
    """
    pipelined = setup.strategy.pipeline
    assert pipelined is not None
    cut = _Cut.of(setup, pipelined.table(), pipelined)

    def traced(params: PyTree, extra: PyTree, rows: PyTree, data: jax.Array) -> tuple[()]:
        key = jax.random.wrap_key_data(data)
        behind = _Behind.of(loss, params, extra, rows, key, f"strategy {setup.strategy.label}")
        functions, parted = cut.functions(loss, params, behind), cut.parted(params)
        micro = MicrobatchInputs(rows, key, jnp.zeros((), jnp.int32), extra)
        x = functions.first(parted.embedding_and_head, micro)
        found.extend(split_stage(functions, [leaf[0] for leaf in parted.chunks], x, micro).reads)
        return ()

    found: list[tuple[bool, bool, bool]] = []
    jax.eval_shape(traced, params, extra, rows, key)
    paths, _ = cut._sorted([decision.path for decision in setup.table.params])
    return dict(zip(paths, found, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """A model's parameters as those of stacked layers, by part, and the others."""

    structure: Any
    names: tuple[Names, ...]
    """Of each leaf."""
    is_layer: tuple[bool, ...]
    """Likewise."""
    is_frozen: tuple[bool, ...]
    """Likewise."""
    counts: tuple[int, ...]
    """Layers of each part."""
    axis: str

    @staticmethod
    def of(setup: Setup, schedule: Schedule, pipelined: PipelinePart) -> _Cut:
        leaves = [decision.leaf for decision in setup.table.params]
        is_layer = tuple(leaf.is_stacked for leaf in leaves)
        stacked = [leaf for leaf, stack in zip(leaves, is_layer, strict=True) if stack]
        counts = {leaf.shape[0] for leaf in stacked}
        where = f"strategy {setup.strategy.label}"
        if len(counts) != 1:
            raise problem(
                where,
                f"give layers to {schedule.stages} stages",
                f"there are stacks of {sorted(counts)} layers" if counts else "no parameter has a dim named `layers`",
                "stack the layers' parameters along a first dim named `layers`, by metadata or a path rule "
                'mp.names("layers", ...), and run them by meshpar.scan_layers',
            )
        return _Cut(
            structure=jax.tree.structure(setup.layout.variables.params),
            names=tuple(leaf.names or () for leaf in leaves),
            is_layer=is_layer,
            is_frozen=setup.is_frozen,
            counts=pipelined.layers_of_parts(counts.pop(), schedule.num_parts),
            axis=pipelined.axis,
        )

    # -- Trees --------------------------------------------------------------------------------------------------------

    def parted(self, params: PyTree) -> Params:
        """Lists of leaves; stacks as `[part, most layers of a part, ...]`."""
        stacks, ends = self._sorted(jax.tree.leaves(params))
        if self.is_even:
            return Params([x.reshape(len(self.counts), -1, *x.shape[1:]) for x in stacks], ends)
        return Params([x[self.rows] for x in stacks], ends)

    def joined(self, params: Params) -> PyTree:
        """`parted` undone; None stays where there is nothing."""
        return self._tree([None if x is None else self.by_layer(x) for x in params.chunks], params.embedding_and_head)

    def by_layer(self, x: jax.Array) -> jax.Array:
        """`[part, most layers of a part, ...] -> [layers, ...]`, without rows that fill up; of `[part, 1, ...]` all."""
        flat = x.reshape(-1, *x.shape[2:])
        if self.is_even or x.shape[1] != max(self.counts):
            return flat
        return flat[np.flatnonzero(np.arange(max(self.counts)) < np.asarray(self.counts)[:, None])]

    @property
    def is_even(self) -> bool:
        return len(set(self.counts)) == 1

    @property
    def rows(self) -> np.ndarray:
        """`[part, most layers of a part]`: which layer that is. A shorter part is filled up with its last one, which is
        not run."""
        counts = np.asarray(self.counts)[:, None]
        return np.minimum(np.arange(counts.max()), counts - 1) + counts.cumsum()[:, None] - counts

    def specs(self, specs: PyTree, *, at_rest: bool = False) -> Params:
        """Of the same lists, by stage; or, of parts that are not equal, as between steps."""
        stacks, ends = self._sorted(jax.tree.leaves(specs, is_leaf=is_spec))
        if self.is_even:
            return Params([PartitionSpec(self.axis, None, *spec[1:]) for spec in stacks], ends)
        first, gone = (None, ()) if at_rest else (self.axis, (self.axis,))
        return Params([PartitionSpec(first, None, *without_axes(spec, gone)[1:]) for spec in stacks], ends)

    def own(self, specs: PyTree, batch_axes: tuple[str, ...]) -> list[PartitionSpec]:
        """Of the stacks, over which axes of the batch a rank has experts of its own: tokens travel to them.

        A router is no expert's: every rank scores all of them, so it is gathered and its gradient summed.
        """

        def experts(spec: PartitionSpec, names: Names) -> PartitionSpec:
            if "expert" not in names or scores_experts(names):
                return PartitionSpec()
            entries = [*spec, *[None] * (len(names) - len(spec))]
            of = zip(entries, names, strict=True)
            kept = [[a for a in spec_axes(e) if a in batch_axes and name == "expert"] for e, name in of]
            return PartitionSpec(None, None, *(tuple(axes) or None for axes in kept[1:]))

        leaves = jax.tree.leaves(specs, is_leaf=is_spec)
        return self._sorted([experts(*of) for of in zip(leaves, self.names, strict=True)])[0]

    def _sorted(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        both = list(zip(leaves, self.is_layer, strict=True))
        return [x for x, stack in both if stack], [x for x, stack in both if not stack]

    def _tree(self, stacks: list[Any], ends: list[Any]) -> PyTree:
        of = {True: iter(stacks), False: iter(ends)}
        return jax.tree.unflatten(self.structure, [next(of[stack]) for stack in self.is_layer])

    def rows_of(self, params: PyTree, part: jax.Array) -> PyTree:
        """Of what has a row for every layer of the model, those of a part; the part's parameters are that already."""

        def cut(x: jax.Array) -> jax.Array:
            if x.shape[:1] != (sum(self.counts),) or len(self.counts) == 1:
                return x
            if self.is_even:
                return jax.lax.dynamic_slice_in_dim(x, part * self.counts[0], self.counts[0])
            return x[jnp.asarray(self.rows)[part]]

        return jax.tree.map(cut, params)

    def run(self, layer: Layer, x: PyTree, params: PyTree, part: jax.Array) -> Any:
        """The layers of a part. Those that only some parts have are chosen at run time, where it is one of these."""
        own = self.rows_of(params, part)
        if self.is_even:
            return scanned(layer, x, own)
        least, most = min(self.counts), max(self.counts)
        count = jnp.asarray(self.counts)[part]
        x, aux = with_aux(scanned(layer, x, jax.tree.map(lambda p: p[:least], own)))

        def chosen(x: PyTree, given: tuple[jax.Array, PyTree]) -> Any:
            number, one = given

            def left_out(x: PyTree, one: PyTree) -> Any:
                _, aux = jax.eval_shape(lambda: with_aux(layer(x, one)))
                return x, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), aux)

            return jax.lax.cond(number < count, lambda x, one: with_aux(layer(x, one)), left_out, x, one)

        x, more = jax.lax.scan(chosen, x, (jnp.arange(least, most), jax.tree.map(lambda p: p[least:], own)))
        if aux is None:
            return x
        metrics = jax.tree.map(lambda *both: jnp.concatenate(both), aux.metrics, more.metrics)
        return x, Aux(aux.loss + more.loss.sum(0), metrics)

    # -- Functions ----------------------------------------------------------------------------------------------------

    def functions(self, loss: Loss, params: PyTree, behind: _Behind) -> Functions:
        """The parts of a loss. Parameters for which a part has no use are zeros in it, which nothing computes with."""
        like = jax.eval_shape(self.parted, params)
        no_parts = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in like.chunks]

        def traced(parts: list[Any], ends: list[Any], micro: MicrobatchInputs, run: Run) -> LossTerms:
            calls: list[Any] = []

            def counted(layer: Layer, x: Any, params: PyTree) -> Any:
                calls.append(x)
                return run(layer, x, params)

            with running(counted, in_part=True):
                terms, _ = loss.terms(self._tree(parts, ends), micro.extra, micro.examples, micro.key)
            _check_once(len(calls))
            return terms

        def first(ends: list[Any], micro: MicrobatchInputs) -> PyTree:
            got: list[Any] = []

            def run(layer: Layer, x: Any, params: PyTree) -> Any:
                got.append(x)
                return behind.zeros(x)

            traced(_zeros(no_parts), ends, micro, run)
            return got[0]

        def inside(parts: list[Any], ends: list[Any], x: PyTree, micro: MicrobatchInputs) -> Any:
            got: list[Any] = []

            def run(layer: Layer, before: Any, params: PyTree) -> Any:
                got.append(self.run(layer, x, params, micro.chunk))
                return behind.zeros(x)

            traced(parts, ends, micro, run)
            return got[0]

        def stage(parts: list[Any], x: PyTree, micro: MicrobatchInputs) -> tuple[PyTree, Aux]:
            y, aux = with_aux(inside(parts, _zeros(like.embedding_and_head), x, micro))
            return y, behind.of_part(aux)

        def last(ends: list[Any], y: PyTree, micro: MicrobatchInputs) -> LossTerms:
            terms = traced(_zeros(no_parts), ends, micro, lambda layer, x, params: behind.zeros(y))
            metrics, reported = (
                {name: x for name, x in metrics.items() if name not in behind.metrics}
                for metrics in (terms.metrics, terms.reported)
            )
            return dataclasses.replace(terms, metrics=metrics, reported=reported)

        trained = Params(*self._sorted([not one for one in self.is_frozen])) if any(self.is_frozen) else None
        return Functions(first=first, stage=stage, last=last, inside=inside, trained=trained)


# ---- Behind the loop -------------------------------------------------------------------------------------------------

_LOSS = "aux.loss"
"""Name of the layers' auxiliary loss among their metrics; no name that a layer would take."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Behind:
    """What a model and its loss function make of the Aux of all layers, cut out of the loss function.

    Worked out once, when all microbatches are through; inside the loop the Aux is zeros.
    """

    aux: Aux | None
    """Shapes of what `scan_layers` gives."""
    metrics: frozenset[str]
    """Names of those that are made of it."""
    share: jax.Array | float
    """Of the auxiliary loss in the loss."""
    _rest: Callable[[PyTree, Aux | None], tuple[dict[str, jax.Array], PyTree]]

    @staticmethod
    def of(loss: Loss, params: PyTree, extra: PyTree, batch: PyTree, key: jax.Array, where: str) -> _Behind:
        """Raises ValueError where a microbatch's own numbers and the Aux of all are mixed."""
        y, aux = _results_of_layers(loss, params, extra, batch, key)
        if aux is None and not jax.tree.leaves(extra):
            return _Behind(aux=None, metrics=frozenset(), share=0.0, _rest=lambda extra, aux: ({}, extra))

        def traced(extra: PyTree, aux: Aux | None, others: tuple[PyTree, ...]) -> tuple[Any, ...]:
            params, y, rows, data = others
            with running(lambda layer, x, params: y if aux is None else (y, aux), in_part=True):
                terms, after = loss.terms(params, extra, rows, jax.random.wrap_key_data(data))
            is_weighted.append(isinstance(terms.loss, MeanLoss))
            value, _ = terms.normalized()
            # Metrics of the Aux are not weighted: they would depend on the examples.
            _, metrics = dataclasses.replace(terms, loss=ScalarLoss(value)).normalized()
            return value, metrics, after

        given = (extra, aux, (params, y, batch, jax.random.key_data(key)))
        is_weighted: list[bool] = []
        closed, (value, metrics, after) = flat_jaxpr(traced, *given)
        marks = _Marks(closed, given, (value, metrics, after))
        made_of_aux = marks.names(metrics)
        marks.check(where, made_of_aux)
        share: jax.Array | float = 0.0 if aux is None else _share(traced, given, where, is_weighted=is_weighted[-1])
        wanted = [False, *(name in made_of_aux for name in metrics), *[True] * len(jax.tree.leaves(after))]
        cut = Cut(closed, first=wanted)

        def rest(extra: PyTree, aux: Aux | None) -> tuple[dict[str, jax.Array], PyTree]:
            own = jax.tree.leaves((extra, aux))
            out, _ = cut.run_first([*own, *[None] * (len(closed.jaxpr.invars) - len(own))])
            _, told, after_step = jax.tree.unflatten(jax.tree.structure((value, metrics, after)), out)
            return {name: told[name] for name in made_of_aux}, after_step

        return _Behind(aux=aux, metrics=frozenset(made_of_aux), share=share, _rest=rest)

    def zeros(self, y: Any) -> Any:
        """What `scan_layers` gives inside the loop."""
        if self.aux is None:
            return y
        return y, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.aux)

    def of_part(self, aux: Aux | None) -> Aux:
        """What goes with a part's output."""
        if aux is None:
            return Aux(jnp.zeros((), jnp.float32), {})
        # As an array of the layers, so that it comes out as the metrics do.
        return Aux(aux.loss * self.share, {**aux.metrics, _LOSS: aux.loss[None]})

    def __call__(self, extra: PyTree, told: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], PyTree]:
        """Metrics and what the model keeps, of the metrics of all layers, `[layers, ...]`."""
        if self.aux is None:
            return self._rest(extra, None)
        metrics = {name: told[name].astype(x.dtype) for name, x in self.aux.metrics.items()}
        return self._rest(extra, Aux(told[_LOSS].sum().astype(self.aux.loss.dtype), metrics))


def _results_of_layers(loss: Loss, params: PyTree, extra: PyTree, batch: PyTree, key: jax.Array) -> Any:
    """Shapes: (y, Aux of all layers or None)."""
    got: list[Any] = []

    def run(layer: Layer, x: Any, params: PyTree) -> Any:
        y, aux = jax.eval_shape(lambda x, params: with_aux(scanned(layer, x, params)), x, params)
        got.append((y, aux))
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), aux)
        return x if aux is None else (x, zeros)

    def traced(params: PyTree, extra: PyTree, batch: PyTree, data: jax.Array) -> Any:
        with running(run):
            return loss(params, extra, batch, jax.random.wrap_key_data(data))

    jax.eval_shape(traced, params, extra, batch, jax.random.key_data(key))
    _check_once(len(got))
    return got[0]


class _Marks:
    """What of a loss function's results depends on the layers' Aux, and what on what microbatches differ in."""

    def __init__(self, closed: Any, given: tuple[PyTree, Any, PyTree], out: tuple[Any, ...]) -> None:
        counts = [len(jax.tree.leaves(part)) for part in given]

        def dependent(*groups: bool) -> Any:
            marked = [mark for mark, count in zip(groups, counts, strict=True) for _ in range(count)]
            return jax.tree.unflatten(jax.tree.structure(out), depends(closed.jaxpr, marked))

        self.on_aux, self.on_others = dependent(False, True, False), dependent(False, False, True)
        loss_only = 0 if given[1] is None else len(jax.tree.leaves(given[1].loss))
        not_loss = [False] * (counts[0] + loss_only) + [True] * (counts[1] - loss_only) + [False] * counts[2]
        self.loss_on_metrics = depends(closed.jaxpr, not_loss)[0]

    def names(self, metrics: dict[str, Any]) -> list[str]:
        """Of the metrics that are made of the Aux."""
        return [name for name in metrics if self.on_aux[1][name]]

    def check(self, where: str, made_of_aux: list[str]) -> None:
        """Raises ValueError where both are mixed."""
        fix = "make it of the Aux, constants and the model's variables before the step alone"
        mixed = "only of single microbatches are both there, and only the last stage has these"
        for name in made_of_aux:
            if self.on_others[1][name]:
                raise problem(f"metric `{name}` under {where}", "be made of the layers' Aux and more", mixed, fix)
        for path, depends_on_rows in tree_leaves_with_paths(self.on_others[2]):
            if depends_on_rows:
                raise problem(
                    f"`{path}` of the model under {where}",
                    "be carried from microbatch to microbatch",
                    "stages run microbatches in an order of their own, and none sees them all in time",
                    "make it of the Aux that meshpar.scan_layers gives, or leave it out",
                )
        if self.loss_on_metrics:
            raise problem(
                f"the loss under {where}",
                "be made of the metrics in the layers' Aux",
                "no gradient passes through them, and no stage has them in time",
                "add what they are to add to Aux.loss, in the layer",
            )


def _share(
    traced: Callable[..., Any], given: tuple[PyTree, Any, PyTree], where: str, *, is_weighted: bool
) -> jax.Array:
    """Return the constant factor of the auxiliary loss in the loss. `is_weighted`: the loss is a `MeanLoss`."""

    def slope(extra: PyTree, aux: Aux, others: PyTree) -> Any:
        return jax.grad(lambda loss: traced(extra, aux._replace(loss=loss), others)[0])(aux.loss), ()

    closed, _ = flat_jaxpr(slope, *given)
    if depends(closed.jaxpr, [True] * len(closed.jaxpr.invars))[0]:
        exists = "its derivative by that is no constant, and no other stage would know it in time"
        fix = "write `loss + aux.loss`, or times a constant"
        if is_weighted:
            exists = "`MeanLoss` divides its total by the weight of the batch, also the auxiliary loss in it"
            fix = "leave it out of the total, and call `meshpar.layers.auxiliary.report(loss=aux.loss)` instead"
        raise problem(f"the loss under {where}", "be made of the layers' auxiliary loss", exists, fix)
    return Cut(closed, first=[True]).run_first([None] * len(closed.jaxpr.invars))[0][0]


# ---- What can be run -------------------------------------------------------------------------------------------------


def _zeros(like: list[Any]) -> list[Any]:
    return [jnp.zeros(x.shape, x.dtype) for x in like]


def _check_once(calls: int) -> None:
    if calls != 1:
        exists = f"it calls meshpar.scan_layers {calls or 'no'} times"
        fix = "run the layers that stages are to share by one call of it"
        raise problem("the model under pipeline_parallel", "be cut where it runs its stacked layers", exists, fix)


def _check(setup: Setup, schedule: Schedule, pipelined: PipelinePart, batch_axes: tuple[str, ...]) -> None:
    where, sizes = f"strategy {setup.strategy.label}", axis_sizes(setup.mesh)
    if pipelined.axis in batch_axes:
        fix = "give the stages one of their own: MeshSpec(stage=...)"
        raise problem(where, f"run stages over mesh axis `{pipelined.axis}`", "that axis splits the batch", fix)
    if schedule.microbatches != pipelined.microbatches:
        asked = f"cut the batch into {pipelined.microbatches} microbatches"
        fix = f"write pipeline_parallel(microbatches={schedule.microbatches}, ...), or give another file"
        raise problem(where, asked, f"schedule `{pipelined.schedule}` runs {schedule.microbatches}", fix)
    if sizes.get(pipelined.axis) != schedule.stages:
        asked = f"run {schedule.stages} stages over mesh axis `{pipelined.axis}`"
        fix = f"write MeshSpec({pipelined.axis}={schedule.stages}, ...), or pipeline_parallel(stages=...) of its size"
        raise problem(where, asked, f"the mesh has {', '.join(f'{k}={v}' for k, v in sizes.items())}", fix)
    for path in sorted(setup.model.random_keys()):
        exists = "a model's own random stream would give all of them the same numbers"
        fix = "draw random numbers from the key the loss function is given"
        raise problem(f"`{path}` of the model under {where}", "be drawn from in every microbatch", exists, fix)


def _split_inside(setup: Setup) -> tuple[str, ...]:
    """Mesh axes over which activations are split between layers, beside those of the batch."""
    sizes, found = axis_sizes(setup.mesh), []
    for names in (("batch", "norm_seq", "act_embed"), ("batch", "seq", "act_embed")):
        like = Leaf(path="activations", shape=(setup.mesh.size,) * 3, dtype=np.dtype(np.float32), names=names)
        for entry in resolve(like, setup.strategy.activations, setup.mesh).spec[1:]:
            found += [axis for axis in spec_axes(entry) if sizes[axis] > 1]
    return tuple(dict.fromkeys(found))


ENGINE = GradientEngine(gradients, supports=frozenset(), compile_options=compile_options)
