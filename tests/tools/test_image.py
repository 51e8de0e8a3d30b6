"""The image's commands with an engine that only writes down what it is told, and a fake ECR."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws

from container import network
from container.image import check as image_check
from container.image import packages
from tools import image
from training.torchrun import ROOT

DIGEST = "public.ecr.aws/x/pytorch@sha256:" + "0" * 64


class FakeEngine:
    """A docker in PATH. `images`: those that it has; `calls`: its words and standard inputs."""

    def __init__(self, folder: Path, *, daemon: bool = True, name: str = "docker") -> None:
        self.log, self.images = folder / "calls.jsonl", folder / "images"
        self.images.mkdir()
        program = folder / name
        program.write_text(
            f"""#!{image.sys.executable} -S
import json, pathlib, sys
words, images = sys.argv[1:], pathlib.Path({str(self.images)!r})
stdin = sys.stdin.read() if "--password-stdin" in words else ""
with open({str(self.log)!r}, "a") as log:
    log.write(json.dumps([words, stdin]) + "\\n")
if words[0] == "info":
    sys.exit({int(not daemon)})
if words[0] == "build":
    (images / words[words.index("--tag") + 1].replace("/", "_")).touch()
if words[:2] == ["image", "inspect"]:
    if "RepoDigests" in " ".join(words):
        print(json.dumps([{DIGEST!r}]))
    elif not (images / words[-1].replace("/", "_")).exists():
        sys.exit(1)
    else:
        print("amd64")
"""
        )
        program.chmod(0o755)

    def calls(self, *first: str) -> list[list[str]]:
        lines = [json.loads(line)[0] for line in self.log.read_text().splitlines()]
        return [words for words in lines if words[0] in first]

    def stdins(self) -> list[str]:
        return [json.loads(line)[1] for line in self.log.read_text().splitlines()]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return FakeEngine(tmp_path)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        import boto3

        yield boto3.client("ecr", region_name="us-west-2")


def test_a_build_pins_its_base_and_is_done_once(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert image.main(["build"]) == 0
    (pull,) = engine.calls("pull")
    assert pull == ["pull", "--platform", "linux/amd64", image.default_base()]
    (built,) = engine.calls("build")
    assert built[:5] == ["build", "--platform", "linux/amd64", "--file", "container/Dockerfile"]
    assert f"BASE={DIGEST}" in built
    assert "--provenance=false" in built  # else SageMaker is given a list of images
    assert image.main(["build"]) == 0
    assert len(engine.calls("build")) == 1
    assert "is built already" in capsys.readouterr().out


def test_the_tag_is_of_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("conf/a.yaml", "training/b.py", "pyproject.toml"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).write_text("1")
    monkeypatch.setattr(image, "ROOT", tmp_path)
    tag = image.tag("base", "", "x86_64")
    assert tag.endswith("-x86-64")
    (tmp_path / "training/__pycache__").mkdir()
    (tmp_path / "training/__pycache__/b.pyc").write_text("compiled")
    (tmp_path / "conf/local").mkdir()
    (tmp_path / "conf/local/default.yaml").write_text("an account's")
    (tmp_path / "README.md").write_text("not in the image")
    assert image.tag("base", "", "x86_64") == tag
    others = {image.tag("other", "", "x86_64"), image.tag("base", "", "aarch64")}
    (tmp_path / "conf/a.yaml").write_text("2")
    others.add(image.tag("base", "", "x86_64"))
    (tmp_path / "conf/a.yaml").rename(tmp_path / "conf/c.yaml")
    others.add(image.tag("base", "", "x86_64"))
    assert len(others | {tag}) == 5


def test_a_push_makes_the_repository_and_is_done_once(
    engine: FakeEngine, aws: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["push", "--region", "us-west-2", "--repository", "team/slipway"]
    assert image.main(words) == 0
    (made,) = aws.describe_repositories()["repositories"]
    assert made["repositoryName"] == "team/slipway"
    assert made["imageTagMutability"] == "IMMUTABLE"
    registry = "123456789012.dkr.ecr.us-west-2.amazonaws.com"
    (login,) = engine.calls("login")
    assert login == ["login", "--username", "AWS", "--password-stdin", registry]
    assert any(engine.stdins())  # the token goes there, and is not shown
    (pushed,) = engine.calls("push")
    assert pushed[1].startswith(f"{registry}/team/slipway:")
    out = capsys.readouterr().out
    assert f"launch.image={pushed[1]}" in out
    assert not any(token and token in out for token in engine.stdins())
    aws.put_image(
        repositoryName="team/slipway",
        imageManifest='{"schemaVersion": 2}',
        imageManifestMediaType="application/vnd.docker.distribution.manifest.v2+json",
        imageTag=pushed[1].rpartition(":")[2],
    )
    assert image.main(words) == 0
    assert len(engine.calls("push")) == 1
    assert "is pushed already" in capsys.readouterr().out


def test_a_dry_run_prints_the_commands_without_engine_or_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert image.main(["push", "--dry-run", "--hardware", "p6e_gb200"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in commands] == [
        ["docker", "pull"],
        ["docker", "build"],
        ["ecr", "create-repository"],
        ["docker", "login"],
        ["docker", "tag"],
        ["docker", "push"],
        [commands[-1]],
    ]
    assert "--platform linux/arm64" in commands[1]


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ([], "no container engine is here (docker, finch, podman)"),
        (["podman"], "podman is installed and its service does not answer"),
    ],
)
def test_without_an_engine_it_says_what_would_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engines: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}")
    for name in engines:
        FakeEngine(tmp_path, daemon=False, name=name)
    assert image.main(["build"]) == 3
    assert message in capsys.readouterr().err


def test_a_mistyped_instance_type_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert image.main(["build", "--hardware", "p6b200"]) == 2
    assert "did you mean p6_b200?" in capsys.readouterr().err


def test_the_check_reads_the_dockerfile_and_runs_in_the_image(engine: FakeEngine) -> None:
    assert image.main(["check"]) == 3  # not built
    assert image.main(["build"]) == 0
    assert image.main(["check"]) == 0  # hadolint is real
    (ran,) = engine.calls("run")
    assert ran[:4] == ["run", "--rm", "--entrypoint", "python"]
    assert ran[5:] == ["container/image/check.py"]


def test_the_dockerfile_copies_what_the_tag_is_of() -> None:
    copied = set()
    for line in image.DOCKERFILE.read_text().splitlines():
        words = line.split()
        if words[:1] == ["COPY"] and not words[-1].startswith("/tmp"):
            copied |= {word.strip("/").partition("/")[0] for word in words[1:-1]}
    assert copied == set(image.CONTENT)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


# --- the scripts inside -----------------------------------------------------------------------

PROJECT = {
    "dependencies": ["torch>=2.11,<2.12", "numpy>=1.26", "nvidia-ml-py>=12"],
    "optional-dependencies": {"te": ["transformer-engine[pytorch]>=2.20,<2.21"]},
}
LOCK = """\
numpy==2.5.5 \\
    --hash=sha256:00
nvidia-cublas==13.1.0.3 \\
    --hash=sha256:00
nvidia-ml-py==13.615.71 \\
    --hash=sha256:00
torch==2.11.0 \\
    --hash=sha256:00
"""


def test_an_image_keeps_its_torch_and_gets_the_locks_versions_of_the_rest() -> None:
    base = {"torch": "2.11.0+cu130", "nvidia-cublas": "13.1.0.1", "numpy": "1.26.4"}
    requirements, constraints, wrong = packages.plan(PROJECT, LOCK, base)
    assert requirements == [
        "numpy>=1.26",
        "nvidia-ml-py>=12",
        "transformer-engine[pytorch]>=2.20,<2.21",
    ]
    assert constraints == [
        "numpy==2.5.5",
        "nvidia-cublas==13.1.0.1",
        "nvidia-ml-py==13.615.71",
        "torch==2.11.0+cu130",
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("torch", "wrong"),
    [
        ({"torch": "2.11.0a0+ngc"}, []),  # a vendor's build of the release
        ({"torch": "2.12.0"}, ["the base has torch 2.12.0; torch<2.12,>=2.11 is needed"]),
        ({}, ["the base has no torch"]),
    ],
)
def test_a_base_with_another_torch_is_refused(torch: dict[str, str], wrong: list[str]) -> None:
    assert packages.plan(PROJECT, LOCK, torch)[2] == wrong


def script(name: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "container" / "image" / name), *words],
        env=environ,
        capture_output=True,
        text=True,
    )


def stub(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("folder", network.PLUGIN_FOLDERS[:5])
def test_efa_of_the_base_is_taken_as_it_is(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "libnccl-net.so").touch()
    done = script("install_efa.sh", "", ROOT=str(tmp_path), PATH="/usr/bin:/bin")
    assert done.returncode == 0
    assert f"{folder}/libnccl-net.so" in done.stdout
    parts = dict(image_check.efa(tmp_path))
    assert parts["NCCL plug-in for EFA"] is None


def test_a_base_without_efa_needs_the_installers_version(tmp_path: Path) -> None:
    done = script("install_efa.sh", "", ROOT=str(tmp_path), PATH="/usr/bin:/bin")
    assert done.returncode == 1
    assert "build with --efa VERSION" in done.stderr
    asked, ran = tmp_path / "asked", tmp_path / "ran"
    stub(tmp_path, "curl", f'echo "$@" > {asked}')
    stub(
        tmp_path,
        "tar",
        "cat > /dev/null; mkdir aws-efa-installer; printf '#!/bin/sh\\n"
        f'echo "$@" > {ran}\\n\' > aws-efa-installer/efa_installer.sh; '
        "chmod +x aws-efa-installer/efa_installer.sh",
    )
    done = script("install_efa.sh", "1.47.0", ROOT=str(tmp_path), PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert asked.read_text().split()[-1].endswith("/aws-efa-installer-1.47.0.tar.gz")
    assert "--skip-kmod" in ran.read_text()


@pytest.mark.parametrize(("installed", "built"), [("2.20.1", False), ("2.13.0", True), ("", True)])
def test_transformer_engine_is_built_where_the_base_has_another(
    tmp_path: Path, installed: str, built: bool
) -> None:
    wheels, calls = tmp_path / "wheels", tmp_path / "calls"
    stub(
        tmp_path,
        "python",
        f'echo "$@" >> {calls}\n'
        'case "$2" in\n'
        f'  *transformer-engine*) [ -n "{installed}" ] && echo "{installed}" ;;\n'
        "  *torch.version.cuda*) echo 13.0 ;;\n"
        f"  *purelib*) echo {tmp_path}/site ;;\n"
        "esac",
    )
    stub(tmp_path, "dnf", f'echo dnf "$@" >> {calls}')
    variables = {
        "WHEELS": str(wheels),
        "ENGINE_VERSION": "2.20.2",
        "CUDA_ARCHITECTURES": "90;100;103",
        "MAX_JOBS": "8",
        "PATH": f"{tmp_path}:/usr/bin:/bin",
    }
    done = script("build_engine.sh", **variables)
    assert done.returncode == 0, done.stderr
    assert wheels.is_dir()
    said = calls.read_text()
    assert ("pip wheel" in said and "transformer-engine-torch==2.20.2" in said) == built
    assert ("dnf install -y cuda-libraries-devel-13-0" in said) == built
