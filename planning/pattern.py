"""Transformer blocks as Megatron's hybrid layer pattern.

People count blocks; Megatron's HybridModel counts symbols, one a layer: a block of attention and
MLP is `*-`, two of its layers. The symbols and the meaning of `|` (a pipeline boundary) are those
of megatron/core/models/hybrid/hybrid_layer_allocation.py (0.19.2); a test holds both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from planning.findings import ChoiceError, Finding

MIXERS = {
    "*": "attention",
    "G": "gated delta net",
    "M": "Mamba",
    "D": "DeepSeek sparse attention",
    "+": "multi-latent attention",
}
FEED_FORWARDS = {"-": "MLP", "E": "mixture of experts"}
_LEGAL = ", ".join(f"`{symbol}` {name}" for symbol, name in (MIXERS | FEED_FORWARDS).items())
_SOURCE = "megatron/core/models/hybrid/hybrid_layer_allocation.py"


def _error(setting: str, message: str, fix: str) -> ChoiceError:
    return ChoiceError(Finding("pattern", "error", setting, message, fix, _SOURCE))


def _period_blocks(pattern: str) -> list[str]:
    """The blocks of one period: each a mixer's symbol and that of the feed-forward after it."""
    blocks: list[str] = []
    for position, symbol in enumerate(pattern, start=1):
        if symbol in MIXERS:
            blocks.append(symbol)
        elif symbol not in FEED_FORWARDS:
            hint = (
                "pipeline boundaries follow from layout.pipeline_parallel"
                if symbol == "|"
                else f"the symbols are {_LEGAL}"
            )
            raise _error(
                "model.pattern",
                f"{symbol!r} (symbol {position} of {pattern!r}) stands for no layer",
                hint,
            )
        elif not blocks or len(blocks[-1]) == 2:
            raise _error(
                "model.pattern",
                f"{symbol!r} (symbol {position} of {pattern!r}) has no mixer before it: a block is "
                "one mixer and at most one feed-forward",
                f"put one of {' '.join(MIXERS)} before it",
            )
        else:
            blocks[-1] += symbol
    if not blocks:
        raise _error("model.pattern", "it is empty", f"the symbols are {_LEGAL}")
    if "*" in pattern and ("D" in pattern or "+" in pattern):
        raise _error(
            "model.pattern",
            f"{pattern!r} mixes attention with D or +, which Megatron refuses in one model",
            "use either `*`, or `D` and `+`",
        )
    return blocks


def blocks(pattern: str, num_layers: int) -> list[str]:
    """The `num_layers` blocks of a model whose period is `pattern`, one string of symbols each.

    >>> blocks("G-G-*-", 3)
    ['G-', 'G-', '*-']

    Raises ChoiceError: an unknown symbol, a feed-forward without its mixer, or a period whose
    blocks do not divide `num_layers`.
    """
    period = _period_blocks(pattern)
    if num_layers % len(period):
        below = num_layers // len(period) * len(period)
        legal = [str(n) for n in (below, below + len(period)) if n]
        raise _error(
            "model.num_layers",
            f"{num_layers} blocks are no whole number of periods: {pattern!r} has {len(period)}",
            f"take {' or '.join(legal)}, or another model.pattern",
        )
    return period * (num_layers // len(period))


def symbols(pattern: str, num_layers: int) -> str:
    """All layers of the model in Megatron's symbols, without pipeline boundaries."""
    return "".join(blocks(pattern, num_layers))


def stages[Block](blocks: Sequence[Block], count: int) -> list[list[Block]]:
    """The blocks of each of `count` pipeline segments (PP x VPP of them), in order.

    No block is cut. Segments differ by one block at most. The inner ones get the extra blocks, the
    later first: the first holds the embedding and the most micro-batches in flight, the last
    holds the output layer, the heaviest of all at a large vocabulary. Segment i is on pipeline rank
    i % PP.

    >>> [len(stage) for stage in stages(["*-"] * 6, 4)]
    [1, 2, 2, 1]

    Raises ChoiceError: more segments than blocks.
    """
    if count > len(blocks):
        raise _error(
            "layout.pipeline_parallel",
            f"{count} pipeline segments for {len(blocks)} blocks: each needs at least one",
            f"take at most {len(blocks)} segments (pipeline_parallel x virtual_pipeline_parallel)",
        )
    each, extra = divmod(len(blocks), count)
    longer = [*range(count - 2, 0, -1), 0, count - 1][:extra]
    found: list[list[Block]] = []
    start = 0
    for stage in range(count):
        end = start + each + (stage in longer)
        found.append(list(blocks[start:end]))
        start = end
    return found


@cache
def pipeline_ranks(count: int, pp: int, vpp: int) -> list[list[list[int]]]:
    """The numbers of the blocks of each pipeline rank, by its virtual stages, for `count` blocks.

    >>> pipeline_ranks(4, 2, 2)
    [[[0], [2]], [[1], [3]]]

    Raises ChoiceError: more segments than blocks.
    """
    ranks: list[list[list[int]]] = [[] for _ in range(pp)]
    for index, segment in enumerate(stages(range(count), pp * vpp)):
        ranks[index % pp].append(segment)
    return ranks


def split_stages(blocks: Sequence[str], count: int) -> str:
    """Megatron's pattern with `|` between `count` pipeline segments, as `stages` cuts them.

    >>> split_stages(["*-"] * 5, 3)
    '*-*-|*-*-|*-'
    """
    return "|".join("".join(stage) for stage in stages(blocks, count))


def symbols_in_first_blocks(blocks: Sequence[str], count: int) -> int:
    """Megatron's layers in the first `count` blocks (num_layers_at_start_in_bf16 counts these)."""
    return sum(len(block) for block in blocks[:count])


def symbols_in_last_blocks(blocks: Sequence[str], count: int) -> int:
    """Megatron's layers in the last `count` blocks (num_layers_at_end_in_bf16 counts these)."""
    return sum(len(block) for block in blocks[len(blocks) - min(count, len(blocks)) :])
