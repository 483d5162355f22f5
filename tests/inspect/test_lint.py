"""Planted mistakes are found, each by its rule at its place and nothing else; what is right gives no finding."""

from __future__ import annotations

import dataclasses
import inspect
import re

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.hardware.clusters import Link, parse_cluster
from meshpar.inspect import census
from meshpar.inspect.lint import Finding, lint
from tests.grid import cases
from tests.inspect import saved as kept
from tests.inspect.saved import pods

PLANTS = (
    *("nothing", "gathered_activation", "whole_batch", "reshaped_batch", "names_in_wrong_order", "wrong_name"),
    *("float32_weights", "replicated_embedding", "loop_invariant_gather", "sliced_all_reduce", "tensor_over_nodes"),
    *("flipped_split", "whole_heads", "idle_axis"),
)
REFERENCE = (
    *("ddp", "zero1", "zero2", "zero3", "hsdp", "tensor", "sequence", "fsdp_tensor", "fsdp_sequence", "data_tensor"),
    "two_axes",
)


def test_the_lists_above_are_whole(planted):
    assert tuple(planted.PLANTS) == PLANTS
    assert tuple(planted.REFERENCE) == REFERENCE


@pytest.mark.pod
@pytest.mark.parametrize("name", kept.NAMES)
def test_a_kept_program_sends_what_it_sends_when_compiled_again(compiled, name):
    plant, program = compiled(name, again=True)
    sent = [census.totals(census.census(one.module, plant.mesh)) for one in (kept.load(name), program)]
    assert sent[0] == sent[1], "make programs"


def test_every_mistake_is_kept():
    assert {*PLANTS, *kept.REFERENCE} == {*kept.NAMES}


def findings(compiled, name, target="pod", **options) -> tuple[Finding, ...]:
    plant, program = compiled(name, target, **options)
    found = census.census(program.module, plant.mesh)
    cluster = parse_cluster(plant.cluster) if target == "pod" else None
    return lint(program, found, plant.state.setup, plant.step.options, cluster)


# Planted mistakes


@pytest.mark.parametrize("name", pods(PLANTS))
def test_a_mistake_is_found_at_its_place_and_nothing_else(compiled, planted, name):
    plant, _ = compiled(name)
    found = findings(compiled, name)
    assert [(one.rule, one.module) for one in found] == ([(plant.rule, plant.module)] if plant.rule else [])
    for one in found:
        assert one.nbytes > 0
        assert one.what
        assert one.fix
        if one.rule in ("replicated", "idle-axis"):  # no line of the program made them
            assert one.source == ""
        else:
            assert re.fullmatch(re.escape(planted.__file__) + r":\d+", one.source)


@pytest.mark.pod
@pytest.mark.parametrize("name", ["gathered_activation", "whole_batch", "sliced_all_reduce", "flipped_split"])
def test_a_finding_names_the_line_of_the_mistake(compiled, planted, name):
    (one,) = findings(compiled, name, again=True)
    lines, first = inspect.getsourcelines(planted.PLANTS[name])
    assert first <= int(one.source.rpartition(":")[2]) < first + len(lines)


def test_a_slow_axis_is_told_with_the_bandwidth_that_was_measured(compiled):
    plant, program = compiled("tensor_over_nodes")
    link = Link(alpha_s=1e-6, bytes_per_s=1.5e9)
    cluster = dataclasses.replace(parse_cluster(plant.cluster), axes={"tensor": link})
    collectives = census.census(program.module, plant.mesh)
    (one,) = lint(program, collectives, plant.state.setup, plant.step.options, cluster)
    assert "at 1.5 GB/s instead of 450 GB/s" in one.what


@pytest.mark.parametrize(
    "name", cases("flipped_split", grid=["whole_batch", "reshaped_batch", "flipped_split", "replicated_embedding"])
)
def test_what_does_not_depend_on_the_gpu_is_found_on_a_cpu(compiled, name):
    plant, _ = compiled(name, "cpu")
    found = findings(compiled, name, "cpu")
    assert {one.rule for one in found} == {plant.rule}
    assert all(one.module.startswith(plant.module) for one in found)


# What is right


@pytest.mark.parametrize("name", pods(REFERENCE))
def test_the_reference_decoder_gives_no_finding_on_gpus(compiled, name):
    assert findings(compiled, name) == ()


@pytest.mark.matrix
@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_decoder_gives_no_finding_on_a_cpu(compiled, name):
    assert findings(compiled, name, "cpu") == ()


OPTIONS = {
    "accumulate": {"accumulate": 2},
    "once": {"accumulate": 2, "reduce_gradients": "once"},
    "remat": {"remat": "full"},
    "float32": {"precision": mp.Precision()},
    "reduce": {"precision": mp.Precision(compute="bfloat16", reduce="bfloat16")},
}


@pytest.mark.pod
@pytest.mark.parametrize("options", ["accumulate", "once"])
def test_micro_steps_give_no_finding(compiled, options):
    assert findings(compiled, "zero3", **OPTIONS[options]) == ()


@pytest.mark.pod
@pytest.mark.parametrize("name", ["zero1", "sequence"])
@pytest.mark.parametrize("options", ["remat", "float32", "reduce"])
def test_options_of_the_step_give_no_finding(compiled, name, options):
    assert findings(compiled, name, **OPTIONS[options]) == ()


@pytest.mark.pod
def test_wide_statistics_of_a_long_sequence_are_no_finding(pod):
    """At a real length the loss's maxima and sums, float32 on purpose, are as large as an activation of a toy."""
    config = mp.models.llama3_8b(num_layers=1, vocab_size=4096)
    mesh = mp.MeshSpec(fsdp=4, tensor=2).abstract()
    state = mp.abstract_state(
        config.build(), optax.adam(1e-3), mesh=mesh, strategy=mp.fsdp() | mp.tensor_parallel(sequence=True)
    )
    step = mp.train_step(mp.models.next_token_loss, precision=mp.Precision(compute="bfloat16"))
    batch = {name: jax.ShapeDtypeStruct((16, 8192), np.int32) for name in ("inputs", "targets")}
    program = pod.compile(step.trace(state, batch), "h100:1x8")
    found = lint(program, census.census(program.module, mesh), state.setup, step.options, parse_cluster("h100:1x8"))
    assert found == ()


# The rest of the account


def test_findings_are_plain_data(compiled):
    (one,) = findings(compiled, "replicated_embedding", "cpu")
    assert one.to_json() == {
        "rule": "replicated",
        "module": "embed",
        "source": "",
        "what": one.what,
        "fix": one.fix,
        "count": 1,
        "nbytes": 3 * 512 * 256 * 4 * 7 // 8,  # the table and its two moments, of which an eighth would do
    }


@pytest.mark.matrix
def test_the_costliest_comes_first_and_the_order_is_always_the_same(compiled):
    found = findings(compiled, "reshaped_batch", "cpu")
    assert len(found) > 1
    assert list(found) == sorted(found, key=lambda one: -one.nbytes)
    assert found == findings(compiled, "reshaped_batch", "cpu")
