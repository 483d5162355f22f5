"""Values of equations in calls, loops, branches and shard_map are those that the program computes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.loop.intermediate_values import evaluate, graph_of


def program(x):
    def body(carry, row):
        carry = carry + jnp.sin(row)
        return carry, lax.cond(row[0] > 0, lambda r: r * 2, lambda r: r * 3, row)

    local = jax.shard_map(lambda x: lax.psum(jnp.cos(x), "data"), in_specs=P("data"), out_specs=P())
    total, rows = lax.scan(body, jnp.zeros(3), x, reverse=True)
    return jax.jit(lambda x: x + 1)(total), rows, local(x)


def test_values_of_all_equations():
    mesh = mp.MeshSpec(data=4).build(jax.devices()[:4])
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    with jax.set_mesh(mesh):
        closed = jax.jit(program).trace(x).jaxpr
        graph = graph_of(closed)
        nodes = {node.path: node for node in graph.nodes if node.is_numerical}
        run = jax.jit(functools.partial(evaluate, closed), static_argnums=1)
        (out, values), (exact, _), (noisy, _) = (run((x,), tuple(nodes), *noise) for noise in ((), (0,), (1,)))
        expected = jax.jit(program)(x)
    for got, again, want in zip(out, exact, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        np.testing.assert_allclose(got, again, rtol=1e-6)
    assert all(values[path].shape == (*(dim.size for dim in nodes[path].dims), *nodes[path].shape) for path in values)
    by_primitive = {node.primitive: np.asarray(values[path]) for path, node in nodes.items()}
    np.testing.assert_allclose(by_primitive["sin"], np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(by_primitive["cos"].reshape(4, 2, 3), np.cos(x).reshape(4, 2, 3), rtol=1e-6)
    assert 1e-8 < np.abs(np.asarray(noisy[0]) - np.asarray(out[0])).max() < 1e-5
    # The result of the loop depends on the equations of its body, across iterations.
    primitives = {graph.nodes[index].primitive for index in graph.ancestors(graph.outputs[0])}
    assert {"sin", "add", "scan", "carry"} <= primitives
    assert not {"cos", "psum", "cond"} & primitives
    assert next(iter(nodes.values())).frames[0].file == __file__
