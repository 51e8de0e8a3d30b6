"""The torchx scheduler behind launch/aws/executor.py, found by the entry point `torchx.schedulers`
of this distribution.

An app's id is `<region>.<job name>`: describe, logs and cancel are given nothing else, by processes
that may be set to another region.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nemo_run.run.torchx_backend.schedulers.api import SchedulerMixin
from torchx.schedulers.api import (
    AppDryRunInfo,
    DescribeAppResponse,
    ListAppResponse,
    Scheduler,
    Stream,
    filter_regex,
)
from torchx.specs import AppDef, AppState, ReplicaStatus, Role, RoleStatus

from launch.aws import job as jobs
from launch.aws import preflight, submit
from launch.aws.clients import Clients, said
from launch.aws.executor import SCHEDULER, SageMakerExecutor, read_folder
from launch.aws.logs import Log
from launch.aws.record import Record
from planning.plan import load

ROLE = "node"
POLL = 5.0  # seconds
_STATES = {
    "InProgress": AppState.RUNNING,
    "Completed": AppState.SUCCEEDED,
    "Failed": AppState.FAILED,
    "Stopping": AppState.RUNNING,
    "Stopped": AppState.CANCELLED,
    "Deleting": AppState.CANCELLED,
}
_BEFORE_TRAINING = frozenset(
    {
        "Starting",
        "Pending",
        "LaunchingMLInstances",
        "PreparingTrainingStack",
        "Downloading",
        "DownloadingTrainingImage",
        "Restarting",
        "Updating",
    }
)


@dataclass
class Submission:
    """What `schedule` is to do: the run folder's request, in a region."""

    run_dir: Path
    region: str | None
    request: dict[str, Any]


class SageMakerScheduler(SchedulerMixin, Scheduler[dict[str, Any]]):  # type: ignore[misc]
    def __init__(self, session_name: str) -> None:
        super().__init__(SCHEDULER, session_name)
        self._clients: dict[str | None, Clients] = {}

    def _of(self, region: str | None) -> Clients:
        if region not in self._clients:
            self._clients[region] = Clients(region)
        return self._clients[region]

    def _at(self, app_id: str) -> tuple[str, Clients]:
        """(job name, clients of its region)"""
        region, _, name = app_id.partition(".")
        return name, self._of(region)

    def _validate(self, app: AppDef, scheduler: str) -> None:
        """torchx's own wants a role's resources, which the request has instead."""

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[Submission]:
        assert isinstance(cfg, SageMakerExecutor)
        request = read_folder(cfg.run_dir, "request.json")
        made = Submission(Path(cfg.run_dir), cfg.region, request)
        return AppDryRunInfo(made, lambda asked: json.dumps(asked.request, indent=2))

    def schedule(self, dryrun_info: AppDryRunInfo[Submission]) -> str:
        """Check, upload, create and compare, as launch/train.py does."""
        asked = dryrun_info.request
        submit.refuse_placeholders(asked.request)
        clients = self._of(asked.region)
        plan = load(asked.run_dir / "plan.yaml")
        record = Record(
            region=clients.region,
            account=clients.identity[0],
            request=asked.request,
            price_per_node_hour=plan.config.hardware.price_per_node_hour,
            max_restarts=getattr(plan.config.launch, "max_restarts", 0),
            jobs=submit.earlier(asked.run_dir, clients),
        )
        preflight.check(asked.request, clients)
        files = {name: (asked.run_dir / name).read_text() for name in ("plan.yaml", "start.json")}
        submit.upload(asked.request, files, clients)
        submit.begin(asked.run_dir, record, "resumed" if record.jobs else "first", clients)
        return f"{clients.region}.{record.newest.name}"

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        name, clients = self._at(app_id)
        job = jobs.describe(name, clients)
        if job is None:
            return None
        state = _state(job)
        nodes = int(job["ResourceConfig"].get("InstanceCount", 1))
        replicas = [
            ReplicaStatus(id=n, role=ROLE, state=state, hostname=f"algo-{n + 1}")
            for n in range(nodes)
        ]
        return DescribeAppResponse(
            app_id=app_id,
            state=state,
            msg=str(job.get("FailureReason", "")) or jobs.state(job),
            ui_url=jobs.console(name, clients.region),
            roles=[Role(name=ROLE, image="", num_replicas=nodes)],
            roles_statuses=[RoleStatus(ROLE, replicas)],
        )

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        lines = self._lines(app_id, f"algo-{k + 1}", should_tail)
        return filter_regex(regex, lines) if regex else lines

    def _lines(self, app_id: str, host: str, tail: bool) -> Iterator[str]:
        name, clients = self._at(app_id)
        log = Log(name, clients)
        while True:
            job = jobs.describe(name, clients)
            ended = job is None or jobs.has_ended(job)
            for line in log.read(host):
                yield f"{line.text}\n"
            if ended or not tail:
                return
            time.sleep(POLL)

    def _cancel_existing(self, app_id: str) -> None:
        name, clients = self._at(app_id)
        submit.stop(name, clients)

    def list(self) -> list[ListAppResponse]:
        """The newest 100 jobs of the region that is set."""
        clients = self._of(None)
        with said("list training jobs"):
            found = clients("sagemaker").list_training_jobs(
                SortBy="CreationTime", SortOrder="Descending", MaxResults=100
            )
        return [
            ListAppResponse(f"{clients.region}.{job['TrainingJobName']}", _state(job))
            for job in found["TrainingJobSummaries"]
        ]


def _state(job: jobs.Described) -> AppState:
    state = _STATES[job["TrainingJobStatus"]]
    before = state == AppState.RUNNING and job.get("SecondaryStatus") in _BEFORE_TRAINING
    return AppState.PENDING if before else state


def create_scheduler(session_name: str, **_: Any) -> SageMakerScheduler:
    """What torchx calls."""
    return SageMakerScheduler(session_name)
