"""Corrections of Megatron-Core 0.19.2 that hold on any device. Line numbers are of that version.

Each function says what is wrong there and may be called more than once. Those that touch a class
of Megatron import it, so call them after the process environment is set.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from typing import Any

import torch


def apply() -> None:
    """All of them."""
    skip_helper_compilation()
    fix_torch_adam_state()
    fix_sgd_resume()
    fix_fsdp2_resume()
    save_whole_main_weights()
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
    """Let runs with torch's AdamW, which keeps `step` as a tensor per parameter, save and resume.

    Transformer Engine's and Apex's FusedAdam keep one number per group, so there is nothing to
    correct where either is installed.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    distributed = distrib_optimizer.DistributedOptimizer
    half = optimizer.Float16OptimizerWithFloat16Params
    if distrib_optimizer.HAVE_APEX_OR_TE or getattr(distributed, "_torch_adam_fixed", False):
        return
    distributed._torch_adam_fixed = True
    set_states = distributed._set_main_param_and_optimizer_states
    load_distributed, load_half = distributed.load_state_dict, half.load_state_dict

    @torch.no_grad()  # an FP32 shard is a view of a parameter, which :1225 copies to in place
    def set_main_param_and_states(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        # :1223 copies every tensor of the state, but the checkpoint's `step` is in its groups: it
        # is missing here (fully reshardable) or is the template's (DP reshardable).
        set_states(self, param, {**tensors, "step": None})

    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load_distributed(self, state_dict)
        # :1032 gives all parameters one tensor (:1043 clones). torch adds 1 to it once per
        # parameter, and later bias corrections are wrong in silence.
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def load_with_a_step(self: Any, state_dict: dict[str, Any]) -> None:
        # optimizer.py:1187 does not store a step of 0.
        if isinstance(self.optimizer, torch.optim.Adam):
            state_dict["optimizer"]["state"].setdefault("common_step", torch.tensor(0.0))
        load_half(self, state_dict)

    distributed._set_main_param_and_optimizer_states = set_main_param_and_states
    distributed.load_state_dict, half.load_state_dict = load_with_own_steps, load_with_a_step
    # distrib_optimizer.py:839 takes the step from the state of a parameter. Before the first update
    # there is none: when the template of a load is built, and when FP16 has skipped all steps yet.
    distributed.sharded_state_dict = _allocating_first(distributed.sharded_state_dict)
    half.sharded_state_dict = _allocating_first(half.sharded_state_dict)


def _allocating_first(sharded_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sharded_state_dict)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam):
            _allocate_adam_state(self.optimizer)
        return sharded_state_dict(self, *args, **kwargs)

    return wrapper


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


def fix_sgd_resume() -> None:
    """Let SGD resume: optimizer/__init__.py:624 gives it no function to allocate its state, which
    optimizer.py:1146 and :1362 call to build the template of a load."""
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    if getattr(MegatronOptimizer, "_sgd_fixed", False):
        return
    MegatronOptimizer._sgd_fixed = True
    original = MegatronOptimizer.__init__

    def init(self: Any, optimizer: Any, config: Any, init_state_fn: Any = None) -> None:
        original(self, optimizer, config, init_state_fn or _allocate_momentum)

    MegatronOptimizer.__init__ = init


def _allocate_momentum(optimizer: torch.optim.Optimizer | None, config: object = None) -> None:
    if optimizer is None:  # a rank without trainable parameters
        return
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("momentum") else ():
            if not optimizer.state[param]:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def save_whole_main_weights() -> None:
    """Save FP32 main weights, and take them back, where the optimizer keeps only what BF16 lacks.

    Transformer Engine's precision-aware Adam holds the difference of a main weight to its BF16
    weight as 16 bits (store_param_remainders). distrib_optimizer.py:1108 saves these as if they
    were weights, and :1207 gives them back as FP32, which the optimizer refuses: such a run could
    not resume, and another optimizer would take them for weights.
    """
    from megatron.core.optimizer import distrib_optimizer

    distributed = distrib_optimizer.DistributedOptimizer
    if getattr(distributed, "_main_weights_whole", False):
        return
    distributed._main_weights_whole = True
    get_states = distributed._get_main_param_and_optimizer_states
    set_states = distributed._set_main_param_and_optimizer_states

    def shard_of(self: Any, param: Any) -> torch.Tensor:
        group, order = self.model_param_group_index_map[param]
        shard: torch.Tensor = self.optimizer.param_groups[group]["params"][order]
        return shard

    def get_whole(self: Any, param: Any) -> dict[str, Any]:
        tensors: dict[str, Any] = get_states(self, param)
        if tensors["param"].dtype == torch.int16:
            tensors["param"] = join_main_weight(shard_of(self, param), tensors["param"])
        return tensors

    def set_split(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        shard = shard_of(self, param)
        held = self.optimizer.state[shard].get("master_param")
        if held is not None and held.dtype == torch.int16:
            main = tensors["param"].to(shard.device)
            tensors = {**tensors, "param": split_main_weight(shard, main)}
        set_states(self, param, tensors)

    distributed._get_main_param_and_optimizer_states = get_whole
    distributed._set_main_param_and_optimizer_states = set_split


def join_main_weight(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The FP32 main weight of a BF16 `weight` and its int16 `remainder`, of the same shape: as
    integers the weight's bits are the upper half, and the remainder is added."""
    upper = weight.detach().view(torch.int16).to(torch.int32) << 16
    return (upper + remainder.to(torch.int32)).view(torch.float32)


def split_main_weight(weight: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
    """The int16 remainder of the FP32 `main` to its BF16 `weight`, of the same shape.

    Exact where `weight` is `main` rounded as the optimizer does it. Others round a main weight
    halfway between two the other way, and it then moves by its last bit.
    """
    upper = weight.detach().view(torch.int16).to(torch.int32) << 16
    remainder = main.float().contiguous().view(torch.int32) - upper
    return remainder.clamp(-(2**15), 2**15 - 1).to(torch.int16)


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


def fix_fsdp2_resume() -> None:
    """Give a resumed FSDP2 run (checkpoint format torch_dist) its optimizer's step back.

    Its tensors are loaded in place, so training/training.py:2203 skips the optimizer's
    load_state_dict, and with it the step, which is not a tensor of a shard. torch's AdamW then
    stops with a KeyError; Transformer Engine's, which counts in its groups, would start at step 1
    in silence (read, not run), with a wrong bias correction.
    """
    from megatron.training import checkpointing, training

    if getattr(checkpointing, "_fsdp2_resume_fixed", False):
        return
    load, load_base = checkpointing.load_checkpoint, checkpointing._load_global_dist_base_checkpoint
    kept: dict[str, Any] = {}

    def load_base_and_keep(
        load_dir: str, args: Any, rank0: bool, sharded_state: Any, *rest: Any, **named: Any
    ) -> Any:
        answer = load_base(load_dir, args, rank0, sharded_state, *rest, **named)
        if sharded_state and "optimizer" in sharded_state:
            kept["optimizer"] = answer[0]["optimizer"]
        return answer

    def load_checkpoint(
        ddp_model: Any,
        optimizer: Any,
        *rest: Any,
        skip_load_to_model_and_opt: bool = False,
        **named: Any,
    ) -> Any:
        kept.clear()
        answer = load(
            ddp_model,
            optimizer,
            *rest,
            skip_load_to_model_and_opt=skip_load_to_model_and_opt,
            **named,
        )
        saved = kept.pop("optimizer", None)
        if skip_load_to_model_and_opt and saved is not None:
            chained = optimizer.chained_optimizers
            states = [saved] if len(chained) == 1 else [saved[i] for i in range(len(chained))]
            for one, state in zip(chained, states, strict=True):
                _restore_step(one, state)
        return answer

    checkpointing._load_global_dist_base_checkpoint = load_base_and_keep
    checkpointing.load_checkpoint = training.load_checkpoint = load_checkpoint
    checkpointing._fsdp2_resume_fixed = True


def _restore_step(optimizer: Any, saved: dict[str, Any]) -> None:
    """`optimizer`: Megatron's, of any precision. `saved`: its loaded sharded_state_dict."""
    saved = saved.get("optimizer", saved)
    inner = optimizer.optimizer
    if isinstance(inner, torch.optim.Adam):
        for state in inner.state.values():
            state["step"] = saved["state"].get("common_step", torch.tensor(0.0)).clone()
    else:
        steps = [group["step"] for group in saved["param_groups"] if "step" in group]
        for group in inner.param_groups if steps else ():
            group["step"] = max(steps)
