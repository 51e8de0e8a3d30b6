"""One process of a run: `python -m training.worker RUN_DIR`, started by torchrun on every rank.

Reads RUN_DIR/plan.yaml and RUN_DIR/logs/environment.json, checks that this machine is the plan's,
and calls Megatron's own pretrain. It decides nothing: what differs from the plan is an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from planning.findings import Finding, MachineError, Refusal
from planning.plan import Plan, load, locate
from training.events import EventLog
from training.orphans import die_with_parent


def main(run_dir: Path) -> int:
    die_with_parent()
    rank = int(os.environ["RANK"])
    logs = run_dir / "logs"
    _redirect(logs / f"rank-{rank}.log")
    events = EventLog(logs / "events.jsonl")
    try:
        plan = load(run_dir / "plan.yaml")
        here: dict[str, Any] = json.loads((logs / "environment.json").read_text())
        return train(plan, run_dir, here, events, rank)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            return 0
        traceback.print_exc()
        with suppress(OSError):  # a full disk
            (logs / f"error-rank-{rank}.json").write_text(json.dumps(describe(error, rank)))
        sys.stdout.flush()
        sys.stderr.flush()
        # No clean-up: other ranks may hang in a collective, and torchrun ends them.
        os._exit(error.exit_status if isinstance(error, Refusal) else 1)


def describe(error: BaseException, rank: int) -> dict[str, Any]:
    """The error as the launcher reads it."""
    return {
        "rank": rank,
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
        "exit_status": error.exit_status if isinstance(error, Refusal) else 1,
    }


def _redirect(log: Path) -> None:
    """Send everything that this process prints to its log."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def train(plan: Plan, run_dir: Path, here: dict[str, Any], events: EventLog, rank: int) -> int:
    """`here` is logs/environment.json: what the plan's roots became on this host."""
    first, roots = rank == 0, here["roots"]
    if first:
        events.write("phase", text="importing torch and Megatron")
    notes = _prepare_device(plan, events)
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain
    from megatron.training import training as loop
    from megatron.training.argument_utils import (
        core_transformer_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.global_vars import get_signal_handler

    from models.build import build
    from training import arguments
    from training.data import library_text
    from training.data.provider import dataset_provider
    from training.device import translate_attention_error
    from training.recorder import Recorder
    from training.step import forward_step

    args = arguments.parse(plan.megatron_args, roots)
    recorder: Recorder | None = None

    def model_provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        nonlocal recorder
        if recorder is None:
            shared = here.get("shared_run_dir", True)
            recorder = Recorder(plan, run_dir, events, shared_run_dir=shared)
            recorder.install()
            if first:
                # Every rank has joined the process group, so all handle SIGTERM by now.
                events.write("ready")
                events.write("phase", text="building the model")
        model = build(
            plan.config.model,
            config or core_transformer_config_from_args(get_args()),
            plan.derived.padded_vocab_size,
            plan.derived.layer_pattern,
            pre_process,
            post_process,
            vp_stage,
            pg_collection,
            backend=plan.backend,  # type: ignore[arg-type]
        )
        recorder.models.append(model)
        return model

    cache = Path(roots["cache:"])
    prefixes = None
    if plan.config.data.kind == "library_text":
        if first and library_text.expected(cache) is None:
            events.write("phase", text="making the dataset of the standard library's sources")
        prefixes = library_text.build(cache)
    data = dataset_provider(locate(plan.config.data, roots), cache, prefixes)

    def datasets(samples: Any, vp_stage: int | None = None) -> Any:
        if first:
            events.write("phase", text="reading the data")
        return data(samples, vp_stage=vp_stage)

    datasets.is_distributed = True  # type: ignore[attr-defined]

    def training_is_over(*_: Any, **__: Any) -> None:
        if recorder is not None:
            recorder.training_is_over()

    original_train = loop.train

    def train_and_tell(*a: Any, **k: Any) -> Any:
        if first:
            events.write("phase", text="first step")
        if recorder is not None:
            recorder.mark = time.perf_counter()
        try:
            return original_train(*a, **k)
        finally:
            training_is_over()

    loop.train = train_and_tell
    status = "done"
    try:
        with translate_attention_error(plan):
            pretrain(
                pretrain_cfg_container_from_args(args),
                datasets,
                ModelType.encoder_or_decoder,
                forward_step,
                model_provider=model_provider,
            )
    except SystemExit as end:  # train() leaves this way after a stop signal
        if end.code not in (0, None):
            raise RuntimeError(f"Megatron ended the run with status {end.code}") from end
        handler = get_signal_handler()
        status = "stopped" if any(handler.signals_received()) else "done"
    assert recorder is not None
    result = recorder.result(status, notes)
    if recorder.writes:
        _write_result(run_dir, plan, result)
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


def _prepare_device(plan: Plan, events: EventLog) -> list[str]:
    """Import torch with what the plan's backend needs; the notes for the summary."""
    import torch

    from training import megatron_fixes

    if plan.backend == "te":
        from training.device import check_gpu

        for text in check_gpu(plan):
            events.write("warning", text=text)
        megatron_fixes.apply()
        return []
    if torch.cuda.is_available():
        raise MachineError(
            Finding("machine", "error", "hardware", "the plan is for a CPU and torch sees a GPU")
        )
    from training import cpu_standin

    cpu_standin.install()
    return (
        ["This CPU has no BF16 units: BF16 products were computed in FP32 and rounded."]
        if plan.config.precision.dtype == "bf16" and cpu_standin.emulates_half_gemms()
        else []
    )


def _write_result(run_dir: Path, plan: Plan, result: dict[str, Any]) -> None:
    from training import curve

    per = "process" if plan.backend == "torch" else "GPU"
    curve.draw(run_dir / "metrics.jsonl", run_dir / "loss.png", plan.name, per=per)
    beside = run_dir / "result.json.new"
    beside.write_text(json.dumps(result, indent=2) + "\n")
    beside.rename(run_dir / "result.json")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
