"""The closed forms of a decoder's shape, against the real thing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar.models import RopeScaling, TransformerConfig, llama3_8b, llama3_70b, llama3_405b
from tests.equal import mean_loss
from tests.grid import cases

SIZES = {
    "vocab_size": 48,
    "num_layers": 3,
    "embed_dim": 24,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 10,
    "mlp_dim": 40,
}


@pytest.mark.parametrize("tied", [False, True])
def test_num_params_is_the_real_count(tied):
    cfg = TransformerConfig(**SIZES, tied_embeddings=tied)
    assert cfg.num_params == sum(leaf.size for leaf in cfg.build().leaves())


@pytest.mark.parametrize(
    ("cfg", "published"),
    [(llama3_8b(), 8_030_261_248), (llama3_70b(), 70_553_706_496), (llama3_405b(), 405_853_388_800)],
)
def test_llama_has_its_published_size(cfg, published):
    assert cfg.num_params == published


def test_a_published_shape_can_be_changed():
    cfg = llama3_8b(num_layers=2, rope_scaling=None, param_dtype="bfloat16")
    assert (cfg.num_layers, cfg.rope_scaling, cfg.param_dtype, cfg.embed_dim) == (2, None, "bfloat16", 4096)
    # Two layers are left of 32, each of 218,112,000 parameters.
    assert cfg.num_params == 8_030_261_248 - 30 * 218_112_000


@pytest.mark.parametrize(("seq_len", "tied"), cases((64, True), grid=[(32, False), (64, True)]))
def test_flops_are_those_of_the_compiled_program(seq_len, tied):
    # One layer, because XLA's analysis counts a loop's body once; and whole, unmasked attention, as "xla" computes it.
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
    ("change", "words"),
    [
        ({"num_layers": 0}, ["num_layers", "0", "integer of at least 1"]),
        ({"vocab_size": 2.5}, ["vocab_size", "2.5"]),
        ({"mlp_dim": True}, ["mlp_dim", "True"]),
        ({"num_kv_heads": 4}, ["num_kv_heads", "6 is not a multiple of 4"]),
        ({"head_dim": 9}, ["head_dim", "even", "10"]),
        ({"rope_theta": 0.0}, ["rope_theta", "above 0"]),
        ({"norm_eps": -1e-5}, ["norm_eps", "above 0"]),
        ({"param_dtype": "float23"}, ["param_dtype", "float32"]),
        ({"attention": "cuddn"}, ["attention", "Did you mean `cudnn`"]),
        ({"moe": "mixtral"}, ["moe=", "it must be a MoEConfig"]),
        ({"moe": 0}, ["moe=", "it must be a MoEConfig"]),
        ({"latent": {"kv_rank": 4}}, ["latent=", "it must be a LatentAttention"]),
    ],
)
def test_a_wrong_size_is_refused(change, words):
    with pytest.raises(mp.MeshparError) as caught:
        TransformerConfig(**{**SIZES, **change})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"factor": 0.5}, {"low_freq_factor": 4.0}, {"low_freq_factor": 0.0}, {"original_seq_len": 0}]
)
def test_a_wrong_rope_scaling_is_refused(change):
    with pytest.raises(mp.MeshparError, match=next(iter(change))):
        RopeScaling(**change)
