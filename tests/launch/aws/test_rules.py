"""Every rule of SageMaker's settings: a choice that breaks it and one that does not."""

from __future__ import annotations

from functools import cache

import pytest

from launch.aws import rules
from planning.findings import Finding
from planning.schema import SageMakerLaunch
from tests.launch.aws.test_request import FSX, VPC
from tests.launch.elsewhere import GIVEN, TRAINING_PLAN, choose

PLAN = f"launch.training_plan={TRAINING_PLAN}"
DATA = "data=indexed"
WEB = "launch.channels.web=s3://team-data/web"
# id -> (words that break the rule, setting that is named, words that keep to it)
CASES: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "instance": (("hardware=b200",), "hardware", ("hardware=p6_b200",)),
    "plan-and-spot": ((PLAN, "launch.spot=true"), "launch.spot", (PLAN,)),
    "spot-instance": (
        ("hardware=p6e_gb200", "launch.spot=true"),
        "launch.spot",
        ("hardware=p6_b300", "launch.spot=true"),
    ),
    "spot-wait": (
        ("launch.spot=true", "launch.max_run_hours=10", "launch.max_wait_hours=9"),
        "launch.max_wait_hours",
        ("launch.spot=true", "launch.max_run_hours=10", "launch.max_wait_hours=10"),
    ),
    "spot-save": (
        ("launch.spot=true", "checkpoint.save=false"),
        "checkpoint.save",
        ("checkpoint.save=false",),
    ),
    "longest-run": (
        ("launch.max_run_hours=673",),
        "launch.max_run_hours",
        ("launch.max_run_hours=672",),
    ),
    "shortest-run": (
        ("launch.max_run_hours=0.1",),
        "launch.max_run_hours",
        ("launch.max_run_hours=0.25",),
    ),
    "run-quota": (
        ("launch.max_run_hours=121",),
        "launch.max_run_hours",
        ("launch.max_run_hours=120",),
    ),
    "stop-before-end": (
        (PLAN, "launch.stop_before_end_minutes=30"),
        "launch.stop_before_end_minutes",
        (PLAN, "launch.stop_before_end_minutes=31"),
    ),
    "warm-pool": (
        ("launch.warm_pool_minutes=361",),
        "launch.warm_pool_minutes",
        ("launch.warm_pool_minutes=360",),
    ),
    "warm-pool-plan": (
        (PLAN, "launch.warm_pool_minutes=10"),
        "launch.warm_pool_minutes",
        ("launch.warm_pool_minutes=10",),
    ),
    "arm": (("hardware=p6e_gb200",), "launch.image", ("hardware=p6_b200",)),
    "job-name": (("launch.job_name=a_b",), "launch.job_name", ("launch.job_name=a-b",)),
    "bucket": (("launch.bucket=s3://b",), "launch.bucket", ("launch.bucket=team-runs",)),
    "prefix": (("launch.prefix=a//b",), "launch.prefix", ("launch.prefix=a/b",)),
    "region": (("launch.region=us-west-2",), "launch.image", ("launch.region=us-east-1",)),
    "account": (
        ("launch.training_plan=arn:aws:sagemaker:us-east-1:444455556666:training-plan/x",),
        "launch.training_plan",
        (PLAN,),
    ),
    "image-account": (
        ("launch.image=444455556666.dkr.ecr.us-east-1.amazonaws.com/slipway:1",),
        "launch.image",
        (),
    ),
    "image": (
        ("launch.image=slipway:latest",),
        "launch.image",
        ("launch.image=111122223333.dkr.ecr.us-east-1.amazonaws.com/slipway@sha256:0a",),
    ),
    "channel": (("launch.channels.plan=s3://bbb/x",), "launch.channels.plan", (WEB,)),
    "copy-channels": (
        (WEB, "launch.copy_channels=[wep]"),
        "launch.copy_channels",
        (WEB, "launch.copy_channels=[web]"),
    ),
    "path": (
        (DATA, "data.paths=[/data/web]"),
        "data.paths",
        (DATA, WEB, "data.paths=[data:web/a,s3://bbb/c]"),
    ),
    "cache": (("data.cache=/scratch",), "data.cache", ()),
    "run-folder": ((WEB, "launch.run_folder=data:web/x"), "launch.run_folder", FSX),
    "shared-folder": (("hardware.nodes=2",), "launch.run_folder", ("hardware.nodes=2", *FSX)),
    "keep": (("checkpoint.keep=1",), "checkpoint.keep", ("checkpoint.keep=2",)),
    "vpc": (("launch.subnets=[subnet-1]",), "launch.security_groups", VPC),
    "file-system-vpc": (
        ("launch.channels.shared=efs://fs-0a1b2c3d/x",),
        "launch.subnets",
        ("launch.channels.shared=efs://fs-0a1b2c3d/x", *VPC),
    ),
    "isolation": (
        (DATA, "data.paths=[s3://bbb/c]", "launch.network_isolation=true"),
        "data.paths",
        (DATA, WEB, "data.paths=[data:web/c]", "launch.network_isolation=true"),
    ),
    "encrypted-traffic": (
        ("launch.encrypt_traffic=true", "hardware.nodes=2"),
        "launch.encrypt_traffic",
        ("launch.encrypt_traffic=true",),
    ),
    "tags": (("launch.tags.aws:x=a",), "launch.tags.aws:x", ("launch.tags.team=research",)),
}


@cache
def found(*words: str) -> dict[str, Finding]:
    config = choose("sagemaker", *GIVEN, *words)
    assert isinstance(config.launch, SageMakerLaunch)
    return {finding.id: finding for finding in rules.check(rules.Facts(config, config.launch))}


def test_every_rule_is_here() -> None:
    assert [f"sagemaker-{name}" for name in CASES] == [rule.id for rule in rules.RULES]


@pytest.mark.parametrize("name", CASES)
def test_a_choice_that_breaks_a_rule_is_told_how_not_to(name: str) -> None:
    breaking, setting, keeping = CASES[name]
    finding = found(*breaking)[f"sagemaker-{name}"]
    assert finding.setting == setting
    assert finding.message
    assert finding.fix
    assert finding.source
    assert f"sagemaker-{name}" not in found(*keeping)


@pytest.mark.parametrize("name", CASES)
def test_what_keeps_to_one_rule_breaks_no_other(name: str) -> None:
    kept = found(*CASES[name][2])
    assert [f for f in kept.values() if f.severity == "error"] == []


# Further faces of rules that look at several things.
@pytest.mark.parametrize(
    ("name", "words", "part"),
    [
        ("instance", ("hardware=p6_b200", "hardware.gpus_per_node=4"), "has 8 b200"),
        ("instance", ("hardware=cpu",), "hardware=cpu is no instance type"),
        (
            "instance",
            ("hardware=p6_b200", "hardware.instance_type=ml.p6-b200.24xlarge"),
            "did you mean ml.p6-b200.48xlarge?",
        ),
        ("spot-wait", ("launch.max_wait_hours=9",), "only a spot job"),
        ("longest-run", ("launch.spot=true", "launch.max_wait_hours=721"), "720 h (30 days)"),
        ("warm-pool", ("launch.spot=true", "launch.warm_pool_minutes=5"), "spot instances"),
        ("stop-before-end", (PLAN, "launch.stop_before_end_minutes=1440"), "are all of"),
        ("job-name", (f"launch.job_name={'a' * 37}",), "at most 36"),
        ("bucket", ("launch.bucket=a/b",), "no bucket's name"),
        ("prefix", (f"launch.prefix={'a' * 501}",), "at most 500"),
        ("region", ("launch.region=virginia",), "'virginia' is no region"),
        (
            "region",
            ("launch.training_plan=arn:aws:sagemaker:eu-west-1:111122223333:training-plan/x",),
            "it is in eu-west-1, and launch.image says us-east-1",
        ),
        ("channel", ("launch.channels.web=/data/web",), "s3://bucket/prefix"),
        ("channel", ("launch.channels.w b=s3://bbb/x",), "no channel's name"),
        ("path", ("data=indexed", "data.paths=[data:wab/x]", WEB), "did you mean web?"),
        ("path", ("checkpoint.load=/old/checkpoints",), "is on this machine"),
        ("path", ("checkpoint.load=s3://bbb/checkpoints",), "weights are read from a folder"),
        ("path", ("checkpoint.save=/big/disk",), "kept in S3"),
        ("run-folder", ("launch.run_folder=/fsx/runs",), "is not on a file system"),
        ("run-folder", (*FSX[:1], "launch.run_folder=data:shared", *VPC), "names no folder"),
        ("run-folder", (*FSX[:1], "launch.run_folder=data:shared/a/../b", *VPC), "names no folder"),
        ("copy-channels", (*FSX, "launch.copy_channels=[shared]"), "is a file system"),
        ("tags", ("launch.tags.slipway-run=x",), "every job has it"),
    ],
)
def test_a_rule_says_what_it_found(name: str, words: tuple[str, ...], part: str) -> None:
    assert part in str(found(*words)[f"sagemaker-{name}"])


def test_twenty_channels_are_too_many() -> None:
    channels = [f"launch.channels.c{number}=s3://bbb/{number}" for number in range(20)]
    assert "sagemaker-channel" in found(*channels)
    assert "sagemaker-channel" not in found(*channels[:19])


def test_48_tags_are_too_many() -> None:
    tags = [f"launch.tags.t{number}=x" for number in range(48)]
    assert "sagemaker-tags" in found(*tags)
    assert "sagemaker-tags" not in found(*tags[:47])
