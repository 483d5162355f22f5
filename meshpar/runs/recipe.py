"""Recipes: the frozen description of a training run.

recipes/x.py ─► load_recipe ─► Recipe ─► override("mesh.fsdp=8", "steps=20") ─► Recipe ─► to_json
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

import jax
import optax
from jax.sharding import Mesh

from meshpar.data.source import DataSource, Source
from meshpar.parallel import Strategy, as_strategy, fsdp
from meshpar.runs.optimizers import AT_LEAST_0, AdamW, Optax, Optimizer, check_number, check_value
from meshpar.runs.overrides import override
from meshpar.runs.plain import plain_fields

# Not for type checkers only: overrides read the annotations at run time.
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.context import use_rules
from meshpar.sharding.errors import (
    check_bool,
    check_divides,
    check_positive_int,
    check_takes,
    is_int,
    named,
    near,
    problem,
)
from meshpar.sharding.host_resources import check_memory, check_unicode
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.printing import with_field_docs
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import AnyMesh
from meshpar.training.lora import Lora
from meshpar.training.options import StepOptions
from meshpar.training.state import Setup, TrainState, abstract_state, make_setup
from meshpar.training.step import TrainStep

Allowed = Literal["unfused-attention", "float32-matmul"]
"""Lint rules that fail `explain --check`."""


class ModelConfig(Protocol):
    """Description of a model in a recipe."""

    def build(self) -> Model: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A text that the model generates at the end of a run.

    Example:
      >>> mp.Sample(prompt="def main(", num_tokens=100, temperature=0)
      Sample(prompt='def main(', num_tokens=100, temperature=0)
    """

    prompt: str = "def "
    """Start of the text."""
    num_tokens: int = 200
    """Number of tokens to generate."""
    temperature: float = 0.8
    """Sampling temperature; 0 takes the most likely token."""

    def __post_init__(self) -> None:
        check_number("Sample.temperature", self.temperature, *AT_LEAST_0)
        check_positive_int("Sample", "the number of tokens to generate", num_tokens=self.num_tokens)
        check_value("Sample.prompt", self.prompt, bool(self.prompt), "it must not be empty")
        check_unicode(self.prompt, "Sample.prompt")


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Description of a training run. A recipe file has a function `recipe()` that returns one.

    Example:
      >>> recipe = mp.Recipe(
      ...     name="small",
      ...     mesh=mp.MeshSpec(fsdp=4, tensor=2),
      ...     strategy=strategy,
      ...     model=model,
      ...     loss=loss_fn,
      ...     data=mp.data.ArrayData(arrays=batch),
      ...     steps=100,
      ...     batch_size=8,
      ... )
      >>> recipe.override("steps=200").steps
      200
    """

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
    again, so that XLA's scheduler uses measured times. The program is kept for later starts, as with
    `mp.run(compile_cache=...)`. Not available on other devices or with --profile."""
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
    allow: tuple[Allowed, ...] = ()
    """Findings of `explain` that are intended, and do not fail `explain --check`."""

    def __new__(cls, **fields: Any) -> Recipe:
        """Check the names of the fields."""
        field_names = [field.name for field in dataclasses.fields(cls)]
        for name in fields.keys() - field_names:
            is_option = name in (field.name for field in dataclasses.fields(StepOptions))
            fix = f"write step=mp.StepOptions({name}=...)" if is_option else near(name, field_names)
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
            check_value(f"Recipe.{field}", value, is_kind, f"it must be an mp.{kind.__name__}", "wrong-type")
        for field, methods in {"model": ("build", "bind"), "data": ("open",), "optimizer": ("build",)}.items():
            value = getattr(self, field)
            has_method = any(callable(getattr(value, name, None)) for name in methods) and not isinstance(value, type)
            check_value(f"Recipe.{field}", value, has_method, f"it must be an object with {methods[0]}()", "wrong-type")
        check_value("Recipe.loss", self.loss, callable(self.loss), "it must be a function", "wrong-type")
        fix = "def loss(model, batch, key): return loss, metrics"
        check_takes("Recipe.loss", self.loss, ("model", "batch", "key"), fix, name=named(self.loss))
        check_bool("Recipe", "measured times are used to schedule collectives", pgle=self.pgle)
        for field, least in (
            ("steps", 1), ("batch_size", 1), ("max_skipped", 1), ("validate_every", 1), ("checkpoint_every", 1),
            ("keep_checkpoints", 1), ("checkpoint_retries", 0),
        ):  # fmt: skip
            value = getattr(self, field)
            is_valid = (value is None and field.endswith("_every")) or (is_int(value, least) and value < 2**31)
            check_value(f"Recipe.{field}", value, is_valid, f"it must be an integer from {least} to 2^31 - 1")
        rules = get_args(Allowed)
        check_value("Recipe.allow", self.allow, {*self.allow} <= {*rules}, f"it may contain {' and '.join(rules)}")
        is_int64 = is_int(self.seed, -(2**63)) and self.seed < 2**63
        check_value("Recipe.seed", self.seed, is_int64, "it must be a 64-bit integer")
        is_name = re.fullmatch(r"[\w.-]{1,200}", self.name) is not None and self.name.strip("-_.") != ""
        check_value("Recipe.name", self.name, is_name, "a folder name has at most 200 letters, digits, - _ . only")
        where, requested = f"Recipe.batch_size ({self.batch_size})", f"split it into {self.step.accumulate} micro-steps"
        check_divides(where, requested, self.batch_size, self.step.accumulate)

    def replace(self, **changes: Any) -> Recipe:
        return dataclasses.replace(self, **changes)

    def override(self, *assignments: str) -> Recipe:
        """Return the recipe with fields set from text such as "mesh.fsdp=8"; see the function `override`."""
        return override(self, assignments)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values. Functions are represented by their names."""
        return plain_fields(self)


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


def batch_shapes(recipe: Recipe) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of each array of a global batch. Opens the data only if it has no `batch_shapes`."""
    shapes_of = getattr(recipe.data, "batch_shapes", None)
    if shapes_of is None:
        with open_data(recipe).train() as batches:
            spec = dict(batches.spec)
    else:
        spec = shapes_of(recipe.batch_size)
    dtype_of = jax.dtypes.canonicalize_dtype  # 64-bit arrays become 32-bit arrays, as in the run
    return {name: jax.ShapeDtypeStruct(like.shape, dtype_of(like.dtype)) for name, like in spec.items()}


def build_step(recipe: Recipe) -> TrainStep:
    """Return the training step that `train` runs and `explain` compiles."""
    return TrainStep(recipe.loss, recipe.step)


def build_abstract(recipe: Recipe, mesh: AnyMesh) -> tuple[TrainStep, TrainState]:
    """Return the training step and the abstract training state of a recipe on a mesh."""
    model = build_model(recipe)
    tx = build_optimizer(recipe, model, mesh)
    state = abstract_state(model, tx, mesh=mesh, strategy=recipe.strategy, precision=recipe.step.precision)
    return build_step(recipe), state


def build_setup(recipe: Recipe, mesh: Mesh) -> Setup:
    """Derive the shardings of the state, and check that the state of all host devices fits in this host's memory."""
    model = build_model(recipe)
    tx = build_optimizer(recipe, model, mesh)
    setup = make_setup(model, tx, mesh=mesh, strategy=recipe.strategy, precision=recipe.step.precision)
    local_devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if local_devices and local_devices[0].platform == "cpu":
        totals = setup.table.totals
        needed = len(local_devices) * (totals.params_bytes + totals.grads_bytes + totals.optimizer_bytes)
        requested = f"train {totals.num_params:,} parameters on {len(local_devices)} host devices"
        check_memory("the training state", requested, needed, "make the model smaller, or shard it over more hosts")
    return setup
