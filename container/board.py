"""A board that the first processes of all hosts write to and read: who is here, how each one's
workers ended, what comes next. Standard library only.

The first host keeps it at a TCP port; each entry that it gets it passes to all. Not torch's store:
that one ends with each torchrun, and what is decided here is whether there is to be another.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

Entry = dict[str, Any]
_REFUSED = "refused"
_RETRY = 0.5  # seconds between attempts to reach the first host


class HostsMissing(Exception):
    """Hosts that have not written to a topic in time."""

    def __init__(self, hosts: list[str], topic: str, seconds: float) -> None:
        self.hosts, self.topic, self.seconds = hosts, topic, seconds
        super().__init__(f"{', '.join(hosts)}: no {topic} within {seconds:.0f} s")


class HostRefused(Exception):
    """Another host has ended, and why: entry."""

    def __init__(self, host: str, entry: Entry) -> None:
        self.host, self.entry = host, entry
        super().__init__(host)


class Board:
    """One host's view. job: a name that all hosts of the job know, and others do not use."""

    def __init__(self, hosts: tuple[str, ...], me: str, port: int, job: str) -> None:
        self.hosts, self.me, self._address, self._job = hosts, me, (hosts[0], port), job
        self._entries: dict[str, dict[str, Entry]] = {}
        self._selector = selectors.DefaultSelector()
        self._unread: dict[socket.socket, bytes] = {}
        self._first = me == hosts[0]
        self._next_try = 0.0
        if self._first and len(hosts) > 1:
            listening = socket.create_server(("", port), backlog=len(hosts))
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ, self._accept)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def put(self, topic: str, entry: Entry) -> None:
        """Write this host's entry, for all to read."""
        self._take({"topic": topic, "host": self.me, "entry": entry})

    def refuse(self, entry: Entry) -> None:
        """Tell the others that this host ends, so that none waits for it."""
        self.put(_REFUSED, entry)
        self.exchange(0.5)

    def entries(self, topic: str) -> dict[str, Entry]:
        """What is written so far, by host."""
        return dict(self._entries.get(topic, {}))

    def gather(
        self,
        topic: str,
        seconds: float,
        stopped: Callable[[], bool] = lambda: False,
        hosts: tuple[str, ...] | None = None,
    ) -> dict[str, Entry]:
        """Wait for the entries of `hosts`, all without it; HostsMissing if some have none in time,
        or on a stop; HostRefused if one has ended."""
        deadline = time.monotonic() + seconds
        while True:
            found = self._entries.get(topic, {})
            missing = [host for host in hosts or self.hosts if host not in found]
            if not missing:
                return dict(found)
            for host, entry in self.entries(_REFUSED).items():
                if host != self.me:
                    raise HostRefused(host, entry)
            if time.monotonic() > deadline or stopped():
                raise HostsMissing(missing, topic, seconds)
            self.exchange(0.2)

    def exchange(self, seconds: float = 0) -> None:
        """Take what has come and pass it on; wait at most so long for it."""
        if not self._first:
            self._connect()
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            key.data(key.fileobj)

    def _connect(self) -> None:
        """Reach the first host, and tell it again what is written here."""
        if self._selector.get_map() or time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + _RETRY
        try:
            connection = socket.create_connection(self._address, timeout=2)
        except OSError:  # it is not up yet, or its name does not resolve yet
            return
        self._register(connection)
        for topic, entries in self._entries.items():
            if self.me in entries:
                self._send(connection, topic, self.me)

    def _accept(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        self._register(connection)
        for topic, entries in self._entries.items():
            for host in entries:
                self._send(connection, topic, host)

    def _register(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._unread[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ, self._receive)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        *lines, self._unread[connection] = (self._unread[connection] + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
                known = message["job"] == self._job and message["host"] in self.hosts
                topic, entry = str(message["topic"]), dict(message["entry"])
            except (ValueError, KeyError, TypeError):
                known = False
            if not known:  # not one of ours
                self._drop(connection)
                return
            self._take({"topic": topic, "host": message["host"], "entry": entry})

    def _take(self, message: dict[str, Any]) -> None:
        topic, host, entry = message["topic"], message["host"], message["entry"]
        entries = self._entries.setdefault(topic, {})
        if entries.get(host) == entry:
            return
        entries[host] = entry
        if self._first or host == self.me:
            for connection in list(self._unread):
                self._send(connection, topic, host)

    def _send(self, connection: socket.socket, topic: str, host: str) -> None:
        message = {
            "job": self._job,
            "topic": topic,
            "host": host,
            "entry": self._entries[topic][host],
        }
        try:
            connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        if self._unread.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()
