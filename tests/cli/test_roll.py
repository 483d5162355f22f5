"""The roll of a pod: all have come, or who has not; over sockets of this process."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest

from meshpar.cli import roll
from meshpar.sharding.types import MeshparError


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(roll, "_GRACE_S", 0.2)
    monkeypatch.setattr(roll, "_POLL_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def port_of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def called(address: str, *places: tuple[int, int], timeout_s: float = 60.0) -> list[str]:
    """What the roll says to each process, given as number and size: empty where all have come."""
    said = [""] * len(places)

    def call(at: int, number: int, size: int) -> None:
        try:
            roll.call(address, process_id=number, num_processes=size, timeout_s=timeout_s)
        except MeshparError as error:
            said[at] = str(error)

    threads = [threading.Thread(target=call, args=(at, *place)) for at, place in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_all_go_on_when_all_have_come_and_the_port_is_free(address: str) -> None:
    assert called(address, (2, 4), (1, 4), (0, 4), (3, 4)) == [""] * 4
    assert called(address, (0, 1)) == [""]


def test_those_that_did_not_come_are_named_to_all_that_did(address: str) -> None:
    of_0, of_2 = called(address, (0, 4), (2, 4), timeout_s=0.3)
    assert of_0.startswith(f"processes 1, 3 of 4: cannot join the pod at {address}: 2 did not join within 0.3 s")
    assert "joined except process 0: 2 (127.0.0.1)" in of_0
    assert of_2 == of_0


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (((1, 3), (1, 3), (0, 3)), "joined from 127.0.0.1"),
        (((1, 2), (0, 3)), "process 1 of 2 (from 127.0.0.1): cannot join the pod of 3"),
    ],
)
def test_processes_that_do_not_belong_together_are_told(address: str, places, said: str) -> None:
    told = called(address, *places)
    assert said in told[0]
    assert told == [told[0]] * len(places)


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", roll._signed("meshpar 1 of 2", b"")], ids=["nothing", "http", "dies"]
)
def test_who_says_nothing_of_use_or_dies_has_not_come(address: str, said: bytes) -> None:
    def knock() -> None:
        for _ in range(100):
            try:
                with socket.create_connection(port_of(address)) as connection:
                    connection.sendall(said)
                    return
            except OSError:
                over.wait(0.02)

    over = threading.Event()
    knocks = threading.Thread(target=knock)
    knocks.start()
    told = called(address, (0, 2), timeout_s=0.5)[0]
    knocks.join()
    # One that dies behind its last word of all is found by jax.
    assert told.startswith("process 1 of 2: cannot join") or said.startswith(b"meshpar")


def test_a_port_that_another_program_has_is_told(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll, "GARBLED_S", 0.0)
    with socket.create_server(port_of(address)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        with pytest.raises(MeshparError, match=r"open it: the port cannot be opened.*Use another port"):
            roll.call(address, process_id=0, num_processes=2, timeout_s=60)
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(MeshparError, match=r"reach process 0: another program listens there"):
            roll.call(address, process_id=1, num_processes=2, timeout_s=60)


def test_an_address_at_which_nobody_listens_is_told(address: str) -> None:
    with pytest.raises(roll.RollError, match=r"process 1 of 2: cannot reach process 0 at .*Connection refused"):
        roll.call(address, process_id=1, num_processes=2, timeout_s=0.1)


@pytest.mark.parametrize("text", [None, "", "{", "[" * 4096, '["no"]', '["go", 1]', "3", '"go"'])
def test_a_text_that_is_no_answer_reads_as_none(text: str | None) -> None:
    assert roll._read(text) is None


STRANGERS = {
    "unsigned": [b"meshpar 99999 of 2\n"],
    "unsigned, a real number": [b"meshpar 1 of 2\n"],
    "another token": [roll._signed("meshpar 99999 of 2", b"another")],
    "no token": [roll._signed("meshpar 1 of 2", b"")],
    "a signature of another line": [roll._signed("meshpar 1 of 2", b"token").replace(b"1 of", b"9 of")],
    "binary": [b"\xff\x00" * 100],
    "very long": [b"meshpar " * 20_000],
    "silent, more than fit": [b""] * (roll._MAX_SILENT + 20),
}


@pytest.mark.parametrize("lines", STRANGERS.values(), ids=STRANGERS)
def test_lines_without_the_token_of_the_run_are_ignored(address: str, lines: list[bytes]) -> None:
    said = ["", ""]

    def call(number: int) -> None:
        try:
            roll.call(address, process_id=number, num_processes=2, timeout_s=60, token="token")
        except MeshparError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in (0, 1)]
    threads[0].start()
    with contextlib.ExitStack() as until_end:
        for line in lines:
            connection = until_end.enter_context(connected(address))
            with contextlib.suppress(OSError):  # closed by process 0 before all is sent
                connection.sendall(line)
            if line:
                connection.settimeout(60)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        threads[1].start()
        for thread in threads:
            thread.join()
    assert said == ["", ""]


def connected(address: str) -> socket.socket:
    """Connect as soon as somebody listens."""
    for _ in range(1000):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(port_of(address))
        time.sleep(0.01)
    raise AssertionError(address)


def test_an_answer_without_the_token_of_the_run_is_ignored(address: str) -> None:
    """A stranger that listens there first, and then the real process 0."""
    refusal = json.dumps(["no", "process 1 of 2", "join", "it may not", "go away"]).encode() + b"\n"
    with socket.create_server(port_of(address)) as stranger:
        process_1 = threading.Thread(
            target=roll.call,
            args=(address,),
            kwargs={"process_id": 1, "num_processes": 2, "timeout_s": 60, "token": "token"},
        )
        process_1.start()
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(refusal)
            assert b"token" not in connection.recv(4096)
    roll.call(address, process_id=0, num_processes=2, timeout_s=60, token="token")
    process_1.join()


def test_ignored_lines_are_reported_if_a_process_did_not_come(address: str) -> None:
    def knock() -> None:
        with connected(address) as connection:
            connection.sendall(roll._signed("meshpar 1 of 2", b"another"))
            connection.recv(1)

    knocks = threading.Thread(target=knock)
    knocks.start()
    with pytest.raises(
        MeshparError, match=r"from 127.0.0.1 without the token of this run \(MESHPAR_TOKEN\) were ignored"
    ):
        roll.call(address, process_id=0, num_processes=2, timeout_s=1, token="token")
    knocks.join()
