"""Real text that is on every machine: the running Python's own standard library sources.

One document a file, tokenized by bytes, in Megatron's .bin/.idx, split by file into train, valid
and test (about 90/5/5). Cached under `cache_root/library_text/<key>`; the key is a digest of the
Python version, the files and this module's format, so that changed inputs give another dataset.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from planning.findings import ChoiceError, Finding, MachineError
from training.data.indexed import inspect
from training.data.tokenizers import ByteTokenizer
from training.data.writer import Writer

FORMAT = 1  # raised when the same sources would give other tokens or another split
SPLITS = ("train", "valid", "test")
EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
STALE_S = 3600  # a build takes seconds: a temporary folder this old was left by a killed one

Progress = Callable[[int, int], None]  # files written, files in all


@dataclass(frozen=True)
class Prefixes:
    """Where the three datasets are: `<prefix>.bin`, `.idx` and `.json`."""

    train: str
    valid: str
    test: str


def split_of(relative_path: str) -> str:
    """The split of a file, from its path alone: 90% train, 5% valid, 5% test."""
    share = int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:8], "big") / 2**64
    return "train" if share < 0.90 else "valid" if share < 0.95 else "test"


def sources(root: Path) -> Iterator[tuple[str, bytes]]:
    """(path relative to root, content) of every source file that is UTF-8, in order of path."""
    names = []
    for folder, inner, files in os.walk(root):  # rglob would look through all that is excluded
        inner[:] = [name for name in inner if name not in EXCLUDED]
        above = "" if (relative := os.path.relpath(folder, root)) == "." else f"{relative}/"
        names += [above + name for name in files if name.endswith(".py")]
    for name in sorted(names):
        content = (root / name).read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if content:
            yield name, content


def library_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def expected(cache_root: Path, root: Path | None = None) -> Prefixes | None:
    """The cached dataset of this Python, or None where it must be built. Imports no torch."""
    return _complete(_folder(cache_root, list(sources(root or library_root()))))


def build(cache_root: Path, progress: Progress | None = None, root: Path | None = None) -> Prefixes:
    """The dataset of this Python's sources, built unless it is cached.

    Safe when several processes build at once: each writes a folder of its own and renames it.
    Raises MachineError where there are no sources or the cache cannot be written.
    """
    root = root or library_root()
    documents = list(sources(root))
    if {split_of(name) for name, _ in documents} != set(SPLITS):
        raise MachineError(
            Finding(
                "library_text_sources",
                "error",
                "data",
                f"{root} holds {len(documents)} readable source files of the standard library: "
                "too few for data=library_text",
                "use a Python installed with its sources, data=mock, or data=indexed",
            )
        )
    folder = _folder(cache_root, documents)
    if found := _complete(folder):
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write(temporary, documents, progress)
            temporary.chmod(0o755)
            return _publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise MachineError(
            Finding(
                "library_text_cache",
                "error",
                "data.cache",
                f"cannot write the cache: {error}",
                "set data.cache to a folder that can be written, on a disk with 50 MB free",
            )
        ) from error


def _folder(cache_root: Path, documents: list[tuple[str, bytes]]) -> Path:
    digest = hashlib.sha256(f"{FORMAT} {platform.python_version()}".encode())
    for name, content in documents:
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return cache_root / "library_text" / digest.hexdigest()[:16]


def _prefixes(folder: Path) -> Prefixes:
    return Prefixes(*(str(folder / split) for split in SPLITS))


def _complete(folder: Path) -> Prefixes | None:
    prefixes = _prefixes(folder)
    try:
        for prefix in (prefixes.train, prefixes.valid, prefixes.test):
            inspect(prefix, "data.cache")
    except ChoiceError:
        return None
    return prefixes


def _write(folder: Path, documents: list[tuple[str, bytes]], progress: Progress | None) -> None:
    tokenizer = ByteTokenizer()
    writers = {split: Writer(str(folder / split), tokenizer) for split in SPLITS}
    for done, (name, content) in enumerate(documents, start=1):
        writers[split_of(name)].add(content.decode("utf-8"))
        if progress:
            progress(done, len(documents))
    for writer in writers.values():
        writer.close()


def _publish(temporary: Path, folder: Path) -> Prefixes:
    """Give the finished folder its name; another process's finished one is as good."""
    for _ in range(3):
        try:
            temporary.rename(folder)
        except OSError:  # the name is taken
            if found := _complete(folder):
                return found
            # Not one of ours, which appear whole: damaged since. Move it out of the way.
            broken = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            with suppress(FileNotFoundError):  # another process did
                folder.rename(broken)
            shutil.rmtree(broken, ignore_errors=True)
        else:
            return _prefixes(folder)
    raise OSError(f"{folder} keeps coming back damaged")


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(".*"):
        try:
            stale = time.time() - path.stat().st_mtime > STALE_S
        except FileNotFoundError:
            continue
        if stale:
            shutil.rmtree(path, ignore_errors=True)
