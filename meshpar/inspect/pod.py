"""Compilation for a remote pod in a separate process, without a GPU or driver.

    traced step ──lowered for CUDA──► StableHLO ──► child: XLA's GPU compiler, compile-only devices ──► Program

The child receives the lowered program with its shardings, donations and source lines. The step therefore need not be
importable: a step defined in a notebook works, on a mesh of CPU devices or on an abstract mesh.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import jax

from meshpar.hardware.clusters import Cluster, parse_cluster
from meshpar.inspect import compiler_messages as messages
from meshpar.inspect import pod_process
from meshpar.inspect.program import Program
from meshpar.inspect.target import require_aot, stablehlo_of
from meshpar.sharding.types import MeshparError, problem


class PodError(RuntimeError):
    """Failure of the compiling process; the message ends with its output."""


class PodProcess:
    """A process that compiles for pods. It takes a few seconds to start, so reuse it for many programs.

    with PodProcess() as pod:
        program = pod.compile(step.trace(state, batch), "h100:8x8")
    """

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", pod_process.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(),
        )

    def __enter__(self) -> PodProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def compile(
        self,
        traced: jax.stages.Traced | jax.stages.Lowered,
        cluster: str | Cluster,
        *,
        options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Program:
        """Compile a traced step for a cluster.

        Args:
          traced: `jax.jit(f, ...).trace(*args)`; its mesh may be of CPU devices or abstract.
          cluster: `h100:8x8`, the path of a profile, or a Cluster with as many GPUs as the mesh has devices.
          options: XLA flags without dashes.
          timeout_s: time limit; when it expires, the process is ended and cannot be used again.

        Raises:
          ValueError: no such cluster, another number of devices, or the `aot` extra is missing.
          PodError: the compiler failed.
        """
        cluster = parse_cluster(cluster)
        require_aot(cluster.name)
        return self._program("compile", stablehlo_of(traced, cluster), cluster, options, timeout_s=timeout_s)

    def build(
        self,
        target: str | Callable[..., Any],
        cluster: str | Cluster,
        *,
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Program:
        """Compile the result of a function that runs inside the process, where the pod's devices can form a Mesh.

        Use it for programs that need their devices during tracing. It raises the errors of `compile`.

        Args:
          target: `package.module:function`, `path/to/file.py:function`, or an importable function. It is called as
            `function(devices, **kwargs)` and returns `jax.jit(f, ...).trace(*args)`.
          cluster: as for `compile`.
          kwargs: further arguments, which must be picklable.
          options: XLA flags without dashes.
          timeout_s: time limit.
        """
        cluster = parse_cluster(cluster)
        require_aot(cluster.name)
        return self._program(
            "build", _qualified_name(target), cluster, dict(kwargs or {}), options, timeout_s=timeout_s
        )

    def call(
        self,
        target: str | Callable[..., Any],
        *,
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Call `function(**kwargs)` inside the process and return its result, which must be picklable."""
        return self._ask("call", _qualified_name(target), dict(kwargs or {}), timeout_s=timeout_s)

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _program(self, verb: str, *arguments: object, timeout_s: float | None) -> Program:
        """Request a program, and add the compiler's warnings from the log."""
        before = self._log_size()
        program = self._ask(verb, *arguments, timeout_s=timeout_s)
        return dataclasses.replace(program, warnings=messages.warnings_in(self._stderr(since=before)))

    def _ask(self, verb: str, *arguments: object, timeout_s: float | None) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pod_process.write(stdin, (verb, arguments))
            self._wait(timeout_s)
            status, *values = pod_process.read(stdout)
        except (EOFError, BrokenPipeError):
            code = self._process.wait()
            raise PodError(f"the compiling process ended with status {code}.\n{self._stderr()}") from None
        if status == "ok":
            return values[0]
        error, text = values
        if isinstance(error, MeshparError):
            raise error
        raise PodError(f"the compiling process raised:\n{text}\n{self._stderr()}") from error

    def _wait(self, timeout_s: float | None) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            if not selector.select(timeout_s):
                self._process.kill()
                raise PodError(f"no answer within {timeout_s} s.\n{self._stderr()}")

    def _log_size(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def _stderr(self, since: int | None = None) -> str:
        """Return the end of the process's standard error, or all of it since a position."""
        size = self._log_size()
        start = max(0, size - 4000) if since is None else since
        # pread does not move the position of the file, at which the process writes.
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace")


def environment() -> dict[str, str]:
    """Return the environment of the compiling process: CUDA's plugin is loaded, and GPUs are hidden."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # XLA would use a local GPU to tune kernels, and compile different programs on different machines.
        "CUDA_VISIBLE_DEVICES": "",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "1",  # keep warnings, such as involuntary rematerializations
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def _qualified_name(target: str | Callable[..., Any]) -> str:
    """Return a function as `module:name` or `file.py:name`."""
    if isinstance(target, str):
        if ":" not in target:
            reason, fix = "it contains no function name", "write it as `module:function`"
            raise problem(f"`{target}`", "run it in another process", reason, fix, code="bad-syntax")
        return target
    module, name = target.__module__, target.__qualname__
    main = getattr(sys.modules.get(module), "__file__", None)
    if "<" in name or (module == "__main__" and main is None):
        fix = "put it at the top level of a module or of a file, or pass `file.py:function`"
        reason = "the process cannot import it"
        raise problem(f"function `{name}`", "run it in another process", reason, fix, code="not-found")
    return f"{main}:{name}" if module == "__main__" else f"{module}:{name}"
