"""A sweep's jobs, no more at a time than asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from launch.aws import job
from launch.aws.clients import Clients
from launch.aws.record import FILE, Record
from planning.schema import SageMakerLaunch

LOOK_S = 30.0  # between looks at jobs that take hours


def wait_for_room(
    folders: Iterable[Path],
    launch: SageMakerLaunch,
    clients: Clients | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when fewer than launch.max_parallel jobs of these run folders are at work."""
    most = launch.max_parallel
    running = [folder for folder in folders if (folder / FILE).exists()]
    if most is None or len(running) < most:
        return
    clients = clients or Clients(launch.region)
    said = False
    while True:
        running = [folder for folder in running if _at_work(folder, clients)]
        if len(running) < most:
            return
        if not said:
            print(f"{'waiting':<10} {len(running)} jobs of the sweep are at work, and "
                  f"launch.max_parallel={most}", flush=True)  # fmt: skip
            said = True
        sleep(LOOK_S)


def _at_work(folder: Path, clients: Clients) -> bool:
    found = job.describe(Record.load(folder).newest.name, clients)
    return found is not None and not job.has_ended(found)
