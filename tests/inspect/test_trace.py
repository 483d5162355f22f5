"""Reading a profile: busy, idle and exposed times, compared with a hand-computed GPU trace."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from jaxlib import _hlo

from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect import trace
from meshpar.runs.traced_run import traced_run
from meshpar.sharding.errors import MeshparError
from tests.errors import raises

STATS = {1: "hlo_op", 2: "hlo_module", 3: "step_num"}
OP, MODULE, STEP = STATS


def plane(name, lines, number=1):
    """A plane's text: lines are {name: [(event, operation or step, begin µs, length µs)]}."""
    names = dict.fromkeys(event for events in lines.values() for event, *_ in events)
    ids = {event: at for at, event in enumerate(names, 1)}
    text = [f'planes {{ id: {number} name: "{name}"']
    text += [f'event_metadata {{ key: {at} value {{ id: {at} name: "{event}" }} }}' for event, at in ids.items()]
    text += [f'stat_metadata {{ key: {at} value {{ id: {at} name: "{stat}" }} }}' for at, stat in STATS.items()]
    for at, (line, events) in enumerate(lines.items(), 1):
        text.append(f'lines {{ id: {at} name: "{line}" timestamp_ns: 1000')
        for event, of, begin, length in events:
            stats = f"stats {{ metadata_id: {STEP} int64_value: {of} }}" if isinstance(of, int) else ""
            if isinstance(of, str):
                stats = f'stats {{ metadata_id: {OP} str_value: "{of}" }} '
                stats += f'stats {{ metadata_id: {MODULE} str_value: "jit__step" }}'
            place = f"offset_ps: {begin * 10**6} duration_ps: {length * 10**6}"
            text.append(f"events {{ metadata_id: {ids[event]} {place} {stats} }}")
        text.append("}")
    return "\n".join([*text, "}"])


def written(folder, *planes):
    path = folder / "plugins" / "profile" / "then" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace("\n".join(planes)))
    return path


def gpu(number):
    """Two steps of 100 µs: matmuls for 60, a gather of 30 of which 20 overlap with a matmul, and an update of 5."""
    compute = [("nvjet_sm90", "fusion.3", 0, 40), ("nvjet_sm90", "dot.1", 50, 20), ("loop_add", "fusion.9", 70, 5)]
    gather = [("ncclDevKernel_AllGather", "all-gather-start.2", 20, 30)]
    twice = lambda events: [(n, op, b + at, t) for at in (0, 100) for n, op, b, t in events]  # noqa: E731
    derived = [("fusion.3", "fusion.3", 0, 1000)]  # a line of XProf that repeats the streams
    end = [("MemcpyD2D", "copy.4", 195, 5)]
    lines = {"Stream #7(Compute)": twice(compute) + end, "Stream #9": twice(gather), "XLA Ops": derived}
    return plane(f"/device:GPU:{number}", lines, number + 2)


HOST = plane(
    "/host:CPU",
    {"python": [("meshpar:step", 10, 0, 3), ("meshpar:data", None, 4, 2), ("meshpar:step", 11, 100, 3)]},
)


def test_gpu_trace_times_per_device_and_step(tmp_path):
    written(tmp_path, HOST, gpu(0), gpu(1))
    found = trace.read(tmp_path)
    assert (found.program, found.devices, found.steps) == ("jit__step", 2, 2)
    assert found.step_s == pytest.approx(100e-6)
    # Each step is busy from 0 to 75; the second also has a copy of 5 at its end.
    assert found.busy_s == pytest.approx(77.5e-6)
    assert found.idle_s == pytest.approx(22.5e-6)
    (gather,) = found.collectives
    assert (gather.name, gather.kind, gather.count) == ("all-gather-start.2", "all-gather", 1)
    assert gather.measured_s == pytest.approx(30e-6)
    assert gather.exposed_s == pytest.approx(10e-6)
    assert [(one.name, round(one.time_s * 1e6, 3)) for one in found.costs] == [
        ("fusion.3", 40.0), ("idle", 22.5), ("dot.1", 20.0),
    ]  # fmt: skip
    assert found.host == {"data": pytest.approx(1e-6)}
    assert found.to_json()["collectives"][0]["ratio"] is None
    assert found.method == trace.WITHOUT_GRAPHS
    assert {cause: round(seconds * 1e6, 3) for cause, seconds in found.causes.items()} == {
        "matmul": 0, "attention": 0, "memory-bound": 67.5, "communication": 10, "idle": 22.5,
    }  # fmt: skip
    assert "the trace does not contain the program" in str(found)


def test_zero_length_operations(tmp_path):
    written(tmp_path, HOST, plane("/device:GPU:0", {"Stream #7(Compute)": [("loop_add", "fusion.9", 0, 0)]}, 2))
    found = trace.read(tmp_path)
    assert found.step_s == 0
    found.__rich__()  # omits shares of a step time of 0


def test_invalid_traces_raise(tmp_path):
    with raises("missing-file", "trace"):
        trace.read(tmp_path)
    path = written(tmp_path, HOST)
    with raises("not-found", "trace"):
        trace.read(path)
    path.write_bytes(b"\xff\xff\xff no protobuf")
    with pytest.raises(MeshparError) as error:
        trace.read(path)
    assert error.value.code in ("damaged-file", "not-found")


# ---- The program in the trace ----------------------------------------------------------------------------------------

SCORES = '"intermediate_tensor_shape":{"dimensions":["1","8","512","512"]},"mask_type":"CAUSAL"'
NUMBERS = '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]'
PROGRAM = f"""HloModule jit__step, is_scheduled=true, num_partitions=2

%inner (p: bf16[512,512]) -> bf16[512,512] {{
  %p = bf16[512,512] parameter(0)
  ROOT %m = bf16[512,512] negate(%p), metadata={{op_name="jit(_step)/update/mul"}}
}}

%sum (a: bf16[], b: bf16[]) -> bf16[] {{
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %s = bf16[] add(%a, %b)
}}

ENTRY %main (x: bf16[512,512], q: bf16[1,512,8,64]) -> bf16[512,512] {{
  %x = bf16[512,512] parameter(0)
  %q = bf16[1,512,8,64] parameter(1)
  %gemm.1 = (bf16[512,512], s8[99]) custom-call(%x, %x), custom_call_target="__cublas$gemm", metadata={{op_name="jit(_step)/gradients/jvp(mlp)/dot_general"}}, backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{{NUMBERS}}}}}}}
  %fmha.2 = bf16[1,512,8,64] custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", metadata={{op_name="jit(_step)/gradients/jvp(attention)/fmha"}}, backend_config={{"cudnn_fmha_backend_config":{{{SCORES}}}}}
  %g = bf16[512,512] get-tuple-element(%gemm.1), index=0
  %all-reduce.4 = bf16[512,512] all-reduce(%g), replica_groups={{{{0,1}}}}, use_global_device_ids=true, channel_id=1, to_apply=%sum, metadata={{op_name="jit(_step)/gradients/transpose(jvp(mlp))/psum"}}
  ROOT %loop_mul_fusion.3 = bf16[512,512] fusion(%all-reduce.4), kind=kLoop, calls=%inner, metadata={{op_name="jit(_step)/update/mul"}}
}}
"""  # noqa: E501
KERNELS = [
    ("nvjet_sm90", "gemm.1", 0, 40), ("cudnn_fmha_fprop", "fmha.2", 40, 20),
    ("ncclDevKernel_AllReduce", "all-reduce.4", 60, 25), ("loop_mul_fusion_3", "loop_mul_fusion.3", 85, 10),
]  # fmt: skip
CLUSTER = parse_cluster("h100:1x2")


def programs(*texts):
    """The plane of the metadata, with programs `jit__step` and the numbers 0, 1, ..."""
    modules = [_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto() for text in texts]
    entries = []
    for number, module in enumerate(modules):
        size, at = [], len(module)
        while at >= 128:
            size, at = [*size, at & 127 | 128], at >> 7
        proto = b"\x0a" + bytes([*size, at]) + module  # HloProto.hlo_module
        escaped = "".join(f"\\{byte:03o}" for byte in proto)
        stats = f'stats {{ metadata_id: 1 bytes_value: "{escaped}" }}'
        value = f'value {{ id: {number} name: "jit__step({number})" {stats} }}'
        entries.append(f"event_metadata {{ key: {number} {value} }}")
    return "\n".join(['planes { id: 9 name: "/host:metadata"', *entries, "}"])


def gpus(kernels):
    return [plane(f"/device:GPU:{number}", {"Stream #7": kernels}, number + 2) for number in (0, 1)]


def test_kernels_are_joined_to_the_traced_program(tmp_path):
    file = written(tmp_path, HOST, programs(PROGRAM), *gpus(KERNELS))
    found = trace.read(file, mesh={"data": 2}, cluster=CLUSTER)
    by_name = {kernel.name: kernel for kernel in found.kernels}
    assert [*by_name] == ["gemm.1", "fmha.2", "loop_mul_fusion.3"]
    gemm, attention, update = by_name.values()
    assert (gemm.kind, gemm.implementation, gemm.module, gemm.phase) == ("matmul", "cuBLAS", "gradients/mlp", "forward")
    assert (attention.kind, attention.implementation, attention.module) == ("attention", "cuDNN", "gradients/attention")
    assert (update.kind, update.phase) == ("optimizer update", "optimizer")
    assert gemm.count == 0.5  # the trace has two steps, but kernels of the first only
    assert gemm.measured_s == pytest.approx(20e-6)
    assert gemm.predicted_s == pytest.approx(2 * 512**3 / CLUSTER.rates.product_flops_per_s(16, 2 * 512**3))
    assert gemm.ratio == pytest.approx(gemm.measured_s / gemm.predicted_s)
    (sent,) = found.collectives
    assert (sent.axes, sent.payload_bytes) == (("data",), 2 * 512**2)
    assert sent.predicted_s > 0
    assert {cause: round(seconds * 1e6, 3) for cause, seconds in found.causes.items()} == {
        "matmul": 20, "attention": 10, "memory-bound": 5, "communication": 12.5, "idle": 0,
    }  # fmt: skip
    assert sum(found.causes.values()) == pytest.approx(found.step_s)
    assert found.phases["backward"] == pytest.approx(12.5e-6)
    assert found.predicted_step_s == pytest.approx(
        sum(kernel.predicted_s for kernel in found.kernels) + sent.predicted_s
    )
    assert found.notes == ()
    text = str(found)
    for words in (trace.WITHOUT_GRAPHS, "gradients/attention, forward", "cuBLAS", "phase: optimizer", "memory-bound"):
        assert words in text


def test_notes_name_the_missing_options(tmp_path):
    found = trace.read(written(tmp_path, HOST, programs(PROGRAM), *gpus(KERNELS)))
    assert [note.partition(":")[0] for note in found.notes] == ["the mesh is unknown", "the GPU is unknown"]
    assert all(kernel.predicted_s is None for kernel in found.kernels)
    assert [kernel.kind for kernel in found.kernels] == ["matmul", "attention", "optimizer update"]


def test_kernels_of_cuda_graphs_are_joined_by_their_name(tmp_path):
    graph = [(kernel, "command_buffer_114", begin, length) for kernel, op, begin, length in KERNELS if "all" not in op]
    found = trace.read(written(tmp_path, HOST, programs(PROGRAM), *gpus(graph)), mesh={"data": 2}, cluster=CLUSTER)
    assert found.method == trace.IN_GRAPHS
    assert [(kernel.name, kernel.kind, kernel.module) for kernel in found.kernels] == [
        ("nvjet_sm90", "matmul", ""), ("cudnn_fmha_fprop", "attention", ""),
        ("loop_mul_fusion.3", "optimizer update", "update"),
    ]  # fmt: skip
    assert any("avoids CUDA graphs" in note for note in found.notes)


def test_the_latest_program_is_used_without_a_number(tmp_path):
    renamed = PROGRAM.replace("jvp(mlp)", "jvp(other)")
    found = trace.read(written(tmp_path, HOST, programs(renamed, PROGRAM), *gpus(KERNELS)), cluster=CLUSTER)
    assert found.kernels[0].module == "gradients/mlp"


def test_run_folder_determines_mesh_gpus_and_schedule(tmp_path):
    file = written(tmp_path / "profile", HOST)
    assert traced_run(file) == {}
    program = {"devices": "16 × NVIDIA H100 80GB HBM3", "processes": 2}
    strategy = "pipeline_parallel(stages=2, microbatches=4) | fsdp()"
    saved = {"mesh": {"data": 1, "stage": 2, "fsdp": -1, "inside_node": []}, "strategy": strategy, "program": program}
    (tmp_path / "recipe.json").write_text(json.dumps(saved))
    found = traced_run(file)
    assert {axis: size for axis, size in found["mesh"].items() if size > 1} == {"stage": 2, "fsdp": 8}
    assert found["cluster"].name == "h100:2x8"
    assert (found["schedule"].stages, found["schedule"].microbatches) == (2, 4)
    for processes, name in ((4, "h100:4x4"), (16, "h100:2x8")):
        program["processes"] = processes
        (tmp_path / "recipe.json").write_text(json.dumps(saved))
        assert traced_run(file)["cluster"].name == name
    cpu = {**saved, "strategy": "fsdp()", "program": {"devices": "16 × cpu"}}
    (tmp_path / "recipe.json").write_text(json.dumps(cpu))
    assert {*traced_run(file)} == {"mesh"}


@pytest.mark.parametrize("change", [{"mesh": 3}, {"program": {"devices": "2 × cpu", "processes": "x"}}])
def test_damaged_run_folder_is_refused(tmp_path, change):
    saved = {"mesh": {"data": 2}, "strategy": "fsdp()", "program": {"devices": "2 × cpu"}}
    (tmp_path / "recipe.json").write_text(json.dumps(saved | change))
    with raises("damaged-file"):
        traced_run(written(tmp_path / "profile", HOST))


def test_cluster_of_other_devices_is_refused(tmp_path, meshpar):
    """Otherwise `--save` would write rates of other devices to a profile of these GPUs."""
    on_host = plane("/host:CPU", {"thread": [("dot.1", "dot.1", 0, 5)]}, number=9)
    with raises("conflict"):
        trace.read(written(tmp_path / "cpu", on_host), cluster=CLUSTER)
    folder = tmp_path / "run"
    written(folder, HOST, programs(PROGRAM), *gpus(KERNELS))
    program = {"devices": "2 × NVIDIA H100 80GB HBM3"}
    (folder / "recipe.json").write_text(json.dumps({"mesh": {"data": 2}, "program": program}))
    assert meshpar("trace", folder, "--cluster", "h100:1x2")[0] == 0
    code, _, err = meshpar("trace", folder, "--cluster", "a100-80:1x2")
    assert (code, "the run used h100" in err) == (2, True)


@pytest.mark.call_stacks
def test_trace_of_this_process_contains_the_programs_that_ran(tmp_path):
    """Two programs have the same name. The reader assumes XLA's field numbers and names."""

    def _step(x):
        with jax.named_scope("gradients"), jax.named_scope("mlp"):
            return jnp.tanh(x @ x)

    def other(x):
        with jax.named_scope("gradients"), jax.named_scope("attention"):
            return jnp.sin(x @ x)

    other.__name__ = "_step"
    x = jax.device_put(np.ones((64, 64), np.float32), jax.devices()[0])
    first, second = jax.jit(_step), jax.jit(other)
    jax.block_until_ready((first(x), second(x)))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    for index, run in enumerate((first, second)):
        jax.profiler.start_trace(str(tmp_path / str(index)), profiler_options=options)
        for _ in range(3):
            run(x).block_until_ready()
        jax.profiler.stop_trace()
        found = trace.read(tmp_path / str(index), mesh={})
        assert (found.program, found.devices, found.steps, found.method) == ("jit__step", 1, 3, "")
        module = ("gradients/mlp", "gradients/attention")[index]
        assert module in {kernel.module for kernel in found.kernels}
        assert found.causes["matmul"] > 0
