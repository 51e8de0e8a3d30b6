"""Runs local.run with the fake worker: RUN_DIR PROCESSES [PORT]; exits with its status."""

import os
import sys
from pathlib import Path

from launch import local
from launch.display import Display
from planning.findings import Refusal

try:
    outcome = local.run(
        Path(sys.argv[1]),
        processes=int(sys.argv[2]),
        environment={"PYTHONPATH": str(Path(__file__).parent), "FAKE": os.environ["FAKE"]},
        port=int(sys.argv[3]) if len(sys.argv) > 3 else 0,
        display=Display(interval=10),
        worker="fake_worker",
    )
except Refusal as refusal:
    print(refusal)
    sys.exit(refusal.exit_status)
print(f"outcome: {outcome.status}: {outcome.message}")
sys.exit(outcome.exit_status)
