"""A CreateTrainingJob request as the tests need it: two nodes, everything in its place."""

from __future__ import annotations

import copy
from typing import Any

from tests.launch.aws.fake_aws import ACCOUNT, REGION

BUCKET = "team-runs"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/Training"
IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/slipway:1"
_S3 = {"S3DataType": "S3Prefix", "S3DataDistributionType": "FullyReplicated"}
_REQUEST: dict[str, Any] = {
    "TrainingJobName": "gpt-32b-20261201-120000",
    "RoleArn": ROLE,
    "AlgorithmSpecification": {
        "TrainingImage": IMAGE,
        "TrainingInputMode": "FastFile",
        "MetricDefinitions": [{"Name": "loss", "Regex": "loss=(\\S+)"}],
    },
    "InputDataConfig": [
        {
            "ChannelName": "plan",
            "InputMode": "File",
            "DataSource": {"S3DataSource": {**_S3, "S3Uri": f"s3://{BUCKET}/slipway/a/plan/"}},
        },
        {
            "ChannelName": "web",
            "DataSource": {"S3DataSource": {**_S3, "S3Uri": f"s3://{BUCKET}/data/web/"}},
        },
    ],
    "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/slipway/a/output"},
    "CheckpointConfig": {
        "S3Uri": f"s3://{BUCKET}/slipway/a/checkpoints",
        "LocalPath": "/opt/ml/checkpoints",
    },
    "ResourceConfig": {
        "InstanceType": "ml.p6-b200.48xlarge",
        "InstanceCount": 2,
        "VolumeSizeInGB": 500,
    },
    "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
    "Environment": {"HF_HUB_OFFLINE": "1"},
    "RetryStrategy": {"MaximumRetryAttempts": 2},
    "Tags": [{"Key": "team", "Value": "research"}],
    "EnableNetworkIsolation": False,
    "EnableManagedSpotTraining": False,
}
START = {"version": 1, "name": "gpt_32b", "nodes": 2, "max_restarts": 2}


def request(**changes: Any) -> dict[str, Any]:
    """The request, with top-level members replaced; None takes one out."""
    made = copy.deepcopy(_REQUEST) | changes
    return {name: value for name, value in made.items() if value is not None}


def resources(**changes: Any) -> dict[str, Any]:
    return {**_REQUEST["ResourceConfig"], **changes}


def prepare(account: Any) -> None:
    """What the request names: role, image, bucket, data, quota."""
    account.make_role("Training")
    account.make_image("slipway", "1")
    s3 = account.client("s3")
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    s3.put_object(Bucket=BUCKET, Key="data/web/web.bin", Body=b"tokens")
    account.quotas["ml.p6-b200.48xlarge for training job usage"] = 4.0
