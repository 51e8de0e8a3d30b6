"""5,000 launch settings at random: each becomes a request that the service's model accepts, or is
refused with a message that names a setting and a way out."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from botocore.validate import ParamValidator

from launch import compose, elsewhere
from launch.aws import request, service_model
from launch.start import run_name
from planning.findings import ChoiceError, Finding, errors
from planning.plan import Plan
from planning.schema import RunConfig, SageMakerLaunch
from tests import choices
from tests.launch.elsewhere import ACCOUNT, IMAGE, MODEL, ROLE, TRAINING_PLAN, planned

COUNT = 5_000
SEED = 20261201
ODD = ["", " ", "x", "a b", "größe", "0", "-", "../x", "a" * 70, "a" * 600, "\0", "\n", "s3://",
       "💾", "${HOME}", "$(id)", "arn:aws:iam::1:role/x", "null", "true", "A" * 3000]  # fmt: skip
HARDWARE = ("p5", "p5en", "p6_b200", "p6_b300", "p6e_gb200", "b200", "cpu")


def text(*usual: str, odd: float = 0.04, null: float = 0.2) -> Callable[[random.Random], Any]:
    def draw(r: random.Random) -> Any:
        chance = r.random()
        if chance < odd:
            return r.choice(ODD)
        return None if chance < odd + null else r.choice(usual)

    return draw


def number(*usual: Any, odd: float = 0.04) -> Callable[[random.Random], Any]:
    strange = [-1, 0, 1, 0.5, 1e-9, 1e9, 2**31, 2**63, 2**70, float("nan"), "7", True]
    return lambda r: r.choice(strange) if r.random() < odd else r.choice(usual)


def flag(true: float = 0.3) -> Callable[[random.Random], Any]:
    return lambda r: "yes" if r.random() < 0.01 else r.random() < true


def names(keys: list[str], values: list[str], most: int) -> Callable[[random.Random], Any]:
    def draw(r: random.Random) -> Any:
        if r.random() < 0.4:
            return None
        count = r.choice([0, 1, 1, 2, 3]) if r.random() < 0.95 else most + 5
        found = {}
        for i in range(count):
            key = r.choice(keys) if r.random() < 0.96 else r.choice(ODD)
            found[f"{key}{i}" if count > 3 else key] = (
                r.choice(values) if r.random() < 0.96 else r.choice([*ODD, 7])
            )
        return found

    return draw


def some(*usual: str, most: int) -> Callable[[random.Random], Any]:
    def draw(r: random.Random) -> Any:
        count = r.choice([0, 0, 1, 2]) if r.random() < 0.97 else most + 1
        return [r.choice(usual) if r.random() < 0.97 else r.choice(ODD) for _ in range(count)]

    return draw


FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "environment": names(["NCCL_DEBUG", "A", "NCCL_PROTO", "RANK"], ["INFO", "1", "x" * 512], 100),
    "preflight": flag(0.8),
    "min_allreduce_gb_s": number(None, 300, 0.5),
    "max_restarts": number(0, 3, 10),
    "dry_run": lambda _: True,
    "wait": flag(),
    "max_parallel": number(None, 1, 8),
    "region": text("us-east-1", "us-east-1", "us-west-2", "us-gov-west-1"),
    "role": text(ROLE, f"arn:aws:iam::{ACCOUNT}:role/path/x@y"),
    "image": text(IMAGE, IMAGE, IMAGE.replace("us-east-1", "us-west-2")),
    "bucket": text("team-runs", "a.b-c"),
    "prefix": text("slipway", "a/b/c", "/x/", "x" * 499, null=0),
    "job_name": text("nightly", "a-1", "x" * 36),
    "training_plan": text(TRAINING_PLAN, null=0.7),
    "spot": flag(0.2),
    "max_run_hours": number(1, 24, 120, 400, 672, 0.01),
    "max_wait_hours": number(None, None, 24, 672, 720),
    "max_pending_hours": number(None, None, 1, 48, 672),
    "warm_pool_minutes": number(0, 0, 30, 360),
    "internal_retries": number(0, 2, 30),
    "stop_before_end_minutes": number(40, 45, 120),
    "channels": names(
        ["web", "books", "shared", "plan"],
        ["s3://team-data/web", "s3://team-data", "fsx://fs-0123456789abcdef0/m/x",
         "efs://fs-0a1b2c3d4e/y"],
        20,
    ),
    "copy_channels": some("web", most=20),
    "run_folder": text("data:shared/runs/one", "data:web/x", null=0.9),
    "subnets": some("subnet-0a1b2c3d", "subnet-0a1b2c3e", most=16),
    "security_groups": some("sg-0a1b2c3d", most=5),
    "network_isolation": flag(),
    "encrypt_traffic": flag(),
    "output_kms_key": text("alias/runs", f"arn:aws:kms:us-east-1:{ACCOUNT}:key/1234-ab", null=0.6),
    "remote_debug": flag(),
    "health_check": flag(),
    "tensorboard_output": flag(),
    "tags": names(["team", "aws:x", "cost center"], ["research", "a b", "x" * 256], 50),
}  # fmt: skip


def draw(r: random.Random, usual: dict[str, Any]) -> dict[str, Any]:
    """Settings of which a few at a time are drawn: with all of them hardly any would be legal."""
    count = r.choice([1, 2, 3, 5, 8, len(FIELDS)])
    drawn = {name: FIELDS[name](r) for name in r.sample(sorted(FIELDS), count)}
    return {"name": "sagemaker", "kind": "sagemaker", **usual, **drawn}


def judged(values: dict[str, Any], plan: Plan) -> tuple[list[Finding], RunConfig | None]:
    """(why it is refused, the choice where it is not)"""
    try:
        config = compose.from_values(values)
    except ChoiceError as refusal:
        return refusal.findings, None
    plan = plan.model_copy(update={"config": config})
    found = errors(elsewhere.check(config, plan, dry=True))
    return found, None if found else config


def test_settings_at_random_become_a_legal_request_or_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its digest is a tag of the request; making it takes ten times as long as all the rest.
    monkeypatch.setattr(Plan, "to_yaml", lambda _: "the plan")
    r = random.Random(SEED)
    chosen = {
        name: choices.values("launch=sagemaker", *MODEL, f"hardware={name}") for name in HARDWARE
    }
    plans = {name: planned(compose.from_values(values)) for name, values in chosen.items()}
    known = compose.settings()
    refused: Counter[str] = Counter()
    accepted = 0
    for number_ in range(COUNT):
        hardware = r.choice(HARDWARE) if r.random() < 0.2 else "p6_b200"
        usual = chosen[hardware]
        values = {**usual, "launch": draw(r, usual["launch"])}
        found, config = judged(values, plans[hardware])
        at = f"settings {number_} of seed {SEED}: {values['launch']}"
        for finding in found:
            refused[finding.id] += 1
            setting = finding.setting
            assert any(setting == s or setting.startswith(f"{s}.") for s in known), (setting, at)
            assert setting != "launch", (finding, at)
            assert finding.message, at
            assert finding.fix, at
        if config is not None:
            accepted += 1
            _is_legal(config, plans[hardware], at)
    print(f"\n{COUNT:,} launch settings: {accepted:,} accepted; refused: "
          + ", ".join(f"{name} {count}" for name, count in refused.most_common()))  # fmt: skip
    assert accepted > COUNT // 5
    # All that can be wrong in settings alone was met.
    assert len(refused) > 15


def _is_legal(config: RunConfig, plan: Plan, at: str) -> None:
    """Of the request: by botocore's own validator, and by limits written down here again."""
    launch = config.launch
    assert isinstance(launch, SageMakerLaunch)
    plan = plan.model_copy(update={"config": config})
    name = run_name(launch.job_name or plan.name, "20261201-103341", "a1b2")
    asked = request.build(plan, launch, name)
    report = ParamValidator().validate(asked, service_model.shape())
    assert not report.has_errors(), (report.generate_report(), at)
    assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", asked["TrainingJobName"]), at
    stopping, resources = asked["StoppingCondition"], asked["ResourceConfig"]
    assert 1 <= stopping["MaxRuntimeInSeconds"] <= 28 * 86400, at
    assert 0 <= resources.get("KeepAlivePeriodInSeconds", 0) <= 21600, at
    assert (
        1 <= asked.get("RetryStrategy", {"MaximumRetryAttempts": 1})["MaximumRetryAttempts"] <= 30
    )
    if asked["EnableManagedSpotTraining"]:
        assert "TrainingPlanArn" not in resources, at
        assert "KeepAlivePeriodInSeconds" not in resources, at
        assert stopping["MaxWaitTimeInSeconds"] >= stopping["MaxRuntimeInSeconds"], at
    if "MaxPendingTimeInSeconds" in stopping:
        assert 1800 <= stopping["MaxPendingTimeInSeconds"] <= 2419200, at
    assert len(asked["InputDataConfig"]) <= 20, at
    names_ = [channel["ChannelName"] for channel in asked["InputDataConfig"]]
    assert len(set(names_)) == len(names_), at
    assert len(asked["Tags"]) <= 50, at
    assert len({tag["Key"] for tag in asked["Tags"]}) == len(asked["Tags"]), at
    assert all(len(v) <= 512 for v in asked.get("Environment", {}).values()), at
