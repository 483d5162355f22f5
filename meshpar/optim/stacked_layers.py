"""Optimizers with a statistic for each array, such as LAMB, on stacks of layers and experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshpar.optim.matrix_dims import stack_dims
from meshpar.optim.rounding import ROUNDING, checked
from meshpar.sharding.errors import problem
from meshpar.sharding.jaxprs import in_scope
from meshpar.sharding.types import Names, PyTree, path_str, tree_leaves_with_paths


def per_layer(tx: optax.GradientTransformation, names: Mapping[str, Names | None]) -> optax.GradientTransformation:
    """Apply an optimizer to each layer and expert of a stack, as if each had a separate array.

    LAMB, LARS, Adafactor and adaptive clipping compute statistics of each array: a norm, a mean square, factored
    moments. Without this wrapper a stack of layers is a single array, and its layers share the statistic.

    Arrays with equal stack dims are updated together. Statistics over all parameters, such as a global norm, must
    therefore be outside of the wrapper: `optax.chain(optax.clip_by_global_norm(1.0), per_layer(optax.lamb(1e-3),
    names))`. The same is true of transformations that need the loss, such as `reduce_on_plateau`. Arrays in the state
    have the stack dims first, and counters have a value for each layer.

    Args:
      tx: an optax optimizer. It receives gradients, state and parameters, but no extra arguments.
      names: logical names of the dims of each parameter, by path: `model.names()`. Dims called `layers`, `dense_layers`
        and `expert` are stack dims.

    Returns:
      The optimizer for stacks.

    Raises:
      ValueError: `tx` is not an optimizer.

    Example:
      >>> tx = mp.optim.per_layer(optax.lamb(1e-3), model.names())
    """
    tx = checked("per_layer", tx)

    def groups_of(*trees: PyTree) -> dict[str, tuple[int, list[PyTree]]]:
        """Return the number of stack dims and the trees of each group, with stack dims first. Other leaves are None."""
        labels, stacks = [], []
        for path, x in tree_leaves_with_paths(trees[0]):
            stacks.append(stack_dims(names.get(path)))
            labels.append(",".join(f"{(names[path] or ())[dim]}={x.shape[dim]}" for dim in stacks[-1]))
        structure = jax.tree.structure(trees[0])

        def select(label: str, tree: PyTree) -> PyTree:
            leaves = zip(jax.tree.leaves(tree), labels, stacks, strict=True)
            selected = [jnp.moveaxis(x, dims, range(len(dims))) if name == label else None for x, name, dims in leaves]
            return jax.tree.unflatten(structure, selected)

        return {
            label: (label.count("="), [select(label, tree) for tree in trees if tree is not None])
            for label in dict.fromkeys(labels)
        }

    def mapped(function: Any, num_dims: int) -> Any:
        return function if num_dims == 0 else jax.vmap(mapped(function, num_dims - 1))

    def init(params: PyTree) -> dict[str, PyTree]:
        return {label: mapped(tx.init, num_dims)(*trees) for label, (num_dims, trees) in groups_of(params).items()}

    def update(grads: PyTree, state: dict[str, PyTree], params: PyTree = None) -> tuple[PyTree, dict[str, PyTree]]:
        new: dict[str, PyTree] = {}
        updates: dict[str, jax.Array] = {}
        for label, (num_dims, (group, *args)) in groups_of(grads, params).items():
            changes, new[label] = mapped(tx.update, num_dims)(group, state[label], *args)
            updates |= dict(tree_leaves_with_paths(changes))

        def restored(key_path: Any, _: Any) -> jax.Array:
            path = path_str(key_path)
            dims = stack_dims(names.get(path))
            return jnp.moveaxis(updates[path], range(len(dims)), dims)

        return jax.tree_util.tree_map_with_path(restored, grads), new

    return optax.GradientTransformation(init, update)


# ---- The check -------------------------------------------------------------------------------------------------------


def check_stacks(
    tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree, names: Mapping[str, Names | None]
) -> None:
    """Check that an optimizer computes no statistic of an array over its stack dims.

    Args:
      tx: the optimizer.
      params: shapes and dtypes of the trained parameters.
      opt_state: shapes and dtypes of the optimizer state.
      names: logical names of the dims of each parameter, by path.

    Raises:
      ValueError: a statistic includes several layers or experts.
    """
    paths = [path for path, _ in tree_leaves_with_paths(params)]
    stacks = [
        [dim for dim in stack_dims(names.get(path)) if x.shape[dim] > 1] for path, x in tree_leaves_with_paths(params)
    ]
    if not any(stacks) or len(paths) == 1:  # the statistic of a single array is also that of all arrays
        return

    def update(grads: PyTree, opt_state: PyTree, params: PyTree, value: jax.Array) -> Any:
        def value_fn(params: PyTree, **_: Any) -> jax.Array:
            return value + sum(jnp.vdot(x, x).real for x in jax.tree.leaves(params))

        arguments = {"value": value, "grad": grads, "value_fn": value_fn, "obj_fn": value_fn}
        return optax.with_extra_args_support(tx).update(grads, opt_state, params, **arguments)

    try:
        jaxpr = jax.make_jaxpr(update)(params, opt_state, params, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception:  # the step reports it
        return
    walk = _Walk()
    inputs = [  # all dims of other arrays, whose statistics are not checked but are added to those of the stacks
        _Value(dict.fromkeys(dims or range(len(x.shape)), frozenset({index})), frozenset())
        for index, (dims, x) in enumerate(zip(stacks, jax.tree.leaves(params), strict=True))
    ]
    outputs = [_Value({}, frozenset())] * (len(paths) + len(jax.tree.leaves(opt_state)))
    for _ in range(2):  # a statistic of the first update may be in the state, as in SM3
        outputs = walk.run(jaxpr.jaxpr, [*inputs, *outputs[len(paths) :], *inputs, _Value({}, frozenset())])
    outputs = outputs[: len(paths)]
    for statistic, owner in enumerate(walk.owners):
        if stacks[owner] and [index for index, value in enumerate(outputs) if statistic in value.statistics] == [owner]:
            shape = dict(tree_leaves_with_paths(params))[paths[owner]].shape
            counts = ", ".join(f"`{names[paths[owner]][dim]}` ({shape[dim]})" for dim in stacks[owner])  # type: ignore[index]
            where, requested = f"the optimizer, `{paths[owner]}` {list(shape)}", f"update the stack of {counts}"
            reason = "it computes a statistic of each array, such as a norm, which would include the other layers"
            fix = "write mp.optim.per_layer(tx, model.names()), in a recipe mp.Optax(make=..., per_layer=True)"
            raise problem(where, requested, reason, fix, code="unsupported-feature")


class _Value(NamedTuple):
    """Properties of an array in the update of an optimizer."""

    stacks: dict[int, frozenset[int]]
    """The parameters, by number, that each dim stacks. Other dims are missing."""
    statistics: frozenset[int]
    """The statistics of single parameters that the array depends on."""
    is_global: bool = False
    """Whether the array is a sum of statistics of several parameters, such as a global norm."""


_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin")
_SUMS = ("add", "add_any", "max", "min", "and", "or")
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


class _Walk:
    """Follow the stack dims of parameters through a jaxpr, and number the statistics over them.

    Loops are not entered, so statistics inside of them are not found.
    """

    def __init__(self) -> None:
        self.owners: list[int] = []
        """The parameter of each statistic."""

    def run(self, jaxpr: Any, inputs: Sequence[_Value]) -> list[_Value]:
        empty = _Value({}, frozenset())
        values = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atoms: Sequence[Any]) -> list[_Value]:
            return [empty if hasattr(atom, "val") else values.get(atom, empty) for atom in atoms]

        for eqn in jaxpr.eqns:
            values |= dict(zip(eqn.outvars, self._outputs(eqn, read(eqn.invars)), strict=True))
        return read(jaxpr.outvars)

    def _outputs(self, eqn: Any, operands: list[_Value]) -> list[_Value]:
        inner = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None)
        inner = getattr(inner, "jaxpr", inner)
        if eqn.primitive.name == "cond":
            return _joined([self.run(branch.jaxpr, operands[1:]) for branch in eqn.params["branches"]])
        if inner is not None and len(inner.invars) == len(operands) and eqn.primitive.name not in ("scan", "while"):
            return self.run(inner, operands)
        return [self._value(eqn, operands, out.aval.shape) for out in eqn.outvars]

    def _value(self, eqn: Any, operands: list[_Value], shape: tuple[int, ...]) -> _Value:
        """Return the value of an output of a primitive."""
        name, params, new = eqn.primitive.name, eqn.params, frozenset[int]().union(*(x.statistics for x in operands))
        dims = operands[0].stacks if operands else {}
        shapes = [x.aval.shape for x in eqn.invars]
        if name in _REDUCTIONS:
            new |= self._over(eqn, operands[0], params["axes"])
            rest = [dim for dim in range(len(shapes[0])) if dim not in params["axes"]]
            return _Value(_moved(dims, rest), new)
        if name in _CUMULATIVE or name == "sort":
            new |= self._over(eqn, operands[0], [params["dimension" if name == "sort" else "axis"]])
        if name == "dot_general":
            contracted, batch = params["dimension_numbers"]
            for operand, summed in zip(operands, contracted, strict=True):
                new |= self._over(eqn, operand, summed)
            left, right = (
                [dim for dim in range(len(shapes[side])) if dim not in (*contracted[side], *batch[side])]
                for side in range(2)
            )
            orders = [*batch[0], *left], [*batch[1], *[-1] * len(left), *right]
            return _Value(_union(*(_moved(x.stacks, order) for x, order in zip(operands, orders, strict=True))), new)
        if name == "broadcast_in_dim":
            return _Value({params["broadcast_dimensions"][dim]: owners for dim, owners in dims.items()}, new)
        if name == "transpose":
            return _Value(_moved(dims, params["permutation"]), new)
        if name == "squeeze":
            return _Value(_moved(dims, [d for d in range(len(shapes[0])) if d not in params["dimensions"]]), new)
        if name == "reshape":
            return _Value(_reshaped(dims, shapes[0], shape), new)
        owners = [{self.owners[statistic] for statistic in x.statistics} for x in operands]
        is_global = any(x.is_global and not x.stacks for x in operands)
        if name in _SUMS and shape == () and (is_global or set[int]().union(*owners) not in owners):
            return _Value({}, frozenset(), True)
        same = (x.stacks for x, operand_shape in zip(operands, shapes, strict=True) if len(operand_shape) == len(shape))
        return _Value(_union(*same), new, is_global)

    def _over(self, eqn: Any, operand: _Value, axes: Sequence[int]) -> frozenset[int]:
        """Return new statistics for the parameters whose stack dims are reduced."""
        if in_scope(eqn, ROUNDING):  # the scale of a row of int8 levels
            return frozenset()
        owners = sorted(frozenset[int]().union(*(operand.stacks.get(axis, frozenset()) for axis in axes)))
        self.owners += owners
        return frozenset(range(len(self.owners) - len(owners), len(self.owners)))


def _joined(branches: Sequence[list[_Value]]) -> list[_Value]:
    return [
        _Value(
            _union(*(x.stacks for x in values)),
            frozenset[int]().union(*(x.statistics for x in values)),
            any(x.is_global for x in values),
        )
        for values in zip(*branches, strict=True)
    ]


def _union(*stacks: Mapping[int, frozenset[int]]) -> dict[int, frozenset[int]]:
    out: dict[int, frozenset[int]] = {}
    for dims in stacks:
        for dim, owners in dims.items():
            out[dim] = out.get(dim, frozenset()) | owners
    return out


def _moved(stacks: Mapping[int, frozenset[int]], order: Sequence[int]) -> dict[int, frozenset[int]]:
    """Return the stack dims of an array whose dim `i` is dim `order[i]` of the old array."""
    return {new: stacks[old] for new, old in enumerate(order) if old in stacks}


def _reshaped(
    stacks: Mapping[int, frozenset[int]], old: Sequence[int], new: Sequence[int]
) -> dict[int, frozenset[int]]:
    """Return the stack dims after a reshape. If a stack dim is merged or divided, all dims of the result stack."""
    out: dict[int, frozenset[int]] = {}
    starts = [[math.prod(shape[:dim]) for dim in range(len(shape) + 1)] for shape in (old, new)]
    for dim, owners in stacks.items():
        first, last = starts[0][dim], starts[0][dim + 1]
        for other in range(len(new)):
            if new[other] > 1 and starts[1][other] < last and starts[1][other + 1] > first:
                out[other] = out.get(other, frozenset()) | owners
    return out
