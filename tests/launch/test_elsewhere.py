"""Runs elsewhere: scripts and manifests as golden files, what they run, and what is refused."""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from container import contract
from launch import contained
from launch.scripts import docker, kubernetes, slurm
from launch.scripts.common import IMAGE_ROOT, Mount, mounts
from launch.train import main
from planning.findings import ChoiceError, Finding
from planning.schema import DockerLaunch, KubernetesLaunch, SlurmLaunch
from tests.choices import ROOT
from tests.launch.elsewhere import NAME, choose, golden, plan

RUN = Path("/shared/runs/one")
WORDS = ["model=gpt_160m", "layout=ddp", "hardware=p6_b200"]


def stub(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run(script: Path, stubs: Path, **environment: str) -> str:
    """What a script prints where `stubs` are the commands of a cluster."""
    done = subprocess.run(
        ["bash", str(script)],
        env={"PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}", **environment},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Slurm ------------------------------------------------------------------------------------

SLURM: dict[str, tuple[str, ...]] = {
    "checkout": (),
    "image": (
        "hardware.nodes=4",
        "launch.image=/images/slipway.sqsh",
        "launch.mounts=[/lustre:/lustre]",
        "launch.partition=b200",
        "launch.account=research",
        "launch.qos=high",
        "launch.max_run_hours=36.5",
        "launch.options=[--exclusive,--exclude=node13]",
        "launch.environment.NCCL_DEBUG=INFO",
    ),
}


def batch_script(*words: str, run_dir: Path = RUN, python: Path = Path("/venv/bin/python")) -> str:
    chosen = plan("slurm", *words)
    assert isinstance(chosen.config.launch, SlurmLaunch)
    return slurm.build(
        chosen, chosen.config.launch, name=NAME, run_dir=run_dir, python=python,
        root=Path("/home/me/slipway"), mounts=[Mount(run_dir, True), Mount(Path("/data"), False)],
    )  # fmt: skip


@pytest.mark.parametrize("case", SLURM)
def test_a_batch_script_is_as_its_golden_file_has_it(case: str) -> None:
    golden(f"slurm_{case}.sbatch", batch_script(*SLURM[case]))


@pytest.mark.parametrize("case", SLURM)
def test_every_node_is_told_who_it_is(case: str, tmp_path: Path) -> None:
    stub(tmp_path, "scontrol", 'printf "n7\\nn8\\n"')
    # Runs the command of the last two words, as srun does on each node.
    stub(tmp_path, "srun", 'for node in n7 n8; do SLURMD_NODENAME=$node "${@: -3}"; done')
    told = f'echo "$0 $1 {{${contract.HOST}}} {{${contract.HOSTS}}} {{${contract.BASE}}}"'
    told = told.replace("{$", "${").replace("}}", "}").replace("{{", "{")
    told += ' "$SLIPWAY_PORT" "$NCCL_DEBUG"'
    python = tmp_path / "a folder" / "python"
    python.parent.mkdir()
    stub(python.parent, "python", told)
    stub(tmp_path, "python", told)
    run_dir = tmp_path / "it's a run"
    script = tmp_path / "job"
    script.write_text(batch_script(*SLURM[case], run_dir=run_dir, python=python))
    printed = run(script, tmp_path, SLURM_JOB_NODELIST="n[7-8]", SLURM_JOB_ID="41234")
    program, root = (
        (python, "/home/me/slipway") if case == "checkout" else (tmp_path / "python", IMAGE_ROOT)
    )
    debug = "" if case == "checkout" else "INFO"
    for node, line in zip(("n7", "n8"), printed.splitlines(), strict=True):
        assert (
            line.rstrip()
            == (
                f"{program} {root}/container/first_process.py {node} n7,n8 {run_dir}/container "
                f"21234 {debug}"
            ).rstrip()
        )


# --- Docker -----------------------------------------------------------------------------------

DOCKER: dict[str, tuple[str, ...]] = {
    "plain": (),
    "all": (
        "launch.image=slipway:1a2b",
        "launch.mounts=[/models:/models:ro]",
        "launch.shm_gib=8",
        "launch.options=['--cpuset-cpus=0-63']",
        "launch.environment.NCCL_DEBUG=INFO",
        "launch.environment.GREETING=it's me",
    ),
}


def docker_script(*words: str) -> str:
    chosen = plan("docker", *words)
    assert isinstance(chosen.config.launch, DockerLaunch)
    places = [Mount(RUN, True), Mount(Path("/data/a corpus"), False)]
    return docker.build(chosen, chosen.config.launch, name=NAME, run_dir=RUN, mounts=places)


@pytest.mark.parametrize("case", DOCKER)
def test_a_docker_command_is_as_its_golden_file_has_it(case: str) -> None:
    golden(f"docker_{case}.sh", docker_script(*DOCKER[case]))


def test_docker_is_given_whole_words(tmp_path: Path) -> None:
    stub(tmp_path, "docker", 'printf "%s\\n" "$@"')
    script = tmp_path / "docker.sh"
    script.write_text(docker_script(*DOCKER["all"]))
    words = run(script, tmp_path).splitlines()
    assert words[0] == "run"
    assert words[-1] == "slipway:1a2b"
    assert f"--user={os.getuid()}:{os.getgid()}" in words
    assert "--volume=/data/a corpus:/data/a corpus:ro" in words
    assert "--env=GREETING=it's me" in words
    assert all(word.startswith("--") for word in words[1:-1]), words


def test_a_cpu_needs_no_gpus_of_docker() -> None:
    assert "--gpus" in docker_script()
    assert "--gpus" not in docker_script("hardware=cpu")


# --- Kubernetes -------------------------------------------------------------------------------

KUBERNETES: dict[str, tuple[str, ...]] = {
    "plain": ("hardware=h200",),
    "all": (
        "hardware.nodes=2",
        "launch.namespace=research",
        "launch.image=111122223333.dkr.ecr.us-east-1.amazonaws.com/slipway:1",
        "launch.node_selector.pool=b200",
        "launch.tolerations=[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]",
        "launch.annotations.queue=night",
        "launch.environment.NCCL_DEBUG=INFO",
        "launch.volume_claim=lustre",
        "launch.mount_path=/lustre/",
    ),
}


def manifest(*words: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(text, config map, job)"""
    chosen = plan("kubernetes", *words)
    assert isinstance(chosen.config.launch, KubernetesLaunch)
    text = kubernetes.build(chosen, chosen.config.launch, name=NAME, start={"version": 1})
    config_map, job = yaml.safe_load_all(text)
    return text, config_map, job


@pytest.mark.parametrize("case", KUBERNETES)
def test_a_manifest_is_as_its_golden_file_has_it(case: str) -> None:
    text, config_map, _ = manifest(*KUBERNETES[case])
    planned = plan("kubernetes", *KUBERNETES[case]).to_yaml()
    assert config_map["data"]["plan.yaml"] == planned  # byte for byte
    assert json.loads(config_map["data"]["start.json"]) == {"version": 1}
    indented = "".join(f"    {line}\n" if line else "\n" for line in planned.splitlines())
    assert indented in text
    golden(f"kubernetes_{case}.yaml", text.replace(indented, "    (the plan)\n"))


def test_pods_have_names_that_fit() -> None:
    _, _, job = manifest("hardware.nodes=2")
    hosts = {e["name"]: e["value"] for e in job["spec"]["trainer"]["env"]}[contract.HOSTS]
    assert hosts.split(",") == [f"{NAME}-node-0-{i}.{NAME}" for i in range(2)]
    longest = "x" * kubernetes.LONGEST_BASE + NAME.removeprefix("gpt-160m")
    assert len(f"{longest}-node-0-9999") <= 63


def nemo_runs_body(**settings: Any) -> dict[str, Any]:
    """The manifest that NeMo-Run would make: its own function, without the 10 s of its imports."""
    (path,) = (p for p in metadata.files("nemo-run") or () if p.match("execution/kubeflow.py"))
    tree = ast.parse(path.locate().read_text())
    wanted = [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.FunctionDef) and node.name == "get_job_body")
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("_TRAINJOB"))
    ]
    names: dict[str, Any] = {"Any": Any}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), names)
    return dict(names["get_job_body"](SimpleNamespace(**settings), "x", ["bash"]))


def test_a_manifest_has_the_members_that_nemo_run_gives_it() -> None:
    theirs = nemo_runs_body(
        image="i", namespace="n", num_nodes=2, annotations={"a": "b"}, labels={"c": "d"},
        volumes=[{"name": "v"}], volume_mounts=[{"name": "v"}], tolerations=[{"key": "k"}],
        env_vars={"A": "b"}, env_list=[], container_kwargs={}, image_pull_secrets=[],
        affinity={}, pod_spec_overrides={}, pod_labels={}, pod_annotations={}, spec_kwargs={},
        runtime_ref="r", nproc_per_node=lambda: 8,
        _build_resources=lambda: {"requests": {"g": 8}, "limits": {"g": 8}},
    )  # fmt: skip
    _, _, ours = manifest(*KUBERNETES["all"])

    def members(value: Any, at: str = "") -> set[str]:
        if isinstance(value, dict):
            free = at.endswith(("labels", "annotations", "nodeSelector", "requests", "limits"))
            inner = {} if free else value
            return {at} | {m for k, v in inner.items() for m in members(v, f"{at}.{k}")}
        if isinstance(value, list):
            return {m for item in value for m in members(item, at)}
        return {at}

    pod = ".spec.podTemplateOverrides.spec."
    # What is inside these is Kubernetes' own, and free in NeMo-Run.
    free = (f"{pod}volumes.", f"{pod}containers.volumeMounts.", f"{pod}tolerations.")
    found = {m for m in members(ours) - members(theirs) if not m.startswith(free)}
    assert found == {f"{pod}nodeSelector"}
    assert (ours["apiVersion"], ours["kind"]) == (theirs["apiVersion"], theirs["kind"])


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sagemaker", "slurm", "kubernetes"])
def test_this_machine_is_no_hardware_elsewhere(kind: str) -> None:
    with pytest.raises(ChoiceError) as refused:
        contained.refuse_this(choose(kind, "hardware=this"))
    assert "hardware=p6_b200 (ml.p6-b200.48xlarge)" in str(refused.value)


def test_a_container_here_may_use_what_is_here() -> None:
    contained.refuse_this(choose("docker", "hardware=this"))


def said(kind: str, *words: str) -> list[Finding]:
    config = choose(kind, *words)
    assert not isinstance(config.launch, str)
    return contained.check(config, config.launch, plan(kind))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "words", "setting", "part"),
    [
        ("slurm", ("launch.environment.A-B=x",), "launch.environment.A-B", "no variable's name"),
        ("slurm", ("launch.environment.OMP_NUM_THREADS=x",), "launch.environment.OMP_NUM_THREADS",
         "the plan sets it to"),
        ("docker", ("launch.environment.RANK=x",), "launch.environment.RANK", "in the container"),
        ("docker", ("launch.environment.PYTHONPATH=/x",), "launch.environment.PYTHONPATH",
         "in the container"),
        *(
            (kind, (f"launch.environment.{name}=/x",), f"launch.environment.{name}", "first one")
            for kind, name in (
                ("sagemaker", "LD_PRELOAD"), ("slurm", "LD_AUDIT"), ("kubernetes", "PYTHONHOME"),
                ("docker", "PYTHONPLATLIBDIR"), ("docker", "PYTHONINSPECT"),
            )
        ),
        ("sagemaker", ("launch.environment.NCCL_PROTO=simple",), "launch.environment.NCCL_PROTO",
         "slows or hangs"),
        ("docker", ("hardware.nodes=2",), "hardware.nodes", "starts one machine"),
        ("slurm", ("data=indexed", "data.paths=[data:web/x]"), "data.paths", "only launch=sage"),
        ("kubernetes", ("data=indexed", "data.paths=[/data/x]"), "data.paths", "not on the volume"),
        ("kubernetes", ("checkpoint.save=/big",), "checkpoint.save", "not on the volume"),
        ("kubernetes", ("launch.mount_path=mnt",), "launch.mount_path", "no folder"),
    ],
)  # fmt: skip
def test_what_no_container_can_keep_to(
    kind: str, words: tuple[str, ...], setting: str, part: str
) -> None:
    (found,) = said(kind, *words)
    assert found.setting == setting
    assert part in found.message
    assert found.fix


@pytest.mark.parametrize("kind", ["sagemaker", "slurm", "docker", "kubernetes"])
def test_a_usual_choice_is_let_through(kind: str) -> None:
    assert said(kind, "launch.environment.NCCL_DEBUG=INFO") == []


def test_a_volume_holds_data_and_checkpoints() -> None:
    on_volume = ("data=indexed", "data.paths=[/mnt/slipway/web]", "checkpoint.save=/mnt/slipway/c")
    assert said("kubernetes", *on_volume) == []


def test_mounts_are_what_a_run_reads_and_writes() -> None:
    config = choose(
        "docker", "data=indexed", "data.paths=[0.5,/data/web/a,0.5,/data/web/b,s3://b/c]",
        "checkpoint.load=/old/checkpoints", "checkpoint.save=/big/run",
    )  # fmt: skip
    assert [str(mount) for mount in mounts(config, RUN, RUN / "cache")] == [
        "/big/run:/big/run",
        "/shared/runs/one:/shared/runs/one",  # the cache is in it
        "/data/web:/data/web:ro",
        "/old/checkpoints:/old/checkpoints:ro",
    ]


# --- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "script", "command"),
    [("slurm", slurm.FILE, "sbatch"), ("docker", docker.FILE, "bash"),
     ("kubernetes", kubernetes.FILE, "kubectl apply -f")],
)  # fmt: skip
def test_the_command_writes_a_run_that_can_be_read_and_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    kind: str, script: str, command: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, f"launch={kind}", "run_dir=r", "data=mock"]) == 0
    path = tmp_path / "r" / script
    assert f"{command} {path}" in capsys.readouterr().out
    start = json.loads((tmp_path / "r" / "start.json").read_text())
    assert start["shared_run_dir"] is True
    private = [p for p in (tmp_path / "r").rglob("*") if p.is_file() and p.name != ".lock"]
    assert {stat.S_IMODE(p.stat().st_mode) & 0o077 for p in private} == {0}
    text = path.read_text()
    assert start["name"] in text
    if kind != "kubernetes":
        assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
        base = tmp_path / "r" / "container"
        assert contract.plan_file(base).read_text() == (tmp_path / "r" / "plan.yaml").read_text()
        assert contract.read_start(base).run_dir == tmp_path / "r"
        assert start["roots"]["cache:"] == str(tmp_path / ".cache")
    if kind != "slurm":
        return
    # The same folder is the same run; a new one is another.
    assert main([*WORDS, f"launch={kind}", "run_dir=r", "data=mock"]) == 0
    assert json.loads((tmp_path / "r" / "start.json").read_text())["name"] == start["name"]
    assert main([*WORDS, f"launch={kind}", "run_dir=r", "data=mock", "resume=none"]) == 0
    assert json.loads((tmp_path / "r" / "start.json").read_text())["name"] != start["name"]
    assert len(list((tmp_path / "r").glob("previous-*"))) == 1


def test_a_refused_choice_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "launch=docker", "hardware.nodes=2"]) == 2
    assert main(["launch=slurm"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert "choose hardware=p5" in capsys.readouterr().err


def test_the_image_has_the_repository_where_scripts_look_for_it() -> None:
    dockerfile = (ROOT / "container" / "Dockerfile").read_text()
    assert f"WORKDIR {IMAGE_ROOT}\n" in dockerfile
    assert f'ENTRYPOINT ["python", "{IMAGE_ROOT}/container/first_process.py"]' in dockerfile
