"""Jobs of one command line: each has its own end, and a sweep has a table of them."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch import compose, run_folder
from launch.run import execute
from planning.findings import Refusal
from planning.report import finding_lines, table


@dataclass(frozen=True)
class Job:
    number: int | None  # None: the only job, no sweep
    overrides: list[str]
    exit_status: int
    run_dir: Path | None
    base: Path | None  # the sweep's folder
    result: dict[str, Any]
    message: str  # why it did not run


def run(
    composed: DictConfig, overrides: list[str], number: int | None, before: Sequence[Job]
) -> Job:
    """Run one job; whatever happens in it is its own."""
    base: Path | None = None
    if number is not None:
        print(f"\njob {number}: {' '.join(overrides) or 'as it stands'}", flush=True)
    try:
        config = compose.validate(composed)
        folder = None
        if number is not None:
            base = next((job.base for job in before if job.base), None) or (
                Path(config.run_dir)
                if config.run_dir
                else run_folder.default_run_dir(config.model.name)
            )
            folder = base / str(number)
        ended = execute(config, overrides, folder)
        return Job(number, overrides, ended.exit_status, ended.run_dir, base, ended.result, "")
    except Refusal as refusal:
        print("\n".join(finding_lines(refusal.findings)), file=sys.stderr, flush=True)
        message = refusal.findings[0].message if refusal.findings else ""
        return Job(number, overrides, refusal.exit_status, None, base, {}, message)
    except KeyboardInterrupt:
        return Job(number, overrides, 143, None, base, {}, "stopped")
    except Exception as error:
        if number is None:
            raise
        traceback.print_exc()
        return Job(number, overrides, 1, None, base, {}, f"{type(error).__name__}: {error}")


def close(jobs: Sequence[Job]) -> int:
    """Print a sweep's table and write it to its folder; the status of the whole command."""
    if not jobs:
        return 0  # --help, --cfg
    if jobs[0].number is None:
        return jobs[0].exit_status
    rows = [["job", "status", "loss", "validation", "tokens/s", "choice"]]
    for job in jobs:
        rate = job.result.get("median_tokens_per_s_per_gpu")
        rows.append(
            [
                str(job.number),
                _status(job),
                _loss(job.result.get("final_loss")),
                _loss(job.result.get("validation_loss")),
                f"{rate:,.0f}" if rate else "",
                " ".join(job.overrides),
            ]
        )
    text = "\n".join(table(rows))
    print(f"\n{text}")
    base = next((job.base for job in jobs if job.base and job.base.is_dir()), None)
    if base:
        (base / "sweep.txt").write_text(text + "\n")
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
        (base / "sweep.json").write_text(json.dumps(records, indent=2) + "\n")
        print(f"table and results: {base}/sweep.txt, sweep.json")
    return overall([job.exit_status for job in jobs])


def overall(statuses: Sequence[int]) -> int:
    """0 if all are 0; else 143 if one was stopped, 1 if one failed, 3 if one could not run here,
    and 2 otherwise."""
    for status in (143, 1, 3):
        if status in statuses:
            return status
    return next((status for status in statuses if status), 0)


def _status(job: Job) -> str:
    words = {0: "done", 1: "failed", 2: "wrong choice", 3: "not on this machine", 143: "stopped"}
    return words.get(job.exit_status, str(job.exit_status))


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
