"""Corrections of Megatron-Core 0.19.2 that hold on any device. Line numbers are of that version.

Each function says what is wrong there and may be called more than once. Those that touch a class
of Megatron import it, so call them after the process environment is set.
"""

from __future__ import annotations

import queue
from typing import Any

import torch


def apply() -> None:
    """All of them."""
    skip_helper_compilation()
    fix_torch_adam_state()
    keep_write_results_in_process()


def skip_helper_compilation() -> None:
    """Use the index builder that the wheel ships instead of compiling it.

    training/initialize.py:154 runs `make` in a folder whose Makefile the wheel lacks, and exits.
    """
    import megatron.core.datasets.utils as dataset_utils

    dataset_utils.compile_helpers = _already_compiled


def _already_compiled() -> None:
    """The wheel holds megatron/core/datasets/helpers_cpp as a compiled extension."""


def fix_torch_adam_state() -> None:
    """Let the distributed optimizer save and resume torch's AdamW, which keeps `step` as a tensor
    per parameter. Transformer Engine's and Apex's FusedAdam keep one number per group, so there
    is nothing to correct where either is installed."""
    import megatron.core.optimizer.distrib_optimizer as module

    cls = module.DistributedOptimizer
    if module.HAVE_APEX_OR_TE or getattr(cls, "_torch_adam_state_fixed", False):
        return
    load, build, fill = (
        cls.load_state_dict,
        cls.sharded_state_dict,
        cls._set_main_param_and_optimizer_states,
    )

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        # :1032 gives all parameters one tensor (:1043 clones); torch then adds 1 to it once per
        # parameter, and every later update has the wrong bias correction.
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def sharded_state_dict(
        self: Any, model_state: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        # :839 takes the step from the state of a parameter; before the first step there is none.
        if is_loading:
            _allocate_adam_state(self.optimizer)
        return build(self, model_state, is_loading, *args, **kwargs)

    def set_main_param_and_states(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        # :1223 looks for every tensor of the state in the checkpoint, which keeps `step` apart.
        fill(self, param, {"step": None, **tensors})

    cls.load_state_dict = load_state_dict
    cls.sharded_state_dict = sharded_state_dict
    cls._set_main_param_and_optimizer_states = set_main_param_and_states
    cls._torch_adam_state_fixed = True


def _allocate_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter the state that AdamW makes in its first step, without stepping: a step
    with zero gradients would still decay the weights."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state[param]:
                optimizer.state[param].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(param),
                    exp_avg_sq=torch.zeros_like(param),
                )


def keep_write_results_in_process() -> None:
    """Save checkpoints without a helper process, for a run that saves synchronously.

    dist_checkpointing/strategies/filesystem_async.py:64 starts a multiprocessing manager for the
    results that an asynchronous writer sends back. A synchronous save needs none: the manager costs
    the first save an import of torch and outlives a run that is killed. With --async-save the
    results would not arrive.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue[Any] = queue.Queue()
    filesystem_async.get_write_results_queue = lambda mp_mode="spawn": results
