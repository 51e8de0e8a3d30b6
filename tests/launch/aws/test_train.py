"""The command with launch=sagemaker: a dry run that asks nobody, a submission, a sweep."""

from __future__ import annotations

import json
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.aws import queue
from launch.aws.record import Job, Record
from launch.train import main
from planning.schema import SageMakerLaunch
from tests.launch.aws.fake_aws import COMPLETED, TRAINING, Account
from tests.launch.aws.requests import BUCKET, IMAGE, ROLE, prepare, request
from tests.launch.elsewhere import choose
from training.data.tokenizers import ByteTokenizer
from training.data.writer import Writer

WORDS = ["model=gpt_160m", "layout=ddp", "hardware=p6_b200", "launch=sagemaker", "data=mock"]
GIVEN = [f"launch.role={ROLE}", f"launch.image={IMAGE}", f"launch.bucket={BUCKET}"]


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != ".lock")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# --- dry run ----------------------------------------------------------------------------------


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No account, no boto3, no network; the folder to work in."""

    def refuse(*_: object) -> None:
        raise AssertionError("a dry run asks nobody")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_dry_run_writes_what_can_be_reviewed(
    nobody: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "launch.dry_run=true", "run_dir=r"]) == 0
    run = nobody / "r"
    assert names(run) == ["plan.json", "plan.yaml", "report.txt", "request.json", "start.json"]
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert {stat.S_IMODE((run / name).stat().st_mode) for name in names(run)} == {0o600}
    asked = read(run / "request.json")
    assert asked["TrainingJobName"] == read(run / "start.json")["name"]
    screen, report = capsys.readouterr().out, (run / "report.txt").read_text()
    for name in ("role", "image", "bucket"):
        assert f"warning: launch.{name}: nobody gave it" in screen
        assert f"warning: launch.{name}: nobody gave it" in report
    assert "gpt_160m" in report.split("\n\n", 1)[1]
    assert report.startswith("python launch/train.py model=gpt_160m")
    assert screen.endswith(
        "submit     python launch/train.py model=gpt_160m layout=ddp hardware=p6_b200 "
        "launch=sagemaker data=mock run_dir=r\n"
    )
    found = {finding["id"] for finding in read(run / "plan.json")["findings"]}
    assert "placeholder" in found


def test_another_dry_run_is_of_the_same_run_and_another_folder_of_another(nobody: Path) -> None:
    for folder in ("a", "a", "b"):
        assert main([*WORDS, "launch.dry_run=true", f"run_dir={folder}"]) == 0
        if folder == "a":
            name = read(nobody / "a" / "start.json")["name"]
    assert read(nobody / "a" / "request.json")["TrainingJobName"] == name
    assert read(nobody / "b" / "start.json")["name"] != name


def test_data_is_not_looked_at_in_a_dry_run(
    nobody: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [w for w in WORDS if w != "data=mock"]
    words += ["data=indexed", "data.paths=[s3://team-data/web]", "launch.dry_run=true"]
    assert main([*words, "run_dir=r"]) == 0
    assert "the data was not looked at: a dry run asks nobody" in capsys.readouterr().out


def test_without_a_dry_run_what_is_missing_is_an_error_and_nothing_is_written(
    nobody: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "run_dir=r"]) == 2
    said = capsys.readouterr().err
    assert said.count("nobody gave it: a job needs it") == 3
    assert "launch.dry_run=true does without" in said
    assert list(nobody.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["hardware=this"], "choose hardware=p5 (ml.p5.48xlarge)"),
        (["data=indexed", "data.paths=[/data/web]"], "is on this machine"),
        (["+launch.environment.A=hf_" + "abcdefghijklmnopqrst"], "looks like a Hugging Face"),
        (["launch.max_pending_hours=0.1"], "360 is not from 1800 to 2419200"),
    ],
)
def test_a_choice_that_no_job_can_have_is_refused_before_anything_is_written(
    nobody: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    assert main([*WORDS, "launch.dry_run=true", "run_dir=r", *words]) == 2
    assert part in capsys.readouterr().err
    assert list(nobody.iterdir()) == []


def test_a_sweep_of_dry_runs_has_a_folder_and_a_name_each(
    nobody: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "launch.dry_run=true", "run_dir=s"]
    secret = "+launch.environment.A=hf_" + "abcdefghijklmnopqrst,b"
    assert main(["-m", *words, secret]) == 2
    table = (nobody / "s" / "sweep.txt").read_text()
    assert "hf_abc" not in table + (nobody / "s" / "sweep.json").read_text()
    assert "hf_abc" not in capsys.readouterr().out
    assert table.splitlines()[0].split() == ["job", "status", "name", "choice"]
    *rows, common = table.splitlines()[1:]
    assert [line.split()[:2] for line in rows] == [["0", "wrong"], ["1", "written"]]
    assert common == f"in all: {' '.join(words)}"
    assert read(nobody / "s" / "1" / "request.json")["TrainingJobName"] in table
    assert not (nobody / "s" / "0").exists()
    for name in ("sweep.txt", "sweep.json"):
        assert stat.S_IMODE((nobody / "s" / name).stat().st_mode) == 0o600


# --- submission -------------------------------------------------------------------------------


@pytest.fixture
def team(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    prepare(account)
    monkeypatch.chdir(tmp_path)
    return account


def stored(account: Account, uri: str) -> bytes:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bytes(account.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read())


def test_what_was_reviewed_is_what_is_submitted(team: Account, tmp_path: Path) -> None:
    assert main([*WORDS, *GIVEN, "launch.dry_run=true", "run_dir=r"]) == 0
    reviewed = {name: (tmp_path / "r" / name).read_bytes() for name in names(tmp_path / "r")}
    assert main([*WORDS, *GIVEN, "run_dir=r"]) == 0
    asked = json.loads(reviewed["request.json"])
    assert team.requests == {asked["TrainingJobName"]: asked}
    uri = asked["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]
    for name in ("plan.yaml", "start.json"):
        assert stored(team, uri + name) == reviewed[name] == (tmp_path / "r" / name).read_bytes()


def test_a_run_that_is_submitted_again_is_the_next_job_of_it(
    team: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    team.next_jobs = [[COMPLETED]]
    assert main([*WORDS, *GIVEN, "run_dir=r"]) == 0
    assert main([*WORDS, *GIVEN, "run_dir=r", "training.train_steps=700000"]) == 0
    assert "changed    training.train_steps: 12000 -> 700000" in capsys.readouterr().out
    first, second = team.requests.values()
    assert second["TrainingJobName"] == f"{first['TrainingJobName']}-2"
    assert second["CheckpointConfig"] == first["CheckpointConfig"]
    # Another model would be another run, and another sharding could not read the checkpoints.
    capsys.readouterr()
    words = ["model.num_layers=4", "layout.sharding=none"]
    assert main([*WORDS, *GIVEN, "run_dir=r", *words]) == 2
    said = capsys.readouterr().err
    assert "holds a run with 10, this one has 4" in said
    assert "holds checkpoints of sharding=optimizer" in said
    assert len(team.requests) == 2


def test_a_sweep_submits_each_job_and_one_that_fails_is_one_row(
    team: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = f"launch.image={IMAGE},{IMAGE}0"  # the second is not in ECR
    seeds = "training.seed=1,2"
    words = [*WORDS, *GIVEN[:1], *GIVEN[2:], "run_dir=s"]
    assert main(["-m", *words, images, seeds]) in (2, 3)
    assert len(team.requests) == 2
    table = (tmp_path / "s" / "sweep.txt").read_text().splitlines()
    rows = [line.split() for line in table[:-1]]  # the last one is what all have
    assert [row[1] for row in rows[1:]] == ["submitted", "submitted", rows[3][1], rows[4][1]]
    assert "submitted" not in rows[3][1]
    assert [row[2] for row in rows[1:3]] == list(team.requests)
    assert sorted(p.parent.name for p in (tmp_path / "s").glob("*/job.json")) == ["0", "1"]


# --- data in S3, looked at before a submission ------------------------------------------------


@pytest.fixture
def corpus(team: Account, tmp_path: Path) -> list[str]:
    """Words for data by bytes in the team's bucket, as a channel."""
    writer = Writer(str(tmp_path / "part"), ByteTokenizer())
    writer.add("to be or not to be " * 400)
    writer.close()
    for suffix in (".bin", ".idx", ".json"):
        body = (tmp_path / f"part{suffix}").read_bytes()
        team.client("s3").put_object(Bucket=BUCKET, Key=f"corpus/part{suffix}", Body=body)
    words = [word for word in WORDS if word != "data=mock"]
    return [*words, *GIVEN, "data=indexed", f"+launch.channels.web=s3://{BUCKET}/corpus",
            "training.eval_interval=0", "run_dir=r"]  # fmt: skip


def test_data_in_a_channel_is_read_before_the_job_is_made(
    team: Account, corpus: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*corpus, "data.paths=[data:web/part]", "training.train_steps=1"]) == 0
    (asked,) = team.requests.values()
    assert [channel["ChannelName"] for channel in asked["InputDataConfig"]] == ["plan", "web"]
    # Fewer tokens than the run reads: seen in the index, in S3.
    assert "times" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["data.paths=[data:web/other]"], "other.idx does not exist"),
        (["data.paths=[s3://team-runs/corpus/other]"], "other.idx does not exist"),
        (["data.paths=[data:web/part]", "model.vocab_size=200"], "vocab"),
    ],
)
def test_data_that_would_end_the_job_is_refused_here(
    team: Account, corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    words: list[str], part: str,
) -> None:  # fmt: skip
    assert main([*corpus, *words]) == 2
    assert part in capsys.readouterr().err
    assert team.requests == {}
    assert not (tmp_path / "r").exists()


# --- jobs at a time ---------------------------------------------------------------------------


def recorded(folder: Path, name: str) -> Path:
    job = Job(name=name, created="2026-12-01T10:00:00Z", reason="first")
    Record(region="us-west-2", account="1", request=request(), price_per_node_hour=None,
           max_restarts=0, jobs=[job]).save(folder)  # fmt: skip
    return folder


class Clients:
    """Jobs that are at work for some looks each."""

    def __init__(self, **looks: int) -> None:
        self.looks = looks

    def __call__(self, service: str) -> Any:
        assert service == "sagemaker"
        return self

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
        self.looks[TrainingJobName] -= 1
        state = TRAINING if self.looks[TrainingJobName] >= 0 else COMPLETED
        return {"TrainingJobName": TrainingJobName, **state}


@pytest.mark.parametrize(("most", "waits"), [("null", 0), ("4", 0), ("3", 0), ("2", 2), ("1", 5)])
def test_no_more_jobs_than_asked_for_are_at_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], most: str, waits: int
) -> None:
    looks = {"a": 2, "b": 5, "c": 0}
    folders = [recorded(tmp_path / name, name) for name in looks] + [tmp_path / "not-submitted"]
    launch = choose("sagemaker", f"launch.max_parallel={most}").launch
    assert isinstance(launch, SageMakerLaunch)
    slept: list[float] = []
    queue.wait_for_room(folders, launch, Clients(**looks), slept.append)  # type: ignore[arg-type]
    assert len(slept) == waits
    assert ("waiting" in capsys.readouterr().out) == (waits > 0)
