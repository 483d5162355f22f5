"""Forked processes, and messages of devices without memory."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import meshpar as mp
from meshpar.sharding import host_resources
from meshpar.training.state import make_setup
from tests.errors import raises

FORK = """
import os, sys, warnings
import meshpar as mp

def code_in_child():
    pid = os.fork()
    if pid == 0:
        try:
            spec.build()
        except mp.MeshparError as error:
            os._exit(7 if error.code == "conflict" else 8)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

warnings.simplefilter("ignore")
spec = mp.MeshSpec(data=-1)
before = code_in_child()
spec.build()
sys.exit([before, code_in_child()] != [0, 7])
"""


def test_child_forked_after_jax_has_started_gets_an_error(child_env):
    assert subprocess.run([sys.executable, "-c", FORK], env=child_env, check=False, timeout=120).returncode == 0


def test_forked_process_neither_creates_a_state_nor_runs_a_step(monkeypatch):
    model = mp.from_functions(lambda key: {"w": jnp.ones(2)}, lambda params, x: x * params["w"])
    setup = make_setup(model, optax.sgd(0.1), mesh=jax.make_mesh((1,), ("data",)), strategy=mp.ddp())
    monkeypatch.setattr(host_resources, "_is_forked", True)
    loss = lambda model, batch, key: (model(batch).sum(), {})  # noqa: E731
    for use in (lambda: setup.init(0), lambda: mp.train_step(loss)(None, None), lambda: mp.eval_step(loss)(None, None)):
        with raises("conflict"):
            use()


# The forms are from XLA's sources and from reports of users on GPUs.
POOL = "Out of memory while trying to allocate 68.00GiB"
GRAPH = (
    "Underlying backend ran out of memory trying to instantiate command buffer with 12 nodes and 3 conditionals (total "
    "of 4 alive graphs in the process). You can try to (a) Give more memory to the driver by reducing "
    "XLA_CLIENT_MEM_FRACTION (b) Disable command buffers with 'XLA_FLAGS=--xla_gpu_enable_command_buffer=' (empty set)"
)
NCCL = (
    "NCCL operation ncclGroupEnd() failed: unhandled cuda error (run with NCCL_DEBUG=INFO for details). Last NCCL "
    "warning(error) log entry (may be unrelated) 'Cuda failure 2 'out of memory''."
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"RESOURCE_EXHAUSTED: {POOL}. [tf-allocator-allocation-error='']\nBufferAssignment OOM", (POOL, False)),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9437184 bytes.\nBufferAssignment OOM Debugging.",
         ("Out of memory while trying to allocate 9437184 bytes", False)),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 6.27GiB (6727663616B) on device ordinal 0",
         ("Failed to allocate request for 6.27GiB (6727663616B) on device ordinal 0", False)),
        (f"RESOURCE_EXHAUSTED: {GRAPH}. Original error: ...", (GRAPH[:300].rstrip(), True)),
        ("INTERNAL: Failed to instantiate CUDA graph: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
         ("INTERNAL: Failed to instantiate CUDA graph: CUDA_ERROR_OUT_OF_MEMORY: out of memory", True)),
        (f"INTERNAL: {NCCL}", (f"INTERNAL: {NCCL}".rstrip("."), True)),
        # Other resources: a kernel's shared memory, and a message of the coordination service.
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 245760, available: 232448", None),
        ("RESOURCE_EXHAUSTED: SERVER: Received message larger than max (8388608 vs. 4194304)", None),
        ("INVALID_ARGUMENT: Argument does not match", None),
    ],
)  # fmt: skip
def test_out_of_memory_of_a_device(text, found):
    assert host_resources.out_of_memory(RuntimeError(text)) == found
