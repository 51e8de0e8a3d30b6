"""Input channels: where data lies in AWS, and where a job finds it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from launch.checks import CHANNEL
from planning.schema import SageMakerLaunch

DATA = "/opt/ml/input/data"  # of the container; a channel is a folder in it
PLAN = "plan"  # the channel of plan.yaml and start.json
FORMS = "s3://bucket/prefix, fsx://fs-0123456789abcdef0/mount/folder or efs://fs-.../folder"
_S3 = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", re.DOTALL)
_FILES = re.compile(r"(fsx|efs)://(fs-[0-9a-f]{8,})(/.*)?", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """kind: s3, fsx (Lustre) or efs. where: bucket or file system. path: prefix or folder."""

    kind: Literal["s3", "fsx", "efs"]
    where: str
    path: str

    @property
    def is_file_system(self) -> bool:
        return self.kind != "s3"


def parse(text: str) -> Source | None:
    """What a text such as s3://bucket/prefix names; None: it has none of the FORMS."""
    if found := _S3.fullmatch(text):
        return Source("s3", found[1], (found[2] or "").strip("/"))
    if found := _FILES.fullmatch(text):
        path = "/" + (found[3] or "").strip("/")
        return Source("fsx" if found[1] == "fsx" else "efs", found[2], path)
    return None


def channel_of(path: str) -> str | None:
    """The channel of data:NAME/..., None for another path."""
    return path.removeprefix(CHANNEL).partition("/")[0] if path.startswith(CHANNEL) else None


def folder(channel: str) -> str:
    """Of a channel, in the container."""
    return f"{DATA}/{channel}"


def roots(launch: SageMakerLaunch) -> dict[str, str]:
    """What `data:NAME` stands for in the container."""
    return {CHANNEL + name: folder(name) for name in launch.channels or {}}


def writable(launch: SageMakerLaunch) -> str | None:
    """The channel that holds the run's folder, the only one that a job writes to."""
    return channel_of(launch.run_folder) if launch.run_folder else None


def in_s3(path: str, launch: SageMakerLaunch) -> str | None:
    """data:NAME/x as s3://bucket/prefix/x, s3:// as it is; None for what is not in S3."""
    name = channel_of(path)
    if name is None:
        return path if path.startswith("s3://") else None
    source = parse((launch.channels or {}).get(name, ""))
    if source is None or source.is_file_system:
        return None
    rest = path.removeprefix(CHANNEL + name).strip("/")
    return "s3://" + "/".join(filter(None, (source.where, source.path, rest)))


def build(launch: SageMakerLaunch, plan_uri: str) -> list[dict[str, Any]]:
    """InputDataConfig: the plan's channel and the user's. Their sources can be parsed."""
    first = {
        "ChannelName": PLAN,
        "DataSource": {"S3DataSource": _s3(plan_uri)},
        "InputMode": "File",
    }
    return [
        first,
        *(_channel(launch, name, text) for name, text in (launch.channels or {}).items()),
    ]


def _channel(launch: SageMakerLaunch, name: str, text: str) -> dict[str, Any]:
    source = parse(text)
    if source is None:
        raise ValueError(f"{text} is none of {FORMS}")
    if not source.is_file_system:
        # With the slash, or web would also be web2.
        uri = "s3://" + "/".join(filter(None, (source.where, source.path))) + "/"
        return {
            "ChannelName": name,
            "DataSource": {"S3DataSource": _s3(uri)},
            "InputMode": "File" if name in launch.copy_channels else "FastFile",
        }
    return {
        "ChannelName": name,
        "DataSource": {
            "FileSystemDataSource": {
                "FileSystemId": source.where,
                "FileSystemType": "FSxLustre" if source.kind == "fsx" else "EFS",
                "FileSystemAccessMode": "rw" if name == writable(launch) else "ro",
                "DirectoryPath": source.path,
            }
        },
    }


def _s3(uri: str) -> dict[str, str]:
    return {
        "S3DataType": "S3Prefix",
        "S3Uri": uri,
        "S3DataDistributionType": "FullyReplicated",  # every node sees all of it
    }
