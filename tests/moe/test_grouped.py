"""`grouped_matmul` and `grouped_swiglu`: values, gradients, FLOPs, memory, and the choice of the implementation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.machinery
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from meshpar.hardware import cost_model as cost
from meshpar.hardware import grouped_kernels
from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect.explain import explain
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.hlo.walk import executed
from meshpar.inspect.target import mesh_on, missing_aot, traced_for
from meshpar.inspect.timeline import program_work as work
from meshpar.layers.precision import Precision, products
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe import MoEConfig, Routing, choose_grouped_matmul, grouped_matmul, grouped_swiglu
from meshpar.moe import tokamax_kernels as kernels
from meshpar.parallel import expert_parallel, fsdp
from meshpar.sharding.mesh import MeshSpec
from meshpar.training.state import abstract_state
from meshpar.training.step import train_step
from tests.errors import raises
from tests.grid import cases

ROWS, WIDTH, COLUMNS, GROUPS = 37, 6, 5, 4
SIZES = {
    "uneven": [5, 9, 20, 3],
    "empty groups and unassigned rows": [0, 7, 0, 11],
    "first group only": [37, 0, 0, 0],
    "last group only": [0, 0, 0, 37],
    "one row per group": [1, 1, 1, 1],
    "full blocks": [8, 8, 16, 4],
    "no assigned rows": [0, 0, 0, 0],
}
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


def by_mask(rows, *weights_and_sizes):
    """Apply all groups to all rows and select the row's group, for a matmul or SwiGLU."""
    *weights, sizes = weights_and_sizes
    hidden = [jnp.einsum("rd,gdf->grf", rows, weight) for weight in weights[:2]]
    if len(weights) == 3:
        hidden = [jnp.einsum("grf,gfe->gre", jax.nn.silu(hidden[0]) * hidden[1], weights[2])]
    if len(weights) == 6:
        gate, up = (x + bias[:, None] for x, bias in zip(hidden, weights[3:], strict=False))
        gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
        active = gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
        hidden = [jnp.einsum("grf,gfe->gre", active, weights[2]) + weights[5][:, None]]
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows)), side="right")
    return jnp.einsum("gre,rg->re", hidden[0], jax.nn.one_hot(group, GROUPS, dtype=rows.dtype))


def operands(dtype, *, rows=ROWS, width=WIDTH, columns=COLUMNS, groups=GROUPS):
    """Return rows, weights and the cotangent of a matmul."""
    draw = np.random.default_rng(0).standard_normal
    shapes = (rows, width), (groups, width, columns), (rows, columns)
    return [jnp.asarray(draw(shape), dtype) for shape in shapes]


def swiglu_operands(dtype, rows=ROWS):
    draw = np.random.default_rng(1).standard_normal
    shapes = (rows, WIDTH), (GROUPS, WIDTH, 8), (GROUPS, WIDTH, 8), (GROUPS, 8, COLUMNS), (rows, COLUMNS)
    return [jnp.asarray(draw(shape), dtype) for shape in shapes]


def biased_operands(dtype, rows=ROWS):
    """Return operands of SwiGLU with biases. Some products exceed the limits of the clamped activation."""
    draw = np.random.default_rng(2).standard_normal
    biases = (jnp.asarray(4 * draw((GROUPS, size)), dtype) for size in (8, 8, COLUMNS))
    *arrays, cotangent = swiglu_operands(dtype, rows)
    return [*arrays, *biases, cotangent]


def biased_swiglu(rows, gate, up, down, *biases_and_sizes, **options):
    *biases, sizes = biases_and_sizes
    return grouped_swiglu(rows, gate, up, down, sizes, biases=tuple(biases), activation="clamped_swiglu", **options)


def value_and_grads(product):
    """Return (rows, *weights, cotangent, sizes) -> (product, gradients of rows and weights)."""

    def run(*args):
        *arrays, cotangent, sizes = args
        y, pull = jax.vjp(lambda *arrays: product(*arrays, sizes), *arrays)
        return y, *pull(cotangent)

    return jax.jit(run)


@pytest.fixture
def fake_tokamax(monkeypatch):
    """Install a package that behaves like tokamax, with NaN for undefined results."""
    module = types.ModuleType("tokamax")
    module.__spec__ = importlib.machinery.ModuleSpec("tokamax", None)
    module.calls = []

    def poison(x, is_defined):
        return jnp.where(is_defined, x, jnp.nan)

    def ragged_dot_general(lhs, rhs, sizes, numbers, *, preferred_element_type, implementation, bypass_device_check):
        # tokamax does not support varying values under JAX 0.12.
        assert not any(jax.typeof(x).manual_axis_type.varying for x in (lhs, rhs, sizes))
        assert not bypass_device_check
        module.calls.append(implementation)
        is_assigned = (jnp.arange(len(lhs)) < sizes.sum())[:, None]
        if numbers.rhs_group_dimensions:
            y = lax.ragged_dot_general(lhs, rhs, sizes, numbers, preferred_element_type=preferred_element_type)
            return poison(y, is_assigned)
        if implementation == "triton":  # reads only the rows of a group, and writes zeros for empty groups
            lhs, rhs = jnp.where(is_assigned, lhs, 0), jnp.where(is_assigned, rhs, 0)
        y = lax.ragged_dot_general(lhs, rhs, sizes, numbers, preferred_element_type=preferred_element_type)
        if implementation == "triton":
            return y
        is_finite = jnp.isfinite(lhs).all() & jnp.isfinite(rhs).all()
        return poison(y, is_finite & (sizes > 0)[:, None, None])

    module.ragged_dot_general = ragged_dot_general
    module.RaggedDotGroupSizes = lambda sizes, total: sizes
    monkeypatch.setitem(sys.modules, "tokamax", module)
    return module


# ---- Values and gradients --------------------------------------------------------------------------------------------

OPTIONS = {
    "blocked": {"implementation": "blocked"},
    "small blocks": {"implementation": "blocked", "block": 8, "typical_rows": 20},
    "one loop": {"implementation": "blocked", "block": 5, "typical_rows": ROWS},
    "block above all rows": {"implementation": "blocked", "block": 64},
    "tokamax": {"implementation": "tokamax"},
    "two windows": {"implementation": "tokamax", "typical_rows": 16},
    "small windows": {"implementation": "tokamax", "typical_rows": 6},
}


KERNELS = {
    "matmul": (grouped_matmul, operands),
    "swiglu": (grouped_swiglu, swiglu_operands),
    "biased": (biased_swiglu, biased_operands),
}


@pytest.mark.parametrize(
    ("kernel", "name", "dtype", "remat"),
    cases(
        ("matmul", "small blocks", "float32", False),
        ("matmul", "tokamax", "float64", False),
        ("swiglu", "small blocks", "float64", True),
        ("swiglu", "tokamax", "float64", False),
        ("swiglu", "small windows", "float64", True),
        ("biased", "small blocks", "float64", True),
        grid=[
            (kernel, name, dtype, remat)
            for kernel, name, dtype, remat in itertools.product(KERNELS, OPTIONS, TOLERANCE, (False, True))
            if kernel == "matmul" or dtype == "float64"
        ],
    ),
)
def test_kernels_match_masked_references(kernel, name, dtype, remat, request):
    """Includes rows past `typical_rows`, whose activations are recomputed in the backward pass."""
    options, (function, arrays) = OPTIONS[name], KERNELS[kernel]
    if options["implementation"] == "tokamax":
        request.getfixturevalue("fake_tokamax")
    with jax.enable_x64(dtype == "float64"):
        product = functools.partial(function, **options)
        run, expect = value_and_grads(jax.checkpoint(product) if remat else product), value_and_grads(by_mask)
        rows, *weights, cotangent = arrays(dtype)
        for case, sizes in SIZES.items():
            sizes = jnp.asarray(sizes, jnp.int32)
            # Values of unassigned rows are ignored, forward and backward.
            is_assigned = (jnp.arange(ROWS) < sizes.sum())[:, None]
            poisoned = jnp.where(is_assigned, rows, jnp.nan), *weights, jnp.where(is_assigned, cotangent, jnp.nan)
            actual, expected = run(*poisoned, sizes), expect(rows, *weights, cotangent, sizes)
            for number, (x, exact) in enumerate(zip(actual, expected, strict=True)):
                np.testing.assert_allclose(x, exact, atol=TOLERANCE[dtype], rtol=0, err_msg=f"{case}: {number}")
            assert not np.asarray(actual[0])[sizes.sum() :].any()
            assert not np.asarray(actual[1])[sizes.sum() :].any()


@pytest.mark.parametrize("kernel", [grouped_matmul, grouped_swiglu])
def test_gradients_of_even_groups_multiply_16_bits(kernel):
    rows, *weights = (jnp.ones(shape, jnp.bfloat16) for shape in ((32, 8), (4, 8, 8), (4, 8, 8), (4, 8, 8)))
    weights = weights[:1] if kernel is grouped_matmul else weights
    sizes = np.full(4, 8)

    def total(*args):
        return kernel(*args, sizes).astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=tuple(range(1 + len(weights)))))(rows, *weights)
    matmuls = [eqn for _, eqn in products(jaxpr)]
    assert len(matmuls) == 3 * len(weights)
    assert {x.aval.dtype for eqn in matmuls for x in eqn.invars} == {jnp.dtype(jnp.bfloat16)}
    assert {eqn.params["preferred_element_type"] for eqn in matmuls} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(("kernel", "num_products"), [("matmul", 3), ("swiglu", 9), ("biased", 9)])
def test_even_groups_are_batched_matmuls(kernel, num_products):
    function, arrays = KERNELS[kernel]
    with jax.enable_x64(True):
        args, sizes = arrays("float64", rows=36), np.full(GROUPS, 9, np.int32)
        run = value_and_grads(lambda *arrays: function(*arrays[:-1], sizes))
        expected = value_and_grads(by_mask)(*args, jnp.asarray(sizes))
        for x, exact in zip(run(*args, None), expected, strict=True):
            np.testing.assert_allclose(x, exact, rtol=1e-12, atol=1e-12)
        products = work.matmuls(hlo.parse(run.lower(*args, None).compile().as_text()))
    assert [product.count_per_step for product in products] == [1] * num_products
    assert kernel != "matmul" or {product.flops for product in products} == {2 * 36 * WIDTH * COLUMNS}


def test_grouped_matmul_of_no_rows():
    y = grouped_matmul(jnp.zeros((0, WIDTH)), jnp.zeros((GROUPS, WIDTH, COLUMNS)), jnp.zeros(GROUPS, jnp.int32))
    assert y.shape == (0, COLUMNS)


# ---- Work and memory -------------------------------------------------------------------------------------------------

LARGE = {"rows": 8192, "width": 32, "columns": 24, "groups": 16}


@functools.cache
def compiled(**options):
    rows, weights, cotangent = operands("float32", **LARGE)
    sizes = jnp.full(LARGE["groups"], 512, jnp.int32)
    product = functools.partial(grouped_matmul, **options) if options else lax.ragged_dot
    return value_and_grads(product).lower(rows, weights, cotangent, sizes).compile()


def flops(**options):
    return work.flops_per_step(hlo.parse(compiled(**options).as_text()))


@pytest.mark.parametrize("block", cases(None, grid=[None, 64, 100]))
def test_flops_match_the_cost_model(block):
    """Value and both gradients. The default block adds at most a quarter to the FLOPs of assigned rows."""
    groups, inner, columns = LARGE["groups"], LARGE["width"], LARGE["columns"]
    assigned = 3 * cost.matmul_flops(LARGE["rows"], inner, columns)
    actual = flops(block=block, typical_rows=LARGE["rows"])
    assert actual == 3 * cost.matmul_flops(cost.grouped_rows(LARGE["rows"], groups, block or 128), inner, columns)
    assert assigned <= actual <= assigned * (1 + groups * (block or 128) / LARGE["rows"])
    if block is None:
        assert actual <= 5 / 4 * assigned


@pytest.mark.call_stacks  # named scopes
def test_blocks_past_typical_rows_are_a_dynamic_loop():
    """It does not count. Without `typical_rows`, the number of blocks is unknown, and a block counts once."""
    static = cost.matmul_flops(cost.grouped_rows(1024, 16, 32), LARGE["width"], LARGE["columns"])
    program = hlo.parse(compiled(block=32, typical_rows=1024).as_text())
    assert work.flops_per_step(program) == 3 * static
    assert sum(product.flops_per_step for product in work.matmuls(program)) == 3 * static
    assert [visit.times for visit in executed(program) if any(loop.trip_count == 0 for loop in visit.loops)]
    assert flops(block=32) == 3 * cost.matmul_flops(32, LARGE["width"], LARGE["columns"])


def test_no_temporary_of_rows_times_groups():
    def largest(program):
        return max(array.nbytes for array in work.largest_temporaries(hlo.parse(program.as_text())))

    masked = 4 * LARGE["rows"] * LARGE["groups"] * LARGE["columns"]
    rows = 4 * LARGE["rows"] * LARGE["width"]
    assert largest(compiled()) >= masked  # lax.ragged_dot on CPUs
    assert largest(compiled(block=None, typical_rows=LARGE["rows"])) <= rows


@functools.cache
def compiled_swiglu(typical_rows, *, checkpointed):
    """Compile forward and backward with the sizes of `LARGE`."""
    rows, width, hidden, groups = LARGE["rows"], LARGE["width"], 4 * LARGE["width"], LARGE["groups"]
    shapes = (rows, width), (groups, width, hidden), (groups, width, hidden), (groups, hidden, width), (rows, width)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    product = functools.partial(grouped_swiglu, block=32, typical_rows=typical_rows)
    save_all = jax.checkpoint_policies.everything_saveable
    run = value_and_grads(jax.checkpoint(product, policy=save_all) if checkpointed else product)
    return run.lower(*arrays, jax.ShapeDtypeStruct((groups,), jnp.int32)).compile()


@pytest.mark.call_stacks  # named scopes
@pytest.mark.parametrize("checkpointed", cases(True, grid=[False, True]))
def test_swiglu_flops_and_memory(checkpointed):
    """Nine matmuls per row and hidden activations of typical rows only."""
    program = hlo.parse(compiled_swiglu(1024, checkpointed=checkpointed).as_text())
    width, groups = LARGE["width"], LARGE["groups"]
    static = cost.matmul_flops(cost.grouped_rows(1024, groups, 32), width, 4 * width)
    assert work.flops_per_step(program) == 9 * static
    rows = 4 * LARGE["rows"] * width
    assert max(array.nbytes for array in work.largest_temporaries(program)) <= rows
    saved = 2 * 4 * cost.grouped_rows(1024, groups, 32) * 4 * width
    temporaries = compiled_swiglu(1024, checkpointed=checkpointed).memory_analysis().temp_size_in_bytes
    assert temporaries <= 2 * rows + 2 * saved


# ---- Choice of the implementation ------------------------------------------------------------------------------------


def test_auto_uses_tokamax_on_supported_gpus(fake_tokamax, monkeypatch):
    assert choose_grouped_matmul("cpu").implementation == "blocked"
    assert choose_grouped_matmul("gpu").implementation == "tokamax"
    assert choose_grouped_matmul("gpu", "float32").implementation == "blocked"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rows, weights, _ = operands("bfloat16")
    jax.jit(grouped_matmul).lower(rows, weights, jnp.ones(GROUPS, jnp.int32))
    assert fake_tokamax.calls == ["mosaic"]


def test_kernels_per_gradient_follow_the_table(fake_tokamax, monkeypatch):
    """On Hopper, Mosaic computes the product and the gradient of rows, and Triton the gradient of weights."""
    rows, weights, cotangent = operands("bfloat16")
    sizes = jnp.ones(GROUPS, jnp.int32)
    monkeypatch.setattr(grouped_kernels, "has_triton", lambda: True)

    def kernels_of(cluster):
        fake_tokamax.calls.clear()
        run = value_and_grads(functools.partial(grouped_matmul, implementation="tokamax"))
        monkeypatch.setattr(kernels, "_triton_target", lambda kernel: contextlib.nullcontext())
        with traced_for(cluster):
            run.trace(rows, weights, cotangent, sizes).lower()
        return sorted(fake_tokamax.calls)

    h100 = parse_cluster("h100:1x1")
    assert kernels_of(h100) == ["mosaic", "mosaic", "triton"]
    rates = {"mosaic product": {1024: 1e14}, "triton product": {1024: 2e14}, "triton rows": {1024: 9e14}}
    assert kernels_of(dataclasses.replace(h100, grouped=rates)) == ["mosaic", "triton", "triton"]
    monkeypatch.setattr(grouped_kernels, "has_triton", lambda: False)
    assert kernels_of(h100) == ["mosaic"] * 3


def test_profile_of_the_environment_selects_kernels(monkeypatch, tmp_path):
    file, rates = tmp_path / "mine.json", {"mosaic weights": {1024: 2e14}, "triton weights": {1024: 1e14}}
    dataclasses.replace(parse_cluster("h100:1x1"), grouped=rates).save(file)
    monkeypatch.setattr(grouped_kernels, "has_triton", lambda: True)
    assert grouped_kernels.grouped_kernels() == ("mosaic", "mosaic", "triton")
    monkeypatch.setenv("MESHPAR_CLUSTER", str(file))
    assert grouped_kernels.grouped_kernels() == ("mosaic", "mosaic", "mosaic")
    dataclasses.replace(parse_cluster("b200:1x1"), grouped=rates).save(file)
    assert grouped_kernels.grouped_kernels() == ("mosaic", "mosaic", "triton")


def test_kernels_are_compared_at_the_sizes_that_both_have():
    """Small groups are slower, so a kernel that was measured only for them would lose."""
    rates = {"mosaic rows": {512: 1e14, 4096: 5e14}, "triton rows": {4096: 4e14}, "mosaic weights": {512: 1e14}}
    rates["triton weights"] = {1024: 2e14}
    assert grouped_kernels.fastest(rates) == {"rows": "mosaic"}


def test_auto_depends_on_the_target_of_the_trace(fake_tokamax):
    """`explain` on a laptop uses the kernel of the cluster. The same function is traced for three targets."""
    rows, weights, _ = operands("bfloat16")
    run = jax.jit(lambda rows, weights: grouped_matmul(rows, weights, jnp.ones(GROUPS, jnp.int32)))
    uses_tokamax = []
    for cluster in ("h100:1x1", "b200:1x1", None):
        with traced_for(None if cluster is None else parse_cluster(cluster)):
            uses_tokamax.append(kernels.GROUPED_MATMUL in str(run.trace(rows, weights).jaxpr))
            assert (choose_grouped_matmul().implementation == "tokamax") is uses_tokamax[-1]
    assert uses_tokamax == [True, False, False]
    with traced_for(parse_cluster("b200:1x1")):
        assert "10.0" in choose_grouped_matmul().why


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_tokamax_inside_a_shard_map(fake_tokamax, remat):
    """With `check_vma`, in a loop, differentiated: as in MoE layers."""
    mesh, (rows, weights, _) = MeshSpec(expert=2).build(jax.devices()[:2]), operands("float32", rows=2 * ROWS)
    sizes, spec = jnp.array([5, 0, 9, 3], jnp.int32), jax.sharding.PartitionSpec

    def value_and_gradients(implementation):
        def layer(rows, weight):
            y = grouped_matmul(rows, weight, sizes, implementation=implementation)
            return rows + jnp.pad(y, ((0, 0), (0, WIDTH - COLUMNS))), None

        def loss(rows, weights):
            last, _ = lax.scan(jax.checkpoint(layer) if remat else layer, rows, weights)
            return lax.psum((last**2).sum(), "expert")

        global_loss = jax.shard_map(loss, mesh=mesh, in_specs=(spec("expert"), spec()), out_specs=spec())
        return jax.jit(jax.value_and_grad(global_loss, (0, 1)))(rows, jnp.stack([weights, weights + 1]))

    pairs = zip(*map(jax.tree.leaves, (value_and_gradients("blocked"), value_and_gradients("tokamax"))), strict=True)
    for expected, x in pairs:
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-4)  # sums in another order
    assert fake_tokamax.calls


def test_flops_of_tokamax_kernels_follow_from_typical_rows():
    call = """HloModule step

ENTRY %main (rows: bf16[64,8], weights: bf16[4,8,16], sizes: s32[4]) -> bf16[64,16] {
  %rows = bf16[64,8]{1,0} parameter(0)
  %weights = bf16[4,8,16]{2,1,0} parameter(1)
  %sizes = s32[4]{0} parameter(2)
  ROOT %y = bf16[64,16]{1,0} custom-call(%rows, %weights, %sizes), custom_call_target="mosaic_gpu_v2", metadata={op_name="NAME"}
}
"""  # noqa: E501
    for name, flops in ((f"a/{kernels.SCOPE}20_product/dot", 2 * 20 * 8 * 16), ("a/another/dot", 0)):
        assert work.flops_per_step(hlo.parse(call.replace("NAME", name))) == flops


def test_real_tokamax_without_kernel_is_unsupported():
    real_tokamax()
    rows, weights, _ = operands("bfloat16")
    with raises("unsupported-feature", "grouped_matmul"):
        grouped_matmul(rows, weights, jnp.ones(GROUPS, jnp.int32), implementation="tokamax")


def real_tokamax():
    return pytest.importorskip("tokamax", reason="needs Python 3.12 and `pip install tokamax`")


def test_real_tokamax_matches_blocked(monkeypatch):
    """tokamax's XLA implementation replaces its GPU kernels."""
    package, results = real_tokamax(), {}
    product = package.ragged_dot_general
    monkeypatch.setattr(
        package,
        "ragged_dot_general",
        lambda *args, implementation, **options: product(*args, implementation="xla", **options),
    )
    rows, weights, _ = operands("float32")
    sizes = jnp.array([5, 0, *[3] * (GROUPS - 2)], jnp.int32)
    for implementation in ("blocked", "tokamax"):
        multiply = functools.partial(grouped_matmul, group_sizes=sizes, implementation=implementation)
        y, pull = jax.vjp(multiply, rows, weights)
        results[implementation] = (y, *pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)))
    for x, y in zip(*results.values(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)  # sums of a few float32 products in another order


def lowered_with_tokamax(cluster, num_rows=1024, num_groups=8, width=256, columns=512):
    """Lower the gradients of rows and weights with the real kernels."""
    real_tokamax()
    if missing_aot():
        pytest.skip(f"compiles for GPUs, which needs `pip install meshpar[aot]`: {missing_aot()}")

    def loss(rows, weights, sizes):
        y = grouped_matmul(rows, weights, sizes, implementation="tokamax")
        return (y.astype(jnp.float32) ** 2).sum()

    target = parse_cluster(cluster)
    mesh = mesh_on(target, MeshSpec(data=1).abstract())
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rows, weights, sizes = (num_rows, width), (num_groups, width, columns), (num_groups,)
    shapes = (rows, jnp.bfloat16), (weights, jnp.bfloat16), (sizes, jnp.int32)
    args = [jax.ShapeDtypeStruct(*shape, sharding=replicated) for shape in shapes]
    with traced_for(target):
        return jax.jit(jax.grad(loss, (0, 1))).trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.pod
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.call_stacks  # named scopes
@pytest.mark.parametrize("sizes", [(4096, 8, 256, 512), (131_072, 128, 4096, 1536)], ids=["untuned", "tuned"])
def test_real_tokamax_compiles_without_a_gpu(sizes, caplog):
    """Three kernels, forward and for both gradients, and no matmul by XLA. The gradient of weights is written once."""
    pytest.importorskip("jax_triton", reason="needs `pip install jax-triton`")
    lowered = lowered_with_tokamax("h100:1x1", *sizes)
    # The parameters of the kernels are in tokamax's tuning files.
    assert ("Autotuning cache miss" in caplog.text) is (sizes[0] == 4096)
    module = hlo.parse(lowered.compile().as_text())
    grouped = {matmul.grouped: matmul for matmul in work.matmuls(module)}
    assert {(each.operand, each.kernel) for each in grouped} == {
        ("product", "mosaic"), ("rows", "mosaic"), ("weights", "triton"),
    }  # fmt: skip
    assert {matmul.flops for matmul in grouped.values()} == {2 * sizes[0] * sizes[2] * sizes[3]}
    gradient = next(matmul.ins for each, matmul in grouped.items() if each.operand == "weights")
    assert [user.name for user in module.entry.users[gradient.name]] == [module.entry.root.name]


@pytest.mark.pod
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("cluster", "calls"), [("h100:1x8", (12, 6)), ("b200:1x8", (0, 0))])
def test_explain_counts_the_kernels_of_a_training_step(pod, cluster, calls):
    """Two MoE layers with three matmuls, forward and both gradients."""
    pytest.importorskip("jax_triton", reason="needs `pip install tokamax jax-triton`")
    config = TransformerConfig(
        vocab_size=256, num_layers=2, embed_dim=256, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=512,
        moe=MoEConfig(routing=Routing(num_experts=8, top_k=2), mlp_dim=512), attention="blockwise",
    )  # fmt: skip
    precision, mesh = Precision(compute="bfloat16"), MeshSpec(fsdp=4, expert=2).abstract()
    strategy = fsdp() | expert_parallel()
    state = abstract_state(config.build(), optax.sgd(1e-3), mesh=mesh, strategy=strategy, precision=precision)
    batch = {name: jax.ShapeDtypeStruct((16, 256), np.int32) for name in ("inputs", "targets")}
    step = train_step(next_token_loss, precision=precision)
    report = explain(step, state, batch, cluster, pod=pod, advise=False)
    names = ("mosaic_gpu_v2", "triton_kernel_call_ffi")
    assert tuple(report.compute.library_calls.get(name, 0) for name in names) == calls
    assert any("tokamax has kernels for all gradients on Hopper" in note for note in report.notes) == (not sum(calls))
    if sum(calls):
        assert report.compute.ratio == pytest.approx(1, abs=0.1)


@pytest.mark.pod
def test_real_tokamax_without_gradient_kernel_is_unsupported():
    with raises("unsupported-feature", "grouped_matmul"):
        lowered_with_tokamax("b200:1x1")


def test_unsupported_by_tokamax(fake_tokamax, monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("only sm90")

    monkeypatch.setattr(fake_tokamax, "ragged_dot_general", refuse)
    rows, weights, _ = operands("bfloat16")
    with raises("unsupported-feature", "grouped_matmul"):
        grouped_matmul(rows, weights, jnp.ones(GROUPS, jnp.int32), implementation="tokamax")


def test_tokamax_without_the_package_is_an_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in choose_grouped_matmul("gpu").why
    rows, weights, _ = operands("float32")
    with raises("missing-package", "grouped_matmul"):
        grouped_matmul(rows, weights, jnp.ones(GROUPS, jnp.int32), implementation="tokamax")


@pytest.mark.parametrize("function", ["matmul", "swiglu"])
def test_blocks_of_a_group_are_summed_before_rounding(function):
    """The sum of three blocks of 259 ones is 777, or 776 in bfloat16. With rounding per block it would be 780."""
    rows, ones = jnp.ones((777, 1), jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16)
    sizes = jnp.asarray([777], jnp.int32)

    def total(weights):
        if function == "matmul":
            y = grouped_matmul(rows, weights, sizes, block=259, implementation="blocked")
        else:  # silu(16) is 16 in bfloat16, and times 1/16 it is 1
            y = grouped_swiglu(rows, 16 * ones, ones / 16, weights, sizes, block=259, implementation="blocked")
        return y.astype(jnp.float32).sum()

    assert float(jax.jit(jax.grad(total))(ones).ravel()[0]) == 776
