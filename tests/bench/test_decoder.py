"""Whole steps of a decoder: their arithmetic, a GPU's profile by kind of kernel, and the plain decoder beside ours."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar.bench import decoder, plain
from meshpar.bench.decoder import BFLOAT16, FP8, FP8_ROWS, PLAIN, TINY, Steps, kernels_of, size_for, timed
from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect import trace
from meshpar.inspect.hlo.parser import parse
from meshpar.models import next_token_loss
from tests.bench.test_gpu import MEASURED
from tests.equal import mean_loss
from tests.inspect.test_trace import HOST, plane, written

PROGRAM = """HloModule jit__step, is_scheduled=true

%fused (x: f32[8,8], y: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  ROOT %dot.7 = f32[8,8]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %fusion.3 = f32[8,8]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused
  ROOT %fusion.9 = f32[8,8]{1,0} add(%fusion.3, %b)
}
"""
RECORDED = [
    ("gemm", "fusion.3", 0, 40), ("nvjet", "nvjet_sm90", 40, 20), ("add", "fusion.9", 60, 5),
    ("norm", "fusion.8", 65, 9), ("fmha", "custom-call.fmha.2", 74, 16), ("copy", "copy.4", 95, 5),
]  # fmt: skip


def recorded(folder):
    written(folder, HOST, plane("/device:GPU:0", {"Stream #7(Compute)": RECORDED}, 2))
    return trace.read(folder, top=20)


def test_sizes_go_by_the_memory():
    of_80 = size_for("gpu", 64e9)
    assert of_80.tokens == 4 * 4096
    assert 1e9 < of_80.config.num_params < 3e9
    sizes = [size_for("gpu", memory) for memory in (0, 17e9, 30e9, 64e9, 105e9)]
    assert sorted(sizes, key=lambda one: one.flops) == sizes
    assert size_for("cpu", 64e9).config is TINY


def test_utilisation_counts_half_of_attention():
    size = size_for("gpu", 64e9)
    cfg = size.config
    matrices = cfg.num_params - cfg.vocab_size * cfg.embed_dim - cfg.embed_dim * (2 * cfg.num_layers + 1)
    attention = 12 * cfg.num_layers * cfg.num_heads * cfg.head_dim * size.seq_len / 2
    assert size.flops == size.tokens * (6 * matrices + attention)
    took = timed(BFLOAT16, size, [0.3, 0.2, 0.4], 10.0, 1e15, 5e14)
    assert (took.step_s, took.of_peak) == (0.3, pytest.approx(size.flops / 0.3 / 1e15))
    assert took.of_ceiling == pytest.approx(2 * took.of_peak)
    assert took.tokens_per_s == pytest.approx(size.tokens / 0.3)


def test_a_profiles_kernels_go_by_what_is_in_them(tmp_path):
    found = recorded(tmp_path)
    kinds = {one.name: one.kind for one in kernels_of(found, parse(PROGRAM))}
    assert kinds == {
        "fusion.3": "matmul", "nvjet_sm90": "matmul", "custom-call.fmha.2": "attention", "fusion.8": "other",
        "fusion.9": "other", "copy.4": "other", "idle": "idle",
    }  # fmt: skip


def steps_of(folder, **changes):
    size, kernels = size_for("gpu", 64e9), kernels_of(recorded(folder), parse(PROGRAM))
    took = {BFLOAT16: 0.2, PLAIN: 0.2, FP8_ROWS: 0.16}
    times = tuple(timed(name, size, [took_s], 9.0, 989e12, 7e14) for name, took_s in took.items())
    made = {"times": times, "predicted_s": 0.16, "kernels": kernels, "notes": ("fp8 did not run: no such kernel",)}
    return Steps(
        size=size, num_params=size.config.num_params, remat="minimal", ceiling_flops_per_s=7e14,
        peak_flops_per_s=989e12, **{**made, **changes},
    )  # fmt: skip


def test_a_report_is_printed_and_kept_in_a_profile(tmp_path):
    found = steps_of(tmp_path)
    assert found.ratio == pytest.approx(1.25)
    assert [one.name for one in found.largest] == ["custom-call.fmha.2", "fusion.8", "fusion.9"]
    text = str(dataclasses.replace(MEASURED, steps=found))
    for told in (
        "measured over predicted 1.25",
        "plain Flax",
        "fp8-rowwise",
        "causal half",
        "fp8 did not run",
        "no matmul",
    ):
        assert told in text
    file = tmp_path / "my.json"
    dataclasses.replace(MEASURED, steps=found).profile(file).save(file)
    read = parse_cluster(str(file))
    assert read.products == MEASURED.flops_per_s
    assert read.steps["largest"][0]["kind"] == "attention"
    wide, _, by_row = read.steps["times"]
    assert by_row["name"] == "fp8-rowwise"
    # Of the same peak as in 16 bits: what eight bits gain stands as it is.
    assert by_row["of_peak"] == pytest.approx(wide["of_peak"] * 0.2 / 0.16)
    assert MEASURED.profile(file).steps == read.steps  # products measured anew leave them
    assert steps_of(tmp_path / "b", predicted_s=None).ratio is None


def test_what_does_not_fit_is_halved_and_told(monkeypatch):
    def way(size):
        if size.rows > 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        while True:
            yield jnp.float32(size.rows)

    notes = []
    size = dataclasses.replace(size_for("cpu", 0), rows=8)
    fits, took, loss = decoder._fitting("fp8", way, size, 3, notes)
    assert (fits.rows, len(took), loss) == (2, 3, 2.0)
    assert notes == [
        "fp8: 8 rows do not fit, so it was measured with 4",
        "fp8: 4 rows do not fit, so it was measured with 2",
    ]


def test_what_cannot_run_leaves_the_rest(monkeypatch):
    def refused(size):
        raise ValueError("cuDNN is missing\nand more")
        yield

    def steady(size):
        while True:
            yield jnp.float32(1.0)

    monkeypatch.setattr(decoder, "_ours", lambda matmul: refused)
    monkeypatch.setattr(decoder, "_plain", steady)
    found = decoder.steps(size_for("cpu", 0), ceiling_flops_per_s=1e11, repeats=2)
    assert [one.name for one in found.times] == [PLAIN]
    assert found.notes == tuple(f"{name} did not run: cuDNN is missing" for name in (BFLOAT16, FP8, FP8_ROWS))
    late = decoder.steps(size_for("cpu", 0), ceiling_flops_per_s=1e11, began_s=-1e9)
    assert (late.times, len(late.notes)) == ((), 4)


@pytest.mark.pod
def test_a_gpus_program_has_these_flops_and_kernels(pod):
    whole, precision = size_for("gpu", 64e9), decoder._precision(None)
    cfg = dataclasses.replace(whole.config, num_layers=2)
    size = dataclasses.replace(whole, config=cfg)
    how = {"mesh": mp.MeshSpec(fsdp=1).abstract(devices=1), "strategy": mp.fsdp(), "precision": precision}
    state = mp.abstract_state(cfg.build(), decoder._optimizer(), **how)
    step = mp.train_step(next_token_loss, precision=precision, remat=decoder._REMAT, xla=decoder._UNGRAPHED)
    cluster = dataclasses.replace(parse_cluster("h100:1x1"), products={64: 1e13, 4096: 1e14})
    report = mp.explain(step, state, decoder._batch(size), cluster, pod=pod, advise=False)
    assert report.compute.model_flops_per_device == size.flops
    kinds = list(decoder._kinds(report.program.module).values())
    assert kinds.count("attention") == 2  # forward and backward, each in a loop over layers
    assert kinds.count("matmul") > 10
    faster = dataclasses.replace(cluster, products={64: 2e13, 4096: 2e14})
    assert decoder.predicted_s(report, cluster) == pytest.approx(report.compute.predicted_step_s)
    assert decoder.predicted_s(report, faster) < decoder.predicted_s(report, cluster)


@pytest.mark.matrix
def test_plain_flax_is_the_same_model():
    size = size_for("cpu", 0)
    batch = decoder._batch(size)
    setup, _ = decoder._prepared(size, None)
    params = setup.init(0).params
    _, theirs, _ = plain.begin(size.config, optax.identity(), "float32")
    ours = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    named = lambda path: "".join(f"['{getattr(key, 'key', '')}']" for key in path if hasattr(key, "key"))  # noqa: E731
    given = jax.tree_util.tree_map_with_path(lambda path, x: jnp.asarray(ours[named(path)]).reshape(x.shape), theirs)
    graph, _ = nnx.split(nnx.eval_shape(lambda: plain.Decoder(size.config, "float32", rngs=nnx.Rngs(0))))
    one = jax.jit(lambda params: plain.loss(nnx.merge(graph, params), batch))(given)
    with mp.use_rules(setup.mesh, setup.strategy):
        other = jax.jit(lambda params: mean_loss(setup.model.bind(params, {}), batch)[0])(params)
    # float32, and sums in another order.
    np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.matrix
def test_the_whole_command_on_this_machine(meshpar, tmp_path):
    code, out, error = meshpar(
        "bench", "gpu", "--size", "64", "--repeats", "1", "--steps", "2", "--trace", tmp_path, "--json"
    )
    assert code == 0, error
    found = json.loads(out)["steps"]
    assert [one["name"] for one in found["times"]] == [BFLOAT16, PLAIN, FP8, FP8_ROWS]
    assert all(one["of_peak"] is None and one["of_ceiling"] > 0 for one in found["times"])
    assert max(one["loss"] for one in found["times"]) < 7
    assert {"matmul", "other"} <= {one["kind"] for one in found["kernels"]}
    assert all(one["kind"] != "matmul" for one in found["largest"])
    assert [note.partition(":")[0] for note in found["notes"]] == ["no step is predicted"]
    assert list(tmp_path.glob("**/*.xplane.pb"))
