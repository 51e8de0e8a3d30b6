"""What a job is given, read and put together: hosts, plan, environment. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from container import contract, network
from container.attempt import say
from planning.findings import ChoiceError, Finding, MachineError
from planning.roots import expand
from training import host, torchrun

PORT = "SLIPWAY_PORT"  # of the board; the next ones are torchrun's, one a start
DEFAULT_PORT = 29400


@dataclass(frozen=True)
class Job:
    """What this process works with, once all that it was given is read."""

    cluster: contract.Cluster
    start: contract.Start
    plan: Mapping[str, Any]  # of container/plan_facts.py
    plan_text: str
    environment: dict[str, str]
    port: int

    @property
    def first(self) -> bool:
        return self.cluster.rank == 0

    @property
    def several(self) -> bool:
        return len(self.cluster.hosts) > 1

    @property
    def keeps_folder(self) -> bool:
        """Whether this host writes what is once in a run folder."""
        return self.first or not self.start.shared_run_dir

    @property
    def checkpoints(self) -> Path | None:
        saves = self.plan["save"]
        return None if saves is None else Path(expand(saves, self.start.roots))


def read(root: Path, cluster: contract.Cluster, start: contract.Start) -> Job:
    """Raises ChoiceError where the plan does not fit, MachineError where the image does not."""
    if len(cluster.hosts) != start.nodes:
        raise ChoiceError(
            Finding(
                "nodes",
                "error",
                "hardware.nodes",
                f"the plan is for {start.nodes} nodes, and the job has {len(cluster.hosts)}",
                f"submit it with {start.nodes} instances, or plan for {len(cluster.hosts)}",
            )
        )
    path = contract.plan_file(root)
    plan = _plan_facts(path)
    settings = network.settings(
        start.instance_type, cluster.interface, nodes=start.nodes, chosen=start.environment
    )
    for note in settings.notes:
        say(f"network: {note}")
    for problem in settings.problems:
        if start.nodes > 1:
            raise cannot(problem, "build the image with container/Dockerfile", id="efa_plugin")
        say(f"network: {problem} (one node does not need it)")
    for name in settings.unset:
        os.environ.pop(name, None)
    os.environ.update(settings.environment)
    environment = host.environment(start.environment, start.gpus_per_node, host.cores())
    port = int(os.environ.get(PORT, DEFAULT_PORT))
    return Job(cluster, start, plan, path.read_text(), environment, port)


def _plan_facts(path: Path) -> dict[str, Any]:
    read = subprocess.run(
        [sys.executable, "-m", "container.plan_facts", str(path)],
        env=torchrun.environment({}),
        capture_output=True,
        text=True,
    )
    if read.returncode == 0:
        return dict(json.loads(read.stdout))
    said = (read.stdout.strip() or read.stderr.strip()).splitlines()
    raise ChoiceError(
        Finding(
            "plan_unreadable",
            "error",
            str(path),
            f"this image cannot read the plan: {said[-1] if said else 'it says nothing'}",
            "build the image and submit from one version of the repository",
        )
    )


def say_what(job: Job) -> None:
    """The first lines of the log."""
    start, plan, cluster = job.start, job.plan, job.cluster
    instance = start.instance_type or "no instance type"
    say(
        f"{start.name}: {cluster.current}, host {cluster.rank + 1} of {len(cluster.hosts)} "
        f"({instance}, {start.gpus_per_node} x {start.gpu})"
    )
    say(f"precision planned: {plan['precision']}; the run says below which one is active")
    shared = "shared by the hosts" if start.shared_run_dir else "each host's own"
    say(f"run folder: {start.run_dir}" + (f", {shared}" if job.several else ""))


def cannot(message: str, fix: str, id: str = "node") -> MachineError:
    return MachineError(Finding(id, "error", "", message, fix, machine=True))
