"""What torch and Transformer Engine say of this machine, for tools/doctor.py.

    python tools/doctor_probe.py FACTS.jsonl

A process of its own, because a broken driver or library may end it: a line says which check begins
before it does, and another what came of it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from planning.hardware import GIB
from training import device

# Attention of Llama-3-8B, a shorter sequence.
HEADS, GROUPS, HEAD_SIZE, SEQUENCE = 32, 8, 128, 2048


def torch_facts() -> dict[str, Any]:
    import torch

    try:
        cudnn = device.decode_cudnn_version(torch.backends.cudnn.version() or 0)
    except RuntimeError as error:
        cudnn = str(error)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "architectures": torch.cuda.get_arch_list(),
    }


def cuda() -> list[dict[str, Any]]:
    import torch

    torch.cuda.init()  # says why not
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": torch.cuda.get_device_name(index),
                "capability": torch.cuda.get_device_capability(index),
                "total_gib": total / GIB,
                "free_gib": free / GIB,
            }
        )
    return found


def engine() -> str:
    return str(device.import_engine().__version__)


def cudnn() -> list[str]:
    """The folders of the cuDNN libraries that are loaded now; raises where they do not agree."""
    import torch

    device.import_engine()
    device.check_cudnn(torch)
    return [str(folder) for folder in device.loaded_cudnns()]


def formats() -> dict[str, tuple[bool, str]]:
    import torch

    device.import_engine()
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    found = {name: check() for name, check in device.format_checks().items()}
    return {"bf16": (bf16, "" if bf16 else "compute capability 8.0 or higher required"), **found}


def attention() -> dict[str, Any]:
    """What Transformer Engine takes for a GPT's attention, forward and backward."""
    import torch

    engine = device.import_engine()
    module = engine.pytorch.DotProductAttention(
        HEADS, HEAD_SIZE, num_gqa_groups=GROUPS, attention_dropout=0.0, attn_mask_type="causal"
    )  # its layout is Megatron's: sequence, batch, head, size
    query, key, value = (
        torch.randn(
            SEQUENCE, 1, heads, HEAD_SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True
        )
        for heads in (HEADS, GROUPS, GROUPS)
    )
    module(query, key, value).sum().backward()
    torch.cuda.synchronize()
    chosen = device.attention_backend()
    available, reasons = device.explain_last_attention()
    return {
        "chosen": chosen,
        "text": device.describe_attention(chosen) if chosen else None,
        "available": available,
        "reasons": reasons,
    }


def linear_attention() -> str:
    """Of hybrid models, patterns with G."""
    import fla

    return str(getattr(fla, "__version__", "of unknown version"))


def main(facts: Path) -> int:
    checks: list[Callable[[], Any]] = [torch_facts, cuda]
    if importlib.util.find_spec("transformer_engine") is not None:
        checks += [engine, cudnn, formats, attention]
    if importlib.util.find_spec("fla") is not None:
        checks.append(linear_attention)
    with open(facts, "a") as file:
        for check in checks:
            tell(file, check=check.__name__)
            try:
                tell(file, check=check.__name__, value=check())
            except Exception as error:
                words = str(error).strip() or "no message"
                tell(file, check=check.__name__, error=f"{type(error).__name__}: {words}")
    return 0


def tell(file: Any, **line: Any) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
