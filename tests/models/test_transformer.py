"""Values, logical names and compiled programs of the decoder in NNX and in Linen."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import meshpar as mp
from meshpar.layers.precision import Precision, numerics
from meshpar.layers.remat import REMAT_POLICIES
from meshpar.models import Transformer, TransformerConfig, YarnScaling
from meshpar.models.transformer import MLP
from tests.equal import linen_decoder, mean_loss
from tests.grid import cases
from tests.models import by_hand
from tests.models.by_hand import random_params

CONFIG = functools.partial(
    TransformerConfig, vocab_size=24, num_layers=3, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=20
)
TOKENS = np.random.default_rng(0).integers(0, 24, (2, 7), dtype=np.int32)
BATCH = {"inputs": TOKENS, "targets": np.roll(TOKENS, -1, 1)}
NAMES = {
    "embed/embedding": ("vocab", "embed"),
    "final_norm/scale": ("embed",),
    "head/kernel": ("embed", "vocab"),
    "layers/attention/key/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/attention/out/kernel": ("layers", "heads", "head_dim", "embed"),
    "layers/attention/query/kernel": ("layers", "embed", "heads", "head_dim"),
    "layers/attention/value/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/attention_norm/scale": ("layers", "embed"),
    "layers/mlp/down/kernel": ("layers", "mlp", "embed"),
    "layers/mlp/gate/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/up/kernel": ("layers", "embed", "mlp"),
    "layers/mlp_norm/scale": ("layers", "embed"),
}


@pytest.fixture
def one_device():
    with mp.use_rules(mp.MeshSpec().build(jax.devices()[:1]), mp.ddp()):
        yield


def linen(cfg):
    return mp.from_linen(linen_decoder(cfg), jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype))


def forward(model, params, tokens=TOKENS, **kwargs):
    return jax.jit(lambda params, tokens: model.bind(params, {})(tokens, **kwargs))(params, tokens)


def loss_and_gradient(model, params, batch=BATCH):
    def loss(params):
        return mean_loss(model.bind(params, {}), jax.tree.map(jnp.asarray, batch))

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def attention_by_hand(cfg, w, h):
    """Compute attention for one example and one head at a time."""
    out = 0
    for head in range(cfg.num_heads):
        shared = head // (cfg.num_heads // cfg.num_kv_heads)
        q = by_hand.rotated(cfg, h @ w["query"]["kernel"][:, head])
        k = by_hand.rotated(cfg, h @ w["key"]["kernel"][:, shared])
        weights = by_hand.softmax_of_the_past(q @ k.T / np.sqrt(cfg.head_dim))
        out = out + weights @ (h @ w["value"]["kernel"][:, shared]) @ w["out"]["kernel"][head]
    return out


# --- values


@pytest.mark.parametrize(
    ("framework", "tied"),
    cases(("nnx", True), ("linen", False), grid=itertools.product(("nnx", "linen"), (False, True))),
)
def test_float64_equals_the_decoder_by_hand(one_device, framework, tied):
    with jax.enable_x64(True):
        cfg = CONFIG(param_dtype="float64", tied_embeddings=tied)
        params = random_params(cfg)
        logits = forward(cfg.build() if framework == "nnx" else linen(cfg), params)
        assert logits.dtype == jnp.float64
        expected = np.stack([by_hand.decoder(cfg, params, row, attention_by_hand) for row in TOKENS])
    # A computation in float32 would cause an error of 1e-7.
    np.testing.assert_allclose(logits, expected, rtol=1e-12, atol=1e-12)


def test_positions_count_by_their_distance(one_device):
    model, params = CONFIG().build(), random_params(CONFIG())
    row, counted = TOKENS[:1], np.arange(7)
    default = forward(model, params, row)[0]
    positions = jnp.asarray([counted, counted + 50, 2 * counted])
    same, moved, clear_context_mesh = forward(model, params, np.repeat(row, 3, axis=0), positions=positions)
    np.testing.assert_allclose(same, default, atol=1e-5)
    np.testing.assert_allclose(moved, default, atol=1e-4)
    assert np.abs(clear_context_mesh - default).max() > 1e-2


@pytest.mark.matrix
def test_remat_policies_recompute_the_expected_matmuls(one_device):
    model, params = CONFIG().build(), random_params(CONFIG())

    def gradient(params):
        return jax.grad(lambda p: mean_loss(model.bind(p, {}), BATCH)[0])(params)

    def matmuls(policy):
        # The policy is not part of the trace cache key, so each case needs a new function.
        with numerics(Precision(), policy):
            return num_dots(jax.make_jaxpr(lambda p: gradient(p))(params).jaxpr)

    again = {policy: matmuls(policy) - matmuls(None) for policy in REMAT_POLICIES}
    # Recomputed matmuls: eight of nine (no gradient needs the result of the last), two of attention, none, none.
    assert again == {"full": 8, "dots": 2, "all_dots": 0, "minimal": 0}


def test_mlp_saves_only_gate_and_up_for_its_backward_pass(one_device):
    config, x = CONFIG(), jax.ShapeDtypeStruct((2, 3, 16), np.float32)
    with nnx.use_eager_sharding(False):
        graph, params = nnx.split(nnx.eval_shape(lambda: MLP(config, rngs=nnx.Rngs(0))))

    def call(params, x):
        return nnx.merge(graph, params)(x)

    left = jax.eval_shape(lambda params, x: jax.vjp(call, params, x)[1], params, x)
    assert sum(leaf.shape == (2, 3, 20) for leaf in jax.tree.leaves(left)) == 2


@pytest.mark.matrix
def test_compute_follows_the_parameters(one_device):
    cfg = CONFIG()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(cfg))
    assert jax.eval_shape(lambda p: cfg.build().bind(p, {})(TOKENS), params).dtype == jnp.bfloat16
    (loss, _), gradient = loss_and_gradient(cfg.build(), params)
    assert loss.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}
    (exact, _), _ = loss_and_gradient(cfg.build(), random_params(cfg))
    # bfloat16 has eight bits of precision, and each of the three layers rounds a few times.
    np.testing.assert_allclose(loss, exact, rtol=0.02)


def test_initial_loss_of_a_deep_model_is_near_uniform(one_device):
    cfg = CONFIG(tied_embeddings=True, num_layers=30)

    @jax.jit
    def first_loss(key):
        return mean_loss(cfg.build().bind(*cfg.build().init(key)), BATCH)[0]

    # At any depth, initial logits have a variance of about 1, so the loss is half a nat above log(vocab_size).
    assert np.log(24) < first_loss(jax.random.key(0)) < np.log(24) + 1.2


# --- names and structure


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_leaves_have_logical_names(one_device, framework, tied):
    cfg = CONFIG(tied_embeddings=tied)
    model = cfg.build() if framework == "nnx" else linen(cfg)
    expected = {path: names for path, names in NAMES.items() if not tied or path != "head/kernel"}
    assert {leaf.path: leaf.names for leaf in model.leaves()} == expected


def test_error_of_indivisible_key_heads_names_all_rules():
    cfg = CONFIG(num_kv_heads=1, vocab_size=32)
    mesh, strategy = mp.MeshSpec(data=2, tensor=4).build(), mp.ddp() | mp.tensor_parallel()

    def init(strategy):
        return mp.init_state(cfg.build(), optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)

    with pytest.raises(mp.MeshparError, match=r"map `kv_heads` and `act_kv_heads` to None, .* for both"):
        init(strategy)
    for value in (None, mp.first("tensor", None)):
        changed = strategy | mp.Rules(kv_heads=value, act_kv_heads=value)
        with mp.use_rules(mesh, changed):
            logits = jax.eval_shape(init(changed).bound(), TOKENS)
        assert logits.shape == (2, 7, 32)


def test_layers_are_drawn_apart(one_device):
    for model in (CONFIG().build(), linen(CONFIG())):
        params, extra = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
        up = params["layers"]["mlp"]["up"]["kernel"]
        assert np.abs(up[0] - up[1]).max() > 0.1
        # The fan-in of a matrix does not count the dim of stacked layers.
        np.testing.assert_allclose(up.std(), 16**-0.5, rtol=0.15)
        np.testing.assert_allclose(params["layers"]["mlp"]["down"]["kernel"].std(), (20 * 6) ** -0.5, rtol=0.15)
        assert not jax.tree.leaves(extra)


def test_abstract_allocates_no_arrays():
    module = nnx.eval_shape(lambda: Transformer(CONFIG(embed_dim=2**20, mlp_dim=2**20), rngs=nnx.Rngs(0)))
    assert module.layers.mlp.up.kernel.shape == (3, 2**20, 2**20)


def num_equations(jaxpr):
    return sum(1 + sum(map(num_equations, jaxprs_in_params(e.params))) for e in jaxpr.eqns)


def num_dots(jaxpr):
    inner = sum(num_dots(sub) for e in jaxpr.eqns for sub in jaxprs_in_params(e.params))
    return inner + sum(e.primitive.name == "dot_general" for e in jaxpr.eqns)


def test_trace_does_not_grow_with_depth(one_device):
    sizes = []
    for num_layers in (4, 64):
        model = CONFIG(num_layers=num_layers).build()

        def loss(params, model=model):
            return mean_loss(model.bind(params, {}), BATCH)[0]

        sizes.append(num_equations(jax.make_jaxpr(jax.grad(loss))(model.abstract().params).jaxpr))
    assert sizes[0] == sizes[1] > 100


# --- compiled programs


def test_yarns_factor_of_rotations_multiplies_queries_and_keys(one_device):
    yarn = YarnScaling(factor=4.0, original_seq_len=4)
    factored, plain = CONFIG(rope_yarn=dataclasses.replace(yarn, rotated_factor=1.5)), CONFIG(rope_yarn=yarn)
    params = random_params(plain)
    larger = jax.tree.map(np.copy, params)
    for name in ("query", "key"):
        larger["layers"]["attention"][name]["kernel"] *= np.float32(1.5)
    found, expected = forward(factored.build(), params), forward(plain.build(), larger)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
