"""Times of the kernels that a training step is made of, on one GPU.

    python benchmarks/kernels.py OUT [SECTION ...]

Writes OUT/kernels.json: the card and the versions, and a list of rows per section. Every time is
the median of replays of a CUDA graph (of the eager call where it cannot be captured: `eager`), on
random data in buffers that do not stay in the cache. Megatron's and Transformer Engine's own
functions are called where they exist. planning/ takes its efficiency curves from this file.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ |= {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}

import torch

Row = dict[str, Any]
LIMIT_S = 140.0  # no section starts a new row after it
CACHE_BYTES = 2e8  # buffers are rotated until they exceed it: four times the L2 cache of an H200
REPLAY_S, REPLAYS = 0.008, 3
BEGAN = time.monotonic()
BF16 = torch.bfloat16


def out_of_time() -> bool:
    return time.monotonic() - BEGAN > LIMIT_S


def timed(call: Callable[[int], object], copies: int = 1) -> Row:
    """{"s": seconds of call(i), "eager": ...}; `i` counts 0..copies-1, one set of buffers each."""
    call(0)
    torch.cuda.synchronize()
    once = events(lambda: call(0))
    repeats = max(1, min(64, int(REPLAY_S / max(once, 1e-6))))
    # A short call's eager time is the launch's: capture more of it.
    repeats = max(repeats, copies) if once < REPLAY_S else repeats

    def batch() -> None:
        for i in range(repeats):
            call(i % copies)

    graph = capture(call, batch)
    run = graph.replay if graph else batch
    run()
    times = [events(run) / repeats for _ in range(REPLAYS)]
    return {"s": statistics.median(times), "eager": graph is None}


def capture(
    call: Callable[[int], object], batch: Callable[[], None]
) -> torch.cuda.CUDAGraph | None:
    """A graph of `batch`, warmed up by `call`; None: it cannot be captured.

    torch.cuda.graph would empty the allocator's cache first, which costs more than most rows here.
    """
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        try:
            call(0)
            torch.cuda.synchronize()
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                batch()
            finally:
                graph.capture_end()
        except Exception:
            graph = None
    torch.cuda.synchronize()
    return graph


def events(run: Callable[[], object]) -> float:
    """Seconds between two events on the stream around `run`."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


def copies_of(size: float) -> int:
    """How many sets of buffers of `size` bytes exceed the cache."""
    return max(1, min(8, int(CACHE_BYTES / size) + 1))


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda") * scale


# ---------------------------------------------------------------------------------- device


def device() -> Iterator[Row]:
    """Copies, the sustained GEMM rate against a burst's, and what a launch costs the host."""
    for mib in (64, 512, 4096):
        source = random(mib * 2**19)
        target = torch.empty_like(source)
        row = timed(lambda _, a=source, b=target: b.copy_(a))
        yield {"what": "copy", "bytes": 2 * mib * 2**20} | row
    a, b = random(8192, 8192), random(8192, 8192, scale=0.02)
    out = torch.empty_like(a)
    yield {"what": "matmul 8192^3, burst"} | timed(lambda _: torch.matmul(a, b, out=out))
    ends = time.monotonic() + 3.0
    while time.monotonic() < ends:
        rate = events(lambda: [torch.matmul(a, b, out=out) for _ in range(100)]) / 100
    yield {"what": "matmul 8192^3, after 3 s of it", "s": rate, "eager": True}
    small = random(1024)
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(2000):
            small.add_(1.0)
        host = (time.perf_counter() - began) / 2000
    torch.cuda.synchronize()
    yield {"what": "launch, host", "s": host, "eager": True}


# ---------------------------------------------------------------------------------- GEMMs

TOKENS = (2048, 8192, 16384, 65536)
# hidden, FFN, (query + key/value) width: of the shapes that conf/model has, and around them.
BLOCKS = ((1024, 4096, 1536), (2048, 8192, 3072), (4096, 14336, 6144), (5120, 17408, 7168),
          (8192, 28672, 10240), (16384, 53248, 18432))  # fmt: skip
VOCABULARIES = ((32768, 2048), (128256, 2048), (128256, 4096), (151936, 5120), (128256, 8192))
LARGEST_GEMM = 1.3e13  # FLOP: 20 ms


def linear_shapes() -> list[tuple[int, int, int]]:
    """(tokens, n outputs, k inputs)."""
    shapes = [
        (tokens, n, k)
        for tokens in TOKENS
        for hidden, ffn, qkv in BLOCKS
        for n, k in ((qkv, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn))
    ]
    # Slices under tensor parallelism: few outputs, or few inputs.
    shapes += [(8192, n, k) for n in (512, 1024, 2048) for k in (2048, 4096, 8192)]
    shapes += [(8192, n, k) for n in (2048, 4096, 8192) for k in (256, 512, 1024)]
    unique = sorted(set(shapes))
    return [(t, n, k) for t, n, k in unique if 2 * t * n * k <= LARGEST_GEMM]


def quantizers(recipe: str) -> tuple[Any, Any, Any]:
    """Transformer Engine's, of a layer's input, weight and output gradient."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import (
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
    )

    e4m3, e5m2 = tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2
    both = {"rowwise": True, "columnwise": True}
    if recipe == "current":
        gpu = torch.device("cuda")
        return tuple(Float8CurrentScalingQuantizer(t, gpu, **both) for t in (e4m3, e4m3, e5m2))
    if recipe == "delayed":
        one, zero = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
        return tuple(Float8Quantizer(one, zero, t, **both) for t in (e4m3, e4m3, e5m2))
    return tuple(Float8BlockQuantizer(e4m3, block_scaling_dim=d, **both) for d in (1, 2, 1))


def gemms(recipe: str, shapes: list[tuple[int, int, int]]) -> Iterator[Row]:
    """The three GEMMs of a linear layer as Transformer Engine calls them."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    made = quantizers(recipe) if recipe != "bf16" else None
    # More exact sums (TE common/recipe): in the backward GEMMs, with blocks in all.
    split_forward, split_backward = recipe == "blockwise", recipe != "bf16"
    for tokens, n, k in shapes:
        if out_of_time():
            return
        element = 2 if made is None else 1
        copies = copies_of(element * (tokens * (n + k) + n * k) + 2 * tokens * n)
        sets = []
        for _ in range(copies):
            x, w, dy = random(tokens, k), random(n, k, scale=0.02), random(tokens, n, scale=1e-3)
            operands = (x, w, dy)
            if made is not None:
                operands = tuple(q(t) for q, t in zip(made, operands, strict=True))
            sets.append(operands)
            del x, w, dy, operands
        calls: dict[str, Callable[[int], object]] = {
            "fprop": lambda i, s=sets: general_gemm(
                s[i][1], s[i][0], out_dtype=BF16, use_split_accumulator=split_forward
            ),
            "dgrad": lambda i, s=sets: general_gemm(
                s[i][1], s[i][2], out_dtype=BF16, layout="NN", grad=True,
                use_split_accumulator=split_backward,
            ),
            "wgrad": lambda i, s=sets: general_gemm(
                s[i][0], s[i][2], out_dtype=BF16, layout="NT", grad=True,
                use_split_accumulator=split_backward,
            ),
        }  # fmt: skip
        for kind, call in calls.items():
            yield {"format": recipe, "pass": kind, "tokens": tokens, "n": n, "k": k} | timed(
                call, copies
            )
        del sets, calls


def gemm_bf16() -> Iterator[Row]:
    yield from gemms("bf16", linear_shapes())


def gemm_fp8_current() -> Iterator[Row]:
    """Per tensor scales: the same GEMM with current and with delayed scaling."""
    yield from gemms("current", linear_shapes())


def gemm_fp8_blockwise() -> Iterator[Row]:
    wide = [s for s in linear_shapes() if s[0] in (8192, 16384) and s[2] >= 2048 and s[1] >= 2048]
    yield from gemms("blockwise", wide)


def head() -> Iterator[Row]:
    """The output layer: Megatron calls torch.matmul in BF16 (tensor_parallel/layers.py)."""
    for tokens in (4096, 8192, 16384):
        for vocabulary, hidden in VOCABULARIES:
            if 2 * tokens * vocabulary * hidden > 2 * LARGEST_GEMM or out_of_time():
                continue
            x, w = random(tokens, hidden), random(vocabulary, hidden, scale=0.02)
            dy = random(tokens, vocabulary, scale=1e-3)
            shape = {"tokens": tokens, "n": vocabulary, "k": hidden}
            for kind, call in (
                ("fprop", lambda _, x=x, w=w: torch.matmul(x, w.t())),
                ("dgrad", lambda _, dy=dy, w=w: dy.matmul(w)),
                ("wgrad", lambda _, dy=dy, x=x: dy.t().matmul(x)),
            ):
                yield {"format": "bf16", "pass": kind} | shape | timed(call)


def quantize() -> Iterator[Row]:
    """Cast with transpose of an activation of 8192 tokens, amax included where there is one."""
    for recipe in ("current", "delayed", "blockwise"):
        made = quantizers(recipe)
        for width in (2048, 4096, 14336):
            for kind, quantizer in zip(("input", "weight"), made, strict=False):
                copies = copies_of(2 * 8192 * width)
                x = [random(8192, width) for _ in range(copies)]
                row = timed(lambda i, q=quantizer, x=x: q(x[i]), copies)
                yield {"format": recipe, "what": kind, "elements": 8192 * width} | row


# ---------------------------------------------------------------------------------- attention


HEADS = ((32, 8, 64), (32, 8, 128), (64, 8, 128), (16, 16, 64), (8, 1, 128))
LENGTHS = ((2048, 1), (8192, 1), (32768, 1), (2048, 4), (4096, 2), (8192, 2), (16384, 1))


def attention() -> Iterator[Row]:
    """cuDNN's fused attention through Transformer Engine: causal, grouped queries, [s, b, h, d]."""
    from transformer_engine.pytorch import DotProductAttention

    for number, (heads, groups, dim) in enumerate(HEADS):
        module = DotProductAttention(heads, dim, num_gqa_groups=groups, attn_mask_type="causal")
        for length, batch in LENGTHS if number < 2 else LENGTHS[:3]:
            if out_of_time():
                return
            shape = {"heads": heads, "groups": groups, "dim": dim, "length": length}
            shape |= {"batch": batch}
            q = random(length, batch, heads, dim).requires_grad_()
            k = random(length, batch, groups, dim).requires_grad_()
            v = random(length, batch, groups, dim).requires_grad_()
            dy = random(length, batch, heads * dim)

            def forward(_: int, m: Any = module, x: tuple[Any, ...] = (q, k, v)) -> Any:
                return m(*x)

            def both(
                _: int, f: Any = forward, x: tuple[Any, ...] = (q, k, v), dy: torch.Tensor = dy
            ) -> Any:
                return torch.autograd.grad(f(0), x, dy)

            yield {"pass": "forward"} | shape | timed(forward)
            yield {"pass": "forward and backward"} | shape | timed(both)


# ---------------------------------------------------------------------------------- memory bound


def elementwise() -> Iterator[Row]:
    """Transformer Engine's norm and rotary kernels, embedding, and what DDP does to gradients."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.attention.rope import FusedRoPEFunc

    bf16 = tex.DType.kBFloat16
    for tokens, width in ((8192, 2048), (8192, 4096), (16384, 4096), (8192, 8192), (2048, 1024)):
        copies = copies_of(4 * tokens * width)
        x = [random(tokens, width) for _ in range(copies)]
        dy, gamma = random(tokens, width), random(width)
        shape = {"tokens": tokens, "width": width}
        row = timed(
            lambda i, x=x, g=gamma: tex.rmsnorm_fwd(x[i], g, 1e-5, None, None, bf16, 0, False),
            copies,
        )
        yield {"what": "rmsnorm forward"} | shape | row
        saved = tex.rmsnorm_fwd(x[0], gamma, 1e-5, None, None, bf16, 0, False)[2]
        row = timed(
            lambda i, x=x, g=gamma, dy=dy, s=saved: tex.rmsnorm_bwd(dy, x[i], s, g, 0, False),
            copies,
        )
        yield {"what": "rmsnorm backward"} | shape | row
        row = timed(lambda i, x=x, dy=dy: torch.add(x[i], dy), copies)
        yield {"what": "add"} | shape | row
    frequencies = torch.rand(8192, 1, 1, 128, device="cuda")
    for heads, dim in ((32, 64), (8, 64), (32, 128), (8, 128), (64, 128)):
        packed = random(8192, 1, heads, dim)
        shape = {"tokens": 8192, "width": heads * dim, "dim": dim}
        f = frequencies[..., :dim].contiguous()
        call = lambda _, t=packed, f=f: FusedRoPEFunc.apply(t, f, None, "sbhd")  # noqa: E731
        yield {"what": "rope"} | shape | timed(call)
    for vocabulary, hidden in ((128256, 2048), (128256, 4096)):
        table = random(vocabulary, hidden).requires_grad_()
        ids = torch.randint(0, vocabulary, (1, 8192), device="cuda")
        dy = random(1, 8192, hidden)
        shape = {"tokens": 8192, "width": hidden, "vocabulary": vocabulary}
        lookup = lambda _, t=table, i=ids: torch.nn.functional.embedding(i, t)  # noqa: E731
        yield {"what": "embedding forward"} | shape | timed(lookup)
        yield (
            {"what": "embedding forward and backward"}
            | shape
            | timed(lambda _, f=lookup, t=table, dy=dy: torch.autograd.grad(f(0), t, dy))
        )
    elements = 2**28
    main, gradient = torch.randn(elements, device="cuda"), random(elements)
    for what, call in (
        ("gradient accumulation", lambda _: main.add_(gradient)),
        ("zero FP32", lambda _: main.zero_()),
        ("scale FP32", lambda _: main.mul_(1.0)),
        ("FP32 to BF16", lambda _: gradient.copy_(main)),
        ("check for NaN", lambda _: main.norm()),
        ("add BF16 to BF16", lambda _: gradient.add_(gradient)),
    ):
        yield {"what": what, "elements": elements} | timed(call)


def optimizer() -> Iterator[Row]:
    """Transformer Engine's fused Adam as Megatron's distributed optimizer calls it, norm, clip."""
    from transformer_engine.pytorch.optimizers import (
        FusedAdam,
        multi_tensor_applier,
        multi_tensor_l2norm,
        multi_tensor_scale,
    )

    sizes = [8192 * 4096] * 16 + [4096] * 32
    total = sum(sizes)
    for moments in ("fp32", "bf16"):
        parameters = [torch.nn.Parameter(torch.randn(n, device="cuda")) for n in sizes]
        options: dict[str, Any] = {}
        if moments == "bf16":
            # As in a precision-aware optimizer: BF16 weights with an FP32 copy inside.
            parameters = [torch.nn.Parameter(p.detach().to(BF16)) for p in parameters]
            options = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16, "master_weights": True,
                       "use_decoupled_grad": True}  # fmt: skip
        for p in parameters:
            gradient = torch.randn(p.numel(), device="cuda") * 1e-3
            if moments == "bf16":
                p.decoupled_grad = gradient
            else:
                p.grad = gradient
        adam = FusedAdam(parameters, lr=1e-4, weight_decay=0.1, **options)
        yield {"what": "adam", "moments": moments, "elements": total} | timed(
            lambda _, a=adam: a.step()
        )
        if moments == "fp32":
            gradients = [p.grad for p in parameters]
            flag = torch.zeros(1, dtype=torch.int, device="cuda")
            yield {"what": "norm", "elements": total} | timed(
                lambda _, g=gradients, f=flag: multi_tensor_applier(
                    multi_tensor_l2norm, f, [g], False
                )
            )
            yield {"what": "clip", "elements": total} | timed(
                lambda _, g=gradients, f=flag: multi_tensor_applier(
                    multi_tensor_scale, f, [g, g], 0.5
                )
            )
        del adam, parameters


def compiled() -> Iterator[Row]:
    """Megatron's functions that torch.compile fuses, each compiled for its shape as in a run."""
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
    from megatron.core.fusions.fused_bias_swiglu import swiglu, swiglu_back
    from megatron.core.fusions.fused_cross_entropy import (
        calculate_cross_entropy_loss,
        calculate_gradients,
        calculate_logits_max,
        calculate_predicted_logits,
    )

    for tokens, ffn in ((8192, 8192), (16384, 14336), (8192, 14336), (8192, 28672), (8192, 2048)):
        if out_of_time():
            return
        y, g = random(tokens, 2 * ffn), random(tokens, ffn)
        shape = {"tokens": tokens, "width": ffn}
        yield {"what": "swiglu forward"} | shape | timed(lambda _, y=y: swiglu(y))
        yield {"what": "swiglu backward"} | shape | timed(lambda _, y=y, g=g: swiglu_back(g, y))
        del y, g
    for tokens, vocabulary in ((8192, 128256), (8192, 32768), (16384, 128256)):
        if out_of_time():
            return
        logits = random(tokens, 1, vocabulary)
        target = torch.randint(0, vocabulary, (tokens, 1), device="cuda")
        shape = {"tokens": tokens, "width": vocabulary}
        yield {"what": "loss maximum"} | shape | timed(lambda _, x=logits: calculate_logits_max(x))
        wide, largest = calculate_logits_max(logits)
        yield (
            {"what": "loss exponents"}
            | shape
            | timed(
                lambda _, a=(wide, target, largest, 0, vocabulary): calculate_predicted_logits(*a)
            )
        )
        mask, index, sums, exponents = calculate_predicted_logits(
            wide, target, largest, 0, vocabulary
        )
        del wide
        yield (
            {"what": "loss value"}
            | shape
            | timed(lambda _, a=(exponents, sums): calculate_cross_entropy_loss(*a))
        )
        softmax, loss = calculate_cross_entropy_loss(exponents, sums)
        ones = torch.ones_like(loss)
        yield (
            {"what": "loss gradient"}
            | shape
            | timed(lambda _, a=(softmax, ones, mask, index): calculate_gradients(*a))
        )
        del logits, exponents, softmax
    for width in (2048, 4096):
        x, residual = random(8192, 1, width).requires_grad_(), random(8192, 1, width)
        with torch.enable_grad():
            call = lambda _, x=x, r=residual: bias_dropout_add_fused_train((x, None), r, 0.0)  # noqa: E731
            yield {"what": "residual add", "tokens": 8192, "width": width} | timed(call)


# ---------------------------------------------------------------------------------- whole blocks

SMALL = {"hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 8,
         "num_query_groups": 8, "seq_length": 256}  # fmt: skip
SHAPES = {
    "small": SMALL,
    "1b": {},
    "8b": {"hidden_size": 4096, "ffn_hidden_size": 14336},
}
RECIPES = {"bf16": None, "current": "tensorwise", "delayed": "delayed", "blockwise": "blockwise"}


def blocks() -> Iterator[Row]:
    """Megatron's transformer block as models/ builds it, forward and backward: seconds of a block
    (the difference of models of 4 and 2), eager, on the device, and on the host that launches it;
    for the larger shapes, the kernels of one block."""
    parallel()
    for name, changes in SHAPES.items():
        for recipe in RECIPES:
            for recompute in (False, True) if recipe in ("bf16", "current") else (False,):
                if out_of_time():
                    return
                try:
                    steps = [step_of(changes, recipe, depth, recompute) for depth in (4, 2)]
                except Exception as error:
                    yield {"block": name, "format": recipe, "error": repr(error)[:300]}
                    continue
                row: Row = {"block": name, "format": recipe, "recompute": recompute}
                walls = [wall(step) for step in steps]
                row |= {"s": (walls[0] - walls[1]) / 2, "s_of_2_blocks": walls[1], "eager": True}
                if name != "small" and not recompute:
                    row["kernels"] = kernels(steps[0])
                    row["kernels_of"] = "4 blocks"
                yield row
                del steps


def parallel() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)


def step_of(changes: Row, recipe: str, depth: int, recompute: bool) -> Callable[[], None]:
    """Forward and backward of a model of `depth` blocks and a small vocabulary."""
    import yaml
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.module import Float16Module

    from models.build import build
    from planning.pattern import symbols
    from planning.schema import ModelConfig

    chosen = yaml.safe_load((Path(sys.path[0]) / "conf/model/gpt_1b.yaml").read_text())
    model = ModelConfig.model_validate(chosen | {"num_layers": depth, "vocab_size": 1024} | changes)
    low = {"fp8": "hybrid", "fp8_recipe": RECIPES[recipe]} if RECIPES[recipe] else {}
    if recompute:
        low |= {"recompute_granularity": "full", "recompute_method": "uniform",
                "recompute_num_layers": 2}  # fmt: skip
    config = TransformerConfig(
        num_layers=2 * depth,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=BF16,
        pipeline_dtype=BF16,
        attention_backend=AttnBackend.fused,
        apply_rope_fusion=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        gradient_accumulation_fusion=False,
        is_hybrid_model=True,
        **low,
    )
    pattern = symbols(model.pattern, depth)
    built = Float16Module(config, build(model, config, 1024, pattern, backend="te").cuda())
    tokens = torch.randint(0, 1024, (1, model.seq_length), device="cuda")
    positions = torch.arange(model.seq_length, device="cuda")[None]

    def step() -> None:
        built(tokens, positions, None, labels=tokens).float().mean().backward()
        for p in built.parameters():
            p.grad = None

    return step


def wall(step: Callable[[], None], steps: int = 8) -> float:
    """Median seconds of a step that begins with an idle device and ends with one."""
    times = []
    for _ in range(steps + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def kernels(step: Callable[[], None]) -> list[Row]:
    """The kernels of one step by device time."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    found = [e for e in seen.key_averages() if e.device_type == DeviceType.CUDA]
    found.sort(key=lambda e: -e.self_device_time_total)
    return [
        {"kernel": e.key[:160], "count": e.count, "s": e.self_device_time_total / 1e6}
        for e in found[:45]
    ]


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    f.__name__: f
    for f in (
        device,
        gemm_bf16,
        gemm_fp8_current,
        attention,
        blocks,
        elementwise,
        optimizer,
        quantize,
        head,
        compiled,
        gemm_fp8_blockwise,
    )
}  # fmt: skip


def main(out: Path, names: list[str]) -> int:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"],
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/kernels.py OUT",
        "card": torch.cuda.get_device_name(),
        "driver and power limit": driver,
        "cudnn": torch.backends.cudnn.version(),
        "versions": {
            name: version(name)
            for name in ("torch", "transformer-engine", "megatron-core", "nvidia-nccl-cu13")
            if installed(name)
        },
        "sections": {},
        "errors": {},
        "seconds": {},
    }
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    out.mkdir(parents=True, exist_ok=True)
    for name in names or SECTIONS:
        began = time.monotonic()
        rows = result["sections"].setdefault(name, [])
        try:
            for row in SECTIONS[name]():
                rows.append(row)
        except Exception:
            traceback.print_exc()
            result["errors"][name] = traceback.format_exc()[-1500:]
        torch.cuda.empty_cache()
        result["seconds"][name] = round(time.monotonic() - began, 1)
        print(f"{name}: {len(rows)} rows, {result['seconds'][name]} s", flush=True)
        (out / "kernels.json").write_text(json.dumps(result, indent=1))
    return 1 if result["errors"] else 0


def installed(name: str) -> bool:
    try:
        version(name)
    except Exception:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
