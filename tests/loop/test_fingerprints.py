"""Fingerprints of arrays: equal on CPU devices and accelerators, and different after a change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.loop import fingerprints
from meshpar.loop.fingerprints import fingerprints_of

COMPILED = jax.jit(fingerprints._fingerprint)
DTYPES = ("float32", "float16", "bfloat16", "int32", "uint8", "bool", "complex64")
MESH = mp.MeshSpec(fsdp=4, tensor=2).build()


def fingerprint(x) -> int:
    return fingerprints_of({"x": jnp.asarray(x)}, MESH)[0]


def random_array(shape, dtype, seed=0) -> np.ndarray:
    words = np.random.default_rng(seed).integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
    return words.view(jnp.dtype(dtype))[..., 0] if dtype != "bool" else words[..., 0] > 127


@settings(max_examples=40)
@given(data=st.data())
def test_fingerprint_detects_a_change_of_an_element(data):
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    shape = data.draw(st.sampled_from([(), (2, 3, 2)]))
    seed = data.draw(st.integers(0, 99))
    x = np.random.default_rng(seed).integers(0, 2, size=shape).astype(dtype)
    changed = x.copy().reshape(-1).view(np.uint8)
    index = data.draw(st.integers(0, changed.size - 1))
    changed[index] ^= 1 if dtype.kind == "b" else 1 << data.draw(st.integers(0, 7))
    changed = changed.view(dtype).reshape(shape)
    assert fingerprint(x) != fingerprint(changed)
    assert fingerprint(changed) == int(COMPILED(changed))


@pytest.mark.parametrize("dtype", ["int4", "uint2"])
def test_elements_smaller_than_a_byte(dtype):
    x = jnp.arange(-8, 8).astype(dtype)
    assert fingerprint(x) == int(COMPILED(x))
    assert fingerprint(x) != fingerprint(x.at[3].set(x[2]))


def test_fingerprint_detects_moved_elements():
    x = jnp.arange(24, dtype=jnp.float32).reshape(4, 6)
    others = [x.T.reshape(4, 6), x[::-1], jnp.roll(x, 1), x.at[0, 0].set(x[1, 0]).at[1, 0].set(x[0, 0])]
    assert len({fingerprint(y) for y in [x, *others]}) == 5


SHARDINGS = [
    ((), P()),
    ((5,), P()),
    ((8, 0), P("fsdp", "tensor")),
    ((8, 6), P(("fsdp", "tensor"))),
    ((3, 8), P(None, "fsdp")),
    ((5, 2), P(None, "tensor")),  # rows of a single element, with odd starts
    ((8, 6), P("tensor", None)),
    ((4, 3, 10), P("fsdp", None, "tensor")),
    ((3, 8, 5, 2), P(None, "fsdp", None, "tensor")),
    ((2, 4, 7, 3), P("tensor", "fsdp")),
]


@pytest.mark.parametrize("block", [2, 4, 1 << 16])
def test_fingerprint_does_not_depend_on_the_sharding(monkeypatch, block):
    monkeypatch.setattr(fingerprints, "_BLOCK", block)
    monkeypatch.setattr(fingerprints, "_SHORT_ROW", block)
    arrays = {}
    for number, (shape, spec) in enumerate(SHARDINGS):
        x = random_array(shape, DTYPES[number % len(DTYPES)], seed=number)
        for name, sharding in (("sharded", spec), ("replicated", P())):
            arrays[f"{name} {number}"] = jax.device_put(x, NamedSharding(MESH, sharding))
    values = fingerprints_of(arrays, MESH)
    assert values[::2] == values[1::2]
    assert values == np.asarray(fingerprints._fingerprint_program(MESH)([*arrays.values()])).tolist()


def test_fingerprints_of_float64():
    with jax.enable_x64(True):
        x = jax.device_put(random_array((4, 6), "float64"), NamedSharding(MESH, P("fsdp", "tensor")))
        assert fingerprint(x) == int(COMPILED(x))


def test_processes_add_their_shards(monkeypatch):
    x = jax.device_put(random_array((8, 6), "float32"), NamedSharding(MESH, P("fsdp", "tensor")))
    expected = fingerprint(x)
    others = np.array([[7], [2**32 - 5]], np.uint32)  # the sums of two other processes
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", lambda sums: np.stack([sums, *others]))
    assert fingerprint(x) == (expected + 2) % 2**32
