"""Activations of a model that does not lay them out itself: held where its modules hand them on.

Without names the compiler lays an activation out as it likes, and often as the parameter that it meets: split over the
axes of the batch along another dim, it is gathered and scattered around every matmul.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.sharding.constraints import with_layout
from meshpar.sharding.context import Ambient, ambient, constrain, current, spec_of, within
from meshpar.sharding.types import PyTree, near_or, problem, spec_axes


@dataclasses.dataclass(eq=False)
class Boundaries:
    """What a step does where modules hand arrays on. Compared by identity: every trace is its own."""

    num_rows: int
    """Of the batch that is traced."""
    by_rows: bool
    """Whether an array with that many rows lies as the batch where no rule names its module."""
    splitting: frozenset[str] = frozenset()
    """Modules with a parameter of their own that splits work over other axes than the batch's: of what they give, the
    compiler splits the other dims."""
    other_rows: frozenset[int] = frozenset()
    """Of leaves of the batch with rows of their own."""
    product: Any = None
    """The `lax.dot_general` of plain linear layers of Flax's; None: jax's own."""
    policy: Callable[[str], Any] | None = None
    """From the value of a remat rule to the policy of `jax.checkpoint`; None: nothing is made again."""
    at: tuple[str, ...] = ()
    """Where the part of the model stands that is traced by itself: its modules know their paths from there on only."""
    scope: str = ""
    """Path of the NNX module that is called, as named scopes have it."""
    module: str = ""
    """Path of the module that is called."""
    recomputed: frozenset[str] = frozenset()
    """Paths of the modules that are being called under a remat rule."""
    seen: set[str] = dataclasses.field(default_factory=set)
    """Paths of the modules that have handed something on."""
    num_held: int = 0
    """Activations that were laid out, here or by the model's own `constrain`."""


@contextlib.contextmanager
def held_between_modules(
    num_rows: int,
    *,
    by_rows: bool,
    other_rows: frozenset[int] = frozenset(),
    splitting: frozenset[str] = frozenset(),
    product: Any = None,
    policy: Callable[[str], Any] | None = None,
) -> Iterator[Boundaries]:
    """Put in force, around a model, that what its modules give is held.

    Args:
      num_rows: of the batch.
      other_rows: of leaves of the batch with rows of their own.
      by_rows: whether also what no `Rules(activations=...)` names, along the batch alone.
      splitting: modules of which other dims than the batch are left to the compiler.
      product: in place of `lax.dot_general` in plain linear layers of Flax's.
      policy: from the value of a remat rule to what `jax.checkpoint` takes.
    """
    boundaries = Boundaries(num_rows, by_rows, splitting, other_rows, product, policy)
    with within(boundaries=boundaries):
        yield boundaries


def below(path: str) -> contextlib.AbstractContextManager[None]:
    """Around a part of a Linen model that is applied by itself: the path at which it stands."""
    return _changed("at", lambda at: (*at, path))


@contextlib.contextmanager
def rows_cut(count: int) -> Iterator[None]:
    """Around what is given each `count`-th part of the rows only."""
    with (
        _changed("num_rows", lambda num_rows: num_rows // count),
        _changed("other_rows", lambda others: frozenset(rows // count for rows in others)),
    ):
        yield


@contextlib.contextmanager
def _changed(field: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """A field of the boundaries in force, where there are any."""
    boundaries = current().boundaries
    if boundaries is None:
        yield
        return
    before = getattr(boundaries, field)
    setattr(boundaries, field, change(before))
    try:
        yield
    finally:
        setattr(boundaries, field, before)


def check_seen(boundaries: Boundaries, here: Ambient) -> None:
    """Raises `ValueError` for a rule that named no module of the model."""
    inner = boundaries.seen - {""}  # the model itself is not made again: that would keep no less
    for kind, asked, rules, seen in (
        ("activation", "lay out what the modules it matches give", here.rules.by_module, boundaries.seen),
        ("remat", "make again what is in the modules it matches", here.rules.remat, inner),
    ):
        for rule in (rule for rule in rules if not any(map(rule.fires, seen))):
            exists = f"it matches none of the {len(seen)} modules that the loss function called"
            fix = near_or(rule.key, seen, "write a pattern that matches a module's whole path")
            raise problem(f"{kind} rule `{rule.key}`", asked, exists, fix)


@contextlib.contextmanager
def in_module(path: str) -> Iterator[None]:
    """Around a call of an NNX module; one that lays nothing out has its path in the names of operations, as Linen's."""
    with called(path):
        yield from _scoped(path)


def called(path: str) -> contextlib.AbstractContextManager[None]:
    """Around a call of a module: its path is known to what it calls."""
    return _changed("module", lambda _: path)


def _scoped(path: str) -> Iterator[None]:
    boundaries = current().boundaries
    before = path if boundaries is None or not boundaries.by_rows else boundaries.scope
    below = path.removeprefix(f"{before}/") if before else path
    if below == before or not below:  # another method of the same module, or the outermost one
        yield
        return
    with _changed("scope", lambda _: path), jax.named_scope(below):
        yield


def recomputing(path: str) -> tuple[Any, contextlib.AbstractContextManager[None]] | None:
    """The policy by which the backward pass makes the module at a path again, and what is in force in it.

    None: no rule says so, or it is in force already, for another method or copy of the same module.
    """
    boundaries, here = current().boundaries, ambient()
    if boundaries is None or boundaries.policy is None or here is None or path in boundaries.recomputed | {""}:
        return None
    rule = next((rule for rule in reversed(here.rules.remat) if rule.fires(path)), None)
    if rule is None or rule.value is None:
        return None
    return boundaries.policy(rule.value), _changed("recomputed", lambda paths: paths | {path})


def check_made_again(path: str, out: PyTree) -> None:
    """Raises `ValueError` where a module under a remat rule gives what is no array: `jax.checkpoint` takes none."""
    numbers = bool, int, float, complex
    others = [x for x in jax.tree.leaves(out) if not hasattr(x, "dtype") and not isinstance(x, numbers)]
    if others:
        exists = f"it gives a {type(others[0]).__name__}, and not arrays alone"
        fix = "leave it out of the rules and name modules in it, or have it give arrays"
        raise problem(f"remat rule for `{path}`", "make again what the module gives", exists, fix)


def in_reduced_dtype(module: Any) -> None:
    """Of a layer of Flax's that multiplies by `lax.dot_general`: its weight's gradient leaves as the step sums it."""
    product = None if (boundaries := current().boundaries) is None else boundaries.product
    # Static, because a module may have a `__getattr__` of its own.
    is_plain = inspect.getattr_static(module, "dot_general", False) in (None, jax.lax.dot_general)
    if product is not None and is_plain and inspect.getattr_static(module, "dot_general_cls", None) is None:
        object.__setattr__(module, "dot_general", product)  # of this one call's copy


def handed_on(path: str, out: PyTree) -> PyTree:
    """What the module at a path gives, held: by the last rule that matches its path, else as the batch lies."""
    boundaries, here = current().boundaries, ambient()
    if boundaries is None or here is None:
        return out
    boundaries.seen.add(path)
    if any(rule.fires(path) for rule in here.rules.precision):
        out = _narrowed(out)
    rule = next((rule for rule in reversed(here.rules.by_module) if rule.fires(path)), None)
    if rule is None:
        if not boundaries.by_rows:
            return out
        others = PartitionSpec.UNCONSTRAINED if path in boundaries.splitting else None
        return jax.tree.map(lambda x: _with_rows(x, boundaries, others), out)
    names = () if rule.value is None else rule.value.names
    ranks = {x.ndim for x in jax.tree.leaves(out) if isinstance(x, jax.Array)}
    if rule.value is not None and len(names) not in ranks:
        where, asked = f"activation rule `{rule.key}` at module `{path}`", f"name dims {', '.join(map(repr, names))}"
        exists = f"the module gives arrays of {' and '.join(map(str, sorted(ranks))) or 'no'} dims"
        raise problem(where, asked, exists, "give one name or None to each dim, or narrow the pattern")
    return jax.tree.map(lambda x: constrain(x, *names) if rule.value and jnp.ndim(x) == len(names) else x, out)


def _narrowed(out: PyTree) -> PyTree:
    """What a module that computes in a wider dtype gives, as those behind it compute."""
    numerics = current().numerics
    if numerics is None or numerics.precision.compute is None:
        return out
    dtype = numerics.precision.compute
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x, out)


def _with_rows(x: Any, boundaries: Boundaries, others: Any) -> Any:
    """An array whose first dim is the batch, that dim split as the batch, and each other dim as given."""
    rows = {boundaries.num_rows} | boundaries.other_rows
    if not (isinstance(x, jax.Array) and x.ndim > 1 and x.shape[0] in rows):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    spec = spec_of(x, "batch", *[None] * (x.ndim - 1))
    if not spec_axes(spec[0]):
        return x
    boundaries.num_held += 1
    return with_layout(x, PartitionSpec(spec[0], *[others] * (x.ndim - 1)))
