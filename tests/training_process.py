"""Small training runs in separate processes, for tests that kill them.

As a script, this file imports jax once. It then reads requests from standard input, one JSON object per line, and forks
a process for each. It prints the process id and later the exit status.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEPS = 60
SAVE_EVERY = 6
VALIDATE_EVERY = 15
PATIENCE_S = 600
"""Time limit of a process. It is long, because machines that run tests may be busy."""


class Runs:
    """Connection of a test to the process that forks."""

    def __init__(self, folder: Path) -> None:
        self._compiled = str(folder)
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
        ignored = ("-W", "ignore::RuntimeWarning", "-W", "ignore::DeprecationWarning")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, *ignored, __file__], env=env, **pipes)
        self._answers: dict[int, int] = {}
        self._pids: list[int] = []
        self._news = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._news:
                if "exit" in answer:
                    self._answers[answer["pid"]] = answer["exit"]
                else:
                    self._pids.append(answer["pid"])
                self._news.notify_all()

    def start(self, folder: Path, **request: Any) -> int:
        """Start a run and return its process id."""
        folder.mkdir(parents=True, exist_ok=True)
        before = len(self._pids)
        self._process.stdin.write(json.dumps({"folder": str(folder), "compiled": self._compiled, **request}) + "\n")
        self._process.stdin.flush()
        with self._news:
            assert self._news.wait_for(lambda: len(self._pids) > before, timeout=PATIENCE_S)
            return self._pids[-1]

    def wait_for_steps(self, pid: int, folder: Path, steps: int) -> None:
        """Wait until a run has dispatched this number of steps or has ended."""
        deadline = time.monotonic() + PATIENCE_S
        marks = folder / str(pid)
        while not self.ended(pid) and (marks.stat().st_size if marks.exists() else 0) < steps:
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.002)

    def exit_of(self, pid: int, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end of a run, and return its exit status, which is negative after a signal."""
        with self._news:
            assert self._news.wait_for(lambda: pid in self._answers, timeout=timeout_s), "it does not end"
            return self._answers[pid]

    def ended(self, pid: int) -> bool:
        return pid in self._answers

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=PATIENCE_S)


def serve() -> None:
    """Fork a run for each request, and report when it ends."""
    import grain
    import optax
    import orbax.checkpoint

    import meshpar.runs.training_run

    assert all((grain, optax, orbax.checkpoint, meshpar.runs.training_run))
    running: set[int] = set()
    pending = b""
    while True:
        if select.select([0], [], [], 0.005)[0]:
            chunk = os.read(0, 65536)
            if not chunk:
                return
            *requests, pending = (pending + chunk).split(b"\n")
            for request in requests:
                pid = os.fork()
                if pid == 0:
                    run_and_exit(json.loads(request))
                running.add(pid)
                print(json.dumps({"pid": pid}), flush=True)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                print(json.dumps({"pid": pid, "exit": os.waitstatus_to_exitcode(status)}), flush=True)


def run_and_exit(request: dict[str, Any]) -> None:
    """Run in the forked process, with output in `log` or on a terminal."""
    status = 1
    try:
        os.setsid()  # the next opened terminal becomes the controlling terminal, which sends Ctrl-C
        log = request.pop("terminal", None) or f"{request['folder']}/{request.pop('log', 'log')}"
        out = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        for number in (0, 1, 2):
            os.dup2(out, number)
        sys.stdout.reconfigure(line_buffering=True)
        for number, moment in request.pop("signals", []):
            signal_at(number, moment)
        (command if "args" in request else train)(**request)
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def signal_at(number: int, moment: list[list[Any]]) -> None:
    """Send this process a signal after given numbers of calls in any thread, independent of time.

    `moment` contains pairs ("module:function", n). Calls of a pair are counted after the previous pair is complete.
    """
    left = [list(each) for each in moment]
    lock = threading.Lock()

    def count(name: str) -> None:
        with lock:
            if not left or left[0][0] != name:
                return
            left[0][1] -= 1
            if left[0][1] == 0:
                del left[0]
            if left:
                return
        Sender(number)

    def watch(name: str) -> None:
        module, path = name.split(":")
        *owners, attribute = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        function = getattr(owner, attribute)

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            count(name)
            return function(*args, **kwargs)

        setattr(owner, attribute, counted)

    for name in {name for name, _ in moment}:
        watch(name)


class Sender:
    """Object that sends a signal in its finalizer, where Python ignores exceptions of a signal handler."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


def keep_compiled(folder: str) -> None:
    """Use a cache of compiled programs for all runs."""
    import jax

    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def command(folder: str, args: list[str], compiled: str, pod: Mapping[str, str] | None = None) -> None:
    """Run a command in `folder`. Environment variables select the process of a pod, and signals are checked often."""
    from meshpar.cli import main as cli
    from meshpar.pod import coordination

    if pod is not None:
        os.environ.update(pod)
        coordination.POLL_S = 0.05
    os.chdir(folder)
    keep_compiled(compiled)
    sys.argv = ["meshpar", *args]
    try:
        cli.main()
    finally:  # jax does this when a process ends
        if pod is not None:
            importlib.import_module("jax").distributed.shutdown()


def train(
    folder: str,
    *,
    pause_s: float = 0.01,
    hang_at: int | None = None,
    steps: int = STEPS,
    num_devices: int = 8,
    pod: dict[str, Any] | None = None,
    compiled: str | None = None,
    grace_s: float = 0.5,
) -> None:
    """Train with all hooks, and write `metrics.jsonl`, `checkpoints/` and `result-PROCESS.json` into the folder.

    `pause_s` slows down each step, so that a test can interrupt it. After step `hang_at`, the process is stuck for a
    minute outside Python, as in a compilation. `pod` contains the arguments of `jax.distributed.initialize`.
    """
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices} --xla_cpu_multi_thread_eigen=false"
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import meshpar as mp
    from meshpar.data import ArrayData
    from meshpar.loop import fit as loop
    from meshpar.loop.metrics_file import MetricsFile
    from meshpar.loop.progress_bar import ProgressBar
    from meshpar.parallel.batch import batch_sharding
    from meshpar.training.state import make_setup

    if compiled is not None:
        keep_compiled(compiled)
    if pod is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(**pod)

    def init(key):
        up, down = jax.random.split(key)
        return {"up": 0.1 * jax.random.normal(up, (16, 32)), "down": 0.1 * jax.random.normal(down, (32, 16))}

    def loss(model, batch, key):
        x = batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)
        return jnp.mean((model(x) - jnp.sin(batch["x"])) ** 2), {}

    class Slow(loop.Hook):
        def on_dispatched(self, run):
            time.sleep(pause_s)
            with open(f"{folder}/{os.getpid()}", "ab") as file:
                file.write(b".")
            if run.step == hang_at:
                print("stuck", flush=True)
                hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000_000)

    model = mp.from_functions(init, lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"])
    mesh, strategy = mp.MeshSpec(fsdp=-1).build(), mp.fsdp(min_bytes=0)
    setup = make_setup(model, optax.adamw(1e-2), mesh=mesh, strategy=strategy)
    arrays = {"x": np.random.default_rng(0).normal(size=(100, 16)).astype(np.float32)}
    source = ArrayData(arrays=arrays).open(batch_size=8, seed=0)
    sharding = batch_sharding(mesh, strategy)
    with mp.Checkpoints(f"{folder}/checkpoints") as checkpoints, source.train(sharding=sharding) as batches:
        hooks = [
            Slow(),
            loop.Preemption(grace_s=grace_s),
            MetricsFile(f"{folder}/metrics.jsonl"),
            ProgressBar(every_s=0.1),
            loop.Validator(mp.eval_step(loss), source.valid(sharding=sharding), every=VALIDATE_EVERY),
            loop.Checkpointer(checkpoints, every=SAVE_EVERY),
        ]
        state = loop.restore_or_init(checkpoints, setup, key=0, batches=batches)
        result = loop.fit(mp.train_step(loss), state, batches, steps=steps, hooks=hooks, tokens_per_step=8)
    found = {"step": result.step, "reason": result.reason}
    Path(f"{folder}/result-{jax.process_index()}.json").write_text(json.dumps(found))
    if pod is not None:  # jax does this when a process ends; otherwise the last process aborts
        jax.distributed.shutdown()


if __name__ == "__main__":
    serve()
