"""A run's jobs followed to their end: progress, reasons, and new jobs where they help."""

from __future__ import annotations

import itertools
import json
import traceback
from pathlib import Path
from typing import Any

import pytest
from botocore.client import BaseClient
from botocore.exceptions import EndpointConnectionError

from launch.aws import ends, memory, submit, watch
from launch.aws.clients import Clients
from launch.aws.ends import End
from launch.aws.logs import Line, first_failure, tracebacks
from launch.aws.record import Job, Record
from launch.local import Outcome
from planning.findings import ChoiceError
from planning.resolve import resolve
from tests import choices
from tests.launch.aws.fake_aws import COMPLETED, STARTING, STOPPED, TRAINING, Account, failed
from tests.launch.aws.requests import BUCKET, prepare, request
from tests.launch.aws.test_submit import planned

NAME = "gpt-32b-20261201-120000"
CRASH = "AlgorithmError: algo-2: rank 3 failed: RuntimeError: NCCL error, exit code: 1"


@pytest.fixture
def run_dir(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was submitted; its jobs go as the test has said before it follows them."""
    prepare(account)
    monkeypatch.setattr(watch, "POLL", 0)
    (tmp_path / "plan.yaml").write_text(planned("training.train_steps=100")[0].to_yaml())
    return tmp_path


def follow(run_dir: Path, *, max_restarts: int = 2) -> tuple[Outcome, Record, list[float]]:
    clients = Clients()
    record = Record(region=clients.region, account="123456789012", request=request(),
                    price_per_node_hour=None, max_restarts=max_restarts)  # fmt: skip
    submit.begin(run_dir, record, "first", clients)
    waits: list[float] = []
    outcome = watch.follow(run_dir, clients, sleep=waits.append)
    return outcome, Record.load(run_dir), [wait for wait in waits if wait > 5]


class TestProgress:
    def test_states_steps_and_other_lines_are_shown(
        self, account: Account, run_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        account.goes([STARTING, STARTING, TRAINING, COMPLETED])
        account.log(NAME, "algo-1", "all 2 hosts are here", "step=50 loss=2.5 mfu=0.4")
        account.log(NAME, "algo-2", "network: EFA")
        outcome, _, _ = follow(run_dir)
        assert (outcome.status, outcome.exit_status) == ("done", 0)
        screen = capsys.readouterr().out
        assert "InProgress (Starting)" in screen
        assert "algo-1  all 2 hosts are here\n" in screen
        assert "algo-2  network: EFA\n" in screen
        assert "step 50/100  loss 2.5000  MFU 40.0%\n" in screen

    def test_seconds_a_step_are_from_the_lines_times(
        self, account: Account, run_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        account.goes([TRAINING, COMPLETED])
        lines = [(0, "step=10 loss=2.5"), (20, "step=20 loss=2.4"), (40, "step=30 loss=2.3")]
        account.log(NAME, "algo-1", *lines)
        follow(run_dir)
        screen = capsys.readouterr().out
        assert "step 20/100  loss 2.4000  2 s/step\n" in screen
        assert "step 30/100  loss 2.3000  2 s/step  2:20 left\n" in screen

    def test_ctrl_c_leaves_the_job_alone(
        self, account: Account, run_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(watch, "_one", interrupted)
        outcome, _, _ = follow(run_dir)
        assert (outcome.status, outcome.exit_status) == ("submitted", 0)
        assert "jobs.py stop" in outcome.message
        assert account.stopped == []

    def test_an_hour_without_network_does_not_end_it(
        self, account: Account, run_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from launch.aws import job as jobs
        from planning.findings import Finding, MachineError

        account.goes([TRAINING, TRAINING, COMPLETED])
        ask, calls = jobs.describe, []

        def flaky(name: str, clients: Clients) -> Any:
            calls.append(name)
            if 2 < len(calls) < 30:
                raise MachineError(Finding("aws", "error", "", "no route", machine=True))
            return ask(name, clients)

        monkeypatch.setattr(jobs, "describe", flaky)
        outcome, _, waits = follow(run_dir)
        assert outcome.status == "done"
        assert waits == [10, 20, 40, *[60] * 24]


class TestAgain:
    def test_a_crash_is_followed_by_a_job_of_the_next_name(
        self, account: Account, run_dir: Path
    ) -> None:
        account.goes([TRAINING, failed(CRASH)], [TRAINING, COMPLETED])
        outcome, record, waits = follow(run_dir)
        assert outcome.status == "done"
        assert [job.name for job in record.jobs] == [NAME, f"{NAME}-2"]
        assert record.jobs[1].reason == f"resubmitted after crash: {CRASH}"
        first, second = account.requests.values()
        assert {**second, "TrainingJobName": NAME} == first
        assert waits == [10]

    @pytest.mark.parametrize(
        ("lost", "answered", "tries"),
        [
            ((0, 1, 2), False, [10, 20, 40]),  # looking whether the name is free
            ((1,), False, [10]),  # the request that makes it
            ((1,), True, [10]),  # its answer
            ((2,), False, [10]),  # the look at what was made
        ],
    )
    def test_a_network_that_is_lost_meanwhile_is_waited_for(
        self, account: Account, run_dir: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        lost: tuple[int, ...], answered: bool, tries: list[float],
    ) -> None:  # fmt: skip
        """lost: of the calls that are about the second job, of which there is one all the same."""
        account.goes([failed(CRASH)], [TRAINING, COMPLETED])
        ask, calls = BaseClient._make_api_call, itertools.count()

        def flaky(client: Any, operation: str, given: dict[str, Any]) -> Any:
            second = given.get("TrainingJobName") == f"{NAME}-2"
            fails = second and next(calls) in lost
            answer = ask(client, operation, given) if answered or not fails else None
            if fails:
                raise EndpointConnectionError(endpoint_url="https://api.sagemaker")
            return answer

        monkeypatch.setattr(BaseClient, "_make_api_call", flaky)
        outcome, record, waits = follow(run_dir)
        assert outcome.status == "done"
        assert [job.name for job in record.jobs] == [NAME, f"{NAME}-2"]
        assert record.newest.arn is not None
        assert list(account.requests) == [NAME, f"{NAME}-2"]
        assert waits == [10, *tries]
        screen = capsys.readouterr().out
        assert screen.count("warning: ") == 1
        assert "the next job is not made yet; trying again" in screen

    def test_a_quota_that_is_free_soon_is_waited_for(
        self, account: Account, run_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        account.goes([failed("CapacityError: none")], [TRAINING, COMPLETED])
        clients = Clients()
        record = Record(region=clients.region, account="123456789012", request=request(),
                        price_per_node_hour=None, max_restarts=2)  # fmt: skip
        submit.begin(run_dir, record, "first", clients)
        waits = []

        def meanwhile(seconds: float) -> None:
            waits.append(seconds)
            if seconds == 600:
                account.refuses = ("ResourceLimitExceeded", "the quota is 2 instances")

        assert watch.follow(run_dir, clients, sleep=meanwhile).status == "done"
        assert waits[1:3] == [600, 10]
        assert len(Record.load(run_dir).jobs) == 2

    def test_no_capacity_waits_longer(self, account: Account, run_dir: Path) -> None:
        none = "CapacityError: Unable to provision requested ML compute capacity."
        account.goes([failed(none)], [failed(none)], [TRAINING, COMPLETED])
        outcome, record, waits = follow(run_dir)
        assert (outcome.status, len(record.jobs), waits) == ("done", 3, [600, 600])

    @pytest.mark.parametrize(
        ("reason", "kind", "exit_status", "why"),
        [
            ("AlgorithmError: algo-1: rank 0 failed: OutOfMemoryError: CUDA out of memory.\n"
             "not started again: it would run out of memory again, exit code: 1",
             "out of memory", 1, "it would run out of memory again"),
            ("AlgorithmError: rank 0 failed: FloatingPointError: loss is not finite, exit code: 1",
             "not finite", 1, "it would come again from the same checkpoint"),
            ("AlgorithmError: layout: tensor_parallel 3 does not divide 8, exit code: 2",
             "refused", 2, "it would be refused again"),
            ("AlgorithmError: rank 3 failed: RuntimeError: x\n"
             "not started again: it failed after step 40 twice, exit code: 1",
             "crash", 1, "it failed after step 40 twice"),
            ("AlgorithmError: x\nnot started again: 2 restarts are used up, exit code: 1",
             "crash", 1, "2 restarts are used up"),
            ("ClientError: Data download failed: no such bucket", "account", 1,
             "what it names has to change first"),
        ],
    )  # fmt: skip
    def test_what_would_come_again_is_not_submitted_again(
        self, account: Account, run_dir: Path, capsys: pytest.CaptureFixture[str],
        reason: str, kind: str, exit_status: int, why: str,
    ) -> None:  # fmt: skip
        account.goes([failed(reason)])
        outcome, record, _ = follow(run_dir)
        assert (outcome.status, outcome.exit_status) == ("failed", exit_status)
        assert record.newest.end == {"kind": kind, "reason": reason, "step": None}
        assert len(account.requests) == 1
        assert f"no restart {why}\n" in capsys.readouterr().out
        assert f"jobs.py resume {run_dir}" in outcome.message

    def test_the_same_step_twice_ends_it(self, account: Account, run_dir: Path) -> None:
        account.goes([TRAINING, failed(CRASH)], [TRAINING, failed(CRASH)])
        for name in (NAME, f"{NAME}-2"):
            account.log(name, "algo-1", "step=40 loss=2.5")
        outcome, record, _ = follow(run_dir, max_restarts=9)
        assert outcome.status == "failed"
        assert [job.end and job.end["step"] for job in record.jobs] == [40, 40]

    def test_another_step_is_progress(self, account: Account, run_dir: Path) -> None:
        account.goes([failed(CRASH)], [failed(CRASH)], [COMPLETED])
        account.log(NAME, "algo-1", "step=40 loss=2.5")
        account.log(f"{NAME}-2", "algo-1", "step=60 loss=2.4")
        outcome, record, _ = follow(run_dir)
        assert (outcome.status, len(record.jobs)) == ("done", 3)

    def test_restarts_are_used_up(self, account: Account, run_dir: Path) -> None:
        account.goes([failed("InternalServerError: x")] * 1, [failed("InternalServerError: x")])
        outcome, record, _ = follow(run_dir, max_restarts=1)
        assert (outcome.exit_status, record.restarts) == (1, 1)

    def test_a_stop_by_hand_is_an_end(self, account: Account, run_dir: Path) -> None:
        account.goes([TRAINING, STOPPED])
        outcome, _, _ = follow(run_dir)
        assert (outcome.status, outcome.exit_status) == ("stopped", 143)

    def test_the_time_limit_is_an_end(self, account: Account, run_dir: Path) -> None:
        over = {"TrainingJobStatus": "Stopped", "SecondaryStatus": "MaxRuntimeExceeded"}
        account.goes([TRAINING, over])
        outcome, record, _ = follow(run_dir)
        assert outcome.exit_status == 143
        assert record.newest.end is not None
        assert record.newest.end["kind"] == "time limit"

    def test_two_cannot_follow_one_run(self, account: Account, run_dir: Path) -> None:
        from launch.run_folder import lock
        from planning.findings import MachineError

        account.goes([COMPLETED])
        with (
            lock(run_dir, watch.LOCK),
            pytest.raises(MachineError, match="another process follows the run in"),
        ):
            follow(run_dir)

    def test_a_job_that_somebody_else_resumed_is_followed(
        self, account: Account, run_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        account.goes([TRAINING, STOPPED], [TRAINING, COMPLETED])
        one, seen = watch._one, []

        def resumed(folder: Path, record: Record, clients: Clients, sleep: Any) -> Any:
            seen.append(record.newest.name)
            answer = one(folder, record, clients, sleep)
            if len(seen) == 1:
                watch.resume(folder, Record.load(folder), clients)
            return answer

        monkeypatch.setattr(watch, "_one", resumed)
        outcome, _, _ = follow(run_dir)
        assert (outcome.status, seen) == ("done", [NAME, f"{NAME}-2"])

    def test_a_job_that_was_submitted_while_it_waited_is_followed(
        self, account: Account, run_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        account.goes([failed("CapacityError: none")], [TRAINING, COMPLETED])
        clients = Clients()
        record = Record(region=clients.region, account="123456789012", request=request(),
                        price_per_node_hour=None, max_restarts=2)  # fmt: skip
        submit.begin(run_dir, record, "first", clients)

        def meanwhile(seconds: float) -> None:
            if seconds == 600:
                watch.resume(run_dir, Record.load(run_dir), clients)

        assert watch.follow(run_dir, clients, sleep=meanwhile).status == "done"
        assert [job.reason for job in Record.load(run_dir).jobs] == ["first", "resumed"]
        assert list(account.requests) == [NAME, f"{NAME}-2"]

    def test_a_job_at_work_that_the_record_has_lost_is_left_alone(
        self, account: Account, run_dir: Path
    ) -> None:
        """The folder was copied, and resumed elsewhere."""
        account.goes([STOPPED], [TRAINING])
        follow(run_dir)
        stale = Record.load(run_dir)
        watch.resume(run_dir, Record.load(run_dir), Clients())
        stale.save(run_dir)
        with pytest.raises(
            ChoiceError, match=f"the job {NAME}-2 of this run, which .* is InProgress"
        ):
            watch.resubmit(run_dir, stale, "resumed", Clients())
        assert len(account.requests) == 2


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("InternalServerError: We encountered an internal error. Please try again.", "service"),
        ("AlgorithmError: stopped and saved: the capacity ends soon, exit code: 143", "stopped"),
        ("AlgorithmError: GPU 3 is missing, exit code: 3", "node"),
        ("AlgorithmError: rank 3 was killed by signal 9: often the machine ran out of memory "
         "(the kernel's log says so)\nnot started again: the hosts share no run folder, so none "
         "has the whole of a checkpoint, exit code: 137", "crash"),
        ("AlgorithmError: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB, "
         "exit code: 1", "out of memory"),
        ("", "crash"),
    ],
)  # fmt: skip
def test_what_a_reason_stands_for(reason: str, kind: str) -> None:
    job = {"TrainingJobStatus": "Failed", "SecondaryStatus": "Failed", "FailureReason": reason}
    assert ends.of(job).kind == kind


def test_a_bad_node_is_tried_once_more() -> None:
    bad = End("node", "AlgorithmError: GPU 3 is missing, exit code: 3")
    assert ends.again(bad, [], 0, 3) == (True, "restart 1 of 3")
    assert ends.again(bad, [bad], 1, 3) == (False, "it failed before the first step twice")


# --- the log -----------------------------------------------------------------------------------

LOG = """\
algo-1 step=3 loss=2.5
algo-2 rank 9:
algo-2 Traceback (most recent call last):
algo-1 rank 0:
algo-1 Traceback (most recent call last):
algo-2   File "worker.py", line 1, in train
algo-1   File "worker.py", line 1, in train
algo-2 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.
algo-1 torch.distributed.DistBackendError: Connection reset by peer
algo-2 failed: rank 9 failed"""


def told() -> list[Line]:
    split = [line.split(" ", 1) for line in LOG.splitlines()]
    return [Line(n, host, n, text) for n, (host, text) in enumerate(split)]


def test_tracebacks_of_hosts_do_not_mix() -> None:
    found = tracebacks(told())
    assert [(t.host, t.rank, len(t.lines)) for t in found] == [("algo-2", 9, 3), ("algo-1", 0, 3)]
    assert found[0].error.startswith("torch.OutOfMemoryError")


def test_errors_that_led_to_one_another_are_one() -> None:
    def read(token: str) -> None:
        try:
            int(token)
        except ValueError as error:
            raise OSError("bad shard") from error

    try:
        read("x")
    except OSError as error:
        text = "".join(traceback.format_exception(error)).rstrip()
    # As the first process prints them (container/attempt.py).
    printed = f"step=3 loss=2\nrank 3:\n{text}\nfailed: rank 3 failed: OSError: bad shard"
    (found,) = tracebacks(Line(n, "algo-1", n, x) for n, x in enumerate(printed.splitlines()))
    assert (found.rank, found.error) == (3, "OSError: bad shard")
    assert "\n".join(line.text for line in found.lines) == text


def test_the_first_failure_is_the_cause_and_not_who_was_cut_off() -> None:
    lines = told()
    for reason in ("", "AlgorithmError: algo-2: rank 9 failed: OutOfMemoryError"):
        found = first_failure(lines, reason)
        assert found is not None
        assert (found.host, found.rank) == ("algo-2", 9)
    assert first_failure(lines[:2]) is None


# --- memory ------------------------------------------------------------------------------------

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total "
    "capacity of 178.30 GiB of which 1.25 GiB is free. Including non-PyTorch memory, this process "
    "has 177.05 GiB memory in use."
)


def test_out_of_memory_is_told_beside_the_plan(tmp_path: Path) -> None:
    parts = {"weights": 15.2, "activations": 100.0, "optimizer": None, "gradients": 30.4}
    plan = {"memory": {"needed_gib": 150.2, "capacity_gib": 178.3, "parts": parts}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert memory.lines(tmp_path, ["step=3 loss=2 memory_gib=160.10", OOM]) == [
        "planned    150.2 GiB of one GPU (activations 100.0, gradients 30.4, weights 15.2)",
        "measured   177.1 GiB in use of 178.3 GiB, and 2.50 GiB more were asked for",
        *(f"would help {way}" for way in memory.GENERAL),
    ]


def test_out_of_memory_without_an_estimate(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"memory": {"needed_gib": null, "parts": {"weights": 9}}}')
    said = memory.lines(tmp_path, ["step=3 loss=2 memory_gib=160.10"])
    assert said[:2] == [
        "planned    9.0 GiB without activations (weights 9.0)",
        "measured   160.1 GiB in use",
    ]


def test_what_would_help_fits_also_with_what_the_estimate_has_missed(tmp_path: Path) -> None:
    plan, _ = planned()
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())

    def needed(*overrides: str) -> float:
        words = ["model=gpt_8b", "hardware=p6_b200", "layout=ddp"]
        words += [f"training.micro_batch_size={plan.config.training.micro_batch_size}",
                  f"layout.recompute={plan.config.layout.recompute}"]  # fmt: skip
        config = choices.config(*words, *overrides)
        held = resolve(config).held
        assert held is not None
        return held.needed / 2**30

    missed = 2.0  # the run wanted twice what was planned
    found = memory.ways(tmp_path, missed * needed())
    assert found
    for way in found:
        settings = way[: way.index(" (")].split()
        assert missed * needed(*settings) <= 178.3, way


def test_an_out_of_memory_stop_shows_both(
    account: Account, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "plan.json").write_text('{"memory": {"needed_gib": 150.2}}')
    account.goes([failed("AlgorithmError: rank 0 failed: OutOfMemoryError: CUDA out of memory, "
                         "exit code: 1")])  # fmt: skip
    account.log(NAME, "algo-1", "rank 0:", "Traceback (most recent call last):", "  File x", OOM)
    follow(run_dir)
    screen = capsys.readouterr().out
    assert screen.index("algo-1, rank 0:\n    Traceback") < screen.index("ended      out of memory")
    assert "planned    150.2 GiB of one GPU" in screen
    assert "measured   177.1 GiB in use of 178.3 GiB" in screen


def test_results_come_home(account: Account, run_dir: Path) -> None:
    account.goes([COMPLETED])
    for name, body in (("metrics.jsonl", b'{"step": 1}\n'), ("loss.png", b"png")):
        key = f"slipway/a/checkpoints/{name}"
        account.client("s3").put_object(Bucket=BUCKET, Key=key, Body=body)
    follow(run_dir)
    assert (run_dir / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (run_dir / "loss.png").read_bytes() == b"png"


def test_a_record_counts_what_was_submitted_again() -> None:
    jobs = [Job(name=n, created="", reason=r) for n, r in
            (("a", "first"), ("b", "resubmitted after crash"), ("c", "resumed"))]  # fmt: skip
    record = Record(region="x", account="1", request=request(), price_per_node_hour=None,
                    max_restarts=3, jobs=jobs)  # fmt: skip
    assert (record.restarts, record.nodes, record.first_name) == (1, 2, "a")
