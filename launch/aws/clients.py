"""Clients of one AWS account and region, and its errors in words that lead on.

boto3 is imported when a client is first needed. Region, profile and endpoints come from where
boto3 looks for them (AWS_REGION, AWS_PROFILE, AWS_ENDPOINT_URL, ~/.aws); `region` overrides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from planning.findings import ChoiceError, Finding, MachineError

INSTALL = "make setup, or pip install 'slipway[sagemaker]'"
LOG_IN = "log in (aws sso login, aws configure), or set AWS_PROFILE to one that may do this"
# Codes of errors that end with another identity or a fresh token.
_LOGGED_OUT = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "AuthFailure",
    "RequestExpired",
}
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "Forbidden"}
_BUSY = {"Throttling", "ThrottlingException", "TooManyRequestsException", "SlowDown"}


class Clients:
    """`clients("sagemaker")` is a boto3 client; each service has one.

    Raises MachineError if boto3 or a region is missing.
    """

    def __init__(self, region: str | None = None) -> None:
        try:
            import boto3.session  # noqa: F401
        except ModuleNotFoundError:
            raise MachineError(
                Finding("no-boto3", "error", "launch", "boto3 is not installed here", INSTALL)
            ) from None
        self._region = region
        self.renew()
        found = self._session.region_name
        if found is None:
            raise MachineError(
                Finding(
                    "no-region",
                    "error",
                    "launch.region",
                    "no AWS region is chosen",
                    "set launch.region, AWS_REGION, or the region of your AWS profile",
                )
            )
        self.region: str = found

    def renew(self) -> None:
        """Take up credentials that were renewed outside, by a new login."""
        from boto3.session import Session

        with said("read the AWS configuration"):
            self._session = Session(region_name=self._region)
        self._made: dict[str, Any] = {}

    def __call__(self, service: str) -> Any:
        if service not in self._made:
            from botocore.config import Config

            config = Config(
                retries={"mode": "standard", "max_attempts": 5},
                connect_timeout=10,
                user_agent_extra="slipway",
            )
            with said(f"reach {service}"):
                self._made[service] = self._session.client(service, config=config)
        return self._made[service]

    @cached_property
    def identity(self) -> tuple[str, str]:
        """(account, ARN) of whoever asks."""
        with said("ask who you are"):
            answer = self("sts").get_caller_identity()
        return str(answer["Account"]), str(answer["Arn"])


@contextmanager
def said(doing: str, setting: str = "launch") -> Iterator[None]:
    """Turns an error of AWS while `doing` something into a refusal that says what would do."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (ClientError, BotoCoreError) as error:
        finding = explain(error, doing, setting)
        raise (MachineError if finding.machine else ChoiceError)(finding) from None


def code(error: Exception) -> str:
    """The service's word for an error, such as ValidationException; "" if it never answered."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def text(error: Exception) -> str:
    return str(getattr(error, "response", {}).get("Error", {}).get("Message", "") or error)


def refused(error: Exception) -> bool:
    """Has the service, or boto3 before it, said no? An error within the service says nothing."""
    answered = bool(code(error)) or type(error).__name__ == "ParamValidationError"
    return answered and _status(error) < 500


def _status(error: Exception) -> int:
    answer = getattr(error, "response", {}).get("ResponseMetadata", {})
    return int(answer.get("HTTPStatusCode", 0))


def denied(error: Exception) -> bool:
    return code(error) in _DENIED


def explain(error: Exception, doing: str, setting: str = "launch") -> Finding:
    """A finding for an error of botocore or of a service."""
    name, message = code(error), " ".join(text(error).split())
    kind = type(error).__name__

    def finding(what: str, fix: str, machine: bool = True) -> Finding:
        return Finding("aws", "error", setting, f"cannot {doing}: {what}", fix, machine=machine)

    if kind == "ProfileNotFound":
        return finding(message, "set AWS_PROFILE to a profile of ~/.aws/config")
    if name in _LOGGED_OUT or "Credential" in kind or "SSO" in kind or "Token" in kind:
        return finding(message or "no valid AWS credentials", LOG_IN)
    if denied(error):
        action = re.search(r"not authorized to perform:? ([\w-]+:\w+)", message)
        if action:
            return finding(f"{action[1]} is not allowed to you", f"allow {action[1]}, or {LOG_IN}")
        return finding(message or "access denied", LOG_IN)
    if name == "ResourceLimitExceeded":
        return finding(
            message,
            "ask for a higher quota in Service Quotas (SageMaker AI), or take a training plan",
        )
    if name in _BUSY:
        return finding("AWS answers too many requests", "try again in a minute")
    if kind in (
        "EndpointConnectionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ConnectionClosedError",
        "ProxyConnectionError",
        "SSLError",
    ):
        return finding(message, "check the network, the proxy and the region's name")
    if name in ("ResourceInUse", "ResourceInUseException"):
        return finding(message, "choose another name", machine=False)
    if name in ("CapacityError", "InsufficientCapacityException"):
        return finding(message, "try later, in another region, or take a training plan")
    shown = f"{name}: {message}" if name and name != message else message
    if _status(error) >= 500:
        return finding(f"an error within AWS: {shown[:200]}", "try again in a minute")
    return finding(shown, "", machine=not refused(error))
