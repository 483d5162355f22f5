"""Collectives of each strategy: closed forms against programs for eight H100s and eight CPU devices."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.inspect.census import census
from meshpar.inspect.explain import check_collectives
from meshpar.inspect.matching import SMALL
from meshpar.inspect.program import compile_here
from meshpar.models import LatentAttention, TransformerConfig, next_token_loss
from meshpar.parallel.execution import Execution, Weight
from meshpar.parallel.expected.params import gathered
from meshpar.sharding.jaxprs import equations
from meshpar.training.gradients.selection import describe
from tests.grid import cases
from tests.inspect.saved import pods

# Sizes of the small decoder in `planted.py`. A test compares them.
L, D, F, V = 4, 256, 768, 80
B, T = 16, 64
LAYER = 4 * D * D + 3 * D * F + 2 * D
"""Parameters of a layer: query, key, value and out; gate, up and down; two norms."""
REST = 2 * V * D + D
"""Parameters of the embedding, the head and the final norm."""
ALL = L * LAYER + REST
LAYER_LEAVES, OTHER_LEAVES = 9, 3
LEAVES = L * LAYER_LEAVES + OTHER_LEAVES
BF16, F32 = 2, 4

CASES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "tensor", "sequence", "fsdp_tensor", "fsdp_sequence")
EXTRA = ("two_axes", "data_tensor")
"""Cases that are compiled in `make test-rest` only."""


def ring(n: int) -> float:
    """Return the fraction of a payload that a device sends in a gather or scatter over n devices."""
    return (n - 1) / n


def closed_form(case: str, *, on_cpu: bool) -> dict[tuple[str, str], tuple[int, float]]:
    """Return (axes, kind) -> (arrays per step, bytes sent by a device per step).

    XLA:CPU sends float32 instead of bfloat16, and all-reduces instead of reduce-scatters (twice the bytes). It reduces
    each gradient of a shared input (three in attention, two in the MLP) instead of their sum.
    """
    compute = F32 if on_cpu else BF16
    scatter = 2 if on_cpu else 1
    n = 8
    if case == "ddp":
        return {("data", "all-reduce"): (LEAVES, 2 * ring(n) * F32 * ALL)}
    if case in ("zero1", "zero2"):
        return {
            ("fsdp", "reduce-scatter"): (LEAVES, scatter * ring(n) * F32 * ALL),
            ("fsdp", "all-gather"): (LEAVES, ring(n) * F32 * ALL),
        }
    # Outside the loop over layers the backward pass reuses the gathered weights. XLA:CPU gathers the scale of the final
    # norm again.
    gathers = 2 * L * LAYER_LEAVES + OTHER_LEAVES + on_cpu
    gathered = compute * (2 * L * LAYER + REST + D * on_cpu)
    if case in ("zero3", "two_axes"):
        label = "fsdp" if case == "zero3" else "data*fsdp"
        return {
            (label, "all-gather"): (gathers, ring(n) * gathered),
            (label, "reduce-scatter"): (LEAVES, scatter * ring(n) * F32 * ALL),
        }
    if case == "hsdp" and not on_cpu:
        return {
            ("fsdp", "all-gather"): (gathers, ring(4) * gathered),
            ("fsdp", "reduce-scatter"): (LEAVES, ring(4) * F32 * ALL),
            ("data", "all-reduce"): (LEAVES, 2 * ring(2) * F32 * ALL / 4),
        }
    if case == "hsdp":
        # Gradients of embedding and norms are reduced over both axes in a single all-reduce.
        once = V * D + D + 2 * L * D
        return {
            ("fsdp", "all-gather"): (gathers, ring(4) * gathered),
            ("fsdp", "reduce-scatter"): (LEAVES - 2 - 2 * L, 2 * ring(4) * F32 * (ALL - once)),
            ("data", "all-reduce"): (LEAVES - 2 - 2 * L, 2 * ring(2) * F32 * (ALL - once) / 4),
            ("data*fsdp", "all-reduce"): (2 + 2 * L, 2 * ring(8) * F32 * once),
        }
    ways, rows = (8, B) if case in ("tensor", "sequence") else (2, B // 4)
    activation, token = compute * rows * T * D, F32 * rows * T
    forward, backward = 2 * L + 1, (5 * L if on_cpu else 2 * L) + 1
    norms = (2 * L + 1) * D
    found: dict[tuple[str, str], tuple[int, float]] = {}
    if "sequence" not in case:
        # Two per layer and pass (g and f of Megatron-LM), the output of the embedding, and the gradient of the head's
        # input. The loss over a sharded vocabulary has three scalars per token.
        sums = forward + backward
        found["tensor", "all-reduce"] = (sums + 3, 2 * ring(ways) * (sums * activation + 3 * token))
    else:
        # Each all-reduce becomes a scatter and a gather, except that of the embedding lookup.
        small = 2 * ring(ways) * (activation + 3 * token)
        split = ring(4) if case.startswith("fsdp") else 0
        norm_bytes = 2 * ring(ways) * F32 * norms / (4 if split and not on_cpu else 1)
        reduces, reduced = 1 + 3 + len_norms(), small + norm_bytes
        scatters = forward - 1 + 2 * L + 1
        if on_cpu:  # sums of several gradients are not scattered
            scatters -= 2 * L
            reduces += 5 * L
            reduced += 2 * ring(ways) * 5 * L * activation
        found["tensor", "all-reduce"] = (reduces, reduced)
        found["tensor", "reduce-scatter"] = (scatters, scatter * ring(ways) * scatters * activation)
        found["tensor", "all-gather"] = (4 * L + 2, ring(ways) * (4 * L + 2) * activation)
    # Weights that are sharded over `tensor` have half the bytes.
    halved, whole = L * (LAYER - 2 * D) + 2 * V * D, norms
    if case == "data_tensor":
        found["data", "all-reduce"] = (LEAVES, 2 * ring(4) * F32 * (halved / 2 + whole))
    if case.startswith("fsdp"):
        twice = compute * (2 * L * ((LAYER - 2 * D) / 2 + 2 * D) + V * D + D + D * on_cpu)
        found["fsdp", "all-gather"] = (gathers, ring(4) * twice)
        found["fsdp", "reduce-scatter"] = (LEAVES, scatter * ring(4) * F32 * (halved / 2 + whole))
    return found


def len_norms() -> int:
    """Return the number of norm scales, whose gradients are partial sums if the sequence is sharded."""
    return 2 * L + 1


TABLE = [
    *cases(("fsdp_sequence", "cpu"), grid=[(case, "cpu") for case in (*CASES, *EXTRA)]),
    *pods((*CASES, *EXTRA), "pod"),
]


def batch_of(rows=B):
    return {name: jax.ShapeDtypeStruct((rows, T), np.int32) for name in ("inputs", "targets")}


def verdict(setup, options, collectives, jaxpr, target, batch=None):
    execution = dataclasses.replace(describe(setup, options, batch or batch_of()), on_cpu=target == "cpu")
    return check_collectives(setup, execution, collectives, jaxpr)


def assert_matches(result):
    """Check that no collective is missing or unexpected."""
    assert result.missing == result.unexpected == (), str(result)


def test_sizes_are_those_of_the_small_decoder(planted):
    cfg = planted.CONFIG
    assert (cfg.num_layers, cfg.embed_dim, cfg.mlp_dim, cfg.vocab_size) == (L, D, F, V)
    assert cfg.num_params == ALL
    assert (planted.ROWS, planted.SEQ) == (B, T)
    assert set(planted.REFERENCE) == {*CASES, *EXTRA}


@pytest.mark.parametrize(("case", "target"), TABLE)
def test_strategies_send_the_bytes_of_the_closed_forms(read, case, target):
    """Compare kinds, counts, and bytes up to 1 %."""
    setup, options, collectives, _ = read(case, target)
    found = verdict(setup, options, collectives, None, target)
    assert_matches(found)
    expected = closed_form(case, on_cpu=target == "cpu")
    counts, sent = {}, {}
    for line in found.matched:
        key = "*".join(line.axes), line.kind
        counts[key] = counts.get(key, 0) + line.actual_count
        sent[key] = sent.get(key, 0.0) + line.actual_bytes
        assert line.count[0] <= line.actual_count <= line.count[1]
        factor = 2 if (line.kind, line.lowered_as) == ("reduce-scatter", "all-reduce") else 1
        assert line.actual_bytes == pytest.approx(factor * line.bytes_sent_per_device, rel=0.01), line
    if case == "fsdp_sequence" and ("fsdp*tensor", "all-reduce") in counts:
        # Older GPU compilers do not scatter arrays as small as the scale of a norm: they all-reduce it over both axes.
        assert counts.pop(("fsdp*tensor", "all-reduce")) == len_norms()
        assert sent.pop(("fsdp*tensor", "all-reduce")) <= 2 * F32 * len_norms() * D
        scales = F32 * len_norms() * D
        sent["fsdp", "reduce-scatter"] += ring(4) * scales
        sent["tensor", "all-reduce"] += 2 * ring(2) * scales / 4
        counts["fsdp", "reduce-scatter"] += len_norms()
        counts["tensor", "all-reduce"] += len_norms()
    assert counts == {key: count for key, (count, _) in expected.items()}
    for key, (_, expected_bytes) in expected.items():
        assert sent[key] == pytest.approx(expected_bytes, rel=0.01), key
    # All collectives are compared, except scalars such as the loss.
    total = sum(one.bytes_sent_per_step for one in collectives)
    assert sum(line.actual_bytes for line in (*found.matched, *found.small)) == pytest.approx(total)
    assert all(line.bytes_sent_per_device / line.actual_count <= 2 * F32 * SMALL for line in found.small)


OPTIONS = {
    "accumulate each": {"accumulate": 2},
    "as many micro-steps as layers": {"accumulate": L},
    "accumulate once": {"accumulate": 2, "reduce_gradients": "once"},
    "remat full": {"remat": "full"},
    "remat dots": {"remat": "dots"},
}


OPTION_CASES = [
    ("zero1", "accumulate each"), ("fsdp_tensor", "as many micro-steps as layers"), ("fsdp_sequence", "remat full"),
    ("ddp", "accumulate each"), ("zero1", "remat dots"), ("zero3", "accumulate once"), ("hsdp", "remat full"),
    ("hsdp", "accumulate once"),
    ("fsdp_tensor", "accumulate once"), ("fsdp_sequence", "remat dots"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "options", "target"),
    [
        ("fsdp_sequence", "accumulate once", "cpu"),
        *(pytest.param(*case, "cpu", marks=pytest.mark.matrix) for case in OPTION_CASES),
        *(pytest.param(*case, "pod", marks=(pytest.mark.matrix, pytest.mark.pod)) for case in OPTION_CASES[3:]),
    ],
)
def test_step_options_change_the_expected_collectives(read, case, options, target):
    assert_matches(verdict(*read(case, target, **OPTIONS[options]), target))


@pytest.mark.matrix
def test_each_micro_step_reduces_and_gathers(compiled):
    """Each of the two micro-steps reduces gradients.

    Micro-steps have few tokens, so they fetch rows of the embedding, which `once` gathers instead.
    """

    def verdict_of(mode):
        plant, program = compiled("zero3", "cpu", accumulate=2, reduce_gradients=mode)
        jaxpr = plant.step.trace(plant.state, plant.batch).jaxpr
        found = census(program.module, plant.mesh)
        return verdict(plant.state.setup, plant.step.options, found, jaxpr, "cpu", plant.batch)

    def sent(found, kind):
        lines = [line for line in found.matched if line.kind == kind]
        assert all(line.count[0] <= line.actual_count <= line.count[1] for line in lines)
        return sum(line.actual_count for line in lines)

    each, once = verdict_of("each_microbatch"), verdict_of("once")
    assert sent(each, "reduce-scatter") == 2 * (sent(once, "reduce-scatter") - 1) == 2 * (LEAVES - 1)
    assert sent(each, "all-gather") > 3 * L * LAYER_LEAVES
    assert sent(once, "all-gather") == LEAVES


LATENT = LatentAttention(q_rank=128, kv_rank=96, nope_dim=32, rope_dim=16, v_dim=40)
VARIANTS = {
    "tied": {"tied_embeddings": True},
    "grouped query": {"num_kv_heads": 2},
    "latent": {"latent": LATENT, "head_dim": LATENT.head_dim},
    "latent, whole queries": {"latent": dataclasses.replace(LATENT, q_rank=None), "head_dim": LATENT.head_dim},
}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "variant"), [("fsdp_tensor", "latent"), *(("fsdp_sequence", one) for one in VARIANTS)]
)
def test_decoder_variants_change_the_expected_collectives(planted, case, variant):
    config = dataclasses.replace(planted.CONFIG, **VARIANTS[variant])
    plant = dataclasses.replace(planted.reference(case), model=config.build()).on_cpu
    program = compile_here(plant.step.trace(plant.state, plant.batch))
    assert_matches(verdict(plant.state.setup, plant.step.options, census(program.module, plant.mesh), None, "cpu"))


def replicated_heads(mesh, **strategy):
    """Return the state of a decoder with two key heads on four ranks of `tensor`."""
    heads = mp.Rules(kv_heads=None)
    layout = mp.custom(params=heads, grads=heads, optimizer=heads, activations=mp.Rules(act_kv_heads=None))
    strategy = mp.fsdp(min_bytes=0) | mp.tensor_parallel(**strategy) | layout
    return mp.init_state(GROUPED.build(), optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)


GROUPED = TransformerConfig(
    vocab_size=64, num_layers=2, embed_dim=64, num_heads=8, num_kv_heads=2, head_dim=16, mlp_dim=128
)


@pytest.mark.matrix
@pytest.mark.parametrize("sequence", [False, True])
def test_replicated_key_heads_are_gathered_and_scattered_like_other_weights(sequence):
    """XLA would exchange parts of the key weights and of their gradients over `tensor`."""
    state = replicated_heads(mp.MeshSpec(fsdp=2, tensor=4).build(), sequence=sequence)
    step, rng = mp.train_step(next_token_loss), np.random.default_rng(0)
    batch = {name: rng.integers(0, 64, (16, 64)).astype(np.int32) for name in ("inputs", "targets")}
    assert_matches(mp.explain(step, state, batch).matching)
    alone = replicated_heads(mp.MeshSpec().build(jax.devices()[:1]))
    (after, _), (expected, _) = step(state, batch), step(alone, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), after.params, expected.params)


def test_weights_of_replicated_key_heads_are_constrained():
    """The forward and the backward pass gather a key weight and a value weight, and constrain their gradients."""
    state = replicated_heads(mp.MeshSpec(fsdp=2, tensor=4).build())
    batch = {name: jax.ShapeDtypeStruct((16, 64), np.int32) for name in ("inputs", "targets")}
    jaxpr = mp.train_step(next_token_loss).trace(state, batch).jaxpr.jaxpr
    constrained = [
        eqn
        for eqn, _ in equations(jaxpr)
        if eqn.primitive.name == "sharding_constraint" and eqn.outvars[0].aval.shape == (64, 2, 16)
    ]
    assert len(constrained) == 2 * 3
    assert all(not any(eqn.params["sharding"].spec) for eqn in constrained)


UNEXPECTED = {
    # Kind, axes and module of the largest unexpected collective of each mistake.
    "gathered_activation": ("all-gather", ("fsdp",), "gradients/layers/order"),
    "whole_batch": ("all-gather", ("fsdp",), "gradients/layers/mlp"),
    "reshaped_batch": ("all-reduce", ("data",), "gradients/micro_steps/layers/mlp"),
    "names_in_wrong_order": ("all-gather", ("fsdp",), "gradients/layers/mlp"),
    "wrong_name": ("all-gather", ("tensor",), "gradients/layers/mlp"),
    "float32_weights": ("all-reduce", ("fsdp",), "gradients/layers/mlp"),
    "whole_heads": ("all-gather", ("tensor",), "gradients/layers/attention"),
}


@pytest.mark.parametrize("name", pods(UNEXPECTED))
def test_planted_mistakes_are_unexpected_in_their_module(read, planted, name):
    found = verdict(*read(name, "pod"), "pod").unexpected
    dearest = found[0]
    kind, axes, place = UNEXPECTED[name]
    assert (dearest.kind, dearest.axes) == (kind, axes)
    # If the compiler moved a combined gather to the slice of the loop, its name contains only an outer module.
    assert f"{place}/".startswith(f"{dearest.module}/")
    assert place in {one.module for one in found}
    assert dearest.source.startswith(f"{planted.__file__}:")
    assert dearest.bytes_sent_per_device == max(one.bytes_sent_per_device for one in found)
    assert dearest.fix
    if name == "names_in_wrong_order":
        assert "all-to-all" in {one.kind for one in found}


@pytest.mark.parametrize("name", pods(["nothing", "replicated_embedding", "tensor_over_nodes", "idle_axis"]))
def test_expected_plants_have_no_unexpected_collectives(read, name):
    assert_matches(verdict(*read(name, "pod"), "pod"))


def test_collectives_of_kernels_are_matched_with_the_jaxpr(read):
    found = verdict(*read("sliced_all_reduce", "pod"), "pod")
    assert not found.unexpected
    assert {line.kind for line in found.kernels} >= {"all-reduce"}


def test_program_of_another_strategy_has_unexpected_collectives(read, planted):
    """In a ddp program, the gathers of zero3 are missing and the all-reduces of gradients are unexpected."""
    plant = planted.reference("zero3")
    setup, options = plant.state.setup, plant.step.options
    _, _, collectives, _ = read("ddp", "pod")
    moved = tuple(dataclasses.replace(one, axes=("fsdp",)) for one in collectives)
    found = verdict(setup, options, moved, None, "pod")
    assert {(line.role, line.kind) for line in found.missing} >= {
        ("weights before use", "all-gather"),
        ("gradients", "reduce-scatter"),
    }
    assert {one.kind for one in found.unexpected} == {"all-reduce"}
    assert any("scattered" in one.fix for one in found.unexpected)


def test_nothing_is_expected_on_one_device(planted):
    mesh = mp.MeshSpec().abstract()
    state = mp.abstract_state(planted.CONFIG.build(), optax.adam(1e-3), mesh=mesh, strategy=mp.ddp())
    execution = mp.train_step(next_token_loss).describe(state, batch_of())
    assert state.setup.strategy.expected_collectives(execution) == ()


def mlp(num_blocks=2, width=64, hidden=128):
    """Return blocks without logical names, with a column- and a row-parallel weight sharded by path rules."""

    def init(key):
        shapes = {"up": (width, hidden), "down": (hidden, width)}
        return {
            f"block_{at}": {
                name: {"kernel": jax.random.normal(jax.random.fold_in(key, at), shape) / 10}
                for name, shape in shapes.items()
            }
            for at in range(num_blocks)
        }

    def apply(params, x):
        for block in params.values():
            x = x + jax.nn.gelu(x @ block["up"]["kernel"]) @ block["down"]["kernel"]
        return x

    return mp.from_functions(init, apply)


def test_plain_functions_have_expected_collectives():
    strategy = mp.ddp() | mp.Rules(
        paths={r".*/up/kernel": mp.names(None, "mlp"), r".*/down/kernel": mp.names("mlp", None)}, mlp="tensor"
    )
    mesh = mp.MeshSpec(data=4, tensor=2).build()
    state = mp.abstract_state(mlp(), optax.adam(1e-3), mesh=mesh, strategy=strategy)
    step = mp.train_step(lambda model, batch, key: ((model(batch["x"]) ** 2).mean(), {}))
    batch = {"x": jax.ShapeDtypeStruct((32, 64), np.float32)}
    program = compile_here(step.trace(state, batch))
    found = verdict(state.setup, step.options, census(program.module, mesh), None, "cpu", batch)
    assert not found.unexpected
    assert {(line.role, line.axes) for line in found.matched} >= {("gradients", ("data",))}


def test_json_has_plain_data(read):
    found = verdict(*read("hsdp", "cpu"), "cpu").to_json()
    assert json.loads(json.dumps(found)) == found
    assert found.keys() >= {"matched", "missing", "unexpected", "kernels"}


def explained(model, loss, batch, axes, strategy, tx=None):
    """The matching of a small model's step on local CPU devices."""
    mesh = mp.MeshSpec(**axes).build()
    state = mp.abstract_state(model, tx or optax.adam(1e-3), mesh=mesh, strategy=strategy)
    return mp.explain(mp.train_step(loss), state, batch).matching


def squares(model, batch, key):
    return (model(batch["x"]) ** 2).mean(), {}


def two_matmuls(apply, **names):
    draw = jax.random.normal
    return mp.from_functions(lambda key: {"a": draw(key, (96, 320)), "b": draw(key, (320, 96))}, apply, **names)


@pytest.mark.parametrize(
    ("strategy", "axes"),
    cases((mp.zero1(min_bytes=0), {"fsdp": 8}), grid=[(mp.ddp(), {"data": 8}), (mp.zero1(min_bytes=0), {"fsdp": 8})]),
    ids=str,
)
def test_layers_of_a_scan_need_no_names(strategy, axes):
    def apply(params, x):
        return jax.lax.scan(lambda h, w: (jax.numpy.tanh(h @ w), None), x @ params["in"], params["w"])[0]

    model = mp.from_functions(
        lambda key: {"in": jax.random.normal(key, (96, 128)), "w": jax.random.normal(key, (3, 128, 128))}, apply
    )
    found = explained(model, squares, {"x": np.ones((64, 96), np.float32)}, axes, strategy)
    assert_matches(found)
    gradients = [line for line in found.matched if line.role == "gradients"]
    assert sum(line.actual_count for line in gradients) == 1 + 3


def test_bytes_are_no_tokens():
    names = {"names": {"a": ("embed", "mlp"), "b": ("mlp", "embed")}}
    model = two_matmuls(lambda p, x: jax.numpy.tanh(x.reshape(-1, 96) / 255.0 @ p["a"]) @ p["b"], **names)
    images = {"x": np.zeros((256, 4, 8, 3), np.uint8)}
    found = explained(model, squares, images, {"data": 2, "tensor": 4}, mp.ddp() | mp.tensor_parallel())
    assert_matches(found)
    assert "partial sums, forward" in {line.role for line in found.matched}


def test_statistics_of_a_batch_are_expected():
    def apply(params, x):
        h = x @ params["a"]
        return jax.nn.relu((h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-5)) @ params["b"]

    found = explained(two_matmuls(apply), squares, {"x": np.ones((64, 96), np.float32)}, {"data": 8}, mp.ddp())
    assert not found.unexpected
    statistics = [line for line in found.matched if line.role == "examples that the loss combines"]
    assert [(line.kind, line.axes) for line in statistics] == [("all-reduce", ("data",))]


@pytest.mark.matrix
def test_reductions_of_optimizer_vectors_are_expected():
    model = two_matmuls(lambda p, x: jax.numpy.tanh(mp.constrain(x, "batch", None) @ p["a"]) @ p["b"],
                        names={"a": ("embed", "mlp"), "b": ("mlp", "embed")})  # fmt: skip
    batch = {"x": np.ones((2048, 96), np.float32)}
    factored = optax.adafactor(1e-3, min_dim_size_to_factor=32)
    assert not explained(model, squares, batch, {"fsdp": 8}, mp.fsdp(), factored).unexpected
    whole = explained(model, squares, batch, {"fsdp": 8}, mp.fsdp(), optax.contrib.muon(1e-3)).unexpected
    assert whole
    assert all("optimizer" in one.fix for one in whole)


@pytest.mark.pod
def test_unexpected_dtype_of_a_reduction_is_a_finding(pod):
    """A matmul without `mp` helpers reduces gradients in the compute dtype instead of the requested dtype."""
    model = two_matmuls(lambda p, x: jax.numpy.tanh(x.astype("bfloat16") @ p["a"]) @ p["b"])
    mesh = mp.MeshSpec(data=8).abstract()
    state = mp.abstract_state(model, optax.adam(1e-3), mesh=mesh, strategy=mp.ddp())
    step = mp.train_step(squares, precision=mp.Precision(compute="bfloat16"))
    batch = {"x": np.ones((2048, 96), np.float32)}
    found = mp.explain(step, state, batch, "h100:1x8", pod=pod)
    (line,) = found.matching.matched
    assert (line.dtype, line.actual_dtypes) == ("f32", ("bf16",))
    (finding,) = [one for one in found.findings if one.rule == "other-dtype"]
    assert "bf16" in finding.message
    assert "f32" in finding.message
    assert "dot_general" in finding.fix


@pytest.mark.pod
def test_float32_modules_send_twice_the_expected_bytes(pod):
    """The finding recommends a module dtype of bfloat16."""

    def apply(p, x):
        hidden = mp.constrain(jax.numpy.tanh(x @ p["a"].astype("float32")), "batch", "act_mlp")
        return mp.constrain(hidden @ p["b"].astype("float32"), "batch", "act_embed")

    model = two_matmuls(apply, names={"a": ("embed", "mlp"), "b": ("mlp", "embed")})
    mesh = mp.MeshSpec(tensor=8).abstract()
    state = mp.abstract_state(model, optax.adam(1e-3), mesh=mesh, strategy=mp.tensor_parallel())
    step = mp.train_step(squares, precision=mp.Precision(compute="bfloat16"))
    found = mp.explain(step, state, {"x": np.ones((2048, 96), np.float32)}, "h100:1x8", pod=pod)
    (line,) = [one for one in found.matching.matched if one.role == "partial sums, forward"]
    assert (line.dtype, line.actual_dtypes) == ("bf16", ("f32",))
    assert 2 * line.bytes_sent_per_device == line.actual_bytes > 0
    (finding,) = [one for one in found.findings if one.rule == "other-dtype"]
    assert "build the model's modules with dtype=bfloat16" in finding.fix


def test_bias_of_a_stack_may_be_gathered_once():
    shapes = {"w/kernel": (3, 64, 64), "w/bias": (3, 64)}
    model = mp.from_functions(
        lambda key: {"w": {name[2:]: jax.numpy.zeros(shape) for name, shape in shapes.items()}}, lambda p, x: x,
        names={"w/kernel": ("layers", "embed", "mlp"), "w/bias": ("layers", "embed")},
    )  # fmt: skip
    table = mp.shardings(model, mp.MeshSpec(fsdp=8).abstract(), mp.fsdp(min_bytes=0))
    step = Execution(sizes=dict(mp.MeshSpec(fsdp=8)), batch_axes=("fsdp",))
    gathers = {d.path: gathered(step, Weight(d, d.spec, d.spec)) for d in table.params}
    assert {path: found.count for path, found in gathers.items()} == {"w/kernel": (6, 6), "w/bias": (3, 6)}
