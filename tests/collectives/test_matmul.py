"""Overlapped matmuls against their references, their communication, and models that use them."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar import collectives as mc
from meshpar.hardware import cost_model as cost
from meshpar.inspect.census import census
from meshpar.inspect.hlo import parser as hlo
from meshpar.layers.precision import Precision, numerics
from meshpar.layers.remat import REMAT_POLICIES
from meshpar.models import TransformerConfig, next_token_loss
from tests.equal import assert_same, mean_loss, token_batches, train
from tests.errors import raises
from tests.grid import cases

matrix = pytest.mark.matrix
COUNTS = cases(3, grid=[1, 2, 3, 5, 8])

gather = functools.partial(mc.all_gather_matmul, axis="x")
scatter = functools.partial(mc.matmul_reduce_scatter, axis="x")


def on(ranks, kernel, **options):
    return ranks.view(lambda operands: kernel(*operands), **options)


def test_bfloat16_is_summed_in_float32(ranks):
    # In bfloat16 256 + 1 is 256, so a sum in bfloat16 would stop there.
    rows, weight = jnp.ones((2, 2, 512), "bfloat16"), jnp.ones((2, 512, 1), "bfloat16")
    np.testing.assert_array_equal(jax.jit(on(ranks(2), gather))((rows, weight)), np.full((2, 4, 1), 512))
    np.testing.assert_array_equal(jax.jit(on(ranks(2), scatter))((rows, weight)), np.full((2, 1, 1), 1024))


# ---- Communication ---------------------------------------------------------------------------------------------------


def sent_by(row, kernel, *shapes):
    """Return the kinds of collectives, and {distance: (steps, bytes sent per rank)}."""
    operands = [jax.ShapeDtypeStruct((row.count, *shape), "float32") for shape in shapes]
    compiled = jax.jit(on(row, kernel)).lower(operands).compile()
    collectives = census(hlo.parse(compiled.as_text()), row.mesh)
    by_distance = {}
    for c in collectives:
        distance = (c.groups[0][1] - c.groups[0][0]) % row.count
        steps, sent = by_distance.get(distance, (0, 0))
        by_distance[distance] = max(steps, c.count_per_step), sent + c.payload_bytes * c.count_per_step
    return {c.kind for c in collectives}, by_distance


def pulled(kernel):
    """Return the backward pass, which uses only the operands of the forward pass."""

    def run(*operands):
        y, pull = jax.vjp(kernel, *operands)
        weights = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)  # XLA would send equal rows once
        return pull(weights * operands[0].ravel()[0])

    return run


@pytest.mark.parametrize("count", cases(3, grid=[2, 3, 5, 8]))
def test_messages_and_bytes_match_closed_forms(ranks, count):
    row, rows_bytes = ranks(count), 4 * 4 * count * 6
    gathering, scattering = ((4, 6), (6, 5)), ((4 * count, 5), (5, 6))
    for kernel, shapes, expected in (
        (gather, gathering, cost.all_gather_matmul(rows_bytes, count)),
        (lambda x, w: gather(x, (w, w)), gathering, cost.all_gather_matmul(rows_bytes, count)),
        (pulled(gather), gathering, cost.all_gather_matmul(rows_bytes, count, backward=True)),
        (scatter, scattering, cost.matmul_reduce_scatter(rows_bytes, count)),
        (pulled(scatter), scattering, cost.matmul_reduce_scatter(rows_bytes, count)),
    ):
        kinds, by_distance = sent_by(row, kernel, *shapes)
        steps, sent = expected.steps, expected.bytes_sent
        assert kinds == {"collective-permute"}
        # Half of the rows is sent in each direction. With two ranks both directions are the same.
        assert by_distance == (
            {1: (steps, sent)} if count == 2 else {1: (steps, sent / 2), count - 1: (steps, sent / 2)}
        )


# ---- Errors ----------------------------------------------------------------------------------------------------------

ERRORS = {
    "outside": (None, lambda: gather(jnp.ones((2, 3)), jnp.ones((3, 4))), "unknown-axis"),
    "axis": ((2, 3), lambda x: mc.all_gather_matmul(x, jnp.ones((3, 4)), axis="y"), "unknown-axis"),
    "no weights": ((2, 3), lambda x: gather(x, ()), "wrong-shape"),
    "inner": ((2, 3), lambda x: gather(x, jnp.ones((4, 4))), "wrong-shape"),
    "dtype": ((2, 3), lambda x: gather(x, jnp.ones((3, 4), "bfloat16")), "wrong-dtype"),
    "last dim": ((2, 3), lambda x: gather(x, jnp.ones((3, 4)), dim=1), "out-of-range"),
    "no such dim": ((2, 3), lambda x: gather(x, jnp.ones((3, 4)), dim=-3), "out-of-range"),
    "rows": ((4, 3), lambda h: scatter(h, jnp.ones((3, 4))), "indivisible"),
    "empty": ((2, 0), lambda x: gather(x, jnp.ones((0, 4))), "wrong-shape"),
    "vector": ((4, 3), lambda h: scatter(h, jnp.ones(4)), "wrong-shape"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_kernels_check_their_operands(ranks, case):
    shape, run, code = ERRORS[case]
    with raises(code, "matmul"):
        run() if shape is None else jax.eval_shape(ranks(3).view(run), jnp.ones((3, *shape)))


# ---- Models ----------------------------------------------------------------------------------------------------------

ROWS, SEQ = 8, 8
BOTH = mp.fsdp() | mp.tensor_parallel(sequence=True)
SPLIT = mp.MeshSpec(fsdp=2, tensor=4)
TRAINED = {
    "fsdp|tensor": (SPLIT, {}),
    "remat": (SPLIT, {"remat": "dots", "accumulate": 2}),
    "once": (mp.MeshSpec(fsdp=4, tensor=2), {"accumulate": 2, "reduce_gradients": "once"}),
}


def config(**fields):
    sizes = {"num_layers": 2, "embed_dim": 8, "num_heads": 4, "num_kv_heads": 4, "head_dim": 2, "mlp_dim": 16}
    return TransformerConfig(vocab_size=16, **{**sizes, "tensor_matmul": "overlapped", **fields})


@functools.cache
def trained(spec, strategy, start=None, *, tensor_matmul="overlapped", **options):
    model = config(tensor_matmul=tensor_matmul, param_dtype="float64").build()
    return train(model, token_batches(ROWS, SEQ, 3, vocab=16), spec, strategy, start=start, **options)


@matrix
@pytest.mark.parametrize("case", TRAINED)
def test_models_train_as_on_a_device(case):
    spec, options = TRAINED[case]
    with jax.enable_x64(True):
        expected = trained(mp.MeshSpec(), mp.ddp(), tensor_matmul="xla")
        actual = trained.__wrapped__(spec, BOTH, expected.start, **options)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-9)
    assert_same(actual.params, expected.params, atol=1e-9)


@matrix
@pytest.mark.call_stacks
def test_fsdp_gathers_each_weight_once_per_pass():
    """Each gradient is reduced once, as with plain matmuls."""
    mesh, rows = SPLIT.build(), jax.ShapeDtypeStruct((ROWS, SEQ), np.int32)
    state = mp.abstract_state(config().build(), optax.adam(1e-3), mesh=mesh, strategy=BOTH)
    compiled = mp.train_step(next_token_loss).lower(state, {"inputs": rows, "targets": rows}).compile()
    collectives = [c for c in census(hlo.parse(compiled.as_text()), mesh) if c.in_loop and c.axes == ("fsdp",)]
    assert {c.kind for c in collectives} <= {"all-gather", "all-reduce"}  # XLA:CPU has no reduce-scatter
    gathered = [
        sum(len(c.arrays) for c in collectives if c.kind == "all-gather" and c.is_backward == b) for b in (False, True)
    ]
    assert gathered == [9, 9]  # seven matrices and two norms
    assert sum(len(c.arrays) for c in collectives if c.kind == "all-reduce") == 9


@matrix
def test_remat_policies_save_the_products():
    """The backward pass repeats no permutes if products are saved, else those of all kernels but the last."""
    model, tokens = config(num_layers=1).build(), jnp.zeros((ROWS, SEQ), jnp.int32)
    with mp.use_rules(SPLIT.build(), BOTH):
        params = model.abstract().params

    def repeated(policy):
        with mp.use_rules(SPLIT.build(), BOTH), numerics(Precision(), policy):
            traced = jax.make_jaxpr(
                jax.grad(lambda p: mean_loss(model.bind(p, {}), {"inputs": tokens, "targets": tokens})[0])
            )(params)
        return str(traced).count("ppermute")

    plain = repeated(None)
    assert plain == 8 + 12  # two lanes; the backward pass of a gather has two rings
    again = {policy: repeated(policy) - plain for policy in REMAT_POLICIES}
    assert again == {"full": 6, "dots": 0, "all_dots": 0, "minimal": 0}


@pytest.mark.parametrize(("reduce", "dtype"), cases(("bfloat16", "bf16"), grid=[(None, "f32"), ("bfloat16", "bf16")]))
def test_weight_gradients_have_the_reduction_dtype(reduce, dtype):
    mesh = SPLIT.build()
    state = mp.abstract_state(config().build(), optax.adam(1e-3), mesh=mesh, strategy=BOTH)
    rows = jax.ShapeDtypeStruct((ROWS, SEQ), np.int32)
    step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16", reduce=reduce))
    text = step.lower(state, {"inputs": rows, "targets": rows}).as_text()
    dtypes = re.findall(r"dot_general.*contracting_dims = \[0, 1\] x \[0, 1\].*-> tensor<[0-9x]*x(\w+)>", text)
    assert set(dtypes) == {dtype}


def test_strategies_without_overlap():
    tokens = jnp.zeros((ROWS, SEQ), jnp.int32)

    def run(spec, strategy, **fields):
        model = config(**fields).build()
        with mp.use_rules(spec.build(jax.devices()[: int(np.prod(list(spec.values())))]), strategy):
            return jax.eval_shape(lambda p: model.bind(p, {})(tokens), model.abstract().params)

    for spec, strategy, words in (
        (mp.MeshSpec(fsdp=2, tensor=4), mp.fsdp() | mp.tensor_parallel(), "Use mp.tensor_parallel(sequence=True)"),
        (mp.MeshSpec(fsdp=8), mp.fsdp(), "Use mp.tensor_parallel(sequence=True)"),
        (SPLIT, BOTH | mp.Rules(act_kv_heads=None), "`act_kv_heads` (size 4)"),
        (mp.MeshSpec(context=2, tensor=4), BOTH | mp.context_parallel(), "without context_parallel()"),
    ):
        with pytest.raises(mp.MeshparError, match=re.escape(words)):
            run(spec, strategy)
    # With a single rank there is no communication to overlap.
    assert run(mp.MeshSpec(fsdp=2, tensor=1), BOTH).shape == (ROWS, SEQ, 16)
    assert run(mp.MeshSpec(), mp.ddp()).shape == (ROWS, SEQ, 16)
    with pytest.raises(mp.MeshparError, match="tensor_matmul='fast'"):
        config(tensor_matmul="fast")
