"""A bare Megatron-Core training step: the reference for launch/train.py's throughput.

    python benchmarks/bare_step.py RUN_DIR ...

Each RUN_DIR holds the plan.yaml of a run of one GPU. The same arguments give the same model,
optimizer and precision; what is left out is Megatron's loop, the data loader, logging, evaluation
and checks: one fixed batch of random tokens lies on the GPU, and steps follow each other. Writes
RUN_DIR/bare.json (median step in seconds of the last steps, tokens/s, peak GiB).
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from planning.plan import load

STEPS, WARM_UP = 12, 4


def main(run_dirs: list[Path]) -> int:
    status = 0
    for index, run_dir in enumerate(run_dirs):
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29650 + index)}  # fmt: skip
        try:
            measure(run_dir)
        except Exception as error:
            traceback.print_exc()
            (run_dir / "bare.json").write_text(json.dumps({"error": repr(error)[:500]}))
            status = 1
        finally:
            forget()
    return status


def forget() -> None:
    """Leave nothing of a case behind: one process measures many."""
    import torch
    from megatron.core import parallel_state
    from megatron.training.training import destroy_global_state
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    destroy_global_state()
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    FP8GlobalStateManager.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measure(run_dir: Path) -> None:
    plan = load(run_dir / "plan.yaml")
    log = os.open(run_dir / "bare.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name, value in plan.environment.items():
        if not value.startswith("policy:"):
            os.environ[name] = value

    import torch
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.training import training as loop
    from megatron.training.argument_utils import (
        core_transformer_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.initialize import initialize_megatron

    from models.build import build
    from training import arguments, megatron_fixes

    megatron_fixes.skip_helper_compilation()
    args = arguments.parse(plan.megatron_args, {"run:": str(run_dir)})
    pretrain_cfg_container_from_args(args)
    initialize_megatron()
    loop.set_jit_fusion_options(tp_size=1)
    config = core_transformer_config_from_args(args)
    model = build(
        plan.config.model,
        config,
        plan.derived.padded_vocab_size,
        plan.derived.layer_pattern,
        backend="te",
    ).cuda()
    model = Float16Module(config, model)
    wrapped = DistributedDataParallel(config, loop.get_megatron_ddp_config(args), model)
    optimizer_config, overrides = loop.get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(optimizer_config, [wrapped], config_overrides=overrides)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads

    size, length = args.micro_batch_size, args.seq_length
    tokens = torch.randint(0, plan.config.model.vocab_size, (size, length + 1), device="cuda")
    positions = torch.arange(length, device="cuda").expand(size, length).contiguous()
    accumulation = plan.derived.gradient_accumulation
    times, loss = [], torch.zeros((), device="cuda")
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        for micro in range(accumulation):
            last = micro == accumulation - 1
            with wrapped.no_sync() if not last else torch.enable_grad():
                token_losses = wrapped(
                    tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()
                )
                loss = token_losses.float().mean() / accumulation
                loss.backward()
        finalize_model_grads([wrapped])
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    step_s = statistics.median(times[WARM_UP:])
    result = {
        "step_s": step_s,
        "tokens_per_s": plan.derived.tokens_per_step / step_s,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": loss.item() * accumulation,
    }
    (run_dir / "bare.json").write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
