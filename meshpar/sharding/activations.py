"""Sharding of module outputs, for models that do not call `constrain`.

Without a constraint, the compiler often copies the sharding of a parameter to an activation. The activation is then
sharded over the batch axes, but along a different dim than the batch, and is gathered and scattered around each matmul.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.sharding.constraints import with_layout
from meshpar.sharding.context import BOUNDARIES, NAMED_MODULES, Ambient, Boundaries, ambient, constrain, spec_of
from meshpar.sharding.errors import near_or, problem
from meshpar.sharding.types import PyTree, spec_axes


@contextlib.contextmanager
def constrain_module_outputs(num_examples: int, **settings: Any) -> Iterator[Boundaries]:
    """Constrain the outputs of the modules that are traced in this context; see `Boundaries` for the settings."""
    boundaries = Boundaries(num_examples, **settings)
    with BOUNDARIES.set(boundaries):
        yield boundaries


@contextlib.contextmanager
def _changed(**changes: Callable[[Any], Any]) -> Iterator[None]:
    """Change fields of the current boundaries temporarily, if there are any."""
    boundaries = BOUNDARIES.value
    if boundaries is None:
        yield
        return
    saved = {field: getattr(boundaries, field) for field in changes}
    vars(boundaries).update({field: change(saved[field]) for field, change in changes.items()})
    try:
        yield
    finally:
        vars(boundaries).update(saved)


def module_prefix(path: str) -> contextlib.AbstractContextManager[None]:
    """Set the path of a Linen submodule that is applied separately from its model."""
    return _changed(prefix=lambda prefix: (*prefix, path))


def batch_divided(count: int) -> contextlib.AbstractContextManager[None]:
    """Divide the expected batch sizes by `count`, for code that receives slices of the batch."""
    return _changed(
        num_examples=lambda size: size // count,
        other_batch_sizes=lambda sizes: frozenset(size // count for size in sizes),
    )


def calling(path: str) -> contextlib.AbstractContextManager[None]:
    """Set the path of the module being called."""
    return _changed(module=lambda _: path)


@contextlib.contextmanager
def in_module(path: str) -> Iterator[None]:
    """Enter an NNX module. With `NAMED_MODULES` or outputs sharded along the batch, open a scope, as Linen does."""
    with calling(path):
        boundaries = BOUNDARIES.value
        is_named = boundaries is not None and (boundaries.shard_batch or NAMED_MODULES.value)
        parent = boundaries.scope if boundaries is not None and is_named else path
        relative = path.removeprefix(f"{parent}/") if parent else path
        if relative == parent or not relative:  # a second method of the same module, or the outermost module
            yield
            return
        with _changed(scope=lambda _: path), jax.named_scope(relative):
            yield


def check_rules_matched(boundaries: Boundaries, context: Ambient) -> None:
    """Raise `ValueError` if an activation or remat rule matched no module."""
    submodules = boundaries.seen - {""}  # recomputing the full model would not save memory
    for kind, requested, rules, seen in (
        ("activation", "shard the outputs of matching modules", context.rules.by_module, boundaries.seen),
        ("remat", "recompute matching modules", context.rules.remat, submodules),
    ):
        for rule in (rule for rule in rules if not any(map(rule.matches, seen))):
            reason = f"the loss function called {len(seen)} modules, and the pattern matches no path"
            fix = near_or(rule.key, seen, "write a pattern that matches the full path of a module")
            raise problem(f"{kind} rule `{rule.key}`", requested, reason, fix, code="not-found")


def remat_of(path: str) -> tuple[Any, contextlib.AbstractContextManager[None]] | None:
    """Return the remat policy of a module, and the context manager in which to call it.

    Returns None if no remat rule matches, or if a call with the same path is already being recomputed.
    """
    boundaries, context = BOUNDARIES.value, ambient()
    if boundaries is None or boundaries.policy is None or context is None or path in boundaries.recomputed | {""}:
        return None
    rule = next((rule for rule in reversed(context.rules.remat) if rule.matches(path)), None)
    if rule is None or rule.value is None:
        return None
    return boundaries.policy(rule.value), _changed(recomputed=lambda paths: paths | {path})


def check_array_outputs(path: str, out: PyTree) -> None:
    """Raise `ValueError` if a module under a remat rule returns a value that `jax.checkpoint` cannot handle."""
    numbers = bool, int, float, complex
    invalid = [x for x in jax.tree.leaves(out) if not hasattr(x, "dtype") and not isinstance(x, numbers)]
    if invalid:
        reason = f"it returns a {type(invalid[0]).__name__}, and jax.checkpoint supports arrays only"
        fix = "apply the rule to modules inside it, or return arrays only"
        raise problem(f"remat rule for `{path}`", "recompute the module", reason, fix, code="wrong-type")


def use_dot_general(module: Any) -> None:
    """Replace `dot_general` in a plain Flax layer by the version of the step, if there is one.

    The step's version returns weight gradients in the dtype in which the step reduces them.
    """
    dot_general = None if (boundaries := BOUNDARIES.value) is None else boundaries.dot_general
    # `getattr` could run the module's own `__getattr__`.
    is_plain = inspect.getattr_static(module, "dot_general", False) in (None, jax.lax.dot_general)
    if dot_general is not None and is_plain and inspect.getattr_static(module, "dot_general_cls", None) is None:
        object.__setattr__(module, "dot_general", dot_general)  # the module is a copy for this call


def constrain_output(path: str, out: PyTree) -> PyTree:
    """Constrain the output of a module by the last activation rule that matches; by default, along the batch dim.

    Outputs of modules with a precision rule are cast back to the compute dtype of the step.
    """
    boundaries, context = BOUNDARIES.value, ambient()
    if boundaries is None or context is None:
        return out
    boundaries.seen.add(path)
    dtype = boundaries.compute
    if dtype is not None and any(rule.matches(path) for rule in context.rules.precision):
        out = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x, out)
    rule = next((rule for rule in reversed(context.rules.by_module) if rule.matches(path)), None)
    if rule is None:
        if not boundaries.shard_batch:
            return out
        return jax.tree.map(lambda x: _with_sharded_batch(path, x, boundaries), out)
    if rule.value is None:
        return out
    names = rule.value.names
    ranks = {x.ndim for x in jax.tree.leaves(out) if isinstance(x, jax.Array)}
    if len(names) not in ranks:
        where = f"activation rule `{rule.key}` for module `{path}`"
        reason = f"the module returns arrays with {' and '.join(map(str, sorted(ranks))) or 'no'} dims"
        fix = "give each dim a name or None, or restrict the pattern"
        raise problem(where, f"name dims {', '.join(map(repr, names))}", reason, fix, code="wrong-shape")
    return jax.tree.map(lambda x: constrain(x, *names) if jnp.ndim(x) == len(names) else x, out)


def _with_sharded_batch(path: str, x: Any, boundaries: Boundaries) -> Any:
    """Shard the first dim of a module's output over the batch axes, if that dim is the batch."""
    is_array = isinstance(x, jax.Array) and x.ndim > 1 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    if not is_array or x.shape[0] not in {boundaries.num_examples} | boundaries.other_batch_sizes:
        return x
    other_dims = (x.ndim - 1) * [PartitionSpec.UNCONSTRAINED if path in boundaries.sharded_modules else None]
    batch_axes = spec_of(x, "batch", *[None] * (x.ndim - 1))[0]
    if not spec_axes(batch_axes):
        return x
    boundaries.num_constrained += 1
    return with_layout(x, PartitionSpec(batch_axes, *other_dims))
