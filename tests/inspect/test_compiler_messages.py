"""Capture of the compiler's log, and parsing of warnings and involuntary rematerializations."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.inspect.compiler_messages import catch_stderr, rematerializations, warnings_in
from meshpar.inspect.program import compile_here
from meshpar.pod import signals as interrupts

LOG = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795231662.247063    4687 cudart_stub.cc:31] Could not find cuda drivers on your machine
W1121 03:55:25.127147   20418 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot \
go from sharding {devices=[2,1,4]<=[4,2]T(1,0)} to {devices=[1,8,1]<=[8]} efficiently for HLO operation %add.2 = \
f32[8,16,4]{2,1,0} add(%param, %param), sharding={devices=[2,1,4]<=[4,2]T(1,0)}, metadata={op_name="jit(f)/blk/add" \
stack_frame_id=2}. As the last resort, SPMD will replicate the tensor.
W1121 03:55:26.127147   20418 other.cc:1] something else
W1121 03:55:27.000000   20418 other.cc:1] something else
2025-04-14 17:55:24.092274: E external/xla/xla/service/spmd/spmd_partitioner.cc:621] [spmd] Involuntary full \
rematerialization. The compiler was not able to go from sharding {devices=[1,2]<=[4] last_tile_dim_replicate} to \
{replicated} without doing a full rematerialization of the tensor for HLO operation: %pad = f64[96]{0} pad(%b, %c)
"""


def hard_to_reshard(mesh):
    """A resharding that the partitioners of both supported jax versions do by full replication, on `x=4, y=2`."""
    before, after = NamedSharding(mesh, P("y", None, "x")), NamedSharding(mesh, P(None, ("x", "y"), None))

    def function(a, b):
        with jax.named_scope("block"):
            doubled = jax.lax.with_sharding_constraint(a + a, after)
        return b + doubled

    shape = (16, 16, 16)
    args = (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s) for s in (before, after))
    return jax.jit(function, out_shardings=after).trace(*args)


def test_warnings_in_removes_duplicates_and_time():
    first, second, third = warnings_in(LOG)
    assert first.startswith("spmd_partitioner.cc:656: [SPMD] Involuntary")
    assert second == "other.cc:1: something else"
    assert third.startswith("external/xla/xla/service/spmd/spmd_partitioner.cc:621: [spmd] Involuntary")


def test_rematerializations_in_both_formats():
    new, old = rematerializations(warnings_in(LOG))
    assert (new.op_name, new.module, new.shape) == ("jit(f)/blk/add", "blk", "f32[8,16,4]{2,1,0}")
    assert (new.before, new.after) == ("{devices=[2,1,4]<=[4,2]T(1,0)}", "{devices=[1,8,1]<=[8]}")
    assert (old.op_name, old.module, old.shape) == ("", "", "f64[96]{0}")
    assert (old.before, old.after) == ("{devices=[1,2]<=[4] last_tile_dim_replicate}", "{replicated}")


def test_local_compiler_warnings_are_captured(capfd):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    capfd.readouterr()  # a plugin's note that there is no driver
    program = compile_here(hard_to_reshard(mesh))
    (found,) = program.rematerializations
    assert (found.module, found.shape) == ("block", "f32[8,16,4]{2,1,0}")
    assert capfd.readouterr().err == ""


def test_warnings_despite_compilation_cache(tmp_path):
    """A program from jax's persistent cache comes without warnings."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    asked = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in asked}
    try:
        for name, value in asked.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        with catch_stderr():
            hard_to_reshard(mesh).lower().compile()
        assert list(tmp_path.iterdir())
        assert compile_here(hard_to_reshard(mesh)).rematerializations
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_catch_stderr_captures_output(capfd):
    with catch_stderr() as caught:
        assert len(interrupts.child_cleanups) == 1
        os.write(2, b"from below\n")
    assert caught.text == "from below\n"
    assert not interrupts.child_cleanups
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_catch_stderr_writes_output_if_block_raises(capfd):
    def fail():
        with catch_stderr():
            os.write(2, b"the reason\n")
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail()
    assert capfd.readouterr().err == "the reason\n"


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("os.abort()", -signal.SIGABRT, "why"),
        pytest.param(
            "os.kill(os.getpid(), 15); time.sleep(600)", 143, "\nmeshpar: interrupted\n", marks=pytest.mark.matrix
        ),
    ],
)
def test_catch_stderr_writes_output_if_process_ends(end, code, said):
    ends = f"""import os, time
from meshpar.inspect.compiler_messages import catch_stderr
from meshpar.pod import signals as interrupts
watch = interrupts.Watch(command=True)
with catch_stderr():
    os.write(2, b"why")
    {end}"""
    done = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (code, said)
