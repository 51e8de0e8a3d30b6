"""Which launch settings make a SageMaker job that starts, ends and keeps what it learned.

Like the rules of plans (planning/rules), of what the service's own model does not say. Sources:
"API" is the CreateTrainingJob reference of botocore's service model, the others are named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from launch.aws import channels, request
from launch.checks import CHANNEL, is_local, named_paths
from launch.contained import instance_choices
from launch.start import CACHE, LONGEST_BASE
from planning.findings import Finding, did_you_mean
from planning.hardware import INSTANCES, Instance
from planning.schema import RunConfig, SageMakerLaunch

Verdict = tuple[str, str, str]  # setting, message, fix
DAY = 24  # hours
_ARN = re.compile(r"arn:aws[a-z-]*:[a-z0-9-]+:([a-z0-9-]*):(\d*):.*")
_ECR = re.compile(r"(\d{12})\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/.+")


@dataclass(frozen=True)
class Facts:
    """A choice for SageMaker."""

    config: RunConfig
    launch: SageMakerLaunch

    @property
    def instance(self) -> Instance | None:
        return INSTANCES.get(self.config.hardware.instance_type or "")

    @property
    def nodes(self) -> int:
        return self.config.hardware.nodes

    @property
    def file_systems(self) -> list[str]:
        """Names of channels that are file systems."""
        named = {name: channels.parse(text) for name, text in (self.launch.channels or {}).items()}
        return [name for name, source in named.items() if source and source.is_file_system]

    @property
    def places(self) -> dict[str, tuple[str, str]]:
        """{setting: (account, region)} of what is named with them."""
        found = {}
        if self.launch.image and (match := _ECR.fullmatch(self.launch.image)):
            found["launch.image"] = (match[1], match[2])
        for name in ("role", "training_plan", "output_kms_key"):
            if match := _ARN.fullmatch(getattr(self.launch, name) or ""):
                found[f"launch.{name}"] = (match[2], match[1])
        return found


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Literal["error", "warning"]
    source: str
    verdicts: Callable[[Facts], Iterable[Verdict]]


RULES: list[Rule] = []


def rule(
    id: str, source: str, severity: Literal["error", "warning"] = "error"
) -> Callable[[Callable[[Facts], Iterable[Verdict]]], Callable[[Facts], Iterable[Verdict]]]:
    def register(
        verdicts: Callable[[Facts], Iterable[Verdict]],
    ) -> Callable[[Facts], Iterable[Verdict]]:
        RULES.append(Rule(f"sagemaker-{id}", severity, source, verdicts))
        return verdicts

    return register


def check(facts: Facts) -> list[Finding]:
    """All findings of all rules."""
    return [
        Finding(r.id, r.severity, setting, message, fix, r.source)
        for r in RULES
        for setting, message, fix in r.verdicts(facts)
    ]


# --- instances and capacity -------------------------------------------------------------------


@rule("instance", "API ResourceConfig.InstanceType; planning/hardware.py")
def instance(f: Facts) -> Iterator[Verdict]:
    hardware, found = f.config.hardware, f.instance
    if hardware.instance_type is None:
        message = f"hardware={hardware.name} is no instance type of SageMaker"
        yield "hardware", message, f"choose {instance_choices()}"
    elif found is None:
        near = did_you_mean(hardware.instance_type, INSTANCES)
        message = f"{hardware.instance_type!r} is not known here{near}"
        yield "hardware.instance_type", message, f"choose {instance_choices()}"
    elif (hardware.gpu, hardware.gpus_per_node) != (found.gpu, found.gpus):
        yield (
            "hardware",
            f"{found.name} has {found.gpus} {found.gpu}, and the plan is for "
            f"{hardware.gpus_per_node} {hardware.gpu}",
            f"leave hardware.gpu and hardware.gpus_per_node as hardware={hardware.name} has them",
        )


@rule("plan-and-spot", "AWS: a training plan is reserved capacity, spot is what nobody reserved")
def plan_and_spot(f: Facts) -> Iterator[Verdict]:
    if f.launch.training_plan and f.launch.spot:
        message = "a job runs on a training plan or on spot, not on both"
        yield "launch.spot", message, "set launch.spot=false, or launch.training_plan=null"


@rule("spot-instance", "EC2 spot: P6e UltraServers come as capacity blocks only")
def spot_instance(f: Facts) -> Iterator[Verdict]:
    if f.launch.spot and f.instance and f.instance.architecture == "aarch64":
        message = f"there is no spot capacity of {f.instance.name}"
        yield "launch.spot", message, "take launch.training_plan=ARN (python tools/plans.py)"


@rule("spot-wait", "API StoppingCondition.MaxWaitTimeInSeconds >= MaxRuntimeInSeconds")
def spot_wait(f: Facts) -> Iterator[Verdict]:
    launch = f.launch
    if launch.max_wait_hours is None:
        return
    if not launch.spot:
        message = "only a spot job waits this way"
        yield "launch.max_wait_hours", message, "set it to null; see launch.max_pending_hours"
    elif request.wait_seconds(launch) < request.seconds(launch.max_run_hours):
        yield (
            "launch.max_wait_hours",
            f"{launch.max_wait_hours:g} h include the run, which may take "
            f"{launch.max_run_hours:g} h (launch.max_run_hours)",
            f"take at least {launch.max_run_hours:g}, or null for twice as much",
        )


@rule("spot-save", "a spot job that is interrupted starts again with what was saved")
def spot_save(f: Facts) -> Iterator[Verdict]:
    if f.launch.spot and f.config.checkpoint.save is False:
        message = "a spot job that saves nothing starts at step 0 after every interruption"
        yield "checkpoint.save", message, "set checkpoint.save=true, or launch.spot=false"


@rule("longest-run", "API StoppingCondition.MaxRuntimeInSeconds: at most 28 days")
def longest_run(f: Facts) -> Iterator[Verdict]:
    for name in ("max_run_hours", "max_wait_hours"):
        hours = getattr(f.launch, name)
        most = 28 * DAY if name == "max_run_hours" else 30 * DAY
        if hours is not None and hours > most:
            message = f"{hours:g} h are more than the {most} h ({most // DAY} days) of any job"
            yield (
                f"launch.{name}", message,
                f"take at most {most}; the run goes on in a new job: launch/jobs.py resume RUN",
            )  # fmt: skip


@rule("shortest-run", "starting the instances and torch takes minutes", "warning")
def shortest_run(f: Facts) -> Iterator[Verdict]:
    if f.launch.max_run_hours < 0.25:
        message = f"{f.launch.max_run_hours:g} h may end before the first step"
        yield "launch.max_run_hours", message, "take at least 0.25"


@rule("run-quota", "Service Quotas: 'Longest run time for a training job', 5 days", "warning")
def run_quota(f: Facts) -> Iterator[Verdict]:
    if 5 * DAY < f.launch.max_run_hours <= 28 * DAY:
        yield (
            "launch.max_run_hours",
            f"{f.launch.max_run_hours:g} h are more than the 120 h that an account has at first",
            "ask for more (Service Quotas, 'Longest run time for a training job'), or let jobs "
            "follow each other: launch.wait=true",
        )


@rule("stop-before-end", "AWS: a plan's instances end from 30 minutes before its capacity")
def stop_before_end(f: Facts) -> Iterator[Verdict]:
    minutes = f.launch.stop_before_end_minutes
    if f.launch.training_plan and minutes <= 30:
        message = f"{minutes} minutes before the end the instances are gone already"
        yield "launch.stop_before_end_minutes", message, "take more than 30, and the time of a save"
    elif f.launch.training_plan and minutes >= f.launch.max_run_hours * 60:
        message = f"{minutes} minutes are all of launch.max_run_hours={f.launch.max_run_hours:g}"
        yield (
            "launch.stop_before_end_minutes",
            message,
            "take 40: instances go 30 early",
        )


@rule("warm-pool", "API ResourceConfig.KeepAlivePeriodInSeconds: at most 21600; none for spot")
def warm_pool(f: Facts) -> Iterator[Verdict]:
    minutes, setting = f.launch.warm_pool_minutes, "launch.warm_pool_minutes"
    if minutes > 360:
        yield setting, f"{minutes} minutes are more than the 360 of a warm pool", "take at most 360"
    if minutes and f.launch.spot:
        yield setting, "spot instances do not stay for the next job", "set it to 0"


@rule("warm-pool-plan", "AWS: a pool serves jobs of the same plan, type and number", "warning")
def warm_pool_plan(f: Facts) -> Iterator[Verdict]:
    if f.launch.warm_pool_minutes and f.launch.training_plan:
        yield (
            "launch.warm_pool_minutes",
            "the pool of a training plan is only for further jobs of this plan",
            "set it to 0 unless more jobs of the plan follow at once",
        )


@rule("arm", "planning/hardware.py: the hosts of P6e are arm64", "warning")
def arm(f: Facts) -> Iterator[Verdict]:
    if f.instance and f.instance.architecture == "aarch64":
        message = f"{f.instance.name} has an arm64 host: the image must be built for it"
        yield "launch.image", message, "python tools/image.py build --help says how"


# --- names and places -------------------------------------------------------------------------


@rule("job-name", "API TrainingJobName: letters, digits and single dashes inside, 63 in all")
def job_name(f: Facts) -> Iterator[Verdict]:
    name = f.launch.job_name
    if name is None:
        return
    fits = re.fullmatch(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*", name, re.ASCII)
    if not fits or len(name) > LONGEST_BASE:
        yield (
            "launch.job_name",
            f"{name!r} cannot begin a job's name, which goes on with the time",
            f"take letters, digits and dashes between them, at most {LONGEST_BASE}",
        )


@rule("bucket", "S3: names of buckets")
def bucket(f: Facts) -> Iterator[Verdict]:
    name = f.launch.bucket
    if name is None:
        return
    source = channels.parse(f"s3://{name}")
    if source is None or source.path or ".." in name:
        fix = "write its name alone, without s3:// (launch.prefix is the folder in it)"
        yield "launch.bucket", f"{name!r} is no bucket's name", fix


@rule("prefix", "S3: characters of keys that every tool takes")
def prefix(f: Facts) -> Iterator[Verdict]:
    text = f.launch.prefix
    if not re.fullmatch(r"[a-zA-Z0-9!_.*'()/-]+", text, re.ASCII) or "//" in text or ".." in text:
        message = f"{text!r:.60} is no folder of a bucket"
        yield "launch.prefix", message, "take letters, digits, _ - . and / between folders"
    elif len(text) > 500:
        message = f"{len(text)} characters leave no room for the names in it"
        yield "launch.prefix", message, "take at most 500"


@rule("region", "AWS: a job takes its role's account and image, plan and keys of its region")
def region(f: Facts) -> Iterator[Verdict]:
    wanted, by = f.launch.region, "launch.region"
    if wanted is not None and not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", wanted, re.ASCII):
        yield by, f"{wanted!r} is no region", "write it as us-east-1"
        return
    for setting, (_, place) in f.places.items():
        if not place:  # a role is of all regions
            continue
        if wanted is None:
            wanted, by = place, setting
        elif place != wanted:
            message = f"it is in {place}, and {by} says {wanted}"
            yield setting, message, "take all of one region"


@rule("account", "AWS: roles and plans are used in their own account only")
def account(f: Facts) -> Iterator[Verdict]:
    role, plan = f.places.get("launch.role"), f.places.get("launch.training_plan")
    if role and plan and role[0] != plan[0]:
        message = f"it is of account {plan[0]}, and launch.role of {role[0]}"
        yield "launch.training_plan", message, "take both of one account"


@rule(
    "image-account", "ECR: a repository is its own account's unless its policy says so", "warning"
)
def image_account(f: Facts) -> Iterator[Verdict]:
    role, image = f.places.get("launch.role"), f.places.get("launch.image")
    if role and image and role[0] != image[0]:
        message = f"it is of account {image[0]}, and launch.role of {role[0]}"
        yield "launch.image", message, "its repository's policy must let the role pull"


@rule("image", "AWS: training images come from ECR")
def image(f: Facts) -> Iterator[Verdict]:
    text = f.launch.image
    if text is not None and not _ECR.fullmatch(text):
        yield (
            "launch.image",
            f"{text!r:.80} is no image in ECR",
            "take ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG, as tools/image.py push prints it",
        )


# --- channels and paths -----------------------------------------------------------------------


@rule("channel", "API InputDataConfig: names, sources, at most 20")
def channel(f: Facts) -> Iterator[Verdict]:
    given = f.launch.channels or {}
    for name, text in given.items():
        setting = f"launch.channels.{name}"
        if name == channels.PLAN:
            yield setting, "the plan travels in a channel of this name", "take another name"
        elif not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name, re.ASCII) or set(name) == {"."}:
            yield setting, f"{name!r:.70} is no channel's name", "take letters, digits, _ - and ."
        if channels.parse(text) is None:
            yield setting, f"{text!r:.80} is none of them", f"take {channels.FORMS}"
    if len(given) > 19:
        yield (
            "launch.channels",
            f"{len(given)} are too many: a job has 20, the plan's too",
            ("take at most 19; one can hold many folders"),
        )


@rule("copy-channels", "API InputMode: of S3 only")
def copy_channels(f: Facts) -> Iterator[Verdict]:
    given = f.launch.channels or {}
    for name in f.launch.copy_channels:
        if name not in given:
            message = f"there is no channel {name!r}{did_you_mean(name, given)}"
            yield "launch.copy_channels", message, f"launch.channels has {_all(given)}"
        elif name in f.file_systems:
            message = f"{name!r} is a file system, which is read where it is"
            yield "launch.copy_channels", message, "leave it out"


@rule("path", "a job sees S3, its channels and its own disk, not the machine that submits it")
def path(f: Facts) -> Iterator[Verdict]:
    given = f.launch.channels or {}
    for setting, text in dict.fromkeys(named_paths(f.config)):
        name = channels.channel_of(text)
        if setting == "checkpoint.save":
            message = f"{text}: a job saves in its run folder, which is kept in S3"
            yield setting, message, "set checkpoint.save=true (and launch.run_folder for FSx)"
        elif name is not None and name not in given:
            message = f"{text}: there is no channel {name!r}{did_you_mean(name, given)}"
            yield setting, message, f"launch.channels has {_all(given)}"
        elif is_local(text):
            yield (
                setting,
                f"{text} is on this machine, where a job does not see it",
                "upload it (aws s3 sync), and name it s3://bucket/prefix, which is read as it is, "
                f"or as a channel: 'launch.channels={{web: s3://bucket/folder}}' and {CHANNEL}web/"
                "name; FSx for Lustre is a channel too",
            )
        elif setting == "checkpoint.load" and name is None:
            message = f"{text}: weights are read from a folder"
            fix = f"name its folder a channel, and load {CHANNEL}NAME"
            yield setting, message, fix


@rule("cache", "the disk of a node is the place for what can be made again", "warning")
def cache(f: Facts) -> Iterator[Verdict]:
    if f.config.data.cache != ".cache":
        message = f"{f.config.data.cache} is of this machine; a job has {CACHE} on each node"
        yield "data.cache", message, "leave it out"


@rule("run-folder", "API FileSystemDataSource; /opt/ml/checkpoints is kept in S3 otherwise")
def run_folder(f: Facts) -> Iterator[Verdict]:
    text = f.launch.run_folder
    if text is None:
        return
    name, setting = channels.channel_of(text), "launch.run_folder"
    if name is None or name not in f.file_systems:
        message = f"{text!r:.80} is not on a file system of launch.channels"
        yield setting, message, f"write {CHANNEL}NAME/folder, NAME being fsx:// or efs://"
    elif ".." in text.split("/") or not text.removeprefix(CHANNEL + name).strip("/"):
        message = f"{text!r:.80} names no folder of its own"
        yield setting, message, f"write {CHANNEL}{name}/folder, another one for each run"


@rule(
    "shared-folder",
    "torch_dist writes shards on every node; S3 joins them after a while",
    "warning",
)
def shared_folder(f: Facts) -> Iterator[Verdict]:
    if f.nodes > 1 and f.launch.run_folder is None and f.config.checkpoint.save is not False:
        yield (
            "launch.run_folder",
            f"{f.nodes} nodes save to folders of their own, which S3 joins: what was saved last "
            "may be incomplete there when the job ends suddenly, and is then passed over",
            "take a folder on FSx for Lustre: launch.run_folder=data:NAME/folder",
        )


@rule(
    "keep", "S3 gets a checkpoint some time after the disk; the node may end in between", "warning"
)
def keep(f: Facts) -> Iterator[Verdict]:
    saving = f.config.checkpoint
    if f.launch.run_folder is None and saving.save is not False and saving.keep == 1:
        yield (
            "checkpoint.keep",
            "1 keeps only the newest checkpoint, which S3 may not have in full when the node ends",
            "take 2 or more",
        )


# --- network and environment ------------------------------------------------------------------


@rule("vpc", "API VpcConfig: both or none")
def vpc(f: Facts) -> Iterator[Verdict]:
    launch = f.launch
    if bool(launch.subnets) != bool(launch.security_groups):
        missing = "launch.security_groups" if launch.subnets else "launch.subnets"
        yield missing, "subnets and security groups belong together", "give both, or neither"


@rule("file-system-vpc", "AWS: FSx and EFS are reached through a VPC")
def file_system_vpc(f: Facts) -> Iterator[Verdict]:
    if f.file_systems and not (f.launch.subnets and f.launch.security_groups):
        message = f"{_all(f.file_systems)} can be reached from their VPC only"
        fix = "give launch.subnets and launch.security_groups of the file system"
        yield "launch.subnets", message, fix


@rule("isolation", "API EnableNetworkIsolation: no calls out of the container")
def isolation(f: Facts) -> Iterator[Verdict]:
    if not f.launch.network_isolation:
        return
    for setting, text in dict.fromkeys(named_paths(f.config)):
        if "://" in text:
            message = f"{text} is read over the network, which the job has not"
            fix = f"make it a channel ({CHANNEL}NAME/...), or launch.network_isolation=false"
            yield setting, message, fix


@rule("encrypted-traffic", "API EnableInterContainerTrafficEncryption: takes longer", "warning")
def encrypted_traffic(f: Facts) -> Iterator[Verdict]:
    if f.launch.encrypt_traffic and f.nodes > 1:
        message = (
            "traffic between nodes is encrypted on its way, which EFA does not do at its speed"
        )
        yield "launch.encrypt_traffic", message, "set it to false unless it is required of you"


@rule("tags", "API Tags: at most 50; AWS keeps aws: to itself")
def tags(f: Facts) -> Iterator[Verdict]:
    given = f.launch.tags or {}
    for name in given:
        if name.lower().startswith("aws:"):
            yield f"launch.tags.{name}", "names that begin with aws: are AWS's", "take another name"
        elif name in request.OWN_TAGS:
            yield f"launch.tags.{name}", "every job has it already", "take another name"
    most = 50 - len(request.OWN_TAGS)
    if len(given) > most:
        yield "launch.tags", f"{len(given)} are too many", f"take at most {most}"


def _all(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
