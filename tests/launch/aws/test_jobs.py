"""launch/jobs.py, as a person calls it, against moto's server."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from launch import jobs
from launch.aws import submit, watch
from launch.aws.clients import Clients
from launch.aws.record import Record
from tests.launch.aws.fake_aws import COMPLETED, REGION, STOPPED, TRAINING, Account, failed
from tests.launch.aws.requests import BUCKET, IMAGE, prepare, request, resources
from tests.launch.aws.test_submit import planned

NAME = "gpt-32b-20261201-120000"
RUN_FOLDER = "slipway/a/checkpoints"  # in S3


@pytest.fixture
def run_dir(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(account)
    monkeypatch.setattr(watch, "POLL", 0)
    monkeypatch.setattr(watch, "LATE", 0)
    folder = tmp_path / "runs" / "gpt_32b" / "a"
    folder.mkdir(parents=True)
    (folder / "plan.yaml").write_text(planned("training.train_steps=100")[0].to_yaml())
    return folder


def submitted(run_dir: Path, *, price: float | None = 100.0, **changes: Any) -> Record:
    clients = Clients()
    record = Record(region=REGION, account="123456789012", request=request(**changes),
                    price_per_node_hour=price, max_restarts=2)  # fmt: skip
    submit.begin(run_dir, record, "first", clients)
    return record


def stored(account: Account, name: str, body: bytes) -> None:
    account.client("s3").put_object(Bucket=BUCKET, Key=f"{RUN_FOLDER}/{name}", Body=body)


class Screen:
    """What a command prints, by its first words."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines()

    def __getitem__(self, word: str) -> str:
        found = [line[len(word) :].strip() for line in self.lines if line.startswith(word)]
        assert found, self.text
        return found[0]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def command(*words: str | Path, status: int = 0) -> Screen:
        capsys.readouterr()
        assert jobs.main([str(word) for word in words]) == status
        both = capsys.readouterr()
        return Screen(both.out + both.err)

    return command


class TestStatus:
    def test_of_a_run_that_trains(self, account: Account, run_dir: Path, run: Any) -> None:
        started = datetime.now(UTC) - timedelta(minutes=30)
        message = [{"Status": "Training", "StartTime": started,
                    "StatusMessage": "Training image download completed."}]  # fmt: skip
        account.goes([{**TRAINING, "TrainingStartTime": started.timestamp(),
                       "SecondaryStatusTransitions": [
                           {**message[0], "StartTime": started.timestamp()}]}])  # fmt: skip
        submitted(run_dir)
        account.log(NAME, "algo-1", "step=50 loss=2.5 tokens_per_s_per_gpu=1000.0 mfu=0.4")
        stored(account, "checkpoints/latest_checkpointed_iteration.txt", b"40")
        screen = run("status", run_dir)
        assert screen["job"] == NAME
        assert screen["state"] == (
            "InProgress (Training): Training image download completed.")  # fmt: skip
        assert screen["progress"] == "step 50/100  loss 2.5000  1,000 tokens/s/GPU  MFU 40.0%"
        assert screen["nodes"] == "2 x ml.p6-b200.48xlarge, on demand"
        assert re.fullmatch(r"1\.0\d node hours, about \$10\d\.\d\d", screen["cost"])
        assert screen["checkpoint"] == f"s3://{BUCKET}/{RUN_FOLDER}/checkpoints/iter_0000040"
        assert screen["console"].endswith(f"#/jobs/{NAME}")
        assert "$252Faws$252Fsagemaker$252FTrainingJobs" in screen["log "]

    def test_of_a_failed_one(self, account: Account, run_dir: Path, run: Any) -> None:
        reason = "AlgorithmError: algo-2: rank 9 failed: ValueError: bad token, exit code: 1"
        account.goes([TRAINING, {**failed(reason), "BillableTimeInSeconds": 3600}])
        submitted(run_dir, price=None)
        account.log(NAME, "algo-1", "step=3 loss=2.5")
        account.log(NAME, "algo-2", "rank 9:", "Traceback (most recent call last):",
                    '  File "x"', "ValueError: bad token")  # fmt: skip
        screen = run("status", run_dir)
        assert screen["state"] == "Failed"
        assert screen["ended"] == f"crash, after step 3: {reason}"
        assert "algo-2, rank 9:\n    Traceback (most recent call last):" in screen.text
        assert screen["cost"] == "2.00 node hours; hardware.price_per_node_hour is not set"
        assert screen["checkpoint"] == "none yet"
        assert Record.load(run_dir).newest.end == {"kind": "crash", "reason": reason, "step": 3}

    def test_in_a_training_plan_time_is_paid(
        self, account: Account, run_dir: Path, run: Any
    ) -> None:
        arn = account.make_plan("block", "ml.p6-b200.48xlarge", 2)
        account.goes([TRAINING, {**COMPLETED, "BillableTimeInSeconds": 1800}])
        submitted(run_dir, ResourceConfig=resources(TrainingPlanArn=arn))
        screen = run("status", run_dir)
        assert screen["nodes"].endswith("training plan")
        assert screen["cost"] == "1.00 node hours, paid with the training plan"

    def test_after_a_restart_says_why(self, account: Account, run_dir: Path, run: Any) -> None:
        account.goes([failed("InternalServerError: x")], [TRAINING, COMPLETED])
        record = submitted(run_dir)
        record.newest.end = {"kind": "service", "reason": "InternalServerError: x", "step": 7}
        watch.resubmit(run_dir, record, "resubmitted after service", Clients())
        screen = run("status", run_dir)
        assert screen["before"] == f"{NAME}: service, after step 7: InternalServerError: x"
        assert screen["job"] == f"{NAME}-2 (resubmitted after service)"

    def test_of_a_folder_that_was_not_submitted(self, tmp_path: Path, run: Any) -> None:
        screen = run("status", tmp_path, status=2)
        assert "it has no job.json" in screen.text

    def test_of_another_account(self, account: Account, run_dir: Path, run: Any) -> None:
        record = submitted(run_dir)
        record.account = "999999999999"
        record.save(run_dir)
        screen = run("status", run_dir, status=3)
        assert "the run is in account 999999999999, you are in 123456789012" in screen.text


class TestLogs:
    def told(self, account: Account) -> None:
        account.log(NAME, "algo-1", (0, "a"), (2, "step=1 loss=3"), (4, "c"))
        account.log(NAME, "algo-2", (1, "b"), (3, "d"))

    def test_lines_of_all_hosts_are_in_one_order(
        self, account: Account, run_dir: Path, run: Any
    ) -> None:
        submitted(run_dir)
        self.told(account)
        found = [line[10:] for line in run("logs", run_dir).lines]
        assert found == ["algo-1  a", "algo-2  b", "algo-1  step=1 loss=3", "algo-2  d",
                         "algo-1  c"]  # fmt: skip

    def test_some_of_them(self, account: Account, run_dir: Path, run: Any) -> None:
        submitted(run_dir)
        self.told(account)
        assert [x[10:] for x in run("logs", run_dir, "--host", "algo-2").lines] == [
            "algo-2  b", "algo-2  d"]  # fmt: skip
        assert [x[10:] for x in run("logs", run_dir, "--grep", "step=").lines] == [
            "algo-1  step=1 loss=3"]  # fmt: skip
        assert [x[10:] for x in run("logs", run_dir, "--last", "1").lines] == ["algo-1  c"]

    def test_a_failure_comes_first(self, account: Account, run_dir: Path, run: Any) -> None:
        account.goes([failed("AlgorithmError: algo-2: rank 9 failed: ValueError, exit code: 1")])
        submitted(run_dir)
        account.log(NAME, "algo-1", "step=1 loss=3")
        account.log(
            NAME, "algo-2", "rank 9:", "Traceback (most recent call last):", "ValueError: x"
        )
        assert run("logs", run_dir).lines[:5] == [
            "--- the first failure: algo-2, rank 9",
            "Traceback (most recent call last):",
            "ValueError: x",
            "--- the log",
            run("logs", run_dir).lines[4],
        ]

    def test_of_one_rank_is_all_that_it_printed(
        self, account: Account, run_dir: Path, run: Any
    ) -> None:
        submitted(run_dir)
        stored(account, "logs/rank-9.log", b"one\ntwo\n")
        assert run("logs", run_dir, "--rank", "9").lines == ["one", "two"]
        assert "no log of rank 8 is in S3" in run("logs", run_dir, "--rank", "8", status=2).text

    def test_before_the_first_line(self, account: Account, run_dir: Path, run: Any) -> None:
        submitted(run_dir)
        assert run("logs", run_dir).text == "the log is empty so far\n"

    def test_followed_to_the_end(
        self, account: Account, run_dir: Path, run: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jobs, "FOLLOW_EVERY", 0)
        account.goes([TRAINING, TRAINING, TRAINING, COMPLETED])
        submitted(run_dir)
        self.told(account)
        assert len(run("logs", run_dir, "--follow").lines) == 5

    def test_a_wrong_expression(self, run_dir: Path, run: Any) -> None:
        submitted(run_dir)
        assert "--grep: (" in run("logs", run_dir, "--grep", "(", status=2).text


class TestStopAndResume:
    def test_stop(self, account: Account, run_dir: Path, run: Any) -> None:
        submitted(run_dir)
        assert "saves, within 120 s" in run("stop", run_dir).text
        assert account.stopped == [NAME]

    def test_stop_of_one_that_has_ended(self, account: Account, run_dir: Path, run: Any) -> None:
        account.goes([COMPLETED])
        submitted(run_dir)
        assert run("stop", run_dir).text == f"{NAME} has ended already\n"

    def test_resume_is_the_same_request_under_the_next_name(
        self, account: Account, run_dir: Path, run: Any
    ) -> None:
        account.goes([STOPPED], [TRAINING])
        submitted(run_dir)
        stored(account, "checkpoints/latest_checkpointed_iteration.txt", b"40")
        screen = run("resume", run_dir)
        assert screen["job"] == f"{NAME}-2"
        assert screen["from"].endswith("iter_0000040")
        first, second = account.requests.values()
        assert {**second, "TrainingJobName": NAME} == first

    def test_resume_of_what_would_come_again(
        self, account: Account, run_dir: Path, run: Any
    ) -> None:
        account.goes([failed("AlgorithmError: CUDA out of memory, exit code: 1")], [TRAINING])
        submitted(run_dir)
        said = run("resume", run_dir, status=2).text
        assert "The same request again: it would run out of memory again" in said
        assert len(account.requests) == 1
        assert run("resume", run_dir, "--anyway")["job"] == f"{NAME}-2"

    def test_resume_of_one_that_is_at_work(self, account: Account, run_dir: Path, run: Any) -> None:
        submitted(run_dir)
        assert "stop it first" in run("resume", run_dir, status=2).text
        assert len(account.requests) == 1

    def test_resume_checks_the_account_again(
        self, account: Account, run_dir: Path, run: Any
    ) -> None:
        account.goes([STOPPED])
        submitted(run_dir)
        account.quotas["ml.p6-b200.48xlarge for training job usage"] = 0.0
        assert "quota" in run("resume", run_dir, status=3).text
        assert len(account.requests) == 1

    def test_resume_and_watch(self, account: Account, run_dir: Path, run: Any) -> None:
        account.goes([STOPPED], [TRAINING, COMPLETED])
        submitted(run_dir)
        stored(account, "result.json", b'{"status": "done", "final_loss": 2.5}')
        assert run("resume", run_dir, "--watch")["done"] == f"{run_dir}, loss 2.5000"


def test_list(account: Account, run_dir: Path, tmp_path: Path, run: Any) -> None:
    other = tmp_path / "runs" / "b"
    other.mkdir()
    submitted(run_dir)
    account.goes([COMPLETED])
    submitted(other, TrainingJobName="other")
    lines = run("list", tmp_path / "runs").lines
    assert [line.split()[:3] for line in lines[1:]] == [
        [str(run_dir), NAME, "InProgress"], [str(other), "other", "Completed"]]  # fmt: skip
    (other / "job.json").write_text("{")
    screen = run("list", tmp_path / "runs")
    assert "job.json cannot be read" in screen.text
    assert sum(NAME in line for line in screen.lines) == 1
    assert "no run below" in run("list", tmp_path / "nothing").text


class TestCleanup:
    @pytest.fixture
    def left(self, account: Account, run_dir: Path) -> Path:
        account.goes([{**STOPPED, "WarmPoolStatus": {"Status": "Available"}}])
        arn = account.make_plan("block", "ml.p6-b200.48xlarge", 2)
        submitted(run_dir, ResourceConfig=resources(TrainingPlanArn=arn))
        stored(account, "checkpoints/iter_0000040/shard", b"x" * 2**20)
        stored(account, "metrics.jsonl", b"{}")
        s3 = account.client("s3")
        s3.put_object(Bucket=BUCKET, Key="slipway/a/plan/plan.yaml", Body=b"plan")
        s3.put_object(Bucket=BUCKET, Key=f"slipway/a/output/{NAME}/output/model", Body=b"m")
        s3.put_object(Bucket=BUCKET, Key=f"{RUN_FOLDER}-of-another-run/x", Body=b"keep")
        s3.create_multipart_upload(Bucket=BUCKET, Key=f"{RUN_FOLDER}/checkpoints/iter_1/part")
        account.log(NAME, "algo-1", "a")
        return run_dir

    def keys(self, account: Account) -> list[str]:
        found = account.client("s3").list_objects_v2(Bucket=BUCKET)["Contents"]
        return [entry["Key"] for entry in found]

    def test_lists_all_that_is_left_with_what_it_costs(self, left: Path, run: Any) -> None:
        screen = run("cleanup", left)
        rows = {line.split()[0]: line for line in screen.lines[1:-1]}
        assert set(rows) == {"warm-pool", "plan", "checkpoints", "output", "uploads", "logs",
                             "image", "training-plan"}  # fmt: skip
        assert "2 objects, 1 MiB" in rows["checkpoints"]
        assert "$0.00 a month" in rows["checkpoints"]
        assert "1000.00 USD, paid" in rows["training-plan"]
        assert "cannot be given back" in rows["training-plan"]
        assert "other runs may use it" in rows["image"]

    def test_deletes_nothing_by_itself(self, account: Account, left: Path, run: Any) -> None:
        before = self.keys(account)
        run("cleanup", left)
        assert self.keys(account) == before

    def test_deletes_what_is_named_and_confirmed(
        self, account: Account, left: Path, run: Any
    ) -> None:
        screen = run("cleanup", left, "--delete", "checkpoints", "uploads", "warm-pool", "logs",
                     "--confirm", NAME)  # fmt: skip
        assert f"deleted 2 objects of s3://{BUCKET}/{RUN_FOLDER}/" in screen.text
        assert f"{RUN_FOLDER}-of-another-run/x" in self.keys(account)
        assert "slipway/a/plan/plan.yaml" in self.keys(account)
        kinds = {line.split()[0] for line in run("cleanup", left).lines[1:-1]}
        assert kinds == {"plan", "output", "image", "training-plan"}

    def test_nothing_of_another_run_goes_with_an_edited_record(
        self, account: Account, left: Path, run: Any
    ) -> None:
        record, before = left / "job.json", self.keys(account)
        record.write_text(record.read_text().replace(
            f"{RUN_FOLDER}\"", f"{RUN_FOLDER}-of-another-run\""))  # fmt: skip
        words = ("cleanup", left, "--delete", "checkpoints", "--confirm", NAME)
        said = run(*words, status=2).text
        assert "job.json is not what the job was given: CheckpointConfig.S3Uri" in said
        assert self.keys(account) == before

    def test_the_image_goes_by_its_tag(self, account: Account, left: Path, run: Any) -> None:
        run("cleanup", left, "--delete", "image", "--confirm", NAME)
        ecr = account.client("ecr")
        assert ecr.list_images(repositoryName="slipway")["imageIds"] == [], IMAGE

    @pytest.mark.parametrize("typed", ["", "yes", NAME[:-1]])
    def test_not_without_the_runs_name(
        self, account: Account, left: Path, run: Any, monkeypatch: pytest.MonkeyPatch, typed: str
    ) -> None:
        monkeypatch.setattr("builtins.input", lambda _: typed)
        before = self.keys(account)
        assert "nothing is done" in run("cleanup", left, "--delete", "checkpoints", status=2).text
        assert self.keys(account) == before

    def test_what_is_not_there_or_cannot_go(self, left: Path, run: Any) -> None:
        said = run("cleanup", left, "--delete", "checkpoint", "--confirm", NAME, status=2).text
        assert "did you mean checkpoints?" in said
        said = run("cleanup", left, "--delete", "training-plan", "--confirm", NAME, status=2).text
        assert "cannot be deleted" in said

    def test_not_under_a_job_that_writes(self, account: Account, run_dir: Path, run: Any) -> None:
        submitted(run_dir)
        stored(account, "metrics.jsonl", b"{}")
        command = ("cleanup", run_dir, "--confirm", NAME, "--delete")
        assert "still writes there" in run(*command, "checkpoints", status=2).text
        assert run(*command, "job").lines[-1] == f"stopping {NAME}"

    def test_every_jobs_own_plan_is_found(self, account: Account, run_dir: Path, run: Any) -> None:
        account.goes([STOPPED], [STOPPED])
        channels = request()["InputDataConfig"]
        channels[0]["DataSource"]["S3DataSource"]["S3Uri"] = f"s3://{BUCKET}/x/plan/{NAME}/"
        record = submitted(run_dir, InputDataConfig=channels)
        watch.resubmit(run_dir, record, "resumed", Clients())
        for name in (NAME, f"{NAME}-2", f"{NAME}-3"):
            account.client("s3").put_object(Bucket=BUCKET, Key=f"x/plan/{name}/plan.yaml", Body=b"")
        rows = [line for line in run("cleanup", run_dir).lines if line.startswith("plan ")]
        assert [row.split()[1] for row in rows] == [
            f"s3://{BUCKET}/x/plan/{NAME}/,", f"s3://{BUCKET}/x/plan/{NAME}-2/,"]  # fmt: skip

    def test_nothing(self, account: Account, run_dir: Path, run: Any) -> None:
        account.goes([COMPLETED])
        algorithm = {**request()["AlgorithmSpecification"], "TrainingImage": "elsewhere"}
        submitted(run_dir, AlgorithmSpecification=algorithm)
        assert run("cleanup", run_dir).text == "nothing of the run is left in the account\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        jobs.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in ("list", "status", "logs", "watch", "stop",
                                                     "resume", "cleanup"))  # fmt: skip


def test_the_record_is_json_that_others_can_read(run_dir: Path, account: Account) -> None:
    submitted(run_dir)
    found = json.loads((run_dir / "job.json").read_text())
    assert set(found) == {"version", "region", "account", "request", "price_per_node_hour",
                          "max_restarts", "jobs"}  # fmt: skip
