"""What a check before the submission has found: one row of its table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from launch.aws.clients import Clients, denied, explain
from planning.findings import Finding

Request = dict[str, Any]
Verdict = Literal["ok", "warning", "failed", "not checked"]


@dataclass(frozen=True)
class Row:
    """machine: another day, another quota or another identity would do; else the setting is
    wrong."""

    what: str
    verdict: Verdict
    said: str
    fix: str = ""
    setting: str = "launch"
    machine: bool = True

    @property
    def finding(self) -> Finding:
        severity: Literal["error", "warning"] = "error" if self.verdict == "failed" else "warning"
        return Finding(
            f"aws-{self.what.replace(' ', '-')}",
            severity,
            self.setting,
            f"{self.what}: {self.said}",
            self.fix,
            machine=self.machine,
        )


Check = Callable[[Request, Clients], Iterable[Row]]


def asked(what: str, permission: str, check: Check) -> Check:
    """The check; where AWS does not let us look, one row says so and what it takes."""

    def run(request: Request, clients: Clients) -> Iterator[Row]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield from check(request, clients)
        except ClientError as error:
            if denied(error):
                yield Row(what, "not checked", f"{permission} is not allowed to you")
            else:
                yield Row(what, "not checked", explain(error, "look").message)
        except BotoCoreError as error:
            yield Row(what, "not checked", explain(error, "look").message)

    return run


def instances(request: Request) -> tuple[str, int]:
    """(instance type, count)"""
    resources = request["ResourceConfig"]
    return str(resources["InstanceType"]), int(resources["InstanceCount"])


def s3_parts(uri: str) -> tuple[str, str]:
    """s3://bucket/some/prefix -> (bucket, some/prefix)"""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
