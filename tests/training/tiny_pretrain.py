"""Megatron's own pretrain of a tiny model on a CPU, several runs under one torchrun.

`tiny_pretrain.py RUNS.json`, a list of {"name", "ranks", "arguments"}: each run has the listed
ranks of torchrun as its world, Megatron's arguments beside ARGUMENTS, and a process of its own,
forked from one that has Megatron imported (which takes some 15 s). A rank that a run does not list
goes on with the next. Each rank writes NAME-RANK.json beside RUNS.json: the loss of each of its
micro batches and what `facts` finds. Run it with SLIPWAY_HALF_GEMM=emulate, for `gemms`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from training import cpu_standin

A = torch.randn(8, 48, 64, generator=torch.Generator().manual_seed(0))
B = torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(1))
BEFORE = [A[0] @ B[0], A @ B, A.cumsum(0)[7].T @ A[0]]

cpu_standin.install()

import megatron.core.tokenizers.text  # noqa: F401 - with the next, what every run would import
import torch._dynamo
import yaml
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args

from models.build import build
from planning.schema import ModelConfig
from training.step import forward_step

CONF = Path(sys.path[0]) / "conf" / "model" / "gpt_tiny.yaml"
MODEL = ModelConfig.model_validate(yaml.safe_load(CONF.read_text()))

# Dropout, so that a resumed run continues only with the random numbers of the stopped one.
ARGUMENTS = """
--hybrid-layer-pattern *-*- --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4
--seq-length 32 --max-position-embeddings 32 --vocab-size 128 --mock-data
--tokenizer-type NullTokenizer --position-embedding-type rope --normalization RMSNorm
--disable-bias-linear --swiglu --transformer-impl local --attention-backend unfused
--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 5e-3 --min-lr 5e-4
--lr-decay-style cosine --lr-warmup-iters 1 --attention-dropout 0.1 --hidden-dropout 0.1
--distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-rope-fusion
--no-persist-layer-norm --num-workers 0 --eval-iters 0 --eval-interval 1000 --log-interval 1
--distributed-timeout-minutes 1
""".split()


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    args = get_args()
    return build(
        MODEL.model_copy(update={"tied_embeddings": not args.untie_embeddings_and_output_weights}),
        config or core_transformer_config_from_args(args),
        args.padded_vocab_size,
        args.hybrid_layer_pattern,
        pre_process,
        post_process,
        vp_stage,
        pg_collection,
        backend="torch",
    )


def datasets(samples: Any, vp_stage: int | None = None) -> Any:
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=get_args().seq_length,
        split="90,5,5",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


datasets.is_distributed = True


def train(arguments: list[str]) -> list[float]:
    """The losses of this rank's micro batches."""
    sys.argv = ["tiny_pretrain.py", *ARGUMENTS, *arguments]
    container = pretrain_cfg_container_from_args(parse_and_validate_args())
    losses = []

    def recorded(loss_of: Any, token_losses: torch.Tensor) -> Any:
        total, tokens, report = loss_of(token_losses)
        losses.append((total / tokens).item())
        return total, tokens, report

    def step(iterator: Any, model: torch.nn.Module) -> Any:
        token_losses, loss_of = forward_step(iterator, model)
        return token_losses, partial(recorded, loss_of)

    pretrain(container, datasets, ModelType.encoder_or_decoder, step, model_provider=model_provider)
    return losses


def facts() -> dict[str, Any]:
    """What the stand-in answers, in the world of the run before."""
    rank, cuda = torch.distributed.get_rank(), torch.device("cuda", 0)
    average = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(average, torch.distributed.ReduceOp.AVG)
    halves = torch.arange(torch.distributed.get_world_size()) + 1.0
    shard = torch.empty(1)
    premul = torch.distributed._make_nccl_premul_sum(0.5)
    torch.distributed.reduce_scatter_tensor(shard, halves, premul)
    made = [torch.zeros(1, device="cuda"), torch.ones(1, device=0), torch.rand(1).to(cuda)]
    made.append(made[0].new_empty(1, device=torch.cuda.current_device()))
    return {
        "average": average.item(),
        "shard_of_halves": shard.item(),
        "halves": halves.tolist(),
        "devices": [tensor.device.type for tensor in made],
        "available": torch.cuda.is_available(),
        "type": torch.zeros(1).type(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def gemms() -> dict[str, bool]:
    """Whether each product of half-precision matrices is FP32's, rounded, and FP32's is its own."""
    same: dict[str, bool] = {
        "fp32": all(map(torch.equal, BEFORE, [A[0] @ B[0], A @ B, A.cumsum(0)[7].T @ A[0]]))
    }
    for dtype in (torch.bfloat16, torch.float16):

        def check(name: str, got: torch.Tensor, exact: torch.Tensor, dtype: Any = dtype) -> None:
            same[f"{name} {dtype}"] = got.dtype == dtype and torch.equal(got, exact.to(dtype))

        a, b = A.to(dtype).requires_grad_(), B.to(dtype).requires_grad_()
        wide_a, wide_b = a.detach().float(), b.detach().float()
        x, w, bias = a[0], b[0].T, b.detach()[1, 0]
        y = torch.nn.functional.linear(x, w)
        check("linear", y, wide_a[0] @ wide_b[0])
        check("linear with bias", torch.nn.functional.linear(x, w, bias),
              torch.addmm(bias.float(), wide_a[0], wide_b[0]))  # fmt: skip
        check(
            "matmul of 3 dimensions", a @ w.T, (wide_a.reshape(-1, 64) @ wide_b[0]).view(8, 48, 32)
        )
        g = torch.randn_like(y)
        of_x, of_w = torch.autograd.grad(y, (x, w), g)
        check("gradient of input", of_x, g.float() @ wide_b[0].T)
        check("gradient of weight", of_w, g.float().T @ wide_a[0])

        y = torch.bmm(a, b)
        check("bmm", y, torch.bmm(wide_a, wide_b))
        g = torch.randn_like(y)
        of_a, of_b = torch.autograd.grad(y, (a, b), g)
        check("gradient of bmm, left", of_a, torch.bmm(g.float(), wide_b.transpose(1, 2)))
        check("gradient of bmm, right", of_b, torch.bmm(wide_a.transpose(1, 2), g.float()))
        # As Megatron's attention calls it: an uninitialized tensor times 0.
        nothing = torch.full_like(y, float("nan"))
        check("baddbmm", torch.baddbmm(nothing, a, b, beta=0.0, alpha=0.125),
              torch.baddbmm(nothing.float(), wide_a, wide_b, beta=0.0, alpha=0.125))  # fmt: skip
        out = torch.empty(0, dtype=dtype)
        torch.matmul(a.detach(), b.detach(), out=out)
        check("bmm to a given tensor", out, torch.bmm(wide_a, wide_b))
    return same


def main(file: Path) -> int:
    here, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # each run has its own store
    for index, run in enumerate(json.loads(file.read_text()), start=1):
        if here not in run["ranks"]:
            continue
        if child := os.fork():
            if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                return abs(status)
            continue
        rank, world = run["ranks"].index(here), len(run["ranks"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ["MASTER_PORT"] = str(port + index)
        try:
            result = {"losses": train(run["arguments"]), **facts(), "gemms": gemms()}
            (file.parent / f"{run['name']}-{rank}.json").write_text(json.dumps(result))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
