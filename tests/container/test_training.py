"""Real training of a tiny model in fake containers: what is kept, pruned, resumed and lost."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.container.hosts import Job, plan_text, until
from tests.training.runs import TINY
from training import checkpoints

MakeJob = Callable[..., Job]
WORKER = "training.worker"


def tiny(*overrides: str) -> str:
    return plan_text(*TINY, "checkpoint.save=true", *overrides)


def test_a_spot_interruption_is_resumed_past_a_broken_checkpoint(make_job: MakeJob) -> None:
    steps = 100
    plan = tiny("model.num_layers=1", f"training.train_steps={steps}", "checkpoint.interval=1000")
    job = make_job(plan, worker=WORKER)
    (host,) = job.hosts
    job.start()
    until(lambda: "step=1 " in host.log, "first step")
    host.send(signal.SIGTERM)  # the instance is taken back
    assert host.ends_with() == 143
    assert host.failure == "stopped and saved: SIGTERM from outside"
    assert "precision active: fp32, computed by torch on a CPU" in host.log
    folder = job.run_dir() / "checkpoints"
    (saved,) = checkpoints.checkpoints(folder)
    assert saved.complete
    # A later save that did not get to S3 whole.
    broken = folder / f"iter_{saved.step + 1:07d}"
    shutil.copytree(saved.path, broken)
    piece = next(broken.glob("*.distcp"))
    piece.write_bytes(piece.read_bytes()[:100])
    (folder / checkpoints.TRACKER).write_text(str(saved.step + 1))

    host.log_path.unlink()
    assert job.run() == [0]  # the same job, on another instance
    assert f"passed over {broken.name}" in host.log
    assert f"resuming from {saved.path.name}" in host.log
    trained = [line["step"] for line in job.lines("metrics.jsonl") if "loss" in line]
    assert trained == list(range(1, steps + 1))  # each once
    assert f"step={steps} loss=" in host.log


def test_hosts_with_folders_of_their_own_keep_the_same_checkpoints(
    make_job: MakeJob, tmp_path: Path
) -> None:
    plan = tiny(
        "hardware.nodes=2", "layout=pp2", "model.num_layers=2", "training.train_steps=6",
        "training.micro_batch_size=4", "checkpoint.interval=2", "checkpoint.keep=2",
    )  # fmt: skip
    job = make_job(plan, hosts=2, shared=False, worker=WORKER)
    assert job.run() == [0, 0]
    assert job.left() == []
    first, second = job.hosts
    # The loss is computed on the second host, and told on the first.
    assert "step=6 loss=" in first.log
    assert "step=" not in second.log
    told = [line for line in job.lines("metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in told] == [1, 2, 3, 4, 5, 6]
    assert all(5 < line["loss"] < 6 for line in told)  # ln(256) = 5.5
    assert told[0]["lr"] > 0
    assert not (job.run_dir(1) / "metrics.jsonl").exists()
    assert not (job.run_dir(1) / "logs" / "events.jsonl").exists()
    # No host has a whole checkpoint, and both have pruned alike.
    merged = tmp_path / "s3"
    for number in (0, 1):
        folder = job.run_dir(number) / "checkpoints"
        kept = checkpoints.checkpoints(folder)
        assert [state.step for state in kept] == [4, 6]
        assert not any(state.complete for state in kept)
        shutil.copytree(folder, merged, dirs_exist_ok=True)
    # What S3 gets of both is whole, and each host gets it back.
    assert [state.complete for state in checkpoints.checkpoints(merged)] == [True, True]


def mounts() -> bool:
    """Whether a small disk can be made here."""
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(probe).returncode == 0


@pytest.mark.skipif(not mounts(), reason="no user namespaces to mount a small disk in")
def test_a_full_disk_is_the_reason_and_keeps_what_was_saved(make_job: MakeJob) -> None:
    # A checkpoint is 0.9 MB: the first fits, the second does not.
    plan = tiny("model.num_layers=1", "training.train_steps=8", "checkpoint.interval=4")
    job = make_job(plan, worker=WORKER, max_restarts=3)
    (host,) = job.hosts
    shared = job.run_dir()
    shared.mkdir()
    kept = job.folder / "listing.txt"
    mount = f"mount -t tmpfs -o size=1536k tmpfs {shared}"
    listing = f"ls {shared}/checkpoints > {kept}; cat {shared}/checkpoints/latest* >> {kept}"
    host.prefix = ["unshare", "-rm", "sh", "-c", f'{mount}; "$@"; s=$?; {listing}; exit $s', "sh"]
    assert job.run() == [1]
    assert f"the disk of {shared} is full" in (host.failure or "")
    assert "not started again: the disk would be full again" in (host.failure or "")
    assert "iter_0000004" in kept.read_text()
    assert kept.read_text().endswith("4")
