"""Reading a profile: busy, idle and exposed times, compared with a hand-computed GPU trace."""

from __future__ import annotations

import pytest
from jax.profiler import ProfileData

from meshpar.inspect import trace
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
    assert "pass the recipe" in str(found)


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
