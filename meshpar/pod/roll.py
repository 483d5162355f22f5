"""Roll call of a pod at the coordinator's port, before the service of jax uses this port.

    process 0   listens ── receives "meshpar 3 of 8" ── all have joined: answers, closes ─► jax's service listens
    process 3   connects, sends its number, waits ────────────────────────── answer ──────► jax's client connects

Each line ends with an HMAC whose key is the token of the run. The token is never sent, and lines without a valid HMAC
are ignored. Without a token the key is empty, so any program that can reach the port can disturb the join.

The service of jax does not report which process is missing: its barrier aborts without naming a task, and a process
that reads its store before all have registered is aborted, too ("wrong service incarnation": jax 0.10 and 0.12).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import socket
import time

from meshpar.sharding.errors import MeshparError

TOKEN = "MESHPAR_TOKEN"
"""Environment variable with the token of the run. `--processes` sets it. With a launcher, the user sets it."""
_GRACE_S = 10.0  # process 0 times out first, so that it can report the missing process
_CONNECT_S = 10.0
_POLL_S = 0.2
_MAX_BYTES = 65_536


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
      token: the secret of this run, the same in all processes.
      bind: `host:port` where process 0 listens, by default `coordinator`. The host `[::]` means all interfaces.

    Raises:
      ValueError: a process is missing or joined twice, or the port cannot be opened. All processes that have joined
        raise the same error.
    """
    key = token.encode()
    if process_id == 0:
        asyncio.run(_Roll(coordinator, num_processes, key).run(bind or coordinator, timeout_s))
    elif error := _ask(coordinator, process_id, num_processes, key, timeout_s):
        raise RollError(*error)


def _signed(text: str, key: bytes) -> bytes:
    return f"{text} {hmac.new(key, text.encode(), 'sha256').hexdigest()}\n".encode()


def _verified(line: bytes, key: bytes) -> str:
    """Return the text of a line that was signed with the key, or an empty string."""
    text = line.rpartition(b" ")[0].decode(errors="replace")
    return text if hmac.compare_digest(line, _signed(text, key)) else ""


class _Roll:
    """The roll call as process 0 runs it: listen, count the processes, answer all of them."""

    def __init__(self, coordinator: str, num_processes: int, key: bytes) -> None:
        self._coordinator, self._num_processes, self._key = coordinator, num_processes, key
        self._hosts: dict[int, str] = {}
        """Hosts of the processes that have joined, by number."""
        self._connections: set[asyncio.StreamWriter] = set()
        self._strangers: set[str] = set()
        self._done = asyncio.Event()
        self._error: RollError | None = None

    async def run(self, bind: str, timeout_s: float) -> None:
        host, _, port = bind.rpartition(":")
        every = None if host == "[::]" else host.strip("[]")
        try:
            server = await asyncio.start_server(self._receive, every, int(port), limit=_MAX_BYTES, backlog=4096)
        except OSError as error:
            where, reason = f"the coordinator's address {self._coordinator}", error.strerror or str(error)
            fix = "use a different port in all processes (JAX_COORDINATOR_ADDRESS=HOST:PORT, or MASTER_PORT)"
            raise MeshparError(where, "listen", reason, fix, "address-in-use") from None
        try:
            if self._num_processes > 1:
                await asyncio.wait_for(self._done.wait(), timeout_s)
        except TimeoutError:
            self._error = self._missing(timeout_s)
        refusal = self._error
        fields = [] if refusal is None else refusal.__reduce__()[1]
        server.close()
        for connection in list(self._connections):
            connection.write(_signed(json.dumps(fields), self._key))
            connection.close()
            with contextlib.suppress(OSError):  # the process died, and jax or the watchdog ends the others
                await connection.wait_closed()
        if refusal is not None:
            raise refusal

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection of another process until it closes. If the process dies, it has not joined."""
        host = writer.get_extra_info("peername")[0].removeprefix("::ffff:")
        self._connections.add(writer)
        with contextlib.suppress(OSError, ValueError):  # the peer died, or the line is too long
            text = _verified(await reader.readline(), self._key)
            if match := re.fullmatch(r"meshpar ([0-9]{1,9}) of ([0-9]{1,9})", text):
                number = int(match[1])
                self._join(number, int(match[2]), host)
                try:
                    await reader.read()
                finally:
                    if not self._done.is_set():
                        self._hosts.pop(number, None)
            else:
                self._strangers.add(host)
        self._connections.discard(writer)
        writer.close()

    def _join(self, number: int, size: int, host: str) -> None:
        if number in self._hosts or not 0 < number < self._num_processes or size != self._num_processes:
            other = f", and process {number} has joined from {self._hosts[number]}" if number in self._hosts else ""
            self._error = RollError(
                f"process {number} of {size} (from {host})",
                f"join the pod of {self._num_processes} at {self._coordinator}",
                f"its processes are 0, the coordinator, to {self._num_processes - 1}{other}",
                "start all processes with different numbers and the same size, and other runs with another address",
                "conflict",
            )
            self._done.set()
        self._hosts[number] = host
        if len(self._hosts) == self._num_processes - 1:
            self._done.set()

    def _missing(self, timeout_s: float) -> RollError:
        missing = [str(number) for number in range(1, self._num_processes) if number not in self._hosts]
        joined = ", ".join(f"{number} ({host})" for number, host in sorted(self._hosts.items())[:16]) or "none"
        hosts = ", ".join(sorted(self._strangers)[:16])
        ignored = f"; messages from {hosts} without the token of this run ({TOKEN}) were ignored" if hosts else ""
        return RollError(
            f"process{'es' * (len(missing) > 1)} {', '.join(missing[:16])}{', …' * (len(missing) > 16)} "
            f"of {self._num_processes}",
            f"join the pod at {self._coordinator}",
            f"{len(missing)} did not join within {timeout_s:g} s; joined except process 0: {joined}{ignored}",
            "read the logs of the missing processes and start all of them again, or set a longer --join-limit",
            "timeout",
        )


def _ask(coordinator: str, process_id: int, num_processes: int, key: bytes, timeout_s: float) -> list[str]:
    """Join at process 0 and return its answer: the fields of an error, or an empty list."""
    host, _, port = coordinator.rpartition(":")
    deadline, reason = time.monotonic() + timeout_s + _GRACE_S, ""
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), min(left_s, _CONNECT_S)) as connection:
                connection.settimeout(left_s)
                connection.sendall(_signed(f"meshpar {process_id} of {num_processes}", key))
                line = connection.makefile("rb").readline(_MAX_BYTES)
            if text := _verified(line, key):
                return json.loads(text)
            reason = "another program listens there" if line else "the program at this port closes the connection"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(_POLL_S)
    raise RollError(
        f"process {process_id} of {num_processes}",
        f"reach process 0 at {coordinator}",
        f"it did not answer within {timeout_s:g} s ({reason})",
        "check that process 0 runs and that this is its address (JAX_COORDINATOR_ADDRESS, or MASTER_ADDR and "
        "MASTER_PORT), read its log, or set a longer --join-limit",
        "timeout",
    )
