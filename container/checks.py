"""The checks of container/preflight.py, by what they look at: GPUs, EFA, the host, all-reduce.

Each yields rows and raises nothing: what it cannot find out is a row too.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from container import gpu_health, network
from planning.hardware import GIB, GPUS, INSTANCES, gpu_of_nvml_name
from training import gpus as cards
from training import host as this_host
from training import torchrun
from training.device import ENOUGH_MEMORY, OTHERS_MEMORY_GIB

# Of a link's one-way speed, below which something is wrong (a link down, the wrong transport), not
# merely slow: all-reduces of half a gigabyte reach 0.7 and more.
FLOOR = 0.25
PROBE_S = 50
# NCCL's transports and data loaders share memory there; Docker's own default is 64 MiB.
SHARED_MEMORY_GIB_A_RANK = 1.0
SLOW_DISK_MB_S = 50
PROBE_BYTES = 2**26


@dataclass(frozen=True)
class Row:
    check: str
    state: Literal["ok", "FAIL", "warn", "-"]
    found: str


# --- GPUs -------------------------------------------------------------------------------------


def gpus(gpu: str | None, count: int | None, plan: Any) -> Iterator[Row]:
    """Right cards, their memory, formats, errors and links. gpu "cpu": none are wanted."""
    seen = cards.look()
    if gpu == "cpu" or (gpu is None and not seen.visible and not seen.problems):
        yield Row("GPUs", "-", "no GPU here: cards, formats, memory and NVLink are not checked")
        return
    for problem in seen.problems:
        yield Row("GPUs", "FAIL" if problem.severity == "error" else "warn", problem.message)
    kinds = [gpu_of_nvml_name(card.name) for card in seen.visible]
    names = ", ".join(sorted({card.name for card in seen.visible})) or "none"
    wrong = [str(i) for i, kind in enumerate(kinds) if gpu is not None and kind != gpu]
    if wrong:
        yield Row("GPUs", "FAIL", f"{names}; wanted {gpu}, which GPU {', '.join(wrong)} is not")
    elif len(kinds) != (count or len(kinds)) or not kinds:
        yield Row("GPUs", "FAIL", f"{len(kinds)} x {names}; wanted {count}")
    else:
        yield Row("GPUs", "ok", f"{len(kinds)} x {names}, driver {seen.driver}")
    health = gpu_health.look()
    yield from _memory(seen, gpu, health)
    yield from _formats(health, plan)
    yield from _links(health, gpu)


def _memory(seen: cards.Cards, gpu: str | None, health: list[gpu_health.Health]) -> Iterator[Row]:
    sizes = [card.memory_gib for card in seen.visible if card.memory_gib is not None]
    usual = GPUS[gpu].memory_gib if gpu else None
    if sizes and usual is not None and min(sizes) < ENOUGH_MEMORY * usual:
        yield Row("memory", "FAIL", f"{min(sizes):.1f} GiB a GPU; a {gpu} has {usual:.1f}")
    elif sizes:
        yield Row("memory", "ok", f"{min(sizes):.1f} GiB a GPU")
    used = [h for h in health if (h.used_gib or 0) > OTHERS_MEMORY_GIB]
    if used:
        where = ", ".join(f"{h.used_gib:.1f} GiB of GPU {h.index}" for h in used)
        yield Row("memory in use", "warn", f"other processes hold {where}")
    bad = [h for h in health if h.memory_errors or h.reset_pending]
    if bad:
        text = ", ".join(
            f"GPU {h.index}: {h.memory_errors or 0} uncorrected errors"
            + (", rows to be replaced at a reset" if h.reset_pending else "")
            for h in bad
        )
        yield Row("memory errors", "FAIL", text)
    elif any(h.memory_errors is not None for h in health):
        yield Row("memory errors", "ok", "none since the driver was loaded")


def _formats(health: list[gpu_health.Health], plan: Any) -> Iterator[Row]:
    capabilities = sorted({h.capability for h in health if h.capability})
    if plan is None or not capabilities:
        return
    recipe, name = plan.config.precision.recipe, plan.config.precision.name
    planned = GPUS[plan.config.hardware.gpu or "cpu"]
    here = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    if capabilities != [planned.compute_capability]:
        yield Row("formats", "FAIL", f"compute capability {here}, planned for {planned.title}")
    else:
        yield Row("formats", "ok", f"{name} ({recipe}) on compute capability {here}")


def _links(health: list[gpu_health.Health], gpu: str | None) -> Iterator[Row]:
    if len(health) < 2:
        if health:
            yield Row("NVLink", "-", "one GPU: nothing to link")
        return
    down = [h for h in health if h.links[1] or h.fabric is False]
    most = max(h.links[0] for h in health)
    fewer = [h for h in health if h.links[0] < most and h not in down]
    if down or fewer:
        text = ", ".join(
            f"GPU {h.index}: {h.links[0]} of {h.links[0] + h.links[1]} links up"
            + ("" if h.fabric is not False else ", not registered with the NVSwitch fabric")
            for h in [*down, *fewer]
        )
        yield Row("NVLink", "FAIL", text)
    elif most:
        yield Row("NVLink", "ok", f"{most} links up on each GPU")
    else:
        linked = gpu is not None and GPUS[gpu].nvlink_gb_s
        yield Row("NVLink", "FAIL" if linked else "warn", "no link is up")


# --- EFA --------------------------------------------------------------------------------------


def efa(instance_type: str | None, nodes: int, root: Path = Path("/")) -> Iterator[Row]:
    """As many EFA devices as the instance has, libfabric's provider, and NCCL's plug-in."""
    instance = INSTANCES.get(instance_type or "")
    devices = network.efa_devices(root)
    if instance is None and not devices:
        yield Row("EFA", "-", "no EFA here, and no --instance that has it")
        return
    if instance is not None and len(devices) < instance.efa_devices:
        yield Row("EFA", "FAIL", f"{len(devices)} devices; {instance_type} has "
                                 f"{instance.efa_devices}")  # fmt: skip
    else:
        yield Row("EFA", "ok", f"{len(devices)} devices")
    needed: Literal["FAIL", "warn"] = "FAIL" if nodes > 1 else "warn"
    plugin = network.settings(instance_type, None, nodes=nodes, root=root)
    if plugin.problems:
        yield Row("NCCL plug-in", needed, plugin.problems[0])
    elif "NCCL_NET_PLUGIN" in plugin.environment:
        yield Row("NCCL plug-in", "ok", plugin.environment["NCCL_NET_PLUGIN"])
    yield _provider(root, needed)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit not in (-1, resource.RLIM_INFINITY):
        text = f"{limit / GIB:.3g} GiB; EFA registers all that it sends: ulimit -l unlimited"
        yield Row("locked memory", needed, text)


def _provider(root: Path, needed: Literal["FAIL", "warn"]) -> Row:
    tool = shutil.which("fi_info") or str(root / "opt/amazon/efa/bin/fi_info")
    try:
        asked = subprocess.run(
            [tool, "-p", "efa", "-t", "FI_EP_RDM"], capture_output=True, text=True, timeout=20
        )
    except OSError:
        return Row("libfabric", needed, "no fi_info: the EFA software is not in this image")
    except subprocess.TimeoutExpired:
        return Row("libfabric", needed, "fi_info does not answer")
    domains = set(re.findall(r"domain: (\S+)", asked.stdout))
    if asked.returncode or "provider: efa" not in asked.stdout:
        said = (asked.stderr.strip() or asked.stdout.strip() or "nothing").splitlines()[-1]
        return Row("libfabric", needed, f"it does not offer the provider efa: {said}")
    return Row("libfabric", "ok", f"provider efa, {len(domains)} domains")


# --- the host ---------------------------------------------------------------------------------


def host(run_dir: Path | None, plan: Any, instance_type: str | None) -> Iterator[Row]:
    """Memory, shared memory, clock, and the run folder's disk."""
    memory, saves = this_host.memory_gib(), _gathered_gib(plan) if plan else 0.0
    instance = INSTANCES.get(instance_type or "")
    if memory < saves:
        text = f"{memory:.0f} GiB; to save and to resume takes {saves:,.0f} on a node"
        yield Row("host memory", "FAIL", text)
    elif instance is not None and memory < 0.9 * instance.host_gib:
        text = f"{memory:.0f} GiB; {instance_type} has {instance.host_gib}"
        yield Row("host memory", "warn", text)
    else:
        yield Row("host memory", "ok", f"{memory:.0f} GiB, {this_host.cores()} cores")
    ranks = plan.processes_per_node if plan else 1
    yield shared_memory(ranks)
    yield clock()
    if run_dir is None:
        yield Row("run folder", "-", "no --run-dir")
        return
    yield from folder(run_dir, plan)


def _gathered_gib(plan: Any) -> float:
    """Of a node's host memory, while it saves."""
    from planning.rules import Facts
    from planning.saving import host_bytes

    return (host_bytes(Facts.of(plan.config)) or 0.0) / GIB


def shared_memory(ranks: int, where: Path = Path("/dev/shm")) -> Row:
    try:
        free = shutil.disk_usage(where).free / GIB
    except OSError as error:
        return Row("shared memory", "FAIL", f"{where}: {error.strerror}")
    needed = SHARED_MEMORY_GIB_A_RANK * ranks
    if free < needed:
        return Row("shared memory", "FAIL", f"{where} has {free:.2g} GiB free, {ranks} ranks need "
                                            f"{needed:.0f}: docker run --shm-size")  # fmt: skip
    return Row("shared memory", "ok", f"{free:.1f} GiB free")


def clock() -> Row:
    """Not before this code was written; S3 refuses requests of a clock that is 15 minutes off."""
    written = max(path.stat().st_mtime for path in Path(__file__).parent.glob("*.py"))
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() < written - 60:
        return Row("clock", "FAIL", f"{now}: before this image was built")
    # timex of sys/timex.h, all zero: only ask; 5 is TIME_ERROR, not synchronised.
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    if state == 5:
        return Row("clock", "warn", f"{now}, not synchronised")
    return Row("clock", "ok", now + (", synchronised" if state >= 0 else ""))


def folder(run_dir: Path, plan: Any) -> Iterator[Row]:
    """It can be written, is not slow, and holds the checkpoints that the plan keeps."""
    probe = run_dir / f".preflight-{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with open(probe, "wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        speed = PROBE_BYTES / 1e6 / (time.perf_counter() - began)
        probe.rename(probe.with_suffix(".renamed")).unlink()
        free = shutil.disk_usage(run_dir).free
    except OSError as error:
        yield Row("run folder", "FAIL", f"{run_dir}: {error.strerror}")
        return
    finally:
        with suppress(OSError):
            probe.unlink()
    slow = speed < SLOW_DISK_MB_S
    yield Row("run folder", "warn" if slow else "ok", f"{run_dir}, written at {speed:,.0f} MB/s")
    if plan is None or "--save" not in plan.megatron_args:
        yield Row("disk", "ok", f"{free / GIB:,.1f} GiB free")
        return
    from planning.saving import checkpoint_bytes

    # While one is saved, the `keep` older ones are still there.
    one = checkpoint_bytes(plan.derived.allocated_parameters or 0, plan.config.precision)
    needed = one * (plan.config.checkpoint.keep + 1)
    text = f"{free / GIB:,.1f} GiB free, {plan.config.checkpoint.keep} + 1 checkpoints need "
    yield Row("disk", "FAIL" if free < needed else "ok", f"{text}{needed / GIB:,.1f}")


# --- all-reduce -------------------------------------------------------------------------------


def all_reduce(
    count: int | None,
    gpu: str | None,
    instance_type: str | None,
    least: float | None,
    *,
    nodes: int,
    rank: int,
    first: str,
    port: int,
) -> Iterator[Row]:
    """Measured within the node, and over all nodes at once; `least` GB/s holds for the widest."""
    ranks = count or len(cards.look().visible)
    if gpu == "cpu" or ranks == 0:
        yield Row("all-reduce", "-", "no GPU here: NCCL is not measured")
        return
    instance = INSTANCES.get(instance_type or "")
    kind = GPUS[gpu or (instance.gpu if instance else "cpu")]
    if ranks > 1:
        link = (kind.nvlink_gb_s or 0) / 2  # one way
        floor = least if nodes == 1 and least is not None else FLOOR * link
        yield _judge("all-reduce, node", _probe(ranks, torchrun.alone()), floor, network=False)
    elif nodes == 1:
        yield Row("all-reduce", "-", "one GPU: nothing to reduce")
    if nodes > 1:
        link = (instance.network_gbps if instance else 0) / 8
        floor = least if least is not None else FLOOR * link
        rendezvous = torchrun.among(first, port, rank, "preflight")
        found = _probe(ranks, rendezvous, nodes)
        if rank == 0 or "error" in found:  # the first node has the figure
            # Where NVLink joins nodes, NCCL need not use the network between them.
            by_network = instance is not None and kind.nvlink_domain is None
            yield _judge("all-reduce, all nodes", found, floor, network=by_network)


def _probe(ranks: int, rendezvous: list[str], nodes: int = 1) -> dict[str, Any]:
    """What container/allreduce.py wrote, with NCCL's own words about its network; or an error."""
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        report = Path(scratch) / "report.json"
        command = torchrun.command(
            processes=ranks, worker="container.allreduce", run_dir=report,
            rendezvous=rendezvous, nodes=nodes,
        )  # fmt: skip
        told = {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "NCCL_DEBUG_FILE": f"{scratch}/nccl.%p",
        }
        try:
            done = subprocess.run(
                command, env=torchrun.environment(told), capture_output=True, text=True,
                timeout=PROBE_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {PROBE_S} s"}
        logs = sorted(Path(scratch).glob("nccl.*"))
        said = "\n".join(log.read_text(errors="replace") for log in logs)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "Error" in line]
            return {"error": (lines or done.stderr.splitlines() or ["no reason given"])[-1].strip()}
        found = json.loads(report.read_text()) if report.exists() else {}
        providers = set(re.findall(r"Selected provider is ([\w-]+)", said, re.IGNORECASE))
        networks = set(re.findall(r"Using network (.+)", said))
        return found | {"providers": sorted(providers), "networks": sorted(networks)}


def _judge(check: str, found: dict[str, Any], floor: float, *, network: bool) -> Row:
    """network: the figure must have come over EFA."""
    if "error" in found:
        return Row(check, "FAIL", found["error"])
    if found["wrong"]:
        ranks = ", ".join(map(str, found["wrong"]))
        return Row(check, "FAIL", f"wrong sums on rank {ranks}")
    used = ", ".join(found["providers"] or found["networks"])
    text = f"{found['gb_s']:,.0f} GB/s over {found['ranks']} ranks" + (f", {used}" if used else "")
    if network and not any(name.startswith("efa") for name in found["providers"]):
        return Row(check, "FAIL", f"{text}: not over EFA")
    if found["gb_s"] < floor:
        return Row(check, "FAIL", f"{text}; at least {floor:,.0f} expected")
    return Row(check, "ok", text + (f" (at least {floor:,.0f})" if floor else ""))
