"""Is this node fit to train? One table, under two minutes; alone on any machine or before a run.

    python container/preflight.py [--instance ml.p6-b200.48xlarge] [--gpu b200 --gpus 8]
        [--plan PLAN.yaml] [--run-dir FOLDER] [--min-allreduce GB_S]
        [--nodes N --rank R --first HOST --port P] [--json FILE]

With --nodes the same command runs on every node at once. Exit status 0 if nothing failed, 3 if
something did, 2 for a wrong command. Row states: ok, FAIL, warn, and - for what cannot be checked
here, with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from container import checks
from container.checks import Row
from planning.findings import did_you_mean
from planning.hardware import GPUS, INSTANCES


@dataclass(frozen=True)
class Wanted:
    """What the node should be. None: whatever is here."""

    gpu: str | None = None
    gpus: int | None = None
    instance: str | None = None
    run_dir: Path | None = None
    plan: Any = None  # planning.plan.Plan
    min_allreduce: float | None = None
    nodes: int = 1
    rank: int = 0
    first: str = "127.0.0.1"
    port: int = 29401


def rows(wanted: Wanted) -> list[Row]:
    """All checks, the quick ones first."""
    found = [*checks.gpus(wanted.gpu, wanted.gpus, wanted.plan)]
    found += [*checks.efa(wanted.instance, wanted.nodes)]
    found += [*checks.host(wanted.run_dir, wanted.plan, wanted.instance)]
    if any(row.state == "FAIL" for row in found):
        found.append(Row("all-reduce", "-", "not measured: what is above comes first"))
    else:
        found += [*checks.all_reduce(
            wanted.gpus, wanted.gpu, wanted.instance, wanted.min_allreduce,
            nodes=wanted.nodes, rank=wanted.rank, first=wanted.first, port=wanted.port,
        )]  # fmt: skip
    return found


def table(found: list[Row], seconds: float) -> str:
    width = max(len(row.check) for row in found)
    lines = [f"{row.check:<{width}}  {row.state:<4}  {row.found}" for row in found]
    count = {state: sum(row.state == state for row in found) for state in ("ok", "FAIL", "-")}
    verdict = f"{count['FAIL']} failed" if count["FAIL"] else f"none failed, {count['ok']} ok"
    verdict += f", {count['-']} could not be checked here" if count["-"] else ""
    return "\n".join([f"node check, {seconds:.0f} s: {verdict}", *lines])


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Is this node fit to train?")
    add = parser.add_argument
    add("--instance", help="what SageMaker calls it, as ml.p6-b200.48xlarge")
    add("--gpu", help="a key of planning/hardware.py, as b200")
    add("--gpus", type=int, help="how many")
    add("--plan", type=Path, help="a plan.yaml: its formats and disk are checked too")
    add("--run-dir", type=Path, help="where the run will be kept")
    add("--min-allreduce", type=float, metavar="GB_S", help="bus bandwidth below which it fails")
    add("--nodes", type=int, default=1)
    add("--rank", type=int, default=0, help="of this node")
    add("--first", default="127.0.0.1", help="the host of rank 0")
    add("--port", type=int, default=29401)
    add("--json", type=Path, help="write the rows and the failures there")
    arguments = parser.parse_args(words)
    if arguments.gpu is not None and arguments.gpu not in GPUS:
        parser.error(f"--gpu {arguments.gpu}: known are {', '.join(GPUS)}"
                     + did_you_mean(arguments.gpu, GPUS))  # fmt: skip
    if arguments.instance is not None and arguments.instance not in INSTANCES:
        parser.error(f"--instance {arguments.instance}: known are {', '.join(INSTANCES)}"
                     + did_you_mean(arguments.instance, INSTANCES))  # fmt: skip
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = _arguments(words)
    plan = None
    if arguments.plan is not None:
        from planning.plan import load

        try:
            plan = load(arguments.plan)
        except (OSError, ValueError) as error:
            print(f"--plan {arguments.plan}: {error}")
            return 2
    instance = INSTANCES.get(arguments.instance or "")
    began = time.monotonic()
    found = rows(
        Wanted(
            gpu=arguments.gpu or (instance.gpu if instance else None),
            gpus=arguments.gpus or (instance.gpus if instance else None),
            instance=arguments.instance,
            run_dir=arguments.run_dir,
            plan=plan,
            min_allreduce=arguments.min_allreduce,
            nodes=arguments.nodes,
            rank=arguments.rank,
            first=arguments.first,
            port=arguments.port,
        )
    )
    print(table(found, time.monotonic() - began), flush=True)
    failed = [f"{row.check}: {row.found}" for row in found if row.state == "FAIL"]
    if arguments.json is not None:
        report = {"failed": failed, "rows": [asdict(row) for row in found]}
        arguments.json.write_text(json.dumps(report, indent=2))
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
