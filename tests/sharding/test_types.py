from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.sharding import types


def test_an_error_reads_as_one_paragraph_and_keeps_its_parts():
    error = types.problem("`up/kernel` dim 1", "split over `tensor` (4)", "66 is not a multiple of 4", "pad it to 68")
    assert isinstance(error, mp.MeshparError)
    assert isinstance(error, ValueError)
    assert (error.where, error.requested, error.reason, error.fix) == (
        "`up/kernel` dim 1",
        "split over `tensor` (4)",
        "66 is not a multiple of 4",
        "pad it to 68",
    )
    assert str(error) == ("`up/kernel` dim 1: cannot split over `tensor` (4): 66 is not a multiple of 4. Pad it to 68.")


def test_a_fix_that_asks_ends_with_its_question_mark():
    assert str(types.problem("a", "b", "c", types.near("fdsp", ["fsdp"]))).endswith("Did you mean `fsdp`?")


def test_an_error_crosses_processes():
    error = types.problem("here", "do this", "it is that", "do so")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.where, again.fix) == ("here", "do so")


@pytest.mark.parametrize(
    ("word", "options", "expected"),
    [
        ("fdsp", ["data", "fsdp", "tensor"], "did you mean `fsdp`?"),
        ("embd", ["embed", "embeds", "mlp"], "did you mean `embed` or `embeds`?"),
        ("zzz", ["b", "a", "b"], "known: `a`, `b`"),
        ("zzz", [], "none are known"),
        ("zzz", map(str, range(20)), "known: `0`, `1`, `10`, `11`, `12`, `13`, `14`, `15`, `16`, `17`, `18`, `19`, …"),
    ],
)
def test_near_words(word, options, expected):
    assert types.near(word, options) == expected


def test_a_leaf_has_one_name_for_each_dim():
    with pytest.raises(mp.MeshparError, match=r"`up/kernel` of shape \(4, 8\).*2 dims, not 1"):
        mp.Leaf(path="up/kernel", shape=(4, 8), dtype=np.dtype("float32"), names=("embed",))


@pytest.mark.parametrize(
    ("shape", "dtype", "size", "nbytes"),
    [((), "float32", 1, 4), ((3, 5), "bfloat16", 15, 30), ((0, 7), "float64", 0, 0), ((2,), "int8", 2, 2)],
)
def test_size_and_bytes_of_a_leaf(shape, dtype, size, nbytes):
    leaf = types.leaf_of("x", jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
    assert (leaf.size, leaf.nbytes) == (size, nbytes)


def test_a_random_key_counts_as_its_words():
    leaf = types.leaf_of("rng", jax.ShapeDtypeStruct((3,), jax.random.key(0).dtype))
    assert (leaf.shape, leaf.dtype, leaf.nbytes) == ((3, 2), np.dtype("uint32"), 24)


def test_paths_of_every_kind_of_container():
    tree = {"layers": [jnp.zeros(1), (jnp.zeros(2), jnp.zeros(3))], "head": jnp.zeros(4)}
    paths = [path for path, _ in types.tree_leaves_with_paths(tree)]
    assert paths == ["head", "layers/0", "layers/1/0", "layers/1/1"]
    assert types.tree_leaves_with_paths(jnp.zeros(3))[0][0] == ""


@pytest.mark.parametrize(
    ("spec", "shards"),
    [(P(), 1), (P(None, "fsdp"), 4), (P(("data", "fsdp"), None, "tensor"), 24), (P("data"), 3), (P(None), 1)],
)
def test_shards_of_a_spec(spec, shards):
    mesh = AbstractMesh((3, 4, 2), ("data", "fsdp", "tensor"))
    assert types.num_shards(spec, mesh) == shards
    assert types.num_shards(spec, types.axis_sizes(mesh)) == shards


def test_axes_of_a_mesh_in_its_order():
    assert list(types.axis_sizes(AbstractMesh((2, 4), ("b", "a"))).items()) == [("b", 2), ("a", 4)]
