"""Main weights of an optimizer that keeps only what BF16 lacks, saved and taken back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from training import megatron_fixes
from training.megatron_fixes import join_main_weight, split_main_weight


def rounded(main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 weight and remainder as Transformer Engine's kernel leaves them (adam.cu): the halves of
    the FP32 bits, and the upper one is raised where the lower one is negative."""
    halves = main.view(torch.int16).view(-1, 2)
    low, high = halves[:, 0].clone(), halves[:, 1].clone()
    high += (low < 0).to(torch.int16)
    return high.view(torch.bfloat16), low


def weights(number: int = 100_000) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(number) * torch.logspace(-12, 3, number)


def test_weight_and_remainder_are_the_main_weight_to_the_bit() -> None:
    main = weights()
    weight, remainder = rounded(main)
    assert torch.equal(join_main_weight(weight, remainder), main)
    assert torch.equal(split_main_weight(weight, main), remainder)


def test_a_weight_that_was_rounded_by_torch_loses_at_most_the_last_bit() -> None:
    halfway = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    main = torch.cat([weights(), halfway, -halfway])
    weight = main.bfloat16()  # to even: half of the halfway ones go down
    back = join_main_weight(weight, split_main_weight(weight, main))
    lost = (back.view(torch.int32) - main.view(torch.int32)).abs()
    assert lost.max() == 1
    assert torch.equal(lost.nonzero().flatten(), torch.tensor([100_000, 100_002]))


class Adam:
    """What Megatron asks of Transformer Engine's FusedAdam, which needs a GPU."""

    def __init__(self, weight: torch.Tensor, remainder: torch.Tensor) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [weight]}]
        self.state = {weight: {"master_param": remainder, "exp_avg": torch.zeros(len(weight))}}

    def get_unscaled_state(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        return self.state[weight][name]

    def set_scaled_state(self, weight: torch.Tensor, name: str, value: torch.Tensor) -> None:
        assert value.dtype == self.state[weight][name].dtype  # as fused_adam.py does
        self.state[weight][name].copy_(value)


def optimizer(weight: torch.Tensor, remainder: torch.Tensor) -> Any:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    made = DistributedOptimizer.__new__(DistributedOptimizer)
    made.config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True)
    made.optimizer = Adam(weight, remainder)
    made.model_param_group_index_map = {"model's": (0, 0)}
    return made


def test_megatrons_optimizer_saves_whole_weights_and_takes_them_back() -> None:
    megatron_fixes.save_whole_main_weights()
    main = weights()
    weight, remainder = rounded(main)
    saved = optimizer(weight, remainder)._get_main_param_and_optimizer_states("model's")
    assert torch.equal(saved["param"], main)
    other = optimizer(weight, torch.zeros_like(remainder))
    other._set_main_param_and_optimizer_states("model's", saved)
    assert torch.equal(other.optimizer.state[weight]["master_param"], remainder)
