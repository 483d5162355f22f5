"""Command `meshpar doctor`: diagnose the packages, devices, network and environment of a machine."""

from __future__ import annotations

import ctypes.util
import dataclasses
import os
import re
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from meshpar.cli.main import devices_option, output_options, prepare_devices, print_report
from meshpar.pod import launch
from meshpar.pod.multihost import PACKAGES, version_of
from meshpar.sharding.errors import MeshparError
from meshpar.sharding.host_resources import check_name
from meshpar.sharding.printing import Plain
from meshpar.sharding.units import human_bytes

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
LEAST_SHM_BYTES, LEAST_DISK_BYTES, LEAST_FILES = 1e9, 5e9, 4096
_OWN_FLAGS = ("--xla_force_host_platform_device_count", "--xla_cpu_collective_call", "--xla_dump")
_RELEVANT = re.compile(
    "(JAX_|XLA_|NCCL_|CUDA_VISIBLE|LIBTPU|TPU_|MESHPAR_|SLURM_|OMPI_COMM|MASTER_).*|(LOCAL_)?(RANK|WORLD_SIZE)"
    "|JOB_COMPLETION_INDEX|PMI_(RANK|SIZE)|COORDINATOR_(ADDRESS|PORT)|PROCESS_ID|NUM_PROCESSES"
    "|(?i:(https?|grpc)_proxy)"
)
"""Pattern for the names of the reported environment variables."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A problem with its fix."""

    problem: str
    fix: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Information about a machine. `gather` collects it, and `findings` derives problems from it."""

    versions: Mapping[str, str]
    devices: Mapping[str, str]
    links: Mapping[str, str]
    host: Mapping[str, str]
    environment: Mapping[str, str]
    """Variables of jax, XLA, NCCL, launchers and proxies."""
    platform: str
    """Platform of jax: cpu, gpu or tpu."""
    shm_bytes: int
    disk_bytes: int
    """Free space in the folder of runs."""
    open_files: int
    nvidia: bool
    """Whether the machine has an NVIDIA GPU, even if jax does not use it."""
    has_cuda_runtime: bool = True
    """Whether jax's plugin for CUDA 12 finds libcudart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorReport(Plain):
    """Machine information and problems."""

    facts: MachineFacts
    findings: tuple[Diagnosis, ...]

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Any] = []
        for title in ("versions", "devices", "links", "host", "environment"):
            grid = Table.grid(padding=(0, 2))
            for name, value in getattr(self.facts, title).items() or [("", "none")]:
                grid.add_row(Text(f"  {name}", style="dim"), Text(value))
            parts += [Text(title, style="bold"), grid]
        parts.append(Text("problems", style="bold"))
        for finding in self.findings:
            parts.append(Text(f"  {finding.problem}. Fix: {finding.fix}.", style="yellow"))
        return Group(*parts, *([] if self.findings else [Text("  none")]))


@click.command()
@devices_option
@click.option("--out", metavar="OUT", default="runs", show_default=True, help="Folder of runs, to check disk space.")
@click.option("--check", is_flag=True, help="Exit with 1 if there is a problem.")
@output_options
def doctor(devices: int | None, out: str, check: bool, as_json: bool) -> None:
    """Show versions, devices, network and environment of this machine, and how to fix problems.

    The command does not connect to other processes. Run it on each host: `srun --ntasks-per-node=1 meshpar doctor`.
    """
    check_name(out, f"--out {out}", "name a folder")
    environment = dict(os.environ)  # before prepare_devices changes it
    prepare_devices(devices)
    facts = gather(environment, out=out)
    report = DoctorReport(facts=facts, findings=findings(facts))
    print_report(report, as_json=as_json)
    raise SystemExit(1 if check and report.findings else 0)


def gather(env: Mapping[str, str], *, out: str | Path) -> MachineFacts:
    """Collect information about this process and its host. Initializes the devices of jax."""
    import jax

    devices = jax.local_devices()
    kinds = {device.device_kind for device in devices}
    stats = devices[0].memory_stats() or {} if devices[0].platform != "cpu" else {}
    memory = f", {human_bytes(stats['bytes_limit'])} per device for jax" if "bytes_limit" in stats else ""
    folder = next(path for path in [Path(out).absolute(), *Path(out).absolute().parents] if path.is_dir())
    disk, shm = shutil.disk_usage(folder), Path("/dev/shm")
    shm_bytes = shutil.disk_usage(shm).total if shm.is_dir() else 0
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    versions = {name: version_of(name) for name in (*PACKAGES, *PLUGINS)}
    return MachineFacts(
        versions={name: version for name, version in versions.items() if name in PACKAGES or version[0].isdigit()},
        devices={"here": f"{len(devices)} × {', '.join(sorted(kinds))} ({devices[0].platform}){memory}"},
        links=_links(),
        host={
            "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
            "free at " + str(folder): human_bytes(disk.free),
            "shared memory": human_bytes(shm_bytes),
            "open files": str(open_files),
        },
        environment={name: env[name] for name in sorted(env) if _RELEVANT.fullmatch(name)},
        platform=devices[0].platform,
        shm_bytes=shm_bytes,
        disk_bytes=disk.free,
        open_files=open_files,
        nvidia=any(Path("/dev").glob("nvidia[0-9]*")),
        has_cuda_runtime=version_of("nvidia-cuda-runtime-cu12")[0].isdigit()
        or ctypes.util.find_library("cudart") is not None,
    )


def findings(facts: MachineFacts) -> tuple[Diagnosis, ...]:
    """Return the problems of a machine. Depends only on `facts`."""
    env, gpu = facts.environment, facts.platform == "gpu"
    version = facts.versions.get("jax", "")
    others = {name: facts.versions.get(name, version) for name in ("jaxlib", *PLUGINS[:2])}
    flags = [flag for flag in env.get("XLA_FLAGS", "").split() if not flag.startswith(_OWN_FLAGS)]
    proxies = [name for name in env if name.lower() in ("http_proxy", "https_proxy", "grpc_proxy")]
    place, launch_problems = None, []
    try:
        place = launch.detect(env)
    except MeshparError as error:
        launch_problems.append((True, f"{error.where}: {error.reason}", error.fix))
    version_problems = [
        (
            other.split(".")[:2] != version.split(".")[:2],
            f"jax has version {version}, but {name} has version {other}",
            f"pip install {name}=={version}",
        )
        for name, other in others.items()
    ]
    problems = [
        *version_problems,
        (
            facts.nvidia and facts.platform == "cpu" and env.get("JAX_PLATFORMS") != "cpu",
            "the machine has an NVIDIA GPU, but jax uses the CPU",
            "pip install 'meshpar[cuda12]', and check that nvidia-smi works in this shell",
        ),
        (
            "jax-cuda12-plugin" in facts.versions and not facts.has_cuda_runtime,
            "jax's CUDA plugin logs in each process that there is no driver, because the CUDA runtime is not installed",
            "pip install 'meshpar[aot]'",
        ),
        (
            bool(flags),
            f"XLA_FLAGS sets {' '.join(flags)}, which `explain` and the fingerprints of runs ignore",
            "use --xla NAME=VALUE with train and explain instead",
        ),
        (
            env.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() == "false",
            "XLA_PYTHON_CLIENT_PREALLOCATE=false can cause memory fragmentation and out-of-memory errors",
            "unset it, and set XLA_CLIENT_MEM_FRACTION=0.90",
        ),
        *launch_problems,
        (
            place is not None and bool(proxies),
            f"{' and '.join(proxies)} can block connections from processes to their coordinator",
            f"unset {' '.join(proxies)}, or add the host of the coordinator to no_proxy",
        ),
        (
            gpu and facts.shm_bytes < LEAST_SHM_BYTES,
            f"/dev/shm has only {human_bytes(facts.shm_bytes)}, and NCCL uses it for communication within a node",
            "increase its size: docker run --shm-size=16g, or an emptyDir of medium Memory",
        ),
        (
            facts.disk_bytes < LEAST_DISK_BYTES,
            f"the disk of the runs has only {human_bytes(facts.disk_bytes)} of free space",
            "delete files, or use another folder with --out",
        ),
        (
            gpu and 0 <= facts.open_files < LEAST_FILES,
            f"the limit of {facts.open_files} open files is low for checkpoints, which write many files in parallel",
            f"ulimit -n {LEAST_FILES}",
        ),
    ]
    return tuple(Diagnosis(problem=problem, fix=fix) for is_problem, problem, fix in problems if is_problem)


def _links() -> dict[str, str]:
    """Return the state of InfiniBand ports and the speed of active network interfaces."""
    links = {}
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        links[f"{port.parts[-3]} port {port.name}"] = f"{_line(port / 'rate')}, {_line(port / 'state')}"
    for interface in sorted(Path("/sys/class/net").glob("*")):
        if _line(interface / "operstate") == "up":
            speed = _line(interface / "speed")
            links[interface.name] = f"{int(speed) / 1000:g} Gbit/s" if speed.isdigit() else "up"
    return links


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "unknown"
