"""Kernels under vmap, scan and second derivatives, and without `check_vma`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshpar import collectives as mc
from meshpar.collectives import reference
from meshpar.collectives.reduction import ALGORITHMS

N = 5
KERNELS = {
    "all_gather": (functools.partial(mc.all_gather, axis="x"), reference.all_gather),
    "all_to_all": (functools.partial(mc.all_to_all, axis="x"), reference.all_to_all),
    "reduce_scatter": (functools.partial(mc.reduce_scatter, axis="x"), reference.reduce_scatter),
    **{
        f"all_reduce {name}": (functools.partial(mc.all_reduce, axis="x", algorithm=name), reference.all_reduce)
        for name in ALGORITHMS
    },
    "all_reduce max": (
        functools.partial(mc.all_reduce, axis="x", op="max"),
        functools.partial(reference.all_reduce, op="max"),
    ),
    "reduce": (functools.partial(mc.reduce, axis="x"), reference.reduce),
    "broadcast": (functools.partial(mc.broadcast, axis="x"), reference.broadcast),
}


def rows(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal((N, *shape)), "float32")


def close(actual, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected)


@pytest.fixture(scope="module")
def every_kernel(ranks):
    """Return a function from a transform to the results of all kernels and references."""

    def run(transform, *shape, only=tuple(KERNELS), **options):
        x, kernels = rows(*shape), {name: KERNELS[name] for name in only}
        actual = jax.jit(
            lambda: {name: transform(ranks(N).view(k, **options), x) for name, (k, _) in kernels.items()}
        )()
        expected = jax.jit(lambda: {name: transform(r, x) for name, (_, r) in kernels.items()})()
        return actual, expected

    return run


def test_under_vmap(every_kernel):
    close(*every_kernel(lambda f, x: jax.vmap(f, in_axes=-1, out_axes=-1)(x), N, 3))


def test_inside_scan(every_kernel):
    def scanned(f, x):
        def body(total, scale):
            y = f(x * scale)
            return total + y.sum(), y

        return lax.scan(body, jnp.float32(0), jnp.arange(3.0))

    close(*every_kernel(scanned, N))


def test_gradient_of_a_scan_with_a_reduced_carry(ranks):
    def looped(reduce):
        def run(x):
            return lax.scan(lambda h, _: (jnp.sin(reduce(h)), None), x, length=3)[0]

        return run

    kernel = looped(functools.partial(mc.all_reduce, axis="x", op="mean"))
    plain = looped(functools.partial(reference.all_reduce, op="mean"))
    weights = jnp.arange(N * 3.0).reshape(N, 3)
    actual = jax.jit(jax.grad(lambda x: (weights * ranks(N).view(kernel)(x)).sum()))(rows(3))
    close(actual, jax.grad(lambda x: (weights * plain(x)).sum())(rows(3)))


@pytest.mark.matrix
def test_reverse_over_reverse_and_forward_over_reverse(every_kernel):
    def curved(f, x):
        def loss(x):
            return (f(jnp.sin(x)) ** 3 * jnp.arange(N).reshape(N, 1)).sum()

        slope = jax.grad(loss)
        along = jnp.cos(x)
        return jax.grad(lambda x: (slope(x) * along).sum())(x), jax.jvp(slope, (x,), (along,))[1]

    rings = ["all_gather", "all_reduce ring", "all_reduce max"]
    close(*every_kernel(curved, N, only=rings))


def test_gradients_without_check_vma(every_kernel):
    def gradient(f, x):
        return jax.grad(lambda x: (f(x) * jnp.arange(N).reshape(N, 1)).sum())(x)

    close(*every_kernel(gradient, N, check_vma=False))


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_a_replicated_array(ranks, check_vma):
    def total(x):
        rank = lax.axis_index("x")
        return mc.all_reduce(x * (rank + 1), axis="x")[None] + mc.all_reduce(x, axis="x", op="mean")[None]

    shared = jax.shard_map(total, mesh=ranks(N).mesh, in_specs=P(), out_specs=P("x"), check_vma=check_vma)
    weights = jnp.arange(N * 3.0).reshape(N, 3)
    actual = jax.jit(jax.grad(lambda x: (shared(x) * weights).sum()))(jnp.ones(3))
    close(actual, (15 + 1) * weights.sum(0))


def test_gradient_inside_shard_map(ranks):
    def inside(x):
        return jax.grad(lambda x: (mc.all_reduce(x, axis="x") * (lax.axis_index("x") + 1)).sum())(x)

    actual = jax.jit(ranks(N).view(inside))(rows(2))
    close(actual, jnp.full((N, 2), 15.0))  # the loss of each rank depends on the x of all ranks: 1 + 2 + 3 + 4 + 5
