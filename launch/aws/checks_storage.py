"""Checks of buckets and file systems: there, in the job's region, reached, not empty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launch.aws.checks import Request, Row, asked, s3_parts
from launch.aws.checks_account import written
from launch.aws.clients import Clients, code

# Channels that the submission itself fills.
OURS = ("plan",)


def buckets(request: Request, clients: Clients) -> Iterator[Row]:
    reads = {
        channel["ChannelName"]: s3["S3Uri"]
        for channel in request.get("InputDataConfig", [])
        if (s3 := channel["DataSource"].get("S3DataSource"))
    }
    named: dict[str, str] = {}  # bucket: the setting that names it
    for uri in written(request):
        named.setdefault(s3_parts(uri)[0], "launch.bucket")
    for uri in reads.values():
        named.setdefault(s3_parts(uri)[0], "launch.channels")
    bad = set()
    for bucket, setting in named.items():
        row = _bucket(bucket, setting, clients)
        if row.verdict != "ok":
            bad.add(bucket)
        yield row
    for channel, uri in reads.items():
        bucket, prefix = s3_parts(uri)
        if channel not in OURS and bucket not in bad:
            yield _channel(channel, uri, bucket, prefix, clients)


def _bucket(bucket: str, setting: str, clients: Clients) -> Row:
    what = f"s3://{bucket}"
    try:
        answer = clients("s3").head_bucket(Bucket=bucket)
    except Exception as error:
        region = _region(getattr(error, "response", {}))
        match code(error):
            case "404" | "NoSuchBucket":
                return Row(
                    "bucket",
                    "failed",
                    f"there is no {what}",
                    "make it, or correct its name",
                    setting,
                    machine=False,
                )
            case "403" | "AccessDenied":
                return Row(
                    "bucket",
                    "failed",
                    f"{what} is closed to you, or another account's",
                    "allow s3:ListBucket on it, or take a bucket of yours",
                    setting,
                )
            case "301" | "400" if region:
                return _elsewhere(what, region, setting, clients)
        raise
    region = _region(answer)
    if region and region != clients.region:
        return _elsewhere(what, region, setting, clients)
    return Row("bucket", "ok", f"{what} in {region or clients.region}")


def _region(answer: object) -> str | None:
    if not isinstance(answer, dict):
        return None
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    found = headers.get("x-amz-bucket-region")
    return str(found) if found else None


def _elsewhere(what: str, region: str, setting: str, clients: Clients) -> Row:
    return Row(
        "bucket",
        "failed",
        f"{what} is in {region}, the job in {clients.region}",
        f"SageMaker reads and writes only its own region: take a bucket in {clients.region}",
        setting,
        machine=False,
    )


def _channel(channel: str, uri: str, bucket: str, prefix: str, clients: Clients) -> Row:
    found = clients("s3").list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
    if found.get("KeyCount", len(found.get("Contents", []))):
        return Row("data", "ok", f"{channel} at {uri}")
    return Row(
        "data",
        "failed",
        f"nothing is at {uri} (channel {channel})",
        "upload the data, or correct the prefix",
        "launch.channels",
        machine=False,
    )


def file_systems(request: Request, clients: Clients) -> Iterator[Row]:
    for channel in request.get("InputDataConfig", []):
        source = channel["DataSource"].get("FileSystemDataSource")
        if source is None:
            continue
        check = _lustre if source["FileSystemType"] == "FSxLustre" else _efs
        yield check(source["FileSystemId"], source["DirectoryPath"], clients)


def _lustre(name: str, path: str, clients: Clients) -> Row:
    found = _described(clients("fsx"), FileSystemIds=[name])
    if found is None:
        return _no_file_system(name)
    mount = found.get("LustreConfiguration", {}).get("MountName")
    if found["Lifecycle"] != "AVAILABLE":
        return _not_yet(name, found["Lifecycle"].lower())
    if mount and path.strip("/").split("/")[0] != mount:
        return Row(
            "file system",
            "failed",
            f"{name} is mounted as /{mount}, the path is {path}",
            f"start the path with /{mount}",
            "launch.channels",
            machine=False,
        )
    return Row("file system", "ok", f"{name}, {found.get('StorageCapacity', '?')} GiB, at {path}")


def _efs(name: str, path: str, clients: Clients) -> Row:
    found = _described(clients("efs"), FileSystemId=name)
    if found is None:
        return _no_file_system(name)
    if found["LifeCycleState"] != "available":
        return _not_yet(name, found["LifeCycleState"])
    if not clients("efs").describe_mount_targets(FileSystemId=name)["MountTargets"]:
        return Row(
            "file system",
            "failed",
            f"{name} has no mount target",
            "make one in the job's subnet",
            "launch.channels",
            machine=False,
        )
    return Row("file system", "ok", f"{name} at {path}")


def _described(client: Any, **named: Any) -> dict[str, Any] | None:
    """What the service says of a file system; None: there is none."""
    try:
        found = client.describe_file_systems(**named)["FileSystems"]
    except Exception as error:
        if code(error) != "FileSystemNotFound":
            raise
        return None
    return found[0] if found else None


def _not_yet(name: str, state: str) -> Row:
    return Row(
        "file system",
        "failed",
        f"{name} is {state}",
        "wait until it is available",
        "launch.channels",
    )


def _no_file_system(name: str) -> Row:
    return Row(
        "file system",
        "failed",
        f"there is no {name}",
        "correct its id",
        "launch.channels",
        machine=False,
    )


CHECKS = (
    asked("bucket", "s3:ListBucket", buckets),
    asked(
        "file system",
        "fsx:DescribeFileSystems or elasticfilesystem:DescribeFileSystems",
        file_systems,
    ),
)
