"""Verdicts of the watchdog for given heartbeats and times, and its threads with a store in memory."""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path

import jax
import pytest

from meshpar.pod import watchdog as watchdog
from meshpar.pod.coordination import Pod
from meshpar.pod.watchdog import BEAT_S, FailureDetector, Watchdog
from meshpar.sharding.errors import problem
from tests.pod.test_coordination import Store


class Simulation:
    """Two processes and their failure detector in simulated time."""

    def __init__(self) -> None:
        self.detector = FailureDetector(2, stall_s=40, busy_s=600)
        self.now = 0.0
        self.beats = {
            number: {"count": 0, "host": f"host{number}", "step": 5, "busy": None, "slowest_s": 1.0, "failed": None}
            for number in (0, 1)
        }

    def run(self, seconds: float, *, beating: tuple[int, ...] = (0, 1), stepping: tuple[int, ...] = ()) -> str | None:
        """Advance the time until there is a verdict. Stepping processes complete a step per heartbeat."""
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for number in beating:
                self.beats[number]["count"] += 1
                self.beats[number]["step"] += number in stepping
            if verdict := self.detector.check(self.beats, self.now):
                return verdict
        return None


@pytest.fixture
def pair() -> Simulation:
    pair = Simulation()
    assert pair.run(20, stepping=(0, 1)) is None
    return pair


def both_step(pair: Simulation) -> str | None:
    return pair.run(4000, stepping=(0, 1))


def is_silent(pair: Simulation) -> str | None:
    return pair.run(60, beating=(0,))


def is_behind(pair: Simulation) -> str | None:
    pair.beats[0]["step"] += 3
    return pair.run(60)


def has_slow_steps(pair: Simulation) -> str | None:
    pair.beats[1]["slowest_s"] = 30.0
    assert pair.run(140) is None
    return pair.run(30)


def saves(pair: Simulation) -> str | None:
    pair.beats[1]["busy"] = "saving"
    pair.beats[0]["step"] += 3
    assert pair.run(590) is None
    return pair.run(30)


def reads_data(pair: Simulation) -> str | None:
    pair.beats[0]["busy"], pair.beats[1]["busy"] = watchdog.READS, watchdog.WAITS
    assert pair.run(10_000) is None
    return pair.run(80_000)


def is_silent_while_saving(pair: Simulation) -> str | None:
    pair.beats[1]["busy"] = "saving"
    return pair.run(60, beating=(0,))


def is_done(pair: Simulation) -> str | None:
    pair.beats[1]["busy"], pair.beats[0]["busy"] = "done", "finishing"
    return pair.run(500, beating=(0,))


def raises_own_error(pair: Simulation) -> str | None:
    pair.beats[1]["failed"] = {"text": "ValueError: missing batch", "own": True}
    return pair.run(BEAT_S)


def loses_a_message_of_a_silent_process(pair: Simulation) -> str | None:
    pair.beats[0]["failed"] = {"text": "JaxRuntimeError: connection closed by peer", "own": False}
    return pair.run(30, beating=(0,))


def loses_a_message(pair: Simulation) -> str | None:
    pair.beats[0]["failed"] = {"text": "JaxRuntimeError: out of memory", "own": False}
    return pair.run(30)


@pytest.mark.parametrize(("happens", "verdict"), [
    (both_step, None),
    (is_silent, "process 1 of 2 (on host1) sent no heartbeat for 4. s while in step 16: it died or was stopped"),
    (is_behind, "process 1 of 2 (on host1) has been in step 16 for 4"),
    (lambda pair: pair.run(60), "all processes have been in step 16 for 4"),
    (has_slow_steps, "all processes have been in step 16 for 15"),
    (saves, "process 1 of 2 (on host1) has been saving for 60"),
    (reads_data, "process 0 of 2 (on host0) has been reading data for 86"),
    (is_silent_while_saving, "process 1 of 2 (on host1) sent no heartbeat for 4. s while saving: it died"),
    (is_done, None),
    (raises_own_error, "process 1 of 2 (on host1) failed: ValueError: missing batch"),
    (loses_a_message_of_a_silent_process, "process 1 of 2 (on host1) sent no heartbeat for 1"),
    (loses_a_message, "process 0 of 2 (on host0) failed: JaxRuntimeError: out of memory"),
])  # fmt: skip
def test_detector_names_the_lost_process(pair: Simulation, happens, verdict: str | None) -> None:
    result = happens(pair)
    assert result is verdict or re.match(verdict.replace("(", r"\(").replace(")", r"\)"), result), result


def watchdogs(left: dict[int, str], num_processes: int = 2) -> list[Watchdog]:
    store = Store()
    return [
        Watchdog(
            Pod(store, process_id=number, num_processes=num_processes),
            leave=lambda verdict, number=number: left.__setitem__(number, verdict),
        )
        for number in range(num_processes)
    ]


def test_slow_process_is_named_once_until_it_recovers(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    dogs = watchdogs({}, 3)
    monkeypatch.setattr(watchdog, "_watchdog", dogs[0])

    def window(last_step: int, host_s: tuple[float, ...]) -> str:
        """Report a window of all processes, and return what process 0 prints."""
        for dog, seconds in zip(dogs, host_s, strict=True):
            dog.pace.windows.append((last_step, seconds, 1.0))
            dog._beat()
        assert dogs[0]._read_verdict() is None
        return capfd.readouterr().err

    assert window(50, (0.1, 0.1, 0.1)) == ""
    assert watchdog.slow_processes() == {}
    text = window(100, (0.1, 0.1, 0.95))
    assert "process 2 of 3" in text
    assert "in steps 51 to 100, its host took 0.95 s of the 1 s per step (median of all processes: 0.1 s)" in text
    assert watchdog.slow_processes() == {"slow_processes": {"2": 0.95}, "median_host_s": 0.1}
    assert window(150, (0.1, 0.1, 0.95)) == ""
    assert window(200, (0.1, 0.1, 0.1)) == ""
    assert watchdog.slow_processes() == {}
    assert "process 2 of 3" in window(250, (0.1, 0.1, 0.95))


def test_failed_process_ends_all_with_the_same_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    left: dict[int, str] = {}
    pair = watchdogs(left)
    for dog in pair:
        dog.start()
    with pair[1].busy("saving"):
        pair[1].failed(ValueError("missing batch"))
        pair[1].failed(ValueError("a later error"))
    for dog in pair:
        dog.wait_to_leave()
    assert left[0] == left[1]
    assert "process 1 of 2" in left[0]
    assert "ValueError: missing batch. All processes end" in left[0]
    assert [dog._code for dog in pair] == [watchdog.MISTAKE_CODE] * 2


def test_signal_in_one_process_ends_all(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    pair = watchdogs({})
    pair[0].start()
    pair[1].interrupted(signal.SIGTERM)
    pair[0].wait_to_leave()
    while not codes:
        time.sleep(0.01)
    assert codes == [128 + signal.SIGTERM]
    assert capfd.readouterr().err == "\nmeshpar: interrupted (SIGTERM in process 1 of 2)\n"


@pytest.mark.parametrize(
    ("agreed", "code", "printed"),
    [(None, watchdog.EXIT_CODE, True), (None, watchdog.MISTAKE_CODE, False), (143, watchdog.EXIT_CODE, None)],
)
def test_exit_code_and_output_after_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capfd, tmp_path, agreed, code, printed
) -> None:
    """After all processes have agreed on an exit code, a process that is lost does not change it."""
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    monkeypatch.setattr(watchdog.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.0)
    (dog, _) = watchdogs({})
    dog._code = code
    if agreed is not None:
        dog.done(agreed)
    dog._dump_and_exit("process 1 is lost")
    assert codes == [code if agreed is None else agreed]
    err = capfd.readouterr().err
    assert ("process 1 is lost" in err, "the stacks of process 0 are in" in err) == (printed is not None, bool(printed))
    assert "most recent call first" not in err
    if printed:
        assert "most recent call first" in Path(err.split()[-1]).read_text()


def test_guard_reports_an_unresponsive_process_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    left: dict[int, str] = {}
    dog = watchdogs(left)[1]
    dog.stall_s = 0.1

    stopped = threading.Event()
    dog.start()
    monkeypatch.setattr(dog._pod, "put", lambda key, value: stopped.wait(600))  # like the service of a stopped process
    dog.wait_to_leave()
    stopped.set()
    assert "process 0 of 2, the coordinator, has not responded" in left[1]


@pytest.mark.parametrize("number", [0, 1])
def test_done_joins_the_threads(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Python aborts if it finalizes while a thread is inside the service's client."""
    monkeypatch.setattr(watchdog, "BEAT_S", 1e-4)
    dog = watchdogs({})[number]
    called, active, children = threading.Event(), [0], dog._pod.children

    def slow(key: str) -> dict[str, object]:
        active[0] += 1
        called.set()
        time.sleep(0.2)
        active[0] -= 1
        return children(key)

    monkeypatch.setattr(dog._pod, "children", slow)
    dog.start()
    assert called.wait(60)
    dog.done(143)
    assert active == [0]
    assert not any(thread.is_alive() for thread in dog._threads)


def test_leave_in_time_exits_with_the_agreed_code(monkeypatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    monkeypatch.setattr(watchdog, "_LEAVE_S", 0.01)
    dog = watchdogs({})[1]
    dog.done(143)
    dog.leave_in_time(143)
    while not codes:
        time.sleep(0.01)
    assert codes == [143]


def test_signal_after_done_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this process ended early, jax would abort the remaining processes."""
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.01)
    dog = watchdogs({})[0]
    dog.done(143)
    dog.interrupted(signal.SIGTERM)
    assert dog._pod.children("interrupted") == {}


def test_watch_without_a_pod_is_none() -> None:
    assert watchdog.watch(None) is None
    with watchdog.busy("saving"):
        assert watchdog.current() is None


def test_is_own_excludes_failed_communication():
    lost = jax.errors.JaxRuntimeError("UNAVAILABLE: barrier")
    reset = ValueError("UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer")
    memory = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB.")
    causes = ((lost, False), (reset, False), (memory, True), (OSError("no space left"), True), (None, True))
    for cause, own in causes:
        error = problem("checkpoints", "save", "writing failed", "check the disk")
        error.__cause__ = cause
        assert watchdog.is_own(error) == own
    assert not watchdog.is_own(lost)
