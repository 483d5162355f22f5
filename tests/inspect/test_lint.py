"""Each planted mistake causes a finding with its rule and module. Correct programs cause no finding."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import types

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.hardware.clusters import Link, parse_cluster
from meshpar.inspect import census
from meshpar.inspect.compiler_messages import Rematerialization
from meshpar.inspect.hlo.parser import ArrayShape
from meshpar.inspect.lint import Finding, _full_bytes, _gathers_batch, lint
from meshpar.inspect.timeline.simulator import timeline
from meshpar.parallel.execution import Execution
from tests.grid import cases
from tests.inspect import saved
from tests.inspect.planted import PLANTS, REFERENCE
from tests.inspect.saved import pods


@pytest.mark.pod
@pytest.mark.parametrize("name", saved.NAMES)
def test_saved_program_equals_a_new_compilation(compiled, name):
    plant, program = compiled(name, again=True)
    sent = [census.totals(census.census(one.module, plant.mesh)) for one in (saved.load(name), program)]
    assert sent[0] == sent[1], "make programs"


def test_every_mistake_is_saved():
    assert {*PLANTS, *saved.REFERENCE} == {*saved.NAMES}


def findings(compiled, name, target="pod", **options) -> tuple[Finding, ...]:
    plant, program = compiled(name, target, **options)
    found = census.census(program.module, plant.mesh)
    cluster = parse_cluster(plant.cluster) if target == "pod" else None
    return lint(program, found, plant.state.setup, plant.execution, cluster)


@pytest.mark.parametrize("name", pods(PLANTS))
def test_mistake_gives_one_finding_at_its_place(compiled, planted, name):
    plant, _ = compiled(name)
    found = findings(compiled, name)
    assert [(one.rule, one.module) for one in found] == ([(plant.rule, plant.module)] if plant.rule else [])
    for finding in found:
        assert finding.nbytes > 0
        assert finding.message
        assert finding.fix
        if finding.rule in ("replicated", "idle-axis"):  # not caused by a line of the program
            assert finding.source == ""
        else:
            assert re.fullmatch(re.escape(planted.__file__) + r":\d+", finding.source)


@pytest.mark.pod
@pytest.mark.parametrize("name", ["gathered_activation", "whole_batch", "sliced_all_reduce", "flipped_split"])
def test_finding_names_the_source_line(compiled, planted, name):
    (finding,) = findings(compiled, name, again=True)
    lines, first = inspect.getsourcelines(planted.PLANTS[name])
    assert first <= int(finding.source.rpartition(":")[2]) < first + len(lines)


def test_slow_axis_reports_the_measured_bandwidth(compiled):
    plant, program = compiled("tensor_over_nodes")
    link = Link(alpha_s=1e-6, bytes_per_s=1.5e9)
    cluster = dataclasses.replace(parse_cluster(plant.cluster), axes={"tensor": link})
    collectives = census.census(program.module, plant.mesh)
    (finding,) = lint(program, collectives, plant.state.setup, plant.execution, cluster)
    assert "at 1.5 GB/s instead of 450 GB/s" in finding.message


@pytest.mark.parametrize(("name", "axis", "module"), [
    ("tensor_over_nodes", "tensor", "layers/mlp"),
    ("fsdp_tensor", "fsdp", "layers"),
])  # fmt: skip
def test_small_messages_are_one_finding_per_axis(compiled, name, axis, module):
    plant, program = compiled(name)
    collectives, cluster = census.census(program.module, plant.mesh), parse_cluster(plant.cluster)

    def small_messages(cluster, slower=1.0, **options):
        times = timeline(program.module, collectives, cluster)
        times = dataclasses.replace(times, step_s=slower * times.step_s)
        found = lint(program, collectives, plant.state.setup, plant.execution, cluster, times, **options)
        return [one for one in found if one.rule == "small-messages"], times

    found, times = small_messages(cluster)
    (finding,) = (one for one in found if f"messages over {axis} adds" in one.message)
    assert module in finding.module
    assert f"use fewer shards over {axis}" in finding.fix
    assert ("batch_slices=2" in finding.fix) == (axis == "tensor")
    lost_s = sum(one.lost_s for one in times.collectives if one.collective.axes_label == axis)
    assert f"({lost_s / times.step_s:.0%})" in finding.message
    assert len({one.message for one in found}) == len(found) <= len(times.network_s)
    # With negligible latency, or if the rest of the step takes much longer, nothing is reported.
    assert small_messages(dataclasses.replace(cluster, axes={"*": Link(alpha_s=1e-9, bytes_per_s=1e11)}))[0] == []
    assert small_messages(cluster, slower=20.0)[0] == []


@pytest.mark.parametrize(
    ("accumulate", "dims", "gathered", "is_found"),
    [
        (1, (4, 64, 8), "{0}", True), (2, (2, 64, 8), "{0}", True), (1, (2, 64, 8), "{0}", False),
        (2, (4, 64, 8), "{0}", True), (2, (2, 64, 8), "{2}", False), (2, (2, 32, 8), "{0}", False),
        (2, (2, 64), "{0}", False),
    ],
)  # fmt: skip
def test_gathered_examples_of_a_micro_step_are_found(accumulate, dims, gathered, is_found):
    """The local batch is [4, 64], so the activations of one of two micro-steps are [2, 64, ...]."""
    array = types.SimpleNamespace(
        arrays=[ArrayShape("f32", dims)], kind="all-gather", axes=("data",), module="mlp", computation="c", name="g"
    )
    context = types.SimpleNamespace(
        batch_axes={"data"}, param_dims=frozenset(), batch_shapes=((4, 64),),
        program=types.SimpleNamespace(rematerializations=()), execution=Execution(sizes={}, micro_steps=accumulate),
        module=types.SimpleNamespace(
            computations={"c": {"g": types.SimpleNamespace(attributes={"dimensions": gathered})}}
        ),
    )  # fmt: skip
    assert _gathers_batch(context, array) is is_found


@pytest.mark.parametrize(
    ("shape", "before", "full_bytes"),
    [
        ("f32[8,16,4]{2,1,0}", "{devices=[2,1,4]<=[4,2]T(1,0)}", 4 * 16 * 16 * 16),
        ("f32[8,16]{1,0}", "{devices=[2,1,4]<=[8] last_tile_dim_replicate}", 4 * 16 * 16),
        ("bf16[8,16]{1,0}", "{devices=[1,4,2]<=[8] last_tile_dims={manual}}", 2 * 8 * 64),
        ("f32[8]{0}", "{replicated}", 32), ("", "{replicated}", 0),
    ],
)  # fmt: skip
def test_size_of_a_rematerialized_tensor(shape, before, full_bytes):
    message = Rematerialization(op_name="", module="", shape=shape, before=before, after="{replicated}")
    assert _full_bytes(message) == full_bytes


@pytest.mark.parametrize(
    "name", cases("flipped_split", grid=["whole_batch", "reshaped_batch", "flipped_split", "replicated_embedding"])
)
def test_platform_independent_rules_work_on_cpu(compiled, name):
    plant, _ = compiled(name, "cpu")
    found = findings(compiled, name, "cpu")
    assert {one.rule for one in found} == {plant.rule}
    assert all(one.module.startswith(plant.module) for one in found)


@pytest.mark.parametrize("name", pods(REFERENCE))
def test_reference_decoder_has_no_findings_on_gpus(compiled, name):
    assert findings(compiled, name) == ()


@pytest.mark.matrix
@pytest.mark.parametrize("name", REFERENCE)
def test_reference_decoder_has_no_findings_on_cpu(compiled, name):
    assert findings(compiled, name, "cpu") == ()


OPTIONS = {
    "accumulate": {"accumulate": 2},
    "once": {"accumulate": 2, "reduce_gradients": "once"},
    "remat": {"remat": "full"},
    "float32": {"precision": mp.Precision()},
    "reduce": {"precision": mp.Precision(compute="bfloat16", reduce="bfloat16")},
}


@pytest.mark.pod
@pytest.mark.parametrize(
    ("name", "options"),
    [("zero3", "accumulate"), ("zero3", "once"), *itertools.product(("zero1", "sequence"), tuple(OPTIONS)[2:])],
)
def test_step_options_give_no_finding(compiled, name, options):
    assert findings(compiled, name, **OPTIONS[options]) == ()


@pytest.mark.pod
def test_float32_statistics_of_long_sequences_give_no_finding(pod):
    """The maxima and sums of the loss are float32 on purpose, and large for realistic sequence lengths."""
    config = mp.models.llama3_8b(num_layers=1, vocab_size=4096)
    mesh = mp.MeshSpec(fsdp=4, tensor=2).abstract()
    state = mp.abstract_state(
        config.build(), optax.adam(1e-3), mesh=mesh, strategy=mp.fsdp() | mp.tensor_parallel(sequence=True)
    )
    step = mp.train_step(mp.models.next_token_loss, precision=mp.Precision(compute="bfloat16"))
    batch = {name: jax.ShapeDtypeStruct((16, 8192), np.int32) for name in ("inputs", "targets")}
    program = pod.compile(step.trace(state, batch), "h100:1x8")
    collectives, execution = census.census(program.module, mesh), step.describe(state, batch)
    found = lint(program, collectives, state.setup, execution, parse_cluster("h100:1x8"))
    assert found == ()


def test_replicated_finding_counts_the_unnecessary_bytes(compiled):
    (finding,) = findings(compiled, "replicated_embedding", "cpu")
    assert finding.nbytes == 3 * 512 * 256 * 4 * 7 // 8  # the embedding and two moments; 8 shards would need an eighth


@pytest.mark.matrix
def test_findings_are_ordered_by_cost(compiled):
    found = findings(compiled, "reshaped_batch", "cpu")
    assert len(found) > 1
    assert list(found) == sorted(found, key=lambda one: -one.nbytes)
    assert found == findings(compiled, "reshaped_batch", "cpu")
