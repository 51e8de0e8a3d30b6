"""The real first process and torchrun in fake containers; the workers train nothing."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from container import first_process
from container.restart import End
from tests.container.hosts import Job, plan_text, until

MakeJob = Callable[..., Job]
FOREVER = 100_000  # steps


@pytest.fixture(scope="module")
def plan() -> str:
    return plan_text("model=gpt_tiny", "precision=fp32", "hardware=cpu")


def test_four_hosts_train_to_the_end_and_the_first_one_tells(make_job: MakeJob, plan: str) -> None:
    job = make_job(plan, hosts=4)
    assert job.run() == [0, 0, 0, 0]
    assert job.left() == []
    first, *others = job.hosts
    assert "job: 127.0.0.1, host 1 of 4" in first.log
    assert "step=20 loss=0.25 tokens_per_s_per_gpu=12345.0" in first.log
    assert "step=10 validation_loss=1.25" in first.log
    assert first.log.endswith("done\n")
    for host in others:  # one log has the numbers, or a dashboard would count them four times
        assert "step=" not in host.log
        assert host.log.endswith("done\n")
    assert all(host.failure is None for host in job.hosts)
    assert json.loads((job.run_dir() / "result.json").read_text())["status"] == "done"


def test_a_crash_is_told_by_all_hosts_and_started_again_together(
    make_job: MakeJob, plan: str, tmp_path: Path
) -> None:
    fake = {"steps": 40, "step_s": 0.6, "crash_rank": 1, "crash": "error", "crash_step": 5}
    fake["crash_once"] = str(tmp_path / "once")
    job = make_job(plan, hosts=2, max_restarts=2, fake=fake, preflight=True)
    assert job.run() == [0, 0]
    assert job.left() == []
    for host in job.hosts:  # the first would have gone on: it was told
        assert "127.0.0.2: rank 1 failed: RuntimeError: out of luck" in host.log
        assert "restart 1 of 2" in host.log
        assert re.search(r"^node check, \d+ s: none failed", host.log, re.MULTILINE)
        assert host.failure is None
    (restart,) = job.lines("logs/restarts.jsonl")
    assert restart["reason"].startswith("127.0.0.2: rank 1 failed: RuntimeError: out of luck")
    assert restart["step"] < 40


def test_a_host_that_does_not_come_is_named(make_job: MakeJob, plan: str) -> None:
    job = make_job(plan, hosts=3, environ={"SLIPWAY_MEET_S": "4"})
    job.start(0, 1)
    assert [host.ends_with() for host in job.hosts[:2]] == [3, 3]
    failure = job.hosts[0].failure
    assert failure is not None
    assert failure.startswith("127.0.0.3 of 3 hosts did not answer within 4 s")
    assert "security groups" in failure


def test_the_reason_and_the_status_are_of_the_rank_that_failed(
    make_job: MakeJob, plan: str
) -> None:
    job = make_job(plan, max_restarts=5, fake={"crash_rank": 0, "crash": "memory"})
    assert job.run() == [1]
    failure = job.hosts[0].failure or ""
    assert failure.startswith("rank 0 failed: OutOfMemoryError: CUDA out of memory\n")
    assert failure.endswith("not started again: it would run out of memory again")
    assert not (job.run_dir() / "logs" / "restarts.jsonl").exists()
    assert job.left() == []


def test_a_host_that_cannot_go_on_tells_the_others(make_job: MakeJob, plan: str) -> None:
    job = make_job(plan, hosts=2)
    (job.folder / "file").touch()
    for host in job.hosts:  # the first host makes the run folder
        path = host.root / "input/data/plan/start.json"
        path.write_text(path.read_text().replace(f"{job.folder}/shared", f"{job.folder}/file/run"))
    began = time.monotonic()
    assert job.run() == [3, 3]
    assert time.monotonic() - began < 60  # without waiting for its entry
    assert f"cannot write to {job.folder}/file/run" in (job.hosts[0].failure or "")
    assert (job.hosts[1].failure or "").startswith("127.0.0.1: run_dir: cannot write to")


def test_an_unfit_node_stops_all_with_its_name(make_job: MakeJob, plan: str) -> None:
    job = make_job(plan, hosts=2, preflight=True)
    path = job.hosts[1].root / "input/data/plan/start.json"
    (job.folder / "file").touch()
    path.write_text(path.read_text().replace(f"{job.folder}/shared", f"{job.folder}/file/run"))
    assert job.run() == [3, 3]
    reason = f"127.0.0.2: run folder: {job.folder}/file/run: Not a directory"
    for host in job.hosts:
        assert (host.failure or "").startswith(reason)
        assert "step=" not in host.log


def test_hosts_with_different_plans_do_not_train(make_job: MakeJob, plan: str) -> None:
    job = make_job(plan, hosts=2)
    (job.hosts[1].root / "input/data/plan/plan.yaml").write_text(plan + "# another\n")
    assert job.run() == [3, 3]
    assert "the hosts were given different plans" in (job.hosts[0].failure or "")


def test_a_save_that_takes_longer_than_torchrun_would_wait_is_finished(
    make_job: MakeJob, plan: str
) -> None:
    job = make_job(plan, processes=2, fake={"steps": FOREVER, "save_s": 33})
    job.start()
    until(lambda: "step=1 " in job.hosts[0].log, "first step")
    job.hosts[0].send(signal.SIGTERM)
    sent = time.monotonic()
    assert job.hosts[0].ends_with() == 143
    assert time.monotonic() - sent > 33
    assert job.hosts[0].failure == "stopped and saved: SIGTERM from outside"
    result = json.loads((job.run_dir() / "result.json").read_text())
    assert result["status"] == "stopped"
    assert job.left() == []


def test_killing_the_first_process_leaves_no_process(make_job: MakeJob, plan: str) -> None:
    job = make_job(plan, processes=2, fake={"steps": FOREVER})
    job.start()
    until(lambda: "step=1 " in job.hosts[0].log, "first step")
    assert len(job.left()) >= 4  # torchrun, two workers, their loaders
    job.hosts[0].send(signal.SIGKILL)
    job.hosts[0].ends_with()
    until(lambda: not job.left(), "end of the workers", seconds=10)


def test_a_run_does_not_start_in_capacity_that_is_over(make_job: MakeJob, plan: str) -> None:
    variable = "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
    job = make_job(plan, stop_before_end_s=900, environ={variable: str(int(time.time() + 600))})
    assert job.run() == [3]
    assert "the capacity ends in 10 minutes" in (job.hosts[0].failure or "")
    job = make_job(plan, environ={variable: "soon"})
    assert job.run() == [3]
    assert "'soon' is not a time" in (job.hosts[0].failure or "")


@pytest.mark.parametrize(
    ("file", "text", "status", "message"),
    [
        ("config/resourceconfig.json", "", 3, "is not JSON"),
        ("config/resourceconfig.json", '{"hosts": []}', 3, "`hosts` is [], not a list of names"),
        ("data/plan/plan.yaml", "version: 0\n", 2, "this image cannot read the plan"),
        ("data/plan/start.json", '{"version": 9}', 2, "version 9, and this image reads 1"),
    ],
)
def test_what_a_container_cannot_read_is_its_reason(
    make_job: MakeJob, plan: str, file: str, text: str, status: int, message: str
) -> None:
    job = make_job(plan)
    (job.hosts[0].root / "input" / file).write_text(text)
    assert job.run() == [status]
    failure = job.hosts[0].failure or ""
    assert message in failure
    assert file in failure
    assert "Traceback" not in job.hosts[0].log


def test_a_plan_of_another_size_is_refused(make_job: MakeJob, plan: str) -> None:
    job = make_job(plan, hosts=2, nodes=4)
    job.start(0)
    assert job.hosts[0].ends_with() == 2
    assert "the plan is for 4 nodes, and the job has 2" in (job.hosts[0].failure or "")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (End("a", "done"), 0),
        (End("a", "stopped", exit_status=143), 143),
        (End("a", "failed", exit_status=3, code=3), 3),
        (End("a", "failed", exit_status=1, code=9), 9),
        (End("a", "failed", exit_status=1, code=-9), 137),
        (End("a", "failed", exit_status=1, code=-15), 1),  # 143 means stopped after saving
        (End("a", "failed", exit_status=1), 1),
    ],
)
def test_the_exit_status_is_the_workers(end: End, status: int) -> None:
    assert first_process._exit_status(end) == status
