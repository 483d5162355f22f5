"""Iterate over the equations of a jaxpr and of the jaxprs nested in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core
from jax.extend.core import jaxprs_in_params


def equations(jaxpr: core.Jaxpr | core.ClosedJaxpr, runs: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield each equation, and how often enclosing scans run it. Outer equations precede nested ones.

    Args:
      jaxpr: a `Jaxpr` or a `ClosedJaxpr`.
      runs: how often the jaxpr itself runs.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn, runs
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner, runs * length)


def in_scope(eqn: core.JaxprEqn, scope: str) -> bool:
    """Return whether an equation has a named scope in its name stack."""
    return scope in str(eqn.source_info.name_stack)


def has_scope(jaxpr: core.Jaxpr | core.ClosedJaxpr, scope: str) -> bool:
    """Return whether any equation of a jaxpr was traced within a named scope."""
    return any(in_scope(eqn, scope) for eqn, _ in equations(jaxpr))
