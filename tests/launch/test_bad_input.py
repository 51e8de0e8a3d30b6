"""A bad command line ends at once: one clear message with the setting and a way out, status 2 (3
where it is this machine), no stack trace, and nothing written."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import compose, local, machine, run_folder, train, usage
from launch.train import main
from planning.identity import flatten
from tests.choices import CPU, ROOT, values
from training import checkpoints
from training.data import library_text
from training.data.tokenizers import ByteTokenizer
from training.data.writer import Writer

ONE_RANK = ["hardware.gpus_per_node=1"]  # as the default global batch asks for
WAY_OUT = "\n    "  # the second line of a finding


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on a machine with 2 cores, 64 GiB and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "look", lambda: CPU)
    # The standard library's sources need no reading here.
    monkeypatch.setattr(library_text, "expected", lambda *_: None)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], words: list[str], status: int = 2) -> str:
    """What is said on stderr of a refused command line."""
    assert main(words) == status
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.startswith("error: ")
    assert len(said) < 1500
    return said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        # names
        (["model=gpt_33b"], ["error: model: ", "did you mean gpt_3b?", "moe_8x1b"]),
        (["launch=sagemakr"], ["error: launch: ", "choose from docker, kubernetes, local, plan"]),
        (["modle=gpt_1b"], ["error: modle: ", "no such group", "did you mean model?"]),
        (["model.num_layer=3"], ["did you mean model.num_layers?"]),
        (["tensor_parallel=2"], ["did you mean layout.tensor_parallel?"]),
        (["optimizer.beta1=0.8"], ["did you mean training.optimizer.beta1?"]),
        (["layout.tensor_paralel=2"], ["did you mean layout.tensor_parallel?", "layout has name,"]),
        (["+foo.bar=1"], ["error: foo: ", "no such group or setting"]),
        (["+model.foo=1"], ["error: model.foo: ", "model has name, stack"]),
        (["~model.nam"], ["error: model.nam: ", "did you mean model.name?"]),
        (["~model"], ["error: model: nothing can be left out"]),
        (["hydra.jobb=1"], ["error: hydra.jobb: Hydra's own settings change nothing here"]),
        (["hydra.run.dir=/tmp/x"], ["run_dir=PATH"]),
        (["model=null"], ["error: model: ", "names no choice", "gpt_tiny"]),
        (["model@x=gpt_1b"], ["error: model: ", "names no choice"]),
        (["model.stack=transformr"], ["error: model.stack: ", "did you mean transformer?"]),
        (["hardware.gpu=H100"], ["error: hardware.gpu: ", "take one of cpu, h100"]),
        (["--model=gpt_1b"], ["error: --model=gpt_1b: ", "write model=gpt_1b, without dashes"]),
        (["--mutlirun"], ["did you mean --multirun?"]),
        (["--cfg", "jbo"], ["error: argument --cfg/-c: invalid choice: 'jbo'"]),
        (["--cfg", "job", "modle=x"], ["error: modle: ", "did you mean model?"]),
        # values
        (["training.train_steps=abc"], ["error: training.train_steps: 'abc'", "a whole number"]),
        (["training.train_steps=1.5"], ["1.5 is not legal", "take a whole number from 1"]),
        (["training.train_steps=1e3"], ["1000.0 is not legal", "write 1000"]),
        (["training.train_steps="], ["error: training.train_steps: '' is not legal"]),
        (["training.micro_batch_size=0"], ["error: training.micro_batch_size: 0", "from 1"]),
        (["training.seed=99999999999999999999"], ["to 9223372036854775807"]),
        (["training.seed=" + "9" * 5000], ["error: training.seed: ", "5000 digits"]),
        (["training.optimizer.learning_rate=inf"], ["inf is not legal", "a number above 0"]),
        (["training.optimizer.learning_rate=nan"], ["nan is not legal"]),
        (["training.optimizer.beta1=1"], ["take a number from 0 below 1"]),
        (["training.optimizer=adam"], ["it is a group: set training.optimizer.name"]),
        (["training.optimizer.warmup_steps=150%"], ['a share such as "15%"']),
        (["training.train_steps=${nowhere}"], ["error: training.train_steps: ", "'nowhere'"]),
        (["precision.dtype=bf61"], ["did you mean bf16?", "take one of fp32, bf16, fp16"]),
        (["model.tied_embeddings=yes"], ["take true or false"]),
        (["data.paths=web"], ["error: data.paths: 'web'", "take a list, 'data.paths=[a,b]'"]),
        (["data.split='9,1,0'"], ["error: data.split: ", "take data=indexed"]),
        (["run_dir="], ["error: run_dir: '' is not legal", "run_dir=null"]),
        (["checkpoint.save="], ["error: checkpoint.save: '' is not legal"]),
        (["model="], ["error: model: there is no ''", "choose from"]),
        (["model.num_layers=999999999999"], ["error: model.num_layers: 999,999,999,999 blocks"]),
        # words
        (["model"], ["'model' has no =", "write model=CHOICE, of gpt_14b"]),
        (["model.num_layers"], ["write model.num_layers=VALUE"]),
        (["=3"], ["'=3' cannot be read", "GROUP=CHOICE"]),
        (["model=["], ["error: model: 'model=[' cannot be read", "close its brackets"]),
        (["model==gpt_1b"], ["write one =: model=VALUE"]),
        (["run_dir=a=b"], ["error: run_dir: ", """'run_dir="a=b"'"""]),
        (["run_dir='a"], ["close its quotes"]),
        ([""], ["'' has no ="]),
        (["model.\udcff=1"], ["has characters that no name has"]),
        (["data.paths=[a,", "b]"], ["'data.paths=[a, b]'", "'b]' has no ="]),  # by the shell
        (["model=gpt_1b,gpt_3b"], ["error: model: several values", "add -m"]),
        (["training.seed=range(3)"], ["error: training.seed: several values", "add -m"]),
        (["-m", "training.seed=range(999999999)"], ["a sweep has at most 10,000"]),
        (["-m", "training.optimizer.beta1=interval(0,1)"], ["no end of values"]),
        # together
        (["layout=tp2", "hardware.gpus_per_node=3"], ["error: layout: ", "the 3 GPUs or proc"]),
        (
            ["layout=tp8", "hardware.gpus_per_node=8"],
            ["error: layout.tensor_parallel: 8 does not divide the 4 attention heads", "1, 2 or 4"],
        ),
        (
            ["training.global_batch_size=20"],
            ["error: training.global_batch_size: 20 is not a multiple", "take 16 or 32"],
        ),
        (["model.num_layers=3", "model.pattern='*-G-'"], ["error: model.num_layers: 3 blocks"]),
        (["launch.port=70000"], ["error: launch.port: 70000 is not a port", "at most 65535"]),
        (["checkpoint.load=nowhere"], ["error: checkpoint.load: ", "nowhere does not exist"]),
        (["run_dir='~nobody-here/x'"], ["error: run_dir: ~nobody-here/x: there is no such user"]),
        (["checkpoint.save='~nobody-here'"], ["error: checkpoint.save: ", "the path in full"]),
        (["data=indexed"], ["error: data"]),
        (["data=indexed", "data.paths=[nowhere]"], ["nowhere"]),
    ],
    ids=lambda value: " ".join(value)[:40].encode("ascii", "replace").decode() or "empty",
)
def test_one_message_names_the_setting_and_a_way_out(
    capsys: pytest.CaptureFixture[str], here: Path, words: list[str], parts: list[str]
) -> None:
    said = refused(capsys, words)
    for part in parts:
        assert part in said
    assert WAY_OUT in said
    assert list(here.iterdir()) == []


LONG = "a" * 300


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([f"run_dir={LONG}"], [f"error: run_dir: {LONG}: File name too long"]),
        ([f"data.cache={LONG}"], ["error: data.cache: ", "File name too long"]),
        ([f"checkpoint.save={LONG}"], ["error: checkpoint.save: ", "File name too long"]),
        (["data=indexed", f"data.paths=[{LONG}]"], ["error: data.paths: ", "too long"]),
        (["run_dir=s3://bucket/run"], ["s3://bucket/run is an address, and a folder is needed"]),
        (["checkpoint.save=s3://bucket/run"], ["error: checkpoint.save: s3://bucket/run is an"]),
        (["checkpoint.load=s3://bucket/run"], ["error: checkpoint.load: s3://bucket/run is an"]),
        (["checkpoint.save=no"], ["'no' would be a folder", "write false, or ./no for a folder"]),
        (["checkpoint.save=/etc/hosts"], ["error: checkpoint.save: /etc/hosts is a file, and a"]),
        (["checkpoint.save=/etc/hosts/x"], ["error: checkpoint.save: /etc/hosts/x: Not a dir"]),
        (["data.cache=/etc/hosts"], ["error: data.cache: /etc/hosts is a file, and a folder"]),
        (["data.tokenizer.vocab_size=99"], ["99 means nothing with data=library_text"]),
        (["precision=BF16"], ["there is no 'BF16'; did you mean bf16?"]),
        (["training.train_steps=null"], ["training.train_steps: null is not legal"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
@pytest.mark.parametrize("launch", ["local", "plan"])
def test_a_folder_that_cannot_be_and_a_word_that_does_nothing(
    capsys: pytest.CaptureFixture[str], here: Path, words: list[str], parts: list[str], launch: str
) -> None:
    said = refused(capsys, [*words, f"launch={launch}"])
    for part in parts:
        assert part in said
    assert WAY_OUT in said
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["hardware=h100", *ONE_RANK], ["error: hardware: the plan is for h100, and this machine"]),
        (
            ["hardware.nodes=2", "training.micro_batch_size=8"],
            ["error: hardware.nodes: ", "hardware.nodes=1"],
        ),
        (["model=gpt_32b", "precision=nvfp4"], ["cannot compute nvfp4; b200, b300", "launch=plan"]),
        (["model=gpt_8b"], ["weights, gradients and optimizer state alone take", "GiB"]),
        (["model=llama3_70b", "hardware=cpu"], ["error: layout: 1 process with weights, ", "GiB"]),
        (
            ["hardware=cpu", "hardware.gpus_per_node=10000", "training.global_batch_size=160000"],
            ["error: hardware.gpus_per_node: 10,000 processes", "take fewer processes: hardware."],
        ),
        (["model=hybrid_1b"], ["error: model.pattern: G is a gated delta net", "launch=plan"]),
        (["run_dir=/dev/null/x"], ["error: run_dir: cannot write to /dev/null/x"]),
        (["run_dir=/dev/null/x", "launch=plan"], ["error: run_dir: cannot write to /dev/null/x"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_what_this_machine_cannot_do_ends_with_3(
    capsys: pytest.CaptureFixture[str], here: Path, words: list[str], parts: list[str]
) -> None:
    said = refused(capsys, words, 3)
    for part in parts:
        assert part in said
    assert WAY_OUT in said
    assert list(here.iterdir()) == []


def test_a_wrong_choice_comes_before_what_the_machine_cannot(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refused(capsys, ["precision=mxfp8", "training.global_batch_size=20"])
    assert "training.global_batch_size" in said
    assert "cannot compute mxfp8" in said  # all at once


def test_a_taken_port_ends_with_3(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        said = refused(capsys, [f"launch.port={taken.getsockname()[1]}"], 3)
    assert "error: launch.port: port " in said
    assert "launch.port=0 for any free one" in said
    assert list(here.iterdir()) == []


def test_the_last_of_repeated_words_is_taken_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["training.train_steps=7", "launch=plan", "training.train_steps=9", "run_dir=r"]
    assert main(words) == 0
    assert capsys.readouterr().err == (
        "warning: training.train_steps: it is given 2 times; training.train_steps=9 is taken\n"
    )
    assert "train_steps: 9\n" in Path("r/plan.yaml").read_text()


def test_a_sequence_longer_than_the_data(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory, here: Path
) -> None:
    prefix = tmp_path_factory.mktemp("data") / "short"
    writer = Writer(str(prefix), ByteTokenizer())
    for _ in range(10):
        writer.add("too short")
    writer.close()
    words = ["data=indexed", f"data.paths=[{prefix}]", "data.split='8,1,1'"]
    said = refused(capsys, [*words, "model.seq_length=512"])
    assert f"the train split of {prefix} has 80 tokens in 8 of 10 documents" in said
    assert "one sequence needs 513" in said
    assert list(here.iterdir()) == []


# --- the folder of another run ----------------------------------------------------------------


@pytest.fixture
def trained(here: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder that holds a run, as far as the next start looks at it."""
    assert main(["run_dir=r", "launch=plan"]) == 0
    (here / "r" / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\n')
    capsys.readouterr()
    return here / "r"


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("launch", ["local", "plan"])
@pytest.mark.parametrize(
    ("change", "setting", "old", "new"),
    [
        ("model.hidden_size=256", "model.hidden_size", "128", "256"),
        ("model.seq_length=256", "model.seq_length", "128", "256"),
        ("data.tokenizer.vocab_size=256", "data.tokenizer.vocab_size", "257", "256"),
        ("data=mock", "data.kind", "library_text", "mock"),
        ("training.global_batch_size=32", "training.global_batch_size", "16", "32"),
        ("training.optimizer.name=sgd", "training.optimizer.name", "adam", "sgd"),
    ],
)
def test_the_folder_of_another_run_is_refused_with_both_values(
    capsys: pytest.CaptureFixture[str],
    trained: Path,
    launch: str,
    change: str,
    setting: str,
    old: str,
    new: str,
) -> None:
    before = files(trained)
    said = refused(capsys, ["run_dir=r", change, f"launch={launch}"])
    assert f"error: {setting}: r holds a run with {old}, this one has {new}" in said
    assert "take another run_dir, or resume=none" in said
    assert files(trained) == before


def test_a_plan_alone_may_be_replaced(here: Path) -> None:
    assert main(["run_dir=r", "launch=plan"]) == 0
    assert main(["run_dir=r", "launch=plan", "model.hidden_size=256"]) == 0
    assert "hidden_size: 256" in (here / "r" / "plan.yaml").read_text()


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_a_plan_leaves_the_plan_of_a_run_alone(
    capsys: pytest.CaptureFixture[str], trained: Path, resume: str
) -> None:
    before = files(trained)
    words = ["run_dir=r", "launch=plan", f"resume={resume}", "training.train_steps=300"]
    assert main(words) == 0
    assert "not written: r keeps the plan of its run" in capsys.readouterr().out
    assert files(trained) == before


def test_a_plan_does_not_replace_that_of_a_run_that_starts(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    assert main(["run_dir=r", "launch=plan"]) == 0
    before = files(here / "r")
    with run_folder.lock(here / "r"):
        said = refused(capsys, ["run_dir=r", "launch=plan", "training.train_steps=300"], 3)
    assert "another process trains in r now" in said
    assert files(here / "r") == before | {".lock": ""}


@pytest.mark.parametrize("words", [[], ["checkpoint.save=false"], ["resume=none"]])
def test_a_run_takes_the_folder_of_a_plan_alone(
    capsys: pytest.CaptureFixture[str],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    ran = []

    def run(folder: Path, **_: object) -> local.Outcome:
        ran.append((folder / "plan.yaml").read_text())
        return local.Outcome("done", 0, "", {})

    monkeypatch.setattr(local, "run", run)
    assert main(["run_dir=r", "launch=plan"]) == 0
    capsys.readouterr()
    assert main(["run_dir=r", "model=moe_tiny", *words]) == 0
    assert "num_experts: 4" in ran[0]
    assert "earlier run" not in capsys.readouterr().out


def test_a_run_that_has_not_trained_yet_is_no_plan_alone(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = local.Outcome("failed", 1, "", {})
    monkeypatch.setattr(local, "run", lambda *_, **__: failed)
    assert main(["run_dir=r"]) == 1
    capsys.readouterr()
    said = refused(capsys, ["run_dir=r", "model=moe_tiny"])
    assert "error: model.num_experts: r holds a run with null, this one has 4" in said
    assert said.count("set it back, take another run_dir") == 1  # after the last of them


def test_a_plan_alone_hides_no_run_whose_checkpoints_are_elsewhere(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = local.Outcome("failed", 1, "", {})
    monkeypatch.setattr(local, "run", lambda *_, **__: failed)
    assert main(["run_dir=r", "checkpoint.save=saves"]) == 1
    assert main(["run_dir=other", "launch=plan", "model=moe_tiny"]) == 0
    capsys.readouterr()
    said = refused(capsys, ["run_dir=other", "checkpoint.save=saves", "model=moe_tiny"])
    assert f"error: model.num_experts: {here}/saves holds a run with null, this one has 4" in said


@pytest.mark.parametrize("plan", [b"\xff\xfe", b"config: 5", b"config: {a: 1}", b""])
def test_a_run_whose_plan_cannot_be_read_is_not_continued_blindly(
    capsys: pytest.CaptureFixture[str], trained: Path, plan: bytes
) -> None:
    (trained / "plan.yaml").write_bytes(plan)
    said = refused(capsys, ["run_dir=r"])
    assert "r holds a run, and no plan.yaml that can be read" in said
    assert "put back its plan.yaml, or take resume=none" in said


def test_checkpoints_of_another_form_are_refused(
    capsys: pytest.CaptureFixture[str], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = checkpoints.CheckpointState(5, trained, True, "", "torch_dist", 1)
    newest = checkpoints.Newest(complete, [])
    monkeypatch.setattr(checkpoints, "newest_complete", lambda _: newest)
    said = refused(capsys, ["run_dir=r", "layout=replicated", "launch=plan"])
    assert "error: layout.sharding: r holds checkpoints of sharding=optimizer" in said
    assert "checkpoint.load=r/checkpoints" in said


def test_the_folder_of_a_run_is_not_that_of_its_checkpoints(
    capsys: pytest.CaptureFixture[str], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = checkpoints.CheckpointState(5, trained, True, "", "torch_dist", 1)
    monkeypatch.setattr(
        checkpoints,
        "newest_complete",
        lambda at: checkpoints.Newest(
            complete if at == trained.absolute() / "checkpoints" else None, []
        ),
    )
    said = refused(capsys, ["checkpoint.load=r"])
    assert f"a run's are inside: checkpoint.load={trained.absolute()}/checkpoints" in said
    (trained / "checkpoints/iter_0000005").mkdir(parents=True)
    said = refused(capsys, ["checkpoint.load=r/checkpoints/iter_0000005"])
    assert f"name the folder around it: checkpoint.load={trained.absolute()}/checkpoints" in said


def test_weights_of_another_shape_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved := trained / "checkpoints").mkdir()
    (saved / "plan.yaml").write_text((trained / "plan.yaml").read_text())
    complete = checkpoints.CheckpointState(5, saved, True, "", "torch_dist", 1)
    monkeypatch.setattr(
        checkpoints,
        "newest_complete",
        lambda at: checkpoints.Newest(complete if at.resolve() == saved.resolve() else None, []),
    )
    load = "checkpoint.load=r/checkpoints"
    said = refused(capsys, [load, "run_dir=new", "model.hidden_size=256", "model.qk_norm=true"])
    assert "error: model.hidden_size: " in said
    assert "holds the weights of a model with 128, this one has 256" in said
    assert "error: model.qk_norm: " in said
    # What decides no tensor may differ; a plan says so too, and goes on.
    same = ["model.init_std=0.01", "model.kv_channels=32", "model.vocab_size=384"]
    assert main([load, "run_dir=new", *same, "launch=plan"]) == 0
    assert "the weights of" not in capsys.readouterr().out
    assert main([load, "run_dir=new", "model.hidden_size=256", "launch=plan"]) == 0
    assert "warning: model.hidden_size: " in capsys.readouterr().out


def test_a_closed_screen_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit, match=r"^0$"):
        train.leave(lambda: 0)


# --- real processes ---------------------------------------------------------------------------


def start(words: list[str], cwd: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "train.py"), *words],
        cwd=cwd,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    return done, time.monotonic() - started


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["modle=gpt_1b"], 2),
        (["model=["], 2),
        (["layout.tensor_parallel=3", "hardware=cpu"], 2),
        (["hardware=b300", *ONE_RANK], 3),
        (["-m", "model=gpt_1b,gpt_33b", "launch=plan", "training.micro_batch_size=0"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_real_process_is_quick_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int
) -> None:
    done, took = start(words, here)
    assert done.returncode == status, done.stderr
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert list(here.iterdir()) == []
    assert took < 30  # 2 on a machine that has nothing else to do
    with capsys.disabled():
        print(f" [{took:.1f} s]", end="")


def test_help_and_settings_are_quick_and_leave_nothing(here: Path) -> None:
    helped, help_s = start(["--help"], here)
    shown, show_s = start(["--cfg", "job", "--resolve", "model=gpt_1b"], here)
    assert (helped.returncode, shown.returncode) == (0, 0)
    assert helped.stdout == usage.text()
    for group in compose.groups():
        for choice in compose.choices(group):
            assert choice in helped.stdout
    assert "gpt_tiny*" in helped.stdout  # the default
    assert "global_batch_size: 128" in shown.stdout
    assert helped.stderr == shown.stderr == ""
    assert list(here.iterdir()) == []
    assert help_s < 5
    assert show_s < 30


def test_a_reader_that_goes_away_is_no_error(here: Path) -> None:
    command = f"{sys.executable} {ROOT / 'launch' / 'train.py'} --help | head -n 1"
    done = subprocess.run(command, shell=True, cwd=here, capture_output=True, text=True)
    assert done.stdout.startswith("Slipway pretrains")
    assert done.stderr == ""


# --- many random command lines ----------------------------------------------------------------

VALUES = (
    *("0", "1", "2", "3", "8", "-1", "1.5", "1e3", "1e999", "nan", "null", "true", "no", "''"),
    *(
        "",
        "abc",
        "[]",
        "[a,b]",
        "[1,[2,x]]",
        "{a: 1}",
        "${model.name}",
        "${",
        "10%",
        "'10%'",
        "a b",
    ),
    *(
        "99999999999",
        "9" * 30,
        "../x",
        "/nowhere",
        "*-",
        "*E",
        "G",
        "fp8",
        "bf16",
        "byte",
        "gpt_1b",
    ),
    *(
        "selective",
        "full",
        "fsdp",
        "adam",
        "é",
        "#",
        "=",
        "a,b",
        "range(3)",
        "'\"",
        "\\",
        "!",
        "$x",
        "'~nobody-here/x'",
        "s3://a/b",
    ),
)
EDITS = ("drop", "double", "swap", "upper", "+", "~", "++", "@x", ".x", "/x")


def random_words(draw: random.Random) -> list[str]:
    """A command line of real names, some of them mistyped, with odd values."""
    own = flatten(values())
    names = [*own, *compose.groups(), *compose.groups()]
    words = []
    for _ in range(draw.randint(1, 4)):
        name = draw.choice(names)
        value = draw.choice(VALUES)
        if draw.random() < 0.7:
            value = draw.choice(compose.choices(name)) if name in compose.groups() else own[name]
            value = {"None": "null", "True": "true", "False": "false"}.get(str(value), value)
        at = draw.randrange(len(name))
        edit = draw.choice(EDITS) if draw.random() < 0.2 else ""
        name = {
            "drop": name[:at] + name[at + 1 :],
            "double": name[:at] + name[at] + name[at:],
            "swap": name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
            "upper": name.upper(),
        }.get(edit, edit + name if edit in ("+", "~", "++") else name + edit)
        words.append(name if draw.random() < 0.03 else f"{name}={value}")
    return words


def command_lines(count: int, seed: int) -> Iterator[list[str]]:
    draw = random.Random(seed)
    for _ in range(count):
        yield random_words(draw)


def test_no_random_command_line_breaks_the_program(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses: Counter[int] = Counter()
    slowest = (0.0, [""])
    for words in command_lines(300, seed=7):
        started = time.monotonic()
        try:
            status = main([*words, "run_dir=r", "launch=plan"])
        except BaseException as error:
            raise AssertionError(words) from error
        slowest = max(slowest, (time.monotonic() - started, words))
        said = capsys.readouterr().err
        assert status in (0, 2, 3), words
        assert ("error: " in said) == (status != 0), words
        assert "Traceback" not in said, words
        if status:
            assert not (here / "r" / "plan.yaml").exists(), words
        else:
            verdict = json.loads((here / "r" / "plan.json").read_text())
            assert verdict["legal"], words
            for file in ("plan.yaml", "plan.json"):
                (here / "r" / file).unlink()
        statuses[status] += 1
    with capsys.disabled():
        print(f"\n300 random command lines: {dict(statuses)}; slowest {slowest[0]:.1f} s")
    assert statuses[0] > 10
    assert statuses[2] > 100


def test_options_are_known_to_the_help() -> None:
    for option in (*train.MANY, *train.HELP, "--cfg", "--info", "--hydra-help"):
        assert option in usage.text()
