"""The log of a job: the lines of all hosts in one order, and the part that says why it failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from launch.aws.clients import Clients, code, said
from launch.aws.job import LOG_GROUP

# How the lines of one rank begin, where the first process passes them on: "[rank 3] ...".
_RANK = re.compile(r"^\[(?:rank )?(\d+)\]:? ?")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
# The last line of a traceback: "torch.OutOfMemoryError: CUDA out of memory. ..."
_RAISED = re.compile(r"^(?:[A-Za-z_][\w.]*)(?:Error|Exception|Interrupt|Exit|Warning|Refusal)\b")
MOST_TRACEBACK = 200  # lines


@dataclass(frozen=True, order=True)
class Line:
    """time: milliseconds since 1970, UTC, of the host that wrote it."""

    time: int
    host: str  # algo-1
    order: int  # within its host
    text: str = field(compare=False)

    @property
    def rank(self) -> int | None:
        found = _RANK.match(self.text)
        return int(found[1]) if found else None

    @property
    def bare(self) -> str:
        return _RANK.sub("", self.text, count=1)


class Log:
    """Reads a job's streams, each from where it was left."""

    def __init__(self, job: str, clients: Clients) -> None:
        self._job, self._clients = job, clients
        self._token: dict[str, str] = {}
        self._count = 0

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

    def read(self, hosts: Iterable[str] | None = None) -> list[Line]:
        """The lines since the last call, in the order of their times. hosts: of these only."""
        wanted = None if hosts is None else set(hosts)
        lines: list[Line] = []
        for stream in self.streams():
            host = host_of(stream)
            if wanted is None or host in wanted:
                lines += self._read(stream, host)
        return sorted(lines)

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
                text = event["message"].rstrip("\n")
                yield Line(event["timestamp"], host, self._count, text)
            # The end is where the token stays the same (CloudWatch Logs API, GetLogEvents).
            token = page["nextForwardToken"]
            if token == self._token.get(stream):
                return
            self._token[stream] = token


def host_of(stream: str) -> str:
    """`job/algo-1-1700000000` -> `algo-1`"""
    found = re.search(r"/(algo-\d+)", stream)
    return found[1] if found else stream.rpartition("/")[2]


def tracebacks(lines: Iterable[Line]) -> list[list[Line]]:
    """Each traceback with the line that names the error, the earliest first.

    Lines of different hosts and ranks do not mix.
    """
    open_now: dict[tuple[str, int | None], list[Line]] = {}
    found: list[list[Line]] = []
    for line in lines:
        who = (line.host, line.rank)
        if _TRACEBACK.search(line.text):
            open_now[who] = [line]
            found.append(open_now[who])
        elif block := open_now.get(who):
            block.append(line)
            if _RAISED.match(line.bare) or len(block) >= MOST_TRACEBACK:
                del open_now[who]
    return found


def first_failure(lines: list[Line], reason: str = "") -> list[Line]:
    """The traceback to show first: that of the rank which `reason` names, else the earliest.

    A rank that was only cut off by another's end (ChildFailedError, SIGTERM) comes after one that
    failed by itself.
    """
    blocks = tracebacks(lines)
    if not blocks:
        return []
    named = re.search(r"\brank (\d+)\b", reason)
    if named:
        of_rank = [block for block in blocks if block[0].rank == int(named[1])]
        blocks = of_rank or blocks
    own = [b for b in blocks if not re.search(r"ChildFailedError|SignalException", b[-1].text)]
    return (own or blocks)[0]


def text_of(line: Line, hosts: int = 2) -> str:
    """As it is shown: with its host, where there are several."""
    return line.text if hosts < 2 else f"{line.host}  {line.text}"
