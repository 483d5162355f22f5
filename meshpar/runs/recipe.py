"""Recipes: the frozen description of a training run, its optimizers, and overrides from text.

recipes/x.py ─► load_recipe ─► Recipe ─► override("mesh.fsdp=8", "steps=20") ─► Recipe ─► to_json
"""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import math
import numbers
import os
import re
import sys
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import click
import optax

from meshpar.data.source import DataSource, Source
from meshpar.layers.precision import Precision
from meshpar.optim.averages import ema
from meshpar.optim.matrix_dims import decayed
from meshpar.optim.moments import DTYPES, low_precision_moments, offload_state
from meshpar.optim.orthogonalized import matrices, muon
from meshpar.optim.rounding import stochastic_rounding
from meshpar.optim.stacked_layers import per_layer
from meshpar.parallel import Strategy, as_strategy, fsdp, parse_strategy

# Not for type checkers only: overrides read the annotations at run time.
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.context import use_rules
from meshpar.sharding.host_resources import check_file, check_unicode
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import with_field_docs
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import (
    AnyMesh,
    MeshparError,
    Names,
    check_bool,
    check_choice,
    check_divides,
    check_positive_int,
    check_takes,
    is_int,
    named,
    near,
    near_or,
    problem,
)
from meshpar.training.lora import Lora
from meshpar.training.options import StepOptions
from meshpar.training.step import TrainStep

_POSITIVE: tuple[Callable[[Any], bool], str] = (lambda value: value > 0, "it must be positive")
_AT_LEAST_0: tuple[Callable[[Any], bool], str] = (lambda value: value >= 0, "it must be at least 0")
_RATE: tuple[Callable[[Any], bool], str] = (lambda value: 0 <= value < 1, "it must be at least 0 and below 1")


def _check(where: str, value: object, is_valid: bool, rule: str, code: str = "out-of-range") -> None:
    if not is_valid:
        raise problem(where, f"use {value!r:.200}", rule, "change it", code=code)


def _check_number(where: str, value: Any, is_valid: Callable[[Any], bool], rule: str) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    _check(where, value, is_number, "it must be a number", "wrong-type")
    _check(where, value, math.isfinite(value), "it must be finite")
    _check(where, value, is_valid(value), rule)


# ---- The optimizer ---------------------------------------------------------------------------------------------------


class Optimizer(Protocol):
    """Description of an optimizer in a recipe."""

    def build(self, *, steps: int, names: Mapping[str, Names]) -> optax.GradientTransformation:
        """Return the optax optimizer for a run of `steps` steps. `names` has the logical names of each parameter."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """optax's AdamW with warm-up, a schedule and clipping (Loshchilov & Hutter 2019).

    Weight decay applies to the parameters that `meshpar.optim.matrix_dims.decayed` selects: those with at least two
    dims, not counting dims that stack layers or experts, that are not called `scale` or `bias`.
    """

    lr: float = 3e-4
    """Learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps of the linear warm-up from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Schedule after the warm-up."""
    final_lr: float = 0.1
    """Learning rate at the end as a fraction of `lr`. Not used by "constant"."""
    schedule_steps: int | None = None
    """Steps of the schedule; None means the steps of the run when it started. If set, the learning rates do not depend
    on `steps`."""
    b1: float = 0.9
    """Decay rate of the first moment."""
    b2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay: each step subtracts `weight_decay * learning rate * weight`."""
    clip_norm: float | None = 1.0
    """Clip gradients to this global norm; None disables clipping."""
    moments: str | None = None
    """Dtype of both moments, as in `mp.optim.low_precision_moments`. None means the dtype of the parameters."""
    offload: bool = False
    """Keep both moments in host memory between updates, as in `mp.optim.offload_state`."""
    stochastic_rounding: bool = False
    """Round updated parameters stochastically, as in `mp.optim.stochastic_rounding`, because rounding to nearest loses
    most updates of bfloat16 parameters."""
    ema: float | None = None
    """Decay rate of an exponential moving average of the parameters, as in `mp.ema`; None disables it. Validation, the
    sample, `generate` and `convert` use the averages instead of the parameters."""

    _RULES: ClassVar[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
        **dict.fromkeys(("lr", "eps", "clip_norm", "schedule_steps"), _POSITIVE),
        **dict.fromkeys(("warmup_steps", "final_lr", "weight_decay"), _AT_LEAST_0),
        **dict.fromkeys(("b1", "b2", "ema"), _RATE),
    }
    """Valid values of each numeric field: a condition, and the condition in words."""

    def __post_init__(self) -> None:
        who = type(self).__name__
        check_choice(who, "the schedule after the warm-up", ("cosine", "linear", "constant"), schedule=self.schedule)
        check_choice(who, "the dtype of the moments", (None, *DTYPES), moments=self.moments)
        check_bool(who, "moments are kept in host memory", offload=self.offload)
        check_bool(who, "updated parameters are rounded stochastically", stochastic_rounding=self.stochastic_rounding)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in self._RULES and not (value is None and "None" in str(field.type)):
                _check_number(f"{who}.{field.name}", value, *self._RULES[field.name])
        length = self.schedule_steps
        is_short = length is None or self.schedule == "constant" or self.warmup_steps < length
        rule = f"it must be less than schedule_steps ({length}), so that steps are left for the decay"
        _check(f"{who}.warmup_steps", self.warmup_steps, is_short, rule)

    def learning_rate(self, steps: int) -> Callable[[Any], Any]:
        """Return the learning rate schedule of a run of `steps` steps.

        A run that is shorter than the warm-up ends during the warm-up. A warning is printed.
        """
        if self.warmup_steps > steps:
            who = f"{type(self).__name__}(warmup_steps={self.warmup_steps})"
            reached = f"the learning rate reaches {steps / self.warmup_steps:.0%} of {self.lr:g}"
            warnings.warn(f"{who}: the warm-up is longer than the run of {steps} steps; {reached}", stacklevel=2)
        decay_steps = max((self.schedule_steps or steps) - self.warmup_steps, 1)
        after: Any = optax.constant_schedule(self.lr)
        if self.schedule == "cosine":
            after = optax.cosine_decay_schedule(self.lr, decay_steps, alpha=self.final_lr)
        elif self.schedule == "linear":
            after = optax.linear_schedule(self.lr, self.lr * self.final_lr, decay_steps)
        if not self.warmup_steps:
            return after
        # Not from 0, because the first step would then change nothing.
        rise = optax.linear_schedule(self.lr / self.warmup_steps, self.lr, max(self.warmup_steps - 1, 1))
        return optax.join_schedules([rise, after], [self.warmup_steps])

    def build(self, *, steps: int, names: Mapping[str, Names]) -> optax.GradientTransformation:
        tx = self._rule(self.learning_rate(steps), names)
        tx = tx if self.clip_norm is None else optax.chain(optax.clip_by_global_norm(self.clip_norm), tx)
        tx = tx if self.moments is None else low_precision_moments(tx, self.moments)
        tx = stochastic_rounding(tx) if self.stochastic_rounding else tx
        tx = offload_state(tx) if self.offload else tx
        return tx if self.ema is None else ema(tx, self.ema)

    def _rule(self, rate: Callable[[Any], Any], names: Mapping[str, Names]) -> optax.GradientTransformation:
        return optax.adamw(
            rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=decayed(names),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """Muon for the hidden matrices of the model, AdamW for embeddings, heads, norms and routers.

    `mp.muon` runs it on sharded arrays, and `meshpar.optim.orthogonalized.matrices` selects the matrices. `lr` is the
    learning rate of AdamW, because updates are scaled to the usual size of AdamW's (Liu et al. 2025, "Muon is Scalable
    for LLM Training").
    """

    momentum: float = 0.95
    """Decay rate of the Nesterov momentum."""
    ns_steps: int = 5
    """Number of Newton-Schulz iterations."""
    rms: float = 0.2
    """Root mean square of each matrix update, as a multiple of the learning rate. AdamW's updates have 0.2 to 0.4."""
    share: bool = True
    """Divide the work among devices that have the same matrices, and exchange the results, as in `mp.muon`."""

    _RULES: ClassVar = {**AdamW._RULES, "momentum": _RATE, "rms": _POSITIVE}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_int("Muon", "the number of Newton-Schulz iterations", ns_steps=self.ns_steps)
        check_bool("Muon", "devices share the work", share=self.share)

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
            adam_weight_decay_mask=decayed(names),
            muon_weight_dimension_numbers=matrices(names),
            consistent_rms=self.rms,
            share=self.share,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optax:
    """Any optax optimizer."""

    make: Callable[[int], optax.GradientTransformation]
    """Function that receives the number of steps and returns the optimizer."""
    schedule_steps: int | None = None
    """Number of steps for `make`; None means the steps of the run when it started."""
    per_layer: bool = False
    """Apply the optimizer to each layer and expert of a stack, as in `mp.optim.per_layer`."""

    def __post_init__(self) -> None:
        check_bool("Optax", "the optimizer is applied to each layer", per_layer=self.per_layer)
        if self.schedule_steps is not None:
            check_positive_int("Optax", "the number of steps for `make`", schedule_steps=self.schedule_steps)

    def build(self, *, steps: int, names: Mapping[str, Names]) -> optax.GradientTransformation:
        check_takes("Optax.make", self.make, ("steps",), "make=lambda steps: ...", name=named(self.make))
        tx = self.make(self.schedule_steps or steps)
        return per_layer(tx, names) if self.per_layer else tx


# ---- The recipe ------------------------------------------------------------------------------------------------------


class ModelConfig(Protocol):
    """Description of a model in a recipe."""

    def build(self) -> Model: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A text that the model generates at the end of a run."""

    prompt: str = "def "
    """Start of the text."""
    num_tokens: int = 200
    """Number of tokens to generate."""
    temperature: float = 0.8
    """Sampling temperature; 0 takes the most likely token."""

    def __post_init__(self) -> None:
        _check_number("Sample.temperature", self.temperature, *_AT_LEAST_0)
        check_positive_int("Sample", "the number of tokens to generate", num_tokens=self.num_tokens)
        _check("Sample.prompt", self.prompt, bool(self.prompt), "it must not be empty")
        check_unicode(self.prompt, "Sample.prompt")


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Description of a training run. A recipe file has a function `recipe()` that returns one."""

    name: str
    """The run writes to `runs/<name>/`."""
    mesh: MeshSpec
    """Mesh axes and their sizes."""
    strategy: Strategy | Rules = dataclasses.field(default_factory=fsdp)
    """Parallelism of the run: a strategy, or rules that map logical names to mesh axes."""
    model: ModelConfig | Model
    """Model, or its config."""
    loss: Callable[..., Any]
    """Loss function `(model, batch, key) -> (loss, metrics)`."""
    data: DataSource
    """Training and validation data."""
    lora: Lora | None = None
    """LoRA adapters to train, as in `mp.lora`; None trains all parameters."""
    optimizer: AdamW | Optax | Optimizer = dataclasses.field(default_factory=AdamW)
    """Optimizer, or its config."""
    steps: int
    """Number of updates."""
    batch_size: int
    """Examples of the global batch of one update, over all devices and micro-steps."""
    step: StepOptions = dataclasses.field(default_factory=StepOptions)
    """Options of the training step: micro-steps, precision, rematerialization and others."""
    max_skipped: int = 100
    """With `step.nonfinite="skip"`, the run stops after this many consecutive skipped updates."""
    pgle: bool = False
    """Profile-guided latency estimation: jax measures the first steps on GPUs (three by default) and compiles the step
    again, so that XLA's scheduler uses measured times. jax's compilation cache keeps the program, in `runs/jax_cache`
    unless `jax_compilation_cache_dir` is set, for later starts. Not available on other devices or with --profile."""
    seed: int = 0
    """Seed of initial weights, dropout and data order."""
    validate_every: int | None = None
    """Steps between validations; None validates at the end only."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None saves only at the end and when interrupted."""
    checkpoint_retries: int = 3
    """Number of consecutive failed saves that are retried at the next interval. One more failed save stops the run."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep."""
    sample: Sample | None = None
    """Text to generate at the end, for language models."""
    writers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Metric writers in addition to metrics.jsonl. Each needs the extra of the same name."""

    def __new__(cls, **fields: Any) -> Recipe:
        """Check the names of the fields."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields.keys() - known:
            is_option = name in (field.name for field in dataclasses.fields(StepOptions))
            fix = f"write step=mp.StepOptions({name}=...)" if is_option else near(name, known)
            raise problem(f"Recipe({name}=...)", "set it", "a recipe has no such field", fix, code="unknown-name")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", as_strategy(self.strategy))
        if isinstance(self.optimizer, optax.GradientTransformation):
            reason, fix = (
                "it is an optax optimizer, not its description",
                "write mp.Optax(make=lambda steps: optax.sgd(0.1))",
            )
            raise problem("Recipe.optimizer", "build it for a number of steps", reason, fix, code="wrong-type")
        for field, kind in (("mesh", MeshSpec), ("step", StepOptions), ("lora", Lora), ("sample", Sample)):
            value = getattr(self, field)
            is_kind = isinstance(value, kind) or (value is None and field in ("lora", "sample"))
            _check(f"Recipe.{field}", value, is_kind, f"it must be an mp.{kind.__name__}", "wrong-type")
        for field, methods in {"model": ("build", "bind"), "data": ("open",), "optimizer": ("build",)}.items():
            value = getattr(self, field)
            has_method = any(callable(getattr(value, name, None)) for name in methods) and not isinstance(value, type)
            _check(f"Recipe.{field}", value, has_method, f"it must be an object with {methods[0]}()", "wrong-type")
        _check("Recipe.loss", self.loss, callable(self.loss), "it must be a function", "wrong-type")
        fix = "def loss(model, batch, key): return loss, metrics"
        check_takes("Recipe.loss", self.loss, ("model", "batch", "key"), fix, name=named(self.loss))
        check_bool("Recipe", "measured times are used to schedule collectives", pgle=self.pgle)
        for field, least in (
            ("steps", 1), ("batch_size", 1), ("max_skipped", 1), ("validate_every", 1), ("checkpoint_every", 1),
            ("keep_checkpoints", 1), ("checkpoint_retries", 0),
        ):  # fmt: skip
            value = getattr(self, field)
            is_valid = (value is None and field.endswith("_every")) or (is_int(value, least) and value < 2**31)
            _check(f"Recipe.{field}", value, is_valid, f"it must be an integer from {least} to 2^31 - 1")
        is_int64 = is_int(self.seed, -(2**63)) and self.seed < 2**63
        _check("Recipe.seed", self.seed, is_int64, "it must be a 64-bit integer")
        is_name = re.fullmatch(r"[\w.-]{1,200}", self.name) is not None and self.name.strip("-_.") != ""
        _check("Recipe.name", self.name, is_name, "a folder name has at most 200 letters, digits, - _ . only")
        where, requested = f"Recipe.batch_size ({self.batch_size})", f"split it into {self.step.accumulate} micro-steps"
        check_divides(where, requested, self.batch_size, self.step.accumulate)

    def replace(self, **changes: Any) -> Recipe:
        return dataclasses.replace(self, **changes)

    def override(self, *assignments: str) -> Recipe:
        """Return the recipe with fields set from text such as "mesh.fsdp=8"; see the function `override`."""
        return override(self, assignments)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values. Functions are represented by their names."""
        return _plain(self)


def build_model(recipe: Recipe) -> Model:
    """Return the model of a recipe, with its LoRA adapters."""
    model = recipe.model if isinstance(recipe.model, Model) else recipe.model.build()
    return model if recipe.lora is None else recipe.lora(model)


def build_optimizer(recipe: Recipe, model: Model, mesh: AnyMesh) -> optax.GradientTransformation:
    """Return the optimizer of a recipe, which may depend on the logical names of the parameters."""
    with use_rules(mesh, recipe.strategy):
        names = dict(model.names())
    return recipe.optimizer.build(steps=recipe.steps, names=names)


def open_data(recipe: Recipe, *, batch_size: int | None = None) -> Source:
    """Open the data of a recipe for global batches of `batch_size`, by default those of the recipe."""
    source = recipe.data.open(batch_size=batch_size or recipe.batch_size, seed=recipe.seed)
    if not isinstance(source, Source):
        where, reason = f"{type(recipe.data).__name__}.open", f"it returned {source!r:.100}"
        fix = "return an object with train, valid, describe and fingerprint: meshpar.data.Source"
        raise problem(where, "train on its result", reason, fix, code="wrong-type")
    return source


def build_step(recipe: Recipe) -> TrainStep:
    """Return the training step that `train` runs and `explain` compiles."""
    return TrainStep(recipe.loss, recipe.step)


# ---- From a file -----------------------------------------------------------------------------------------------------


def load_recipe(path: str | Path, *, devices: int | None = None) -> Recipe:
    """Return the result of the function `recipe` of a file. The path `file.py:name` calls the function `name` instead.

    A name without folder and suffix is a recipe of the package, unless there is a file with this name: `gpt_stdlib`.
    If the function has a parameter `devices`, it receives the number of devices. None keeps the parameter's default.
    """
    file, name = _file_of(str(path)), str(path).partition(":")[2] or "recipe"
    with explain_recipe_errors([str(path)], "call it"):
        module = _import_file(file)
        make = getattr(module, name, None)
        if not callable(make):
            names = [other for other, value in vars(module).items() if inspect.isfunction(value)]
            requested, fix = f"call its function `{name}`", f"define `def {name}() -> mp.Recipe` ({near(name, names)})"
            raise problem(f"recipe file `{file}`", requested, "the file has no such function", fix, code="not-found")
        takes_devices = "devices" in inspect.signature(make).parameters
        recipe = make(devices=devices) if takes_devices and devices is not None else make()
    if not isinstance(recipe, Recipe):
        requested, reason = f"use the result of `{name}`", f"it returned {type(recipe).__name__}"
        raise problem(f"recipe file `{file}`", requested, reason, "return mp.Recipe(...)", code="wrong-type")
    return recipe


@contextlib.contextmanager
def explain_recipe_errors(recipes: Sequence[str], requested: str) -> Iterator[None]:
    """Convert an exception of a recipe file to an error with its line. Errors of meshpar are not changed.

    `recipes` are paths as in `load_recipe`, and `requested` is the failed action in the error. If another file raised
    the exception, the error names the first recipe.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, click.ClickException | MeshparError | KeyboardInterrupt):
            raise
        names = {os.path.realpath(_file_of(recipe)): recipe for recipe in recipes}
        if isinstance(error, SyntaxError) and error.filename:
            file, line = error.filename, error.lineno or 0
        else:  # the last line of a recipe, else the line that raised the exception
            frames = traceback.walk_tb(error.__traceback__)
            lines = [(os.path.realpath(frame.f_code.co_filename), line) for frame, line in frames]
            file, line = next((at for at in reversed(lines) if at[0] in names), lines[-1])
        message = next(iter(str(error).strip().split("\n")), "") or "no message"
        reason = f"it raised {type(error).__name__} ({message[:300]}) at {os.path.basename(file)}:{line}"
        where, fix = f"recipe `{names.get(file, recipes[0])[:200]}`", "correct that line; --traceback shows the calls"
        raise problem(where, requested, reason, fix, code="error-in-recipe") from error


def _packaged_recipes() -> dict[str, Path]:
    """Return the files of the recipes that are installed with meshpar, by name."""
    package = Path(__file__).parents[1]
    # A wheel has the recipes inside the package, a checkout next to it.
    folder = next((folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir()), package)
    return {file.stem: file for file in sorted(folder.glob("*.py"))} if folder != package else {}


def _file_of(path: str) -> Path:
    """Return the file of a recipe's path or name; see `load_recipe`."""
    name = path.partition(":")[0]
    is_packaged = name.isidentifier() and not os.path.isfile(name)
    return _packaged_recipes().get(name, Path(name)) if is_packaged else Path(name)


def _import_file(file: Path) -> types.ModuleType:
    if not os.path.exists(file):
        folders, packaged = {file.parent if file.parent.is_dir() else Path(), Path("recipes")}, _packaged_recipes()
        files = [path for folder in folders if folder.is_dir() for path in folder.glob("*.py")]
        same_name = next((f"did you mean `{path}`?" for path in files if path.stem == file.stem), None)
        if same_name is None and file.stem in packaged:
            same_name = f"did you mean the installed recipe `{file.stem}`?"
        where, fix = f"recipe `{str(file)[:200]}`", same_name or near(str(file), [*files, *packaged])
        raise problem(where, "read it", "there is no such file", fix, code="missing-file")
    check_file(file, f"recipe `{file}`", "name a .py file")
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) and Path(main.__file__ or "").resolve() == file.resolve():
        return main  # a recipe that runs itself
    spec = importlib.util.spec_from_file_location(f"meshpar_recipe_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise problem(f"recipe `{file}`", "import it", "it is not a Python file", "name a .py file", code="wrong-type")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations there
    # Python's bytecode cache compares sizes and times in seconds, so it could miss a quick edit of a number.
    exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    return module


# ---- To plain data ---------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Convert a value to JSON values. Functions and other objects are represented by their names."""
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
        has_one_type = isinstance(value, Recipe | StepOptions | Precision)
        return fields if has_one_type else {"type": type(value).__name__, **fields}
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
        # The module name of a recipe file depends only on how it was loaded.
        module = "" if value.__module__.startswith(("meshpar_recipe_", "__main__")) else f"{value.__module__}."
        return f"{module}{value.__qualname__}"
    return type(value).__name__


RESUMABLE = (
    "name", "steps", "optimizer.schedule_steps", "mesh", "strategy", "step.remat", "step.nonfinite", "step.xla",
    "max_skipped", "pgle", "validate_every", "checkpoint_every", "checkpoint_retries", "keep_checkpoints", "sample",
    "writers", "data.prefetch", "data.cache",
)  # fmt: skip
"""Fields that may change when a run is resumed. Only `optimizer.schedule_steps` changes the model, the data or the
updates; a resumed run keeps its value unless the user sets it."""


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ between results of `to_json`, as dotted path -> (before, after).

    `before` may be from an earlier version. `defaults`, from `defaults_of`, has the values of fields that did not exist
    then. In early versions, the fields of `step` are at the top level.
    """
    absent = "(absent)"
    step_fields = {field.name for field in dataclasses.fields(StepOptions)}
    step = {name: value for name, value in before.items() if name in step_fields}
    old, new = dict(_flat({"step": step} | {k: v for k, v in before.items() if k not in step})), dict(_flat(after))
    # Defaults apply only to configs that the older recipe has.
    configs = {"", *(path.rpartition(".")[0] for path in old)}
    implied = {path: value for path, value in (defaults or {}).items() if path.rpartition(".")[0] in configs}
    return {
        path: (old.get(path, absent), new.get(path, absent))
        for path in {**old, **new}
        if old.get(path, implied.get(path, absent)) != new.get(path, absent)
    }


def defaults_of(recipe: Recipe) -> dict[str, Any]:
    """Return the default value of each field of a recipe and its configs, by dotted path."""
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
    """Return whether a run cannot be resumed after a change of this field."""
    return not any(path == free or path.startswith(f"{free}.") for free in RESUMABLE)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---- Overrides: text by dotted path, typed by the field's annotation -------------------------------------------------

_Texts: TypeAlias = Mapping[tuple[str, ...], str]
"""Path of a field inside a config -> text of the new value. The empty path is the config itself."""


def override(recipe: Recipe, assignments: Iterable[str]) -> Recipe:
    """Return a recipe with fields set from assignments "dotted.path=text".

    The type of the field determines how the text is read: numbers, true and false, none, words, `a,b` for tuples,
    `fsdp=4,tensor=2` for the mesh, `fsdp() | tensor_parallel()` for the strategy. All assignments are applied together,
    so the order of related fields does not matter. The last assignment to a field wins.
    """
    texts: dict[tuple[str, ...], str] = {}
    for assignment in assignments:
        check_unicode(assignment, "an override")
        path, equals, text = assignment.partition("=")
        names = tuple(name.strip() for name in path.split("."))
        if not equals or not all(names):
            where, fix = f"override `{assignment}`", "write it like mesh.fsdp=8"
            raise problem(where, "set a field", "it is not path=value", fix, code="bad-syntax")
        texts[names] = text.strip()
    for names in texts:
        for outer in (names[:length] for length in range(1, len(names)) if names[:length] in texts):
            where, fix = f"override `{'.'.join(names)}`", f"set only fields of `{outer[-1]}`, or only `{outer[-1]}`"
            requested, reason = f"set `{outer[-1]}` and a field of it", "the order of the two is ambiguous"
            raise problem(where, requested, reason, fix, code="conflict")
    return _with(recipe, texts, ()) if texts else recipe


def _with(value: Any, texts: _Texts, path: tuple[str, ...]) -> Any:
    """Return `value` with the fields in `texts` set. `path` is the position of `value` in the recipe, for errors."""
    if isinstance(value, type | Strategy) or not (isinstance(value, Mapping) or dataclasses.is_dataclass(value)):
        outer, where = f"`{'.'.join(path)}`", f"`{'.'.join((*path, next(iter(texts))[0]))}`"
        reason, fix = f"{outer} is {value!r}, which has no fields", f"set {outer} itself, or change the recipe file"
        raise problem(where, "set it", reason, fix, code="unknown-name")
    changed: dict[str, Any] = {}
    for name in dict.fromkeys(names[0] for names in texts):
        inner = {names[1:]: text for names, text in texts.items() if names[0] == name}
        hint, field = _annotation(value, name, path), (*path, name)
        current = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
        if () in inner:
            changed[name] = read(inner[()], hint, field, current=current)
            continue
        for member in typing.get_args(hint) if current is None else ():
            if dataclasses.is_dataclass(member) and isinstance(member, type):
                with contextlib.suppress(TypeError):  # some fields have no default
                    current = member()
                    break
        changed[name] = _with(current, inner, field)
    if isinstance(value, Mapping):
        return value.replace(**changed) if isinstance(value, MeshSpec) else {**value, **changed}
    try:
        return dataclasses.replace(value, **changed)  # type: ignore[type-var]
    except MeshparError:
        raise
    except ValueError as error:  # from a class of the user
        requested = "set " + ", ".join(f"{'.'.join((*path, name))}={new!r}" for name, new in changed.items())
        where = f"`{'.'.join(path) or 'recipe'}`"
        raise problem(where, requested, str(error), "choose other values", code="invalid-value") from error


def _annotation(value: Any, name: str, path: tuple[str, ...]) -> Any:
    """Return the type of a field of a config, a mesh or a mapping."""
    where = f"`{'.'.join((*path, name))}`"
    if isinstance(value, MeshSpec):
        if name != "inside_node" and name not in value:
            requested, fix = f"set the size of axis `{name}`", near_or(name, value, f"add it with mesh={name}=2,fsdp=4")
            raise problem(where, requested, "the mesh has no such axis", fix, code="unknown-axis")
        return tuple[str, ...] if name == "inside_node" else int
    if isinstance(value, Mapping):
        return int | float | bool | str
    fields = {field.name for field in dataclasses.fields(value) if field.init}
    if name not in fields:
        elsewhere = [inner for inner in _paths(_plain(value)) if inner.rpartition(".")[2] == name]
        others = " or ".join(f"`{'.'.join((*path, inner))}`" for inner in elsewhere[:3])
        reason, fix = f"{type(value).__name__} has no field `{name}`", f"did you mean {others}?"
        raise problem(where, "set a field", reason, fix if others else near(name, fields), code="unknown-name")
    try:
        return typing.get_type_hints(type(value))[name]
    except NameError:  # an annotation that only a type checker can resolve
        return type(getattr(value, name))


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


class _Unreadable(Exception):
    """The text does not have the expected type."""


def read(text: str, hint: Any, path: tuple[str, ...], *, current: Any = None) -> Any:
    """Convert text to a value of the type `hint`. The path and current value of the field are for the error."""
    try:
        return _read(text, hint)
    except _Unreadable as error:
        field, reason = ".".join(path), f"it must be {inspect.formatannotation(hint)}"
        fix = str(error) or "write a value of this type"
        if dataclasses.is_dataclass(current) and not isinstance(current, Strategy):
            names = ", ".join(f"`{field}.{one.name}`" for one in dataclasses.fields(current)[:8] if one.init)
            fix = f"set its fields ({names}, …), or write `{path[-1]}=...` in the recipe file"
        raise problem(f"`{field}`", f"set it to `{text}`", reason, fix, code="wrong-type") from None


def _read(text: str, hint: Any) -> Any:
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    unquoted = text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text
    if origin in (typing.Union, types.UnionType):
        message = ""
        # None first and strings last, because "none" and "3" are strings, too.
        for member in sorted(args, key=lambda m: (m is str or m is Any, m is not types.NoneType)):
            try:
                return _read(text, member)
            except _Unreadable as error:
                message = str(error) or message
        raise _Unreadable(message)
    if origin is Literal:
        for choice in args:
            if unquoted == str(choice):
                return choice
        raise _Unreadable(near(text, args))
    if origin in _WORDS:
        if text.lower() not in _WORDS[origin]:
            raise _Unreadable
        return _WORDS[origin][text.lower()]
    if origin in (int, float):
        return _read_number(text, origin)
    if origin in (tuple, list, collections.abc.Sequence):
        return _read_many(text, origin, args)
    if origin in (dict, collections.abc.Mapping):
        items = _read_literal(text)
        if not isinstance(items, dict):
            raise _Unreadable('write it like {"a": 1}')
        return {_read(_text_of(key), args[0]): _read(_text_of(value), args[1]) for key, value in items.items()}
    readers: dict[Any, Callable[[str], Any]] = {
        Any: _read_literal, MeshSpec: MeshSpec.parse, Strategy: parse_strategy, str: lambda _: unquoted,
        Path: lambda _: Path(unquoted),
    }  # fmt: skip
    if origin not in readers:
        raise _Unreadable("change the recipe file, because this type cannot be written as text")
    return readers[origin](text)


_WORDS: Mapping[Any, Mapping[str, bool | None]] = {
    types.NoneType: {"none": None, "null": None},
    bool: {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False},
}


def _read_number(text: str, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(text)
    except ValueError:
        raise _Unreadable from None
    if kind is int and abs(number) >= 2**63:  # a larger integer may overflow a float, too
        raise _Unreadable("use an integer below 2^63")
    if not math.isfinite(number):
        raise _Unreadable("use a finite number")
    return number


def _read_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two if nested too deeply
        return text


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _read_many(text: str, kind: Any, args: tuple[Any, ...]) -> Any:
    """Read `a,b`, `(1, 2)` or `["a", "b"]`."""
    items = _read_literal(text) if text[:1] in ("(", "[") else None
    if isinstance(items, tuple | list):
        texts = [_text_of(item) for item in items]
    else:
        words = text if items is None else text[1:-1].strip()  # words without quotes, such as (a, b)
        if items is not None and (not words or set(words) & set("()[]")):
            raise _Unreadable("write it like a,b")
        texts = [word.strip() for word in words.split(",") if word.strip()]
    if not args:
        values = [_read_literal(item) for item in texts]
    elif kind is not tuple or args[-1] is Ellipsis:
        values = [_read(item, args[0]) for item in texts]
    elif len(texts) == len(args):
        values = [_read(item, arg) for item, arg in zip(texts, args, strict=True)]
    else:
        raise _Unreadable(f"write {len(args)} values, separated by commas, instead of {len(texts)}")
    return values if kind is list else tuple(values)
