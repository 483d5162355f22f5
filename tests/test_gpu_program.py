"""What the GPU compiler makes of a training step, seen without a GPU: where gradients are scattered, in which dtype."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.inspect import census
from meshpar.models import TransformerConfig, next_token_loss

pytestmark = pytest.mark.pod

LAYERS, EMBED, MLP, ROWS, SEQ = 4, 256, 512, 16, 64
CONFIG = TransformerConfig(
    vocab_size=512, num_layers=LAYERS, embed_dim=EMBED, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=MLP
)
MATRICES, TABLES, NORMS = 7, 2, 2
"""Weight matrices of a layer (query, key, value, out, gate, up, down); the embedding and the output layer; the norms of
a layer, whose stacked scales have two dims."""


@pytest.fixture(scope="module")
def program(pod):
    """Compiles the decoder's step for eight H100s under a strategy; each once."""
    known = {}

    def compiled(strategy, **options):
        key = (str(strategy), tuple(sorted((k, str(v)) for k, v in options.items())))
        if key not in known:
            mesh = mp.MeshSpec(fsdp=8).abstract()
            state = mp.abstract_state(CONFIG.build(), optax.adam(1e-3), mesh=mesh, strategy=strategy)
            step = mp.train_step(next_token_loss, **options)
            batch = {n: jax.ShapeDtypeStruct((ROWS, SEQ), np.int32) for n in ("inputs", "targets")}
            found = pod.compile(step.trace(state, batch), "h100:1x8")
            known[key] = found, census.census(found.module, mesh)
        return known[key]

    return compiled


def weights(collectives, kind, *, in_loop):
    """(dtype, count a step) of every weight matrix, or its gradient, in collectives of a kind.

    XLA combines a layer's arrays into one collective; norm scales and scalars are small and left out.
    """
    return [
        (array.dtype, c.count_per_step)
        for c in collectives
        for array in c.arrays
        if c.kind == kind and c.in_loop == in_loop and len(array.dims) > 1
    ]


def test_ddp_reduces_and_gathers_nothing(program):
    _, found = program(mp.ddp())
    assert {c.kind for c in found} == {"all-reduce"}


@pytest.mark.parametrize("strategy", [mp.zero1(), mp.zero2()], ids=str)
def test_zero2_scatters_gradients_inside_the_backward_loop(program, strategy):
    """The loop over layers carries shards: no whole gradient of a layer's weights leaves an iteration.

    ZeRO-1 is compiled to the same program: its optimizer uses shards only, and the compiler scatters as early.
    """
    _, found = program(strategy)
    assert weights(found, "reduce-scatter", in_loop=True) == [("f32", LAYERS)] * MATRICES
    assert not weights(found, "all-reduce", in_loop=True)
    assert not weights(found, "all-reduce", in_loop=False)
    # After the update each parameter is gathered once, outside of loops.
    assert not weights(found, "all-gather", in_loop=True)
    assert len(weights(found, "all-gather", in_loop=False)) == MATRICES + TABLES + NORMS


def test_zero2_never_materializes_full_gradients(program):
    """No loop carries an array of a whole stack's size beyond the parameters, which it only reads."""
    whole, _ = program(mp.ddp())
    split, _ = program(mp.zero2())
    stacked_bytes = 4 * LAYERS * (3 * EMBED * MLP + 2 * EMBED * 32 * (8 + 4))
    assert whole.temporary_bytes - split.temporary_bytes > stacked_bytes / 2


def test_zero3_gathers_twice_and_scatters_once(program):
    _, found = program(mp.zero3())
    assert len(weights(found, "all-gather", in_loop=True)) == 2 * MATRICES
    assert len(weights(found, "reduce-scatter", in_loop=True)) == MATRICES
    assert {count for _, count in weights(found, "all-gather", in_loop=True)} == {LAYERS}


@pytest.mark.parametrize(("reduce", "dtype"), [(None, "f32"), ("bfloat16", "bf16")])
def test_collectives_use_compute_and_reduction_dtypes(program, reduce, dtype):
    precision = mp.Precision(params="float32", compute="bfloat16", reduce=reduce)
    _, found = program(mp.zero3(), precision=precision)
    assert {dtype for dtype, _ in weights(found, "all-gather", in_loop=True)} == {"bf16"}
    assert {dtype for dtype, _ in weights(found, "reduce-scatter", in_loop=True)} == {dtype}


def test_accumulation_modes_reduce_scatter_each_step_or_once(program):
    _, each = program(mp.zero2(), accumulate=2)
    _, once = program(mp.zero2(), accumulate=2, reduce_gradients="once")
    scattered = weights(each, "reduce-scatter", in_loop=True)
    assert sorted(count for _, count in scattered) == [2] * TABLES + [2 * LAYERS] * MATRICES
    assert not weights(each, "all-reduce", in_loop=True)
    assert not [c for c in once if c.in_loop]
    assert len(weights(once, "reduce-scatter", in_loop=False)) == MATRICES + TABLES + NORMS
