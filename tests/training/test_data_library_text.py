"""The standard library's sources as a dataset: what is in it, when it is built again."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from planning.findings import MachineError
from tests.training import data_files  # noqa: F401  (before Megatron is imported)
from training.data import indexed, library_text
from training.data.library_text import SPLITS, Prefixes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small library of 60 files."""
    folder = tmp_path / "lib"
    for number in range(60):
        file = folder / f"package_{number % 3}" / f"module_{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# module {number}\nVALUE = {number!r}\nNAME = 'é'\n")
    return folder


def texts(prefix: str) -> list[str]:
    """The documents of a dataset, by Megatron's own reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    assert all(document[-1] == 256 and document[:-1].max() < 256 for document in dataset)
    return [bytes(document[:-1].tolist()).decode() for document in dataset]


def test_every_file_is_one_document_of_one_split(root: Path, tmp_path: Path) -> None:
    prefixes = library_text.build(tmp_path / "cache", root=root)
    for split in SPLITS:
        expected = [
            file.read_text()
            for file in sorted(root.rglob("*.py"), key=lambda f: f.relative_to(root).as_posix())
            if library_text.split_of(file.relative_to(root).as_posix()) == split
        ]
        assert texts(getattr(prefixes, split)) == expected
        assert expected


def test_the_split_is_about_90_5_5_and_follows_the_path_alone() -> None:
    counts = Counter(library_text.split_of(f"package/module_{n}.py") for n in range(20_000))
    assert counts["train"] / 20_000 == pytest.approx(0.90, abs=0.01)
    assert counts["valid"] / 20_000 == pytest.approx(0.05, abs=0.01)
    assert [library_text.split_of(name) for name in ("abc.py", "ast.py", "re/__init__.py")] == [
        library_text.split_of(name) for name in ("abc.py", "ast.py", "re/__init__.py")
    ]


def test_what_is_left_out(root: Path) -> None:
    kept = {name for name, _ in library_text.sources(root)}
    for name in (
        "site-packages/a.py",
        "test/test_a.py",
        "idlelib/idle_test/test_a.py",
        "package_0/tests/a.py",
        "package_0/data.txt",
    ):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("text")
    (root / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# é\n".encode("latin-1"))
    (root / "empty.py").touch()
    assert {name for name, _ in library_text.sources(root)} == kept


def test_this_pythons_library_is_enough_text() -> None:
    """The default run reads 0.4 M tokens; the text must be several times that."""
    sizes = Counter[str]()
    for name, content in library_text.sources(library_text.library_root()):
        sizes[library_text.split_of(name)] += len(content)
    assert sizes["train"] > 5_000_000
    assert sizes["valid"] > 100_000
    assert sizes["test"] > 100_000


def test_a_cached_dataset_is_not_built_again(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert library_text.expected(cache, root) is None
    steps: list[tuple[int, int]] = []
    prefixes = library_text.build(cache, lambda done, total: steps.append((done, total)), root)
    assert steps[-1] == (60, 60)
    assert library_text.expected(cache, root) == prefixes
    assert library_text.build(cache, lambda *_: pytest.fail("built again"), root) == prefixes
    info = indexed.inspect(prefixes.train)
    assert info.tokenizer is not None
    assert info.tokenizer["kind"] == "byte"


def test_changed_sources_are_another_dataset(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = library_text.build(cache, root=root)
    file = root / "package_0" / "module_0.py"
    stat = file.stat()
    file.write_text(file.read_text().replace("module 0", "module A"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time
    assert library_text.expected(cache, root) is None
    after = library_text.build(cache, root=root)
    assert after != before
    assert any("module A" in text for split in SPLITS for text in texts(getattr(after, split)))
    assert library_text.expected(cache, root) == after


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_cache_is_built_again(root: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    prefixes = library_text.build(cache, root=root)
    good = Path(f"{prefixes.valid}.bin").read_bytes()
    if damage == "truncated":
        Path(f"{prefixes.valid}.bin").write_bytes(good[:-2])
    else:
        Path(f"{prefixes.valid}.bin").unlink()
    assert library_text.expected(cache, root) is None
    assert library_text.build(cache, root=root) == prefixes
    assert Path(f"{prefixes.valid}.bin").read_bytes() == good
    assert [path.name for path in (cache / "library_text").iterdir()] == [
        Path(prefixes.valid).parent.name
    ]


def test_processes_that_build_at_once(root: Path, tmp_path: Path) -> None:
    """All get the same dataset, whole, and no temporary folder stays."""
    from training.data.writer import builder_classes

    builder_classes()  # imported here, so that the forks really meet
    cache = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    gate, answers = context.Barrier(6), context.Queue()

    def run() -> None:
        gate.wait()
        answers.put(library_text.build(cache, root=root))

    processes = [context.Process(target=run) for _ in range(6)]
    for process in processes:
        process.start()
    results: list[Prefixes] = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(set(results)) == 1
    assert len(list((cache / "library_text").iterdir())) == 1
    assert sum(len(texts(getattr(results[0], split))) for split in SPLITS) == 60


def test_folders_of_killed_builds_are_removed(root: Path, tmp_path: Path) -> None:
    parent = tmp_path / "cache" / "library_text"
    stale, running = parent / ".0123.abc", parent / ".0123.def"
    for folder in (stale, running):
        folder.mkdir(parents=True)
    long_ago = time.time() - library_text.STALE_S - 60
    os.utime(stale, (long_ago, long_ago))
    library_text.build(tmp_path / "cache", root=root)
    assert not stale.exists()
    assert running.exists()


def test_no_sources(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(MachineError, match="holds 0 readable source files"):
        library_text.build(tmp_path / "cache", root=tmp_path / "lib")


def test_a_cache_that_cannot_be_written(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot write the cache") as caught:
        library_text.build(tmp_path / "file" / "cache", root=root)
    assert caught.value.findings[0].setting == "data.cache"
