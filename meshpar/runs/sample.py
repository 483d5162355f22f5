"""Text that a trained decoder samples: the sample of a run, and continuations of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshpar.layers.precision import cast_floating
from meshpar.runs.recipe import Recipe, build_model
from meshpar.sharding.context import use_rules
from meshpar.training.eval_params import eval_params
from meshpar.training.lora import merged_params
from meshpar.training.state import Setup, TrainState

if TYPE_CHECKING:
    from meshpar.sharding.adapters.model import Model


def continued(
    state: TrainState, config: Any, batch: np.typing.ArrayLike, *, num_tokens: int, seed: int, **options: Any
) -> list[list[int]]:
    """Sample continuations of prompts that have the same length. Return token ids, [prompt, position].

    `options` are further arguments of `meshpar.models.sampling.generate`.
    """
    program = _sampling(state.setup, state.setup.model, config=config, num_tokens=num_tokens, **options)
    tokens = program(state.params, state.extra, np.asarray(batch, np.int32), jax.random.key(seed))
    return np.asarray(tokens).tolist()


class SampleProgram:
    """The program that continues the prompt of a recipe on the training mesh, with the parameters of `mp.eval_params`.

    Args:
      recipe: a recipe with a sample.
      setup: the setup of the training state.
      source: the data, with `encode` and `decode`.
    """

    def __init__(self, recipe: Recipe, setup: Setup, source: Any) -> None:
        assert recipe.sample is not None
        self._setup, self._source, self._key = setup, source, jax.random.key(recipe.seed)
        self._prompt = np.asarray([source.encode(recipe.sample.prompt)], np.int32)
        self._jitted = _sampling(
            setup,
            setup.model if recipe.lora is None else build_model(recipe.replace(lora=None)),
            compute=recipe.step.precision.compute,
            config=recipe.model,
            num_tokens=recipe.sample.num_tokens,
            temperature=recipe.sample.temperature,
        )

    def lower(self) -> jax.stages.Lowered:
        """Return the lowered program of a model without adapters. A later call of `text` does not lower it again."""
        abstract = self._setup.abstract
        return self._jitted.lower(abstract.params, abstract.extra, self._prompt, self._key)

    def text(self, state: TrainState) -> str:
        """Return the prompt with its continuation."""
        state = eval_params(state)
        tokens = self._jitted(merged_params(state), state.extra, self._prompt, self._key)
        return self._source.decode(np.asarray(tokens)[0])


def _sampling(setup: Setup, model: Model, *, compute: str | None = None, **options: Any) -> Any:
    """Return the jitted function `(params, extra, prompt, key) -> tokens`."""
    from meshpar.models.sampling import generate

    def run(params: Any, extra: Any, prompt: jax.Array, key: jax.Array) -> jax.Array:
        with use_rules(setup.mesh, setup.strategy):
            return generate(model.bind(cast_floating(params, compute), extra), prompt, key=key, **options)

    return jax.jit(run)
