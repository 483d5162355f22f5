"""Find the first value in which two layouts of a training step differ.

    reference: one step, and again with perturbed rounding ─► values and tolerances
    other layout: the same step from the same state        ─► values
    loss, gradients, optimizer state and parameters are compared first; if one differs, the equations that it depends
    on are compared, from the wrong result back to values that are equal

Equations correspond if the same source lines traced them. The number of captured bytes is bounded. If the values of a
program need more, evenly spaced equations are captured first, and then the equations between them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from meshpar.loop.difference import (
    CAUSES,
    Deviation,
    Line,
    Origin,
    ValueDifference,
    WrongValue,
    classify,
    devices_of,
    extent_of,
    unreduced,
)
from meshpar.loop.intermediate_values import COPIES, EXACT, Node, SourceLine, evaluate, graph_of
from meshpar.loop.value_matching import CapturedValue, Match, Tolerance, compare, differences
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.context import NAMED_MODULES
from meshpar.sharding.errors import check_cases, check_positive_int
from meshpar.sharding.types import PyTree, path_str, tree_leaves_with_paths
from meshpar.training.state import Setup, TrainState, check_state, make_setup
from meshpar.training.step import TrainStep

MAX_BYTES = 2**30
"""Default limit for the bytes of the values that a run of a layout returns."""
_NOISES = (1, 2)
"""Perturbations of the reference; see `evaluate`."""
_GRADIENT = "gradient of "
_ORDER = ("loss", "gradient", "variable", "optimizer", "parameter", "metric", "state")
"""Kinds of results, most important first."""
_MIN_SCALED = 3
"""Number of values with the same factor that show that an engine scales the values of a part of the batch."""
_REDUCTIONS = {"psum", "psum_invariant", "reduce_scatter"}
"""Primitives that may read partial sums, in addition to primitives that do not compute."""
_UNEXPLAINED = {"values", "rows", "zero", "factor", "stale"}
"""Kinds of differences that partial sums may explain."""
_MAX_RATIO = 1e30
"""Ratio of values that are not finite, which JSON does not support."""
_MAX_LINES = 4
"""Number of lines of a traceback in a report."""
Key = int | str
"""A node of the reference, or the name of an output."""
_ENGINES = ("/meshpar/training/", "/meshpar/pipeline/", "/meshpar/layers/scan.py", "/meshpar/layers/batch_slices.py")
"""Code that calls the model in different ways in different layouts."""


def diff(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    other: TrainStep | None = None,
    *,
    mesh: Any = None,
    strategy: Any = None,
    model: Model | None = None,
    find_origin: bool = True,
    max_bytes: int = MAX_BYTES,
) -> ValueDifference:
    """Run a step in two layouts or versions, and find the first value that differs by more than rounding.

    The loss is compared first, then the gradients, the model's variables, the optimizer state and the parameters. For
    the first that differs, the values of the equations are compared. The report names the module, the source line, the
    devices with wrong elements, the kind of the difference and its usual cause.

    Use small models on local devices (`XLA_FLAGS=--xla_force_host_platform_device_count=8`): the values of all
    equations are copied to host memory. XLA cannot fuse equations whose values are captured.

    Args:
      step: the training step.
      state: its state. It is not donated.
      batch: the global batch.
      other: the other step. By default `step`.
      mesh: the mesh of the other step. By default the mesh of the state.
      strategy: the strategy of the other step. By default the strategy of the state.
      model: the model of the other step, with the same parameters. By default the model of the state.
      find_origin: whether to compare the values of equations. If False, only the results are compared.
      max_bytes: limit for the bytes of the values that a run returns.

    Returns:
      The difference. Its `str` is a report. It is false (`bool`) if the results are equal.

    Raises:
      MeshparError: an argument has the wrong type, the state, the batch or the mesh is abstract, both layouts are the
        same, the layout is not supported, or the models have different parameters.

    Example:
      >>> one = mp.MeshSpec().build(jax.devices()[:1])
      >>> print(mp.diff(step, state, batch, mesh=one, strategy=mp.ddp()))  # doctest: +SKIP
      no difference: loss, 2 gradients, 2 parameters and 5 arrays of optimizer state are equal
    """
    check_state("diff(step, state, batch)", state)
    check_positive_int("diff", "the limit for the bytes of captured values", max_bytes=max_bytes)
    is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((state, batch)))
    no_step = next((x for x in (step, other) if x is not None and not isinstance(x, TrainStep)), None)
    check_cases(
        "diff(step, state, batch)", "compare two layouts", "wrong-type",
        (no_step is not None, f"a step is a {type(no_step).__name__}", "pass the result of mp.train_step(loss)"),
        (is_abstract, "state or batch are abstract, and the step has to run", "pass arrays, as from mp.init_state"),
        (isinstance(mesh, jax.sharding.AbstractMesh), "the mesh has no devices", "use MeshSpec.build()"),
        (all(x is None for x in (other, mesh, strategy, model)), "the other layout is the same",
         "pass `mesh` and `strategy`, `model` or another step"),
    )  # fmt: skip
    is_same_code = model is None and (other is None or other.loss_fn is step.loss_fn)
    first = _Run(step, _tagged(state.setup), state, batch, by_line=is_same_code)
    setup = make_setup(
        model or state.setup.model, state.setup.tx, mesh or state.setup.given_mesh, strategy or state.setup.strategy,
        precision=state.setup.precision, trainable=state.setup.trainable,
    )  # fmt: skip
    shapes, given = (jax.tree.map(lambda x: (x.shape, str(x.dtype)), s) for s in (setup.abstract.params, state.params))
    check_cases(
        "diff(model=...)", "start from the same parameters", "wrong-shape",
        (shapes != given, "the models have different parameters", "pass a model with equal paths, shapes and dtypes"),
    )  # fmt: skip
    second = _Run(other or step, _tagged(setup), state, batch, by_line=is_same_code)
    is_swapped = second.num_devices < first.num_devices
    reference, layout = (second, first) if is_swapped else (first, second)
    return _Search(reference, layout, max_bytes).result(find_origin)


def _tagged(setup: Setup) -> Setup:
    """Return the setup with an optimizer that names the gradients in the trace."""
    update = setup.tx.update

    @functools.wraps(update)
    def tagged(grads: PyTree, *args: Any, **kwargs: Any) -> Any:
        named = jax.tree_util.tree_map_with_path(lambda path, g: checkpoint_name(g, _GRADIENT + path_str(path)), grads)
        return update(named, *args, **kwargs)

    tx = type(setup.tx)(setup.tx.init, tagged)  # type: ignore[arg-type]
    return dataclasses.replace(setup, tx=tx, unconstrained_losses=[])


class _Run:
    """A traced step with its arguments. Its equations are identified by their lines, or only by their functions."""

    def __init__(self, step: TrainStep, setup: Setup, state: TrainState, batch: PyTree, *, by_line: bool) -> None:
        self.setup, self.num_devices, self.by_line = setup, setup.mesh.size, by_line
        host = jax.device_get(state.replace(setup=setup))
        with NAMED_MODULES.set(True):
            self.step = TrainStep(step.loss_fn, step.options)
            program, split = self.step._prepare(host, batch)
            self.closed = program.trace(host, split).jaxpr
            self.names = _names_of_outputs(jax.eval_shape(program, host, split))
        self.inputs = [np.asarray(x) for x in jax.tree.leaves((host.params, split))]
        """Parameters and batch."""
        self.args = jax.tree.leaves((
            jax.device_put(host, setup.shardings), jax.device_put(split, setup.batch_shardings),
        ))  # fmt: skip
        kinds = {"parameter": host.params, "optimizer state": host.opt_state}
        self.before = {
            f"{kind} {path}": np.asarray(x) for kind, tree in kinds.items() for path, x in tree_leaves_with_paths(tree)
        }
        self.graph = graph_of(self.closed)
        self.by_path = {node.path: index for index, node in enumerate(self.graph.nodes)}
        self.values: dict[int, Any] = {}
        """Captured arrays by node."""
        self.outputs: dict[str, Any] = {}

    def run(self, nodes: Collection[int], noises: Sequence[int] = ()) -> list[dict[Any, np.ndarray]]:
        """Capture the values of nodes. Return the outputs and values for each noise, by name and by node."""
        missing = [index for index in sorted(nodes) if index not in self.values]
        if not missing and not noises and self.outputs:
            return []
        selected = [self.graph.nodes[index].path for index in missing]
        is_noisy = bool(noises)

        def captured(noise: Any, *args: Any) -> Any:
            outputs, values = evaluate(self.closed, args, selected, noise if is_noisy else None, self.graph.exact)
            return dict(zip(self.names, outputs, strict=True)), {self.by_path[path]: x for path, x in values.items()}

        with jax.sharding.use_abstract_mesh(_abstract(self.setup)):
            program = jax.jit(captured)
            runs = [program(np.int32(noise), *self.args) for noise in (0, *noises)]
        outputs, values = runs[0]
        self.outputs |= outputs
        self.values |= values
        return [{**_on_host(outputs), **_on_host(values)} for outputs, values in runs[1:]]

    def value(self, index: int) -> CapturedValue:
        return CapturedValue(np.asarray(self.values[index]), tuple(dim.axis for dim in self.graph.nodes[index].dims))

    @functools.cached_property
    def groups(self) -> Mapping[Any, list[int]]:
        """The nodes of each position in the source code."""
        groups = collections.defaultdict(list)
        for index, node in enumerate(self.graph.nodes):
            if node.is_numerical and node.frames:
                groups[_position(node, by_line=self.by_line)].append(index)
        return groups


def _abstract(setup: Setup) -> Any:
    return getattr(setup.mesh, "abstract_mesh", setup.mesh)


def _on_host(values: Mapping[Any, Any]) -> dict[Any, np.ndarray]:
    return {key: np.asarray(x) for key, x in values.items()}


def _names_of_outputs(out: tuple[TrainState, Mapping[str, Any]]) -> list[str]:
    """Return a name for each array of (state, metrics), in the order of the leaves."""
    state, metrics = out
    kinds = {"params": "parameter", "opt_state": "optimizer state", "extra": "variable"}
    names = []
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        field, _, rest = path_str(path).partition("/")
        names.append(f"{kinds.get(field, 'state')} {rest or field}")
    return [*names, *("loss" if name == "loss" else f"metric {name}" for name, _ in tree_leaves_with_paths(metrics))]


def _position(node: Node, *, by_line: bool) -> Any:
    """Return the key of equations that correspond to each other in two layouts."""
    lines: list[Any] = []
    for frame in node.frames:
        is_engine = any(part in frame.file for part in _ENGINES)
        if not lines or not is_engine:
            lines.append((frame.file, frame.line, frame.column) if by_line else frame.function.rpartition(".")[2])
        if is_engine:
            break
    is_recomputed = "rematted_computation" in node.scope
    return "transpose(" in node.scope, is_recomputed, tuple(lines), node.primitive, node.path[-1], node.label


class _Search:
    """The search for the first value of the reference that another layout does not compute."""

    def __init__(self, reference: _Run, layout: _Run, max_bytes: int) -> None:
        self.reference, self.layout, self.max_bytes = reference, layout, max_bytes
        self.matches: dict[Key, Match | None] = {}
        """Comparisons by node of the reference, and of outputs by name. None: the layout has no corresponding value."""
        self.tolerances: dict[Key, Tolerance] = {}
        self.scales: set[float] = set()
        """Factors by which engines scale values of parts of the batch until they divide by the number of parts."""
        nodes = enumerate(reference.graph.nodes)
        self.gradients = {node.label: index for index, node in nodes if node.label.startswith(_GRADIENT)}

    def counterparts(self, key: Key) -> list[int]:
        """Return the nodes of the layout that correspond to a node or an output of the reference."""
        if isinstance(key, str):
            return sorted(self.layout.graph.outputs[self.layout.names.index(key)])
        position = _position(self.reference.graph.nodes[key], by_line=self.reference.by_line)
        ours, theirs = self.reference.groups.get(position, []), self.layout.groups.get(position, [])
        return [theirs[ours.index(key)]] if ours and len(ours) == len(theirs) else theirs

    def result(self, find_origin: bool) -> ValueDifference:
        graph = self.reference.graph
        outputs = dict(zip(self.reference.names, graph.outputs, strict=True))
        region = graph.ancestors({index for nodes in graph.outputs for index in nodes}) if find_origin else set()
        self.capture(region | set(self.gradients.values()), is_first=True)
        wrong, compared = self.wrong_results()
        is_finite = bool(np.isfinite(np.asarray(self.reference.outputs["loss"])).all())
        if not wrong or not find_origin:
            return ValueDifference(compared=compared, results=tuple(wrong), is_finite=is_finite)
        kind = wrong[0].split()[0]
        targets: list[Key] = [self.gradients.get(name, name) for name in wrong if name.split()[0] == kind]
        starts = {index for key in targets for index in (outputs[key] if isinstance(key, str) else [key])}
        while True:
            if not self.scales:
                self.find_scales(graph.ancestors(starts))
            equal = {index for index, match in self.matches.items() if match and match.is_equal}
            region = graph.ancestors(starts, stops=equal)  # type: ignore[arg-type]
            if not self.capture(region):
                break
        different = [index for index in region if (match := self.matches.get(index)) and not match.is_equal]
        first = min(different, key=self.time_of) if different else targets[0]
        return ValueDifference(
            compared=compared, results=tuple(wrong), is_finite=is_finite, origin=self.origin(first, wrong[0]),
            deviations=tuple(self.deviations()),
        )  # fmt: skip

    def deviations(self) -> Iterator[Deviation]:
        """Yield the values that were compared element by element."""
        for index, node in enumerate(self.reference.graph.nodes):
            match = self.matches.get(index)
            if match is not None and match.other is not None and self.tolerances[index].largest > 0:
                largest = float(differences(self.reference.value(index).parts, match.other).max())
                ratio = min(largest / self.tolerances[index].largest, _MAX_RATIO)
                yield Deviation(_phase(node.scope), _module(node.scope), node.primitive, ratio)

    # -- Comparison ---------------------------------------------------------------------------------------------------

    def capture(self, region: Collection[int], *, is_first: bool = False) -> bool:
        """Compare values of a region that were not compared yet, within the limit. Return whether there were any."""
        nodes = self.reference.graph.nodes
        pending = [index for index in sorted(region) if index not in self.matches and nodes[index].is_numerical]
        paired = {index: theirs for index in pending if (theirs := self.counterparts(index))}
        self.matches |= {index: None for index in pending if index not in paired}
        others = self.layout.graph.nodes
        num_bytes = sum((1 + len(_NOISES)) * nodes[index].num_bytes for index in paired)
        num_bytes += sum(others[other].num_bytes for theirs in paired.values() for other in theirs)
        stride = max(1, -(-num_bytes // self.max_bytes))
        selected = list(paired)[::-1][::stride]
        if is_first:
            selected = list({*selected, *self.gradients.values()})
        elif not selected:
            return False
        noisy = self.reference.run(selected, _NOISES)
        captured = {other for index in selected for other in self.counterparts(index)}
        if stride == 1 and len(selected) > len(self.gradients):
            captured |= self.only_in_layout_of(captured)
        self.layout.run(captured)
        for key in (*selected, *(self.reference.outputs if is_first else ())):
            self.compare(key, noisy)
        return True

    def only_in_layout_of(self, captured: Collection[int]) -> set[int]:
        """Return nodes of the layout that are not captured, of at most the size of those that are."""
        graph = self.layout.graph
        outputs = {index for nodes in graph.outputs for index in nodes}
        others = [i for i in graph.ancestors(outputs) if graph.nodes[i].is_numerical and i not in captured]
        sizes = [sum(graph.nodes[i].num_bytes for i in nodes) for nodes in (captured, others)]
        return set(others) if sum(sizes) <= self.max_bytes else set()

    def compare(self, key: Key, noisy: Sequence[Mapping[Key, np.ndarray]]) -> None:
        reference, others = self.values(key)
        self.tolerances[key] = Tolerance.of(reference.array, [x[key] for x in noisy], *(x.array.dtype for x in others))
        self.matches[key] = self.best_match(reference, others, key, (1.0, *self.scales))

    def values(self, key: Key) -> tuple[CapturedValue, list[CapturedValue]]:
        """Return the values of the reference and of the layout."""
        if isinstance(key, str):
            ours, theirs = (CapturedValue(np.asarray(run.outputs[key])) for run in (self.reference, self.layout))
            return ours, [theirs]
        return self.reference.value(key), [self.layout.value(other) for other in self.counterparts(key)]

    def wrong_results(self) -> tuple[list[str], dict[str, int]]:
        """Return the names of results that differ, most important first, and the number of results by kind."""
        keys: dict[str, Key] = {**{name: name for name in self.reference.names}, **self.gradients}
        names = sorted(keys, key=lambda name: _ORDER.index(name.split()[0]))
        matches = {name: match for name in names if (match := self.matches.get(keys[name])) is not None}
        compared = collections.Counter(name.split()[0] for name in matches)
        return [name for name, match in matches.items() if not match.is_equal], dict(compared)

    def find_scales(self, region: Collection[int]) -> None:
        """Find the factor between values of parts of the batch and of the batch, and accept values with this factor.

        Engines divide the totals by the number of parts in the update. A value with another factor is different.
        """
        votes: collections.Counter[float] = collections.Counter()
        scaled: dict[int, set[float]] = {}
        for index in sorted(region):
            match = self.matches.get(index)
            if match is not None and not match.is_equal:
                scaled[index] = self.factors(index)
                votes.update(scaled[index])
        factor = max(votes, key=lambda factor: (votes[factor], factor), default=0)
        if votes[factor] < _MIN_SCALED:
            return
        self.scales.add(factor)
        for index in scaled:
            self.matches[index] = self.best_match(*self.values(index), index, (1.0, factor))

    def best_match(
        self, reference: CapturedValue, others: Sequence[CapturedValue], key: Key, scales: Sequence[float]
    ) -> Match | None:
        """Return the match with the fewest wrong elements, for the reference times each of the scales."""
        best: Match | None = None
        for scale in scales:
            array = reference.array if scale == 1 else reference.array * np.asarray(scale, reference.array.dtype)
            match = compare(CapturedValue(array, reference.axes), others, self.tolerances[key].scaled(scale))
            if match is not None and (best is None or match.wrong.sum() < best.wrong.sum()):
                best = match
        return best

    def factors(self, index: int) -> set[float]:
        """Return the numbers of parts by which the values of the layout are larger than the reference.

        Parts are iterations, and devices along mesh axes that shard the batch.
        """
        reference, others = self.values(index)
        if not np.issubdtype(reference.array.dtype, np.inexact):
            return set()
        axes = {None, *self.layout.setup.batch_axes}
        dims = [
            x.array.shape[dim]
            for x in others[:1]
            for dim, axis in enumerate(x.axes)
            if axis in axes and x.array.shape[dim] > 1
        ]
        products = {math.prod(part) for n in range(1, len(dims) + 1) for part in itertools.combinations(dims, n)}
        return {factor for factor in products if self.is_scaled(reference, others, index, factor)}

    def is_scaled(self, reference: CapturedValue, others: Sequence[CapturedValue], key: Key, factor: float) -> bool:
        """Return whether the layout computes the reference times a factor."""
        match = self.best_match(reference, others, key, (factor,))
        return match is not None and match.is_equal

    # -- The report ---------------------------------------------------------------------------------------------------

    def origin(self, first: Key, result: str) -> Origin:
        """Describe the first different value."""
        match, theirs = self.matches[first], self.counterparts(first)
        assert match is not None
        layout = self.layout.graph.nodes
        between = self.only_in_layout(first, theirs)
        ours = min(self.reference.graph.outputs[self.reference.names.index(first)]) if isinstance(first, str) else first
        node = self.reference.graph.nodes[ours]
        ends = [index for index in (*between, *theirs) if layout[index].primitive == "shard_map"]
        inside = [i for index in ends for i in layout[index].inputs if layout[i].is_numerical]
        self.layout.run(inside)
        reference, others = self.values(first)
        random = any(layout[i].primitive.startswith(("random_", "threefry")) for i in (*between, *theirs))
        candidate = WrongValue(
            node, reference, others, [self.layout.value(index) for index in inside], match, self.tolerances[first],
            self.layout.setup.sizes, (1.0, *self.scales), random, self.first_part(first),
            self.before(result, ours),
        )  # fmt: skip
        kind, detail = classify(candidate)
        source = unreduced(candidate) if kind == "missing reduction" else None
        partial = () if source is None else lines_of(layout[inside[source[0]]].frames)
        if kind in _UNEXPLAINED and (chain := self.partial_sums(ours)):
            kind, axes = "missing reduction", ", ".join(f"`{axis}`" for axis in chain[1])
            detail, partial = (
                f"computed from partial sums: the reduction over {axes} is missing",
                lines_of(chain[0].frames),
            )
        arrays = [self.layout.outputs[first]] if isinstance(first, str) else [self.layout.values[i] for i in theirs]
        wrong = match.wrong.reshape(reference.array.shape)
        largest = math.inf if match.other is None else float(differences(reference.parts, match.other).max())
        finite = None if largest == math.inf else largest
        operands = dict.fromkeys(
            line for k in theirs for i in layout[k].inputs for line in lines_of(layout[i].frames)[:1]
        )
        if kind == "not updated":  # the line that computes the new value, not the line that selects it
            node, operands = self.reference.graph.nodes[self.selected(ours)], {}
        lines = lines_of(node.frames)
        floats = [i for i in between if jnp.issubdtype(layout[i].dtype, jnp.inexact)]
        between = between if random else floats or between  # an index is rarely wrong if it is not random
        extra = dict.fromkeys(lines_of(layout[index].frames)[:_MAX_LINES] for index in between)
        return Origin(
            module=_module(node.scope), phase=_phase(node.scope), equation=node.primitive, source=lines[0],
            callers=lines[1:_MAX_LINES], user=_user_line(lines), between=tuple(extra), operands=tuple(operands),
            unreduced=partial[:_MAX_LINES], shape=node.shape, dtype=str(node.dtype),
            iteration=self.time_of(first)[1:-1:2], devices=devices_of(arrays[0], wrong) if len(arrays) == 1 else (),
            wrong=float(match.wrong.mean()), rows=extent_of(match.wrong), largest=finite,
            tolerance=self.tolerances[first].largest, kind=kind, detail=detail, cause=CAUSES[kind],
        )  # fmt: skip

    def selected(self, index: int) -> int:
        """Return the node that computes the value of a copy or selection in the reference, or the node itself."""
        nodes = self.reference.graph.nodes
        node = nodes[index]
        if node.primitive != "select_n" and node.primitive not in COPIES:
            return index
        values = [i for i in node.inputs if (nodes[i].shape, nodes[i].dtype) == (node.shape, node.dtype)]
        computed = [i for i in map(self.selected, values) if nodes[i].primitive not in COPIES]
        return computed[0] if len(computed) == 1 else index

    def before(self, result: str, index: int) -> np.ndarray | None:
        """Return the value of a result before the step, to compare with the value of a node."""
        value, run = self.reference.before.get(result), self.reference
        if value is None or value.shape != run.graph.nodes[index].shape:
            return None
        # Moments start as zeros, so zeros inside of an optimizer may be other values than the old state.
        is_result = index in run.graph.outputs[run.names.index(result)]
        return value if is_result or result.startswith("parameter") else None

    def partial_sums(self, index: int) -> tuple[Node, tuple[str, ...]] | None:
        """Return the equation whose partial sums an equation reads without a reduction, and the axes of the sums."""
        nodes = self.reference.graph.nodes
        node, axes = nodes[index], None
        if node.primitive in _REDUCTIONS or node.primitive in EXACT:
            return None
        while True:
            pending, partial = list(node.inputs), None
            while pending and partial is None:
                operand = pending.pop()
                match = self.matches.get(operand)
                is_right = match is not None and (match.is_equal or self.time_of(operand) > self.time_of(index))
                summed = tuple(axis for axis in match.summed if axis is not None) if match and is_right else ()
                if summed and axes in (None, summed):
                    partial, axes = nodes[operand], summed
                elif nodes[operand].primitive in COPIES:
                    pending += nodes[operand].inputs
            if partial is None:
                return None if axes is None else (node, axes)
            node = partial

    def only_in_layout(self, key: Key, theirs: Sequence[int]) -> list[int]:
        """Return nodes of the layout without a counterpart, from which `theirs` are computed.

        The search ends at nodes that are equal to their counterparts, and at nodes that determine the right value, such
        as partial sums of it.
        """
        graph, compared = self.layout.graph, set()
        for index, match in self.matches.items():
            if match is not None and not isinstance(index, str):
                compared |= set(self.counterparts(index))
        starts = set(theirs) if isinstance(key, str) else {i for k in theirs for i in graph.nodes[k].inputs}
        between = graph.ancestors(starts, stops=compared)
        reference, _ = self.values(key)
        similar = [i for i in between if graph.nodes[i].is_numerical]
        self.layout.run(similar)
        right = [index for index in similar if self.determines(index, key, reference)]
        between = graph.ancestors(starts, stops={*compared, *right})
        return sorted(i for i in between if lines_of(graph.nodes[i].frames) and graph.nodes[i].primitive not in COPIES)

    def determines(self, index: int, key: Key, reference: CapturedValue) -> bool:
        """Return whether a value of the layout is the reference in parts, or the parameters or the batch in parts."""
        value = self.layout.value(index)
        if (as_reference := _with_rank(value, reference.array.ndim - len(reference.axes))) is not None and any(
            self.is_scaled(reference, [as_reference], key, factor) for factor in (1.0, *self.scales)
        ):
            return True
        return any(
            (parts := _with_rank(value, x.ndim)) is not None and parts.array.size >= x.size
            and (match := compare(CapturedValue(x), [parts], Tolerance(0.0, 0.0))) is not None and match.is_equal
            for x in self.reference.inputs if x.ndim
        )  # fmt: skip

    def time_of(self, key: Key) -> tuple[int, ...]:
        """Return the time of the first wrong element: enclosing loops with their iterations, then the node."""
        if isinstance(key, str):
            return (len(self.reference.graph.nodes),)
        return (*min(self.times(key)), key)

    def first_part(self, key: Key) -> int:
        """Return the index of the first part, of all devices and iterations, with wrong elements."""
        if isinstance(key, str):
            return 0
        return min(zip(self.times(key), self.wrong_parts(key), strict=True))[1]

    def wrong_parts(self, key: int) -> list[int]:
        match = self.matches[key]
        assert match is not None
        return [index for index, wrong in enumerate(match.wrong) if wrong.any()]

    def times(self, key: int) -> list[tuple[int, ...]]:
        """Return the iterations of each wrong part, in the order of time."""
        dims, times = self.reference.graph.nodes[key].dims, []
        for part in self.wrong_parts(key):
            position = np.unravel_index(part, tuple(dim.size for dim in dims)) if dims else ()
            loops = ((d, int(i)) for d, i in zip(dims, position, strict=True) if d.axis is None)
            pairs = [(d.loop, d.size - 1 - i if d.is_reversed else i) for d, i in loops]
            times.append(tuple(itertools.chain.from_iterable(pairs)))
        return times


_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))


def lines_of(frames: Sequence[SourceLine]) -> tuple[Line, ...]:
    """Return the lines of a traceback, innermost first."""
    return tuple(Line(*frame[:3]) for frame in frames if frame.file != __file__)


def _user_line(lines: Sequence[Line]) -> Line | None:
    """Return the innermost line outside of meshpar and of installed packages."""
    return next((line for line in lines if not line.file.startswith((_PACKAGE, *_INSTALLED))), None)


def _with_rank(value: CapturedValue, rank: int) -> CapturedValue | None:
    """Let the first dims of a value count as iterations, so that `rank` dims remain."""
    extra = len(value.shape) - rank
    return None if extra < 0 else CapturedValue(value.array, (*value.axes, *[None] * extra))


def _phase(scope: str) -> str:
    if scope.startswith("update"):
        return "update"
    return "backward" if "transpose(" in scope else "forward"


def _module(scope: str) -> str:
    """Return the named scopes without jax's transformations: `gradients/transpose(jvp(layers))/mlp` is `layers/mlp`."""
    names = re.sub(r"\b(transpose|jvp|vmap|checkpoint|rematted_computation)\b|[()]", "", scope)
    parts = [part for part in names.split("/") if part]
    return "/".join(parts[1:] if parts[:1] in (["gradients"], ["update"]) else parts)
