"""Real NeMo-Run: an experiment submitted by one process, looked after by `nemo` in another."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.launch.aws.fake_aws import REGION, Account
from tests.launch.aws.requests import START, prepare, request
from tests.launch.aws.test_submit import planned
from tests.training.runs import ROOT

NAMES = ["first-20261201", "second-20261201"]
PAGE = (ROOT / "docs" / "jobs.md").read_text()
(SUBMIT,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NEMO = """
import os
import sys
from typer.testing import CliRunner
from nemo_run.__main__ import app

os.environ["AWS_REGION"] = "eu-west-1"  # jobs are found where they are, not where one is
for words in sys.argv[1:]:
    print("---", words, flush=True)
    answer = CliRunner().invoke(app, words.split())
    print(answer.output, answer.exception or "", "exit", answer.exit_code, flush=True)
"""


class Processes:
    """Scripts, each in a process of its own (tests/launch/aws/forks.py)."""

    def __init__(self, home: Path) -> None:
        self.home = home
        environment = os.environ | {"NEMORUN_HOME": str(home), "COLUMNS": "300"}
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.aws.forks"], env=environment, cwd=ROOT,
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, source: str, *words: str) -> str:
        """What the script prints."""
        script = self.home / f"script{len(list(self.home.iterdir()))}.py"
        script.write_text(source)
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(json.dumps([str(script), *words]) + "\n")
        self._driver.stdin.flush()
        status = self._driver.stdout.readline().strip()
        said = script.with_suffix(".py.out").read_text()
        assert status == "0", said
        return said

    def close(self) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        self._driver.wait(timeout=60)


@pytest.fixture
def processes(account: Account, tmp_path: Path) -> Iterator[Processes]:
    home = tmp_path / "nemo"
    home.mkdir()
    made = Processes(home)
    yield made
    made.close()


def test_the_scheduler_is_an_entry_point_of_the_installed_project() -> None:
    (found,) = [e for e in entry_points(group="torchx.schedulers") if "slipway" in e.name]
    assert (found.name, found.value) == (
        "slipway_sagemaker", "launch.aws.scheduler:create_scheduler")  # fmt: skip


def test_an_experiment_from_submission_to_cancel(
    account: Account, tmp_path: Path, processes: Processes
) -> None:
    prepare(account)
    folders = [tmp_path / name for name in NAMES]
    for folder in folders:
        folder.mkdir()
        given = request(TrainingJobName=folder.name)
        (folder / "request.json").write_text(json.dumps(given))
        (folder / "start.json").write_text(json.dumps({**START, "gpus_per_node": 8}))
        (folder / "plan.yaml").write_text(planned()[0].to_yaml())

    processes.run(SUBMIT, *map(str, folders))
    assert account.requests == {n: request(TrainingJobName=n) for n in NAMES}
    assert json.loads((folders[0] / "job.json").read_text())["jobs"][0]["reason"] == "first"

    account.log(NAMES[0], "algo-1", "step=1 loss=3.5")
    account.log(NAMES[0], "algo-2", "network: EFA")
    (experiment,) = [path.name for path in (processes.home / "experiments" / "sweep").iterdir()]
    told = processes.run(
        NEMO,
        f"experiment status {experiment}",
        f"experiment logs {experiment} 0",
        f"experiment cancel {experiment} 1",
        f"experiment status {experiment}",
    ).split("--- ")
    status, logs, _, after = told[1:]
    assert status.count("RUNNING") == 2, status
    assert f"{REGION}.{NAMES[0]}" in status
    assert "step=1 loss=3.5" in logs
    assert "network: EFA" in logs
    assert account.stopped == [NAMES[1]]
    assert after.count("RUNNING") + after.count("CANCELLED") == 2, after
