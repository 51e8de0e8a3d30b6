"""Small prepared files and processes for the tests of data."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from training import cpu_standin

cpu_standin.install()  # before anything imports Megatron, for other tests of this process too

from planning.schema import DataConfig, TokenizerConfig
from training.data.tokenizers import ByteTokenizer, Tokenizer
from training.data.writer import Writer


def choice(kind: str = "indexed", **fields: Any) -> DataConfig:
    """data=<kind> with some fields of it changed."""
    values: dict[str, Any] = {
        "name": kind,
        "kind": kind,
        "paths": [],
        "train_paths": [],
        "valid_paths": [],
        "test_paths": [],
        "split": None,
        "tokenizer": TokenizerConfig(kind="none", path=None, vocab_size=None),
        "cache": ".cache",
        "workers": 0,
    }
    return DataConfig(**{**values, **fields})


def write(prefix: Path, texts: list[str], tokenizer: Tokenizer | None = None) -> str:
    writer = Writer(str(prefix), tokenizer or ByteTokenizer())
    for text in texts:
        writer.add(text)
    writer.close()
    return str(prefix)


def megatron_args(seq_length: int = 16, seed: int = 1234) -> SimpleNamespace:
    """The arguments of Megatron that the datasets are made from."""
    return SimpleNamespace(
        seed=seed,
        seq_length=seq_length,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask_in_dataloader=False,
        context_parallel_size=1,
    )


def null_tokenizer(vocab_size: int = 257) -> Any:
    from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=vocab_size
    )


def forked(function: Callable[..., Any], *ranks: tuple[Any, ...], timeout_s: float = 90) -> list:
    """What `function(*rank)` returns in a process for each rank, joined by gloo."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = [context.Pipe(duplex=False) for _ in ranks]

    def run(rank: int, arguments: tuple[Any, ...]) -> None:
        import torch

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", rank=rank, world_size=len(ranks))
        answers[rank][1].send(function(*arguments))
        torch.distributed.barrier()
        os._exit(0)

    processes = [
        context.Process(target=run, args=(rank, arguments)) for rank, arguments in enumerate(ranks)
    ]
    for process in processes:
        process.start()
    try:
        results = []
        for process, (receiver, _) in zip(processes, answers, strict=True):
            while not receiver.poll(0.05):
                timeout_s -= 0.05
                if timeout_s < 0 or not process.is_alive():
                    raise RuntimeError(f"rank {process.name} gave nothing")
            results.append(receiver.recv())
        return results
    finally:
        for process in processes:
            process.join(10)
            process.kill()
