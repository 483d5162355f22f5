"""Where a model runs its stacked layers, so that stages can run some of them each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from meshpar.types import PyTree

Layer: TypeAlias = Callable[[Any, PyTree], Any]
"""(x, parameters of one layer) -> x."""
Run: TypeAlias = Callable[[Layer, Any, PyTree], Any]
"""(layer, x, stacked parameters) -> x."""

_run = jax.make_user_context(default_value=None)


class running:
    """Put in force what `scan_layers` does instead of a scan."""

    def __init__(self, run: Run) -> None:
        # An object of its own for every trace: jax compares contexts by equality.
        self._context = _run(_Identity(run))

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._context.__exit__(*exc)


class _Identity:
    def __init__(self, run: Run) -> None:
        self.run = run


def is_staged() -> bool:
    """Whether stages run the layers of the model that is being traced."""
    return _run.value is not None


def scan_layers(layer: Layer, x: Any, params: PyTree) -> Any:
    """Run a model's stacked layers one after the other: a `lax.scan`, or under `mp.pipeline_parallel` stage by stage.

    A model calls it once, for the layers that stages are to share; what stands before is the first stage's and what
    stands behind the last one's. The layer must depend on nothing but its arguments and what follows from the batch.

    Args:
      layer: `(x, parameters of one layer) -> x`, wrapped in `meshpar.precision.remat_layer` where it is to be marked.
      x: a pytree; every layer gives it back in the same shapes and dtypes.
      params: the layers' parameters, stacked: `[layers, ...]`, logical name `layers`.
    """
    here = _run.value
    return scanned(layer, x, params) if here is None else here.run(layer, x, params)


def scanned(layer: Layer, x: Any, params: PyTree) -> Any:
    """The layers, one after the other."""
    return jax.lax.scan(lambda x, one: (layer(x, one), None), x, params)[0]
