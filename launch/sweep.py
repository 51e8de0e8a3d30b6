"""Jobs of one command line: each has its own end, and a sweep has a table of them."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import checks, compose, run_folder, secrets
from launch.run import execute
from planning.findings import ChoiceError, Finding, Refusal
from planning.report import finding_lines, refusal_lines, table

STOPPED = 143
NOT_STARTED = "not started"


@dataclass(frozen=True)
class Job:
    number: int | None  # None: the only job, no sweep
    overrides: list[str]
    exit_status: int
    run_dir: Path | None
    result: dict[str, Any]
    message: str  # why it did not run


def start(words: Sequence[str], many: bool) -> int:
    """Run what the words choose: one job, or with `many` one for each of their combinations.

    The status of the whole command. Raises ChoiceError: words that cannot be read.
    """
    if not many:
        return run(list(words), None, _Base()).exit_status
    base = _Base()
    jobs: list[Job] = []
    for number, overrides in enumerate(compose.combinations(words)):
        if any(job.exit_status == STOPPED for job in jobs):
            jobs.append(Job(number, overrides, STOPPED, None, {}, NOT_STARTED))
        else:
            before = [job.run_dir for job in jobs if job.run_dir is not None]
            jobs.append(run(overrides, number, base, before))
    return close(jobs, base.close())


class _Base:
    """The folder of a sweep: that of the first job whose choice can be read."""

    path: Path | None = None
    made = False
    asked: str | None = None

    def of(self, run_dir: str | None, model_name: str) -> Path:
        if self.path is not None and run_dir != self.asked:
            message = f"a sweep has one, and here it is {self.asked or self.path}"
            fix = "give one run_dir: each job has a folder in it, 0, 1, ..."
            raise ChoiceError(Finding("sweep-folder", "error", "run_dir", message, fix))
        if self.path is None:
            self.made, self.asked = run_dir is None, run_dir
            self.path = (
                checks.home(run_dir, "run_dir")
                if run_dir
                else run_folder.default_run_dir(model_name)
            )
        return self.path

    def close(self) -> Path | None:
        """The folder, if a job has written to it; one that we made for nothing is gone."""
        if self.path is None or not self.path.is_dir():
            return None
        if self.made and not any(self.path.iterdir()):
            with contextlib.suppress(OSError):  # until one that holds something else
                for folder in (self.path, *self.path.parents[:2]):
                    folder.rmdir()
            return None
        return self.path


def run(overrides: list[str], number: int | None, base: _Base, before: Sequence[Path] = ()) -> Job:
    """Run one job; in a sweep, whatever happens in it is its own. before: folders of its jobs."""
    kept = [secrets.redact(word) for word in overrides]
    if number is not None:
        print(f"\njob {number}: {' '.join(kept) or 'as it stands'}", flush=True)
    try:
        for warning in finding_lines(compose.repeated(overrides)):
            print(secrets.hide(warning), file=sys.stderr, flush=True)
        config = compose.choose(overrides)
        folder = None
        if number is not None:
            folder = base.of(config.run_dir, config.model.name) / str(number)
        ended = execute(config, overrides, folder, before)
        return Job(number, kept, ended.exit_status, ended.run_dir, ended.result, "")
    except Refusal as refusal:
        print(secrets.hide("\n".join(refusal_lines(refusal))), file=sys.stderr, flush=True)
        message = secrets.hide(refusal.findings[0].message) if refusal.findings else ""
        result = {"predicted": dict(refusal.predicted)} if refusal.predicted else {}
        return Job(number, kept, refusal.exit_status, None, result, message)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        return Job(number, kept, STOPPED, None, {}, "stopped")
    except Exception as error:
        if number is None:
            raise
        traceback.print_exc()
        return Job(number, kept, 1, None, {}, f"{type(error).__name__}: {error}")


def close(jobs: Sequence[Job], base: Path | None) -> int:
    """Print a sweep's table and write it to its folder; the status of the whole command."""
    text = "\n".join(table(_rows(jobs)))
    if common := _common(jobs):
        text += f"\nin all: {' '.join(word for word in jobs[0].overrides if word in common)}"
    print(f"\n{text}")
    if base is not None:
        _write(base / "sweep.txt", text + "\n", jobs)
        records = [
            {
                "job": job.number,
                "overrides": job.overrides,
                "exit_status": job.exit_status,
                "run_dir": str(job.run_dir) if job.run_dir else None,
                "message": job.message,
                "result": job.result,
            }
            for job in jobs
        ]
        _write(base / "sweep.json", json.dumps(records, indent=2) + "\n", jobs)
        print(f"table and results: {base}/sweep.txt, sweep.json")
    return overall([job.exit_status for job in jobs])


def _write(path: Path, text: str, jobs: Sequence[Job]) -> None:
    """The words of jobs elsewhere name accounts: for their owner only."""
    private = ("launch.", "launch=sagemaker")
    if any(word.startswith(private) for job in jobs for word in job.overrides):
        run_folder.write_private(path, text)
    else:
        path.write_text(text)


def _rows(jobs: Sequence[Job]) -> list[list[str]]:
    """What ended here has losses and a speed; what runs elsewhere has a name there; of plans there
    is what they predict."""
    if any("predicted" in job.result for job in jobs):
        return _planned(jobs)
    named = any("job" in job.result for job in jobs)
    measured = ["name"] if named else ["loss", "validation", "tokens/s"]
    rows = [["job", "status", *measured, "choice"]]
    for job in jobs:
        rate = job.result.get("median_tokens_per_s_per_gpu")
        cells = [
            _loss(job.result.get("final_loss")),
            _loss(job.result.get("validation_loss")),
            f"{rate:,.0f}" if rate else "",
        ]
        if named:
            cells = [str(job.result.get("job", ""))]
        rows.append([str(job.number), _status(job), *cells, _choice(job, jobs)])
    return rows


def _choice(job: Job, jobs: Sequence[Job]) -> str:
    """The words that not all jobs have."""
    common = _common(jobs)
    return " ".join(word for word in job.overrides if word not in common)


def _common(jobs: Sequence[Job]) -> set[str]:
    """The words of all jobs, where there are several."""
    words = [set(job.overrides) for job in jobs]
    return set.intersection(*words) if len(words) > 1 else set()


def _planned(jobs: Sequence[Job]) -> list[list[str]]:
    """A price is a column where one is set."""
    found = [job.result.get("predicted", {}) for job in jobs]
    priced = any(one.get("usd_per_billion_tokens") for one in found)
    rows = [["job", "status", "GiB/GPU", "fits", "tokens/s/GPU", "MFU", "GPU-hours/B tokens",
             *(["USD/B tokens"] if priced else []), "layout", "choice"]]  # fmt: skip
    for job, one in zip(jobs, found, strict=True):

        def cell(name: str, form: str, one: dict[str, Any] = one) -> str:
            return format(one[name], form) if one.get(name) is not None else ""

        rows.append([
            str(job.number), _status(job), cell("needed_gib", ",.0f"),
            {True: "yes", False: "no"}.get(one.get("fits"), ""),
            cell("tokens_per_s_per_gpu", ",.0f"), cell("mfu", ".0%"),
            cell("gpu_hours_per_billion_tokens", ",.3g"),
            *([cell("usd_per_billion_tokens", ",.0f")] if priced else []),
            one.get("layout") or "", _choice(job, jobs),
        ])  # fmt: skip
    return rows


def overall(statuses: Sequence[int]) -> int:
    """0 if all are 0; else 143 if one was stopped, 1 if one failed, 3 if one could not run here,
    and 2 otherwise."""
    for status in (STOPPED, 1, 3):
        if status in statuses:
            return status
    return next((status for status in statuses if status), 0)


def _status(job: Job) -> str:
    if job.message == NOT_STARTED:
        return NOT_STARTED
    if job.exit_status == 0:  # "submitted", "written": it runs elsewhere
        return str(job.result.get("status", "done"))
    words = {1: "failed", 2: "wrong choice", 3: "not on this machine", 143: "stopped"}
    return words.get(job.exit_status, str(job.exit_status))


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
