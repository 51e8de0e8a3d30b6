"""Whole transformer blocks: what launching one costs the host, and the kernels of one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.kernel_timing import BF16, Row, out_of_time

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 8,
         "num_query_groups": 8, "seq_length": 256}  # fmt: skip
SHAPES = {
    "small": SMALL,
    "1b": {},
    "8b": {"hidden_size": 4096, "ffn_hidden_size": 14336},
}
RECIPES = {"bf16": None, "current": "tensorwise", "delayed": "delayed", "blockwise": "blockwise"}


def blocks() -> Iterator[Row]:
    """Megatron's transformer block as models/ builds it, forward and backward: seconds of a block
    (the difference of models of 4 and 2), eager, on the device, and on the host that launches it;
    for the larger shapes, the kernels of one block."""
    parallel()
    for name, changes in SHAPES.items():
        for recipe in RECIPES:
            for recompute in (False, True) if recipe in ("bf16", "current") else (False,):
                if out_of_time():
                    return
                try:
                    steps = [step_of(changes, recipe, depth, recompute) for depth in (4, 2)]
                except Exception as error:
                    yield {"block": name, "format": recipe, "error": repr(error)[:300]}
                    continue
                row: Row = {"block": name, "format": recipe, "recompute": recompute}
                walls = [wall(step) for step in steps]
                row |= {"s": (walls[0] - walls[1]) / 2, "s_of_2_blocks": walls[1], "eager": True}
                if name != "small" and not recompute:
                    row["kernels"] = kernels(steps[0])
                    row["kernels_of"] = "4 blocks"
                yield row
                del steps


def parallel() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)


def step_of(changes: Row, recipe: str, depth: int, recompute: bool) -> Callable[[], None]:
    """Forward and backward of a model of `depth` blocks and a small vocabulary."""
    import yaml
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.module import Float16Module

    from models.build import build
    from planning.pattern import symbols
    from planning.schema import ModelConfig

    chosen = yaml.safe_load((ROOT / "conf/model/gpt_1b.yaml").read_text())
    model = ModelConfig.model_validate(chosen | {"num_layers": depth, "vocab_size": 1024} | changes)
    low = {"fp8": "hybrid", "fp8_recipe": RECIPES[recipe]} if RECIPES[recipe] else {}
    if recompute:
        low |= {"recompute_granularity": "full", "recompute_method": "uniform",
                "recompute_num_layers": 2}  # fmt: skip
    config = TransformerConfig(
        num_layers=2 * depth,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=BF16,
        pipeline_dtype=BF16,
        attention_backend=AttnBackend.fused,
        apply_rope_fusion=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        gradient_accumulation_fusion=False,
        is_hybrid_model=True,
        **low,
    )
    pattern = symbols(model.pattern, depth)
    built = Float16Module(config, build(model, config, 1024, pattern, backend="te").cuda())
    tokens = torch.randint(0, 1024, (1, model.seq_length), device="cuda")
    positions = torch.arange(model.seq_length, device="cuda")[None]

    def step() -> None:
        built(tokens, positions, None, labels=tokens).float().mean().backward()
        for p in built.parameters():
            p.grad = None

    return step


def wall(step: Callable[[], None], steps: int = 8) -> float:
    """Median seconds of a step that begins with an idle device and ends with one."""
    times = []
    for _ in range(steps + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def kernels(step: Callable[[], None]) -> list[Row]:
    """The kernels of one step by device time."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    found = [e for e in seen.key_averages() if e.device_type == DeviceType.CUDA]
    found.sort(key=lambda e: -e.self_device_time_total)
    return [
        {"kernel": e.key[:160], "count": e.count, "s": e.self_device_time_total / 1e6}
        for e in found[:45]
    ]
