"""What a container's first process needs to know of a run: start.json, beside plan.yaml.

It is read with Python's standard library alone (container/first_process.py), and like the plan it
holds no path of the machine that wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from planning.plan import Plan
from planning.schema import ContainedLaunch

VERSION = 1
FILE = "start.json"
WORKER = "training.worker"
CACHE = "/tmp/slipway-cache"  # of each node; nothing in it is lost with it

LONGEST_BASE = 36  # of a name of 63 characters, beside "-20261201-103341-a1b2" and "-1000"


def run_name(base: str, stamp: str, token: str, longest: int = LONGEST_BASE) -> str:
    """The name of a run where it runs: `base-stamp-token`, of letters, digits and dashes.

    stamp: the time to a second; token: tells runs of one second apart. longest: of the base.
    """
    plain = re.sub(r"[^a-zA-Z0-9]+", "-", base).strip("-")[:longest].strip("-")
    return f"{plain or 'run'}-{stamp}-{token}"


def start(
    plan: Plan,
    launch: ContainedLaunch,
    *,
    name: str,
    run_dir: str,
    shared_run_dir: bool,
    roots: Mapping[str, str],
    stop_before_end_s: int = 0,
) -> dict[str, Any]:
    """The content of start.json.

    name: of the run. run_dir: its folder in the container: plan, logs, checkpoints.
    shared_run_dir: whether all nodes see the same folder there. roots: further ones of the plan
    (`data:NAME`, another `cache:`). stop_before_end_s: seconds before the end of the capacity.
    """
    hardware = plan.config.hardware
    return {
        "version": VERSION,
        "name": name,
        "instance_type": hardware.instance_type,
        "gpu": hardware.gpu,
        "gpus_per_node": plan.processes_per_node,
        "nodes": plan.nodes,
        "environment": dict(plan.environment),
        "run_dir": run_dir,
        "shared_run_dir": shared_run_dir,
        "roots": {"run:": run_dir, "cache:": CACHE, **roots},
        "max_restarts": launch.max_restarts,
        "preflight": launch.preflight,
        "min_allreduce_gb_s": launch.min_allreduce_gb_s,
        "stop_before_end_s": stop_before_end_s,
        "worker": WORKER,
    }


def to_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
