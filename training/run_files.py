"""A run's own files, as every start of it treats them, wherever it runs. Standard library only."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from planning.findings import Finding, MachineError


def begin(run_dir: Path) -> None:
    """Make the folder and its logs/; what the last start left as its outcome goes to logs/.

    So a result.json that is there afterwards is this start's.
    """
    logs = run_dir / "logs"
    with said_of("run_dir", run_dir):
        logs.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        outcome = [run_dir / "result.json", *sorted(logs.glob("error-rank-*.json"))]
        move_into(logs / f"before-{stamp}", outcome)


def write_plan(run_dir: Path, text: str) -> None:
    """Write plan.yaml; another plan of an earlier start of this run stays readable in logs/."""
    path = run_dir / "plan.yaml"
    if path.exists() and path.read_text() != text:
        (run_dir / "logs").mkdir(exist_ok=True)
        path.rename(run_dir / "logs" / f"plan-{time.strftime('%Y%m%d-%H%M%S')}.yaml")
    path.write_text(text)


def write_environment(
    run_dir: Path,
    roots: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    shared_run_dir: bool = True,
) -> None:
    """Record what the plan's roots and policies became on this machine.

    shared_run_dir: whether all nodes of the run see this folder.
    """
    record = {
        "roots": dict(roots),
        "environment": dict(environment),
        "shared_run_dir": shared_run_dir,
    }
    path = run_dir / "logs" / "environment.json"
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def continue_metrics(folder: Path, step: int) -> None:
    """Make metrics.jsonl go on from `step`, one line a step.

    Lines of later steps, which are trained again, move to logs/.
    """
    path = folder / "metrics.jsonl"
    kept: list[str] = []
    dropped: list[str] = []
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        try:
            later = json.loads(line)["step"] > step
        except (ValueError, KeyError, TypeError):
            later = True  # a line cut off by a kill
        (dropped if later else kept).append(line)
    if dropped:
        aside = folder / "logs" / f"metrics-after-{step}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
        aside.write_text("".join(dropped))
        beside = path.with_suffix(".new")
        beside.write_text("".join(kept))
        beside.rename(path)
    if step:
        with open(path, "a") as metrics:
            metrics.write(json.dumps({"step": step, "resumed": True}) + "\n")


def move_into(target: Path, paths: list[Path]) -> Path | None:
    """Move those of `paths` that exist into the new folder `target`; None if there are none."""
    paths = [path for path in paths if path.exists()]
    if not paths:
        return None
    unique, count = target, 1
    while unique.exists():
        count += 1
        unique = target.with_name(f"{target.name}-{count}")
    unique.mkdir(parents=True)
    for path in paths:
        path.rename(unique / path.name)
    return unique


@contextmanager
def said_of(setting: str, path: Path) -> Iterator[None]:
    """Turns an OSError about `path` into a MachineError that names the setting."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            Finding(
                id="folder_not_writable",
                severity="error",
                setting=setting,
                message=f"cannot write to {path}: {error.strerror}",
                fix=f"choose another {setting}",
            )
        ) from error
