from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.sharding import errors, types
from meshpar.sharding.types import Leaf
from tests.errors import raises


def test_error_message_and_fields():
    error = errors.problem("`up/kernel` dim 1", "split over `tensor` (4)", "66 is not a multiple of 4", "pad it to 68")
    assert isinstance(error, mp.MeshparError)
    assert isinstance(error, ValueError)
    assert (error.where, error.requested, error.reason, error.fix) == (
        "`up/kernel` dim 1",
        "split over `tensor` (4)",
        "66 is not a multiple of 4",
        "pad it to 68",
    )
    assert str(error) == ("`up/kernel` dim 1: cannot split over `tensor` (4): 66 is not a multiple of 4. Pad it to 68.")


def test_error_without_a_request():
    error = errors.problem("MeshSpec axis `fsdp` of size 0", "", "a size is positive", "write fsdp=4")
    assert str(error) == "MeshSpec axis `fsdp` of size 0: a size is positive. Write fsdp=4."


def test_error_with_a_question_as_fix():
    assert str(errors.problem("a", "b", "c", errors.near("fdsp", ["fsdp"]))).endswith("Did you mean `fsdp`?")


def test_error_can_be_pickled():
    error = errors.problem("`x`", "shard it", "it is a scalar", "leave it out", code="wrong-shape")
    restored = pickle.loads(pickle.dumps(error))
    assert str(restored) == str(error)
    assert (restored.where, restored.fix, restored.code) == ("`x`", "leave it out", "wrong-shape")


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
def test_near_suggests_similar_words(word, options, expected):
    assert errors.near(word, options) == expected


def test_leaf_with_wrong_number_of_names_is_refused():
    with raises("wrong-shape", "`up/kernel` of shape (4, 8)"):
        Leaf(path="up/kernel", shape=(4, 8), dtype=np.dtype("float32"), names=("embed",))


@pytest.mark.parametrize(
    ("shape", "dtype", "size", "nbytes"),
    [((), "float32", 1, 4), ((3, 5), "bfloat16", 15, 30), ((0, 7), "float64", 0, 0), ((2,), "int8", 2, 2)],
)
def test_leaf_size_and_bytes(shape, dtype, size, nbytes):
    leaf = types.leaf_of("x", jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
    assert (leaf.size, leaf.nbytes) == (size, nbytes)


def test_leaf_of_a_prng_key_has_the_raw_shape():
    leaf = types.leaf_of("rng", jax.ShapeDtypeStruct((3,), jax.random.key(0).dtype))
    assert (leaf.shape, leaf.dtype, leaf.nbytes) == ((3, 2), np.dtype("uint32"), 24)


def test_tree_leaves_with_paths_of_containers():
    tree = {"layers": [jnp.zeros(1), (jnp.zeros(2), jnp.zeros(3))], "head": jnp.zeros(4)}
    paths = [path for path, _ in types.tree_leaves_with_paths(tree)]
    assert paths == ["head", "layers/0", "layers/1/0", "layers/1/1"]
    assert types.tree_leaves_with_paths(jnp.zeros(3))[0][0] == ""


@pytest.mark.parametrize(
    ("spec", "shards"),
    [(P(), 1), (P(None, "fsdp"), 4), (P(("data", "fsdp"), None, "tensor"), 24), (P("data"), 3), (P(None), 1)],
)
def test_num_shards_of_a_spec(spec, shards):
    mesh = AbstractMesh((3, 4, 2), ("data", "fsdp", "tensor"))
    assert types.num_shards(spec, mesh) == shards
    assert types.num_shards(spec, types.axis_sizes(mesh)) == shards


def test_axis_sizes_are_in_mesh_order():
    assert list(types.axis_sizes(AbstractMesh((2, 4), ("b", "a"))).items()) == [("b", 2), ("a", 4)]
