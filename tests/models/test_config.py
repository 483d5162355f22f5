"""The closed forms of a decoder's shape, against the real thing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar.models import LatentAttention, RopeScaling, TransformerConfig, YarnScaling, llama3_8b
from meshpar.models.architecture import LayerKind, LongRope
from meshpar.moe import MoEConfig, Routing
from tests.equal import mean_loss
from tests.errors import raises
from tests.grid import cases

SIZES = {
    "vocab_size": 48, "num_layers": 3, "embed_dim": 24, "num_heads": 6, "num_kv_heads": 2, "head_dim": 10, "mlp_dim": 40
}  # fmt: skip
LATENT = LatentAttention(q_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, v_dim=14)
MOE = MoEConfig(routing=Routing(num_experts=8, top_k=2), mlp_dim=8)


def test_unroll_is_checked():
    assert TransformerConfig(**SIZES, unroll=True).unroll is True
    with raises("not-an-int", "TransformerConfig"):
        TransformerConfig(**SIZES, unroll=0)


@pytest.mark.parametrize("tied", [False, True])
def test_num_params_counts_all_parameters(tied):
    cfg = TransformerConfig(**SIZES, tied_embeddings=tied)
    assert cfg.num_params == sum(leaf.size for leaf in cfg.build().leaves())


@pytest.mark.parametrize(("seq_len", "tied"), cases((64, True), grid=[(32, False), (64, True)]))
def test_flops_are_those_of_the_compiled_program(seq_len, tied):
    # XLA's analysis counts the body of a loop once, so there is one layer. attention="xla" computes all scores.
    cfg = TransformerConfig(
        vocab_size=256, num_layers=1, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=192,
        tied_embeddings=tied,
    )  # fmt: skip
    model = cfg.build()
    batch = {name: jax.ShapeDtypeStruct((4, seq_len), jnp.int32) for name in ("inputs", "targets")}

    def loss(params, batch):
        return mean_loss(model.bind(params, {}), batch)[0]

    with mp.use_rules(mp.MeshSpec().build(jax.devices()[:1]), mp.ddp()):
        compiled = jax.jit(jax.grad(loss)).lower(model.abstract().params, batch).compile()
    counted = compiled.cost_analysis()["flops"] / (4 * seq_len)
    # XLA counts norms, softmax and the loss too: a few percent at this width, less the wider the model.
    assert 1 <= counted / cfg.flops_per_token(seq_len) <= 1.06


def test_flops_of_a_known_shape():
    # 8,030,261,248 less the lookup table (525,336,576) and the norms (266,240) are multiplied with.
    assert llama3_8b().flops_per_token(8192) == 6 * 7_504_658_432 + 12 * 32 * 32 * 128 * 8192


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        ({"num_layers": 0}, "not-an-int", ""),
        ({"vocab_size": 2.5}, "not-an-int", ""),
        ({"norm_offset": float("nan")}, "out-of-range", ""),
        ({"residual_scale": 10**400}, "out-of-range", ""),
        ({"rotary_dim": 0}, "not-an-int", ""),
        ({"attention_window": 2**40}, "out-of-range", "attention_window"),
        ({"mlp_dim": True}, "not-an-int", ""),
        ({"attention_window": 0}, "not-an-int", ""),
        ({"attention_cap": 0}, "out-of-range", ""),
        ({"num_kv_heads": 4}, "indivisible", "num_kv_heads"),
        ({"head_dim": 9}, "indivisible", "head_dim"),
        ({"rope_theta": 0.0}, "out-of-range", ""),
        ({"norm_eps": -1e-5}, "out-of-range", ""),
        ({"norm_eps": 2.0}, "out-of-range", "norm_eps"),
        ({"param_dtype": "float23"}, "unknown-choice", ""),
        ({"attention": "cuddn"}, "unknown-choice", ""),
        ({"moe": "mixtral"}, "wrong-type", "moe"),
        ({"moe": 0}, "wrong-type", "moe"),
        ({"latent": {"kv_rank": 4}}, "wrong-type", "latent"),
        ({"latent": LATENT, "num_kv_heads": 2}, "conflict", "num_kv_heads"),
        ({"latent": LATENT, "num_kv_heads": 6, "head_dim": 8}, "conflict", "head_dim"),
        ({"latent": LATENT, "num_kv_heads": 6, "tensor_matmul": "overlapped"}, "unsupported-feature", "tensor_matmul"),
        ({"latent": LATENT, "num_kv_heads": 6, "qk_norm": True}, "conflict", "qk_norm"),
        ({"rope_yarn": YarnScaling(factor=4.0, original_seq_len=8, score_factor=2.0)}, "conflict", "rope_yarn"),
        ({"num_dense_layers": 1}, "conflict", "num_dense_layers"),
        ({"num_dense_layers": -1}, "not-an-int", ""),
        ({"num_dense_layers": 3, "moe": MOE}, "out-of-range", "num_dense_layers"),
        ({"moe": MOE}, "conflict", "mlp_dim"),
    ],
)
def test_config_rejects(change, code, where):
    with raises(code, f"TransformerConfig({where}" if where else "TransformerConfig"):
        TransformerConfig(**{**SIZES, **change})


@pytest.mark.parametrize(
    ("make", "change", "code"),
    [
        (RopeScaling, {"factor": 0.5}, "out-of-range"),
        (RopeScaling, {"low_freq_factor": 4.1}, "out-of-range"),
        (RopeScaling, {"low_freq_factor": 0.0}, "out-of-range"),
        (RopeScaling, {"original_seq_len": 0}, "not-an-int"),
        (RopeScaling, {"factor": float("nan")}, "out-of-range"),
        (LongRope, {"short_factor": 1.0, "long_factor": (1.0,), "original_seq_len": 8}, "wrong-type"),
        (LayerKind, {"window": 2**40}, "out-of-range"),
        (LayerKind, {"has_rope": False, "rope_theta": 50.0}, "conflict"),
        (YarnScaling, {"factor": "8", "original_seq_len": 8}, "out-of-range"),
        (YarnScaling, {"factor": 0.5, "original_seq_len": 8}, "out-of-range"),
        (YarnScaling, {"factor": 2.0, "original_seq_len": 8, "beta_fast": 0.5}, "out-of-range"),
        (LatentAttention, {**dataclasses.asdict(LATENT), "rope_dim": 3}, "indivisible"),
        (LatentAttention, {**dataclasses.asdict(LATENT), "kv_rank": 0}, "not-an-int"),
        (LatentAttention, {**dataclasses.asdict(LATENT), "q_rank": 1.5}, "not-an-int"),
    ],
)
def test_parts_of_a_config_reject(make, change, code):
    with raises(code, make.__name__):
        make(**change)
