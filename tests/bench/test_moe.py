"""`meshpar bench moe`: its one-hot einsums are right, and what the report holds; no time is asserted."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import moe
from meshpar.bench import moe as bench
from meshpar.bench.moe import FORMS, ONE_HOT, LayerShape
from meshpar.cli import main as cli
from meshpar.moe import Routing
from meshpar.sharding.types import MeshparError
from tests.grid import cases

SHAPE = LayerShape(num_experts=8, tokens=16, top_k=2, width=8, hidden=12, num_ranks=2)


def swiglu(params, x):
    gate, up, down = params
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def value_and_grads(apply, x, weights, cotangent):
    """(y, dropped, gradients of the tokens and of all weights)."""

    def product(x, weights):
        y, dropped = apply(x, weights)
        return jnp.sum(y * cotangent), (y, dropped)

    grads, (y, dropped) = jax.jit(jax.grad(product, (0, 1), has_aux=True))(x, weights)
    return y, int(dropped), grads


def reference(x, weights, factor):
    """(y, choices dropped): every token through every expert; each device drops what it has no room for."""
    routing = Routing(num_experts=SHAPE.num_experts, top_k=SHAPE.top_k, capacity_factor=factor)
    flat = x.reshape(-1, SHAPE.width)
    routed = moe.route(flat @ weights.router, routing)
    room = moe.capacity(SHAPE.tokens, routing)
    counts = jax.vmap(lambda part: moe.count(part, SHAPE.num_experts))(
        routed.experts.reshape(SHAPE.num_ranks, -1, SHAPE.top_k)
    )
    params = weights.gate, weights.up, weights.down
    cut = {"capacity": room, "token_ranks": SHAPE.num_ranks}
    y = moe.reference.moe(flat, routed.experts, routed.weights, swiglu, params, **cut)
    return y.reshape(x.shape), jnp.sum(jnp.maximum(counts - room, 0))


@pytest.mark.parametrize("form", cases(ONE_HOT, grid=[ONE_HOT, "dropless"]))
def test_layers_are_equal_to_the_reference_drops_and_gradients_too(form):
    made = bench.layer(form, SHAPE)
    x, weights, cotangent = bench.arrays(SHAPE, made.mesh)
    y, dropped, grads = value_and_grads(made.apply, x, weights, cotangent)
    given = jax.device_get((x, weights, cotangent))
    factor = bench.FACTOR if form == ONE_HOT else None
    expected, over, expected_grads = value_and_grads(lambda x, w: reference(x, w, factor), *given)
    assert dropped == over
    assert (dropped > 0) == (form == ONE_HOT)
    for one, other in zip(jax.tree.leaves((y, grads)), jax.tree.leaves((expected, expected_grads)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * max(1.0, float(np.abs(other).max())))


@pytest.mark.matrix
def test_a_layer_of_every_form_is_traced():
    shape = SHAPE._replace(num_ranks=8)
    for form in FORMS:
        made = bench.layer(form, shape)
        x, weights, _ = bench.arrays(shape, made.mesh, abstract=True)
        y, dropped = jax.eval_shape(made.apply, x, weights)
        assert (y.shape, dropped.shape) == (x.shape, ())
    assert {tuple(bench.layer(form, shape).mesh.shape.items()) for form in bench.PAIRED} == {
        (("outer", 2), ("inner", 4))
    }


def test_closed_forms_of_a_layer():
    """Three matmuls, each with two gradients; the router's likewise."""
    tokens = 2 * 16
    assert SHAPE.dense_flops == 3 * 3 * 2 * tokens * 8 * 8 * 12
    assert SHAPE.routed_flops == SHAPE.dense_flops * 2 / 8 + 3 * 2 * tokens * 8 * 8
    assert SHAPE.whole_bytes == 4 * tokens * 8 * 8


def measured(*num_experts):
    small = {"tokens": 16, "width": 8, "hidden": 12, "repeats": 2, "num_experts": num_experts}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "COUNTED_TOKENS", 256)
        return bench.layers(forms=(ONE_HOT, "dropless"), **small)


@pytest.mark.matrix
def test_a_report_of_layers():
    found = measured(8, 16)
    assert [(row.form, row.num_experts) for row in found.rows] == [
        (form, num) for num in (8, 16) for form in (ONE_HOT, "dropless")
    ]
    for row in found.rows:
        assert 0 < row.forward.low_s <= row.forward.median_s <= row.forward.high_s
        assert row.forward.ratio == 1.0 if row.form == ONE_HOT else row.both.ratio > 0
        assert 0 < row.largest_bytes <= row.temporary_bytes
        assert (row.dropped == 0) >= (row.form == "dropless")
    limits = {measure.name: measure.limit for measure in found.measures}
    assert limits[f"dropless ÷ {ONE_HOT}, 16 experts, forward"] == 1.0
    assert limits[f"dropless ÷ {ONE_HOT}, 8 experts, forward and backward"] is None
    counted = [measure for measure in found.measures if measure.name.startswith(("FLOPs", "largest"))]
    assert [measure.unit for measure in counted] == ["×"] * 4
    assert all(1 < measure.value < 1.5 for measure in counted if measure.name.startswith("FLOPs"))  # tiny, so padded


@pytest.mark.matrix
def test_a_report_is_data_and_tables(capsys):
    found = measured(16)
    told = json.loads(json.dumps(found.to_json()))
    assert (told["ranks"], told["tokens"], told["repeats"]) == (8, 16, 2)
    assert told["rows"][1]["forward"]["ratio"] == found.rows[1].forward.ratio
    assert len(told["measures"]) == len(found.measures)
    cli.print_report(found, as_json=False)
    printed = capsys.readouterr().out
    assert "an MoE layer: ranks 8, tokens 16, top k 2, width 8, hidden 12; 2 repeats" in printed
    assert f"dropless ÷ {ONE_HOT}, 16 experts, forward" in printed


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"forms": ("droples",)}, "did you mean `dropless`"),
        ({"num_experts": (12,)}, "12 experts, 2 a token, on 8 devices.*a multiple of 8"),
        ({"top_k": 16, "num_experts": (8,)}, "no less than 16"),
        ({"repeats": 0}, "0 times"),
    ],
)
def test_what_cannot_be_measured_is_told_first(changes, says):
    with pytest.raises(MeshparError, match=says):
        bench.layers(**changes)
