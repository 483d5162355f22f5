"""Agreement between processes, which are threads here, with a dict as the coordination service."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from meshpar.pod import coordination
from meshpar.pod.coordination import Pod, StopAgreement, check_shared, flatten, this_pod
from meshpar.sharding.errors import MeshparError


class Store:
    """The key-value store of the coordination service."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            assert allow_overwrite
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: not set")
            return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self.changed:
            return [(path, value) for path, value in self.values.items() if path.startswith(f"{key}/")]


def run_processes(number: int, run: Callable[[Pod], None]) -> list[str | None]:
    """Run a function on each process, and return the errors."""
    store = Store()

    def process(process_id: int) -> str | None:
        try:
            run(Pod(store, process_id=process_id, num_processes=number))
        except MeshparError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(process, range(number)))


def agree(values: list[dict | None], *, times: int = 1, timeout_s: float = 600.0) -> list[str | None]:
    """Return the errors of `Pod.agree`. A process without values does not call it."""

    def run(pod: Pod) -> None:
        if (local := values[pod.process_id]) is not None:
            for _ in range(times):
                pod.agree("recipe", local, fix="use equal recipes", timeout_s=timeout_s)

    return run_processes(len(values), run)


RECIPE = {"name": "a", "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "sample": None, "xla": {}}


def test_agree_with_equal_values_can_be_repeated() -> None:
    assert agree([RECIPE] * 3, times=2) == [None] * 3


@pytest.mark.parametrize(
    ("odd", "number", "words"),
    [
        ({**RECIPE, "name": "b"}, 2, "process 2 of 4 (on {host}): cannot compute together with process 0: the "
         "recipe differs: name is 'b' there and 'a' in process 0. Use equal recipes."),
        ({**RECIPE, "optimizer": {"lr": 0.2, "betas": [0.9, 0.9]}}, 0,
         "process 1 of 4 (on {host}): cannot compute together with process 0: the recipe differs: optimizer.lr "
         "is 0.1 there and 0.2 in process 0 (1 more differs)"),
        ({**RECIPE, "sample": {"prompt": "x"}}, 1, "sample is (absent) there and None in process 0"),
    ],
)  # fmt: skip
def test_agree_names_the_first_difference_on_all_processes(odd: dict, number: int, words: str) -> None:
    values = [RECIPE] * 4
    values[number] = odd
    errors = agree(values)
    assert len(set(errors)) == 1
    assert words.format(host=socket.gethostname()) in errors[0]


def test_agree_names_a_missing_process() -> None:
    errors = agree([RECIPE, None, RECIPE], timeout_s=0.3)
    for number in (0, 2):
        assert "process 1 of 3: cannot compare its recipe with other processes: it did not respond" in errors[number]
    errors = agree([None, RECIPE], timeout_s=0.3)
    assert "process 0 of 2" in errors[1]


def test_flatten_returns_json_values_by_path() -> None:
    assert dict(flatten({"a": {"b": (1, {"c": 2}), "d": {}}, "e": 1.0})) == {
        "a.b.0": 1, "a.b.1.c": 2, "a.d": {}, "e": 1.0,
    }  # fmt: skip


def test_this_pod_is_none_for_a_single_process() -> None:
    assert this_pod() is None


# ---- StopAgreement ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signalled", [1, 5, 40])
def test_all_processes_stop_after_the_same_step(signalled):
    """Processes may be two steps apart, as with real devices. Process 1 receives a signal."""
    store, steps, ahead = Store(), 60, 2
    done, changed = [0, 0, 0], threading.Condition()

    def process(number: int) -> int:
        pod = Pod(store, process_id=number, num_processes=3)
        agreement = StopAgreement(pod, lambda: 15 if number == 1 and done[1] >= signalled else None, poll_s=0.005)
        step = 0
        while step < steps:
            step += 1
            with changed:
                done[number] = step
                changed.notify_all()
            if agreement.is_over(step):
                break
            with changed:  # a step ends when all processes have dispatched it; the loop waits for the last step
                pending = 0 if step == steps else ahead
                assert changed.wait_for(lambda ended=step - pending: min(done) >= ended, timeout=60)
        assert agreement.end() == 15
        return step

    with ThreadPoolExecutor(3) as pool:
        stopped = list(pool.map(process, range(3)))
    assert len(set(stopped)) == 1
    assert signalled <= stopped[0] <= steps


def test_agreement_ignores_a_process_that_has_ended():
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


def test_agreement_close_joins_its_thread(monkeypatch):
    """Python aborts if it finalizes while a thread is inside the service's client."""
    pod = Pod(Store(), process_id=0, num_processes=2)
    asked, children = threading.Event(), pod.children
    monkeypatch.setattr(pod, "children", lambda key: (asked.set(), time.sleep(0.2), children(key))[2])
    agreement = StopAgreement(pod, lambda: None, poll_s=0.001)
    assert asked.wait(60)
    agreement.close()
    assert not agreement._thread.is_alive()


# ---- check_shared ----------------------------------------------------------------------------------------------------


def shared(*folders: Path) -> list[str | None]:
    """Return the errors of `check_shared`, with one folder per process."""
    return run_processes(len(folders), lambda pod: check_shared(pod, folders[pod.process_id]))


def test_check_shared_creates_an_empty_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "pod"
    assert shared(folder, folder, folder) == [None] * 3
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs", folder]


@pytest.mark.parametrize("other", ["missing", "a folder", "a file", "a broken link", "no way to write"])
def test_check_shared_names_the_process_without_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr(coordination, "_VISIBLE_S", 0.2)
    folder, odd = tmp_path / "runs" / "pod", tmp_path / "odd"
    {"a folder": odd.mkdir, "a file": odd.touch}.get(other, lambda: None)()
    if other == "a broken link":
        odd.symlink_to("nowhere")
    if other == "no way to write":
        odd, touch = folder, Path.touch

        def fail_on_process_1(path: Path, *args: object) -> None:
            if path.suffix == ".1":
                raise OSError(30, "Read-only file system")
            touch(path)

        monkeypatch.setattr(Path, "touch", fail_on_process_1)
    errors = shared(folder, odd, folder)
    assert errors[0].startswith(f"process 1 of 3 (on {os.uname().nodename}): cannot share ")
    assert all({"no way to write": "Read-only"}.get(other, "missing") in error for error in errors)
    assert not folder.exists()


def test_check_shared_reports_a_failure_of_process_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_VISIBLE_S", 0.2)
    (tmp_path / "runs").touch()
    errors = shared(*[tmp_path / "runs" / "pod"] * 2)
    assert errors[0] == errors[1]
    assert errors[0].startswith("process 0 of 2")
    assert "Not a directory" in errors[0]
