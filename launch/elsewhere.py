"""Runs in containers elsewhere: what they must keep to, and the files that start them.

Everything is written to the run folder, to be read before anything starts; only SageMaker jobs are
also submitted from here.
"""

from __future__ import annotations

import dataclasses
import json
import secrets as random
import shlex
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import checks, contained, run_folder
from launch import start as start_file
from launch.display import resume_command
from launch.secrets import redact
from planning import report
from planning.findings import Finding, errors
from planning.plan import Plan
from planning.resolve import Resolution
from planning.schema import (
    ContainedLaunch,
    DockerLaunch,
    KubernetesLaunch,
    RunConfig,
    SageMakerLaunch,
    SlurmLaunch,
)

ROOT = Path(__file__).resolve().parents[1]
REQUEST = "request.json"
REPORT = "report.txt"
_STAMP, _TOKEN = "20000101-000000", "0000"  # of a name that is not chosen yet


@dataclass(frozen=True)
class Way:
    """How a run is started. overrides: the command line's words. dry: write and stop. siblings:
    folders of the sweep's earlier jobs."""

    overrides: Sequence[str]
    findings: Sequence[Finding]
    dry: bool
    siblings: Sequence[Path] = ()


def planned(config: RunConfig) -> tuple[RunConfig, bool]:
    """(the choice as its plan has it, whether this is a dry run): the plan that a dry run shows is
    to the byte the one that is submitted. Raises ChoiceError where it cannot run elsewhere."""
    contained.refuse_this(config)
    launch = config.launch
    if not isinstance(launch, SageMakerLaunch) or not launch.dry_run:
        return config, False
    return config.model_copy(update={"launch": launch.model_copy(update={"dry_run": False})}), True


def check(config: RunConfig, plan: Plan | None, dry: bool) -> list[Finding]:
    """What is wrong with the choice where it is to run; reads files here, and S3 before a real
    submission."""
    launch = config.launch
    assert isinstance(launch, ContainedLaunch)
    found = contained.check(config, launch, plan)
    if isinstance(launch, SageMakerLaunch):
        found += _check_sagemaker(config, launch, plan, dry, bool(errors(found)))
    elif isinstance(launch, KubernetesLaunch):
        if config.data.kind == "indexed":
            found.append(_not_looked_at("it is on the cluster's volume"))
    elif not errors(found):
        found += checks.data(config) + checks.initial_weights(config)
    return found


def _check_sagemaker(
    config: RunConfig, launch: SageMakerLaunch, plan: Plan | None, dry: bool, broken: bool
) -> list[Finding]:
    from launch.aws import request, rules, service_model

    found = rules.check(rules.Facts(config, launch))
    found += request.placeholders(launch, dry)
    if errors(found) or broken or plan is None:
        return found
    name = start_file.run_name(launch.job_name or config.model.name, _STAMP, _TOKEN)
    found += service_model.check(request.build(plan, launch, name))
    if not errors(found):
        found += _data_in_s3(config, launch, dry)
    return found


def _data_in_s3(config: RunConfig, launch: SageMakerLaunch, dry: bool) -> list[Finding]:
    """The checks of data, of what S3 holds, before a real submission."""
    from launch.aws import channels

    if config.data.kind != "indexed":
        return []
    if dry:
        return [_not_looked_at("a dry run asks nobody")]
    named = {text: channels.in_s3(text, launch) for _, text in checks.named_paths(config)}
    if None in named.values():
        return [_not_looked_at("it is on a file system of the job's")]

    def there(value: Any) -> Any:
        if isinstance(value, list):
            return [there(item) for item in value]
        return named.get(value, value)

    data = config.data
    names = ("paths", "train_paths", "valid_paths", "test_paths")
    moved = data.model_copy(update={name: there(getattr(data, name)) for name in names})
    return checks.data(config.model_copy(update={"data": moved}))


def _not_looked_at(why: str) -> Finding:
    message = f"the data was not looked at: {why}"
    return Finding("data-not-seen", "warning", "data.paths", message, "the job checks it first")


def start(folder: Path, plan: Plan, resolution: Resolution, way: Way) -> tuple[int, dict[str, Any]]:
    """Write all files of the run to its folder, and submit it if it is a job of SageMaker.

    (exit status, what a sweep's table says of it). Raises Refusal if it cannot be submitted.
    """
    launch = plan.config.launch
    if plan.config.resume == "none" and run_folder.has_run(folder):
        moved = run_folder.set_aside(folder)
        print(f"{'resume':<10} none: the earlier run is in {moved}")
    if isinstance(launch, SageMakerLaunch):
        return _sagemaker(folder, plan, launch, resolution, way)
    folder = folder.absolute()  # as nodes see it
    if isinstance(launch, SlurmLaunch):
        script, how = _slurm(folder, plan, launch), "sbatch"
    elif isinstance(launch, DockerLaunch):
        script, how = _docker(folder, plan, launch), "bash"
    else:
        assert isinstance(launch, KubernetesLaunch)
        script, how = _kubernetes(folder, plan, launch), "kubectl apply -f"
    _write_plan(folder, plan, resolution, way)
    print(f"{'written':<10} {script}\n{'start it':<10} {how} {shlex.quote(str(script))}")
    return 0, {"status": "written"}


def _sagemaker(
    folder: Path, plan: Plan, launch: SageMakerLaunch, resolution: Resolution, way: Way
) -> tuple[int, dict[str, Any]]:
    from launch.aws import record, request

    folder.chmod(stat.S_IRWXU)  # it names an account's role, bucket and network
    name = _name(folder, launch.job_name or plan.name)
    jobs = len(record.Record.load(folder).jobs) if (folder / record.FILE).exists() else 0
    asked = request.build(plan, launch, name, jobs + 1)
    start = request.start(plan, launch, name)
    run_folder.write_private(folder / REQUEST, json.dumps(asked, indent=2) + "\n")
    run_folder.write_private(folder / start_file.FILE, start_file.to_json(start))
    _write_plan(folder, plan, resolution, way)
    if way.dry:
        words = [w for w in way.overrides if w.partition("=")[0] != "launch.dry_run"]
        print(f"{'request':<10} {folder / REQUEST}")
        print(f"{'submit':<10} {resume_command(words, folder)}")
        return 0, {"status": "written", "job": asked["TrainingJobName"]}
    from launch.aws import queue, submit

    queue.wait_for_room(way.siblings, launch)
    outcome = submit.submit(folder, asked, start, launch, plan)
    if outcome.message:
        print(outcome.message)
    said = {"status": outcome.status, "job": asked["TrainingJobName"]}
    return outcome.exit_status, {**said, **outcome.result}


def _slurm(folder: Path, plan: Plan, launch: SlurmLaunch) -> Path:
    from launch.scripts import common, slurm

    cache = _cache(plan)
    name = _contain(folder, plan, launch, {"cache:": str(cache)})
    text = slurm.build(
        plan, launch, name=name, run_dir=folder, python=Path(sys.executable), root=ROOT,
        mounts=common.mounts(plan.config, folder, cache),
    )  # fmt: skip
    return _write_script(folder / slurm.FILE, text)


def _docker(folder: Path, plan: Plan, launch: DockerLaunch) -> Path:
    from launch.scripts import common, docker

    cache = _cache(plan)
    # A folder that is missing would be made by the daemon, as root's.
    cache.mkdir(parents=True, exist_ok=True)
    name = _contain(folder, plan, launch, {"cache:": str(cache)})
    mounts = common.mounts(plan.config, folder, cache)
    return _write_script(
        folder / docker.FILE, docker.build(plan, launch, name=name, run_dir=folder, mounts=mounts)
    )


def _kubernetes(folder: Path, plan: Plan, launch: KubernetesLaunch) -> Path:
    from launch.scripts import kubernetes

    volume = launch.mount_path.rstrip("/")
    name = _name(folder, plan.name, kubernetes.LONGEST_BASE).lower()
    start = start_file.start(
        plan, launch, name=name, run_dir=f"{volume}/runs/{name}", shared_run_dir=True,
        roots={"cache:": f"{volume}/cache"},
    )  # fmt: skip
    run_folder.write_private(folder / start_file.FILE, start_file.to_json(start))
    manifest = kubernetes.build(plan, launch, name=name, start=start)
    return _write_script(folder / kubernetes.FILE, manifest, executable=False)


def _contain(folder: Path, plan: Plan, launch: ContainedLaunch, roots: dict[str, str]) -> str:
    """Lay out what stands for /opt/ml, where nodes see the run folder as it is; the run's name."""
    from launch.scripts.common import OPT_ML, PLAN

    name = _name(folder, plan.name)
    start = start_file.start(
        plan, launch, name=name, run_dir=str(folder), shared_run_dir=True, roots=roots
    )
    channel = folder / OPT_ML / PLAN
    (folder / OPT_ML / "output").mkdir(parents=True, exist_ok=True)
    run_folder.write_private(channel / "plan.yaml", plan.to_yaml())
    run_folder.write_private(channel / start_file.FILE, start_file.to_json(start))
    run_folder.write_private(folder / start_file.FILE, start_file.to_json(start))
    return name


def _cache(plan: Plan) -> Path:
    return Path(plan.config.data.cache).expanduser().resolve()


def _name(folder: Path, base: str, longest: int = start_file.LONGEST_BASE) -> str:
    """The run's name: the one it has had in this folder, or a new one."""
    try:
        return str(json.loads((folder / start_file.FILE).read_text())["name"])
    except (OSError, ValueError, KeyError, TypeError):
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return start_file.run_name(base, stamp, random.token_hex(2), longest)


def _write_script(path: Path, text: str, executable: bool = True) -> Path:
    run_folder.write_private(path, text)
    if executable:
        path.chmod(stat.S_IRWXU)
    return path


def _write_plan(folder: Path, plan: Plan, resolution: Resolution, way: Way) -> None:
    """plan.yaml, plan.json and report.txt, which may name accounts: for their owner only."""
    with run_folder.said_of("run_dir", folder):
        run_folder.write_plan(folder, plan.to_yaml())
    (folder / "plan.yaml").chmod(stat.S_IRUSR | stat.S_IWUSR)
    every = dataclasses.replace(resolution, findings=list(way.findings))
    verdict = json.dumps(report.to_json(every), indent=2)
    run_folder.write_private(folder / "plan.json", verdict + "\n")
    said = [*report.lines(resolution), *report.finding_lines(way.findings)]
    command = shlex.join(["python", "launch/train.py", *map(redact, way.overrides)])
    run_folder.write_private(folder / REPORT, "\n".join([command, "", *said]) + "\n")
