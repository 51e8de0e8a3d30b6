"""docs/iam allows what the code asks AWS for, and nothing without a reason."""

from __future__ import annotations

import ast
import json
import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from botocore import xform_name
from botocore.session import get_session

from launch.aws import checks_account
from tests.choices import ROOT
from tests.launch.aws.fake_aws import ACCOUNT, REGION
from tests.launch.aws.requests import BUCKET, request

IAM = ROOT / "docs" / "iam"
POLICIES = sorted(path.stem for path in IAM.glob("*.json"))
# What a person's identity needs, and what the job's role needs.
OURS = ("submit", "cleanup", "training_plans", "push_image")
FILES = [
    *(ROOT / "launch" / "aws").glob("*.py"),
    *(ROOT / "launch").glob("jobs.py"),
    *(ROOT / "tools").glob("*.py"),
    ROOT / "training" / "data" / "indexed.py",
]
SERVICES = ("sagemaker", "iam", "s3", "ecr", "service-quotas", "ec2", "fsx", "efs", "logs", "sts")
PREFIXES = {"service-quotas": "servicequotas", "efs": "elasticfilesystem"}
# Operations of one name in several services: those that are meant.
MEANT = {"describe_images": ["ecr"], "describe_file_systems": ["fsx", "efs"]}
# S3's operations that are allowed under another's name (S3's list of actions).
S3 = {
    "HeadBucket": "ListBucket",
    "ListObjectsV2": "ListBucket",
    "HeadObject": "GetObject",
    "DeleteObjects": "DeleteObject",
    "ListMultipartUploads": "ListBucketMultipartUploads",
}
FREE = {"sts:GetCallerIdentity"}  # everybody may
# What an operation needs beside its own action (Service Authorization Reference).
ALSO = {
    "sagemaker:CreateTrainingJob": {"sagemaker:AddTags", "iam:PassRole"},
    "sagemaker:CreateTrainingPlan": {"sagemaker:AddTags"},
}
# Asked for by `docker push` and `docker pull`, not by us.
BY_DOCKER = {
    "ecr:GetAuthorizationToken",
    "ecr:BatchCheckLayerAvailability",
    "ecr:CompleteLayerUpload",
    "ecr:CreateRepository",
    "ecr:DescribeRepositories",
    "ecr:InitiateLayerUpload",
    "ecr:PutImage",
    "ecr:UploadLayerPart",
}


def statements(name: str) -> list[dict[str, Any]]:
    policy = json.loads((IAM / f"{name}.json").read_text())
    assert policy["Version"] == "2012-10-17"
    return list(policy["Statement"])


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def allowed(*names: str) -> set[str]:
    return {
        action
        for name in names
        for statement in statements(name)
        for action in _listed(statement["Action"])
    }


@cache
def operations() -> dict[str, list[tuple[str, str]]]:
    """Method of a client -> (service, operation)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for service in SERVICES:
        for operation in get_session().get_service_model(service).operation_names:
            found.setdefault(xform_name(operation), []).append((service, operation))
    return found


def action(service: str, operation: str) -> str:
    if service == "s3":
        operation = S3.get(operation, operation)
    return f"{PREFIXES.get(service, service)}:{operation}"


def asked() -> dict[str, str]:
    """Action -> a file that asks for it; methods are called, or named for a paginator."""
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "value", None)
            if not isinstance(name, str) or "_" not in name:
                continue
            for service, operation in operations().get(name, ()):
                if service in MEANT.get(name, [service]):
                    found[action(service, operation)] = path.name
    for needed in list(found):
        for more in ALSO.get(needed, ()):
            found[more] = found[needed]
    return {name: file for name, file in found.items() if name not in FREE}


def test_what_the_code_asks_for_is_allowed() -> None:
    found = asked()
    assert len(found) > 30
    granted = allowed(*OURS)
    assert {name: file for name, file in found.items() if name not in granted} == {}


def test_nothing_is_allowed_that_nobody_asks_for() -> None:
    assert allowed(*OURS) - set(asked()) <= BY_DOCKER


def test_what_deletes_or_buys_is_apart_from_daily_work() -> None:
    daily = allowed("submit")
    assert not [name for name in daily if re.search(r":(BatchDelete|Delete|Update|Buy)", name)]
    assert "sagemaker:CreateTrainingPlan" not in daily


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_names_actions_that_exist_and_no_wildcards(name: str) -> None:
    known = {action(service, op) for found in operations().values() for service, op in found}
    known |= {"iam:PassRole", "sts:AssumeRole", "cloudwatch:PutMetricData"}
    for statement in statements(name):
        assert set(statement) <= {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
        assert statement["Effect"] == "Allow"
        assert re.fullmatch(r"[A-Za-z]+", statement["Sid"])
    for found in allowed(name):
        assert found in known, found


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "job_role_trust"])
def test_a_policy_names_its_resources_where_the_action_has_any(name: str) -> None:
    # Actions that are of no one resource (Service Authorization Reference).
    anywhere = re.compile(
        r"ecr:GetAuthorizationToken|cloudwatch:PutMetricData|ec2:.*|servicequotas:List.*"
        r"|sagemaker:(List|Search).*|(fsx|elasticfilesystem):Describe.*"
    )
    for statement in statements(name):
        for place in _listed(statement["Resource"]):
            if place == "*":
                assert all(anywhere.fullmatch(a) for a in statement["Action"]), statement
            else:
                assert place.startswith("arn:aws:")
                assert re.search(r"ACCOUNT|BUCKET", place)


def test_only_sagemaker_may_take_the_role() -> None:
    (trust,) = statements("job_role_trust")
    assert trust["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    (give,) = (s for s in statements("submit") if "iam:PassRole" in s["Action"])
    assert give["Condition"]["StringEquals"] == {"iam:PassedToService": "sagemaker.amazonaws.com"}


def test_the_role_may_do_what_the_check_before_a_submission_asks_of_it() -> None:
    """As IAM's simulator decides: what is asked for lies within a resource of the policy, "*" only
    within "*"."""
    names = {"ACCOUNT": ACCOUNT, "REGION": REGION, "BUCKET": BUCKET}
    given = [
        (action, re.sub("|".join(names), lambda found: names[found[0]], place))
        for statement in (*statements("job_role"), *statements("job_role_vpc"))
        for action in _listed(statement["Action"])
        for place in _listed(statement["Resource"])
    ]
    asked = []

    def simulate(ActionNames: list[str], ResourceArns: list[str], **_: str) -> Any:
        asked.extend(ActionNames)
        results = [
            {"EvalActionName": action, "EvalResourceName": place,
             "EvalDecision": "allowed" if any(
                 action == a and fnmatchcase(place, p) for a, p in given) else "implicitDeny"}
            for action in ActionNames for place in ResourceArns
        ]  # fmt: skip
        return [{"EvaluationResults": results}]

    clients = mock.MagicMock(region=REGION)
    clients("iam").get_paginator("").paginate = simulate
    network = {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    rows = list(checks_account.permissions(request(VpcConfig=network), clients))
    assert [(row.verdict, row.said) for row in rows] == [
        ("ok", "read and write what the job needs")]  # fmt: skip
    assert len(set(asked)) >= 8


def test_the_page_shows_every_policy() -> None:
    page = (ROOT / "docs" / "sagemaker.md").read_text()
    assert [name for name in POLICIES if f"iam/{name}.json" not in page] == []


def test_every_file_that_asks_is_looked_at() -> None:
    # Another file that makes clients would go unseen.
    makers = {
        path
        for folder in ("launch", "planning", "training", "tools", "container")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\bboto3\b.*client|clients\(\"|\.client\(\"", path.read_text())
    }
    assert makers - {Path(path) for path in FILES} == set()
