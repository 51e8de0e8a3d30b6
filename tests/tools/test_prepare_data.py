"""tools/prepare_data.py: right tokens from every input, whatever interrupts it."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import psutil
import pytest

from planning.schema import TokenizerConfig
from tests.training import data_files, tokenizer_files
from tools import prepare_data
from training.data import indexed, tokenizers
from training.data.writer import builder_classes

ROOT = Path(prepare_data.__file__).resolve().parents[1]
FILES = (".bin", ".idx", ".json")


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """400 documents of 1 to 60 words, in two scripts."""
    pick = random.Random(1)
    words = ["alpha", "beta", "gamma\ndelta", "def", "return", "0x1F", "naïve", "привет"]
    return [" ".join(pick.choices(words, k=pick.randint(1, 60))) for _ in range(400)]


@pytest.fixture
def jsonl(texts: list[str], tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    return path


def run(*arguments: object) -> int:
    return prepare_data.main([str(argument) for argument in arguments])


def content(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in FILES]


def documents(prefix: Path) -> list[list[int]]:
    """Ids of each document, by Megatron's own reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [document.tolist() for document in IndexedDataset(str(prefix))]


def decoded(prefix: Path, tokenizer: tokenizers.Tokenizer | None = None) -> list[str]:
    tokenizer = tokenizer or tokenizers.ByteTokenizer()
    ids = documents(prefix)
    assert all(document[-1] == tokenizer.end_of_document for document in ids)
    return [tokenizer.decode(document[:-1]) for document in ids]


# --- what goes in comes out ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte", "huggingface", "sentencepiece"])
def test_the_stored_tokens_are_the_text(
    kind: str, jsonl: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = None if kind == "byte" else tokenizer_files.train(kind, tmp_path / "tokenizer", texts)
    choice = TokenizerConfig(kind=kind, path=path and str(path), vocab_size=None)
    arguments = ["--tokenizer", kind] + (["--tokenizer-path", path] if path else [])
    assert run(jsonl, "--output", tmp_path / "out", *arguments) == 0

    tokenizer = tokenizers.load(choice)
    assert decoded(tmp_path / "out", tokenizer) == texts
    info = indexed.inspect(str(tmp_path / "out"))
    assert info.documents == 400
    assert info.tokenizer == {
        "kind": kind,
        "path": path and str(path),
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "fingerprint": tokenizer.fingerprint,
    }
    out = capsys.readouterr().out
    assert f"400 documents, {info.tokens:,} tokens from 1 file\n" in out
    assert "tokens/s" in out
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx", "out.json"]


def test_jsonl_parquet_and_text_give_the_same(
    jsonl: Path, texts: list[str], tmp_path: Path
) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"number": range(400), "body": texts})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet", row_group_size=30)
    with gzip.open(tmp_path / "in.json.gz", "wt") as stream:
        stream.write(jsonl.read_text())
    folder = tmp_path / "folder"
    for number, text in enumerate(texts):
        file = folder / f"{number // 100}" / f"{number:03d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / ".hidden.txt").write_text("not this")
    (folder / "notes.pdf").write_text("nor this")

    assert run(jsonl, "--output", tmp_path / "a") == 0
    parquet = tmp_path / "in.parquet"
    small = ("--shard-mib", 0.001, "--workers", 2)
    assert run(parquet, "--text-key", "body", "--output", tmp_path / "b", *small) == 0
    assert run(tmp_path / "in.json.gz", "--output", tmp_path / "c") == 0
    assert run(folder, "--output", tmp_path / "d", *small) == 0
    assert run(tmp_path / "folder/*/*.txt", "--output", tmp_path / "e") == 0
    for other in "bcde":
        assert content(tmp_path / other) == content(tmp_path / "a")


def test_a_document_a_line(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes("one\r\n\n  two é\nthree".encode())
    assert run(tmp_path / "in.txt", "--document", "line", "--output", tmp_path / "out") == 0
    assert decoded(tmp_path / "out") == ["one", "  two é", "three"]


def test_a_format_for_other_suffixes(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x = 1\n")
    assert run(tmp_path / "src", "--output", tmp_path / "out") == 2
    assert run(tmp_path / "src", "--output", tmp_path / "out", "--format", "text") == 0
    assert decoded(tmp_path / "out") == ["x = 1\n"]


def test_inputs_keep_their_order(tmp_path: Path) -> None:
    for name in "bac":
        (tmp_path / f"{name}.txt").write_text(name)
    files = [tmp_path / f"{name}.txt" for name in "cab"]
    assert run(*files, "--output", tmp_path / "out") == 0
    assert decoded(tmp_path / "out") == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65_499, "uint16"), (65_500, "int32"), (128_256, "int32")]
)
def test_ids_are_stored_in_the_smallest_type(vocab_size: int, dtype: str, tmp_path: Path) -> None:
    class Large(tokenizers.ByteTokenizer):
        end_of_document = vocab_size - 1

    Large.vocab_size = vocab_size
    data_files.write(tmp_path / "out", ["text"], Large())
    assert indexed.inspect(str(tmp_path / "out")).dtype == dtype
    assert documents(tmp_path / "out") == [[*b"text", vocab_size - 1]]


def test_processes_and_shards_do_not_change_the_result(jsonl: Path, tmp_path: Path) -> None:
    for name, workers, mib in (("a", 1, 16), ("b", 1, 0.0005), ("c", 3, 0.0005), ("d", 2, 0.01)):
        arguments = ("--workers", workers, "--shard-mib", mib)
        assert run(jsonl, "--output", tmp_path / name, *arguments) == 0
    for name in "bcd":
        assert content(tmp_path / name) == content(tmp_path / "a")


def test_empty_documents_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['{"text": "a"}', '{"text": ""}', "", '{"text": " \\n"}', '{"text": null}']
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, '{"text": "b"}']))
    assert run(tmp_path / "in.jsonl", "--output", tmp_path / "out") == 0
    assert decoded(tmp_path / "out") == ["a", "b"]
    assert "4 empty documents left out" in capsys.readouterr().out


# --- what is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', "not JSON"),
        (b'["a"]', "not a JSON object"),
        (b'{"txt": "a"}', "no key 'text'; did you mean txt? (its keys: txt)"),
        (b'{"text": 1}', "'text' is int, not text"),
        (b'{"text": "\xff"}', "not JSON"),
        (b'{"text": "\\ud800"}', "'text' is not text"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_malformed_line_is_named(
    line: bytes,
    words: str,
    workers: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "in.jsonl"
    good = b'{"text": "good"}\n'
    path.write_bytes(good * 150 + line + b"\n" + good * 149)
    arguments = (path, "--output", tmp_path / "out", "--workers", workers, "--shard-mib", 0.001)
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert f"{path}:151: " in err
    assert words in err
    assert "--skip-bad" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out.bin").exists()

    assert run(*arguments, "--skip-bad") == 0
    assert decoded(tmp_path / "out") == ["good"] * 299
    out = capsys.readouterr().out
    assert "1 unreadable documents left out" in out
    assert f"{path}:151: " in out


def test_text_that_is_not_utf8_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\xe9\n")
    assert run(tmp_path / "a.txt", "--output", tmp_path / "out") == 2
    assert f"{tmp_path}/a.txt: not UTF-8" in capsys.readouterr().err
    assert run(tmp_path / "a.txt", "--output", tmp_path / "out", "--document", "line") == 2
    assert f"{tmp_path}/a.txt:2: not UTF-8" in capsys.readouterr().err


def test_a_damaged_archive_is_named(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = gzip.compress("\n".join(texts).encode())
    (tmp_path / "cut.txt.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "no.txt.gz").write_bytes(b"text")
    for name in ("cut", "no"):
        assert run(tmp_path / f"{name}.txt.gz", "--output", tmp_path / "out") == 2
        assert f"{tmp_path}/{name}.txt.gz: damaged: " in capsys.readouterr().err


def test_shards_made_with_skip_bad_are_read_again_without(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jsonl.open("a") as stream:
        stream.write("{\n")
    monkeypatch.setattr(prepare_data, "join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(jsonl, "--output", tmp_path / "out", "--skip-bad") == 130
    assert run(jsonl, "--output", tmp_path / "out") == 2


def bad_inputs(folder: Path) -> dict[str, tuple[list[object], str]]:
    import pyarrow
    import pyarrow.parquet

    (folder / "in.jsonl").write_text('{"text": "a"}\n')
    (folder / "empty.jsonl").touch()
    (folder / "blank.jsonl").write_text("\n\n")
    (folder / "a.zst").write_text("x")
    (folder / "nothing").mkdir()
    (folder / "broken.parquet").write_text("x")
    pyarrow.parquet.write_table(
        pyarrow.table({"texts": ["a"], "number": [1]}), folder / "table.parquet"
    )
    jsonl = folder / "in.jsonl"
    return {
        "missing": ([folder / "im.jsonl"], "does not exist; did you mean in.jsonl?"),
        "glob": ([folder / "*.csv"], "*.csv does not exist"),
        "empty folder": ([folder / "nothing"], "nothing is empty"),
        "empty file": ([folder / "empty.jsonl"], "all inputs are empty"),
        "no text": ([folder / "blank.jsonl"], "no document holds text"),
        "twice": ([jsonl, folder / "*.jsonl"], "in.jsonl is named twice"),
        "compressed": ([folder / "a.zst"], "decompress it first"),
        "not parquet": ([folder / "broken.parquet"], "is not a Parquet file"),
        "column": ([folder / "table.parquet"], "no column 'text'; did you mean texts?"),
        "type": (
            [folder / "table.parquet", "--text-key", "number"],
            "the column 'number' is int64, not text",
        ),
        "no path": ([jsonl, "--tokenizer", "huggingface"], "kind=huggingface needs a path"),
        "no model": (
            [jsonl, "--tokenizer", "sentencepiece", "--tokenizer-path", "no.model"],
            "no.model is not a file",
        ),
    }


def test_bad_input_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (arguments, words) in bad_inputs(tmp_path).items():
        status = run(*arguments, "--output", tmp_path / "out" / "text")
        err = capsys.readouterr().err
        assert status == 2, name
        assert words in err, name
        assert "Traceback" not in err, name
        assert err.count("prepare_data: ") == 1, name
        assert err[err.index("prepare_data: ") :].count("\n") <= 2, name
        assert not (tmp_path / "out" / "text.bin").exists(), name


@pytest.mark.parametrize("suffix", FILES)
def test_an_existing_output_is_not_overwritten(
    jsonl: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    existing = tmp_path / f"out{suffix}"
    existing.write_text("precious")
    assert run(jsonl, "--output", tmp_path / "out") == 2
    assert f"{existing} exists and is not overwritten" in capsys.readouterr().err
    assert existing.read_text() == "precious"


def test_two_at_once(jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "out.work"
    work.mkdir()
    with prepare_data._locked(work, tmp_path / "out"):
        assert run(jsonl, "--output", tmp_path / "out") == 3
    assert "another process is preparing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--workers", "0"], ["--shard-mib", "-1"], ["--tokenizer=x"]]
)
def test_illegal_options(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("in.jsonl", "--output", "out", *arguments)
    assert caught.value.code == 2


def test_a_new_process_from_any_folder(tmp_path: Path) -> None:
    """The command itself, as typed; and --help needs no import of Megatron."""
    command = [sys.executable, str(ROOT / "tools" / "prepare_data.py")]
    imports = "import runpy, sys; sys.argv[1:] = ['--help']\n"
    imports += f"try: runpy.run_path({command[1]!r}, run_name='__main__')\n"
    imports += "except SystemExit: sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", imports], cwd=ROOT).returncode == 0
    shown = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0
    assert "--skip-bad" in shown.stdout
    assert "examples:" in shown.stdout

    (tmp_path / "in.txt").write_text("some text")
    made = subprocess.run(
        [*command, "in.txt", "--output", "out/text"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert made.stderr == "tokenizing 0.0 MB: 1 shards, 1 at a time\n"  # no library's warnings
    assert "1 documents, 10 tokens" in made.stdout
    assert decoded(tmp_path / "out" / "text") == ["some text"]


# --- interruptions ------------------------------------------------------------------------------

SLOW = ("--shard-mib", 0.002, "--workers", 2)  # some 50 shards


@pytest.fixture
def uninterrupted(jsonl: Path, tmp_path: Path) -> list[bytes]:
    assert run(jsonl, "--output", tmp_path / "whole") == 0
    return content(tmp_path / "whole")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a shard take 50 ms, so that a signal arrives between two."""
    builder_classes()  # in the parent, once
    tokenize = prepare_data.tokenize

    def slowly(*arguments: object) -> prepare_data.Report:
        time.sleep(0.05)
        return tokenize(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(prepare_data, "tokenize", slowly)


def in_child(function: Callable[[], int]) -> multiprocessing.Process:
    def child() -> None:
        os._exit(function())

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process  # type: ignore[return-value]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def whole_shards(work: Path) -> int:
    return sum(path.stem.count(".") == 0 for path in work.glob("0*.json"))


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
@pytest.mark.usefixtures("slow")
def test_stopped_in_the_middle(
    number: signal.Signals,
    status: int,
    jsonl: Path,
    uninterrupted: list[bytes],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Twice stopped, then let finish: the same bytes, and finished shards are not done again."""
    out, work = tmp_path / "out", tmp_path / "out.work"
    kept = 0
    for _ in range(2):
        process = in_child(lambda: run(jsonl, "--output", out, *SLOW))
        enough = kept + 3
        wait_for(lambda enough=enough: whole_shards(work) >= enough)
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 2
        os.kill(process.pid or 0, number)
        process.join(20)
        assert process.exitcode == status
        assert not psutil.wait_procs(workers, timeout=5)[1]
        kept = whole_shards(work)
        assert not out.with_suffix(".bin").exists()
    (work / "000000-0123456789abcdef.1.bin").write_text("half a shard of a killed process")
    capfd.readouterr()
    assert run(jsonl, "--output", out, *SLOW) == 0
    err = capfd.readouterr().err
    assert f"{kept} of " in err
    total = int(err.split(" of ")[1].split()[0])
    assert 6 <= kept < total
    assert content(out) == uninterrupted
    assert not work.exists()


@pytest.mark.parametrize("step", range(5))
def test_killed_while_the_result_gets_its_name(
    step: int, jsonl: Path, uninterrupted: list[bytes], tmp_path: Path
) -> None:
    """Killed before each of the last renames, and before the work folder is removed."""
    builder_classes()
    out = tmp_path / "out"

    def killed() -> int:
        calls = 0
        rename = Path.rename

        def counted(self: Path, target: object) -> object:
            nonlocal calls
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return rename(self, target)  # type: ignore[arg-type]

        Path.rename = counted  # type: ignore[method-assign,assignment]
        prepare_data.shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        return run(jsonl, "--output", out)

    process = in_child(killed)
    process.join(20)
    assert process.exitcode == -9
    assert run(jsonl, "--output", out) == 0
    assert content(out) == uninterrupted
    assert not (tmp_path / "out.work").exists()


def test_changed_inputs_are_read_again(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(jsonl, "--output", tmp_path / "out", *SLOW) == 130
    lines = jsonl.read_text().splitlines(keepends=True)
    lines[7] = json.dumps({"text": "changed"}) + "\n"
    jsonl.write_text("".join(lines))
    assert run(jsonl, "--output", tmp_path / "out", *SLOW) == 0
    assert decoded(tmp_path / "out")[7] == "changed"
    assert run(jsonl, "--output", tmp_path / "anew") == 0
    assert content(tmp_path / "out") == content(tmp_path / "anew")


@pytest.mark.usefixtures("slow")
def test_a_worker_that_is_killed_is_said(
    jsonl: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by the kernel for want of memory: no hang, exit 3, finished shards stay."""
    work = tmp_path / "out.work"
    process = in_child(lambda: run(jsonl, "--output", tmp_path / "out", *SLOW))
    wait_for(lambda: whole_shards(work) >= 2)
    psutil.Process(process.pid).children()[0].kill()
    process.join(20)
    assert process.exitcode == 3
    assert "a worker process was killed" in capfd.readouterr().err
    assert whole_shards(work) >= 2


def test_ids_above_the_model_are_found_before_a_run(jsonl: Path, tmp_path: Path) -> None:
    """What was prepared is what data=indexed checks."""
    assert run(jsonl, "--output", tmp_path / "out") == 0
    data = data_files.choice(train_paths=[str(tmp_path / "out")])
    assert indexed.check(data, 257, 64, (8, 0, 0))[1] == []
    assert [finding.setting for finding in indexed.check(data, 200, 64, (8, 0, 0))[1]] == [
        "model.vocab_size"
    ]
    assert numpy.fromfile(tmp_path / "out.bin", dtype=numpy.uint16).max() == 256
