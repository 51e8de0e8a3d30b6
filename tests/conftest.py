"""Fixtures of several folders. What they need is imported when one is used."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

if TYPE_CHECKING:
    from tests.launch.aws.fake_aws import Account


@pytest.fixture(scope="session")
def aws_server() -> Iterator[Account]:
    """The account's server. Sessions of one region and environment are one, with their clients:
    making them takes longer than most tests."""
    import boto3.session

    from tests.launch.aws import fake_aws

    class Shared(boto3.session.Session):
        def __init__(self, **choices: Any) -> None:
            super().__init__(**choices)
            self._made: dict[str, Any] = {}

        def client(self, service_name: str, **choices: Any) -> Any:
            if service_name not in self._made:
                self._made[service_name] = super().client(service_name, **choices)
            return self._made[service_name]

    sessions: dict[Any, Shared] = {}

    def shared(region_name: str | None = None) -> Shared:
        found = [item for item in os.environ.items() if item[0].startswith("AWS_")]
        key = (region_name, *sorted(found))
        if key not in sessions:
            sessions[key] = Shared(region_name=region_name)
        return sessions[key]

    with mock.patch.object(boto3.session, "Session", shared), fake_aws.running() as account:
        yield account


@pytest.fixture
def account(aws_server: Account, monkeypatch: pytest.MonkeyPatch) -> Account:
    """An empty account that boto3 finds through its own variables, here and in new processes."""
    from tests.launch.aws import fake_aws

    for name, value in fake_aws.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_server.url)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    urllib.request.urlopen(
        urllib.request.Request(f"{aws_server.url}/moto-api/reset", method="POST"), timeout=30
    )
    aws_server.reset()
    return aws_server
