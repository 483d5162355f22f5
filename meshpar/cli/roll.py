"""Roll call of a pod at the coordinator's port, before the service of jax uses this port.

    process 0   listens ── receives "meshpar 3 of 8" ── all have joined: sends "go", closes ─► jax's service listens
    process 3   connects, sends its number, waits ──────────────────────────── "go" ─────────► jax's client connects

Every line ends with an HMAC with the token of the run as key. The token is never sent, and lines without the HMAC are
ignored. Without a token the key is empty, and any program that can reach the port can disturb the join.

The service of jax does not report which process is missing: its barrier aborts without naming a task, and a process
that reads its store before all have registered is aborted, too ("wrong service incarnation": jax 0.10 and 0.12).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import selectors
import socket
import time
from collections.abc import Callable

from meshpar.sharding.errors import MeshparError

TOKEN = "MESHPAR_TOKEN"
"""Environment variable with the token of the run. `--processes` sets it; with launchers the user does."""
GARBLED_S = 20.0
"""Seconds for which a different program, such as the coordinator of a previous run, may use the port."""
_GRACE_S = 10.0  # process 0 times out first, and reports who is missing
_CONNECT_S = 10.0
_POLL_S = 0.2
_GO, _NO = "go", "no"
_MAX_BYTES = 65_536
_MAX_SILENT = 256
"""Maximum number of connections without a line. The oldest is closed; a real process connects again."""


class RollError(MeshparError):
    """A process is missing, joined twice, or belongs to a different pod."""


def call(
    coordinator: str, *, process_id: int, num_processes: int, timeout_s: float, token: str = "", bind: str | None = None
) -> None:
    """Return after all processes of the pod have called this and the port is free again.

    Args:
      coordinator: `host:port` of process 0.
      process_id: number of this process.
      num_processes: number of processes of the pod.
      timeout_s: seconds to wait for the other processes.
      token: the secret of this run, the same in every process.
      bind: `host:port` where process 0 listens, by default `coordinator`. An empty host means all interfaces.

    Raises:
      ValueError: a process is missing or joined twice, or a different program uses the port. All processes that have
        joined raise the same error.
    """
    key = token.encode()
    if process_id == 0:
        with _listen(coordinator, bind or coordinator) as server:
            _Roll(server, coordinator, num_processes, key).run(timeout_s)
        return
    host, _, port = coordinator.rpartition(":")
    me = f"process {process_id} of {num_processes}"
    line = _signed(f"meshpar {process_id} of {num_processes}", key)
    answer = _ask((host.strip("[]"), int(port)), line, key, me, coordinator, timeout_s)
    if answer[0] != _GO:
        raise RollError(*answer[1:])


def _signed(text: str, key: bytes) -> bytes:
    """Return the line to send: the text and its HMAC."""
    return f"{text} {hmac.new(key, text.encode(), 'sha256').hexdigest()}\n".encode()


def _verified(line: bytes, key: bytes) -> str | None:
    """Return the text of a line that was signed with the key, or None."""
    text = line.rpartition(b" ")[0].decode(errors="replace")
    return text if hmac.compare_digest(line, _signed(text, key)) else None


class _Roll:
    """The side of process 0: the processes that have joined, with connection and host."""

    def __init__(self, server: socket.socket, coordinator: str, num_processes: int, key: bytes) -> None:
        self._server, self._coordinator, self._num_processes, self._key = server, coordinator, num_processes, key
        self._joined: dict[int, tuple[socket.socket, str]] = {}
        self._silent: dict[socket.socket, None] = {}
        self._strangers: set[str] = set()
        self._ready = selectors.DefaultSelector()

    def run(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._ready.register(self._server, selectors.EVENT_READ)
        try:
            while len(self._joined) < self._num_processes - 1:
                if time.monotonic() > deadline:
                    raise self._missing(timeout_s)
                for key, _ in self._ready.select(_POLL_S):
                    if key.fileobj is self._server:
                        self._accept()
                    else:
                        self._receive(key.fileobj)  # type: ignore[arg-type]
            self._send_all([_GO])
        except RollError as error:
            self._send_all([_NO, error.where, error.requested, error.reason, error.fix, error.code])
            raise
        finally:
            for key in list(self._ready.get_map().values()):
                if key.fileobj is not self._server:
                    key.fileobj.close()  # type: ignore[union-attr]
            self._ready.close()

    def _accept(self) -> None:
        connection = None
        with contextlib.suppress(OSError):  # the peer is gone, or too many files are open
            connection = self._server.accept()[0]
            self._ready.register(connection, selectors.EVENT_READ)
            self._silent[connection] = None
        if self._silent and (connection is None or len(self._silent) > _MAX_SILENT):
            self._close(next(iter(self._silent)))

    def _close(self, connection: socket.socket) -> None:
        self._joined = {number: one for number, one in self._joined.items() if one[0] is not connection}
        self._silent.pop(connection, None)
        self._ready.unregister(connection)
        connection.close()

    def _receive(self, connection: socket.socket) -> None:
        """Read the line of a connection. It is closed if its process has died, or if the line lacks the token."""
        self._silent.pop(connection, None)
        try:
            host, line = connection.getpeername()[0].removeprefix("::ffff:"), connection.recv(_MAX_BYTES)
        except OSError:
            host, line = "", b""
        found = re.fullmatch(r"meshpar ([0-9]{1,9}) of ([0-9]{1,9})", _verified(line, self._key) or "")
        if found is None:
            if line and len(self._strangers) < 16:
                self._strangers.add(host)
            self._close(connection)
            return
        number, size = int(found[1]), int(found[2])
        if number in self._joined or not 0 < number < self._num_processes or size != self._num_processes:
            first = (
                f", and process {number} has joined from {self._joined[number][1]}" if number in self._joined else ""
            )
            raise RollError(
                f"process {number} of {size} (from {host})",
                f"join the pod of {self._num_processes} at {self._coordinator}",
                f"its processes are 0, the coordinator, to {self._num_processes - 1}{first}",
                "start all processes with different numbers and the same size, and other runs with another address",
                "conflict",
            )
        self._joined[number] = connection, host

    def _missing(self, timeout_s: float) -> RollError:
        missing = [number for number in range(1, self._num_processes) if number not in self._joined]
        numbers = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")
        joined = ", ".join(f"{number} ({self._joined[number][1]})" for number in sorted(self._joined)[:16])
        hosts = ", ".join(sorted(self._strangers))
        ignored = f"; messages from {hosts} without the token of this run ({TOKEN}) were ignored" if hosts else ""
        return RollError(
            f"process{'es' * (len(missing) > 1)} {numbers} of {self._num_processes}",
            f"join the pod at {self._coordinator}",
            f"{len(missing)} did not join within {timeout_s:g} s; joined except process 0: {joined or 'none'}{ignored}",
            "read the logs of the missing processes and start all of them again, or set a longer --join-limit",
            "timeout",
        )

    def _send_all(self, words: list[str]) -> None:
        """Send an answer to all connections."""
        for key in self._ready.get_map().values():
            with contextlib.suppress(
                OSError
            ):  # it died: the timeout of jax or the watchdog ends the remaining processes
                if key.fileobj is not self._server:
                    key.fileobj.sendall(_signed(json.dumps(words), self._key))  # type: ignore[union-attr]


def _listen(coordinator: str, bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    dual = host in ("", "[::]") and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or host.startswith("[") else socket.AF_INET
    try:
        at = ("" if dual else host.strip("[]"), int(port))
        return socket.create_server(at, family=family, dualstack_ipv6=dual, backlog=4096)
    except OSError as error:
        raise _in_use(coordinator, "open it", f"the port cannot be opened ({error.strerror or error})") from None


def _ask(
    address: tuple[str, int], message: bytes, key: bytes, me: str, coordinator: str, timeout_s: float
) -> list[str]:
    """Return the answer of process 0, which may start later, and restart in the meantime."""
    deadline, why = time.monotonic() + timeout_s + _GRACE_S, ""
    garbled_since: float | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=min(left, _CONNECT_S)) as connection:
                connection.sendall(message)
                line = _line(connection, lambda: deadline - time.monotonic())
            if (answer := _read(_verified(line, key))) is not None:
                return answer
            why = "the program at this port closes the connection"
        except OSError as error:
            line, why = b"", error.strerror or str(error)
        garbled_since = (garbled_since or time.monotonic()) if line else None
        if garbled_since is not None and time.monotonic() - garbled_since >= GARBLED_S:
            raise _in_use(coordinator, "reach process 0", "another program listens there")
        time.sleep(min(_POLL_S, max(left, 0)))
    raise RollError(
        me,
        f"reach process 0 at {coordinator}",
        f"it did not answer within {timeout_s:g} s ({why})",
        "check that process 0 runs and that this is its address (JAX_COORDINATOR_ADDRESS, or MASTER_ADDR and "
        "MASTER_PORT), read its log, or set a longer --join-limit",
        "timeout",
    )


def _line(connection: socket.socket, left_s: Callable[[], float]) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_BYTES:
        connection.settimeout(max(left_s(), 0.001))
        more = connection.recv(_MAX_BYTES)
        if not more:
            break
        line += more
    return line


def _read(text: str | None) -> list[str] | None:
    """Return the words of an answer of process 0, or None for other text."""
    try:
        words = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    is_text = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return words if is_text and (words == [_GO] or (len(words) == 6 and words[0] == _NO)) else None


def _in_use(coordinator: str, requested: str, reason: str) -> MeshparError:
    fix = "use another port in every process (JAX_COORDINATOR_ADDRESS=HOST:PORT, or MASTER_PORT), or end that program"
    return MeshparError(f"the coordinator's address {coordinator}", requested, reason, fix, "address-in-use")
