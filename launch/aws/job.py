"""One training job as DescribeTrainingJob answers: its state, its cost, its places, and whether it
is what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from launch.aws.clients import Clients, code, said

Described = dict[str, Any]
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
ENDED = frozenset({"Completed", "Failed", "Stopped"})
# Given, but not described, or with the service's own values among them; and what only changes what
# is shown. A difference in these is said; in anything else the job is stopped.
_SHOWN = frozenset(
    {"MetricDefinitions", "RemoteDebugConfig", "InfraCheckConfig", "TensorBoardOutputConfig"}
)
_SETS = frozenset({"Subnets", "SecurityGroupIds"})  # whose order says nothing


def describe(name: str, clients: Clients) -> Described | None:
    """The job, or None if there is none of that name. Raises as clients.said does."""
    with said(f"look at the job {name}"):
        try:
            return dict(clients("sagemaker").describe_training_job(TrainingJobName=name))
        except Exception as error:
            if code(error) in ("ValidationException", "ResourceNotFound"):
                return None
            raise


def has_ended(job: Described) -> bool:
    return job["TrainingJobStatus"] in ENDED


def state(job: Described) -> str:
    """'Training', 'Failed', 'InProgress (Starting)': the status, and the secondary one where it
    says more."""
    status, secondary = job["TrainingJobStatus"], job.get("SecondaryStatus", "")
    return status if secondary in ("", status) else f"{status} ({secondary})"


def since(job: Described) -> str:
    """What the service says of the newest transition."""
    transitions = job.get("SecondaryStatusTransitions") or [{}]
    return str(transitions[-1].get("StatusMessage", ""))


def seconds(job: Described) -> float:
    """That the job's instances are paid for, so far; each of them."""
    if job.get("BillableTimeInSeconds") is not None and has_ended(job):
        return float(job["BillableTimeInSeconds"])
    start = job.get("TrainingStartTime")
    if start is None:
        return 0.0
    end = job.get("TrainingEndTime") or datetime.now(UTC)
    return max((end - start).total_seconds(), 0.0)


@dataclass(frozen=True)
class Cost:
    """dollars: None where the price is not known, or was paid before."""

    node_hours: float
    dollars: float | None
    prepaid: bool

    def __str__(self) -> str:
        hours = f"{self.node_hours:,.2f} node hours"
        if self.prepaid:
            return f"{hours}, paid with the training plan"
        if self.dollars is None:
            return f"{hours}; hardware.price_per_node_hour is not set"
        return f"{hours}, about ${self.dollars:,.2f}"


def cost(job: Described, price_per_node_hour: float | None) -> Cost:
    """price: USD, on demand. SageMaker's billable seconds already leave out what spot saves, and
    count once however many instances there are (API reference, DescribeTrainingJob)."""
    resources = job["ResourceConfig"]
    hours = seconds(job) / 3600 * int(resources.get("InstanceCount", 1))
    prepaid = resources.get("TrainingPlanArn") is not None
    dollars = None if prepaid or price_per_node_hour is None else hours * price_per_node_hour
    return Cost(hours, dollars, prepaid)


def console(name: str, region: str) -> str:
    return f"https://{_console(region)}/sagemaker/home?region={region}#/jobs/{name}"


def console_logs(name: str, region: str) -> str:
    group = LOG_GROUP.replace("/", "$252F")  # the console's own double escape
    return (
        f"https://{_console(region)}/cloudwatch/home?region={region}#logsV2:log-groups/log-group/"
        f"{group}$3FlogStreamNameFilter$3D{name}"
    )


def _console(region: str) -> str:
    if region.startswith("cn-"):
        return "console.amazonaws.cn"
    if region.startswith("us-gov-"):
        return "console.amazonaws-us-gov.com"
    return f"{region}.console.aws.amazon.com"


# --- is it what was asked for? -----------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    where: str  # ResourceConfig.TrainingPlanArn
    asked: Any
    found: Any
    stops: bool

    def __str__(self) -> str:
        found = "nothing" if self.found is None else repr(self.found)
        return f"{self.where}: asked for {self.asked!r}, the job has {found}"


def differences(request: dict[str, Any], job: Described, known: set[str]) -> list[Difference]:
    """Where the job is not what the request asked for.

    known: the members of DescribeTrainingJob's answer; what it cannot say (tags) is not compared.
    What the service adds by itself is no difference.
    """
    found: list[Difference] = []
    for name, asked in request.items():
        if name in known:
            _compare(name, asked, job.get(name), found)
    return found


def _compare(where: str, asked: Any, has: Any, found: list[Difference]) -> None:
    leaf = where.rpartition(".")[2]
    if isinstance(asked, dict):
        for name, value in asked.items():
            _compare(f"{where}.{name}", value, (has or {}).get(name), found)
    elif leaf == "InputDataConfig":
        channels = {channel["ChannelName"]: channel for channel in has or []}
        for channel in asked:
            name = channel["ChannelName"]
            _compare(f"{where}.{name}", channel, channels.get(name), found)
    elif _plain(asked, leaf) != _plain(has, leaf):
        stops = not _SHOWN & set(where.split("."))
        found.append(Difference(where, asked, has, stops))


def _plain(value: Any, leaf: str) -> Any:
    """What two spellings of one value have in common."""
    if value is False:
        return None  # not said
    if isinstance(value, str) and value.startswith("s3://"):
        return value.rstrip("/")
    if isinstance(value, list) and leaf in _SETS:
        return sorted(value)
    return value
