"""Checks of the job's name, its role and its image."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

from launch.aws.checks import Request, Row, asked, instances, s3_parts
from launch.aws.clients import Clients, code
from launch.aws.job import LOG_GROUP
from planning.hardware import INSTANCES

SERVICE = "sagemaker.amazonaws.com"
IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr[.-]ecr\.(?P<region>[a-z0-9-]+)\.[a-z0-9.]+/"
    r"(?P<repository>[^:@]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
MANIFESTS = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.index.v1+json",
)


def name(request: Request, clients: Clients) -> Iterator[Row]:
    job = request["TrainingJobName"]
    try:
        clients("sagemaker").describe_training_job(TrainingJobName=job)
    except Exception as error:
        if code(error) not in ("ValidationException", "ResourceNotFound"):
            raise
        yield Row("name", "ok", f"{job} is free")
        return
    yield Row(
        "name",
        "failed",
        f"a job is already named {job}",
        "choose another launch.job_name",
        "launch.job_name",
        machine=False,
    )


def role(request: Request, clients: Clients) -> Iterator[Row]:
    arn = request["RoleArn"]
    setting, short = "launch.role", arn.rsplit("/", 1)[-1]
    account = arn.split(":")[4]
    if account != clients.identity[0]:
        yield Row(
            "role",
            "failed",
            f"{short} is of account {account}, you are in {clients.identity[0]}",
            "take a role of your account, or log in to the other",
            setting,
        )
        return
    try:
        found = clients("iam").get_role(RoleName=short)["Role"]
    except Exception as error:
        if code(error) != "NoSuchEntity":
            raise
        fix = "make it as docs/sagemaker.md shows, or correct the ARN"
        yield Row("role", "failed", f"there is no role {short}", fix, setting, machine=False)
        return
    if _trusts_sagemaker(found["AssumeRolePolicyDocument"]):
        yield Row("role", "ok", f"{short} trusts {SERVICE}")
    else:
        yield Row(
            "role",
            "failed",
            f"{short} does not let {SERVICE} take it",
            f"add {SERVICE} with sts:AssumeRole to its trust policy",
            setting,
        )


def _trusts_sagemaker(document: Any) -> bool:
    parsed = json.loads(document) if isinstance(document, str) else document
    for statement in _list(parsed.get("Statement", [])):
        principal = statement.get("Principal", {})
        services = principal.get("Service", []) if isinstance(principal, dict) else principal
        if (
            statement.get("Effect") == "Allow"
            and SERVICE in _list(services)
            and any(a in ("sts:AssumeRole", "sts:*", "*") for a in _list(statement["Action"]))
        ):
            return True
    return False


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def permissions(request: Request, clients: Clients) -> Iterator[Row]:
    """What the role may do, by IAM's simulator; it does not see policies of buckets."""
    _, partition, _, _, account, _ = request["RoleArn"].split(":", 5)
    log = f"arn:{partition}:logs:{clients.region}:{account}:log-group:{LOG_GROUP}:log-stream:any"
    reads = [
        s3["S3Uri"]
        for channel in request.get("InputDataConfig", [])
        if (s3 := channel["DataSource"].get("S3DataSource"))
    ]
    writes = written(request)

    def arns(uris: list[str]) -> list[str]:
        return sorted(
            {f"arn:{partition}:s3:::{uri.removeprefix('s3://').rstrip('/')}/any" for uri in uris}
        )

    def buckets(uris: list[str]) -> list[str]:
        return sorted({f"arn:{partition}:s3:::{s3_parts(uri)[0]}" for uri in uris})

    wanted = [
        (
            ["s3:GetObject"],
            arns([*reads, *([writes[-1]] if "CheckpointConfig" in request else [])]),
        ),
        (["s3:PutObject"], arns(writes)),
        (["s3:ListBucket"], buckets([*reads, *writes])),
        (["logs:CreateLogStream", "logs:PutLogEvents"], [log]),
        (["ecr:GetAuthorizationToken"], ["*"]),
    ]
    if "VpcConfig" in request:
        wanted.append((["ec2:CreateNetworkInterface", "ec2:DescribeSubnets"], ["*"]))
    missing = []
    for actions, resources in wanted:
        pages = (
            clients("iam")
            .get_paginator("simulate_principal_policy")
            .paginate(
                PolicySourceArn=request["RoleArn"], ActionNames=actions, ResourceArns=resources
            )
        )
        for page in pages:
            for result in page["EvaluationResults"]:
                if result["EvalDecision"] != "allowed":
                    missing.append(f"{result['EvalActionName']} on {result['EvalResourceName']}")
    if not missing:
        yield Row("role may", "ok", "read and write what the job needs")
    for line in missing:
        action, _, resource = line.partition(" on ")
        bucket = resource.split(":::")[-1].split("/")[0]
        by_bucket = action.startswith("s3:") and _has_policy(bucket, clients)
        yield Row(
            "role may",
            "warning" if by_bucket else "failed",
            f"not {line}" + (", unless the bucket's policy allows it" if by_bucket else ""),
            f"allow {action} in the role's policy",
            "launch.role",
        )


def _has_policy(bucket: str, clients: Clients) -> bool:
    """Whether a bucket has a policy of its own, or may have one that we cannot see."""
    try:
        clients("s3").get_bucket_policy(Bucket=bucket)
    except Exception as error:
        return code(error) != "NoSuchBucketPolicy"
    return True


def written(request: Request) -> list[str]:
    """Where the job writes in S3."""
    found = [
        request["OutputDataConfig"]["S3OutputPath"],
        request.get("TensorBoardOutputConfig", {}).get("S3OutputPath"),
        request.get("CheckpointConfig", {}).get("S3Uri"),
    ]
    return [uri for uri in found if uri]


def image(request: Request, clients: Clients) -> Iterator[Row]:
    uri, setting = request["AlgorithmSpecification"]["TrainingImage"], "launch.image"
    parts = IMAGE.fullmatch(uri)
    if parts is None:
        yield Row(
            "image",
            "warning",
            f"{uri} is not in ECR, so it is not checked",
            "SageMaker pulls from a registry outside ECR only inside a VPC that reaches it",
            setting,
        )
        return
    if parts["region"] != clients.region:
        yield Row(
            "image",
            "failed",
            f"it is in {parts['region']}, the job in {clients.region}",
            "push it to the job's region (tools/image.py push)",
            setting,
            machine=False,
        )
        return
    which = (
        {"imageDigest": parts["digest"]}
        if parts["digest"]
        else {"imageTag": parts["tag"] or "latest"}
    )
    where = {"registryId": parts["account"], "repositoryName": parts["repository"]}
    try:
        found = clients("ecr").batch_get_image(
            **where, imageIds=[which], acceptedMediaTypes=list(MANIFESTS)
        )["images"]
    except Exception as error:
        if code(error) != "RepositoryNotFoundException":
            raise
        found = []
    if not found:
        yield Row(
            "image",
            "failed",
            f"{parts['repository']}:{next(iter(which.values()))} is not in ECR",
            "build and push it: tools/image.py push",
            setting,
            machine=False,
        )
        return
    manifest = json.loads(found[0]["imageManifest"])
    has = _architectures(manifest, where, clients)
    kind, _ = instances(request)
    needs = {"x86_64": "amd64", "aarch64": "arm64"}[
        INSTANCES[kind].architecture if kind in INSTANCES else "x86_64"
    ]
    if has and needs not in has:
        yield Row(
            "image",
            "failed",
            f"it is for {', '.join(sorted(has))}, {kind} is {needs}",
            f"build it for {needs} (tools/image.py build)",
            setting,
            machine=False,
        )
    elif "manifests" in manifest:
        yield Row(
            "image",
            "warning",
            "it is a list of images for several platforms",
            "if the job cannot pull it, push one platform alone (buildx --provenance=false)",
            setting,
        )
    else:
        yield Row("image", "ok", f"{parts['repository']}, {', '.join(has) or 'unknown platform'}")


def _architectures(manifest: Any, where: dict[str, str], clients: Clients) -> set[str]:
    """amd64, arm64: those that an image's manifest, or its configuration, names."""
    if "manifests" in manifest:
        named = {m.get("platform", {}).get("architecture") for m in manifest["manifests"]}
        return named - {None, "unknown"}  # attestations
    digest = manifest.get("config", {}).get("digest")
    if not digest:
        return set()
    url = clients("ecr").get_download_url_for_layer(**where, layerDigest=digest)["downloadUrl"]
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return {str(json.load(answer)["architecture"])}
    except (OSError, ValueError, KeyError):
        return set()


CHECKS = (
    asked("name", "sagemaker:DescribeTrainingJob", name),
    asked("role", "iam:GetRole", role),
    asked("role may", "iam:SimulatePrincipalPolicy", permissions),
    asked("image", "ecr:BatchGetImage", image),
)
