"""A lookup whose rows travel is indexing, forward and backward, and moves no table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.inspect.traced_collectives import messages
from meshpar.models import TransformerConfig, layers, next_token_loss
from meshpar.models.embedding_lookup import lookup_of
from tests.equal import mesh_of
from tests.grid import cases

ROWS, WIDTH, BATCH, SEQ = 160, 16, 8, 4
CP, TP, TP_SEQ = mp.context_parallel(), mp.tensor_parallel(), mp.tensor_parallel(sequence=True)
BOTH, TURNED = ("data", "fsdp"), ("fsdp", "data")
CASES = {
    "hsdp, sequence": (mp.MeshSpec(data=2, fsdp=2, tensor=2), mp.hsdp() | TP_SEQ),
    "context": (mp.MeshSpec(data=2, fsdp=2, context=2), mp.hsdp() | CP),
    "fsdp": (mp.MeshSpec(fsdp=8), mp.fsdp()),
    "hsdp": (mp.MeshSpec(data=2, fsdp=4), mp.hsdp()),
    "two axes": (mp.MeshSpec(data=2, fsdp=4), mp.zero3(axis=BOTH)),
    "two axes, turned": (mp.MeshSpec(data=2, fsdp=4), mp.zero3(axis=TURNED)),
    "tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | TP),
    "expert": (mp.MeshSpec(fsdp=2, expert=2, tensor=2), mp.fsdp() | mp.expert_parallel() | TP),
    "a whole mesh": (mp.MeshSpec(data=1, fsdp=2, context=2, tensor=2), mp.fsdp() | CP | TP_SEQ),
}
QUICK = ("hsdp, sequence", "context")


def lookup(table, tokens, weights):
    """Rows of the tokens, and the table's gradient; tokens are closed over as a batch is not: they are given."""
    rows, pull = jax.vjp(lambda table: layers.embed(table, tokens), table)
    return rows, pull(weights)[0]


@pytest.mark.parametrize("case", cases(*QUICK, grid=CASES))
def test_rows_that_travel_are_those_of_indexing(case):
    spec, strategy = CASES[case]
    rng = np.random.default_rng(0)
    table, weights = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=(BATCH, SEQ, WIDTH))
    tokens = rng.integers(-ROWS, ROWS, (BATCH, SEQ))
    tokens[0, 0], tokens[-1, -1] = ROWS, -ROWS - 1  # the table has neither
    with jax.enable_x64(True), mp.use_rules(mesh_of(spec), strategy):
        assert lookup_of(jnp.asarray(table), tokens) is not None
        rows, gradient = jax.jit(lookup)(table, tokens, weights)
    expected, known = np.zeros_like(table), (tokens >= -ROWS) & (tokens < ROWS)
    np.add.at(expected, tokens[known], weights[known])
    np.testing.assert_array_equal(np.asarray(rows)[known], table[tokens[known]])
    assert np.isnan(np.asarray(rows)[~known]).all()
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.uint16, np.int8])
def test_tokens_of_any_whole_numbers(dtype):
    with mp.use_rules(mesh_of(mp.MeshSpec(data=2, fsdp=4)), mp.hsdp()):
        table, tokens = normal_table(), np.arange(64, dtype=dtype).reshape(8, 8)
        np.testing.assert_array_equal(jax.jit(layers.embed)(table, tokens), table[tokens])


def normal_table():
    return np.random.default_rng(3).normal(size=(1000, 8)).astype(np.float32)


def test_gradients_of_many_rows_are_summed_in_float32():
    with mp.use_rules(mesh_of(mp.MeshSpec(data=2, fsdp=4)), mp.hsdp()):
        table, tokens = jnp.ones((4096, 8), jnp.bfloat16), jnp.zeros((8, 64), jnp.int32)
        _, gradient = jax.jit(lookup)(table, tokens, jnp.ones((8, 64, 8), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient[0], 512)  # a sum kept in bfloat16 stops at 256


def sent(tokens: int, vocab: int, strategy=None, spec=None):
    """Bytes that a kernel's messages of a lookup and its gradient hold, by kind; none where XLA gathers the table."""
    strategy, spec = strategy or mp.fsdp(), spec or mp.MeshSpec(fsdp=8)
    with mp.use_rules(mesh_of(spec), strategy):
        given = (
            jax.ShapeDtypeStruct((vocab, WIDTH), np.float32),
            jax.ShapeDtypeStruct((8, tokens), np.int32),
            jax.ShapeDtypeStruct((8, tokens, WIDTH), np.float32),
        )
        found = messages(jax.make_jaxpr(lookup)(*given))
    return {one.kind: sum(each.elements * 4 for each in found if each.kind == one.kind) for one in found}


def test_rows_travel_where_they_are_fewer_bytes_than_the_table():
    # Float32: two exchanges of the tokens' rows, against the table once and its gradient once.
    rows = 8 * 99 * WIDTH * 4 // 8
    assert sent(99, 100) == {"all-gather": 2 * 8 * 99 * 4, "all-to-all": 2 * rows}
    assert sent(100, 100) == {}


@pytest.mark.parametrize(
    ("strategy", "spec"),
    [
        (mp.ddp(), mp.MeshSpec(data=8)),
        (mp.zero1(), mp.MeshSpec(fsdp=8)),
        (mp.fsdp(axis="tensor"), mp.MeshSpec(tensor=8)),
    ],
    ids=str,
)
def test_integer_tables_and_other_shardings_exchange_no_rows(strategy, spec):
    assert sent(4, 1000, strategy, spec) == {}


@pytest.mark.matrix
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("expert", "a whole mesh")])
def test_step_with_row_exchange_has_expected_collectives(case):
    spec, strategy = CASES[case]
    cfg = TransformerConfig(
        vocab_size=512, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128
    )
    state = mp.abstract_state(cfg.build(), optax.sgd(0.1), mesh=mesh_of(spec), strategy=strategy)
    batch = {name: jax.ShapeDtypeStruct((8, 16), np.int32) for name in ("inputs", "targets")}
    report = mp.explain(mp.train_step(next_token_loss), state, batch)
    assert report.is_as_expected, report.matching.missing
    assert not report.matching.missing
    gathered = [line for line in report.matching.matched if line.role == "weights before use"]
    assert gathered
    assert not any("embed/embedding" in line.tensors for line in gathered)
