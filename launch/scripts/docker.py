"""The command that runs a plan in a container on one machine."""

from __future__ import annotations

from pathlib import Path

from launch.scripts.common import HOST, HOSTS, OPT_ML, Mount, sh
from planning.plan import Plan
from planning.schema import DockerLaunch

FILE = "docker.sh"
STOP_S = 600  # between docker stop and SIGKILL: a step and a save


def build(
    plan: Plan, launch: DockerLaunch, *, name: str, run_dir: Path, mounts: list[Mount]
) -> str:
    """A shell script of one command; it ends as the run does."""
    options = [
        "--rm",
        f"--name={sh(name)}",
        # Files of the run belong to who starts it; libraries look for a home and a name.
        '--user="$(id -u):$(id -g)"',
        '--env=HOME=/tmp --env=USER="$(id -un)"',
        f"--stop-timeout={STOP_S}",
        f"--shm-size={launch.shm_gib}g",
        "--ulimit=memlock=-1 --ulimit=stack=67108864",
        *(f"--volume={sh(mount)}" for mount in mounts),
        f"--volume={sh(run_dir / OPT_ML)}:/opt/ml",
        *(f"--volume={sh(mount)}" for mount in launch.mounts),
        f"--env={HOSTS}=localhost --env={HOST}=localhost",
        *(f"--env={sh(f'{key}={value}')}" for key, value in (launch.environment or {}).items()),
        *launch.options,
    ]
    if plan.backend == "te":
        options.insert(2, f"--gpus={plan.processes_per_node}")
    command = " \\\n  ".join(["exec docker run", *options, sh(launch.image)])
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {plan.name}: the plan is in {run_dir / 'plan.yaml'}",
            "# docker stop saves and ends it.",
            "set -euo pipefail",
            command,
            "",
        ]
    )
