"""What a run tells of itself: metrics.jsonl, events, result.json, taken from Megatron's loop.

Megatron offers no hook for the numbers of one step, and what it prints for a process's second step
is the mean of two (training.py:2593, 2877). So its own functions are wrapped: `training_log`,
`evaluate`, `save_checkpoint`; each keeps its behaviour.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.training import training as loop
from megatron.training.global_vars import get_args

from planning import flops, throughput
from planning.hardware import GIB, GPUS
from planning.plan import Plan
from training import checkpoints, device
from training.events import EventLog
from training.step import LOSS

RECENT_STEPS = 2000  # step times kept for the median


class FromLastStage:
    """Brings to rank 0 what only the ranks of the last pipeline stage know.

    Both ends of a pipeline end a step together, so neither waits for the other.
    """

    def __init__(self) -> None:
        """Collective: every rank calls it."""
        self._rank, self._last = (
            torch.distributed.get_rank(),
            torch.distributed.get_world_size() - 1,
        )
        self._group = None
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            # gloo: numbers of the host, without a wait for the GPU.
            self._group = torch.distributed.new_group([0, self._last], backend="gloo")

    def __call__(self, *numbers: float | None) -> tuple[float | None, ...]:
        """On rank 0 the last rank's numbers, elsewhere one's own; None stands for "not finite"."""
        if self._group is None or self._rank not in (0, self._last):
            return numbers
        own = [math.nan if number is None else number for number in numbers]
        message = torch.tensor(own, dtype=torch.float64, device="cpu")
        if self._rank == self._last:
            torch.distributed.send(message, dst=0, group=self._group)
            return numbers
        torch.distributed.recv(message, src=self._last, group=self._group)
        return tuple(_finite(number) for number in message.tolist())


class Recorder:
    """Collects on every rank and writes on rank 0, which is on the run's first host.

    shared_run_dir: whether all nodes see one run_dir.
    """

    def __init__(
        self, plan: Plan, run_dir: Path, events: EventLog, *, shared_run_dir: bool = True
    ) -> None:
        self.plan, self.run_dir, self.events = plan, run_dir, events
        self._shared = shared_run_dir
        self._from_last_stage = FromLastStage()
        self.models: list[torch.nn.Module] = []  # as built, of this rank
        config = plan.config
        self.operations = flops.step(config.model, config.training.global_batch_size)  # of a step
        self.writes = torch.distributed.get_rank() == 0
        self.started = self.mark = time.perf_counter()
        self.step = 0
        self.first_step: int | None = None
        self.attention: str | None = None  # what Transformer Engine chose for the first step
        self.loss: float | None = None
        self.evaluations: dict[str, float] = {}
        self.checkpoint: str | None = None
        self.step_times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._training = True
        self._metrics = open(run_dir / "metrics.jsonl", "a") if self.writes else None

    def install(self) -> None:
        """Wrap Megatron's functions; train() looks them up in its module each time."""
        self._wrap("training_log", self._after_step)
        self._wrap("evaluate", self._after_evaluation)
        self._wrap("save_checkpoint", self._after_save)
        self._evaluate_once_at_the_end()

    def _wrap(self, name: str, after: Callable[..., None]) -> None:
        original = getattr(loop, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = original(*args, **kwargs)
            after(began, result, *args, **kwargs)
            return result

        setattr(loop, name, wrapped)

    def _evaluate_once_at_the_end(self) -> None:
        """pretrain validates after the last step anyway: train() need not do it just before."""
        original = loop.evaluate_and_print_results

        def evaluate(
            prefix: str, step: Any, data: Any, model: Any, iteration: int, *a: Any, **k: Any
        ) -> None:
            if not (self._training and iteration >= get_args().train_iters):
                original(prefix, step, data, model, iteration, *a, **k)

        loop.evaluate_and_print_results = evaluate

    def _after_step(
        self,
        began: float,
        result: Any,
        losses: dict[str, Any],
        total_losses: Any,
        learning_rate: float | None,
        iteration: int,
        *rest: Any,
        **kwargs: Any,
    ) -> None:
        # training_log(loss_dict, total_loss_dict, lr, iteration, loss_scale, report_memory,
        # skipped, grad_norm, ...). The optimizer's step has synchronised with the GPU before.
        grad_norm = rest[3]
        self.step = iteration
        if self.first_step is None:
            self.first_step = iteration
            self.attention = device.check_attention(self.plan)
            if self.writes and self.attention is not None:
                text = f"attention: {device.describe_attention(self.attention)}"
                kind = "warning" if self.attention == "unfused" else "notice"
                self.events.write(kind, text=text)
            if self.writes:
                planned, active = device.describe_precision(self.plan, self.models)
                kind = "notice" if planned else "warning"
                self.events.write(kind, text=f"precision active: {active}")
        self.loss, learning_rate = self._from_last_stage(
            _finite(losses[LOSS]) if LOSS in losses else None, _finite(learning_rate)
        )
        if self.writes:
            step_s = began - self.mark
            self.step_times.append(step_s)
            self._write_step(step_s, learning_rate, grad_norm)
        self._check_finite(grad_norm, lost=LOSS in losses and self.loss is None)
        self.mark = time.perf_counter()

    def _check_finite(self, grad_norm: Any, lost: bool) -> None:
        """End the run before anything of this step is saved. The norm is of all ranks' gradients.

        FP16's loss scaling skips such a step by itself. Raises FloatingPointError.
        """
        config = self.plan.config
        if not config.training.check_nan or config.precision.dtype == "fp16":
            return
        if lost or (grad_norm is not None and _finite(grad_norm) is None):
            what = "loss" if lost else "gradient"
            raise FloatingPointError(
                f"step {self.step}: the {what} is not finite. The checkpoints are of earlier "
                "steps. A lower training.optimizer.learning_rate, a longer warm-up or "
                "precision=bf16 are what to try; training.check_nan=false goes on regardless"
            )

    def _write_step(self, step_s: float, learning_rate: Any, grad_norm: Any) -> None:
        derived = self.plan.derived
        rate = derived.tokens_per_step / step_s / derived.world_size
        line = {
            "step": self.step,
            "tokens": self.step * derived.tokens_per_step,
            "loss": self.loss,
            "grad_norm": _finite(grad_norm),
            "lr": _finite(learning_rate),
            "step_s": step_s,
            "tokens_per_s_per_gpu": rate,
            "mfu": self._mfu(step_s),
            "memory_gib": torch.cuda.max_memory_allocated() / GIB,
        }
        self._append(line)
        self.events.write(
            "step",
            **line,
            train_steps=self.plan.config.training.train_steps,
            device="cpu" if self.plan.backend == "torch" else "gpu",
        )

    def _mfu(self, step_s: float) -> float | None:
        """Model FLOP/s over the dense peak of the format in use; None on a CPU.

        FLOPs by Megatron's convention: causal attention counts half, recompute not at all.
        """
        operations, gpus = self.operations, self.plan.derived.world_size
        peak = peak_tflops(self.plan)
        if peak is None or operations is None:
            return None
        return operations / step_s / gpus / (peak * 1e12)

    def _after_evaluation(self, began: float, result: Any, *args: Any, **kwargs: Any) -> None:
        losses = result[0] or {}
        (value,) = self._from_last_stage(_finite(losses[LOSS]) if LOSS in losses else None)
        # pretrain evaluates the test set last, once training is over and validation done again.
        name = "validation_loss"
        if not self._training and "final_validation" in self.evaluations:
            name = "test_loss"
        if self.writes and value is not None:
            self.evaluations[name] = value
            if not self._training:
                self.evaluations.setdefault("final_validation", value)
            self._append({"step": self.step, name: value})
            self.events.write("validation", step=self.step, **{name: value})
        self.mark = time.perf_counter()

    def training_is_over(self) -> None:
        self._training = False

    def _after_save(self, began: float, result: Any, iteration: int, *a: Any, **k: Any) -> None:
        folder = Path(get_args().save)
        self.checkpoint = str(folder / f"iter_{iteration:07d}")
        keep = self.plan.config.checkpoint.keep
        if self._shared:
            if torch.distributed.get_rank() == 0:
                checkpoints.prune(folder, keep)
        else:
            torch.distributed.barrier()  # all ranks' parts are there
            if os.environ.get("LOCAL_RANK", "0") == "0":
                checkpoints.prune_part(folder, keep, iteration)
        if self.writes:
            self.events.write(
                "checkpoint",
                step=iteration,
                path=self.checkpoint,
                seconds=time.perf_counter() - began,
            )
        self.mark = time.perf_counter()

    def _append(self, line: dict[str, Any]) -> None:
        assert self._metrics is not None
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()

    def result(self, status: str, notes: list[str]) -> dict[str, Any]:
        """What result.json holds; collective: every rank calls it."""
        peak = [0.0] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(peak, torch.cuda.max_memory_allocated() / GIB)
        derived = self.plan.derived
        # The first step of a process compiles and allocates.
        times = list(self.step_times)[1:] or list(self.step_times)
        median = statistics.median(times) if times else None
        return {
            "status": status,
            "steps": self.step,
            "first_step": self.first_step,
            "final_loss": self.loss,
            "validation_loss": self.evaluations.get("validation_loss"),
            "test_loss": self.evaluations.get("test_loss"),
            "tokens": self.step * derived.tokens_per_step,
            "median_step_s": median,
            "median_tokens_per_s_per_gpu": derived.tokens_per_step / median / derived.world_size
            if median
            else None,
            "median_mfu": self._mfu(median) if median else None,
            "mfu_peak_tflops": peak_tflops(self.plan),
            "attention_backend": self.attention,
            "peak_memory_gib": max(peak),
            "peak_memory_gib_per_rank": peak,
            "checkpoint": self.checkpoint,
            "seconds": time.perf_counter() - self.started,
            "notes": notes,
        }


def peak_tflops(plan: Plan) -> float | None:
    return throughput.peak_tflops(GPUS[plan.config.hardware.gpu or "cpu"], plan.config.precision)


def _finite(value: Any) -> float | None:
    """A number, or None (JSON has no NaN) where there is none or it is not finite."""
    if value is None:
        return None
    number = float(value.item() if isinstance(value, torch.Tensor) else value)
    return number if math.isfinite(number) else None
