"""Whether this process's GPU and packages can run the plan as it stands: card, format, attention.

Names of Transformer Engine are those of 2.20.2. Importing this module imports neither torch nor
Transformer Engine.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planning.findings import Finding, MachineError
from planning.hardware import GIB, GPUS, gpu_of_nvml_name
from planning.plan import Plan
from training.host import torch_cudnn

# Of the planned memory, what a card must have: the table's figures are of one card of the kind.
ENOUGH_MEMORY = 0.95
# Memory in GiB that others may hold on a GPU before it is worth a warning.
OTHERS_MEMORY_GIB = 2.0
# Megatron's LanguageModule insists on these for --attention-backend fused and auto.
ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def check_gpu(plan: Plan) -> list[str]:
    """Warnings; raises MachineError where this process's GPU or packages cannot run the plan.

    LOCAL_RANK's GPU becomes the current device.
    """
    import torch

    warnings = _check_card(plan, torch)
    _check_attention_variables(plan)
    engine = import_engine()
    check_cudnn(torch)
    _check_format(plan, torch, engine)
    return warnings


def _cannot(setting: str, message: str, fix: str, id: str = "machine") -> MachineError:
    return MachineError(Finding(id, "error", setting, message, fix, machine=True))


# --- the card ---------------------------------------------------------------------------------


def planned_memory_gib(plan: Plan) -> float | None:
    """The memory of one GPU that the plan counts on."""
    hardware = plan.config.hardware
    return hardware.memory_gib or GPUS[hardware.gpu or "cpu"].memory_gib


def _check_card(plan: Plan, torch: Any) -> list[str]:
    hardware = plan.config.hardware
    try:
        torch.cuda.init()
    except Exception as error:
        raise _cannot(
            "hardware",
            f"torch {torch.__version__} cannot use a GPU here: {error}",
            "tools/doctor.py looks into the driver",
        ) from error
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise _cannot(
            "hardware.gpus_per_node",
            f"the plan starts {plan.processes_per_node} processes on a node, one a GPU, and torch "
            f"sees {count} here (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})",
            f"set hardware.gpus_per_node={count}, or show it the others",
        )
    torch.cuda.set_device(local)
    name = torch.cuda.get_device_name(local)
    kind = gpu_of_nvml_name(name)
    # With hardware=this a person may have said which known card another one is like.
    if kind != hardware.gpu and not (kind is None and hardware.name == "this"):
        raise _cannot(
            "hardware", f"the plan is for {hardware.gpu}, and GPU {local} is {name}",
            "plan for the cards that are here: hardware=this",
        )  # fmt: skip
    free, total = (size / GIB for size in torch.cuda.mem_get_info(local))
    planned = planned_memory_gib(plan)
    if planned is not None and total < ENOUGH_MEMORY * planned:
        raise _cannot(
            "hardware.memory_gib",
            f"the plan counts on {planned:.1f} GiB a GPU, and GPU {local} ({name}) has "
            f"{total:.1f} GiB",
            f"set hardware.memory_gib={total:.1f}",
        )
    if (used := total - free) > OTHERS_MEMORY_GIB:
        return [
            f"other processes hold {used:.1f} of {total:.1f} GiB on GPU {local} (nvidia-smi lists "
            "them): the run may run out of memory"
        ]
    return []


# --- Transformer Engine and its formats -------------------------------------------------------


def import_engine() -> Any:
    """The package transformer_engine, whole. Raises MachineError for whatever stops its import."""
    try:
        import torch  # noqa: F401  (first: its libraries must be found before others)
        import transformer_engine
        import transformer_engine.pytorch
    except Exception as error:  # OSError: a library is missing; AssertionError: versions differ
        missing = isinstance(error, ModuleNotFoundError)
        raise _cannot(
            "hardware",
            f"Transformer Engine does not import: {type(error).__name__}: {error}",
            "install the extra: pip install 'slipway[te]', or use the container"
            if missing
            else "tools/doctor.py compares its packages and the cuDNNs of this machine",
        ) from error
    return transformer_engine


def format_checks() -> dict[str, Any]:
    """Transformer Engine's own checks by recipe; each returns (available, reason why not)."""
    from transformer_engine.pytorch import quantization

    return {
        "delayed": quantization.check_fp8_support,
        "current": quantization.check_fp8_support,
        "blockwise": quantization.check_fp8_block_scaling_support,
        "mxfp8": quantization.check_mxfp8_support,
        "nvfp4": lambda: _nvfp4_support(quantization),
    }


def _nvfp4_support(quantization: Any) -> tuple[bool, str]:
    # Its check has no upper bound, and its training kernels fail on sm_120.
    capability = quantization.get_device_compute_capability()
    if capability >= (12, 0):
        return False, f"its NVFP4 training kernels fail on compute capability {capability[0]}.x"
    return quantization.check_nvfp4_support()


def _check_format(plan: Plan, torch: Any, engine: Any) -> None:
    precision = plan.config.precision
    check = format_checks().get(precision.recipe)
    if check is None or precision.emulate:
        return
    able, reason = check()
    if not able:
        raise _cannot(
            "precision",
            f"Transformer Engine {engine.__version__} refuses {precision.name} on this "
            f"{torch.cuda.get_device_name()}: {reason}",
            "take precision=bf16 here, or the hardware that computes it",
        )


def active_precisions(models: Iterable[Any]) -> Counter[str]:
    """Of this rank's linear layers, how many computed in what at their last call: the class of
    Transformer Engine's recipe, or the data type of the weights where no recipe was active."""
    found: Counter[str] = Counter()
    for module in (module for model in models for module in model.modules()):
        weight = next(module.parameters(recurse=False), None)
        if not hasattr(module, "fp8_meta") or weight is None:
            continue  # not a linear layer of Transformer Engine
        recipe = module.fp8_meta.get("recipe") if module.fp8 else None
        if recipe is None:
            found[str(weight.dtype).removeprefix("torch.")] += 1
        else:  # Megatron derives some classes of its own
            classes = [c for c in type(recipe).__mro__ if c.__module__.startswith("transformer_")]
            found[(classes or [type(recipe)])[0].__name__] += 1
    return found


def describe_precision(plan: Plan, models: Iterable[Any]) -> tuple[bool, str]:
    """(as planned?, what rank 0 computed its first step in)."""
    planned = plan.config.precision
    if plan.backend != "te":
        return True, f"{planned.dtype}, computed by torch on a CPU"
    found = active_precisions(models)
    parts = [f"{name} in {count}" for name, count in found.most_common()]
    text = f"{', '.join(parts) or 'none'} of {found.total()} linear layers of rank 0"
    quantised = any(name not in ("bfloat16", "float16", "float32") for name in found)
    if quantised == (planned.recipe != "none"):
        return True, text
    return False, f"{text}, and the plan is {planned.name}"


# --- cuDNN ------------------------------------------------------------------------------------


def loaded_cudnns(maps: Path = Path("/proc/self/maps")) -> list[Path]:
    """The folders whose cuDNN libraries this process has loaded.

    What the libraries say of themselves is not enough: cudnnGetVersion of a second cuDNN answers
    with the version of the first one's parts.
    """
    lines = [line for line in maps.read_text().splitlines() if "/libcudnn" in line]
    return sorted({Path(line.split(maxsplit=5)[5]).resolve().parent for line in lines})


def cudnn_version(folder: Path) -> str:
    """The version of the cuDNN in `folder`, asked in a process of its own; "unknown" if it fails
    there."""
    ask = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cudnnGetVersion())"
    for library in sorted(folder.glob("libcudnn.so*")):
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ask, str(library)],
            env=os.environ | {"LD_LIBRARY_PATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if answer.returncode == 0:
            return decode_cudnn_version(int(answer.stdout))
    return "unknown"


def decode_cudnn_version(number: int) -> str:
    """91900 -> "9.19.0"; before cuDNN 9, 8907 -> "8.9.7"."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def check_cudnn(torch: Any) -> None:
    """Raise MachineError where torch and Transformer Engine have loaded two versions of cuDNN."""
    import transformer_engine_torch as engine

    try:
        torchs = decode_cudnn_version(torch.backends.cudnn.version())
    except RuntimeError as error:  # found another than it was built with
        raise _two_cudnns(str(error).split(". ")[0]) from error
    engines = decode_cudnn_version(engine.get_cudnn_version())
    if engines != torchs:
        raise _two_cudnns(f"torch has cuDNN {torchs} and Transformer Engine {engines}")
    if len(folders := loaded_cudnns()) > 1:
        loaded = {folder: cudnn_version(folder) for folder in folders}
        if len(set(loaded.values())) > 1:
            found = " and ".join(f"{version} from {path}" for path, version in loaded.items())
            raise _two_cudnns(f"this process has loaded cuDNN {found}")


def _two_cudnns(message: str) -> MachineError:
    home = torch_cudnn()
    now = ", ".join(
        f"{name}={os.environ.get(name, '')}" for name in ("CUDNN_HOME", "LD_LIBRARY_PATH")
    )
    return _cannot(
        "hardware",
        f"{message}. Mixed versions disable fused attention without an error ({now})",
        "start it with launch/train.py, or with "
        + (f"CUDNN_HOME={home} LD_LIBRARY_PATH={home}/lib" if home else "CUDNN_HOME of torch's"),
        id="two-cudnns",
    )


# --- attention --------------------------------------------------------------------------------


def _check_attention_variables(plan: Plan) -> None:
    """Variables that choose an attention back end would contradict the plan's."""
    wanted = ("1", "1", "1") if plan.config.hardware.allow_unfused_attention else ("0", "1", "0")
    for name, value in zip(ATTENTION_VARIABLES, wanted, strict=True):
        if os.environ.get(name, value) != value:
            raise _cannot(
                "hardware.allow_unfused_attention",
                f"the environment has {name}={os.environ[name]}, and the plan needs {value}",
                f"unset {name}",
            )


def _dot_product_attention() -> Any:
    from transformer_engine.pytorch.attention.dot_product_attention import (
        dot_product_attention as module,
    )

    return module


def attention_backend() -> str | None:
    """The attention that Transformer Engine chose at its last call, or None before the first."""
    chosen: dict[str, Any] = _dot_product_attention()._attention_backends
    for name in ("flash", "fused", "unfused"):
        if chosen.get(f"use_{name}_attention"):
            return name
    return None


def describe_attention(backend: str) -> str:
    """As 'fused (cuDNN 9.19.0)'."""
    import transformer_engine_torch as engine

    if backend == "fused":
        return f"fused (cuDNN {decode_cudnn_version(engine.get_cudnn_version())})"
    if backend == "flash":
        version = _dot_product_attention()._attention_backends["flash_attention_backend"]
        return f"flash (flash-attn {version})"
    return backend


def explain_last_attention() -> tuple[dict[str, bool], list[str]]:
    """`explain` of the last call; raises ValueError where there was none."""
    module = _dot_product_attention()
    parameters = module._attention_backends["attention_params"]
    if parameters is None:
        raise ValueError("Transformer Engine has computed no attention yet")
    return explain(module.dpa_utils, parameters)


def explain(utils: Any, parameters: Any) -> tuple[dict[str, bool], list[str]]:
    """Which back ends of TE's AttentionParams are available, and its reasons against the others.

    utils: transformer_engine.pytorch.attention.dot_product_attention.utils, which says its reasons
    to a logger only.
    """
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("DotProductAttention"), Keep()
    level, propagate = utils.AttentionLogging._log_level, logger.propagate
    utils.AttentionLogging._log_level, logger.propagate = logging.DEBUG, False
    others, logger.handlers = logger.handlers, [handler]
    try:
        available = utils.get_attention_backend(parameters)[5]
    finally:
        utils.AttentionLogging._log_level, logger.propagate = level, propagate
        logger.handlers = others
        logger.setLevel(level)
    names = dict(zip(("flash", "fused", "unfused"), map(bool, available), strict=True))
    return names, _reasons(said)


def _reasons(said: Iterable[str]) -> list[str]:
    return [line for line in dict.fromkeys(said) if line.startswith("Disabling")]


def check_attention(plan: Plan) -> str | None:
    """The attention back end of the step just done, None where the model or a CPU has no choice.

    Raises MachineError if it is unfused and the plan does not allow that.
    """
    if plan.backend != "te":
        return None
    chosen = attention_backend()
    if chosen == "unfused" and not plan.config.hardware.allow_unfused_attention:
        raise _no_fused_attention(plan, "it computed the first step without")
    return chosen


def _no_fused_attention(plan: Plan, message: str) -> MachineError:
    try:
        reasons = explain_last_attention()[1]
    except Exception:  # the reasons are an extra
        reasons = []
    why = "; ".join([message, *reasons])
    setting = "hardware.allow_unfused_attention"
    if plan.config.hardware.allow_unfused_attention:
        message = f"Transformer Engine has no attention at all for this model here ({why})"
        fix = "run tools/doctor.py"
    else:
        message = (
            "Transformer Engine has no fused attention for this model here, and unfused it would "
            f"be several times slower and larger ({why})"
        )
        fix = f"run tools/doctor.py (two cuDNN versions are the usual cause), or set {setting}=true"
    return _cannot(setting, message, fix, id="attention")


@contextmanager
def translate_attention_error(plan: Plan) -> Iterator[None]:
    """Say in our words that Transformer Engine found no fused attention (exit 3).

    The plan asks for fused attention only; TE raises a ValueError in the first step where it has
    none (dot_product_attention.py, "No dot product attention backend is available").
    """
    try:
        yield
    except ValueError as error:
        if "No dot product attention backend" in str(error) and plan.backend == "te":
            raise _no_fused_attention(plan, str(error)) from error
        raise
