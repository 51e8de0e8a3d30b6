"""What botocore's model of the service refuses, which botocore itself lets pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.validate import ParamValidator

from launch import compose
from launch.aws import service_model
from tests.launch.aws.test_request import CASES, built


def changed(path: str, value: Any) -> dict[str, Any]:
    asked = copy.deepcopy(built(*CASES["all"])[0])
    *outer, last = path.split(".")
    inner: Any = asked
    for part in outer:
        inner = inner[int(part)] if part.isdigit() else inner.setdefault(part, {})
    inner[last] = value
    return asked


@pytest.mark.parametrize(
    ("path", "value", "setting", "part"),
    [
        ("TrainingJobName", "_x", "launch.job_name", "has not the form"),
        ("TrainingJobName", "x" * 64, "launch.job_name", "64 characters, and must have from 1 to"),
        ("RoleArn", "arn:aws:iam::1:role/x-------", "launch.role", "has not the form"),
        ("AlgorithmSpecification.TrainingImage", "x" * 256, "launch.image", "256 characters"),
        ("ResourceConfig.InstanceType", "ml.p6-b200.xlarge", "hardware.instance_type", "not known"),
        ("ResourceConfig.InstanceCount", 2**31, "hardware.nodes", "is not at most 2147483647"),
        ("ResourceConfig.KeepAlivePeriodInSeconds", 21601, "launch.warm_pool_minutes", "21600"),
        ("ResourceConfig.TrainingPlanArn", "june", "launch.training_plan", "4 characters"),
        ("StoppingCondition.MaxRuntimeInSeconds", 0, "launch.max_run_hours", "is not from 1"),
        ("StoppingCondition.MaxPendingTimeInSeconds", 60, "launch.max_pending_hours", "1800"),
        ("RetryStrategy.MaximumRetryAttempts", 31, "launch.internal_retries", "30"),
        ("VpcConfig.Subnets", ["s"] * 17, "launch.subnets", "17 entries"),
        ("VpcConfig.SecurityGroupIds", ["sg_1"], "launch.security_groups", "has not the form"),
        ("OutputDataConfig.KmsKeyId", "a key", "launch.output_kms_key", "has not the form"),
        ("Environment", {"A-B": "x"}, "launch.environment", "has not the form"),
        ("Environment", {"A": "x" * 513}, "launch.environment", "513 characters"),
        ("Tags.0.Key", "a?b", "launch.tags", "has not the form"),
        ("InputDataConfig.1.ChannelName", "a/b", "launch.channels", "has not the form"),
    ],
)
def test_a_limit_names_the_setting_it_is_reached_by(
    path: str, value: Any, setting: str, part: str
) -> None:
    (found, *more) = service_model.check(changed(path, value))
    assert found.setting == setting
    assert part in found.message
    assert path.split(".")[0] in found.fix
    assert all(finding.setting == setting for finding in more)


def test_an_unknown_member_has_its_neighbour() -> None:
    (found,) = service_model.check(changed("ResourceConfig.InstanceTyp", "x"))
    assert found.message == "there is no such member; did you mean InstanceType?"


def test_a_wrong_type_is_found_too() -> None:
    (found,) = service_model.check(changed("EnableManagedSpotTraining", "yes"))
    assert "Invalid type for parameter EnableManagedSpotTraining" in found.message


def test_a_missing_member_is_found() -> None:
    asked = built()[0]
    del asked["RoleArn"]
    assert "it lacks RoleArn" in [finding.message for finding in service_model.check(asked)]


def test_botocore_alone_lets_maxima_enums_and_patterns_pass() -> None:
    # The day it does not, launch/aws/service_model.py can go.
    asked = changed("ResourceConfig.InstanceType", "ml.nothing")
    asked["RetryStrategy"] = {"MaximumRetryAttempts": 99}
    asked["TrainingJobName"] = "_" * 80
    assert not ParamValidator().validate(asked, service_model.shape()).has_errors()
    assert len(service_model.check(asked)) >= 3


def _patterns(shape: Any, seen: set[str]) -> Iterator[str]:
    if shape.name in seen:
        return
    seen.add(shape.name)
    if "pattern" in shape.metadata:
        yield shape.metadata["pattern"]
    inner = {"structure": lambda: shape.members.values(), "list": lambda: [shape.member],
             "map": lambda: [shape.key, shape.value]}  # fmt: skip
    for member in inner.get(shape.type_name, list)():
        yield from _patterns(member, seen)


def test_every_pattern_of_the_request_can_be_read() -> None:
    patterns = list(_patterns(service_model.shape(), set()))
    assert len(patterns) > 30
    for pattern in patterns:
        assert "\\p{" not in service_model._expression(pattern).pattern


def test_settings_that_are_named_exist() -> None:
    assert set(service_model.SETTINGS.values()) <= set(compose.settings())
