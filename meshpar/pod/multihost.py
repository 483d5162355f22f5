"""Run a command in multiple processes: compare their environments and end them together."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from meshpar.pod import signals as interrupts
from meshpar.pod import watchdog as watchdog
from meshpar.pod.coordination import this_pod
from meshpar.sharding.errors import MeshparError
from meshpar.sharding.host_resources import unexpected, user_line

PACKAGES = ("meshpar", "jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "grain")
"""Packages whose versions must be equal in all processes."""
_OWN = ("PROCESS_ID", "LOCAL_DEVICE", "COORDINATOR", "COMPILATION_CACHE", "NUM_PROCESSES", "PARTITION_INDEX", "_DIR")
_OF_A_HOST = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_DEBUG", "NCCL_HOSTID")


@contextlib.contextmanager
def pod(*, stall_s: float, command: Mapping[str, Any]) -> Iterator[None]:
    """Run the block. If it fails in a process, end all processes. A single process only runs the block.

    All processes raise an error if versions, flags or options differ between them.
    """
    this = this_pod()
    watch = watchdog.watch(this, stall_s=stall_s)
    if this is None or watch is None:
        yield
        return
    if (signals := interrupts.current()) is not None:
        signals.on_exit = watch.interrupted
    code = 0

    def failed(error: MeshparError) -> None:
        if watchdog.is_own(error):
            watch.say(str(error))
        watch.failed(error)

    watchdog.write_failure_callbacks.append(failed)
    try:
        facts = {**environment(os.environ), "command": dict(command)}
        this.agree("environment", facts, fix="use the same versions, variables and options on all hosts")
        try:
            yield
        except SystemExit as interrupted:
            code = int(interrupted.code or 0)
        if signals is not None and signals.received is not None:  # a signal during the final report
            code = 128 + signals.received
        code = this.max(this.new_key("end"), code)  # all processes return the same exit code
    except Exception as error:
        _end(watch, error)
    watch.done(code)
    watch.leave_in_time(code)
    if code:
        sys.exit(code)


def environment(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the versions, XLA flags and environment variables that must be equal in all processes.

    Variables that a launcher sets per process or per host are excluded, and so are XLA's dump flags.
    """
    flags = (flag.partition("=") for flag in env.get("XLA_FLAGS", "").split())
    variables = {
        name: value
        for name, value in sorted(env.items())
        if name.startswith(("JAX_", "NCCL_", "LIBTPU_INIT_ARGS", "MESHPAR_CLUSTER"))
        and not any(word in name for word in _OWN)
        and name not in _OF_A_HOST
    }
    return {
        "python": platform.python_version(),
        "versions": {package: version_of(package) for package in PACKAGES},
        "XLA_FLAGS": {name: value for name, _, value in sorted(flags) if not name.startswith("--xla_dump")},
        "environment": variables,
    }


def version_of(package: str) -> str:
    """Return the version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _end(watch: watchdog.Watchdog, error: Exception) -> None:
    """Report an error, notify the other processes and exit without jax's shutdown, which would wait for minutes.

    If communication failed, another process may be lost. The watchdog then reports that process first.
    """
    is_own = watchdog.is_own(error)
    if is_own:
        _say(watch, error)
    watch.failed(error)
    watch.wait_to_leave()
    if not is_own:
        _say(watch, error)
    is_mistake = is_own and (isinstance(error, MeshparError) or user_line(error))
    os._exit(watchdog.MISTAKE_CODE if is_mistake else watchdog.EXIT_CODE)


def _say(watch: watchdog.Watchdog, error: Exception) -> None:
    with contextlib.suppress(OSError):  # standard error is a closed pipe or on a full disk
        if "--traceback" in sys.argv:
            traceback.print_exception(error)
        else:
            shown = error if isinstance(error, MeshparError) else unexpected(error, command="meshpar train")
            print(f"meshpar: {shown}", file=sys.stderr, flush=True)
