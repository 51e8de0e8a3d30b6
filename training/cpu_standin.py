"""Megatron-Core 0.19.2's own training loop on a machine without a GPU, over gloo.

Megatron calls torch.cuda throughout. `install` answers those calls for the CPU: devices, streams,
memory, random numbers, collectives that gloo lacks, and half-precision products. It changes
nothing where torch.cuda is available. All changes are plain attributes, because a
TorchFunctionMode does not apply inside backward, and each is an object of its own, because
torch._dynamo.trace_rules asserts that no function is registered twice.

Line numbers are of Megatron-Core 0.19.2 and torch 2.11.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import resource
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch.distributed import device_mesh
from torch.utils.data import dataloader

from training import megatron_fixes

CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Prepare this process for Megatron on a CPU. Call it before anything imports Megatron.

    Does nothing where torch.cuda is available or when called again. Raises RuntimeError if
    Megatron or Transformer Engine is imported already: what they read at import stays.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    early = [name for name in ("megatron.core", *_BLOCKED) if sys.modules.get(name)]
    if early:
        raise RuntimeError(f"cpu_standin.install() must come before the import of {early[0]}")
    _installed = True
    _block_gpu_packages()
    _skip_compilation()
    _answer_devices()
    _answer_streams()
    _answer_memory()
    _answer_random()
    _answer_availability()
    _answer_meshes()
    _answer_reductions()
    _part_coalesced()
    _emulate_half_gemms()
    _fix_megatron()


# --- packages ---------------------------------------------------------------------------------

_BLOCKED = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")


def _block_gpu_packages() -> None:
    """Megatron takes its optimizer, norms and attention from these when they import, and they
    need a GPU when called: a CPU run is the same with or without them installed."""
    for name in _BLOCKED:
        sys.modules[name] = None  # type: ignore[assignment]  # import raises ModuleNotFoundError


def _skip_compilation() -> None:
    """Megatron compiles its fusions (core/jit.py:21). On a CPU that takes a compiler and a minute
    of start-up for no speed, so its functions stay as they are; others may compile theirs."""
    torch_compile = torch.compile

    def compile_(model: Any = None, **kwargs: Any) -> Any:
        if not _caller().startswith("megatron."):
            return torch_compile(model, **kwargs)
        return (lambda function: function) if model is None else model

    torch.compile = compile_  # type: ignore[assignment]


# --- devices ----------------------------------------------------------------------------------

_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like "
    "rand rand_like randint randint_like randn randn_like randperm scalar_tensor tensor zeros "
    "zeros_like"
)
_TENSOR_FACTORIES = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"


def _is_cuda(device: object) -> bool:
    """True for "cuda", "cuda:0", torch.device("cuda") and 0, which all mean a GPU to torch."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _constant(value: Any = None) -> Callable[..., Any]:
    """A new function that takes anything and returns `value`."""
    return lambda *args, **kwargs: value


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with `device=<a GPU>` read as the CPU."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return function(*args, **kwargs)

    return wrapper


def _answer_devices() -> None:
    for name in _FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _TENSOR_FACTORIES.split():
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    tensor_to, tensor_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return tensor_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizers compare with 'torch.cuda.FloatTensor' (optimizer/optimizer.py:1009,
        # distrib_optimizer.py:401, clip_grads.py:174); torch itself gets the true name.
        answer = tensor_type(self, *args, **kwargs)
        if isinstance(answer, str) and _caller().startswith("megatron."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = _constant()  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]

    cuda = torch.cuda
    cuda.current_device = _constant(0)
    cuda.device_count = _constant(1)  # training/initialize.py:358 builds no groups at 0
    cuda.get_device_name = _constant("cpu")
    # Below every architecture that Megatron gates a feature on, and at the one place where a
    # lower one asks for more (training/arguments.py:1414, launch order of CUDA kernels), 10.
    cuda.get_device_capability = _constant((0, 0))
    cuda.get_device_properties = lambda *args: SimpleNamespace(
        name="cpu",
        major=10,
        minor=0,
        multi_processor_count=1,
        total_memory=psutil.virtual_memory().total,
        uuid="cpu",
    )
    for name in (
        "init",
        "_lazy_init",
        "set_device",
        "synchronize",
        "empty_cache",
        "ipc_collect",
    ):
        setattr(cuda, name, _constant())
    cuda.device = lambda *args: contextlib.nullcontext()  # type: ignore[misc, assignment]


def _caller() -> str:
    """Module of the function that called the function that calls this."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def _answer_availability() -> None:
    """True only for the assertion that training starts with (training/initialize.py:66):
    everything else asks in order to choose a GPU path."""
    torch.cuda.is_available = lambda: _caller() == "megatron.training.initialize"


# --- streams and events -----------------------------------------------------------------------


class _Event:
    """A CUDA event on a device where every call has finished when it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


class _Stream(_Event):
    """A CUDA stream on such a device; the order of calls is the order of execution."""

    cuda_stream = 0
    device = CPU

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> _Event:
        return _Event()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -1)


def _answer_streams() -> None:
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream = _Event, _Stream
    cuda.current_stream, cuda.default_stream = (
        _constant(_Stream()),
        _constant(_Stream()),
    )
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_stream = _constant()
    cuda.is_current_stream_capturing = _constant(False)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _constant(), _constant()


# --- memory -----------------------------------------------------------------------------------


def _resident_bytes(*args: Any, **kwargs: Any) -> int:
    return int(psutil.Process().memory_info().rss)


def _peak_resident_bytes(*args: Any, **kwargs: Any) -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): KiB on Linux
    return max(peak * unit, _resident_bytes())


def _answer_memory() -> None:
    """Memory of the GPU becomes the resident memory of the process, in bytes; its peak cannot be
    reset, so it is that of the whole process."""
    cuda: Any = torch.cuda
    for name in ("memory_allocated", "memory_reserved", "device_memory_used"):
        setattr(cuda, name, lambda *args, **kwargs: _resident_bytes())
    for name in ("max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: _peak_resident_bytes())

    def memory_stats(*args: Any, **kwargs: Any) -> defaultdict[str, int]:
        now, peak = _resident_bytes(), _peak_resident_bytes()
        known = {
            f"{kind}_bytes.all.{when}": value
            for kind in ("allocated", "reserved", "active")
            for when, value in (("current", now), ("peak", peak))
        }
        return defaultdict(int, known)

    def mem_get_info(*args: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    cuda.memory_stats, cuda.mem_get_info = memory_stats, mem_get_info
    cuda.reset_peak_memory_stats = _constant()


# --- random numbers ---------------------------------------------------------------------------


def _answer_random() -> None:
    """The GPU's generator is the CPU's default one: dropout and initialisation draw from it, so
    Megatron's tracker (tensor_parallel/random.py) must save and set that one."""
    generator = torch.default_generator
    modules: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
    for module in modules:
        module.manual_seed = lambda seed: generator.manual_seed(seed)
        module.manual_seed_all = lambda seed: generator.manual_seed(seed)
        module.get_rng_state = lambda device="cuda": generator.get_state()
        module.set_rng_state = lambda state, device="cuda": generator.set_state(state)
    torch.cuda.default_generators = (generator,)
    torch.cuda._lazy_call = lambda callback, **kwargs: callback()  # random.py:172
    iterator: Any = dataloader._BaseDataLoaderIter
    start = iterator.__init__

    def start_without_drawing(self: Any, loader: Any) -> None:
        # It draws a seed for its workers from the default generator, which on a GPU is not the
        # one of dropout: a resumed run would be one draw ahead of the run that it continues.
        state = generator.get_state()
        start(self, loader)
        generator.set_state(state)

    iterator.__init__ = start_without_drawing
    # random.py:331 warns at each dropout that the CPU's generator moved, as it should here.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in str(record.msg)
    )


# --- collectives ------------------------------------------------------------------------------


def _answer_meshes() -> None:
    """A mesh of GPUs is one of CPUs (distributed/torch_fully_sharded_data_parallel.py:81,
    distributed/fsdp/mcore_fsdp_adapter.py)."""
    mesh: Any = device_mesh.DeviceMesh
    init, from_group = mesh.__init__, mesh.from_group

    def mesh_init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if _is_cuda(device_type) else device_type, *args, **kwargs)

    def mesh_from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        device_type = "cpu" if _is_cuda(device_type) else device_type
        return from_group(group, device_type, *args, **kwargs)

    mesh.__init__ = mesh_init
    mesh.from_group = staticmethod(mesh_from_group)


class _PremulSum:
    """NCCL's sum of the ranks' tensors, each multiplied by `factor`."""

    def __init__(self, factor: float | torch.Tensor) -> None:
        self.factor = factor


def _answer_reductions() -> None:
    """Gloo has neither AVG (transformer/moe/moe_logging.py:284, finalize_model_grads.py:405) nor
    PREMUL_SUM (distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:4748): scale, then sum.
    """
    distributed: Any = torch.distributed
    distributed._make_nccl_premul_sum = _PremulSum
    reduce_scatter_tensor, all_reduce = distributed.reduce_scatter_tensor, distributed.all_reduce
    plain_sum, average = distributed.ReduceOp.SUM, distributed.ReduceOp.AVG

    def factor_of(op: Any, group: Any) -> float | torch.Tensor | None:
        if isinstance(op, _PremulSum):
            return op.factor
        return 1 / distributed.get_world_size(group) if op == average else None

    def scaled_all_reduce(
        tensor: torch.Tensor, op: Any = plain_sum, group: Any = None, async_op: bool = False
    ) -> Any:
        if (factor := factor_of(op, group)) is not None:
            tensor.detach().mul_(factor)
            op = plain_sum
        return all_reduce(tensor, op, group, async_op)

    def scaled_reduce_scatter(
        output: torch.Tensor,
        input: torch.Tensor,  # torch's name
        op: Any = plain_sum,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if (factor := factor_of(op, group)) is not None:
            input, op = input.detach() * factor, plain_sum
        return reduce_scatter_tensor(output, input, op, group, async_op)

    distributed.all_reduce = scaled_all_reduce
    distributed.reduce_scatter_tensor = scaled_reduce_scatter


def _part_coalesced() -> None:
    """Collectives that Megatron coalesces (distributed/param_and_grad_buffer.py, Megatron-FSDP's)
    go one by one: gloo's coalesced all-gather overwrites freed memory when two are in flight, which
    ends one process in five with Megatron-FSDP, somewhere else each time.
    """
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d

    @contextlib.contextmanager
    def one_by_one(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        group = group or c10d._get_default_group()
        manager = c10d._CoalescingManager()
        recorded = c10d._world.pg_coalesce_state.setdefault(group, [])
        try:
            yield manager
        finally:  # torch's functions record instead of running while a list stands here
            del c10d._world.pg_coalesce_state[group]
        for call in recorded:
            reduction = {"op": call.redop} if call.redop is not None else {}
            tensors = [call.tensor] if call.dst_tensor is None else [call.dst_tensor, call.tensor]
            manager.append(call.op(*tensors, **reduction, group=group, async_op=True))
        if not async_ops:
            manager.wait()

    distributed: Any = torch.distributed
    distributed._coalescing_manager = c10d._coalescing_manager = one_by_one


# --- products of half-precision matrices ------------------------------------------------------

HALF_GEMM = "SLIPWAY_HALF_GEMM"  # "emulate" or "native" instead of what the CPU is
_GEMMS = ("mm", "bmm", "addmm", "baddbmm")  # linear, matmul, einsum and their gradients end here
_gemm_kernels: list[torch.library.Library] = []  # a registration lives as long as its library


def emulates_half_gemms(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether products of `dtype` matrices are computed in FP32 and rounded here, because this CPU
    has no instructions for them.

    GFLOP/s of 512 x 512 x 512 on one core of a Xeon with AMX, oneDNN held to each instruction set:
    FP32 125; BF16 330 to 900 with AMX, 76 with AVX512-BF16, 27 with AVX-512 alone, 2 with AVX2;
    FP16 115 with AVX512-FP16, else 2. FP32 with its rounding 110. A step of gpt_tiny on two cores
    held to AVX2: 2.42 s in native BF16, 0.25 s emulated, 0.22 s in FP32.
    """
    if (choice := os.environ.get(HALF_GEMM)) is not None:
        if choice not in ("emulate", "native"):
            raise ValueError(f"{HALF_GEMM}={choice}: take 'emulate' or 'native'")
        return choice == "emulate"
    mkldnn: Any = torch.ops.mkldnn
    if dtype == torch.float16:
        return not mkldnn._is_mkldnn_fp16_supported()
    # oneDNN says yes for AVX-512 alone, so ask for the instructions as well. torch.cpu knows those
    # of x86 only, and every x86 CPU with AMX has them; on ARM the first answer is about them.
    arm = platform.machine() in ("aarch64", "arm64")
    return not (
        mkldnn._is_mkldnn_bf16_supported() and (arm or torch.cpu._is_avx512_bf16_supported())
    )


def _emulate_half_gemms() -> None:
    """Below autograd, so that gradients are computed in the same way."""
    dtypes = {d for d in (torch.bfloat16, torch.float16) if emulates_half_gemms(d)}
    if not dtypes:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced
        for name in _GEMMS:
            library.impl(name, _emulated(name, dtypes), "CPU", with_keyset=True)
            library.impl(f"{name}.out", _emulated_out(name, dtypes), "CPU", with_keyset=True)
    _gemm_kernels.append(library)


def _widened(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.float() if isinstance(x, torch.Tensor) else x for x in arguments)


def _emulated(name: str, dtypes: set[torch.dtype]) -> Callable[..., torch.Tensor]:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def gemm(keys: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if (dtype := args[0].dtype) not in dtypes:
            return kernel.call_boxed(keys, *args, **kwargs)
        return kernel.call_boxed(keys, *_widened(args), **kwargs).to(dtype)

    return gemm


def _emulated_out(name: str, dtypes: set[torch.dtype]) -> Callable[..., torch.Tensor]:
    kernel = torch.library.get_kernel(f"aten::{name}.out", "CPU")
    functional = torch.library.get_kernel(f"aten::{name}", "CPU")

    def gemm_out(keys: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if args[0].dtype not in dtypes:
            return kernel.call_boxed(keys, *args, out=out, **kwargs)
        result = functional.call_boxed(keys, *_widened(args), **kwargs)
        return out.resize_(result.shape).copy_(result)

    return gemm_out


# --- Megatron ---------------------------------------------------------------------------------


def _fix_megatron() -> None:
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.training import initialize

    megatron_fixes.apply()
    # initialize.py:491 runs the compiled fusions once. Nothing is compiled here, and its random
    # inputs, as many as the layout's slices hold, would make the weights depend on the layout.
    initialize._warmup_jit_function = _constant()

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # moe_utils.py:1184 makes NumPy of a GPU's tensor only; all_to_all_single wants no tensors.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = move_to_cpu
