"""Every command of docs/jobs.md, in its order, and what the page says that it prints."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import jobs
from launch.aws import memory, preflight, submit, watch
from launch.aws.clients import Clients
from launch.aws.record import Record
from tests import test_docs
from tests.launch.aws.fake_aws import COMPLETED, REGION, STOPPED, TRAINING, Account
from tests.launch.aws.requests import BUCKET, prepare, request
from tests.launch.aws.test_submit import planned
from tests.launch.aws.test_watch import OOM
from tests.tools.test_plans import offering
from tools import compare_runs, plans

PAGE = test_docs.ROOT / "docs" / "jobs.md"
NAME = "gpt-32b-20261201-120000"
MAINS: dict[str, Callable[[list[str]], int]] = {
    "launch/jobs.py": jobs.main,
    "tools/plans.py": plans.main,
    "tools/compare_runs.py": compare_runs.main,
}


@pytest.fixture
def run_dir(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/first: a run that was submitted and trains."""
    prepare(account)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch, "POLL", 0)
    monkeypatch.setattr(watch, "LATE", 0)
    account.offerings = [offering("tpo-week", 168, "26880.00"),
                         offering("tpo-day", 24, "4608.00", days=-1)]  # fmt: skip
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "plan.yaml").write_text(planned("training.train_steps=100")[0].to_yaml())
    record = Record(region=REGION, account="123456789012", request=request(),
                    price_per_node_hour=100.0, max_restarts=2)  # fmt: skip
    submit.upload(record.request, {"plan.yaml": "plan"}, Clients())
    submit.begin(folder, record, "first", Clients())
    account.log(NAME, "algo-1", "step=50 loss=2.5")
    for name, body in (
        ("logs/rank-0.log", b"all of it\n"),
        ("checkpoints/iter_0000050/shard", b"x" * 2**20),
        ("metrics.jsonl", b'{"step": 1, "loss": 2.5, "tokens": 8}\n'),
    ):
        account.client("s3").put_object(
            Bucket=BUCKET, Key=f"slipway/a/checkpoints/{name}", Body=body
        )
    return folder


# How the job is when a command of the page is given.
BEFORE = {"watch": COMPLETED, "stop": TRAINING, "resume": STOPPED, "cleanup": STOPPED}


def plain(text: str) -> list[str]:
    """Lines without the width of columns."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_every_command_does_what_the_page_says(
    account: Account, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [(c, p) for c, p in test_docs.commands(PAGE) if c.split()[1] in MAINS]
    assert len(given) >= 10
    for command, printed in given:
        _, script, *words = shlex.split(command)
        for name in account.steps:
            if words[0] in BEFORE:
                account.steps[name] = [BEFORE[words[0]]]
        account.next_jobs = [[TRAINING]]
        capsys.readouterr()
        assert MAINS[script](words) == 0, (command, capsys.readouterr())
        screen = plain(capsys.readouterr().out)
        assert [line for line in plain(printed) if line not in screen] == [], command


def test_the_table_of_checks(account: Account, run_dir: Path, capsys: Any) -> None:
    account.steps[NAME] = [STOPPED]
    del account.requests[NAME]
    shown = _block("check ")
    rows = preflight.look(request(TrainingJobName="free"), Clients())
    assert "\n".join(preflight.lines(rows)).replace("free is", f"{NAME} is").replace(" ", "") == (
        shown.replace(" ", "")
    )
    checks = {word for row in re.findall(r"^\| (`.*?) \|", _section("Submit"), re.MULTILINE)
              for word in re.findall(r"`([^`]+)`", row)}  # fmt: skip
    assert {row.what for row in rows} <= checks


def test_memory_is_told_as_the_page_shows(tmp_path: Path) -> None:
    """In its form; the figures are a model's of their own."""
    plan = planned()[0]
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    parts = {"weights": 7.5, "gradients": 14.9, "optimizer": 29.9, "activations": 88.3, "x": 1.0}
    planned_json = {"memory": {"needed_gib": 148.8, "parts": parts}}
    (tmp_path / "plan.json").write_text(json.dumps(planned_json))
    shown, said = _block("planned ").splitlines(), memory.lines(tmp_path, [OOM])
    assert shown[:2] == said[:2]
    form = r"would help [a-z_.]+=\w+( [a-z_.]+=\w+)* \(\d+% (slower|faster)( a GPU)?\)"
    assert all(re.fullmatch(form, line) for line in (*shown[2:], *said[2:]))


def _block(start: str) -> str:
    found = [
        body for _, body in test_docs.FENCE.findall(PAGE.read_text()) if body.startswith(start)
    ]
    return str(found[0]).rstrip("\n")


def _section(title: str) -> str:
    return PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
