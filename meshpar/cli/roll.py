"""The roll of a pod: who has come, called at the coordinator's port before jax's service opens it.

    process 0   listens ── hears "meshpar 3 of 8" of each ── all are here: "go" ── closes ─► jax's service listens there
    process 3   connects, says who it is, waits ───────────────────────────── "go" ────────► jax's client connects there

Every line ends with an HMAC under the run's token, which itself is never sent. Lines without it are ignored.
If no token is set, the key is empty: any program that can reach the port can then disturb the join.

jax's own service tells nobody who is missing: its barrier ends in an abort that names no task, and a process that asks
its store before all have registered is aborted, too ("wrong service incarnation": jax 0.10 and 0.12).
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
"""Environment variable with the run's token. `--processes` draws one; other launchers pass on what the user sets."""
GARBLED_S = 20.0
"""Seconds for which something else may answer at the port: the coordinator of a run that is about to end."""
_GRACE_S = 10.0  # process 0's own time ends first, and it says who is missing
_CONNECT_S = 10.0
_TURN_S = 0.2
_GO, _NO = "go", "no"
_MOST_BYTES = 65_536
_MOST_UNHEARD = 256
"""Connections that have not sent a line yet. The oldest is closed when there are more; a real process tries again."""


class RollError(MeshparError):
    """Processes that did not come, came twice, or belong to another pod."""


def call(
    coordinator: str, *, process_id: int, num_processes: int, timeout_s: float, token: str = "", bind: str | None = None
) -> None:
    """Return when every process of the pod has called this, and nothing listens at the port any more.

    Args:
      coordinator: `host:port` of process 0.
      token: the secret of this run, the same in every process.
      bind: `host:port` where process 0 listens; by default `coordinator`. Without a host: all interfaces.

    Raises:
      ValueError: in every process that came: who did not, or who came twice; or something else has the port.
    """
    key = token.encode()
    if process_id == 0:
        with _listen(coordinator, bind or coordinator) as server:
            _Roll(server, coordinator, num_processes, key).hear(timeout_s)
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
    """Return the text of a line that was signed with the key, else None."""
    text = line.rpartition(b" ")[0].decode(errors="replace")
    return text if hmac.compare_digest(line, _signed(text, key)) else None


class _Roll:
    """Process 0's: the processes that are here, each with its connection and the host it comes from."""

    def __init__(self, server: socket.socket, coordinator: str, num_processes: int, key: bytes) -> None:
        self._server, self._coordinator, self._num_processes, self._key = server, coordinator, num_processes, key
        self._here: dict[int, tuple[socket.socket, str]] = {}
        self._unheard: dict[socket.socket, None] = {}
        self._strangers: set[str] = set()
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
                        self._accept()
                    else:
                        self._hear_one(key.fileobj)  # type: ignore[arg-type]
            self._tell([_GO])
        except RollError as error:
            self._tell([_NO, error.where, error.requested, error.reason, error.fix, error.code])
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
            self._unheard[connection] = None
        if self._unheard and (connection is None or len(self._unheard) > _MOST_UNHEARD):
            self._close(next(iter(self._unheard)))

    def _close(self, connection: socket.socket) -> None:
        self._here = {number: one for number, one in self._here.items() if one[0] is not connection}
        self._unheard.pop(connection, None)
        self._ready.unregister(connection)
        connection.close()

    def _hear_one(self, connection: socket.socket) -> None:
        """Read the line of one connection. It is closed if its process has died, or if the line lacks the token."""
        self._unheard.pop(connection, None)
        try:
            host, line = connection.getpeername()[0].removeprefix("::ffff:"), connection.recv(_MOST_BYTES)
        except OSError:
            host, line = "", b""
        found = re.fullmatch(r"meshpar ([0-9]{1,9}) of ([0-9]{1,9})", _verified(line, self._key) or "")
        if found is None:
            if line and len(self._strangers) < 16:
                self._strangers.add(host)
            self._close(connection)
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
        hosts = ", ".join(sorted(self._strangers))
        ignored = f"; lines without this run's token ({TOKEN}) came from {hosts} and were ignored" * bool(hosts)
        return RollError(
            f"process{'es' * (len(missing) > 1)} {shown} of {self._num_processes}",
            f"join the pod at {self._coordinator}",
            f"{len(missing)} did not come within {timeout_s:g} s; beside process 0 here: {here or 'none'}{ignored}",
            "look at the logs of those missing, and start all of them again; --join-limit waits longer",
        )

    def _tell(self, words: list[str]) -> None:
        """To all that are connected, also one that may not come."""
        for key in self._ready.get_map().values():
            with contextlib.suppress(OSError):  # it died meanwhile: jax's own limit, or the watchdog, ends the others
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
        raise _taken(coordinator, "open it", f"the port cannot be opened ({error.strerror or error})") from None


def _ask(address: tuple[str, int], said: bytes, key: bytes, me: str, coordinator: str, timeout_s: float) -> list[str]:
    """What process 0 answers: it may start later, and start again while this one waits."""
    deadline, why = time.monotonic() + timeout_s + _GRACE_S, ""
    garbled_since: float | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=min(left, _CONNECT_S)) as connection:
                connection.sendall(said)
                line = _line(connection, lambda: deadline - time.monotonic())
            if (answer := _read(_verified(line, key))) is not None:
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


def _read(text: str | None) -> list[str] | None:
    """Return an answer of process 0 as its words, and None for anything else."""
    try:
        words = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    is_text = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return words if is_text and (words == [_GO] or (len(words) == 6 and words[0] == _NO)) else None


def _taken(coordinator: str, asked: str, exists: str) -> MeshparError:
    return MeshparError(
        f"the coordinator's address {coordinator}",
        asked,
        exists,
        "name another port for every process (JAX_COORDINATOR_ADDRESS=HOST:PORT, or MASTER_PORT), or end that program",
    )
