"""Test pods of two processes on this machine: a process that differs, stops or dies is named, and all end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshpar.cli import main as cli
from meshpar.inspect import trace
from meshpar.pod import launch
from meshpar.pod import local_processes as processes
from meshpar.pod import multihost as together
from tests.errors import raises
from tests.grid import cases
from tests.pod import pods

RECIPE = textwrap.dedent("""
    import os, time
    import numpy as np, jax.numpy as jnp
    import meshpar as mp
    from meshpar.data import ArrayData

    def arrays():
        open(f"reading{os.environ.get('JAX_PROCESS_ID')}", "w").close()
        time.sleep(float(os.environ.get("SLEEP", "0")))
        return {"x": np.random.default_rng(int(os.environ.get("ROWS", "0"))).normal(size=(160, 8)).astype(np.float32)}

    def init(key):
        import jax
        return {"w": 0.1 * jax.random.normal(key, (8, int(os.environ.get("WIDTH", "8"))))}

    def loss(model, batch, key):
        return jnp.mean((model(batch["x"]) - 1.0) ** 2) * float(os.environ.get("SCALE", "1")), {}

    def recipe():
        if "QUOTA" in os.environ:
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["QUOTA"]),) * 2)
        return mp.Recipe(
            name="pod", mesh=mp.MeshSpec(fsdp=2), strategy=mp.fsdp(min_bytes=0),
            model=mp.from_functions(init, lambda p, x: x @ p["w"]), loss=loss, data=ArrayData(arrays=arrays),
            steps=6, batch_size=8, checkpoint_every=3,
        )
""")


class Pair:
    """Two processes of one pod, each with its log."""

    def __init__(self, folder: Path) -> None:
        (folder / "recipe.py").write_text(RECIPE)
        self.folder, self.address = folder, f"127.0.0.1:{pods.free_port()}"
        self.processes: list[subprocess.Popen] = []

    def start(
        self,
        *args: str,
        odd: dict[str, str] | None = None,
        odd_args: tuple[str, ...] = (),
        odd_folder: Path | None = None,
    ) -> None:
        """Start both; process 1 with its own variables, arguments and working directory."""
        self.close()
        pod = {"JAX_COORDINATOR_ADDRESS": self.address, "JAX_NUM_PROCESSES": "2"}
        for number in (0, 1):
            env = pod | {"JAX_PROCESS_ID": str(number), "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
            env |= (odd or {}) if number else {}
            more, cwd = (odd_args, odd_folder) if number else ((), None)
            self.processes.append(pods.start(self.folder, *args, *more, log=f"log{number}", cwd=cwd, **env))

    def log(self, number: int) -> str:
        return (self.folder / f"log{number}").read_text()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        pods.wait_until(condition, self.processes[0], self.folder / "log0")

    def exit_codes(self) -> list[int]:
        return [process.wait(timeout=pods.PATIENCE_S) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_environment_has_what_must_be_equal() -> None:
    env = {
        "XLA_FLAGS": "--xla_b=2 --xla_a --xla_dump_to=/tmp/7",
        "JAX_ENABLE_X64": "1",
        "JAX_PROCESS_ID": "7",
        "JAX_COMPILATION_CACHE_DIR": "/tmp/7",
        "NCCL_ALGO": "Ring",
        "NCCL_SOCKET_IFNAME": "eth7",
        "HOME": "/home/7",
    }
    found = together.environment(env)
    assert found["XLA_FLAGS"] == {"--xla_a": "", "--xla_b": "2"}
    assert found["environment"] == {"JAX_ENABLE_X64": "1", "NCCL_ALGO": "Ring"}
    assert set(found["versions"]) == set(together.PACKAGES)
    assert together.version_of("no-such-package") == "not installed"


def test_a_single_process_just_runs_the_block() -> None:
    with together.pod(stall_s=40, command={}):
        pass
    with pytest.raises(ZeroDivisionError), together.pod(stall_s=40, command={}):
        raise ZeroDivisionError


class Watch:
    """A watchdog that collects reported errors."""

    interrupted = None

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def failed(self, error: Exception) -> None:
        self.errors.append(error)

    def wait_to_leave(self) -> None:
        pass


def disagree(*args, **options) -> None:
    raise FileNotFoundError(2, "No usable temporary directory")


def test_an_error_before_processes_agree_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other processes would wait for it."""
    watch = Watch()
    monkeypatch.setattr(together, "this_pod", lambda: SimpleNamespace(agree=disagree))
    monkeypatch.setattr(together.watchdog, "watch", lambda *_, **__: watch)
    monkeypatch.setattr(together.watchdog, "write_failure_callbacks", [])
    monkeypatch.setattr(together.os, "_exit", sys.exit)
    with pytest.raises(SystemExit), together.pod(stall_s=40, command={}):
        pass
    assert [type(error) for error in watch.errors] == [FileNotFoundError]


@pytest.mark.parametrize("own", [True, False])
def test_an_error_that_cannot_be_printed_is_reported(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """Standard error is a closed pipe, or a log on a full disk."""
    monkeypatch.setattr(together.watchdog, "is_own", lambda error: own)
    monkeypatch.setattr(together.os, "_exit", lambda code: None)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=disagree, flush=disagree))
    together._end(watch := Watch(), error := ValueError("no such batch"))
    assert watch.errors == [error]


ODD = {
    "learning rate": ({}, ("--set", "optimizer.lr=0.1"), "optimizer.lr is 0.1 there and 0.0003 in process 0"),
    "name": ({}, ("--name", "other"), "name is 'other' there and 'pod' in process 0"),
    "data": ({"ROWS": "1"}, (), "data.fingerprint is"),
    "width": ({"WIDTH": "16"}, (), "the run differs: sharding"),
    "loss": ({"SCALE": "2"}, (), "program is 'program "),
    "flag": (
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_cpu_enable_fast_math=true"}, (),
        "XLA_FLAGS.--xla_cpu_enable_fast_math is 'true' there and (absent) in process 0",
    ),
    "profile": ({}, ("--profile", "3:5"), "command.--profile is '3:5' there and None in process 0"),
    "stall limit": ({}, ("--stall-limit", "60"), "command.--stall-limit is 60 there and 40 in process 0"),
    "links": ({"MESHPAR_CLUSTER": "h100:1x2"}, (), "environment.MESHPAR_CLUSTER is 'h100:1x2' there and (absent)"),
    "folder": ({}, ("--out", "elsewhere"), "command.--out is 'elsewhere' there and 'runs' in process 0"),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("what", ODD)
def test_processes_that_differ_are_named_before_step_0(pair: Pair, what: str) -> None:
    env, args, words = ODD[what]
    pair.start(odd=env, odd_args=args)
    assert pair.exit_codes() == [2, 2], pair.log(0)
    for number in (0, 1):
        assert "meshpar: process 1 of 2 (on " in (log := pair.log(number))
        assert words in log
        assert "Traceback" not in log
    assert not (pair.folder / "runs").exists()


@pytest.mark.matrix
@pytest.mark.parametrize("before", ["nothing", "a folder", "a run there"])
def test_a_process_with_its_own_disk_is_named_before_step_0(pair: Pair, tmp_path_factory, before: str) -> None:
    """Another working directory stands for the disk of another host: the same path with other files."""
    other = tmp_path_factory.mktemp("other")
    (other / "recipe.py").write_text(RECIPE)
    if before != "nothing":
        (other / "runs" / "pod").mkdir(parents=True)
    if before == "a run there":
        pair.start("--steps", "3")
        assert pair.exit_codes() == [0, 0], pair.log(0)

    def files() -> list[Path]:
        return [path for path in sorted(pair.folder.rglob("*")) if not path.name.startswith(("reading", "log"))]

    left = files()
    pair.start("--fresh", odd_folder=other)
    assert pair.exit_codes() == [2, 2], pair.log(0)
    for number in (0, 1):
        assert "meshpar: process 1 of 2 (on " in pair.log(number)
        assert "is missing on this host" in pair.log(number)
        assert "Traceback" not in pair.log(number)
    assert files() == left
    assert not [path for path in other.rglob("*") if path.is_file() and path.name not in ("recipe.py", "reading1")]


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_stops_or_dies_is_named(pair: Pair, number: int, victim: int) -> None:
    pair.start("--set", "steps=1000000", "--stall-limit", "10")
    pair.wait_until(lambda: "step 1/" in pair.log(0))
    time.sleep(1)
    pair.processes[victim].send_signal(number)
    survivor = 1 - victim
    assert pair.processes[survivor].wait(timeout=pods.PATIENCE_S) == 1, pair.log(survivor)
    assert "recipe.py" not in pair.log(survivor)
    check_named(pair.folder, pair.log(survivor), victim)


def check_named(folder: Path, log: str, victim: int) -> None:
    """Check that a log names the lost process first, and that the stacks of the survivor are in a file."""
    survivor = 1 - victim
    stacks = Path("runs", "pod", f"process-{survivor}.log")
    first, second = (line for line in pods.errors_of(log) if not line.endswith("ended with SIGKILL"))
    assert first.startswith(f"meshpar: process {victim} of 2"), log
    assert second == f"meshpar: the stacks of process {survivor} are in {stacks}"
    assert "most recent call first" in (folder / stacks).read_text()


@pytest.mark.matrix
@pytest.mark.parametrize("steps", [3, 6])
def test_a_checkpoint_that_cannot_be_written_ends_all(pair: Pair, steps: int, monkeypatch) -> None:
    monkeypatch.setenv("WIDTH", "50000")
    pair.start("--set", f"steps={steps}", odd={"QUOTA": "200000"})
    assert pair.exit_codes() == [2, 2], pair.log(0) + pair.log(1)
    for number in (0, 1):
        assert "writing failed (" in pair.log(number)
        assert "Traceback" not in pair.log(number)


@pytest.mark.matrix
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_a_signal_before_the_first_step_ends_both(pair: Pair, victims: tuple[int, ...], monkeypatch) -> None:
    """jax's own handler, which is installed when processes join, would ignore it."""
    monkeypatch.setenv("SLEEP", "600")
    pair.start()
    pair.wait_until(lambda: all((pair.folder / f"reading{number}").exists() for number in (0, 1)))
    for victim in victims:
        pair.processes[victim].send_signal(signal.SIGTERM)
    assert pair.exit_codes() == [128 + signal.SIGTERM] * 2, pair.log(0) + pair.log(1)
    for number in (0, 1):
        assert "meshpar: interrupted" in pair.log(number)
        assert "most recent call first" not in pair.log(number)


@pytest.mark.matrix
def test_processes_of_one_host_write_one_profile(pair: Pair) -> None:
    pair.start("--profile", "2:3")
    assert pair.exit_codes() == [0, 0], pair.log(0) + pair.log(1)
    folder = pair.folder / "runs" / "pod" / "profile"
    (session,) = (folder / "plugins" / "profile").iterdir()
    assert [file.name.partition("_")[2] for file in sorted(session.glob("*.xplane.pb"))] == [
        "process_0.xplane.pb",
        "process_1.xplane.pb",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["about.json", "plugins"]
    assert trace.read(trace.find(pair.folder / "runs" / "pod")).steps == 2


def test_local_processes_share_the_host_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "JAX_PROCESS_ID", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    env = processes._environment(1, 4, port=5, began_with=4)
    assert env["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"
    assert launch.detect(env) == launch.Launch(
        source="torchrun", num_processes=4, process_id=1, coordinator="127.0.0.1:5", local_device_ids=(1,)
    )
    with raises("indivisible", "--processes 3"):
        processes._environment(0, 3, port=5, began_with=3)
    monkeypatch.setenv("RANK", "0")
    with raises("conflict", "--processes 2"):
        processes._environment(0, 2, port=5, began_with=2)


CHILD = """
import os, signal, sys
number = int(os.environ["RANK"])
if sys.argv[1] == "is lost" and os.environ["WORLD_SIZE"] == "2":
    os.kill(os.getpid(), signal.SIGSTOP if number == 0 else signal.SIGKILL)
if sys.argv[1] == f"{1 - number} fails, the other stops":
    os.kill(os.getpid(), signal.SIGSTOP)
sys.exit(0 if sys.argv[1] in ("ends", "is lost") else 7)
"""


@pytest.mark.parametrize(
    ("what", "code"),
    cases(("1 fails, the other stops", 7), grid=[("ends", 0), *((f"{n} fails, the other stops", 7) for n in (0, 1))]),
)
def test_local_processes_end_together(what: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", CHILD))
    assert processes.run([what], processes=2) == code
    assert (f"process {what[0]} of 2 ended with exit code 7" in capfd.readouterr().err) == bool(code)


JOINS = """
import os, signal, time
from meshpar.pod.local_processes import follow_parent
follow_parent()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_death_before_joining_ends_the_other_processes(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", JOINS))
    began_s = time.monotonic()
    assert processes.run([], processes=3) == 128 + signal.SIGKILL
    assert time.monotonic() - began_s < 60
    assert "meshpar: process 1 of 3 ended with SIGKILL\n" in capfd.readouterr().err


def test_the_other_processes_restart_after_a_loss(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(processes, "RESTART_GRACE_S", 0.2)
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-S", "-c", CHILD))
    assert processes.run(["is lost"], processes=2, restarts=1) == 0
    text = capfd.readouterr().err
    assert "process 1 of 2 ended with SIGKILL" in text
    assert "restarting with 1 processes from the newest checkpoint; restarts left: 0" in text


def test_restarted_processes_share_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [processes._survivors(count, 8) for count in (8, 4, 2, 1)] == [4, 2, 1, 1]
    assert [processes._survivors(count, 6) for count in (6, 3, 2, 1)] == [3, 2, 1, 1]
    for name in ("RANK", "JAX_PROCESS_ID", "SLURM_STEP_NODELIST", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    env = processes._environment(1, 2, port=5, began_with=8)
    assert launch.detect(env).local_device_ids == (4, 5, 6, 7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert launch.detect(processes._environment(1, 2, port=5, began_with=8)).local_device_ids == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["--restarts", "1", "--processes", "2", "--fresh"], "--restarts 1"),
        (["--restarts", "1"], "--restarts 1"),
    ],
)
def test_restarts_need_other_options(args: list[str], option: str) -> None:
    with raises("conflict", option):
        cli.cli.main(["train", "recipe.py", *args], standalone_mode=False)


def start_locally(folder: Path, *args: str) -> subprocess.Popen:
    """Start `meshpar train recipe.py --processes 2` with two host devices."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.py").write_text(RECIPE)
    return pods.start(folder, "--processes", "2", "--devices", "2", *args)


def kill_child(process: subprocess.Popen, number: int) -> None:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[number]), signal.SIGKILL)


@pytest.mark.matrix
@pytest.mark.parametrize("victim", [0, 1], ids=["coordinator", "other"])
def test_a_local_process_that_is_killed_is_named_first(tmp_path: Path, victim: int) -> None:
    log = tmp_path / "log"
    with start_locally(tmp_path, "--set", "steps=1000000") as process:
        try:
            pods.wait_until(lambda: "step 1/" in log.read_text(), process, log)
            kill_child(process, victim)
            killed_s = time.monotonic()
            assert process.wait(pods.PATIENCE_S) == 128 + signal.SIGKILL, log.read_text()
            assert time.monotonic() - killed_s < processes.GRACE_S + 10
        finally:
            process.terminate()
    first = pods.errors_of(log.read_text())[0]
    assert first == f"meshpar: process {victim} of 2 ended with SIGKILL"


@pytest.mark.matrix
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_restarted_by_the_command(tmp_path: Path, victim: int) -> None:
    args = ["--set", "steps=300"]
    with start_locally(tmp_path / "whole", *args) as whole:
        assert whole.wait(pods.PATIENCE_S) == 0
    log, metrics = tmp_path / "lost" / "log", tmp_path / "lost" / pods.METRICS
    with start_locally(tmp_path / "lost", *args, "--restarts", "1") as process:
        pods.wait_until(lambda: len(pods.losses(metrics)) >= 20, process, log)
        kill_child(process, victim)
        killed_s = time.monotonic()
        pods.wait_until(lambda: "resuming at step" in log.read_text(), process, log)
        assert time.monotonic() - killed_s < 60
        assert process.wait(pods.PATIENCE_S) == 0, log.read_text()
    whole_losses = pods.losses(tmp_path / "whole" / pods.METRICS)
    assert pods.losses(metrics) == whole_losses  # bit for bit, because the mesh is the same


@pytest.mark.matrix
def test_local_processes_obey_a_signal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start_locally(tmp_path, "--steps", "1000000") as process:
        try:
            pods.wait_until(lambda: "step 1/" in log.read_text(), process, log)
            process.terminate()
            assert process.wait(pods.PATIENCE_S) == 128 + signal.SIGTERM, log.read_text()
        finally:
            process.kill()
    assert "Repeat the command to resume" in log.read_text()
