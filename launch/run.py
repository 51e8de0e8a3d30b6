"""One run from its choice to its end: plan, check, and execute on this machine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launch import machine, run_folder
from launch.display import Display, resume_command, summary
from models import stacks
from planning import identity, report
from planning.findings import ChoiceError, Finding, MachineError, refuse
from planning.plan import Plan
from planning.resolve import Resolution, resolve
from planning.schema import RunConfig
from training import checkpoints
from training.data import indexed, library_text

WAYS_ON = (
    "This machine cannot run it. The same choice elsewhere: add hardware=p6_b200 (or p6_b300, "
    "h200, ...)\nand launch=plan to see its plan there; or start it on a machine with such GPUs."
)


@dataclass(frozen=True)
class Ended:
    """How a run ended; `result` is of result.json, empty for a plan."""

    exit_status: int
    run_dir: Path | None
    result: dict[str, Any]
    resolution: Resolution


def execute(config: RunConfig, overrides: list[str], run_dir: Path | None) -> Ended:
    """Plan the choice, say it, and do what `launch` asks for.

    run_dir: where the run is kept; None: a new folder under runs/. Raises ChoiceError or
    MachineError, with all findings, before anything is written.
    """
    here = machine.look()
    config = _absolute(config)
    config = config.model_copy(update={"hardware": machine.fill(config.hardware, here)})
    resolution = resolve(config)
    plan = resolution.plan
    folder = run_dir or (Path(config.run_dir) if config.run_dir else None)
    print("\n".join(report.lines(resolution)), flush=True)
    findings = resolution.findings + _stack_findings(config) + _data_findings(config)
    different, changed = _against_previous(resolution.config, folder)
    findings += different
    if plan is not None and config.launch.kind == "local":
        findings += machine.compare(plan, here) + _initial_weights_findings(resolution.config)
    for line in report.finding_lines(f for f in findings if f.severity == "warning"):
        print(line)
    try:
        refuse(dict.fromkeys(findings))  # one dataset named for three splits is one finding
    except MachineError as refusal:
        refusal.ways_on = WAYS_ON
        raise
    assert plan is not None
    if config.launch.kind == "plan":
        folder = folder or run_folder.default_run_dir(config.model.name)
        with run_folder.said_of("run_dir", folder):
            _write_plan(folder, plan, resolution)
        print(f"{'plan':<10} {folder / 'plan.yaml'}")
        return Ended(0, folder, {}, resolution)
    from launch import local  # what a plan alone has no use for takes its time

    local.check_port(config.launch.port)
    if plan.derived.checkpoint_format is not None and resolution.states is not None:
        # While one is saved, the `keep` older ones are still there.
        run_folder.free_space_check(
            _checkpoint_folder(config, folder or Path("runs")),
            _checkpoint_bytes(resolution) * (config.checkpoint.keep + 1),
        )
    folder = folder or run_folder.default_run_dir(config.model.name)
    with run_folder.lock(folder):
        return _train(folder.resolve(), plan, resolution, overrides, changed, here)


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
    display = Display(interval=config.logging.interval)
    saves = _checkpoint_folder(config, folder)
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
        _drop_metrics_after(folder, step)
        if step:
            with open(folder / "metrics.jsonl", "a") as metrics:
                metrics.write(json.dumps({"step": step, "resumed": True}) + "\n")
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
        newest = checkpoints.newest_complete(_checkpoint_folder(plan.config, folder)).taken
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


def _data_findings(config: RunConfig) -> list[Finding]:
    training = config.training
    made = None
    if config.data.kind == "library_text":
        prefixes = library_text.expected(Path(config.data.cache).expanduser().resolve())
        if prefixes is None:
            return []  # the first worker makes it
        made = (prefixes.train, prefixes.valid, prefixes.test)
    needed = indexed.samples_needed(
        training.train_steps,
        training.eval_interval,
        training.eval_steps,
        training.global_batch_size,
    )
    _, findings = indexed.check(
        config.data, config.model.vocab_size, config.model.seq_length, needed, made
    )
    return findings


def _stack_findings(config: RunConfig) -> list[Finding]:
    try:
        stacks.check(config.model.stack)
    except ChoiceError as error:
        return error.findings
    return []


def _absolute(config: RunConfig) -> RunConfig:
    """The choice with its local paths made absolute: workers need not share our folder."""

    def path(text: str) -> str:
        return text if "://" in text else str(Path(text).expanduser().absolute())

    def paths(items: list[Any]) -> list[Any]:
        # Strings that are numbers are weights.
        return [
            paths(item)
            if isinstance(item, list)
            else path(item)
            if isinstance(item, str) and not _is_number(item)
            else item
            for item in items
        ]

    data = {
        name: paths(getattr(config.data, name))
        for name in ("paths", "train_paths", "valid_paths", "test_paths")
    }
    saving = config.checkpoint
    checkpoint = {
        "save": saving.save if isinstance(saving.save, bool) else path(saving.save),
        "load": None if saving.load is None else path(saving.load),
    }
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "checkpoint": saving.model_copy(update=checkpoint),
        }
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _checkpoint_folder(config: RunConfig, run_dir: Path) -> Path:
    save = config.checkpoint.save
    return run_dir / "checkpoints" if isinstance(save, bool) else Path(save)


def _against_previous(config: RunConfig, folder: Path | None) -> tuple[list[Finding], list[str]]:
    """(errors: `folder` is of another run; lines: what changed) where a run would continue."""
    saves = _checkpoint_folder(config, folder or Path())
    previous = _previous_config(config, folder)
    saved = checkpoints.newest_complete(saves).taken is not None
    trained = saved or (folder is not None and (folder / "metrics.jsonl").exists())
    # A plan alone may be replaced by another one, but not that of a run.
    if previous is None or config.resume != "auto" or not (
        trained or config.launch.kind == "local"
    ):  # fmt: skip
        return [], []
    after = config.model_dump(mode="json")
    return identity.compare(previous, after, str(folder or saves), saved=saved)


def _initial_weights_findings(config: RunConfig) -> list[Finding]:
    folder = config.checkpoint.load
    if folder is None or "://" in folder:
        return []
    newest = checkpoints.newest_complete(Path(folder))
    sharded = config.layout.sharding == "fsdp"
    if newest.taken is None:
        reason = f": {newest.passed_over[0].reason}" if newest.passed_over else ""
        message, fix = f"{folder} holds no complete checkpoint{reason}", "name one that has iter_*"
    elif sharded != (newest.taken.format == "dcp"):
        # docs/resume.md: Megatron-FSDP saves in a format of its own.
        message = f"{newest.taken.path} was {'not ' if sharded else ''}saved by Megatron-FSDP"
        fix = f"take {'another layout than fsdp' if sharded else 'layout=fsdp'}"
    else:
        return []
    return [Finding("initial-weights", "error", "checkpoint.load", message, fix)]


def _previous_config(config: RunConfig, run_dir: Path | None) -> dict[str, Any] | None:
    """The configuration of the run that this one would continue, if there is one."""
    folders = [_checkpoint_folder(config, run_dir or Path())]
    if run_dir is not None:
        folders.insert(0, run_dir)
    elif isinstance(config.checkpoint.save, bool):
        return None
    for folder in folders:
        try:
            plan = yaml.safe_load((folder / "plan.yaml").read_text())
            return dict(plan["config"])
        except (OSError, yaml.YAMLError, KeyError, TypeError):
            continue
    return None


def _checkpoint_bytes(resolution: Resolution) -> int:
    """One checkpoint on disk: weights and optimizer state of all ranks, once each."""
    plan, config = resolution.plan, resolution.config
    assert plan is not None
    from planning.memory import BYTES

    weight = BYTES[config.precision.dtype]
    main = 0 if config.precision.dtype == "fp32" else 4
    each = weight + main + 2 * BYTES[config.precision.optimizer_moments]
    return (plan.derived.allocated_parameters or 0) * each


def _write_plan(folder: Path, plan: Plan, resolution: Resolution) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = plan.to_yaml()
    path = folder / "plan.yaml"
    if path.exists() and path.read_text() != text:
        # The plan of an earlier start of this run stays readable.
        (folder / "logs").mkdir(exist_ok=True)
        path.rename(folder / "logs" / f"plan-{time.strftime('%Y%m%d-%H%M%S')}.yaml")
    path.write_text(text)
    verdict = json.dumps(report.to_json(resolution), indent=2)
    (folder / "plan.json").write_text(verdict + "\n")


def _drop_metrics_after(folder: Path, step: int) -> None:
    """Keep one line a step: what was trained after the checkpoint is trained again."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return
    kept: list[str] = []
    dropped: list[str] = []
    for line in path.read_text().splitlines(keepends=True):
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


def _result(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "result.json").read_text()))
    except (OSError, ValueError):
        return {}
