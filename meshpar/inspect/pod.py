"""Compilation for a remote pod in a separate process, without a GPU or driver.

    traced step ──lowered for CUDA──► StableHLO ──► child: XLA's GPU compiler, compile-only devices ──► Program

The child receives the lowered program with its shardings, donations and source lines, not the Python function. A step
that is defined in a notebook therefore works. Its mesh may have CPU devices or be abstract.

The child reads requests as pickles of (function, arguments, keywords) from standard input, and writes answers as
pickles of (value, error, traceback) to standard output.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshpar.hardware.clusters import Cluster, parse_cluster
from meshpar.inspect import compiler_messages as messages
from meshpar.inspect.program import Program
from meshpar.inspect.program_cache import ProgramCache
from meshpar.inspect.target import compile_stablehlo, require_aot, stablehlo_of
from meshpar.sharding.errors import MeshparError
from meshpar.sharding.host_resources import free_memory_bytes

COMPILER_BYTES = 2 * 10**9
"""Host memory that is reserved for a compiling process. `recipes/llama3_8b.py` needs 0.9 GB for 64 GPUs."""


class PodError(RuntimeError):
    """Failure of the compiling process; the message ends with its output."""


class PodProcess:
    """A process that compiles for pods. It takes a few seconds to start, so reuse it for many programs.

    with PodProcess() as pod:
        program = pod.compile(step.trace(state, batch), "h100:8x8")

    Args:
      cache: keep compiled programs in these files, and read them from there. None compiles each program. The process
        starts with the first program that is not in the cache.
    """

    def __init__(self, *, cache: ProgramCache | None = None) -> None:
        self._cache = cache
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the process)
        self._running: subprocess.Popen[bytes] | None = None
        if cache is None:  # it starts while the first step is traced
            self._process()

    def _process(self) -> subprocess.Popen[bytes]:
        if self._running is None:
            command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
            pipe = subprocess.PIPE
            self._running = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, env=environment())
        return self._running

    def __enter__(self) -> PodProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def compile(
        self,
        traced: jax.stages.Traced | jax.stages.Lowered,
        cluster: str | Cluster,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> Program:
        """Compile a traced step for a cluster.

        Args:
          traced: `jax.jit(f, ...).trace(*args)`; its mesh may be of CPU devices or abstract.
          cluster: `h100:8x8`, the path of a profile, or a Cluster with as many GPUs as the mesh has devices.
          options: XLA flags without dashes.
        """
        cluster = parse_cluster(cluster)
        require_aot(cluster.name)
        module = stablehlo_of(traced, cluster)

        def compiled() -> Program:
            before = self._log_size()
            program: Program = self.call(compile_stablehlo, module, cluster, options=options)
            return dataclasses.replace(program, warnings=messages.warnings_in(self._stderr(since=before)))

        return compiled() if self._cache is None else self._cache.get(module, cluster, options or {}, compiled)

    def call(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Call an importable function in the process and return its result, which must be picklable."""
        process = self._process()
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pickle.dump((function, args, kwargs), stdin)
            stdin.flush()
            value, error, text = pickle.load(stdout)
        except (EOFError, BrokenPipeError):
            code = process.wait()
            raise PodError(f"the compiling process ended with status {code}.\n{self._stderr()}") from None
        if error is not None:
            raise error
        if text:
            raise PodError(f"the compiling process raised:\n{text}\n{self._stderr()}")
        return value

    @property
    def is_running(self) -> bool:
        """Whether the process can be called."""
        return self._running is not None and self._running.poll() is None

    def close(self) -> None:
        """End the process."""
        if (process := self._running) is not None:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def _log_size(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def _stderr(self, since: int | None = None) -> str:
        """Return the end of the process's standard error, or everything after the byte position `since`."""
        size = self._log_size()
        start = max(0, size - 4000) if since is None else since
        # pread does not move the position of the file, at which the process writes.
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace")


class PodPool:
    """Processes that compile at the same time, by default the maximum for this machine.

    with PodPool() as pool:
        futures = [pool.submit(compile_stablehlo, module, cluster) for module in modules]
    """

    def __init__(self, num_processes: int | None = None) -> None:
        self.num_processes = num_processes or max_processes()
        self._threads = concurrent.futures.ThreadPoolExecutor(self.num_processes)
        self._started: list[PodProcess] = []
        self._idle: queue.SimpleQueue[PodProcess] = queue.SimpleQueue()

    def __enter__(self) -> PodPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.close()

    def submit(self, function: Callable[..., Any], *args: object, **kwargs: object) -> concurrent.futures.Future[Any]:
        """Call an importable function in an idle process. A process that ended is replaced."""
        return self._threads.submit(self._call, function, *args, **kwargs)

    def _call(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = PodProcess()
            self._started.append(process)
        try:
            return process.call(function, *args, **kwargs)
        finally:
            if process.is_running:
                self._idle.put(process)


def max_processes() -> int:
    """Return the number of compiling processes for the cores and the free memory of this machine."""
    cores, free_bytes = os.cpu_count() or 1, free_memory_bytes()
    return max(1, cores if free_bytes is None else min(cores, free_bytes // COMPILER_BYTES))


def environment() -> dict[str, str]:
    """Return environment variables for the compiling process: it loads jax's CUDA plugin but sees no GPUs."""
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


def serve() -> None:
    """Answer the requests of a `PodProcess` until it closes the stream."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # redirect prints to standard error, because standard output carries the answers
    while True:
        try:
            function, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[Any, MeshparError | None, str]
        try:
            answer = (function(*args, **kwargs), None, "")
        except Exception as error:  # only errors of meshpar can certainly be pickled
            answer = (None, error if isinstance(error, MeshparError) else None, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()
