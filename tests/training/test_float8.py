"""Matmuls in 8-bit floats: values, gradients, collectives and errors."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.inspect import census
from meshpar.layers.precision import dot_general, numerics, products
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe import MoEConfig, Routing, grouped_matmul, grouped_swiglu
from meshpar.parallel.expected.fp8_scales import SCALES
from meshpar.planner.workload import describe
from meshpar.sharding.adapters.model import OVERWRITTEN
from meshpar.sharding.types import tree_leaves_with_paths
from tests.equal import assert_same
from tests.grid import cases
from tests.layers.test_precision import PRODUCTS
from tests.linen_decoder import linen_model

FP8, BY_ROW = mp.Precision(matmul="fp8"), mp.Precision(matmul="fp8-rowwise")
CONFIG = TransformerConfig(
    vocab_size=512, num_layers=4, embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=512
)
WITH_EXPERTS = dataclasses.replace(CONFIG, moe=MoEConfig(routing=Routing(num_experts=8, top_k=2), mlp_dim=512))
TOKENS = {name: jax.ShapeDtypeStruct((16, 64), np.int32) for name in ("inputs", "targets")}
MATRICES = 7
"""Matrices of a layer."""


def scale_of(x, dtype, dims=None):
    return np.abs(np.asarray(x)).max(dims, keepdims=True) / np.float32(ml_dtypes.finfo(dtype).max)


def rounded(x, dtype, dims=None):
    """Round to 8-bit floats with NumPy, with a scalar scale or a scale for each slice along `dims`."""
    x = np.asarray(x, np.float32)
    scale = scale_of(x, dtype, dims)
    return (x / scale).astype(dtype).astype(np.float64) * scale


E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def of_rounded(lhs, rhs, g, dims):
    """Return (out, d_lhs, d_rhs) for operands with scalar scales."""
    out, pull = jax.vjp(lambda a, b: jax.lax.dot_general(a, b, dims), rounded(lhs, E4M3), rounded(rhs, E4M3))
    return (out, *pull(jnp.asarray(rounded(g, E5M2))))


def of_rounded_rows(lhs, rhs, g, dims):
    """Return (out, d_lhs, d_rhs) with a scale per row and column. The weight gradient uses unrounded operands."""
    (of_lhs, of_rhs), (batch, _) = dims

    def plain(a, b):
        return jax.lax.dot_general(a, b, dims)

    # The scale of each column, in the shape of the output.
    scales = np.broadcast_to(scale_of(rhs, E4M3, of_rhs), rhs.shape)
    size = np.prod([lhs.shape[dim] for dim in of_lhs])
    columns = np.asarray(plain(np.ones(lhs.shape), scales.astype(np.float64))) / size
    of_weight = tuple(range(len(batch) + lhs.ndim - len(of_lhs) - len(batch), g.ndim))
    narrow = rounded(g * columns.astype(np.float32), E4M3, of_weight) / columns
    out, pull = jax.vjp(plain, rounded(lhs, E4M3, of_lhs), rounded(rhs, E4M3, of_rhs))
    wide = jax.vjp(plain, np.asarray(lhs, np.float64), np.asarray(rhs, np.float64))[1]
    return out, pull(jnp.asarray(narrow))[0], wide(jnp.asarray(g, jnp.float64))[1]


EMULATED = {"fp8": of_rounded, "fp8-rowwise": of_rounded_rows}


@pytest.mark.parametrize("word", EMULATED)
@pytest.mark.parametrize("product", cases("crossed", grid=PRODUCTS))
def test_values_and_gradients_are_those_of_rounded_operands(product, word):
    lhs_shape, rhs_shape, dims = PRODUCTS[product]
    rng = np.random.default_rng(0)
    # Columns differ in magnitude.
    draws = (rng.normal(size=shape) * 8.0 ** rng.integers(-2, 1, shape[-1]) for shape in (lhs_shape, rhs_shape))
    lhs, rhs = (jnp.asarray(one, jnp.float32) for one in draws)
    with numerics(mp.Precision(matmul=word), None):
        out, pull = jax.vjp(lambda a, b: dot_general(a, b, dims), lhs, rhs)
        g = jnp.asarray(rng.normal(size=out.shape), jnp.float32)
        found = (out, *pull(g))
    with jax.enable_x64(True):
        expected = EMULATED[word](lhs, rhs, g, dims)
    for x, y in zip(found, expected, strict=True):
        # Sums of a few products, in float32.
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
    # The significand has three bits, so the relative error is at most 1/16.
    assert np.linalg.norm(out - jax.lax.dot_general(lhs, rhs, dims)) < np.linalg.norm(out) / 16


@pytest.mark.parametrize("word", [None, *EMULATED])
@pytest.mark.parametrize("reduce", [None, "bfloat16", "float16"])
def test_weight_gradients_have_the_reduction_dtype(word, reduce):
    """XLA reduces it in the dtype of the matmul. Other products are in the compute dtype."""
    rows, weight, g = (jnp.ones(shape, "bfloat16") for shape in ((8, 3), (3, 5), (8, 5)))

    def multiply(x, w):
        return dot_general(x, w, (((1,), (0,)), ((), ())))

    with numerics(mp.Precision(compute="bfloat16", reduce=reduce, matmul=word), None):
        closed = jax.make_jaxpr(lambda g, *given: jax.vjp(multiply, *given)[1](g))(g, rows, weight)
    found = {eqn.outvars[0].aval.size: eqn.outvars[0].aval.dtype for _, eqn in products(closed.jaxpr)}
    assert found == {8 * 5: jnp.bfloat16, 8 * 3: jnp.bfloat16, 3 * 5: jnp.dtype(reduce or "float32")}


def test_row_scales_keep_small_rows_accurate():
    """A row is 2^20 times larger. With a scalar scale the other rows are zero, with row scales accurate to 1/16."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 64), (64, 16)))
    x = x.at[0].multiply(2.0**20)
    expected, found = np.asarray(x @ w), {}
    for word in EMULATED:
        with numerics(mp.Precision(matmul=word), None):
            found[word] = np.asarray(dot_general(x, w, (((1,), (0,)), ((), ()))))
    np.testing.assert_array_equal(found["fp8"][1:], 0)
    assert np.linalg.norm(found["fp8-rowwise"][1:] - expected[1:]) < np.linalg.norm(expected[1:]) / 16


@pytest.mark.parametrize("x", [np.zeros((2, 3)), np.full((2, 3), np.nan)], ids=["zeros", "nan"])
def test_zeros_and_nan_are_kept(x):
    with numerics(FP8, None):
        out = dot_general(jnp.asarray(x, jnp.float32), jnp.ones((3, 2)), (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(out, x[:, :2] * 3)


@pytest.mark.parametrize("word", EMULATED)
@pytest.mark.parametrize("sizes", cases("5 0 9", grid=["5 0 9", "6 6 6"]))
def test_expert_rows_and_weights_have_separate_scales(sizes, word):
    rng, sizes = np.random.default_rng(0), np.array(sizes.split(), np.int32)
    draws = (18, 8), (3, 8, 5), (18, 5)
    rows, weights, g = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in draws)
    with numerics(mp.Precision(matmul=word), None):
        y, pull = jax.vjp(lambda r, w: grouped_matmul(r, w, sizes, block=4), rows, weights)
        found = (y, *pull(g))
    expected = [np.zeros(x.shape) for x in found]
    for row, group in enumerate(np.repeat(np.arange(3), sizes)):
        dims = (((0,), (0,)), ((), ()))
        with jax.enable_x64(True):
            expected[0][row], expected[1][row], _ = EMULATED[word](rows[row], weights[group], g[row], dims)
        expected[2][group] += np.outer(rows[row], g[row])  # not rounded
    for x, y in zip(found, expected, strict=True):
        # Sums of a few products, in float32.
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


def test_swiglu_of_experts_equals_three_matmuls():
    """The loop keeps float32 between the matmuls."""
    rng, sizes = np.random.default_rng(0), jnp.array([5, 0, 9])
    draws = (18, 8), (3, 8, 5), (3, 8, 5), (3, 5, 8)
    given = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in draws]
    matmul = functools.partial(grouped_matmul, group_sizes=sizes, block=4)

    def clear_context_mesh(rows, gate, up, down):
        return matmul(jax.nn.silu(matmul(rows, gate)) * matmul(rows, up), down)

    def whole(*given):
        return grouped_swiglu(*given, sizes, block=4)

    with numerics(FP8, None):
        found, expected = (
            jax.jit(jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), range(4)))(*given) for f in (whole, clear_context_mesh)
        )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


BY_PATH = {r"layers/.*": "fp8", r"layers/attention/(out|key)": None}


@pytest.mark.parametrize("framework", cases("linen", grid=["nnx", "linen"]))
def test_mapping_selects_modules_by_path(framework):
    """Two of the seven matrices of a layer are not rounded."""
    model = CONFIG.build()
    if framework == "linen":
        model = linen_model(CONFIG, 16, 64)
    state, trace = traced(model, mp.Precision(matmul=BY_PATH))[1:]
    found = [[x.aval.dtype.itemsize for x in eqn.invars[:2]] for _, eqn in products(trace.jaxpr.jaxpr)]
    assert found.count([1, 1]) == 3 * (MATRICES - 2)
    kept = {path for path in (one.path for one in state.table.params) if "/out/" in path or "/key/" in path}
    narrow = mp.Precision(matmul=BY_PATH).narrow(one.path for one in state.table.params)
    assert len(kept) == 2
    assert not narrow & kept
    assert sum("/mlp/" in path for path in narrow) == 3


def traced(model, precision):
    mesh = mp.MeshSpec(fsdp=8).abstract()
    state = mp.abstract_state(model, optax.adam(1e-3), mesh=mesh, strategy=mp.fsdp(), precision=precision)
    step = mp.train_step(next_token_loss, precision=precision)
    return step, state, step.trace(state, TOKENS)


@pytest.mark.parametrize(
    ("precision", "model", "words"),
    [
        ({"matmul": "fp9"}, CONFIG, "must be one of 'fp8'"),
        ({"matmul": ("fp8",)}, CONFIG, "must be one of 'fp8'"),
        ({"matmul": "mxfp8"}, CONFIG, "to 16-bit matmuls.*Use 'fp8-rowwise'"),
        ({"matmul": {"layers/.*": "nvfp4"}}, CONFIG, "for inference"),
        ({"matmul": "fp8-blockwise"}, CONFIG, "XLA has no kernel"),
        ({"matmul": "fp8", "compute": "float16"}, CONFIG, "bfloat16"),
        ({"matmul": {"layers/mpl/.*": "fp8"}}, CONFIG, "modules `layers/mpl/"),
        ({"matmul": {"layers/(mlp": "fp8"}}, CONFIG, "not a regular expression"),
    ],
)
def test_invalid_precision_is_an_error(precision, model, words):
    with pytest.raises(mp.MeshparError, match=words):
        traced(model.build(), mp.Precision(**precision))


def test_model_must_use_the_matmul():
    names = {"w": ("embed", None)}
    model = mp.from_functions(lambda key: {"w": jnp.ones((8, 8))}, lambda p, x: x @ p["w"], names=names)
    state = mp.init_state(model, optax.sgd(0.1), mesh=mp.MeshSpec(data=8).build(), strategy=mp.ddp(), key=0)
    step = mp.train_step(lambda model, batch, key: ((model(batch) ** 2).mean(), {}), precision=FP8)
    with pytest.raises(mp.MeshparError, match="dot_general"):
        step(state, np.ones((8, 8), np.float32))


@pytest.mark.matrix
def test_planner_counts_8_bit_flops():
    rows = {name: jax.ShapeDtypeStruct((16, 64), np.int32) for name in TOKENS}
    weights = CONFIG.num_layers * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)
    # Each weight has three products. With row scales, its gradient is not in 8 bits.
    for precision, narrow in ((FP8, 3), (dataclasses.replace(FP8, matmul="fp8-rowwise"), 2)):
        work = describe(CONFIG.build(), rows, next_token_loss, tx=optax.adam(1e-3), precision=precision)
        told = work.narrow_share[None] * work.flops[None]  # counts the backward pass of attention twice
        assert told == pytest.approx(narrow * 2 * 64 * weights, rel=0.01)


SPLIT = {
    "fsdp": (mp.MeshSpec(fsdp=8), mp.fsdp()),
    "tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel()),
    "sequence": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel(sequence=True)),
}
STAGED = mp.pipeline_parallel(stages=2, microbatches=2, schedule="1f1b")
SPLIT_IN_STAGES = {
    "stages": (mp.MeshSpec(stage=2, fsdp=2, tensor=2), mp.fsdp() | mp.tensor_parallel() | STAGED),
    "stages, sequence": (
        mp.MeshSpec(stage=2, fsdp=2, tensor=2),
        mp.fsdp() | mp.tensor_parallel(sequence=True) | STAGED,
    ),
}
TOKENS_HERE = {"tensor": 16 // 4 * 64, "sequence": 16 // 4 * 64}
"""Tokens of a device."""


def explained(config, split, precision, cluster=None):
    spec, strategy = (SPLIT | SPLIT_IN_STAGES)[split]
    mesh = spec.build() if cluster is None else spec.abstract()
    state = mp.abstract_state(config.build(), optax.adam(1e-3), mesh=mesh, strategy=strategy, precision=precision)
    options = {} if cluster is None else {"cluster": cluster}
    return mp.explain(mp.train_step(next_token_loss, precision=precision), state, TOKENS, **options)


def assert_as_expected(report):
    assert not report.matching.unexpected
    assert not report.matching.missing
    assert [one.rule for one in report.findings if one.rule == "other-dtype"] == []


@pytest.mark.matrix
@pytest.mark.parametrize("precision", [FP8, BY_ROW], ids=lambda one: one.matmul)
@pytest.mark.parametrize(
    ("config", "split"),
    [(CONFIG, "fsdp"), (WITH_EXPERTS, "fsdp"), (CONFIG, "tensor"), (CONFIG, "sequence")],
    ids=["dense", "experts", "tensor", "sequence"],
)
def test_expected_collectives_on_host_devices(config, split, precision):
    assert_as_expected(explained(config, split, precision))


def scales_sent(report):
    """Return the number of scale arrays and the bytes that a device sends, by (kind, axes)."""
    found = collections.defaultdict(lambda: (0, 0))
    for line in (one for one in report.matching.matched if one.role == SCALES):
        count, sent = found[line.kind, line.axes]
        found[line.kind, line.axes] = count + line.actual_count, sent + line.actual_bytes
    return dict(found)


def expected_scales(split):
    """Return the expected result of `scales_sent`.

    Five of the seven matrices of a layer contract `embed`, which fsdp shards, and two contract dims that tensor shards.
    An all-reduce sends 2 (n-1)/n of an array, an all-gather (n-1)/n. Maxima are in bfloat16, scales in float32.
    """
    layers, embed, hidden = CONFIG.num_layers, CONFIG.embed_dim, 256 + 2 * 128 + 2 * 512  # of q, k, v, gate, up
    fsdp, tensor = (SPLIT[split][0].get(axis, 1) for axis in ("fsdp", "tensor"))
    sums = layers * 2 * (fsdp - 1) / fsdp * 2 * hidden / tensor
    gathers = layers * 2 * 2 * (fsdp - 1) / fsdp * 4 * embed  # of out and down, forward and backward
    found = {("all-reduce", ("fsdp",)): (layers * 5, sums), ("all-gather", ("fsdp",)): (layers * 4, gathers)}
    if tensor > 1:
        # Rows and columns of `out` and `down` in the forward pass, rows of the gradient for the other five.
        here = layers * 2 * (tensor - 1) / tensor
        sent = here * (2 * TOKENS_HERE[split] * 2 + 5 * TOKENS_HERE[split] * 4 + 2 * embed / fsdp * 2)
        found["all-reduce", ("tensor",)] = (layers * (2 + 5 + 2), sent)
    return found


@pytest.mark.pod
@pytest.mark.parametrize("split", SPLIT)
def test_expected_messages_of_row_scales_on_gpus(split):
    report = explained(CONFIG, split, dataclasses.replace(BY_ROW, compute="bfloat16"), "h100:1x8")
    assert_as_expected(report)
    found = scales_sent(report)
    of_sequence = found.pop(("all-gather", ("tensor",)), None)  # XLA gathers rows in 8 bits or in bfloat16
    assert (of_sequence is not None) <= (split == "sequence")
    expected = expected_scales(split)
    assert {key: count for key, (count, _) in found.items()} == {key: count for key, (count, _) in expected.items()}
    sent, due = ({key: one for key, (_, one) in scales.items()} for scales in (found, expected))
    assert sent == pytest.approx(due)


@pytest.mark.call_stacks
@pytest.mark.pod
@pytest.mark.parametrize(
    ("split", "precision"),
    cases(
        ("stages, sequence", BY_ROW),
        grid=[(split, precision) for split in SPLIT_IN_STAGES for precision in (FP8, BY_ROW)],
    ),
)
def test_input_gradients_are_reduced_once_in_stages_on_gpus(split, precision):
    """In stages, the expected messages of scales are not exact."""
    config = dataclasses.replace(CONFIG, num_layers=4)
    report = explained(config, split, dataclasses.replace(precision, compute="bfloat16"), "h100:1x8")
    assert not [one for one in report.matching.unexpected if one.operation == "dot_general"]
    assert not [one for one in report.matching.missing if one.role.startswith("partial sums")]


@pytest.mark.pod
@pytest.mark.parametrize("sequence", [False, True])
def test_input_gradients_are_reduced_once_on_gpus(sequence):
    """Query, key and value have the same input, and so have gate and up. Scales are applied before the sum."""
    report = explained(
        CONFIG, "sequence" if sequence else "tensor", dataclasses.replace(FP8, compute="bfloat16"), "h100:1x8"
    )
    assert_as_expected(report)
    sums = [one for one in report.matching.matched if one.role == "partial sums, backward"]
    assert [(one.kind, one.actual_count) for one in sums] == [
        ("reduce-scatter" if sequence else "all-reduce", 2 * CONFIG.num_layers + 1)
    ]


@pytest.mark.pod
@pytest.mark.parametrize("precision", [FP8, BY_ROW], ids=lambda one: one.matmul)
@pytest.mark.parametrize("library", [False, True], ids=["triton", "cublas"])
def test_all_matmuls_of_a_layer_are_in_8_bits_on_gpus(pod, library, precision):
    """With row scales, weight gradients are not. XLA merges query, key and value, and gate and up."""
    step, state, trace = traced(CONFIG.build(), dataclasses.replace(precision, compute="bfloat16"))
    options = {**step.compile_options(state.setup), "xla_gpu_enable_triton_gemm": not library}
    program = pod.compile(trace, "h100:1x8", options=options)
    names = ("f8e4m3fn", "f8e5m2")
    found = [
        ins
        for computation in program.module.computations.values()
        for ins in computation
        if ins.opcode == "dot" or "__cublas" in ins.attributes.get("custom_call_target", "")
        if all(leaf.dtype in names for name in ins.operands[:2] for leaf in computation[name].shape.leaves())
    ]
    assert len(found) == (3 * MATRICES if precision == FP8 else 2 * MATRICES - 3)
    targets = {ins.attributes.get("custom_call_target", "").strip('"') for ins in found}
    assert targets == ({"__cublas$lt$matmul$f8"} if library else {""})
    gathers = [one for one in census.census(program.module, state.setup.mesh) if one.kind == "all-gather"]
    narrow = [array for one in gathers for array in one.arrays if array.dtype == "f8e4m3fn"]
    assert len(narrow) == 2 * MATRICES  # forward and backward


@pytest.mark.pod
def test_loops_over_experts_are_in_8_bits_on_gpus(pod):
    """Only the gradients of weights are not. XLA may merge the products with gate and up, and may unroll loops."""
    step, state, trace = traced(WITH_EXPERTS.build(), mp.Precision(matmul={"layers/mlp": "fp8"}, compute="bfloat16"))
    program = pod.compile(trace, "h100:1x8", options=step.compile_options(state.setup))
    narrow, found = {"f8e4m3fn", "f8e5m2"}, collections.Counter()
    for computation in program.module.computations.values():
        for ins in (one for one in computation if one.opcode == "dot" or "__cublas" in str(one.attributes)):
            if "/experts/" in str(ins.attributes):
                dtypes = {leaf.dtype for name in ins.operands[:2] for leaf in computation[name].shape.leaves()}
                found["transpose(" in str(ins.attributes), dtypes <= narrow] += 1
    is_backward, is_narrow = True, True
    assert found[not is_backward, not is_narrow] == 0
    assert found[not is_backward, is_narrow] >= 2
    copies, rest = divmod(found[is_backward, is_narrow], 3)
    assert (copies > 0, rest) == (True, 0)
    assert 2 * copies <= found[is_backward, not is_narrow] <= 3 * copies


class Delayed(nn.Module):
    """Two matmuls of Flax with delayed scaling."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, dot_general_cls=nn.Fp8DotGeneral, name="up")(x)
        return nn.Dense(8, dot_general_cls=nn.Fp8DotGeneral, name="down")(nn.relu(x))


def squares(model, batch, key):
    errors = (model(batch["x"]) - batch["y"]) ** 2
    return mp.MeanLoss(errors.sum(), errors.size), {}


ROWS = {"x": np.random.default_rng(0).normal(size=(16, 32)), "y": np.random.default_rng(1).normal(size=(16, 8))}
BY_PATHS = mp.Rules(paths={"up/kernel": P("fsdp", "tensor"), "down/kernel": P("tensor", "fsdp")})
DELAYED = {
    "fsdp|tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp(min_bytes=0) | BY_PATHS, {}),
    "zero1": (mp.MeshSpec(fsdp=8), mp.zero1(axis="fsdp", min_bytes=0), {}),
    "accumulate": (mp.MeshSpec(fsdp=8), mp.fsdp(min_bytes=0), {"accumulate": 2}),
}


def delayed_state(spec, strategy):
    example = jax.ShapeDtypeStruct((16, 32), np.float32)
    return mp.init_state(
        mp.from_linen(Delayed(), example), optax.adamw(1e-2), mesh=spec.build(), strategy=strategy, key=0
    )


@pytest.mark.parametrize("case", cases(grid=list(DELAYED)))
def test_delayed_scaling_equals_flax_on_one_device(case):
    """Scales and histories are replaced by their gradients over the global batch, without the optimizer."""
    spec, strategy, options = DELAYED[case]
    state = delayed_state(spec, strategy)
    micro = options.get("accumulate", 1)
    plain = TrainState.create(
        apply_fn=Delayed().apply,
        params=jax.device_get({"params": state.params, **state.extra}),
        tx=optax.adamw(1e-2),
    )
    step = mp.train_step(squares, **options)
    batch = mp.shard_batch({name: x.astype(np.float32) for name, x in ROWS.items()}, state.setup.mesh, strategy)
    gradient = jax.jit(jax.grad(mean_of_rows, argnums=1))
    for factor in (1.0, 3.0, 0.5):
        scaled = {**batch, "x": batch["x"] * factor}
        state, _ = step(state, scaled)
        grads, scales = [], plain.params
        for rows in micro_steps(jax.device_get(scaled), micro, state.setup.sizes["fsdp"]):
            grads.append(gradient(rows, scales))
            scales = {**scales, OVERWRITTEN: grads[-1][OVERWRITTEN]}
        mean = jax.tree.map(lambda *x: sum(x) / micro, *grads)
        plain = plain.apply_gradients(grads={**mean, OVERWRITTEN: scales[OVERWRITTEN]})
    for found, expected, atol in (
        (state.extra[OVERWRITTEN], plain.params[OVERWRITTEN], 1e-6),
        (state.params, plain.params["params"], 1e-5),
    ):
        assert_same(*(dict(tree_leaves_with_paths(jax.device_get(x))) for x in (found, expected)), atol=atol)
    assert float(state.extra[OVERWRITTEN]["up"]["Fp8DirectDotGeneralOp_0"]["input_scale"][0]) != 1
    assert "scale" not in str(jax.tree.structure(state.opt_state))


def mean_of_rows(rows, params):
    loss, _ = squares(lambda x: Delayed().apply(params, x), rows, None)
    return loss.total / loss.weight


def micro_steps(batch, micro, ranks):
    """Divide a batch as a step does: each device divides its local batch."""
    return [
        {name: x.reshape(ranks, micro, -1, *x.shape[1:])[:, i].reshape(-1, *x.shape[1:]) for name, x in batch.items()}
        for i in range(micro)
    ]


def test_delayed_scaling_needs_the_global_batch():
    state = delayed_state(mp.MeshSpec(data=8), mp.ddp())
    rows = {name: jax.ShapeDtypeStruct(x.shape, np.float32) for name, x in ROWS.items()}
    with pytest.raises(ValueError, match="collection `_overwrite_with_gradient` .* scales over the global batch"):
        mp.train_step(squares, accumulate=2, reduce_gradients="once").trace(state, rows)
