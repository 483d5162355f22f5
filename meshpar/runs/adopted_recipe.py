"""Recipes of adopted models, as Python code that a user can edit."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from meshpar.runs.model_target import Inputs, ModelTarget
from meshpar.sharding.rules import NamesOf

LossKind = Literal["cross-entropy", "squared-error"]
"""Kinds of losses, by the kind of the output: logits, or values."""
_BATCHES = 4
"""Number of batches of random examples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """The array in the output of a model that the loss compares with targets."""

    access: str
    """Code from the output to the array, such as `.logits` or `[0]`."""
    shape: tuple[int, ...]
    loss: LossKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdoptedRecipe:
    """The parts of a recipe. `text` is the code."""

    target: ModelTarget
    inputs: Inputs
    bounds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """For each integer input that selects rows of a table, the number of rows."""
    output: ModelOutput | None = None
    """None: a file without a loss, to trace the model."""
    paths: Mapping[str, NamesOf] = dataclasses.field(default_factory=dict)
    """Names of dims by path pattern."""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    strategy: str = "mp.ddp()"
    """Code of the strategy without rules."""
    drops_names: bool = False
    """Whether the model has logical names of the other package, which the rules replace."""
    shards_all: bool = False
    """Whether ZeRO also shards small leaves without names."""
    compute: str | None = None
    """Dtype of the computation; None for the dtype of the model."""

    def text(self) -> str:
        """Return the code of a file. With an output, the file is a recipe."""
        parts = [self._header(), self._model(), self._examples()]
        if self.output is not None:
            parts += [self._loss(self.output), self._rules(), self._recipe()]
        return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"

    def module(self) -> types.ModuleType:
        """Return the file as an imported module."""
        module = types.ModuleType("adopted")
        exec(compile(self.text(), f"<recipe of {self.target.name}>", "exec"), vars(module))
        return module

    @property
    def run_name(self) -> str:
        """Name of the recipe."""
        return re.sub(r"\W+", "_", self.target.name.rpartition(":")[2]).strip("_").lower()

    @property
    def targets(self) -> str:
        """Name of the targets in a batch. The model may have an input `targets`, as decoders of translations have."""
        return next(name for name in ("targets", "loss_targets") if name not in self.inputs.arrays)

    def _header(self) -> str:
        modules = {*self.target.modules} - {"jax.numpy", "numpy"}
        modules |= {"equinox", "jax"} if self.target.kind == "equinox" else set()
        modules |= {"optax"} if self.output is not None and self.output.loss == "cross-entropy" else set()
        modules |= {"dataclasses"} if self.drops_names else set()
        imports = [*(f"import {name}" for name in modules), "import jax.numpy as jnp", "import numpy as np"]
        listed = "\n".join(sorted(imports))
        return f'''
"""Training of `{self.target.name.rpartition(":")[2]}` on random examples.

Written by `meshpar adopt {self.target.name}`.
Replace `examples` with your data, and check the loss.
"""

from __future__ import annotations

{listed}

import meshpar as mp
from meshpar.sharding.adapters.model import Model

BATCH_SIZE = {self.inputs.batch_size}
'''

    def _model(self) -> str:
        arrays, expression = self.inputs.arrays, textwrap.indent(self.target.expression, 8 * " ").strip()
        batch = "".join(f"        {n}=jnp.zeros({_shape(x.shape)}, jnp.{x.dtype}),\n" for n, x in arrays.items())
        static = "".join(f"        {name}={value!r},\n" for name, value in self.inputs.static.items())
        passed = "".join(f'        {name}=batch["{name}"],\n' for name in arrays)
        build = {
            "model": f"    return (\n        {expression}\n    )\n",
            "nnx": f"    return mp.from_nnx(\n        lambda rngs: {expression}\n    )\n",
            "linen": f"    return mp.from_linen(\n        {expression},\n{batch}{static}    )\n",
            "equinox": _EQUINOX.replace("EXPRESSION", expression),
        }[self.target.kind]
        if self.drops_names:
            build = build.replace("    return", "    model =", 1)
            build += "    return dataclasses.replace(model, names=dict)  # without the names of the package\n"
        return f'''
def build() -> Model:
    """Return the model."""
{build}

def call(model, batch):
    """Return the output of the model for a batch."""
    return model(
{passed}{static}    )
'''

    def _examples(self) -> str:
        lines = [f'        "{name}": {self._draw(name)},' for name in self.inputs.arrays]
        if self.output is not None:
            lines.append(f'        "{self.targets}": {self._targets(self.output)},')
        return "\n".join(
            [
                f"def examples(count: int = {_BATCHES} * BATCH_SIZE, seed: int = 0) -> dict[str, np.ndarray]:",
                '    """Return random examples."""',
                "    draw = np.random.default_rng(seed)",
                "    return {",
                *lines,
                "    }",
            ]
        )

    def _draw(self, name: str) -> str:
        x = self.inputs.arrays[name]
        shape = f"(count, {', '.join(map(str, x.shape[1:]))})" if len(x.shape) > 1 else "count"
        if name in self.bounds:
            return f"draw.integers(0, {self.bounds[name]}, {shape}).astype(jnp.{x.dtype})"
        if np.dtype(x.dtype).kind in "biu":
            return f"np.ones({shape}, jnp.{x.dtype})"
        return f"draw.normal(size={shape}).astype(jnp.{x.dtype})"

    def _targets(self, output: ModelOutput) -> str:
        if output.loss == "squared-error":
            return f"draw.normal(size={_with_count(output.shape[1:])}).astype(jnp.float32)"
        return f"draw.integers(0, {output.shape[-1]}, {_with_count(output.shape[1:-1])}).astype(jnp.int32)"

    def _loss(self, output: ModelOutput) -> str:
        name, losses, title = "outputs", f'(outputs - batch["{self.targets}"]) ** 2', "squared error"
        if output.loss == "cross-entropy":
            name, title = "logits", "cross entropy of logits"
            losses = f'optax.softmax_cross_entropy_with_integer_labels(logits, batch["{self.targets}"])'
        return f'''
def loss(model, batch, key):
    """Return the mean {title}."""
    {name} = call(model, batch){output.access}.astype(jnp.float32)
    losses = {losses}
    return mp.MeanLoss(losses.sum(), losses.size), {{}}
'''

    def _rules(self) -> str:
        lines = [f'        r"{pattern}": mp.{value!r},'.replace("'", '"') for pattern, value in self.paths.items()]
        return "\n".join(["RULES = mp.Rules(", "    paths={", *lines, "    }", ")"]) if lines else "RULES = mp.Rules()"

    def _recipe(self) -> str:
        sizes = {axis: size for axis, size in self.mesh.items() if size != 1}
        # The recipe runs on any number of devices that the other axes divide.
        sizes |= {"fsdp": -1} if "fsdp" in sizes else {}
        mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        strategy = self.strategy.replace("sdp()", "sdp(min_bytes=0)") if self.shards_all else self.strategy
        step = (
            f'        step=mp.StepOptions(precision=mp.Precision(compute="{self.compute}")),\n' if self.compute else ""
        )
        return f'''
def recipe() -> mp.Recipe:
    """Return the recipe."""
    return mp.Recipe(
        name="{self.run_name}",
        mesh=mp.MeshSpec({mesh}),
        strategy={strategy} | RULES,
        model=build(),
        loss=loss,
        data=mp.data.ArrayData(arrays=examples, valid=lambda: examples(BATCH_SIZE, seed=1)),
        steps=100,
        batch_size=BATCH_SIZE,
{step}    )
'''


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, ('BATCH_SIZE', *shape[1:])))}{',' * (len(shape) == 1)})"


def _with_count(shape: Sequence[int]) -> str:
    return f"(count, {', '.join(map(str, shape))})" if shape else "count"


_EQUINOX = """
    def create(key):
        return EXPRESSION

    shapes = equinox.filter_eval_shape(create, jax.random.key(0))
    static = equinox.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]

    def init(key):
        return equinox.partition(create(key), equinox.is_array)[0]

    def sharded(x):
        return mp.constrain(x, "batch", *[None] * (x.ndim - 1))

    def apply(params, **inputs):
        module = equinox.combine(params, static)
        outputs = jax.vmap(lambda inputs: module(**inputs))(jax.tree.map(sharded, inputs))
        return jax.tree.map(sharded, outputs)

    return mp.from_functions(init, apply)
"""
