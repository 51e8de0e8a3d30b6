"""An AWS account on this machine: moto's server, and what it lacks for training jobs.

Added to moto: a job's transitions, stop and logs; the request as it was given, in describe; names
that are taken; training plans; quotas of SageMaker; IAM's policy simulator; downloads from ECR.
A test says how its jobs go: `account.goes(...)`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import boto3
from moto.core.exceptions import JsonRESTError
from moto.core.responses import ActionResult
from moto.ecr.responses import ECRResponse
from moto.fsx.models import FileSystem
from moto.iam.responses import IamResponse
from moto.sagemaker.models import SageMakerModelBackend
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer
from moto.servicequotas.responses import ServiceQuotasResponse

REGION = "us-west-2"
ACCOUNT = "123456789012"  # moto's
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": REGION,
    "AWS_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
}

Step = dict[str, Any]
TRAINING: Step = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}
STARTING: Step = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Starting"}
STOPPING: Step = {"TrainingJobStatus": "Stopping", "SecondaryStatus": "Stopping"}
STOPPED: Step = {"TrainingJobStatus": "Stopped", "SecondaryStatus": "Stopped"}
COMPLETED: Step = {"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}


def failed(reason: str) -> Step:
    return {
        "TrainingJobStatus": "Failed",
        "SecondaryStatus": "Failed",
        "FailureReason": reason,
    }


class _Unavailable(JsonRESTError):
    code = 503


class Account:
    """What a test sets, and what it reads afterwards."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clients: dict[tuple[str, str], Any] = {}
        self.reset()

    def reset(self) -> None:
        self.requests: dict[str, dict[str, Any]] = {}  # as CreateTrainingJob got them
        self.steps: dict[str, list[Step]] = {}  # what describe answers, one step a call
        self.next_jobs: list[list[Step]] = []
        self.overlay: dict[str, dict[str, Any]] = {}
        self.stopped: list[str] = []
        self.calls: list[str] = []
        self.quotas: dict[str, float] = {}
        self.forbidden: set[tuple[str, str]] = set()  # (action, part of the resource)
        self.plans: dict[str, dict[str, Any]] = {}
        self.offerings: list[dict[str, Any]] = []
        self.changes: dict[str, Any] = {}  # to what every new job is described as
        self.refuses: tuple[str, str] | None = None  # of the next CreateTrainingJob
        self.loses_answer = False  # the next job is made, and a retry finds its name taken
        self.image_configuration: dict[str, Any] = {"architecture": "amd64", "os": "linux"}

    def client(self, service: str, region: str = REGION) -> Any:
        if (service, region) not in self.clients:
            self.clients[service, region] = boto3.client(
                service, endpoint_url=self.url, region_name=region,
                aws_access_key_id="testing", aws_secret_access_key="testing",
            )  # fmt: skip
        return self.clients[service, region]

    def goes(self, *jobs: Sequence[Step]) -> None:
        """How the next jobs go: what each call of describe finds, the last for ever."""
        self.next_jobs += [list(steps) for steps in jobs]

    def log(self, job: str, host: str, *lines: str | tuple[float, str]) -> None:
        """Lines of one host; (seconds, line) puts one at its time after the first."""
        logs, stream = self.client("logs"), f"{job}/{host}-1700000000"
        for make in (
            lambda: logs.create_log_group(logGroupName=LOG_GROUP),
            lambda: logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream),
        ):
            try:
                make()
            except logs.exceptions.ResourceAlreadyExistsException:
                pass
        start = datetime.now(UTC).timestamp() - 60
        timed = [(n / 1000, x) if isinstance(x, str) else x for n, x in enumerate(lines)]
        logs.put_log_events(
            logGroupName=LOG_GROUP, logStreamName=stream,
            logEvents=[{"timestamp": int((start + at) * 1000), "message": line}
                       for at, line in timed],
        )  # fmt: skip

    def make_image(self, repository: str, tag: str, **manifest: Any) -> str:
        """An image in ECR; its URI."""
        ecr = self.client("ecr")
        ecr.create_repository(repositoryName=repository)
        body = manifest or {"config": {"digest": "sha256:" + "c" * 64}}
        media = "application/vnd.docker.distribution.manifest.v2+json"
        ecr.put_image(
            repositoryName=repository, imageTag=tag, imageManifestMediaType=media,
            imageManifest=json.dumps({"schemaVersion": 2, "mediaType": media, **body}),
        )  # fmt: skip
        return f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/{repository}:{tag}"

    def make_role(self, name: str, service: str = "sagemaker.amazonaws.com") -> str:
        statement = {
            "Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole",
        }  # fmt: skip
        made = self.client("iam").create_role(
            RoleName=name, AssumeRolePolicyDocument=json.dumps({"Statement": [statement]})
        )
        return str(made["Role"]["Arn"])

    def make_plan(self, name: str, kind: str, count: int, hours: float = 72, **more: Any) -> str:
        """A training plan that is active from now on; its ARN."""
        now = datetime.now(UTC)
        arn = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-plan/{name}"
        self.plans[name] = {
            "TrainingPlanArn": arn, "TrainingPlanName": name, "Status": "Active",
            "StartTime": now, "EndTime": now + timedelta(hours=hours),
            "DurationHours": int(hours), "UpfrontFee": "1000.00", "CurrencyCode": "USD",
            "TotalInstanceCount": count, "AvailableInstanceCount": count,
            "InUseInstanceCount": 0, "TargetResources": ["training-job"],
            "ReservedCapacitySummaries": [
                {"ReservedCapacityArn": f"{arn}/rc", "InstanceType": kind,
                 "TotalInstanceCount": count, "Status": "Active",
                 "AvailabilityZone": f"{REGION}a"}],
            **more,
        }  # fmt: skip
        return arn

    def describe(self, name: str, described: dict[str, Any]) -> dict[str, Any]:
        """moto's answer, the fields that it drops, and the job's next step."""
        request = self.requests[name]
        kept = {k: v for k, v in request.items() if k not in ("Tags", "TrainingJobName")}
        steps = self.steps[name]
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        merged = {**described, **kept, **step, **self.changes, **self.overlay.get(name, {})}
        for gone in [key for key, value in merged.items() if value is None]:
            del merged[gone]
        merged.pop("FinalMetricDataList", None)
        if step["TrainingJobStatus"] in ("InProgress", "Stopping"):
            merged.pop("TrainingEndTime", None)
        if step["SecondaryStatus"] in ("Starting", "Pending"):
            merged.pop("TrainingStartTime", None)
        return merged


def _patches(account: Account) -> Iterator[Any]:
    make, describe = (
        SageMakerResponse.create_training_job,
        SageMakerModelBackend.describe_training_job,
    )
    listing = SageMakerModelBackend.list_training_jobs

    def body(response: Any) -> dict[str, Any]:
        return dict(json.loads(response.body))

    def create_training_job(self: Any) -> Any:
        account.calls.append("CreateTrainingJob")
        request = body(self)
        name = request["TrainingJobName"]
        if account.refuses:
            (kind, message), account.refuses = account.refuses, None
            raise JsonRESTError(kind, message)
        if name in account.requests:
            raise JsonRESTError("ResourceInUse", "Training job names must be unique within an "
                                "AWS account and region")  # fmt: skip
        answer = make(self)
        account.requests[name] = request
        account.steps[name] = (
            account.next_jobs.pop(0) if account.next_jobs else [STARTING, TRAINING]
        )
        if account.loses_answer:
            account.loses_answer = False
            raise _Unavailable("ServiceUnavailable", "")  # boto3 tries again
        return answer

    def describe_training_job(self: Any, training_job_name: str) -> Any:
        found = describe(self, training_job_name)  # raises for an unknown one
        return account.describe(training_job_name, found)

    def list_training_jobs(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, job in self.training_jobs.items():
            job.training_job_status = account.steps[name][0]["TrainingJobStatus"]
        return listing(self, *args, **kwargs)

    def stop_training_job(self: Any) -> Any:
        name = body(self)["TrainingJobName"]
        if account.steps[name][0]["TrainingJobStatus"] not in ("InProgress", "Stopping"):
            raise JsonRESTError("ValidationException", f"The request was rejected because the "
                                f"training job is in status "
                                f"{account.steps[name][0]['TrainingJobStatus']}.")  # fmt: skip
        account.stopped.append(name)
        account.steps[name] = [STOPPING, STOPPED]
        return ActionResult({})

    def update_training_job(self: Any) -> Any:
        asked = body(self)
        if asked["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 0:
            account.overlay[asked["TrainingJobName"]] = {"WarmPoolStatus": {"Status": "Terminated"}}
        return ActionResult({"TrainingJobArn": "arn:aws:sagemaker:::training-job/x"})

    def describe_training_plan(self: Any) -> Any:
        name = body(self)["TrainingPlanName"]
        if name not in account.plans:
            raise JsonRESTError("ResourceNotFound", f"Could not find training plan {name}")
        return ActionResult(account.plans[name])

    def list_training_plans(self: Any) -> Any:
        return ActionResult({"TrainingPlanSummaries": list(account.plans.values())})

    def search_training_plan_offerings(self: Any) -> Any:
        asked = body(self)
        fitting = [o for o in account.offerings
                   if o["DurationHours"] == asked["DurationHours"]
                   and o["ReservedCapacityOfferings"][0]["InstanceType"] == asked["InstanceType"]
                   and o["ReservedCapacityOfferings"][0]["InstanceCount"]
                   == asked["InstanceCount"]]  # fmt: skip
        return ActionResult({"TrainingPlanOfferings": fitting})

    def create_training_plan(self: Any) -> Any:
        asked = body(self)
        account.calls.append("CreateTrainingPlan")
        wanted = asked["TrainingPlanOfferingId"]
        offering = next(o for o in account.offerings if o["TrainingPlanOfferingId"] == wanted)
        capacity = offering["ReservedCapacityOfferings"][0]
        arn = account.make_plan(asked["TrainingPlanName"], capacity["InstanceType"],
                                capacity["InstanceCount"], Status="Pending")  # fmt: skip
        return ActionResult({"TrainingPlanArn": arn})

    def list_service_quotas(self: Any) -> Any:
        quotas = [{"QuotaName": name, "Value": value, "ServiceCode": "sagemaker"}
                  for name, value in account.quotas.items()]  # fmt: skip
        return json.dumps({"Quotas": quotas})

    def list_aws_default_service_quotas(self: Any) -> Any:
        return json.dumps({"Quotas": []})

    def simulate_principal_policy(self: Any) -> Any:
        # The query protocol flattens lists: ActionNames.member.1, ...
        def named(prefix: str) -> list[str]:
            found = [v for k, v in sorted(self.querystring.items()) if k.startswith(prefix)]
            return [v[0] if isinstance(v, list) else v for v in found]

        results = [
            {"EvalActionName": action, "EvalResourceName": resource,
             "EvalDecision": "implicitDeny" if any(
                 action == a and part in resource for a, part in account.forbidden)
             else "allowed"}
            for action in named("ActionNames") for resource in named("ResourceArns")
        ]  # fmt: skip
        return ActionResult({"EvaluationResults": results, "IsTruncated": False})

    def get_download_url_for_layer(self: Any) -> Any:
        s3 = account.client("s3")
        if "layers" not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
            where = {"LocationConstraint": REGION}
            s3.create_bucket(Bucket="layers", CreateBucketConfiguration=where)
        s3.put_object(Bucket="layers", Key="config", ACL="public-read",
                      Body=json.dumps(account.image_configuration))  # fmt: skip
        return ActionResult(
            {"downloadUrl": f"{account.url}/layers/config", "layerDigest": "sha256:c"}
        )

    fsx = FileSystem.to_dict

    def to_dict(self: Any) -> dict[str, Any]:
        found = fsx(self)
        if found.get("LustreConfiguration"):
            found["LustreConfiguration"] |= {"MountName": "fsxmount"}
        return {**found, "Lifecycle": "AVAILABLE"}

    for owner, replacements in (
        (FileSystem, (to_dict,)),
        (SageMakerResponse, (create_training_job, stop_training_job, update_training_job,
                             describe_training_plan, list_training_plans,
                             search_training_plan_offerings, create_training_plan)),
        (SageMakerModelBackend, (describe_training_job, list_training_jobs)),
        (ServiceQuotasResponse, (list_service_quotas, list_aws_default_service_quotas)),
        (IamResponse, (simulate_principal_policy,)),
        (ECRResponse, (get_download_url_for_layer,)),
    ):  # fmt: skip
        for replacement in replacements:
            yield mock.patch.object(owner, replacement.__name__, replacement, create=True)


@contextmanager
def running() -> Iterator[Account]:
    """The server, on a free port."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    account = Account(f"http://{host}:{port}")
    patches = list(_patches(account))
    for patch in patches:
        patch.start()
    try:
        yield account
    finally:
        for patch in patches:
            patch.stop()
        server.stop()
