"""Split backward passes: B and W have the gradients and the matmuls of `jax.vjp`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.layers.precision import Precision, numerics
from meshpar.models import Transformer, TransformerConfig, layers
from meshpar.pipeline import SplitVjp, split_vjp
from meshpar.pipeline.jaxpr_slicing import arrays, run_interleaved
from meshpar.pipeline.jaxpr_slicing import run as run_steps
from tests.grid import cases


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def block(layer, h):
    return h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]


def layers_of(count: int) -> dict[str, jax.Array]:
    return {"up": normal(count, 4, 8), "down": normal(count, 8, 4, seed=1)}


LAYERS, X = layers_of(3), normal(5, 4, seed=2)


def unrolled(params, x):
    for index in range(2):
        x = block(jax.tree.map(lambda leaf, index=index: leaf[index], params), x)
    return x


def scanned(params, x):
    return jax.lax.scan(lambda h, layer: (block(layer, h), None), x, params)[0]


def checkpointed(params, x):
    return jax.lax.scan(lambda h, layer: (jax.checkpoint(block)(layer, h), None), x, params)[0]


def saved_dots(params, x):
    step = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    return jax.lax.scan(lambda h, layer: (step(layer, h), None), x, params)[0]


def jitted(params, x):
    return jax.jit(scanned)(params, jax.jit(jnp.tanh)(x))


def with_outputs(params, x):
    """A pytree of outputs, with an output per layer and an integer."""
    h, sums = jax.lax.scan(lambda h, layer: (block(layer, h), jnp.sum(h**2)), x, params)
    return {"h": h, "sums": sums, "count": jnp.int32(h.shape[0])}


def tied(params, x):
    """All steps of the loop use the same weights, so their gradient is accumulated in the carry."""
    layer = jax.tree.map(lambda leaf: leaf[0], params)
    return jax.lax.scan(lambda h, _: (block(layer, h), None), x, length=3)[0]


def nested(params, x):
    def outer(h, layer):
        return jax.lax.scan(lambda h, scale: (block(layer, h) * scale, None), h, jnp.array([0.5, 0.25]))[0], None

    return jax.lax.scan(outer, x, params, reverse=True)[0]


def two_carried(params, x):
    """A second carry that the input's gradient needs only through later steps."""

    def step(carry, layer):
        h, memory = carry
        return (block(layer, h) + memory, memory * 0.5 + jnp.tanh(h)), None

    return jax.lax.scan(step, (x, jnp.zeros_like(x)), params)[0]


def lower_precision(params, x):
    """Weights are cast inside. The casts do not depend on the microbatch."""
    half = jnp.bfloat16
    step = lambda h, layer: (block(jax.tree.map(lambda leaf: leaf.astype(half), layer), h), None)  # noqa: E731
    return jax.lax.scan(step, x.astype(half), params)[0].astype(jnp.float32)


@jax.custom_vjp
def matmul(x, w):
    return x @ w


matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


def custom(params, x):
    return jax.lax.scan(lambda h, layer: (matmul(jnp.sin(matmul(h, layer["up"])), layer["down"]), None), x, params)[0]


def branching(params, x):
    first = jax.tree.map(lambda leaf: leaf[0], params)
    return jax.lax.cond(x[0, 0] > 0, lambda x: block(first, x), lambda x: x @ first["up"] @ first["down"], x)


def looping(params, x):
    first = jax.tree.map(lambda leaf: leaf[0], params)
    return jax.lax.fori_loop(0, 2, lambda _, h: block(first, h), x)


def closed_over(params, x):
    mask = jnp.tril(jnp.ones((5, 5)))
    return unrolled(params, mask @ x * normal(5, 1, seed=3))


def partly_unused(params, x):
    return x @ params["up"][1]


def loop_without_steps(params, x):
    h, rows = jax.lax.scan(lambda h, row: (h * row, h), x, jnp.zeros((0, x.shape[-1])))
    return unrolled(params, h + rows.sum(0))


def loop_of_known_length(params, x):
    """Unrolled, in reverse, with an output per layer. The casts of weights do not depend on the microbatch."""

    def step(h, layer):
        layer = jax.tree.map(lambda leaf: leaf.astype(jnp.float16).astype(leaf.dtype), layer)
        return block(layer, h), jnp.sin(h)

    h, rows = jax.lax.scan(step, x, params, reverse=True, unroll=True)
    return h + rows.sum(0) * rows[0]


def shared_rows(params, x):
    """An unrolled loop whose layers save values that depend only on parameters."""
    half = jnp.bfloat16

    def step(h, layer):
        return h + block(jax.tree.map(lambda leaf: leaf.astype(half), layer), h.astype(half)), None

    return jax.lax.scan(step, x, params, unroll=True)[0]


FUNCTIONS = [
    unrolled, scanned, checkpointed, saved_dots, jitted, with_outputs, tied, nested, two_carried, lower_precision,
    custom, branching, looping, closed_over, partly_unused, loop_without_steps, loop_of_known_length,
    shared_rows,
]  # fmt: skip


def cotangent(y):
    return jax.tree.map(lambda leaf: jnp.cos(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, y)


def compiled(fn, *args):
    """Run a function under jit, which is faster than op by op."""
    return jax.jit(fn)(*args)


def run(split: SplitVjp, params, x):
    """Return y, both gradients, and the shared, saved and deferred values."""
    y, saved = split.forward(params, x)
    shared = split.shared(params)
    dx, deferred = split.backward(shared, saved, cotangent(y))
    return y, split.weights(shared, saved, deferred), dx, (shared, saved, deferred)


def plain(fn, params, x):
    """Return y and both gradients, from `jax.vjp`."""
    y, vjp = jax.vjp(fn, params, x)
    return y, *vjp(with_float0(cotangent(y)))


def with_float0(dy):
    """Replace integer cotangents by float0, as `jax.vjp` requires."""
    return jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else np.zeros(leaf.shape, jax.dtypes.float0), dy
    )


def matmuls(fn, *args) -> int:
    """Return the number of matmuls that a call runs, including all steps of loops."""
    return _matmuls(jax.make_jaxpr(fn)(*args).jaxpr)


def _matmuls(jaxpr) -> int:
    count = 0
    for eqn in jaxpr.eqns:
        steps = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inside = sum(_matmuls(getattr(inner, "jaxpr", inner)) for inner in jaxprs_in_params(eqn.params))
        count += (eqn.primitive.name == "dot_general") + steps * inside
    return count


def assert_same(got, want, **tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), **tolerance)


QUICK = scanned, saved_dots, with_outputs, tied, nested, two_carried, lower_precision, branching
some = pytest.mark.parametrize("fn", cases(*QUICK, grid=FUNCTIONS), ids=lambda fn: fn.__name__)


@some
def test_split_vjp_has_the_gradients_of_jax_vjp(fn):
    """B and W, and both at once, which runs a single loop over the layers."""
    split = split_vjp(fn, LAYERS, X)

    def both(params, x):
        y, dparams, dx, (shared, saved, _) = run(split, params, x)
        return (y, dparams, dx), (y, *reversed(at_once(split, shared, saved, cotangent(y))))

    expected = compiled(functools.partial(plain, fn), LAYERS, X)
    # XLA fuses the same ops differently, so results differ by rounding of float32 or bfloat16.
    is_rounded = fn in (lower_precision, shared_rows, loop_of_known_length)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if is_rounded else {"rtol": 1e-5, "atol": 1e-5}
    for found in compiled(both, LAYERS, X):
        assert_same(found, expected, **tolerance)


def at_once(split, shared, saved, dy):
    """Run B and W together, and return the gradients of x and of the parameters."""
    return arrays(run_steps(split.at_once_steps(shared, saved, dy)))


def scans(fn, *args) -> int:
    """Return the number of top-level loops of a call."""
    return sum(eqn.primitive.name == "scan" for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns)


@pytest.mark.parametrize(("layers", "loops"), [(3, 1), (2, 2)])
def test_together_merges_loops_of_equal_length(layers, loops):
    """A forward pass runs together with a backward pass, whose loop runs in reverse."""
    up, x = layers_of(layers), normal(5, 4, seed=3)
    first, second = split_vjp(scanned, layers_of(3), X), split_vjp(scanned, up, x)
    saved, shared = first.forward(layers_of(3), X)[1], first.shared(layers_of(3))
    dy = cotangent(scanned(layers_of(3), X))

    def merged(shared, saved, dy, up, x):
        return run_interleaved(first.at_once_steps(shared, saved, dy), second.forward_steps(up, x))

    def separate(shared, saved, dy, up, x):
        return [at_once(first, shared, saved, dy), second.forward(up, x)]

    args = (shared, saved, dy, up, x)
    assert scans(merged, *args) == loops
    assert scans(separate, *args) == 2
    assert_same(compiled(merged, *args), compiled(separate, *args), rtol=1e-6, atol=1e-6)


@some
def test_split_vjp_runs_no_matmul_twice(fn):
    split = split_vjp(fn, LAYERS, X)
    y, saved = jax.eval_shape(split.forward, LAYERS, X)
    shared, deferred = jax.eval_shape(split.shared, LAYERS), split.deferred_weight_grads
    _, vjp = jax.eval_shape(functools.partial(jax.vjp, fn), LAYERS, X)
    b = matmuls(split.backward, shared, saved, y)
    w = matmuls(split.weights, shared, saved, deferred)
    assert (
        b + w
        == matmuls(functools.partial(at_once, split), shared, saved, y)
        == matmuls(lambda vjp, dy: vjp(with_float0(dy)), vjp, y)
    )
    assert scans(functools.partial(at_once, split), shared, saved, y) <= scans(split.backward, shared, saved, y)
    assert b > 0
    assert (w > 0) == (fn is not branching)  # lax.cond is not split.
    assert fn is not scanned or (b, w) == (6, 6)
    assert matmuls(split.forward, LAYERS, X) == matmuls(fn, LAYERS, X)
    assert matmuls(split.shared, LAYERS) == 0


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_saved_and_deferred_shapes_are_as_declared(fn):
    split = split_vjp(fn, LAYERS, X)
    saved, deferred = jax.eval_shape(lambda *args: run(split, *args)[3][1:], LAYERS, X)
    for declared, values in ((split.saved_activations, saved), (split.deferred_weight_grads, deferred)):
        assert [(leaf.shape, leaf.dtype) for leaf in declared] == [(leaf.shape, leaf.dtype) for leaf in values]


@pytest.mark.parametrize(
    "fn",
    cases(lower_precision, closed_over, grid=[unrolled, scanned, jitted, lower_precision, custom, tied, closed_over]),
)
def test_parameters_and_constants_are_not_saved(fn):
    """Saved and deferred values do not have the shape of a weight, and change with x."""
    split = split_vjp(fn, LAYERS, X)
    values_of = jax.jit(lambda x: run(split, LAYERS, x)[3])
    one, other = values_of(X), values_of(normal(5, 4, seed=7))
    for first, second in zip([*one[1], *one[2]], [*other[1], *other[2]], strict=True):
        assert first.shape[-2:] not in ((4, 8), (8, 4))
        assert not np.array_equal(first, second)
    for first, second in zip(one[0], other[0], strict=True):
        assert np.array_equal(first, second)


def test_each_array_is_saved_once():
    def fn(params, x):
        return x * params["up"][0, 0, 0] + x * params["down"][0, 0, 0] + jnp.sin(x) * x

    split = split_vjp(fn, LAYERS, X)
    saved = split.forward(LAYERS, X)[1]
    assert len({np.asarray(leaf).tobytes() for leaf in saved}) == len(saved)


def test_shared_returns_parameters_without_copies():
    """Parameters that are residuals are returned as they are."""
    split = split_vjp(scanned, LAYERS, X)
    shared = split.shared(LAYERS)
    assert {id(leaf) for leaf in shared} == {id(leaf) for leaf in LAYERS.values()}


def test_integers_have_no_gradient():
    """The input of the first stage is tokens, so its backward pass is W only."""
    table, tokens = normal(10, 4), jnp.array([1, 3, 3])
    fn = lambda table, tokens: jnp.tanh(layers.embed(table, tokens[None]))[0]  # noqa: E731
    with mp.use_rules(mp.MeshSpec().build(jax.devices()[:1]), mp.ddp()):
        split = split_vjp(fn, table, tokens)
        y, dtable, dtokens, _ = run(split, table, tokens)
        assert_same((y, dtable, dtokens), plain(fn, table, tokens), rtol=1e-6)
    assert dtokens.dtype == jax.dtypes.float0
    deferred_of = lambda *args: split.backward(*args)[1]  # noqa: E731
    assert not jax.make_jaxpr(deferred_of)(split.shared(table), split.saved_activations, y).eqns


def test_debug_callbacks_run_in_f_only():
    """The callback runs once per layer, and not again in B or W."""
    seen = []

    def fn(params, x):
        def step(h, layer):
            jax.debug.callback(lambda h: seen.append(np.asarray(h)), h)
            return block(layer, h), None

        return jax.lax.scan(step, x, params)[0]

    split = split_vjp(fn, LAYERS, X)
    seen.clear()
    y, saved = compiled(split.forward, LAYERS, X)
    jax.effects_barrier()
    assert len(seen) == 3
    np.testing.assert_array_equal(seen[0], X)
    shared = split.shared(LAYERS)
    dx, deferred = compiled(split.backward, shared, saved, y)
    jax.block_until_ready((dx, compiled(split.weights, shared, saved, deferred)))
    jax.effects_barrier()
    assert len(seen) == 3


@pytest.mark.parametrize("check", cases(False, grid=[True, False]))
def test_split_vjp_inside_shard_map(check):
    """As in the executor, `shard_map` is manual over `stage` only."""
    mesh = mp.MeshSpec(stage=2, tensor=2).build(jax.devices()[:4])

    def local(params, x):
        params, x = jax.tree.map(lambda leaf: leaf[0], (params, x))
        split = split_vjp(scanned, params, x)
        _, dparams, dx, _ = run(split, params, x)
        return jax.tree.map(lambda leaf: leaf[None], (dparams, dx))

    spec = P("stage")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"stage"}, check_vma=check)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: np.float64([leaf, 2 * np.asarray(leaf)]), LAYERS)
        x = np.float64([X, -np.asarray(X)])
        got = compiled(mapped, params, x)
        _, *want = compiled(jax.vmap(functools.partial(plain, scanned)), params, x)
        assert_same(got, tuple(want), rtol=1e-12, atol=1e-12)


# ---- Layers of the transformer of meshpar.models ---------------------------------------------------------------------

CONFIG = TransformerConfig(
    vocab_size=24, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=20
)  # fmt: skip


def transformer_layers(remat: str | None):
    """Return the scanned layers of the NNX transformer as a stage function, their parameters, and an input."""
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model.layers)
    params = nnx.to_pure_dict(state)
    angles = layers.rope(jnp.arange(7)[None], layers.rope_frequencies(6, 10_000.0), jnp.float32)

    def stage(params, h):
        def layer(h, params):
            nnx.replace_by_pure_dict(layer_state := nnx.clone(state), params)
            return nnx.merge(graph, layer_state)(h, angles, None, None)[0], None

        step = jax.checkpoint(layer) if remat else layer
        return jax.lax.scan(step, h, params)[0]

    return stage, params, normal(2, 7, 16)


@pytest.mark.matrix
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", [None, "full"])
def test_split_vjp_of_transformer_layers(remat, compute):
    with mp.use_rules(mp.MeshSpec().build(jax.devices()[:1]), mp.ddp()), numerics(Precision(compute=compute), None):
        stage, params, h = transformer_layers(remat)
        split = split_vjp(stage, params, h)
        y, dparams, dx, (shared, saved, deferred) = compiled(functools.partial(run, split), params, h)
        assert_same((y, dparams, dx), compiled(functools.partial(plain, stage), params, h), rtol=2e-5, atol=2e-5)
        _, vjp = jax.vjp(stage, params, h)
        b, w = matmuls(split.backward, shared, saved, y), matmuls(split.weights, shared, saved, deferred)
        assert b + w == matmuls(vjp, y)
        # A layer has seven weight matrices, with a gradient each in W. The two products of attention have both
        # gradients in B, which also recomputes the scores. With remat, B repeats the forward pass except for the last
        # matrix, whose output is not needed.
        assert w == 7 * 2
        assert b == (7 + 5 + (8 if remat else 0)) * 2


def test_complex_leaves_have_gradients():
    key = jax.random.key(0)
    params = {"w": jax.random.normal(key, (4, 3), "complex64"), "b": normal(3)}
    x = {"z": jax.random.normal(jax.random.fold_in(key, 1), (2, 4), "complex64"), "shift": normal(2, 3)}

    def fn(params, x):
        return jnp.tanh(x["z"] @ params["w"] + params["b"]) * x["shift"]

    split = split_vjp(fn, params, x)
    # A complex cotangent has an imaginary part, too.
    dy = jax.random.normal(jax.random.fold_in(key, 2), (2, 3), "complex64")
    shared, (y, saved) = split.shared(params), split.forward(params, x)
    dx, deferred = split.backward(shared, saved, dy)
    expected, pull = jax.vjp(fn, params, x)
    for got, want in (((y, (split.weights(shared, saved, deferred), dx)), (expected, pull(dy))),
                          (at_once(split, shared, saved, dy), pull(dy)[::-1])):  # fmt: skip
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
