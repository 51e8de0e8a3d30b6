"""Whether the GPU in this process can run the plan as it stands: format and attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from planning.findings import Finding, MachineError
from planning.plan import Plan


def check_gpu(plan: Plan) -> None:
    """Raise MachineError where this process's GPU or packages cannot run the plan."""
    import torch

    def cannot(setting: str, message: str, fix: str) -> MachineError:
        return MachineError(Finding("machine", "error", setting, message, fix, machine=True))

    if not torch.cuda.is_available():
        raise cannot("hardware", "torch sees no GPU", "check the driver with tools/doctor.py")
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch import quantization
    except ImportError as error:
        raise cannot(
            "hardware",
            f"Transformer Engine does not import ({error})",
            "install the extra: pip install 'slipway[te]', or use the container",
        ) from error
    checks = {
        "delayed": quantization.check_fp8_support,
        "current": quantization.check_fp8_support,
        "blockwise": quantization.check_fp8_block_scaling_support,
        "mxfp8": quantization.check_mxfp8_support,
        "nvfp4": quantization.check_nvfp4_support,
    }
    check = checks.get(plan.config.precision.recipe)
    if check is not None:
        able, reason = check()
        if not able:
            raise cannot(
                "precision",
                f"Transformer Engine {te.__version__} refuses {plan.config.precision.name} on this "
                f"{torch.cuda.get_device_name()}: {reason}",
                "take precision=bf16 here, or the hardware that computes it",
            )


def attention_backend() -> str | None:
    """The attention that Transformer Engine chose at its last call, or None before the first."""
    from transformer_engine.pytorch.attention.dot_product_attention import (
        dot_product_attention as module,
    )

    chosen: dict[str, Any] = module._attention_backends
    for name in ("flash", "fused", "unfused"):
        if chosen.get(f"use_{name}_attention"):
            return name
    return None


@contextmanager
def translate_attention_error(plan: Plan) -> Iterator[None]:
    """Say in our words that Transformer Engine found no fused attention (exit 3).

    The plan asks for fused attention only; TE raises in the first step where it has none.
    """
    try:
        yield
    except Exception as error:
        if "attention backend" in str(error).lower() and plan.backend == "te":
            raise MachineError(
                Finding(
                    "attention",
                    "error",
                    "hardware.allow_unfused_attention",
                    "Transformer Engine finds no fused attention here: unfused, this step would be "
                    f"several times slower and larger ({error})",
                    "run tools/doctor.py (two cuDNN versions are the usual cause), or set "
                    "hardware.allow_unfused_attention=true",
                    machine=True,
                )
            ) from error
        raise
