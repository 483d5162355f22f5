"""Recipe: everything a training run is made of, as one frozen value that text can change field by field.

recipes/x.py ─► load_recipe ─► Recipe ─► override("mesh.fsdp=8", "steps=20") ─► Recipe ─► to_json
"""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import enum
import functools
import importlib.util
import inspect
import math
import numbers
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import click
import jax
import optax

from meshpar.data.source import DataSource
from meshpar.layers.precision import Precision
from meshpar.optim.averages import ema
from meshpar.optim.moments import DTYPES, low_precision_moments, offload_state
from meshpar.optim.orthogonalized import matrices, muon
from meshpar.parallel import Strategy, as_strategy, fsdp, parse_strategy

# Not for type checkers only: overrides read the annotations at run time.
from meshpar.sharding.adapters import Model
from meshpar.sharding.context import use_rules
from meshpar.sharding.host_resources import check_file, check_unicode
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import (
    AnyMesh,
    MeshparError,
    Names,
    PyTree,
    check_takes,
    is_int,
    named,
    near,
    path_str,
    problem,
)
from meshpar.training.lora import Lora
from meshpar.training.options import StepOptions
from meshpar.training.step import TrainStep

# ---- The optimizer ---------------------------------------------------------------------------------------------------


@runtime_checkable
class Optimizer(Protocol):
    """A recipe's description of its optimizer."""

    def build(self, *, steps: int, names: Mapping[str, Names]) -> optax.GradientTransformation:
        """The optax optimizer of a run of `steps` steps; `names` are the parameters' logical names by path."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """optax's AdamW with warm-up, a schedule and clipping (Loshchilov & Hutter 2019).

    Weights are decayed, norms are not: a leaf called `scale` or `bias`, or with fewer than two dims beside `layers`, is
    left out.
    """

    lr: float = 3e-4
    """Learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps over which it rises from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How it falls afterwards."""
    final_lr: float = 0.1
    """What is left of it at the end, as a fraction of `lr`; not used by "constant"."""
    schedule_steps: int | None = None
    """Length of the schedule; None: the run's. Set it when a run may be prolonged later: its start then stays."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Times the learning rate, taken from the weights every step."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None leaves them."""
    moments: str | None = None
    """Dtype in which both moments are kept, as in `mp.optim.low_precision_moments`; None: that of the parameters."""
    offload: bool = False
    """Whether both lie in the host's memory between updates, as in `mp.optim.offload_state`."""
    ema: float | None = None
    """Decay of averages of the parameters, as in `mp.ema`; None: there are none. Validation, the sample, `generate` and
    `convert` take them in the parameters' place."""

    _DECAYS: ClassVar[tuple[str, ...]] = ("b1", "b2")
    """Fields that are decays of moving averages."""

    def __post_init__(self) -> None:
        who, known = type(self).__name__, ("cosine", "linear", "constant")
        if self.schedule not in known:
            where = f"{who}(schedule={self.schedule!r})"
            raise problem(where, "use it", "there is no such schedule", f"one of {known}")
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if kind.startswith(("float", "int")) and not (value is None and "None" in kind):
                is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
                _check(f"{who}.{field.name}", value, is_number, "it is a number")
            _check_finite(f"{who}.{field.name}", value)
        at_least = {"warmup_steps": 0, "final_lr": 0, "weight_decay": 0} | dict.fromkeys(self._DECAYS, 0)
        for name, least in at_least.items():
            _check(f"{who}.{name}", getattr(self, name), getattr(self, name) >= least, f"it is at least {least}")
        for name in self._DECAYS:
            _check(f"{who}.{name}", getattr(self, name), getattr(self, name) < 1, "a decay is below 1")
        for name in ("lr", "eps", "clip_norm", "schedule_steps"):
            value = getattr(self, name)
            _check(f"{who}.{name}", value, value is None or value > 0, "it is above 0")
        length = self.schedule_steps
        if length is not None and self.schedule != "constant" and self.warmup_steps >= length:
            asked, fix = f"warm up within a schedule of {length} steps", f"set optimizer.warmup_steps below {length}"
            raise problem(f"{who}.warmup_steps ({self.warmup_steps})", asked, "no step is left for the decay", fix)
        _check(f"{who}.offload", self.offload, isinstance(self.offload, bool), "it is True or False")
        _check(f"{who}.moments", self.moments, self.moments in (None, *DTYPES), f"it is None or of {', '.join(DTYPES)}")
        _check(f"{who}.ema", self.ema, self.ema is None or 0 <= self.ema < 1, "a decay is from 0 up to 1, 1 excluded")

    def learning_rate(self, steps: int) -> Callable[[Any], Any]:
        """Return the learning rate by step for a run of this many steps.

        A run that is shorter than the warm-up ends within it, with a warning: a longer one begins in the same way.
        """
        if self.warmup_steps > steps:
            who = f"{type(self).__name__}(warmup_steps={self.warmup_steps})"
            reached = f"the learning rate reaches {steps / self.warmup_steps:.0%} of {self.lr:g}"
            warnings.warn(f"{who}: the warm-up is longer than the run of {steps} steps; {reached}", stacklevel=2)
        end = self.lr * self.final_lr
        decay_steps = max((self.schedule_steps or steps) - self.warmup_steps, 1)
        after: Any
        if self.schedule == "cosine":
            after = optax.cosine_decay_schedule(self.lr, decay_steps, alpha=self.final_lr)
        elif self.schedule == "linear":
            after = optax.linear_schedule(self.lr, end, decay_steps)
        else:
            after = optax.constant_schedule(self.lr)
        if not self.warmup_steps:
            return after
        # The first step already moves: a rate of exactly 0 would waste it.
        rise = optax.linear_schedule(self.lr / self.warmup_steps, self.lr, max(self.warmup_steps - 1, 1))
        return optax.join_schedules([rise, after], [self.warmup_steps])

    def build(self, *, steps: int, names: Mapping[str, Names]) -> optax.GradientTransformation:
        tx = self._rule(self.learning_rate(steps), names)
        tx = tx if self.clip_norm is None else optax.chain(optax.clip_by_global_norm(self.clip_norm), tx)
        tx = tx if self.moments is None else low_precision_moments(tx, self.moments)
        tx = offload_state(tx) if self.offload else tx
        return tx if self.ema is None else ema(tx, self.ema)

    def _rule(self, rate: Callable[[Any], Any], names: Mapping[str, Names]) -> optax.GradientTransformation:
        return optax.adamw(
            rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=functools.partial(decayed, names=names),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """Momentum, orthogonalised, for the matrices inside the model; AdamW for the rest: tables, heads, norms, routers.

    `mp.muon` applies it to sharded arrays; `meshpar.optim.orthogonalized.matrices` selects the matrices. `lr` is that
    of AdamW: updates are scaled to what AdamW's usually are (Liu et al. 2025, "Muon is Scalable for LLM Training").
    """

    momentum: float = 0.95
    """Decay of the momentum, which is Nesterov's."""
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    rms: float = 0.2
    """Root mean square of a matrix's update, in learning rates; AdamW's is 0.2 to 0.4."""
    share: bool = True
    """Whether ranks that hold the same matrices share the work and exchange what comes out, as in `mp.muon`."""

    _DECAYS: ClassVar[tuple[str, ...]] = (*AdamW._DECAYS, "momentum")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, is_right, rule in (
            ("ns_steps", is_int(self.ns_steps) and self.ns_steps >= 1, "it is a whole number of at least 1"),
            ("rms", self.rms > 0, "it is above 0"),
            ("share", isinstance(self.share, bool), "it is True or False"),
        ):
            _check(f"Muon.{name}", getattr(self, name), is_right, rule)

    def _rule(self, rate: Callable[[Any], Any], names: Mapping[str, Names]) -> optax.GradientTransformation:
        return muon(
            rate,
            ns_steps=self.ns_steps,
            beta=self.momentum,
            eps=self.eps,
            weight_decay=self.weight_decay,
            adam_b1=self.b1,
            adam_b2=self.b2,
            adam_weight_decay=self.weight_decay,
            adam_weight_decay_mask=functools.partial(decayed, names=names),
            muon_weight_dimension_numbers=matrices(names),
            consistent_rms=self.rms,
            share=self.share,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optax:
    """Any optax optimizer."""

    make: Callable[[int], optax.GradientTransformation]
    """From the number of steps of the run, for its schedules, to the optimizer."""

    def build(self, *, steps: int, names: Mapping[str, Names]) -> optax.GradientTransformation:
        check_takes("Optax.make", self.make, ("steps",), "make=lambda steps: ...", name=named(self.make))
        return self.make(steps)


def decayed(params: PyTree, names: Mapping[str, Names]) -> PyTree:
    """Which leaves decay: those with two dims or more beside `layers`, unless called `scale` or `bias`."""

    def wanted(key_path: Any, leaf: Any) -> bool:
        path = path_str(key_path)
        stacked = sum(name == "layers" for name in names.get(path, ()))
        return leaf.ndim - stacked >= 2 and path.rpartition("/")[2] not in ("scale", "bias")

    return jax.tree_util.tree_map_with_path(wanted, params)


# ---- The recipe ------------------------------------------------------------------------------------------------------


@runtime_checkable
class ModelConfig(Protocol):
    """A recipe's description of its model."""

    def build(self) -> Model: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A text to be written at the end of a run."""

    prompt: str = "def "
    """What the text begins with."""
    num_tokens: int = 200
    """How many tokens follow."""
    temperature: float = 0.8
    """Flatter than the model's own distribution above 1, sharper below; 0 takes the likeliest token."""

    def __post_init__(self) -> None:
        _check_finite("Sample.temperature", self.temperature)
        _check("Sample.num_tokens", self.num_tokens, self.num_tokens >= 1, "it is at least 1")
        _check("Sample.temperature", self.temperature, self.temperature >= 0, "it is at least 0")
        _check("Sample.prompt", self.prompt, bool(self.prompt), "a text begins with something")
        check_unicode(self.prompt, "Sample.prompt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a training run is made of. A recipe file has a function `recipe()` that returns one."""

    name: str
    """The run writes to `runs/<name>/`."""
    mesh: MeshSpec
    """The devices, by axis."""
    strategy: Strategy | Rules = dataclasses.field(default_factory=fsdp)
    """What is split over which axis."""
    model: ModelConfig | Model
    """What is trained."""
    loss: Callable[..., Any]
    """(model, batch, key) -> (loss, metrics)."""
    data: DataSource
    """What it is trained on."""
    lora: Lora | None = None
    """Adapters to train in place of the model's own matrices, as in `mp.lora`; None: all of it is trained."""
    optimizer: AdamW | Optax | Optimizer = dataclasses.field(default_factory=AdamW)
    """How it is trained."""
    steps: int
    """Updates in all."""
    batch_size: int
    """Rows of the global batch of one update, over all devices and micro-steps."""
    accumulate: int = 1
    """Micro-steps that share one update."""
    reduce_gradients: Literal["each_microbatch", "once"] = "each_microbatch"
    """Reduce the gradients of every micro-step into shards, or keep whole sums and reduce once."""
    loss_is: Literal["mean_over_examples"] | None = None
    """States that a scalar loss is a mean over examples that all count the same, as in `train_step`."""
    precision: Precision = dataclasses.field(default_factory=Precision)
    """Dtypes of parameters, compute and the reduction of gradients."""
    remat: str | None = None
    """What the layers recompute in the backward pass, and what they keep: "full", "dots", "minimal", "all_dots",
    "save:NAMES", "offload:NAMES", as in `train_step`; None recomputes nothing."""
    interleave: int = 1
    """Slices of each device's rows that layers run beside each other, as in `train_step`."""
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    """What to do when loss or gradients are not finite."""
    max_skipped: int = 100
    """With nonfinite="skip": the run stops at this many skipped updates in a row."""
    xla: Mapping[str, int | float | bool | str] = dataclasses.field(default_factory=dict)
    """XLA's compile options, names without dashes; they join and override those for GPUs."""
    pgle: bool = False
    """Profile-guided latency estimation: jax measures the first steps on GPUs (three by default) and compiles the step
    again with the measured times, so that XLA starts collectives in time. The program stays in jax's compilation cache,
    in `runs/jax_cache` unless `jax_compilation_cache_dir` is set; later starts load it. Training refuses it on other
    devices and with --profile."""
    seed: int = 0
    """Chooses the initial weights, dropout and the order of the data."""
    validate_every: int | None = None
    """Steps between validations; None validates at the end only."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None saves at the end and when interrupted."""
    checkpoint_retries: int = 3
    """How many failed saves in a row are tried again at the next interval; one more stops the run."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints stay."""
    sample: Sample | None = None
    """A text to write at the end, for language models."""
    writers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where numbers are written beside metrics.jsonl, each an extra of this package."""

    def __post_init__(self) -> None:
        _check_kind("mesh", self.mesh, MeshSpec, "mp.MeshSpec(fsdp=4, tensor=2)")
        object.__setattr__(self, "strategy", as_strategy(self.strategy))
        _check_kind("precision", self.precision, Precision, 'mp.Precision(compute="bfloat16")')
        _check_kind("lora", Lora() if self.lora is None else self.lora, Lora, "mp.lora(rank=8)")
        for field, wants in (("model", "build"), ("data", "open"), ("optimizer", "build"), ("loss", "__call__")):
            _check_offers(field, getattr(self, field), wants)
        fix = "def loss(model, batch, key): return loss, metrics"
        check_takes("Recipe.loss", self.loss, ("model", "batch", "key"), fix, name=named(self.loss))
        for field in ("steps", "batch_size", "max_skipped", "validate_every", "checkpoint_every", "keep_checkpoints"):
            value = getattr(self, field)
            optional = value is None and field.endswith("_every")
            _check(f"Recipe.{field}", value, optional or is_int(value, 1), "it is a positive integer")
        _check("Recipe.pgle", self.pgle, isinstance(self.pgle, bool), "it is True or False")
        retries = self.checkpoint_retries
        _check("Recipe.checkpoint_retries", retries, is_int(retries, 0), "it is an integer of at least 0")
        _check(
            "Recipe.seed", self.seed, is_int(self.seed, -(2**63)) and self.seed < 2**63, "it is an integer of 64 bits"
        )
        folder = self.name.replace("-", "").replace("_", "").replace(".", "")
        _check("Recipe.name", self.name, folder.isalnum(), "it names a folder: letters, digits, - _ .")
        _check("Recipe.name", self.name[:60], len(self.name) <= 200, "a folder's name has 200 characters at most")
        _check("Recipe.steps", self.steps, self.steps < 2**31, "steps are counted in 32 bits: it is below 2^31")
        _ = self.step_options  # its own checks
        if self.batch_size % self.accumulate:
            where, asked = f"Recipe.batch_size ({self.batch_size})", f"split it into {self.accumulate} micro-steps"
            fix = f"use a batch of {-(-self.batch_size // self.accumulate) * self.accumulate}, or another `accumulate`"
            raise problem(where, asked, f"{self.batch_size} is not a multiple of {self.accumulate}", fix)

    @property
    def step_options(self) -> StepOptions:
        return StepOptions(
            accumulate=self.accumulate,
            reduce_gradients=self.reduce_gradients,
            precision=self.precision,
            remat=self.remat,
            interleave=self.interleave,
            nonfinite=self.nonfinite,
            loss_is=self.loss_is,
            xla=self.xla,
        )

    def replace(self, **changes: Any) -> Recipe:
        return dataclasses.replace(self, **changes)

    def override(self, *assignments: str) -> Recipe:
        """The same recipe with fields set by text, as "mesh.fsdp=8"; see `override`."""
        return override(self, assignments)

    def to_json(self) -> dict[str, Any]:
        """Every field as plain data, for a person to read; functions stand as their names."""
        return _plain(self)


def _check(where: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise problem(where, f"use {value!r}", rule, "change it")


def _check_finite(where: str, value: object) -> None:
    _check(where, value, not isinstance(value, float) or math.isfinite(value), "it is a finite number")


def _check_kind(field: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        raise problem(f"Recipe.{field}", f"be {value!r}", f"it is a {kind.__name__}", f"write {field}={example}")


def _check_offers(field: str, value: object, method: str) -> None:
    if field == "model" and hasattr(value, "bind"):  # a Model, made already
        return
    if not callable(getattr(value, method, None)) or isinstance(value, type):
        wants = "a function" if method == "__call__" else f"an object with a method `{method}`"
        hint = f" Call it: {value.__name__}(...)" if isinstance(value, type) else ""
        raise problem(f"Recipe.{field}", f"be {value!r}", f"it is {wants}", f"give it one.{hint}")


def build_model(recipe: Recipe) -> Model:
    """The recipe's model, described, with its adapters."""
    model = recipe.model if isinstance(recipe.model, Model) else recipe.model.build()
    return model if recipe.lora is None else recipe.lora(model)


def build_optimizer(recipe: Recipe, model: Model, mesh: AnyMesh) -> optax.GradientTransformation:
    """The recipe's optimizer, which may look at the names of the model's parameters."""
    with use_rules(mesh, recipe.strategy):
        names = dict(model.names())
    return recipe.optimizer.build(steps=recipe.steps, names=names)


def build_step(recipe: Recipe) -> TrainStep:
    """The recipe's training step, as `train` runs it and `explain` compiles it."""
    return TrainStep(recipe.loss, recipe.step_options)


# ---- From a file -----------------------------------------------------------------------------------------------------


def load_recipe(path: str | Path, *, devices: int | None = None) -> Recipe:
    """The recipe that a file's function `recipe` returns.

    Args:
      path: a Python file; `file.py:name` calls another of its functions.
      devices: how many devices the mesh is for, handed to a function that asks for `devices`. None leaves the
        function its default.

    Raises:
      ValueError: no such file or function, or one that returns something else.
    """
    file, _, function = str(path).partition(":")
    with crashes_explained({str(path): file}, "call it"):
        make = _function_of(Path(file), function or "recipe")
        asks = "devices" in inspect.signature(make).parameters
        recipe = make(devices=devices) if asks and devices is not None else make()
    if not isinstance(recipe, Recipe):
        asked = f"take a Recipe from its function `{make.__name__}`"
        raise problem(f"recipe file `{file}`", asked, f"it returned {type(recipe).__name__}", "return mp.Recipe(...)")
    return recipe


@contextlib.contextmanager
def crashes_explained(recipes: Mapping[str, str], asked: str) -> Iterator[None]:
    """What recipe files raise is their author's to correct: told with its line. What meshpar says about it stays.

    Args:
      recipes: files by the name that each was given; the first is blamed for what none of them raised.
      asked: of a recipe.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, click.ClickException | MeshparError):
            raise
        names = {os.path.realpath(file): name for name, file in recipes.items()}
        file, line = _raised_at(error, tuple(names))
        said = next(iter(str(error).strip().split("\n")), "") or "no message"
        exists = f"it raised {type(error).__name__} ({said[:300]}) at {os.path.basename(file)}:{line}"
        where = f"recipe `{names.get(file, next(iter(recipes)))[:200]}`"
        raise problem(where, asked, exists, "correct that line; --traceback shows how it got there") from error


def _raised_at(error: BaseException, recipes: Sequence[str]) -> tuple[str, int]:
    """The line of a recipe that an exception went through last, else the line it is from."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    import traceback

    frames = [
        (os.path.realpath(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return next((at for at in reversed(frames) if at[0] in recipes), frames[-1])


def _function_of(file: Path, function: str) -> Callable[..., Any]:
    if not os.path.exists(file):
        raise problem(f"recipe `{str(file)[:200]}`", "read it", "there is no such file", _files_near(file))
    check_file(file, f"recipe `{file}`", "name a .py file")
    module = _import_file(file)
    found = getattr(module, function, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        fix = f"define `def {function}() -> mp.Recipe` ({near(function, names)})"
        raise problem(f"recipe file `{file}`", f"call its function `{function}`", "it has none", fix)
    return found


def _import_file(file: Path) -> types.ModuleType:
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) and Path(main.__file__ or "").resolve() == file.resolve():
        return main  # a recipe that runs itself
    spec = importlib.util.spec_from_file_location(f"meshpar_recipe_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise problem(f"recipe `{file}`", "import it", "it is no Python file", "name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their annotations up there
    # Python's bytecode cache compares sizes and times in whole seconds, and would miss a quick edit of a number.
    exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    return module


def _files_near(file: Path) -> str:
    here = file.parent if file.parent.is_dir() else Path()
    found = {str(p) for folder in {here, Path("recipes")} if folder.is_dir() for p in folder.glob("*.py")}
    same_name = [path for path in found if Path(path).stem == file.stem]
    return f"did you mean `{same_name[0]}`?" if same_name else near(str(file), found)


# ---- To plain data ---------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A value as JSON has it; what is neither data nor a dataclass stands as its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, MeshSpec):
        inside = {} if value.inside_node == ("tensor",) else {"inside_node": list(value.inside_node)}
        types = {"axis_types": value.explicit_axes} if value.explicit_axes else {}
        return {**value, **inside, **types}
    if isinstance(value, Strategy):
        return value.label
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.repr}
        return fields if isinstance(value, Recipe | Precision) else {"type": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, functools.partial):
        given = [*map(repr, value.args), *(f"{key}={item!r}" for key, item in value.keywords.items())]
        return f"{_plain(value.func)}({', '.join(given)})"
    if callable(value) and hasattr(value, "__qualname__"):
        # A recipe file's own functions live in a module whose name says only how it was loaded.
        module = "" if value.__module__.startswith(("meshpar_recipe_", "__main__")) else f"{value.__module__}."
        return f"{module}{value.__qualname__}"
    return type(value).__name__


RESUMABLE = (
    "name", "steps", "mesh", "strategy", "remat", "nonfinite", "max_skipped", "xla", "pgle", "validate_every",
    "checkpoint_every", "checkpoint_retries", "keep_checkpoints", "sample", "writers", "data.prefetch", "data.cache",
)  # fmt: skip
"""Fields that may differ when a run is resumed: none of them changes what is trained on what."""


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, Any]]:
    """Fields in which two recipes, as `to_json` gives them, differ: dotted path to (before, after).

    Args:
      before: the older one. It may have been written when there were fewer fields.
      after: the newer one.
      defaults: by dotted path, what a field that `before` does not have was taken to be: see `defaults_of`.
    """
    absent = "(absent)"
    old, new = dict(_flat(before)), dict(_flat(after))
    # Only a config that was there can have been without a field; one that was not there has no defaults either.
    there = {"", *(path.rpartition(".")[0] for path in old)}
    unsaid = {path: value for path, value in (defaults or {}).items() if path.rpartition(".")[0] in there}
    return {
        path: (old.get(path, absent), new.get(path, absent))
        for path in {**old, **new}
        if old.get(path, unsaid.get(path, absent)) != new.get(path, absent)
    }


def defaults_of(recipe: Recipe) -> dict[str, Any]:
    """What fields are where nothing is said about them, by dotted path, in a recipe and in the configs it holds."""
    found: dict[str, Any] = {}

    def collect(config: Any, prefix: str) -> None:
        for field in dataclasses.fields(config):
            value, path = getattr(config, field.name), f"{prefix}{field.name}"
            if dataclasses.is_dataclass(value) and not isinstance(value, type | MeshSpec | Strategy):
                collect(value, f"{path}.")
            elif field.default is not dataclasses.MISSING and field.repr:
                found.update(_flat({path: _plain(field.default)}))

    collect(recipe, "")
    return found


def breaks_resuming(path: str) -> bool:
    """Whether a run cannot be resumed when this field has changed."""
    return not any(path == free or path.startswith(f"{free}.") for free in RESUMABLE)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---- Overrides: text by dotted path, typed by the field's annotation -------------------------------------------------

_Tree: TypeAlias = dict[str, "str | _Tree"]


def override(recipe: Recipe, assignments: Iterable[str]) -> Recipe:
    """The recipe with fields set by text.

    Args:
      recipe: the recipe to start from.
      assignments: each as "dotted.path=text". The text is read by the type of the field: numbers, true and false,
        none, words, `a,b` for tuples, `fsdp=4,tensor=2` for the mesh, `fsdp() | tensor_parallel()` for the strategy.
        They are applied together, so two fields that must fit each other can be set in any order. Of two that set the
        same field the later one wins.

    Raises:
      ValueError: an unknown name, a text that is not of the field's type, a value the field's owner refuses.
    """
    tree: _Tree = {}
    for assignment in assignments:
        check_unicode(assignment, "an override")
        path, equals, text = assignment.partition("=")
        if not equals or not all(part.strip() for part in path.split(".")):
            raise problem(
                f"override `{assignment}`", "set a field", "it is not path=value", "write it like mesh.fsdp=8"
            )
        _plant(tree, [part.strip() for part in path.split(".")], text.strip(), assignment)
    return _with(recipe, tree, ()) if tree else recipe


def _plant(tree: _Tree, parts: Sequence[str], text: str, assignment: str) -> None:
    *above, last = parts
    for part in above:
        branch = tree.setdefault(part, {})
        if isinstance(branch, str):
            raise _both(assignment, part)
        tree = branch
    if isinstance(tree.get(last), dict):
        raise _both(assignment, last)
    tree[last] = text


def _both(assignment: str, name: str) -> MeshparError:
    asked, fix = f"set `{name}` and a field of it", f"set its fields only, or `{name}=...` only"
    return problem(f"override `{assignment}`", asked, "which of the two comes first is not said", fix)


def _with(value: Any, tree: _Tree, path: tuple[str, ...]) -> Any:
    """`value` with the branches of `tree` set; `path` is where it stands in the recipe."""
    if isinstance(value, MeshSpec):
        return _with_axes(value, tree, path)
    if isinstance(value, Mapping):
        for name, text in tree.items():
            if not isinstance(text, str):
                where, asked = f"`{_dotted(path, name)}.{next(iter(text))}`", f"set a field of `{_dotted(path, name)}`"
                raise problem(where, asked, "it is a value and has no fields", f"write {_dotted(path, name)}=VALUE")
        found = {name: read(str(text), int | float | bool | str, (*path, name)) for name, text in tree.items()}
        return {**value, **found}
    if not dataclasses.is_dataclass(value) or isinstance(value, type | Strategy):
        name = next(iter(tree))
        where, fix = f"`{_dotted(path, name)}`", f"set `{_dotted(path)}` itself, or change the recipe file"
        raise problem(where, f"set a field of `{_dotted(path)}`", f"that is {value!r}, which has no fields", fix)
    changed = {}
    for name, branch in tree.items():
        hint = _annotation(value, name, path)
        now = getattr(value, name)
        if isinstance(branch, str):
            changed[name] = read(branch, hint, (*path, name), now=now)
        else:
            changed[name] = _with(_entered(now, hint), branch, (*path, name))
    try:
        return dataclasses.replace(value, **changed)
    except MeshparError:
        raise
    except ValueError as error:  # a class that is not ours, with checks of its own
        asked = ", ".join(f"{_dotted(path, name)}={new!r}" for name, new in changed.items())
        raise problem(f"`{_dotted(path) or 'recipe'}`", f"set {asked}", str(error), "choose other values") from error


def _with_axes(spec: MeshSpec, tree: _Tree, path: tuple[str, ...]) -> MeshSpec:
    sizes = {}
    inside = spec.inside_node
    for name, text in tree.items():
        if name not in spec and name != "inside_node":
            asked = f"set the size of mesh axis `{name}`"
            fix = f"{near(name, spec)} An axis of your own is added with mesh={name}=2,fsdp=4"
            raise problem(f"`{_dotted(path, name)}`", asked, "the mesh has no such axis", fix)
        if not isinstance(text, str):
            raise problem(f"`{_dotted(path, name)}`", "set a field of it", "an axis is a number", f"set {name}=8")
        if name == "inside_node":
            inside = read(text, tuple[str, ...], (*path, name))
        else:
            sizes[name] = read(text, int, (*path, name))
    return spec.replace(inside_node=inside, **sizes)


def _annotation(value: Any, name: str, path: tuple[str, ...]) -> Any:
    """The type of a field of a dataclass; an unknown name is an error that lists the near ones."""
    fields = {f.name: f for f in dataclasses.fields(value) if f.init}
    if name not in fields:
        elsewhere = [p for p in _paths(value) if p.rpartition(".")[2] == name]
        there = " or ".join(f"`{_dotted(path, p)}`" for p in elsewhere[:3])
        where, fix = f"`{_dotted(path, name)}`", f"did you mean {there}?" if elsewhere else near(name, fields)
        raise problem(where, f"set the field `{name}` of {type(value).__name__}", "there is no such field", fix)
    try:
        return typing.get_type_hints(type(value))[name]
    except NameError:  # an annotation that only a type checker can resolve
        return type(getattr(value, name))


def _paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all fields below a value."""
    if isinstance(value, MeshSpec):
        yield from (f"{prefix}{axis}" for axis in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, Strategy):
        for field in dataclasses.fields(value):
            yield f"{prefix}{field.name}"
            yield from _paths(getattr(value, field.name), f"{prefix}{field.name}.")


def _entered(value: Any, hint: Any) -> Any:
    """A value to set fields of: where there is None, the dataclass that the annotation also allows, by its defaults."""
    if value is not None:
        return value
    for member in typing.get_args(hint):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            with contextlib.suppress(TypeError):  # a class with fields that have no default
                return member()
    return None


def _dotted(path: tuple[str, ...], name: str = "") -> str:
    return ".".join((*path, name) if name else path)


class _Unreadable(Exception):
    """A text that is not of the wanted type."""


def read(text: str, hint: Any, path: tuple[str, ...], *, now: Any = None) -> Any:
    """A value of the type `hint` from text. Raises `ValueError`: the text is not of that type."""
    try:
        return _read(text, hint)
    except _Unreadable as error:
        has_fields = dataclasses.is_dataclass(now) and not isinstance(now, Strategy)
        expects = f"a {type(now).__name__}" if has_fields else _spoken(hint)
        how = _field_by_field(path, now) if has_fields else str(error) or _example(path, hint)
        raise problem(f"`{_dotted(path)}`", f"set it to `{text}`", f"it expected {expects}", how) from None


def _read(text: str, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _read(text, args[0])
    if origin in (typing.Union, types.UnionType):
        return _read_union(text, args)
    if origin is Literal:
        return _read_choice(text, args)
    if hint in _READERS:
        return _READERS[hint](text)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _read_word(text, {member.name.lower(): member for member in hint})
    if (origin or hint) in (tuple, list, collections.abc.Sequence):
        return _read_many(text, origin or hint, args)
    if (origin or hint) in (dict, collections.abc.Mapping):
        return _read_dict(text, args)
    raise _Unreadable("it cannot be given as text: change the recipe file")


def _read_union(text: str, members: tuple[Any, ...]) -> Any:
    # None before words, words last: "none" and "3" are words too.
    order = sorted(members, key=lambda m: (m is str or m is Any, m is not types.NoneType))
    why = ""
    for member in order:
        try:
            return _read(text, member)
        except _Unreadable as error:
            why = str(error) or why
    raise _Unreadable(why)


def _read_choice(text: str, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        with contextlib.suppress(_Unreadable):
            if _read(text, type(choice)) == choice:
                return choice
    raise _Unreadable(near(text, map(str, choices)))


def _read_word(text: str, words: Mapping[str, Any]) -> Any:
    if text.lower() not in words:
        raise _Unreadable
    return words[text.lower()]


def _read_number(text: str, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(text)
    except ValueError:
        raise _Unreadable from None
    if kind is int and abs(number) >= 2**63:  # a larger one may overflow a float, too
        raise _Unreadable("give one below 2^63")
    if not math.isfinite(number):
        raise _Unreadable("give a finite one")
    return number


def _read_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deep
        return text


def _read_many(text: str, kind: Any, args: tuple[Any, ...]) -> Any:
    texts = _items(text)
    if not args:
        values = [_read_literal(item) for item in texts]
    elif kind is not tuple or args[-1] is Ellipsis:
        values = [_read(item, args[0]) for item in texts]
    elif len(texts) == len(args):
        values = [_read(item, arg) for item, arg in zip(texts, args, strict=True)]
    else:
        raise _Unreadable(f"give {len(args)} values, separated by commas, where {len(texts)} came")
    return values if kind is list else tuple(values)


def _items(text: str) -> list[str]:
    """The parts of "a,b", "(1, 2)" or '["a", "b"]'."""
    if text[:1] in ("(", "["):
        try:
            return [item if isinstance(item, str) else repr(item) for item in ast.literal_eval(text)]
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            inner = text[1:-1]
            if not inner.strip() or text[-1] != {"(": ")", "[": "]"}[text[0]] or set(inner) & set("()[]"):
                raise _Unreadable("write it like a,b") from None
            text = inner  # words without quotes
    return [part.strip() for part in text.split(",") if part.strip()]


def _read_dict(text: str, args: tuple[Any, ...]) -> dict[Any, Any]:
    found = _read_literal(text)
    if not isinstance(found, dict):
        raise _Unreadable('write it like {"a": 1}')
    key_hint, value_hint = args or (Any, Any)

    def item(value: Any, hint: Any) -> Any:
        return _read(value if isinstance(value, str) else repr(value), hint)

    return {item(key, key_hint): item(value, value_hint) for key, value in found.items()}


def _unquoted(text: str) -> str:
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NONE = functools.partial(_read_word, words={"none": None, "null": None})
_READERS: Mapping[Any, Callable[[str], Any]] = {
    Any: _read_literal,
    None: _NONE,
    types.NoneType: _NONE,
    bool: functools.partial(_read_word, words=_TRUTH),
    int: functools.partial(_read_number, kind=int),
    float: functools.partial(_read_number, kind=float),
    str: _unquoted,
    MeshSpec: MeshSpec.parse,
    Strategy: parse_strategy,
    Path: lambda text: Path(_unquoted(text)),
}
"""From text to a value, by the type."""


def _field_by_field(path: tuple[str, ...], value: Any) -> str:
    names = [f"`{_dotted(path, f.name)}`" for f in dataclasses.fields(value) if f.init]
    fields = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"set its fields: {fields}; another class is written in the recipe file, `{path[-1]}=...`"


def _spoken(hint: Any) -> str:
    """A type annotation in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spoken(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in args)
    if hint in (None, types.NoneType):
        return "none"
    if (origin or hint) in (tuple, list, collections.abc.Sequence):
        of = [_spoken(arg) for arg in args if arg is not Ellipsis]
        return "values separated by commas" + (f" ({', '.join(of)})" if of else "")
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    return words.get(hint) or f"a {getattr(hint, '__name__', hint)}"


def _example(path: tuple[str, ...], hint: Any) -> str:
    examples = {int: "8", float: "3e-4", bool: "true", str: "text"}
    kinds = (hint, *typing.get_args(hint))
    value = next((examples[kind] for kind in kinds if kind in examples), None)
    return f"write it like {_dotted(path)}={value}" if value else f"give it as {_spoken(hint)}"
