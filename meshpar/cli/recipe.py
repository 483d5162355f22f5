"""Recipes: the frozen description of a training run, its optimizers, and overrides from text.

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

from meshpar.data.source import DataSource, Source
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
    check_bool,
    check_choice,
    check_positive_int,
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
    """Description of an optimizer in a recipe."""

    def build(self, *, steps: int, names: Mapping[str, Names]) -> optax.GradientTransformation:
        """Return the optax optimizer for a run of `steps` steps. `names` has the logical names of each parameter."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """optax's AdamW with warm-up, a schedule and clipping (Loshchilov & Hutter 2019).

    Weight decay applies to all parameters except those named `scale` or `bias`, and those with fewer than two
    dimensions, not counting `layers`.
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
    """Length of the schedule; by default that of the run. If you set it, a longer run has the same first steps."""
    b1: float = 0.9
    """Decay rate of the first moment."""
    b2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Weights shrink by this times the learning rate in each step."""
    clip_norm: float | None = 1.0
    """Clip gradients to this global norm; None disables clipping."""
    moments: str | None = None
    """Dtype of both moments, as in `mp.optim.low_precision_moments`; by default that of the parameters."""
    offload: bool = False
    """Keep both moments in host memory between updates, as in `mp.optim.offload_state`."""
    ema: float | None = None
    """Decay rate of an exponential moving average of the parameters, as in `mp.ema`; None disables it. Validation, the
    sample, `generate` and `convert` use the averages instead of the parameters."""

    _DECAYS: ClassVar[tuple[str, ...]] = ("b1", "b2")
    """Fields that are decay rates."""

    def __post_init__(self) -> None:
        who = type(self).__name__
        check_choice(who, "the schedule after the warm-up", ("cosine", "linear", "constant"), schedule=self.schedule)
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if kind.startswith(("float", "int")) and not (value is None and "None" in kind):
                is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
                _check(f"{who}.{field.name}", value, is_number, "it must be a number", code="wrong-type")
            _check_finite(f"{who}.{field.name}", value)
        at_least = {"warmup_steps": 0, "final_lr": 0, "weight_decay": 0} | dict.fromkeys(self._DECAYS, 0)
        for name, least in at_least.items():
            _check(f"{who}.{name}", getattr(self, name), getattr(self, name) >= least, f"it must be at least {least}")
        for name in self._DECAYS:
            _check(f"{who}.{name}", getattr(self, name), getattr(self, name) < 1, "a decay rate is below 1")
        for name in ("lr", "eps", "clip_norm", "schedule_steps"):
            value = getattr(self, name)
            _check(f"{who}.{name}", value, value is None or value > 0, "it must be positive")
        length = self.schedule_steps
        if length is not None and self.schedule != "constant" and self.warmup_steps >= length:
            requested, fix = f"warm up in a schedule of {length} steps", f"set optimizer.warmup_steps below {length}"
            where, reason = f"{who}.warmup_steps ({self.warmup_steps})", "no step is left for the decay"
            raise problem(where, requested, reason, fix, code="out-of-range")
        check_bool(who, "moments are kept in host memory", offload=self.offload)
        check_choice(who, "the dtype of the moments", (None, *DTYPES), moments=self.moments)
        _check(f"{who}.ema", self.ema, self.ema is None or 0 <= self.ema < 1, "a decay rate is at least 0 and below 1")

    def learning_rate(self, steps: int) -> Callable[[Any], Any]:
        """Return the learning rate schedule of a run of `steps` steps.

        A run that is shorter than the warm-up ends during it, with a warning. A longer run starts in the same way.
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
        # Not from 0, because the first step would then change nothing.
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
    """Root mean square of a matrix's update divided by the learning rate. AdamW has 0.2 to 0.4."""
    share: bool = True
    """Divide the work among devices with the same matrices and exchange the results, as in `mp.muon`."""

    _DECAYS: ClassVar[tuple[str, ...]] = (*AdamW._DECAYS, "momentum")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_int("Muon", "the number of Newton-Schulz iterations", ns_steps=self.ns_steps)
        _check("Muon.rms", self.rms, self.rms > 0, "it must be positive")
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
            adam_weight_decay_mask=functools.partial(decayed, names=names),
            muon_weight_dimension_numbers=matrices(names),
            consistent_rms=self.rms,
            share=self.share,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optax:
    """Any optax optimizer."""

    make: Callable[[int], optax.GradientTransformation]
    """Function of the number of steps that returns the optimizer."""

    def build(self, *, steps: int, names: Mapping[str, Names]) -> optax.GradientTransformation:
        check_takes("Optax.make", self.make, ("steps",), "make=lambda steps: ...", name=named(self.make))
        return self.make(steps)


def decayed(params: PyTree, names: Mapping[str, Names]) -> PyTree:
    """Return the mask of parameters with weight decay, as described in `AdamW`."""

    def is_decayed(key_path: Any, leaf: Any) -> bool:
        path = path_str(key_path)
        num_stacked = sum(name == "layers" for name in names.get(path, ()))
        return leaf.ndim - num_stacked >= 2 and path.rpartition("/")[2] not in ("scale", "bias")

    return jax.tree_util.tree_map_with_path(is_decayed, params)


# ---- The recipe ------------------------------------------------------------------------------------------------------


@runtime_checkable
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
        _check_finite("Sample.temperature", self.temperature)
        check_positive_int("Sample", "the number of tokens to generate", num_tokens=self.num_tokens)
        _check("Sample.temperature", self.temperature, self.temperature >= 0, "it must be at least 0")
        _check("Sample.prompt", self.prompt, bool(self.prompt), "it must not be empty")
        check_unicode(self.prompt, "Sample.prompt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Description of a training run. A recipe file has a function `recipe()` that returns one."""

    name: str
    """The run writes to `runs/<name>/`."""
    mesh: MeshSpec
    """Mesh axes and their sizes."""
    strategy: Strategy | Rules = dataclasses.field(default_factory=fsdp)
    """Mapping from logical names to mesh axes."""
    model: ModelConfig | Model
    """Model, or its config."""
    loss: Callable[..., Any]
    """(model, batch, key) -> (loss, metrics)."""
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
    accumulate: int = 1
    """Micro-steps per update."""
    reduce_gradients: Literal["each_microbatch", "once"] = "each_microbatch"
    """Reduce gradients to shards in each micro-step, or keep unreduced sums and reduce them once per update."""
    loss_is: Literal["mean_over_examples"] | None = None
    """States that a scalar loss is a mean over examples with equal weights, as in `train_step`."""
    precision: Precision = dataclasses.field(default_factory=Precision)
    """Dtypes of parameters, computation and gradient reduction."""
    remat: str | None = None
    """Activations that are saved for the backward pass instead of recomputed: "full", "dots", "minimal", "all_dots",
    "save:NAMES" or "offload:NAMES", as in `train_step`; None recomputes nothing."""
    interleave: int = 1
    """Number of slices of the local batch whose layers overlap, as in `train_step`."""
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    """What to do if the loss or gradients are not finite."""
    max_skipped: int = 100
    """With nonfinite="skip", the run stops after this many consecutive skipped updates."""
    xla: Mapping[str, int | float | bool | str] = dataclasses.field(default_factory=dict)
    """XLA compile options, without leading dashes. They override the defaults for GPUs."""
    pgle: bool = False
    """Profile-guided latency estimation: jax measures the first steps on GPUs (three by default) and compiles the step
    again, so that XLA's scheduler uses measured times. jax's compilation cache keeps the program, in `runs/jax_cache`
    unless `jax_compilation_cache_dir` is set, for later starts. Not available on other devices or with --profile."""
    seed: int = 0
    """Seed of initial weights, dropout and data order."""
    validate_every: int | None = None
    """Steps between validations; None validates at the end only."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None saves at the end and when interrupted."""
    checkpoint_retries: int = 3
    """Number of consecutive failed saves that are retried at the next interval. One more stops the run."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep."""
    sample: Sample | None = None
    """Text to generate at the end, for language models."""
    writers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Metric writers in addition to metrics.jsonl. Each needs the extra of the same name."""

    def __post_init__(self) -> None:
        _check_kind("mesh", self.mesh, MeshSpec, "mp.MeshSpec(fsdp=4, tensor=2)")
        object.__setattr__(self, "strategy", as_strategy(self.strategy))
        _check_kind("precision", self.precision, Precision, 'mp.Precision(compute="bfloat16")')
        _check_kind("lora", Lora() if self.lora is None else self.lora, Lora, "mp.lora(rank=8)")
        for field, method in (("model", "build"), ("data", "open"), ("optimizer", "build"), ("loss", "__call__")):
            _check_has_method(field, getattr(self, field), method)
        fix = "def loss(model, batch, key): return loss, metrics"
        check_takes("Recipe.loss", self.loss, ("model", "batch", "key"), fix, name=named(self.loss))
        for field in ("steps", "batch_size", "max_skipped", "validate_every", "checkpoint_every", "keep_checkpoints"):
            value = getattr(self, field)
            optional = value is None and field.endswith("_every")
            _check(f"Recipe.{field}", value, optional or is_int(value, 1), "it must be a positive integer")
        _check(
            "Recipe.sample",
            self.sample,
            isinstance(self.sample, Sample | None),
            "it must be mp.Sample(...) or None",
            code="wrong-type",
        )
        check_bool("Recipe", "measured times are used to schedule collectives", pgle=self.pgle)
        retries, is_int64 = self.checkpoint_retries, is_int(self.seed, -(2**63)) and self.seed < 2**63
        _check("Recipe.checkpoint_retries", retries, is_int(retries, 0), "it must be an integer of at least 0")
        _check("Recipe.seed", self.seed, is_int64, "it must be a 64-bit integer")
        letters = self.name.replace("-", "").replace("_", "").replace(".", "")
        _check("Recipe.name", self.name, letters.isalnum(), "a folder name has letters, digits, - _ . only")
        _check("Recipe.name", self.name[:60], len(self.name) <= 200, "a folder name has at most 200 characters")
        _check("Recipe.steps", self.steps, self.steps < 2**31, "steps are counted in 32 bits, so it must be below 2^31")
        _ = self.step_options  # checks its fields
        if self.batch_size % self.accumulate:
            where, requested = f"Recipe.batch_size ({self.batch_size})", f"split it into {self.accumulate} micro-steps"
            fix = f"use a batch of {-(-self.batch_size // self.accumulate) * self.accumulate}, or change `accumulate`"
            reason = f"{self.batch_size} is not a multiple of {self.accumulate}"
            raise problem(where, requested, reason, fix, code="indivisible")

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
        """Return the recipe with fields set from text such as "mesh.fsdp=8", as in `override`."""
        return override(self, assignments)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values. Functions are represented by their names."""
        return _plain(self)


def _check(where: str, value: object, is_valid: bool, rule: str, code: str = "out-of-range") -> None:
    if not is_valid:
        raise problem(where, f"use {value!r:.200}", rule, "change it", code=code)


def _check_finite(where: str, value: object) -> None:
    _check(where, value, not isinstance(value, float) or math.isfinite(value), "it must be finite")


def _check_kind(field: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        reason, fix = f"it must be a {kind.__name__}", f"write {field}={example}"
        raise problem(f"Recipe.{field}", f"use {value!r:.200}", reason, fix, code="wrong-type")


def _check_has_method(field: str, value: object, method: str) -> None:
    if field == "model" and hasattr(value, "bind"):  # already a Model
        return
    if not callable(getattr(value, method, None)) or isinstance(value, type):
        reason = "it must be a function" if method == "__call__" else f"it has no method `{method}`"
        fix = f"call it: {value.__name__}(...)" if isinstance(value, type) else "pass an object of the right type"
        raise problem(f"Recipe.{field}", f"use {value!r:.200}", reason, fix, code="wrong-type")


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
    """Open the data of a recipe for global batches of `batch_size`, by default those of the recipe.

    Raises:
      MeshparError: `open` of the data does not return a `Source`.
    """
    source = recipe.data.open(batch_size=batch_size or recipe.batch_size, seed=recipe.seed)
    if not isinstance(source, Source):
        where, reason = f"{type(recipe.data).__name__}.open", f"it returned {source!r:.100}"
        fix = "return an object with train, valid, describe and fingerprint: meshpar.data.Source"
        raise problem(where, "train on it", reason, fix, code="wrong-type")
    return source


def build_step(recipe: Recipe) -> TrainStep:
    """Return the training step that `train` runs and `explain` compiles."""
    return TrainStep(recipe.loss, recipe.step_options)


# ---- From a file -----------------------------------------------------------------------------------------------------


def load_recipe(path: str | Path, *, devices: int | None = None) -> Recipe:
    """Return the result of the function `recipe` of a file.

    Args:
      path: a Python file. `file.py:name` calls the function `name` instead.
      devices: number of devices, which is passed to a function with a parameter `devices`. None keeps its default.

    Raises:
      ValueError: the file or function does not exist, or the function does not return a Recipe.
    """
    file, _, function = str(path).partition(":")
    with explain_recipe_errors({str(path): file}, "call it"):
        make = _function_of(Path(file), function or "recipe")
        asks = "devices" in inspect.signature(make).parameters
        recipe = make(devices=devices) if asks and devices is not None else make()
    if not isinstance(recipe, Recipe):
        requested, reason = f"use the result of `{make.__name__}`", f"it returned {type(recipe).__name__}"
        raise problem(f"recipe file `{file}`", requested, reason, "return mp.Recipe(...)", code="wrong-type")
    return recipe


@contextlib.contextmanager
def explain_recipe_errors(recipes: Mapping[str, str], requested: str) -> Iterator[None]:
    """Convert an exception of a recipe file to an error with its line. Errors of meshpar are not changed.

    Args:
      recipes: file by displayed name. The first is named if the exception comes from another file.
      requested: what the recipe was asked to do.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, click.ClickException | MeshparError | KeyboardInterrupt):
            raise
        names = {os.path.realpath(file): name for name, file in recipes.items()}
        file, line = _raised_at(error, tuple(names))
        message = next(iter(str(error).strip().split("\n")), "") or "no message"
        reason = f"it raised {type(error).__name__} ({message[:300]}) at {os.path.basename(file)}:{line}"
        where = f"recipe `{names.get(file, next(iter(recipes)))[:200]}`"
        fix = "correct that line; --traceback shows how it was reached"
        raise problem(where, requested, reason, fix, code="error-in-recipe") from error


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
        where, reason = f"recipe `{str(file)[:200]}`", "there is no such file"
        raise problem(where, "read it", reason, _files_near(file), code="missing-file")
    check_file(file, f"recipe `{file}`", "name a .py file")
    module = _import_file(file)
    found = getattr(module, function, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        fix = f"define `def {function}() -> mp.Recipe` ({near(function, names)})"
        requested, reason = f"call its function `{function}`", "it does not define it"
        raise problem(f"recipe file `{file}`", requested, reason, fix, code="not-found")
    return found


def _import_file(file: Path) -> types.ModuleType:
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


def _files_near(file: Path) -> str:
    here = file.parent if file.parent.is_dir() else Path()
    found = {str(p) for folder in {here, Path("recipes")} if folder.is_dir() for p in folder.glob("*.py")}
    same_name = [path for path in found if Path(path).stem == file.stem]
    return f"did you mean `{same_name[0]}`?" if same_name else near(str(file), found)


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
        # The module name of a recipe file depends only on how it was loaded.
        module = "" if value.__module__.startswith(("meshpar_recipe_", "__main__")) else f"{value.__module__}."
        return f"{module}{value.__qualname__}"
    return type(value).__name__


RESUMABLE = (
    "name", "steps", "mesh", "strategy", "remat", "nonfinite", "max_skipped", "xla", "pgle", "validate_every",
    "checkpoint_every", "checkpoint_retries", "keep_checkpoints", "sample", "writers", "data.prefetch", "data.cache",
)  # fmt: skip
"""Fields that may change when a run is resumed, because they do not change the model, the data or the updates."""


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ between two recipes, as dotted path -> (before, after).

    Args:
      before: result of `to_json` of the older recipe, possibly from a version with fewer fields.
      after: result of `to_json` of the newer recipe.
      defaults: values of fields that `before` does not have, from `defaults_of`.
    """
    absent = "(absent)"
    old, new = dict(_flat(before)), dict(_flat(after))
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

_Tree: TypeAlias = dict[str, "str | _Tree"]


def override(recipe: Recipe, assignments: Iterable[str]) -> Recipe:
    """Return a recipe with fields set from text.

    Args:
      recipe: the original recipe.
      assignments: "dotted.path=text" each. The type of the field determines how the text is read: numbers, true and
        false, none, words, `a,b` for tuples, `fsdp=4,tensor=2` for the mesh, `fsdp() | tensor_parallel()` for the
        strategy. All are applied together, so that the order of related fields does not matter. The last assignment
        to a field wins.

    Raises:
      ValueError: a name is unknown, a text does not have the type of the field, or a value is invalid.
    """
    tree: _Tree = {}
    for assignment in assignments:
        check_unicode(assignment, "an override")
        path, equals, text = assignment.partition("=")
        if not equals or not all(part.strip() for part in path.split(".")):
            where, fix = f"override `{assignment}`", "write it like mesh.fsdp=8"
            raise problem(where, "set a field", "it is not path=value", fix, code="bad-syntax")
        _plant(tree, [part.strip() for part in path.split(".")], text.strip(), assignment)
    return _with(recipe, tree, ()) if tree else recipe


def _plant(tree: _Tree, parts: Sequence[str], text: str, assignment: str) -> None:
    *above, last = parts
    for part in above:
        branch = tree.setdefault(part, {})
        if isinstance(branch, str):
            raise _conflict(assignment, part)
        tree = branch
    if isinstance(tree.get(last), dict):
        raise _conflict(assignment, last)
    tree[last] = text


def _conflict(assignment: str, name: str) -> MeshparError:
    requested, fix = f"set `{name}` and a field of it", f"set its fields only, or `{name}=...` only"
    return problem(f"override `{assignment}`", requested, "the order of the two is ambiguous", fix, code="conflict")


def _with(value: Any, tree: _Tree, path: tuple[str, ...]) -> Any:
    """Return `value`, which is at `path` of the recipe, with the fields in `tree` set."""
    if isinstance(value, MeshSpec):
        return _with_axes(value, tree, path)
    if isinstance(value, Mapping):
        for name, text in tree.items():
            if not isinstance(text, str):
                where, field = f"`{_dotted(path, name)}.{next(iter(text))}`", _dotted(path, name)
                reason, fix = "it is a value without fields", f"write {field}=VALUE"
                raise problem(where, f"set a field of `{field}`", reason, fix, code="unknown-name")
        return {
            **value,
            **{name: read(str(text), int | float | bool | str, (*path, name)) for name, text in tree.items()},
        }
    if not dataclasses.is_dataclass(value) or isinstance(value, type | Strategy):
        name = next(iter(tree))
        where, fix = f"`{_dotted(path, name)}`", f"set `{_dotted(path)}` itself, or change the recipe file"
        reason = f"its value {value!r} has no fields"
        raise problem(where, f"set a field of `{_dotted(path)}`", reason, fix, code="unknown-name")
    changed = {}
    for name, branch in tree.items():
        hint = _annotation(value, name, path)
        current = getattr(value, name)
        if isinstance(branch, str):
            changed[name] = read(branch, hint, (*path, name), current=current)
        else:
            changed[name] = _with(_value_or_defaults(current, hint), branch, (*path, name))
    try:
        return dataclasses.replace(value, **changed)
    except MeshparError:
        raise
    except ValueError as error:  # from a class of the user
        requested = "set " + ", ".join(f"{_dotted(path, name)}={new!r}" for name, new in changed.items())
        where, fix = f"`{_dotted(path) or 'recipe'}`", "choose other values"
        raise problem(where, requested, str(error), fix, code="invalid-value") from error


def _with_axes(spec: MeshSpec, tree: _Tree, path: tuple[str, ...]) -> MeshSpec:
    sizes = {}
    inside = spec.inside_node
    for name, text in tree.items():
        if name not in spec and name != "inside_node":
            requested, fix = (
                f"set the size of mesh axis `{name}`",
                f"{near(name, spec)} To add one, write mesh={name}=2,fsdp=4",
            )
            raise problem(f"`{_dotted(path, name)}`", requested, "the mesh has no such axis", fix, code="unknown-axis")
        if not isinstance(text, str):
            where, reason = f"`{_dotted(path, name)}`", "the size of an axis is a number"
            raise problem(where, "set a field of it", reason, f"set {name}=8", code="unknown-name")
        if name == "inside_node":
            inside = read(text, tuple[str, ...], (*path, name))
        else:
            sizes[name] = read(text, int, (*path, name))
    return spec.replace(inside_node=inside, **sizes)


def _annotation(value: Any, name: str, path: tuple[str, ...]) -> Any:
    """Return the type of a field of a dataclass. Raises `ValueError` with similar names if there is none."""
    fields = {f.name: f for f in dataclasses.fields(value) if f.init}
    if name not in fields:
        elsewhere = [p for p in _paths(value) if p.rpartition(".")[2] == name]
        others = " or ".join(f"`{_dotted(path, p)}`" for p in elsewhere[:3])
        where, fix = f"`{_dotted(path, name)}`", f"did you mean {others}?" if elsewhere else near(name, fields)
        requested, reason = f"set the field `{name}` of {type(value).__name__}", "there is no such field"
        raise problem(where, requested, reason, fix, code="unknown-name")
    try:
        return typing.get_type_hints(type(value))[name]
    except NameError:  # an annotation that only a type checker can resolve
        return type(getattr(value, name))


def _paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all fields of a value, recursively."""
    if isinstance(value, MeshSpec):
        yield from (f"{prefix}{axis}" for axis in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, Strategy):
        for field in dataclasses.fields(value):
            yield f"{prefix}{field.name}"
            yield from _paths(getattr(value, field.name), f"{prefix}{field.name}.")


def _value_or_defaults(value: Any, hint: Any) -> Any:
    """Return `value`, or if it is None, the dataclass of the annotation with default values."""
    if value is not None:
        return value
    for member in typing.get_args(hint):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            with contextlib.suppress(TypeError):  # some fields have no default
                return member()
    return None


def _dotted(path: tuple[str, ...], name: str = "") -> str:
    return ".".join((*path, name) if name else path)


class _Unreadable(Exception):
    """The text does not have the expected type."""


def read(text: str, hint: Any, path: tuple[str, ...], *, current: Any = None) -> Any:
    """Convert text to a value of the type `hint`.

    Args:
      text: the text to convert.
      hint: a type annotation.
      path: path of the field, for the error.
      current: current value of the field, for the error.

    Raises:
      ValueError: the text does not have that type.
    """
    try:
        return _read(text, hint)
    except _Unreadable as error:
        has_fields = dataclasses.is_dataclass(current) and not isinstance(current, Strategy)
        expected = f"a {type(current).__name__}" if has_fields else _describe_type(hint)
        fix = _field_by_field(path, current) if has_fields else str(error) or _example(path, hint)
        where, reason = f"`{_dotted(path)}`", f"it must be {expected}"
        raise problem(where, f"set it to `{text}`", reason, fix, code="wrong-type") from None


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
    raise _Unreadable("change the recipe file, because this type cannot be written as text")


def _read_union(text: str, members: tuple[Any, ...]) -> Any:
    # None first and strings last, because "none" and "3" are strings, too.
    order = sorted(members, key=lambda m: (m is str or m is Any, m is not types.NoneType))
    message = ""
    for member in order:
        try:
            return _read(text, member)
        except _Unreadable as error:
            message = str(error) or message
    raise _Unreadable(message)


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


def _read_many(text: str, kind: Any, args: tuple[Any, ...]) -> Any:
    texts = _items(text)
    if not args:
        values = [_read_literal(item) for item in texts]
    elif kind is not tuple or args[-1] is Ellipsis:
        values = [_read(item, args[0]) for item in texts]
    elif len(texts) == len(args):
        values = [_read(item, arg) for item, arg in zip(texts, args, strict=True)]
    else:
        raise _Unreadable(f"write {len(args)} values, separated by commas, instead of {len(texts)}")
    return values if kind is list else tuple(values)


def _items(text: str) -> list[str]:
    """Split "a,b", "(1, 2)" or '["a", "b"]' into items."""
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
"""Functions that convert text, by type."""


def _field_by_field(path: tuple[str, ...], value: Any) -> str:
    names = [f"`{_dotted(path, f.name)}`" for f in dataclasses.fields(value) if f.init]
    fields = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"set its fields: {fields}; to use another class, write `{path[-1]}=...` in the recipe file"


def _describe_type(hint: Any) -> str:
    """Describe a type annotation in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe_type(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in args)
    if hint in (None, types.NoneType):
        return "none"
    if (origin or hint) in (tuple, list, collections.abc.Sequence):
        of = [_describe_type(arg) for arg in args if arg is not Ellipsis]
        return "values separated by commas" + (f" ({', '.join(of)})" if of else "")
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return words.get(hint) or f"a {getattr(hint, '__name__', hint)}"


def _example(path: tuple[str, ...], hint: Any) -> str:
    examples = {int: "8", float: "3e-4", bool: "true", str: "text"}
    kinds = (hint, *typing.get_args(hint))
    value = next((examples[kind] for kind in kinds if kind in examples), None)
    return f"write it like {_dotted(path)}={value}" if value else f"write {_describe_type(hint)}"
