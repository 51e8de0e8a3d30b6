"""Fixtures of several folders. What they need is imported when one is used."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest import mock

import pytest

if TYPE_CHECKING:
    from tests.launch.aws.fake_aws import Account


@pytest.fixture(scope="session")
def aws_server() -> Iterator[Account]:
    """The account's server. All clients share what they read of botocore's models, which takes
    longer than most tests."""
    import botocore.session

    from tests.launch.aws import fake_aws

    loader = botocore.session.create_loader()
    with (
        mock.patch.object(botocore.session, "create_loader", return_value=loader),
        fake_aws.running() as account,
    ):
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
