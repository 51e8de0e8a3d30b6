"""The one entry: `python launch/train.py [group=choice ...] [setting=value ...]`; `-m` sweeps.

Exit status: 0 done (or a plan that is legal and fits), 1 failed while running, 2 the choice is
wrong wherever it runs, 3 this machine cannot run it now, 143 stopped by a signal after saving.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # A script's own folder comes first in sys.path; our packages are in the repository's root.
    sys.path[0] = str(ROOT)

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from launch import compose, sweep
from planning.findings import Refusal
from planning.report import finding_lines


def main() -> int:
    """Compose, and run the one job or the sweep that the command line asks for."""
    jobs: list[sweep.Job] = []

    @hydra.main(version_base="1.3", config_path=str(compose.CONF), config_name="config")
    def job(config: DictConfig) -> None:
        context = HydraConfig.get()
        overrides = list(context.overrides.task)
        number = context.job.num if context.mode == RunMode.MULTIRUN else None
        jobs.append(sweep.run(config, overrides, number, jobs))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here as they are, and leave in our words
    try:
        with _quiet_sweeps():
            job()
    except Refusal as refusal:
        return report(refusal)
    except (HydraException, OmegaConfBaseException) as error:
        return report(compose.translate(error))
    return sweep.close(jobs)


def report(refusal: Refusal) -> int:
    print("\n".join(finding_lines(refusal.findings)), file=sys.stderr)
    return refusal.exit_status


@contextlib.contextmanager
def _quiet_sweeps() -> Iterator[None]:
    """Hydra writes a sweep's own files before our checks; let them be elsewhere and go away."""
    if not any(word in ("-m", "--multirun") for word in sys.argv[1:]):
        yield
        return
    folder = tempfile.mkdtemp(prefix="slipway-sweep-")
    sys.argv += [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
