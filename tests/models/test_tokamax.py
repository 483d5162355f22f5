"""Values and gradients of attention="tokamax" under each strategy, and its kernels in GPU programs."""

from __future__ import annotations

import functools
import importlib.machinery
import itertools
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.collectives import flash
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.timeline import program_work as work
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.models.attention import causal_attention
from tests.grid import cases
from tests.models.test_attention_forms import MESHES, ROWS, after_a_step, assert_equal, config, packed

GIVEN = {"alone": {}, "window": {"window": 5}, "cap": {"cap": 3.0}, "both": {"window": 5, "cap": 3.0}}


@pytest.fixture
def real(monkeypatch):
    """Use the real package with its memory-linear implementation for CPUs instead of its GPU kernels."""
    reason = "needs Python 3.12 or newer and `pip install tokamax`"
    monkeypatch.setattr(flash, "KERNELS", ("xla_chunked",))
    return pytest.importorskip("tokamax", reason=reason)


@pytest.fixture
def fake(monkeypatch):
    """Use a substitute with the interface of tokamax, whose arithmetic does not track values that vary over a mesh."""
    module = types.ModuleType("tokamax")
    module.__spec__ = importlib.machinery.ModuleSpec("tokamax", None)
    module.given = set()

    def attention(q, k, v, *, mask, scale, is_causal, logits_soft_cap, local_window_size, implementation):
        assert is_causal
        assert implementation == ("mosaic", "triton")
        assert not any(jax.typeof(x).manual_axis_type.varying for x in (q, k, v))
        module.given.add((q.shape[2], k.shape[2]))
        ahead = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
        seen = (ahead >= 0) & (ahead <= (math.inf if local_window_size is None else local_window_size[0]))
        seen = seen if mask is None else seen & mask
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
        scores = scores if logits_soft_cap is None else logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    module.dot_product_attention = attention
    monkeypatch.setitem(sys.modules, "tokamax", module)
    return module


@pytest.mark.parametrize(
    ("given", "is_packed", "width"),
    cases(("both", True, 16), ("alone", False, 8), grid=itertools.product(GIVEN, (False, True), (8, 16))),
)
def test_real_tokamax_matches_plain_attention(real, given, is_packed, width):
    """There are two query heads per key head. Values have the width of keys or half of it."""
    rng, found = np.random.default_rng(0), {}
    draw = lambda heads, width: jnp.asarray(rng.normal(size=(2, 33, heads, width)), jnp.float32)  # noqa: E731
    q, k, v, cotangent = draw(4, 16), draw(2, 16), draw(2, width), draw(4, width)
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, 33)), axis=1)) if is_packed else None
    for form in ("xla", "tokamax"):
        attention = functools.partial(causal_attention, implementation=form, **GIVEN[given])
        o, pull = jax.vjp(lambda q, k, v, attention=attention: attention(q, k, v, segments), q, k, v)
        found[form] = (o, *pull(cotangent))
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("case", cases(grid=[one for one in MESHES if one != "ring"]))
def test_step_with_tokamax_equals_a_single_device(fake, case):
    expected = after_a_step(config(), MESHES["one"], packed())
    assert_equal(after_a_step(config(attention="tokamax"), MESHES[case], packed()), expected)
    assert fake.given == {(4, 2) if case == "one" else (1, 1) if case in ("keys whole", "by heads") else (2, 1)}


def test_ring_attention_with_tokamax_is_an_error():
    with pytest.raises(mp.MeshparError, match='attention="tokamax".*use ring attention.*log-sum-exp.*"blockwise"'):
        after_a_step(config(attention="tokamax"), MESHES["ring"], packed())


def test_missing_tokamax_is_an_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(mp.MeshparError, match="attend with float32.*not installed.*pip install.*blockwise"):
        causal_attention(q, q, q, implementation="tokamax")


def test_real_tokamax_without_kernel_is_an_error(real, monkeypatch):
    monkeypatch.undo()
    q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(mp.MeshparError, match=r"attend with bfloat16\[1, 4, 2, 8\].*ot supported.*blockwise"):
        causal_attention(q, q, q, implementation="tokamax")


def test_its_kernels_are_counted():
    """Two matmuls in the forward kernel, three in the kernel for queries, four in that for keys and values."""
    program = """HloModule step

ENTRY %main (q: bf16[64,8,16], k: bf16[64,2,16], m: f32[8,64]) -> bf16[64,8,16] {
  %q = bf16[64,8,16]{2,1,0} parameter(0)
  %k = bf16[64,2,16]{2,1,0} parameter(1)
  %m = f32[8,64]{1,0} parameter(2)
  %o = (bf16[64,8,16]{2,1,0}, f32[8,64]{1,0}) custom-call(%q, %k, %k), CALL
  %kv = (bf16[64,2,16]{2,1,0}, bf16[64,2,16]{2,1,0}) custom-call(%q, %k, %k, %q, %m), CALL
  ROOT %dq = bf16[64,8,16]{2,1,0} custom-call(%q, %k, %k, %q, %m), CALL
}
"""
    call = f'custom_call_target="mosaic_gpu_v2", metadata={{op_name="a/jvp({flash.SCOPE}100)/b"}}'
    assert work.flops_per_step(hlo.parse(program.replace("CALL", call))) == 100 * (2 + 4 + 3)
    assert work.flops_per_step(hlo.parse(program.replace("CALL", call.replace(flash.SCOPE, "")))) == 0


@pytest.mark.pod
@pytest.mark.parametrize(
    ("remat", "is_packed", "calls"), [("minimal", False, 6), pytest.param("full", True, 8, marks=pytest.mark.matrix)]
)
def test_explain_finds_the_tokamax_kernels(pod, remat, is_packed, calls):
    """Each of two layers has one forward and two backward kernels. With remat="full" the first runs twice."""
    pytest.importorskip("tokamax", reason="needs Python 3.12 or newer and `pip install tokamax`")
    cfg = TransformerConfig(
        vocab_size=256, num_layers=2, embed_dim=512, num_heads=8, num_kv_heads=2, head_dim=64, mlp_dim=512,
        attention="tokamax",
    )  # fmt: skip
    precision, mesh = mp.Precision(compute="bfloat16"), mp.MeshSpec(fsdp=4, tensor=2).abstract()
    state = mp.abstract_state(
        cfg.build(), optax.sgd(1e-3), mesh=mesh, strategy=mp.fsdp() | mp.tensor_parallel(), precision=precision
    )
    batch = {name: jax.ShapeDtypeStruct((ROWS, 512), np.int32) for name in ("inputs", "targets")}
    batch |= {"segments": batch["inputs"]} if is_packed else {}
    step = mp.train_step(next_token_loss, precision=precision, remat=remat)
    report = mp.explain(step, state, batch, "h100:1x8", pod=pod, advise=False)
    assert report.compute.library_calls == {"mosaic_gpu_v2": calls}
    assert not report.matching.unexpected
    assert not report.matching.missing
    assert report.compute.ratio == pytest.approx(1.05 if remat == "minimal" else 1.37, abs=0.05)
