"""Parameters for evaluation: the state with moving averages or schedule-free iterates as parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar.optim.averages import averages_of, schedule_free_iterate, schedule_free_of
from meshpar.optim.matrix_dims import stack_dims
from meshpar.sharding.context import clear_context_mesh
from meshpar.sharding.errors import check_cases
from meshpar.sharding.types import PyTree, path_str, tree_leaves_with_paths
from meshpar.training.state import TrainState


@clear_context_mesh()
def eval_params(state: TrainState) -> TrainState:
    """Return the state with the parameters to evaluate, to sample from, or to export.

    These are the averages of `mp.ema`, or the evaluation iterate of `optax.contrib.schedule_free`, which is more
    accurate than the iterate at which the gradients are computed. For other optimizers the state is returned.
    Continue training with the original state.

    Args:
      state: a state with any optimizer.

    Example:
      >>> metrics = mp.eval_step(loss_fn)(mp.eval_params(state), batch)
    """
    setup = state.setup
    if averages_of(state.opt_state) is not None:
        return ema_params(state)
    if not schedule_free_of(state.opt_state):
        return state

    names = {decision.path: decision.leaf.names for decision in setup.table.params}

    def evaluated(opt_state: PyTree, params: PyTree) -> PyTree:
        iterates = {
            path: (z, schedule_free.b1)
            for _, schedule_free in schedule_free_of(setup.for_update((), opt_state)[1])
            for path, z in tree_leaves_with_paths(schedule_free.z)
        }

        def iterate(key_path: Any, x: jax.Array) -> jax.Array:
            path = path_str(key_path)
            if path not in iterates:  # a copy, because the next step donates the original state
                return jnp.copy(x)
            z, b1 = iterates[path]
            # `per_layer` has a value of b1 for each layer, and the stack dims first.
            dims = stack_dims(names.get(path)) if jnp.ndim(b1) else ()
            first = range(len(dims))
            iterate = schedule_free_iterate(jnp.moveaxis(x, dims, first), z, b1)
            return jnp.moveaxis(iterate, first, dims).astype(x.dtype)

        return jax.tree_util.tree_map_with_path(iterate, params)

    return state.replace(params=setup.jit(evaluated, setup.shardings.params)(state.opt_state, state.params))


@clear_context_mesh()
def ema_params(state: TrainState) -> TrainState:
    """Return the state with the averages of `mp.ema` as parameters, in the dtype and sharding of the parameters.

    Use it for `eval_step`, `generate` or `interop.to_hf`. Continue training with the original state.

    Args:
      state: a state whose optimizer is from `mp.ema`.

    Raises:
      ValueError: the optimizer has no averages.

    Example:
      >>> state = mp.init_state(model, mp.ema(optax.adamw(3e-4), 0.999), mesh=mesh, strategy=strategy, key=0)
      >>> averages = mp.ema_params(state).params
    """
    setup = state.setup
    case = averages_of(state.opt_state) is None, "the optimizer has no averages", "use mp.ema(tx, 0.999) in init_state"
    check_cases("ema_params", "return averages", "not-found", case)

    def cast(opt_state: PyTree, params: PyTree) -> PyTree:
        averages = averages_of(setup.for_update((), opt_state)[1])
        assert averages is not None
        trained = jax.tree.map(lambda a, p: a.astype(p.dtype), averages[1].average, setup.trained(params))
        # Copies, because the next step donates the original state.
        return jax.tree.map(jnp.copy, setup.with_frozen(trained, params))

    return state.replace(params=setup.jit(cast, setup.shardings.params)(state.opt_state, state.params))
