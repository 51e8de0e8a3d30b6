"""What a layer computes and sends, forward and backward, in seconds by part.

A micro batch on one rank. Layers are those that models/transformer.py gives Megatron, whose kernels
and passes a profile of an H200 shows (benchmarks/h200/kernels.json, blocks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from planning.communication import Group
from planning.kernels import Kernels
from planning.parameters import GDN_CONV_KERNEL, GDN_HEAD_DIM, GDN_KEY_HEADS, GDN_VALUE_HEADS

PRODUCTS, ATTENTION, OTHER = "matrix products", "attention", "norms, activations, copies"
CASTS = "quantisation"
TENSOR, CONTEXT, EXPERT = "tensor parallel", "context parallel", "expert parallel"
Parts = dict[str, float]


@dataclass(frozen=True)
class Shape:
    """Of one rank's work on a micro batch: sizes as the rank has them, groups that it talks in."""

    tokens: int  # of the micro batch on this context parallel rank
    batch: int
    length: int  # of a sequence, whole
    hidden: int
    ffn: int
    heads: float  # on this rank
    groups: float
    dim: int
    qk_norm: bool
    experts: int
    experts_per_token: int
    expert_ffn: int
    tensor: Group
    sequence_parallel: bool
    context: Group
    expert: Group
    # A block of model.formulas: forward operations a token, bytes a token kept for its backward.
    formula_flops: float = 0.0
    formula_bytes: float = 0.0

    @property
    def tp(self) -> int:
        return self.tensor.size

    @property
    def own_tokens(self) -> float:
        """Tokens of norms and residuals."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens


@dataclass(frozen=True)
class Layer:
    forward: Parts
    backward: Parts
    core_forward: float  # of `forward`: attention alone, or the experts

    def plus(self, other: Layer) -> Layer:
        return Layer(
            add(self.forward, other.forward),
            add(self.backward, other.backward),
            self.core_forward + other.core_forward,
        )


def add(*parts: Mapping[str, float]) -> Parts:
    found: Parts = {}
    for each in parts:
        for name, s in each.items():
            found[name] = found.get(name, 0.0) + s
    return found


class _Linear:
    """A linear layer of Transformer Engine: its products and the casts of its operands."""

    def __init__(self, k: Kernels, shape: Shape, format: str, recipe: str) -> None:
        self.k, self.s, self.format, self.recipe = k, shape, format, recipe

    def forward(self, inputs: float, outputs: float) -> Parts:
        k, tokens = self.k, self.s.tokens
        return {
            PRODUCTS: k.gemm(self.format, "forward", tokens, outputs, inputs),
            CASTS: k.cast(self.recipe, tokens * inputs),
        }

    def backward(self, inputs: float, outputs: float) -> Parts:
        k, tokens = self.k, self.s.tokens
        return {
            PRODUCTS: k.gemm(self.format, "dgrad", tokens, inputs, outputs)
            + k.gemm(self.format, "wgrad", outputs, inputs, tokens),
            CASTS: k.cast(self.recipe, tokens * outputs),
        }


def _norm(k: Kernels, s: Shape) -> tuple[Parts, Parts]:
    """RMSNorm and the residual sum, and their gradients."""
    size = 2 * s.own_tokens * s.hidden
    forward = k.move("norm forward", 2 * size) + k.move("add", 3 * size)
    backward = k.move("norm backward", 3 * size) + k.move("add", 3 * size)
    return {OTHER: forward}, {OTHER: backward}


def _tensor(s: Shape) -> tuple[Parts, Parts]:
    """Collectives around a column parallel and a row parallel layer.

    With sequence parallel the backward pass gathers the input again beside the products for its
    gradient, and scatters that beside those for the weight's: both are hidden.
    """
    size = 2.0 * s.tokens * s.hidden
    if s.tp == 1:
        return {}, {}
    if s.sequence_parallel:
        return {TENSOR: 2 * s.tensor.gather(size)}, {TENSOR: s.tensor.gather(size)}
    return {TENSOR: s.tensor.reduce(size)}, {}


def _attention(k: Kernels, s: Shape, linear: _Linear) -> Layer:
    query, key_value = s.heads * s.dim, 2 * s.groups * s.dim
    cp = s.context.size
    length = s.length / cp
    pairs = s.length * length / 2
    core = {kind: k.attention(kind, length, pairs, s.heads, s.dim, s.batch)
            for kind in ("forward", "backward")}  # fmt: skip
    # Keys and values go around the ring while the last ones are attended to, and their gradients
    # on the way back.
    step = s.context.send(2.0 * s.tokens * key_value)
    ring = {
        "forward": max(0.0, step - core["forward"] / cp) * (cp - 1),
        "backward": max(0.0, 2 * step - core["backward"] / cp) * (cp - 1),
    }
    merge = k.move("copy", 12.0 * s.tokens * query) * (cp - 1)
    # Queries are copied out of the joint projection, rotated with the keys, values copied.
    rotate = k.move("rope", 4.0 * s.tokens * (query + key_value / 2))
    split = k.move("copy", 4.0 * s.tokens * (query + key_value / 2))
    join = k.move("copy", 4.0 * s.tokens * (query + key_value))
    qk_norm = 0.0
    if s.qk_norm:
        size = 2.0 * s.tokens * (query + key_value / 2)
        qk_norm = k.move("norm forward", 2 * size)
    norm_forward, norm_backward = _norm(k, s)
    sent_forward, sent_backward = _tensor(s)
    forward = add(
        norm_forward,
        linear.forward(s.hidden, query + key_value),
        {ATTENTION: core["forward"] + merge, OTHER: rotate + split + qk_norm},
        {CONTEXT: ring["forward"]},
        linear.forward(query, s.hidden),
        sent_forward,
    )
    backward = add(
        norm_backward,
        linear.backward(s.hidden, query + key_value),
        {ATTENTION: core["backward"] + merge, OTHER: rotate + join + 2 * qk_norm},
        {CONTEXT: ring["backward"]},
        linear.backward(query, s.hidden),
        sent_backward,
    )
    return Layer(forward, backward, core["forward"] + ring["forward"] + merge)


def _mlp(k: Kernels, s: Shape, linear: _Linear) -> Layer:
    ffn = s.ffn / s.tp
    size = 2.0 * s.tokens * ffn
    norm_forward, norm_backward = _norm(k, s)
    sent_forward, sent_backward = _tensor(s)
    forward = add(
        norm_forward,
        linear.forward(s.hidden, 2 * ffn),
        {OTHER: k.move("swiglu forward", 3 * size)},
        linear.forward(ffn, s.hidden),
        sent_forward,
    )
    backward = add(
        norm_backward,
        linear.backward(s.hidden, 2 * ffn),
        {OTHER: k.move("swiglu backward", 5 * size)},
        linear.backward(ffn, s.hidden),
        sent_backward,
    )
    return Layer(forward, backward, sum(forward.values()))


def _experts(k: Kernels, s: Shape, linear: _Linear) -> Layer:
    """Experts with an all-to-all of tokens before and after them; loads taken as even."""
    ffn = s.expert_ffn / s.tp
    copies = s.own_tokens * s.experts_per_token  # tokens times their experts
    received = copies * s.tp  # gathered over tensor parallel ranks
    local = s.experts / s.expert.size
    rows = received / local
    format, hidden = linear.format, s.hidden

    def products(kinds: tuple[str, ...]) -> float:
        one = 0.0
        for inputs, outputs in ((hidden, 2 * ffn), (ffn, hidden)):
            for kind in kinds:
                shape = {
                    "forward": (rows, outputs, inputs),
                    "dgrad": (rows, inputs, outputs),
                    "wgrad": (outputs, inputs, rows),
                }[kind]
                one += k.gemm(format, kind, *shape)
        return one * local

    routing = k.move("copy", 4.0 * s.own_tokens * s.experts * 6)  # scores, softmax, top k, in FP32
    permute = k.move("copy", 4.0 * copies * hidden)
    size = 2.0 * received * ffn
    norm_forward, norm_backward = _norm(k, s)
    sent = 2 * s.expert.exchange(2.0 * copies * hidden)
    gathered = 2 * s.tensor.gather(2.0 * received * hidden) if s.tp > 1 else 0.0
    forward = add(
        norm_forward,
        {OTHER: routing + 2 * permute + k.move("swiglu forward", 3 * size)},
        {PRODUCTS: products(("forward",)), CASTS: k.cast(linear.recipe, received * (hidden + ffn))},
        {EXPERT: sent, TENSOR: gathered},
    )
    casts = k.cast(linear.recipe, received * (hidden + 2 * ffn))
    backward = add(
        norm_backward,
        {OTHER: 2 * routing + 2 * permute + k.move("swiglu backward", 5 * size)},
        {PRODUCTS: products(("dgrad", "wgrad")), CASTS: casts},
        {EXPERT: sent, TENSOR: gathered},
    )
    return Layer(forward, backward, sum(forward.values()))


def _gated_delta_net(k: Kernels, s: Shape, linear: _Linear) -> Layer:
    """Its rule over chunks is taken at a tenth of the peak: not measured."""
    key = GDN_KEY_HEADS * GDN_HEAD_DIM / s.tp
    value = GDN_VALUE_HEADS * GDN_HEAD_DIM / s.tp
    projected = 2 * key + 2 * value + 2 * GDN_VALUE_HEADS / s.tp
    chunk = 64
    operations = 2.0 * s.tokens * (GDN_VALUE_HEADS / s.tp) * (
        4 * GDN_HEAD_DIM**2 + 4 * chunk * GDN_HEAD_DIM
    )  # fmt: skip
    rule = operations / (0.1 * k.peak)
    convolution = k.move("copy", 4.0 * s.tokens * (2 * key + value) * GDN_CONV_KERNEL / 2)
    norm_forward, norm_backward = _norm(k, s)
    sent_forward, sent_backward = _tensor(s)
    forward = add(
        norm_forward,
        linear.forward(s.hidden, projected),
        {ATTENTION: rule, OTHER: convolution + k.move("norm forward", 4.0 * s.tokens * value)},
        linear.forward(value, s.hidden),
        sent_forward,
    )
    backward = add(
        norm_backward,
        linear.backward(s.hidden, projected),
        {
            ATTENTION: 2.5 * rule,
            OTHER: 2 * convolution + k.move("norm backward", 6.0 * s.tokens * value),
        },
        linear.backward(value, s.hidden),
        sent_backward,
    )
    return Layer(forward, backward, rule)


def _formula(k: Kernels, s: Shape, linear: _Linear) -> Layer:
    """A block that is known by its formulas alone: all operations as those of one product with the
    hidden size, and its activations written once and read twice."""
    outputs = s.formula_flops / (2 * s.hidden) / s.tp
    copies = k.move("copy", s.tokens * s.formula_bytes / s.tp)
    sent_forward, sent_backward = _tensor(s)
    forward = add(linear.forward(s.hidden, outputs), {OTHER: copies}, sent_forward, sent_forward)
    backward = add(linear.backward(s.hidden, outputs), {OTHER: 2 * copies}, sent_backward)
    return Layer(forward, backward, sum(forward.values()))


FORMULA = "formula"
LAYERS = {"*": _attention, "-": _mlp, "E": _experts, "G": _gated_delta_net, FORMULA: _formula}


@cache
def layer(k: Kernels, shape: Shape, symbol: str, format: str, recipe: str) -> Layer:
    """One layer of the pattern. format: of its products, recipe: of its casts ("none" in BF16)."""
    return LAYERS[symbol](k, shape, _Linear(k, shape, format, recipe))


@cache
def head(k: Kernels, shape: Shape, vocabulary: int) -> Layer:
    """The final norm, the output layer in BF16 and the loss over FP32 logits."""
    width = vocabulary / shape.tp
    tokens = shape.tokens
    logits = tokens * width
    size = 2 * shape.own_tokens * shape.hidden
    sent = shape.tensor.gather(2.0 * tokens * shape.hidden) if shape.tp > 1 else 0.0
    forward = {
        PRODUCTS: k.gemm("head", "forward", tokens, width, shape.hidden),
        OTHER: k.move("loss forward", logits) + k.move("norm forward", 2 * size),
        TENSOR: sent,
    }
    backward = {
        PRODUCTS: k.gemm("head", "dgrad", tokens, shape.hidden, width)
        + k.gemm("head", "wgrad", width, shape.hidden, tokens),
        OTHER: k.move("loss backward", logits) + k.move("norm backward", 3 * size),
        TENSOR: sent,
    }
    return Layer(forward, backward, 0.0)
