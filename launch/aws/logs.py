"""The log of a job: the lines of all hosts in one order, and the part that says why it failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from launch.aws.clients import Clients, code, said
from launch.aws.job import LOG_GROUP

_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
# What the first process writes above a rank's traceback (container/attempt.py).
_OF_RANK = re.compile(r"rank (\d+):\s*")
# Between the tracebacks of an error and of the one that it led to.
_CHAINED = re.compile(r"\s*$|During handling of the above|The above exception was the direct cause")
# A rank that was only cut off when another one ended.
_CUT_OFF = re.compile(r"ChildFailedError|SignalException|Connection (?:reset|closed)|Broken pipe")
MOST_LINES = 200  # of one traceback


@dataclass(frozen=True, order=True)
class Line:
    """time: milliseconds since 1970, UTC, of the host that wrote it."""

    time: int
    host: str  # algo-1
    order: int  # of reading, which keeps a host's own order
    text: str = field(compare=False)


class Log:
    """Reads a job's streams, each from where it was left."""

    def __init__(self, job: str, clients: Clients) -> None:
        self._job, self._clients = job, clients
        self._token: dict[str, str] = {}
        self._count = 0
        self._unread: list[Line] = []  # of a call that an error has ended

    def streams(self) -> list[str]:
        """One for each host and start: `<job>/algo-1-<when>`. [] before the first line."""
        logs = self._clients("logs")
        with said("read the log"):
            try:
                pages = logs.get_paginator("describe_log_streams").paginate(
                    logGroupName=LOG_GROUP, logStreamNamePrefix=f"{self._job}/"
                )
                return [s["logStreamName"] for page in pages for s in page["logStreams"]]
            except Exception as error:
                if code(error) == "ResourceNotFoundException":
                    return []
                raise

    def read(self, host: str | None = None) -> list[Line]:
        """The lines since the last call, in the order of their times; of one host, if it is
        given."""
        for stream in self.streams():
            if host is None or host_of(stream) == host:
                for line in self._read(stream, host_of(stream)):
                    self._unread.append(line)
        lines, self._unread = sorted(self._unread), []
        return lines

    def _read(self, stream: str, host: str) -> Iterator[Line]:
        logs = self._clients("logs")
        while True:
            more = {"nextToken": self._token[stream]} if stream in self._token else {}
            with said("read the log"):
                page = logs.get_log_events(
                    logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **more
                )
            for event in page["events"]:
                self._count += 1
                yield Line(event["timestamp"], host, self._count, event["message"].rstrip("\n"))
            # The end is where the token stays the same (CloudWatch Logs API, GetLogEvents).
            token = page["nextForwardToken"]
            if token == self._token.get(stream):
                return
            self._token[stream] = token


def host_of(stream: str) -> str:
    """`job/algo-1-1700000000` -> `algo-1`"""
    found = re.search(r"/(algo-\d+)", stream)
    return found[1] if found else stream.rpartition("/")[2]


@dataclass(frozen=True)
class Traceback:
    """One error as a process told it. rank: None where the log does not name it."""

    host: str
    rank: int | None
    lines: list[Line]

    @property
    def error(self) -> str:
        return self.lines[-1].text


def tracebacks(lines: Iterable[Line]) -> list[Traceback]:
    """Those of all hosts, the earliest first; lines of different hosts do not mix. Errors that led
    to one another are one."""
    found: list[Traceback] = []
    by_host: dict[str, list[Line]] = {}
    for line in lines:
        by_host.setdefault(line.host, []).append(line)
    for host, own in by_host.items():
        rank: int | None = None
        block: Traceback | None = None
        between: list[Line] = []  # after an error: blank lines, and how it led to the next
        inside = False
        for line in own:
            if _TRACEBACK.match(line.text):
                if block is None or not between:
                    block = Traceback(host, rank, [])
                    found.append(block)
                block.lines.extend([*between, line])
                between, inside = [], True
            elif inside and block is not None:
                block.lines.append(line)
                # Frames are indented; the error itself is not.
                inside = line.text.startswith(" ") and len(block.lines) < MOST_LINES
            elif block is not None and _CHAINED.match(line.text):
                between.append(line)
            else:
                named = _OF_RANK.fullmatch(line.text)
                rank, block, between = int(named[1]) if named else None, None, []
    return sorted(found, key=lambda one: one.lines[0])


def first_failure(lines: list[Line], reason: str = "") -> Traceback | None:
    """The error that the others follow from: that of the rank which `reason` (the job's
    FailureReason) names, else the earliest that is not only another's end."""
    found = tracebacks(lines)
    if named := re.search(r"\brank (\d+)\b", reason):
        of_rank = [block for block in found if block.rank == int(named[1])]
        found = of_rank or found
    own = [block for block in found if not _CUT_OFF.search(block.error)]
    return next(iter(own or found), None)
