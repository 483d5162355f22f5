"""verify: a model under random layouts is held to itself on one device; the smallest that differs is named.

    one device:   three steps of the optimizer ─► loss and gradients of each
    every layout: from the same numbers the same steps ─► equal to those
                  saved after the first, restored: the others again, to the bit
                  the layout before it, saved after the first, restored here: the others again

Layouts are drawn from what parts try on a mesh (`Part.tried`), so a new parallelism is drawn too. Gradients are kept by
a rule before the optimizer's: what it is given is what is compared.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.layers.losses import MEAN_OVER_EXAMPLES
from meshpar.layers.precision import Precision, cast_floating
from meshpar.loop.checkpoint import Checkpoints
from meshpar.parallel import Strategy, ddp, parse_strategy
from meshpar.parallel.candidates import candidates, kinds
from meshpar.parallel.parallelism import Parallelism, SearchSpace
from meshpar.schedules import SCHEDULES
from meshpar.sharding.adapters import Model
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import Plain
from meshpar.sharding.types import MeshparError, PyTree, problem, tree_leaves_with_paths
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState, make_setup
from meshpar.training.step import LossFn, TrainStep

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
"""What sums in another order may change: of a loss in shares of it, of gradients in shares of the largest."""
VARIED: Mapping[str, tuple[Any, ...]] = {
    "min_bytes": (0,),  # models are small here: every leaf is split
    "sequence": (False, True),
    "schedule": tuple(SCHEDULES),
    "microbatches": (2, 4, 8),
}
"""Fields of parts by which a step is computed in another way, and stays the same step; the simplest value first."""
OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "accumulate": (1, 2),
    "reduce_gradients": ("each", "once"),
    "interleave": (1, 2),
    "remat": (None, "full", "dots"),
}
"""Options of `train_step` likewise."""
_CUT = ("accumulate", "reduce_gradients", "interleave")
"""Options that cut the rows; the first two are none of pipelines."""
STEPS = 3
"""The optimizer's state of the first shows in the third."""
MOST_SHRUNK = 24
"""Layouts tried on the way to the smallest that fails."""
_CHOICE = 8
"""Layouts of which one is run."""
_DRAWS = 40 * _CHOICE
"""Draws for each layout that is wanted: most models refuse some."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One layout: a mesh, a strategy, how a step is cut."""

    mesh: MeshSpec
    strategy: Strategy
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of `train_step`, those that differ from their defaults."""

    @property
    def name(self) -> str:
        """As `named` reads it, unless the strategy has rules by hand."""
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1)
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return "; ".join(filter(None, (mesh, self.strategy.label, options)))


def named(name: str) -> Case:
    """The layout of a name: "fsdp=4,tensor=2; fsdp() | tensor_parallel(); accumulate=2".

    Raises:
      ValueError: it is no such name.
    """
    mesh, _, rest = name.partition(";")
    strategy, _, options = rest.partition(";")
    given = {}
    for one in filter(None, map(str.strip, options.split(","))):
        option, _, value = one.partition("=")
        if option not in OPTIONS or not value:
            exists, fix = f"it is none of {', '.join(OPTIONS)}", "write accumulate=2, say"
            raise problem(f"case {name!r}", f"read `{one}`", exists, fix)
        given[option] = value if not value.isdigit() else ast.literal_eval(value)
    if not strategy.strip():
        exists = "it is a mesh, a strategy and options, with ; between them"
        raise problem(f"case {name!r}", "read it", exists, "write 'fsdp=4,tensor=2; fsdp() | tensor_parallel()'")
    return Case(mesh=MeshSpec.parse(mesh), strategy=parse_strategy(strategy), options=given)


class Outcome(NamedTuple):
    """What became of a layout."""

    case: str
    """Its name."""
    verdict: str
    """"same", "differs", or "refused": an error says that the model cannot lie so."""
    words: str
    """What differs and by how much; why it was refused; the largest difference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified(Plain):
    """What `verify` found."""

    outcomes: tuple[Outcome, ...]
    """Of every layout, in order."""
    smallest: Outcome | None
    """The smallest layout that differs, None where none does."""
    seed: int
    tolerance: float
    dtype: str
    left_out: tuple[str, ...] = ()
    """What was not drawn, and why."""
    derived = ("ok",)

    @property
    def ok(self) -> bool:
        """Every layout was the same, and there was one."""
        return self.smallest is None and any(one.verdict == "same" for one in self.outcomes)

    def __str__(self) -> str:
        counts = {kind: sum(one.verdict == kind for one in self.outcomes) for kind in ("same", "differs", "refused")}
        held = f"loss and gradients in {self.dtype}, to {self.tolerance:g} of the largest"
        lines = [f"{counts['same']} layouts equal one device ({held}); {counts['differs']} differ"]
        lines[0] += f"; {counts['refused']} the model refused" * bool(counts["refused"])
        lines += [f"not drawn: {one}" for one in self.left_out]
        if self.smallest is not None:
            lines += [f"smallest that differs: {self.smallest.case}", f"  {self.smallest.words}"]
            if self.dtype == "float64" and "of one device" in self.smallest.words:
                lines.append('  (a model that computes in float32 inside is held to less with dtype="float32")')
        elif not self.outcomes:
            lines.append("nothing was verified: no layout was begun, for want of devices or time")
        elif not counts["same"]:
            case, _, words = self.outcomes[0]
            lines.append(f"nothing was verified: the model refused every layout, as {case}: {words}")
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
    loss_is: Literal["mean_over_examples"] | None = None,
    devices: Sequence[jax.Device] | None = None,
    tell: Callable[[Outcome], None] | None = None,
) -> Verified:
    """Hold a model to itself on one device, under random meshes, strategies, micro-steps and schedules.

    Losses and gradients of three steps must be the same, and those from a checkpoint of the first: to the bit on the
    same layout, within the tolerance from another one's. The smallest layout that differs is looked for and named.

    Args:
      model: from an adapter; small, for a layout takes a compilation and the devices of a host hold it all.
      loss: as for `train_step`.
      batch: host arrays of examples; 16 examples give each of 8 devices two micro-steps. Give examples unequal weights
        if the loss uses weights: with equal ones, the mean of the means of parts is right by chance.
      tx: the optimizer; `optax.adam` by default.
      cases: layouts that are run.
      seed: of what is drawn, and of the model's first numbers.
      time_s: no layout is begun after so many seconds.
      case: only this one, by its name or itself. `first` are run before those that are drawn.
      dtype: of parameters and floating data, "float64" or "float32"; the tolerance is that of `TOLERANCE`.
      loss_is: as for `train_step`: what a scalar loss is. Without it, a scalar is compared only where XLA sees the
        whole batch.
      devices: default: the first eight of jax's.
      tell: called with every outcome.

    Raises:
      ValueError: a model that does not run, or has no finite loss, on one device; a dtype or case that does not exist.
    """
    _check_dtype(dtype)
    began = time.monotonic()
    wanted = [named(case) if isinstance(case, str) else case] if case is not None else list(first)
    outcomes: list[Outcome] = []
    with jax.enable_x64(dtype == "float64"), tempfile.TemporaryDirectory() as folder:
        tx, devices = tx or optax.adam(1e-2), devices or jax.devices()[:8]
        held = _Held(model, loss, batch, tx, dtype, loss_is, devices, Path(folder), seed)
        drawn = held.drawn(random.Random(seed), most=0 if case is not None else _DRAWS * cases)
        failing: Case | None = None
        for one in _chained(wanted, drawn):
            enough = sum(each.verdict != "refused" for each in outcomes) >= cases and case is None
            if enough or (time_s is not None and time.monotonic() - began > time_s):
                break
            outcomes.append(held.outcome(one))
            if tell is not None:
                tell(outcomes[-1])
            if outcomes[-1].verdict == "differs":
                failing = one
                break
        smallest = None if failing is None else held.smallest(failing, outcomes[-1], is_asked=case is not None)
    return Verified(
        outcomes=tuple(outcomes), smallest=smallest, seed=seed, tolerance=TOLERANCE[dtype], dtype=dtype,
        left_out=held.left_out,
    )  # fmt: skip


def _check_dtype(dtype: str) -> None:
    if dtype not in TOLERANCE:
        exists = f"there is {' and '.join(TOLERANCE)}"
        raise problem(f"verify(dtype={dtype!r})", "compute in it", exists, 'use "float64", or "float32"')


def _num_rows(batch: PyTree) -> int:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if not shapes or not all(shape and shape[0] for shape in shapes):
        exists = f"its arrays have shapes {', '.join(map(str, shapes))}" if shapes else "it holds no array"
        raise problem("verify(batch=...)", "cut it into rows", exists, "give arrays whose first dim runs over 16 rows")
    return int(shapes[0][0])


def _chained(wanted: Sequence[Case], drawn: Iterator[Case]) -> Iterator[Case]:
    names = set()
    for one in wanted:
        names.add(one.name)
        yield one
    yield from (one for one in drawn if one.name not in names)


class _Taken(NamedTuple):
    """A step, on the host."""

    loss: float
    grads: dict[str, np.ndarray]


class _Held:
    """A model, and what it does on one device."""

    def __init__(self, model: Model, loss: LossFn, batch: PyTree, tx: optax.GradientTransformation, dtype: str,
                 loss_is: str | None, devices: Sequence[jax.Device], folder: Path, seed: int) -> None:  # fmt: skip
        self.model, self.loss, self.dtype, self.loss_is, self.folder = model, loss, dtype, loss_is, folder
        self.devices = list(devices)
        self.batch = jax.tree.map(np.asarray, cast_floating(batch, dtype))
        self.tx = optax.chain(_kept_gradients(), tx)
        self.rows = _num_rows(self.batch)
        self.tolerance = TOLERANCE[dtype]
        self.saved: Path | None = None
        """Checkpoints of the layout before, after its first step."""
        setup, step = self.setup(MeshSpec(), ddp()), TrainStep(loss, self.options({}))
        state = setup.init(seed)
        self.start = jax.device_get(state)
        self.expected: list[_Taken] = []
        for _ in range(STEPS):
            state, taken = self.step(step, state)
            self.expected.append(taken)
        if not all(math.isfinite(one.loss) for one in self.expected):
            exists, fix = f"its losses are {[one.loss for one in self.expected]}", "give it other data or another seed"
            raise problem("verify", "compare with one device", exists, fix)
        self.left_out = tuple(self._left_out(setup, step))

    def options(self, given: Mapping[str, Any]) -> StepOptions:
        return StepOptions(precision=Precision(params=self.dtype), loss_is=self.loss_is, **given)  # type: ignore[arg-type]

    def setup(self, mesh: MeshSpec, strategy: Strategy) -> Setup:
        over = mesh.build(self.devices[: math.prod(mesh.values())])
        return make_setup(self.model, self.tx, mesh=over, strategy=strategy, precision=Precision(params=self.dtype))

    def begun(self, setup: Setup) -> TrainState:
        return jax.device_put(self.start.replace(setup=setup), setup.shardings)

    def step(self, step: TrainStep, state: TrainState) -> tuple[TrainState, _Taken]:
        state, metrics = step(state, self.batch)
        grads = {path: np.asarray(x) for path, x in tree_leaves_with_paths(state.opt_state[0])}
        return state, _Taken(float(metrics["loss"]), grads)

    def _left_out(self, setup: Setup, step: TrainStep) -> Iterator[str]:
        """What is not the same step for this loss: asked of it on one device, uncut."""
        other = self.start.replace(setup=setup, key=self.start.key + np.ones_like(self.start.key))
        _, taken = self.step(step, jax.device_put(other, setup.shardings))
        if self.model.random_keys() or taken.loss != self.expected[0].loss:
            yield "micro-steps, slices and pipelines: the loss draws random numbers, which each of them draws anew"
            return
        try:
            TrainStep(self.loss, self.options({"accumulate": 2})).lower(setup.abstract, self.batch)
        except MeshparError as error:
            if MEAN_OVER_EXAMPLES not in str(error):
                return
            yield "micro-steps, slices and pipelines: the loss is a scalar; return mp.MeanLoss, or state loss_is"

    # -- Layouts ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _leaves(self) -> Sequence[Any]:
        return [decision.leaf for decision in self.setup(MeshSpec(), ddp()).table.params]

    @functools.cached_property
    def _seq_len(self) -> int | None:
        """Tokens of a row, where the batch has rows of whole numbers."""
        lengths = [x.shape[1] for x in jax.tree.leaves(self.batch) if x.ndim == 2 and x.dtype.kind in "iu"]
        return max(lengths, default=None)

    def _search_space(self, sizes: Mapping[str, int]) -> SearchSpace:
        num_layers = max((leaf.num_layers for leaf in self._leaves), default=1)
        return SearchSpace(sizes=sizes, rows=self.rows, seq_len=self._seq_len, num_layers=num_layers)

    def _axes(self) -> list[str]:
        """Axes that a layout of this model can have."""
        known = {axis for state in (True, False) for kind in kinds(shards_state=state) for axis in kind.axes}
        names = {name for leaf in self._leaves for name in leaf.names or ()}
        without = {"expert": "expert" in names, "stage": "layers" in names and not self.left_out,
                   "context": self._seq_len is not None}  # fmt: skip
        return sorted(axis for axis in {*known, "data"} if without.get(axis, True))

    def drawn(self, draw: random.Random, *, most: int) -> Iterator[Case]:
        """Layouts at random, each of a few the one with the most pairs of features that none before it had."""
        covered: set[tuple[str, str]] = set()
        found = self._drawn(draw, most=most)
        while few := list(itertools.islice(found, _CHOICE)):
            pairs = [set(itertools.combinations(sorted(_features(one)), 2)) for one in few]
            at = max(range(len(few)), key=lambda at: len(pairs[at] - covered))
            covered |= pairs[at]
            yield few[at]

    def _drawn(self, draw: random.Random, *, most: int) -> Iterator[Case]:
        """Layouts at random, none twice."""
        axes, seen = self._axes(), set()
        counts = [count for count in range(2, len(self.devices) + 1) if len(self.devices) % count == 0]
        for _ in range(most if counts else 0):
            sizes = dict.fromkeys(axes, 1)
            for prime in _primes(draw.choice([*counts, counts[-1]])):
                sizes[draw.choice(axes)] *= prime
            forms = list(candidates(self._search_space(sizes)))
            if not forms:
                continue
            options = {name: draw.choice(values) for name, values in OPTIONS.items()}
            try:
                parts = tuple(_replaced(part, {name: draw.choice(values) for name, values in VARIED.items()})
                              for part in draw.choice(forms).parts)  # fmt: skip
                one = self._case(sizes, parts, options)
            except MeshparError:  # a schedule has no table for these numbers
                continue
            if one.name not in seen:
                seen.add(one.name)
                yield one

    def _case(self, sizes: Mapping[str, int], parts: tuple[Parallelism, ...], options: Mapping[str, Any]) -> Case:
        strategy = Strategy(parts)
        without = _CUT if self.left_out else _CUT[:2] if strategy.pipeline is not None else ()
        options = {name: value for name, value in options.items() if name not in without}
        if options.get("accumulate", 1) == 1:
            options.pop("reduce_gradients", None)
        stacked = self._search_space(sizes).num_layers > 1
        changed = {
            name: value
            for name, value in options.items()
            if value != OPTIONS[name][0] and (stacked or name not in ("remat", "interleave"))
        }
        above: dict[str, Any] = {axis: size for axis, size in sizes.items() if size > 1}
        return Case(mesh=MeshSpec(**above), strategy=strategy, options=changed)

    # -- One layout ---------------------------------------------------------------------------------------------------

    def outcome(self, case: Case) -> Outcome:
        """What becomes of a layout; an error that is not one of meshpar's answers differs from one device, too."""
        try:
            setup = self.setup(case.mesh, case.strategy)
            step = TrainStep(self.loss, self.options(case.options))
            step.lower(setup.abstract, self.batch)
        except MeshparError as error:
            return Outcome(case.name, "refused", str(error))
        except Exception as error:
            return Outcome(case.name, "differs", _raised("it cannot be traced", error))
        try:
            words, largest = self._compared(setup, step)
        except Exception as error:
            return Outcome(case.name, "differs", _raised("it does not run", error))
        return Outcome(case.name, "differs", words) if words else Outcome(case.name, "same", f"to {largest:.1e}")

    def _compared(self, setup: Setup, step: TrainStep) -> tuple[str | None, float]:
        """What differs, and the largest difference that does not count as one."""
        state, largest, folder = self.begun(setup), 0.0, Path(tempfile.mkdtemp(dir=self.folder))
        went_on: list[_Taken] = []
        for number, expected in enumerate(self.expected, 1):
            state, taken = self.step(step, state)
            words, apart = self._difference(f"step {number}", taken, expected, self.tolerance)
            if words:
                return words, apart
            largest = max(largest, apart)
            went_on.append(taken)
            if number == 1:
                with Checkpoints(folder) as checkpoints:
                    checkpoints.save(state, wait=True)
        del state
        words = self._restarted("after a restart", folder, setup, step, went_on, 0.0)
        if words is None and self.saved is not None:
            what = "from the checkpoint of the layout before"
            words = self._restarted(what, self.saved, setup, step, self.expected, self.tolerance)
        self.saved = folder
        return words, largest

    def _restarted(
        self, what: str, folder: Path, setup: Setup, step: TrainStep, expected: Sequence[_Taken], most: float
    ) -> str | None:
        """What differs in the steps behind the first from a checkpoint of it."""
        with Checkpoints(folder) as checkpoints:
            found = checkpoints.restore(setup)
        assert found is not None
        state, words = found.state, None
        for number in range(1, STEPS):
            state, taken = self.step(step, state)
            words = words or self._difference(f"step {number + 1} {what}", taken, expected[number], most)[0]
        return words

    def _difference(self, what: str, taken: _Taken, expected: _Taken, most: float) -> tuple[str | None, float]:
        like = "one device" if most else "the run that went on"
        loss = abs(taken.loss - expected.loss) / max(abs(expected.loss), 1e-6)
        if not loss <= most:
            return f"{what}: loss {taken.loss:.9g}, of {like} {expected.loss:.9g}, by {loss:.1e} of it", loss
        scale = max((float(np.abs(x).max(initial=0)) for x in expected.grads.values()), default=0.0) or 1.0
        apart = {
            path: float(np.abs(x.astype(np.float64) - expected.grads[path]).max(initial=0)) / scale
            for path, x in taken.grads.items()
        }
        wrong = [path for path, by in apart.items() if not by <= most]
        worst = max(wrong or apart, key=lambda path: (math.isnan(apart[path]), apart[path]))
        if wrong:
            more = f" (and {len(wrong) - 1} more)" * (len(wrong) > 1)
            return f"{what}: gradient of `{worst}`{more}, of {like} by {apart[worst]:.1e} of the largest", apart[worst]
        return None, max(loss, apart[worst])

    # -- The smallest -------------------------------------------------------------------------------------------------

    def smallest(self, failing: Case, outcome: Outcome, *, is_asked: bool) -> Outcome:
        """A layout that differs, of which nothing can be left out; a given one stays as it is."""
        left = 0 if is_asked else MOST_SHRUNK
        found = True
        while found and left > 0:
            found = False
            for smaller in self._smaller(failing):
                left -= 1
                new = self.outcome(smaller)
                if new.verdict == "differs":
                    failing, outcome, found = smaller, new, True
                if found or left <= 0:
                    break
        return outcome

    def _smaller(self, case: Case) -> Iterator[Case]:
        """Layouts with one thing less: an option, an axis, half of an axis, a simpler form of a part."""
        for name in case.options:
            rest = {other: value for other, value in case.options.items() if other != name}
            yield dataclasses.replace(case, options=rest)
        sizes = {axis: size for axis, size in case.mesh.items() if size > 1}
        for axis in sizes if len(sizes) > 1 or max(sizes.values(), default=1) > 2 else ():
            for size in {1, sizes[axis] // 2} - {sizes[axis]} - ({1} if len(sizes) == 1 else set()):
                yield from self._on(case, {**sizes, axis: size})
        for at, part in enumerate(case.strategy.parts):
            for name, values in VARIED.items():
                if getattr(part, name, values[0]) != values[0]:
                    try:
                        simpler = dataclasses.replace(part, **{name: values[0]})
                    except MeshparError:
                        continue
                    parts = (*case.strategy.parts[:at], simpler, *case.strategy.parts[at + 1 :])
                    yield dataclasses.replace(case, strategy=Strategy(parts))

    def _on(self, case: Case, sizes: Mapping[str, int]) -> Iterator[Case]:
        """The same parts on a smaller mesh, those without an axis left out."""
        before = {type(part): part for part in case.strategy.parts}
        full = {**dict.fromkeys(self._axes(), 1), **sizes}

        def as_before(part: Parallelism) -> dict[str, Any]:
            return {name: getattr(before.get(type(part)), name, values[0]) for name, values in VARIED.items()}

        for form in candidates(self._search_space(full)):
            try:
                parts = tuple(_replaced(part, as_before(part)) for part in form.parts)
                yield self._case(full, parts, case.options)
            except MeshparError:
                continue


def _features(case: Case) -> Iterator[str]:
    """What a layout has: axes, kinds of parts and what they are given, options."""
    yield from (axis for axis, size in case.mesh.items() if size > 1)
    yield from (f"{name}={value}" for name, value in case.options.items())
    for part in case.strategy.parts:
        yield part.name
        yield from (f"{part.name} {name}={value}" for name, value in part.arguments().items() if name != "stages")


def _replaced(part: Parallelism, values: Mapping[str, Any]) -> Parallelism:
    there = {field.name for field in dataclasses.fields(part)}
    return dataclasses.replace(part, **{name: value for name, value in values.items() if name in there})


def _kept_gradients() -> optax.GradientTransformation:
    """Leaves gradients as they are, and keeps them."""

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return grads, jax.tree.map(lambda g, like: g.astype(like.dtype), grads, state)

    return optax.GradientTransformation(init, update)


def _raised(what: str, error: Exception) -> str:
    first = next(iter(str(error).strip().split("\n")), "")
    return f"{what}: {type(error).__name__}: {first[:300]}"


def _primes(number: int) -> list[int]:
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found
