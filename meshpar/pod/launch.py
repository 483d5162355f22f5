"""Joining a pod: this process's number and the coordinator, from the variables of the launcher.

`jax.distributed.initialize` detects SLURM, Open MPI, Kubernetes and Cloud TPU. This module supports further
launchers, which only set variables: torchrun, Kubeflow, PMI, and indexed Kubernetes jobs without access to its API.
A process that is alone on its node uses all GPUs. If variables are missing, an error is raised, because jax would wait
forever. A log line is written before the process waits for others.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import sys
import threading
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import jax

from meshpar.sharding.errors import MeshparError, check_divides

logger = logging.getLogger(__name__)

Env = Mapping[str, str]

DEFAULT_PORT = 8476
"""Port of the coordinator if the environment contains only the host."""

JOIN_S = 300
"""Seconds for processes on several hosts to join. Loading a container image can take minutes."""
LOCAL_JOIN_S = 90
"""Seconds for local processes to join."""

_ALARM_FIRST_S = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Number of a process in a pod, and the address of the coordinator."""

    source: str
    """The detected launcher: jax, torchrun, kubeflow, open-mpi, pmi, kubernetes, slurm or cloud-tpu."""
    num_processes: int | None = None
    """Number of processes; None if jax detects it."""
    process_id: int | None = None
    coordinator: str | None = None
    """`host:port` of process 0; None if jax detects it."""
    local_device_ids: tuple[int, ...] | None = None
    """GPUs of this process; None for all visible GPUs."""

    def __str__(self) -> str:
        who = "a process" if self.process_id is None else f"process {self.process_id} of {self.num_processes}"
        where = self.coordinator or "detected by jax"
        devices = "all visible" if self.local_device_ids is None else ", ".join(map(str, self.local_device_ids))
        return f"{self.source}: {who}, coordinator {where}, local devices: {devices}"


class _Launcher(NamedTuple):
    """The environment variables of a launcher. The first variable with a value is used."""

    source: str
    signs: tuple[str, ...]
    """The launcher is detected if one of these variables is set."""
    process_id: str
    num_processes: tuple[str, ...]
    coordinator: tuple[str, ...] = ()
    """Variables with the address of process 0; empty if jax can detect the address."""
    local_rank: str = ""
    local_size: str = ""


# In order of precedence: variables set by hand, launchers that run inside others, and then the outer launchers.
_LAUNCHERS = (
    _Launcher(
        "jax", ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"), "JAX_PROCESS_ID",
        ("JAX_NUM_PROCESSES",), ("JAX_COORDINATOR_ADDRESS",),
    ),
    _Launcher(
        "torchrun", ("RANK", "WORLD_SIZE"), "RANK", ("WORLD_SIZE",), ("JAX_COORDINATOR_ADDRESS", "MASTER_ADDR"),
        "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    ),
    _Launcher("kubeflow", ("COORDINATOR_ADDRESS",), "PROCESS_ID", ("NUM_PROCESSES",), ("COORDINATOR_ADDRESS",)),
    _Launcher(
        "open-mpi", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",), (), "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH, Intel MPI and others started by Hydra
    _Launcher("pmi", ("PMI_RANK", "PMI_SIZE"), "PMI_RANK", ("PMI_SIZE",), (), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher(
        "kubernetes", ("JOB_COMPLETION_INDEX",), "JOB_COMPLETION_INDEX", ("JAX_NUM_PROCESSES", "WORLD_SIZE"),
    ),
    _Launcher(  # the sign is set only inside a step; a batch script has the other variables, too
        "slurm", ("SLURM_STEP_NODELIST",), "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), (),
        "SLURM_LOCALID",
    ),
)  # fmt: skip


def detect(env: Env) -> Launch | None:
    """Return this process's number in the pod and the coordinator's address, or None without a launcher."""
    if "," in env.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in env:
        return Launch(source="cloud-tpu")
    incomplete = None
    for launcher in _LAUNCHERS:
        if not _value(env, *launcher.signs):
            continue
        needed = [(launcher.process_id,), launcher.num_processes, launcher.coordinator]
        if launcher.source == "kubernetes":  # jax detects the size
            needed.remove(launcher.num_processes)
        missing = " and ".join(" or ".join(names) for names in needed if names and not _value(env, *names))
        if not missing:
            return _read(launcher, env)
        if incomplete is None:
            names = dict.fromkeys(
                (*launcher.signs, launcher.process_id, *launcher.num_processes, *launcher.coordinator)
            )
            present = [f"{name}={env[name]}" for name in names if _value(env, name)]
            fix = f"set {missing} for all processes, or unset {present[0].split('=')[0]} to run a single process"
            incomplete = MeshparError(
                f"the environment ({launcher.source})", f"join a pod with {', '.join(present)}",
                f"{missing} {'are' if ' and ' in missing else 'is'} not set", fix, "missing-argument",
            )  # fmt: skip
    # Incomplete variables are an error only without another launcher: inside SLURM, RANK or MASTER_ADDR is often stale.
    if incomplete is not None:
        raise incomplete
    return None


def join(env: Env | None = None, *, timeout_s: int = JOIN_S, alone: bool = False) -> Launch | None:
    """Join the pod that the environment describes, if there is a launcher.

    Call it before jax creates devices. Host devices communicate with gloo, the default of jax. If not all
    processes join in time, this process ends.

    Args:
      env: environment variables, by default those of this process.
      timeout_s: seconds to wait for the other processes.
      alone: also join if the pod has only one process. Its host devices then use gloo, which sums in the same order for
        any number of processes.

    Returns:
      The pod, or None for a single process.

    Raises:
      MeshparError: variables are missing or contradict each other.
    """
    env = os.environ if env is None else env
    launch = detect(env)
    if launch is None or (launch.num_processes == 1 and not alone):
        logger.info("single process%s: no pod to join", "" if launch is None else f" under {launch.source}")
        return launch
    if jax.distributed.is_initialized():
        logger.info("%s (already joined)", launch)
        return launch
    method = _detection_method(launch, env)
    logger.info("joining: %s", launch)
    _keep_stdout()
    # Its handler would ignore a SIGTERM before the first step. `pod.signals` and `StopAgreement` replace it.
    jax.config.update("jax_enable_preemption_service", False)
    # After its own timeout, jax aborts the process with a C++ stack trace. No exception can be raised in its C++ code.
    late = MeshparError(
        f"process {launch.process_id}",
        f"join a pod at {launch.coordinator or 'the address that jax detects'}",
        f"not all {launch.num_processes or 'its'} processes joined within {timeout_s} s",
        "read the logs of the other processes and start all of them again, or set a longer --join-limit",
        "timeout",
    )
    alarm = threading.Timer(timeout_s, _leave, (late,))
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            coordinator_address=launch.coordinator,
            num_processes=launch.num_processes,
            process_id=launch.process_id,
            local_device_ids=launch.local_device_ids,
            cluster_detection_method=method,
            initialization_timeout=timeout_s + _ALARM_FIRST_S,
        )
    finally:
        alarm.cancel()
    return launch


def _leave(error: MeshparError) -> None:
    os.write(2, f"\nmeshpar: {error}\n".encode())
    os._exit(1)


def _keep_stdout() -> None:
    """Redirect C++ output to standard error, because gloo prints each connection to standard output."""
    try:
        if sys.stdout.fileno() != 1:
            return
        sys.stdout.flush()
        copy = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError):  # closed or not a file
        return
    sys.stdout = open(copy, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115


def _value(env: Env, *names: str) -> str:
    return next((env[name].strip() for name in names if env.get(name, "").strip()), "")


def _integer(env: Env, name: str) -> int:
    try:
        if abs(number := int(_value(env, name))) < 2**31:
            return number
    except ValueError:
        pass
    where, requested = "the environment", f"read {name} as a number"
    raise MeshparError(where, requested, f"it is {env[name]!r}", f"set {name}=0", "bad-syntax")


def _read(launcher: _Launcher, env: Env) -> Launch:
    size_name = next((name for name in launcher.num_processes if _value(env, name)), None)
    num_processes = None if size_name is None else _integer(env, size_name)
    process_id = _integer(env, launcher.process_id)
    local_rank = _integer(env, launcher.local_rank) if _value(env, launcher.local_rank) else None
    local_size = _integer(env, launcher.local_size) if _value(env, launcher.local_size) else None
    if launcher.source == "slurm":
        node = _integer(env, "SLURM_NODEID") if _value(env, "SLURM_NODEID") else 0
        local_size = _tasks_on_node(_value(env, "SLURM_STEP_TASKS_PER_NODE"), node)
    for name, number, size, whose in (
        (launcher.process_id, process_id, num_processes, f"{num_processes} ({size_name})"),
        (launcher.local_rank, local_rank, local_size, "this node"),
    ):
        if number is not None and not 0 <= number < (number + 1 if size is None else size):
            requested = f"use process {number} ({name}) of {whose}"
            reason = "processes are numbered from 0" + ("" if size is None else f" to {size - 1}")
            fix = f"unset the variables of an outer launcher, such as {name}"
            raise MeshparError(f"the environment ({launcher.source})", requested, reason, fix, "out-of-range")
    return Launch(
        source=launcher.source,
        num_processes=num_processes,
        process_id=process_id,
        coordinator=_coordinator(launcher, env, on_one_node=local_size is not None and local_size == num_processes),
        local_device_ids=_local_devices(env, local_rank, local_size),
    )


def _coordinator(launcher: _Launcher, env: Env, *, on_one_node: bool) -> str | None:
    """Return the `host:port` of process 0, or None if jax detects it."""
    if address := _value(env, "JAX_COORDINATOR_ADDRESS"):
        return _with_port(address, _value(env, "JAX_COORDINATOR_PORT"))
    if launcher.source == "kubeflow":
        return _with_port(_value(env, "COORDINATOR_ADDRESS"), _value(env, "COORDINATOR_PORT"))
    if address := _value(env, "MASTER_ADDR"):
        port = _value(env, "MASTER_PORT")
        if port and env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
            port = str(_integer(env, "MASTER_PORT") + 1)  # the store of torchrun uses the named port
        return _with_port(address, port)
    if launcher.source == "slurm":
        # jax's own detection would use a single GPU, even for a task that has the node for itself.
        job = sum(_integer(env, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if _value(env, name))
        # The first host of a compressed list: gpu007 for gpu[007-012,40],cpu1
        first = re.split(r",(?![^\[]*\])", env["SLURM_STEP_NODELIST"])[0]
        return _with_port(re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first), str(_port_of(job)))
    if on_one_node:
        return f"127.0.0.1:{_port_of(zlib.crc32(_value(env, 'PMIX_NAMESPACE', 'OMPI_MCA_ess_base_jobid').encode()))}"
    return None


def _port_of(job: int) -> int:
    """Return one of 4,096 ports by the job id, as jax does, so that jobs on the same host rarely use the same port."""
    return 65536 - 4096 + job % 4096


def _with_port(address: str, port: str) -> str:
    """Add the port to an address without a port, such as a bare IPv6 address."""
    has_port = re.search(r"(^[^:]+|\]):[^:]*$", address)
    host = f"[{address}]" if address.count(":") > 1 and not address.startswith("[") else address
    full = address if has_port else f"{host}:{port or DEFAULT_PORT}"
    match = re.fullmatch(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s/\[\]:]+):([0-9]{1,5})", full, re.ASCII)
    if match is None or not 0 < int(match[1]) < 65536:
        reason, fix = "it has no valid host name, or its port is not from 1 to 65535", "write it as HOST:8476"
        raise MeshparError("the environment", f"reach process 0 at {full}", reason, fix, "bad-syntax")
    return full


def _tasks_on_node(tasks_per_node: str, node: int) -> int | None:
    """Return the number of SLURM tasks on a node. The list `4(x2),1` means 4, 4, 1."""
    before = 0
    for count, times in re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", tasks_per_node):
        before += int(times or 1)
        if node < before:
            return int(count)
    return None


def _local_devices(env: Env, local_rank: int | None, local_size: int | None) -> tuple[int, ...] | None:
    """Return the visible GPUs that this process uses, as indices; None means all."""
    if chosen := _value(env, "JAX_LOCAL_DEVICE_IDS"):
        are_numbers = re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", chosen)
        ids = tuple(int(i) for i in chosen.split(",")) if are_numbers else ()
        if not ids or len(set(ids)) < len(ids):
            requested, fix = "read JAX_LOCAL_DEVICE_IDS as numbers", "write it like JAX_LOCAL_DEVICE_IDS=0,1"
            raise MeshparError("the environment", requested, f"it is {chosen!r}", fix, "bad-syntax")
        return ids
    if local_rank is None or local_size == 1:
        return None
    on_node = _value(env, "SLURM_GPUS_ON_NODE")
    visible = int(on_node) if on_node.isdecimal() else None
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if name in env:
            visible = len([i for i in env[name].split(",") if i.strip() not in ("", "-1")])
    if visible is None or local_size is None:
        return (local_rank,)
    if visible < local_size or _value(env, "SLURM_GPUS_PER_TASK") == str(visible):
        return None  # the launcher hides the other GPUs
    fix = "start a process per GPU or per node, or set JAX_LOCAL_DEVICE_IDS=0,1 in each process"
    check_divides("this node", f"share {visible} GPUs among {local_size} processes", visible, local_size, fix)
    share = visible // local_size
    return tuple(range(local_rank * share, (local_rank + 1) * share))


def _detection_method(launch: Launch, env: Env) -> str | None:
    """Return the name of jax's detection method for the fields that are None; `deactivate` if all are set."""
    if launch.coordinator is not None:
        return "deactivate"
    if launch.source == "cloud-tpu":
        return None
    if launch.source == "open-mpi" and "OMPI_MCA_orte_hnp_uri" in env:
        return "ompi"
    package = "kubernetes" if launch.source == "kubernetes" else "mpi4py"
    if importlib.util.find_spec(package) is None:
        size = "" if launch.num_processes else " and JAX_NUM_PROCESSES=N"
        reason = f"it does not have the address of process 0, and jax needs the package `{package}` to find it"
        fix = f"set JAX_COORDINATOR_ADDRESS=HOST:PORT{size} for all processes, or `pip install {package}`"
        where, requested = f"the environment ({launch.source})", f"join as process {launch.process_id}"
        raise MeshparError(where, requested, reason, fix, "missing-package")
    return None if package == "kubernetes" else package
