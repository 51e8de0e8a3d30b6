"""From a reviewed request to a training job that is what was asked for.

Straight to boto3 and not through NeMo-Run, whose Experiment would start the same job: it packs a
task that our plan does not need, takes 5 s and ray to import, and hides errors of describe. Those
who work with it have launch/aws/executor.py, which calls this module.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from launch import start as start_file
from launch.aws import job as jobs
from launch.aws import preflight
from launch.aws.checks import s3_parts
from launch.aws.clients import Clients, code, refused, said
from launch.aws.record import FILE, LOCK, Job, Record, now
from launch.aws.request import NOBODY
from launch.local import Outcome
from launch.run_folder import lock
from planning.findings import ChoiceError, Finding, MachineError
from planning.plan import Plan
from planning.schema import SageMakerLaunch

CHANNEL = "plan"
CLOCKS = timedelta(seconds=30)  # by which clocks of AWS's may differ


def submit(
    run_dir: Path,
    request: dict[str, Any],
    start: dict[str, Any],
    launch: SageMakerLaunch,
    plan: Plan,
) -> Outcome:
    """Check the account, upload the plan, create the job and compare it with the request.

    Leaves run_dir/job.json. With launch.wait it follows the job to the run's end. Raises
    ChoiceError (placeholders, wrong values) or MachineError (account, quota, network).
    """
    refuse_placeholders(request)
    clients = Clients(launch.region)
    record = Record(
        region=clients.region,
        account=clients.identity[0],
        request=request,
        price_per_node_hour=plan.config.hardware.price_per_node_hour,
        max_restarts=launch.max_restarts,
        jobs=earlier(run_dir, clients),
    )
    preflight.check(request, clients)
    files = {"plan.yaml": plan.to_yaml(), start_file.FILE: start_file.to_json(start)}
    upload(request, files, clients)
    begin(run_dir, record, "resumed" if record.jobs else "first", clients)
    name = record.newest.name
    print(f"{'job':<10} {name}\n{'console':<10} {jobs.console(name, clients.region)}", flush=True)
    if launch.wait:
        from launch.aws import watch

        return watch.follow(run_dir, clients)
    return Outcome("submitted", 0, f"{'follow':<10} python launch/jobs.py watch {run_dir}", {})


def refuse_placeholders(request: Mapping[str, Any]) -> None:
    """ChoiceError if the request holds values that nobody gave."""
    settings = {"RoleArn": "launch.role", "AlgorithmSpecification": "launch.image"}
    places: dict[str, str] = {}
    for member, value in _strings("", request):
        if re.search(rf"\b{NOBODY}\b", value):
            top = member.split(".")[0]
            places.setdefault(settings.get(top, "launch.bucket"), value)
    if places:
        raise ChoiceError(
            [
                Finding("placeholder", "error", setting, f"{value} is a placeholder",
                        "give your account's (docs/sagemaker.md), or launch.dry_run=true")
                for setting, value in places.items()
            ]
        )  # fmt: skip


def _strings(where: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(f"{where}.{name}".lstrip("."), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(where, inner)
    elif isinstance(value, str):
        yield where, value


def earlier(run_dir: Path, clients: Clients) -> list[Job]:
    """The run's jobs so far. ChoiceError if the newest is still at work: two would write to the
    same checkpoints."""
    if not (run_dir / FILE).exists():
        return []
    record = Record.load(run_dir)
    there = clients if record.region == clients.region else Clients(record.region)
    found = jobs.describe(record.newest.name, there)
    if found is not None and not jobs.has_ended(found):
        raise ChoiceError(
            Finding(
                "job-at-work",
                "error",
                "run_dir",
                f"the job {record.newest.name} of this run is {jobs.state(found)}",
                f"stop it first (python launch/jobs.py stop {run_dir}), or take another run_dir",
            )
        )
    return record.jobs


def plan_prefix(request: Mapping[str, Any]) -> tuple[str, str]:
    """(bucket, prefix) of the channel that the plan travels in."""
    for channel in request["InputDataConfig"]:
        if channel["ChannelName"] == CHANNEL:
            return s3_parts(channel["DataSource"]["S3DataSource"]["S3Uri"])
    raise ChoiceError(
        Finding("no-plan-channel", "error", "request.json", f"it has no channel {CHANNEL}",
                "take the one that launch.dry_run=true wrote")
    )  # fmt: skip


def upload(request: Mapping[str, Any], files: Mapping[str, str], clients: Clients) -> None:
    """Put the plan where the job's channel is."""
    bucket, prefix = plan_prefix(request)
    for name, text in files.items():
        key = f"{prefix.rstrip('/')}/{name}"
        with said(f"upload s3://{bucket}/{key}", "launch.bucket"):
            clients("s3").put_object(Bucket=bucket, Key=key, Body=text.encode())


def begin(run_dir: Path, record: Record, reason: str, clients: Clients) -> None:
    """Create the job that record.request asks for, record it, and see that it is that job.

    The record is written before the job is made: a job that nobody knows of would go on charging.
    Raises MachineError, after stopping it, if the job is another than the one asked for, and
    before it is made if another process makes one: two would write to the same checkpoints.
    """
    with lock(run_dir, LOCK, "submits a job of"):
        _unchanged(run_dir, record)
        record.jobs.append(
            Job(name=record.request["TrainingJobName"], created=now(), reason=reason)
        )
        record.save(run_dir)
        _create(run_dir, record, clients)


def complete(run_dir: Path, record: Record, clients: Clients) -> None:
    """Go on where `begin` was left without an answer, in the same process: take the job that it
    recorded if it was made, else make it; and see that it is that job. Raises as begin does."""
    with lock(run_dir, LOCK, "submits a job of"):
        _unchanged(run_dir, record)
        job = jobs.describe(record.newest.name, clients)
        if job is None:
            _create(run_dir, record, clients)
        else:
            _keep(run_dir, record, str(job["TrainingJobArn"]), clients)


def _unchanged(run_dir: Path, record: Record) -> None:
    there = Record.load(run_dir).jobs if (run_dir / FILE).exists() else []
    if [job.name for job in there] != [job.name for job in record.jobs]:
        newest = there[-1].name if there else "none"
        raise MachineError(
            Finding("other-submission", "error", "run_dir", "another process has submitted a job "
                    f"of this run meanwhile; the newest is {newest}",
                    f"look at it: python launch/jobs.py status {run_dir}", machine=True)
        )  # fmt: skip


def _create(run_dir: Path, record: Record, clients: Clients) -> None:
    with said("create the training job"):
        began = time.monotonic()
        try:
            made = clients("sagemaker").create_training_job(**record.request)
        except Exception as error:
            if code(error) == "ResourceInUse" and (own := _made_since(began, record, clients)):
                # The answer to a first attempt was lost, and boto3 has tried again.
                return _keep(run_dir, record, own, clients)
            if refused(error):
                record.jobs.pop()  # there is no such job
                if record.jobs:
                    record.save(run_dir)
                else:
                    (run_dir / FILE).unlink()
            raise
    _keep(run_dir, record, made["TrainingJobArn"], clients)


def _keep(run_dir: Path, record: Record, arn: str, clients: Clients) -> None:
    record.newest.arn = arn
    record.save(run_dir)
    _compare(run_dir, record, clients)


def _made_since(began: float, record: Record, clients: Clients) -> str | None:
    """The ARN of the job of our name, if it is younger than our asking for it (monotonic seconds):
    by the service's clock, as ours may be wrong."""
    job = jobs.describe(record.newest.name, clients)
    if job is None:
        return None
    there = parsedate_to_datetime(job["ResponseMetadata"]["HTTPHeaders"]["date"])
    asked = there - timedelta(seconds=time.monotonic() - began)
    return None if job["CreationTime"] < asked - CLOCKS else str(job["TrainingJobArn"])


def _compare(run_dir: Path, record: Record, clients: Clients) -> None:
    name = record.newest.name
    described = jobs.describe(name, clients)
    if described is None:
        print(f"warning: {name} is made but cannot be described yet; it is not compared with the "
              "request", flush=True)  # fmt: skip
        return
    model = clients("sagemaker").meta.service_model
    known = set(model.operation_model("DescribeTrainingJob").output_shape.members)
    found = jobs.differences(record.request, described, known)
    for difference in found:
        if not difference.stops:
            print(f"warning: {difference}", flush=True)
    if not any(difference.stops for difference in found):
        return
    stop(name, clients)
    record.newest.end = {"kind": "refused", "reason": "it was not the job asked for", "step": None}
    record.save(run_dir)
    raise MachineError(
        [
            Finding("other-job", "error", "launch", f"the job is not what was asked for; {name} is "
                    f"stopped. {difference}",
                    "tell AWS's support; nothing of the run is lost", machine=True)
            for difference in found if difference.stops
        ]
    )  # fmt: skip


def stop(name: str, clients: Clients) -> bool:
    """Ask the job to stop: SIGTERM, 120 s to save, SIGKILL. False if it has ended already."""
    with said(f"stop {name}"):
        try:
            clients("sagemaker").stop_training_job(TrainingJobName=name)
        except Exception as error:
            if code(error) == "ValidationException":
                return False
            raise
    return True
