"""Kernels bound by memory: norms, activations, the loss, gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.kernel_timing import BF16, Row, copies_of, out_of_time, random, timed


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
