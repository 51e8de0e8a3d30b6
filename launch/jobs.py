"""Looking after runs on SageMaker: `python launch/jobs.py COMMAND [RUN]`; RUN is a run folder.

    list [FOLDER]     the runs below a folder that were submitted, and how they are
    status RUN        state, reason, cost, links, newest checkpoint
    logs RUN          the log; a failure's traceback first
    watch RUN         follow it to its end, and submit it again where that helps
    stop RUN          save and stop
    resume RUN        a new job, which goes on from the newest checkpoint
    cleanup RUN       what the run has left in the account; --delete takes named parts away

Exit status: 0 done; 1, 2, 3 and 143 as launch/train.py; `status` and `logs` 0 whatever the job's.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # A script's own folder comes first in sys.path; our packages are in the repository's root.
    sys.path[0] = str(ROOT)

from launch.aws import confirm, ends, leftovers, results, submit, watch
from launch.aws import job as jobs
from launch.aws.checks import s3_parts
from launch.aws.clients import Clients
from launch.aws.logs import Line, Log, first_failure
from launch.aws.record import Record, find
from launch.train import leave, report
from planning.findings import ChoiceError, Finding, MachineError, Refusal
from planning.report import refusal_lines, table

FOLLOW_EVERY = 5.0  # seconds


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(words)
    try:
        return int(given.run_command(given))
    except Refusal as refusal:
        return report(refusal)
    except KeyboardInterrupt:
        return 143


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch/jobs.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, does: str, run: object) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=does, description=does)
        made.set_defaults(run_command=run)
        if name == "list":
            made.add_argument("folder", nargs="?", type=Path, default=Path("runs"))
        else:
            made.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
        return made

    command("list", "the runs below a folder that were submitted", _list)
    command("status", "state, reason, cost, links, newest checkpoint", _status)
    logs = command("logs", "the log; a failure's traceback first", _logs)
    logs.add_argument("--follow", action="store_true", help="go on until the job ends")
    logs.add_argument("--host", help="of one host only, such as algo-2")
    logs.add_argument("--rank", type=_count, help="all that one rank has printed, from S3")
    logs.add_argument("--grep", metavar="REGEX", help="lines that match only")
    logs.add_argument("--last", type=_count, metavar="N", help="the newest N lines only")
    command("watch", "follow it to its end, submit it again where that helps", _watch)
    command("stop", "save and stop", _stop)
    again = command("resume", "a new job, from the newest checkpoint", _resume)
    again.add_argument("--watch", action="store_true", help="and follow it")
    again.add_argument("--anyway", action="store_true", help="also if it would fail as before")
    clean = command("cleanup", "what the run has left in the account, and what it costs", _cleanup)
    clean.add_argument("--delete", nargs="+", metavar="WHAT", default=[],
                       help="take away these kinds of the list, after a confirmation")  # fmt: skip
    clean.add_argument("--confirm", metavar="NAME", help="the run's name, instead of typing it")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 0")
    return int(text)


def _open(run_dir: Path) -> tuple[Record, Clients]:
    record = Record.load(run_dir)
    clients = Clients(record.region)
    account = clients.identity[0]
    if account != record.account:
        raise MachineError(
            Finding("other-account", "error", "AWS_PROFILE",
                    f"the run is in account {record.account}, you are in {account}",
                    "log in to the run's account", machine=True)
        )  # fmt: skip
    return record, clients


def _list(given: argparse.Namespace) -> int:
    rows = [["run", "job", "state", "nodes", "jobs", "since"]]
    clients: dict[str, Clients] = {}
    for run_dir in find(given.folder):
        try:
            record = Record.load(run_dir)
        except ChoiceError as refusal:
            print("\n".join(refusal_lines(refusal)), file=sys.stderr)
            continue
        if record.region not in clients:
            clients[record.region] = Clients(record.region)
        state = "in another account"
        if clients[record.region].identity[0] == record.account:
            job = jobs.describe(record.newest.name, clients[record.region])
            state = "not there" if job is None else jobs.state(job)
        nodes = f"{record.nodes} x {record.instance_type}"
        rows.append([str(run_dir), record.newest.name, state, nodes, str(len(record.jobs)),
                     record.newest.created])  # fmt: skip
    if len(rows) == 1:
        print(f"no run below {given.folder} was submitted")
        return 0
    print("\n".join(table(rows)))
    return 0


def _status(given: argparse.Namespace) -> int:
    record, clients = _open(given.run)
    name = record.newest.name
    job = jobs.describe(name, clients)
    for entry in record.jobs[:-1]:
        how = ends.of_record(entry.end) if entry.end else "(its end was not looked at)"
        print(f"{'before':<10} {entry.name}: {how}")
    why = "" if record.newest.reason == "first" else f" ({record.newest.reason})"
    print(f"{'job':<10} {name}{why}")
    if job is None:
        print(f"{'state':<10} there is no such job: it was never made, or its account is closed")
        return 0
    lines = _told(name, clients, job)
    event = watch.last_event(lines)
    end = ends.of(job, event["step"] if event else None) if jobs.has_ended(job) else None
    more = "" if end else jobs.since(job)
    print(f"{'state':<10} {jobs.state(job)}{f': {more}' if more else ''}")
    if event:
        print(f"{'progress':<10} {watch.progress(event, given.run)}")
    if end is not None:
        record.keep_end(given.run, ends.to_record(end))
        for line in watch.said_of(end, lines, given.run):
            print(line)
    capacity = "training plan" if record.training_plan else (
        "spot" if record.request.get("EnableManagedSpotTraining") else "on demand")  # fmt: skip
    print(f"{'nodes':<10} {record.nodes} x {record.instance_type}, {capacity}")
    print(f"{'cost':<10} {jobs.cost(job, record.price_per_node_hour)}")
    print(f"{'checkpoint':<10} {results.newest_checkpoint(record, clients) or 'none yet'}")
    print(f"{'console':<10} {jobs.console(name, record.region)}")
    print(f"{'log':<10} {jobs.console_logs(name, record.region)}")
    return 0


def _told(name: str, clients: Clients, job: jobs.Described) -> list[Line]:
    return [] if job.get("TrainingStartTime") is None else Log(name, clients).read()


def _logs(given: argparse.Namespace) -> int:
    record, clients = _open(given.run)
    try:
        wanted = re.compile(given.grep or "")
    except re.error as error:
        raise ChoiceError(Finding("regex", "error", "--grep", f"{given.grep}: {error}")) from None
    if given.rank is not None:
        return _rank_log(record, given.rank, wanted, given.last, clients)
    name = record.newest.name
    job = jobs.describe(name, clients)
    log = Log(name, clients)
    lines = log.read(given.host)
    if job is not None and job["TrainingJobStatus"] == "Failed" and not given.grep:
        found = first_failure(lines, str(job.get("FailureReason", "")))
        if found is not None:
            rank = "" if found.rank is None else f", rank {found.rank}"
            print(f"--- the first failure: {found.host}{rank}")
            print("\n".join(line.text for line in found.lines))
            print("--- the log")
    shown = [line for line in lines if wanted.search(line.text)]
    for line in _newest(shown, given.last):
        _print(line, record.nodes)
    if not lines:
        print("the log is empty so far")
    while given.follow and job is not None and not jobs.has_ended(job):
        time.sleep(FOLLOW_EVERY)
        job = jobs.describe(name, clients)
        if job is None or jobs.has_ended(job):
            time.sleep(watch.LATE)
        for line in log.read(given.host):
            if wanted.search(line.text):
                _print(line, record.nodes)
    return 0


def _newest[T](lines: list[T], count: int | None) -> list[T]:
    return lines if count is None else lines[max(len(lines) - count, 0) :]


def _print(line: Line, nodes: int) -> None:
    stamp = time.strftime("%H:%M:%S", time.gmtime(line.time / 1000))
    host = f"{line.host}  " if nodes > 1 else ""
    print(f"{stamp}  {host}{line.text}", flush=True)


def _rank_log(
    record: Record, rank: int, wanted: re.Pattern[str], last: int | None, clients: Clients
) -> int:
    """What rank `rank` wrote to the run folder, which SageMaker copies to S3."""
    body = None
    if record.checkpoints is not None:
        bucket, prefix = s3_parts(record.checkpoints)
        body = results.read(bucket, f"{prefix.rstrip('/')}/logs/rank-{rank}.log", clients)
    if body is None:
        raise ChoiceError(
            Finding("no-rank-log", "error", "--rank",
                    f"no log of rank {rank} is in S3 ({record.checkpoints or 'a file system'})",
                    "it is copied within minutes of the run's start, of each node's own ranks")
        )  # fmt: skip
    shown = [x for x in body.decode(errors="replace").splitlines() if wanted.search(x)]
    print("\n".join(_newest(shown, last)))
    return 0


def _watch(given: argparse.Namespace) -> int:
    _, clients = _open(given.run)
    outcome = watch.follow(given.run, clients)
    if outcome.message:
        print(outcome.message)
    if outcome.status == "done":
        loss = outcome.result.get("final_loss")
        print(f"{'done':<10} {given.run}" + (f", loss {loss:.4f}" if loss is not None else ""))
    return outcome.exit_status


def _stop(given: argparse.Namespace) -> int:
    record, clients = _open(given.run)
    name = record.newest.name
    if submit.stop(name, clients):
        print(f"{name} stops: it finishes the step and saves, within 120 s")
    else:
        print(f"{name} has ended already")
    return 0


def _resume(given: argparse.Namespace) -> int:
    record, clients = _open(given.run)
    watch.resume(given.run, record, clients, given.anyway)
    print(f"{'job':<10} {record.newest.name}")
    print(f"{'from':<10} {results.newest_checkpoint(record, clients) or 'the first step'}")
    print(f"{'console':<10} {jobs.console(record.newest.name, record.region)}")
    return _watch(given) if given.watch else 0


def _cleanup(given: argparse.Namespace) -> int:
    record, clients = _open(given.run)
    found = leftovers.find(record, clients)
    if not found:
        print("nothing of the run is left in the account")
        return 0
    print("\n".join(leftovers.lines(found)))
    if not given.delete:
        kinds = sorted({x.kind for x in found if x.delete})
        if kinds:
            print(f"take away some: --delete {' '.join(kinds)}")
        return 0
    leftovers.check(found, given.delete)
    leftovers.refuse_edited(record, clients)
    confirm.typed(record.first_name, f"delete {', '.join(given.delete)} of the run", given.confirm)
    for line in leftovers.delete(found, given.delete):
        print(line)
    return 0


if __name__ == "__main__":
    leave(main)
