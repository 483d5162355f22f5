"""The published models with experts have the published numbers of parameters, counted in their real trees."""

from __future__ import annotations

import jax
import pytest

import meshpar as mp
from meshpar.models import deepseek_v3, mixtral_8x7b
from meshpar.sharding.types import tree_leaves_with_paths
from tests.equal import linen_decoder

SHAPES = {"mixtral_8x7b": mixtral_8x7b(), "deepseek_v3": deepseek_v3()}


@pytest.fixture(scope="module")
def trees():
    """Shapes of the parameters; nothing is allocated."""
    return {name: cfg.build().abstract().params for name, cfg in SHAPES.items()}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("mixtral_8x7b", 46_702_792_704, 12_879_925_248), ("deepseek_v3", 671_026_404_352, 37_552_282_624)],
)
def test_the_tree_has_as_many_parameters_as_published(trees, name, total, active):
    cfg = SHAPES[name]
    leaves = tree_leaves_with_paths(trees[name])
    assert sum(x.size for _, x in leaves) == cfg.num_params == total
    # A token visits k of the E experts of every layer, and all else: counted by what the leaves are called.
    experts = sum(x.size for path, x in leaves if "/mlp/" in path and x.ndim == 4)
    visited = experts * cfg.moe.routing.top_k // cfg.moe.routing.num_experts
    assert total - experts + visited == cfg.num_active_params == active
    assert f"{total:,}" in globals()[name].__doc__
    assert f"{active:,}" in " ".join(globals()[name].__doc__.split())


def test_rounded_they_are_the_numbers_in_the_papers():
    assert [round(cfg.num_params / 1e9, 1) for cfg in SHAPES.values()] == [46.7, 671.0]
    mixtral, deepseek = SHAPES.values()
    assert round(mixtral.num_active_params / 1e9, 1) == 12.9
    # The paper's 37e9 leave a few per cent open: with both tables of the vocabulary, or with one.
    tables = deepseek.vocab_size * deepseek.embed_dim
    assert 36.6e9 < deepseek.num_active_params - tables < 37e9 < deepseek.num_active_params < 37.6e9


def test_the_parts_of_deepseek_v3(trees):
    sizes = {path: x.shape for path, x in tree_leaves_with_paths(trees["deepseek_v3"])}
    assert sizes["dense_layers/mlp/up/kernel"] == (3, 7168, 18_432)
    assert sizes["layers/attention/query_up/kernel"] == (58, 1536, 128, 192)
    attention = sum(x.size for path, x in tree_leaves_with_paths(trees["deepseek_v3"]) if "/attention/" in path)
    assert attention == 61 * (187_105_280 + 1536 + 512)


@pytest.mark.matrix
def test_linen_has_the_same_tree(trees):
    tokens = jax.ShapeDtypeStruct((1, 8), "int32")
    with mp.use_rules(mp.MeshSpec().build(jax.devices()[:1]), mp.ddp()):
        linen = mp.from_linen(linen_decoder(SHAPES["deepseek_v3"]), tokens).abstract().params
    expected = {path: x.shape for path, x in tree_leaves_with_paths(trees["deepseek_v3"])}
    assert {path: x.shape for path, x in tree_leaves_with_paths(linen)} == expected
