"""`meshpar bench overlap`: its rows are what an independent counter finds; which sets of options there are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from meshpar.bench import overlap as bench
from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect.census import census
from meshpar.inspect.timeline.simulator import timeline
from meshpar.sharding.types import MeshparError, axis_sizes
from tests.inspect import saved
from tests.inspect.conftest import _neighbour
from tests.inspect.overlap_counter import per_loop

RECIPE = "recipes/gpt_stdlib.py"


def test_a_row_counts_the_messages_of_a_layer():
    program = saved.load("fsdp_tensor")
    mesh = axis_sizes(_neighbour("planted").reference("fsdp_tensor").mesh)
    times = timeline(program.module, census(program.module, mesh), parse_cluster(program.target))
    row = bench._row("reference", "default", program, times)
    loops = [kinds for computation, kinds in per_loop(program.text).items() if "main" not in computation]
    backward = next(kinds for kinds in loops if "reduce-scatter" in kinds)
    (forward,) = (kinds for kinds in loops if kinds is not backward)
    assert row.forward_gathers == forward["all-gather"]
    assert (row.backward_gathers, row.scatters) == (backward["all-gather"], backward["reduce-scatter"])
    assert row.temporary_bytes == program.temporary_bytes
    assert 0 < row.exposed_s < row.step_s
    assert 0 <= row.hidden_fraction < 1


def test_thresholds_of_a_layer():
    plant = _neighbour("planted").reference("fsdp_tensor")  # over fsdp=4 and tensor=2, computed in bfloat16
    matrices, norms = 4 * 256 * 256 + 3 * 256 * 768, 2 * 256
    assert bench.layer_bytes(plant.step, plant.state) == 2 * (matrices // 2 + norms)
    assert bench.third_of_shards(plant.step, plant.state) == 4 * (matrices // 8 + norms // 4) // 3


def test_sets_are_picked_by_name():
    assert bench.sets_of([]) == bench.SETS
    assert bench.sets_of(["default"]) == {"default": {}}
    with pytest.raises(MeshparError, match="pipelined"):
        bench.sets_of(["pipelned"])


@pytest.mark.pod
def test_the_command_prints_a_row_for_each_set():
    apart = "xla_gpu_all_gather_combine_threshold_bytes=1"
    options = ["--options", "scatters apart", "--options", "pipelined"]
    small = ["--set", "model.num_layers=2", "--set", "model.attention=xla", "--mesh", "fsdp=8", "--strategy", "fsdp()"]
    command = [sys.executable, "-m", "meshpar.cli.main", "bench", "overlap", RECIPE, "--cluster", "h100:1x8"]

    def rows(*words):
        done = subprocess.run([*command, *small, *words, "--json"], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)["rows"]

    plain, pipelined = rows(*options)
    (apart,) = rows(*options[:2], "--xla", apart)
    assert (plain["options"], pipelined["options"]) == ("scatters apart", "pipelined")
    assert pipelined["temporary_bytes"] > plain["temporary_bytes"]
    assert apart["forward_gathers"][1] > plain["forward_gathers"][1]
