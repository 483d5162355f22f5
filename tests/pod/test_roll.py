"""Test the roll call of a pod, over sockets of this process."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshpar.pod import roll
from meshpar.sharding.types import MeshparError
from tests.errors import raises
from tests.pod.pods import free_port


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(roll, "_GRACE_S", 0.2)
    monkeypatch.setattr(roll, "_POLL_S", 0.01)
    return f"127.0.0.1:{free_port()}"


def port_of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def connected(address: str) -> socket.socket:
    """Connect as soon as process 0 listens."""
    for _ in range(1000):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(port_of(address))
        time.sleep(0.01)
    raise AssertionError(address)


def called(address: str, *places: tuple[int, int], timeout_s: float = 60.0, token: str = "") -> list[str]:
    """Call the roll in processes of this number and size, and return their errors, empty if all have joined."""

    def call(place: tuple[int, int]) -> str:
        try:
            roll.call(address, process_id=place[0], num_processes=place[1], timeout_s=timeout_s, token=token)
        except MeshparError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(call, places))


def test_call_returns_if_all_have_joined(address: str) -> None:
    assert called(address, (2, 4), (1, 4), (0, 4), (3, 4)) == [""] * 4
    assert called(address, (0, 1)) == [""]  # the port is free again


def test_missing_processes_are_named_to_all(address: str) -> None:
    of_0, of_2 = called(address, (0, 4), (2, 4), timeout_s=0.3)
    assert of_0.startswith(f"processes 1, 3 of 4: cannot join the pod at {address}: 2 did not join within 0.3 s")
    assert "joined except process 0: 2 (127.0.0.1)" in of_0
    assert of_2 == of_0


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (((1, 3), (1, 3), (0, 3)), "joined from 127.0.0.1"),
        (((1, 2), (0, 3)), "process 1 of 2 (from 127.0.0.1): cannot join the pod of 3"),
    ],
)
def test_processes_of_another_pod_are_an_error(address: str, places, message: str) -> None:
    errors = called(address, *places)
    assert message in errors[0]
    assert errors == [errors[0]] * len(places)


def test_a_process_that_dies_while_it_waits_is_missing(address: str) -> None:
    def join_and_die() -> None:
        with connected(address) as connection:
            connection.sendall(roll._signed("meshpar 1 of 3", b""))

    thread = threading.Thread(target=join_and_die)
    thread.start()
    (error,) = called(address, (0, 3), timeout_s=0.5)
    thread.join()
    assert error.startswith("processes 1, 2 of 3: cannot join")


def test_a_port_that_another_program_uses_is_reported(address: str) -> None:
    with socket.create_server(port_of(address)) as other:

        def answer() -> None:
            while True:
                with contextlib.suppress(OSError), other.accept()[0] as connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        with raises("address-in-use", address):
            roll.call(address, process_id=0, num_processes=2, timeout_s=60)
        threading.Thread(target=answer, daemon=True).start()
        with raises("timeout", "process 1 of 2") as error:
            roll.call(address, process_id=1, num_processes=2, timeout_s=0.3)
        assert "another program listens there" in error.value.reason


def test_an_address_without_a_listener_is_reported(address: str) -> None:
    with raises("timeout", "process 1 of 2") as error:
        roll.call(address, process_id=1, num_processes=2, timeout_s=0.1)
    assert "Connection refused" in error.value.reason


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "unsigned": b"meshpar 1 of 2\n",
    "another token": roll._signed("meshpar 1 of 2", b"another"),
    "no token": roll._signed("meshpar 1 of 2", b""),
    "signature of another line": roll._signed("meshpar 1 of 2", b"token").replace(b"1 of", b"9 of"),
    "binary": b"\xff\x00" * 100 + b"\n",
    "very long": b"meshpar " * 20_000,
    "silent": b"",
}


@pytest.mark.parametrize("line", STRANGERS.values(), ids=STRANGERS)
def test_lines_without_the_token_are_ignored(address: str, line: bytes) -> None:
    with ThreadPoolExecutor(1) as process_0, contextlib.ExitStack() as stack:
        error = process_0.submit(called, address, (0, 2), token="token")
        connection = stack.enter_context(connected(address))
        with contextlib.suppress(OSError):  # closed by process 0 before everything is sent
            connection.sendall(line)
        if line:
            connection.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert called(address, (1, 2), token="token") == error.result() == [""]


def test_an_answer_without_the_token_is_ignored(address: str) -> None:
    """First a stranger listens there, then the real process 0."""
    refusal = json.dumps(["process 1 of 2", "join", "it may not", "go away", "conflict"]).encode() + b"\n"
    with ThreadPoolExecutor(1) as process_1:
        with socket.create_server(port_of(address)) as stranger:
            error = process_1.submit(called, address, (1, 2), token="token")
            with stranger.accept()[0] as connection:
                connection.sendall(refusal)
                assert b"token" not in connection.recv(4096)
        assert called(address, (0, 2), token="token") == error.result() == [""]


def test_ignored_lines_are_reported_if_a_process_is_missing(address: str) -> None:
    def knock() -> None:
        with connected(address) as connection:
            connection.sendall(roll._signed("meshpar 1 of 2", b"another"))
            connection.recv(1)

    thread = threading.Thread(target=knock)
    thread.start()
    (error,) = called(address, (0, 2), timeout_s=1, token="token")
    thread.join()
    assert "from 127.0.0.1 without the token of this run (MESHPAR_TOKEN) were ignored" in error
