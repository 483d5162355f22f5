"""What the processes of a pod agree on before they compute together, compared through JAX's coordination service.

    process i   put(digest of its facts) ─┐
    process 0   reads every digest ───────┴─► verdict: alike, or which two are to show all they have
    the two     put(facts) ─► every process reads both, and raises the same error

The service is a key-value store beside the program: no device takes part, so processes whose programs differ, and which
would hang or abort in a collective, are told apart.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from meshpar.sharding.types import MeshparError, problem

WAIT_S = 86_400.0
"""Seconds for which a process waits for another that lives: one may read text for long. The dead and the stuck are the
watchdog's."""
_ASK_S = 5.0
_CONNECT_S = 2.0
_ANSWER_S = 60.0
_TURN_S = 0.05
POLL_S = 1.0
"""Seconds between two questions whether one has received a signal."""
_PREFIX = "meshpar"
_PROBE = ".meshpar-probe"
_SEEN_S = 10.0
"""Seconds for a new file to be seen by all hosts: network file systems cache what a folder holds."""
_ABSENT = "(absent)"


class Client(Protocol):
    """What is used of the client of JAX's coordination service."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


class Pod:
    """This process among those of a pod, and the store they share."""

    def __init__(self, client: Client, *, process_id: int, num_processes: int, coordinator: str | None = None) -> None:
        self._client, self.coordinator = client, coordinator
        self.process_id, self.num_processes = process_id, num_processes
        self._times: collections.Counter[str] = collections.Counter()

    def is_coordinator_gone(self) -> bool:
        """Return whether nothing listens at the coordinator's address any more. A stopped process still does."""
        host, _, port = (self.coordinator or "").rpartition(":")
        try:
            if host:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    def put(self, key: str, value: Any) -> None:
        """Set a key to a JSON value, whatever it was before."""
        self._client.key_value_set(f"{_PREFIX}/{key}", json.dumps(value), allow_overwrite=True)

    def get(self, key: str, *, timeout_s: float) -> Any:
        """The value of a key, which another process may still have to set; None when it does not come in time."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                asked_ms = max(round(min(left, _ASK_S) * 1000), 1)
                return json.loads(self._client.blocking_key_value_get(f"{_PREFIX}/{key}", asked_ms))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        return None

    def another(self, key: str) -> str:
        """A key below this one that was not there before; the same in every process that asks as often."""
        self._times[key] += 1
        return f"{key}/{self._times[key]}"

    def below(self, key: str) -> dict[str, Any]:
        """Every value that is set below a key by now, by the last part of its own."""
        return {
            path.rpartition("/")[2]: json.loads(value)
            for path, value in self._client.key_value_dir_get(f"{_PREFIX}/{key}")
        }

    def agree(self, about: str, facts: Mapping[str, Any], *, fix: str, timeout_s: float = WAIT_S) -> None:
        """Return when every process has come here with the same facts.

        Args:
          about: what is compared, the same word in every process.
          facts: JSON values by name; nested ones are told apart by dotted paths.
          fix: what to do where they differ.
          timeout_s: how long to wait for the others, in seconds.

        Raises:
          ValueError: in every process: which one differs, in which field first, and both values; or which did not come.
        """
        stage = self.another(f"agree/{about}")  # a process may train twice
        flat = dict(flatten(facts))
        mine = hashlib.sha256(json.dumps(flat).encode()).hexdigest()
        self.put(f"{stage}/digest/{self.process_id}", [mine, socket.gethostname()])
        if self.process_id == 0:
            self.put(f"{stage}/verdict", self._verdict(f"{stage}/digest", about, timeout_s))
        verdict = self.get(f"{stage}/verdict", timeout_s=2 * timeout_s)
        if verdict is None:
            raise self._absent(about, [0])
        if verdict["missing"]:
            raise self._absent(about, verdict["missing"])
        if not verdict["differ"]:
            return
        two = verdict["differ"]
        if self.process_id in two:
            self.put(f"{stage}/facts/{self.process_id}", flat)
        odd, usual = (self.get(f"{stage}/facts/{number}", timeout_s=timeout_s) for number in two)
        if odd is None or usual is None:
            raise self._absent(about, [number for number, found in zip(two, (odd, usual), strict=True) if not found])
        raise self._differing(about, two, verdict["host"], odd, usual, fix)

    def most(self, key: str, mine: int, *, timeout_s: float = WAIT_S) -> int:
        """The largest number that any process gives under this key; all wait for each other, as long as is said."""
        self.put(f"{key}/{self.process_id}", mine)
        deadline = time.monotonic() + timeout_s
        while len(found := self.below(key)) < self.num_processes and time.monotonic() < deadline:
            time.sleep(_TURN_S)
        return max(mine, *found.values())

    def gather(self, about: str, mine: Any, *, timeout_s: float = WAIT_S) -> dict[int, Any]:
        """Return the JSON value that each process passes, by process, once all have come.

        Raises:
          ValueError: a process did not come.
        """
        key = self.another(f"gather/{about}")
        self.put(f"{key}/{self.process_id}", mine)
        deadline = time.monotonic() + timeout_s
        while len(found := self.below(key)) < self.num_processes:
            if time.monotonic() > deadline:
                raise self._absent(about, [number for number in range(self.num_processes) if str(number) not in found])
            time.sleep(_TURN_S)
        return {int(number): found[number] for number in sorted(found, key=int)}

    def of_first(self, about: str, mine: Any, *, first: int = 0, timeout_s: float = WAIT_S) -> Any:
        """What one process has to say, in every process that asks.

        Args:
          about: what it is, the same word in every process, which all ask as often.
          mine: a JSON value, not None; only that of process `first` counts.
          first: the process that says it.
          timeout_s: how long to wait for it, in seconds.

        Raises:
          ValueError: it did not come.
        """
        key = self.another(f"first/{about}")
        if self.process_id == first:
            self.put(key, mine)
            return mine
        found = self.get(key, timeout_s=timeout_s)
        if found is None:
            raise self._absent(about, [first])
        return found

    def _verdict(self, key: str, about: str, timeout_s: float) -> dict[str, Any]:
        """Process 0's: who did not come; or the first process with another digest than most, and one of those."""
        deadline = time.monotonic() + timeout_s
        digests: list[tuple[str, str]] = []
        for number in range(self.num_processes):
            found = self.get(f"{key}/{number}", timeout_s=max(deadline - time.monotonic(), 0.001))
            if found is None:
                here = self.below(key)
                return {"missing": [n for n in range(self.num_processes) if str(n) not in here], "differ": []}
            digests.append((found[0], found[1]))
        usual = collections.Counter(digest for digest, _ in digests).most_common(1)[0][0]
        odd = [number for number, (digest, _) in enumerate(digests) if digest != usual]
        if not odd:
            return {"missing": [], "differ": []}
        like = next(number for number, (digest, _) in enumerate(digests) if digest == usual)
        return {"missing": [], "differ": [odd[0], like], "host": digests[odd[0]][1]}

    def _differing(
        self, about: str, two: Sequence[int], host: str, odd: Mapping[str, Any], usual: Mapping[str, Any], fix: str
    ) -> MeshparError:
        names = [name for name in {**usual, **odd} if odd.get(name, _ABSENT) != usual.get(name, _ABSENT)]
        first, more = names[0], len(names) - 1
        others = f" ({more} more {'differs' if more == 1 else 'differ'})" if more else ""
        return problem(
            f"process {two[0]} of {self.num_processes} (on {host})",
            f"compute together with process {two[1]}",
            f"the {about} differs: {first} is {_shown(odd.get(first, _ABSENT))} there and "
            f"{_shown(usual.get(first, _ABSENT))} in process {two[1]}{others}",
            fix,
        )

    def _absent(self, about: str, missing: Sequence[int]) -> MeshparError:
        who = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        asked, fix = f"compare its {about} with the others'", "look at its own log, and start all processes again"
        return problem(f"process {who} of {self.num_processes}", asked, "it did not come in time", fix)


def check_shared(pod: Pod, folder: Path) -> None:
    """Check that every process reads and writes the same folder, which is made if it is not there.

        process 0   writes a probe ── all: read it, write one of their own ── removes the probe
                                      one cannot: it is named in all processes, and folders made here are removed

    Raises:
      ValueError: in every process: the first one that cannot.
    """
    name, made, why = f"{_PROBE}-{secrets.token_hex(8)}", list[Path](), ""
    if pod.process_id == 0:
        try:
            made = _make(folder)
            (folder / name).write_text(name)
        except OSError as error:
            why = f"that failed ({error.strerror or error})"
    name = pod.of_first("probe", name)
    try:
        whys = pod.gather("probe", [socket.gethostname(), why or _why_not_shared(folder, name, pod.process_id)])
        failed = [(number, host, why) for number, (host, why) in whys.items() if why]
        if failed:
            number, host, why = failed[0]
            raise problem(
                f"process {number} of {pod.num_processes} (on {host})",
                f"share the folder {folder} with process 0",
                why,
                "name a folder (--out) on a disk that every host has mounted at the same path, and may write to",
            )
        made = []
    finally:
        if pod.process_id == 0:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
            for path in reversed(made):
                with contextlib.suppress(OSError):
                    path.rmdir()


def _make(folder: Path) -> list[Path]:
    """Make a folder, and return the folders that were not there before, outermost first."""
    missing = [path for path in (*reversed(folder.parents), folder) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _why_not_shared(folder: Path, name: str, process_id: int) -> str:
    """Return why this process does not share the folder; empty if it does."""
    deadline, mine = time.monotonic() + _SEEN_S, folder / f"{name}.{process_id}"
    while True:
        with contextlib.suppress(OSError):
            os.listdir(folder.parent)  # makes a network file system look again
        try:
            if (folder / name).read_text() != name:
                return f"the file that process 0 wrote there ({name}) reads otherwise"
            mine.touch()
            mine.unlink()
            return ""
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return "the file that process 0 wrote there is missing on this host"
        except OSError as error:
            return f"that failed ({error.strerror or error})"
        time.sleep(_TURN_S)


class StopAgreement:
    """The step after which all processes stop when one has received a signal; without a message in any step.

        thread: asks the store: has one received it? ─► says how far this process may have dispatched ─► all have said
        main:                                             waits before the next step ◄── stop after the largest of these

    While a process waits, others may wait for it in a step: their threads answer all the same.

    Args:
      pod: this process's.
      received: the number of a signal that this process has received, None before.
      poll_s: seconds between two questions; None: `POLL_S`.
    """

    def __init__(self, pod: Pod, received: Callable[[], int | None], *, poll_s: float | None = None) -> None:
        self._key, self._end_key = pod.another("stop"), pod.another("end")  # every process makes as many, in one order
        self._pod, self._received, self._poll_s = pod, received, POLL_S if poll_s is None else poll_s
        self._lock, self._closed, self._settled = threading.Lock(), threading.Event(), threading.Event()
        self._step, self._asked, self._said = 0, False, False
        self._last: int | None = None
        self._thread = threading.Thread(target=self._talk, name="meshpar-agreement", daemon=True)
        self._thread.start()

    def is_over(self, step: int) -> bool:
        """Whether the run stops behind this step, which the main thread has just dispatched.

        Raises:
          ValueError: others do not answer.
        """
        with self._lock:
            self._step = step
            asked = self._asked
        if asked and not self._settled.wait(_ANSWER_S):
            fix = "look at the other processes; the last checkpoint is whole"
            raise problem("a signal to stop", "stop at one step with all", "not all processes answered", fix)
        return self._last is not None and step >= self._last

    def end(self) -> int | None:
        """The run has ended here, with all that is to be saved: the signal that any process has received until then.

        All wait for each other, so that each ends as the others do, also where a signal came behind the last step.
        """
        mine = self._received() or 0
        self.close()
        return self._pod.most(self._end_key, mine, timeout_s=_ANSWER_S) or None

    def close(self) -> None:
        """The run has ended here: others need not wait."""
        self._closed.set()
        self._thread.join(_ASK_S)  # Python aborts where it finalizes while a thread is inside the service's client
        with contextlib.suppress(Exception):  # the service may have ended
            if not self._said:
                self._pod.put(f"{self._key}/{self._pod.process_id}", 0)

    def _talk(self) -> None:
        while not self._closed.wait(self._poll_s if not self._asked else self._poll_s / 20):
            with contextlib.suppress(Exception):  # told by the watchdog, where the service is gone
                if self._look():
                    return

    def _look(self) -> bool:
        found = self._pod.below(self._key)
        if self._received() is not None and "asked" not in found:
            self._pod.put(f"{self._key}/asked", True)
        elif "asked" not in found:
            return False
        with self._lock:
            first, self._asked = not self._asked, True
            may_reach = self._step + 1  # the main thread may have asked just before, and go on by one
        if first:
            self._pod.put(f"{self._key}/{self._pod.process_id}", may_reach)
            self._said = True
        said = [found[one] for one in found if one != "asked"]
        if len(said) < self._pod.num_processes:
            return False
        self._last = max(said)
        self._settled.set()
        return True


def this_pod() -> Pod | None:
    """The pod that this process has joined by `jax.distributed.initialize`; None for a process on its own.

    jax offers the store to its own packages only (orbax uses it, too), so this is the one place that knows where.
    """
    global _pod
    from jax._src.distributed import global_state

    client, number = global_state.client, global_state.num_processes
    if client is None or number is None or number < 2:
        return None
    if _pod is None or _pod[0] is not client:
        place = {"process_id": global_state.process_id, "num_processes": number}
        _pod = (client, Pod(client, **place, coordinator=global_state.coordinator_address))
    return _pod[1]


_pod: tuple[Any, Pod] | None = None


def flatten(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by dotted path, lists by number."""
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and value:
            yield from flatten({str(number): item for number, item in enumerate(value)}, f"{prefix}{name}.")
        else:
            # As JSON has it: what is compared in this process and in another went the same way.
            yield f"{prefix}{name}", json.loads(json.dumps(value, default=str))


def _shown(value: Any, most: int = 200) -> str:
    text = value if value == _ABSENT else repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
