"""Gradients of weights that slices of the rows use: values, the dtype they are summed in, how often they are sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshpar as mp
from meshpar.layers.precision import Precision, numerics
from meshpar.layers.precision import dot_general as dot
from meshpar.layers.slice_gradients import Own, SliceRows, summed_first
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


def turned(x, w):
    """Its gradient is transposed behind the matmul, and reshaped."""
    return jnp.einsum("bsd,df->bsf", x, w.reshape(WIDTH, WIDTH).T)


def of_tokens(x, w):
    return matmul(x.reshape(1, -1, WIDTH), w).reshape(x.shape)


def flat(x, w):
    return (x.reshape(-1, WIDTH) @ w).reshape(x.shape)


def remade(x, w):
    return jax.checkpoint(matmul)(x, w)


JOINED = {"matmul": matmul, "einsum": einsum, "turned": turned, "flat": flat, "each recomputed by itself": remade}
APART = {
    "tokens are no first dim": of_tokens,
    "scaled": lambda x, w: x * w[0],
    "another matmul, too": lambda x, w: matmul(x, w) + x[:, :1] @ w,
    "looped": lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(matmul(x, w)), x),
}
"""What has no sum of matmuls alike: it comes as it did, or in float32."""


def gradient(use, mesh, dtype, *, first):
    """A jitted function of two slices and a weight: its gradient, by `summed_first` or by autodiff alone."""
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
            if isinstance(dw, Own)
            else jax.lax.with_sharding_constraint(dw, jax.NamedSharding(mesh, spec))
        )

    return run


def arrays(mesh):
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((2, ROWS, SEQ, WIDTH), dtype=np.float32)
    lying = jax.NamedSharding(mesh, jax.P("fsdp"))
    return tuple(jax.device_put(x, lying) for x in xs), jax.device_put(
        rng.standard_normal((WIDTH, WIDTH), dtype=np.float32), jax.NamedSharding(mesh, jax.P())
    )


@pytest.mark.parametrize("name", cases("each recomputed by itself", grid={**JOINED, **APART}))
def test_gradients_are_those_of_autodiff(name):
    mesh = mesh_of(mp.MeshSpec(fsdp=4))
    given = arrays(mesh)
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 3e-2)):
        found, expected = (
            gradient({**JOINED, **APART}[name], mesh, dtype, first=first)(*given) for first in (True, False)
        )
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance
        )


def arrays_reduced(text):
    """Of a compiled program; the compiler may send several as one message."""
    made = [line.partition("= ")[2].partition(" all-reduce")[0] for line in text.splitlines() if " all-reduce" in line]
    return sum(types.count(f"[{WIDTH},{WIDTH}]") + types.count(f"[1,{WIDTH},{WIDTH}]") for types in made)


@pytest.mark.parametrize("name", cases("matmul", grid=JOINED))
def test_one_reduction_of_both_slices(name):
    """Where autodiff sends two."""
    mesh = mesh_of(mp.MeshSpec(fsdp=4))
    given, sent = arrays(mesh), []
    for first in (True, False):
        run = gradient(JOINED[name], mesh, "bfloat16", first=first)
        sent.append(arrays_reduced(run.lower(*given).compile().as_text()))
    assert sent == [1, 2]


def test_sums_keep_the_dtype_they_are_made_in():
    mesh = mesh_of(mp.MeshSpec(fsdp=4))
    given = jax.eval_shape(lambda: arrays(mesh))
    found = [jax.eval_shape(gradient(matmul, mesh, "bfloat16", first=first), *given).dtype for first in (True, False)]
    assert found == [jnp.float32, jnp.bfloat16]


def test_a_result_that_others_read_keeps_its_value():
    """A weight's gradient that is another result's, too, in the call that makes it."""
    rows = SliceRows(mesh_of(mp.MeshSpec(fsdp=4)), ("fsdp",), ROWS)
    xs, w = arrays(rows.mesh)

    def back(a, b, w):
        made = jax.jit(lambda a, b: jnp.einsum("bsd,bsf->df", a, a) + jnp.einsum("bsd,bsf->df", b, b))(a, b)
        return made, made * 2 + w

    with mp.use_rules(rows.mesh, mp.fsdp()):
        found, twice = jax.jit(summed_first(back, (True, False), rows))(*xs, w)
    expected, wanted = back(*xs, w)
    assert isinstance(found, Own)
    assert found.parts.shape == (4, WIDTH, WIDTH)
    np.testing.assert_allclose(found.parts.sum(0), expected, rtol=1e-5)
    np.testing.assert_allclose(twice, wanted, rtol=1e-5)


def test_what_recomputation_moved_before_a_loop_stays_as_it_is():
    """Jax 0.10 makes a call of another kind of it, `closed_call`."""

    def looped(x, w):
        return jax.lax.scan(lambda x, _: (x @ jnp.sin(w), None), x, None, length=2)[0]

    def back(x, w):
        return jax.vjp(jax.checkpoint(looped), x, w)[0]

    given = [jnp.ones((WIDTH, WIDTH), jnp.bfloat16)] * 2
    assert jax.eval_shape(summed_first(back, True, None), *given).dtype == jnp.bfloat16


def test_every_matrix_of_an_mlp_is_summed_first():
    """The last one's matmul is recomputed, in a call of each slice."""
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

    found = jax.tree.leaves(jax.eval_shape(back, params, x), is_leaf=lambda one: isinstance(one, Own))
    assert [isinstance(one, Own) for one in found] == [True] * 3
