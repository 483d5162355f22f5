"""Dims that stack layers and experts, and the weight decay that depends on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.models import TransformerConfig
from meshpar.moe import MoEConfig, Routing
from meshpar.optim.matrix_dims import decayed, stack_dims
from meshpar.optim.orthogonalized import matrices
from meshpar.sharding.types import tree_leaves_with_paths


@pytest.mark.parametrize(
    ("names", "dims"),
    [
        (("layers", "embed", "mlp"), (0,)),
        (("dense_layers", "embed", "mlp"), (0,)),
        (("layers", "expert", "embed", "mlp"), (0, 1)),
        (("expert", "mlp"), (0,)),
        (("layers", "embed", "expert"), (0,)),  # a router
        (("layers", "expert"), (0, 1)),  # the bias of a router
        (("embed", "layers", "mlp"), (1,)),
        ((None, "embed"), ()),
        (None, ()),
    ],
)
def test_stack_dims(names, dims):
    assert stack_dims(names) == dims


@pytest.fixture(scope="module")
def moe_model():
    moe = MoEConfig(
        routing=Routing(num_experts=4, top_k=2),
        mlp_dim=16,
        has_biases=True,
        shared_experts=1,
        activation="clamped_swiglu",
    )
    sizes = {"vocab_size": 64, "num_layers": 3, "embed_dim": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4}
    return TransformerConfig(**sizes, mlp_dim=24, num_dense_layers=1, moe=moe, qkv_bias=True).build()


def test_only_matrices_decay(moe_model):
    """With ones and zero gradients, an update is the weight decay alone."""
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), moe_model.abstract().params)
    tx = mp.AdamW(lr=0.1, weight_decay=0.1, schedule="constant").build(steps=1, names=moe_model.names())
    update = jax.jit(lambda params: tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)[0])
    updates = {path: np.asarray(x) for path, x in tree_leaves_with_paths(update(params))}
    moved = {path for path, x in updates.items() if x.any()}
    for path in moved:
        np.testing.assert_allclose(updates[path], -0.01, rtol=1e-6, err_msg=path)
    others = {path for path, _ in tree_leaves_with_paths(params)} - moved
    ends = {"bias", "scale", "gate_bias", "up_bias", "down_bias", "router_bias"}
    assert others == {path for path, _ in tree_leaves_with_paths(params) if path.rpartition("/")[2] in ends}


def test_muon_updates_the_matrices_of_all_layers(moe_model):
    params = moe_model.abstract().params
    leaves = jax.tree_util.tree_leaves_with_path(
        matrices(moe_model.names())(params),
        is_leaf=lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers),
    )
    selected = {"/".join(key.key for key in path) for path, dims in leaves if dims is not None}
    decayed_paths = {path for path, x in tree_leaves_with_paths(decayed(moe_model.names())(params)) if x}
    assert {path for path in selected if path.startswith("dense_layers/")} == {
        f"dense_layers/{name}/kernel"
        for name in (
            "attention/query",
            "attention/key",
            "attention/value",
            "attention/out",
            "mlp/gate",
            "mlp/up",
            "mlp/down",
        )
    }
    assert decayed_paths - selected == {"embed/embedding", "head/kernel", "layers/mlp/router"}
