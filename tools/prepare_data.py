"""Make Megatron's .bin/.idx from JSONL, Parquet or text files.

The inputs are cut into shards; each is tokenized by one process and kept in PREFIX.work until all
are done, then they are joined in the order of the inputs. Started again after any interruption,
finished shards are not done again. The result does not depend on --workers or on interruptions.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from planning.findings import ChoiceError, Finding, MachineError, Refusal
from planning.schema import TokenizerConfig
from training.data import documents, tokenizers
from training.data.documents import Bad, Piece
from training.data.indexed import SIDECAR_VERSION
from training.orphans import kill_me_with

FILES = (".bin", ".idx", ".json")
SHARD_MIB = 16
SHOWN = 5  # places of unreadable documents that the report names
MOVING = "moving.json"  # in the work folder: all is joined, and the files get their names


class BadInput(ChoiceError):
    """A document that cannot be read, without --skip-bad."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            Finding(
                "bad_document",
                "error",
                where,
                reason,
                "correct it, or go on without such documents with --skip-bad",
            )
        )

    def __reduce__(self) -> tuple[type, tuple[str, str]]:  # it crosses processes
        finding = self.findings[0]
        return BadInput, (finding.setting, finding.message)


@dataclass(frozen=True)
class Shard:
    """A share of the inputs; `prefix`: its files in the work folder, named by what goes in."""

    prefix: Path
    pieces: list[Piece]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Report:
    """What a shard gave. `bad_places`: the first few."""

    documents: int
    tokens: int
    empty: int
    bad: int
    bad_places: list[str]


@dataclass(frozen=True)
class Reading:
    """How documents are read."""

    tokenizer: tokenizers.Tokenizer
    text_key: str
    unit: str
    skip_bad: bool


# --- one shard ----------------------------------------------------------------------------------


def tokenize(shard: Shard, reading: Reading) -> Report:
    """Write the shard's files. Its .json comes last and says that it is whole."""
    from training.data.writer import Writer

    temporary = shard.prefix.with_name(f"{shard.prefix.name}.{os.getpid()}")
    writer = Writer(str(temporary), reading.tokenizer)
    empty, bad, places = 0, 0, []
    for piece in shard.pieces:
        for document in documents.read(piece, reading.text_key, reading.unit):
            if isinstance(document, Bad):
                if not reading.skip_bad:
                    raise BadInput(document.where, document.reason)
                bad += 1
                places.append(f"{document.where}: {document.reason}")
            elif not document.strip() or not writer.add(document):
                empty += 1
    writer.close()
    report = Report(writer.documents, writer.tokens, empty, bad, places[:SHOWN])
    Path(f"{temporary}.json").write_text(json.dumps(asdict(report)))
    for suffix in FILES:
        os.replace(f"{temporary}{suffix}", f"{shard.prefix}{suffix}")
    return report


def finished(shard: Shard, reading: Reading) -> Report | None:
    """The report of a shard that is whole already."""
    try:
        report = Report(**json.loads(Path(f"{shard.prefix}.json").read_text()))
    except (FileNotFoundError, ValueError):
        return None
    # Made with --skip-bad, and now they are errors: it has to be read again to say where.
    return None if report.bad and not reading.skip_bad else report


def plan_shards(work: Path, groups: Sequence[list[Piece]], reading: Reading) -> list[Shard]:
    settings = [
        SIDECAR_VERSION,
        reading.tokenizer.fingerprint,
        reading.tokenizer.end_of_document,
        reading.text_key,
        reading.unit,
    ]
    planned = []
    for index, group in enumerate(groups):
        inputs = [asdict(piece) for piece in group]
        key = hashlib.sha256(json.dumps([index, settings, inputs]).encode()).hexdigest()[:16]
        planned.append(Shard(work / f"{index:06d}-{key}", group))
    return planned


# --- all shards ---------------------------------------------------------------------------------

_reading: Reading  # in a worker process


def _start_worker(reading: Reading, parent: int) -> None:
    global _reading
    kill_me_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _reading = reading


def _work(shard: Shard) -> Report:
    return tokenize(shard, _reading)


def tokenize_all(
    todo: Sequence[Shard], reading: Reading, workers: int, done: Callable[[Shard, Report], None]
) -> None:
    """Tokenize the shards, calling `done` for each as it ends, in any order."""
    if workers == 1 or len(todo) == 1:
        for shard in todo:
            done(shard, tokenize(shard, reading))
        return
    # Forked, so that the long imports and the tokenizer are there already; the pool forks all its
    # processes at the first submit, before it or the display starts a thread.
    executor = ProcessPoolExecutor(
        min(workers, len(todo)),
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(reading, os.getpid()),
    )
    try:
        running = {executor.submit(_work, shard): shard for shard in todo}
        while running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                done(running.pop(future), future.result())
    except BrokenProcessPool as error:
        raise MachineError(
            Finding(
                "worker_killed",
                "error",
                "--workers",
                "a worker process was killed, most likely for want of memory",
                "use fewer workers; finished shards are kept",
            )
        ) from error
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
        executor.shutdown(cancel_futures=True)


def join(work: Path, shards: Sequence[Shard], reports: Sequence[Report], reading: Reading) -> None:
    """Write work/joined.{bin,idx,json} from the shards, in order."""
    from training.data.writer import Writer

    writer = Writer(str(work / "joined"), reading.tokenizer)
    for shard, report in zip(shards, reports, strict=True):
        writer.add_prefix(str(shard.prefix), report.documents, report.tokens)
    writer.close()


# --- the command --------------------------------------------------------------------------------


class Display:
    """A bar on a terminal, a line now and then in a log; both on stderr."""

    EVERY_S = 10

    def __init__(self, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        self._total, self._done, self._tokens = total, done, 0
        self._start = self._last = time.monotonic()
        self._bar = Progress(
            TextColumn("tokenizing"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, speed="")
        self._started = False

    def step(self, size: int, tokens: int) -> None:
        self._done += size
        self._tokens += tokens
        now = time.monotonic()
        speed = f"{self._tokens / max(now - self._start, 1e-9):,.0f} tokens/s"
        if not self._bar.disable:
            if not self._started:
                self._bar.start()
                self._started = True
            self._bar.update(self._task, completed=self._done, speed=speed)
        elif now - self._last > self.EVERY_S:
            self._last = now
            print(f"tokenized {self._done / self._total:.0%}, {speed}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        if self._started:
            self._bar.stop()


def prepare(arguments: argparse.Namespace) -> str:
    """Do all of it; the report. Raises Refusal with what is wrong."""
    prefix = Path(arguments.output).expanduser()
    reading = Reading(
        tokenizers.load(
            TokenizerConfig(
                kind=arguments.tokenizer, path=arguments.tokenizer_path, vocab_size=None
            ),
            arguments.end_of_document,
        ),
        arguments.text_key,
        arguments.document,
        arguments.skip_bad,
    )
    work = prefix.with_name(f"{prefix.name}.work")
    if not (work / MOVING).exists():
        _refuse_existing(prefix)
    files = documents.find(arguments.inputs, arguments.format)
    shard_bytes = max(1, int(arguments.shard_mib * 2**20))
    groups = documents.shards(files, reading.text_key, reading.unit, shard_bytes)
    if not groups:
        raise _error("inputs", "all inputs are empty", "name files that hold text")
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _error("--output", f"cannot write there: {error}", "name another prefix") from error
    with _locked(work, prefix):
        shards = plan_shards(work, groups, reading)
        return _prepare(prefix, work, shards, reading, arguments.workers, len(files))


def _prepare(
    prefix: Path, work: Path, shards: list[Shard], reading: Reading, workers: int, files: int
) -> str:
    this = [shard.prefix.name for shard in shards]
    if (moving := work / MOVING).exists():  # an earlier start was stopped while it moved
        earlier = json.loads(moving.read_text())
        _move(work, prefix)
        if earlier["shards"] == this:
            return str(earlier["summary"])
    _refuse_existing(prefix)
    for leftover in work.glob("*-*.*.*"):  # of processes that were killed: shard.pid.suffix
        leftover.unlink()

    reports = {shard.prefix: finished(shard, reading) for shard in shards}
    todo = [shard for shard in shards if reports[shard.prefix] is None]
    if kept := len(shards) - len(todo):
        print(f"{kept} of {len(shards)} shards are there from an earlier start", file=sys.stderr)
    total = sum(shard.size for shard in shards)
    print(
        f"tokenizing {total / 1e6:,.1f} MB: {len(todo)} shards, "
        f"{max(1, min(workers, len(todo)))} at a time",
        file=sys.stderr,
    )
    from training.data.writer import builder_classes

    builder_classes()  # before the processes start, and outside of what is timed
    display = Display(total, total - sum(shard.size for shard in todo))
    start = time.monotonic()
    made = 0

    def done(shard: Shard, report: Report) -> None:
        nonlocal made
        reports[shard.prefix] = report
        made += report.tokens
        display.step(shard.size, report.tokens)

    try:
        if todo:
            tokenize_all(todo, reading, workers, done)
    finally:
        display.stop()
    elapsed = time.monotonic() - start
    ordered = [report for shard in shards if (report := reports[shard.prefix])]
    if not any(report.documents for report in ordered):
        raise _error("inputs", "no document holds text", "name files that hold text")
    if total > 2**30:
        print(f"joining {len(shards)} shards", file=sys.stderr)
    join(work, shards, ordered, reading)
    summary = _summary(prefix, ordered, files, made, elapsed, reading)
    beside = work / f"{MOVING}.new"
    beside.write_text(json.dumps({"shards": this, "summary": summary}))
    beside.rename(moving)
    _move(work, prefix)
    return summary


def _move(work: Path, prefix: Path) -> None:
    """Give the joined files their names; what an earlier start moved is not there any more."""
    for suffix in FILES:
        source, target = work / f"joined{suffix}", Path(f"{prefix}{suffix}")
        if source.exists():
            if target.exists():
                _refuse_existing(prefix)
            source.rename(target)
    shutil.rmtree(work, ignore_errors=True)


def _refuse_existing(prefix: Path) -> None:
    for suffix in FILES:
        if Path(f"{prefix}{suffix}").exists():
            raise _error(
                "--output",
                f"{prefix}{suffix} exists and is not overwritten",
                "name another prefix, or delete its .bin, .idx and .json yourself",
            )


@contextmanager
def _locked(work: Path, prefix: Path) -> Iterator[None]:
    with open(work / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MachineError(
                Finding(
                    "busy",
                    "error",
                    "--output",
                    f"another process is preparing {prefix}",
                    "wait for it, or name another prefix",
                )
            ) from error
        yield


def _summary(
    prefix: Path,
    reports: Sequence[Report],
    files: int,
    made: int,
    elapsed: float,
    reading: Reading,
) -> str:
    total = {
        name: sum(getattr(report, name) for report in reports)
        for name in asdict(reports[0])
        if name != "bad_places"
    }
    tokenizer = reading.tokenizer
    lines = [
        f"{prefix}.bin, .idx and .json: {total['documents']:,} documents, "
        f"{total['tokens']:,} tokens from {files:,} file{'s' if files > 1 else ''}",
        f"tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} ids, "
        f"{tokenizer.end_of_document} ends a document",
    ]
    if made:
        lines.append(f"{made / elapsed:,.0f} tokens/s, {elapsed:.1f} s of tokenizing")
    if total["empty"]:
        lines.append(f"{total['empty']:,} empty documents left out")
    if total["bad"]:
        lines.append(f"{total['bad']:,} unreadable documents left out, such as")
        places = [place for report in reports for place in report.bad_places]
        lines += [f"    {place}" for place in places[:SHOWN]]
    lines.append(f"use it: data=indexed data.paths=[{prefix}]")
    return "\n".join(lines)


def _error(setting: str, message: str, fix: str) -> ChoiceError:
    return ChoiceError(Finding("prepare_data", "error", setting, message, fix))


class Stop(BaseException):
    """SIGTERM came."""


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    parse.__name__ = kind.__name__
    return parse


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  tools/prepare_data.py 'web/*.jsonl' --output data/web \\
      --tokenizer huggingface --tokenizer-path tokenizers/llama3 --workers 16
  tools/prepare_data.py corpus/ --output data/corpus --text-key content
  tools/prepare_data.py src/ --format text --output data/code

Exit status: 0 done; 2 bad input; 3 this machine cannot; 130 or 143 stopped by a signal (start the
same command again to go on).""",
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files, folders (searched through) or quoted globs: .jsonl, .ndjson, .json (one "
        "object a line), .parquet, .txt, .text, .md; .gz of the text kinds",
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="prefix of the .bin, .idx and .json"
    )
    parser.add_argument(
        "--tokenizer",
        choices=("byte", "huggingface", "sentencepiece"),
        default="byte",
        help="default: byte (256 bytes and an end of document)",
    )
    parser.add_argument(
        "--tokenizer-path",
        metavar="PATH",
        help="huggingface: a folder or a name; sentencepiece: the .model file",
    )
    parser.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help="the token that ends a document (default: the tokenizer's end-of-sequence token)",
    )
    parser.add_argument(
        "--format",
        choices=("jsonl", "parquet", "text"),
        help="of all inputs (default: by suffix)",
    )
    parser.add_argument(
        "--text-key",
        default="text",
        metavar="NAME",
        help="JSON key or Parquet column that holds the text (default: text)",
    )
    parser.add_argument(
        "--document",
        choices=("file", "line"),
        default="file",
        help="what a document of a text file is (default: file)",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out and count what cannot be read, instead of stopping there",
    )
    parser.add_argument(
        "--workers",
        type=_positive(int),
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes (default: the processors that this one may use)",
    )
    parser.add_argument(
        "--shard-mib",
        type=_positive(float),
        default=SHARD_MIB,
        metavar="MIB",
        help=f"input of a shard, which is what an interruption loses (default: {SHARD_MIB})",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)

    def stop(*_: object) -> None:
        raise Stop

    signal.signal(signal.SIGTERM, stop)
    # The processes are the parallelism here; the tokenizers library would add threads to each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        print(prepare(arguments))
        return 0
    except Refusal as refusal:
        print(f"prepare_data: {refusal}", file=sys.stderr)
        return refusal.exit_status
    except OSError as error:  # a full disk, a file that went away
        print(
            f"prepare_data: {error}\n    finished shards are kept: start the same command again",
            file=sys.stderr,
        )
        return 3
    except (KeyboardInterrupt, Stop) as signalled:
        print(
            "prepare_data: stopped; finished shards are kept: start the same command again to "
            "go on",
            file=sys.stderr,
        )
        return 143 if isinstance(signalled, Stop) else 130


if __name__ == "__main__":
    sys.exit(main())
