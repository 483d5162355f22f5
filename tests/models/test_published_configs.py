"""Published models have the published numbers of parameters, counted in their trees."""

from __future__ import annotations

import jax
import pytest

import meshpar as mp
from meshpar.models import deepseek_v3, llama3_8b, llama3_70b, llama3_405b, mixtral_8x7b
from meshpar.sharding.types import tree_leaves_with_paths
from tests.equal import linen_decoder


def shapes(cfg):
    return dict(tree_leaves_with_paths(cfg.build().abstract().params))


@pytest.mark.parametrize(
    ("make", "total", "active"),
    [
        (llama3_8b, 8_030_261_248, 8_030_261_248),
        (llama3_70b, 70_553_706_496, 70_553_706_496),
        (llama3_405b, 405_853_388_800, 405_853_388_800),
        (mixtral_8x7b, 46_702_792_704, 12_879_925_248),
        (deepseek_v3, 671_026_404_352, 37_552_282_624),
    ],
)
def test_num_params_of_published_models(make, total, active):
    cfg, leaves = make(), shapes(make())
    assert sum(x.size for x in leaves.values()) == cfg.num_params == total
    # A token visits k of the E experts of each MoE layer, whose kernels have four dims.
    experts = sum(x.size for path, x in leaves.items() if "/mlp/" in path and x.ndim == 4)
    visited = experts and experts * cfg.moe.routing.top_k // cfg.moe.routing.num_experts
    assert total - experts + visited == cfg.num_active_params == active
    assert all(f"{number:,}" in " ".join(make.__doc__.split()) for number in (total, active))


def test_changes_replace_fields():
    cfg = llama3_8b(num_layers=2, rope_scaling=None, param_dtype="bfloat16")
    assert (cfg.num_layers, cfg.rope_scaling, cfg.param_dtype, cfg.embed_dim) == (2, None, "bfloat16", 4096)


def test_shapes_of_deepseek_v3():
    sizes = shapes(deepseek_v3())
    assert sizes["dense_layers/mlp/up/kernel"].shape == (3, 7168, 18_432)
    assert sizes["layers/attention/query_up/kernel"].shape == (58, 1536, 128, 192)
    assert sum(x.size for path, x in sizes.items() if "/attention/" in path) == 61 * (187_105_280 + 1536 + 512)


@pytest.mark.matrix
def test_linen_has_the_same_tree():
    with mp.use_rules(mp.MeshSpec().build(jax.devices()[:1]), mp.ddp()):
        linen = mp.from_linen(linen_decoder(deepseek_v3()), jax.ShapeDtypeStruct((1, 8), "int32")).abstract().params
    found = {path: x.shape for path, x in tree_leaves_with_paths(linen)}
    assert found == {path: x.shape for path, x in shapes(deepseek_v3()).items()}
