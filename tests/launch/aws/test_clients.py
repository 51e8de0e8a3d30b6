"""What is said of AWS's errors: which setting, what would do, and the exit status."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from botocore import exceptions
from botocore.exceptions import ClientError

from launch.aws.clients import said
from planning.findings import ChoiceError, MachineError, Refusal
from tests.training.runs import ROOT


def answer(code: str, message: str = "m") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "Operation")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (exceptions.NoCredentialsError(), MachineError, "set AWS_PROFILE"),
        (exceptions.SSOTokenLoadError(error_msg="x", profile_name="p"), MachineError, "log in"),
        (exceptions.ProfileNotFound(profile="team"), MachineError, "AWS_PROFILE to a profile of"),
        (exceptions.EndpointConnectionError(endpoint_url="https://x"), MachineError, "the proxy"),
        (exceptions.ParamValidationError(report="x"), ChoiceError, "cannot ask"),
        (answer("ExpiredTokenException"), MachineError, "log in"),
        (answer("AccessDeniedException", "User: arn:x is not authorized to perform: "
                "sagemaker:StopTrainingJob on resource: y"), MachineError,
         "sagemaker:StopTrainingJob is not allowed to you"),
        (answer("AccessDenied"), MachineError, "log in"),
        (answer("ThrottlingException"), MachineError, "try again in a minute"),
        (answer("ResourceInUse"), ChoiceError, "choose another name"),
        (answer("ValidationException", "1 validation error\n detected"), ChoiceError,
         "ValidationException: 1 validation error detected"),
    ],
)  # fmt: skip
def test_every_error_is_one_finding(error: Exception, kind: type[Refusal], says: str) -> None:
    with pytest.raises(Refusal) as refused, said("ask"):
        raise error
    assert type(refused.value) is kind
    (finding,) = refused.value.findings
    assert finding.message.startswith("cannot ask: ")
    assert says in str(finding)


def test_other_errors_are_our_own() -> None:
    with pytest.raises(ZeroDivisionError), said("ask"):
        raise ZeroDivisionError


def test_looking_after_jobs_imports_nothing_large_before_it_is_needed() -> None:
    code = "import sys, launch.jobs, tools.plans; print(*sys.modules)"
    done: Any = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert not {"boto3", "botocore", "torch", "megatron", "nemo_run", "sagemaker"} & loaded
