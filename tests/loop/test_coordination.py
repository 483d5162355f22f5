"""What processes compare before they compute: threads stand for them, a dict for the coordination service."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from meshpar.loop import coordination
from meshpar.loop.coordination import Pod, StopAgreement, check_shared, flatten, this_pod
from meshpar.sharding.types import MeshparError


class Store:
    """The service as a dict."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.news = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.news:
            assert allow_overwrite
            self.values[key] = value
            self.news.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.news:
            if not self.news.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: it did not come")
            return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self.news:
            return [(path, value) for path, value in self.values.items() if path.startswith(f"{key}/")]


def together(facts: list[dict | None], *, times: int = 1, timeout_s: float = 600.0) -> list[str | None]:
    """Each process's error, None where it agrees; a process without facts does not come."""
    store = Store()

    def process(number: int) -> str | None:
        mine = facts[number]
        if mine is None:
            return None
        pod = Pod(store, process_id=number, num_processes=len(facts))
        try:
            for _ in range(times):
                pod.agree("recipe", mine, fix="start them alike", timeout_s=timeout_s)
        except MeshparError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(process, range(len(facts))))


RECIPE = {"name": "a", "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "sample": None, "xla": {}}


def test_processes_that_are_alike_agree_as_often_as_they_ask() -> None:
    assert together([RECIPE] * 3, times=2) == [None] * 3


@pytest.mark.parametrize(
    ("odd", "number", "words"),
    [
        ({**RECIPE, "name": "b"}, 2, "process 2 of 4 (on {host}): asked to compute together with process 0, but the "
         "recipe differs: name is 'b' there and 'a' in process 0. To fix it: start them alike."),
        ({**RECIPE, "optimizer": {"lr": 0.2, "betas": [0.9, 0.9]}}, 0,
         "process 0 of 4 (on {host}): asked to compute together with process 1, but the recipe differs: optimizer.lr "
         "is 0.2 there and 0.1 in process 1 (1 more differs)"),
        ({**RECIPE, "sample": {"prompt": "x"}}, 1, "sample is (absent) there and None in process 0"),
    ],
)  # fmt: skip
def test_every_process_names_the_one_that_differs_and_the_first_field(odd: dict, number: int, words: str) -> None:
    import socket

    facts = [RECIPE] * 4
    facts[number] = odd
    errors = together(facts)
    assert len(set(errors)) == 1
    assert words.format(host=socket.gethostname()) in errors[0]


def test_a_process_that_does_not_come_is_named() -> None:
    errors = together([RECIPE, None, RECIPE], timeout_s=1.0)
    for number in (0, 2):
        assert "process 1 of 3: asked to compare its recipe with the others', but it did not come" in errors[number]
    errors = together([None, RECIPE], timeout_s=1.0)
    assert "process 0 of 2" in errors[1]


def test_values_are_compared_as_json_has_them() -> None:
    assert dict(flatten({"a": {"b": (1, {"c": 2}), "d": {}}, "e": 1.0})) == {
        "a.b.0": 1, "a.b.1.c": 2, "a.d": {}, "e": 1.0,
    }  # fmt: skip


def test_a_process_on_its_own_has_no_pod() -> None:
    assert this_pod() is None


# stopping at one step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signalled", [1, 5, 40])
def test_all_stop_behind_the_same_step_however_far_each_had_come(signalled):
    """Steps are a barrier that lets a process be two ahead, as devices do; one receives a signal in a step."""
    store, steps, ahead = Store(), 60, 2
    done, news = [0, 0, 0], threading.Condition()

    def process(number: int) -> int:
        pod = Pod(store, process_id=number, num_processes=3)
        agreement = StopAgreement(pod, lambda: 15 if number == 1 and done[1] >= signalled else None, poll_s=0.005)
        step = 0
        while step < steps:
            step += 1
            with news:
                done[number] = step
                news.notify_all()
            if agreement.is_over(step):
                break
            with news:  # numbers of a step are there when all have dispatched it; those of the last are waited for
                late = 0 if step == steps else ahead
                assert news.wait_for(lambda at=step - late: min(done) >= at, timeout=60)
        assert agreement.end() == 15  # whichever received it
        return step

    with ThreadPoolExecutor(3) as pool:
        stopped = list(pool.map(process, range(3)))
    assert len(set(stopped)) == 1
    assert signalled <= stopped[0] <= steps


def test_a_process_that_has_ended_is_not_waited_for():
    store = Store()
    pods = [Pod(store, process_id=number, num_processes=2) for number in range(2)]
    first = StopAgreement(pods[0], lambda: None, poll_s=60)
    received = threading.Event()
    second = StopAgreement(pods[1], lambda: 15 if received.is_set() else None, poll_s=0.005)
    assert not second.is_over(3)
    first.close()
    received.set()
    assert second._settled.wait(60)
    assert not second.is_over(3)
    assert second.is_over(4)
    second.close()


def test_when_it_is_closed_no_thread_is_inside_the_client(monkeypatch):
    """Python would abort the process as it finalizes."""
    pod = Pod(Store(), process_id=0, num_processes=2)
    asked, below = threading.Event(), pod.below
    monkeypatch.setattr(pod, "below", lambda key: (asked.set(), time.sleep(0.2), below(key))[2])
    agreement = StopAgreement(pod, lambda: None, poll_s=0.001)
    assert asked.wait(60)
    agreement.close()
    assert not agreement._thread.is_alive()


def shared(*folders: Path) -> list[str | None]:
    """Return each process's error of `check_shared`, None without one; each has a folder of its own."""
    store = Store()

    def process(number: int) -> str | None:
        try:
            check_shared(Pod(store, process_id=number, num_processes=len(folders)), folders[number])
        except MeshparError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(process, range(len(folders))))


def test_a_folder_that_all_see_is_made_and_holds_nothing_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "pod"
    assert shared(folder, folder, folder) == [None] * 3
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs", folder]


@pytest.mark.parametrize("other", ["missing", "a folder", "a file", "a broken link", "no way to write"])
def test_a_process_that_does_not_share_the_folder_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr(coordination, "_SEEN_S", 0.2)
    folder, odd = tmp_path / "runs" / "pod", tmp_path / "odd"
    if other == "a folder":
        odd.mkdir()
    if other == "a file":
        odd.touch()
    if other == "a broken link":
        odd.symlink_to("nowhere")
    if other == "no way to write":
        odd = folder
        touch = Path.touch

        def of_process_1(path: Path, *args: object) -> None:
            if path.suffix == ".1":
                raise OSError(30, "Read-only file system")
            touch(path)

        monkeypatch.setattr(Path, "touch", of_process_1)
    before = sorted(tmp_path.rglob("*"))
    said = shared(folder, odd, folder)
    assert said[0].startswith(f"process 1 of 3 (on {os.uname().nodename}): asked to share the folder ")
    assert ("Read-only" if other == "no way to write" else "directory" if other == "a file" else "missing") in said[0]
    assert {text.partition(", but")[2] for text in said} == {said[0].partition(", but")[2]}
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_process_0_cannot_make_is_reported_by_all(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    said = shared(*[tmp_path / "runs" / "pod"] * 2)
    assert said[0] == said[1]
    assert said[0].startswith("process 0 of 2")
    assert "Not a directory" in said[0]
