"""Averages for evaluation in the optimizer state: moving averages and schedule-free iterates."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshpar.optim.rounding import checked
from meshpar.sharding.errors import check_cases
from meshpar.sharding.types import PyTree


class EmaState(NamedTuple):
    """State of `mp.ema`: the state of the optimizer, and the averages."""

    inner: PyTree
    average: PyTree
    """Average of each trained parameter, in float32 or a wider dtype."""


def ema(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Add an exponential moving average of the updated parameters to an optimizer: `a = decay a + (1 - decay) p`.

    `mp.ema_params` returns a state with the averages as parameters, for evaluation. The averages start as the
    parameters and are saved in checkpoints. They are sharded like the updates, take 4 bytes per element, and need no
    communication. Frozen parameters have no average. Skipped updates do not change the averages.

    Args:
      tx: an optax optimizer. `ema(offload_state(tx), 0.999)` keeps the averages on the device,
        `offload_state(ema(tx, 0.999))` on the host. In `optax.chain`, put `ema` last: it averages the parameters
        before the updates of later transformations.
      decay: at least 0 and less than 1.

    Returns:
      The optimizer with averages.

    Raises:
      ValueError: `tx` is not an optimizer, or `decay` is out of range.

    Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging", which uses equal weights.

    Example:
      >>> tx = mp.ema(optax.adamw(3e-4), 0.999)
      >>> state = mp.init_state(model, tx, mesh=mesh, strategy=strategy, key=0)
      >>> metrics = mp.eval_step(loss_fn)(mp.ema_params(state), batch)
    """
    tx = optax.with_extra_args_support(checked("ema", tx))
    is_wrong = isinstance(decay, bool) or not (isinstance(decay, int | float) and 0 <= decay < 1)
    case = is_wrong, "the decay must be a number in [0, 1)", "use decay=0.999"
    check_cases(f"ema(decay={decay!r})", "average parameters", "out-of-range", case)

    def init(params: PyTree) -> EmaState:
        def average(p: Any) -> jax.Array:
            # bfloat16 would lose steps of 1 - decay. A copy, because a step donates parameters and averages.
            dtype = jnp.promote_types(p.dtype, jnp.float32) if jnp.issubdtype(p.dtype, jnp.inexact) else p.dtype
            return jnp.array(p, dtype, copy=True)

        return EmaState(tx.init(params), jax.tree.map(average, params))

    def update(grads: PyTree, state: EmaState, params: PyTree = None, **kwargs: Any) -> tuple[PyTree, EmaState]:
        case = params is None, "`params` is None", "call tx.update(grads, state, params)"
        check_cases("ema, its update", "average parameters", "wrong-signature", case)
        updates, inner = tx.update(grads, state.inner, params, **kwargs)
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p.astype(a.dtype), state.average, new)
        return updates, EmaState(inner, average)

    return optax.GradientTransformationExtraArgs(init, update)


def averages_of(opt_state: PyTree) -> tuple[Any, EmaState] | None:
    """Return the key path and the state of `mp.ema` in an optimizer state, or None."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, EmaState))
    return next((leaf for leaf in leaves if isinstance(leaf[1], EmaState)), None)


def check_averages(opt_state: PyTree, params: PyTree) -> None:
    """Check that the averages of `mp.ema` in an optimizer state cover all trained parameters."""
    averages = averages_of(opt_state)
    if averages is None:
        return
    reason = "it is inside another optimizer that passes it a part of the parameters, or passes them in another form"
    fix = "make it the outermost optimizer, as in mp.ema(mp.optim.per_layer(tx, names), decay)"
    case = jax.tree.structure(averages[1].average) != jax.tree.structure(params), reason, fix  # type: ignore[operator]
    check_cases("mp.ema in the optimizer", "average all trained parameters", "unsupported-feature", case)


def schedule_free_of(opt_state: PyTree) -> list[tuple[Any, Any]]:
    """Return the key path and the state of each `optax.contrib.schedule_free` in an optimizer state."""
    kind = optax.contrib.ScheduleFreeState
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, kind))
    return [leaf for leaf in leaves if isinstance(leaf[1], kind)]


def schedule_free_iterate(params: PyTree, z: PyTree, b1: jax.typing.ArrayLike) -> jax.Array:
    """Return the evaluation iterate x of `params = b1 x + (1 - b1) z`, in at least float32.

    Source: Defazio et al. 2024, "The Road Less Scheduled", equation 9.
    """
    dtype = jnp.promote_types(params.dtype, jnp.float32)
    params, z, b1 = (jnp.asarray(x, dtype) for x in (params, z, b1))
    b1 = b1.reshape(b1.shape + (1,) * (params.ndim - b1.ndim))  # a scalar, or a value for each layer
    return (params - (1 - b1) * z) / b1
