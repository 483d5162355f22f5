"""Where a model runs its stacked layers, so that stages can run some of them each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from meshpar.sharding.context import current, within
from meshpar.sharding.types import PyTree, problem


class Aux(NamedTuple):
    """What a layer, or a part of the model, gives beside its output."""

    loss: jax.Array
    """Scalar; a mean over rows, as losses are."""
    metrics: dict[str, jax.Array]
    """Arrays that no gradient passes through. Over microbatches and devices those of whole numbers are summed, for they
    are counts, and all others averaged, for they are means over rows."""


Layer: TypeAlias = Callable[[Any, PyTree], Any]
"""(x, parameters of one layer) -> x, or -> (x, Aux)."""
Run: TypeAlias = Callable[[Layer, Any, PyTree], Any]
"""(layer, x, stacked parameters) -> x, or -> (x, Aux of all layers)."""


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Put in force what `scan_layers` does instead of a scan."""
    # An object of its own for every trace: jax compares contexts by equality.
    with within(run=_Identity(run)):
        yield


class _Identity:
    def __init__(self, run: Run) -> None:
        self.run = run


def is_staged() -> bool:
    """Whether stages run the layers of the model that is being traced."""
    return current().run is not None


def scan_layers(layer: Layer, x: Any, params: PyTree) -> Any:
    """Run a model's stacked layers one after the other: a `lax.scan`, or under `mp.pipeline_parallel` stage by stage.

    A model calls it once, for the layers that stages are to share; what stands before is the first stage's and what
    stands behind the last one's. The layer must depend on nothing but its arguments and what follows from the batch.

        x, aux = scan_layers(layer, x, (params, bias))     where layer gives (x, Aux(loss, {"load": counts}))

    A layer may give an `Aux` with its output: an auxiliary loss, and metrics. Then so does `scan_layers`: the losses
    summed over layers, the metrics stacked, `[layers, ...]`. Under stages they are complete only when all
    microbatches are through, so what a model and its loss function make of them is worked out once, behind the last
    tick, of the sums and means over microbatches and devices. For that,

      - the loss may add `aux.loss`, times a constant, and use no `aux.metrics`;
      - a metric, or a variable that the model changes, may be made of `aux`, constants and the model's variables as
        they were before the step, and then of nothing else (`bias = update_bias(bias, aux.metrics["load"])`);
      - a metric that is not made of `aux` is one of each microbatch, as always.

    All of this gives what a scan gives, as far as losses and metrics are means over rows, or counts. Variables that the
    layers read (the state of an NNX module or a Linen collection, stacked `[layers, ...]`) are given with `params`.

    Args:
      layer: `(x, parameters of one layer) -> x`, or `-> (x, Aux)`, wrapped in
        `meshpar.training.precision.remat_layer` where it is to be marked.
      x: a pytree; every layer gives it back in the same shapes and dtypes.
      params: the layers' parameters, stacked: `[layers, ...]`, logical name `layers`; and whatever else has a row for
        every layer, variables or constants: under stages each layer gets its own.

    Returns:
      x, or `(x, Aux)` where the layers give one.

    Raises:
      ValueError: an Aux whose loss is no scalar.
    """
    here = current().run
    return scanned(layer, x, params) if here is None else here.run(layer, x, params)


def scanned(layer: Layer, x: Any, params: PyTree) -> Any:
    """The layers, one after the other."""

    def step(x: Any, one: PyTree) -> Any:
        y, aux = with_aux(layer(x, one))
        # What is weakly typed takes the type that the layers give it.
        if not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(x)):
            check_alike("a layer", x, y)
        return y, aux

    x, aux = jax.lax.scan(step, x, params)
    return x if aux is None else (x, Aux(aux.loss.sum(0), aux.metrics))


def check_alike(name: str, x: PyTree, y: PyTree) -> None:
    """What takes x and gives y, one after the other, gives it as it takes it."""
    trees = [str(jax.tree.structure(tree)) for tree in (x, y)]
    if trees[0] != trees[1] or _types(x) != _types(y):
        of_x, of_y = ("", "") if trees[0] == trees[1] else (f" in {tree}" for tree in trees)
        raise problem(
            name,
            f"give its result, {_types(y)}{of_y}, to the next",
            f"each takes {_types(x)}{of_x}",
            "make y of x's structure, shapes and dtypes; what changes them belongs before the layers or behind them",
        )


def _types(tree: PyTree) -> str:
    return ", ".join(f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in jax.tree.leaves(tree)) or "no array"


def with_aux(given: Any) -> tuple[Any, Aux | None]:
    """What a layer gives, as its output and an Aux or None."""
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Aux)):
        return given, None
    x, aux = given
    if jnp.shape(aux.loss) != ():
        raise problem(
            "the Aux of a layer",
            "add its loss to the loss",
            f"it has shape {jnp.shape(aux.loss)}",
            "take its mean in the layer; what is to be seen of every row or expert belongs into Aux.metrics",
        )
    if not isinstance(aux.metrics, Mapping):
        raise problem(
            "the Aux of a layer",
            f"take metrics from a {type(aux.metrics).__name__}",
            "they are a dict of arrays by name",
            "write Aux(loss, {})",
        )
    metrics = {name: jax.lax.stop_gradient(jnp.asarray(value)) for name, value in aux.metrics.items()}
    return x, Aux(jnp.asarray(aux.loss), metrics)
