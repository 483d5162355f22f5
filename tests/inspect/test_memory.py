"""Memory accounts agree with the compiler, and remedies report the peak of the compiled variant."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect.memory import MOST_COMPILATIONS, memory, remedies
from meshpar.inspect.program import Program, compile_here
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.parallel.batch import StepBatch
from tests.grid import cases
from tests.inspect.saved import pods
from tests.sharding.test_activations import DEEP, X, _deep_loss

H100 = parse_cluster("h100:1x8")
MB = 10**6


def account(compiled, name, target, **options):
    plant, program = compiled(name, target, **options)
    found = memory(
        program, plant.state.setup, plant.batch, H100 if target == "pod" else None, execution=plant.execution
    )
    return plant, program, found


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *cases(grid=[(one, "cpu") for one in ("ddp", "zero1", "zero3", "fsdp_tensor")]),
        *pods(["zero1", "fsdp_tensor"], "pod"),
    ],
)
def test_account_matches_shardings_and_the_compiler(compiled, name, target):
    plant, program, found = account(compiled, name, target)
    config = plant.state.setup.table
    params = sum(math.prod(d.leaf.shape) * 4 // d.shards for d in config.params)
    moments = sum(math.prod(d.leaf.shape) * 4 // d.shards for d in config.optimizer)
    assert (found.params_bytes, found.optimizer_bytes) == (params, moments)
    assert found.other_bytes == 4 + 8 + 4  # the counter of steps, the key, the counter of skipped ones
    assert found.state_bytes == params + moments + 16
    rows = {"ddp": 8, "zero1": 8, "zero3": 8, "fsdp_tensor": 4}[name]
    assert found.batch_bytes == 2 * 16 * 64 * 4 // rows
    assert program.argument_bytes == found.state_bytes + found.batch_bytes
    assert found.peak_bytes == program.peak_bytes
    parts = found.state_bytes + found.batch_bytes + found.output_bytes + found.temporaries_bytes
    assert parts == found.peak_bytes
    assert 0 < found.gradients_bytes <= found.temporaries_bytes == program.temporary_bytes


def test_unsharded_adam_state_is_three_copies(compiled, planted):
    _, _, found = account(compiled, "ddp", "pod")
    assert found.params_bytes == 4 * planted.CONFIG.num_params
    assert found.optimizer_bytes == 2 * found.params_bytes + 4  # two moments and their count


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Return the sizes of a program without compiling it."""

    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0
    text: str = "HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n"

    def program(self) -> Program:
        return Program(target="cpu", compile_s=0.0, **dataclasses.asdict(self))


def toy(strategy=None, *, rows=16, params=None, trainable=None, tx=None, **axes):
    """A state, and a batch of float64 rows, as NumPy makes them."""
    model = mp.from_functions(lambda key: params or {"w": jnp.zeros((64, 32))}, lambda p, x: x @ p["w"])
    mesh, strategy = mp.MeshSpec(**(axes or {"data": 8})).abstract(), strategy or mp.ddp()
    state = mp.abstract_state(model, tx or optax.adam(1e-3), mesh=mesh, strategy=strategy, trainable=trainable)
    return state, {"x": np.zeros((rows, 64))}


@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 1), ("dualpipe", 2)])
def test_gradient_bytes_of_stages(schedule, copies):
    """A stage accumulates the gradients of its layers. DualPipe has two copies of the model."""

    def apply(params, x):
        return mp.scan_layers(lambda x, p: x + jnp.tanh(x @ p["w"]), x, params["layers"]) @ params["head"]

    params = {"layers": {"w": jnp.zeros((4, 64, 64))}, "head": jnp.zeros((64, 32))}
    model = mp.from_functions(lambda key: params, apply, names={"layers/w": ("layers", None, None)})
    strategy = mp.ddp() | mp.pipeline_parallel(stages=2, microbatches=4, schedule=schedule)
    mesh = mp.MeshSpec(stage=2).abstract()
    setup = mp.abstract_state(model, optax.sgd(0.1), mesh=mesh, strategy=strategy).setup
    found = memory(Sizes(temporary_bytes=MB).program(), setup, {"x": np.zeros((16, 64), np.float32)}, None)
    assert found.gradients_bytes == 4 * (copies * 4 * 64 * 64 // 2 + 64 * 32)


@pytest.mark.parametrize(
    ("share", "fits", "note"),
    [(0.5, True, ""), (0.8, True, "XLA_CLIENT_MEM_FRACTION"), (0.95, True, "CUDA context"), (1.01, False, "")],
)
def test_fits_and_note_depend_on_the_peak(share, fits, note):
    state, batch = toy()
    program = Sizes(temporary_bytes=int(share * 80e9)).program()
    found = memory(program, state.setup, batch, H100)
    assert (found.limit_bytes, found.fits) == (80_000_000_000, fits)
    assert (note in found.note, bool(found.note)) == (True, bool(note))


def test_account_without_a_gpu_has_no_limit():
    state, batch = toy()
    found = memory(Sizes().program(), state.setup, batch, None)
    assert (found.limit_bytes, found.fits, found.note) == (None, None, "")
    assert found.batch_bytes == 16 * 64 * 4 // 8  # float64 examples become float32
    # `table` is replicated by a rule for inputs.
    batch = StepBatch({**batch, "table": None}, {"x": None, "table": np.zeros((5, 3), np.float32)})
    found = memory(Sizes().program(), state.setup, batch, None)
    assert found.batch_bytes == 16 * 64 * 4 // 8 + 5 * 3 * 4


def test_offloaded_state_is_not_on_the_device():
    state, batch = toy(tx=mp.optim.offload_state(optax.adam(1e-3)))
    found = memory(Sizes().program(), state.setup, batch, None)
    assert (found.optimizer_bytes, found.host_bytes) == (4, 2 * 64 * 32 * 4)
    assert [(one.kind, one.nbytes) for one in found.largest] == [("parameters", 64 * 32 * 4), ("optimizer state", 4)]


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        (mp.ddp(), {}, 64 * 32 * 4),
        (mp.zero1(min_bytes=0), {}, 64 * 32 * 4 // 8),  # one micro-step: they go straight to the optimizer's shards
        (mp.zero1(min_bytes=0), {"accumulate": 2}, 64 * 32 * 4),
        (mp.zero2(min_bytes=0), {"accumulate": 2}, 64 * 32 * 4 // 8),
        (mp.zero3(min_bytes=0), {"accumulate": 2, "reduce_gradients": "once"}, 64 * 32 * 4),
        (mp.zero3(min_bytes=0), {"precision": mp.Precision(compute="bfloat16", reduce="bfloat16")}, 64 * 32 * 2 // 8),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_bytes(strategy, options, expected, frozen):
    params = {"w": jnp.zeros((64, 32)), **({"base": jnp.zeros((64, 48))} if frozen else {})}
    state, batch = toy(strategy, params=params, trainable="w", fsdp=8)
    step = mp.train_step(lambda model, batch, key: (model(batch["x"]).mean(), {}), **options)
    program = Sizes(temporary_bytes=MB).program()
    assert memory(program, state.setup, batch, None, execution=step.describe(state, batch)).gradients_bytes == expected


@pytest.mark.parametrize("target", cases("pod", grid=["cpu", "pod"]))
def test_largest_contributors_have_their_modules(compiled, target):
    _, _, found = account(compiled, "fsdp_tensor", target)
    assert list(found.largest) == sorted(found.largest, key=lambda one: -one.nbytes)
    state = {(one.kind, one.module): one for one in found.largest}
    up = state["parameters", "layers/mlp/up"]
    assert (up.nbytes, up.shape, up.count) == (4 * 256 * 768 * 4 // 8, "f32[4,64,384]", 1)
    moments = state["optimizer state", "layers/mlp/up"]
    assert (moments.nbytes, moments.count) == (2 * up.nbytes, 2)
    temporaries = [one for one in found.largest if one.kind == "temporary"]
    assert all(one.nbytes > 0 and one.shape for one in temporaries)
    # Activations saved by the forward loop are attributed to their layers.
    assert any(one.module.startswith("gradients/layers") and ".py:" in one.source for one in temporaries)
    assert len({(one.module, one.shape, one.source) for one in temporaries}) == len(temporaries)


def layers(strategy, *, rows=16, real=False, **axes):
    """A state of two layers that can be recomputed, and a batch."""

    def start(key):
        return {"layers": {"up": jnp.zeros((2, 256, 768)), "down": jnp.zeros((2, 768, 256))}}

    def apply(params, x):
        return mp.scan_layers(lambda x, one: x + jnp.tanh(x @ one["up"]) @ one["down"], x, params["layers"])

    names = {"layers/up": ("layers", "embed", "mlp"), "layers/down": ("layers", "mlp", "embed")}
    model = mp.from_functions(start, apply, names=names)
    mesh = mp.MeshSpec(**axes)
    mesh = mesh.build() if real else mesh.abstract()
    state = mp.abstract_state(model, optax.adam(1e-3), mesh=mesh, strategy=strategy)
    return state, {"x": jax.ShapeDtypeStruct((rows, 256), np.float32)}


def squares(model, batch, key):
    squares = model(batch["x"]) ** 2
    return mp.MeanLoss(squares.sum(), squares.size), {}


class Compiler:
    """A fake compiler that counts programs and returns the given peaks in order."""

    def __init__(self, *peaks: int) -> None:
        self.peaks, self.asked = list(peaks), 0

    def __call__(self, traced) -> Program:
        assert isinstance(traced, jax.stages.Traced)
        self.asked += 1
        return Sizes(temporary_bytes=self.peaks.pop(0) if len(self.peaks) > 1 else self.peaks[0]).program()


@pytest.mark.pod
def test_remedy_makes_a_large_model_fit(planted, pod):
    """Parameters and moments of a Llama layer with tables need 4.2 GB, which a GPU of 3 GB can only store as shards."""
    config = mp.models.llama3_8b(num_layers=1, vocab_size=16_384)
    gpu = dataclasses.replace(H100.gpu, memory_bytes=3e9)
    cluster = dataclasses.replace(H100, gpu=gpu, gpus_per_node=4)
    mesh = mp.MeshSpec(data=4).abstract()
    state = mp.abstract_state(config.build(), optax.adam(1e-3), mesh=mesh, strategy=mp.ddp())
    step = mp.train_step(mp.models.next_token_loss, precision=mp.Precision(compute="bfloat16"))
    batch = {name: jax.ShapeDtypeStruct((8, 512), np.int32) for name in ("inputs", "targets")}
    program = pod.compile(step.trace(state, batch), cluster)
    before = memory(program, state.setup, batch, cluster, execution=step.describe(state, batch))
    assert before.fits is False
    found = remedies(step, state.setup, batch, lambda traced: pod.compile(traced, cluster), before.limit_bytes)
    tried = [one for one in found if one.peak_bytes is not None]
    assert [(one.change, one.fits) for one in tried] == [("zero1(axis='data')", True)]
    assert before.peak_bytes > 4.2e9 > 3e9 >= tried[0].peak_bytes
    # Variants with unsharded state are not compiled, because the state exceeds the limit.
    left_out = {one.change: one.reason for one in found if one.peak_bytes is None}
    assert "state and batch alone take" in left_out["remat=full"]


def test_remedy_has_the_peak_of_the_changed_program():
    state, batch = layers(mp.zero2(), real=True, fsdp=8)
    (found,) = remedies(mp.train_step(squares), state.setup, batch, compile_here, 10**12)
    changed = compile_here(mp.train_step(squares, accumulate=2).trace(state, batch))
    assert (found.change, found.peak_bytes, found.fits) == ("accumulate=2", changed.peak_bytes, True)


@pytest.mark.parametrize(
    ("strategy", "axes", "expected"),
    [
        (mp.ddp(), {"data": 8}, ["zero1(axis='data')", "zero3(axis='data')"]),
        (mp.ddp(), {"fsdp": 8}, ["zero1()", "zero3()"]),
        (mp.zero1(), {"fsdp": 8}, ["zero3()"]),
        (mp.zero2(), {"fsdp": 8}, ["zero3()"]),
        (
            mp.ddp() | mp.tensor_parallel(),
            {"data": 4, "tensor": 2},
            ["zero1(axis='data') | tensor_parallel()", "zero3(axis='data') | tensor_parallel()"],
        ),
        (mp.zero3(), {"fsdp": 8}, []),
        (mp.hsdp(), {"data": 2, "fsdp": 4}, ["fsdp(axis=('data', 'fsdp'))"]),
        (mp.ddp() | mp.tensor_parallel(), {"tensor": 8}, []),
    ],
)
def test_remedies_keep_other_parallelisms(strategy, axes, expected):
    model = mp.from_functions(
        lambda key: {"w": jnp.zeros((64, 32))}, lambda p, x: x @ p["w"], names={"w": ("embed", "mlp")}
    )
    state = mp.abstract_state(model, optax.adam(1e-3), mesh=mp.MeshSpec(**axes).abstract(), strategy=strategy)
    step = mp.train_step(lambda model, batch, key: (model(batch["x"]).mean(), {}))
    batch = {"x": jax.ShapeDtypeStruct((16, 64), np.float32)}
    found = [one.change for one in remedies(step, state.setup, batch, Compiler(10**12), 10**11)]
    others = ("accumulate=", "remat=")
    assert [change for change in found if not any(word in change for word in others)] == expected


def test_remedies_stop_at_the_first_that_fits():
    state, batch = layers(mp.ddp(), data=8)
    compiler = Compiler(2 * 10**11, 10**10)
    found = remedies(mp.train_step(squares), state.setup, batch, compiler, 10**11)
    assert [(one.change, one.fits) for one in found] == [("zero1(axis='data')", False), ("accumulate=2", True)]
    assert compiler.asked == 2


@pytest.mark.matrix
def test_remedies_of_pipelines_add_microbatches():
    cfg = TransformerConfig(
        vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
    )
    strategy = mp.pipeline_parallel(stages=2, microbatches=2)
    mesh = mp.MeshSpec(stage=2).abstract(devices=2)
    state = mp.abstract_state(cfg.build(), optax.sgd(0.1), mesh=mesh, strategy=strategy)
    batch = {name: jax.ShapeDtypeStruct((8, 8), np.int32) for name in ("inputs", "targets")}
    found = remedies(mp.train_step(next_token_loss), state.setup, batch, Compiler(10**6), 10**9)
    assert [(one.change, one.fits) for one in found] == [("pipeline_parallel(stages=2, microbatches=4)", True)]


@pytest.mark.parametrize(
    ("strategy", "axes"), [(mp.ddp(), {"data": 4}), pytest.param(mp.zero3(), {"fsdp": 4}, marks=pytest.mark.matrix)]
)
def test_remedies_combine_changes_up_to_the_maximum(strategy, axes):
    state, batch = layers(strategy, rows=64, **axes)
    compiler = Compiler(10**12)
    found = remedies(mp.train_step(squares), state.setup, batch, compiler, 10**11)
    assert compiler.asked == MOST_COMPILATIONS == len(found)
    last = found[-1].change.split(" + ")
    assert "remat=full" in last
    assert any(part.startswith("accumulate=") for part in last)
    assert len(last) == (3 if strategy == mp.ddp() else 2)


@pytest.mark.parametrize("kind", cases("nnx", grid=["nnx", "linen"]))
def test_remedies_for_numbered_layers_use_a_remat_rule(kind):
    """`train_step(remat=...)` requires stacked layers. The suggested rule is valid for the step."""
    model, pattern = DEEP[kind](), {"linen": r"blocks_\\d+", "nnx": r"blocks/\\d+"}[kind]
    state = mp.abstract_state(
        model, optax.sgd(0.1), mesh=mp.MeshSpec(fsdp=8).abstract(), strategy=mp.zero3(min_bytes=0)
    )
    step = mp.train_step(_deep_loss)
    found = remedies(step, state.setup, X, Compiler(10**12), 10**11)
    rule = f"zero3(min_bytes=0) | Rules(remat={{'{pattern}': 'full'}})"
    assert [one.change for one in found if one.peak_bytes] == [rule]
    # The model has batch statistics, so that micro-steps are not possible.
    assert "combines examples" in next(one.reason for one in found if one.change == "accumulate=2")
    assert not any("remat=full" in one.change for one in found)


def test_invalid_remedies_have_a_reason(planted):
    model = mp.from_functions(lambda key: {"w": jnp.zeros((64, 32))}, lambda p, x: x @ p["w"])
    state = mp.abstract_state(model, optax.sgd(1e-3), mesh=mp.MeshSpec(data=8).abstract(), strategy=mp.ddp())
    batch = {"x": jax.ShapeDtypeStruct((8, 64), np.float32)}
    step = mp.train_step(lambda model, batch, key: (model(batch["x"]).mean(), {}))
    found = {one.change: one for one in remedies(step, state.setup, batch, Compiler(10**12), 10**11)}
    assert "8 is not a positive multiple of 16" in found["accumulate=2"].reason
    rows = {"x": jax.ShapeDtypeStruct((16, 64), np.float32)}
    of_scalar = {one.change: one for one in remedies(step, state.setup, rows, Compiler(10**12), 10**11)}
    assert "the loss is a scalar" in of_scalar["accumulate=2"].reason
    assert "the model marks no layer" in found["remat=full"].reason
    assert not any(one.fits or one.peak_bytes for one in found.values() if one.reason)
    assert not any(" + " in change for change in found)  # no combinations of invalid changes


@pytest.mark.parametrize(
    ("strategy", "smaller"),
    [
        (mp.ddp() | mp.Rules(mlp="tensor"), "zero1(axis='data') | Rules(mlp='tensor')"),
        (mp.tensor_parallel(), "tensor_parallel() | zero1(axis='data')"),
    ],
    ids=str,
)
def test_remedies_for_custom_rules_add_zero(strategy, smaller):
    state, batch = layers(strategy, data=4, tensor=2)
    found = remedies(mp.train_step(squares), state.setup, batch, Compiler(1), 10**11)
    assert found[0].change == smaller
