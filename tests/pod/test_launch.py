"""Test the environment variables of launchers, and a pod of two processes on this machine."""

from __future__ import annotations

import dataclasses
import json
import textwrap
import threading

import pytest

from meshpar.pod import launch
from meshpar.pod.launch import detect
from tests.errors import raises
from tests.pod.pods import free_port, run_together

SLURM = {
    "SLURM_JOB_ID": "70001", "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[007-008],cpu1",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
}  # fmt: skip
EIGHT_PER_NODE = SLURM | {
    "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_PROCID": "13", "SLURM_LOCALID": "5",
}  # fmt: skip
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
SLURM_PORT = 61440 + (70001 + 2) % 4096


LAUNCHES = {
    "by hand": (
        {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "host-0:1234"},
        ("jax", 0, 2, "host-0:1234", None),
    ),
    "by hand, IPv6, chosen devices": (
        {
            "JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "fd00::1",
            "JAX_COORDINATOR_PORT": "99", "JAX_LOCAL_DEVICE_IDS": "2,3",
        },
        ("jax", 1, 2, "[fd00::1]:99", (2, 3)),
    ),
    "variables of torchrun": (TORCHRUN, ("torchrun", 3, 16, "10.0.0.1:29500", None)),
    "torchrun, whose store uses the port": (
        TORCHRUN | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        ("torchrun", 3, 16, "10.0.0.1:29501", (3,)),
    ),
    "torchrun without a port": (TWO, ("torchrun", 0, 2, "a:8476", None)),
    "Kubeflow JAXJob": (
        {"PROCESS_ID": "1", "NUM_PROCESSES": "3", "COORDINATOR_ADDRESS": "job-worker-0", "COORDINATOR_PORT": "6666"},
        ("kubeflow", 1, 3, "job-worker-0:6666", None),
    ),
    "indexed job, variables of jax": (
        {"JOB_COMPLETION_INDEX": "2", "JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "job-0.svc"},
        ("kubernetes", 2, 4, "job-0.svc:8476", None),
    ),
    "indexed job, variables of torchrun": (
        {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.svc", "MASTER_PORT": "5"},
        ("kubernetes", 2, 4, "job-0.svc:5", None),
    ),
    "indexed job, API": ({"JOB_COMPLETION_INDEX": "2"}, ("kubernetes", 2, None, None, None)),
    "Open MPI, detected by jax": (OPEN_MPI, ("open-mpi", 1, 4, None, (1,))),
    "Open MPI with a coordinator": (OPEN_MPI | {"MASTER_ADDR": "head"}, ("open-mpi", 1, 4, "head:8476", (1,))),
    "PMI": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "head", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        ("pmi", 1, 2, "head:8476", None),
    ),
    "SLURM, a task per node": (SLURM, ("slurm", 1, 2, f"gpu007:{SLURM_PORT}", None)),
    "SLURM, a task per GPU": (EIGHT_PER_NODE, ("slurm", 13, 16, f"gpu007:{SLURM_PORT}", (5,))),
    "SLURM with stale variables of torchrun": (
        SLURM | {"MASTER_ADDR": "ib0", "MASTER_PORT": "1", "WORLD_SIZE": "2"}, ("slurm", 1, 2, "ib0:1", None),
    ),
    "interactive step of a larger allocation": (
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"},
        ("slurm", 0, 1, f"gpu007:{SLURM_PORT}", None),
    ),
    "TPU pod": ({"TPU_WORKER_HOSTNAMES": "a,b"}, ("cloud-tpu", None, None, None, None)),
}  # fmt: skip


@pytest.mark.parametrize(("env", "expected"), LAUNCHES.values(), ids=LAUNCHES)
def test_each_launcher_is_read(env: dict[str, str], expected: tuple) -> None:
    launch = detect(env)
    assert launch is not None
    assert dataclasses.astuple(launch) == (expected[0], expected[2], expected[1], *expected[3:])


def test_on_one_node_open_mpi_needs_no_address() -> None:
    def port(namespace: str) -> str:
        address = detect({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": namespace}).coordinator
        host, port = address.split(":")
        assert host == "127.0.0.1"
        return port

    assert port("prterun-1@1") == port("prterun-1@1") != port("prterun-2@1")


@pytest.mark.parametrize(
    ("extra", "local_device_ids"),
    [
        ({}, (5,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, (5,)),
        ({"CUDA_VISIBLE_DEVICES": "5"}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"SLURM_GPUS_ON_NODE": "8"}, (5,)),
        ({"SLURM_GPUS_ON_NODE": "16"}, (10, 11)),
        ({"SLURM_GPUS_ON_NODE": "²"}, (5,)),
        ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(8))), "SLURM_GPUS_PER_TASK": "8"}, None),
        ({"SLURM_GPUS_ON_NODE": "16", "JAX_LOCAL_DEVICE_IDS": "0"}, (0,)),
        ({"SLURM_STEP_TASKS_PER_NODE": "15,1", "SLURM_LOCALID": "0", "SLURM_GPUS_ON_NODE": "8"}, None),
    ],
)
def test_gpus_are_shared_among_the_tasks_of_a_node(extra: dict[str, str], local_device_ids: tuple | None) -> None:
    assert detect({**EIGHT_PER_NODE, **extra}).local_device_ids == local_device_ids


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[007-012,40],cpu1", "gpu007"),
        ("rack[3,5-6]-node[01-04]", "rack3-node01"),
    ],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert detect({**SLURM, "SLURM_STEP_NODELIST": nodes}).coordinator == f"{first}:{SLURM_PORT}"


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"MASTER_ADDR": "left-over"},
        {"NUM_PROCESSES": "4"},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {k: v for k, v in SLURM.items() if "STEP" not in k},
    ],
    ids=["nothing", "an address alone", "a name anybody may use", "one TPU host", "SLURM's batch script"],
)
def test_no_pod(env: dict[str, str]) -> None:
    assert detect(env) is None


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"RANK": "0"}, "missing-argument"),
        ({"WORLD_SIZE": "2"}, "missing-argument"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "missing-argument"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "missing-argument"),
        ({"JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "a:1"}, "missing-argument"),
        ({"COORDINATOR_ADDRESS": "a", "PROCESS_ID": "0"}, "missing-argument"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "missing-argument"),
        ({"PMI_SIZE": "2"}, "missing-argument"),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "2"}, "missing-argument"),
        (TORCHRUN | {"RANK": "16"}, "out-of-range"),
        (EIGHT_PER_NODE | {"SLURM_LOCALID": "8"}, "out-of-range"),
        (TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, "out-of-range"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "out-of-range"),
        (EIGHT_PER_NODE | {"SLURM_GPUS_ON_NODE": "12"}, "indivisible"),
        (TORCHRUN | {"MASTER_ADDR": "http://a:80/x"}, "bad-syntax"),
        (SLURM | {"SLURM_STEP_NODELIST": ",b"}, "bad-syntax"),
        ({"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "a:b"}, "bad-syntax"),
        (TWO | {"WORLD_SIZE": "two"}, "bad-syntax"),
        (TWO | {"WORLD_SIZE": "9" * 30}, "bad-syntax"),
        (TWO | {"MASTER_PORT": "http"}, "bad-syntax"),
        (TWO | {"MASTER_PORT": "99999"}, "bad-syntax"),
        (TWO | {"JAX_LOCAL_DEVICE_IDS": "0;1"}, "bad-syntax"),
        (TWO | {"JAX_LOCAL_DEVICE_IDS": "0,0"}, "bad-syntax"),
        (TWO | {"LOCAL_RANK": "x"}, "bad-syntax"),
        (SLURM | {"SLURM_JOB_ID": "x"}, "bad-syntax"),
        (SLURM | {"SLURM_NODEID": "x"}, "bad-syntax"),
    ],
)
def test_incomplete_and_invalid_variables_are_errors(env: dict[str, str], code: str) -> None:
    with raises(code):
        detect(env)


def test_incomplete_variables_are_named() -> None:
    with raises("missing-argument", "the environment (torchrun)") as error:
        detect({"RANK": "0"})
    assert error.value.reason == "WORLD_SIZE and JAX_COORDINATOR_ADDRESS or MASTER_ADDR are not set"
    assert error.value.fix.endswith("or unset RANK to run a single process")


def test_a_single_process_does_not_join() -> None:
    assert launch.join({}) is None
    assert launch.join({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}).num_processes == 1


@pytest.mark.parametrize(
    ("env", "package"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, "kubernetes"),
        (OPEN_MPI, "mpi4py"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpi4py"),
    ],
)
def test_a_package_that_jax_needs_is_named(env: dict[str, str], package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with raises("missing-package") as error:
        launch.join(env)
    assert f"package `{package}`" in error.value.reason


def test_jax_detects_the_coordinator_of_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(launch.jax.distributed, "initialize", lambda **kwargs: asked.update(kwargs))
    launch.join({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:5"}, timeout_s=7)
    assert asked == {
        "coordinator_address": None,
        "num_processes": 4,
        "process_id": 1,
        "local_device_ids": (1,),
        "cluster_detection_method": "ompi",
        "initialization_timeout": 67,  # jax aborts at its timeout, so meshpar's timeout is shorter
    }


def test_a_late_process_ends_this_process_with_a_message(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    codes: list[int] = []
    monkeypatch.setattr(launch.os, "_exit", lambda code: (codes.append(code), over.set()))
    over = threading.Event()
    monkeypatch.setattr(launch.jax.distributed, "initialize", lambda **_: over.wait(60))
    launch.join({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:5"}, timeout_s=0)
    assert codes == [1]
    assert "process 1: cannot join a pod at" in (err := capfd.readouterr().err)
    assert "not all 4 processes joined within 0 s" in err


PROCESS = textwrap.dedent("""
    import json, logging, sys
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)
    from meshpar.pod import launch
    found = launch.join(timeout_s=500)
    import jax, jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = jax.make_array_from_callback((8,), NamedSharding(mesh, PartitionSpec("data")), lambda i: jnp.arange(8.0)[i])
    summed = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=PartitionSpec("data"),
                                   out_specs=PartitionSpec()))(rows)
    print(json.dumps({"id": jax.process_index(), "all": jax.device_count(), "own": jax.local_device_count(),
                      "sum": float(summed[0]), "again": launch.join() == found}))
""")


def test_two_processes_join_and_sum() -> None:
    port = free_port()
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    for rank, process in enumerate(run_together(PROCESS, [{**env, "RANK": str(rank)} for rank in (0, 1)])):
        assert process.returncode == 0, process.stderr
        # Nothing of gloo's is there: JSON of several processes can be read.
        assert json.loads(process.stdout) == {"id": rank, "all": 8, "own": 4, "sum": 28.0, "again": True}
        assert f"joining: torchrun: process {rank} of 2, coordinator 127.0.0.1:{port}" in process.stderr
