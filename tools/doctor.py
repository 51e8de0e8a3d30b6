"""What this machine can run, what is wrong with it, and what to do about it.

    python tools/doctor.py [--json] [--no-step] [setting=value ...]

Reads the machine, its GPUs, libraries and network, then trains a few steps through launch/train.py:
on GPUs gpt_160m on all that are visible (CUDA_VISIBLE_DEVICES restricts them), in the lowest
precision that they compute; on a CPU gpt_tiny. `setting=value` goes to that run (precision=bf16,
hardware.gpu=h100, training.train_steps=20).

Exit status: 0 if the steps were trained, on GPUs with fused or flash attention, and nothing is an
error; else 1. So it is 1 with --no-step: only a run shows that a machine trains.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from tools import doctor_readers as readers
from tools.doctor_readers import Problem, dotted

# Shown with their versions; of all others in the lock only the differences are said.
PACKAGES = ("torch", "megatron-core", "hydra-core", "nemo-run", "sagemaker", "transformer-engine",
            "transformer-engine-torch", "flash-linear-attention", "flash-attn")  # fmt: skip
# Our choices and Transformer Engine's recipes, the lowest precision first.
PRECISIONS = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8": "current", "bf16": "bf16"}
OTHER_PRECISIONS = {"fp8_delayed": "delayed", "fp8_blockwise": "blockwise"}
SHM_GIB = 1.0  # NCCL and data loaders pass data through /dev/shm; Docker gives 64 MiB
DISK_GIB = 20.0  # about one checkpoint of 1 B parameters: 14 bytes a parameter
PROBE_S, PLAN_S = 240, 120  # a first import from a network disk takes minutes


@dataclass
class Report:
    """What was found, printed as it comes unless `quiet`."""

    quiet: bool = False
    rows: list[tuple[str, str, str]] = field(default_factory=list)  # section, name, text
    problems: list[Problem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # for programs
    trained: bool = False

    def row(self, section: str, name: str, text: object) -> None:
        if not self.quiet:
            if not self.rows or self.rows[-1][0] != section:
                print(f"\n{section}" if self.rows else section)
            print(f"  {name:<24} {text}", flush=True)
        self.rows.append((section, name, str(text)))

    def error(self, message: str, fix: str = "") -> None:
        self.problems.append(Problem("error", message, fix))

    def warning(self, message: str, fix: str = "") -> None:
        self.problems.append(Problem("warning", message, fix))

    @property
    def exit_status(self) -> int:
        return int(not self.trained or any(p.severity == "error" for p in self.problems))

    def close(self) -> int:
        self.problems.sort(key=lambda problem: problem.severity != "error")
        if self.quiet:
            print(json.dumps(self.to_json(), indent=2))
            return self.exit_status
        if self.problems:
            print("\nproblems")
        for number, problem in enumerate(self.problems, 1):
            print(f"  {number}. {problem.severity}: {problem.message}")
            if problem.fix:
                print(f"     {problem.fix}")
        ended = "this machine trains" if not self.exit_status else "not shown to train as it should"
        print(f"\n{ended}; problems: {len(self.problems) or 'none'}")
        return self.exit_status

    def to_json(self) -> dict[str, Any]:
        table: dict[str, dict[str, str]] = {}
        for section, name, text in self.rows:
            table.setdefault(section, {})[name] = text
        return {
            "exit_status": self.exit_status,
            "trained": self.trained,
            "table": table,
            "facts": self.facts,
            "problems": [asdict(problem) for problem in self.problems],
        }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--no-step", action="store_true", help="train nothing; exit status 1")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for the training")
    parser.add_argument("choices", nargs="*", metavar="setting=value", help="of the training")
    chosen = parser.parse_args(words)
    report = Report(quiet=chosen.json)
    with tempfile.TemporaryDirectory(prefix="slipway-doctor-") as scratch:
        doctor = Doctor(report, chosen.choices, Path(scratch))
        doctor.examine(None if chosen.no_step else chosen.timeout)
    return report.close()


class Doctor:
    """The checks, in an order in which each finds what it needs."""

    def __init__(self, report: Report, choices: list[str], scratch: Path) -> None:
        self.report, self.choices, self.scratch = report, choices, scratch
        self.gpu_names: list[str] = []  # visible, by NVML
        self.driver_cuda: tuple[int, int] | None = None
        self.blocking: list[Problem] = []  # why CUDA may not start
        self.on_gpus = False
        self.environment: dict[str, str] = {}  # what the launcher adds for a worker
        self.facts: dict[str, Any] = {}  # what torch and Transformer Engine say
        self.errors: dict[str, str] = {}  # and where they failed

    def examine(self, timeout: float | None) -> None:
        """All checks; training for at most `timeout` seconds, or not at all."""
        for check in (self.host, self.disk, self.packages, self.gpus, self.network, self.plan,
                      self.cudnns, self.libraries):  # fmt: skip
            self._guard(check.__name__, check)
        if timeout is not None:
            self._guard("training", lambda: self.training(timeout))
        else:
            self.report.row("training", "steps", "not run")
            unknown = "no step was trained, so it is not known whether this machine trains"
            self.report.error(unknown, "leave --no-step away")
        self._guard("summary", self.summary)

    def _guard(self, name: str, check: Callable[[], None]) -> None:
        """A check that breaks is a line; the others go on."""
        try:
            check()
        except Exception as error:
            words = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
            self.report.row(name, "failed", words)
            fix = "make setup" if isinstance(error, ImportError) else ""
            self.report.error(f"the check of {name} failed: {words}", fix)

    # --- read without torch -------------------------------------------------------------------

    def host(self) -> None:
        from training import host

        model, bf16 = readers.cpu()
        self.report.row("machine", "system", readers.system())
        self.report.row("machine", "CPU", f"{model}, {host.cores()} cores")
        self.report.row("machine", "BF16 on the CPU", bf16)
        self.report.row("machine", "memory", f"{host.memory_gib():.1f} GiB")
        self.report.row("machine", "container engine", readers.container_engines())

    def disk(self) -> None:
        shm = shutil.disk_usage("/dev/shm").total / readers.GIB
        self.report.row("machine", "/dev/shm", f"{shm:.1f} GiB")
        if shm < SHM_GIB:
            small = f"/dev/shm has {1024 * shm:.0f} MiB: processes of a node may end by bus errors"
            self.report.warning(small, "start the container with --shm-size=8g or --ipc=host")
        for name, setting in (("runs", "run_dir"), (".cache", "data.cache")):
            path = place = Path(name).absolute()
            while not place.exists():
                place = place.parent
            free = shutil.disk_usage(place).free / readers.GIB
            self.report.row("machine", f"disk of {name}/", f"{free:.1f} GiB free, {path}")
            if not os.access(place, os.W_OK):
                fix = f"set {setting}=... to another folder, or start from one"
                self.report.error(f"{path} cannot be written", fix)
            elif free < DISK_GIB and name == "runs":
                few = f"{free:.1f} GiB of disk are free for {path}; a checkpoint takes 14 bytes a "
                fix = "set run_dir=... on a larger disk, or checkpoint.save=false"
                self.report.warning(few + "parameter", fix)

    def packages(self) -> None:
        row = self.report.row
        row("packages", "Python", f"{platform.python_version()}, {sys.executable}")
        if sys.version_info[:2] != (3, 12):
            old = f"this is Python {platform.python_version()}, and the project is for 3.12"
            self.report.error(old, "make setup, then .venv/bin/python tools/doctor.py")
        wanted, here = readers.wanted_versions(), readers.installed_versions()
        for name in PACKAGES:
            there, want = here.get(name), wanted.get(name)
            wrong = there and want and not readers.satisfies(there, want)
            row("packages", name, f"{there}, wanted {want}" if wrong else there or "not installed")
        differ = [
            f"{name} {here.get(name, '(missing)')} instead of {want[2:]}"
            for name, want in wanted.items()
            if want.startswith("==") and not readers.satisfies(here.get(name), want)
        ]
        if differ:
            more = f" and {len(differ) - 4} more" if len(differ) > 4 else ""
            others = f"packages are not those of requirements.lock: {', '.join(differ[:4])}{more}"
            self.report.warning(others, "make setup installs them in .venv")
        self.report.problems += readers.engine_problems(wanted, here)

    def gpus(self) -> None:
        from training import gpus

        cards = gpus.look()
        self.gpu_names = [card.name for card in cards.visible]
        self.report.problems += [Problem(p.severity, p.message, p.fix) for p in cards.problems]
        if not cards.visible:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            why = "" if shown is None else f", with CUDA_VISIBLE_DEVICES={shown}"
            self.report.row("GPUs", "visible", f"none{why}")
            return
        import pynvml as nvml

        nvml.nvmlInit()
        try:
            version = nvml.nvmlSystemGetCudaDriverVersion()  # 13000
            self.driver_cuda = version // 1000, version % 1000 // 10
            newest = dotted(self.driver_cuda)
            self.report.row("GPUs", "driver", f"{cards.driver}, for CUDA up to {newest}")
            read = []
            for number, card in enumerate(cards.visible):
                read.append(readers.CardReader(nvml, card.uuid, f"GPU {number}"))
                text = f"{card.name}: {read[-1].read()}"
                self.report.row("GPUs", f"GPU {number}", text)
                self.report.problems += read[-1].problems
                self.blocking += read[-1].blocking
            if len(read) > 1:
                linked = all(read[0].linked(other) for other in read[1:])
                self.report.row("GPUs", "between them", "NVLink" if linked else "not all by NVLink")
        finally:
            nvml.nvmlShutdown()

    def network(self) -> None:
        efa, others = readers.fabric_devices()
        plugins = readers.ofi_plugins(os.environ)
        if self.gpu_names or efa or others:
            self.report.row("network", "EFA", f"{len(efa)} devices" if efa else "none")
            self.report.row("network", "InfiniBand, RoCE", ", ".join(others) or "none")
            self.report.row("network", "aws-ofi-nccl", ", ".join(map(str, plugins)) or "not found")
        if efa and not plugins:
            tcp = f"{len(efa)} EFA devices and no plug-in of NCCL: nodes would talk over TCP"
            fix = "install aws-ofi-nccl (the EFA installer has it), its lib/ in LD_LIBRARY_PATH"
            self.report.error(tcp, fix)

    # --- libraries ----------------------------------------------------------------------------

    def plan(self) -> None:
        """Make the plan of the training with launch/train.py, and take its environment."""
        from launch import machine
        from planning.plan import load

        here = machine.look()
        named = any(word.startswith("hardware.gpu=") for word in self.choices)
        unknown = here.gpu == "unknown" and not named
        if unknown:
            fix = "try it as the one that is nearest: tools/doctor.py hardware.gpu=h100"
            self.report.error(f"{here.gpu_names[0]} is not a card that plans know", fix)
        self.on_gpus = here.gpu != "cpu" and not unknown and "hardware=cpu" not in self.choices
        folder = self.scratch / "plan"
        done = self._train(folder, PLAN_S, "precision=bf16", "launch=plan")
        if done.returncode:
            self.report.row("plan", "launch=plan", f"failed: {last_words(done)}")
            self.report.error(f"no plan can be made: {last_words(done)}")
            return
        self.environment = machine.environment(load(folder / "plan.yaml"), here)

    def _train(
        self, run_dir: Path, timeout: float, precision: str, *more: str
    ) -> subprocess.CompletedProcess[str]:
        if self.on_gpus:
            sizes = ("model=gpt_160m", f"training.global_batch_size={len(self.gpu_names)}",
                     "training.train_steps=4")  # fmt: skip
        else:
            sizes = ("model=gpt_tiny", "hardware=cpu", "training.train_steps=2")
        rest = ("data=mock", f"data.cache={self.scratch / 'cache'}", f"run_dir={run_dir}",
                "training.eval_interval=0", "checkpoint.save=false",
                "logging.tensorboard=false")  # fmt: skip
        # A choice of the command line stands for ours of the same setting.
        named = {w.partition("=")[0]: w for w in (*sizes, *rest, precision, *self.choices, *more)}
        command = [sys.executable, str(ROOT / "launch" / "train.py"), *named.values()]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )

    def cudnns(self) -> None:
        from training import device, host

        home = host.torch_cudnn()
        mine = home / "lib" if home else None
        versions: dict[Path, str] = {}
        for folder, sources in readers.cudnn_places(os.environ, mine).items():
            versions[folder] = device.cudnn_version(folder)
            text = f"{folder} ({', '.join(sources)})"
            self.report.row("libraries", f"cuDNN {versions[folder]}", text)
        if mine is None or mine.resolve() not in versions:
            return
        torchs = versions[mine.resolve()]
        others = [f"{v} in {path}" for path, v in versions.items() if v != torchs]
        if others:
            self.report.warning(
                f"beside torch's cuDNN {torchs} there is {', '.join(others)}: Transformer Engine "
                "may load it, and two versions turn fused attention off without an error",
                "launch/train.py keeps to torch's. For scripts of your own: export "
                f"CUDNN_HOME={home} LD_LIBRARY_PATH={mine}:$LD_LIBRARY_PATH",
            )

    def libraries(self) -> None:
        """What torch and Transformer Engine say, asked in the launcher's environment."""
        row = self.report.row
        engine = importlib.util.find_spec("transformer_engine") is not None
        if not self.gpu_names and not engine:
            row("libraries", "torch is for", f"CUDA {readers.torch_cuda() or '(none)'}")
            row("libraries", "Transformer Engine", "not installed, and not needed without a GPU")
            return
        self._probe()
        torch = self.facts.get("torch_facts", {})
        if torch:
            built = f"{torch['version']}, CUDA {torch['cuda']}, cuDNN {torch['cudnn']}"
            row("libraries", "torch", f"{built}, NCCL {torch['nccl']}")
        if self.gpu_names:
            self._cuda(torch)
        if "engine" in self.facts:
            row("libraries", "Transformer Engine", f"{self.facts['engine']}, imports")
        elif not engine:
            row("libraries", "Transformer Engine", "not installed")
            self.report.error("GPUs train through Transformer Engine", "pip install 'slipway[te]'")
        else:
            self._failed(
                "engine", "Transformer Engine", "use the container, or a fresh environment"
            )
        if "cudnn" in self.errors and "engine" in self.facts:
            self._failed("cudnn", "cuDNN as loaded", "")
        if "linear_attention" in self.facts:
            row("libraries", "for hybrid models", f"fla {self.facts['linear_attention']}")
        self._failed("linear_attention", "for hybrid models", "pip install 'slipway[hybrid]'")
        if self.facts.get("cuda") and "engine" in self.facts:
            self._formats()
            self._attention()

    def _probe(self) -> None:
        """Fill `facts` and `errors`; a crash is the error of the check that was at work."""
        told, log = self.scratch / "facts.jsonl", self.scratch / "probe.log"
        environment = os.environ | self.environment
        paths = [str(ROOT), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        command = [sys.executable, str(ROOT / "tools" / "doctor_probe.py"), str(told)]
        with open(log, "wb") as output:
            try:
                status = subprocess.run(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=output, timeout=PROBE_S,
                ).returncode  # fmt: skip
                ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            except subprocess.TimeoutExpired:
                status, ended = 1, f"no answer within {PROBE_S} s"
        self.facts, self.errors, at_work = readers.probe_facts(told)
        self.report.facts["libraries"] = self.facts
        if status:
            last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            self.errors[at_work or "torch_facts"] = f"its process ended ({ended}): {last}"
        self._failed("torch_facts", "torch", "make setup")

    def _failed(self, check: str, label: str, fix: str) -> None:
        """The line and the problem of a check of the probe, if it failed."""
        if check in self.errors:
            message, _, advice = self.errors[check].partition("\n")
            self.report.row("libraries", label, f"failed: {message}")
            self.report.error(f"{label}: {message}", advice.strip() or fix)

    def _cuda(self, torch: dict[str, Any]) -> None:
        if "cuda" in self.errors:
            self._failed("cuda", "CUDA", "nvidia-smi must work, and the driver be new enough")
            self.report.problems += self.blocking
        version = torch.get("cuda")
        if torch and version is None:
            self.report.error("this torch is built without CUDA", "make setup")
        elif version and self.driver_cuda and int(version.split(".")[0]) > self.driver_cuda[0]:
            newest = dotted(self.driver_cuda)
            old = f"torch is for CUDA {version}, and the driver for {newest} at most"
            self.report.error(old, "update the driver: CUDA 13 needs 580 or later")
        built = [int(n) for n in re.findall(r"sm_(\d+)", " ".join(torch.get("architectures", [])))]
        for number, gpu in enumerate(self.facts.get("cuda", [])):
            major, minor = gpu["capability"]
            memory = f"{gpu['free_gib']:.1f} of {gpu['total_gib']:.1f} GiB free"
            text = f"{gpu['name']}, compute capability {major}.{minor}, {memory}"
            self.report.row("libraries", f"CUDA device {number}", text)
            # Code for a lower minor version runs too.
            if built and not any(n // 10 == major and n % 10 <= minor for n in built):
                self.report.error(f"this torch has no code for {gpu['name']}", "take another build")

    def _formats(self) -> None:
        self._failed("formats", "precisions", "")
        for name, recipe in (PRECISIONS | OTHER_PRECISIONS).items():
            if recipe in self.facts.get("formats", {}):
                able, reason = self.facts["formats"][recipe]
                self.report.row("precisions", name, "yes" if able else f"no: {reason}")

    def _attention(self) -> None:
        self._failed("attention", "attention", "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 tells more")
        if not (found := self.facts.get("attention")):
            return
        self.report.row("attention", "of a GPT in BF16", found["text"] or "none")
        able = [name for name, available in found["available"].items() if available]
        self.report.row("attention", "available", ", ".join(able) or "none")
        if found["chosen"] not in ("fused", "flash"):
            why = "; ".join(found["reasons"])
            fix = "compare the cuDNNs above"
            self.report.error(f"Transformer Engine takes no fused attention: {why}", fix)

    # --- training -----------------------------------------------------------------------------

    def training(self, timeout: float) -> None:
        if self.on_gpus and "cuda" in self.errors:
            self.report.row("training", "steps", "not run: CUDA does not start")
            return
        precision = self._best_precision()
        where = f"{len(self.gpu_names)} x {self.gpu_names[0]}" if self.on_gpus else "the CPU"
        if not self.report.quiet:
            print(f"\na few steps in {precision} on {where} ...", flush=True)
        run_dir = self.scratch / "step"
        try:
            done = self._train(run_dir, timeout, f"precision={precision}")
            failed = f"failed with status {done.returncode}: {last_words(done)}"
        except subprocess.TimeoutExpired:
            done, failed = None, f"not done within {timeout:.0f} s"
        result = read_json(run_dir / "result.json")
        if result.get("message"):
            failed = str(result["message"]).splitlines()[0]
        self.report.facts["training"] = {"precision": precision, "where": where, **result}
        if done is None or done.returncode or result.get("status") != "done":
            self.report.row("training", "steps", failed)
            self.report.error(f"training in {precision} on {where}: {failed}", self._kept(run_dir))
            return
        attention = result.get("attention_backend")
        parts = [f"{result['steps']} in {precision} on {where}",
                 f"{1000 * result['median_step_s']:.0f} ms each"]  # fmt: skip
        parts += [f"{attention} attention"] if attention else []
        self.report.row("training", "steps", ", ".join(parts))
        self.report.trained = not self.on_gpus or attention in ("fused", "flash")
        if not self.report.trained:
            slow = f"trained with {attention or 'unknown'} attention, several times slower"
            self.report.error(slow, "leave hardware.allow_unfused_attention away")

    def _best_precision(self) -> str:
        """The lowest that the cards compute, by Transformer Engine and by the plans' table."""
        from planning.hardware import GPUS, gpu_of_nvml_name

        for word in self.choices:
            if word.startswith("precision="):
                return word.partition("=")[2]
        if not self.on_gpus:
            return "bf16"
        card = GPUS.get(gpu_of_nvml_name(self.gpu_names[0]) or "")
        for name, recipe in PRECISIONS.items():
            able = self.facts.get("formats", {}).get(recipe, [False])[0]
            if able and (card is None or recipe == "bf16" or card.supports(recipe)):
                return name
        return "bf16"

    def _kept(self, run_dir: Path) -> str:
        """Where the logs of a run that failed are kept."""
        if not (run_dir / "logs").is_dir():
            return ""
        kept = Path(tempfile.mkdtemp(prefix="slipway-doctor-logs-"))
        shutil.copytree(run_dir / "logs", kept, dirs_exist_ok=True)
        return f"logs: {kept}"

    def summary(self) -> None:
        section, trained = "what works here", "yes" if self.report.trained else "not shown"
        row = self.report.row
        planned = "yes, for any model, precision, layout and hardware"
        row(section, "launch=plan", planned if self.environment else "no")
        if self.on_gpus:
            row(section, "training on GPUs", trained)
        else:
            why = "see the problems" if self.gpu_names or self.report.problems else "none is here"
            row(section, "training on the CPU", f"{trained}: small models, and trials")
            row(section, "training on GPUs", f"no: {why}")
        if (ROOT / "conf" / "launch" / "sagemaker.yaml").exists():
            there = importlib.util.find_spec("boto3") is not None
            need = "yes, with AWS credentials" if there else "no: pip install 'slipway[sagemaker]'"
            row(section, "launch=sagemaker", need)


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """What launch/train.py said of its failure: its first error, or its last line."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing was said"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines[-1:])[0].strip()


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


if __name__ == "__main__":
    sys.exit(main())
