"""A CreateTrainingJob request against the service's own model, without a client or a network.

botocore's ParamValidator checks names, types, what is required and minima; the model also has
maxima, enums and patterns, which only the service would refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from launch.aws.clients import INSTALL
from planning.findings import Finding, MachineError, did_you_mean

_TYPES = {"structure": Mapping, "map": Mapping, "list": list, "string": str}
_INTEGERS = {"integer": 2**31 - 1, "long": 2**63 - 1}
# A request's member -> the setting that it is made from; the longest that fits is taken.
SETTINGS = {
    "TrainingJobName": "launch.job_name",
    "RoleArn": "launch.role",
    "AlgorithmSpecification.TrainingImage": "launch.image",
    "InputDataConfig": "launch.channels",
    "OutputDataConfig.S3OutputPath": "launch.bucket",
    "OutputDataConfig.KmsKeyId": "launch.output_kms_key",
    "CheckpointConfig.S3Uri": "launch.bucket",
    "TensorBoardOutputConfig.S3OutputPath": "launch.bucket",
    "ResourceConfig.InstanceType": "hardware.instance_type",
    "ResourceConfig.InstanceCount": "hardware.nodes",
    "ResourceConfig.KeepAlivePeriodInSeconds": "launch.warm_pool_minutes",
    "ResourceConfig.TrainingPlanArn": "launch.training_plan",
    "StoppingCondition.MaxRuntimeInSeconds": "launch.max_run_hours",
    "StoppingCondition.MaxWaitTimeInSeconds": "launch.max_wait_hours",
    "StoppingCondition.MaxPendingTimeInSeconds": "launch.max_pending_hours",
    "RetryStrategy": "launch.internal_retries",
    "VpcConfig.Subnets": "launch.subnets",
    "VpcConfig.SecurityGroupIds": "launch.security_groups",
    "Environment": "launch.environment",
    "Tags": "launch.tags",
}


@cache
def shape(operation: str = "CreateTrainingJob") -> Any:
    """The input shape of an operation of the installed botocore. Raises MachineError: there is
    none."""
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError:
        finding = Finding("boto3", "error", "launch", "boto3 is not installed", INSTALL)
        raise MachineError(finding) from None
    # Not of a session, which reads the AWS configuration: a profile that is not there is no matter.
    model = ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
    return model.operation_model(operation).input_shape


def check(request: Mapping[str, Any]) -> list[Finding]:
    """An error for everything that the model does not allow, by the setting it comes from."""
    from botocore.validate import ParamValidator

    members = shape()
    found = [(path, said) for path, said in _walk(request, members, "")]
    if not found:  # what else botocore itself would refuse
        report = ParamValidator().validate(request, members)
        if report.has_errors():
            found = [("", line) for line in report.generate_report().splitlines()]
    return [
        Finding("service-model", "error", _setting(path), said, _fix(path),
                "botocore's service model, CreateTrainingJob")
        for path, said in dict.fromkeys(found)
    ]  # fmt: skip


def _setting(path: str) -> str:
    plain = path.partition("[")[0]
    fits = [name for name in SETTINGS if plain == name or plain.startswith(f"{name}.")]
    return SETTINGS[max(fits, key=len)] if fits else "launch"


def _fix(path: str) -> str:
    return f"it becomes {path} of the request" if path else ""


def _walk(value: Any, shape: Any, path: str) -> Iterator[tuple[str, str]]:
    """(member's path, what is wrong) of a value and all inside it."""
    kind, limits = shape.type_name, shape.metadata
    if not _is(value, kind):
        yield path, f"{value!r:.40} is no {kind}"
    elif kind == "structure":
        for name in shape.required_members:
            if name not in value:
                yield path, f"it lacks {name}"
        for name, inner in value.items():
            below = f"{path}.{name}".lstrip(".")
            if name in shape.members:
                yield from _walk(inner, shape.members[name], below)
            else:
                yield below, f"there is no such member{did_you_mean(name, shape.members)}"
    elif kind == "list":
        yield from _size(len(value), limits, path, "entries")
        for number, inner in enumerate(value):
            yield from _walk(inner, shape.member, f"{path}[{number}]")
    elif kind == "map":
        yield from _size(len(value), limits, path, "entries")
        for name, inner in value.items():
            yield from _walk(name, shape.key, f"{path}[name {name!r:.40}]")
            yield from _walk(inner, shape.value, f"{path}[{name!r:.40}]")
    elif kind == "string":
        yield from _size(len(value), limits, path, "characters")
        if "enum" in limits and value not in limits["enum"]:
            yield path, f"{value!r} is not known{did_you_mean(value, limits['enum'])}"
        if "pattern" in limits and not _expression(limits["pattern"]).fullmatch(value):
            yield path, f"{value!r:.80} has not the form {limits['pattern']}"
    elif kind in _INTEGERS:
        lowest, highest = limits.get("min"), limits.get("max", _INTEGERS[kind])
        if (lowest is not None and value < lowest) or value > highest:
            yield path, f"{value} is not {_range(lowest, highest)}"


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, int if kind in _INTEGERS else _TYPES.get(kind, object))


def _size(size: int, limits: Mapping[str, Any], path: str, unit: str) -> Iterator[tuple[str, str]]:
    lowest, highest = limits.get("min"), limits.get("max")
    if size < (lowest or 0) or (highest is not None and size > highest):
        yield path, f"it has {size} {unit}, and must have {_range(lowest, highest)}"


def _range(lowest: int | None, highest: int | None) -> str:
    if highest is None:
        return f"at least {lowest}"
    return f"at most {highest}" if not lowest else f"from {lowest} to {highest}"


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """A pattern of the model, which is written as Java has it."""
    for java, python in ((r"\p{Alnum}", "A-Za-z0-9"), (r"\p{L}\p{Z}\p{N}", r"\w\s")):
        pattern = pattern.replace(java, python)
    return re.compile(pattern)
