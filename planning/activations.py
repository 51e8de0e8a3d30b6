"""Bytes that a micro batch keeps on one GPU between its forward and its backward pass.

What each layer saves is read from Transformer Engine 2.20 (pytorch/module/{layernorm_linear,linear}
.py, attention) and Megatron-Core 0.19.2 (transformer_layer.py, fused_bias_swiglu.py, moe/); sizes
were held against an H200 (benchmarks/memory_model.md). Every tensor is counted once, where it is
saved: the residual stream is the saved input of the next layer's norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from planning.formulas import evaluate, fields, head_dim
from planning.parameters import GDN_HEAD_DIM, GDN_KEY_HEADS, GDN_VALUE_HEADS, padded_vocab_size
from planning.rules.base import Facts

# Bytes of one quantised element kept for the weight's gradient, scales included: FP8 has one scale
# a tensor, blockwise an FP32 one for 128, MXFP8 a byte for 32, NVFP4 half a byte and one for 16
# (transformer_engine/pytorch/tensor/storage/).
QUANTISED = {
    "delayed": 1.0,
    "current": 1.0,
    "blockwise": 1.0 + 4 / 128,
    "mxfp8": 1.0 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}


@dataclass(frozen=True)
class Kept:
    """Bytes of one block and micro batch: `whole` without recompute, `input` of the block alone,
    `inputs` of each of its layers, `working` more at the height of its backward pass."""

    whole: float
    input: float
    inputs: float
    working: float


@dataclass(frozen=True)
class Loss:
    """Bytes on the last pipeline rank: `saved` by final norm and loss, and in their backward pass
    the gradients beside it, by tensor."""

    saved: float
    softmax: float
    gradient: float  # of the logits, in FP32
    cast: float  # the same in the type of the parameters
    weight_gradient: float  # of the output layer, before it is added to the accumulated one


class Activations:
    """Of one choice; every size is that of one rank."""

    def __init__(self, facts: Facts) -> None:
        self.f, self.model = facts, facts.config.model
        config = facts.config
        self.element = 4.0 if config.precision.dtype == "fp32" else 2.0
        self.tokens = config.training.micro_batch * self.model.seq_length / facts.cp
        # Norms and the residual stream are split over the sequence, where it is.
        self.own = self.tokens / facts.tp if facts.layout.sequence_parallel else self.tokens
        self._blocks: dict[tuple[str, bool], Kept] = {}

    def block(self, symbols: str, quantised: bool) -> Kept:
        """`quantised`: its linear layers compute in the precision's low format."""
        key = (symbols, quantised)
        if key not in self._blocks:
            self._blocks[key] = self._block(symbols, quantised)
        return self._blocks[key]

    def _block(self, symbols: str, quantised: bool) -> Kept:
        layout = self.f.layout
        recipe = self.f.config.precision.recipe if quantised else "none"
        saved = QUANTISED.get(recipe, self.element)  # bytes of a linear layer's kept input
        stream = self.element * self.model.hidden_size * self.own
        again = set(layout.recompute_modules) if layout.recompute == "selective" else set()
        whole = working = 0.0
        if self.model.formulas is not None:
            # activation_bytes counts BF16.
            value = evaluate(
                self.model.formulas.activation_bytes,
                fields(self.model),
                "model.formulas.activation_bytes",
            )
            kept = float(value) * self.tokens * self.element / 2
            return Kept(kept, stream, stream, stream)
        for symbol in symbols:
            size, work = self._layer(symbol, saved, recipe, again)
            whole += stream + size
            working = max(working, work)
        return Kept(whole, stream, stream * len(symbols), working + 2 * stream)

    def _layer(
        self, symbol: str, saved: float, recipe: str, again: set[str]
    ) -> tuple[float, float]:
        """(kept beside the layer's input, more at the height of its backward pass)."""
        model, tp = self.model, self.f.tp
        hidden, tokens, element = model.hidden_size, self.tokens, self.element
        normed = saved * hidden * self.own  # the first linear layer's input
        if symbol == "-":
            ffn = model.ffn_hidden_size / tp
            inside = (2 * element + saved) * ffn * tokens  # fc1's output, fc2's input
            working = 3 * element * ffn * tokens  # gradients of both
            weight = element * 2 * ffn * hidden
            if "mlp" in again:
                return 0.0, working + weight + normed + inside
            return normed + inside, working + weight
        if symbol == "E":
            return self._experts(saved, again)
        if symbol == "G":
            key, value = GDN_KEY_HEADS * GDN_HEAD_DIM / tp, GDN_VALUE_HEADS * GDN_HEAD_DIM / tp
            # Input projection, convolution's output, the net's output and its gate's product.
            inside = element * tokens * (2 * (2 * key + value) + 3 * value)
            return normed + inside, inside
        query = model.num_attention_heads * head_dim(model) / tp
        groups = max(model.num_query_groups / tp, 1) * head_dim(model)
        inside = element * tokens * (2 * query + 2 * groups)  # query, key, value, and the output
        inside += 4 * tokens * model.num_attention_heads / tp  # the softmax's statistics
        if model.qk_norm:
            inside += element * tokens * (query + groups)
        if recipe == "delayed":
            # Otherwise the projection quantises attention's output again (attention.py,
            # set_save_original_input).
            inside += saved * query * tokens
        return normed + inside, element * tokens * (2 * query + 2 * groups)

    def _experts(self, saved: float, again: set[str]) -> tuple[float, float]:
        model, f = self.model, self.f
        hidden, element = model.hidden_size, self.element
        # Tokens in the local experts, spread evenly.
        routed = self.tokens * (model.experts_per_token or 1) / f.tp
        ffn = model.expert_ffn_hidden_size or model.ffn_hidden_size
        normed = element * hidden * self.own
        router = 4.0 * 3 * (model.num_experts or 1) * self.own  # logits, probabilities, map
        experts = routed * (saved * hidden + 2 * element * ffn)
        act = routed * saved * ffn
        working = routed * element * (3 * ffn + hidden)
        if "moe" in again:
            return normed, working + router + experts + act
        kept = router + experts
        kept += 0.0 if "layernorm" in again else normed
        kept += 0.0 if "moe_act" in again else act
        return kept, working + (act if "moe_act" in again else 0.0)

    def loss(self) -> Loss:
        model, tokens, element = self.model, self.tokens, self.element
        vocabulary = padded_vocab_size(model) / self.f.tp
        stream = element * model.hidden_size * self.own
        # The sequence is gathered for the output layer.
        gathered = element * model.hidden_size * tokens if self.f.layout.sequence_parallel else 0.0
        return Loss(
            saved=2 * stream + gathered,
            softmax=4 * vocabulary * tokens,
            gradient=4 * vocabulary * tokens,
            cast=element * vocabulary * tokens if element < 4 else 0.0,
            weight_gradient=element * vocabulary * model.hidden_size,
        )
