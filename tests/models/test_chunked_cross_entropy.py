"""Cross entropy in chunks of the vocabulary: values and gradients of full logits, without full logits in memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.collectives.attention import capped
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.models.chunked_cross_entropy import Unembedding, chunked_cross_entropy
from meshpar.models.token_loss import cross_entropy
from meshpar.training.state import abstract_state
from tests.equal import mesh_of, token_batches
from tests.grid import cases

TOKENS, WIDTH, VOCAB = (3, 5), 8, 50
# Single precision rounds at 6e-8; sums over 50 tokens of the vocabulary in another order.
TIGHT = {"rtol": 1e-6, "atol": 1e-6}


@pytest.mark.parametrize(("vocab_dim", "chunk", "cap"), [(0, 16, None), (1, 25, 2.0), (1, 1000, None)])
def test_chunked_loss_matches_full_logits(vocab_dim, chunk, cap):
    """Cases include a padded last chunk. Cotangents of both results differ by token."""
    rng = np.random.default_rng(0)
    h = rng.normal(size=(*TOKENS, WIDTH)).astype(np.float32)
    matrix = rng.normal(size=(VOCAB, WIDTH) if vocab_dim == 0 else (WIDTH, VOCAB)).astype(np.float32)
    targets = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    targets[0] = np.asarray(h @ (matrix if vocab_dim else matrix.T)).argmax(-1)[0]
    slopes = [rng.normal(size=TOKENS).astype(np.float32) for _ in range(2)]

    def whole(h, matrix, targets, vocab_dim):
        return cross_entropy(capped(h @ (matrix if vocab_dim else matrix.T), cap)[0], targets)

    def chunked(h, matrix, targets, vocab_dim):
        return chunked_cross_entropy(Unembedding(h, matrix, vocab_dim, chunk, cap), targets)

    def weighed(loss, h, matrix):
        found = loss(h, matrix, targets, vocab_dim)
        return (found.nats_BT * slopes[0] + found.log_z_BT * slopes[1]).sum(), found

    with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
        (expected, of_whole), (found, of_chunks) = (
            jax.jit(jax.grad(functools.partial(weighed, loss), argnums=(0, 1), has_aux=True))(h, matrix)
            for loss in (whole, chunked)
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TIGHT), found, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TIGHT), of_chunks, of_whole)
    assert of_chunks.best_BT[0].all()
    assert not of_chunks.best_BT.all()


def test_targets_outside_the_vocabulary_are_nan_as_with_whole_logits():
    rng = np.random.default_rng(0)
    h, matrix = rng.normal(size=(1, 4, WIDTH)).astype(np.float32), rng.normal(size=(WIDTH, 10)).astype(np.float32)
    targets = np.array([[-1, -100, 10, 3]], np.int32)
    with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
        found = chunked_cross_entropy(Unembedding(h, matrix, 1, 3), targets)
    np.testing.assert_allclose(found.nats_BT, cross_entropy(h @ matrix, targets).nats_BT, rtol=1e-6)
    assert np.isnan(found.nats_BT).tolist() == [[True, True, True, False]]
    assert not found.best_BT[0, :3].any()
    assert np.isfinite(found.log_z_BT).all()


def test_logits_far_from_zero_stay_finite():
    def loss(h):
        matrix = jnp.float32([[1.0, 0.0, -1.0]])
        return chunked_cross_entropy(Unembedding(h, matrix, 1, 2), jnp.ones((1, 1), int)).nats_BT[0, 0]

    with mp.use_rules(mesh_of(mp.MeshSpec()), mp.ddp()):
        nats, slope = jax.jit(jax.value_and_grad(loss))(jnp.full((1, 1, 1), 1e30))
    np.testing.assert_allclose(nats, 1e30)
    assert np.isfinite(slope).all()


CONFIG = TransformerConfig(
    vocab_size=120, num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=8, tied_embeddings=True,
    logits_cap=5.0,
)  # fmt: skip
ROWS, SEQ, CHUNK = 16, 6, 25
"""A rank of two has 60 of the vocabulary, in three chunks."""


def logits_of_a_device(text):
    """Arrays of a program that hold as many numbers as a device has logits."""
    size = ROWS // 4 * SEQ * CONFIG.vocab_size // 2
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"\w\d+\[([\d,]+)\]", text)}
    return {shape for shape in shapes if math.prod(shape) >= size}


@pytest.mark.matrix
def test_sharded_chunked_loss_has_equal_gradients_and_no_logits(mesh8):
    """Table split over vocabulary and width, the batch over `fsdp`; with a z-loss."""
    strategy, batch = mp.fsdp() | mp.tensor_parallel(sequence=True), token_batches(ROWS, SEQ, 1, CONFIG.vocab_size)[0]
    model, loss = CONFIG.build(), functools.partial(next_token_loss, z_loss=1e-2)
    params = jax.jit(model.init)(np.uint32([0, 1])).params

    def compiled(model, mesh, strategy):
        def of(params, batch):
            with mp.use_rules(mesh, strategy):  # the backward pass is traced in here, too
                return jax.value_and_grad(lambda p: loss(model.bind(p, {}), batch, None), has_aux=True)(params)

        abstract = abstract_state(model, optax.sgd(1.0), mesh=mesh, strategy=strategy)
        layout = abstract.setup.shardings.params
        return jax.jit(of, in_shardings=(layout, None), out_shardings=(None, layout)).lower(params, batch).compile()

    chunked = dataclasses.replace(CONFIG, vocab_chunk=CHUNK).build()
    plain, found = compiled(model, mesh_of(mp.MeshSpec()), mp.ddp()), compiled(chunked, mesh8, strategy)
    assert logits_of_a_device(plain.as_text())
    assert not logits_of_a_device(found.as_text())
    expected = plain(params, batch)
    assert expected[0][0] > expected[0][1]["nats"] > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TIGHT), found(params, batch), expected)


CASES_OF_MESHES = {
    "zero1": (mp.MeshSpec(fsdp=8), mp.zero1(), {}),
    "fsdp": (mp.MeshSpec(fsdp=8), mp.fsdp(), {}),
    "prefetch": (mp.MeshSpec(fsdp=8), mp.fsdp(prefetch=1), {"remat": "full"}),
    "fsdp|sequence": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(sequence=True), {}),
    "accumulate": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(), {"accumulate": 2}),
    "once": (mp.MeshSpec(fsdp=8), mp.fsdp(), {"accumulate": 2, "reduce_gradients": "once"}),
    "context": (mp.MeshSpec(fsdp=2, context=4), mp.fsdp() | mp.context_parallel(), {}),
    "int8": (mp.MeshSpec(fsdp=8), mp.fsdp(quantize="int8"), {}),
}  # fmt: skip
WIDE = dataclasses.replace(
    CONFIG, vocab_size=2048, num_layers=2, embed_dim=64, head_dim=32, mlp_dim=160, vocab_chunk=256
)


def explained(case, tied, cluster=None, pod=None):
    spec, strategy, options = CASES_OF_MESHES[case]
    mesh = mesh_of(spec) if cluster is None else spec.abstract(devices=8)
    model = dataclasses.replace(WIDE, tied_embeddings=tied).build()
    state = abstract_state(model, optax.adamw(1e-3), mesh=mesh, strategy=strategy)
    batch = {name: jax.ShapeDtypeStruct((16, 128), np.int32) for name in ("inputs", "targets")}
    step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"), **options)
    return mp.explain(step, state, batch, cluster, pod=pod, advise=False)


def assert_as_expected(report):
    assert not report.matching.missing
    assert not report.matching.unexpected


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "tied"), cases(("fsdp|sequence", True), grid=itertools.product(CASES_OF_MESHES, (False, True)))
)
def test_each_chunk_is_gathered_and_its_gradient_scattered(case, tied):
    report = explained(case, tied)
    assert_as_expected(report)
    if case == "fsdp|sequence":
        chunks = 4
        sent = [one.collective for one in report.collectives if one.collective.axes == ("fsdp",)]
        sent = [one for one in sent if any(loop.trip_count == chunks - 1 for loop in one.loops)]
        counts: Counter[str] = Counter()
        for one in sent:
            counts[one.kind] += one.count_per_step
        assert counts == {"all-gather": 2 * (chunks - 1), "all-reduce": chunks - 1}


@pytest.mark.pod
@pytest.mark.parametrize(
    ("case", "tied"), [("zero1", False), ("fsdp", True), ("fsdp|sequence", False), ("once", False)]
)
def test_gpu_program_of_chunked_loss_has_no_logits(case, tied, pod):
    assert_as_expected(explained(case, tied, "h100:1x8", pod))
