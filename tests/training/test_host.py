"""What a container allows, and policies turned into values."""

from __future__ import annotations

from pathlib import Path

import pytest

from training import host


@pytest.mark.parametrize(
    ("own", "files", "gib", "cores"),
    [
        ("0::/\n", {"memory.max": "3221225472\n", "cpu.max": "100000 100000\n"}, 3, 1),
        ("0::/\n", {"memory.max": "max\n", "cpu.max": "max 100000\n"}, None, None),
        # Not mounted as the root: a limit above holds too.
        ("0::/a/b\n", {"a/memory.max": "1073741824\n", "a/b/memory.max": "2147483648\n"}, 1, None),
        # The host's path, of which the container sees its own part only.
        ("0::/docker/12ab\n", {"memory.max": "2147483648\n"}, 2, None),
        (
            "4:memory:/job\n1:cpu,cpuacct:/job\n",
            {
                "memory/job/memory.limit_in_bytes": "2147483648\n",
                "cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            2,
            1,
        ),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None, None),
    ],
)
def test_limits_of_a_container(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    own: str,
    files: dict[str, str],
    gib: float | None,
    cores: int | None,
) -> None:
    monkeypatch.setattr(host, "OWN_CGROUPS", tmp_path / "none")
    all_gib, all_cores = host.memory_gib(), host.cores()
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    monkeypatch.setattr(host, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "fs")
    assert host.memory_gib() == (gib or all_gib)
    assert host.cores() == (cores or all_cores)


def test_policies_become_this_hosts_values() -> None:
    planned = {"OMP_NUM_THREADS": "policy:cores-per-process", "A": "1", "B": "policy:unheard-of"}
    assert host.environment(planned, processes=4, cores=10) == {
        "OMP_NUM_THREADS": "2", "A": "1", "B": "policy:unheard-of",
    }  # fmt: skip
    assert host.environment(planned, processes=4, cores=1)["OMP_NUM_THREADS"] == "1"


def test_processes_killed_for_memory_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    monkeypatch.setattr(host, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    assert host.out_of_memory_kills() == 0
    (tmp_path / "job" / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert host.out_of_memory_kills() == 2
