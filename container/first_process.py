"""The first process of a container: from what the job was given to how it ended.

    python container/first_process.py

Reads /opt/ml (container/contract.py), checks the node, starts torchrun's workers, tells them to
save at SIGTERM, SIGINT or SIGHUP, starts them again after a failure that may pass, and ends with
their status and the reason in /opt/ml/output/failure. Standard library only: it is to say what is
wrong with an image.

Exit status: 0 done; 143 stopped, after saving; 2 and 3 as the README says; else that of the rank
that failed first, 128 + n for signal n.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from container import attempt, contract, given
from container.attempt import GRACE_S, StopRequest, say
from container.board import Board, HostRefused, HostsMissing
from container.restart import End, decide, first_cause
from planning.findings import Refusal
from training import checkpoints, run_files, torchrun
from training.orphans import descendants_end_here

GRACE = "SLIPWAY_GRACE_S"  # to save in, after SIGTERM
MEET = "SLIPWAY_MEET_S"  # how long hosts wait for one another at the start
MEET_S = 900.0
# Before its end AWS begins to take the instances of a training plan's capacity back.
TAKEN_BACK_S = 1800.0
PREFLIGHT_S = 120.0
END_S = 120.0  # between the first and the last host's end of a start
CLOCKS_S = 30.0  # by which the hosts' clocks may differ


def main() -> int:
    root = contract.base()
    try:
        ended = _run(root)
    except Refusal as refusal:
        ended = End(os.environ.get(contract.HOST, ""), "failed", str(refusal), refusal.exit_status)
    except Exception as error:  # of our own: the job must not fail without a reason
        import traceback

        traceback.print_exc()
        ended = End("", "failed", f"the first process failed: {type(error).__name__}: {error}", 1)
    say(f"{ended.status}: {ended.message}" if ended.message else ended.status)
    if ended.status != "done":
        contract.write_failure(root, ended.message)
    return _exit_status(ended)


def _exit_status(ended: End) -> int:
    if ended.status == "failed" and ended.exit_status == 1 and ended.code is not None:
        # 143 means stopped after saving.
        return ended.code if ended.code > 0 else 128 - ended.code if ended.code != -15 else 1
    return ended.exit_status


def _run(root: Path) -> End:
    ends_at = contract.capacity_end()
    cluster = contract.read_cluster(root)
    start = contract.read_start(root)
    leave_at = None if ends_at is None else ends_at - start.stop_before_end_s
    # Elsewhere whoever sends SIGTERM has its own limit, and ends the container by it.
    usual = math.inf if contract.HOSTS in os.environ else GRACE_S
    grace_s = float(os.environ.get(GRACE, usual))
    leave_grace_s = max(grace_s, start.stop_before_end_s - TAKEN_BACK_S - 60)
    with StopRequest(grace_s, leave_at, leave_grace_s) as stop:
        job = given.read(root, cluster, start)
        given.say_what(job)
        if ends_at is not None and leave_at is not None and time.time() >= leave_at:
            raise given.cannot(
                f"the capacity ends in {max(0, ends_at - time.time()) / 60:.0f} minutes, and the "
                f"run is to stop {start.stop_before_end_s / 60:.0f} minutes before",
                "start it again in other capacity",
            )
        name = os.environ.get("TRAINING_JOB_NAME", start.name)
        with Board(cluster.hosts, cluster.current, job.port, name) as board:
            try:
                _meet(job, board, stop)
                if start.preflight:
                    _preflight(job, board, stop)
                if stop.wanted():
                    return _stopped_before(cluster, stop)
                if (done := _prepare(job, board, stop)) is not None:
                    return done
                return _train(job, board, stop)
            except HostRefused as other:
                message, status = other.entry["message"], other.entry["exit_status"]
                return End(other.host, "failed", f"{other.host}: {message}", status, "refused")
            except HostsMissing as missing:
                if stop.wanted():
                    return _stopped_before(cluster, stop)
                raise given.cannot(
                    f"{', '.join(missing.hosts)} of {len(cluster.hosts)} hosts did not answer "
                    f"within {missing.seconds:.0f} s ({missing.topic}), at "
                    f"{cluster.hosts[0]}:{job.port}",
                    "its own log says why; security groups must let the job's hosts reach "
                    "each other on all ports",
                ) from None
            except Exception as error:  # the others need not wait for this host
                status = error.exit_status if isinstance(error, Refusal) else 1
                board.refuse({"message": str(error), "exit_status": status})
                raise


def _stopped_before(cluster: contract.Cluster, stop: StopRequest) -> End:
    return End(cluster.current, "stopped", f"stopped before the first step: {stop.reason}", 143)


# --- before training --------------------------------------------------------------------------


def _meet(job: given.Job, board: Board, stop: StopRequest) -> None:
    """Wait until all hosts are there, and see that they were given the same."""
    if not job.several:
        return
    seconds = float(os.environ.get(MEET, MEET_S))
    digest = hashlib.sha256(job.plan_text.encode()).hexdigest()[:16]
    board.put("start", {"plan": digest, "time": time.time(), "version": _version()})
    found = board.gather("start", seconds, stop.wanted)
    for what, fix in (("plan", "submit the job again"), ("version", "give all hosts one image")):
        if len({entry[what] for entry in found.values()}) > 1:
            differ = ", ".join(f"{name}: {entry[what]}" for name, entry in found.items())
            raise given.cannot(f"the hosts were given different {what}s ({differ})", fix)
    # Entries were written at different times, so this host's clock is compared when asked.
    board.put("clock", {"time": time.time()})
    times = {name: entry["time"] for name, entry in board.gather("clock", seconds).items()}
    if (spread := max(times.values()) - min(times.values())) > CLOCKS_S:
        raise given.cannot(
            f"the hosts' clocks differ by {spread:.0f} s: {times}", "start the job again"
        )
    say(f"all {len(found)} hosts are here")


def _version() -> str:
    """Of the code in this image."""
    digest = hashlib.sha256()
    for folder in ("container", "models", "planning", "training"):
        for path in sorted((torchrun.ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _preflight(job: given.Job, board: Board, stop: StopRequest) -> None:
    """Check this node, and all of them together; stop where one is not fit."""
    start = job.start
    report = Path(f"/tmp/preflight-{os.getpid()}.json")
    options = {
        "--plan": contract.plan_file(contract.base()),
        "--run-dir": start.run_dir,
        "--gpu": start.gpu,
        "--gpus": start.gpus_per_node,
        "--instance": start.instance_type,
        "--min-allreduce": start.min_allreduce_gb_s,
        "--nodes": start.nodes,
        "--rank": job.cluster.rank,
        "--first": job.cluster.hosts[0],
        "--port": job.port + 1,
        "--json": report,
    }
    words = [word for name, v in options.items() if v is not None for word in (name, str(v))]
    # All begin together, as they measure the network between them.
    board.put("preflight begins", {})
    board.gather("preflight begins", 300, stop.wanted)
    with descendants_end_here():
        process = subprocess.Popen(
            [sys.executable, "-m", "container.preflight", *words],
            env=torchrun.environment(job.environment),
            stdin=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + PREFLIGHT_S
        while process.poll() is None and time.monotonic() < deadline and not stop.wanted():
            board.exchange(0.1)
    failed = torchrun.read_json(report).get("failed")
    if process.returncode != 0 and failed is None:
        failed = [f"the checks did not end within {PREFLIGHT_S:.0f} s"]
    report.unlink(missing_ok=True)
    board.put("preflight", {"failed": failed or []})
    found = board.gather("preflight", PREFLIGHT_S, stop.wanted)
    unfit = {name: entry["failed"] for name, entry in found.items() if entry["failed"]}
    if unfit and not stop.wanted():
        reasons = [
            f"{name}: {reason}" if job.several else str(reason)
            for name, failed in unfit.items()
            for reason in failed
        ]
        raise given.cannot(
            "; ".join(reasons), "the table in the log says what was found", "preflight"
        )


def _prepare(job: given.Job, board: Board, stop: StopRequest) -> End | None:
    """Make the run folder ready to go on from the newest checkpoint that all hosts have whole;
    an End where nothing is left to train."""
    start = job.start
    if job.keeps_folder:
        with run_files.said_of("run_dir", start.run_dir):
            start.run_dir.mkdir(parents=True, exist_ok=True)
            run_files.write_plan(start.run_dir, job.plan_text)
            run_files.begin(start.run_dir)
            roots = {"cache:": "/tmp/slipway-cache", **start.roots, "run:": str(start.run_dir)}
            run_files.write_environment(
                start.run_dir, roots, job.environment, shared_run_dir=start.shared_run_dir
            )
    step = _resume(job, board, stop, 0)
    if step >= job.plan["train_steps"]:
        say(f"all {step} steps are trained already")
        return End(job.cluster.current, "done")
    return None


def _resume(job: given.Job, board: Board, stop: StopRequest, number: int) -> int:
    """Make the checkpoints ready for start `number`; the step it goes on from, 0 for the first.

    Where hosts share no folder, each got a copy of all, so each looks at its own: a checkpoint
    counts if it is whole on every host. Where they share one, the first host looks after it.
    """
    saves, step = job.checkpoints, 0
    if job.keeps_folder:
        found = checkpoints.checkpoints(saves) if saves is not None else []
        board.put(f"checkpoints {number}", {"steps": [s.step for s in found if s.complete]})
    those = job.cluster.hosts[:1] if job.start.shared_run_dir else job.cluster.hosts
    entries = board.gather(f"checkpoints {number}", 600, stop.wanted, those)
    step = max(set.intersection(*(set(entry["steps"]) for entry in entries.values())), default=0)
    if job.keeps_folder:
        if saves is not None:
            with run_files.said_of("checkpoint.save", saves):
                saves.mkdir(parents=True, exist_ok=True)
                (saves / "plan.yaml").write_text(job.plan_text)
                newest = checkpoints.prepare_resume(saves, at_most=step)
            say(str(newest) or "no checkpoint yet: starting from the first step")
        if job.first:
            run_files.continue_metrics(job.start.run_dir, step)
    board.put(f"prepared {number}", {})
    board.gather(f"prepared {number}", 600, stop.wanted)
    return step


# --- training ---------------------------------------------------------------------------------


def _train(job: given.Job, board: Board, stop: StopRequest) -> End:
    """Start the workers, and again while that helps."""
    start = job.start
    possible = start.shared_run_dir or not job.several
    failed_at: list[int] = []
    log_name = f"torchrun-{job.cluster.current}.log" if job.several else "torchrun.log"
    while True:
        number = len(failed_at)
        rendezvous = torchrun.alone()
        if job.several:
            name = f"{start.name}-{number}"
            port = job.port + 2 + number
            rendezvous = torchrun.among(job.cluster.hosts[0], port, job.cluster.rank, name)
        command = torchrun.command(
            processes=start.gpus_per_node,
            worker=start.worker,
            run_dir=start.run_dir,
            rendezvous=rendezvous,
            nodes=start.nodes,
        )
        ended = attempt.run(
            command, job.environment, start.run_dir,
            log_name=log_name, board=board, number=number, stop=stop,
            aloud=job.keeps_folder,
        )  # fmt: skip
        board.put(f"end {number}", ended.to_entry())
        ends = [End.of_entry(e) for e in board.gather(f"end {number}", END_S).values()]
        if all(end.status != "failed" for end in ends):
            return next((end for end in ends if end.status == "stopped"), ends[0])
        cause = first_cause(ends)
        message = f"{cause.host}: {cause.message}" if job.several else cause.message
        again, why = decide(ends, failed_at, start.max_restarts, possible=possible)
        if stop.wanted():
            again, why = False, f"it was to stop: {stop.reason}"
        if not again:
            say(f"not started again: {why}")
            note = f"\nnot started again: {why}"
            return End(
                cause.host, "failed", message + note, cause.exit_status, cause.kind,
                cause.rank, cause.code,
            )  # fmt: skip
        say(f"{message}\n{why}")
        failed_at.append(max(end.step for end in ends))
        if job.keeps_folder:
            _record(start.run_dir, failed_at[-1], message, why)
            run_files.begin(start.run_dir)
        if _resume(job, board, stop, number + 1) >= job.plan["train_steps"]:
            return End(job.cluster.current, "done", "all steps were trained before the failure")


def _record(run_dir: Path, step: int, reason: str, what: str) -> None:
    line = {"time": time.time(), "step": step, "reason": reason, "what": what}
    with open(run_dir / "logs" / "restarts.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
