"""The process environment of a run: set before Python starts, part of the plan.

Sources: Megatron-LM's and Megatron-Bridge 0.6.2's recipes; megatron-core 0.19.2 arguments.py
(CUDA_DEVICE_MAX_CONNECTIONS); TE 2.20 (CUDNN_HOME, NVTE_*).
"""

from __future__ import annotations

from planning.hardware import GPUS
from planning.schema import HardwareConfig, LayoutConfig

# Looked up where torchrun is started (launch/machine.py): the folder of torch's own cuDNN package.
TORCH_CUDNN = "policy:torch-cudnn"


def build(hardware: HardwareConfig, layout: LayoutConfig) -> dict[str, str]:
    """Variables of every worker. Layout and hardware are complete (nothing None)."""
    gpu = GPUS[hardware.gpu or "cpu"]
    if gpu.is_cpu:
        # One process computes with all cores it is given; oversubscription is slower.
        return {"OMP_NUM_THREADS": "policy:cores-per-process", "CUDA_VISIBLE_DEVICES": ""}
    fsdp = layout.sharding in ("fsdp", "fsdp2")
    split = (layout.tensor_parallel or 1) > 1 or (layout.context_parallel or 1) > 1
    environment = {
        # Hopper launches TP/CP communication before compute only with a single queue; Blackwell
        # and FSDP want many.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1" if split and not gpu.is_blackwell and not fsdp else "32",
        # Fragmentation ended runs with a third of the memory free.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        # Two cuDNNs on a machine: TE would take the wrong one and fall back to unfused attention.
        "CUDNN_HOME": TORCH_CUDNN,
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "OMP_NUM_THREADS": "8",
    }
    if gpu.is_blackwell:
        environment |= {
            "TORCH_NCCL_HIGH_PRIORITY": "1",
            "NVTE_FWD_LAYERNORM_SM_MARGIN": "20",
            "NVTE_BWD_LAYERNORM_SM_MARGIN": "20",
        }
    if layout.cuda_graph == "full":
        # With expandable segments NCCL's registered buffers move under a graph (arguments.py).
        environment["NCCL_GRAPH_REGISTER"] = "0"
    if (layout.pipeline_parallel or 1) > 1:
        environment["NCCL_P2P_NET_CHUNKSIZE"] = "2097152"
    return environment
