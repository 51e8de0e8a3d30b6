"""Asks the installed Megatron what it makes of plans: `python -m tests.planning.ask_megatron`.

A question is a line of JSON: `arguments`, `environment`, `world_size`, `capability` (of the GPU;
null: a CPU), `model`, `backend`. The answer is one too: `refused` says why, or is null; `silent`
has the arguments that the plan does not give and Megatron changed by itself.

Nothing is computed and no GPU is needed: what Megatron asks of the machine is answered for the
plan's, process groups are torch's fake ones, and layers are built at full width without memory.
Without Transformer Engine its version is answered too, and its fused Adam, its recipes and its
layers are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state, utils
from megatron.core.fp4_utils import get_fp4_recipe
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.training import argument_utils, arguments, training
from packaging.version import Version
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.build import build
from planning.schema import ModelConfig
from training.arguments import forced, plain

HAVE_TE = find_spec("transformer_engine") is not None
TE_VERSION = Version("2.20.2")
LARGEST_WORLD = 1024  # ranks whose groups are made; more take seconds
# Argument -> TransformerConfig's field, where the names differ (argument_utils.py).
RENAMED = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "fp8_param_gather": "fp8_param",
    "fp4_param_gather": "fp4_param",
}
# What a plan leaves open and Megatron fills in -> the argument that it takes the value of.
FILLED = {
    "num_layers": "encoder_num_layers",
    "encoder_num_layers": "num_layers",
    "encoder_seq_length": "seq_length",
    "start_weight_decay": "weight_decay",
    "end_weight_decay": "weight_decay",
    "eval_global_batch_size": "global_batch_size",
    "eval_micro_batch_size": "micro_batch_size",
    "tensor_parallel_num_weight_shards": "tensor_model_parallel_size",
    "expert_tensor_parallel_num_weight_shards": "expert_tensor_parallel_size",
}
# ... or its only value in training.
LEFT = {"dataloader_type": "single", "inference_cuda_graph_scope": "InferenceCudaGraphScope.none"}
CAPABILITY = [10, 0]


def main() -> None:
    said = sys.stdout
    _prepare()
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = ask(json.loads(line))
        print(json.dumps(answer), file=said, flush=True)


def _prepare() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    # Megatron's parser of 800 arguments takes 0.2 s to build and is the same each time.
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments.add_megatron_arguments = lambda _: parser
    arguments._print_args = lambda *_: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: tuple(CAPABILITY)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
        major=CAPABILITY[0], minor=CAPABILITY[1]
    )
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = lambda *_, **__: None
    trackers: list[Any] = [random.CudaRNGStatesTracker]
    if HAVE_TE:
        from megatron.core.extensions.transformer_engine import TECudaRNGStatesTracker
        from transformer_engine.pytorch import quantization

        trackers.append(TECudaRNGStatesTracker)

        quantization.get_device_compute_capability = lambda: tuple(CAPABILITY)
        quantization.torch.version.cuda = "13.0"  # what the GPU machine's torch is built with
    else:
        utils.get_te_version = lambda: TE_VERSION
        rope_utils.fused_apply_rotary_pos_emb = lambda *_: None
    for tracker in trackers:  # of a GPU's random numbers
        tracker.fork = lambda *_, **__: contextlib.nullcontext()


def ask(plan: dict[str, Any]) -> dict[str, Any]:
    """Why Megatron rejects the plan or what it changes of it, if it does, and what it adds."""
    given = plan["arguments"]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": ""} | plan["environment"]
    os.environ |= environment | {"RANK": "0", "WORLD_SIZE": str(plan["world_size"])}
    # Of a CPU: as training/cpu_standin.py says.
    CAPABILITY[:] = plan["capability"] or (10, 0)
    sys.argv = ["worker", *given]
    refused: str | None = None
    try:
        args = arguments.parse_args()
        before = {name: list(v) if isinstance(v, list) else v for name, v in vars(args).items()}
        arguments.validate_args(args)
        if changed := forced(given, before, vars(args)):
            return _answer("; ".join(finding.message for finding in changed))
        config = argument_utils.core_transformer_config_from_args(args)
        names = _given_names(given)
        refused = _differs(args, config, names)
        for step in STEPS:
            step(args, config)
        _layers(args, config, ModelConfig.model_validate(plan["model"]), plan["backend"])
    except SystemExit as error:
        return _answer(f"the parser ends with {error}")
    except Exception as error:
        return _answer(f"{type(error).__name__}: {error}")
    return _answer(refused, _silent(args, before, names))


def _answer(refused: str | None, silent: dict[str, str] | None = None) -> dict[str, Any]:
    return {"refused": refused, "silent": silent or {}}


# --- what comes after the arguments, step by step ---------------------------------------------


def _configurations(args: Namespace, config: TransformerConfig) -> None:
    if HAVE_TE or not args.use_precision_aware_optimizer:
        argument_utils.pretrain_cfg_container_from_args(args)


def _recipe(args: Namespace, config: TransformerConfig) -> None:
    """Transformer Engine's recipe, and whether the card supports it."""
    if not HAVE_TE or not (config.fp8 or config.fp4):
        return
    from transformer_engine.pytorch import quantization

    quantization._FP8_SUPPORT = quantization._MXFP8_SUPPORT = None
    quantization._NVFP4_SUPPORT = quantization._FP8_BLOCK_SCALING_SUPPORT = None
    quantization.check_recipe_support(
        get_fp4_recipe(config) if config.fp4 else get_fp8_recipe(config)
    )
    if config.fp4 and not (supported := quantization.check_nvfp4_support())[0]:
        raise RuntimeError(supported[1])


def _schedules(args: Namespace, config: TransformerConfig) -> None:
    """Learning rate and micro batches."""
    training.get_args = lambda: args
    training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
    ConstantNumMicroBatchesCalculator(
        args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False, rank=1
    )


def _groups(args: Namespace, config: TransformerConfig) -> None:
    """The process groups of all ranks."""
    if args.world_size <= LARGEST_WORLD:
        problem = _group_problem(
            args.world_size,
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            args.context_parallel_size,
            args.expert_model_parallel_size,
        )
        if problem:
            raise RuntimeError(problem)


@cache
def _group_problem(world: int, tp: int, pp: int, vpp: int | None, cp: int, ep: int) -> str | None:
    _live_groups.cache_clear()
    try:
        _make_groups(world, tp, pp, vpp, cp, ep)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _make_groups(world: int, tp: int, pp: int, vpp: int | None, cp: int, ep: int) -> None:
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
        create_gloo_process_groups=False,
    )


# --- the model ---------------------------------------------------------------------------------


def _layers(args: Namespace, config: TransformerConfig, model: ModelConfig, backend: str) -> None:
    """The embedding, the first block of the first stage, and the output layer, of one rank."""
    if backend == "te" and not HAVE_TE:
        return
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    vpp = args.virtual_pipeline_model_parallel_size
    _live_groups(tp, pp, vpp, args.context_parallel_size, args.expert_model_parallel_size)
    config.init_model_with_meta_device, config.perform_initialization = True, False
    if config.fp4 or args.fp8_recipe == "delayed":
        config.fp8_param = config.fp4_param = False  # their weights are made by kernels
    # Mixers whose kernels may not be here stand for attention, so that the rest is built.
    pattern = args.hybrid_layer_pattern.translate(str.maketrans("GM", "**"))
    period = model.pattern.translate(str.maketrans("GM", "**"))
    with _a_gpu_without_memory():
        build(
            model.model_copy(update={"pattern": period}),
            config,
            args.padded_vocab_size,
            "|".join(segment[: len(period)] for segment in pattern.split("|")),
            vp_stage=None if vpp is None else 0,
            backend=backend,  # type: ignore[arg-type]
        )


@lru_cache(maxsize=1)
def _live_groups(tp: int, pp: int, vpp: int | None, cp: int, ep: int) -> None:
    """Groups of the fewest ranks with these sizes, until the next call with others."""
    _make_groups(tp * pp * math.lcm(cp, ep), tp, pp, vpp, cp, ep)


@contextlib.contextmanager
def _a_gpu_without_memory() -> Iterator[None]:
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # the last model's
    there, here = torch.cuda.is_available, torch.cuda.current_device
    torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: torch.device("meta")
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.cuda.is_available, torch.cuda.current_device = there, here


STEPS: list[Callable[[Namespace, TransformerConfig], None]] = [
    _configurations,
    _recipe,
    _schedules,
    _groups,
]


# --- what was changed -------------------------------------------------------------------------


def _given_names(given: list[str]) -> set[str]:
    parser = arguments.add_megatron_arguments(None)
    options = [word for word in given if word.startswith("--")]
    return {parser._option_string_actions[option].dest for option in options}


def _differs(args: Namespace, config: TransformerConfig, names: set[str]) -> str | None:
    """A given value that the model's configuration holds differently."""
    for name in names:
        field = RENAMED.get(name, name)
        value, held = getattr(args, name, None), getattr(config, field, None)
        if hasattr(config, field) and type(value) is type(held) and value != held:
            return f"TransformerConfig.{field} is {held}, and the plan says {value}"
    return None


def _silent(args: Namespace, before: dict[str, Any], names: set[str]) -> dict[str, str]:
    """Arguments that the plan leaves to Megatron and that are not their own default afterwards."""
    changed = {}
    for name, value in before.items():
        if name in names or not hasattr(args, name):  # deleted: an option of old
            continue
        after = getattr(args, name)
        filled = getattr(args, FILLED[name], None) if name in FILLED else LEFT.get(name)
        if plain(value) != plain(after) and (value is not None or str(after) != str(filled)):
            changed[name] = f"{value} -> {after}"
    return changed


if __name__ == "__main__":
    main()
