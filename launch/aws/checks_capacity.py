"""Checks of the quotas and the training plan."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from launch.aws.checks import Request, Row, asked, instances
from launch.aws.clients import Clients, code

# A training plan's instances start to stop this long before its end (SageMaker AI Developer
# Guide, "Reserve training plans").
PLAN_MARGIN = timedelta(minutes=30)
# In-progress jobs that are looked at for what they use of a quota: in all, in one answer (the most
# that ListTrainingJobs gives), and at a time.
MOST_JOBS, PAGE, AT_ONCE = 1_000, 100, 8


def quotas(request: Request, clients: Clients) -> Iterator[Row]:
    kind, nodes = instances(request)
    spot = bool(request.get("EnableManagedSpotTraining"))
    planned = request["ResourceConfig"].get("TrainingPlanArn")
    wanted = {} if planned else {f"{kind} for {'spot ' if spot else ''}training job usage": "quota"}
    if request["ResourceConfig"].get("KeepAlivePeriodInSeconds"):
        wanted[f"{kind} for training warm pool usage"] = "warm pool quota"
    found = _quota_values(set(wanted), clients) if wanted else {}
    if planned:
        yield Row("quota", "ok", "the training plan's instances are reserved")
    for quota, what in wanted.items():
        value = found.get(quota)
        if value is None:
            yield Row(what, "not checked", f'Service Quotas does not list "{quota}"')
            continue
        used, all_seen = _used(kind, spot, clients) if what == "quota" else (0, True)
        said = (
            f"{value:.0f} of {kind}, {'' if all_seen else 'at least '}{used} in use, {nodes} needed"
        )
        if not all_seen:
            said += f" (more than {MOST_JOBS:,} jobs are in progress; the rest was not looked at)"
        if value - used >= nodes:
            yield Row(what, "ok" if all_seen else "warning", said, setting="hardware.nodes")
        else:
            yield Row(
                what,
                "failed",
                said,
                f'ask for more of "{quota}" in Service Quotas (SageMaker AI)'
                + ("" if used < value else " or wait for the jobs that use it"),
                "hardware.nodes",
            )


def _quota_values(names: set[str], clients: Clients) -> dict[str, float]:
    """The applied values, else the defaults; Service Quotas cannot be asked by name."""
    found: dict[str, float] = {}
    for operation in ("list_service_quotas", "list_aws_default_service_quotas"):
        pages = clients("service-quotas").get_paginator(operation).paginate(ServiceCode="sagemaker")
        for page in pages:
            for quota in page["Quotas"]:
                if quota["QuotaName"] in names:
                    found.setdefault(quota["QuotaName"], quota["Value"])
            if names <= found.keys():
                return found
    return found


def _used(kind: str, spot: bool, clients: Clients) -> tuple[int, bool]:
    """(instances that jobs in progress take of the same quota, whether all jobs were seen)"""
    sagemaker = clients("sagemaker")
    pages = sagemaker.get_paginator("list_training_jobs").paginate(
        StatusEquals="InProgress", PaginationConfig={"MaxItems": MOST_JOBS + 1, "PageSize": PAGE}
    )
    summaries = [summary for page in pages for summary in page["TrainingJobSummaries"]]
    names = [job["TrainingJobName"] for job in summaries if not job.get("TrainingPlanArn")]

    def uses(name: str) -> int:
        job = sagemaker.describe_training_job(TrainingJobName=name)
        resources = job["ResourceConfig"]
        same = (
            resources.get("InstanceType") == kind
            and bool(job.get("EnableManagedSpotTraining")) == spot
            and not resources.get("TrainingPlanArn")
        )
        return int(resources["InstanceCount"]) if same else 0

    with ThreadPoolExecutor(AT_ONCE) as pool:
        used = sum(pool.map(uses, names[:MOST_JOBS]))
    return used, len(summaries) <= MOST_JOBS


def training_plan(request: Request, clients: Clients) -> Iterator[Row]:
    arn, setting = request["ResourceConfig"].get("TrainingPlanArn"), "launch.training_plan"
    if arn is None:
        return
    kind, nodes = instances(request)
    try:
        plan = clients("sagemaker").describe_training_plan(TrainingPlanName=arn.rsplit("/", 1)[-1])
    except Exception as error:
        if code(error) not in ("ResourceNotFound", "ValidationException"):
            raise
        yield Row(
            "training plan",
            "failed",
            f"there is no plan {arn.rsplit('/', 1)[-1]}",
            "tools/plans.py lists yours",
            setting,
            machine=False,
        )
        return

    def failed(said: str, fix: str, machine: bool = True) -> Row:
        return Row("training plan", "failed", said, fix, setting, machine)

    short, status = plan["TrainingPlanName"], plan["Status"]
    if status not in ("Active", "Scheduled"):
        yield failed(f"{short} is {status.lower()}", "take another: tools/plans.py")
        return
    if "training-job" not in plan.get("TargetResources", []):
        targets = ", ".join(plan.get("TargetResources", []))
        yield failed(f"{short} is for {targets}, not for training jobs", "take another", False)
        return
    kinds = {c["InstanceType"] for c in plan.get("ReservedCapacitySummaries", [])}
    if kinds and kind not in kinds:
        yield failed(
            f"{short} has {', '.join(sorted(kinds))}, the job wants {kind}",
            "choose the plan's hardware=",
            False,
        )
        return
    total, free = plan.get("TotalInstanceCount"), plan.get("AvailableInstanceCount")
    if total is not None and total < nodes:
        yield failed(
            f"{short} has {total} instances, the job wants {nodes}",
            "lower hardware.nodes, or take a larger plan",
            False,
        )
        return
    end = plan["EndTime"] - PLAN_MARGIN
    start = max(plan.get("StartTime", plan["EndTime"]), datetime.now(UTC))
    left, limit = (
        end - start,
        timedelta(seconds=request["StoppingCondition"]["MaxRuntimeInSeconds"]),
    )
    until = f"{end:%Y-%m-%d %H:%M} UTC"
    if left <= timedelta(minutes=30):
        yield failed(f"{short} ends too soon: its instances stop at {until}", "take another plan")
    elif status == "Scheduled":
        yield Row(
            "training plan",
            "warning",
            f"{short} starts at {start:%Y-%m-%d %H:%M} UTC",
            "the job waits until then (launch.max_pending_hours)",
            setting,
        )
    elif free is not None and free < nodes:
        yield Row(
            "training plan",
            "warning",
            f"{free} of {total} instances of {short} are free",
            "the job waits until others end",
            setting,
        )
    elif left < limit:
        yield Row(
            "training plan",
            "warning",
            f"{short} ends before the job's limit, at {until}",
            "the run saves and stops in time; python launch/jobs.py resume goes on elsewhere",
            setting,
        )
    else:
        yield Row("training plan", "ok", f"{short}, active until {until}")


CHECKS = (
    asked("quota", "servicequotas:ListServiceQuotas", quotas),
    asked("training plan", "sagemaker:DescribeTrainingPlan", training_plan),
)
