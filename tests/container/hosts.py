"""Fake SageMaker hosts: a folder for /opt/ml each, and the real first process in each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.choices import config
from training.torchrun import ROOT

PATIENCE = 120  # seconds
FAKE_WORKER = ROOT / "tests" / "launch"


def plan_text(*overrides: str) -> str:
    from planning.resolve import resolve

    plan = resolve(config(*overrides)).plan
    assert plan is not None
    return plan.to_yaml()


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free now."""
    while True:
        held = []
        try:
            first = socket.socket()
            held.append(first)
            first.bind(("", 0))
            port = int(first.getsockname()[1])
            for number in range(port + 1, port + count):
                held.append(socket.socket())
                held[-1].bind(("", number))
            return port
        except (OSError, OverflowError):
            continue
        finally:
            for one in held:
                one.close()


@dataclass
class Host:
    """One host: its /opt/ml and, once started, its first process."""

    name: str
    root: Path
    environ: dict[str, str]
    prefix: list[str] = field(default_factory=list)  # words before the command
    process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        return self.root / "log.txt"

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def failure(self) -> str | None:
        path = self.root / "output" / "failure"
        return path.read_text() if path.exists() else None

    def start(self) -> None:
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, str(ROOT / "container" / "first_process.py")],
                env=self.environ,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ends_with(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE)


@dataclass
class Job:
    """A job of one or more hosts that share a run folder, or have one each."""

    folder: Path
    hosts: list[Host] = field(default_factory=list)

    def run_dir(self, host: int = 0) -> Path:
        start = json.loads((self.hosts[host].root / "input/data/plan/start.json").read_text())
        return Path(start["run_dir"])

    def start(self, *which: int) -> None:
        for number in which or range(len(self.hosts)):
            self.hosts[number].start()

    def run(self) -> list[int]:
        """Start all and wait: the exit statuses."""
        self.start()
        return [host.ends_with() for host in self.hosts]

    def lines(self, name: str, host: int = 0) -> list[dict[str, Any]]:
        path = self.run_dir(host) / name
        return [json.loads(line) for line in path.read_text().splitlines()]

    def left(self) -> list[psutil.Process]:
        """Processes that are the job's and still run: they name its folder."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = " ".join(process.info["cmdline"] or [])
            if str(self.folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def end(self) -> None:
        """Whatever a failed test has left."""
        for host in self.hosts:
            if host.process is not None and host.process.poll() is None:
                host.process.kill()
                host.process.wait()
        for process in self.left():
            process.kill()


def job(
    folder: Path,
    plan: str,
    *,
    hosts: int = 1,
    processes: int = 1,
    shared: bool = True,
    worker: str = "fake_worker",
    fake: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    environ: dict[str, str] | None = None,
    **start: Any,
) -> Job:
    """A job whose hosts are ready to start.

    fake: of tests/launch/fake_worker.py. environment: of the workers, environ: of the first
    processes. start: what differs in start.json.
    """
    names = [f"127.0.0.{number}" for number in range(1, hosts + 1)]
    port = free_ports(10)
    made = Job(folder)
    for number, name in enumerate(names, start=1):
        root = folder / f"host-{number}"
        (root / "input/config").mkdir(parents=True, exist_ok=True)
        (root / "input/data/plan").mkdir(parents=True, exist_ok=True)
        resources = {"hosts": names, "current_host": name, "network_interface_name": "lo"}
        (root / "input/config/resourceconfig.json").write_text(json.dumps(resources))
        (root / "input/data/plan/plan.yaml").write_text(plan)
        run_dir = folder / "shared" if shared else root / "checkpoints"
        contents = {
            "version": 1,
            "name": "job",
            "instance_type": None,
            "gpu": "cpu",
            "gpus_per_node": processes,
            "nodes": hosts,
            "environment": {
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "FAKE": json.dumps(fake or {}),
                **(environment or {}),
            },
            "run_dir": str(run_dir),
            "shared_run_dir": shared,
            "roots": {"run:": str(run_dir), "cache:": str(ROOT / ".cache")},
            "max_restarts": 0,
            "preflight": False,
            "min_allreduce_gb_s": None,
            "stop_before_end_s": 60,
            "worker": worker,
            **start,
        }
        (root / "input/data/plan/start.json").write_text(json.dumps(contents))
        variables = {
            **os.environ,
            "SLIPWAY_OPT_ML": str(root),
            "SLIPWAY_PORT": str(port),
            "PYTHONPATH": str(FAKE_WORKER),
            **(environ or {}),
        }
        made.hosts.append(Host(name, root, variables))
    return made


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)


STOP = signal.SIGTERM
