"""One run from its choice to its end: plan, check, and execute on this machine."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch import checks, elsewhere, machine, run_folder, secrets
from launch.display import Display, resume_command, summary
from planning import report, saving
from planning.findings import ChoiceError, Finding, MachineError, Refusal, errors, refuse
from planning.plan import Plan
from planning.resolve import Resolution, resolve, short_states
from planning.schema import ContainedLaunch, LocalLaunch, RunConfig
from training import checkpoints

WAYS_ON = (
    "This machine cannot run it. The same choice elsewhere: add hardware=p6_b200 (or p6_b300, "
    "h200, ...)\nand launch=plan to see its plan there; or start it on a machine with such GPUs."
)


@dataclass(frozen=True)
class Ended:
    """How a run ended; `result` is of result.json, or of a plan what it predicts."""

    exit_status: int
    run_dir: Path | None
    result: dict[str, Any]
    resolution: Resolution


def execute(
    config: RunConfig,
    overrides: list[str],
    run_dir: Path | None,
    siblings: Sequence[Path] = (),
) -> Ended:
    """Plan the choice, say it, and do what `launch` asks for.

    run_dir: where the run is kept; None: a new folder under runs/. siblings: those of the sweep's
    earlier jobs. Raises ChoiceError or MachineError, with all findings, before anything is written.
    """
    refuse(secrets.check(config))
    contained, dry = isinstance(config.launch, ContainedLaunch), False
    if contained:
        config, dry = elsewhere.planned(config)
    look = functools.cache(machine.look)  # a tenth of a second, which a plan for elsewhere saves
    folder = run_dir or (checks.home(config.run_dir, "run_dir") if config.run_dir else None)
    refuse(checks.folders(config, folder))
    config = checks.absolute(config)
    if not machine.is_known(config.hardware):
        config = config.model_copy(update={"hardware": machine.fill(config.hardware, look())})
    resolution = resolve(config)
    plan = resolution.plan
    print("\n".join(report.lines(resolution)), flush=True)
    findings = resolution.findings + checks.stack(config)
    findings += elsewhere.check(resolution.config, plan, dry) if contained else checks.data(config)
    different, changed = checks.against_previous(resolution.config, folder)
    findings += different
    if plan is not None and config.launch.kind == "local":
        here = machine.compare(plan, look())
        hardware = resolution.config.hardware
        if not errors(here) and hardware.gpu == "cpu" and hardware.memory_gib is None:
            # hardware=cpu is any machine: here it is this one.
            here += short_states(hardware, resolution.states, look().host_gib, here=True)
        if not errors(here):
            here += saving.check(resolution.saving, look().host_gib, here=True)
        findings += here + checks.initial_weights(resolution.config)
    elif config.launch.kind == "plan":  # the run may be elsewhere, and the folder there
        weights = checks.initial_weights(resolution.config)
        findings += [replace(finding, severity="warning") for finding in weights]
    findings = list(dict.fromkeys(findings))  # one dataset named for three splits is one finding
    for line in report.finding_lines(f for f in findings if f.severity == "warning"):
        print(line)
    try:
        refuse(findings)
    except Refusal as refusal:
        if config.launch.kind == "plan":
            refusal.predicted = report.in_short(resolution)
        if isinstance(refusal, MachineError):
            refusal.ways_on = WAYS_ON
        raise
    assert plan is not None
    if config.launch.kind == "plan":
        folder = folder or run_folder.default_run_dir(config.model.name)
        used = (folder / run_folder.LOCK).exists()  # a run that starts there reads its plan
        lock = run_folder.lock(folder) if used else nullcontext()
        with run_folder.said_of("run_dir", folder), lock:
            for line in changed:
                print(f"{'changed':<10} {line}")
            if run_folder.is_started(folder):
                print(f"{'plan':<10} not written: {folder} keeps the plan of its run; "
                      "for a file of this one take another run_dir")  # fmt: skip
            else:
                _write_plan(folder, plan, resolution)
                print(f"{'plan':<10} {folder / 'plan.yaml'}")
        return Ended(0, folder, {"predicted": report.in_short(resolution)}, resolution)
    if contained:
        folder = folder or run_folder.default_run_dir(config.model.name)
        with run_folder.lock(folder):
            for line in changed:
                print(f"{'changed':<10} {line}")
            way = elsewhere.Way(overrides, findings, dry, siblings)
            status, said = elsewhere.start(folder, plan, resolution, way)
        return Ended(status, folder, said, resolution)
    from launch import local  # what a plan alone has no use for takes its time

    assert isinstance(config.launch, LocalLaunch)
    local.check_port(config.launch.port)
    if plan.derived.checkpoint_format is not None and resolution.states is not None:
        # While one is saved, the `keep` older ones are still there.
        run_folder.free_space_check(
            checks.checkpoint_folder(config, folder or Path("runs")),
            saving.checkpoint_bytes(plan.derived.allocated_parameters or 0, config.precision)
            * (config.checkpoint.keep + 1),
        )
    folder = folder or run_folder.default_run_dir(config.model.name)
    with run_folder.lock(folder):
        return _train(folder.resolve(), plan, resolution, overrides, changed, look())


def _train(
    folder: Path,
    plan: Plan,
    resolution: Resolution,
    overrides: list[str],
    changed: list[str],
    here: machine.Machine,
) -> Ended:
    from launch import local

    config = plan.config
    assert isinstance(config.launch, LocalLaunch)
    display = Display(interval=config.logging.interval)
    saves = checks.checkpoint_folder(config, folder)
    if config.resume == "none" and run_folder.has_run(folder, saves):
        moved = run_folder.set_aside(folder, saves)
        print(f"{'resume':<10} none: the earlier run is in {moved}")
    elif plan.derived.checkpoint_format is None and run_folder.has_run(folder):
        raise ChoiceError(
            Finding(
                "nothing-to-continue",
                "error",
                "run_dir",
                f"{folder} holds a run, and with checkpoint.save=false this one cannot continue it",
                "take another run_dir, or resume=none (the old run is kept aside)",
            )
        )
    elif plan.derived.checkpoint_format is not None:
        newest = checkpoints.prepare_resume(saves)
        if str(newest):
            print(f"{'resume':<10} {newest}".replace("\n", "\n" + " " * 11))
        for line in changed:
            print(f"{'changed':<10} {line}")
        step = newest.taken.step if newest.taken else 0
        if step >= config.training.train_steps:
            more = {"training.train_steps": 2 * step}
            print(f"{'done':<10} all {step} steps are trained; further: "
                  f"{resume_command(overrides, folder, more)}")  # fmt: skip
            return Ended(0, folder, _result(folder), resolution)
        run_folder.begin(folder)
        run_folder.continue_metrics(folder, step)
    _write_plan(folder, plan, resolution)
    if plan.derived.checkpoint_format is not None:
        with run_folder.said_of("checkpoint.save", saves):
            saves.mkdir(parents=True, exist_ok=True)
        (saves / "plan.yaml").write_text(plan.to_yaml())
    (folder / "logs").mkdir(exist_ok=True)
    environment = machine.environment(plan, here)
    cache = Path(config.data.cache).expanduser().resolve()
    run_folder.write_environment(folder, {"run:": str(folder), "cache:": str(cache)}, environment)
    outcome = local.run(
        folder,
        processes=plan.processes_per_node,
        environment=environment,
        port=config.launch.port,
        display=display,
    )
    if outcome.message:
        print(outcome.message)
    if outcome.result:
        print(_summary(outcome.result, plan, folder, overrides))
    return Ended(outcome.exit_status, folder, outcome.result, resolution)


def _summary(result: dict[str, Any], plan: Plan, folder: Path, overrides: list[str]) -> str:
    by_byte = plan.config.data.tokenizer.kind == "byte"
    notes = list(result.get("notes", []))
    if plan.config.data.kind == "library_text" and result.get("validation_loss") is not None:
        notes.append(
            "A model that knows only how often each byte occurs stands near 3.2 nats a byte."
        )
    if plan.derived.checkpoint_format is not None and not result.get("checkpoint"):
        newest = checkpoints.newest_complete(checks.checkpoint_folder(plan.config, folder)).taken
        if newest:  # of an earlier start
            result = result | {"checkpoint": str(newest.path)}
    return summary(
        result,
        folder,
        overrides,
        notes=notes,
        device="cpu" if plan.backend == "torch" else "gpu",
        unit="nats a byte" if by_byte else "nats a token",
    )


def _write_plan(folder: Path, plan: Plan, resolution: Resolution) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_plan(folder, plan.to_yaml())
    verdict = json.dumps(report.to_json(resolution), indent=2)
    (folder / "plan.json").write_text(verdict + "\n")


def _result(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "result.json").read_text()))
    except (OSError, ValueError):
        return {}
