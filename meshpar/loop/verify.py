"""Verification that random layouts compute the losses and gradients of a single device.

    single device:  three optimizer steps ─► loss and gradients of each step
    each layout:    the same steps from the same state ─► equal within the tolerance
                    restored from its checkpoint of step 1 ─► bit-identical
                    restored from the previous layout's checkpoint of step 1 ─► equal within the tolerance

The layouts are sampled from `Parallelism.candidates`, so new parallelisms are included automatically. An optax
transformation in front of the optimizer records the gradients for the comparison.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.layers.losses import LossIs, MeanLoss, SumLoss
from meshpar.layers.precision import Precision, cast_floating
from meshpar.loop.checkpoint import Checkpoints
from meshpar.loop.diff import diff
from meshpar.loop.difference import ValueDifference
from meshpar.models.token_loss import token_mask
from meshpar.parallel import Strategy, ddp, parse_strategy
from meshpar.parallel.candidates import candidates, kinds
from meshpar.parallel.parallelism import Parallelism, SearchSpace
from meshpar.schedules import SCHEDULES
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.errors import MeshparError, check_choice, problem
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import Plain
from meshpar.sharding.types import PyTree, tree_leaves_with_paths
from meshpar.training.model_loss import LossFn
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState, make_setup
from meshpar.training.step import TrainStep

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
"""Allowed difference due to the order of summation: relative to the loss, and to the largest gradient."""
VARIED: Mapping[str, tuple[Any, ...]] = {
    "min_bytes": (0,),  # the models are small, so all leaves are sharded
    "sequence": (False, True),
    "schedule": tuple(SCHEDULES),
    "microbatches": (2, 4, 8),
}
"""Fields of parallelisms that change how a step is computed but not its result. The simplest value is first."""
_FIELDS = [field for field in dataclasses.fields(StepOptions) if "equal" in field.metadata]
OPTIONS: Mapping[str, tuple[Any, ...]] = {field.name: field.metadata["equal"] for field in _FIELDS}
"""Options of `train_step` that do not change the result. The simplest value is first."""
_PAIRS_SHARE = 1 / 8
"""Share of the sampled layouts whose loss combines all pairs of examples."""
_SPLITTING = tuple(field.name for field in _FIELDS if field.metadata["splits_batch"])
"""Options that split the batch."""
STEPS = 3
"""Number of compared steps. The optimizer state of step 1 affects the gradients of step 3, but not of step 2."""
MAX_SHRINK_STEPS = 24
"""Maximum number of layouts to run in the search for the smallest layout that differs."""
_SAMPLES_PER_LAYOUT = 8
"""Number of random layouts in a group. Of each group, the layout with the most new features is run."""
_MAX_SAMPLES = 40 * _SAMPLES_PER_LAYOUT
"""Maximum number of samples per requested layout. Most models reject some layouts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A layout: a mesh, a strategy and step options."""

    mesh: MeshSpec
    strategy: Strategy
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of `train_step` that differ from their defaults."""
    of_pairs: bool = False
    """Whether the loss is replaced by a sum over all pairs of examples, which layouts must compute or refuse."""

    @property
    def name(self) -> str:
        """The text that `named` parses, unless the strategy contains custom rules."""
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1)
        values = {**self.options, **({"loss": "pairs"} if self.of_pairs else {})}
        options = ", ".join(f"{name}={value}" for name, value in values.items())
        return "; ".join(filter(None, (mesh, self.strategy.label, options)))


def named(name: str) -> Case:
    """Parse the name of a layout: "fsdp=4,tensor=2; fsdp() | tensor_parallel(); accumulate=2"."""
    mesh, strategy, text = map(str.strip, f"{name};;".split(";")[:3])
    options = dict(option.strip().partition("=")[::2] for option in text.split(",") if option.strip())
    of_pairs = options.pop("loss", None) == "pairs"
    if not strategy or not options.keys() <= OPTIONS.keys():
        reason = f"expected `mesh; strategy; options`, with the options {', '.join(OPTIONS)}"
        fix, code = "write for example 'fsdp=4; fsdp(); accumulate=2'", "unknown-name" if strategy else "bad-syntax"
        raise problem(f"case {name!r}", "parse it", reason, fix, code)
    values = {key: int(value) if value.isdigit() else value for key, value in options.items()}
    return Case(mesh=MeshSpec.parse(mesh), strategy=parse_strategy(strategy), options=values, of_pairs=of_pairs)


class Outcome(NamedTuple):
    """The result of a layout."""

    case: str
    """The name of the layout."""
    verdict: str
    """"same", "differs", or "refused" if the model does not support the layout."""
    words: str
    """The difference, or the error, or the largest deviation within the tolerance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified(Plain):
    """The result of `verify`."""

    outcomes: tuple[Outcome, ...]
    """The result of each layout, in order."""
    smallest: Outcome | None
    """The smallest layout whose results differ from the single-device run, or None."""
    seed: int
    tolerance: float
    dtype: str
    left_out: tuple[str, ...] = ()
    """Features that were not sampled, with the reason."""
    difference: ValueDifference | None = None
    """The first value in which that layout differs; see `mp.diff`."""
    derived = ("ok",)

    @property
    def ok(self) -> bool:
        """True if layouts were compared and none differs."""
        return self.smallest is None and any(outcome.verdict == "same" for outcome in self.outcomes)

    def __str__(self) -> str:
        verdicts = [outcome.verdict for outcome in self.outcomes]
        criterion = f"loss and gradients in {self.dtype}, tolerance {self.tolerance:g} of the largest"
        lines = [f"{verdicts.count('same')} layouts match a single device ({criterion})"]
        lines[0] += f"; {verdicts.count('differs')} differ"
        lines[0] += f"; the model does not support {verdicts.count('refused')}" * ("refused" in verdicts)
        lines += [f"not tested: {text}" for text in self.left_out]
        if self.smallest is not None:
            lines += [f"smallest layout that differs: {self.smallest.case}", f"  {self.smallest.words}"]
            if self.dtype == "float64" and "single device" in self.smallest.words:
                lines.append('  (if the model uses float32 internally, dtype="float32" has a larger tolerance)')
            lines += str(self.difference).splitlines() if self.difference is not None else []
        elif not self.outcomes:
            lines.append("not verified: no layout was run, due to a lack of devices or time")
        elif "same" not in verdicts:
            case, _, words = self.outcomes[0]
            lines.append(f"not verified: the model does not support these layouts. {case}: {words}")
        return "\n".join(lines)

    __rich__ = __str__


def verify(
    model: Model,
    loss: LossFn,
    batch: PyTree,
    *,
    tx: optax.GradientTransformation | None = None,
    cases: int = 20,
    seed: int = 0,
    time_s: float | None = None,
    case: str | Case | None = None,
    first: Sequence[Case] = (),
    dtype: str = "float64",
    loss_is: LossIs | None = None,
    devices: Sequence[jax.Device] | None = None,
    tell: Callable[[Outcome], None] | None = None,
    find_origin: bool = True,
) -> Verified:
    """Compare a model under random meshes, strategies, micro-steps and schedules with a single device.

    The losses and gradients of three steps are compared, also after a restart from a checkpoint of the first step.
    A restart on the same layout must be bit-identical. If a layout differs, it is simplified as far as possible.
    If the batch has `segments` with padding, a single device also computes the steps with other tokens in the padding.

    Args:
      model: a small model, from an adapter: each layout is compiled and runs on host devices.
      loss: the loss function, as for `train_step`.
      batch: host arrays; 16 examples are enough for two micro-steps on 8 devices. If the loss uses weights, the weights
        of the examples should differ. With equal weights, a mean of per-device means is correct by accident.
      tx: the optimizer; by default `optax.adam`.
      cases: the number of layouts to run.
      seed: the seed of the layouts and of the initial parameters.
      time_s: a time limit in seconds, after which no further layout is started.
      case: the only layout to run, or its name.
      first: layouts to run before the random layouts.
      dtype: dtype of the parameters and of floating-point data, "float64" or "float32"; see `TOLERANCE`.
      loss_is: the meaning of the loss, as for `train_step`. Without it, a scalar loss is compared only for
        layouts in which XLA computes the loss of the global batch.
      devices: the devices to use; by default the first eight.
      tell: a function called with each outcome.
      find_origin: whether `mp.diff` runs the smallest layout that differs, to find the first value that differs.

    Returns:
      The outcomes. Its `str` is a report.

    Raises:
      ValueError: the model fails or has no finite loss on a single device, or `dtype` or `case` is invalid.

    Example:
      >>> outcomes = mp.verify(model, loss_fn, batch, cases=10)  # doctest: +SKIP
      >>> assert outcomes.ok, outcomes  # doctest: +SKIP
    """
    check_choice("verify", "the dtype of the computation", tuple(TOLERANCE), dtype=dtype)
    deadline_s = math.inf if time_s is None else time.monotonic() + time_s
    requested = list(first) if case is None else [named(case) if isinstance(case, str) else case]
    outcomes: list[Outcome] = []
    difference: ValueDifference | None = None
    with jax.enable_x64(dtype == "float64"), tempfile.TemporaryDirectory() as folder:
        tx, devices = tx or optax.adam(1e-2), devices or jax.devices()[:8]
        verifier = _Verifier(model, loss, batch, tx, dtype, loss_is, devices, Path(folder), seed)
        samples = verifier.sample(random.Random(seed), limit=0 if case is not None else _MAX_SAMPLES * cases)
        names = {layout.name for layout in requested}
        if (smallest := verifier.outcome_of_padding()) is not None:
            outcomes, requested, samples = [smallest], [], iter(())
        for layout in itertools.chain(requested, (sample for sample in samples if sample.name not in names)):
            enough = case is None and sum(outcome.verdict != "refused" for outcome in outcomes) >= cases
            if enough or time.monotonic() > deadline_s:
                break
            outcomes.append(verifier.outcome(layout))
            if tell is not None:
                tell(outcomes[-1])
            if outcomes[-1].verdict == "differs":
                smallest = outcomes[-1] if case is not None else verifier.smallest(layout, outcomes[-1])
                difference = verifier.difference(smallest) if find_origin else None
                break
    return Verified(
        outcomes=tuple(outcomes), smallest=smallest, seed=seed, tolerance=TOLERANCE[dtype], dtype=dtype,
        left_out=verifier.left_out, difference=difference,
    )  # fmt: skip


class _StepResult(NamedTuple):
    loss: float
    grads: dict[str, np.ndarray]
    router_loss: float


class _DifferenceError(Exception):
    """A layout computes a different loss or gradient."""


class _Verifier:
    """A model and the results of its steps on a single device, to compare layouts with."""

    def __init__(self, model: Model, loss: LossFn, batch: PyTree, tx: optax.GradientTransformation, dtype: str,
                 loss_is: str | None, devices: Sequence[jax.Device], folder: Path, seed: int) -> None:  # fmt: skip
        self.model, self.dtype, self.loss_is, self.folder = model, dtype, loss_is, folder
        self.devices = list(devices)
        self.batch = jax.tree.map(np.asarray, cast_floating(batch, dtype))
        self.tx = optax.chain(_record_gradients(), tx)
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
        if not shapes or not all(shape and shape[0] for shape in shapes):
            reason = f"its arrays have shapes {', '.join(map(str, shapes))}" if shapes else "it has no arrays"
            fix = "pass arrays whose first dim is the batch, with 16 examples"
            raise problem("verify(batch=...)", "split it into examples", reason, fix, code="wrong-shape")
        self.batch_size = shapes[0][0]
        self.tolerance = TOLERANCE[dtype]
        self.previous_checkpoints: dict[bool, Path] = {}
        self.losses = {False: loss, True: _pairs(loss)}
        setup, step = self.setup(MeshSpec(), ddp()), TrainStep(loss, self.options({}))
        self.start = jax.device_get(setup.init(seed))
        losses = [result.loss for result in self.expected(of_pairs=False)]
        if not all(map(math.isfinite, losses)):
            reason, fix = f"its losses are {losses}", "use different data or a different seed"
            raise problem("verify", "compare with a single device", reason, fix, code="not-finite")
        left_out = list(self._left_out(setup, step))
        self.left_out = tuple(text for text, _ in left_out)
        self.excluded = frozenset(name for _, names in left_out for name in names)

    @functools.cache  # noqa: B019 - a verifier lives as long as one call of `verify`
    def expected(self, *, of_pairs: bool) -> list[_StepResult]:
        """Return the results of a single device."""
        return self._on_one_device(self.batch, of_pairs=of_pairs)

    def _on_one_device(self, batch: PyTree, *, of_pairs: bool) -> list[_StepResult]:
        setup, step = self.setup(MeshSpec(), ddp()), TrainStep(self.losses[of_pairs], self.options({}))
        state, results = jax.device_put(self.start.replace(setup=setup), setup.shardings), []
        for _ in range(STEPS):
            state, result = self.step(step, state, batch)
            results.append(result)
        return results

    def outcome_of_padding(self) -> Outcome | None:
        """Return a difference on a single device between two batches with different tokens in their padding, if any."""
        batch = self.batch
        if not isinstance(batch, Mapping) or not {"inputs", "targets", "segments"} <= batch.keys():
            return None
        other = (batch["inputs"] + 1) % (batch["inputs"].max() + 1)
        inputs = np.where(token_mask(batch), batch["inputs"], other)
        results = self._on_one_device({**batch, "inputs": inputs}, of_pairs=False)
        try:
            for number, (result, expected) in enumerate(zip(results, self.expected(of_pairs=False), strict=True), 1):
                self._check(f"step {number} with other tokens in the padding", result, expected, self.tolerance)
        except _DifferenceError as difference:
            return Outcome("data=1; ddp()", "differs", str(difference))
        return None

    def options(self, options: Mapping[str, Any]) -> StepOptions:
        return StepOptions(precision=Precision(params=self.dtype), loss_is=self.loss_is, **options)  # type: ignore[arg-type]

    def setup(self, spec: MeshSpec, strategy: Strategy) -> Setup:
        mesh = spec.build(self.devices[: math.prod(spec.values())])
        return make_setup(self.model, self.tx, mesh=mesh, strategy=strategy, precision=Precision(params=self.dtype))

    def step(self, step: TrainStep, state: TrainState, batch: PyTree = None) -> tuple[TrainState, _StepResult]:
        state, metrics = step(state, self.batch if batch is None else batch)
        grads = {path: np.asarray(x) for path, x in tree_leaves_with_paths(state.opt_state[0])}
        return state, _StepResult(float(metrics["loss"]), grads, float(metrics.get("moe/aux_loss", 0)))

    def _left_out(self, setup: Setup, step: TrainStep) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield reasons, and the options and axes that change the result for this loss, found on a single device."""
        splitting = (*_SPLITTING, "stage")
        features = "micro-steps, batch slices and pipelines"
        new_key = self.start.replace(setup=setup, key=self.start.key + np.ones_like(self.start.key))
        _, result = self.step(step, jax.device_put(new_key, setup.shardings))
        if self.model.random_keys() or result.loss != self.expected(of_pairs=False)[0].loss:
            yield f"{features}: the loss draws random numbers, which differ in each part of the batch", splitting
            return
        if result.router_loss:
            reason = "router losses are means over these parts, and depend on the tokens of each"
            yield f"micro-steps and pipelines: {reason}", ("accumulate", "reduce_gradients", "stage")
        try:
            TrainStep(self.losses[False], self.options({"accumulate": 2})).lower(setup.abstract, self.batch)
        except MeshparError as error:
            if error.code == "ambiguous-loss":
                yield f"{features}: the loss is a scalar; return mp.MeanLoss, or pass loss_is", splitting
            elif error.code in ("dependent-examples", "undecided-examples"):
                yield f"{features}: {error.reason} ({error.where.partition(', under')[0]})", splitting

    # -- Layouts ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _leaves(self) -> Sequence[Any]:
        return [decision.leaf for decision in self.setup(MeshSpec(), ddp()).table.params]

    @functools.cached_property
    def _seq_len(self) -> int | None:
        """The sequence length, or None if the batch has no 2D integer arrays."""
        lengths = [x.shape[1] for x in jax.tree.leaves(self.batch) if x.ndim == 2 and x.dtype.kind in "iu"]
        return max(lengths, default=None)

    def _search_space(self, sizes: Mapping[str, int]) -> SearchSpace:
        num_layers = max((leaf.num_layers for leaf in self._leaves), default=1)
        return SearchSpace(sizes=sizes, examples=self.batch_size, seq_len=self._seq_len, num_layers=num_layers)

    def _axes(self) -> list[str]:
        axes = {axis for state in (True, False) for kind in kinds(shards_state=state) for axis in kind.axes}
        names = {name for leaf in self._leaves for name in leaf.names or ()}
        supported = {"expert": "expert" in names, "stage": "layers" in names and "stage" not in self.excluded,
                     "context": self._seq_len is not None}  # fmt: skip
        return sorted(axis for axis in {*axes, "data"} if supported.get(axis, True))

    def sample(self, rng: random.Random, *, limit: int) -> Iterator[Case]:
        """Yield random layouts that cover many pairs of features.

        Each layout is the sample of a group that adds the most pairs.
        """
        covered: set[tuple[str, str]] = set()
        samples = self._sample(rng, limit=limit)
        while group := list(itertools.islice(samples, _SAMPLES_PER_LAYOUT)):
            pairs = [set(itertools.combinations(sorted(_features(case)), 2)) for case in group]
            best = max(range(len(group)), key=lambda index: len(pairs[index] - covered))
            covered |= pairs[best]
            yield group[best]

    def _sample(self, rng: random.Random, *, limit: int) -> Iterator[Case]:
        axes, seen = self._axes(), set()
        counts = [count for count in range(2, len(self.devices) + 1) if len(self.devices) % count == 0]
        for _ in range(limit if counts else 0):
            sizes = dict.fromkeys(axes, 1)
            remaining, factor = rng.choice([*counts, counts[-1]]), 2
            while remaining > 1:
                if remaining % factor:
                    factor += 1
                else:
                    remaining //= factor
                    sizes[rng.choice(axes)] *= factor
            strategies = list(candidates(self._search_space(sizes)))
            if not strategies:
                continue
            options = {name: rng.choice(values) for name, values in OPTIONS.items()}
            try:
                parts = tuple(_replace(part, {name: rng.choice(values) for name, values in VARIED.items()})
                              for part in rng.choice(strategies).components)  # fmt: skip
                case = self._case(sizes, parts, options, of_pairs=rng.random() < _PAIRS_SHARE)
            except MeshparError:  # the schedule does not exist for these sizes
                continue
            if case.name not in seen:
                seen.add(case.name)
                yield case

    def _case(
        self, sizes: Mapping[str, int], parts: tuple[Parallelism, ...], options: Mapping[str, Any], *, of_pairs: bool
    ) -> Case:
        strategy = Strategy(parts)
        excluded = (*self.excluded, *(("accumulate",) if strategy.pipeline is not None else ()))
        if self._search_space(sizes).num_layers <= 1:
            excluded = (*excluded, "remat", "batch_slices")
        if "accumulate" in excluded or options.get("accumulate", 1) == 1:
            excluded = (*excluded, "reduce_gradients")
        changed = {name: value for name, value in options.items() if name not in excluded and value != OPTIONS[name][0]}
        axes: dict[str, Any] = {axis: size for axis, size in sizes.items() if size > 1}
        return Case(mesh=MeshSpec(**axes), strategy=strategy, options=changed, of_pairs=of_pairs)

    # -- Comparison ---------------------------------------------------------------------------------------------------

    def outcome(self, case: Case) -> Outcome:
        """Run a layout and compare it. An error other than `MeshparError` counts as a difference."""
        action = "be traced"
        try:
            setup = self.setup(case.mesh, case.strategy)
            step = TrainStep(self.losses[case.of_pairs], self.options(case.options))
            step.lower(setup.abstract, self.batch)
            action = "run"
            return Outcome(case.name, "same", f"largest deviation {self._compare(setup, step, case.of_pairs):.1e}")
        except _DifferenceError as difference:
            return Outcome(case.name, "differs", str(difference))
        except Exception as error:
            if action == "be traced" and isinstance(error, MeshparError):
                return Outcome(case.name, "refused", str(error))
            message = str(error).strip().split("\n")[0][:300]
            return Outcome(case.name, "differs", f"it cannot {action}: {type(error).__name__}: {message}")

    def _compare(self, setup: Setup, step: TrainStep, of_pairs: bool) -> float:
        """Return the largest deviation, or raise `_DifferenceError` if it exceeds the tolerance."""
        state = jax.device_put(self.start.replace(setup=setup), setup.shardings)
        largest, folder = 0.0, Path(tempfile.mkdtemp(dir=self.folder))
        results: list[_StepResult] = []
        for number, expected in enumerate(self.expected(of_pairs=of_pairs), 1):
            state, result = self.step(step, state)
            largest = max(largest, self._check(f"step {number}", result, expected, self.tolerance))
            results.append(result)
            if number == 1:
                with Checkpoints(folder) as checkpoints:
                    checkpoints.save(state, wait=True)
        del state
        self._check_restart("after a restart", folder, setup, step, results, 0.0)
        if previous := self.previous_checkpoints.get(of_pairs):
            context, on_one = "from the checkpoint of the previous layout", self.expected(of_pairs=of_pairs)
            self._check_restart(context, previous, setup, step, on_one, self.tolerance)
        self.previous_checkpoints[of_pairs] = folder
        return largest

    def _check_restart(
        self, context: str, folder: Path, setup: Setup, step: TrainStep, expected: Sequence[_StepResult], limit: float
    ) -> None:
        with Checkpoints(folder) as checkpoints:
            restored = checkpoints.restore(setup)
        assert restored is not None
        state = restored.state
        for number in range(1, STEPS):
            state, result = self.step(step, state)
            self._check(f"step {number + 1} {context}", result, expected[number], limit)

    def _check(self, context: str, result: _StepResult, expected: _StepResult, limit: float) -> float:
        """Return the largest relative difference, or raise `_DifferenceError` if it exceeds the limit."""
        reference = "a single device" if limit else "the run without a restart"
        loss = abs(result.loss - expected.loss) / max(abs(expected.loss), 1e-6)
        if not loss <= limit:
            values = f"loss {result.loss:.9g}, on {reference} {expected.loss:.9g}"
            raise _DifferenceError(f"{context}: {values}, relative {loss:.1e}")
        scale = max((float(np.abs(x).max(initial=0)) for x in expected.grads.values()), default=0.0) or 1.0
        deviations = {
            path: float(np.abs(x.astype(np.float64) - expected.grads[path]).max(initial=0)) / scale
            for path, x in result.grads.items()
        }
        wrong = [path for path, deviation in deviations.items() if not deviation <= limit]
        worst = max(wrong or deviations, key=lambda path: (math.isnan(deviations[path]), deviations[path]))
        if wrong:
            more = f" (and {len(wrong) - 1} more)" * (len(wrong) > 1)
            size = f"{deviations[worst]:.1e} of the largest gradient"
            raise _DifferenceError(f"{context}: gradient of `{worst}`{more} differs from {reference} by {size}")
        return max(loss, deviations[worst])

    def difference(self, outcome: Outcome) -> ValueDifference | None:
        """Return the first value that differs from a single device in a step, or None if only a restart differs."""
        if "restart" in outcome.words or "checkpoint" in outcome.words:
            return None
        try:
            case = named(outcome.case)
        except MeshparError:  # the name of a strategy with custom rules cannot be parsed
            return None
        setup, step = self.setup(MeshSpec(), ddp()), TrainStep(self.losses[case.of_pairs], self.options({}))
        other = TrainStep(self.losses[case.of_pairs], self.options(case.options))
        mesh = case.mesh.build(self.devices[: math.prod(case.mesh.values())])
        state = jax.device_put(self.start.replace(setup=setup), setup.shardings)
        for _ in range(STEPS):
            with contextlib.suppress(MeshparError):  # a layout that cannot run has no values
                if difference := diff(step, state, self.batch, other, mesh=mesh, strategy=case.strategy):
                    return difference
            state, _ = self.step(step, state)
        return None

    # -- The smallest layout ------------------------------------------------------------------------------------------

    def smallest(self, case: Case, outcome: Outcome) -> Outcome:
        """Simplify a layout that differs as long as it still differs."""
        budget, progress = MAX_SHRINK_STEPS, True
        while progress and budget > 0:
            progress = False
            for smaller in itertools.islice(self._smaller(case), budget):
                budget -= 1
                new = self.outcome(smaller)
                if new.verdict == "differs":
                    case, outcome, progress = smaller, new, True
                    break
        return outcome

    def _smaller(self, case: Case) -> Iterator[Case]:
        """Yield layouts with an option removed, an axis removed or halved, or a parallelism simplified."""
        if case.of_pairs:
            yield dataclasses.replace(case, of_pairs=False)
        for name in case.options:
            options = {other: value for other, value in case.options.items() if other != name}
            yield dataclasses.replace(case, options=options)
        sizes = {axis: size for axis, size in case.mesh.items() if size > 1}
        for axis in sizes if len(sizes) > 1 or max(sizes.values(), default=1) > 2 else ():
            for size in {1, sizes[axis] // 2} - {sizes[axis]} - ({1} if len(sizes) == 1 else set()):
                yield from self._on_mesh(case, {**sizes, axis: size})
        for index, part in enumerate(case.strategy.components):
            for name, values in VARIED.items():
                if getattr(part, name, values[0]) != values[0]:
                    with contextlib.suppress(MeshparError):
                        simpler = dataclasses.replace(part, **{name: values[0]})
                        parts = (*case.strategy.components[:index], simpler, *case.strategy.components[index + 1 :])
                        yield dataclasses.replace(case, strategy=Strategy(parts))

    def _on_mesh(self, case: Case, sizes: Mapping[str, int]) -> Iterator[Case]:
        """Yield the same strategy on a smaller mesh, without parallelisms whose axis is missing."""
        old = {type(part): part for part in case.strategy.components}
        sizes = {**dict.fromkeys(self._axes(), 1), **sizes}
        for strategy in candidates(self._search_space(sizes)):
            with contextlib.suppress(MeshparError):
                parts = []
                for part in strategy.components:
                    before = old.get(type(part))
                    parts.append(_replace(part, {name: getattr(before, name, x[0]) for name, x in VARIED.items()}))
                yield self._case(sizes, tuple(parts), case.options, of_pairs=case.of_pairs)


def _features(case: Case) -> Iterator[str]:
    yield from (axis for axis, size in case.mesh.items() if size > 1)
    yield from (f"{name}={value}" for name, value in case.options.items())
    if case.of_pairs:
        yield "loss=pairs"
    for part in case.strategy.components:
        yield part.name
        yield from (f"{part.name} {name}={value}" for name, value in part.arguments().items() if name != "stages")


def _pairs(loss: LossFn) -> LossFn:
    """Return a loss with a term for each pair of examples: the square of the total of `loss`."""

    def of_pairs(model: Any, batch: PyTree, key: jax.Array) -> Any:
        value, metrics = loss(model, batch, key)
        if isinstance(value, MeanLoss | SumLoss):
            return dataclasses.replace(value, total=value.total**2), metrics
        return value**2, metrics

    return of_pairs


def _replace(part: Parallelism, values: Mapping[str, Any]) -> Parallelism:
    """Replace the fields that this parallelism has, and ignore other names."""
    fields = {field.name for field in dataclasses.fields(part)}
    return dataclasses.replace(part, **{name: value for name, value in values.items() if name in fields})


def _record_gradients() -> optax.GradientTransformation:
    def init(params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return grads, jax.tree.map(lambda g, like: g.astype(like.dtype), grads, state)

    return optax.GradientTransformation(init, update)
