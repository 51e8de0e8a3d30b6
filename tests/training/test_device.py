"""A card, its libraries and its attention held against a plan.

Cards are fakes: what torch and Transformer Engine answer on a real one is given. Transformer Engine
itself is real where its packages are at hand (SLIPWAY_TE_SITE).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planning.findings import MachineError
from planning.hardware import GIB
from planning.plan import Plan
from planning.resolve import resolve
from tests.choices import config
from tests.training.runs import ROOT
from training import device, host
from training.events import format_event

SITE = os.environ.get("SLIPWAY_TE_SITE")


def plan(*words: str) -> Plan:
    found = resolve(
        config("model=gpt_160m", "hardware=h200", "training.global_batch_size=8", *words)
    ).plan
    assert found is not None
    return found


def card(name: str = "NVIDIA H200", gib: float = 139.8, free: float = 139.2, count: int = 8) -> Any:
    def init() -> None:
        if not count:
            raise RuntimeError("Found no NVIDIA driver on your system.")

    cuda = SimpleNamespace(
        init=init,
        device_count=lambda: count,
        set_device=lambda index: None,
        get_device_name=lambda index: name,
        mem_get_info=lambda index: (int(free * GIB), int(gib * GIB)),
    )
    return SimpleNamespace(__version__="2.11.0", cuda=cuda)


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        (card(count=0), "torch 2.11.0 cannot use a GPU here: Found no NVIDIA driver"),
        (card(count=3), "the plan starts 8 processes on a node, one a GPU, and torch sees 3 here"),
        (card("NVIDIA B200", 178.3, 178.0), "the plan is for h200, and GPU 3 is NVIDIA B200"),
        (card("NVIDIA L40S"), "the plan is for h200, and GPU 3 is NVIDIA L40S"),
        (card("NVIDIA H200 MIG 1g.18gb", 16.0, 15.9),
         "the plan counts on 139.8 GiB a GPU, and GPU 3 (NVIDIA H200 MIG 1g.18gb) has 16.0 GiB"),
    ],
)  # fmt: skip
def test_another_card_than_planned(monkeypatch: pytest.MonkeyPatch, torch: Any, said: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(MachineError, match=r"hardware.*\n    .") as refusal:
        device._check_card(plan(), torch)
    assert said in str(refusal.value)
    assert refusal.value.exit_status == 3


def test_the_planned_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert device._check_card(plan(), card()) == []
    (warning,) = device._check_card(plan(), card(free=100.0))
    assert warning.startswith("other processes hold 39.8 of 139.8 GiB on GPU 0")
    # A person said which known card this one is like.
    like = plan("hardware=this", "hardware.gpu=h200", "hardware.gpus_per_node=1",
                "hardware.memory_gib=44.7")  # fmt: skip
    assert device._check_card(like, card("NVIDIA L40S", 44.4, 44.0)) == []


def test_variables_that_contradict_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in device.ATTENTION_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    device._check_attention_variables(plan())
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    with pytest.raises(
        MachineError, match="the environment has NVTE_FLASH_ATTN=1, and the plan ne"
    ):
        device._check_attention_variables(plan())
    device._check_attention_variables(plan("hardware.allow_unfused_attention=true"))


def chose(monkeypatch: pytest.MonkeyPatch, backend: str | None) -> None:
    """Transformer Engine's record of its last choice, as its 2.20.2 keeps it."""
    record: dict[str, Any] = {
        f"use_{name}_attention": name == backend for name in ("flash", "fused", "unfused")
    }
    record |= {"attention_params": None, "flash_attention_backend": "2.8.3"}
    module = SimpleNamespace(_attention_backends=record, dpa_utils=None)
    monkeypatch.setattr(device, "_dot_product_attention", lambda: module)
    engine = SimpleNamespace(get_cudnn_version=lambda: 91900)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", engine)


@pytest.mark.parametrize(
    ("backend", "said"),
    [("fused", "fused (cuDNN 9.19.0)"), ("flash", "flash (flash-attn 2.8.3)"), (None, None)],
)
def test_attention_of_the_first_step(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, said: str | None
) -> None:
    chose(monkeypatch, backend)
    assert device.check_attention(plan()) == backend
    assert backend is None or device.describe_attention(backend) == said


def test_unfused_attention_ends_the_run_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    chose(monkeypatch, "unfused")
    with pytest.raises(MachineError, match="unfused it would be several times slower") as refusal:
        device.check_attention(plan())
    assert refusal.value.findings[0].setting == "hardware.allow_unfused_attention"
    assert device.check_attention(plan("hardware.allow_unfused_attention=true")) == "unfused"
    assert device.check_attention(plan("hardware=cpu")) is None


def test_no_attention_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    chose(monkeypatch, None)
    text = "No dot product attention backend is available for the provided inputs."
    with pytest.raises(MachineError, match=text), device.translate_attention_error(plan()):
        raise ValueError(text)
    with pytest.raises(ValueError, match="another"), device.translate_attention_error(plan()):
        raise ValueError("another")


def test_notice_is_a_line() -> None:
    event = {"event": "notice", "text": "attention: fused (cuDNN 9.19.0)"}
    assert format_event(event) == "attention: fused (cuDNN 9.19.0)"


def test_cudnn_folders_and_versions(tmp_path: Path) -> None:
    home = host.torch_cudnn()
    assert home is not None
    installed = metadata.version("nvidia-cudnn-cu13").split(".")
    assert device.cudnn_version(home / "lib") == ".".join(installed[:3])
    assert device.cudnn_version(tmp_path) == "unknown"
    assert device.decode_cudnn_version(8907) == "8.9.7"
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 fe:00 12 /usr/lib/libcudnn_graph.so.9.10.2\n"
        "7f01-7f02 r--p 00000000 fe:00 13 /opt/cu dnn/lib/libcudnn.so.9\n"
        "7f02-7f03 r--p 00000000 fe:00 14 /opt/cu dnn/lib/libcudnn_ops.so.9\n"
        "7f03-7f04 rw-p 00000000 00:00 0\n"
        "7f04-7f05 r-xp 00000000 fe:00 15 /usr/lib/libc.so.6\n"
    )
    assert device.loaded_cudnns(maps) == [Path("/opt/cu dnn/lib"), Path("/usr/lib").resolve()]


REAL = """
import json, os, sys
import torch
from training import device
found = {"version": device.import_engine().__version__}
try:
    device.check_cudnn(torch)
except device.MachineError as refusal:
    found["cudnn"] = str(refusal)
utils = device._dot_product_attention().dpa_utils
utils.get_device_compute_capability = lambda: (9, 0)
shape = utils.AttentionParams(qkv_layout="sbhd_sbhd_sbhd", attn_mask_type="causal")
found["attention"] = device.explain(utils, shape)
found["chosen"] = device.attention_backend()
from transformer_engine.pytorch import quantization
for capability in ((9, 0), (10, 0), (12, 0)):
    quantization.get_device_compute_capability = lambda: capability
    for name in ("FP8", "MXFP8", "NVFP4", "FP8_BLOCK_SCALING"):
        setattr(quantization, f"_{name}_SUPPORT", None)  # it remembers its answers
    found[str(capability)] = [name for name, check in device.format_checks().items() if check()[0]]
print("FOUND " + json.dumps(found))
"""


@pytest.mark.skipif(
    SITE is None and importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not here: set SLIPWAY_TE_SITE to a folder with its packages",
)
def test_real_engine_without_a_gpu(tmp_path: Path) -> None:
    """The names that we use, its answers by card, and a second cuDNN that it loads."""

    def ask(**environment: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", REAL],
            env=os.environ
            | {"PYTHONPATH": f"{ROOT}:{SITE or ''}", "NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"}
            | environment,
            capture_output=True,
            text=True,
        )
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")] or [""]
        assert line, done.stderr[-2000:]
        return json.loads(line.removeprefix("FOUND "))

    home = str(host.torch_cudnn())
    found = ask(CUDNN_HOME=home, LD_LIBRARY_PATH=f"{home}/lib")
    assert "cudnn" not in found
    assert found["attention"] == [
        {"flash": False, "fused": False, "unfused": True},
        ["Disabling FusedAttention due to NVTE_FUSED_ATTN=0"],
    ]
    assert found["chosen"] is None
    hopper = ["delayed", "current", "blockwise"]
    assert found["(9, 0)"] == hopper
    assert found["(10, 0)"] == [*hopper, "mxfp8", "nvfp4"]
    assert found["(12, 0)"] == hopper
    if shutil.which("cc") is None:
        return
    # Another cuDNN, as /usr/local/cuda may hold one: its main library alone is enough to be loaded,
    # and answers with the version of the parts that are loaded already, as real ones do.
    version = device.cudnn_version(Path(home) / "lib")
    major, minor, patch = map(int, version.split("."))
    (tmp_path / "lib").mkdir()
    (tmp_path / "cudnn.c").write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n"
        "long cudnnGetVersion(void) {\n"
        '  return dlopen("libcudnn_graph.so.9", RTLD_LAZY | RTLD_NOLOAD)'
        f" ? {10_000 * major + 100 * minor + patch} : 91801;\n}}\n"
    )
    library = tmp_path / "lib" / "libcudnn.so.9"
    compile_it = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcudnn.so.9", "-o", library]
    subprocess.run([*compile_it, tmp_path / "cudnn.c"], check=True)
    mixed = ask(CUDNN_HOME=str(tmp_path))["cudnn"]
    assert "this process has loaded cuDNN" in mixed
    assert f"9.18.1 from {tmp_path}/lib" in mixed
    assert f"{version} from {home}/lib" in mixed
    assert f"CUDNN_HOME={home}" in mixed
