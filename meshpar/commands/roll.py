"""The roll of a pod: who has come, called at the coordinator's port before jax's service opens it.

    process 0   listens ── hears "meshpar 3 of 8" of each ── all are here: "go" ── closes ─► jax's service listens there
    process 3   connects, says who it is, waits ───────────────────────────── "go" ────────► jax's client connects there

jax's own service tells nobody who is missing: its barrier ends in an abort that names no task, and a process that asks
its store before all have registered is aborted, too ("wrong service incarnation": jax 0.10 and 0.12).
"""

from __future__ import annotations

import contextlib
import json
import re
import selectors
import socket
import time
from collections.abc import Callable

from meshpar.sharding.errors import MeshparError

GARBLED_S = 20.0
"""Seconds for which something else may answer at the port: the coordinator of a run that is about to end."""
_GRACE_S = 10.0  # process 0's own time ends first, and it says who is missing
_CONNECT_S = 10.0
_TURN_S = 0.2
_GO, _NO = "go", "no"
_MOST_BYTES = 4096


class RollError(MeshparError):
    """Processes that did not come, came twice, or belong to another pod."""


def call(coordinator: str, *, process_id: int, num_processes: int, timeout_s: float) -> None:
    """Return when every process of the pod has called this, and nothing listens at the port any more.

    Raises:
      ValueError: in every process that came: who did not, or who came twice; or something else has the port.
    """
    host, _, port = coordinator.rpartition(":")
    if process_id == 0:
        with _listen(coordinator, int(port)) as server:
            _Roll(server, coordinator, num_processes).hear(timeout_s)
        return
    me = f"process {process_id} of {num_processes}"
    said = f"meshpar {process_id} of {num_processes}\n".encode()
    answer = _ask((host.strip("[]"), int(port)), said, me, coordinator, timeout_s)
    if answer[0] != _GO:
        raise RollError(*answer[1:])


class _Roll:
    """Process 0's: the processes that are here, each with its connection and the host it comes from."""

    def __init__(self, server: socket.socket, coordinator: str, num_processes: int) -> None:
        self._server, self._coordinator, self._num_processes = server, coordinator, num_processes
        self._here: dict[int, tuple[socket.socket, str]] = {}
        self._ready = selectors.DefaultSelector()

    def hear(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._ready.register(self._server, selectors.EVENT_READ)
        try:
            while len(self._here) < self._num_processes - 1:
                if time.monotonic() > deadline:
                    raise self._absent(timeout_s)
                for key, _ in self._ready.select(_TURN_S):
                    if key.fileobj is self._server:
                        self._ready.register(self._server.accept()[0], selectors.EVENT_READ)
                    else:
                        self._hear_one(key.fileobj)  # type: ignore[arg-type]
            self._tell([_GO])
        except RollError as error:
            self._tell([_NO, error.where, error.asked, error.exists, error.fix])
            raise
        finally:
            for key in list(self._ready.get_map().values()):
                if key.fileobj is not self._server:
                    key.fileobj.close()  # type: ignore[union-attr]
            self._ready.close()

    def _hear_one(self, connection: socket.socket) -> None:
        """What one says of itself; it has died, or was none of ours, where that is nothing."""
        try:
            host, said = connection.getpeername()[0].removeprefix("::ffff:"), connection.recv(64)
        except OSError:
            host, said = "", b""
        found = re.fullmatch(rb"meshpar ([0-9]{1,9}) of ([0-9]{1,9})\n", said)
        if found is None:
            self._here = {number: one for number, one in self._here.items() if one[0] is not connection}
            self._ready.unregister(connection)
            connection.close()
            return
        number, size = int(found[1]), int(found[2])
        if number in self._here or not 0 < number < self._num_processes or size != self._num_processes:
            again = f", and another from {self._here[number][1]} is that already" if number in self._here else ""
            raise RollError(
                f"process {number} of {size} (from {host})",
                f"join the pod of {self._num_processes} at {self._coordinator}",
                f"its processes are 1 to {self._num_processes - 1} beside the coordinator{again}",
                "give every process a number of its own and the same size; see that no other run has this address",
            )
        self._here[number] = connection, host

    def _absent(self, timeout_s: float) -> RollError:
        missing = [number for number in range(1, self._num_processes) if number not in self._here]
        shown = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")
        here = ", ".join(f"{number} ({self._here[number][1]})" for number in sorted(self._here)[:16])
        return RollError(
            f"process{'es' * (len(missing) > 1)} {shown} of {self._num_processes}",
            f"join the pod at {self._coordinator}",
            f"{len(missing)} did not come within {timeout_s:g} s; beside process 0 here: {here or 'none'}",
            "look at the logs of those missing, and start all of them again; --join-limit waits longer",
        )

    def _tell(self, words: list[str]) -> None:
        """To all that are connected, also one that may not come."""
        for key in self._ready.get_map().values():
            with contextlib.suppress(OSError):  # it died meanwhile: jax's own limit, or the watchdog, ends the others
                if key.fileobj is not self._server:
                    key.fileobj.sendall(json.dumps(words).encode() + b"\n")  # type: ignore[union-attr]


def _listen(coordinator: str, port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=4096)
    except OSError as error:
        raise _taken(coordinator, "open it", f"the port cannot be opened ({error.strerror or error})") from None


def _ask(address: tuple[str, int], said: bytes, me: str, coordinator: str, timeout_s: float) -> list[str]:
    """What process 0 answers: it may start later, and start again while this one waits."""
    deadline, why = time.monotonic() + timeout_s + _GRACE_S, ""
    garbled_since: float | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=min(left, _CONNECT_S)) as connection:
                connection.sendall(said)
                line = _line(connection, lambda: deadline - time.monotonic())
            if (answer := _read(line)) is not None:
                return answer
            why = "what listens there closes the connection"
        except OSError as error:
            line, why = b"", error.strerror or str(error)
        garbled_since = (garbled_since or time.monotonic()) if line else None
        if garbled_since is not None and time.monotonic() - garbled_since >= GARBLED_S:
            raise _taken(coordinator, "find process 0 there", "another program listens there")
        time.sleep(min(_TURN_S, max(left, 0)))
    raise RollError(
        me,
        f"reach process 0 at {coordinator}",
        f"it gave no answer within {timeout_s:g} s ({why})",
        "see that process 0 runs, and that this is its address (JAX_COORDINATOR_ADDRESS, or MASTER_ADDR and "
        "MASTER_PORT); look at its log; --join-limit waits longer",
    )


def _line(connection: socket.socket, left_s: Callable[[], float]) -> bytes:
    said = b""
    while not said.endswith(b"\n") and len(said) < _MOST_BYTES:
        connection.settimeout(max(left_s(), 0.001))
        more = connection.recv(_MOST_BYTES)
        if not more:
            break
        said += more
    return said


def _read(line: bytes) -> list[str] | None:
    """An answer of process 0's; None for what is none."""
    try:
        words = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_text = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return words if is_text and (words == [_GO] or (len(words) == 5 and words[0] == _NO)) else None


def _taken(coordinator: str, asked: str, exists: str) -> MeshparError:
    return MeshparError(
        f"the coordinator's address {coordinator}",
        asked,
        exists,
        "name another port for every process (JAX_COORDINATOR_ADDRESS=HOST:PORT, or MASTER_PORT), or end that program",
    )
