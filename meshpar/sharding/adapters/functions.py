"""`from_functions`, the adapter for pairs of plain functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshpar.sharding.adapters.model import Model, Variables, with_raw_keys
from meshpar.sharding.adapters.random_keys import key_of
from meshpar.sharding.errors import near, problem
from meshpar.sharding.types import Names, PyTree, tree_leaves_with_paths


def from_functions(
    init: Callable[[jax.Array], PyTree],
    apply: Callable[..., Any],
    *,
    names: Mapping[str, Names] | None = None,
    keeps_state: bool = False,
) -> Model:
    """Convert two plain functions to a `Model`.

    This supports libraries whose models are pytrees or pairs of functions, such as Equinox and Haiku. They have no
    logical names. Use `names`, or `Rules(paths=...)` with the paths that `shardings` prints (`mlp/layers/0/weight`,
    `mlp/~/linear_0/w`), and call `constrain` in `apply`.

    Args:
      init: function from a key to the parameters, a pytree of arrays.
      apply: function from (params, *inputs) to outputs. The loss function receives `apply` with bound parameters.
      names: logical names by path, for example {"up/kernel": ("embed", "mlp")}.
      keeps_state: whether the model has state that no optimizer updates. Then `init` returns (params, state), and
        `apply` maps (params, state, *inputs) to (outputs, state). The state is passed to the next call and the next
        step.

    Returns:
      The model.

    Raises:
      ValueError: `names` has a path without a parameter, or a function with `keeps_state` does not return a pair.

    Example:
      >>> def init(key):
      ...     return {"w": jax.random.normal(key, (8, 4))}
      >>> model = mp.from_functions(init, lambda params, x: x @ params["w"], names={"w": ("embed", "mlp")})

      Equinox, where arrays are the parameters and the rest of the module is static:

      >>> shapes = eqx.filter_eval_shape(Net, jax.random.key(0))  # doctest: +SKIP
      >>> static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]  # doctest: +SKIP
      >>> model = mp.from_functions(  # doctest: +SKIP
      ...     lambda key: eqx.partition(Net(key), eqx.is_array)[0],
      ...     lambda params, x: jax.vmap(eqx.combine(params, static))(mp.constrain(x, "batch", None)),
      ... )

      Haiku, without and with state:

      >>> net = hk.without_apply_rng(hk.transform(forward))  # doctest: +SKIP
      >>> model = mp.from_functions(lambda key: net.init(key, example), net.apply)  # doctest: +SKIP
      >>> net = hk.without_apply_rng(hk.transform_with_state(forward))  # doctest: +SKIP
      >>> model = mp.from_functions(lambda key: net.init(key, example), net.apply, keeps_state=True)  # doctest: +SKIP
    """
    for path, dims in (names or {}).items():
        if not isinstance(dims, tuple | list):
            where, reason = (
                f"from_functions(names={{{path!r}: {dims!r}}})",
                f"it is a {type(dims).__name__}, not a tuple",
            )
            raise problem(where, "name the dims", reason, 'write {"up/kernel": ("embed", "mlp")}', code="wrong-type")
    by_path = {path: tuple(dims) for path, dims in (names or {}).items()}

    def init_variables(key: jax.Array) -> Variables:
        out = init(key_of(key))
        params, extra = _checked_pair(out, "init", "(params, state)") if keeps_state else (out, {})
        paths = {path for path, _ in tree_leaves_with_paths(params)}
        for path in by_path.keys() - paths:
            where, reason = f"from_functions(names={{{path!r}: ...}})", "there is no parameter with this path"
            raise problem(where, "name its dims", reason, near(path, paths), code="not-found")
        return Variables(params, extra)

    def bind(params: PyTree, extra: PyTree) -> Any:
        return _WithState(apply, params, extra) if keeps_state else functools.partial(apply, params)

    model = Model(
        kind="functions", init=init_variables, bind=bind, collect=lambda bound: bound.extra if keeps_state else {},
        names=lambda: by_path,
    )  # fmt: skip
    return with_raw_keys(model)


class _WithState:
    """A function `apply` with bound parameters and state. Each call replaces the state."""

    def __init__(self, apply: Callable[..., Any], params: PyTree, extra: PyTree) -> None:
        self.apply, self.params, self.extra = apply, params, extra

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.apply(self.params, self.extra, *args, **kwargs)
        out, self.extra = _checked_pair(out, "apply", "(outputs, state)")
        return out


def _checked_pair(out: Any, function: str, pair: str) -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2:
        return out
    where, reason = f"from_functions(keeps_state=True), `{function}`", f"it returns a {type(out).__name__}"
    raise problem(where, f"return {pair}", reason, f"return {pair}, or leave out keeps_state", code="wrong-type")
