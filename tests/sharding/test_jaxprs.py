"""The walker reaches nested jaxprs and multiplies the lengths of scans."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshpar.sharding.jaxprs import equations, has_scope


def sines(x):
    """Compute a sine in each kind of nested jaxpr."""
    x = jax.jit(jnp.sin)(x)
    x = jax.checkpoint(jnp.sin)(x)
    x = lax.cond(x > 0, jnp.sin, lambda x: jnp.sin(jnp.sin(x)), x)
    x = lax.while_loop(lambda x: jnp.sin(x) > 0, lambda x: jnp.sin(x) - 1, x)

    def step(x, _):
        inner, _ = lax.scan(lambda x, _: (jnp.sin(x), None), x, length=3)
        with jax.named_scope("last"):
            return jnp.sin(inner), None

    return lax.scan(step, x, length=5)[0]


@pytest.mark.parametrize("kind", ["closed", "open"])
def test_nested_jaxprs_are_visited_and_scans_multiplied(kind):
    closed = jax.make_jaxpr(sines)(0.5)
    runs = [n for eqn, n in equations(closed if kind == "closed" else closed.jaxpr) if eqn.primitive.name == "sin"]
    assert runs == [1, 1, 1, 1, 1, 1, 1, 15, 5]
    assert [n for eqn, n in equations(closed, 2) if eqn.primitive.name == "scan"] == [2, 10]


def test_scopes_of_nested_equations_are_found():
    jaxpr = jax.make_jaxpr(sines)(0.5)
    assert has_scope(jaxpr, "last")
    assert not has_scope(jaxpr, "first")
