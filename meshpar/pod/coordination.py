"""Agreement between the processes of a pod, through the key-value store of JAX's coordination service.

    all          receive the values of process 0, compare them with their own values, and send a difference
    process 0    collects the differences and sends them to all, which raise the same error

No device is involved. Processes with different programs would hang or abort in a collective; here they get an error.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshpar.sharding.errors import MeshparError, problem

WAIT_S = 86_400.0
"""Seconds to wait for a live process, which may be tokenizing text. The watchdog detects dead and stalled processes."""
POLL_S = 1.0
"""Seconds between two checks of whether a process has received a signal."""
_GET_S = 5.0
_CONNECT_S = 2.0
_ANSWER_S = 60.0
_SLEEP_S = 0.05
_PREFIX = "meshpar"
_PROBE = ".meshpar-probe"
_VISIBLE_S = 10.0
"""Seconds until all hosts see a new file: network file systems cache directory listings."""
_ABSENT = "(absent)"


class Pod:
    """The processes of a pod, seen from the local process: a key-value store and collective operations.

    All processes must call the collective methods (`agree`, `max`, `gather`, `broadcast`) in the same order. `client`
    is the client of JAX's coordination service, and `coordinator` the service's address.
    """

    def __init__(self, client: Any, *, process_id: int, num_processes: int, coordinator: str | None = None) -> None:
        self._client, self.coordinator = client, coordinator
        self.process_id, self.num_processes = process_id, num_processes
        self._num_keys: collections.Counter[str] = collections.Counter()

    def is_coordinator_gone(self) -> bool:
        """Return whether the coordinator's port is closed. It stays open while the process is stopped by a signal."""
        host, _, port = (self.coordinator or "").rpartition(":")
        try:
            if host:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    def put(self, key: str, value: object) -> None:
        """Set a key to a JSON value, replacing an earlier value."""
        self._client.key_value_set(f"{_PREFIX}/{key}", json.dumps(value), allow_overwrite=True)

    def get(self, key: str, *, timeout_s: float) -> Any:
        """Return the value of a key, or None if it is not set within the timeout."""
        deadline = time.monotonic() + timeout_s
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                timeout_ms = max(round(min(remaining, _GET_S) * 1000), 1)
                return json.loads(self._client.blocking_key_value_get(f"{_PREFIX}/{key}", timeout_ms))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        return None

    def children(self, key: str) -> dict[str, Any]:
        """Return the values of the keys `key/NAME`, by NAME."""
        children = self._client.key_value_dir_get(f"{_PREFIX}/{key}")
        return {path.rpartition("/")[2]: json.loads(value) for path, value in children}

    def new_key(self, key: str) -> str:
        """Return an unused key under `key`. The n-th call returns the same key on all processes."""
        self._num_keys[key] += 1
        return f"{key}/{self._num_keys[key]}"

    def agree(self, about: str, values: Mapping[str, Any], *, fix: str, timeout_s: float = WAIT_S) -> None:
        """Check that all processes pass the same values.

        Args:
          about: a name for the values, such as "recipe", equal on all processes.
          values: JSON values by name. In errors, nested values have dotted paths.
          fix: advice for the error message.
          timeout_s: the time to wait for the other processes, in seconds.

        Raises:
          ValueError: on all processes: a process has different values (the error names the process, the first field
            that differs, and both values), or did not call this method in time.
        """
        local = dict(flatten(values))
        first = self.broadcast(about, local, timeout_s=timeout_s)
        names = [name for name in {**first, **local} if local.get(name, _ABSENT) != first.get(name, _ABSENT)]
        difference = [socket.gethostname(), len(names), *names[:1]]
        difference += [_shorten(values.get(name, _ABSENT)) for name in names[:1] for values in (local, first)]
        for number, (host, count, *texts) in self.gather(about, difference, timeout_s=timeout_s).items():
            if count:
                where = f"process {number} of {self.num_processes} (on {host})"
                more = f" ({count - 1} more {'differs' if count == 2 else 'differ'})" if count > 1 else ""
                reason = "the {} differs: {} is {} there and {} in process 0{}".format(about, *texts, more)
                raise problem(where, "compute together with process 0", reason, fix, code="conflict")

    def max(self, key: str, value: int, *, timeout_s: float = WAIT_S) -> int:
        """Return the maximum value of all processes. Processes that do not respond in time are ignored."""
        values, _ = self._gather(key, value, timeout_s)
        return max(value, *values.values())

    def gather(self, about: str, value: object, *, timeout_s: float = WAIT_S) -> dict[int, Any]:
        """Return the JSON values of all processes, by process, or raise `ValueError` on all after a timeout.

        `about` is a name of the value for the error.
        """
        values, missing = self._gather(self.new_key(f"gather/{about}"), value, timeout_s)
        if missing:
            raise self._missing(about, missing)
        return values

    def _gather(self, key: str, value: Any, timeout_s: float) -> tuple[dict[int, Any], list[int]]:
        self.put(f"{key}/each/{self.process_id}", value)
        deadline = time.monotonic() + timeout_s
        if self.process_id == 0:
            while len(values := self.children(f"{key}/each")) < self.num_processes and time.monotonic() < deadline:
                time.sleep(_SLEEP_S)
            self.put(f"{key}/all", values)
        else:
            values = self.get(f"{key}/all", timeout_s=2 * timeout_s)
        if values is None:
            return {}, [0]
        missing = [number for number in range(self.num_processes) if str(number) not in values]
        return {int(number): values[number] for number in sorted(values, key=int)}, missing

    def broadcast(self, about: str, value: object, *, source: int = 0, timeout_s: float = WAIT_S) -> Any:
        """Return the JSON value of process `source` on all processes, or raise `ValueError` after a timeout.

        `about` is a name of the value for the error.
        """
        key = self.new_key(f"first/{about}")
        if self.process_id == source:
            self.put(key, value)
            return value
        received = self.get(key, timeout_s=timeout_s)
        if received is None:
            raise self._missing(about, [source])
        return received

    def _missing(self, about: str, missing: Sequence[int]) -> MeshparError:
        numbers = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        where, requested = f"process {numbers} of {self.num_processes}", f"compare its {about} with other processes"
        fix = "read its log, and restart all processes"
        return problem(where, requested, "it did not respond in time", fix, code="timeout")


def check_shared(pod: Pod, folder: Path) -> None:
    """Check that all processes can read and write the same folder, and create it if necessary.

        process 0   writes a probe file ── all: find it, write their own file ── removes the probe file

    Raises:
      ValueError: on all processes: the first process that cannot access the folder.
    """
    name, created, failure = f"{_PROBE}-{secrets.token_hex(8)}", list[Path](), ""
    try:
        if pod.process_id == 0:
            created = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    except OSError as error:
        failure = f"that failed ({error.strerror or error})"
    name = pod.broadcast("probe", name)
    try:
        failures = pod.gather("probe", [socket.gethostname(), failure or _access_failure(folder, name, pod.process_id)])
    finally:
        with contextlib.suppress(OSError):
            if pod.process_id == 0:
                (folder / name).unlink()
    for number, (host, failure) in failures.items():
        if failure:
            with contextlib.suppress(OSError):
                for path in created:
                    path.rmdir()
            where, requested = f"process {number} of {pod.num_processes} (on {host})", f"share {folder} with process 0"
            fix = "choose a folder on a disk that all hosts mount at the same path with write access (--out, folder)"
            raise problem(where, requested, failure, fix, code="missing-file")


def _access_failure(folder: Path, name: str, process_id: int) -> str:
    """Return why this process cannot find the probe file or write its own file, or an empty string."""
    deadline, own_file = time.monotonic() + _VISIBLE_S, folder / f"{name}.{process_id}"
    try:
        while not (folder / name).exists():
            if time.monotonic() > deadline:
                return "the probe file of process 0 is missing on this host"
            time.sleep(_SLEEP_S)
            with contextlib.suppress(OSError):
                os.listdir(folder.parent)  # refreshes the cache of a network file system
        own_file.touch()
        own_file.unlink()
    except OSError as error:
        return f"that failed ({error.strerror or error})"
    return ""


class StopAgreement:
    """Agreement on the last step of all processes after a process has received a signal.

        thread:  polls the store ─► a process received a signal ─► announces how many steps this process may dispatch
        main:    blocks before the next step until all have announced ─► stops after the maximum

    The step itself sends no message. Processes that are blocked in a step still announce, in their threads.
    `received` returns the number of the signal that this process has received, or None.
    """

    def __init__(self, pod: Pod, received: Callable[[], int | None], *, poll_s: float | None = None) -> None:
        self._key, self._end_key = pod.new_key("stop"), pod.new_key("end")  # all processes create them in this order
        self._pod, self._received, self._poll_s = pod, received, POLL_S if poll_s is None else poll_s
        self._lock, self._closed, self._settled = threading.Lock(), threading.Event(), threading.Event()
        self._step, self._requested, self._announced = 0, False, False
        self._last: int | None = None
        self._thread = threading.Thread(target=self._run, name="meshpar-agreement", daemon=True)
        self._thread.start()

    def is_over(self, step: int) -> bool:
        """Return whether the run stops after this step, which the main thread has just dispatched."""
        with self._lock:
            self._step, requested = step, self._requested
        if requested and not self._settled.wait(_ANSWER_S):
            fix = "read the logs of the other processes; the last checkpoint is intact"
            action, reason = "stop all processes at the same step", "a process did not respond"
            raise problem("a stop signal", action, reason, fix, code="timeout")
        return self._last is not None and step >= self._last

    def end(self) -> int | None:
        """Return the signal that any process has received. Call it at the end of the run, after the last save.

        All processes block here, so that they have the same exit code even if a signal arrives after the last step.
        """
        number = self._received() or 0
        self.close()
        return self._pod.max(self._end_key, number, timeout_s=_ANSWER_S) or None

    def close(self) -> None:
        """Stop taking part, so that other processes do not wait for this process."""
        self._closed.set()
        self._thread.join(_GET_S)  # Python aborts if it finalizes while a thread is inside the service's client
        with contextlib.suppress(Exception):  # the service may have ended
            if not self._announced:
                self._pod.put(f"{self._key}/{self._pod.process_id}", 0)

    def _run(self) -> None:
        while not self._closed.wait(self._poll_s if not self._requested else self._poll_s / 20):
            with contextlib.suppress(Exception):  # the watchdog reports a lost service
                if self._poll():
                    return

    def _poll(self) -> bool:
        announced = self._pod.children(self._key)
        if "asked" not in announced:
            if self._received() is None:
                return False
            self._pod.put(f"{self._key}/asked", True)
        with self._lock:
            is_new, self._requested = not self._requested, True
            limit = self._step + 1  # the main thread may dispatch another step before it sees `_requested`
        if is_new:
            self._pod.put(f"{self._key}/{self._pod.process_id}", limit)
            self._announced = True
        steps = [step for name, step in announced.items() if name != "asked"]
        if len(steps) < self._pod.num_processes:
            return False
        self._last = max(steps)
        self._settled.set()
        return True


def this_pod() -> Pod | None:
    """Return the pod of this process after `jax.distributed.initialize`, or None for a single process.

    jax has no public API for its key-value store. orbax uses the same private one.
    """
    global _pod
    from jax._src.distributed import global_state

    client, number = global_state.client, global_state.num_processes
    if client is None or number is None or number < 2:
        return None
    if _pod is None or _pod[0] is not client:
        process = {"process_id": global_state.process_id, "num_processes": number}
        _pod = (client, Pod(client, **process, coordinator=global_state.coordinator_address))
    return _pod[1]


_pod: tuple[Any, Pod] | None = None


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values with dotted paths; list elements are numbered."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and value:
            yield from flatten({str(number): item for number, item in enumerate(value)}, f"{prefix}{name}.")
        else:
            # Values of other processes are sent as JSON, so local values are converted too, to compare equal.
            yield f"{prefix}{name}", json.loads(json.dumps(value, default=str))


def _shorten(value: Any, limit: int = 200) -> str:
    text = value if value == _ABSENT else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
