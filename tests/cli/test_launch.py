"""Every launcher's environment read; half-set ones refused; and one true pod of two processes on this machine."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from meshpar.cli import launch
from meshpar.cli.launch import Launch, LaunchError, detect

SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008],cpu1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
EIGHT_A_NODE = {
    **SLURM,
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "5",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM_PORT = 61440 + (70001 + 2) % 4096


def read(env: dict[str, str]) -> tuple:
    found = detect(env)
    assert found is not None
    return found.source, found.process_id, found.num_processes, found.coordinator, found.local_device_ids


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(
            {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "host-0:1234"},
            ("jax", 0, 2, "host-0:1234", None),
            id="by hand",
        ),
        pytest.param(
            {
                "JAX_PROCESS_ID": "1",
                "JAX_NUM_PROCESSES": "2",
                "JAX_COORDINATOR_ADDRESS": "fd00::1",
                "JAX_COORDINATOR_PORT": "99",
                "JAX_LOCAL_DEVICE_IDS": "2,3",
            },
            ("jax", 1, 2, "[fd00::1]:99", (2, 3)),
            id="by hand, IPv6, chosen devices",
        ),
        pytest.param(TORCHRUN, ("torchrun", 3, 16, "10.0.0.1:29500", None), id="torchrun-like, one per node"),
        pytest.param(
            {**TORCHRUN, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            ("torchrun", 3, 16, "10.0.0.1:29501", (3,)),
            id="torchrun itself, whose store has the port",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node-a"},
            ("torchrun", 0, 2, "node-a:8476", None),
            id="torchrun-like without a port",
        ),
        pytest.param(
            {
                "PROCESS_ID": "1",
                "NUM_PROCESSES": "3",
                "COORDINATOR_ADDRESS": "job-worker-0",
                "COORDINATOR_PORT": "6666",
            },
            ("kubeflow", 1, 3, "job-worker-0:6666", None),
            id="Kubeflow JAXJob",
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "2", "JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "job-0.svc"},
            ("kubernetes", 2, 4, "job-0.svc:8476", None),
            id="indexed job with jax's names",
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.svc", "MASTER_PORT": "5"},
            ("kubernetes", 2, 4, "job-0.svc:5", None),
            id="indexed job with torchrun's names",
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "2"},
            ("kubernetes", 2, None, None, None),
            id="indexed job, jax asks the API",
        ),
        pytest.param(OPEN_MPI, ("open-mpi", 1, 4, None, (1,)), id="Open MPI, jax finds the coordinator"),
        pytest.param(
            {**OPEN_MPI, "MASTER_ADDR": "head"}, ("open-mpi", 1, 4, "head:8476", (1,)), id="Open MPI with a coordinator"
        ),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "head", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
            ("pmi", 1, 2, "head:8476", None),
            id="PMI",
        ),
        pytest.param(SLURM, ("slurm", 1, 2, f"gpu007:{SLURM_PORT}", None), id="SLURM, one task per node"),
        pytest.param(EIGHT_A_NODE, ("slurm", 13, 16, f"gpu007:{SLURM_PORT}", (5,)), id="SLURM, one task per GPU"),
        pytest.param(
            {**SLURM, "MASTER_ADDR": "ib0", "MASTER_PORT": "1", "WORLD_SIZE": "2"},
            ("slurm", 1, 2, "ib0:1", None),
            id="SLURM with leftovers of torchrun",
        ),
    ],
)
def test_each_launcher_is_read(env: dict[str, str], expected: tuple) -> None:
    assert read(env) == expected


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
    assert detect({**EIGHT_A_NODE, **extra}).local_device_ids == local_device_ids


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


def test_an_interactive_step_counts_its_own_tasks_not_the_allocations() -> None:
    alone = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}
    assert detect(alone).num_processes == 1


def test_a_tpu_pod_is_left_to_jax() -> None:
    assert detect({"TPU_WORKER_HOSTNAMES": "a,b"}) == Launch(source="cloud-tpu")


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
    ("env", "words"),
    [
        ({"RANK": "0"}, ["torchrun", "RANK=0", "WORLD_SIZE", "MASTER_ADDR", "unset RANK"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK", "are not set"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["JAX_COORDINATOR_ADDRESS or MASTER_ADDR is not set"]),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, ["JAX_PROCESS_ID and JAX_NUM_PROCESSES are not set"]),
        ({"JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "a:1"}, ["JAX_NUM_PROCESSES is not set"]),
        ({"COORDINATOR_ADDRESS": "a", "PROCESS_ID": "0"}, ["kubeflow", "NUM_PROCESSES is not set"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["open-mpi", "OMPI_COMM_WORLD_SIZE is not set"]),
        ({"PMI_SIZE": "2"}, ["PMI_RANK is not set"]),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "2"}, ["slurm", "SLURM_PROCID is not set"]),
        ({**TORCHRUN, "RANK": "16"}, ["process 16 (RANK) of 16 (WORLD_SIZE)", "0 to 15"]),
        ({**TORCHRUN, "RANK": "three"}, ["RANK", "'three'"]),
        ({**EIGHT_A_NODE, "SLURM_GPUS_ON_NODE": "12"}, ["12 GPUs among 8 processes", "JAX_LOCAL_DEVICE_IDS"]),
        ({**EIGHT_A_NODE, "SLURM_LOCALID": "8"}, ["process 8 of this node (SLURM_LOCALID)", "this node has 8"]),
        ({**TORCHRUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, ["process 0 of this node", "this node has 0"]),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, ["process -1 of this node (LOCAL_RANK)", "numbered from 0"]),
        ({**TORCHRUN, "MASTER_ADDR": "http://a:80/x"}, ["http://a:80/x", "no valid host name"]),
        ({**SLURM, "SLURM_STEP_NODELIST": ",b"}, ["process 0 at :", "no valid host name"]),
        ({**TORCHRUN, "JAX_LOCAL_DEVICE_IDS": "0,0"}, ["JAX_LOCAL_DEVICE_IDS", "'0,0'"]),
    ],
)
def test_half_set_and_contradictory_environments_are_refused(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError, match=": cannot ") as caught:
        detect(env)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_joining_says_in_one_line_that_there_is_nothing_to_join(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="meshpar.cli.launch"):
        assert launch.join({}) is None
        assert launch.join({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}).num_processes == 1
        assert launch.join({"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}) is None
    assert [record.getMessage() for record in caplog.records] == [
        "one process: no pod to join",
        "one process under torchrun: no pod to join",
        "one process (SLURM has 16 tasks, but `srun` did not start this process): no pod to join",
    ]


@pytest.mark.parametrize(
    ("env", "package"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, "kubernetes"),
        (OPEN_MPI, "mpi4py"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpi4py"),
    ],
)
def test_what_jax_would_need_a_package_to_find_is_told(
    env: dict[str, str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=f"package `{package}`.*Set JAX_COORDINATOR_ADDRESS=HOST:PORT"):
        launch.join(env)


def test_jax_is_asked_for_what_it_finds_better(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(launch.jax.distributed, "initialize", lambda **kwargs: asked.update(kwargs))
    launch.join({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:5"}, timeout_s=7)
    assert asked == {
        "coordinator_address": None,
        "coordinator_bind_address": None,
        "num_processes": 4,
        "process_id": 1,
        "local_device_ids": (1,),
        "cluster_detection_method": "ompi",
        "initialization_timeout": 67,  # its own end is an abort: ours comes first
    }


def test_others_that_do_not_come_are_told_in_words(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
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
    from meshpar.cli import launch
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


def test_two_processes_add_up_across_each_other() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (out, err) in enumerate(outputs):
        assert processes[rank].returncode == 0, err
        # Nothing of gloo's is there: JSON of several processes can be read.
        assert json.loads(out) == {"id": rank, "all": 8, "own": 4, "sum": 28.0, "again": True}
        assert f"joining: torchrun: process {rank} of 2, coordinator 127.0.0.1:{port}" in err


@pytest.mark.parametrize(
    ("coordinator", "resolves_to", "bound"),
    [
        ("127.0.0.1:5", "127.0.0.1", "127.0.0.1:5"),
        ("localhost:5", "127.0.0.1", "127.0.0.1:5"),
        ("this-host:5", "127.0.1.1", "[::]:5"),  # as Debian resolves a host's own name: others could not connect
        ("forwarded:5", "203.0.113.7", "[::]:5"),  # no interface of this machine
    ],
)
def test_process_0_listens_at_the_given_address(
    monkeypatch: pytest.MonkeyPatch, capfd, coordinator: str, resolves_to: str, bound: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", (resolves_to, 0))])
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    place = launch.Launch(source="jax", num_processes=2, process_id=0, coordinator=coordinator)
    assert launch._bind_address(place, {}) == bound
    assert ("listens on all interfaces" in capfd.readouterr().err) == (bound == "[::]:5")
    assert launch._bind_address(place, {"JAX_COORDINATOR_BIND_ADDRESS": "10.0.0.9"}) == "10.0.0.9:5"
    assert launch._bind_address(dataclasses.replace(place, process_id=1), {}) is None
