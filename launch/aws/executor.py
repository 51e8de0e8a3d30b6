"""NeMo-Run's executor for SageMaker: an Experiment submits reviewed run folders, and
`nemo experiment status|logs|cancel` look after them from any process.

    from launch.aws.executor import experiment

    if __name__ == "__main__":  # NeMo-Run runs this file again when it loads the experiment
        with experiment("gpt_32b", ["runs/gpt_32b/a", "runs/gpt_32b/b"]) as made:
            made.run(detach=True)

Each folder is one that `launch=sagemaker launch.dry_run=true` wrote. What runs is its request and
plan: the task of a NeMo-Run job only names it. launch/aws/scheduler.py does the work, through the
same functions as launch/train.py, so launch/jobs.py knows these runs too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_run import Experiment, Script
from nemo_run.core.execution.base import Executor
from nemo_run.run.torchx_backend.schedulers import api

from planning.findings import ChoiceError, Finding

SCHEDULER = "slipway_sagemaker"  # torchx has one of its own by the name aws_sagemaker


@dataclass(kw_only=True)
class SageMakerExecutor(Executor):
    """Runs the plan of one folder. region: None takes the AWS configuration's."""

    run_dir: str
    region: str | None = None

    def assign(self, exp_id: str, exp_dir: str, task_id: str, task_dir: str) -> None:
        self.experiment_id, self.experiment_dir = exp_id, exp_dir
        self.job_dir = os.path.join(exp_dir, task_dir)

    def nnodes(self) -> int:
        return int(self._resources()["InstanceCount"])

    def nproc_per_node(self) -> int:
        """As the plan starts them, whatever NeMo-Run asks for."""
        return int(read_folder(self.run_dir, "start.json")["gpus_per_node"])

    def _resources(self) -> dict[str, Any]:
        return dict(read_folder(self.run_dir, "request.json")["ResourceConfig"])


def read_folder(run_dir: str, name: str) -> dict[str, Any]:
    """A JSON file of a run folder. Raises ChoiceError."""
    path = Path(run_dir) / name
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ChoiceError(
            Finding("run-folder", "error", str(path), f"cannot be read: {error}",
                    "python launch/train.py launch=sagemaker launch.dry_run=true writes it")
        ) from None  # fmt: skip


def experiment(title: str, run_dirs: Sequence[str | Path], region: str | None = None) -> Experiment:
    """A NeMo-Run Experiment with one job for each folder; `.run(detach=True)` submits them."""
    made = Experiment(title, executor=SageMakerExecutor(run_dir=str(run_dirs[0]), region=region))
    with made:
        for run_dir in run_dirs:
            folder = Path(run_dir).resolve()
            made.add(
                Script("training.worker", m=True, entrypoint="python", args=[str(folder)]),
                executor=SageMakerExecutor(run_dir=str(folder), region=region),
                name=folder.name,
            )
    return made


def _register() -> None:
    """Tell NeMo-Run of the executor: it has no entry point for that (0.11.1)."""
    api.EXECUTOR_MAPPING[SageMakerExecutor] = SCHEDULER
    api.REVERSE_EXECUTOR_MAPPING[SCHEDULER] = SageMakerExecutor
    for name in ("_PARALLEL_SUPPORTED_EXECUTORS", "_DETACH_SUPPORTED_EXECUTORS"):
        supported = getattr(Experiment, name)
        if SageMakerExecutor not in supported:
            setattr(Experiment, name, (*supported, SageMakerExecutor))


_register()
