"""What a run has left in the account, what it costs, and taking away what a person names.

Prices are round figures for us-east-1, to tell large from small: AWS's pages "Amazon S3 pricing",
"Amazon ECR pricing" and "Amazon CloudWatch pricing" have those that are billed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from launch.aws import job as jobs
from launch.aws import submit
from launch.aws.checks import s3_parts
from launch.aws.checks_account import IMAGE, written
from launch.aws.clients import Clients, code, denied, said
from launch.aws.logs import Log
from launch.aws.record import Record
from planning.findings import ChoiceError, Finding, did_you_mean
from planning.report import size, table

S3_GB_MONTH, ECR_GB_MONTH, LOGS_GB_MONTH = 0.023, 0.10, 0.03  # USD
GB = 1e9


@dataclass(frozen=True)
class Left:
    """kind: the word that names it in --delete. delete: None where nothing can be done."""

    kind: str
    what: str
    cost: str
    delete: Callable[[], str] | None = None
    note: str = ""


def find(record: Record, clients: Clients) -> list[Left]:
    """All of it; what AWS does not let us look at is said in a line of its own."""
    found: list[Left] = []
    for part in (_jobs, _objects, _logs, _image, _plan):
        try:
            with said("look for what is left"):
                found += _or_closed(part, record, clients)
        except ChoiceError as error:
            found.append(Left(part.__name__.strip("_"), str(error.findings[0].message), "unknown"))
    return found


def _or_closed(
    part: Callable[[Record, Clients], Iterator[Left]], record: Record, clients: Clients
) -> list[Left]:
    try:
        return list(part(record, clients))
    except Exception as error:
        if not denied(error):
            raise
        return [Left(part.__name__.strip("_"), "you may not look at it", "unknown")]


def lines(found: Iterable[Left]) -> list[str]:
    rows = [[x.kind, x.what, x.cost, x.note] for x in found]
    return table([["what", "where", "costs", ""], *rows])


def delete(found: list[Left], kinds: Iterable[str]) -> list[str]:
    """Take away the named kinds; a line for each thing. Raises as `check` does, before anything
    is deleted."""
    return [x.delete() for x in check(found, kinds) if x.delete]


def check(found: list[Left], kinds: Iterable[str]) -> list[Left]:
    """What the kinds name. ChoiceError for a kind that is not there or cannot be taken away."""
    chosen: list[Left] = []
    for kind in kinds:
        some = [x for x in found if x.kind == kind]
        if not some:
            known = sorted({x.kind for x in found if x.delete})
            raise _refused(
                f"nothing of the kind {kind} is left{did_you_mean(kind, known)}",
                f"there are: {', '.join(known) or 'none'}",
            )
        if stuck := [x for x in some if x.delete is None]:
            raise _refused(f"{stuck[0].what} cannot be deleted", stuck[0].note)
        chosen += some
    working = [x for x in found if x.kind == "job"]
    if working and any(x.kind not in ("job", "warm-pool") for x in chosen):
        raise _refused(f"{working[0].what} still writes there", "delete `job` first (it stops it)")
    return chosen


def refuse_edited(record: Record, clients: Clients) -> None:
    """ChoiceError if the newest job's places are not those of the record: what would be deleted
    is then another run's."""
    job = jobs.describe(record.newest.name, clients)
    places = ("CheckpointConfig", "InputDataConfig", "OutputDataConfig", "TensorBoardOutputConfig")
    asked = {name: record.request[name] for name in places if name in record.request}
    for difference in [] if job is None else jobs.differences(asked, job, set(places)):
        raise _refused(f"job.json is not what the job was given: {difference}",
                       "restore the file; what is left can be deleted by hand")  # fmt: skip


def _refused(message: str, fix: str) -> ChoiceError:
    return ChoiceError(Finding("cleanup", "error", "--delete", message, fix))


# --- jobs and warm pools -----------------------------------------------------------------------


def _jobs(record: Record, clients: Clients) -> Iterator[Left]:
    for entry in record.jobs:
        job = jobs.describe(entry.name, clients)
        if job is None:
            continue
        hourly = record.price_per_node_hour
        rate = f"${hourly * record.nodes:,.2f} an hour" if hourly else "by the hour"
        if record.training_plan:
            rate = "paid with the training plan"
        if not jobs.has_ended(job):
            yield Left(
                "job", f"{entry.name}, {jobs.state(job)}", rate, partial(_stop, entry.name, clients)
            )
        pool = job.get("WarmPoolStatus", {})
        if pool.get("Status") == "Available":
            yield Left(
                "warm-pool",
                f"{record.nodes} x {record.instance_type} of {entry.name}",
                rate,
                partial(_end_pool, entry.name, clients),
            )


def _stop(name: str, clients: Clients) -> str:
    submit.stop(name, clients)
    return f"stopping {name}"


def _end_pool(name: str, clients: Clients) -> str:
    with said(f"end the warm pool of {name}"):
        clients("sagemaker").update_training_job(
            TrainingJobName=name, ResourceConfig={"KeepAlivePeriodInSeconds": 0}
        )
    return f"ended the warm pool of {name}"


# --- S3 ----------------------------------------------------------------------------------------


def _objects(record: Record, clients: Clients) -> Iterator[Left]:
    request = record.request
    bucket, prefix = submit.plan_prefix(request)
    places = {f"s3://{bucket}/{prefix.rstrip('/')}": "plan"}
    parent, _, last = prefix.rstrip("/").rpartition("/")
    if last in [entry.name for entry in record.jobs]:  # a folder for each job
        places |= {f"s3://{bucket}/{parent}/{entry.name}": "plan" for entry in record.jobs}
    for uri in written(request):
        # The job's own folder below the output path; others of that path are not ours.
        is_output = uri == request["OutputDataConfig"]["S3OutputPath"]
        if uri == record.checkpoints:
            places[uri] = "checkpoints"
        elif is_output:
            for entry in record.jobs:
                places[f"{uri.rstrip('/')}/{entry.name}/"] = "output"
        else:
            places[uri] = "tensorboard"
    for uri, kind in places.items():
        bucket, prefix = s3_parts(uri)
        prefix = prefix.rstrip("/") + "/"  # not those of a run whose name starts alike
        count, bytes_ = _measure(bucket, prefix, clients)
        if count:
            yield Left(
                kind,
                f"s3://{bucket}/{prefix}, {count:,} objects, {size(bytes_)}",
                f"${bytes_ / GB * S3_GB_MONTH:,.2f} a month",
                partial(_delete_objects, bucket, prefix, clients),
                "with them goes every way to resume" if kind == "checkpoints" else "",
            )
        uploads = _uploads(bucket, prefix, clients)
        if uploads:
            yield Left(
                "uploads",
                f"s3://{bucket}/{prefix}, {len(uploads)} unfinished uploads",
                "as what they hold",
                partial(_abort, bucket, uploads, clients),
            )


def _measure(bucket: str, prefix: str, clients: Clients) -> tuple[int, int]:
    count = total = 0
    pages = clients("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    for page in pages:
        for entry in page.get("Contents", []):
            count, total = count + 1, total + entry["Size"]
    return count, total


def _delete_objects(bucket: str, prefix: str, clients: Clients) -> str:
    s3, count = clients("s3"), 0
    with said(f"delete s3://{bucket}/{prefix}"):
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            keys = [{"Key": entry["Key"]} for entry in page.get("Contents", [])]
            if not keys:
                continue
            answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
            if errors := answer.get("Errors"):
                why = errors[0].get("Message", errors[0]["Code"])
                raise _refused(
                    f"{errors[0]['Key']}: {why}",
                    "allow s3:DeleteObject, and look for a lock on the object",
                )
            count += len(keys)
    return f"deleted {count:,} objects of s3://{bucket}/{prefix}"


def _uploads(bucket: str, prefix: str, clients: Clients) -> list[tuple[str, str]]:
    """Parts of objects that were never finished: listed nowhere else, and paid for."""
    pages = (
        clients("s3").get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
    )
    return [(u["Key"], u["UploadId"]) for page in pages for u in page.get("Uploads", [])]


def _abort(bucket: str, uploads: list[tuple[str, str]], clients: Clients) -> str:
    with said(f"abort uploads to s3://{bucket}"):
        for key, upload in uploads:
            clients("s3").abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload)
    return f"aborted {len(uploads)} uploads to s3://{bucket}"


# --- logs, image, plan -------------------------------------------------------------------------


def _logs(record: Record, clients: Clients) -> Iterator[Left]:
    names = [name for job in record.jobs for name in Log(job.name, clients).streams()]
    if names:
        yield Left(
            "logs",
            f"{len(names)} streams in {jobs.LOG_GROUP}",
            f"${LOGS_GB_MONTH:.2f} a GB and month",
            partial(_delete_streams, names, clients),
        )


def _delete_streams(names: list[str], clients: Clients) -> str:
    with said("delete log streams"):
        for name in names:
            clients("logs").delete_log_stream(logGroupName=jobs.LOG_GROUP, logStreamName=name)
    return f"deleted {len(names)} log streams"


def _image(record: Record, clients: Clients) -> Iterator[Left]:
    uri = record.request["AlgorithmSpecification"]["TrainingImage"]
    parts = IMAGE.fullmatch(uri)
    if parts is None or parts["account"] != record.account or not parts["tag"]:
        return  # somebody else's, or named by its content
    where = {"repositoryName": parts["repository"]}
    try:
        found = clients("ecr").describe_images(**where, imageIds=[{"imageTag": parts["tag"]}])
    except Exception as error:
        if code(error) in ("ImageNotFoundException", "RepositoryNotFoundException"):
            return
        raise
    bytes_ = found["imageDetails"][0].get("imageSizeInBytes", 0)
    yield Left(
        "image",
        f"{parts['repository']}:{parts['tag']}, {size(bytes_)}",
        f"${bytes_ / GB * ECR_GB_MONTH:,.2f} a month",
        partial(_delete_tag, parts["repository"], parts["tag"], clients),
        "other runs may use it",
    )


def _delete_tag(repository: str, tag: str, clients: Clients) -> str:
    with said(f"delete {repository}:{tag}"):
        clients("ecr").batch_delete_image(repositoryName=repository, imageIds=[{"imageTag": tag}])
    return f"deleted the tag {repository}:{tag}"


def _plan(record: Record, clients: Clients) -> Iterator[Left]:
    if record.training_plan is None:
        return
    name = record.training_plan.rsplit("/", 1)[-1]
    plan = clients("sagemaker").describe_training_plan(TrainingPlanName=name)
    if plan["Status"] in ("Active", "Scheduled", "Pending") and plan["EndTime"] > datetime.now(UTC):
        fee = plan.get("UpfrontFee")
        paid = f"{fee} {plan.get('CurrencyCode', 'USD')}, paid" if fee else "paid"
        yield Left(
            "training-plan",
            f"{name}, {plan['Status'].lower()} until {plan['EndTime']:%Y-%m-%d %H:%M} UTC",
            paid,
            None,
            "cannot be given back: use the time for other runs",
        )
