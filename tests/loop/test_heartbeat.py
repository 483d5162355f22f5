"""Who is lost, by beats that a test writes and a clock that it turns: no thread and no process takes part."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import jax
import pytest

from meshpar.loop import heartbeat as watchdog
from meshpar.loop.coordination import Pod
from meshpar.loop.heartbeat import BEAT_S, Judge, Watchdog
from meshpar.sharding.types import problem
from tests.loop.test_coordination import Store


class Told:
    """Two processes and their judge, moved from beat to beat."""

    def __init__(self) -> None:
        self.judge = Judge(2, stall_s=40, busy_s=600)
        self.now = 0.0
        self.beats = {
            number: {"count": 0, "host": f"host{number}", "step": 5, "busy": None, "slowest_s": 1.0, "failed": None}
            for number in (0, 1)
        }

    def after(self, seconds: float, *, beating: tuple[int, ...] = (0, 1), moving: tuple[int, ...] = ()) -> str | None:
        """The verdict so many seconds later; who moves takes a step at each beat."""
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for number in beating:
                self.beats[number]["count"] += 1
                self.beats[number]["step"] += number in moving
            if verdict := self.judge.look(self.beats, self.now):
                return verdict
        return None


@pytest.fixture
def told() -> Told:
    told = Told()
    assert told.after(20, moving=(0, 1)) is None
    return told


def test_processes_that_move_are_left_alone(told: Told) -> None:
    assert told.after(4000, moving=(0, 1)) is None


def test_one_that_is_not_heard_of_is_named(told: Told) -> None:
    verdict = told.after(60, beating=(0,))
    assert verdict is not None
    assert verdict.startswith("process 1 of 2 (on host1) has not been heard of for 4")
    assert "since it was in step 16: it died, or it was stopped" in verdict


def test_one_that_lives_and_stays_behind_is_named_and_not_those_that_wait_for_it(told: Told) -> None:
    told.beats[0]["step"] += 3
    verdict = told.after(60)
    assert verdict is not None
    assert verdict.startswith("process 1 of 2 (on host1) stays in step 16 for 4")


def test_a_collective_that_hangs_holds_all(told: Told) -> None:
    assert (told.after(60) or "").startswith("all processes stay in step 16 for 4")


def test_a_long_step_among_long_ones_is_no_stall(told: Told) -> None:
    told.beats[1]["slowest_s"] = 30.0
    assert told.after(140) is None
    assert "stay in step 16" in (told.after(30) or "")


def test_what_may_take_long_is_no_stall_but_for_hours(told: Told) -> None:
    told.beats[1]["busy"] = "saves"
    told.beats[0]["step"] += 3
    assert told.after(590) is None
    assert (told.after(30) or "").startswith("process 1 of 2 (on host1) saves for 60")


def test_reading_data_may_take_hours(told: Told) -> None:
    told.beats[0]["busy"], told.beats[1]["busy"] = watchdog.READS, watchdog.WAITS
    assert told.after(10_000) is None
    verdict = told.after(80_000)
    assert verdict is not None
    assert "reads its data for 86" in verdict


def test_one_that_is_stopped_while_it_saves_is_named_as_soon(told: Told) -> None:
    told.beats[1]["busy"] = "saves"
    assert "since it saves: it died" in (told.after(60, beating=(0,)) or "")


def test_a_process_that_is_done_may_fall_silent(told: Told) -> None:
    told.beats[1]["busy"] = "done"
    told.beats[0]["busy"] = "ends"
    assert told.after(500, beating=(0,)) is None


def test_an_error_of_its_own_ends_all_at_once(told: Told) -> None:
    told.beats[1]["failed"] = {"text": "ValueError: no such batch", "own": True}
    assert told.after(BEAT_S) == "process 1 of 2 (on host1) ended: ValueError: no such batch"


def test_where_a_message_failed_the_process_that_died_is_named(told: Told) -> None:
    told.beats[0]["failed"] = {"text": "JaxRuntimeError: connection closed by peer", "own": False}
    verdict = told.after(30, beating=(0,))
    assert (verdict or "").startswith("process 1 of 2 (on host1) has not been heard of for 1")


def test_a_message_that_failed_while_all_live_ends_all(told: Told) -> None:
    told.beats[0]["failed"] = {"text": "JaxRuntimeError: out of memory", "own": False}
    assert told.after(30) == "process 0 of 2 (on host0) ended: JaxRuntimeError: out of memory"


def dogs(left: dict[int, str]) -> list[Watchdog]:
    store = Store()
    return [
        Watchdog(
            Pod(store, process_id=number, num_processes=2),
            leave=lambda verdict, number=number: left.__setitem__(number, verdict),
        )
        for number in (0, 1)
    ]


def test_one_process_fails_and_both_leave_for_the_same_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    left: dict[int, str] = {}
    pair = dogs(left)
    for dog in pair:
        dog.start()
    with pair[1].busy("saves"):
        pair[1].failed(ValueError("no such batch"))
        pair[1].failed(ValueError("a later one"))
    for dog in pair:
        dog.wait_to_leave()
    assert left[0] == left[1]
    assert "process 1 of 2" in left[0]
    assert "ValueError: no such batch. All processes end" in left[0]
    assert [dog._code for dog in pair] == [watchdog.MISTAKE_CODE] * 2  # --restarts would meet it again


def test_a_signal_that_ends_one_process_ends_the_others(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    pair = dogs({})
    pair[0].start()
    pair[1].interrupted(signal.SIGTERM)
    pair[0].wait_to_leave()
    while not codes:
        time.sleep(0.01)
    assert codes == [128 + signal.SIGTERM]
    assert capfd.readouterr().err == "\nmeshpar: interrupted (SIGTERM in process 1 of 2)\n"


@pytest.mark.parametrize(
    ("agreed", "given", "said"),
    [(None, watchdog.EXIT_CODE, True), (None, watchdog.MISTAKE_CODE, False), (143, watchdog.EXIT_CODE, None)],
)
def test_what_a_verdict_ends_with(monkeypatch: pytest.MonkeyPatch, capfd, tmp_path, agreed, given, said) -> None:
    """Once all have agreed on a code, one that a signal ends on its way out changes nothing."""
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    monkeypatch.setattr(watchdog.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.0)  # there is no other
    (dog, _) = dogs({})
    dog._code = given
    if agreed is not None:
        dog.done(agreed)
    dog._dump_and_exit("process 1 is lost")
    assert codes == [given if agreed is None else agreed]
    err = capfd.readouterr().err
    assert ("process 1 is lost" in err, "the stacks of process 0 are in" in err) == (said is not None, bool(said))
    assert "most recent call first" not in err
    if said:
        assert "most recent call first" in Path(err.split()[-1]).read_text()


def test_process_0_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    left: dict[int, str] = {}
    dog = dogs(left)[1]
    dog.stall_s = 0.1

    stopped = threading.Event()
    dog.start()
    monkeypatch.setattr(dog._pod, "put", lambda key, value: stopped.wait(600))  # as a service in a stopped process
    dog.wait_to_leave()
    stopped.set()
    assert "process 0 of 2, which coordinates, has not answered" in left[1]


@pytest.mark.parametrize("number", [0, 1])
def test_when_it_is_done_no_thread_is_inside_the_client(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Python would abort the process as it finalizes."""
    monkeypatch.setattr(watchdog, "BEAT_S", 1e-4)
    dog = dogs({})[number]
    asked, inside, below = threading.Event(), [0], dog._pod.below

    def slow(key: str) -> dict[str, object]:
        inside[0] += 1
        asked.set()
        time.sleep(0.2)
        inside[0] -= 1
        return below(key)

    monkeypatch.setattr(dog._pod, "below", slow)
    dog.start()
    assert asked.wait(60)
    dog.done(143)
    assert inside == [0]
    assert not any(thread.is_alive() for thread in dog._threads)


def test_where_one_is_lost_on_its_way_out_the_others_end_with_the_code_all_agreed_on(monkeypatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    monkeypatch.setattr(watchdog, "_LEAVE_S", 0.01)
    dog = dogs({})[1]
    dog.done(143)
    dog.leave_in_time(143)
    while not codes:
        time.sleep(0.01)
    assert codes == [143]


def test_a_signal_once_all_have_agreed_to_end_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that went before the others would have jax abort them."""
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.01)
    dog = dogs({})[0]
    dog.done(143)
    dog.interrupted(signal.SIGTERM)
    assert dog._pod.below("interrupted") == {}


def test_without_a_pod_nothing_is_watched() -> None:
    assert watchdog.watch(None) is None
    with watchdog.busy("saves"):
        assert watchdog.current() is None


def test_a_save_that_fails_for_another_process_is_no_mistake_of_ones_own():
    lost = jax.errors.JaxRuntimeError("UNAVAILABLE: barrier")
    reset = ValueError("UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer")
    for cause, own in ((lost, False), (reset, False), (OSError("no space left"), True), (None, True)):
        error = problem("checkpoints", "save", "writing failed", "see to it")
        error.__cause__ = cause
        assert watchdog.is_own(error) == own
    assert not watchdog.is_own(lost)
