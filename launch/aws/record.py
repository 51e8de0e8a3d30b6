"""`job.json` in the run folder: which jobs a run had on SageMaker, and what they were given.

Everything that another process, another day, needs to look after them: jobs.py and the NeMo-Run
scheduler read nothing else. It holds account details, so only its owner may read it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from launch.aws import service_model
from launch.aws.ends import Ended
from launch.run_folder import lock, write_private
from planning.findings import ChoiceError, Finding

FILE = "job.json"
LOCK = ".job"  # held by who makes a job of the run, or changes its record
VERSION = 1


class Job(BaseModel):
    """One training job of the run."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arn: str | None = None  # None: it was about to be made; the service knows whether it was
    created: str  # UTC, ISO 8601
    reason: str  # why it was submitted: "first", "resumed", "resubmitted after ..."
    end: Ended | None = None  # how it ended, once somebody has looked


class Record(BaseModel):
    """A run's jobs on SageMaker, the newest last."""

    model_config = ConfigDict(extra="forbid")

    version: int = VERSION
    region: str
    account: str
    request: dict[str, Any]  # of the newest job: exactly what CreateTrainingJob was given
    price_per_node_hour: float | None  # USD
    max_restarts: int
    jobs: list[Job] = []

    @property
    def newest(self) -> Job:
        return self.jobs[-1]

    @property
    def first_name(self) -> str:
        return self.jobs[0].name

    @property
    def nodes(self) -> int:
        return int(self.request["ResourceConfig"]["InstanceCount"])

    @property
    def instance_type(self) -> str:
        return str(self.request["ResourceConfig"]["InstanceType"])

    @property
    def training_plan(self) -> str | None:
        found = self.request["ResourceConfig"].get("TrainingPlanArn")
        return None if found is None else str(found)

    @property
    def checkpoints(self) -> str | None:
        """The S3 prefix that the job's checkpoint folder is copied to."""
        found = self.request.get("CheckpointConfig", {}).get("S3Uri")
        return None if found is None else str(found)

    @property
    def restarts(self) -> int:
        """Jobs that were submitted because one before them failed."""
        return sum(job.reason.startswith("resubmitted") for job in self.jobs)

    def save(self, run_dir: Path) -> None:
        write_private(run_dir / FILE, self.model_dump_json(indent=2) + "\n")

    def keep_end(self, run_dir: Path, end: Ended) -> None:
        """Record how the newest job ended, beside what others have recorded meanwhile."""
        self.newest.end = end
        with lock(run_dir, LOCK, wait=True):
            there = Record.load(run_dir)
            for job in there.jobs:
                if job.name == self.newest.name:
                    job.end = end
            there.save(run_dir)

    @classmethod
    def load(cls, run_dir: Path) -> Self:
        """Raises ChoiceError if the folder holds no record, or one that cannot be read."""
        path = run_dir / FILE
        try:
            found = cls.model_validate_json(path.read_text())
            if found.version != VERSION or not found.jobs:
                raise ValueError(f"version {found.version}, {len(found.jobs)} jobs")
            if wrong := service_model.check(found.request):
                raise ValueError(f"its request is none of CreateTrainingJob's: {wrong[0].message}")
        except FileNotFoundError:
            raise _refusal(
                run_dir,
                "it has no job.json, so it was not submitted from here",
                "python launch/jobs.py list shows the runs that were",
            ) from None
        except (OSError, ValidationError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise _refusal(
                run_dir,
                f"job.json cannot be read: {first}",
                "restore the file; the SageMaker console lists the jobs",
            ) from None
        return found


def find(root: Path) -> list[Path]:
    """The run folders below `root` (itself included) that hold a record, the oldest first."""
    found = []
    for folder, inside, files in os.walk(root):
        if FILE in files:
            found.append(Path(folder))
            inside.clear()  # checkpoints hold thousands of files, and no record
    return sorted(found, key=lambda path: (path / FILE).stat().st_mtime)


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _refusal(run_dir: Path, message: str, fix: str) -> ChoiceError:
    return ChoiceError(Finding("no-record", "error", str(run_dir), message, fix))
