"""What a container is told, and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from container import contract
from planning.findings import ChoiceError, MachineError

START = {
    "version": 1,
    "name": "run",
    "instance_type": "ml.p6-b200.48xlarge",
    "gpu": "b200",
    "gpus_per_node": 8,
    "nodes": 2,
    "environment": {"OMP_NUM_THREADS": "8"},
    "run_dir": "/opt/ml/checkpoints",
    "shared_run_dir": False,
    "roots": {"run:": "/opt/ml/checkpoints"},
    "max_restarts": 3,
    "preflight": True,
    "min_allreduce_gb_s": None,
    "stop_before_end_s": 2400,
    "worker": "training.worker",
}


def cluster(root: Path, contents: Any, **environ: str) -> contract.Cluster:
    path = root / "input" / "config" / "resourceconfig.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return contract.read_cluster(root, environ)


def start(root: Path, contents: dict[str, Any]) -> contract.Start:
    path = contract.start_file(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents))
    return contract.read_start(root)


def test_hosts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    hosts = [f"algo-{number}" for number in (1, 10, 2, 3, 4, 5, 6, 7, 8, 9)]  # as SageMaker sorts
    found = cluster(
        tmp_path,
        {"hosts": hosts, "current_host": "algo-10", "network_interface_name": "eth0"},
    )
    assert found.hosts == tuple(f"algo-{number}" for number in range(1, 11))
    assert (found.rank, found.interface) == (9, "eth0")


def test_outside_sagemaker_variables_name_the_hosts(tmp_path: Path) -> None:
    variables = {"SLIPWAY_HOSTS": "node7,node3", "SLIPWAY_HOST": "node3"}
    found = cluster(tmp_path, {}, **variables)
    assert (found.hosts, found.rank) == (("node7", "node3"), 1)
    with pytest.raises(MachineError, match="SLIPWAY_HOST=node9 is none of"):
        cluster(tmp_path, {}, **variables | {"SLIPWAY_HOST": "node9"})


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ({}, "`hosts` is null, not a list of names"),
        ({"hosts": "algo-1"}, '`hosts` is "algo-1", not a list'),
        ({"hosts": ["a", "a"], "current_host": "a"}, "`hosts` names one twice: a, a"),
        ({"hosts": ["algo-1"]}, "`current_host` is null, none of algo-1"),
        ({"hosts": ["a"], "current_host": "b"}, '`current_host` is "b", none of a'),
        ({"hosts": ["a"], "current_host": "a", "network_interface_name": 5}, "is 5, not a name"),
    ],
)
def test_a_malformed_resourceconfig_is_one_message(
    tmp_path: Path, contents: Any, message: str
) -> None:
    with pytest.raises(MachineError, match=r"resourceconfig\.json") as refused:
        cluster(tmp_path, contents)
    assert message in str(refused.value)


def test_the_start_file_is_read_whole(tmp_path: Path) -> None:
    found = start(tmp_path, START)
    assert found.run_dir == Path("/opt/ml/checkpoints")
    assert (found.nodes, found.preflight, found.min_allreduce_gb_s) == (2, True, None)


def test_all_that_is_wrong_in_the_start_file_is_said_at_once(tmp_path: Path) -> None:
    wrong = {**START, "nodes": 0, "preflight": 1, "max_restarts": True, "roots": {"a": 1}, "x": 1}
    del wrong["worker"]
    with pytest.raises(ChoiceError) as refused:
        start(tmp_path, wrong)
    for part in ("`nodes` is 0", "`preflight` is 1", "`max_restarts` is true", "`roots` holds",
                 "`x` is unknown", "`worker` is missing"):  # fmt: skip
        assert part in str(refused.value)
    with pytest.raises(ChoiceError, match="version 2, and this image reads 1"):
        start(tmp_path, {**START, "version": 2})


@pytest.mark.parametrize("text", ["1767225600", "1767225600000", " 1767225600.0 "])
def test_a_capacitys_end_is_in_seconds_or_milliseconds(text: str) -> None:
    assert contract.capacity_end({contract.CAPACITY_END: text}) == 1767225600  # 2026-01-01


@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-inf", "1e999", "soon", "2026-01-01"])
def test_a_capacitys_end_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(MachineError) as refused:
        contract.capacity_end({contract.CAPACITY_END: text})
    assert f"{contract.CAPACITY_END}: {text!r} is not a time" in str(refused.value)


def test_without_a_capacitys_end_there_is_no_planned_stop(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert contract.capacity_end({}) is None
    assert capsys.readouterr().out == ""
    assert contract.capacity_end({contract.CAPACITY_END: " "}) is None
    assert "does not stop before the end of the capacity" in capsys.readouterr().out


def test_a_long_reason_keeps_its_start_and_its_end(tmp_path: Path) -> None:
    contract.write_failure(tmp_path, "the cause" + "." * 5000 + "the fix")
    written = (tmp_path / "output" / "failure").read_text()
    assert len(written) == 1024
    assert written.startswith("the cause...")
    assert written.endswith("...the fix")
