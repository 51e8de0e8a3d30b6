"""Roots that a plan names where a machine has paths of its own. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping


def expand(text: str, roots: Mapping[str, str]) -> str:
    """`run:/checkpoints` -> `/where/the/run/is/checkpoints`; text without a root stays as it is.

    A root may have others inside it, which go elsewhere (`run:/tensorboard`): the longest counts.
    """
    for root in sorted(roots, key=len, reverse=True):
        if text == root or text.startswith(root + "/"):
            return roots[root] + text[len(root) :]
    return text
