"""What hosts write is read by all, in whatever order they come; strangers are not heard."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from container.board import Board, HostsMissing
from tests.container.hosts import free_ports, until

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    """Of three hosts, the first one's made last."""
    port = free_ports(1)
    with ExitStack() as stack:
        made = [stack.enter_context(Board(HOSTS, host, port, "job")) for host in HOSTS[:0:-1]]
        made.append(stack.enter_context(Board(HOSTS, HOSTS[0], port, "job")))
        yield made[::-1]


def gather_all(boards: list[Board], topic: str) -> list[dict[str, dict[str, object]]]:
    found: list[dict[str, dict[str, object]]] = [{} for _ in boards]

    def one(number: int) -> None:
        found[number] = boards[number].gather(topic, 20)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(boards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_host_reads_the_same(boards: list[Board]) -> None:
    for number, board in enumerate(boards):
        board.put("start", {"number": number})
    expected = {host: {"number": number} for number, host in enumerate(HOSTS)}
    assert gather_all(boards, "start") == [expected] * 3
    for board in boards:
        board.put("end", {"host": board.me})
    assert gather_all(boards, "end") == [{host: {"host": host} for host in HOSTS}] * 3


def test_who_is_missing_is_named_and_a_stop_ends_the_wait(boards: list[Board]) -> None:
    boards[0].put("start", {})
    with pytest.raises(HostsMissing) as missing:
        boards[0].gather("start", 0.5)
    assert missing.value.hosts == ["127.0.0.2", "127.0.0.3"]
    with pytest.raises(HostsMissing):
        boards[0].gather("start", 600, stopped=lambda: True)
    assert boards[0].gather("start", 0.5, hosts=HOSTS[:1]) == {HOSTS[0]: {}}


def test_strangers_are_not_heard(boards: list[Board]) -> None:
    port = boards[0]._address[1]
    for message in ({"job": "another", "host": HOSTS[1], "topic": "start", "entry": {}}, "hello"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(json.dumps(message).encode() + b"\n")
            stranger.settimeout(0.05)

            def dropped(connection: socket.socket = stranger) -> bool:
                boards[0].exchange(0.05)
                try:
                    return connection.recv(1) == b""
                except TimeoutError:
                    return False
                except OSError:
                    return True

            until(dropped, "end of the connection", seconds=10)
    assert boards[0].entries("start") == {}
