"""Plan and launch settings -> the CreateTrainingJob request: a pure function.

The dictionary is exactly what boto3's create_training_job is given. The run itself travels as two
files in the channel `plan`, plan.yaml and start.json: not as hyperparameters or environment, which
have limits (2,500 and 512 characters) and change what they hold on their way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from launch import start as start_file
from launch.aws import channels
from launch.checks import CHANNEL
from planning.findings import Finding
from planning.plan import Plan
from planning.schema import SageMakerLaunch
from training.events import LOG_METRICS

NOBODY = "000000000000"  # the account of what was not given; no real one has this number
REGION = "us-east-1"  # in placeholders only
CHECKPOINTS = "/opt/ml/checkpoints"  # SageMaker keeps this folder in S3 while the job runs
TENSORBOARD = "/opt/ml/output/tensorboard"
LONGEST_NAME = 63  # CreateTrainingJob's TrainingJobName
OWN_TAGS = ("slipway-run", "slipway-model", "slipway-plan")


def job_name(run: str, number: int) -> str:
    """Of the run's job `number`, from 1: names are taken once and for all in an account."""
    return run if number == 1 else f"{run[: LONGEST_NAME - 5]}-{number}"


def location(launch: SageMakerLaunch, run: str) -> str:
    """The S3 folder of a run: plan/, run/ (checkpoints, metrics, logs) and output/ are in it."""
    bucket = launch.bucket or f"slipway-{NOBODY}-{launch.region or REGION}"
    return "s3://" + "/".join(filter(None, (bucket, launch.prefix.strip("/"), run)))


def run_folder(launch: SageMakerLaunch) -> str:
    """The run's folder in the container."""
    if launch.run_folder is None:
        return CHECKPOINTS
    name = channels.channel_of(launch.run_folder) or ""
    rest = launch.run_folder.removeprefix(CHANNEL + name).strip("/")
    return "/".join(filter(None, (channels.folder(name), rest)))


def build(plan: Plan, launch: SageMakerLaunch, run: str, number: int = 1) -> dict[str, Any]:
    """The request for job `number` of the run named `run`.

    The settings have passed launch/aws/rules.py; what was not given is a placeholder (see
    `placeholders`).
    """
    there = location(launch, run)
    name = job_name(run, number)
    request: dict[str, Any] = {
        "TrainingJobName": name,
        "RoleArn": launch.role or f"arn:aws:iam::{NOBODY}:role/slipway-job",
        "AlgorithmSpecification": {
            "TrainingImage": launch.image
            or f"{NOBODY}.dkr.ecr.{launch.region or REGION}.amazonaws.com/slipway:latest",
            "TrainingInputMode": "File",
            "MetricDefinitions": [
                {"Name": metric, "Regex": regex} for metric, regex in LOG_METRICS.items()
            ],
        },
        "InputDataConfig": channels.build(launch, f"{there}/plan/{name}/"),
        "OutputDataConfig": {
            "S3OutputPath": f"{there}/output",
            "CompressionType": "NONE",  # a large model would be packed for hours
        },
        "ResourceConfig": {
            "InstanceType": plan.config.hardware.instance_type,
            "InstanceCount": plan.nodes,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": seconds(launch.max_run_hours)},
        "EnableManagedSpotTraining": launch.spot,
        "EnableNetworkIsolation": launch.network_isolation,
        "EnableInterContainerTrafficEncryption": launch.encrypt_traffic,
        "Tags": _tags(plan, launch, run),
    }
    resources, stopping = request["ResourceConfig"], request["StoppingCondition"]
    if launch.training_plan:
        resources["TrainingPlanArn"] = launch.training_plan
    if launch.warm_pool_minutes:
        resources["KeepAlivePeriodInSeconds"] = launch.warm_pool_minutes * 60
    if launch.spot:
        stopping["MaxWaitTimeInSeconds"] = wait_seconds(launch)
    if launch.max_pending_hours is not None:
        stopping["MaxPendingTimeInSeconds"] = seconds(launch.max_pending_hours)
    if launch.run_folder is None:
        request["CheckpointConfig"] = {"S3Uri": f"{there}/run", "LocalPath": CHECKPOINTS}
    if launch.subnets or launch.security_groups:
        request["VpcConfig"] = {
            "Subnets": list(launch.subnets),
            "SecurityGroupIds": list(launch.security_groups),
        }
    if launch.output_kms_key:
        request["OutputDataConfig"]["KmsKeyId"] = launch.output_kms_key
    if launch.environment:
        request["Environment"] = dict(launch.environment)
    if launch.internal_retries:
        request["RetryStrategy"] = {"MaximumRetryAttempts": launch.internal_retries}
    if launch.remote_debug:
        request["RemoteDebugConfig"] = {"EnableRemoteDebug": True}
    if launch.health_check:
        request["InfraCheckConfig"] = {"EnableInfraCheck": True}
    if launch.tensorboard_output:
        request["TensorBoardOutputConfig"] = {
            "S3OutputPath": f"{there}/tensorboard",
            "LocalPath": TENSORBOARD,
        }
    return request


def start(plan: Plan, launch: SageMakerLaunch, run: str) -> dict[str, Any]:
    """start.json of the run's jobs."""
    roots = channels.roots(launch)
    if launch.tensorboard_output:
        roots["run:/tensorboard"] = TENSORBOARD
    return start_file.start(
        plan,
        launch,
        name=run,
        run_dir=run_folder(launch),
        shared_run_dir=launch.run_folder is not None,
        roots=roots,
        stop_before_end_s=launch.stop_before_end_minutes * 60,
    )


def seconds(hours: float) -> int:
    return round(hours * 3600)


def wait_seconds(launch: SageMakerLaunch) -> int:
    """Spot: for capacity and for running."""
    hours = launch.max_wait_hours
    return seconds(2 * launch.max_run_hours if hours is None else hours)


def _tags(plan: Plan, launch: SageMakerLaunch, run: str) -> list[dict[str, str]]:
    digest = hashlib.sha256(plan.to_yaml().encode()).hexdigest()[:16]
    own = dict(zip(OWN_TAGS, (run, plan.name, digest), strict=True))
    given: Mapping[str, str] = launch.tags or {}
    return [{"Key": key, "Value": value} for key, value in {**given, **own}.items()]


def placeholders(launch: SageMakerLaunch, dry: bool) -> list[Finding]:
    """A finding for each value of the account that nobody gave: a warning in a dry run, whose
    request then holds a placeholder, and an error else."""
    ways = {
        "role": "the ARN of the role that the job runs as",
        "image": "the image's URI in ECR, as python tools/image.py push prints it",
        "bucket": "a bucket of yours, in the job's region",
    }
    said = f"the request holds a placeholder (account {NOBODY})" if dry else "a job needs it"
    or_dry = "" if dry else "; launch.dry_run=true does without"
    return [
        Finding(
            "placeholder",
            "warning" if dry else "error",
            f"launch.{name}",
            f"nobody gave it: {said}",
            f"set it to {what}; a team's own goes into conf/local/sagemaker.yaml{or_dry}",
        )
        for name, what in ways.items()
        if getattr(launch, name) is None
    ]
