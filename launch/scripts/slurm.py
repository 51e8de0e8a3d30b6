"""The batch script of a run on a Slurm cluster, for `sbatch`."""

from __future__ import annotations

from pathlib import Path

from container.given import PORT
from launch.scripts.common import BASE, HOST, HOSTS, IMAGE_ROOT, OPT_ML, Mount, exports, sh
from planning.plan import Plan
from planning.schema import SlurmLaunch

FILE = "job.sbatch"
# Between Slurm's SIGTERM and the end of the job: a step and a save of a large model.
SAVE_S = 600
FIRST_PROCESS = "container/first_process.py"


def build(
    plan: Plan, launch: SlurmLaunch, *, name: str, run_dir: Path, mounts: list[Mount],
    python: Path, root: Path,
) -> str:  # fmt: skip
    """The script.

    run_dir: on a file system that all nodes share. mounts: what the image sees of the cluster.
    python, root: the interpreter and the repository without an image, on that file system too.
    """
    options: dict[str, object] = {
        "job-name": name,
        "nodes": plan.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": plan.processes_per_node,
        "output": run_dir / "slurm-%j.log",
        # Slurm's own comes 30 s before the end (KillWait), too late for a save.
        "signal": f"TERM@{SAVE_S}",
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "time": None if launch.max_run_hours is None else _time(launch.max_run_hours),
    }
    if plan.backend == "torch":
        del options["gpus-per-node"]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{k}={sh(v)}" for k, v in options.items() if v is not None]
    lines += [f"#SBATCH {option}" for option in launch.options]
    lines += [
        "",
        f"# {plan.name}: the plan is in {run_dir / 'plan.yaml'}",
        "set -euo pipefail",
        *exports(launch.environment or {}),
        f"export {BASE}={sh(run_dir / OPT_ML)}",
        f'export {HOSTS}="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)"',
        "# Jobs that share a node need ports of their own.",
        f"export {PORT}=$((20000 + SLURM_JOB_ID % 20000))",
        "",
        "srun --kill-on-bad-exit=1 \\",
    ]
    if launch.image is None:
        command = f"{sh(python)} {sh(root / FIRST_PROCESS)}"
    else:
        seen = ",".join([*map(str, mounts), *launch.mounts])
        lines += [
            f"  --container-image={sh(launch.image)} \\",
            f"  --container-mounts={sh(seen)} \\",
            "  --no-container-mount-home \\",
        ]
        command = f"python {IMAGE_ROOT}/{FIRST_PROCESS}"
    lines.append(f"  bash -c {sh(f'export {HOST}="$SLURMD_NODENAME"; exec {command}')}")
    return "\n".join(lines) + "\n"


def _time(hours: float) -> str:
    """As sbatch has it: days-hours:minutes:seconds."""
    minutes, seconds = divmod(round(hours * 3600), 60)
    whole, minutes = divmod(minutes, 60)
    return f"{whole // 24}-{whole % 24:02d}:{minutes:02d}:{seconds:02d}"
