"""Averages of parameters over steps, which lie in the optimizer's state as its moments do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshpar.optim.moments import checked
from meshpar.sharding.context import apart
from meshpar.sharding.types import PyTree, problem

if TYPE_CHECKING:
    from meshpar.training.state import TrainState


class EmaState(NamedTuple):
    """What `mp.ema` keeps: the optimizer's own state, and the averages."""

    inner: PyTree
    average: PyTree
    """Of every trained parameter, float32 or wider."""


def ema(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """The optimizer, with an exponential moving average of the parameters it makes: `a = decay a + (1 - decay) p`.

    `mp.ema_params` puts the averages in the parameters' place, to evaluate with. They begin as the parameters and are
    in checkpoints with the rest of the state. A device holds those of the shards that it updates, 4 bytes a number;
    nothing is sent for them. Frozen parameters have none, and an update that is skipped leaves them.

    Args:
      tx: an optax optimizer, outermost: `ema(offloaded(tx), 0.999)` keeps averages on the device, `offloaded(ema(tx,
        0.999))` on the host. What `optax.chain` has behind it changes updates that it has averaged: put it last.
      decay: from 0 up to 1, 1 excluded.

    Raises:
      ValueError: what is no optimizer, or no such decay.

    Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging", there with equal weights.

    Example:
      >>> state = init_state(model, ema(optax.adamw(3e-4), 0.999), ...)  # doctest: +SKIP
      >>> eval_step(loss)(averaged(state), batch)  # doctest: +SKIP
    """
    tx = optax.with_extra_args_support(checked("ema", tx))
    if isinstance(decay, bool) or not (isinstance(decay, int | float) and 0 <= decay < 1):
        raise problem(f"ema(decay={decay!r})", "average by it", "a decay is a number in [0, 1)", "write decay=0.999")

    def init(params: PyTree) -> EmaState:
        # A copy: a step is given both to write over.
        return EmaState(tx.init(params), jax.tree.map(lambda p: jnp.array(p, _wide(p), copy=True), params))

    def update(grads: PyTree, state: EmaState, params: PyTree = None, **asked: Any) -> tuple[PyTree, EmaState]:
        if params is None:
            fix = "call tx.update(grads, state, params)"
            raise problem("ema, its update", "average parameters", "it is given none", fix)
        updates, inner = tx.update(grads, state.inner, params, **asked)
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p.astype(a.dtype), state.average, new)
        return updates, EmaState(inner, average)

    return optax.GradientTransformationExtraArgs(init, update)


def averages_of(opt_state: PyTree) -> tuple[Any, EmaState] | None:
    """(its key path, what `mp.ema` keeps) in an optimizer's state; None where it keeps nothing."""
    found = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, EmaState))
    return next((one for one in found if isinstance(one[1], EmaState)), None)


def _wide(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    # Steps of 1 - decay are lost on 8 bits.
    return jnp.promote_types(x.dtype, jnp.float32) if is_float else x.dtype


@apart()
def ema_params(state: TrainState) -> TrainState:
    """The state with the averages of `mp.ema` as its parameters, laid out like them and in their dtype.

    For `eval_step`, `generate`, `interop.to_hf`; training goes on with the state as it was.

    Raises:
      ValueError: an optimizer without `mp.ema`.
    """
    setup = state.setup
    if averages_of(state.opt_state) is None:
        fix = "give init_state the optimizer mp.ema(tx, 0.999)"
        raise problem("averaged", "find averages of the parameters", "the optimizer keeps none", fix)

    def cast(opt_state: PyTree, params: PyTree) -> PyTree:
        found = averages_of(setup.for_update((), opt_state)[1])
        assert found is not None
        average = found[1].average
        trained = jax.tree.map(lambda a, p: a.astype(p.dtype), average, setup.trained(params))
        # Copies: the state goes on, and what a step is given is gone behind it.
        return jax.tree.map(jnp.copy, setup.with_frozen(trained, params))

    return state.replace(params=setup.jit(cast, setup.shardings.params)(state.opt_state, state.params))
