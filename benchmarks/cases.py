"""Peak memory and step time of many choices on one GPU, through Megatron's own train_step.

    python benchmarks/cases.py OUT [NAME ...] [--seconds 600] [--memory-only]

Each case of case_list.py (all without NAME) has a process of its own, which imports while others
measure. A line of OUT/cases.jsonl holds what it was, the step times, and the bytes that torch
allocated and reserved: at the end of the first forward pass, at the peak of forward and backward,
at the peak of the optimizer's step, between steps. After --seconds no new case starts.
--memory-only takes two steps a case, whose times are not to be compared (`timed` is false).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.case_list import CASES, Case
from launch import compose
from planning.plan import Plan, load
from planning.resolve import resolve

WARM_UP, STEPS = 3, 6
READY_AHEAD = 4  # processes that have imported and wait
MOST_FAILED = 12  # then something is wrong with all of them
LIMIT_S = 90  # of one case
PORT = 29700


def main(out: Path, names: list[str], seconds: float, memory_only: bool) -> int:
    began = time.perf_counter()
    chosen = [case for case in CASES if not names or case.name in names]
    for case in chosen:
        _write_plan(out / "plans" / case.name, case)
    waiting = list(enumerate(chosen))
    ready: list[tuple[Case, subprocess.Popen[str]]] = []
    results, failed = open(out / "cases.jsonl", "a"), 0
    while (waiting or ready) and failed < MOST_FAILED:
        while waiting and len(ready) < READY_AHEAD:
            number, case = waiting.pop(0)
            folder = out / "plans" / case.name
            ready.append((case, _start(folder, PORT + number, memory_only)))
        case, process = ready.pop(0)
        if time.perf_counter() - began > seconds:
            process.kill()
            continue
        record = _measure(case, process, out / "plans" / case.name)
        results.write(json.dumps(record) + "\n")
        results.flush()
        failed += "error" in record
        print(_line(record), f"({time.perf_counter() - began:.0f} s)", flush=True)
    return 0


def _write_plan(folder: Path, case: Case) -> None:
    resolution = resolve(compose.choose(case.overrides))
    assert resolution.plan is not None, resolution.findings
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.yaml").write_text(resolution.plan.to_yaml())


def _start(folder: Path, port: int, memory_only: bool) -> subprocess.Popen[str]:
    plan = load(folder / "plan.yaml")
    own = {key: value for key, value in plan.environment.items() if not value.startswith("policy:")}
    process = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, __file__, "--one", str(folder), *["--memory-only"] * memory_only],
        env=os.environ | own | process | {"MASTER_PORT": str(port)},
        stdin=subprocess.PIPE,
        stdout=open(folder / "log", "w"),
        stderr=subprocess.STDOUT,
        text=True,
    )


def _measure(case: Case, process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = {"name": case.name, "overrides": case.overrides, "fit": case.fit}
    try:
        process.communicate("go\n", timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return record | {"error": f"no end in {LIMIT_S} s"}
    except BrokenPipeError:
        pass
    try:
        return record | json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return record | {"error": (folder / "log").read_text()[-600:]}


def _line(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"{record['name']:<28} {record['error'].splitlines()[-1][:90]}"
    return (
        f"{record['name']:<28} {record['step_s'] * 1e3:8.1f} ms  {record['peak'] / 2**30:7.2f} GiB "
        f"allocated, {record['reserved'] / 2**30:7.2f} reserved"
    )


def one(folder: Path, memory_only: bool) -> int:
    """The measuring process: imports, waits for a line on standard input, measures."""
    from megatron.training.initialize import initialize_megatron

    from training import arguments, megatron_fixes

    plan = load(folder / "plan.yaml")
    megatron_fixes.apply()
    arguments.parse(plan.megatron_args, {"run:": str(folder)})
    initialize_megatron()
    sys.stdin.readline()
    import torch

    try:
        result = measure(plan, *((1, 1) if memory_only else (WARM_UP, STEPS)))
        result["timed"] = not memory_only
    except torch.cuda.OutOfMemoryError as error:
        result = {"error": "out of memory", "message": str(error)[:300],
                  "reserved": torch.cuda.max_memory_reserved()}  # fmt: skip
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:600]}
    (folder / "result.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


def measure(plan: Plan, warm_up: int, steps: int) -> dict[str, Any]:
    """Step times in seconds and memory in bytes of `plan` on the current GPU."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.utils import get_model_config
    from megatron.training import get_args
    from megatron.training import training as loop
    from megatron.training.argument_utils import core_transformer_config_from_args

    from models.build import build
    from training import step

    cuda, args, derived = torch.cuda, get_args(), plan.derived

    def provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        return build(
            plan.config.model,
            config or core_transformer_config_from_args(args),
            derived.padded_vocab_size,
            derived.layer_pattern,
            pre_process,
            post_process,
            vp_stage,
            pg_collection,
            backend="te",
        )

    free, total = cuda.mem_get_info()
    found: dict[str, Any] = {"context": total - free - cuda.memory_reserved()}
    loop.set_jit_fusion_options(tp_size=args.tensor_model_parallel_size)
    model, optimizer, scheduler = loop.setup_model_and_optimizer(
        ModelType.encoder_or_decoder, provider
    )
    found["built"] = cuda.memory_allocated()
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap_grad_reduce:
        config.no_sync_func = model[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    schedule = get_forward_backward_func()
    graph = plan.config.layout.cuda_graph == "full"
    if graph:
        schedule = FullCudaGraphWrapper(schedule, args.cuda_graph_warmup_steps)
    data, marks = RerunDataIterator(batches(plan)), {}

    def forward_step(iterator: Any, stage: Any) -> Any:
        output, loss_of = step.forward_step(iterator, stage)
        if not graph:
            marks.setdefault("after_forward", cuda.memory_allocated())
        return output, loss_of

    def train() -> float:
        cuda.synchronize()
        began = time.perf_counter()
        loop.train_step(forward_step, data, model, optimizer, scheduler, config, schedule, 0)
        cuda.synchronize()
        return time.perf_counter() - began

    for module in model:
        module.train()
    times = [train() for _ in range(warm_up + steps)]
    found |= {
        "peak": cuda.max_memory_allocated(),
        "reserved": cuda.max_memory_reserved(),
        "steady": cuda.memory_allocated(),
    }
    # One step more, its peak before the optimizer apart from the peak in it.
    optimizer_step = optimizer.step

    def marked_step(*a: Any, **k: Any) -> Any:
        cuda.synchronize()
        marks["peak_model"] = cuda.max_memory_allocated()
        cuda.reset_peak_memory_stats()
        return optimizer_step(*a, **k)

    marks.clear()
    cuda.reset_peak_memory_stats()
    optimizer.step = marked_step
    train()
    marks["peak_optimizer"] = cuda.max_memory_allocated()
    used = sorted(times[warm_up:])
    free, total = cuda.mem_get_info()
    return (
        found
        | marks
        | {
            "step_s": used[len(used) // 2],
            "times": times,
            "device_used": total - free,
            "device_total": total,
            "parameters": derived.allocated_parameters,
            "tokens": derived.tokens_per_step,
        }
    )


def batches(plan: Plan) -> Iterator[dict[str, Any]]:
    """Micro-batches of random tokens, as the data loader gives them."""
    import torch

    size, length = plan.config.training.micro_batch, plan.config.model.seq_length
    generator = torch.Generator().manual_seed(1)
    vocabulary = plan.config.model.vocab_size
    tokens = torch.randint(0, vocabulary, (size, length + 1), generator=generator)
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(size, length),
        "position_ids": torch.arange(length).expand(size, length).contiguous(),
    }
    pinned = {name: tensor.pin_memory() for name, tensor in batch.items()}
    while True:
        yield dict(pinned)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Memory and speed of many choices on one GPU.")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--memory-only", action="store_true")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.one:
        sys.exit(one(given.one, given.memory_only))
    if given.out is None:
        parser.error("name a folder for the results")
    sys.exit(main(given.out.resolve(), given.names, given.seconds, given.memory_only))
