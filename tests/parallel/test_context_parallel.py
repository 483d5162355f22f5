"""Context parallelism: the decoders with a split sequence train as on one device, and send what the ring says."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect.census import census
from meshpar.inspect.timeline.simulator import timeline
from meshpar.models import TransformerConfig, generate, next_token_loss
from meshpar.models import context_attention as context
from meshpar.parallel.context_parallelism import Context
from meshpar.parallel.parallelism import SearchSpace
from meshpar.sharding.context import spec_of
from tests.equal import VOCAB, mesh_of
from tests.errors import raises

ROWS, SEQ, LAYERS = 4, 16, 2
pytestmark = pytest.mark.call_stacks
BOTH = ("fsdp", "context")
matrix = pytest.mark.matrix


def config(**changes):
    sizes = {"vocab_size": VOCAB, "num_layers": LAYERS, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2}
    return TransformerConfig(**{**sizes, "head_dim": 4, "mlp_dim": 32, **changes})


CP, TP, TP_SEQ = mp.context_parallel(), mp.tensor_parallel(), mp.tensor_parallel(sequence=True)
HEADS = mp.context_parallel(kind="all-to-all")


@pytest.mark.parametrize(("seq_len", "kinds"), [(16, ["ring", "all-to-all"]), (12, []), (None, [])])
def test_candidates_divide_the_sequence_in_two_parts_per_rank(seq_len, kinds):
    space = SearchSpace(sizes={"context": 4}, examples=8, seq_len=seq_len, num_layers=2)
    assert [candidate.kind for candidate in Context.candidates(space)] == kinds


# ---------------------------------------------------------------------------------------------------------------------
# What is sent
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.pod
def test_ring_messages_overlap_with_matmuls_on_gpus(pod):
    """The step compiled for eight H100s, in bfloat16, with layers recomputed: the ring runs twice forward."""
    mesh = mp.MeshSpec(fsdp=2, context=4).abstract()
    cfg = config(vocab_size=512, embed_dim=256, num_heads=8, head_dim=64, mlp_dim=512)
    state = mp.abstract_state(cfg.build(), optax.adam(1e-2), mesh=mesh, strategy=mp.fsdp(axis=BOTH) | CP)
    batch = {name: jax.ShapeDtypeStruct((ROWS, 8192), np.int32) for name in ("inputs", "targets")}
    step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"), remat="full")
    program = pod.compile(step.trace(state, batch), "h100:1x8")
    times = timeline(program.module, census(program.module, mesh), parse_cluster("h100:1x8"))
    ring = [timed for timed in times.collectives if "ring_attention" in timed.collective.op_name]
    kv_bytes = 2 * 2 * (ROWS // 2) * (8192 // 4) * 2 * 64
    forward, backward = cost.ring_attention(kv_bytes, 4), cost.ring_attention_backward(kv_bytes, 2 * kv_bytes, 4)
    # The forward pass that is made again and the backward pass begin with the same message, which XLA sends once.
    layer_bytes = 2 * forward.bytes_sent + backward.bytes_sent - kv_bytes
    assert sum(timed.collective.bytes_sent_per_step for timed in ring) == LAYERS * layer_bytes
    assert {timed.collective.is_async for timed in ring} == {True}
    assert {timed.cover for timed in ring} == {"matmul"}
    assert sum(timed.exposed_s for timed in ring) == 0


@matrix
def test_remat_all_dots_saves_no_attention_scores():
    """Scores of a layer are 268 MB here, on one of two devices; what all matmuls with weights make is 2 MB."""
    state = mp.abstract_state(
        config().build(), optax.sgd(0.1), mesh=mesh_of(mp.MeshSpec(context=2)), strategy=mp.ddp() | CP
    )
    batch = {name: jax.ShapeDtypeStruct((1, 8192), np.int32) for name in ("inputs", "targets")}
    compiled = mp.train_step(next_token_loss, remat="all_dots").lower(state, batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4 * 4096 * 8192 / 4


# ---------------------------------------------------------------------------------------------------------------------
# Rules and the model
# ---------------------------------------------------------------------------------------------------------------------


NORM_SEQ = {"norm_seq": ("context", "tensor"), "seq": "context"}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (CP | TP_SEQ, NORM_SEQ),
        (TP_SEQ | CP, NORM_SEQ),
        (mp.Rules(seq="context") | TP_SEQ, NORM_SEQ),
        (CP | mp.Rules(norm_seq=None), {"norm_seq": None}),
        (CP, {"norm_seq": "context"}),
    ],
    ids=str,
)
def test_residual_stream_is_sharded_over_both_axes(strategy, expected):
    x = jax.ShapeDtypeStruct((8, 16, 4), np.float32)
    with mp.use_rules(mp.MeshSpec(context=2, tensor=2).abstract(), strategy):
        assert {name: spec_of(x, None, name, None)[1] for name in expected} == expected


def test_context_parallel_requires_its_axis():
    with raises("unknown-axis", "context_parallel()"):
        mp.shardings(config().build(), mp.MeshSpec(fsdp=8).abstract(), mp.fsdp() | CP)


@pytest.mark.parametrize(
    ("seq", "sizes", "strategy", "where"),
    [
        (12, {"context": 4}, CP, "(4, 12)"),  # two chunks per rank
        (10, {"context": 4}, HEADS, "`seq`, size 10"),
        (SEQ, {"context": 8}, HEADS, "4 query heads"),
        (SEQ, {"context": 4, "tensor": 2}, HEADS | TP, "4 query heads"),
        (SEQ, {"context": 4}, HEADS | mp.Rules(attn_kv_heads="context"), "`attn_kv_heads`, size 2"),
        (12, {"context": 4}, HEADS, None),
    ],
)
def test_indivisible_sequences_and_heads_are_errors(seq, sizes, strategy, where):
    mesh = mp.MeshSpec(**sizes).abstract()
    state = mp.abstract_state(config().build(), optax.sgd(0.1), mesh=mesh, strategy=mp.ddp() | strategy)
    batch = {name: jax.ShapeDtypeStruct((ROWS, seq), np.int32) for name in ("inputs", "targets")}
    with contextlib.nullcontext() if where is None else raises("indivisible", where):
        mp.train_step(next_token_loss).trace(state, batch)


@pytest.fixture(scope="module", params=[CP, pytest.param(HEADS, marks=matrix)], ids=["ring", "heads"])
def bound(request):
    """A decoder on context=2, tensor=2: (mesh, strategy, a function of it and arguments, under jit)."""
    mesh, strategy = mesh_of(mp.MeshSpec(context=2, tensor=2)), mp.ddp() | request.param | TP_SEQ
    state = mp.init_state(config().build(), optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)

    def call(f, *args):
        def run(state, *args):
            with mp.use_rules(mesh, strategy):
                return f(state.bound(), *args)

        whole = mp.init_state(config().build(), optax.sgd(0.1), mesh=mesh_of(mp.MeshSpec()), strategy=mp.ddp(), key=0)

        def on_one(state, *args):
            with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
                return f(state.bound(), *args)

        return jax.jit(run)(state, *args), jax.jit(on_one)(whole, *args)

    return call


@matrix
def test_logits_have_the_order_of_the_tokens(bound):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 8), dtype=np.int32)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12]], np.int32)
    each = None, jnp.asarray(positions)
    found, expected = bound(lambda model, t: [model(t, positions=given) for given in each], tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@matrix
def test_decoding_with_a_cache_keeps_the_sequence_unsharded(bound):
    """Prompts of any length: here of 3 tokens on 2 ranks."""
    prompt = np.random.default_rng(0).integers(0, VOCAB, (2, 3), dtype=np.int32)
    continued = functools.partial(generate, config=config(), num_tokens=4, key=jax.random.key(0), temperature=0)
    found, expected = bound(lambda model, p: continued(model, p), prompt)
    np.testing.assert_array_equal(found, expected)


def test_sequence_axes_exclude_axes_of_size_1():
    x = jnp.zeros((2, 8), jnp.int32)
    assert context.sequence_axes(x) == ()
    with mp.use_rules(mp.MeshSpec(context=1, fsdp=2).abstract(), mp.fsdp() | CP):
        assert context.sequence_axes(x) == ()
    with mp.use_rules(mp.MeshSpec(context=2).abstract(), CP):
        assert context.sequence_axes(x) == ("context",)
    with mp.use_rules(mp.MeshSpec(context=2).abstract(), HEADS):
        assert context.sequence_axes(x) == ()
        assert context.sequence_axes(x, "seq") == ("context",)


@pytest.mark.parametrize("given", ["positions", "no positions"])
def test_prepare_reorders_tokens_positions_and_segments(given):
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 3], [4, 4, 5, 5, 5, 5, 5, 5]], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 2, 3, 4, 5]], np.int32)
    with mp.use_rules(mesh_of(mp.MeshSpec(context=2)), mp.ddp() | CP):
        found = jax.jit(context.prepare)(tokens, 10 + positions if given == "positions" else None, segments)
    order = [0, 1, 6, 7, 2, 3, 4, 5]  # of two ranks: the first and the last quarter, then the two in between
    expected = tokens, positions + 10 * (given == "positions"), segments
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other[:, order])
