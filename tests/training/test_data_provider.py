"""The datasets that Megatron's loop gets: the right text, in one order under every layout."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.training.data_files import (
    choice,
    forked,
    megatron_args,
    null_tokenizer,
    write,
)
from training.data import provider
from training.data.library_text import Prefixes

GLOBAL_BATCH = 8


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a: 100 documents of 20 tokens; b: 50 of 10; their bytes tell them apart."""
    folder = tmp_path_factory.mktemp("texts")
    write(folder / "a", ["a" * 19] * 100)
    write(folder / "b", ["b" * 9] * 50)
    write(folder / "numbers", [f"{number:019d}" for number in range(200)])
    return folder


def datasets(
    cache: Path, samples: tuple[int, int, int], kind: str = "indexed", **fields: Any
) -> list[Any]:
    library_text = fields.pop("library_text", None)
    config = provider.dataset_config(
        choice(kind, **fields), library_text, megatron_args(), null_tokenizer()
    )
    return list(provider.build(config, cache, samples, lambda: True))


def rows(dataset: Any, samples: int | None = None) -> numpy.ndarray:
    """Tokens of the samples, one a row."""
    count = len(dataset) if samples is None else samples
    return numpy.stack([dataset[sample]["tokens"].numpy() for sample in range(count)])


# --- what is read -------------------------------------------------------------------------------


def test_a_sample_is_text_and_labels_are_its_next_tokens(texts: Path, tmp_path: Path) -> None:
    train, valid, test = datasets(
        tmp_path, (100, 4, 4), paths=[str(texts / "numbers")], split="80,10,10"
    )
    sample = train[0]
    assert sorted(sample) == ["labels", "loss_mask", "position_ids", "tokens"]  # no mask
    assert sample["tokens"].shape == sample["labels"].shape == (16,)
    assert (sample["labels"][:-1] == sample["tokens"][1:]).all()
    assert sample["position_ids"].tolist() == list(range(16))
    assert (sample["loss_mask"] == 1).all()  # the end of a document is learnt too
    assert set(rows(train).ravel()) == {*b"0123456789", 256}
    assert len(train) >= 100
    assert len(valid) >= 4
    assert len(test) >= 4


def test_splits_do_not_overlap(texts: Path, tmp_path: Path) -> None:
    """Documents 0-159 train, 160-179 validate, 180-199 test, as the split says."""
    splits = datasets(tmp_path, (1, 1, 1), paths=[str(texts / "numbers")], split="80,10,10")
    seen = []
    for dataset in splits:
        stream = bytes(numpy.where(rows(dataset) < 256, rows(dataset), 32).astype("u1").tobytes())
        seen.append({int(word) for word in stream.split() if len(word) == 19})
    assert seen[0] <= set(range(160))
    assert seen[1] <= set(range(160, 180))
    assert seen[2] <= set(range(180, 200))
    assert all(seen)


def test_library_text_is_split_by_its_files(texts: Path, tmp_path: Path) -> None:
    prefixes = Prefixes(str(texts / "a"), str(texts / "b"), str(texts / "numbers"))
    train, valid, test = datasets(tmp_path, (50, 20, 8), "library_text", library_text=prefixes)
    assert set(rows(train).ravel()) == {ord("a"), 256}
    assert set(rows(valid).ravel()) == {ord("b"), 256}
    assert ord("0") in rows(test)


def test_datasets_of_their_own_for_each_split(texts: Path, tmp_path: Path) -> None:
    train, valid, test = datasets(
        tmp_path, (50, 20, 0), train_paths=[str(texts / "a")], valid_paths=[str(texts / "b")]
    )
    assert set(rows(train).ravel()) == {ord("a"), 256}
    assert set(rows(valid).ravel()) == {ord("b"), 256}
    assert test is None


def share_of_a(dataset: Any, samples: int) -> float:
    from_a = [(row == ord("a")).any() for row in rows(dataset, samples)]
    return sum(from_a) / samples


@pytest.mark.parametrize("flat", [False, True])
def test_weights_are_shares_of_the_samples(texts: Path, tmp_path: Path, flat: bool) -> None:
    pairs: list[Any] = [[3, str(texts / "a")], [1, str(texts / "b")]]
    paths = [part for pair in pairs for part in pair] if flat else pairs
    train, _, _ = datasets(tmp_path, (40, 0, 0), paths=paths, split="1")
    assert share_of_a(train, 40) == 0.75


def test_without_weights_shares_follow_the_tokens_for_any_number_of_epochs(
    texts: Path, tmp_path: Path
) -> None:
    """a has 2000 tokens, b 500; 500 samples of 16 tokens are more than three epochs."""
    paths = [str(texts / "a"), str(texts / "b")]
    train, _, _ = datasets(tmp_path, (500, 0, 0), paths=paths, split="1")
    assert len(train) >= 500
    assert share_of_a(train, 500) == 0.8


def test_an_empty_split_that_nothing_reads(texts: Path, tmp_path: Path) -> None:
    """100 documents leave none for 0.1%; Megatron alone would loop forever over them."""
    train, valid, test = datasets(tmp_path, (8, 0, 0), paths=[str(texts / "a")], split="998,1,1")
    assert train is not None
    assert valid is None
    assert test is None


def test_mock_data(tmp_path: Path) -> None:
    train, _, _ = datasets(tmp_path, (8, 8, 8), "mock")
    row = rows(train, 1)[0]
    inside = row[:-1] < 256
    assert ((row[1:] - row[:-1])[inside & (row[1:] > 1) & (row[1:] < 256)] == 1).all()
    assert row.max() < 257


# --- the order ----------------------------------------------------------------------------------


def global_batches(
    dataset: Any, data_parallel: int, micro_batch: int, consumed: int, steps: int
) -> list[list[int]]:
    """Sample numbers of each step, by micro-batch and rank, from Megatron's samplers."""
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    ranks = [
        iter(
            MegatronPretrainingSampler(
                total_samples=len(dataset),
                consumed_samples=consumed,
                micro_batch_size=micro_batch,
                data_parallel_rank=rank,
                data_parallel_size=data_parallel,
            )
        )
        for rank in range(data_parallel)
    ]
    accumulation = GLOBAL_BATCH // (micro_batch * data_parallel)
    return [
        [sample for _ in range(accumulation) for rank in ranks for sample in next(rank)]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("data_parallel", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_every_split_of_the_global_batch_reads_the_same_samples(
    texts: Path, tmp_path: Path, data_parallel: int, micro_batch: int
) -> None:
    train, _, _ = datasets(tmp_path, (48, 0, 0), paths=[str(texts / "numbers")], split="1")
    expected = [list(range(8 * step, 8 * step + 8)) for step in range(6)]
    assert global_batches(train, data_parallel, micro_batch, 0, 6) == expected
    # a run resumed after two steps, under this layout
    assert global_batches(train, data_parallel, micro_batch, 16, 4) == expected[2:]


def test_the_order_depends_on_the_seed_alone(texts: Path, tmp_path: Path) -> None:
    def order(seed: int, cache: str) -> numpy.ndarray:
        config = provider.dataset_config(
            choice(paths=[str(texts / "numbers")], split="1"),
            None,
            megatron_args(seed=seed),
            null_tokenizer(),
        )
        return rows(provider.build(config, tmp_path / cache, (100, 0, 0), lambda: True)[0], 100)

    assert (order(1, "x") == order(1, "y")).all()
    assert not (order(1, "x") == order(2, "x")).all()


@pytest.mark.parametrize("paths", [["numbers"], [[3, "numbers"], [1, "a"]]], ids=["one", "blend"])
def test_a_longer_run_within_an_epoch_keeps_the_order(
    texts: Path, tmp_path: Path, paths: list[Any]
) -> None:
    """So that a run resumed with more steps goes on where it was."""
    full = [
        str(texts / path) if isinstance(path, str) else [path[0], str(texts / path[1])]
        for path in paths
    ]
    short, long = (
        datasets(tmp_path, (samples, 0, 0), paths=full, split="1")[0] for samples in (40, 200)
    )
    assert (rows(short, 40) == rows(long, 40)).all()


# --- the cached indices -------------------------------------------------------------------------


def test_data_prepared_anew_under_its_name_is_read_anew(tmp_path: Path) -> None:
    """Megatron's own cache knows a dataset by its name, and would take the old lengths."""
    prefix = tmp_path / "text"
    for letter, count in (("a", 100), ("b", 20)):
        write(prefix, [letter * 19] * count)
        train, _, _ = datasets(tmp_path, (8, 0, 0), paths=[str(prefix)], split="1")
        assert set(rows(train).ravel()) == {ord(letter), 256}


@pytest.mark.parametrize("written", [1, 2, 3])
def test_a_process_killed_while_it_writes_the_indices(
    texts: Path, tmp_path: Path, written: int
) -> None:
    """Document, sample and shuffle index: killed with the last one half written."""
    import multiprocessing

    expected = rows(
        datasets(tmp_path / "whole", (40, 0, 0), paths=[str(texts / "a")], split="1")[0]
    )
    save: Callable[..., None] = numpy.save

    def killed() -> None:
        calls = 0

        def half(path: str, array: numpy.ndarray, **options: Any) -> None:
            nonlocal calls
            calls += 1
            save(path, array, **options)
            if calls == written:
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        numpy.save = half
        datasets(tmp_path / "cache", (40, 0, 0), paths=[str(texts / "a")], split="1")

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    train, _, _ = datasets(tmp_path / "cache", (40, 0, 0), paths=[str(texts / "a")], split="1")
    assert (rows(train) == expected).all()


@pytest.mark.parametrize("shared", [True, False], ids=["one disk", "a disk a node"])
def test_ranks_read_the_same_order(texts: Path, tmp_path: Path, shared: bool) -> None:
    """Two ranks of one node, and two nodes of one rank whose disks are their own."""
    paths = [[1, str(texts / "a")], [1, str(texts / "numbers")]]

    def run(cache: Path, local_rank: int) -> list[list[int]]:
        os.environ["LOCAL_RANK"] = str(local_rank)
        return rows(datasets(cache, (40, 0, 0), paths=paths, split="1")[0], 40).tolist()

    ranks = [(tmp_path / "0", 0), (tmp_path / "0", 1) if shared else (tmp_path / "1", 0)]
    datasets(tmp_path / "warm", (1, 0, 0), paths=paths, split="1")  # imports, before the fork
    first, second = forked(run, *ranks)
    assert first == second
    assert (tmp_path / "1").exists() != shared


# --- the batch ----------------------------------------------------------------------------------


def test_tensor_parallel_ranks_get_the_batch_of_the_first(texts: Path, tmp_path: Path) -> None:
    """Two ranks; only the first has a data iterator."""
    train, _, _ = datasets(tmp_path, (4, 0, 0), paths=[str(texts / "numbers")], split="1")
    micro_batch = {key: value.repeat(2, 1) for key, value in train[0].items()}

    def run(loader: Any) -> dict[str, Any]:
        from megatron.core import parallel_state
        from megatron.training import global_vars

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        args = megatron_args()
        args.micro_batch_size, args.pipeline_model_parallel_size = 2, 1
        global_vars._GLOBAL_ARGS = args
        from training.data.batch import get_batch

        assert provider.is_dataset_built_on_rank() == (loader is not None)
        batch = get_batch(loader and iter(loader))
        return {key: None if value is None else value.tolist() for key, value in batch.items()}

    first, second = forked(run, ([micro_batch],), (None,))
    assert first == second
    assert first["attention_mask"] is None
    assert first["tokens"] == [train[0]["tokens"].tolist()] * 2
    assert first["labels"] == [train[0]["labels"].tolist()] * 2
    assert first["position_ids"] == [list(range(16))] * 2
    assert first["loss_mask"] == [[1.0] * 16] * 2


def test_pipeline_stages_get_what_they_need(texts: Path, tmp_path: Path) -> None:
    """First: tokens. Last: labels. Between them: nothing, and the iterator is not read."""
    train, _, _ = datasets(tmp_path, (4, 0, 0), paths=[str(texts / "numbers")], split="1")
    micro_batch = {key: value[None] for key, value in train[0].items()}

    def run(loader: list[Any]) -> dict[str, bool]:
        from megatron.core import parallel_state
        from megatron.training import global_vars

        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
        args = megatron_args()
        args.micro_batch_size, args.pipeline_model_parallel_size = 1, 3
        global_vars._GLOBAL_ARGS = args
        from training.data.batch import get_batch

        batch = get_batch(iter(loader) if provider.is_dataset_built_on_rank() else None)
        return {key: value is not None for key, value in batch.items()}

    first, middle, last = forked(run, ([micro_batch],), ([micro_batch],), ([micro_batch],))
    assert [key for key, there in first.items() if there] == ["tokens", "position_ids"]
    assert [key for key, there in middle.items() if there] == []
    assert [key for key, there in last.items() if there] == ["labels", "loss_mask"]
