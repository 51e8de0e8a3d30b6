"""Following a run's jobs on SageMaker: state, log and progress, and a new job where that helps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.aws import ends, memory, preflight, results, submit
from launch.aws import job as jobs
from launch.aws.clients import Clients
from launch.aws.logs import Line, Log, first_failure
from launch.aws.record import FILE, Record
from launch.aws.request import job_name
from launch.display import Display
from launch.local import STOPPED, Outcome
from launch.run_folder import lock
from planning.findings import ChoiceError, Finding, MachineError
from planning.plan import load
from training.events import read_log_line, step_parts

LOCK = ".watch"
POLL = 10.0  # seconds
# The last lines of a job reach CloudWatch after its end.
LATE = 5.0
PATIENCE = 3600  # seconds without an answer of AWS's
FIRST_WAIT, LONGEST_WAIT = 10, 60  # seconds between two tries, each wait twice the one before
# Ends that a traceback in the log may explain.
FAILURES = ("crash", "out of memory", "not finite", "refused", "node")


def follow(run_dir: Path, clients: Clients, sleep: Callable[[float], None] = time.sleep) -> Outcome:
    """See the run to its end: `done`, `stopped` or `failed`, with what the run says in
    result.json. Ctrl-C leaves the job alone: `submitted`.

    A job that failed in a way that may pass is followed by another one, at most
    record.max_restarts times; job.json says why. MachineError if another process follows it.
    """
    record = Record.load(run_dir)
    try:
        with lock(run_dir, LOCK, "follows the run in"):
            return _follow(run_dir, record, clients, sleep)
    except KeyboardInterrupt:
        message = (
            f"the job goes on; python launch/jobs.py watch {run_dir} follows it again, "
            f"python launch/jobs.py stop {run_dir} stops it"
        )
        return Outcome("submitted", 0, message, {})


def _follow(
    run_dir: Path, record: Record, clients: Clients, sleep: Callable[[float], None]
) -> Outcome:
    while True:
        name = record.newest.name
        end, lines = _one(run_dir, record, clients, sleep)
        record = Record.load(run_dir)
        if record.newest.name != name:
            continue  # resumed by somebody else
        record.keep_end(run_dir, ends.to_record(end))
        if end.kind == "completed":
            found = results.fetch(record, run_dir, clients)
            return Outcome("done", 0, "", found)
        earlier = [ends.of_record(job.end) for job in record.jobs[:-1] if job.end]
        more, why = ends.again(end, earlier, record.restarts, record.max_restarts)
        print("\n".join(said_of(end, lines, run_dir)), flush=True)
        if not more:
            found = results.fetch(record, run_dir, clients)
            print(f"{'no restart':<10} {why}", flush=True)
            message = f"{'go on':<10} python launch/jobs.py resume {run_dir}"
            if end.kind in ("stopped", "time limit"):
                return Outcome("stopped", STOPPED, message, found)
            return Outcome("failed", _exit_status(end), message, found)
        wait = ends.WAITS.get(end.kind, 0)
        print(f"{'restart':<10} {why}, in {wait:.0f} s", flush=True)
        sleep(wait)
        _next_job(run_dir, record, f"resubmitted after {end}", clients, sleep)
        record = Record.load(run_dir)
        print(f"{'job':<10} {record.newest.name}", flush=True)


def _next_job(
    run_dir: Path, record: Record, reason: str, clients: Clients, sleep: Callable[[float], None]
) -> None:
    """Have a job after the newest one, which has ended; it may be one that somebody else has
    submitted meanwhile."""
    ended = record.newest.name

    def once() -> None:
        if Record.load(run_dir).newest.name not in (ended, record.newest.name):
            return
        if record.newest.name == ended:
            resubmit(run_dir, record, reason, clients)
        else:  # recorded by the last try
            submit.complete(run_dir, record, clients)

    _patiently(once, clients, sleep, "the next job is not made yet")


def _exit_status(end: ends.End) -> int:
    """2 and 3 as the README says, where the container said so; else 1."""
    return ends.exit_status_of(end.reason) or 1 if end.kind in ("refused", "node") else 1


def resubmit(run_dir: Path, record: Record, reason: str, clients: Clients) -> None:
    """The same request under the run's next name: it goes on from the newest checkpoint.

    ChoiceError if a job that the record does not know of is at work.
    """
    number = len(record.jobs) + 1
    while (lost := jobs.describe(name := job_name(record.first_name, number), clients)) is not None:
        if not jobs.has_ended(lost):
            raise ChoiceError(
                Finding("job-at-work", "error", "run_dir", f"the job {name} of this run, which "
                        f"{run_dir}/{FILE} does not know of, is {jobs.state(lost)}",
                        "look after it where it was submitted, or stop it in the console")
            )  # fmt: skip
        number += 1
    record.request = {**record.request, "TrainingJobName": name}
    submit.begin(run_dir, record, reason, clients)


def _one(
    run_dir: Path, record: Record, clients: Clients, sleep: Callable[[float], None]
) -> tuple[ends.End, list[Line]]:
    """Follow the newest job to its end; all lines of its log."""
    name, log = record.newest.name, Log(record.newest.name, clients)
    display = Display(interval=1)
    progress = _Progress(display, _train_steps(run_dir), record.nodes)
    lines: list[Line] = []
    shown = ""
    while True:
        job = _patiently(lambda: jobs.describe(name, clients), clients, sleep)
        if job is None:
            return ends.End("account", f"there is no job {name}"), lines
        if (now := _state(job)) != shown and not jobs.has_ended(job):
            display.phase(now)
            shown = now
        ended = jobs.has_ended(job)
        if ended:
            sleep(LATE)
        new = _patiently(log.read, clients, sleep)
        lines += new
        for line in new:
            progress.show(line)
        if ended:
            display.close()
            return ends.of(job, progress.step), lines
        display.tick()
        sleep(POLL)


def _patiently[T](
    ask: Callable[[], T],
    clients: Clients,
    sleep: Callable[[float], None],
    meanwhile: str = "the job goes on",
) -> T:
    """The answer, through an hour without network or login.

    Only what AWS, or the way to it, has refused is tried again.
    """
    waited, wait = 0, FIRST_WAIT
    while True:
        try:
            return ask()
        except MachineError as error:
            if waited >= PATIENCE or any(finding.id != "aws" for finding in error.findings):
                raise
            if not waited:
                print(f"warning: {error}\n    {meanwhile}; trying again", flush=True)
            sleep(wait)
            waited, wait = waited + wait, min(2 * wait, LONGEST_WAIT)
            clients.renew()


def _state(job: jobs.Described) -> str:
    more = jobs.since(job)
    return f"{jobs.state(job)}: {more}" if more else jobs.state(job)


class _Progress:
    """Shows a job's lines, its steps as progress. train_steps: None where no plan is at hand."""

    def __init__(self, display: Display, train_steps: int | None, nodes: int) -> None:
        self._display, self._train_steps, self._nodes = display, train_steps, nodes
        self.step: int | None = None  # the last one so far
        self._at = 0  # milliseconds, of its line

    def show(self, line: Line) -> None:
        event = read_log_line(line.text)
        if event is None:
            text = line.text if self._nodes == 1 else f"{line.host}  {line.text}"
            self._display.message(text)
            return
        if event["event"] == "step" and self._train_steps:
            # Not every step has a line.
            done = event["step"] - self.step if self.step is not None else 0
            if done > 0:
                event["step_s"] = (line.time - self._at) / 1000 / done
            self._display.event({**event, "train_steps": self._train_steps})
        else:
            self._display.message(line.text)
        if event["event"] == "step":
            self.step, self._at = event["step"], line.time


def last_event(lines: list[Line]) -> dict[str, Any] | None:
    """The newest step that a log tells of."""
    found = (read_log_line(line.text) for line in reversed(lines))
    return next((event for event in found if event and event["event"] == "step"), None)


def progress(event: dict[str, Any], run_dir: Path) -> str:
    return "  ".join(step_parts({**event, "train_steps": _train_steps(run_dir) or "?"}))


def _train_steps(run_dir: Path) -> int | None:
    try:
        return load(run_dir / "plan.yaml").config.training.train_steps
    except (OSError, ValueError):
        return None  # a record without its plan


def said_of(end: ends.End, lines: list[Line], run_dir: Path) -> list[str]:
    """Why a job ended: the first failing rank's traceback, the reason, and what would do."""
    said = []
    found = first_failure(lines, end.reason) if end.kind in FAILURES else None
    if found is not None:
        rank = f", rank {found.rank}" if found.rank is not None else ""
        said.append(f"{found.host}{rank}:")
        said += [f"    {line.text}" for line in found.lines]
    said.append(f"{'ended':<10} {end}")
    if end.kind == "out of memory":
        said += memory.lines(run_dir, [line.text for line in lines] + [end.reason])
    return said


def resume(run_dir: Path, record: Record, clients: Clients, anyway: bool = False) -> None:
    """A new job of a run whose last one has ended, after the checks. Raises as submit does.

    anyway: also where the last one ended in a way that would come again.
    """
    submit.earlier(run_dir, clients)
    job = jobs.describe(record.newest.name, clients)
    if job is not None:
        record.newest.end = ends.to_record(end := ends.of(job))
        if (why := ends.would_come_again(end)) and not anyway:
            raise ChoiceError(
                Finding(
                    "would-come-again",
                    "error",
                    "run_dir",
                    f"the last job ended: {end}. The same request again: {why}",
                    f"change the choice (python launch/train.py ... run_dir={run_dir}), "
                    "or --anyway",
                )
            )
    number = len(record.jobs) + 1
    request = {**record.request, "TrainingJobName": job_name(record.first_name, number)}
    preflight.check(request, clients)
    resubmit(run_dir, record, "resumed", clients)
