"""Matrix products, their casts, and attention, as Transformer Engine and Megatron call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.kernel_timing import BF16, Row, copies_of, out_of_time, random, timed

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
