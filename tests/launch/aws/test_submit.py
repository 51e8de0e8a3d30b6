"""From a request to a job that is what was asked for, against moto's server."""

from __future__ import annotations

import json
import stat
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launch.aws import submit
from launch.aws.clients import Clients
from launch.aws.job import differences
from launch.aws.record import LOCK, Record
from launch.run_folder import lock
from planning.findings import ChoiceError, MachineError
from planning.plan import Plan
from planning.resolve import resolve
from planning.schema import SageMakerLaunch
from tests import choices
from tests.launch.aws.fake_aws import COMPLETED, REGION, TRAINING, Account, failed
from tests.launch.aws.requests import BUCKET, START, prepare, request, resources


@pytest.fixture(autouse=True)
def prepared(account: Account) -> None:
    prepare(account)


@cache
def planned(*overrides: str) -> tuple[Plan, SageMakerLaunch]:
    words = ("model=gpt_8b", "hardware=p6_b200", "layout=ddp", "launch=sagemaker")
    config = choices.config(*words, *overrides)
    plan = resolve(config).plan
    assert plan is not None
    assert isinstance(config.launch, SageMakerLaunch)
    return plan, config.launch


def start(run_dir: Path, given: dict[str, Any] | None = None, *overrides: str) -> Any:
    plan, launch = planned(*overrides)
    return submit.submit(run_dir, given or request(), START, launch, plan)


def test_the_job_gets_the_request_and_the_plan_byte_for_byte(
    account: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = start(tmp_path)
    assert (outcome.status, outcome.exit_status) == ("submitted", 0)
    assert account.requests == {request()["TrainingJobName"]: request()}

    def stored(name: str) -> str:
        key = f"slipway/a/plan/{name}"
        answer = account.client("s3").get_object(Bucket=BUCKET, Key=key)
        return str(answer["Body"].read().decode())

    assert stored("plan.yaml") == planned()[0].to_yaml()
    assert json.loads(stored("start.json")) == START
    screen = capsys.readouterr().out
    assert f"{REGION}.console.aws.amazon.com/sagemaker/home?region={REGION}#/jobs/gpt-32b" in screen


def test_the_record_is_its_owners_alone_and_says_all_that_jobs_need(tmp_path: Path) -> None:
    start(tmp_path, None, "hardware.price_per_node_hour=100.0", "launch.max_restarts=5")
    assert stat.S_IMODE((tmp_path / "job.json").stat().st_mode) == 0o600
    record = Record.load(tmp_path)
    assert (record.region, record.account) == (REGION, "123456789012")
    assert (record.price_per_node_hour, record.max_restarts) == (100.0, 5)
    assert record.request == request()
    (job,) = record.jobs
    assert (job.name, job.reason) == ("gpt-32b-20261201-120000", "first")
    assert job.arn == f"arn:aws:sagemaker:{REGION}:123456789012:training-job/{job.name}"


def test_a_job_whose_answer_was_lost_is_kept(account: Account, tmp_path: Path) -> None:
    account.loses_answer = True
    assert start(tmp_path).status == "submitted"
    assert Record.load(tmp_path).newest.arn is not None
    assert account.calls == ["CreateTrainingJob"] * 2
    assert len(account.requests) == 1


def test_a_job_is_kept_though_no_answer_ever_came(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error within the service does not say that there is no job."""
    from botocore.exceptions import ClientError

    answer = {"Error": {"Code": "InternalFailure"}, "ResponseMetadata": {"HTTPStatusCode": 500}}
    clients = Clients()
    make = clients("sagemaker").create_training_job

    def broken(**asked: Any) -> None:
        make(**asked)
        raise ClientError(answer, "CreateTrainingJob")  # type: ignore[arg-type]

    monkeypatch.setattr(clients("sagemaker"), "create_training_job", broken)
    with pytest.raises(MachineError, match="an error within AWS: InternalFailure"):
        submit.begin(tmp_path, record(), "first", clients)
    assert Record.load(tmp_path).newest.name in account.requests


def record(**changes: Any) -> Record:
    given = {"region": REGION, "account": "123456789012", "request": request(),
             "price_per_node_hour": None, "max_restarts": 0}  # fmt: skip
    return Record.model_validate(given | changes)


class TestTwoAtOnce:
    """Two jobs of one run would write to the same checkpoints, and both are paid for."""

    def test_one_waits_for_nobody(self, account: Account, tmp_path: Path) -> None:
        with (
            lock(tmp_path, LOCK),
            pytest.raises(MachineError, match="another process submits a job of"),
        ):
            submit.begin(tmp_path, record(), "first", Clients())
        assert account.calls == []

    def test_a_record_that_another_has_changed_since(
        self, account: Account, tmp_path: Path
    ) -> None:
        late = record()
        start(tmp_path)
        with pytest.raises(MachineError, match="another process has submitted a job of this run"):
            submit.begin(tmp_path, late, "first", Clients())
        assert len(account.requests) == 1
        assert len(Record.load(tmp_path).jobs) == 1

    def test_an_end_is_kept_beside_a_job_that_came_meanwhile(
        self, account: Account, tmp_path: Path
    ) -> None:
        account.goes([failed("AlgorithmError: x, exit code: 1")])
        start(tmp_path)
        looking = Record.load(tmp_path)
        start(tmp_path, request(TrainingJobName="gpt-32b-20261201-120000-2"))
        looking.keep_end(tmp_path, {"kind": "crash", "reason": "x", "step": 3})
        assert [job.end and job.end["step"] for job in Record.load(tmp_path).jobs] == [3, None]


class TestRefusals:
    def test_placeholders_each_with_its_setting(self, account: Account, tmp_path: Path) -> None:
        given = request(
            RoleArn="arn:aws:iam::000000000000:role/slipway-job",
            OutputDataConfig={"S3OutputPath": "s3://slipway-000000000000-us-east-1/x"},
        )
        given["AlgorithmSpecification"]["TrainingImage"] = (
            "000000000000.dkr.ecr.us-east-1.amazonaws.com/slipway:latest"
        )
        with pytest.raises(ChoiceError) as refused:
            start(tmp_path, given)
        assert {f.setting for f in refused.value.findings} == {
            "launch.role", "launch.image", "launch.bucket"}  # fmt: skip
        assert refused.value.exit_status == 2
        assert account.calls == []

    def test_a_failed_check_makes_no_job(self, account: Account, tmp_path: Path) -> None:
        account.quotas["ml.p6-b200.48xlarge for training job usage"] = 0.0
        with pytest.raises(MachineError):
            start(tmp_path)
        assert account.calls == []
        assert not (tmp_path / "job.json").exists()

    @pytest.mark.parametrize(
        ("answer", "says", "kind"),
        [
            (("ResourceLimitExceeded", "the account-level limit is 0"), "Service Quotas",
             MachineError),
            (("ValidationException", "Instance type not available in this region"),
             "not available in this region", ChoiceError),
            (("CapacityError", "no capacity"), "take a training plan", MachineError),
            (("AccessDeniedException", "User: x is not authorized to perform: "
              "sagemaker:CreateTrainingJob on resource: y"),
             "allow sagemaker:CreateTrainingJob", MachineError),
        ],
    )  # fmt: skip
    def test_what_the_service_refuses_is_one_line_and_leaves_no_record(
        self, account: Account, tmp_path: Path, answer: tuple[str, str], says: str, kind: Any
    ) -> None:
        account.refuses = answer
        with pytest.raises(kind) as refused:
            start(tmp_path)
        assert says in str(refused.value)
        assert len(refused.value.findings) == 1
        assert not (tmp_path / "job.json").exists()

    def test_a_name_that_somebody_else_took_meanwhile(
        self, account: Account, tmp_path: Path
    ) -> None:
        account.client("sagemaker").create_training_job(**request())
        account.changes = {"CreationTime": 1.0}  # long ago
        with pytest.raises(ChoiceError, match="choose another name"):
            submit.begin(tmp_path, record(), "first", Clients())
        assert not (tmp_path / "job.json").exists()

    def test_a_second_job_while_the_first_is_at_work(self, tmp_path: Path) -> None:
        start(tmp_path)
        with pytest.raises(ChoiceError, match=r"is InProgress \(Training\)"):
            start(tmp_path, request(TrainingJobName="second"))

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ('"jobs"', ""),
            ('"InstanceCount": 2', '"InstanceCount": "two"'),
            ('"request": {', '"request": {}, "was": {'),
            ('"end": null', '"end": {"kind": "crash"}'),
        ],
    )
    def test_a_record_that_somebody_has_changed(
        self, tmp_path: Path, before: str, after: str
    ) -> None:
        start(tmp_path)
        whole = (tmp_path / "job.json").read_text()
        assert before in whole
        (tmp_path / "job.json").write_text(whole.replace(before, after))
        with pytest.raises(ChoiceError, match=r"job\.json cannot be read"):
            Record.load(tmp_path)


def test_a_second_job_after_the_first_goes_on_with_its_record(
    account: Account, tmp_path: Path
) -> None:
    account.goes([failed("AlgorithmError: x, exit code: 1")])
    start(tmp_path)
    start(tmp_path, request(TrainingJobName="gpt-32b-20261201-120000-2"))
    assert [job.reason for job in Record.load(tmp_path).jobs] == ["first", "resumed"]


class TestComparison:
    """Threads: a training plan once was dropped in silence, and the job ran on demand."""

    def test_a_training_plan_that_was_dropped_stops_the_job(
        self, account: Account, tmp_path: Path
    ) -> None:
        arn = account.make_plan("block", "ml.p6-b200.48xlarge", 2)
        account.changes = {"ResourceConfig": resources()}
        with pytest.raises(MachineError) as refused:
            start(tmp_path, request(ResourceConfig=resources(TrainingPlanArn=arn)))
        (finding,) = refused.value.findings
        assert f"ResourceConfig.TrainingPlanArn: asked for '{arn}', the job has nothing" in (
            finding.message
        )
        assert account.stopped == ["gpt-32b-20261201-120000"]
        assert Record.load(tmp_path).newest.end == {
            "kind": "refused", "reason": "it was not the job asked for", "step": None}  # fmt: skip

    def test_what_only_changes_what_is_shown_is_said(
        self, account: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        algorithm = {**request()["AlgorithmSpecification"], "MetricDefinitions": []}
        account.changes = {"AlgorithmSpecification": algorithm}
        assert start(tmp_path).status == "submitted"
        assert "warning: AlgorithmSpecification.MetricDefinitions: asked for" in (
            capsys.readouterr().out
        )

    @pytest.mark.parametrize(
        ("member", "value", "where"),
        [
            ("EnableManagedSpotTraining", False, "EnableManagedSpotTraining"),
            ("Environment", {}, "Environment.HF_HUB_OFFLINE"),
            ("CheckpointConfig", None, "CheckpointConfig.S3Uri"),
            ("InputDataConfig", [], "InputDataConfig.web.ChannelName"),
            ("RetryStrategy", None, "RetryStrategy.MaximumRetryAttempts"),
            ("StoppingCondition", {"MaxRuntimeInSeconds": 3600},
             "StoppingCondition.MaxRuntimeInSeconds"),
            ("ResourceConfig", resources(InstanceCount=1), "ResourceConfig.InstanceCount"),
        ],
    )  # fmt: skip
    def test_every_other_difference_would_stop_it(
        self, member: str, value: Any, where: str
    ) -> None:
        asked = request(EnableManagedSpotTraining=True)
        job = {**asked, member: value}
        found = differences(asked, job, set(asked) - {"Tags"})
        assert where in {d.where for d in found}
        assert all(d.stops for d in found)

    def test_spellings_of_one_value_are_no_difference(self) -> None:
        asked = request(VpcConfig={"Subnets": ["a", "b"], "SecurityGroupIds": ["g"]})
        job = request(VpcConfig={"Subnets": ["b", "a"], "SecurityGroupIds": ["g"]}, Tags=None)
        job["OutputDataConfig"] = {"S3OutputPath": asked["OutputDataConfig"]["S3OutputPath"] + "/",
                                   "CompressionType": "GZIP"}  # fmt: skip
        del job["EnableNetworkIsolation"]
        job["StoppingCondition"] = {**job["StoppingCondition"], "MaxPendingTimeInSeconds": 7200}
        assert differences(asked, job, set(asked) - {"Tags"}) == []


def test_with_wait_the_run_is_followed_to_its_end(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.aws import watch

    monkeypatch.setattr(watch, "POLL", 0.01)
    monkeypatch.setattr(watch, "LATE", 0)
    account.goes([TRAINING, TRAINING, COMPLETED])
    result = {"status": "done", "steps": 10, "final_loss": 2.5}
    account.client("s3").put_object(
        Bucket=BUCKET, Key="slipway/a/checkpoints/result.json", Body=json.dumps(result)
    )
    outcome = start(tmp_path, None, "launch.wait=true")
    assert (outcome.status, outcome.exit_status, outcome.result) == ("done", 0, result)
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_the_region_that_was_chosen_is_used(tmp_path: Path) -> None:
    assert Clients("eu-west-1").region == "eu-west-1"
    with pytest.raises(ChoiceError, match="the job in eu-west-1"):
        start(tmp_path, None, "launch.region=eu-west-1")
