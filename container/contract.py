"""What a container is told when it starts, and where it answers: SageMaker's /opt/ml, and the
channel `plan` of ours. Standard library only.

Files and limits: SageMaker AI developer guide, "How Amazon SageMaker AI Provides Training
Information" and "How Amazon SageMaker AI Signals Algorithm Success and Failure". Outside
SageMaker another folder stands for /opt/ml, and the hosts are given by variables.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planning.findings import ChoiceError, Finding, MachineError

BASE = "SLIPWAY_OPT_ML"  # another folder for /opt/ml
HOSTS = "SLIPWAY_HOSTS"  # "a,b,...": all hosts, the first first; instead of resourceconfig.json
HOST = "SLIPWAY_HOST"  # the one of them that this is
# Seconds or milliseconds since 1970; only where the job runs in a training plan's capacity.
CAPACITY_END = "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
FAILURE_CHARACTERS = 1024  # of the failure file, what becomes the job's FailureReason
VERSION = 1


@dataclass(frozen=True)
class Cluster:
    """The hosts of a job, the first of which the others go to, and which one this is."""

    hosts: tuple[str, ...]
    current: str
    interface: str | None  # of the network between them

    @property
    def rank(self) -> int:
        return self.hosts.index(self.current)


@dataclass(frozen=True)
class Start:
    """start.json: what the launcher decided about a run outside of its plan."""

    name: str
    instance_type: str | None
    gpu: str
    gpus_per_node: int
    nodes: int
    environment: dict[str, str]  # policies unexpanded (training/host.py)
    run_dir: Path
    shared_run_dir: bool  # all hosts see one folder
    roots: dict[str, str]
    max_restarts: int
    preflight: bool
    min_allreduce_gb_s: float | None  # GB/s of bus bandwidth; None: a floor of preflight's own
    stop_before_end_s: float
    worker: str


def base() -> Path:
    return Path(os.environ.get(BASE, "/opt/ml"))


def plan_file(root: Path) -> Path:
    return root / "input" / "data" / "plan" / "plan.yaml"


def start_file(root: Path) -> Path:
    return root / "input" / "data" / "plan" / "start.json"


def read_cluster(root: Path, environ: Mapping[str, str] = os.environ) -> Cluster:
    """The job's hosts, in the order of their numbers. Raises MachineError."""
    if listed := environ.get(HOSTS):
        hosts = tuple(name.strip() for name in listed.split(",") if name.strip())
        if (here := environ.get(HOST, "")) not in hosts:
            raise _broken("hosts", f"{HOST}={here} is none of {HOSTS}={listed}", f"set {HOST}")
        return Cluster(hosts, here, None)
    path = root / "input" / "config" / "resourceconfig.json"
    found = _read_object(path, MachineError)
    names: Any = found.get("hosts")
    current: Any = found.get("current_host")
    if not (isinstance(names, list) and names and all(isinstance(n, str) and n for n in names)):
        raise _broken(path, f"`hosts` is {json.dumps(names)}, not a list of names")
    if len(set(names)) < len(names):
        raise _broken(path, f"`hosts` names one twice: {', '.join(names)}")
    if current not in names:
        raise _broken(path, f"`current_host` is {json.dumps(current)}, none of {', '.join(names)}")
    interface = found.get("network_interface_name")
    if interface is not None and not isinstance(interface, str):
        raise _broken(path, f"`network_interface_name` is {json.dumps(interface)}, not a name")
    return Cluster(tuple(sorted(names, key=_by_number)), current, interface)


def _by_number(host: str) -> tuple[int, str]:
    """algo-2 before algo-10."""
    number = re.search(r"(\d+)$", host)
    return (int(number[1]) if number else 0, host)


def read_start(root: Path) -> Start:
    """Raises ChoiceError, with all that is wrong in the file."""
    path = start_file(root)
    found = _read_object(path, ChoiceError)
    if (version := found.pop("version", None)) != VERSION:
        raise _bad(path, f"version {json.dumps(version)}, and this image reads {VERSION}",
                   "build the image and submit from one version of the repository")  # fmt: skip
    wrong = []
    for name, allowed in _TYPES.items():
        value = found.get(name)
        if name not in found:
            wrong.append(f"`{name}` is missing")
        elif not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            wrong.append(f"`{name}` is {json.dumps(value)}")
        elif isinstance(value, dict) and not all(isinstance(v, str) for v in value.values()):
            wrong.append(f"`{name}` holds values that are not text")
    for name in ("gpus_per_node", "nodes"):
        if isinstance(found.get(name), int) and found[name] < 1:
            wrong.append(f"`{name}` is {found[name]}")
    wrong += [f"`{name}` is unknown" for name in found if name not in _TYPES]
    if wrong:
        raise _bad(path, "; ".join(wrong), "it is written by launch/train.py launch=...")
    return Start(**{**found, "run_dir": Path(found["run_dir"])})


_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "instance_type": (str, type(None)),
    "gpu": (str,),
    "gpus_per_node": (int,),
    "nodes": (int,),
    "environment": (dict,),
    "run_dir": (str,),
    "shared_run_dir": (bool,),
    "roots": (dict,),
    "max_restarts": (int,),
    "preflight": (bool,),
    "min_allreduce_gb_s": (int, float, type(None)),
    "stop_before_end_s": (int, float),
    "worker": (str,),
}


def capacity_end(environ: Mapping[str, str] = os.environ) -> float | None:
    """When the capacity that the job runs in ends, in seconds since 1970; None: nobody says so.

    Raises MachineError: it is no time, and a run that is to stop before it could not.
    """
    given = environ.get(CAPACITY_END)
    text = (given or "").strip()
    if not text:
        if given is not None:
            print(f"warning: {CAPACITY_END} is empty: the run does not stop before the end of the "
                  "capacity, if it has one", flush=True)  # fmt: skip
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _broken(CAPACITY_END, f"{text!r} is not a time")
    return number / 1000 if number > 1e11 else number  # 1e11 seconds are the year 5138


def write_failure(root: Path, reason: str) -> None:
    """Say why the job failed, where DescribeTrainingJob's FailureReason is taken from."""
    path = root / "output" / "failure"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(shorten(reason, FAILURE_CHARACTERS))
    except OSError as error:  # a full disk: the log has it
        print(f"warning: the reason could not be written to {path}: {error.strerror}", flush=True)


def shorten(text: str, characters: int) -> str:
    """At most so many characters: the start, which names what failed, and the end."""
    if len(text) <= characters:
        return text
    mark = "\n...\n"
    start = characters * 2 // 3
    return text[:start] + mark + text[-(characters - start - len(mark)) :]


def _read_object(path: Path, refusal: type[ChoiceError] | type[MachineError]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        message, fix = f"cannot be read: {error.strerror}", f"{BASE} names the folder"
    except ValueError as error:
        message, fix = f"is not JSON: {error}", "it may have been cut off: start the job again"
    else:
        if isinstance(found, dict):
            return found
        message, fix = "holds no JSON object", "it may have been cut off: start the job again"
    machine = refusal is MachineError
    raise refusal(Finding("contract", "error", str(path), message, fix, machine=machine))


def _broken(where: Path | str, message: str, fix: str = "start the job again") -> MachineError:
    return MachineError(Finding("contract", "error", str(where), message, fix, machine=True))


def _bad(path: Path, message: str, fix: str) -> ChoiceError:
    return ChoiceError(Finding("contract", "error", str(path), message, fix))
