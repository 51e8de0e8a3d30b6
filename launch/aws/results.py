"""What a job leaves in S3 of a run: its small files, beside the plan here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.aws.checks import s3_parts
from launch.aws.clients import Clients, code, said
from launch.aws.record import Record

# Of the run folder; checkpoints and TensorBoard's files stay where they are.
FILES = ("result.json", "metrics.jsonl", "loss.png")


def fetch(record: Record, run_dir: Path, clients: Clients) -> dict[str, Any]:
    """Bring FILES to run_dir, those that are there; what result.json says, or {}.

    A run whose folder is on a file system of its own keeps them there.
    """
    if record.checkpoints is not None:
        bucket, prefix = s3_parts(record.checkpoints)
        for name in FILES:
            body = read(bucket, f"{prefix.rstrip('/')}/{name}", clients)
            if body is not None:
                (run_dir / name).write_bytes(body)
    try:
        return dict(json.loads((run_dir / "result.json").read_text()))
    except (OSError, ValueError):
        return {}


def read(bucket: str, key: str, clients: Clients) -> bytes | None:
    """An object of S3, or None if there is none."""
    with said(f"read s3://{bucket}/{key}", "launch.bucket"):
        try:
            return bytes(clients("s3").get_object(Bucket=bucket, Key=key)["Body"].read())
        except Exception as error:
            if code(error) in ("NoSuchKey", "404", "NoSuchBucket"):
                return None
            raise


def newest_checkpoint(record: Record, clients: Clients) -> str | None:
    """The checkpoint that Megatron's tracker in S3 names, as an S3 URI."""
    if record.checkpoints is None:
        return None
    bucket, prefix = s3_parts(record.checkpoints)
    folder = f"{prefix.rstrip('/')}/checkpoints"
    body = read(bucket, f"{folder}/latest_checkpointed_iteration.txt", clients)
    step = body.decode(errors="replace").strip() if body else ""
    return f"s3://{bucket}/{folder}/iter_{int(step):07d}" if step.isdigit() else None
