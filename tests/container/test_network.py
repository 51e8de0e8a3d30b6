"""The network's variables, by instance type and by what an image holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from container import network

P6 = "ml.p6-b200.48xlarge"


def image(root: Path, *files: str) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


@pytest.mark.parametrize(
    ("folder", "names", "plugin"),
    [
        # AWS's images of Amazon Linux, after the EFA installer on Ubuntu, in NVIDIA's images.
        ("opt/amazon/ofi-nccl/lib64", ["libnccl-net.so"], "libnccl-net.so"),
        (
            "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
            ["libnccl-net.so", "libnccl-net-ofi.so"],
            "libnccl-net-ofi.so",
        ),
        ("opt/amazon/aws-ofi-nccl/lib", ["libnccl-net-ofi.so"], "libnccl-net-ofi.so"),
    ],
)
def test_the_plug_in_is_named_wherever_it_is_installed(
    tmp_path: Path, folder: str, names: list[str], plugin: str
) -> None:
    root = image(tmp_path, *(f"{folder}/{name}" for name in [*names, "libnccl-ofi-tuner.so"]))
    found = network.settings(P6, "eth0", nodes=2, environ={"LD_LIBRARY_PATH": "/x"}, root=root)
    assert found.problems == ()
    assert found.environment == {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_HUGE_PAGE": "0",
        "NCCL_NET_PLUGIN": str(root / folder / plugin),
        "NCCL_TUNER_PLUGIN": str(root / folder / "libnccl-ofi-tuner.so"),
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "LD_LIBRARY_PATH": f"{root / folder}:/x",
    }


def test_without_a_plug_in_nccl_would_use_tcp(tmp_path: Path) -> None:
    found = network.settings(P6, None, nodes=2, environ={}, root=tmp_path)
    assert "NCCL would use TCP" in found.problems[0]
    assert found.environment["NCCL_SOCKET_IFNAME"] == "^docker,lo,veth"


def test_one_node_without_efa_needs_nothing(tmp_path: Path) -> None:
    found = network.settings(None, "eth0", nodes=1, environ={}, root=tmp_path)
    assert (found.environment, found.unset, found.notes, found.problems) == ({}, (), (), ())


def test_obsolete_variables_of_an_image_go_and_a_runs_own_stay(tmp_path: Path) -> None:
    environ = {"NCCL_PROTO": "simple", "RDMAV_FORK_SAFE": "1", "NCCL_BUFFSIZE": "8388608"}
    found = network.settings(
        None, None, nodes=1, chosen={"NCCL_BUFFSIZE": "4194304"}, environ=environ, root=tmp_path
    )
    assert found.unset == ("NCCL_PROTO", "RDMAV_FORK_SAFE")
    assert any(note.startswith("NCCL_PROTO=simple is taken away") for note in found.notes)
    chosen = {"FI_PROVIDER": "tcp"}
    found = network.settings(P6, None, nodes=1, chosen=chosen, environ={}, root=tmp_path)
    assert "FI_PROVIDER" not in found.environment
    assert "FI_PROVIDER=tcp as the run sets it, not efa" in found.notes


@pytest.mark.parametrize(
    ("driver", "used"),
    [("570.133.20", True), ("580.65.06", True), ("580.95.05", False), ("590.44.01", False)],
)
def test_cuda_compatibility_is_for_older_drivers_only(
    tmp_path: Path, driver: str, used: bool
) -> None:
    root = image(tmp_path, "usr/local/cuda/compat/libcuda.so.580.95.05")
    (root / "usr/local/cuda/compat/libcuda.so.1").symlink_to("libcuda.so.580.95.05")
    version = root / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module  {driver}  Release Build\n")
    found = network.settings(None, None, nodes=1, environ={}, root=root)
    folder = str(root / "usr/local/cuda/compat")
    assert found.environment == ({"LD_LIBRARY_PATH": folder} if used else {})


def test_efa_devices_are_those_of_the_efa_driver(tmp_path: Path) -> None:
    for name, driver in (("rdmap16s0", "efa"), ("rdmap17s0", "efa"), ("mlx5_0", "mlx5_core")):
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        device = tmp_path / "sys/class/infiniband" / name / "device"
        device.mkdir(parents=True)
        (device / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert network.efa_devices(tmp_path) == ["rdmap16s0", "rdmap17s0"]
