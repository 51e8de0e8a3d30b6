"""A bare Megatron-Core training step: the reference for launch/train.py's throughput.

    python benchmarks/bare_step.py RUN_DIR < go

RUN_DIR holds the plan.yaml of a run of one GPU. The same arguments give the same model,
optimizer and precision; what is left out is Megatron's loop, the data loader, logging, evaluation
and checks: one fixed batch of random tokens lies on the GPU, and steps follow each other. Writes
RUN_DIR/bare.json (median step in seconds of the last steps, tokens/s, peak GiB).
"""

from __future__ import annotations

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


def main(run_dir: Path) -> int:
    """Import everything, wait for a line on standard input, then measure."""
    import megatron.training  # noqa: F401
    import transformer_engine.pytorch  # noqa: F401

    sys.stdin.readline()
    try:
        measure(run_dir)
    except Exception as error:
        traceback.print_exc()
        (run_dir / "bare.json").write_text(json.dumps({"error": repr(error)[:500]}))
        return 1
    return 0


def measure(run_dir: Path) -> None:
    plan = load(run_dir / "plan.yaml")
    log = os.open(run_dir / "bare.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29651"}  # fmt: skip
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
    ddp_config = loop.get_megatron_ddp_config(args)
    ddp_config.check_for_nan_in_grad = False  # its report goes to Megatron's loop
    wrapped = DistributedDataParallel(config, ddp_config, model)
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
    sys.exit(main(Path(sys.argv[1])))
