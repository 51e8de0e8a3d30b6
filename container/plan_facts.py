"""What the first process must know of a plan, as JSON: `python -m container.plan_facts PLAN.yaml`.

A process of its own, because it takes packages to read a plan, and the first process is to work
where a package is broken. Exit status 2, with the reason on the last line, for a plan that this
image cannot read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from planning.plan import Plan, load
from planning.saving import checkpoint_bytes


def facts(plan: Plan) -> dict[str, object]:
    config, arguments = plan.config, plan.megatron_args
    saves = arguments[arguments.index("--save") + 1] if "--save" in arguments else None
    return {
        "name": plan.name,
        "save": saves,  # its root not expanded; None: nothing is saved
        "checkpoint_bytes": checkpoint_bytes(
            plan.derived.allocated_parameters or 0, config.precision
        )
        if saves
        else 0,
        "keep": config.checkpoint.keep,
        "train_steps": config.training.train_steps,
        "precision": config.precision.name,
        "recipe": config.precision.recipe,
        "processes_per_node": plan.processes_per_node,
        "nodes": plan.nodes,
    }


if __name__ == "__main__":
    try:
        print(json.dumps(facts(load(Path(sys.argv[1])))))
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "))
        sys.exit(2)
