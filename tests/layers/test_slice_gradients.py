"""`summed_first`: values and dtypes of weight gradients, and the number of reductions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshpar as mp
from meshpar.layers.precision import Precision, numerics
from meshpar.layers.precision import dot_general as dot
from meshpar.layers.slice_gradients import SliceRows, Unreduced, summed_first
from meshpar.models import TransformerConfig
from meshpar.models.transformer import MLP
from tests.equal import mesh_of
from tests.grid import cases

ROWS, SEQ, WIDTH = 8, 4, 16
NUMBERS = (((2,), (0,)), ((), ()))


def matmul(x, w):
    return dot(x, w, NUMBERS)


def einsum(x, w):
    return jnp.einsum("bsd,df->bsf", x, w)


def transposed(x, w):
    """Its weight gradient is transposed and reshaped after the matmul."""
    return jnp.einsum("bsd,df->bsf", x, w.reshape(WIDTH, WIDTH).T)


def over_tokens(x, w):
    return matmul(x.reshape(1, -1, WIDTH), w).reshape(x.shape)


def flat(x, w):
    return (x.reshape(-1, WIDTH) @ w).reshape(x.shape)


def recomputed(x, w):
    return jax.checkpoint(matmul)(x, w)


SUMMED = {"matmul": matmul, "einsum": einsum, "transposed": transposed, "flat": flat, "recomputed": recomputed}
NOT_SUMMED = {
    "batch is not the first dim": over_tokens,
    "scaled": lambda x, w: x * w[0],
    "two different matmuls": lambda x, w: matmul(x, w) + x[:, :1] @ w,
    "looped": lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(matmul(x, w)), x),
}
"""Uses without a sum of equal matmuls. Their gradients are unchanged, or in float32."""


def gradient(use, mesh, dtype, *, first):
    """Return a jitted function of two slices and a weight, for the gradient with or without `summed_first`."""
    rows = SliceRows(mesh, ("fsdp",), ROWS)

    @jax.jit
    def run(xs, w):
        with mp.use_rules(mesh, mp.fsdp()), numerics(Precision(compute=dtype), None, 2):
            y, vjp = jax.vjp(lambda w: tuple(jnp.tanh(use(x.astype(dtype), w)) for x in xs), w.astype(dtype))
            back = lambda dy: vjp(dy)[0]  # noqa: E731
            dw = (summed_first(back, True, rows) if first else back)(jax.tree.map(jnp.cos, y))
        spec = jax.P("fsdp")
        return (
            dw.reduced(spec)
            if isinstance(dw, Unreduced)
            else jax.lax.with_sharding_constraint(dw, jax.NamedSharding(mesh, spec))
        )

    return run


def arrays(mesh):
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((2, ROWS, SEQ, WIDTH), dtype=np.float32)
    sharding = jax.NamedSharding(mesh, jax.P("fsdp"))
    return tuple(jax.device_put(x, sharding) for x in xs), jax.device_put(
        rng.standard_normal((WIDTH, WIDTH), dtype=np.float32), jax.NamedSharding(mesh, jax.P())
    )


@pytest.mark.parametrize("name", cases("recomputed", grid={**SUMMED, **NOT_SUMMED}))
def test_gradients_equal_autodiff(name):
    mesh = mesh_of(mp.MeshSpec(fsdp=4))
    args = arrays(mesh)
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 3e-2)):
        actual, expected = (
            gradient({**SUMMED, **NOT_SUMMED}[name], mesh, dtype, first=first)(*args) for first in (True, False)
        )
        np.testing.assert_allclose(
            np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance
        )


def arrays_reduced(text):
    """Count the weight gradients in the all-reduces of a compiled program."""
    shapes = [
        line.partition("= ")[2].partition(" all-reduce")[0] for line in text.splitlines() if " all-reduce" in line
    ]
    return sum(types.count(f"[{WIDTH},{WIDTH}]") + types.count(f"[1,{WIDTH},{WIDTH}]") for types in shapes)


@pytest.mark.parametrize("name", cases("matmul", grid=SUMMED))
def test_slices_share_a_reduction(name):
    mesh = mesh_of(mp.MeshSpec(fsdp=4))
    args, num_reduced = arrays(mesh), []
    for first in (True, False):
        run = gradient(SUMMED[name], mesh, "bfloat16", first=first)
        num_reduced.append(arrays_reduced(run.lower(*args).compile().as_text()))
    assert num_reduced == [1, 2]


def test_gradients_are_not_rounded():
    mesh = mesh_of(mp.MeshSpec(fsdp=4))
    args = jax.eval_shape(lambda: arrays(mesh))
    dtypes = [jax.eval_shape(gradient(matmul, mesh, "bfloat16", first=first), *args).dtype for first in (True, False)]
    assert dtypes == [jnp.float32, jnp.bfloat16]


def test_gradients_with_other_uses_keep_their_value():
    """A weight gradient is also used for a result that is not marked."""
    rows = SliceRows(mesh_of(mp.MeshSpec(fsdp=4)), ("fsdp",), ROWS)
    xs, w = arrays(rows.mesh)

    def back(a, b, w):
        dw = jax.jit(lambda a, b: jnp.einsum("bsd,bsf->df", a, a) + jnp.einsum("bsd,bsf->df", b, b))(a, b)
        return dw, dw * 2 + w

    with mp.use_rules(rows.mesh, mp.fsdp()):
        actual, other = jax.jit(summed_first(back, (True, False), rows))(*xs, w)
    expected, expected_other = back(*xs, w)
    assert isinstance(actual, Unreduced)
    assert actual.parts.shape == (4, WIDTH, WIDTH)
    np.testing.assert_allclose(actual.parts.sum(0), expected, rtol=1e-5)
    np.testing.assert_allclose(other, expected_other, rtol=1e-5)


def test_hoisted_recomputation_is_unchanged():
    """Jax 0.10 moves the recomputation before the loop as a `closed_call`."""

    def looped(x, w):
        return jax.lax.scan(lambda x, _: (x @ jnp.sin(w), None), x, None, length=2)[0]

    def back(x, w):
        return jax.vjp(jax.checkpoint(looped), x, w)[0]

    args = [jnp.ones((WIDTH, WIDTH), jnp.bfloat16)] * 2
    assert jax.eval_shape(summed_first(back, True, None), *args).dtype == jnp.bfloat16


def test_all_weights_of_an_mlp_are_summed_first():
    """The last matmul is recomputed in a call for each slice."""
    mesh = mesh_of(mp.MeshSpec(fsdp=4))
    config = TransformerConfig(
        vocab_size=8, num_layers=1, embed_dim=WIDTH, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=WIDTH
    )
    x = jax.ShapeDtypeStruct((ROWS, SEQ, WIDTH), np.float32)
    with nnx.use_eager_sharding(False):
        graph, params = nnx.split(nnx.eval_shape(lambda: MLP(config, rngs=nnx.Rngs(0))))

    def back(params, x):
        with mp.use_rules(mesh, mp.fsdp()), numerics(Precision(compute="bfloat16"), None, 2):
            y, vjp = jax.vjp(lambda params: [nnx.merge(graph, params)(x) for _ in range(2)], params)
            return summed_first(lambda dy: vjp(dy)[0], True, SliceRows(mesh, ("fsdp",), ROWS))(y)

    grads = jax.tree.leaves(jax.eval_shape(back, params, x), is_leaf=lambda leaf: isinstance(leaf, Unreduced))
    assert [isinstance(grad, Unreduced) for grad in grads] == [True] * 3
