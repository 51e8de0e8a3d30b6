"""The request of a SageMaker job: golden files, and what is in it for which setting."""

from __future__ import annotations

import json
from typing import Any

import pytest

from container import contract
from launch import start as start_file
from launch.aws import channels, request, service_model
from planning.plan import expand, locate
from planning.schema import SageMakerLaunch
from tests.launch.elsewhere import GIVEN, NAME, TRAINING_PLAN, golden, plan
from training.events import LOG_METRICS

VPC = ("launch.subnets=[subnet-0a1b2c3d]", "launch.security_groups=[sg-0a1b2c3d]")
FSX = (
    "launch.channels.shared=fsx://fs-0123456789abcdef0/abcdefgh",
    "launch.run_folder=data:shared/runs/one",
    *VPC,
)
CASES: dict[str, tuple[str, ...]] = {
    "dry": (),  # nothing of the account is given
    "p5": ("hardware=p5", *GIVEN),
    "p5en": ("hardware=p5en", *GIVEN),
    "p6_b200": ("hardware=p6_b200", *GIVEN),
    "p6_b300": ("hardware=p6_b300", *GIVEN),
    "p6e_gb200": ("hardware=p6e_gb200", f"launch.training_plan={TRAINING_PLAN}", *GIVEN),
    "spot": ("launch.spot=true", "launch.max_run_hours=10", "launch.max_wait_hours=36", *GIVEN),
    "plan": (
        f"launch.training_plan={TRAINING_PLAN}",
        "launch.max_run_hours=72",
        "launch.max_pending_hours=48",
        "launch.stop_before_end_minutes=45",
        *GIVEN,
    ),
    "nodes": ("hardware.nodes=4", "launch.encrypt_traffic=true", *VPC, *GIVEN),
    "fsx": ("hardware.nodes=2", *FSX, *GIVEN),
    "all": (
        "launch.channels.web=s3://team-data/web/",
        "launch.channels.books=s3://team-data/books",
        "launch.channels.code=efs://fs-0a1b2c3d4e/code",
        "launch.copy_channels=[books]",
        "launch.job_name=nightly",
        "launch.prefix=a/b",
        "launch.region=us-east-1",
        "launch.environment.NCCL_DEBUG=INFO",
        "launch.tags.team=research",
        "launch.warm_pool_minutes=30",
        "launch.internal_retries=0",
        "launch.max_restarts=0",
        "launch.preflight=false",
        "launch.min_allreduce_gb_s=300",
        "launch.network_isolation=true",
        "launch.output_kms_key=alias/runs",
        "launch.remote_debug=true",
        "launch.health_check=false",
        "launch.tensorboard_output=true",
        *VPC,
        *GIVEN,
    ),
}


def built(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(request, start.json)"""
    chosen = plan("sagemaker", *words)
    launch = chosen.config.launch
    assert isinstance(launch, SageMakerLaunch)
    return request.build(chosen, launch, NAME), request.start(chosen, launch, NAME)


@pytest.mark.parametrize("case", CASES)
def test_a_request_is_as_its_golden_file_has_it(case: str) -> None:
    asked, start = built(*CASES[case])
    assert service_model.check(asked) == []
    digest = next(tag for tag in asked["Tags"] if tag["Key"] == "slipway-plan")
    assert len(digest["Value"]) == 16
    digest["Value"] = "(the plan's)"
    assert start["environment"] == plan("sagemaker", *CASES[case]).environment
    start["environment"] = "(the plan's)"
    golden(
        f"sagemaker_{case}.json", json.dumps({"request": asked, "start": start}, indent=2) + "\n"
    )


@pytest.mark.parametrize("case", CASES)
def test_the_container_reads_what_was_written(case: str, tmp_path: Any) -> None:
    _, start = built(*CASES[case])
    path = contract.start_file(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(start_file.to_json(start))
    read = contract.read_start(tmp_path)
    assert (read.name, str(read.run_dir)) == (NAME, start["run_dir"])
    assert read.nodes * read.gpus_per_node == plan("sagemaker", *CASES[case]).derived.world_size


def test_the_plan_decides_type_and_number() -> None:
    asked, _ = built("hardware=p6_b300", "hardware.nodes=4", *GIVEN)
    assert asked["ResourceConfig"] == {"InstanceType": "ml.p6-b300.48xlarge", "InstanceCount": 4}


def test_metrics_are_those_that_the_log_has() -> None:
    definitions = built(*GIVEN)[0]["AlgorithmSpecification"]["MetricDefinitions"]
    assert {d["Name"]: d["Regex"] for d in definitions} == LOG_METRICS


def test_another_plan_has_another_tag_and_the_same_one_the_same() -> None:
    def digest(*words: str) -> str:
        return {t["Key"]: t["Value"] for t in built(*words)[0]["Tags"]}["slipway-plan"]

    assert digest() == digest()
    assert digest() != digest("training.seed=7")


def test_jobs_of_a_run_have_names_of_their_own_and_one_folder() -> None:
    chosen = plan("sagemaker", *GIVEN)
    launch = chosen.config.launch
    assert isinstance(launch, SageMakerLaunch)
    first, second = (request.build(chosen, launch, NAME, number) for number in (1, 2))
    assert [first["TrainingJobName"], second["TrainingJobName"]] == [NAME, f"{NAME}-2"]
    assert first["CheckpointConfig"] == second["CheckpointConfig"]
    uris = [r["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] for r in (first, second)]
    assert uris[0] != uris[1]  # a job that is at work keeps the plan that it has


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("gpt_32b", "gpt-32b-20261201-103341-a1b2"),
        ("--x..y--", "x-y-20261201-103341-a1b2"),
        ("größe", "gr-e-20261201-103341-a1b2"),
        ("_", "run-20261201-103341-a1b2"),
        ("a" * 80, "a" * 36 + "-20261201-103341-a1b2"),
    ],
)
def test_names_have_the_characters_of_job_names(base: str, name: str) -> None:
    assert start_file.run_name(base, "20261201-103341", "a1b2") == name
    assert len(request.job_name(name, 1000)) <= request.LONGEST_NAME


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("s3://bucket", ("s3", "bucket", "")),
        ("s3://my.bucket-1/a/b/", ("s3", "my.bucket-1", "a/b")),
        ("fsx://fs-0123456789abcdef0/mount/x", ("fsx", "fs-0123456789abcdef0", "/mount/x")),
        ("efs://fs-0a1b2c3d", ("efs", "fs-0a1b2c3d", "/")),
        ("s3://", None),
        ("s3://Bucket/x", None),
        ("fsx://fs-xyz/mount", None),
        ("https://bucket/x", None),
        ("/data/web", None),
    ],
)
def test_sources_of_channels(text: str, source: tuple[str, str, str] | None) -> None:
    found = channels.parse(text)
    assert (None if found is None else (found.kind, found.where, found.path)) == source


def test_data_in_a_channel_is_found_in_the_container_and_in_s3() -> None:
    chosen = plan(
        "sagemaker", "data=indexed", "data.paths=[0.7,data:web/part,0.3,s3://b/books]",
        "launch.channels.web=s3://team-data/corpus/", *GIVEN,
    )  # fmt: skip
    launch = chosen.config.launch
    assert isinstance(launch, SageMakerLaunch)
    roots = request.start(chosen, launch, NAME)["roots"]
    assert locate(chosen.config.data, roots).paths == [
        0.7,
        "/opt/ml/input/data/web/part",
        0.3,
        "s3://b/books",
    ]
    assert channels.in_s3("data:web/part", launch) == "s3://team-data/corpus/part"
    assert channels.in_s3("data:other/part", launch) is None


def test_the_longest_root_counts() -> None:
    roots = {"run:": "/r", "run:/tensorboard": "/opt/ml/output/tensorboard"}
    for order in (roots, dict(reversed(roots.items()))):
        assert expand("run:/tensorboard", order) == "/opt/ml/output/tensorboard"
        assert expand("run:/tensorboards", order) == "/r/tensorboards"
        assert expand("run:/checkpoints", order) == "/r/checkpoints"
        assert expand("runs", order) == "runs"
