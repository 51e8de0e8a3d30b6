"""What a run in a container must keep to, wherever that is: its nodes, its environment."""

from __future__ import annotations

import re
from collections.abc import Iterator

from container.network import OBSOLETE
from launch.checks import is_local, named_paths
from planning.findings import ChoiceError, Finding
from planning.hardware import INSTANCES
from planning.plan import Plan
from planning.schema import ContainedLaunch, DockerLaunch, KubernetesLaunch, RunConfig

# Set in the container, for the node or by the plan.
OWN = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|SM_\w+|SAGEMAKER_\w+"
    r"|SLIPWAY_\w+|TORCHELASTIC_\w+|PET_\w+|FI_PROVIDER|FI_EFA_USE_HUGE_PAGE|NCCL_NET_PLUGIN"
    r"|NCCL_SOCKET_IFNAME|LD_LIBRARY_PATH|PYTHONPATH|PYTHONSAFEPATH)"
)

# Read by the loader and by Python before our first line: every process would start otherwise, or
# not at all, and the first one could not say why.
BEFORE_US = re.compile(r"LD_PRELOAD|LD_AUDIT|PYTHONHOME|PYTHONPLATLIBDIR|PYTHONINSPECT")


def instance_choices() -> str:
    """'hardware=p6_b200 (ml.p6-b200.48xlarge), ...': the hardware that SageMaker has."""
    return ", ".join(f"hardware={one.choice} ({one.name})" for one in INSTANCES.values())


def refuse_this(config: RunConfig) -> None:
    """ChoiceError if the hardware is "what is here" and the run is not."""
    if config.hardware.name == "this" and not isinstance(config.launch, DockerLaunch):
        raise ChoiceError(
            Finding(
                "hardware-elsewhere",
                "error",
                "hardware",
                f"it is looked up on this machine, and launch={config.launch.kind} runs elsewhere",
                f"choose {instance_choices()}, or h100, h200, b200, ... for other machines"
                if config.launch.kind != "sagemaker"
                else f"choose {instance_choices()}",
            )
        )


def check(config: RunConfig, launch: ContainedLaunch, plan: Plan | None) -> list[Finding]:
    """Errors of what no container can keep to."""
    found = [
        Finding("contained-environment", "error", f"launch.environment.{name}", message, fix,
                "container/ and the plan set these")
        for name, message, fix in _environment(launch, plan)
    ]  # fmt: skip
    if isinstance(launch, DockerLaunch) and config.hardware.nodes > 1:
        message = f"launch=docker starts one machine, and the plan has {config.hardware.nodes}"
        fix = "set hardware.nodes=1, or take launch=slurm or kubernetes"
        found.append(Finding("docker-nodes", "error", "hardware.nodes", message, fix))
    if isinstance(launch, KubernetesLaunch):
        found += _on_volume(config, launch)
    elif launch.kind != "sagemaker":
        found += [
            Finding("no-channel", "error", setting, f"{path}: only launch=sagemaker has channels",
                    "name its folder, as the nodes see it")
            for setting, path in named_paths(config)
            if path.startswith("data:")
        ]  # fmt: skip
    return found


def _environment(launch: ContainedLaunch, plan: Plan | None) -> Iterator[tuple[str, str, str]]:
    """(name, message, fix) of variables that the user may not set."""
    planned = plan.environment if plan else {}
    for name, value in (launch.environment or {}).items():
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name, re.ASCII):
            yield name, f"{name!r:.60} is no variable's name", "take letters, digits and _"
        elif name in planned:
            message = f"the plan sets it to {planned[name]!r}"
            yield name, message, "leave it out: the plan that was read is what runs"
        elif OWN.fullmatch(name):
            yield name, "it is set in the container, for each node or process", "leave it out"
        elif BEFORE_US.fullmatch(name):
            message = "it changes how each process of the container starts, the first one too"
            yield name, message, "leave it out; what all of them need belongs in the image"
        elif name in OBSOLETE:
            yield name, "it slows or hangs NCCL and EFA on today's machines", "leave it out"
        elif "\0" in value:
            yield name, "a variable holds no zero byte", "leave it out"


def _on_volume(config: RunConfig, launch: KubernetesLaunch) -> Iterator[Finding]:
    mount = launch.mount_path.rstrip("/")
    if not mount.startswith("/"):
        message = f"{launch.mount_path!r} is no folder of a container"
        yield Finding("mount-path", "error", "launch.mount_path", message, "begin it with /")
        return
    for setting, path in dict.fromkeys(named_paths(config)):
        if path.startswith("data:"):
            message = f"{path}: only launch=sagemaker has channels"
        elif is_local(path) and not path.startswith(f"{mount}/"):
            message = f"{path} is not on the volume that the nodes see"
        else:
            continue
        fix = f"copy it to the volume, and name it {mount}/... (launch.mount_path)"
        yield Finding("volume-path", "error", setting, message, fix)
