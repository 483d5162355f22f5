"""Joining a pod: this process's number and the coordinator, from the variables of the launcher.

`jax.distributed.initialize` recognises SLURM, Open MPI, Kubernetes and Cloud TPU, and is used wherever it knows best.
What it lacks is here: launchers that only set variables (torchrun and its kin, Kubeflow, PMI, indexed jobs without
access to the cluster's API), all of a node's GPUs for a process that has the node to itself, an error instead of a hang
when the environment says half of what is needed, and one line about what was found before anything waits on a network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import re
import socket
import sys
import threading
import zlib
from collections.abc import Mapping

import jax

from meshpar.cli import roll
from meshpar.sharding.errors import MeshparError

logger = logging.getLogger(__name__)

Env = Mapping[str, str]

DEFAULT_PORT = 8476
"""Where the coordinator listens when the environment names its host and no port."""

JOIN_S = 300
"""Seconds that processes on several hosts have to join: one may load its image for minutes."""
LOCAL_JOIN_S = 90
"""The same of processes that were started together on this machine."""

_ALARM_FIRST_S = 60
_LAST_PORTS = 4096  # a port worked out from a job's identity lies among the highest 4,096, as jax's own do


class LaunchError(MeshparError):
    """The environment says half of what joining a pod needs, or contradicts itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One process's place in a pod."""

    source: str
    """The launcher that said so: jax, torchrun, kubeflow, open-mpi, pmi, kubernetes, slurm or cloud-tpu."""
    num_processes: int | None = None
    """None is left to jax, which asks the cluster; so in the two fields below."""
    process_id: int | None = None
    coordinator: str | None = None
    """`host:port` of process 0."""
    local_device_ids: tuple[int, ...] | None = None
    """The GPUs of this node that are this process's own; None for all that it sees."""

    def __str__(self) -> str:
        who = "a process" if self.process_id is None else f"process {self.process_id} of {self.num_processes}"
        where = self.coordinator or "to be found by jax"
        devices = "all it sees" if self.local_device_ids is None else ", ".join(map(str, self.local_device_ids))
        return f"{self.source}: {who}, coordinator {where}, local devices: {devices}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Launcher:
    """The variables in which a launcher says who a process is. Of several names the first that is set counts."""

    source: str
    signs: tuple[str, ...]
    """The launcher was there when one of these is set: names that nothing else uses."""
    process_id: str
    num_processes: tuple[str, ...]
    coordinator: tuple[str, ...] = ()
    """For a launcher that has no other way to name process 0: one of these must be set."""
    local_rank: str = ""
    local_size: str = ""
    jax_knows_size: bool = False


# In the order they are tried: what a person sets by hand, what runs inside something else, then the something else.
_LAUNCHERS = (
    _Launcher(
        source="jax",
        signs=("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"),
        process_id="JAX_PROCESS_ID",
        num_processes=("JAX_NUM_PROCESSES",),
        coordinator=("JAX_COORDINATOR_ADDRESS",),
    ),
    _Launcher(
        source="torchrun",
        signs=("RANK", "WORLD_SIZE"),
        process_id="RANK",
        num_processes=("WORLD_SIZE",),
        coordinator=("JAX_COORDINATOR_ADDRESS", "MASTER_ADDR"),
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
    ),
    _Launcher(
        source="kubeflow",
        signs=("COORDINATOR_ADDRESS",),
        process_id="PROCESS_ID",
        num_processes=("NUM_PROCESSES",),
        coordinator=("COORDINATOR_ADDRESS",),
    ),
    _Launcher(
        source="open-mpi",
        signs=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        process_id="OMPI_COMM_WORLD_RANK",
        num_processes=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(  # MPICH, Intel MPI and others started by Hydra
        source="pmi",
        signs=("PMI_RANK", "PMI_SIZE"),
        process_id="PMI_RANK",
        num_processes=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    ),
    _Launcher(
        source="kubernetes",
        signs=("JOB_COMPLETION_INDEX",),
        process_id="JOB_COMPLETION_INDEX",
        num_processes=("JAX_NUM_PROCESSES", "WORLD_SIZE"),
        jax_knows_size=True,
    ),
    _Launcher(
        source="slurm",
        signs=("SLURM_STEP_NODELIST",),  # only inside a step: a batch script's own shell has the others too
        process_id="SLURM_PROCID",
        num_processes=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
    ),
)


def detect(env: Env) -> Launch | None:
    """This process's place in a pod as `env` says; None when nothing says that there is one.

    Raises:
        LaunchError: the environment says half of what is needed, or contradicts itself.
    """
    if "," in env.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in env:
        return Launch(source="cloud-tpu")
    half = None
    for launcher in _LAUNCHERS:
        if not _value(env, *launcher.signs):
            continue
        if missing := _missing(launcher, env):
            half = half or (launcher, missing)
        else:
            return _read(launcher, env)
    # Half a launcher matters only when no other one is whole: RANK or MASTER_ADDR is often left over inside SLURM.
    if half:
        raise _half_set(*half, env)
    return None


def join(env: Env | None = None, *, timeout_s: int = JOIN_S, alone: bool = False) -> Launch | None:
    """Join the pod that `env` (by default the process's own environment) describes; a no-op when it describes none.

    Must come before anything that asks jax for devices. Host devices talk to each other through gloo, jax's default.

    Args:
        timeout_s: how long to wait for the other processes, in seconds.
        alone: join a pod of one process, too: its host devices then talk through gloo, which adds up in the same order
            for any number of processes.

    Returns:
        What was found, or None for a process on its own.

    Raises:
        LaunchError: the environment says half of what is needed, or contradicts itself.
        MeshparError: something else listens at the coordinator's port. A process whose pod is not whole in time ends.
    """
    env = os.environ if env is None else env
    launch = detect(env)
    if launch is None or (launch.num_processes == 1 and not alone):
        logger.info("one process%s: no pod to join", _alone_in(env) if launch is None else f" under {launch.source}")
        return launch
    if jax.distributed.is_initialized():
        logger.info("%s (joined before)", launch)
        return launch
    method = _detection_method(launch, env)
    logger.info("joining: %s", launch)
    bind = _bind_address(launch, env)
    if launch.coordinator is not None and launch.process_id is not None and launch.num_processes is not None:
        try:
            place = {"process_id": launch.process_id, "num_processes": launch.num_processes}
            roll.call(launch.coordinator, **place, timeout_s=timeout_s, token=_value(env, roll.TOKEN), bind=bind)
        except roll.RollError as error:
            _leave(error)
    _keep_stdout()
    # Its handler would swallow a SIGTERM before the first step; `interrupts` and `StopAgreement` do its work.
    jax.config.update("jax_enable_preemption_service", False)
    # What jax does when its time is over is an abort with the stack of a library.
    alarm = threading.Timer(timeout_s, _give_up, (launch, timeout_s))
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            coordinator_address=launch.coordinator,
            coordinator_bind_address=bind,
            num_processes=launch.num_processes,
            process_id=launch.process_id,
            local_device_ids=launch.local_device_ids,
            cluster_detection_method=method,
            initialization_timeout=timeout_s + _ALARM_FIRST_S,
        )
    finally:
        alarm.cancel()
    return launch


def _bind_address(launch: Launch, env: Env) -> str | None:
    """Return the `host:port` where process 0 listens: the coordinator's address; None for the other processes.

    All interfaces are used, and reported, if the coordinator's name does not lead to an interface of this machine: a
    port that is forwarded, say, or a name that is loopback on its own host only.
    """
    if launch.process_id != 0 or launch.coordinator is None:
        return None
    if chosen := _value(env, "JAX_COORDINATOR_BIND_ADDRESS"):
        return _with_port(chosen, launch.coordinator.rpartition(":")[2])
    name, _, port = launch.coordinator.rpartition(":")
    name = name.strip("[]")
    is_loopback = name == "localhost" or name == "::1" or re.fullmatch(r"127(\.[0-9]+){3}", name) is not None
    with contextlib.suppress(OSError):
        for family, *_, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            host = str(address[0])
            if is_loopback or not (host == "::1" or host.startswith("127.")):
                with contextlib.suppress(OSError), socket.socket(family) as probe:
                    probe.bind(address)
                    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
    text = f"{name} is no address of this machine: process 0 listens on all interfaces, at port {port}"
    fix = "JAX_COORDINATOR_BIND_ADDRESS=ADDRESS:PORT chooses one"
    fix += "" if _value(env, roll.TOKEN) else f", and {roll.TOKEN} in every process protects the join"
    print(f"meshpar: {text}; {fix}", file=sys.stderr, flush=True)
    return f"[::]:{port}" if socket.has_dualstack_ipv6() else f"0.0.0.0:{port}"


def _give_up(launch: Launch, timeout_s: int) -> None:
    """End this process, which waits for others in a library: nothing can be raised there."""
    _leave(
        LaunchError(
            f"process {launch.process_id}",
            f"join a pod at {launch.coordinator or 'the address that jax finds'}",
            f"not all {launch.num_processes or 'its'} processes came within {timeout_s} s",
            "look at the logs of the others, and start all of them again; --join-limit waits longer",
        )
    )


def _leave(error: MeshparError) -> None:
    os.write(2, f"\nmeshpar: {error}\n".encode())
    os._exit(1)


def _keep_stdout() -> None:
    """Leave standard output to Python: gloo tells every connection there, amid a report or JSON, and now on stderr."""
    try:
        if sys.stdout.fileno() != 1:
            return
        sys.stdout.flush()
        own = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError):  # closed, or no file: nothing of gloo's comes between
        return
    sys.stdout = open(own, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115


def _value(env: Env, *names: str) -> str:
    """The first of these variables that is set to something; empty when none is."""
    return next((env[name].strip() for name in names if env.get(name, "").strip()), "")


def _missing(launcher: _Launcher, env: Env) -> list[str]:
    """The variables that a launcher should have set and did not."""
    needed = [(launcher.process_id,), launcher.num_processes, launcher.coordinator]
    if launcher.jax_knows_size:
        needed.remove(launcher.num_processes)
    return [" or ".join(names) for names in needed if names and not _value(env, *names)]


def _read(launcher: _Launcher, env: Env) -> Launch:
    """The place in the pod that a launcher's complete set of variables describes."""
    process_id = _integer(env, launcher.process_id)
    size_name = next((name for name in launcher.num_processes if _value(env, name)), None)
    num_processes = None if size_name is None else _integer(env, size_name)
    if num_processes is not None and not 0 <= process_id < num_processes:
        where = f"the environment ({launcher.source})"
        asked = f"be process {process_id} ({launcher.process_id}) of {num_processes} ({size_name})"
        fix = "set both from the same launcher, or unset what an outer one left behind"
        raise LaunchError(where, asked, f"processes are numbered 0 to {num_processes - 1}", fix)
    local_rank, local_size = _local_place(launcher, env)
    return Launch(
        source=launcher.source,
        num_processes=num_processes,
        process_id=process_id,
        coordinator=_coordinator(launcher, env, on_one_node=local_size is not None and local_size == num_processes),
        local_device_ids=_local_devices(env, local_rank, local_size),
    )


def _local_place(launcher: _Launcher, env: Env) -> tuple[int | None, int | None]:
    """This process's number on its node and how many the node has, each None when unknown."""
    rank = _integer(env, launcher.local_rank) if _value(env, launcher.local_rank) else None
    size = _integer(env, launcher.local_size) if _value(env, launcher.local_size) else None
    if launcher.source == "slurm":
        node = _integer(env, "SLURM_NODEID") if _value(env, "SLURM_NODEID") else 0
        size = _tasks_on_node(_value(env, "SLURM_STEP_TASKS_PER_NODE"), node)
    if rank is not None and (rank < 0 or (size is not None and rank >= size)):
        asked = f"be process {rank} of this node ({launcher.local_rank})"
        exists = "they are numbered from 0" + ("" if size is None else f", and this node has {size}")
        fix = f"set it from the same launcher as the others, or unset {launcher.local_rank}"
        raise LaunchError(f"the environment ({launcher.source})", asked, exists, fix)
    return rank, size


def _coordinator(launcher: _Launcher, env: Env, *, on_one_node: bool) -> str | None:
    """`host:port` of process 0, or None where jax has its own way of finding it."""
    if address := _value(env, "JAX_COORDINATOR_ADDRESS"):
        return _with_port(address, _value(env, "JAX_COORDINATOR_PORT"))
    if launcher.source == "kubeflow":
        return _with_port(_value(env, "COORDINATOR_ADDRESS"), _value(env, "COORDINATOR_PORT"))
    if address := _value(env, "MASTER_ADDR"):
        port = _value(env, "MASTER_PORT")
        if port and env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
            port = str(_integer(env, "MASTER_PORT") + 1)  # torchrun's own store listens on the port it names
        return _with_port(address, port)
    if launcher.source == "slurm":
        # Not left to jax, which then takes the GPU numbered like the task even where one task has the node to itself.
        job = sum(_integer(env, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if _value(env, name))
        return _with_port(_first_host(env["SLURM_STEP_NODELIST"]), str(_port_of(job)))
    if on_one_node:
        return f"127.0.0.1:{_port_of(zlib.crc32(_value(env, 'PMIX_NAMESPACE', 'OMPI_MCA_ess_base_jobid').encode()))}"
    return None


def _port_of(job: int) -> int:
    """A port that every process of a job arrives at by itself, and another job on the host most likely does not."""
    return 65536 - _LAST_PORTS + job % _LAST_PORTS


def _with_port(address: str, port: str) -> str:
    """`address` with a port, unless it carries one: a bare IPv6 address is all colons and carries none."""
    has_port = re.search(r"(^[^:]+|\]):[^:]*$", address)
    host = f"[{address}]" if address.count(":") > 1 and not address.startswith("[") else address
    full = address if has_port else f"{host}:{port or DEFAULT_PORT}"
    number = full.rpartition(":")[2]
    if not (number.isascii() and number.isdigit() and len(number) < 6 and 0 < int(number) < 65536):
        fix = "give one from 1 to 65535, as HOST:8476"
        raise LaunchError("the environment", f"reach process 0 at {full}", f"{number!r} is no port", fix)
    if not re.fullmatch(r"\[[0-9A-Fa-f:.%\w]+\]|[^\s/\[\]:]+", full.rpartition(":")[0]):
        fix = "give its name or its number, as HOST:8476"
        raise LaunchError("the environment", f"reach process 0 at {full}", "that names no host", fix)
    return full


def _first_host(nodes: str) -> str:
    """The first of SLURM's compressed list of hosts: `gpu[007-012,40],cpu1` gives `gpu007`."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def _tasks_on_node(tasks_per_node: str, node: int) -> int | None:
    """How many tasks SLURM put on a node: the list `4(x2),1` says 4, 4, 1."""
    before = 0
    for count, times in re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", tasks_per_node):
        before += int(times or 1)
        if node < before:
            return int(count)
    return None


def _local_devices(env: Env, local_rank: int | None, local_size: int | None) -> tuple[int, ...] | None:
    """The GPUs of the node that are this process's own, counted among those it sees; None for all of them."""
    if chosen := _value(env, "JAX_LOCAL_DEVICE_IDS"):
        are_numbers = re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", chosen)
        ids = tuple(int(i) for i in chosen.split(",")) if are_numbers else ()
        if not ids or len(set(ids)) < len(ids):
            fix = "write it like JAX_LOCAL_DEVICE_IDS=0,1"
            raise LaunchError("the environment", "read JAX_LOCAL_DEVICE_IDS as numbers", f"it is {chosen!r}", fix)
        return ids
    if local_rank is None or local_size == 1:
        return None
    visible = _visible_gpus(env)
    if visible is None or local_size is None:
        return (local_rank,)
    if visible < local_size or _value(env, "SLURM_GPUS_PER_TASK") == str(visible):
        return None  # the launcher hid the others' GPUs already
    if visible % local_size:
        asked = f"share {visible} GPUs among {local_size} processes"
        fix = "start one process per GPU or one per node, or say JAX_LOCAL_DEVICE_IDS=0,1 (for each process its own)"
        raise LaunchError("this node", asked, f"{visible} is not a multiple of {local_size}", fix)
    share = visible // local_size
    return tuple(range(local_rank * share, (local_rank + 1) * share))


def _visible_gpus(env: Env) -> int | None:
    """How many GPUs the environment lets this process see; None when it does not say."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in env:
            return len([i for i in env[name].split(",") if i.strip() not in ("", "-1")])
    on_node = _value(env, "SLURM_GPUS_ON_NODE")
    return int(on_node) if on_node.isdecimal() else None


def _detection_method(launch: Launch, env: Env) -> str | None:
    """Which of jax's own detections is to fill in what is None; `deactivate` when nothing is left to find."""
    if launch.coordinator is not None:
        return "deactivate"
    if launch.source == "cloud-tpu":
        return None
    if launch.source == "open-mpi" and "OMPI_MCA_orte_hnp_uri" in env:
        return "ompi"
    package = "kubernetes" if launch.source == "kubernetes" else "mpi4py"
    if importlib.util.find_spec(package) is None:
        size = "" if launch.num_processes else " and JAX_NUM_PROCESSES=N"
        exists = f"it does not say where process 0 is, and jax needs the package `{package}` to find out"
        fix = f"set JAX_COORDINATOR_ADDRESS=HOST:PORT{size} for every process, or `pip install {package}`"
        raise LaunchError(f"the environment ({launch.source})", f"join as process {launch.process_id}", exists, fix)
    return None if package == "kubernetes" else package


def _alone_in(env: Env) -> str:
    """What to add when a process is alone although something around it was meant for several."""
    tasks = _value(env, "SLURM_NTASKS")
    return f" (SLURM allotted {tasks} tasks, but `srun` did not start this one)" if tasks not in ("", "1") else ""


def _integer(env: Env, name: str) -> int:
    try:
        if abs(number := int(_value(env, name))) < 2**31:
            return number
        raise ValueError
    except ValueError:
        raise LaunchError(
            "the environment", f"read {name} as a number", f"it is {env[name]!r}", f"set {name}=0"
        ) from None


def _half_set(launcher: _Launcher, missing: list[str], env: Env) -> LaunchError:
    names = (launcher.process_id, *launcher.num_processes, *launcher.coordinator)
    there = ", ".join(f"{name}={env[name]}" for name in names if _value(env, name))
    exists = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
    fix = f"set {' and '.join(missing)} for every process, or unset {there.split('=')[0]} to run alone"
    return LaunchError(f"the environment ({launcher.source})", f"join a pod with {there}", exists, fix)
