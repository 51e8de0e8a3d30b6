from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from unittest import mock

import botocore.loaders
import botocore.session
import pytest

from tests.launch.aws import fake_aws


@pytest.fixture(scope="session")
def server() -> Iterator[fake_aws.Account]:
    """The account's server. All clients share what they read of botocore's models, which takes
    longer than most tests."""
    loader = botocore.loaders.create_loader()
    with (
        mock.patch.object(botocore.session, "create_loader", return_value=loader),
        fake_aws.running() as account,
    ):
        yield account


@pytest.fixture
def account(
    server: fake_aws.Account, monkeypatch: pytest.MonkeyPatch
) -> Iterator[fake_aws.Account]:
    """An empty account that boto3 finds through its own variables, here and in new processes."""
    for name, value in fake_aws.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    urllib.request.urlopen(
        urllib.request.Request(f"{server.url}/moto-api/reset", method="POST"), timeout=30
    )
    server.reset()
    return server
