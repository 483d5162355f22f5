"""XLA compile options: defaults, checks before tracing, and program fingerprints."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import meshpar as mp
from meshpar.cli.explain_command import Subject
from meshpar.hardware.clusters import parse_cluster
from meshpar.hardware.compile_options import GPU_OPTIONS, LATENCIES, check_options, fingerprint, options_for
from meshpar.inspect.target import missing_aot, topology, traced_for
from meshpar.models import TransformerConfig
from meshpar.runs.recipe import build_model, build_optimizer
from meshpar.runs.recipe_file import load_recipe
from meshpar.runs.resuming import StepProgram
from meshpar.training.state import make_setup
from tests.errors import raises

PODS = {
    "llama3_8b": "h100:8x8", "llama3_70b": "h100:64x8", "llama3_405b": "h100:512x8", "mixtral_8x7b": "h100:8x8",
    "deepseek_v3": "h100:256x8", "gpt_stdlib": "h100:1x8", "gpt_3d": "h100:1x8", "gpt_pipeline": "h100:1x8",
    "long_context": "h100:1x8", "moe_stdlib": "h100:1x8", "digits_linen": "h100:1x8",
    "finetune_hf": "h100:1x8",
}  # fmt: skip
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
ALL = "xla_gpu_all_reduce_combine_threshold_bytes"
THRESHOLD = "xla_gpu_all_gather_combine_threshold_bytes"


def loss(model, batch, key):
    return jnp.mean(model(batch["x"]) ** 2), {}


def step_and_state(mesh, **options):
    model = mp.from_functions(
        lambda key: {"w": jax.random.normal(key, (8, 4))},
        lambda params, x: x @ params["w"],
        names={"w": ("embed", "mlp")},
    )
    state = mp.abstract_state(model, optax.sgd(0.1), mesh=mesh, strategy=mp.fsdp(min_bytes=0))
    return mp.train_step(loss, **options), state


BATCH = {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)}


def test_options_for_gpus_have_defaults_that_users_override(mesh8):
    no_devices = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    assert options_for(mesh8, {}) == {}
    assert options_for(mesh8, {THRESHOLD: 7}) == {THRESHOLD: 7}
    assert options_for(no_devices, {}) == dict(GPU_OPTIONS)
    assert options_for(no_devices, {SCHEDULER: False, THRESHOLD: 7})[SCHEDULER] is False


def test_prefetch_sets_compile_options():
    """A layer has three reduce-scatters, or one and more overlap with tensor parallelism."""
    cfg = TransformerConfig(
        vocab_size=64, num_layers=4, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128
    )

    def options(spec, strategy, trainable=None):
        args = {"mesh": spec.abstract(8), "strategy": strategy, "trainable": trainable}
        state = mp.abstract_state(cfg.build(), optax.sgd(0.1), **args)
        return mp.train_step(loss).compile_options(state.setup)

    layer_elements = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    alone = options(mp.MeshSpec(fsdp=8), mp.fsdp(prefetch=1))
    split = options(mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp(prefetch=1) | mp.tensor_parallel())
    assert alone["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 4 * layer_elements // 8 // 3
    frozen_mlp = options(mp.MeshSpec(fsdp=8), mp.fsdp(prefetch=1), lambda path: "/mlp/" not in path)
    trained_elements = layer_elements - 3 * 64 * 128
    assert frozen_mlp["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 4 * trained_elements // 8 // 3
    assert split["xla_gpu_experimental_parallel_collective_overlap_limit"] == 4
    assert "xla_gpu_reduce_scatter_combine_threshold_bytes" not in split
    for one in (alone, split):
        assert one[THRESHOLD] == 2**30
        assert check_options(one) == one
    assert options(mp.MeshSpec(fsdp=8), mp.fsdp()) == dict(GPU_OPTIONS)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"xla_gpu_no_such": 1}, "unknown-name"),
        ({"xla_gpu_enable_latency_hiding_schedule": True}, "unknown-name"),
        ({SCHEDULER: 1}, "unknown-name"),
        ({THRESHOLD: "many"}, "unknown-name"),
        ({"--" + THRESHOLD: 1}, "wrong-type"),
        ({THRESHOLD: None}, "wrong-type"),
        *((value, "wrong-type") for value in ("text", ["a"], 5)),
    ],
)
def test_invalid_xla_options_fail_before_tracing(mesh8, options, code):
    with raises(code, "xla="):
        step, state = step_and_state(mesh8, xla=options)
        step.loss_fn = None  # tracing would call it
        step.trace(state, BATCH)


def test_fingerprint_depends_on_program_and_options(mesh8):
    def found(**options):
        step, state = step_and_state(mesh8, **options)
        return fingerprint(step.lower(state, BATCH), step.compile_options(state.setup))

    assert found() == found()
    assert len({found(), found(xla={THRESHOLD: 7}), found(nonfinite="skip"), found(nonfinite="ignore")}) == 3


def test_command_line_options_reach_the_compiler(meshpar, monkeypatch):
    seen = {}

    def explained(step, state, batch, cluster, **_):
        seen.update(step.options.xla)
        raise mp.MeshparError("enough")

    monkeypatch.setattr("meshpar.inspect.explain.explain", explained)
    words = ["--xla", f"{THRESHOLD}=1024", "--set", "seed=9", "--xla", f"--{SCHEDULER}=false"]
    words += ["--set", f"step.xla.{ALL}=1"]
    assert meshpar("explain", "recipes/gpt_stdlib.py", *words)[0] == 2
    assert seen == {THRESHOLD: 1024, SCHEDULER: False, ALL: 1}
    assert type(seen[ALL]) is int


def test_profiler_latency_file_is_checked_and_fingerprinted(mesh8, tmp_path):
    step, state = step_and_state(mesh8)
    lowered, file = step.lower(state, BATCH), tmp_path / "of.pbtxt"
    found = []
    for cost_us in (1, 2500):
        file.write_text(f'costs {{ name: "fusion.1" cost_us: {cost_us} }}\n')
        found.append(fingerprint(lowered, {LATENCIES: str(file)}))
    assert found[0] != found[1]
    assert dict(check_options({LATENCIES: str(file)})) == {LATENCIES: str(file)}
    file.write_text("nothing")
    for path, code in (("none.pbtxt", "missing-file"), ("of.txt", "wrong-type"), ("of.pbtxt", "damaged-file")):
        with raises(code, "xla="):
            check_options({LATENCIES: str(tmp_path / path)})


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("nope=3", "begin with xla_"),
        ("xla_no_such=1", "No such compile option"),
        ("xla_no.such=1", "`step.xla.xla_no.such`"),
        ("xla_foo", "the format is NAME=VALUE"),
    ],
)
def test_shard_command_rejects_unknown_xla_options(meshpar, option, wanted):
    code, _, error = meshpar("shard", "recipes/gpt_stdlib.py", "--devices", "8", "--xla", option)
    assert code == 2
    assert wanted in error


class Compiled(Exception):
    """The lowered program and its options, instead of an hour of compiling."""


class Lowering:
    def compile(self, lowered, cluster, options):
        raise Compiled(lowered, options)


@pytest.mark.pod
@pytest.mark.parametrize("name", PODS)
def test_train_and_explain_compile_the_same_program(name):
    if missing_aot() or importlib.util.find_spec("nvidia.cudnn") is None:
        pytest.skip("lowers cuDNN's attention for GPUs, which needs `pip install meshpar[cudnn]`")
    path, cluster = f"recipes/{name}.py", parse_cluster(PODS[name])
    subject = Subject.of(path, cluster, layout=(), assignments=(), shapes=None)
    with pytest.raises(Compiled) as stopped:
        subject.explained(Lowering())
    # Same steps as `train`, on the devices of the pod.
    recipe = load_recipe(path, devices=cluster.num_devices)
    mesh = recipe.mesh.build(topology(cluster))
    model = build_model(recipe)
    tx = build_optimizer(recipe, model, mesh)
    setup = make_setup(model, tx, mesh=mesh, strategy=recipe.strategy, precision=recipe.step.precision)
    with traced_for(cluster):
        line = str(StepProgram(recipe, setup, SimpleNamespace(spec=subject.batch)))
    assert re.match(r"program (\w{12}) with xla_gpu", line)[1] == fingerprint(*stopped.value.args)
