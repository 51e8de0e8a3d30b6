"""The documents hold: their commands run, what they quote is said, what they name exists.

Every command of README.md and docs/ is in COMMANDS, with what makes it short or safe; a new one
fails here until it is.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from botocore import xform_name
from botocore.session import get_session

from launch import compose
from tests.training.runs import CACHE, ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class How:
    """How a command is run here."""

    adds: str = ""  # words put after it
    status: int = 0
    says: str = ""  # part of what is on the screen
    first: bool = False  # others need what it leaves


SHORT = "training.train_steps=2 training.eval_interval=0"
TRAINED = f"{SHORT} run_dir=runs/first"
PLANNED = How("launch=plan", says="plan.yaml")  # here, where training it is held by other tests
# Needs GPUs: it must be legal on those that its `hardware` names, or be refused for want of them.
ELSEWHERE = How(says="plan.yaml")
COMMANDS = {
    # train here
    "make train": How(f"ARGS='{TRAINED}'", says="2 steps", first=True),
    "python launch/train.py data=indexed data.paths=[data/mine] "
    'data.split="80,20,0" run_dir=runs/mine': How(SHORT, says="nats a token"),
    "python launch/train.py hardware=cpu hardware.gpus_per_node=2 layout=tp2": How(
        f"{SHORT} run_dir=runs/tp2", says="data parallel 1, tensor 2, sequence parallel"
    ),
    # go on, or not, from what `make train` left
    "python launch/train.py run_dir=runs/first": How(SHORT, says="all 2 steps are trained"),
    "python launch/train.py run_dir=runs/first training.train_steps=400": How(
        "launch=plan run_dir=runs/longer", says="400 steps"
    ),
    "python launch/train.py run_dir=runs/first model.hidden_size=256": How(status=2),
    "python launch/train.py run_dir=runs/second checkpoint.load=runs/first/checkpoints "
    "training.optimizer.learning_rate=1e-3": PLANNED,
    # plan here
    "make train ARGS=run_dir=runs/first": How("ARGS='launch=plan run_dir=runs/planned'"),
    "python launch/train.py -m training.optimizer.learning_rate=1e-3,3e-3,6e-3": How(
        "launch=plan", says="sweep.txt"
    ),
    "python launch/train.py -m model=gpt_tiny,moe_tiny training.seed=1,2 run_dir=runs/seeds": How(
        "launch=plan", says="model=moe_tiny training.seed=2"
    ),
    "python launch/train.py experiment=compare_precision training.train_steps=100": PLANNED,
    "python launch/train.py model=parallel_tiny": PLANNED,
    # the image of a job, and its checks
    "python tools/image.py build": How("--dry-run", says="--file container/Dockerfile"),
    "python tools/image.py check": How("--dry-run", says="container/image/check.py"),
    "python tools/image.py push --region us-west-2": How(
        "--dry-run", says="launch.image=ACCOUNT.dkr.ecr.us-west-2.amazonaws.com/slipway:"
    ),
    # Whether they fail depends on the machine: tests/container/test_preflight.py.
    "python container/preflight.py": How("--help", says="Is this node fit to train?"),
    "python container/preflight.py --instance ml.p6-b200.48xlarge --run-dir runs/first": How(
        "--help", says="--min-allreduce"
    ),
    # elsewhere
    "python launch/train.py model=gpt_32b precision=nvfp4 hardware=p6_b200 launch=plan": ELSEWHERE,
    "python launch/train.py model=gpt_2b hardware=p6_b200 launch=plan": ELSEWHERE,
    "python launch/train.py model=gpt_8b precision=fp8 layout=ddp hardware=p6_b200 "
    "hardware.price_per_node_hour=114 launch=plan": How(says="USD a billion tokens"),
    "python launch/train.py model=llama3_70b precision=fp8 layout=tp8 hardware=p6_b300 "
    "hardware.nodes=2 launch=plan": ELSEWHERE,
    "python launch/train.py -m experiment=compare_precision model=gpt_1b hardware=h200 "
    "precision=bf16,fp8 launch=plan": How(says="sweep.txt"),
    "python tools/advise.py model=gpt_32b hardware=p6_b200 --report runs/advice": How(
        "precision=bf16 layout=ddp hardware=p6_b300 model=gpt_8b", says="advice.html"
    ),
    "python tools/sizes.py": How("--help", says="docs/sizes.md"),  # its tables: test_sizes.py
    # in containers elsewhere: written, not started
    "python launch/train.py model=gpt_32b precision=nvfp4 hardware=p6_b200 launch=sagemaker "
    "launch.dry_run=true": How(says="request.json"),
    "python launch/train.py model=gpt_8b precision=fp8 hardware=p6_b200 data=indexed "
    "data.paths=[data:web/part] +launch.channels.web=s3://team-data/corpus launch=sagemaker "
    "launch.dry_run=true": How(says="request.json"),
    "python launch/train.py model=llama3_70b precision=fp8 layout=tp8 hardware=p6_b300 "
    "hardware.nodes=2 +launch.channels.shared=fsx://fs-0123456789abcdef0/abcdefgh "
    "launch.run_folder=data:shared/runs/first launch.subnets=[subnet-0a1b2c3d] "
    "launch.security_groups=[sg-0a1b2c3d] launch=sagemaker launch.dry_run=true": How(
        says="request.json"
    ),
    "python launch/train.py -m model=gpt_1b,gpt_3b precision=bf16,fp8 hardware=p6_b200 "
    "launch=sagemaker launch.dry_run=true run_dir=runs/formats": How(says="sweep.txt"),
    "python launch/train.py model=llama3_8b precision=fp8 layout=fsdp hardware=h200 "
    "hardware.nodes=4 launch=slurm launch.partition=gpu launch.max_run_hours=24 "
    "run_dir=runs/eight": How(says="job.sbatch"),
    "python launch/train.py model=gpt_1b precision=bf16 layout=ddp hardware=h200 launch=docker "
    "run_dir=runs/one": How(says="docker.sh"),
    "python launch/train.py model=gpt_8b precision=fp8 layout=fsdp hardware=p6_b200 "
    "hardware.nodes=2 launch=kubernetes launch.namespace=research launch.volume_claim=lustre "
    "run_dir=runs/eight_b": How(says="job.yaml"),
    # refused
    "python launch/train.py layout.tensor_paralel=2": How(status=2),
    "python launch/train.py model=gpt_1b data=indexed data.paths=[data/web]": How(
        status=2, says="web.idx does not exist"
    ),
    "python tools/prepare_data.py web/*.jsonl.gz --output data/web --tokenizer huggingface "
    "--tokenizer-path tokenizers/llama3 --workers 16": How(
        "--tokenizer byte", 2, "web/*.jsonl.gz"
    ),  # a tokenizer may be downloaded
    # neither
    "python tools/prepare_data.py docs/*.md README.md --output data/mine": How(
        says="documents", first=True
    ),
    "python launch/train.py": PLANNED,
    "python launch/train.py --help": How(says="nvfp4"),
    "python launch/train.py --cfg job --resolve": How(says="global_batch_size: 16"),
    "make test": How("ARGS='tests/planning/test_pattern.py -p no:cacheprovider'", says="passed"),
    # 1: only a run shows that a machine trains
    "python tools/doctor.py": How("--no-step", status=1, says="what works here"),
    "source .venv/bin/activate": How("&& python --version", says="Python 3.12"),
    "tensorboard --logdir runs": How("--version_tb"),
}

# Need an account: not run, and held to the service's own model.
WITH_ACCOUNT = {
    "aws s3 mb s3://BUCKET --region REGION",
    "aws iam create-role --role-name slipway-job --assume-role-policy-document "
    "file://docs/iam/job_role_trust.json",
    "aws iam put-role-policy --role-name slipway-job --policy-name runs --policy-document "
    "file://docs/iam/job_role.json",
    "aws s3 sync data s3://BUCKET/corpus --exclude * --include web*",
}


def commands(document: Path) -> Iterator[tuple[str, str]]:
    """(command as COMMANDS writes it, what the document says that it prints)."""
    text = document.read_text()
    blocks = [(match[1], match[2], match.end()) for match in FENCE.finditer(text)]
    for language, body, end in blocks:
        after = FENCE.match(text, end + 1)
        printed = after[2] if after and after[1] == "text" else ""
        for line in body.replace("\\\n", " ").splitlines():
            if language == "bash" or line.startswith(("python ", "make ")):
                words = shlex.split(line, comments=True)
                if words:
                    yield " ".join(words), printed
    for span in SPAN.findall(FENCE.sub("", text)):
        if span.startswith(("python launch", "python tools", "make ")) and "..." not in span:
            yield " ".join(shlex.split(span)), ""


FOUND = [(d, *found) for d in DOCUMENTS for found in commands(d)]


# Run by tests/launch/aws/test_page.py, against a server of AWS's interfaces.
OF_JOBS = re.compile(r"python (launch/jobs|tools/plans|tools/compare_runs)\.py ")


def test_every_command_is_classified() -> None:
    found = {command for _, command, _ in FOUND if not OF_JOBS.match(command)}
    assert found == set(COMMANDS) | WITH_ACCOUNT


@pytest.mark.parametrize("command", sorted(WITH_ACCOUNT))
def test_a_command_for_an_account_is_one_that_aws_has(command: str) -> None:
    _, service, operation, *words = command.split()
    for word in words:
        if word.startswith("file://"):
            assert (ROOT / word.removeprefix("file://")).is_file()
    if service == "s3":  # the command line's own, not the service's
        assert operation in ("mb", "sync")
        return
    model = get_session().get_service_model(service)
    names = {xform_name(name, "-"): name for name in model.operation_names}
    known = {
        xform_name(m, "-") for m in model.operation_model(names[operation]).input_shape.members
    }
    assert {word[2:] for word in words if word.startswith("--")} <= known


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, with the files that the documents show, to run commands in."""
    folder = tmp_path_factory.mktemp("docs") / "slipway"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
            (folder / name).chmod((ROOT / name).stat().st_mode)
    for document in DOCUMENTS:
        for _, body in FENCE.findall(document.read_text()):
            if shown := re.match(r"(?:# @.*\n)?# ((?:conf|models)/\S+)\n", body):
                (folder / shown[1]).parent.mkdir(parents=True, exist_ok=True)
                (folder / shown[1]).write_text(body)
    # The environment is this one and counts as current, so that make changes nothing in it.
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != "slipway-stamp":
            (folder / ".venv" / path.name).symlink_to(path)
    stamp = "cat requirements.lock pyproject.toml tools/setup.sh | cksum > .venv/slipway-stamp"
    subprocess.run(stamp, shell=True, cwd=folder, check=True)
    CACHE.mkdir(exist_ok=True)
    (folder / ".cache").symlink_to(CACHE)
    return folder


@pytest.fixture(scope="module")
def ran(copy: Path) -> dict[str, tuple[int, str]]:
    """(exit status, screen) of each command."""
    path = f"{copy / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""}

    def run(command: str) -> tuple[int, str]:
        # Only what a shell has to read stands unquoted.
        line = command if command.startswith("source ") else shlex.join(command.split(" "))
        done = subprocess.run(
            ["bash", "-c", f"{line} {COMMANDS[command].adds}"],
            cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=600,
        )  # fmt: skip
        return done.returncode, done.stdout

    results = {}
    with ThreadPoolExecutor(2) as pool:
        for first in (True, False):
            names = [name for name, how in COMMANDS.items() if how.first == first]
            results |= dict(zip(names, pool.map(run, names), strict=True))
    return results


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_what_the_document_says(
    ran: dict[str, tuple[int, str]], command: str
) -> None:
    status, screen = ran[command]
    assert status == COMMANDS[command].status, screen
    assert COMMANDS[command].says in screen


def _timeless(text: str) -> list[str]:
    return [re.sub(r"\d{8}-\d{6}", "<time>", line.rstrip()) for line in text.splitlines()]


QUOTED = [
    (c, printed) for _, c, printed in FOUND if printed and c in COMMANDS and not COMMANDS[c].adds
]


@pytest.mark.parametrize(("command", "printed"), QUOTED, ids=[c for c, _ in QUOTED])
def test_what_a_document_shows_is_on_the_screen(
    ran: dict[str, tuple[int, str]], command: str, printed: str
) -> None:
    screen = _timeless(ran[command][1])
    assert [line for line in _timeless(printed) if line not in screen] == []


# --- links, names, quotes ---------------------------------------------------------------------


def _anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", document.read_text())):
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path), target


def test_the_readme_leads_to_every_page() -> None:
    text = DOCUMENTS[0].read_text()
    assert [path.name for path in DOCUMENTS[1:] if f"](docs/{path.name})" not in text] == []


def _words(document: Path) -> Iterator[str]:
    """Words of code in it: of spans, and of commands that are legal."""
    for span in SPAN.findall(FENCE.sub("", document.read_text())):
        yield from span.split()
    for found, command, _ in FOUND:
        if found == document and command in COMMANDS and COMMANDS[command].status != 2:
            yield from command.split()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_settings_and_choices_exist(document: Path) -> None:
    known, groups = compose.settings(), compose.groups()
    for word in _words(document):
        if found := re.fullmatch(r"([a-z]+\.[a-z0-9_.]+)(=.*)?,?", word):
            group = found[1].partition(".")[0]
            assert group not in groups or found[1] in known, word
        elif (found := re.fullmatch(r"([a-z]+)=([a-z0-9_/,]+)", word)) and found[1] in groups:
            shown = SHOWN if found[1] == "model" else set()
            unknown = set(found[2].split(",")) - set(compose.choices(found[1])) - shown
            assert not unknown, word


# Models that docs/add_a_model.md makes.
SHOWN = {"gpt_2b", "parallel_tiny"}


@pytest.mark.parametrize(
    ("page", "group"),
    [("layouts", "layout"), ("precision", "precision"), ("data", "data")],
)
def test_a_table_lists_all_choices_of_its_group(page: str, group: str) -> None:
    rows = _table(ROOT / "docs" / f"{page}.md", f"`{group}=`")
    assert sorted(name for row in rows for name in SPAN.findall(row)) == compose.choices(group)


def _table(document: Path, head: str) -> list[str]:
    """The first column of the tables whose head it is."""
    found, inside = [], False
    for line in document.read_text().splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cell = line.split("|")[1].strip()
        if cell == head:
            inside = True
        elif inside and set(cell) != {"-"}:
            found.append(cell)
    return found


@cache
def _messages() -> str:
    """All strings of the product, a … for each value put in."""
    texts = [re.sub(r"\$\w+", "…", (ROOT / "tools" / "setup.sh").read_text())]
    for folder in ("container", "launch", "planning", "training", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", "…") for part in node.values]
                    texts.append("".join(p if isinstance(p, str) else "…" for p in parts))
    return "\n".join(texts)


def test_troubleshooting_quotes_what_the_product_prints() -> None:
    rows = _table(ROOT / "docs" / "troubleshooting.md", "the screen says")
    quotes = [SPAN.findall(row)[0] for row in rows]
    assert len(quotes) > 15
    assert [quote for quote in quotes if quote not in _messages()] == []


ECR = re.compile(r"\w+\.dkr\.ecr\.[\w-]+\.amazonaws\.com")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_is_of_no_machine_and_no_registry(document: Path) -> None:
    text = document.read_text()
    assert re.findall(r"(?<![\w.~/…*])/(?:\w[\w.-]*/)+", text.replace("/dev/shm", "")) == []
    hosts = re.findall(r"https?://\S+|\b[\w.-]+\.(?:org|io|com|net|dev)\b", text)
    services = {"sagemaker.amazonaws.com"}  # who takes a role, in AWS's words
    assert [host for host in hosts if host not in services and not ECR.fullmatch(host)] == []
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)  # a screen may be wide
    assert [line for line in prose.splitlines() if len(line) > 130 and "|" not in line] == []
